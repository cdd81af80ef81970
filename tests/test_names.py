"""Names that people guess, and what tab completion shows."""

from __future__ import annotations

import re
import types

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
