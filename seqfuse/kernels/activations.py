# pyright: basic, reportGeneralTypeIssues=false
# Device functions are in Triton's language, which has no types.
"""Activations as device functions: a value and a derivative each, in the dtype of their input (float32 in kernels).

`value(x)` reads the input; `derivative(t)` reads the input or the output, as `reads` defines, and returns a factor of
dy. A derivative that selects, as ReLU's, is `derivative(dy, t)` and returns dx: where it is off, dx is 0 even if dy is
Inf or NaN, whose product with 0 is NaN. With configuration numbers the next parameter is `P`, a tuple fixed at compile
time. A function that is cheaper if its result is rounded to 16 bits has a constexpr `HALF` at the end. NaN is returned
where torch returns NaN.
"""

from __future__ import annotations

import functools
import re
from typing import Any, Literal, NamedTuple

import triton
import triton.language as tl
from triton.language.extra import libdevice

from ._launch import INTERPRETED
from ._operators import TEXTS, Text

_INTERPRETED = tl.constexpr(INTERPRETED)


class Activation(NamedTuple):
    """Two device functions and their configuration; any object with these attributes can be used."""

    value: Any
    derivative: Any
    reads: Literal["input", "output"] = "input"
    P: tuple[Any, ...] = ()


def activation_name(activation: Any) -> str:
    """The name in tables and errors: of the function, or of the class that defines it, with the numbers."""
    if parts := _composed_of(activation):
        return "+".join(map(activation_name, parts))
    function = getattr(activation.value, "fn", activation.value)
    name = getattr(function, "__qualname__", "function").removesuffix(".value").rpartition(".")[2]
    return name + (str(list(activation.P)) if activation.P else "")


@triton.constexpr_function
def _arguments(function):
    return len(function.arg_names) - (function.arg_names[-1] == "HALF")


@triton.constexpr_function
def _has_half(function):
    return function.arg_names[-1] == "HALF"


@triton.constexpr_function
def is_half(*dtypes):
    """Whether each of the element types given has 16 bits."""
    return all(dtype.primitive_bitwidth == 16 for dtype in dtypes)


@triton.constexpr_function
def _selects(function):
    return function.arg_names[0] == "dy"


@triton.constexpr_function
def _any_selects(parts):
    return any(derivative.arg_names[0] == "dy" for _, derivative, _, _ in parts)


@triton.constexpr_function
def _length(numbers):
    return len(numbers)


@triton.constexpr_function
def entry(constants, *at):
    """`constants[i][j]` of nested tuples, as a constexpr, which Triton's own subscript does not return."""
    for i in at:
        constants = constants[i]
    return constants


@triton.jit
def apply(FUNCTION: tl.constexpr, x, P: tl.constexpr, HALF: tl.constexpr = False):  # pyright: ignore[reportArgumentType]
    """A device function of x, with `P` if it has that parameter; from a tuple of tuples, `entry(PS, i)`."""
    if _has_half(FUNCTION):
        if _arguments(FUNCTION) == 1:
            return FUNCTION(x, HALF)
        else:
            return FUNCTION(x, P, HALF)
    elif _arguments(FUNCTION) == 1:
        return FUNCTION(x)
    else:
        return FUNCTION(x, P)


@triton.jit
def gradient(DERIVATIVE: tl.constexpr, dy, t, P: tl.constexpr, HALF: tl.constexpr = False):  # pyright: ignore[reportArgumentType]
    """Apply a derivative to dy: multiply by it, or call a derivative that returns dx."""
    if not _selects(DERIVATIVE):
        return dy * apply(DERIVATIVE, t, P, HALF)
    elif _has_half(DERIVATIVE):
        return DERIVATIVE(dy, t, P, HALF)
    elif _arguments(DERIVATIVE) == 2:
        return DERIVATIVE(dy, t)
    else:
        return DERIVATIVE(dy, t, P)


@triton.jit
def exponential(x, HALF: tl.constexpr):
    """exp(x), to about a unit in the last place of float32, unless it is rounded to 16 bits.

    For negative x on an H100, `tl.exp` is off by 0.11 |x| - 0.42 units on average, which is visible in sums of many.
    """
    if HALF or _INTERPRETED:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


@triton.jit
def power(x, BASE_2: tl.constexpr, HALF: tl.constexpr):
    """2^x if BASE_2, else `exponential`."""
    if BASE_2:
        return tl.exp2(x)
    return exponential(x, HALF)


