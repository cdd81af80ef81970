"""Attention, against its math in float64 written out here."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import seqfuse as sf
from seqfuse import ops
from seqfuse.ops import _attention, _attention_on_cpu
from seqfuse.ops._attention import additive
from seqfuse.testing import assert_bitwise_equal, check_op, seeded_randn
from tests.kernels.references import attention_in_torch
from tests.watching import saving

from .passes import check_needs

Mask = Tensor | None
HALF = (torch.bfloat16, torch.float16)


def packed(rows: tuple[int, ...], heads: int, kv_heads: int, size: int, seed: int = 0, **kwargs: Any) -> Tensor:
    return seeded_randn((*rows, (heads + 2 * kv_heads) * size), seed, **kwargs)


def truth(x: Tensor, op: ops.Attention, mask: Mask = None, ends: Mask = None, seed: Mask = None) -> Tensor:
    """The math, in float64, differentiable; for packed sequences x has no batch."""
    q, k, v = op.heads_of(x.double())
    lead = q.shape[:-3]
    qkv = tuple(t.reshape(-1, *t.shape[-3:]) for t in (q, k, v))
    how: dict[str, Any] = {name: getattr(op, name) for name in ("causal", "window", "softcap", "scale")}
    how |= {"cu_seqlens": ends, "p": op.dropout if seed is not None else 0.0, "seed": seed}
    if mask is not None:
        whole = mask.expand(*lead, op.heads, x.shape[-2], x.shape[-2])
        how["mask"] = whole.reshape(-1, *whole.shape[-3:])
    (y, *_), *_ = attention_in_torch(qkv, torch.zeros_like(qkv[0]).transpose(1, 2), how, torch.float64)
    return y.flatten(-2).view(*lead, x.shape[-2], -1)


def masks(kind: str | None, heads: int, length: int) -> Mask:
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randn(2, heads, length, length, generator=generator)
    if kind == "bool":
        seen = drawn[:, :1] > -0.5
        seen[0, 0, 3] = False
        return seen
    if kind == "int":
        return (drawn[:, :1, :1] > -0.5).long()
    if kind == "float":
        return drawn[0]
    # Of adjacent keys one is not masked: next to -1e9 float32 has no digit for the scores of a row.
    hidden = (drawn[:, :1, :1] < -1) & (torch.arange(length) % 3 != 0)
    return drawn[:, :1, 0, :].unsqueeze(2).masked_fill(hidden, -1e9) if kind == "keys" else None


def agree(op: ops.Attention, x: Tensor, mask: Mask = None, ends: Mask = None) -> None:
    """The operation in a sequence, and its reference, against the float64 math: y and every gradient."""
    channels = {name: t for name, t in (("m", mask), ("ends", ends)) if t is not None}
    extras = {name: t for name, t in (("attn_mask", mask), ("cu_seqlens", ends)) if t is not None}
    x = x.requires_grad_()
    leaves = [x, *(t for t in channels.values() if t.requires_grad)]
    y = truth(x, op, mask, ends)
    dy = seeded_randn(tuple(y.shape), 8)
    want = [y, *torch.autograd.grad(y, leaves, dy.double())]
    # A score is a sum over the size of a head: its error grows with the root of that.
    near = 1e-5 * max(1, y.shape[-1] / op.heads / 64) ** 0.5
    for found in (sf.Sequential(op)(x, **channels), op.reference(x, **extras)):
        got = [found, *torch.autograd.grad(found, leaves, dy)]
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.double(), b.double(), atol=near, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("kind", [torch.bool, torch.int64], ids=str)
def test_a_mask_of_what_is_seen_adds_zero_or_minus_infinity(kind: torch.dtype, dtype: torch.dtype):
    mask = torch.tensor([[2, 0, -1], [0, 1, 0]]).to(kind)
    want = torch.zeros(2, 3, dtype=dtype).masked_fill(mask == 0, -torch.inf)
    assert_bitwise_equal(additive(mask, dtype), want)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "kind", "length"),
    [
        pytest.param(*heads, kind, length, marks=[pytest.mark.full] * ((i + j + k) % 3 > 0))
        for i, heads in enumerate([(4, 4), (4, 2), (3, 1)])
        for j, kind in enumerate([None, "bool", "int", "float", "keys"])
        for k, length in enumerate([5, 16, 37])
    ],
)
def test_is_its_math(heads: int, kv_heads: int, kind: str | None, length: int):
    for causal, window, softcap in itertools.product((False, True), (None, 4), (None, 2.0)):
        op = ops.Attention(
            heads, kv_heads, causal=causal, window=window, softcap=softcap, mask=None if kind is None else "m"
        )
        agree(op, packed((2, length), heads, kv_heads, 8), masks(kind, heads, length))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", [None, "float", "keys"])
def test_packed_sequences_do_not_see_each_other(kind: str | None, window: int | None, causal: bool):
    op = ops.Attention(4, 2, causal=causal, window=window, cu_seqlens="ends", mask=None if kind is None else "m")
    mask: Any = masks(kind, 4, 40)
    mask = mask[0] if kind == "keys" else mask  # of one batch
    agree(op, packed((40,), 4, 2, 8), mask, torch.tensor([0, 17, 17, 35, 40]))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("length", "c"), [(1, False), (4, False), (12, False), (15, False), (16, False), (16, True), (40, True)]
)
def test_few_keys_give_the_numbers_and_gradients_of_torch_with_a_nan_in_a_query_too(
    length: int, c: bool, causal: bool, monkeypatch: pytest.MonkeyPatch
):
    alike: Any = torch.testing.assert_close
    if not c:
        monkeypatch.setattr(_attention.Scores, "_in_c", lambda *_: False)
        monkeypatch.setattr(_attention_on_cpu, "_known", {})
        alike = assert_bitwise_equal
    same = {"equal_nan": True} if c else {}
    for spoiled in (False, True):
        x = seeded_randn((2, length, 48), 0)
        if spoiled:
            x[1, length // 2, :16] = torch.nan
        mine, wanted = x.clone().requires_grad_(), x.clone().requires_grad_()
        y = sf.Sequential(ops.Attention(2, causal=causal))(mine)
        heads = [t.unflatten(-1, (2, 8)).transpose(1, 2) for t in wanted.chunk(3, -1)]
        want = F.scaled_dot_product_attention(*heads, is_causal=causal).transpose(1, 2).flatten(2)
        alike(y, want, **same)
        dy = seeded_randn((2, length, 16), 1)
        y.backward(dy)
        want.backward(dy)
        assert mine.grad is not None
        assert wanted.grad is not None
        alike(mine.grad, wanted.grad, **same)


@pytest.mark.parametrize("length", [4, 15, 16, 20])
def test_a_nan_in_a_packed_sequence_stays_there(length: int):
    op, x = ops.Attention(2, cu_seqlens="ends"), seeded_randn((length + 28, 48), 0)
    x[2, 16:] = torch.nan
    ends = torch.tensor([0, length, length + 8, length + 28], dtype=torch.int32)
    y = sf.Sequential(op)(x, ends=ends)
    assert y[:length].isnan().all()
    assert not y[length:].isnan().any()


def test_packed_sequences_are_what_they_are_alone():
    op = ops.Attention(2, causal=True, cu_seqlens="ends")
    x = packed((50,), 2, 2, 8)
    y = sf.Sequential(op)(x, ends=torch.tensor([0, 20, 50], dtype=torch.int32))
    alone = ops.Attention(2, causal=True)
    torch.testing.assert_close(y, torch.cat((alone(x[:20]), alone(x[20:]))))


@pytest.mark.parametrize("shape", [(1, 1), (4, 2, 5, 5), (2, 1, 5, 5), (5,), (4, 5, 5), ()], ids=str)
def test_a_float_mask_gets_its_gradient_whatever_it_was_broadcast_from(shape: tuple[int, ...]):
    op = ops.Attention(4, 2, mask="m")
    mask = seeded_randn(shape, 4)
    if shape == (4, 2, 5, 5):
        mask = seeded_randn((2, 4, 5, 5), 4)
    agree(op, packed((2, 5), 4, 2, 4), mask.requires_grad_())
    if len(shape) <= 3:
        agree(op, packed((3, 2, 5), 4, 2, 4), mask)


@pytest.mark.parametrize(
    ("arguments", "dropout", "length"),
    [
        pytest.param(arguments, dropout, length, marks=[pytest.mark.full] * ((i + j + k) % 2))
        for i, arguments in enumerate([{"causal": True}, {"softcap": 3.0}, {"window": 3}, {"scale": 0.2}])
        for j, dropout in enumerate([0.0, 0.25])
        for k, length in enumerate([7, 33])
    ],
)
def test_keeps_its_contract(arguments: dict[str, Any], dropout: float, length: int):
    check_op(ops.Attention(4, 2, dropout=dropout, **arguments), packed((2, length), 4, 2, 4))


@pytest.mark.parametrize("mask", [True, False])
def test_only_wanted_gradients_are_computed(mask: bool):
    x = packed((6,), 2, 1, 3)
    if not mask:
        check_needs(ops.Attention(2, 1, causal=True), x)
        return
    op = ops.Attention(2, 1, mask="m")
    bias = seeded_randn((6, 6), 2)
    _, saved = op.fwd(x, attn_mask=bias, needs=frozenset({"x", "attn_mask"}))
    dy = seeded_randn((6, 6), 3)
    dx, grads = op.bwd(dy, saved, needs=frozenset({"x", "attn_mask"}))
    assert_bitwise_equal(op.bwd(dy, saved, needs=frozenset({"x"}))[0], dx)
    alone = op.bwd(dy, saved, needs=frozenset({"attn_mask"}))
    assert alone[0] is None
    assert_bitwise_equal(alone[1]["attn_mask"], grads["attn_mask"])


@pytest.mark.parametrize("length", [9, 24])
@pytest.mark.parametrize("dropout", [0.3, 1.0])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_dropped_weights_are_those_of_a_dropout_over_all_of_them(kv_heads: int, dropout: float, length: int):
    op = ops.Attention(4, kv_heads, causal=True, dropout=dropout)
    x, seed = packed((2, length), 4, kv_heads, 4).requires_grad_(), torch.tensor(0x1234_5678_9ABC)
    y, saved = op.fwd(x.detach(), seed=seed)
    want = truth(x, op, seed=seed)
    dy = seeded_randn(tuple(y.shape), 5)
    (dx,) = torch.autograd.grad(want, x, dy.double())
    torch.testing.assert_close(y.double(), want.detach(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(op.bwd(dy, saved, needs=frozenset({"x"}))[0], dx, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(op.reference(x, seed=seed).double(), want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("held", [1, 90, 1000])
@pytest.mark.parametrize(
    "arguments", [{"dropout": 0.3}, {"window": 3}, {"causal": True, "window": 4}, {"softcap": 2.0}], ids=str
)
def test_the_size_of_a_block_changes_nothing(monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], held: int):
    # Float64 runs in blocks also where there is a C compiler.
    op, x, seed = ops.Attention(2, 1, **arguments), packed((2, 13), 2, 1, 4).double(), torch.tensor(77)
    dy = seeded_randn((2, 13, 8), 5, dtype=torch.float64)

    def both() -> tuple[Tensor, Any]:
        y, saved = op.fwd(x, seed=seed)
        return y, op.bwd(dy, saved, needs=frozenset({"x"}))[0]

    whole = both()
    monkeypatch.setattr(_attention, "_HELD", held)
    torch.testing.assert_close(both(), whole, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("shape", [(13, 1), (1, 13), (2, 1, 13, 1), (2, 2, 1, 13), (1, 1)], ids=str)
def test_a_mask_is_broadcast_to_each_block(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]):
    monkeypatch.setattr(_attention, "_HELD", 2 * 2 * 13 * 4)
    agree(ops.Attention(2, window=3, mask="m"), packed((2, 13), 2, 2, 4), seeded_randn(shape, 4).requires_grad_())


def test_nothing_of_the_size_of_the_scores_is_kept():
    length = 64
    for arguments in ({"causal": True}, {"dropout": 0.1}, {"window": 5}, {"softcap": 3.0}):
        model = sf.Sequential(ops.Attention(2, **arguments))
        with saving() as kept:
            model(packed((1, length), 2, 2, 4).requires_grad_())
        assert kept
        assert max(t.numel() for t in kept) < length * length


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("length", [6, 20])
def test_a_row_that_sees_nothing_gives_zeros_both_ways(length: int, dtype: torch.dtype):
    seen = torch.ones(length, length, dtype=torch.bool)
    seen[2] = False
    for mask in (seen, seen.long(), torch.zeros(length, length).masked_fill(~seen, -torch.inf)):
        x = packed((1, length), 2, 1, 8).to(dtype).requires_grad_()
        y = sf.Sequential(ops.Attention(2, 1, mask="m"))(x, m=mask)
        y.backward(torch.ones_like(y))
        assert not y[0, 2].any()
        assert not x.grad[0, 2, : 2 * 8].any()
        assert y.isfinite().all()
        assert x.grad.isfinite().all()


def by_math(x: Tensor, op: ops.Attention, mask: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Torch's attention without a fused kernel, which saves its weights: y, dx."""
    x, size = x.detach().requires_grad_(), x.shape[-1] // (op.heads + 2 * op.kv_heads)
    heads = x.unflatten(-1, (-1, size)).transpose(-3, -2)
    q, k, v = heads.split((op.heads, op.kv_heads, op.kv_heads), -3)
    if op.window is not None:
        row = torch.arange(x.shape[-2])
        mask = mask.masked_fill((row.unsqueeze(1) - row).abs() >= op.window, -torch.inf)
    with sdpa_kernel(SDPBackend.MATH):
        y = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(-3, -2).flatten(-2)
    return y.detach(), torch.autograd.grad(y, x, dy)[0]


