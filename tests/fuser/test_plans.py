"""Plans are made once per environment, and again when the sequence changes."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import seqfuse as sf
from seqfuse import ops
from seqfuse.run import code
from seqfuse.settings import fusing_now
from tests.alterations import Doubled

from .fusions import BiasTanhForward, BiasTanhJoint
from .kit import assert_same, counting_plans, draw, mlp, randomize


def test_batch_sizes_share_a_plan_per_power_of_two():
    model = mlp()
    with counting_plans() as first:
        for rows in range(1, 41):
            assert model(draw(rows, 5)).shape == (rows, 3)
    assert sorted(p[0].env.rows for p in first.plans) == [1, 2, 4, 8, 16, 32, 64]
    with counting_plans() as later:
        for shape in [(7, 5), (40, 5), (2, 3, 5), (5,), (1, 1, 4, 5), (33, 5)]:
            assert model(draw(*shape)).shape == (*shape[:-1], 3)
    assert len(later) == 0


def test_inputs_of_one_bucket_and_two_widths_have_gradients_of_their_own_widths():
    model = sf.Sequential(ops.Tanh(), ops.Tanh())
    model(draw(3, 5).requires_grad_())
    x = draw(3, 7).requires_grad_()
    model(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.autograd.grad(x.tanh().tanh().sum(), x)[0])


class Folded(sf.UnfusedOperation):
    """y = x with its leading dimensions folded into one."""

    class Saved(sf.Saved):
        x: Tensor

    def reference(self, x: Tensor) -> Tensor:
        return x.flatten(0, -2).clone()

    def fwd(self, x: Tensor) -> Any:
        return self.reference(x), self.Saved(x=x)

    def bwd(self, dy: Tensor, saved: Any) -> Any:
        return dy.reshape(saved.x.shape), {}

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return math.prod(shape[:-1]), shape[-1]


def test_inputs_that_one_plan_serves_may_be_folded_into_one_shape():
    model = sf.Sequential(ops.Tanh(), Folded(), ops.Tanh())
    model(draw(3, 4, 2).requires_grad_())
    x = draw(4, 3, 2).requires_grad_()
    model(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.autograd.grad(x.tanh().tanh().sum(), x)[0])


def test_without_gradients_a_plan_has_no_backward_steps():
    model, x = sf.Sequential(ops.Tanh(), nn.Tanh(), ops.Tanh()), draw(3, 5).requires_grad_()
    assert len(model.plan(x).backward) == 3
    with torch.no_grad():
        assert model.plan(x).backward == ()


def test_planning_leaves_garbage_collection_as_it_was():
    collects = gc.isenabled()
    try:
        for wanted in (False, True):
            (gc.enable if wanted else gc.disable)()
            mlp()(draw(3, 5))
            assert gc.isenabled() is wanted
    finally:
        (gc.enable if collects else gc.disable)()


def test_many_lengths_in_one_bucket_do_not_push_out_the_plans_of_others():
    model = sf.Sequential(ops.Bias(1), ops.Tanh())
    other = draw(3, 1)
    model(other)
    with counting_plans() as planned, torch.no_grad():
        for rows in range(1025, 1700):
            model(torch.ones(1, dtype=torch.float64).expand(rows, 1))
    assert len(planned) == 1
    with counting_plans() as planned:
        model(other)
    assert len(planned) == 0


# Mutations ------------------------------------------------------------------------------------------------------------


def _set_none(module: nn.Module, name: str) -> None:
    setattr(module, name, None)


def _reorder(model: nn.Module) -> None:
    # A plain dictionary: removed and put back, it goes to the end.
    model._modules["8"] = model._modules.pop("2")


def _move_first_last(model: nn.Module) -> None:
    # The same modules under the same keys in another order.
    scale = model[4]
    delattr(model, "4")
    setattr(model, "4", scale)


def _unhooked(model: nn.Module) -> None:
    for module in model:
        module._forward_hooks.clear()


MUTATIONS: dict[str, Callable[[Any], Any]] = {
    "append": lambda m: m.append(ops.Scale(-0.5)),
    "insert": lambda m: m.insert(1, ops.Tanh()),
    "extend": lambda m: m.extend([ops.Scale(2.0), ops.Tanh()]),
    "iadd": lambda m: m.__iadd__(sf.Sequential(ops.Scale(2.0))),
    "pop": lambda m: m.pop(-1),
    "del": lambda m: m.__delitem__(4),
    "del slice": lambda m: m.__delitem__(slice(2, 4)),
    "setitem": lambda m: m.__setitem__(2, ops.Sigmoid()),
    "setattr": lambda m: setattr(m, "2", ops.Sigmoid()),
    "delattr": lambda m: delattr(m, "4"),
    "set_submodule": lambda m: m.set_submodule("2", ops.Sigmoid()),
    "swap": lambda m: (m.__setitem__(2, t := m[4]), m.__setitem__(4, ops.SiLU()), t),
    "add_module": lambda m: m.add_module("9", ops.Scale(-0.5)),
    "register_module": lambda m: m.register_module("9", ops.Scale(-0.5)),
    "_modules": lambda m: m._modules.update({"2": ops.Sigmoid()}),
    "reorder": _reorder,
    "same keys reordered": _move_first_last,
    "append to a nested container": lambda m: m[5].append(ops.Scale(3.0)),
    "pop from a residual": lambda m: m[6].pop(-1),
    "append to a container in a container": lambda m: m[5][0].append(ops.Scale(3.0)),
    "insert a barrier": lambda m: m.insert(3, Doubled()),
    "p": lambda m: setattr(m[3], "p", 0.8),
    "p = 0": lambda m: setattr(m[3], "p", 0.0),
    "mode": lambda m: setattr(m[3], "mode", "downscale_in_infer"),
    "eps": lambda m: setattr(m[0], "eps", 0.5),
    "factor": lambda m: setattr(m[6][0], "factor", 3.0),
    "zero_centered": lambda m: setattr(m[0], "zero_centered", True),
    "eval of all": lambda m: m.eval(),
    "eval of one": lambda m: m[3].eval(),
    "hook": lambda m: m[2].register_forward_hook(lambda *a: -a[-1]),
    "pre-hook": lambda m: m[2].register_forward_pre_hook(lambda module, args: (-args[0],)),
    "hook on a nested container": lambda m: m[5].register_forward_hook(lambda *a: -a[-1]),
    "hook on a residual": lambda m: m[6].register_forward_hook(lambda *a: -a[-1]),
    "hook taken off": _unhooked,
    "forward of an instance": lambda m: setattr(m[2], "forward", lambda t: t.sin()),
    "forward of a nested container": lambda m: setattr(m[5], "forward", lambda t: t.sin()),
    "weight frozen": lambda m: m[1].weight.requires_grad_(False),
    "bias frozen": lambda m: m[1].bias.requires_grad_(False),
    "all frozen": lambda m: m.requires_grad_(False),
    "bias = None": lambda m: _set_none(m[1], "bias"),
    "norm bias = None": lambda m: _set_none(m[0], "bias"),
    "norm weight = None": lambda m: _set_none(m[0], "weight"),
    "a bias where there was none": lambda m: setattr(m[7], "bias", nn.Parameter(draw(7, seed=5))),
    "bias registered": lambda m: m[7].register_parameter("bias", nn.Parameter(draw(7, seed=5))),
    "bias deleted": lambda m: (delattr(m[1], "bias"), m[1].register_parameter("bias", None)),
    "bias assigned": lambda m: m[1].load_state_dict({"weight": draw(7, 5), "bias": draw(7)}, assign=True),
    "weight swapped": lambda m: torch.utils.swap_tensors(m[1].weight, nn.Parameter(draw(7, 5, seed=5))),
    "weight replaced": lambda m: setattr(m[1], "weight", nn.Parameter(draw(7, 5, seed=5))),
    "weight.data replaced": lambda m: setattr(m[1].weight, "data", draw(7, 5, seed=5)),
    "weight parametrized": lambda m: parametrize.register_parametrization(m[1], "weight", Doubled()),
    "bias parametrized": lambda m: parametrize.register_parametrization(m[1], "bias", Doubled()),
    "norm weight parametrized": lambda m: parametrize.register_parametrization(m[0], "weight", Doubled()),
}


def changing_model() -> sf.Sequential:
    model = sf.Sequential(
        ops.LayerNorm(5),
        ops.Linear(5, 7),
        ops.Tanh(),
        ops.Dropout(0.4),
        ops.GeLU(),
        sf.Sequential(sf.Sequential(ops.Bias(7)), ops.Tanh()),
        ops.Residual(ops.Scale(0.5), ops.SiLU()),
        ops.Linear(7, 7, bias=False),
        fusions=(BiasTanhForward,),
    )
    randomize(model)
    model = model.double()
    model[0].register_forward_hook(lambda module, args, out: out * 1.5)
    return model


def seen(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    """The results of a call, with the model's parameters at that time."""
    torch.manual_seed(3)
    x = x.detach().clone().requires_grad_()
    model.zero_grad(set_to_none=True)
    y = model(x)
    y.backward(draw(*y.shape, seed=9))
    return {"out": y.detach(), "d_x": x.grad, **{f"d_{n}": p.grad for n, p in model.named_parameters()}}


