"""Runs the steps of a segment one by one: in the first call, where contracts are checked, and in unusual calls.

A fusion that fails gives way to its operations here. `codegen` writes the same walk out for the calls after the first.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import (
    FallbackWarning,
    InputError,
    KernelError,
    PluginError,
    SeqfuseError,
    device_is_lost,
    one_line,
    step_note,
)
from ..fusion import BackwardFusion, records_of
from ..maingrad import MainGrads, accumulated
from ..plan.fake import is_fake
from ..plan.inputs import Like, clearer, recast
from ..plan.step import Record, Step, fit
from ..saved import Layout, Saved, packing
from .check import check_backward, check_forward
from .lower import NeededGrads, Segment

_RECORD_CALL = re.compile(r"Saved\w*\.__init__\(\)")
# A record that was saved, and where its fields are among the saved tensors.
Kept = tuple[Record, tuple[Any, ...]]


@dataclasses.dataclass(slots=True, eq=False)
class Forward:
    """One run of a segment's forward: its channels as they are at the end, what it saves, and what fell back."""

    channels: dict[str, Tensor]
    tensors: list[Tensor] = dataclasses.field(default_factory=lambda: list[Tensor]())  # to save, each once
    kept: list[Kept] = dataclasses.field(default_factory=lambda: list[Kept]())
    # What y and the extra outputs are like, by the position after the step that made them.
    like: dict[int, dict[str, Like]] = dataclasses.field(default_factory=lambda: dict[int, dict[str, Like]]())
    fell: tuple[int, ...] = ()  # where the steps begin that fell back
    y: Any = None


def forward(
    segment: Segment,
    x: Tensor,
    given: Sequence[Tensor],
    seeds: Tensor | None,
    failed: list[tuple[Step, Exception]] | None = None,
) -> Forward:
    """Run the forward steps, with the channels `given` first; of a step that `failed`, the operations."""
    channels = dict(zip(segment.inputs, given, strict=False))
    run, memo = Forward(channels), dict[int, int]()
    left, entered, failures = [*reversed(segment.forward)], x, list[tuple[Step, str | None]]()
    while left:
        step = left.pop()
        try:
            if failed and step is failed[0][0]:
                raise failed.pop()[1]  # its traceback holds this frame, which must not hold it
            segment.context.dtypes[step.start] = x.dtype
            y, made, saved = _call(segment, step, x, channels, seeds)
            if segment.live and made and step.zeros:
                run.like[step.stop] = look(y, {c: made[n] for n, c in step.writes})
            for record in step.saves if segment.live else ():
                pack, _ = packing(record.cls, record.kept)
                run.kept.append((record, pack(record.among(saved), memo, run.tensors)))
            channels.update((c, made[n]) for n, c in step.writes)
            del made, saved  # before the next step runs
        except Exception as error:
            may_fall_back(segment, step, error, entered)
            left += reversed(step.unfused())
            failures.append((step, reason_of(error)))
            continue
        for channel in step.ends:  # last, so that the operations find their channels where something above fails
            del channels[channel]
        x = y
    run.y, run.fell = x, tuple(step.start for step, _ in failures)
    warn(segment, failures, x)
    return run


def _call(
    segment: Segment, step: Step, x: Tensor, channels: Mapping[str, Tensor], seeds: Tensor | None
) -> tuple[Tensor, Mapping[str, Tensor], Any]:
    out, x, given = step.call(segment.context.env, x, channels, seeds)
    if (step.key, False) not in segment.checked and check_forward(segment.context, step, x, out, given):
        segment.checked.add((step.key, False))
    return step.returned(out)


