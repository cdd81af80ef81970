"""A fusion that launches a kernel itself, not through an operator: in its forward pass directly or after tuning."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import seqfuse as sf
from seqfuse import ops


@triton.jit
def scaled_kernel(x, y, n, factor, BLOCK: tl.constexpr):  # pyright: ignore
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * factor, mask=at < n)


tuned_kernel: Any = triton.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], ["n"])(scaled_kernel)


def scaled(x: Tensor, factor: float) -> Tensor:
    y = torch.empty_like(x)
    scaled_kernel[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), factor, BLOCK=64)
    return y


class ScaleScale(sf.JointFusion):
    first: ops.Scale
    second: ops.Scale

    class Saved(sf.Saved):
        factor: float

    def fwd(self, x: Tensor) -> Any:
        factor = self.first.factor * self.second.factor
        return scaled(x, factor), self.Saved(factor=factor)

    def bwd(self, dy: Tensor, saved: Any) -> Any:
        return dy * saved.factor, {}


class Tuned(ScaleScale):
    def fwd(self, x: Tensor) -> Any:
        factor = self.first.factor * self.second.factor
        tuned_kernel[(1,)](x, torch.empty_like(x), x.numel(), factor)
        raise AssertionError("the kernel was launched")


def scales(*fusions: type[sf.FusedOperation], memory: Any = "fast") -> sf.Sequential:
    """Operations of such a fusion, after an operation with more to save."""
    return sf.Sequential(ops.Scale(2.0), ops.Scale(0.5), ops.Tanh(), fusions=fusions, memory=memory)


def said(fusion: str = "ScaleScale") -> str:
    """A plan's text about a fusion that launches a kernel."""
    cure = "wrap a function that launches kernels in torch.library.custom_op, with register_fake"
    return f"RuntimeError: {fusion}.fwd does not run on fake tensors; {cure}: "
