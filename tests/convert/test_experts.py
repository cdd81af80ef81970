"""Converted mixture-of-experts models of Hugging Face: one graph, each block of experts one chain, eager's numbers."""

from __future__ import annotations

import contextlib
import copy
import importlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest
import torch
from functorch.compile import aot_function, nop
from torch import Tensor, nn

import seqfuse as sf
from seqfuse.convert import experts
from seqfuse.testing import seeded_randn

from .comparing import assert_close
from .families import VOCABULARY, randomized

transformers: Any = pytest.importorskip("transformers")
pytest.importorskip("transformers.integrations.moe")
planning: Any = importlib.import_module("seqfuse.plan.search")

SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MLA = {  # whose first layer has no experts
    **SIZES, "num_hidden_layers": 2, "num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_shared_experts": 1,
}  # fmt: skip
FOUR = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2}
LOCAL = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}

BLOCK = "Route, Permute, GroupedLinear, SwiGLU, GroupedLinear, Unpermute"
WHOLE = f"RMSNorm, {BLOCK}, Add, RMSNorm"  # from norm to norm
SHARED = "MergedLinear, SwiGLU, Linear"  # a shared expert
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "mixtral": ("Mixtral", LOCAL, WHOLE),
    "qwen2-moe": (
        "Qwen2Moe", {**FOUR, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
        f"{SHARED}, Multiply, {BLOCK}, Add",
    ),
    "qwen3-moe": ("Qwen3Moe", {**FOUR, "moe_intermediate_size": 24, "head_dim": 8}, WHOLE),
    "olmoe": ("Olmoe", FOUR, WHOLE),
    "granite-moe": ("GraniteMoe", LOCAL, BLOCK),
    "gpt-oss": (
        "GptOss", {**LOCAL, "head_dim": 8, "sliding_window": 4, "attn_implementation": "eager"},
        BLOCK.replace("SwiGLU", "ClampedSwiGLU"),
    ),
    "deepseek-v2": (
        "DeepseekV2", {**MLA, "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.5},
        WHOLE.replace("Add", f"{SHARED}, Add, Add", 1),
    ),
    "deepseek-v3": (
        "DeepseekV3", {**MLA, "routed_scaling_factor": 2.446}, WHOLE.replace("Add", f"{SHARED}, Add, Add", 1),
    ),
    "llama4": (
        "Llama4", {**LOCAL, "intermediate_size_mlp": 48, "num_experts_per_tok": 1, "head_dim": 8},
        f"{SHARED}, {BLOCK.replace('Permute', 'TokenScale, Permute', 1)}, Add",
    ),
}  # fmt: skip


def built(name: str) -> nn.Module:
    kind, sizes, _ = MODELS[name]
    config = getattr(transformers, f"{kind}{'Text' * (kind == 'Llama4')}Config")(**sizes)
    return randomized(getattr(transformers, f"{kind}ForCausalLM")(config)).train()


def passes(model: nn.Module) -> dict[str, Tensor | None]:
    ids = torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    y = model(input_ids=ids).logits
    (y * seeded_randn(tuple(y.shape), 9)).sum().backward()
    return {"y": y.detach(), **{n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}}


@pytest.mark.parametrize("name", MODELS)
def test_a_block_of_experts_is_one_chain(name: str):
    model = built(name)
    before = copy.deepcopy(model)
    if name != "llama4":
        before.set_experts_implementation("eager")  # pyright: ignore
    wanted = passes(before)
    conversion = sf.convert(model)
    for _ in range(2):  # the first call is interpreted, the second runs generated code
        assert_close(passes(model), wanted)
    assert len(conversion.graphs) == 1
    chains = [", ".join(type(r.operation).__name__ for r in g.order.members) for g in conversion.graphs[0].regions]
    assert sum(MODELS[name][2] in chain for chain in chains) >= 1, chains
    block = (".gate", ".router", ".experts")
    assert not [
        one for one in conversion.graphs[0].left if one.call == "mixture" or any(n in one.module for n in block)
    ]
    conversion.undo()
    assert_close(passes(model), wanted)


def test_experts_whose_router_leaves_the_model_are_one_chain_behind_it():
    """With a load-balancing loss; a layer of GPT-OSS returns the factors, too."""
    layer = built("gpt-oss").model.layers[0].mlp  # pyright: ignore
    x = seeded_randn((2, 7, SIZES["hidden_size"]), 0).requires_grad_()

    def made(layer: Any) -> list[Tensor]:
        outputs = layer(x)
        drawn = [seeded_randn(tuple(t.shape), i) for i, t in enumerate(outputs)]
        return [*outputs, *torch.autograd.grad(outputs, [x, *layer.parameters()], drawn)]

    wanted = made(layer)
    conversion = sf.convert(layer)
    for _ in range(2):
        torch.testing.assert_close(made(layer), wanted, rtol=1e-4, atol=1e-4)
    assert "Permute, GroupedLinear, ClampedSwiGLU, GroupedLinear, Unpermute" in str(conversion)
    assert "Route" not in str(conversion)


@pytest.mark.parametrize("memory", ["balanced", "least"])
def test_a_correction_is_the_one_of_now(memory: Literal["balanced", "least"], monkeypatch: pytest.MonkeyPatch):
    """Load balancing changes the buffer between two calls."""
    monkeypatch.setattr(planning, "SEGMENT_BYTES", 0)
    model = built("deepseek-v3")
    before = copy.deepcopy(model)
    before.set_experts_implementation("eager")  # pyright: ignore
    conversion = sf.convert(model, memory=memory)
    assert_close(passes(model), passes(before))
    plans = [region.plan for graph in conversion.graphs for region in graph.regions]
    assert any(plan is not None and plan.recomputed for plan in plans) == (memory == "least")
    for each in (model, before):
        gates = [m for name, m in each.named_modules() if name.endswith("mlp.gate")]
        assert gates
        for gate in gates:
            gate.e_score_correction_bias.copy_(seeded_randn(tuple(gate.e_score_correction_bias.shape), 3))
    assert_close(passes(model), passes(before))


def test_undo_gives_configurations_back_and_others_keep_theirs():
    model = built("mixtral")
    config: Any = model.config
    twin = type(model)(config)
    modules = [m for m in model.modules() if hasattr(m, "has_gate")]
    attributes = [set(vars(m)) for m in modules]
    conversion = sf.convert(model)
    assert all(m.config._experts_implementation == experts.NAME for m in modules)
    assert config._experts_implementation != experts.NAME
    assert all(m.config is config for m in twin.modules() if hasattr(m, "has_gate"))
    conversion.undo()
    assert all(m.config is config for m in modules)
    assert [set(vars(m)) for m in modules] == attributes


@pytest.mark.parametrize("used", ["eager", "batched_mm"])  # by default it is "grouped_mm"
def test_every_spelling_of_hugging_face_is_taken_over(used: str):
    model = built("mixtral")
    model.set_experts_implementation(used)  # pyright: ignore
    wanted = passes(model)
    conversion = sf.convert(model)
    assert_close(passes(model), wanted)
    assert "Route, Permute" in str(conversion)


def test_what_is_not_allowed_to_be_converted_runs_by_the_same_operations():
    model = built("mixtral")
    wanted = passes(model)
    conversion = sf.convert(model, filter_fn=lambda module, path: "mlp" not in path)
    assert_close(passes(model), wanted)
    assert "Permute" not in str(conversion)


class Experts(nn.Module):
    """The attributes of a module of experts, one of which is changed."""

    def __init__(self, act: Callable[[Tensor], Tensor] = torch.nn.functional.silu, **changed: Any) -> None:
        super().__init__()
        self.config: Any = type("Config", (), {"_experts_implementation": "eager"})()
        self.has_gate, self.is_transposed, self.has_bias, self._is_expert_parallel = True, False, False, False
        self.has_post_expert_norm, self.act_fn = False, act
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.ones(3, 8, 4)), nn.Parameter(torch.ones(3, 4, 4))
        for name, value in changed.items():
            setattr(self, name, value)

    def _apply_gate(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return self.act_fn(gate) * up


def test_threads_do_not_exchange_weights(monkeypatch: pytest.MonkeyPatch):
    weights = [(seeded_randn((2, 16, 8), seed), seeded_randn((2, 8, 16), seed)) for seed in (1, 2)]
    x, routed = torch.ones(3, 8), (torch.tensor([[0], [1], [1]]), torch.ones(3, 1))

    def run(both: tuple[Tensor, Tensor]) -> Tensor:
        return experts.mixture(x, *routed, both[0], None, both[1], None, ("SiLU", (), ""))

    wanted = [run(both) for both in weights]
    forward, both_are_here = sf.Sequential.forward, threading.Barrier(2)

    def late(*args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            both_are_here.wait(2)  # after the weights are assigned
        return forward(*args, **kwargs)

    monkeypatch.setattr(sf.Sequential, "forward", late)
    with ThreadPoolExecutor(2) as threads:
        torch.testing.assert_close([*threads.map(run, weights)], wanted)


def test_what_stands_between_the_gemms_is_found_by_its_values():
    found = {
        "SwiGLU": Experts(), "GEGLU": Experts(nn.GELU()), "ReGLU": Experts(torch.relu), "QGEGLU":
        Experts(lambda x: x * torch.sigmoid(1.702 * x)),
    }  # fmt: skip
    for name, module in found.items():
        assert experts._unit_of(module) == (name, (), "gate_up")
    assert experts._unit_of(Experts(nn.GELU("tanh"))) == ("GEGLU", ("tanh",), "gate_up")
    plain = Experts(lambda x: torch.relu(x) ** 2, has_gate=False, up_proj=nn.Parameter(torch.ones(3, 4, 4)))
    assert experts._unit_of(plain) == ("SquaredReLU", (), "")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"has_post_expert_norm": True}, "a norm behind"),
        ({"act": torch.sin}, "its activation is none"),
        ({"gate_up_proj": nn.Parameter(torch.ones(3, 8))}, "are not one tensor for all experts"),
        ({"act": lambda x: x[5:, 99]}, "its activation cannot be tried"),
    ],
)
def test_others_keep_their_implementation(changed: dict[str, Any], reason: str):
    found = experts._unit_of(Experts(**changed))
    assert isinstance(found, str)
    assert reason in found


