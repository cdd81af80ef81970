"""Kernel launches and bytes saved by one layer of six models: of Hugging Face's in eager torch, and as it is planned.

Nothing is run but on tensors without data, in bfloat16, planned for an H100 (sm_90) where nothing was measured. Writes
`results/layer_counts.json`, of which README's picture and docs/benchmarks.md are drawn.
"""

from __future__ import annotations

import os

os.environ |= {"SEQFUSE_TUNE": "0", "TRITON_INTERPRET": "1"}  # what needs Triton is planned; nothing is launched

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from launch_counts import CONVERTS, FREE, Launches, counting
from record import ROOT, write
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import seqfuse as sf
from seqfuse import env
from seqfuse.fake import faking
from seqfuse.ops import _attention

sys.path[:0] = [str(ROOT / "examples")]
models: Any = importlib.import_module("models")
DTYPE = torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Model:
    """A model of Hugging Face by the name of its modeling file, and its layer; its input; the function of `models`."""

    title: str
    make: str
    family: str
    layer: str
    config: dict[str, Any]
    x: tuple[int, int, int]
    head: int | None = None  # elements of a head that RoPE turns


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
    """Of a layer of Hugging Face: the module of each launch, and the bytes that torch saves for backward."""
    home = importlib.import_module(f"transformers.models.{model.family}.modeling_{model.family}")
    made = importlib.import_module(f"transformers.models.{model.family}.configuration_{model.family}")
    names = {"gpt2": "GPT2Config", "vit": "ViTConfig", "gemma3": "Gemma3TextConfig"}
    config = getattr(made, names.get(model.family, f"{model.family.capitalize()}Config"))(**model.config)
    config._attn_implementation = "sdpa"
    stack, kept = [""], dict[int, torch.UntypedStorage]()
    begun: dict[int, str] = {}  # by the number that autograd gives a node, the module that made it

    def pack(t: torch.Tensor) -> torch.Tensor:
        if not isinstance(t, nn.Parameter):
            kept[t.untyped_storage()._cdata] = t.untyped_storage()
        return t

    def ahead() -> str:
        begun[torch._C._autograd._get_sequence_nr() - 1] = stack[-1]
        return stack[-1]

    def back() -> str:
        number = torch._C._current_autograd_node()._sequence_nr()
        return begun[max((n for n in begun if n <= number), default=min(begun))]

    with default(DTYPE), FakeTensorMode():
        layer = getattr(home, model.layer)(config, **({} if model.family in ("bert", "vit") else {"layer_idx": 0}))
        layer.eval()  # without dropout
        for path, module in layer.named_modules():
            module.register_forward_pre_hook(lambda *_, path=path: stack.append(path))
            module.register_forward_hook(lambda *_: stack.__delitem__(-1))
        x = torch.empty(model.x, requires_grad=True)
        angles = () if model.head is None else (torch.empty(1, model.x[1], model.head) for _ in "cs")
        how = {} if model.head is None else {"position_embeddings": tuple(angles)}
        first, second = Launches(FREE, ahead), Launches(FREE, back)
        with first, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = layer(x, **how)
        y = y[0] if isinstance(y, tuple) else y
        with second:
            torch.autograd.grad(y, [x, *layer.parameters()], torch.empty_like(y))
    count = sum(p.numel() for p in layer.parameters())
    saved = sum(storage.nbytes() for storage in kept.values())
    return {"forward": first.found, "backward": second.found, "saved": saved, "parameters": count}


