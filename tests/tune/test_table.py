"""The file of measurements: validated, private, replaced as a whole; whatever is wrong with it, tuning goes on."""

from __future__ import annotations

import contextlib
import enum
import errno
import json
import os
import re
import stat
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import seqfuse as sf
from seqfuse import cost_table, store
from seqfuse.cost_table import Machine, Measurement
from tests.processes import CONTEXT
from tests.tune.kit import Quick, Slow, X, forget, pair

ROOT = Path(__file__).resolve().parents[2]
REASON = "measured 80.0 us against 50.0 us unfused"


def machine() -> Machine:
    found = Machine.of(sf.Env.like(X))
    assert found is not None
    return found


@contextlib.contextmanager
def cache_warnings() -> Iterator[list[str]]:
    """The warnings of a block, all of which are about the cache."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    assert {w.category for w in caught} <= {sf.CacheWarning}
    said += [str(w.message) for w in caught]


def written(cache: Path) -> Path:
    """A file with one entry, that of `Slow`."""
    sf.tune(pair(Slow), X, modes="train")
    (path,) = cache.glob("*.json")
    return path


def slow_is_refused() -> bool:
    plan = pair(Slow).plan(X)
    return [r.reason for r in plan.refused] == [REASON] and not plan.count("Slow")


def with_entry(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    document = json.loads(path.read_text())
    (key,) = document["entries"]
    document["entries"][key] = change(document["entries"][key])
    path.write_text(json.dumps(document))


def changed(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


CORRUPT: dict[str, Callable[[Path], object]] = {
    "empty": lambda p: p.write_bytes(b""),
    "truncated": lambda p: p.write_bytes(p.read_bytes()[:-20]),
    "binary": lambda p: p.write_bytes(bytes(range(256)) * 9),
    "deep": lambda p: p.write_text("[" * 100_000),
    "a list": lambda p: p.write_text("[]"),
    "no entries": lambda p: changed(p, entries=None),
    "no machine": lambda p: changed(p, machine="this"),
    "entry is a number": lambda p: with_entry(p, lambda e: 3),
    "NaN": lambda p: with_entry(p, lambda e: {**e, "fused": float("nan")}),
    "infinite": lambda p: with_entry(p, lambda e: {**e, "unfused": float("inf")}),
    "1e999": lambda p: p.write_text(p.read_text().replace('"unfused": 5', '"unfused": 1e999')),
    "negative": lambda p: with_entry(p, lambda e: {**e, "fused": -1}),
    "zero": lambda p: with_entry(p, lambda e: {**e, "fused": 0}),
    "true": lambda p: with_entry(p, lambda e: {**e, "fused": True}),
    "text": lambda p: with_entry(p, lambda e: {**e, "fused": "1"}),
    "one time": lambda p: with_entry(p, lambda e: {"fused": 1}),
    "noise that is none": lambda p: with_entry(p, lambda e: {**e, "noise": -1}),
    "both": lambda p: with_entry(p, lambda e: {**e, "failed": "so"}),
    "huge integer": lambda p: with_entry(p, lambda e: {**e, "fused": 10**400}),
    "unknown fields": lambda p: with_entry(p, lambda e: {**e, "ir_override": "evil.py"}),
    "of another machine": lambda p: changed(p, machine={**json.loads(p.read_text())["machine"], "device": "an abacus"}),
    "failed for nothing": lambda p: with_entry(p, lambda e: {"failed": ""}),
    "too big": lambda p: os.truncate(p, store.MOST_BYTES + 1),
}
FOREIGN: dict[str, Callable[[Path], object]] = {
    "a folder": lambda p: (p.mkdir(), (p / "held").write_text("by it")),
    "a pipe": os.mkfifo,
    "a link": lambda p: p.symlink_to(p.with_name("elsewhere")),
    "a link to nothing": lambda p: p.symlink_to("nowhere"),
}


@pytest.mark.parametrize("spoil", CORRUPT.values(), ids=CORRUPT.keys())
def test_a_corrupt_file_is_removed_and_tuning_goes_on(
    spoil: Callable[[Path], object], cache: Path, monkeypatch: pytest.MonkeyPatch
):
    path = written(cache)
    if spoil is CORRUPT["1e999"]:
        with_entry(path, lambda e: {**e, "unfused": 5})
    spoil(path)
    forget(monkeypatch)
    model = pair(Slow)
    with cache_warnings() as caught:
        assert model.plan(X).count("Slow") == 1
        model(X)
    assert len(caught) == 1
    assert "was corrupt and is removed: " in caught[0]
    assert not path.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sf.tune(model, X, modes="train").measured == 1
        forget(monkeypatch)
        assert slow_is_refused()


def tree(folder: Path) -> dict[str, Any]:
    """Everything in a folder, with the contents of files."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        about = path.lstat()
        held = path.read_bytes() if stat.S_ISREG(about.st_mode) else os.readlink(path) if path.is_symlink() else None
        found[str(path.relative_to(folder))] = about.st_ino, about.st_mtime_ns, held
    return found


@pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN.keys())
def test_what_the_library_did_not_write_in_its_folder_is_not_moved(
    make: Callable[[Path], object], cache: Path, monkeypatch: pytest.MonkeyPatch
):
    path = written(cache)
    path.rename(cache / "elsewhere")
    make(path)
    before = tree(cache)
    forget(monkeypatch)
    with cache_warnings() as caught:
        assert pair(Slow).plan(X).count("Slow") == 1
        sf.tune(pair(Slow), X, modes="train")
    assert len(caught) == 1
    assert re.search(r"cannot be read: it is (not a regular file|a symbolic link)", caught[0])
    assert slow_is_refused()
    assert tree(cache) == before


NO_TABLES: dict[str, Callable[[Path], object]] = {
    "empty": lambda p: p.write_text(""),
    "a script": lambda p: p.write_text("print('mine')\n"),
    "a checkpoint": lambda p: torch.save({"w": torch.ones(3)}, p),
    "another JSON": lambda p: p.write_text('{"format": 2, "entries": []}'),
    "too big": lambda p: (p.touch(), os.truncate(p, store.MOST_BYTES + 1)),
    **FOREIGN,
}


@pytest.mark.parametrize("make", NO_TABLES.values(), ids=NO_TABLES.keys())
def test_a_file_of_the_users_that_is_no_table_is_an_error_and_stays_as_it_is(
    make: Callable[[Path], object], tmp_path: Path
):
    folder = tmp_path / "theirs"
    folder.mkdir()
    path = folder / "own"
    (folder / "elsewhere").write_text("{}")
    for beside in ("own.lock", "own.new"):
        (folder / beside).write_text("as old as it was")
    make(path)
    before = tree(folder)
    with cache_warnings() as caught, pytest.raises(sf.InputError, match=r"SF106: .*own holds no measurements of"):
        sf.tune(pair(Slow), X, modes="train", file=path)
    assert caught == []
    assert tree(folder) == before


def test_what_stands_beside_a_file_of_the_users_stays_as_it_is(tmp_path: Path):
    beside = [tmp_path / f"poetry{end}" for end in (".lock", ".new")]
    for one in beside:
        one.write_text("theirs")
    assert sf.tune(pair(Slow), X, modes="train", file=tmp_path / "poetry").file == tmp_path / "poetry"
    assert [one.read_text() for one in beside] == ["theirs"] * 2


def test_a_file_of_the_users_that_changes_while_it_is_in_use_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, whole = tmp_path / "own", cost_table.save

    def meanwhile(*given: Any, **more: Any) -> None:
        path.write_text("theirs")
        whole(*given, **more)

    monkeypatch.setattr(cost_table, "save", meanwhile)
    with cache_warnings() as caught:
        assert sf.tune(pair(Slow), X, modes="train", file=path).measured == 1
    assert len(caught) == 1
    assert "kept in memory only: it is not JSON" in caught[0]
    assert path.read_text() == "theirs"
    assert slow_is_refused()


@pytest.mark.parametrize(
    ("file", "says"),
    [(3, "file must be a path, not 3"), ("no/own", "no folder no\nHint: make the folder first")],
)
def test_what_names_no_file_is_refused(file: Any, says: str):
    with pytest.raises(sf.InputError, match=says):
        sf.tune(pair(Slow), X, modes="train", file=file)


