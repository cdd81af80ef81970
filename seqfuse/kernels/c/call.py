# pyright: basic
# Guards are internals of torch.
"""Calls of C kernels: decisions that depend on shapes and dtypes are cached for like tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import compiler
from ...generated import Source

PARALLEL = 16384
"""Elements below which a kernel runs on the calling thread."""

ROWS = 64
"""Rows that are summed in float32, one after the other; such partial sums are added in float64, in order.

Partial sums do not depend on threads, so the number of threads changes no bit.
"""

_MOST = 256  # shapes, and layouts per shape, whose decisions are cached
_guards: Any = torch._C._dynamo.guards  # pyright: ignore
_empty = _guards._empty_strided_cpu  # a third of the cost of `torch.empty`
_function_modes: Any = torch._C._len_torch_function_stack
_NO_DISPATCH: Any = torch._C._disabled_torch_dispatch_impl

NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
"""dtypes that kernels read and write, with their names in `head.h`."""


@functools.cache
def header(name: str) -> str:
    """The text of a C file in this folder."""
    return Path(__file__).with_name(name).read_text()


def load_as(dtype: torch.dtype, pointer: str, at: str) -> str:
    """The element of an array, converted to float."""
    return f"ld_{_name(dtype)}({pointer}, {at})"


def store_as(dtype: torch.dtype, pointer: str, at: str, value: str) -> str:
    """A statement that rounds a float and stores it."""
    return f"st_{_name(dtype)}({pointer}, {at}, {value});"


def _name(dtype: torch.dtype) -> str:
    if dtype not in NAMES:
        raise ValueError(f"C kernels are for float32, bfloat16 and float16, not {str(dtype).removeprefix('torch.')}")
    return NAMES[dtype]


class CKernel(NamedTuple):
    """A C function `k`, which Python calls with addresses, integers, floats, and the number of threads.

    Args:
        text: C text of `k`.
        source: C text of the whole file.
    """

    text: str
    source: str

    def function(self) -> Callable[..., None]:
        """The compiled function."""
        return compiler.function(self.source)


def kernel(before: str, text: str, pointers: int, integers: int, floats: int) -> CKernel:
    """The kernel whose text defines `k`, with so many arguments of each kind, then the number of threads."""
    kinds = ["Long_AsVoidPtr"] * pointers + ["Long_AsLongLong"] * integers + ["Float_AsDouble"] * floats
    kinds.append("Long_AsLongLong")
    taken = " ".join(f"__auto_type a{i} = Py{of}(args[{i}]);" for i, of in enumerate(kinds))
    given = ", ".join(f"a{i}" for i in range(len(kinds)))
    defined = f"#define COUNT {len(kinds)}\n#define TAKEN {taken}\n#define GIVEN {given}\n"
    return CKernel(text, "\n".join((before, text, defined, header("call.h"))))


def written(
    pointers: Sequence[str], integers: Sequence[str], floats: Sequence[str], body: str, *headers: str, before: str = ""
) -> CKernel:
    """A kernel with these arguments.

    Args:
        pointers: declarations of pointers.
        integers: names of integers.
        floats: names of floats.
        body: C of the function.
        headers: files in this folder, included after `head.h`.
        before: C functions that it calls.
    """
    arguments = ", ".join([*pointers, *(f"I {n}" for n in integers), *(f"float {f}" for f in floats), "int threads"])
    text = f"void k({arguments}) {{\n{body}}}\n"
    above = "\n".join([*map(header, ("head.h", *headers)), before])
    return kernel(above, text, len(pointers), len(integers), len(floats))


def by_parts(rows: str, part: str, row: str, thread: str = "") -> str:
    """Loops over the rows of `parts`, which threads share: C for each part and row; frees a thread's `memory`."""
    return (
        f"#pragma omp parallel num_threads(threads) if (threads > 1)\n{{\n{thread}"
        f"#pragma omp for schedule(static)\nfor (I part = 0; part < parts; part++) {{\n{part}"
        f"for (I row = {rows} * part / parts; row < {rows} * (part + 1) / parts; row++) {{\n{row}}}\n}}\n"
        f"{'free(memory);' if 'memory' in thread else ''}\n}}\n"
    )


