"""Activations and gated units in both directions, with the bias gradient; cross-entropy; rotary embedding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import plain
import torch
import torch.nn.functional as F
from torch import Tensor

from seqfuse.kernels import pointwise as k
from seqfuse.kernels.activations import ACTIVATIONS
from seqfuse.kernels.crossentropy import cross_entropy_
from seqfuse.kernels.rope import Rotation, rope_bwd, rope_fwd

from . import case
from .case import Case, Contender, Inputs, Run, normal
from .peers import Kernels, compiled, liger, module
from .sizes import MAIN, Model, Sizes

# Under names of our own: arguments are passed by name.
EAGER: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: F.gelu(x),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": lambda x: F.silu(x),
    "squared_relu": lambda x: F.relu(x).square(),
}


def gated(x: Tensor) -> Tensor:
    """SwiGLU of packed [gate; up] in plain torch."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def chain(*steps: Any, of: str = "x", operands: tuple[str, ...] = ()) -> Callable[[Inputs], Run]:
    """A chain of our point-wise kernel, and everything that it gives."""

    def prepare(inputs: Inputs) -> Run:
        given, made = tuple(inputs[name] for name in operands), k.Chain(*steps)
        return lambda: k.pointwise(inputs[of], made, given)

    return prepare


def _dact_dbias(own: Any) -> Callable[[Inputs], Run]:
    """Both gradients in one pass; the sum that the activation took is there, as a product leaves it."""

    def prepare(inputs: Inputs) -> Run:
        z, made = inputs["x"] + inputs["bias"], k.Chain(k.dact(own), k.column_sum())
        return lambda: k.pointwise(inputs["dy"], made, (z,))

    return prepare


def cases(sizes: Sizes) -> Iterator[Case]:
    """Over (tokens, F) of each model."""
    classes: set[int] = set()
    for rank, model in enumerate(sorted(sizes.models, key=lambda m: m.name not in MAIN)):
        if len(sizes.models) > 2 and rank > 1 and model.name not in ("gpt2-xl", "llama3-1b"):
            continue
        late = 2 * (rank > 1)
        yield from _plain_cases(sizes, model, late)
        if model.llama:
            yield from _rope_cases(sizes, model, late)
        if model.V not in classes:
            classes.add(model.V)
            yield _loss_case(sizes, model, late)


def _plain_cases(sizes: Sizes, model: Model, late: int) -> Iterator[Case]:
    M, N, silu = sizes.tokens[0], model.F, ACTIVATIONS["silu"]
    x, wide, dy, bias = {"x": (-1, N)}, {"x": (-1, 2 * N)}, {"dy": (-1, N)}, {"bias": (N,)}
    for act in ("silu",) if model.llama else ("gelu", "squared_relu"):
        function, own, later = EAGER[act], ACTIVATIONS[act], 2 + late + (act == "squared_relu")
        of = Kernels(sizes, f"{act} {M} x {N}", M, {"M": M, "N": N})
        theirs = {"liger": lambda x: liger().liger_relu_squared(x)} if act == "squared_relu" else {}
        back = chain(k.dact(own), of="dy", operands=("x",))
        yield of.case("activation forward", later, x, chain(k.act(own)), function, others=theirs)
        yield of.case("activation backward", later, x | dy, back, function, wanted=["x"], others=theirs)
        yield of.case(
            "dact + dbias", later, x | bias | dy, _dact_dbias(own),
            lambda x, bias, function=function: function(x + bias), wanted=["x", "bias"],
        )  # fmt: skip
    if model.llama:
        of, theirs = Kernels(sizes, f"swiglu {M} x {N}", M, {"M": M, "N": N}), {"liger": _liger_gated}
        back = chain(k.dgated(silu), of="dy", operands=("x",))
        yield of.case("gated activation forward", 2 + late, wide, chain(k.gated(silu)), gated, others=theirs)
        yield of.case("gated activation backward", 2 + late, wide | dy, back, gated, wanted=["x"], others=theirs)


def _liger_gated(x: Tensor) -> Tensor:
    return liger().liger_swiglu(*x.chunk(2, -1))


def _rope_cases(sizes: Sizes, model: Model, late: int) -> Iterator[Case]:
    M, S, known, kv, D = sizes.tokens[0], sizes.sequence, model.heads, model.kv_heads, model.head_dim
    shape, checked_rows = {"M": M, "heads": known, "kv_heads": kv, "D": D}, max(S, sizes.checked_rows // S * S)
    of = Kernels(sizes, f"rope {M} x {known}+2*{kv} x {D}", M, shape, checked_rows=checked_rows, per=S)
    x, dy, heads = {"x": (-1, S, model.packed)}, {"dy": (-1, S, model.packed)}, (known, kv, Rotation("half", D))

    def eager(x: Tensor) -> Tensor:
        """Rotation of packed heads in float32, as Hugging Face does where it is careful."""
        turned, values = x.unflatten(-1, (-1, D)).transpose(-3, -2).split([known + kv, kv], -3)
        turned = plain.rotated(turned, *plain.angles(S, D, x))
        return torch.cat((turned, values), -3).transpose(-3, -2).flatten(-2)

    yield of.case("rope forward", 4 + late, x, lambda i: lambda: (rope_fwd(i["x"], *heads).y,), eager)
    yield of.case(
        "rope backward", 4 + late, x | dy, lambda i: lambda: (rope_bwd(i["dy"], *heads).dx,), eager, wanted=["x"],
        fewest=2 * M * model.packed * sizes.dtype.itemsize,
    )  # fmt: skip


def _loss_case(sizes: Sizes, model: Model, late: int) -> Case:
    """Loss and gradient of the logits; those who write the one over the other are given a copy once."""
    M, V = sizes.tokens[0], model.V

    def make(rows: int, seed: int) -> Inputs:
        numbers = case.generator(sizes.device, seed)
        targets = torch.randint(V, (rows,), device=sizes.device, generator=numbers)
        return normal({"logits": (rows, V)}, seed, sizes.device, sizes.dtype) | {"targets": targets}

    def ours(inputs: Inputs) -> Run:
        logits = inputs["logits"].clone()
        return lambda: (cross_entropy_(logits, inputs["targets"])[0], logits)

    def loss(logits: Tensor, targets: Tensor, reduction: str = "sum") -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide, targets, reduction=reduction)

    def theirs(function: Callable[..., Tensor], told: bool = False) -> Contender:
        def prepare(inputs: Inputs) -> Run:
            logits = inputs["logits"].clone().requires_grad_()

            def call() -> Any:
                losses = function(logits, inputs["targets"])
                return losses if told else None, *torch.autograd.grad(losses.sum() if told else losses, logits)

            return call

        return Contender(prepare)

    peers: dict[str, Callable[..., Tensor]] = {"eager": loss}
    if sizes.compile_modes:
        peers["compile"] = compiled(loss, sizes.compile_modes[0])
    if liger():
        peers["liger"] = lambda x, t: liger().liger_cross_entropy(x, t, reduction="sum")
    if module("quack.cross_entropy"):
        peers["quack"] = lambda x, t: module("quack.cross_entropy").cross_entropy(x, t, reduction="sum")
    each = theirs(lambda logits, targets: loss(logits, targets, "none"), told=True)
    return Case(
        "cross-entropy forward + backward", f"cross-entropy {M} x {V}", sizes.dtype, make, M,
        {"seqfuse": Contender(ours), **{name: theirs(f) for name, f in peers.items()}}, sizes.checked_rows,
        unfused=each, exact=each, priority=4 + late, shape={"M": M, "V": V},
    )  # fmt: skip
