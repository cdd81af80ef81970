"""`seqfuse check`: right fusions and operations pass, wrong ones fail."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from seqfuse import compiler

from .conftest import Cli

ROOT = Path(__file__).resolve().parents[2]


def checks(cli: Cli, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    done = cli("check", *arguments, "--json", "--device", "cpu")
    data = json.loads(done.out)
    assert data["ok"] == all(one["failure"] is None and one["not_run"] is None for one in data["checks"])
    return done.status, data["checks"]


def test_an_operation_of_this_library_passes(cli: Cli) -> None:
    done = cli("check", "seqfuse.ops:Bias", "--input", "3x4", "--dtype", "float32")
    assert (done.status, done.out) == (0, "passed  testing.check_op Bias\n")


@pytest.mark.parametrize("name", ["ReLU", "SwiGLU"])
def test_what_a_check_left_out_is_said(name: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("interpreted kernels run here")
    arguments = f"seqfuse.ops:{name}", "--input", "3x4", "--dtype", "float32"
    monkeypatch.setattr(compiler, "_found", lambda: (None, "no C compiler: there is no cc"))
    reason = "value and derivative were not checked: no C compiler: there is no cc"
    skipped = reason if name == "ReLU" else f"activation SiLU: {reason}"
    status, (one,) = checks(cli, *arguments)
    assert (status, one["failure"], one["skipped"]) == (0, None, [skipped])
    done = cli("check", *arguments, "--device", "cpu")
    assert (done.status, done.out) == (0, f"passed  testing.check_op {name}\n    skipped: {skipped}\n")


def test_a_fusion_of_this_library_passes(cli: Cli) -> None:
    status, (one,) = checks(cli, "seqfuse.fusions:ScaleAdd", "--input", "3x4", "--dtype", "fp32")
    assert (status, one["failure"]) == (0, None)


@pytest.mark.parametrize(("name", "kit"), [("M:Third", "check_op"), ("M:Wrong", "check_fusion")])
def test_what_is_wrong_fails(name: str, kit: str, cli: Cli) -> None:
    status, (one,) = checks(cli, name)
    assert status == 1
    assert one["check"].startswith(f"testing.{kit} ")
    said = "operation differs from its reference" if kit == "check_op" else "fused differs from unfused"
    assert said in one["failure"]
    done = cli("check", name, "--dtype", "float32", "--device", "cpu")
    assert done.status == 1
    assert done.out.startswith(f"FAILED  {one['check']}\n    {one['check'].rpartition(' ')[2]}")


def test_a_model_is_run_fused_and_unfused_in_both_dtypes_and_modes(cli: Cli) -> None:
    status, made = checks(cli, "M:build", "--input", "17x16")
    assert status == 0
    assert [one["check"] for one in made] == [
        "fused and unfused, float32",
        "fused and unfused, float32, no gradients",
        "fused and unfused, bfloat16",
        "fused and unfused, bfloat16, no gradients",
    ]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("M:wrong", "y of GeLU 2 at 3, by Wrong"),
        ("M:wrong_backward", "0.1.bias.grad of Bias 0.1.bias at 3, by WrongBackward"),
    ],
)
def test_of_a_wrong_model_the_first_tensor_that_differs_is_named(name: str, said: str, cli: Cli) -> None:
    status, made = checks(cli, name, "--input", "17x16", "--dtype", "float32", "--seed", "1")
    assert status == 1
    assert said in next(one["failure"] for one in made if one["failure"] is not None)


def test_a_model_is_checked_on_what_else_enters_it(cli: Cli) -> None:
    given = "--input", "4x16", "--channel", "other=4x16", "--dtype", "float32"
    status, made = checks(cli, "M:fed", *given)
    assert (status, len(made)) == (0, 2)
    status, made = checks(cli, "M:fed_wrong", *given)
    assert status == 1
    assert "y of GeLU" in made[0]["failure"]


def test_operations_of_others_in_a_model_are_checked(cli: Cli) -> None:
    status, made = checks(cli, "M:holds_third", "--input", "4x16", "--dtype", "float32")
    assert status == 1
    assert made[0]["check"] == "testing.check_op Third"
    assert "d_x" in made[0]["failure"]


def test_a_part_is_found_again(cli: Cli) -> None:
    assert checks(cli, "M:Two", "--part", "b", "--input", "3x16", "--dtype", "float32")[0] == 0


def test_a_tuple_of_fusions_is_each_of_them(cli: Cli) -> None:
    status, made = checks(cli, "M:pair", "--input", "3x16", "--dtype", "float32")
    assert status == 1
    assert [one["check"] for one in made] == ["testing.check_fusion Wrong", "testing.check_fusion SavesWrong"]
    assert all(one["failure"] for one in made)


def test_an_error_of_the_class_says_where_it_was_met(cli: Cli) -> None:
    _, (one,) = checks(cli, "M:SavesNothing", "--input", "3x16", "--dtype", "float32")
    assert one["failure"].startswith("SF302 position 0 (SavesNothing): slot 'act' needs GeLU.Saved, it saved nothing")
    assert "\nin SavesNothing on [Scale, GeLU]: " in one["failure"]


def test_a_fusion_that_cannot_run_here_is_not_passed(cli: Cli) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("interpreted kernels run here")
    done = cli("check", "M:OfTriton", "--device", "cpu")
    hint = "needs a Triton device; TRITON_INTERPRET=1 runs Triton kernels on a CPU, slowly"
    assert (done.status, done.out) == (3, f"not run testing.check_fusion OfTriton\n    {hint}\n")
    status, (one,) = checks(cli, "M:OfTriton")
    assert (status, one["failure"], one["not_run"]) == (3, None, hint)


def test_a_fusion_whose_requirements_do_not_hold_is_not_run(cli: Cli) -> None:
    done = cli("check", "M:OnHopper", "--device", "cpu")
    assert done.status == 3
    assert done.out.startswith("not run testing.check_fusion OnHopper\n    OnHopper is never used; ")
    assert "needs an sm_90" in done.out
