"""Triton's interpreter with its bookkeeping done once per type, and operators on two operands of one type at once.

An interpreted kernel computes with numpy. Most of its time went into types of blocks, which are made anew for every
result, and into checks whose outcome nobody reads. Here types are made once, those checks are left out, and casts and
operators call numpy at once: the tests of kernels take a fifth of the time. Numbers are those of Triton's own.
"""

# pyright: basic, reportGeneralTypeIssues=false
# The parts replaced have no types.
from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

_NUMBERS = frozenset(("fp16", "fp32", "fp64", "int32", "int64"))
_INTEGERS = frozenset(("int1", "int32", "int64"))
_FLOATS = frozenset(("fp32", "fp64"))
_ARITHMETIC = {"add": _NUMBERS, "sub": _NUMBERS, "mul": _NUMBERS, "truediv": _FLOATS}
_COMPARED = dict.fromkeys(("lt", "le", "gt", "ge", "eq", "ne"), _NUMBERS)
_OPERATORS = {**_ARITHMETIC, **_COMPARED, "and_": _INTEGERS, "or_": _INTEGERS}
_KNOWN = frozenset(("fp32", "fp64", "int32", "int64", "uint32", "uint64"))
_CASTS = frozenset((source, target) for source in ("int1", *_KNOWN) for target in _KNOWN) | {
    ("fp16", "fp32"), ("fp32", "fp16"), ("fp16", "fp64"), ("fp64", "fp16"),
}  # fmt: skip
"""Conversions that numpy does as they are."""
_ROUNDED = frozenset(pair for one in ("bf16", "fp8e4nv", "fp8e5") for pair in ((one, "fp32"), ("fp32", one)))


@functools.cache
def replacements(interpreter: Any) -> list[tuple[Any, str, Any]]:
    """The parts of Triton to replace: owner, name, and what stands in its place. Types are made once for all blocks."""
    return [*_launches(interpreter), *_replacements(interpreter)]


@functools.cache
def methods(interpreter: Any) -> list[tuple[str, Callable[[Any], Any]]]:
    """Methods of `tl.tensor` by name, each made of the one it stands for, which it calls for whatever is not frequent:
    operands whose numbers are stored as bits or without a sign, and constants that the other's type does not hold.
    """
    return [*_methods(interpreter)]


def _launches(interpreter: Any) -> Iterator[tuple[Any, str, Any]]:
    """What a launch asks of a kernel, once for each kernel."""
    import numpy as np
    import triton.language.core as core

    executors: dict[Any, Any] = {}
    specification, kinds, convert = functools.cache(inspect.getfullargspec), dict[Any, Any](), interpreter._implicit_cvt

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        if warmup:
            return
        if self not in executors:
            executors[self] = interpreter.GridExecutor(self.rewrite(), self.arg_names, grid, self.pre_run_hooks)
        executors[self].grid = grid
        executors[self](*args, **named)

    def getcallargs(function: Any, *args: Any, **named: Any) -> dict[str, Any]:
        names, defaults = specification(function).args, specification(function).defaults or ()
        given = dict(zip(names, args, strict=False))
        found = {**dict(zip(names[len(names) - len(defaults) :], defaults, strict=True)), **given, **named}
        if len(args) > len(names) or given.keys() & named.keys() or len(found) != len(names):
            return inspect.getcallargs(function, *args, **named)
        return found

    def implicit_cvt(arg: Any) -> Any:
        if arg.__class__ is int and -(2**31) <= arg < 2**31:
            data, kind = np.array([arg], np.int32), core.int32
        elif arg.__class__ is torch.Tensor:
            kind = kinds.get(arg.dtype)
            if kind is None:
                kind = kinds[arg.dtype] = convert(arg).type
            data = np.array([arg.data_ptr()], np.uint64)
        else:
            return convert(arg)
        return core.tensor(interpreter.TensorHandle(data, kind), kind)

    yield interpreter.InterpretedFunction, "run", run
    quick = {"getfullargspec": specification, "getcallargs": getcallargs}
    yield interpreter, "inspect", types.SimpleNamespace(**{**vars(inspect), **quick})
    yield interpreter, "_implicit_cvt", implicit_cvt


@functools.cache
def _numbers() -> dict[str, Any]:
    import numpy as np

    return {"fp32": np.float32, "int32": np.int32, "int64": np.int64}


@functools.cache
def _maker(interpreter: Any) -> Callable[[Any, Any], Any]:
    """`made(data, type)`: a tensor of a known type, without calls of constructors."""
    import triton.language.core as core

    new, tensor, handle = object.__new__, core.tensor, interpreter.TensorHandle

    def made(data: Any, kind: Any) -> Any:
        known = kind.__dict__.get("_of_its_tensors")
        if known is None:
            return tensor(handle(data, kind.scalar), kind)
        one, its = new(tensor), new(handle)
        one.shape, one.numel, one.dtype = known
        one.handle, one.type = its, kind
        its.data, its.dtype, its.attr = data, one.dtype, {}
        return one

    return made


