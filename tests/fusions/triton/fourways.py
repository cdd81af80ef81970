"""A sequence in training with every choice of fusions, against the same sequence unfused and in float64."""

from __future__ import annotations

import copy
import functools
import itertools

import torch
from torch import Tensor

import seqfuse as sf
from seqfuse.testing import seeded_randn
from seqfuse.testing.tensors import redrawn
from tests.judging import judge_together


def four_ways(
    model: sf.Sequential, x: Tensor, *fusions: type[sf.FusedOperation], at_least: int = 1, **channels: Tensor
) -> None:
    """Each of `fusions` or none of them, together: output and all gradients by the rule.

    `fusions` are those of the list; each must stand `at_least` so often in the plan in which it is allowed.
    """

    def run(model: sf.Sequential, only: tuple[type[sf.FusedOperation], ...], seed: int) -> dict[str, Tensor]:
        kind = next(model.parameters()).dtype
        torch.manual_seed(0)
        drawn = {n: redrawn(t, seed) for n, t in {"x": x, **channels}.items()}
        inputs = {n: t.to(kind, copy=True).requires_grad_() for n, t in drawn.items()}
        with sf.fusing(only=only, on_error="raise"):
            plan = model.plan(**inputs)
            torch.manual_seed(0)
            y = model(**inputs)
        for fusion in only:
            assert plan.count(fusion.__name__) >= at_least, plan
        dy = seeded_randn(tuple(y.shape), 1, dtype=x.dtype).to(y)
        wanted = {**inputs, **dict(model.named_parameters())}
        grads = torch.autograd.grad(y, list(wanted.values()), dy)
        return {"y": y.detach(), **{f"d {name}": g for name, g in zip(wanted, grads, strict=True)}}

    wide = copy.deepcopy(model).double()
    others = functools.cache(lambda seed: (run(model, (), seed), run(wide, (), seed)))
    for count in range(1, len(fusions) + 1):
        for only in itertools.combinations(fusions, count):
            judge_together(lambda seed, only=only: (run(model, only, seed), *others(seed)), 0)
