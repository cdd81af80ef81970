"""Dropout, and DropPath by the mask of Dropout."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import seqfuse as sf
from seqfuse import ops
from seqfuse.ops import _philox
from seqfuse.ops._philox import _traceable_mask, drop_mask, drop_spans, philox4x32, round_keys
from seqfuse.testing import LAYOUTS, Untouched, assert_bitwise_equal, check_op, laid_out, seeded_randn
from tests.processes import Script

from .passes import check_passes

# Test vectors of Random123 for philox4x32-10: counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]  # fmt: skip


def seed_of(low: int, high: int) -> torch.Tensor:
    value = low | high << 32
    return torch.tensor(value - 2**64 if value >= 2**63 else value)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN, ids=["zeros", "ones", "pi"])
def test_philox_gives_the_known_words(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]):
    even, odd = (torch.tensor([[counter[i]], [counter[i + 2]]]) for i in (0, 1))
    even, odd = philox4x32(even, odd, round_keys(seed_of(*key)))
    assert (*even.flatten().tolist(), *odd.flatten().tolist()) == (words[0], words[2], words[1], words[3])


def test_the_mask_takes_word_i_and_3_of_counter_i_over_4():
    seed = seed_of(0xA4093822, 0x299F31D0)
    even, odd = (torch.zeros((2, 6), dtype=torch.int64) for _ in range(2))
    even[0] = torch.arange(6)
    even, odd = philox4x32(even, odd, round_keys(seed))
    words = torch.stack((even[0], odd[0], even[1], odd[1]), 1).flatten()
    for p in (0.1, 0.5, 0.73):
        assert torch.equal(drop_mask(seed, torch.Size((7, 3)), p).flatten(), words[:21] < math.floor(p * 2**32))


@pytest.mark.parametrize("shape", [(), (3,), (7, 3), (0, 5)], ids=str)
def test_the_mask_under_a_compiler_or_transform_is_the_same(shape: tuple[int, ...]):
    seed, p = seed_of(0xA4093822, 0x299F31D0), 0.37
    expected = drop_mask(seed, torch.Size(shape), p)
    assert torch.equal(_traceable_mask(seed, torch.Size(shape), p), expected)
    x = torch.ones(shape)
    dropped = torch.func.vmap(lambda t: drop_mask(t, x.shape, p))(seed.expand(2))
    assert torch.equal(dropped, expected.expand(2, *shape))


def test_the_mask_of_a_large_tensor_begins_with_that_of_a_small_one():
    large = drop_mask(torch.tensor(11), torch.Size((40_009 * 7,)), 0.3)
    assert torch.equal(large, _traceable_mask(torch.tensor(11), large.shape, 0.3))  # which is allocated in one piece
    small = drop_mask(torch.tensor(11), torch.Size((1001,)), 0.3)
    assert torch.equal(large[:1001], small)
    tail = drop_mask(torch.tensor(11), torch.Size((40_009 * 7 - 3,)), 0.3)
    assert torch.equal(large[:-3], tail)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("mode", ["upscale_in_train", "downscale_in_infer"])
def test_it_says_that_it_is_a_view_where_it_gives_x_itself(mode: Any, p: float, training: bool):
    x, dropout = torch.ones(5), ops.Dropout(p, mode).train(training)
    assert dropout.is_view == (dropout.reference(x, seed=torch.tensor(3)) is x)


TRITON = """
import json, torch, triton, triton.language as tl

@triton.jit
def kernel(out, seed, first, n: tl.constexpr):
    i = tl.arange(0, n)
    a, b, c, d = tl.randint4x(seed, first + i)
    tl.store(out + 4 * i, a.to(tl.uint32).to(tl.int64))
    tl.store(out + 4 * i + 1, b.to(tl.uint32).to(tl.int64))
    tl.store(out + 4 * i + 2, c.to(tl.uint32).to(tl.int64))
    tl.store(out + 4 * i + 3, d.to(tl.uint32).to(tl.int64))

found = []
for seed in (0, 0x1234567890ABCDEF, 0xFEDCBA98):
    out = torch.empty(64, dtype=torch.int64)
    kernel[(1,)](out, seed, 0, 16)
    found.append((seed, out.tolist()))