def _constant(kind: Any, value: Any) -> Any:
    """A Python number in a tensor's type, where Triton computes in that type; else None."""
    number = _numbers().get(kind.name)
    if number is None:
        return None
    if value.__class__ is int:
        return number(value) if -(2**24) <= value <= 2**24 else None
    if value.__class__ is not float or kind.name != "fp32":
        return None
    return number(value or 0.0) if value == 0 or 1e-30 < abs(value) < 1e30 else None


def _replacements(interpreter: Any) -> Iterator[tuple[Any, str, Any]]:
    import numpy as np
    import triton.language.core as core
    from triton.language import random

    constexpr, block_type, pointer_type = core.constexpr, core.block_type, core.pointer_type

    numpy_dtype, numpy_dtypes = interpreter._get_np_dtype, {}

    def get_np_dtype(kind: Any) -> Any:
        scalar = kind.element_ty if kind.__class__ is block_type else kind
        name = "pointer" if scalar.__class__ is pointer_type else scalar.name
        found = numpy_dtypes.get(name)
        if found is None:
            found = numpy_dtypes[name] = numpy_dtype(kind)
        return found

    equal = core.dtype.__eq__

    def same_type(self: Any, other: Any) -> bool:
        return self is other or equal(self, other)

    make_block, blocks = block_type.__init__, {}

    def new_block(cls: Any, element_ty: Any, shape: Any) -> Any:
        sizes = tuple([size if size.__class__ is int else core._unwrap_if_constexpr(size) for size in shape])
        # A pointer's name omits its address space.
        key = element_ty.name, getattr(element_ty, "address_space", None), sizes
        found = blocks.get(key)
        if found is None:
            found = object.__new__(cls)
            make_block(found, element_ty, [*sizes])
            blocks[key] = found
        return found

    make_tensor, made = core.tensor.__init__, _maker(interpreter)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        known = type.__dict__.get("_of_its_tensors")
        if known is None:
            make_tensor(self, handle, type)
            type._of_its_tensors = self.shape, self.numel, self.dtype
        else:
            self.handle, self.type = handle, type
            self.shape, self.numel, self.dtype = known

    unwrap, plain = core._unwrap_if_constexpr, {int, float, bool, str, type(None), core.tensor, core.dtype}

    def unwrap_if_constexpr(o: Any) -> Any:
        kind = o.__class__
        return o.value if kind is constexpr else o if kind in plain else unwrap(o)

    semantic, handle = type(interpreter.interpreter_semantic), interpreter.TensorHandle
    broadcast, broadcasts, others = semantic.broadcast_impl_value, dict[Any, Any](), dict[Any, Any]()

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        blocks = lhs.type.__class__ is block_type
        if blocks is not (rhs.type.__class__ is block_type):
            return (lhs, filled(lhs.type, rhs)) if blocks else (filled(rhs.type, lhs), rhs)
        if not blocks or lhs.type.shape.values == rhs.type.shape.values:
            return lhs, rhs
        key = id(lhs.type), id(rhs.type)
        found = broadcasts.get(key)
        if found is None:
            both = broadcast(self, lhs, rhs)
            broadcasts[key] = *(one.type for one in both), lhs.type, rhs.type
            return both
        return expanded(lhs, found[0]), expanded(rhs, found[1])

    def filled(like: Any, one: Any) -> Any:
        """A block of the shape of another, of one number."""
        data = np.empty(like.shape.values, get_np_dtype(one.dtype))
        data[...] = one.handle.data
        return made(data, with_element_ty(like, one.dtype))

    def expanded(one: Any, kind: Any) -> Any:
        if one.type is kind:
            return one
        return made(np.broadcast_to(one.handle.data, kind.shape.values), kind)

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        key = id(self), id(scalar_ty)
        found = others.get(key)
        if found is None:
            found = others[key] = block_type(scalar_ty, self.shape), self, scalar_ty
        return found[0]

    wrapper = core.program_id.__code__  # of each function of the language, which checks that `_semantic` is given

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = member.__wrapped__ if getattr(member, "__code__", None) is wrapper else member

        def called(*args: Any, **named: Any) -> Any:
            named["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **named)

        scope.set_attr(obj, name, called)

    builder, cast, alike = interpreter.interpreter_builder, semantic.cast, semantic.binary_op_type_checking_impl
    loads = "_load_legacy" if hasattr(semantic, "_load_legacy") else "load"  # in Triton 3.9 they are one
    casts, choose, load = dict[Any, Any](), semantic.where, getattr(semantic, loads)

    def quick_cast(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        source, target = input.dtype.name, dst_ty.scalar.name
        if source == target and source in _KNOWN:
            return input
        rounds = (source, target) in _ROUNDED
        if fp_downcast_rounding is not None or not (rounds or (source, target) in _CASTS):
            return cast(self, input, dst_ty, fp_downcast_rounding)
        key = id(input.type), target
        found = casts.get(key)
        if found is None:
            found = casts[key] = input.type.with_element_ty(dst_ty.scalar), get_np_dtype(dst_ty), input.type
        if rounds:
            return made(builder.cast_impl(input.handle, found[0]).data, found[0])
        return made(input.handle.data.astype(found[1]), found[0])

    def binary_op_type_checking_impl(self: Any, lhs: Any, rhs: Any, *given: Any, **named: Any) -> Any:
        if lhs.__class__ is rhs.__class__:
            if lhs.__class__ is core.tensor and lhs.dtype.name in _KNOWN and lhs.dtype is rhs.dtype:
                return broadcast_impl_value(self, lhs, rhs)
        elif lhs.__class__ is core.tensor:
            if (number := _constant(lhs.dtype, rhs)) is not None:
                return lhs, of_number(lhs, number)
        elif rhs.__class__ is core.tensor and (number := _constant(rhs.dtype, lhs)) is not None:
            return of_number(rhs, number), rhs
        return alike(self, lhs, rhs, *given, **named)

    def of_number(like: Any, number: Any) -> Any:
        shape = like.type.shape.values if like.type.__class__ is block_type else (1,)
        data = np.empty(shape, number.dtype)
        data[...] = number
        return made(data, like.type)

    def where(self: Any, condition: Any, x: Any, y: Any) -> Any:
        x, y = binary_op_type_checking_impl(self, x, y, True, True)
        blocks = condition.type.__class__ is x.type.__class__ is block_type and condition.dtype.name == "int1"
        if not blocks or condition.type.shape.values != x.type.shape.values:
            return choose(self, condition, x, y)
        return made(np.where(condition.handle.data, x.handle.data, y.handle.data), x.type)

    def load_blocks(self: Any, ptr: Any, mask: Any, other: Any, *given: Any) -> Any:
        if other is not None and ptr.type.__class__ is block_type and other.type.__class__ is not block_type:
            kind = ptr.dtype.element_ty  # one number is cast, not a block of it
            other = other if kind.name == "int1" else quick_cast(self, other, kind)
        return load(self, ptr, mask, other, *given)

    rounds = random.philox_impl

    def philox_impl(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any, n_rounds: Any) -> Any:
        if c0.dtype != core.uint32:
            return rounds(c0, c1, c2, c3, k0, k1, n_rounds)
        low, width = np.uint64(0xFFFFFFFF), np.uint64(32)
        words = (x.handle.data.astype(np.uint64) for x in (c0, c1, c2, c3, k0, k1))
        w0, w1, w2, w3, key0, key1 = words
        for _ in range(int(n_rounds)):
            a, b = w0 * np.uint64(0xD2511F53), w2 * np.uint64(0xCD9E8D57)
            w0, w1, w2, w3 = (b >> width) ^ w1 ^ key0, b & low, (a >> width) ^ w3 ^ key1, a & low
            key0, key1 = (key0 + np.uint64(0x9E3779B9)) & low, (key1 + np.uint64(0xBB67AE85)) & low
        drawn = (handle(w.astype(np.uint32), core.uint32) for w in (w0, w1, w2, w3))
        return tuple(core.tensor(one, c0.type) for one in drawn)

    if isinstance(rounds, interpreter.InterpretedFunction):  # not where kernels are compiled in this process
        yield random, "philox_impl", philox_impl
    yield interpreter, "_patch_attr", patch_attr
    yield semantic, "cast", quick_cast
    yield semantic, "where", where
    yield semantic, loads, load_blocks
    yield block_type, "with_element_ty", with_element_ty
    yield semantic, "binary_op_type_checking_impl", binary_op_type_checking_impl
    yield semantic, "broadcast_impl_value", broadcast_impl_value
    yield interpreter, "_get_np_dtype", get_np_dtype
    yield interpreter.TensorHandle, "__post_init__", lambda self: None  # checks the size of a number
    yield core.dtype, "__eq__", same_type
    yield block_type, "__init__", lambda self, element_ty, shape: None
    yield block_type, "__new__", new_block
    yield core.tensor, "__init__", init_tensor
    yield core, "_unwrap_if_constexpr", unwrap_if_constexpr
    # The assertions for which integers are computed a second time are ignored.
    yield builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False)


def _methods(interpreter: Any) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    import numpy as np
    import triton.language.core as core

    tensor: Any = core.tensor
    constexpr, pointer_type, made = core.constexpr, core.pointer_type, _maker(interpreter)
    semantic, bool_type = interpreter.interpreter_semantic, core.int1
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
                elif (right := _constant(self.dtype, other)) is not None:
                    left, result = self.handle.data, self.type
                    truth = join(self, self)[1] if compares else None
                else:
                    return slow(self, other)
                data = function(right, left) if turned else function(left, right)
                return made(data, truth if compares else result)

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
                return made(data, join(self, other)[0])
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
            return made(self.handle.data[slices], found[0])

        return method

    yield "__add__", add_to
    yield "__getitem__", new_axes
