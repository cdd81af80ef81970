"""What operations say of autocast against what torch does, on fake tensors of a CPU and of a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import seqfuse as sf
from seqfuse import ops
from seqfuse.plan.flatten import flatten
from seqfuse.plan.inputs import Border, along_of, under_autocast
from seqfuse.plan.step import Stretch
from seqfuse.run.lower import Context, lower
from seqfuse.run.node import back_alone, run_alone

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
OPERATIONS = sorted(
    {
        kind
        for kind in vars(ops).values()
        if isinstance(kind, type) and issubclass(kind, sf.UnfusedOperation) and kind.is_final
    },
    key=lambda kind: kind.__name__,
)
ELSEWHERE = {"AllGather", "AllReduce", "CopyToTensorParallel", "ReduceScatter"}
# Fake tensors of a GPU that torch was built without do not take all that these call.
WITHOUT_FAKES = {"PositionEmbedding", "QKNorm", "RotaryEmbedding"}
# Such a torch ends the process that asks which of its kernels of attention a GPU would take.
OF_ATTENTION = {"Attention", "CrossAttention"}
# What their channels carry has another shape than x; their own tests run them under autocast.
OF_CHANNELS = {"GroupedLinear", "Permute", "TokenScale", "Unpermute"}


@contextlib.contextmanager
def autocast(kind: str, dtype: torch.dtype) -> Generator[None]:
    """A region as `torch.autocast` opens it, which refuses to where there is no such device."""
    before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled(kind, True)
    torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, before[0])
        torch.set_autocast_dtype(kind, before[1])
        torch.set_autocast_cache_enabled(before[2])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", [kind for kind in OPERATIONS if kind.__name__ not in ELSEWHERE])
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_every_operation_says_what_autocast_makes_of_its_result(kind: type[sf.UnfusedOperation], device: str):
    integers, compared = kind.__name__ == "Embedding", 0
    example = kind.example(torch.zeros(3, 12, dtype=torch.int64 if integers else torch.float32))
    assert example.autocast is not None, f"{kind.__name__} does not say it"
    if kind.__name__ in OF_CHANNELS:
        return
    if device == "cuda" and kind.__name__ in OF_ATTENTION:
        assert example.autocast == "lower"
        return
    extras = [name for name in example.forward_signature.extras if name not in example.forward_signature.optional]
    for dtype in DTYPES:
        env = sf.Env(device, dtype=dtype, autocast=torch.bfloat16)
        with FakeTensorMode(), torch.no_grad(), autocast(device, torch.bfloat16):
            for module in example.modules():
                for name, p in module._parameters.items():
                    if p is not None:
                        module._parameters[name] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=device))
            x = torch.empty(3, 12, dtype=torch.int64 if integers else dtype, device=device)
            channels = {channel: dtype for channel in example.channels.values() if channel is not None}
            borders = under_autocast(flatten(example)[:1], range(1), env, channels)
            try:
                y = example.reference(x, **dict.fromkeys(extras, x))
            except RuntimeError as error:  # as torch itself does of float64 and a float32 weight, or for want of a GPU
                if dtype is not torch.float64 and "not linked with support for cuda" not in str(error):
                    raise
                continue
        compared += 1
        y = y[0] if example.outputs else y
        assert borders[-1].given is y.dtype, f"{dtype}: {borders[-1].given}, in torch {y.dtype}"
    assert compared >= 2 or (device == "cuda" and kind.__name__ in WITHOUT_FAKES)


def perceptron(norm: type[nn.Module], act: sf.UnfusedOperation) -> sf.Sequential:
    width = 16 if isinstance(act, sf.Gated) else 32
    blocks = [ops.Residual(norm(16), ops.Linear(16, 32), act, ops.Linear(width, 16)) for _ in range(2)]
    return sf.Sequential(*blocks, norm(16), act, ops.Linear(16 if width > 16 else 8, 4))


def forward_and_backward(model: Any, env: sf.Env, x: torch.Tensor, enabled: bool) -> tuple[Any, dict[Any, Any]]:
    """Run a plan for an accelerator; dtype and shape of y, of all that operations save, and of every gradient."""
    fuser = model._fuser
    op_list = fuser.op_list()
    (region,) = op_list.parts
    parameters = [getattr(owner, name) for owner, name in region.slots]
    with sf.fusing(enabled, on_error="raise"):
        plan = fuser.plan(env=env)
        stretch = Stretch.of(op_list.nodes, region.positions, x, {}, parameters, env)
        context = Context.of(stretch, region.slots, parameters, "raise", lambda: None)
        segments = lower(plan, context, op_list.configured)
    runs, channels, gradients = list[Any](), dict[str, Any](), dict[str, Any]()
    with torch.no_grad():
        for segment in segments:
            node, (x, *outputs) = run_alone(segment, None, x, *[channels[c] for c in segment.inputs])
            runs.append(node)
            channels.update(zip(segment.outputs, outputs, strict=True))
        found: dict[Any, Any] = {"y": x}
        dy: Any = torch.empty_like(x)
        for segment, node in zip(reversed(segments), reversed(runs), strict=True):
            indices = [region.slots.index(slot) for slot in segment.parameters]
            saves = segment.saves
            for field, t in zip((*saves.tensors, *saves.several), node.saved_tensors, strict=False):
                found |= {(saves.records[field.record][1].position, field.name): t} if t is not None else {}
            dy, *grads = back_alone(node, dy, *[gradients.get(c) for c in segment.outputs])
            gradients.update(zip(segment.inputs, grads, strict=False))
            found |= {
                region.slots[i]: g.to(parameters[i].dtype)
                for i, g in zip(indices, grads[len(segment.inputs) :], strict=True)
            }
    return plan, {key: (t.dtype, tuple(t.shape)) for key, t in found.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("norm", "act"),
    [
        (ops.LayerNorm, ops.GeLU()), (ops.LayerNorm, ops.ReLU()), (ops.LayerNorm, ops.SquaredReLU()),
        (ops.RMSNorm, ops.SwiGLU()), (ops.RMSNorm, sf.Gated(ops.SquaredReLU())),
    ],
    ids=lambda of: of.__name__ if isinstance(of, type) else type(getattr(of, "activation", of)).__name__,
)  # fmt: skip
def test_on_an_accelerator_all_that_is_saved_has_the_dtype_that_operations_give_it(
    norm: Any, act: Any, dtype: torch.dtype
):
    model = perceptron(norm, act)
    with FakeTensorMode(), autocast("cuda", torch.bfloat16):
        for module in model.modules():
            for name, p in module._parameters.items():
                module._parameters[name] = None if p is None else nn.Parameter(torch.empty(p.shape, device="cuda"))
        x = torch.empty(32, 16, device="cuda", dtype=dtype)
        env = sf.Env.of("cuda:sm_90", dtype=dtype, autocast=torch.bfloat16, rows=32)
        plan, fused = forward_and_backward(model, env, x, True)
        _, unfused = forward_and_backward(model, env, x, False)
    assert sum(bool(step.fused and step.operation.kernels) for step in (*plan.forward, *plan.backward)) >= 4
    alike = {key for key in fused if key in unfused}
    assert len(alike) >= 20
    assert {key: fused[key] for key in alike} == {key: unfused[key] for key in alike}


def test_autocast_leaves_float64_and_integers_as_they_are():
    env = sf.Env(autocast=torch.bfloat16)
    for dtype in (torch.float64, torch.int64, torch.bool):
        assert env.cast(dtype) is dtype
    assert env.cast(torch.float32) is env.cast(torch.float16) is torch.bfloat16


def test_a_fusion_gives_what_comes_next_takes_only_where_it_makes_the_cast():
    wide, narrow = torch.float32, torch.bfloat16
    borders = Border(wide, narrow), Border(narrow, narrow), Border(wide, narrow)
    assert along_of(borders, True) == (narrow, narrow, narrow)
    assert along_of(borders, False) == (narrow, narrow, wide)
    assert along_of((), False) == ()
