"""GroupedLinear against a loop over groups in float64, with empty groups and rows without a group."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import seqfuse as sf
from seqfuse import ops
from seqfuse.ops import _grouped
from seqfuse.testing import assert_bitwise_equal, check_op, seeded_randn
from seqfuse.testing.judge import judge

ENDS = {
    "all": (4, 9, 20), "empty first": (0, 9, 20), "empty last": (5, 20, 20), "one alone": (0, 20, 20),
    "rows of none": (3, 3, 11), "no rows in any": (0, 0, 0), "beyond the last row": (4, 25, 99),
}  # fmt: skip


def by_loop(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Sequence[int], dy: Tensor) -> dict[str, Tensor]:
    """Each group by itself, under autograd."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, *([] if bias is None else [bias]))]
    x, weight = leaves[:2]
    y, start = [], 0
    for g, end in enumerate(ends):
        end = min(end, len(x))
        y.append(x[start:end] @ weight[g].T + (0 if bias is None else leaves[2][g]))
        start = end
    y.append(x.new_zeros(len(x) - start, weight.shape[1]))
    whole = torch.cat(y)
    names = ["dx", "dweight", "dbias"]
    zeros = [torch.zeros_like(t) for t in leaves]
    grads = torch.autograd.grad(whole, leaves, dy, allow_unused=True) if whole.requires_grad else zeros
    return {"y": whole.detach(), **{n: z if g is None else g for n, g, z in zip(names, grads, zeros, strict=False)}}


def by_engine(op: ops.GroupedLinear, x: Tensor, ends: Tensor, dy: Tensor) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    y = sf.Sequential(op)(x, offsets=ends)
    grads = torch.autograd.grad(y, [x, *op.parameters()], dy)
    return {"y": y.detach(), **dict(zip(["dx", "dweight", "dbias"], grads, strict=False))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("name", ENDS)
def test_is_a_linear_for_each_group(name: str, biased: bool, dtype: torch.dtype):
    ends = ENDS[name]

    def measured(seed: int) -> tuple[dict[str, Tensor], ...]:
        torch.manual_seed(seed)
        op = ops.GroupedLinear(3, 6, 9, bias=biased, dtype=dtype)
        x, dy = seeded_randn((20, 6), seed, dtype=dtype), seeded_randn((20, 9), seed + 1, dtype=dtype)
        found = by_engine(op, x, torch.tensor(ends, dtype=torch.int32), dy)
        plain, wide = (
            by_loop(x.to(of), op.weight.to(of), None if op.bias is None else op.bias.to(of), ends, dy.to(of))
            for of in (dtype, torch.float64)
        )
        return found, plain, wide

    judge(measured, 0)
    found, _, _ = measured(0)
    empty = [g for g, (a, b) in enumerate(zip((0, *ends), ends, strict=False)) if min(b, 20) <= a]
    assert not found["dweight"][empty].any()
    assert not any(found[name][min(ends[-1], 20) :].any() for name in ("y", "dx"))


@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
def test_keeps_its_contract(biased: bool):
    ends = torch.tensor([11, 11, 33], dtype=torch.int32)
    check_op(ops.GroupedLinear(3, 6, 9, bias=biased), seeded_randn((40, 6), 0), offsets=ends)


@given(
    ends=st.lists(st.integers(0, 14), min_size=1, max_size=5).map(sorted),
    rows=st.integers(0, 12),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
)
def test_any_ends(ends: list[int], rows: int, sizes: tuple[int, int]):
    op = ops.GroupedLinear(len(ends), *sizes, dtype=torch.float64)
    x, dy = (
        seeded_randn((rows, sizes[0]), 0, dtype=torch.float64),
        seeded_randn((rows, sizes[1]), 1, dtype=torch.float64),
    )
    found = by_engine(op, x, torch.tensor(ends), dy)
    torch.testing.assert_close(found, by_loop(x, op.weight, op.bias, ends, dy))


def test_leading_dimensions_are_taken_as_rows():
    op, x = ops.GroupedLinear(2, 6, 4), seeded_randn((2, 5, 6), 0)
    ends = torch.tensor([3, 8], dtype=torch.int32)
    y = op(x, offsets=ends)
    assert_bitwise_equal(y.flatten(0, 1), op(x.flatten(0, 1), offsets=ends))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [8, 6], ids=["torch's kernel", "each row with each weight"])
@pytest.mark.parametrize("name", ENDS)
def test_calls_that_read_no_offsets_do_the_same(name: str, width: int, dtype: torch.dtype):
    ends = torch.tensor(ENDS[name], dtype=torch.int32)
    x, dy = seeded_randn((20, width), 0, dtype=dtype), seeded_randn((20, 16), 1, dtype=dtype)
    weight, bias = seeded_randn((3, 16, width), 2, dtype=dtype), seeded_randn((3, 16), 3, dtype=dtype)
    assert _grouped._takes(x, weight) == (width * dtype.itemsize % 16 == 0)
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 0.05, "rtol": 0.02}
    for added in (bias, None):
        torch.testing.assert_close(
            _grouped.forward_unread(x, weight, ends, added), _grouped._forward(x, weight, ends, added), **close
        )
    sums = _grouped.bias_grad_unread(dy, ends)
    torch.testing.assert_close(sums, _grouped._bias_grad(dy, ends), **close)
    found = _grouped.weight_grad_unread(dy, x, ends)
    torch.testing.assert_close(found, _grouped._weight_grad(dy, x, ends), **close)
    assert not found[[g for g, (a, b) in enumerate(zip((0, *ENDS[name]), ENDS[name], strict=False)) if b <= a]].any()


