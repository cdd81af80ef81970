"""Matrix products with an epilogue: every part of it, every layout, every end of a matrix."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from seqfuse.kernels import gemm
from seqfuse.kernels._gemm_kernel import Tile, choose, table, tiles
from seqfuse.kernels._launch import family, interpreted
from seqfuse.kernels.activations import ACTIVATIONS, Activation, activation_of, text_of
from seqfuse.kernels.gemm import DropoutMask
from seqfuse.ops._philox import drop_mask
from seqfuse.testing import (
    REGIMES,
    Untouched,
    assert_bitwise_equal,
    exact,
    guarded,
    in_regime,
    red_zones,
)
from seqfuse.testing.judge import judge as judged
from seqfuse.testing.tensors import redrawn
from tools.compiled import compile_variants

from .mutants import in_dtypes
from .references import ACTIVATIONS_IN_TORCH

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TILES = {
    "pointers": Tile(32, 32, 32, 4, 1),
    "descriptors": Tile(32, 64, 32, 4, 1, split=2, descriptors=True),
    "quarters": Tile(64, 64, 16, 4, 1, split=4, descriptors=True, flatten=False),
}
M, N, K = 48, 40, 56


@pytest.fixture(params=DTYPES.values(), ids=DTYPES.keys())
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=TILES.values(), ids=TILES.keys())
def tile(request: pytest.FixtureRequest) -> Tile:
    return request.param


def data(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    # Asymmetric: what is even or odd in its argument must not pass for something else.
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return ((torch.randn(shape, generator=generator) * 1.3 + 0.2) * scale).to(device, dtype)


def a_seed(device: torch.device) -> Tensor:
    return torch.tensor([7, -6148914691236517206, 9], device=device)[1]


def drop(x: Tensor, dropout: DropoutMask | None) -> Tensor:
    if dropout is None:
        return x
    return x * ~drop_mask(dropout.seed, x.shape, dropout.p) / (1 - dropout.p)


def upcast(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def judge(fused: Callable[..., Any], eager: Callable[..., Any], args: dict[str, Any]) -> None:
    """The rule, against the unfused operations in the working dtype and in float64; nothing is modified."""

    def measure(seed: int) -> tuple[Any, ...]:
        drawn = {name: redrawn(value, seed) if isinstance(value, Tensor) else value for name, value in args.items()}
        with Untouched({name: value for name, value in drawn.items() if isinstance(value, Tensor)}):
            ours = fused(**drawn)
        return ours, eager(**drawn), eager(**{name: upcast(value) for name, value in drawn.items()})

    judged(measure, 0)


def eager_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    act: str | None = None,
    dropout: DropoutMask | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    store_pre: bool = False,
    store_act: bool = False,
    up: Tensor | None = None,
    up_bias: Tensor | None = None,
) -> dict[str, Tensor | None]:
    if up is not None:
        weight = torch.cat((weight, up))
        bias = None if bias is None or up_bias is None else torch.cat((bias, up_bias))
    z = F.linear(x, weight)
    if bias is not None:
        z = z + bias
    y = z
    if gated:
        gate, up = z.chunk(2, -1)
        y = ACTIVATIONS_IN_TORCH[act or "identity"](gate) * up
    elif act is not None:
        y = ACTIVATIONS_IN_TORCH[act](y)
    kept = z if store_pre else y if store_act else None
    y = drop(y, dropout)
    if residual is not None:
        y = y + residual
    return {"y": y.clone(), "z": None if kept is None else kept.clone()}


def check_linear(module: Any = gemm, tile: Tile | None = None, **args: Any) -> None:
    def fused(gated: bool = False, act: str | None = None, **given: Any) -> dict[str, Tensor | None]:
        run = module.linear_gated if gated else module.linear
        y, z = run(**given, act=None if act is None else ACTIVATIONS[act], tile=tile)
        return {"y": y, "z": z}

    judge(fused, eager_linear, args)


def eager_dgrad(
    dy: Tensor,
    weight: Tensor,
    act: str | None = None,
    t: Tensor | None = None,
    dropout: DropoutMask | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> dict[str, Tensor]:
    dx = dy @ weight
    if t is None:
        dz = drop(dx, dropout)
        x = dz
    else:
        t = t.detach().requires_grad_()
        f = ACTIVATIONS_IN_TORCH[act or "identity"]
        x = drop(f(t.chunk(2, -1)[0]) * t.chunk(2, -1)[1] if gated else f(t), dropout)
        (dz,) = torch.autograd.grad(x, t, dx)
    if residual is not None:
        dz = dz + residual
    dz = dz.clone()
    return {"dz": dz, "sum": dz.flatten(0, -2).sum(0), "x": x.detach().clone()}


def check_dgrad(module: Any = gemm, tile: Tile | None = None, of_output: bool = False, **args: Any) -> None:
    emit, gated = args.get("act") is not None, args.get("gated", False)
    whole = emit and not gated and "residual" not in args

    def fused(gated: bool = False, act: str | None = None, **given: Any) -> dict[str, Tensor]:
        dgrad = module.linear_dgrad_gated if gated else module.linear_dgrad
        if act is not None:
            given["act"] = ACTIVATIONS[act]
            if of_output:
                given |= {"t": ACTIVATIONS_IN_TORCH[act](given["t"]), "t_is_output": True}
        dz, total, x, _ = dgrad(**given, sums=True, emit=emit, tile=tile)
        results = {"dz": dz, "sum": total, **({"x": x} if emit else {})}
        if whole:
            again, _, _, results["dy_sum"] = dgrad(**given, sums=True, dy_sums=given["dy"].dtype, tile=tile)
            assert_bitwise_equal(again, dz)
        return results

    def eager(**kwargs: Any) -> dict[str, Tensor]:
        result = eager_dgrad(**kwargs)
        if not emit:
            del result["x"]
        if whole:
            result["dy_sum"] = kwargs["dy"].flatten(0, -2).sum(0)
        return result

    judge(fused, eager, args)


def check_wgrad(module: Any = gemm, tile: Tile | None = None, accumulate: bool = False, **args: Any) -> None:
    dy, x = args["dy"], args["x"]
    start = data(dy.device, torch.float32, dy.shape[-1], x.shape[-1], seed=9)

    def eager(dy: Tensor, x: Tensor) -> list[Tensor]:
        rows = dy.flatten(0, -2)
        dw = rows.t() @ x.flatten(0, -2)
        if accumulate:
            dw = start.to(dw.dtype if dw.dtype == torch.float64 else torch.float32) + dw
        return [dw, rows.sum(0)]

    def fused(dy: Tensor, x: Tensor) -> list[Tensor]:
        main = start.clone() if accumulate else None
        if main is None:
            return [*module.linear_wgrad_bias(dy, x, tile=tile)]
        total = module.linear_wgrad_bias_(main, dy, x, tile=tile)
        return [main, total]

    judge(fused, eager, args)


def operands(device: torch.device, dtype: torch.dtype, m: int = M, n: int = N, k: int = K) -> SimpleNamespace:
    return SimpleNamespace(
        x=data(device, dtype, m, k, seed=1),
        weight=data(device, dtype, n, k, seed=2, scale=k**-0.5),
        bias=data(device, dtype, n, seed=3),
        packed=data(device, dtype, 2 * n, k, seed=4, scale=k**-0.5),
        packed_bias=data(device, dtype, 2 * n, seed=5),
        residual=data(device, dtype, m, n, seed=6),
        dy=data(device, dtype, m, n, seed=8),
        t=data(device, dtype, m, k, seed=10),
        packed_t=data(device, dtype, m, 2 * k, seed=11),
        d_residual=data(device, dtype, m, k, seed=12),
        dropout=DropoutMask(a_seed(device), 0.3),
    )


def test_every_activation_is_in_every_epilogue() -> None:
    assert ACTIVATIONS_IN_TORCH.keys() == ACTIVATIONS.keys()


@pytest.mark.parametrize("act", ACTIVATIONS_IN_TORCH)
def test_linear_with_every_activation(device: torch.device, dtype: torch.dtype, act: str) -> None:
    o = operands(device, dtype)
    check_linear(x=o.x, weight=o.weight, bias=o.bias, act=act, store_pre=True)


@pytest.mark.parametrize(
    "parts",
    [
        (),
        ("bias",),
        ("residual",),
        ("bias", "residual"),
        ("dropout",),
        ("bias", "dropout", "residual"),
    ],
    ids="+".join,
)
def test_linear_with_every_part_of_an_epilogue(
    device: torch.device, dtype: torch.dtype, tile: Tile, parts: tuple[str, ...]
) -> None:
    o = operands(device, dtype)
    check_linear(tile=tile, x=o.x, weight=o.weight, **{part: getattr(o, part) for part in parts})


@pytest.mark.parametrize("act", [None, "gelu"], ids=["alone", "gelu"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_everything_at_once(device: torch.device, dtype: torch.dtype, tile: Tile, act: str | None, gated: bool) -> None:
    o = operands(device, dtype)
    check_linear(
        tile=tile, x=o.x, weight=o.packed if gated else o.weight, bias=o.packed_bias if gated else o.bias,
        act=act or ("identity" if gated else None), store_pre=True, dropout=o.dropout,
        residual=o.residual, gated=gated,
    )  # fmt: skip


@pytest.mark.parametrize("act", ["relu", "tanh"])
def test_an_activation_is_given_as_it_is_before_dropout(
    device: torch.device, dtype: torch.dtype, tile: Tile, act: str
) -> None:
    o = operands(device, dtype)
    check_linear(tile=tile, x=o.x, weight=o.weight, bias=o.bias, act=act, dropout=o.dropout, store_act=True)


def in_two(o: Any) -> dict[str, Tensor]:
    """The packed weight and bias as two tensors each, which do not lie side by side."""
    weight, up = (half.clone() for half in o.packed.chunk(2))
    bias, up_bias = (half.clone() for half in o.packed_bias.chunk(2))
    return {"weight": weight, "bias": bias, "up": up, "up_bias": up_bias}


@pytest.mark.parametrize("bias", [True, False])
def test_gate_and_up_may_have_a_weight_each(device: torch.device, dtype: torch.dtype, tile: Tile, bias: bool) -> None:
    o = operands(device, dtype)
    given = in_two(o) if bias else {name: t for name, t in in_two(o).items() if "bias" not in name}
    check_linear(tile=tile, x=o.x, **given, act="silu", store_pre=True, dropout=o.dropout, gated=True)
    columns = given | {name: given[name].t().contiguous().t() for name in ("weight", "up")}
    check_linear(tile=tile, x=o.x, **columns, act="gelu", gated=True)


@pytest.mark.parametrize("act", ACTIVATIONS_IN_TORCH)
def test_gated_with_every_activation(device: torch.device, dtype: torch.dtype, act: str) -> None:
    o = operands(device, dtype)
    check_linear(x=o.x, weight=o.packed, bias=o.packed_bias, act=act, store_pre=True, gated=True)


@pytest.mark.parametrize("act", ACTIVATIONS_IN_TORCH)
def test_dgrad_with_every_activation(device: torch.device, dtype: torch.dtype, act: str) -> None:
    o = operands(device, dtype)
    check_dgrad(dy=o.dy, weight=o.weight, act=act, t=o.t)


@pytest.mark.parametrize("act", [name for name, a in ACTIVATIONS.items() if a.reads == "output"])
def test_dgrad_from_the_output_of_an_activation(device: torch.device, act: str) -> None:
    o = operands(device, torch.float32)
    check_dgrad(dy=o.dy, weight=o.weight, act=act, t=o.t, of_output=True, dropout=o.dropout)


@pytest.mark.parametrize("act", ACTIVATIONS_IN_TORCH)
def test_dgrad_of_every_gated_unit(device: torch.device, dtype: torch.dtype, act: str) -> None:
    o = operands(device, dtype)
    check_dgrad(dy=o.dy, weight=o.weight, act=act, t=o.packed_t, gated=True)


def test_a_second_half_that_begins_off_16_bytes_is_moved_without_descriptors(device: torch.device) -> None:
    # Rows of 2 x 12 numbers of 16 bits begin at 16 bytes, their second halves do not.
    o = operands(device, torch.float16, m=16, n=16, k=12)
    dz = gemm.linear_dgrad_gated(
        o.dy, o.weight, act=ACTIVATIONS["relu"], t=o.packed_t, tile=TILES["descriptors"]
    ).dz  # the interpreter and the compiler refuse a descriptor that is not aligned
    wide = {"dy": o.dy.double(), "weight": o.weight.double(), "t": o.packed_t.double()}
    torch.testing.assert_close(dz.double(), eager_dgrad(**wide, act="relu", gated=True)["dz"], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("parts", [(), ("dropout",), ("d_residual",)], ids="+".join)
@pytest.mark.parametrize("kind", ["alone", "gelu", "gated"])
def test_dgrad_with_every_part_of_an_epilogue(
    device: torch.device, dtype: torch.dtype, tile: Tile, kind: str, parts: tuple[str, ...]
) -> None:
    o = operands(device, dtype)
    given = {part.removeprefix("d_"): getattr(o, part) for part in parts}
    if kind == "gated":
        given.pop("residual", None)
        given |= {"act": "silu", "t": o.packed_t, "gated": True}
    elif kind == "gelu":
        given |= {"act": "gelu", "t": o.t}
    check_dgrad(tile=tile, dy=o.dy, weight=o.weight, **given)


@pytest.mark.parametrize("regime", REGIMES)
def test_in_every_regime(device: torch.device, dtype: torch.dtype, regime: str) -> None:
    def made(seed: int, *shape: int) -> Tensor:
        return in_regime(regime, shape, seed, dtype=dtype).to(device)

    x, dy, t, packed_t = made(1, M, K), made(2, M, N), made(3, M, K), made(4, M, 2 * K)
    o = operands(device, dtype)
    check_linear(x=x, weight=o.weight, bias=made(5, N), act="gelu_tanh", residual=made(6, M, N), store_pre=True)
    check_linear(x=x, weight=o.packed, bias=made(7, 2 * N), act="silu", gated=True)
    check_dgrad(dy=dy, weight=o.weight, act="gelu", t=t)
    check_dgrad(dy=dy, weight=o.weight, act="silu", t=packed_t, gated=True)
    check_wgrad(dy=dy, x=x, accumulate=True)


@pytest.mark.parametrize("regime", ["zeros", "extremes"])
def test_at_the_edges_of_a_format(device: torch.device, dtype: torch.dtype, regime: str) -> None:
    """Zeros stay zeros, and what overflows does so in torch as well; fused may be finite where unfused is not."""
    o = operands(device, dtype)
    x, dy = (in_regime(regime, shape, i, dtype=dtype).to(device) for i, shape in enumerate(((M, K), (M, N))))
    if dtype is not torch.float16:
        # Whether a sum overflows in float32, which is summed in, would depend on its order.
        x, dy = x / 512, dy / 512
    (y, z), (dx, total, *_) = (
        gemm.linear(x, o.weight, act=ACTIVATIONS["relu"], store_pre=True, residual=dy),
        gemm.linear_dgrad(dy, o.weight, act=ACTIVATIONS["relu"], t=o.t, sums=True),
    )
    ahead = eager_linear(x, o.weight, act="relu", store_pre=True, residual=dy)
    back = eager_dgrad(dy, o.weight, act="relu", t=o.t)
    dw, _ = gemm.linear_wgrad_bias(dy, x)
    for one, other in ((y, ahead["y"]), (z, ahead["z"]), (dx, back["dz"]), (dw, dy.t() @ x)):
        assert regime == "extremes" or not one.any()
        assert (one.isfinite() | ~other.isfinite()).all()
    assert regime == "extremes" or not total.any()


class _LinearThenGated(torch.autograd.Function):
    """dropout(gelu(x w^T)), then a gated product with a bias: every gradient by a kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, packed: Tensor, bias: Tensor, out: Tensor, seed: Tensor) -> Tensor:
        ctx.dropout = DropoutMask(seed, 0.25)
        h, z = gemm.linear(x, w, act=ACTIVATIONS["gelu"], store_pre=True, dropout=ctx.dropout)
        g, t = gemm.linear_gated(h, packed, bias, act=ACTIVATIONS["sigmoid"], store_pre=True)
        ctx.save_for_backward(x, w, packed, out, z, t)
        return gemm.linear(g, out)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, w, packed, out, z, t = ctx.saved_tensors
        dt, dbias, g, _ = gemm.linear_dgrad_gated(grads[0], out, act=ACTIVATIONS["sigmoid"], t=t, sums=True, emit=True)
        dz, _, h, _ = gemm.linear_dgrad(dt, packed, act=ACTIVATIONS["gelu"], t=z, dropout=ctx.dropout, emit=True)
        assert g is not None
        assert h is not None
        dx = gemm.linear_dgrad(dz, w)[0]
        dw, dpacked, dout = (gemm.linear_wgrad_bias(*pair)[0] for pair in ((dz, x), (dt, h), (grads[0], g)))
        return dx, dw, dpacked, dbias, dout, None


