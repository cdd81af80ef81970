"""Names that people guess, what tab completion shows, and that a name means one thing."""

from __future__ import annotations

import ast
import re
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import seqfuse as sf
from seqfuse import nn, ops


@pytest.mark.parametrize(
    ("module", "name", "hint"),
    [
        (sf, "Linear", "Hint: did you mean sf.ops.Linear?"),
        (sf, "from_torch", "Hint: did you mean sf.nn.from_torch?"),
        (sf, "check_fusion", "Hint: did you mean sf.testing.check_fusion?"),
        (sf, "Sequental", "Hint: did you mean sf.Sequential?"),
        (ops, "Gelu", "Hint: did you mean sf.ops.GELU?"),
        (ops, "layer_norm", "Hint: did you mean sf.ops.LayerNorm?"),
        (ops, "MultiheadAttention", "Hint: did you mean sf.nn.MultiHeadAttention?"),
        (ops, "LeakyReLU", "Hint: torch.nn.LeakyReLU runs eagerly in a Sequential"),
        (nn, "MultiheadAttention", "Hint: did you mean sf.nn.MultiHeadAttention?"),
        (nn, "Linear", "Hint: did you mean sf.ops.Linear?"),
    ],
)
def test_a_name_that_is_elsewhere_or_spelled_otherwise_is_said(module: types.ModuleType, name: str, hint: str):
    with pytest.raises(
        AttributeError, match=re.escape(f"module {module.__name__!r} has no attribute {name!r}\n{hint}")
    ):
        getattr(module, name)


@pytest.mark.parametrize("module", [sf, ops, nn], ids=["seqfuse", "ops", "nn"])
def test_an_unknown_name_has_no_hint_and_a_default(module: types.ModuleType):
    with pytest.raises(AttributeError, match=f"^module '{module.__name__}' has no attribute 'frobnicate'$"):
        module.frobnicate  # noqa: B018
    assert getattr(module, "_private", 3) == 3


@pytest.mark.parametrize("module", [sf, ops, nn], ids=["seqfuse", "ops", "nn"])
def test_tab_completion_shows_the_public_names_alone(module: types.ModuleType):
    assert {name for name in dir(module) if not name.startswith("__")} == set(module.__all__)


def test_the_layers_that_operations_hint_at_are_there():
    with pytest.raises(AttributeError, match=r"sf\.nn\.FeedForward"):
        ops.feed_forward  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    assert {"FeedForward", "MultiHeadAttention", "TransformerLayer"} <= set(nn.__all__)


PACKAGE = Path(sf.__file__).parent


def defined(body: Iterable[ast.stmt], outermost: bool = True) -> Iterator[str]:
    """The public functions of a file, its classes, also within others, and its type aliases, without the `Saved`
    classes of operations."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            if outermost or node.name not in ("Saved", "SavedQuantized"):
                yield node.name
            yield from defined(node.body, outermost=False)
        elif outermost and isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name
        elif outermost and isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            yield from (name for name in names if re.fullmatch("_?[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*", name))


def test_the_name_of_a_function_of_a_class_or_of_a_type_means_one_thing():
    files: dict[str, set[str]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        for name in defined(ast.parse(path.read_text()).body):
            files[name].add(str(path.relative_to(PACKAGE)))
    several = {name: sorted(where) for name, where in files.items() if len(where) > 1}
    assert several == {}
