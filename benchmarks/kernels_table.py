"""Every kernel at every configuration it may be launched with, compiled for GPUs that need not be here.

Prints one table and ends with the line that says how many spill, do not fit in shared memory, or multiply matrices on
sm_90 without its own instruction. The exit status is not zero if any does on NVIDIA, or if anything does not compile;
what spills on AMD is reported. `--record` keeps what was found in `results/kernels.json`, in the place of what is there
of the same modules and targets.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from record import RESULTS, about, write
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tools.compiled import TARGETS, Compiled, compile_variants
from tools.launches import CALLS

COLUMNS = ("kernel", "variant", "target", "registers", "spills", "shared", "mma", "16-byte", "narrower", "int32 *", "s")


def rows(results: list[Compiled]) -> Iterator[tuple[tuple[str, ...], str]]:
    """The cells of each line and its style."""
    for one in results:
        kernel = one.module.rpartition(".")[2]
        if one.error is not None:
            yield (kernel, one.variant, one.target, one.error, *[""] * (len(COLUMNS) - 4)), "red"
            continue
        bad = one.spills or one.over_shared or one.dot_without_wgmma
        numbers = (
            one.registers, one.spills, one.shared, one.mma, one.wide, one.narrow, one.int32_multiplications,
        )  # fmt: skip
        style = "" if not bad else "yellow" if one.target.startswith("gfx") else "red"
        yield (kernel, one.variant, one.target, *map(str, numbers), f"{one.seconds:.1f}"), style


def summary(results: list[Compiled]) -> tuple[str, bool]:
    """The last line, and whether all is well."""
    nvidia = [one for one in results if one.target.startswith("sm_")]
    spilled = sum(one.spills > 0 for one in nvidia)
    over = sum(one.over_shared for one in nvidia)
    missing = sum(one.dot_without_wgmma for one in nvidia)
    line = (
        f"kernels: {len(results)} variants, {spilled} spilled, {over} over shared memory, "
        f"{missing} dots without wgmma on sm_90"
    )
    return line, not (spilled or over or missing or any(one.error for one in results))


MOST = ("registers", "shared", "int32_multiplications")


def record(results: list[Compiled], commit: str) -> Path:
    """Put a line for each module and target in the place of the recorded one, with the commit it is of."""
    path = RESULTS / "kernels.json"
    old = json.loads(path.read_text())["kernels"] if path.exists() else []
    kept = {(row["module"], row["target"]): row for row in old}
    parts: dict[tuple[str, str], list[Compiled]] = {}
    for one in results:
        parts.setdefault((one.module.rpartition(".")[2], one.target), []).append(one)
    for (module, target), of in parts.items():
        kept[module, target] = {
            "module": module, "target": target, "commit": commit, "configurations": len(of),
            "failed": sum(one.error is not None for one in of), "spilled": sum(one.spills > 0 for one in of),
            "over_shared": sum(one.over_shared for one in of),
            "without_wgmma": sum(one.dot_without_wgmma for one in of),
            **{name: max(getattr(one, name) for one in of) for name in MOST},
        }  # fmt: skip
    rows = [row for (module, _), row in sorted(kept.items()) if module in CALLS]
    return write("kernels", {"triton": version("triton"), "kernels": rows})


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("modules", nargs="*", help="kernel modules by their last name; all by default")
    parser.add_argument("--targets", default=",".join(TARGETS), help="architectures, separated by commas")
    parser.add_argument("--only", default="", help="a regular expression that a variant's name contains")
    parser.add_argument("--jobs", type=int, help="compilers at a time; the number of CPUs by default")
    parser.add_argument("--bad", action="store_true", help="show only what spills, does not fit or does not compile")
    parser.add_argument("--json", type=Path, help="write the results there as well")
    parser.add_argument("--record", action="store_true", help="keep the results in results/kernels.json")
    arguments = parser.parse_args()
    modules = [m for m in CALLS if not arguments.modules or m in arguments.modules]
    targets = arguments.targets.split(",")
    if arguments.record and arguments.only:
        parser.error("--record keeps whole modules, --only leaves some of them out")
    console = Console()
    if not console.is_terminal:
        console.width = 200  # a table in a file is as wide as it needs to be
    results: list[Compiled] = []
    progress = Progress(
        TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn(), console=Console(stderr=True)
    )
    with progress:
        task = progress.add_task("compiled", total=None)
        for one in compile_variants(modules, targets, only=arguments.only, jobs=arguments.jobs):
            results.append(one)
            progress.update(task, completed=len(results))
    table = Table(*COLUMNS, box=None, pad_edge=False)
    for column in table.columns[3:]:
        column.justify = "right"
    for (cells, style), one in zip(rows(results), results, strict=True):
        if not arguments.bad or style or one.error:
            table.add_row(*cells, style=style)
    console.print(table)
    for one in results:
        if one.error is not None:
            console.print(f"{one.variant} for {one.target}: {one.error}", style="red", markup=False)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([dataclasses.asdict(one) for one in results], indent=1) + "\n")
    if arguments.record:
        record(results, about()["commit"])
    line, well = summary(results)
    console.print(line, highlight=False)
    return 0 if well else 1


if __name__ == "__main__":
    raise SystemExit(main())
