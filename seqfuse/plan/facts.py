"""Tries steps on fake tensors: their results and saved tensors, the bytes they allocate, their work, their C kernels.

Each kind of step runs once. Equal steps, such as those of equal layers, reuse its results.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._guards import active_fake_mode

from .. import compiler
from ..casts import autocasting, cast_once
from ..env import Env, Savings
from ..errors import SeqfuseError, one_line
from ..fake import faking, forget_real, is_fake, laid_like, without_fake
from ..generated import identifier
from ..saved import Layout, Recompute, Saved, put_field
from .arriving import Unknown, run_aside
from .described import class_identity, describe, tells_all
from .flatten import Node
from .inputs import check_dtypes
from .schedule import Kept
from .step import Record, Step, Stretch
from .tally import Tally, storage_of


class Alike(NamedTuple):
    """Represents a tensor by the number of its storage and its layout there."""

    storage: int
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def is_dense(self, sizes: Mapping[int, int]) -> bool:
        """Whether its elements fill its storage."""
        return sizes[self.storage] == self.bytes

    @property
    def is_contiguous(self) -> bool:
        sides = zip(self.shape, self.strides, _rows(self.shape), strict=True)
        return 0 in self.shape or all(size == 1 or stride == own for size, stride, own in sides)


def _rows(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(1, size))
    return tuple(strides[::-1][: len(shape)])


def changed_in(value: Any, kind: type[Any], change: Callable[[Any], Any], late: Callable[..., Any] = Recompute) -> Any:
    """Applies `change` to each `kind` in a value: in tuples, in 8-bit tensors, and in the tensors of a `Recompute`."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, Recompute):
        return late(value.fn, *[changed_in(t, kind, change, late) for t in value.tensors])
    if isinstance(value, list) or (isinstance(value, tuple) and not isinstance(value, torch.Size)):
        several: list[Any] = [changed_in(one, kind, change, late) for one in value]  # pyright: ignore
        return type(value)(*several) if hasattr(value, "_fields") else tuple(several)  # pyright: ignore
    return value


def storages(*values: Any) -> list[int]:
    """The storages of all tensors in values."""
    found: list[int] = []
    left: list[Any] = [*values]
    while left:
        value = left.pop()
        kind = value.__class__
        if kind is Alike:
            found.append(value.storage)
        elif kind is dict:
            left += value.values()
        elif kind is Recompute:
            left += value.tensors
        elif issubclass(kind, list | tuple):
            left += value
    return found[::-1]


class Attempt(NamedTuple):
    """The outcome of trying a step: its results, casts that outlive it, the bytes of new storages, its allocations, its
    work and its C kernels. In the cache, storages are numbered in the order in which they were given or allocated;
    temporary storages have negative numbers.
    """

    results: Any
    casts: tuple[Alike, ...]
    made: Sequence[int]
    events: Sequence[tuple[int, int]]
    work: Savings
    kernels: Mapping[str, None]


_unknown = itertools.count()  # of operations that may differ from all others
_known: dict[Any, Attempt] = {}
SEEDS = 1  # the number of the storage of seeds
KEPT = 4096  # entries; their keys are names and sizes, so that no class or tensor of a model stays alive

Fields = dict[str, Any]


