"""Tensor and sequence parallel: shards an existing model in place."""

from __future__ import annotations

import fnmatch
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import nn

from .. import ops
from ..errors import InputError, PlanError, meant
from ..group import Group, ParameterShard
from ..losses import LinearCrossEntropy
from ..nn.transformer import own_heads
from ..operation import FusableOperation, UnfusedOperation
from ..pictures.text import few
from ..plan import flatten, inside_of
from ..pointwise import Gated, Pointwise
from .transfer import Boundary

STYLES = ("column", "row", "vocab", "heads", "features")
_ELEMENT_WISE = (Pointwise, ops.Dropout, ops.Scale, ops.Identity)
_OF_TORCH = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Hardswish,
    nn.Dropout, nn.Identity,
)  # fmt: skip


class _Division(NamedTuple):
    """The sharding of one module, applied after everything is checked."""

    path: str
    module: nn.Module
    shards: Mapping[str, ParameterShard]
    do: Callable[[], None]


def parallelize(model: nn.Module, group: Any, plan: Mapping[str, str], *, sequence_dim: int | None = None) -> nn.Module:
    """Shard a model over a process group, in place, by module name.

    Every process must call it with the same full model and arguments, and continue with the same state of torch's
    random generator. Parameters remain the same objects with the same names. Create the optimizer afterwards.

    | style | module |
    | --- | --- |
    | `"heads"` | a container with a GEMM, attention on packed heads and a GEMM, such as `nn.MultiHeadAttention` |
    | `"features"` | a container with a GEMM, element-wise operations and a GEMM, such as `nn.FeedForward` |
    | `"column"`, `"row"` | an `ops.Linear`; before a gated unit, gate and up are sharded separately |
    | `"vocab"` | an `ops.Embedding` or a `losses.LinearCrossEntropy` |

    Args:
        model: the model, or a module of it.
        group: a process group or a `DeviceMesh` of one dimension.
        plan: a dictionary from module name, as in `named_modules`, or pattern with `*`, to style: `{"*.mixer.up":
            "column"}`.
        sequence_dim: the token dimension that is sharded between parallel layers (sequence parallel); gradients of the
            parameters used there are summed.

    Returns:
        The model.

    Raises:
        InputError: (SF101) for heads, features or a vocabulary that the number of processes does not divide; (SF104)
            for a name that matches nothing; (SF106) for an unknown style, or a style that does not fit the module.
        PlanError: (SF202) for a model that is already pipelined.
    """
    _check_arguments(model, plan, sequence_dim)
    group = Group(group)
    acts = _acts(model, group, plan, sequence_dim)
    _check_ties(model, acts)
    outside = [] if sequence_dim is None else _on_rows(model, acts)
    for act in acts:
        act.do()
    for operation in outside if group.size > 1 else []:
        operation.sum_over = group
    return model


def _check_arguments(model: Any, plan: Any, sequence_dim: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"parallelize divides a torch.nn.Module, got {type(model).__name__}", code="SF106")
    if any(isinstance(m, Boundary) for m in model.modules()):
        message = "parallelize comes before pipeline, and this model is in stages already"
        raise PlanError(message, code="SF202", hint='pipeline(parallelize(model, mesh["tp"], plan), mesh["pp"])')
    if not isinstance(plan, Mapping) or not all(isinstance(name, str) for name in cast("Mapping[Any, Any]", plan)):
        hint = 'such as {"feedforward.mixer": "features"}'
        raise InputError(
            f"the plan must be a mapping of names of modules to styles, got {plan!r}", code="SF106", hint=hint
        )
    if sequence_dim is not None and not isinstance(sequence_dim, int):
        message = f"sequence_dim must be the number of a dimension, got {sequence_dim!r}"
        raise InputError(message, code="SF106", hint="such as -2")


