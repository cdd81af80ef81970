# pyright: basic
# Device functions are in Triton's language, which has no types.
"""Device functions in C: each is traced, that is, called with symbolic numbers that record its operations.

The functions are plain Python below their decorator, so calling them needs no parser: while they run, only `tl` and the
device functions that they call are replaced.
"""

from __future__ import annotations

import dis
import functools
import inspect
import math
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import triton.language as tl

from .. import activations


class Untraceable(ValueError):
    """A device function has an operation that cannot be written in C."""


class Lines:
    """The statements of one pass through a loop; a repeated expression is computed once."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._known: dict[tuple[str, str], Number] = {}

    def number(self, expression: str, kind: str = "float") -> Number:
        """The number that a C expression computes."""
        key = expression, kind
        if key not in self._known:
            self._known[key] = Number(self, f"t{len(self._known)}", kind)
            self.lines.append(f"const {kind} {self._known[key].name} = {expression};")
        return self._known[key]

    def add(self, statement: str) -> None:
        """Add a statement, such as a store."""
        self.lines.append(statement)


def literal(value: Any) -> str:
    """A C literal of exactly this number, or the name of a symbolic one."""
    value = getattr(value, "value", value) if isinstance(value, tl.constexpr) else value
    if isinstance(value, Number):
        return value.name
    if isinstance(value, bool):
        return str(int(value))
    if not isinstance(value, int | float):
        _refuse(f"it computes with {value!r}")
    number = float(value)
    if math.isnan(number):
        return '__builtin_nanf("")'
    if math.isinf(number):
        return "__builtin_inff()" if number > 0 else "-__builtin_inff()"
    return f"({number!r}f)"


def _refuse(why: str) -> NoReturn:
    raise Untraceable(why)


def _infix(operator: str, kind: str = "float", swapped: bool = False, bits: bool = False) -> Callable[[Any, Any], Any]:
    def method(self: Number, other: Any) -> Number:
        for value in (self, other) if bits else ():
            if not isinstance(value, bool) and getattr(value, "kind", None) != "int":
                _refuse("it takes bits of a number")
        return self._with(other, operator, kind, swapped)

    return method


class Number:
    """A symbolic number in a device function: its operators record the operation."""

    dtype = tl.float32
    shape = ()

    def __init__(self, lines: Lines, name: str, kind: str = "float") -> None:
        self.of, self.name, self.kind = lines, name, kind

    def _with(self, other: Any, operator: str, kind: str = "float", swapped: bool = False) -> Number:
        a, b = self.name, literal(other)
        return self.of.number(f"{b} {operator} {a}" if swapped else f"{a} {operator} {b}", kind)

    __add__, __radd__ = _infix("+"), _infix("+", swapped=True)
    __sub__, __rsub__ = _infix("-"), _infix("-", swapped=True)
    __mul__, __rmul__ = _infix("*"), _infix("*", swapped=True)
    __lt__, __le__, __gt__, __ge__ = _infix("<", "int"), _infix("<=", "int"), _infix(">", "int"), _infix(">=", "int")
    __eq__, __ne__ = _infix("==", "int"), _infix("!=", "int")
    __and__, __or__, __xor__ = (_infix(sign, "int", bits=True) for sign in "&|^")

    def __truediv__(self, other: Any) -> Number:
        return self.to(tl.float32)._with(other, "/")  # two comparisons would be divided as integers

    def __rtruediv__(self, other: Any) -> Number:
        return self._with(other, "/", swapped=True)

    def __neg__(self) -> Number:
        return self.of.number(f"-{self.name}")

    def __invert__(self) -> Number:
        return self.of.number(f"!{self.name}", "int") if self.kind == "int" else _refuse("it takes bits of a number")

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __bool__(self) -> bool:
        raise Untraceable("it branches on a number; use tl.where")

    def __getattr__(self, name: str) -> Any:
        _refuse(f"it uses .{name}")

    def to(self, dtype: Any, *_: Any, **__: Any) -> Number:
        """The same number, because everything is computed in float32."""
        if dtype is tl.float32:
            return self.of.number(f"(float){self.name}") if self.kind == "int" else self
        return _refuse(f"it casts to {dtype}")


def _lines_of(*values: Any) -> Lines:
    for value in values:
        if isinstance(value, Number):
            return value.of
    return _refuse("it computes with constants alone")


def _call(function: str) -> Callable[..., Any]:
    def run(x: Any, *_: Any, **__: Any) -> Any:
        if not isinstance(x, Number):
            return _refuse(f"it calls {function} of a constant")
        return x.of.number(f"{function}({x.name})")

    return run


def _where(condition: Any, a: Any, b: Any) -> Any:
    if not isinstance(condition, Number):
        return a if condition else b
    return condition.of.number(f"{condition.name} ? {literal(a)} : {literal(b)}")


def _extreme(operator: str) -> Callable[..., Any]:
    def run(a: Any, b: Any, propagate_nan: Any = None) -> Any:
        a, b, of = literal(a), literal(b), _lines_of(a, b)
        if propagate_nan is tl.PropagateNan.ALL:
            return of.number(f"({a} {operator} {b} || {a} != {a}) ? {a} : {b}")
        # If one of them is NaN, the other one, as in Triton by default.
        return of.number(f"({a} {operator} {b} || {b} != {b}) ? {a} : {b}")

    return run


def _clamp(x: Any, low: Any, high: Any, propagate_nan: Any = None) -> Any:
    return _extreme("<")(_extreme(">")(x, low, propagate_nan), high, propagate_nan)


def _full(value: float) -> Callable[..., Any]:
    return lambda x, *_, **__: x.of.number(literal(value))


def _fma(x: Any, y: Any, z: Any) -> Any:
    return x * y + z


class _Language:
    """The functions of `triton.language` that have an equivalent in C."""

    exp, exp2, erf, abs = _call("exp_"), _call("exp2_"), _call("erf_"), _call("abs_")
    sqrt, sqrt_rn = _call("__builtin_sqrtf"), _call("__builtin_sqrtf")
    log, log2, sin, cos = _call("logf"), _call("log2f"), _call("sinf"), _call("cosf")
    floor, ceil = _call("__builtin_floorf"), _call("__builtin_ceilf")
    fma, where, clamp = _fma, _where, _clamp
    maximum, minimum = _extreme(">"), _extreme("<")
    zeros_like = _full(0.0)
    float32, PropagateNan = tl.float32, tl.PropagateNan
    static_range = range

    @staticmethod
    def rsqrt(x: Any) -> Any:
        return 1.0 / _Language.sqrt(x)

    @staticmethod
    def sigmoid(x: Any) -> Any:
        return 1.0 / (1.0 + _Language.exp(-x))

    @staticmethod
    def div_rn(x: Any, y: Any) -> Any:
        return x / y

    @staticmethod
    def constexpr(value: Any) -> Any:
        return value

    @staticmethod
    def cast(x: Any, dtype: Any, *_: Any, **__: Any) -> Any:
        return x.to(dtype)

    @property
    def math(self) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        _refuse(f"it uses tl.{name}" + ("" if hasattr(tl, name) else ", which Triton does not have"))


for _name, _value in list(vars(_Language).items()):
    if isinstance(_value, types.FunctionType) and not _name.startswith("__"):
        setattr(_Language, _name, staticmethod(_value))
_language = _Language()


@functools.cache
def _plain(function: Any) -> Callable[..., Any]:
    """A device function as Python, with `tl` and device functions replaced by those of this file."""
    plain = getattr(function, "fn", function)
    if not isinstance(plain, types.FunctionType):
        _refuse(f"{function!r} is not a device function")
    # Other names of its module are not kept alive, and not checked.
    _used[plain] = used = {
        name: plain.__globals__[name] for name in _names(plain.__code__) if name in plain.__globals__
    }
    around = {name: _replaced(value) for name, value in used.items()}
    cells = inspect.getclosurevars(plain).nonlocals
    closure = tuple(types.CellType(_replaced(cells[name])) for name in plain.__code__.co_freevars)
    return types.FunctionType(plain.__code__, around, plain.__name__, plain.__defaults__, closure or None)


def _names(code: types.CodeType) -> set[str]:
    """Names of its module that a function uses, including nested functions."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}.union(*inner)


