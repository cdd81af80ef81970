"""`sf.tune` of converted models: the chains that their calls have captured, as in these calls."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from tests.tune import kit


class _SlowBiasTanh(sf.ForwardFusion):
    """Declares that it saves more than any other, and takes 80 us."""

    bias: ops.Bias
    act: ops.Tanh

    def saves(self, env: sf.Env) -> sf.Savings:
        return sf.Savings(launches=1e4)

    def fwd(self, x: Tensor) -> Any:
        kit.spend(80)
        y = torch.tanh(x + self.bias.bias.to(x.dtype))
        return y, {"bias": ops.Bias.Saved(), "act": ops.Tanh.Saved(y=y)}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor, flag: bool = False) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sin() if flag else x


def converted(**options: Any) -> tuple[Model, sf.Conversion]:
    model = Model()
    return model, sf.convert(model, fusions=(_SlowBiasTanh,), memory="fast", **options)


X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def used(conversion: sf.Conversion) -> list[int]:
    """How often the fusion is in the plan of each chain."""
    return [
        region.plan.count("_SlowBiasTanh") for graph in conversion.graphs for region in graph.regions if region.plan
    ]


def step(model: nn.Module, autocast: torch.dtype | None = None, **given: Any) -> Tensor:
    with contextlib.nullcontext() if autocast is None else torch.autocast("cpu", autocast):
        return model(X, **given)


@pytest.mark.parametrize("regions", ["model", "layers"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["float32", "autocast"])
def test_the_chains_of_earlier_calls_are_measured_as_in_these_calls(regions: Any, autocast: torch.dtype | None):
    model, conversion = converted(regions=regions)
    y = step(model, autocast)
    assert sum(used(conversion)) == 2
    report = sf.tune(model)  # outside of autocast
    times = {(r.fusion, r.mode, round(r.fused_us or 0), r.chosen) for r in report.rows}
    assert times == {("_SlowBiasTanh", "train", 80, False)}
    assert sum(used(conversion)) == 2, "the plan of the last call"
    assert (len(sf.tune(model).rows), sf.tune(model).measured) == (len(report.rows), 0)
    kit.CLOCK.now = 0
    again = step(model, autocast)
    assert sum(used(conversion)) == 0
    assert kit.CLOCK.now == 0
    assert torch.equal(y, again)
    assert "measured 80.0 us" in str(conversion.graphs[0].regions[0].plan)


def test_modes_are_those_of_the_calls():
    model, conversion = converted()
    step(model)
    with torch.no_grad():
        step(model)
    assert sf.tune(model, modes=()[:0] or "eval").rows[0].mode == "eval"
    step(model)
    with torch.no_grad():
        step(model)
    by_grad = {
        region.plan.env.grad: region.plan for graph in conversion.graphs for region in graph.regions if region.plan
    }
    assert by_grad[True].count("_SlowBiasTanh") > 0
    assert by_grad[False].count("_SlowBiasTanh") == 0
    assert {row.mode for row in sf.tune(model).rows} == {"train", "eval"}


def test_an_input_is_not_needed_and_not_run():
    model, _ = converted()
    step(model, flag=True)
    assert sf.tune(model, torch.zeros(1, dtype=torch.int64)).measured > 0


def test_nothing_of_the_model_changes():
    model, conversion = converted()
    step(model).square().sum().backward()
    before = copy.deepcopy(model.state_dict()), [p.grad.clone() for p in model.parameters() if p.grad is not None]
    placeholders = [slot[0][slot[1]] for g in conversion.graphs for r in g.regions for slot in r._slots]
    random = torch.get_rng_state()
    sf.tune(model)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(a, b) for a, b in zip(before[0].values(), model.state_dict().values(), strict=True))
    assert all(torch.equal(a, p.grad) for a, p in zip(before[1], model.parameters(), strict=True) if p.grad is not None)
    after = [slot[0][slot[1]] for g in conversion.graphs for r in g.regions for slot in r._slots]
    assert all(a is b for a, b in zip(placeholders, after, strict=True))
    assert all(t.is_meta for t in after)


def test_sequentials_beside_converted_layers_are_measured_with_the_input():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front = sf.Sequential(ops.Linear(4, 4), ops.Tanh(), fusions=(_SlowBiasTanh,))
            self.back = Layer()

        def forward(self, x: Tensor) -> Tensor:
            return self.back(self.front(x))

    model = Both()
    sf.convert(model.back, fusions=(_SlowBiasTanh,), memory="fast")
    model(X)
    assert {row.at.split()[0] for row in sf.tune(model, X).rows if row.mode == "train"} == {"front", "up"}
    assert {row.at.split()[0] for row in sf.tune(model).rows} == {"up"}


def test_a_chain_that_cannot_run_is_skipped_with_its_error(monkeypatch: pytest.MonkeyPatch):
    model, conversion = converted()
    step(model)
    (region,) = conversion.graphs[0].regions[:1]
    monkeypatch.setattr(region, "copied", lambda parameters: 1 / 0)
    assert any("ZeroDivisionError" in reason for reason in sf.tune(model).skipped)


@pytest.mark.parametrize("autocast", [False, True])
def test_candidates_run_with_random_parameters_of_the_dtypes_of_the_calls(
    autocast: bool, monkeypatch: pytest.MonkeyPatch
):
    model, _ = converted()
    kind = torch.float32 if autocast else torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model.to(kind)(X.to(kind))
    seen: set[Any] = set()
    fwd = _SlowBiasTanh.fwd

    def noted(fusion: Any, x: Tensor) -> Any:
        bias = fusion.bias.bias
        seen.add((x.dtype, bias.dtype, bool(bias.unique().numel() > 1), torch.is_autocast_enabled("cpu")))
        return fwd(fusion, x)

    monkeypatch.setattr(_SlowBiasTanh, "fwd", noted)
    assert sf.tune(model).measured > 0
    assert seen == {(torch.bfloat16, kind, True, autocast)}


def test_chains_of_all_converted_modules_in_a_model_are_measured():
    model = nn.ModuleList([Model(), nn.Sequential(nn.Linear(4, 5), nn.Tanh())])
    for part in model:
        sf.convert(part, fusions=(_SlowBiasTanh,), memory="fast")
        part(X)
    assert len(sf.tune(model).rows) == 2


def test_each_channel_of_a_chain_has_its_own_shape():
    class Sums(Layer):
        def forward(self, x: Tensor, wide: Tensor | None = None, narrow: Tensor | None = None) -> Tensor:
            return self.down(torch.tanh(self.up(x) + wide).tanh()) + narrow

    model = Sums()
    conversion = sf.convert(model)
    model(X, torch.ones(8, 6), torch.ones(8, 4))
    assert [len(region.order.channels) for region in conversion.graphs[0].regions] == [2]
    report = sf.tune(model)
    assert report.skipped == ()
    assert report.rows


def test_a_size_that_was_not_captured_is_not_measured_and_reported(monkeypatch: pytest.MonkeyPatch):
    model, conversion = converted()
    model(torch.randn(16, 4))
    assert (len(sf.tune(model).rows) > 0, sf.tune(model).skipped) == (True, ())
    (region,) = conversion.graphs[0].regions
    plan = region.plan
    assert plan is not None
    # As after a call of a graph for all sizes; when Dynamo captures one depends on the calls of all models before.
    later = dataclasses.replace(plan, env=dataclasses.replace(plan.env, rows=1024))
    monkeypatch.setattr(type(region), "plan", later)
    report = sf.tune(model)
    assert report.rows
    (reason,) = report.skipped
    assert "the size of its last call, rounded up to 1024 tokens; the size at capture was measured, 16" in reason


def _printed_after_tuning(model: nn.Module, conversion: sf.Conversion) -> None:
    assert sf.tune(model).measured > 0
    str(conversion)  # the bytes of its plan are counted with another plan, from the measurements


def _printed_under_hooks(model: nn.Module, conversion: sf.Conversion) -> None:
    with nn.modules.module.register_module_forward_hook(lambda *_: None):
        assert "runs eagerly under hooks of all modules" in str(conversion)


@pytest.mark.parametrize("between", [_printed_after_tuning, _printed_under_hooks])
def test_what_is_printed_changes_neither_the_report_nor_what_is_measured(between: Any):
    model, conversion = converted()
    step(model)
    plan = str(conversion)
    other, printed_later = converted()
    step(other)
    between(other, printed_later)
    assert sum(used(printed_later)) == 2
    assert str(printed_later) == plan
    report = sf.tune(other)
    assert ({row.mode for row in report.rows}, report.skipped) == ({"train"}, ())


def _not_called() -> nn.Module:
    return converted()[0]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (_not_called, r"SF106: Model is converted, but its calls have captured no chains yet\nHint: call it"),
        (lambda: nn.Linear(4, 4), r"SF106: Linear contains no sf.Sequential and is not converted, so there is nothing"),
        (lambda: sf.Sequential(ops.Tanh()), r"SF105: tune needs an input x of the sf.Sequentials in Sequential"),
        (lambda: converted()[1], r"SF106: tune takes a torch.nn.Module, not Conversion"),
    ],
    ids=["not called", "nothing", "no input", "a report"],
)
def test_without_anything_to_tune_it_says_so(make: Any, expected: str):
    with pytest.raises(sf.InputError, match=expected):
        sf.tune(make())
