"""Contract checks, made when a plan first runs: records by field, gradients by name and shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor

from ..errors import PluginError
from ..fusion import FusedOperation, InferenceFusion, JointFusion, records_of
from ..maingrad import accumulated
from ..operation import UnfusedOperation
from ..saved import Recompute, Saved
from .fake import faking, is_fake
from .segment import Back, Call

if TYPE_CHECKING:
    from .plan import Step
    from .program import Binder

_passed: set[Any] = set()


def check_forward(binder: Binder, step: Step, call: Call, x: Tensor, out: Any, given: Mapping[str, Any]) -> bool:
    """Compare what a fused forward returned with what the operations themselves give; `False` to be asked again.

    Raises:
        PluginError: naming fusion, slot and field.
    """
    fusion: FusedOperation = step.operation
    if is_fake(x):
        return False
    key = _key(binder, fusion, step.covers, x)
    if key in _passed:
        return True
    y, extra, saved = _unpack(fusion, call, out)
    expected = _expected(binder, step, x, {name: given[name] for name, _ in call.inputs})
    if expected is None:
        return True
    y_own, extra_own, records = expected
    _compare(fusion, step, "its output", y, y_own)
    for name in fusion.outputs:
        if name in extra_own:
            _compare(fusion, step, f"its output {name!r}", extra.get(name), extra_own[name])
    if not isinstance(fusion, InferenceFusion | JointFusion):
        unknown = sorted(set(saved) - {slot.name for slot in fusion.slots})
        if unknown:
            raise _wrong(fusion, step, f"it saved records for unknown slots: {', '.join(map(repr, unknown))}")
        found = dict(records_of(fusion, saved))
        for place, own in records.items():
            record = found.pop(place, None)
            if type(record) is not type(own):
                got = "nothing" if record is None else f"a {type(record).__qualname__}"
                raise _wrong(fusion, step, f"slot {place!r} needs a {type(own).__qualname__}, it saved {got}")
            for field in own.fields:
                _compare(fusion, step, f"field {field!r} of slot {place!r}", _raw(record, field), _raw(own, field))
        if found:
            raise _wrong(
                fusion, step, f"it saved more records than there are operations: {', '.join(map(repr, found))}"
            )
    if len(_passed) < 4096:
        _passed.add(key)
    return True


def check_form(binder: Binder, step: Step, call: Call, x: Tensor, out: Any, given: Mapping[str, Any]) -> bool:
    """Check that an operation's own forward returns what its class declares.

    Raises:
        PluginError: naming the operation.
    """
    operation: UnfusedOperation = step.operation
    names, record = operation.outputs, type(operation).Saved
    right = _is_tuple(out, 3 if names else 2) and isinstance(out[0], Tensor)
    if right and names:
        right = _is_mapping(out[1]) and set(out[1]) == set(names)
        right = right and all(isinstance(made, Tensor) for made in out[1].values())
    if not right or type(out[-1]) is not record:
        form = f"(y, {{{', '.join(names)}}}, {record.__qualname__})" if names else f"(y, {record.__qualname__})"
        message = f"fwd must return {form}, not {_form(out)}"
        raise PluginError(message, code="SF302", operation=call.name, position=call.start)
    return True


def _is_tuple(value: Any, length: int | None = None) -> TypeGuard[tuple[Any, ...]]:
    return isinstance(value, tuple) and length in (None, len(cast(tuple[Any, ...], value)))


def _is_mapping(value: Any) -> TypeGuard[Mapping[Any, Any]]:
    return isinstance(value, Mapping)


def _form(out: Any) -> str:
    return f"({', '.join(type(o).__name__ for o in out)})" if _is_tuple(out) else type(out).__name__


def _unpack(fusion: FusedOperation, call: Call, out: Any) -> tuple[Any, Mapping[str, Any], Any]:
    none: dict[str, Any] = {}
    parts: tuple[Any, Any, Any] | None
    if isinstance(fusion, InferenceFusion) and not fusion.outputs:
        form, parts = "y", (out, none, none)
    elif isinstance(fusion, InferenceFusion):
        form, parts = "(y, outputs)", (out[0], out[1], none) if _is_tuple(out, 2) else None
    elif fusion.outputs:
        form, parts = "(y, outputs, saved)", (out[0], out[1], out[2]) if _is_tuple(out, 3) else None
    else:
        form, parts = "(y, saved)", (out[0], none, out[1]) if _is_tuple(out, 2) else None
    if parts is None or not isinstance(parts[0], Tensor):
        message = f"fwd must return {form}"
        raise PluginError(message, code="SF302", operation=call.name, position=call.start)
    joint, saved = isinstance(fusion, JointFusion), parts[2]
    if not isinstance(fusion, InferenceFusion) and not (isinstance(saved, Saved) if joint else _is_mapping(saved)):
        what = "its own Saved record" if joint else "a dictionary {slot: Saved}"
        message = f"fwd must return {what} last, not a {type(saved).__name__}"
        raise PluginError(message, code="SF302", operation=call.name, position=call.start)
    return parts


def _expected(
    binder: Binder, step: Step, x: Tensor, inputs: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor], dict[str, Saved]] | None:
    """What the operations themselves return, run on fake tensors; `None` if they cannot run so."""
    fusion: FusedOperation = step.operation
    records: dict[str, Saved] = {}
    outputs: dict[str, Tensor] = {}
    try:
        with faking() as mode:
            y: Tensor = mode.from_tensor(x)
            given = {name: mode.from_tensor(value) for name, value in inputs.items()}
            made: dict[str, Tensor] = {}
            for position, (place, operation) in zip(step.covers, fusion.named_operations(), strict=True):
                item, prefix = binder.items[position], f"{place.replace('.', '_')}_"
                extras: dict[str, Any] = {n: made[c] if c in made else given[prefix + n] for n, c in item.inputs}
                signature = operation.forward_signature
                if signature.needs:
                    extras["needs"] = binder.wants.needs[position]
                if signature.env:
                    extras["env"] = binder.env
                if signature.seed:
                    active = position in binder.random
                    extras["seed"] = torch.zeros((), dtype=torch.int64, device=x.device) if active else None
                y, *rest = operation.fwd(y, **extras)
                records[place] = rest[-1]
                if operation.outputs:
                    made.update({c: rest[0][n] for n, c in item.outputs})
                    outputs.update({prefix + n: rest[0][n] for n, _ in item.outputs})
    except Exception:
        return None
    return y, outputs, records


def _raw(record: Saved, field: str) -> Any:
    late: Mapping[str, Recompute] = record.__dict__.get("_late", {})
    return late[field]() if field in late else record.__dict__.get(field)


def _compare(fusion: FusedOperation, step: Step, what: str, got: Any, own: Any) -> None:
    if _is_tuple(own) and _is_tuple(got, len(own)):
        for a, b in zip(got, own, strict=True):
            _compare(fusion, step, what, a, b)
        return
    if isinstance(own, Tensor) != isinstance(got, Tensor):
        raise _wrong(fusion, step, f"{what} should be {_describe(own)}, not {_describe(got)}")
    if isinstance(own, Tensor) and (own.shape != got.shape or own.dtype != got.dtype or own.device != got.device):
        raise _wrong(fusion, step, f"{what} should be {_describe(own)}, not {_describe(got)}")
    if not isinstance(own, Tensor) and type(own) is not type(got):
        raise _wrong(fusion, step, f"{what} should be {_describe(own)}, not {_describe(got)}")


class Like(NamedTuple):
    """What a gradient must look like: its parameter, without holding on to it."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, t: Tensor) -> Like:
        """What is like this tensor."""
        return cls(t.shape, t.dtype, t.device)

    def empty(self) -> Tensor:
        """A tensor that looks so."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor | Like):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device}"
    return repr(value)


def _wrong(fusion: FusedOperation, step: Step, message: str) -> PluginError:
    return PluginError(message, code="SF302", operation=type(fusion).__name__, position=step.covers.start)


def _key(binder: Binder, fusion: FusedOperation, covers: range, x: Tensor) -> Any:
    configs = tuple(_config(op) for op in fusion.operations())
    needs = tuple(binder.wants.needs[p] for p in covers)
    return type(fusion), configs, needs, x.shape[1:], x.dtype, x.device, binder.env.autocast


def _config(operation: UnfusedOperation) -> Any:
    plain = tuple(
        (k, repr(v))  # pyright: ignore[reportUnknownArgumentType]
        for k, v in vars(operation).items()
        if not k.startswith("_") and isinstance(v, str | int | float | tuple)
    )
    shapes = ((n, getattr(o, a)) for n, (o, a) in operation.parameter_slots().items())
    return type(operation), plain, tuple((n, p.shape, p.dtype) for n, p in shapes)


def _same_storage(a: Tensor, b: Tensor) -> bool:
    try:
        return a.untyped_storage()._cdata == b.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
    except NotImplementedError:  # a batch of gradients, under vmap, has no storage to ask
        return False


def check_backward(
    binder: Binder,
    step: Step,
    needs_of: Mapping[int, frozenset[str]],
    back: Back,
    d: Tensor | None,
    out: Any,
    given: Mapping[str, Any],
) -> bool:
    """Check the gradients a backward returned, by name, shape, dtype, device and alias; `False` to be asked again.

    Raises:
        PluginError: naming fusion (or operation) and key.
    """
    if is_fake(d) or (d is not None and is_batchedtensor(d)):
        return False
    fused = isinstance(step.operation, FusedOperation)

    def wrong(message: str) -> PluginError:
        return PluginError(message, code="SF303", operation=step.name, position=step.covers.start)

    if not (_is_tuple(out, 2) and _is_mapping(out[1])):
        raise wrong(f"bwd must return (dx, {{name: gradient}}), not {_form(out)}")
    dx, grads = out[0], out[1]
    known: dict[str, Like | None] = {}
    owners: dict[str, tuple[nn.Module, str]] = {}
    wanted: set[str] = set()
    inside = {c for position in step.covers for _, c in binder.items[position].outputs}
    for position, (place, _) in zip(
        step.covers, step.operation.named_operations() if fused else [("", None)], strict=True
    ):
        item, prefix = binder.items[position], f"{place}." if fused else ""
        known |= {prefix + n: binder.parameters[id(owner), name] for n, (owner, name) in item.slots.items()}
        owners |= {prefix + n: slot for n, slot in item.slots.items()}
        known |= {prefix + n: None for n, _ in item.inputs}
        needs = needs_of[position]
        wanted |= {prefix + n for n in item.slots if n in needs}
        wanted |= {prefix + n for n, c in item.inputs if n in needs and not (fused and c in inside)}
    unknown = sorted(name for name, g in grads.items() if g is not None and name not in known)
    if unknown:
        raise wrong(f"bwd returned a gradient {unknown[0]!r}; known are {', '.join(map(repr, known)) or 'none'}")
    if not isinstance(dx, Tensor) and "x" in needs_of[step.covers.start]:
        raise wrong("bwd returned no gradient of x, which is wanted")
    if isinstance(dx, Tensor) and "x" in needs_of[step.covers.start]:
        own, leaving = binder.entering[step.covers.start], binder.entering[step.covers.stop]
        dims = slice(None) if d is not None and d.shape == leaving.shape else slice(-1, None)
        same = binder.dtypes is not None or dx.dtype == own.dtype or dx.dtype == binder.dtypes_now()[step.covers.start]
        if dx.shape[dims] != own.shape[dims] or dx.device != own.device or not same:
            raise wrong(f"the gradient of x should be like {_describe(own)}, not {_describe(dx)}")
    seen: list[tuple[Any, str]] = []
    for name in sorted(wanted):
        g, parameter = grads.get(name), known[name]
        if g is accumulated and "main_grads" in given and parameter is not None:
            continue
        if not isinstance(g, Tensor):
            raise wrong(f"bwd returned no gradient {name!r}, which is wanted")
        if parameter is None:  # an extra input, whose shape is not known here
            continue
        same_dtype = g.dtype == parameter.dtype or binder.dtypes is not None
        if g.shape != parameter.shape or g.device != parameter.device or not same_dtype:
            raise wrong(f"gradient {name!r} should be {_describe(parameter)}, not {_describe(g)}")
        if fused and g.numel():
            owner, attribute = owners[name]
            others: list[tuple[Any, str]] = [(d, "the incoming gradient"), (dx, "the gradient of x"), *seen]
            others.append((owner._parameters.get(attribute), "its parameter"))  # pyright: ignore[reportPrivateUsage]
            for other, what in others:
                if isinstance(other, Tensor) and _same_storage(g, other):
                    raise wrong(f"gradient {name!r} shares its memory with {what}; return a tensor of its own")
            seen.append((g, f"gradient {name!r}"))
    return True
