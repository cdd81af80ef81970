"""RMSNorm."""

import pytest
import torch
from torch import nn

from seqfuse import ops
from seqfuse.testing import assert_bitwise_equal, in_regime, seeded_randn

from .passes import by_passes, check_needs, check_passes, check_twin

HALF = (torch.bfloat16, torch.float16)


def randomized(op: ops.RMSNorm) -> ops.RMSNorm:
    for parameter in op.parameters():
        parameter.data = seeded_randn(tuple(parameter.shape), 20, dtype=parameter.dtype)
    return op


@pytest.mark.parametrize("arguments", [{}, {"elementwise_affine": False}, {"eps": 0.1}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF], ids=str)
@pytest.mark.parametrize("shape", [(9, 7), (2, 3, 7), (7,)], ids=str)
def test_output_is_that_of_torch_bit_for_bit(shape: tuple[int, ...], dtype: torch.dtype, arguments: dict):
    op = randomized(ops.RMSNorm(7, **arguments, dtype=dtype))
    check_twin(op, nn.RMSNorm(7, **arguments, dtype=dtype), seeded_randn(shape, 0, dtype=dtype), names=("y",))


@pytest.mark.parametrize("dtype", [torch.float32, *HALF, torch.float64], ids=str)
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


# torch warns that it does not fuse mixed dtypes.
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_gives_the_output_of_torch(dtype: torch.dtype):
    with torch.autocast("cpu", torch.bfloat16):
        check_twin(randomized(ops.RMSNorm(7)), nn.RMSNorm(7), seeded_randn((9, 7), 0, dtype=dtype), names=("y",))


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("affine", [True, False], ids=["weight", "no weight"])
@pytest.mark.parametrize("size", [6, (4, 6), (3, 4, 6)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_normalizes_any_trailing_shape(size, dtype: torch.dtype, affine: bool, zero_centered: bool):
    op = randomized(ops.RMSNorm(size, elementwise_affine=affine, zero_centered=zero_centered, dtype=dtype))
    x = seeded_randn((2, 3, 4, 6), 0, dtype=dtype)
    check_passes(op, x)
    check_needs(op, x)


@pytest.mark.parametrize("x", [torch.float32, torch.float64, *HALF], ids=str)
@pytest.mark.parametrize("parameters", [torch.float32, torch.float64, *HALF], ids=str)
def test_takes_a_weight_of_any_dtype(parameters: torch.dtype, x: torch.dtype):
    op = randomized(ops.RMSNorm(7, dtype=parameters))
    check_passes(op, seeded_randn((9, 7), 0, dtype=x))
    assert op.fwd(torch.ones(2, 7, dtype=x))[0].dtype == x


@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64], ids=str)
def test_statistics_are_kept_in_float32_or_better(dtype: torch.dtype):
    x = in_regime("offset", (5, 33), 0, dtype=dtype)
    op = ops.RMSNorm(33, eps=1e-6, dtype=dtype)
    _, saved = op.fwd(x)
    assert saved.rstd.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    assert saved.rstd.shape == (5,)
    rstd = (x.double().square().mean(-1) + 1e-6).rsqrt()
    torch.testing.assert_close(saved.rstd.double(), rstd, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_zero_centered_weight_is_the_gain_less_one(dtype: torch.dtype):
    plain, centered = ops.RMSNorm(8, dtype=dtype), ops.RMSNorm(8, dtype=dtype, zero_centered=True)
    assert_bitwise_equal(centered.weight.detach(), torch.zeros(8, dtype=dtype))
    x = seeded_randn((5, 8), 0, dtype=dtype)
    assert_bitwise_equal(by_passes(centered, x, {}), by_passes(plain, x, {}))
    nn.init.constant_(plain.weight, 1.5)
    nn.init.constant_(centered.weight, 0.5)
    assert_bitwise_equal(by_passes(centered, x, {}), by_passes(plain, x, {}))


def test_a_small_zero_centered_weight_is_not_lost_in_half():
    op = ops.RMSNorm(8, dtype=torch.bfloat16, zero_centered=True)
    nn.init.constant_(op.weight, 2.0**-9)  # 1 + 2^-9 rounds to 1 in bfloat16
    x = seeded_randn((64, 8), 0, dtype=torch.bfloat16)
    without = nn.RMSNorm(8, elementwise_affine=False, dtype=torch.bfloat16)(x)
    assert not torch.equal(op.fwd(x)[0], without)


def test_starts_from_the_numbers_and_keys_of_torch():
    assert_bitwise_equal(ops.RMSNorm((3, 4)).state_dict(), nn.RMSNorm((3, 4)).state_dict())
    assert not ops.RMSNorm(4, elementwise_affine=False).state_dict()
    assert repr(ops.RMSNorm(4)) == "RMSNorm((4,), eps=None, elementwise_affine=True)"


def test_says_which_last_dimension_it_expects():
    with pytest.raises(ValueError, match="expects last dimension 4, got 5"):
        ops.RMSNorm(4).infer((3, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("own", [None, torch.float32, torch.bfloat16, torch.float64])
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
