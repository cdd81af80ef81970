"""`Recompute` instead of a saved tensor: bit for bit, lazily, its own tensors saved once."""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.utils.checkpoint import checkpoint

import seqfuse as sf
from seqfuse import ops
from seqfuse.errors import PluginError, StateError
from seqfuse.fusions import RecomputeActivation, RecomputeNorm, recompute
from seqfuse.operation import config_version
from seqfuse.run import code
from seqfuse.saved import copied
from tests.watching import saving

from .kit import assert_same, draw, passes, randomize

calls: list[str] = []


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


def shifted(x: Tensor, bias: Tensor) -> Tensor:
    calls.append("shifted")
    return x + bias


def tanh_of_shifted(x: Tensor, bias: Tensor) -> Tensor:
    calls.append("tanh")
    return torch.tanh(x + bias)


class Thrifty(sf.ForwardFusion):
    """Saves x and the bias, and recomputes SiLU's input when it is read."""

    bias: ops.Bias
    act: ops.SiLU

    def late(self, x: Tensor) -> sf.Recompute:
        return sf.Recompute(shifted, x, self.bias.bias)

    def fwd(self, x: Tensor) -> Any:
        z = x + self.bias.bias
        return torch.nn.functional.silu(z), {"bias": ops.Bias.Saved(), "act": ops.SiLU.Saved(x=self.late(x))}


class ThriftyTanh(sf.ForwardFusion):
    """Saves a tensor that the GEMM before it saves anyway."""

    bias: ops.Bias
    act: ops.Tanh

    def fwd(self, x: Tensor) -> Any:
        late = sf.Recompute(tanh_of_shifted, x, self.bias.bias)
        return torch.tanh(x + self.bias.bias), {"bias": ops.Bias.Saved(), "act": ops.Tanh.Saved(y=late)}


def pair(cls: type[sf.ForwardFusion], act: nn.Module) -> tuple[sf.Sequential, sf.Sequential]:
    plain = sf.Sequential(ops.Linear(5, 7), act, ops.Linear(7, 3), fusions=())
    randomize(plain.double())
    return plain, sf.Sequential(*plain, fusions=(cls,))


CASES = pytest.mark.parametrize(
    ("cls", "act"), [(Thrifty, ops.SiLU), (ThriftyTanh, ops.Tanh)], ids=["of the input", "of the output"]
)


@CASES
def test_gradients_are_bit_for_bit_those_of_the_stored_value(cls: Any, act: Any):
    plain, thrifty = pair(cls, act())
    for shape in [(4, 5), (2, 3, 5), (5,)]:
        x = draw(*shape)
        assert thrifty.plan(x).count(cls.__name__) == 1
        assert_same(passes(thrifty, x), passes(plain, x), 0.0)


@CASES
def test_it_is_evaluated_in_the_backward_and_once(cls: Any, act: Any):
    _, thrifty = pair(cls, act())
    passes(thrifty, draw(4, 5))  # the first call is checked, which evaluates it
    calls.clear()
    y = thrifty(draw(4, 5))
    assert calls == []
    y.sum().backward(retain_graph=True)
    assert len(calls) == 1
    y.sum().backward()
    assert len(calls) == 2, "once per backward; nothing is kept in between"


def test_it_is_not_evaluated_where_nobody_reads_it():
    _, thrifty = pair(Thrifty, ops.SiLU())
    thrifty.requires_grad_(False)[2].requires_grad_(True)
    x = draw(4, 5)
    assert thrifty.plan(x).count("Thrifty") == 1
    thrifty(x)
    calls.clear()
    thrifty(x).sum().backward()
    assert calls == []
    assert thrifty[2].weight.grad is not None


def test_its_tensors_are_saved_once_each_and_the_value_is_not():
    plain, thrifty = pair(Thrifty, ops.SiLU())
    x = draw(4, 5).requires_grad_()
    thrifty(x)

    def saved(model: nn.Module) -> list[Tensor]:
        with saving() as kept:
            model(x)
        return kept

    kept = saved(thrifty)
    assert len({id(t) for t in kept}) == len(kept)
    assert sum(t is thrifty[0].bias for t in kept) == 1
    z = nn.functional.linear(x, plain[0].weight, plain[0].bias)
    assert any(t.shape == z.shape and torch.equal(t, z) for t in saved(plain))
    assert not any(t.shape == z.shape and torch.equal(t, z) for t in kept)


