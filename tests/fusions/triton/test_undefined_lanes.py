"""A kernel that uses masked lanes is found, although these are 0 in Triton's interpreter."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import seqfuse as sf
from seqfuse import ops
from seqfuse.testing import check_fusion


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