def _acts(model: nn.Module, group: Group, plan: Mapping[str, str], dim: int | None) -> list[_Division]:
    """The shardings that the plan requests, in its order."""
    named = dict(_named(model))
    acts: dict[str, _Division] = {}
    for pattern, style in plan.items():
        if style not in STYLES:
            raise InputError(f"there is no style {style!r} (of {pattern!r})", code="SF106", hint=f"one of {STYLES}")
        matching = [path for path in named if fnmatch.fnmatchcase(path, pattern)]
        if not matching:
            hint = meant(pattern, named)
            raise InputError(f"{pattern!r} matches no module of the model", code="SF104", hint=hint)
        for path in matching:
            try:
                for act in _styled(model, named[path], path, style, group, dim):
                    if act.path in acts:
                        raise InputError("the plan names it twice", code="SF106", operation=type(act.module).__name__)
                    acts[act.path] = act
            except InputError as error:
                raise _placed(error, model, named[path], path) from None
    return [*acts.values()]


def _styled(
    model: nn.Module, module: nn.Module, path: str, style: str, group: Group, dim: int | None
) -> list[_Division]:
    if style in ("heads", "features"):
        return _region(module, path, style, group, dim)
    if style == "vocab" and isinstance(module, ops.Embedding | LinearCrossEntropy):
        return [_Division(path, module, module.divided(group), lambda: module.divide(group, sequence_dim=dim))]
    if style in ("column", "row") and isinstance(module, ops.Linear):
        return [_linear(path, module, style, group, _halves(model, module) if style == "column" else None, dim)]
    raise InputError(f"style {style!r} does not fit it", code="SF106", operation=type(module).__name__)


def _linear(
    path: str, linear: ops.Linear, style: Any, group: Group, parts: Sequence[int] | None, dim: int | None
) -> _Division:
    shards = linear.divided(style, group, parts)
    return _Division(path, linear, shards, lambda: linear.divide(style, group, parts=parts, sequence_dim=dim))


def _region(container: nn.Module, path: str, style: str, group: Group, dim: int | None) -> list[_Division]:
    """Shard a container of a GEMM, operations that can run on a shard of its features, and a GEMM."""
    found: list[tuple[str, nn.Module]] = []
    for name, m in _named(container):
        apart = not isinstance(m, FusableOperation) and not [*m.children()]
        if isinstance(m, UnfusedOperation) or (apart and not any(name.startswith(f"{above}.") for above, _ in found)):
            found.append((name, m))
    places = [i for i, (_, m) in enumerate(found) if isinstance(m, ops.Linear)]
    wanted = "a Linear, attention and a Linear" if style == "heads" else "a Linear, an activation and a Linear"
    if len(places) != 2:
        raise InputError(f"style {style!r} needs {wanted}; it has {len(places)} Linears", code="SF106")
    between = [m for _, m in found[places[0] + 1 : places[1]]]
    attention = [m for m in between if isinstance(m, ops.Attention)]
    if len(attention) != (style == "heads"):
        raise InputError(f"style {style!r} needs {wanted}; it has {len(attention)} attentions", code="SF106")
    of_heads = (ops.Attention, ops.QKNorm, ops.RotaryEmbedding) if style == "heads" else ()
    together = [m for m in between if isinstance(m, ops.QKNorm) and m.full_width]
    fitting = Gated, *_ELEMENT_WISE, *_OF_TORCH, *of_heads
    other = next((m for m in between if not isinstance(m, fitting) or m in together), None)
    if other is not None:
        raise InputError(f"{type(other).__name__} between its Linears cannot be divided", code="SF106")
    (into, first), (out, last) = (cast(tuple[str, ops.Linear], found[i]) for i in places)
    parts: tuple[int, ...] | None = None
    changes: list[_Division] = []
    if attention:
        heads, shared = attention[0].heads, attention[0].kv_heads
        own = own_heads(heads, shared, group)
        size = first.out_features // (heads + 2 * shared)
        parts = heads * size, shared * size, shared * size
        for name, m in found[places[0] + 1 : places[1]]:
            if isinstance(m, of_heads):
                changes.append(_Division(f"{path}.{name}", m, {}, functools.partial(_set_heads, m, own, group)))
    elif any(isinstance(m, Gated) and m.packing != "interleaved" for m in between):
        parts = first.out_features // 2, first.out_features // 2
    ends = (into, first, "column", parts), (out, last, "row", None)
    return [_linear(f"{path}.{name}".lstrip("."), m, s, group, p, dim) for name, m, s, p in ends] + changes


