"""Requirements on the compiled code of kernels that quantize, which the interpreter does not show."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("triton")

from seqfuse.testing.compile import built
from tools.compiled import variants_of
from tools.launches import WITHOUT

PER_BLOCK = "1x128", "1x32"
SCALINGS = {
    "_quantize_kernel": {"given", "tensor", "row", "1x128", "128x128", "1x32"},
    "_quantize_several_kernel": {"128x128", "1x32"},
    **{kernel: {"given", "1x128", "1x32"} for kernel in WITHOUT["gfx942"]},
}


def lines_of(file: str, ptx: str) -> Iterator[str]:
    """Lines of compiled code that come from a file."""
    now = ""
    for line in ptx.splitlines():
        named = re.search(r"// (\w+\.py):\d+", line)
        now = named[1] if named else now
        if now == file:
            yield line


@pytest.mark.parametrize("target", ["sm_89", "sm_90", "sm_100", "sm_120"])
def test_quotients_are_rounded_once_and_tiles_are_transposed_in_16_bits(target: str, request: pytest.FixtureRequest):
    """Of each kernel one configuration per scaling, and both parts of a gated unit; all of them with `--full`. For
    sm_90 always, and for one of the others in turn, or with `--full` for all of them."""
    found, full, turn = dict[Any, Any](), request.config.getoption("--full"), ("sm_89", "sm_100", "sm_120")
    for variant in (v for module in ("quantize", "norm", "rope") for v in variants_of(module, target)):
        kernel, scaling = variant.kernel.__name__, variant.constexprs.get("SCALING")
        if kernel in SCALINGS and "rows+columns" in variant.name and "bf16" in variant.name:
            of = variant.name if full else "dgated" in variant.name
            found.setdefault((kernel, scaling, of), variant)
    of_blocks = {(kernel, "1x128") for kernel in WITHOUT["gfx942"]} if target != "sm_90" else set[Any]()
    expected = {(kernel, scaling) for kernel, scalings in SCALINGS.items() for scaling in scalings}
    assert {key[:2] for key in found} == expected - of_blocks
    for at, ((kernel, scaling, _), variant) in enumerate(sorted(found.items(), key=str)):
        if target in turn and turn[at % 3] != target and not full:
            continue
        asm = built(variant, target).asm
        # `/` is off by two units, and flushing to zero differs from a CPU.
        quantizing = "\n".join(lines_of("_quantize_kernel.py", asm["ptx"]))
        assert "div.full" not in quantizing, variant.name
        assert ".ftz" not in quantizing, variant.name
        assert "div.rn.f32" in quantizing or scaling == "1x32"
        # On sm_89 Triton before 3.9 goes through float16, and would round twice if values were not rounded before.
        kind = "(f16x2|f32)" if target == "sm_89" else "f32"
        assert re.search(rf"cvt\.rn\.satfinite\.e[45]m[32]x2\.{kind}", asm["ptx"]), variant.name
        assert variant.constexprs["ROUNDED"] == (target == "sm_89")
        transposed = re.findall(r"tt\.trans .*: tensor<((?:\d+x)+)(\w+),", asm["ttgir"])
        assert {kind for _, kind in transposed} == {"bf16"}, variant.name
        matrices = [shape for shape, _ in transposed if shape.count("x") == 2]  # others are pairs of RoPE
        assert len(matrices) == (2 if "dgated" in variant.name else 1), variant.name
        # On an H100, codes for both rows and columns were wrong when they moved from thread to thread in 8 bits.
        moved = re.findall(r"ttg\.convert_layout .*: tensor<(\d{2,}x\d{2,})x(?:f8\w+|i8),", asm["ttgir"])
        # With heads of 128 only those of rows are moved, as with blocks.
        assert not moved or scaling in PER_BLOCK or ("rope" in kernel and set(moved) == {"64x128"}), variant.name
