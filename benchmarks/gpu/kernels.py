"""Rows of one kernel each: norms, pointwise kernels, cross-entropy, RoPE, attention, decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import plain
import torch
import torch.nn.functional as F
from torch import Tensor

from seqfuse.kernels import pointwise as k
from seqfuse.kernels.activations import ACTIVATIONS
from seqfuse.kernels.attention import attention_bwd, attention_fwd
from seqfuse.kernels.crossentropy import cross_entropy_
from seqfuse.kernels.decode import decode_attention
from seqfuse.kernels.norm import norm_bwd, norm_fwd
from seqfuse.kernels.rope import Rotation, rope_bwd, rope_fwd
from seqfuse.ops._philox import drop_mask

from . import case
from .case import Case, Contender, Inputs, Outputs, Run, normal
from .peers import Kernels, Shapes, forward_of, liger, module, quack
from .sizes import MAIN, Model, Sizes

EPS, P = 1e-5, 0.1


def norm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """RMSNorm, or LayerNorm if there is a bias, in plain torch."""
    own = (x, weight.shape, weight)
    return F.rms_norm(*own, EPS) if bias is None else F.layer_norm(*own, bias, EPS)


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Residual sum and its norm; also returns the sum."""
    stream = x + residual
    return norm(stream, weight, bias), stream


