"""Printed output and results in README.md and docs/ are current."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from seqfuse.env import why_no_c
from tests.examples import faults, printed
from tests.processes import Script

run = subprocess.run


def forked(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Like `subprocess.run`; Python runs in a process that has imported torch already."""
    if command[0] != sys.executable:  # a compiler of kernels
        return run(command, **options)
    environment = options.get("env", os.environ)
    return Script(*command[1:], environment=environment, bare="TRITON_INTERPRET" in environment).done()


@pytest.mark.skipif(bool(why_no_c()), reason="pages show what is printed where C kernels run")
@pytest.mark.parametrize("page", printed.PAGES, ids=lambda page: page.name)
def test_shown_output_is_what_is_printed(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", forked)
    assert printed.regenerated(page) == page.read_text(), "run: .venv/bin/python -m tests.examples.printed"


def test_only_a_text_block_right_behind_a_python_block_is_output(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nn = 1\nprint(n)\n```\n\n```text\nstale\n```\n\n```text\nkept\n```\n\n"
        "```python\nprint(n + 1)\n```\nwords\n\n```text\nkept too\n```\n\n"
        "```python\nprint(__file__)\n```\n```text\n```\n"
    )
    shown = printed.regenerated(page)
    assert "stale" not in shown
    assert "```text\n1\n```" in shown
    assert "kept\n" in shown
    assert "kept too\n" in shown
    assert "```text\npage.py\n```" in shown


def test_commands_in_a_console_block_are_run_and_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", forked)
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- file: made.py -->\n```python\nimport seqfuse as sf\n\nmodel = sf.Sequential(sf.ops.ReLU())\n```\n\n"
        "```console\n$ make test\nkept\n$ SEQFUSE_FUSING=0 seqfuse plan made.py:model | head -1\nstale\n```\n\n"
        "```console\n$ make demo\nkept too\n```\n\n```python\nprint('model' in globals())\n```\n```text\n```\n"
    )
    shown = printed.regenerated(page)
    assert "stale" not in shown
    assert "$ make test\nkept\n$ SEQFUSE_FUSING=0 seqfuse plan made.py:model | head -1\nPlan for cpu float32" in shown
    assert "$ make demo\nkept too\n```" in shown
    assert "```text\nFalse\n```" in shown


def test_figures_are_drawn_between_their_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[printed.report().drawn.__module__], "RESULTS", tmp_path)
    page = tmp_path / "page.md"
    marks = "<!-- figures: benchmarks/results/host.json -->\n{}<!-- end of figures -->\n"
    page.write_text(marks.format("none yet\n"))
    assert printed.regenerated(page) == page.read_text()
    (tmp_path / "planning.json").write_text(
        '{"planning": [{"operations": 1000, "plan_seconds": 0.0205, "lookup_microseconds": 31.4}]}'
    )
    assert printed.regenerated(page) == page.read_text()
    (tmp_path / "host.json").write_text(
        '{"about": {"device": "cpu", "torch": "2", "python": "3", "commit": "0123456789"},'
        '"host": [{"operations": 6, "what": "forward", "ratio": 1.016},'
        '{"operations": 6, "what": "forward+backward", "ratio": 0.9},'
        '{"operations": 6, "what": "no grad", "ratio": 1}]}'
    )
    shown = printed.regenerated(page)
    assert "| 6 | 1.02 | 0.90 | 1.00 |" in shown
    assert "| 1,000 | 20.5 ms | 31 µs |" in shown
    assert "none yet" not in shown


def test_definitions_are_taken_from_the_file_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printed, "ROOT", tmp_path)
    (tmp_path / "code.py").write_text(
        "import abc\n\n@staticmethod\ndef one():\n    return 1\n\ndef two():\n    return 2\n"
    )
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- from code.py: two, one -->\n```python\nstale = 1\n```\n\n```python\nprint(one() + two())\n```\n"
    )
    shown = "def two():\n    return 2\n\n\n@staticmethod\ndef one():\n    return 1\n"
    assert f"-->\n```python\n{shown}```\n" in printed.regenerated(page)
    page.write_text("<!-- from code.py: three -->\n```python\n```\n")
    with pytest.raises(KeyError, match="three"):
        printed.regenerated(page)


def test_faults_are_made_and_their_answers_shown(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- faults: tests/examples/faults.py -->\nstale\n<!-- end of faults -->\n")
    shown = printed.regenerated(page)
    assert "stale" not in shown
    assert shown.count("\n- ") == sum(map(len, faults.FAULTS.values()))
    with pytest.raises(AssertionError, match="nothing was said"):
        faults.said(lambda: None)
