"""Runs of point-wise operations in one kernel each way."""

from __future__ import annotations

import pytest
import torch

import seqfuse as sf
from seqfuse import ops
from seqfuse.fusions import PointwiseChain, PointwiseChainBackward, PointwiseChainJoint
from seqfuse.testing import check_fusion, seeded_randn
from tests.fusions.triton.fourways import four_ways

EVERY = (PointwiseChain, PointwiseChainBackward)
ALL = pytest.mark.parametrize("fusion", EVERY, ids=lambda fusion: fusion.__name__)


def bias(width: int) -> ops.Bias:
    made = ops.Bias(width)
    made.bias.data.copy_(seeded_randn((width,), 7))
    return made


@ALL
@pytest.mark.parametrize(
    ("list_", "dtype"),
    [
        ((bias(6), ops.GeLU("tanh")), torch.float16),
        ((bias(7), ops.ReLU()), torch.bfloat16),
        ((bias(8), ops.SiLU(), ops.Scale(0.5), bias(8), ops.Tanh()), torch.float32),
        ((ops.Tanh(), ops.SiLU(), ops.ReLU(), ops.Scale(-2.0)), torch.bfloat16),
        ((bias(7), ops.GeLU("tanh"), ops.Dropout(0.3), ops.Scale(0.5)), torch.float32),
        ((ops.Dropout(0.5), ops.SiLU(), ops.Dropout(0.2, "downscale_in_infer"), bias(7)), torch.float16),
        ((ops.Tanh(), ops.Dropout(0.4, "downscale_in_infer").eval(), ops.ReLU(), ops.Dropout().eval()), torch.bfloat16),
    ],
    ids=[
        "bias and activation",
        "one that saves its output",
        "biases",
        "activations",
        "dropout",
        "two dropouts",
        "dropouts in evaluation",
    ],
)
def test_takes_the_place_of_what_it_replaces(
    fusion: type[sf.FusedOperation], list_: tuple[sf.UnfusedOperation, ...], dtype: torch.dtype, device: torch.device
):
    operations = [operation.to(device) for operation in list_]
    width = next((operation.size for operation in list_ if isinstance(operation, ops.Bias)), 8)
    check_fusion(fusion, seeded_randn((5, width), 0).to(device), *operations, dtypes=[dtype])


@pytest.mark.parametrize(
    ("list_", "dtype"),
    [
        ((ops.SiLU(), ops.Scale(0.5), ops.Tanh()), torch.float32),
        ((bias(7), ops.GeLU("tanh"), ops.ReLU(), bias(7), ops.Sigmoid(), ops.SquaredReLU()), torch.float32),
        ((ops.Scale(-0.5), ops.Tanh(), ops.SiLU(), ops.Dropout(0.3), ops.QuickGeLU()), torch.bfloat16),
        ((ops.Dropout(0.4, "downscale_in_infer"), bias(8), ops.Sigmoid(), ops.GeLU(), ops.Scale(3.0)), torch.float16),
    ],
    ids=["run", "two runs", "a run and one alone", "a run at the end"],
)
def test_of_a_run_only_what_it_takes_is_kept(
    list_: tuple[sf.UnfusedOperation, ...], dtype: torch.dtype, device: torch.device
):
    operations = [operation.to(device) for operation in list_]
    width = next((operation.size for operation in list_ if isinstance(operation, ops.Bias)), 8)
    check_fusion(PointwiseChainJoint, seeded_randn((5, width), 0).to(device), *operations, dtypes=[dtype])


def test_training_takes_the_form_that_keeps_less(device: torch.device):
    model = sf.Sequential(bias(8), ops.SiLU(), ops.Tanh(), ops.GeLU(), fusions=(PointwiseChainJoint, *EVERY)).to(device)
    x = seeded_randn((5, 8), 0).to(device).requires_grad_()
    assert model.plan(x).count("PointwiseChainJoint") == 1
    kept: list[int] = []

    def count(t: torch.Tensor) -> torch.Tensor:
        kept[-1] += t.numel()
        return t

    for fuse in (True, False):
        kept.append(0)
        with sf.fusing(fuse), torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            model(x)
    assert kept == [40, 80]


def test_a_factor_that_changes_between_the_passes_changes_no_gradient(device: torch.device):
    x, dy = (seeded_randn((5, 8), i).to(device).requires_grad_() for i in range(2))
    found: list[torch.Tensor] = []
    for fusions in ((), PointwiseChainJoint):
        model = sf.Sequential(ops.SiLU(), ops.Scale(0.5), ops.Tanh(), fusions=fusions).to(device)
        y = model(x)
        model[1].factor = 3.0
        found += torch.autograd.grad(y, x, dy)
    torch.testing.assert_close(found[1], found[0])


