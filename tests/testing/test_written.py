"""Memory that a pass leaves unwritten, or computes from unwritten memory, is told apart from nondeterminism."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import ops
from seqfuse.testing import check_fusion, check_op, seeded_randn

X = seeded_randn((4, 6), 0)
F32 = [torch.float32]


@torch.library.custom_op("seqfuse_tests::first_written", mutates_args=())
def first_written(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y[..., :-1] = x[..., :-1]
    return y


@first_written.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class BiasTanh(sf.JointFusion):
    """Right; other classes of this file spoil its methods."""

    bias: ops.Bias
    act: ops.Tanh

    class Saved(sf.Saved):
        y: Tensor

    def y(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.bias.bias)

    def dx(self, dy: Tensor, y: Tensor) -> Tensor:
        return dy * (1 - y * y)

    def dbias(self, dx: Tensor) -> Tensor:
        return dx.reshape(-1, dx.shape[-1]).sum(0)

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        y = self.y(x)
        return y, self.Saved(y=y)

    def bwd(self, dy: Tensor, saved: Saved) -> tuple[Tensor, sf.Grads]:
        dx = self.dx(dy, saved.y)
        return dx, {"bias.bias": self.dbias(dx)}


class NoOutput(BiasTanh):
    def y(self, x: Tensor) -> Tensor:
        return torch.empty_like(x)


class NoLastColumn(BiasTanh):
    def y(self, x: Tensor) -> Tensor:
        return first_written(super().y(x))


class OfNothing(BiasTanh):
    def y(self, x: Tensor) -> Tensor:
        return super().y(x) + 0 * x.new_empty(x.shape)


class NoInputGradient(BiasTanh):
    def dx(self, dy: Tensor, y: Tensor) -> Tensor:
        return torch.empty_strided(dy.shape, dy.stride(), dtype=dy.dtype)


class NoBiasGradient(BiasTanh):
    def dbias(self, dx: Tensor) -> Tensor:
        return dx.new_empty(dx.shape[-1])


@pytest.mark.parametrize(
    ("fusion", "place"),
    [
        (NoOutput, r"fwd: y at \(0, 0\)"),
        (NoLastColumn, r"fwd: y at \(0, 5\)"),
        (OfNothing, r"fwd: y at \(0, 0\)"),
        (NoInputGradient, r"bwd: dx at \(0, 0\)"),
        (NoBiasGradient, r"bwd: grads\.bias\.bias at \(0,\)"),
    ],
)
def test_a_fusion_that_does_not_write_a_result_is_told_so(fusion: type[sf.FusedOperation], place: str) -> None:
    # Memory that held NaN before looks as if NaN was computed; then only the second call gives other numbers.
    by_chance = r"called again with the same inputs: .*bits differ first at .* against nan$"
    with pytest.raises(
        AssertionError, match=f"{place} is made of memory that was never written, such as that of|{by_chance}"
    ):
        check_fusion(fusion, X, dtypes=F32)


def test_one_that_writes_all_of_it_passes_and_nothing_is_left_switched_on() -> None:
    mode = torch.get_deterministic_debug_mode()
    assert check_fusion(BiasTanh, X, dtypes=F32).cases
    assert torch.get_deterministic_debug_mode() == mode


class Twice(sf.UnfusedOperation):
    class Saved(sf.Saved):
        """Nothing."""

    def reference(self, x: Tensor) -> Tensor:
        return 2 * x

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        return 2 * x, self.Saved()

    def bwd(self, dy: Tensor, saved: Saved) -> tuple[Tensor, sf.Grads]:
        return torch.empty_like(dy), {}


def test_an_operation_that_does_not_write_a_result_is_told_so() -> None:
    with pytest.raises(AssertionError, match=r"^Twice, float32, .*: bwd: dx at \(0, 0\) is made of memory that was ne"):
        check_op(Twice(), X, dtypes=F32)
