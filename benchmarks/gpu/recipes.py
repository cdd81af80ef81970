"""A Linear and feed-forward blocks in bfloat16 and under each recipe, forward and backward, beside what users write.

That are modules with torch's 8-bit GEMM under current scaling, eager and compiled; of a Linear also the GEMMs alone, of
operands that are there already, which no recipe can be faster than. A recipe without kernels here is left out.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops, recipes

from .blocks import Make, flops, mains, models_of, passes, shared, trained
from .case import Case, Contender, Inputs, Run, normal
from .peers import compiled
from .sizes import Model, Sizes

GROUP = "recipes: forward + backward"
RECIPES: dict[str, recipes.Recipe] = {
    "current": recipes.Float8CurrentScaling(),
    "delayed": recipes.Float8DelayedScaling(history=16),
    "row": recipes.Float8RowScaling(),
    "block": recipes.Float8BlockScaling(),
    "MX": recipes.MXFP8(),
}
FAR = 0.2  # of bfloat16, relative: what 8 bits may be, twice over
TINY = (Model(32, 64, 2, 2, 16, False, name="gpt"), Model(32, 48, 2, 2, 16, True, name="llama"))


def cases(sizes: Sizes) -> Iterator[Case]:
    """Of the main models, in bfloat16 alone."""
    made: dict[str, Any] = {"device": sizes.device, "dtype": sizes.dtype}
    rows = max(32, sizes.tokens[0])
    for model in reversed(mains(sizes) or TINY) if sizes.dtype is torch.bfloat16 else ():
        H, F = model.H, model.F
        plainly = functools.cache(lambda H=H, F=F: nn.Sequential(nn.Linear(H, F, False, **made)))
        linear = functools.partial(lambda H, F, of: shared(sf.Sequential(ops.Linear(H, F, False, **made)), of()), H, F)
        case = _case(sizes, f"Linear {rows} x {H} -> {F}", model, rows, plainly, functools.partial(linear, plainly), F)
        alone = {f"GEMMs alone{', fast' * fast}": _gemms(model, sizes, rows, fast) for fast in (False, True)}
        yield dataclasses.replace(case, contenders={**case.contenders, **alone}, flops=6.0 * rows * H * F)
        of, work = models_of("feedforward", model, sizes), 3 * flops("feedforward", model, rows, 1)
        ours, name = functools.partial(of.choosing, "fast"), f"{model.name} feed-forward block, {rows}"
        yield dataclasses.replace(_case(sizes, name, model, rows, of.torch, ours, H), flops=work)


def _case(sizes: Sizes, name: str, model: Model, rows: int, plainly: Make, ours: Make, width: int) -> Case:
    """A module as it is in torch and in ours, on the same weights."""

    def make(rows: int, seed: int) -> Inputs:
        return normal({"x": (rows, model.H), "dy": (rows, width)}, seed, sizes.device, sizes.dtype)

    def under(recipe: recipes.Recipe) -> Any:
        made = sf.Sequential(ours(), recipe=recipe)
        if recipe.keeps_state:  # of which the first step has scales of 1
            trained(lambda: made).prepare(make(rows, 1))()
            sf.update_scales(made)
        return made

    models: dict[str, Make | None] = {"seqfuse": ours, "eager": plainly, "by hand": lambda: by_hand(plainly())}
    if sizes.compile_modes:
        models |= {"compile": lambda: compiled(plainly()), "by hand, compiled": lambda: compiled(by_hand(plainly()))}
    models |= {key: functools.partial(under, recipe) for key, recipe in RECIPES.items()}
    case = passes(
        GROUP, name, sizes, model, rows, models, lambda: copy.deepcopy(ours()).double(), make=make, priority=9
    )
    exact = "seqfuse", "eager", "compile"
    near = {n: c if n in exact else dataclasses.replace(c, near=FAR) for n, c in case.contenders.items()}
    return dataclasses.replace(case, contenders=near)


def _gemms(model: Model, sizes: Sizes, rows: int, fast: bool) -> Contender:
    """The three GEMMs of a Linear, of quantized tensors along rows and columns."""

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
    """A Linear of 8-bit GEMMs under current scaling, as one writes it with torch alone."""

    def forward(self, input: Tensor) -> Tensor:
        y: Any = _ByHand.apply(input.reshape(-1, self.in_features), self.weight)
        y = y if self.bias is None else y + self.bias
        return y.view(*input.shape[:-1], self.out_features)


def by_hand(model: nn.Module) -> nn.Module:
    """A copy of a model on its weights, each Linear of which is by hand."""
    made = copy.deepcopy(model, {id(p): p for p in model.parameters()})
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
