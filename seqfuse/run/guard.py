"""Generates a function that runs the segments of a region if the state that it was generated for still holds."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.fx._symbolic_trace as fx
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from ..casts import cast_once
from ..env import any_autocast, autocast_of
from ..errors import step_note
from ..generated import Source, identifier
from ..group import summed_gradient
from ..plan.flatten import Node
from ..plan.inputs import clearer
from ..recipes import current as quantizing
from ..settings import current_fusing, default_fusing
from .lower import Segment
from .node import apply_node, run_plain, saved_hooks, taken
from .regions import Call, CompiledRegion, Region

requires, dtype = operator.attrgetter("requires_grad"), operator.attrgetter("dtype")
device, shape = operator.attrgetter("device"), operator.attrgetter("shape")


def has_main_grad(t: Tensor) -> bool:
    """Whether gradients of a parameter are added to its `main_grad`, which torch's own nodes do not support."""
    return hasattr(t, "main_grad")


def _add_place(nodes: Sequence[Node], at: int, error: Exception) -> None:
    clearer(nodes, range(at, at + 1), error, None)
    error.add_note(step_note(nodes[at].name, at, nodes[at].path))


_guards: Any = torch._C._dynamo.guards  # pyright: ignore
_Named = tuple[str, Tensor]
_FIXED: Mapping[str, Any] = {
    "kind": type,
    "add_place": _add_place,
    "apply": apply_node,
    "plain": run_plain,
    "taken": taken,
    "summed": summed_gradient,
    "grad": torch._C.is_grad_enabled,  # pyright: ignore
    "inference": torch.is_inference_mode_enabled,
    "tracing": torch._C._get_tracing_state,  # pyright: ignore[reportPrivateUsage]
    "functorch": peek_interpreter_stack,
    "forward_ad": forward_ad,
    "fx": fx,
    "deterministic": torch._C._get_deterministic_algorithms,  # pyright: ignore
    "any_autocast": any_autocast,
    "autocast_of": autocast_of,
    "cast_once": cast_once,
    "has_main_grad": has_main_grad,
    "saved_hooks": saved_hooks,
    "fusing": current_fusing.get,
    "default_fusing": default_fusing,
    "quantizing": quantizing.get,
}