def test_tensors_shared_by_several_stand_ins_are_saved_once():
    class Twice(sf.ForwardFusion):
        first: ops.SiLU
        second: ops.Scale
        third: ops.SiLU

        def fwd(self, x: Tensor) -> Any:
            y = nn.functional.silu(x) * self.second.factor
            records = {
                "first": ops.SiLU.Saved(x=sf.Recompute(torch.clone, x)),
                "second": ops.Scale.Saved(factor=self.second.factor),
                "third": ops.SiLU.Saved(x=sf.Recompute(scaled_silu, x, torch.tensor(self.second.factor))),
            }
            return nn.functional.silu(y), records

    plain = sf.Sequential(ops.SiLU(), ops.Scale(-0.5), ops.SiLU(), fusions=())
    model, x = sf.Sequential(*plain, fusions=(Twice,)), draw(4, 5)
    assert_same(passes(model, x), passes(plain, x), 0.0)
    leaf = x.clone().requires_grad_()
    with saving() as kept:
        model(leaf)
    assert [t is leaf for t in kept] == [True, False]


def scaled_silu(x: Tensor, factor: Tensor) -> Tensor:
    return nn.functional.silu(x) * factor.item()


@CASES
def test_it_works_with_offloading_checkpoints_and_anomaly_mode(cls: Any, act: Any):
    plain, thrifty = pair(cls, act())
    x, dy = draw(4, 5), draw(4, 3, seed=99)
    want = passes(plain, x)

    def offloaded(t: Tensor) -> Tensor:
        with graph.save_on_cpu():
            return thrifty(t)

    def checkpointed(t: Tensor) -> Tensor:
        return checkpoint(thrifty, t, use_reentrant=False)

    for run in (offloaded, checkpointed):
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        y.backward(dy)
        found = {"out": y.detach(), "d_x": leaf.grad, **{f"d_{n}": p.grad for n, p in plain.named_parameters()}}
        assert_same(found, want, 0.0)
        plain.zero_grad()
    with torch.autograd.set_detect_anomaly(True):
        assert_same(passes(thrifty, x), want, 0.0)


def test_a_parameter_written_before_the_backward_is_an_error_and_no_wrong_value():
    _, thrifty = pair(Thrifty, ops.SiLU())
    y = thrifty(draw(4, 5).requires_grad_())
    with torch.no_grad():
        thrifty[0].bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_is_made_again_is_laid_out_as_its_reader_asks():
    class Loose(Thrifty):
        layout = "any"

    class Strict(sf.BackwardFusion):
        bias: ops.Bias
        act: ops.SiLU

        def bwd(self, dy: Tensor, *, bias: Any, act: Any) -> Any:
            assert act.x.is_contiguous()
            dx, _ = self.act.bwd(dy, act)
            return dx, {"bias.bias": dx.sum(0)}

    model = sf.Sequential(ops.Bias(5), ops.SiLU(), fusions=(Loose, Strict))
    x = draw(5, 4).float().t().requires_grad_()
    with sf.fusing(on_error="raise"):
        model(x).sum().backward()
    assert calls
    assert not shifted(x, model[0].bias).is_contiguous()


def test_a_stand_in_that_gives_another_shape_is_an_error_that_names_the_field():
    class Wrong(Thrifty):
        def late(self, x: Tensor) -> sf.Recompute:
            return sf.Recompute(torch.sum, x)

    _, model = pair(Wrong, ops.SiLU())
    with pytest.raises(PluginError, match=r"field 'x' of slot 'act' should be float64\[4, 7\]") as caught:
        model(draw(4, 5).requires_grad_())
    assert (caught.value.code, caught.value.operation) == ("SF302", "Wrong")


# Saved tensors by themselves ------------------------------------------------------------------------------------------


class Record(sf.Saved):
    x: Tensor
    weight: Tensor | None = sf.field(for_="x")
    parts: tuple[Tensor, ...] = sf.field(for_=("x", "weight"))
    eps: float = sf.field(default=0.5)


def round_trip(record: sf.Saved, needs: frozenset[str]) -> tuple[Any, list[Tensor]]:
    """A copy as the engine returns it, and the tensors in it, each once."""
    tensors: dict[int, Tensor] = {}
    copy = copied(record, type(record).kept(needs), lambda t: tensors.setdefault(id(t), t))
    return copy, [*tensors.values()]


def test_a_copy_of_a_record_has_every_field():
    x, w = draw(3), nn.Parameter(draw(3, seed=2))
    back, tensors = round_trip(Record(x=x, weight=w, parts=(x, w, x), eps=0.25), frozenset({"x"}))
    assert [t is s for t, s in zip(tensors, (x, w), strict=True)] == [True, True]
    assert back.x is x
    assert back.weight is w
    assert [t is s for t, s in zip(back.parts, (x, w, x), strict=True)] == [True] * 3
    assert back.eps == 0.25


