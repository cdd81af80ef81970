"""What a launch costs the host: instructions of a kernel's host function beside those of the torch calls it replaces.

Kernels are launched with the stub driver of the test kit, up to the function in C that calls the CUDA driver; torch's
calls run on a CPU, on float32 tensors of 4 x 16, where the work itself is least. Instructions are counted with
callgrind, all of them in one process; they repeat from run to run where times do not. An MLP block is taken apart as
well (`launch_block.py`). Needs valgrind; writes `results/launch.json`.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["SEQFUSE_TUNE"] = "0"

import torch
import torch.nn.functional as F
from launch_block import PART, STEP, Call, H, M, Rows, block, parts
from record import write
from torch import Tensor

NUMBER = 20
MOST = 1.5
"""Of the instructions of the torch calls that a fused kernel replaces."""
MOST_BLOCK = 0.7
"""Of those of an MLP block in eager torch, forward and backward."""


def kernels() -> Rows:
    """Each row's name, the call of ours, and the torch calls that it replaces."""
    from seqfuse.kernels import pointwise
    from seqfuse.kernels.activations import ACTIVATIONS
    from seqfuse.kernels.norm import norm_bwd, norm_fwd

    def half(*shape: int) -> Tensor:
        return torch.randn(shape).bfloat16()

    gelu, seed = ACTIVATIONS["gelu_tanh"], torch.tensor(3)
    x, b, c, dy, t = half(M, H), half(H), half(H), half(M, H), half(M, H)
    X, B, DY, T = (each.float() for each in (x, b, dy, t))
    mean, rstd = torch.zeros(M), torch.ones(M)
    aten = torch.ops.aten

    def torch_norm() -> Any:
        z = X + DY
        return z, torch.native_layer_norm(z, (H,), B, B, 1e-5)

    def torch_norm_backward() -> Any:
        norm = aten.native_layer_norm_backward.default
        return norm(DY, X, (H,), mean.view(M, 1), rstd.view(M, 1), B, B, [True, True, True])[0] + DY

    yield "add + LayerNorm", lambda: norm_fwd(x, b, c, 1e-5, residual=t), torch_norm
    yield (
        "LayerNorm backward + add",
        lambda: norm_bwd(dy, x, mean, rstd, b, dstream=t, dweight=x.dtype, dbias=x.dtype),
        torch_norm_backward,
    )
    yield (
        "RMSNorm",
        lambda: norm_fwd(x, b, None, 1e-5, centered=False),
        lambda: aten._fused_rms_norm.default(X, [H], B, 1e-5),
    )
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


def heads() -> Rows:
    """The same of kernels for attention, rotation, decoding and the loss."""
    from seqfuse.kernels.attention import attention_fwd
    from seqfuse.kernels.crossentropy import cross_entropy_
    from seqfuse.kernels.decode import decode_attention
    from seqfuse.kernels.rope import Rotation, rope_bwd, rope_fwd

    q, k, v = (torch.randn(1, 1, M, H).bfloat16() for _ in range(3))
    Q, K, V = (t.float() for t in (q, k, v))
    packed, turn = torch.randn(1, M, 3 * H).bfloat16(), Rotation("half", H)
    PACKED, cos, sin = packed.float().view(1, M, 3, H), torch.randn(M, 1, H), torch.randn(M, 1, H)
    logits, targets = torch.randn(M, H), torch.zeros(M, dtype=torch.int64)
    new, lengths = torch.randn(1, 1, H).bfloat16(), torch.ones(1, dtype=torch.int64)
    attend = F.scaled_dot_product_attention

    def turned() -> Any:
        x = PACKED[:, :, :2]
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    yield "attention, causal", lambda: attention_fwd(q, k, v, causal=True), lambda: attend(Q, K, V, is_causal=True)
    yield "rotation of packed heads", lambda: rope_fwd(packed, 1, 1, turn), turned
    yield "its gradient", lambda: rope_bwd(packed, 1, 1, turn), turned
    yield "decoding", lambda: decode_attention(new, k, v, lengths), lambda: attend(Q[:, :, :1], K, V)
    yield (
        "cross-entropy",
        lambda: cross_entropy_(logits, targets, gradient=False),
        lambda: F.cross_entropy(logits, targets, reduction="none"),
    )


