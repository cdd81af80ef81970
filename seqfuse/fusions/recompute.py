"""Forward fusions that save less: the backward pass recomputes tensors that are cheap to compute."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import saved as context
from ..env import Env, Savings
from ..fusion import ForwardFusion, Requirements
from ..hardware import RECOMPUTING
from ..operation import UnfusedOperation
from ..ops import (
    Add,
    Attention,
    Bias,
    Dropout,
    Fork,
    GroupedLinear,
    LayerNorm,
    LayerScale,
    Linear,
    MergedLinear,
    Multiply,
    QKNorm,
    RMSNorm,
    RotaryEmbedding,
)
from ..ops._mm import linear
from ..ops._parameters import one_gemm, parameter
from ..ops.linear import saved_linear
from ..ops.mergedlinear import saved_merged
from ..pointwise import Gated, Pointwise
from ..traffic import unfused
from ._shared import one_dtype, output_bytes, with_parameters


class _Stage(NamedTuple):
    """An operation with its configuration, and the names of its parameters and other inputs.

    A Linear includes its Bias. With `from_rstd`, an RMSNorm also reads its rstd.
    """

    operation: UnfusedOperation
    parameters: tuple[str, ...]
    inputs: tuple[str, ...]
    from_rstd: bool


class _Again(NamedTuple):
    """One operation of a fusion, with all that follows from its configuration and from which inputs a call has.

    `made` recomputes its result, and `cast` the cast before it. Each is a pair: for a MergedLinear that ran as several
    GEMMs, and for one that ran as one. If `is_last`, no operation follows that could save the result.
    """

    slot: str
    operation: Any
    bias: Bias | None
    dtype: torch.dtype | None
    parameters: tuple[str, ...]
    inputs: tuple[str, ...]
    asked: Mapping[str, Any]
    seed: int | None
    from_rstd: bool
    cast: tuple[Any, Any]
    made: tuple[Any, Any]
    is_last: bool


class _Recomputed(ForwardFusion, contract=True):
    """Runs its operations one by one; intermediate results are not saved, but recomputed from x."""

    saves_memory = True
    casts = True
    layout = "any"
    linear: Any
    bias: Bias | None

    def requires(self, env: Env) -> Requirements:
        if not isinstance(self.linear, Linear):
            kind, of = type(self.linear).__name__, "parts" if isinstance(self.linear, MergedLinear) else "groups"
            yield self.bias is None, f"a Bias after a {kind} is not part of its GEMM; its {of} have their own"
        else:
            yield one_dtype(self.linear, self.bias, env), "weight and bias must have one dtype"

    def saves(self, env: Env) -> Savings:
        """A GEMM that includes the bias, minus the recomputation of each tensor that is not saved, from x."""
        operations = self.operations()
        last = max(i for i, operation in enumerate(operations) if not isinstance(operation, Bias))
        found = Savings() if self.bias is None else Savings(launches=1, bytes=2 * output_bytes(self.linear, env))
        for at in {at for at in self.saved_at() if 0 < at <= last}:
            again = [i for i in range(at) if not isinstance(operations[i], Bias | Fork)]
            found -= unfused(operations, env, again)
            found -= Savings(launches=RECOMPUTING * len(again) if env.device == "cpu" else 0)
        return found

    def _run(
        self, x: Tensor, seeds: tuple[Tensor | None, ...], env: Env, needs: frozenset[str], **extras: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Any]]:
        """Run the operations on x; `extras` are their other inputs, by slot and name."""
        given: list[Any] = []
        saved: dict[str, Any] = {}
        outputs: dict[str, Tensor] = {}
        made: dict[int, context.Recompute] = {}  # by the id of the result, which `held` keeps alive
        held, whole = [x], False
        present = *map(type, seeds), *map(type, extras.values())
        for part in self.decided((present, env.along, needs), self._parts, seeds, extras, env, needs):
            operation = part.operation
            if part.dtype is not None and x.dtype is not part.dtype:
                x = x.to(part.dtype)
                made[id(x)] = context.Recompute(part.cast[whole], held[0], *given)
                held.append(x)
            if isinstance(operation, Fork):
                outputs[f"{part.slot}_out"] = x
                continue
            if isinstance(operation, Linear):
                weight = operation.weight_for(x)
                given.append(weight)
                record: Any = saved_linear(x, weight)
                if part.bias is None:
                    y = linear(x, weight)
                else:
                    given.append(bias := part.bias.read())
                    y = linear(x, weight, bias)
            elif isinstance(operation, MergedLinear):
                weights, biases = operation.weights_for(x), operation.biases()
                given += [*weights, *(t for t in biases if t is not None)]
                one = one_gemm(weights, biases)
                whole = one is not None
                record = saved_merged(x, weights)
                y = operation.gemm(x, weights, biases) if one is None else linear(x, *one)
            else:
                for name in part.parameters:
                    given.append(parameter(operation, name))
                inputs = part.asked
                if part.inputs:
                    named = {name: extras[f"{part.slot}_{name}"] for name in part.inputs if name != "seed"}
                    if part.seed is not None:
                        named["seed"] = seeds[part.seed]
                    given += named.values()
                    inputs = {**named, **inputs}
                y, record = operation.fwd(x, **inputs)
                if part.from_rstd:
                    given.append(record.rstd)
            if made:
                _make_again(record, made)
            saved[part.slot] = record
            if not part.is_last:
                made[id(y)] = context.Recompute(part.made[whole], held[0], *given)
            held.append(x := y)
        return x, outputs, saved

    def _parts(
        self, seeds: Sequence[Tensor | None], extras: Mapping[str, Tensor | None], env: Env, needs: frozenset[str]
    ) -> tuple[_Again, ...]:
        stages: list[_Stage | torch.dtype] = []

        def made() -> tuple[Any, Any]:
            return functools.partial(_replayed, tuple(stages), False), functools.partial(_replayed, tuple(stages), True)

        found: list[_Again] = []
        dtypes = env.along[:-1] or (None,) * len(seeds)
        last = [operation for operation in self.operations() if not isinstance(operation, Bias)][-1]
        for i, ((slot, operation), dtype) in enumerate(zip(self.named_operations(), dtypes, strict=True)):
            if isinstance(operation, Bias):
                continue
            bias = self.bias if operation is self.linear else None
            if dtype is not None:
                stages.append(dtype)
            cast = made()
            parameters, inputs, asked = self._given(slot, operation, bias, seeds[i], extras, needs)
            from_rstd = isinstance(operation, RMSNorm) and env.device == "cpu"
            if not isinstance(operation, Fork):
                stages.append(_Stage(_without_parameters(operation), parameters, inputs, from_rstd))
            seed = i if "seed" in inputs else None
            named = slot, operation, bias, dtype, parameters, inputs
            found.append(_Again(*named, asked, seed, from_rstd, cast, made(), operation is last))
        return tuple(found)

    def _given(
        self,
        slot: str,
        operation: UnfusedOperation,
        bias: Bias | None,
        seed: Tensor | None,
        extras: Mapping[str, Tensor | None],
        needs: frozenset[str],
    ) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, Any]]:
        """The names of its parameters and of its other inputs, and the keyword arguments that are constant."""
        if isinstance(operation, Linear):
            return ("weight",) if bias is None else ("weight", "bias"), (), {}
        if isinstance(operation, MergedLinear):
            weights = [f"weight_{i}" for i in range(len(operation.parts))]
            biases = [f"bias_{i}" for i, t in enumerate(operation.biases()) if t is not None]
            return (*weights, *biases), (), {}
        signature = operation.forward_signature
        inputs = [name for name in signature.extras if extras.get(f"{slot}_{name}") is not None]
        seeded = ["seed"] if seed is not None else []
        asked = {"needs": self._needed(slot, needs)} if signature.needs else {}
        names = [name for name in operation.parameter_slots() if parameter(operation, name) is not None]
        return tuple(names), (*inputs, *seeded), asked

    def _needed(self, slot: str, needs: frozenset[str]) -> frozenset[str]:
        """The needed gradients of the operation in a slot, by the operation's names."""
        own = {name.removeprefix(f"{slot}.") for name in needs if name.startswith(f"{slot}.")}
        before = itertools.takewhile(slot.__ne__, (name for name, _ in self.named_operations()))
        live = "x" in needs or any(name.startswith(f"{earlier}.") for earlier in before for name in needs)
        return frozenset(own | {"x"} if live else own)


