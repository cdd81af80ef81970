"""A MergedLinear behind a Fork, whose GEMM of dx starts from the gradient that arrives at the Fork."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import seqfuse as sf
from seqfuse import fusions, ops
from seqfuse.testing import check_fusion, seeded_randn


def apart(width: int, bias: bool = True) -> ops.MergedLinear:
    return ops.MergedLinear.of(*(nn.Linear(width, size, bias) for size in (4, 2, 3)))


@pytest.mark.parametrize("make", [apart, lambda width: ops.MergedLinear(width, (4, 2, 3))], ids=["apart", "one"])
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 9)], ids=str)
def test_takes_the_place_of_what_it_replaces(shape: tuple[int, ...], make: Callable[[int], ops.MergedLinear]):
    x, list_ = seeded_randn(shape, 0), [ops.Fork("out"), make(shape[-1])]
    check_fusion(fusions.BackwardMergedLinearAdd, x, *list_, dtypes=[torch.float32, torch.bfloat16])


def test_a_post_norm_layer_uses_it_on_a_cpu():
    block = ops.Residual(apart(8), ops.Linear(9, 8))
    model = sf.Sequential(ops.LayerNorm(8), block, ops.LayerNorm(8))
    x = seeded_randn((5, 8), 0).requires_grad_()
    assert model.plan(x).count("BackwardMergedLinearAdd") == 1
    leaves, results = [x, *model.parameters()], []
    for fusing in (True, False):
        with sf.fusing(fusing, on_error="raise"):
            results.append(torch.autograd.grad(model(x).square().sum(), leaves))
    torch.testing.assert_close(*results)


def test_a_sum_of_another_dtype_is_made_beside_it():
    fork, linear = ops.Fork("out"), apart(7)
    fusion = fusions.BackwardMergedLinearAdd(fork=fork, linear=linear)
    with torch.no_grad():
        x, dy, d_out = seeded_randn((5, 7), 0), seeded_randn((5, 9), 1), seeded_randn((5, 7), 2, dtype=torch.float64)
        record = linear.fwd(x)[1]
        around = {"linear": record, "needs": frozenset({"x"}), "main_grads": {}}
        dx, _ = fusion.bwd(dy, d_fork_out=d_out, **around)
        torch.testing.assert_close(dx, linear.bwd(dy, record, needs=frozenset({"x"}))[0] + d_out)
    assert dx.dtype is torch.float64
