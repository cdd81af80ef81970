"""Bytes kept for backward by a feed-forward block of each model in bfloat16, as it is planned for an sm_90.

Counted on tensors without data: storages once, parameters left out; time by the costs that fusions declare, as a part
of that of the products. Writes `results/memory.json`.
"""

from __future__ import annotations

import os

os.environ |= {
    "SEQFUSE_TUNE": "0",
    "TRITON_INTERPRET": "1",
}  # so that what needs Triton is planned; nothing is launched

from typing import Any
from unittest import mock

import plain
import torch
import torch.nn.functional as F
from gpu.blocks import flops, spec_of
from gpu.case import counted
from gpu.sizes import MODELS, Model
from record import write
from torch._subclasses.fake_tensor import FakeTensorMode

import seqfuse as sf

TOKENS, DROPOUT = 8192, 0.1
CHOICES = {"fast": "seqfuse", "balanced": "seqfuse balanced", "lean": "seqfuse lean"}


def row(model: Model, tokens: int = TOKENS) -> dict[str, Any]:
    """Ours by plan, eager's by running it on fake tensors; what keeping less costs, by the figures of an H200."""
    spec, dtype = spec_of(model, DROPOUT), torch.bfloat16
    there = sf.Env.of("cuda:sm_90", dtype=dtype, rows=tokens)
    made = plain.fused("feedforward", spec, 1, dtype=dtype, device="meta")
    x = torch.empty(tokens, model.H, dtype=dtype, device="meta", requires_grad=True)
    choices = {CHOICES[one.memory]: one for one in made.plan(x, env=there).choices if one.memory in CHOICES}
    products = there.microseconds(sf.Savings(flops=3 * flops("feedforward", model, tokens, 1)))
    covers: dict[str, list[str]] = {}
    for memory, name in CHOICES.items():
        made.memory = memory
        plan = made.plan(x, env=there)
        covers[name] = [step.name for step in (*plan.forward, *plan.backward) if step.fused]
    kept = {name: choice.saved for name, choice in choices.items()}
    cost = {name: choice.microseconds / products for name, choice in choices.items()}
    return {
        "model": model.name, "tokens": tokens, "kept": {**kept, "eager": eager(spec, tokens)}, "cost": cost,
        "covers": covers,
    }  # fmt: skip


def eager(spec: plain.Spec, tokens: int) -> int:
    """What torch keeps on a GPU: of RMSNorm x and a number for each row, of dropout a byte for each element."""
    functions = plain.Functions(rms_norm=lambda x, weight, eps: RMSNormOfAGPU.apply(x, weight, eps))
    dropout = mock.patch.object(F, "dropout", lambda x, p, training: torch.native_dropout(x, p, training)[0])
    with FakeTensorMode(), dropout:
        model = plain.build("feedforward", spec, functions, dtype=torch.bfloat16)
        x = torch.empty(tokens, spec.H, dtype=torch.bfloat16, requires_grad=True)
        return counted(lambda: model(x), list(model.parameters()))


class RMSNormOfAGPU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError


def main() -> None:
    rows = [row(model) for model in MODELS]
    for one in rows:
        said = [f"{name} {kept / one['kept']['eager']:.3f}" for name, kept in one["kept"].items()]
        said += [f"{name} takes {part:.1%} longer" for name, part in one["cost"].items() if part]
        print(f"{one['model']:<10} {', '.join(said)}  {one['covers']}")
    print(f"wrote {write('memory', {'memory': rows}).name}")


if __name__ == "__main__":
    main()
