"""`seqfuse doctor` reports the environment, and warns of what is wrong with it."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import seqfuse as sf
from seqfuse import fusions
from seqfuse.cli import doctor
from seqfuse.settings import Settings

from .conftest import Cli

# Plans of every fusion, which no test changes: computed once.
FUSIONS = functools.cache(doctor._fusions)
ALL = {fusion.__name__ for fusion in (*fusions.default, *fusions.lean)}


@pytest.fixture(autouse=True)
def _homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_fusions", FUSIONS)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def found(cli: Cli, status: int = 0) -> dict[str, Any]:
    done = cli("doctor", "--json")
    assert (done.status, done.err) == (status, "")
    return json.loads(done.out)


def test_versions_devices_and_settings(cli: Cli) -> None:
    data = found(cli)
    # A wheel of another index may leave the build ("+cu132") out of its own version.
    assert data["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert data["devices"][0]["name"] == "cpu"
    assert len(data["devices"]) == 1 + torch.cuda.device_count()
    assert data["settings"].keys() == {field.name for field in dataclasses.fields(Settings)}
    assert (data["settings"]["fusing"], data["settings"]["tune"]) == (True, False)
    assert data["warnings"] == []


def test_every_fusion_can_run_or_has_a_reason(cli: Cli) -> None:
    data = found(cli)
    for device, can in data["can_run"].items():
        cannot = [name for names in data["cannot_run"][device].values() for name in names]
        assert sorted([*can, *cannot]) == sorted(ALL)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    aten = {fusion.__name__ for fusion in fusions.aten}
    bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    elsewhere = {*data["cannot_run"]["cpu"]["needs several processes"]}
    elsewhere |= set() if bfloat16 else {"LinearBiasActOneDNN"}
    assert aten - {*data["can_run"]["cpu"]} == elsewhere
    here = sf.Env.of("cpu").kernels
    every = (*fusions.default, *fusions.lean)
    assert {f.__name__ for f in fusions.lean if not f.kernels or here in f.kernels} <= {*data["can_run"]["cpu"]}
    needs = {*data["cannot_run"]["cpu"].get("needs a Triton device", ())}
    assert needs == (set() if interpreted else {f.__name__ for f in every if f.kernels == ("triton",)})


def test_fusions_are_counted_and_listed_if_that_is_asked_for(cli: Cli) -> None:
    short, long = cli("doctor").out, cli("doctor", "--verbose").out
    assert "NormBackward" not in short
    assert "NormBackward" in long
    assert "  --verbose lists them\n" in short
    assert "--verbose" not in long


def test_a_fusion_that_refuses_has_its_own_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(fusions.LinearBias):
        linear: sf.ops.Linear

    def requires(self: object, env: sf.Env) -> sf.Requirements:
        yield False, "it is a Sunday"

    monkeypatch.setattr(fusions.LinearBias, "requires", requires)
    assert doctor._refused(fusions.LinearBias, "cpu") == "it is a Sunday"


def test_our_own_variables_are_checked(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQFUSE_FSUING", "0")
    (warning,) = found(cli, 1)["warnings"]
    assert warning == "unknown environment variable SEQFUSE_FSUING; did you mean 'SEQFUSE_FUSING'?"


def test_a_cache_that_others_can_write_to_is_a_warning(cli: Cli, tmp_path: Path) -> None:
    def states() -> list[str]:
        return [c["state"] for c in found(cli)["caches"] if c["of"] != "C kernels"]

    assert states() == ["none yet"]
    tune = tmp_path / "cache" / "seqfuse" / "tune"
    tune.mkdir(parents=True, mode=0o700)
    assert states() == ["private"]
    tune.chmod(0o777)
    (warning,) = found(cli, 1)["warnings"]
    assert f"others may write to {tune}" in warning


def test_plugins_are_listed_and_not_imported(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2):
        info = tmp_path / f"seqfuse_odd{number}-1.{number}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: seqfuse-odd{number}\nVersion: 1.{number}\n")
        (info / "entry_points.txt").write_text("[seqfuse.fusions]\nodd = seqfuse_odd:fusions\n")
    (tmp_path / "seqfuse_odd.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    data = found(cli, 1)
    assert {p["distribution"] for p in data["plugins"]} == {"seqfuse-odd1", "seqfuse-odd2"}
    (warning,) = data["warnings"]
    assert "'odd' cannot be loaded" in warning


def test_for_readers(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQFUSE_FSUING", "0")
    done = cli("doctor")
    assert done.status == 1
    for title in ("versions", "devices", "caches", "settings", "plug-ins", "fusions on cpu", "warnings"):
        assert f"\n{title}\n" in f"\n{done.out}"
    assert "unknown environment variable SEQFUSE_FSUING" in done.out
    assert max(map(len, done.out.splitlines())) <= max(100, len(str(Path.cwd())) + 60)
