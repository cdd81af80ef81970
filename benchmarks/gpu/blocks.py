"""Models forward and backward, and passes without gradients: blocks, layers, and stacks with each choice of memory."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import plain
import torch
from torch import Tensor, nn

import seqfuse as sf

from .case import Case, Contender, Inputs, Run, normal
from .peers import Within, compiled, forward_of, liger
from .sizes import MAIN, Model, Sizes

GROUPS = {
    "feedforward": "MLP block forward + backward",
    "attention": "attention block forward + backward",
    "layer": "layer forward + backward",
}
CHOICES: dict[str, Any] = {
    "seqfuse": "fast", "seqfuse balanced": "balanced", "seqfuse lean": "lean", "seqfuse 0.5": sf.Budget(part=0.5),
    "seqfuse 0.3": sf.Budget(part=0.3), "seqfuse least": "least",
}  # fmt: skip
LAYERS = 4
"""Of a stack."""

Make = Callable[[], Any]
unfused: Within = functools.partial(sf.fusing, False)  # pyright: ignore[reportAssignmentType]
"""A block in which no fusion applies."""


class Models:
    """The models of one row on the weights of `ours`, which are made when they are first asked for."""

    def __init__(self, sizes: Sizes, fused: Callable[..., Any], plainly: Callable[..., Any] = nn.Module) -> None:
        self.sizes, self.fused, self.plainly = sizes, fused, plainly

    @functools.cached_property
    def ours(self) -> Any:
        torch.manual_seed(0)
        return self.fused(device=self.sizes.device, dtype=self.sizes.dtype)

    def choosing(self, memory: Any) -> Any:
        """Ours with another choice of memory."""
        made = self.fused(device="meta", dtype=self.sizes.dtype)
        made.memory = memory
        return shared(made, self.ours)

    def torch(self, functions: plain.Functions | None = None) -> Any:
        """In plain torch, or with somebody's kernels."""
        return shared(self.plainly(functions=functions, device="meta", dtype=self.sizes.dtype), self.ours)

    def ligers(self) -> Any:
        return self.torch(plain.Functions(
            rms_norm=lambda x, w, eps: liger().liger_rms_norm(x, w, eps, in_place=False),
            layer_norm=lambda x, w, b, eps: liger().liger_layer_norm(x, w, b, eps),
            swiglu=lambda a, b: liger().liger_swiglu(a, b),
        ))  # fmt: skip

    def peers(self) -> dict[str, Make | None]:
        """Ours, in plain torch, and by `torch.compile` in its first mode, if it is a peer."""
        modes = self.sizes.compile_modes
        compiles = (lambda: compiled(self.torch(), modes[0])) if modes else None
        return {"seqfuse": lambda: self.ours, "eager": self.torch, "compile": compiles}

    def exact(self) -> Any:
        """Ours in float64; to be run without fusions."""
        return copy.deepcopy(self.ours).double()


def models_of(what: str, spec: plain.Spec, sizes: Sizes, layers: int = 1) -> Models:
    """Those of a block, of a layer or of a stack of layers."""
    plainly = functools.partial(plain.build, what, spec, layers=layers)
    return Models(sizes, functools.partial(plain.fused, what, spec, layers), plainly)


def shared(model: Any, other: nn.Module) -> Any:
    """A model on the tensors of another."""
    model.load_state_dict(other.state_dict(), strict=True, assign=True)
    return model.requires_grad_()


def trained(model: Make, within: Within = contextlib.nullcontext, leaves: Sequence[str] = ("x",)) -> Contender:
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

    return Contender(prepare, forward, lambda: list(model().parameters()))


def read(model: Make, within: Within = contextlib.nullcontext) -> Contender:
    """The result, without gradients."""
    return forward_of(lambda x: model()(x), within)


def passes(
    group: str, name: str, sizes: Sizes, model: Any, rows: int, models: Mapping[str, Make | None], exact: Make, *,
    how: Callable[[Make, Within], Contender] = trained, same: bool = True, within: Mapping[str, Within] | None = None,
    **rest: Any,
) -> Case:  # fmt: skip
    """A row of whole models on the same weights, which are made when they are first used; `None` is a peer not there.

    Of what makes a model, `how` gives what is measured, and `within` by contender a block in which it runs. Where not
    all draw the `same` dropout, each has a generator of its own, and peers are not compared. `rest` is of the `Case`.
    """
    once = {n: functools.cache(make) for n, make in models.items() if make is not None}
    contenders = {n: how(make, (within or {}).get(n, contextlib.nullcontext)) for n, make in once.items()}
    contenders = {n: dataclasses.replace(c, checked=same or n.startswith("seqfuse")) for n, c in contenders.items()}
    shape = {"model": model.name, "M": rows, "H": model.H, "F": model.F, **rest.pop("shape", {})}
    known: dict[str, Any] = {"checked_rows": min(rows, sizes.checked_rows), "as_called": True, **rest}
    return Case(
        group, name, sizes.dtype, rows=rows, contenders=contenders, shape=shape, **known,
        unfused=how(once["seqfuse"], unfused), exact=how(functools.cache(exact), unfused),
    )  # fmt: skip


