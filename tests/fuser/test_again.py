"""Segments that are recomputed in the backward pass: the same bits for every use that autograd allows."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

import seqfuse as sf
from seqfuse import ops
from seqfuse.errors import FallbackWarning, StateError
from seqfuse.ops import _attention
from seqfuse.plan.tally import Tally, most_of
from seqfuse.run import fuser as running
from tests.watching import saving

from .fusions import BiasTanhBackward, BiasTanhForward, BiasTanhJoint, Doubles, randomized
from .kit import (
    assert_same,
    attending,
    attending_by_several_weights,
    draw,
    feed_forward,
    gated,
    mlp,
    passes,
    randomize,
)

Passes = Callable[[nn.Module, Tensor], Any]
WIDTH = 12


def gpt() -> sf.Sequential:
    """Two layers with dropout, on an odd number of tokens."""
    torch.manual_seed(0)
    layers = [m for _ in range(2) for m in (attending(WIDTH, 3), feed_forward(WIDTH))]
    return randomize(sf.Sequential(*(ops.Residual(*m, ops.Dropout(0.2)) for m in layers), ops.RMSNorm(WIDTH)))


def llama(layers: int = 2) -> sf.Sequential:
    """Layers of merged and gated GEMMs."""
    inner = [m for _ in range(layers) for m in (attending_by_several_weights(WIDTH, 3, causal=False), gated(WIDTH))]
    return randomize(sf.Sequential(*(ops.Residual(*m) for m in inner)))


MODELS = {"gpt": gpt, "llama": llama}


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """From now on every segment is recomputed, with or without its GEMMs."""
    planned = running.plan_region

    def turn_on(keeps: bool = False) -> None:
        def plan(*given: Any, **named: Any) -> sf.Plan:
            made = planned(*given, **named)
            steps = [s for s in made.forward if s.costly and s.restored is not None] if keeps else []
            spans = [(span, tuple(s.start for s in steps if s.start in span)) for span in made.segments]
            return dataclasses.replace(made, recomputed=tuple(spans))

        monkeypatch.setattr(running, "plan_region", plan)

    return turn_on


def x_of(rows: int = 7, dtype: torch.dtype = torch.float32) -> Tensor:
    return draw(3, rows, WIDTH, seed=3, dtype=torch.float64).to(dtype)


def leaf_of(model: nn.Module, x: Tensor) -> Tensor:
    """A leaf for a call that draws the same dropout masks each time."""
    model.zero_grad()
    torch.manual_seed(5)
    return x.detach().clone().requires_grad_()


def gradients(model: nn.Module, *xs: Tensor) -> list[Tensor]:
    return [t.grad.clone() for t in (*xs, *model.parameters())]  # pyright: ignore


def run(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Output and every gradient of one call."""
    x = leaf_of(model, x)
    y = model(x)
    y.backward(torch.cos(torch.arange(y.numel(), dtype=torch.float64)).view_as(y).to(y.dtype))
    return [y.detach(), *gradients(model, x)]


def with_hook(model: nn.Module, x: Tensor) -> list[Tensor]:
    handles = [p.register_hook(lambda g: 2 * g) for p in model.parameters()]
    found = run(model, x)
    for handle in handles:
        handle.remove()
    return found


