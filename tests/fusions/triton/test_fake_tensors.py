"""No kernel is launched on fake tensors, and none may use masked lanes, which are 0 in Triton's interpreter."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import seqfuse as sf
from seqfuse import ops
from seqfuse.fake import faking
from seqfuse.testing import check_fusion
from tests.fusions.triton.launching import ScaleScale, Tuned, said, scaled, scales


def test_a_plan_names_the_fusion_and_the_cure(device: torch.device) -> None:
    plan = scales(ScaleScale).plan(torch.randn(3, 8, device=device))
    assert str(plan.memory_unknown).startswith(said("ScaleScale"))
    assert plan.memory is None


def test_a_kernel_that_would_be_tuned_is_not_launched(device: torch.device) -> None:
    plan = scales(Tuned).plan(torch.randn(3, 8, device=device))
    assert plan.memory is None
    assert plan.memory_unknown


@pytest.mark.parametrize("memory", ["fast", "balanced", "lean", 1000])
def test_a_model_runs_whatever_is_to_be_saved(memory: Any, device: torch.device) -> None:
    x = torch.randn(3, 8, device=device, requires_grad=True)
    scales(ScaleScale, memory=memory)(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 1 - x.detach().tanh() ** 2)


def test_other_threads_launch_meanwhile(device: torch.device) -> None:
    x, found = torch.randn(8, device=device), list[Any]()
    with faking() as mode:
        thread = threading.Thread(target=lambda: found.append(scaled(x, 2.0)))
        thread.start()
        thread.join()
        with pytest.raises(RuntimeError, match="data pointer"):
            scaled(mode.from_tensor(x), 2.0)
    assert torch.equal(found[0], x * 2)


def test_a_mode_of_the_callers_is_as_it_was_behind_the_block() -> None:
    mode: Any = FakeTensorMode()
    before = mode._allow_unsafe_data_ptr_access
    with faking(mode), pytest.raises(RuntimeError, match="data pointer"):
        torch.empty(3).data_ptr()
    assert mode._allow_unsafe_data_ptr_access == before


def test_the_test_kit_says_that_a_fusion_launches_on_fake_tensors(device: torch.device) -> None:
    x = torch.randn(3, 8, device=device)
    (skipped,) = check_fusion(ScaleScale, x, ops.Scale(2.0), ops.Scale(0.5), dtypes=[torch.float32]).skipped
    assert skipped.startswith(f"what it saves for backward: {said()}")


# Masked lanes.


@triton.jit
def sum_kernel(x, y, tokens, size, TOKENS: tl.constexpr, SIZE: tl.constexpr, OTHER: tl.constexpr):  # pyright: ignore
    token, column = tl.arange(0, TOKENS)[:, None], tl.arange(0, SIZE)[None, :]
    inside = (token < tokens) & (column < size)
    value = tl.load(x + token * size + column, mask=inside, other=OTHER)
    tl.store(y + column, tl.sum(value, 0)[None, :], mask=column < size)


@torch.library.custom_op("seqfuse_tests::summed", mutates_args=())
def summed(x: Tensor, other: float | None) -> Tensor:
    y, size = torch.empty(x.shape[-1]), x.shape[-1]
    tokens = x.numel() // size
    fit: Any = triton.next_power_of_2
    sum_kernel[(1,)](x, y, tokens, size, TOKENS=fit(tokens), SIZE=fit(size), OTHER=other)
    return y


@summed.register_fake
def _(x: Tensor, other: float | None) -> Tensor:
    return x.new_empty(x.shape[-1])


class Given(sf.BackwardFusion):
    bias: ops.Bias
    act: ops.ReLU

    kernels = ("triton",)
    other: ClassVar[float | None] = 0.0

    def bwd(self, dy: Tensor, *, act: ops.ReLU.Saved) -> tuple[Tensor, sf.Grads]:
        dx, _ = self.act.bwd(dy, act)
        return dx, {"bias.bias": summed(dx, self.other)}


class Undefined(Given):
    other = None


def test_the_test_kit_finds_sums_of_lanes_that_are_masked_off(device: torch.device) -> None:
    x = torch.randn(5, 8, device=device)
    check_fusion(Given, x, dtypes=[torch.float32])
    with pytest.raises(AssertionError, match=r"bias\.bias") as found:
        check_fusion(Undefined, x, dtypes=[torch.float32])
    (note,) = found.value.__notes__
    assert note.startswith("sum_kernel loads x under a mask without other=: a lane that the mask switches off is ")