def test_gradients_are_those_of_finite_differences(device: torch.device) -> None:
    shapes = ((3, 4), (5, 4), (6, 5), (6,), (2, 3))
    inputs = [data(device, torch.float64, *shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    seed = a_seed(device)
    torch.autograd.gradcheck(lambda *a: _LinearThenGated.apply(*a, seed), inputs, fast_mode=True)


@pytest.mark.parametrize("accumulate", [False, True], ids=["fresh", "main_grad"])
def test_wgrad(device: torch.device, dtype: torch.dtype, tile: Tile, accumulate: bool) -> None:
    o = operands(device, dtype)
    check_wgrad(tile=tile, accumulate=accumulate, dy=o.dy, x=o.x)
    how: dict[str, Any] = {"sums_dtype": torch.float32, "tile": tile}
    if accumulate:
        total = gemm.linear_wgrad_bias_(torch.ones(N, K, device=device), o.dy, o.x, **how)
    else:
        _, total = gemm.linear_wgrad_bias(o.dy, o.x, **how)
    assert total.dtype is torch.float32
    torch.testing.assert_close(total, o.dy.double().sum(0).float())


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 40, 56), (37, 1, 31), (1, 1, 1), (33, 65, 129), (31, 37, 7), (32, 32, 32), (5, 3, 64), (67, 36, 1)],
)
def test_sizes_that_fit_no_tile(device: torch.device, tile: Tile, m: int, n: int, k: int) -> None:
    o = operands(device, torch.float32, m, n, k)
    check_linear(
        tile=tile, x=o.x, weight=o.weight, bias=o.bias, act="silu", store_pre=True, dropout=o.dropout,
        residual=o.residual,
    )  # fmt: skip
    check_linear(tile=tile, x=o.x, weight=o.packed, act="silu", store_pre=True, gated=True)
    check_dgrad(tile=tile, dy=o.dy, weight=o.weight, act="gelu", t=o.t, dropout=o.dropout)
    check_dgrad(tile=tile, dy=o.dy, weight=o.weight, act="silu", t=o.packed_t, gated=True)
    check_wgrad(tile=tile, dy=o.dy, x=o.x, accumulate=True)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "by columns": lambda x: x.t().contiguous().t(),
    "strided rows": lambda x: torch.cat((x, x), 1)[:, : x.shape[1]],
    "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
    "expanded rows": lambda x: x[:1].expand_as(x),
    "misaligned": lambda x: F.pad(x, (1, 0))[:, 1:],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layouts_of_factors(device: torch.device, tile: Tile, layout: Callable[[Tensor], Tensor]) -> None:
    o = operands(device, torch.float16)
    x, weight, packed, dy = (layout(t) for t in (o.x, o.weight, o.packed, o.dy))
    check_linear(tile=tile, x=x, weight=weight, bias=o.bias)
    check_linear(tile=tile, x=x, weight=packed, act="silu", gated=True)
    check_dgrad(tile=tile, dy=dy, weight=weight)
    check_wgrad(tile=tile, dy=dy, x=x)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "by columns"])
