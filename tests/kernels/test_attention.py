"""Attention without stored scores, compared with its math in float64 written out here, in both passes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from seqfuse.kernels import _attention_kernel, attention
from seqfuse.kernels.attention import ScoreTile
from seqfuse.ops import _attention
from seqfuse.testing import Untouched, assert_bitwise_equal, in_regime, seeded_randn
from seqfuse.testing.judge import judge
from tools.traffic import counted, fewest

from .conftest import DEVICE
from .references import AttentionGrads, attention_in_torch, hidden_from

SEED = 0x1234_5678_9ABC
TILE_OF = attention.score_tile
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS = [(2, 2, 32), (4, 2, 40), (3, 1, 33), (2, 1, 80)]
Drawn = tuple[tuple[Tensor, Tensor, Tensor], Tensor]


def small(kernel: str, size: int, dtype: torch.dtype, arch: str, load: int = 0) -> ScoreTile:
    """Several blocks of few rows, of other sizes in each kernel."""
    return {"fwd": ScoreTile(32, 16), "dq": ScoreTile(16, 32), "dkv": ScoreTile(16, 32)}[kernel]


@pytest.fixture(autouse=True)
def _several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "score_tile", small)


def test_tiles_are_of_sizes_that_can_be_compiled() -> None:
    for kernels in (_attention_kernel._AMPERE, *_attention_kernel._TILES.values()):
        for kernel, widths in kernels.items():
            for width, row in widths.items():
                for tile in (ScoreTile(*of) for of in row):
                    sizes = tile.m, tile.n, tile.num_warps
                    assert all(n & (n - 1) == 0 for n in sizes), f"{kernel}, {width}: {tile}"
                    assert min(tile.m, tile.n) >= 16, f"{kernel}, {width}: {tile}"


def limits(how: str, rows: int, device: torch.device) -> dict[str, Any]:
    """Restrictions of scores, by name; the mask differs for each head and sequence."""
    drawn = seeded_randn((2, 1, rows, rows), 7)
    seen = drawn > -0.5
    seen[0, 0, 3] = False
    added = seeded_randn((1, 2, rows, rows), 8)[:, :1].masked_fill(~seen[:1], -torch.inf)
    large = torch.zeros(2, 1, rows, rows)
    large[..., 1] = large[0, :, 2] = large[1, :, 40:45] = torch.finfo(torch.float32).min
    named: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal": {"causal": True},
        "window": {"window": 7},
        "causal window": {"causal": True, "window": 20},
        "softcap": {"softcap": 1.5, "scale": 0.7, "causal": True},
        "packed": {"cu_seqlens": torch.tensor([0, 5, 5, 31, rows]), "causal": True},
        "packed both ways": {"cu_seqlens": torch.tensor([0, 1, 40, rows], dtype=torch.int32), "window": 16},
        "bool": {"mask": seen},
        "int of keys": {"mask": seen[:, :, :1].long(), "causal": True},
        "float": {"mask": added, "softcap": 4.0},
        "dropout": {"p": 0.3, "seed": torch.tensor(SEED), "causal": True},
        "wide softcap": {"softcap": 30.0},
        "large": {"mask": large, "softcap": 4.0},
        "dropout, mask": {"p": 0.6, "seed": torch.tensor(SEED), "mask": seen[:1], "window": 30},
    }
    return {name: t.to(device) if isinstance(t, Tensor) else t for name, t in named[how].items()}


HOW = ["plain", "causal", "window", "causal window", "softcap", "packed", "packed both ways", "bool", "int of keys",
       "float", "dropout", "dropout, mask", "wide softcap", "large"]  # fmt: skip


def drawn(
    batch: int, heads: int, kv_heads: int, rows: int, size: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Drawn:
    """q, k, v as views of one packed tensor, and dy."""
    x = seeded_randn((batch, rows, (heads + 2 * kv_heads) * size), seed, dtype=dtype).to(device)
    return unpacked(x, heads, kv_heads), seeded_randn((batch, rows, heads, size), seed + 5, dtype=dtype).to(device)


def unpacked(x: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    parts = x.unflatten(-1, (heads + 2 * kv_heads, -1)).transpose(1, 2)
    q, k, v = parts.split([heads, kv_heads, kv_heads], 1)
    return q, k, v


def ours(
    qkv: tuple[Tensor, Tensor, Tensor], dy: Tensor, how: dict[str, Any], k: ModuleType = attention
) -> tuple[AttentionGrads, Tensor]:
    """The same by the kernels; with as many queries as keys, gradients are views of one packed tensor, all of it
    written."""
    heads, kv_heads = qkv[0].shape[1], qkv[1].shape[1]
    out = tuple(torch.full_like(t, torch.nan) for t in qkv)
    if dy.shape[1] == qkv[1].shape[2]:
        packed = torch.full((dy.shape[0], dy.shape[1], (heads + 2 * kv_heads) * dy.shape[-1]), torch.nan).to(dy)
        out = unpacked(packed, heads, kv_heads)
    y, lse = k.attention_fwd(*qkv, **how)
    k.attention_bwd(dy, *qkv, y, lse, out, **how)
    assert not any(t.isnan().any() for t in out)
    return (y, *(t.clone() for t in out)), lse


def evening(qkv: tuple[Tensor, ...], dy: Tensor, weights: Tensor) -> list[Tensor]:
    """For each row of y, dq, dk and dv a power of two that equalizes the rounding of all rows. It follows the sizes of
    a row's terms, which differ: a row with two keys averages nothing."""
    q, k, v, g = (t.double().norm(dim=-1) for t in (*qkv, dy.transpose(1, 2)))
    shared = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(shared, 1) for t in (k, v))
    of_v = weights * g.unsqueeze(-1)
    scores = of_v * v.unsqueeze(-2)
    of_q, of_k = scores * k.unsqueeze(-2), scores * q.unsqueeze(-1)
    sizes = of_q.square().sum(-1), *(t.square().sum(-2).unflatten(1, (-1, shared)).sum(2) for t in (of_k, of_v))
    factors = [torch.ones_like(dy[..., :1])]
    for size in sizes:
        factor = torch.exp2(-(size.log2() / 2).round())
        if dy.dtype is torch.float16:  # only up, which overflows nothing
            factor = (factor / factor.amin()).clamp_max(2.0**12)
        # Rows without keys are held to zero as strictly as any row to its value.
        most = factor[size > 0].amax() if bool(size.any()) else 1.0
        factor = torch.where(size > 0, factor, most).unsqueeze(-1).to(dy.dtype)
        assert factor.isfinite().all()
        factors.append(factor)
    return factors


