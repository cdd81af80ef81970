"""The tests that proof.md names for each kernel are there, and run by default."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from seqfuse import kernels
from tests.ops import test_groupedlinear
from tools.launches import CALLS

from . import (
    test_attention,
    test_codes,
    test_crossentropy,
    test_decode,
    test_grouped,
    test_norm,
    test_permute,
    test_pointwise,
    test_quantize,
    test_rope,
    test_training,
)

FILES = {
    "attention": test_attention,
    "codes": test_codes,
    "crossentropy": test_crossentropy,
    "decode": test_decode,
    "grouped": test_grouped,
    "norm": test_norm,
    "permute": test_permute,
    "pointwise": test_pointwise,
    "quantize": test_quantize,
    "rope": test_rope,
    "route": test_permute,
    "training": test_training,
}
# Modules whose kernels are tested with those of another.
WITH = {"_device": "pointwise"}
ITEMS = (
    "dtypes", "regimes", "edges", "rows and columns", "leading dimensions", "layouts", "exact", "gradcheck",
    "operators", "red zones", "twice", "training",
)  # fmt: skip
PAGE = (Path(__file__).resolve().parent / "proof.md").read_text()
TABLE = PAGE[PAGE.index("<!-- proof:") : PAGE.index("<!-- end of proof -->")]
ROWS = re.findall(r"^\| (\w+) \| ([\w ]+) \| (.+) \|$", TABLE, re.MULTILINE)
CELLS = {(kernel, item): cell for kernel, item, cell in ROWS[1:]}


def named(kernel: str, item: str) -> list[Callable[..., Any]]:
    """The tests that the page names for an item of a kernel."""
    found: list[Callable[..., Any]] = []
    for name in re.findall(r"`([\w.]+)`", CELLS[kernel, item]):
        file, _, test = name.rpartition(".")
        found.append(getattr(FILES[file or kernel], f"test_{test}"))
    return found


def test_every_kernel_has_every_item() -> None:
    expected = {WITH.get(module, module) for module in CALLS}
    assert list(CELLS) == [(kernel, item) for kernel in sorted(expected) for item in ITEMS]


@pytest.mark.parametrize(("kernel", "item"), CELLS)
def test_every_named_test_runs(kernel: str, item: str) -> None:
    """By default, and not in the whole matrix alone; what has none says why in words."""
    tests = named(kernel, item)
    assert tests or re.fullmatch(r"[^`]{10,}", CELLS[kernel, item])
    for test in tests:
        marks = {mark.name for mark in getattr(test, "pytestmark", ())}
        assert not marks & {"full", "skip", "gpu", "xfail"}, test


def test_every_operator_is_checked() -> None:
    for one in pkgutil.iter_modules(kernels.__path__):
        if not one.name.startswith("_"):
            importlib.import_module(f"{kernels.__name__}.{one.name}")
    sources = [inspect.getsource(test) for kernel, item in CELLS if item == "operators" for test in named(kernel, item)]
    sources.append(inspect.getsource(test_groupedlinear.test_operators_are_what_they_say))
    assert all("opcheck(" in source for source in sources)
    text = "\n".join(sources)
    for name in (
        n.removeprefix("seqfuse::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("seqfuse::")
    ):
        assert re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text), name