# The values of names when a device function was traced.
_used: dict[Any, dict[str, Any]] = {}


def _stale(function: Any) -> str | None:
    """A name that a traced device function uses, directly or indirectly, and whose value has changed since."""
    plain = getattr(function, "fn", function)
    for name, before in _used.get(plain, {}).items():
        now = plain.__globals__.get(name)
        if now is not before and _constant(now) != _constant(before):
            return name
        if hasattr(now, "arg_names") and (deeper := _stale(now)):
            return deeper
    return None


def _constant(value: Any) -> Any:
    value = value.value if isinstance(value, tl.constexpr) else value
    return value if isinstance(value, int | float) else id(value)


def _replaced(value: Any) -> Any:
    if value is tl or value is tl.math:
        return _language
    if isinstance(value, tl.constexpr):
        return value.value
    if hasattr(value, "fn") and hasattr(value, "arg_names"):
        name = getattr(value.fn, "__name__", "")
        if getattr(tl, name, None) is value:
            return getattr(_language, name)
        return lambda *args, **kwargs: _plain(value)(*args, **kwargs)
    if callable(value) and (getattr(value, "__module__", None) or "").startswith("triton.language"):
        return getattr(_language, getattr(value, "__name__", ""))
    if isinstance(value, types.ModuleType) and value.__name__.startswith("triton."):
        return _Foreign(value.__name__)
    return value


