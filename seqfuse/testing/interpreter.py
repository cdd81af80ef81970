"""Triton's interpreter, corrected to compute bfloat16 and float8 as a GPU does.

Unpatched, it computes bfloat16 and float8 on their bit patterns, truncates float32 to bfloat16, turns float8 overflow
into NaN, returns NaN from `tl.maximum` of a number and a NaN, sums a column sequentially, rounds matrix products as the
machine's BLAS does, which differs if the factors are exchanged, lets a kernel write anywhere, and patches
`triton.language` at every launch and call of a device function. Inside `corrected()` both formats are computed in
float32 and rounded to nearest even, float8 saturates, `tl.maximum`, `tl.minimum` and `tl.clamp` return the number
unless they are to propagate NaNs, columns are summed pairwise, matrix products are computed in float64 and rounded
before they are added. `interpreter_bounds` refuses accesses outside the tensors of a launch and global numbers, and
fills lanes that are undefined on a GPU. `triton.language` is patched once per block.

It replaces private parts of Triton 3.6 to 3.9. Before anything is replaced, each part is looked up and its
parameters are compared with the known ones; an unknown part raises RuntimeError.
"""

# pyright: basic, reportGeneralTypeIssues=false
# The replaced parts have no types.
from __future__ import annotations

import importlib.util
import inspect
import os
import types
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch

from . import interpreter_bounds
from .interpreter_bounds import ACCESSES, NARROW, noting_undefined_lanes

# The replaced methods, and the parameters that each must have after self.
_METHODS = {
    "cast_impl": ("src", "dst_type"),
    "create_fp_to_fp": ("src", "dst_type", "rounding_mode"),
    "binary_op": ("lhs", "rhs", "op"),
    "ternary_op": ("lhs", "rhs", "other", "op"),
    "unary_op": ("arg", "op"),
    "create_fma": ("x", "y", "z"),
    "create_dot": ("a", "b", "d", "input_precision", "max_num_imprecise_acc"),
    "create_erf": ("arg",),
    "create_rsqrt": ("arg",),
    "create_maxnumf": ("lhs", "rhs"),
    "create_minnumf": ("lhs", "rhs"),
    "create_clampf": ("arg", "lo", "hi", "propagate_nans"),
}
_REDUCTIONS = {"sum": ("input",), "min_max": ("input", "val_reduce_op", "idx_reduce_op")}
_LAUNCH = {"_init_args_hst": ("args_dev", "kwargs")}

_ABSENT: Any = object()  # for attributes that a class or module only inherits
_blocks: list[Any] = []


@contextmanager
def corrected(faster: Any = None) -> Generator[None]:
    """A block in which interpreted kernels compute and round bfloat16 and float8 as a GPU does.

    Args:
        faster: a module that computes the same numbers faster: `replacements(interpreter)` yields further parts of
            Triton to replace as owner, name and value; `methods(interpreter)` yields names of methods of `tl.tensor`,
            each with a function from Triton's method to the faster one.

    Raises:
        RuntimeError: if the interpreter of this version of Triton differs from the known ones.
    """
    from triton.runtime import interpreter

    _probe(interpreter)
    replaced: list[tuple[Any, str, Any]] = []
    language = _LanguagePatch(interpreter, faster)
    parts = [*_replacements(interpreter), *interpreter_bounds.replacements(interpreter)]
    parts += () if faster is None else faster.replacements(interpreter)
    parts += [(interpreter, "_patch_lang", language.patch)]
    _blocks.append(replaced)
    for owner, name, value in parts:
        replaced.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)
    try:
        yield
    finally:
        language.restore()
        for owner, name, value in reversed(replaced):
            if value is _ABSENT and name == "__new__":
                # Once `__new__` was set, a class counts as defining it, and object's `__new__` then refuses arguments.
                owner.__new__ = lambda cls, *_, **__: object.__new__(cls)
            elif value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        _blocks.remove(replaced)


