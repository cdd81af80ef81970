"""The notebook runs in a kernel, and its stored outputs are current."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples import notebook


def test_the_notebook_shows_what_it_gives(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    stored = nbformat.read(notebook.TOUR, as_version=4)
    nbformat.validate(stored)
    given = notebook.executed(notebook.TOUR, tmp_path)
    assert notebook.shown(given) == notebook.shown(stored), "run: .venv/bin/python -m tests.examples.notebook"
    assert sum("<svg" in text for text in notebook.shown(given)) == 1
