# pyright: basic
# Triton has no type annotations.
"""LayerNorm and RMSNorm, forward and backward, with the residual stream around them and an activation after them.

A row is normalized in registers if it fits, otherwise read twice in chunks. The backward grid is persistent: a program
keeps its part of the parameters' gradients in registers from row to row, and writes it once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import triton.language as tl
from torch import Tensor

from ._device import column_sums, threshold_and_scale
from ._launch import architecture, cdiv, family, launch, next_power_of_2, processors, programs_of, register_limit, stops
from ._norm_kernel import (
    _norm_bwd_kernel,
    _norm_codes_bwd_kernel,
    _norm_codes_kernel,
    _norm_fwd_kernel,
    _norm_sums_kernel,
)
from ._operators import bound, norm_columns, operator, viewed_as_rows
from .activations import Activation, is_composed
from .c import norm as c_norm
from .permute import Pairs, check_pairs
from .quantize import TRITON_KINDS, As, Codes, QuantizeTile

R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class RowTile:
    """A launch: rows and columns per tile, chunks of a row, warps, pipeline stages.

    A persistent grid has `per_processor` programs per processor; `registers` is as in `register_limit`; `sums` is
    whether a program has registers for its part of the sums over rows.
    """

    m: int
    n: int
    chunks: int
    num_warps: int
    stages: int = 1
    per_processor: int = 1
    registers: int | None = None
    sums: bool = True


def forward_tile(columns: int, itemsize: int) -> RowTile:
    """A row in registers, 16 or 32 numbers per thread, up to 16,384 columns; beyond that, chunks of a quarter.

    In unaligned rows each number has its own address, which costs two registers, and half as many fit.
    """
    widest = (4096 if itemsize == 8 else 16384) // (2 if columns % 16 else 1)
    n = next_power_of_2(columns)
    chunk = n if n <= widest else widest // 4
    m = max(1, (1024 if columns % 16 else 2048) // chunk)
    warps, limited = max(4, min(16, m * chunk // 512)), chunk < n and columns % 16 == 0 and itemsize < 8
    return RowTile(m, chunk, cdiv(columns, chunk), warps, registers=128 if limited else None)


def hopper_forward_tile(columns: int, centered: bool, around: bool) -> RowTile | None:
    """The tile of aligned 16-bit rows, with a prologue if `around`; `None` if `forward_tile` is as fast or faster.

    32 numbers per thread or more, so that few warps of a row wait for each other. On an H200, with 1,024 to 32,768
    columns, a LayerNorm takes 0.83 to 1 of its time with `forward_tile`, an RMSNorm 0.72 to 1; after a prologue, a
    LayerNorm of up to 8,192 columns takes 0.85 to 0.92, and an RMSNorm is not faster. In registers, a LayerNorm of
    16,384 columns leaves room for one program per processor: in two chunks it takes 0.77 of that time on an H100, and
    0.66 with 12,288 columns.
    """
    n = next_power_of_2(columns)
    if n > (8192 if around else 32768) or (around and not centered):
        return None
    if n == 16384 and centered:
        return RowTile(1, 8192, 2, 8)
    m = 2 if n == 2048 and around else max(1, 2048 // n)
    return RowTile(m, n, 1, max(2, min(16, m * n // 1024)))


def backward_tile(columns: int, itemsize: int, heavy: bool) -> RowTile:
    """As forward, with two tensors and two or three running sums in registers, up to 8,192 columns.

    Up to half of that if an activation or dropout, `heavy`, needs registers as well, and half again if rows are not
    aligned; both need twice as many threads. Light and small launches have as many programs as a processor's registers
    hold at a time, 24 warps of 80.
    """
    widest = (2048 if itemsize == 8 else 8192) // (2 if heavy else 1) // (2 if columns % 16 else 1)
    n = next_power_of_2(columns)
    chunk = n if n <= widest else widest // 2
    m = max(1, 1024 // chunk)
    stages = 1 if heavy or itemsize == 8 or columns % 16 or chunk * itemsize > 16384 else 2
    crowded = heavy and columns % 16 > 0
    warps = max(4, min(16, m * chunk // (128 if crowded else 256)))
    if stages == 2 and m * chunk <= 2048:
        return RowTile(m, chunk, 1, warps, stages, 24 // warps, 80)
    parts = cdiv(columns, chunk)
    # With a limit below all registers, or room for more programs than there are, the compiler spills.
    if crowded and parts > 1 and warps == 8:
        return RowTile(m, chunk, parts, warps, stages, 1, 255, False)
    limited = crowded or (heavy and (warps == 16 or (parts > 1 and itemsize < 8)))
    programs = max(1, min(8, 8192 // columns))
    return RowTile(m, chunk, parts, warps, stages, programs, 128 if limited else None, parts == 1)


def hopper_backward_tile(columns: int, sums: int, added: bool) -> RowTile:
    """The tile of aligned 16-bit rows without an activation, with `sums` sums over rows, and with dstream if `added`.

    With up to 8,192 columns, a processor has 16 warps, each with 512 numbers of a row, and two rows in flight. On an
    H200 that takes 0.49 to 0.77 of the time of `backward_tile`, after dropout 0.31 to 0.95. In longer rows a program
    keeps the sums in registers, and little else: it reads a row in chunks, and again from the cache. On an H100 that
    takes 0.62 to 0.70 of the time of two passes with one sum, and 0.72 to 0.85 with two. If registers do not suffice,
    rows stay in registers, up to 16,384 columns, and sums are computed in a separate pass.
    """
    n = next_power_of_2(columns)
    if n > 8192:
        if sums == 1 and columns <= 16384:
            return RowTile(1, 8192, 2, 16, 2)
        if sums == 2 and columns <= 12288:
            return RowTile(1, 4096, cdiv(columns, 4096), 16, 2 if added else 1)
        chunk = min(n, 16384)
        return RowTile(1, chunk, cdiv(columns, chunk), 32, sums=False)
    size = 2048 if n <= 1024 else 4096 if n == 2048 else 8192
    return RowTile(size // n, n, 1, size // 512, 3, 8192 // size)


def sums_tile(itemsize: int, act: Any = None) -> RowTile:
    """16 bytes per thread and tensor, half of that after several activations, which need registers."""
    rows = 16 // itemsize // (2 if act is not None and is_composed(act) else 1)
    return RowTile(max(1, rows), 128, 1, 4, 1 if itemsize == 8 else 2)


def _measured(columns: int, arch: str, *tensors: Tensor | None) -> bool:
    """Whether the tiles were measured for such tensors: wider numbers need more shared memory."""
    half = all(t is None or t.element_size() == 2 for t in tensors)
    return columns % 16 == 0 and half and family(arch) == "sm_90"


def _pairs(pairs: Pairs | None) -> tuple[tuple[Tensor | None, ...], int, int]:
    """The tensors of pairs, the index of the last of their ends, and the number of experts per token."""
    if pairs is None:
        return (None, None, None), 0, 1
    check_pairs(*pairs)
    return pairs, len(pairs.offsets) - 1, pairs.rows.shape[1]


def _compute(x: Tensor) -> tuple[torch.dtype, Any]:
    return (torch.float64, tl.float64) if x.dtype is torch.float64 else (torch.float32, tl.float32)


def _same(name: str, tensor: Tensor | None, x: Tensor) -> Tensor | None:
    if tensor is None:
        return None
    if tensor.shape != x.shape:
        raise ValueError(f"{name} must have shape {tuple(x.shape)}, got {tuple(tensor.shape)}")
    return viewed_as_rows(name, tensor, x.shape[-1])


class Normed(NamedTuple):
    """Results of a forward pass; `stream` is the norm's input, if a prologue computes it."""

    y: Tensor  # [*, N]
    stream: Tensor | None  # [*, N]
    mean: Tensor | None  # [*] float32
    rstd: Tensor  # [*] float32