def test_activations_apart_keep_what_they_read_anyway():
    list_ = ops.SiLU(), ops.Dropout(0.5), ops.Tanh()
    plan = sf.Sequential(*list_, fusions=PointwiseChainJoint).plan(env=sf.Env.of("cuda:sm_90", rows=64))
    assert {refusal.reason for refusal in plan.refused} == {"no two activations stand side by side"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_meet_in_the_records(dtype: torch.dtype, device: torch.device):
    both = (PointwiseChain, PointwiseChainBackward)
    list_ = [bias(13), ops.Sigmoid(), ops.SiLU(), ops.Scale(3.0), ops.Tanh(), bias(13), ops.ReLU(), ops.SquaredReLU()]
    model = sf.Sequential(*list_, fusions=both).to(device, dtype)
    four_ways(model, seeded_randn((19, 13), 0, dtype=dtype).to(device), *both)


@pytest.mark.parametrize("act", [ops.GeLU(), ops.Tanh(), ops.QuickGeLU(), ops.SquaredReLU()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_bias_and_an_activation_between_gemms_meet_in_the_records(
    act: sf.Pointwise, dtype: torch.dtype, device: torch.device
):
    both = (PointwiseChain, PointwiseChainBackward)
    model = sf.Sequential(ops.Linear(12, 36), act, ops.Linear(36, 9), fusions=both).to(device, dtype)
    four_ways(model, seeded_randn((19, 12), 0, dtype=dtype).to(device), *both)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropouts_meet_in_the_records(dtype: torch.dtype, device: torch.device):
    both = (PointwiseChain, PointwiseChainBackward)
    list_ = [ops.Dropout(0.2), bias(13), ops.Tanh(), ops.Dropout(0.4, "downscale_in_infer"), ops.SiLU(), ops.Dropout(1)]
    model = sf.Sequential(*list_[:-1], ops.Scale(2.0), fusions=both).to(device, dtype)
    four_ways(model, seeded_randn((19, 13), 0, dtype=dtype).to(device), *both)
    nothing = sf.Sequential(*list_, fusions=both).to(device, dtype)
    assert nothing(seeded_randn((19, 13), 0, dtype=dtype).to(device).requires_grad_()).eq(0).all()


def test_a_chain_drops_what_the_operations_drop(device: torch.device):
    model = sf.Sequential(ops.Dropout(0.3), ops.Scale(2.0), ops.Dropout(0.6), fusions=PointwiseChain).to(device)
    x = torch.ones(33, 7, device=device)
    kept: list[torch.Tensor] = []
    for grad in (False, True):
        x.requires_grad_(grad)
        for fuse in (True, False):
            with sf.fusing(fuse):
                assert model.plan(x).count("PointwiseChain") == fuse
                torch.manual_seed(0)
                kept.append(model(x).ne(0))
    assert all(mask.equal(kept[0]) for mask in kept)
    assert 0.15 < kept[0].float().mean() < 0.41  # 0.28, give or take four standard errors


@pytest.mark.parametrize("drop", [ops.Dropout(0.0), ops.Dropout(0.5).eval()], ids=["p = 0", "evaluation"])
def test_what_a_dropout_hands_on_is_no_reason_for_a_kernel(drop: ops.Dropout):
    plan = sf.Sequential(ops.SiLU(), drop, fusions=PointwiseChain).plan(env=sf.Env.of("cuda:sm_90", rows=64))
    assert [refusal.reason for refusal in plan.refused] == ["only a Dropout that drops nothing here is with it"]


@pytest.mark.parametrize("length", [2, 9, 12])
def test_of_any_length_few_kernels_are_left(length: int):
    model = sf.Sequential(*([ops.SiLU()] * length), fusions=EVERY)
    plan = model.plan(env=sf.Env.of("cuda:sm_90", rows=64, grad=False))
    assert len(plan.forward) == (length + 8) // 9
    assert all(step.fused for step in plan.forward)


def test_a_tensor_that_two_keep_is_stored_once(device: torch.device):
    model = sf.Sequential(ops.Scale(2.0), ops.Tanh(), ops.SiLU(), fusions=EVERY).to(device)
    x = seeded_randn((5, 8), 0).to(device).requires_grad_()
    assert model.plan(x).count("PointwiseChain") == 1
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(x)
    assert len({t.data_ptr() for t in kept}) == 1
