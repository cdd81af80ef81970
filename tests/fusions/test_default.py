"""Fusion sets as values."""

import copy
import inspect
import re

import pytest
import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import fusions, ops
from seqfuse.testing import seeded_randn
from tests.judging import judge_together


def test_holds_every_fusion_of_the_room():
    named = {getattr(fusions, name) for name in fusions.__all__ if name not in ("default", "triton", "aten", "lean")}
    every = fusions.default
    assert every == (*fusions.triton, *fusions.aten, *fusions.lean)
    assert set(every) == named
    assert len(every) == len(named)


def test_names_are_distinct():
    names = [fusion.__name__ for fusion in fusions.default]
    assert len(set(names)) == len(names)


def test_what_launches_triton_kernels_says_so():
    assert all(fusion.kernels for fusion in fusions.triton)
    assert not any(fusion.kernels for fusion in fusions.aten)
    assert all(fusion.saves_memory == (fusion in fusions.lean) for fusion in fusions.default)


def test_without_a_triton_device_one_line_says_so():
    block = ops.Residual(ops.LayerNorm(6), ops.Linear(6, 8), ops.GeLU(), ops.Linear(8, 6))
    model = sf.Sequential(block, block)
    plan = model.plan(env=sf.Env(kernels=None, rows=64))
    assert not any(step.fused and step.operation.kernels for step in (*plan.forward, *plan.backward))
    refused = {r.fusion for r in plan.refused if r.reason == "needs a Triton device"}
    assert refused >= {"NormBackward", "LinearBiasPointwise", "BlockBoundary"}
    assert " ".join(str(plan).split()).count("needs a Triton device") == 1
    plan = model.plan(env=sf.Env(kernels="triton", rows=64))
    assert any(step.fused and step.operation.kernels for step in plan.forward)


class TanhRows(sf.ForwardFusion):
    """A user's fusion, of a pattern that one of the library's has too."""

    bias: ops.Bias
    act: ops.GeLU

    kernels = ("triton",)

    def fwd(self, x: Tensor):
        raise NotImplementedError


def test_a_fusion_of_ones_own_is_named_with_its_place_among_many_of_the_same_reason():
    parts = ops.LayerNorm(6), ops.Linear(6, 8), ops.GeLU(), ops.Linear(8, 6), ops.Dropout(0.1)
    model = sf.Sequential(ops.Residual(*parts), fusions=(*fusions.default, TanhRows))
    plan = model.plan(env=sf.Env(kernels=None, rows=4))
    (line,) = [line for line in str(plan).replace("\n    ", " ").split("\n") if "needs a Triton device" in line]
    assert re.search(r"not applied: TanhRows at 3; \w+, \w+, \w+ and \d+ more: needs a Triton device", line)
    assert {refusal.fusion for refusal in plan.refused if refusal.own} == {"TanhRows"}


def test_what_was_superseded_prints_as_one_line_and_is_all_in_the_plan():
    block = ops.Residual(ops.LayerNorm(1024), ops.Linear(1024, 4096), ops.GeLU(), ops.Linear(4096, 1024))
    plan = sf.Sequential(block, block).bfloat16().plan(env=sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=8192))
    superseded = [refusal for refusal in plan.refused if refusal.superseded]
    assert len({refusal.fusion for refusal in superseded}) > 3
    assert all("superseded by" in refusal.reason for refusal in superseded)
    (line,) = [line for line in str(plan).replace("\n    ", " ").split("\n") if line.startswith("superseded")]
    assert all(refusal.fusion in line for refusal in superseded)
    assert "est. " not in str(plan)


def test_tensors_so_small_that_they_gain_nothing_are_left_to_the_operations_unless_that_is_asked_for():
    model = sf.Sequential(ops.Bias(8), ops.GeLU(), ops.Scale(2.0))

    def count() -> int:
        return model.plan(env=sf.Env(kernels="c", rows=4)).count("PointwiseChain")

    assert count() == 0
    with sf.fusing(unmeasured=True):
        assert count() == 1
        with sf.fusing(unmeasured=False):
            assert count() == 0
        with sf.fusing(exclude="BiasGated"):
            assert count() == 1
    with pytest.raises(sf.InputError, match="SF106"), sf.fusing(unmeasured="yes"):  # pyright: ignore[reportArgumentType]
        pass


@pytest.mark.parametrize("fusion", fusions.default, ids=lambda fusion: fusion.__name__)
def test_every_fusion_says_why_it_is_there(fusion: type[sf.FusedOperation]):
    source = inspect.getsource(fusions)
    assert re.search(rf"^    {fusion.__name__},  # \w", source, re.MULTILINE)
    assert fusion.__doc__


def test_nothing_is_fused_when_fusing_is_off():
    model = sf.Sequential(ops.Residual(ops.LayerNorm(6), ops.Linear(6, 8), ops.ReLU(), ops.Linear(8, 6)))
    with sf.fusing(False):
        plan = model.plan(seeded_randn((4, 6), 0))
    assert not any(plan.count(fusion.__name__) for fusion in fusions.default)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_block_trains_to_the_same_gradients(dtype: torch.dtype):
    model = sf.Sequential(
        ops.Residual(ops.LayerNorm(6), ops.Linear(6, 8), ops.Tanh(), ops.Linear(8, 6), ops.Scale(0.5)),
        ops.Residual(ops.RMSNorm(6), ops.Linear(6, 6)),
    ).to(dtype)
    exact = copy.deepcopy(model).double()

    def run(enabled: bool, module: sf.Sequential, seed: int) -> list[Tensor]:
        leaf = seeded_randn((14, 6), seed, dtype=dtype).to(module[0][1].weight.dtype, copy=True).requires_grad_()
        with sf.fusing(enabled):
            y = module(leaf)
        dy = seeded_randn((14, 6), seed + 1, dtype=torch.bfloat16).to(y.dtype)
        return [y.detach(), *torch.autograd.grad(y, [leaf, *module.parameters()], dy)]

    judge_together(lambda seed: (run(True, model, seed), run(False, model, seed), run(False, exact, seed)), 0)
