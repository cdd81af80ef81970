"""Fallback of a failing fusion to its operations: when it is allowed, and the warning."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import (
    FallbackWarning,
    InputError,
    KernelError,
    PluginError,
    SeqfuseError,
    StateError,
    device_is_lost,
    one_line,
    step_note,
)
from ..fake import is_fake
from ..fusion import records_of
from ..maingrad import MainGrads
from ..plan.inputs import clearer
from ..plan.step import Step
from ..saved import Saved
from .lower import Segment

_RECORD_CALL = re.compile(r"(\S*Saved\w*)\.__init__\(\)")
_UNFUSED = "define unfused(saved) -> {slot: Saved} to let it fall back"


def recovered(
    segment: Segment,
    at: int,
    error: Exception,
    record: Callable[[], Saved] | None,
    buffers: MainGrads | None,
) -> dict[int, Saved]:
    """Check that a backward step may fall back; converts a joint fusion's `record` to the records of its operations.

    Without a `record` the forward is recomputed, which creates them.
    """
    step = segment.backward[at]
    where: dict[str, Any] = {"code": "SF401", "operation": step.name, "position": step.start}
    if step.fused and step.operation.backward_signature.main_grads and buffers and (taken := buffers.taken()):
        message = f"it failed after it took the main_grad of {', '.join(taken)}: {type(error).__name__}: {error}"
        raise KernelError(message, **where) from error
    convertible = step.joint and record is not None and hasattr(step.operation, "unfused")
    if step.joint and record is not None and not convertible and not isinstance(error, SeqfuseError):
        message = f"the backward of a joint fusion failed: {type(error).__name__}: {error}"
        raise KernelError(message, hint=_UNFUSED if segment.context.can_fall_back else None, **where) from error
    may_fall_back(segment, step, error)
    if not convertible or record is None:
        return {}
    try:
        saved = dict(records_of(step.operation, step.operation.unfused(record())))
        found = dict[int, Saved]()
        for name, _, position, node, _ in step.members:
            wanted = cast(Any, node.operation.Saved)
            one = saved[name] if wanted.fields else saved.get(name) or wanted()
            if type(one) is not wanted:
                kind = type(node.operation).__name__
                raise TypeError(f"slot {name!r} needs {kind}.Saved, not {type(one).__qualname__}")
            found[position] = one
    except Exception as second:
        message = f"its backward failed ({type(error).__name__}: {error}), and then its unfused(saved): {second!r}"
        raise KernelError(message, **where) from error
    return found


def instead(step: Step, run: Callable[..., Any], segment: Segment, seeds: Any, x: Tensor, /, **given: Any) -> Any:
    """Runs a forward fusion, or its operations if it fails; used after steps that must not run twice."""
    try:
        return run(x, **given)
    except Exception as error:
        may_fall_back(segment, step, error, x)
        reason = reason_of(error)
    channels = {channel: given[name] for name, channel in step.reads}
    y, outputs, records = step.by_operations(segment.context.env, x, channels, seeds)
    warn(segment, step, reason, x)
    saved = [*[outputs] * bool(step.operation.outputs), *[step.by_slot(records)] * (not step.inference)]
    return (y, *saved) if saved else y


def reason_of(error: Exception) -> str | None:
    """The reason for the warning; `None` for an input error, which the operation raises itself."""
    return None if isinstance(error, InputError) else one_line(error)


def warn(segment: Segment, step: Step, reason: str | None, tensor: Any) -> None:
    """Warns, once per reason, that operations ran instead of a failed fusion."""
    context = segment.context
    if reason is None or is_fake(tensor):
        return
    if (note := context.note()) is not None:
        note(step.name, step.start, reason)
    if (step.name, reason) not in context.warned:
        context.warned.add((step.name, reason))
        message = f"{step.name} at position {step.start} failed ({reason}); its operations ran unfused"
        warnings.warn(message, FallbackWarning, stacklevel=2)


def may_fall_back(
    segment: Segment, step: Step, error: Exception, tensor: Any = None, again: Sequence[Step] = ()
) -> None:
    """Returns if the operations may run instead of a failed fusion; otherwise raises an error that names the step.

    Its input in a forward pass, `tensor`, may be on another device than its parameters. The earlier steps `again` would
    have to run a second time.
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
        return  # the operations raise the error with its place
    if isinstance(error, SeqfuseError):
        if isinstance(error, StateError) and step.name not in error.message:
            error.message += f"; read by {step.name}"
        error.operation, error.position, error.path = error.operation or step.name, step.start, where["path"]
        raise error
    if isinstance(error, TypeError) and (called := _RECORD_CALL.search(str(error))):
        known = {record.cls.__qualname__: record.cls for record in step.records}.get(called[1])
        fields = f"; its fields are {', '.join(known.fields)}" if known and known.fields else ""
        raise PluginError(f"fwd built a wrong Saved: {error}{fields}", code="SF302", **where) from error
    if device_is_lost(error):
        message = f"the device reported {error}; its state is lost and nothing can run after it"
        raise KernelError(message, code="SF401", hint="rerun under compute-sanitizer", **where) from error
    on_gpu = segment.context.env.device == "cuda" and torch.cuda.is_available()
    captured = on_gpu and torch.cuda.is_current_stream_capturing()
    if not segment.context.can_fall_back or torch.compiler.is_compiling() or captured:
        raise KernelError(failure, code="SF401", **where) from error
