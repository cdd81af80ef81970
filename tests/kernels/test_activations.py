"""Device functions of activations against torch, and the GeLU of 16 bits against its formula."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from seqfuse.kernels import _heads, activations
from seqfuse.kernels._launch import keyed, launch
from seqfuse.kernels.activations import apply
from seqfuse.kernels.c import trace
from seqfuse.kernels.norm import norm_fwd
from seqfuse.kernels.pointwise import Chain, act, dact, pointwise
from seqfuse.testing import assert_bitwise_equal, assert_fused_close, in_regime
from seqfuse.testing.judge import judge
from tools.compiled import compile_variants

from .conftest import DEVICE
from .references import ACTIVATIONS_IN_TORCH

TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    **ACTIVATIONS_IN_TORCH,
    "scaled": lambda x: -0.7 * x,
    "composed": lambda x: F.gelu(torch.tanh(1.5 * F.silu(x))),
}


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + mpmath.exp(-x))


# For numbers with any number of digits: float64 is no reference for float64.
EXACT: dict[str, Callable[[Any], Any]] = {
    "identity": lambda x: x,
    "relu": lambda x: max(x, mpmath.mpf(0)),
    "squared_relu": lambda x: max(x, mpmath.mpf(0)) ** 2,
    "sigmoid": _sigmoid,
    "tanh": mpmath.tanh,
    "silu": lambda x: x * _sigmoid(x),
    "quickgelu": lambda x: x * _sigmoid(1.702 * x),
    "gelu": lambda x: x * mpmath.ncdf(x),
    "gelu_tanh": lambda x: x * _sigmoid(mpmath.sqrt(8 / mpmath.pi) * (x + 0.044715 * x**3)),
    "clamped_silu": lambda x: min(x, mpmath.mpf(7)) * _sigmoid(1.702 * min(x, mpmath.mpf(7))),
    "clamp": lambda x: max(min(x, mpmath.mpf(7)), mpmath.mpf(-7)) + 1,
    "scaled": lambda x: -0.7 * x,
    "composed": lambda x: EXACT["gelu"](mpmath.tanh(1.5 * EXACT["silu"](x))),
}


def made(name: str, module: ModuleType = activations) -> activations.Activation:
    ready = module.ACTIVATIONS
    if name == "scaled":
        return module.constant_factor(-0.7)
    if name == "composed":
        return module.composed(ready["silu"], module.constant_factor(1.5), ready["tanh"], ready["gelu"])
    return ready[name]


def of_torch(name: str, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    y = TORCH[name](x)
    y.backward(dy)
    assert x.grad is not None
    return {"y": y.detach(), "dx": x.grad}


def of_kernel(name: str, x: Tensor, dy: Tensor, module: ModuleType = activations) -> dict[str, Tensor]:
    activation = made(name, module)
    (y,) = pointwise(x, Chain(act(activation)))
    saved = x if activation.reads == "input" else TORCH[name](x)
    (dx,) = pointwise(dy, Chain(dact(activation)), (saved,))
    assert y is not None
    assert dx is not None
    return {"y": y, "dx": dx}


def exactly(name: str, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """In 40 digits, each result rounded to float64 once."""
    with mpmath.workdps(40):
        points = [mpmath.mpf(t) for t in x.flatten().tolist()]
        y = [EXACT[name](t) for t in points]
        dx = [mpmath.diff(EXACT[name], t) * g for t, g in zip(points, dy.flatten().tolist(), strict=True)]
    wide = functools.partial(torch.tensor, dtype=torch.float64, device=x.device)
    return {"y": wide([*map(float, y)]).view(x.shape), "dx": wide([*map(float, dx)]).view(x.shape)}


def measured(name: str, x: Tensor, dy: Tensor, module: ModuleType = activations) -> tuple[dict[str, Tensor], ...]:
    exact = exactly(name, x, dy) if x.dtype is torch.float64 else of_torch(name, x.double(), dy.double())
    return of_kernel(name, x, dy, module), of_torch(name, x, dy), exact


def check(name: str, x: Tensor, dy: Tensor, module: ModuleType = activations) -> None:
    fused, unfused, reference = measured(name, x, dy, module)
    assert_fused_close(fused, unfused, reference)


def drawn(regime: str, dtype: torch.dtype, device: torch.device, seed: int = 1) -> tuple[Tensor, Tensor]:
    shape = (3 if dtype is torch.float64 else 17, 40)
    x, dy = in_regime(regime, shape, seed, dtype=dtype), in_regime("normal", shape, seed + 1, dtype=dtype)
    return x.to(device), dy.to(device)


def test_every_activation_has_a_reference_here() -> None:
    assert TORCH.keys() == EXACT.keys() == {*activations.ACTIVATIONS, "scaled", "composed"}


def test_one_function_is_composed_of_itself() -> None:
    gelu = activations.ACTIVATIONS["gelu"]
    assert activations.composed(gelu) is gelu


def test_a_composition_has_a_name_and_is_known_by_its_text() -> None:
    first, again = made("composed"), made("composed")
    assert activations.activation_name(first) == "silu+scaled[1.5]+tanh+gelu"
    assert activations.activation_text(first) == activations.activation_text(again)
    other = activations.composed(activations.ACTIVATIONS["gelu"], activations.constant_factor(2.5))
    assert activations.activation_text(other) != activations.activation_text(first)
    assert activations.activation_of(activations.activation_text(other)).P == other.P


@pytest.mark.parametrize("number", [0.25, -0.0, 1e300, -float("inf"), 3, True, np.float64(0.5)])
def test_a_text_contains_the_numbers_and_new_ones_register_nothing(number: Any) -> None:
    gelu, silu = activations.ACTIVATIONS["gelu"], activations.ACTIVATIONS["silu"]
    registered: list[int] = []
    for own in (7.5, number):
        factor = activations.Activation(activations.scaled, activations.scaled_derivative, P=(own,))
        within = activations.composed(gelu, activations.composed(factor, silu))
        for one in (factor, within):
            again = activations.activation_of(activations.activation_text(one))
            assert again == one
            assert str(again.P) == str(one.P).replace("np.float64(0.5)", "0.5")
        registered.append(len(activations._FUNCTIONS))
    assert registered[0] == registered[1]


def test_new_numbers_are_not_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_heads, "_known", {})
    monkeypatch.setattr(_heads, "_MOST", 2)
    for base in (10.0, 20.0, 30.0):
        _heads.frequencies_of(_heads.Rotation("half", 4, base), torch.device("cpu"))
    assert len(_heads._known) <= 2
    assert None not in (trace._why_not.cache_info().maxsize, activations.activation_of.cache_info().maxsize)


@triton.jit
def _rooted(x, P: tl.constexpr):
    return tl.sqrt(tl.abs(x)) * P[0]


@triton.jit
def _rooted_derivative(x, P: tl.constexpr):
    return P[0] / (2.0 * tl.sqrt(x))


class Rooted:
    value, derivative, reads, P = _rooted, _rooted_derivative, "input", (3.0,)


def test_operators_take_any_activation_by_its_text(device: torch.device) -> None:
    text, gelu = activations.activation_text(Rooted), activations.ACTIVATIONS["gelu"]
    assert text == f"{__name__}._rooted(3.0)"
    same = activations.Activation(*[getattr(gelu, name) for name in activations.Activation._fields])
    assert activations.activation_text(same) == "gelu"
    x, weight = torch.randn(5, 7, device=device), torch.ones(7, device=device)
    y = torch.ops.seqfuse.norm(x, weight, None, 1e-5, act=text)[0]
    assert_bitwise_equal(y, norm_fwd(x, weight, None, 1e-5, act=Rooted).y)
    other = SimpleNamespace(value=_rooted, derivative=_rooted, reads="input", P=(3.0,))
    assert activations.activation_text(other) == f"{text}#2"
    assert activations.activation_of(f"{text}#2").derivative is _rooted


def test_an_operator_refuses_an_unknown_activation(device: torch.device) -> None:
    x, weight = torch.randn(5, 7, device=device), torch.ones(7, device=device)
    with pytest.raises(ValueError, match="is not an activation of this process; known are identity, relu"):
        torch.ops.seqfuse.norm(x, weight, None, 1e-5, act="swish")


@pytest.mark.parametrize("regime", ["normal", "small", "offset", "heavy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", TORCH)
def test_value_and_derivative_equal_torch(name: str, dtype: torch.dtype, regime: str, device: torch.device) -> None:
    judge(lambda seed: measured(name, *drawn(regime, dtype, device, seed)), 1)


@pytest.mark.parametrize("name", TORCH)
def test_the_ends_of_the_range_are_those_of_torch(name: str, device: torch.device) -> None:
    most = torch.finfo(torch.float32).max
    ends = [0.0, 30.0, 100.0, 1e4, 1e-30, 1e18, most]
    x = torch.tensor([[*ends, *(-end for end in ends)]], device=device)
    check(name, x, torch.ones_like(x))


@pytest.mark.parametrize("name", TORCH)
def test_nan_and_infinity_come_out_where_they_do_in_torch(name: str, device: torch.device) -> None:
    x = torch.tensor([[1.0, math.nan, math.inf, -math.inf]], device=device)
    ours, theirs = of_kernel(name, x, torch.ones_like(x)), of_torch(name, x, torch.ones_like(x))
    for key in ("y", "dx"):
        # Vectorized GeLU on a CPU gives NaN at infinity, a GPU's infinity.
        assert torch.equal(ours[key].isnan() | ours[key].isinf(), theirs[key].isnan() | theirs[key].isinf()), key
        assert ours[key][0, 1].isnan() == theirs[key][0, 1].isnan()


@pytest.mark.parametrize("name", TORCH)
def test_a_gradient_of_inf_or_nan_comes_out_where_it_does_in_torch(name: str, device: torch.device) -> None:
    x = torch.tensor([[-1.5, -0.3, 0.4, 2.0, math.nan]] * 3, device=device)
    dy = torch.tensor([[math.inf], [-math.inf], [math.nan]], device=device).expand(3, 5).contiguous()
    ours, theirs = of_kernel(name, x, dy)["dx"], of_torch(name, x, dy)["dx"]
    # A sum of two terms, as autograd computes it for a product, may be NaN where a single factor gives Inf.
    kept = theirs.isfinite() | ours.isfinite()
    torch.testing.assert_close(ours[kept], theirs[kept])
    assert torch.equal(ours[2].isnan(), theirs[2].isnan())


def test_what_selects_in_a_composition_drops_all_that_is_behind_it(device: torch.device) -> None:
    relu, squared, tanh = (activations.ACTIVATIONS[n] for n in ("relu", "squared_relu", "tanh"))

    def dx(*parts: activations.Activation) -> Tensor:
        x = torch.tensor([[-30.0, -1.0, 0.5, 30.0]], device=device)
        (found,) = pointwise(torch.full_like(x, math.inf), Chain(dact(activations.composed(*parts))), (x,))
        assert found is not None
        return found

    nan, inf = math.nan, math.inf
    expected = {
        (relu, tanh): [0.0, 0.0, inf, nan],
        (tanh, relu): [0.0, 0.0, inf, nan],
        (tanh, activations.constant_factor(-1.0), squared): [nan, -inf, 0.0, 0.0],
    }
    for parts, numbers in expected.items():
        torch.testing.assert_close(dx(*parts), torch.tensor([numbers], device=device), equal_nan=True)


HALF = [torch.float16, torch.bfloat16]


@triton.jit
def _unrounded_kernel(x, y, n, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, apply(FUNCTION, tl.load(x + at, mask=at < n, other=0.0).to(tl.float32), (), True), mask=at < n)


def every(dtype: torch.dtype) -> Tensor:
    """All finite 16-bit numbers."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    return numbers[numbers.isfinite()].to(DEVICE)


def unrounded(function: object, x: Tensor) -> Tensor:
    y = torch.empty(x.shape, device=DEVICE)
    launch(_unrounded_kernel, 1, (x, y, x.numel()), {"FUNCTION": function, "BLOCK": 2**16})
    return y.double()


def rounding(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest rounding error of a format at each number: half the distance between two neighbors."""
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
    # Where float32 has no number this small, the result is 0, as in torch.
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
    """Triton's cache would know such functions by their names only, and run an old kernel."""
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
