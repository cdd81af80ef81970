# pyright: basic
# Schemas are text, and what is registered under them has no types of its own.
"""The matrix products as operators, `torch.ops.seqfuse.linear` and the like: what traces and exports see.

Arguments are those of the functions in `gemm`, but an activation is a text (`activations.text_of`), dropout is three
arguments, and a result that is asked for by a flag follows in a list. Importing the kernels registers them; eager code
calls the functions, which call the operators where they are recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._operators import register as _register
from .activations import activation_of, text_of

_DROPOUT = "Tensor? seed=None, float p=0.0, bool upscale=True"
_FORWARD_GATED = (
    "(Tensor x, Tensor weight, Tensor? bias=None, *, str? act=None, bool store_pre=False, "
    f"{_DROPOUT}, Tensor? residual=None, ScalarType? dtype=None, bool tf32=False) -> Tensor[]"
)
_FORWARD = _FORWARD_GATED.replace("bool store_pre=False", "bool store_pre=False, bool store_act=False")
_FORWARD_GATED = _FORWARD_GATED.replace("*, ", "*, Tensor? up=None, Tensor? up_bias=None, ")
_DGRAD = (
    "(Tensor dy, Tensor weight, *, str? act=None, Tensor? t=None, bool t_is_output=False, "
    f"{_DROPOUT}, Tensor? residual=None, bool sums=False, bool emit=False, ScalarType? dtype=None, "
    "ScalarType? sums_dtype=None, ScalarType? dy_sums=None, bool tf32=False) -> Tensor[]"
)
_DGRAD_GATED = (
    f"(Tensor dy, Tensor weight, *, str act, Tensor t, {_DROPOUT}, bool sums=False, "
    "bool emit=False, ScalarType? dtype=None, ScalarType? sums_dtype=None, bool tf32=False) -> Tensor[]"
)
_WGRAD_BIAS = (
    "(Tensor dy, Tensor x, *, ScalarType? dtype=None, ScalarType? sums_dtype=None, bool tf32=False) -> (Tensor, Tensor)"
)
_WGRAD_BIAS_ADD = (
    "(Tensor(a!) main_grad, Tensor dy, Tensor x, *, ScalarType? sums_dtype=None, bool tf32=False) -> Tensor"
)


class Gradients(NamedTuple):
    """What `linear_dgrad` and `linear_dgrad_gated` give; `None` for what was not asked for."""

    dz: Tensor  # [*, K], of a gated unit [*, 2 K]
    sum: Tensor | None  # [K], [2 K]
    x: Tensor | None  # [*, K]
    dy_sum: Tensor | None  # [N]


class Dropout(NamedTuple):
    """Dropout in an epilogue: element i of the contiguous result is kept by `_philox`'s rule.

    Args:
        seed: one int64 on the device, never read by the host.
        p: probability of dropping an element.
        upscale: whether what is kept is multiplied by 1 / (1 - p).
    """

    seed: Tensor
    p: float
    upscale: bool = True


def _arguments(act: str | None, seed: Tensor | None, p: float, upscale: bool, rest: dict[str, Any]) -> dict[str, Any]:
    return rest | {
        "act": None if act is None else activation_of(act),
        "dropout": None if seed is None else Dropout(seed, p, upscale),
    }


def _product(function: Any) -> Any:
    def run(
        a: Tensor,
        weight: Tensor,
        *first: Any,
        act: str | None = None,
        seed: Tensor | None = None,
        p: float = 0.0,
        upscale: bool = True,
        **rest: Any,
    ) -> list[Tensor]:
        results = function(a, weight, *first, **_arguments(act, seed, p, upscale, rest))
        return [result for result in results if result is not None]

    return run


def _fake_forward(gated: bool) -> Any:
    def fake(
        x: Tensor,
        weight: Tensor,
        bias: Any = None,
        *,
        store_pre: bool = False,
        store_act: bool = False,
        dtype: Any = None,
        up: Tensor | None = None,
        **_: Any,
    ) -> list[Tensor]:
        N = weight.shape[0] * (1 if up is None else 2)
        shapes = [(*x.shape[:-1], N // 2 if gated else N)] + [(*x.shape[:-1], N)] * (store_pre or store_act)
        return [x.new_empty(shape, dtype=dtype or x.dtype) for shape in shapes]

    return fake


def _fake_dgrad(gated: bool) -> Any:
    def fake(
        dy: Tensor,
        weight: Tensor,
        *,
        sums: bool = False,
        emit: bool = False,
        dtype: Any = None,
        sums_dtype: Any = None,
        dy_sums: Any = None,
        **_: Any,
    ) -> list[Tensor]:
        K = weight.shape[1]
        width = 2 * K if gated else K
        dtype = dtype or dy.dtype
        results = [dy.new_empty((*dy.shape[:-1], width), dtype=dtype)]
        if sums:
            results.append(dy.new_empty((width,), dtype=sums_dtype or dtype))
        if emit:
            results.append(dy.new_empty((*dy.shape[:-1], K), dtype=dtype))
        if dy_sums is not None:
            results.append(dy.new_empty(dy.shape[-1:], dtype=dy_sums))
        return results

    return fake


def _fake_wgrad_bias(
    dy: Tensor, x: Tensor, *, dtype: Any = None, sums_dtype: Any = None, tf32: bool = False
) -> tuple[Tensor, Tensor]:
    shapes = ((dy.shape[-1], x.shape[-1]), dtype), (dy.shape[-1:], sums_dtype)
    dweight, dbias = (dy.new_empty(shape, dtype=of or dy.dtype) for shape, of in shapes)
    return dweight, dbias


def _fake_wgrad_bias_add(main_grad: Tensor, dy: Tensor, x: Tensor, *, sums_dtype: Any = None, **_: Any) -> Tensor:
    return dy.new_empty(dy.shape[-1:], dtype=sums_dtype or dy.dtype)


def _flops(a: Tensor, weight: Tensor, *_: Any, up: Tensor | None = None, **__: Any) -> int:
    """Of x weight^T and of dy weight; a gated unit whose weight is in two has the GEMM of `up` as well."""
    (N, K), rows = weight.shape, a.shape[:-1].numel()
    return 2 * rows * N * K * (1 if up is None else 2)


def _wgrad_flops(dy: Tensor, x: Tensor, **_: Any) -> int:
    return 2 * dy.numel() * x.shape[-1]


def _wgrad_add_flops(main_grad: Tensor, dy: Tensor, x: Tensor, **_: Any) -> int:
    return _wgrad_flops(dy, x)


def register(
    linear: Callable[..., Any],
    linear_gated: Callable[..., Any],
    linear_dgrad: Callable[..., Any],
    linear_dgrad_gated: Callable[..., Any],
    linear_wgrad_bias: Callable[..., tuple[Tensor, Tensor]],
) -> None:
    """Register operators that call these functions of `gemm`."""

    def wgrad_bias_add(main_grad: Tensor, dy: Tensor, x: Tensor, **rest: Any) -> Tensor:
        return linear_wgrad_bias(dy, x, main_grad=main_grad, **rest)[1]

    for schema, run, fake, flops in (
        (f"linear{_FORWARD}", _product(linear), _fake_forward(False), _flops),
        (f"linear_gated{_FORWARD_GATED}", _product(linear_gated), _fake_forward(True), _flops),
        (f"linear_dgrad{_DGRAD}", _product(linear_dgrad), _fake_dgrad(False), _flops),
        (f"linear_dgrad_gated{_DGRAD_GATED}", _product(linear_dgrad_gated), _fake_dgrad(True), _flops),
        (f"linear_wgrad_bias{_WGRAD_BIAS}", linear_wgrad_bias, _fake_wgrad_bias, _wgrad_flops),
        (f"linear_wgrad_bias_{_WGRAD_BIAS_ADD}", wgrad_bias_add, _fake_wgrad_bias_add, _wgrad_add_flops),
    ):
        _register(schema, run, fake, (torch.Tag.needs_fixed_stride_order,), flops)


def _texts(act: Any, dropout: Dropout | None) -> dict[str, Any]:
    around = {} if dropout is None else dropout._asdict()
    return around | {"act": None if act is None else text_of(act)}


def forward(
    form: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    act: Any,
    store_pre: bool,
    store_act: bool,
    dropout: Dropout | None,
    residual: Tensor | None,
    dtype: torch.dtype | None,
    tf32: bool,
    up: Tensor | None,
    up_bias: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """`gemm.linear` and `linear_gated` by their operators."""
    given = _texts(act, dropout) | {"store_pre": store_pre, "residual": residual}
    given |= {"dtype": dtype, "tf32": tf32}
    if form == "gated":
        y, *pre = torch.ops.seqfuse.linear_gated(x, weight, bias, up=up, up_bias=up_bias, **given)
    else:
        y, *pre = torch.ops.seqfuse.linear(x, weight, bias, **given, store_act=store_act)
    return y, pre[0] if pre else None


def backward(
    form: str,
    dy: Tensor,
    weight: Tensor,
    act: Any,
    t: Tensor | None,
    t_is_output: bool,
    dropout: Dropout | None,
    residual: Tensor | None,
    sums: bool,
    emit: bool,
    dtype: torch.dtype | None,
    sums_dtype: torch.dtype | None,
    dy_sums: torch.dtype | None,
    tf32: bool,
) -> Gradients:
    """`gemm.linear_dgrad` and `linear_dgrad_gated` by their operators."""
    given = _texts(act, dropout) | {"t": t, "sums": sums, "emit": emit, "dtype": dtype}
    given |= {"sums_dtype": sums_dtype, "tf32": tf32}
    if form == "dgated":
        results = torch.ops.seqfuse.linear_dgrad_gated(dy, weight, **given)
    else:
        given |= {"t_is_output": t_is_output, "residual": residual, "dy_sums": dy_sums}
        results = torch.ops.seqfuse.linear_dgrad(dy, weight, **given)
    left = iter(results)
    dz = next(left)
    total, x, dy_sum = (next(left) if asked else None for asked in (sums, emit, dy_sums is not None))
    return Gradients(dz, total, x, dy_sum)


def wgrad_bias(
    dy: Tensor,
    x: Tensor,
    main_grad: Tensor | None,
    dtype: torch.dtype | None,
    sums_dtype: torch.dtype | None,
    tf32: bool,
) -> tuple[Tensor, Tensor]:
    """`gemm.linear_wgrad_bias` by its operator."""
    if main_grad is None:
        return torch.ops.seqfuse.linear_wgrad_bias(dy, x, dtype=dtype, sums_dtype=sums_dtype, tf32=tf32)
    return main_grad, torch.ops.seqfuse.linear_wgrad_bias_(main_grad, dy, x, sums_dtype=sums_dtype, tf32=tf32)
