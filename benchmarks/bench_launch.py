"""What a launch costs the host: instructions of a kernel's host function beside those of the torch calls it replaces.

Kernels are launched with the stub driver of the test kit, up to where the CUDA driver would be called; torch's calls
run on a CPU, on float32 tensors of 4 x 16, where the work itself is least. Instructions are counted with callgrind, all
of them in one process; they repeat from run to run where times do not. Needs valgrind; writes `results/launch.json`.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["SEQFUSE_TUNE"] = "0"

import torch
import torch.nn.functional as F
from record import write
from torch import Tensor, nn

M, H = 4, 16
NUMBER = 20
MOST = 1.5
"""Of the instructions of the torch calls that a fused kernel replaces."""
MOST_BLOCK = 0.7
"""Of those of an MLP block in eager torch, forward and backward."""

Call = Callable[[], Any]
Rows = Iterator[tuple[str, Call, Call]]


def kernels() -> Rows:
    """Each row's name, the call of ours, and the torch calls that it replaces."""
    from seqfuse.kernels import gemm, pointwise
    from seqfuse.kernels.activations import ACTIVATIONS
    from seqfuse.kernels.layernorm import layernorm_bwd, layernorm_fwd
    from seqfuse.kernels.rmsnorm import rmsnorm_fwd

    def half(*shape: int) -> Tensor:
        return torch.randn(shape).bfloat16()

    gelu, silu = ACTIVATIONS["gelu_tanh"], ACTIVATIONS["silu"]
    x, w, b, c, dy, t = half(M, H), half(H, H), half(H), half(H), half(M, H), half(M, H)
    seed, packed = torch.tensor(3), half(2 * H, H)
    X, W, B, DY, T, PACKED = (each.float() for each in (x, w, b, dy, t, packed))
    mean, rstd = torch.zeros(M), torch.ones(M)
    aten = torch.ops.aten

    def torch_gated() -> Any:
        gate, up = F.linear(X, PACKED).chunk(2, -1)
        return F.silu(gate) * up

    def torch_norm() -> Any:
        z = X + DY
        return z, torch.native_layer_norm(z, (H,), B, B, 1e-5)

    def torch_norm_backward() -> Any:
        norm = aten.native_layer_norm_backward.default
        return norm(DY, X, (H,), mean.view(M, 1), rstd.view(M, 1), B, B, [True, True, True])[0] + DY

    yield (
        "GEMM + bias + GeLU, pre-activation stored",
        lambda: gemm.linear(x, w, b, act=gelu, store_pre=True),
        lambda: F.gelu(F.linear(X, W, B), approximate="tanh"),
    )
    yield (
        "dgrad + dGeLU + dbias",
        lambda: gemm.linear_dgrad(dy, w, act=gelu, t=t, sums=True),
        lambda: aten.gelu_backward.default(DY.mm(W), T, approximate="tanh").sum(0),
    )
    yield "wgrad + dbias", lambda: gemm.linear_wgrad_bias(dy, x), lambda: (DY.t().mm(X), DY.sum(0))
    yield "GEMM + SwiGLU", lambda: gemm.linear_gated(x, packed, act=silu), torch_gated
    yield "add + LayerNorm", lambda: layernorm_fwd(x, b, c, 1e-5, residual=t), torch_norm
    yield (
        "LayerNorm backward + add",
        lambda: layernorm_bwd(dy, x, mean, rstd, b, dstream=t, dweight=x.dtype, dbias=x.dtype),
        torch_norm_backward,
    )
    yield "RMSNorm", lambda: rmsnorm_fwd(x, b, 1e-5), lambda: aten._fused_rms_norm.default(X, [H], B, 1e-5)
    steps = pointwise
    chains = {
        "bias + GeLU": steps.Chain(steps.bias(), steps.act(gelu)),
        "dGeLU + dbias": steps.Chain(steps.dact(gelu), steps.column_sum()),
        "dropout + add": steps.Chain(steps.dropout(0.1), steps.add()),
    }
    first, second, third = chains.values()
    yield "bias + GeLU", lambda: steps.pointwise(x, first, (b,)), lambda: F.gelu(X + B, approximate="tanh")
    yield (
        "dGeLU + dbias",
        lambda: steps.pointwise(dy, second, (t,)),
        lambda: aten.gelu_backward.default(DY, T, approximate="tanh").sum(0),
    )
    yield (
        "dropout + add",
        lambda: steps.pointwise(x, third, (seed, t)),
        lambda: aten.native_dropout(X, 0.1, True)[0] + T,
    )


