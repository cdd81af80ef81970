"""What fusions around a GEMM by a Triton kernel share: what the kernel takes, and what it is worth."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..env import Env
from ..fusion import Requirements
from ..maingrad import Accumulated
from ..ops import Bias, Dropout, Linear
from ..ops.linear import weight_grad
from ..pointwise import Gated, Pointwise
from ._kernels import device, kernel_takes_act, kernel_takes_gated, kernels_run
from ._linear import one_dtype


def kernel_takes(linear: Linear, bias: Bias | None, env: Env) -> Requirements:
    """What the kernel asks of a GEMM, its input and its bias."""
    yield from kernels_run(env)
    weight = linear.weight
    one = env.cast(weight.dtype) == env.dtype and one_dtype(linear, bias, env)
    yield one, "input, weight and bias must have one dtype"
    yield 1 in weight.stride() or 1 in weight.shape, "the weight must be contiguous in its rows or its columns"


def epilogue_takes(
    linear: Linear, bias: Bias | None, act: Pointwise | Gated, env: Env, dropout: Dropout | None = None
) -> Requirements:
    """What the kernel asks of a GEMM with an activation or a gated unit in its epilogue, or before it."""
    yield from kernel_takes(linear, bias, env)
    yield from kernel_takes_act(act, env) if isinstance(act, Pointwise) else kernel_takes_gated(act, env)
    keeps = env.autocast is None or isinstance(act, Gated) or act.reads == "input" or act.autocast != "float32"
    yield keeps, f"{type(act).__name__} keeps its result, which is float32 under autocast"
    yield from kernel_takes_dropout(dropout)


def kernel_takes_dropout(dropout: Dropout | None) -> Requirements:
    """What the kernel asks of a dropout in its epilogue."""
    scales = dropout is not None and dropout.mode == "downscale_in_infer" and dropout.p > 0 and not dropout.training
    yield not scales, "in evaluation this Dropout is a scale"


def mask(dropout: Dropout | None, seed: Tensor | None, p: float | None = None) -> Any:
    """A dropout as the kernel takes it, `None` where nothing is dropped; p as it was, or is now."""
    from ..kernels import gemm

    if dropout is None or seed is None:
        return None
    return gemm.DropoutMask(seed, dropout.p if p is None else p, dropout.mode == "upscale_in_train")


def epilogue(
    x: Tensor,
    linear: Linear,
    bias: Bias | None,
    act: Pointwise | Gated,
    dropout: Any,
    store_pre: bool = False,
    store_act: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return y = dropout(act(z)), z = x weight^T + bias, from one GEMM, and z or act(z) where it is to be stored."""
    from ..kernels import gemm

    weight, start = weight_of(linear, x), bias_of(bias)
    around: dict[str, Any] = {"dropout": dropout, "tf32": tf32()}
    if isinstance(act, Gated):
        return gemm.linear_gated(x, weight, start, act=device(act.activation), store_pre=store_pre, **around)
    return gemm.linear(x, weight, start, act=device(act), store_pre=store_pre, store_act=store_act, **around)


def unit_bwd(
    dy: Tensor | None,
    linear: Linear.Saved,
    act: Pointwise | Gated,
    record: Any,
    dropout: Dropout | None,
    dropped: Dropout.Saved | None,
    needs: frozenset[str],
    main_grads: dict[str, Tensor],
    dy_sums: torch.dtype | None = None,
) -> tuple[Tensor | None, dict[str, Tensor | Accumulated | None]]:
    """The gradients of slots `bias`, `act`, an optional dropout and `linear`, in that order, from the GEMM's.

    Where its dtype is given, which it is of no gated unit, the sum of dy over all rows is the gradient of a bias after
    the GEMM, `out_bias`.
    """
    from ..kernels import gemm

    dx: Tensor | None = None
    grads: dict[str, Tensor | Accumulated | None] = {}
    if dy is None:
        return dx, grads
    given = dy
    if "x" in needs or "bias.bias" in needs:
        dy = like(dy, linear.weight)
        drop = None if dropped is None else mask(dropout, dropped.seed, dropped.p)
        around: dict[str, Any] = {"dropout": drop, "sums": "bias.bias" in needs, "tf32": tf32()}
        if isinstance(act, Gated):
            made = gemm.linear_dgrad_gated(dy, linear.weight, act=device(act.activation), t=record.x, **around)
        else:
            output = act.reads == "output"
            t: Tensor = record.y if output else record.x
            around |= {"t": t, "t_is_output": output, "dy_sums": dy_sums}
            made = gemm.linear_dgrad(dy, linear.weight, act=device(act), **around)
        dx, grads["bias.bias"] = made.dz, made.sum
        if dy_sums is not None:
            grads["out_bias.bias"] = made.dy_sum
    if "linear.weight" in needs:  # last: what fails before it may fall back
        main_grad = main_grads.pop("linear.weight", None)
        grads["linear.weight"] = weight_grad(like(given, linear.x), linear.x, main_grad)
    return (dx if "x" in needs else None), grads


def tf32() -> bool:
    """Whether the user lets float32 GEMMs be rounded to TF32."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def weight_of(linear: Linear, x: Tensor) -> Tensor:
    """The weight as it is now, as the kernel takes it: autocast does not reach it."""
    return linear.weight_for(x, always=True)


def bias_of(bias: Bias | None) -> Tensor | None:
    """The bias as it is now, if there is one."""
    return None if bias is None else bias.read()


def like(dy: Tensor, t: Tensor) -> Tensor:
    """In the dtype of the GEMM, where a residual in another had the sum promoted."""
    return dy if dy.dtype is t.dtype else dy.to(t.dtype)