@triton.jit
def sigmoid_and_slope(z, HALF: tl.constexpr):
    """Both s = sigmoid(z) and s (1 - s), which is exp(-|z|) / (1 + exp(-|z|))^2 without the cancellation of 1 - s."""
    q = exponential(-tl.abs(z), HALF)
    r = 1.0 / (1.0 + q)
    return tl.where(z < 0.0, q * r, r), q * r * r


@triton.jit
def identity(x):
    """Identity: y = x."""
    return x


@triton.jit
def identity_derivative(x):
    """dy/dx = 1."""
    return tl.zeros_like(x) + 1.0


@triton.jit
def relu(x):
    """ReLU: y = max(x, 0); NaN stays NaN."""
    return tl.where(x <= 0.0, 0.0, x)


@triton.jit
def relu_derivative(dy, y):
    """The gradient: dx = 0 where y <= 0, else dy."""
    return tl.where(y <= 0.0, 0.0, dy)


@triton.jit
def squared_relu(x):
    """Squared ReLU: y = max(x, 0)^2."""
    r = tl.where(x <= 0.0, 0.0, x)
    return r * r


@triton.jit
def squared_relu_derivative(dy, x):
    """The gradient: dx = 0 where x <= 0, else 2 x dy."""
    return tl.where(x <= 0.0, 0.0, dy * (2.0 * x))


@triton.jit
def sigmoid(x, HALF: tl.constexpr = False):  # pyright: ignore[reportArgumentType]
    """Sigmoid: y = 1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + exponential(-x, HALF))


@triton.jit
def sigmoid_derivative(y):
    """dy/dx = y (1 - y)."""
    return y * (1.0 - y)


@triton.jit
def tanh(x, HALF: tl.constexpr = False):  # pyright: ignore[reportArgumentType]
    """Hyperbolic tangent: y = tanh(x).

    Below 0.625, where 1 - exp(-2 x) would cancel, it is the rational function of Cephes (tanh.c).
    """
    z = x * x
    p = (z * -9.64399179425052238628e-1 - 9.92877231001918586564e1) * z - 1.61468768441708447952e3
    q = ((z + 1.12811678491632931402e2) * z + 2.23548839060100448583e3) * z + 4.84406305325125486048e3
    near = x + x * z * (p / q)
    # exp of a negative number does not overflow, and the number subtracted from 1 is small, so 1 - y keeps its digits.
    e = exponential(-2.0 * tl.abs(x), HALF)
    size = 1.0 - 2.0 * e / (1.0 + e)
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0.0, -size, size))


@triton.jit
def tanh_derivative(y):
    """dy/dx = 1 - y^2."""
    return (1.0 - y) * (1.0 + y)


@triton.jit
def silu(x, HALF: tl.constexpr = False):  # pyright: ignore[reportArgumentType]
    """SiLU: y = x sigmoid(x)."""
    return x * sigmoid(x, HALF)


@triton.jit
def silu_derivative(x, HALF: tl.constexpr = False):  # pyright: ignore[reportArgumentType]
    """dy/dx = s + x s (1 - s), s = sigmoid(x)."""
    s, slope = sigmoid_and_slope(x, HALF)
    return s + x * slope


@triton.jit
def quickgelu(x, HALF: tl.constexpr = False):  # pyright: ignore[reportArgumentType]
    """QuickGeLU: y = x sigmoid(1.702 x)."""
    return x * sigmoid(1.702 * x, HALF)


@triton.jit
def quickgelu_derivative(x, HALF: tl.constexpr = False):  # pyright: ignore[reportArgumentType]
    """dy/dx = s + 1.702 x s (1 - s), s = sigmoid(1.702 x)."""
    s, slope = sigmoid_and_slope(1.702 * x, HALF)
    return s + x * slope * 1.702


@triton.jit
def _normal_tail(x):
    """Phi(-|x|) = exp(-x^2 / 2) p(t), t = 1 / (1 + 0.31 |x|), and exp(-x^2 / 2).

    p is the polynomial of least relative error, 4.7e-6, up to 14 standard deviations. For every finite 16-bit number
    GeLU is then off by at most 0.021 of a rounding to float16 and 0.003 of one to bfloat16. A reciprocal square root is
    one instruction, a quotient eight.
    """
    d = 1.0 + 0.31 * tl.abs(x)
    t = tl.math.rsqrt(d * d)
    s = t * t
    p = (t * -0.07392913768100423 + 0.1804503368820377) * s + (t * 0.01574472020634031 + 0.13342978068451025)
    p = p * s + (t * 0.12044127647962588 + 0.12386070226973748)
    e = tl.exp2(x * x * -0.7213475204444817)
    return e * (p * t), e


@triton.jit
def gelu(x, HALF: tl.constexpr = False):  # pyright: ignore[reportArgumentType]
    """GeLU: y = x Phi(x), Phi(x) = (1 + erf(x / sqrt(2))) / 2."""
    if HALF:
        q, _ = _normal_tail(x)
        return x * tl.where(x < 0.0, q, 1.0 - q)
    else:
        return x * (0.5 * (1.0 + tl.erf(x * 0.7071067811865476)))


@triton.jit
def gelu_derivative(x, HALF: tl.constexpr = False):  # pyright: ignore[reportArgumentType]
    """dy/dx = Phi(x) + x phi(x), phi(x) = exp(-x^2 / 2) / sqrt(2 pi)."""
    if HALF:
        q, e = _normal_tail(x)
        return tl.where(x < 0.0, q, 1.0 - q) + x * (0.3989422804014327 * e)
    else:
        phi = 0.3989422804014327 * exponential(-0.5 * x * x, False)
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * phi


@triton.jit
def gelu_tanh(x, HALF: tl.constexpr = False):  # pyright: ignore[reportArgumentType]
    """GeLU by tanh: y = x (1 + tanh(u)) / 2 = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x), HALF)


