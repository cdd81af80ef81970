"""Corner cases of fused steps, their operations and backwards that need fewer gradients."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.errors import FallbackWarning, StateError
from tests.fuser.fusions import (
    AddForkJoint,
    AddReLUBackward,
    AddReLUForward,
    BiasGeLUForward,
    BiasReLU,
    BiasReLUBack,
    Doubles,
    fused_names,
    stepwise,
    tensor,
)


def frozen(*members: nn.Module) -> sf.Sequential:
    return sf.Sequential(*members).requires_grad_(False)


PENALIZED: dict[str, Any] = {
    "frozen linear": lambda: frozen(ops.Linear(4, 4), ops.GeLU(), ops.Linear(4, 1)),
    "frozen bias": lambda: frozen(ops.Bias(4), ops.GeLU()),
    "no parameters": lambda: sf.Sequential(ops.Scale(2.0), ops.GeLU(), memory="lean"),
    "a trained bias": lambda: sf.Sequential(ops.Bias(4), ops.SiLU(), memory="lean"),
    "behind a barrier": lambda: sf.Sequential(nn.Linear(4, 4), ops.Scale(2.0), ops.SiLU(), memory="lean"),
}


@pytest.mark.parametrize("way", ["backward", "grad"])
@pytest.mark.parametrize("make", PENALIZED.values(), ids=PENALIZED)
def test_a_gradient_penalty_is_an_error_also_where_x_is_not_kept(make: Any, way: str) -> None:
    before, model, x = nn.Linear(4, 4), make(), tensor(3, 4)

    def penalize() -> None:
        (g,) = torch.autograd.grad(model(before(x)).sum(), x, create_graph=True)
        penalty = g.square().sum()
        if way == "backward":
            penalty.backward()
        else:
            torch.autograd.grad(penalty, before.weight)

    with pytest.raises(StateError) as caught:
        penalize()
    assert caught.value.code == "SF501"


class Frail(Doubles):
    """Its backward fails a given number of times."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[str] = []

    def bwd(self, dy: Tensor, saved: Any) -> Any:
        if self.failures:
            raise torch.OutOfMemoryError(self.failures.pop())
        return super().bwd(dy, saved)


class FrailForkBias(sf.BackwardFusion):
    frail: Frail
    fork: ops.Fork
    bias: ops.Bias

    def bwd(self, dy: Tensor, *, frail: Any, fork: Any, bias: Any, d_fork_out: Tensor) -> Any:
        return 2 * (dy + d_fork_out), {"bias.bias": dy.sum(0)}


@pytest.mark.filterwarnings("error::seqfuse.FallbackWarning")
def test_an_error_of_an_operation_in_the_place_of_a_fusion_is_its_own() -> None:
    bias, frail = ops.Bias(4), Frail()
    model = sf.Sequential(bias, frail, ops.Fork("aux"), bias, fusions=(FrailForkBias,))
    x = tensor(3, 4)
    y, _ = model(x)
    assert fused_names(model.plan(x))[1] == ["FrailForkBias"]
    frail.failures.append("no room")
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        y.sum().backward()
    assert bias.bias.grad is None
    assert x.grad is None
    y, _ = model(x)
    y.sum().backward()
    assert torch.equal(bias.bias.grad, torch.full((4,), 9.0))


def test_what_is_not_asked_for_is_not_returned_by_a_backward_that_makes_it_all_the_same() -> None:
    model = sf.Sequential(ops.Linear(4, 8), ops.ReLU(), fusions=(BiasReLU, BiasReLUBack))
    x, bias = tensor(5, 4), model[0].bias
    (got,) = torch.autograd.grad(model(x).sum(), [bias])
    (expected,) = torch.autograd.grad(torch.relu(nn.functional.linear(x, model[0].weight, bias)).sum(), [bias])
    torch.testing.assert_close(got, expected)

    members = ops.Linear(4, 8), ops.Add("r"), ops.ReLU(), ops.Linear(8, 3)
    model, r = sf.Sequential(*members, fusions=(AddReLUForward, AddReLUBackward)), tensor(5, 8, seed=3)
    (got,) = torch.autograd.grad(model(x, r=r).sum(), [r])
    with sf.fusing(False):
        (expected,) = torch.autograd.grad(model(x, r=r).sum(), [r])
    torch.testing.assert_close(got, expected)


