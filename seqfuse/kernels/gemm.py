# pyright: basic, reportOptionalSubscript=false, reportArgumentType=false
# Triton has no types.
"""Matrix products with an epilogue: C = epilogue(A B), one persistent kernel for forward, dgrad and wgrad.

A program walks over tiles of C. An epilogue is fixed at compile time: what is `None` is not there, and activations are
device functions, so a new one needs no new kernel. In this order, in float32 (float64 for float64):

| step | in forms |
| --- | --- |
| add a bias | all |
| store the pre-activation | plain, gated |
| `value(z)`, or `value(gate) up` from two accumulators | plain, gated |
| dropout | all |
| multiply by `derivative(t)`, give `value(t)` again; or make [dgate; dup] of a packed t | dact; dgated |
| add a residual, or what C holds | plain, gated, dact |
| partial sums over the tile's rows | plain, dact, dgated |

Beside it the rows of A may be summed, by the programs that work on the first column of tiles: with A = dy^T that is a
bias's gradient, made of the tiles that the product reads.

`linear` and `linear_gated` are forward, `linear_dgrad`, `linear_dgrad_gated` and `linear_wgrad_bias` backward. On
Hopper and later, descriptors (TMA) move tiles of factors, and separately those of everything else, where addresses and
strides are multiples of 16 bytes. Not yet run on a GPU.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._device import column_sums, threshold_and_scale
from ._gemm_kernel import DESCRIBED, Precision, Tile, _gemm_kernel, choose, weight_of
from ._launch import address, allow_scratch, architecture, cdiv, family, interpreted, launch, processors, stops
from ._operators import inner_contiguous, operator
from .activations import Activation, name_of

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class _Operand(NamedTuple):
    """A matrix as the kernel reads it: its storage, whether its columns are the contiguous ones, its other stride."""

    tensor: Tensor
    transposed: bool
    ld: int

    @property
    def described(self) -> bool:
        """Whether a descriptor can stand for it: 16-byte address and stride, and lines that do not overlap."""
        size = self.tensor.element_size()
        line = self.tensor.shape[0 if self.transposed else 1]
        return address(self.tensor) & 15 == 0 and self.ld * size & 15 == 0 and line <= self.ld < 2**39

    @property
    def aligned(self) -> bool:
        """Whether the compiler is told enough to load 16 bytes at a time: see `_launch`."""
        return address(self.tensor) & 15 == 0 and self.ld & 15 == 0


def _matrix(name: str, tensor: Tensor) -> _Operand:
    rows, columns = tensor.shape
    if tensor.stride(1) == 1 or columns == 1:
        return _Operand(tensor, False, tensor.stride(0) if rows > 1 else max(columns, 1))
    if tensor.stride(0) == 1 or rows == 1:
        return _Operand(tensor, True, tensor.stride(1))
    raise ValueError(
        f"{name} must be contiguous in its rows or in its columns, got shape {tuple(tensor.shape)} with strides "
        f"{tensor.stride()}"
    )


def _flat(tensor: Tensor) -> Tensor:
    """All leading dimensions as one; a copy only where no stride can stand for them."""
    return tensor if tensor.ndim == 2 else tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def _tile_operand(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")
    return inner_contiguous(name, _flat(tensor))


def _row_operand(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")
    return tensor.reshape(-1).contiguous()


def _ld(tensor: Tensor) -> int:
    return tensor.stride(0) if tensor.shape[0] > 1 else max(tensor.shape[1], 1)


def _fits(tensor: Tensor, half: int, described: bool) -> bool:
    """Whether tiles of a tensor, and of what begins `half` elements into its rows, are moved 16 bytes at a time."""
    ld, size = _ld(tensor), tensor.element_size()
    if address(tensor) & 15 or half * size & 15:
        return False
    return ld * size & 15 == 0 and tensor.shape[1] <= ld < 2**39 if described else ld & 15 == 0


def _factors(a_name: str, a: Tensor, b_name: str, b: Tensor) -> None:
    if a.dtype not in _DTYPES:
        raise ValueError(f"{a_name} of {a.dtype} cannot be multiplied here: float16, bfloat16, float32 or float64 can")
    if a.dtype != b.dtype:
        raise ValueError(f"{a_name} and {b_name} must have one dtype, got {a.dtype} and {b.dtype}")
    if b.ndim != 2 and b_name == "weight":
        raise ValueError(f"weight must have two dimensions, got shape {tuple(b.shape)}")
    for name, factor in ((a_name, a), (b_name, b)):
        if factor.ndim == 0:
            raise ValueError(f"{name} must have at least one dimension")


def _lead(name: str, tensor: Tensor, columns: int) -> tuple[int, ...]:
    """The leading dimensions of a factor of as many columns."""
    if tensor.shape[-1] != columns:
        raise ValueError(f"{name}: expected last dimension {columns}, got shape {tuple(tensor.shape)}")
    return tuple(tensor.shape[:-1])


class DropoutMask(NamedTuple):
    """Dropout in an epilogue: element i of the contiguous result is kept by the rule of `ops/_philox.py`.

    Args:
        seed: one int64 on the device, never read by the host.
        p: probability of dropping an element.
        upscale: whether what is kept is multiplied by 1 / (1 - p).
    """

    seed: Tensor
    p: float
    upscale: bool = True


class Gradients(NamedTuple):
    """What `linear_dgrad` and `linear_dgrad_gated` give; `None` for what was not asked for."""

    dz: Tensor  # [*, K], of a gated unit [*, 2 K]
    sum: Tensor | None  # [K], [2 K]
    x: Tensor | None  # [*, K]
    dy_sum: Tensor | None  # [N]


class Epilogue(NamedTuple):
    """What follows a product, in this order as far as it is there, and the sums beside it.

    Args:
        form: of the kernel.
        act: an activation, or that of a gated unit; in backward forms its gradient is taken.
        t_is_output: whether `t`, or what is stored as `pre`, is the activation's output.
        bias: [N], [2 N] if `up` is none of its own.
        up: the second half of a gated unit's weight, where it is a tensor of its own.
        up_bias: of `up`.
        pre: where the pre-activation is stored.
        dropout: after the activation, before the residual.
        t: what the activation's gradient is taken at.
        emitted: where the activation of `t` is stored.
        residual: what is added.
        accumulate: whether the result is added to what is there.
        sums: whether the sum over rows is made.
        a_sums: where sums over the rows of A are stored.
        a_columns: whether sums over its columns are made.
    """

    form: str = "plain"
    act: Activation | None = None
    t_is_output: bool = False
    bias: Tensor | None = None
    up: Tensor | None = None
    up_bias: Tensor | None = None
    pre: Tensor | None = None
    dropout: DropoutMask | None = None
    t: Tensor | None = None
    emitted: Tensor | None = None
    residual: Tensor | None = None
    accumulate: bool = False
    sums: bool = False
    a_sums: Tensor | None = None
    a_columns: bool = False

    @property
    def heavy(self) -> bool:
        """Whether it has tiles of its own to load or store."""
        return self.accumulate or any(part is not None for part in (self.pre, self.residual, self.dropout))


def _multiply(
    a: _Operand, b: _Operand, a_t: bool, b_t: bool, c: Tensor, K: int, e: Epilogue, tf32: bool, tile: Tile | None
) -> tuple[Tensor | None, Tensor | None]:
    """Launch the kernel; returns the partial sums over rows, of the result and of A, where they are asked for."""
    M, N = c.shape[0], c.shape[1] // (2 if e.form == "dgated" else 1)
    if max(M, 2 * N, K) >= 2**31:
        raise ValueError(f"a product of {M} x {K} by {K} x {N} has a dimension beyond 2^31 - 1")
    device = c.device
    if e.dropout is not None and e.dropout.p == 0:
        e = e._replace(dropout=None)
    up = None if e.up is None else _matrix("up", e.up)
    tiles = (c, e.pre, e.emitted, e.residual, e.t)
    of = family(architecture(device))
    described = of in DESCRIBED if tile is None else tile.descriptors
    # The second half of a packed tensor begins N elements after the first.
    packed = e.form in ("gated", "dgated")
    fit = all(x is None or _fits(x, N if packed and x.shape[1] == 2 * N else 0, described) for x in tiles)
    factors = (a, b) if up is None else (a, b, up)
    if tile is None:
        if not all(x.described if described else x.aligned for x in factors):
            of += " unaligned"
        weight = weight_of(e.form, e.heavy)
        tile = choose(of, _precision(a.tensor.dtype, tf32), weight, fit, M, N, processors(device))
    loads = tile.descriptors and K > 0 and all(x.described for x in factors)
    moved = tile.descriptors and fit
    if K == 0:
        tile = tile._replace(flatten=False)  # two loops made one need a step in the inner one
    tiles_m = cdiv(M, tile.m)
    count = tiles_m * cdiv(N, tile.n)
    if count >= 2**31:
        raise ValueError(f"a product of {M} x {N} has {count} tiles, at most 2^31 - 1 can be counted")
    dtype = torch.float64 if a.tensor.dtype == torch.float64 else torch.float32
    partials, a_sums = None, e.a_sums
    if e.sums:
        width = 2 * N if e.form == "dgated" else N
        partials = torch.empty(tiles_m * width, dtype=dtype, device=device)[: tiles_m * width].view(tiles_m, width)
    # Tiles that are not aligned take the registers that these sums need.
    if e.a_columns and fit:
        a_sums = torch.empty(tiles_m * K, dtype=dtype, device=device)[: tiles_m * K].view(tiles_m, K)
    if loads or moved:
        allow_scratch()
    strides = [0 if x is None else _ld(x) for x in tiles]
    launch(
        _gemm_kernel,
        min(count, processors(device) * tile.per_processor),
        (
            a.tensor, b.tensor, c, e.pre, e.emitted, e.bias, e.residual, e.t,
            None if e.dropout is None else e.dropout.seed, partials, a_sums, e.up, e.up_bias,
            M, N, K, a.ld, b.ld, *strides,
        ),
        {
            "FORM": e.form,
            "VALUE": None if e.act is None else e.act.value,
            "DERIVATIVE": None if e.act is None or e.form not in ("dact", "dgated") else e.act.derivative,
            "P": () if e.act is None else e.act.P,
            "T_IS_OUTPUT": e.t_is_output,
            "READS_OUTPUT": e.act is not None and e.act.reads == "output",
            "ACCUMULATE": e.accumulate,
            "DROP": None if e.dropout is None else threshold_and_scale(e.dropout.p, e.dropout.upscale),
            "GROUPED": N % 4 == 0, "A_T": a_t, "B_T": b_t, "LOADS": loads, "TILES": moved,
            "PRECISION": "tf32" if tf32 else "ieee", "INTERPRET": interpreted(),
            "BM": tile.m, "BN": tile.n, "BK": tile.k, "GROUP": tile.group, "SPLIT": tile.split, "FLATTEN": tile.flatten,
        },
        tile.num_warps,
        tile.num_stages,
    )  # fmt: skip
    return partials, a_sums


def _precision(dtype: torch.dtype, tf32: bool) -> Precision:
    if dtype == torch.float32:
        return "tf32" if tf32 else "float32"
    return "float64" if dtype == torch.float64 else "half"


def _flops(a: Tensor, weight: Tensor, *_: Any, up: Tensor | None = None, **__: Any) -> int:
    """Of x weight^T and of dy weight; a gated unit whose weight is in two has the GEMM of `up` as well."""
    (N, K), rows = weight.shape, a.shape[:-1].numel()
    return 2 * rows * N * K * (1 if up is None else 2)


def _wgrad_flops(dy: Tensor, x: Tensor, **_: Any) -> int:
    return 2 * dy.numel() * x.shape[-1]


_operator = functools.partial(operator, without=("tile",), tags=(torch.Tag.needs_fixed_stride_order,))


@_operator("linear", flops=_flops)
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    act: Activation | None = None,
    store_pre: bool = False,
    store_act: bool = False,
    dropout: DropoutMask | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    tf32: bool = False,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A product and all that follows it up to a residual, in one launch; returns (y, z or act(z) or `None`).

    y = residual + dropout(act(z)), z = x weight^T + bias; what is not given is left out.

    x: [*, K] and weight: [N, K] of one dtype, each contiguous in its rows or its columns; bias: [N];
    residual, y, z: [*, N].  Sums and the epilogue are float32 (float64 for float64), rounded when stored; K = 0 gives
    the epilogue of 0.

    Args:
        x: the input.
        weight: as in `torch.nn.functional.linear`.
        bias: any floating dtype.
        act: an activation, such as one of `activations.ACTIVATIONS`; `None` for none.
        store_pre: whether z is wanted.
        store_act: whether act(z) is wanted in its place, as it is before dropout.
        dropout: after the activation, before the residual.
        residual: any floating dtype, last dimension contiguous.
        dtype: of y and z; x's by default.
        tf32: whether float32 operands may be rounded to TF32.
        tile: instead of the one the table has.

    Raises:
        ValueError: for shapes, strides or dtypes that cannot be multiplied.
    """
    e = Epilogue("plain", act, store_act, bias, dropout=dropout, residual=residual)
    return _forward(x, weight, e, store_pre or store_act, dtype, tf32, tile)


