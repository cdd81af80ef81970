"""Plans after modules that run eagerly: they take the outputs of these modules, whatever their shape."""

from __future__ import annotations

import contextlib
import copy
import random
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import seqfuse as sf
from seqfuse import ops
from tests.fuser.fusions import tensor

D = 32


class Frames(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.unfold(-1, 40, 16)  # they overlap in memory


class Patch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, 16))


class Pool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class To(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Positions(nn.Module):
    """Returns a view of its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(tensor(9, D).detach())

    def forward(self, x: Tensor) -> Tensor:
        return self.table[: x.shape[1]]


class Asks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[: 2 + int(float(x.detach().abs().sum()) > 0)]


def mlp(k: int = D) -> tuple[nn.Module, ...]:
    return ops.Linear(k, 4 * D), ops.GeLU(), ops.Linear(4 * D, D)


X = tensor(4, 3200)
BODY = tensor(4, 7, D)
IDS = torch.arange(28).reshape(4, 7)
MODELS: dict[str, tuple[Any, Tensor]] = {
    "frames": (lambda: (Frames(), ops.Linear(40, D), ops.LayerNorm(D), *mlp()), X),
    "patches": (lambda: (Patch(), *mlp(16), ops.RMSNorm(D)), X),
    "pool": (lambda: (Patch(), *mlp(16), Pool(), ops.LayerNorm(D), ops.Linear(D, 5)), X),
    "flatten": (lambda: (*mlp(), nn.Flatten(1), ops.Linear(7 * D, 8), ops.Tanh()), BODY),
    "a view that both keep": (lambda: (ops.Linear(D, D), ops.Sigmoid(), nn.Flatten(0, 1), ops.Linear(D, D)), BODY),
    "convolution": (
        lambda: (nn.Conv1d(7, 3, 4, stride=4), ops.Linear(D // 4, D), ops.GeLU(), ops.Linear(D, D)),
        BODY,
    ),
    "norm with buffers": (lambda: (ops.Linear(3200, D), nn.BatchNorm1d(D), *mlp()), X),
    "ids": (lambda: (ops.Embedding(30, D), ops.LayerNorm(D), *mlp(), Pool(), ops.Linear(D, 5)), IDS),
    "ids, eagerly": (lambda: (nn.Embedding(30, D), ops.LayerNorm(D), *mlp()), IDS),
    "another dtype": (
        lambda: (*mlp(), To(torch.float64), *(m.double() for m in mlp()), To(torch.float32), ops.Linear(D, 3)),
        BODY,
    ),
    "frozen": (lambda: (Frozen(), ops.SiLU(), *mlp()), BODY.detach()),
    "frozen behind a layer": (lambda: (*mlp(), Frozen(), ops.GeLU(), ops.LayerNorm(D, elementwise_affine=False)), BODY),
    "residual": (lambda: (*mlp(), ops.Residual(ops.LayerNorm(D), nn.Softplus(), *mlp()), ops.LayerNorm(D)), BODY),
    "its own parameter": (lambda: (Positions(), *mlp(), ops.Linear(D, 5)), BODY),
    "a sequence with a hook": (lambda: (*mlp(), sf.Sequential(*mlp(), ops.Linear(D, 8)), ops.Linear(8, 4)), BODY),
}


def built(name: str, memory: Any = "fast") -> tuple[sf.Sequential, Tensor]:
    make, x = MODELS[name]
    torch.manual_seed(1)
    model = sf.Sequential(*make(), memory=memory)
    if "hook" in name:
        model[3].register_forward_hook(lambda module, args, y: None)
    return model, x


def kept(model: sf.Sequential, x: Tensor) -> int:
    """Bytes saved for backward, without eager modules and parameters."""
    inside, seen = [0], dict[int, Tensor]()
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    places = model.plan(x).eager
    modules = [model.get_submodule(model.plan(x).paths[one.at]) for one in places]
    for module in modules:
        forward = module.forward

        def run(*args: Any, forward: Any = forward) -> Any:
            inside[0] += 1
            try:
                return forward(*args)
            finally:
                inside[0] -= 1

        module.forward = run

    def pack(t: Tensor) -> Tensor:
        if not inside[0] and t.untyped_storage()._cdata not in parameters:
            seen[t.untyped_storage()._cdata] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model(x)
    for module in modules:
        del module.forward
    del y
    return sum(t.untyped_storage().nbytes() for t in seen.values())


def planned(model: sf.Sequential) -> list[Any]:
    return [part.lowering.plan for part in model._fuser.op_list().parts if not isinstance(part, int)]


# Under autocast each model has one of the choices, in turn.
@pytest.mark.parametrize(
    ("name", "memory", "autocast"),
    [
        pytest.param(name, memory, autocast, marks=[pytest.mark.full] * (autocast and (i + j) % 2))
        for i, name in enumerate(MODELS)
        for j, memory in enumerate(("fast", "lean"))
        for autocast in (False, True)
    ],
)
def test_a_plan_is_that_of_the_call_and_says_what_is_saved(name: str, memory: Any, autocast: bool) -> None:
    model, x = built(name, memory)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plan = model.plan(x)
        with contextlib.suppress(RuntimeError) if autocast else contextlib.nullcontext():  # float64 is not cast
            model(x)
            run = planned(model)
            for steps in ("forward", "backward"):
                ahead = [(s.name, s.covers, s.needs) for s in getattr(plan, steps) if not s.nodes[0].eager]
                assert ahead == [(s.name, s.covers, s.needs) for p in run for s in getattr(p, steps)]
            assert plan.segments == tuple(s for p in run for s in p.segments)
            assert plan.env in [p.env for p in run]
            if not autocast:
                assert plan.memory is not None, plan.memory_unknown
                assert plan.memory.saved == kept(model, x)


def test_tokens_and_flops_are_those_behind_the_module() -> None:
    model, x = built("frames")
    plan = model.plan(x)
    assert plan.tokens == 4 * 198
    assert str(plan).startswith("Plan for cpu float32, 792 tokens")
    with FlopCounterMode(display=False) as counter:
        model(x)
    assert plan.memory is not None
    assert plan.memory.flops == counter.get_total_flops()


def test_the_head_of_a_plan_of_ids_is_that_of_the_layers() -> None:
    model, x = built("ids")
    plan = model.plan(x)
    assert str(plan).startswith("Plan for cpu float32, 28 tokens")
    assert plan.as_dict()["env"]["dtype"] == "float32"


@pytest.mark.parametrize("build", [lambda: (Frames(), ops.Linear(16, 4)), lambda: (nn.ReLU(), ops.Linear(16, 4))])
def test_a_wrong_width_behind_an_eager_module_is_refused_as_in_a_call(build: Any) -> None:
    model = sf.Sequential(*build())
    for call in (model.plan, model):
        with pytest.raises(sf.InputError, match=r"SF101 position 1 \(Linear\): expects last dimension 16, got \d+"):
            call(X)


@pytest.mark.parametrize("allowed", [40_000, 10_000_000])
def test_a_budget_is_judged_as_in_a_call(allowed: int) -> None:
    model, x = built("patches", allowed)
    plan = model.plan(x)
    said = {f"{r.fusion}: {r.reason}" for r in plan.refused if r.fusion.startswith("memory=")}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(x)
    warned = [str(w.message) for w in caught if "memory=" in str(w.message)]
    assert said == {re.sub(r" for \d+ operations, \w+ to \w+", "", message) for message in warned}
    assert len(said) == (allowed < 50_000)


def test_what_does_not_run_on_fake_tensors_leaves_what_follows_unknown() -> None:
    model = sf.Sequential(ops.Linear(D, D), Asks(), *mlp(), memory=sf.Budget(5_000))
    plan, x = model.plan(BODY), BODY
    assert plan.memory is None
    assert str(plan.memory_unknown).startswith("unknown behind Asks at 2, which does not run on fake tensors (")
    assert "saved for backward: unknown behind Asks at 2" in str(plan).replace("\n    ", " ")
    judged = {r.at: r.reason for r in plan.refused if r.fusion == "memory=Budget(5000)"}
    assert set(judged) == {0, 3} or set(judged) == {3}
    assert judged[3].startswith("what would be saved is not known: unknown behind Asks at 2")
    assert plan.as_dict()["memory_unknown"] == plan.memory_unknown
    assert model(x).shape == (3, 7, D)


def test_a_plan_changes_nothing_of_an_eager_module() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.noted, self.calls = nn.BatchNorm1d(D), [], 0
            self.scale = nn.Parameter(torch.ones(D))
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.calls, self.last = self.calls + 1, x
            self.noted.append(x)
            self.scale.data.mul_(0.5)
            return self.inner(x) * self.scale * torch.rand(D) + nn.functional.dropout(x)

    module = Keeps()
    model = sf.Sequential(ops.Linear(D, D), module, *mlp())
    x = tensor(6, D)
    before, state, drawn = copy.deepcopy(module.state_dict()), torch.get_rng_state(), random.getstate()
    plan = model.plan(x)
    assert plan.memory is not None
    assert "unknown" not in str(plan)
    assert (module.calls, module.last, module.noted) == (0, None, [])
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == drawn
    assert all(type(t) in (Tensor, nn.Parameter) for t in (*module.parameters(), *module.buffers()))


def test_a_compiled_module_is_planned_without_compiling_it() -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("it was compiled")

    model = sf.Sequential(torch.compile(Patch(), backend=refuse), *mlp(16))
    plan = model.plan(X)
    assert plan.tokens == 800
    assert plan.memory is not None


def test_another_machine_is_planned_for_what_arrives_there() -> None:
    model, _ = built("patches")
    env = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, tokens=4)
    plan = model.bfloat16().plan(torch.empty(4, 3200, device="meta"), env=env)
    assert plan.env.rows == 1024
    more = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, tokens=8192)  # not those of the input
    assert model.plan(torch.empty(4, 3200, device="meta"), env=more).env.rows == 8192
    assert plan.tokens == 800
    assert plan.memory is not None
    assert plan.memory_unknown is None
