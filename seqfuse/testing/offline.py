"""`compile_kernel`: whether a kernel of an author compiles for GPUs that are not here.

The interpreter runs what Triton cannot compile. A process in which kernels are interpreted cannot compile them, so they
are imported again in a child process, to which a launch is sent.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from ..kernels._variants import TRITON_DTYPES, Type, Variant
from .launches import is_kernel, send

if TYPE_CHECKING:
    from .compiled import Compiled  # needs Triton

_OPTIONS = ("num_warps", "num_stages")


def compile_kernel(
    kernel: Any, *args: Any, targets: Sequence[str] = ("sm_80", "sm_90", "gfx942"), **kwargs: Any
) -> tuple[Compiled, ...]:
    """Compile a Triton kernel as a launch with these arguments would, for architectures that need not be here.

    Of tensors the dtype counts, so that those on `"meta"` do; they are taken to be aligned to 16 bytes. Kernels may be
    interpreted in this process. Others import the kernel's module again, also where it is the script that runs.

    Args:
        kernel: the `triton.jit` function.
        args: what a launch passes.
        targets: architectures, such as `"sm_90"` or `"gfx942"`.
        kwargs: what a launch passes by name, `num_warps` and `num_stages` among them.

    Returns:
        Registers, spills and shared memory for each target; nothing inside a process that compiles.

    Raises:
        AssertionError: naming kernel and target, with what the compiler says.
        TypeError: for arguments that the kernel does not take, and a kernel that is in no file.
    """
    if getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", "") == "seqfuse.testing.compiled":
        return ()  # the script is imported there
    from .compiled import compile_variants

    options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
    while not is_kernel(kernel) and hasattr(kernel, "fn"):  # under an autotuner
        kernel = kernel.fn
    bound = inspect.signature(kernel.fn).bind(*args, **kwargs)
    bound.apply_defaults()
    signature: dict[str, Type] = {}
    constexprs: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if value is None or "constexpr" in str(kernel.fn.__annotations__.get(name, "")):
            constexprs[name] = value
        else:
            signature[name] = type_of(value)
    divisible = tuple(name for name in signature if is_divisible(bound.arguments[name]))
    name = kernel.fn.__qualname__
    variant = Variant(
        name=name, kernel=kernel, signature=signature, constexprs=constexprs, divisible=divisible, **options
    )
    with tempfile.TemporaryDirectory(prefix="seqfuse-compiled-") as folder:
        path = Path(folder, "launch.pickle")
        with path.open("wb") as file:
            send(variant, file)
        compiled = [*compile_variants([str(path)], targets)]
    found = tuple(dataclasses.replace(one, module=kernel.fn.__module__) for one in compiled)
    for one in found:
        if one.error is not None:
            raise AssertionError(f"{name} does not compile for {one.target}: {one.error}")
    return found


def type_of(value: Any) -> Type:
    """The type that Triton gives an argument of a launch."""
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return tuple(map(type_of, cast("tuple[Any, ...]", value)))
    if isinstance(value, Tensor):
        return f"*{_named(value)}"
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    if hasattr(value, "block_shape"):  # a tensor descriptor
        return f"tensordesc<{_named(value.base)}{list(value.block_shape)}>"
    raise TypeError(f"a kernel takes tensors, numbers and tuples of them, not {value!r}")


def _named(tensor: Tensor) -> str:
    return TRITON_DTYPES[str(tensor.dtype).removeprefix("torch.")]


def is_divisible(value: Any) -> bool:
    """Whether a number is divisible by 16, as the address of a tensor is taken to be; of a tuple, all that it holds."""
    if isinstance(value, tuple):
        held = [member for member in cast("tuple[Any, ...]", value) if member is not None]
        return bool(held) and all(map(is_divisible, held))
    return isinstance(value, Tensor) or (type(value) is int and value % 16 == 0)
