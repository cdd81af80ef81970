"""Models drawn at random give the same converted: outputs, every gradient, None where torch has None, and buffers.

Each test draws some seeds; `python -m tests.convert.test_drawn 0 1000` draws many; `recorded` behind it leaves Dynamo
out, `autocast` runs in bfloat16.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import seqfuse as sf
from seqfuse.convert import Conversion, GraphReport
from seqfuse.convert.rewrite import RewriteOptions, rewrite
from tests.convert.comparing import given, recorded
from tests.convert.drawing import Drawn, Model, drawn

Place = tuple[str, Any]


@dataclasses.dataclass(frozen=True)
class Use:
    """How a model is used: the fraction of frozen parameters, how gradients are requested, the last call."""

    frozen: float
    needs_x: bool
    backward: str
    then: str

    @staticmethod
    def of(seed: int) -> Use:
        r = random.Random(f"use {seed}")
        frozen = r.random() if r.random() < 0.3 else 0.0
        backward = r.choice(["backward", "backward", "backward", "grad", "some", "twice", "changed", "first"])
        then = r.choice(["again", "again", "no_grad", "shape", "eval", "freeze", "inference"])
        return Use(frozen, r.random() < 0.8, backward, then)


def model_of(draw: Drawn, use: Use, seed: int) -> Model:
    model = Model(draw.source, seed)
    r = random.Random(seed)
    for p in model.parameters():
        p.requires_grad_(p.requires_grad and r.random() >= use.frozen)
    return model


def passes(model: Model, x: Tensor, use: Use, seed: int, gm: GraphModule | None = None) -> list[Place]:
    """Results of a call: outputs, their strides, gradients, buffers and attributes."""
    x = x.clone().requires_grad_(use.needs_x and not torch.is_inference_mode_enabled())
    model.zero_grad()
    outputs: tuple[Tensor, ...] = model(x) if gm is None else gm(*given(model, x).values())
    found: list[Place] = []
    for i, y in enumerate(outputs):
        found += [(f"output {i}", y.detach().clone()), (f"output {i} is contiguous", y.is_contiguous())]
        found += [(f"output {i} requires a gradient", y.requires_grad), (f"output {i} is an input", y is x)]
    able = [y for y in outputs if y.requires_grad]
    if use.backward == "changed" and able:
        able = [y * 1 if y.is_leaf else y.mul_(1.5) for y in able]
    if use.backward == "first":
        able = able[:1]
    g = torch.Generator().manual_seed(seed)
    loss = sum((y * torch.randn(y.shape, generator=g, dtype=torch.float64).to(y.dtype)).sum() for y in able)
    if len(able) > 1 and use.backward == "backward":
        grads = torch.autograd.grad(able[-1].sum(), able[:-1], allow_unused=True, retain_graph=True)
        found += [(f"d output {i}", d) for i, d in enumerate(grads)]
    inputs = [(n, p) for n, p in [("x", x), *model.named_parameters()] if p.requires_grad]
    if use.backward == "some":
        inputs = [pair for pair in inputs if g.initial_seed() and torch.rand((), generator=g) < 0.4]
    if able and inputs:
        assert isinstance(loss, Tensor)
        if use.backward == "grad":
            grads = torch.autograd.grad(loss, [p for _, p in inputs], allow_unused=True)
            return found + [(f"d {n}", d) for (n, _), d in zip(inputs, grads, strict=True)] + states(model)
        if use.backward == "twice":
            loss.backward(retain_graph=True)
        loss.backward(inputs=[p for _, p in inputs] if use.backward == "some" else None)
    found += [(f"d {n}", None if p.grad is None else p.grad.clone()) for n, p in [("x", x), *model.named_parameters()]]
    return found + states(model)


def states(model: Model) -> list[Place]:
    return [(n, b.detach().clone()) for n, b in model.named_buffers()] + [
        (n, t.detach().clone() if isinstance(t, Tensor) else t) for n in ("last", "seen") for t in [getattr(model, n)]
    ]


def differs(found: list[Place], wanted: list[Place], bound: float) -> str | None:
    """The first difference."""
    for (name, got), (_, want) in zip(found, wanted, strict=True):
        if not isinstance(got, Tensor) or not isinstance(want, Tensor):
            if got is not want and not (got is True and name.endswith("is contiguous")):
                return f"{name}: {kind(got)}, not {kind(want)}"
            continue
        if got.dtype is not want.dtype or got.shape != want.shape:
            return f"{name}: {got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}"
        scale = float(want.abs().nan_to_num(0, 0, 0).max()) if want.numel() else 0.0
        if not torch.allclose(got, want, rtol=bound, atol=bound * max(1.0, scale), equal_nan=True):
            return f"{name}: off by {float((got - want).abs().max()):.1e} of {scale:.1e}"
    return None


def kind(value: Any) -> str:
    return f"a tensor of {'zeros' if not value.any() else 'numbers'}" if isinstance(value, Tensor) else repr(value)


def calls(use: Use) -> list[Callable[[Model, int], list[Place]]]:
    """The calls of a model, in order."""

    def ran(model: Model, seed: int, shape: tuple[int, ...] = (2, 4, 8), context: Any = nullcontext) -> list[Place]:
        x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        with context():
            return passes(model, x, use, seed)

    def evaluated(model: Model, seed: int) -> list[Place]:
        return ran(model.eval(), seed)

    def freed(model: Model, seed: int) -> list[Place]:
        for p in list(model.parameters())[::3]:
            p.requires_grad_(not p.requires_grad)
        return ran(model, seed)

    last: dict[str, Callable[[Model, int], list[Place]]] = {
        "again": ran,
        "no_grad": lambda m, s: ran(m, s, context=torch.no_grad),
        "inference": lambda m, s: ran(m, s, context=torch.inference_mode),
        "shape": lambda m, s: ran(m, s, (3, 5, 8)),
        "eval": evaluated,
        "freeze": freed,
    }
    return [ran, ran, last[use.then]]


def loud(error: Exception, use: Use) -> bool:
    """Whether an in-place change of an output is an error: torch happened to copy it, and a chain saved it."""
    return use.backward == "changed" and "modified by an inplace operation" in str(error)


def disagreement(draw: Drawn, use: Use, seed: int) -> tuple[str | None, Conversion | None]:
    """Where a converted model and the original differ, if they do; `None` as conversion if torch refuses the model."""
    torch._dynamo.reset()
    if "use_reentrant=True" in draw.source and use.backward in {"grad", "some"}:
        return None, None  # torch refuses some of these: it depends on the gradients that a checkpoint's input needs
    plain, model = (model_of(draw, use, seed) for _ in range(2))
    conversion = sf.convert(model)
    for i, call in enumerate(calls(use)):
        try:
            wanted = call(plain, seed + i)
        except Exception:
            return None, None if i == 0 else conversion
        try:
            found = call(model, seed + i)
        except Exception as error:
            if loud(error, use):
                return None, conversion
            return f"call {i}: {type(error).__name__}: {str(error)[:300]}", conversion
        if (where := differs(found, wanted, 1e-8 if draw.exact else 1e-3)) is not None:
            return f"call {i}: {where}", conversion
    odd = [left.reason for graph in conversion.graphs for left in graph.left if "Error" in left.reason]
    return (f"a reason is an error: {odd[0][:300]}" if odd else None), conversion


NOT_RECORDED = ("vmap", "Cube", "inference_mode", "graph_break", "use_reentrant=True", "m.last", "m.seen")


def disagreement_recorded(draw: Drawn, use: Use, seed: int) -> tuple[str | None, list[GraphReport] | None]:
    """The same for a graph that was recorded instead of captured, which has one shape and one branch."""
    if any(word in draw.source for word in NOT_RECORDED):
        return None, None
    plain, model = (model_of(draw, use, seed) for _ in range(2))
    x = torch.randn((2, 4, 8), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    try:
        wanted = passes(plain, x, use, seed)
        gm, _ = recorded(model_of(draw, use, seed), x.clone().requires_grad_(use.needs_x), seed % 2 == 0)
    except Exception:
        return None, None
    reports = rewrite(gm, RewriteOptions())
    for i in range(2):
        try:
            found = passes(model, x, use, seed, gm)
        except Exception as error:
            if loud(error, use):
                return None, reports
            return f"call {i}: {type(error).__name__}: {str(error)[:300]}", reports
        if (where := differs(found, wanted, 1e-8 if draw.exact else 1e-3)) is not None:
            return f"call {i}: {where}", reports
        wanted = passes(plain, x, use, seed)
    odd = [left.reason for graph in reports for left in graph.left if "Error" in left.reason]
    return (f"a reason is an error: {odd[0][:300]}" if odd else None), reports


def disagreement_under_autocast(draw: Drawn, use: Use, seed: int) -> tuple[str | None, list[GraphReport] | None]:
    """The same in bfloat16: as close to float64 as torch's autocast."""
    if any(word in draw.source for word in (*NOT_RECORDED, "round", "floor", "single", "double", "float64")):
        return None, None
    use = dataclasses.replace(use, backward="backward" if use.backward in ("changed", "twice") else use.backward)
    exact = model_of(draw, use, seed)
    plain, model, seen = (model_of(draw, use, seed).float() for _ in range(3))
    x = torch.randn((2, 4, 8), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    low = x.float()
    try:
        truth = passes(exact, x, use, seed)
        with torch.autocast("cpu", torch.bfloat16):
            wanted = passes(plain, low, use, seed)
            gm, _ = recorded(seen, low.clone().requires_grad_(use.needs_x), seed % 2 == 0)
    except Exception:
        return None, None
    with torch.autocast("cpu", torch.bfloat16):
        reports = rewrite(gm, RewriteOptions())
        try:
            found = passes(model, low, use, seed, gm)
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:300]}", reports
    return farther(found, wanted, truth), reports


