"""The first minutes on a GPU: three calls of at most five minutes, each of which settles something if half of it fails.

    python benchmarks/first_hour.py 1     # facts, every kernel and dtype against the reference, tests/gpu
    python benchmarks/first_hour.py 2     # rows beside the peers, then a trace of one layer and counters of six kernels
    python benchmarks/first_hour.py 3     # low precision, tuning, tests of kernels, compute-sanitizer

Each stage is a process of its own, or several at a time, killed from outside when it hangs. Results are whole after
every row; at most eight files come out of a call, in the folder that `OUT` names. `--rehearse` runs all three here:
rows are tiny and interpreted, some are planted to hang and to end their process, and what needs a GPU is left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import warm_cache
from record import RESULTS, ROOT, about

HERE = Path(__file__).resolve().parent
SMOKE_AT_A_TIME, SMOKE_SECONDS = 12, 40.0
ROOMS = {
    "norms": r"^(add \+ |dropout \+ add \+ )?norm",
    "pointwise": r"^(gated )?activation|^dact|^cross-entropy|^rope",
    "attention": r"^(attention (for|back)ward|decode)",
    "blocks": r"block|layer|prefill|experts|converted|memory",
}
DTYPES = ("bfloat16", "float16", "float32")
# Triton 3.6 compiles what launches a kernel by a C compiler, with Python.h: without them none runs.
TOOLS = ("gcc", "nvidia-smi", "ncu", "compute-sanitizer")
MODULES = ("pytest", "xdist", "pytest_timeout", "hypothesis", "liger_kernel", "quack")
# Of the kernels that are looked at: ours begin so, and torch's as well as cuBLAS's do not.
OURS = "^_[a-z]"
# What is left out compiles for GPUs that are not here, is about the interpreter, or runs kernels that are wrong, one of
# which might end a worker's use of the device.
NEED_A_GPU = (
    "not compiles and not without_spills and not mutant and not test_compiled and not test_interpreter "
    "and not test_traffic"
)
SANITIZED = ("norm backward", "dact", "cross-entropy", "decode")


@dataclasses.dataclass
class Call:
    """One call: where its results go, when it has to be over, what is planted, and which of its stages are wanted."""

    out: Path
    until: float
    rehearsal: bool
    only: str = ""
    done: dict[str, Any] = dataclasses.field(default_factory=dict)

    def left(self, share: float = 1.0) -> float:
        """Seconds of what is left."""
        return max(0.0, self.until - time.time()) * share

    def stage(self, name: str, work: Callable[[], Any]) -> None:
        """Do it, whatever came of those before it; what it says is in the summary."""
        if not re.search(self.only, name):
            return
        began = time.time()
        print(f"== {name}, {self.left():.0f} s left", flush=True)
        try:
            found = work() if self.left() > 0 else "no time was left"
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        self.done[name] = {"seconds": round(time.time() - began, 1), "result": found}
        print(f"   {name}: {found}", flush=True)
        (self.out / "summary.json").write_text(json.dumps({"about": about(), "stages": self.done}, indent=1) + "\n")

    def run(self, command: Sequence[str], seconds: float, log: str, **variables: str) -> str:
        """Run one command; why it failed, or `ok`."""
        from gpu.watch import watched

        until, given = min(self.until, time.time() + seconds), environment(self.rehearsal) | variables
        status, why = watched(command, until, log=str(self.out / log), environment=given)
        return why or f"ok ({status})"


def environment(rehearsal: bool) -> dict[str, str]:
    """Of every process: kernels that came packed are found."""
    paths = [
        str(ROOT),
        str(HERE),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]  # peers may be in a folder of their own
    found = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    found |= {"SEQFUSE_TUNE": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    if warm_cache.PACK.exists() and not rehearsal:
        found["TRITON_CACHE_DIR"] = str(warm_cache.FOLDER)
    if rehearsal:
        found |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return found


def python(script: str, *arguments: Any) -> list[str]:
    return [sys.executable, str(HERE / script), *map(str, arguments)]


def facts(call: Call) -> str:
    """What this machine has, what it lacks, and whether a warm cache fits its Triton."""
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    lacking += [name for name in MODULES if importlib.util.find_spec(name) is None]
    lacking += [] if Path(sysconfig.get_path("include"), "Python.h").exists() else ["Python.h"]
    code = (
        "import json, torch, triton; from triton.runtime.cache import triton_key; "
        "print(json.dumps({'torch': torch.__version__, 'triton': triton.__version__, 'key': triton_key(), "
        "'cuda': torch.version.cuda, 'cudnn': torch.backends.cudnn.version(), "
        "'device': torch.cuda.get_device_name() if torch.cuda.is_available() else None}))"
    )
    packed = call.run(python("warm_cache.py", "unpack"), 60, "facts.log")
    told = f"{call.run([sys.executable, '-c', code], 60, 'facts.log')}; warm cache: {packed}"
    return f"{told}; not here: {', '.join(lacking) or 'nothing'}"


def smoke(call: Call) -> str:
    """Every kernel and dtype once, tiny, against the reference: a process for each family and dtype."""
    folder = call.out / "smoke"
    folder.mkdir(exist_ok=True)
    planted = ["--hang", "^norm forward: RMSNorm 24", "--crash", "^norm backward: RMSNorm 24"] if call.rehearsal else []
    waiting = [(room, dtype) for room in ROOMS for dtype in DTYPES]
    if call.rehearsal:
        waiting = [("norms", "float32"), ("pointwise", "float32")]
    from concurrent.futures import ThreadPoolExecutor

    def one(room: str, dtype: str) -> str:
        most = 6.0 if call.rehearsal else SMOKE_SECONDS
        command = python(
            "bench_gpu.py", "--tiny", "--check", "--most", most, "--budget", call.left(0.5), "--dtype", dtype, "--only",
            ROOMS[room], "--out", folder / f"{room}_{dtype}.json", *([] if call.rehearsal else ["--on-gpu"]),
            *(planted if room == "norms" else []),
        )  # fmt: skip
        return call.run(command, call.left(0.5) + 20, "smoke.log")

    with ThreadPoolExecutor(2 if call.rehearsal else SMOKE_AT_A_TIME) as pool:
        ends = dict(zip(waiting, pool.map(lambda pair: one(*pair), waiting), strict=True))
    silent = [f"{room} {dtype}: {why}" for (room, dtype), why in ends.items() if not _rows(folder, room, dtype)]
    rows: dict[str, Any] = {}
    for file in sorted(folder.glob("*.json")):
        rows |= {f"{file.stem} {key}": row for key, row in json.loads(file.read_text())["rows"].items()}
    (call.out / "smoke.json").write_text(json.dumps({"about": about(), "rows": rows}, indent=1) + "\n")
    shutil.rmtree(folder)
    return "; ".join([_said(rows), *(f"no rows of {one}" for one in silent)])


def _rows(folder: Path, room: str, dtype: str) -> dict[str, Any]:
    """What a process has written; nothing where it could not begin."""
    file = folder / f"{room}_{dtype}.json"
    return json.loads(file.read_text())["rows"] if file.exists() else {}


def _said(rows: dict[str, Any]) -> str:
    bad = [f"{key}: {row.get('why', row['status'])}" for key, row in rows.items() if row["status"] in ("red", "failed")]
    return "; ".join([f"{len(rows)} rows, {len(bad)} red or failed", *bad])


def rows(call: Call, seconds: float, only: str, name: str, *arguments: Any) -> str:
    """Rows of the benchmark, each killed when it hangs."""
    out = call.out / name
    tiny = ["--tiny", "--seconds", 0, "--most", 2] if call.rehearsal else []
    budget = min(seconds, call.left() - 15)
    command = python("bench_gpu.py", "--budget", budget, "--only", only, "--out", out, *tiny, *arguments)
    why = call.run(command, budget + 15, "rows.log")
    return _said(json.loads(out.read_text())["rows"]) if out.exists() else why


def tests(call: Call, seconds: float, log: str, *where: str) -> str:
    """Tests, in an order that is drawn, so that a run that is cut off has some of each, and says what failed."""
    command = [
        sys.executable, "-m", "pytest", "-q", "--tb=short", "-rfE", "-p", "no:cacheprovider", "-p", "gpu.tell",
        "--shuffle", "1", "-W", "ignore", *where,
    ]  # fmt: skip
    # Where there is no such plug-in, pytest would refuse its options, and run nothing.
    plugins = {name: importlib.util.find_spec(name) is not None for name in ("xdist", "pytest_timeout")}
    if not call.rehearsal:
        command += ["-n", str(workers()), "--dist", "worksteal"] if plugins["xdist"] else []
        command += ["--timeout", "120", "--timeout-method", "thread"] if plugins["pytest_timeout"] else []
    why = call.run(command, seconds, log)
    tail = (call.out / log).read_text(errors="replace").strip().splitlines()[-1:]
    return f"{why}; {' '.join(tail)}"


def workers() -> int:
    """Processes that share the GPU, of which each takes up to 8 GiB of its memory."""
    import torch

    memory = torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else 0
    return max(1, min(14, memory // (9 * 2**30)))


def sanitizer(call: Call) -> str:
    """compute-sanitizer on one tiny row of four kernels."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return "compute-sanitizer is not here"
    found: list[str] = []
    for only in SANITIZED:
        command = [tool, "--tool", "memcheck", "--error-exitcode", "7"]
        command += python("bench_gpu.py", "--tiny", "--on-gpu", "--check", "--only", f"^{only}", "--dtype", "bfloat16")
        out = call.out / "sanitizer.json"
        command += ["--out", str(out), "--child", "9e9"]
        # A tensor that lies in a larger block of torch's could be left without being noticed.
        found.append(f"{only}: {call.run(command, 60, 'sanitizer.log', PYTORCH_NO_CUDA_MEMORY_CACHING='1')}")
        out.unlink(missing_ok=True)
    return "; ".join(found)