class NormGradients(NamedTuple):
    """Results of a backward pass; `None` for results that were not requested.

    `dx` is the gradient of the norm's input, and so of the residual; `dbranch` that of dropout's input; `dpairs` and
    `dfactors` those of the gathered rows and their factors.
    """

    dx: Tensor | None  # [*, N]
    dweight: Tensor | None  # [N]
    dbias: Tensor | None  # [N]
    dbranch: Tensor | None  # [*, N]
    dpre_bias: Tensor | None  # [N]
    dpairs: Tensor | None = None  # [*, top_k, N]
    dfactors: Tensor | None = None  # [*, top_k]


@operator("norm", in_c=c_norm.decide_norm)
def norm_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    centered: bool = True,
    zero_centered: bool = False,
    pre_bias: Tensor | None = None,
    seed: Tensor | None = None,
    p: float = 0.0,
    residual: Tensor | None = None,
    pairs: Pairs | None = None,
    act: Activation | None = None,
    dtype: torch.dtype | None = None,
    stream_dtype: torch.dtype | None = None,
) -> Normed:
    """LayerNorm: y = act((z - E[z]) rstd gain + bias), rstd = (Var[z] + eps)^-1/2; RMSNorm has 0 for E[z].

    z = x, or dropout(x + pre_bias) + residual, each if it is given. x, residual, y, stream: [*, N]; parameters: [N];
    statistics: [*] float32, float64 for a float64 x. Everything is computed in that dtype. With `pairs` x is
    [*, top_k, N], and each token's rows are summed first, as by `permute.gather_rows`.
    Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450; Zhang and Sennrich 2019, arXiv:1910.07467.

    Args:
        x: the norm's input, or the prologue's.
        weight: gain, `None` for a gain of one.
        bias: added after the gain, or `None`.
        eps: added to the variance, or the mean square.
        centered: whether it is LayerNorm.
        zero_centered: whether the gain is 1 + weight.
        pre_bias: added to x first.
        seed: seed of dropout after that, int64, on the device.
        p: probability of dropping.
        residual: added last; with any of these the sum is returned as `stream`.
        pairs: where each token's rows of x are, and their factors.
        act: an activation of the result.
        dtype: dtype of y; by default x's.
        stream_dtype: dtype of the stream; by default x's.

    Raises:
        ValueError: for rows of more than 65,536 columns, shapes that differ, or strides that need a copy.
    """
    N = norm_columns(x, weight=weight, bias=bias, pre_bias=pre_bias)
    compute, triton_compute = _compute(x)
    prologue = pre_bias is not None or seed is not None or residual is not None or pairs is not None
    y = torch.empty(c_norm.normalized_shape(x, pairs), dtype=dtype or x.dtype, device=x.device)
    stream = torch.empty(y.shape, dtype=stream_dtype or x.dtype, device=x.device) if prologue else None
    mean = torch.empty(y.shape[:-1], dtype=compute, device=x.device) if centered else None
    rstd = torch.empty(y.shape[:-1], dtype=compute, device=x.device)
    if stops():
        return Normed(y, stream, mean, rstd)
    source, other = viewed_as_rows("x", x, N), _same("residual", residual, y)
    M, (of_pairs, last, top_k) = rstd.numel(), _pairs(pairs)
    arch = architecture(x.device)
    fits = act is None and pairs is None and _measured(N, arch, x, other, pre_bias, weight, bias)
    measured = hopper_forward_tile(N, centered, prologue) if fits else None
    tile = forward_tile(N, x.element_size()) if measured is None else measured
    launch(
        _norm_fwd_kernel,
        cdiv(M, tile.m),
        (
            source, other, pre_bias, None if seed is None else seed.view(1), *of_pairs, weight, bias, y,
            stream, mean, rstd, source.stride(0), 0 if other is None else other.stride(0), last, M, N,
        ),
        {
            "EPS": float(eps), "CENTERED": centered, "ZERO_CENTERED": zero_centered,
            "P": None if seed is None else threshold_and_scale(p), "VALUE": None if act is None else act.value,
            "ACT_P": () if act is None else tuple(act.P), "TOP_K": top_k, "CHUNKS": tile.chunks,
            "BLOCK_M": tile.m, "BLOCK_N": tile.n, "GROUPED": N % 4 == 0, "COMPUTE": triton_compute,
        },
        tile.num_warps,
        **register_limit(tile.registers, arch),
    )  # fmt: skip
    return Normed(y, stream, mean, rstd)


