"""GEMMs of groups of rows, each with its own weight, with group ends on the device: custom ops, and plain torch.

On a CPU the host reads the ends, and each group is one GEMM: small float32 GEMMs by a C kernel that calls BLAS, others
by torch, which supports any dtype and strides. On other devices the host reads nothing. There,
`torch.nn.functional.grouped_mm` runs where it has a kernel (on NVIDIA GPUs, bfloat16 on sm_90 and sm_100; otherwise it
copies the ends to the host). It does not write rows beyond the last end; we set them to zero. Elsewhere our Triton
kernel runs; without Triton, or in float64, each row is multiplied with every weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import env
from ..compiler import CompileError, ask, is_collecting
from ..hardware import ONEDNN_FLOAT32_NEW
from ..kernels import kernels_of
from ..traffic import FLOPS
from ._mm import PLAIN, linear_into, mm
from ._philox import gave_up, has_c, watched
from ._tensors import dispatch_modes

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WHOLE = (torch.int32, torch.int64)
# torch has no type annotations for `Library` and `register_fake`.
_library: Any = torch.library.Library("seqfuse", "FRAGMENT")
_torch_library: Any = torch.library


def is_watched(x: Tensor) -> bool:
    """Whether calls are being recorded, or x has no data to read."""
    return watched() or dispatch_modes() > 0 or x.is_meta


def spans(offsets: Tensor, rows: int) -> Iterator[tuple[int, int]]:
    """First and last row of each group, clamped to the number of rows; reads `offsets` on the host."""
    start, ends = 0, cast(list[int], offsets.tolist())  # pyright: ignore[reportUnknownMemberType]
    for end in ends:
        end = min(max(end, start), rows)
        yield start, end
        start = end


def inside(offsets: Tensor, rows: int) -> Tensor:
    """Whether each row belongs to a group, bool [rows, 1]; no read on the host."""
    return (torch.arange(rows, device=offsets.device) < last(offsets)).unsqueeze(-1)


def group_at(offsets: Tensor, rows: int) -> Tensor:
    """The group of each row, int64 [rows]; the number of groups for a row without a group. No read on the host."""
    return torch.searchsorted(offsets.to(torch.int64), torch.arange(rows, device=offsets.device), right=True)


def last(offsets: Tensor) -> Tensor:
    """The last end, [1]."""
    return offsets.narrow(0, offsets.shape[0] - 1, 1)


def of_group(offsets: Tensor, rows: int) -> list[Tensor]:
    """For each group, a mask of its rows, bool [rows, 1]; no read on the host."""
    at = torch.arange(rows, device=offsets.device)
    ends = offsets.to(torch.int64)
    starts = F.pad(ends.narrow(0, 0, ends.shape[0] - 1), (1, 0))
    return [
        ((at >= start) & (at < end)).unsqueeze(-1) for start, end in zip(starts.unbind(), ends.unbind(), strict=True)
    ]


def plain(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
    """Return y by differentiable torch calls: each row times every weight, of which the result of its group is kept."""
    y = x.new_zeros(x.shape[0], weight.shape[1])
    for g, own in enumerate(of_group(offsets, x.shape[0])):
        made = F.linear(torch.where(own, x, 0), weight.select(0, g), None if bias is None else bias.select(0, g))
        y = torch.where(own, made, y.to(made.dtype))
    return y


@functools.cache
def _has_kernel(device: torch.device) -> bool:
    """Whether torch has a grouped kernel for the device; otherwise torch reads the ends and calls a GEMM per group."""
    if device.type != "cuda" or not torch.cuda.is_available():  # fake tensors of a GPU that is not here
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] in (9, 10)


@functools.cache
def _writes_empty_groups(device: torch.device) -> bool:
    """Whether torch's kernel for weight gradients writes zeros for a group without rows, as on sm_90."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device)[0] == 9


def _in_triton(x: Tensor) -> bool:
    """Whether our Triton kernels support x."""
    return x.is_cuda and x.dtype in _DTYPES and env.triton_installed()


def _takes(*operands: Tensor) -> bool:
    """Whether torch's grouped GEMM supports operands of these dtypes and sizes without reading the ends on the host."""
    first = operands[0]
    dtypes = (torch.bfloat16,) if first.is_cuda else _DTYPES
    return (
        first.dtype in dtypes
        and all(t.dtype is first.dtype and _aligned(t, t.shape[-1]) and t.numel() > 0 for t in operands)
        and _has_kernel(first.device)
    )