class RecomputeNorm(_Recomputed):
    """y = norm(x) weight^T + bias, where norm(x) is recomputed from x for the gradient of the weight.

    dweight = dy^T norm(x).  Costs one more norm in the backward pass; saves one tensor less. norm(x) may be scaled and
    shifted, as in adaLN; if a residual begins after the norm, as in BERT, norm(x) is fork_out.

    x, fork_out, gain_other, shift_other: [*, in_features], y: [*, out_features].
    Source: Chen et al. 2016, arXiv:1604.06174 (recompute).
    """

    norm: LayerNorm | RMSNorm
    gain: Multiply | LayerScale | None
    shift: Add | None
    fork: Fork | None
    linear: Linear | MergedLinear
    bias: Bias | None

    outputs = ("fork_out",)

    def fwd(
        self,
        x: Tensor,
        *,
        seeds: tuple[Tensor | None, ...],
        env: Env,
        needs: frozenset[str],
        gain_other: Tensor | None = None,
        shift_other: Tensor | None = None,
    ) -> Any:
        made = self._run(x, seeds, env, needs, gain_other=gain_other, shift_other=shift_other)
        return made if needs else made[:2]


class RecomputeActivation(_Recomputed):
    """y = h weight^T + bias, h = dropout(act(z)), where h is recomputed from z for the gradient of the weight.

    dweight = dy^T h.  The activation saves z anyway; the dropout mask is recomputed from the seed. Costs one more
    activation in the backward pass; saves one tensor less.

    z: [*, in_features], of a gated unit [*, 2 in_features], y: [*, out_features].
    Source: Chen et al. 2016, arXiv:1604.06174 (recompute).
    """

    act: Pointwise | Gated
    dropout: Dropout | None
    linear: Linear | MergedLinear | GroupedLinear
    bias: Bias | None

    def requires(self, env: Env) -> Requirements:
        yield from super().requires(env)
        kind = type(self.act)
        yield kind.Saved.fields == ("x",), f"{kind.__name__} saves its output, which the GEMM after it does too"

    def fwd(
        self,
        x: Tensor,
        *,
        seeds: tuple[Tensor | None, ...],
        env: Env,
        needs: frozenset[str],
        linear_offsets: Tensor | None = None,
    ) -> Any:
        y, _, saved = self._run(x, seeds, env, needs, linear_offsets=linear_offsets)
        return (y, saved) if needs else y


