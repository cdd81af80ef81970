"""Attention in our kernels, each pass next to torch's other pass: the same saved tensors, whichever computed them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import ops
from seqfuse.ops import _attention
from seqfuse.testing import assert_bitwise_equal, seeded_randn
from tests.triton_fixtures import DEVICE

SEED = torch.tensor(0x1234_5678_9ABC, device=DEVICE)
HOW: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "dropout": {"causal": True, "dropout": 0.2},
    "window": {"window": 5},
    "soft-cap": {"softcap": 2.0, "scale": 0.3},
    "mask": {"mask": "m", "dropout": 0.1},
    "packed": {"cu_seqlens": "ends", "causal": True},
}


@pytest.fixture(autouse=True)
def _by_our_kernels(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_attention, "interpreting", True)


def packed(rows: tuple[int, ...], parts: int, size: int) -> Tensor:
    return seeded_randn((*rows, parts * size), 0).to(DEVICE)


def given(how: str, length: int) -> tuple[tuple[int, ...], dict[str, Tensor]]:
    if how == "packed":
        return (length,), {"cu_seqlens": torch.tensor([0, 7, 7, length], device=DEVICE)}
    if how == "mask":
        mask = seeded_randn((2, 1, length, length), 3).to(DEVICE)
        mask[0, 0, 2] = -torch.inf
        return (2, length), {"attn_mask": mask}
    return (2, length), {}


@pytest.mark.parametrize("how", HOW)
def test_one_pass_may_be_ours_and_the_other_torchs(how: str, monkeypatch: pytest.MonkeyPatch):
    lead, extras = given(how, 21)
    op, x = ops.Attention(4, 2, **HOW[how]), packed(lead, 8, 8)
    dy = seeded_randn((*lead, 32), 5).to(DEVICE)

    def both(*ours: bool) -> tuple[Tensor, Any]:
        monkeypatch.setattr(_attention, "interpreting", ours[0])
        y, saved = op.fwd(x, seed=SEED, **extras)
        monkeypatch.setattr(_attention, "interpreting", ours[1])
        return y, op.bwd(dy, saved, needs=frozenset({"x"}))[0]

    plain = both(False, False)
    for ways in itertools.product((False, True), repeat=2):
        torch.testing.assert_close(both(*ways), plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("how", HOW)
def test_nothing_runs_in_blocks(how: str, monkeypatch: pytest.MonkeyPatch):
    def refused(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr("seqfuse.ops._attention.attend_blocks", refused)
    monkeypatch.setattr("seqfuse.ops.attention.attend_blocks_backward", refused)
    lead, extras = given(how, 21)
    names = {"cu_seqlens": "ends", "attn_mask": "m"}
    x = packed(lead, 8, 8).requires_grad_()
    y = sf.Sequential(ops.Attention(4, 2, **HOW[how]))(x, **{names[name]: t for name, t in extras.items()})
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_the_gradient_of_a_mask_is_left_to_blocks(monkeypatch: pytest.MonkeyPatch):
    asked: list[bool] = []

    def blocks(dy: Tensor, qkv: Any, how: Any, out: Any, needs_mask: bool) -> Any:
        asked.append(needs_mask)
        return _attention.attend_blocks_backward(dy, qkv, how, out, needs_mask)

    monkeypatch.setattr("seqfuse.ops.attention.attend_blocks_backward", blocks)
    mask = seeded_randn((1, 9, 9), 3).to(DEVICE)
    x = packed((2, 9), 8, 8).requires_grad_()
    model = sf.Sequential(ops.Attention(4, 2, mask="m"))
    model(x, m=mask.requires_grad_()).sum().backward()
    assert asked == [True]
    wanted, x.grad = x.grad, None
    model(x, m=mask.detach()).sum().backward()
    assert asked == [True]
    torch.testing.assert_close(x.grad, wanted, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_what_the_kernels_do_not_take_is_done_in_torch(dtype: torch.dtype):
    how = _attention.Scores(1.0, softcap=2.0)
    for size in (64, 256, 257):
        ours = dtype is torch.bfloat16 and size <= 256
        assert how.kernel(torch.empty(1, 2, 4, size, dtype=dtype)) == ("triton" if ours else "blocks")


def test_the_kernel_follows_what_torch_has(monkeypatch: pytest.MonkeyPatch):
    """On a GPU: torch's own attention where torch supports all of it, FlashAttention for a window, our kernels
    otherwise."""
    taken = {torch.bfloat16: "cudnn", torch.float32: "efficient"}
    monkeypatch.setattr(_attention._sdpa, "has_flash", lambda device: True)
    monkeypatch.setattr(_attention._sdpa, "sdpa_backend", lambda q, k, causal: taken.get(q.dtype))

    class OnGPU:
        device = torch.device("cuda")
        shape = (2, 4, 64, 128)

        def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
            self.dtype = dtype

        def numel(self) -> int:
            return 1

        def is_floating_point(self) -> bool:
            return True

    q: Any = OnGPU()
    of, ends = _attention.Scores, torch.tensor([0, 64])
    for how in (of(1.0), of(1.0, causal=True), of(1.0, window=64)):
        assert how.kernel(q) == "cudnn"
    for how in (of(1.0, window=8), of(1.0, cu_seqlens=ends)):
        assert how.kernel(q) == "flash"
        assert how.kernel(OnGPU(torch.float32)) == "triton"
    for how in (of(1.0, softcap=2.0), of(1.0, p=0.1, seed=SEED), of(1.0, mask=torch.ones(1, 1, 64, 64))):
        assert how.kernel(q) == "triton"
    assert of(1.0).kernel(OnGPU(torch.float32)) == "efficient"
    assert of(1.0).kernel(OnGPU(torch.float16)) == "triton"
    assert of(1.0).kernel(OnGPU(torch.float64)) == "blocks"
    longer: Any = OnGPU()
    longer.shape = (2, 4, 128, 128)
    assert of(1.0, causal=True).kernel(q, longer) == "flash", "the last rows of what a cache holds"


def test_a_list_in_bfloat16_gives_the_same_bits_each_time():
    model = sf.Sequential(ops.Linear(16, 64), ops.Attention(4, 2, causal=True, dropout=0.1), ops.Linear(32, 16))
    model.to(DEVICE, torch.bfloat16)
    x = seeded_randn((2, 24, 16), 1, dtype=torch.bfloat16).to(DEVICE)
    found: list[list[Tensor]] = []
    for _ in range(2):
        torch.manual_seed(0)
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        found.append([y.detach(), *torch.autograd.grad(y.sum(), [leaf, *model.parameters()])])
    assert_bitwise_equal(*found)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("size", [64, 80, 128, 256])
def test_on_a_gpu_it_is_plain_torch(how: str, dtype: torch.dtype, size: int, request: pytest.FixtureRequest):
    """Sequences of several blocks, against float32 blocks; each tile that a launch can choose."""
    # Otherwise FlashAttention draws the mask of 16 bits.
    torch.use_deterministic_algorithms(True, warn_only=True)
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    lead, extras = given(how, 700)
    op, device = ops.Attention(4, 2, **HOW[how]), torch.device("cuda")
    x = packed(lead, 8, size).to(device, dtype)
    extras = {name: t.to(device) for name, t in extras.items()}
    dy = seeded_randn((*lead, 4 * size), 5).to(device, dtype)
    y, saved = op.fwd(x, seed=SEED.to(device), **extras)
    dx, _ = op.bwd(dy, saved, needs=frozenset({"x"}))
    wide, kept = op.fwd(x.double(), seed=SEED.to(device), **extras)
    dwide, _ = op.bwd(dy.double(), kept, needs=frozenset({"x"}))
    assert dx is not None
    assert dwide is not None
    rough = 2e-2 if dtype is torch.bfloat16 else 3e-3 if dtype is torch.float16 else 2e-5
    for found, exact in ((y, wide), (dx, dwide)):
        assert (found.double() - exact).norm() < rough * exact.norm()


@pytest.mark.parametrize("how", ["soft-cap", "mask"])
def test_of_keys_elsewhere_one_pass_may_be_ours_and_the_other_torchs(how: str, monkeypatch: pytest.MonkeyPatch):
    op = ops.CrossAttention(4, 2, **HOW[how])
    sizes = ((5, 4), (21, 2), (21, 2), (5, 4))
    x, k, v, dy = (seeded_randn((2, rows, n * 8), i).to(DEVICE) for i, (rows, n) in enumerate(sizes))
    extras = {"attn_mask": seeded_randn((2, 1, 5, 21), 3).to(DEVICE)} if how == "mask" else {}

    def both(*ours: bool) -> tuple[Tensor, Any]:
        monkeypatch.setattr(_attention, "interpreting", ours[0])
        y, saved = op.fwd(x, k=k, v=v, seed=SEED, **extras)
        monkeypatch.setattr(_attention, "interpreting", ours[1])
        return y, op.bwd(dy, saved, needs=frozenset({"x", "k", "v"}))

    plain = both(False, False)
    for ways in itertools.product((False, True), repeat=2):
        torch.testing.assert_close(both(*ways), plain, rtol=1e-5, atol=1e-5)