def test_layouts_of_tiles(device: torch.device, tile: Tile, layout: str) -> None:
    o = operands(device, torch.float16)
    residual, t, packed_t = (LAYOUTS[layout](x) for x in (o.residual, o.t, o.packed_t))
    check_linear(tile=tile, x=o.x, weight=o.weight, residual=residual)
    check_dgrad(tile=tile, dy=o.dy, weight=o.weight, act="gelu", t=t)
    check_dgrad(tile=tile, dy=o.dy, weight=o.weight, act="silu", t=packed_t, gated=True)


@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (2, 1, 3, 2)], ids=str)
def test_any_number_of_leading_dimensions(device: torch.device, lead: tuple[int, ...]) -> None:
    o = operands(device, torch.float32)
    x, residual = data(device, torch.float32, *lead, K), data(device, torch.float32, *lead, N)
    check_linear(x=x, weight=o.weight, bias=o.bias, dropout=o.dropout, residual=residual)
    if lead:
        check_dgrad(dy=residual, weight=o.weight, act="gelu", t=x)
        check_wgrad(dy=residual, x=x)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 8, 8), (8, 0, 8), (8, 8, 0), (0, 0, 0)])
def test_empty_matrices(device: torch.device, tile: Tile, m: int, n: int, k: int) -> None:
    o = operands(device, torch.float32, m, n, max(k, 1))
    x, weight, packed = o.x[:, :k], o.weight[:, :k], o.packed[:, :k]
    y, z = gemm.linear(x, weight, o.bias, act=ACTIVATIONS["gelu"], store_pre=True, residual=o.residual, tile=tile)
    torch.testing.assert_close(y, F.gelu(o.bias.expand(m, n)) + o.residual)
    torch.testing.assert_close(z, o.bias.expand(m, n).clone())
    y, _ = gemm.linear_gated(x, packed, o.packed_bias, act=ACTIVATIONS["silu"], tile=tile)
    torch.testing.assert_close(y, (F.silu(o.packed_bias[:n]) * o.packed_bias[n:]).expand(m, n).clone())
    t = data(device, torch.float32, m, k)
    dy_sum = gemm.linear_dgrad(o.dy, weight, act=ACTIVATIONS["gelu"], t=t, dy_sums=torch.float32, tile=tile).dy_sum
    torch.testing.assert_close(dy_sum, o.dy.sum(0))
    check_dgrad(tile=tile, dy=o.dy, weight=weight, act="gelu", t=t)
    main = data(device, torch.float32, n, k)
    before = main.clone()
    added = gemm.linear_wgrad_bias_(main, o.dy[:0], x[:0], tile=tile)
    dw, total = gemm.linear_wgrad_bias(o.dy[:0], x[:0], tile=tile)
    assert_bitwise_equal([main, dw], [before, torch.zeros_like(main)])
    assert_bitwise_equal([added, total], [torch.zeros(n, device=device)] * 2)
    _, total = gemm.linear_wgrad_bias(o.dy, x, tile=tile)
    torch.testing.assert_close(total, o.dy.sum(0))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_bad_number_spreads_as_in_torch(device: torch.device, tile: Tile, value: float) -> None:
    o = operands(device, torch.float32)
    for name in ("x", "weight", "bias", "residual", "dy", "t"):
        setattr(o, name, getattr(o, name).clone())
        getattr(o, name).view(-1)[17] = value
    # Eager GeLU makes NaN of Inf on a CPU.
    for act in ("relu", "gelu", "tanh") if math.isnan(value) else ("relu", "tanh"):
        check_linear(tile=tile, x=o.x, weight=operands(device, torch.float32).weight, bias=o.bias, act=act)
        clean = operands(device, torch.float32)
        check_linear(tile=tile, x=clean.x, weight=o.weight, act=act, residual=o.residual)
        check_dgrad(tile=tile, dy=clean.dy, weight=clean.weight, act=act, t=o.t)
    # A whole row of them, most of which is dropped.
    dropped, clean = DropoutMask(a_seed(device), 0.8), operands(device, torch.float32)
    check_linear(tile=tile, x=o.x, weight=clean.weight, bias=clean.bias, dropout=dropped)
    check_dgrad(tile=tile, dy=o.dy, weight=clean.weight, dropout=dropped)


