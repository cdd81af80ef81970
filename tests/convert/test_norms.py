"""Norms written by hand: each form becomes the operation that it computes, or the report says why not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqfuse.convert import rewrite
from seqfuse.convert.rewrite import RewriteOptions
from seqfuse.testing import seeded_randn

from .comparing import Replayed, assert_same, assert_same_recorded
from .spellings import Layers, Spelling, operations

EPS = 1e-3  # large enough to notice when it is left out
Normed = Callable[[Tensor, Layers], Tensor]
X = seeded_randn((2, 4, 8), 2).double()


def square(y: Tensor) -> Tensor:
    return y.pow(2).mean(-1, keepdim=True)


def centered(y: Tensor) -> Tensor:
    return y - y.mean(-1, keepdim=True)


def variance(y: Tensor) -> Tensor:
    return y.var(-1, keepdim=True, unbiased=False)


def paired(y: Tensor) -> Tensor:
    var, mean = torch.var_mean(y, dim=-1, correction=0, keepdim=True)
    return (y - mean) / torch.sqrt(var + EPS)


RMS: dict[str, Normed] = {
    "divided by torch.sqrt": lambda y, m: m.w * (y / torch.sqrt(square(y) + EPS)),
    "divided by the method sqrt": lambda y, m: y / (EPS + square(y)).sqrt() * m.w,
    "divided by a power": lambda y, m: y / (square(y) + EPS) ** 0.5 * m.w,
    "times the method pow": lambda y, m: y * (square(y) + EPS).pow(-0.5) * m.w,
    "times a power": lambda y, m: m.w * (y * (square(y) + EPS) ** -0.5),
    "times one over a root": lambda y, m: y * (1 / torch.sqrt(square(y) + EPS)) * m.w,
    "times a reciprocal": lambda y, m: y * torch.sqrt(square(y) + EPS).reciprocal() * m.w,
    "times rsqrt": lambda y, m: y * torch.rsqrt((y * y).mean(dim=2, keepdim=True) + EPS) * m.w,
    "the weight first": lambda y, m: m.w * y / torch.sqrt(square(y) + EPS),
    "the weight first, times rsqrt": lambda y, m: m.w * y * torch.rsqrt(square(y) + EPS),
    "one more than a weight": lambda y, m: y / torch.sqrt(square(y) + EPS) * (1 + m.w),
    "without a weight": lambda y, m: y / torch.sqrt(square(y) + EPS),
    "without an eps": lambda y, m: y / square(y).sqrt() * m.w,
    "with a root that is cast": lambda y, m: y * torch.rsqrt(square(y.double()) + EPS).type_as(y) * m.w,
    "with views between": lambda y, m: (y / torch.sqrt(square(y).contiguous() + EPS).contiguous()).view(y.shape) * m.w,
}
LAYER: dict[str, Normed] = {
    "the variance by hand, without a bias": lambda y, m: centered(y) / (square(centered(y)) + EPS).sqrt() * m.w,
    "the variance of torch": lambda y, m: m.w * centered(y) / torch.sqrt(variance(y) + EPS) + m.a.bias,
    "the weight last": lambda y, m: centered(y) / torch.sqrt(variance(y) + EPS) * m.w + m.a.bias,
    "the variance by hand": lambda y, m: m.w * (centered(y) / (square(centered(y)) + EPS).sqrt()) + m.a.bias,
    "the variance of one difference": lambda y, m: (c := centered(y)) * torch.rsqrt(square(c) + EPS) * m.w + m.a.bias,
    "the bias first": lambda y, m: m.a.bias + m.w * (centered(y) / torch.sqrt(variance(y) + EPS)),
    "a power": lambda y, m: centered(y) * (variance(y) + EPS) ** -0.5 * m.w + m.a.bias,
    "without a bias": lambda y, m: centered(y) / torch.sqrt(variance(y) + EPS) * m.w,
    "without a weight": lambda y, m: centered(y) / torch.sqrt(variance(y) + EPS),
    "var_mean": lambda y, m: paired(y) * m.w + m.a.bias,
}
ALL = [("RMSNorm", name) for name in RMS] + [("LayerNorm", name) for name in LAYER]


def between(norm: Normed) -> Spelling:
    return lambda m, x: m.b(norm(m.a(x), m))


def layers(operation: str, name: str) -> Layers:
    return Layers(between((RMS if operation == "RMSNorm" else LAYER)[name])).double()


@pytest.mark.parametrize(("operation", "name"), ALL, ids=[f"{o}: {n}" for o, n in ALL])
def test_a_norm_by_hand_is_an_operation_and_keeps_its_numbers(operation: str, name: str):
    replayed = assert_same_recorded(layers(operation, name), X)
    assert operations(replayed) == ["Linear", operation, "Linear"]
    assert not replayed.graphs[0].left
    assert not replayed.graphs[0].beside


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        ("RMSNorm", "divided by torch.sqrt"),
        ("RMSNorm", "times a power"),
        ("RMSNorm", "times one over a root"),
        ("LayerNorm", "the variance of torch"),
        ("LayerNorm", "var_mean"),
    ],
)
def test_a_norm_by_hand_is_an_operation_as_dynamo_captures_it(operation: str, name: str):
    conversion = assert_same(layers(operation, name), X)
    found = [type(op).__name__ for graph in conversion.graphs[:1] for region in graph.regions for op in region.model]
    assert found == ["Linear", operation, "Linear"]
    assert not conversion.graphs[0].left


@pytest.mark.parametrize("name", ["divided by torch.sqrt", "times a power", "without an eps"])
def test_rows_of_zeros_give_what_they_gave(name: str):
    def spelling(m: Layers, x: Tensor) -> Tensor:
        return m.b(RMS[name](F.layer_norm(m.a(x), (8,)) * (x > 0), m))

    x = X.clone()
    x[0, 0] = -1
    replayed = assert_same_recorded(Layers(spelling).double(), x)
    assert "RMSNorm" in operations(replayed)


WIDER: dict[str, tuple[Normed, torch.dtype, float]] = {
    "RMSNorm": (lambda y, m: m.w * rms(y.float()).to(y.dtype), torch.bfloat16, 2e-2),
    "LayerNorm": (lambda y, m: rms(centered(y).double()).to(y.dtype) * m.w, torch.float32, 1e-5),
}


def rms(y: Tensor) -> Tensor:
    return y / torch.sqrt(square(y) + EPS)


@pytest.mark.parametrize("operation", WIDER)
def test_a_norm_in_a_wider_dtype_than_its_model_is_an_operation(operation: str):
    norm, dtype, bound = WIDER[operation]
    replayed = assert_same_recorded(Layers(between(norm)).to(dtype), X.to(dtype), bound)
    assert operations(replayed) == ["Linear", operation, "Linear"]


def std(y: Tensor) -> Tensor:
    return y.std(-1, keepdim=True)


NONE: dict[str, tuple[Normed, str, str]] = {
    "the length": (lambda y, m: y / y.norm(dim=-1, keepdim=True) * m.w, "norm", "the length of a vector"),
    "the length and an eps": (lambda y, m: y / (torch.norm(y, dim=-1, keepdim=True) + EPS), "norm", "the length of"),
    "a scaled length": (
        lambda y, m: y / (torch.norm(y, dim=-1, keepdim=True) * 8**-0.5).clamp(min=EPS) * m.w, "norm", "the length of"
    ),
    "normalize": (lambda y, m: F.normalize(y, dim=1) * 8**0.5 * m.w, "normalize", "another dimension than the last"),
    "normalize by an eps": (lambda y, m: F.normalize(y, dim=-1, eps=2.0), "normalize", "the length and an eps of 2"),
    "a deviation": (lambda y, m: m.w * centered(y) / (std(y) + EPS) + m.a.bias, "std", "a standard deviation"),
    "an unbiased variance": (
        lambda y, m: centered(y) / torch.sqrt(y.var(-1, keepdim=True) + EPS), "sqrt", "of n - 1 elements"
    ),
    "over the channels": (
        lambda y, m: y / torch.sqrt(y.pow(2).mean(1, keepdim=True) + EPS), "sqrt", "other dimensions than the last"
    ),
    "the larger one": (
        lambda y, m: y / torch.sqrt(square(y).clamp(min=EPS)), "sqrt", "the larger of eps and the average"
    ),
    "of another tensor": (lambda y, m: y / torch.sqrt(square(m.c(y)) + EPS), "sqrt", "not the tensor whose mean"),
    "centered, by a mean square": (lambda y, m: centered(y) / torch.sqrt(square(y) + EPS), "sqrt", "not the tensor"),
    "by a variance": (lambda y, m: y / torch.sqrt(variance(y) + EPS), "sqrt", "not the tensor whose mean square"),
    "an eps of data": (lambda y, m: y / torch.sqrt(square(y) + m.w[:1] ** 2), "sqrt", "eps is not a fixed number"),
    "divided": (lambda y, m: torch.rsqrt(square(y) + EPS) / y, "rsqrt", "not that of the mean square"),
    "no mean": (lambda y, m: y * torch.rsqrt(y.pow(2) + EPS), "rsqrt", "not that of the mean square"),
}  # fmt: skip


@pytest.mark.parametrize("name", NONE)
def test_what_is_no_norm_of_torch_keeps_its_numbers_and_says_why(name: str):
    norm, call, reason = NONE[name]
    (graph,) = assert_same_recorded(Layers(between(norm)).double(), X).graphs
    ((found, said),) = [(left.call, left.reason) for left in graph.left if left.kind == "norm"]
    assert found == call
    assert reason in said


def gained(m: Layers, x: Tensor) -> Tensor:
    return F.normalize(x.cumsum(1).unflatten(-1, (2, 4)), dim=-1) * m.w.view(2, 4)


@pytest.mark.parametrize(
    ("spelling", "found"),
    [
        (lambda m, x: F.normalize(x.cumsum(1), dim=-1).cumsum(1), ["RMSNorm", "Scale"]),
        (lambda m, x: gained(m, x).cumsum(1), ["RMSNorm", "Scale", "Multiply"]),
    ],
)
def test_vectors_that_are_divided_by_their_lengths_are_a_chain_with_nothing_beside_them(
    spelling: Spelling, found: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rewrite, "NORMALIZED", X.numel())
    replayed = assert_same_recorded(Layers(spelling).double(), X)
    assert operations(replayed) == found
    assert not replayed.graphs[0].left


@pytest.mark.parametrize("dims", [(1, 2), (1, 1)], ids=["of which a chain would save a copy", "small"])
def test_vectors_that_are_divided_by_torch(dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rewrite, "NORMALIZED", X.numel() + (dims == (1, 1)))
    (graph,) = assert_same_recorded(
        Layers(lambda m, x: F.normalize(x.cumsum(1).transpose(*dims), dim=-1).cumsum(1)).double(), X
    ).graphs
    assert [left.call for left in graph.left] == ["normalize"]


def test_a_norm_whose_result_has_another_dtype_than_its_input_says_so():
    def spelling(m: Layers, x: Tensor) -> Tensor:
        h = m.a(x).float()
        return m.c(h / torch.sqrt(square(h) + EPS))

    model = Layers(spelling)
    model.a.bfloat16()
    (graph,) = assert_same_recorded(model, X.bfloat16(), bound=2e-2).graphs
    (said,) = [left.reason for left in graph.left if left.kind == "norm"]
    assert "gives torch.float32 for an input in torch.bfloat16: cast its result back" in said


def test_a_root_that_divides_nothing_is_no_norm():
    model = Layers(lambda m, x: m.b(F.gelu(m.a(x))) + torch.sqrt((x - m.w).pow(2).mean(-1, keepdim=True))).double()
    (graph,) = assert_same_recorded(model, X).graphs
    assert not [left for left in graph.left if left.kind == "norm"]


def test_a_norm_by_hand_that_filter_fn_leaves_out_is_left():
    def spelling(m: Layers, x: Tensor) -> Tensor:
        return m.b(RMS["divided by torch.sqrt"](m.a(x), m))

    model = Layers(spelling).double()
    assert not operations(Replayed(model, X, options=RewriteOptions(allowed=lambda path: False)))
