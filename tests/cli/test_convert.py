"""`seqfuse convert`, and `plan` for a model without a `Sequential`: the report of a conversion that a call made."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from seqfuse.cli import output

from .conftest import Cli

INPUT = "--input", "4x16"


def test_a_model_of_torch_is_converted_called_and_reported(cli: Cli) -> None:
    done = cli("convert", "M:plain", *INPUT, "--device", "cpu", "--memory", "lean")
    assert done.status == 0
    assert done.out.startswith("graph 0: training, input [4, 16]; 1 call\n  chain of 4 operations: LayerNorm, Linear,")
    assert "lean" in next(line for line in done.out.splitlines() if line.endswith("(used)"))
    assert "launches" not in done.out
    asked = cli("convert", "M:plain", *INPUT, "--device", "cpu", "--launches").out
    assert "kernel launches, forward + backward: " in asked
    assert "without gradients" in cli("convert", "M:plain", *INPUT, "--device", "cpu", "--no-grad").out


def test_plan_converts_what_holds_no_sequence(cli: Cli) -> None:
    same = [cli(verb, "M:plain", *INPUT, "--device", "cpu").out for verb in ("plan", "convert")]
    assert same[0] == same[1]
    assert "give --input" in cli("plan", "M:plain").err
    for verb in ("plan", "convert"):
        assert "--memory front needs a Sequential" in cli(verb, "M:plain", *INPUT, "--memory", "front").err
    assert "bytes are for a Sequential alone" in cli("convert", "M:plain", *INPUT, "--memory", "1000").err
    assert cli("plan", "M:build", *INPUT).out.startswith("Plan for ")


def test_a_part_of_a_model_and_a_machine_that_is_not_here(cli: Cli) -> None:
    done = cli("convert", "M:plain", "--input", "4x32", "--part", "2", "--device", "h100")
    assert done.status == 0
    assert "nothing converted" in done.out, "an activation by itself"
    done = cli("convert", "M:plain", *INPUT, "--device", "h100", "--dtype", "bf16", "--autocast", "fp16")
    assert "\n\nChain 1\nPlan for cuda:sm_90 bfloat16 autocast float16, 4 tokens: " in done.out
    first = "Converted and called on this CPU; plans for the other device follow.\ngraph 0: training"
    assert done.out.startswith(first)


def test_the_report_as_data_and_its_plan_as_a_picture(cli: Cli, tmp_path: Path) -> None:
    data = json.loads(cli("convert", "M:plain", *INPUT, "--device", "cpu", "--json").out)
    (graph,), (plan,) = data["graphs"], data["plans"]
    assert (graph["chains"], graph["left"], graph["call"]) == (1, [], "training, input [4, 16]")
    assert plan["memory"]["saved"] > 0
    there = json.loads(cli("convert", "M:plain", *INPUT, "--device", "h100", "--json").out)
    assert there["plans"][0]["env"]["arch"] == "sm_90"
    picture = tmp_path / "plan.svg"
    assert cli("convert", "M:plain", *INPUT, "--output", str(picture)).status == 0
    ElementTree.parse(picture)
    nothing = cli("convert", "M:plain", "--input", "4x32", "--part", "2", "--output", str(picture))
    assert (nothing.status, "has 0 chains" in nothing.err) == (2, True)


def test_what_the_model_says_of_a_wrong_input_is_passed_on(cli: Cli) -> None:
    done = cli("convert", "M:plain", "--input", "4x15")
    assert done.status == 2
    assert (
        "M:plain called on 4x15:float32 raised RuntimeError: Given normalized_shape=[16]".replace("M:", "") in done.err
    )


def test_schedules_have_colors_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "   0  Bias 0     [ Joint   [ Joint", "   1  ReLU 1     unfused   | ]"
    plain = "\n".join(("  at  operation  forward   backward", *rows, "rest 0  [ x"))
    assert output.colored(plain) == plain
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(output.sys.stdout, "isatty", lambda: True)
    blue, orange, end = "\x1b[38;5;33m", "\x1b[38;5;208m", "\x1b[0m"
    first, second, third, rest = output.colored(plain).split("\n")
    assert (first, rest) == (plain.split("\n")[0], "rest 0  [ x")
    assert second == f"   0  Bias 0     {blue}[ Joint   {end}{orange}[ Joint{end}"
    assert third == f"   1  ReLU 1     unfused   {orange}| ]{end}"
    monkeypatch.setenv("NO_COLOR", "1")
    assert output.colored(plain) == plain
