"""Attention in C, compared with torch and float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from seqfuse import compiler, ops
from seqfuse.compiler import CompileError
from seqfuse.errors import FallbackWarning, InputError
from seqfuse.kernels.c import attention
from seqfuse.ops import _attention, _attention_on_cpu
from seqfuse.ops import attention as ops_attention
from seqfuse.ops._philox import drop_mask
from seqfuse.testing import assert_bitwise_equal, seeded_randn
from seqfuse.testing.judge import judge
from tests.kernels.references import attention_in_torch
from tests.kernels.test_attention import DTYPES, check, ours

SEED = torch.tensor(2**40 + 5)
# Batch, heads, heads of keys, queries, keys, elements of a head; limits, and the mask, if any.
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any], str | None]] = {
    "plain": ((2, 3, 3, 37, 41, 16), {}, None),
    "causal": ((2, 4, 2, 70, 70, 64), {"causal": True}, None),
    "long": ((1, 2, 1, 150, 150, 20), {"causal": True, "p": 0.2}, None),
    "fewer keys": ((1, 2, 1, 75, 9, 80), {"causal": True}, None),
    "more keys": ((1, 3, 1, 5, 523, 32), {"p": 0.3}, None),
    "one": ((3, 1, 1, 1, 1, 1), {"p": 0.5}, None),
    "window": ((2, 2, 2, 90, 90, 48), {"window": 5, "p": 0.3}, None),
    "causal window": ((1, 4, 1, 200, 200, 16), {"window": 30, "causal": True}, None),
    "soft-cap": ((2, 2, 1, 33, 33, 12), {"softcap": 2.0, "causal": True, "p": 0.1}, None),
    "bool mask": ((2, 3, 1, 37, 41, 16), {"p": 0.3}, "bool"),
    "mask of keys": ((2, 3, 3, 37, 41, 16), {}, "keys"),
    "bias": ((2, 2, 2, 37, 70, 24), {"softcap": 3.0, "window": 20}, "bias"),
}


def drawn(name: str, seed: int, dtype: torch.dtype = torch.float32) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """q, k and v as views of packed heads, and dy."""
    (B, H, Hkv, S, N, D), *_ = CASES[name]
    sizes = ((S, H), (N, Hkv), (N, Hkv), (S, H))
    q, k, v, dy = (seeded_randn((B, s, 2, h, D), 5 * seed + i, dtype=dtype)[:, :, 1] for i, (s, h) in enumerate(sizes))
    return (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)), dy


def mask_of(name: str) -> Tensor | None:
    (B, H, _, S, N, _), _, kind = CASES[name]
    if kind is None:
        return None
    mask = seeded_randn({"bool": (1, 1, S, N), "keys": (B, 1, 1, N), "bias": (1, H, N, S)}[kind], 4)
    mask = mask.mT if kind == "bias" else torch.where(mask > -1, 0.0, -torch.inf)
    if kind == "bool":
        mask[:, :, 7] = -torch.inf  # a row that sees no key
    return mask


def _forward(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    return attention.attention_on_cpu(q, k, v, q.shape[-1] ** -0.5, **how)


def _backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, out: Any, **how: Any) -> None:
    attention.attention_on_cpu_bwd(dy, q, k, v, out, q.shape[-1] ** -0.5, **how)


IN_C: Any = SimpleNamespace(attention_fwd=_forward, attention_bwd=_backward)


def how_of(name: str) -> dict[str, Any]:
    limits, mask = CASES[name][1], mask_of(name)
    return limits | ({"seed": SEED} if "p" in limits else {}) | ({} if mask is None else {"mask": mask})


def in_c(name: str) -> Any:
    return ours(*drawn(name, 0), how_of(name), IN_C)


def check_case(name: str, dtype: torch.dtype = torch.float32) -> None:
    check(functools.partial(drawn, name, dtype=dtype), how_of(name), IN_C)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_it_is_what_torch_makes(name: str, dtype: torch.dtype) -> None:
    check_case(name, dtype)


@pytest.mark.parametrize("name", ["causal", "more keys", "window", "bias"])
def test_threads_change_no_bit(
    name: str, by_threads: Callable[[Callable[[], Any]], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_LARGE", 0)
    first, *others = by_threads(lambda: in_c(name))
    for other in others:
        assert_bitwise_equal(other, first)


@pytest.mark.parametrize("lanes", [8, 4])
def test_processors_with_shorter_vectors(lanes: int, altered: Callable[[str, str], None]) -> None:
    if lanes == 8:
        altered("#if defined(__AVX512F__)", "#if 0")
    else:
        altered(
            "#if defined(__AVX512F__)\n#define LANES 16\n#define VECTORS 4\n#elif defined(__AVX__)", "#if 0\n#elif 0"
        )
    for name in ("causal", "more keys", "bias", "long"):
        check_case(name)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite(value: float) -> None:
    """A NaN spoils the row of its query, and the gradients of the values it attends to; an infinite score only its own
    key. Torch's softmax spoils all weights of a row for an infinite score, and its kernel loses a NaN."""
    (q, k, v), dy = drawn("causal", 0)
    q[0, 1, 20, 3] = value
    k[0, 0, 20] = k[0, 0, 20].abs()  # which make a score of infinite terms of one sign, or NaN
    k[0, 0, 7, 3], k[0, 0, 8, 3] = 1.0, -1.0
    (y, lse), out = _forward(q, k, v, causal=True), tuple(torch.full_like(t, torch.nan) for t in (q, k, v))
    _backward(dy, q, k, v, y, lse, out, causal=True)
    (of_y, of_dq, _, of_dv), sums, _ = attention_in_torch((q, k, v), dy, {"causal": True}, torch.float64)
    for mine, theirs in ((y, of_y), (lse, sums), (out[2], of_dv)):
        assert bool((~mine.isfinite()).any())
        spoiled, more = ~mine.isfinite(), ~theirs.isfinite()
        if mine is out[2]:
            more[:, :, 21:] = False
        assert torch.equal(spoiled, more) if mine is not out[2] or value != value else not bool((spoiled & ~more).any())
    finite = torch.arange(70) != 20
    for mine, theirs, rows in ((y, of_y, 1), (out[0], of_dq, 2)):
        got, wanted = mine.movedim(rows, 0)[finite], theirs.movedim(rows, 0)[finite]
        torch.testing.assert_close(got, wanted.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_hidden_value_that_is_not_finite_spoils_no_gradient_of_a_query(value: float) -> None:
    (q, k, v), dy = drawn("causal", 0)
    v[0, 0, 20, 3] = value
    (y, lse), out = _forward(q, k, v, causal=True), tuple(map(torch.empty_like, (q, k, v)))
    _backward(dy, q, k, v, y, lse, out, causal=True)
    finite = out[0].isfinite().all(-1)
    assert finite[:, :, :20].all()
    assert not finite[0, 0, 20:].any()


SHAPES = {"heads": (4, 4, None), "shared heads": (4, 2, None), "soft-cap": (4, 4, 5.0)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", [None, "bool", "float"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_what_it_is_without(
    shape: str, dropout: float, mask: str | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, kv_heads, softcap = SHAPES[shape]
    op = ops.Attention(heads, kv_heads, causal=True, dropout=dropout, softcap=softcap, mask=mask and "mask")
    calls: list[str] = []
    plain, both = attention._call, attention.both_on_cpu

    def counted(run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (calls.append("c"), run(*args))[1]

    monkeypatch.setattr(attention, "_call", counted(plain))
    monkeypatch.setattr(attention, "both_on_cpu", lambda *args, **kw: tuple(map(counted, both(*args, **kw))))
    monkeypatch.setattr(_attention_on_cpu, "_known", {})
    monkeypatch.setattr(_attention, "C_ATTENTION_WORTHWHILE", 0)

    def given(of: torch.dtype, seed: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        x, dy = (seeded_randn((2, 83, n * 8), n + 100 * seed).to(dtype).to(of) for n in (heads + 2 * kv_heads, heads))
        m, inputs = seeded_randn((2, 1, 83, 83), 7 + seed), dict[str, Tensor]()
        if mask is not None:
            inputs["attn_mask"] = m > -1 if mask == "bool" else m.to(of)
        return x, dy, inputs

    def passes(of: torch.dtype, seed: int) -> dict[str, Tensor | None]:
        x, dy, inputs = given(of, seed)
        needs = frozenset({"x", "attn_mask"}) if mask == "float" else frozenset({"x"})
        y, saved = op.fwd(x, seed=SEED, **inputs)
        dx, other = op.bwd(dy, saved, needs=needs)
        return {"y": y, "dx": dx, **{name: t for name, t in other.items() if isinstance(t, Tensor)}}

    def by_autograd(seed: int) -> list[dict[str, Tensor]]:
        """The formula in the same dtype, whose roundings are others: one of a score reaches a whole row."""
        x, dy, inputs = given(dtype, seed)
        needed = {"dx": x.requires_grad_()}
        if mask == "float":
            needed["attn_mask"] = inputs["attn_mask"].requires_grad_()
        y = op.reference(x, seed=SEED, **inputs)
        return [{"y": y.detach(), **dict(zip(needed, torch.autograd.grad(y, [*needed.values()], dy), strict=True))}]

    def measure(seed: int) -> tuple[Any, Any, Any]:
        calls.clear()
        mine, exact = passes(dtype, seed), passes(torch.float64, seed)
        assert len(calls) == (0 if dtype in _attention._IN_TILES and not dropout and softcap is None else 2)
        calls.clear()
        with monkeypatch.context() as within:
            without_c(within)
            theirs = passes(dtype, seed)
        assert not calls
        return mine, theirs, exact

    judge(measure, 0, others=by_autograd)


def without_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_attention.Scores, "_in_c", lambda *_: False)
    monkeypatch.setattr(_attention_on_cpu, "_known", {})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(37,), (2, 33), (2, 3, 70), (0, 5)], ids=str)
@pytest.mark.parametrize(
    "limits",
    [{}, {"window": 5}, {"softcap": 2.0, "scale": 0.3}, {"dropout": 0.3}],
    ids=["", "window", "softcap", "dropout"],
)
def test_what_is_decided_once_is_what_every_call_decides(
    limits: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_attention, "_IN_TILES", frozenset())
    op, needs = ops.Attention(4, 2, causal=True, **limits), frozenset({"x"})
    x, wide = (seeded_randn((*shape, n * 24), n, dtype=dtype) for n in (8, 16))
    dy = seeded_randn((*shape, 96), 1, dtype=dtype)
    drawn = (SEED, 0.3) if op.dropout else (None, 0.0)
    assert (_attention_on_cpu.passes_in_c(op, (x,), None, *drawn, False) is None) is (0 in shape)
    found = [op.fwd(given, seed=SEED) for given in (x, wide.chunk(2, -1)[0].copy_(x))]  # a slice has other strides
    for y, saved in found:
        assert_bitwise_equal(y, found[0][0])
        assert (saved.y is None) is (found[0][1].y is None)
        assert (saved.seed, saved.p) == drawn
        assert saved.lse.shape == (*shape[:-1], 4, shape[-1])
        assert_bitwise_equal(saved.lse, found[0][1].lse)
        for given in (dy, dy.mT.contiguous().mT):
            dx = op.bwd(given, saved, needs=needs)[0]
            assert dx is not None
            assert_bitwise_equal(dx, op.bwd(dy, found[1][1], needs=needs)[0])


MASKS = {
    "keys": lambda s, n: seeded_randn((2, 1, 1, n), 5) > -1,
    "queries and keys": lambda s, n: (seeded_randn((n, s), 5) > -1).mT,
    "heads": lambda s, n: seeded_randn((1, 4, s, n), 5),
    "heads of a batch": lambda s, n: seeded_randn((2, 4, n, s), 5).mT,
    "hidden rows": lambda s, n: seeded_randn((4, s, n), 5).masked_fill(torch.arange(s)[:, None] % 3 == 0, -torch.inf),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("limits", [{}, {"softcap": 2.0, "causal": True}, {"dropout": 0.3}], ids=["", "limits", "drop"])
@pytest.mark.parametrize("mask", [None, *MASKS])
@pytest.mark.parametrize("keys", [33, 70])
def test_masks_and_other_keys_are_decided_once(
    keys: int, mask: str | None, limits: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit what every call decides, for inputs in other layouts, too; and close to the reference."""
    monkeypatch.setattr(_attention, "_IN_TILES", frozenset())
    rows = keys if limits.get("causal") else 33
    op = ops.CrossAttention(4, 2, mask=mask and "mask", **limits)
    named: dict[str, Any] = {} if mask is None else {"attn_mask": MASKS[mask](rows, keys)}
    needs = frozenset(
        {"x", "k", "v"} | ({"attn_mask"} if mask is not None and named["attn_mask"].dtype is torch.float32 else set())
    )
    drawn = [
        seeded_randn((2, of, n * 24), i, dtype=dtype) for i, (of, n) in enumerate(((rows, 4), (keys, 2), (keys, 2)))
    ]
    cut = [torch.cat([t, t], -1).chunk(2, -1)[0] for t in drawn]
    turned = [t.mT.contiguous().mT for t in drawn]
    dy = seeded_randn((2, rows, 96), 9, dtype=dtype)

    def passes(x: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        y, saved = op.fwd(x, k=k, v=v, seed=SEED, needs=needs, **named)
        dx, others = op.bwd(dy, saved, needs=needs)
        assert saved.y is None or not needs & {"attn_mask"}
        return [y, saved.lse, dx, *(others[name] for name in sorted(others))]  # pyright: ignore

    monkeypatch.setattr(_attention_on_cpu, "_known", {})
    found = passes(*drawn)
    assert [*map(bool, _attention_on_cpu._known.values())] == [True]
    for given in (cut, turned, (drawn[0], *cut[1:]), (*drawn[:2], turned[2])):
        assert_bitwise_equal(passes(*given), found)
    if mask is not None:  # in another layout
        named["attn_mask"] = named["attn_mask"].mT.contiguous().mT
        assert_bitwise_equal(passes(*drawn), found)
    assert None not in _attention_on_cpu._known.values()
    with monkeypatch.context() as within:
        within.setattr(ops_attention, "passes_in_c", lambda *_: None)
        assert_bitwise_equal(passes(*drawn), found)
    leaves = [t.double().requires_grad_() for t in drawn]
    given = {n: t.double().requires_grad_() if t.is_floating_point() else t for n, t in named.items()}
    y = op.reference(leaves[0], k=leaves[1], v=leaves[2], seed=SEED, **given)
    others = {"k": leaves[1], "v": leaves[2]} | {n: t for n, t in given.items() if t.requires_grad}
    exact = torch.autograd.grad(y, [leaves[0], *(others[name] for name in sorted(others))], dy.double())
    for mine, theirs in zip([found[0], *found[2:]], [y, *exact], strict=True):
        most = 16 * torch.finfo(dtype).eps * float(theirs.detach().abs().max())
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=most)


@pytest.mark.parametrize("name", ["v", "attn_mask"])
def test_a_tensor_elsewhere_is_not_read(name: str) -> None:
    op = ops.CrossAttention(2, mask="mask")
    given = {name: seeded_randn((1, 20, 16), i) for i, name in enumerate(("x", "k", "v"))}
    given["attn_mask"] = seeded_randn((20, 20), 3)
    op.fwd(**given)
    with pytest.raises(InputError, match="one device, got cpu and meta"):
        op.fwd(**given | {name: given[name].to("meta")})


def test_what_no_decision_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that must be copied, and a mask's gradient that needs too many scores at a time."""
    op, needs = ops.Attention(4, 2, mask="mask"), frozenset({"x", "attn_mask"})
    x, dy = seeded_randn((2, 3, 20, 8 * 8), 0), seeded_randn((2, 3, 20, 4 * 8), 1)

    def passes(mask: Tensor, x: Tensor, dy: Tensor) -> tuple[int, Tensor, Tensor, Any]:
        monkeypatch.setattr(_attention_on_cpu, "_known", known := {})
        y, saved = op.fwd(x, attn_mask=mask, needs=needs)
        dx, others = op.bwd(dy, saved, needs=needs)
        assert dx is not None
        return sum(found is not None for found in known.values()), y, dx, others["attn_mask"]

    mask = seeded_randn((3, 4, 20, 20), 2)
    count, *found = passes(mask, x, dy)
    whole, *wanted = passes(mask[None].expand(2, -1, -1, -1, -1).contiguous(), x, dy)
    assert (count, whole) == (0, 1)
    torch.testing.assert_close(found[:2], wanted[:2])
    torch.testing.assert_close(found[2], wanted[2].sum(0))
    monkeypatch.setattr(_attention, "_HELD", 4 * 6 * 20 * 20 - 1)
    count, *found = passes(mask[None].expand(2, -1, -1, -1, -1).contiguous(), x, dy)
    assert count == 0
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("length", [20, 500])
def test_views_of_the_other_sign(length: int) -> None:
    op, needs = ops.Attention(4, 2, causal=True), frozenset({"x"})
    x, dy = seeded_randn((1, length, 8 * 8), 0), seeded_randn((1, length, 4 * 8), 1)
    wide = torch.cat([x, x], -1).chunk(2, -1)[0]  # with the strides that the kernel of any call reads
    wanted = op.bwd(-dy, op.fwd(-x)[1], needs=needs)[0]
    assert wanted is not None
    for given in (x, wide):
        y, saved = op.fwd(torch._neg_view(given))
        assert_bitwise_equal(y, op.fwd(-x)[0])
        dx = op.bwd(torch._neg_view(dy), saved, needs=needs)[0]
        assert dx is not None
        assert_bitwise_equal(dx, wanted)


def test_a_mask_of_the_other_sign() -> None:
    op, needs = ops.Attention(2, causal=True, softcap=5.0, mask="mask"), frozenset({"x", "attn_mask"})
    x, dy, mask = (seeded_randn(of, i) for i, of in enumerate([(1, 40, 48), (1, 40, 16), (2, 40, 40)]))
    y, saved = op.fwd(x, attn_mask=torch._neg_view(-mask))
    wanted_y, wanted = op.fwd(x, attn_mask=mask)
    assert_bitwise_equal(y, wanted_y)
    (dx, dmask), (wanted_dx, wanted_dmask) = (op.bwd(dy, record, needs=needs) for record in (saved, wanted))
    assert_bitwise_equal([dx, dmask["attn_mask"]], [wanted_dx, wanted_dmask["attn_mask"]])


def test_torch_may_make_the_gradients_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_attention, "C_ATTENTION_WORTHWHILE", 0)
    op, x, dy = ops.Attention(2, causal=True), seeded_randn((2, 40, 96), 0), seeded_randn((2, 40, 32), 1)
    y, saved = op.fwd(x)
    mine = op.bwd(dy, saved, needs=frozenset({"x"}))[0]
    without_c(monkeypatch)
    theirs = op.bwd(dy, saved, needs=frozenset({"x"}))[0]
    torch_y, torch_saved = op.fwd(x)
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(y, torch_y)
    monkeypatch.undo()
    torch.testing.assert_close(op.bwd(dy, torch_saved, needs=frozenset({"x"}))[0], theirs)


def test_torch_takes_its_place_where_it_does_not_compile(anew: None, monkeypatch: pytest.MonkeyPatch) -> None:
    op, x = ops.Attention(2, dropout=0.2), seeded_randn((1, 9, 24), 0)
    wanted = op.fwd(x, seed=SEED)[0]

    def failing(source: str) -> Any:
        raise CompileError("cc 1.0 failed: no space left on device")

    monkeypatch.setattr(compiler, "function", failing)
    monkeypatch.setattr(compiler, "_failures", [])
    monkeypatch.setattr(attention, "compile_both", attention.compile_both.__wrapped__)
    monkeypatch.setattr(_attention_on_cpu, "_known", {})
    with pytest.warns(FallbackWarning, match="kernel of Attention failed .*no space left on device"):
        y, saved = op.fwd(x, seed=SEED)
    torch.testing.assert_close(y, wanted)
    op.bwd(y, saved, needs=frozenset({"x"}))
    monkeypatch.setattr(compiler, "_failures", [])
    with pytest.warns(FallbackWarning, match="kernel of Dropout failed"):
        mine = drop_mask(SEED, torch.Size((3, 5)), 0.4)
    assert mine.shape == (3, 5)