def _set_heads(operation: Any, own: tuple[int, int], group: Group) -> None:
    operation.heads, operation.kv_heads = own
    if isinstance(operation, ops.QKNorm) and group.size > 1:
        operation.sum_over = group


def _halves(model: nn.Module, linear: ops.Linear) -> tuple[int, int] | None:
    """Sizes of the two halves of a gated unit's input, if a gated unit follows; else None."""
    listed = next((found for found in _sequences(model) if linear in found), [linear])
    after = listed[listed.index(linear) + 1 :]
    follows = next((m for m in after if not isinstance(m, (ops.Bias, *_ELEMENT_WISE))), None)
    if isinstance(follows, ops.Attention | ops.QKNorm | ops.RotaryEmbedding):
        message = f"its column would be divided across the heads of {type(follows).__name__}"
        hint = 'give the container of both Linears and the attention the style "heads"'
        raise InputError(message, code="SF106", operation="Linear", hint=hint)
    half = linear.out_features // 2
    return (half, half) if isinstance(follows, Gated) and follows.packing != "interleaved" else None


def _sequences(module: nn.Module) -> Iterator[list[nn.Module]]:
    """The operations of each sequence in a module, including modules that run through their own call."""
    nodes = inside_of(module) if isinstance(module, FusableOperation) else []
    yield [node.operation for node in nodes]
    for inner in [node.operation for node in nodes if not node.fusable] if nodes else module.children():
        yield from _sequences(inner)


def _check_ties(model: nn.Module, acts: Sequence[_Division]) -> None:
    """Check that every module that uses a sharded parameter shards it in the same way."""
    shards = {(id(act.module), name): shard for act in acts for name, shard in act.shards.items()}
    uses: dict[int, list[tuple[str, ParameterShard | None]]] = {}
    for path, module in _named(model):
        for name, parameter in module._parameters.items():  # pyright: ignore[reportPrivateUsage]
            uses.setdefault(id(parameter), []).append((f"{path}.{name}", shards.get((id(module), name))))
    for users in uses.values():
        if len({None if shard is None else (shard.dim, shard.parts) for _, shard in users}) > 1:
            listed = ", ".join(f"{path!r} {'whole' if shard is None else 'divided'}" for path, shard in users)
            message = f"one parameter would be used in several ways: {listed}"
            raise InputError(message, code="SF106", hint="name all of them in the plan")


def _on_rows(model: nn.Module, acts: Sequence[_Division]) -> list[UnfusedOperation]:
    """The operations with parameters whose input is a sequence shard; warns about other modules with parameters."""
    known = {id(act.module) for act in acts}
    found: list[UnfusedOperation] = []
    for path, module in _named(model):
        if id(module) in known or not isinstance(module, UnfusedOperation) or not module.parameter_slots():
            continue
        if isinstance(module, ops.PositionEmbedding) and module.positions is None:
            message = "on a sequence shard it cannot tell their positions"
            raise _placed(InputError(message, code="SF106", hint="give it positions"), model, module, path)
        found.append(module)
    known |= {id(m) for operation in found for m in operation.modules()}
    others = [
        path for path, m in _named(model) if id(m) not in known and any(p.requires_grad for p in m.parameters(False))
    ]
    if others:
        listed = few([*map(repr, others)], 4)
        message = "no operation of this library; where it sees a sequence shard, the gradients of its parameters are"
        warnings.warn(f"{listed}: {message} parts of a sum over the processes", UserWarning, stacklevel=3)
    return found


def _placed(error: InputError, model: nn.Module, module: nn.Module, path: str) -> InputError:
    """The error, completed with the module's name and its position in the sequence."""
    if isinstance(model, FusableOperation):
        among = {id(m) for m in module.modules()}
        places = [(i, node.name) for i, node in enumerate(flatten(model)) if id(node.operation) in among]
        named = [i for i, name in places if name == error.operation]
        error.position = next(iter((*named, *(i for i, _ in places))), None)
    error.operation = error.operation or type(module).__name__
    error.path = path
    return error


def _named(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return cast(list[tuple[str, nn.Module]], [*module.named_modules()])
