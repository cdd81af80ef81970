"""Compiles every kernel in every configuration that may be launched, for GPUs that this machine need not have.

The last line has the numbers of configurations that spill, exceed shared memory, or multiply matrices on sm_90 without
`wgmma`. The exit status is nonzero if there are any on NVIDIA, or if a configuration does not compile. `--record`
writes the results to `results/kernels.json`, where they replace those of the same modules and targets.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path

from record import RESULTS, about, write

from tools.compiled import TARGETS, Compiled, compile_variants
from tools.launches import CALLS

MOST = ("registers", "shared", "int32_multiplications")


def line(one: Compiled) -> str:
    numbers = (f"{name} {getattr(one, name)}" for name in (*MOST, "spills", "mma", "wide", "narrow"))
    said = one.error or ", ".join([*numbers, f"{one.seconds:.1f} s"])
    return f"{one.module} {one.variant} {one.target}: {said}"


def counts(of: list[Compiled]) -> dict[str, int]:
    """The numbers of configurations with each defect."""
    return {
        "failed": sum(one.error is not None for one in of), "spilled": sum(one.spills > 0 for one in of),
        "over_shared": sum(one.over_shared for one in of), "without_wgmma": sum(one.dot_without_wgmma for one in of),
    }  # fmt: skip


def record(results: list[Compiled], commit: str) -> Path:
    """Replace the recorded row of each module and target, with the current commit."""
    path = RESULTS / "kernels.json"
    old = json.loads(path.read_text())["kernels"] if path.exists() else []
    kept = {(row["module"], row["target"]): row for row in old}
    parts: dict[tuple[str, str], list[Compiled]] = {}
    for one in results:
        parts.setdefault((one.module.rpartition(".")[2], one.target), []).append(one)
    for (module, target), of in parts.items():
        most = {name: max(getattr(one, name) for one in of) for name in MOST}
        row = {"module": module, "target": target, "commit": commit, "configurations": len(of)}
        kept[module, target] = {**row, **counts(of), **most}
    rows = [row for (module, _), row in sorted(kept.items()) if module in CALLS]
    return write("kernels", {"triton": version("triton"), "kernels": rows})


def summary(results: list[Compiled]) -> tuple[str, bool]:
    """The summary line, and whether no configuration has a defect."""
    nvidia = counts([one for one in results if one.target.startswith("sm_")])
    said = "{spilled} spilled, {over_shared} over shared memory, {without_wgmma} dots without wgmma on sm_90"
    good = not any(nvidia.values()) and not counts(results)["failed"]
    return f"kernels: {len(results)} variants, {said.format(**nvidia)}", good


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("modules", nargs="*", help="kernel modules by their last name; all by default")
    parser.add_argument("--targets", default=",".join(TARGETS), help="architectures, separated by commas")
    parser.add_argument("--only", default="", help="a regular expression that a variant's name contains")
    parser.add_argument("--jobs", type=int, help="compilers at a time; the number of CPUs by default")
    parser.add_argument("--bad", action="store_true", help="show only what spills, does not fit or does not compile")
    parser.add_argument("--record", action="store_true", help="keep the results in results/kernels.json")
    arguments = parser.parse_args()
    modules = [m for m in CALLS if not arguments.modules or m in arguments.modules]
    if arguments.record and arguments.only:
        parser.error("--record keeps whole modules, --only leaves some of them out")
    results: list[Compiled] = []
    for one in compile_variants(modules, arguments.targets.split(","), only=arguments.only, jobs=arguments.jobs):
        results.append(one)
        if any(counts([one]).values()) or not arguments.bad:
            print(line(one), flush=True)
    if arguments.record:
        record(results, about()["commit"])
    said, good = summary(results)
    print(said)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
