"""Every kernel is launched as on a GPU, with a driver that does nothing."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

import seqfuse as sf
from seqfuse import kernels, ops
from seqfuse.inference import KVCache
from seqfuse.inference.generate import GraphedStep
from seqfuse.kernels import _launch, pointwise
from seqfuse.kernels._launch import launch
from seqfuse.kernels.activations import ACTIVATIONS
from seqfuse.kernels.attention import attention_bwd, attention_fwd
from seqfuse.kernels.crossentropy import cross_entropy_
from seqfuse.kernels.decode import decode_attention
from seqfuse.kernels.grouped import finish_rows_, group_sums, grouped_gemm, grouped_outer
from seqfuse.kernels.norm import norm_bwd, norm_codes, norm_codes_backward, norm_fwd
from seqfuse.kernels.permute import gather_rows, spread_rows
from seqfuse.kernels.quantize import As, quantize_matrix, quantize_several
from seqfuse.kernels.rope import Rotation, rope_bwd, rope_codes_backward, rope_fwd, rope_write
from seqfuse.kernels.route import route_factors, route_gradients
from seqfuse.ops import _attention
from tests.fusions.triton.launching import ScaleScale, said, scales
from tests.inference.test_kvcache import model_of, tokens
from tools.stub_driver import Stub, stub_driver

pytestmark = pytest.mark.skipif(_launch.INTERPRETED, reason="kernels are interpreted in this process")

GELU = ACTIVATIONS["gelu"]


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape).to(dtype)


def chains() -> None:
    x, row, seed = drawn(6, 64), drawn(64), torch.tensor(3)
    pointwise.pointwise(x, pointwise.Chain(pointwise.bias(), pointwise.store(), pointwise.act(GELU)), (row,))
    pointwise.pointwise(x, pointwise.Chain(pointwise.dact(GELU), pointwise.column_sum()), (x,))
    pointwise.pointwise(x[:, :63], pointwise.Chain(pointwise.dropout(0.1)), (seed,))


def norms() -> None:
    x, wide = drawn(6, 64), drawn(6, 16384)
    for centered in (True, False):
        for z, w in ((x, drawn(64)), (wide, drawn(16384))):
            y = norm_fwd(z, w, w if centered else None, 1e-5, centered=centered, residual=x if z is x else None)
            norm_bwd(z, z, y.mean, y.rstd, w, dweight=x.dtype, dbias=x.dtype if centered else None)


def attention() -> None:
    q, k, v = drawn(1, 4, 40, 64), drawn(1, 2, 40, 64), drawn(1, 2, 40, 64)
    y, lse = attention_fwd(q, k, v, causal=True)
    attention_bwd(torch.empty_like(y), q, k, v, y, lse, (q.clone(), k.clone(), v.clone()), causal=True)
    attention_fwd(q, k, v, mask=torch.ones(1, 1, 40, 40, dtype=torch.bool))
    lengths = torch.tensor([7])
    cache = drawn(1, 2, 4096, 64), drawn(1, 2, 4096, 64)
    decode_attention(drawn(1, 4, 64), *cache, lengths)
    x, rotation = drawn(1, 40, 8 * 64), Rotation("half", 64)
    rope_fwd(x, 4, 2, rotation)
    rope_bwd(x, 4, 2, rotation, dbias=x.dtype)
    rope_write(drawn(1, 8 * 64), 4, 2, rotation, *cache, lengths)


def losses() -> None:
    cross_entropy_(drawn(6, 100), torch.arange(6))


def experts() -> None:
    x, rows, offsets = drawn(6, 64), torch.randperm(12).view(6, 2), torch.tensor([5, 12])
    spread, _ = spread_rows(x, rows, offsets)
    gather_rows(spread, rows, offsets)
    weight = drawn(2, 32, 64)
    y = grouped_gemm(spread, weight, offsets)
    grouped_outer(y, spread, offsets)
    group_sums(y, offsets)
    finish_rows_(y, offsets)
    logits, chosen = drawn(6, 8), torch.zeros(6, 2, dtype=torch.int64)
    route_gradients(route_factors(logits, chosen), logits, chosen)


def codes() -> None:
    quantize_matrix(drawn(64, 128), torch.float8_e4m3fn, "tensor", columns=True)
    to = As("1x32", torch.float8_e4m3fn, along_rows=True, down_columns=True)
    pointwise.pointwise_codes(drawn(64, 128), pointwise.Chain(pointwise.act(GELU)), (), to)
    quantize_several(drawn(64, 128), [drawn(32, 64)], torch.float8_e4m3fn, "1x32", columns=True)
    x, rstd = drawn(64, 128), torch.ones(64)
    norm_codes(x, None, None, 1e-5, to, centered=False)
    norm_codes_backward(x, drawn(64, 128), None, rstd, None, to, dweight=x.dtype)
    rope_codes_backward(drawn(1, 64, 8 * 32), 4, 2, Rotation("half", 32), to, dbias=x.dtype)


GROUPS = (chains, norms, attention, losses, experts, codes)


@pytest.fixture
def stub() -> Iterator[Stub]:
    with stub_driver(compiles=False) as stub:
        yield stub


@pytest.mark.parametrize("group", GROUPS)
def test_the_arguments_of_a_launch_are_those_that_its_kernel_was_compiled_for(
    group: Callable[[], None], stub: Stub
) -> None:
    group()
    first = len(stub.launched)
    compiled = list(stub.compiled)
    group()
    assert first > 0
    assert len(stub.launched) == 2 * first
    assert stub.compiled == stub.loaded == compiled


def test_these_are_all_the_kernels_there_are(stub: Stub) -> None:
    for group in GROUPS:
        group()
    found: set[str] = set()
    for one in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"{kernels.__name__}.{one.name}")
        found |= {name for name, value in vars(module).items() if type(value) is JITFunction and "_kernel" in name}
    assert set(stub.launched) == found


def test_a_launch_that_its_kernel_was_not_compiled_for_is_noticed(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, chain = drawn(6, 64), drawn(6, 64), pointwise.Chain(pointwise.act(GELU))
    key_of = _launch._key_of
    monkeypatch.setattr(_launch, "_key_of", lambda args: (key_of(args)[0], ()))

    def launched(x: Tensor) -> None:
        args = (x, y, (None,), (None,), 64, (0,), 6, 64)
        launch(pointwise._chain_kernel, 1, args, chain.tile(64, 2)[2], 4)

    launched(x)
    with pytest.raises(AssertionError, match=r"x is \*bf16, got torch.float32"):
        launched(x.float())


def test_a_kernel_is_compiled_once_for_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    chain = pointwise.Chain(pointwise.act(ACTIVATIONS["relu"]))
    for compiled in (["_chain_kernel"], []):
        with stub_driver() as stub:
            for _ in range(2):
                pointwise.pointwise(drawn(6, 64), chain)
            assert stub.compiled == compiled
            assert stub.loaded == ["_chain_kernel"]
            assert stub.launched == ["_chain_kernel"] * 2
    assert list(tmp_path.glob("*/_chain_kernel.cubin"))


@pytest.mark.full
@pytest.mark.parametrize("group", GROUPS)
def test_each_kernel_compiles_for_the_arguments_it_is_launched_with(
    group: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    with stub_driver() as stub:
        group()
        compiled = list(stub.compiled)
        group()
        assert stub.compiled == compiled
        assert stub.loaded


@pytest.mark.parametrize("every", [pytest.param(6, id="one in six"), pytest.param(1, id="all", marks=pytest.mark.full)])
def test_rows_of_the_gpu_benchmark_are_launched(every: int, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    monkeypatch.setenv("SEQFUSE_ON_ERROR", "raise")
    from gpu import rows
    from gpu.sizes import tiny

    for case in rows.cases(tiny(torch.bfloat16))[::every]:
        if case.group != "host" and "tuned" not in case.group:
            before = len(stub.launched)
            for _ in range(2):
                case.contenders["seqfuse"].prepare(case.make(case.rows, 1))()
            assert len(stub.launched) > before, case.key


def test_the_statistic_of_a_row_is_made_without_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU approximates roots and quotients; rounded ones are calls, around which registers are spilled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with stub_driver():
        norm_fwd(torch.randn(2, 64), torch.ones(64), None, 1e-5, centered=False)
        ((kernel, *_),) = _launch._compiled.values()
        code = kernel.asm["ptx"]
    assert set(re.findall(r"\b(?:r?sqrt|rcp|div)\.[a-z0-9]+", code)) == {"div.full", "rsqrt.approx"}


@pytest.mark.parametrize("memory", ["fast", "balanced", "lean"])
def test_a_kernel_is_not_launched_on_fake_tensors(memory: Any, stub: Stub) -> None:
    model = scales(ScaleScale, memory=memory)
    x = drawn(6, 64, dtype=torch.float32).requires_grad_()
    model(x).sum().backward()
    ran = [*stub.launched]
    assert ran in (["scaled_kernel"], [])  # left unfused, where what it saves is to be known
    assert str(scales(ScaleScale).plan(x).memory_unknown).startswith(said())
    assert stub.launched == ran


def test_planning_for_a_machine_that_is_not_here_needs_no_driver() -> None:
    plan = scales(ScaleScale).plan(torch.empty(6, 64, device="meta"), env=sf.Env.of("cuda:sm_90"))
    assert str(plan.memory_unknown).startswith(said())


def test_a_kernel_is_not_compiled_while_a_graph_is_captured(stub: Stub) -> None:
    x, chain = drawn(6, 64), pointwise.Chain(pointwise.act(GELU))
    stub.capturing = True
    with pytest.raises(
        RuntimeError, match="_chain_kernel is launched for the first time while a CUDA graph is captured"
    ):
        pointwise.pointwise(x, chain)
    assert stub.compiled == []
    stub.capturing = False
    pointwise.pointwise(x, chain)
    stub.capturing = True
    pointwise.pointwise(x, chain)
    assert stub.launched == ["_chain_kernel"] * 2


def test_a_training_step_that_was_warmed_up_compiles_nothing_in_a_capture(stub: Stub) -> None:
    model = sf.Sequential(
        ops.Residual(ops.LayerNorm(16), ops.Linear(16, 32), ops.GeLU(), ops.Linear(32, 16), ops.Dropout(0.1)),
        ops.RMSNorm(16),
    )
    x, dy = torch.randn(8, 16, requires_grad=True), torch.randn(8, 16)

    def step() -> None:
        torch.autograd.grad(model(x), [x, *model.parameters()], dy)

    with sf.fusing(on_error="raise"):
        step()
        compiled, first = list(stub.compiled), len(stub.launched)
        stub.capturing = True
        step()
    assert compiled
    assert stub.compiled == stub.loaded == compiled
    assert stub.launched[first:] == stub.launched[:first]


@pytest.mark.parametrize("form", ["GPT", "Llama"])
def test_a_step_of_decoding_is_rehearsed_before_its_capture(
    form: str, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_attention, "interpreting", True)
    model, cache = model_of(form), KVCache(2, 40)
    rehearsals: list[list[str]] = []
    current: list[torch.device] = []

    class Graph:
        """Replaces `torch.cuda.CUDAGraph` and the functions that capture one."""

        def __init__(self, graph: Any = None) -> None: ...

        def __enter__(self) -> None:
            assert current == [cache.lengths.device]
            rehearsals.append(list(stub.compiled))
            stub.capturing = True

        def __exit__(self, *exception: object) -> None:
            stub.capturing = False

    @contextlib.contextmanager
    def entered(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    for name, value in {"CUDAGraph": Graph, "graph": Graph, "Stream": mock.MagicMock(), "device": entered}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", mock.MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    generate = importlib.import_module("seqfuse.inference.generate")
    monkeypatch.setattr(generate, "_on_gpu", lambda lengths: True)
    with sf.fusing(on_error="raise"):
        cache.feed(model, tokens(2, 5))
        GraphedStep(model, cache)
    assert "_decode_kernel" in stub.compiled
    assert rehearsals == [stub.compiled]


def test_an_int8_cache_is_checked_too(stub: Stub) -> None:
    k, v = (torch.zeros(1, 2, 64, 64, dtype=torch.int8) for _ in "kv")
    cache: Any = {"k": k, "v": v, "lengths": torch.tensor([7]), "k_scale": torch.zeros(1, 2, 64)}
    for _ in range(2):
        decode_attention(drawn(1, 4, 64), **cache, v_scale=torch.zeros(1, 2, 64))
    assert stub.launched.count("_decode_kernel") == 2


def test_afterwards_nothing_is_launched_on_a_cpu() -> None:
    with stub_driver(compiles=False):
        attention()
    with pytest.raises(ValueError, match="must be on a GPU"):
        attention()