print(json.dumps(found))
"""


def test_words_are_those_of_triton(tmp_path: Path):
    pytest.importorskip("triton")
    script = tmp_path / "words.py"  # a kernel is compiled from its source file
    script.write_text(TRITON)
    done = Script(str(script), environment={**os.environ, "TRITON_INTERPRET": "1"}, bare=True).done()
    assert done.returncode == 0, done.stderr
    for seed, words in json.loads(done.stdout):
        for p in (0.25, 0.5, 0.9):
            expected = [word < math.floor(p * 2**32) for word in words]
            assert drop_mask(torch.tensor(seed), torch.Size((64,)), p).tolist() == expected


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9, 1 / 3])
def test_drops_the_fraction_it_was_asked_for(p: float):
    n = 200_000
    y, _ = ops.Dropout(p).fwd(torch.ones(n), seed=torch.tensor(17))
    kept = int((y != 0).sum())
    assert abs(kept / n - (1 - p)) < 4 * math.sqrt(p * (1 - p) / n)
    assert_bitwise_equal(y[y != 0], (torch.ones(n) * (1 / (1 - p)))[:kept])


def test_neighbors_and_seeds_are_independent():
    n = 200_000
    masks = [drop_mask(torch.tensor(seed), torch.Size((n,)), 0.5).double() - 0.5 for seed in (0, 1, 2**32)]
    pairs = [(masks[0][1:], masks[0][:-1]), (masks[0][4:], masks[0][:-4]), (masks[0], masks[1]), (masks[0], masks[2])]
    for a, b in pairs:
        assert abs(float((a * b).mean())) < 4 * 0.25 / math.sqrt(n)


def test_nothing_is_dropped_at_zero_and_everything_at_one():
    x = torch.tensor([1.0, -math.inf, math.nan, 3.0])
    none, all_ = ops.Dropout(0.0), ops.Dropout(1.0)
    assert not none.random
    assert all_.random
    y, saved = none.fwd(x)
    assert y is x
    assert none.bwd(x, saved)[0] is x
    y, saved = all_.fwd(x, seed=torch.tensor(3))
    torch.testing.assert_close([y, all_.bwd(x, saved)[0]], [x * 0, x * 0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("p", [0.5, 1.0])
def test_what_is_dropped_is_multiplied_by_zero_as_by_torch(p: float, dtype: torch.dtype):
    numbers = (1.0, -1.0, 0.0, -0.0, math.inf, -math.inf, math.nan, torch.finfo(dtype).max, torch.finfo(dtype).min)
    x, op, seed = torch.tensor(numbers, dtype=dtype).repeat(40, 1), ops.Dropout(p), torch.tensor(3)
    keep = ~drop_mask(seed, x.shape, p)
    expected = torch.ops.aten.native_dropout_backward(x, keep, 2.0 if p < 1 else 0.0)
    y, saved = op.fwd(x, seed=seed)
    leaf = x.clone().requires_grad_()
    op.reference(leaf, seed=seed).backward(x.where(x.abs() < 2, 1.0))
    for mine in (y, op.bwd(x, saved)[0], op.reference(x, seed=seed)):
        torch.testing.assert_close(mine, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(mine.signbit() | mine.isnan(), expected.signbit() | expected.isnan())
    assert leaf.grad is not None
    expected = torch.ops.aten.native_dropout_backward(x.where(x.abs() < 2, 1.0), keep, 2.0 if p < 1 else 0.0)
    torch.testing.assert_close(leaf.grad, expected, rtol=0, atol=0)


def test_no_element_of_a_tensor_that_is_not_finite_becomes_finite():
    torch.manual_seed(0)
    x = torch.full((64, 8), math.inf, requires_grad=True)
    model = sf.Sequential(ops.Dropout(0.5))
    y = model(x)
    y.backward(torch.full_like(y, -math.inf))
    assert x.grad is not None
    assert not y.isfinite().any()
    assert not x.grad.isfinite().any()
    assert 0 < int(y.isnan().sum()) < y.numel()


@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
def test_scales_where_its_mode_says(p: float):
    x, seed = seeded_randn((33, 5), 0), torch.tensor(9)
    keep = ~drop_mask(seed, x.shape, p)
    up, down = ops.Dropout(p), ops.Dropout(p, mode="downscale_in_infer")
    trained = {"up": up.fwd(x, seed=seed)[0], "down": down.fwd(x, seed=seed)[0]}
    kept = x * keep
    assert_bitwise_equal(trained, {"up": kept * (1 / (1 - p)) if p < 1 else kept, "down": kept})
    up.eval(), down.eval()
    assert not up.random
    assert not down.random
    evaluated = {"up": up.fwd(x)[0], "down": down.fwd(x)[0]}
    assert_bitwise_equal(evaluated, {"up": x, "down": x * (1 - p)})


@pytest.mark.parametrize("mode", ["upscale_in_train", "downscale_in_infer"])
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("training", [True, False])
def test_agrees_in_every_mode(training: bool, p: float, mode: str):
    check_passes(ops.Dropout(p, mode).train(training), seeded_randn((9, 7), 0))


def test_backward_uses_what_the_forward_used():
    op, x, seed = ops.Dropout(0.3), seeded_randn((9, 7), 0), torch.tensor(4)
    _, saved = op.fwd(x, seed=seed)
    expected = op.bwd(x, saved)[0]
    op.p = 0.9
    assert_bitwise_equal(op.eval().bwd(x, saved)[0], expected)
    op = ops.Dropout(0.3, "downscale_in_infer").eval()
    _, saved = op.fwd(x)
    assert_bitwise_equal(op.train().bwd(x, saved)[0], x * 0.7)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_mask_does_not_depend_on_the_layout(layout: str):
    x = laid_out(seeded_randn((5, 3, 6), 0), layout)
    op, seed = ops.Dropout(0.4), torch.tensor(21)
    with Untouched(x):
        y, _ = op.fwd(x, seed=seed)
    assert_bitwise_equal(y, op.fwd(x.contiguous(), seed=seed)[0])


def test_takes_a_seed_of_shape_one_and_of_any_sign():
    x = torch.ones(100)
    for value in (-1, -(2**63), 2**63 - 1):
        y, _ = ops.Dropout(0.5).fwd(x, seed=torch.tensor(value))
        assert_bitwise_equal(y, ops.Dropout(0.5).fwd(x, seed=torch.tensor([value]))[0])
        assert 20 < int((y == 0).sum()) < 80


def test_saves_the_seed_and_no_mask():
    seed = torch.tensor(5)
    _, saved = ops.Dropout(0.5).fwd(torch.ones(4, 4), seed=seed)
    assert saved.fields == ("seed", "p")
    assert saved.seed is seed


def test_never_reads_the_seed_on_the_host():
    x, seed = torch.empty(8, 3, device="meta"), torch.empty((), dtype=torch.int64, device="meta")
    op = ops.Dropout(0.5)
    y, saved = op.fwd(x, seed=seed)
    assert y.shape == op.bwd(y, saved)[0].shape == (8, 3)


@pytest.mark.parametrize("in_c", [True, False])
def test_spans_are_parts_of_the_whole_mask(in_c: bool, monkeypatch: pytest.MonkeyPatch):
    if not in_c:
        monkeypatch.setattr(_philox, "runs_in_c", lambda seed: False)
    seed, starts = torch.tensor(3**39), torch.arange(8)
    mask = drop_mask(seed, torch.Size((32,)), 0.5)
    for length in range(1, 10):
        assert torch.equal(drop_spans(seed, starts, length, 0.5), mask.unfold(0, length, 1)[:8])


@pytest.mark.parametrize("op", ops.DropPath.examples(torch.empty(0)), ids=str)
def test_keeps_its_contract(op: ops.DropPath):
    check_op(op, seeded_randn((5, 3, 4), 0))


@pytest.mark.parametrize("scale", [True, False])
def test_drops_samples_as_dropout_drops_elements(scale: bool):
    x, seed = seeded_randn((64, 3, 4), 0), torch.tensor(5)
    y, saved = ops.DropPath(0.25, scale).fwd(x, seed=seed)
    drop = drop_mask(seed, (64,), 0.25)
    assert 4 < int(drop.sum()) < 30
    assert not y[drop].any()
    torch.testing.assert_close(y[~drop], x[~drop] / (0.75 if scale else 1))
    assert_bitwise_equal(ops.DropPath(0.25, scale).bwd(x, saved)[0], y)


def test_keeps_the_mean():
    torch.manual_seed(0)
    y = ops.DropPath(0.3)(torch.ones(20_000, 2))
    assert abs(float(y.mean()) - 1) < 0.02
    assert set(y.unique().tolist()) == {0.0, float(torch.tensor(1 / 0.7))}


def test_evaluation_and_none_change_nothing():
    x = seeded_randn((5, 6), 0)
    for op in (ops.DropPath(0.5).eval(), ops.DropPath(0.0)):
        assert_bitwise_equal(op(x), x)
    assert not ops.DropPath(1.0)(x).any()


@pytest.mark.parametrize("p", [0.5, 1.0])
@pytest.mark.parametrize("scale", [True, False])
def test_what_is_dropped_is_multiplied_by_zero(scale: bool, p: float):
    x = torch.tensor([1.0, -1.0, -0.0, torch.inf, -torch.inf, torch.nan, 3e38]).repeat(40, 1)
    factor = (~drop_mask(torch.tensor(5), x.shape[:1], p)).float().mul_(2 if scale and p < 1 else 1).unsqueeze(1)
    op = ops.DropPath(p, scale)
    y, saved = op.fwd(x, seed=torch.tensor(5))
    for mine in (y, op.bwd(x, saved)[0], op.reference(x, seed=torch.tensor(5))):
        torch.testing.assert_close(mine, x * factor, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(mine.signbit() | mine.isnan(), (x * factor).signbit() | x.isnan() | (x * factor).isnan())


def test_a_residual_with_it_is_the_shortcut_for_dropped_samples():
    torch.manual_seed(1)
    model, x = sf.Sequential(ops.Residual(ops.Linear(6, 6), ops.DropPath(0.5))), seeded_randn((32, 6), 0)
    same = (model(x) == x).all(1)
    assert 4 < int(same.sum()) < 28
