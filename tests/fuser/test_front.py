"""Memory as it is: the search within a budget against all choices, and the planned peak against torch's allocator."""

from __future__ import annotations

import itertools
import random
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import seqfuse as sf
from seqfuse import env, ops
from seqfuse.compiler import compiler
from seqfuse.errors import FallbackWarning
from seqfuse.kernels import _heads
from seqfuse.kernels.c import attention
from seqfuse.ops import _attention_on_cpu
from seqfuse.plan import MODES, facts
from seqfuse.plan.front import Front, Option, Weight, bytes_held
from seqfuse.plan.tally import Tally
from seqfuse.run import trial
from tests.fuser.fusions import Doubles

from .kit import assert_same, attending, attending_by_several_weights, draw, feed_forward, gated


class _Case(Front):
    """Random options of several parts, which share tensors at their boundaries."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.parts = draw.randint(1, 4)
        self.sizes = {n: draw.choice([1, 2, 5]) for n in range(self.parts + 2)}

        def some() -> frozenset[int]:
            return frozenset(draw.sample(sorted(self.sizes), draw.randint(0, 2)))

        self.starting = {a: [] for a in range(self.parts)}
        for a, options in self.starting.items():
            for _ in range(draw.randint(1, 3)):
                stop = draw.randint(a + 1, self.parts) if options else a + 1
                numbers = [draw.randint(0, 9) for _ in range(4)]
                weight = Weight(numbers[0], some(), some(), *numbers[1:], 0)
                options.append(Option(a, stop, draw.randint(0, 9), weight, (), ()))
        self._last = dict.fromkeys(self.sizes, self.parts)
        self._stretch: Any = type("Stretch", (), {"start": 0, "positions": range(self.parts)})

    def ways(self, at: int = 0) -> list[tuple[Option, ...]]:
        if at == self.parts:
            return [()]
        return [(option, *rest) for option in self.starting[at] for rest in self.ways(option.stop)]

    def held(self, way: Sequence[Option]) -> tuple[int, int, int]:
        """Time, saved bytes and peak of a choice, from the definition of `Weight`."""
        kept, saved, peak = 0, frozenset[int](), 0
        for option in way:
            w = option.weight
            peak = max(peak, kept + sum(self.sizes[n] for n in w.entering - saved) + w.forward)
            saved_now = saved | w.shared
            kept += w.own + sum(self.sizes[n] for n in saved_now - saved)
            saved, peak = saved_now, max(peak, kept + w.backward)
        return sum(option.time for option in way), kept, peak

    def lasting(self, way: Sequence[Option]) -> int:
        """The peak of a backward that frees no saved tensor before it ends."""
        kept, saved, most = 0, frozenset[int](), 0
        for option in way:
            kept += option.weight.own + sum(self.sizes[n] for n in option.weight.shared - saved)
            saved, most = saved | option.weight.shared, max(most, kept + option.weight.lasting)
        return most

    def counted(self, way: Sequence[Option]) -> tuple[int, int]:
        """Saved bytes and peak, as `bytes_held` counts those of a plan."""

        def weigh(forward: Any, backward: Any, again: Any) -> Weight:
            return way[again[0]].weight

        weigh.sizes = self.sizes
        spans = {range(option.start, option.stop): (i,) for i, option in enumerate(way)}
        return bytes_held(weigh, spans, ((), ()), spans)


@pytest.mark.parametrize("seed", range(30))
def test_a_budget_takes_the_fastest_of_all_ways_that_fit(seed: int):
    case = _Case(seed)
    assert all(case.counted(way) == case.held(way)[1:] for way in case.ways())
    every = [(time, peak) for time, _, peak in map(case.held, case.ways())]
    least = min(peak for _, peak in every)
    assert case.least() == least
    for limit in range(least - 1, max(peak for _, peak in every) + 2):
        found = case.within(limit)
        fits = [time for time, peak in every if peak <= limit]
        assert (found is None) == (not fits)
        if found is not None:
            time, _, peak = case.held(found)
            assert (time, peak <= limit) == (min(fits), True)
            assert [*itertools.chain(*(range(o.start, o.stop) for o in found))] == [*range(case.parts)]


@pytest.mark.parametrize("seed", range(30))
def test_the_least_leaves_most_room_for_what_follows_near_the_lowest_peak(seed: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules[Front.__module__], "SLACK", 3)  # so that several choices are close
    case = _Case(seed)
    least = case.least()
    low = [way for way in case.ways() if case.held(way)[2] <= least + least // 3]
    room = min(map(case.lasting, low))
    time, _, peak = case.held(found := case.fewest())
    assert (case.lasting(found), peak <= least + least // 3) == (room, True)
    assert time == min(case.held(way)[0] for way in low if case.lasting(way) == room)


def test_tokens_behind_an_embedding_need_no_record_of_their_own(recwarn: pytest.WarningsRecorder):
    """An Embedding saves its x, which nothing recomputes if the segment that contains it is recomputed."""
    model = sf.Sequential(ops.Embedding(50, 16), ops.Linear(16, 64), ops.GeLU(), ops.Linear(64, 16))
    tokens = torch.randint(50, (4, 32), generator=torch.Generator().manual_seed(0))
    found: list[dict[str, Tensor | None]] = []
    for memory in ("fast", "least"):
        model.memory = memory
        model.zero_grad()
        model(tokens).square().sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
        assert not [r for r in model.plan(tokens).refused if "not known" in r.reason]
    assert_same(*found)
    assert not recwarn.list


def test_a_fusion_with_a_slot_of_any_name_runs_in_two_calls() -> None:
    layers = [(ops.LayerNorm(32), ops.Tanh(), ops.Linear(32, 32, bias=False), ops.Scale(0.5)) for _ in range(4)]
    fusions = (sf.fusions.BackwardLinearScale,)  # with a slot `first`
    model = sf.Sequential(*itertools.chain(*layers), memory="least", fusions=fusions)
    x = torch.randn(64, 32, requires_grad=True)
    with sf.fusing(unmeasured=True), warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        plan = model.plan(x)
        again = {position for span, _ in plan.recomputed for position in span}
        assert any(step.fused and step.start in again for step in plan.backward)
        model(x).sum().backward()


# The planned peak equals torch's allocator's, whichever library multiplies matrices on a CPU.


WIDTH = 64


MODELS: dict[str, list[Callable[[], list[nn.Module]]]] = {
    "MLP": [lambda: feed_forward(WIDTH)],
    "gated MLP": [lambda: gated(WIDTH)],
    "attention": [lambda: attending(WIDTH, 4)],
    "GPT": [lambda: attending(WIDTH, 4), lambda: feed_forward(WIDTH)],
    "Llama": [lambda: attending_by_several_weights(WIDTH, 4), lambda: gated(WIDTH)],
}


class _Loss(torch.autograd.Function):
    """A loss that holds no reference to its gradient, like that of a head."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.like = y.shape, y.dtype
        return y.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        return torch.ones(ctx.like[0], dtype=ctx.like[1])