def first(call: Call) -> None:
    call.stage("facts", lambda: facts(call))
    call.stage("smoke", lambda: smoke(call))
    where = ["tests/gpu/test_rows.py", "-k", "activation and 16"] if call.rehearsal else ["tests/gpu"]
    call.stage("tests/gpu", lambda: tests(call, call.left(), "tests_gpu.log", *where))


def second(call: Call) -> None:
    only = "norm forward" if call.rehearsal else ""
    planted = ["--hang", "RMSNorm 17 x 72"] if call.rehearsal else []
    if not call.rehearsal:  # `torch.compile` takes ten seconds for each row, so blocks alone are beside it
        call.stage("blocks", lambda: rows(call, call.left(0.45), "^(MLP|attention) block|^layer", "gpu.json"))
        planted = ["--resume", "--without", "^compile"]
    call.stage("bench", lambda: rows(call, call.left(0.7), only, "gpu.json", *planted))
    call.stage("profile", lambda: profile(call))


def profile(call: Call) -> str:
    """A trace of one layer, and counters of six kernels where ncu is there."""
    tiny = ["--tiny"] if call.rehearsal else []
    found = call.run(python("profile_gpu.py", "--out", call.out, *tiny), min(60, call.left()), "profile.log")
    tool = shutil.which("ncu")
    if tool is None:
        return f"{found}; ncu is not here"
    command = [tool, "--clock-control", "none", "--set", "basic", "--launch-count", "6"]
    command += ["--kernel-name", f"regex:{OURS}"]
    return f"{found}; ncu: {call.run([*command, *python('profile_gpu.py', '--once')], call.left(), 'ncu.txt')}"


