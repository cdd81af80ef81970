"""Runs one op sequence on the same inputs fused, unfused, and with the references in float64."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ..env import Env
from ..fusion import FusedOperation
from ..operation import UnfusedOperation
from ..ops import _attention
from ..plan import Plan, by_reference
from ..recipes import within
from ..run import Fuser, Sequential
from ..settings import at_all_costs, fusing
from .observe import Observer
from .structure import Tree, Untouched, assert_bitwise_equal, copied_module
from .tensors import LAYOUTS, REGIMES, Shape, in_regime, laid_out, seeded_randn, varied

OnPass = Callable[..., Any]
"""The `on_step` of a `Fuser`: called instead of each pass of a step, with the step and the pass."""

_T = TypeVar("_T")
HUGE, _MOST_SUBSETS = "huge", 32
_ROWS = 33  # enough for the bias part of the error bound; not a power of two
_MANY_ROWS = 130  # more than the usual tiles of tokens, with a partial last tile


@dataclass(frozen=True, slots=True)
class Case:
    """The input that a sequence runs on, in few enough words for a failure message."""

    shape: Shape
    dtype: torch.dtype = torch.float32
    regime: str = "normal"
    layout: str = "contiguous"  # of x and the channels
    dy_layout: str = "contiguous"
    dy_regime: str = "normal"  # or "large", "infinite", "one_nan"
    frozen: frozenset[str] = frozenset()
    unused: frozenset[str] = frozenset()  # outputs without a gradient
    grad: bool = True

    def __str__(self) -> str:
        parts = [str(self.dtype).removeprefix("torch."), f"x {self.shape}", self.regime]
        layouts = ("x", self.layout), ("dy", self.dy_layout)
        parts += [f"{name} {layout}" for name, layout in layouts if layout != "contiguous"]
        parts += [f"dy {self.dy_regime}"] if self.dy_regime != "normal" else []
        parts += [f"frozen {', '.join(sorted(self.frozen))}"] if self.frozen else []
        parts += [f"no gradient of {', '.join(sorted(self.unused))}"] if self.unused else []
        return ", ".join(parts if self.grad else [*parts, "no gradient"])


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Generator[None]:
    """A block in which torch's generators start from a seed; afterwards their state is restored.

    Inside it, dropout masks follow from the operations' seeds on every device.
    """
    seed += 0x5EED_0000  # the kit's seeds: no pass uses one itself, which would go unnoticed
    on_cuda = device.type == "cuda"
    with cast(Any, torch.random).fork_rng([device] if on_cuda else []):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed formats a traceback per uninitialized device
        if on_cuda:
            cast(Any, torch.cuda).manual_seed(seed)
        before, _attention.seeds_decide = _attention.seeds_decide, True
        try:
            yield
        finally:
            _attention.seeds_decide = before


class Bench:
    """Runs a sequence with a fuser that applies every fusion whose requirements hold, regardless of cost.

    Each operation runs as a step of a plan, views included.
    """

    def __init__(
        self, root: Sequential, fusions: Sequence[type[FusedOperation]] = (), on_step: OnPass | None = None
    ) -> None:
        self.root = root
        self._fuser = Fuser(root, fusions, on_step=on_step or _run)

    @property
    def nodes(self) -> Sequence[Any]:
        """The operations."""
        return self._fuser.op_list().nodes

    def __call__(self, x: Tensor, **channels: Tensor) -> Any:
        with at_all_costs():
            return self._fuser(x, **channels)

    def plan(self, x: Tensor | None = None, *, env: Env | None = None, **channels: Tensor) -> Plan:
        """The plan for an input, or for an environment."""
        with at_all_costs():
            return self._fuser.plan(x, env=env, **channels)

    def references(self, x: Tensor, **channels: Tensor) -> Any:
        """Run every operation's `reference` under plain autograd, with the seeds that a call would draw."""
        op_list = self._fuser.op_list()
        return by_reference(op_list.nodes, op_list.inputs, op_list.outputs, x, channels)


