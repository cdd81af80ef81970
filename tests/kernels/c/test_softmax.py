"""Softmax of scores with dropout in C, beside the same in torch and in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from seqfuse import compiler, ops
from seqfuse.compiler import CompileError
from seqfuse.errors import FallbackWarning
from seqfuse.kernels.c import softmax
from seqfuse.kernels.c.softmax import ScoreBlock
from seqfuse.ops import _attention
from seqfuse.ops._philox import drop_mask, masked
from seqfuse.testing import assert_bitwise_equal, assert_fused_close, seeded_randn
from seqfuse.testing.judge import judge

ROWS, KEYS = 37, 41
SEED = torch.tensor(2**40 + 5)
# First row, first key, causal, window and p: the whole, and a block of it.
CASES: dict[str, tuple[int, int, bool, int | None, float]] = {
    "plain": (0, 0, False, None, 0.0),
    "dropout": (0, 0, False, None, 0.3),
    "causal": (0, 0, True, None, 0.3),
    "window": (0, 0, False, 5, 0.3),
    "causal window": (0, 0, True, 5, 0.0),
    "block": (11, 3, True, 30, 0.3),
    "blind": (0, 20, True, None, 0.3),
}


def seen(name: str) -> Tensor:
    row, key, causal, window, _ = CASES[name]
    rows, keys = torch.arange(row, ROWS).unsqueeze(1), torch.arange(key, KEYS)
    found = (keys <= rows) if causal else torch.ones(len(rows), len(keys), dtype=torch.bool)
    return found if window is None else found & (rows - keys < window) & (keys - rows < window)


def drawn(name: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    row, key, *_ = CASES[name]
    shape = (2, 3, ROWS - row, KEYS - key)
    return 1.5 * seeded_randn(shape, 2 * seed + 1), seeded_randn(shape, 2 * seed + 2)


def by_torch(name: str, scores: Tensor, gradients: Tensor) -> dict[str, Tensor]:
    row, key, _, _, p = CASES[name]
    hidden = ~seen(name)
    weights, sums, blind = _attention._weights(scores.masked_fill(hidden, -torch.inf))
    kept = weights
    if p:
        drop = drop_mask(SEED, torch.Size((2, 3, ROWS, KEYS)), p)[..., row:, key:]
        kept, gradients = masked(weights, drop, p), masked(gradients, drop, p)
    d = weights * (gradients - (weights * gradients).sum(-1, keepdim=True))
    return {"weights": kept, "lse": sums.squeeze(-1), "d": d.masked_fill(hidden | blind, 0)}


def in_c(name: str, scores: Tensor, gradients: Tensor) -> dict[str, Tensor]:
    row, key, causal, window, p = CASES[name]
    place = ScoreBlock(row, key, ROWS, KEYS, causal, window)
    weights, again, d = scores.clone(), scores.clone(), gradients.clone()
    lse = softmax.weights_(weights, place, SEED if p else None, p)
    softmax.gradients_(again, d, place, SEED if p else None, p)
    torch.testing.assert_close(again, weights, rtol=0, atol=0, equal_nan=True)
    return {"weights": weights, "lse": lse, "d": d}


def check(name: str) -> None:
    def measure(seed: int) -> tuple[Any, Any, Any]:
        scores, gradients = drawn(name, seed)
        exact = by_torch(name, scores.double(), gradients.double())
        return in_c(name, scores, gradients), by_torch(name, scores, gradients), exact

    judge(measure, 0)


@pytest.mark.parametrize("name", CASES)
def test_it_is_what_torch_makes(name: str) -> None:
    check(name)


@pytest.mark.parametrize("name", CASES)
def test_threads_change_no_bit(
    name: str, by_threads: Callable[[Callable[[], Any]], list[Any]], monkeypatch: Any
) -> None:
    monkeypatch.setattr(softmax, "PARALLEL", 1)
    first, *others = by_threads(lambda: in_c(name, *drawn(name)))
    for other in others:
        assert_bitwise_equal(other, first)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["dropout", "causal", "window"])
def test_numbers_that_are_not_finite_spoil_what_they_do_in_torch(name: str, value: float) -> None:
    scores, gradients = drawn(name)
    scores[0, 0, 20, 18] = scores[0, 1, :, 5] = value
    scores[1, 2, 9] = -torch.inf
    scores[1, 2, 30, 3:5] = torch.tensor([torch.nan, torch.inf])
    gradients[1, 0, 3, 2] = gradients[1, 0, 3, 39] = torch.nan
    mine, theirs = in_c(name, scores, gradients), by_torch(name, scores, gradients)
    for key, t in theirs.items():
        torch.testing.assert_close(mine[key], t, equal_nan=True, rtol=1e-5, atol=1e-6)


SHAPES = {"heads": (4, 4, None), "shared heads": (4, 2, None), "soft-cap": (4, 4, 5.0)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", [None, "bool", "float"])
@pytest.mark.parametrize("held", [1 << 22, 500], ids=["whole", "blocks"])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_what_it_is_without(
    shape: str, held: int, mask: str | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, kv_heads, softcap = SHAPES[shape]
    op = ops.Attention(heads, kv_heads, causal=True, dropout=0.2, softcap=softcap, mask=mask and "mask")
    monkeypatch.setattr(_attention, "_HELD", held)
    x, dy = (seeded_randn((2, 23, n * 8), n) for n in (heads + 2 * kv_heads, heads))
    given = {}
    if mask is not None:
        m = seeded_randn((2, 1, 23, 23), 7)
        given = {"attn_mask": m > -1 if mask == "bool" else m}
    calls: list[str] = []
    plain = softmax._run
    monkeypatch.setattr(softmax, "_run", lambda *args: (calls.append("c"), plain(*args))[1])

    def passes(of: torch.dtype) -> dict[str, Tensor | None]:
        inputs = {name: t.to(of) if t.is_floating_point() else t for name, t in given.items()}
        needs = frozenset({"x", "attn_mask"}) if mask == "float" else frozenset({"x"})
        y, saved = op.fwd(x.to(dtype).to(of), seed=SEED, **inputs)
        dx, other = op.bwd(dy.to(dtype).to(of), saved, needs=needs)
        return {"y": y, "dx": dx, **{name: t for name, t in other.items() if isinstance(t, Tensor)}}

    mine, exact = passes(dtype), passes(torch.float64)
    assert len(calls) >= 2
    calls.clear()
    monkeypatch.setattr(_attention, "_softmax_in_c", lambda *_: None)
    theirs = passes(dtype)
    assert not calls
    assert_fused_close(mine, theirs, exact)


def test_torch_takes_its_place_where_it_does_not_compile(anew: None, monkeypatch: pytest.MonkeyPatch) -> None:
    op, x = ops.Attention(2, dropout=0.2), seeded_randn((1, 9, 24), 0)
    wanted = op.fwd(x, seed=SEED)[0]

    def failing(source: str) -> Any:
        raise CompileError("cc 1.0 failed: no space left on device")

    monkeypatch.setattr(compiler, "function", failing)
    monkeypatch.setattr(compiler, "_failures", [])
    monkeypatch.setattr(softmax, "compiled", softmax.compiled.__wrapped__)
    with pytest.warns(FallbackWarning, match="kernel of Attention failed .*no space left on device"):
        y, saved = op.fwd(x, seed=SEED)
    torch.testing.assert_close(y, wanted)
    op.bwd(y, saved, needs=frozenset({"x"}))
    monkeypatch.setattr(compiler, "_failures", [])
    with pytest.warns(FallbackWarning, match="kernel of Dropout failed"):
        mine = drop_mask(SEED, torch.Size((3, 5)), 0.4)
    assert mine.shape == (3, 5)


MUTANTS = {
    "causal": ("hi = row - k0 + 1;", "hi = row - k0 + 2;", "causal"),
    "window behind": ("hi = row + window - k0;", "hi = row + window + 1 - k0;", "window"),
    "window before": ("lo = row - window + 1 - k0;", "lo = row - window - k0;", "causal window"),
    "no keys": ("if (hi < 0) hi = 0;", "if (hi < 0) hi = K;", "blind"),
    "greatest": ("int blind =", "most += 1e9f; int blind =", "plain"),
    "blind rows": ("if (blind) most = 0.f;", "", "blind"),
    "a NaN": ("if (bad) most = NAN;", "", "bad"),
    "sum": ("sum += e;", "sum = e;", "plain"),
    "rows that sum to 0": ("if (total == 0.f || most == __builtin_inff()) total = 1.f;", "", "blind"),
    "position": ("I first = (part / R * S + row) * N + k0;", "I first = (part / R * R + row) * N + k0;", "block"),
    "columns of the mask": ("I first = (part / R * S + row) * N + k0;", "I first = (part / R * S + row) * N;", "block"),
    "log-sum-exp": ("most + logf(total)", "most", "plain"),
    "dropped": ("((keep) ? scale : 0.f)", "((keep) ? 1.f : 0.f)", "dropout"),
    "along": ("sum += (double)p * g;", "sum += p;", "plain"),
    "sum of the sums": ("    sum = 0;\n", "", "plain"),
    "the sign": ("(uint32_t)(w[i] < t) << 31", "0u", "dropout"),
    "hidden gradients": ("for (I i = hi; i < K; i++) d[i] = 0.f;", "", "causal"),
    "hidden gradients before": ("for (I i = 0; i < lo; i++) d[i] = 0.f;", "", "causal window"),
    "hidden weights": ("for (I i = hi; i < K; i++) s[i] = none;", "", "causal"),
    "hidden weights before": ("for (I i = 0; i < lo; i++) s[i] = none;", "", "causal window"),
}


@pytest.mark.mutant
@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_kernel_is_found(name: str, altered: Callable[[str, str], None]) -> None:
    old, new, case = MUTANTS[name]
    altered(old, new)
    test = test_numbers_that_are_not_finite_spoil_what_they_do_in_torch
    with pytest.raises(AssertionError):
        test("causal", torch.inf) if case == "bad" else check(case)