@pytest.mark.filterwarnings("ignore::seqfuse.FallbackWarning")
@pytest.mark.parametrize("used", [0, 1], ids=["y", "channel"])
def test_a_joint_fusion_whose_forward_fell_back_knows_outputs_nobody_used(used: int) -> None:
    class Fails(AddForkJoint):
        def fwd(self, x: Tensor, *, add_other: Tensor) -> Any:
            raise RuntimeError("no kernel")

        def unfused(self, saved: Any) -> Any:
            return {"add": ops.Add.Saved(), "fork": ops.Fork.Saved()}

    model = sf.Sequential(ops.Add("a"), ops.Fork("b"), ops.Tanh(), fusions=(Fails,))
    x, a = tensor(3, 4), tensor(3, 4, seed=4)
    (got,) = torch.autograd.grad(model(x, a=a)[used].sum(), [x])
    with sf.fusing(False):
        (expected,) = torch.autograd.grad(model(x, a=a)[used].sum(), [x])
    assert torch.equal(got, expected)


class Emit(sf.UnfusedOperation):
    """y = sin(x), aux = cos(x); its backward needs dy."""

    outputs = ("aux",)

    class Saved(sf.Saved):
        x: Tensor

    def reference(self, x: Tensor) -> Any:
        return x.sin(), {"aux": x.cos()}

    def fwd(self, x: Tensor) -> Any:
        return x.sin(), {"aux": x.cos()}, self.Saved(x=x)

    def bwd(self, dy: Tensor, saved: Any, *, d_aux: Tensor | None) -> Any:
        dx = dy * saved.x.cos()
        return (dx if d_aux is None else dx - d_aux * saved.x.sin()), {}


class EmitTanh(sf.ForwardFusion):
    emit: Emit
    act: ops.Tanh
    outputs = ("emit_aux",)

    def fwd(self, x: Tensor) -> Any:
        y = x.sin().tanh()
        return y, {"emit_aux": x.cos()}, {"emit": Emit.Saved(x=x), "act": ops.Tanh.Saved(y=y)}


def test_an_operation_that_needs_dy_is_not_fused_where_only_its_channel_may_be_used() -> None:
    model, x = sf.Sequential(Emit(), ops.Tanh(), fusions=(EmitTanh,)), tensor(3, 4)
    model(x)[1].sum().backward()
    torch.testing.assert_close(x.grad, -x.detach().sin())
    (refusal,) = model.plan(x).refused
    assert refusal.reason.startswith("Emit needs a gradient of its y")


def test_a_fusion_that_drops_a_public_output_is_refused() -> None:
    class Drops(sf.ForwardFusion):
        emit: Emit
        act: ops.Tanh

        def fwd(self, x: Tensor) -> Any:
            raise AssertionError("it has nowhere to put the output")

    model, x = sf.Sequential(Emit(), ops.Tanh(), fusions=(Drops,)), tensor(3, 4)
    with torch.no_grad():
        assert len(model(x)) == 2
        assert (
            model.plan(x).refused[0].reason
            == "the extra output emit_aux is read elsewhere and is not among its outputs"
        )


def test_a_forward_that_loses_a_record_later_falls_back_with_its_channels() -> None:
    class AddTanh(sf.ForwardFusion):
        add: ops.Add
        act: ops.Tanh
        calls = 0

        def fwd(self, x: Tensor, *, add_other: Tensor) -> Any:
            type(self).calls += 1
            y = (x + add_other).tanh()
            return y, {"add": ops.Add.Saved(), "act": ops.Tanh.Saved(y=y)} if self.calls < 2 else {}

    model, x = sf.Sequential(ops.Fork("r"), ops.Scale(2.0), ops.Add("r"), ops.Tanh(), fusions=(AddTanh,)), tensor(3, 4)
    expected = model(x)
    with pytest.warns(FallbackWarning, match="AddTanh"):
        assert torch.equal(model(x), expected)


class Flat(sf.UnfusedOperation):
    """y = 2 x^2; its backward requires contiguous tensors."""

    layout = "contig"

    class Saved(sf.Saved):
        x: Tensor

    def reference(self, x: Tensor) -> Tensor:
        return 2 * x * x

    def fwd(self, x: Tensor) -> Any:
        return 2 * x * x, self.Saved(x=x)

    def bwd(self, dy: Tensor, saved: Any) -> Any:
        return (4 * dy.view(-1) * saved.x.view(-1)).view(dy.shape), {}


class FlatTanh(sf.ForwardFusion):
    flat: Flat
    act: ops.Tanh
    layout = "any"
    fwd = stepwise


