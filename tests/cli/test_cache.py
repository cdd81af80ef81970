"""`seqfuse cache`, `tune` and `bench`: what is kept is shown and cleared, measured, and run."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from seqfuse import cost_table
from seqfuse.cli import bench, tuning
from seqfuse.env import autocast_of
from seqfuse.settings import settings
from seqfuse.tune import TuneReport, timing

from .conftest import Cli


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where measurements are kept, in a home of its own, with tuning on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SEQFUSE_TUNE", "1")
    monkeypatch.setattr(cost_table, "_tables", {})
    monkeypatch.setattr(cost_table, "_warned", set())
    settings.cache_clear()
    yield tmp_path / "cache" / "seqfuse" / "tune"  # pyright: ignore[reportReturnType]
    settings.cache_clear()


def test_tuned_measurements_are_kept_shown_and_cleared(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steady = itertools.cycle([1000.0, 2000.0])
    monkeypatch.setattr(timing, "clock", lambda device: lambda run: (run(), next(steady))[1])
    assert cli("cache").out == "nothing is kept\n"
    assert json.loads(cli("cache", "--json").out) == {"folder": None, "files": [], "kernels": {"count": 0, "bytes": 0}}
    given = ("tune", "M:build", "--input", "64x16", "--modes", "eval", "--device", "cpu")
    report = json.loads(cli(*given, "--json").out)
    assert report["measured"] > 0
    assert report["file"] is not None
    assert report["file"].startswith(str(folder))
    shown = json.loads(cli("cache", "--json").out)
    (file,) = (f for f in shown["files"] if f["file"].endswith(".json"))
    assert (file["state"], file["measurements"]) == ("holds", report["measured"])
    assert "measurements, " in cli("cache").out
    again = cli(*given)
    assert "0 measured now" in again.out
    kept = {"not ours.txt", "notes.json", "notes.json.bad"}
    for name in kept:
        (folder / name).write_text("kept")
    assert json.loads(cli("cache", "--json").out) == shown
    assert cli("cache", "clear").out == f"removed {len(shown['files']) + shown['kernels']['count']} files\n"
    assert {p.name for p in folder.iterdir()} == kept


def test_files_that_are_not_sound_are_said_to_be_so(cli: Cli, folder: Path) -> None:
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o700)
    a, b, c, d, e = (digit * 16 for digit in "abcde")
    (folder / f"{a}.json").write_text("[")
    (folder / f"{b}.json").write_text('{"format": 99}')
    (folder / f"{c}.json").write_text("[]")
    (folder / f"{d}.json.bad").write_text("x")
    (folder / f"{e}.json").symlink_to("/etc/passwd")
    (folder / f"{e}.json.x1_.new").symlink_to("nowhere")
    (folder / f"{a}.json.x1_.new").write_text("{}")
    (folder / f"{a}.json.mine").write_text("kept by hand")
    states = {f["file"]: f["state"] for f in json.loads(cli("cache", "--json").out)["files"]}
    assert states.pop(f"{a}.json").startswith("cannot be read")
    assert states.pop(f"{a}.json.x1_.new") == "of a writer"
    assert states == {f"{b}.json": "of another form", f"{c}.json": "corrupt", f"{d}.json.bad": "corrupt"}
    cli("cache", "clear")
    assert [path.name for path in folder.iterdir()] == [f"{a}.json.mine"]
    assert Path("/etc/passwd").exists()


def test_a_folder_that_others_may_write_to_is_not_touched(cli: Cli, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "a.json").write_text("{}")
    folder.chmod(0o777)
    for verb in (("cache",), ("cache", "clear")):
        done = cli(*verb)
        assert (done.status, done.out) == (2, "")
        assert "others may write" in done.err
    assert (folder / "a.json").exists()


def test_it_says_that_the_machine_is_busy_and_keeps_nothing(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices = itertools.cycle([2e7, 4e7, 6e7, 2e7, 4e7, 2e7, 6e7])
    monkeypatch.setattr(timing, "clock", lambda device: lambda run: (run(), next(slices))[1])
    monkeypatch.setattr(timing, "ROUNDS", (3, 3))
    given = ("tune", "M:build", "--input", "64x16", "--modes", "eval", "--device", "cpu")
    report = json.loads(cli(*given, "--json").out)
    assert report["measured"] == 0
    assert all(row["noise_us"] > 1000 and row["note"].startswith("not kept: ") for row in report["rows"])
    assert "this machine is busy: " in cli(*given).out
    assert not list(folder.glob("*.json"))


def test_tuning_into_a_file(cli: Cli, tmp_path: Path) -> None:
    done = cli("tune", "M:build", "--input", "8x16", "--file", "kept.json", "--budget", "0", "--device", "cpu")
    assert done.status == 0
    assert "the budget ran out before" in done.out
    assert done.err == ""  # no bar where nobody looks


def test_tuning_is_under_autocast_where_that_is_asked_for(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype | None] = []
    monkeypatch.setattr(tuning, "tune", lambda *_, **__: seen.append(autocast_of("cpu")) or TuneReport(()))
    for asked in ((), ("--autocast", "bf16")):
        assert cli("tune", "M:build", "--input", "8x16", "--device", "cpu", *asked).status == 0
    assert seen == [None, torch.bfloat16]


def test_a_file_of_the_users_that_is_no_table_is_refused(cli: Cli, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("print('mine')")
    done = cli("tune", "M:build", "--input", "8x16", "--file", "own.py", "--modes", "eval", "--device", "cpu")
    assert (done.status, done.out) == (2, "")
    assert "own.py holds no measurements of this machine, and is left as it is: it is no JSON" in done.err
    assert own.read_text() == "print('mine')"
    done = cli("tune", "M:build", "--input", "8x16", "--file", "no/table.json", "--modes", "eval", "--device", "cpu")
    assert done.status == 2
    assert "there is no folder no" in done.err
    assert {p.name for p in tmp_path.iterdir() if not p.name.startswith(("models_", "__pycache__"))} == {"own.py"}


def test_benchmarks_of_this_clone_are_listed(cli: Cli) -> None:
    done = cli("bench")
    assert done.status == 0
    names = {line.split()[0] for line in done.out.splitlines()}
    assert {path.stem.removeprefix("bench_") for path in bench.programs().values()} == names
    assert "host" in names


def test_a_benchmark_gets_its_arguments_and_gives_its_status(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bench_made.py"
    program.write_text('"""Say what was given."""\nimport sys\nsys.exit(len(sys.argv) + (sys.argv[1] == "--fast"))\n')
    monkeypatch.setattr(bench, "programs", lambda: {"made": program})
    assert cli("bench", "made", "--fast", "2").status == 4
    assert cli("bench", "made", "slow").status == 2
    assert bench.described(program) == "Say what was given."


def test_without_a_clone_it_says_so(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "site" / "seqfuse" / "cli" / "bench.py"))
    done = cli("bench")
    assert done.status == 2
    assert "run this within a clone" in done.err
