"""Scripts that end with the error that a check found, and need nothing of the command line."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from .inputs import Spec
from .output import printable
from .target import Target, Unable

_MADE = "Made by `seqfuse check"
KIT, SAME = "from seqfuse import testing", "from seqfuse.cli.compare import assert_same"


@dataclasses.dataclass(frozen=True)
class Failure:
    """A check that failed: its name, what it said, and the lines that make it fail again where `named` is at hand."""

    check: str
    message: str
    needs: str  # an import
    lines: tuple[str, ...]


def drawn(spec: Spec, device: str) -> str:
    """The line that draws what `spec.draw` draws for checks."""
    if spec.dtype.is_floating_point:
        numbers = f"torch.randn({spec.shape}, generator=torch.Generator().manual_seed(0))"
        return f"x = {numbers}.to({device!r}, {spec.dtype})"
    return f"x = torch.zeros({spec.shape}, dtype={spec.dtype}, device={device!r})"


def script(failure: Failure, target: Target, where: Path) -> str:
    """A script that runs the check again and ends with its error; it finds its module from where it is itself."""
    folder, interpreted = os.path.relpath(target.folder, where), os.environ.get("TRITON_INTERPRET") == "1"
    about = [f"{target.name} fails {failure.check}:", "", *failure.message.splitlines()]
    about += ["", f"{_MADE} {target.name}`; run it with the same Python."]
    lines = [
        *(f"# {printable(line)}".rstrip() for line in about),
        "import importlib",
        "import operator",
        *(["import os"] if interpreted else []),
        "import sys",
        "from pathlib import Path",
        "",
        *(['os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported', ""] if interpreted else []),
        "import torch",
        "",
        failure.needs,
        "",
        f"sys.path.insert(0, str(Path(__file__).resolve().parent / {folder!r}))",
        "torch.manual_seed(0)",
        f"named = operator.attrgetter({target.attribute!r})(importlib.import_module({target.module!r}))",
        "torch.manual_seed(0)  # its import may have drawn",
        *failure.lines,
    ]
    return "\n".join(lines) + "\n"


def check(file: Path) -> None:
    """Refuse to write over a file that is something else.

    Raises:
        Unable: if it is there and was not made by `seqfuse check`.
    """
    if file.is_file() and _MADE not in file.read_text(encoding="utf-8", errors="replace"):
        raise Unable(f"{file} is there and is no script of `seqfuse check`: give --repro another name")


def write(failure: Failure, target: Target, file: Path | None) -> Path:
    """Write the script, where no file is named over the last one of the target alone; returns where it is.

    Raises:
        Unable: if it cannot be written.
    """
    text = script(failure, target, Path.cwd() if file is None else file.resolve().parent).encode()
    own = f"# {_MADE} {printable(target.name)}`".encode()
    stem = "seqfuse_repro_" + "".join(c if c.isalnum() else "_" for c in target.attribute)
    path, number = file or Path(f"{stem}.py"), 1
    try:
        while file is None and os.path.lexists(path) and not (path.is_file() and own in path.read_bytes()):
            number += 1
            path = Path(f"{stem}_{number}.py")
        path.write_bytes(text)
    except OSError as error:
        raise Unable(f"{path} cannot be written: {error.strerror}") from error
    return path
