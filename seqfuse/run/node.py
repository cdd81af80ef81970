"""The only autograd function: it runs a segment of a plan as one node of the graph."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks  # pyright: ignore[reportPrivateUsage]
from torch.utils.checkpoint import CheckpointError

from ..autograd import Batched, Once, executes
from ..casts import autocasting, cast_once
from ..env import any_autocast
from ..errors import PluginError, StateError
from ..fake import is_fake
from ..maingrad import MainGrads, main_grads
from ..saved import Recompute
from .code import BackwardVariant, backward_code, forward_code, joint_record
from .fallback import may_fall_back, reason_of, recovered, warn
from .lower import Late, NeededGrads, Segment, lent

_grad_enabled: Callable[[], bool] = torch._C.is_grad_enabled  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportAttributeAccessIssue, reportUnknownVariableType]
# Whether the running pass is `backward()`, not `backward(inputs=)` or `torch.autograd.grad`.
_asked_for_all: Callable[[], bool] = torch.autograd.Variable._execution_engine.is_checkpoint_valid  # pyright: ignore
saved_hooks: Any = _top_saved_tensors_default_hooks
_attributes = operator.attrgetter("__dict__")

# The data of a node besides its saved tensors: the segment; fields that are not tensors; descriptions of y and outputs,
# for outputs that the loss does not use; the parameters that autograd accumulates into; and the recomputed fields or,
# if `pack` saved the records, the place of each field.
_Kept = tuple[Segment, tuple[Any, ...], Any, Sequence[nn.Parameter], "Late | _Packed"]


class Seqfuse(torch.autograd.Function):
    """Runs one segment; graphs and profiles show it as `SeqfuseBackward`."""

    @staticmethod
    def forward(ctx: Any, segment: Segment, seeds: Tensor | None, x: Tensor, *tensors: Tensor) -> Any:
        if segment.code is not None:
            return segment.code(ctx, segment, seeds, x, *tensors)
        return _first(segment, (x, *tensors), lambda code: code(ctx, segment, seeds, x, *tensors))

    @staticmethod
    def backward(ctx: Any, *douts: Any) -> Any:
        kept: _Kept = ctx.kept
        segment, packed = kept[0], kept[4]
        if segment.again is not None:
            if (
                torch.compiler.is_dynamo_compiling()
            ):  # under compiled autograd, which would compile each frame of the plan
                disable: Any = torch.compiler.disable  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
                return disable(_run_again)(ctx, kept, douts)
            return _run_again(ctx, kept, douts)
        late = None if packed.__class__ is _Packed else packed
        code = segment.codes.get((tuple([d is None for d in douts]), None, late, False, None))
        if code is None or code.checks or _grad_enabled() or not _is_usual(ctx, kept, douts):
            if not torch.compiler.is_dynamo_compiling() and Batched.given(douts):
                tensors = functools.cache(lambda: _saved_tensors(ctx, packed))  # a checkpoint unpacks them only once
                return tuple(Batched.run(lambda *one: _backward(ctx, kept, one, [*tensors()]), douts))
            return _backward(ctx, kept, douts, _saved_tensors(ctx, packed))
        tensors = _saved_tensors(ctx, packed)
        if late is None:
            tensors = _values(packed, tensors)
        ctx.maybe_clear_saved_tensors()
        if segment.autocast is None and not any_autocast():
            return code(segment, kept, tensors, None, None, *douts)
        with autocasting(segment.context.env.device, segment.autocast):
            return code(segment, kept, tensors, None, None, *douts)


_node: Any = Seqfuse._backward_cls  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportPrivateUsage]
# Autograd calls `apply`, which would look up `backward` in two more steps.
_node.apply = Seqfuse.backward


class Alone:
    """A substitute for the context of a node: `Seqfuse.forward` and `backward` run with it without autograd."""

    next_functions: Sequence[Any] = ()
    saved_tensors: Sequence[Any] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Does nothing: without autograd nothing is differentiated."""

    def maybe_clear_saved_tensors(self) -> None:
        """Does nothing: a backward may run more than once."""


class _Replayed(Alone):
    """A substitute for the node of a recomputed segment."""

    def __init__(self, next_functions: Sequence[Any], given: tuple[Sequence[Any], Sequence[Any]]) -> None:
        self.next_functions, self.given = next_functions, given  # saved tensors and other data of the first forward

    def maybe_clear_saved_tensors(self) -> None:
        self.saved_tensors = ()


