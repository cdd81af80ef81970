"""QKNorm."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from seqfuse import ops
from seqfuse.testing import assert_bitwise_equal, check_op, seeded_randn

from .passes import check_needs, check_passes, randomized


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


OTHERS = (
    {"zero_centered": True}, {"full_width": True}, {"kind": "layer", "bias": True},
    {"kind": "layer", "full_width": True, "bias": True}, {"kind": "layer", "elementwise_affine": False},
    {"kind": "layer", "zero_centered": True},
)  # fmt: skip


@pytest.mark.parametrize("how", OTHERS, ids=str)
def test_keeps_its_contract_in_other_configurations(how: dict[str, Any]):
    check_op(randomized(ops.QKNorm(4, 3, 1, eps=0.1, **how)), seeded_randn((2, 6, 5 * 4), 0))


@pytest.mark.parametrize("how", OTHERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_is_the_norm_of_torch(how: dict[str, Any], dtype: torch.dtype):
    op = randomized(ops.QKNorm(8, 3, 2, eps=1e-3, dtype=dtype, **how))
    x = seeded_randn((2, 5, 7 * 8), 0, dtype=dtype)
    norm = F.layer_norm if op.kind == "layer" else F.rms_norm
    y, begin = op(x), 0
    for prefix, heads in (("q", 3), ("k", 2)):
        size = 8 * heads if op.full_width else 8
        part = x[..., begin : begin + 8 * heads].unflatten(-1, (-1, size)).float()
        weight, bias = (getattr(op, f"{prefix}_{name}") for name in ("weight", "bias"))
        gain = None if weight is None else weight.float() + 1 if op.zero_centered else weight.float()
        shift = () if op.kind == "rms" else (None if bias is None else bias.float(),)
        wanted = norm(part, (size,), gain, *shift, 1e-3).flatten(-2).to(dtype)
        torch.testing.assert_close(y[..., begin : begin + 8 * heads], wanted)
        begin += 8 * heads
    assert_bitwise_equal(y[..., begin:].detach(), x[..., begin:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_passes_agree_with_the_reference(dtype: torch.dtype):
    op = randomized(ops.QKNorm(6, 2, dtype=dtype))
    check_passes(op, seeded_randn((9, 6 * 6), 1, dtype=dtype))
    check_needs(op, seeded_randn((9, 6 * 6), 1, dtype=dtype))


def test_float32_gradients_of_half_inputs_are_rounded_to_no_half():
    op = randomized(ops.QKNorm(6, 2, kind="layer", bias=True))
    x = seeded_randn((90, 6 * 6), 1, dtype=torch.bfloat16).requires_grad_()
    dy = seeded_randn((90, 6 * 6), 2, dtype=torch.bfloat16)
    wanted = torch.autograd.grad(op.reference(x), [*op.parameters()], dy)
    torch.testing.assert_close(torch.autograd.grad(op(x), [*op.parameters()], dy), wanted)


def test_half_weights_may_be_of_another_half_than_autocast():
    op, x = randomized(ops.QKNorm(6, 2, dtype=torch.float16)), seeded_randn((9, 6 * 6), 1)
    wanted = op(x)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(op(x), wanted)


def test_state():
    assert list(ops.QKNorm(4, 2).state_dict()) == ["q_weight", "k_weight"]
    assert not list(ops.QKNorm(4, 2, elementwise_affine=False).parameters())
    assert list(ops.QKNorm(4, 2, kind="layer", bias=True).state_dict()) == ["q_weight", "k_weight", "q_bias", "k_bias"]
    wide = ops.QKNorm(4, 3, 2, full_width=True, zero_centered=True)
    assert [tuple(p.shape) for p in wide.parameters()] == [(12,), (8,)]
    assert not any(p.any() for p in wide.parameters())
