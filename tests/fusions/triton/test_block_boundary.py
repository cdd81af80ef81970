"""The boundary of two residual blocks in one pass, forward and backward."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import ops
from seqfuse.fusions import BlockBoundary, BlockBoundaryBackward
from seqfuse.fusions.boundary import boundary_fwd, branch_around
from seqfuse.testing import assert_bitwise_equal, assert_fused_close, check_fusion, seeded_randn
from seqfuse.testing.tensors import redrawn
from tests.judging import judge_together

ALL = (BlockBoundary, BlockBoundaryBackward)


def boundary(kind: str, *, fork: bool, norm: type[sf.UnfusedOperation], p: float = 0.3) -> list[sf.UnfusedOperation]:
    before = {
        "all": [ops.Bias(8), ops.Dropout(p)],
        "bias": [ops.Bias(8)],
        "dropout": [ops.Dropout(p)],
        "nothing": [],
    }[kind]
    return [*before, ops.Add("other"), *([ops.Fork("out")] if fork else []), norm(8)]


def on(device: torch.device, operations: list[sf.UnfusedOperation]) -> list[sf.UnfusedOperation]:
    return [operation.to(device) for operation in operations]


@pytest.mark.parametrize("autocast", [True, False])
def test_the_stream_has_the_dtype_of_the_sum(autocast: bool, device: torch.device):
    bias, norm = on(device, [ops.Bias(8), ops.LayerNorm(8)])
    x, other = (seeded_randn((3, 8), i, dtype=torch.bfloat16).to(device) for i in (0, 1))
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        out, _, _ = boundary_fwd(bias, None, norm, x, other, None)
        assert out.stream.dtype is (bias(x) + other).dtype


def test_the_gradient_of_the_branch_is_written_where_it_differs_from_that_of_the_stream():
    z, seed, half = torch.ones(3, 8), torch.tensor(1), torch.bfloat16
    for given, written in (
        ((z, None, 0.0, True, None), False),
        ((z, None, 0.0, True, torch.float32), False),
        ((z, None, 0.0, True, half), True),
        ((z, None, 0.0, False, half), False),
        ((z, seed, 0.3, True, None), True),
        ((z, seed, 0.3, False, None), False),
    ):
        assert branch_around(*given).get("dbranch", False) is written


@pytest.mark.parametrize(
    ("fusion", "kind", "fork", "norm", "dtype"),
    [
        (BlockBoundary, "all", True, ops.LayerNorm, torch.float32),
        (BlockBoundary, "dropout", True, ops.RMSNorm, torch.bfloat16),
        (BlockBoundary, "bias", False, ops.RMSNorm, torch.float32),
        (BlockBoundary, "dropout", False, ops.LayerNorm, torch.float16),
        (BlockBoundaryBackward, "all", True, ops.LayerNorm, torch.float32),
        (BlockBoundaryBackward, "dropout", True, ops.RMSNorm, torch.bfloat16),
        (BlockBoundaryBackward, "nothing", False, ops.LayerNorm, torch.float16),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_takes_the_place_of_what_it_replaces(
    fusion: type[sf.FusedOperation],
    kind: str,
    fork: bool,
    norm: type[sf.UnfusedOperation],
    dtype: torch.dtype,
    device: torch.device,
):
    operations = on(device, boundary(kind, fork=fork, norm=norm))
    check_fusion(fusion, seeded_randn((5, 8), 0).to(device), *operations, dtypes=[dtype])


def blocks(dtype: torch.dtype, device: torch.device, p: float = 0.25) -> sf.Sequential:
    model = sf.Sequential(
        ops.Residual(ops.LayerNorm(9), ops.Linear(9, 12), ops.ReLU(), ops.Linear(12, 9), ops.Dropout(p)),
        ops.Residual(ops.LayerNorm(9), ops.Linear(9, 9), ops.Dropout(p)),
        ops.RMSNorm(9),
        fusions=ALL,
    )
    return model.to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
def test_a_stack_of_blocks_trains_to_the_same_gradients(dtype: torch.dtype, p: float, device: torch.device):
    model = blocks(dtype, device, p)
    x, dy = (seeded_randn((2, 9, 9), i, dtype=dtype).to(device) for i in range(2))
    plan = model.plan(x)
    counts = [plan.count(fusion.__name__) for fusion in ALL]
    assert counts == [2, 2]

    def run(model: sf.Sequential, only: tuple[type[sf.FusedOperation], ...], seed: int) -> list[Tensor]:
        torch.manual_seed(5)
        leaf = redrawn(x, seed).to(model[2].weight.dtype, copy=True).requires_grad_()
        with sf.fusing(only=only, on_error="raise"):
            y = model(leaf)
        return [y.detach(), *torch.autograd.grad(y, [leaf, *model.parameters()], dy.to(y.dtype))]

    wide = copy.deepcopy(model).double()
    others = functools.cache(lambda seed: (run(model, (), seed), run(wide, (), seed)))
    for only in (ALL[:1], ALL[1:], ALL):
        judge_together(lambda seed, only=only: (run(model, only, seed), *others(seed)), 0)


def test_nothing_is_dropped_in_evaluation(device: torch.device):
    model = blocks(torch.float32, device).eval()
    x = seeded_randn((5, 9), 0).to(device)
    assert model.plan(x).count("BlockBoundary") == 2
    with sf.fusing(False):
        unfused = model(x).detach()
        exact = copy.deepcopy(model).double()(x.double()).detach()
    assert_fused_close(model(x).detach(), unfused, exact)


@pytest.mark.parametrize("wide", ["residual", "bias"])
def test_the_stream_takes_the_dtype_of_the_sum(wide: str, device: torch.device):
    bias = [ops.Bias(8)] if wide == "bias" else []
    model = sf.Sequential(*bias, ops.Add("other"), ops.Fork("out"), ops.LayerNorm(8), fusions=ALL).to(device)
    x, other = seeded_randn((5, 8), 0, dtype=torch.bfloat16).to(device), seeded_randn((5, 8), 1).to(device)
    other = other.bfloat16() if bias else other
    with sf.fusing(on_error="raise"):
        assert model.plan(x, other=other).count("BlockBoundary") == 1
        y, stream = model(x, other=other)
    assert y.dtype is stream.dtype is torch.float32
    assert_bitwise_equal(stream.detach(), x.float() + other)


def test_leaves_the_residual_as_it_was(device: torch.device):
    model = sf.Sequential(*boundary("all", fork=True, norm=ops.LayerNorm), fusions=ALL).to(device)
    x, other = (seeded_randn((5, 8), i).to(device) for i in range(2))
    before = other.clone()
    model(x, other=other)
    assert_bitwise_equal(other, before)


@pytest.mark.filterwarnings("ignore::seqfuse.FallbackWarning")
def test_another_shape_is_the_error_of_the_add(device: torch.device):
    model = sf.Sequential(ops.Add("other"), ops.LayerNorm(8), fusions=ALL).to(device)
    with pytest.raises(sf.InputError, match="adds tensors of one shape"):
        model(seeded_randn((5, 8), 0).to(device), other=torch.ones(8, device=device))


def test_the_other_mode_of_dropout_is_refused():
    dropout = ops.Dropout(0.3, mode="downscale_in_infer")
    model = sf.Sequential(dropout, ops.Add("other"), ops.LayerNorm(8), fusions=ALL)
    plan = model.plan(env=sf.Env.of("cuda:sm_90", dtype=torch.bfloat16))
    # What stands behind it still fuses.
    assert plan.count("BlockBoundary") == 1
    assert any("upscale_in_train" in refusal.reason for refusal in plan.refused)
