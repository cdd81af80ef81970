"""Runs functions in a group of processes that is started once for all of them."""

import datetime
import gc
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PATIENCE = datetime.timedelta(seconds=30)


def _process(rank: int, world: int, works: Sequence[Callable[[], None]], folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    file = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=world, timeout=PATIENCE)
    for work in works:
        torch.manual_seed(0)
        try:
            work()
            dist.barrier()  # a rank that failed leaves: the others fail here, rather than pair with its next work
        except Exception:
            Path(folder, f"{work.__name__}.{rank}").write_text(traceback.format_exc())
            break
    gc.collect()
    # Not through the end of the interpreter, where a thread of gloo now and then aborts.
    os._exit(0)


def failures(world: int, works: Sequence[Callable[[], None]], seconds: float = 240) -> dict[str, str]:
    """What failed, by the name of the function, in `world` processes that run one after another.

    After a failure the rest does not run, which is one, too.
    """
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        context = mp.spawn(_process, (world, works, folder), nprocs=world, join=False)
        deadline = time.monotonic() + seconds
        try:
            while not context.join(timeout=5):
                if time.monotonic() > deadline:
                    raise TimeoutError("the processes hang")
        except Exception as error:
            found[works[0].__name__] = str(error)
            for process in context.processes:
                process.kill()
        for path in sorted(Path(folder).glob("*.[0-9]")):
            found[path.stem] = found.get(path.stem, "") + f"rank {path.suffix[1:]}: {path.read_text()}\n"
    if found:
        last = max([w.__name__ for w in works].index(name) for name in found)
        found.update({w.__name__: "it did not run: one before it failed" for w in works[last + 1 :]})
    return found
