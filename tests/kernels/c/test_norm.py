"""LayerNorm and RMSNorm in C, with the operations fused around them, compared with torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from seqfuse import compiler
from seqfuse.kernels.activations import ACTIVATIONS, composed, constant_factor
from seqfuse.kernels.norm import norm_bwd, norm_fwd, norm_of
from seqfuse.ops._philox import drop_mask
from seqfuse.testing import assert_bitwise_equal, assert_fused_close, seeded_randn
from seqfuse.testing.judge import judge
from tests.kernels.test_norm import (
    CASES,
    DTYPES,
    EPS,
    SEED,
    P,
    drawn,
    measured,
    measured_in,
    run,
)

SHAPES: list[tuple[tuple[int, ...], int, str]] = [
    ((7,), 127, "normal"), ((33,), 130, "offset"), ((2, 3), 8, "small"), ((), 1025, "heavy"), ((70,), 1, "normal"),
    ((5,), 3, "heavy"), ((3,), 4097, "offset"), ((130,), 7, "normal"),
]  # fmt: skip
PAIRS = [
    pytest.param(name, dtype, marks=() if dtype is DTYPES[0] or i % 2 == j - 1 else pytest.mark.full,
                 id=f"{name}-{str(dtype)[6:]}")
    for i, name in enumerate(CASES) for j, dtype in enumerate(DTYPES)
]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), PAIRS)
def test_a_norm_equals_the_operations_it_stands_for(name: str, dtype: torch.dtype) -> None:
    for lead, width, regime in SHAPES:
        judge(functools.partial(measured_in, CASES[name], lead, width, dtype, regime), 0)


@pytest.mark.parametrize("mean", [8.0, 1000.0])
@pytest.mark.parametrize("columns", [127, 768, 65536])
def test_a_mean_far_from_0_costs_no_variance(mean: float, columns: int) -> None:
    def make(seed: int) -> Tensor:
        return mean + 1e-2 * seeded_randn((4, columns), seed)

    tensors = drawn(CASES["layernorm"], (4,), columns, torch.float32)
    judge(lambda seed: measured(CASES["layernorm"], {**tensors, "x": make(seed)}), 1)


@pytest.mark.parametrize("centered", [True, False], ids=["layernorm", "rmsnorm"])
def test_sums_of_finite_numbers_do_not_overflow(centered: bool) -> None:
    x = torch.tensor([[1.5e38, 1.5e38, -1.5e38, 1.5e38], [1e-30, 1e-30, -1e-30, 1e-30]])
    f = norm_fwd(x, None, None, EPS, centered=centered)
    assert f.y.isfinite().all()
    torch.testing.assert_close(f.y[1], torch.zeros(4), atol=1e-20, rtol=0)
    if f.mean is not None:
        torch.testing.assert_close(f.mean, torch.tensor([7.5e37, 5e-31]))


@pytest.mark.parametrize("centered", [True, False], ids=["layernorm", "rmsnorm"])
@pytest.mark.parametrize("columns", [7, 32, 130, 5001])
def test_dx_does_not_depend_on_what_else_is_needed(columns: int, centered: bool) -> None:
    x, dy, dstream = (seeded_randn((33, columns), seed) for seed in range(3))
    weight = seeded_randn((columns,), 3)
    f = norm_fwd(x, weight, None, EPS, centered=centered)
    given = dy, x, f.mean, f.rstd, weight
    alone = norm_bwd(*given, dstream=dstream)
    dtype = torch.float32
    for more in ({"dweight": dtype}, {"dweight": dtype, "dbias": dtype}, {"dpre_bias": dtype, "dbranch": True}):
        assert_bitwise_equal(norm_bwd(*given, dstream=dstream, **more).dx, alone.dx)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 130, 1025])
def test_what_is_dropped_is_what_the_mask_says(columns: int, dtype: torch.dtype) -> None:
    x, residual = torch.ones(9, columns, dtype=dtype), torch.zeros(9, columns, dtype=dtype)
    drop = drop_mask(SEED, x.shape, P)
    f = norm_fwd(x, None, None, EPS, centered=False, seed=SEED, p=P, residual=residual)
    assert f.stream is not None
    assert torch.equal(f.stream == 0, drop)
    b = norm_bwd(x, f.stream, None, f.rstd, None, seed=SEED, p=P, dstream=x * 1e4, dbranch=True)
    assert b.dbranch is not None
    assert torch.equal(b.dbranch == 0, drop)


@pytest.mark.parametrize("order", range(3))
def test_dtypes_may_differ_from_tensor_to_tensor(order: int) -> None:
    """The results are those of the same numbers in float32, rounded."""
    case, kinds = CASES["layernorm_around"], [DTYPES[(order + i) % 3] for i in range(3)]
    tensors = drawn(case, (35,), 70, torch.float32)
    given = {key: t.to(kinds[i % 3]) for i, (key, t) in enumerate(tensors.items())}

    def made(t: dict[str, Tensor], of: Callable[[int], torch.dtype]) -> dict[str, Tensor]:
        f = norm_fwd(
            t["x"], t["weight"], t["bias"], EPS, pre_bias=t["pre_bias"], seed=SEED, p=P, residual=t["residual"],
            dtype=of(0), stream_dtype=torch.float32,
        )  # fmt: skip
        assert f.stream is not None
        assert f.mean is not None
        stream = f.stream.to(kinds[1]).to(of(1))
        b = norm_bwd(
            t["dy"], stream, f.mean, f.rstd, t["weight"], dstream=t["dstream"], seed=SEED, p=P, dweight=of(0),
            dbias=of(1), dpre_bias=of(2), dbranch=True, branch_dtype=of(2),
        )  # fmt: skip
        found = {"y": f.y, "stream": f.stream, "dx": b.dx, "dweight": b.dweight, "dbias": b.dbias}
        found |= {"dbranch": b.dbranch, "dpre_bias": b.dpre_bias}
        return {key: value for key, value in found.items() if value is not None}

    mixed, wide = (
        made(given, lambda i: kinds[i]),
        made({k: t.float() for k, t in given.items()}, lambda _: torch.float32),
    )
    assert len(mixed) == 7
    assert_fused_close(
        mixed, {k: t.to(mixed[k].dtype) for k, t in wide.items()}, {k: t.double() for k, t in wide.items()}
    )


def test_rows_that_have_no_stride_are_copied() -> None:
    case = CASES["layernorm_all"]
    tensors = drawn(case, (6, 5), 8, torch.float32)
    expected = run(case, tensors)
    for lay in (lambda t: t.transpose(0, 1).contiguous().transpose(0, 1), lambda t: t.mT.contiguous().mT):
        assert_bitwise_equal(run(case, {key: lay(t) if t.ndim == 3 else t for key, t in tensors.items()}), expected)


@pytest.mark.parametrize(
    ("name", "shape"), [("residual", (4, 8)), ("pre_bias", (7,)), ("bias", (1, 8)), ("weight", (9,))]
)
def test_shapes_that_differ_are_refused(name: str, shape: tuple[int, ...]) -> None:
    given: dict[str, Any] = {"weight": None, "bias": None, name: torch.ones(shape)}
    with pytest.raises(ValueError, match=f"{name} must have shape"):
        norm_fwd(torch.ones(5, 8), eps=EPS, **given)
    if name == "residual":
        f = norm_fwd(torch.ones(5, 8), None, None, EPS)
        assert f.mean is not None
        for key in ("dy", "dstream"):
            tensors = {"dy": torch.ones(5, 8), "dstream": torch.ones(5, 8), key: torch.ones(shape)}
            with pytest.raises(ValueError, match=f"{key} must have shape"):
                norm_bwd(tensors["dy"], torch.ones(5, 8), f.mean, f.rstd, None, dstream=tensors["dstream"])


def test_float64_is_refused() -> None:
    with pytest.raises(ValueError, match="C kernels are for float32, bfloat16 and float16, not float64"):
        norm_fwd(torch.ones(2, 8, dtype=torch.float64), None, None, EPS)


def test_a_tensor_without_memory_is_refused() -> None:
    with FakeTensorMode():
        x = torch.ones(2, 8)
    with pytest.raises(ValueError, match="a FakeTensor has no memory that a C kernel could read"):
        norm_fwd(x, None, None, EPS, centered=False)


def test_results_are_on_the_cpu_whatever_the_default_device() -> None:
    x = torch.ones(2, 8)
    with torch.device("meta"):
        f = norm_fwd(x, None, None, EPS, centered=False)
    assert f.y.is_cpu
    torch.testing.assert_close(f.y, x)


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm_tanh", "layernorm_all"])
def test_each_gradient_alone_is_what_it_is_beside_the_others(name: str) -> None:
    """A kernel of fewer columns may be compiled into other instructions, which round otherwise."""
    tensors = drawn(CASES[name], (70,), 24, torch.float32)
    every = run(CASES[name], tensors)
    for only in every.keys() - {"y", "stream"}:
        alone = run(CASES[name], tensors, only=only)
        assert alone.keys() == {key for key in every if key in ("y", "stream", only)}
        torch.testing.assert_close(alone[only], every[only], rtol=1e-5, atol=1e-6)


def _steps(columns: int, eps: float, p: float, factor: float, rows: int = 5) -> None:
    case = CASES["layernorm_all"]
    t = drawn(case, (rows,), columns, torch.float32)
    act = composed(ACTIVATIONS["gelu"], constant_factor(factor))
    around = {"pre_bias": t["pre_bias"], "residual": t["residual"], "seed": SEED, "p": p, "act": act}
    f = norm_fwd(t["x"], t["weight"], t["bias"], eps, **around)
    assert f.stream is not None
    assert f.mean is not None
    norm_bwd(
        t["dy"], f.stream, f.mean, f.rstd, t["weight"], t["bias"], seed=SEED, p=p, act=act, dweight=torch.float32,
        dbranch=True,
    )  # fmt: skip


def test_a_kernel_depends_on_no_number(sources: list[str]) -> None:
    _steps(24, 1e-5, 0.1, 0.5)
    assert len(set(sources)) == 2
    _steps(70, 1e-6, 0.2, 0.25)
    _steps(70, 0.0, 1.0, 3.0)
    assert len(sources) == 6
    assert len(set(sources)) == 2


def test_what_is_asked_for_nothing_compiles_nothing(sources: list[str]) -> None:
    x, rstd = seeded_randn((5, 24), 0), torch.ones(5)
    assert norm_bwd(x, x, None, rstd, None, dx=False) == (None,) * 7
    with compiler.collecting() as wanted, FakeTensorMode(allow_non_fake_inputs=True):
        assert norm_bwd(x, x, None, rstd, None, dx=False) == (None,) * 7
    assert not sources
    assert not wanted


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("centered", [True, False], ids=["layernorm", "rmsnorm"])
def test_a_backward_of_everything_but_tensors_gives_the_same(centered: bool, weighted: bool) -> None:
    x, dy, dstream = (seeded_randn((9, 24), i) for i in range(3))
    weight = seeded_randn((24,), 3) if weighted else None
    f = norm_fwd(x, weight, None, EPS, centered=centered)
    names = ["dy", "x", *["mean"] * centered, "rstd", *["weight"] * weighted, "dstream"]
    bound = norm_of(norm_bwd, names, {"dweight": torch.float32})
    for d in (dy, dy.t().contiguous().t(), dy[:1].expand(9, 24)):
        expected = norm_bwd(d.contiguous(), x, f.mean, f.rstd, weight, dstream=dstream, dweight=torch.float32)
        for _ in range(2):
            found = bound(*[t for t in (d, x, f.mean, f.rstd, weight, dstream) if t is not None])
            assert_bitwise_equal([found.dx, found.dweight], [expected.dx, expected.dweight])


@pytest.mark.parametrize("names", [["x", "residual", "pre_bias"], ["residual", "x"], ["x", "bias", "weight"]])
def test_tensors_in_another_order_than_that_of_the_parameters_are_refused(names: list[str]) -> None:
    with pytest.raises(ValueError, match="order of the parameters"):
        norm_of(norm_fwd, names, {"eps": EPS})


def test_tensors_on_another_device_are_refused() -> None:
    x, weight = seeded_randn((8, 64), 0), seeded_randn((64,), 1)
    for _ in range(2):
        with pytest.raises(ValueError, match="norm: expected all tensors on one device, got cpu and meta"):
            norm_fwd(x, weight.to("meta"), None, 1e-5)
        norm_fwd(x, weight, None, 1e-5)
