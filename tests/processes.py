"""Processes forked from one that has imported torch: groups over gloo, started once for many facts, and scripts."""

from __future__ import annotations

import datetime
import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

Work = Callable[[], None]

SECONDS = 280.0
"""After these a group of processes or a script is killed; conftest.py sets it by pytest's --timeout. A collective fails
after a quarter of them: on a busy machine, where everything takes longer, a longer --timeout lengthens all of it."""

# A process that starts anew imports torch for two seconds, and Dynamo, which most models reach, and what it compiles
# with for two more; one forked from a server that did so starts at once.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([
    "tests.processes",  # which changes torch before Dynamo is imported
    "pytest", "torch._dynamo", "torch.distributed.pipelining", "torch.distributed.fsdp", "torch.distributed.checkpoint",
    "torch.distributed.tensor.parallel", "torch.nn.parallel", "functorch.compile", "torch._dynamo.backends.debugging",
    "torch._functorch.partitioners", "torch._inductor.pattern_matcher", "torch._inductor.debug", "networkx",
    "transformers.models.llama.modeling_llama", "seqfuse.convert.capture", "seqfuse.kernels.norm",
    "seqfuse.kernels.pointwise", "seqfuse.kernels.c.trace", "seqfuse.parallel", "seqfuse.testing",
])  # fmt: skip
# For what imports this library or Triton in its own way.
BARE = forkserver.ForkServer()
BARE.set_forkserver_preload(["tests.processes", "torch.fx.experimental.symbolic_shapes"])
# For what compiles kernels, whatever the process interprets that starts it.
COMPILING = forkserver.ForkServer()
COMPILING.set_forkserver_preload(["tests.compiling"])

FULL = False
"""Whether pytest runs with --full, as conftest.py sets it: for lists of work made when a module is imported."""


# Dynamo empties the processor's caches to time the guards of each graph, and drops the result: 30 ms per graph.
torch._C._dynamo.guards.profile_guard_manager = lambda *guards: 0.0


_SPARSE = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


def lighten() -> None:
    """From here on a process spends less time on the garbage collector and on what torch notes for logs."""
    gc.freeze()  # no collection visits again what has been imported, and copies its pages in a forked process
    gc.set_threshold(10_000, 20, 20)  # tracers allocate much and leave few cycles: 7 % of their time at 700, 10, 10
    if "torch._dynamo" in sys.modules:
        config = sys.modules["torch._dynamo.config"]
        # Read at each step of tracing, through aliases and overrides: 5 % of its time.
        vars(config)["verbose"] = False
        config.side_effect_replay_policy = "silent"  # a stack for each assignment that is traced, for a log
    if "torch._subclasses.fake_tensor" in sys.modules:
        fake: Any = sys.modules["torch._subclasses.fake_tensor"]
        # Asked four times for each result, it makes a set each time.
        fake.is_sparse_any = lambda t: isinstance(t, torch.Tensor) and t.layout in _SPARSE


class Facts:
    """Facts that hold in several processes: `works` by how many of them there are, run once for all tests.

    Args:
        works: module-level functions, which see the group of all processes as the default one.
    """

    def __init__(self, works: Mapping[int, Sequence[Work]]) -> None:
        self.works = works
        self._failed: dict[int, dict[str, str]] = {}

    @property
    def test(self) -> Callable[..., None]:
        """A test of each fact, which fails as the fact did."""
        cases = [
            pytest.param(world, work.__name__, id=f"{work.__name__}-{world}")
            for world, works in self.works.items()
            for work in works
        ]

        @pytest.mark.parametrize(("world", "work"), cases)
        def test(world: int, work: str) -> None:
            if world not in self._failed:
                self._failed[world] = failures(world, self.works[world])
            if work in self._failed[world]:
                pytest.fail(self._failed[world][work], pytrace=False)

        return test


def failures(world: int, works: Sequence[Work]) -> dict[str, str]:
    """What failed, by the name of the function; functions after a failure do not run, which is a failure, too."""
    found: dict[str, str] = {}
    for (name, rank), text in raised(world, works).items():
        found[name] = found.get(name, "") + f"rank {rank}: {text}\n"
    names = [w.__name__ for w in works]
    if found:
        last = max(map(names.index, found))
        found.update(dict.fromkeys(names[last + 1 :], "it did not run: one before it failed"))
    return found


def raised(world: int, works: Sequence[Work], *, patience: float | None = None) -> dict[tuple[str, int], str]:
    """What was raised, by function and rank, in `world` processes that run one function after another up to that.

    Args:
        world: how many processes.
        works: what each of them runs, with the environment variables of now.
        patience: seconds after which a collective of their group fails; a quarter of those for all, if left out.
    """
    patience = SECONDS / 4 if patience is None else patience
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            CONTEXT.Process(target=_process, args=(rank, world, list(works), folder, patience, dict(os.environ)))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        found: dict[tuple[str, int], str] = {}
        deadline = time.monotonic() + SECONDS
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


def _process(
    rank: int, world: int, works: list[Work], folder: str, patience: float, environment: dict[str, str]
) -> None:
    lighten()
    torch.set_num_threads(1)
    os.environ.update(environment)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    file, timeout = f"file://{folder}/rendezvous", datetime.timedelta(seconds=patience)
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=world, timeout=timeout)
    for work in works:
        torch.manual_seed(0)
        try:
            work()
            gc.collect()  # reducers go before the group they use
            if len(works) > 1:
                dist.barrier()  # a rank that failed leaves: the others fail here, rather than pair with its next work
        except BaseException:  # that of a failed assertion of pytest is no Exception
            Path(folder, f"{work.__name__}.{rank}").write_text(traceback.format_exc())
            break
    # Not through the end of the interpreter, where a thread of gloo now and then aborts.
    os._exit(0)


class Script:
    """`python <arguments>` under way, in a process that has imported torch already, and this library unless `bare`.

    Args:
        arguments: a file, `-m` and a module, or `-c` and code, with what it finds in `sys.argv`.
        folder: where it runs.
        environment: its variables, instead of those of this process.
        bare: whether it imports this library itself.
        compiling: whether it compiles kernels, with which it has been imported without Triton's interpreter.
    """

    def __init__(
        self,
        *arguments: str,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        bare: bool = False,
        compiling: bool = False,
    ) -> None:
        self._arguments, self._written = arguments, tempfile.TemporaryDirectory()
        environment = os.environ if environment is None else environment
        args = arguments, str(folder or Path.cwd()), dict(environment), self._written.name
        self._process = CONTEXT.Process(target=_script, args=args)
        own = BARE if bare else COMPILING if compiling else None
        connect = forkserver.connect_to_new_process if own is None else own.connect_to_new_process
        with patch.object(forkserver, "connect_to_new_process", connect):
            self._process.start()

    def done(self) -> subprocess.CompletedProcess[str]:
        """Its exit status and what it wrote, once it has ended; a script that hangs is killed."""
        self._process.join(SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        with self._written as folder:
            out, err = (Path(folder, name).read_text() for name in ("out", "err"))
        return subprocess.CompletedProcess(["python", *self._arguments], self._process.exitcode or 0, out, err)


def _script(arguments: Sequence[str], folder: str, environment: Mapping[str, str], written: str) -> None:
    lighten()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(written, name), os.O_WRONLY | os.O_CREAT), number)
    safe = arguments[0] == "-P"  # nothing is found in its own folder
    first, *rest = arguments[safe:]
    modules = environment.get("PYTHONPATH", "").split(os.pathsep)
    own = [] if safe else [folder if first in ("-c", "-m") else str(Path(first).parent)]
    sys.path[:0] = [*own, *filter(None, modules)]
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")
