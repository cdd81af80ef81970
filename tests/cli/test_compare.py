"""`seqfuse compare` finds the operation at which two runs differ, if there is one."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch

import seqfuse as sf
from seqfuse import ops
from seqfuse.cli.compare import ModelRun, TensorAt, compare_runs
from seqfuse.cli.inputs import Spec
from seqfuse.testing.numerics import Check, FusedMismatch, Report

from .conftest import Cli

CPU = torch.device("cpu")


def compared(cli: Cli, *arguments: str) -> tuple[int, dict[str, Any]]:
    done = cli("compare", *arguments, "--json", "--device", "cpu")
    return done.status, json.loads(done.out)


@pytest.mark.parametrize(
    "options", [("--input", "33x16"), ("--input", "33x16:bf16"), ("--input", "33x16", "--autocast", "bf16")], ids=str
)
def test_fused_and_unfused_agree_everywhere(options: tuple[str, ...], cli: Cli) -> None:
    status, data = compared(cli, "M:build", *options)
    assert (status, data["difference"]) == (0, None)
    seen = {(p["tensor"], p["at"]) for p in data["places"]}
    # The output of each step, each input that needs a gradient, and each parameter.
    assert {("y", 4), ("y", 5), ("y", 8), ("dx", 2), ("dx", 5), ("0.1.weight.grad", 2), ("0.1.bias.grad", 3)} <= seen
    assert any(p["fusion"] for p in data["places"])
    done = cli("compare", "M:build", *options, "--device", "cpu")
    assert "agree within tolerance in all" in done.out
    assert "for this input only: 33x16:" in done.out
    assert "\nHint: try other inputs" in done.out


def test_a_wrong_forward_is_found_where_it_is(cli: Cli) -> None:
    status, data = compared(cli, "M:wrong", "--input", "33x16")
    assert status == 1
    first = data["places"][data["difference"]]
    assert (first["pass"], first["tensor"], first["at"]) == ("forward", "y", 3)
    assert (first["operation"], first["path"], first["fusion"]) == ("GeLU", "2", "Wrong")
    assert not any(p["failures"] for p in data["places"][: data["difference"]])
    done = cli("compare", "M:wrong", "--input", "33x16", "--device", "cpu")
    assert done.out.startswith("fused float32 cpu and unfused float32 cpu differ first in y of GeLU 2 at 3, by Wrong\n")


def test_a_wrong_backward_is_found_where_it_is(cli: Cli) -> None:
    status, data = compared(cli, "M:wrong_backward", "--input", "33x16")
    assert status == 1
    first = data["places"][data["difference"]]
    assert (first["pass"], first["tensor"], first["operation"], first["at"]) == (
        "backward", "0.1.bias.grad", "Bias", 3,
    )  # fmt: skip
    assert first["fusion"] == "WrongBackward"
    # All else is right.
    assert [p["tensor"] for p in data["places"] if p["failures"]] == ["0.1.bias.grad"]
    back = [p["at"] for p in data["places"] if p["pass"] == "backward"]
    assert back == sorted(back, reverse=True)  # in the order of the pass, so that the first is the cause
    assert compared(cli, "M:wrong_backward", "--input", "33x16", "--no-grad")[0] == 0


def test_a_forward_that_saves_what_is_wrong_is_named(cli: Cli) -> None:
    status, data = compared(cli, "M:saves_wrong", "--input", "33x16")
    assert status == 1
    first = data["places"][data["difference"]]
    assert (first["pass"], first["tensor"], first["at"], first["fusion"]) == ("backward", "dx", 1, "SavesWrong")
    done = cli("compare", "M:saves_wrong", "--input", "33x16", "--device", "cpu")
    assert "differ first in dx of GeLU 1 at 1, of what SavesWrong saved\n" in done.out


@pytest.mark.parametrize("alarms", [1, 2])
def test_a_difference_is_one_that_most_draws_show(alarms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = iter([True] * alarms + [False] * 3)

    def judged(*_: object, name: str) -> None:
        if next(draws):
            raise FusedMismatch(Report((Check(name, "max", 2.0, 1.0, "[0]", "an alarm"),)))

    monkeypatch.setattr(sys.modules[compare_runs.__module__], "assert_fused_close", judged)
    found = compare_runs(sf.Sequential(ops.ReLU()), Spec((3, 4), torch.float32), {}, CPU, grad=False)
    assert (found.difference is not None) == (alarms == 2)


def places_of(model: sf.Sequential) -> set[TensorAt]:
    """The gradients of a float64 run, where that of x is the model's."""
    spec, model = Spec((5, 8), torch.float64), model.double()
    values = ModelRun(CPU, wide=True)(model, spec, {}, 0, True).values
    x = spec.draw("cpu", 0).requires_grad_()
    dy = torch.randn((5, 8), generator=torch.Generator().manual_seed(100)).bfloat16().double()
    torch.testing.assert_close(values[(0, "dx")], torch.autograd.grad(model(x), x, dy)[0])
    return {*values}


