"""The table of launches in docs/dev/kernels.md is what is counted."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

import seqfuse as sf
from benchmarks.launch_counts import Launches
from seqfuse import env, recipes
from seqfuse.kernels import quantize
from seqfuse.nn import TransformerLayer
from seqfuse.ops import _lowprecision
from tests.fusions.triton import launches


def test_the_table_is_what_is_counted():
    shown = launches.TABLE.search(launches.PAGE.read_text())
    assert shown is not None
    drawn = launches.table()
    assert shown[0] == drawn, "run: TRITON_INTERPRET=1 .venv/bin/python -m tests.fusions.triton.launches"
    for line in drawn.splitlines()[2:]:
        numbers = [int(cell) for cell in line.strip("|").split("|")[1:]]
        for fused, *others in (numbers[:3], numbers[3:]):
            # Eager torch takes the bias in the GEMM's epilogue as well.
            assert 0 < fused <= min(others)
        assert sum(numbers[::3]) < min(sum(numbers[1::3]), sum(numbers[2::3]))


def test_the_table_of_layers_is_what_is_counted():
    shown = launches.LAYER_TABLE.search(launches.PAGE.read_text())
    assert shown is not None
    drawn = launches.layer_table()
    assert shown[0] == drawn, "run: TRITON_INTERPRET=1 .venv/bin/python -m tests.fusions.triton.launches"
    layers: dict[str, list[list[int]]] = {}
    for line in drawn.splitlines()[2:]:
        layer, _, *cells = line.strip("|").split("|")
        layers.setdefault(layer, []).append([*map(int, cells)])
    assert len(layers) > 1
    for passes in layers.values():
        for fused, *others in passes:
            # Eager torch takes the bias in the GEMM's epilogue as well.
            assert 0 < fused <= min(others)
        fused, *others = map(sum, zip(*passes, strict=True))
        assert fused < min(others)


def test_a_llama_layer_in_8_bits_has_two_launches_more():
    """The launches of one layer more, of GEMMs as an H100 runs them, each of which is one."""

    def counted(layers: int, recipe: recipes.Recipe | None) -> tuple[int, int]:
        parts = (TransformerLayer(1024, 8, causal=True, **launches.LLAMA) for _ in range(layers))
        model = sf.Sequential(*parts, recipe=recipe).bfloat16()
        return launches.launches(model, torch.empty(8192, 1024, dtype=torch.bfloat16).view(8, 1024, 1024))

    def multiplied(x: torch.Tensor, y: torch.Tensor, *scales: Any, output_dtype: torch.dtype) -> torch.Tensor:
        return x.new_empty(x.shape[0], y.shape[1], dtype=output_dtype)

    with contextlib.ExitStack() as stack:
        gemm = Launches(set()).as_one(multiplied, 1)
        for module, name, value in (
            (_lowprecision, "kernels_for", lambda *_: quantize), (_lowprecision, "by_torch", lambda *_: True),
            (F, "scaled_mm", gemm),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(module, name, value))
        stack.enter_context(mock.patch.dict(env._COSTS, cpu=env._COSTS["sm_90"]))
        found = {}
        for recipe in (None, recipes.Float8BlockScaling()):
            pairs = zip(counted(4, recipe), counted(3, recipe), strict=True)
            found[recipe] = [many - few for many, few in pairs]
    plain, quantized = found.values()
    print(f"forward, backward: {quantized} in 8 bits, {plain} in bfloat16")
    # The output of attention, and all weights of a segment: every other tensor is quantized by what computes it.
    assert [a - b for a, b in zip(quantized, plain, strict=True)] == [2, 0]
