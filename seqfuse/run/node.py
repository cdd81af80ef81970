"""The one autograd function, which runs a segment of a plan as one node of the graph."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks  # pyright: ignore[reportPrivateUsage]
from torch.utils.checkpoint import CheckpointError

from ..autograd import Batched, Once, executes
from ..casts import autocasting
from ..env import any_autocast
from ..errors import StateError
from ..maingrad import main_grads
from ..plan.fake import is_fake
from ..saved import is_late, packing
from . import interpret
from .code import backward_code, backward_steps, forward_code, is_static
from .lower import NeededGrads, Segment

SURPRISES = 2
"""So often a forward may save something else than it was seen to; then its records are packed anew in each call."""

_grad_enabled: Callable[[], bool] = torch._C.is_grad_enabled  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportAttributeAccessIssue, reportUnknownVariableType]
# Whether it is `backward()`, and neither `backward(inputs=)` nor `torch.autograd.grad`, that runs.
_asked_for_all: Callable[[], bool] = torch.autograd.Variable._execution_engine.is_checkpoint_valid  # pyright: ignore
_hooks: Any = _top_saved_tensors_default_hooks
_attributes = operator.attrgetter("__dict__")


class Seqfuse(torch.autograd.Function):
    """Runs one segment; graphs and profiles show it as `SeqfuseBackward`."""

    @staticmethod
    def forward(ctx: Any, segment: Segment, seeds: Tensor | None, x: Tensor, *tensors: Tensor) -> Any:
        if segment.code is not None:
            return segment.code(ctx, segment, seeds, x, *tensors)
        run = interpret.forward(segment, x, tensors, seeds)
        return _interpreted(ctx, segment, run, (x, *tensors))

    @staticmethod
    def backward(ctx: Any, *douts: Any) -> Any:
        segment: Segment = ctx.segment
        layout, codes = segment.gradients
        code = codes.get(tuple([d is None for d in douts]))
        seen = layout is ctx.layout and ctx.about is None
        if code is None or not seen or _grad_enabled() or not _is_usual(ctx, segment, douts):
            if not torch.compiler.is_dynamo_compiling() and Batched.given(douts):
                tensors = functools.cache(lambda: _saved_tensors(ctx))  # a checkpoint hands them out once
                return tuple(Batched.run(lambda *one: _interpret_backward(ctx, segment, one, tensors()), douts))
            return _interpret_backward(ctx, segment, douts)
        tensors = ctx.saved_tensors if ctx.mark is None else _saved_tensors(ctx)
        if segment.autocast is None and not any_autocast():
            return code(ctx, segment, tensors, *douts)
        with autocasting(segment.context.env.device, segment.autocast):
            return code(ctx, segment, tensors, *douts)


# What a node has that only some calls set: where records are among the saved tensors, as the code was made to save
# them (`layout`), in code that packs them anew (`tokens`) or after a call that was interpreted (`about`, with what fell
# back); what y and outputs are like, for an output that the loss does not use; and the size of the tensor that marks a
# checkpointed forward; the parameters themselves, where each is one that autograd accumulates into; the functions that
# make tensors again (`functions`), in the order of a layout.
_node: Any = Seqfuse._backward_cls  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportPrivateUsage]
_node.layout, _node.tokens, _node.about, _node.like, _node.mark, _node.leaves = None, None, None, {}, None, None
_node.functions = ()
# What the engine calls, which would look `backward` up in two more steps.
_node.apply = Seqfuse.backward


def _save(ctx: Any, segment: Segment, tensors: list[Any], fell: Sequence[int] = ()) -> None:
    """Save tensors; under a checkpoint with an empty one whose shape, which torch compares, says what ran."""
    hooks: Any = _hooks(False)
    if tensors and hooks is not None and getattr(hooks[1], "__module__", None) == "torch.utils.checkpoint":
        ran = hash((segment.signature, *fell)) % (1 << 62)
        tensors = [*tensors, torch.empty((0, ran), dtype=torch.uint8, device="cpu")]
        ctx.mark = tensors[-1].shape
    ctx.save_for_backward(*tensors)


def _saved_tensors(ctx: Any) -> Sequence[Any]:
    """The saved tensors of a node; an error where a checkpointed forward ran another plan the second time."""
    if ctx.mark is None:
        return ctx.saved_tensors
    tensors, cause = list[Any](), None
    # Reading them recomputes a checkpointed forward, which must run the plan this node was made by.
    try:
        tensors = ctx.saved_tensors
    except CheckpointError as error:
        cause = error
    if cause is not None or tensors[-1].shape != ctx.mark:
        message = "a checkpointed forward was recomputed under another plan, or did not save again what it had saved"
        hint = "do not change fusions, modes or hooks between forward and backward"
        raise StateError(message, code="SF503", hint=hint) from cause
    return tensors[:-1]


def _interpreted(ctx: Any, segment: Segment, run: interpret.Forward, inputs: Sequence[Tensor]) -> Any:
    ctx.segment, ctx.about, ctx.like = segment, (run.kept, run.fell), run.like
    ctx.set_materialize_grads(False)
    _save(ctx, segment, run.tensors, run.fell)
    if not run.fell:
        _prepare(segment, run, inputs)
    values = [run.y, *[run.channels[name] for name in segment.outputs]]
    return _leave(ctx, segment, values, inputs) if segment.outputs else _own(run.y, inputs)


def _prepare(segment: Segment, run: interpret.Forward, inputs: Sequence[Tensor]) -> None:
    """Make the code of a segment's forward, once each of its steps has been checked."""
    if is_fake(inputs[0]) or torch.compiler.is_compiling() or not segment.is_checked(segment.forward):
        return
    if not segment.live:
        segment.code = forward_code(segment, {"failed": _failed}, None)
        return
    static = segment.surprises < SURPRISES and is_static(run.kept)
    segment.layout = tuple(run.kept) if static else None
    calls = {"failed": _failed, "pack": _pack, "save": _save, "leave": _leave, "own": _own, "hooks": _hooks}
    leaves = all(type(p) is nn.Parameter for p in inputs[1 + len(segment.inputs) :])
    segment.code = forward_code(segment, calls, segment.layout, leaves)