class RecomputeHeads(_Recomputed):
    """y = attention(rotary(qk_norm(z))), z = norm(x) weight^T + bias, where queries, keys and values are recomputed.

    The backward pass recomputes queries, keys and values from x: one more norm and GEMM, plus QK-norm and RoPE if
    present. Use it for the least memory. The output of attention and its log-sum-exp are saved. If another operation
    reads queries, keys and values, such as a returned cache, they are fork_out; if a residual begins after the norm,
    norm(x) is residual_out. norm(x) may be scaled and shifted.

    x, residual_out, gain_other, shift_other: [*, S, in_features], y: [*, S, H D], fork_out: [*, S, (H + 2 Hkv) D].
    Source: Korthikanti et al. 2022, arXiv:2205.05198 (selective recompute).
    """

    norm: LayerNorm | RMSNorm
    gain: Multiply | LayerScale | None
    shift: Add | None
    residual: Fork | None
    linear: Linear | MergedLinear
    bias: Bias | None
    qk_norm: QKNorm | None
    rotary: RotaryEmbedding | None
    fork: Fork | None
    attention: Attention

    outputs = ("residual_out", "fork_out")

    def fwd(
        self,
        x: Tensor,
        *,
        seeds: tuple[Tensor | None, ...],
        env: Env,
        needs: frozenset[str],
        gain_other: Tensor | None = None,
        shift_other: Tensor | None = None,
        rotary_position_ids: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        attention_attn_mask: Tensor | None = None,
        attention_cu_seqlens: Tensor | None = None,
    ) -> Any:
        made = self._run(
            x,
            seeds,
            env,
            needs,
            gain_other=gain_other,
            shift_other=shift_other,
            rotary_position_ids=rotary_position_ids,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            attention_attn_mask=attention_attn_mask,
            attention_cu_seqlens=attention_cu_seqlens,
        )
        return made if needs else made[:2]


def _make_again(record: Any, made: dict[int, context.Recompute]) -> None:
    """Replace tensors in a new record by their `Recompute`, so that they are not saved."""
    fields: dict[str, Any] = record.__dict__
    for name, value in [*fields.items()]:
        if id(value) in made:
            fields.setdefault("_late", {})[name] = made[id(value)]
            del fields[name]


def _replayed(stages: tuple[_Stage | torch.dtype, ...], whole: bool, x: Tensor, *given: Tensor) -> Tensor:
    """The output of the last of these operations, from x and the parameters and other inputs of each.

    With `whole`, a MergedLinear ran as one GEMM.
    """
    at = 0
    for stage in stages:
        if isinstance(stage, torch.dtype):
            x = x.to(stage)
            continue
        operation: Any = stage.operation
        tensors = given[at : (at := at + len(stage.parameters))]
        inputs = given[at : (at := at + len(stage.inputs))]
        if isinstance(operation, Linear):
            x = linear(x, *tensors)
        elif isinstance(operation, MergedLinear):
            x = _merged(operation, x, dict(zip(stage.parameters, tensors, strict=True)), whole)
        elif stage.from_rstd:
            x = operation.again(x, given[at], *tensors)
            at += 1
        elif isinstance(operation, LayerNorm) and (again := operation.again(x, *tensors)) is not None:
            x = again
        else:
            if tensors:
                operation = with_parameters(operation, dict(zip(stage.parameters, tensors, strict=True)))
            x = operation.fwd(x, **dict(zip(stage.inputs, inputs, strict=True)))[0]
    return x


def _merged(operation: MergedLinear, x: Tensor, tensors: Mapping[str, Tensor], whole: bool) -> Tensor:
    """Recompute y by one GEMM if it was one, since a GEMM per part may round differently."""
    parts = range(len(operation.parts))
    weights = tuple([tensors[f"weight_{i}"] for i in parts])
    biases = tuple([tensors.get(f"bias_{i}") for i in parts])
    if whole and one_gemm(weights, biases) is None:  # hooks for saved tensors copied them
        given = [bias for bias in biases if bias is not None]
        return linear(x, torch.cat(weights), torch.cat(given) if given else None)
    return operation.gemm(x, weights, biases)


def _without_parameters(operation: UnfusedOperation) -> UnfusedOperation:
    return with_parameters(operation, dict.fromkeys(operation._parameters))  # pyright: ignore[reportPrivateUsage]