def test_dropped_fields_are_not_copied_and_reading_them_says_who_would_have():
    back, tensors = round_trip(Record(x=draw(3), weight=draw(3), parts=(draw(2),)), frozenset({"bias"}))
    assert len(tensors) == 1
    for name, readers in [("weight", "x"), ("parts", "weight, x")]:
        with pytest.raises(StateError, match=f"field '{name}' was dropped: only {readers} reads it") as caught:
            getattr(back, name)
        assert caught.value.code == "SF502"
    with pytest.raises(AttributeError, match="no field 'nonsense'"):
        _ = back.nonsense


def test_nothing_at_all_is_kept_where_no_gradient_is_wanted():
    assert Record.kept(frozenset()) == ()
    assert Record.kept(frozenset({"bias"})) == ("x", "eps")


def test_a_stand_in_is_saved_by_its_tensors_and_evaluated_when_read():
    x, bias = draw(3, 4), draw(4, seed=2)
    record = Record(x=sf.Recompute(shifted, x, bias), weight=None, parts=(x,))
    back, tensors = round_trip(record, frozenset({"x"}))
    assert len(tensors) == 2
    assert calls == []
    first = back.x
    assert torch.equal(first, x + bias)
    assert back.x is first
    assert calls == ["shifted"]


def test_a_stand_in_records_no_graph():
    x, bias = draw(3, 4), nn.Parameter(draw(4, seed=2))
    back, _ = round_trip(Record(x=sf.Recompute(shifted, x, bias), weight=None, parts=()), frozenset({"x"}))
    assert not back.x.requires_grad


@pytest.mark.parametrize("name", ["class", "_hidden", "def", "kept"])
def test_a_bad_field_name_is_an_error_where_the_record_is_defined(name: str):
    with pytest.raises(PluginError, match="must be a public identifier"):
        type("Bad", (sf.Saved,), {"__annotations__": {name: Tensor}, "__module__": __name__})


def test_a_field_may_have_any_public_name_that_is_no_method_of_the_record():
    class Sides(sf.Saved):
        sides: Tensor
        d: Tensor
        self: Tensor
        type: Tensor
        late: float
        has_data: Tensor | None = None

    x = draw(3, 4)
    saved = Sides(sides=x, d=x, self=x, type=sf.Recompute(torch.clone, x), late=1.5)
    assert saved.sides is saved.d is saved.self is x
    assert torch.equal(saved.type, x)
    assert (saved.late, saved.has_data) == (1.5, None)


def test_a_record_may_be_extended():
    class Longer(Record):
        more: Tensor
        LIMIT: ClassVar[int] = 3

    assert Longer.fields == ("x", "weight", "parts", "eps", "more")
    back, tensors = round_trip(Longer(x=draw(1), weight=None, parts=(), more=draw(2)), frozenset({"x"}))
    assert len(tensors) == 2
    assert back.more.shape == (2,)


class Anew(Thrifty):
    """With a function that is another object in each call."""

    def late(self, x: Tensor) -> sf.Recompute:
        return sf.Recompute(functools.partial(watched, True), x, self.bias.bias)


made_again: list[weakref.ref[Tensor]] = []


def watched(again: bool, x: Tensor, bias: Tensor) -> Tensor:
    assert again
    calls.append("alive" if any(t() is not None for t in made_again) else "freed")
    z = x + bias
    made_again.append(weakref.ref(z))
    return z


def test_generated_code_makes_a_field_again_and_lets_it_go(monkeypatch: pytest.MonkeyPatch):
    layers = [layer for _ in range(3) for layer in (ops.Linear(5, 5), ops.SiLU())]
    plain = sf.Sequential(*layers, fusions=())
    model = sf.Sequential(*layers, fusions=(Anew,))
    randomize(plain.double())
    x = draw(7, 5).double().requires_grad_()
    expected = passes(plain, x)
    for _ in range(2):
        passes(model, x)
    monkeypatch.setattr(code, "check_backward", None)
    made_again.clear()
    calls.clear()
    assert_same(passes(model, x), expected)
    assert calls == ["freed"] * 3