Outline = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a result."""


class Decided(NamedTuple):
    """How a host function runs for tensors like the given ones.

    Args:
        kernel: takes the given tensors, the results, the numbers, and the number of threads.
        made: shape and dtype of each result; `None` for an absent result.
        numbers: integers, then floats.
        work: number of elements that are read.
        scratch: floats of workspace after the results, if the kernel uses any.
        fit: returns the kernel's tensors for the given tensors, if they differ: see `copies`.
    """

    kernel: CKernel
    made: Sequence[Outline | None]
    numbers: tuple[float, ...]
    work: int
    scratch: int | None = None
    fit: Callable[..., Any] | None = None

    def entry(
        self, given: Sequence[Tensor], kind: type[tuple[Any, ...]] | None = None
    ) -> tuple[Callable[..., bool], Callable[..., Any]]:
        """A check whether tensors are like those given, and a function that returns a `kind` of results, or just one.

        The function is generated: in a small model, calling a kernel takes longer than running it.
        """
        kinds: set[Any] = {type(t) for t in given}
        for of in kinds:
            if of.__torch_dispatch__ is not _NO_DISPATCH:
                raise ValueError(f"a {of.__name__} has no memory that a C kernel could read")
        kernel, made, numbers, work, scratch, fit = self
        arguments = "".join(f"t{i}, " for i in range(len(given)))
        source = Source("run", arguments)
        if any(t.is_neg() for t in given):  # a lazily negated view
            source.add(f"{arguments} = [t.resolve_neg() for t in ({arguments})]")
        addresses = [f"t{i}.data_ptr()" for i in range(len(given))]
        if fit is not None:
            source.add(f"given = {source.put(fit)}({arguments})")  # keeps copies alive until the kernel has run
            addresses = ["*[t.data_ptr() for t in given]"]
        source.constants |= {"modes": _function_modes, "watched": _watched_empty, "empty": _empty}
        source.add("new = watched if modes() else empty")
        results = ["None" if outline is None else f"y{i}" for i, outline in enumerate(made)]
        for i, outline in enumerate((*made, None if scratch is None else ((scratch,), torch.float32))):
            if outline is not None:
                shape, dtype = outline
                source.add(f"y{i} = new({', '.join(map(source.put, (shape, strides_of(shape), dtype)))})")
                addresses.append(f"y{i}.data_ptr()")
        threads = f"{source.put(torch.get_num_threads)}()" if work >= PARALLEL else "1"
        source.add(f"{source.put(kernel.function())}({', '.join([*addresses, *map(source.put, numbers), threads])})")
        of_kind = f"{source.put(tuple.__new__)}({source.put(kind)}, ({''.join(f'{name}, ' for name in results)}))"
        source.add(f"return {results[0] if kind is None else of_kind}")
        check = _guards.TensorGuards(*given, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        # For instance if one tensor is given twice, which torch's guards do not accept.
        return check if check(*given) else _alike(given), source.define()


def decided_once(decide: Callable[..., Decided]) -> Callable[..., Tensor]:
    """A function of CPU tensors with one result, which `decide` decides once for like tensors."""
    known: dict[Any, list[tuple[Callable[..., bool], Callable[..., Tensor]]]] = {}

    def call(*given: Tensor) -> Tensor:
        key = given[0].shape, given[1].shape, len(given)
        for check, run in known.get(key, ()):
            if check(*given):
                return run(*given)
        check, run = decide(*given).entry(given)
        if len(known) >= _MOST or len(known.get(key, ())) >= _MOST:
            known.clear()
        known.setdefault(key, []).append((check, run))
        return run(*given)

    return call


def allocator() -> Callable[..., Tensor]:
    """The function that allocates a CPU tensor with a shape, strides and a dtype."""
    return _watched_empty if _function_modes() else _empty


def _watched_empty(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    """`_empty` for modes that record allocations."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    found = [1]
    for size in shape[:0:-1]:
        found.append(found[-1] * max(size, 1))
    return tuple(found[::-1]) if shape else ()


def copies(which: Sequence[int]) -> Callable[..., Sequence[Tensor]] | None:
    """A `fit` that copies these of the given tensors, or `None` if there are none."""
    if not which:
        return None
    return lambda *given: [t.contiguous() if i in which else t for i, t in enumerate(given)]


def _alike(given: Sequence[Tensor]) -> Callable[..., bool]:
    known = [*map(_told, given)]
    return lambda *others: [*map(_told, others)] == known


def _told(t: Tensor) -> Any:
    return t.device, t.dtype, t.shape, t.stride(), t.is_neg()


def row_stride(t: Tensor, columns: int) -> tuple[int, bool]:
    """The row stride of a tensor as [M, columns], and whether it must be copied to have one."""
    if t.is_contiguous() or t.numel() == 0:
        return columns, False
    if t.ndim and (t.shape[-1] == 1 or t.stride(-1) == 1):
        try:
            return t.view(-1, columns).stride(0), False
        except (RuntimeError, ValueError):  # a fake tensor raises a ValueError
            pass
    return columns, True


def parts_of(rows: int, columns: int, sums: bool) -> int:
    """The number of parts into which rows are divided; sums within a part do not depend on the number of threads."""
    return max(1, -(-rows // ROWS) if sums else min(rows, -(-rows * columns // PARALLEL)))