class Tried:
    """Tries steps of a stretch. Each storage has a number, and its bytes in `sizes`.

    `x` and `channels` are the inputs of the stretch. Storages of parameters, which are `owned`, count zero bytes.
    """

    def __init__(self, stretch: Stretch, collects: bool = False) -> None:
        assert stretch.x is not None
        self.sizes: dict[int, int] = {}
        self.owned: set[int] = set()
        self._collects = collects  # whether to note the C kernels that steps call
        self._bases: dict[int, Tensor] = {}  # by number
        self._numbers: dict[int, int] = {}  # by storage, of those
        self._parameters: dict[int, int] = {}  # by id
        self._described: dict[int, str] = {}
        self._next = 0
        self._known: dict[Any, Attempt] = {}  # of steps with recomputed tensors
        self._stretch = stretch
        self._mode: Any = None
        self._own_mode = False
        with self.running():
            count = len([node for node in stretch.nodes if node.seed is not None])
            self._seeds = torch.empty(count, dtype=torch.int64, device=stretch.place)
            assert self.take(self._seeds).storage == SEEDS
            self.channels = {name: self._like(t, t.dtype) for name, t in stretch.channels.items()}
            floating = stretch.x.is_floating_point()
            self.x: Any = self._like(stretch.x, stretch.env.dtype if floating else stretch.x.dtype)

    def _like(self, t: Tensor, dtype: torch.dtype) -> Alike:
        t, place = self._mode.from_tensor(t).detach(), self._stretch.place
        return self.take(t if t.device == place and t.dtype is dtype else laid_like(t, dtype, place))

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """A block in which steps can be tried: under a `FakeTensorMode` and the autocast of the stretch."""
        place, autocast = self._stretch.place.type, self._stretch.env.autocast
        own = self._mode is None and active_fake_mode() is None
        with torch.no_grad(), autocasting(place, autocast), faking(self._mode) as self._mode, cast_once():
            self._own_mode = own or self._own_mode
            try:
                yield
            finally:
                if self._own_mode:  # and not a compiler's
                    forget_real(self._mode)

    def fresh(self, size: int) -> int:
        self._next += 1
        self.sizes[self._next] = size
        return self._next

    def forget(self, first: int) -> None:
        for number in range(first, self._next + 1):
            self.sizes.pop(number, None)

    def new(self, like: Alike, dtype: torch.dtype | None = None) -> Alike:
        """Returns a new contiguous tensor of this shape."""
        dtype = dtype or like.dtype
        return Alike(self.fresh(math.prod(like.shape) * dtype.itemsize), like.shape, _rows(like.shape), 0, dtype)

    def take(self, t: Tensor) -> Alike:
        place = storage_of(t)
        number = self._numbers.get(place)
        if number is None:
            number = self._numbers[place] = self.fresh(t.untyped_storage().nbytes())
            self._bases[number] = t
        return _form(number, t)

    def whole(self, t: Any) -> Any:
        """Builds the fake tensors of a value; representations with one storage share it again."""
        return changed_in(t, Alike, self._whole)

    def _whole(self, t: Alike) -> Tensor:
        base = self._bases.get(t.storage)
        if base is None:
            count, place = self.sizes[t.storage] // t.dtype.itemsize, self._stretch.place
            if t.is_contiguous and t.offset == 0 and math.prod(t.shape) == count:
                base = torch.empty(t.shape, dtype=t.dtype, device=place)
            else:
                base = torch.empty(count, dtype=t.dtype, device=place)
            self._bases[t.storage] = base
            self._numbers[storage_of(base)] = t.storage
        if (base.shape, base.stride(), base.storage_offset(), base.dtype) == (t.shape, t.strides, t.offset, t.dtype):
            return base
        if base.dtype is not t.dtype:  # a view of it as other numbers
            storage, count = cast(Any, base.untyped_storage()), self.sizes[t.storage] // t.dtype.itemsize
            base = cast(Any, torch.empty(0, dtype=t.dtype, device=base.device)).set_(storage, 0, (count,))
        return cast(Tensor, base.as_strided(t.shape, t.strides, t.offset))

    def run_aside(self, nodes: Sequence[Node], at: int, x: Alike, channels: dict[str, Alike]) -> Alike:
        """Runs an eager module on x, adds its outputs to `channels` and returns y; its parameters count no bytes."""
        for p in nodes[at].operation.parameters():
            number = self.take(self._mode.from_tensor(p)).storage
            self.sizes[number] = 0
            self.owned.add(number)
        given = {channel: self.whole(channels[channel]) for _, channel in nodes[at].inputs}
        y = self.take(run_aside(nodes, at, self.whole(x), given, self._mode))
        channels.update({channel: self.take(t) for channel, t in given.items()})
        return y

    def forward(self, step: Step, x: Any, channels: Mapping[str, Alike], env: Env) -> Attempt:
        """Tries the forward of a step: y, its extra outputs in the order of `step.writes`, and for each record that it
        `saves` the names and values of the fields.
        """

        def call(given: Any) -> Any:
            reads = dict(zip([channel for _, channel in step.reads], given[1], strict=True))
            y, named, saved = step.call(env, given[0], reads, self._seeds)
            records = [_fields(record.among(saved, self._seeds)) for record in step.saves]
            return y, tuple([named[name] for name, _ in step.writes]), tuple(records)

        given = x, tuple([channels[channel] for _, channel in step.reads])
        return self._run(step, env, ("forward",), given, call)

    def entered(self, t: Any, dtype: torch.dtype | None, layout: Layout) -> Any:
        """Converts a tensor to the dtype and the layout that a pass expects."""
        if isinstance(t, Alike) and dtype is not None and t.dtype is not dtype:
            t = Alike(self.fresh(0), t.shape, t.strides, 0, dtype) if t.is_dense(self.sizes) else self.new(t, dtype)
            self.sizes[t.storage] = t.bytes
        if not isinstance(t, Alike) or layout == "any" or t.is_contiguous:
            return t
        rows = layout == "inner_contig" and t.shape and (t.strides[-1] == 1 or t.shape[-1] == 1) and 0 not in t.strides
        return t if rows else self.new(t)

    def run_forward(self, step: Step, x: Any, channels: Mapping[str, Alike], env: Env) -> Attempt:
        """Tries the forward of a step after the cast of x that it needs."""
        layout = step.operation.layout
        reads = {channel: self.entered(channels[channel], None, layout) for _, channel in step.reads}
        return self.forward(step, self.entered(x, step.cast, layout), reads, env)

    def saved(self, step: Step, records: Any) -> frozenset[int]:
        """The storages that a step saves, without those of parameters."""
        kept = [kept_fields(record, fields) for record, fields in zip(step.saves, records, strict=True)]
        return frozenset(storages(*kept)) - self.owned

    def backward(
        self,
        step: Step,
        d: Any,
        records: Sequence[Fields | None],
        incoming: Mapping[str, Any],
        env: Env,
        needs: frozenset[str] | None = None,
    ) -> Attempt:
        """Tries the backward of a step: dx, names and values of gradients, and the record fields that it recomputed."""
        kinds: list[type[Saved]] = [record.cls for record in step.records]

        def call(given: Any) -> Any:
            own = [_record(cls, *fields) for cls, fields in zip(kinds, given[1], strict=True)]
            before = [set(record.__dict__) for record in own]
            positional, keywords = [given[0]], dict(zip(incoming, given[2], strict=True))
            if step.joint or not step.fused:
                positional += own
            else:
                named = step.operation.backward_signature.extras
                keywords |= {identifier(slot): r for slot, r in step.by_slot(own).items() if slot in named}
            keywords |= step.constants(env, True)
            keywords |= {} if needs is None else {"needs": needs}
            keywords |= {"main_grads": {}} if step.operation.backward_signature.main_grads else {}
            dx, grads = step.operation.bwd(*positional, **keywords)
            filled = [
                {name: value for name, value in record.__dict__.items() if name not in names and name != "_late"}
                for record, names in zip(own, before, strict=True)
            ]
            return dx, (tuple(grads), tuple(grads.values())), tuple([(tuple(f), tuple(f.values())) for f in filled])

        fields = tuple([((), ()) if f is None else (tuple(f), tuple(f.values())) for f in records])
        about = "backward", *incoming, needs
        return self._run(step, env, about, (d, fields, tuple(incoming.values())), call)

    def described(self, step: Step) -> Any:
        """The cache key of a step, without its input tensors."""
        to = step.to and dataclasses.replace(step.to, at=step.to.at - step.start, operation=None)
        kind = class_identity(step.operation.__class__), *map(self._about, step.nodes, step.covers)
        state = self._stretch.place.type, torch.get_default_dtype()
        return kind, step.needs, step.borders, step.recipes, to and dataclasses.astuple(to), state

    def _about(self, node: Node, at: int) -> str:
        if at not in self._described:
            told = describe(node)
            self._described[at] = told if tells_all(node.operation) else f"{told} {next(_unknown)}"
        return self._described[at]

    def _run(self, step: Step, env: Env, about: Any, given: Any, call: Callable[[Any], Any]) -> Attempt:
        places: dict[int, int] = {SEEDS: 0}  # by storage number: its position among the inputs
        parametrized = False  # then a step computes a parameter, in a way that its description does not contain
        for owner, name in itertools.chain(*(node.slots.values() for node in step.nodes)):
            held: Any = owner._parameters.get(name)  # pyright: ignore[reportPrivateUsage]
            if held is None:
                parametrized = True
            else:
                places.setdefault(self._parameter(held), len(places))

        def local(t: Alike) -> Alike:
            return t._replace(storage=places.setdefault(t.storage, len(places)))

        owned = tuple(places.values())
        told = changed_in(given, Alike, local, _hashable)
        key: Any = about, self.described(step), any_rows(env), owned, told
        try:
            known = None if parametrized else self._known.get(key) or _known.get(key)
        except TypeError:  # unhashable data
            key = known = None
        numbers = [*places]
        if known is None:
            with _clearer(step, "fwd" if about[0] == "forward" else "bwd"):
                known, constant = self._try(numbers, given, call)
            late = list[Recompute]()
            changed_in((given, known.results), Recompute, late.append)
            memo = self._known if late else _known  # functions of recomputed tensors may reference a model
            if key is not None and not constant and not parametrized:
                if len(memo) >= KEPT:
                    memo.clear()
                memo[key] = known
        storage = [*numbers, *map(self.fresh, known.made)]
        results, casts = changed_in(
            (known.results, known.casts), Alike, lambda t: t._replace(storage=storage[t.storage])
        )
        events = [(storage[place] if place >= 0 else place, size) for place, size in known.events]
        return known._replace(results=results, casts=casts, events=events)

    def _parameter(self, held: Tensor) -> int:
        number = self._parameters.get(id(held))
        if number is None:
            number = self.take(held).storage if is_fake(held) else self.fresh(0)
            self.sizes[number] = 0
            self._bases[number] = self._bases.get(number, held)
            self._parameters[id(held)] = number
            self.owned.add(number)
        return number

    def _try(self, numbers: Sequence[int], given: Any, call: Callable[[Any], Any]) -> tuple[Attempt, bool]:
        """Runs a step. Returns its facts, and whether its results include a constant, which only this step may use."""
        concrete = self.whole(given)
        collecting = compiler.collecting() if self._collects else contextlib.nullcontext(dict[str, None]())
        with collecting as kernels, cast_once(apart=True) as casts, Tally() as tally:
            outcome = call(concrete), tuple([made for _, made in (casts or {}).values()])
            events = [*tally.events]
        places = {n: i for i, n in enumerate(numbers)}
        parameters = {key: places[n] for key, n in self._parameters.items() if n in places}
        made: list[int] = []
        found: dict[int, int] = {}  # by storage
        counted: dict[int, int] = {}  # by number of the tally
        constant = False

        def leaf(t: Tensor) -> Any:
            nonlocal constant
            if id(t) in parameters:
                return _form(parameters[id(t)], t)
            place = storage_of(t)
            if (number := self._numbers.get(place, -1)) in places:
                return _form(places[number], t)
            if place not in found:
                if not is_fake(t):  # a real tensor, which the call did not allocate
                    constant = True
                    return t
                found[place] = len(numbers) + len(made)
                made.append(t.untyped_storage().nbytes())
                if (counting := tally.number(t)) is not None:
                    counted[counting] = found[place]
            return _form(found[place], t)

        results, cast = changed_in(outcome, Tensor, leaf)
        told = tuple([(counted.get(number, -number), size) for number, size in events])
        return Attempt(results, cast, made, told, tally.work, dict(kernels)), constant


