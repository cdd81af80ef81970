"""What our kernels are called with at real sizes, on tensors that have no memory: nothing is launched."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from gpu import attention, draw, norms, pointwise, products, small
from gpu.case import Case, fewest_bytes
from gpu.sizes import real

from seqfuse import kernels

ROOMS = (norms, pointwise, products, attention, small)
# A CPU's, since torch without CUDA cannot even slice those of a GPU.
SIZES = dataclasses.replace(real(), device=torch.device("cpu"))
CASES = [case for room in ROOMS for case in room.cases(SIZES) if case.group != "host"]


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an H200, whose properties nothing here could be asked for."""
    for found in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"seqfuse.kernels.{found.name}")
        for name, value in (("processors", 132), ("architecture", "sm_90")):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda _, value=value: value)
    monkeypatch.setattr(draw, "generator", lambda *_: None)


def results(case: Case, launched: list[Any]) -> list[Any]:
    inputs = case.make(case.rows, 0)
    before = len(launched)
    outputs = case.contenders["seqfuse"].prepare(inputs)()
    assert len(launched) > before
    assert fewest_bytes(case, inputs, outputs) > 0
    return [inputs, outputs]


@pytest.mark.parametrize("group", sorted({case.group for case in CASES}))
def test_kernels_take_every_row(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []

    def launch(kernel: Any, grid: int, args: tuple[Any, ...], *_: Any, **__: Any) -> None:
        assert 0 < grid < 2**31
        launched.append((kernel, grid))

    for found in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"seqfuse.kernels.{found.name}")
        if hasattr(module, "launch"):
            monkeypatch.setattr(module, "launch", launch)
    for case in (case for case in CASES if case.group == group):
        with FakeTensorMode():
            inputs, outputs = results(case, launched)
            assert any(t is not None for t in outputs), case.key
            assert all(t.numel() for t in inputs.values()), case.key
    assert launched


def test_floors_are_those_of_the_bytes_that_have_to_move() -> None:
    by_key = {case.key: case for case in CASES}
    with FakeTensorMode():
        norm = by_key["norm forward: RMSNorm 32768 x 8192"]
        inputs = norm.make(norm.rows, 0)
        assert fewest_bytes(norm, inputs, [inputs["x"]]) == (2 * 32768 * 8192 + 8192) * 2
        decode = by_key["decode attention: llama3-8b 16 x 8192"]
        inputs = decode.make(decode.rows, 0)
        cache = 2 * 16 * 8 * 8192 * 128 * 2
        assert fewest_bytes(decode, inputs, [inputs["q"]]) == cache + 2 * 16 * 32 * 128 * 2 + 16 * 4
    assert by_key["Linear + bias + activation: gpt3-6.7b 8192 x 4096 x 16384, gelu"].flops == 2 * 8192 * 4096 * 16384
