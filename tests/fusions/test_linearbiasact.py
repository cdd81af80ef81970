"""Linear, Bias and an activation in place."""

import pytest
import torch

import seqfuse as sf
from seqfuse import fusions, ops
from seqfuse.testing import assert_bitwise_equal, check_fusion, seeded_randn

ACTS = (ops.ReLU(), ops.Sigmoid(), ops.Tanh())


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("act", ACTS, ids=str)
def test_takes_the_place_of_what_it_replaces(act: sf.Pointwise, bias: bool):
    x = seeded_randn((5, 6), 0)
    check_fusion(fusions.LinearBiasAct, x, ops.Linear(6, 4, bias=bias), act)


@pytest.mark.parametrize("act", ACTS, ids=str)
def test_gives_the_bits_of_the_product_and_the_activation(act: sf.Pointwise):
    model, x = sf.Sequential(ops.Linear(6, 8), act), seeded_randn((5, 6), 0)
    y = model(x)
    with sf.fusing(only=[fusions.LinearBias]):
        assert_bitwise_equal(y.detach(), model(x).detach())


def test_saves_the_output_and_nothing_beyond_it():
    model, x = sf.Sequential(ops.Linear(6, 8), ops.ReLU()), seeded_randn((5, 6), 0)
    assert model.plan(x).count("LinearBiasAct") == 1
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = model(x)
    storages = {t.untyped_storage().data_ptr() for t in kept} - {p.data_ptr() for p in model.parameters()}
    assert storages == {x.data_ptr(), y.data_ptr()}


def test_a_residual_shaped_bias_is_refused_by_its_type():
    model = sf.Sequential(ops.Linear(6, 8, bias=False), ops.Add("other"), ops.ReLU())
    assert model.plan(seeded_randn((5, 6), 0), other=seeded_randn((5, 8), 1)).count("LinearBiasAct") == 0


def test_autocast_gives_what_the_operations_give():
    model, x = sf.Sequential(ops.Linear(6, 8), ops.ReLU()), seeded_randn((5, 6), 0)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
        with sf.fusing(only=[fusions.LinearBias]):
            assert_bitwise_equal(y.detach(), model(x).detach())
