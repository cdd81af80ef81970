"""The command: status, messages instead of tracebacks, terminals, ranks, and missing packages."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.processes import Script

from .conftest import Cli

ROOT = Path(__file__).resolve().parents[2]
VERBS = ("doctor", "plan", "check", "tune", "cache", "compare")


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return Script(*arguments, environment={**os.environ, "PYTHONPATH": str(ROOT), **variables}).done()


def test_help_names_every_verb_and_says_what_each_does(cli: Cli) -> None:
    done = cli("--help")
    assert done.status == 0
    for verb in VERBS:
        assert f" {verb} " in done.out
        help_of = cli(verb, "--help")
        assert help_of.status == 0
        assert help_of.out.count("\n") > 5


def test_version(cli: Cli) -> None:
    import seqfuse

    assert cli("--version").out.strip() == seqfuse.__version__


def test_python_m_is_the_command() -> None:
    done = python("-m", "seqfuse", "--version")
    assert (done.returncode, done.stderr) == (0, "")
    done = python("-m", "seqfuse", "frobnicate")
    assert done.returncode == 2
    assert done.stderr.startswith("seqfuse: ")
    assert done.stderr.count("\n") == 1


WRONG = {
    ("plan", "M"): "is not MODULE:NAME",
    ("plan", ":build"): "is not MODULE:NAME",
    ("plan", "no_such_module:build"): "there is no module no_such_module",
    ("plan", "seqfuse.no_such:build"): "there is no module seqfuse.no_such",
    ("plan", "no_such_file.py:build"): "there is no file no_such_file.py",
    ("plan", "M:bild"): "has no bild\nHint: did you mean 'build'?",
    ("plan", "M:nested.bild"): "has no nested.bild\n",
    ("plan", "M:number"): "is of type int",
    ("plan", "M:raising"): "raised ValueError: one line and another",
    ("check", "M:broken", "--input", "4x16"): "the model raised RuntimeError: no luck\n",
    ("compare", "M:broken", "--input", "4x16"): "the model raised RuntimeError: no luck\n",
    ("convert", "M:of_torch", "--input", "4x16"): "M:of_torch called on 4x16:float32 raised RuntimeError: no luck\n",
    (
        "convert",
        "M:build",
        "--input",
        "4x15",
    ): "SF101 '0.0', position 1 (LayerNorm): expects last dimension 16, got 15",
    **{
        (verb, "M:on_meta", "--input", "4x16"): "moving the model to"
        for verb in ("plan", "check", "compare", "convert", "tune")
    },
    ("plan", "M:leaving"): "M:leaving() raised SystemExit: 3",
    ("plan", "M:needing"): "it is called without arguments",
    ("plan", "M:Two"): "there are 2 Sequentials",
    ("plan", "M:Two", "--part", "c"): "has no part 'c'",
    ("compare", "torch.nn:Sequential", "--input", "4x4"): "which is of type torch.nn.modules.container.Sequential",
    ("plan", "M:build", "--dtype", "i64"): "take a floating dtype, not i64",
    ("plan", "M:build", "--autocast", "i64"): "take a floating dtype, not i64",
    ("compare", "M:build", "--input", "4x16", "--dtype", "i64"): "take a floating dtype, not i64",
    ("check", "M:build", "--input", "4x16", "--dtype", "i64"): "take a floating dtype, not i64",
    ("tune", "M:build", "--input", "4x16", "--dtype", "i64"): "take a floating dtype, not i64",
    ("plan", "M:build", "--input", "4x15"): "SF101 '0.0', position 1 (LayerNorm): expects last dimension 16, got 15",
    ("plan", "M:build", "--input", "4 x 16"): "is not an input",
    ("plan", "M:build", "--input", "4x16:bfloat"): "there is no dtype 'bfloat'",
    ("plan", "M:build", "--device", "gpu"): "SF106: there is no device 'gpu'",
    ("plan", "M:build", "--device", "cuda:99"): "there is no cuda:99 here",
    ("plan", "M:fed", "--input", "4x16"): "SF103",
    ("plan", "M:fed", "--channel", "other=4x16"): "give --input",
    ("plan", "M:fed", "--input", "4x16", "--channel", "other"): "is not a channel",
    ("plan", "M:build", "--input", f"{10**30}x16"): "x16 has more bytes than a tensor can have",
    ("plan", "M:build", "--input", f"{2**60}x16", "--device", "cuda:sm_90"): "has more bytes than a tensor can have",
    ("plan", "M:build", "--input", "x".join(5000 * "9")): "9x9x9... has more bytes than a tensor can have",
    ("plan", "M:build", "--input", f"{2**54}x16"): "x16:float32 cannot be made on cpu: ",
    ("check", "seqfuse.ops:GeLU", "--input", f"{2**54}x16"): "x16:float32 cannot be made on cpu: ",
    ("compare", "M:build", "--input", f"{2**54}x16"): "seqfuse: 18014398509481984x16:float32 cannot be made on cpu: ",
    ("plan", "M:fed", "--input", "4x16", "--channel", f"other={2**54}x16"): "x16:float32 cannot be made on cpu: ",
    ("check", "M:build", "--input", "4x16", "--seed", str(10**30)): "a seed is a whole number from -2^63",
    ("check", "seqfuse.ops:GeLU", "--seed", str(-(10**30))): "a seed is a whole number from -2^63",
    ("compare", "M:build", "--input", "4x16", "--seed", str(2**63)): "a seed is a whole number from -2^63",
    ("plan", "M:fed", "--input", "4x16", "--channel", "other=4x8"): (
        "SF101 '1', position 2 (Add): adds tensors of one shape, got (4, 16) and (4, 8)"
    ),
    ("plan", "M:fed", "--input", "4x16", "--channel", "other=3x16", "--device", "cuda:sm_90"): "position 2 (Add): adds",
    ("plan", "M:build", "--output", "no/such/folder.svg"): "cannot be written",
    ("plan", "M:build", "--memory", "front", "--json"): "--memory front prints text only",
    ("plan", "M:build", "--memory", "front", "--output", "front.svg"): "--memory front prints text only",
    ("plan", "M:build", "--output", "plan.pdf"): "plan.pdf has no known ending: write one of .svg, .json",
    ("plan", "M:build", "--frob"): "--frob",
    ("plan", "torch.nn:Flatten"): "has no Sequential, so it is converted and called: give --input",
    ("compare", "torch.nn:Flatten", "--input", "4x4"): "Hint: seqfuse convert takes any model",
    ("plan",): "MODULE:NAME is required; seqfuse plan --help",
    ("plan", "M:build", "--input"): "--input needs a value; seqfuse plan --help lists the arguments",
    ("compare", "M:build", "M:wrong", "--input", "4x16"): "'M:wrong' is one argument too many; seqfuse compare --help",
    ("plan", "M:build", "4x16"): "'4x16' is one argument too many\nHint: did you mean --input 4x16?",
    ("plan", "M:build", "--memory", "little"): "memory must not be 'little'",
    ("cache", "wipe"): 'Unknown command "wipe"',
    ("tune", "M:build"): "--input is required; seqfuse tune --help",
    ("tune", "M:build", "--input", "4x16", "--device", "cuda:sm_90"): "names an architecture",
    ("tune", "M:build", "--input", "4x16", "--budget", "-1"): "SF106",
    ("check", "M:build"): "give --input",
    ("check", "M:fed", "--input", "4x16"): "SF103",
    ("check", "M:build", "--input", "4x16", "--channel", "other=4x16"): "SF103: the call passed channel 'other'",
    ("check", "seqfuse.ops:Add", "--channel", "other=4x16"): "--channel is for a model",
    ("check", "seqfuse:JointFusion"): "is a base class of fusions",
    ("check", "seqfuse.ops:Embedding"): "expects indices",
}


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_what_cannot_be_done_is_one_sentence_perhaps_a_hint_and_status_2(arguments: tuple[str, ...], cli: Cli) -> None:
    done = cli(*arguments)
    assert done.status == 2
    assert done.out == ""
    assert WRONG[arguments] in re.sub(r"models_\d+:", "M:", done.err)
    said, *hint = done.err.splitlines()
    assert said.startswith("seqfuse: ")
    assert [line[:6] for line in hint] in ([], ["Hint: "])


def test_a_file_whose_name_is_taken_is_not_mistaken_for_another_module(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("def build(): pass\n")
    done = cli("plan", "json.py:build")
    assert done.status == 2
    assert "that name is taken by" in done.err
    (tmp_path / "this.py").write_text("from seqfuse import Sequential as build\n")  # of Python, too
    assert cli("plan", "this.py:build").status == 0


def test_a_traceback_is_shown_to_who_asks(cli: Cli) -> None:
    with pytest.raises(Exception, match="one line") as caught:
        cli("plan", "M:raising", "--traceback")
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_interrupt_is_not_a_traceback(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "other_interrupted.py").write_text("def build(): raise KeyboardInterrupt\n")
    done = cli("plan", "other_interrupted:build")
    assert (done.status, done.err) == (130, "seqfuse: interrupted\n")


def test_warnings_are_lines_without_sources(cli: Cli, tmp_path: Path) -> None:
    text = "import warnings\nwarnings.warn('mind the gap')\nfrom seqfuse import Sequential as build\n"
    (tmp_path / "other_warning.py").write_text(text)
    done = cli("plan", "other_warning:build")
    assert done.status == 0
    assert done.err == "seqfuse: UserWarning: mind the gap\n"


def without(missing: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    blocked = f"import sys; sys.modules[{missing!r}] = None; from seqfuse.cli import main"
    return python("-c", f"{blocked}; raise SystemExit(main({[*arguments]}))")


@pytest.mark.parametrize(("missing", "arguments"), [("cyclopts", ["doctor"]), ("rich", ["--help"])])
def test_without_its_packages_it_says_what_to_install(missing: str, arguments: list[str]) -> None:
    done = without(missing, *arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == f"seqfuse: this needs the package {missing}: pip install cyclopts rich\n"


def test_without_rich_everything_but_help_is_there(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text("from seqfuse import Sequential, ops\nmodel = Sequential(ops.ReLU())\n")
    done = without("rich", "plan", f"{tmp_path}/made.py:model")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Plan for")


def test_output_has_nothing_that_a_terminal_would_obey(capsys: pytest.CaptureFixture[str]) -> None:
    from seqfuse.cli.output import tell

    tell("words\x1b[2J", "bold")
    assert capsys.readouterr().out == "words?[2J\n"


@pytest.mark.parametrize("name", ["RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"])
def test_only_the_first_rank_works(name: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    assert cli("plan", "M:raising") == (0, "", "")
    monkeypatch.setenv(name, "0")
    assert cli("plan", "M:raising").status == 2


@pytest.mark.parametrize(
    "arguments", [pytest.param(["doctor"], marks=pytest.mark.full), ["plan", "--help"]], ids=" ".join
)
def test_a_reader_that_goes_away_is_no_error(arguments: list[str]) -> None:
    # The reader is gone before anything is written.
    gone = "reader, writer = os.pipe()\nos.close(reader)\nos.dup2(writer, 1)\nos.close(writer)\n"
    command = f"sys.argv = {['seqfuse', *arguments]}\nrunpy.run_module('seqfuse', run_name='__main__')"
    done = python("-c", f"import os, runpy, sys\n{gone}{command}")
    assert (done.returncode, done.stdout, done.stderr) == (141, "", "")


def on_a_terminal(code: str) -> str:
    """Output of code on a pseudo terminal."""
    environment = {**os.environ, "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    own = "import os, pty\ncontroller, terminal = pty.openpty()\nos.dup2(terminal, 1)\n"
    read = "\nsys.stdout.flush()\nos.write(2, os.read(controller, 4096))"
    return Script("-c", f"import sys\n{own}{code}{read}", environment=environment).done().stderr


def test_colors_are_for_terminals_only(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    heading = "from seqfuse.cli.output import tell; tell('a heading', 'bold')"
    assert "\x1b[1m" in on_a_terminal(heading)
    apart = python("-c", heading)
    assert (apart.returncode, apart.stdout) == (0, "a heading\n")
    assert "\x1b" not in cli("--help").out


def test_importing_the_library_imports_no_command() -> None:
    code = "import sys, seqfuse; print([m for m in sys.modules if m.startswith(('seqfuse.cli', 'cyclopts', 'rich'))])"
    done = Script("-c", code, bare=True).done()
    assert done.stdout == "[]\n"


EVALUATED = """
import warnings

import seqfuse as sf


class Model(sf.Sequential):
    def eval(self):
        warnings.warn("evaluated")
        return super().eval()


def build():
    return Model(sf.ops.Dropout(0.5), sf.ops.Linear(4, 4))
"""


@pytest.mark.parametrize(
    "verb", [("plan",), ("compare",), ("check", "--dtype", "float32"), ("tune", "--budget", "0", "--modes", "eval")]
)
def test_every_verb_that_runs_a_model_can_put_it_into_evaluation(
    verb: tuple[str, ...], cli: Cli, tmp_path: Path
) -> None:
    (tmp_path / "other_eval.py").write_text(EVALUATED)
    given = (verb[0], "other_eval:build", "--input", "4x4", "--device", "cpu", *verb[1:])
    assert "evaluated" not in cli(*given).err
    done = cli(*given, "--eval")
    assert done.status == 0
    assert "evaluated" in done.err


def test_the_package_declares_the_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"seqfuse": "seqfuse.cli:main"}
    assert {"cyclopts", "rich"} <= {*project["optional-dependencies"]["cli"]}
