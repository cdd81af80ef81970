"""Rows of whole models, forward and backward, and without gradients: blocks to stacks, experts, recipes, converted."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import plain
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import seqfuse as sf
from seqfuse import ops, recipes
from seqfuse.ops import _grouped

from .case import Case, Contender, Inputs, Outputs, Run, generator, normal
from .peers import Within, compiled, forward_of, liger, module
from .sizes import MAIN, Mixture, Model, Sizes

GROUPS = {
    "feedforward": "MLP block forward + backward",
    "attention": "attention block forward + backward",
    "layer": "layer forward + backward",
}
CHOICES: dict[str, Any] = {
    "seqfuse": "fast", "seqfuse balanced": "balanced", "seqfuse lean": "lean", "seqfuse 0.5": sf.Budget(part=0.5),
    "seqfuse 0.3": sf.Budget(part=0.3), "seqfuse least": "least",
}  # fmt: skip
LAYERS = 4  # layers of a stack
RECIPES: dict[str, recipes.Recipe] = {
    "current": recipes.Float8CurrentScaling(),
    "delayed": recipes.Float8DelayedScaling(history=16),
    "row": recipes.Float8RowScaling(),
    "block": recipes.Float8BlockScaling(),
    "MX": recipes.MXFP8(),
}
FAR = 0.2  # maximum relative distance from bfloat16 of 8-bit results: twice what their rounding causes
TINY = (Model(32, 64, 2, 2, 16, False, name="gpt"), Model(32, 48, 2, 2, 16, True, name="llama"))

Make = Callable[[], Any]
unfused: Within = functools.partial(sf.fusing, False)  # pyright: ignore[reportAssignmentType]
"""A block in which no fusion applies."""


class Models:
    """The models of one row with the weights of `ours`, created on first use."""

    def __init__(self, sizes: Sizes, fused: Callable[..., Any], plainly: Callable[..., Any] = nn.Module) -> None:
        self.sizes, self.fused, self.plainly = sizes, fused, plainly

    @functools.cached_property
    def ours(self) -> Any:
        torch.manual_seed(0)
        return self.fused(device=self.sizes.device, dtype=self.sizes.dtype)

    def choosing(self, memory: Any) -> Any:
        """Seqfuse's model with another memory choice."""
        made = self.fused(device="meta", dtype=self.sizes.dtype)
        made.memory = memory
        return shared(made, self.ours)

    def torch(self, functions: plain.Functions | None = None) -> Any:
        """The model in plain torch, or with another library's kernels."""
        return shared(self.plainly(functions=functions, device="meta", dtype=self.sizes.dtype), self.ours)

    def ligers(self) -> Any:
        return self.torch(plain.Functions(
            rms_norm=lambda x, w, eps: liger().liger_rms_norm(x, w, eps, in_place=False),
            layer_norm=lambda x, w, b, eps: liger().liger_layer_norm(x, w, b, eps),
            swiglu=lambda a, b: liger().liger_swiglu(a, b),
        ))  # fmt: skip

    def peers(self) -> dict[str, Make | None]:
        """Seqfuse's model, plain torch's, and the latter by `torch.compile` in its first mode, if that is a peer."""
        modes = self.sizes.compile_modes
        compiles = (lambda: compiled(self.torch(), modes[0])) if modes else None
        return {"seqfuse": lambda: self.ours, "eager": self.torch, "compile": compiles}

    def exact(self) -> Any:
        """Seqfuse's model in float64, to be run without fusions."""
        return copy.deepcopy(self.ours).double()


def models_of(what: str, spec: plain.Spec, sizes: Sizes, layers: int = 1) -> Models:
    """The models of a block, a layer or a stack of layers."""
    plainly = functools.partial(plain.build, what, spec, layers=layers)
    return Models(sizes, functools.partial(plain.fused, what, spec, layers), plainly)


def shared(model: Any, other: nn.Module) -> Any:
    """A model with the tensors of another."""
    model.load_state_dict(other.state_dict(), strict=True, assign=True)
    return model.requires_grad_()