@contextlib.contextmanager
def _clearer(step: Step, name: str) -> Generator[None]:
    """A block whose errors name the pass that does not run on fake tensors, and the registration that it needs."""
    try:
        yield
    except RuntimeError as error:
        operator = without_fake(error)
        if operator is not None:
            said = f"calls the custom op {operator}, which has no fake implementation; register one with"
            raise RuntimeError(f'{step.name}.{name} {said} torch.library.register_fake("{operator}")') from None
        if not step.fused or isinstance(error, SeqfuseError):
            raise
        cure = "wrap a function that launches kernels in torch.library.custom_op, with register_fake"
        raise RuntimeError(f"{step.name}.{name} does not run on fake tensors; {cure}: {error}") from None


@functools.lru_cache(64)
def any_rows(env: Env) -> Env:
    """The environment for any number of tokens."""
    return dataclasses.replace(env, rows=None)


def _form(number: int, t: Tensor) -> Alike:
    return Alike(number, t.shape, t.stride(), int(t.storage_offset()), t.dtype)


def _hashable(fn: Any, *tensors: Any) -> Any:
    return fn, tensors


def _fields(record: Any) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """The names and values of a record's fields; for a recomputed field, its `Recompute`."""
    fields = {**record.__dict__, **record.__dict__.get("_late", {})}
    fields.pop("_late", None)
    return tuple(fields), tuple(fields.values())