# Functions of libdevice that have an equivalent in C.
_LIBDEVICE = ("abs", "ceil", "cos", "erf", "exp", "exp2", "floor", "log", "log2", "rsqrt", "sin", "sqrt")


class _Foreign:
    """Another module of Triton; of libdevice, functions that `triton.language` has as well have an equivalent in C."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if self._name.endswith("libdevice") and name in _LIBDEVICE:
            return getattr(_language, name)
        _refuse(f"it calls {self._name}.{name}")


def _gelu(x: Number) -> Number:
    return x * x.of.number(f"normal_({x.name})")


def _gelu_derivative(x: Number) -> Number:
    return x.of.number(f"gelu_slope_({x.name})")


# Device functions for which C has a formula with half as many steps.
_SHORTER: dict[Any, Callable[[Number], Number]] = {
    id(activations.gelu): _gelu,
    id(activations.gelu_derivative): _gelu_derivative,
}


def _arguments(function: Any) -> list[str]:
    names = list(function.arg_names)
    return names[:-1] if names[-1] == "HALF" else names  # one formula for all dtypes: HALF is False


def value_in_c(function: Any, x: Number, P: Any) -> Number:
    """`activations.apply` in C."""
    if function is activations._composed:
        for inner, _, _, numbers in P:
            x = value_in_c(inner, x, numbers)
        return x
    return _result(function, (x,) if len(_arguments(function)) == 1 else (x, P), x.of)


def gradient_in_c(derivative: Any, dy: Number, t: Number, P: Any) -> Number:
    """`activations.gradient` in C."""
    if derivative is activations._composed_derivative:
        return _composed_gradient(dy, t, P)
    names = _arguments(derivative)
    if names[0] != "dy":
        return dy * value_in_c(derivative, t, P)
    return _result(derivative, (dy, t) if len(names) == 2 else (dy, t, P), dy.of)


def _composed_gradient(dy: Number, x: Number, parts: Sequence[Any]) -> Number:
    """`activations._composed_derivative` in C."""
    selects = any(derivative.arg_names[0] == "dy" for _, derivative, _, _ in parts)
    one = x.of.number("1.0f")
    slope, off = one, None
    for value, derivative, of_output, numbers in parts:
        y = value_in_c(value, x, numbers)
        factor = gradient_in_c(derivative, one, y if of_output else x, numbers)
        slope = slope * factor if off is None else _where(off, slope, slope * factor)
        if derivative.arg_names[0] == "dy":
            zero = factor == 0.0
            off = zero if off is None else off | zero
        x = y
    return _where(off, slope, dy * slope) if selects else dy * slope


def _result(function: Any, arguments: tuple[Any, ...], of: Lines) -> Number:
    shorter = _SHORTER.get(id(function))
    result = _plain(function)(*arguments) if shorter is None else shorter(*arguments)
    if isinstance(result, Number) and result.kind == "float":
        return result
    return of.number(f"(float){literal(result)}")


@functools.lru_cache(1024)  # numbers may change in each step of a training
def _why_not(value: Any, derivative: Any, numbers: tuple[Any, ...]) -> str | None:
    for function, given in ((value, 1), (derivative, 2)):
        lines = Lines()
        try:
            x = lines.number("x")
            if given == 1:
                value_in_c(function, x, numbers)
            else:
                gradient_in_c(function, lines.number("dy"), x, numbers)
        except Exception as error:
            name = getattr(getattr(function, "fn", function), "__qualname__", "a device function")
            return f"{name} cannot be written in C: {error}"
    return None


def why_not(activation: Any) -> str | None:
    """Why an activation has no C kernel, or `None`."""
    reason = _why_not(activation.value, activation.derivative, tuple(activation.P))
    if reason is None:
        parts = activation.P if activation.value is activations._composed else ()
        for function in (activation.value, activation.derivative, *(f for part in parts for f in part[:2])):
            if name := _stale(function):
                return f"{name}, which {function.fn.__qualname__} uses, is not what it was when that was written in C"
    return reason