def test_operands_that_the_kernel_cannot_load_are_copied():
    """Expanded, transposed, with other row strides, and at addresses that are not multiples of 16 bytes."""
    ends, drawn = torch.tensor([3, 3, 17]), seeded_randn((3, 20, 24), 0)
    rows = {
        "expanded": drawn[0, :1, :16].expand(20, 16), "a column": drawn[0, :, :1].expand(20, 16),
        "transposed": drawn[0, :16].t()[:20], "of wider ones": drawn[0, :, :16],
        "every other": drawn[0].repeat(1, 2)[:, :32:2], "misaligned": drawn[0, :, 1:17],
        "one row": drawn[0, :1, :16].as_strided((1, 16), (3, 1)),
    }  # fmt: skip
    weight = drawn[:, :16, :16]
    for name, x in rows.items():
        ready = _grouped._row_major(x)
        assert ready.stride(1) == 1, name
        assert ready.stride(0) % 4 == ready.storage_offset() % 4 == 0, name
        assert ready.stride(0) >= 16, name
        assert_bitwise_equal(ready, x)
        for own in (weight, weight.mT, weight[:1].expand(3, 16, 16), drawn[:, 1:17, 1:17]):
            expected = _grouped._forward(x, own, ends, None)
            torch.testing.assert_close(_grouped.forward_unread(x, own, ends, None), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_no_offset_of_a_gpu_is_read(dtype: torch.dtype):
    """On fake tensors, on which a read would raise."""
    with FakeTensorMode(), torch.device("cuda"):
        x, weight = torch.empty(64, 32, dtype=dtype), torch.empty(4, 16, 32, dtype=dtype)
        ends, dy = torch.empty(4, dtype=torch.int32), torch.empty(64, 16, dtype=dtype)
        bias = torch.empty(4, 16, dtype=dtype)
        assert _grouped._forward(x, weight, ends, bias).shape == (64, 16)
        assert _grouped._forward(dy, weight.mT, ends, None).shape == (64, 32)
        assert _grouped._weight_grad(dy, x, ends).shape == (4, 16, 32)
        assert _grouped._bias_grad(dy, ends).shape == (4, 16)


def test_under_autocast_it_computes_in_16_bits():
    op, x = ops.GroupedLinear(2, 6, 4), seeded_randn((9, 6), 0).requires_grad_()
    ends = torch.tensor([3, 8], dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16):
        y = sf.Sequential(op, ops.SiLU())(x, offsets=ends)
        expected = torch.nn.functional.silu(op.reference(x, offsets=ends))
        with torch.no_grad():
            alone = op(x, offsets=ends)
    assert (y.dtype, alone.dtype) == (torch.bfloat16, torch.bfloat16)
    y.sum().backward()
    assert (x.grad.dtype, op.weight.grad.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(y, expected, atol=0.02, rtol=0.02)


def test_a_main_grad_is_added_to_without_rounding():
    op = ops.GroupedLinear(2, 6, 4, dtype=torch.bfloat16)
    x, ends = seeded_randn((9, 6), 0, dtype=torch.bfloat16), torch.tensor([3, 8], dtype=torch.int32)
    for p in op.parameters():
        p.main_grad = torch.ones(p.shape)
    dy = seeded_randn((9, 4), 1, dtype=torch.bfloat16)
    sf.Sequential(op)(x.requires_grad_(), offsets=ends).backward(dy)
    exact = by_loop(x.double(), op.weight.double(), op.bias.double(), (3, 8), dy.double())
    torch.testing.assert_close(op.weight.main_grad, 1 + exact["dweight"].float(), atol=1e-5, rtol=1e-5)
    assert op.weight.grad is None


def test_counts_its_flops():
    plan = sf.Sequential(ops.GroupedLinear(2, 6, 8)).plan(torch.ones(9, 6), offsets=torch.tensor([3, 8]))
    assert plan.memory is not None
    assert plan.memory.flops == 2 * 9 * 6 * 8


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_operators_are_what_they_say(ends: tuple[int, ...]) -> None:
    x, dy, weight = seeded_randn((20, 6), 0), seeded_randn((20, 5), 1), seeded_randn((3, 5, 6), 2)
    offsets = torch.tensor(ends, dtype=torch.int32)
    own = torch.ops.seqfuse
    for biases in (None, seeded_randn((3, 5), 3)):
        opcheck(own.grouped_linear.default, (x, weight, offsets, biases))
    opcheck(own.grouped_weight_grad.default, (dy, x, offsets))
    opcheck(own.grouped_bias_grad.default, (dy, offsets))
