"""Grouped GEMMs of float32 rows in C, compared with one GEMM of torch per group."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from seqfuse import compiler
from seqfuse.kernels.c import grouped as in_c
from seqfuse.kernels.c.call import decided_once
from seqfuse.ops import _grouped
from seqfuse.testing import assert_bitwise_equal, seeded_randn
from seqfuse.testing.judge import judge
from tests.kernels.test_grouped import CASES, by_group, drawn

FILLED = [case for case, (rows, *_) in CASES.items() if rows]


@pytest.fixture(autouse=True)
def _has_blas() -> None:
    if not in_c.sgemm():
        pytest.skip("torch is linked with no BLAS here")


def run(x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor, offsets: Tensor) -> dict[str, Tensor]:
    return {
        "y": in_c.linear_of_groups(x, weight, offsets, bias),
        "dx": in_c.linear_of_groups(dy, weight.mT, offsets, None),
        "dweight": in_c.outer_of_groups(dy, x, offsets),
    }


@pytest.fixture(params=[False, True], ids=["BLAS", "few rows here"])
def here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether groups of few rows are multiplied by our C kernel, whatever the size of their weight."""
    monkeypatch.setattr(in_c, "_WEIGHT", 0)
    for name in ("linear", "outer"):
        decide = functools.partial(getattr(in_c, f"_decide_{name}"), request.param)
        monkeypatch.setattr(in_c, f"_{name}", {False: decided_once(decide)})
    return request.param


@pytest.mark.parametrize("rows", [1, 12, 16, 17, 30, 64, 65])
@pytest.mark.parametrize(("width", "depth"), [(24, 64), (19, 32), (33, 37)])
def test_few_rows(rows: int, width: int, depth: int, here: bool) -> None:
    """Every number of rows and columns beyond those of a tile, next to groups of other sizes."""
    ends = torch.tensor([rows, rows, rows + 5, 2 * rows + 5], dtype=torch.int32)

    def measured(seed: int) -> tuple[dict[str, Tensor], ...]:
        given: dict[str, Any] = {
            "x": seeded_randn((2 * rows + 8, depth), seed), "weight": seeded_randn((4, width, depth), seed + 1),
            "bias": seeded_randn((4, width), seed + 2), "dy": seeded_randn((2 * rows + 8, width), seed + 3),
        }  # fmt: skip
        found = run(**given, offsets=ends)
        wide = {name: t.double() for name, t in given.items()}
        plain, exact = ({name: by_group(**of, offsets=ends)[name] for name in found} for of in (given, wide))
        return found, plain, exact

    judge(measured, 0)


@pytest.mark.parametrize("case", FILLED)
def test_a_gemm_for_each_group(case: str, here: bool) -> None:
    def measured(seed: int) -> tuple[dict[str, Tensor], ...]:
        given = drawn(case, torch.float32, seed)
        wide = {name: t.double() if t.is_floating_point() else t for name, t in given.items()}
        found = run(**given)
        plain, exact = ({name: by_group(**of)[name] for name in found} for of in (given, wide))
        return found, plain, exact

    judge(measured, 0)
    (found, *_), (*_, ends) = measured(0), CASES[case]
    empty = [g for g, (a, b) in enumerate(zip((0, *ends), ends, strict=False)) if b <= a]
    assert not found["dweight"][empty].any()
    assert not any(found[name][ends[-1] :].any() for name in ("y", "dx"))


def _variants(given: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Inputs of equal values in other memory layouts."""
    wider = {name: torch.cat([given[name]] * 2, 1)[:, : given[name].shape[1]] for name in ("x", "dy")}
    every_other = {name: torch.stack([given[name]] * 2, -1)[..., 0] for name in ("x", "dy", "weight", "bias")}
    negative = {
        name: torch.complex(torch.zeros_like(given[name]), -given[name]).conj().imag
        for name in ("x", "dy", "weight", "bias")
    }
    assert all(t.is_neg() for t in negative.values())
    ends = torch.stack([given["offsets"]] * 2, -1)[:, 0]
    return {
        "of wider rows": given | wider,
        "transposed": given | {"weight": given["weight"].mT.contiguous().mT},
        "every other": given | every_other | {"offsets": ends},
        "columns": given | {name: given[name].t().contiguous().t() for name in ("x", "dy")},
        "of the other sign": given | negative,
        "ends of 64 bits": given | {"offsets": given["offsets"].long()},
    }


def test_matrices_may_lie_anywhere(here: bool) -> None:
    given = drawn("odd", torch.float32, 3)
    expected = run(**given)
    for name, variant in _variants(given).items():
        for result, t in run(**variant).items():
            torch.testing.assert_close(t, expected[result], msg=f"{result}, {name}")


def test_one_row_may_have_any_stride(here: bool) -> None:
    x, weight, ends = seeded_randn((1, 5), 0), seeded_randn((2, 1, 5), 1), torch.tensor([0, 1], dtype=torch.int32)
    expected = in_c.linear_of_groups(x, weight, ends, None)
    for stride in (0, 1, 9):
        rows, weights = x.as_strided((1, 5), (stride, 1)), weight.as_strided((2, 1, 5), (5, stride, 1))
        torch.testing.assert_close(in_c.linear_of_groups(rows, weights, ends, None), expected)


def test_an_expanded_gradient_is_copied() -> None:
    x, ends = seeded_randn((7, 5), 0), torch.tensor([3, 7], dtype=torch.int32)
    dy = seeded_randn((1, 4), 1).expand(7, 4)
    assert_bitwise_equal(in_c.outer_of_groups(dy, x, ends), in_c.outer_of_groups(dy.contiguous(), x, ends))


def test_small_groups_of_float32_are_multiplied_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[str] = []

    def watch(name: str, plain: Callable[..., Tensor]) -> None:
        def called(*args: Any) -> Tensor:
            met.append(name)
            return plain(*args)

        monkeypatch.setattr(in_c, name, called)

    watch("linear_of_groups", in_c.linear_of_groups)
    watch("outer_of_groups", in_c.outer_of_groups)
    given = {name: t.nan_to_num() for name, t in drawn("odd", torch.float32, 3).items()}

    def both() -> dict[str, Any]:
        x, weight, bias, dy, offsets = (given[name] for name in ("x", "weight", "bias", "dy", "offsets"))
        y = _grouped.grouped_linear(x, weight, offsets, bias)
        return {"y": y, "dweight": _grouped.grouped_weight_grad(dy, x, offsets)}

    found = both()
    assert met == ["linear_of_groups", "outer_of_groups"]
    monkeypatch.setattr(in_c, "sgemm", lambda: 0)  # as torch without BLAS
    torch.testing.assert_close(both(), found)
    assert len(met) == 2
    monkeypatch.undo()
    given = {name: t.bfloat16() if t.is_floating_point() else t for name, t in given.items()}
    both()
    assert len(met) == 2


def test_a_plan_asks_for_its_kernels() -> None:
    """They are compiled with the others of a plan, before its first call."""
    with FakeTensorMode(), compiler.collecting() as wanted:
        _grouped.grouped_linear(torch.empty(9, 6), torch.empty(2, 5, 6), torch.empty(2, dtype=torch.int32), None)
    assert list(wanted) == [in_c.linear_kernel(False).source, in_c.outer_kernel().source]
