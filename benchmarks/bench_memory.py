"""Bytes kept for backward by a feed-forward block of each model in bfloat16, as it would be covered on an sm_90.

Counted on tensors without data: storages once, parameters left out; time by the costs that fusions declare, as a part
of that of the products. Writes `results/memory.json`.
"""

from __future__ import annotations

import dataclasses
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
from seqfuse import env
from seqfuse.fusions import LinearActivationLinear, NormLinearActivationLinear

TOKENS, DROPOUT = 8192, 0.1
LEAN = (NormLinearActivationLinear, LinearActivationLinear)
RULES: dict[str, Any] = {
    "seqfuse": sf.fusions.default,
    "seqfuse lean": (*sf.fusions.lean, *sf.fusions.default),
    # What the other two take longer than.
    "seqfuse fast": tuple(fusion for fusion in sf.fusions.default if not issubclass(fusion, LEAN)),
}


def row(model: Model, tokens: int = TOKENS) -> dict[str, Any]:
    """Ours by plan, eager's by running it on fake tensors; what keeping less costs, by the figures of an H200."""
    spec, dtype = spec_of(model, DROPOUT), torch.bfloat16
    found: dict[str, int] = {}
    covers: dict[str, list[str]] = {}
    saved: dict[str, float] = {}
    there = sf.Env.of("cuda:sm_90", dtype=dtype, rows=tokens)
    for name, rules in RULES.items():
        with mock.patch.dict(env._COSTS, cpu=env._COSTS["sm_90"]):
            made = plain.fused("feedforward", spec, 1, rules, dtype=dtype)
            x = torch.empty(tokens, model.H, dtype=dtype, requires_grad=True)
            plan = made.plan(x)
            memory = plan.memory
        meta = plain.fused("feedforward", spec, 1, rules, dtype=dtype, device="meta")
        wanted = meta.plan(x.detach().to("meta").requires_grad_(), env=there)
        steps = [[s.name for s in (*one.forward, *one.backward) if s.fused] for one in (plan, wanted)]
        if steps[0] != steps[1]:
            raise AssertionError(f"{model.name}: planned {steps[0]} here and {steps[1]} for an sm_90")
        assert memory is not None
        found[name], covers[name], saved[name] = memory.saved, steps[0], microseconds_saved(wanted)
    products = there.microseconds(sf.Savings(flops=3 * flops("feedforward", model, tokens, 1)))
    cost = {name: (saved["seqfuse fast"] - one) / products for name, one in saved.items()}
    found["eager"] = eager(spec, tokens)
    return {"model": model.name, "tokens": tokens, "kept": found, "cost": cost, "covers": covers}


def microseconds_saved(plan: sf.Plan) -> float:
    """What the fusions of a plan declare to save, less what they count for memory."""
    fused = {id(step.operation): step.operation for step in (*plan.forward, *plan.backward) if step.fused}
    total = 0.0
    for fusion in fused.values():
        total += plan.env.microseconds(dataclasses.replace(fusion.saves(plan.env), memory=0.0))
    return total


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
