"""The package as a whole: what importing it does, its names, docstrings, sizes, and the wheel."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
import sysconfig
import textwrap
import tomllib
import types
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "seqfuse"
SOURCES = sorted(PACKAGE.rglob("*.py"))

PUBLIC = {
    "BackwardFusion", "Env", "ForwardFusion", "FusableOperation", "FusedOperation", "Fuser", "Gated", "Grads",
    "InferenceFusion", "JointFusion", "Plan", "Pointwise", "Recompute", "Requirements", "Saved", "Savings",
    "Sequential", "UnfusedOperation", "errors", "field", "fusing", "fusions", "ops", "testing", "tune",
}  # fmt: skip

# torch comes first: what seqfuse adds to it is counted.
IMPORT = """
    import json, os, sys, threading
    import torch

    def touched(*args, **kwargs):
        raise AssertionError("importing seqfuse asked for CUDA")

    for name in ("is_available", "device_count", "init", "_lazy_init", "current_device", "get_device_capability"):
        setattr(torch.cuda, name, touched)

    before, events = set(sys.modules), []

    def watch(event, args):
        writes = event == "open" and ((args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if writes or event.startswith(("socket.", "subprocess.", "shutil.")) or event in (
            "ctypes.dlopen", "os.exec", "os.fork", "os.mkdir", "os.posix_spawn", "os.remove", "os.rename", "os.system",
        ):
            events.append(f"{event} {args}")

    sys.addaudithook(watch)
    import seqfuse
    loaded = sorted(set(sys.modules) - before)
    found = {
        "events": [*events], "loaded": loaded, "cuda": torch.cuda.is_initialized(), "threads": threading.active_count(),
    }
    found["listed"] = dir(seqfuse)
    found["late"] = {
        name: [f"seqfuse.{name}" in sys.modules, getattr(seqfuse, name) is sys.modules[f"seqfuse.{name}"]]
        for name in ("inference", "losses", "nn", "testing")
    }
    try:
        seqfuse.inferense
    except AttributeError as error:
        found["misspelt"] = str(error)
    print(json.dumps(found))
"""


def run_python(code: str, *paths: Path) -> str:
    # -B: bytecode caches are Python's writes, not ours.
    code = f"import sys; sys.path[:0] = {[str(path) for path in paths]}\n{textwrap.dedent(code)}"
    done = subprocess.run([sys.executable, "-B", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Side effects of `import seqfuse` in another process, with a plug-in installed."""
    site = tmp_path_factory.mktemp("site")
    info = site / "seqfuse_greedy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: seqfuse-greedy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[seqfuse.fusions]\ngreedy = seqfuse_greedy:fusions\n")
    (site / "seqfuse_greedy.py").write_text("fusions = ()\n")
    return json.loads(run_python(IMPORT, site))


def test_import_opens_no_socket_writes_no_file_and_starts_no_process(imported: dict[str, object]) -> None:
    assert imported["events"] == []


def test_import_touches_no_cuda_and_starts_no_thread(imported: dict[str, object]) -> None:
    assert imported["cuda"] is False
    assert imported["threads"] == 1


def test_import_runs_no_plugin(imported: dict[str, list[str]]) -> None:
    assert not [name for name in imported["loaded"] if name.startswith("seqfuse_greedy")]


def test_import_is_light(imported: dict[str, list[str]]) -> None:
    foreign = {name for name in imported["loaded"] if name.split(".")[0] != "seqfuse"}
    heavy = {
        "cyclopts", "hypothesis", "numpy", "pytest", "rich", "sympy", "torch._dynamo", "torch._inductor",
        "transformers", "triton",
    }  # fmt: skip
    assert not foreign & heavy
    assert len(foreign) <= 20, sorted(foreign)
    assert [name for name in imported["loaded"] if name.startswith("seqfuse.convert")] == ["seqfuse.convert"]


def test_parts_that_not_everybody_needs_are_imported_when_asked_for(imported: dict[str, Any]) -> None:
    assert all(found == [False, True] for found in imported["late"].values())
    assert {*imported["late"]} <= {*imported["listed"]}
    hint = "module 'seqfuse' has no attribute 'inferense'\nHint: did you mean sf.inference?"
    assert imported["misspelt"] == hint


def test_without_torch_one_sentence_says_what_to_do() -> None:
    code = """
        import sys
        sys.modules["torch"] = None
        try:
            import seqfuse
        except ModuleNotFoundError as error:
            print(error.name, error, error.__suppress_context__, sep="|")
    """
    name, sentence, alone = run_python(code).strip().split("|")
    assert (name, alone) == ("torch", "True")
    assert sentence.startswith("seqfuse needs PyTorch 2.11 or later: pip install 'torch>=2.11'")


def test_an_import_that_fails_inside_torch_is_not_taken_for_a_missing_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import no_such_module\n")
    code = """
        try:
            import seqfuse
        except ModuleNotFoundError as error:
            print(error)
    """
    assert run_python(code, tmp_path) == "No module named 'no_such_module'\n"


def test_every_public_name_is_there() -> None:
    import seqfuse

    missing = sorted(name for name in PUBLIC if not hasattr(seqfuse, name))
    assert missing == []


def test_every_other_name_is_private() -> None:
    import seqfuse

    public = {
        name
        for name, value in vars(seqfuse).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name != "annotations"
    }
    assert public <= set(seqfuse.__all__)
    assert [name for name in seqfuse.__all__ if not hasattr(seqfuse, name)] == []


def public_definitions(tree: ast.Module) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            yield node


TREES = functools.cache(lambda: {source: ast.parse(source.read_text()) for source in SOURCES})


def test_every_public_definition_starts_with_an_index_line() -> None:
    missing = [
        f"{source.relative_to(PACKAGE)}: {getattr(node, 'name', 'module')}"
        for source, tree in TREES().items()
        for node in (tree, *public_definitions(tree))
        if not (ast.get_docstring(node) or "").split("\n")[0]
    ]
    assert missing == []


def test_a_file_is_one_subject_of_at_most_600_lines() -> None:
    lines = {str(source.relative_to(PACKAGE)): len(source.read_text().splitlines()) for source in SOURCES}
    assert {name: count for name, count in lines.items() if count > 600} == {}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_the_wheel_is_pure_and_typed(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "seqfuse/py.typed" in names
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"seqfuse"}
    assert {str(source.relative_to(ROOT)) for source in SOURCES} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_holds_what_a_wheel_should(wheel: Path) -> None:
    check_wheel_contents = pytest.importorskip("check_wheel_contents.__main__", exc_type=ImportError)
    done = subprocess.run(
        [sys.executable, "-m", check_wheel_contents.__package__, str(wheel)], capture_output=True, text=True
    )
    assert done.stdout.strip().endswith(": OK"), done.stdout + done.stderr


def test_the_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    venv.create(empty, with_pip=False)
    python = empty / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)

    def run(code: str) -> subprocess.CompletedProcess[str]:
        # Isolated: a PYTHONPATH would bring torch, or this repository, along.
        return subprocess.run([python, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True)

    without = run("import seqfuse")
    assert without.stderr.strip().splitlines()[-1].startswith("ModuleNotFoundError: seqfuse needs PyTorch 2.11")
    # Its dependencies are those of the environment under test, behind what was installed.
    (site,) = empty.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    used = run(
        "import torch, seqfuse as sf\n"
        "model = sf.Sequential(sf.ops.Linear(8, 8), sf.ops.GeLU())\n"
        "model(torch.randn(2, 8)).sum().backward()\n"
        "print(sf.__file__, sf.__version__, model.plan(torch.randn(2, 8)).fused, sep='\\n')"
    )
    file, version, fused = used.stdout.splitlines()
    assert Path(file).is_relative_to(site.resolve())
    assert version == wheel.name.split("-")[1]
    assert fused == "(1, 1)"


def test_the_version_is_one_everywhere() -> None:
    import seqfuse

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert seqfuse.__version__ == declared
    assert f"\nversion: {declared}\n" in (ROOT / "CITATION.cff").read_text()
    heading = re.search(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading is not None
    assert heading[1] == declared
