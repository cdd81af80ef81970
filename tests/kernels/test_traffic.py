"""The counter of bytes, the traffic of every kernel, and the numbers in the docs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from benchmarks import traffic as benchmark
from seqfuse.kernels import norm
from seqfuse.kernels._launch import launch
from tools.traffic import Moved, counted, fewest

from .conftest import DEVICE

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="about the interpreter")

RECORDED = Path(benchmark.__file__).parent / "results" / "traffic.json"
CASES = {f"{case.kernel} {case.what} {case.shape[1]}": case for case in benchmark.cases()}
# Rows that do not fit in registers are read again; docs/dev/kernels.md says why.
AGAIN = {name for name, case in CASES.items() if "norm" in case.kernel and case.shape[1] == benchmark.WIDE}


@triton.jit
def _copy_kernel(x, others, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    value = tl.load(x + i, mask=i < n)
    if others[1] is not None:
        value += tl.load(others[1] + i // 2, mask=i < n)
    tl.store(y + i, value, mask=i < n)


@triton.jit
def _described_kernel(x, y, M, N, B: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [M, N], [N, 1], [B, B])
    target = tl.make_tensor_descriptor(y, [M, N], [N, 1], [B, B])
    target.store([0, 0], source.load([0, 0]))


@triton.jit
def _atomic_kernel(total, flag, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.atomic_add(total + i * 0, i.to(tl.float32), mask=i < 3)
    tl.atomic_cas(flag, 0, 1)


def test_lanes_that_are_masked_off_are_not_counted() -> None:
    x, other, y = torch.ones(37), torch.ones(37), torch.ones(37)
    with counted() as traffic:
        launch(_copy_kernel, 3, (x, (None, other), y, 37), {"B": 16})
    (one,) = traffic.launches
    assert one.kernel == "_copy_kernel"
    assert one.arguments == {
        "x": Moved((37,), loaded=148, stored=0, loaded_once=148, stored_once=0),
        "others.1": Moved((37,), loaded=148, stored=0, loaded_once=76, stored_once=0),
        "y": Moved((37,), loaded=0, stored=148, loaded_once=0, stored_once=148),
    }
    assert one.outside == 0
    assert traffic.total == one.total == 3 * 148


def test_what_is_in_no_argument_is_counted_apart() -> None:
    buffer = torch.ones(64, dtype=torch.float16)
    with counted() as traffic:
        launch(_copy_kernel, 1, (buffer[:10], (None, None), buffer[32:], 12), {"B": 16})
    assert traffic.launches[0].outside == 2 * 2
    assert traffic.launches[0].arguments["x"].loaded == 20


def test_descriptors_move_what_is_within_their_bounds() -> None:
    x, y = torch.ones(5, 8), torch.zeros(5, 8)
    with counted() as traffic:
        launch(_described_kernel, 1, (x, y, 5, 8), {"B": 16})
    assert torch.equal(x, y)
    assert [m.total for m in traffic.launches[0].arguments.values()] == [160, 160]


def test_atomics_are_counted_twice() -> None:
    total, flag = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    with counted() as traffic:
        launch(_atomic_kernel, 1, (total, flag), {"B": 4})
    assert traffic.launches[0].arguments == {"total": Moved((1,), 12, 12, 4, 4), "flag": Moved((1,), 4, 4, 4, 4)}


def test_nothing_is_counted_outside_the_block() -> None:
    x, y = torch.ones(16), torch.ones(16)
    with pytest.raises(ZeroDivisionError), counted() as traffic:
        raise ZeroDivisionError
    launch(_copy_kernel, 1, (x, (None, None), y, 16), {"B": 16})
    assert traffic.launches == []


def test_an_unknown_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_store", lambda self, x: x)
    with pytest.raises(RuntimeError, match=r"another interpreter .*create_masked_store"), counted():
        pass


def test_the_fewest_bytes_are_those_of_distinct_elements() -> None:
    x = torch.ones(4, 6)
    assert fewest(x, x, None, x.half(), x.t()) == 96 + 48 + 96
    assert fewest(x[:1].expand(4, 6), torch.ones(()), torch.ones(0, 6)) == 24 + 4


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full) if n in AGAIN else n for n in CASES])
def test_a_kernel_moves_the_fewest_bytes(name: str) -> None:
    row = CASES[name].row()
    assert row["outside"] == row["written_twice"] == 0
    if CASES[name].tiles is not None:
        assert row["fewest"] < row["moved"] == CASES[name].tiles
    elif name not in AGAIN:
        assert row["fewest"] <= row["moved"] <= 1.03 * row["fewest"]
    recorded = json.loads(RECORDED.read_text())["traffic"]
    assert json.loads(json.dumps(row)) in recorded, "run benchmarks/traffic.py again"


def test_nothing_is_recorded_that_is_not_counted() -> None:
    recorded = json.loads(RECORDED.read_text())["traffic"]
    assert {f"{row['kernel']} {row['what']} {row['shape'][1]}" for row in recorded} == CASES.keys()


def test_a_kernel_that_reads_twice_is_found(mutant: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    old = "        z = z.to(stream.dtype.element_ty).to(COMPUTE)\n"
    changed = mutant(
        norm, old, f"{old}    z += 0.0 * tl.load(x + rows[:, None] * x_stride + cols[None, :], mask=mask)\n"
    )
    monkeypatch.setattr(norm, "norm_fwd", changed.norm_fwd)
    name = f"layernorm forward {benchmark.COLUMNS}"
    (case,) = [case for case in benchmark.norm_cases() if f"{case.kernel} {case.what} {case.shape[1]}" == name]
    row = case.row()
    assert row["moved"] == row["fewest"] + fewest(case.inputs[0])
