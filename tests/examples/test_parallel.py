"""The parallel example, started as by a user."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tests.processes
from tests.processes import Script

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "06_parallel.py"
LINE = re.compile(
    r"parallel: tp (?P<tp>\d) pp (?P<pp>\d) fsdp (?P<fsdp>\d): loss (?P<first>[\d.]+) -> (?P<last>[\d.]+) in "
    r"(?P<steps>\d+) steps, max \|parallel - single\| loss gap (?P<gap>[\d.e-]+), parameters (?P<held>[\d.]+) MB "
    r"on a process \(whole (?P<whole>[\d.]+) MB\)"
)


def torchrun(folder: Path, processes: int, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, str(EXAMPLE), *options], cwd=folder, capture_output=True, text=True, env=environment,
        timeout=tests.processes.SECONDS,
    )  # fmt: skip


def forked(folder: Path, processes: int, *options: str) -> subprocess.CompletedProcess[str]:
    """The result of `torchrun`, with processes that start at once and meet as those of `torchrun` do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        for rank in range(processes)
    ]
    scripts = [
        Script(str(EXAMPLE), *options, folder=folder, environment={**os.environ, **place, **rank}) for rank in ranks
    ]
    ended = [script.done() for script in scripts]
    status = max(abs(done.returncode) for done in ended)
    out, err = ("".join(getattr(done, name) for done in ended) for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess([str(EXAMPLE), *options], status, out, err)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "options", "gap", "share"),
    [(forked, "--pp 2", 0.0, 0.7), (forked, "--fsdp 2", 1e-5, 0.6), (forked, "--tp 2", 1e-5, 0.8)],
    ids=["pp", "fsdp", "tp"],
)
def test_losses_are_those_of_one_process(
    tmp_path: Path, run: Callable[..., subprocess.CompletedProcess[str]], options: str, gap: float, share: float
) -> None:
    data = tmp_path / "text.txt"
    data.write_text("".join(f"{n} and {n + 1} make {2 * n + 1};\n" for n in range(500)))
    dim = "64" if "tp" in options else "32"
    sizes = ["--data", str(data), "--steps", "3", "--layers", "2", "--dim", dim]
    done = run(tmp_path, 2, *options.split(), *sizes)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    found = LINE.fullmatch(lines[-1])
    assert found is not None, done.stdout
    assert len(lines) == 1
    assert float(found["gap"]) <= gap
    assert float(found["last"]) < float(found["first"])
    assert float(found["held"]) <= share * float(found["whole"])


def test_says_how_to_start_it(tmp_path: Path) -> None:
    done = Script(str(EXAMPLE), "--pp", "2", folder=tmp_path).done()
    assert done.returncode == 2
    assert "torchrun --nproc-per-node 2 06_parallel.py" in done.stderr
