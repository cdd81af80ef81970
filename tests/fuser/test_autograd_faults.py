"""Autograd under unusual uses of a graph: writes into saved tensors, frozen parameters, hooks, inspection, unused
outputs."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import graph

import seqfuse as sf
from seqfuse import ops
from seqfuse.errors import StateError
from seqfuse.testing import Untouched, assert_distinct_storages
from tests.watching import saving

from .fusions import KINDS, BiasTanhJoint
from .kit import assert_same, draw, mlp, passes, plain_mlp, randomize

COVERS = pytest.mark.parametrize("fusions", [(), *((k,) for k in KINDS)], ids=lambda f: f[0].__name__ if f else "none")


@COVERS
def test_every_gradient_is_that_of_the_torch_twin(fusions: Any):
    model = mlp(fusions=fusions)
    for shape in [(3, 5), (2, 3, 5), (5,), (1, 5)]:
        assert_same(passes(model, draw(*shape)), passes(plain_mlp(model), draw(*shape)))


# Writes between forward and backward ----------------------------------------------------------------------------------


@COVERS
@pytest.mark.parametrize("written", ["input", "weight", "output"])
def test_a_saved_tensor_written_before_backward_is_an_error(fusions: Any, written: str):
    model = sf.Sequential(ops.Linear(5, 7), ops.Tanh(), fusions=fusions).double()
    model.append(ops.Linear(7, 3).double())
    model.append(ops.Tanh())
    x = draw(3, 5).requires_grad_()
    y = model(x)
    with torch.no_grad():
        if written == "input":
            x.add_(1)
        elif written == "weight":
            model[2].weight.mul_(2)
        else:
            y.mul_(2)
    if written == "output" and BiasTanhJoint in fusions:
        y.sum().backward()  # this fusion saves its input, so its output may be written to
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_intermediate_reached_through_a_public_channel_is_guarded_too():
    model = sf.Sequential(ops.Linear(5, 7), ops.Tanh(), ops.Fork("middle"), ops.Linear(7, 3)).double()
    y, middle = model(draw(3, 5).requires_grad_())
    with torch.no_grad():
        middle.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_no_gradient_reads_may_be_written_between_the_passes():
    model = sf.Sequential(ops.Linear(5, 7), ops.Tanh(), ops.Linear(7, 3)).double()
    x = draw(3, 5)
    want = passes(model, x)
    x = x.requires_grad_()
    model[0].weight.requires_grad_(False)
    y = model(x)
    with torch.no_grad():
        x.mul_(2)  # it is read only for the gradient of the frozen weight
        model[0].bias.mul_(2)  # nothing reads a bias
    y.backward(draw(3, 3, seed=99))
    assert model[0].weight.grad is None
    torch.testing.assert_close(x.grad, want["d_x"])
    torch.testing.assert_close(model[2].weight.grad, want["d_2.weight"])


@COVERS
def test_inputs_parameters_and_incoming_gradients_are_never_written(fusions: Any):
    model = mlp(fusions=fusions, dropout=0.5)
    x, dy = draw(3, 5).requires_grad_(), draw(3, 3, seed=2)
    with Untouched({"x": x, "dy": dy, **dict(model.named_parameters())}):
        y = model(x)
        grads = torch.autograd.grad(y, [x, *model.parameters()], dy)
    with Untouched({"y": y}):
        model(x).backward(dy)
    assert_distinct_storages(list(grads), [x, dy, y, *model.parameters()])


@pytest.mark.parametrize("op", [ops.Identity, lambda: ops.Dropout(0.0), ops.Tanh], ids=["Identity", "Dropout", "Tanh"])
def test_gradients_given_to_a_user_are_tensors_of_their_own(op: Any):
    model = sf.Sequential(op(), ops.Add("side"))
    x, side, dy = draw(3, 5).requires_grad_(), draw(3, 5, seed=2).requires_grad_(), draw(3, 5, seed=3)
    kept = dy.clone()
    y = model(x, side=side)
    y.backward(dy)
    assert_distinct_storages({"x.grad": x.grad, "side.grad": side.grad}, {"dy": dy, "y": y, "x": x})
    with torch.no_grad():
        x.grad.zero_()
    assert torch.equal(side.grad, kept)
    assert torch.equal(dy, kept)


# Changes between forward and backward ---------------------------------------------------------------------------------


@COVERS
def test_a_list_changed_after_the_forward_keeps_the_backward_it_had(fusions: Any):
    model, x = mlp(fusions=fusions), draw(3, 5)
    want = passes(model, x)
    leaf, parameters = x.clone().requires_grad_(), dict(model.named_parameters())
    y = model(leaf)
    model[2] = ops.SiLU()
    model[1].weight = nn.Parameter(draw(7, 5))
    model.fusions = ()
    del model[0]
    model.requires_grad_(False)
    del model
    gc.collect()
    y.backward(draw(3, 3, seed=99))
    torch.testing.assert_close(leaf.grad, want["d_x"])
    torch.testing.assert_close(parameters["1.weight"].grad, want["d_1.weight"])
    torch.testing.assert_close(parameters["0.weight"].grad, want["d_0.weight"])


# Saved-tensor hooks ---------------------------------------------------------------------------------------------------


class Reachable:
    """Tensors that can be reached from an object through attributes, containers and closures."""

    def __init__(self, root: Any) -> None:
        self.found: list[Tensor] = []
        self._seen: set[int] = set()
        self._walk(root, 0)

    def _walk(self, thing: Any, depth: int) -> None:
        if id(thing) in self._seen or depth > 6:
            return
        self._seen.add(id(thing))
        if isinstance(thing, Tensor):
            self.found.append(thing)
        elif isinstance(thing, dict):
            for value in thing.values():
                self._walk(value, depth + 1)
        elif isinstance(thing, (list, tuple, set)):
            for value in thing:
                self._walk(value, depth + 1)


@COVERS
def test_saved_tensor_hooks_see_every_saved_tensor(fusions: Any):
    model = sf.Sequential(
        ops.LayerNorm(5), ops.Linear(5, 7), ops.Tanh(), ops.Dropout(0.5), ops.Residual(ops.SiLU()), fusions=fusions
    )
    randomize(model.double())
    x, dy = draw(3, 5).requires_grad_(), draw(3, 7, seed=2)
    leaves = [x, *model.parameters()]
    torch.manual_seed(1)
    want = torch.autograd.grad(model(x), leaves, dy)
    packed: list[Tensor] = []
    unpacked: list[int] = []

    def pack(t: Tensor) -> tuple[int, Tensor]:
        packed.append(t)
        return len(packed) - 1, t.clone()

    def unpack(token: tuple[int, Tensor]) -> Tensor:
        unpacked.append(token[0])
        return token[1]

    torch.manual_seed(1)
    with graph.saved_tensors_hooks(pack, unpack):
        y = model(x)
    held = [t for t in Reachable(vars(y.grad_fn)).found if not isinstance(t, nn.Parameter)]
    assert held == [], "the node itself holds no tensor but parameters, as the nodes of their gradients do"
    count = len(packed)
    assert count >= 5
    found = torch.autograd.grad(y, leaves, dy)
    assert sorted(unpacked) == list(range(count))
    for a, b in zip(found, want, strict=True):
        assert torch.equal(a, b)


def test_a_tensor_that_several_operations_keep_is_saved_once():
    model = sf.Sequential(ops.Linear(5, 5), ops.Tanh(), ops.Linear(5, 5), ops.Tanh(), ops.Linear(5, 5)).double()
    with saving() as packed:
        model(draw(3, 5).requires_grad_())
    # x, three weights, and each tanh once, though the next GEMM saves it too
    assert len(packed) == 6
    assert len({t.untyped_storage().data_ptr() for t in packed}) == 6


def test_numbers_and_tuples_of_a_record_may_be_others_in_a_later_call():
    now: list[tuple[float, int, float | None]] = [(1.0, 1, None)]

    class Sum(sf.UnfusedOperation):
        """y = factor (count x + shift)"""

        class Saved(sf.Saved):
            parts: tuple[Tensor | None, ...]
            factor: float

        def reference(self, x: Tensor) -> Tensor:
            factor, count, shift = now[0]
            return factor * (count * x + (shift or 0.0))

        def fwd(self, x: Tensor) -> Any:
            factor, count, _ = now[0]
            return self.reference(x), self.Saved(parts=(None, *[x] * count), factor=factor)

        def bwd(self, dy: Tensor, saved: Any) -> Any:
            return saved.factor * sum(p is not None for p in saved.parts) * dy, {}

    model = sf.Sequential(Sum(), ops.Identity())
    calls = [(1.0, 1, None)] * 3 + [(2.0, 1, None), (1.0, 3, None), (1.0, 1, 2.0), (1.0, 2, None), (-0.0, 2, None)]
    for now[0] in calls * 2:
        x = draw(3, 5).requires_grad_()
        model(x).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, now[0][0] * now[0][1]))


def test_the_fields_of_a_record_with_a_number_and_a_tuple_are_saved_without_looking_for_them():
    model, x = sf.Sequential(ops.MergedLinear(8, (8, 4, 4)), ops.Attention(2, 1)), draw(2, 20, 8, dtype=torch.float32)
    passes = [model(x) for _ in range(3)]
    assert [y.grad_fn.kept[4] for y in passes] == [(), (), ()]
    grads = [torch.autograd.grad(y.square().sum(), tuple(model.parameters())) for y in passes]
    for later in grads[1:]:
        assert all(map(torch.equal, grads[0], later))


def test_what_the_hooks_change_is_what_the_backward_reads():
    model = sf.Sequential(ops.Tanh(), ops.Tanh()).double()
    x = draw(3, 5).requires_grad_()
    with graph.saved_tensors_hooks(lambda t: t, lambda t: torch.zeros_like(t)):
        y = model(x)
    y.backward(draw(3, 5, seed=2))
    assert torch.equal(x.grad, draw(3, 5, seed=2))  # 1 - 0 ** 2


@COVERS
def test_save_on_cpu_and_disabled_hooks_work(fusions: Any):
    model, x, dy = mlp(fusions=fusions), draw(3, 5), draw(3, 3, seed=99)
    want = passes(model, x)
    leaf = x.clone().requires_grad_()
    with graph.save_on_cpu():
        y = model(leaf)
    y.backward(dy)
    found = {"out": y.detach(), "d_x": leaf.grad, **{f"d_{n}": p.grad for n, p in model.named_parameters()}}
    assert_same(found, want, 0.0)
    with graph.disable_saved_tensors_hooks("no hooks here"):
        assert_same(passes(model, x), want, 0.0)


class Counted:
    """A hook that is neither a function nor hashable."""

    __hash__ = None

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, t: Tensor) -> Tensor:
        self.calls += 1
        return t.clone()


@pytest.mark.parametrize("make", [lambda: torch.Tensor.clone, Counted, lambda: torch.clone, lambda: Counted().__call__])
def test_any_callable_may_be_a_hook(make: Any):
    model, x = mlp(fusions=(BiasTanhJoint,)), draw(3, 5)
    want = passes(model, x)
    with graph.saved_tensors_hooks(make(), make()):
        assert_same(passes(model, x), want, 0.0)


def test_hooks_around_a_training_loop_see_what_is_saved_and_nothing_else():
    model, x = sf.Sequential(ops.Linear(5, 5), ops.Tanh()), torch.ones(3, 5)
    with saving() as seen:
        for _ in range(3):
            model(x)
    assert all(t.numel() for t in seen), "a mark of what ran is saved under checkpoints only"


# Dropped fields -------------------------------------------------------------------------------------------------------


class Careless(sf.UnfusedOperation):
    """y = x weight^T, whose backward reads a field that it declared for the other gradient only."""

    class Saved(sf.Saved):
        x: Tensor = sf.field(for_="weight")
        weight: Tensor = sf.field(for_="x")

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(draw(4, 5))

    def reference(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()

    def fwd(self, x: Tensor) -> Any:
        return self.reference(x), self.Saved(x=x, weight=self.weight)

    def bwd(self, dy: Tensor, saved: Any) -> Any:
        return dy @ saved.weight, {"weight": dy.t() @ saved.x}


@pytest.mark.parametrize("dropped", ["weight", "x"])
def test_reading_a_dropped_field_says_which_and_why(dropped: str):
    model = sf.Sequential(ops.Scale(2.0), Careless()).double()
    x = draw(3, 5)
    assert len(passes(model, x)) == 3
    if dropped == "x":
        model[1].weight.requires_grad_(False)
        y, reader = model(x.requires_grad_()), "weight"
    else:
        y, reader = model(x), "x"
    with pytest.raises(StateError, match=f"field '{dropped}' was dropped: only {reader} reads it") as caught:
        y.sum().backward()
    error = caught.value
    assert (error.code, error.operation, error.position) == ("SF502", "Careless", 1)
    assert error.hint is not None
    assert "needs" in error.hint


class CarelessScale(sf.BackwardFusion):
    linear: Careless
    scale: ops.Scale

    def bwd(self, dy: Tensor, *, linear: Any, scale: Any) -> Any:
        d = self.scale.factor * dy
        return d @ linear.weight, {"linear.weight": d.t() @ linear.x}


def test_reading_a_dropped_field_says_which_fusion_does():
    model = sf.Sequential(Careless(), ops.Scale(2.0), fusions=(CarelessScale,)).double()
    model[0].weight.requires_grad_(False)
    y = model(draw(3, 5).requires_grad_())
    with pytest.raises(StateError, match=r"'x' was dropped: .* not needed; read by CarelessScale"):
        y.sum().backward()


# Looking at the graph -------------------------------------------------------------------------------------------------


@COVERS
def test_anomaly_mode_changes_no_number(fusions: Any):
    model, x = mlp(fusions=fusions), draw(3, 5)
    want = passes(model, x)
    with torch.autograd.set_detect_anomaly(True):
        assert_same(passes(model, x), want, 0.0)


class Poisoned(sf.Pointwise):
    """y = x; its derivative is not a number."""

    def reference(self, x: Tensor) -> Tensor:
        return x * 1.0

    def bwd(self, dy: Tensor, saved: Any) -> Any:
        return dy * float("nan"), {}


@pytest.mark.filterwarnings("ignore:Error detected in Seqfuse")
def test_anomaly_mode_names_the_node_that_made_a_nan():
    model, x = sf.Sequential(ops.Tanh(), Poisoned()), draw(3, 5).requires_grad_()
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        y = model(x)
        with pytest.raises(RuntimeError, match=r"'Seqfuse.*' returned nan values in its"):
            y.sum().backward()


class Broken(sf.Pointwise):
    """y = x; its backward raises."""

    def reference(self, x: Tensor) -> Tensor:
        return x * 1.0

    def bwd(self, dy: Tensor, saved: Any) -> Any:
        raise ValueError("no backward today")


def test_an_error_in_a_backward_says_where_and_leaves_the_model_usable():
    model, x = sf.Sequential(ops.Linear(5, 5), Broken(), ops.Tanh()).double(), draw(3, 5)
    with pytest.raises(ValueError, match="no backward today") as caught:
        model(x).sum().backward()
    assert caught.value.__notes__ == ["in operation Broken at '1', position 2"]
    assert all(p.grad is None for p in model.parameters())
    model[1] = ops.Identity()
    assert passes(model, x)["d_0.weight"].abs().max() > 0


def test_the_node_has_a_readable_name_in_graphs_and_profiles():
    model, x = mlp(), draw(3, 5).requires_grad_()
    y = model(x)
    assert y.grad_fn.name() == "SeqfuseBackward"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(x).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert any("Seqfuse" in name for name in names)


def test_the_graph_can_be_walked():
    model, x = mlp(), draw(3, 5).requires_grad_()
    y = model(x)  # stays alive: with torch 2.11 a node in Python lives no longer than its tensor
    leaves = [fn.variable for fn, _ in y.grad_fn.next_functions if hasattr(fn, "variable")]
    assert {id(t) for t in leaves} == {id(t) for t in (x, *model.parameters())}


def test_tensor_hooks_inside_and_around_the_node_fire_once():
    model, x = mlp(), draw(3, 5).requires_grad_()
    counts = dict.fromkeys(["y", "x", "weight", "pre", "post"], 0)

    def count(name: str) -> Any:
        def hook(*_: Any) -> None:
            counts[name] += 1

        return hook

    y = model(x)
    y.register_hook(count("y"))
    x.register_hook(count("x"))
    model[1].weight.register_hook(count("weight"))
    y.grad_fn.register_prehook(count("pre"))
    y.grad_fn.register_hook(count("post"))
    y.sum().backward()
    assert counts == dict.fromkeys(counts, 1)


def test_inference_mode_saves_nothing_and_its_output_is_an_inference_tensor():
    model, x = mlp(fusions=KINDS), draw(3, 5)
    want = model(x).detach()
    with torch.inference_mode(), saving() as packed:
        y = model(x)
    assert y.is_inference()
    assert packed == []
    torch.testing.assert_close(y.clone(), want)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        sf.Sequential(ops.Linear(3, 2).double())(y)