def parts(plan: sf.Plan) -> list[Any]:
    """The text of a plan without bytes, which are measured by running it."""
    steps = [[(step.name, step.start, step.stop) for step in cover] for cover in (plan.forward, plan.backward)]
    reasons = [(one.name, one.reason) for one in plan.eager], [str(one) for one in plan.refused]
    return [*steps, *reasons, plan.segments, plan.names, plan.paths, plan.needs]


def differ(a: dict[str, Tensor | None], b: dict[str, Tensor | None]) -> bool:
    def unequal(s: Tensor | None, t: Tensor | None) -> bool:
        return (s is None) != (t is None) or (s is not None and t is not None and not torch.equal(s, t))

    return a.keys() != b.keys() or any(unequal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_after_the_first_call_is_seen(name: str):
    model, x = changing_model(), draw(4, 5)
    before = seen(model, x)
    with counting_plans() as planned:
        seen(model, x)
    assert (len(planned), planned.lists) == (0, 0)
    MUTATIONS[name](model)
    fresh = copy.deepcopy(model)  # it has read nothing yet
    after = seen(model, x)
    assert differ(before, after), "this mutation changes nothing, so the test proves nothing"
    assert_same(after, seen(fresh, x), 0.0)
    assert parts(model.plan(x)) == parts(fresh.plan(x))


def test_a_deleted_attribute_is_seen():
    model, x = mlp(), draw(3, 5)
    model[2].forward = model[2].forward
    assert len(model.plan(x).eager) == 1
    del model[2].forward
    assert model.plan(x).eager == ()


class Table(sf.UnfusedOperation):
    """y = x * table, a constant that is not a parameter."""

    class Saved(sf.Saved):
        table: Tensor

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table = table

    def reference(self, x: Tensor) -> Tensor:
        return x * torch.as_tensor(self.table)

    def fwd(self, x: Tensor) -> Any:
        return self.reference(x), self.Saved(table=torch.as_tensor(self.table))

    def bwd(self, dy: Tensor, saved: Any) -> Any:
        return dy * saved.table, {}


@pytest.mark.parametrize("kind", [torch.tensor, np.array, tuple], ids=["tensor", "array", "tuple"])
def test_a_constant_of_several_numbers_may_be_replaced(kind: Callable[[Any], Any]):
    model, x = sf.Sequential(Table(kind([1.0, -2.0, 3.0])), ops.Tanh()), draw(4, 3)
    model(x)
    model[0].table = kind([-1.0, 0.5, 2.0])
    assert torch.equal(model(x), torch.tanh(x * torch.tensor([-1.0, 0.5, 2.0], dtype=torch.float64)))


def test_a_slice_inside_a_fused_run_plans_again():
    model = sf.Sequential(ops.Linear(5, 7), ops.Tanh(), ops.Bias(7), ops.Tanh(), fusions=(BiasTanhJoint,))
    randomize(model.double())
    x = draw(3, 5)
    assert model.plan(x).count("BiasTanhJoint") == 2
    y = model(x)
    head, tail = model[:3], model[3:]
    assert (type(head), head.fusions) == (sf.Sequential, (BiasTanhJoint,))
    assert head.plan(x).count("BiasTanhJoint") == 1
    assert tail.plan(head(x)).count("BiasTanhJoint") == 0
    assert torch.equal(tail(head(x)), y)
    torch.autograd.backward(tail(head(x)), draw(3, 7))
    cut = [p.grad for p in model.parameters()]
    model.zero_grad()
    torch.autograd.backward(model(x), draw(3, 7))
    assert len(cut) == 3
    for a, p in zip(cut, model.parameters(), strict=True):
        assert torch.equal(a, p.grad)


def test_asking_for_a_plan_changes_nothing_for_the_next_call():
    model, x = mlp(dropout=0.5, fusions=(BiasTanhJoint,)), draw(3, 5)
    torch.manual_seed(5)
    y = model(x)
    with counting_plans() as planned:
        torch.manual_seed(5)
        str(model.plan(x))
        str(model.plan(env=sf.Env.of("cuda:sm_90", dtype=torch.bfloat16)))
        torch.manual_seed(5)
        again = model(x)
    assert torch.equal(y, again)
    assert all(p[0].env.rows != 4 or p[0].env.device == "cpu" for p in planned.plans)
    with counting_plans() as planned:
        model(x)
    assert len(planned) == 0


# Env ------------------------------------------------------------------------------------------------------------------


def test_env_describes_the_call():
    x = draw(2, 3, 5, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.float16), torch.no_grad():
        env = sf.Env.like(x)
    assert (env.device, env.arch, env.dtype, env.autocast) == ("cpu", "cpu", torch.bfloat16, torch.float16)
    assert (env.grad, env.deterministic, env.rows, env.triton) == (False, False, 8, env.triton)
    assert sf.Env.like(x).autocast is None
    assert sf.Env.like(x).grad


@pytest.mark.parametrize(("shape", "rows"), [((), 1), ((5,), 1), ((1, 5), 1), ((3, 5), 4), ((4, 5), 4), ((0, 5), 0)])
def test_env_rounds_rows_up_to_a_power_of_two_and_keeps_none_apart(shape: tuple[int, ...], rows: int):
    assert sf.Env.like(torch.empty(shape)).rows == rows


def test_a_region_inside_another_keeps_what_that_one_says_of_errors():
    with sf.fusing(on_error="raise"), sf.fusing(exclude=(BiasTanhForward,)):
        assert fusing_now().on_error == "raise"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_a_device_that_is_not_here_cannot_be_planned_for(name: str):
    with pytest.raises(
        sf.InputError, match=rf"SF106: there is no {name} here\nHint: name an architecture, such as cuda:sm_90"
    ):
        sf.Env.of(name)


def test_a_number_that_no_device_here_has_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(sf.InputError, match="SF106: there is no cuda:2 here"):
        sf.Env.of("cuda:2")


@pytest.mark.parametrize("rows", [-3, "8", 2.5])
def test_what_is_no_number_of_rows_is_refused(rows: Any):
    with pytest.raises(sf.InputError, match=f"SF106: rows must be a whole number of at least 0, got {rows!r}"):
        sf.Env.of("cpu", rows=rows)
    with pytest.raises(sf.InputError, match=f"SF106: tokens must be a whole number of at least 0, got {rows!r}"):
        sf.Env.of("cpu", tokens=rows)


def test_tokens_are_rows():
    assert sf.Env.of("cuda:sm_90", tokens=100) == sf.Env.of("cuda:sm_90", rows=100)
    with pytest.raises(sf.InputError, match="SF106: tokens and rows are one thing: give tokens alone"):
        sf.Env.of("cpu", tokens=8, rows=8)


@pytest.mark.parametrize("given", ["cuda:sm_90", 3])
def test_a_plan_is_made_for_a_tensor(given: Any):
    model = sf.Sequential(torch.nn.Sequential(ops.Linear(4, 4)), ops.ReLU())
    with pytest.raises(sf.InputError, match=r"SF105 position 0 .*expects a tensor, got (str|int)"):
        model.plan(given)


@pytest.mark.parametrize("grad", [True, False])
def test_a_forward_is_checked_once(grad: bool, monkeypatch: pytest.MonkeyPatch):
    model, x = mlp(), draw(3, 5)
    with torch.set_grad_enabled(grad):
        first = model(x)
        monkeypatch.setattr(code, "check_forward", None)
        assert torch.equal(model(x), first)
