"""Only needed gradients are computed, and only the tensors that they read are saved: both are counted."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.saved import always_saved, kind_of
from seqfuse.testing import check_fusion
from tests.fuser.fusions import (
    BY_NAME,
    PAIR,
    LinearBiasGeLUBackward,
    LinearBiasGeLUForward,
    LinearBiasGeLUJoint,
    assert_exact,
    fused_names,
    randomized,
    run,
    tensor,
)
from tests.fuser.kit import PlainResidual
from tests.selection import few_cases as few_cases
from tests.watching import Calls, bytes_of, saving

GEMM = ("mm", "addmm", "bmm", "matmul", "linear")
ROWS = 7
FLOAT = 4


def masks(names: Sequence[str]) -> list[frozenset[str]]:
    """Every subset of the gradients."""
    return [frozenset(some) for size in range(len(names) + 1) for some in itertools.combinations(names, size)]


def named(mask: frozenset[str]) -> str:
    return "+".join(sorted(mask)) or "nothing"


def want(model: nn.Module, x: Tensor, mask: frozenset[str]) -> None:
    x.requires_grad_("x" in mask)
    for name, p in model.named_parameters():
        p.requires_grad_(name in mask)


def counted(model: nn.Module, x: Tensor) -> tuple[dict[str, Tensor | None], Calls, int]:
    """Results of a run, the ATen calls of its backward, and the bytes saved for it."""
    with saving() as kept:
        y = model(x)
    wanted = {"x": x, **dict(model.named_parameters())}
    keys = [k for k, t in wanted.items() if t.requires_grad]
    results: dict[str, Tensor | None] = {"y": y.detach()}
    with Calls() as calls:
        if y.requires_grad:
            dy = tensor(*y.shape, seed=9, grad=False)
            results |= dict(zip(keys, torch.autograd.grad(y, [wanted[k] for k in keys], dy), strict=True))
    return results, calls, bytes_of(kept, model)


LAYERS = ("x", "0.weight", "0.bias", "2.weight", "2.bias")


def two_layers() -> tuple[sf.Sequential, nn.Sequential]:
    mine = randomized(sf.Sequential(ops.Linear(5, 4), ops.ReLU(), ops.Linear(4, 3), fusions=()))
    its = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    its.load_state_dict(mine.state_dict())
    return mine, its


@pytest.mark.parametrize("fusions", [(), PAIR], ids=["unfused", "fused"])
@pytest.mark.parametrize("mask", masks(LAYERS), ids=named)
def test_two_layers_run_the_wanted_products_and_keep_the_wanted_tensors(mask: frozenset[str], fusions: Any) -> None:
    mine, its = two_layers()
    mine.fusions = fusions
    x, z = tensor(ROWS, 5), tensor(ROWS, 5)
    want(mine, x, mask), want(its, z, mask)
    got, calls, kept = counted(mine, x)
    expected, _, _ = counted(its, z)
    torch.testing.assert_close(got, expected)

    before_second = mask & {"x", "0.weight", "0.bias"}
    products = ("x" in mask) + ("0.weight" in mask) + ("2.weight" in mask) + bool(before_second)
    assert calls.count(*GEMM) == products
    if not fusions:
        sums = ("0.bias" in mask) + ("2.bias" in mask)
        assert calls.count("sum") == sums
        assert calls.count("threshold_backward") == bool(before_second)
    # The first GEMM's input is x; the second's is the output of ReLU, from which ReLU's backward reads its sign.
    assert kept == FLOAT * ROWS * (5 * ("0.weight" in mask) + 4 * ("2.weight" in mask or bool(before_second)))


FUSED_LAYER = ("x", "0.weight", "0.bias")
COVERS: dict[str, tuple[type, ...]] = {
    "unfused": (),
    "forward": (LinearBiasGeLUForward,),
    "backward": (LinearBiasGeLUBackward,),
    "both": (LinearBiasGeLUForward, LinearBiasGeLUBackward),
    "joint": (LinearBiasGeLUJoint,),
}


@pytest.mark.parametrize("rules", COVERS.values(), ids=COVERS.keys())
@pytest.mark.parametrize("mask", masks(FUSED_LAYER), ids=named)
def test_a_fused_layer_computes_and_keeps_no_more_than_the_unfused_one(
    mask: frozenset[str], rules: tuple[type, ...]
) -> None:
    model = randomized(sf.Sequential(ops.Linear(5, 4), ops.GeLU(), fusions=rules))
    its = nn.Sequential(nn.Linear(5, 4), nn.GELU())
    x = tensor(ROWS, 5)
    want(model, x, mask)
    with sf.fusing(on_error="raise"):
        got, calls, kept = counted(model, x)
        names = fused_names(model.plan(x))
    assert bool(names[0]) == any(issubclass(r, sf.ForwardFusion | sf.JointFusion) for r in rules)
    assert calls.count(*GEMM) == ("x" in mask) + ("0.weight" in mask)
    assert kept == FLOAT * ROWS * (5 * ("0.weight" in mask) + 4 * bool(mask))
    its.load_state_dict(model.state_dict())
    z = tensor(ROWS, 5)
    want(its, z, mask)
    expected, _, _ = counted(its, z)
    torch.testing.assert_close(got, expected)


def test_a_fused_backward_is_told_what_is_wanted() -> None:
    told: list[frozenset[str]] = []

    class Told(LinearBiasGeLUBackward):
        def bwd(self, dy: Tensor, *, linear: Any, bias: Any, act: Any, needs: frozenset[str]) -> Any:
            told.append(needs)
            return super().bwd(dy, linear=linear, bias=bias, act=act, needs=needs)

    model = randomized(sf.Sequential(ops.Linear(5, 4), ops.GeLU(), fusions=(Told,)))
    for mask in masks(FUSED_LAYER):
        x = tensor(ROWS, 5)
        want(model, x, mask)
        run(model, x)
        if mask & {"x", "0.weight"}:  # with only the bias the GEMM needs no gradient and is skipped
            names = {"x": "x", "0.weight": "linear.weight", "0.bias": "bias.bias"}
            assert told.pop() == {names[m] for m in mask}
    assert told == []


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("rules", COVERS.values(), ids=COVERS.keys())
def test_nothing_is_kept_where_no_gradient_is_recorded(guard: Any, rules: tuple[type, ...]) -> None:
    model = randomized(sf.Sequential(ops.Linear(5, 4), ops.GeLU(), ops.LayerNorm(4), fusions=rules))
    x = tensor(ROWS, 5)
    with saving() as packed:
        model(x)
        assert packed
        packed.clear()
        with guard():
            y = model(x)
    assert packed == []
    assert y.grad_fn is None


def test_nothing_is_kept_before_the_first_gradient_that_is_wanted() -> None:
    model = randomized(
        sf.Sequential(
            *(op for _ in range(3) for op in (ops.Linear(5, 5), ops.GeLU(), ops.LayerNorm(5))), ops.Linear(5, 3)
        )
    )
    x = tensor(ROWS, 5, grad=False)
    model.requires_grad_(False)
    model[9].weight.requires_grad_(True)
    with saving() as kept:
        y = model(x)
    assert bytes_of(kept, model) == FLOAT * ROWS * 5
    with Calls() as calls:
        y.sum().backward()
    assert calls.count(*GEMM) == 1
    assert calls.count("gelu_backward", "native_layer_norm_backward") == 0


RESIDUAL = ("x", "0.weight", "1.0.weight", "2.weight")


@pytest.mark.parametrize("mask", masks(RESIDUAL), ids=named)
def test_a_residual_stream_carries_gradients_only_where_they_are_wanted(mask: frozenset[str]) -> None:
    def build(kit: Any, residual: Any) -> Any:
        return (kit.Linear(5, 5, bias=False), residual, kit.Linear(5, 3, bias=False))

    mine = randomized(sf.Sequential(*build(ops, ops.Residual(ops.Linear(5, 5, bias=False), ops.Tanh())), fusions=()))
    its = nn.Sequential(*build(nn, PlainResidual(nn.Linear(5, 5, bias=False), nn.Tanh())))
    its.load_state_dict(mine.state_dict())
    x, z = tensor(ROWS, 5), tensor(ROWS, 5)
    want(mine, x, mask), want(its, z, mask)
    got, calls, _ = counted(mine, x)
    expected, _, _ = counted(its, z)
    torch.testing.assert_close(got, expected)
    first = bool(mask & {"x", "0.weight"})
    # Into x, each weight, through the branch, and into the block from the last layer.
    products = ("x" in mask) + len(mask - {"x"}) + first + bool(mask & {"x", "0.weight", "1.0.weight"})
    assert calls.count(*GEMM) == products


def test_an_extra_input_that_wants_no_gradient_gets_none_computed() -> None:
    model = randomized(sf.Sequential(ops.Linear(5, 4), ops.Add("r"), ops.Linear(4, 3), fusions=()))
    for wanted in (False, True):
        for p in model.parameters():
            p.requires_grad_(False)
        r = tensor(ROWS, 4, grad=wanted)
        y = model(tensor(ROWS, 5, grad=False), r=r)
        assert y.requires_grad == wanted
        if wanted:
            with Calls() as calls:
                y.sum().backward()
            assert calls.count(*GEMM) == 1
            assert r.grad is not None


def test_a_field_of_a_base_class_is_saved_for_the_same_gradients() -> None:
    class Longer(ops.Linear.Saved):
        more: float

    assert Longer.kept(frozenset({"x"})) == ("weight", "more")
    assert Longer.kept(frozenset({"weight"})) == ("x", "more")


def test_a_field_of_a_base_class_is_saved_as_there() -> None:
    class Base(sf.Saved):
        y: Tensor
        parts: tuple[Tensor, ...]
        rate: float

    class Longer(Base):
        more: Tensor

    assert [kind_of(Longer, name) for name in Longer.fields] == ["tensor", "tuple", "data", "tensor"]
    assert always_saved(Longer) == ("y",)


class Mix(sf.UnfusedOperation):
    """y = x + 3 r; notes which gradients its backward must compute."""

    class Saved(sf.Saved):
        pass

    def __init__(self) -> None:
        super().__init__()
        self.computed: list[frozenset[str]] = []

    def reference(self, x: Tensor, *, r: Tensor) -> Tensor:
        return x + 3 * r

    def fwd(self, x: Tensor, *, r: Tensor) -> Any:
        return self.reference(x, r=r), self.Saved()

    def bwd(self, dy: Tensor, saved: sf.Saved, *, needs: frozenset[str]) -> Any:
        self.computed.append(needs)
        return (dy.clone() if "x" in needs else None), {"r": 3 * dy if "r" in needs else None}


def test_a_channel_gets_a_gradient_only_where_it_leads_to_what_is_asked_for() -> None:
    mix = Mix()
    model = randomized(sf.Sequential(ops.Linear(5, 5), ops.Fork("r"), ops.Linear(5, 5), mix, fusions=()))
    y = model(tensor(ROWS, 5, grad=False))
    for asked in (model[2].weight, model[0].weight):
        torch.autograd.grad(y.sum(), [asked], retain_graph=True)
    assert mix.computed == [{"x"}, {"x", "r"}]


def test_what_the_loss_does_not_reach_is_not_computed() -> None:
    model = randomized(sf.Sequential(ops.Linear(5, 4), ops.Fork("r"), ops.Linear(4, 4), ops.GeLU(), ops.Linear(4, 3)))
    x = tensor(ROWS, 5)
    _, r = model(x)
    with Calls() as calls:
        got = torch.autograd.grad(r.sum(), [x, *model.parameters()], allow_unused=True)
    assert [g is None for g in got] == [False, False, False, True, True, True, True]
    assert calls.count(*GEMM) == 2
    assert calls.count("gelu_backward") == 0


def test_an_infinite_activation_the_loss_does_not_reach_gives_no_nan() -> None:
    model = sf.Sequential(ops.Fork("r"), ops.Linear(5, 3))
    with torch.no_grad():
        model[1].weight.fill_(float("inf"))
    x = tensor(ROWS, 5)
    _, r = model(x)
    r.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.parametrize("name", ["linear_gelu", "whole_branch", "fan_out", "border", "public_output"])
def test_gradients_of_a_subset_are_those_of_the_whole(name: str) -> None:
    case = BY_NAME[name]
    model = randomized(sf.Sequential(*case.make(), fusions=case.fusions))
    x, channels = tensor(ROWS, 5), {c: tensor(ROWS, 5, seed=20) for c in case.channels}
    whole = run(model, x, **channels)
    names = ["x", *case.channels, *dict(model.named_parameters())]
    for mask in masks(names):
        want(model, x, mask)
        for c, t in channels.items():
            t.requires_grad_(c in mask)
        got = run(model, x, **channels)
        assert got.keys() == {k for k in whole if not k.startswith("d_") or k[2:] in mask}
        assert_exact(got, {k: v for k, v in whole.items() if k in got})


def test_the_gradient_of_a_channel_alone_is_computed() -> None:
    model = randomized(sf.Sequential(ops.Linear(5, 4), ops.Add("r"), ops.Tanh(), memory="lean"))
    r = tensor(ROWS, 4)
    y = model(tensor(ROWS, 5), r=r)
    (alone,) = torch.autograd.grad(y.sum(), [r], retain_graph=True)
    y.sum().backward()
    assert_exact({"r": alone}, {"r": r.grad})


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_a_plan_wants_gradients_behind_a_barrier_only_where_something_before_it_is_trained(frozen: bool) -> None:
    model = sf.Sequential(ops.Linear(5, 5, bias=False), nn.Softplus(), ops.GeLU()).requires_grad_(not frozen)
    for plan in (model.plan(tensor(7, 5, grad=False)), model.plan()):
        assert plan.needs[-1] == ({"x"} if not frozen else set())


class ScaleDropout(sf.ForwardFusion):
    """Saves nothing itself: factor, p and seed determine what both operations save."""

    scale: ops.Scale
    dropout: ops.Dropout

    def fwd(self, x: Tensor, *, dropout_seed: Tensor | None = None) -> tuple[Tensor, dict[str, Any]]:
        return self.dropout.fwd(x * self.scale.factor, seed=dropout_seed)[0], {}


@pytest.mark.usefixtures("few_cases")
def test_the_engine_saves_what_follows_from_configuration_and_seed():
    check_fusion(ScaleDropout, tensor(5, 6), ops.Scale(3.0), ops.Dropout(0.4))
    model = sf.Sequential(ops.Scale(3.0), ops.Dropout(0.4), fusions=(ScaleDropout,))
    results: list[Tensor] = []
    for fuse in (True, False):
        model[0].factor, model[1].p = 3.0, 0.4
        torch.manual_seed(0)
        x = tensor(50, 6).requires_grad_()
        with sf.fusing(fuse):
            assert model.plan(x).count("ScaleDropout") == fuse
            y = model(x)
        model[0].factor, model[1].p = 5.0, 0.1  # between the passes
        y.sum().backward()
        results += [y, x.grad]
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])


class BiasGeLUTold(sf.ForwardFusion):
    """Returns only y where nothing is needed."""

    bias: ops.Bias
    act: ops.GeLU

    def fwd(self, x: Tensor, *, needs: frozenset[str]) -> Any:
        z = x + self.bias.bias
        y = torch.nn.functional.gelu(z, approximate=self.act.approximate)
        return (y, {"act": ops.GeLU.Saved(x=z)}) if needs else y


class BiasGeLUDeaf(BiasGeLUTold):
    """Returns its saved tensors in any case."""

    def fwd(self, x: Tensor, *, needs: frozenset[str]) -> Any:
        return super().fwd(x, needs=frozenset({"x"}))


@pytest.mark.usefixtures("few_cases")
def test_a_forward_fusion_that_is_told_that_nothing_is_needed_returns_y_alone():
    check_fusion(BiasGeLUTold, tensor(5, 6))
    model = sf.Sequential(ops.Bias(6), ops.GeLU(), fusions=(BiasGeLUTold,))
    x = tensor(5, 6, grad=False)
    trained = model(x)
    with torch.no_grad():
        (step,) = model.plan(x).forward
        assert (step.name, step.inference) == ("BiasGeLUTold", True)
        assert torch.equal(model(x), trained)
    model.requires_grad_(False)
    assert torch.equal(model(x), trained)


def test_one_that_returns_more_there_is_named():
    model = sf.Sequential(ops.Bias(6), ops.GeLU(), fusions=(BiasGeLUDeaf,))
    model(tensor(5, 6))
    with torch.no_grad(), pytest.raises(sf.PluginError, match=r"fwd must return y, not \(Tensor, dict\)"):
        model(tensor(5, 6))
