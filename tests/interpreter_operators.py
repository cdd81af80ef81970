"""Operators of interpreted kernels on two operands of one type, which call numpy at once.

The tests of kernels take half the time by them; numbers are those of Triton's own operators.
"""

# pyright: basic, reportGeneralTypeIssues=false
# The parts replaced have no types.
from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

_NUMBERS = frozenset(("fp16", "fp32", "fp64", "int32", "int64"))
_INTEGERS = frozenset(("int1", "int32", "int64"))
_FLOATS = frozenset(("fp32", "fp64"))
_ARITHMETIC = {"add": _NUMBERS, "sub": _NUMBERS, "mul": _NUMBERS, "truediv": _FLOATS}
_COMPARED = dict.fromkeys(("lt", "le", "gt", "ge", "eq", "ne"), _NUMBERS)
_OPERATORS = {**_ARITHMETIC, **_COMPARED, "and_": _INTEGERS, "or_": _INTEGERS}


def operators(interpreter: Any) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Methods of `tl.tensor` by name, each made of the one it stands for, which it calls for whatever is not frequent:
    operands whose numbers are stored as bits or without a sign, and constants that the other's type does not hold.
    """
    import numpy as np
    import triton.language.core as core

    tensor: Any = core.tensor
    constexpr, pointer_type, handle = core.constexpr, core.pointer_type, interpreter.TensorHandle
    semantic, bool_type = interpreter.interpreter_semantic, core.int1
    numbers: dict[str, Any] = {"fp32": np.float32, "int32": np.int32, "int64": np.int64}
    joined: dict[tuple[int, int], tuple[Any, ...]] = {}
    sliced: dict[tuple[int, ...], tuple[Any, Any]] = {}
    block_type, every = core.block_type, slice(None)

    def join(self: Any, other: Any) -> Any:
        """The type of the result, of a comparison, numpy's where operands are converted, and both types, kept alive."""
        key = id(self.type), id(other.type)
        found = joined.get(key)
        if found is None:
            shaped, one, two = semantic.broadcast_impl_value(self, other)[0].type, self.dtype, other.dtype
            converted = None
            if one.__class__ is not pointer_type and one != two:
                kind = semantic.computation_type_impl(one, False, two, False, False)
                shaped, converted = shaped.with_element_ty(kind), interpreter._get_np_dtype(kind)
            found = joined[key] = shaped, shaped.with_element_ty(bool_type), converted, self.type, other.type
        return found

    def constant(kind: Any, value: Any) -> Any:
        number = numbers.get(kind.name)
        if number is None:
            return None
        if value.__class__ is int:
            return number(value) if -(2**24) <= value <= 2**24 else None
        if value.__class__ is not float or kind.name != "fp32":
            return None
        return number(value or 0.0) if value == 0 or 1e-30 < abs(value) < 1e30 else None

    def quick(function: Any, kinds: frozenset[str], compares: bool, turned: bool) -> Callable[[Any], Any]:
        def of(slow: Any) -> Any:
            def method(self: Any, other: Any) -> Any:
                if self.dtype.name not in kinds:
                    return slow(self, other)
                if other.__class__ is constexpr:
                    other = other.value
                if other.__class__ is tensor and other.dtype.name in kinds:
                    result, truth, converted, *_ = join(self, other)
                    left, right = self.handle.data, other.handle.data
                    if converted is not None:
                        left, right = left.astype(converted, copy=False), right.astype(converted, copy=False)
                elif (right := constant(self.dtype, other)) is not None:
                    left, result = self.handle.data, self.type
                    truth = join(self, self)[1] if compares else None
                else:
                    return slow(self, other)
                data = function(right, left) if turned else function(left, right)
                return (
                    tensor(handle(data, bool_type), truth) if compares else tensor(handle(data, result.scalar), result)
                )

            return method

        return of

    for name, kinds in _OPERATORS.items():
        function, plain = getattr(operator, name), name.rstrip("_")
        yield f"__{plain}__", quick(function, kinds, name in _COMPARED, False)
        if name in _ARITHMETIC:
            yield f"__r{plain}__", quick(function, kinds, False, True)

    def add_to(slow: Any) -> Any:
        def method(self: Any, other: Any) -> Any:
            if self.dtype.__class__ is pointer_type and other.__class__ is tensor and other.dtype.name in _INTEGERS:
                size = max(1, self.dtype.element_ty.primitive_bitwidth // 8)
                data = self.handle.data + other.handle.data.astype(np.uint64) * np.uint64(size)
                return tensor(handle(data, self.dtype), join(self, other)[0])
            return slow(self, other)

        return method

    def new_axes(slow: Any) -> Any:
        def method(self: Any, slices: Any) -> Any:
            kind = self.type
            if kind.__class__ is not block_type or slices.__class__ is not tuple:
                return slow(self, slices)
            key = id(kind), *[axis is None for axis in slices]
            found = sliced.get(key)
            if found is None or any(axis not in (None, every) for axis in slices):
                result = slow(self, slices)
                sliced[key] = result.type, kind
                return result
            return tensor(handle(self.handle.data[slices], self.dtype), found[0])

        return method

    yield "__add__", add_to
    yield "__getitem__", new_axes
