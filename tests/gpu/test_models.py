"""Layers with every combination of schedules: the same gradients, the same bits twice, streams, CUDA graphs,
devices."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import plain
import pytest
import torch
from gpu.case import NEAR, distance
from torch import Tensor

import seqfuse as sf
from seqfuse import fusions
from seqfuse.ops import attention
from seqfuse.testing import assert_bitwise_equal, assert_fused_close, seeded_randn
from seqfuse.testing.cases import Bench

from .steps import captured, step

HERE = torch.cuda.is_available()
GPU = pytest.mark.gpu
WIDTH, HEADS, ROWS = (1024, 16, (2, 512)) if HERE else (16, 2, (1, 8))
AHEAD = tuple(f for f in fusions.default if issubclass(f, sf.ForwardFusion))
BACK = tuple(f for f in fusions.default if issubclass(f, sf.BackwardFusion))
JOINT = tuple(f for f in fusions.default if issubclass(f, sf.JointFusion))
COVERS: dict[str, tuple[Any, ...]] = {
    "forward": AHEAD,
    "backward": BACK,
    "both": (*AHEAD, *BACK),
    "joint": (*JOINT, *AHEAD, *BACK),
}


def model(llama: bool, device: torch.device, dtype: torch.dtype, dropout: float = 0.0) -> sf.Sequential:
    kv = HEADS // 2 if llama else HEADS
    spec = plain.Spec(WIDTH, 4 * WIDTH, HEADS, kv, WIDTH // HEADS, llama, dropout)
    torch.manual_seed(0)
    made = plain.fused("stack", spec, 2).to(device, dtype)
    for i, p in enumerate(made.parameters()):
        if p.ndim == 1:
            p.data.add_(0.3 * seeded_randn(tuple(p.shape), i).to(p))
    return made


def inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, dy = (seeded_randn((*ROWS, WIDTH), seed, dtype=dtype).to(device) for seed in (1, 2))
    return x, dy


def passes(run: Any, parameters: list[Tensor], x: Tensor, dy: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    return step(run, parameters, x, dy)


def trained(model: sf.Sequential, covers: tuple[Any, ...], x: Tensor, dy: Tensor) -> list[Tensor]:
    """Every applicable fusion, whatever it costs."""
    return passes(Bench(model, covers), list(model.parameters()), x, dy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("covers", COVERS)
@pytest.mark.parametrize("llama", [False, True], ids=["gpt", "llama"])
def test_any_pair_of_covers_gives_the_same(llama: bool, covers: str, dtype: torch.dtype, device: torch.device) -> None:
    own = model(llama, device, dtype, dropout=0.1)
    x, dy = inputs(device, dtype)
    unfused = trained(own, (), x, dy)
    exact = trained(copy.deepcopy(own).double(), (), x.double(), dy.double())
    assert_fused_close(trained(own, COVERS[covers], x, dy), unfused, exact)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("llama", [False, True], ids=["gpt", "llama"])
def test_twice_gives_the_same_bits(llama: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    own = model(llama, device, torch.bfloat16, dropout=0.1)
    x, dy = inputs(device, torch.bfloat16)
    taken: list[list[str]] = []
    attend = attention.attend

    def noted(qkv: Any, how: Any, kernel: str) -> Any:
        if type(qkv[0]) is Tensor:  # and not without data, as in the check of a fusion's first run
            taken[-1].append(kernel)
        return attend(qkv, how, kernel)

    monkeypatch.setattr(attention, "attend", noted)

    def run() -> list[Tensor]:
        taken.append([])
        return trained(own, COVERS["joint"], x, dy)

    one, other = run(), run()
    assert taken[0] == taken[1], "attention by another kernel"
    assert_bitwise_equal(one, other)


def test_without_gradients(device: torch.device) -> None:
    own = model(True, device, torch.bfloat16)
    x, _ = inputs(device, torch.bfloat16)
    with torch.no_grad():
        exact = Bench(copy.deepcopy(own).double(), ())(x.double())
        assert_fused_close(Bench(own, fusions.default)(x), Bench(own, ())(x), exact)


@GPU
@pytest.mark.parametrize("order", ["fixed", "any"])
@pytest.mark.parametrize("llama", [False, True], ids=["gpt", "llama"])
def test_a_graph_replays_a_step(llama: bool, order: str, device: torch.device, request: pytest.FixtureRequest) -> None:
    if order == "fixed":
        request.getfixturevalue("deterministic")
    own = model(llama, device, torch.bfloat16)
    x, dy = inputs(device, torch.bfloat16)
    static = x.clone()
    bench, parameters = Bench(own, COVERS["joint"]), list(own.parameters())
    graph, results = captured(lambda: step(bench, parameters, static, dy))
    for seed in (5, 6):
        static.copy_(seeded_randn(tuple(x.shape), seed, dtype=x.dtype))
        graph.replay()
        replayed, again = [t.clone() for t in results], step(bench, parameters, static, dy)
        if order == "fixed":
            assert_bitwise_equal(replayed, again)
        else:  # by the attention kernel that torch selects by default
            assert_bitwise_equal(replayed[:1], again[:1])
            assert distance(replayed, again) < NEAR[torch.bfloat16]


@GPU
def test_a_graph_draws_another_mask_at_each_replay(device: torch.device) -> None:
    own = model(False, device, torch.bfloat16, dropout=0.5)
    x, _ = inputs(device, torch.bfloat16)
    bench = Bench(own, AHEAD)
    with torch.no_grad():
        graph, y = captured(lambda: bench(x))
    graph.replay()
    first = y.clone()
    graph.replay()
    assert not torch.equal(first, y)


@GPU
@pytest.mark.usefixtures("deterministic")
def test_streams_do_not_share_what_kernels_write(device: torch.device) -> None:
    own = model(False, device, torch.bfloat16)
    x, dy = inputs(device, torch.bfloat16)
    bench, parameters = Bench(own, COVERS["joint"]), list(own.parameters())
    others = [seeded_randn(tuple(x.shape), seed, dtype=x.dtype).to(device) for seed in range(4)]
    wanted = [step(bench, parameters, other, dy) for other in others]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in others]
    found: list[list[Tensor]] = []
    for stream, other in zip(streams, others, strict=True):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found.append(step(bench, parameters, other, dy))
    torch.cuda.synchronize()
    for one, other in zip(found, wanted, strict=True):
        assert_bitwise_equal(one, other)


@GPU
@pytest.mark.usefixtures("deterministic")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_runs_on_a_device_that_is_not_the_current_one() -> None:
    second = torch.device("cuda", 1)
    own = model(True, torch.device("cuda", 0), torch.bfloat16)
    x, dy = inputs(torch.device("cuda", 0), torch.bfloat16)
    wanted = trained(own, COVERS["joint"], x, dy)
    found = trained(copy.deepcopy(own).to(second), COVERS["joint"], x.to(second), dy.to(second))
    assert {t.device for t in found} == {second}
    assert_bitwise_equal([t.to(x.device) for t in found], wanted)


@GPU
def test_memory_does_not_grow(device: torch.device) -> None:
    own = model(True, device, torch.bfloat16, dropout=0.1)
    x, dy = inputs(device, torch.bfloat16)
    sizes = list(_allocated(own, x, dy))
    # Autograd's thread may still hold a step's saved tensors when this one looks.
    assert min(sizes[2:5]) == min(sizes[5:]), sizes


def _allocated(own: sf.Sequential, x: Tensor, dy: Tensor) -> Iterator[int]:
    bench, parameters = Bench(own, COVERS["joint"]), list(own.parameters())
    for _ in range(8):
        step(bench, parameters, x, dy)
        gc.collect()
        torch.cuda.synchronize()
        yield torch.cuda.memory_allocated()
