"""Matching: the candidate fusions at each position, and the reasons why others do not apply."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from ..cost_table import Machine, Measurement, table
from ..env import Env, Savings, bucket, rows_of, short, why_no_c
from ..errors import InputError, meant
from ..fusion import MAX_VARIADIC, BackwardFusion, ForwardFusion, FusedOperation, InferenceFusion, Slot
from ..hardware import C_WORTHWHILE
from ..operation import UnfusedOperation
from ..quantized import Quantize
from ..recipes import Recipe
from ..settings import Fusing
from ..traffic import entering
from .described import class_identity, describe, tells_all
from .flatten import Node
from .inputs import Border, along_of
from .quantized import Unquantized
from .schedule import Candidate, Refusal
from .step import Stretch


def refuses_operations(cls: type[FusedOperation], stretch: Stretch, a: int, b: int) -> str | None:
    """Why no fusion of a class applies to operations that derive from those of its pattern, or that are quantized."""
    for node in stretch.nodes[a:b]:
        if node.derives:
            return f"{node.name} derives from {node.derives.__name__}, and only exact types match"
    for p in () if cls.quantized else range(a, b):
        if isinstance(stretch.recipes.get(p), Recipe):
            return f"{stretch.recipes[p]} quantizes {stretch.nodes[p].name} here, which this fusion does not"
    return None


def refuses_dtypes(cls: type[FusedOperation], nodes: Sequence[Node], a: int, around: Sequence[Border]) -> str | None:
    """Why no fusion of a class applies where dtypes change between its operations."""
    if cls.kernels and any(border.taken is None for border in around):
        return "the dtypes here are not known before a call: an operation states no class of autocast"
    for position, border in enumerate(around[1:-1], a + 1):
        if border.cast is not None and not cls.casts:
            return f"x is cast to {str(border.cast).removeprefix('torch.')} inside it, before {nodes[position].name}"
    return None


def refuses_channels(fusion: FusedOperation, nodes: Sequence[Node], a: int, b: int, dead: bool) -> str | None:
    """Why a fusion does not apply where a channel crosses its border: its signatures must name the channel."""
    if not any(node.inputs or node.outputs for node in nodes[a:b]):
        return None
    places = [name.replace(".", "_") for name, _ in fusion.named_operations()]
    inside = {channel for node in nodes[a:b] for _, channel in node.outputs}
    forward, backward = fusion.forward_signature.extras, fusion.backward_signature.extras
    made = False
    for place, node in zip(places, nodes[a:b], strict=True):
        for name, channel in node.inputs:
            full = f"{place}_{name}"
            if not fusion.replaces_forward and (channel in inside) != made:
                # A backward fusion has no fwd that could name the input: the pattern determines its source.
                return f"the extra input {full} {'comes' if channel in inside else 'does not come'} from inside it"
            if fusion.replaces_forward and (channel in inside) == (full in forward):
                side = "comes from inside it" if channel in inside else "is not in the signature of its fwd"
                return f"the extra input {full} {side}"
        made = made or bool(node.outputs)
        for name, channel in node.outputs:
            full = f"{place}_{name}"
            readers = nodes[a].readers[channel]
            if readers and readers <= set(range(a, b)):
                continue
            # Integer channels have no gradient.
            whole = name in getattr(node.operation, "integers", ())
            needs_dy = not (whole or getattr(node.operation, "dy_may_be_none", False))
            if isinstance(fusion, ForwardFusion) and needs_dy and not dead and node is not nodes[b - 1]:
                return f"{node.name} needs a gradient of its y, whose shape is not kept where its {full} alone is used"
            if fusion.replaces_forward and full not in fusion.outputs:
                return f"the extra output {full} is read elsewhere and is not among its outputs"
            if fusion.replaces_backward and not dead and f"d_{full}" not in backward:
                return f"the gradient d_{full} arrives from elsewhere and is not in the signature of its bwd"
    return None


Lookup = Callable[[FusedOperation, int, int], Measurement | None]
"""Returns the measurement of a fusion on positions `a..b`, or `None`."""

# A fusion, whether it is a user's, its index in the fusion set, the number of operations of each slot, and their sum.
_Match = tuple[type[FusedOperation], bool, int, tuple[int, ...], int]
# A fusion, a sentence that names the one missing or surplus operation, and the number of operations it would replace.
_Near = tuple[type[FusedOperation], str, int]

MAX_NEAR = 4
"""The longest pattern that is reported as a near miss."""

NEAR = "near miss: "

UNASKED = 'it saves memory and takes longer; memory="lean", "balanced" or a budget may use it'

MAX_FAILURES = 3
"""After so many failures at one position a fusion is not tried there again."""


SMALL = "tensors this small gain nothing from a C kernel"


def is_own(fusion: type[FusedOperation]) -> bool:
    """Whether a fusion is a user's, not this library's."""
    return not fusion.__module__.startswith("seqfuse.")


class Known:
    """Looks up measured times of the candidates of a stretch by a description of their operations and input."""

    def __init__(self, stretch: Stretch) -> None:
        self._stretch = stretch
        self._table: Mapping[str, Measurement] | None = None
        self._described: dict[int, str] = {}

    def __call__(self, fusion: FusedOperation, a: int, b: int) -> Measurement | None:
        if self._table is None:  # loaded for the first candidate
            machine = Machine.of(self._stretch.env)
            self._table = {} if machine is None else table(machine)
        if not self._table:
            return None
        key = self.key(fusion, a, b)
        return None if key is None else self._table.get(key)

    def key(self, fusion: FusedOperation, a: int, b: int) -> str | None:
        """The key of a candidate in the table of measurements; `None` if its input is not known well enough, or if an
        operation has an attribute that is not plain data.
        """
        stretch, env = self._stretch, self._stretch.env
        live = b > stretch.wants.live_from
        extent = self._extent(a, b)
        if extent is None or not all(tells_all(node.operation) for node in stretch.nodes[a:b]):
            return None
        parts = [class_identity(type(fusion)), "; ".join(self._operation(p, live) for p in range(a, b)), extent]
        parts.append(short(stretch.around(a, a)[0].taken if stretch.borders else env.dtype))
        if env.autocast is not None:
            parts.append(f"autocast {short(env.autocast)}")
        if env.deterministic:
            parts.append("deterministic")
        return " | ".join(parts)

    def _extent(self, a: int, b: int) -> str | None:
        stretch = self._stretch
        shape = None if stretch.shapes is None else stretch.shapes[a - stretch.start]
        if shape is not None and any(type(n) is not int for n in shape):  # a symbolic size of a compiler
            return None
        rows = stretch.env.rows if shape is None else bucket(rows_of(shape))
        if rows is None:
            return None
        if any(node.slots for node in stretch.nodes[a:b]):
            return f"{rows} rows"  # the width follows from the parameters
        return None if shape is None else f"{rows} rows of {shape[-1] if shape else 1}"

    def _operation(self, position: int, live: bool) -> str:
        if position not in self._described:
            self._described[position] = describe(self._stretch.nodes[position], whole=False)
        wanted = self._stretch.wants.needs[position] if live else ()
        return self._described[position] + (f" d({', '.join(sorted(wanted))})" if wanted else "")


class Matcher:
    """Finds every candidate of a fusion set on a stretch of operations."""

    def __init__(self, fusions: Sequence[type[FusedOperation]]) -> None:
        self.fusions = tuple(fusions)
        self._reach, self._only_memory = 0, True  # set by a loop, which Dynamo can trace
        for fusion in self.fusions:
            self._reach = max(self._reach, fusion.reach)
            self._only_memory = self._only_memory and fusion.saves_memory
        self._matches: dict[tuple[type, ...], tuple[_Match, ...]] = {}
        self._near: dict[tuple[type, ...], tuple[_Near, ...]] = {}
        self._fitting: dict[type, frozenset[int]] = {}
        self._warned: set[tuple[str, str]] = set()
        self.failures: dict[tuple[str, int], tuple[int, str]] = {}

    def note_failure(self, fusion: str, at: int, reason: str) -> bool:
        """Counts a run-time failure of a fusion; returns whether it is refused from now on."""
        count = self.failures.get((fusion, at), (0, ""))[0] + 1
        self.failures[fusion, at] = count, reason
        return count == MAX_FAILURES

    def find(
        self, stretch: Stretch, known: Lookup | None = None, lean: bool = False, near: bool = False
    ) -> tuple[list[Candidate], list[Refusal]]:
        """Candidates and refusals on a stretch; with `near`, also the near misses.

        A measurement that `known` returns replaces the estimated cost. Fusions that trade time for memory are
        candidates only with `lean`.
        """
        nodes, start, env, fusing = stretch.nodes, stretch.start, stretch.env, stretch.fusing
        live_from, recipes = stretch.wants.live_from, stretch.recipes
        if fusing.all_costs:
            known, lean = None, True
        _check_named(fusing)
        found: list[Candidate] = []
        unquantized = [(p, one) for p, one in recipes.items() if isinstance(one, Unquantized)]
        refused = [Refusal(str(one.recipe), p, f"{one.reason}, so it is not quantized") for p, one in unquantized]
        widths = entering([cast(UnfusedOperation, node.operation) for node in stretch.inside])
        entered = stretch.shapes or [()] * len(widths)
        width_at = [width or (shape[-1] if shape else 0) for width, shape in zip(widths, entered, strict=False)]
        for_saves: dict[tuple[int, bool], Env] = {}
        unavailable: dict[tuple[type[FusedOperation], int], str | None] = {}
        kinds = tuple([node.derives or node.kind for node in stretch.inside])
        derived = any(node.derives for node in stretch.inside)
        for a in stretch.positions:
            window = kinds[a - start : a - start + self._reach + 1]
            matches = self._matches.get(window)  # cached, since sequences repeat
            if matches is None:
                matches = self._matches[window] = self._matching(window)
            if near and window not in self._near:
                self._near[window] = tuple(self._near_misses(window))
            for cls, sentence, length in self._near[window] if near else ():
                b = a + length
                without = _unavailable(cls, env, fusing, widths[a - start])
                if (lean or not cls.saves_memory) and self._excludes(cls, a, b, live_from, without) is None:
                    refused.append(Refusal(cls.__name__, a, sentence, own=is_own(cls)))
            for cls, own, rank, lengths, length in matches:
                b = a + length
                if cls.saves_memory and not (lean and b > live_from):
                    if own or (self._only_memory and b > live_from):
                        reason = UNASKED if b > live_from else "no gradient is needed here"
                        refused.append(Refusal(cls.__name__, a, reason, expected=b <= live_from, own=own))
                    continue
                around = stretch.around(a, b)
                key = cls, width_at[a - start]
                if key not in unavailable:
                    unavailable[key] = _unavailable(cls, env, fusing, key[1])
                reason, expected = refuses_operations(cls, stretch, a, b) if derived or recipes else None, False
                if reason is None:
                    excluded = self._excludes(cls, a, b, live_from, unavailable[key])
                    reason, expected = excluded or (refuses_dtypes(cls, nodes, a, around), False)
                if reason is None:
                    bound = _bind(cls, lengths, nodes, a)
                    along = along_of(around, cls.forward_signature.dtype)
                    absorbed = [*stretch.absorbed(bound, a, b)] if recipes else []
                    here = dataclasses.replace(env, absorbs=True) if absorbed else env
                    reason = self._refuses(bound, nodes, a, b, live_from, here.between(along))
                    measured = known(bound, a, b) if known is not None and reason is None else None
                    if reason is None:
                        # If no gradient is needed, a joint fusion saves time in its forward only.
                        key = widths[a - start], env.grad and b > live_from
                        wanted = for_saves.get(key)
                        if wanted is None:
                            wanted = for_saves[key] = dataclasses.replace(env, width=key[0], grad=key[1])
                        cost = self._cost(bound, wanted.between(along), measured)
                        if isinstance(cost, int):
                            cost -= sum(_absorbed(to, env) for to in absorbed)
                            cost = -1000 * length**2 if fusing.all_costs else cost
                            found.append(Candidate(bound, a, b, cost, rank, measured is not None))
                            continue
                        reason = cost
                refused.append(Refusal(cls.__name__, a, reason, expected=expected, own=own))
        return found, refused

    def _fits(self, window: Sequence[type]) -> list[frozenset[int]]:
        """For each kind the ids of the slots that match it; hashing a slot would hash its fields."""
        for kind in window:
            if kind not in self._fitting:
                slots = [slot for cls in self.fusions for slot in cls.slots]
                distinct = {slot.types: slot.open_types for slot in slots}
                takes = {types: kind in types or issubclass(kind, of) for types, of in distinct.items()}
                self._fitting[kind] = frozenset([id(slot) for slot in slots if takes[slot.types]])
        return [self._fitting[kind] for kind in window]

    def _matching(self, window: tuple[type, ...]) -> tuple[_Match, ...]:
        """Fusions whose pattern matches the beginning of these kinds."""
        fits, found = self._fits(window), list[_Match]()
        for rank, cls in enumerate(self.fusions):
            if cls.slots[0].optional or id(cls.slots[0]) in fits[0]:
                found += [(cls, is_own(cls), rank, lengths, sum(lengths)) for lengths in _lengths(cls.slots, fits)]
        return tuple(found)

    def _near_misses(self, window: tuple[type, ...]) -> Iterator[_Near]:
        """Near misses: fusions that would match without a Fork, through which another operation reads an inner result.
        Also short fixed patterns with one operation between theirs, or with a surplus Bias; for users' fusions also
        with a surplus Dropout, for which this library has separate fusions.
        """
        fits = self._fits(window)
        for cls in self.fusions:
            slots = cls.slots
            exact = max(map(sum, _lengths(slots, fits)), default=0)
            for k in (k for k in range(max(1, exact), len(window)) if window[k].__name__ == "Fork"):
                taken = max(map(sum, _lengths(slots, [*fits[:k], *fits[k + 1 :]])), default=0)
                if taken > k:
                    said = f"a Fork follows {window[k - 1].__name__} here, so another operation reads its output"
                    yield cls, NEAR + said, taken + 1
            if len(slots) > MAX_NEAR or any(slot.optional or slot.variadic for slot in slots):
                continue
            surplus = ("Bias",) if cls.__module__.startswith("seqfuse.") else ("Bias", "Dropout")
            for k in range(1, min(len(slots), len(window))):
                between, absent = f"{window[k - 1].__name__} and {window[k].__name__}", slots[k].types
                if [*_lengths((*slots[:k], *slots[k + 1 :]), fits)] and k < len(slots) - 1:
                    if len(absent) == 1 and not absent[0].is_open:
                        said = f"a {absent[0].__name__} between {between} would let it apply"
                        yield cls, NEAR + said, len(slots) - 1
                elif window[k].__name__ in surplus and [*_lengths(slots, [*fits[:k], *fits[k + 1 :]])]:
                    said = f"a {window[k].__name__} follows {window[k - 1].__name__} here, and its pattern has none"
                    yield cls, NEAR + said, len(slots) + 1

    def _excludes(
        self, cls: type[FusedOperation], a: int, b: int, live_from: int, unavailable: str | None
    ) -> tuple[str, bool] | None:
        """Why a fusion class does not apply on `a..b`, whatever the operations, and whether the reason is expected."""
        if unavailable is not None:
            return unavailable, False
        count, failure = self.failures.get((cls.__name__, a), (0, ""))
        if count >= MAX_FAILURES:
            return f"it failed {count} times: {failure}", False
        if b <= live_from and issubclass(cls, BackwardFusion):
            return "no gradient is needed here", True
        if a < live_from and issubclass(cls, BackwardFusion):
            return f"no gradient is needed before position {live_from}", False
        if b > live_from and issubclass(cls, InferenceFusion):
            return "inference only", True
        return None

    def _refuses(
        self, fusion: FusedOperation, nodes: Sequence[Node], a: int, b: int, live_from: int, env: Env
    ) -> str | None:
        reason = refuses_channels(fusion, nodes, a, b, b <= live_from)
        if reason is not None:
            return reason
        try:
            for holds, sentence in fusion.requires(env):
                if isinstance(holds, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                    raise TypeError(f"the condition comes first, not {holds!r}")
                if not holds:
                    return sentence if sentence and isinstance(sentence, str) else "it gives no reason"  # pyright: ignore[reportUnnecessaryIsInstance]
        except Exception as error:
            return self._raised(type(fusion).__name__, "requires", error)
        return None

    def _cost(self, fusion: FusedOperation, env: Env, measured: Measurement | None) -> int | str:
        """The measured or estimated cost in nanoseconds; or why the fusion is not used."""
        try:
            if measured is None:
                savings = fusion.saves(env)
                if not isinstance(savings, Savings):  # pyright: ignore[reportUnnecessaryIsInstance]
                    raise TypeError(f"it returned {savings!r}")
                # Rounded down: for equal savings the estimate of one fusion is never below the sum of two.
                return -math.floor(env.microseconds(savings) * 1000)
        except Exception as error:
            return self._raised(type(fusion).__name__, "saves", error)
        # A fusion that saves memory may be slower.
        return -measured.saving if fusion.saves_memory and not measured.failed else measured.refusal or -measured.saving

    def _raised(self, name: str, method: str, error: Exception) -> str:
        wanted = {"requires": "it yields pairs (condition, sentence)", "saves": "it returns sf.Savings"}[method]
        reason = f"{method} raised {type(error).__name__}: {error}{f'; {wanted}' * isinstance(error, TypeError)}"
        if (name, reason) not in self._warned:
            self._warned.add((name, reason))
            warnings.warn(f"fusion {name} is not applied: {reason}", UserWarning, stacklevel=2)
        return reason


def _unavailable(cls: type[FusedOperation], env: Env, fusing: Fusing, width: int) -> str | None:
    """Why no fusion of a class applies in an environment to tensors of this width."""
    reason = fusing.allows(cls)
    if reason is not None:
        return reason
    if cls.kernels and env.kernels not in cls.kernels:
        return (why_no_c() if env.device == "cpu" and "c" in cls.kernels else "") or "needs a Triton device"
    if cls.kernels and env.kernels == "c" and not fusing.unmeasured and 0 < (env.rows or 0) * width < C_WORTHWHILE:
        return SMALL
    return "the input has no rows" if env.rows == 0 else None


@functools.lru_cache(256)
def _check_named(fusing: Fusing) -> None:
    """Reject names and classes in `sf.fusing` that are not fusions; all classes of a fusion set exist by now."""
    known: dict[str | type, None] = {}
    classes = [FusedOperation]
    while classes:
        usable = [cls for cls in classes if not cls.is_contract]
        known.update(dict.fromkeys((*usable, *(cls.__name__ for cls in usable))))
        classes = [sub for cls in classes for sub in cls.__subclasses__()]
    named = {named for chosen in (*fusing.only, fusing.exclude) for named in chosen}
    for name in sorted((n if isinstance(n, str) else n.__name__) for n in named - known.keys()):
        close = meant(name, [n for n in known if isinstance(n, str)])
        hint = close or "name a fusion of the fusion set, as a plan shows them"
        raise InputError(f"sf.fusing names {name!r}, and there is no such fusion", code="SF106", hint=hint)


def _absorbed(to: Quantize, env: Env) -> int:
    """Nanoseconds saved by an absorbed quantization: a launch, and the write and read of a tensor."""
    width = to.operation.features[0 if to.role == "x" else 1]
    saved = Savings(launches=1, bytes=2 * env.tokens * width * env.itemsize)
    return math.floor(env.microseconds(saved) * 1000)


def _lengths(slots: Sequence[Slot], fits: Sequence[frozenset[int]]) -> list[tuple[int, ...]]:
    """All matches of slots from the first operation on: the number of operations of each slot, longest match first."""
    found: list[tuple[int, ...]] = [()]
    for slot in slots:
        before, found, limit = found, [], MAX_VARIADIC if slot.variadic else 1
        for lengths in before:
            at, most = sum(lengths), 0
            while most < limit and at + most < len(fits) and id(slot) in fits[at + most]:
                most += 1
            for taken in range(most, -1 if slot.optional else 0, -1):
                found.append((*lengths, taken))
    return found if not found or any(found[-1]) else found[:-1]


def _bind(cls: type[FusedOperation], lengths: Sequence[int], nodes: Sequence[Node], at: int) -> FusedOperation:
    bound: dict[str, Any] = {}
    for slot, taken in zip(cls.slots, lengths, strict=True):
        if slot.variadic:
            bound[slot.name] = tuple(node.operation for node in nodes[at : at + taken])
        else:
            bound[slot.name] = nodes[at].operation if taken else None
        at += taken
    return cls(**bound)
