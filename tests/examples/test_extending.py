"""The extension examples: printed output, line counts, and the plug-in as a package."""

from __future__ import annotations

import os
import re
import textwrap
import zipfile
from pathlib import Path

import pytest
import torch

from seqfuse.env import why_no_c
from tests.examples.counted import lines_of
from tests.processes import Script

ROOT = Path(__file__).resolve().parent.parent.parent
FUSION = ROOT / "examples" / "04_write_a_fusion.py"
KERNEL = ROOT / "examples" / "08_write_a_kernel.py"
PLUGIN = ROOT / "examples" / "05_plugin"


def run(*command: str, folder: Path, warned: str = "", **environment: str) -> list[str]:
    """The lines printed by `python <command>`, which succeeds and warns only of `warned`."""
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET" and not k.startswith("PYTEST_")}
    # A process interprets kernels from its first import of Triton on.
    bare = "TRITON_INTERPRET" in environment or "pytest" in command
    done = Script(*command, folder=folder, environment=inherited | environment, bare=bare).done()
    assert done.returncode == 0, done.stdout + done.stderr
    warnings = [line for line in done.stderr.splitlines() if "Warning" in line]
    assert bool(warnings) == bool(warned), done.stderr
    assert all(warned in line for line in warnings), done.stderr
    return done.stdout.splitlines()


def test_an_activation_and_a_fusion_are_as_short_as_they_are_said_to_be() -> None:
    assert lines_of(FUSION, "HardSwish") <= 15
    assert lines_of(FUSION, "ScaleTanhScale", "chains") <= 30


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_without_kernels_the_fusion_is_planned_for_a_gpu_and_refused_here(tmp_path: Path) -> None:
    off = {"PYTHONPATH": str(ROOT), "SEQFUSE_C_KERNELS": "0"}
    lines = run(str(FUSION), folder=tmp_path, warned="check_fusion ran nothing of ", **off)
    assert "ScaleTanhScale: 0 cases on no op sequence" in lines
    assert "On cpu bfloat16, up to 16 tokens: 0 ScaleTanhScale" in lines
    assert lines[-1] == "not applied: C kernels are switched off by SEQFUSE_C_KERNELS=0"
    assert_planned(lines)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
@pytest.mark.parametrize("kernels", ["c", "triton"])
def test_its_kernels_are_checked_in_one_call_and_used(kernels: str, tmp_path: Path) -> None:
    if kernels == "c" and why_no_c():
        pytest.skip(why_no_c())
    environment = {"TRITON_INTERPRET": "1"} if kernels == "triton" else {}
    lines = run(str(FUSION), folder=tmp_path, PYTHONPATH=str(ROOT), **environment)
    text = "\n".join(lines)
    for name, of in (
        ("PointwiseChain", "Bias, HardSwish"),
        ("PointwiseChainBackward", "Bias, HardSwish"),
        ("ScaleTanhScale", "Scale, Tanh, Scale"),
    ):
        assert re.search(rf"^{name}: [1-9]\d+ cases on \[{of}\]$", text, re.MULTILINE), text
    assert "skipped" not in text
    assert lines[-1] == "On cpu bfloat16, up to 16 tokens: 1 ScaleTanhScale"
    assert_planned(lines)
    page = (ROOT / "docs" / "write_a_kernel.md").read_text()
    shown = page.partition("<!-- what it prints -->\n```text\n")[2].partition("```")[0]
    assert shown == text + "\n", "put what it prints into docs/write_a_kernel.md"


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_a_kernel_of_one_s_own_is_checked_in_both_passes_and_compiled(tmp_path: Path) -> None:
    lines = run(str(KERNEL), folder=tmp_path, PYTHONPATH=str(ROOT), TRITON_INTERPRET="1")
    checked, *compiled = lines
    assert re.fullmatch(r"TanhScale: [1-9]\d+ cases on \[Tanh, LayerScale\]", checked), lines
    for name, line in zip(("forward", "backward"), compiled, strict=True):
        assert re.fullmatch(rf"{name}_kernel for sm_90: \d+ registers, 0 bytes spilled", line), line


def assert_planned(lines: list[str]) -> None:
    """The plan for another machine has the new operation in the library's fusions, and the new fusion."""
    begins = [name for line in lines for name in re.findall(r"\[ (\w+)", line) if re.match(r" +\d+  ", line)]
    counts = {"LinearBiasPointwise": 1, "PointwiseChainBackward": 1, "ScaleTanhScale": 2}
    assert {name: begins.count(name) for name in counts} == counts


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plug-in installed: its unpacked wheel, as an installer would lay it out."""
    wheels, site = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("site")
    run("-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels), folder=PLUGIN)
    (wheel,) = wheels.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    return site


def installed(site: Path) -> str:
    return os.pathsep.join((str(site), str(ROOT)))


def test_the_plug_in_is_as_short_as_it_is_said_to_be() -> None:
    source = PLUGIN / "src" / "seqfuse_mish"
    mish = lines_of(source / "kernels.py", "mish", "mish_derivative") + lines_of(source / "operation.py", "Mish")
    add = lines_of(source / "kernels.py", "add_mish_kernel", "add_mish", "results") + lines_of(
        source / "add.py", "AddMish"
    )
    readme = (PLUGIN / "README.md").read_text()
    assert mish <= 15
    assert add <= 30
    assert f"`Mish` is {mish} lines" in readme
    assert f"a kernel of its own, in {add} lines" in readme
    page = " ".join((ROOT / "docs" / "write_a_fusion.md").read_text().split())
    assert f"an activation in {mish} lines, a fusion with its own kernel in {add}," in page


def test_the_plug_in_is_a_typed_package(site: Path) -> None:
    names = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    assert "seqfuse_mish/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"seqfuse_mish", "seqfuse_mish-0.1.0.dist-info"}


def test_the_plug_in_is_listed_without_being_imported_and_loaded_by_name(site: Path, tmp_path: Path) -> None:
    code = """
        import sys
        import seqfuse as sf
        print(*sf.plugins.available(), any(name.startswith("seqfuse_mish") for name in sys.modules))
        print(*(fusion.__name__ for fusion in sf.plugins.load("mish")))
        print(any(fusion.__name__ == "AddMish" for fusion in sf.fusions.default))
    """
    lines = run("-c", textwrap.dedent(code), folder=tmp_path, PYTHONPATH=installed(site))
    assert lines == ["mish (seqfuse-mish 0.1.0, seqfuse_mish:fusions) False", "AddMish", "False"]


def test_the_plug_in_passes_its_own_tests(site: Path) -> None:
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    lines = run("-m", "pytest", *options, folder=PLUGIN, PYTHONPATH=installed(site), PYTHONDONTWRITEBYTECODE="1")
    assert re.search(r"[1-9]\d* passed", lines[-1]), lines
    assert not re.search("failed|error|skipped", lines[-1]), lines


def test_the_plug_in_s_readme_shows_what_is_printed(site: Path, tmp_path: Path) -> None:
    code = f"""
        from pathlib import Path
        from tests.examples import printed
        page = Path({str(PLUGIN / "README.md")!r})
        new = printed.regenerated(page)
        assert new == page.read_text(), new
    """
    run("-c", textwrap.dedent(code), folder=tmp_path, PYTHONPATH=installed(site))
