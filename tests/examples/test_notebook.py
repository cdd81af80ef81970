"""The notebook runs in a kernel, and its stored outputs are current.

To rewrite what it shows, run  .venv/bin/python -m tests.examples.test_notebook
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
TOUR = ROOT / "examples" / "tour.ipynb"


def executed(path: Path, folder: Path) -> Any:
    """The notebook with fresh outputs of its cells; files that a kernel writes go to `folder`."""
    import nbclient
    import nbformat

    from tests.processes import SECONDS

    notebook = nbformat.read(path, as_version=4)
    own = {name: str(folder / name.lower()) for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR")}
    environment = {"SEQFUSE_CPU_GEMMS": "torch", **os.environ, **own, "PYTHONPATH": str(ROOT)}
    client = nbclient.NotebookClient(notebook, kernel_name="python3", timeout=int(SECONDS))
    client.execute(cwd=str(folder), env=environment)
    for cell in notebook.cells:
        cell.metadata.clear()
    return notebook


def shown(notebook: Any) -> list[str]:
    """The output of each code cell: printed text, with one compiler name, and each form of a result, pictures too."""
    # A kernel sends printed text in any number of pieces.
    cells = ["".join(map(_text, cell.outputs)) for cell in notebook.cells if cell.cell_type == "code"]
    return [re.sub(r"(?<=compiled by )\S+ [\d.]+", "cc 12.2.0", text) for text in cells]


def _text(output: Any) -> str:
    if output.output_type == "stream":
        return output.text
    data = output.get("data", {})
    return "\n".join(data[kind] for kind in sorted(data)) or output.output_type


def test_the_notebook_shows_what_it_gives(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    stored = nbformat.read(TOUR, as_version=4)
    nbformat.validate(stored)
    given = executed(TOUR, tmp_path)
    assert shown(given) == shown(stored), "run: .venv/bin/python -m tests.examples.test_notebook"
    assert sum("<svg" in text for text in shown(given)) == 1


if __name__ == "__main__":
    import nbformat

    with tempfile.TemporaryDirectory() as scratch:
        nbformat.write(executed(TOUR, Path(scratch)), TOUR)