@_operator("linear_gated", flops=_flops)
def linear_gated(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    up: Tensor | None = None,
    up_bias: Tensor | None = None,
    act: Activation,
    store_pre: bool = False,
    dropout: DropoutMask | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    tf32: bool = False,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A product and a gated unit in one launch; returns (y, [gate; up] or `None`).

    y = residual + dropout(act(gate) up), [gate; up] = x weight^T + bias.

    x: [*, K], weight: [2 F, K] with the rows of the gate first, bias: [2 F], y: [*, F], [gate; up]: [*, 2 F].  The rest
    is as in `linear`. With a weight `up` of its own, weight and up are [F, K], of one layout, and bias and up_bias [F].
    Source: Shazeer 2020, arXiv:2002.05202.

    Raises:
        ValueError: as `linear`, for an odd number of rows of the weight, and for an up that is not like the weight.
    """
    e = Epilogue("gated", act, False, bias, up, up_bias, dropout=dropout, residual=residual)
    return _forward(x, weight, e, store_pre, dtype, tf32, tile)


def _forward(
    x: Tensor, weight: Tensor, e: Epilogue, store: bool, dtype: torch.dtype | None, tf32: bool, tile: Tile | None
) -> tuple[Tensor, Tensor | None]:
    _factors("x", x, "weight", weight)
    packed, K = weight.shape
    N = packed
    if e.up is not None:
        if e.up.shape != weight.shape or e.up.dtype is not weight.dtype or e.up.stride() != weight.stride():
            raise ValueError(f"up must be like the weight, got {tuple(e.up.shape)} {e.up.stride()}, {e.up.dtype}")
        if (e.bias is None) != (e.up_bias is None):
            raise ValueError("bias and up_bias are given together")
        packed = 2 * N
    elif e.form == "gated":
        if packed % 2:
            raise ValueError(f"a [gate; up] weight has an even number of rows, got shape {tuple(weight.shape)}")
        N = packed // 2
    lead = _lead("x", x, K)
    y = torch.empty((*lead, N), dtype=dtype or x.dtype, device=x.device)
    pre = torch.empty((*lead, packed), dtype=dtype or x.dtype, device=x.device) if store else None
    if stops():
        return y, pre
    flat = _flat(x)
    M = flat.shape[0]
    e = e._replace(
        pre=None if pre is None else pre.view(M, packed),
        bias=None if e.bias is None else _row_operand("bias", e.bias, (packed if e.up is None else N,)),
        up_bias=None if e.up_bias is None else _row_operand("up_bias", e.up_bias, (N,)),
        residual=None if e.residual is None else _tile_operand("residual", e.residual, (*lead, N)),
    )
    if M and N:
        a, b = _matrix("x", flat), _matrix("weight", weight)
        _multiply(a, b, a.transposed, not b.transposed, y.view(M, N), K, e, tf32, tile)
    return y, pre


@_operator("linear_dgrad", flops=_flops)
def linear_dgrad(
    dy: Tensor,
    weight: Tensor,
    *,
    act: Activation | None = None,
    t: Tensor | None = None,
    t_is_output: bool = False,
    dropout: DropoutMask | None = None,
    residual: Tensor | None = None,
    sums: bool = False,
    emit: bool = False,
    dtype: torch.dtype | None = None,
    sums_dtype: torch.dtype | None = None,
    dy_sums: torch.dtype | None = None,
    tf32: bool = False,
    tile: Tile | None = None,
) -> Gradients:
    """The gradient of a product's input, of the activation and the bias before it and of a bias after it.

    dz = residual + act'(t) dropout(dy weight), its sum over rows, and x = dropout(act(t)): what a `Linear`
    hands to x = dropout(act(z)), z = ... + bias before it, the gradient of that bias and, where x was not kept, x
    again; and the sum of dy over rows, the gradient of a bias behind the product.

    dy: [*, N] and weight: [N, K] of one dtype, each contiguous in its rows or its columns; t, residual,
    dz, x: [*, K]; sum: [K]; dy_sum: [N].  Sums over rows are of the unrounded float32 dz, in a fixed order.

    Args:
        dy: the gradient of the product.
        weight: of the product.
        act: the activation whose gradient is taken; `None` for the product alone.
        t: the activation's input z, or its output.
        t_is_output: whether t is the output: act(z) before dropout.
        dropout: the one between the activation and the product: it has the mask of the forward pass.
        residual: a gradient that is added: of z, or of x where there is no activation.
        sums: whether the sum over rows is wanted.
        emit: whether dropout(act(t)) is wanted.
        dtype: of dz and x; dy's by default.
        sums_dtype: of the sum; that of dz by default.
        dy_sums: dtype of the sum of dy; `None` where it is not wanted. Not with a residual or emit.
        tf32: whether float32 operands may be rounded to TF32.
        tile: instead of the one the table has.

    Raises:
        ValueError: for shapes, strides or dtypes that cannot be multiplied; for an activation without t or t without an
            activation, and for the output of one whose derivative reads its input; for dy_sums without an activation or
            with what does not go with it.
    """
    if (act is None) != (t is None):
        raise ValueError("act and t come together: the gradient of an activation is taken at t")
    if emit and act is None:
        raise ValueError("emit: there is no activation to compute again")
    if dy_sums is not None and (act is None or emit or residual is not None):
        # Not all of it fits in registers.
        raise ValueError("dy_sums: made with an activation's gradient, without residual and emit")
    if act is not None and t_is_output and act.reads != "output":
        raise ValueError(f"{name_of(act)}: the derivative reads the input, so t cannot be the output")
    e = Epilogue(
        "plain" if act is None else "dact", act, t_is_output, dropout=dropout, t=t, residual=residual, sums=sums
    )
    return _backward(dy, weight, e, emit, dtype, sums_dtype, dy_sums, tf32, tile)


@_operator("linear_dgrad_gated", flops=_flops)
def linear_dgrad_gated(
    dy: Tensor,
    weight: Tensor,
    *,
    act: Activation,
    t: Tensor,
    dropout: DropoutMask | None = None,
    sums: bool = False,
    emit: bool = False,
    dtype: torch.dtype | None = None,
    sums_dtype: torch.dtype | None = None,
    tf32: bool = False,
    tile: Tile | None = None,
) -> Gradients:
    """The gradient of a product's input and of the gated unit before it: dz = [dgate; dup], and x is h.

    dh = dropout(dy weight), dgate = dh up act'(gate), dup = dh act(gate), h = dropout(act(gate) up).

    dy: [*, N], weight: [N, F], t = [gate; up] and its gradient: [*, 2 F], sum: [2 F], h: [*, F].  The rest is as in
    `linear_dgrad`.

    Raises:
        ValueError: as `linear_dgrad`.
    """
    e = Epilogue("dgated", act, dropout=dropout, t=t, sums=sums)
    return _backward(dy, weight, e, emit, dtype, sums_dtype, None, tf32, tile)


def _backward(
    dy: Tensor, weight: Tensor, e: Epilogue, emit: bool, dtype: torch.dtype | None, sums_dtype: torch.dtype | None,
    dy_sums: torch.dtype | None, tf32: bool, tile: Tile | None,
) -> Gradients:  # fmt: skip
    _factors("dy", dy, "weight", weight)
    K, N = weight.shape
    lead, device, dtype = _lead("dy", dy, K), dy.device, dtype or dy.dtype
    width = 2 * N if e.form == "dgated" else N
    dz = torch.empty((*lead, width), dtype=dtype, device=device)
    emitted = torch.empty((*lead, N), dtype=dtype, device=device) if emit else None
    total = torch.empty(width, dtype=sums_dtype or dtype, device=device) if e.sums else None
    dy_sum = None if dy_sums is None else torch.empty(K, dtype=dy_sums, device=device)
    results = Gradients(dz, total, emitted, dy_sum)
    if stops():
        return results
    flat = _flat(dy)
    M = flat.shape[0]
    partials = a_partials = None
    # What a number that is 1 is compiled for has no sums of dy: they are torch's.
    e = e._replace(
        t=None if e.t is None else _tile_operand("t", e.t, (*lead, width)),
        emitted=None if emitted is None else emitted.view(M, N),
        residual=None if e.residual is None else _tile_operand("residual", e.residual, (*lead, N)),
        a_columns=dy_sum is not None and K > 1 and M > 1,
    )
    if M and N:
        a, b = _matrix("dy", flat), _matrix("weight", weight)
        partials, a_partials = _multiply(a, b, a.transposed, b.transposed, dz.view(M, width), K, e, tf32, tile)
    if total is not None and partials is None:
        total.zero_()
    elif total is not None:
        column_sums(partials, width, total)
    if dy_sum is not None and a_partials is None:
        torch.sum(flat, 0, dtype=dy_sums, out=dy_sum)
    elif dy_sum is not None:
        column_sums(a_partials, K, dy_sum)
    return results


@_operator("linear_wgrad_bias", flops=_wgrad_flops)
def linear_wgrad_bias(
    dy: Tensor,
    x: Tensor,
    *,
    dtype: torch.dtype | None = None,
    sums_dtype: torch.dtype | None = None,
    tf32: bool = False,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradients of a weight, dweight = dy^T x, and of the bias after the product, dbias = sum of dy, in one launch.

    dy: [*, N] and x: [*, K] of one dtype, each contiguous in its rows or its columns; dweight: [N, K]; dbias: [N].
    Sums over rows are float32 (float64 for float64), in a fixed order, and rounded once.

    Args:
        dy: the gradient of the product.
        x: its input.
        dtype: of dweight; dy's by default.
        sums_dtype: of dbias; dy's by default.
        tf32: whether float32 operands may be rounded to TF32.
        tile: instead of the one the table has.

    Raises:
        ValueError: for shapes, strides or dtypes that cannot be multiplied.
    """
    dweight = torch.empty(_wgrad_shape(dy, x), dtype=dtype or dy.dtype, device=dy.device)
    return dweight, _wgrad(dweight, dy, x, sums_dtype, False, tf32, tile)


@_operator("linear_wgrad_bias_", written=("main_grad",), flops=lambda main_grad, *args, **rest: _wgrad_flops(*args))
def linear_wgrad_bias_(
    main_grad: Tensor,
    dy: Tensor,
    x: Tensor,
    *,
    sums_dtype: torch.dtype | None = None,
    tf32: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """`linear_wgrad_bias`, which adds dweight to `main_grad` and gives dbias.

    main_grad: [N, K] float32 (float64 for float64), last dimension contiguous.

    Raises:
        ValueError: for shapes, strides or dtypes that cannot be multiplied or added.
    """
    out = _tile_operand("main_grad", main_grad, _wgrad_shape(dy, x))
    wanted = torch.float64 if dy.dtype == torch.float64 else torch.float32
    if out.dtype != wanted:
        raise ValueError(f"main_grad must be {wanted} for gradients of {dy.dtype}, got {out.dtype}")
    if out.shape[0] > 1 and out.stride(0) < out.shape[1]:
        raise ValueError(f"main_grad has rows that overlap: strides {main_grad.stride()}")
    return _wgrad(out, dy, x, sums_dtype, True, tf32, tile)


def _wgrad_shape(dy: Tensor, x: Tensor) -> tuple[int, int]:
    _factors("dy", dy, "x", x)
    if dy.shape[:-1] != x.shape[:-1]:
        raise ValueError(f"dy and x must have the same rows, got shapes {tuple(dy.shape)} and {tuple(x.shape)}")
    return dy.shape[-1], x.shape[-1]


def _wgrad(
    out: Tensor, dy: Tensor, x: Tensor, sums_dtype: torch.dtype | None, accumulate: bool, tf32: bool, tile: Tile | None
) -> Tensor:
    """Make dweight in `out`; returns the sum of dy."""
    total = torch.empty(dy.shape[-1], dtype=sums_dtype or dy.dtype, device=dy.device)
    if stops():
        return total
    left, right = _flat(dy), _flat(x)
    if out.numel():
        a, b = _matrix("dy", left), _matrix("x", right)
        e = Epilogue(accumulate=accumulate, a_sums=total)
        _multiply(a, b, not a.transposed, b.transposed, out, left.shape[0], e, tf32, tile)
    else:
        # Nothing is multiplied: x has no columns.
        torch.sum(left, 0, dtype=total.dtype, out=total)
    return total