@operator("norm_backward", in_c=c_norm.decide_norm_backward)
def norm_bwd(
    dy: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    *,
    zero_centered: bool = False,
    dstream: Tensor | None = None,
    seed: Tensor | None = None,
    p: float = 0.0,
    act: Activation | None = None,
    dx: bool = True,
    dweight: torch.dtype | None = None,
    dbias: torch.dtype | None = None,
    dbranch: bool = False,
    dpre_bias: torch.dtype | None = None,
    branch_dtype: torch.dtype | None = None,
    pairs: Pairs | None = None,
    other: Tensor | None = None,
    dpairs: bool = False,
    dfactors: torch.dtype | None = None,
) -> NormGradients:
    """LayerNorm's gradients: dx = rstd (g - E[g] - xhat E[g xhat]) + dstream; RMSNorm has 0 for E[g].

    g = dy act' gain, xhat the normalized row. Sums over rows are computed in a fixed order: the same bits each time.
    Beyond 8,192 columns they need a second pass over dy and x; half of that with an activation or dropout, and half
    again for unaligned rows. On Hopper, one or two sums in 16 bits need no pass up to 16,384 or 12,288 columns.
    Other arguments are those of the forward pass.

    Args:
        dy: gradient of the result.
        x: the norm's input: the stream, if there was a prologue.
        mean: as saved; `None` for RMSNorm.
        rstd: as saved.
        weight: gain, `None` for a gain of one.
        bias: only read with an activation.
        dstream: gradient of the stream itself, added to dx.
        seed: of the prologue's dropout.
        dx: whether dx is needed.
        dweight: dtype of the weight's gradient, `None` if it is not needed.
        dbias: dtype of the bias's gradient, `None` if it is not needed.
        dbranch: whether the gradient of dropout's input is needed.
        dpre_bias: dtype of the gradient of the prologue's bias, the sum of dbranch over rows.
        branch_dtype: dtype of dbranch and dpairs; by default that of dx.
        pairs: as in the forward pass.
        other: the gathered rows, for the gradient of their factors: [*, top_k, N].
        dpairs: whether the gradient of these rows is needed.
        dfactors: dtype of the gradient of their factors, `None` if it is not needed.

    Raises:
        ValueError: for rows of more than 65,536 columns, shapes that differ, or strides that need a copy.
    """
    N = norm_columns(x, weight=weight, bias=bias)
    centered, device = mean is not None, x.device
    wanted = (dweight, dbias, dpre_bias)
    out = torch.empty(x.shape, dtype=x.dtype, device=device) if dx else None
    branch = torch.empty(x.shape, dtype=branch_dtype or x.dtype, device=device) if dbranch else None
    totals = [None if kind is None else torch.empty(N, dtype=kind, device=device) for kind in wanted]
    of_pairs, last, top_k = _pairs(pairs)
    rows = (*x.shape[:-1], top_k)
    spread = torch.empty((*rows, N), dtype=branch_dtype or x.dtype, device=device) if dpairs else None
    dots = torch.empty(rows, dtype=dfactors, device=device) if dfactors is not None else None
    results = NormGradients(out, totals[0], totals[1], branch, totals[2], spread, dots)
    if stops():
        return results
    summed = [total for total in totals if total is not None]
    d, source, added = _same("dy", dy, x), viewed_as_rows("x", x, N), _same("dstream", dstream, x)
    assert d is not None
    M = source.shape[0]
    if M == 0:
        for total in summed:
            total.zero_()
        return results
    compute, triton_compute = _compute(x)
    # Rows of more than 8,192 columns were only measured without dropout.
    dropped = seed is not None
    plain = act is None and pairs is None
    if plain and not (dropped and N > 8192) and _measured(N, architecture(device), x, d, added, weight):
        tile = hopper_backward_tile(N, len(summed), added is not None)
    else:
        tile = backward_tile(N, x.element_size(), not plain or dropped)
    wide = not tile.sums
    if wide and dpre_bias is not None and branch is None:
        # A wide row's bias gradient is summed from the branch's gradient, which therefore must be written.
        branch = torch.empty(x.shape, dtype=branch_dtype or x.dtype, device=device)
    shared = (d, source, None if mean is None else mean.reshape(-1), rstd.reshape(-1), weight, bias)
    of_norm = {"CENTERED": centered, "ZERO_CENTERED": zero_centered}
    of_act = {
        "VALUE": None if act is None else act.value, "DERIVATIVE": None if act is None else act.derivative,
        "OF_OUTPUT": act is not None and act.reads == "output", "ACT_P": () if act is None else tuple(act.P),
    }  # fmt: skip
    flags = {name: kind is not None for name, kind in zip(("DWEIGHT", "DBETA", "DBIAS"), wanted, strict=True)}
    programs, steps = programs_of(cdiv(M, tile.m), processors(device) * tile.per_processor)
    partials: Tensor | None = None
    in_rows = flags if not wide else dict.fromkeys(flags, False)
    sums = len(summed)
    if not wide and sums:
        partials = torch.empty((programs, sums * N), dtype=compute, device=device)
    if dx or dpairs or dots is not None or branch is not None or (sums and not wide):
        read = viewed_as_rows("other", other, N) if other is not None and dots is not None else None
        launch(
            _norm_bwd_kernel,
            programs,
            (
                *shared, added, None if seed is None else seed.view(1), *of_pairs, read, out, branch,
                spread, dots, partials, d.stride(0), source.stride(0), 0 if added is None else added.stride(0),
                0 if read is None else read.stride(0), last, M, N, steps,
            ),
            {
                **of_norm, "P": None if seed is None else threshold_and_scale(p), **of_act,
                "TOP_K": top_k, "PAIRS": next_power_of_2(top_k), **in_rows,
                "CHUNKS": tile.chunks, "BLOCK_M": tile.m, "BLOCK_N": tile.n, "GROUPED": N % 4 == 0,
                "COMPUTE": triton_compute, "STAGES": tile.stages,
            },
            tile.num_warps,
            **register_limit(tile.registers, architecture(device)),
        )  # fmt: skip
    if wide and sums:
        s = sums_tile(x.element_size(), act)
        across = cdiv(N, s.n)
        programs, steps = programs_of(cdiv(M, s.m), 8 * processors(device) // across)
        partials = torch.empty((programs, sums * N), dtype=compute, device=device)
        launch(
            _norm_sums_kernel,
            programs * across,
            (*shared, branch, partials, d.stride(0), source.stride(0), M, N, steps),
            {
                **of_norm, **of_act, **flags, "BLOCK_M": s.m, "BLOCK_N": s.n, "COMPUTE": triton_compute,
                "STAGES": s.stages,
            },
            s.num_warps,
        )  # fmt: skip
    if partials is not None:
        column_sums(partials, N, *summed)
    return results


def norm_of(function: Callable[..., R], names: Sequence[str], rest: dict[str, Any]) -> Callable[..., R]:
    """`norm_fwd` or `norm_bwd` as a function of the tensors with these names, which copies those in other layouts.

    Args:
        function: one of the two.
        names: names of the tensors, in the order of its parameters.
        rest: all other arguments; arguments in neither are absent.

    Raises:
        ValueError: for names in another order.
    """
    if [name for name in function.operator.signature.parameters if name in names] != [*names]:  # pyright: ignore
        raise ValueError(f"tensors must be in the order of the parameters, not {', '.join(names)}")
    absent = dict.fromkeys(("weight", "bias") if function is norm_fwd else ("mean", "weight"))
    return bound(function, lambda *given: absent | rest | dict(zip(names, given, strict=True)))


class NormCodes(NamedTuple):
    """Results of a pass whose main result is only written in 8 bits; `None` for results that were not requested."""

    rows: Tensor | None  # and the next three as in `quantize.Codes`
    rows_inverse: Tensor | None
    columns: Tensor | None
    columns_inverse: Tensor | None
    stream: Tensor | None  # [*, N], in a backward pass its gradient
    mean: Tensor | None  # [*] float32
    rstd: Tensor | None  # [*] float32
    dweight: Tensor | None  # [N]
    dbias: Tensor | None  # [N]
    dpre_bias: Tensor | None  # [N]

    @property
    def codes(self) -> Codes:
        """The result."""
        return Codes(*self[:4])


def _codes_grid(M: int, N: int, to: As, device: torch.device) -> tuple[QuantizeTile, int, int, int, int]:
    """Tile, blocks of rows, chunks of columns, chunks per program, and programs.

    All programs with the same rows read whole rows. A few rows are divided among up to four programs, so that no
    processor is idle. Threads may use all registers, most of them for several tensors of 64 numbers per thread.
    """
    tile = dataclasses.replace(to.tile(1), num_warps=8)
    down, chunks = cdiv(M, tile.m), cdiv(N, tile.n)
    own = cdiv(chunks, max(1, min(4, processors(device) // down)))
    return tile, down, chunks, own, down * cdiv(chunks, own)


def _check_codes(x: Tensor, dtype: torch.dtype) -> None:
    if not x.numel() or x.shape[-1] % 16 or dtype not in TRITON_KINDS or x.dtype is torch.float64:
        shape = f"{tuple(x.shape)} in {dtype}"
        raise ValueError(f"quantized are 16 bits in rows of a multiple of 16 columns, got {shape}")


@operator("norm_codes", written=("largest",))
def norm_codes(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    to: As,
    *,
    largest: Tensor | None = None,
    centered: bool = True,
    zero_centered: bool = False,
    pre_bias: Tensor | None = None,
    seed: Tensor | None = None,
    p: float = 0.0,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    stream_dtype: torch.dtype | None = None,
) -> NormCodes:
    """`norm_fwd` without an activation, with y only in 8 bits; other arguments are those of `norm_fwd`.

    Args:
        to: how y is quantized.
        largest: float32 of one number, with a given scale: becomes max |y| if that is larger, or NaN.
        dtype: 16 bits, to which y is rounded first.

    Raises:
        ValueError: as `norm_fwd`, and for y of another dtype, or columns that are not a multiple of 16.
    """
    N, device, kind = norm_columns(x, weight=weight, bias=bias, pre_bias=pre_bias), x.device, dtype or x.dtype
    _check_codes(x, kind)
    prologue = pre_bias is not None or seed is not None or residual is not None
    M = x.numel() // N
    codes = to.made(M, N, device)
    stream = torch.empty(x.shape, dtype=stream_dtype or x.dtype, device=device) if prologue else None
    mean = torch.empty(x.shape[:-1], dtype=torch.float32, device=device) if centered else None
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=device)
    results = NormCodes(*codes, stream, mean, rstd, None, None, None)
    if stops():
        return results
    source, other = viewed_as_rows("x", x, N), _same("residual", residual, x)
    tile, _, chunks, own, programs = _codes_grid(M, N, to, device)
    launch(
        _norm_codes_kernel,
        programs,
        (
            source, other, pre_bias, None if seed is None else seed.view(1), weight, bias, stream, mean, rstd,
            tuple(codes), to.given_scale, None if largest is None else largest.view(torch.int32), source.stride(0),
            0 if other is None else other.stride(0), M, N, own,
        ),
        {
            "EPS": float(eps), "CENTERED": centered, "ZERO_CENTERED": zero_centered,
            "P": None if seed is None else threshold_and_scale(p), "CHUNKS": chunks, "BLOCK_M": tile.m,
            "BLOCK_N": tile.n, "GROUPED": N % 4 == 0, "KIND": TRITON_KINDS[kind], **to.constexprs(device),
        },
        tile.num_warps,
        **register_limit(255, architecture(device)),
    )  # fmt: skip
    return results


@operator("norm_backward_codes", written=("largest",))
def norm_codes_backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    to: As,
    *,
    largest: Tensor | None = None,
    zero_centered: bool = False,
    dstream: Tensor | None = None,
    seed: Tensor | None = None,
    p: float = 0.0,
    dx: bool = True,
    dweight: torch.dtype | None = None,
    dbias: torch.dtype | None = None,
    dpre_bias: torch.dtype | None = None,
    branch_dtype: torch.dtype | None = None,
) -> NormCodes:
    """`norm_bwd` without an activation, with dbranch only in 8 bits; other arguments are those of `norm_bwd`.

    Args:
        to: how dbranch is quantized.
        largest: float32 of one number, with a given scale: becomes max |dbranch| if that is larger, or NaN.
        dx: whether the gradient of the stream is needed as well.
        branch_dtype: 16 bits, to which dbranch is rounded first.

    Raises:
        ValueError: as `norm_bwd`, and for dbranch of another dtype, or columns that are not a multiple of 16.
    """
    N, device, kind = norm_columns(x, weight=weight), x.device, branch_dtype or x.dtype
    _check_codes(x, kind)
    M = x.numel() // N
    codes, wanted = to.made(M, N, device), (dweight, dbias, dpre_bias)
    out = torch.empty(x.shape, dtype=x.dtype, device=device) if dx else None
    totals = [None if of is None else torch.empty(N, dtype=of, device=device) for of in wanted]
    results = NormCodes(*codes, out, None, None, *totals)
    if stops():
        return results
    d, source, added = _same("dy", dy, x), viewed_as_rows("x", x, N), _same("dstream", dstream, x)
    assert d is not None
    tile, down, chunks, own, programs = _codes_grid(M, N, to, device)
    summed = [total for total in totals if total is not None]
    partials = torch.empty((down, len(summed) * N), dtype=torch.float32, device=device) if summed else None
    launch(
        _norm_codes_bwd_kernel,
        programs,
        (
            d, source, None if mean is None else mean.reshape(-1), rstd.reshape(-1), weight, added,
            None if seed is None else seed.view(1), out, partials, tuple(codes), to.given_scale,
            None if largest is None else largest.view(torch.int32), d.stride(0), source.stride(0),
            0 if added is None else added.stride(0), M, N, own,
        ),
        {
            "CENTERED": mean is not None, "ZERO_CENTERED": zero_centered,
            "P": None if seed is None else threshold_and_scale(p),
            **{name: of is not None for name, of in zip(("DWEIGHT", "DBETA", "DBIAS"), wanted, strict=True)},
            "CHUNKS": chunks, "BLOCK_M": tile.m, "BLOCK_N": tile.n, "GROUPED": N % 4 == 0, "KIND": TRITON_KINDS[kind],
            **to.constexprs(device),
        },
        tile.num_warps,
        **register_limit(255, architecture(device)),
    )  # fmt: skip
    if partials is not None:
        column_sums(partials, N, *summed)
    return results