@functools.lru_cache(8)
def _numbers(regime: str, shape: Shape, seed: int, dtype: torch.dtype) -> Tensor:
    """Cached values that the fused, unfused and reference runs of a case share; they are never written to."""
    return in_regime(regime, shape, seed, dtype=dtype)


def _run(step: Any, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return run(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Inputs and results of a run; gradients by name: `d_x`, `d_<channel>`, `<parameter>.grad`."""

    inputs: dict[str, Tensor]
    parameters: dict[str, Tensor]
    incoming: dict[str, Tensor]
    outputs: dict[str, Tensor]
    grads: dict[str, Tensor | None]
    random: Tensor  # state of the generator after the run

    @property
    def tree(self) -> dict[str, Tree]:
        return {**self.outputs, **self.grads}

    def kept(self) -> dict[str, Tree]:
        """The same in memory of its own, as a later call may write to the tensors themselves."""
        return {n: None if t is None else t.detach().clone() for n, t in {**self.outputs, **self.grads}.items()}


class Specimen:
    """A sequence of operations under test: copies that the test kit owns, in any dtype.

    Constant parameters, as in fresh norms and biases, get random values: with equal values, a permutation, a missing
    addition or a multiplication by one would not show. The regime `"given"` has the values of `x`. Channels that are
    not given are random, in the shape of the tensor they are combined with.
    """

    def __init__(self, operations: Sequence[nn.Module], x: Tensor, channels: Mapping[str, Tensor], seed: int) -> None:
        self.root = Sequential(*copy.deepcopy(list(operations)), fusions=())
        self.x, self.channels, self.seed = x.detach(), dict(channels), seed
        op_list = Fuser(self.root).op_list()
        self.nodes: Sequence[Any] = op_list.nodes
        self.inputs, self.outputs = op_list.inputs, op_list.outputs
        self.places = dict.fromkeys(range(len(self.nodes)), "")
        self.refused: list[str] = []
        self._reused: dict[Any, Any] = {}
        for i, parameter in enumerate(self.root.parameters()):
            p = parameter.data
            if p.is_floating_point() and p.numel() and bool((p == p.flatten()[0]).all()):
                p.add_(0.5 * seeded_randn(tuple(p.shape), self.seed + i, dtype=p.dtype).to(p.device))

    def at(self, dtype: torch.dtype, *, wide: bool = False) -> Sequential:
        """A copy of the sequence with parameters in `dtype`; if `wide`, in float64, after rounding to `dtype`."""
        return copied_module(self.root).to(dtype).to(torch.float64 if wide else dtype)

    def bench(
        self,
        dtype: torch.dtype,
        fusions: Sequence[type[FusedOperation]] = (),
        on_step: OnPass | None = None,
        *,
        wide: bool = False,
    ) -> Bench:
        """A bench of such a copy."""
        return Bench(self.at(dtype, wide=wide), fusions, on_step)

    def references(self, case: Case, seed: int, *, wide: bool = False) -> Outcome:
        """Run the references under plain autograd; `wide` in float64."""
        bench = self.reused((case.dtype, wide), seed, lambda: self.bench(case.dtype, wide=wide))
        return self.run(bench, case, seed, reference=True, wide=wide)

    def observed(
        self,
        case: Case,
        seed: int | None = None,
        fusions: Sequence[type[FusedOperation]] = (),
        *,
        twice: bool = False,
        watches: bool = True,
        wide: bool = False,
    ) -> tuple[Outcome, Bench, Observer]:
        """Run a case and observe the passes of the fusions, if any, else of the operations.

        Without a seed, the specimen's seed and a new bench: only its first run checks what passes return, which may
        depend on the layout.
        """

        def made() -> tuple[Bench, Observer]:
            observer = Observer(twice, watches=watches, fused=bool(fusions))
            return self.bench(case.dtype, fusions, observer, wide=wide), observer

        how = fusions, case.dtype, wide, (case.layout, case.dy_layout) if watches else None
        bench, observer = made() if seed is None else self.reused(how, seed, made)
        observer.seen.clear()
        with fusing(on_error="raise"):
            return self.run(bench, case, self.seed if seed is None else seed, wide=wide), bench, observer

    def reused(self, key: Any, seed: int, made: Callable[[], _T]) -> _T:
        """What `made` returned for an earlier case of this key, so that a known shape is planned only once.

        It is not reused with another seed, which changes the parameters, or with buffers, which a call may change.
        """
        if seed != self.seed or next(self.root.buffers(), None) is not None:
            return made()
        if key not in self._reused:
            self._reused[key] = made()
        return self._reused[key]

    def named(self, nodes: Sequence[Any]) -> dict[str, Tensor]:
        """Parameters of a copy by name, prefixed with the place of their operation in the sequence."""
        found: dict[str, Tensor] = {}
        for at, node in enumerate(nodes):
            for name, (owner, attribute) in node.slots.items():
                place = self.places[at]
                parameter: Tensor = getattr(owner, attribute)
                if not any(parameter is known for known in found.values()):
                    full = f"{place}.{name}" if place else name
                    found[full if full not in found else f"{full}@{at}"] = parameter
        return found

    def names(self) -> tuple[str, ...]:
        """Everything that can have a gradient: `x`, channels, parameters."""
        given = [name for name in self.inputs if not self._is_whole(name)]
        return ("x", *given, *self.named(self.nodes))

    def _is_whole(self, name: str) -> bool:
        """Whether a channel holds integers, such as ends of groups; integers are not drawn and have no gradient."""
        like = self.channels.get(name)
        return like is not None and not (like.is_floating_point() or like.is_complex())

    def shape_at(self, shape: Shape) -> list[Shape]:
        """Shapes of the input of each operation and of the last output; raises `ValueError` if an operation does."""
        shapes = [shape]
        for node in self.nodes:
            assert isinstance(node.operation, UnfusedOperation)
            shapes.append(tuple(node.operation.infer(shapes[-1])))
        return shapes

    def shapes(self) -> list[Shape]:
        """Shapes to test, the main one first: that of `x`, other and odd numbers of rows, 1-D, no rows."""
        given = tuple(self.x.shape)
        last, rows = given[-1:], torch.Size(given[:-1]).numel()
        main = given if rows >= _ROWS else (_ROWS, *last)
        wanted = [main, given, last, (1, *last), (7, *last), (2, 3, *last), (2, 3, 5, *last), (0, *last)]
        wanted += [(_MANY_ROWS, *last)] if rows < _MANY_ROWS else []
        return [shape for shape in dict.fromkeys(wanted) if self.accepts(shape)] or [given]

    def accepts(self, shape: Shape) -> bool:
        """Whether the references accept a shape; exceptions other than ValueError are noted in `refused`."""
        try:
            self.references(Case(shape, torch.float64, grad=False), 0)
        except ValueError:
            return False
        except Exception as error:
            self.refused.append(f"x {shape}, which the reference refuses: {type(error).__name__}: {error}")
            return False
        return True

    def inputs_for(self, case: Case, seed: int) -> dict[str, Tensor]:
        """Tensor x and the channels by name, each in newly allocated memory."""
        inputs = {"x": self._draw(case, case.shape, self.x, seed, 0)}
        shapes = None
        for i, name in enumerate(self.inputs):
            like = self.channels.get(name)
            if like is not None and self._is_whole(name):
                inputs[name] = like.detach().clone()
                continue
            if like is None:
                shapes = shapes or self.shape_at(case.shape)
                at = next(p for p, node in enumerate(self.nodes) if any(c == name for _, c in node.inputs))
                shape = shapes[at]
            else:
                follows = like.shape[:-1] == self.x.shape[:-1]
                shape = (*case.shape[:-1], *like.shape[-1:]) if follows else tuple(like.shape)
            inputs[name] = self._draw(case, shape, like, seed, 7 + i)
        return inputs

    def _draw(self, case: Case, shape: Shape, like: Tensor | None, seed: int, at: int) -> Tensor:
        if like is not None and case.regime == "given" and tuple(like.shape) == shape:
            values = like.detach().to(case.dtype)
            values = values if seed == self.seed else varied(values, seed)
        else:
            regime = {"given": "normal", HUGE: "extremes"}.get(case.regime, case.regime)
            values = _numbers(regime, shape, seed + at, case.dtype).to(self.x.device)
        if case.regime == HUGE:
            # Room for a short sum: near the largest number, the order of summation decides whether a sum overflows.
            values = values * (2.0**-6 if torch.finfo(case.dtype).max < 1e5 else 2.0**-12)
        return laid_out(values, case.layout)

    def run(self, bench: Bench, case: Case, seed: int, *, reference: bool = False, wide: bool = False) -> Outcome:
        """Run a bench and its backward from random gradients.

        Runs with the same seed use the same values; a seed other than the specimen's also varies the parameters. If
        `wide`, the inputs are widened to float64 after they are rounded to the case's dtype.
        """
        inputs, parameters = self._given(bench, case, seed, wide)
        for p in parameters.values() if seed != self.seed else ():
            p.data.copy_(varied(p.data.to(case.dtype), seed))
        watch = Untouched({**inputs, **parameters})
        # Expected results are quantized in the same way, from values that float32 can represent.
        quantized = within(wide=reference and wide)
        with seeded(self.seed + seed, self.x.device), torch.set_grad_enabled(case.grad), watch, quantized:
            outputs = self._outputs(bench.references if reference else bench, inputs)
            incoming = self._incoming(case, outputs, seed)
            with Untouched(incoming):
                grads = _gradients(case, outputs, incoming, inputs, parameters, twice=not reference)
            return Outcome(inputs, parameters, incoming, outputs, grads, torch.get_rng_state())

    def run_beside(self, bench: Bench, case: Case) -> dict[str, Tree]:
        """As `run` with the specimen's own seed, beside a call on other numbers.

        That call runs before the backward pass of the first, and its own backward pass runs last.
        """
        calls: list[tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]] = []
        for seed in (self.seed, self.seed + 1):
            inputs, parameters = self._given(bench, case, seed)
            with seeded(2 * self.seed, self.x.device), torch.set_grad_enabled(case.grad):
                outputs = self._outputs(bench, inputs)
            calls.append((outputs, self._incoming(case, outputs, seed), inputs, parameters))
        grads = [_gradients(case, *call, twice=False) for call in calls]
        return {**calls[0][0], **grads[0]}

    def _given(
        self, bench: Bench, case: Case, seed: int, wide: bool = False
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Inputs and parameters by name, each with whether its gradient is needed."""
        inputs = self.inputs_for(case, seed)
        if wide:
            inputs = {n: t.double().contiguous() if t.is_floating_point() else t for n, t in inputs.items()}
        parameters = self.named(bench.nodes)
        for name, t in (*inputs.items(), *parameters.items()):
            t.requires_grad_(name not in case.frozen and t.is_floating_point())
        return inputs, parameters

    def _outputs(self, call: Callable[..., Any], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        out: Any = call(**inputs)
        values: tuple[Tensor, ...] = (out,) if isinstance(out, Tensor) else out
        return dict(zip(("y", *self.outputs), values, strict=True))

    def _incoming(self, case: Case, outputs: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
        return {f"d{name}": self._gradient(case, y, seed + 50 + i) for i, (name, y) in enumerate(outputs.items())}

    def _gradient(self, case: Case, y: Tensor, seed: int) -> Tensor:
        regime = "one_nan" if case.dy_regime == "one_nan" else "normal"
        values = _numbers(regime, tuple(y.shape), seed, case.dtype).to(y.device)
        # Gradients are linear in dy: an error that grows faster than dy exceeds the bound.
        large = 2.0**8 if torch.finfo(case.dtype).max < 1e5 else 2.0**24
        values = values * {"large": large, "infinite": torch.inf}.get(case.dy_regime, 1)
        return laid_out(values, case.dy_layout).to(y.dtype)


def uncounted(plan: Plan, saved: bool = True) -> list[str]:
    """Which bytes a plan cannot count, and why: saved bytes only if `saved`, else the peak."""
    if plan.memory is None:
        return [f"what it saves for backward: {plan.memory_unknown}"] if saved and plan.memory_unknown else []
    return [f"its peak in a plan: {plan.memory.peak_unknown}"] if plan.memory.peak_unknown else []


def _gradients(
    case: Case,
    outputs: Mapping[str, Tensor],
    incoming: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    *,
    twice: bool,
) -> dict[str, Tensor | None]:
    """Gradients by name; with `twice`, from two backward passes through one graph, which must be equal bit for bit."""
    wanted = {f"d_{name}": t for name, t in inputs.items() if t.requires_grad}
    wanted |= {f"{name}.grad": p for name, p in parameters.items() if p.requires_grad}
    used = {name: y for name, y in outputs.items() if y.requires_grad and name not in case.unused}
    if not case.grad or not used or not wanted:
        return {}
    ys, dys, leaves = (*used.values(),), tuple(incoming[f"d{name}"] for name in used), (*wanted.values(),)
    first, *again = (
        dict[str, Tensor | None](
            zip(wanted, torch.autograd.grad(ys, leaves, dys, keep, allow_unused=True), strict=True)
        )
        for keep in ((True, False) if twice else (False,))
    )
    try:
        for grads in again:
            assert_bitwise_equal(grads, first)
    except AssertionError as error:
        raise AssertionError(f"a second backward through the same graph differs: {error}") from None
    # An output without a gradient leaves out what it alone depends on, or gives zeros.
    return {name: torch.zeros_like(wanted[name]) if g is None and case.unused else g for name, g in first.items()}


def subsets(names: Sequence[str]) -> list[frozenset[str]]:
    """Every subset of names; if there are many, the empty set, single names, all but one, and all."""
    if 2 ** len(names) <= _MOST_SUBSETS:
        return [frozenset(some) for n in range(len(names) + 1) for some in combinations(names, n)]
    everything = frozenset(names)
    return [frozenset(), *(frozenset({n}) for n in names), *(everything - {n} for n in names), everything]


def few_rows(shapes: Sequence[Shape]) -> Shape:
    """The shape with seven rows if there is one, else the smallest non-empty shape."""
    filled = [shape for shape in shapes if torch.Size(shape).numel()] or list(shapes)
    return next((shape for shape in filled if shape[:-1] == (7,)), min(filled, key=lambda s: torch.Size(s).numel()))


def cases(shapes: Sequence[Shape], dtype: torch.dtype, outputs: Sequence[str] = ()) -> Iterator[Case]:
    """Cases of regimes, given values, edge cases, shapes and layouts; the first of `shapes` is the main one.

    With several outputs, also cases in which one has no gradient, and in which only one has.
    """
    main, few = shapes[0], few_rows(shapes)
    yield from (Case(main, dtype, regime) for regime in REGIMES)
    yield from (Case(shape, dtype, "given") for shape in shapes)
    yield from (Case(few, dtype, regime) for regime in ("zeros", "one_nan", "one_inf", HUGE))
    yield from (Case(few, dtype, dy_regime=regime) for regime in ("one_nan", "large"))
    some = [frozenset({name}) for name in ("y", *outputs)] if outputs else []
    some += [frozenset({"y", *outputs}) - name for name in some]
    yield from (Case(few, dtype, unused=unused) for unused in dict.fromkeys(some))
    # Repeated rows round alike: too few distinct rows remain, and the error bound assumes independent ones.
    at = {layout: few if layout in ("expanded", "scalar") else main for layout in LAYOUTS[1:]}
    # If x is a single repeated number, its variance is only rounding error, which depends on the order of summation.
    yield from (Case(shape, dtype, layout=layout) for layout, shape in at.items() if layout != "scalar")
    yield from (Case(shape, dtype, dy_layout=layout) for layout, shape in at.items())
    yield Case(main, dtype, grad=False)
