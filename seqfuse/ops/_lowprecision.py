"""GEMMs of quantized operands: y = x weight^T, dx = dy weight, dweight = dy^T x, each rounded once.

Operands are dequantized as by `recipes.dequantize`, multiplied and summed in float32 on a CPU, which has no 8-bit
instructions, and if the recipe is emulated. A GPU uses torch's GEMMs with one scale per tensor or per row, on sm_90
also per block of 128, and on sm_100 per block of 32.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..casts import autocasting
from ..env import triton_installed
from ..kernels import kernels_of
from ..maingrad import Accumulated, accumulated
from ..quantized import Operand, Quantize, Quantized
from ..recipes import MULTIPLE, Recipe, Role, dequantize, largest_of_groups, quantize
from ..scaling import KeptScale

if TYPE_CHECKING:
    from ..kernels.quantize import As, Codes


def operand(data: Tensor | None, inverse: Tensor | None) -> Operand:
    """The operand from two saved tensors."""
    assert data is not None
    assert inverse is not None
    return Operand(data, inverse)


def quantized(
    x: Tensor | Quantized,
    recipe: Recipe,
    role: Role,
    *,
    rows: bool = True,
    columns: bool = False,
    kept: KeptScale | None = None,
    offsets: Tensor | None = None,
) -> tuple[Operand | None, Operand | None]:
    """The operand quantized along its rows and down its columns, each only if requested. x: [M, N].

    If both share their scales, they are one operand. A delayed recipe passes `kept`, in which max |x| is recorded.
    On GPUs, codes of columns are stored column by column, as GEMMs read them. With `offsets`, the ends of groups of
    rows, no two groups share a scale.
    """
    if isinstance(x, Quantized):
        return x.rows if rows else None, x.columns if columns else None
    if offsets is not None and rows and recipe.block(role, "rows")[0] == 1:  # scales per row do not depend on groups
        _, below = quantized(x, recipe, role, rows=False, columns=columns, offsets=offsets)
        return quantized(x, recipe, role)[0], below
    kernels = kernels_for(x, columns) if (rows or columns) and offsets is None else None
    if kernels is not None:
        return _by_kernels(kernels, x, recipe, role, rows, columns, kept)
    if kept is not None and kept.newest is not None:
        most = largest_of_groups(x, offsets) if offsets is not None else x.detach().abs().amax().to(torch.float32)
        torch.maximum(kept.newest, most, out=kept.newest)
    scale = None if kept is None else kept.scale
    along = Operand(*quantize(x, recipe, role, "rows", scale=scale, offsets=offsets)) if rows else None
    if not columns:
        return along, None
    if along is not None and recipe.block(role, "rows") == recipe.block(role, "columns"):
        return along, along
    return along, Operand(*quantize(x, recipe, role, "columns", scale=scale, offsets=offsets))


Weights = Sequence[tuple[Operand | None, Operand | None]]
"""The weights of an operation's GEMMs as operands, quantized along their rows and down their columns."""
_SEVERAL = 16
"""The most matrices per launch."""


def quantized_weights(asked: Sequence[tuple[Any, Recipe, frozenset[str]]]) -> list[Weights]:
    """Quantize the weights of several operations, given with recipe and needed gradients; for dx also down columns.

    On a GPU, weights with block scales are quantized in one launch per recipe.
    """
    each = [(operation.gemm_weights(recipe), recipe, "x" in needs) for operation, recipe, needs in asked]
    flat = [(weight, recipe, columns) for weights, recipe, columns in each for weight in weights]
    groups: dict[Any, list[int]] = {}
    for i, (weight, recipe, columns) in enumerate(flat):
        scaling = _SCALINGS[recipe.block("weight", "rows")]
        if scaling in ("128x128", "1x32") and kernels_for(weight, columns) is not None:
            groups.setdefault((scaling, recipe, columns, weight.dtype, weight.device), []).append(i)
    found = dict[int, tuple[Operand | None, Operand | None]]()
    for (scaling, recipe, columns, *_), places in groups.items():
        for first in range(0, len(places), _SEVERAL):
            some = places[first : first + _SEVERAL]
            x, *others = [_fit(flat[i][0]) for i in some]
            how: dict[str, Any] = {"power_of_two": recipe.power_of_two, "columns": columns}
            kernels = kernels_for(x, columns)
            made = kernels.quantize_several(x, others, recipe.dtype("weight"), scaling, **how)
            codes = kernels.named_codes(made, columns)
            found |= {i: _operands(one, scaling) for i, one in zip(some, codes, strict=True)}
    one = (found.get(i) or quantized(w, recipe, "weight", columns=c) for i, (w, recipe, c) in enumerate(flat))
    return [[*itertools.islice(one, len(weights))] for weights, _, _ in each]


