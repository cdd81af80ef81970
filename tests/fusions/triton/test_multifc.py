"""Plans of whole layers: what is fused, how many launches are left, the files that run from a fusion to its kernel."""

from __future__ import annotations

import copy
import functools
import json
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import fusions, ops
from seqfuse.testing import seeded_randn
from seqfuse.testing.tensors import redrawn
from tests.judging import judge_together

# The net of three layers, one with two readers, with which Paddle's pass for GEMM epilogues is tested.


WIDTH = 1024


class BatchedProduct(sf.UnfusedOperation):
    """y = x other, one matrix per entry of the batch.  x: [B, S, H], other: [B, H, H], y: [B, S, H]."""

    class Saved(sf.Saved):
        x: Tensor = sf.field(for_="other")  # [B, S, H]
        other: Tensor = sf.field(for_="x")  # [B, H, H]

    def reference(self, x: Tensor, *, other: Tensor) -> Tensor:
        return x @ other

    def fwd(self, x: Tensor, *, other: Tensor) -> tuple[Tensor, Saved]:
        return x @ other, self.Saved(x=x, other=other)

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[Tensor | None, sf.Grads]:
        dx = dy @ saved.other.mT if "x" in needs else None
        return dx, {"other": saved.x.mT @ dy if "other" in needs else None}


def net(act: type[sf.Pointwise], width: int = WIDTH) -> sf.Sequential:
    return sf.Sequential(
        *(ops.Linear(width, width), act()),
        *(ops.Linear(width, width), act(), ops.Fork("second")),
        *(ops.Linear(width, width), act()),
        BatchedProduct(),
        ops.Add("second"),
    )


@pytest.mark.parametrize("act", [ops.ReLU, ops.GeLU, ops.Sigmoid], ids=lambda act: act.__name__)
def test_everything_that_can_be_fused_is(act: type[sf.Pointwise]):
    """Three fused operations forward and three backward, and none of the other covers that exist leaves less.

    The product of three dimensions is an operation of its own with the right factor as an extra input, since that is no
    parameter and no matrix: no rule takes it, nor an Add that follows it, nor a Fork without a norm. They cut the list
    in two: `Linear, Bias, act, Linear, Bias, act` and `Linear, Bias, act`.

    Forward, each fused operation begins with a Linear, or with the Bias and activation after it, and reaches to the
    activation at most, so that there is one for each of the three: as many as there can be, and they take everything.

    Backward, an activation's gradient is fused with the bias before it, so that three fused operations have one each.
    What is left are products, the sum at the Fork and the Add, which is no work. There are covers with a further fused
    operation, `Linear, Bias`, and each takes that bias away from the activation behind it.
    """
    env = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=8192)
    x = torch.empty(8, WIDTH, WIDTH, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with torch.device("meta"):
        plan = net(act).bfloat16().plan(x, other=torch.empty_like(x), env=env)
    ahead, back = ([step for step in steps if step.fused] for steps in (plan.forward, plan.backward))
    # Operations that save their output write it over the GEMM's, and ReLU is in the epilogue of torch's GEMM.
    first = "LinearBiasPointwise" if act is ops.GeLU else "LinearBiasAct"
    assert [(step.name, step.covers) for step in ahead] == [
        (first, range(3)),
        (first, range(3, 6)),
        (first, range(7, 10)),
    ]
    assert [(step.name, step.covers) for step in back] == [
        ("PointwiseChainBackward", range(1, 3)),
        ("PointwiseChainBackward", range(4, 6)),
        ("PointwiseChainBackward", range(8, 10)),
    ]
    assert "3 fused" in str(plan)
    assert [step.name for step in plan.forward if not step.fused] == ["Fork", "BatchedProduct", "Add"]
    left = [step.name for step in plan.backward if not step.fused]
    assert left == ["Linear", "Linear", "Fork", "Linear", "BatchedProduct", "Add"]


def test_no_rule_takes_what_cuts_the_list_in_two():
    """Next to the cuts no fusion matches: each fusion alone reaches neither to nor across them."""
    env = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=8192)
    with torch.device("meta"):
        model = net(ops.GeLU).bfloat16()
        x = torch.empty(8, WIDTH, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    cuts = {6, 10, 11}
    used: set[str] = set()
    for fusion in sf.fusions.default:
        with sf.fusing(only=fusion):
            plan = model.plan(x, other=torch.empty_like(x), env=env)
        for step in (*plan.forward, *plan.backward):
            if step.fused:
                used.add(step.name)
                assert cuts.isdisjoint(step.covers), step
    assert used >= {"LinearBiasPointwise", "PointwiseChainBackward", "LinearBias", "LinearBiasBackward"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_numbers_are_the_same(dtype: torch.dtype, device: torch.device):
    names = ("LinearBiasPointwise", "PointwiseChainBackward")
    model = net(ops.GeLU, 12).to(device, dtype)
    x, dy = (seeded_randn((3, 7, 12), i, dtype=dtype).to(device) for i in range(2))
    other = seeded_randn((3, 12, 12), 2, dtype=dtype).to(device)

    def run(model: sf.Sequential, only: tuple[str, ...], seed: int) -> list[Tensor]:
        kind = model[0].weight.dtype
        leaves = [t.to(kind, copy=True).requires_grad_() for t in (redrawn(x, seed), other)]
        with sf.fusing(only=only, on_error="raise"):
            plan = model.plan(leaves[0], other=leaves[1])
            y = model(leaves[0], other=leaves[1])
        assert {step.name for step in (*plan.forward, *plan.backward) if step.fused} == set(only)
        return [y.detach(), *torch.autograd.grad(y, [*leaves, *model.parameters()], dy.to(kind))]

    wide = copy.deepcopy(model).double()
    others = functools.cache(lambda seed: (run(model, (), seed), run(wide, (), seed)))
    for only in (names[:1], names[1:], names):
        judge_together(lambda seed, only=only: (run(model, only, seed), *others(seed)), 0)


def test_a_layer_is_planned_as_with_one_weight():
    """Gate and up, and queries, keys and values: the same steps as with packed weights, forward and backward."""
    made = {"device": "meta", "dtype": torch.bfloat16}

    def steps(qkv: ops.Linear | ops.MergedLinear, gate_up: ops.Linear | ops.MergedLinear) -> list[int]:
        model = sf.Sequential(
            ops.Residual(
                ops.RMSNorm(512, **made), qkv, ops.RotaryEmbedding(8, 2, style="half", cos="cos", sin="sin"),
                ops.Attention(8, 2, causal=True), ops.Linear(512, 512, False, **made),
            ),
            ops.Residual(ops.RMSNorm(512, **made), gate_up, ops.SwiGLU(), ops.Linear(1024, 512, False, **made)),
        )  # fmt: skip
        plan = model.plan(env=sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=8192))
        return [len(plan.forward), len(plan.backward)]

    packed = steps(ops.Linear(512, 768, False, **made), ops.Linear(512, 2048, False, **made))
    merged = steps(
        ops.MergedLinear(512, (512, 128, 128), False, **made), ops.MergedLinear(512, (1024, 1024), False, **made)
    )
    assert merged == packed


sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))


