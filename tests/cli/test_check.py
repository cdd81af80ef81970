"""`seqfuse check`: what is right passes, what is wrong fails, and the script that is written fails in the same way."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from seqfuse import compiler
from tests.processes import Script

from .conftest import Cli

ROOT = Path(__file__).resolve().parents[2]


def checks(cli: Cli, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    done = cli("check", *arguments, "--json", "--device", "cpu")
    data = json.loads(done.out)
    assert data["ok"] == all(one["failure"] is None and one["not_run"] is None for one in data["checks"])
    return done.status, data["checks"]


def reproduced(path: str) -> str:
    """The error of a script that has to fail, run here."""
    script = str(Path(path).resolve())
    paths = sys.path[:]
    try:
        with contextlib.chdir(ROOT.parent):
            runpy.run_path(script, run_name="__main__")
    except AssertionError as error:
        return str(error)
    finally:
        sys.path[:] = paths
    raise AssertionError(f"{script} did not fail")


def reproduced_elsewhere(path: str) -> str:
    """What a process of its own prints where such a script fails."""
    ast.parse(Path(path).read_text())
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    # It has to find its module wherever it is run.
    done = Script(str(Path(path).resolve()), environment=environment, folder=ROOT.parent).done()
    assert done.returncode == 1, done.stderr
    return done.stderr


def test_an_operation_of_this_library_passes(cli: Cli, tmp_path: Path) -> None:
    done = cli("check", "seqfuse.ops:Bias", "--input", "3x4", "--dtype", "float32")
    assert (done.status, done.out) == (0, "passed  testing.check_op Bias\n")
    assert not [*tmp_path.glob("seqfuse_repro*")]


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
def test_what_is_wrong_fails_and_so_does_its_script(name: str, kit: str, cli: Cli) -> None:
    status, (one,) = checks(cli, name)
    assert status == 1
    assert one["check"].startswith(f"testing.{kit} ")
    said = "operation differs from its reference" if kit == "check_op" else "fused differs from unfused"
    assert said in one["failure"]
    script = Path(one["repro"]).read_text()
    assert str(Path.cwd()) not in script  # it can be handed on with its module
    assert "torch.randn((1, 1)" in script  # the smallest of the inputs that are tried
    assert re.search(r"dtypes=\(torch\.\w+,\)\)", script)
    run = reproduced_elsewhere if name == "M:Third" else reproduced
    assert one["failure"].splitlines()[-1].strip() in run(one["repro"])


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
    ("name", "said", "slice_"),
    [
        ("M:wrong", "y of GeLU 2 at 3, by Wrong", "[1:4]"),
        ("M:wrong_backward", "0.1.bias.grad of Bias 0.1.bias at 3, by WrongBackward", "[0:1]"),
    ],
)
def test_a_wrong_model_is_cut_down_to_the_members_that_differ(name: str, said: str, slice_: str, cli: Cli) -> None:
    status, made = checks(cli, name, "--input", "17x16", "--dtype", "float32", "--seed", "1")
    assert status == 1
    first = next(one for one in made if one["failure"] is not None)
    script = Path(first["repro"]).read_text()
    assert f"named(){slice_}" in script
    assert said.split(" at ")[0].split(" of ")[0] in first["failure"]
    # The script is of the first failure, and stays so.
    assert "grad=True" in script
    assert [one["repro"] for one in made if one["repro"] is not None] == [first["repro"]]
    error = reproduced(first["repro"])
    assert first["failure"].splitlines()[1].strip() in error


def test_a_model_is_checked_on_what_else_enters_it(cli: Cli) -> None:
    given = "--input", "4x16", "--channel", "other=4x16", "--dtype", "float32"
    status, made = checks(cli, "M:fed", *given)
    assert (status, len(made)) == (0, 2)
    status, made = checks(cli, "M:fed_wrong", *given)
    assert status == 1
    assert "y of GeLU" in made[0]["failure"]
    assert "channels=['other=4x16'])" in Path(made[0]["repro"]).read_text()
    assert made[0]["failure"].splitlines()[1].strip() in reproduced(made[0]["repro"])


def test_operations_of_others_in_a_model_are_checked(cli: Cli) -> None:
    status, made = checks(cli, "M:holds_third", "--input", "4x16", "--dtype", "float32")
    assert status == 1
    assert made[0]["check"] == "testing.check_op Third"
    assert "d_x" in made[0]["failure"]
    assert "named().get_submodule('1')" in Path(made[0]["repro"]).read_text()
    assert "d_x" in reproduced(made[0]["repro"])


def test_a_part_is_found_again(cli: Cli) -> None:
    assert checks(cli, "M:Two", "--part", "b", "--input", "3x16", "--dtype", "float32")[0] == 0


def test_the_script_is_written_where_it_is_asked_for(cli: Cli, tmp_path: Path) -> None:
    done = cli("check", "M:Third", "--repro", "shown.py", "--dtype", "float32")
    assert done.status == 1
    assert done.out.startswith("FAILED  testing.check_op Third\n    Third, ")
    assert "to see it again: python shown.py" in done.out
    assert (tmp_path / "shown.py").exists()
    assert cli("check", "M:Third", "--repro", "no/folder.py", "--dtype", "float32").status == 2
    (tmp_path / "inner").mkdir()
    assert cli("check", "M:Third", "--repro", "inner/shown.py", "--dtype", "float32").status == 1
    assert "parent / '..')" in (tmp_path / "inner" / "shown.py").read_text()  # where its module is from there


def test_a_script_is_written_over_nothing_else(cli: Cli, tmp_path: Path) -> None:
    given = ("check", "M:Third", "--input", "1x1", "--dtype", "float32", "--device", "cpu")
    theirs = tmp_path / "seqfuse_repro_Third.py"
    theirs.write_text("print('mine')")
    for _ in range(2):
        assert "python seqfuse_repro_Third_2.py" in cli(*given).out
    cli(*given, "--seed", "1")  # and another one of the same operation takes its place
    assert {p.name for p in tmp_path.glob("seqfuse_repro*")} == {theirs.name, "seqfuse_repro_Third_2.py"}
    assert "seed=1" in (tmp_path / "seqfuse_repro_Third_2.py").read_text()
    done = cli(*given, "--repro", str(theirs))
    assert (done.status, done.out) == (2, "")
    assert "is there and is no script of `seqfuse check`" in done.err
    assert theirs.read_text() == "print('mine')"
    assert cli(*given, "--repro", "seqfuse_repro_Third_2.py").status == 1


def test_a_script_interprets_kernels_where_the_check_did(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert cli("check", "M:Third", "--repro", "shown.py", "--dtype", "float32").status == 1
    script = (tmp_path / "shown.py").read_text()
    assert 'os.environ["TRITON_INTERPRET"] = "1"' in script.partition("import torch\n")[0]
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "operation differs from its reference" in reproduced_elsewhere("shown.py")


def test_a_tuple_of_fusions_is_each_of_them(cli: Cli) -> None:
    status, made = checks(cli, "M:pair", "--input", "3x16", "--dtype", "float32")
    assert status == 1
    assert [one["check"] for one in made] == ["testing.check_fusion Wrong", "testing.check_fusion SavesWrong"]
    assert all(one["failure"] for one in made)
    assert "attrgetter('Wrong')" in Path(made[0]["repro"]).read_text()


def test_a_fusion_that_cannot_run_here_is_not_passed(cli: Cli) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("interpreted kernels run here")
    done = cli("check", "seqfuse.fusions:LinearBiasActivation", "--device", "cpu")
    hint = "needs a Triton device; TRITON_INTERPRET=1 runs Triton kernels on a CPU, slowly"
    assert (done.status, done.out) == (3, f"not run testing.check_fusion LinearBiasActivation\n    {hint}\n")
    status, (one,) = checks(cli, "seqfuse.fusions:LinearBiasActivation")
    assert (status, one["failure"], one["repro"], one["not_run"]) == (3, None, None, hint)


def test_a_fusion_whose_requirements_do_not_hold_is_not_run_and_no_script_is_written(cli: Cli, tmp_path: Path) -> None:
    done = cli("check", "M:OnHopper", "--device", "cpu")
    assert done.status == 3
    assert done.out.startswith("not run testing.check_fusion OnHopper\n    OnHopper is never used; ")
    assert "needs an sm_90" in done.out
    assert not [*tmp_path.glob("seqfuse_repro*")]
