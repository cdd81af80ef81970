"""Measures everything that needs a GPU in three calls of at most five minutes, as lists of commands with time limits.

    python benchmarks/first_hour.py 1     # tests/gpu: every row and dtype against the reference, models, recipes
    python benchmarks/first_hour.py 2     # rows against the peers, kernel times of a layer
    python benchmarks/first_hour.py 3     # low precision, tuning, tests of kernels, compute-sanitizer

A command that fails or runs out of time loses only its own results. All results and logs, and `summary.json` with the
outcome of each command, are in the folder in `OUT`. `--rehearse` runs the same commands here, tiny and interpreted,
except those that need a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import warm_cache
from gpu.watch import watched
from record import RESULTS, ROOT, about

HERE = Path(__file__).resolve().parent
SECONDS = {"1": 200, "2": 290, "3": 240}
WORKERS = 8  # test processes that share the GPU; each takes up to 8 GiB of its memory
MARGIN = 15  # seconds that a command with its own time limit keeps in reserve
# Excluded: tests that compile for other GPUs, tests of the interpreter, and wrong kernels, which might end a worker's
# use of the device.
NEED_A_GPU = "not (compiles or without_spills or mutant or test_compiled or test_interpreter or test_traffic)"
SANITIZED = ("norm backward", "dact", "cross-entropy", "decode")
Command = Sequence[object]


class Stage(NamedTuple):
    """A group of commands with a common time limit."""

    name: str
    seconds: float  # for all of them
    commands: Sequence[Command]  # `{left}` is replaced by the remaining seconds

    def run(self, until: float, out: Path, variables: Mapping[str, str]) -> list[str]:
        """The outcome of each command, and the last line that it printed."""
        until = min(until, time.time() + self.seconds)

        def one(i: int, command: Command) -> str:
            log = out / f"{self.name}{i or ''}.log".replace("/", "_")
            if (left := until - time.time()) <= 0:
                return "no time was left"
            parts = [str(part).format(left=max(1, int(left) - MARGIN)) for part in command]
            try:
                _, why = watched(parts, until, log=str(log), environment=variables)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            return f"{why or 'ok'}: {log.read_text(errors='replace').strip().rpartition(chr(10))[2]}"

        return [one(i, command) for i, command in enumerate(self.commands)]


def python(script: str, *arguments: object) -> list[object]:
    return [sys.executable, HERE / script, *arguments]


def stages(call: str, out: Path) -> list[Stage]:
    """The stages of a call."""
    rows = python("bench_gpu.py", "--budget", "{left}")
    if call == "1":
        return [Stage("tests/gpu", 200, [tests("tests/gpu")])]
    if call == "2":
        return [
            # `torch.compile` takes ten seconds for each row, so it is compared only for blocks.
            Stage("blocks", 130, [[*rows, "--only", "^(MLP|attention) block|^layer"]]),
            Stage("bench", 100, [[*rows, "--resume", "--without", "^compile"]]),
            Stage("profile", 60, [python("layers_gpu.py", "profile")]),
        ]
    recipes = [*rows, "--only", "^recipes", "--out", out / "gpu_low_precision.json"]
    # Otherwise torch's caching allocator would hide accesses beyond a tensor, in the same larger block.
    memcheck = ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", "compute-sanitizer", "--tool", "memcheck"]
    memcheck += ["--error-exitcode", 7, *rows, "--tiny", "--on-gpu", "--check", "--dtype", "bfloat16"]
    memcheck += ["--out", out / "sanitizer.json", "--child", "9e9", "--only"]
    return [
        Stage("low precision", 55, [recipes]),
        Stage("tune", 100, [python("layers_gpu.py", "tune", "--budget", "{left}")]),
        Stage("tests/kernels", 200, [tests("tests/kernels", "--ignore", "tests/kernels/c", "-k", NEED_A_GPU)]),
        Stage("sanitizer", 240, [[*memcheck, f"^{only}"] for only in SANITIZED]),
    ]


def rehearsed(stage: Stage) -> Stage:
    """The part of a stage that can run here: tiny interpreted rows, and collection of tests."""
    ours = [command for command in stage.commands if command[0] == sys.executable]
    how = ["--collect-only"] if stage.name.startswith("tests") else ["--tiny"]
    commands = [[part for part in command if part != "--on-gpu"] + how for command in ours]
    return stage._replace(commands=commands)


def tests(*where: str) -> Command:
    """A pytest command in random order, so that an interrupted run has some tests of each kind; reports failures."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-rfE", "-W", "ignore", "--shuffle", "1"]
    command += ["-n", WORKERS, "--dist", "worksteal", "--timeout", "120", "--timeout-method", "thread"]
    return [*command, "-p", "no:cacheprovider", "-p", "gpu.watch", *where]


def environment(rehearsal: bool, out: Path) -> dict[str, str]:
    """The environment of every process: with packed kernels, and with peers in `PYTHONPATH`."""
    paths = (str(ROOT), str(HERE), os.environ.get("PYTHONPATH", ""))
    given = {
        **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OUT": str(out), "SEQFUSE_TUNE": "0",
        "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1", "TRITON_DEFAULT_FP_FUSION": "1",
    }  # fmt: skip
    if rehearsal:
        return given | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return given | ({"TRITON_CACHE_DIR": str(warm_cache.FOLDER)} if warm_cache.PACK.exists() else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("calls", nargs="*", choices=[*SECONDS, []], help="which of them; all by default")
    parser.add_argument("--limit", type=float, help="seconds for each call")
    parser.add_argument("--rehearse", action="store_true", help="here, tiny and interpreted")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    for call in arguments.calls or SECONDS:
        out = Path(os.environ.get("OUT") or RESULTS / "first_hour", f"call{call}")
        until = time.time() + (arguments.limit or SECONDS[call])
        if arguments.rehearse:
            chosen = [stage for stage in map(rehearsed, stages(call, out)) if stage.commands]
        else:
            chosen = [Stage("unpack", 60, [python("warm_cache.py", "unpack")]), *stages(call, out)]
        perform(chosen, until, out, environment(arguments.rehearse, out))


def perform(chosen: Sequence[Stage], until: float, out: Path, variables: Mapping[str, str]) -> dict[str, Any]:
    """Run stages one after the other, also after failures, and write the outcome of each."""
    out.mkdir(parents=True, exist_ok=True)
    done: dict[str, Any] = {}
    for stage in chosen:
        began = time.time()
        print(f"== {stage.name}, {until - began:.0f} s left", flush=True)
        results = stage.run(until, out, variables)
        done[stage.name] = {"seconds": round(time.time() - began, 1), "results": results}
        print(*(f"   {result}" for result in results), sep="\n", flush=True)
        (out / "summary.json").write_text(json.dumps({"about": about(), "stages": done}, indent=1) + "\n")
    return done


if __name__ == "__main__":
    main()