@pytest.mark.slow
@pytest.mark.parametrize("at", range(6))
def test_launches_are_what_is_counted_now(at: int) -> None:
    bench: Any = pytest.importorskip("bench_counts")
    found = json.loads((bench.ROOT / "benchmarks" / "results" / "layer_counts.json").read_text())
    row = found["rows"][at]
    with sf.fusing(unmeasured=False):
        assert json.loads(json.dumps(bench.planned(bench.MODELS[at]))) == row["planned"]
    transformers = pytest.importorskip("transformers")
    if transformers.__version__ == found["transformers"]:
        assert bench.eager(bench.MODELS[at]) == row["eager"]


# The map of the engine lists the files that run from a fusion to its kernel, at most six.


PACKAGE = Path(sf.__file__).parent
MAP = (PACKAGE.parent / "docs" / "dev" / "architecture.md").read_text()
MODELS: dict[str, tuple[nn.Module, ...]] = {
    "LinearBias": (ops.Linear(32, 32), ops.SquaredReLU()),  # a Linear by itself runs as calls of torch
    "LinearBiasPointwise": (ops.Linear(32, 32), ops.GeLU()),
    "NormBackward": (ops.LayerNorm(32),),
    "BlockBoundary": (ops.Residual(ops.Bias(32), ops.Dropout(0.1)), ops.LayerNorm(32)),
    "PointwiseChain": (ops.GeLU(), ops.Scale(2.0), ops.SiLU()),
}
EVERY_LAUNCH = {"kernels/_launch.py", "kernels/_operators.py", "kernels/c/call.py"}


def listed() -> dict[str, list[str]]:
    """The files of each row of the map, by fusion."""
    rows: dict[str, list[str]] = {}
    section = MAP.partition("## From a fusion to its kernel\n")[2].partition("\n## ")[0]
    for name, cell in re.findall(r"^\| [^|]*`(\w+)` \| (.*) \|$", section, re.MULTILINE):
        folder, files = "", list[str]()
        for file in re.findall(r"`([\w/]+\.py)`", cell):
            folder = file.rpartition("/")[0] or folder
            files.append(f"{folder}/{file.rpartition('/')[2]}")
        rows[name] = files
    return rows


def files_run(name: str) -> set[str]:
    """Files of fusions and kernels whose functions run in a pass of a fusion."""
    cls: Any = getattr(fusions, name)
    model = sf.Sequential(*MODELS[name], fusions=(cls,))
    x = torch.randn(8, 32, requires_grad=True)
    passes, inside, found = {f"{name}.fwd", f"{name}.bwd"}, 0, set[str]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal inside
        if event == "call" and (inside or frame.f_code.co_qualname in passes):
            inside += 1
            file = Path(frame.f_code.co_filename)
            if file.is_relative_to(PACKAGE):
                found.add(file.relative_to(PACKAGE).as_posix())
        elif event == "return" and inside:
            inside -= 1

    with sf.fusing(unmeasured=True):
        assert model.plan(x).count(name) == 1
        model(x).sum().backward()  # imports the kernels
        sys.setprofile(note)
        try:
            model(x).sum().backward()
        finally:
            sys.setprofile(None)
    return {file for file in found if file.startswith(("fusions/", "kernels/"))}


def test_the_map_lists_one_fusion_of_each_family() -> None:
    assert listed().keys() == MODELS.keys()


@pytest.mark.parametrize("name", MODELS)
def test_few_files_lead_from_a_fusion_to_its_kernel(name: str) -> None:
    files = listed()[name]
    assert len([file for file in files if not file.startswith("kernels/c/")]) <= 6
    assert all((PACKAGE / file).exists() for file in files)
    run = files_run(name) - EVERY_LAUNCH
    assert run
    assert run <= set(files)
