"""LayerNorm and RMSNorm with the operations fused around them, compared with torch, one at a time."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqfuse.kernels import _operators, norm
from seqfuse.kernels._launch import cdiv, processors
from seqfuse.kernels.activations import ACTIVATIONS, composed, constant_factor
from seqfuse.kernels.norm import norm_bwd, norm_fwd
from seqfuse.ops._philox import drop_mask
from seqfuse.testing import (
    Untouched,
    assert_bitwise_equal,
    exact,
    guarded,
    in_regime,
    red_zones,
    seeded_randn,
)
from seqfuse.testing.judge import judge
from seqfuse.testing.tensors import redrawn

from .conftest import DEVICE
from .laid import apart, far

EPS, P = 1e-5, 0.3
SEED = torch.tensor(0x1234_5678_9ABC_DEF)
TORCH_ACT: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "composed": lambda x: torch.tanh(0.5 * F.gelu(x)),
}
ACTS = {**ACTIVATIONS, "composed": composed(ACTIVATIONS["gelu"], constant_factor(0.5), ACTIVATIONS["tanh"])}


@dataclasses.dataclass(frozen=True)
class Case:
    """The operations around the norm."""

    centered: bool
    affine: bool = True
    zero_centered: bool = False
    around: bool = False  # a bias, dropout and a residual before it, and the gradient of the stream after it
    act: str | None = None


CASES = {
    "layernorm": Case(True),
    "rmsnorm": Case(False),
    "layernorm_plain": Case(True, affine=False),
    "rmsnorm_plain": Case(False, affine=False),
    "layernorm_zero_centered": Case(True, zero_centered=True),
    "rmsnorm_zero_centered": Case(False, zero_centered=True),
    "layernorm_gelu": Case(True, act="gelu"),
    "rmsnorm_tanh": Case(False, act="tanh"),
    "layernorm_composed": Case(True, act="composed"),
    "layernorm_around": Case(True, around=True),
    "rmsnorm_around": Case(False, around=True),
    "layernorm_all": Case(True, around=True, act="gelu", zero_centered=True),
}


def drawn(
    case: Case, lead: tuple[int, ...], N: int, dtype: torch.dtype, regime: str = "normal", seed: int = 0
) -> dict[str, Tensor]:
    def make(at: int, *shape: int) -> Tensor:
        return seeded_randn(shape, seed + at, dtype=dtype).to(DEVICE)

    tensors = {"x": in_regime(regime, (*lead, N), seed + 1, dtype=dtype).to(DEVICE), "dy": make(2, *lead, N)}
    if case.affine:
        tensors |= {"weight": make(3, N)} | ({"bias": make(4, N)} if case.centered else {})
    if case.around:
        tensors |= {"pre_bias": make(5, N), "residual": make(6, *lead, N), "dstream": make(7, *lead, N)}
    return tensors


def in_torch(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs and gradients by autograd; statistics in float32, like ATen's for 16-bit dtypes on a GPU."""
    leaves = {name: t.clone().requires_grad_() for name, t in tensors.items() if name not in ("dy", "dstream")}
    x = leaves["x"]
    stats = torch.promote_types(x.dtype, torch.float32)
    z = x
    if case.around:
        branch = x + leaves["pre_bias"]
        z = branch * ~drop_mask(SEED.to(x.device), x.shape, P) * (1 / (1 - P)) + leaves["residual"]
    weight, bias = (None if t is None else t.to(stats) for t in (leaves.get("weight"), leaves.get("bias")))
    if case.zero_centered and weight is not None:
        weight = weight + 1
    if case.centered:
        y = F.layer_norm(z.to(stats), z.shape[-1:], weight, bias, EPS).to(x.dtype)
    else:
        y = F.rms_norm(z.to(stats), z.shape[-1:], weight, EPS).to(x.dtype)
    if case.act is not None:
        y = TORCH_ACT[case.act](y)
    results = {"y": y}
    if case.around:
        results["stream"] = z
        torch.autograd.backward((y, z), (tensors["dy"], tensors["dstream"]))
    else:
        y.backward(tensors["dy"])
    return {k: t.detach() for k, t in results.items()} | {
        f"d_{k}": t.grad for k, t in leaves.items() if t.grad is not None
    }