def test_records_are_made_fit_for_an_operation_too() -> None:
    model, x = sf.Sequential(Flat(), ops.Tanh(), fusions=(FlatTanh,)), tensor(4, 3).detach().t().requires_grad_()
    assert fused_names(model.plan(x))[0] == ["FlatTanh"]
    model(x).sum().backward()
    (expected,) = torch.autograd.grad((2 * x * x).tanh().sum(), x)
    torch.testing.assert_close(x.grad, expected)


HALVES: list[bool] = []


class Pair(sf.UnfusedOperation):
    """y = x^2, which saves x twice."""

    class Saved(sf.Saved):
        halves: tuple[Tensor, ...]

    def reference(self, x: Tensor) -> Tensor:
        return x * x

    def fwd(self, x: Tensor) -> Any:
        return x * x, self.Saved(halves=(x, x))

    def bwd(self, dy: Tensor, saved: Any) -> Any:
        return dy * (saved.halves[0] + saved.halves[1]), {}


class PairTanhBackward(sf.BackwardFusion):
    pair: Pair
    act: ops.Tanh
    layout = "contig"

    def bwd(self, dy: Tensor, *, pair: Any, act: Any) -> Any:
        HALVES.extend(half.is_contiguous() for half in pair.halves)
        return dy * (1 - act.y * act.y) * (pair.halves[0] + pair.halves[1]), {}


def test_tensors_in_tuples_are_made_fit_for_a_fusion() -> None:
    HALVES.clear()
    model, x = (
        sf.Sequential(Pair(), ops.Tanh(), fusions=(PairTanhBackward,)),
        tensor(4, 3).detach().t().requires_grad_(),
    )
    model(x).sum().backward()
    assert HALVES == [True, True]
    (expected,) = torch.autograd.grad((x * x).tanh().sum(), x)
    torch.testing.assert_close(x.grad, expected)


def test_plans_that_are_printed_say_nothing_of_real_runs() -> None:
    class Fails(BiasGeLUForward):
        failing = False

        def fwd(self, x: Tensor) -> Any:
            if type(x) is not Tensor or self.failing:
                raise RuntimeError("no kernel")
            return super().fwd(x)

    model, x = sf.Sequential(ops.Bias(4), ops.GeLU(), fusions=(Fails,)), tensor(3, 4)
    model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        str(model.plan(x))
    Fails.failing = True
    with pytest.warns(FallbackWarning, match="no kernel"):
        model(x)


class EmitTanhMaybe(sf.ForwardFusion):
    """Declares an output of a slot that may be absent."""

    emit: Emit | None
    act: ops.Tanh
    outputs = ("emit_aux",)

    def requires(self, env: sf.Env) -> sf.Requirements:
        yield not env.grad or self.emit is None, "made for this test"

    def saves(self, env: sf.Env) -> Any:
        return sf.Savings(launches=1)

    def fwd(self, x: Tensor) -> Any:
        made: dict[str, Tensor] = {}
        saved: dict[str, Any] = {}
        if self.emit is not None:
            made["emit_aux"], saved["emit"], x = x.cos(), Emit.Saved(x=x), x.sin()
        y = x.tanh()
        return y, made, {**saved, "act": ops.Tanh.Saved(y=y)}


@pytest.mark.filterwarnings("error::seqfuse.FallbackWarning")
@pytest.mark.parametrize("present", [True, False])
def test_the_output_of_an_absent_slot_is_an_empty_dictionary(present: bool) -> None:
    model = sf.Sequential(*[Emit()] * present, ops.Tanh(), fusions=(EmitTanhMaybe,))
    x = tensor(3, 4)
    with torch.set_grad_enabled(not present):
        for _ in range(2):
            got = model(x)
        assert fused_names(model.plan(x))[0] == ["EmitTanhMaybe"]
        with sf.fusing(False):
            expected = model(x)
    torch.testing.assert_close(got, expected)


class OwnReLU(ops.ReLU):
    """A forward of its own."""

    ran: ClassVar[list[None]] = []

    def fwd(self, x: Tensor) -> Any:
        self.ran.append(None)
        return super().fwd(x)


def test_a_subclass_of_an_activation_runs_its_own_passes_where_it_stands_alone() -> None:
    OwnReLU.ran.clear()
    for model in (OwnReLU(), sf.Sequential(nn.Identity(), OwnReLU(), nn.Identity())):
        model(tensor(3, 5))
        model(tensor(3, 5))
    assert len(OwnReLU.ran) == 4


def test_an_error_of_an_activation_that_stands_alone_says_where() -> None:
    model = sf.Sequential(nn.Identity(), ops.GeLU(), nn.Identity())
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            model(torch.ones(3, 5, dtype=torch.int64))
        assert caught.value.__notes__ == ["in operation GeLU at position 1"]