def test_sums_leave_out_rows_beyond_the_last(device: torch.device, tile: Tile) -> None:
    # The derivative is infinite at 0, which is what stands in rows that are not there.
    class Root:
        value, derivative, reads, P = _root, _root_derivative, "input", (2.0,)

    o = operands(device, torch.float32, 33, N, K)
    t = o.t.abs() + 0.5
    total = gemm.linear_dgrad(o.dy, o.weight, act=Root, t=t, sums=True, tile=tile).sum
    torch.testing.assert_close(total, (o.dy @ o.weight / (2 * t.sqrt())).sum(0))


@triton.jit
def _root(x, P: tl.constexpr):
    return tl.sqrt(x)


@triton.jit
def _root_derivative(x, P: tl.constexpr):
    return 1.0 / (P[0] * tl.sqrt(x))


@pytest.mark.parametrize(("m", "n", "k"), [(33, 40, 56), (31, 33, 29)])
def test_neither_reads_nor_writes_past_an_end(
    device: torch.device, dtype: torch.dtype, tile: Tile, m: int, n: int, k: int
) -> None:
    o = operands(device, dtype, m, n, k)
    for name, value in vars(o).items():
        if isinstance(value, Tensor):
            setattr(o, name, guarded(value).tensor)
    act = ACTIVATIONS["gelu"]
    with red_zones():
        results = [
            *gemm.linear(o.x, o.weight, o.bias, act=act, store_pre=True, residual=o.residual,
                         dropout=o.dropout, tile=tile),
            *gemm.linear_gated(o.x, o.packed, o.packed_bias, act=act, store_pre=True, tile=tile),
            *gemm.linear_dgrad(o.dy, o.weight, act=act, t=o.t, sums=True, emit=True, tile=tile)[:3],
            *gemm.linear_dgrad_gated(o.dy, o.weight, act=act, t=o.packed_t, sums=True, emit=True, tile=tile)[:3],
            gemm.linear_dgrad(o.dy, o.weight, act=act, t=o.t, dy_sums=dtype, tile=tile).dy_sum,
            *gemm.linear_wgrad_bias(o.dy, o.x, tile=tile),
        ]  # fmt: skip
    main = guarded(torch.zeros(n, k, device=device))
    results += [gemm.linear_wgrad_bias_(main.tensor, o.dy, o.x, tile=tile), main.tensor]
    main.check("main_grad")
    assert len(results) == 15
    for i, result in enumerate(results):
        assert result is not None
        assert result.isfinite().all(), f"result {i}"