def run(case: Case, tensors: dict[str, Tensor], k: ModuleType = norm, only: str | None = None) -> dict[str, Tensor]:
    """The results and all gradients, or `only` one of these."""
    x, dtype = tensors["x"], tensors["x"].dtype
    weight, bias = tensors.get("weight"), tensors.get("bias")
    act = None if case.act is None else ACTS[case.act]
    dropout: dict[str, Any] = {"seed": SEED.to(x.device), "p": P} if case.around else {}
    before = {name: tensors[name] for name in ("pre_bias", "residual")} if case.around else {}
    both: dict[str, Any] = {"zero_centered": case.zero_centered, "act": act, **dropout}
    f = k.norm_fwd(x, weight, bias, EPS, centered=case.centered, **both, **before)

    def asked(kind: str) -> bool:
        return only in (None, kind)

    b = k.norm_bwd(
        tensors["dy"],
        x if f.stream is None else f.stream,
        f.mean,
        f.rstd,
        weight,
        bias,
        dx=asked("d_residual" if case.around else "d_x"),
        dweight=dtype if weight is not None and asked("d_weight") else None,
        dbias=dtype if bias is not None and asked("d_bias") else None,
        dstream=tensors.get("dstream"),
        dbranch=case.around and asked("d_x"),
        dpre_bias=dtype if case.around and asked("d_pre_bias") else None,
        **both,
    )
    results = {
        "y": f.y,
        "stream": f.stream,
        "d_x": b.dbranch if case.around else b.dx,
        "d_residual": b.dx if case.around else None,
        "d_weight": b.dweight,
        "d_bias": b.dbias,
        "d_pre_bias": b.dpre_bias,
    }
    return {name: t for name, t in results.items() if t is not None}


