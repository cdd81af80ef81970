"""Chains of point-wise steps, compared with the same operations of torch, one at a time."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqfuse.kernels import _device, pointwise
from seqfuse.kernels.activations import ACTIVATIONS, Activation
from seqfuse.ops._philox import drop_mask
from seqfuse.ops.activations import CLAMP_PASSES
from seqfuse.testing import (
    Untouched,
    assert_bitwise_equal,
    assert_fused_close,
    exact,
    in_regime,
    red_zones,
    seeded_randn,
)
from seqfuse.testing.judge import judge
from seqfuse.testing.tensors import redrawn

from .conftest import DEVICE
from .laid import Tensors, apart

SEED = torch.tensor(-6148914691236517205)
P = 0.3
GELU, SILU, RELU, TANH = (ACTIVATIONS[name] for name in ("gelu", "silu", "relu", "tanh"))
CAPPED = ACTIVATIONS["clamped_silu"]._replace(P=(0.75, 1.25, CLAMP_PASSES))
CLAMP = ACTIVATIONS["clamp"]._replace(P=(1.5, 0.5, CLAMP_PASSES))


def capped(x: Tensor) -> Tensor:
    """A gated unit of two functions whose gate is every second number, from the first."""
    gate, up = x[..., ::2].clamp(max=0.75), x[..., 1::2].clamp(-1.5, 1.5) + 0.5
    return F.silu(1.25 * gate) / 1.25 * up  # its gradient is one factor times dy, so infinite for an infinite dy


def dropped(x: Tensor, p: float = P) -> Tensor:
    return x * ~drop_mask(SEED.to(x.device), x.shape, p) * (1 / (1 - p))


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = x.chunk(2, -1)
    return gate, up


@dataclasses.dataclass(frozen=True)
class Case:
    """A chain, the same in torch, and the shapes of what both take, in units of the narrowest width.

    `torch(x, **operands)` gives the outputs in the kernel's order; with `gradient` the chain computes the gradients of
    that function of operand `z` at dy = x, and the sum over rows is that of a bias added to `z`.
    """

    chain: Callable[[ModuleType], Any]
    torch: Callable[..., tuple[Tensor, ...]]
    x: int = 1
    rows: Mapping[str, int] = dataclasses.field(default_factory=dict)
    matrices: Mapping[str, int] = dataclasses.field(default_factory=dict)
    seed: int | None = None  # its place among the operands
    tokens: bool = False  # whether the last operand has one number for each row


def gradient(function: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """The gradient of a function and of a bias before it, as a function of dy and the function's input z."""

    def run(dy: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        z = z.clone().requires_grad_()
        function(z).backward(dy)
        assert z.grad is not None
        return z.grad, summed(z.grad)

    return run


def summed(x: Tensor) -> Tensor:
    """As `Bias` sums: in float32, rounded once."""
    wide = x.float() if x.dtype.itemsize == 2 else x
    return wide.reshape(-1, x.shape[-1]).sum(0).to(x.dtype)


CASES = {
    "bias_gelu": Case(
        lambda k: k.Chain(k.bias(), k.store(), k.act(GELU)),
        lambda x, b: (F.gelu(x + b), x + b),
        rows={"b": 1},
    ),
    "bias_dropout_add": Case(
        lambda k: k.Chain(k.bias(), k.dropout(P), k.add()),
        lambda x, b, other: (dropped(x + b) + other,),
        rows={"b": 1},
        matrices={"other": 1},
        seed=1,
    ),
    "scale_add": Case(
        lambda k: k.Chain(k.scale(-0.7), k.add()), lambda x, other: (x * -0.7 + other,), matrices={"other": 1}
    ),
    "bias_gated_dropout": Case(
        lambda k: k.Chain(k.bias(), k.store(), k.gated(SILU), k.dropout(P)),
        lambda x, b: (dropped(F.silu(halves(x + b)[0]) * halves(x + b)[1]), x + b),
        x=2,
        rows={"b": 2},
        seed=1,
    ),
    "two_gated": Case(
        lambda k: k.Chain(k.gated(GELU), k.gated(TANH)),
        lambda x: ((lambda y: torch.tanh(halves(y)[0]) * halves(y)[1])(F.gelu(halves(x)[0]) * halves(x)[1]),),
        x=4,
    ),
    "long": Case(
        lambda k: k.Chain(k.bias(), k.act(TANH), k.scale(2.0), k.act(SILU), k.add(), k.store(), k.dropout(P)),
        lambda x, b, other: (lambda z: (dropped(z), z))(F.silu(2 * torch.tanh(x + b)) + other),
        rows={"b": 1},
        matrices={"other": 1},
        seed=2,
    ),
    "bias_sum": Case(
        lambda k: k.Chain(k.bias(), k.column_sum()), lambda x, b: (x + b, summed(x + b)), rows={"b": 1}
    ),
    "sum": Case(lambda k: k.Chain(k.column_sum()), lambda x: (x.clone(), summed(x))),
    "d_gelu_sum": Case(
        lambda k: k.Chain(k.dact(GELU), k.column_sum()), gradient(F.gelu), matrices={"z": 1}
    ),
    "d_dropout_gelu_sum": Case(
        lambda k: k.Chain(k.dropout(P), k.dact(GELU), k.column_sum()),
        gradient(lambda z: dropped(F.gelu(z))),
        matrices={"z": 1},
        seed=0,
    ),
    "d_gated_sum": Case(
        lambda k: k.Chain(k.dgated(SILU), k.column_sum()),
        gradient(lambda z: F.silu(halves(z)[0]) * halves(z)[1]),
        matrices={"z": 2},
    ),
    "d_gated_of_output": Case(
        lambda k: k.Chain(k.dgated(TANH), k.column_sum()),
        gradient(lambda z: torch.tanh(halves(z)[0]) * halves(z)[1]),
        matrices={"z": 2},
    ),
    "d_residual": Case(
        lambda k: k.Chain(k.add(), k.store(), k.dropout(P), k.column_sum()),
        lambda dy, other: (lambda d: (dropped(d), d, summed(dropped(d))))(dy + other),
        matrices={"other": 1},
        seed=1,
    ),
    "two_sums": Case(
        lambda k: k.Chain(k.column_sum(), k.dgated(SILU), k.column_sum()),
        lambda dy, z: (lambda d: (d[0], summed(dy), d[1]))(
            gradient(lambda z: F.silu(halves(z)[0]) * halves(z)[1])(dy, z)
        ),
        matrices={"z": 2},
    ),
    "emit": Case(
        lambda k: k.Chain(k.emit(SILU), k.scale(0.5), k.column_sum()),
        lambda dy, z: (dy * 0.5, F.silu(z), summed(dy * 0.5)),
        matrices={"z": 1},
    ),
    "d_gelu_of_shifted": Case(
        lambda k: k.Chain(k.shift(), k.emit(GELU), k.dact(GELU), k.column_sum()),
        lambda dy, b, t, u: (lambda d: (d[0], F.gelu(t + b), d[1]))(gradient(F.gelu)(dy, u + b)),
        rows={"b": 1},
        matrices={"t": 1, "u": 1},
    ),
    "d_gated_of_shifted": Case(
        lambda k: k.Chain(k.shift(True), k.emit_gated(SILU), k.dgated(SILU), k.column_sum()),
        lambda dy, b, t, u: (lambda d, z: (d[0], F.silu(halves(z)[0]) * halves(z)[1], d[1]))(
            gradient(lambda z: F.silu(halves(z)[0]) * halves(z)[1])(dy, u + b), t + b
        ),
        rows={"b": 2},
        matrices={"t": 2, "u": 2},
    ),
    "gated_of_two": Case(
        lambda k: k.Chain(k.bias(), k.store(), k.gated(CAPPED, CLAMP, "interleaved")),
        lambda x, b: (capped(x + b), x + b),
        x=2,
        rows={"b": 2},
    ),
    "d_gated_of_two": Case(
        lambda k: k.Chain(k.dgated(CAPPED, CLAMP, "interleaved"), k.column_sum()),
        gradient(lambda z: capped(z)),
        matrices={"z": 2},
    ),
    "d_gated_of_second_half": Case(
        lambda k: k.Chain(k.dgated(TANH, SILU, "up_gate"), k.column_sum()),
        gradient(lambda z: torch.tanh(halves(z)[1]) * F.silu(halves(z)[0])),
        matrices={"z": 2},
    ),
    "gated_scaled": Case(
        lambda k: k.Chain(k.gated(SILU, packing="up_gate"), k.token_scale()),
        lambda x, f: (F.silu(halves(x)[1]) * halves(x)[0] * f.unsqueeze(-1),),
        x=2,
        tokens=True,
    ),
    "d_gated_scaled_in_turn": Case(
        lambda k: k.Chain(k.shift(True), k.dot_gated(CAPPED, CLAMP, "interleaved"), k.column_sum()),
        lambda dy, b, z: (dy.clone(), (dy * capped(z + b)).sum(-1), summed(dy)),
        rows={"b": 2},
        matrices={"z": 2},
    ),
    "d_gated_scaled": Case(
        lambda k: k.Chain(k.dot_gated(SILU), k.token_scale(), k.dgated(SILU), k.column_sum()),
        lambda dy, z, u, f: (lambda d: (d[0], (dy * F.silu(halves(z)[0]) * halves(z)[1]).sum(-1), d[1]))(
            gradient(lambda z: F.silu(halves(z)[0]) * halves(z)[1])(dy * f.unsqueeze(-1), u)
        ),
        matrices={"z": 2, "u": 2},
        tokens=True,
    ),
    "d_gated_scaled_again": Case(
        lambda k: k.Chain(k.dot_gated(TANH), k.token_scale(), k.emit_gated(SILU), k.dgated(SILU)),
        lambda dy, z, u, v, f: (
            gradient(lambda z: F.silu(halves(z)[0]) * halves(z)[1])(dy * f.unsqueeze(-1), v)[0],
            (dy * torch.tanh(halves(z)[0]) * halves(z)[1]).sum(-1),
            F.silu(halves(u)[0]) * halves(u)[1] * f.unsqueeze(-1),
        ),
        matrices={"z": 2, "u": 2, "v": 2},
        tokens=True,
    ),
    "emit_gated": Case(
        lambda k: k.Chain(k.emit_gated(SILU), k.scale(0.5), k.column_sum()),
        lambda dy, z: (dy * 0.5, F.silu(halves(z)[0]) * halves(z)[1], summed(dy * 0.5)),
        matrices={"z": 2},
    ),
}  # fmt: skip


def drawn(
    case: Case, lead: tuple[int, ...], width: int, dtype: torch.dtype, regime: str = "normal", seed: int = 0
) -> Tensors:
    """x and the operands except the seed."""
    shapes = {"x": (*lead, case.x * width), **{name: (n * width,) for name, n in case.rows.items()}}
    shapes |= {name: (*lead, n * width) for name, n in case.matrices.items()} | ({"f": lead} if case.tokens else {})
    return {
        name: in_regime(regime, shape, at, dtype=dtype).to(DEVICE)
        for at, (name, shape) in enumerate(shapes.items(), start=seed)
    }


def run(case: Case, tensors: Tensors, k: ModuleType = pointwise) -> Tensors:
    x, *operands = tensors.values()
    if case.tokens and len(case.matrices) > 1:  # the factors come after the first operand that reads the packed tensor
        operands.insert(1, operands.pop())
    if case.seed is not None:
        operands.insert(case.seed, SEED.to(x.device))
    made = [t for t in k.pointwise(x, case.chain(k), operands) if t is not None]
    return {str(i): t for i, t in enumerate(made)}


def in_torch(case: Case, tensors: Tensors) -> Tensors:
    return {str(i): t.detach() for i, t in enumerate(case.torch(*tensors.values()))}


def check(case: Case, tensors: Tensors, k: ModuleType = pointwise) -> None:
    def measure(seed: int) -> tuple[Tensors, ...]:
        drawn = {name: redrawn(t, seed) for name, t in tensors.items()}
        with Untouched(drawn):
            ours = run(case, drawn, k)
        return ours, in_torch(case, drawn), in_torch(case, {name: t.double() for name, t in drawn.items()})

    judge(measure, 0)


LEADS = [(1,), (7,), (33,), (2, 3), (), (1, 2, 1, 3)]
WIDTHS = [1, 8, 127, 128, 130, 1025]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
REGIMES = ["normal", "small", "offset", "heavy"]
# Each pair of neighbors in the four lists meets for some chain.
SELECTION = [
    pytest.param(name, LEADS[i % 6], WIDTHS[j % 6], dtype, REGIMES[(i + j) % 4], id=f"{name}-{i}-{str(dtype)[6:]}")
    for i, name in enumerate(CASES)
    for j, dtype in enumerate(DTYPES[:3], start=i)
]


@pytest.mark.parametrize(("name", "lead", "width", "dtype", "regime"), SELECTION)
def test_a_chain_equals_the_operations_it_stands_for(
    name: str, lead: tuple[int, ...], width: int, dtype: torch.dtype, regime: str
) -> None:
    check(CASES[name], drawn(CASES[name], lead, width, dtype, regime))


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("name", ["bias_dropout_add", "d_gelu_sum"])
def test_rows_at_the_end_of_a_tile(name: str, more: int) -> None:
    rows = CASES[name].chain(pointwise).tile(16, 4)[0] + more
    check(CASES[name], drawn(CASES[name], (rows,), 16, torch.float32))


def test_a_chain_that_is_kept_serves_rows_of_any_width(device: torch.device) -> None:
    chain = pointwise.Chain(pointwise.dropout(P))
    for width in (16, 12, 13):  # of one tile size, drawn four at a time, except for the last
        given = seeded_randn((5, width), 0).to(device), SEED.to(device)
        fresh = pointwise.Chain(pointwise.dropout(P))
        both = [pointwise.pointwise(given[0], one, given[1:])[0] for one in (chain, fresh)]
        assert_bitwise_equal(both[:1], both[1:])


EXACT: dict[str, Any] = {
    "bias, add": lambda k: (k.Chain(k.bias(), k.store(), k.add()), lambda x, b, o: (x + b + o, x + b)),
    "scale, relu": lambda k: (k.Chain(k.scale(2.0), k.act(RELU)), lambda x: (torch.relu(2 * x),)),
    "gated": lambda k: (k.Chain(k.gated(RELU)), lambda x: (torch.relu(halves(x)[0]) * halves(x)[1],)),
    "d relu, sum": lambda k: (
        k.Chain(k.dact(RELU), k.column_sum()), lambda x, y: (x.where(y > 0, 0.0), x.where(y > 0, 0.0).sum(0))
    ),
    "d gated, sum": lambda k: (
        k.Chain(k.dgated(RELU), k.column_sum()),
        lambda x, z: (lambda d: (d, d.sum(0)))(
            torch.cat(((x * halves(z)[1]).where(halves(z)[0] > 0, 0.0), x * torch.relu(halves(z)[0])), 1)
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_exact_numbers_give_exact_results(name: str, dtype: torch.dtype, device: torch.device) -> None:
    chain, expected = EXACT[name](pointwise)
    units = {"row": (20,), "matrix": (37, 20), "packed": (37, 40)}
    shapes = [(37, 20 * chain.parts[0]), *(units[step.operand] for step in chain.steps if step.operand)]
    tensors = [exact("integers", shape, i, dtype=dtype).to(device) for i, shape in enumerate(shapes)]
    ours = pointwise.pointwise(tensors[0], chain, tensors[1:])
    assert_bitwise_equal(list(ours), [t.to(dtype) for t in expected(*(t.double() for t in tensors))])


# By default each chain meets each regime and each dtype, in turn.
@pytest.mark.parametrize(("name", "regime"), [*itertools.product(CASES, ["zeros", "constant_rows", "extremes"])])
def test_at_the_edges_of_a_format(name: str, regime: str, request: pytest.FixtureRequest) -> None:
    """Both overflow in the same places; fused may be finite where unfused is not."""
    case, turn = CASES[name], [*CASES].index(name) + len(regime)  # lengths of 5, 13 and 9: 2, 1 and 0 of 3
    for dtype in DTYPES[:3] if request.config.getoption("--full") else [DTYPES[turn % 3]]:
        tensors = drawn(case, (5,), 12, dtype)
        tensors["x"] = in_regime(regime, tuple(tensors["x"].shape), 3, dtype=dtype).to(DEVICE)
        if regime != "extremes":
            check(case, tensors)
            continue
        ours, theirs = run(case, tensors), in_torch(case, tensors)
        for key, r in in_torch(case, {name: t.double() for name, t in tensors.items()}).items():
            # Whether a sum over rows overflows depends on its order; at the largest number, on how it is rounded.
            exempt = (r.abs() > 0.98 * torch.finfo(dtype).max) | (r.ndim == 1)
            assert (ours[key].isfinite() | ~theirs[key].isfinite() | exempt).all()


@pytest.mark.parametrize("kind", ["integers", "signs"])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_sums_of_exact_numbers_are_exact(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    x = exact(kind, (301, 40), 3, dtype=dtype).to(device)
    y, total = pointwise.pointwise(x, pointwise.Chain(pointwise.column_sum()))
    assert_bitwise_equal([y, total], [x, x.double().sum(0).to(dtype)])


@pytest.mark.triton
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 130])
def test_partial_sums_are_all_summed(rows: int, device: torch.device) -> None:
    partials = exact("integers", (rows, 90), 1).to(device)
    total = torch.empty(70, dtype=torch.float16, device=device)
    _device.column_sums(partials[:, 3:], 70, total)
    assert_bitwise_equal(total, partials[:, 3:73].sum(0).half())


@pytest.mark.triton
@pytest.mark.parametrize("columns", [1, 32, 45, 64])
def test_runs_of_columns_are_summed_in_one_launch(columns: int, device: torch.device) -> None:
    parts = [(2, torch.float16), (1, torch.float32), (1, torch.bfloat16)]
    got = [torch.empty(n * columns, dtype=dtype, device=device) for n, dtype in parts]
    buffer = torch.full((67, 4 * columns + 5), torch.nan, device=device)
    buffer[:65, : 4 * columns] = exact("integers", (65, 4 * columns), 1)
    partials = buffer[:65, : 4 * columns]
    with mock.patch.object(_device, "launch", wraps=_device.launch) as launched:
        _device.column_sums(partials, columns, *got)
    assert launched.call_count == 1
    whole = partials.sum(0)
    expected = [whole[: 2 * columns].half(), whole[2 * columns : 3 * columns], whole[3 * columns :].bfloat16()]
    assert_bitwise_equal(got, expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", CASES)
def test_one_bad_number_spoils_what_it_spoils_in_torch(name: str, value: float) -> None:
    case = CASES[name]

    def measure(seed: int) -> tuple[Tensors, ...]:
        tensors = drawn(case, (6,), 8, torch.float32, seed=seed)
        tensors["x"][2, 3] = value
        reference = in_torch(case, {name: t.double() for name, t in tensors.items()})
        # Not torch in float32, whose vectorized GeLU turns infinity into NaN on a CPU.
        return run(case, tensors), {name: t.float() for name, t in reference.items()}, reference

    judge(measure, 0)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 8), (0,)], ids=str)
def test_empty_tensors_give_empty_results_and_zero_sums(shape: tuple[int, ...], device: torch.device) -> None:
    x = torch.empty(shape, device=device)
    k = pointwise
    y, z, total = k.pointwise(x, k.Chain(k.dropout(P), k.store(), k.column_sum()), (SEED.to(device),))
    assert y is not None
    assert z is not None
    assert y.shape == z.shape == shape
    assert_bitwise_equal([total], [torch.zeros(shape[-1:], device=device)])


def test_a_number_is_a_tensor_too(device: torch.device) -> None:
    x = torch.tensor(1.25, device=device)
    (y,) = pointwise.pointwise(x, pointwise.Chain(pointwise.act(GELU)))
    assert_fused_close(y, F.gelu(x), F.gelu(x.double()))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("width", [64, 7])
def test_the_mask_is_that_of_the_unfused_operation(width: int, p: float, device: torch.device) -> None:
    x = torch.ones(37, width, device=device)
    for upscale in (True, False):
        (y,) = pointwise.pointwise(x, pointwise.Chain(pointwise.dropout(p, upscale)), (SEED.to(device),))
        expected = x * ~drop_mask(SEED.to(device), x.shape, p)
        assert_bitwise_equal([y], [expected * (1 / (1 - p) if upscale and p < 1 else 1)])


@pytest.mark.parametrize("width", [8, 7])
def test_the_mask_of_a_packed_row_is_that_of_the_whole_row(width: int, device: torch.device) -> None:
    x = torch.ones(9, 2 * width, device=device)
    chain = pointwise.Chain(pointwise.dropout(P), pointwise.store(), pointwise.gated(RELU))
    _, kept = pointwise.pointwise(x, chain, (SEED.to(device),))
    assert kept is not None
    assert torch.equal(kept == 0, drop_mask(SEED.to(device), x.shape, P))


@pytest.mark.parametrize("p", [0.5, 1.0])
def test_a_dropped_number_is_multiplied_by_zero(p: float, device: torch.device) -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, -1.0] * 4, device=device).repeat(16, 1)
    (y,) = pointwise.pointwise(x, pointwise.Chain(pointwise.dropout(p)), (SEED.to(device),))
    assert y is not None
    expected = x * ~drop_mask(SEED.to(device), x.shape, p) * 2
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(y[:, 3].signbit(), expected[:, 3].signbit())