def _liger(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Any:
    if residual is not None:
        return liger().liger_fused_add_rms_norm(x, residual, weight, EPS, in_place=False)
    if bias is None:
        return liger().liger_rms_norm(x, weight, EPS, in_place=False)
    return liger().liger_layer_norm(x, weight, bias, EPS)


def _quack(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Any:
    return quack().rmsnorm(x, weight, residual=residual, eps=EPS, prenorm=residual is not None)


def _norm(inputs: Inputs, **around: Any) -> Any:
    """Seqfuse's forward kernel of either norm."""
    bias = inputs.get("bias")
    return norm_fwd(inputs["x"], inputs["weight"], bias, EPS, centered=bias is not None, **around)


def _norm_forward(*around: str, **more: Any) -> Callable[[Inputs], Run]:
    """The norm; with a prologue, also the residual stream."""
    return lambda inputs: lambda: _norm(inputs, **{n: inputs[n] for n in around}, **more)[: 2 if around else 1]


def _norm_backward(inputs: Inputs) -> Run:
    made, x = _norm(inputs), inputs["x"]
    saved = (x, made.mean, made.rstd, inputs["weight"])
    sums = {f"d{name}": x.dtype for name in ("weight", "bias") if name in inputs}

    def call() -> Any:
        back = norm_bwd(inputs["dy"], *saved, dstream=inputs.get("dstream"), **sums)
        return back.dx, *(getattr(back, name) for name in sums)

    return call


def _with_stream(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """A norm and its input, so that the gradient of the residual stream is added."""
    return lambda x, **rest: (function(x, **rest), x.view_as(x))


def _same_mask(x: Tensor, seed: Tensor, **rest: Tensor) -> tuple[Tensor, Tensor]:
    return add_norm((x * (1 / (1 - P))).masked_fill(drop_mask(seed, x.shape, P), 0), **rest)


def _own_mask(x: Tensor, seed: Tensor, **rest: Tensor) -> tuple[Tensor, Tensor]:
    return add_norm(F.dropout(x, P), **rest)


def norms(sizes: Sizes) -> Iterator[Case]:
    """Both norms at each shape; LayerNorm and the remaining shapes come later."""
    shapes = [(*shape, 0) for shape in sizes.norms] + [(*shape, 6) for shape in sizes.more_norms]
    for rank, (rows, columns, late) in enumerate(shapes):
        for centered in (False, True):
            later = late + (rank > 1) + 2 * centered
            yield from _norms(sizes, rows, columns, centered, later, alone=late > 0, first=rank < 2)


def _norms(sizes: Sizes, M: int, N: int, centered: bool, later: int, *, alone: bool, first: bool) -> Iterator[Case]:
    names = ("weight", "bias") if centered else ("weight",)
    of = Kernels(sizes, f"{'LayerNorm' if centered else 'RMSNorm'} {M} x {N}", M, {"M": M, "N": N}, compiles=first)
    theirs = {"liger": _liger} if centered else {"liger": _liger, "quack": _quack}

    def shapes(*extra: str) -> Shapes:
        return {"x": (-1, N), **dict.fromkeys(names, (N,)), **dict.fromkeys(extra, (-1, N))}

    wanted = ("x", *names)
    yield of.case("norm forward", later, shapes(), _norm_forward(), norm, others=theirs)
    yield of.case("norm backward", later, shapes("dy"), _norm_backward, norm, wanted=wanted, others=theirs)
    if alone:
        return
    yield of.case(
        "norm backward + residual", later + 1, shapes("dy", "dstream"), _norm_backward, _with_stream(norm),
        wanted=wanted, douts=("dy", "dstream"), others={n: _with_stream(function) for n, function in theirs.items()},
    )  # fmt: skip
    known, added = shapes("residual"), {} if centered else theirs
    yield of.case("add + norm forward", later, known, _norm_forward("residual"), add_norm, others=added)
    if centered:

        def make(rows: int, seed: int) -> Inputs:
            return {**of.inputs(known, rows, seed), "seed": torch.tensor(0x1234_5678_9ABC + seed, device=sizes.device)}

        dropped, same = _norm_forward("seed", "residual", p=P), forward_of(_same_mask)
        yield of.case(
            "dropout + add + norm", max(0, later - 2), {}, dropped, _own_mask, checked=False, make=make, unfused=same,
            exact=same,
        )  # fmt: skip


# With our parameter names, since arguments are passed by name.
EAGER: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: F.gelu(x),
    "silu": lambda x: F.silu(x),
    "squared_relu": lambda x: F.relu(x).square(),
}


def gated(x: Tensor) -> Tensor:
    """SwiGLU of packed [gate; up] in plain torch."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def chain(*steps: Any) -> Callable[[Inputs], Run]:
    """A chain of seqfuse's pointwise kernel with all its results: on x, or on dy with the input of a forward pass.

    With a bias, this input is the sum, which exists already, as after a GEMM.
    """

    def prepare(inputs: Inputs) -> Run:
        made, x = k.Chain(*steps), inputs["x"]
        z = x + inputs["bias"] if "bias" in inputs else x
        return lambda: k.pointwise(inputs["dy"], made, (z,)) if "dy" in inputs else k.pointwise(x, made, ())

    return prepare


def pointwise(sizes: Sizes) -> Iterator[Case]:
    """Pointwise kernels on (tokens, F) of each model."""
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
        yield of.case("activation forward", later, x, chain(k.act(own)), function, others=theirs)
        yield of.case("activation backward", later, x | dy, chain(k.dact(own)), function, wanted=["x"], others=theirs)
        yield of.case(
            "dact + dbias", later, x | bias | dy, chain(k.dact(own), k.column_sum()),
            lambda x, bias, function=function: function(x + bias), wanted=["x", "bias"],
        )  # fmt: skip
    if model.llama:
        of, back = Kernels(sizes, f"swiglu {M} x {N}", M, {"M": M, "N": N}), chain(k.dgated(silu))
        theirs = {"liger": lambda x: liger().liger_swiglu(*x.chunk(2, -1))}
        yield of.case("gated activation forward", 2 + late, wide, chain(k.gated(silu)), gated, others=theirs)
        yield of.case("gated activation backward", 2 + late, wide | dy, back, gated, wanted=["x"], others=theirs)


def _rope_cases(sizes: Sizes, model: Model, late: int) -> Iterator[Case]:
    M, S, known, kv, D = sizes.tokens[0], sizes.sequence, model.heads, model.kv_heads, model.head_dim
    shape, checked_rows = {"M": M, "heads": known, "kv_heads": kv, "D": D}, max(S, sizes.checked_rows // S * S)
    of = Kernels(sizes, f"rope {M} x {known}+2*{kv} x {D}", M, shape, checked_rows=checked_rows, per=S)
    x, dy, heads = {"x": (-1, S, model.packed)}, {"dy": (-1, S, model.packed)}, (known, kv, Rotation("half", D))

    def eager(x: Tensor) -> Tensor:
        """RoPE of packed heads in float32, as in some Hugging Face models."""
        turned, values = x.unflatten(-1, (-1, D)).transpose(-3, -2).split([known + kv, kv], -3)
        turned = plain.rotated(turned, *plain.angles(S, D, x))
        return torch.cat((turned, values), -3).transpose(-3, -2).flatten(-2)

    yield of.case("rope forward", 4 + late, x, lambda i: lambda: (rope_fwd(i["x"], *heads).y,), eager)
    yield of.case(
        "rope backward", 4 + late, x | dy, lambda i: lambda: (rope_bwd(i["dy"], *heads).dx,), eager, wanted=["x"],
        fewest=2 * M * model.packed * sizes.dtype.itemsize,
    )  # fmt: skip


def _loss_case(sizes: Sizes, model: Model, late: int) -> Case:
    """Loss and gradient of the logits; contenders that overwrite logits by gradients get one copy, untimed."""
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

    each = theirs(lambda logits, targets: loss(logits, targets, "none"), told=True)
    return Kernels(sizes, f"cross-entropy {M} x {V}", M, {"M": M, "V": V}).case(
        "cross-entropy forward + backward", 4 + late, {}, ours, loss, how=theirs, make=make, unfused=each, exact=each,
        others={
            "liger": lambda x, t: liger().liger_cross_entropy(x, t, reduction="sum"),
            "quack": lambda x, t: module("quack.cross_entropy").cross_entropy(x, t, reduction="sum"),
        },
    )  # fmt: skip


def attentions(sizes: Sizes) -> Iterator[Case]:
    """Heads of the main models over sequences of the usual length."""
    for model in sizes.models:
        if model.name in MAIN or len(sizes.models) <= 2:
            for window in (None, sizes.sequence // 4):
                yield from _attentions(sizes, model, window)


def _seen(length: int, window: int, device: torch.device) -> Tensor:
    """Whether a row attends to a key, [S, S]."""
    at = torch.arange(length, device=device)
    behind = at.unsqueeze(1) - at
    return (behind >= 0) & (behind < window)


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, dy: Tensor | None = None, *, window: int | None) -> tuple[Tensor, ...]:
    """Each step of both passes separately: recomputes weights from the log-sum-exp, and rounds inputs of GEMMs.

    As in every kernel that saves nothing of size S x S, an exact zero is a difference of two sums.
    """
    wide, group, S = torch.promote_types(q.dtype, torch.float32), q.shape[1] // k.shape[1], q.shape[2]
    scale = q.shape[-1] ** -0.5
    keys, values = (t.repeat_interleave(group, 1).to(wide) for t in (k, v))
    scores = (q.to(wide) @ keys.transpose(2, 3) * scale).masked_fill(~_seen(S, window or S, q.device), -torch.inf)
    weights = (scores - scores.logsumexp(-1, keepdim=True)).exp()
    rounded = weights.to(q.dtype).to(wide)
    y = (rounded @ values).to(q.dtype)
    if dy is None:
        return (y.transpose(1, 2),)
    dy = dy.transpose(1, 2).to(wide)
    delta = (dy * y.to(wide)).sum(-1, keepdim=True)
    d = (weights * (dy @ values.transpose(2, 3) - delta)).to(q.dtype).to(wide)
    dk, dv = d.transpose(2, 3) @ q.to(wide) * scale, rounded.transpose(2, 3) @ dy
    dk, dv = (t.unflatten(1, (-1, group)).sum(2).to(q.dtype) for t in (dk, dv))
    return (d @ keys * scale).to(q.dtype), dk, dv


def _attentions(sizes: Sizes, model: Model, window: int | None) -> Iterator[Case]:
    S, H, Hkv, D = sizes.sequence, model.heads, model.kv_heads, model.head_dim
    batch = max(1, sizes.tokens[0] // S)
    label = f"{model.name} {batch} x {S}, {H}/{Hkv} x {D}, {'causal' if window is None else f'window {window}'}"
    numbers = {"B": batch, "S": S, "heads": H, "kv_heads": Hkv, "D": D}
    of = Kernels(sizes, label, batch, numbers, compiles=False, checked_rows=1)
    shapes = {"q": (-1, H, S, D), "k": (-1, Hkv, S, D), "v": (-1, Hkv, S, D)}

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = None if window is None else _seen(S, window, q.device)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=Hkv != H)
        return y.transpose(1, 2)

    def forward(inputs: Inputs) -> Run:
        return lambda: (attention_fwd(**inputs, causal=True, window=window)[0],)

    def backward(inputs: Inputs) -> Run:
        heads = [inputs[name] for name in "qkv"]
        y, lse = attention_fwd(*heads, causal=True, window=window)

        def call() -> Any:
            out = tuple(torch.empty_like(t) for t in heads)
            attention_bwd(inputs["dy"], *heads, y, lse, out, causal=True, window=window)
            return out

        return call

    def middle(outputs: Outputs) -> Outputs:
        """Without rows that attend to few keys, or few rows attend to: their gradients are many times larger, so that
        errors of one kind are no measure of the other.
        """
        return [None if t is None else t[..., S // 4 : S - S // 4, :].contiguous() for t in outputs]

    seen = S * (S + 1) / 2 if window is None else S * window - window * (window - 1) / 2
    flops = 4.0 * batch * H * D * seen
    late = 4 if window is None else 6
    step_by_step = Contender(lambda inputs: lambda: _one_by_one(**inputs, window=window))
    common: dict[str, Any] = {"anywhere": True, "unfused": step_by_step}
    yield of.case("attention forward", late, shapes, forward, eager, flops=flops, **common)
    yield of.case(
        "attention backward", late, shapes | {"dy": (-1, S, H, D)}, backward, eager, wanted=["q", "k", "v"],
        flops=2.5 * flops, judged=middle, **common,
    )  # fmt: skip


def decoding(sizes: Sizes) -> Iterator[Case]:
    """One new token per sequence over a cache, at each batch size and length."""
    grouped = [m for m in sizes.models if m.kv_heads != m.heads]
    for model in sorted(grouped, key=lambda m: m.name not in MAIN):
        for rank, (batch, length) in enumerate(sizes.decodes):
            yield _decode(sizes, model, batch, length, 3 + (rank > 5) + 2 * (model.name not in MAIN))


def _decode(sizes: Sizes, model: Model, batch: int, length: int, priority: int) -> Case:
    """All sequences have the length of the cache, since torch has no kernel for other lengths."""
    heads, kv, size = model.heads, model.kv_heads, model.head_dim
    numbers = {"model": model.name, "B": batch, "length": length}
    of = Kernels(sizes, f"{model.name} {batch} x {length}", batch, numbers, compiles=False, checked_rows=min(batch, 2))
    shapes = {"q": (-1, heads, size), "k": (-1, kv, length, size), "v": (-1, kv, length, size)}

    def make(rows: int, seed: int) -> Inputs:
        lengths = torch.full((rows,), length, dtype=torch.int32, device=sizes.device)
        return of.inputs(shapes, rows, seed) | {"lengths": lengths}

    def eager(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q.unsqueeze(2), k, v, enable_gqa=True).squeeze(2)

    return of.case(
        "decode attention", priority, shapes, lambda inputs: lambda: (decode_attention(**inputs),), eager, make=make,
        anywhere=True, flops=4.0 * batch * heads * length * size,
    )  # fmt: skip
