"""Errors of operations at construction and when called, with their position and expectation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

import seqfuse as sf
from seqfuse import ops

one = torch.zeros

MADE: list[tuple[Callable[[], Any], str]] = [
    (lambda: ops.Attention(4, 3), "kv_heads must divide heads, got 3 and 4"),
    (lambda: ops.Attention(0), "kv_heads must divide heads, got 0 and 0"),
    (lambda: ops.Attention(2, dropout=1.5), "dropout must be between 0 and 1, got 1.5"),
    (lambda: ops.Attention(2, window=0), "window must be at least 1, got 0"),
    (lambda: ops.Attention(2, softcap=0.0), "softcap must be positive, got 0.0"),
    (lambda: ops.CrossAttention(3, 2), "kv_heads must divide heads"),
    (lambda: ops.CrossAttention(2, dropout=2.0), "dropout must be"),
    (lambda: ops.CrossAttention(2, softcap=0.0), "softcap must be"),
    (lambda: ops.Dropout(-0.1), "p must be between 0 and 1"),
    (lambda: ops.Clamp(-1.0), "limit must not be negative, got -1.0"),
    (lambda: ops.Dropout(1.1), "p must be between 0 and 1"),
    (lambda: ops.Dropout(math.nan), "p must be between 0 and 1"),
    (lambda: ops.Dropout(0.5, cast(Any, "inplace")), "mode must be"),
    (lambda: ops.DropPath(2), "p must be between 0 and 1, got 2"),
    (lambda: ops.Embedding(11, 6, padding_idx=11), "padding_idx must be within 11 rows, got 11"),
    (lambda: ops.GeLU(cast(Any, "erf")), "approximate must be"),
    (lambda: ops.GEGLU(cast(Any, "erf")), "approximate must be"),
    (lambda: ops.SwiGLU(packing=cast(Any, "halves")), "packing must be one of .*, got 'halves'"),
    (lambda: ops.GroupedLinear(0, 6, 8), "at least one group"),
    (lambda: ops.LayerNorm(()), "at least one dimension"),
    (lambda: ops.MergedLinear(4, (1,) * 9), "one to 8 parts, got 9"),
    (lambda: ops.MergedLinear(4, (1, 2, 3), (True, False)), "one answer for the biases or one for each of 3, got 2"),
    (lambda: ops.MergedLinear.of(nn.Linear(4, 2), nn.Linear(6, 2)), r"Linears of one input, got inputs of \[4, 6\]"),
    (lambda: ops.QKNorm(4, 2, kind=cast(Any, "batch")), 'kind must be "rms" or "layer", got \'batch\''),
    (lambda: ops.QKNorm(4, 2, bias=True), "only a LayerNorm with weights has a bias"),
    (lambda: ops.QKNorm(4, 2, bias=True, kind="layer", elementwise_affine=False), "only a LayerNorm with weights"),
    (lambda: ops.Reshape(), "expects sizes"),
    (lambda: ops.Reshape(-1, -1), "expects sizes"),
    (lambda: ops.Reshape(-2), "expects sizes"),
    (lambda: ops.Reshape(3, dims=0), "expects sizes"),
    (lambda: ops.RotaryEmbedding(2, style=cast(Any, "neox")), 'style must be "half" or "interleaved"'),
    (lambda: ops.RotaryEmbedding(2, style="half", rotary_dim=3), "rotary_dim must be even"),
    (lambda: ops.RotaryEmbedding(2, style="half", cos="c"), "cos and sin are given together, instead of positions"),
    (lambda: ops.RotaryEmbedding(2, style="half", cos="c", sin="s", positions="p"), "cos and sin are given together"),
    (lambda: ops.Route(6, 6, 0), "must be between"),
    (lambda: ops.Route(6, 6, 7), "must be between"),
    (lambda: ops.Route(6, 6, 2, groups=(4, 1)), "must cut"),
    (lambda: ops.Route(6, 6, 2, groups=(3, 0)), "must cut"),
    (lambda: ops.Route(6, 6, 2, groups=(6, 1)), "must cut"),
]


@pytest.mark.parametrize(("make", "message"), MADE, ids=[message for _, message in MADE])
def test_arguments_that_do_not_fit_are_refused(make: Callable[[], Any], message: str):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_gated_unit_takes_activations_alone():
    with pytest.raises(TypeError, match="needs a Pointwise for up"):
        sf.Gated(ops.SiLU(), up=cast(Any, nn.SiLU()))


def turned(**how: Any) -> ops.RotaryEmbedding:
    return ops.RotaryEmbedding(1, style="half", **how)


def ends(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


PACKED, MASKED = ops.Attention(2, 1, cu_seqlens="ends"), ops.Attention(2, 1, mask="m")
ANGLES, CROSS, PAIRS = turned(cos="c", sin="s"), ops.CrossAttention(4, 2), torch.arange(10).view(5, 2)
KV, X = {"k": one(2, 7, 16), "v": one(2, 7, 16)}, one(2, 5, 32)
PLACED, AT = ops.PositionEmbedding(6, 8, positions="at"), one(2, 4, 8)
# The operation, its input and channels, and its message.
CALLED: list[tuple[sf.UnfusedOperation, torch.Tensor, dict[str, torch.Tensor], str]] = [
    (ops.Linear(5, 7), one(3, 6), {}, "expects last dimension 5, got 6"),
    (ops.Linear(5, 7), one(()), {}, "expects last dimension 5, got a 0-d tensor"),
    (ops.Bias(4), one(3, 1), {}, "expects last dimension 4, got 1"),
    (ops.Bias(4), one(()), {}, "expects last dimension 4, got a 0-d tensor"),
    (ops.LayerScale(6), one(2, 5), {}, "expects last dimension 6, got 5"),
    (ops.MergedLinear(4, (1, 2)), one(2, 5), {}, "expects last dimension 4, got 5"),
    (ops.MergedLinear(4, (1, 2)), one(()), {}, "expects last dimension 4, got a 0-d tensor"),
    (ops.MergedLinear(4, (1, 2)), one(2, 4).bfloat16(), {}, "SF102.*dtype of its weight_0"),
    (ops.QKNorm(4, 2), one(3, 20), {}, "expects last dimension 24, got 20"),
    *[
        (kind(size), one(shape), {}, sentence)
        for kind in (ops.LayerNorm, ops.RMSNorm)
        for size, shape, sentence in (
            (4, (3, 5), "expects last dimension 4, got 5"),
            (4, (), "expects last dimension 4, got 0-d"),
            ((3, 4), (3, 5), r"expects last dimensions \(3, 4\), got \(3, 5\)"),
            ((3, 4), (4,), r"expects last dimensions \(3, 4\), got 1-d"),
        )
    ],
    (ops.SwiGLU(), one(3, 5), {}, "even last dimension"),
    (ops.SwiGLU(), one(()), {}, "even last dimension"),
    (ops.DropPath(), one(()), {}, "expects a first dimension of samples"),
    (ops.Reshape(2, 3), one(4, 5), {}, r"cannot make last dimension 5 into \(2, 3\)"),
    (ops.Reshape(-1, 3), one(4, 5), {}, r"cannot make last dimension 5 into \(-1, 3\)"),
    (ops.Reshape(-1, 0), one(4, 0), {}, r"cannot make last dimension 0 into \(-1, 0\)"),
    (ops.Reshape(7, dims=2), one(4, 5), {}, r"cannot make last dimensions \(4, 5\) into \(7,\)"),
    (ops.Reshape(7, dims=2), one(5), {}, r"expects at least 2 dimensions, got shape \(5,\)"),
    (ops.Transpose(1, 2), one(5, 6), {}, r"swaps dimensions 1 and 2, got shape \(5, 6\)"),
    *[
        (ops.Add("by"), one(x), {"by": one(other)}, "SF101.*adds tensors of one shape, got")
        for x, other in (((3, 5), (5,)), ((3, 5), (3, 1)), ((5,), (3, 5)), ((1, 5), (3, 5)))
    ],
    *[
        (ops.Multiply("by"), one(5, 6), {"by": one(other)}, r"SF101.* broadcasts to \(5, 6\), got")
        for other in ((5, 6, 1), (2, 5, 6), (3,))
    ],
    (ops.TokenScale("by"), one(5, 6), {"by": one(6)}, r"SF101.* \(5,\) or \(5, 1\), got \(6,\)"),
    (ops.Take("a", "b"), one(5, 6), {"a": one(6)}, r"SF101.*takes a tensor of the shape of x, got \(6,\)"),
    (MASKED, one(3, 10), {"m": one(3, 3)}, r"SF101.*expects \[\*, S, 4 D\] of 2 query"),
    (MASKED, one(3, 12), {"m": one(4, 3)}, r"SF101.*expects a mask that broadcasts to \(2, 3, 3\)"),
    (MASKED, one(3, 12).long(), {"m": one(3, 3)}, "SF101.* got torch.int64 and a mask of torch.float32"),
    (MASKED, one(3, 12).cfloat(), {"m": one(3, 3)}, "SF101.* expects floating-point x.* got torch.complex64 and"),
    (MASKED, one(3, 12), {"m": one(3, 3).cfloat()}, "SF101.* got torch.float32 and a mask of torch.complex64"),
    *[
        (PACKED, one(3, 12), {"ends": ends(*wrong)}, "SF107.*expects cu_seqlens that run from 0 to 3")
        for wrong in ((0, 2), (1, 3), (0, 2, 1, 3), ())
    ],
    (PACKED, one(1, 3, 12), {"ends": ends(0, 3)}, r"expects x \[S, C\]"),
    *[
        (CROSS, X, KV | wrong, r"SF101.*expects k and v of torch\.float32 \(2, N, 16\), got")
        for wrong in ({"k": one(1, 7, 16)}, {"v": one(2, 6, 16)}, {"k": one(2, 7, 16).double()})
    ],
    (ops.CrossAttention(3), X, KV, r"expects \[\*, S, 3 D\] of 3 query heads"),
    (ops.CrossAttention(4, 2, causal=True), X, KV, "causal needs as many keys as rows, got 7 and 5"),
    (ops.CrossAttention(4, 2, mask="m"), X, KV | {"m": one(5, 5)}, r"broadcasts to \(2, 4, 5, 7\), got .* \(5, 5\)"),
    (turned(), one(2, 9), {}, "expects heads of an even size, got 3"),
    (turned(rotary_dim=8), one(2, 12), {}, "expects heads of at least rotary_dim=8, got 4"),
    (turned(positions="p"), one(2, 12), {"p": torch.arange(3)}, r"positions that broadcast to \(2,\), got \(3,\)"),
    (turned(positions="p"), one(4, 12), {"p": one(4).bool()}, "SF101.*expects positions.*bool"),
    *[
        (ANGLES, one(2, 12), {"c": one(c), "s": one(s)}, r"cos and sin that broadcast to \(2, 4\) or \(2, 2\), got")
        for c, s in (((3, 4), (3, 4)), ((2, 4), (2, 2)), ((2, 3), (2, 3)), ((2, 2, 4), (2, 2, 4)))
    ],
    (ops.PositionEmbedding(4, 6), one(5, 6), {}, "expects at most 4 positions, got 5"),
    (PLACED, AT, {"at": torch.tensor([True, False, True, True])}, r"SF101.*expects .*numbers, got torch\.bool"),
    (PLACED, AT, {"at": one(4)}, r"SF101.*expects integer positions, got torch\.float32"),
    (PLACED, AT, {"at": torch.tensor([0, -1, 2, 3])}, "SF107.*expects positions from 0 to 5, got -1"),
    (PLACED, AT, {"at": torch.tensor([0, 1, 6, 3])}, "SF107.*expects positions from 0 to 5, got 6"),
    (PLACED, AT, {"at": torch.tensor([0, 1, 2])}, r"SF101.*broadcast to \(2, 4\), got \(3,\)"),
    (ops.Embedding(11, 6), torch.tensor([11]), {}, "SF107.*from 0 to 10, got 11"),
    *[
        (ops.GroupedLinear(2, 6, 8), one(5, 6), {"offsets": wrong}, r"SF101.*ends of 2 groups, integers \(2,\)")
        for wrong in (torch.tensor([1, 2, 3]), torch.tensor([1.0, 2.0]), torch.tensor([True, True]))
    ],
    *[
        (ops.Permute(4, 2), one(5, 6), {"experts": wrong}, r"SF101.*integers \(5, 2\), got")
        for wrong in (one(5, 3).long(), one(5, 2), one(5, 2).bool())
    ],
    (
        ops.Unpermute(), one(5, 2, 6), {"probs": one(5, 3), "rows": PAIRS, "offsets": ends(10)},
        "SF101.*probs of the shape of the rows",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "x", "inputs", "message"), CALLED, ids=[f"{type(op).__name__}: {message}" for op, *_, message in CALLED]
)
def test_inputs_that_do_not_fit_are_refused_with_their_place(
    op: sf.UnfusedOperation, x: torch.Tensor, inputs: dict[str, torch.Tensor], message: str
):
    """At position 1; what no shape shows, by the reference, too."""
    with pytest.raises(sf.InputError, match=message) as caught:
        sf.Sequential(ops.Identity(), op)(x, **inputs)
    assert f"position 1 ({type(op).__name__}): " in str(caught.value)
    channels = {name: inputs[channel] for name, channel in op.channels.items() if channel in inputs}
    if message.startswith("SF101") and not isinstance(op, ops.Attention):
        with pytest.raises(ValueError, match=message.replace("SF101.*", "")):
            op.reference(x, **channels)


def test_a_parameter_that_is_none_is_named():
    op = ops.MergedLinear(4, (1, 2))
    op.weight_1 = None
    with pytest.raises(sf.InputError, match=r"SF106.*its weight_1 is None"):
        op(torch.zeros(2, 4))
