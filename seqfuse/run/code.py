"""The steps of a segment written out as Python: records, channels and gradients are local variables.

`interpret` is the same walk with a loop. The code is made once a call of the segment has gone through there, so the
contract was checked and it is known what the forward saves: `layout` says which field is which of the saved tensors.
What is not as it was then (a field that was `None` is a tensor, a tensor that two records shared is two, a number is
another object) is packed as after an interpreted forward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from ..fusion import BackwardFusion
from ..generated import Source, identifier
from ..plan.step import Drawn, Step, fit
from ..saved import Recompute, is_late, kind_of, packing
from .interpret import Kept, fit_record, look
from .lower import Segment

_DATA = (type(None), bool, int, float, str)


def _local(names: dict[str, str], prefix: str, channel: str) -> str:
    """The local variable that stands for a channel, or for its gradient."""
    return names.setdefault(channel, f"{prefix}{len(names)}")


def is_static(kept: Sequence[Kept]) -> bool:
    """Whether the code can name each field: all hold a tensor, a tuple of tensors, `None`, what makes a tensor again,
    or a number or text.
    """
    fields = [(r.cls, *field) for r, tokens in kept for field in zip(r.kept, tokens, strict=True)]
    return all(_is_named(kind_of(cls, name), token) for cls, name, token in fields)


def _is_named(kind: str, token: Any) -> bool:
    if kind == "data":
        return token.__class__ in _DATA
    if token is None or token.__class__ is int:
        return True
    if kind == "tensor" and not is_late(token):
        return False
    return token.__class__ is tuple and all(_is_named("tensor", place) for place in token[is_late(token) :])


def forward_code(
    segment: Segment, run: dict[str, Callable[..., Any]], layout: Sequence[Kept] | None, leaves: bool = False
) -> Any:
    """`forward(ctx, segment, seeds, x, *channels)`, or `forward(segment, seeds, x, *channels)` where nothing is saved.

    `run` holds the functions of the node that it calls: `failed`, `save`, `leave`, `pack`. Without a layout the records
    are always packed. With `leaves` the node holds the parameters, which it keeps alive in any case.
    """
    keep = segment.live
    c = {name: f"c{i}" for i, name in enumerate(segment.inputs)}
    names = "".join(f", {c[name]}" for name in segment.inputs)
    s = Source("forward", f"{'ctx, ' if keep else ''}segment, seeds, x{names}{', *_' if keep else ''}")
    s.constants.update(run, fit=fit, Tensor=Tensor)
    s.add("x0, at = x, 0" + "".join(f"; e{i} = c{i}" for i in range(len(segment.inputs))))
    s.add("try:")
    entered = "".join(f"e{i}, " for i in range(len(segment.inputs)))
    s.depth += 1
    saved, likes = dict[int, str](), list[str]()
    for i, step in enumerate(segment.forward):
        if i:
            s.add(f"at = {i}")
        layout_of = step.operation.layout
        if step.cast is not None:
            s.add(_recast(s, "x", step.cast))
        if layout_of != "any":
            s.add(f"x = {_fitted(s, 'x', layout_of)}")
        given = [f"{identifier(k)}={_fitted(s, c[channel], layout_of)}" for k, channel in step.reads]
        given += [f"{identifier(k)}={_seed(index)}" for k, index in step.seeds]
        given += [f"{identifier(k)}={s.put(v)}" for k, v in step.constants(segment.context.env).items()]
        results = ["x", *["made"] * bool(step.operation.outputs)]
        if not step.inference:
            results.append(f"s{i}" if keep and step.saves else "_s")
        s.add(f"{', '.join(results)} = {s.put(step.operation.fwd)}({', '.join(['x', *given])})")
        s.add(*(f"{_local(c, 'c', channel)} = made[{s.put(name)}]" for name, channel in step.writes))
        if gone := [name for name in ("made", "_s") if name in results]:  # before the next step runs
            s.add(f"{' = '.join(gone)} = None")
        if keep and step.writes and step.zeros:
            made = ", ".join(f"{s.put(channel)}: {c[channel]}" for _, channel in step.writes)
            likes.append(f"{step.stop}: l{step.stop}")
            s.add(f"l{step.stop} = {s.put(look)}(x, {{{made}}})")
        for record in step.saves if keep else ():
            saved[record.position] = f"s{i}" + "".join(f"[{s.put(key)}]" for key in record.path)
        leaving = {*segment.outputs}
        s.add(*(f"{c[channel]} = None" for channel in step.ends if channel not in leaving))
    s.depth -= 1
    rest = "*_, " if keep else ""
    s.add("except Exception as error:")
    s.add(f"    return failed({'ctx' if keep else 'None'}, segment, at, error, seeds, x0, ({entered}{rest}))")
    s.add(*["ctx.leaves = _"] * (keep and leaves))
    if keep:
        found = "".join(f"s{i}, " for i, step in enumerate(segment.forward) if step.saves)
        given = f"seeds, x0, ({entered}*_, )"
        pack = f"wrong = pack(ctx, segment, ({found}))", f"if wrong: return failed(ctx, segment, *wrong, {given})"
        s.add("ctx.segment = segment", "ctx.materialize_grads = False")
        _save_static(s, layout, saved, pack)
    if likes:
        s.add(f"ctx.like = {{{', '.join(likes)}}}")
    out = "".join(f", {c[name]}" for name in segment.outputs)
    if segment.outputs and keep:
        s.add(f"return leave(ctx, segment, [x{out}], (x0, {entered}*_))")
    elif keep:
        s.add(f"return x if not x.requires_grad and not x._is_view() else own(x, (x0, {entered}*_))")
    else:
        s.add(f"return x{out}")
    return s.define()


def _save_static(s: Source, layout: Sequence[Kept] | None, saved: dict[int, str], pack: Sequence[str]) -> None:
    """Save what was seen to be saved, each tensor once, if it is so again; else `pack` it."""
    s.add(*(pack if layout is None else [f"ctx.layout = {s.put(layout)}"]))
    if not layout:
        return
    s.add("try:")
    first: dict[int, str] = {}
    wrong: list[str] = []
    functions: list[str] = []
    for j, (record, tokens) in enumerate(layout):
        s.add(f"    f{j} = {saved[record.position]}.__dict__")
        for name, token in zip(record.kept, tokens, strict=True):
            field = f"f{j}[{s.put(name)}]"
            if kind_of(record.cls, name) == "data":
                wrong.append(f"{field} is not {s.put(token)}")
                continue
            if is_late(token):
                late, token = f"m{len(functions)}", token[1:]
                s.add(f"    {late} = f{j}['_late'][{s.put(name)}]")
                functions.append(f"{late}.fn, ")
                field = f"{late}.tensors"
            if token.__class__ is tuple:
                wrong.append(f"{field}.__class__ is not tuple or len({field}) != {len(token)}")
            parts = enumerate(token) if token.__class__ is tuple else (("", token),)
            for i, place in parts:
                value = f"{field}[{i}]" if i != "" else field
                if place is None:
                    wrong.append(f"{value} is not None")
                elif place in first:
                    wrong.append(f"{value} is not {first[place]}")
                else:
                    first[place] = f"t{place}"
                    s.add(f"    t{place} = {value}")
                    # Torch would say so once the forward has returned, of an argument and of no operation.
                    wrong.append(f"not isinstance(t{place}, Tensor)")
    tensors = ", ".join(first[i] for i in range(len(first)))
    # Else a tensor where there was `None` before, or two where there was one.
    if wrong:
        s.add(f"    if {' or '.join(wrong)}: raise ValueError")
    s.add("except Exception:", *(f"    {line}" for line in pack), "else:")
    s.add(*[f"    ctx.functions = ({''.join(functions)})"] * bool(functions))
    s.add(f"    if hooks(False) is None: ctx.save_for_backward({tensors})")
    s.add(f"    else: save(ctx, segment, [{tensors}])")


def backward_steps(segment: Segment, missing: Collection[str]) -> list[tuple[int, Step]] | None:
    """The steps that run where outputs have no gradient (y is ""), each with its place among the backward steps.

    `None` where that is known only when they run.
    """
    has, known = {*segment.outputs} - {*missing}, "" not in missing
    steps: list[tuple[int, Step]] = []
    left = [*enumerate(segment.backward)][::-1]
    while left:
        at, step = left.pop()
        lacking = [channel for _, channel in step.incoming if channel not in has]
        if lacking and isinstance(step.operation, BackwardFusion):  # written for tensors
            left += [(at, part) for part in reversed(step.unfused(backward=True))]
            continue
        if not known or (lacking and step.joint):
            return None
        steps.append((at, step))
        has -= {channel for _, channel in step.incoming}
        has |= {channel for _, channel in step.channel_grads}
        known = "x" in step.needs[0]
    return steps


def backward_code(
    segment: Segment,
    run: dict[str, Callable[..., Any]],
    layout: Sequence[Kept] | None,
    steps: Sequence[tuple[int, Step]],
    missing: Collection[str] = (),
) -> Any:
    """`backward(ctx, segment, tensors, d, *gradients of outputs)` of `backward_steps`."""
    g = {name: f"g{i}" for i, name in enumerate(segment.outputs)}
    arguments = "".join(f", {g[name]}" for name in segment.outputs)
    s = Source("backward", f"ctx, segment, tensors, d{arguments}")
    s.constants.update(run, fit=fit, Recompute=Recompute)
    s.add("d0, at = d, 0" + "".join(f"; e{i} = g{i}" for i in range(len(segment.outputs))), "try:")
    entered = f"(d0, {''.join(f'e{i}, ' for i in range(len(segment.outputs)))})"
    has = {name: local for name, local in g.items() if name not in missing}
    kept = [record for step in segment.forward for record in step.saves]
    where = {record.position: i for i, record in enumerate(kept)}
    sums: dict[int, str] = {}
    known, count, last = True, 0, 0
    late = [(j, i) for j, (_, tokens) in enumerate(layout or ()) for i, token in enumerate(tokens) if is_late(token)]
    s.depth += 1
    for place, step in steps:
        if place != last:
            s.add(f"at = {place}")
        last = place
        came = [(keyword, has.get(channel)) for keyword, channel in step.incoming]
        kind = step.operation.layout
        if step.dy_dtype is not None:
            s.add(_recast(s, "d", step.dy_dtype))
        if kind != "any":
            s.add(*(f"{name} = {_fitted(s, name, kind)}" for name in ("d", *(n for _, n in came if n is not None))))
        own, again = list[str](), list[str]()
        for record in step.records:
            r, at = f"r{count}", where.get(record.position)
            count += 1
            own.append(r)
            if at is None:
                s.add(f"{r} = {s.put(record.cls.__new__(record.cls))}")
            elif layout is None:
                s.add(f"{r} = {s.put(packing(record.cls, kept[at].kept)[1])}(ctx.tokens[{at}], tensors)")
                if kind != "any":
                    s.add(f"{s.put(fit_record)}({r}, {s.put(kind)})")
            else:
                s.add(f"{r} = {s.put(record.cls.__new__)}({s.put(record.cls)})", f"f = {r}.__dict__")
                for i, (name, token) in enumerate(zip(kept[at].kept, layout[at][1], strict=True)):
                    data = kind_of(record.cls, name) == "data"
                    if not data and is_late(token):
                        again.append(r)
                        value = f"Recompute(ctx.functions[{late.index((at, i))}], *{_restored(s, token[1:], 'any')})"
                        if kind == "any":
                            s.add(f"f.setdefault('_late', {{}})[{s.put(name)}] = {value}")
                        else:
                            s.add(f"f[{s.put(name)}] = {_fitted(s, f'{value}()', kind)}")
                        continue
                    s.add(f"f[{s.put(name)}] = {s.put(token) if data else _restored(s, token, kind)}")
        given = ["d"]
        if step.joint or not step.fused:
            given += own
        else:
            slots = {identifier(slot): r for slot, r in step.by_slot(own).items()}
            given += [f"{n}={r}" if isinstance(r, str) else f"{n}=({', '.join(r)},)" for n, r in slots.items()]
        given += [f"{identifier(keyword)}={name}" for keyword, name in came]
        given += [f"{identifier(k)}={s.put(v)}" for k, v in step.constants(segment.context.env, True).items()]
        if step.operation.backward_signature.main_grads:
            given.append("main_grads={}")
        s.add(f"d, grads = {s.put(step.operation.bwd)}({', '.join(given)})")
        if again:  # tensors that were made again: let them go
            s.add(f"{' = '.join(dict.fromkeys(again))} = f = None")
        for key, slot in step.grads:
            index, value = segment.index[slot], f"grads[{s.put(key)}]"
            s.add(f"p{index} = " + (f"p{index} + {value}" if index in sums else value))
            sums[index] = f"p{index}"
        for _, channel in step.incoming:
            has.pop(channel, None)
        for key, channel in step.channel_grads:
            value, name = f"grads[{s.put(key)}]", _local(g, "g", channel)
            s.add(f"{name} = " + (f"{name} + {value}" if channel in has else value))
            has[channel] = name
        known = "x" in step.needs[0]
    s.depth -= 1
    s.add("except Exception as error:", f"    return failed(ctx, segment, at, error, tensors, {entered})")
    dx = "d" if known else "None"
    inputs = "".join(f"{has.get(name, 'None')}, " for name in segment.inputs)
    summed = "".join(f"{sums.get(i, 'None')}, " for i in range(len(segment.parameters)))
    s.add(f"return None, None, {dx}, {inputs}{summed}")
    return s.define()


def _restored(s: Source, token: Any, layout: Any) -> str:
    if token.__class__ is tuple:
        return f"({''.join(f'{_restored(s, place, layout)}, ' for place in token)})"
    value = "None" if token is None else f"tensors[{token}]"
    # It may have become `None`.
    return value if token is None or layout == "any" else f"None if {value} is None else {_fitted(s, value, layout)}"


def _recast(s: Source, name: str, dtype: torch.dtype) -> str:
    wanted = s.put(dtype)
    return f"if {name}.dtype is not {wanted}: {name} = {name}.to({wanted})"


def _fitted(s: Source, value: str, layout: Any) -> str:
    if layout == "any":
        return value
    return f"{value}.contiguous()" if layout == "contig" else f"fit({value}, {s.put(layout)})"


def _seed(index: Drawn) -> str:
    if isinstance(index, tuple):
        return f"({''.join(f'{_seed(i)}, ' for i in index)})"
    return "None" if index is None else f"seeds[{index}]"