def again(model: Any) -> Any:
    """A copy of a model with the same parameters."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def trained(model: Make, within: Within = contextlib.nullcontext, leaves: Sequence[str] = ("x",)) -> Contender:
    """Result and all gradients, as in a training step, of a model that is created on first use.

    The model takes x, and the other inputs except dy by name; `leaves` are the inputs with gradients.
    """

    def prepare(inputs: Inputs) -> Run:
        given = {name: t.detach() for name, t in inputs.items() if name != "dy"}
        wanted = [*(given[name].requires_grad_() for name in leaves), *model().parameters()]
        x = given.pop("x")

        def call() -> Any:
            with within():
                y = model()(x, **given)
                y.backward(inputs["dy"])
            grads = [t.grad for t in wanted]
            for t in wanted:
                t.grad = None
            return y, *grads

        return call

    return Contender(prepare, lambda: list(model().parameters()))


def passes(
    group: str, name: str, sizes: Sizes, model: Any, rows: int, models: Mapping[str, Make | None], exact: Make, *,
    how: Callable[[Make, Within], Contender] = trained, same: bool = True, within: Mapping[str, Within] | None = None,
    **rest: Any,
) -> Case:  # fmt: skip
    """A row of whole models with the same weights, created on first use; `None` for a missing peer.

    `how` turns the creation of a model into the measured contender; `within` has blocks to run contenders in, by name.
    If not all draw the `same` dropout masks, each has its own generator, and peers are not compared. `rest`: as in
    `Case`.
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
    """The layer of a model; only GPT models have dropout."""
    return dataclasses.replace(model, dropout=0.0 if model.llama else dropout)


def flops(what: str, model: Model, rows: int, sequence: int) -> float:
    """FLOPs of a forward pass: GEMMs, and the lower triangle of attention."""
    mlp = 2.0 * rows * model.H * model.F * (3 if model.llama else 2)
    attention = 2.0 * rows * model.H * (model.packed + model.heads * model.head_dim)
    attention += 2.0 * rows * sequence * model.heads * model.head_dim
    return {"feedforward": mlp, "attention": attention, "layer": mlp + attention}[what]


def drawn(sizes: Sizes, model: Model, *names: str) -> Any:
    """A function that draws inputs [B, S, H] with the requested number of rows."""

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
    """A block against `torch.compile` in its best mode, or against its first mode and the other peers."""
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
        "prefill, one layer", f"{model.name} {rows}", sizes, model, rows, of.peers(), of.exact,
        how=lambda make, within: forward_of(lambda x: make()(x), within), make=drawn(sizes, model, "x"),
        priority=5 + 2 * (model.name not in MAIN), flops=flops("layer", model, rows, rows),
    )  # fmt: skip


def host_cases(sizes: Sizes) -> Iterator[Case]:
    """The blocks of the target for CPU overhead on a GPU: with 16 columns and 4 rows only the overhead matters."""
    for llama in (False, True) if sizes.device.type == "cuda" else ():
        model = Model(16, 16, 1, 1, 16, llama, name="llama" if llama else "gpt")
        of = models_of("feedforward", model, sizes)
        yield passes(
            "host", f"{model.name} feed-forward block 4 x 16", sizes, model, 4, of.peers(), of.exact,
            make=drawn(sizes, model, "x", "dy"), priority=2,
        )  # fmt: skip


def memory_cases(sizes: Sizes) -> Iterator[Case]:
    """A few layers of the main models: eager, with each layer checkpointed, and with each choice of `memory=`."""
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
    """Saved and peak bytes of each memory choice's plan, without gradients of parameters."""
    found: dict[str, Any] = {}
    for name, memory in CHOICES.items():
        plan = of.choosing(memory).plan(inputs["x"].detach().requires_grad_())
        found[name] = {"saved": plan.memory.saved, "peak": plan.memory.peak}
    return {"said": found, "gradients": sum(p.nbytes for p in of.ours.parameters())}


class Loop(nn.Module):
    """A loop over experts: each finds its tokens, which synchronizes, and adds its outputs to the result."""

    def __init__(self, up: nn.Parameter, down: nn.Parameter) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor, *, experts: Tensor, probs: Tensor) -> Tensor:
        y = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
        for e in range(len(self.up)):
            tokens, which = (experts == e).nonzero(as_tuple=True)
            gate, up = F.linear(x[tokens], self.up[e]).chunk(2, -1)
            made = F.linear(F.silu(gate) * up, self.down[e])
            y = y.index_add(0, tokens, made * probs[tokens, which].unsqueeze(-1))
        return y.to(x.dtype)


class Theirs(nn.Module):
    """Hugging Face's experts of Mixtral, with one of its implementations."""

    def __init__(self, mixture: Mixture, implementation: str, up: nn.Parameter, down: nn.Parameter) -> None:
        super().__init__()
        with torch.device("meta"):
            self.experts = plain.mixtral(mixture.H, mixture.F, implementation, mixture.experts, mixture.top_k).experts
        self.experts.gate_up_proj, self.experts.down_proj = up, down

    def forward(self, x: Tensor, *, experts: Tensor, probs: Tensor) -> Tensor:
        return self.experts(x, experts, probs)