LARGE = {
    "-1e4": -1e4, "-1e9": -1e9, "least float16": torch.finfo(torch.float16).min,
    "least bfloat16": torch.finfo(torch.bfloat16).min, "least float32": torch.finfo(torch.float32).min,
    "least float64": torch.finfo(torch.float64).min,
}  # fmt: skip


@pytest.mark.parametrize("length", [6, 32])
@pytest.mark.parametrize("arguments", [{}, {"window": 3}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("value", LARGE)
def test_weights_of_a_row_under_one_large_mask_add_up_to_one(
    value: str, dtype: torch.dtype, arguments: dict[str, Any], length: int
):
    number, op = LARGE[value], ops.Attention(4, 2, mask="m", **arguments)
    kind = dtype if abs(number) <= torch.finfo(dtype).max else torch.float32
    mask = torch.zeros(length, length, dtype=torch.float64 if value == "least float64" else kind)
    mask[:, 1] = mask[2] = mask[4] = number
    x = packed((2, length), 4, 2, 8, dtype=dtype).requires_grad_()
    dy = seeded_randn((2, length, 32), 5, dtype=dtype)
    rounding = max(torch.finfo(dtype).eps, min(abs(number) / 2**23, 1e-2) if abs(number) < 1e6 else 0)
    for found in (sf.Sequential(op)(x, m=mask), op.reference(x, attn_mask=mask)):
        (dx,) = torch.autograd.grad(found, x, dy)
        parts = dx.double().split((32, 16, 16), -1)
        of_v, of_y = parts[2].sum(1).unflatten(-1, (2, 8)), dy.double().sum(1).unflatten(-1, (2, 2, 8)).sum(2)
        torch.testing.assert_close(of_v, of_y, rtol=0, atol=length * 8 * rounding)
        if number < -1e6 and not arguments:  # next to it no digit of a score is left
            mean = x.detach()[..., 48:].double().mean(1).unflatten(-1, (2, 1, 8)).expand(-1, -1, 2, -1).flatten(1)
            torch.testing.assert_close(found[:, 2].double(), mean, rtol=0, atol=4 * rounding)
        if "softcap" not in arguments:
            narrow = mask.double().clamp(min=torch.finfo(torch.float32).min).float()
            want = by_math(x.float(), op, narrow, dy.float())
            for a, b in zip((found, dx), want, strict=True):
                torch.testing.assert_close(a.float(), b, rtol=0, atol=length * 4 * rounding)


@pytest.mark.parametrize("arguments", [{}, {"window": 3}, {"scale": 8**-0.5}], ids=str)
def test_the_reference_in_float64_is_plain_math_as_torch_s_is(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """Neither a kernel nor a log-sum-exp: the math that everything else is compared with."""
    op, dy = ops.Attention(4, 2, mask="m", **arguments), seeded_randn((2, 20, 32), 5, dtype=torch.float64)
    mask = torch.zeros(20, 20, dtype=torch.float64)
    mask[:, 1], mask[2], mask[3], mask[4], mask[5] = -1e4, -1e9, -1e300, torch.finfo(torch.float64).min, -torch.inf
    x = packed((2, 20), 4, 2, 8, dtype=torch.float64)
    want = by_math(x, op, mask, dy)
    torch.testing.assert_close(truth(x, op, mask), want[0], rtol=0, atol=1e-6)
    monkeypatch.setattr(F, "scaled_dot_product_attention", None)
    x.requires_grad_()
    y = op.reference(x, attn_mask=mask)
    for a, b in zip((y, torch.autograd.grad(y, x, dy)[0]), want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)  # the mask leaves that many digits of scores of 1e9
    with torch.no_grad():
        torch.testing.assert_close(op.reference(x, attn_mask=mask), y)


@pytest.mark.parametrize("size", [16, 64, 192, 256])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_large_scores_stay_finite_in_half_dtypes(dtype: torch.dtype, size: int):
    x = (60 * packed((1, 18), 2, 1, size)).to(dtype).requires_grad_()
    q, k = x.detach().float()[0, :, :size], x.detach().float()[0, :, 2 * size : 3 * size]
    assert size < 192 or (q @ k.mT).abs().max() > 65504
    y = sf.Sequential(ops.Attention(2, 1, causal=True))(x)
    y.backward(torch.ones_like(y))
    assert y.isfinite().all()
    assert x.grad.isfinite().all()


def test_is_the_attention_of_torch():
    x = packed((2, 3, 20), 4, 4, 8)
    q, k, v = (t.unflatten(-1, (4, 8)).transpose(-3, -2) for t in x.chunk(3, -1))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-3, -2).flatten(-2)
    torch.testing.assert_close(ops.Attention(4, causal=True)(x), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_computes_in_its_dtype(dtype: torch.dtype):
    model = sf.Sequential(ops.Linear(16, 48), ops.Attention(4, causal=True), ops.Linear(16, 16))
    x = seeded_randn((2, 20, 16), 0).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x.to(dtype))
        alone = ops.Attention(4)(packed((2, 20), 4, 4, 4).requires_grad_())
    assert y.dtype is alone.dtype is torch.bfloat16
    (y.sum() + alone.sum()).backward()
    assert x.grad is not None
    assert x.grad.dtype is torch.float32


def test_autocast_leaves_float64_as_it_is():
    op, x = ops.Attention(4), packed((2, 20), 4, 4, 4).double()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(op(x), op.reference(x), atol=1e-12, rtol=0)


def test_no_layout_of_x_is_misread():
    op = ops.Attention(2, causal=True)
    x = packed((2, 20), 2, 2, 4)
    strided = torch.stack((x, x), -1).flatten(-2)[..., ::2]
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    for other in (strided, turned, x[:1].expand(2, -1, -1)):
        torch.testing.assert_close(op(other), op(other.contiguous()))


def test_gradients_are_right_in_float64():
    for arguments in ({"causal": True}, {"softcap": 2.0}, {"window": 3}):
        model = sf.Sequential(ops.Attention(2, 1, **arguments))
        for length in (4, 17):
            x = packed((length,), 2, 1, 2, dtype=torch.float64).requires_grad_()
            assert torch.autograd.gradcheck(model, x, fast_mode=True)


@pytest.mark.parametrize("shape", [(2, 0, 12), (0, 5, 12), (0, 12)], ids=str)
def test_empty_inputs_give_empty_outputs(shape: tuple[int, ...]):
    x = torch.zeros(shape, requires_grad=True)
    y = sf.Sequential(ops.Attention(2, 1, causal=True))(x)
    y.sum().backward()
    assert y.shape == (*shape[:-1], 6)
    assert x.grad.shape == shape


@pytest.mark.parametrize("length", [5, 18])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (3, 1)], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("size", [16, 17, 24, 40, 80, 96, 127, 192, 255, 256])
def test_heads_may_be_of_any_size(size: int, heads: int, kv_heads: int, length: int):
    agree(ops.Attention(heads, kv_heads, causal=True), packed((2, length), heads, kv_heads, size))


def test_the_repr_says_what_differs_from_the_defaults():
    op = ops.Attention(4, 2, causal=True, window=3, dropout=0.1, scale=0.5, softcap=2.0, mask="m", cu_seqlens="e")
    named = "causal=True, window=3, dropout=0.1, scale=0.5, softcap=2.0, mask='m', cu_seqlens='e'"
    assert repr(op) == repr(copy.deepcopy(op)) == f"Attention(4, 2, {named})"


def test_heads_are_views_of_the_packed_numbers():
    x = packed((2, 5), 4, 2, 8)
    for rows, part in zip((4, 2, 2), ops.Attention(4, 2).heads_of(x), strict=True):
        assert part.shape == (2, rows, 5, 8)
        assert part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert torch.equal(torch.cat(ops.Attention(4, 2).heads_of(x), 1).transpose(1, 2).flatten(2), x)


class _InTurn(ops.Attention):
    """Takes q, k and v of each head interleaved."""

    def heads_of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = x.unflatten(-1, (self.heads, 3, -1)).transpose(-4, -3).unbind(-2)
        return q, k, v


@pytest.mark.parametrize("first", [0, 1])
def test_a_subclass_that_takes_its_input_apart_another_way(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_attention_on_cpu, "_known", {})
    both, x = (ops.Attention(2), _InTurn(2)), packed((2, 32), 2, 2, 8)
    for op in (both[first], both[1 - first]):
        torch.testing.assert_close(op.fwd(x)[0].double(), truth(x, op), rtol=1e-5, atol=1e-5)


def test_a_window_of_one_row_attends_to_that_row_alone() -> None:
    op, x = ops.Attention(2, causal=True, window=1), torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(op(x), x[..., 8:])


@pytest.mark.parametrize("how", [{"causal": True}, {"mask": "m"}, {"window": 2}], ids=str)
def test_a_nan_spoils_the_gradients_that_it_spoils_in_the_reference(how: dict[str, Any]):
    op, dy = ops.Attention(4, 2, **how), seeded_randn((7, 16), 3)
    seen = seeded_randn((7, 7), 4) > 0
    given, named = ({"m": seen}, {"attn_mask": seen}) if op.mask else ({}, {})
    for row, column in ((0, 1), (3, 5), (6, 0), (2, 17)):
        x = packed((7,), 4, 2, 4).index_put((torch.tensor(row), torch.tensor(column)), torch.tensor(torch.nan))
        mine, wanted = x.clone().requires_grad_(), x.requires_grad_()
        sf.Sequential(op)(mine, **given).backward(dy)
        op.reference(wanted, **named).backward(dy)
        assert mine.grad is not None
        assert wanted.grad is not None
        assert_bitwise_equal(mine.grad.isnan(), wanted.grad.isnan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)  # float64 runs in blocks
def test_an_infinite_score_spoils_the_weight_of_its_own_key_alone(dtype: torch.dtype):
    x = packed((20,), 2, 2, 4).to(dtype)
    x[3, 0], x[:, 8], x[5, 8] = torch.inf, -1, 1  # an element of a query of head 0, and of all keys
    x.requires_grad_()
    sf.Sequential(ops.Attention(2, window=5))(x).backward(seeded_randn((20, 8), 3).to(dtype))
    assert x.grad is not None
    assert (~x.grad[:, 16:].isfinite()).any(-1).nonzero().tolist() == [[5]]  # of values


def test_a_trace_of_a_step_keeps_its_draws() -> None:
    """A mask is a function of a seed that is drawn in the graph, as in eager: a tracer does not see C kernels."""
    model = sf.Sequential(ops.Attention(2, dropout=0.5), ops.Dropout(0.5))
    x = seeded_randn((1, 4, 12), 0)
    traced = torch.jit.trace(model, x, check_trace=False)
    for seed in (1, 2):
        torch.manual_seed(seed)
        wanted = model(x)
        torch.manual_seed(seed)
        torch.testing.assert_close(traced(x), wanted)


def of_strides(x: Tensor) -> Tensor:
    """The same numbers, with rows that lie further apart."""
    return torch.cat((x, x), -1)[..., : x.shape[-1]]


# One attention after another that differs in one thing.
AFTER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "heads": ({"heads": 4, "kv_heads": 2}, {"heads": 2, "kv_heads": 2}),
    "key heads": ({"heads": 4, "kv_heads": 4}, {"heads": 4, "kv_heads": 2}),
    "causal": ({}, {"causal": True}),
    "window": ({"causal": True}, {"causal": True, "window": 3}),
    "softcap": ({}, {"softcap": 0.5}),
    "scale": ({}, {"scale": 2.0}),
    "p": ({"dropout": 0.1}, {"dropout": 0.5}),
    "dtype": ({}, {"dtype": torch.bfloat16}),
    "strides": ({}, {"lies": of_strides}),
    "shape": ({}, {"rows": 24}),
    "mask": ({}, {"mask": "float"}),
    "dtype of the mask": ({"mask": "float"}, {"mask": "bool"}),
    "shape of the mask": ({"mask": "float"}, {"mask": "one head"}),
    "strides of the mask": ({"mask": "float"}, {"mask": "float", "mask_lies": of_strides}),
    "gradient of the mask": ({"mask": "float"}, {"mask": "float", "trained": True}),
}