def spec_of(model: Model, dropout: float = 0.0) -> plain.Spec:
    """Its layer; dropout is of GPT models alone."""
    return dataclasses.replace(model, dropout=0.0 if model.llama else dropout)


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


def mains(sizes: Sizes) -> tuple[Model, ...]:
    return tuple(model for model in sizes.models if model.name in MAIN)


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
        for what, priority in (("feedforward", 6), ("layer", 8)):
            yield from (_block(sizes, m, what, sizes.tokens[0], priority, best=True) for m in mains(sizes))


def _block(sizes: Sizes, model: Model, what: str, rows: int, priority: int, *, best: bool = False) -> Case:
    """A block beside what `torch.compile` can do at best, or in its first mode and the other peers."""
    spec = spec_of(model, sizes.dropout if what == "layer" else 0.0)
    of = models_of(what, spec, sizes)
    models, lean = of.peers(), what == "feedforward" and not model.llama
    if best:
        models["compile"] = None
        models["compile max-autotune"] = lambda: compiled(of.torch(), sizes.compile_modes[1])
    else:
        models["liger"] = of.ligers if liger() else None
        models["seqfuse lean"] = (lambda: of.choosing("lean")) if lean else None
    return passes(
        GROUPS[what], f"{model.name} {rows}{' best modes' * best}", sizes, model, rows, models, of.exact,
        same=not spec.dropout, make=drawn(sizes, model, "x", "dy"), priority=priority,
        flops=3 * flops(what, model, rows, min(sizes.sequence, rows)),
    )  # fmt: skip


def _prefill(sizes: Sizes, model: Model) -> Case:
    rows, of = min(2048, max(sizes.tokens)), models_of("layer", model, sizes)
    return passes(
        "prefill, one layer", f"{model.name} {rows}", sizes, model, rows, of.peers(), of.exact, how=read,
        make=drawn(sizes, model, "x"), priority=5 + 2 * (model.name not in MAIN),
        flops=flops("layer", model, rows, rows),
    )  # fmt: skip


def host_cases(sizes: Sizes) -> Iterator[Case]:
    """The blocks of the host target on a GPU; 16 wide, 4 rows: only the host counts."""
    for llama in (False, True) if sizes.device.type == "cuda" else ():
        model = Model(16, 16, 1, 1, 16, llama, name="llama" if llama else "gpt")
        of = models_of("feedforward", model, sizes)
        yield passes(
            "host", f"{model.name} feed-forward block 4 x 16", sizes, model, 4, of.peers(), of.exact,
            make=drawn(sizes, model, "x", "dy"), priority=2,
        )  # fmt: skip


def memory_cases(sizes: Sizes) -> Iterator[Case]:
    """A few layers of the main models: eager, each layer checkpointed, and each choice of `memory=`."""
    rows = sizes.tokens[0]
    for place, model in enumerate(sorted(mains(sizes) or sizes.models, key=lambda m: not m.llama)):
        of = models_of("stack", model, sizes, LAYERS)
        models = {name: functools.partial(of.choosing, memory) for name, memory in CHOICES.items()}
        models |= {"eager": of.torch, "checkpointed": lambda of=of: of.torch().checkpoint(use_reentrant=False)}
        yield passes(
            "memory: layers forward + backward", f"{model.name} x {LAYERS} {rows}", sizes, model, rows, models,
            of.exact, make=drawn(sizes, model, "x", "dy"), notes=functools.partial(_choices, of),
            shape={"layers": LAYERS}, priority=1 + 2 * place,
            flops=3 * LAYERS * flops("layer", model, rows, min(sizes.sequence, rows)),
        )  # fmt: skip


def _choices(of: Models, inputs: Inputs) -> dict[str, Any]:
    """What the plan of each choice says that it saves and holds at most, without parameters' gradients."""
    found: dict[str, Any] = {}
    for name, memory in CHOICES.items():
        plan = of.choosing(memory).plan(inputs["x"].detach().requires_grad_())
        found[name] = {"saved": plan.memory.saved, "peak": plan.memory.peak}
    return {"said": found, "gradients": sum(p.nbytes for p in of.ours.parameters())}
