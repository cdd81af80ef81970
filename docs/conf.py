"""Sphinx configuration: Markdown pages and a reference drawn from the docstrings."""

from __future__ import annotations

import contextlib
import re
import sys
import urllib.request
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))

import seqfuse

project = "seqfuse"
author = "the seqfuse developers"
copyright = "the seqfuse developers"
release = seqfuse.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.intersphinx", "sphinx.ext.viewcode", "reference_pages"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
exclude_patterns = ["_build"]

autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # an override without a docstring says nothing new
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
viewcode_line_numbers = True
autodoc_default_options = {"no-value": True}

# Names of torch are links where its documentation can be reached, and plain code where it cannot: no warning is hidden.
TORCH = "https://docs.pytorch.org/docs/stable/"
intersphinx_mapping: dict[str, tuple[str, None]] = {}
with contextlib.suppress(OSError), urllib.request.urlopen(f"{TORCH}objects.inv", timeout=3):
    intersphinx_mapping["torch"] = (TORCH, None)

html_theme = "furo"
html_title = f"seqfuse {release}"
html_static_path = ["_static"]
html_css_files = ["pictures.css"]


def both_widths(app: Sphinx, page: str, source: list[str]) -> None:
    """Put the narrow drawing of a picture behind the wide one: pictures.css shows the one that fits."""
    folder = Path(__file__).parent / "pictures"

    def both(found: re.Match[str]) -> str:
        if not (folder / f"{found[3]}_narrow.svg").exists():
            return found[0]
        image = "```{{image}} {}{}.svg\n:alt: {}\n:class: {}\n```\n"
        widths = ("", "wide"), ("_narrow", "narrow")
        return "".join(image.format(found[2], found[3] + end, " ".join(found[1].split()), kind) for end, kind in widths)

    source[0] = re.sub(r"^!\[([^\]]*)\]\((\S*pictures/)(\w+)\.svg\)$", both, source[0], flags=re.MULTILINE)


def setup(app: Sphinx) -> None:
    """Connect what pages are read through."""
    app.connect("source-read", both_widths)