def attended(
    heads: int = 2, kv_heads: int = 2, rows: int = 20, dtype: torch.dtype = torch.float32, mask: str = "",
    lies: Any = None, mask_lies: Any = None, trained: bool = False, **how: Any,
) -> list[Tensor | None]:  # fmt: skip
    op = ops.Attention(heads, kv_heads, mask="bias" if mask else None, **how)
    x = seeded_randn((2, rows, 96), 1, dtype=dtype)
    x = (lies(x) if lies else x).requires_grad_()
    bias = seeded_randn((1 if mask == "one head" else 2, rows, rows), 2)
    bias = bias > 0 if mask == "bool" else (mask_lies(bias) if mask_lies else bias).requires_grad_(trained)
    torch.manual_seed(3)
    y = op(x, bias=bias) if mask else op(x)
    y.backward(seeded_randn(tuple(y.shape), 4, dtype=dtype))
    return [y.detach(), x.grad, bias.grad]


@pytest.mark.parametrize("name", AFTER)
def test_an_attention_is_computed_as_if_it_were_the_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = AFTER[name]
    monkeypatch.setattr(_attention_on_cpu, "_known", {})
    wanted = attended(**second)
    _attention_on_cpu._known.clear()
    attended(**first)
    for got, want in zip(attended(**second), wanted, strict=True):
        assert (got is None) == (want is None)
        assert got is None or (got.dtype is want.dtype and torch.equal(got, want))
