"""QKNorm."""

import pytest
import torch
import torch.nn.functional as F

import seqfuse as sf
from seqfuse import ops
from seqfuse.testing import assert_bitwise_equal, check_op, seeded_randn

from .passes import check_needs, check_passes


def randomized(op: ops.QKNorm) -> ops.QKNorm:
    for i, parameter in enumerate(op.parameters()):
        parameter.data = seeded_randn(tuple(parameter.shape), 20 + i, dtype=parameter.dtype)
    return op


@pytest.mark.parametrize("affine", [True, False])
def test_normalizes_each_head_and_leaves_the_values(affine: bool):
    op = randomized(ops.QKNorm(8, 3, 2, elementwise_affine=affine))
    x = seeded_randn((2, 5, 7 * 8), 0)
    y, heads = op(x).unflatten(-1, (7, 8)), x.unflatten(-1, (7, 8))
    torch.testing.assert_close(y[..., :3, :], F.rms_norm(heads[..., :3, :], (8,), op.q_weight, 1e-6))
    torch.testing.assert_close(y[..., 3:5, :], F.rms_norm(heads[..., 3:5, :], (8,), op.k_weight, 1e-6))
    assert_bitwise_equal(y[..., 5:, :].detach(), heads[..., 5:, :])


@pytest.mark.parametrize("affine", [True, False])
def test_keeps_its_contract(affine: bool):
    check_op(randomized(ops.QKNorm(4, 3, 1, eps=0.1, elementwise_affine=affine)), seeded_randn((2, 6, 5 * 4), 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_passes_agree_with_the_reference(dtype: torch.dtype):
    op = randomized(ops.QKNorm(6, 2, dtype=dtype))
    check_passes(op, seeded_randn((9, 6 * 6), 1, dtype=dtype))
    check_needs(op, seeded_randn((9, 6 * 6), 1, dtype=dtype))


def test_state_and_refusals():
    assert list(ops.QKNorm(4, 2).state_dict()) == ["q_weight", "k_weight"]
    assert not list(ops.QKNorm(4, 2, elementwise_affine=False).parameters())
    with pytest.raises(sf.errors.InputError, match=r"position 0 \(QKNorm\): expects last dimension 24, got 20"):
        ops.QKNorm(4, 2)(torch.zeros(3, 20))
