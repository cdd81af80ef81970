"""A stack of layers divided over 1, 2 and 4 processes of this machine (gloo): what it computes, holds and sends.

For each number of processes, with all rows in each of them and with a sequence shard: the largest error of any
gradient against one process, relative to that gradient's largest number; bytes of parameters a process holds, and of
what it keeps for the backward pass; bytes that go into collectives in one training step, counted operator by operator,
and what a ring sends for them, beside the formula of Megatron-LM (four sums of the hidden states a layer); time to
plan; and host time of a step so small that it is all overhead. Times of processes that share few cores say how overhead
grows, not how fast a cluster is. Writes `results/parallel.json`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from record import write
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import seqfuse as sf
from seqfuse import parallel

LAYERS, WIDTH, HEADS, HIDDEN, ROWS, LENGTH = 4, 128, 8, 512, 4, 64
PLAN = {"*attention.mixer": "heads", "*feedforward.mixer": "features"}


class Sent(TorchDispatchMode):
    """Bytes that enter collectives, and what each process of a ring sends for them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.calls, self.payload, self.ring = size, dict[str, int](), 0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if func.namespace == "_c10d_functional" and name != "wait_tensor":
            self.calls[name] = self.calls.get(name, 0) + 1
            # The whole tensor: what is summed, scattered, or comes out of a gather.
            whole = args[0].numel() * args[0].itemsize * (self.size if "gather" in name else 1)
            self.payload += whole
            self.ring += whole * (self.size - 1) / self.size * (2 if name == "all_reduce" else 1)
        return func(*args, **(kwargs or {}))


def stack(dtype: torch.dtype) -> sf.Sequential:
    torch.manual_seed(0)
    return sf.nn.TransformerStack(LAYERS, WIDTH, HEADS, hidden_dim=HIDDEN, causal=True, dtype=dtype)


def step(model: sf.Sequential, x: Tensor, dy: Tensor) -> Tensor:
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = model(x)
    y.backward(dy)
    assert x.grad is not None
    return x.grad


def errors(model: sf.Sequential, dtype: torch.dtype, own: Any) -> dict[str, float]:
    """The largest error of a gradient relative to its largest number, against one process of the same dtype."""
    whole = stack(dtype)
    x, dy = (torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(s)).to(dtype) for s in (1, 2))
    dx, expected_dx = step(model, own(x), own(dy)), step(whole, x, dy)
    grads = {name: p.grad for name, p in model.named_parameters()}
    state: Any = {name: p.grad for name, p in whole.named_parameters()}
    expected: dict[str, Tensor] = parallel.shard(model, state)
    pairs = [(dx, own(expected_dx)), *((grads[name], expected[name]) for name in expected)]
    return {"gradient": max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)}


def kept_bytes(model: sf.Sequential, x: Tensor) -> int:
    """Bytes that a forward pass keeps for the backward, parameters apart, each storage once."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model(x.detach().requires_grad_())
    del y
    return sum(storages.values())


def measure(rank: int, size: int, rows: bool, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    file, patience = f"file://{folder}/rendezvous", datetime.timedelta(seconds=300)
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=size, timeout=patience)
    group, dim = dist.group.WORLD, -2 if rows else None

    def own(t: Tensor) -> Tensor:
        return t.chunk(size, -2)[rank] if rows else t

    row: dict[str, Any] = {"processes": size, "shares_of_rows": rows}
    for dtype in (torch.float32, torch.float64):
        model = parallel.parallelize(stack(dtype), group, PLAN, sequence_dim=dim)
        row[f"error_{str(dtype).removeprefix('torch.')}"] = errors(model, dtype, own)["gradient"]
    model = parallel.parallelize(stack(torch.float32), group, PLAN, sequence_dim=dim)
    row["parameter_bytes"] = sum(p.numel() * p.itemsize for p in model.parameters())
    x = own(torch.randn(ROWS, LENGTH, WIDTH))
    start = time.perf_counter()
    model.plan(x)
    row["plan_seconds"] = time.perf_counter() - start
    step(model, x, x)
    row["kept_bytes"] = kept_bytes(model, x)
    with Sent(size) as sent:
        step(model, x, x)
    hidden = ROWS * LENGTH * WIDTH * 4
    # Where every process has a sequence shard a sum is a scatter and a gather, which a ring sends as one.
    textbook = 4 * LAYERS * hidden * 2 * (size - 1) / size
    row |= {
        "collectives": sent.calls,
        "payload_bytes": sent.payload,
        "ring_bytes": sent.ring,
        "formula_bytes": textbook,
    }
    small = own(torch.randn(1, 4, WIDTH))
    times: list[float] = []
    for _ in range(30):
        start = time.perf_counter()
        step(model, small, small)
        times.append(time.perf_counter() - start)
    row["small_step_microseconds"] = statistics.median(times[5:]) * 1e6
    if rank == 0:
        Path(folder, "row.json").write_text(json.dumps(row))
    dist.barrier()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    found: list[dict[str, Any]] = []
    for size in parser.parse_args().processes:
        for rows in (False, True) if size > 1 else (False,):
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(measure, (size, rows, folder), nprocs=size)
                found.append(json.loads(Path(folder, "row.json").read_text()))
                print(json.dumps(found[-1]))
    shape = {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "hidden": HIDDEN, "rows": ROWS, "length": LENGTH}
    write("parallel", {"stack": shape, "parallel": found})


if __name__ == "__main__":
    main()