@triton.jit
def gelu_tanh_derivative(x, HALF: tl.constexpr = False):  # pyright: ignore[reportArgumentType]
    """dy/dx = s + x s (1 - s) 2 u', s = sigmoid(2 u), u' = sqrt(2 / pi) (1 + 3 0.044715 x^2)."""
    s, slope = sigmoid_and_slope(1.5957691216057308 * (x + 0.044715 * x * x * x), HALF)
    return s + x * slope * (1.5957691216057308 * (1.0 + 0.134145 * x * x))


@triton.jit
def clamped_silu(x, P, HALF: tl.constexpr = False):  # pyright: ignore[reportArgumentType]
    """SiLU of min(x, P[0]): y = c sigmoid(P[1] c), c = min(x, P[0]); NaN stays NaN."""
    c = tl.where(x > P[0], P[0], x)
    return c * sigmoid(P[1] * c, HALF)


@triton.jit
def clamped_silu_derivative(dy, x, P, HALF: tl.constexpr = False):  # pyright: ignore[reportArgumentType]
    """The gradient: dx = dy (s + P[1] x s (1 - s)), s = sigmoid(P[1] x), where x < P[0], or x = P[0] if P[2] is 1; else
    0.
    """
    s, slope = sigmoid_and_slope(P[1] * x, HALF)
    return tl.where((x < P[0]) | ((x == P[0]) & (P[2] > 0.0)), dy * (s + x * slope * P[1]), 0.0)


@triton.jit
def clamp(x, P):
    """Clamp to -P[0]..P[0], then shift: y = min(max(x, -P[0]), P[0]) + P[1]; NaN stays NaN."""
    return tl.where(x > P[0], P[0], tl.where(x < -P[0], -P[0], x)) + P[1]


@triton.jit
def clamp_derivative(dy, x, P):
    """The gradient: dx = dy where |x| < P[0], or |x| = P[0] if P[2] is 1; else 0."""
    size = tl.abs(x)
    return tl.where((size < P[0]) | ((size == P[0]) & (P[2] > 0.0)), dy, 0.0)


@triton.jit
def scaled(x, P):
    """Constant factor: y = P[0] x."""
    return P[0] * x


@triton.jit
def scaled_derivative(x, P):
    """dy/dx = P[0]."""
    return tl.zeros_like(x) + P[0]


def constant_factor(factor: float) -> Activation:
    """A constant factor, y = factor x."""
    return Activation(scaled, scaled_derivative, P=(float(factor),))


@triton.jit
def _composed(x, P: tl.constexpr, HALF: tl.constexpr = False):  # pyright: ignore[reportArgumentType]
    for i in tl.static_range(_length(P)):
        x = apply(entry(P, i, 0), x, entry(P, i, 3), HALF)
    return x


@triton.jit
def _composed_derivative(dy, x, P: tl.constexpr, HALF: tl.constexpr = False):  # pyright: ignore[reportArgumentType]
    """The product of dy and all derivatives, each at the input or output of its own function.

    If a derivative selects and is off, dy and the derivatives of later functions do not count: the product ends there.
    """
    one = tl.zeros_like(x) + 1.0
    slope, off = one, one < 0.0
    for i in tl.static_range(_length(P)):
        y = apply(entry(P, i, 0), x, entry(P, i, 3), HALF)
        if entry(P, i, 2):
            factor = gradient(entry(P, i, 1), one, y, entry(P, i, 3), HALF)
        else:
            factor = gradient(entry(P, i, 1), one, x, entry(P, i, 3), HALF)
        if _any_selects(P):
            slope = tl.where(off, slope, slope * factor)
        else:
            slope *= factor
        if _selects(entry(P, i, 1)):
            off = off | (factor == 0.0)
        x = y
    if _any_selects(P):
        return tl.where(off, slope, dy * slope)
    else:
        return dy * slope