def _aligned(t: Tensor, *elements: int) -> bool:
    return all(n * t.element_size() % 16 == 0 for n in elements)


def _row_major(t: Tensor) -> Tensor:
    """The same values row by row, with the alignment that torch's grouped kernel needs; a copy only if necessary."""
    if t.stride(1) == 1 and t.stride(0) >= t.shape[1] and _aligned(t, t.stride(0), int(t.storage_offset())):
        return t
    return t.clone(memory_format=torch.contiguous_format)


def _with_rows(t: Tensor) -> Tensor:
    """The same values with contiguous columns, as our kernels need; rows may have any stride."""
    return t if t.stride(1) == 1 or t.shape[1] == 1 else t.clone(memory_format=torch.contiguous_format)


def tf32(x: Tensor) -> bool:
    """Whether GEMMs of float32 on a GPU may round their operands to 19 bits."""
    return x.dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest"


def _of_weights(t: Tensor) -> Tensor:
    """The same for the matrices of all groups, in which either rows or columns are contiguous."""
    rows, columns = t.stride(1), t.stride(2)
    plain = columns == 1 and rows >= t.shape[2]
    turned = rows == 1 and columns >= t.shape[1]
    if (plain or turned) and _aligned(t, t.stride(0), max(rows, columns), int(t.storage_offset())):
        return t
    return t.clone(memory_format=torch.contiguous_format)


