"""What the code of kernels that quantize has to have, which the interpreter does not see."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from seqfuse.testing.compile import built
from tools.compiled import variants_of

PER_BLOCK = (" 1x128 ", " 1x32 ")


@pytest.mark.parametrize("target", ["sm_90", "sm_100", "sm_120"])
def test_quotients_are_rounded_once_and_tiles_are_transposed_in_16_bits(target: str):
    found = {"quantize": 0, "codes": 0}
    for variant in variants_of("quantize", target):
        kernel = variant.name.partition(" ")[0]
        if kernel not in found or " rows+columns bf16" not in variant.name:
            continue
        found[kernel] += 1
        asm = built(variant, target).asm
        # `/` is off by two units, and what is flushed to zero is not what a CPU has.
        assert "div.full" not in asm["ptx"], variant.name
        assert ".ftz" not in asm["ptx"] or "gelu" in variant.name, variant.name
        assert "div.rn.f32" in asm["ptx"] or " 1x32 " in variant.name
        # From float32: by way of float16, as on sm_89, it is rounded twice.
        assert re.search(r"cvt\.rn\.satfinite\.e[45]m[32]x2\.f32", asm["ptx"]), variant.name
        transposed = re.findall(r"tt\.trans .*: tensor<\d+x\d+x(\w+),", asm["ttgir"])
        assert transposed == ["bf16"] * (2 if "dgated" in variant.name else 1), variant.name
        # Codes that rows and columns share, moved from thread to thread in 8 bits, were wrong on an H100.
        moved = re.findall(r"ttg\.convert_layout .*: tensor<\d{2,}x\d{2,}x(f8\w+|i8),", asm["ttgir"])
        assert not moved or any(part in variant.name for part in PER_BLOCK), variant.name
    assert found == {"quantize": 12, "codes": 17 if target == "sm_90" else 12}