def check(draw: Callable[[int], Drawn], how: dict[str, Any], k: ModuleType = attention) -> None:
    def measure(seed: int) -> tuple[dict[str, Tensor], ...]:
        qkv, dy = draw(seed)
        watched = dict(zip("qkv", qkv, strict=True)) | {n: t for n, t in how.items() if isinstance(t, Tensor)}
        with Untouched({**watched, "dy": dy}):
            found, lse = ours(qkv, dy, how, k)
        (exact, sums, weights), (unfused, *_) = (
            attention_in_torch(qkv, dy, how, torch.float64),
            attention_in_torch(qkv, dy, how, dy.dtype),
        )
        torch.testing.assert_close(lse, sums.float(), atol=1e-5, rtol=1e-5)
        factors = evening(qkv, dy, weights)
        names = ("y", "dq", "dk", "dv")
        return tuple(
            {name: t * f for name, t, f in zip(names, of, factors, strict=True)} for of in (found, unfused, exact)
        )

    judge(measure, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", HOW)
def test_is_its_math(how: str, dtype: torch.dtype, device: torch.device, request: pytest.FixtureRequest) -> None:
    at = HOW.index(how) + DTYPES.index(dtype)
    heads, kv_heads, size = HEADS[at % 4]
    if at % 3 and not request.config.getoption("--full"):
        pytest.skip("part of the whole numeric matrix: pytest --full")
    rows = (53, 64, 48)[at % 3]
    check(functools.partial(drawn, 2, heads, kv_heads, rows, size, dtype, device), limits(how, rows, device))


@pytest.mark.parametrize("how", HOW)
def test_every_limit_in_float32(how: str, device: torch.device) -> None:
    check(functools.partial(drawn, 2, 2, 1, 53, 32, torch.float32, device), limits(how, 53, device))


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 32])
def test_any_number_of_rows(rows: int, device: torch.device) -> None:
    for how in ({}, {"causal": True, "window": 16}):
        qkv, dy = drawn(1, 2, 1, rows, 8, torch.float32, device)
        for found, exact in zip(ours(qkv, dy, how)[0], attention_in_torch(qkv, dy, how, torch.float64)[0], strict=True):
            torch.testing.assert_close(found, exact.float(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("regime", ["small", "shifted", "heavy"])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_any_regime_of_numbers(regime: str, dtype: torch.dtype, device: torch.device) -> None:
    # Where a row sees one key its gradients are differences without a digit, which float32 alone tells from zero.
    tail = 0.5 if dtype is torch.float32 else 0.8
    bent = {"small": lambda t: 2e-3 * t, "shifted": lambda t: t + 8, "heavy": lambda t: t * (tail * t).exp()}[regime]

    def draw(seed: int) -> Drawn:
        (q, k, v), dy = drawn(2, 2, 2, 40, 16, torch.float32, device, seed)
        return (bent(q).to(dtype), bent(k).to(dtype), bent(v).to(dtype)), dy.to(dtype)

    # Small scores alone would make the rows copies of one; the error bound assumes rows that are drawn independently.
    how = limits("bool" if regime == "small" else "plain", 40, device)
    check(draw, how)


@pytest.mark.parametrize("tile", [ScoreTile(16, 16), ScoreTile(64, 16), ScoreTile(16, 64)], ids=str)
def test_the_size_of_a_block_is_of_no_consequence(
    tile: ScoreTile, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(attention, "score_tile", lambda *_: tile)
    for how in ("causal window", "packed"):
        check(functools.partial(drawn, 1, 2, 1, 70, 8, torch.float32, device), limits(how, 70, device))


def test_rows_and_keys_may_differ_in_number(device: torch.device) -> None:
    def draw(seed: int) -> Drawn:
        q, k, v = (seeded_randn((1, 2, n, 16), seed + i).to(device) for i, n in enumerate((21, 50, 50)))
        return (q, k, v), seeded_randn((1, 21, 2, 16), seed + 5).to(device)

    mask = seeded_randn((1, 1, 21, 50), 6).to(device) > 0
    for how in ({}, {"causal": True}, {"mask": mask}, {"window": 9}):
        check(draw, how)


def test_a_window_as_wide_as_32_bits_hides_nothing(device: torch.device) -> None:
    qkv, dy = drawn(1, 2, 1, 20, 8, torch.float32, device)
    found, whole = (ours(qkv, dy, {"window": window}) for window in (2**31 - 1, None))
    assert_bitwise_equal(found, whole)


def test_drops_what_plain_torch_drops(device: torch.device) -> None:
    """Both passes equal the path without kernels; groups of four keys and others."""

    def measure(rows: int, how: dict[str, Any], seed: int) -> tuple[tuple[Tensor, ...], ...]:
        qkv, dy = drawn(2, 4, 2, rows, 8, torch.float32, device, seed)
        scores = _attention.Scores(8**-0.5, **how)
        y, lse = _attention.attend_blocks(qkv, scores)
        out = tuple(torch.empty_like(t) for t in qkv)
        _attention.attend_blocks_backward(dy, qkv, scores, out, False)
        found, sums = ours(qkv, dy, how)
        torch.testing.assert_close(sums, lse, atol=1e-5, rtol=1e-5)
        exact, _, weights = attention_in_torch(qkv, dy, how, torch.float64)
        factors = evening(qkv, dy, weights)
        return tuple(tuple(t * f for t, f in zip(of, factors, strict=True)) for of in (found, (y, *out), exact))

    for rows, p in ((52, 0.25), (41, 0.25), (41, 1.0)):
        how: dict[str, Any] = {"p": p, "seed": torch.tensor(SEED, device=device)}
        judge(functools.partial(measure, rows, how), 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_that_sees_nothing_gives_zeros_both_ways(dtype: torch.dtype, device: torch.device) -> None:
    qkv, dy = drawn(1, 2, 1, 40, 16, dtype, device)
    seen = torch.ones(1, 1, 40, 40, dtype=torch.bool, device=device)
    seen[:, :, 2] = seen[:, :, 17:35] = False
    for mask in (seen, seen.long(), torch.zeros_like(seen, dtype=torch.float32).masked_fill(~seen, -torch.inf)):
        (y, *grads), lse = ours(qkv, dy, {"mask": mask})
        blind = ~seen[0, 0].any(-1)
        assert not y[:, blind].any()
        assert not grads[0][:, :, blind].any()
        assert not lse[:, :, blind].any()
        assert all(t.isfinite().all() for t in (y, *grads))


def test_a_mask_of_least_numbers_hides_nothing_from_a_row_that_has_no_other(device: torch.device) -> None:
    qkv, dy = drawn(1, 2, 1, 20, 16, torch.float32, device)
    mask = torch.zeros(1, 1, 20, 20, device=device)
    mask[..., 5, :] = mask[..., 3] = torch.finfo(torch.float32).min
    found, _ = ours(qkv, dy, {"mask": mask})
    torch.testing.assert_close(found[0][0, 5, 0], qkv[2][0, 0].mean(0))
    assert all(t.isfinite().all() for t in found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [-1e4, -1e9, torch.finfo(torch.float32).min])
def test_weights_of_a_row_under_one_large_mask_add_up_to_one(
    value: float, dtype: torch.dtype, device: torch.device
) -> None:
    qkv, dy = drawn(1, 2, 1, 20, 16, dtype, device)
    how = {"mask": torch.full((1, 1, 20, 20), value, device=device)}
    found, _ = ours(qkv, dy, how)
    close = 1e-5 if dtype is torch.float32 else 0.05
    together = found[3].sum(2).float(), dy.float().sum((1, 2)).unsqueeze(1)
    torch.testing.assert_close(*together, atol=10 * close, rtol=0)
    # Next to 1e4 a score has three digits, which another order of summation rounds otherwise.
    for one, r in zip(found, attention_in_torch(qkv, dy, how, torch.float32)[0], strict=True):
        torch.testing.assert_close(one.float(), r, atol=max(close, 5e-3 if value == -1e4 else 0), rtol=0)


@pytest.mark.parametrize("size", [64, 192])
def test_scores_beyond_float16_stay_finite(size: int, device: torch.device) -> None:
    x = (60 * seeded_randn((1, 18, 4 * size), 0)).half().to(device)
    qkv = unpacked(x, 2, 1)
    assert size < 192 or (qkv[0][0, 0].float() @ qkv[1][0, 0].float().T).abs().max() > 65504
    found, _ = ours(qkv, torch.ones(1, 18, 2, size, dtype=torch.float16, device=device), {"causal": True})
    assert all(t.isfinite().all() for t in found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_that_are_exact_are_bit_for_bit(dtype: torch.dtype, device: torch.device) -> None:
    """Equal scores of 32 keys: y is the mean of small integers, and delta of a dy of ones that of their sums."""
    q = torch.zeros(1, 2, 32, 16, dtype=dtype, device=device)
    k = torch.randint(-4, 5, (1, 1, 32, 16), generator=torch.Generator().manual_seed(0)).to(dtype).to(device)
    v = 8 * torch.randint(-4, 5, (1, 1, 32, 16), generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    dy = torch.ones(1, 32, 2, 16, dtype=dtype, device=device)
    (y, dq, dk, dv), lse = ours((q, k, v), dy, {"scale": 1.0})
    assert_bitwise_equal(y, v.mean(2, keepdim=True).expand(1, 2, 32, 16).transpose(1, 2).contiguous())
    assert_bitwise_equal(dv, torch.full_like(v, 2))
    assert_bitwise_equal(dk, torch.zeros_like(k))
    dw = v.double().sum(-1)
    ds = (dw - dw.mean(-1, keepdim=True)) / 32
    # Each of ds is rounded once, and so is their sum; in float32 the sum is, at each of 32 terms.
    eps, exact = torch.finfo(dtype).eps, ds[0, 0] @ k[0, 0].double()
    terms = (1 if dtype is not torch.float32 else 32) * (ds.abs()[0, 0] @ k[0, 0].double().abs())
    assert bool(((dq[0, 0, 0].double() - exact).abs() <= 0.5 * eps * (terms + exact.abs()) + 1e-6).all())
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(32)))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("of", ["q", "k", "v", "dy"])
def test_one_bad_number_spoils_what_it_spoils_in_torch(of: str, value: float, device: torch.device) -> None:
    (q, k, v), dy = drawn(1, 2, 1, 20, 8, torch.float32, device)
    tensors = {"q": q.clone(), "k": k.clone(), "v": v.clone(), "dy": dy}
    tensors[of][(0, 7, 0, 3) if of == "dy" else (0, 0, 7, 3)] = value
    qkv, dy = (tensors["q"], tensors["k"], tensors["v"]), tensors["dy"]
    y, lse = attention.attention_fwd(*qkv, causal=True)
    out = tuple(torch.empty_like(t) for t in qkv)
    attention.attention_bwd(dy, *qkv, y, lse, out, causal=True)
    expected, *_ = attention_in_torch(qkv, dy, {"causal": True}, torch.float32)
    for name, one, r in zip(("y", "dq", "dk", "dv"), (y, *out), expected, strict=True):
        # Blocks that no row sees are skipped here, where torch multiplies by zeros: more may stay finite.
        assert (one.isfinite() | ~r.isfinite()).all(), name
    if of in ("q", "k") and math.isinf(value):
        assert out[2].isfinite().any()
    assert not all(t.isfinite().all() for t in (y, *out))


def with_a_nan(how: dict[str, Any], device: torch.device) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
    """Output and gradients for queries with a NaN; the inputs, and dy."""
    (q, k, v), dy = drawn(1, 2, 1, 20, 8, torch.float32, device)
    q[0, 0, 7, 3] = torch.nan
    y, lse = attention.attention_fwd(q, k, v, **how)
    out = tuple(torch.empty_like(t) for t in (q, k, v))
    attention.attention_bwd(dy, q, k, v, y, lse, out, **how)
    return (y, *out), (q, k, v), dy


def test_a_nan_among_weights_that_are_dropped_is_not_lost(device: torch.device) -> None:
    how = {"causal": True, "seed": torch.tensor([7]).to(device), "p": 1.0}
    (y, *out), *_ = with_a_nan(how, device)
    assert y[0, 7, 0].isnan().all()
    assert torch.equal(y.isnan().any(-1).nonzero(), torch.tensor([[0, 7, 0]], device=device))
    assert out[2][0, 0, :8].isnan().all()


def test_a_nan_under_a_mask_that_is_added_is_not_lost(device: torch.device) -> None:
    how = {"mask": torch.zeros(1, 1, 20, 20, device=device)}
    found, given, dy = with_a_nan(how, device)
    expected, *_ = attention_in_torch(given, dy, how, torch.float32)
    for one, r in zip(found, expected, strict=True):
        assert torch.equal(one.isnan(), r.isnan())
    assert found[3].isnan().all()


@pytest.mark.parametrize("regime", ["zeros", "constant_rows"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_rows_are_averaged(regime: str, dtype: torch.dtype, device: torch.device) -> None:
    def draw(seed: int) -> Drawn:
        x = in_regime(regime, (1, 33, 4 * 16), seed, dtype=dtype).to(device)
        return unpacked(x, 2, 1), seeded_randn((1, 33, 2, 16), seed + 5, dtype=dtype).to(device)

    check(draw, {"causal": True})


def test_gives_the_same_bits_each_time(device: torch.device) -> None:
    qkv, dy = drawn(1, 2, 1, 40, 16, torch.bfloat16, device)
    for how in ("dropout", "packed"):
        first, again = (ours(qkv, dy, limits(how, 40, device)) for _ in range(2))
        assert_bitwise_equal(list(first[0]), list(again[0]))


def test_reads_and_writes_within_its_tensors(device: torch.device) -> None:
    """Inputs surrounded by NaN, outputs surrounded by numbers that must stay."""
    batch, rows, heads, kv_heads, size = 2, 21, 2, 1, 12
    width = (heads + 2 * kv_heads) * size
    around = torch.full((batch + 2, rows + 9, width + 7), torch.nan, device=device)
    x = around[1:-1, 4:-5, 3:-4]
    x.copy_(seeded_randn((batch, rows, width), 0))
    mine = torch.full_like(around, 7.0)
    inside = mine[1:-1, 4:-5, 3:-4]
    out = unpacked(inside, heads, kv_heads)
    qkv, dy = unpacked(x, heads, kv_heads), seeded_randn((batch, rows, heads, size), 5).to(device)
    for how in ({"causal": True}, limits("dropout", rows, device)):
        y, lse = attention.attention_fwd(*qkv, **how)
        attention.attention_bwd(dy, *qkv, y, lse, out, **how)
        plain, sums = ours(tuple(t.contiguous() for t in qkv), dy, how)
        assert_bitwise_equal([y, *(t.clone() for t in out), lse], [*plain, sums])
        inside.fill_(7.0)
        assert (mine == 7.0).all()


def test_no_rows_or_keys_give_nothing(device: torch.device) -> None:
    q, none = torch.ones(1, 2, 5, 8, device=device), torch.ones(1, 1, 0, 8, device=device)
    y, lse = attention.attention_fwd(q, none, none)
    assert not y.any()
    assert not lse.any()
    out = (torch.full_like(q, 3.0), none.clone(), none.clone())
    attention.attention_bwd(torch.ones(1, 5, 2, 8, device=device), q, none, none, y, lse, out)
    assert not out[0].any()
    y, lse = attention.attention_fwd(q[:, :, :0], none, none)
    assert y.shape == (1, 0, 2, 8)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"k": torch.zeros(1, 3, 6, 8)}, r"expects q \[B, H, S, D\] and k, v \[B, Hkv, N, D\]"),
        ({"k": torch.zeros(1, 3, 6, 8), "v": torch.zeros(1, 3, 6, 8)}, "3 key heads must divide 4 heads"),
        ({name: torch.zeros(1, 4, 6, 8, dtype=torch.float64) for name in "qkv"}, "not torch.float64"),
        ({name: torch.zeros(1, 4, 6, 160) for name in "qkv"}, "128 in float32, not .* of 160"),
        ({name: torch.zeros(1, 4, 6, 264).half() for name in "qkv"}, "1 to 256 in float16"),
        ({"window": 0}, "window and softcap must be positive, got 0 and None"),
        ({"softcap": -1.0}, "window and softcap must be positive"),
        ({"mask": torch.zeros(6, 6)}, r"must broadcast to \(1, 4, 6, 6\) from 4 dimensions, got \(6, 6\)"),
        ({"cu_seqlens": torch.tensor([0.0, 6.0])}, r"cu_seqlens must be integers \[n \+ 1\]"),
        (
            {"cu_seqlens": torch.tensor([0, 5]), "q": torch.zeros(1, 4, 5, 8)},
            "as many rows as keys, got .* 5 rows and 6 keys",
        ),
        ({"p": 0.5}, "a seed is needed"),
        ({"q": torch.zeros(1, 4, 8, 6).mT}, "q must be contiguous in its last dimension"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {name: torch.zeros(1, 4, 6, 8) for name in "qkv"} | changed
    with pytest.raises(ValueError, match=message):
        attention.attention_fwd(given.pop("q"), given.pop("k"), given.pop("v"), **given)


def test_gradients_that_do_not_fit_are_refused(device: torch.device) -> None:
    q = torch.zeros(1, 2, 6, 8, device=device)
    y, lse = attention.attention_fwd(q, q, q)
    out = (torch.empty_like(q), torch.empty_like(q), torch.empty(1, 2, 5, 8, device=device))
    with pytest.raises(ValueError, match=r"dv must have shape \(1, 2, 6, 8\), got \(1, 2, 5, 8\)"):
        attention.attention_bwd(y, q, q, q, y, lse, out)
    with pytest.raises(ValueError, match=r"dy must have shape \(1, 6, 2, 8\)"):
        attention.attention_bwd(q, q, q, q, y, lse, out)
    with pytest.raises(ValueError, match="y and lse are those of the forward"):
        attention.attention_bwd(y, q, q, q, y, lse[:, :1], out)


def test_every_architecture_has_the_tiles_of_its_family() -> None:
    def tiles(arch: str) -> list[ScoreTile]:
        return [TILE_OF(name, 128, torch.bfloat16, arch) for name in ("fwd", "dq", "dkv")]

    assert tiles("sm_103") == tiles("sm_100")
    assert tiles("gfx950") == tiles("gfx942")
    assert tiles("sm_120") == tiles("sm_89") == tiles("sm_80")
    assert len({tuple(tiles(arch)) for arch in ("sm_80", "sm_90", "sm_100", "gfx942")}) == 4


def test_operations_know_what_the_kernels_take() -> None:
    for dtype in (*DTYPES, torch.float64):
        for size in (0, 1, 128, 129, 256, 257):
            assert attention.takes_heads(dtype, size) == (0 < size <= _attention._WIDEST.get(dtype, 0))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="about the interpreter")
def test_moves_the_fewest_bytes_where_a_block_holds_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and dq read each of their tensors once and write once; dk and dv, too. No tensor is S x S."""
    monkeypatch.setattr(attention, "score_tile", lambda *_: ScoreTile(64, 16))
    qkv, dy = drawn(2, 2, 2, 48, 16, torch.bfloat16, torch.device("cpu"))
    with counted() as traffic:
        (y, *grads), lse = ours(qkv, dy, {"causal": True})
    ahead, dq, dkv = traffic.launches
    assert ahead.total == fewest(*qkv, y, lse)
    assert dq.total == fewest(*qkv, dy, y, lse, grads[0], lse.clone())
    monkeypatch.setattr(attention, "score_tile", lambda *_: ScoreTile(16, 64))
    with counted() as traffic:
        ours(qkv, dy, {"causal": True})
    assert traffic.launches[2].total == fewest(*qkv, dy, lse, *grads[1:], lse.clone())
    assert not any(launch.outside for launch in traffic.launches)
    assert dkv.total > traffic.launches[2].total


@pytest.mark.skipif(DEVICE.type == "cuda", reason="about the interpreter")
@pytest.mark.parametrize("how", ["causal", "window", "packed"])
def test_blocks_that_no_row_sees_are_not_read(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "score_tile", lambda *_: ScoreTile(16, 16))
    qkv, dy = drawn(1, 1, 1, 64, 16, torch.float32, torch.device("cpu"))
    given = limits(how, 64, dy.device)
    qkv = tuple(t.contiguous() for t in qkv)
    with counted() as traffic:
        ours(qkv, dy, given)
    seen = ~hidden_from(64, 64, given, dy.device)
    pairs = int(seen.view(4, 16, 4, 16).any(3).any(1).sum())
    ahead, dq, dkv = ({name: moved.loaded for name, moved in one.arguments.items()} for one in traffic.launches)
    tile = 16 * 16 * 4
    assert ahead["k"] == ahead["v"] == dq["k"] == dq["v"] == dkv["q"] == dkv["dy"] == tile * pairs
    assert ahead["q"] == dq["q"] == dkv["k"] == tile * 4


def test_operators_are_what_they_say(device: torch.device) -> None:
    qkv = tuple(seeded_randn((2, heads, 9, 8), i).to(device) for i, heads in enumerate((4, 2, 2)))
    how: dict[str, Any] = {"causal": True, "window": 5, "softcap": 3.0, "seed": torch.tensor([7]).to(device), "p": 0.2}
    torch.library.opcheck(torch.ops.seqfuse.attention.default, qkv, how)
    y, lse = attention.attention_fwd(*qkv, **how)
    args = (seeded_randn((2, 9, 4, 8), 5).to(device), *qkv, y, lse)
    torch.library.opcheck(torch.ops.seqfuse.attention_backward.default, args, how)
    out = tuple(torch.empty_like(t) for t in qkv)
    attention.attention_bwd(*args, out, **how)
    assert_bitwise_equal([*torch.ops.seqfuse.attention_backward(*args, **how)], [*out])
