"""Dropout by itself is one kernel per direction, with torch's mask of the same seed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import ops
from seqfuse.kernels import pointwise
from seqfuse.ops import _philox
from seqfuse.testing import LAYOUTS, assert_bitwise_equal, laid_out, seeded_randn
from tests.watching import Calls, name_of


@pytest.fixture(autouse=True)
def _by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_philox, "interpreting", True)
    monkeypatch.setattr(_philox, "_failures", [])


@contextlib.contextmanager
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """Operators of torch that compute, and launches of kernels, which are not run."""
    views = "empty", "view", "detach", "select"
    with (
        Calls(lambda func, *_: None if name_of(func) in views else name_of(func)) as ran,
        monkeypatch.context() as patch,
    ):
        patch.setattr(pointwise, "launch", lambda *_: ran.names.append("kernel"))
        yield ran


def both(op: ops.Dropout, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    y, saved = op.fwd(x, seed=torch.tensor(-5, device=x.device))
    return {"y": y, "dx": op.bwd(dy, saved)[0]}


@pytest.mark.parametrize("shape", [(), (7,), (2, 5, 8), (0, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_gives_the_bits_of_torch(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, dy = (seeded_randn(shape, i, dtype=dtype).to(device) for i in (0, 1))
    if x.numel() > 4:
        x.view(-1)[:4] = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
        x.view(-1)[4:8], dy.view(-1)[-8:] = -1.0, math.inf
    for op in (ops.Dropout(0.3), ops.Dropout(0.6, "downscale_in_infer"), ops.Dropout(1.0)):
        found = both(op, x, dy)
        with monkeypatch.context() as patch:
            patch.setattr(_philox, "_failures", ["torch does it"])
            expected = both(op, x, dy)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        for name, t in expected.items():
            assert torch.equal(found[name].signbit() | t.isnan(), t.signbit() | t.isnan())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_mask_does_not_depend_on_the_layout(layout: str, device: torch.device) -> None:
    op, x = ops.Dropout(0.4), laid_out(seeded_randn((5, 3, 6), 0).to(device), layout)
    assert_bitwise_equal(both(op, x, x), both(op, x.contiguous(), x.contiguous()))


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["plain", "autocast"])
def test_each_pass_is_one_launch_and_nothing_else(
    autocast: torch.dtype | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sf.Sequential(ops.Dropout(0.3)).to(device)
    x = seeded_randn((6, 8), 0).to(device).requires_grad_()
    with sf.fusing(False), torch.autocast(device.type, autocast, enabled=autocast is not None):
        y = model(x)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert torch.equal(dx == 0, y == 0)
        assert 0 < int((y == 0).sum()) < y.numel()
        seeds = torch.zeros(1, dtype=torch.int64, device=device)
        monkeypatch.setattr("seqfuse.run.fuser.draw", lambda *_: seeds)
        with running(monkeypatch) as ahead:
            y = model(x)
        dy = torch.ones_like(y)
        with running(monkeypatch) as back:
            y.backward(dy)
    one = ["pointwise", "kernel"]  # the operator, which modes see, and its launch
    assert ahead.names == one
    assert [name for name in back.names if name != "new_empty_strided"] == one


def test_a_kernel_that_cannot_run_leaves_it_to_torch_and_says_so(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    op, x = ops.Dropout(0.5), seeded_randn((4, 8), 0).to(device)
    expected = both(op, x, x)

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(pointwise, "launch", fails)
    with pytest.warns(sf.FallbackWarning, match="C compiler") as said:
        assert_bitwise_equal(both(op, x, x), expected)
    assert len(said) == 1


def test_a_kernel_that_is_not_compiled_before_a_capture_is_an_error_and_runs_afterwards(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first(*_: Any) -> None:
        raise RuntimeError("launched for the first time while a CUDA graph is captured")

    op, x = ops.Dropout(0.5), seeded_randn((4, 8), 0).to(device)
    with monkeypatch.context() as patch:
        patch.setattr(pointwise, "launch", first)
        patch.setattr(Tensor, "is_cuda", True, raising=False)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RuntimeError, match="for the first time while a CUDA graph is captured"):
            both(op, x, x)
    with running(monkeypatch) as ran:
        both(op, x, x)
    assert ran.names.count("kernel") == 2


def test_transforms_and_references_keep_their_graph(device: torch.device) -> None:
    op, x, seed = ops.Dropout(0.5), seeded_randn((4, 8), 0).to(device), torch.tensor(3, device=device)
    expected = op.bwd(torch.ones_like(x), op.Saved(seed=seed, p=0.5))[0]
    leaf = x.clone().requires_grad_()
    op.reference(leaf, seed=seed).sum().backward()
    assert leaf.grad is not None
    assert_bitwise_equal(leaf.grad, expected)
    batch = torch.func.vmap(lambda t: op.bwd(t, op.Saved(seed=seed, p=0.5))[0])(torch.ones((2, 4, 8), device=device))
    assert_bitwise_equal(batch, expected.expand(2, 4, 8).contiguous())