def test_later_calls_save_what_a_field_is_made_of_without_looking_for_it():
    layers = ops.Residual(ops.LayerNorm(6), ops.Linear(6, 12), ops.SiLU(), ops.MergedLinear(12, (4, 2))), ops.Tanh()
    fusions = RecomputeNorm, RecomputeActivation
    model, x = sf.Sequential(*layers, fusions=fusions, memory="lean"), draw(7, 6, dtype=torch.float32).requires_grad_()
    randomize(model)
    assert model.plan(x).fused[0] == 2
    first = model(x)
    expected = torch.autograd.grad(first, (x, *model.parameters()), torch.ones_like(first))
    for hooks in (contextlib.nullcontext(), contextlib.nullcontext(), graph.save_on_cpu(), contextlib.nullcontext()):
        with hooks:
            y = model(x)
        assert (y.grad_fn.kept[4] == ((4, 3), (7, 1))) is isinstance(hooks, contextlib.nullcontext)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
        (dweight,) = torch.autograd.grad(y, model[0][1].weight, torch.ones_like(y), retain_graph=True)
        found = torch.autograd.grad(y, (x, *model.parameters()), torch.ones_like(y))
        assert torch.equal(dx, expected[0])
        assert torch.equal(dweight, expected[3])
        assert all(map(torch.equal, found, expected))
    unfused = sf.Sequential(*layers, fusions=())(x)
    for mine, theirs in zip(expected, torch.autograd.grad(unfused.sum(), (x, *model.parameters())), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_what_is_made_again_for_a_weight_is_let_go_before_the_gradient_of_the_input(monkeypatch: pytest.MonkeyPatch):
    made, alive, run, again = list[Any](), list[Any](), ops.Linear.bwd, recompute._replayed

    def made_again(*given: Any) -> Tensor:
        y = again(*given)
        made.append(weakref.ref(y))
        return y

    def bwd(self: ops.Linear, dy: Tensor, saved: Any, *, needs: frozenset[str], **given: Any) -> Any:
        alive.append((sorted(needs), bool(made) and made[-1]() is not None))
        return run(self, dy, saved, needs=needs, **given)

    monkeypatch.setattr(ops.Linear, "bwd", bwd)
    monkeypatch.setattr(recompute, "_replayed", made_again)
    model = sf.Sequential(ops.LayerNorm(6), ops.Linear(6, 5, bias=False), fusions=(RecomputeNorm,), memory="lean")
    for call in range(3):
        made.clear()
        alive.clear()
        model(draw(4, 6, dtype=torch.float32).requires_grad_()).sum().backward()
        assert alive == [(["weight"], False), (["x"], False)]
        assert len(made) == (2 if call == 0 else 1)  # the first call compares the record with that of the operation


@pytest.mark.parametrize("saving", [ops.Linear, lambda *sizes: ops.MergedLinear(sizes[0], (3, 4))])
def test_a_call_that_saves_less_sets_nothing(saving: Any):
    """It would make the process compare each sequence with itself before its next call."""
    model = sf.Sequential(ops.LayerNorm(8), saving(8, 7), memory="lean")
    assert "RecomputeNorm" in str(model.plan(torch.randn(4, 8)))
    model(torch.randn(4, 8)).sum().backward()
    version = config_version.current
    for _ in range(2):
        model(torch.randn(4, 8)).sum().backward()
    assert config_version.current is version


class LinearGeLU(sf.ForwardFusion):
    """Recomputes z by one more GEMM; gains nothing else."""

    linear: ops.Linear
    act: ops.GeLU

    saves_memory = True

    def saves(self, env: sf.Env) -> sf.Savings:
        return sf.Savings()

    def fwd(self, x: Tensor) -> Any:
        weight = self.linear.weight
        y = nn.functional.gelu(x @ weight.mT, approximate=self.act.approximate)
        late = sf.Recompute(nn.functional.linear, x, weight)
        return y, {"linear": ops.Linear.Saved(x=x, weight=weight), "act": ops.GeLU.Saved(x=late)}


def gelu_of(*fusions: type[sf.FusedOperation], memory: Any = "fast") -> sf.Sequential:
    sequence = ops.Linear(16, 32, bias=False), ops.GeLU(), ops.Linear(32, 8, bias=False)
    return sf.Sequential(*sequence, fusions=fusions, memory=memory)


X = torch.empty(48, 16)


def test_of_what_cannot_be_made_again_without_data_a_plan_does_not_know_the_peak():
    class Counts(LinearGeLU):
        def fwd(self, x: Tensor) -> Any:
            y, saved = super().fwd(x)
            late = sf.Recompute(by_numbers, x, self.linear.weight)
            return y, {**saved, "act": ops.GeLU.Saved(x=late)}

    plan = gelu_of(Counts, memory="lean").plan(X)
    assert plan.memory is not None
    assert plan.memory.peak is None
    assert plan.memory.peak_unknown is not None


def by_numbers(x: Tensor, weight: Tensor) -> Tensor:
    return nn.functional.linear(x, weight) if x.sum().item() < 1e9 else x
