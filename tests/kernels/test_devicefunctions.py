"""`check_op` compares device functions of an activation with its reference, where kernels run."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import seqfuse as sf
from seqfuse import ops
from seqfuse.testing import check_op, seeded_randn
from tests.selection import few_cases as few_cases

X = seeded_randn((5, 8), 0)
# A selection of the checks before the device functions, which are compared in every case.
pytestmark = pytest.mark.usefixtures("few_cases")


@triton.jit
def square(x):
    return x * x


@triton.jit
def twice(x):
    return 2.0 * x


class Square(sf.Pointwise, open=True):
    """y = x^2, with the device functions of a subclass."""

    def reference(self, x: Tensor) -> Tensor:
        return x * x


class Right(Square):
    value, derivative = square, twice


class WrongDerivative(Square):
    value = square

    @triton.jit
    def derivative(x):
        return 3.0 * x


class WrongValue(Square):
    derivative = twice

    @triton.jit
    def value(x):
        return x * tl.abs(x)


class SwallowsNaN(Square):
    derivative = twice

    @triton.jit
    def value(x):
        return tl.where(x == x, x * x, 0.0)


class DerivativeSwallowsNaN(Square):
    value = square

    @triton.jit
    def derivative(x):
        return tl.where(x < 0.0, 2.0 * x, tl.where(x >= 0.0, 2.0 * x, 0.0))


def within_0_and_1(x: Tensor) -> Tensor:
    """As `x.clamp(0, 1)`, whose gradient at 0 and 1 is 1 before torch 2.15 and 0 from then on; here it is 1."""
    return torch.where((x >= 0) & (x <= 1), x, x.detach().clamp(0, 1))


class Multiplies(sf.Pointwise):
    """y = x within 0 and 1, else the nearer of the two: dx is 0 outside, whatever dy is."""

    @triton.jit
    def value(x):
        return tl.where(x < 0.0, 0.0, tl.where(x > 1.0, 1.0, x))

    @triton.jit
    def derivative(x):
        return tl.where((x >= 0.0) & (x <= 1.0), 1.0, 0.0)

    def reference(self, x: Tensor) -> Tensor:
        return within_0_and_1(x)


class Selects(sf.Pointwise):
    """The same, done right."""

    value = Multiplies.value

    @triton.jit
    def derivative(dy, x):
        return tl.where((x >= 0.0) & (x <= 1.0), dy, 0.0)

    def reference(self, x: Tensor) -> Tensor:
        return within_0_and_1(x)


class Overflows(sf.Pointwise):
    """y = log(1 + exp(x)), which in its kernel is infinite for large x."""

    @triton.jit
    def value(x):
        return tl.log(1.0 + tl.exp(x))

    @triton.jit
    def derivative(x):
        return 1.0 / (1.0 + tl.exp(-x))

    def reference(self, x: Tensor) -> Tensor:
        return torch.nn.functional.softplus(x)


class OutputForInput(sf.Pointwise):
    """y = tanh(x), with a derivative that reads x instead of y."""

    reads = "output"
    value = square

    @triton.jit
    def derivative(y):
        return 1.0 - y * y

    def reference(self, x: Tensor) -> Tensor:
        return x.tanh()

    def derivative_reference(self, y: Tensor) -> Tensor:
        return 1 - y * y


class Power(sf.Pointwise):
    """y = |x|^n."""

    @triton.jit
    def value(x, P: tl.constexpr):
        return tl.exp(P[0] * tl.log(tl.abs(x)))

    @triton.jit
    def derivative(x, P: tl.constexpr):
        return tl.where(x < 0.0, -2.0, 2.0) * tl.exp((P[0] - 1.0) * tl.log(tl.abs(x)))

    def __init__(self, n: float) -> None:
        super().__init__()
        self.n = n

    @property
    def P(self) -> tuple[float, ...]:
        return (self.n,)

    def reference(self, x: Tensor) -> Tensor:
        return x.abs() ** self.n


class Learned(sf.Pointwise):
    """y = x weight^2; kernels do not take its weight."""

    value, derivative = square, twice

    class Saved(sf.Saved):
        x: Tensor
        weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(2.0))

    def reference(self, x: Tensor) -> Tensor:
        return x * self.weight**2

    def fwd(self, x: Tensor) -> tuple[Tensor, sf.Saved]:
        return self.reference(x), self.Saved(x=x, weight=self.weight)

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[Tensor | None, sf.Grads]:
        dx = dy * saved.weight**2 if "x" in needs else None
        return dx, {
            "weight": (2.0 * dy * saved.x).sum(dtype=torch.float32) * saved.weight if "weight" in needs else None
        }


@pytest.mark.parametrize(
    "op", [Right(), Selects(), sf.Gated(Right()), ops.SquaredReLU(), ops.Tanh(), ops.GEGLU(), ops.Bias(8)], ids=str
)
def test_right_ones_pass(op: sf.UnfusedOperation, device: torch.device) -> None:
    assert check_op(op.to(device), X.to(device)).skipped == ()


@pytest.mark.parametrize(
    ("act", "case", "tensor"),
    [
        (WrongDerivative(), "normal: derivative differs from bwd", "d_x: max"),
        (WrongValue(), "normal: value differs from fwd", "y: max"),
        (SwallowsNaN(), "one_nan: value differs from fwd", r"y: structure.*\(x holds a NaN here, and .* passes it on"),
        (DerivativeSwallowsNaN(), "one_nan: derivative differs from bwd", "d_x: structure"),
        (
            Multiplies(),
            # Where the one NaN of dy is on a clamped element, an earlier check finds the same.
            "normal, dy (infinite: d_x: nan|one_nan: derivative differs from bwd)",
            r"(where the operations give 0\n  \(every dy is Inf here, and Inf \* 0 is NaN: .*tl.where|d_x: structure)",
        ),
        (Overflows(), "(huge: y: inf|heavy: value differs)", "(where the operations give|y: structure)"),
        (OutputForInput(), "normal: value differs from fwd", "y: max"),
        (Power(3.0), "normal: (derivative differs from bwd|value differs from fwd)", "d_x: max"),
    ],
    ids=lambda given: type(given).__name__ if isinstance(given, sf.Pointwise) else "",
)
def test_wrong_ones_are_caught_with_case_and_tensor(
    act: sf.Pointwise, case: str, tensor: str, device: torch.device
) -> None:
    for op, name in ((act, type(act).__name__), (sf.Gated(act), f"Gated, activation {type(act).__name__}")):
        expected = rf"(?s){name}: value and derivative, float32, x \(33, 8\), {case}.*{tensor}"
        with pytest.raises(AssertionError, match=expected):
            check_op(op, X.to(device))


class RaisingValue(Square):
    derivative = twice

    @triton.jit
    def value(x):
        return tl.no_such_function(x)


class RaisingDerivative(Square):
    value = square

    @triton.jit
    def derivative(x):
        return tl.no_such_function(x)


@pytest.mark.parametrize(("act", "name"), [(RaisingValue(), "value"), (RaisingDerivative(), "derivative")])
def test_one_that_raises_is_named_and_not_the_fusion_that_calls_it(
    act: sf.Pointwise, name: str, device: torch.device
) -> None:
    with pytest.raises(AssertionError, match=rf"(?s)normal: {name} raised .*no_such_function") as caught:
        check_op(act, X.to(device), dtypes=(torch.float32,))
    assert "DeviceFunctions" not in str(caught.value)
    assert "unfused" not in str(caught.value)


def test_half_dtypes_are_compared_too(device: torch.device) -> None:
    with pytest.raises(AssertionError, match=r"WrongDerivative: value and derivative, float16, x \(33, 8\), normal"):
        check_op(WrongDerivative(), X.to(device), dtypes=(torch.float16,))


def test_functions_that_no_kernel_takes_are_not_checked_and_it_says_so(device: torch.device) -> None:
    found = check_op(Learned().to(device), X.to(device), dtypes=(torch.float32,))
    assert found.skipped == (
        "value and derivative were not checked: Learned has parameters, which device functions do not see",
    )
