"""Forward fusions that save less: what is cheap to make is made again in the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import saved as context
from ..env import Env, Savings
from ..fusion import ForwardFusion, Requirements
from ..operation import UnfusedOperation
from ..ops import Attention, Bias, Dropout, LayerNorm, Linear, QKNorm, RMSNorm, RotaryEmbedding
from ..ops._read import parameter
from ..pointwise import Gated, Pointwise
from ..traffic import unfused
from ._linear import one_dtype, output_bytes

# An operation as it was configured, the names of its parameters, and whether it takes a seed; or the dtype of a cast.
# A Linear has its Bias.
Stage = tuple[UnfusedOperation | torch.dtype, tuple[str, ...], bool]


class _Recomputed(ForwardFusion, contract=True):
    """Runs its operations one by one; what one of them makes for the next is not saved, but made again from x."""

    saves_memory = True
    casts = True
    layout = "any"
    linear: Linear
    bias: Bias | None

    def requires(self, env: Env) -> Requirements:
        yield one_dtype(self.linear, self.bias, env), "weight and bias must have one dtype"

    def saves(self, env: Env) -> Savings:
        """A GEMM that starts from the bias, less what makes the tensors again that are not saved."""
        operations = self.operations()
        last = max(i for i, operation in enumerate(operations) if not isinstance(operation, Bias))
        again = unfused(operations, env, [i for i in range(last) if not isinstance(operations[i], Bias)])
        added = Savings() if self.bias is None else Savings(launches=1, bytes=2 * output_bytes(self.linear, env))
        return added - again

    def fwd(self, x: Tensor, *, seeds: tuple[Tensor | None, ...], env: Env) -> tuple[Tensor, dict[str, Any]]:
        stages: list[Stage] = []
        given: list[Tensor] = []
        saved: dict[str, Any] = {}
        made: dict[int, context.Recompute] = {}  # by the id of what it makes, which is held until the end
        held = [x]

        def later(y: Tensor) -> Tensor:
            made[id(y)] = context.Recompute(functools.partial(_replayed, tuple(stages)), held[0], *given)
            held.append(y)
            return y

        for slot, operation, bias, seed, dtype in self._operations(seeds, env):
            if dtype is not None and x.dtype is not dtype:
                stages.append((dtype, (), False))
                x = later(x.to(dtype))
            if isinstance(operation, Linear):
                weight = operation.weight_for(x)
                tensors = {"weight": weight} if bias is None else {"weight": weight, "bias": bias.read()}
                record: Any = Linear.Saved(x=x, weight=weight)
                y = F.linear(x, *tensors.values())
                if bias is not None:
                    saved["bias"] = Bias.NOTHING
            else:
                names = operation.parameter_slots()
                tensors = {name: t for name in names if (t := parameter(operation, name)) is not None}
                run: Any = operation.fwd  # pyright: ignore[reportAttributeAccessIssue]
                y, record = run(x) if seed is None else run(x, seed=seed)
            saved[slot] = _without(record, made)
            stages.append((_copy(operation), tuple(tensors), seed is not None))
            given += [*tensors.values(), *(() if seed is None else (seed,))]
            x = later(y)
        return x, saved

    def _operations(
        self, seeds: Sequence[Tensor | None], env: Env
    ) -> Iterator[tuple[str, UnfusedOperation, Bias | None, Tensor | None, torch.dtype | None]]:
        """Slot, operation, the Bias of a Linear, seed, and the dtype that it takes where dtypes differ."""
        dtypes = env.along[:-1] or (None,) * len(seeds)
        for (slot, operation), seed, dtype in zip(self.named_operations(), seeds, dtypes, strict=True):
            if not isinstance(operation, Bias):
                yield slot, operation, self.bias if operation is self.linear else None, seed, dtype


class RecomputeNorm(_Recomputed):
    """y = norm(x) weight^T + bias, where norm(x) is not saved: the gradient of the weight makes it again from x.

    dweight = dy^T norm(x).  The backward pass takes one more norm, the forward pass saves one tensor less.

    x: [*, in_features], y: [*, out_features].
    Source: Chen et al. 2016, arXiv:1604.06174, of saving less and recomputing it.
    """

    norm: LayerNorm | RMSNorm
    linear: Linear
    bias: Bias | None


class RecomputeActivation(_Recomputed):
    """y = h weight^T + bias, h = dropout(act(z)), where h is not saved: the gradient of the weight makes it from z.

    dweight = dy^T h.  z is what the activation saves in any case; what was dropped is decided again from the seed. The
    backward pass takes one more activation, the forward pass saves one tensor less.

    z: [*, in_features], of a gated unit [*, 2 in_features], y: [*, out_features].
    Source: Chen et al. 2016, arXiv:1604.06174, of saving less and recomputing it.
    """

    act: Pointwise | Gated
    dropout: Dropout | None
    linear: Linear
    bias: Bias | None

    def requires(self, env: Env) -> Requirements:
        yield from super().requires(env)
        kind = type(self.act)
        yield kind.Saved.fields == ("x",), f"{kind.__name__} saves its output, which the GEMM after it does too"


class RecomputeHeads(_Recomputed):
    """y = attention(rotary(qk_norm(z))), z = norm(x) weight^T + bias, where queries, keys and values are not saved.

    The backward pass makes them again from x: it takes one more norm, GEMM and, where they are there, norm and RoPE of
    the heads, so that it is for whoever wants the least memory. The output of attention and its log-sum-exp are saved.

    x: [*, S, in_features], y: [*, S, H D].
    Source: Korthikanti et al. 2022, arXiv:2205.05198, of recomputing a part of a layer.
    """

    norm: LayerNorm | RMSNorm
    linear: Linear
    bias: Bias | None
    qk_norm: QKNorm | None
    rotary: RotaryEmbedding | None
    attention: Attention


def _without(record: Any, made: dict[int, context.Recompute]) -> Any:
    """A record in which tensors that can be made again are not saved."""
    fields: dict[str, Any] = {name: vars(record)[name] for name in record.fields}
    late = {name: made[id(value)] for name, value in fields.items() if id(value) in made}
    return type(record)(**{**fields, **late}) if late else record


def _replayed(stages: tuple[Stage, ...], x: Tensor, *given: Tensor) -> Tensor:
    """What the last of these operations makes of x, with the parameters and seeds that it had."""
    left = iter(given)
    for stage, names, seeded in stages:
        operation: Any = stage
        tensors = {name: next(left) for name in names}
        if isinstance(operation, torch.dtype):
            x = x.to(operation)
            continue
        if isinstance(operation, Linear):
            x = F.linear(x, *tensors.values())
            continue
        operation.__dict__["_parameters"] = {**operation._parameters, **tensors}
        x = (operation.fwd(x, seed=next(left)) if seeded else operation.fwd(x))[0]
    return x


def _copy(operation: UnfusedOperation) -> UnfusedOperation:
    """An operation of the same configuration, which holds no parameter."""
    copy: Any = object.__new__(type(operation))
    copy.__dict__ |= {**vars(operation), "_parameters": dict.fromkeys(operation._parameters)}  # pyright: ignore[reportPrivateUsage]
    return copy
