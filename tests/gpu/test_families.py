"""Models of seven families converted: outputs and every gradient against eager and float64, in three precisions."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import seqfuse as sf

from .converting import FAMILIES, HERE, MODES, built, fused, held_to_the_rule, inputs_of, other_library, passes

# Deprecation warnings between other packages.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


# Without a GPU every other family in one mode: tests/convert has all of them. All modes of all under --full.
CASES = [
    pytest.param(
        family, mode, marks=[pytest.mark.full] * (not HERE and (i % 2 or i // 2 % 3 != j)), id=f"{family} {mode}"
    )
    for i, family in enumerate(FAMILIES)
    for j, mode in enumerate(MODES)
]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    """Clears graphs, and their count, of other tests."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("family", "mode"), CASES)
def test_a_converted_model_gives_what_it_gave(family: str, mode: str, device: torch.device) -> None:
    dtype = torch.bfloat16 if mode == "bfloat16" else torch.float32
    eager = built(FAMILIES[family], device, dtype)
    model, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    conversion = sf.convert(model)
    cast = torch.autocast(device.type, torch.bfloat16, enabled=mode == "autocast")

    def measure(seed: int) -> tuple[Any, ...]:
        given = inputs_of(family, device, seed)
        with cast:
            found, wanted = passes(model, given), passes(eager, given)
        if HERE and mode == "float32":
            with other_library():
                return found, wanted, passes(exact, given), passes(eager, given)
        return found, wanted, passes(exact, given)

    def rounded(seed: int) -> tuple[Any, ...]:
        """Autocast rounds results of GEMMs, and so the gradients of weights, to bfloat16, whatever dtype holds them."""
        *sides, exact = measure(seed)
        return *({n: None if t is None else t.bfloat16() for n, t in side.items()} for side in sides), exact

    held_to_the_rule(rounded if mode == "autocast" else measure)
    assert not conversion._backend.missed, str(conversion)  # pyright: ignore[reportPrivateUsage]
    assert fused(conversion) or not HERE, str(conversion)
