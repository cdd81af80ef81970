"""Activations in 16 bits: computed in float32 and rounded once, fused or not."""

import pytest
import torch

import seqfuse as sf
from seqfuse import ops
from seqfuse.testing import assert_bitwise_equal, seeded_randn

UNITS = [ops.QuickGeLU(), ops.SiLU(), ops.GLU(), ops.SwiGLU(), ops.GEGLU(), ops.GEGLU("tanh"), ops.ReGLU()]


def passes(run, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.detach().requires_grad_()
    y = run(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    return y.detach(), dx


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: repr(unit))
def test_rounds_once_in_16_bits(unit: sf.UnfusedOperation, dtype: torch.dtype):
    x = seeded_randn((33, 64), 0, dtype=dtype) * 3
    dy = seeded_randn(tuple(unit.infer(tuple(x.shape))), 1, dtype=dtype)
    expected = tuple(t.to(dtype) for t in passes(unit.reference, x.float(), dy.float()))
    assert_bitwise_equal(passes(unit.reference, x, dy), expected)
    # In the tails of GeLU neither torch's float32 nor a kernel has all digits of 16 bits, and they differ.
    exact = tuple(t.to(dtype) for t in passes(unit.reference, x.double(), dy.double()))
    for fused, right in zip(passes(sf.Sequential(unit), x, dy), exact, strict=True):
        torch.testing.assert_close(fused.float(), right.float(), rtol=torch.finfo(dtype).eps, atol=1e-7)
        differ = (fused != right) & (right.abs() > 1e-4)
        assert differ.float().mean() < 1e-2  # where float32 is close to the middle of two 16-bit numbers
    with sf.fusing(False):
        assert_bitwise_equal(passes(sf.Sequential(unit), x, dy), expected)
        assert_bitwise_equal(passes(sf.Sequential(ops.Identity(), unit), x, dy), expected)


def test_an_activation_that_autocast_gives_float32_decides_the_dtype_of_its_gated_unit():
    class Exponential(sf.Pointwise):
        autocast = "float32"

        def reference(self, x: torch.Tensor) -> torch.Tensor:
            return x.exp()

    x = seeded_randn((5, 8), 0, dtype=torch.bfloat16)
    gate, up = x.chunk(2, -1)
    assert_bitwise_equal(sf.Gated(Exponential()).reference(x), (gate.float().exp() * up).bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert_bitwise_equal(sf.Gated(Exponential()).reference(x), gate.exp() * up)