def test_adds_to_a_part_of_a_larger_buffer(device: torch.device, tile: Tile) -> None:
    o = operands(device, torch.bfloat16)
    buffer = torch.full((N, K + 24), math.nan, device=device)
    buffer[:, :K] = 1.0
    gemm.linear_wgrad_bias_(buffer[:, :K], o.dy, o.x, tile=tile)
    assert buffer[:, K:].isnan().all()
    torch.testing.assert_close(buffer[:, :K], 1 + o.dy.float().t() @ o.x.float(), rtol=1e-4, atol=1e-3)


def test_exact_inputs_give_exact_results(device: torch.device, dtype: torch.dtype, tile: Tile) -> None:
    x, weight, dy, residual = (
        exact("integers", s, i, dtype=dtype).to(device) for i, s in enumerate(((M, K), (N, K), (M, N), (M, N)))
    )
    y, _ = gemm.linear(x, weight, act=ACTIVATIONS["relu"], residual=residual, dtype=torch.float32, tile=tile)
    want = F.relu(x.double() @ weight.double().t()) + residual.double()
    assert_bitwise_equal(y, want.float())
    dw, total = gemm.linear_wgrad_bias(dy, x, dtype=torch.float32, sums_dtype=torch.float32, tile=tile)
    assert_bitwise_equal(dw, (dy.double().t() @ x.double()).float())
    assert_bitwise_equal(total, dy.double().sum(0).float())
    total = gemm.linear_dgrad(dy, weight, sums=True, sums_dtype=torch.float32, tile=tile).sum
    assert_bitwise_equal(total, (dy.double() @ weight.double()).sum(0).float())


def test_twice_the_same_bits_whatever_the_order_of_tiles(device: torch.device, tile: Tile) -> None:
    o = operands(device, torch.float32, 70, 70, 70)

    def run(tile: Tile) -> list[Tensor | None]:
        act = ACTIVATIONS["gelu"]
        return [
            *gemm.linear(o.x, o.weight, o.bias, act=act, dropout=o.dropout, tile=tile)[:1],
            *gemm.linear_dgrad(o.dy, o.weight, act=act, t=o.t, sums=True, emit=True, tile=tile),
            *gemm.linear_dgrad(o.dy, o.weight, act=act, t=o.t, dy_sums=o.dy.dtype, tile=tile),
            *gemm.linear_wgrad_bias(o.dy, o.x, tile=tile),
        ]

    first = run(tile)
    for other in (tile, tile._replace(group=1), tile._replace(group=3, per_processor=3), tile._replace(flatten=False)):
        assert_bitwise_equal(run(other), first)


def test_dropout_has_the_mask_of_the_operation(device: torch.device, tile: Tile) -> None:
    for n in (40, 37):
        o = operands(device, torch.float32, n=n)
        y, _ = gemm.linear(o.x * 0, o.weight, o.bias * 0 + 1, dropout=o.dropout, tile=tile)
        assert torch.equal(y == 0, drop_mask(o.dropout.seed, y.shape, o.dropout.p))
        y, _ = gemm.linear(o.x * 0, o.weight, o.bias * 0 + 1, dropout=o.dropout._replace(upscale=False), tile=tile)
        assert set(y.unique().tolist()) == {0.0, 1.0}
        y, _ = gemm.linear(o.x, o.weight, dropout=o.dropout._replace(p=1.0), residual=o.residual, tile=tile)
        assert_bitwise_equal(y, o.residual.clone())


def test_float64_to_its_last_digits(device: torch.device, tile: Tile) -> None:
    o = operands(device, torch.float64)
    y, _ = gemm.linear(o.x, o.weight, o.bias, act=ACTIVATIONS["gelu"], residual=o.residual, tile=tile)
    torch.testing.assert_close(y, F.gelu(F.linear(o.x, o.weight, o.bias)) + o.residual, rtol=1e-12, atol=1e-12)
    main = torch.zeros_like(o.weight)
    gemm.linear_wgrad_bias_(main, o.dy, o.x, tile=tile)
    torch.testing.assert_close(main, o.dy.t() @ o.x, rtol=1e-12, atol=1e-12)


def test_rows_further_apart_than_int32_counts(device: torch.device) -> None:
    apart = 2**30 + 8
    x = torch.empty_strided((4, 16), (apart, 1), dtype=torch.float16, device=device)
    x.copy_(data(device, torch.float16, 4, 16))
    weight = data(device, torch.float16, 16, 16)
    check_linear(tile=TILES["pointers"], x=x, weight=weight, residual=x)
    check_wgrad(tile=TILES["pointers"], dy=x, x=x)