def experts(mixture: Mixture, **made: Any) -> sf.Sequential:
    """Seqfuse's experts."""
    count, H, F = mixture.experts, mixture.H, mixture.F
    up = ops.GroupedLinear(count, H, 2 * F, bias=False, **made)
    down = ops.GroupedLinear(count, F, H, bias=False, **made)
    return sf.Sequential(ops.Permute(count, mixture.top_k), up, ops.SwiGLU(), down, ops.Unpermute())


def of_one_expert(outputs: Outputs) -> Outputs:
    """Results with the gradients of only the first expert's weights: all would be billions of float64 values."""
    return [*outputs[:3], *(None if t is None else t[:1] for t in outputs[3:])]


def expert_cases(sizes: Sizes) -> Iterator[Case]:
    """A row for each mixture."""
    return (_experts(sizes, mixture) for mixture in sizes.mixtures)


def _experts(sizes: Sizes, mixture: Mixture) -> Case:
    """Without the router: rounding of its scores changes the experts of some tokens."""
    of, rows = Models(sizes, functools.partial(experts, mixture)), sizes.tokens[0]

    def make(tokens: int, seed: int) -> Inputs:
        draw = generator(sizes.device, seed)
        scores = torch.randn(tokens, mixture.experts, generator=draw, device=sizes.device)
        scores = scores + 0.5 * torch.randn(mixture.experts, generator=draw, device=sizes.device)  # unequal load
        probs, chosen = scores.softmax(-1).topk(mixture.top_k, -1)
        tensors = normal(dict.fromkeys(("x", "dy"), (tokens, mixture.H)), seed, sizes.device, sizes.dtype)
        return {**tensors, "experts": chosen, "probs": probs / probs.sum(-1, keepdim=True)}

    def loop() -> Loop:
        return Loop(*of.ours.parameters())

    without_torchs = functools.partial(mock.patch.object, _grouped, "_takes", return_value=False)
    models: dict[str, Any] = dict.fromkeys(("seqfuse", "seqfuse, our GEMM"), lambda: of.ours)
    models["seqfuse lean"] = functools.partial(of.choosing, "lean")
    if module("transformers.integrations.moe") is None:
        models["eager"] = loop
    else:
        theirs = ("eager", "grouped_mm")
        models |= {"loop": loop} | {n: lambda n=n: Theirs(mixture, n, *of.ours.parameters()) for n in theirs}
    return passes(
        "experts", f"{mixture.name} {rows}", sizes, mixture, rows, models, lambda: copy.deepcopy(loop()).double(),
        how=functools.partial(trained, leaves=("x", "probs")), within={"seqfuse, our GEMM": without_torchs}, make=make,
        judged=of_one_expert, priority=1, flops=3 * 2.0 * rows * mixture.top_k * 3 * mixture.H * mixture.F,
        shape={"experts": mixture.experts},
    )  # fmt: skip


def recipe_cases(sizes: Sizes) -> Iterator[Case]:
    """A Linear and a block of the main models, in bfloat16 and with each recipe, against handwritten FP8 modules.

    The latter use torch's 8-bit GEMM with current scaling, eager and compiled; for a Linear also only the GEMMs, on
    existing operands, a lower bound on the time of every recipe.
    """
    rows = max(32, sizes.tokens[0])
    for model in reversed(mains(sizes) or TINY) if sizes.dtype is torch.bfloat16 else ():
        ours, theirs = ((sf.Sequential, ops.Linear), (nn.Sequential, nn.Linear))
        of = Models(sizes, functools.partial(_linear, model, *ours), functools.partial(_linear, model, *theirs))
        case = _recipes(of, f"Linear {rows} x {model.H} -> {model.F}", model, rows, model.F)
        alone = {f"GEMMs alone{', fast' * fast}": _gemms(model, sizes, rows, fast) for fast in (False, True)}
        work = 6.0 * rows * model.H * model.F
        yield dataclasses.replace(case, contenders={**case.contenders, **alone}, flops=work)
        of, name = models_of("feedforward", model, sizes), f"{model.name} feed-forward block, {rows}"
        case = _recipes(of, name, model, rows, model.H)
        yield dataclasses.replace(case, flops=3 * flops("feedforward", model, rows, 1))


