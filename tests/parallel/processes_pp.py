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


def _process(rank: int, world: int, works: Sequence[Callable[[], None]], folder: str, patience: float) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    file = f"file://{folder}/rendezvous"
    timeout = datetime.timedelta(seconds=patience)
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=world, timeout=timeout)
    for work in works:
        torch.manual_seed(0)
        try:
            work()
            if len(works) > 1:
                dist.barrier()  # a rank that failed leaves: the others fail here, rather than pair with its next work
        except Exception:
            Path(folder, f"{work.__name__}.{rank}").write_text(traceback.format_exc())
            break
    gc.collect()
    # Not through the end of the interpreter, where a thread of gloo now and then aborts.
    os._exit(0)


def raised(
    world: int, works: Sequence[Callable[[], None]], seconds: float = 300, patience: float = 60
) -> dict[tuple[str, int], str]:
    """What was raised, by function and rank, in `world` processes that run one function after another up to that.

    Args:
        world: how many processes.
        works: what each of them runs.
        seconds: after which those that still run are ended.
        patience: the timeout of their group.
    """
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_process, args=(rank, world, works, folder, patience)) for rank in range(world)
        ]
        for process in processes:
            process.start()
        found: dict[tuple[str, int], str] = {}
        deadline = time.monotonic() + seconds
        for rank, process in enumerate(processes):
            process.join(max(deadline - time.monotonic(), 0))
            if process.is_alive():
                process.kill()
                found[works[0].__name__, rank] = "it hangs"
            elif process.exitcode:
                found[works[0].__name__, rank] = f"it exited with {process.exitcode}"
        for path in sorted(Path(folder).glob("*.[0-9]")):
            found[path.stem, int(path.suffix[1:])] = path.read_text()
    return found


def failures(world: int, works: Sequence[Callable[[], None]]) -> dict[str, str]:
    """What failed, by the name of the function; what comes after a failure does not run, which is one, too."""
    found: dict[str, str] = {}
    for (name, rank), text in raised(world, works).items():
        found[name] = found.get(name, "") + f"rank {rank}: {text}\n"
    names = [w.__name__ for w in works]
    if found:
        last = max(map(names.index, found))
        found.update(dict.fromkeys(names[last + 1 :], "it did not run: one before it failed"))
    return found
