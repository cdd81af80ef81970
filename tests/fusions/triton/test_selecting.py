"""Where an activation is off its gradient is 0 whatever dy is, Inf and NaN included, in every template kernel."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import fusions, ops
from seqfuse.testing import seeded_randn
from seqfuse.testing.cases import Bench
from tests.judging import judge_together

Fusions = tuple[type[sf.FusedOperation], ...]
LISTS: dict[str, tuple[Sequence[sf.FusableOperation], Fusions, Fusions]] = {
    "bias": ((ops.Bias(12), ops.ReLU()), (fusions.PointwiseChain,), (fusions.PointwiseChainBackward,)),
    "gated": ((ops.Bias(12), ops.ReGLU()), (fusions.BiasGated,), (fusions.BiasGatedBackward,)),
    "product": (
        (ops.Bias(12), ops.SquaredReLU(), ops.Linear(12, 6)),
        (fusions.ActivationLinearJoint,),
        (fusions.ActivationLinearJoint,),
    ),
    "gated product": (
        (ops.Bias(12), ops.ReGLU(), ops.Linear(6, 6)),
        (fusions.ActivationLinearJoint,),
        (fusions.ActivationLinearJoint,),
    ),
    "norm": ((ops.LayerNorm(12), ops.ReLU()), (fusions.NormActivationJoint,), (fusions.NormActivationJoint,)),
    "boundary": (
        (ops.Add("other"), ops.LayerNorm(12), ops.SquaredReLU()),
        (fusions.BlockBoundaryActivation,),
        (fusions.BlockBoundaryActivation,),
    ),
    "run": (
        (ops.Tanh(), ops.Scale(2.0), ops.ReLU(), ops.GeLU(), ops.SquaredReLU()),
        (fusions.PointwiseChain,),
        (fusions.PointwiseChainBackward,),
    ),
    "joint run": (
        (ops.Tanh(), ops.Scale(2.0), ops.ReLU(), ops.GeLU(), ops.SquaredReLU()),
        (fusions.PointwiseChainJoint,),
        (fusions.PointwiseChainJoint,),
    ),
}


def gradients(root: sf.Sequential, given: Fusions | None, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """y and all gradients with the given fusions, or in float64 by the references."""
    wide = given is None
    root = copy.deepcopy(root).double() if wide else root
    bench = Bench(root, given or ())
    inputs = {"x": x, "other": seeded_randn((7, 12), 5).to(x.device)} if type(root[0]) is ops.Add else {"x": x}
    inputs = {name: t.to(torch.float64 if wide else t.dtype, copy=True).requires_grad_() for name, t in inputs.items()}
    with sf.fusing(on_error="raise"):
        used = [bench.plan(**inputs).count(fusion.__name__) for fusion in given or ()]
        y = bench.references(**inputs) if wide else bench(**inputs)
    assert all(used)
    wanted = {**inputs, **dict(root.named_parameters())}
    # Where the last activation is off; a row where a GEMM comes last.
    off = (y == 0) if (y == 0).any() else (torch.arange(7, device=x.device) < 1).unsqueeze(-1).expand(y.shape)
    dy = dy[:, : y.shape[-1]].to(y.dtype)
    dy = torch.where(off, torch.where(dy > 0.8, math.nan, dy / 0), dy)
    if type(root[0]) is ops.Tanh:
        dy[0, 0] = math.inf  # where its slope is a 0 that is multiplied by dy
    grads = torch.autograd.grad(y, list(wanted.values()), dy)
    return {"y": y.detach(), **{f"d {name}": g for name, g in zip(wanted, grads, strict=True)}}


@pytest.mark.parametrize("name", LISTS)
def test_what_is_off_has_no_gradient(name: str, device: torch.device):
    operations, forward, backward = LISTS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        root = sf.Sequential(*copy.deepcopy(list(operations)), fusions=()).to(device)
        for p in root.parameters():
            p.data.add_(0.3 * torch.randn(p.shape).to(device))
    dy = seeded_randn((7, 12), 1).to(device)

    def measure(used: tuple[type[sf.FusedOperation], ...], seed: int) -> tuple[dict[str, Tensor], ...]:
        x = seeded_randn((7, 12), seed).to(device)
        if isinstance(operations[0], ops.Tanh):
            x[0, 0] = 50.0
        own, exact = gradients(root, (), x, dy), gradients(root, None, x, dy)
        for key, r in exact.items():
            assert torch.equal(own[key].isfinite(), r.isfinite()), key
        return gradients(root, used, x, dy), own, exact

    for used in {forward, backward, forward + backward}:
        judge_together(functools.partial(measure, tuple(dict.fromkeys(used))), 0)