def _record(cls: type[Saved], names: Sequence[str], values: Sequence[Any]) -> Saved:
    record = cls.__new__(cls)
    for name, value in zip(names, values, strict=True):
        put_field(record.__dict__, name, value)
    return record


def kept_fields(record: Record, fields: tuple[Sequence[str], Sequence[Any]]) -> Fields:
    """The fields of a record that are saved."""
    return {name: value for name, value in zip(*fields, strict=True) if name in record.kept}


def look(entered: Stretch, steps: Sequence[Step], parts: Sequence[Stretch | Node]) -> Kept | str:
    """The tensors saved by the operations of consecutive parts and by these fusions, or why they are unknown.

    The inputs of the first part and the environment are those of `entered`. An eager module runs on fake tensors, too;
    its saved tensors and FLOPs are not counted.
    Steps are tried on the device of the parameters, even for a plan of another machine: on fake tensors no kernel is
    launched, and the library's custom ops only allocate their results. A fusion that launches a kernel without a custom
    op cannot be tried.
    """
    if entered.x is None:
        return entered.unknown or "the shape of the input"
    known = {*entered.channels, *(c for node in entered.nodes[entered.start :] for _, c in node.outputs)}
    for node in (node for part in parts if isinstance(part, Stretch) for node in part.inside):
        for name, channel in node.inputs:
            if channel not in known:
                return f"{node.name} reads {name} from {channel!r}, which is not given to plan()"
    try:
        tried = Tried(entered)
        with tried.running():
            return _look(entered, steps, parts, tried)
    except Exception as error:
        return str(error) if isinstance(error, Unknown) else one_line(error)