def test_a_gradient_of_a_fork_is_that_of_both_ways() -> None:
    assert (0, "dx") in places_of(sf.Sequential(ops.Residual(ops.Linear(8, 8), ops.Tanh()), fusions=()))


def test_random_operations_draw_the_same_numbers_in_every_run() -> None:
    model = sf.Sequential(ops.Dropout(0.5), ops.Linear(8, 8), ops.Dropout(0.5))
    runs = ModelRun(CPU, fused=True), ModelRun(CPU), ModelRun(CPU, wide=True)
    zeros = [run(model, Spec((7, 8), torch.float32), {}, 3, True).values[(0, "y")] == 0 for run in runs]
    assert 0 < zeros[0].sum() < 56
    assert all(torch.equal(z, zeros[0]) for z in zeros)


def test_one_operation_that_stands_twice_has_two_places() -> None:
    shared = ops.Linear(8, 8, bias=False)
    found = places_of(sf.Sequential(shared, ops.ReLU(), shared, fusions=()))
    assert {(0, "y"), (2, "y"), (0, "dx"), (2, "dx")} <= found


def test_what_the_engine_tries_on_tensors_without_data_is_no_place() -> None:
    # It compares the fusion's saved tensors with the operation's, which runs by itself at the end.
    shared = ops.Linear(8, 8, bias=False)
    model = sf.Sequential(shared, ops.ReLU(), shared)
    spec = Spec((33, 8), torch.float32)
    found = compare_runs(model, spec, {}, CPU)
    assert found.difference is None
    assert [seen.step for seen in found.places if seen.tensor == "y"] == ["LinearBiasAct", ""]


@pytest.mark.parametrize("memory", ["lean", "least"])
def test_a_model_is_compared_with_the_memory_that_it_has(memory: Any) -> None:
    layers = ops.LayerNorm(8), ops.Linear(8, 32), ops.GeLU(), ops.Linear(32, 8)
    found = compare_runs(sf.Sequential(*layers, memory=memory), Spec((5, 8), torch.float32), {}, CPU)
    assert found.difference is None
    made = {seen.step for seen in found.places if seen.tensor == "y"}
    assert {"RecomputeNorm", "RecomputeActivation"} == made - {""}


def test_the_model_is_left_as_it_was() -> None:
    model = sf.Sequential(ops.Linear(8, 8), ops.ReLU())
    before = {name: p.clone() for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    compare_runs(model, Spec((4, 8), torch.float32), {}, CPU)
    for name, p in model.named_parameters():
        assert p.dtype is torch.float32
        assert p.grad is None
        assert torch.equal(p, before[name])
    assert torch.equal(state, torch.get_rng_state())


def test_parameters_that_are_not_finite_are_no_comparison() -> None:
    model = sf.Sequential(ops.Linear(8, 8))
    model[0].weight.data[0, 0] = torch.nan
    spec = Spec((4, 8), torch.float32)
    with pytest.raises(Exception, match="not finite"):
        compare_runs(model, spec, {}, CPU)


def test_indices_and_channels_can_enter(cli: Cli) -> None:
    assert compared(cli, "M:tokens", "--input", "4x7:int64")[0] == 0
    assert compared(cli, "M:fed", "--input", "33x16", "--channel", "other=33x16")[0] == 0
