"""Scripts that end with the error that a check found, and need nothing of the command line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from .inputs import Spec
from .output import printable
from .target import Target, Unable


@dataclasses.dataclass(frozen=True)
class Failure:
    """A check that failed: its name, what it said, and the lines that make it fail again, `named` and x at hand."""

    check: str
    message: str
    spec: Spec
    lines: tuple[str, ...]


def script(failure: Failure, target: Target, device: str) -> str:
    """A script that runs the check again and ends with its error."""
    about = [f"{target.name} fails {failure.check}:", "", *failure.message.splitlines()]
    about += ["", f"Made by `seqfuse check {target.name}`; run it with the same Python."]
    comments = [f"# {printable(line)}".rstrip() for line in about]
    shape, dtype = failure.spec.shape, failure.spec.dtype
    if dtype.is_floating_point:
        drawn = f"torch.randn({shape}, generator=generator).to({device!r}, {dtype})"
    else:
        drawn = f"torch.zeros({shape}, dtype={dtype}, device={device!r})"
    return "\n".join(
        [
            *comments,
            "import importlib",
            "import operator",
            "import sys",
            "",
            "import torch",
            "",
            "from seqfuse import testing",
            "from seqfuse.cli.compare import assert_same",
            "",
            f"sys.path.insert(0, {target.folder!r})",
            "torch.manual_seed(0)",
            "generator = torch.Generator().manual_seed(0)",
            f"x = {drawn}",
            f"named = operator.attrgetter({target.attribute!r})(importlib.import_module({target.module!r}))",
            *failure.lines,
            "",
        ]
    )


def write(failure: Failure, target: Target, device: str, file: Path | None) -> Path:
    """Write the script; returns where it is.

    Raises:
        Unable: if it cannot be written.
    """
    stem = "".join(c if c.isalnum() else "_" for c in target.attribute)
    path = file or Path(f"seqfuse_repro_{stem}.py")
    try:
        path.write_text(_only_needed(script(failure, target, device)), encoding="utf-8")
    except OSError as error:
        raise Unable(f"{path} cannot be written: {error.strerror}") from error
    return path


def _only_needed(text: str) -> str:
    """Without the import of the two that the last lines do not use."""
    body = text.partition("\nx = ")[2]
    unused = [line for line in text.splitlines() if line.startswith("from seqfuse") and line.split()[-1] not in body]
    return "\n".join(line for line in text.splitlines() if line not in unused) + "\n"