def farther(found: list[Place], wanted: list[Place], truth: list[Place]) -> str | None:
    """The first tensor of another kind, or whose error exceeds the other's by more than chance."""
    whole = max((float(t.norm()) for name, t in truth if isinstance(t, Tensor) and name.startswith("d ")), default=0.0)
    for (name, got), (_, want), (_, exact) in zip(found, wanted, truth, strict=True):
        if not isinstance(got, Tensor) or not isinstance(want, Tensor) or not isinstance(exact, Tensor):
            if got is not want and not name.endswith("is contiguous"):
                return f"{name}: {kind(got)}, not {kind(want)}"
            continue
        if got.dtype is not want.dtype:
            return f"{name}: {got.dtype}, not {want.dtype}"
        exact = exact.double()
        error, allowed = (float((t.double() - exact).nan_to_num().norm()) for t in (got, want))
        if error > 2 * allowed + 1e-2 * float(exact.nan_to_num().norm()) + 1e-3 * whole:
            exact = exact.nan_to_num()
            return f"{name}: off by {error:.1e}, torch's autocast by {allowed:.1e}, of {float(exact.norm()):.1e}"
    return None


def simpler(draw: Drawn, use: Use, seed: int, disagree: Disagree) -> tuple[Drawn, Use]:
    """A smaller model that still differs: fewer steps and outputs, simpler use."""

    def still(d: Drawn, u: Use) -> bool:
        return disagree(d, u, seed)[0] is not None

    for changed in (
        dataclasses.replace(use, then="again"),
        dataclasses.replace(use, then="again", backward="backward"),
        dataclasses.replace(use, then="again", backward="backward", frozen=0.0),
    ):
        if still(draw, changed):
            use = changed
    for i in reversed(range(len(draw.outputs))):
        fewer = dataclasses.replace(draw, outputs=draw.outputs[:i] + draw.outputs[i + 1 :])
        if len(draw.outputs) > 1 and still(fewer, use):
            draw = fewer
    for i in reversed(range(len(draw.steps))):
        passed = [f"v{i + 1} = {draw.sources[i]}"]
        fewer = dataclasses.replace(draw, steps=[*draw.steps[:i], passed, *draw.steps[i + 1 :]])
        if still(fewer, use):
            draw = fewer
    return draw, use


