"""GeLU for results of 16 bits: how far it is from the exact one, over every number of 16 bits that there is."""

from __future__ import annotations

from pathlib import Path

import mpmath
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from seqfuse.kernels import activations
from seqfuse.kernels._launch import keyed, launch
from seqfuse.kernels.activations import apply
from seqfuse.kernels.pointwise import Chain, act, pointwise
from tools.compiled import compile_variants

from .conftest import DEVICE

HALF = [torch.float16, torch.bfloat16]


@triton.jit
def _unrounded_kernel(x, y, n, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, apply(FUNCTION, tl.load(x + at, mask=at < n, other=0.0).to(tl.float32), (), True), mask=at < n)


def every(dtype: torch.dtype) -> Tensor:
    """All finite numbers of 16 bits."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    return numbers[numbers.isfinite()].to(DEVICE)


def unrounded(function: object, x: Tensor) -> Tensor:
    y = torch.empty(x.shape, device=DEVICE)
    launch(_unrounded_kernel, 1, (x, y, x.numel()), {"FUNCTION": function, "BLOCK": 2**16})
    return y.double()


def rounding(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest error of rounding numbers to a format: half of the distance between two of them there."""
    limits = torch.finfo(dtype)
    exponent = torch.frexp(x.abs().clamp(min=limits.tiny))[1] - 1
    return torch.ldexp(torch.full_like(x, limits.eps / 2), exponent)


def phi(x: Tensor) -> Tensor:
    return torch.special.ndtr(x)


def tail(x: Tensor) -> Tensor:
    """Phi(x) with all its digits, also where it is small."""
    return 0.5 * torch.special.erfcx(-x * 0.5**0.5) * torch.exp(-x * x / 2)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_the_value_is_within_a_quarter_of_a_rounding_for_every_number(dtype: torch.dtype) -> None:
    x = every(dtype)
    exact = x.double() * torch.where(x < 0, tail(x.double()), phi(x.double()))
    error = (unrounded(activations.gelu, x) - exact).abs() / rounding(exact, dtype)
    # Where float32 has no such small numbers, the result is 0, as in torch.
    error = error[exact.abs() > torch.finfo(torch.float32).tiny]
    print(f"{dtype}: at most {error.max().item():.4f} of a rounding, at {x.numel()} numbers")
    assert error.max() < 0.25
    assert error.max() < (0.021 if dtype is torch.float16 else 0.003), "what the fit and float32 leave"


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_the_derivative_is_within_a_quarter_of_a_rounding_of_its_terms(dtype: torch.dtype) -> None:
    """Phi(x) and x phi(x) cancel near -0.75, where rounding x itself moves it by more than that."""
    x = every(dtype)
    wide = x.double()
    wide = wide[wide.abs() < 1e18]  # beyond, x phi(x) is Inf times 0
    first = torch.where(wide < 0, tail(wide), phi(wide))
    second = wide * torch.exp(-wide * wide / 2) * 0.3989422804014327
    found = unrounded(activations.gelu_derivative, x)[x.double().abs() < 1e18]
    terms = torch.maximum(first.abs(), second.abs())
    error = (found - (first + second)).abs() / rounding(terms, dtype)
    error = error[terms > torch.finfo(torch.float32).tiny]
    print(f"{dtype}: at most {error.max().item():.4f} of a rounding of its terms")
    assert error.max() < 0.25
    assert error.max() < (0.021 if dtype is torch.float16 else 0.003)


def test_the_exact_one_is_exact() -> None:
    with mpmath.workdps(30):
        for at in (-13.0, -5.5, -1.0, -1e-3, 0.0, 2.5):
            assert abs(float(tail(torch.tensor(at, dtype=torch.float64))) / float(mpmath.ncdf(at)) - 1) < 1e-14


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
def test_it_is_used_where_results_have_16_bits(dtype: torch.dtype) -> None:
    x = torch.linspace(-6, 3, 513).to(DEVICE, dtype)
    (y,) = pointwise(x, Chain(act(activations.ACTIVATIONS["gelu"])))
    assert y is not None
    assert torch.equal(y, unrounded(activations.gelu, x).to(dtype)) == (dtype is not torch.float32)
    (wide,) = pointwise(x, Chain(act(activations.ACTIVATIONS["gelu"])), dtype=torch.float32)
    assert wide is not None
    torch.testing.assert_close(wide, torch.nn.functional.gelu(x.float()), rtol=0, atol=1e-6)


def test_infinite_and_missing_numbers_are_those_of_the_formula() -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0], dtype=torch.bfloat16, device=DEVICE)
    (y,) = pointwise(x, Chain(act(activations.ACTIVATIONS["gelu"])))
    assert y is not None
    torch.testing.assert_close(y, x * (0.5 * (1 + torch.erf(x * 0.5**0.5))), equal_nan=True, rtol=0, atol=0)


def test_a_changed_device_function_in_a_tuple_is_another_kernel(tmp_path: Path) -> None:
    """By themselves such functions are known to Triton's cache by their names, and an old kernel would be run."""
    import importlib.util

    from triton.runtime.jit import JITFunction

    keys: list[str] = []
    for factor in (2, 3):
        path = tmp_path / f"made_{factor}.py"
        path.write_text(f"def f(x):\n    return {factor} * x\n")
        spec = importlib.util.spec_from_file_location("made", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        functions = ((JITFunction(module.f),), 1.0)
        assert str(functions) == "((JITFunction(made:f),), 1.0)"
        assert keyed(functions) == functions
        keys.append(keyed(functions).cache_key)
    assert keys[0] != keys[1]
    assert keyed(3) == 3


def test_it_compiles_without_spills() -> None:
    only = r"^(gelu|dact_gelu|bias,store,gelu) bf16 4x1024$"
    found = list(compile_variants(["pointwise"], ["sm_90"], only=only, jobs=1))
    assert len(found) == 3
    for one in found:
        assert one.error is None, one
        # The assembler of Triton 3.6 puts one pointer of the chain on the stack, with 80 registers in use.
        spilled = 8 * (triton.__version__.startswith("3.6.") and one.variant.startswith("bias"))
        assert one.spills <= spilled, one
