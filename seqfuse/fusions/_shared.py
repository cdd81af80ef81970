"""Requirements and computations shared by several families of fusions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..casts import dtype_of
from ..env import Env, Savings
from ..errors import InputError
from ..fusion import Requirements
from ..hardware import STEP
from ..kernels import kernels_of
from ..operation import UnfusedOperation
from ..ops import Add, Bias, GroupedLinear, Linear, MergedLinear, Scale
from ..ops._mm import addmm, mm
from ..ops._mm import linear as gemm
from ..ops._tensors import may_overwrite
from ..ops.linear import saved_linear
from ..pointwise import Gated, Pointwise
from ..saved import Saved

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def kernels_run(env: Env) -> Requirements:
    """Requirements on the environment that all kernels share, in addition to their availability."""
    yield env.dtype in _DTYPES, "its kernel is for float32, float16 and bfloat16"


def kernels_read(name: str, of: torch.dtype | None, env: Env) -> Requirements:
    """Requirements of C kernels for the dtype of a parameter; Triton kernels read any dtype."""
    if env.kernels == "c":
        yield of is None or of in _DTYPES, f"C kernels read no {name} in {str(of).removeprefix('torch.')}"


def act_fits(act: Pointwise | Gated, env: Env) -> Requirements:
    """Requirements of all kernels for an activation or a gated unit."""
    kind = type(act)
    own_record = f"{kind.__name__} keeps its own record"
    if isinstance(act, Gated):
        yield kind.reference is Gated.reference, f"{kind.__name__} has its own gated unit"
        yield kind.Saved.fields == ("x",), own_record
        yield from act_fits(act.activation, env)
        if act.up is not None:
            yield from act_fits(act.up, env)
        return
    of = type(act)  # the attributes of instances are read when a kernel runs
    yield of.value is not None and of.derivative is not None, f"{kind.__name__} has no device functions"
    yield not act.parameter_slots(), f"{kind.__name__} has parameters, which device functions do not see"
    yield kind.Saved.fields == (("x",) if act.reads == "input" else ("y",)), own_record
    if env.kernels == "c":
        reason = kernels_of("c.trace").why_not(device(act))
        yield reason is None, reason or ""


def bias_fits(bias: Bias | None, env: Env) -> Requirements:
    """A bias must have the dtype of x, because torch would promote x + bias, except under autocast."""
    fits = bias is None or env.autocast is not None or bias.dtype == env.dtype
    yield fits, "input and bias must have one dtype"


def one_dtype(linear: Linear, bias: Bias | None, env: Env) -> bool:
    """Whether a GEMM can include the bias: torch promotes in `x + bias`, not in `linear(x, weight, bias)`."""
    return bias is None or env.autocast is not None or dtype_of(linear, "weight") == bias.dtype


def gemm_fits(linear: Linear, bias: Bias | None, env: Env) -> Requirements:
    """A GEMM with an epilogue or an addend requires operands of one dtype."""
    one = env.cast(dtype_of(linear, "weight")) == env.dtype and one_dtype(linear, bias, env)
    yield one, "input, weight and bias must have one dtype"


def reads_input(act: Pointwise | Gated) -> Requirements:
    """Fusions that save the input of an activation instead of its output require that its gradient reads the input."""
    holds = isinstance(act, Gated) or act.reads == "input"
    yield holds, f"{type(act).__name__} saves its output, which the GEMM after it does too"


def sum_dtype(*summed: Tensor) -> torch.dtype:
    """The dtype to which torch promotes a sum.

    Raises:
        InputError: for float64, since kernels of a narrower input sum in float32; the operations then run unfused.
    """
    dtype = functools.reduce(torch.promote_types, [t.dtype for t in summed])
    if dtype is torch.float64:
        raise InputError("its kernel sums in float32, not in float64", code="SF102", operation="Add")
    return dtype


def device(act: Pointwise) -> Any:
    """The activation as an argument of kernels, which cache it; without a reference to the operation."""
    return kernels_of("activations").Activation(act.value, act.derivative, act.reads, act.P)


def unit_of(gated: Gated) -> tuple[Any, Any, str]:
    """A gated unit as an argument of kernels: the activations of its two parts, and the packing."""
    return device(gated.activation), None if gated.up is None else device(gated.up), gated.packing


def numbers_of(act: Pointwise | Gated) -> tuple[Any, ...]:
    """The configuration numbers with which a kernel of the activation is compiled."""
    if isinstance(act, Gated):
        return act.activation.P, act.up and act.up.P, act.packing
    return act.P


def functions_fit(parts: Sequence[Pointwise | Scale], env: Env) -> Requirements:
    """Requirements of all kernels for activations and constant factors."""
    for part in parts:
        if isinstance(part, Pointwise):
            yield from act_fits(part, env)


def factors_of(parts: Sequence[Pointwise | Scale]) -> tuple[float, ...]:
    """The current constant factors, in order, to save for the backward pass."""
    return tuple(part.factor for part in parts if isinstance(part, Scale))


def as_one_activation(parts: Sequence[Pointwise | Scale], factors: Sequence[float]) -> Any:
    """f_n(... f_1(x)) as one activation for kernels, with these factors."""
    activations = kernels_of("activations")
    left = iter(factors)
    made = [device(part) if isinstance(part, Pointwise) else activations.constant_factor(next(left)) for part in parts]
    return activations.composed(*made)


def own_records(parts: Sequence[Pointwise | Scale], x: Tensor, factors: Sequence[float]) -> tuple[Saved, ...]:
    """The `Saved` of each operation, from the input of the first; each step is rounded as by the operations."""
    records: list[Saved] = []
    left = iter(factors)
    for part in parts:
        if isinstance(part, Scale):
            factor = next(left)
            records.append(Scale.Saved(factor=factor))
            x = x * factor
        else:
            y = part.reference(x)
            records.append(part.record(x, y))
            x = y
    return tuple(records)


def with_parameters(operation: UnfusedOperation, tensors: Mapping[str, Tensor | None]) -> Any:
    """A copy of an operation with these parameters, such as the saved ones, which need not be its current ones."""
    copy: Any = object.__new__(type(operation))
    copy.__dict__.update(operation.__dict__, _parameters={**operation._parameters, **tensors})  # pyright: ignore[reportPrivateUsage]
    return copy


def linear_of(linear: Linear, bias: Bias | None) -> Callable[[Tensor], tuple[Tensor, Linear.Saved]]:
    """A function from x to x weight^T + bias and the `Saved` of the GEMM; looks up the owners of parameters once."""
    weights, biases = linear.__dict__["_parameters"], {"bias": None} if bias is None else bias.held()

    def run(x: Tensor) -> tuple[Tensor, Linear.Saved]:
        weight, shift = weights.get("weight"), biases.get("bias")
        if weight is None or weight.dtype is not x.dtype:
            weight = linear.weight_for(x)
        if shift is None and bias is not None:
            shift = bias.read()
        return gemm(x, weight, shift), saved_linear(x, weight)

    return run


def plus_in_place(y: Tensor, add: Add, other: Tensor) -> Tensor:
    """The residual sum y + other, written over y where possible."""
    if y.shape == other.shape and y.dtype is other.dtype and may_overwrite():
        return y.add_(other)
    return add.fwd(y, other=other)[0]


def output_bytes(linear: Linear | MergedLinear | GroupedLinear, env: Env) -> float:
    """The size of the output in bytes."""
    return float(env.tokens * linear.out_features * env.itemsize)


def cost_in_place(linear: Linear, env: Env) -> Savings:
    """The cost of a pass over the output that ATen runs after a GEMM in the same step, in place."""
    return Savings(launches=1 - STEP, bytes=output_bytes(linear, env))


def as_rows(t: Tensor) -> Tensor:
    """View all leading dimensions as one."""
    return t if t.ndim == 2 else t.flatten(0, -2) if t.ndim > 2 else t.unsqueeze(0)


def dgrad(dy: Tensor, weight: Tensor, addend: Tensor | None = None, factor: float = 1.0) -> Tensor:
    """Return addend + factor (dy weight) from one GEMM, rounded once."""
    if addend is not None and addend.dtype is not weight.dtype:
        return dgrad(dy, weight, None, factor) + addend
    flat = dy.ndim == 2
    rows = dy if flat else as_rows(dy)
    if addend is None:
        dx = mm(rows, weight, factor)
    else:
        dx = addmm(addend if flat else as_rows(addend), rows, weight, factor)
    return dx if flat else dx.view(*dy.shape[:-1], weight.shape[1])