def _forward(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
    if not x.is_cpu:
        return forward_unread(x, weight, offsets, bias)
    if _is_in_c(x, weight, weight.shape[1], offsets):
        try:
            return kernels_of("c.grouped").linear_of_groups(x, weight, offsets, bias, env.GROUPS_IN_C)
        except CompileError as error:
            gave_up("GroupedLinear", error)
    y, sizes = x.new_empty(x.shape[0], weight.shape[1]), _sizes(offsets, x.shape[0])
    *ys, rest = y.split_with_sizes(sizes)
    biases = [None] * len(ys) if bias is None else bias.unbind()
    for out, own, w, b in zip(ys, x.split_with_sizes(sizes), weight.unbind(), biases, strict=False):
        if out.numel():
            linear_into(out, own, w, b, ONEDNN_FLOAT32_NEW)
    rest.zero_()
    return y


def _is_in_c(x: Tensor, other: Tensor, columns: int, offsets: Tensor) -> bool:
    """Whether C kernels multiply these rows on a CPU: float32, and too few per group for oneDNN."""
    elements, others = x.numel(), other.numel()
    few = elements * columns < offsets.shape[0] * ONEDNN_FLOAT32_NEW or not env.ONEDNN_FLOAT32
    float32 = x.dtype is torch.float32 and other.dtype is torch.float32
    if not (few and float32 and has_c(x) and type(x) in PLAIN and type(other) in PLAIN):
        return False
    c = kernels_of("c.grouped")
    return 0 < elements <= c.MOST and 0 < others <= c.MOST and c.sgemm() != 0 and offsets.dtype in _WHOLE


def _ends(offsets: Tensor, rows: int) -> Tensor:
    return offsets.to(torch.int32).clamp(max=rows)


def _sizes(offsets: Tensor, rows: int) -> list[int]:
    """The number of rows of each group, then of rows without a group; reads `offsets` on the host."""
    sizes = [end - start for start, end in spans(offsets, rows)]
    return [*sizes, rows - sum(sizes)]


def forward_unread(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
    """`grouped_linear` on any device without reading offsets on the host."""
    rows = x.shape[0]
    if not _takes(x, weight):
        if _in_triton(x):
            return kernels_of("grouped").grouped_gemm(_with_rows(x), weight, offsets, bias, tf32=tf32(x))
        return plain(x, weight, offsets, bias)
    y = F.grouped_mm(_row_major(x), _of_weights(weight).mT, offs=_ends(offsets, rows))
    return finished(y, offsets, bias)


def finished(y: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
    """Adds the biases of the groups to the result of torch's grouped GEMM, and sets rows without a group to zero."""
    if _in_triton(y):
        kernels_of("grouped").finish_rows_(y, offsets, bias)
        return y.contiguous()  # torch pads rows to 16 bytes
    if bias is not None:
        y = y + bias.index_select(0, group_at(offsets, len(y)).clamp(max=bias.shape[0] - 1))
    return torch.where(inside(offsets, len(y)), y, 0)


def _weight_grad(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    if not x.is_cpu:
        return weight_grad_unread(dy, x, offsets)
    if _is_in_c(x, dy, dy.shape[1], offsets):
        try:
            return kernels_of("c.grouped").outer_of_groups(dy, x, offsets, env.GROUPS_IN_C)
        except CompileError as error:
            gave_up("GroupedLinear", error)
    made, sizes = x.new_empty(len(offsets), dy.shape[1], x.shape[1]), _sizes(offsets, x.shape[0])
    each = dy.t().split_with_sizes(sizes, 1), x.t().split_with_sizes(sizes, 1)
    for out, left, right in zip(made.unbind(), *each, strict=False):
        if left.numel():
            linear_into(out, left, right, None, ONEDNN_FLOAT32_NEW)
        else:
            out.zero_()
    return made


def weight_grad_unread(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """`grouped_weight_grad` on any device without reading offsets on the host."""
    rows = x.shape[0]
    if _in_triton(x) and not (_takes(dy, x) and _writes_empty_groups(x.device)):
        return kernels_of("grouped").grouped_outer(_with_rows(dy), _with_rows(x), offsets, tf32=tf32(x))
    if _takes(dy, x):
        return F.grouped_mm(_row_major(dy).mT, _row_major(x), offs=_ends(offsets, rows))
    return torch.stack([mm(torch.where(own, dy, 0).mT, torch.where(own, x, 0)) for own in of_group(offsets, rows)])


def bias_grad_unread(dy: Tensor, offsets: Tensor) -> Tensor:
    """`grouped_bias_grad` on any device without reading offsets on the host."""
    if _in_triton(dy):
        return kernels_of("grouped").group_sums(_with_rows(dy), offsets)
    return torch.stack([torch.where(own, dy, 0).sum(0) for own in of_group(offsets, dy.shape[0])])


def _bias_grad(dy: Tensor, offsets: Tensor) -> Tensor:
    if not dy.is_cpu:
        return bias_grad_unread(dy, offsets)
    return torch.stack([dy[start:end].sum(0) for start, end in spans(offsets, dy.shape[0])])


def _operator(name: str, function: Callable[..., Tensor], fake: Callable[..., Tensor], schema: str) -> Any:
    """A function as a custom op, which is called only if a compiler, a mode or a FLOP counter records calls."""
    _library.define(f"{name}{schema} -> Tensor")
    _library.impl(name, function, "CompositeExplicitAutograd")
    _torch_library.register_fake(f"seqfuse::{name}", fake, lib=_library)
    recorded = getattr(torch.ops.seqfuse, name)

    def call(first: Tensor, *others: Any) -> Tensor:
        if is_watched(first):
            return recorded(first, *others)
        return function(first, *others)

    return call


def _forward_like(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
    c = kernels_of("c.grouped") if is_collecting() and x.is_cpu and x.dtype is torch.float32 else None
    if c is not None and c.sgemm():
        for kernel in (*map(c.linear_kernel, {False, bias is not None}), c.outer_kernel()):
            ask(kernel.source)
    return x.new_empty(x.shape[0], weight.shape[1])


def _weight_grad_like(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(offsets.shape[0], dy.shape[1], x.shape[1])


def _bias_grad_like(dy: Tensor, offsets: Tensor) -> Tensor:
    return dy.new_empty(offsets.shape[0], dy.shape[1])


grouped_linear: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] = _operator(
    "grouped_linear", _forward, _forward_like, "(Tensor x, Tensor weight, Tensor offsets, Tensor? bias)"
)
"""y of rows x [R, K], weights [G, N, K], group ends [G] and biases [G, N]; zeros beyond the last end."""
grouped_weight_grad: Callable[[Tensor, Tensor, Tensor], Tensor] = _operator(
    "grouped_weight_grad", _weight_grad, _weight_grad_like, "(Tensor dy, Tensor x, Tensor offsets)"
)
"""The gradient of each weight, dy_g^T x_g, [G, N, K]; zeros for a group without rows."""
grouped_bias_grad: Callable[[Tensor, Tensor], Tensor] = _operator(
    "grouped_bias_grad", _bias_grad, _bias_grad_like, "(Tensor dy, Tensor offsets)"
)
"""The sum of the rows of dy in each group, [G, N]."""


def _forward_flops(x: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * x[0] * weight[1] * weight[2]


def _weight_grad_flops(dy: Sequence[int], x: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * x[0] * dy[1] * x[1]


FLOPS[torch.ops.seqfuse.grouped_linear] = _forward_flops
FLOPS[torch.ops.seqfuse.grouped_weight_grad] = _weight_grad_flops