def twice(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = leaf_of(model, x)
    y = model(x)
    y.sum().backward(retain_graph=True)
    y.square().sum().backward()
    return gradients(model, x)


def partial(model: nn.Module, x: Tensor) -> list[Tensor]:
    """`torch.autograd.grad` of a few inputs, and `backward(inputs=)`, which leaves all other gradients alone."""
    x = leaf_of(model, x)
    parameters = [*model.parameters()]
    y = model(x)
    some = torch.autograd.grad(y.sum(), [parameters[0], parameters[-1]], retain_graph=True)
    (dx,) = torch.autograd.grad(y.sum(), [x], retain_graph=True)
    y.sum().backward(inputs=[parameters[2]])
    assert parameters[0].grad is None
    return [*some, dx, parameters[2].grad.clone()]  # pyright: ignore


def two_alive(model: nn.Module, x: Tensor) -> list[Tensor]:
    xs = [leaf_of(model, t) for t in (x, 2 * x)]
    for y in [model(x) for x in xs]:  # the first that ran is the first whose backward runs
        y.square().sum().backward()
    return gradients(model, *xs)


def autocast(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = leaf_of(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    y.float().square().sum().backward()
    return [y.detach(), *gradients(model, x)]


def around(model: nn.Module, x: Tensor) -> list[Tensor]:
    return run(_Around(model), x)


class _Around(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.model, x, use_reentrant=False)


def offloaded(model: nn.Module, x: Tensor) -> list[Tensor]:
    with torch.autograd.graph.save_on_cpu():
        return run(model, x)


def main_grad(model: nn.Module, x: Tensor) -> list[Tensor]:
    for p in model.parameters():
        p.main_grad = torch.zeros(p.shape)  # pyright: ignore
    try:
        x = leaf_of(model, x)
        model(x).square().sum().backward()
        assert all(p.grad is None for p in model.parameters())
        return [x.grad, *[p.main_grad for p in model.parameters()]]  # pyright: ignore
    finally:
        for p in model.parameters():
            del p.main_grad


def batched(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = leaf_of(model, x)
    y = model(x)
    several = torch.stack([torch.ones_like(y), y.detach()])
    return [*torch.autograd.grad(y, [x, *model.parameters()], several, is_grads_batched=True)]


def replaced(model: nn.Module, x: Tensor) -> list[Tensor]:
    """A call with other parameters, whose backward runs when the model has its own again."""
    x = leaf_of(model, x)
    others = {name: (1.5 * p).detach().requires_grad_() for name, p in model.named_parameters()}
    y = functional_call(model, others, (x,))
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [*others.values()])]


def copied(model: nn.Module, x: Tensor) -> list[Tensor]:
    run(model, x)
    return run(copy.deepcopy(model), x)


WAYS = (
    run, with_hook, twice, partial, two_alive, autocast, around, offloaded, main_grad, batched, replaced, copied,
)  # fmt: skip


# By default each way meets each model and each choice of saved tensors, in pairs.
@pytest.mark.parametrize(
    ("name", "way", "keeps"),
    [
        pytest.param(
            name, way, keeps, id=f"{name} {way.__name__} {kept}", marks=[pytest.mark.full] * ((i + j + keeps) % 2)
        )
        for i, name in enumerate(MODELS)
        for j, way in enumerate(WAYS)
        for keeps, kept in ((False, "all again"), (True, "GEMMs saved"))
    ],
)
def test_it_gives_the_same_bits(name: str, way: Passes, keeps: bool, again: Any):
    model, x = MODELS[name](), x_of()
    wanted = [way(model, x) for _ in range(2)][1]
    again(keeps)
    model = MODELS[name]()
    for _ in range(3):  # with checks, then without
        found = way(model, x)
        assert len(found) == len(wanted) > 0
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert any(t.abs().max() > 0 for t in found)
    steps = [segment for part in model._fuser.op_list().parts for segment, _ in part.lowering.segments]
    assert all(segment.again is not None for segment in steps)
    assert any(segment.keeps for segment in steps) is keeps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_of_other_dtypes_too(dtype: torch.dtype, again: Any):
    model, x = gpt().to(dtype), x_of(dtype=dtype)
    wanted = run(model, x)
    again(keeps=True)
    assert all(map(torch.equal, run(gpt().to(dtype), x), wanted))


def test_frozen_parameters_and_inputs_without_gradients(again: Any):
    def made() -> sf.Sequential:
        model = gpt()
        for p in [*model.parameters()][::3]:
            p.requires_grad_(False)
        return model

    def trained(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(5)
        y = model(x_of())
        return [y.detach(), *torch.autograd.grad(y.sum(), [p for p in model.parameters() if p.requires_grad])]

    wanted = trained(made())
    again()
    model = made()
    for _ in range(2):
        assert all(map(torch.equal, trained(model), wanted))


@pytest.mark.parametrize("changed", ["input", "parameter"])
def test_a_tensor_changed_in_between_is_an_error_as_torch_raises_it(changed: str, again: Any):
    again()
    model = gpt()
    for _ in range(2):
        x = 1 * x_of().requires_grad_()
        y = model(x)
        with torch.no_grad():
            (x if changed == "input" else model[1][1].weight).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_module_between_may_checkpoint_what_is_in_it(again: Any):
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = sf.Sequential(ops.Linear(WIDTH, WIDTH), ops.Tanh())

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.layer, x, use_reentrant=False)

    wanted = run(sf.Sequential(*gpt(), Inner(), *llama()), x_of())
    again()
    model = sf.Sequential(*gpt(), Inner(), *llama())
    for _ in range(2):
        assert all(map(torch.equal, run(model, x_of()), wanted))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_parametrized_tensor_is_evaluated_once_and_stays_parametrized(name: str, again: Any):
    class Scaled(nn.Module):
        runs = 0

        def forward(self, t: Tensor) -> Tensor:
            Scaled.runs += 1
            return t * (1 + Scaled.runs)

    def found() -> list[Tensor]:
        model, Scaled.runs = gpt(), 0
        register_parametrization(model[1][1], name, Scaled())
        _, second = (run(model, x_of()) for _ in range(2))
        assert name not in model[1][1]._parameters
        return [*second, torch.tensor(Scaled.runs)]

    wanted = found()
    again()
    assert all(map(torch.equal, found(), wanted))


def test_a_second_derivative_is_an_error(again: Any):
    again()
    x = x_of().requires_grad_()
    (dx,) = torch.autograd.grad(gpt()(x).square().sum(), x, create_graph=True)
    with pytest.raises(StateError, match="double backward is not supported"):
        dx.sum().backward()


def test_operations_run_again_as_they_were_configured(again: Any):
    model, x = gpt(), x_of()
    wanted = run(model, x)
    again()
    model = gpt()
    for _ in range(2):
        leaf = leaf_of(model.train(), x)
        y = model(leaf)
        model.eval()
        y.backward(torch.cos(torch.arange(y.numel(), dtype=torch.float64)).view_as(y).to(y.dtype))
        assert torch.equal(leaf.grad, wanted[1])  # pyright: ignore


def routed() -> sf.Sequential:
    """Experts whose choice depends on a buffer."""
    block = [
        ops.Route(WIDTH, 6, 2, "sigmoid", correction=True), ops.Permute(6, 2), ops.GroupedLinear(6, WIDTH, 8),
        ops.SwiGLU(), ops.GroupedLinear(6, 4, WIDTH), ops.Unpermute(),
    ]  # fmt: skip
    return randomized(sf.Sequential(ops.Residual(*block), ops.Residual(*copy.deepcopy(block))))


@pytest.mark.parametrize("changed", [False, True])
def test_buffers_are_those_of_the_first_forward(changed: bool, again: Any):
    """Load balancing changes the buffer in place, and `functional_call` substitutes another."""
    others = {name: torch.linspace(-1, 1, 6).roll(i) for i, (name, _) in enumerate(routed().named_buffers())}
    found: list[list[Tensor]] = []
    for runs_again in (False, True):
        if runs_again:
            again()
        model, x = routed(), x_of().requires_grad_()
        y = model(x) if changed else functional_call(model, others, (x,))
        if changed:
            for buffer in model.buffers():
                buffer.copy_(others["0.0.correction"])
        before = [b.clone() for b in model.buffers()]
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])])
        assert all(torch.equal(now, then) for now, then in zip(model.buffers(), before, strict=True))
    assert len(others) == 2
    assert all(torch.equal(mine, wanted) for mine, wanted in zip(*found, strict=True))


