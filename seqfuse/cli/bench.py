"""`seqfuse bench`: the benchmarks of a clone of the repository."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .target import Unable

_PREFIX = "bench_"


def programs() -> dict[str, Path]:
    """The benchmarks by name, of a clone that the package stands in or that this folder belongs to.

    Raises:
        Unable: where there is no clone.
    """
    here = Path.cwd()
    for root in (Path(__file__).resolve().parents[2], here, *here.parents):
        found = sorted((root / "benchmarks").glob(f"{_PREFIX}*.py"))
        if found and (root / "seqfuse" / "__init__.py").is_file():
            return {path.stem.removeprefix(_PREFIX): path for path in found}
    raise Unable("benchmarks are not part of the package: run this within a clone of the repository")


def described(path: Path) -> str:
    """The first line of a benchmark's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def run(name: str, arguments: Sequence[str]) -> int:
    """Run a benchmark; returns its exit status.

    Raises:
        Unable: where there is no such benchmark, or it is not here.
    """
    known = programs()
    if name not in known:
        raise Unable(f"there is no benchmark {name!r}; there are {', '.join(known)}")
    path = known[name]
    return subprocess.run([sys.executable, str(path), *arguments], cwd=path.parent.parent, check=False).returncode
