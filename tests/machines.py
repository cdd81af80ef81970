"""The numeric tests as other processors would run them, or with other seeds: one line of result for each run.

`python -m tests.machines` emulates the processors of `MACHINES` on this one and prints what torch, MKL, oneDNN,
OpenBLAS and numpy then report. `python -m tests.machines --seeds 1-20` draws other numbers instead, and counts the
alarms of each test. Other arguments go to pytest: files in place of all folders, `-k`.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kernels", "ops", "fusions", "testing", "nn", "losses", "inference", "integrations")
# Compilation, for a GPU or by torch.compile, depends on neither.
LEFT_OUT = (
    "kernels/test_compiled.py",
    "kernels/test_traffic.py",
    "fusions/triton/test_compile.py",
    "nn/test_traced.py",
)


class Machine(NamedTuple):
    """A processor: what this one must have, settings, the numpy features to do without, what libraries then report."""

    needs: str
    settings: dict[str, str]
    without: str
    reports: dict[str, str]
    threads: int = 1


def _machine(needs: str, torch: str, mkl: str, onednn: str, openblas: str, without: str, reports: str) -> Machine:
    settings = {"ATEN_CPU_CAPABILITY": torch, "MKL_ENABLE_INSTRUCTIONS": mkl, "ONEDNN_MAX_CPU_ISA": onednn}
    reported = dict(zip(("torch", "MKL", "oneDNN"), reports.split(), strict=True))
    return Machine(needs, {**settings, "OPENBLAS_CORETYPE": openblas}, without, {**reported, "OpenBLAS": openblas})


_HASWELL = _machine("avx2", "avx2", "AVX2", "AVX2", "Haswell", "512|V4", "AVX2 AVX2 AVX2")
# MKL's own selection is for Intel alone, and so is its report. OpenBLAS reports Haswell where it was built without a
# kernel for Zen.
_ZEN = {"MKL_ENABLE_INSTRUCTIONS": "", "MKL_CBWR": "AVX2", "OPENBLAS_CORETYPE": "Zen"}
MACHINES = {
    "sse": _machine("sse4_2", "default", "SSE4_2", "SSE41", "Nehalem", ".", "DEFAULT SSE4.2 SSE4.1"),
    "haswell": _HASWELL,
    "zen": _HASWELL._replace(settings={**_HASWELL.settings, **_ZEN}, reports={"torch": "AVX2", "oneDNN": "AVX2"}),
    "skylake": _machine(
        "avx512dq", "avx512", "AVX512", "AVX512_CORE", "SkylakeX", "CLX|CNL|ICL|SPR", "AVX512 AVX-512 AVX-512"
    ),
    "two threads": Machine("", {}, "", {}, threads=2),
}

PROBE = """
import json, torch, numpy
from numpy._core._multiarray_umath import __cpu_dispatch__ as known, __cpu_features__ as present
a = torch.ones(8, 8)
torch.ops.mkldnn._linear_pointwise(a @ a, a, None, "none", [], "")
features = [name for name in known if present[name]]
print("PROBE", json.dumps([torch.backends.cpu.get_cpu_capability(), features, torch.get_num_threads()]))
"""
REPORTED = {
    "MKL": r"^MKL_VERBOSE oneMKL.*?\(Intel\(R\) ([\w.-]+)\)",
    "oneDNN": r"cpu,isa:(.*)",
    "OpenBLAS": r"^Core: (.*)",
}


def probe(environment: dict[str, str]) -> dict[str, Any]:
    """The instruction set that each library reports."""
    verbose = {"MKL_VERBOSE": "1", "ONEDNN_VERBOSE": "1", "OPENBLAS_VERBOSE": "2"}
    command, inherited = [sys.executable, "-c", PROBE], {**os.environ, **environment, **verbose}
    done = subprocess.run(command, env=inherited, capture_output=True, text=True, check=True)
    said = done.stdout + done.stderr
    torch, numpy, threads = json.loads(re.findall("^PROBE (.*)", said, re.MULTILINE)[0])
    others = {name: (re.findall(pattern, said, re.MULTILINE) or ["unknown"])[0] for name, pattern in REPORTED.items()}
    return {"torch": torch, **others, "numpy": numpy, "threads": threads}


def run(environment: dict[str, str], arguments: list[str], workers: int) -> tuple[list[str], float]:
    """Names of the failed tests, and seconds."""
    begin = time.monotonic()
    command = [sys.executable, "-m", "tests.run", "-q", "-rfE", "--timeout", "1200", *arguments]
    command += ["-n", str(workers)] if workers > 1 else []
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    with tempfile.NamedTemporaryFile("w", prefix="machines-", suffix=".txt", delete=False) as log:
        log.write(done.stdout + done.stderr)
    failed = sorted({*re.findall(r"^(?:FAILED|ERROR) (\S+?::.*?)(?: - .*)?$", done.stdout, re.MULTILINE)})
    if done.returncode:
        print(f"  what pytest printed: {log.name}")
    else:
        Path(log.name).unlink()
    return failed or [f"pytest: exit status {done.returncode}"] * bool(done.returncode), time.monotonic() - begin


def on_machines(names: list[str], workers: int, arguments: list[str]) -> bool:
    """Runs the tests on each machine; whether all passed."""
    own, passed = set(Path("/proc/cpuinfo").read_text().split()), True
    dispatched = probe({})["numpy"]
    for name in names:
        machine = MACHINES[name]
        if machine.needs and machine.needs not in own:
            print(f"{name}: left out, this processor has no {machine.needs}", flush=True)
            continue
        off = [f for f in dispatched if machine.without and re.search(machine.without, f)]
        environment = {"SEQFUSE_CPU_GEMMS": "auto", **machine.settings, "OMP_NUM_THREADS": str(machine.threads)}
        environment |= {"NPY_DISABLE_CPU_FEATURES": " ".join(off)} if off else {}
        environment = {key: value for key, value in environment.items() if value}
        found = probe(environment)
        asked = {key: value for key, value in machine.reports.items() if key != "MKL" or "GenuineIntel" in own}
        wrong = [f"{key} is to report {value}" for key, value in asked.items() if value not in found[key]]
        print(f"{name}: {', '.join(f'{k} {v}' for k, v in found.items())}", *wrong, sep="\n  ", flush=True)
        failed, seconds = run(environment, arguments, max(1, workers // machine.threads))
        print(f"  {len(failed)} failed, {seconds:.0f} s", *failed, sep="\n    ", flush=True)
        passed &= not failed and not wrong
    return passed


def on_seeds(seeds: str, workers: int, arguments: list[str]) -> bool:
    """Runs the tests under each seed and counts failures; whether there were none."""
    failed, seconds = run({}, ["--seed", seeds, *arguments], workers)
    print(f"seeds {seeds}: {len(failed)} alarms, {seconds:.0f} s", *failed, sep="\n  ")
    for test, count in collections.Counter(re.sub(r"-?seed \d+", "", name) for name in failed).most_common():
        print(f"{count} x {test}")
    return not failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", action="append", choices=MACHINES, help="one of them; may be repeated")
    parser.add_argument("--seeds", help="other seeds in place of other processors: 1-20")
    parser.add_argument("--workers", type=int, default=2, help="processes that test at once")
    given, rest = parser.parse_known_args()
    if not any(argument.startswith("tests/") for argument in rest):
        rest += [f"tests/{folder}" for folder in FOLDERS] + [f"--ignore=tests/{name}" for name in LEFT_OUT]
    if given.seeds:
        return not on_seeds(given.seeds, given.workers, rest)
    return not on_machines(given.machine or list(MACHINES), given.workers, rest)


if __name__ == "__main__":
    sys.exit(main())