class SharedParts(ops.Tanh):
    """An operation with one submodule under two names, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = ops.ReLU()
        self.register_buffer("factor", torch.ones(()))


def test_an_operation_may_have_one_part_under_two_names(again: Any):
    model, x = sf.Sequential(ops.Linear(WIDTH, WIDTH), SharedParts(), ops.Linear(WIDTH, WIDTH)), x_of()
    wanted = run(model, x)
    again()
    model.memory = "lean"  # forgets the plan
    assert all(torch.equal(mine, other) for mine, other in zip(run(model, x), wanted, strict=True))


def test_hooks_see_each_tensor_once_and_only_what_enters(again: Any):
    again()
    model, x = gpt(), x_of()
    run(model, x)
    with saving() as seen:
        y = model(x.clone().requires_grad_())
    own = [t for t in seen if not isinstance(t, nn.Parameter)]
    segments = [segment for part in model._fuser.op_list().parts for segment, _ in part.lowering.segments]
    assert len(own) <= sum(2 + len(segment.inputs) for segment in segments)
    assert {t.shape for t in own if t.is_floating_point()} == {y.shape}


class _Fails:
    """Raises in some of the calls of a function."""

    def __init__(self, run: Callable[..., Any], calls: Sequence[int]) -> None:
        self.run, self.calls, self.count = run, calls, 0

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.count += 1
        if self.count in self.calls:
            raise RuntimeError("no such kernel")
        return self.run(*given, **named)


@pytest.mark.parametrize("call", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("fusion", "name"),
    [(BiasTanhForward, "fwd"), (BiasTanhBackward, "bwd"), (BiasTanhJoint, "fwd"), (BiasTanhJoint, "bwd")],
    ids=lambda part: getattr(part, "__name__", part),
)
def test_a_fusion_that_fails_gives_way_to_its_operations(
    fusion: Any, name: str, call: int, again: Any, monkeypatch: pytest.MonkeyPatch
):
    """In the forward pass, in its recomputation, and in the backward pass, of the first call and of later ones."""
    x = draw(4, 5)
    wanted = passes(mlp(dropout=0.0), x)
    again()
    model = mlp(fusions=(fusion,))
    fails = _Fails(getattr(fusion, name), [call])
    monkeypatch.setattr(fusion, name, lambda *given, **named: fails(*given, **named))
    with pytest.warns(FallbackWarning, match="no such kernel"):
        every = [passes(model, x) for _ in range(4)]
    for found in every:
        assert_same(found, wanted)
    assert fails.count >= call


@pytest.mark.parametrize("runs_again", [False, True])
@pytest.mark.parametrize("call", [1, 3])
def test_a_buffer_gets_its_gradient_once_where_a_fusion_fails_behind(
    call: int, runs_again: bool, again: Any, monkeypatch: pytest.MonkeyPatch
):
    """The last Linear has added to its `main_grad` before the fusion runs."""
    if runs_again:
        again()
    model, x = mlp(fusions=(BiasTanhBackward,)), draw(4, 5)
    fails = _Fails(BiasTanhBackward.bwd, [call])
    monkeypatch.setattr(BiasTanhBackward, "bwd", lambda *given, **named: fails(*given, **named))
    with sf.fusing(False):
        every = passes(model, x, torch.ones(4, 3, dtype=torch.float64))
    wanted, parameters = [every[f"d_{name}"] for name, _ in model.named_parameters()], [*model.parameters()]
    for p in parameters:
        p.main_grad = torch.zeros_like(p, dtype=torch.float64)  # pyright: ignore
    with pytest.warns(FallbackWarning, match="no such kernel"):
        passed = [passes(model, x, torch.ones(4, 3, dtype=torch.float64)) for _ in range(3)]
    assert all(torch.equal(found["d_x"], every["d_x"]) for found in passed)
    assert fails.count >= call
    for p, g in zip(parameters, wanted, strict=True):
        assert g is not None
        torch.testing.assert_close(p.main_grad, 3 * g)  # pyright: ignore


def test_what_runs_only_once_does_not_run_again_and_says_so():
    class Counted(Doubles):
        runs = 0
        repeatable = False

        def fwd(self, x: Tensor) -> Any:
            Counted.runs += not isinstance(x, torch._subclasses.FakeTensor)
            return super().fwd(x)

    mlp = ops.LayerNorm(WIDTH), ops.Linear(WIDTH, 2 * WIDTH), ops.GeLU(), ops.Linear(2 * WIDTH, WIDTH)
    inner = *mlp, Counted(), *copy.deepcopy(mlp)
    model = sf.Sequential(*(ops.Residual(*copy.deepcopy(inner)) for _ in range(2)), memory="least")
    x = x_of(40)
    plan = model.plan(x.requires_grad_())
    places = [refusal.at for refusal in plan.refused if refusal.fusion == "recomputation"]
    assert places == [at for at, name in enumerate(plan.names) if name == "Counted"]
    again = [position for span, _ in plan.recomputed for position in span]
    assert again == [position for position in range(len(plan.names)) if position not in places]
    assert "Counted does not run again in the backward pass" in str(plan).replace("\n    ", " ")
    wanted = run(sf.Sequential(*model), x)
    Counted.runs = 0
    for mine, theirs in zip(run(model, x), wanted, strict=True):  # by other fusions
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert Counted.runs == 2


# Estimates of a plan --------------------------------------------------------------------------------------------------


def measured(model: nn.Module, x: Tensor) -> int:
    """Peak bytes in a forward and a backward pass, without parameters' gradients and y."""
    for _ in range(2):
        model(x.detach().requires_grad_()).sum().backward()
        model.zero_grad()
    with Tally() as tally:
        leaf = x.detach().clone().requires_grad_()
        y = model(leaf)
        y.backward(torch.empty_like(y))
        others = [tally.number(t) for t in (y, *(p.grad for p in model.parameters()))]  # pyright: ignore
    return most_of(tally.events, [number for number in others if number is not None])


