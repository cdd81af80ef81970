"""Norms: forward, with a residual sum or dropout before it, backward with the gradient of the stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from seqfuse.kernels.norm import norm_bwd, norm_fwd
from seqfuse.ops._philox import drop_mask

from .case import Case, Inputs, Run, seed_tensor
from .peers import Kernels, Shapes, forward_of, liger, quack
from .sizes import Sizes

EPS, P = 1e-5, 0.1


def norm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """RMSNorm, or LayerNorm where there is a bias, in plain torch."""
    own = (x, weight.shape, weight)
    return F.rms_norm(*own, EPS) if bias is None else F.layer_norm(*own, bias, EPS)


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Residual sum, then a norm; also the sum."""
    stream = x + residual
    return norm(stream, weight, bias), stream


def _liger(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if bias is None:
        return liger().liger_rms_norm(x, weight, EPS, in_place=False)
    return liger().liger_layer_norm(x, weight, bias, EPS)


def _liger_add(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    return liger().liger_fused_add_rms_norm(x, residual, weight, EPS, in_place=False)


def _quack(x: Tensor, weight: Tensor) -> Tensor:
    return quack().rmsnorm(x, weight, eps=EPS)


def _quack_add(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    return quack().rmsnorm(x, weight, residual=residual, eps=EPS, prenorm=True)


def _ours(inputs: Inputs, **around: Any) -> Any:
    """The forward of our kernels, of either norm."""
    bias = inputs.get("bias")
    return norm_fwd(inputs["x"], inputs["weight"], bias, EPS, centered=bias is not None, **around)


def _forward(*around: str, **more: Any) -> Callable[[Inputs], Run]:
    """The norm, or with what is before it also the stream."""
    return lambda inputs: lambda: _ours(inputs, **{n: inputs[n] for n in around}, **more)[: 2 if around else 1]


def _backward(inputs: Inputs) -> Run:
    made, x = _ours(inputs), inputs["x"]
    saved = (x, made.mean, made.rstd, inputs["weight"])
    sums = {f"d{name}": x.dtype for name in ("weight", "bias") if name in inputs}

    def call() -> Any:
        back = norm_bwd(inputs["dy"], *saved, dstream=inputs.get("dstream"), **sums)
        return back.dx, *(getattr(back, name) for name in sums)

    return call


def _with_stream(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """A norm and its input: with the gradients of both, that of the stream is added."""
    return lambda x, **rest: (function(x, **rest), x.view_as(x))


def _same_mask(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
    dropped = (x * (1 / (1 - P))).masked_fill(drop_mask(seed, x.shape, P), 0)
    return add_norm(dropped, residual, weight, bias)


def _own_mask(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
    return add_norm(F.dropout(x, P), residual, weight, bias)


def cases(sizes: Sizes) -> Iterator[Case]:
    """Both norms at each shape; the second one and what is left over come later."""
    shapes = [(*shape, 0) for shape in sizes.norms] + [(*shape, 6) for shape in sizes.more_norms]
    for rank, (rows, columns, late) in enumerate(shapes):
        for centered in (False, True):
            later = late + (rank > 1) + 2 * centered
            yield from _of_shape(sizes, rows, columns, centered, later, alone=late > 0, first=rank < 2)


def _of_shape(sizes: Sizes, M: int, N: int, centered: bool, later: int, *, alone: bool, first: bool) -> Iterator[Case]:
    names = ("weight", "bias") if centered else ("weight",)
    of = Kernels(sizes, f"{'LayerNorm' if centered else 'RMSNorm'} {M} x {N}", M, {"M": M, "N": N}, compiles=first)
    plain = {"liger": _liger} if centered else {"liger": _liger, "quack": _quack}

    def shapes(*extra: str) -> Shapes:
        return {"x": (-1, N), **dict.fromkeys(names, (N,)), **dict.fromkeys(extra, (-1, N))}

    wanted = ("x", *names)
    yield of.case("norm forward", later, shapes(), _forward(), norm, others=plain)
    yield of.case("norm backward", later, shapes("dy"), _backward, norm, wanted=wanted, others=plain)
    if alone:
        return
    yield of.case(
        "norm backward + residual", later + 1, shapes("dy", "dstream"), _backward, _with_stream(norm), wanted=wanted,
        douts=("dy", "dstream"), others={name: _with_stream(function) for name, function in plain.items()},
    )  # fmt: skip
    fused = {} if centered else {"liger": _liger_add, "quack": _quack_add}
    yield of.case("add + norm forward", later, shapes("residual"), _forward("residual"), add_norm, others=fused)
    if centered:
        known, same = shapes("residual"), dict.fromkeys(("unfused", "exact"), forward_of(_same_mask))
        yield of.case(
            "dropout + add + norm", max(0, later - 2), {}, _forward("seed", "residual", p=P), _own_mask, checked=False,
            make=lambda rows, seed: {**of.inputs(known, rows, seed), "seed": seed_tensor(seed, sizes.device)}, **same,
        )  # fmt: skip
