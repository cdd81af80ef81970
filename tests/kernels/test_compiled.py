"""The offline compile check, and a representative part of its kernels."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from seqfuse.testing import compile_kernel
from tests.processes import Script
from tools.compiled import Compiled, compile_variants, int32_multiplications, late_reads

ROOT = Path(__file__).resolve().parent.parent.parent

# One chain of each kind, aligned and not, and the sums they end in.
POINTWISE = (
    r"^(bias,store,gated_gelu,dropout\[0.1\] bf16 2x1024"
    r"|dropout\[0.1\] bf16 4x1024"
    r"|dropout\[0.1\],dact_gelu,sum (fp16|fp32|bf16) \S+( odd)?"
    r"|bias,store,gelu bf16\+fp32 \S+"
    r"|dropout\[0.1\],bias,gelu,dropout\[0.2\],scale\[2\] (bf16|fp32) \S+)$"
)
NORM = r"( bf16|\S+act bf16) (1024|16384|1001) "
HEADS = r"(positions|norm|norm,cos|cos by pair) bf16 (128 half 128|128 interleaved|80|127|96) "
LOSS = r"(ahead (bf16 (262144|50257)|fp64 (1024|50257))|all loss fp32 262144|given fp16 100|bf16 1)$"
ATTENTION = r"attention \w+ (bf16 (64 dropout|128|128 packed|256 softcap)|fp16 128 float|fp32 64 bool)$"
# By name the module, its variants, how many there are for a GPU, and those whose loads and stores are few and wide.
VARIANTS: dict[str, tuple[str, str, int, str | None]] = {
    "chains": ("pointwise", POINTWISE, 11, "^(?!.*odd)"),
    "LayerNorm": ("norm", "^layernorm" + NORM, 14, "^(?!.*( 1001 | sums ))"),
    "RMSNorm": ("norm", "^rmsnorm" + NORM, 14, "^(?!.*( 1001 | sums ))"),
    "heads": ("rope", HEADS, 40, None),
    "cross-entropy": ("crossentropy", LOSS, 13, "262144"),
    "decoding": ("decode", r"bf16 128|fp32 \d+ group", 17, None),
    "grouped GEMMs": ("grouped", "", 70, "^(?!.*odd)"),
    "attention": ("attention", ATTENTION, 18, None),
    "router": ("route", "", 48, None),
    "permutation": ("permute", "", 102, "^(?!.*(odd| 1 top))"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_kernels_compile_without_spills(name: str, compiled: Callable[..., list[Compiled]]) -> None:
    module, only, count, wide = VARIANTS[name]
    for one in compiled(module, only, count):
        nvidia = one.target.startswith("sm_")
        if nvidia or module not in ("attention", "rope"):
            assert one.spills == 0, one
        elif module == "rope":
            # There, heads of an odd size keep six scalars in lanes of vector registers; none is spilled to memory.
            assert one.spills <= 6 * (" 127 " in one.variant), one
        if nvidia and wide is not None and re.search(wide, one.variant):
            # Narrow are the seed, partial sums, and values of which a row has one: target, logit there, results.
            narrow = {"pointwise": one.wide - 1, "norm": one.wide - 1, "crossentropy": 5}.get(module, one.narrow)
            assert one.wide > 0, one
            assert one.narrow <= narrow, one


def test_sums_over_rows_compile() -> None:
    for one in compile_variants(["_device"], ["sm_90"], only="bf16|fp64", jobs=1):
        assert one.error is None, one
        assert one.spills == one.int32_multiplications == 0, one


BROKEN = """
import os
import triton
import triton.language as tl
from seqfuse.testing.compile import Variant


