"""Grouped GEMMs, compared with one GEMM of torch per group."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from seqfuse.kernels import grouped
from seqfuse.testing import seeded_randn
from seqfuse.testing.judge import judge

from .conftest import DEVICE

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Rows, columns, depth, and the ends of groups.
CASES = {
    "one": (1, 1, 1, (1,)), "odd": (77, 37, 41, (5, 5, 40, 70)), "aligned": (96, 64, 64, (32, 64, 96)),
    "empty ends": (50, 33, 16, (0, 0, 50, 50)), "no rows in any": (40, 16, 16, (0, 0)), "no rows": (0, 16, 16, (0, 0)),
    "beyond the last row": (30, 20, 70, (11, 99, 200)), "many groups": (40, 16, 16, tuple(range(0, 40, 2))),
    "one group": (70, 40, 33, (66,)),
}  # fmt: skip


def drawn(case: str, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    rows, columns, depth, ends = CASES[case]
    groups = len(ends)
    made = {
        "x": seeded_randn((rows, depth), seed, dtype=dtype),
        "weight": seeded_randn((groups, columns, depth), seed + 1, dtype=dtype),
        "bias": seeded_randn((groups, columns), seed + 2, dtype=dtype),
        "dy": seeded_randn((rows, columns), seed + 3, dtype=dtype),
        "offsets": torch.tensor(ends, dtype=torch.int32),
    }
    for name in ("x", "dy"):
        made[name][ends[-1] :] = torch.nan  # rows that are not read
    return {name: t.to(DEVICE) for name, t in made.items()}


def by_group(
    x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor, offsets: Tensor, sorted_tokens: bool = True
) -> dict[str, Tensor]:
    rows = len(x)
    y, dx = x.new_zeros(rows, weight.shape[1]), torch.zeros_like(x)
    dweight, sums, start = torch.zeros_like(weight), torch.zeros_like(bias), 0
    added, left = torch.zeros_like(y), torch.zeros_like(y)
    for g, end in enumerate(offsets.tolist()):
        end = min(end, rows)
        y[start:end] = torch.nn.functional.linear(x[start:end], weight[g], bias[g])
        dx[start:end] = dy[start:end] @ weight[g]
        dweight[g] = dy[start:end].T @ x[start:end]
        sums[g] = dy[start:end].sum(0)
        added[start:end] = dy[start:end] + bias[g]
        left[start:end] = dy[start:end]
        start = end
    found = {"y": y, "dx": dx, "dweight": dweight, "dbias": sums, "finished": added, "zeros": left}
    if sorted_tokens and rows % TOP_K == 0:
        x = x.nan_to_num()[: rows // TOP_K][order_of(rows).to(x.device) // TOP_K]
        plain = by_group(x, weight, bias, dy, offsets, False)
        found |= {f"{name} of tokens": plain[name] for name in ("y", "dweight")}
    return found


def run(given: dict[str, Tensor], k: ModuleType = grouped) -> dict[str, Tensor]:
    x, weight, bias, dy, offsets = (given[name] for name in ("x", "weight", "bias", "dy", "offsets"))
    return {
        "y": k.grouped_gemm(x, weight, offsets, bias),
        "dx": k.grouped_gemm(dy, weight.mT, offsets),
        "dweight": k.grouped_outer(dy, x, offsets),
        "dbias": k.group_sums(dy, offsets),
        **{f"{name} of tokens": t for name, t in of_tokens(given, k).items()},
        "finished": finished(given, True, k),
        "zeros": finished(given, False, k),
    }


TOP_K = 2


def of_tokens(given: dict[str, Tensor], k: ModuleType = grouped) -> dict[str, Tensor]:
    """The GEMMs that read tokens through a permutation; none for an odd number of rows."""
    x, weight, bias, dy, offsets = (given[name] for name in ("x", "weight", "bias", "dy", "offsets"))
    if len(x) % TOP_K:
        return {}
    how: dict[str, Any] = {"order": order_of(len(x)).to(DEVICE), "top_k": TOP_K}
    tokens = x.nan_to_num()[: len(x) // TOP_K]
    return {
        "y": k.grouped_gemm(tokens, weight, offsets, bias, **how),
        "dweight": k.grouped_outer(dy, tokens, offsets, **how),
    }


def order_of(rows: int) -> Tensor:
    return torch.randperm(rows, generator=torch.Generator().manual_seed(9))


def finished(given: dict[str, Tensor], biased: bool, k: ModuleType) -> Tensor:
    y = torch.empty_like(given["dy"]).copy_(given["dy"])
    k.finish_rows_(y, given["offsets"], given["bias"] if biased else None)
    return y


def check(case: str, dtype: torch.dtype, k: ModuleType = grouped) -> None:
    def measured(seed: int) -> tuple[dict[str, Tensor], ...]:
        given = drawn(case, dtype, seed)
        wide = {name: t.double() if t.is_floating_point() else t for name, t in given.items()}
        return run(given, k), by_group(**given), by_group(**wide)

    judge(measured, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_gemm_for_each_group(case: str, dtype: torch.dtype) -> None:
    check(case, dtype)
    found, (*_, ends) = run(drawn(case, dtype, 0)), CASES[case]
    empty = [g for g, (a, b) in enumerate(zip((0, *ends), ends, strict=False)) if b <= a]
    assert not found["dweight"][empty].any()
    assert not found["dbias"][empty].any()
    assert not found["y"][ends[-1] :].any()
    assert not found["dx"][ends[-1] :].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_matrices_may_lie_anywhere(dtype: torch.dtype) -> None:
    given = drawn("odd", dtype, 3)
    wide = {name: torch.cat([given[name]] * 2, 1)[:, : given[name].shape[1]] for name in ("x", "dy")}
    turned = given["weight"].mT.contiguous().mT
    assert not turned.is_contiguous()
    for name, t in run({**given, **wide, "weight": turned}).items():
        assert torch.equal(t, run(given)[name]), name


def test_no_rows_may_have_any_strides() -> None:
    """As an expanded gradient without rows, of which a copy is the same tensor."""
    given = drawn("no rows", torch.float32, 3)
    expanded = {name: torch.zeros((), device=DEVICE).expand(given[name].shape) for name in ("x", "dy")}
    for name, t in run({**given, **expanded}).items():
        assert torch.equal(t, run(given)[name]), name


def test_ends_may_be_of_64_bits() -> None:
    given = drawn("odd", torch.float32, 3)
    for name, t in run({**given, "offsets": given["offsets"].long()}).items():
        assert torch.equal(t, run(given)[name]), name


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"offsets": torch.zeros(0, dtype=torch.int32)}, "ends of 1 to"),
        ({"x": torch.zeros(5, 4, dtype=torch.float64)}, "matrices of one dtype"),
        ({"x": torch.zeros(4, 5).t()}, "x must have contiguous rows"),
        ({"weight": torch.zeros(3, 6, 4)}, r"expects weights \[2, N, 4\]"),
        ({"bias": torch.zeros(2, 5)}, r"expects weights \[2, N, 4\] and biases"),
        ({"order": torch.zeros(9, dtype=torch.int64), "top_k": 2}, r"order must be contiguous \[10\]"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Tensor], message: str) -> None:
    given = {"x": torch.zeros(5, 4), "weight": torch.zeros(2, 6, 4), "offsets": torch.tensor([2, 5])} | changed
    with pytest.raises(ValueError, match=message):
        grouped.grouped_gemm(**given)