@pytest.mark.triton
def test_counters_beyond_32_bits_have_words_of_their_own(device: torch.device) -> None:
    """Element 2^34 starts a counter that does not fit in one word; reached by the row number alone."""
    import triton
    import triton.language as tl

    from seqfuse.kernels._launch import launch
    from seqfuse.ops._philox import philox4x32, round_keys

    @triton.jit
    def _mask_kernel(seed, out, row, width, BLOCK: tl.constexpr, GROUPED: tl.constexpr):
        rows = row + tl.arange(0, 1).to(tl.int64)
        keep = _device.keep_mask(seed, rows, row * 0, width, 1 << 31, BLOCK, GROUPED)
        tl.store(out + tl.arange(0, BLOCK), tl.reshape(keep, (BLOCK,)).to(tl.int8))

    counter = torch.tensor([2**32, 2**32 + 1])
    even, odd = torch.zeros(2, 2, 2, dtype=torch.int64).unbind()
    even[0], odd[0] = counter & 0xFFFFFFFF, counter >> 32
    words = philox4x32(even, odd, round_keys(SEED))
    expected = torch.stack((words[0][0], words[1][0], words[0][1], words[1][1]), -1).flatten() >= 2**31
    for grouped in (True, False):
        out = torch.zeros(8, dtype=torch.int8, device=device)
        launch(_mask_kernel, 1, (SEED.to(device).view(1), out, 2**31, 8), {"BLOCK": 8, "GROUPED": grouped})
        assert torch.equal(out.bool().cpu(), expected)


