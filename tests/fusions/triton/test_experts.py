"""Fusions of experts that have Triton kernels: those of a CPU are in `tests/fusions/test_experts.py`."""

from __future__ import annotations

import pytest
import torch

import seqfuse as sf
from seqfuse import ops
from seqfuse.fusions import (
    GatedGroupedLinearUnpermuteBoundary,
    GatherGroupedLinear,
    UnpermuteBoundary,
    UnpermuteBoundaryBackward,
)
from seqfuse.kernels import norm
from seqfuse.testing import check_fusion, seeded_randn
from tests.fusions.test_experts import BOUNDARIES, DTYPES, assert_adds_to_buffers, block, drawn, ordered
from tests.kernels.test_norm import in_chunks


@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
def test_a_gemm_reads_tokens_where_they_are(biased: bool):
    listed = ops.Permute(4, 2), ops.GroupedLinear(4, 6, 5, bias=biased)
    check_fusion(GatherGroupedLinear, seeded_randn((40, 6), 0), *listed, experts=drawn(40, 2), dtypes=DTYPES)


@pytest.mark.parametrize(("fusion", "unpermute", "fork", "top_k"), BOUNDARIES)
def test_experts_are_summed_where_the_next_norm_begins(
    fusion: type[sf.FusedOperation], unpermute: ops.Unpermute, fork: bool, top_k: int
):
    listed = unpermute, ops.Add("h"), *[ops.Fork("stream")] * fork, ops.LayerNorm(5)
    given = {"h": seeded_randn((40, 5), 2), **ordered(40, top_k)}
    given |= {} if unpermute.probs is None else {"probs": seeded_randn((40, top_k), 1)}
    check_fusion(fusion, seeded_randn((40, top_k, 5), 0), *listed, dtypes=DTYPES, **given)


@pytest.mark.parametrize("sums", [True, False], ids=["sums", "sums apart"])
@pytest.mark.parametrize("fusion", [UnpermuteBoundary, UnpermuteBoundaryBackward])
def test_rows_that_registers_do_not_hold(fusion: type[sf.FusedOperation], sums: bool, monkeypatch: pytest.MonkeyPatch):
    in_chunks(monkeypatch, norm, 16, sums=sums)
    listed = ops.Unpermute(), ops.Add("h"), ops.LayerNorm(34)
    given = {"h": seeded_randn((7, 34), 2), "probs": seeded_randn((7, 2), 1), **ordered(7, 2)}
    check_fusion(fusion, seeded_randn((7, 2, 34), 0), *listed, dtypes=DTYPES[:1], **given)


def test_factors_before_the_gemm_and_the_next_norm():
    listed = ops.SwiGLU(), ops.GroupedLinear(4, 6, 5, bias=False), ops.Unpermute(), ops.Add("h"), ops.RMSNorm(5)
    given = {"h": seeded_randn((20, 5), 2), "probs": seeded_randn((20, 2), 1), **ordered(20, 2)}
    x = seeded_randn((20, 2, 12), 0)
    check_fusion(GatedGroupedLinearUnpermuteBoundary, x, *listed, dtypes=DTYPES, **given)


@pytest.mark.parametrize("fusion", [GatherGroupedLinear, GatedGroupedLinearUnpermuteBoundary])
def test_gradients_of_weights_are_added_to_their_buffers(fusion: type[sf.FusedOperation]):
    torch.manual_seed(0)
    model = sf.Sequential(ops.Residual(*block(6, 8, 4, 2)), ops.RMSNorm(6), memory="lean")
    assert_adds_to_buffers(fusion, model, 3, rtol=1e-4, atol=1e-4)