def in_chunks(monkeypatch: pytest.MonkeyPatch, module: ModuleType, n: int, sums: bool = False) -> None:
    """Rows of more than `n` columns do not fit in registers from here on, and there is one processor."""
    plain = functools.partial(norm.RowTile, sums=sums)
    monkeypatch.setattr(module, "processors", lambda device: 1)
    monkeypatch.setattr(module, "forward_tile", lambda columns, itemsize: plain(4, n, -(-columns // n), 4))
    monkeypatch.setattr(module, "backward_tile", lambda columns, itemsize, heavy: plain(2, n, -(-columns // n), 4))


Results = dict[str, Tensor]


def measured(case: Case, tensors: dict[str, Tensor], k: ModuleType = norm) -> tuple[Results, Results, Results]:
    """Of the kernels, of torch and of torch in float64."""
    with Untouched(tensors):
        ours = run(case, tensors, k)
    reference = in_torch(case, {name: t.double() for name, t in tensors.items()})
    theirs = in_torch(case, tensors)
    if tensors["x"].shape[-1] == 1 and not case.centered and not case.around:
        # With one column dx is the rounding error of g - g, in torch as here: few numbers, too few for the error bound.
        assert_rounding_alone(case, tensors, ours.pop("d_x"), reference.pop("d_x"))
        del theirs["d_x"]
    ours, theirs, reference = (dict(sorted(results.items())) for results in (ours, theirs, reference))
    return ours, theirs, reference


def measured_in(
    case: Case, lead: tuple[int, ...], width: int, dtype: torch.dtype, regime: str, seed: int
) -> tuple[Results, Results, Results]:
    return measured(case, drawn(case, lead, width, dtype, regime, seed))


def check(case: Case, tensors: dict[str, Tensor], k: ModuleType = norm) -> None:
    judge(lambda seed: measured(case, {name: redrawn(t, seed) for name, t in tensors.items()}, k), 0)


def assert_rounding_alone(case: Case, tensors: dict[str, Tensor], dx: Tensor, exact: Tensor) -> None:
    """|dx - exact| of RMSNorm over one column is at most five roundings of dy gain rstd, and one of dx itself."""
    x, dy = tensors["x"].double(), tensors["dy"].double()
    gain = tensors["weight"].double() + case.zero_centered if case.affine else 1.0
    rstd = (x.square() + EPS).rsqrt()
    own = torch.finfo(dx.dtype)
    most = 5 * torch.finfo(torch.float32).eps * (dy * gain).abs() * rstd + own.eps * (exact.abs() + own.tiny)
    assert ((dx.double() - exact).abs() <= most).all()


LEADS = [(1,), (7,), (33,), (2, 3), ()]
WIDTHS = [1, 8, 127, 128, 130, 1025]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
REGIMES = ["normal", "small", "offset", "heavy"]
SELECTION = [
    pytest.param(name, LEADS[i % 5], WIDTHS[j % 6], dtype, REGIMES[(i + j) % 4], id=f"{name}-{str(dtype)[6:]}")
    for i, name in enumerate(CASES)
    for j, dtype in enumerate(DTYPES, start=i)
]


@pytest.mark.parametrize(("name", "lead", "width", "dtype", "regime"), SELECTION)
def test_a_norm_equals_the_operations_it_stands_for(
    name: str, lead: tuple[int, ...], width: int, dtype: torch.dtype, regime: str
) -> None:
    check(CASES[name], drawn(CASES[name], lead, width, dtype, regime))


@pytest.mark.triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sums", [True, False], ids=["with their sums", "sums apart"])
@pytest.mark.parametrize("name", ["layernorm", "rmsnorm_tanh", "layernorm_composed", "layernorm_all"])
def test_rows_too_wide_for_registers_go_in_chunks(
    name: str, sums: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_chunks(monkeypatch, norm, 32, sums)
    # With many rows each program of the sums takes several tiles.
    for rows, width in ((9, 70), (9, 96), *(((70, 33),) if name == "layernorm_all" else ())):
        check(CASES[name], drawn(CASES[name], (rows,), width, dtype, "offset" if width == 96 else "normal"))


@pytest.mark.triton
@pytest.mark.parametrize("sums", [True, False], ids=["with their sums", "sums apart"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["layernorm", "rmsnorm", "layernorm_around"])
def test_tiles_that_were_measured_give_the_same(
    name: str, dtype: torch.dtype, sums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tile(columns: int, count: int, added: bool) -> norm.RowTile:
        return norm.RowTile(2, norm.next_power_of_2(columns), 1, 4, 3, 2, sums=sums)

    monkeypatch.setattr(norm, "processors", lambda device: 1)
    monkeypatch.setattr(norm, "_measured", lambda *_: True)
    monkeypatch.setattr(norm, "hopper_backward_tile", tile)
    for rows, width in ((9, 48), (70, 33)):
        check(CASES[name], drawn(CASES[name], (rows,), width, dtype, "normal"))


@pytest.mark.triton
def test_tiles_that_were_measured_hold_their_rows() -> None:
    for columns in (16, 48, 768, 1024, 1600, 2048, 4096, 5120, 8192, 12288, 16384, 32768, 65536):
        n = norm.next_power_of_2(columns)
        for centered, around in itertools.product((True, False), repeat=2):
            ahead = norm.hopper_forward_tile(columns, centered, around)
            assert (ahead is None) == (n > (8192 if around else 32768) or (around and not centered))
            assert ahead is None or ahead.n * ahead.chunks >= columns > ahead.n * (ahead.chunks - 1)
        for sums, added in itertools.product((0, 1, 2, 3), (True, False)):
            tile = norm.hopper_backward_tile(columns, sums, added)
            assert tile.n * tile.chunks >= columns > tile.n * (tile.chunks - 1)
            most = {1: 16384, 2: 12288}.get(sums, 8192)
            assert tile.sums == (n <= 8192 or columns <= most)
            assert tile.num_warps * tile.per_processor <= 32


def test_the_widest_row_is_normalized() -> None:
    case = dataclasses.replace(CASES["layernorm"], affine=False)
    tensors = drawn(case, (1,), _operators.MAX_COLUMNS, torch.float32)
    check(case, tensors)


def test_a_row_that_is_too_wide_is_refused() -> None:
    with pytest.raises(ValueError, match="65537 columns: at least 1 and at most 65536"):
        norm_fwd(torch.ones(1, 65537), None, None, EPS, centered=False)


def test_a_weight_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(ValueError, match="weight must be contiguous in its last dimension"):
        norm_fwd(torch.ones(1, 8, device=DEVICE), torch.ones(16, device=DEVICE)[::2], None, EPS)


@pytest.mark.triton
@pytest.mark.parametrize("sums", [True, False], ids=["with their sums", "sums apart"])
@pytest.mark.parametrize("name", ["layernorm_all", "rmsnorm_around"])
def test_a_wide_row_reads_and_writes_nothing_outside_and_gives_the_same_bits(
    name: str, sums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_chunks(monkeypatch, norm, 8, sums)
    tensors = drawn(CASES[name], (5,), 20, torch.float32)
    with red_zones():
        inside = run(CASES[name], {key: guarded(t).tensor for key, t in tensors.items()})
    expected = run(CASES[name], tensors)
    assert_bitwise_equal({k: t.clone() for k, t in inside.items()}, expected)
    for lay in (apart, far) if DEVICE.type == "cpu" else (apart,):
        assert_bitwise_equal(run(CASES[name], lay(tensors)), expected)


# Rows and columns at once: 256 rows of 8 columns are one tile forward, 128 backward.
@pytest.mark.parametrize("rows", [127, 128, 129, 255, 257])
@pytest.mark.parametrize("name", ["layernorm_gelu", "rmsnorm_around"])
def test_rows_at_the_end_of_a_tile(name: str, rows: int) -> None:
    check(CASES[name], drawn(CASES[name], (rows,), 8, torch.float32))


@pytest.mark.parametrize("wide", [False, True], ids=["in registers", "in chunks"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("centered", [True, False], ids=["layernorm", "rmsnorm"])
def test_rows_of_signs_are_normalized_exactly(
    centered: bool, dtype: torch.dtype, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many +1 as -1 in a row have mean 0 and variance 1, and sums of small integers are exact."""
    if wide:
        in_chunks(monkeypatch, norm, 16)
    x = exact("signs", (37, 32), 1, dtype=dtype).to(DEVICE)
    x = torch.cat((x, -x), 1)
    dy, weight, bias, dstream = (
        exact("integers", shape, i, dtype=dtype).to(DEVICE)
        for i, shape in enumerate(((37, 64), (64,), (64,), (37, 64)))
    )
    beta = bias if centered else None
    f = norm_fwd(x, weight, beta, 0.0, centered=centered)
    y = x * weight + bias if centered else x * weight
    assert_bitwise_equal([f.y, f.rstd], [y, torch.ones_like(f.rstd)])
    b = norm_bwd(dy, x, f.mean, f.rstd, weight, beta, dstream=dstream, dweight=dtype, dbias=dtype if centered else None)
    d, g = dy.double(), (dy * weight).double()
    by_x = (g * x).mean(1, keepdim=True) * x
    dx = g - by_x - (g.mean(1, keepdim=True) if centered else 0) + dstream
    assert_bitwise_equal([b.dx, b.dweight], [dx.to(dtype), (d * x).sum(0).to(dtype)])
    if centered:
        assert_bitwise_equal(b.dbias, d.sum(0).to(dtype))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["layernorm", "rmsnorm", "layernorm_around"])
def test_one_bad_number_spoils_what_it_spoils_in_torch(name: str, value: float) -> None:
    tensors = drawn(CASES[name], (6,), 8, torch.float32)
    tensors["x"][2, 3] = value
    drop = drop_mask(SEED, torch.Size((6, 8)), P).to(DEVICE)
    *_, first, second = drop.any(1).nonzero().flatten().tolist()
    tensors["x"][first, drop[first]] = value  # and all elements of another row are dropped
    tensors["dy"][second, drop[second]] = value
    ours, theirs = run(CASES[name], tensors), in_torch(CASES[name], tensors)
    for key, t in theirs.items():
        assert torch.equal(ours[key].isfinite(), t.isfinite()), key


@pytest.mark.parametrize("regime", ["zeros", "constant_rows"])
def test_rows_without_variance_stay_finite(regime: str) -> None:
    for name in ("layernorm", "rmsnorm"):
        check(CASES[name], drawn(CASES[name], (5,), 64, torch.float32, regime))


@pytest.mark.triton
@pytest.mark.parametrize("columns", [24, 37])
@pytest.mark.parametrize("centered", [True, False], ids=["layernorm", "rmsnorm"])
def test_a_float32_stream_beside_16_bits_gives_the_bits_of_float32_inputs(centered: bool, columns: int) -> None:
    half = torch.bfloat16
    x, residual, dstream = (seeded_randn((7, columns), i, dtype=torch.float32).to(DEVICE) for i in range(3))
    x = x.to(half)
    weight, bias, before = (seeded_randn((columns,), 3 + i, dtype=torch.float32).to(DEVICE) for i in range(3))
    parameters = (weight, bias if centered else None, EPS)
    around: dict[str, Any] = {"pre_bias": before, "residual": residual, "seed": SEED.to(DEVICE), "p": P, "dtype": half}
    around["centered"] = centered
    out = norm_fwd(x, *parameters, stream_dtype=torch.float32, **around)
    wide = norm_fwd(x.float(), *parameters, **around)
    assert (out.y.dtype, out.stream.dtype) == (half, torch.float32)
    assert_bitwise_equal([out.y, out.stream, out.rstd], [wide.y, wide.stream, wide.rstd])

    dy, statistics = seeded_randn((7, columns), 6, dtype=half).to(DEVICE), (out.mean, out.rstd)
    sums: dict[str, Any] = {"dstream": dstream, "dweight": torch.float32, "dpre_bias": torch.float32}
    for dropped in ({}, {"seed": SEED.to(DEVICE), "p": P}):
        branch = {**sums, **dropped, "dbranch": True}
        made = norm_bwd(dy, out.stream, *statistics, weight, branch_dtype=half, **branch)
        same = norm_bwd(dy.float(), out.stream, *statistics, weight, **branch)
        assert (made.dx.dtype, made.dbranch.dtype) == (torch.float32, half)
        assert_bitwise_equal([made.dx, made.dweight, made.dpre_bias], [same.dx, same.dweight, same.dpre_bias])
        assert_bitwise_equal(made.dbranch, same.dbranch.to(half))
        assert dropped or torch.equal(made.dbranch, made.dx.to(half))


@pytest.mark.triton
@pytest.mark.parametrize("chunked", ["", "chunks", "chunks with their sums"])
@pytest.mark.parametrize("name", ["layernorm", "rmsnorm_tanh", "layernorm_all"])
def test_each_gradient_alone_is_what_it_is_beside_the_others(
    name: str, chunked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if chunked:
        in_chunks(monkeypatch, norm, 16, "sums" in chunked)
    tensors = drawn(CASES[name], (3,), 24, torch.float32)
    every = run(CASES[name], tensors)
    for only in every.keys() - {"y", "stream"}:
        expected = {key: t for key, t in every.items() if key in ("y", "stream", only)}
        assert_bitwise_equal(run(CASES[name], tensors, only=only), expected)


@pytest.mark.parametrize("chunked", [False, True], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("columns", [24, 37])
def test_a_row_of_one_number_has_no_variance(columns: int, chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For large numbers the rounding error of the mean, squared, is many times eps."""
    if chunked:
        in_chunks(monkeypatch, norm, 16)
    x = torch.tensor([[1e6 + 0.1], [-123456.7], [0.1]], device=DEVICE).repeat(1, columns)
    f = norm_fwd(x, None, None, EPS)
    torch.testing.assert_close(f.mean, x[:, 0], rtol=2e-7, atol=0)
    torch.testing.assert_close(f.rstd, torch.full_like(f.rstd, EPS**-0.5), rtol=2e-3, atol=0)


@pytest.mark.triton
@pytest.mark.parametrize("columns", [24, 300])
def test_rounding_leaves_nothing_in_the_mean_of_a_row_of_one_number(
    columns: int, mutant: Callable[..., ModuleType]
) -> None:
    """An ulp of a large number, times a rstd of eps**-0.5, is up to a hundred times what y should be."""
    one = torch.cat([10.0**k * seeded_randn((32, 1), k, dtype=torch.float32) for k in (0, 3, 6)])
    tensors = {"x": one.repeat(1, columns).to(DEVICE), "dy": torch.ones(96, columns, device=DEVICE)}
    changed = mutant(norm, "squares, 0.0, rest)", "squares, 0.0, 0.0)")
    assert not run(CASES["layernorm_plain"], tensors)["y"].any()
    assert run(CASES["layernorm_plain"], tensors, changed)["y"].abs().max() > 1


@pytest.mark.triton
def test_only_what_is_wanted_is_made() -> None:
    x = torch.randn(4, 8, device=DEVICE)
    f = norm_fwd(x, None, None, EPS)
    assert f.stream is None
    b = norm_bwd(x, x, f.mean, f.rstd, None, dx=False, dbias=torch.float64)
    assert [b.dx, b.dweight, b.dbranch, b.dpre_bias] == [None] * 4
    rounding = 4 * torch.finfo(torch.float32).eps * x.abs().sum(0).amax().item()  # each of 4 rows is added in float32
    torch.testing.assert_close(b.dbias, x.double().sum(0), atol=rounding, rtol=0)
    r = norm_bwd(x, x, None, norm_fwd(x, None, None, EPS, centered=False).rstd, None)
    assert r.dx is not None
    assert r.dweight is None


# As compiled; the interpreter does it element by element.
_COMPILED = """    if _INTERPRETED:
        return tl.sum(a, 1), tl.sum(b, 1)
"""


@pytest.mark.triton
def test_two_sums_in_one_reduction_are_the_same(mutant: Callable[..., ModuleType]) -> None:
    changed = mutant(norm, _COMPILED, _COMPILED.replace("_INTERPRETED", "False"))
    check(CASES["layernorm"], drawn(CASES["layernorm"], (7,), 24, torch.float32, "normal"), changed)


@pytest.mark.triton
@pytest.mark.parametrize(
    ("old", "new"), [("1.0 / count", "1.0001 / count"), ("tl.rsqrt(mean)", "0.9999 * tl.rsqrt(mean)")]
)
def test_a_statistic_that_a_gpu_approximates_is_corrected(
    old: str, new: str, mutant: Callable[..., ModuleType]
) -> None:
    changed = mutant(norm, old, new)
    tensors = apart(drawn(CASES["layernorm"], (7,), 24, torch.float32, "normal"))
    check(CASES["layernorm"], tensors, changed)


@pytest.mark.triton
def test_a_light_backward_in_16_bits_is_pipelined_up_to_8192_columns() -> None:
    for columns in (4096, 8192):
        tile = norm.backward_tile(columns, 2, False)
        assert (tile.n, tile.chunks, tile.stages) == (columns, 1, 2)
    assert norm.backward_tile(8192, 2, True).stages == 1


@pytest.mark.triton
@pytest.mark.parametrize("columns", [64, 16384], ids=["one pass", "two passes"])
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_a_backward_has_a_program_for_each_share_of_the_rows_and_none_without(
    rows: int, columns: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    launched: list[tuple[Any, int, tuple[Any, ...]]] = []
    monkeypatch.setattr(norm, "launch", lambda kernel, grid, args, *_, **__: launched.append((kernel, grid, args)))
    x, rstd, weight = (torch.ones(shape, device=device) for shape in ((rows, columns), (rows,), (columns,)))
    norm_bwd(x, x, None, rstd, weight, dweight=torch.float32)
    tile, s = norm.backward_tile(columns, 4, False), norm.sums_tile(4, None)
    across = cdiv(columns, s.n)
    first = norm._norm_bwd_kernel, tile.m, 1, processors(x.device) * tile.per_processor
    second = norm._norm_sums_kernel, s.m, across, max(1, 8 * processors(x.device) // across)
    expected = [first, second][: 1 + (tile.chunks > 1)]
    assert [kernel for kernel, *_ in launched] == [kernel for kernel, *_ in expected]
    for (_, grid, args), (_, rows_at_a_time, side_by_side, most) in zip(launched, expected, strict=True):
        shares, programs, steps = cdiv(rows, rows_at_a_time), grid // side_by_side, args[-1]
        assert (programs - 1) * steps < shares <= programs * steps
        assert programs <= most


@pytest.mark.triton
@pytest.mark.parametrize(
    ("wanted", "kernels"),
    [({}, ["sums"]), ({"dbranch": True}, ["bwd", "sums"]), ({"dpre_bias": torch.float32}, ["bwd", "sums"])],
    ids=["weight", "branch", "bias before"],
)
def test_a_wide_backward_makes_no_pass_for_what_is_not_wanted(
    wanted: dict[str, Any], kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Any] = []
    monkeypatch.setattr(norm, "launch", lambda kernel, *_, **__: launched.append(kernel))
    x, rstd = torch.ones(4, 16384), torch.ones(4)
    norm_bwd(x, x, None, rstd, torch.ones(16384), dx=False, dweight=torch.float32, **wanted)
    assert launched == [getattr(norm, f"_norm_{kernel}_kernel") for kernel in kernels]
