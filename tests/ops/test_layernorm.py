"""LayerNorm."""

import pytest
import torch
from torch import nn

from seqfuse import ops
from seqfuse.testing import assert_bitwise_equal, in_regime, seeded_randn

from .passes import by_passes, check_needs, check_passes, check_twin, example

HALF = (torch.bfloat16, torch.float16)


def randomized(op: ops.LayerNorm) -> ops.LayerNorm:
    for position, parameter in enumerate(op.parameters()):
        parameter.data = seeded_randn(tuple(parameter.shape), 20 + position, dtype=parameter.dtype)
    return op


@pytest.mark.parametrize("arguments", [
    {}, {"bias": False}, {"elementwise_affine": False}, {"eps": 0.1},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(9, 7), (2, 3, 7), (7,)], ids=str)
def test_is_that_of_torch_bit_for_bit(shape: tuple[int, ...], dtype: torch.dtype, arguments: dict):
    op = randomized(ops.LayerNorm(7, **arguments, dtype=dtype))
    check_twin(op, nn.LayerNorm(7, **arguments, dtype=dtype), seeded_randn(shape, 0, dtype=dtype))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("parameters", [None, torch.float32], ids=str)
def test_half_outputs_are_those_of_torch(parameters: torch.dtype | None, dtype: torch.dtype):
    op = randomized(ops.LayerNorm(7, dtype=parameters or dtype))
    check_twin(op, nn.LayerNorm(7, dtype=parameters or dtype), seeded_randn((9, 7), 0, dtype=dtype), names=("y",))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_gives_the_bits_of_torch(dtype: torch.dtype):
    with torch.autocast("cpu", torch.bfloat16):
        # ATen sums half gradients in half; see below.
        names = None if dtype is torch.float32 else ("y",)
        check_twin(randomized(ops.LayerNorm(7)), nn.LayerNorm(7), seeded_randn((9, 7), 0, dtype=dtype), names=names)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("arguments", [{}, {"bias": False}, {"elementwise_affine": False}], ids=str)
@pytest.mark.parametrize("size", [6, (4, 6), (3, 4, 6)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_normalizes_any_trailing_shape(size, dtype: torch.dtype, arguments: dict, zero_centered: bool):
    op = randomized(ops.LayerNorm(size, **arguments, zero_centered=zero_centered, dtype=dtype))
    x = seeded_randn((2, 3, 4, 6), 0, dtype=dtype)
    check_passes(op, x)
    check_needs(op, x)


@pytest.mark.parametrize("x", [torch.float32, torch.float64, *HALF], ids=str)
@pytest.mark.parametrize("parameters", [torch.float32, torch.float64, *HALF], ids=str)
def test_takes_parameters_of_any_dtype(parameters: torch.dtype, x: torch.dtype):
    op = randomized(ops.LayerNorm(7, dtype=parameters))
    check_passes(op, seeded_randn((9, 7), 0, dtype=x))
    assert op.fwd(torch.ones(2, 7, dtype=x))[0].dtype == x


@pytest.mark.parametrize("arguments", [{}, {"elementwise_affine": False}, {"zero_centered": True}], ids=str)
@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64], ids=str)
def test_statistics_are_kept_in_float32_or_better(dtype: torch.dtype, arguments: dict):
    x = in_regime("offset", (5, 33), 0, dtype=dtype)
    op = ops.LayerNorm(33, **arguments, dtype=dtype)
    _, saved = op.fwd(x)
    wanted = torch.float64 if dtype is torch.float64 else torch.float32
    assert saved.mean.dtype == saved.rstd.dtype == wanted
    assert saved.mean.shape == saved.rstd.shape == (5,)
    exact = x.double()
    torch.testing.assert_close(saved.mean.double(), exact.mean(-1), rtol=1e-6, atol=0)
    rstd = (exact.var(-1, unbiased=False) + op.eps).rsqrt()
    torch.testing.assert_close(saved.rstd.double(), rstd, rtol=3e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_zero_centered_weight_is_the_gain_less_one(dtype: torch.dtype):
    plain, centered = ops.LayerNorm(8, dtype=dtype), ops.LayerNorm(8, dtype=dtype, zero_centered=True)
    assert_bitwise_equal(centered.weight.detach(), torch.zeros(8, dtype=dtype))
    x = seeded_randn((5, 8), 0, dtype=dtype)
    assert_bitwise_equal(by_passes(centered, x, {}), by_passes(plain, x, {}))
    nn.init.constant_(plain.weight, 1.5)
    nn.init.constant_(centered.weight, 0.5)
    assert_bitwise_equal(by_passes(centered, x, {}), by_passes(plain, x, {}))


def test_a_small_zero_centered_weight_is_not_lost_in_half():
    op = ops.LayerNorm(8, dtype=torch.bfloat16, zero_centered=True)
    nn.init.constant_(op.weight, 2.0**-9)  # 1 + 2^-9 rounds to 1 in bfloat16
    x = seeded_randn((64, 8), 0, dtype=torch.bfloat16)
    without = nn.LayerNorm(8, elementwise_affine=False, dtype=torch.bfloat16)(x)
    assert not torch.equal(op.fwd(x)[0], without)


def test_keeps_the_weight_for_dx_alone():
    op = example("LayerNorm", torch.empty(5))
    assert "weight" not in op.Saved.kept(frozenset({"weight", "bias"}))
    assert op.fwd(torch.ones(2, 5))[1].weight is op.weight


def test_starts_from_the_numbers_and_keys_of_torch():
    assert_bitwise_equal(ops.LayerNorm((3, 4)).state_dict(), nn.LayerNorm((3, 4)).state_dict())
    assert not ops.LayerNorm(4, elementwise_affine=False).state_dict()
    assert list(ops.LayerNorm(4, bias=False).state_dict()) == ["weight"]
    assert repr(ops.LayerNorm(4)) == "LayerNorm((4,), eps=1e-05, elementwise_affine=True, bias=True)"


@pytest.mark.parametrize(("size", "shape", "sentence"), [
    (4, (3, 5), "expects last dimension 4, got 5"),
    (4, (), "expects last dimension 4, got 0-d"),
    ((3, 4), (3, 5), r"expects last dimensions \(3, 4\), got \(3, 5\)"),
    ((3, 4), (4,), r"expects last dimensions \(3, 4\), got 1-d"),
], ids=str)  # fmt: skip
def test_says_which_trailing_shape_it_expects(size, shape: tuple[int, ...], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        ops.LayerNorm(size).infer(shape)


def test_refuses_an_empty_trailing_shape():
    with pytest.raises(ValueError, match="at least one dimension"):
        ops.LayerNorm(())


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_sums_half_gradients_in_float32(dtype: torch.dtype):
    op = ops.LayerNorm(8, dtype=dtype)
    x = seeded_randn((5000, 8), 0, dtype=dtype)
    _, saved = op.fwd(x)
    _, grads = op.bwd(torch.ones_like(x), saved, needs=frozenset({"bias"}))
    assert_bitwise_equal(grads["bias"], torch.full((8,), 5000.0).to(dtype))
