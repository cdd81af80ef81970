"""Activations and gated units in both directions, with the bias gradient; cross-entropy; rotary embedding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqfuse.kernels import pointwise as k
from seqfuse.kernels.activations import ACTIVATIONS
from seqfuse.kernels.crossentropy import cross_entropy_
from seqfuse.kernels.rope import Rotation, rope_bwd, rope_fwd

from . import draw
from .case import Case, Contender, Inputs, Run
from .draw import normal
from .peers import backward_of, forward_of, liger, module, peers_of
from .sizes import MAIN, Model, Sizes

# Under names of our own: arguments are passed by name.
EAGER: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: F.gelu(x),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": lambda x: F.silu(x),
    "squared_relu": lambda x: F.relu(x).square(),
}


def gated(act: str) -> Callable[[Tensor], Tensor]:
    """A gated unit of packed [gate; up] in plain torch."""

    def unit(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return EAGER[act](gate) * up

    return unit


def chain(*steps: Any, operands: tuple[str, ...] = ()) -> Contender:
    """A chain of our point-wise kernel on `x`, and everything that it gives."""

    def prepare(inputs: Inputs) -> Run:
        given, made = tuple(inputs[name] for name in operands), k.Chain(*steps)
        return lambda: k.pointwise(inputs["x"], made, given)

    return Contender(prepare)


def _gradient_chain(*steps: Any) -> Contender:
    """The same on the incoming gradient, with the activation's input as the operand."""

    def prepare(inputs: Inputs) -> Run:
        made = k.Chain(*steps)
        return lambda: k.pointwise(inputs["dy"], made, (inputs["x"],))

    return Contender(prepare)


def _biased(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def with_bias(x: Tensor, bias: Tensor) -> Tensor:
        return function(x + bias)

    return with_bias


def cases(sizes: Sizes) -> Iterator[Case]:
    """Over (tokens, F) of each model."""
    classes: set[int] = set()
    for rank, model in enumerate(sorted(sizes.models, key=lambda m: m.name not in MAIN)):
        if len(sizes.models) > 2 and rank > 1 and model.name not in ("gpt2-xl", "llama3-1b"):
            continue
        yield from _plain_cases(sizes, model, 2 * (rank > 1))
        if model.llama:
            yield from _gated_cases(sizes, model, 2 * (rank > 1))
        yield from _rope_cases(sizes, model, 2 * (rank > 1))
        if model.V not in classes:
            classes.add(model.V)
            yield from _loss_cases(sizes, model, 2 * (rank > 1))


def _common(sizes: Sizes, rows: int, **shape: int) -> dict[str, Any]:
    return {"dtype": sizes.dtype, "rows": rows, "checked_rows": sizes.checked_rows, "shape": {"M": rows, **shape}}


def _plain_cases(sizes: Sizes, model: Model, late: int) -> Iterator[Case]:
    M, N, modes = sizes.tokens[0], model.F, sizes.compile_modes
    common = _common(sizes, M, N=N)

    def drawn(*names: str) -> Any:
        def make(rows: int, seed: int) -> Inputs:
            shapes = {name: (N,) if name == "bias" else (rows, N) for name in names}
            return normal(shapes, seed, sizes.device, sizes.dtype)

        return make

    for act in ("gelu", "squared_relu") if not model.llama else ("silu",):
        function, own = EAGER[act], ACTIVATIONS[act]
        label, later = f"{act} {M} x {N}", 2 + late + (act == "squared_relu")
        ours = {"seqfuse": chain(k.act(own))}
        theirs = liger().liger_relu_squared if liger() and act == "squared_relu" else None
        yield Case(
            "activation forward", label, make=drawn("x"), priority=later, **common,
            contenders=ours | peers_of(forward_of, function, modes, liger=theirs),
        )  # fmt: skip
        yield Case(
            "activation backward", label, make=drawn("x", "dy"), priority=later, **common,
            contenders={
                "seqfuse": _gradient_chain(k.dact(own)),
                **peers_of(lambda f: backward_of(f, ["x"]), function, modes, liger=theirs),
            },
        )  # fmt: skip
        yield Case(
            "dact + dbias", label, make=drawn("x", "bias", "dy"), priority=later, **common,
            contenders={
                "seqfuse": _dact_dbias(own),
                **peers_of(lambda f: backward_of(f, ["x", "bias"]), _biased(function), modes),
            },
        )  # fmt: skip


def _dact_dbias(own: Any) -> Contender:
    """Both gradients in one pass; the sum that the activation took is there, as a product leaves it."""

    def prepare(inputs: Inputs) -> Run:
        z, made = inputs["x"] + inputs["bias"], k.Chain(k.dact(own), k.column_sum())
        return lambda: k.pointwise(inputs["dy"], made, (z,))

    return Contender(prepare)


def _gated_cases(sizes: Sizes, model: Model, late: int) -> Iterator[Case]:
    M, N, modes = sizes.tokens[0], model.F, sizes.compile_modes
    common = _common(sizes, M, N=N)
    theirs = None if not liger() else lambda x: liger().liger_swiglu(*x.chunk(2, -1))
    label = f"swiglu {M} x {N}"

    def make(rows: int, seed: int) -> Inputs:
        return normal({"x": (rows, 2 * N)}, seed, sizes.device, sizes.dtype)

    def with_dy(rows: int, seed: int) -> Inputs:
        return normal({"x": (rows, 2 * N), "dy": (rows, N)}, seed, sizes.device, sizes.dtype)

    silu = ACTIVATIONS["silu"]
    yield Case(
        "gated activation forward", label, make=make, priority=2 + late, **common,
        contenders={
            "seqfuse": chain(k.gated(silu)),
            **peers_of(forward_of, gated("silu"), modes, liger=theirs),
        },
    )  # fmt: skip
    yield Case(
        "gated activation backward", label, make=with_dy, priority=2 + late, **common,
        contenders={
            "seqfuse": _gradient_chain(k.dgated(silu)),
            **peers_of(lambda f: backward_of(f, ["x"]), gated("silu"), modes, liger=theirs),
        },
    )  # fmt: skip


def _rotated(x: Tensor, model: Model) -> Tensor:
    """Rotation of packed heads in plain torch, in float32 as Hugging Face does where it is careful."""
    heads = x.unflatten(-1, (model.heads + 2 * model.kv_heads, model.head_dim))
    known, values = heads.split([model.heads + model.kv_heads, model.kv_heads], -2)
    compute = torch.promote_types(x.dtype, torch.float32)
    half = model.head_dim // 2
    powers = torch.arange(0, model.head_dim, 2, device=x.device, dtype=torch.float64) / -model.head_dim
    angles = torch.outer(torch.arange(x.shape[-2], device=x.device, dtype=compute), (10000.0**powers).to(compute))
    cos, sin = angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)
    first, second = known[..., :half].to(compute), known[..., half:].to(compute)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return torch.cat((turned.to(x.dtype), values), -2).flatten(-2)