Disagree = Callable[[Drawn, Use, int], tuple[str | None, Any]]
HOW: dict[str, Disagree] = {
    "captured": disagreement,
    "recorded": disagreement_recorded,
    "autocast": disagreement_under_autocast,
}


SHARE = {"recorded": range(40), "autocast": range(20), "captured": range(3)}
MANY = {"recorded": range(40, 2040), "autocast": range(20, 520), "captured": range(3, 203)}
BLOCKS = [(how, seeds[i : i + 50]) for how, seeds in MANY.items() for i in range(0, len(seeds), 50)]


def assert_same(how: str, seeds: range) -> None:
    for seed in seeds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of drawn models
            where, _ = HOW[how](drawn(seed), Use.of(seed), seed)
        assert where is None, f"seed {seed}: {where}\n{drawn(seed).source}"


@pytest.mark.parametrize("how", SHARE)
def test_drawn_models_are_the_same_converted(how: str):
    assert_same(how, SHARE[how])


@pytest.mark.full
@pytest.mark.parametrize(("how", "seeds"), BLOCKS, ids=str)
def test_many_drawn_models_are_the_same_converted(how: str, seeds: range):
    assert_same(how, seeds)


def main(first: int, last: int, how: str = "captured") -> None:
    warnings.simplefilter("ignore")
    torch._logging.set_logs(dynamo=logging.ERROR)
    disagree = HOW[how]
    counted, begin = Counter[str](), time.monotonic()
    for seed in range(first, last):
        draw, use = drawn(seed), Use.of(seed)
        where, made = disagree(draw, use, seed)
        graphs = [] if made is None else made.graphs if isinstance(made, Conversion) else made
        counted["drawn"] += 1
        counted["refused by torch"] += made is None
        counted["chains"] += sum(len(graph.regions) for graph in graphs)
        if where is not None:
            counted["wrong"] += 1
            print(f"seed {seed}: {where}", flush=True)
            draw, use = simpler(draw, use, seed, disagree)
            where = disagree(draw, use, seed)[0]
            print(f"--- seed {seed}: {where}\n{use}\n{draw.source}", flush=True)
        if counted["drawn"] % 100 == 0:
            print(f"... {dict(counted)}, {time.monotonic() - begin:.0f} s", flush=True)
    print(f"{dict(counted)}, {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
