"""Sphinx configuration: Markdown pages and an API reference drawn from the docstrings."""

from __future__ import annotations

import importlib.metadata
from typing import Any

project = "seqfuse"
author = "the seqfuse developers"
copyright = "the seqfuse developers"
release = importlib.metadata.version("seqfuse")

extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

autodoc_member_order = "bysource"
autodoc_typehints = "none"

html_theme = "furo"
html_title = f"seqfuse {release}"


def _verbatim(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    # Docstrings hold formulas and shapes such as [*, H], which are not reStructuredText: show them as they are written.
    lines[:] = ["::", "", *("   " + line for line in lines), ""]


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _verbatim)
