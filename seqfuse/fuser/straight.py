"""The steps of a segment as straight-line code: what a loop would ask again on every call is decided once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ..errors import PluginError
from ..generated import Source, identifier
from ..maingrad import accumulated
from ..saved import Layout, Saved, packing, reader, rebuilder

if TYPE_CHECKING:
    from .segment import Back, Call, Drawn

# Records are packed under their position, a joint fusion's under `~position`. Below all of these: which of the saved
# tensors each of the records' is, which fusions fell back, the buffers that gradients are added to, and, under
# `SHAPES - stop`, what zeros for an unused y are.
Packed = dict[int, Any]
ORDER = -(1 << 40)
FELL = ORDER - 1
BUFFERS = ORDER - 2
SHAPES = ORDER - 3


class ForwardFellBack(Exception):
    """The forward of a joint fusion ran unfused, so its backward must as well."""


def ahead(calls: Sequence[Call], keep: bool) -> Callable[..., Tensor]:
    """`run(segment, x, channels, seeds, flat, packed)`: the forward steps; with `keep`, records go to the last two.

    `segment.failed(...)` takes over where a step raises.
    """
    s = Source("forward", "segment, x, channels, seeds, flat, packed")
    s.constants.update(calls=calls, keep=keep, fit=fit, look=_look, checked=_checked)
    s.add("at = 0", "try:")
    s.depth += 1
    for i, call in enumerate(calls):
        if i:
            s.add(f"at = {i}")
        fits = call.layout != "any"
        layout = s.put(call.layout)
        if fits:
            s.add(f"x = fit(x, {layout})")
        given: list[str] = []
        for keyword, channel in call.inputs:
            value = f"channels[{s.put(channel)}]"
            given.append(f"{identifier(keyword)}={f'fit({value}, {layout})' if fits else value}")
        for keyword, index in call.seeds:
            given.append(f"{identifier(keyword)}={_seeds(index)}")
        results = ["y", *["made"] * call.declares, *["saved"] * (call.kind != "inference")]
        s.add(f"{', '.join(results)} = {_first(s, call)}({', '.join(['x', *given])})")
        names = [(s.put(channel), s.put(name)) for name, channel in call.outputs]
        s.add(*(f"channels[{channel}] = made[{name}]" for channel, name in names))
        if keep:
            if names and call.zeros:
                s.add(f"packed[{SHAPES - call.stop}] = look(y, {{{', '.join(f'{c}: made[{n}]' for c, n in names)}}})")
            for pack in call.packs:
                _pack(s, *pack)
        # Last, so that the operations find their channels where something above fails.
        s.add(*(f"del channels[{s.put(channel)}]" for channel in call.done))
        s.add("x = y")
    s.add("return x")
    s.depth -= 1
    s.add(
        "except Exception as error:",
        "    return segment.failed(calls, keep, at, error, x, channels, seeds, flat, packed)",
    )
    return s.define()


def _seeds(index: Drawn) -> str:
    if isinstance(index, tuple):
        return f"({''.join(f'{_seeds(i)}, ' for i in index)})"
    return "None" if index is None else f"seeds[{index}]"


def _pack(s: Source, place: Any, position: int, record: type[Saved], kept: tuple[str, ...]) -> None:
    where = "".join(f"[{s.put(key)}]" for key in place)
    pack, read = s.put(packing(record, kept)[0]), reader(record, kept)
    if read is None:
        s.add(f"packed[{position}] = {pack}(saved{where}, {{}}, flat)")
        return
    s.add(
        f"fields = saved{where}.__dict__",
        f"if {s.put('_late')} in fields: packed[{position}] = {pack}(saved{where}, {{}}, flat)",
        "else:",
        f"    packed[{position}] = len(flat)",
        f"    flat += {s.put(read)}(fields)",
    )


def _first(s: Source, step: Call | Back) -> str:
    """What the code calls for a step: until its contract check has passed, `fn` through that."""
    if step.check is None:
        return s.put(step.fn)
    name = s.put(step)
    return f"({name}.fn if {name}.check is None else checked({name}))"


def _checked(step: Call | Back) -> Callable[..., Any]:
    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        out = step.fn(x, *args, **kwargs)
        check = step.check
        if check is None or check(step, x, out, kwargs):
            step.check = None
        return out

    return run


def back(backs: Sequence[Back]) -> Callable[..., Tensor | None]:
    """`run(segment, d, sides, packed, tensors, sums)`: the backward steps; gradients of parameters go to `sums`.

    A step none of whose outputs the loss uses is passed by. `segment.failed_back(...)` takes over where a step
    raises: until then, the step has changed nothing.
    """
    s = Source("backward", "segment, d, sides, packed, tensors, sums")
    s.constants.update(backs=backs, fit=fit, zeros=_zeros, plus=_plus, fell=ForwardFellBack, checked=_checked)
    s.constants["accumulated"] = accumulated
    s.add("at = 0", "try:")
    s.depth += 1
    for i, step in enumerate(backs):
        if i:
            s.add(f"at = {i}")
        _one(s, step)
    s.add("return d")
    s.depth -= 1
    s.add(
        "except Exception as error:",
        "    return segment.failed_back(backs, at, error, d, sides, packed, tensors, sums)",
    )
    return s.define()


def _one(s: Source, step: Back) -> None:
    layout, fits = s.put(step.layout), step.layout != "any"
    came = [(f"s{j}", s.put(channel)) for j, (_, channel) in enumerate(step.incoming)]
    s.add(*(f"{name} = sides.get({channel})" for name, channel in came))
    s.add(f"if {' or '.join(f'{name} is not None' for name, _ in [('d', ''), *came])}:")
    s.depth += 1
    if step.adds:
        s.add(f"buffers = packed.get({BUFFERS})")
        s.add(f"buffers = {{}} if buffers is None else buffers.offer({s.put(step.grads)})")
    if step.kind == "joint":
        s.add(f"if {step.records[0][1]} not in packed: raise fell")
    if came and step.kind == "backward":
        # Fusions are written for tensors; operations know a gradient that nobody gave.
        absent = " or ".join(f"{name} is None" for name, _ in [("d", ""), *came])
        apart = f"segment.apart({s.put(step)}, d, sides, packed, tensors, sums)"
        s.add(f"if {absent}:", "    at = -1", f"    d = {apart}", "else:")
        s.depth += 1
    elif came and step.zeros:
        s.add(f"if d is None: d = zeros(packed[{SHAPES - step.stop}][''])")
        if step.kind == "joint":
            for name, channel in came:
                s.add(f"if {name} is None: {name} = zeros(packed[{SHAPES - step.stop}][{channel}])")
    if fits:
        s.add(
            *(f"{name} = {name} if {name} is None else fit({name}, {layout})" for name in ["d", *(n for n, _ in came)])
        )
    given = _records(s, step, layout if fits else None)
    given += [f"{identifier(keyword)}={name}" for (keyword, _), (name, _) in zip(step.incoming, came, strict=True)]
    if step.adds:
        given.append("main_grads=buffers")
    s.add(f"dx, grads = {_first(s, step)}(d, {', '.join(given)})")
    latest: dict[Any, str] = {}
    for j, (key, target) in enumerate([*step.grads, *step.channel_grads]):
        known = latest.get(target)
        if known is None and isinstance(target, str):
            known = f"sides.get({s.put(target)})"
        elif known is None and target in step.shared:
            known = f"sums[{target}]"
        one = f"grads[{s.put(key)}]"
        if step.adds and not isinstance(target, str):
            s.add(f"own = {one}", "if own is accumulated:")
            s.add(f"    own = {s.put(_left)}({s.put(key)}, packed, {s.put(step.name)}, {step.start})")
            one = "own"
        s.add(f"g{j} = {one if known is None else f'plus({known}, {one})'}")
        latest[target] = f"g{j}"
    if step.dtype is not None:
        dtype = s.put(step.dtype)
        s.add(f"d = dx if dx is None or dx.dtype is {dtype} else dx.to({dtype})")
    else:
        s.add("d = dx")
    s.add(*(f"sides.pop({channel}, None)" for _, channel in came))
    for target, name in latest.items():
        s.add(f"sides[{s.put(target)}] = {name}" if isinstance(target, str) else f"sums[{target}] = {name}")
    s.depth -= 2 if came and step.kind == "backward" else 1


def _records(s: Source, step: Back, layout: str | None) -> list[str]:
    """Write the lines that make a step's records again; returns them as arguments of its `bwd`."""
    arguments: dict[str, list[str]] = {}
    variadic = {slot for slot, _, number, _, _ in step.records if number is not None}
    for j, (slot, position, _, record, kept) in enumerate(step.records):
        rebuild = rebuilder(record, kept)
        if not kept and step.kind != "joint":
            name = s.put(rebuild(None, ()))
        else:
            name, end = f"r{j}", len(kept)
            s.add(f"entry = packed.get({position})")
            if reader(record, kept) is not None:
                s.add(
                    "if entry.__class__ is int:",
                    f"    {name} = {s.put(record.__new__)}({s.put(record)})",
                    f"    fields = {name}.__dict__",
                    f"    {''.join(f'fields[{s.put(f)}], ' for f in kept)} = tensors[entry:entry + {end}]",
                    "else:",
                )
                s.depth += 1
            s.add(f"{name} = {s.put(rebuild)}(entry, tensors)")
            s.depth -= reader(record, kept) is not None
            if layout is not None:
                s.add(f"{s.put(_fit_record)}({name}, {layout})")
        arguments.setdefault(slot, []).append(name)
    if step.kind != "backward":
        return [names[0] for names in arguments.values()]
    given: list[str] = []
    for slot, names in arguments.items():
        value = f"({', '.join(names)},)" if slot in variadic else names[0]
        given.append(f"{identifier(slot)}={value}")
    return given


