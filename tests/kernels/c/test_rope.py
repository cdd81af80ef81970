"""Bias, norm of heads and RoPE in C: C only; `tests/kernels/test_rope.py` runs with these kernels, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import seqfuse as sf
from seqfuse import compiler, ops
from seqfuse.fusions import heads as fusions
from seqfuse.kernels import _launch, rope
from seqfuse.kernels.rope import Rotation
from seqfuse.testing import assert_bitwise_equal, assert_fused_close, check_fusion, seeded_randn
from tests.kernels.test_rope import CASES, EPS, HEADS, KV, PARTS, drawn, run
from tests.selection import few_cases as few_cases
from tests.selection import in_turn
from tests.selection import some_cases as some_cases


def test_kernels_are_c() -> None:
    assert _launch.in_c(torch.zeros(1))


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(3, 0, 8), (5, 1, 64), (1, 1, 2), (2, 2, 1024)])
def test_heads_of_all_kinds(heads: int, kv_heads: int, size: int, style: Any) -> None:
    """Queries only, many per key, one pair, and the widest."""
    op = ops.RotaryEmbedding(heads, kv_heads, style=style, cos="c", sin="s")
    x, dy = (seeded_randn((2, 7, (heads + 2 * kv_heads) * size), i) for i in (0, 1))
    given = {name: seeded_randn((1, 7, size), i) for i, name in enumerate(("cos", "sin"))}
    rotation = Rotation(style, size)

    def plain(dtype: torch.dtype) -> list[Tensor]:
        wide = {name: t.to(dtype) for name, t in given.items()}
        y, saved = op.fwd(x.to(dtype), **wide)
        return [y, op.bwd(dy.to(dtype), saved, needs=frozenset({"x"}))[0]]

    y = rope.rope_fwd(x, heads, kv_heads, rotation, **given).y
    dx = rope.rope_bwd(dy, heads, kv_heads, rotation, **given).dx
    assert_fused_close([y, dx], plain(torch.float32), plain(torch.float64))


@pytest.mark.parametrize("kind", [torch.int32, torch.int16, torch.uint8, torch.float32, torch.float64, torch.bfloat16])
def test_positions_of_every_dtype(kind: torch.dtype) -> None:
    x, ids = seeded_randn((5, PARTS * 8), 0), torch.tensor([3, 0, 100, 7, 64])
    r = Rotation("half", 8)
    made = rope.rope_fwd(x, HEADS, KV, r, positions=ids.to(kind)).y
    assert_bitwise_equal(made, rope.rope_fwd(x, HEADS, KV, r, positions=ids).y)
    assert not torch.equal(made, rope.rope_fwd(x, HEADS, KV, r).y)


def test_more_dimensions_than_there_are_rows_are_refused() -> None:
    x, rotation = torch.zeros(3, PARTS * 8), Rotation("half", 8)
    with pytest.raises(ValueError, match="positions must broadcast"):
        rope.rope_fwd(x, HEADS, KV, rotation, positions=torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="cos and sin must broadcast"):
        rope.rope_fwd(x, HEADS, KV, rotation, cos=torch.zeros(1, 3, 8), sin=torch.zeros(1, 3, 8))
    with pytest.raises(ValueError, match="cos and sin must broadcast"):
        rope.rope_bwd(x, HEADS, KV, rotation, cos=torch.zeros(3, 6), sin=torch.zeros(3, 6))


def test_what_is_stored_is_the_sum_that_is_read_again() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, bias = seeded_randn((9, PARTS * 8), 0, dtype=dtype), seeded_randn((PARTS * 8,), 1, dtype=dtype)
        for norm in (None, EPS):
            made = rope.rope_fwd(x, HEADS, KV, Rotation("half", 8), bias=bias, norm_eps=norm, store=True)
            assert_bitwise_equal(made.z, x + bias)
            again = rope.rope_fwd(x + bias, HEADS, KV, Rotation("half", 8), norm_eps=norm)
            assert_bitwise_equal([made.y, made.rstd], [again.y, again.rstd])


def test_gradients_and_weights_may_have_other_dtypes() -> None:
    """As under autocast: 16-bit rows, float32 weights, and the other way round."""
    case = CASES["all"]
    for of_x, of_weights in ((torch.bfloat16, torch.float32), (torch.float32, torch.float16)):
        tensors = drawn(case, (2, 9), of_x)
        for name in ("q", "k", "bias"):
            tensors[name] = tensors[name].to(of_weights)
        made, wide = run(case, tensors), run(case, {name: t.float() for name, t in tensors.items()})
        for name, t in made.items():
            near = {"atol": 0.05, "rtol": 0.02} if torch.bfloat16 in (of_x, t.dtype) else {"atol": 1e-2, "rtol": 1e-3}
            torch.testing.assert_close(t.float(), wide[name].float(), **near)


def test_kernels_depend_on_no_number() -> None:
    found: set[str] = set()
    for heads, kv_heads, size, dim, base, eps in ((3, 2, 8, 8, 10000.0, 1e-6), (4, 1, 20, 6, 100.0, 1e-5)):
        x = torch.zeros(5, (heads + 2 * kv_heads) * size)
        with compiler.collecting() as wanted, FakeTensorMode(allow_non_fake_inputs=True):
            rope.rope_fwd(x, heads, kv_heads, Rotation("half", dim, base), norm_eps=eps)
            rope.rope_bwd(x, heads, kv_heads, Rotation("half", dim, base))
        found |= {*wanted}
    assert len(found) == 2


def test_what_is_asked_for_nothing_compiles_nothing(sources: list[str]) -> None:
    x = seeded_randn((5, PARTS * 8), 0)
    assert rope.rope_bwd(x, HEADS, KV, Rotation("half", 8), dx=False) == (None, None, None, None)
    with compiler.collecting() as wanted, FakeTensorMode(allow_non_fake_inputs=True):
        assert rope.rope_bwd(x, HEADS, KV, dx=False) == (None, None, None, None)
    assert not sources
    assert not wanted


ROTARY, NORM = ("BiasQKNormRotary", "BiasQKNormRotaryBackward"), ("BiasQKNorm", "BiasQKNormBackward")
PLACES = [  # a bias and a norm meet each dtype in each pass, all places do under --full
    (kind, names, in_turn((i + 1) // 2 + kind.endswith("Backward")))
    for kinds, places in (
        (ROTARY, ("bias norm rotary", "norm rotary", "bias rotary", "rotary")),
        (NORM, ("bias norm", "norm")),
    )
    for kind in kinds
    for i, names in enumerate(places)
]


@pytest.mark.parametrize(("kind", "names", "dtypes"), PLACES)
def test_fusions_of_whole_heads(kind: str, names: str, dtypes: Sequence[torch.dtype]) -> None:
    fusion, rotary = getattr(fusions, kind), ops.RotaryEmbedding(2, 1, style="half")
    made = {"bias": ops.Bias(32), "norm": ops.QKNorm(8, 2, 1), "rotary": rotary}
    assert "c" in fusion.kernels
    check_fusion(fusion, seeded_randn((5, 32), 0), *(made[name] for name in names.split()), dtypes=dtypes)


@pytest.mark.parametrize("kind", ROTARY)
def test_fusions_of_part_of_a_head(kind: str) -> None:
    norm, rotary = ops.QKNorm(6, 2, 1, zero_centered=True), ops.RotaryEmbedding(2, 1, style="interleaved", rotary_dim=4)
    dtypes = in_turn(ROTARY.index(kind))
    check_fusion(getattr(fusions, kind), seeded_randn((2, 5, 24), 0), norm, rotary, dtypes=dtypes)


@pytest.mark.parametrize("name", ["q_weight", "k_weight"])
def test_gains_that_c_does_not_read_are_refused(name: str) -> None:
    norm: Any = ops.QKNorm(8, HEADS, KV)
    setattr(norm, name, torch.nn.Parameter(getattr(norm, name).double()))
    model = sf.Sequential(ops.Bias(PARTS * 8), norm, fusions=(fusions.BiasQKNorm, fusions.BiasQKNormBackward))
    x = seeded_randn((64, PARTS * 8), 0).requires_grad_()
    with sf.fusing(on_error="raise", unmeasured=True):
        model(x).sum().backward()
        refused = model.plan(x).refused
    assert {r.reason for r in refused} == {f"C kernels read no {name} in float64"}


def test_angles_by_channel_and_fusing_off() -> None:
    """As in a converted model; unfused, each bit is that of the operation."""
    both = (fusions.BiasQKNormRotary, fusions.BiasQKNormRotaryBackward)
    op = ops.RotaryEmbedding(4, 4, style="half", cos="c", sin="s")
    model = sf.Sequential(op, fusions=both)
    x, dy = seeded_randn((2, 16, 96), 0), seeded_randn((2, 16, 96), 1)
    given = {name: seeded_randn((1, 16, 8), i) for i, name in enumerate("cs", 2)}
    leaf = x.clone().requires_grad_()
    plan = model.plan(leaf, **given)
    assert plan.count("BiasQKNormRotary") == plan.count("BiasQKNormRotaryBackward") == 1
    fused = model(leaf, **given)
    (dx,) = torch.autograd.grad(fused, leaf, dy)
    with sf.fusing(False):
        leaf = x.clone().requires_grad_()
        plain = model(leaf, **given)
        (want,) = torch.autograd.grad(plain, leaf, dy)
    y, saved = op.fwd(x, cos=given["c"], sin=given["s"])
    assert_bitwise_equal([plain.detach(), want], [y, op.bwd(dy, saved, needs=frozenset({"x"}))[0]])
    torch.testing.assert_close([fused, dx], [plain, want], atol=1e-6, rtol=1e-6)
