"""The C compiler: which libraries are cached, which are never loaded, and what happens without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import warnings
from pathlib import Path

import pytest
import torch

import seqfuse as sf
from seqfuse import compiler, ops
from seqfuse.errors import CacheWarning, FallbackWarning
from tests.processes import Script

SOURCE = "int k(int n) { return n + %d; }\n"
needs_compiler = pytest.mark.skipif(compiler.compiler() is None, reason="no C compiler")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for one test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "_loaded", {})
    monkeypatch.setattr(compiler, "_failures", [])
    memories = (compiler.folder, compiler._found)
    for memory in memories:
        memory.cache_clear()
    compiler.compiler()
    yield tmp_path / "seqfuse" / "c"
    for memory in memories:
        memory.cache_clear()


def kept(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()} - {compiler._file(compiler._PROBE, compiler._found()[0])}


@needs_compiler
def test_a_kernel_is_compiled_once_and_then_loaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiler.function(SOURCE % 1)(2) == 3
    (name,) = kept(cache)
    assert not (cache / name).stat().st_mode & 0o077
    monkeypatch.setattr(compiler, "_loaded", {})
    monkeypatch.setattr(compiler, "_Compilation", None)  # nothing is compiled
    assert compiler.function(SOURCE % 1)(3) == 4


@needs_compiler
@pytest.mark.parametrize("how", ["empty", "cut", "changed", "text"])
def test_a_broken_file_is_compiled_again_and_never_loaded(
    cache: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.function(SOURCE % 2)
    (name,) = kept(cache)
    whole = (cache / name).read_bytes()
    broken = {"empty": b"", "cut": whole[:5000], "changed": whole[:-40] + b"x" + whole[-39:], "text": b"no library"}
    (cache / name).unlink()  # what is loaded stays mapped
    (cache / name).write_bytes(broken[how])
    (cache / name).chmod(0o600)
    monkeypatch.setattr(compiler, "_loaded", {})
    assert compiler._read(cache / name) is None
    assert compiler.function(SOURCE % 2)(1) == 3
    assert len((cache / name).read_bytes()) == len(whole)


@needs_compiler
def test_what_others_may_write_is_not_loaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.function(SOURCE % 3)
    (name,) = kept(cache)
    (cache / name).chmod(0o620)
    assert compiler._read(cache / name) is None
    (cache / name).chmod(0o600)
    (cache / "link.so").symlink_to(cache / name)
    assert compiler._read(cache / "link.so") is None
    cache.chmod(0o770)
    compiler.folder.cache_clear()
    with pytest.warns(CacheWarning, match="others may write to"):
        assert compiler.folder() != cache


@needs_compiler
def test_all_are_compiled_at_once_and_each_is_a_file(cache: Path) -> None:
    sources = [SOURCE % i for i in range(5)]
    assert compiler.compile_all([*sources, *sources]) == 5
    assert len(kept(cache)) == 5
    assert compiler.compile_all(sources) == 0
    assert [compiler.function(source)(10) for source in sources] == [10, 11, 12, 13, 14]


@needs_compiler
def test_threads_and_processes_share_a_cache(cache: Path) -> None:
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(compiler.function(SOURCE % 7)(1))) for _ in range(8)]
    for thread in threads:
        thread.start()
    program = f"from seqfuse import compiler; print(compiler.function({SOURCE % 7!r})(1))"
    others = [Script("-c", program, bare=True) for _ in range(2)]
    assert [other.done().stdout.strip() for other in others] == ["8", "8"]
    for thread in threads:
        thread.join()
    assert found == [8] * 8
    assert len(kept(cache)) == 1


@needs_compiler
def test_a_folder_that_was_removed_is_made_again(cache: Path) -> None:
    compiler.function(SOURCE % 10)
    shutil.rmtree(cache.parent)
    assert compiler.function(SOURCE % 11)(1) == 12
    shutil.rmtree(cache.parent)
    compiler.compile_all([SOURCE % 12])
    assert len(kept(cache)) == 1
    assert not cache.parent.stat().st_mode & 0o077


@needs_compiler
def test_a_forked_child_compiles(cache: Path) -> None:
    compiler.function(SOURCE % 8)
    with compiler._lock:
        child = os.fork()
        if not child:
            os._exit(int(compiler.function(SOURCE % 9)(1) != 10))
        assert os.waitpid(child, 0)[1] == 0


@needs_compiler
def test_a_source_that_is_wrong_is_one_clear_error(cache: Path) -> None:
    with pytest.raises(compiler.CompileError, match=r"cc .* failed: .*error: "):
        compiler.function("int k( {")
    assert compiler.compiler() is not None
    assert not kept(cache)


@needs_compiler
def test_flags_libraries_processor_and_openmp_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    known = compiler.compiler()
    assert known is not None
    others = (
        known._replace(flags=(*known.flags, "-g")), known._replace(processor="another"), known._replace(version="cc 1"),
        known._replace(path="/usr/bin/another"), known._replace(libraries=("-lz",)),
    )  # fmt: skip
    files = {compiler._file(SOURCE % 1, one) for one in (known, *others)}
    # Another torch may bring its OpenMP under another name, which a kernel is linked to.
    monkeypatch.setattr(compiler, "_openmp", lambda: ("/torch/lib/libgomp-0123abcd.so.1.0.0",))
    assert len({*files, compiler._file(SOURCE % 1, known)}) == 7


def block(width: int = 64) -> sf.Sequential:
    torch.manual_seed(0)
    return sf.Sequential(ops.Linear(width, width), ops.GeLU(), ops.Dropout(0.1))


def without(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    program = """
import warnings
warnings.simplefilter("error")
import torch, seqfuse as sf
from seqfuse import ops
model = sf.Sequential(ops.Linear(64, 64), ops.GeLU(), ops.Dropout(0.1))
x = torch.randn(64, 64, requires_grad=True)
model(x).sum().backward()
plan = model.plan(x)
print(plan.env.kernels, sorted({r.reason for r in plan.refused if r.fusion == "PointwiseChainBackward"}))
"""
    return Script("-c", program, environment=os.environ | environment, bare=True).done()


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"CC": "no-such-compiler"}, "no C compiler: CC=no-such-compiler is not a program"),
        ({"CC": "false"}, "false does not compile: "),
        ({"SEQFUSE_C_KERNELS": "0"}, "C kernels are switched off by SEQFUSE_C_KERNELS=0"),
    ],
)
def test_without_a_compiler_operations_run_unfused_and_the_plan_says_why(
    environment: dict[str, str], reason: str
) -> None:
    done = without(environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("None ["), done.stdout
    assert reason in done.stdout


@needs_compiler
def test_a_compiler_that_fails_later_is_said_once_and_numbers_stay(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(64, 64)
    unfused = block()
    torch.manual_seed(1)
    with sf.fusing(False):
        expected = unfused(x)
    known = compiler.compiler()
    assert known is not None
    monkeypatch.setattr(compiler, "_found", lambda: (known._replace(path="/bin/false"), ""))
    model = block()
    torch.manual_seed(1)
    with pytest.warns(FallbackWarning, match="fusions run unfused, in ATen calls: cc .* failed"):
        y = model(x)
    torch.testing.assert_close(y, expected)
    plan = model.plan(x)
    assert plan.env.kernels is None
    assert any("failed" in refusal.reason for refusal in plan.refused)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        block()(x)


@needs_compiler
def test_kernels_are_compiled_before_the_first_call_runs(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the backward pass as well: nothing is compiled while a step runs."""
    compiled: list[int] = []
    compile_all = compiler.compile_all
    monkeypatch.setattr("seqfuse.run.fuser.compile_all", lambda wanted: compiled.append(compile_all(wanted)))
    model, x = block(), torch.randn(64, 64, requires_grad=True)
    y = model(x)
    assert compiled[0] >= 2
    before = kept(cache)
    y.sum().backward()
    model(x).sum().backward()
    assert kept(cache) == before


@needs_compiler
def test_tensors_that_gain_nothing_compile_nothing(cache: Path) -> None:
    model = block(8).eval()
    model(torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert not kept(cache)
    model.train()(torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert len(kept(cache)) == 1, "that of dropout, which torch makes in ninety calls"

    def refused(*x: torch.Tensor, **where: sf.Env) -> set[str]:
        return {r.reason for r in model.plan(*x, **where).refused if r.fusion == "LinearBiasPointwise"}

    small = "tensors this small gain nothing from a C kernel"
    assert refused(torch.randn(4, 8)) == {small}
    assert small not in refused(env=sf.Env.of("cpu"))  # of how many tokens is not known
    with sf.fusing(unmeasured=True):
        assert small not in refused(torch.randn(4, 8))


def test_kernels_are_collected_for_the_thread_that_asks() -> None:
    def ask() -> None:
        collects.append(compiler.is_collecting())
        compiler.ask(SOURCE)

    collects = list[bool]()
    with compiler.collecting() as wanted:
        other = threading.Thread(target=ask)
        other.start()
        other.join()
        assert (collects, [*wanted]) == ([False], [])
        ask()
    assert (collects, [*wanted]) == ([False, True], [SOURCE])
