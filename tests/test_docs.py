"""Every python block of README.md and docs/ runs; the blocks of one page are one module, in order."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if page.exists() and "_build" not in page.parts
]
FENCE = re.compile(r"(?P<indent> *)(?P<ticks>`{3,}|~{3,})(?P<info>.*)")


def python_of(markdown: str) -> str:
    """The python blocks of a page with every other line blank, so that line numbers stay those of the page.

    Raises:
        ValueError: a block shows Python but would not run, or is never closed.
    """
    lines = markdown.splitlines()
    code = [""] * len(lines)
    opening: re.Match[str] | None = None
    for number, line in enumerate(lines):
        fence = FENCE.fullmatch(line)
        if opening is None:
            opening = fence
            info = fence["info"].strip() if fence else ""
            if info != "python" and re.search(r"\b(py|python3?|pycon)\b", info):
                raise ValueError(f"line {number + 1}: ```{info} would not run; write ```python, or ```text for output")
        elif fence and fence["ticks"].startswith(opening["ticks"]) and not fence["info"].strip():
            opening = None
        elif opening["info"].strip() == "python":
            code[number] = line.removeprefix(opening["indent"])
    if opening is not None:
        raise ValueError(f"a block opened with {opening[0].strip()} is never closed")
    return "\n".join(code).rstrip() + "\n"


def run_page(name: str, markdown: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    # A module in a real file: class inspection, type hints and tracebacks find the lines of the page.
    path = folder / f"{name}.py"
    path.write_text(python_of(markdown))
    spec = importlib.util.spec_from_file_location(f"page_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    monkeypatch.chdir(folder)
    spec.loader.exec_module(module)
    return vars(module)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_python_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(page.stem, page.read_text(), tmp_path, monkeypatch)


def test_blocks_of_one_page_share_names_and_other_blocks_do_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = "```python\na = 1\n```\n\n```text\nb = 2\n```\n\n- item\n\n  ```python\n  if a:\n      c = a + 2\n  ```\n"
    names = run_page("shared", page, tmp_path, monkeypatch)
    assert names["c"] == 3
    assert "b" not in names


def test_a_failing_block_is_reported_at_its_line_in_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run_page("failing", "# Title\n\n```python\nx = 1\n1 / 0\n```\n", tmp_path, monkeypatch)
    assert caught.traceback[-1].lineno + 1 == 5


@pytest.mark.parametrize("info", ["python no-run", "py", "python3", "{code-block} python", "pycon"])
def test_python_that_would_not_run_is_refused(info: str) -> None:
    with pytest.raises(ValueError, match="would not run"):
        python_of(f"```{info}\nx = 1\n```\n")


def test_a_block_that_is_never_closed_is_refused() -> None:
    with pytest.raises(ValueError, match="never closed"):
        python_of("```python\nx = 1\n")