class _FailedAgain(Exception):
    """A fusion failed in the backward of a recomputed segment: a segment without the fusion recomputes the forward, and
    the backward continues with it.
    """

    def __init__(self, segment: Segment, goes_on: Callable[[Any], Any]) -> None:
        self.segment, self.goes_on = segment, goes_on  # with the node


def _run_again(ctx: Any, kept: _Kept, douts: Sequence[Any]) -> tuple[Any, ...]:
    packed = kept[4]
    tensors = _saved_tensors(ctx, packed)
    values = _values(packed, tensors)
    if Batched.given(douts):
        return tuple(Batched.run(lambda *one: _again(ctx, kept, values, one), douts))
    grads = _again(ctx, kept, values, douts)
    return Once.guard(ctx, grads, (*douts, *tensors)) if torch.is_grad_enabled() else grads


def _again(ctx: Any, kept: _Kept, values: Sequence[Any], douts: Sequence[Any]) -> tuple[Any, ...]:
    segment: Any = kept[0].again
    x, seeds, *rest = values
    first = len(segment.inputs)
    channels, parameters = rest[:first], rest[first : first + len(segment.slots)]
    goes_on: Callable[[Any], Any] | None = None
    while True:
        node = _Replayed(ctx.next_functions, (values, kept[1]))
        with torch.no_grad(), autocasting(segment.context.env.device, segment.autocast):
            lock = segment.context.lock or contextlib.nullcontext()
            with lock, segment.buffers_of(kept[1]), lent(segment.slots, parameters), cast_once():
                segment.apart = kept[0].apart
                Seqfuse.forward(node, segment, seeds, x, *channels, *kept[3])  # pyright: ignore[reportArgumentType]
            try:
                return Seqfuse.backward(node, *douts) if goes_on is None else goes_on(node)
            except _FailedAgain as again:
                segment, goes_on = again.segment, again.goes_on


def _first(segment: Segment, inputs: Sequence[Tensor], run: Callable[[Any], Any]) -> Any:
    """Runs the forward code with checks; once all steps are checked, generates the code without."""
    if not segment.replays:
        own = inputs[1 + len(segment.inputs) :]
        segment.apart = tuple([i for i, p in enumerate(own) if type(p) is not nn.Parameter])
    calls = {"failed": _failed, "pack": _pack, "leave": _leave, "own": _own, "hooks": saved_hooks}
    code: Any = segment.first
    if code is None:
        code = segment.first = forward_code(segment, calls, True)
        if segment.live:  # a compiler that traces a backward needs its usual code
            _write_back(segment, BackwardVariant((False,) * (1 + len(segment.outputs))), True)
    out = run(code)
    if segment.checked.issuperset(code.checks) and not is_fake(inputs[0]) and not torch.compiler.is_compiling():
        segment.code, segment.first = forward_code(segment, calls, False), None
    return out


def _failed(
    ctx: Any,
    segment: Segment,
    at: int,
    error: Exception,
    seeds: Tensor | None,
    x: Tensor,
    tensors: Sequence[Tensor],
    returned: bool = False,
) -> Any:
    """Runs a segment again without the fusion that failed, or that `returned` values which cannot be saved."""
    step = segment.forward[at]
    may_fall_back(segment, step, error, x, segment.forward if returned else segment.forward[:at])
    reason, other = reason_of(error), segment.without(at)
    del error  # its traceback references this frame
    run = run_plain if ctx is None else functools.partial(Seqfuse.forward, ctx)
    out = run(other, seeds, x, *tensors)
    warn(segment, step, reason, x)
    return out


class _Packed:
    """The places of the fields that `_pack` saved, and the mark of a checkpointed forward."""

    __slots__ = ("mark", "places")

    def __init__(self, places: Sequence[Any], mark: torch.Size | None) -> None:
        self.places, self.mark = places, mark


def _values(packed: Late | _Packed, tensors: list[Any]) -> list[Any]:
    """The value of each field that `pack` saved: a tensor, several, `None`, or a `Recompute`."""
    return [_value(place, tensors) for place in packed.places] if isinstance(packed, _Packed) else tensors