def bind(
    region: Region,
    lowering: CompiledRegion,
    state: Sequence[Any] | None = None,
    x: Tensor | None = None,
    parameters: Sequence[Tensor] = (),
    given: Sequence[Tensor] = (),
) -> Call:
    """`call(x, channels, seeds)`, which returns `None` if the state has changed.

    The state is grad mode, determinism, dtype of autocast, `sf.fusing` and `sf.low_precision`; of x, of the parameters
    and of the channels that are `given` shape, dtype, device, class and `requires_grad`. Without a state, for tensors
    without data, nothing is checked and there are no collectives. Errors of torch calls get the place of their
    operation as a note.
    """
    nodes = lowering.stretch.nodes
    slots, channels, autocast = region.slots, region.channels, lowering.plan.env.autocast
    s = Source("call", "x, channels, seeds")
    s.constants.update(_FIXED)
    names = [f"p{i}" for i in range(len(slots))]
    local = {c: f"c{i}" for i, c in enumerate(channels)}
    if names or channels:
        s.add("try:")
        for name, (owner, attribute) in zip(names, slots, strict=True):
            held = owner._parameters  # pyright: ignore[reportPrivateUsage]
            if attribute in held:
                s.add(f"    {name} = {s.put(held)}[{s.put(attribute)}]")
            else:
                s.add(f"    {name} = getattr({s.put(owner)}, {s.put(attribute)})")
        s.add(*(f"    {name} = channels[{s.put(c)}]" for c, name in local.items()))
        s.add("except (KeyError, AttributeError):", "    return None")
    if state is not None and x is not None:
        own, beside = [*zip(names, parameters, strict=True)], [*zip(local.values(), given, strict=True)]
        tests, of_tensors = _tests(s, state, x, own, beside)
        if lowering.native:
            tests += [f"has_main_grad({name})" for name in names] + ["saved_hooks(False) is not None"]
        every, like = [x, *parameters, *given], ""
        if all(
            t.layout is torch.strided and not t.is_nested for t in every
        ):  # TensorGuards abort the process for other layouts
            check = _guards.TensorGuards(*every, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
            like = f"not {s.put(check)}({', '.join(['x', *names, *local.values()])}) and "
        s.add(f"if {like}(", *_joined(of_tensors), "):", "    return None")
        s.add("if (", *_joined(tests), "):", "    return None")
        for i, group in region.summed:
            if parameters[i].requires_grad and state[0]:
                s.add(f"p{i} = summed({s.put(group)}, p{i})")
    made: dict[str, str] = {}
    if lowering.native:
        at = {(id(owner), attribute): name for name, (owner, attribute) in zip(names, slots, strict=True)}
        s.add("at = 0", "try:")
        kept: dict[str, str] = {}
        for i, call in enumerate(lowering.native):
            if call.keeps is not None:
                kept[call.keeps] = f"kept{i}"
            entering = ["x", *[at[id(owner), attribute] for owner, attribute in call.parameters]]
            entering += [f"{identifier(name)}={kept.get(channel) or local[channel]}" for name, channel in call.reads]
            made_by = "x" if call.run is None else f"{s.put(call.run)}({', '.join(entering)})"
            target = "x" if call.keeps is None else kept[call.keeps]
            s.add(*[f"    at = {i}"] * (i > 0), f"    {target} = {made_by}")
        s.add(
            "except Exception as error:",
            f"    add_place({s.put(nodes)}, {s.put([c.position for c in lowering.native])}[at], error)",
            "    raise",
        )
        readers = nodes[region.start].readers
        s.add(*(f"del channels[{s.put(c)}]" for c in channels if max(readers[c]) < region.stop))
        made.update((c, name) for c, name in kept.items() if not readers[c] or max(readers[c]) >= region.stop)
    segments = () if lowering.native else lowering.segments
    casts = autocast is not None and any(segment.live for segment, _ in segments)
    s.add(*["with cast_once():"] * casts)
    s.depth += casts
    for segment, indices in segments:
        _run(s, segment, [names[i] for i in indices], local, made)
    s.depth -= casts
    s.add(*(f"channels[{s.put(c)}] = {name}" for c, name in made.items()), "return x")
    return s.define()


def _joined(tests: Sequence[str]) -> list[str]:
    return [f"    {'or ' * bool(i)}{test}" for i, test in enumerate(tests)]


def _tests(
    s: Source, state: Sequence[Any], x: Tensor, parameters: Sequence[_Named], given: Sequence[_Named]
) -> tuple[list[str], list[str]]:
    """The tests of the state, and those of tensors, which torch's guards make unnecessary while nothing changes."""
    grad, deterministic, autocast, fusing, recipes = state
    of_tensors = [
        f"kind(x) is not {s.put(x.__class__)}",
        f"x.shape != {s.put(x.shape)}",
        f"x.dtype is not {s.put(x.dtype)}",
        f"x.device != {s.put(x.device)}",
        f"x.requires_grad is not {x.requires_grad}",
    ]
    tests = [
        f"grad() is not {grad}",
        *(["inference()"] if grad else []),
        f"(fusing() or default_fusing()) is not {s.put(fusing)}",
        f"quantizing() is not {s.put(recipes)}",
        f"deterministic() is not {deterministic}",
        f"(autocast_of({s.put(x.device.type)}) if any_autocast() else None) is not {s.put(autocast)}",
        "tracing() is not None",
        "functorch() is not None",
        "forward_ad._current_level >= 0",
        "fx.is_fx_symbolic_tracing()",  # constant tensors may meet proxies as parameters
    ]
    once = functools.cache(s.put)
    for name, t in (*parameters, *given):
        of_tensors += [
            f"kind({name}) is not {once(type(t))}",
            f"{name}.requires_grad is not {t.requires_grad}",
            f"{name}.dtype is not {once(t.dtype)}",
            f"{name}.shape != {s.put(t.shape)}",
            f"{name}.device != {once(t.device)}",
        ]
    return tests, of_tensors


def _run(s: Source, segment: Segment, parameters: Sequence[str], local: dict[str, str], made: dict[str, str]) -> None:
    entering = [local[c] for c in segment.inputs]
    given = ", ".join([s.put(segment), "seeds", "x", *entering, *(parameters if segment.live else ())])
    leaving: list[str] = []
    for c in segment.outputs:
        local[c] = made[c] = f"c{len(local)}"
        leaving.append(local[c])
    result = ", ".join(["x", *leaving])
    call = f"{'apply' if segment.live else 'plain'}({given})"
    # A node may declare an output to be the same tensor as an earlier one.
    alike = segment.live and leaving and not (segment.followed and segment.crossing.issuperset(segment.outputs))
    s.add(f"{result} = {f'taken({call})' if alike else call}")
    for c in segment.consumed:
        name = local[c]
        if made.pop(c, None) is None:
            s.add(f"del channels[{s.put(c)}]")
        s.add(f"{name} = None")