def test_another_implementation_is_kept():
    module = Experts()
    module.config._experts_implementation = "sonicmoe"
    assert experts._unit_of(module) == "its experts have the implementation 'sonicmoe'"


def test_experts_of_other_processes_are_dropped():
    """Expert parallelism: indices beyond the local experts have a factor of zero."""
    x, chosen = seeded_randn((5, 4), 0).requires_grad_(), torch.tensor([[0, 3], [3, 3], [1, 2], [2, 0], [3, 1]])
    probs = torch.where(chosen == 3, 0.0, seeded_randn((5, 2), 1)).requires_grad_()
    up, down = seeded_randn((3, 8, 4), 2), seeded_randn((3, 4, 4), 3)
    y = experts.mixture(x, chosen, probs, up, None, down, None, ("SwiGLU", (), "gate_up"))
    expected = torch.zeros(5, 4)
    for t, (row, factors) in enumerate(zip(chosen, probs, strict=True)):
        for e, p in zip(row.tolist(), factors, strict=True):
            if e < 3:
                gate, value = (up[e] @ x[t]).chunk(2)
                expected[t] += (p * (down[e] @ (torch.nn.functional.silu(gate) * value))).detach()
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    assert probs.grad is not None
    assert not probs.grad[chosen == 3].any()


@pytest.mark.parametrize("biased", [False, True])
def test_a_compiler_records_the_mixture_with_all_experts(biased: bool):
    """As in a mixture that stays with Inductor."""
    chosen = torch.tensor([[0, 2], [1, 0], [2, 1], [2, 0], [0, 1]])
    given = [seeded_randn(shape, i) for i, shape in enumerate([(5, 4), (5, 2), (3, 8, 4), (3, 4, 4), (3, 8), (3, 4)])]

    def mixture(chosen: Tensor, x: Tensor, probs: Tensor, up: Tensor, down: Tensor, *biases: Tensor) -> Tensor:
        up_bias, down_bias = biases if biased else (None, None)
        return experts.mixture(x, chosen, probs, up, up_bias, down, down_bias, ("SwiGLU", (), "gate_up"))

    def gradients(call: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in given[: 6 if biased else 4]]
        y = call(chosen, *leaves)
        return [y.detach(), *torch.autograd.grad((y * seeded_randn((5, 4), 9)).sum(), leaves)]

    recorded = aot_function(mixture, fw_compiler=nop, decompositions={})
    torch.testing.assert_close(gradients(recorded), gradients(mixture))


