"""Counts saved bytes and kernel launches on tensors without data, in bfloat16, planned for an H100.

`memory` is a feed-forward block of each model of the GPU rows: seqfuse by plan, eager torch by a run on fake tensors.
`layers` is one layer of six known models: Hugging Face's in eager torch, and the plan of seqfuse's. Plans are not
measured. Writes `results/memory.json` and `results/layer_counts.json`, from which pictures are drawn, too.
"""

from __future__ import annotations

import os

# Triton kernels are planned but not launched; GEMMs count as torch's.
os.environ |= {"SEQFUSE_TUNE": "0", "TRITON_INTERPRET": "1", "SEQFUSE_CPU_GEMMS": "torch"}

import contextlib
import importlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest import mock

import plain
import torch
import torch.nn.functional as F
from gpu import sizes
from gpu.blocks import flops, spec_of
from gpu.case import counted
from gpu.launched import CONVERTS, FREE, Launches
from record import ROOT, write
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import seqfuse as sf
from seqfuse import env
from seqfuse.ops import _attention

sys.path[:0] = [str(ROOT / "examples")]
models: Any = importlib.import_module("models")
DTYPE, TOKENS, DROPOUT = torch.bfloat16, 8192, 0.1
CHOICES = {"fast": "seqfuse", "balanced": "seqfuse balanced", "lean": "seqfuse lean"}


def memory_row(model: sizes.Model, tokens: int = TOKENS) -> dict[str, Any]:
    """A block with dropout: saved bytes, and the cost of saving less as a fraction of the GEMMs."""
    spec, there = spec_of(model, DROPOUT), sf.Env.of("cuda:sm_90", dtype=DTYPE, rows=tokens)
    made = plain.fused("feedforward", spec, 1, dtype=DTYPE, device="meta")
    x = torch.empty(tokens, model.H, dtype=DTYPE, device="meta", requires_grad=True)
    choices = {CHOICES[one.memory]: one for one in made.plan(x, env=there).choices if one.memory in CHOICES}
    gemms = there.microseconds(sf.Savings(flops=3 * flops("feedforward", model, tokens, 1)))
    kept = {name: choice.saved for name, choice in choices.items()} | {"eager": saved_by_torch(spec, tokens)}
    cost = {name: choice.microseconds / gemms for name, choice in choices.items()}
    return {"model": model.name, "tokens": tokens, "kept": kept, "cost": cost}


def saved_by_torch(spec: plain.Spec, tokens: int) -> int:
    """Bytes saved by torch on a GPU: for RMSNorm x and a number per row, for dropout a byte per element."""
    functions = plain.Functions(rms_norm=lambda x, weight, eps: RMSNormOfAGPU.apply(x, weight))
    dropout = mock.patch.object(F, "dropout", lambda x, p, training: torch.native_dropout(x, p, training)[0])
    with FakeTensorMode(), dropout:
        model = plain.build("feedforward", spec, functions, dtype=DTYPE)
        x = torch.empty(tokens, spec.H, dtype=DTYPE, requires_grad=True)
        return counted(lambda: model(x), list(model.parameters()))


class RMSNormOfAGPU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)


class Model(NamedTuple):
    """A Hugging Face model: name of its modeling file, layer and configuration; its input; its function in `models`."""

    title: str
    make: str
    family: str
    layer: str
    config: dict[str, Any]
    x: tuple[int, int, int]
    head: int | None = None  # elements of a head that RoPE rotates


LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
QWEN = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
GEMMA = {"hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4, "num_key_value_heads": 1}
MODELS = (
    Model("GPT-2", "gpt2", "gpt2", "GPT2Block", {}, (8, 1024, 768)),
    Model("Llama 3 8B", "llama3_8b", "llama", "LlamaDecoderLayer", LLAMA, (8, 1024, 4096), 128),
    Model("BERT base", "bert_base", "bert", "BertLayer", {}, (16, 512, 768)),
    Model("ViT-B/16", "vit_b16", "vit", "ViTLayer", {}, (32, 197, 768)),
    Model("Qwen3 0.6B", "qwen3_06b", "qwen3", "Qwen3DecoderLayer", QWEN | {"head_dim": 128}, (8, 1024, 1024), 128),
    Model("Gemma 3 1B", "gemma3_1b", "gemma3", "Gemma3DecoderLayer", GEMMA | {"head_dim": 256}, (8, 1024, 1152), 256),
)


def eager(model: Model) -> dict[str, Any]:
    """For a layer of Hugging Face in eager torch: the module of each launch, and the bytes saved for backward."""
    home = importlib.import_module(f"transformers.models.{model.family}.modeling_{model.family}")
    known = {"gemma3": "gemma3_text"}.get(model.family, model.family)
    config = importlib.import_module("transformers").AutoConfig.for_model(known, **model.config)
    config._attn_implementation = "sdpa"
    stack = [""]
    begun: dict[int, str] = {}  # by autograd's number of a node, the module that created it

    def ahead() -> str:
        begun[torch._C._autograd._get_sequence_nr() - 1] = stack[-1]
        return stack[-1]

    def back() -> str:
        number = torch._C._current_autograd_node()._sequence_nr()
        return begun[max((n for n in begun if n <= number), default=min(begun))]

    with FakeTensorMode(), contextlib.ExitStack() as within:
        within.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(DTYPE)
        layer = getattr(home, model.layer)(config, **({} if model.family in ("bert", "vit") else {"layer_idx": 0}))
        layer.eval()  # turns dropout off
        for path, module in layer.named_modules():
            module.register_forward_pre_hook(lambda *_, path=path: stack.append(path))
            module.register_forward_hook(lambda *_: stack.__delitem__(-1))
        x = torch.empty(model.x, requires_grad=True)
        angles = [torch.empty(1, model.x[1], model.head or 0) for _ in "cs"]
        how: dict[str, Any] = {} if model.head is None else {"position_embeddings": angles}
        first, second, results = Launches(FREE, ahead), Launches(FREE, back), list[Any]()
        parameters = list(layer.parameters())
        with first:
            saved = counted(lambda: results.append(layer(x, **how)), parameters)
        (y,) = results
        y = y[0] if isinstance(y, tuple) else y
        with second:
            torch.autograd.grad(y, [x, *parameters], torch.empty_like(y))
    count = sum(p.numel() for p in parameters)
    return {"forward": first.found, "backward": second.found, "saved": saved, "parameters": count}


def planned(model: Model) -> dict[str, Any]:
    """For a planned layer: where the step of each launch begins, the steps, and the bytes of each memory choice."""
    made = getattr(models, model.make)(1)
    layer = (made[0] if isinstance(made[0], sf.Sequential) else made).to(DTYPE)
    there = sf.Env.of("cuda:sm_90", dtype=DTYPE, rows=model.x[0] * model.x[1])
    x = torch.empty(model.x, dtype=DTYPE, device="meta", requires_grad=True)
    plan = layer.plan(x, env=there)
    known = {"fast": "save", "balanced": "balanced", "lean": "lean"}
    saved = {known[choice.memory]: choice.saved for choice in plan.choices if choice.memory in known}
    saved = saved or {"save": plan.memory.saved}
    layer = layer.to_empty(device="cpu")
    for module in layer.modules():  # separate weights, as loaded from a checkpoint
        for name, parameter in [*module.named_parameters(recurse=False)]:
            setattr(module, name, nn.Parameter(torch.empty_like(parameter)))
    current: list[int | None] = [None]

    def steps(plan: Any, *fields: str) -> list[Any]:
        return [[tuple(getattr(s, f) for f in fields) for s in pass_] for pass_ in (plan.forward, plan.backward)]

    def here() -> Any:
        return layer.plan(torch.empty(model.x, dtype=DTYPE, requires_grad=True))

    with mock.patch.dict(env._COSTS, cpu=env._COSTS["sm_90"]), contextlib.ExitStack() as within:
        # A processor without GEMMs in bfloat16 converts their operands; a GPU does not.
        within.enter_context(mock.patch.object(env, "WIDENED", frozenset()))
        names = {step.name for step in (*plan.forward, *plan.backward)}
        # Fusions that are faster only on a CPU.
        unused = [type(s.operation) for s in (*here().forward, *here().backward) if s.name not in names]
        within.enter_context(sf.fusing(exclude=tuple(unused)))
        assert steps(here(), "name", "covers") == steps(plan, "name", "covers")
        # Torch's attention kernel on a GPU is one launch, also with a sliding window.
        within.enter_context(mock.patch.object(_attention.Scores, "kernel", return_value="cpu"))
        _tell(within, plan.forward, "fwd", current)
        _tell(within, plan.backward[::-1], "bwd", current)
        count = Launches(FREE | CONVERTS, lambda: current[0])
        forward, backward = count.counted(layer, torch.empty(model.x, dtype=DTYPE))
    told = dict(zip(("forward", "backward"), steps(plan, "name", "start", "stop"), strict=True))
    return {"forward": forward, "backward": backward, "saved": saved, "steps": told,
            "operations": plan.names, "parameters": sum(p.numel() for p in layer.parameters())}  # fmt: skip


def _tell(stack: contextlib.ExitStack, steps: Sequence[Any], name: str, current: list[int | None]) -> None:
    """Patch the passes of these steps, in execution order, to set `current` to where their step begins."""
    starts: dict[type, list[int]] = {}
    for step in steps:
        starts.setdefault(type(step.operation), []).append(step.start)
    for kind, left in starts.items():
        function: Any = getattr(kind, name)

        def run(*args: Any, function: Any = function, left: list[int] = left, **kwargs: Any) -> Any:
            if current[0] is not None or not left:  # inside a fusion, which may call operations
                return function(*args, **kwargs)
            current[0] = left.pop(0)
            try:
                return function(*args, **kwargs)
            finally:
                current[0] = None

        stack.enter_context(mock.patch.object(kind, name, run))


def main() -> None:
    parts = sys.argv[1:] or ["memory", "layers"]
    if "memory" in parts:
        write("memory", {"memory": [memory_row(model) for model in sizes.MODELS]})
    if "layers" in parts:
        import transformers

        rows = [{"title": m.title, "make": m.make, "x": m.x, "eager": eager(m), "planned": planned(m)} for m in MODELS]
        write("layer_counts", {"transformers": transformers.__version__, "rows": rows})


if __name__ == "__main__":
    main()
