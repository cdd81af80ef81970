"""Triton's interpreter with its bookkeeping done once per type, not once per tensor.

An interpreted kernel computes with numpy; three quarters of its time went into types of blocks, which are made anew for
every result, and into checks whose outcome nobody reads. Inside `corrected()` types are made once and those checks are
left out. Numbers stay the same; kernels run about twice as fast.
"""

# pyright: basic, reportGeneralTypeIssues=false
# The parts replaced have no types.
from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any


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

    builder = interpreter.interpreter_builder
    yield interpreter, "_get_np_dtype", get_np_dtype
    yield interpreter.TensorHandle, "__post_init__", lambda self: None  # checks the size of a number
    yield core.dtype, "__eq__", same_type
    yield block_type, "__init__", lambda self, element_ty, shape: None
    yield block_type, "__new__", new_block
    yield core.tensor, "__init__", init_tensor
    yield core, "_unwrap_if_constexpr", unwrap_if_constexpr
    # The assertions for which integers are computed a second time are ignored.
    yield builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False)