def test_the_dtype_of_results_can_be_chosen(device: torch.device) -> None:
    o = operands(device, torch.bfloat16)
    y, z = gemm.linear(o.x, o.weight, store_pre=True, dtype=torch.float32)
    assert y.dtype == torch.float32
    assert z is not None
    torch.testing.assert_close(y, o.x.float() @ o.weight.float().t(), rtol=1e-4, atol=1e-4)
    dz, total, *_ = gemm.linear_dgrad(o.dy, o.weight, sums=True, sums_dtype=torch.float32)
    assert (dz.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    assert gemm.linear_dgrad(o.dy[:0], o.weight, sums=True, sums_dtype=torch.float32).sum.dtype is torch.float32


REFUSED: dict[str, tuple[str, Callable[[SimpleNamespace], Any]]] = {
    "integers": ("cannot be multiplied", lambda o: gemm.linear(o.x.int(), o.weight.int())),
    "two dtypes": ("one dtype", lambda o: gemm.linear(o.x, o.weight.half())),
    "width": ("expected last dimension 56", lambda o: gemm.linear(o.x[:, 1:], o.weight)),
    "width of dy": ("dy: expected last dimension", lambda o: gemm.linear_dgrad(o.dy[:, 1:], o.weight)),
    "rank of the weight": ("two dimensions", lambda o: gemm.linear(o.x, o.weight[None])),
    "strides": ("rows or in its columns", lambda o: gemm.linear(o.x[:, ::2], o.weight[:, ::2])),
    "shape of the residual": ("expected shape", lambda o: gemm.linear(o.x, o.weight, residual=o.bias)),
    "strides of the residual": (
        "contiguous in its last", lambda o: gemm.linear(o.x, o.weight, residual=o.residual.t().contiguous().t())
    ),
    "length of the bias": ("bias: expected shape", lambda o: gemm.linear(o.x, o.weight, o.bias[1:])),
    "odd packed weight": ("even number", lambda o: gemm.linear_gated(o.x, o.packed[1:], act=ACTIVATIONS["silu"])),
    "another up": (
        "up must be like the weight",
        lambda o: gemm.linear_gated(o.x, o.packed, up=o.packed[1:], act=ACTIVATIONS["silu"]),
    ),
    "one bias of two": (
        "given together", lambda o: gemm.linear_gated(o.x, o.weight, o.bias, up=o.weight, act=ACTIVATIONS["silu"])
    ),
    "dy_sums alone": ("with an activation", lambda o: gemm.linear_dgrad(o.dy, o.weight, dy_sums=torch.float32)),
    "dy_sums with a residual": (
        "without residual",
        lambda o: gemm.linear_dgrad(
            o.dy, o.weight, act=ACTIVATIONS["silu"], t=o.t, residual=o.d_residual, dy_sums=torch.float32
        ),
    ),
    "t alone": ("come together", lambda o: gemm.linear_dgrad(o.dy, o.weight, t=o.t)),
    "emit without an activation": ("no activation", lambda o: gemm.linear_dgrad(o.dy, o.weight, emit=True)),
    "derivative of the input": (
        "reads the input",
        lambda o: gemm.linear_dgrad(o.dy, o.weight, act=ACTIVATIONS["gelu"], t=o.t, t_is_output=True),
    ),
    "16-bit main_grad": (
        "main_grad must be", lambda o: gemm.linear_wgrad_bias_(o.weight.half(), o.dy, o.x)
    ),
    "main_grad with overlapping rows": (
        "overlap", lambda o: gemm.linear_wgrad_bias_(o.weight[:1].expand(N, K), o.dy, o.x)
    ),
    "different rows": ("same rows", lambda o: gemm.linear_wgrad_bias(o.dy[1:], o.x)),
    "p": ("between 0 and 1", lambda o: gemm.linear(o.x, o.weight, dropout=o.dropout._replace(p=1.5))),
}  # fmt: skip


@pytest.mark.parametrize(("sentence", "call"), REFUSED.values(), ids=REFUSED.keys())
def test_refuses_with_a_sentence(device: torch.device, sentence: str, call: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match=sentence):
        call(operands(device, torch.float32))


def test_small_products_get_small_tiles() -> None:
    large = choose("sm_90", "half", "light", True, 8192, 8192, 132)
    assert large == tiles("sm_90", "half", "light")[0]
    small = choose("sm_90", "half", "light", True, 64, 4096, 132)
    assert small.m * small.n < large.m * large.n


def test_every_architecture_has_tiles() -> None:
    for architecture in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950", "interpreter"):
        assert tiles(family(architecture), "half", "gated")


@pytest.mark.parametrize(
    "name",
    [
        "linear",
        "linear of act",
        "linear_gated",
        "linear_gated of two",
        "dgrad",
        "dgrad of dy",
        "dgrad_gated",
        "wgrad_bias",
        "wgrad_bias_",
    ],
)
def test_operators_are_what_they_say(device: torch.device, name: str) -> None:
    o = operands(device, torch.float32, 5, 6, 7)
    seed, main = a_seed(device).clone(), torch.ones(6, 7, device=device)
    extras: dict[str, Any] = {"seed": seed, "p": 0.3}
    calls: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
        "linear": ("linear", (o.x, o.weight, o.bias), {"act": "gelu", "store_pre": True, "residual": o.residual}),
        "linear of act": ("linear", (o.x, o.weight, o.bias), {"act": "relu", "store_act": True, **extras}),
        "linear_gated": ("linear_gated", (o.x, o.packed, o.packed_bias), {"act": "silu", "store_pre": True, **extras}),
        "linear_gated of two": (
            "linear_gated",
            (o.x, o.packed[:6].clone()),
            {"up": o.packed[6:].clone(), "act": "silu", "store_pre": True},
        ),
        "dgrad": ("linear_dgrad", (o.dy, o.weight), {"act": "gelu", "t": o.t, "sums": True, "emit": True, **extras}),
        "dgrad_gated": (
            "linear_dgrad_gated",
            (o.dy, o.weight),
            {"act": "silu", "t": o.packed_t, "emit": True},
        ),
        "dgrad of dy": ("linear_dgrad", (o.dy, o.weight), {"act": "gelu", "t": o.t, "dy_sums": torch.float16}),
        "wgrad_bias": ("linear_wgrad_bias", (o.dy, o.x), {"dtype": torch.float16, "sums_dtype": torch.float16}),
        "wgrad_bias_": ("linear_wgrad_bias_", (main, o.dy, o.x), {}),
    }
    operator, args, kwargs = calls[name]
    torch.library.opcheck(getattr(torch.ops.seqfuse, operator).default, args, kwargs)


class Rooted:
    value, derivative, reads, P = _root, _root_derivative, "input", (3.0,)


def test_operators_take_any_activation_by_its_text(device: torch.device) -> None:
    o = operands(device, torch.float32, 5, 6, 7)
    bias, text = o.bias.abs() + 20, text_of(Rooted)
    assert text == f"{__name__}._root(3.0)"
    assert text_of(Activation(*[getattr(ACTIVATIONS["gelu"], name) for name in Activation._fields])) == "gelu"
    y, _ = torch.ops.seqfuse.linear(o.x, o.weight, bias, act=text)
    assert_bitwise_equal(y, gemm.linear(o.x, o.weight, bias, act=Rooted)[0])
    other = SimpleNamespace(value=_root, derivative=_root, reads="input", P=(3.0,))
    assert text_of(other) == f"{text}#2"
    assert activation_of(f"{text}#2").derivative is _root