def rows() -> Iterator[tuple[str, tuple[Call, ...]]]:
    """Names, and what is counted: ours and torch's, or one part."""
    for name, ours, theirs in (*kernels(), *heads(), *block()):
        yield name, (ours, theirs)
    yield from parts()


def child(only: str) -> None:
    """Make every call, and count between the warm-up and the end."""
    from tools.stub_driver import stub_driver

    torch.set_num_threads(1)
    torch.manual_seed(0)
    gc.disable()  # it falls into one row or another
    with stub_driver(compiles=False, checks=False):
        wanted = [(name, calls) for name, calls in rows() if re.search(only, name)]
        for _, calls in wanted:
            for call in calls:
                call()
        # Not before: imports would take minutes.
        subprocess.run(["callgrind_control", "-i", "on", str(os.getpid())], check=True, stdout=sys.stderr)
        for name, calls in wanted:
            torch.set_grad_enabled(not name.startswith(STEP))  # they run in a node
            for call in calls:
                for _ in range(50):  # the interpreter specializes what it has run a few times
                    call()
                torch._C._valgrind_toggle()
                for _ in range(NUMBER):
                    call()
                torch._C._valgrind_toggle_and_dump_stats()
            print(len(calls), name, flush=True)


def counted(only: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows, counted in a child process, and the parts of the block; of a step also the calls that it makes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind.out"
        command = [
            "valgrind", "--tool=callgrind", "--collect-atstart=no", "--instr-atstart=no",
            f"--callgrind-out-file={out}", sys.executable, __file__, "--child", "--only", only,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        dumps = sorted(Path(folder).glob("callgrind.out.*"), key=lambda dump: int(dump.suffix[1:]))
        totals = [re.search(r"^totals: (\d+)", dump.read_text(), re.MULTILINE) for dump in dumps]
        counts = [int(total[1]) / NUMBER for total in totals if total]
    left = iter(counts)
    found: list[dict[str, Any]] = []
    of_block: list[dict[str, Any]] = []
    for line in done.stdout.splitlines():
        number, _, name = line.partition(" ")
        ours, *theirs = [next(left) for _ in range(int(number))]
        if name.startswith((PART, STEP)):
            part = {"name": name.removeprefix(PART).removeprefix(STEP), "instructions": ours}
            of_block.append(part | ({"bare": theirs[0]} if theirs else {}))
        else:
            found.append({"name": name, "seqfuse": ours, "torch": theirs[0], "ratio": ours / theirs[0]})
    assert next(left, None) is None
    return found, of_block


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", default="", help="a regular expression that a row's name contains")
    parser.add_argument("--gate", action="store_true", help="exit status 1 where a row is above its limit")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.only)
        return 0
    found, of_block = counted(arguments.only)
    bad = 0
    for row in found:
        most = MOST_BLOCK if "block" in row["name"] else MOST
        bad += row["ratio"] > most
        print(f"{row['name']:<45} {row['seqfuse']:>9,.0f} {row['torch']:>9,.0f}  {row['ratio']:.2f} of {most}")
    for part in of_block:
        bare = f"{part['bare']:>9,.0f} of them in the calls it makes" if "bare" in part else ""
        print(f"  {part['name']:<53} {part['instructions']:>9,.0f} {bare}".rstrip())
    if not arguments.only:
        print(f"wrote {write('launch', {'launch': found, 'parts': of_block}).name}")
    print(f"{bad} above their limit")
    return 1 if bad and arguments.gate else 0


if __name__ == "__main__":
    raise SystemExit(main())
