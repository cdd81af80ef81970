"""Mutants: each changes one node, is drawn by its text, and leaves strings, types and imports alone."""

from __future__ import annotations

import ast
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools import mutate
from tools.mutate import mutants, sample

SOURCE = b'''
"""A file."""
import torch

class Scale:
    """An operation."""

    factor: float = 2.0

    def bwd(self, dy, saved, *, needs: frozenset[str] = 3):
        dx = dy * saved.scale + saved.shift if "x" in needs and not self.off else None
        if dx is None:
            raise ValueError(f"{1 + 1} is no number")
        tl.store(dx, torch.where(dx > 0, dx, 0), mask=dx < 5)
        self.count = -1
        return dx, {"weight": True}
'''
CHANGES = [
    "2.0 -> 4.0 in factor: float = 2.0",
    "dy * saved.scale + saved.shift if 'x' in needs and (not self.off) else None -> dy * saved.scale + saved.shift",
    "dy * saved.scale + saved.shift if 'x' in needs and (not self.off) else None -> None",
    "'x' in needs and (not self.off) -> 'x' in needs or not self.off",
    "'x' in needs -> 'x' not in needs",
    "not self.off -> self.off",
    "dy * saved.scale + saved.shift -> dy * saved.scale - saved.shift",
    "dy * saved.scale -> dy / saved.scale",
    "saved.scale -> saved.shift",
    "saved.shift -> saved.scale",
    "if dx is None: -> pass",
    "dx is None -> dx is not None",
    "tl.store(dx, torch.where(dx > 0, dx, 0), mask=dx < 5) -> pass",
    "tl.store(dx, torch.where(dx > 0, dx, 0), mask=dx < 5) -> tl.store(dx, torch.where(dx > 0, dx, 0))",
    "torch.where(dx > 0, dx, 0) -> dx",
    "torch.where(dx > 0, dx, 0) -> 0",
    "dx > 0 -> dx >= 0",
    "0 -> 1 in dx > 0",
    "0 -> 1 in torch.where(dx > 0, dx, 0)",
    "dx < 5 -> dx <= 5",
    "5 -> 6 in dx < 5",
    "self.count = -1 -> pass",
    "-1 -> 1",
    "1 -> 2 in -1",
    "True -> False in {'weight': True}",
    "3 -> 4 in def bwd(self, dy, saved, *, needs: frozenset[str]=3):",
]


def differences(one: Any, other: Any) -> Iterator[tuple[Any, Any]]:
    """The outermost nodes in which two trees differ."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for a, b in zip(one, other, strict=True):
            yield from differences(a, b)
    elif isinstance(one, ast.AST) and type(one) is type(other) and ast.dump(one) != ast.dump(other):
        found = [d for name in one._fields for d in differences(getattr(one, name), getattr(other, name))]
        yield from found
    elif (ast.dump(one) if isinstance(one, ast.AST) else one) != (
        ast.dump(other) if isinstance(other, ast.AST) else other
    ):
        yield one, other


def test_the_mutants_of_a_file_are_these() -> None:
    assert sorted(m.change for m in mutants("scale.py", SOURCE)) == sorted(CHANGES)


def test_a_mutant_changes_one_node() -> None:
    before = ast.parse(SOURCE)
    for mutant in mutants("scale.py", SOURCE):
        assert len([*differences(before, ast.parse(mutant.applied(SOURCE)))]) == 1, mutant


IN_C = b'''
"""Of a + b."""

def kernel(of):
    """Of a + b."""
    if of is None:
        raise ValueError("a + b")
    return f"y[i] {of} += a < b && {1 + 1}; /* a * b */" + _loop("i < \\\\n")
'''


def test_operators_of_c_change_in_what_a_file_writes_but_not_in_what_it_says() -> None:
    found = [m for m in mutants("seqfuse/kernels/c/kernel.py", IN_C) if " in C: " in m.change]
    assert {m.change[:7].split(" in")[0] for m in found} >= {"+= -> =", "< -> <=", "&& -> |"}
    assert {(m.function, m.line) for m in found} == {("kernel", 8)}
    assert len({m.applied(IN_C) for m in found}) == len(found) == 4
    (add, less) = mutants("seqfuse/kernels/c/tile.h", "/* \u2264 a + b */ s += x < y;".encode())
    assert (add.text, add.function, less.applied("/* \u2264 a + b */ s += x < y;".encode()).decode()[-11:]) == (
        "=", "<module>", " += x <= y;",
    )  # fmt: skip


def test_a_mutant_is_drawn_alike_where_its_file_has_moved() -> None:
    there = mutants("elsewhere/file.py", b"# moved\n\n" + SOURCE)
    pairs = [*zip(mutants("scale.py", SOURCE), there, strict=True)]
    assert all(a.drawn(3) == b.drawn(3) and a.line + 2 == b.line for a, b in pairs)
    assert len({a.drawn(3) for a, _ in pairs}) == len(pairs)


def test_a_draw_is_of_the_package_or_of_each_of_some_rooms_and_files(tmp_path: Path) -> None:
    for name in ("ops/scale.py", "tune/scale.py", "tune/again.py"):
        file = tmp_path / "seqfuse" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(SOURCE)
    drawn, count = sample(tmp_path, 1000, 0)
    assert {mutant.path for mutant in drawn} == {"seqfuse/ops/scale.py"}
    assert len(drawn) == count == len(CHANGES)
    drawn, count = sample(tmp_path, 3, 0, ["tune", "ops/scale.py"])
    assert [mutant.path.split("/")[1] for mutant in drawn] == ["tune"] * 3 + ["ops"] * 3
    assert count == 3 * len(CHANGES)


def test_a_survivor_meets_more_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "seqfuse" / "scale.py"
    file.parent.mkdir()
    file.write_bytes(SOURCE)
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    mutant, *_ = mutants("seqfuse/scale.py", SOURCE)
    tests = {f"test_{i}": [0.001, [0]] for i in range(300)}
    known = {"plain": {"functions": [f"scale.py {mutant.function}"], "tests": tests}}
    met: list[int] = []
    monkeypatch.setattr(mutate, "survives", lambda given, *_: met.append(len(given["plain"])) or "survived")
    mutate.run([mutant], known, tmp_path / "results", tmp_path, 10.0)
    assert met == [200, 300]
    assert json.loads((tmp_path / "results").read_text())["fate"] == "survived"