def _failed(
    ctx: Any, segment: Segment, at: int, error: Exception, seeds: Tensor | None, x: Tensor, tensors: Sequence[Tensor]
) -> Any:
    """Rerun a segment without the fusion that failed; there is no node where nothing is saved."""
    interpret.may_fall_back(segment, segment.forward[at], error, x, segment.forward[:at])
    failed = [(segment.forward[at], error)]
    del error  # its traceback will hold this frame
    run = interpret.forward(segment, x, tensors, seeds, failed)
    return _interpreted(ctx, segment, run, (x, *tensors)) if segment.live else _returned(segment, run)


def _pack(ctx: Any, segment: Segment, saved: Sequence[Any]) -> tuple[int, Exception] | None:
    """Save records that are not as they had been seen; the next call looks at them again.

    What a step saved may be none of its records: then the step that failed so, and why.
    """
    memo, tensors, tokens = dict[int, int](), list[Tensor](), list[Any]()
    for step, found in zip((step for step in segment.forward if step.saves), saved, strict=True):
        try:
            tokens += [packing(r.cls, r.kept)[0](r.among(found), memo, tensors) for r in step.saves]
        except Exception as error:
            interpret.may_fall_back(segment, step, error, again=segment.forward)
            return segment.forward.index(step), error
    ctx.layout, ctx.tokens = None, tokens
    _save(ctx, segment, tensors)
    if segment.layout is not None:
        segment.surprises += 1
        segment.code = segment.layout = None
    return None


def _interpret_backward(
    ctx: Any, segment: Segment, douts: Sequence[Any], tensors: Sequence[Any] | None = None, failed: Any = None
) -> tuple[Any, ...]:
    tensors = _saved_tensors(ctx) if tensors is None else tensors
    kept, fell = ctx.about or (ctx.layout and [*_with_functions(ctx.layout, ctx.functions)], ())
    if kept is None:
        kept = [*zip((record for step in segment.forward for record in step.saves), ctx.tokens, strict=True)]
    needed = _needed(ctx, segment)
    nodes = ctx.next_functions[len(ctx.next_functions) - len(segment.parameters) :]
    buffers = main_grads([fn for fn, _ in nodes], executes, segment.place)
    d_channels = dict(zip(segment.outputs, douts[1:], strict=True))
    with torch.no_grad(), autocasting(segment.context.env.device, segment.autocast):
        dx, sums = interpret.backward(
            segment, kept, tensors, ctx.like, fell, douts[0], d_channels, needed, buffers, failed
        )
    if segment.code is not None and not torch.compiler.is_compiling() and not any(map(is_fake, douts)):
        _prepare_backward(segment, douts)
    grads = (None, None, dx, *[d_channels.get(c) for c in segment.inputs], *sums)
    return Once.guard(ctx, grads, (*douts, *tensors)) if torch.is_grad_enabled() else grads