def allocated(model: nn.Module, x: Tensor) -> int:
    """The most bytes alive at once in a forward and a backward pass as torch's allocator counts them, without y.

    Under a mode that counts tensors, torch's own kernels would run. Gradients of parameters are freed when they come.
    """
    handles = [p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)) for p in model.parameters()]
    for _ in range(2):
        _Loss.apply(model(x.detach().clone().requires_grad_())).backward()  # pyright: ignore
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        y = model(x.detach().clone().requires_grad_())
        _Loss.apply(y).backward()  # pyright: ignore
    for handle in handles:
        handle.remove()
    assert profile.profiler is not None
    events = profile.profiler.kineto_results.events()
    made = [size for _, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")]
    return max(itertools.accumulate(made)) - y.nbytes


def planned(model: sf.Sequential, x: Tensor) -> int:
    memory = model.plan(x.requires_grad_()).memory
    assert memory is not None
    assert memory.peak is not None
    return memory.peak


KINDS = "bfloat16", "float32 by MKL", "float32 by oneDNN"
# By default a model of one block meets one kind, in turn, and one of two blocks two.
CASES = [
    pytest.param(name, kind, marks=[pytest.mark.full] * ((i + j) % 3 in ((0,) if len(blocks) > 1 else (1, 2))))
    for i, (name, blocks) in enumerate(MODELS.items())
    for j, kind in enumerate(KINDS)
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_peak_is_what_the_allocator_counts(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN copies one factor of a weight's gradient; bfloat16 GEMMs without instructions run in float32."""
    if "oneDNN" in kind and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("torch was built without oneDNN")
    monkeypatch.setattr(env, "ONEDNN_FLOAT32", "oneDNN" in kind)
    monkeypatch.setattr(env, "WIDENED", frozenset({torch.bfloat16}))
    for module in (trial, facts):  # tried with another library
        monkeypatch.setattr(module, "_known", {})
    # At this many tokens a thread's scratch in oneDNN, 256 KiB whatever the size of its factors, is a small part.
    x = draw(4, 512 if "oneDNN" in kind else 256, WIDTH, seed=3).to(
        torch.bfloat16 if kind == "bfloat16" else torch.float32
    )
    found: dict[str, float] = {}
    for memory in MODES:
        model = sf.Sequential(*(ops.Residual(*inner()) for inner in MODELS[name]), memory=memory).to(x.dtype)
        found[memory] = allocated(model, x) / planned(model, x)
    assert found == pytest.approx(dict.fromkeys(found, 1.0), abs=0.05)


@pytest.mark.skipif(compiler() is None, reason="no C compiler")
@pytest.mark.parametrize("memory", ["fast", "least"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_peak_has_what_attention_in_c_holds_while_it_runs(
    dropout: float, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the forward pass k and v in the kernel's layout, and floats of each thread in both passes."""
    calls, both = list[int](), attention.both_on_cpu

    def counted(*given: Any, **limits: Any) -> Any:
        forward, backward = both(*given, **limits)
        return lambda *of: (calls.append(1), forward(*of))[1], backward

    monkeypatch.setattr(attention, "both_on_cpu", counted)
    monkeypatch.setattr(_attention_on_cpu, "_known", {})
    model = sf.Sequential(*attending(WIDTH, 4, dropout), memory=memory)
    x = draw(2, 300, WIDTH, seed=3).float()
    assert allocated(model, x) == pytest.approx(planned(model, x), rel=0.05)
    assert len(calls) >= 3


@pytest.mark.skipif(compiler() is None, reason="the fusions that read such a table have C kernels")
def test_a_step_costs_the_same_before_and_behind_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached table of angles is not part of it."""
    monkeypatch.setattr(_heads, "_known", {})
    x, found = draw(2, 64, WIDTH, seed=3).float().requires_grad_(), []
    for _ in range(2):
        for module in (trial, facts):
            monkeypatch.setattr(module, "_known", {})
        turned = ops.Linear(WIDTH, 3 * WIDTH), ops.RotaryEmbedding(4, 4, style="half"), ops.Attention(4, 4, causal=True)
        model = sf.Sequential(ops.Residual(ops.LayerNorm(WIDTH), *turned, ops.Linear(WIDTH, WIDTH)))
        assert model.plan(x).choices
        found.append(sorted(known.weight.nanoseconds for known in trial._known.values()))
        model(x).sum().backward()
    assert found[0] == found[1]
    assert _heads._known


@torch.no_grad()
def test_the_peak_has_a_copy_for_a_layout_beside_what_is_copied() -> None:
    x = draw(128, 64).float()
    memory = sf.Sequential(ops.GeLU(), ops.Transpose(0, 1), ops.SwiGLU()).plan(x).memory
    assert memory is not None
    assert memory.peak == 3 * x.nbytes


class _Watched(Doubles):
    """y = 2 x; `alive` are positions of the operations whose saved tensors are alive when its `bwd` runs."""

    class Saved(sf.Saved):
        own: Tensor
        several: tuple[Tensor, ...]
        late: Tensor

    made: ClassVar[dict[int, list[weakref.ref[Tensor]]]] = {}
    alive: ClassVar[dict[int, list[int]]] = {}

    def __init__(self, place: int, late: bool = False) -> None:
        super().__init__()
        self.place, self.late = place, late

    def fwd(self, x: Tensor) -> Any:
        tensors = [x.clone() for _ in range(4)]
        self.made[self.place] = [weakref.ref(t) for t in tensors]
        last = sf.Recompute(torch.neg, tensors[3]) if self.late else tensors[3]
        return 2 * x, self.Saved(own=tensors[0], several=(*tensors[1:3],), late=last)

    def bwd(self, dy: Tensor, saved: Any) -> Any:
        assert len(saved.several) == 2
        self.alive[self.place] = [at for at, of in self.made.items() for one in of if one() is not None]
        return 2 * dy, {}


@pytest.mark.parametrize("asked", ["all", "some"])
@pytest.mark.parametrize("late", [False, True])
def test_what_a_step_saved_goes_when_its_backward_has_run(late: bool, asked: str) -> None:
    """They stay alive if another backward pass is to come."""
    model = sf.Sequential(*(_Watched(i, late) for i in range(3)), ops.Bias(4))
    x = draw(3, 4).requires_grad_()
    inputs = [x] if asked == "some" else None
    for _ in range(3):
        y = model(x).sum()
        y.backward(inputs=inputs, retain_graph=True)
        assert _Watched.alive == {place: [at for at in range(3) for _ in range(4)] for place in range(3)}
        y.backward(inputs=inputs)
        assert _Watched.alive == {place: [at for at in range(place + 1) for _ in range(4)] for place in range(3)}
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 6 * 8))


def test_work_is_that_of_calls_that_read_or_write_numbers():
    with FakeTensorMode(), Tally() as tally:
        x, y = torch.empty(4, 8), torch.empty_like(torch.empty(8, 4))
        assert x.device.type == "cpu"
        assert torch.ops.aten._unsafe_view(y, (2, 16)).view(32).shape == (32,)
        assert tally.work == sf.Savings()
        x.add_(1.0)
        assert tally.work == sf.Savings(1, 2 * 32 * 4)
        x @ y
        assert tally.work == sf.Savings(2, (4 * 32 + 16) * 4, 2 * 4 * 8 * 4)