@pytest.mark.parametrize("viewed_before", [False, True])
def test_a_sum_in_place_is_what_is_read_after_it(viewed_before: bool):
    """As in Llama 4, which adds the results of its experts and of its shared expert."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            before = y.view(-1, 16) if viewed_before else 1.0
            y.add_(self.second(x), alpha=2)
            return y.view(-1, 16) * y.flatten(0, 1).tanh() * before

    model, x = Model(), seeded_randn((1, 3, 16), 0).requires_grad_()

    def made() -> list[Tensor]:
        y = model(x)
        return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], seeded_randn(tuple(y.shape), 1))]

    wanted = made()
    sf.convert(model)
    for _ in range(2):
        torch.testing.assert_close(made(), wanted)


def test_tokens_times_the_factors_of_several_experts_stay_as_they_were():
    kind, sizes, _ = MODELS["llama4"]
    config = transformers.Llama4TextConfig(**{**sizes, "num_experts_per_tok": 2})
    model = randomized(getattr(transformers, f"{kind}ForCausalLM")(config)).train()
    wanted = passes(model)
    conversion = sf.convert(model)
    assert_close(passes(model), wanted)
    left = [left for left in conversion.graphs[0].left if left.module.endswith("experts") and left.kind == "GEMM"]
    assert left
    assert all(one.reason for one in left)
