"""A decoding step in our kernels: its output and the cache, compared with plain torch."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import seqfuse as sf
from seqfuse import ops
from seqfuse.inference import KVCache, generate
from seqfuse.kernels import decode, rope
from seqfuse.ops import _attention
from seqfuse.testing import assert_bitwise_equal
from tests.inference.test_kvcache import FORMS, close, model_of, tokens
from tests.triton_fixtures import DEVICE


@pytest.fixture(autouse=True)
def _by_our_kernels(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    if DEVICE.type == "cuda" and request.node.get_closest_marker("gpu") is None:
        pytest.skip("tensors on a CPU, whose kernels are interpreted")
    monkeypatch.setattr(_attention, "interpreting", True)


def kept(cache: KVCache) -> list[Tensor]:
    return [t for layer in cache._layers for t in layer.tensors()]


@pytest.mark.parametrize("form", FORMS)
def test_rows_fed_one_by_one_give_what_all_rows_give(form: str):
    model, x = model_of(form), tokens(2, 9)
    cache = KVCache(2, 20)
    with sf.fusing(on_error="raise"):
        found = torch.cat([cache.feed(model, part) for part in x.split((5, 1, 1, 1, 1), 1)], 1)
    with torch.no_grad(), sf.fusing(False):
        close(found, model(x))
    assert cache.lengths.tolist() == [9, 9]


# GPT with caches in the model's dtype, Llama with 8-bit ones, and the other way round under --full.
PAIRS = [
    pytest.param(
        form,
        int8,
        id=f"{form}-{'int8' if int8 else ''}",
        marks=[pytest.mark.full] * (not torch.cuda.is_available() and int8 != (form == "Llama")),
    )
    for form in ("GPT", "Llama")
    for int8 in (False, True)
]


@pytest.mark.parametrize(("form", "int8"), PAIRS)
def test_the_cache_is_what_plain_torch_leaves(form: str, int8: bool, monkeypatch: pytest.MonkeyPatch):
    model, x, lengths = model_of(form), tokens(3, 6), torch.tensor([6, 2, 0])
    caches: list[KVCache] = []
    for ours in (True, False):
        monkeypatch.setattr(_attention, "interpreting", ours)
        cache = KVCache(3, 12, int8=int8)
        with sf.fusing(ours, on_error="raise"):
            cache.feed(model, x, lengths)
            rows = [cache.feed(model, tokens(3, 1, seed=i))[:, -1] for i in range(3)]
        caches.append(cache)
        if ours:
            found = rows
    for mine, its in zip(found, rows, strict=True):
        torch.testing.assert_close(mine, its, atol=3e-2 if int8 else 2e-5, rtol=1e-4)
    for mine, its in zip(*map(kept, caches), strict=True):
        # A row next to the middle of two codes may be rounded to the other one.
        near = 1.01 if mine.dtype is torch.int8 else 2e-3 if int8 else 2e-5
        torch.testing.assert_close(mine.float(), its.float(), atol=near, rtol=0)


def test_kernels_make_the_step_and_nothing_else(monkeypatch: pytest.MonkeyPatch):
    launched: list[str] = []
    for module in (decode, rope):
        plain = module.launch

        def counted(kernel: Any, *args: Any, plain: Any = plain) -> None:
            launched.append(kernel.fn.__name__)
            plain(kernel, *args)

        monkeypatch.setattr(module, "launch", counted)
    for form in ("GPT", "Llama"):
        model, cache = model_of(form), KVCache(1, 12)
        cache.feed(model, tokens(1, 4))
        launched.clear()
        cache.feed(model, tokens(1, 1))
        assert launched == ["_rope_write_kernel", "_decode_kernel"] * 2


def test_generates_what_plain_torch_generates(monkeypatch: pytest.MonkeyPatch):
    model, x = model_of("Llama"), tokens(2, 5)
    found = generate(model, x, 6)
    monkeypatch.setattr(_attention, "interpreting", False)
    with sf.fusing(False):
        assert torch.equal(found, generate(model, x, 6))


@pytest.mark.parametrize(("form", "int8"), PAIRS)
def test_a_step_that_is_recorded_calls_operators_and_goes_on_in_the_cache(form: str, int8: bool):
    model, x, caches = model_of(form), tokens(2, 7), [KVCache(2, 12, int8=int8) for _ in range(2)]
    for cache in caches:
        cache.feed(model, x[:, :5])
    with sf.fusing(on_error="raise"), caches[0].rehearsal():
        graph = make_fx(lambda t: caches[0].feed(model, t))(torch.zeros_like(x[:, :1]))
    called = re.findall(r"torch\.ops\.seqfuse\.(\w+)\.default\(", graph.code)
    assert [name for name in called if "write" in name or "decode" in name] == ["rope_write", "decode_attention"] * 2
    for part in x[:, 5:].split(1, 1):
        torch.testing.assert_close(graph(part), caches[1].feed(model, part))
    for mine, its in zip(*map(kept, caches), strict=True):
        assert_bitwise_equal(mine, its)


def test_a_compiled_model_meets_a_cache_where_its_graph_runs_the_engine_and_is_refused_elsewhere():
    model, x = model_of("Llama", layers=1), tokens(2, 6)
    cache = KVCache(2, 12)
    with torch.no_grad(), sf.fusing(False):
        want = model(x)
    torch.compiler.reset()
    kept_graph = torch.compile(model, fullgraph=True, backend="eager")
    close(torch.cat([cache.feed(kept_graph, part) for part in x.split((5, 1), 1)], 1), want)
    torch.compiler.reset()
    traced = torch.compile(model, fullgraph=True, backend="aot_eager")
    for again in (KVCache(2, 12), cache):  # the first call is traced, the second is not
        with pytest.raises(sf.errors.StateError, match=r"SF505.*no attention of the model met the cache"):
            again.feed(traced, x[:, :1])
    assert cache.lengths.tolist() == [6, 6]


@pytest.mark.parametrize("kernel", ["rope_write", "decode_attention"])
def test_a_kernel_that_fails_leaves_the_cache_to_what_takes_its_place(kernel: str, monkeypatch: pytest.MonkeyPatch):
    model, x, new = model_of("Llama"), tokens(2, 5), tokens(2, 1, seed=3)
    cache, module = KVCache(2, 12), rope if kernel == "rope_write" else decode
    cache.feed(model, x)
    plain, failed = getattr(module, kernel), 0

    def fails_once(*args: Any, **kwargs: Any) -> Any:
        nonlocal failed
        if failed:
            return plain(*args, **kwargs)
        failed += 1
        raise RuntimeError("injected")

    monkeypatch.setattr(module, kernel, fails_once)
    with pytest.warns(sf.errors.FallbackWarning):
        found = cache.feed(model, new)
    assert failed == 1
    assert len(kept(cache)) == 4
    with torch.no_grad(), sf.fusing(False):
        close(found[:, -1], model(torch.cat((x, new), 1))[:, -1])
        more = tokens(2, 1, seed=4)
        close(cache.feed(model, more)[:, -1], model(torch.cat((x, new, more), 1))[:, -1])


def test_without_a_cache_attention_follows_in_two_steps():
    operations = [ops.Bias(64), ops.QKNorm(8, 4, 2), ops.RotaryEmbedding(4, 2, style="half")]
    model = sf.Sequential(*operations, ops.Attention(4, 2, causal=True)).eval()
    x = torch.randn(2, 9, 64)
    with torch.no_grad():
        assert model.plan(x).count("BiasQKNormRotaryAttention") == 1
        found = model(x)
        with sf.fusing(False):
            close(found, model(x))


def test_a_rotation_that_is_fused_without_its_attention_turns_rows_by_their_place_in_the_cache():
    operations = [ops.Bias(64), ops.QKNorm(8, 4, 2), ops.RotaryEmbedding(4, 2, style="half")]
    fusions = (sf.fusions.BiasQKNormRotary,)
    model = sf.Sequential(*operations, ops.Attention(4, 2, causal=True), fusions=fusions).eval()
    x, cache = torch.randn(2, 5, 64), KVCache(2, 8)
    with sf.fusing(on_error="raise"), torch.no_grad():
        assert model.plan(x).count("BiasQKNormRotary") == 1
        found = torch.cat([cache.feed(model, part) for part in x.split((4, 1), 1)], 1)
    with torch.no_grad(), sf.fusing(False):
        close(found, model(x))


def test_refuses_what_is_the_operations(device: torch.device):
    rotary, x = ops.RotaryEmbedding(4, 2, style="half"), torch.randn(2, 9, 64)
    for attention, reason in (
        (ops.Attention(2, 1), "the rotation and attention must be of the same heads"),
        (ops.Attention(4, 2, mask="m"), "the extra input attention_attn_mask is not"),
        (ops.Attention(4, 2, dropout=0.1), "dropout of weights is left to the operation"),
    ):
        model = sf.Sequential(rotary, attention)
        with torch.no_grad():
            plan = model.plan(x, **({"m": torch.ones(9, 9)} if attention.mask else {}))
        assert f"BiasQKNormRotaryAttention at 0: {reason}" in " ".join(str(plan).split())


@pytest.mark.gpu
@pytest.mark.parametrize("int8", [False, True], ids=["", "int8"])
@pytest.mark.parametrize("form", FORMS)
def test_on_a_gpu_a_graph_gives_the_tokens_of_plain_torch(form: str, int8: bool):
    model, x = model_of(form).cuda(), tokens(2, 7).cuda()
    for lengths in (None, torch.tensor([3, 7], device="cuda")):
        cache = KVCache(2, 40, device="cuda", int8=int8)
        found = generate(model, x, 24, lengths=lengths, cache=cache, cuda_graph=True)
        with sf.fusing(False):
            plain = generate(model, x, 24, lengths=lengths, cache=KVCache(2, 40, device="cuda", int8=int8))
        assert torch.equal(found, plain) or int8
        assert found.shape == plain.shape