def block() -> Rows:
    """The MLP block, forward and backward, as it is planned for an H200."""
    import seqfuse as sf
    from seqfuse import ops

    class Residual(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x)

    theirs = Residual(nn.LayerNorm(H), nn.Linear(H, H), nn.GELU("tanh"), nn.Linear(H, H))
    ours = sf.Sequential(
        ops.Residual(ops.LayerNorm(H), ops.Linear(H, H), ops.GeLU("tanh"), ops.Linear(H, H)),
    )
    x, g = torch.randn(M, H, requires_grad=True), torch.randn(M, H)

    def called(model: nn.Module) -> Call:
        # Not `torch.autograd.grad`: for each leaf torch answers whether its gradient is wanted by an exception.
        return lambda: model(x).backward(g)

    yield "MLP block, forward + backward", called(ours), called(theirs)


def rows() -> Rows:
    yield from kernels()
    yield from block()


def child(only: str) -> None:
    """Make every call, and count between the warm-up and the end."""
    from seqfuse.testing.stub_driver import stub_driver

    torch.set_num_threads(1)
    torch.manual_seed(0)
    gc.disable()  # it falls into one row or another
    with stub_driver(compiles=False, checks=False):
        for name, ours, theirs in rows():
            if not re.search(only, name):
                continue
            for call in (ours, theirs):
                for _ in range(50):  # the interpreter specializes what it has run a few times
                    call()
                torch._C._valgrind_toggle()
                for _ in range(NUMBER):
                    call()
                torch._C._valgrind_toggle_and_dump_stats()
            print(name, flush=True)


def counted(only: str) -> list[dict[str, Any]]:
    """The rows, counted in a child process."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind.out"
        command = [
            "valgrind", "--tool=callgrind", "--collect-atstart=no", f"--callgrind-out-file={out}", sys.executable,
            __file__, "--child", "--only", only,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        parts = sorted(Path(folder).glob("callgrind.out.*"), key=lambda part: int(part.suffix[1:]))
        totals = [re.search(r"^totals: (\d+)", part.read_text(), re.MULTILINE) for part in parts]
        counts = [int(total[1]) / NUMBER for total in totals if total]
    names = done.stdout.splitlines()
    assert len(counts) == 2 * len(names), (len(counts), names)
    pairs = zip(counts[::2], counts[1::2], strict=True)
    return [
        {"name": name, "seqfuse": ours, "torch": theirs, "ratio": ours / theirs}
        for name, (ours, theirs) in zip(names, pairs, strict=True)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", default="", help="a regular expression that a row's name contains")
    parser.add_argument("--gate", action="store_true", help="exit status 1 where a row is above its limit")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.only)
        return 0
    found = counted(arguments.only)
    bad = 0
    for row in found:
        most = MOST_BLOCK if "block" in row["name"] else MOST
        bad += row["ratio"] > most
        print(f"{row['name']:<45} {row['seqfuse']:>9,.0f} {row['torch']:>9,.0f}  {row['ratio']:.2f} of {most}")
    if not arguments.only:
        print(f"wrote {write('launch', {'launch': found}).name}")
    print(f"{bad} above their limit")
    return 1 if bad and arguments.gate else 0


if __name__ == "__main__":
    raise SystemExit(main())