def _rope_cases(sizes: Sizes, model: Model, late: int) -> Iterator[Case]:
    if not model.llama:
        return
    S, rotation = sizes.sequence, Rotation("half", model.head_dim)
    M = sizes.tokens[0]
    common = _common(sizes, M, heads=model.heads, kv_heads=model.kv_heads, D=model.head_dim)
    common["checked_rows"] = max(S, sizes.checked_rows // S * S)

    def make(rows: int, seed: int) -> Inputs:
        return normal({"x": (rows // S, S, model.packed)}, seed, sizes.device, sizes.dtype)

    def with_dy(rows: int, seed: int) -> Inputs:
        shape = (rows // S, S, model.packed)
        return normal({"x": shape, "dy": shape}, seed, sizes.device, sizes.dtype)

    def eager(x: Tensor) -> Tensor:
        return _rotated(x, model)

    label = f"rope {M} x {model.heads}+2*{model.kv_heads} x {model.head_dim}"
    heads = (model.heads, model.kv_heads, rotation)
    yield Case(
        "rope forward", label, make=make, priority=4 + late, **common,
        contenders={
            "seqfuse": Contender(lambda i: lambda: (rope_fwd(i["x"], *heads).y,)),
            **peers_of(forward_of, eager, sizes.compile_modes),
        },
    )  # fmt: skip
    size = 2 * M * model.packed * sizes.dtype.itemsize
    yield Case(
        "rope backward", label, make=with_dy, priority=4 + late, fewest=size, **common,
        contenders={
            "seqfuse": Contender(lambda i: lambda: (rope_bwd(i["dy"], *heads).dx,)),
            **peers_of(lambda f: backward_of(f, ["x"]), eager, sizes.compile_modes),
        },
    )  # fmt: skip


def _loss_cases(sizes: Sizes, model: Model, late: int) -> Iterator[Case]:
    """Loss and gradient of the logits; those who write the one over the other are given a copy once."""
    M, V = sizes.tokens[0], model.V
    common = _common(sizes, M, V=V)

    def make(rows: int, seed: int) -> Inputs:
        drawn = normal({"logits": (rows, V)}, seed, sizes.device, sizes.dtype)
        numbers = draw.generator(sizes.device, seed)
        return drawn | {"targets": torch.randint(V, (rows,), device=sizes.device, generator=numbers)}

    def eager(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, reduction="sum")

    def ours(inputs: Inputs) -> Run:
        logits = inputs["logits"].clone()

        def call() -> Any:
            losses, _ = cross_entropy_(logits, inputs["targets"])
            return losses, logits

        return call

    def theirs(function: Any) -> Contender:
        def prepare(inputs: Inputs) -> Run:
            logits = inputs["logits"].clone().requires_grad_()

            def call() -> Any:
                loss = function(logits, inputs["targets"])
                return None, *torch.autograd.grad(loss, logits)

            return call

        return Contender(prepare)

    def row_by_row(inputs: Inputs) -> Run:
        logits = inputs["logits"].detach().requires_grad_()

        def call() -> Any:
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            losses = F.cross_entropy(wide, inputs["targets"], reduction="none")
            return losses, *torch.autograd.grad(losses.sum(), logits)

        return call

    others: dict[str, Any] = {
        "liger": liger() and (lambda x, t: liger().liger_cross_entropy(x, t, reduction="sum")),
        "quack": module("quack.cross_entropy")
        and (lambda x, t: module("quack.cross_entropy").cross_entropy(x, t, reduction="sum")),
    }
    yield Case(
        "cross-entropy forward + backward", f"cross-entropy {M} x {V}", make=make, priority=4 + late, **common,
        unfused=Contender(row_by_row), exact=Contender(row_by_row),
        contenders={
            "seqfuse": Contender(ours),
            **peers_of(theirs, eager, sizes.compile_modes, **{n: f or None for n, f in others.items()}),
        },
    )  # fmt: skip