def _linear(model: Model, sequence: Any, linear: Any, functions: Any = None, **made: Any) -> Any:
    return sequence(linear(model.H, model.F, False, **made))


def _recipes(of: Models, name: str, model: Model, rows: int, width: int) -> Case:
    """A module with each recipe; recipes without kernels here are left out."""

    def make(rows: int, seed: int) -> Inputs:
        return normal({"x": (rows, model.H), "dy": (rows, width)}, seed, of.sizes.device, of.sizes.dtype)

    def under(recipe: recipes.Recipe) -> Any:
        made = sf.Sequential(of.choosing("fast"), recipe=recipe)
        if recipe.keeps_state:  # its scales are 1 in the first step
            trained(lambda: made).prepare(make(rows, 1))()
            sf.update_scales(made)
        return made

    models = {**of.peers(), "by hand": lambda: by_hand(of.torch())}
    if of.sizes.compile_modes:
        models["by hand, compiled"] = lambda: compiled(by_hand(of.torch()))
    exact = "seqfuse", "eager", "compile"
    models |= {key: functools.partial(under, recipe) for key, recipe in RECIPES.items()}
    case = passes("recipes: forward + backward", name, of.sizes, model, rows, models, of.exact, make=make, priority=9)
    near = {n: c if n in exact else dataclasses.replace(c, near=FAR) for n, c in case.contenders.items()}
    return dataclasses.replace(case, contenders=near)