def _value(place: Any, tensors: Sequence[Any]) -> Any:
    if place is None or place.__class__ is int:
        return None if place is None else tensors[place]
    values = [_value(one, tensors) for one in place[1:]]
    return tuple(values) if place[0] is None else Recompute(place[0], *values)


def _place(value: Any, memo: dict[int, int], tensors: list[Any]) -> Any:
    """The index of a value among the tensors, each of which is saved once; for several tensors their structure."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        place = len(tensors)
        if not torch.compiler.is_dynamo_compiling():  # Dynamo has no identity of tensors in tuples
            place = memo.setdefault(id(value), place)
        tensors += [value] * (place == len(tensors))
        return place
    if isinstance(value, Recompute):
        return (value.fn, *[_place(t, memo, tensors) for t in value.tensors])
    if not isinstance(value, tuple | list):
        raise TypeError
    return (None, *[_place(t, memo, tensors) for t in cast(Sequence[Any], value)])


def _pack(
    ctx: Any, segment: Segment, fields: Sequence[dict[str, Any]], like: Any, leaves: Any
) -> tuple[int, Exception] | None:
    """Saves records with recomputed fields, or for saved-tensor hooks, which see each tensor once.

    For a field that cannot be saved returns the index of its step and the error.
    """
    saves, memo, tensors, places = segment.saves, dict[int, int](), list[Any](), list[Any]()
    for field in (*saves.tensors, *saves.several):
        held = fields[field.record]
        try:
            value = held.get("_late", {}).get(field.name) or held.get(field.name)
            places.append(_place(value, memo, tensors))
        except TypeError:
            message = f"field {field.name!r} of Saved must hold a tensor, None or a tuple of tensors"
            error = PluginError(f"{message}, not a {type(held[field.name]).__name__}", code="SF302")
            return saves.records[field.record][0], error
    data = tuple([fields[field.record][field.name] for field in saves.data])
    hooks: Any = None if segment.replays else saved_hooks(False)
    mark = None
    if tensors and hooks is not None and getattr(hooks[1], "__module__", None) == "torch.utils.checkpoint":
        # An empty tensor whose shape identifies the plan; torch's checkpoint compares shapes.
        mark = torch.empty((0, hash(segment.signature) % (1 << 62)), dtype=torch.uint8, device="cpu")
        tensors.append(mark)
    ctx.save_for_backward(*tensors)
    if not torch.compiler.is_dynamo_compiling():
        segment.late = _made_again(segment, places)
    ctx.kept = segment, data, like, leaves, _Packed(places, None if mark is None else mark.shape)
    return None


def _made_again(segment: Segment, places: Sequence[Any]) -> Late:
    """The recomputed fields of steps of this library, which need the same number of tensors in every call; or none."""
    saves = segment.saves
    found = [i for i, place in enumerate(places) if place.__class__ is tuple and place[0] is not None]
    if found and (found[-1] >= len(saves.tensors) or any(type(t) is not int for i in found for t in places[i][1:])):
        return ()
    steps = [segment.forward[saves.records[saves.tensors[i].record][0]] for i in found]
    ours = all(step.operation.__class__.__module__.startswith("seqfuse.") for step in steps)
    return tuple((i, len(places[i]) - 1) for i in found) if ours else ()


def _saved_tensors(ctx: Any, packed: Late | _Packed) -> list[Any]:
    """The saved tensors of a node; raises if a checkpoint recomputed the forward with another plan."""
    if not isinstance(packed, _Packed) or packed.mark is None:
        return [*ctx.saved_tensors]
    tensors, cause = list[Any](), None
    # Reading them recomputes a checkpointed forward, which must run the plan of this node.
    try:
        tensors = [*ctx.saved_tensors]
    except CheckpointError as error:
        cause = error
    if cause is not None or tensors[-1].shape != packed.mark:
        message = "a checkpointed forward was recomputed under another plan, or did not save again what it had saved"
        hint = "do not change fusions, memory=, modes or hooks between forward and backward"
        raise StateError(message, code="SF503", hint=hint) from cause
    return tensors[:-1]


def _backward(ctx: Any, kept: _Kept, douts: Sequence[Any], tensors: list[Any]) -> tuple[Any, ...]:
    """Runs a backward with partial gradients, with `main_grad`, or with checks.

    It empties the list of saved tensors, which a caller keeps alive while code of Dynamo is installed.
    """
    segment, packed = kept[0], kept[4]
    needed = _needed(ctx, segment)
    nodes = ctx.next_functions[len(ctx.next_functions) - len(segment.parameters) :]
    buffers = main_grads([fn for fn, _ in nodes], executes, segment.place)
    late = None if isinstance(packed, _Packed) else packed
    variant = BackwardVariant(tuple([d is None for d in douts]), needed, late, buffers is not None)
    values = _values(packed, tensors)
    read = (*douts, *tensors) if torch.is_grad_enabled() else ()
    if values is not tensors:
        tensors.clear()
    if not torch.compiler.is_compiling():
        ctx.maybe_clear_saved_tensors()
    with torch.no_grad(), autocasting(segment.context.env.device, segment.autocast):
        grads = _run_back(segment, kept, variant, values, buffers, None, douts)
    return Once.guard(ctx, grads, read) if torch.is_grad_enabled() else grads


def _run_back(
    segment: Segment,
    kept: _Kept,
    variant: BackwardVariant,
    values: list[Any],
    buffers: MainGrads | None,
    records: Any,
    given: Sequence[Any],
) -> tuple[Any, ...]:
    """Runs a backward for gradients, or with the variables of one in which a fusion failed.

    Each value is freed after the step that reads it last, so that the backward cannot run a second time.
    """
    code = segment.codes.get(tuple(variant)) or _write_back(segment, variant, True)
    grads = code(segment, kept, values, buffers, records, *given)
    passed = variant.needed is None and variant.start is None and segment.checked.issuperset(code.checks)
    if code.checks and passed and not torch.compiler.is_compiling() and not any(map(is_fake, given)):
        _write_back(segment, variant, False)
    return grads


MOST = 64
"""At most so many variants of a backward are kept; then the cache starts empty again."""


def _write_back(segment: Segment, variant: BackwardVariant, checked: bool) -> Any:
    """Generates the code of a backward, with checks until each step was checked with all gradients needed."""
    if len(segment.codes) >= MOST:
        segment.codes.clear()
    code = backward_code(segment, _failed_back, variant, checked)
    if checked and variant.needed is None and segment.checked.issuperset(code.checks):
        code = backward_code(segment, _failed_back, variant, False)
    segment.codes[tuple(variant)] = code
    return code


def _failed_back(
    segment: Segment,
    kept: _Kept,
    at: int | tuple[int, int],
    error: Exception,
    values: list[Any],
    buffers: MainGrads | None,
    records: dict[int, Any] | None,
    variables: dict[str, Any],
    variant: BackwardVariant,
) -> Any:
    """Continues a backward with the operations of a failed fusion."""
    if isinstance(at, tuple):  # an operation of a fusion that was replaced
        may_fall_back(segment, segment.backward[at[0]].unfused(backward=True)[at[1]], error)
        raise error
    step = segment.backward[at]
    record = None if segment.replays else lambda: joint_record(segment, variant, step)(kept, values)
    found = recovered(segment, at, error, record, buffers)
    reason, other = reason_of(error), segment.without(at, backward=True)
    del error  # its traceback references frames
    given = {name: g for name, g in variables.items() if name == "d" or (name[0] in "gp" and name[1:].isdigit())}
    variables.clear()
    later = variant._replace(start=at)
    if segment.replays:
        warn(segment, step, reason, given.get("d"))
        raise _FailedAgain(other, functools.partial(_go_on, later, buffers, given)) from None
    grads = _run_back(other, kept, later, values, buffers, {**(records or {}), **found}, (given,))
    warn(segment, step, reason, given.get("d"))
    return grads


def _go_on(variant: BackwardVariant, buffers: MainGrads | None, given: dict[str, Any], node: Any) -> Any:
    """Runs the rest of a backward after its forward was recomputed again."""
    segment, packed = node.kept[0], node.kept[4]
    variant = variant._replace(late=None if isinstance(packed, _Packed) else packed)
    values = _values(packed, _saved_tensors(node, packed))
    node.maybe_clear_saved_tensors()
    return _run_back(segment, node.kept, variant, values, buffers, None, (given,))


def _is_usual(ctx: Any, kept: _Kept, douts: Sequence[Any]) -> bool:
    """Whether all gradients are needed, none goes to a `main_grad`, and none is batched."""
    if torch.compiler.is_dynamo_compiling():  # as compiled autograd does
        return False
    if not _asked_for_all() and (_needed(ctx, kept[0]) is not None or Batched.given(douts)):
        return False
    if any(map(_attributes, kept[3])) and any("main_grad" in p.__dict__ for p in kept[3]):
        return False
    if not kept[0].apart:
        return True
    nodes = ctx.next_functions[len(ctx.next_functions) - len(kept[0].parameters) :]
    return not any(hasattr(getattr(nodes[i][0], "variable", None), "main_grad") for i in kept[0].apart)


def _needed(ctx: Any, segment: Segment) -> NeededGrads | None:
    """The gradients that `torch.autograd.grad` or `backward(inputs=)` needs; `None` where all are needed."""
    if torch.compiler.is_compiling() or _asked_for_all():
        return None
    runs = [fn and _will_run(fn) for fn, _ in ctx.next_functions]
    if False not in runs:
        return None
    first = len(runs) - len(segment.parameters)
    at_x = first - len(segment.inputs) - 1
    channels = frozenset(c for c, run in zip(segment.inputs, runs[at_x + 1 : first], strict=True) if run)
    return frozenset(i for i, run in enumerate(runs[first:]) if run), bool(runs[at_x]), channels


def _will_run(fn: Any) -> bool:
    try:
        return executes(fn)
    except RuntimeError:
        return True


def _leave(ctx: Any, segment: Segment, values: list[Any], inputs: Sequence[Tensor]) -> tuple[Tensor | int, ...]:
    """The results that a node returns, marked as non-differentiable where they have no gradient.

    The next module may mutate a tensor: then each tensor is returned once, and duplicates as the index of the first.
    Operations of this library mutate nothing: before one, each name gets its own view, so that gradients are summed in
    the same order wherever a sequence is cut.
    """
    found: list[Any] = []
    for name, value in zip(("", *segment.outputs), values, strict=True):
        first = next(i for i, other in enumerate(values) if other is value)
        if first < len(found) and segment.followed and name in segment.crossing:
            found.append(value.view_as(value))
        elif first < len(found):
            found.append(first)
        elif name not in segment.crossing:
            found.append(_own(value, [*inputs, *(t for t in values if t is not value)]))
        else:
            found.append(value)
    pairs = zip(segment.outputs, found[1:], strict=True)
    ctx.mark_non_differentiable(*[v for name, v in pairs if name in segment.frozen and isinstance(v, Tensor)])
    return tuple(found)


def _own(value: Tensor, others: Sequence[Tensor]) -> Tensor:
    """A tensor that the caller may mutate: autograd forbids that for inputs and views that a node returns."""
    if not value.requires_grad and not value._is_view():
        return value
    base = value if value._base is None else value._base
    for t in others:
        if t is base or t._base is base:
            return value.clone()
    return value.detach()


# `Function.apply` first searches its arguments for functorch wrappers, which the fuser has already excluded.
apply_node: Callable[..., Any] = super(torch.autograd.Function, Seqfuse).apply  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
"""`apply_node(segment, seeds, x, *channels, *parameters)` runs a segment behind one node: y, or `(y, *outputs)`."""


def run_plain(segment: Segment, seeds: Tensor | None, x: Tensor, *inputs: Tensor) -> Any:
    """Runs a segment in which no gradient is needed: y, or `(y, *outputs)`."""
    if segment.code is not None:
        return segment.code(segment, seeds, x, *inputs)
    return _first(segment, (x,), lambda code: code(segment, seeds, x, *inputs))


def taken(out: Sequence[Any]) -> Sequence[Tensor]:
    """The results of a node, with each index replaced by the tensor that it duplicates."""
    return [out[t] if isinstance(t, int) else t for t in out]


def run_alone(segment: Segment, seeds: Tensor | None, x: Tensor, *channels: Tensor) -> tuple[Alone, Sequence[Tensor]]:
    """Runs a segment without autograd. Returns a substitute for its node, for `back_alone`, and y with the outputs."""
    node = Alone()
    out: Any = (
        Seqfuse.forward(node, segment, seeds, x, *channels) if segment.live else run_plain(segment, seeds, x, *channels)
    )
    return node, taken(out) if segment.outputs else (out,)


def back_alone(node: Alone, *douts: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of x, channels and parameters of a segment that ran without autograd."""
    return Seqfuse.backward(node, *douts)[2:]