def _look(entered: Stretch, steps: Sequence[Step], parts: Sequence[Stretch | Node], tried: Tried) -> Kept:
    own, before, flops = list[frozenset[int]](), [tried.x], 0.0
    nodes, start, env, channels = entered.nodes, entered.start, entered.env, tried.channels
    for part in parts:
        if not isinstance(part, Stretch):
            before.append(tried.run_aside(nodes, start + len(own), before[-1], channels))
            own.append(frozenset())
            continue
        for at in part.positions:
            if env.autocast is None:
                check_dtypes(nodes, range(at, at + 1), [before[-1].dtype])
            step = part.step(at, at + 1)
            run = tried.run_forward(step, before[-1], channels, part.env)
            y, made, records = run.results
            channels.update(zip([channel for _, channel in step.writes], made, strict=True))
            flops += run.work.flops
            own.append(tried.saved(step, records))
            before.append(y)
    fused: dict[tuple[int, Any], frozenset[int]] = {}
    for step in steps:
        alone = dataclasses.replace(step, to=None)  # the reader of a quantized tensor saves it
        y, made, records = tried.run_forward(alone, before[step.start - start], channels, env).results
        # A fusion returns the same tensors as its operations.
        same = {y.storage: before[step.stop - start].storage}
        same |= {t.storage: channels[c].storage for t, (_, c) in zip(made, step.writes, strict=True)}
        fused[step.start, step.operation] = frozenset([same.get(n, n) for n in tried.saved(alone, records)])
    return Kept(own, fused, tried.sizes, round(flops))
