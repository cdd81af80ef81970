"""`seqfuse plan` prints the library's plan in every form, for this machine and others."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import seqfuse as sf
from tests.processes import Script

from .conftest import Cli


def test_it_prints_the_plan_of_the_library(cli: Cli) -> None:
    done = cli("plan", "M:build", "--input", "4x16", "--device", "cpu")
    assert done.status == 0
    assert done.out.startswith("Plan for cpu float32, 4 tokens: 12 operations")
    assert "LinearBias" in done.out
    assert "saved for backward" in done.out
    assert cli("plan", "M:model", "--input", "4x16", "--device", "cpu").out == done.out
    assert cli("plan", "M:nested.build", "--input", "4x16", "--device", "cpu").out == done.out


def test_for_a_machine_that_is_not_here_in_the_dtype_of_the_input(cli: Cli) -> None:
    done = cli("plan", "M:build", "--input", "512x16:bf16", "--device", "cuda:sm_90", "--json")
    data = json.loads(done.out)
    assert data["env"]["text"] == "cuda:sm_90 bfloat16, 512 tokens"
    assert data["env"]["kernels"] == "triton"
    assert data["memory"]["saved"] > 0
    # Parameters were cast: no fusion is refused for their dtype.
    assert not [r for r in data["refused"] if "one dtype" in r["reason"]]
    autocast = json.loads(
        cli("plan", "M:build", "--input", "8x16", "--device", "cuda:sm_90", "--autocast", "bf16", "--json").out
    )
    assert autocast["env"]["autocast"] == "bfloat16"
    assert autocast["env"]["dtype"] == "float32"


def test_a_reason_stands_in_the_json_once(cli: Cli) -> None:
    data = json.loads(cli("plan", "M:build", "--input", "4x16", "--device", "cpu", "--json").out)
    reasons = [r["reason"] for r in data["refused"] if "this small" in r["reason"]]
    assert len(reasons) == 1
    (refused,) = [r for r in data["refused"] if r["reason"] == reasons[0]]
    assert len(refused["fusions"]) > 1
    assert all(places == sorted(set(places)) for places in refused["fusions"].values())


def test_without_an_input_rows_and_memory_are_not_known(cli: Cli) -> None:
    data = json.loads(cli("plan", "M:build", "--json", "--device", "cpu").out)
    assert data["env"]["rows"] is None
    assert data["memory"] is None


def test_an_operation_that_fails_without_data_leaves_memory_out_and_prints_no_traceback() -> None:
    # In another process: torch writes to the stderr that it found when it was imported.
    text = "from seqfuse import Sequential, ops\nmodel = Sequential(ops.LayerNorm(16))"
    code = f"{text}; import torch; print(model.plan(torch.ones(4, 16).long()).memory)"
    done = Script("-c", code).done()
    assert (done.returncode, done.stdout, done.stderr) == (0, "None\n", "")


def test_options_reach_the_plan(cli: Cli) -> None:
    data = json.loads(cli("plan", "M:build", "--input", "4x16", "--no-grad", "--json", "--device", "cpu").out)
    assert data["backward"] == []
    assert not data["env"]["grad"]
    trained = json.loads(cli("plan", "M:build", "--input", "4x16:fp16", "--json", "--device", "cpu").out)
    assert trained["env"]["dtype"] == "float16"
    double = json.loads(cli("plan", "M:build", "--dtype", "f64", "--json", "--device", "cpu").out)
    assert double["env"]["dtype"] == "float64"
    assert not json.loads(cli("plan", "M:build", "--no-grad", "--json", "--device", "cpu").out)["env"]["grad"]


def test_a_dtype_reaches_an_input_that_says_none(cli: Cli) -> None:
    there = "--device", "cuda:sm_90", "--json"
    asked = json.loads(cli("plan", "M:build", "--input", "512x16", "--dtype", "bf16", *there).out)
    written = json.loads(cli("plan", "M:build", "--input", "512x16:bf16", *there).out)
    assert asked == written
    assert asked["env"]["rows"] == 512
    both = cli("plan", "M:build", "--input", "4x16:fp32", "--dtype", "bf16", *there)
    assert "the input is torch.float32 and the parameters are torch.bfloat16" in both.err
    assert json.loads(both.out)["env"]["dtype"] == "float32"
    tokens = json.loads(cli("plan", "M:tokens", "--input", "4x7:int64", "--dtype", "bf16", *there).out)
    assert tokens["env"]["dtype"] == "bfloat16"


@pytest.mark.parametrize("there", [(), ("--device", "cuda:sm_90")], ids=["here", "elsewhere"])
def test_a_choice_of_memory_is_planned(there: tuple[str, ...], cli: Cli) -> None:
    def held(*memory: str) -> tuple[int, int]:
        found = json.loads(cli("plan", "M:build", "--input", "64x16", "--json", *there, *memory).out)["memory"]
        return found["saved"], found["peak"]

    fast, lean, least = (held("--memory", choice) for choice in ("fast", "lean", "least"))
    assert lean[0] < fast[0]
    assert least[1] < min(fast[1], lean[1])
    assert held() == held("--memory", "1000000") == fast
    assert least[1] <= held("--memory", str(fast[1] - 1))[1] < fast[1]


def test_the_front_of_memory_is_drawn(cli: Cli) -> None:
    first, *lines = cli("plan", "M:build", "--input", "64x16", "--memory", "front").out.splitlines()
    assert "time (est.) beyond the fastest plan, from +0 us to +" in first
    names = [line.partition("o ")[2].partition(",")[0] for line in lines]
    assert {*names} == {"fast", "balanced", "lean", "least"}  # half does not fit
    marks = {name: line.index("o ") for name, line in zip(names, lines, strict=True)}
    assert marks["fast"] <= marks["balanced"] <= marks["lean"] < marks["least"]
    assert "nothing to choose" in cli("plan", "M:build", "--input", "64x16", "--no-grad", "--memory", "front").out


def test_parts_of_other_modules(cli: Cli) -> None:
    whole = cli("plan", "M:build", "--input", "4x16", "--device", "cpu").out
    assert cli("plan", "M:Outer", "--input", "4x16", "--device", "cpu").out == whole
    assert cli("plan", "M:Two", "--part", "b", "--input", "4x16", "--device", "cpu").out == whole


def test_indices_and_channels_can_enter(cli: Cli) -> None:
    done = cli("plan", "M:tokens", "--input", "4x7:int64", "--device", "cpu")
    assert done.status == 0
    assert "Embedding" in done.out
    far = json.loads(cli("plan", "M:tokens", "--input", "4x7:int64", "--device", "cuda:sm_90", "--json").out)
    assert far["env"]["dtype"] == "float32"
    assert cli("plan", "M:fed", "--input", "4x16", "--channel", "other=4x16", "--device", "cpu").status == 0


def test_every_form_by_its_ending(cli: Cli, tmp_path: Path) -> None:
    given = ("plan", "M:build", "--input", "4x16", "--device", "cpu")
    for ending, shown in (("json", cli(*given, "--json").out), ("txt", cli(*given).out), ("svg", None)):
        assert cli(*given, "--output", f"made.{ending}") == (0, "", "")
        written = (tmp_path / f"made.{ending}").read_text()
        assert shown in (None, written.removesuffix("\n") + "\n")
    ElementTree.fromstring(written)


def test_the_data_are_those_of_the_library(cli: Cli) -> None:
    from seqfuse import ops

    members = ops.LayerNorm(16), ops.Linear(16, 32), ops.GeLU(), ops.Linear(32, 16), ops.Dropout(0.1)
    model = sf.Sequential(ops.Residual(*members), ops.Linear(16, 8), ops.ReLU())
    own = json.loads(json.dumps(model.plan(torch.randn(4, 16)).as_dict()))
    assert json.loads(cli("plan", "M:build", "--input", "4x16", "--device", "cpu", "--json").out) == own


def test_a_gpu_goes_by_its_name(cli: Cli) -> None:
    given = ("plan", "M:build", "--input", "8x16", "--device")
    by_name, by_architecture = cli(*given, "h100"), cli(*given, "cuda:sm_90")
    assert (by_name.status, by_name.out) == (0, by_architecture.out)
    done = cli("compare", "M:build", "--input", "8x16", "--device", "A100")
    assert "A100 names an architecture" in done.err