def composed(*activations: Any) -> Any:
    """Several activations as one that reads its input, y = f_n(... f_1(x)); it can be used like a single one."""
    if len(activations) == 1:
        return activations[0]
    several = [part for a in activations for part in _composed_of(a) or [a]]
    parts = tuple((a.value, a.derivative, a.reads == "output", tuple(a.P)) for a in several)
    return Activation(_composed, _composed_derivative, P=parts)


def is_composed(activation: Any) -> bool:
    """Whether the activation is composed of several."""
    return activation.value is _composed


def _composed_of(activation: Any) -> list[Activation]:
    """The activations of a composed activation, otherwise none."""
    if not is_composed(activation):
        return []
    return [Activation(f, df, "output" if of_output else "input", P) for f, df, of_output, P in activation.P]


ACTIVATIONS = {
    "identity": Activation(identity, identity_derivative),
    "relu": Activation(relu, relu_derivative, "output"),
    "squared_relu": Activation(squared_relu, squared_relu_derivative),
    "sigmoid": Activation(sigmoid, sigmoid_derivative, "output"),
    "tanh": Activation(tanh, tanh_derivative, "output"),
    "silu": Activation(silu, silu_derivative),
    "quickgelu": Activation(quickgelu, quickgelu_derivative),
    "gelu": Activation(gelu, gelu_derivative),
    "gelu_tanh": Activation(gelu_tanh, gelu_tanh_derivative),
    "clamped_silu": Activation(clamped_silu, clamped_silu_derivative, P=(7.0, 1.702, 1.0)),
    "clamp": Activation(clamp, clamp_derivative, P=(7.0, 1.0, 1.0)),
}
"""Our activations by name."""

# By name, without numbers, of which there may be new ones in each step of a training.
_FUNCTIONS: dict[str, Activation] = {}


def activation_text(activation: Any) -> str:
    """The string that represents an activation in a custom op's arguments; ours are represented by their names.

    The functions of any other activation are registered by name in this process.
    """
    parts = _parts(activation)
    for name, known in ACTIVATIONS.items():
        if _parts(known) == parts:
            return name
    value, derivative, reads, numbers = _fields(activation)
    function, inner = getattr(value, "fn", value), _composed_of(activation)
    arguments = ",".join(
        map(activation_text, inner) if inner else [repr(n.item() if hasattr(n, "item") else n) for n in numbers]
    )
    name, suffix, count = f"{function.__module__}.{function.__qualname__}", "", 1
    # Two functions with one name, as in a notebook, get different strings.
    while _parts(_FUNCTIONS.setdefault(name + suffix, Activation(value, derivative, reads)))[:3] != parts[:3]:
        count += 1
        suffix = f"#{count}"
    return f"{name}({arguments}){suffix}"


@functools.lru_cache(1024)
def activation_of(text: str) -> Any:
    """The activation that a string represents.

    Raises:
        ValueError: for a string whose functions are not registered in this process.
    """
    if text in ACTIVATIONS:
        return ACTIVATIONS[text]
    found = re.fullmatch(r"([^(]+)\((.*)\)(#\d+)?", text)
    known = None if found is None else _FUNCTIONS.get(found[1] + (found[3] or ""))
    if found is None or known is None:
        raise ValueError(f"{text!r} is not an activation of this process; known are {', '.join(ACTIVATIONS)}")
    arguments = _divided(found[2])
    if is_composed(known):
        return composed(*map(activation_of, arguments))
    return known._replace(P=tuple([_number(argument) for argument in arguments]))


def _divided(text: str) -> list[str]:
    """The parts of a text between commas that are not in parentheses."""
    found, depth = [""] if text else [], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return found


def _number(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    return int(text) if re.fullmatch(r"-?\d+", text) else float(text)


TEXTS[Activation] = Text(activation_text, activation_of, "(id({0}.value), id({0}.derivative), {0}.reads, {0}.P)")


def _fields(activation: Any) -> tuple[Any, Any, Any, tuple[Any, ...]]:
    return activation.value, activation.derivative, activation.reads, tuple(activation.P)


def _parts(activation: Any) -> tuple[Any, ...]:
    # Functions by identity, because their hash is the hash of their source.
    value, derivative, reads, numbers = _fields(activation)
    return id(value), id(derivative), reads, numbers