def third(call: Call) -> None:
    tiny = ["--tiny"] if call.rehearsal else []
    if not call.rehearsal:
        lowp = python("bench_low_precision.py", "--budget", 40, "--out", call.out / "gpu_low_precision.json")
        call.stage("low precision", lambda: call.run(lowp, 50, "low_precision.log"))
    budget = 20 if call.rehearsal else call.left(0.3)
    command = python("tune_gpu.py", "--budget", budget, *tiny)
    call.stage("tune", lambda: call.run(command, budget + 30, "tune.log"))
    where = ["tests/kernels", "--ignore", "tests/kernels/c", "-k", NEED_A_GPU]
    if call.rehearsal:
        where = ["tests/kernels/test_dropout.py", "-k", "mask"]
    call.stage("tests/kernels", lambda: tests(call, min(200, call.left(0.7)), "tests_kernels.log", *where))
    call.stage("sanitizer", lambda: sanitizer(call))


CALLS: dict[str, tuple[Callable[[Call], None], float]] = {"1": (first, 200), "2": (second, 290), "3": (third, 240)}
MOST_FILES = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("calls", nargs="*", choices=[*CALLS, []], help="which of them; all by default")
    parser.add_argument("--limit", type=float, help="seconds for each call")
    parser.add_argument("--rehearse", action="store_true", help="here, tiny, interpreted, with planted failures")
    parser.add_argument("--stages", default="", help="a regular expression of the stages that are wanted")
    arguments = parser.parse_args()
    bad = 0
    for name in arguments.calls or CALLS:
        work, seconds = CALLS[name]
        out = Path(os.environ.get("OUT") or RESULTS / "first_hour") / (
            f"call{name}" if len(arguments.calls) != 1 else ""
        )
        out.mkdir(parents=True, exist_ok=True)
        os.environ["OUT"], before = str(out), os.environ.get("OUT")
        call = Call(out, time.time() + (arguments.limit or seconds), arguments.rehearse, arguments.stages)
        if name != "1" and not arguments.rehearse:
            call.run(python("warm_cache.py", "unpack"), 60, "unpack.log")
        work(call)
        if before is None:
            del os.environ["OUT"]
        else:
            os.environ["OUT"] = before
        files = [file.name for file in out.iterdir()]
        print(f"call {name}: {out}: {', '.join(sorted(files))}")
        bad += len(files) > MOST_FILES
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
