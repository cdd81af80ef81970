"""Every fusion that computes a weight's gradient adds it to an existing `main_grad`, unrounded, and declares that."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import fusions, ops
from seqfuse.testing import assert_bitwise_equal, seeded_randn
from tests.judging import judge_together

GELU = (ops.Linear(6, 8), ops.GELU(), ops.Linear(8, 6))
LISTS: dict[str, tuple[sf.FusableOperation, ...]] = {
    "LinearBiasBackward": (ops.LayerNorm(6), ops.Linear(6, 5)),
    "BackwardLinearAdd": (ops.LayerNorm(6), ops.Residual(ops.Linear(6, 6), ops.Tanh())),
    "BackwardMergedLinearAdd": (ops.LayerNorm(6), ops.Residual(ops.MergedLinear(6, (2, 4)), ops.Tanh())),
    "BackwardLinearScale": (ops.LayerNorm(6), ops.Linear(6, 5), ops.Scale(0.3), ops.Linear(5, 6, bias=False)),
    "ActivationLinearJoint": (ops.LayerNorm(6), *GELU),
}
RULES = {fusion.__name__: fusion for fusion in fusions.default}
# Applied where less is to be saved for the backward pass.
MEMORY: Any = {name: "lean" for name in LISTS if RULES[name].saves_memory}


def test_every_fusion_that_makes_a_weights_gradient_is_here():
    # Fusions that inherit their passes, and only require more, are listed by the class that defines them.
    stated = {name: fusion for name, fusion in RULES.items() if "bwd" in vars(fusion)}
    adds = {name for name, fusion in stated.items() if fusion.backward_signature.main_grads}
    makes = {
        name
        for name, fusion in stated.items()
        if fusion.replaces_backward
        and any({ops.Linear, ops.MergedLinear, ops.GroupedLinear} & {*slot.types} for slot in fusion.slots)
    }
    # The first takes several processes, see tests/parallel; the others experts, see test_experts.py here and above.
    of_experts = {
        "GatedGroupedLinearUnpermute", "GatedGroupedLinearUnpermuteBoundary", "GatherGroupedLinear"
    }  # fmt: skip
    assert adds == makes == LISTS.keys() | {"AllReduceLinearBackward"} | of_experts


def run(model: sf.Sequential, x: Tensor, dy: Tensor, only: tuple[Any, ...], times: int = 1) -> dict[str, Tensor]:
    """The buffers after that many backwards, from 1."""
    for p in model.parameters():
        p.main_grad = torch.ones(
            p.shape, dtype=torch.float64 if p.dtype is torch.float64 else torch.float32, device=p.device
        )
    with sf.fusing(only=only, on_error="raise"):
        plan = model.plan(x)
        assert all(plan.count(fusion.__name__) for fusion in only), plan
        for _ in range(times):
            model(x).backward(dy)
    assert all(p.grad is None for p in model.parameters())
    return {name: p.main_grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LISTS)
def test_two_backwards_add_up(name: str, dtype: torch.dtype, device: torch.device):
    model = sf.Sequential(*copy.deepcopy(LISTS[name]), fusions=RULES[name], memory=MEMORY.get(name, "fast")).to(
        device, dtype
    )

    def measure(seed: int) -> tuple[dict[str, Tensor], ...]:
        x = seeded_randn((9, 6), seed, dtype=dtype).to(device)
        dy = seeded_randn(tuple(model(x).shape), seed + 1, dtype=dtype).to(device)
        exact = run(copy.deepcopy(model).double(), x.double(), dy.double(), (), times=2)
        own = run(copy.deepcopy(model), x, dy, (), times=2)
        return run(model, x, dy, (RULES[name],), times=2), own, exact

    if dtype is torch.float32:
        judge_together(measure, 0)
        return
    got, own, exact = measure(0)
    # A weight's gradient is a float32 sum of bfloat16 factors: as good as one rounded to it, and not rounded.
    for key, g in got.items():
        error, unfused = (g - exact[key]).abs().max(), (own[key] - exact[key]).abs().max()
        assert error <= 2 * unfused + 2**-8 * exact[key].abs().max(), key
    weights = [key for key in got if "weight" in key and got[key].ndim == 2]
    assert weights
    assert all(bool((got[key] != got[key].to(dtype)).any()) for key in weights)


@pytest.mark.parametrize("name", ["BackwardMergedLinearAdd", "BackwardLinearScale"])
def test_every_subset_of_weights_has_a_buffer(name: str, device: torch.device):
    model = sf.Sequential(*copy.deepcopy(LISTS[name]), fusions=RULES[name], memory=MEMORY.get(name, "fast")).to(device)
    x = seeded_randn((9, 6), 0).to(device)
    dy = seeded_randn(tuple(model(x).shape), 1).to(device)
    full = run(model, x, dy, (RULES[name],))
    names = [key for key, p in model.named_parameters() if p.ndim == 2]
    for some in itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(len(names))):
        for key, p in model.named_parameters():
            p.main_grad = torch.ones_like(p) if key in some else None
        with sf.fusing(only=(RULES[name],), on_error="raise"):
            model(x).backward(dy)
        for key, p in model.named_parameters():
            if key in some:
                assert p.grad is None
                assert_bitwise_equal(p.main_grad, full[key])
            else:
                assert p.grad is not None
                torch.testing.assert_close(p.grad + 1, full[key])
        model.zero_grad()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_torch_adds_a_product_of_halves_to_float32(dtype: torch.dtype):
    model = sf.Sequential(ops.Linear(64, 48, bias=False), fusions=()).to("cuda", dtype)
    x, dy = (seeded_randn(shape, i, dtype=dtype).cuda() for i, shape in enumerate([(128, 64), (128, 48)]))
    got = run(model, x, dy, ())["0.weight"]
    exact = dy.double().t() @ x.double() + 1
    assert (got - exact).abs().max() < 1e-4 * exact.abs().max()
