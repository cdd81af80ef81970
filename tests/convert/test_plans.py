"""Plans of chains: bytes and memory options, for this machine and others."""

from __future__ import annotations

import re
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import seqfuse as sf
from seqfuse.convert.region import CapturedRegion
from seqfuse.convert.rewrite import RewriteOptions
from seqfuse.pictures.text import sized
from seqfuse.plan.schedule import Choice
from seqfuse.testing import seeded_randn

from ..watching import bytes_of, saving
from .comparing import Replayed


class Heads(nn.Module):
    """Attention with a mask, which is an input of the chain, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(16) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(16, size, bias=False) for size in (16, 16, 16))
        self.out, self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.norms[0](x)
        q, k, v = (part(h).unflatten(-1, (-1, 4)).transpose(1, 2) for part in self.qkv)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def converted(memory: Choice) -> tuple[Replayed, CapturedRegion]:
    inputs = {"x": seeded_randn((2, 8, 16), 0).requires_grad_(), "mask": seeded_randn((8, 8), 1)}
    replayed = Replayed(Heads(), inputs, options=RewriteOptions(memory=memory))
    replayed(**inputs).sum().backward()
    ((region,),) = (graph.regions for graph in replayed.graphs)
    return replayed, region


def test_a_chain_has_no_plan_before_its_first_call():
    replayed = Replayed(Heads(), {"x": torch.randn(2, 8, 16), "mask": torch.randn(8, 8)})
    assert [region.plan for graph in replayed.graphs for region in graph.regions] == [None]


def test_the_plan_of_a_chain_says_bytes_and_what_other_choices_save():
    replayed, region = converted("lean")
    plan = region.plan
    assert plan is not None
    assert plan.memory is not None
    assert plan is region.plan, "counted once"
    choices = {choice.memory: choice for choice in plan.choices}
    assert [name for name, choice in choices.items() if choice.used] == ["lean"]
    assert plan.memory.saved == choices["lean"].saved < choices["fast"].saved == plan.memory.saved_unfused
    graph = replayed.graphs[0]
    (said,) = re.findall(r"  (memory= (?:.*\n)*)  outside", "\n".join(graph.body()))
    for name, choice in choices.items():
        time = f" {choice.microseconds:+,.0f} us" if choice.microseconds else ""
        held = f"{sized(choice.saved)} {sized(choice.peak)}"
        assert f"{name} {held}{time}{' (used)' * choice.used}" in re.sub(r"\s+", " ", said)


def test_the_plan_of_a_chain_is_that_of_its_latest_call():
    replayed, region = converted("fast")
    assert region.plan is not None
    assert region.plan.fused != (0, 0)
    with sf.fusing(False):
        replayed(x=seeded_randn((2, 8, 16), 2), mask=seeded_randn((8, 8), 3))
    assert region.plan.fused == (0, 0)


class Crossed(nn.Module):
    """Queries of one input, keys and values of another."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.out = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, k = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (self.q(x), self.k(memory)))
        return self.out(F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2))


def test_cross_attention_under_autocast_is_reported():
    model = Crossed()
    conversion = sf.convert(model)
    with torch.autocast("cpu", torch.bfloat16):
        model(seeded_randn((2, 4, 16), 0), seeded_randn((2, 6, 16), 1)).sum().backward()
    assert "CrossAttention" in (said := str(conversion))
    assert "saved for backward" in said


@pytest.mark.filterwarnings("ignore:memory=")
@pytest.mark.parametrize("part", [1.0, 0.7])
def test_a_chain_keeps_to_a_part_of_what_it_saves_unfused(part: float):
    whole, least, budget = (converted(memory)[1].plan for memory in ("fast", "least", sf.Budget(part=part)))
    assert whole is not None
    assert least is not None
    assert budget is not None
    assert whole.memory is not None
    assert least.memory is not None
    assert budget.memory is not None
    assert whole.memory.peak > least.memory.peak
    assert budget.memory.peak <= max(part * budget.memory.saved_unfused, least.memory.peak)
    assert budget.recomputed
    assert [choice.memory for choice in budget.choices if choice.used] == [f"Budget(part={part:g})"]


