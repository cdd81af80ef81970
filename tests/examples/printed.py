"""What README.md and docs/ show and nobody types: printed output, and figures of committed benchmarks.

A `text` block right behind a `python` block is what that block prints. In a `console` block each command
`$ seqfuse ...` or `$ torchrun ...` is run, unless it names a file in `examples/`, and what it prints stands below it,
cut by `| head -N` if it ends so. A block behind `<!-- file: name -->` is that file, which these commands find in the
folder they run in, and does not run itself. Figures stand between two comments, the first of which names the file they
are drawn from; so do the tables of faults, settings and support. A `python` block behind a comment that names a file
and definitions is those. To rewrite all of it, or some pages, run
.venv/bin/python -m tests.examples.printed [docs/tour.md ...]
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

os.environ.setdefault(
    "SEQFUSE_CPU_GEMMS", "torch"
)  # before the package is imported: pages are the same on each processor

from seqfuse.settings import Settings
from tests.examples.counted import source_of

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = ("docs", "docs/dev", "docs/reference")
PAGES = [ROOT / "README.md", *(page for folder in FOLDERS for page in sorted((ROOT / folder).glob("*.md")))]
BLOCK = re.compile(r"^```([\w{}-]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^<!-- file: (\S+) -->\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"\$ (?!.*examples/)((?:\w+=\S+ )*)(seqfuse|torchrun) (.*?)(?: \| head -(\d+))?")
MODULES = {"seqfuse": ("seqfuse",), "torchrun": ("torch.distributed.run", "--standalone")}
MARK = "\x00"
FAULTS = re.compile(r"(?<=<!-- faults: tests/examples/faults.py -->\n).*?(?=<!-- end of faults -->)", re.DOTALL)
INCLUDED = re.compile(r"^(<!-- from (\S+): ([\w, ]+) -->\n```python\n)(?:.*?)(^```$)", re.MULTILINE | re.DOTALL)
SUPPORT = re.compile(r"(<!-- support: (\w+) -->\n).*?(?=<!-- end of support -->)", re.DOTALL)
SETTINGS = re.compile(r"(?<=<!-- settings: seqfuse/settings.py -->\n).*?(?=<!-- end of settings -->)", re.DOTALL)


def included(markdown: str) -> str:
    """The page with current definitions from the files that it quotes."""

    def block(found: re.Match[str]) -> str:
        return f"{found[1]}{source_of(ROOT / found[2], *found[3].split(', '))}{found[4]}"

    return INCLUDED.sub(block, markdown)


def session(text: str) -> None:
    """Print a session in a shell with what `seqfuse` and `torchrun` print now; other commands stay as they are."""
    kept = False
    for line in text.splitlines():
        if line.startswith("$ "):
            found = COMMAND.fullmatch(line)
            kept = found is None
            print(line)
            if found is not None:
                stated = dict(pair.split("=", 1) for pair in found[1].split())
                environment = os.environ | {"OMP_NUM_THREADS": "1"} | stated
                command = [sys.executable, "-m", *MODULES[found[2]], *shlex.split(found[3])]
                done = subprocess.run(command, capture_output=True, text=True, env=environment)
                print(*(done.stdout + done.stderr).splitlines()[: int(found[4]) if found[4] else None], sep="\n")
        elif kept:
            print(line)


def prints(block: re.Match[str]) -> bool:
    """Whether the output of a block is compared: Python that is not a file, and sessions with such commands."""
    if block.string[: block.start()].rpartition("\n\n")[2].startswith("<!-- file: "):
        return False
    return block[1] == "python" or (block[1] == "console" and any(map(COMMAND.fullmatch, block[2].splitlines())))


def run(page: Path, markdown: str) -> list[str]:
    """The output of each block of a page that prints; the blocks are one module with the page's line numbers."""
    code = [""] * (markdown.count("\n") + 1)
    for block in filter(prints, BLOCK.finditer(markdown)):
        first = markdown.count("\n", 0, block.start(2))
        lines = block[2].splitlines()
        if block[1] == "console":
            code[first] = (
                f"import tests.examples.printed; tests.examples.printed.session({block[2]!r}); print({MARK!r})"
            )
        else:
            code[first : first + len(lines)] = lines
            code[first + len(lines)] = f"print({MARK!r})"
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for file in FILE.finditer(markdown):
            Path(folder, file[1]).write_text(file[2])
        path = Path(folder) / f"{page.stem}.py"
        path.write_text("\n".join(code))
        name = f"printed_{page.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out):
                spec.loader.exec_module(module)
        finally:
            del sys.modules[name]
    text = re.sub(r"(compiled by|C \() ?(\S+ [\d.]+)", lambda m: m[0].replace(m[2], "cc 12.2.0"), out.getvalue())
    return text.replace(folder + os.sep, "").split(f"{MARK}\n")[:-1]


def variables() -> str:
    """The table of environment variables, from the object that holds them."""
    lines = ["| variable | values | default | effect |", "| --- | --- | --- | --- |"]
    arguments = str(inspect.getdoc(Settings)).partition("Args:\n")[2]
    entry = re.compile(r"^ *(\w+): `(\w+)` \(([^)]*)\): (.*)\.$", re.MULTILINE)
    said = {found[1]: found for found in entry.finditer(arguments)}
    for field in dataclasses.fields(Settings):
        _, variable, values, effect = said[field.name].groups()
        default = str(int(field.default)) if isinstance(field.default, bool) else str(field.default)
        lines.append(f"| `{variable}` | {values} | `{default}` | {effect} |")
    return "\n".join(lines) + "\n"


def regenerated(page: Path) -> str:
    """The page with everything generated anew."""
    markdown = included(page.read_text())
    outputs = iter(run(page, markdown))
    parts: list[str] = []
    printed: str | None = None
    end = kept = 0
    for block in BLOCK.finditer(markdown):
        if block[1] == "text" and printed is not None and not markdown[end : block.start()].strip():
            parts += [markdown[kept : block.start(2)], printed.rstrip("\n") + "\n"]
            kept = block.end(2)
        printed = next(outputs) if prints(block) else None
        if block[1] == "console" and printed is not None:
            parts += [markdown[kept : block.start(2)], printed]
            kept, printed = block.end(2), None
        end = block.end()
    markdown = "".join([*parts, markdown[kept:]])
    if FAULTS.search(markdown):
        from tests.examples import faults

        markdown = FAULTS.sub(lambda _: faults.table(), markdown)
    if SUPPORT.search(markdown):
        from tests.examples import support

        markdown = SUPPORT.sub(lambda found: found[1] + getattr(support, found[2])(), markdown)
    markdown = SETTINGS.sub(lambda _: variables(), markdown)
    return report().redrawn(markdown)


def report() -> ModuleType:
    """`benchmarks/report.py`, which draws plots and tables."""
    folder = str(ROOT / "benchmarks")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module("report")


if __name__ == "__main__":
    asked = [Path(name).resolve() for name in sys.argv[1:]]
    for page in asked or PAGES:
        new = regenerated(page)
        if new != page.read_text():
            page.write_text(new)
            print(f"rewrote {page.relative_to(ROOT)}")
