"""CrossAttention: Attention with queries from the chain and keys and values from channels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import seqfuse as sf
from seqfuse import ops
from seqfuse.ops import _attention
from seqfuse.testing import check_op, seeded_randn


def drawn(batch: tuple[int, ...], rows: int, keys: int, heads: int, kv_heads: int, size: int, **how: Any):
    x, k, v = (
        seeded_randn((*batch, length, n * size), i, **how)
        for i, (length, n) in enumerate(((rows, heads), (keys, kv_heads), (keys, kv_heads)))
    )
    return x, {"k": k, "v": v}


def results(model: sf.Sequential, *inputs: Tensor, **named: Tensor) -> list[Tensor]:
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in (*inputs, *named.values())]
    torch.manual_seed(3)
    y = model(*leaves[: len(inputs)], **dict(zip(named, leaves[len(inputs) :], strict=True)))
    wanted = [t for t in leaves if t.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, wanted, seeded_randn(tuple(y.shape), 9, dtype=y.dtype))]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("keys", [3, 21])
@pytest.mark.parametrize("how", [{}, {"softcap": 2.0, "scale": 0.5}, {"dropout": 0.3}], ids=str)
def test_keeps_its_contract(how: dict[str, Any], keys: int, kv_heads: int):
    x, named = drawn((2,), 5, keys, 4, kv_heads, 8)
    op = ops.CrossAttention(4, kv_heads, **how)
    # Otherwise the results are those of a torch kernel, which loses a NaN of a query.
    if keys < 16 and how:
        check_op(op, x, dtypes=[torch.float32, torch.bfloat16], **named)
    else:
        agrees(op, x, **named)


def agrees(op: ops.CrossAttention, x: Tensor, **named: Tensor) -> None:
    """The engine and the reference in float64, by hand."""
    wide = {name: t.double() if t.is_floating_point() else t for name, t in named.items()}
    with sf.fusing(False):
        found, wanted = results(sf.Sequential(op), x, **named), results(sf.Sequential(op), x.double(), **wide)
    torch.testing.assert_close(found, [t.float() for t in wanted], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 4, 5, 7), (2, 1, 1, 7), (5, 7)], ids=str)
def test_a_relative_bias_has_a_gradient(shape: tuple[int, ...]):
    x, named = drawn((2,), 5, 7, 4, 2, 8)
    agrees(ops.CrossAttention(4, 2, mask="bias"), x, bias=seeded_randn(shape, 5), **named)
    check_op(ops.CrossAttention(4, 2, mask="bias", softcap=2.0), x, bias=seeded_randn(shape, 5), **named)


@pytest.mark.parametrize("keys", [7, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", [{"causal": True}, {}, {"softcap": 3.0}, {"dropout": 0.25}], ids=str)
def test_gives_what_attention_gives_of_one_tensor(
    how: dict[str, Any], dtype: torch.dtype, keys: int, monkeypatch: pytest.MonkeyPatch
):
    if keys >= _attention._LANES:  # in C, as `Attention` is
        monkeypatch.setattr(_attention, "C_ATTENTION_WORTHWHILE", 0)
    x, named = drawn((2,), keys, keys, 4, 4, 8, dtype=dtype)
    packed = torch.cat((x, named["k"], named["v"]), -1)
    y, dx, dk, dv = results(sf.Sequential(ops.CrossAttention(4, **how)), x, **named)
    wanted, d = results(sf.Sequential(ops.Attention(4, **how)), packed)
    torch.testing.assert_close((y, torch.cat((dx, dk, dv), -1)), (wanted, d))


def test_weights_of_a_row_under_one_large_mask_add_up_to_one():
    (x, named), mask = drawn((2,), 5, 21, 4, 4, 8), torch.zeros(5, 21)
    mask[2] = -1e9
    y = sf.Sequential(ops.CrossAttention(4, mask="m"))(x, k=named["k"], v=named["v"].requires_grad_(), m=mask)
    dy = seeded_randn((2, 5, 32), 5)
    (dv,) = torch.autograd.grad(y, named["v"], dy)
    torch.testing.assert_close(dv.sum(1), dy.sum(1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_causal_one_with_a_mask_sees_what_both_let_it_see(kind: str):
    x, named = drawn((2,), 7, 7, 4, 2, 8)
    seen = (seeded_randn((7, 7), 5) > 0).fill_diagonal_(True)
    wanted = sf.Sequential(ops.CrossAttention(4, 2, mask="m"))(x, m=seen.tril(), **named)
    given = seen if kind == "bool" else torch.zeros(7, 7).masked_fill(~seen, -torch.inf)
    op = ops.CrossAttention(4, 2, causal=True, mask="m")
    torch.testing.assert_close(sf.Sequential(op)(x, m=given, **named), wanted)
    torch.testing.assert_close(op.reference(x, attn_mask=given, **named), wanted)


@pytest.mark.parametrize("mask", ["bool", "int", "float"])
@pytest.mark.parametrize("keys", [7, 21])
def test_masks_are_those_of_torch(keys: int, mask: str):
    x, named = drawn((2,), 5, keys, 4, 4, 8)
    seen = seeded_randn((2, 1, 5, keys), 7) > -0.5
    given = {"bool": seen, "int": seen.int(), "float": torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)}[mask]
    y = sf.Sequential(ops.CrossAttention(4, mask="mask"))(x, **named, mask=given)
    q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in (x, *named.values()))
    wanted = F.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).flatten(-2)
    torch.testing.assert_close(y, wanted)
    with torch.no_grad():  # where torch's attention replaces the formula
        torch.testing.assert_close(ops.CrossAttention(4).reference(x, **named, attn_mask=given), wanted)


@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
def test_takes_any_leading_dimensions(batch: tuple[int, ...]):
    x, named = drawn(batch, 5, 7, 4, 2, 8)
    agrees(ops.CrossAttention(4, 2), x, **named)


def test_autocast_gives_its_dtype_and_gradients_in_theirs():
    x, named = drawn((2,), 5, 21, 4, 2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y, *grads = results(sf.Sequential(ops.CrossAttention(4, 2)), x, **named)
    wanted, *others = results(sf.Sequential(ops.CrossAttention(4, 2)), x, **named)
    assert y.dtype is torch.bfloat16
    assert all(g.dtype is torch.float32 for g in grads)
    torch.testing.assert_close([y.float(), *grads], [wanted, *others], rtol=5e-2, atol=5e-2)


def test_under_autocast_queries_keys_and_values_may_have_several_dtypes():
    x, named = drawn((2,), 5, 7, 4, 2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        model = sf.Sequential(ops.Linear(32, 32), ops.CrossAttention(4, 2))
        assert model(x, **named).dtype is torch.bfloat16
        results(model, x, **named)


def test_a_decoder_reads_an_encoder():
    """Queries from a Linear, keys and values from a MergedLinear elsewhere: all gradients arrive."""
    torch.manual_seed(0)
    kv = ops.MergedLinear(8, (16, 16))
    model = sf.Sequential(
        ops.Residual(
            ops.RMSNorm(12), ops.Linear(12, 32), ops.CrossAttention(4, 2, k="keys", v="values"), ops.Linear(32, 12)
        )
    )
    x, memory = (seeded_randn(shape, i).requires_grad_() for i, shape in enumerate(((2, 5, 12), (2, 7, 8))))
    keys, values = kv(memory).chunk(2, -1)
    model(x, keys=keys, values=values).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in (x, memory, *kv.parameters(), *model.parameters()))