def planned(model: Model) -> dict[str, Any]:
    """Of a layer by its plan: where the step of each launch begins, the steps, the bytes of each choice of memory."""
    made = getattr(models, model.make)(1)
    layer = (made[0] if isinstance(made[0], sf.Sequential) else made).to(DTYPE)
    there = sf.Env.of("cuda:sm_90", dtype=DTYPE, rows=model.x[0] * model.x[1])
    x = torch.empty(model.x, dtype=DTYPE, device="meta", requires_grad=True)
    plan = layer.plan(x, env=there)
    known = {"fast": "save", "balanced": "balanced", "lean": "lean"}
    saved = {known[choice.memory]: choice.saved for choice in plan.choices if choice.memory in known}
    saved = saved or {"save": plan.memory.saved}
    layer = layer.to_empty(device="cpu")
    for module in layer.modules():  # weights of their own, as those of a checkpoint are
        for name, parameter in [*module.named_parameters(recurse=False)]:
            setattr(module, name, nn.Parameter(torch.empty_like(parameter)))
    current: list[int | None] = [None]
    passes, costs = ("forward", "backward"), mock.patch.dict(env._COSTS, cpu=env._COSTS["sm_90"])

    def covers(plan: Any) -> list[Any]:
        return [[(step.name, step.covers) for step in getattr(plan, pass_)] for pass_ in passes]

    def here() -> Any:
        return layer.plan(torch.empty(model.x, dtype=DTYPE, requires_grad=True))

    with costs:  # what only a CPU gains by
        names = {step.name for step in (*plan.forward, *plan.backward)}
        unused = [type(s.operation) for s in (*here().forward, *here().backward) if s.name not in names]
    with costs, sf.fusing(exclude=tuple(unused)):
        assert covers(here()) == covers(plan)
        fuser = layer._fuser
        with faking() as mode, contextlib.ExitStack() as stack:
            leaf = mode.from_tensor(torch.empty(model.x, dtype=DTYPE)).requires_grad_()
            first, second = (Launches(FREE | CONVERTS, lambda: current[0]) for _ in passes)
            # The kernel of torch on a GPU is one launch, with a sliding window too.
            stack.enter_context(mock.patch.object(_attention.Scores, "kernel", return_value="cpu"))
            _tell(stack, plan.forward, "fwd", current)
            _tell(stack, plan.backward[::-1], "bwd", current)
            with counting(first):
                y = fuser.run(fuser.op_list(), leaf, {})
            with counting(second):
                torch.autograd.grad(y, [leaf, *layer.parameters()], torch.empty_like(y))
    steps = {pass_: [(s.name, s.start, s.stop) for s in getattr(plan, pass_)] for pass_ in passes}
    return {"forward": first.found, "backward": second.found, "saved": saved, "steps": steps,
            "operations": plan.names, "parameters": sum(p.numel() for p in layer.parameters())}  # fmt: skip


def _tell(stack: contextlib.ExitStack, steps: Sequence[Any], name: str, current: list[int | None]) -> None:
    """Let the passes of these steps, in the order in which they run, say in `current` where their step begins."""
    starts: dict[type, list[int]] = {}
    for step in steps:
        starts.setdefault(type(step.operation), []).append(step.start)
    for kind, left in starts.items():
        function: Any = getattr(kind, name)

        def run(*args: Any, function: Any = function, left: list[int] = left, **kwargs: Any) -> Any:
            if current[0] is not None or not left:  # a fusion may call an operation
                return function(*args, **kwargs)
            current[0] = left.pop(0)
            try:
                return function(*args, **kwargs)
            finally:
                current[0] = None

        stack.enter_context(mock.patch.object(kind, name, run))


@contextlib.contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def row(model: Model) -> dict[str, Any]:
    return {"title": model.title, "make": model.make, "x": model.x, "eager": eager(model), "planned": planned(model)}


def main() -> None:
    import transformers

    rows = []
    for model in MODELS:
        rows.append(row(model))
        ours, theirs = rows[-1]["planned"], rows[-1]["eager"]
        counts = (len(theirs["forward"]), len(ours["forward"]), len(theirs["backward"]), len(ours["backward"]))
        print(model.title, *counts, theirs["saved"] / 2**20, {k: v / 2**20 for k, v in ours["saved"].items()},
              theirs["parameters"], ours["parameters"], flush=True)  # fmt: skip
    print(f"wrote {write('layer_counts', {'transformers': transformers.__version__, 'rows': rows}).name}")


if __name__ == "__main__":
    main()
