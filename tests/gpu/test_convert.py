"""Models of Hugging Face converted: every gradient, dropout, graphs of CUDA, generation, checkpoints, `undo`."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gpu.case import NEAR, distance
from gpu.converted import Float64
from torch import Tensor, nn

import seqfuse as sf
from seqfuse.testing import assert_bitwise_equal, seeded_randn
from seqfuse.testing.judge import mismatch_of

transformers = pytest.importorskip("transformers")
# What other packages deprecate in one another.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

HERE = torch.cuda.is_available()
GPU = pytest.mark.gpu
W, HEADS, SHAPE, VOCABULARY = (1024, 16, (2, 512), 1000) if HERE else (32, 4, (2, 9), 64)
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
DEEP: dict[str, Any] = {
    "hidden_size": W, "intermediate_size": 3 * W, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "max_position_embeddings": 1024,
}  # fmt: skip
GQA = {**DEEP, **SIZES, "num_key_value_heads": HEADS // 4}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5: dict[str, Any] = {
    "d_model": W, "d_kv": W // HEADS, "d_ff": 3 * W, "num_layers": 2, "num_heads": HEADS, "dropout_rate": 0.0,
    "feed_forward_proj": "gated-gelu", **SIZES,
}  # fmt: skip
MODES = ("float32", "bfloat16", "autocast")


def gpt2(dropout: float = 0.0, head: str = "GPT2Model") -> Any:
    config = transformers.GPT2Config(
        n_embd=W, n_layer=2, n_head=HEADS, n_positions=1024, resid_pdrop=dropout, embd_pdrop=dropout,
        attn_pdrop=dropout, **SIZES,
    )  # fmt: skip
    return getattr(transformers, head)(config)


def llama(head: str = "LlamaModel", **more: Any) -> Any:
    return getattr(transformers, head)(transformers.LlamaConfig(**{**GQA, **more}))


FAMILIES: dict[str, Callable[[], Any]] = {
    "gpt2": gpt2,
    "llama": llama,
    "mistral": lambda: transformers.MistralModel(transformers.MistralConfig(sliding_window=SHAPE[1] // 4, **GQA)),
    "bert": lambda: transformers.BertModel(
        transformers.BertConfig(**DEEP, **SIZES, **NO_DROPOUT), add_pooling_layer=False
    ),
    "gemma2": lambda: transformers.Gemma2Model(
        transformers.Gemma2Config(head_dim=W // HEADS, sliding_window=SHAPE[1] // 4, **GQA)
    ),
    "t5": lambda: transformers.T5Model(transformers.T5Config(**T5)),
    "vit": lambda: transformers.ViTModel(
        transformers.ViTConfig(image_size=224 if HERE else 16, patch_size=16 if HERE else 4, **DEEP, **NO_DROPOUT),
        add_pooling_layer=False,
    ),
}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    """No graph, and no count of graphs, of another test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def built(make: Callable[[], Any], device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    """A model of signed, asymmetric parameters."""
    torch.manual_seed(0)
    model = make().to(device, dtype).train()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            drawn = seeded_randn(tuple(p.shape), i).to(p)
            p.add_(0.3 * drawn if p.ndim == 1 else 0.01 * drawn)
    return model


def tokens(device: torch.device, seed: int = 1, shape: tuple[int, int] = SHAPE) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed)).to(device)