def test_numbers_that_are_whole_are_times_too(cache: Path, monkeypatch: pytest.MonkeyPatch):
    with_entry(written(cache), lambda e: {"fused": 80_000, "unfused": 50_000})
    forget(monkeypatch)
    assert slow_is_refused()


def test_unknown_candidates_are_passed_by(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    path = written(cache)
    document = json.loads(path.read_text())
    (key,) = document["entries"]
    evil = tmp_path / "evil.py"
    evil.write_text("raise SystemExit('imported')\n")
    document["entries"] = {
        f"evil:Fusion | {key}": {"fused": 1.0, "unfused": 2.0},
        key.replace("Slow", "Quick"): {"fused": 1.0, "unfused": 9e9},
        "__import__('os').system('false')": {"failed": "x"},
    }
    path.write_text(json.dumps({**document, "ir_override": str(evil)}))
    forget(monkeypatch)
    monkeypatch.syspath_prepend(str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = pair(Slow).plan(X)
    assert plan.count("Slow") == 1
    assert "evil" not in sys.modules
    assert sf.tune(pair(Slow), X, modes="train").measured == 1


class Depth(enum.Enum):
    ONE = 1


def test_operations_that_an_attribute_tells_apart_that_is_not_plain_data_are_not_measured():
    model = pair(Slow)
    model[1].depth = Depth.ONE
    report = sf.tune(model, X, modes="train")
    reason = "Slow: Halve has an attribute that is not plain data, so no time can be stored for it"
    assert (report.rows, report.skipped) == ((), (reason,))
    assert sf.tune(pair(Slow), X, modes="train").measured == 1
    assert (pair(Slow).plan(X).count("Slow"), model.plan(X).count("Slow")) == (0, 1)


def test_a_reason_in_a_file_is_text_and_short(cache: Path, monkeypatch: pytest.MonkeyPatch):
    with_entry(written(cache), lambda e: {"failed": "\x1b[31m" + "x" * 5000})
    forget(monkeypatch)
    plan = pair(Slow).plan(X)
    assert len(plan.refused[0].reason) < 400
    assert "\x1b" not in str(plan)


def test_the_sources_of_kernels_operations_and_fusions_count_as_a_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert machine().seqfuse == f"{sf.__version__} {cost_table._sources()}"
    monkeypatch.setattr(cost_table, "__file__", str(tmp_path / "measured.py"))
    seen = set()
    for name in ("kernels/one.py", "kernels/c/one.py", "kernels/c/one.h", "ops/one.py", "fusions/one.py", "nn/one.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
        cost_table._sources.cache_clear()
        seen.add(cost_table._sources())
    monkeypatch.undo()
    cost_table._sources.cache_clear()
    assert len(seen) == 5  # layers are not measured


def test_every_version_has_a_file_of_its_own():
    import dataclasses

    own = machine()
    others = [dataclasses.replace(own, **{f.name: "2"}) for f in dataclasses.fields(own)]
    assert len({own.file_name, *(m.file_name for m in others)}) == len(others) + 1


def test_a_gpu_is_known_by_name_architecture_and_driver(monkeypatch: pytest.MonkeyPatch):
    from types import SimpleNamespace

    from seqfuse import env

    cards = [("H100 SXM", 9), ("A100", 8), ("H100 PCIe", 9)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda i: SimpleNamespace(name=cards[i][0], gcnArchName=cards[i][0], major=cards[i][1], minor=0),
    )
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    caches = env._architecture, env._triton_runs, cost_table._machine
    for cache in caches:
        cache.cache_clear()
    try:
        own = Machine.of(sf.Env.of("cuda:sm_80"))
        assert own is not None
        assert (own.device, own.arch, own.threads) == ("A100", "sm_80", None)
        assert own.driver is not None
        assert str(Machine.of(sf.Env.of("cuda:sm_90"))) == "H100 PCIe + H100 SXM"
        assert Machine.of(sf.Env.of("cuda:sm_100")) is None
        assert Machine.of(sf.Env.of("meta")) is None
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        assert Machine.of(sf.Env.of("cuda:sm_80")) is None
    finally:
        for cache in caches:
            cache.cache_clear()


def test_a_file_of_another_machine_is_an_error_and_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "own.json"
    sf.tune(pair(Slow), X, modes="train", file=path)
    changed(path, machine={**json.loads(path.read_text())["machine"], "device": "an abacus"})
    text = path.read_text()
    forget(monkeypatch)
    with pytest.raises(sf.InputError, match="left as it is: it was measured on another machine"):
        sf.tune(pair(Slow, Quick), X, modes="train", file=path)
    assert path.read_text() == text
    path.unlink()
    assert sf.tune(pair(Slow), X, modes="train", file=path).file == path  # deleted, so a new one may be written


def test_two_machines_do_not_write_over_each_others_measurements(tmp_path: Path):
    import dataclasses

    path, found = tmp_path / "own.json", {"a": Measurement(1.0, 2.0)}
    cost_table.save(path, dataclasses.replace(machine(), device="an abacus"), found)
    text = path.read_text()
    with pytest.warns(sf.CacheWarning, match="kept in memory only: it was measured on another machine"):
        cost_table.save(path, machine(), found)
    assert path.read_text() == text


def test_what_is_measured_again_replaces_what_a_file_has(tmp_path: Path):
    path, again = tmp_path / "own.json", {"a": Measurement(3.0, 4.0)}
    for found in ({"a": Measurement(1.0, 2.0), "b": Measurement(5.0, 6.0)}, again):
        cost_table.save(path, machine(), found)
    assert cost_table.measured_in(path, machine()) == {"b": Measurement(5.0, 6.0), **again}


# Faults of folders.


def test_folders_and_file_are_the_users_alone(cache: Path):
    old = os.umask(0)
    try:
        path = written(cache)
    finally:
        os.umask(old)
    modes = [stat.S_IMODE(os.stat(p).st_mode) for p in (cache.parent, cache, path)]
    assert modes == [0o700, 0o700, 0o600]
    assert {p.name for p in cache.iterdir()} <= {path.name, f"{path.name}.seqfuse.lock"}


def made(folder: Path, mode: int = 0o700) -> Path:
    folder.mkdir(parents=True, mode=0o700)
    folder.chmod(mode)
    return folder


FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "writable by all": (lambda c: made(c, 0o777), "others may write to"),
    "writable by the group above": (lambda c: (made(c), c.parent.chmod(0o720)), "others may write to"),
    "a link": (lambda c: (made(c.parent), c.symlink_to(made(c.parent.parent / "elsewhere"))), "is a symbolic link"),
    "a link above": (
        lambda c: (made(c.parent.parent / "elsewhere" / "tune"), c.parent.symlink_to(c.parent.parent / "elsewhere")),
        "is a symbolic link",
    ),
    "a file": (lambda c: (made(c.parent), c.write_text("")), "is no folder"),
}


@pytest.mark.parametrize(("spoil", "says"), FOLDERS.values(), ids=FOLDERS.keys())
def test_a_folder_that_others_could_write_to_is_not_used(
    spoil: Callable[[Path], object], says: str, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    spoil(cache)
    before = sorted(str(p) for p in cache.parent.parent.rglob("*"))
    with cache_warnings() as caught:
        report = sf.tune(pair(Slow), X, modes="train")
        assert sf.tune(pair(Slow), X).rows
    assert len(caught) == 1
    assert re.search(f"the user's cache cannot be used: .*{says}", caught[0])
    assert report.file is None
    assert slow_is_refused()
    assert sorted(str(p) for p in cache.parent.parent.rglob("*")) == before


def test_a_folder_of_another_user_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch):
    written(cache)
    forget(monkeypatch)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.warns(sf.CacheWarning, match="belongs to another user"):
        assert pair(Slow).plan(X).count("Slow") == 1


def test_a_copy_of_the_sources_plans_where_nothing_was_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    with pytest.warns(sf.CacheWarning, match="the user's cache cannot be used: .*platformdirs") as caught:
        assert pair(Slow).plan(X).count("Slow") == 1
    assert len(caught) == 1
    sf.tune(pair(Slow), X, modes="train")
    assert slow_is_refused()


def refuse(monkeypatch: pytest.MonkeyPatch, name: str, error: OSError, of: str = "") -> None:
    """Makes a call of `os` fail for paths that contain `of`."""
    original = getattr(os, name)

    def failing(path: Any, *args: Any, **kwargs: Any) -> Any:
        if of in str(path):
            raise error
        return original(path, *args, **kwargs)

    monkeypatch.setattr(os, name, failing)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "read-only folder": lambda m: refuse(m, "mkdir", OSError(errno.EROFS, "read-only")),
    "no new file": lambda m: refuse(m, "open", PermissionError(errno.EACCES, "denied"), ".json"),
    "full disk": lambda m: refuse(m, "fsync", OSError(errno.ENOSPC, "no space left")),
    "no rename": lambda m: refuse(m, "replace", OSError(errno.EXDEV, "elsewhere")),
    "no home": lambda m: (
        m.delenv("XDG_CACHE_HOME"),
        m.setattr("platformdirs.user_cache_path", lambda name: Path("~/.cache") / name),
    ),
}  # fmt: skip


@pytest.mark.parametrize("spoil", FAULTS.values(), ids=FAULTS.keys())
def test_where_nothing_can_be_written_memory_serves(
    spoil: Callable[[pytest.MonkeyPatch], None], cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    spoil(monkeypatch)
    with cache_warnings() as caught:
        report = sf.tune(pair(Slow, Quick), X, modes="train")
        sf.tune(pair(Slow, Quick), X, modes="eval")
    assert len(caught) == 1
    assert (report.measured, report.file) == (2, None)
    assert slow_is_refused()
    monkeypatch.undo()
    assert [p for p in tmp_path.rglob("*") if p.is_file() and p.suffix != ".lock"] == []


def test_a_full_disk_leaves_what_was_there(cache: Path, monkeypatch: pytest.MonkeyPatch):
    path = written(cache)
    text = path.read_bytes()
    refuse(monkeypatch, "fsync", OSError(errno.ENOSPC, "no space left"))
    with pytest.warns(sf.CacheWarning, match="measurements are kept in memory only: .*no space"):
        sf.tune(pair(Slow, Quick), X)
    assert path.read_bytes() == text


# Several processes.


def _write(path: Path, here: cost_table.Machine, number: int, count: int) -> None:
    for i in range(count):
        cost_table.save(path, here, {f"{number} {i}": Measurement(1.0 + i, 2.0)})


def test_processes_that_write_together_lose_nothing(tmp_path: Path):
    folder = tmp_path / "together"
    folder.mkdir()
    path = folder / machine().file_name
    workers = [CONTEXT.Process(target=_write, args=(path, machine(), n, 12)) for n in range(3)]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        cost_table.measured_in(path, machine())
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert cost_table.measured_in(path, machine()).keys() == {f"{n} {i}" for n in range(3) for i in range(12)}
    assert {p.name for p in folder.iterdir()} <= {path.name, f"{path.name}.seqfuse.lock"}


def test_what_a_killed_writer_left_is_in_nobodys_way(cache: Path):
    path = written(cache)
    path.with_name(f"{path.name}.x1_.new").write_text("half of a")
    sf.tune(pair(Quick), X, modes="train")
    assert len(json.loads(path.read_text())["entries"]) == 2


def test_what_another_process_has_measured_is_found_by_the_next_call(cache: Path):
    path = written(cache)
    entries = cost_table.measured_in(path, machine())
    path.unlink()
    cost_table._tables.clear()
    sf.tune(pair(Quick), X, modes="train")
    cost_table.save(path, machine(), entries)
    report = sf.tune(pair(Quick, Slow), X, modes="train")
    assert report.measured == 0
    assert {r.fusion: r.fused_us for r in report.rows} == {
        "Quick": pytest.approx(10, 0.1),
        "Slow": pytest.approx(80, 0.1),
    }


def test_what_is_exactly_as_fast_is_not_used():
    assert Measurement(2000.0, 2000.0).refusal == "measured 2.0 us against 2.0 us unfused"
