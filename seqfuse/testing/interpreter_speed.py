"""Triton's interpreter with its bookkeeping done once per type, not once per tensor.

An interpreted kernel computes with numpy; three quarters of its time went into types of blocks, which are made anew for
every result, and into checks whose outcome nobody reads. Inside `corrected()` types are made once, those checks are
left out, and casts between numbers call numpy at once. Numbers stay the same; kernels run about twice as fast.
"""

# pyright: basic, reportGeneralTypeIssues=false
# The parts replaced have no types.
from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

_KNOWN = frozenset(("fp32", "fp64", "int32", "int64", "uint32", "uint64"))
_CASTS = frozenset((source, target) for source in ("int1", *_KNOWN) for target in _KNOWN) | {
    ("fp16", "fp32"), ("fp32", "fp16"), ("fp16", "fp64"), ("fp64", "fp16"),
}  # fmt: skip
"""Conversions that numpy makes as they stand."""

Methods = Callable[[Any], Iterable[tuple[str, Callable[[Any], Any]]]]
"""Of the interpreter, names of methods of `tl.tensor`, and what makes each of the one it stands for."""


def replacements(interpreter: Any) -> Iterator[tuple[Any, str, Any]]:
    """The parts of Triton to replace: owner, name, and what stands in its place."""
    import triton.language.core as core

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
        # A pointer's name leaves its address space out.
        key = element_ty.name, getattr(element_ty, "address_space", None), sizes
        found = blocks.get(key)
        if found is None:
            found = object.__new__(cls)
            make_block(found, element_ty, [*sizes])
            blocks[key] = found
        return found

    make_tensor = core.tensor.__init__

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

    semantic = type(interpreter.interpreter_semantic)
    broadcast = semantic.broadcast_impl_value

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        blocks = lhs.type.__class__ is block_type
        if blocks is (rhs.type.__class__ is block_type) and (
            not blocks or lhs.type.shape.values == rhs.type.shape.values
        ):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    wrapper = core.program_id.__code__  # of each function of the language, which checks that `_semantic` is given

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = member.__wrapped__ if getattr(member, "__code__", None) is wrapper else member

        def called(*args: Any, **named: Any) -> Any:
            named["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **named)

        scope.set_attr(obj, name, called)

    builder, cast, alike = interpreter.interpreter_builder, semantic.cast, semantic.binary_op_type_checking_impl
    handle, casts = interpreter.TensorHandle, {}

    def quick_cast(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        source, target = input.dtype.name, dst_ty.scalar.name
        if source == target and source in _KNOWN:
            return input
        if fp_downcast_rounding is not None or (source, target) not in _CASTS:
            return cast(self, input, dst_ty, fp_downcast_rounding)
        key = id(input.type), target
        found = casts.get(key)
        if found is None:
            found = casts[key] = input.type.with_element_ty(dst_ty.scalar), get_np_dtype(dst_ty), input.type
        data = input.handle.data.astype(found[1])
        return core.tensor(handle(data, found[0].scalar), found[0])

    def binary_op_type_checking_impl(self: Any, lhs: Any, rhs: Any, *given: Any, **named: Any) -> Any:
        if lhs.__class__ is rhs.__class__ is core.tensor and lhs.type is rhs.type and lhs.dtype.name in _KNOWN:
            return lhs, rhs
        return alike(self, lhs, rhs, *given, **named)

    yield interpreter, "_patch_attr", patch_attr
    yield semantic, "cast", quick_cast
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


class Language:
    """`triton.language` as the interpreter needs it, patched at the first launch of a block and restored at its end."""

    _changes: ClassVar[list[tuple[Any, str, Any]]] = []  # of Triton's patch, which makes the same ones each time

    def __init__(self, interpreter: Any, methods: Methods) -> None:
        self._interpreter, self._patch, self._scope = interpreter, interpreter._patch_lang, None
        self._methods = methods

    def patch(self, fn: Any) -> Any:
        """Stands for `_patch_lang`, which a launch and each call of a device function calls, and then `restore`."""
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
            for name, of in self._methods(self._interpreter):
                self._scope.set_attr(tl.tensor, name, of(getattr(tl.tensor, name)))
        return _Open()

    def restore(self) -> None:
        if self._scope is not None:
            self._scope.restore()


class _Open:
    """The patch of a block, which stays until the block ends."""

    def restore(self) -> None:
        pass