def along(x: Tensor, recipe: Recipe, role: Role) -> Operand:
    """The operand quantized along its rows only."""
    found, _ = quantized(x, recipe, role)
    assert found is not None
    return found


def down(x: Tensor, recipe: Recipe, role: Role, offsets: Tensor | None = None) -> Operand:
    """The operand quantized down its columns only."""
    _, found = quantized(x, recipe, role, rows=False, columns=True, offsets=offsets)
    assert found is not None
    return found


def ends_with_blocks(recipe: Recipe, parts: Sequence[int]) -> bool:
    """Whether no block of scales of a weight, or of dy, crosses the boundary between two consecutive parts."""
    high = recipe.block("weight", "columns")[0]
    return high is not None and all(size % high == 0 for size in parts)


def apart(one: Operand, parts: Sequence[int]) -> list[Operand]:
    """Split an operand that is quantized down its columns into parts of columns."""
    pairs = zip(*(t.split_with_sizes(list(parts), 1) for t in one), strict=True)
    return [Operand(*pair) for pair in pairs]


def split(dy: Quantized, parts: Sequence[int]) -> list[Quantized]:
    """Split a dy that is quantized both ways into parts of columns; each part is whole blocks along its rows."""

    def beside(one: Operand | None) -> list[Operand | None]:
        if one is None:
            return [None] * len(parts)
        # In row-wise blocks, one scale covers several columns.
        sizes = ([size * t.shape[1] // sum(parts) for size in parts] for t in one)
        data, inverse = (t.split_with_sizes(each, 1) for t, each in zip(one, sizes, strict=True))
        return [Operand(*pair) for pair in zip(data, inverse, strict=True)]

    sizes = [torch.Size((*dy.shape[:-1], size)) for size in parts]
    three = zip(beside(dy.rows), beside(dy.columns), sizes, strict=True)
    return [Quantized(*each, dy.dtype, dy.device) for each in three]


_SCALINGS: dict[Any, Any] = {
    (None, None): "tensor",
    (1, None): "row",
    (1, 128): "1x128",
    (128, 128): "128x128",
    (1, 32): "1x32",
}


def _by_kernels(
    kernels: Any, x: Tensor, recipe: Recipe, role: Role, rows: bool, columns: bool, kept: KeptScale | None
) -> tuple[Operand | None, Operand | None]:
    x = _fit(x)
    scaling = _SCALINGS[recipe.block(role, "rows")] if kept is None else "given"
    given: dict[str, Any] = {} if kept is None else {"scale": kept.scale.view(1), "largest": kept.newest}
    how: dict[str, Any] = {"power_of_two": recipe.power_of_two, "rows": rows, "columns": columns}
    return _operands(kernels.quantize_matrix(x, recipe.dtype(role), scaling, **how, **given), scaling)


def _fit(x: Tensor) -> Tensor:
    """With the strides that kernels need; a copy only if necessary."""
    x = x.detach()
    return x if x.stride(1) == 1 and x.stride(0) % MULTIPLE == 0 else x.contiguous()


def _operands(found: Codes, scaling: str) -> tuple[Operand | None, Operand | None]:
    """Codes of kernels as operands, with scales in the shapes of `recipes.quantize`; of 128 x 128 blocks as slices."""
    inverse: Any = found.rows_inverse
    down: Any = inverse if found.columns_inverse is None else found.columns_inverse
    if scaling in ("given", "tensor"):
        inverse = down = inverse.view(())
    elif scaling == "row":
        inverse, down = (None if t is None else t.view(shape) for t, shape in ((inverse, (-1, 1)), (down, (1, -1))))
    elif scaling == "128x128":
        inverse = None if found.rows is None else inverse[:, : -(-found.rows.shape[1] // 128)]
        down = None if found.columns is None else down[:, : -(-found.columns.shape[1] // 128)].t()
    else:
        kind = torch.float8_e8m0fnu if scaling == "1x32" else torch.float32
        inverse, down = (None if t is None else t.view(kind) for t in (inverse, down))
        inverse = None if inverse is None else inverse.t()
    along = None if found.rows is None else Operand(found.rows, inverse)
    return along, None if found.columns is None else Operand(found.columns.t(), down)


def as_codes(to: Quantize, x: Tensor) -> tuple[As, Tensor | None]:
    """Arguments for a kernel that quantizes its result, and the tensor in which it records max |x|; x has its size."""
    from ..kernels.quantize import As

    kept, recipe = to.kept(x), to.recipe
    scaling: Any = _SCALINGS[recipe.block(to.role, "rows")] if kept is None else "given"
    scale, newest = (None, None) if kept is None else (kept.scale.view(1), kept.newest)
    return As(scaling, recipe.dtype(to.role), recipe.power_of_two, to.rows, to.columns, scale), newest


def as_quantized(codes: Codes, to: As, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Quantized:
    """The codes that such a kernel returned, as a `Quantized` of this shape and dtype."""
    return Quantized(*_operands(codes, to.scaling), torch.Size(shape), dtype, device)


def kernels_for(x: Tensor, columns: bool) -> Any:
    """The module of the kernels that quantize a matrix, or `None` if they do not support x."""
    dtypes = (torch.bfloat16, torch.float16) if columns else (torch.bfloat16, torch.float16, torch.float32)
    fits = x.is_cuda and x.dtype in dtypes and x.numel() and x.shape[1] % MULTIPLE == 0
    return _kernels_on(x.device) if fits else None


@functools.cache
def _kernels_on(device: torch.device) -> Any:
    if not triton_installed() or torch.version.hip or _capability(device) < (8, 9):  # without instructions for e4m3
        return None
    return kernels_of("quantize")


def linear_in_8_bits(
    x: Operand, weight: Operand, recipe: Recipe, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """Return x weight^T + bias from operands quantized along their rows. x: [M, K], weight: [N, K], y: [M, N]."""
    if by_torch(recipe, x.data):
        y = _scaled_mm(x, weight, recipe, dtype)
        return y if bias is None else y + bias.to(dtype)
    sums = wide(dtype)
    with autocasting(x.data.device.type, None):
        a = dequantize(*x, recipe, "x", "rows").to(sums)
        b = dequantize(*weight, recipe, "weight", "rows").to(sums)
        return F.linear(a, b, None if bias is None else bias.to(sums)).to(dtype)


def dgrad_in_8_bits(
    dy: Operand, weight: Operand, recipe: Recipe, dtype: torch.dtype, addend: Tensor | None = None
) -> Tensor:
    """Return addend + dy weight from dy along its rows and weight down its columns; the addend is not rounded first.

    dy: [M, N], weight: [N, K], dx: [M, K].
    """
    sums = wide(dtype)
    if by_torch(recipe, dy.data):
        dx = _scaled_mm(dy, _turned(weight), recipe, dtype if addend is None else sums)
        return dx if addend is None else (dx + addend).to(dtype)
    with autocasting(dy.data.device.type, None):
        a = dequantize(*dy, recipe, "dy", "rows").to(sums)
        b = dequantize(*weight, recipe, "weight", "columns").to(sums)
        return (torch.mm(a, b) if addend is None else torch.addmm(addend, a, b)).to(dtype)


def weight_grad_in_8_bits(
    dy: Operand, x: Operand, recipe: Recipe, dtype: torch.dtype, main_grad: Tensor | None = None
) -> Tensor | Accumulated:
    """Return dy^T x from both down their columns, or `accumulated` where it was added to `main_grad`, in its dtype.

    dy: [M, N], x: [M, K], dweight, main_grad: [N, K].
    """
    sums = wide(dtype if main_grad is None else main_grad.dtype)
    if by_torch(recipe, dy.data):
        product = _scaled_mm(_turned(dy), _turned(x), recipe, dtype if main_grad is None else torch.float32, "x")
    else:
        with autocasting(dy.data.device.type, None):
            a = dequantize(*dy, recipe, "dy", "columns").to(sums).t()
            product = torch.mm(a, dequantize(*x, recipe, "x", "columns").to(sums))
    if main_grad is None:
        return product.to(dtype)
    main_grad.add_(product)
    return accumulated


def by_torch(recipe: Recipe, data: Tensor) -> bool:
    """Whether GEMMs are torch's 8-bit GEMMs, not emulated."""
    if data.device.type != "cuda" or recipe.emulate:
        return False
    major, minor = _capability(data.device)
    return recipe.has_gemms(10 * major + minor)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (0, 0)


def _turned(one: Operand) -> Operand:
    """The transpose."""
    return Operand(one.data.t(), one.inverse.t() if one.inverse.dim() else one.inverse)


def _scaled_mm(a: Operand, b: Operand, recipe: Recipe, dtype: torch.dtype, of: Role = "weight") -> Tensor:
    """Return a b^T, rounded once. a: [M, K], b: [N, K]; operands that are not stored row by row are copied.

    Scales are per tensor, per row, per 32 numbers, or per 128 numbers of a and of b (for a weight: per block of
    128 x 128).
    """
    m, n = len(a.data), len(b.data)
    if not a.data.numel() or not b.data.numel():
        return a.data.new_zeros(m, n, dtype=dtype)
    x, y = a.data, b.data
    if recipe.by_blocks == 128:
        return _scaled_by_blocks(x, y, a.inverse, b.inverse, of, dtype)
    if recipe.by_blocks:
        return _scaled_mx(x, y, a.inverse, b.inverse, dtype)
    short = -x.shape[1] % MULTIPLE  # of tokens, whose number may be any
    x, y = _filled(x, 0, short).contiguous(), _filled(y, 0, short).contiguous()
    run: Any = torch._scaled_mm  # pyright: ignore
    if a.inverse.dim() == 0:
        return run(x, y.t(), a.inverse, b.inverse, out_dtype=dtype, use_fast_accum=False)
    if dtype is torch.bfloat16:
        scales = a.inverse.flatten().view(-1, 1), b.inverse.flatten().view(1, -1)  # with the strides torch requires
        return run(x, y.t(), *scales, out_dtype=dtype, use_fast_accum=False)
    # torch does not support scales per row with other dtypes everywhere.
    one = torch.ones((), device=x.device)
    found = run(x, y.t(), one, one, out_dtype=torch.float32, use_fast_accum=False)
    return (found * a.inverse * b.inverse.t()).to(dtype)


def _scaled_by_blocks(
    x: Tensor, y: Tensor, x_inverse: Tensor, y_inverse: Tensor, of: Role, dtype: torch.dtype
) -> Tensor:
    """Return x y^T with scales [M, ceil(K / 128)] and [N, ceil(K / 128)], or [ceil(N / 128), ceil(K / 128)].

    Incomplete blocks are padded with zeros, and M to a multiple of 4: columns of scales begin at multiples of 16 bytes.
    """
    (m, k), n = x.shape, len(y)
    kinds: Any = F.ScalingType  # pyright: ignore
    square = of == "weight"
    x = _filled(x, -m % 4, -k % 128).contiguous()
    y = _filled(y, -n % 128 if square else 0, -k % 128).contiguous()
    scales = _by_columns(_filled(x_inverse, -m % 4)), kinds.BlockWise1x128
    if square:
        scales += _in_fours(y_inverse).t(), kinds.BlockWise128x128
    else:
        scales += _by_columns(y_inverse), kinds.BlockWise1x128
    run: Any = F.scaled_mm  # pyright: ignore
    found = run(x, y.t(), *scales, output_dtype=torch.float32 if dtype is torch.float16 else dtype)
    return (found if found.shape == (m, n) else found[:m, :n].contiguous()).to(dtype)


def _scaled_mx(x: Tensor, y: Tensor, x_inverse: Tensor, y_inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x y^T with E8M0 scales [M, ceil(K / 32)] and [N, ceil(K / 32)]; incomplete blocks are zero-padded."""
    short = -x.shape[1] % 32
    x, y = _filled(x, 0, short).contiguous(), _filled(y, 0, short).contiguous()
    kind: Any = F.ScalingType.BlockWise1x32  # pyright: ignore
    order: Any = F.SwizzleType.SWIZZLE_32_4_4  # pyright: ignore
    run: Any = F.scaled_mm  # pyright: ignore
    scales = _in_tiles(x_inverse), kind, _in_tiles(y_inverse), kind, order, order
    return run(x, y.t(), *scales, output_dtype=torch.float32 if dtype is torch.float16 else dtype).to(dtype)


def _in_tiles(inverse: Tensor) -> Tensor:
    """E8M0 scales as cuBLAS reads them: tiles of 128 x 4, with 4 of row i, then of i + 32, i + 64, i + 96, i + 1."""
    rows, columns = inverse.shape
    whole = _filled(inverse.view(torch.uint8), -rows % 128, -columns % 4)
    tiles = whole.reshape(-(-rows // 128), 4, 32, -(-columns // 4), 4).permute(0, 3, 2, 1, 4)
    return tiles.flatten().view(torch.float8_e8m0fnu)


def _filled(x: Tensor, rows: int, columns: int = 0) -> Tensor:
    """Pad with rows and columns of zeros."""
    return F.pad(x, (0, columns, 0, rows)) if rows or columns else x


def _in_fours(inverse: Tensor) -> Tensor:
    """Pad each row with zeros to a multiple of 4; a view if a kernel has already written these zeros."""
    rows, columns = inverse.shape
    width = columns + -columns % 4
    if inverse.stride(1) == 1 and inverse.stride(0) == width:
        return inverse.as_strided((rows, width), (width, 1))
    return _filled(inverse, 0, width - columns).contiguous().view(-1, width)


def _by_columns(inverse: Tensor) -> Tensor:
    """The same values stored column after column, with the matching strides even for one column."""
    return inverse.t().flatten().view(inverse.shape[1], -1).t()


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float32, or float64 in the reference."""
    return torch.promote_types(dtype, torch.float32)
