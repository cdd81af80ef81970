"""Train the language model of train_lm.py on several processes, and compare its losses with training on one.

    torchrun --nproc-per-node 2 examples/06_parallel.py --pp 2

`--pp` is pipeline parallel: each process has a few layers. `--tp` is tensor parallel: each process has a few heads and
hidden features. `--fsdp` divides the batch and shards the parameters (FSDP2). They combine, and the number of processes
is their product. The training loop is the same for all.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from train_lm import BATCH, CONTEXT, HEAD, read_bytes, windows_at

import seqfuse as sf
from seqfuse import ops
from seqfuse.nn import TransformerStack
from seqfuse.parallel import clip_grad_norm_, everywhere, parallelize, pipeline


def whole_model(args: argparse.Namespace) -> sf.Sequential:
    """From bytes to logits of the next byte. Every process makes the same model and then keeps its part of it."""
    torch.manual_seed(args.seed)
    model = sf.Sequential(
        ops.Embedding(256, args.dim),
        ops.PositionEmbedding(CONTEXT, args.dim),
        TransformerStack(args.layers, args.dim, args.dim // HEAD, causal=True, dropout=0.05),
        ops.Linear(args.dim, 256),
    )
    for module in model.modules():
        if isinstance(module, ops.Dropout) and args.fsdp > 1:
            module.p = 0.0  # data-parallel ranks draw different masks, so losses would not be comparable
    return model.to(args.device)


def divided(model: sf.Sequential, mesh: DeviceMesh, args: argparse.Namespace) -> sf.Sequential:
    """The part of this process: its heads and hidden features, of the layers of its stage, sharded."""
    if args.tp > 1:
        parallelize(model, mesh["tp"], {"*attention.mixer": "heads", "*feedforward.mixer": "features"})
    if args.pp > 1:
        pipeline(model, mesh["pp"], stages=[f"2.{stage * args.layers // args.pp}" for stage in range(1, args.pp)])
    if args.fsdp > 1:
        layers = [child for name, child in model[2].named_children() if not name.startswith("boundary")]
        for part in (model[0], model[1], *layers, model[-1]):
            if not next(part.parameters()).is_meta:
                fully_shard(part, mesh=mesh["fsdp"])
    return model


def train(model: sf.Sequential, text: Tensor, args: argparse.Namespace, mesh: DeviceMesh | None) -> list[float]:
    """An ordinary training loop. Returns the loss of each step, the same on every process."""
    optimizer = torch.optim.AdamW((p for p in model.parameters() if not p.is_meta), lr=3e-3, betas=(0.9, 0.98))
    batches = torch.Generator().manual_seed(args.seed)
    losses: list[float] = []
    for step in range(args.steps):
        windows = windows_at(text, torch.randint(len(text) - CONTEXT, (BATCH,), generator=batches)).to(args.device)
        if mesh is not None and args.fsdp > 1:
            windows = windows.chunk(args.fsdp)[mesh["fsdp"].get_local_rank()]
        torch.manual_seed(args.seed + step)
        loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        losses.append(mean(loss.detach(), model, args, mesh))
    return losses


def mean(loss: Tensor, model: sf.Sequential, args: argparse.Namespace, mesh: DeviceMesh | None) -> float:
    if mesh is not None and args.pp > 1:
        loss = everywhere(loss, model)
    if mesh is not None and args.fsdp > 1:
        dist.all_reduce(loss, group=mesh["fsdp"].get_group())
        loss /= args.fsdp
    return loss.item()


def own_bytes(model: sf.Sequential) -> int:
    own = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return sum(p.nbytes for p in own if not p.is_meta)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="processes that divide heads and features")
    parser.add_argument("--pp", type=int, default=1, help="stages, each of one or more layers")
    parser.add_argument("--fsdp", type=int, default=1, help="processes that divide the batch and shard parameters")
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    parser.add_argument("--data", type=Path, default=stdlib, help="a text file, or a folder of Python sources")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--dim", type=int, default=64, help=f"width of the model, a multiple of {HEAD}")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    size = args.tp * args.pp * args.fsdp
    if min(args.tp, args.pp, args.fsdp, args.steps) < 1 or args.layers < args.pp or args.dim % (HEAD * args.tp):
        parser.error(f"a stage has a layer or more, and each of {args.tp} processes a head of {HEAD} or more")
    if BATCH % args.fsdp:
        parser.error(f"{args.fsdp} processes cannot divide a batch of {BATCH}")
    if int(os.environ.get("WORLD_SIZE", "0")) != size:
        parser.error(f"start it in {size} processes: torchrun --nproc-per-node {size} {parser.prog} ...")

    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= size
    args.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(args.device)
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo")
    mesh = init_device_mesh(args.device.type, (args.pp, args.fsdp, args.tp), mesh_dim_names=("pp", "fsdp", "tp"))

    text, _ = read_bytes(args.data)
    model = divided(whole_model(args), mesh, args)
    held: list[int] = [0] * size
    dist.all_gather_object(held, own_bytes(model))
    losses = train(model, text, args, mesh)

    if dist.get_rank() == 0:
        alone = whole_model(args)
        whole = own_bytes(alone)
        expected = train(alone, text, args, None)
        gap = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        print(
            f"parallel: tp {args.tp} pp {args.pp} fsdp {args.fsdp}: loss {losses[0]:.4f} -> {losses[-1]:.4f} in "
            f"{args.steps} steps, max |parallel - single| loss gap {gap:.2g}, parameters {max(held) / 1e6:.2f} MB "
            f"on a process (whole {whole / 1e6:.2f} MB)",
            flush=True,
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
