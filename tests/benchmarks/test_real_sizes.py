"""The arguments of our kernels at real sizes, on meta tensors: nothing is launched."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

import plain
from gpu import blocks
from gpu.case import fewest_bytes
from gpu.launched import as_on_an_h200, of_block, of_row
from gpu.rows import OF_KERNELS
from gpu.sizes import MAIN, MODELS, real

# On fake CPU tensors: torch without CUDA cannot even slice CUDA ones. Peers of torch.compile launch no kernel of ours.
SIZES = dataclasses.replace(real(), device=torch.device("cpu"), compile_modes=())
CASES = [case for room in OF_KERNELS for case in room(SIZES)]


@pytest.mark.parametrize("group", sorted({case.group for case in CASES}))
def test_kernels_take_every_row(group: str) -> None:
    for case in (case for case in CASES if case.group == group):
        launches = of_row(case)
        assert launches, case.key
        for launch in launches:
            assert 0 < launch.grid < 2**31
            assert len(launch.args) + len(launch.constexprs) == len(launch.kernel.arg_names), case.key
            variant = launch.variant("any")
            assert variant.signature.keys().isdisjoint(variant.constexprs)


@pytest.mark.parametrize("model", [m for m in MODELS if m.name in (*MAIN, "gpt2-xl")], ids=lambda m: m.name)
def test_layers_launch_kernels_both_ways(model: blocks.Model) -> None:
    small = dataclasses.replace(model, H=model.head_dim * 4, F=512, heads=4, kv_heads=2 if model.llama else 4)
    layer = plain.fused("layer", blocks.spec_of(small, 0.1), dtype=torch.bfloat16)
    names = [launch.kernel.__name__ for launch in of_block(layer, torch.empty(4, 2048, small.H, dtype=torch.bfloat16))]
    assert any("bwd" in name for name in names), names
    assert any("fwd" in name for name in names), names


def test_a_kernel_is_compiled_for_what_it_is_launched_with() -> None:
    (launch,) = of_row(next(case for case in CASES if case.key == "norm forward: RMSNorm 32768 x 8192"))
    variant = launch.variant("norm")
    pointers = [name for name, kind in variant.signature.items() if str(kind).startswith("*")]
    assert {variant.signature[name] for name in pointers} == {"*bf16", "*fp32"}
    assert set(pointers) <= set(variant.divisible)
    numbers = {name for name in variant.signature if name not in pointers}
    assert numbers <= set(variant.divisible)  # 8,192 and 32,768
    with as_on_an_h200() as launches:
        assert launches == []


def test_floors_are_those_of_the_bytes_that_have_to_move() -> None:
    by_key = {case.key: case for case in CASES}
    with as_on_an_h200(), FakeTensorMode():
        norm = by_key["norm forward: RMSNorm 32768 x 8192"]
        inputs = norm.make(norm.rows, 0)
        assert fewest_bytes(norm, inputs, [inputs["x"]]) == (2 * 32768 * 8192 + 8192) * 2
        decode = by_key["decode attention: llama3-8b 16 x 8192"]
        inputs = decode.make(decode.rows, 0)
        cache = 2 * 16 * 8 * 8192 * 128 * 2
        assert fewest_bytes(decode, inputs, [inputs["q"]]) == cache + 2 * 16 * 32 * 128 * 2 + 16 * 4
    attention = by_key["attention forward: gpt3-6.7b 4 x 2048, 32/32 x 128, causal"]
    assert attention.flops == 2 * 2 * 4 * 32 * 128 * (2048 * 2049 / 2)
