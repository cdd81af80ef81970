"""Unreferenced objects are freed at once, without garbage collection."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.run import fuser as run
from seqfuse.run import regions as op_list
from tests.fuser.fusions import PAIR, BiasReLU, BiasReLUBack, BiasTanhInference, tensor


class BrokenBiasReLU(BiasReLU):
    def fwd(self, x: Tensor) -> Any:
        raise RuntimeError("broken")


class Later:
    """Fails in the second call."""

    calls = 0

    @classmethod
    def call(cls) -> None:
        cls.calls += 1
        if cls.calls == 2:
            raise RuntimeError("broken")


class LaterForward(Later, BiasReLU):
    def fwd(self, x: Tensor) -> Any:
        self.call()
        return super().fwd(x)


class LaterBackward(Later, BiasReLUBack):
    def bwd(self, dy: Tensor, *, bias: sf.Saved, act: Any) -> Any:
        self.call()
        return super().bwd(dy, bias=bias, act=act)


class LaterInference(Later, BiasTanhInference):
    def fwd(self, x: Tensor) -> Tensor:
        self.call()
        return super().fwd(x)


class BrokenBiasReLUBack(BiasReLUBack):
    def bwd(self, dy: Tensor, *, bias: sf.Saved, act: Any) -> Any:
        raise RuntimeError("broken")


@pytest.fixture(autouse=True)
def no_collection() -> Generator[None]:
    gc.disable()
    yield
    gc.enable()


def plain() -> sf.Sequential:
    return sf.Sequential(ops.Linear(5, 4), ops.ReLU(), ops.Linear(4, 5))


def fused() -> sf.Sequential:
    return sf.Sequential(ops.Linear(5, 4), ops.ReLU(), ops.Linear(4, 5), fusions=PAIR)


def broken() -> sf.Sequential:
    fusions = BrokenBiasReLU, BrokenBiasReLUBack
    return sf.Sequential(ops.Linear(5, 4), ops.ReLU(), ops.Linear(4, 5), fusions=fusions)


def nested() -> sf.Sequential:
    inner = sf.Sequential(ops.LayerNorm(5), sf.Sequential(ops.Linear(5, 5), ops.Dropout(0.5)))
    return sf.Sequential(ops.Residual(inner, ops.GeLU()), nn.Linear(5, 5), ops.RMSNorm(5))


def uncalled(model: sf.Sequential) -> None:
    pass


def trained(model: sf.Sequential) -> None:
    model(tensor(3, 5)).sum().backward()


def cast(model: sf.Sequential) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        trained(model)
        trained(model)


def evaluated(model: sf.Sequential) -> None:
    model.eval()
    with torch.no_grad():
        model(tensor(3, 5))
    model(tensor(3, 5)).sum().backward()


def switched(model: sf.Sequential) -> None:
    trained(model)
    evaluated(model)
    model.train()
    trained(model)


def planned(model: sf.Sequential) -> None:
    model.plan(tensor(3, 5))
    trained(model)


def changed(model: sf.Sequential) -> None:
    trained(model)
    model.append(ops.Tanh())
    trained(model)


def copied(model: sf.Sequential) -> None:
    trained(model)
    trained(copy.deepcopy(model))
    trained(pickle.loads(pickle.dumps(model)))
    trained(copy.copy(model))


def alive(model: nn.Module) -> Callable[[], list[str]]:
    """Which of a model, its modules and its parameters are still alive."""
    named: list[tuple[str, Any]] = [*model.named_modules(), *model.named_parameters()]
    held = {name: weakref.ref(value) for name, value in named}
    return lambda: [name for name, ref in held.items() if ref() is not None]


@pytest.mark.filterwarnings("ignore::seqfuse.FallbackWarning")
@pytest.mark.parametrize(
    ("make", "use"),
    [
        (plain, uncalled), (plain, evaluated), (plain, cast), (plain, changed), (fused, trained), (fused, planned),
        (fused, copied), (broken, trained), (nested, planned), (nested, switched),
    ],
)  # fmt: skip
def test_a_model_is_freed_with_its_parameters_when_nobody_holds_it(
    make: Callable[[], sf.Sequential], use: Callable[[sf.Sequential], None]
) -> None:
    model = make()
    left = alive(model)
    use(model)
    assert left()
    del model
    assert left() == []


@pytest.mark.filterwarnings("ignore::seqfuse.FallbackWarning")
@pytest.mark.parametrize("fusion", [LaterForward, LaterBackward, LaterInference])
def test_a_call_in_which_a_fusion_failed_leaves_nothing_behind(fusion: Any) -> None:
    fusion.calls = 0
    (act,) = fusion.slots[1].types
    model = sf.Sequential(ops.Linear(5, 4), act(), ops.Linear(4, 5), fusions=(fusion,))
    for _ in range(3):
        x = tensor(3, 5)
        if fusion is LaterInference:
            with torch.no_grad():
                y = model(x)
        else:
            y = model(x)
            y.sum().backward()
        held = weakref.ref(x), weakref.ref(y)
        del x, y
        assert [t() for t in held] == [None, None]
    assert fusion.calls == 3
    left = alive(model)
    del model
    assert left() == []


def test_an_operation_that_was_not_called_is_freed_though_it_has_a_member() -> None:
    linear = ops.Linear(5, 4)
    left = alive(linear)
    del linear
    assert left() == []


def test_a_graph_keeps_what_its_backward_needs_and_no_more() -> None:
    model, x = fused(), tensor(3, 5)
    expected = torch.autograd.grad(model(x).sum(), x)[0]
    root, left, y = weakref.ref(model), alive(model), model(x)
    del model
    assert root() is None
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, expected)
    del y
    assert left() == []


@pytest.mark.filterwarnings("ignore::seqfuse.FallbackWarning")
@pytest.mark.parametrize("fusions", [(), (BrokenBiasReLU,)], ids=["unfused", "falling back"])
def test_a_graph_keeps_no_bias_that_a_call_was_given(fusions: Any) -> None:
    model = sf.Sequential(ops.Linear(5, 4), ops.ReLU(), ops.Linear(4, 5), fusions=fusions, memory="lean")
    given = {name: 2 * p for name, p in model.named_parameters()}
    bias, y = weakref.ref(given["0.bias"]), torch.func.functional_call(model, given, (tensor(3, 5),))
    del given
    assert bias() is None
    y.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_channel_is_let_go_where_nothing_reads_it_any_more() -> None:
    seen: list[weakref.ref[Tensor]] = []

    class Watch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            left.append([ref() is not None for ref in seen])
            seen.append(weakref.ref(x))
            return x.clone()

    model = sf.Sequential(ops.Scale(2.0), ops.Fork("skip"), Watch(), ops.Add("skip"), Watch(), ops.Tanh())
    for _ in range(2):
        left: list[list[bool]] = []
        seen.clear()
        with torch.no_grad():
            model(tensor(3, 5))
        assert left == [[], [False]]


def test_a_channel_is_let_go_behind_the_segment_that_reads_it_last() -> None:
    class Watch(ops.Identity):
        def reference(self, x: Tensor) -> Tensor:
            left.append([ref() is not None for ref in seen])
            seen.append(weakref.ref(x))
            return x.clone()

        def fwd(self, x: Tensor) -> Any:
            return self.reference(x), self.Saved()

    def some() -> list[nn.Module]:
        return [ops.Bias(5) for _ in range(9)]

    seen, left = list[weakref.ref[Tensor]](), list[list[bool]]()
    model = sf.Sequential(
        ops.Bias(5), ops.Fork("skip"), Watch(), *some(), ops.Add("skip"), *some(), Watch(), *some(), fusions=()
    )
    with torch.no_grad():
        model(tensor(3, 5))
    assert len(model.plan(tensor(3, 5)).segments) > 2
    assert left == [[], [False]]


def test_a_plan_holds_its_model_to_measure_its_memory() -> None:
    model, x = fused(), tensor(3, 5)
    expected, plan, root = str(model.plan(x)), model.plan(x), weakref.ref(model)
    del model
    assert root() is not None
    assert "saved for backward" in expected
    assert str(plan) == expected


def test_a_fuser_of_its_own_holds_the_list() -> None:
    fuser = sf.Fuser(fused())
    assert fuser(tensor(3, 5)).shape == (3, 5)
    left = alive(fuser.root)
    del fuser
    assert left() == []


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        ((ops.GeLU,), [False]),
        ((lambda: ops.Fork("r"), ops.Tanh, Ellipsis, lambda: ops.Add("r"), ops.Tanh), [True, False]),
    ],
    ids=["saved by an operation", "a channel"],
)
def test_without_gradients_a_tensor_is_let_go_behind_its_last_reader(between: Any, expected: list[bool]) -> None:
    made: list[Any] = []
    alive: list[bool] = []

    class Doubled(sf.Pointwise):
        def reference(self, x: Tensor) -> Tensor:
            y = 2 * x
            made.append(weakref.ref(y))
            return y

    class Looked(sf.Pointwise):
        def reference(self, x: Tensor) -> Tensor:
            alive.append(made[-1]() is not None)
            return x + 1

    inside = [Looked() if make is Ellipsis else make() for make in between]
    model = sf.Sequential(Doubled(), *inside, Looked(), fusions=())
    with torch.no_grad():
        for _ in range(3):  # the first call is interpreted
            model(tensor(4, 5))
    assert alive == expected * 3


def test_plans_for_many_shapes_are_let_go_once_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_list, "KEPT_LOWERINGS", 3)
    model = sf.Sequential(ops.Tanh(), ops.GeLU())
    kept: list[int] = []
    for rows in (1, 2, 4, 8, 16, 32, 64):  # each with its own plan
        model(tensor(rows, 5))
        (region,) = model._fuser.op_list().parts
        kept += [len(region.lowerings), len(region.states)]
    assert max(kept) == 3


def test_sequences_as_they_were_in_other_modes_are_let_go_once_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "KEPT_LISTS", 3)
    model, x = sf.Sequential(*(ops.Dropout(0.5) for _ in range(3))), tensor(4, 5)
    for mode in range(8):
        for i, dropout in enumerate(model):
            dropout.train(bool(mode >> i & 1))
        model(x)
        assert len(model._fuser._op_lists) <= 3
    assert len(model._fuser._op_lists) == 3
