"""Norms: forward, with a residual sum or dropout before it, backward with the gradient of the stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from seqfuse.kernels.norm import norm_bwd, norm_fwd
from seqfuse.ops._philox import drop_mask

from .case import Case, Contender, Inputs, Run
from .draw import normal, seed_tensor
from .peers import backward_of, forward_of, liger, peers_of, quack
from .sizes import Sizes

EPS, P = 1e-5, 0.1


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm in plain torch."""
    return F.rms_norm(x, weight.shape, weight, EPS)


def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """LayerNorm in plain torch."""
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def add_rms(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Residual sum, then RMSNorm; also the sum."""
    stream = x + residual
    return rms(stream, weight), stream


def add_layer(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Residual sum, then LayerNorm; also the sum."""
    stream = x + residual
    return layer(stream, weight, bias), stream


def _liger_rms(x: Tensor, weight: Tensor) -> Tensor:
    return liger().liger_rms_norm(x, weight, EPS, in_place=False)


def _liger_layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return liger().liger_layer_norm(x, weight, bias, EPS)


def _liger_add_rms(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    return liger().liger_fused_add_rms_norm(x, residual, weight, EPS, in_place=False)


def _quack_rms(x: Tensor, weight: Tensor) -> Tensor:
    return quack().rmsnorm(x, weight, eps=EPS)


def _quack_add_rms(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    return quack().rmsnorm(x, weight, residual=residual, eps=EPS, prenorm=True)


def _both(inputs: Inputs, centered: bool, **around: Any) -> Any:
    """The forward of our kernels, of either norm."""
    x, weight = inputs["x"], inputs["weight"]
    return norm_fwd(x, weight, inputs["bias"] if centered else None, EPS, centered=centered, **around)


def _forward(centered: bool) -> Contender:
    return Contender(lambda inputs: lambda: (_both(inputs, centered).y,))


def _add_forward(centered: bool) -> Contender:
    def prepare(inputs: Inputs) -> Run:
        return lambda: _both(inputs, centered, residual=inputs["residual"])[:2]

    return Contender(prepare)


def _backward(centered: bool, stream: bool) -> Contender:
    def prepare(inputs: Inputs) -> Run:
        made = _both(inputs, centered)
        dtype, dstream = inputs["x"].dtype, inputs["dstream"] if stream else None

        def call() -> Any:
            dy, x, weight = inputs["dy"], inputs["x"], inputs["weight"]
            back = norm_bwd(
                dy, x, made.mean, made.rstd, weight, dstream=dstream, dweight=dtype, dbias=dtype if centered else None
            )  # fmt: skip
            return (back.dx, back.dweight, back.dbias) if centered else (back.dx, back.dweight)

        return call

    return Contender(prepare)


def _with_stream(function: Any) -> Any:
    """A norm and its input: with the gradients of both, that of the stream is added."""

    def both(x: Tensor, **rest: Tensor) -> tuple[Tensor, Tensor]:
        return function(x, **rest), x.view_as(x)

    return both


def _dropped() -> Contender:
    """Dropout, residual sum and LayerNorm in our kernel."""

    def prepare(inputs: Inputs) -> Run:
        def call() -> Any:
            x, weight, bias = inputs["x"], inputs["weight"], inputs["bias"]
            made = norm_fwd(x, weight, bias, EPS, seed=inputs["seed"], p=P, residual=inputs["residual"])
            return made.y, made.stream

        return call

    return Contender(prepare)


def _same_mask(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
    stream = (x * (1 / (1 - P))).masked_fill(drop_mask(seed, x.shape, P), 0) + residual
    return layer(stream, weight, bias), stream


def _own_mask(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
    stream = F.dropout(x, P) + residual
    return layer(stream, weight, bias), stream


def cases(sizes: Sizes) -> Iterator[Case]:
    """Both norms at each shape; the second one and what is left over come later."""
    shapes = [(*shape, 0) for shape in sizes.norms] + [(*shape, 6) for shape in sizes.more_norms]
    for rank, (rows, columns, late) in enumerate(shapes):
        for centered in (False, True):
            later = late + (rank > 1) + 2 * centered
            yield from _of_shape(sizes, rows, columns, centered, later, alone=late > 0, first=rank < 2)


def _of_shape(sizes: Sizes, M: int, N: int, centered: bool, later: int, *, alone: bool, first: bool) -> Iterator[Case]:
    device, dtype = sizes.device, sizes.dtype
    names = ("weight", "bias") if centered else ("weight",)

    def make(*extra: str) -> Any:
        def drawn(rows: int, seed: int) -> Inputs:
            shapes = {"x": (rows, N), **dict.fromkeys(names, (N,)), **dict.fromkeys(extra, (rows, N))}
            return normal(shapes, seed, device, dtype)

        return drawn

    label = f"{'LayerNorm' if centered else 'RMSNorm'} {M} x {N}"
    eager, its = (layer, _liger_layer) if centered else (rms, _liger_rms)
    theirs = its if liger() else None
    quacks = _quack_rms if quack() and not centered else None
    common: dict[str, Any] = {
        "dtype": dtype, "rows": M, "checked_rows": sizes.checked_rows, "shape": {"M": M, "N": N},
    }  # fmt: skip
    modes = sizes.compile_modes if first else ()
    yield Case(
        "norm forward", label, make=make(), priority=later, **common,
        contenders={"seqfuse": _forward(centered), **peers_of(forward_of, eager, modes, liger=theirs, quack=quacks)},
    )  # fmt: skip
    wanted = ("x", *names)
    yield Case(
        "norm backward", label, make=make("dy"), priority=later, **common,
        contenders={
            "seqfuse": _backward(centered, False),
            **peers_of(lambda f: backward_of(f, wanted), eager, modes, liger=theirs, quack=quacks),
        },
    )  # fmt: skip
    if alone:
        return
    yield Case(
        "norm backward + residual", label, make=make("dy", "dstream"), priority=later + 1, **common,
        contenders={
            "seqfuse": _backward(centered, True),
            **peers_of(
                lambda f: backward_of(_with_stream(f), wanted, ("dy", "dstream")), eager, modes, liger=theirs,
                quack=quacks,
            ),
        },
    )  # fmt: skip
    both = add_layer if centered else add_rms
    fused = {
        "liger": _liger_add_rms if liger() and not centered else None,
        "quack": _quack_add_rms if quack() and not centered else None,
    }
    yield Case(
        "add + norm forward", label, make=make("residual"), priority=later, **common,
        contenders={"seqfuse": _add_forward(centered), **peers_of(forward_of, both, modes, **fused)},
    )  # fmt: skip
    if centered:
        yield _with_dropout(label, make("residual"), common, max(0, later - 2), modes)


def _with_dropout(label: str, make: Any, common: dict[str, Any], priority: int, modes: tuple[str, ...]) -> Case:
    def drawn(rows: int, seed: int) -> Inputs:
        found = make(rows, seed)
        return {**found, "seed": seed_tensor(seed, found["x"].device)}

    peers = peers_of(forward_of, _own_mask, modes)
    peers = {name: Contender(peer.prepare, checked=False) for name, peer in peers.items()}
    same = forward_of(_same_mask)
    return Case(
        "dropout + add + norm", label, make=drawn, priority=priority, **common,
        contenders={"seqfuse": _dropped(), **peers}, unfused=same, exact=same,
    )  # fmt: skip