def _gemms(model: Model, sizes: Sizes, rows: int, fast: bool) -> Contender:
    """The three GEMMs of a Linear on tensors quantized along rows and columns."""

    def prepare(_: Inputs) -> Run:
        one = torch.ones((), device=sizes.device)
        a, b, c = (
            (torch.randn(shape, device=sizes.device) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
            for shape in ((rows, model.H), (model.F, model.H), (rows, model.F))
        )
        at, bt, ct = (t.t().contiguous() for t in (a, b, c))
        run: Any = functools.partial(torch._scaled_mm, out_dtype=torch.bfloat16, use_fast_accum=fast)
        return lambda: [run(p, q.t(), one, one) for p, q in ((a, b), (c, bt), (ct, at))]

    return Contender(prepare, checked=False)


class ByHand(nn.Linear):
    """A Linear with 8-bit GEMMs and current scaling, as users write it with torch."""

    def forward(self, input: Tensor) -> Tensor:
        y: Any = _ByHand.apply(input.reshape(-1, self.in_features), self.weight)
        y = y if self.bias is None else y + self.bias
        return y.view(*input.shape[:-1], self.out_features)


def by_hand(model: nn.Module) -> nn.Module:
    """A copy of a model with its weights, and `ByHand` instead of each Linear."""
    made = again(model)
    for linear in made.modules():
        if type(linear) is nn.Linear:
            linear.__class__ = ByHand
    return made


class _ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        (qx, sx), (qw, sw) = (_quantized(t, torch.float8_e4m3fn) for t in (x, weight))
        ctx.save_for_backward(qx, sx, qw, sw)
        return torch._scaled_mm(qx, qw.t(), sx, sw, out_dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, *douts: Any) -> Any:
        (dy,) = douts
        qx, sx, qw, sw = ctx.saved_tensors
        qd, sd = _quantized(dy, torch.float8_e5m2)
        dx = torch._scaled_mm(qd, qw.t().contiguous().t(), sd, sw, out_dtype=dy.dtype)
        dweight = torch._scaled_mm(qd.t().contiguous(), qx.t().contiguous().t(), sd, sx, out_dtype=dy.dtype)
        return dx, dweight


def _quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    largest = torch.finfo(dtype).max
    scale = largest / x.abs().max().float().clamp(min=1e-12)
    return (x.float() * scale).clamp(-largest, largest).to(dtype), scale.reciprocal()


class Float64(TorchFunctionMode):
    """Turns casts to float32 into float64: models that cast norms or softmax would have a float32 reference."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda v: torch.float64 if v is torch.float32 else v, (args, kwargs or {}))
        return (Tensor.double if func is Tensor.float else func)(*args, **kwargs)


class OfVectors(nn.Module):
    """A Hugging Face model without its embeddings: x [B, S, H] to the last hidden state."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with Float64() if x.dtype is torch.float64 else contextlib.nullcontext():
            return self.inner(inputs_embeds=x).last_hidden_state


def converted(model: OfVectors, **options: Any) -> OfVectors:
    # Rows are timed at one shape and checked at a smaller one, which must not make the graph's sizes dynamic.
    torch._dynamo.config.automatic_dynamic_shapes = False  # pyright: ignore[reportPrivateUsage]
    sf.convert(model.inner, **options)
    return model


def with_liger(model: OfVectors) -> Callable[[Tensor], Tensor]:
    """A Llama with Liger's kernels; its patch of RoPE, a function of all Llamas, is active only during its calls."""
    library: Any = module("liger_kernel.transformers")
    theirs: Any = module("transformers.models.llama.modeling_llama")
    before = dict(vars(theirs))
    library.apply_liger_kernel_to_llama(fused_linear_cross_entropy=False, model=model.inner)
    rope = theirs.apply_rotary_pos_emb
    vars(theirs).update(before)
    model.inner.norm.in_place = False  # otherwise it overwrites the incoming gradient, which all contenders share

    def run(x: Tensor) -> Tensor:
        theirs.apply_rotary_pos_emb = rope
        try:
            return model(x)
        finally:
            theirs.apply_rotary_pos_emb = before["apply_rotary_pos_emb"]

    run.parameters = model.parameters  # pyright: ignore[reportFunctionMemberAccess]
    return run


def without_zeros(contender: Contender, model: Callable[[], nn.Module]) -> Contender:
    """Without gradients of keys' biases, which are zero except for rounding, since softmax cancels these biases."""

    def prepare(inputs: Inputs) -> Run:
        call, names = contender.prepare(inputs), [name for name, _ in model().named_parameters()]
        zeros = {2 + i for i, name in enumerate(names) if name.endswith("key.bias")}
        return lambda: [t for i, t in enumerate(call()) if i not in zeros]

    return dataclasses.replace(contender, prepare=prepare)


def converted_cases(sizes: Sizes) -> Iterator[Case]:
    """Layers of three converted models, forward and backward."""
    if importlib.util.find_spec("transformers") is not None:
        named = {model.name: model for model in sizes.models}
        bert = Model(1024, 4096, 16, 16, 64, False, name="bert-large")
        bert = bert if sizes.device.type == "cuda" else dataclasses.replace(sizes.models[0], name="bert")
        yield _converted(sizes, named.get("llama3-8b", sizes.models[-1]), "Llama", 1, sizes.sequence)
        yield _converted(sizes, named.get("gpt2-xl", sizes.models[0]), "GPT2", 1, sizes.sequence)
        yield _converted(sizes, bert, "Bert", 2, 512)


def _converted(sizes: Sizes, model: Model, family: str, priority: int, sequence: int) -> Case:
    rows, length, layers = sizes.tokens[0], min(sequence, sizes.tokens[0]), 2

    @functools.cache
    def eager() -> OfVectors:
        torch.manual_seed(0)
        more = {"num_key_value_heads": model.kv_heads, "head_dim": model.head_dim} if family == "Llama" else {}
        more |= {"heads": model.heads, "hidden": model.F, "vocabulary": 64}
        with torch.device(sizes.device):
            inner: Any = plain.hugging(f"{family}Model", model.H, layers, length, **more)
        with torch.no_grad():
            for p in inner.to(sizes.dtype).train().parameters():
                if p.ndim == 1:  # parameters of all zeros or ones would hide errors
                    p.add_(torch.randn_like(p), alpha=0.1)
        inner.get_input_embeddings().requires_grad_(False)
        return OfVectors(inner)

    there = model.llama and module("liger_kernel.transformers") is not None
    models = {
        "seqfuse": lambda: converted(again(eager())), "eager": eager,
        "seqfuse lean": lambda: converted(again(eager()), memory="lean"),
        "compile": (lambda: compiled(again(eager()), sizes.compile_modes[0])) if sizes.compile_modes else None,
        "liger": (lambda: with_liger(again(eager()))) if there else None,
    }  # fmt: skip
    return passes(
        "converted: forward + backward", f"{model.name} x {layers} {rows}", sizes, model, rows, models,
        lambda: copy.deepcopy(eager()).double(), how=lambda make, within: without_zeros(trained(make, within), eager),
        priority=priority, make=drawn(dataclasses.replace(sizes, sequence=length), model, "x", "dy"),
        # One early token dominates rows of queries' gradients: tests/gpu judges these over several draws.
        judged=lambda outputs: outputs[:2], flops=3 * layers * flops("layer", model, rows, length),
        shape={"layers": layers},
    )  # fmt: skip
