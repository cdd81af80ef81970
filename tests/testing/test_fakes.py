"""Plans and the test kit name a custom op without a fake implementation, and the function to register one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import ops
from seqfuse.testing import check_fusion, check_op, seeded_randn

F32 = [torch.float32]


@torch.library.custom_op("seqfuse_tests::scaled", mutates_args=())
def scaled(x: Tensor, by: float) -> Tensor:
    return x * by


torch.library.define("seqfuse_tests::halved", "(Tensor x) -> Tensor")


@torch.library.impl("seqfuse_tests::halved", ["cpu", "cuda"])
def halved(x: Tensor) -> Tensor:
    return x * 0.5


class InForward(sf.JointFusion):
    first: ops.Scale
    second: ops.Scale

    class Saved(sf.Saved):
        by: float

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        by = self.first.factor * self.second.factor
        return scaled(x, by), self.Saved(by=by)

    def bwd(self, dy: Tensor, saved: Saved) -> tuple[Tensor, sf.Grads]:
        return dy * saved.by, {}


class InBackward(InForward):
    def fwd(self, x: Tensor) -> tuple[Tensor, Any]:
        by = self.first.factor * self.second.factor
        return x * by, self.Saved(by=by)

    def bwd(self, dy: Tensor, saved: Any) -> tuple[Tensor, sf.Grads]:
        return scaled(dy, saved.by), {}


class BackwardOnly(sf.BackwardFusion):
    first: ops.Scale
    second: ops.Scale

    def bwd(self, dy: Tensor, *, first: ops.Scale.Saved, second: ops.Scale.Saved) -> tuple[Tensor, sf.Grads]:
        return scaled(dy, first.factor * second.factor), {}


class Halving(sf.UnfusedOperation):
    class Saved(sf.Saved):
        """Nothing."""

    def reference(self, x: Tensor) -> Tensor:
        return x * 0.5

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        return self.reference(x), self.Saved()

    def bwd(self, dy: Tensor, saved: Saved) -> tuple[Tensor, sf.Grads]:
        return torch.ops.seqfuse_tests.halved(dy), {}


def said(called: str, operator: str) -> str:
    register = f'register one with torch.library.register_fake("seqfuse_tests::{operator}")'
    calls = f"{called} calls the custom op seqfuse_tests::{operator}, which has no fake implementation"
    return f"RuntimeError: {calls}; {register}"


@pytest.mark.parametrize(
    ("fusion", "what"),
    [
        (InForward, "what it saves for backward"),
        (InBackward, "its peak in a plan"),
        (BackwardOnly, "its peak in a plan"),
    ],
)
def test_a_fusion_that_calls_one(fusion: type[sf.FusedOperation], what: str) -> None:
    x = seeded_randn((4, 6), 0)
    pass_name = "fwd" if fusion is InForward else "bwd"
    reason = said(f"{fusion.__name__}.{pass_name}", "scaled")
    model = sf.Sequential(ops.Linear(6, 6), ops.Scale(2.0), ops.Scale(3.0), fusions=(fusion,))
    with sf.fusing(unmeasured=True):
        plan = model.plan(x.requires_grad_())
    if fusion is InForward:
        assert plan.memory is None
        assert plan.memory_unknown == reason
    else:
        assert plan.memory is not None
        assert (plan.memory.peak, plan.memory.peak_unknown) == (None, reason)
        assert f"\npeak not known: {reason}" in str(plan).replace("\n    ", " ")
        memory = plan.as_dict()["memory"]
        assert memory is not None
        assert memory["peak_unknown"] == reason
    assert check_fusion(fusion, x.detach(), ops.Scale(2.0), ops.Scale(3.0), dtypes=F32).skipped == (
        f"{what}: {reason}",
    )


def test_an_operation_that_calls_one() -> None:
    x, reason = seeded_randn((4, 6), 0), said("Halving.bwd", "halved")
    memory = sf.Sequential(Halving(), ops.Linear(6, 6)).plan(x.requires_grad_()).memory
    assert memory is not None
    assert (memory.peak, memory.peak_unknown) == (None, reason)
    assert check_op(Halving(), x.detach(), dtypes=F32).skipped == (f"its peak in a plan: {reason}",)
    with pytest.warns(UserWarning, match=r"Halving\.bwd calls the custom op seqfuse_tests::halved"):
        sf.Sequential(Halving(), ops.Tanh(), ops.Linear(6, 6), memory=sf.Budget(64))(x)