@contextmanager
def as_on_a_gpu() -> Generator[None]:
    """A block that is `corrected()` if this process interprets kernels and no such block is open.

    numpy's warnings of overflow and the like, which a GPU does not give, are off.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        yield
        return
    import numpy

    with numpy.errstate(all="ignore"), nullcontext() if _blocks else corrected(), noting_undefined_lanes():
        yield


def _probe(interpreter: Any) -> None:
    import triton

    unknown = [name for name in ("_patch_lang", "TensorHandle", "_get_np_dtype") if not hasattr(interpreter, name)]
    accesses = {**ACCESSES, **_METHODS}
    for owner, wanted in (("InterpreterBuilder", accesses), ("ReduceOps", _REDUCTIONS), ("GridExecutor", _LAUNCH)):
        for name, arguments in wanted.items():
            function = getattr(getattr(interpreter, owner, None), name, None)
            # Of memory accesses only the first parameters are compared: versions differ in those for caches.
            last = len(arguments) + 1 if name in ACCESSES else None
            if function is None or tuple(inspect.signature(function).parameters)[1:last] != arguments:
                unknown.append(f"{owner}.{name}")
    if unknown:
        raise RuntimeError(
            f"Triton {triton.__version__} has another interpreter than the one that is corrected here: "
            f"{', '.join(unknown)} not as known; versions 3.6 to 3.9 are"
        )


def _replacements(interpreter: Any) -> Iterator[tuple[Any, str, Any]]:
    import numpy as np
    import triton.language as tl

    TensorHandle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
    plain = {name: getattr(builder, name) for name in _METHODS}

    def scalar(handle: Any) -> Any:
        return handle.dtype.scalar

    def narrow(dtype: Any) -> bool:
        return getattr(dtype, "name", "") in NARROW

    def decoded(data: Any, dtype: Any) -> Any:
        """Float32 values of bit patterns; other data, such as masks, unchanged."""
        if not narrow(dtype) or data.dtype not in (np.uint16, np.uint8):
            return data
        if dtype == tl.bfloat16:
            return (data.astype(np.uint32) << 16).view(np.float32)
        return torch.from_numpy(np.ascontiguousarray(data)).view(NARROW[dtype.name]).float().numpy().reshape(data.shape)

    def encoded(values: Any, dtype: Any) -> Any:
        """The bit pattern nearest to each value, ties to even; float8 saturates."""
        values = np.asarray(values, dtype=np.float32)
        if dtype == tl.bfloat16:
            bits = np.ascontiguousarray(values).view(np.uint32).reshape(values.shape)
            rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
            return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)
        kind = NARROW[dtype.name]
        most = torch.finfo(kind).max
        return torch.from_numpy(np.clip(values, -most, most)).to(kind).view(torch.uint8).numpy().reshape(values.shape)

    def handle_of(values: Any, dtype: Any) -> Any:
        if values.dtype == np.bool_:
            return TensorHandle(values, tl.int1)  # from a comparison
        return TensorHandle(encoded(values, dtype), dtype)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = scalar(src), dst_type.scalar
        if not narrow(source) and not narrow(target):
            return plain["cast_impl"](self, src, dst_type)
        values = decoded(src.data, source)
        if narrow(target):
            return TensorHandle(encoded(values, target), target)
        return TensorHandle(values.astype(interpreter._get_np_dtype(target)), target)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        source, target = scalar(src), dst_type.scalar
        known = (tl.bfloat16, tl.float16, tl.float32, tl.float64)
        if all(narrow(kind) or kind in known for kind in (source, target)):
            return cast_impl(self, src, dst_type)
        return plain["create_fp_to_fp"](self, src, dst_type, rounding_mode)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if not narrow(scalar(lhs)):
            result = plain["binary_op"](self, lhs, rhs, op)
            # The result of a comparison must be bool: if one number is expanded in another dtype, Triton 3.9 refuses
            # it as a mask.
            return handle_of(result.data, tl.int1) if result.data.dtype == np.bool_ else result
        return handle_of(op(decoded(lhs.data, scalar(lhs)), decoded(rhs.data, scalar(rhs))), scalar(lhs))

    def ternary_op(self: Any, lhs: Any, rhs: Any, other: Any, op: Any) -> Any:
        if op is np.where or not narrow(scalar(other)):
            return plain["ternary_op"](self, lhs, rhs, other, op)
        return handle_of(op(*(decoded(h.data, scalar(h)) for h in (lhs, rhs, other))), scalar(other))

    def unary_op(self: Any, arg: Any, op: Any) -> Any:
        if not narrow(scalar(arg)):
            return plain["unary_op"](self, arg, op)
        return handle_of(op(decoded(arg.data, scalar(arg))), scalar(arg))

    def create_rsqrt(self: Any, arg: Any) -> Any:
        return unary_op(self, arg, lambda data: (1 / np.sqrt(data)).astype(data.dtype))

    def create_erf(self: Any, arg: Any) -> Any:
        # In float64, as by math.erf, but for all elements at once.
        return unary_op(
            self, arg, lambda data: torch.erf(torch.from_numpy(np.array(data, np.float64))).numpy().astype(data.dtype)
        )

    # As a GPU does by default: the maximum of a number and a NaN is the number. numpy's maximum is the NaN.
    def create_maxnumf(self: Any, lhs: Any, rhs: Any) -> Any:
        return binary_op(self, lhs, rhs, np.fmax)

    def create_minnumf(self: Any, lhs: Any, rhs: Any) -> Any:
        return binary_op(self, lhs, rhs, np.fmin)

    def create_clampf(self: Any, arg: Any, lo: Any, hi: Any, propagate_nans: Any) -> Any:
        if propagate_nans == tl.PropagateNan.ALL:
            return plain["create_clampf"](self, arg, lo, hi, propagate_nans)
        return create_minnumf(self, create_maxnumf(self, arg, lo), hi)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if not narrow(scalar(z)):
            return plain["create_fma"](self, x, y, z)
        a, b, c = (decoded(h.data, scalar(h)) for h in (x, y, z))
        return handle_of(a * b + c, scalar(z))

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        if not np.issubdtype(d.data.dtype, np.floating) and not narrow(scalar(d)):
            return plain["create_dot"](self, a, b, d, input_precision, max_num_imprecise_acc)
        left, right, total = (decoded(h.data, scalar(h)) for h in (a, b, d))
        product = np.matmul(left, right, dtype=np.float64).astype(total.dtype) + total
        return handle_of(product, scalar(d)) if narrow(scalar(d)) else TensorHandle(product, scalar(d))

    reductions = {name: getattr(interpreter.ReduceOps, name) for name in _REDUCTIONS}

    def reduced(self: Any, values: Any, dtype: Any) -> Any:
        return self.to_tensor(encoded(values, dtype), dtype)

    def total(self: Any, input: Any) -> Any:
        values = decoded(input.handle.data, input.dtype)
        axis = self.axis
        # numpy sums pairwise only along the last axis.
        if axis is not None and axis < values.ndim - 1 and np.issubdtype(values.dtype, np.floating):
            while (n := values.shape[axis]) > 1:
                first, second = np.split(values, [n - n // 2], axis=axis)
                values = first.copy()
                np.moveaxis(values, axis, 0)[: n // 2] += np.moveaxis(second, axis, 0)
        elif not narrow(input.dtype):
            return reductions["sum"](self, input)
        values = np.sum(values, axis=axis, keepdims=self.keep_dims)
        return reduced(self, values, input.dtype) if narrow(input.dtype) else self.to_tensor(values, input.dtype)

    def min_max(self: Any, input: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        first = input[0] if isinstance(input, tuple) else input
        if not narrow(first.dtype):
            return reductions["min_max"](self, input, val_reduce_op, idx_reduce_op)
        values = decoded(first.handle.data, first.dtype)
        extreme = reduced(self, val_reduce_op(values, axis=self.axis, keepdims=self.keep_dims), first.dtype)
        if idx_reduce_op is None:
            return extreme
        place = idx_reduce_op(values, axis=self.axis, keepdims=self.keep_dims)
        return extreme, self.to_tensor(place, tl.int32)

    methods = (
        cast_impl, create_fp_to_fp, binary_op, ternary_op, unary_op, create_fma, create_dot, create_erf, create_rsqrt,
        create_maxnumf, create_minnumf, create_clampf,
    )  # fmt: skip
    for method in methods:
        yield builder, method.__name__, method
    yield interpreter.ReduceOps, "sum", total
    yield interpreter.ReduceOps, "min_max", min_max


class _LanguagePatch:
    """Patches `triton.language` at the first launch of a block, and restores it at the end of the block."""

    _changes: ClassVar[list[tuple[Any, str, Any]]] = []  # those of Triton's patch, the same each time

    def __init__(self, interpreter: Any, faster: Any) -> None:
        self._interpreter, self._patch, self._scope = interpreter, interpreter._patch_lang, None
        self._faster = faster

    def patch(self, fn: Any) -> Any:
        """Replaces `_patch_lang`, which each launch and each call of a device function calls, followed by `restore`."""
        if self._scope is None:
            import triton.language as tl

            if not self._changes:
                everything: Any = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
                made = self._patch(everything)
                self._changes.extend((owner, name, vars(owner)[name]) for owner, name, _ in made._changes)
                made.restore()
            self._scope = self._interpreter._LangPatchScope()
            for change in self._changes:
                self._scope.set_attr(*change)
            # Triton 3.6 calls int() on an array of one element, which numpy 2.4 refuses.
            self._scope.set_attr(tl.tensor, "__index__", lambda tensor: int(tensor.handle.data.item()))
            for name, of in () if self._faster is None else self._faster.methods(self._interpreter):
                self._scope.set_attr(tl.tensor, name, of(getattr(tl.tensor, name)))
        return types.SimpleNamespace(restore=lambda: None)  # the patch stays until the block ends

    def restore(self) -> None:
        if self._scope is not None:
            self._scope.restore()