def fit(x: Tensor, layout: Layout) -> Tensor:
    """A tensor in the layout a step wants."""
    if layout == "inner_contig" and x.dim() and (x.stride(-1) == 1 or x.shape[-1] == 1) and 0 not in x.stride():
        return x
    return x.contiguous()


def _fit_record(record: Saved, layout: Layout) -> None:
    fields = record.__dict__
    for name in (fields.keys() | fields.get("_late", {}).keys()) & set(record.fields):
        value = getattr(record, name)
        if isinstance(value, Tensor):
            fields[name] = fit(value, layout)
        elif isinstance(value, tuple):
            several = cast(tuple[Any, ...], value)
            fields[name] = tuple(fit(v, layout) if isinstance(v, Tensor) else v for v in several)


def _left(key: str, packed: Packed, name: str, at: int) -> None:
    """What is left to hand on of a gradient that was added to its buffer: nothing, if it was."""
    if BUFFERS in packed and key in packed[BUFFERS].taken():
        return
    message = f"bwd returned sf.accumulated for {key!r}, which it did not pop from main_grads"
    raise PluginError(message, code="SF303", operation=name, position=at)


def _look(y: Tensor, made: dict[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    return {c: (t.shape, t.dtype, t.device) for c, t in {"": y, **made}.items()}


def _zeros(like: tuple[Any, ...]) -> Tensor:
    shape, dtype, device = like
    return torch.zeros(shape, dtype=dtype, device=device)


def _plus(known: Tensor | None, g: Tensor | None) -> Tensor | None:
    return g if known is None else known if g is None else known + g
