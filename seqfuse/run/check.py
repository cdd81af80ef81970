"""Contract checks of a plan's first run: saved records by field, gradients by name and shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor

from ..env import short
from ..errors import PluginError
from ..fake import faking, is_fake
from ..fusion import FusedOperation, records_of, unknown_slots, wrong_record
from ..maingrad import accumulated
from ..plan.described import describe, tells_all
from ..plan.facts import any_rows
from ..plan.inputs import Like
from ..plan.step import Step
from ..quantized import Quantized
from ..saved import Recompute, Saved
from .lower import Context

_passed: set[Any] = set()
_AUTOCAST = (
    "under autocast parameters keep their dtype: return y.to(dtype), with dtype as an argument of fwd, or yield "
    "`env.autocast is None` in requires"
)


def check_forward(context: Context, step: Step, x: Tensor, out: Any, given: Mapping[str, Any]) -> bool:
    """Check the results of a forward, for a fusion against its operations. `False`: check the next call as well."""
    if step.fused and is_fake(x):
        return False
    y, extra, saved = _unpack(step, out)
    if not step.fused:
        return True
    fusion: FusedOperation = step.operation
    read = {name: given[name] for name, _ in step.reads}
    key: Any = None
    if all(tells_all(node.operation) for node in step.nodes):
        state = step.needs, step.recipes, any_rows(context.env), torch.get_default_dtype()
        about = *map(describe, step.nodes), *((t.shape[1:], t.dtype) for t in (x, *read.values()))
        key = type(fusion), *state, x.device, *about
    if key in _passed:
        return True
    expected = _expected(context, step, x, read)
    if expected is None:
        return True
    y_own, extra_own, records = expected
    hint = None if context.env.autocast is None else _AUTOCAST
    _compare(step, "its output", y, y_own, hint)
    for name in fusion.outputs:
        if name in extra_own:
            _compare(step, f"its output {name!r}", extra.get(name), extra_own[name], hint)
    if not step.inference and not step.joint:
        unknown = sorted(set(saved) - {slot.name for slot in fusion.slots})
        if unknown:
            raise _wrong(step, unknown_slots(fusion, unknown))
        for slot in fusion.slots:
            several = saved.get(slot.name) if slot.variadic else None
            if not isinstance(several, tuple | list | None):
                many = "a tuple with the Saved of each of its operations"
                raise _wrong(step, f"slot {slot.name!r} needs {many}, it saved {type(several).__qualname__}")
        found, operations = dict(records_of(fusion, saved)), dict(fusion.named_operations())
        for place, own in records.items():
            record = found.pop(place, None)
            if record is None and operations[place].own_record(None) is not None:
                continue
            if record is None or type(record) is not type(own):
                raise _wrong(step, wrong_record(place, operations[place], own, record))
            for field in own.fields:
                kept = _raw(record, field)
                # A fusion may save a parameter where the operation saves its cast under autocast.
                parts = kept if _is_tuple(kept) else (kept,)
                if context.env.autocast is None or not all(isinstance(part, nn.Parameter) for part in parts):
                    _compare(step, f"field {field!r} of slot {place!r}", kept, _raw(own, field), hint)
        if found:
            raise _wrong(step, f"it saved more records than there are operations: {', '.join(map(repr, found))}")
    if key is not None and len(_passed) < 4096:
        _passed.add(key)
    return True


def _is_tuple(value: Any, length: int | None = None) -> TypeGuard[tuple[Any, ...]]:
    return isinstance(value, tuple) and length in (None, len(cast(tuple[Any, ...], value)))


def _is_mapping(value: Any) -> TypeGuard[Mapping[Any, Any]]:
    return isinstance(value, Mapping)


def _form(out: Any) -> str:
    return f"({', '.join(type(o).__name__ for o in out)})" if _is_tuple(out) else type(out).__name__


def _unpack(step: Step, out: Any) -> tuple[Any, Mapping[str, Any], Any]:
    """Splits the result of a forward, in the form that its class declares: y, extra outputs, and saved records."""
    operation: Any = step.operation
    names: tuple[str, ...] = operation.outputs
    own: type[Saved] | None = None if step.inference or (step.fused and not step.joint) else step.saved_class
    last = f"{type(operation).__name__}.{own.__name__}" if own else "{slot: Saved}"
    form = ["y", *[f"{{{', '.join(names)}}}"] * bool(names), *[last] * (not step.inference)]
    wanted = f"({', '.join(form)})" if len(form) > 1 else "y"
    right = len(form) == 1 or _is_tuple(out, len(form))
    y, made, saved = step.returned(out) if right else (None, dict[str, Any](), None)
    right = isinstance(y, Tensor | Quantized) and _is_mapping(made)
    if right and not step.fused:
        right = set(made) == set(names) and all(isinstance(t, Tensor) for t in made.values())
    if not right or not (type(saved) is own if own else _is_mapping(saved)):
        raise _wrong(step, f"fwd must return {wanted}, not {_form(out)}")
    return y, made, saved


def _expected(
    context: Context, step: Step, x: Tensor, inputs: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor], dict[str, Saved]] | None:
    """The results of the unfused operations on fake tensors; `None` if they cannot run on them."""
    try:
        with faking() as mode:
            channels = {channel: mode.from_tensor(inputs[name]) for name, channel in step.reads}
            seeds = torch.zeros(len(context.nodes), dtype=torch.int64, device=x.device)
            y, outputs, records = step.by_operations(context.env, mode.from_tensor(x), channels, seeds)
    except Exception:
        return None
    return y, outputs, dict(zip([place for place, *_ in step.members], records, strict=True))


def _raw(record: Saved, field: str) -> Any:
    late: Mapping[str, Recompute] = record.__dict__.get("_late", {})
    return late[field]() if field in late else record.__dict__.get(field)


def _compare(step: Step, what: str, got: Any, own: Any, hint: str | None) -> None:
    if _is_tuple(own) and _is_tuple(got, len(own)):
        for a, b in zip(got, own, strict=True):
            _compare(step, what, a, b, hint)
        return
    same = type(own) is type(got) and not _is_tuple(own)
    if isinstance(own, Tensor) and isinstance(got, Tensor | Quantized):
        same = own.shape == got.shape and own.dtype == got.dtype and own.device == got.device
    if not same:
        raise _wrong(step, f"{what} should be {_describe(own)}, not {_describe(got)}", hint)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor | Like | Quantized):
        return f"{short(value.dtype)}{list(value.shape)} on {value.device}"
    if isinstance(value, tuple | list):
        parts = ", ".join(map(_describe, cast(Sequence[Any], value)))
        return f"({parts})" if isinstance(value, tuple) else f"[{parts}]"
    return repr(value)


def _wrong(step: Step, message: str, hint: str | None = None) -> PluginError:
    return PluginError(message, code="SF302", **step.located, hint=hint)


def _same_storage(a: Tensor, b: Tensor) -> bool:
    try:
        return a.untyped_storage()._cdata == b.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
    except NotImplementedError:  # under vmap a batch of gradients has no storage
        return False


def check_backward(context: Context, step: Step, d: Tensor | None, out: Any, given: Mapping[str, Any]) -> bool:
    """Check gradients by name, shape, dtype, device and alias. `False`: check the next call as well."""
    if is_fake(d) or (isinstance(d, Tensor) and is_batchedtensor(d)):
        return False
    fused = step.fused

    def wrong(message: str) -> PluginError:
        return PluginError(message, code="SF303", **step.located)

    if not (_is_tuple(out, 2) and _is_mapping(out[1])):
        raise wrong(f"bwd must return (dx, {{name: gradient}}), not {_form(out)}")
    dx, grads = out[0], out[1]
    owners: dict[str, tuple[nn.Module, str] | None] = {}
    for place, _, _, node, _ in step.members:
        prefix = f"{place}." if fused else ""
        owners |= {prefix + n: slot for n, slot in node.slots.items()}
        owners |= {prefix + n: None for n, _ in node.inputs}
    unknown = sorted(name for name, g in grads.items() if g is not None and name not in owners)
    if unknown:
        raise wrong(f"bwd returned a gradient {unknown[0]!r}; known are {', '.join(map(repr, owners)) or 'none'}")
    if not isinstance(dx, Tensor | Quantized) and "x" in step.needs[0]:
        raise wrong("bwd returned no gradient of x, which is needed")
    if isinstance(dx, Tensor | Quantized) and "x" in step.needs[0]:
        own, leaving = context.entering[step.start], context.entering[step.stop]
        # Plans are shared by row count, so y may have the expected shape although its leading dimensions are wrong.
        alike = d is not None and d.shape == leaving.shape and own.shape[:-1] == leaving.shape[:-1]
        dims = slice(None) if alike else slice(-1, None)
        same = context.mixed or dx.dtype in (own.dtype, context.dtypes.get(step.start, dx.dtype))
        if dx.shape[dims] != own.shape[dims] or dx.device != own.device or not same:
            raise wrong(f"the gradient of x should be like {_describe(own)}, not {_describe(dx)}")
    seen: list[tuple[Any, str]] = []
    for name in sorted(name for name, _ in (*step.grads, *step.channel_grads)):
        g, slot = grads.get(name), owners[name]
        if g is accumulated and "main_grads" in given and slot is not None:
            continue
        if not isinstance(g, Tensor):
            raise wrong(f"bwd returned no gradient {name!r}, which is needed")
        if slot is None:  # an extra input, whose shape is unknown here
            continue
        owner, attribute = slot
        parameter = context.parameters[id(owner), attribute]
        same_dtype = g.dtype == parameter.dtype or context.mixed
        if g.shape != parameter.shape or g.device != parameter.device or not same_dtype:
            raise wrong(f"gradient {name!r} should be {_describe(parameter)}, not {_describe(g)}")
        if fused and g.numel():
            others: list[tuple[Any, str]] = [(d, "the incoming gradient"), (dx, "the gradient of x"), *seen]
            others.append((owner._parameters.get(attribute), "its parameter"))  # pyright: ignore[reportPrivateUsage]
            for other, what in others:
                if isinstance(other, Tensor) and _same_storage(g, other):
                    raise wrong(f"gradient {name!r} shares its memory with {what}; return its own tensor")
            seen.append((g, f"gradient {name!r}"))
    return True