def test_an_operator_refuses_an_unknown_activation(device: torch.device) -> None:
    o = operands(device, torch.float32, 5, 6, 7)
    with pytest.raises(ValueError, match="is no activation that this process knows; ours are identity, relu"):
        torch.ops.seqfuse.linear(o.x, o.weight, act="swish")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "only", "count"),
    [
        ("sm_90", r"half dgrad\+gelu,sums,emit \S+$", 1),
        pytest.param("sm_90", r"half forward\+bias,gelu,pre \S+$", 1, marks=pytest.mark.full),
        ("sm_80", r"half dgrad\+gelu 128\S+$", 1),
        ("gfx942", r"half wgrad\+bias 128\S+$", 1),
        pytest.param("sm_90", r"half (swiglu\+bias,pre|wgrad\+main_grad,bias) \S+$", 2, marks=pytest.mark.full),
        pytest.param(
            "sm_90",
            r"half (dgrad\+gelu,sums,dy_sums|forward\+bias,relu,output,dropout) \S+$",
            2,
            marks=pytest.mark.full,
        ),
        pytest.param(
            "sm_90", r"half forward\+all \S+ factors unaligned tiles unaligned (M|N|K)=1$", 3, marks=pytest.mark.full
        ),
        pytest.param("sm_80", r"half forward\+bias,gelu 128\S+$", 1, marks=pytest.mark.full),
        pytest.param("gfx942", r"half forward 128\S+$", 1, marks=pytest.mark.full),
    ],
    ids=[
        "sm_90",
        "sm_90 forward",
        "sm_80",
        "gfx942",
        "sm_90 gated, wgrad",
        "sm_90 dy_sums",
        "sm_90 ones",
        "sm_80 forward",
        "gfx942 forward",
    ],
)
def test_compiles_for_gpus_that_are_not_here(target: str, only: str, count: int) -> None:
    compiled = list(compile_variants(["gemm"], [target], only=only))
    assert len(compiled) == count
    for one in compiled:
        assert one.error is None, one
        assert not one.over_shared, one
        assert not one.dot_without_wgmma, one
        assert one.int32_multiplications == 0, one
        assert one.mma, one
        if target.startswith("sm_"):
            assert not one.spills, one


def test_only_the_first_column_of_tiles_reads_a_factor_for_its_sums() -> None:
    """A loop with the sums and one without: twice the matrix instructions."""
    only = r"sm_90 half (forward|wgrad\+bias) 128x256x64$"
    plain, summed = compile_variants(["gemm"], ["sm_90"], only=only, jobs=1)
    assert (plain.variant, summed.variant) == tuple(
        f"gemm sm_90 half {of} 128x256x64" for of in ("forward", "wgrad+bias")
    )
    assert summed.mma == 2 * plain.mma
    assert not summed.spills


def test_tiles_are_of_sizes_that_can_be_compiled() -> None:
    for of, number, weight, candidates in table():
        for tile in candidates:
            powers = (tile.m, tile.n, tile.k, tile.num_warps, tile.split)
            assert all(n & (n - 1) == 0 for n in powers), f"{of}, {number}, {weight}: {tile}"
            assert min(tile.m, tile.n, tile.k) >= 16, f"{of}, {number}, {weight}: {tile}"
            assert tile.n % tile.split == 0, f"{of}, {number}, {weight}: {tile}"


# Each is a bug in the kernel, and the check that has to see it.
MUTANTS: dict[str, tuple[str, str, str]] = {
    "K is not masked": ("(am[:, None] < M) & (ks[None, :] < K - k0)", "(am[:, None] < M)", "ends"),
    "the last column is lost": ("(cols[None, :] < N)", "(cols[None, :] < N - 1)", "forward"),
    "the last step over K is lost": ("tl.range(0, tl.cdiv(K, BK)):", "tl.range(0, K // BK):", "forward"),
    "the activation before the bias": ("if FORM == \"plain\" and VALUE", "if False and VALUE", "forward"),
    "z after the activation": (
        "p_desc, ldp, rows, cols, inside, m0, col, z)\n                if GATED:",
        "p_desc, ldp, rows, cols, inside, m0, col, apply(VALUE, z, P, HALF))\n                if GATED:",
        "forward",
    ),
    "act(z) is z": (
        "z = apply(VALUE, z, P, HALF)\n            if pre is not None and T_IS_OUTPUT:\n",
        "z = apply(VALUE, z, P, HALF)\n            if pre is not None and not T_IS_OUTPUT:\n",
        "output",
    ),
    "the residual is scaled": ("z += _load_tile(residual, r", "z += 2 * _load_tile(residual, r", "forward"),
    "gate and up swapped": ("z = apply(VALUE, z, P, HALF) * z2", "z = apply(VALUE, z2, P, HALF) * z", "gated"),
    "up has the bias of the gate": ("else bias + N\n", "else bias\n", "gated"),
    "up has the weight of the gate": ("up_tile = b_up + bn", "up_tile = b + bn", "up"),
    "up has the bias of the packed one": ("second = bias_up if", "second = bias if", "up"),
    "value for derivative": (
        "gradient(DERIVATIVE, z, v if READS_OUTPUT else u, P, HALF)",
        "z * apply(VALUE, u, P, HALF)",
        "dgrad",
    ),
    "the derivative of an output": (
        "z * up, v if READS_OUTPUT else gate, P, HALF)",
        "z * up, gate, P, HALF)",
        "dgated",
    ),
    "dup from the gate": ("z2 = z * v", "z2 = z * gate", "dgated"),
    "x without dropout": ("h = dropped(v, seed, rows", "h = v if True else (v, seed, rows", "dgrad"),
    "dropout by local columns": ("z = dropped(z, seed, rows, col,", "z = dropped(z, seed, rows, col - n0,", "forward"),
    "sums of dy of one tile only": ("a_sums + tile_m * K + at", "a_sums + 0 * tile_m * K + at", "dy_sums"),
    "sums of dy one column on": ("* BK + tl.arange(0, BK)\n", "* BK + 1 + tl.arange(0, BK)\n", "dy_sums"),
    "sums of one tile only": ("partials + tile_m *", "partials + 0 * tile_m *", "dgrad"),
    "sums of rows beyond the last": ("tl.where(inside, z, 0.0), 0)", "z, 0)", "root"),
    "last rows are summed alone": ("a_total += tl.sum", "a_total = tl.sum", "wgrad"),
    "no tile stores the sum of its rows": ("elif tile_n == 0:", "elif tile_n < 0:", "wgrad"),
    "no tile stores the sums of its columns": ("elif tile_n == 0:", "elif tile_n < 0:", "dy_sums"),
    "main_grad is overwritten": ("            if ACCUMULATE:", "            if False:", "wgrad"),
    "runs of columns in another order": ("(first, second, third, fourth)", "(first, third, second, fourth)", "runs"),
    "every other column a run": (
        "tl.permute(tl.reshape(acc, (rows, 2, columns // 2)), (0, 2, 1))",
        "tl.reshape(acc, (rows, columns // 2, 2))",
        "runs",
    ),
    "the next row's first column": (
        "tl.load(ptr + rows[:, None] * ld + cols[None, :], mask=inside",
        "tl.load(ptr + rows[:, None] * (ld - 1) + cols[None, :], mask=inside",
        "dgrad",
    ),
    "up described as the gate": ("make_tensor_descriptor(t + N, [M, N]", "make_tensor_descriptor(t, [M, N]", "runs"),
    "up stored over the gate": ("_store_tile(pre + N, p2_desc,", "_store_tile(pre, p_desc,", "runs"),
    "descriptors of transposed tiles": (
        "desc.store([row.to(tl.int32), col.to(tl.int32)], value)",
        "desc.store([col.to(tl.int32), row.to(tl.int32)], value)",
        "runs",
    ),
    "stride of the residual": (
        "_load_tile(residual, r_desc, ldr, rows", "_load_tile(residual, r_desc, ldc, rows", "forward"
    ),
    "stride of t": ("u = _load_tile(t, t_desc, ldt,", "u = _load_tile(t, t_desc, ldc,", "dgrad"),
    "tiles in another place": ("first + (tile % width) % size", "first", "forward"),
}  # fmt: skip


