"""Every public function that launches a kernel is a registered operator under a tracer."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import seqfuse as sf
from seqfuse import kernels, ops
from seqfuse.kernels import _launch, _operators, pointwise, rope
from seqfuse.kernels.activations import ACTIVATIONS
from seqfuse.kernels.attention import attention_fwd
from seqfuse.kernels.permute import Pairs
from seqfuse.kernels.quantize import As
from seqfuse.testing import assert_bitwise_equal, seeded_randn

from .checked import Checked
from .conftest import DEVICE

GELU = ACTIVATIONS["gelu"]
ALONG = As("1x32", torch.float8_e4m3fn, along_rows=True)
TURN = rope.Rotation("half", 4)


class Call(NamedTuple):
    """The operator of an entry, how it is called on named tensors, and these, or the shapes to draw them."""

    operator: str
    run: Callable[..., Any]
    tensors: dict[str, Tensor | tuple[int, ...]]


LENGTHS = torch.tensor([3, 1], device=DEVICE)
LOGITS = {"x": (5, 6), "targets": torch.tensor([2, 0, 5, 1, 1], device=DEVICE)}
PACKED = {"x": (2, 3, 24), "dy": (2, 3, 24)}
ROW = {"x": (2, 24), "k": (2, 1, 5, 6), "v": (2, 1, 5, 6), "lengths": LENGTHS}
QKV = {"q": (1, 2, 5, 8), "k": (1, 1, 5, 8), "v": (1, 1, 5, 8)}
KEPT = {"dy": (1, 5, 2, 8), "y": (1, 5, 2, 8), "lse": (1, 2, 5)}
OUT = {"dq": (1, 2, 5, 8), "dk": (1, 1, 5, 8), "dv": (1, 1, 5, 8)}
CACHES = {"k": (2, 1, 5, 8), "v": (2, 1, 5, 8), "lengths": LENGTHS}
ROWS = {"x": (5, 6), "dy": (5, 6), "w": (6,), "b": (6,)}
STATS = {"mean": (5,), "rstd": (5,)}
F32 = torch.float32
GROUPS = {"x": (7, 6), "dy": (7, 5), "w": (2, 5, 6), "b": (2, 5), "ends": torch.tensor([2, 5], device=DEVICE)}
PAIRS = {
    "x": (6, 5), "p": (3, 2), "rows": torch.tensor([[4, 1], [0, 5], [3, 2]], device=DEVICE),
    "ends": torch.tensor([2, 5], device=DEVICE),
}  # fmt: skip
ROUTER = {"x": (3, 6), "at": torch.tensor([[4, 1], [0, 5], [3, 2]], device=DEVICE)}

CALLS: dict[str, Call] = {
    "attention.attention_fwd": Call("attention", lambda f, q, k, v: f(q, k, v, causal=True), QKV),
    "attention.attention_bwd": Call(
        "attention_backward",
        lambda f, q, k, v, dy, y, lse, dq, dk, dv: f(dy, q, k, v, y, lse, (dq, dk, dv)),
        QKV | KEPT | OUT,
    ),
    "crossentropy.cross_entropy_": Call("cross_entropy", lambda f, x, targets: f(x, targets), LOGITS),
    "crossentropy.cross_entropy_ again": Call(
        "cross_entropy",
        lambda f, x, targets, softmax: f(x, targets, softmax=softmax),
        LOGITS | {"softmax": (2, 5)},
    ),
    "decode.decode_attention": Call(
        "decode_attention", lambda f, q, k, v, lengths: f(q, k, v, lengths), {"q": (2, 2, 8), **CACHES}
    ),
    "grouped.finish_rows_": Call("finish_rows", lambda f, x, dy, w, b, ends: f(dy, ends, b), GROUPS),
    "grouped.group_sums": Call("group_sums", lambda f, x, dy, w, b, ends: f(dy, ends), GROUPS),
    "grouped.grouped_gemm": Call("grouped_gemm", lambda f, x, dy, w, b, ends: f(x, w, ends, b), GROUPS),
    "grouped.grouped_outer": Call("grouped_outer", lambda f, x, dy, w, b, ends: f(dy, x, ends), GROUPS),
    "norm.norm_fwd": Call("norm", lambda f, x, dy, w, b: f(x, w, b, 1e-5, residual=dy), ROWS),
    "norm.norm_fwd of RMSNorm": Call(
        "norm", lambda f, x, dy, w, b: f(x, w, None, 1e-5, centered=False, pre_bias=b), ROWS
    ),
    "norm.norm_bwd": Call(
        "norm_backward",
        lambda f, x, dy, w, b, mean, rstd: f(dy, x, mean, rstd, w, b, dweight=F32, dbias=F32),
        ROWS | STATS,
    ),
    "norm.norm_fwd of rows of experts": Call(
        "norm",
        lambda f, x, p, rows, ends, h: f(x.view(3, 2, 5), None, None, 1e-5, residual=h, pairs=Pairs(rows, ends, p)),
        PAIRS | {"h": (3, 5)},
    ),
    "norm.norm_bwd of rows of experts": Call(
        "norm_backward",
        lambda f, x, p, rows, ends, h, mean, rstd: f(
            h, h, mean, rstd, None, pairs=Pairs(rows, ends, p), other=x.view(3, 2, 5), dpairs=True, dfactors=F32
        ),
        PAIRS | {"h": (3, 5), "mean": (3,), "rstd": (3,)},
    ),
    "norm.norm_bwd of RMSNorm": Call(
        "norm_backward", lambda f, x, dy, w, b, mean, rstd: f(dy, x, None, rstd, w, dweight=F32), ROWS | STATS
    ),
    "norm.norm_codes": Call(
        "norm_codes",
        lambda f, x, w: f(x.bfloat16(), w, None, 1e-5, ALONG, centered=False, residual=x.bfloat16()),
        {"x": (5, 16), "w": (16,)},
    ),
    "norm.norm_codes_backward": Call(
        "norm_backward_codes",
        lambda f, x, w, rstd: f(x.bfloat16(), x.bfloat16(), None, rstd, w, ALONG, dweight=F32),
        {"x": (5, 16), "w": (16,), "rstd": (5,)},
    ),
    "permute.gather_rows": Call("gather_rows", lambda f, x, p, rows, ends: f(x, rows, ends, factors=p), PAIRS),
    "permute.spread_rows": Call(
        "spread_rows",
        lambda f, x, p, rows, ends: f(x[:3], rows, ends, factors=p, other=x, sums=F32),
        PAIRS,
    ),
    "pointwise.pointwise": Call(
        "pointwise",
        lambda f, x, dy, w, b: f(x, pointwise.Chain(pointwise.bias(), pointwise.act(GELU), pointwise.add()), (b, dy)),
        ROWS,
    ),
    "pointwise.pointwise_codes": Call(
        "pointwise",
        lambda f, x: f(
            x.bfloat16(), pointwise.Chain(pointwise.act(GELU)), (), As("1x32", torch.float8_e4m3fn, False, True)
        )[0],
        {"x": (5, 16)},
    ),
    "quantize.quantize_matrix": Call("quantize", lambda f, x: f(x, torch.float8_e4m3fn, "row"), {"x": (5, 16)}),
    "quantize.quantize_several": Call(
        "quantize_several", lambda f, x: f(x, [x[:3]], torch.float8_e4m3fn, "1x32"), {"x": (5, 16)}
    ),
    "rope.rope_codes_backward": Call(
        "rope_backward_codes",
        lambda f, x: f(x.bfloat16(), 1, 1, rope.Rotation("half", 32), ALONG, dbias=F32),
        {"x": (2, 3, 96)},
    ),
    "route.route_factors": Call("route_factors", lambda f, x, at: f(x, at), ROUTER),
    "route.route_gradients": Call("route_gradients", lambda f, x, at, d: f(d, x, at), ROUTER | {"d": (3, 2)}),
    "rope.rope_fwd": Call("rope", lambda f, x, dy: f(x, 2, 1, TURN), PACKED),
    "rope.rope_bwd": Call("rope_backward", lambda f, x, dy: f(dy, 2, 1, TURN, dbias=F32), PACKED),
    "rope.rope_write": Call("rope_write", lambda f, x, k, v, lengths: f(x, 2, 1, TURN, k, v, lengths), ROW),
}


def entries() -> Iterator[str]:
    """Public functions of public modules from which a launch is reached."""
    for last in (one.name for one in pkgutil.iter_modules(kernels.__path__) if not one.name.startswith("_")):
        module = importlib.import_module(f"{kernels.__name__}.{last}")
        for key, function in vars(module).items():
            own = isinstance(function, FunctionType) and function.__module__ == module.__name__
            made = key.endswith("_of")  # returns a function that calls an entry
            if own and not made and not key.startswith("_") and launches(function, set()):
                yield f"{last}.{key}"


def launches(function: FunctionType, seen: set[FunctionType]) -> bool:
    if function is _launch.launch:
        return True
    seen.add(function)
    called = [function.__globals__.get(name) for name in names(function.__code__)]
    called.append(getattr(function, "__wrapped__", None))
    own = [f for f in called if isinstance(f, FunctionType) and f.__module__.startswith(kernels.__name__)]
    return any(launches(f, seen) for f in own if f not in seen)


def names(code: CodeType) -> list[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return [*code.co_names, *(name for one in inner for name in names(one))]


def tensors_in(results: Any) -> list[Tensor]:
    return [t for t in tree_leaves(results) if t is not None]


def test_every_entry_is_here() -> None:
    assert set(entries()) == {name.partition(" ")[0] for name in CALLS}


def test_every_operator_is_that_of_an_entry() -> None:
    for one in pkgutil.iter_modules(kernels.__path__):
        if not one.name.startswith("_"):
            importlib.import_module(f"{kernels.__name__}.{one.name}")
    registered = _operators._registered  # those of `seqfuse.ops` have no kernel
    assert registered == {c.operator for c in CALLS.values()}
    assert {f"seqfuse::{name}" for name in registered} <= {*torch._C._dispatch_get_all_op_names()}


def test_an_operator_gives_shapes_on_meta() -> None:
    q, k = torch.empty(1, 2, 5, 8, device="meta"), torch.empty(1, 1, 5, 8, device="meta")
    y, lse = torch.ops.seqfuse.attention(q, k, k, causal=True)
    assert (y.device.type, y.shape, lse.shape) == ("meta", (1, 5, 2, 8), (1, 2, 5))


@pytest.mark.parametrize("name", CALLS)
def test_an_entry_that_is_recorded_calls_its_operator(name: str) -> None:
    """It passes torch's checks. Recorded on fake tensors and run on real ones, it returns and writes the function's
    bits."""
    module, function = name.partition(" ")[0].split(".")
    entry = getattr(importlib.import_module(f"seqfuse.kernels.{module}"), function)
    operator, run, given = CALLS[name]

    def call(tensors: dict[str, Tensor]) -> Any:
        return run(entry, **tensors)

    def drawn(seed: int) -> dict[str, Tensor]:
        return {
            key: seeded_randn(t, seed + i).to(DEVICE) if isinstance(t, tuple) else t.clone()
            for i, (key, t) in enumerate(given.items())
        }

    with Checked() as checked:
        call(drawn(0))
    assert checked.names == {operator}
    graph = make_fx(call, tracing_mode="fake")(drawn(20))
    assert re.findall(r"torch\.ops\.seqfuse\.(\w+)\.default\(", graph.code) == [operator]
    recorded, eager = drawn(0), drawn(0)
    assert_bitwise_equal(tensors_in(graph(recorded)), tensors_in(call(eager)))
    assert_bitwise_equal(recorded, eager)


def flops(function: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", [name for name in CALLS if name.startswith(("attention", "decode.d"))])
def test_flops_of_an_operator_are_counted(name: str) -> None:
    module, function = name.partition(" ")[0].split(".")
    entry = getattr(importlib.import_module(f"seqfuse.kernels.{module}"), function)
    _, run, given = CALLS[name]
    tensors = {key: torch.randn(t, device=DEVICE) if isinstance(t, tuple) else t.clone() for key, t in given.items()}
    scores = 2 * 2 * 5 * 5 * 8  # of one GEMM of attention
    expected = {"attention_fwd": 2 * scores, "attention_bwd": 5 * scores, "decode_attention": 2 * 2 * 2 * 2 * 5 * 8}
    assert flops(lambda: run(entry, **tensors)) == expected[function]


@pytest.mark.parametrize("fake", [False, True])
def test_flops_of_packed_sequences_are_those_of_each(fake: bool) -> None:
    with FakeTensorMode() if fake else nullcontext():
        ends = torch.tensor([0, 3, 6], device=DEVICE)
        q, k, v = (torch.randn(1, 2, 6, 8, device=DEVICE) for _ in range(3))
        assert flops(lambda: attention_fwd(q, k, v, cu_seqlens=ends)) == 2 * 2 * 2 * (3 * 3 + 3 * 3) * 8


@pytest.mark.parametrize("act", [ops.GeLU, ops.SwiGLU])
def test_flops_are_those_of_the_unfused_operations(act: Callable[[], sf.UnfusedOperation]) -> None:
    width = 32 // (2 if act is ops.SwiGLU else 1)
    model = sf.Sequential(ops.Linear(16, 32), act(), ops.Linear(width, 16)).to(DEVICE)
    x = torch.randn(5, 16, device=DEVICE, requires_grad=True)

    def step() -> None:
        model(x).sum().backward()

    with sf.fusing(unmeasured=True):
        fused = flops(step)
    with sf.fusing(False):
        assert flops(step) == fused == 3 * 2 * 5 * 16 * (32 + width)
