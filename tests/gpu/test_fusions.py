"""Every fusion made of Triton kernels, in both of its combinations, at real sizes."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch

import seqfuse as sf
from seqfuse import fusions, ops
from seqfuse.ops import _grouped
from seqfuse.testing import seeded_randn
from seqfuse.testing.cases import Case, Specimen
from seqfuse.testing.judge import judge
from seqfuse.testing.patterns import example_lists
from seqfuse.testing.probe import Probe
from tests.triton_fixtures import DEVICE

HERE = torch.cuda.is_available()
ROWS, H, F = (2048, 1024, 4096) if HERE else (8, 16, 32)
EVERY = (*fusions.triton, *fusions.lean)


def lists() -> dict[type[sf.FusedOperation], list[Any]]:
    """GEMMs of layers' sizes; those of the fusions' examples are not multiples of a tile."""

    heads, kv, size = (8, 4, 64) if HERE else (2, 1, 4)  # as wide as H

    def norm() -> list[Any]:
        return [ops.Bias(H), ops.QKNorm(size, heads, kv)]

    def experts() -> list[Any]:
        return [ops.SwiGLU(), ops.GroupedLinear(4, H // 2, F, bias=False), ops.Unpermute()]

    def turn() -> list[Any]:
        return [ops.RotaryEmbedding(heads, kv, style="half")]

    return {
        fusions.BiasQKNorm: norm(),
        fusions.BiasQKNormBackward: norm(),
        fusions.BiasQKNormRotary: norm() + turn(),
        fusions.BiasQKNormRotaryBackward: norm() + turn(),
        fusions.BiasQKNormRotaryAttention: [*norm(), *turn(), ops.Attention(heads, kv, causal=True)],
        fusions.LinearBiasPointwise: [ops.Linear(H, F), ops.GeLU()],
        fusions.ActivationLinearJoint: [ops.Bias(H), ops.GeLU(), ops.Linear(H, F)],
        fusions.NormForward: [ops.RMSNorm(H, zero_centered=True)],
        # Of millions of numbers some are so close to the bend of a clamp that a rounding moves them across it.
        fusions.BlockBoundaryActivation: [
            ops.Bias(H),
            ops.Dropout(0.5),
            ops.Add("other"),
            ops.Fork("stream"),
            ops.LayerNorm(H),
            ops.GeLU(),
            ops.Scale(0.75),
        ],
        fusions.BiasGatedScale: [ops.Bias(H), ops.SwiGLU(), ops.TokenScale("by")],
        fusions.PermuteGroupedLinear: [ops.Permute(4, 2), ops.GroupedLinear(4, H, F)],
        fusions.GatherGroupedLinear: [ops.Permute(4, 2), ops.GroupedLinear(4, H, F)],
        fusions.GatedGroupedLinearUnpermuteBoundary: [*experts(), ops.Add("h"), ops.RMSNorm(F)],
        fusions.UnpermuteBoundary: [ops.Unpermute(), ops.Add("h"), ops.RMSNorm(H)],
        fusions.UnpermuteBoundaryBackward: [ops.Unpermute(), ops.Add("h"), ops.RMSNorm(H)],
        fusions.GatedGroupedLinearUnpermute: experts(),
        fusions.RecomputeGatedGroupedLinearUnpermute: experts(),
    }


def extras() -> dict[type[sf.FusedOperation], dict[str, torch.Tensor]]:
    """Channels of these sequences whose shape is not that of the tensor that they meet."""
    experts = torch.randint(-1, 5, (ROWS, 2), generator=torch.Generator().manual_seed(0))
    half = experts[: ROWS // 2]
    _, order, _ = ops.Permute(4, 2).fwd(torch.zeros(ROWS // 2, 1), experts=half)
    sorted_by_expert = {**order, "probs": seeded_randn((ROWS // 2, 2), 1)}
    return {
        fusions.GatedGroupedLinearUnpermute: sorted_by_expert,
        fusions.RecomputeGatedGroupedLinearUnpermute: sorted_by_expert,
        fusions.BiasGatedScale: {"by": seeded_randn((ROWS, 1), 1)},
        fusions.PermuteGroupedLinear: {"experts": experts},
        fusions.GatherGroupedLinear: {"experts": experts},
        fusions.GatedGroupedLinearUnpermuteBoundary: sorted_by_expert | {"h": seeded_randn((ROWS // 2, F), 2)},
        fusions.UnpermuteBoundary: sorted_by_expert | {"h": seeded_randn((ROWS // 2, H), 2)},
        fusions.UnpermuteBoundaryBackward: sorted_by_expert | {"h": seeded_randn((ROWS // 2, H), 2)},
    }


def gated_lists() -> dict[type[sf.FusedOperation], list[Any]]:
    """The same with a gated unit as the activation."""
    return {fusions.ActivationLinearJoint: [ops.SwiGLU(), ops.Linear(H // 2, F)]}


def operations_for(fusion: type[sf.FusedOperation], x: torch.Tensor) -> tuple[list[Any], torch.Tensor]:
    found = lists().get(fusion)
    return next(iter(example_lists(fusion, x))) if found is None else (found, x)


# Not applied where torch computes it as well: a norm of float32 in one pass; a grouped GEMM of sorted rows.
ELSEWHERE = [(fusions.NormForward, torch.float32)]
if HERE and _grouped._has_kernel(DEVICE):
    ELSEWHERE.append((fusions.GatherGroupedLinear, torch.bfloat16))

# Interpreted, each fusion in one dtype in turn; in both under --full.
PAIRS = [
    pytest.param(
        fusion,
        dtype,
        id=f"{fusion.__name__} {dtype}",
        marks=[pytest.mark.full] * (not HERE and (i + (dtype is torch.float32)) % 2),
    )
    for i, fusion in enumerate(EVERY)
    for dtype in (torch.bfloat16, torch.float32)
    if (fusion, dtype) not in ELSEWHERE
]


@pytest.mark.parametrize(("fusion", "dtype"), PAIRS)
def test_takes_the_place_of_what_it_replaces(
    fusion: type[sf.FusedOperation], dtype: torch.dtype, device: torch.device
) -> None:
    pairs = "Unpermute" in fusion.__name__  # of a token and one of its experts
    x = seeded_randn((ROWS // 2, 2, H) if pairs else (ROWS, H), 0).to(device)
    judge_in_place(fusion, dtype, *operations_for(fusion, x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("fusion", gated_lists(), ids=lambda fusion: fusion.__name__)
def test_takes_the_place_of_a_gated_unit(
    fusion: type[sf.FusedOperation], dtype: torch.dtype, device: torch.device
) -> None:
    judge_in_place(fusion, dtype, gated_lists()[fusion], seeded_randn((ROWS, H), 0).to(device))


def judge_in_place(fusion: type[sf.FusedOperation], dtype: torch.dtype, operations: list[Any], x: torch.Tensor) -> None:
    operations = [operation.to(x.device) for operation in operations]
    given = {name: t.to(x.device) for name, t in extras().get(fusion, {}).items()}
    probe = Probe(fusion, Specimen(operations, x, given, 0), dtype)
    assert probe.place() is None, probe.place()
    case = Case(tuple(x.shape), dtype, grad=not issubclass(fusion, sf.InferenceFusion))
    grouped = any(isinstance(operation, ops.GroupedLinear) for operation in operations)
    others = functools.partial(in_other_orders, probe, case) if grouped and HERE and dtype is torch.float32 else None
    judge(functools.partial(probe.measure, case), 0, others=others)


def in_other_orders(probe: Probe, case: Case, seed: int) -> list[Any]:
    """The unfused results with GEMMs of groups by cuBLAS's two libraries, whose sums have other orders.

    Behind a gated unit each element's error has another factor, so that of millions of elements some exceed what one
    unfused result shows, even torch's own beside another order of its sums.
    """
    choose: Any = torch.backends.cuda.preferred_blas_library
    before, found = str(choose()).rpartition(".")[2].lower(), list[Any]()
    try:
        for library in ("cublas", "cublaslt"):
            choose(library)
            with mock.patch.object(_grouped, "_in_triton", return_value=False):
                found.append(probe.measure(case, seed)[1])
    finally:
        choose(before)
    return found