def _prepare_backward(segment: Segment, douts: Sequence[Any]) -> None:
    """Make the code of a segment's backward for outputs that have a gradient as these have, once steps were checked."""
    given, (layout, codes) = tuple([d is None for d in douts]), segment.gradients
    if layout is not segment.layout:
        codes = {}
    if given in codes:
        return
    missing = [name for name, d in zip(("", *segment.outputs), douts, strict=True) if d is None]
    steps = backward_steps(segment, missing)
    if steps is None:
        code = None
    elif segment.is_checked([step for _, step in steps], True):
        code = backward_code(segment, {"failed": _failed_back}, segment.layout, steps, missing)
    else:
        return
    segment.gradients = segment.layout, {**codes, given: code}


def _with_functions(layout: Sequence[interpret.Kept], functions: Iterable[Any]) -> Iterator[interpret.Kept]:
    """A layout with the functions of this call, which make tensors again, in the place of those it was made with."""
    left = iter(functions)
    for record, tokens in layout:
        yield record, tuple([(next(left), *token[1:]) if is_late(token) else token for token in tokens])


def _failed_back(
    ctx: Any, segment: Segment, at: int, error: Exception, tensors: Sequence[Any], douts: Sequence[Any]
) -> Any:
    step, again = segment.backward[at], segment.backward[:at]
    if step.fused or not all(s.repeatable for s in again):
        interpret.may_fall_back(segment, step, error, again=again)
    failed = [(step, error)]
    del error
    return _interpret_backward(ctx, segment, douts, tensors, failed)


def _is_usual(ctx: Any, segment: Segment, douts: Sequence[Any]) -> bool:
    """Whether every gradient is needed, and none is added to a buffer of its parameter's own or comes in a batch."""
    if torch.compiler.is_dynamo_compiling():  # as compiled autograd does
        return False
    if not _asked_for_all() and (_needed(ctx, segment) is not None or Batched.given(douts)):
        return False
    if ctx.leaves is not None:
        return not any(map(_attributes, ctx.leaves)) or not any("main_grad" in p.__dict__ for p in ctx.leaves)
    return not any(hasattr(getattr(fn, "variable", None), "main_grad") for fn, _ in ctx.next_functions)


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
    """The results that a node returns, marked where they have no gradient.

    Other modules may change a tensor in place: before one, each tensor is returned once, then the place of the first.
    Operations of this library change nothing: before one, each name has a tensor of its own, so that gradients are
    summed in the same order wherever a sequence is cut.
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
    """A tensor that the caller may change in place, as autograd allows for no input and no view that a node returns."""
    if not value.requires_grad and not value._is_view():
        return value
    base = value if value._base is None else value._base
    for t in others:
        if t is base or t._base is base:
            return value.clone()
    return value.detach()


# `Function.apply` first looks for functorch wrappers among its arguments; the fuser has already ruled them out.
apply_node: Callable[..., Any] = super(torch.autograd.Function, Seqfuse).apply  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
"""`apply_node(segment, seeds, x, *channels, *parameters)` runs a segment behind one node: y, or `(y, *outputs)`."""


def run_plain(segment: Segment, seeds: Tensor | None, x: Tensor, *inputs: Tensor) -> Any:
    """Run a segment in which no gradient is needed: y, or `(y, *outputs)`."""
    if segment.code is not None:
        return segment.code(segment, seeds, x, *inputs)
    run = interpret.forward(segment, x, inputs, seeds)
    if not run.fell:
        _prepare(segment, run, (x,))
    return _returned(segment, run)


def _returned(segment: Segment, run: interpret.Forward) -> Any:
    return (run.y, *[run.channels[name] for name in segment.outputs]) if segment.outputs else run.y


def taken(out: Sequence[Any]) -> Sequence[Tensor]:
    """The results of a node; a number stands for the tensor at that place, which it would return twice."""
    return [out[t] if isinstance(t, int) else t for t in out]
