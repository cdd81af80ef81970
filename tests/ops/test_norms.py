"""LayerNorm and RMSNorm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from seqfuse import ops
from seqfuse.testing import assert_bitwise_equal, in_regime, seeded_randn

from .passes import by_passes, check_needs, check_passes, check_twin, example, randomized

F32, F64 = torch.float32, torch.float64
HALF = (torch.bfloat16, torch.float16)
Norm = ops.LayerNorm | ops.RMSNorm
BOTH = pytest.mark.parametrize("kind", [ops.LayerNorm, ops.RMSNorm], ids=lambda kind: kind.__name__)
FORMS = [(ops.LayerNorm, {}), (ops.LayerNorm, {"bias": False}), (ops.LayerNorm, {"elementwise_affine": False})]
FORMS += [(ops.RMSNorm, {}), (ops.RMSNorm, {"elementwise_affine": False})]
EPS = [(ops.LayerNorm, {"eps": 0.1}), (ops.RMSNorm, {"eps": 0.1})]


def twin(kind: type[Norm]) -> Any:
    return getattr(nn, kind.__name__)


@pytest.mark.parametrize(("kind", "how"), [*FORMS, *EPS], ids=str)
@pytest.mark.parametrize("dtype", [F32, F64, *HALF], ids=str)
@pytest.mark.parametrize("shape", [(9, 7), (2, 3, 7), (7,)], ids=str)
def test_is_that_of_torch_bit_for_bit(
    shape: tuple[int, ...], dtype: torch.dtype, kind: type[Norm], how: dict[str, Any]
):
    op, its = randomized(kind(7, **how, dtype=dtype)), twin(kind)(7, **how, dtype=dtype)
    # The gradients of LayerNorm, too, except for those that ATen sums in half; RMSNorm has its own backward.
    names = None if kind is ops.LayerNorm and dtype not in HALF else ("y",)
    check_twin(op, its, seeded_randn(shape, 0, dtype=dtype), names=names)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_outputs_of_wider_parameters_are_those_of_torch(dtype: torch.dtype):
    op = randomized(ops.LayerNorm(7))
    check_twin(op, nn.LayerNorm(7), seeded_randn((9, 7), 0, dtype=dtype), names=("y",))


# torch warns that it does not fuse mixed dtypes.
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@BOTH
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16], ids=str)
def test_autocast_gives_the_bits_of_torch(dtype: torch.dtype, kind: type[Norm]):
    with torch.autocast("cpu", torch.bfloat16):
        names = None if kind is ops.LayerNorm and dtype is F32 else ("y",)
        check_twin(randomized(kind(7)), twin(kind)(7), seeded_randn((9, 7), 0, dtype=dtype), names=names)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize(("kind", "how"), FORMS, ids=str)
@pytest.mark.parametrize("size", [6, (4, 6), (3, 4, 6)], ids=str)
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16, F64], ids=str)
def test_normalizes_any_trailing_shape(
    size: Any, dtype: torch.dtype, kind: type[Norm], how: dict[str, Any], zero_centered: bool
):
    op = randomized(kind(size, **how, zero_centered=zero_centered, dtype=dtype))
    x = seeded_randn((2, 3, 4, 6), 0, dtype=dtype)
    check_passes(op, x)
    check_needs(op, x)


@BOTH
@pytest.mark.parametrize("x", [F32, F64, *HALF], ids=str)
@pytest.mark.parametrize("parameters", [F32, F64, *HALF], ids=str)
def test_takes_parameters_of_any_dtype(parameters: torch.dtype, x: torch.dtype, kind: type[Norm]):
    op = randomized(kind(7, dtype=parameters))
    check_passes(op, seeded_randn((9, 7), 0, dtype=x))
    assert op.fwd(torch.ones(2, 7, dtype=x))[0].dtype == x


@pytest.mark.parametrize(
    ("kind", "how"), [*FORMS[::2], (ops.LayerNorm, {"zero_centered": True}), (ops.RMSNorm, {"eps": 1e-6})], ids=str
)
@pytest.mark.parametrize("dtype", [*HALF, F32, F64], ids=str)
def test_statistics_are_kept_in_float32_or_better(dtype: torch.dtype, kind: type[Norm], how: dict[str, Any]):
    x, op = in_regime("offset", (5, 33), 0, dtype=dtype), kind(33, **{"eps": 1e-6, **how}, dtype=dtype)
    _, saved = op.fwd(x)
    assert saved.rstd.dtype == (F64 if dtype is F64 else F32)
    assert saved.rstd.shape == (5,)
    exact = x.double()
    variance = exact.square().mean(-1)
    if kind is ops.LayerNorm:
        assert (saved.mean.dtype, saved.mean.shape) == (saved.rstd.dtype, (5,))
        torch.testing.assert_close(saved.mean.double(), exact.mean(-1), rtol=1e-6, atol=0)
        variance = exact.var(-1, unbiased=False)
    torch.testing.assert_close(saved.rstd.double(), (variance + op.eps).rsqrt(), rtol=3e-6, atol=0)


@BOTH
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16], ids=str)
def test_zero_centered_weight_is_the_gain_less_one(dtype: torch.dtype, kind: type[Norm]):
    plain, centered = kind(8, dtype=dtype), kind(8, dtype=dtype, zero_centered=True)
    assert_bitwise_equal(centered.weight.detach(), torch.zeros(8, dtype=dtype))
    x = seeded_randn((5, 8), 0, dtype=dtype)
    assert_bitwise_equal(by_passes(centered, x, {}), by_passes(plain, x, {}))
    nn.init.constant_(plain.weight, 1.5)
    nn.init.constant_(centered.weight, 0.5)
    assert_bitwise_equal(by_passes(centered, x, {}), by_passes(plain, x, {}))


@BOTH
def test_a_small_zero_centered_weight_is_not_lost_in_half(kind: type[Norm]):
    op = kind(8, dtype=torch.bfloat16, zero_centered=True)
    nn.init.constant_(op.weight, 2.0**-9)  # 1 + 2^-9 rounds to 1 in bfloat16
    x = seeded_randn((64, 8), 0, dtype=torch.bfloat16)
    without = twin(kind)(8, elementwise_affine=False, dtype=torch.bfloat16)(x)
    assert not torch.equal(op.fwd(x)[0], without)


def test_saves_its_weight_as_it_is():
    op = example("LayerNorm", torch.empty(5))
    assert op.fwd(torch.ones(2, 5))[1].weight is op.weight


def test_starts_from_the_numbers_and_keys_of_torch():
    for kind in (ops.LayerNorm, ops.RMSNorm):
        assert_bitwise_equal(kind((3, 4)).state_dict(), twin(kind)((3, 4)).state_dict())
        assert not kind(4, elementwise_affine=False).state_dict()
    assert list(ops.LayerNorm(4, bias=False).state_dict()) == ["weight"]


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_sums_half_gradients_in_float32(dtype: torch.dtype):
    op, x = ops.LayerNorm(8, dtype=dtype), seeded_randn((5000, 8), 0, dtype=dtype)
    _, saved = op.fwd(x)
    _, grads = op.bwd(torch.ones_like(x), saved, needs=frozenset({"bias"}))
    assert_bitwise_equal(grads["bias"], torch.full((8,), 5000.0).to(dtype))


@pytest.mark.parametrize("dtype", [F32, *HALF, F64], ids=str)
def test_no_eps_is_the_machine_epsilon_of_the_statistics(dtype: torch.dtype):
    x = in_regime("small", (9, 7), 0, dtype=dtype) / 8
    check_twin(ops.RMSNorm(7, dtype=dtype), nn.RMSNorm(7, dtype=dtype), x, names=("y",))
    check_passes(ops.RMSNorm(7, dtype=dtype), x)


@pytest.mark.parametrize("affine", [True, False], ids=["weight", "no weight"])
def test_a_gradient_that_is_one_number_for_all_loses_no_digits(affine: bool):
    op, x = ops.RMSNorm(64, elementwise_affine=affine), seeded_randn((9, 64), 0).requires_grad_()
    (dx,) = torch.autograd.grad(op(x), x, torch.full_like(x, 1000.0))
    exact = x.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(op.double().reference(exact), exact, torch.full_like(exact, 1000.0))
    torch.testing.assert_close(dx.double(), wanted, rtol=1e-5, atol=1e-3)


def test_a_float32_gradient_under_autocast_is_that_without():
    op, x = randomized(ops.RMSNorm(24)), seeded_randn((9, 24), 1).requires_grad_()
    dy = seeded_randn((9, 24), 2)
    wanted = torch.autograd.grad(op(x), [x, op.weight], dy)
    with torch.autocast("cpu", torch.bfloat16):
        y = op(x)
    torch.testing.assert_close(torch.autograd.grad(y, [x, op.weight], dy), wanted)


@pytest.mark.parametrize("dtype", [F32, F64, *HALF])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("own", [None, F32, torch.bfloat16, F64])
def test_y_is_made_again_from_what_is_saved_with_the_same_bits(
    dtype: torch.dtype, centered: bool, own: torch.dtype | None
):
    for sizes in ((1,), (64,), (1000,), (3, 5)):
        affine = own is not None
        norm = ops.RMSNorm(sizes, 1e-6, affine, dtype=own or dtype, zero_centered=centered and affine)
        x = (3 * torch.randn(4, 7, *sizes)).to(dtype)
        with torch.no_grad():
            if norm.weight is not None:
                norm.weight.normal_()
            y, saved = norm.fwd(x)
            again = norm.again(x, saved.rstd, norm.weight)
        assert again.dtype is y.dtype
        assert torch.equal(again, y)