@triton.jit
def _copy_kernel(x, y, n, B: tl.constexpr, FAULT: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    if FAULT == 1:
        i = i + tl.program_id(0) * n
    tl.static_assert(FAULT != 2, "refused here")
    tl.store(y + i, tl.load(x + i, mask=i < n), mask=i < n)


class Aborting:
    arg_names = property(lambda self: os.abort())


def variants(target):
    for name, fault, divisible in (
        ("good", 0, ("x", "y", "n")), ("narrow", 0, ()), ("wraps", 1, ()), ("refused", 2, ()), ("aborts", 3, ()),
        ("after", 0, ("x", "y", "n")),
    ):
        yield Variant(
            name=name,
            kernel=Aborting() if name == "aborts" else _copy_kernel,
            signature={"x": "*bf16", "y": "*bf16", "n": "i32"},
            constexprs={"B": 1024, "FAULT": fault},
            divisible=divisible,
            has_dot=name == "narrow",
        )
    if target.startswith("gfx"):
        yield Variant(name="elsewhere", kernel=None, signature={}, constexprs={})
"""


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compiled]:
    folder = tmp_path_factory.mktemp("broken")
    (folder / "broken_kernels.py").write_text(BROKEN)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        return {one.variant: one for one in compile_variants(["broken_kernels"], ["sm_90"])}


def test_what_does_not_compile_is_reported_and_the_rest_goes_on(broken: dict[str, Compiled]) -> None:
    assert list(broken) == ["good", "narrow", "wraps", "refused", "aborts", "after"]
    failed = {name: one.error for name, one in broken.items() if one.error is not None}
    assert failed.keys() == {"refused", "aborts"}
    assert "refused here" in str(failed["refused"])
    assert "the compiler ended with -6" in str(failed["aborts"])
    assert broken["after"].wide == broken["good"].wide == 2
    assert broken["good"].narrow == 0
    assert broken["good"].registers > 0


def test_faults_of_compiled_code_are_counted(broken: dict[str, Compiled]) -> None:
    assert broken["narrow"].wide == 0
    assert broken["narrow"].narrow > 0
    assert broken["narrow"].dot_without_wgmma
    assert not broken["good"].dot_without_wgmma
    assert broken["good"].int32_multiplications == 1
    assert broken["wraps"].int32_multiplications == 2


def test_products_are_counted_where_an_address_is_made_of_them() -> None:
    ttir = """
    %0 = tt.get_program_id x : i32 loc(#loc)
    %1 = arith.muli %0, %c1024_i32 : i32
    %2 = arith.extsi %0 : i32 to i64
    %3 = arith.muli %2, %c1024_i64 : i64
    %4 = arith.muli %0, %arg3 : i32
    %5:2 = scf.for %arg4 = %c0 to %arg3 step %c1 iter_args(%arg5 = %1, %arg6 = %4) -> (i32, i32) {
      %6 = tt.splat %arg5 : i32 -> tensor<64xi32>
      %7 = tt.addptr %8, %6 : tensor<64x!tt.ptr<f32>>, tensor<64xi32>
      %9 = tt.addptr %arg0, %3 : !tt.ptr<f32>, i64
    }
    """
    assert int32_multiplications(ttir) == 1


@pytest.mark.parametrize(("first", "late"), [("load", 0), ("reduce", 1)])
def test_a_scalar_read_behind_the_last_barrier_before_a_store_is_late(first: str, late: int) -> None:
    load = "%2 = tt.load %1, %mask, %other : !tt.ptr<bf16> loc(#loc)"
    reduce = '%3 = "tt.reduce"(%9) <{axis = 0 : i32}> ({'
    ttir = f"""
    %1 = tt.addptr %logits, %target : !tt.ptr<bf16>, i64 loc(#loc)
    %4 = tt.load %targets : !tt.ptr<i64> loc(#loc)
    {load if first == "load" else reduce}
    {reduce if first == "load" else load}
    tt.store %loss, %2 : !tt.ptr<f32> loc(#loc)
    %5 = tt.splat %logits : !tt.ptr<bf16> -> tensor<64x!tt.ptr<bf16>> loc(#loc)
    %6 = tt.addptr %5, %cols : tensor<64x!tt.ptr<bf16>>, tensor<64xi32> loc(#loc)
    tt.store %6, %7, %8 : tensor<64x!tt.ptr<bf16>> loc(#loc)
    """
    assert late_reads(ttir) == late


def test_over_shared_memory_depends_on_the_target() -> None:
    one = Compiled("kernels", "large", "sm_90", shared=200_000)
    assert not one.over_shared
    assert Compiled("kernels", "large", "sm_80", shared=200_000).over_shared
    assert Compiled("kernels", "large", "gfx942", shared=70_000).over_shared


def test_the_table_ends_with_what_was_found() -> None:
    command = ["benchmarks/kernels_table.py", "_device", "--targets", "sm_90", "--only", "bf16 (2|8)$"]
    done = Script(*command, folder=ROOT, bare=True).done()
    last = done.stdout.strip().splitlines()[-1]
    assert last == "kernels: 2 variants, 0 spilled, 0 over shared memory, 0 dots without wgmma on sm_90", done.stderr
    assert done.returncode == 0


def test_a_module_and_target_is_recorded_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import kernels_table
    import record

    for module in (kernels_table, record):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    old = [Compiled("seqfuse.kernels.norm", "x", target, registers=9, spills=8) for target in ("sm_80", "sm_90")]
    new = [
        Compiled("seqfuse.kernels.norm", "y", "sm_90", registers=5, shared=2, int32_multiplications=1, has_dot=True),
        Compiled("seqfuse.kernels.norm", "z", "sm_90", registers=3, shared=300_000, error="refused"),
    ]
    kernels_table.record(old, "before")
    kernels_table.record(new, "after")
    kept, changed = json.loads((tmp_path / "kernels.json").read_text())["kernels"]
    assert kept == {
        "module": "norm", "target": "sm_80", "commit": "before", "configurations": 1, "failed": 0, "spilled": 1,
        "over_shared": 0, "without_wgmma": 0, "registers": 9, "shared": 0, "int32_multiplications": 0,
    }  # fmt: skip
    assert changed == {
        "module": "norm", "target": "sm_90", "commit": "after", "configurations": 2, "failed": 1, "spilled": 0,
        "over_shared": 1, "without_wgmma": 1, "registers": 5, "shared": 300_000, "int32_multiplications": 1,
    }  # fmt: skip
    assert kernels_table.summary([*old, *new]) == (
        "kernels: 4 variants, 2 spilled, 1 over shared memory, 1 dots without wgmma on sm_90", False
    )  # fmt: skip


OF_AN_AUTHOR = """
import triton
import triton.language as tl

FACTOR = 0.7

@triton.jit
def half(x):
    return x * 0.5

@triton.jit
def right_kernel(x, y, n, by, F: tl.constexpr, BLOCK: tl.constexpr = 1024):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y[0] + at, by * F(tl.load(x + at, mask=at < n)), mask=at < n)

@triton.jit
def wrong_kernel(x, y, n, by, F: tl.constexpr):
    tl.store(y[0], FACTOR * tl.load(x))

@triton.jit
def scaled(x):
    return x * FACTOR

@triton.jit
def calling_kernel(x, y, n, by, F: tl.constexpr):
    tl.store(y[0], scaled(tl.load(x)))
"""


def test_a_kernel_of_an_author_is_compiled_as_it_would_be_launched(tmp_path: Path) -> None:
    file = tmp_path / "of_an_author.py"  # in no folder on the module path
    file.write_text(OF_AN_AUTHOR)
    spec = importlib.util.spec_from_file_location("of_an_author", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "of_an_author", module)
        spec.loader.exec_module(module)
        x = torch.empty(4096, dtype=torch.bfloat16, device="meta")
        launch = x, (x, None), 4096, 0.5, module.half
        (one,) = compile_kernel(module.right_kernel, *launch, num_warps=2, targets=["sm_90"])
        assert (one.module, one.variant, one.target, one.error) == ("of_an_author", "right_kernel", "sm_90", None)
        assert (one.registers > 0, one.spills) == (True, 0)
        for kernel in (module.wrong_kernel, module.calling_kernel):
            said = f"{kernel.fn.__name__} does not compile for sm_90: .*global variable FACTOR"
            with pytest.raises(AssertionError, match=said):
                compile_kernel(kernel, *launch, targets=["sm_90"])
        for target in ("h100", "cuda:sm_90", ""):
            with pytest.raises(TypeError, match=f"targets: '{target}' is not an architecture"):
                compile_kernel(module.wrong_kernel, *launch, targets=target)
        with pytest.raises(TypeError, match="wrong_kernel: missing a required argument"):
            compile_kernel(module.wrong_kernel, targets="sm_90")
        with pytest.raises(TypeError, match=r"expected a triton\.jit function, got <built-in function len>"):
            compile_kernel(len, *launch)
        with pytest.raises(TypeError, match="takes tensors, numbers and tuples of them, not 'bf16'"):
            compile_kernel(module.wrong_kernel, "bf16", *launch[1:])
