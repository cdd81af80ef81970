"""Rows permuted to experts and back, against a loop over pairs; the router's factors, against torch."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import ops
from seqfuse.kernels import permute, route
from seqfuse.kernels._launch import INTERPRETED
from seqfuse.ops import experts
from seqfuse.testing import check_op, in_regime, seeded_randn
from seqfuse.testing.judge import judge
from tests.judging import judge_together
from tests.selection import few_cases as few_cases

from .conftest import DEVICE

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Tokens, columns, experts of a token, and of how many pairs rows are of an expert.
SHAPES = {
    "one": (1, 1, 1, 1.0), "odd": (13, 37, 3, 0.8), "wide": (5, 1030, 2, 0.6), "eight": (7, 130, 8, 0.9),
    "none kept": (6, 16, 2, 0.0), "no token": (0, 16, 2, 1.0), "many": (300, 8, 2, 0.95),
}  # fmt: skip


def drawn(shape: str, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    tokens, columns, top_k, part = SHAPES[shape]
    pairs = tokens * top_k
    draw = torch.Generator().manual_seed(seed)
    end = int(pairs * part)
    made = {
        "x": seeded_randn((tokens, columns), seed, dtype=dtype),
        "other": seeded_randn((pairs, columns), seed + 1, dtype=dtype),
        "factors": seeded_randn((tokens, top_k), seed + 2),
        "rows": torch.randperm(pairs, generator=draw).view(tokens, top_k),
        "offsets": torch.tensor([end // 3, end // 3, end], dtype=torch.int32),
    }
    made["other"][end:] = torch.nan  # rows that are not read
    return {name: t.to(DEVICE) for name, t in made.items()}


def by_pairs(x: Tensor, other: Tensor, factors: Tensor | None, rows: Tensor, offsets: Tensor) -> dict[str, Tensor]:
    """All three results in the dtype of x, with a loop over the experts of a token."""
    end, wide = offsets[-1], torch.promote_types(x.dtype, torch.float32)
    spread = x.new_zeros(other.shape)
    gathered = torch.zeros(x.shape, dtype=wide, device=x.device)
    sums = torch.zeros(rows.shape, dtype=wide, device=x.device)
    for j in range(rows.shape[1]):
        at, kept = rows[:, j], rows[:, j] < end
        factor = torch.ones(len(x), dtype=wide, device=x.device) if factors is None else factors[:, j].to(wide)
        spread[at[kept]] = (x.to(wide) * factor[:, None]).to(x.dtype)[kept]
        gathered[kept] += other[at[kept]].to(wide) * factor[kept, None]
        sums[kept, j] = (x[kept].to(wide) * other[at[kept]].to(wide)).sum(-1)
    return {"spread": spread, "gathered": gathered.to(x.dtype), "sums": sums}


def run(given: dict[str, Tensor], scaled: bool, k: ModuleType = permute) -> dict[str, Tensor]:
    rows, offsets, factors = given["rows"], given["offsets"], given["factors"] if scaled else None
    spread, sums = k.spread_rows(given["x"], rows, offsets, factors=factors, other=given["other"], sums=torch.float32)
    return {
        "spread": spread,
        "gathered": k.gather_rows(given["other"], rows, offsets, factors=factors),
        "sums": sums,
    }


def check(shape: str, dtype: torch.dtype, scaled: bool, k: ModuleType = permute) -> None:
    def measured(seed: int) -> tuple[dict[str, Tensor], ...]:
        given = drawn(shape, dtype, seed)
        wide = {name: t.double() if t.is_floating_point() else t for name, t in given.items()}
        plain, exact = (by_pairs(**{**of, "factors": of["factors"] if scaled else None}) for of in (given, wide))
        return run(given, scaled, k), plain, exact

    judge(measured, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scaled", [True, False], ids=["factors", "no factors"])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_those_of_each_pair(shape: str, scaled: bool, dtype: torch.dtype) -> None:
    check(shape, dtype, scaled)


@pytest.mark.parametrize("shape", ["odd", "wide"])
def test_parts_alone_are_the_same(shape: str) -> None:
    given = drawn(shape, torch.bfloat16, 3)
    both = run(given, True)
    options: dict[str, Any] = {"factors": given["factors"], "other": given["other"]}
    y, none = permute.spread_rows(given["x"], given["rows"], given["offsets"], factors=given["factors"])
    nothing, sums = permute.spread_rows(
        given["x"], given["rows"], given["offsets"], spread=False, sums=torch.float32, **options
    )
    assert none is None
    assert nothing is None
    assert torch.equal(y, both["spread"])
    assert torch.equal(sums, both["sums"])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rows": torch.zeros(3, 4, dtype=torch.int64).t()}, "rows must be contiguous"),
        ({"factors": torch.zeros(3, 5)}, "factors must be contiguous"),
        ({"x": torch.zeros(4, 8)}, "expects 3 rows of x"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Tensor], message: str) -> None:
    given = {"x": torch.zeros(3, 8), "rows": torch.arange(6).view(3, 2), "offsets": torch.tensor([6])} | changed
    with pytest.raises(ValueError, match=message):
        permute.spread_rows(*(given[name] for name in ("x", "rows", "offsets")), factors=given.get("factors"))


@pytest.mark.usefixtures("few_cases")
@pytest.mark.skipif(DEVICE.type == "cuda", reason="tests/gpu/test_experts.py runs them there")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("top_k", [1, 3])
def test_operations_run_by_them(top_k: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:  # in C they are separate
        monkeypatch.setattr(experts, "_by_kernel", lambda x, run: run())
    chosen = torch.randint(-1, 5, (40, top_k), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x, y = (seeded_randn((40, *more, 6), 1).to(DEVICE) for more in ((), (top_k,)))
    check_op(ops.Permute(4, top_k), x, experts=chosen, dtypes=[dtype])
    _, made, _ = ops.Permute(4, top_k).fwd(x, experts=chosen)
    check_op(ops.Unpermute(), y, probs=seeded_randn((40, top_k), 2).to(DEVICE), dtypes=[dtype], **made)
    check_op(ops.Unpermute(None), y, dtypes=[dtype], **made)


def test_operations_take_expanded_gradients_of_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:  # in C they are separate
        monkeypatch.setattr(experts, "_by_kernel", lambda x, run: run())
    x, chosen = (
        torch.zeros(0, 6, device=DEVICE, requires_grad=True),
        torch.zeros(0, 2, dtype=torch.int64, device=DEVICE),
    )
    probs = torch.zeros(0, 2, device=DEVICE, requires_grad=True)
    y = sf.Sequential(ops.Permute(4, 2), ops.Unpermute())(x, experts=chosen, probs=probs)
    dx, dprobs = torch.autograd.grad(y.sum(), [x, probs])
    assert dx.shape == x.shape
    assert dprobs.shape == probs.shape


# Tokens, experts, and how many a token has.
ROUTED = {"one": (1, 1, 1), "odd": (13, 37, 3), "many": (300, 8, 2), "eight of 130": (9, 130, 8), "no token": (0, 6, 2)}
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {}, "not normalized": {"normalize": False, "scale": 2.5}, "sigmoid": {"softmax": False, "scale": 0.5},
    "sigmoid alone": {"softmax": False, "normalize": False},
}  # fmt: skip


def of_a_router(shape: str, dtype: torch.dtype, seed: int, regime: str = "normal") -> dict[str, Tensor]:
    tokens, count, top_k = ROUTED[shape]
    logits = in_regime(regime, (tokens, count), seed, dtype=dtype)
    chosen = torch.rand(tokens, count, generator=torch.Generator().manual_seed(seed)).topk(top_k, -1).indices
    d = seeded_randn((tokens, top_k), seed + 1)
    return {name: t.to(DEVICE) for name, t in {"d_probs": d, "logits": logits, "experts": chosen}.items()}


def by_autograd(
    d_probs: Tensor, logits: Tensor, experts: Tensor, softmax: bool = True, normalize: bool = True, scale: float = 1.0
) -> dict[str, Tensor]:
    leaf = logits.detach().to(torch.promote_types(logits.dtype, torch.float32)).requires_grad_()
    scores = leaf.softmax(-1) if softmax else leaf.sigmoid()
    probs = scores.gather(-1, experts)
    probs = scale * (probs / (probs.sum(-1, keepdim=True) + (0.0 if softmax else 1e-20)) if normalize else probs)
    (grad,) = torch.autograd.grad(probs, leaf, d_probs.to(probs.dtype))
    return {"probs": probs.detach(), "dlogits": grad}


def run_router(given: dict[str, Tensor], k: ModuleType = route, **router: Any) -> dict[str, Tensor]:
    probs = k.route_factors(given["logits"], given["experts"], **router)
    return {"probs": probs, "dlogits": k.route_gradients(**given, **router)}


def check_router(shape: str, name: str, dtype: torch.dtype, regime: str = "normal", k: ModuleType = route) -> None:
    def measured(seed: int) -> tuple[dict[str, Tensor], ...]:
        given = of_a_router(shape, dtype, seed, regime)
        wide = {key: t.double() if t.is_floating_point() else t for key, t in given.items()}
        of = ROUTERS[name]
        return run_router(given, k, **of), by_autograd(**given, **of), by_autograd(**wide, **of)

    # Under a heavy tail one score is nearly 1 in many rows, and one rounding is the error of such a row.
    (judge_together if regime == "heavy" else judge)(measured, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROUTERS)
def test_factors_are_those_of_torch(name: str, dtype: torch.dtype) -> None:
    for shape in ROUTED:
        check_router(shape, name, dtype)
    for regime in ("small", "offset", "heavy"):
        check_router("many", name, dtype, regime)


@pytest.mark.parametrize("name", ROUTERS)
def test_a_bad_logit_spoils_no_other_token(name: str) -> None:
    given = of_a_router("odd", torch.float32, 3)
    given["logits"][4, 7], given["logits"][9, 2] = torch.nan, 1e30
    given["logits"][2] = -200.0  # each sigmoid of which is 0
    found, expected = run_router(given, **ROUTERS[name]), by_autograd(**given, **ROUTERS[name])
    for key, t in found.items():
        assert torch.equal(t.isnan(), expected[key].isnan()), key
        assert torch.allclose(t.nan_to_num(), expected[key].nan_to_num(), atol=1e-6), key


def test_factors_of_equal_logits_are_exact() -> None:
    given = of_a_router("many", torch.float32, 3) | {"logits": torch.full((300, 8), 0.75, device=DEVICE)}
    assert (run_router(given)["probs"] == 0.5).all()
    assert (run_router(given, normalize=False)["probs"] == 0.125).all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"logits": torch.zeros(6, 5).t()}, "expects contiguous logits"),
        ({"experts": torch.zeros(4, 2, dtype=torch.int64)}, "expects contiguous logits"),
        ({"d_probs": torch.zeros(5, 3)}, "expects contiguous gradients"),
    ],
)
def test_a_router_refuses_what_does_not_fit(changed: dict[str, Tensor], message: str) -> None:
    given = {"d_probs": torch.zeros(5, 2), "logits": torch.zeros(5, 6), "experts": torch.zeros(5, 2).long()} | changed
    with pytest.raises(ValueError, match=message):
        route.route_gradients(**given)