@pytest.mark.skipif(not interpreted(), reason="a mutant of a compiled kernel would be compiled")
@pytest.mark.parametrize(("name", "dtype"), in_dtypes(MUTANTS))
def test_the_checks_kill(
    device: torch.device, name: str, dtype: torch.dtype, mutant: Callable[[ModuleType, str, str], ModuleType]
) -> None:
    old, new, check = MUTANTS[name]
    spoiled = mutant(gemm, old, new)
    with pytest.raises(AssertionError):
        CHECKS[check](spoiled, device, dtype)


@pytest.mark.parametrize("name", ["x", "weight", "up"])
def test_descriptors_stand_for_factors_that_are_all_aligned(name: str, device: torch.device) -> None:
    factors = {key: torch.zeros(8 * 32 + 1, device=device) for key in ("x", "weight", "up")}
    for aligned in (True, False):
        given = {key: t[key == name and not aligned :][: 8 * 32].view(8, 32) for key, t in factors.items()}
        with mock.patch.object(gemm, "launch", wraps=gemm.launch) as launched:
            gemm.linear_gated(**given, act=ACTIVATIONS["silu"], tile=TILES["descriptors"])
        assert launched.call_args.args[3]["LOADS"] is aligned


@pytest.mark.parametrize(
    "check", ["forward", "output", "gated", "up", "dgrad", "dy_sums", "dgated", "wgrad", "ends", "root", "runs"]
)
def test_the_checks_of_mutants_pass_the_kernel(device: torch.device, check: str, dtype: torch.dtype) -> None:
    CHECKS[check](gemm, device, dtype)


def _check_forward(module: Any, device: torch.device, dtype: torch.dtype) -> None:
    o = operands(device, dtype)
    check_linear(
        module, TILES["pointers"], x=o.x, weight=o.weight, bias=o.bias, act="gelu", store_pre=True,
        dropout=o.dropout, residual=LAYOUTS["strided rows"](o.residual),
    )  # fmt: skip


def _check_output(module: Any, device: torch.device, dtype: torch.dtype) -> None:
    o = operands(device, dtype)
    check_linear(module, TILES["pointers"], x=o.x, weight=o.weight, act="tanh", dropout=o.dropout, store_act=True)
    check_linear(module, TILES["pointers"], x=o.x, weight=o.weight, act="tanh", dropout=o.dropout, store_pre=True)


def _check_gated(module: Any, device: torch.device, dtype: torch.dtype) -> None:
    o = operands(device, dtype)
    check_linear(module, TILES["pointers"], x=o.x, weight=o.packed, bias=o.packed_bias, act="silu", gated=True)


def _check_up(module: Any, device: torch.device, dtype: torch.dtype) -> None:
    o = operands(device, dtype)
    check_linear(module, TILES["pointers"], x=o.x, **in_two(o), act="silu", gated=True)


def _check_dgrad(module: Any, device: torch.device, dtype: torch.dtype) -> None:
    o = operands(device, dtype)
    check_dgrad(
        module,
        TILES["pointers"],
        dy=o.dy,
        weight=o.weight,
        act="gelu",
        t=LAYOUTS["strided rows"](o.t),
        dropout=o.dropout,
    )


def _check_dy_sums(module: Any, device: torch.device, dtype: torch.dtype) -> None:
    o = operands(device, dtype)
    check_dgrad(module, TILES["descriptors"], dy=o.dy, weight=o.weight, act="gelu", t=o.t)


def _check_dgated(module: Any, device: torch.device, dtype: torch.dtype) -> None:
    o = operands(device, dtype)
    check_dgrad(module, TILES["pointers"], dy=o.dy, weight=o.weight, act="sigmoid", t=o.packed_t, gated=True)


def _check_runs(module: Any, device: torch.device, dtype: torch.dtype) -> None:
    o = operands(device, dtype)
    check_linear(
        module, TILES["quarters"], x=o.x, weight=o.packed, bias=o.packed_bias, act="silu", store_pre=True, gated=True
    )  # fmt: skip
    check_dgrad(module, TILES["quarters"], dy=o.dy, weight=o.weight, act="silu", t=o.packed_t, gated=True)


def _check_wgrad(module: Any, device: torch.device, dtype: torch.dtype) -> None:
    o = operands(device, dtype)
    check_wgrad(module, TILES["pointers"], accumulate=True, dy=o.dy, x=o.x)


def _check_ends(module: Any, device: torch.device, dtype: torch.dtype) -> None:
    o = operands(device, dtype)
    x, weight = (guarded(t).tensor for t in (o.x, o.weight))
    check_linear(module, TILES["pointers"], x=x, weight=weight)


def _check_root(module: Any, device: torch.device, dtype: torch.dtype) -> None:
    class Root:
        value, derivative, reads, P = _root, _root_derivative, "input", (2.0,)

    o = operands(device, dtype, 33, N, K)
    _, total, *_ = module.linear_dgrad(
        o.dy, o.weight, act=Root, t=o.t.abs() + 0.5, sums=True, tile=TILES["pointers"]
    )  # fmt: skip
    assert total.isfinite().all()


CHECKS: dict[str, Callable[[Any, torch.device, torch.dtype], None]] = {
    "forward": _check_forward,
    "output": _check_output,
    "gated": _check_gated,
    "up": _check_up,
    "dgrad": _check_dgrad,
    "dy_sums": _check_dy_sums,
    "dgated": _check_dgated,
    "wgrad": _check_wgrad,
    "ends": _check_ends,
    "runs": _check_runs,
    "root": _check_root,
}


def test_a_product_has_a_program_for_each_tile_up_to_what_the_processors_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    grids: list[int] = []
    monkeypatch.setattr(gemm, "launch", lambda kernel, grid, *_, **__: grids.append(grid))
    for rows in (1, 16, 8192, 16384):
        gemm.linear(torch.ones(rows, 16), torch.ones(16, 16))
    one, small, many, more = grids
    assert one == small == 1 < many == more
