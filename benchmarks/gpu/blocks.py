"""Blocks forward and backward, and passes without gradients."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import plain
import torch
from torch import Tensor, nn

import seqfuse as sf

from .case import Case, Contender, Inputs, Run
from .draw import normal
from .peers import compiled, liger
from .sizes import MAIN, Model, Sizes

GROUPS = {
    "feedforward": "MLP block forward + backward",
    "attention": "attention block forward + backward",
    "layer": "layer forward + backward",
}


class Models:
    """The models of one row, made when they are first asked for and alive as long as the row."""

    def __init__(self, what: str, spec: plain.Spec, sizes: Sizes, layers: int = 1) -> None:
        self.what, self.spec, self.layers = what, spec, layers
        self.made = {"device": sizes.device, "dtype": sizes.dtype}

    @functools.cached_property
    def ours(self) -> Any:
        torch.manual_seed(0)
        return plain.fused(self.what, self.spec, self.layers, **self.made)

    def with_weights_of_ours(self, model: nn.Module) -> nn.Module:
        """The model on the same tensors."""
        model.load_state_dict(self.ours.state_dict(), strict=True, assign=True)
        return model.requires_grad_()

    def choosing(self, memory: Any) -> Any:
        """Ours on the same parameters, with another choice of memory."""
        made = plain.fused(self.what, self.spec, self.layers, **{**self.made, "device": "meta"})
        made.memory = memory
        return self.with_weights_of_ours(made)

    @functools.cached_property
    def torch(self) -> Any:
        return self.with_weights_of_ours(
            plain.build(self.what, self.spec, None, self.layers, **{**self.made, "device": "meta"})
        )

    def checkpointed(self) -> nn.Module:
        """Those of torch, of which each layer runs again in the backward pass."""
        return copy.copy(self.torch).checkpoint(use_reentrant=False)

    @functools.cached_property
    def ligers(self) -> nn.Module:
        functions = plain.Functions(
            rms_norm=lambda x, w, eps: liger().liger_rms_norm(x, w, eps, in_place=False),
            layer_norm=lambda x, w, b, eps: liger().liger_layer_norm(x, w, b, eps),
            swiglu=lambda a, b: liger().liger_swiglu(a, b),
        )
        model = plain.build(self.what, self.spec, functions, self.layers, **{**self.made, "device": "meta"})
        return self.with_weights_of_ours(model)

    @functools.cached_property
    def exact(self) -> Any:
        """Ours in float64; to be run without fusions."""
        return copy.deepcopy(self.ours).double()


Within = Callable[[], contextlib.AbstractContextManager[Any]]
unfused: Within = functools.partial(sf.fusing, False)  # pyright: ignore[reportAssignmentType]
"""A block in which no fusion applies."""


def trained(
    model: Any, within: Within = contextlib.nullcontext, checked: bool = True, leaves: Sequence[str] = ("x",)
) -> Contender:
    """Result and all gradients, as a step of training makes them; `model` makes it when it is first used.

    It takes x, and the other inputs but dy by name; `leaves` are those that have gradients.
    """

    def entering(inputs: Inputs) -> tuple[list[Tensor], Callable[[], Tensor]]:
        given = {name: t.detach() for name, t in inputs.items() if name != "dy"}
        wanted = [given[name].requires_grad_() for name in leaves]
        x = given.pop("x")
        return wanted, lambda: model()(x, **given)

    def prepare(inputs: Inputs) -> Run:
        wanted, run = entering(inputs)
        wanted += model().parameters()

        def call() -> Any:
            with within():
                y = run()
                y.backward(inputs["dy"])
            grads = [t.grad for t in wanted]
            for t in wanted:
                t.grad = None
            return y, *grads

        return call

    def forward(inputs: Inputs) -> Tensor:
        with within():
            return entering(inputs)[1]()

    return Contender(prepare, forward, lambda: list(model().parameters()), checked)


def read(model: Any, within: Within = contextlib.nullcontext) -> Contender:
    """The result, without gradients."""

    def prepare(inputs: Inputs) -> Run:
        own = model()

        def call() -> Any:
            with torch.no_grad(), within():
                return (own(inputs["x"]),)

        return call

    return Contender(prepare)


def planned(model: Any) -> Any:
    """What notes say of a model of operations: its fused steps, by name."""

    def notes(inputs: Inputs) -> dict[str, Any]:
        plan = model().plan(inputs["x"].detach().requires_grad_())
        covers = {"forward": plan.forward, "backward": plan.backward}
        return {"plan": {k: [step.name for step in cover if step.fused] for k, cover in covers.items()}}

    return notes


def spec_of(model: Model, dropout: float = 0.0) -> plain.Spec:
    return plain.Spec(
        model.H, model.F, model.heads, model.kv_heads, model.head_dim, model.llama, 0.0 if model.llama else dropout
    )


def flops(what: str, model: Model, rows: int, sequence: int) -> float:
    """Of a forward pass: products, and the lower triangle of attention."""
    mlp = 2.0 * rows * model.H * model.F * (3 if model.llama else 2)
    attention = 2.0 * rows * model.H * (model.packed + model.heads * model.head_dim)
    attention += 2.0 * rows * sequence * model.heads * model.head_dim
    return {"feedforward": mlp, "attention": attention, "layer": mlp + attention}[what]


def drawn(sizes: Sizes, model: Model, *names: str) -> Any:
    """Inputs [B, S, H] of as many rows as asked for."""

    def make(rows: int, seed: int) -> Inputs:
        S = min(sizes.sequence, rows)
        return normal(dict.fromkeys(names, (rows // S, S, model.H)), seed, sizes.device, sizes.dtype)

    return make


def cases(sizes: Sizes) -> Iterator[Case]:
    """Every block of every model, the main ones first."""
    for model in sizes.models:
        for rank, tokens in enumerate(sizes.tokens):
            late = (0 if model.name in MAIN else 3) + 2 * rank
            for what, first in (("feedforward", 0), ("layer", 1), ("attention", 3)):
                if what != "attention" or rank == 0:
                    yield _block(sizes, model, what, tokens, first + late)
    yield from (_prefill(sizes, model) for model in sizes.models)
    if sizes.compile_modes:
        mains = [model for model in sizes.models if model.name in MAIN]
        yield from (_block(sizes, m, "feedforward", sizes.tokens[0], 6, best=True) for m in mains)
        yield from (_block(sizes, m, "layer", sizes.tokens[0], 8, best=True) for m in mains)


def _common(sizes: Sizes, model: Model, rows: int) -> dict[str, Any]:
    return {
        "dtype": sizes.dtype, "rows": rows, "checked_rows": min(rows, sizes.checked_rows), "as_called": True,
        "shape": {"model": model.name, "M": rows, "H": model.H, "F": model.F},
    }  # fmt: skip


def _block(sizes: Sizes, model: Model, what: str, rows: int, priority: int, *, best: bool = False) -> Case:
    p = sizes.dropout if what == "layer" else 0.0
    return block_case(sizes, Models(what, spec_of(model, p), sizes), model, what, rows, priority, best=best)


def block_case(
    sizes: Sizes, models: Models, model: Model, what: str, rows: int, priority: int, *, best: bool = False
) -> Case:
    """A block of some rows, with what `torch.compile` can do at best, or in its first mode beside the other peers."""
    same = not models.spec.dropout  # else each has a generator of its own
    contenders = {"seqfuse": trained(lambda: models.ours), "eager": trained(lambda: models.torch, checked=same)}
    if best:
        mode = sizes.compile_modes[1]
        compiled_model = functools.cache(lambda: compiled(models.torch, mode))
        contenders["compile max-autotune"] = trained(compiled_model, checked=same)
    else:
        if sizes.compile_modes:
            compiled_model = functools.cache(lambda: compiled(models.torch, sizes.compile_modes[0]))
            contenders["compile"] = trained(compiled_model, checked=same)
        if liger():
            contenders["liger"] = trained(lambda: models.ligers, checked=same)
        if what == "feedforward" and not model.llama:
            contenders["seqfuse lean"] = trained(functools.cache(lambda: models.choosing("lean")))
    return Case(
        GROUPS[what], f"{model.name} {rows}{' best modes' if best else ''}",
        make=drawn(sizes, model, "x", "dy"), priority=priority, **_common(sizes, model, rows),
        flops=3 * flops(what, model, rows, min(sizes.sequence, rows)), contenders=contenders,
        notes=planned(lambda: models.ours),
        unfused=trained(lambda: models.ours, unfused), exact=trained(lambda: models.exact, unfused),
    )  # fmt: skip


def _prefill(sizes: Sizes, model: Model) -> Case:
    rows = min(2048, max(sizes.tokens))
    models = Models("layer", spec_of(model), sizes)
    contenders = {"seqfuse": read(lambda: models.ours), "eager": read(lambda: models.torch)}
    if sizes.compile_modes:
        contenders["compile"] = read(functools.cache(lambda: compiled(models.torch, sizes.compile_modes[0])))
    return Case(
        "prefill, one layer", f"{model.name} {rows}", make=drawn(sizes, model, "x"),
        priority=5 + 2 * (model.name not in MAIN), **_common(sizes, model, rows), contenders=contenders,
        flops=flops("layer", model, rows, rows), unfused=read(lambda: models.ours, unfused),
        exact=read(lambda: models.exact, unfused),
    )  # fmt: skip
