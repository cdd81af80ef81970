"""Values of `memory=`: the same gradients, and as many bytes as planned, by torch's count of them."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import plain
import pytest
import torch
from gpu.case import counted
from torch import Tensor

import seqfuse as sf
from seqfuse.run import fuser as running
from seqfuse.testing import assert_bitwise_equal, seeded_randn
from seqfuse.testing.judge import judge

from .steps import step

HERE = torch.cuda.is_available()
GPU = pytest.mark.gpu
WIDTH, HEADS, LAYERS = (512, 8, 4) if HERE else (16, 2, 2)
ROWS = (2, 512) if HERE else (1, 8)
MANY = (32, 1024)  # enough tokens that parameters and workspaces of cuBLAS are small in comparison
CHOICES: dict[str, Any] = {
    "fast": "fast", "balanced": "balanced", "lean": "lean", "half": sf.Budget(part=0.5), "bytes": 0, "least": "least",
}  # fmt: skip

# Planning for a budget takes seconds; without a GPU a model has one layer and one budget, and the other under --full.
CASES = [
    pytest.param(llama, choice, marks=[pytest.mark.full] * (not HERE and choice == other), id=f"{kind} {choice}")
    for llama, kind, other in ((False, "gpt", "bytes"), (True, "llama", "half"))
    for choice in CHOICES
]


def model(llama: bool, device: torch.device, dtype: torch.dtype, layers: int = 2 if HERE else 1) -> sf.Sequential:
    spec = plain.Spec(WIDTH, 4 * WIDTH, HEADS, HEADS // 2 if llama else HEADS, WIDTH // HEADS, llama, 0.1)
    torch.manual_seed(0)
    made = plain.fused("stack", spec, layers).to(device, dtype)
    for i, p in enumerate(made.parameters()):
        if p.ndim == 1:
            p.data.add_(0.3 * seeded_randn(tuple(p.shape), i).to(p))
    return made


def inputs(device: torch.device, dtype: torch.dtype, seed: int = 1, rows: tuple[int, int] = ROWS) -> list[Tensor]:
    return [seeded_randn((*rows, WIDTH), n, dtype=dtype).to(device) for n in (seed, seed + 1)]


def passes(run: Any, x: Tensor, dy: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    return step(run, run.parameters(), x, dy)


def choose(own: sf.Sequential, choice: str, x: Tensor) -> None:
    """Bytes between the peaks of the fastest plan and of the leanest one."""
    own.memory = CHOICES[choice]
    if choice == "bytes":
        own.memory = "fast"
        plan = own.plan(x.detach().requires_grad_())
        peaks = [one.peak for one in plan.choices if one.memory in ("fast", "least")]
        own.memory = sum(peaks) // 2


def bytes_of(plan: sf.Plan) -> tuple[int, int]:
    """The plan's saved bytes and peak."""
    assert plan.memory is not None
    assert plan.memory.peak is not None
    return plan.memory.saved, plan.memory.peak


@pytest.mark.filterwarnings("ignore:memory=")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("llama", "choice"), CASES)
def test_gradients_are_those_of_unfused_operations(
    llama: bool, choice: str, dtype: torch.dtype, device: torch.device
) -> None:
    own = model(llama, device, dtype)
    exact = copy.deepcopy(own).double()
    choose(own, choice, inputs(device, dtype)[0])

    def measure(seed: int) -> tuple[Any, Any, Any]:
        x, dy = inputs(device, dtype, seed)
        found = passes(own, x, dy)
        with sf.fusing(False):
            return found, passes(own, x, dy), passes(exact, x.double(), dy.double())

    judge(measure, 1)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("choice", ["fast", "lean"])
@pytest.mark.parametrize("llama", [False, True], ids=["gpt", "llama"])
def test_what_runs_again_has_the_same_bits(
    llama: bool, choice: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients have the bits of the same fusions without recomputation, dropout's masks among them."""
    x, dy = inputs(device, torch.bfloat16)
    own = model(llama, device, torch.bfloat16)
    own.memory = choice
    wanted = passes(own, x, dy)
    planned, ran = running.plan_region, list[Any]()

    def plan(*given: Any, **named: Any) -> sf.Plan:
        made = planned(*given, **named)
        ran.append(dataclasses.replace(made, recomputed=tuple((span, ()) for span in made.segments)))
        return ran[-1]

    monkeypatch.setattr(running, "plan_region", plan)
    again = copy.deepcopy(own)
    assert_bitwise_equal(passes(again, x, dy), wanted)
    assert any(made.recomputed for made in ran)


@GPU
@pytest.mark.filterwarnings("ignore:memory=")
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("llama", [False, True], ids=["gpt", "llama"])
def test_the_plan_says_what_torch_counts(llama: bool, choice: str, device: torch.device) -> None:
    own = model(llama, device, torch.bfloat16, LAYERS)
    x, dy = inputs(device, torch.bfloat16, rows=MANY)
    choose(own, choice, x)
    saved, peak = bytes_of(own.plan(x.detach().requires_grad_()))
    assert counted(lambda: own(x.detach().requires_grad_()), list(own.parameters())) == pytest.approx(saved, rel=0.01)
    gradients = sum(p.nbytes for p in own.parameters())
    for _ in range(3):  # the first compiles, and allocates workspaces that cuBLAS keeps
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = own(x.detach().clone().requires_grad_())
        y.backward(dy.clone())
        torch.cuda.synchronize()
        measured = torch.cuda.max_memory_allocated() - before - y.nbytes
        own.zero_grad()
        del y
    # Gradients of parameters are there at the end, when little else is, and count in part or not at all.
    said = f"{choice}: {measured:,} measured, {peak:,} said: {measured / peak:.3f}"
    print(said)
    assert 0.95 * peak <= measured <= 1.05 * peak + gradients, said