@pytest.mark.triton
def test_results_take_the_dtypes_asked_for(device: torch.device) -> None:
    k = pointwise
    x, b = torch.randn(5, 8, device=device).bfloat16(), torch.randn(8, device=device)
    chain = k.Chain(k.bias(), k.store(), k.column_sum())
    y, z, total = k.pointwise(x, chain, (b,), dtype=torch.float32, dtypes=(torch.float16, torch.float64))
    assert [t.dtype for t in (y, z, total) if t is not None] == [torch.float32, torch.float16, torch.float64]
    assert_bitwise_equal([y, z], [x.float() + b, (x.float() + b).half()])
    z = k.pointwise(x, chain, (b,), dtype=torch.float32, result=False)[1]
    assert_bitwise_equal(z, x.float() + b)


def test_the_result_may_be_left_out(device: torch.device) -> None:
    x = torch.randn(5, 8, device=device)
    y, total = pointwise.pointwise(x, pointwise.Chain(pointwise.column_sum()), result=False)
    assert y is None
    assert total is not None
    torch.testing.assert_close(total, x.sum(0))


@pytest.mark.parametrize("gated", [False, True], ids=["activation", "gated"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_given_again_reads_its_input_once(dtype: torch.dtype, gated: bool, device: torch.device) -> None:
    k = pointwise
    dy, z = (seeded_randn((19, size), seed, dtype=dtype).to(device) for seed, size in enumerate((40, 40 + 40 * gated)))
    steps = [k.emit_gated(SILU), k.dgated(SILU)] if gated else [k.emit(SILU), k.dact(SILU)]
    chain = k.Chain(*steps, k.column_sum())
    apart = k.pointwise(dy, chain, (z, z.clone()))
    assert_bitwise_equal(k.pointwise(dy, chain, (z, z)), apart)
    # Another tensor at the same address, and the same step without the one before it.
    assert_bitwise_equal(
        k.pointwise(dy, chain, (z[:1].expand_as(z), z)), k.pointwise(dy, chain, (z[:1].expand_as(z), z.clone()))
    )
    twice = k.Chain(steps[0], k.scale(1.0), steps[1], k.column_sum())
    assert_bitwise_equal(k.pointwise(dy, twice, (z, z)), apart)


def test_a_chain_is_its_text_again() -> None:
    chains = [case.chain(pointwise) for case in CASES.values()]
    for chain in (*chains, pointwise.Chain(pointwise.dropout(P, upscale=False))):
        again = pointwise.parse(chain.text)
        assert (again.kinds, again.functions, again.numbers) == (chain.kinds, chain.functions, chain.numbers)


RUNS = itertools.count()


def test_functions_of_one_name_have_texts_of_their_own() -> None:
    plugin = f"plugin_{next(RUNS)}"  # sources are cached for as long as the process runs

    def make() -> Activation:
        def swish(x: Any, P: Any) -> Any:
            return x

        swish.__module__, swish.__qualname__ = plugin, "swish"
        return Activation(swish, swish, P=(2.0,))

    first, second = make(), make()
    texts = [pointwise.Chain(pointwise.act(a)).text for a in (first, second, first)]
    assert texts == [f"act:{plugin}.swish(2.0){count}" for count in ("", "#2", "")]
    assert pointwise.parse(texts[1]).functions == ((second.value,),)


@pytest.mark.parametrize("text", ["swish", "act:swish", "scale", "dropout:0.1", "bias:1"])
def test_what_is_no_chain_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no"):
        pointwise.parse(text)


WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "columns": (lambda k, x: k.pointwise(x.mT, k.Chain(k.act(GELU))), "contiguous in its last dimension"),
    "leading": (
        lambda k, x: k.pointwise(x.view(2, 3, 8).transpose(0, 1), k.Chain(k.scale(1.0))),
        "one stride for its leading",
    ),
    "bias": (lambda k, x: k.pointwise(x, k.Chain(k.bias()), (x,)), r"bias takes shape \(8,\), got \(6, 8\)"),
    "residual": (lambda k, x: k.pointwise(x, k.Chain(k.add()), (x[0],)), r"add takes shape \(6, 8\), got \(8,\)"),
    "packed": (lambda k, x: k.pointwise(x, k.Chain(k.dgated(GELU)), (x,)), r"takes shape \(6, 16\)"),
    "seed": (lambda k, x: k.pointwise(x, k.Chain(k.dropout(0.1)), (x,)), "takes one int64 seed"),
    "too few": (lambda k, x: k.pointwise(x, k.Chain(k.add())), "too few operands"),
    "too many": (lambda k, x: k.pointwise(x, k.Chain(k.scale(1.0)), (x,)), "more operands"),
    "odd width": (lambda k, x: k.pointwise(x[:, :7], k.Chain(k.gated(GELU))), "7 columns do not divide into 2"),
    "three gated": (lambda k, x: k.Chain(k.gated(GELU), k.gated(GELU), k.gated(GELU)), "at most two gated"),
    "two packings": (lambda k, x: k.Chain(k.gated(GELU, packing="interleaved"), k.dgated(GELU)), "has one packing"),
    "interleaved, and dropout": (
        lambda k, x: k.Chain(k.gated(GELU, packing="interleaved"), k.dropout(0.1)),
        "and no dropout",
    ),
    "interleaved, and two sums": (
        lambda k, x: k.Chain(k.dgated(GELU, packing="interleaved"), k.column_sum(), k.column_sum()),
        "at most one sum",
    ),
    "p": (lambda k, x: k.dropout(1.5), "between 0 and 1"),
}


# C kernels take any strides: others are copied.
COPIED = ("columns", "leading")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.triton] * (n in COPIED)) for n in WRONG])
def test_what_does_not_fit_is_refused_with_a_sentence(name: str, device: torch.device) -> None:
    call, sentence = WRONG[name]
    with pytest.raises(ValueError, match=sentence):
        call(pointwise, torch.randn(6, 8, device=device))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=[pytest.mark.full] * ((i + at) % 3 > 0), id=f"{name}-{dtype}")
        for i, name in enumerate(CASES)
        for at, dtype in enumerate(DTYPES[:3])
    ],
)
def test_rows_that_lie_apart_are_those_of_torch(name: str, dtype: torch.dtype) -> None:
    # Strides that are multiples of 16 bytes, and others.
    for rows, width, padding in ((37, 12, 0), (37, 12, 3), (130, 9, 0), (9, 1100, 3)):
        with red_zones():
            check(CASES[name], apart(drawn(CASES[name], (rows,), width, dtype), more=padding))
