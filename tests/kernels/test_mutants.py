"""Every device function has a mutant that its own tests find."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from seqfuse.kernels import activations, attention, crossentropy, decode, norm, permute, rope

from . import (
    test_activations,
    test_attention,
    test_crossentropy,
    test_decode,
    test_halfgelu,
    test_norm,
    test_permute,
    test_pointwise,
    test_rope,
)

KERNELS = Path(norm.__file__).parent


def _file_of(module: ModuleType, text: str) -> str:
    """The file of a module, of its kernels or of what they share, whichever has the text."""
    own = Path(str(module.__file__))
    files = (own, own.with_name(f"_{own.stem}_kernel.py"), own.with_name("_device.py"))
    return str(next(file for file in files if file.exists() and text in file.read_text()))


def _replaced() -> Iterator[tuple[str, str]]:
    """File and text that a mutant replaces."""
    for module, mutants in (
        (norm, test_norm.MUTANTS),
        (norm, test_norm.STATISTIC_MUTANTS),
        (crossentropy, test_crossentropy.MUTANTS),
        (attention, test_attention.MUTANTS),
        (decode, test_decode.MUTANTS),
        (permute, test_permute.MUTANTS),
        (rope, test_rope.MUTANTS),
    ):
        yield from ((_file_of(module, old), old) for old, *_ in mutants.values())
    yield from ((str(activations.__file__), old) for _, old, _ in test_activations.MUTANTS.values())
    yield from ((str(activations.__file__), old) for old, _ in test_halfgelu.MUTANTS.values())
    yield from ((str(module.__file__), old) for module, old, *_ in test_pointwise.MUTANTS.values())


def _functions() -> Iterator[tuple[str, str, int, int]]:
    """File, name, first and last line of each Triton function."""
    for file in sorted(KERNELS.glob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any(ast.unparse(d) == "triton.jit" for d in node.decorator_list):
                yield str(file), node.name, node.lineno, node.end_lineno or node.lineno


FUNCTIONS = {f"{Path(file).stem}.{name}": (file, first, last) for file, name, first, last in _functions()}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_mutant_changes_it(name: str) -> None:
    file, first, last = FUNCTIONS[name]
    source = Path(file).read_text()
    lines = {
        source.count("\n", 0, source.index(old) + i) + 1
        for where, old in _replaced()
        if where == file
        for i in range(len(old))
    }
    assert lines & set(range(first, last + 1))


def test_there_are_kernels() -> None:
    assert sum(name.endswith("_kernel") for name in FUNCTIONS) >= 8
