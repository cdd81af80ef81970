"""Write a fusion with Triton kernels of your own in both passes, the gradient of a parameter among what they make.

On a machine without a GPU, run it as  TRITON_INTERPRET=1 python examples/08_write_a_kernel.py  to run the kernels in
Triton's interpreter. They are compiled for a GPU all the same, which needs none.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

import seqfuse as sf
from seqfuse import ops, testing
from seqfuse.kernels.activations import tanh

ELEMENTS, TOKENS = 4096, 64  # that a program holds at once; that one of the backward pass sums over


@triton.jit
def forward_kernel(x, gamma, y, tokens, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    at, inside = token * size + column, (token < tokens) & (column < size)
    factor = tl.load(gamma + column, mask=column < size).to(tl.float32)
    tl.store(y + at, factor * tanh(tl.load(x + at, mask=inside).to(tl.float32)), mask=inside)


@triton.jit
def backward_kernel(
    dy, x, gamma, dx, sums, tokens, size, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    column = tl.arange(0, COLUMNS)[None, :]
    factor = tl.load(gamma + column, mask=column < size).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, TOKENS, ROWS):
        token = tl.program_id(0).to(tl.int64) * TOKENS + first + tl.arange(0, ROWS)[:, None]
        at, inside = token * size + column, (token < tokens) & (column < size)
        d = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        t = tanh(tl.load(x + at, mask=inside, other=0.0).to(tl.float32))
        tl.store(dx + at, d * factor * (1.0 - t * t), mask=inside)
        total += d * t
    # Each program writes its own row; rows are summed later: atomic additions would change bits from run to run.
    sums_at = tl.program_id(0).to(tl.int64) * size + column
    tl.store(sums + sums_at, tl.sum(total, 0)[None, :], mask=column < size)


def block(size: int) -> dict[str, int]:
    """How many rows and columns a program holds at once: whole tokens, in a power of two of columns."""
    columns = triton.next_power_of_2(size)
    return {"ROWS": max(1, min(TOKENS, ELEMENTS // columns)), "COLUMNS": columns}


@torch.library.custom_op("example::tanh_scale", mutates_args=())
def tanh_scale(x: Tensor, gamma: Tensor) -> Tensor:
    y, size = result(x, gamma), x.shape[-1]
    tokens, fits = x.numel() // size, block(size)
    with torch.cuda.device_of(x):
        forward_kernel[(triton.cdiv(tokens, fits["ROWS"]),)](x, gamma, y, tokens, size, **fits)
    return y


@tanh_scale.register_fake
def result(x: Tensor, gamma: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.promote_types(x.dtype, gamma.dtype))


@torch.library.custom_op("example::tanh_scale_backward", mutates_args=())
def tanh_scale_backward(dy: Tensor, x: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    size = x.shape[-1]
    tokens = x.numel() // size
    programs = triton.cdiv(tokens, TOKENS)
    dx, sums = torch.empty_like(x), torch.empty(programs, size, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        backward_kernel[(programs,)](dy, x, gamma, dx, sums, tokens, size, TOKENS=TOKENS, **block(size))
    return dx, sums.sum(0).to(gamma.dtype)


@tanh_scale_backward.register_fake
def gradients(dy: Tensor, x: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(gamma)


class TanhScale(sf.JointFusion):
    """y = gamma tanh(x), one kernel in each pass; saves x, and recomputes the tanh."""

    act: ops.Tanh
    scale: ops.LayerScale

    kernels = ("triton",)

    class Saved(sf.Saved):
        x: Tensor  # [*, H]
        gamma: Tensor  # [H], the parameter itself

    def requires(self, env: sf.Env) -> sf.Requirements:
        yield self.scale.size <= ELEMENTS, f"a program holds a whole token, of at most {ELEMENTS} features"

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        return tanh_scale(x, self.scale.gamma), self.Saved(x=x, gamma=self.scale.gamma)

    def bwd(self, dy: Tensor, saved: Saved) -> tuple[Tensor, sf.Grads]:
        dx, dgamma = tanh_scale_backward(dy, saved.x, saved.gamma)
        return dx, {"scale.gamma": dgamma}


def main() -> None:
    torch.manual_seed(0)
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(testing.check_fusion(TanhScale, torch.randn(70, 72, device=here), env=sf.Env.of("cuda:sm_90", tokens=8192)))

    x, gamma = torch.empty(8192, 1024, dtype=torch.bfloat16, device="meta"), torch.empty(1024, device="meta")
    sizes = {"tokens": 8192, "size": 1024, **block(1024)}
    given = {"x": x, "gamma": gamma, **sizes, "targets": ["sm_90"]}
    forward = testing.compile_kernel(forward_kernel, y=x, **given)
    backward = testing.compile_kernel(backward_kernel, dy=x, dx=x, sums=gamma, TOKENS=TOKENS, **given)
    for one in (*forward, *backward):
        print(f"{one.variant} for {one.target}: {one.registers} registers, {one.spills} bytes spilled")


if __name__ == "__main__":
    main()
