"""DropPath: whole samples, by the mask of Dropout."""

import pytest
import torch

import seqfuse as sf
from seqfuse import ops
from seqfuse.ops._philox import drop_mask
from seqfuse.testing import assert_bitwise_equal, check_op, seeded_randn


@pytest.mark.parametrize("op", ops.DropPath.examples(torch.empty(0)), ids=str)
def test_keeps_its_contract(op: ops.DropPath):
    check_op(op, seeded_randn((5, 3, 4), 0))


@pytest.mark.parametrize("scale", [True, False])
def test_drops_samples_as_dropout_drops_elements(scale: bool):
    x, seed = seeded_randn((64, 3, 4), 0), torch.tensor(5)
    y, saved = ops.DropPath(0.25, scale).fwd(x, seed=seed)
    drop = drop_mask(seed, (64,), 0.25)
    assert 4 < int(drop.sum()) < 30
    assert not y[drop].any()
    torch.testing.assert_close(y[~drop], x[~drop] / (0.75 if scale else 1))
    assert_bitwise_equal(ops.DropPath(0.25, scale).bwd(x, saved)[0], y)


def test_keeps_the_mean():
    torch.manual_seed(0)
    y = ops.DropPath(0.3)(torch.ones(20_000, 2))
    assert abs(float(y.mean()) - 1) < 0.02
    assert set(y.unique().tolist()) == {0.0, float(torch.tensor(1 / 0.7))}


def test_evaluation_and_none_change_nothing():
    x = seeded_randn((5, 6), 0)
    for op in (ops.DropPath(0.5).eval(), ops.DropPath(0.0)):
        assert_bitwise_equal(op(x), x)
    assert not ops.DropPath(1.0)(x).any()


@pytest.mark.parametrize("p", [0.5, 1.0])
@pytest.mark.parametrize("scale", [True, False])
def test_what_is_dropped_is_multiplied_by_zero(scale: bool, p: float):
    x = torch.tensor([1.0, -1.0, -0.0, torch.inf, -torch.inf, torch.nan, 3e38]).repeat(40, 1)
    factor = (~drop_mask(torch.tensor(5), x.shape[:1], p)).float().mul_(2 if scale and p < 1 else 1).unsqueeze(1)
    op = ops.DropPath(p, scale)
    y, saved = op.fwd(x, seed=torch.tensor(5))
    for mine in (y, op.bwd(x, saved)[0], op.reference(x, seed=torch.tensor(5))):
        torch.testing.assert_close(mine, x * factor, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(mine.signbit() | mine.isnan(), (x * factor).signbit() | x.isnan() | (x * factor).isnan())


def test_a_residual_with_it_is_the_shortcut_for_dropped_samples():
    torch.manual_seed(1)
    model, x = sf.Sequential(ops.Residual(ops.Linear(6, 6), ops.DropPath(0.5))), seeded_randn((32, 6), 0)
    same = (model(x) == x).all(1)
    assert 4 < int(same.sum()) < 28


def test_refusals():
    with pytest.raises(ValueError, match="p must be between 0 and 1, got 2"):
        ops.DropPath(2)
    with pytest.raises(sf.InputError, match="expects a first dimension of samples"):
        sf.Sequential(ops.Scale(1.0), ops.DropPath())(torch.tensor(1.0))
    assert repr(ops.DropPath(0.2, False)) == "DropPath(p=0.2, scale_by_keep=False)"