def backward(
    segment: Segment,
    kept: Sequence[Kept],
    tensors: Sequence[Any],
    like: Mapping[int, Mapping[str, Like]],
    fell: Sequence[int],
    dy: Tensor | None,
    d_channels: dict[str, Tensor | None],
    needed: NeededGrads | None = None,
    buffers: MainGrads | None = None,
    failed: list[tuple[Step, Exception]] | None = None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Run the backward steps: the gradients of x and of the parameters; `d_channels` are those of the channels."""
    records = {r.position: packing(r.cls, r.kept)[1](tokens, cast(Any, tensors)) for r, tokens in kept}
    sums: list[Tensor | None] = [None] * len(segment.parameters)
    left = [*reversed(segment.backward if needed is None else segment.narrowed(needed))]
    d, failures = dy, list[tuple[Step, str | None]]()
    while left:
        step = left.pop()
        came = {keyword: d_channels.get(channel) for keyword, channel in step.incoming}
        if d is None and all(g is None for g in came.values()):
            continue
        # Fusions are written for tensors; operations know a gradient that nobody gave.
        missing = isinstance(step.operation, BackwardFusion) and came and any(g is None for g in (d, *came.values()))
        if missing or (step.joint and step.start in fell):
            left += reversed(step.unfused(backward=True))
            continue
        try:
            if failed and step.start == failed[0][0].start:
                raise failed.pop()[1]
            dx, grads = _call_back(segment, step, records, d, came, like, buffers, needed)
        except Exception as error:
            records |= recovered(segment, step, error, records, buffers)
            left += reversed(step.unfused(backward=True))
            failures.append((step, reason_of(error)))
            continue
        for key, slot in step.grads:
            g, i = grads[key], segment.index[slot]
            if g is accumulated:
                if buffers is None or key not in buffers.taken():
                    message = f"bwd returned sf.accumulated for {key!r}, which it did not pop from main_grads"
                    raise PluginError(message, code="SF303", **step.located)
                g = None
            sums[i] = plus(sums[i], g)
        for _, channel in step.incoming:
            d_channels.pop(channel, None)
        for key, channel in step.channel_grads:
            d_channels[channel] = plus(d_channels.get(channel), grads[key])
        d = dx
    warn(segment, failures, d)
    if buffers is not None:
        buffers.settle(sums)
    return d if needed is None or needed[1] else None, sums


def _call_back(
    segment: Segment,
    step: Step,
    records: Mapping[int, Saved],
    d: Tensor | None,
    came: Mapping[str, Tensor | None],
    like: Mapping[int, Mapping[str, Like]],
    buffers: MainGrads | None,
    needed: NeededGrads | None,
) -> Any:
    layout: Layout = step.operation.layout
    if came and step.zeros and not isinstance(step.operation, BackwardFusion):
        d = like[step.stop][""].zeros() if d is None else d
        if step.joint:
            channels = dict(step.incoming)
            came = {n: like[step.stop][channels[n]].zeros() if g is None else g for n, g in came.items()}
    given = step.constants(segment.context.env, backward=True)
    given |= {name: g if g is None else fit(g, layout) for name, g in came.items()}
    if step.operation.backward_signature.main_grads:
        offered = [(key, segment.index[slot]) for key, slot in step.grads]
        given["main_grads"] = {} if buffers is None else buffers.offer(offered)
    d = d if d is None else fit(recast(d, step.dy_dtype), layout)
    own = [fit_record(records.get(r.position) or r.cls.__new__(r.cls), layout) for r in step.records]
    positional: list[Any] = []
    if step.joint or not step.fused:
        positional = own
    else:
        given |= step.by_slot(own)
    out = step.operation.bwd(d, *positional, **given)
    unchecked = needed is not None or (step.key, True) not in segment.checked
    if unchecked and check_backward(segment.context, step, d, out, given) and needed is None:
        segment.checked.add((step.key, True))
    return out


def fit_record(record: Saved, layout: Layout) -> Saved:
    """A record whose tensors are in the layout that a pass accepts."""
    fields = record.__dict__
    if layout == "any":
        return record
    for name in (fields.keys() | fields.get("_late", {}).keys()) & set(record.fields):
        value = getattr(record, name)
        if isinstance(value, Tensor):
            fields[name] = fit(value, layout)
        elif isinstance(value, tuple):
            several = cast(tuple[Any, ...], value)
            fields[name] = tuple(fit(v, layout) if isinstance(v, Tensor) else v for v in several)
    return record


def look(y: Tensor, made: Mapping[str, Tensor]) -> dict[str, Like]:
    """What y is like, by the name "", and extra outputs, by channel."""
    return {c: Like.of(t) for c, t in {"": y, **made}.items()}


def plus(known: Tensor | None, g: Tensor | None) -> Tensor | None:
    """The sum of two gradients, either of which may be missing."""
    return g if known is None else known if g is None else known + g


def recovered(
    segment: Segment, step: Step, error: Exception, records: Mapping[int, Saved], buffers: MainGrads | None
) -> dict[int, Saved]:
    """Check that a backward step may fall back; a joint fusion's record as the records of its operations."""
    where: dict[str, Any] = {"code": "SF401", "operation": step.name, "position": step.start}
    if step.fused and step.operation.backward_signature.main_grads and buffers and (taken := buffers.taken()):
        message = f"it failed after it took the main_grad of {', '.join(taken)}: {type(error).__name__}: {error}"
        raise KernelError(message, **where) from error
    convertible = step.joint and hasattr(step.operation, "unfused")
    if step.joint and not convertible and not isinstance(error, SeqfuseError):
        message = f"the backward of a joint fusion failed: {type(error).__name__}: {error}"
        raise KernelError(
            message, hint="define unfused(saved) -> {slot: Saved} to let it fall back", **where
        ) from error
    may_fall_back(segment, step, error)
    if not convertible:
        return {}
    try:
        saved = dict(records_of(step.operation, step.operation.unfused(records[~step.start])))
        found = dict[int, Saved]()
        for name, _, position, node, _ in step.members:
            one, wanted = saved[name], cast(Any, node.operation.Saved)
            if type(one) is not wanted:
                kind = type(node.operation).__name__
                raise TypeError(f"slot {name!r} needs {kind}.Saved, not {type(one).__qualname__}")
            found[position] = one
    except Exception as second:
        message = f"its backward failed ({type(error).__name__}: {error}), and then its unfused(saved): {second!r}"
        raise KernelError(message, **where) from error
    return found


def reason_of(error: Exception) -> str | None:
    """The reason that a warning gives; none for an input that does not fit, since the operation raises that itself."""
    return None if isinstance(error, InputError) else one_line(error)


def warn(segment: Segment, failures: Sequence[tuple[Step, str | None]], tensor: Any) -> None:
    """Say, once per reason, that operations ran in place of fusions that failed."""
    context = segment.context
    for step, reason in failures:
        if reason is None or is_fake(tensor):
            continue
        if (note := context.note()) is not None:
            note(step.name, step.start, reason)
        if (step.name, reason) not in context.warned:
            context.warned.add((step.name, reason))
            message = f"{step.name} at position {step.start} failed ({reason}); its operations ran unfused"
            warnings.warn(message, FallbackWarning, stacklevel=2)


def may_fall_back(
    segment: Segment, step: Step, error: Exception, tensor: Any = None, again: Sequence[Step] = ()
) -> None:
    """Return if the operations may run in place of a failed fusion; else raise an error that names the step.

    Its input in a forward pass, `tensor`, may be on another device than its parameters. The steps `again` ran before it
    and have to run again.
    """
    clear = clearer(segment.context.nodes, step.covers, error, tensor)
    if clear is not error:
        raise clear from error
    where = step.located
    exchanges = any(getattr(node.operation, "redistribution", None) is not None for node in step.nodes)
    once = exchanges or not all(s.repeatable for s in again)
    if not step.fused or (once and isinstance(error, SeqfuseError)):
        error.add_note(step_note(step.name, step.start, where["path"]))
        raise error
    failure = f"{type(error).__name__}: {error}"
    if once:
        hint = "processes exchange tensors in it or before it, or a cache was filled: that cannot run twice"
        raise KernelError(failure, code="SF401", hint=hint, **where) from error
    if isinstance(error, InputError):
        return  # the operations themselves will say it, with the place
    if isinstance(error, SeqfuseError):
        error.operation, error.position, error.path = error.operation or step.name, step.start, where["path"]
        raise error
    if isinstance(error, TypeError) and _RECORD_CALL.search(str(error)):
        raise PluginError(f"fwd built a wrong Saved: {error}", code="SF302", **where) from error
    if device_is_lost(error):
        message = f"the device reported {error}; its state is lost and nothing can run after it"
        raise KernelError(message, code="SF401", hint="rerun under compute-sanitizer", **where) from error
    on_gpu = segment.context.env.device == "cuda" and torch.cuda.is_available()
    captured = on_gpu and torch.cuda.is_current_stream_capturing()
    if not segment.context.can_fall_back or torch.compiler.is_compiling() or captured:
        raise KernelError(failure, code="SF401", **where) from error