def inputs_of(family: str, device: torch.device, seed: int = 1) -> dict[str, Any]:
    if family == "vit":
        size = 224 if HERE else 16
        return {"pixel_values": seeded_randn((2, 3, size, size), seed).to(device)}
    given: dict[str, Any] = {"input_ids": tokens(device, seed)}
    if family == "t5":
        given["decoder_input_ids"] = tokens(device, seed + 1, (SHAPE[0], SHAPE[1] // 2))
    return given


def passes(model: nn.Module, given: dict[str, Any], seed: int = 2) -> dict[str, Tensor | None]:
    """The last hidden state, and every gradient."""
    model.zero_grad()
    dtype = next(model.parameters()).dtype
    given = {n: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for n, t in given.items()}
    with Float64() if dtype is torch.float64 else contextlib.nullcontext():
        y = model(**given)[0]
    y.backward(seeded_randn(tuple(y.shape), seed).to(y))
    return {"y": y.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def held_to_the_rule(measure: Callable[[int], tuple[Any, Any, Any]]) -> None:
    """The error bound of one operation holds thousands of rows and columns of a model, some of which miss it by chance,
    with other numbers others. What is wrong is a tensor that misses it with each of three seeds."""
    wrong: set[str] | None = None
    for seed in (1, 11, 21):
        missed = mismatch_of(*measure(seed))
        if missed is None:
            return
        failures = missed.report.failures
        found = {check.tensor for check in failures}
        wrong = found if wrong is None else wrong & found
        if not wrong or any(check.part == "structure" for check in failures):
            break
    else:
        raise missed
    assert not any(check.part == "structure" for check in failures), missed


def fused(conversion: Any) -> int:
    """How many steps of the chains' last plans are fused."""
    return sum(sum(region.plan.fused) for graph in conversion.graphs for region in graph.regions)


# Without a GPU each family in one mode, and all of them under --full.
CASES = [
    pytest.param(family, mode, marks=[pytest.mark.full] * (not HERE and (i + j) % 3 != 0), id=f"{family} {mode}")
    for i, family in enumerate(FAMILIES)
    for j, mode in enumerate(MODES)
]


@pytest.mark.parametrize(("family", "mode"), CASES)
def test_a_converted_model_gives_what_it_gave(family: str, mode: str, device: torch.device) -> None:
    dtype = torch.bfloat16 if mode == "bfloat16" else torch.float32
    eager = built(FAMILIES[family], device, dtype)
    model, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    conversion = sf.convert(model)
    cast = torch.autocast(device.type, torch.bfloat16, enabled=mode == "autocast")

    def measure(seed: int) -> tuple[Any, Any, Any]:
        given = inputs_of(family, device, seed)
        with cast:
            found, wanted = passes(model, given), passes(eager, given)
        return found, wanted, passes(exact, given)

    def rounded(seed: int) -> tuple[Any, ...]:
        """Autocast rounds results of GEMMs, and so the gradients of weights, to bfloat16, whatever holds them then."""
        *sides, exact = measure(seed)
        return *({n: None if t is None else t.bfloat16() for n, t in side.items()} for side in sides), exact

    held_to_the_rule(rounded if mode == "autocast" else measure)
    assert not conversion._backend.missed, str(conversion)  # pyright: ignore[reportPrivateUsage]
    assert fused(conversion) or not HERE, str(conversion)


@pytest.mark.usefixtures("deterministic")
def test_dropout_follows_the_seed(device: torch.device) -> None:
    dtype = torch.bfloat16 if HERE else torch.float32
    model = built(lambda: gpt2(0.1), device, dtype)
    given = inputs_of("gpt2", device)
    model.eval()
    wanted = model(**given)[0].detach()
    model.train()
    conversion = sf.convert(model)
    runs: list[dict[str, Any]] = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        runs.append({name: None if t is None else t.clone() for name, t in passes(model, given).items()})
    assert fused(conversion) or not HERE
    assert_bitwise_equal(runs[0], runs[1])
    assert not torch.equal(runs[0]["y"], runs[2]["y"])
    assert all(t is None or bool(t.isfinite().all()) for t in runs[0].values())
    model.eval()
    assert distance([model(**given)[0]], [wanted]) < NEAR[dtype]


@GPU
@pytest.mark.usefixtures("deterministic")
def test_a_graph_replays_a_step_of_a_converted_model(device: torch.device) -> None:
    model = built(llama, device, torch.bfloat16)
    sf.convert(model)
    x, dy = (seeded_randn((*SHAPE, W), seed, dtype=torch.bfloat16).to(device) for seed in (1, 2))
    static, parameters = x.clone(), [p for p in model.parameters() if p is not model.embed_tokens.weight]

    def step() -> list[Tensor]:
        leaf = static.detach().requires_grad_()
        y = model(inputs_embeds=leaf, use_cache=False)[0]
        return [y.detach(), *torch.autograd.grad(y, [leaf, *parameters], dy)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (5, 6):
        static.copy_(seeded_randn(tuple(x.shape), seed, dtype=x.dtype))
        graph.replay()
        replayed = [t.clone() for t in captured]
        assert_bitwise_equal(replayed, step())


@pytest.mark.parametrize("cache", ["dynamic", "static", "static, compiled"])
def test_generation_gives_eagers_tokens(cache: str, device: torch.device) -> None:
    """transformers compiles the decoding step over a static cache on a GPU, unless it is told not to."""
    if cache == "static, compiled" and not HERE:
        pytest.skip("transformers compiles on a GPU alone")
    plain = built(lambda: llama("LlamaForCausalLM"), device).eval()
    model = copy.deepcopy(plain)
    conversion = sf.convert(model)
    prompt = tokens(device, shape=(2, 33 if HERE else 7))
    how: dict[str, Any] = {"max_new_tokens": 12 if HERE else 4, "do_sample": False}
    if cache != "dynamic":
        how["cache_implementation"] = "static"
    wanted = plain.generate(prompt, disable_compile=True, **how)
    assert torch.equal(model.generate(prompt, disable_compile=cache != "static, compiled", **how), wanted)
    assert fused(conversion) or not HERE or cache == "static, compiled", str(conversion)


def test_undo_gives_the_model_back(device: torch.device) -> None:
    model = built(llama, device)
    given = inputs_of("llama", device)
    wanted = model(**given)[0].detach()
    conversion = sf.convert(model)
    passes(model, given)
    conversion.undo()
    assert torch.equal(model(**given)[0], wanted)


def test_a_converted_model_under_a_compiler(device: torch.device) -> None:
    model = built(llama, device)
    given = inputs_of("llama", device)
    wanted = {name: None if t is None else t.clone() for name, t in passes(model, given).items()}
    sf.convert(model)
    compiled = torch.compile(model, backend="inductor" if HERE else "aot_eager")
    model.zero_grad()
    y = compiled(**given)[0]
    y.backward(seeded_randn(tuple(y.shape), 2).to(y))
    found = [y.detach(), *(p.grad for p in model.parameters())]
    assert distance(found, [*wanted.values()]) < NEAR[torch.float32]


@pytest.mark.parametrize("memory", ["fast", "least"])
def test_checkpointed_layers(memory: str, device: torch.device) -> None:
    dtype = torch.bfloat16 if HERE else torch.float32
    eager = built(llama, device, dtype)
    model, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    sf.convert(model, memory=memory)

    def measure(seed: int) -> tuple[Any, Any, Any]:
        given = {**inputs_of("llama", device, seed), "use_cache": False}
        return passes(model, given), passes(eager, given), passes(exact, given)

    held_to_the_rule(measure)