def test_the_gradient_of_a_weight_comes_first_and_lets_its_input_go(again: Any):
    """Two wide tensors that one call of `bwd` would hold at once: the input of a GEMM and its gradient."""
    again()
    list_ = ops.Linear(4, 64, bias=False), ops.Linear(64, 4, bias=False)
    wide, model = 512 * 64 * 4, sf.Sequential(*list_, memory="lean")
    assert wide < measured(model, torch.randn(512, 4)) < 1.5 * wide


BUDGETS = tuple(sf.Budget(part=part / 10) for part in (9, 8, 7, 6, 5, 4))
CHOICES = ("fast", "balanced", "lean", *BUDGETS, "least")


# Every budget is that of one of the models, under --full of both.
CHOICES_OF = [
    ("gpt", [choice for choice in CHOICES if choice not in BUDGETS[::2]]),
    ("llama", [choice for choice in CHOICES if choice not in BUDGETS[1::2]]),
    *(pytest.param(name, CHOICES, marks=pytest.mark.full) for name in MODELS),
]


@pytest.mark.parametrize(("name", "choices"), CHOICES_OF)
@pytest.mark.filterwarnings("ignore:memory=")
def test_the_peak_is_what_the_plan_says_and_never_more_than_the_budget(
    name: str, choices: Sequence[Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_attention.Scores, "_in_c", lambda *_: False)  # a mode that counts bytes does not see C's
    x, least, times = x_of(32).requires_grad_(), 0, list[int]()
    for memory in reversed(choices):
        model = MODELS[name]()
        model.memory = memory
        plan = model.plan(x)
        assert plan.memory is not None
        assert plan.memory.peak is not None
        assert measured(model, x) == pytest.approx(plan.memory.peak, rel=0.05)
        least = least or plan.memory.peak
        if isinstance(memory, sf.Budget):
            limit = int(memory.part * plan.memory.saved_unfused)  # pyright: ignore
            assert plan.memory.peak <= max(limit, least)
        if memory not in ("balanced", "lean"):
            times.append(plan.cost)
    assert times == sorted(times, reverse=True)
    assert len({*times}) > 2


@pytest.mark.parametrize(("name", "choices"), CHOICES_OF)
@pytest.mark.filterwarnings("ignore:memory=")
def test_gradients_agree_at_every_budget(name: str, choices: Sequence[Any], monkeypatch: pytest.MonkeyPatch):
    """Within the error bound of other fusions; bit for bit equal to the same fusions with everything saved."""
    x, planned, again = x_of(33), running.plan_region, 0
    wanted = run(MODELS[name](), x)

    def saving(*given: Any, **named: Any) -> Any:
        return dataclasses.replace(planned(*given, **named), recomputed=())

    for memory in choices:
        model, other = MODELS[name](), MODELS[name]()
        model.memory = other.memory = memory
        found = run(model, x)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        with monkeypatch.context() as patch:
            patch.setattr(running, "plan_region", saving)
            assert all(map(torch.equal, run(other, x), found)), memory
        runs_again, saves = (
            [segment.again is not None for segment, _ in part.lowering.segments]
            for each in (model, other)
            for part in each._fuser.op_list().parts
        )
        assert not any(saves)
        again += any(runs_again)
    assert 2 * again > len(choices) - 3  # "fast" saves all


def test_the_plan_prints_what_runs_again_and_each_choice():
    model = llama()
    model.memory = sf.Budget(part=0.7)
    plan = model.plan(x_of(33).requires_grad_())
    assert plan.recomputed
    text = str(plan)
    (span, keeps), *_ = plan.recomputed
    assert f"run again in the backward pass: {span.start} to {span.stop - 1}" in text.replace("\n    ", " ")
    for at in keeps:
        assert f"{plan.names[at]} at {at}" in text.replace("\n    ", " ")
    table = text[text.index("memory= ") :].splitlines()
    names = [line.split("  ")[0] for line in table[1:]]
    assert names == ["fast", "balanced", "lean", "least", "Budget(part=0.7)"]  # half does not fit
    assert table[-1].endswith("(this plan)")
    peaks = [choice.peak for choice in plan.choices]
    assert min(peaks) == peaks[3]
    deep = sf.Sequential(*(layer for _ in range(4) for layer in llama()))
    assert "Budget(part=0.5)" in [choice.memory for choice in deep.plan(x_of().requires_grad_()).choices]


def test_a_plan_without_an_input_has_the_choices_too():
    model = gpt()
    model.memory = "least"
    plan = model.plan()
    assert plan.recomputed
    assert not [refusal for refusal in plan.refused if refusal.fusion.startswith("memory=")]


# The search -----------------------------------------------------------------------------------------------------------


def test_a_compiler_takes_what_is_saved_from_the_operations():
    """A compiled call decides for itself what is saved; compiled autograd traces a recomputed segment."""
    x, model = x_of(9), llama(1)
    model.memory = "least"
    assert model.plan(x).recomputed
    wanted = run(llama(1), x)
    torch.testing.assert_close(run(torch.compile(model, backend="aot_eager"), x), wanted, rtol=1e-4, atol=1e-5)  # pyright: ignore
    run(model, x)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        torch.testing.assert_close(run(model, x), wanted, rtol=1e-4, atol=1e-5)