def test_the_report_and_a_warning_name_the_modules_of_each_chain_that_a_budget_does_not_fit():
    class Cut(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.cumsum(0)

    deep = nn.Sequential(*(m for _ in range(6) for m in (nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU())))
    model = nn.Sequential(deep, Cut(), nn.Sequential(nn.Linear(16, 16), nn.GELU()))
    conversion = sf.convert(model, memory=sf.Budget(part=0.1))
    with pytest.warns(UserWarning, match=r"memory=Budget\(part=0.1\) for") as caught:
        model(seeded_randn((6, 16), 0)).sum().backward()
    warned = [re.search(r"for (.*): does not fit", str(w.message)) for w in caught if w.category is UserWarning]
    assert [found and found[1] for found in warned] == [
        "a chain of 18 operations in 0.0 to 0.17", "a chain of 2 operations in 2.0 to 2.1"
    ]  # fmt: skip
    assert all(f"chain of {n} operations: " in str(conversion) for n in (18, 2))
    said = re.findall(r"    memory=Budget\(part=0.1\) in (.*): does not fit: .*; (.*)", str(conversion))
    assert [modules for modules, _ in said] == ["0.0, 0.1, 0.2 and 15 more", "2.0, 2.1"]
    assert [hint.startswith("no part fits so few operations") for _, hint in said] == [False, True]


def test_the_gradients_of_a_model_with_a_budget_are_its_own():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    x = seeded_randn((6, 16), 0)
    model(x).square().sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    conversion = sf.convert(model, memory=sf.Budget(part=0.7))
    model(x).square().sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)
    assert "Budget(part=0.7)" in str(conversion)


def test_the_plan_of_a_chain_for_another_machine_is_of_its_own_inputs():
    _, region = converted("lean")
    full, half = (region.plan_for("cuda:sm_90", dtype=dtype) for dtype in (None, torch.bfloat16))
    assert region.plan is not None
    assert region.plan.memory is not None
    assert full.memory == region.plan.memory
    assert half.memory is not None
    assert half.memory.saved < 0.6 * region.plan.memory.saved
    assert {plan.count("RecomputeHeads") for plan in (full, half)} == {1}
    assert str(half).startswith("Plan for cuda:sm_90 bfloat16, 16 tokens")
    assert "lean" in str(half).rpartition("memory= ")[2]
    assert region.plan_for("cuda:sm_90", grad=False).backward == ()
    with pytest.raises(sf.InputError, match="there is no device 'gpu'"):
        region.plan_for("gpu")


class Blocks(nn.Module):
    """Residual MLPs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(6))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(6))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(F.gelu(up(norm(x))))
        return x


def test_a_small_chain_is_one_autograd_node_and_a_large_one_several():
    def segments(width: int) -> int:
        x = torch.randn(3, width)
        replayed = Replayed(Blocks(width), {"x": x})
        replayed(x=x).sum().backward()
        ((region,),) = (graph.regions for graph in replayed.graphs)
        assert region.plan is not None
        return len(region.plan.segments)

    assert segments(8) == 1
    assert segments(384) == 6, "one for each block, which has more than four mebibytes of weights"


class Broken(nn.Module):
    """Residual MLPs of two graphs, with a convolution between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(6))
        self.between = nn.Conv1d(16, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == 2:
                torch._dynamo.graph_break()
                x = self.between(x.mT).mT
        return x


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("regions", ["model", "layers"])
def test_chains_of_several_graphs_run_again_with_lent_parameters(
    regions: Literal["model", "layers"],
):
    torch.manual_seed(0)
    model, x = Broken(), seeded_randn((2, 7, 16), 0)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        first, second = model(leaf), model(2 * leaf)  # both are alive when the first backward runs
        first.square().sum().backward()
        second.sum().backward()
        return [leaf.grad, *[p.grad.clone() for p in model.parameters()]]  # pyright: ignore

    expected = gradients()
    conversion = sf.convert(model, memory="least", regions=regions)
    for _ in range(3):
        torch.testing.assert_close(gradients(), expected, rtol=1e-4, atol=1e-4)
    plans = [region.plan for graph in conversion.graphs for region in graph.regions]
    assert len(plans) >= 2 if regions == "model" else plans
    assert all(plan is not None and plan.recomputed for plan in plans)


class Positions(nn.Module):
    """Tokens of a batch, each sequence with the same positions added."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", seeded_randn((8, 16), 3))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions
        for norm, part in zip(self.norms, self.parts, strict=True):
            x = x + part(norm(x))
        return x


def test_what_repeats_is_saved_once_where_a_segment_runs_again():
    inputs = {"x": seeded_randn((6, 8, 16), 0).requires_grad_()}
    replayed = Replayed(Positions(), inputs, options=RewriteOptions(memory="least"))
    replayed(**inputs).sum().backward()
    ((region,),) = (graph.regions for graph in replayed.graphs)
    plan = region.plan
    assert plan is not None
    assert plan.memory is not None
    assert plan.recomputed
    with saving() as kept:
        replayed(**inputs)
    assert bytes_of(kept, replayed) == plan.memory.saved
