"""Sphinx configuration: Markdown pages and an API reference drawn from the docstrings."""

from __future__ import annotations

import importlib.metadata
import inspect
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
autodoc_inherit_docstrings = False  # an override without a docstring says nothing new
autodoc_typehints = "none"
autodoc_default_options = {"no-value": True}

html_theme = "furo"
html_title = f"seqfuse {release}"


def _verbatim(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    # Docstrings hold formulas and shapes such as [*, H], which are not reStructuredText: show them as they are written.
    if any(line.strip() for line in lines):
        lines[:] = ["::", "", *("   " + line for line in lines), ""]


def _skip_alias(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    # `Saved = SomeRecord` in a class body names a record that stands elsewhere; once is enough.
    return True if what == "class" and inspect.isclass(obj) and "." not in obj.__qualname__ else None


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _verbatim)
    app.connect("autodoc-skip-member", _skip_alias)
