"""Bytes kept for backward by a feed-forward block of each model in bfloat16, as it would be covered on an sm_90.

Counted on tensors without data: storages once, parameters left out. Writes `results/memory.json`.
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
from gpu.blocks import spec_of
from gpu.case import counted
from gpu.sizes import MODELS, Model
from record import write
from torch._subclasses.fake_tensor import FakeTensorMode

import seqfuse as sf
from seqfuse import env

TOKENS = 8192
RULES: dict[str, Any] = {"seqfuse": None, "seqfuse lean": (*sf.fusions.lean, *sf.fusions.default)}


def row(model: Model, tokens: int = TOKENS) -> dict[str, Any]:
    """Ours by plan, eager's by running it on fake tensors."""
    spec, dtype = spec_of(model), torch.bfloat16
    found: dict[str, int] = {}
    covers: dict[str, list[str]] = {}
    there = sf.Env.of("cuda:sm_90", dtype=dtype, rows=tokens)
    for name, rules in RULES.items():
        with mock.patch.dict(env._COSTS, cpu=env._COSTS["sm_90"]):
            made = plain.fused("feedforward", spec, 1, rules, dtype=dtype)
            plan = made.plan(torch.empty(tokens, model.H, dtype=dtype, requires_grad=True))
            memory = plan.memory  # counted when first asked for, with the costs of that moment
        wanted = plain.fused("feedforward", spec, 1, rules, dtype=dtype, device="meta").plan(env=there)
        steps = [[s.name for s in (*one.forward, *one.backward) if s.fused] for one in (plan, wanted)]
        if steps[0] != steps[1]:
            raise AssertionError(f"{model.name}: planned {steps[0]} here and {steps[1]} for an sm_90")
        assert memory is not None
        found[name], covers[name] = memory.saved, steps[0]
    with FakeTensorMode():
        theirs = plain.build("feedforward", spec, dtype=dtype)
        x = torch.empty(tokens, model.H, dtype=dtype, requires_grad=True)
        found["eager"] = counted(lambda: theirs(x), list(theirs.parameters()))
    return {"model": model.name, "tokens": tokens, "kept": found, "covers": covers}


def main() -> None:
    rows = [row(model) for model in MODELS]
    for one in rows:
        ratios = ", ".join(f"{name} {kept / one['kept']['eager']:.3f}" for name, kept in one["kept"].items())
        print(f"{one['model']:<10} {ratios}  {one['covers']}")
    print(f"wrote {write('memory', {'memory': rows}).name}")


if __name__ == "__main__":
    main()
