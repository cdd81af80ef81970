# pyright: basic
# Kernels are called by parameter position, and Triton has no types.
"""Calls that launch every kernel in every configuration worth compiling, and records of the launches, without a GPU.

`CALLS` lists them by module, each with a name. `variants` runs a module's calls as on a GPU of an architecture and
yields each launch as Triton would compile it: types and alignment of arguments, constexprs, options.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, get_args
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from seqfuse.kernels import (
    _device,
    _launch,
    _operators,
    attention,
    crossentropy,
    decode,
    grouped,
    norm,
    permute,
    pointwise,
    quantize,
    rope,
    route,
)
from seqfuse.kernels.activations import ACTIVATIONS, composed
from seqfuse.kernels.chains import AGAIN, PACKINGS
from seqfuse.kernels.pointwise import Chain
from seqfuse.testing.compile import TRITON_DTYPES, Type, Variant, type_of

PROCESSORS = 32
"""Few, so that programs have several steps even with few rows."""

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
GELU = ACTIVATIONS["gelu"]
# As long as the longest that fusions compose, which needs the most registers.
LONGEST = composed(
    *(ACTIVATIONS[n] for n in ("gelu", "tanh", "silu", "gelu_tanh", "quickgelu", "sigmoid", "gelu", "silu"))
)
Calls = Iterator[tuple[str, Callable[[], Any]]]


@dataclasses.dataclass(frozen=True)
class Launch:
    """The arguments of one launch."""

    kernel: Any
    grid: int
    args: tuple[Any, ...]
    constexprs: dict[str, Any]
    num_warps: int
    num_stages: int
    options: dict[str, Any]

    def variant(self, name: str) -> Variant:
        """The variant to compile: Triton's types and constants for the arguments."""
        signature: dict[str, Type] = {}
        constants = dict(self.constexprs)
        divisible: list[str] = []
        for argument, value in zip(self.kernel.arg_names, self.args, strict=False):
            if value is None or (type(value) is int and value == 1):
                constants[argument] = value
                continue
            signature[argument] = type_of(value)
            if _divisible(value):
                divisible.append(argument)
        return Variant(
            name=name, kernel=self.kernel, signature=signature, constexprs=constants, divisible=tuple(divisible),
            num_warps=self.num_warps, num_stages=self.num_stages, has_dot=self.has_dot, options=self.options,
        )  # fmt: skip

    @property
    def has_dot(self) -> bool:
        """Whether it multiplies matrices with instructions that are `wgmma` on sm_90."""
        fixed, half = self.constexprs, getattr(self.args[0], "itemsize", 0) == 2  # a tuple has no itemsize
        if self.kernel is grouped._grouped_gemm_kernel or self.kernel is grouped._grouped_outer_kernel:
            return half
        if self.kernel is attention._attention_dkv_kernel:  # other than with 64 rows, it uses sm_80's instruction
            return half and fixed["BLOCK_N"] >= 64
        return "attention" in self.kernel.__name__ and half and fixed["BLOCK_M"] >= 64


def _divisible(value: Any) -> bool:
    """Whether a number or address, or each member of a tuple, is a multiple of 16."""
    if isinstance(value, tuple):
        held = [member for member in value if member is not None]
        return bool(held) and all(map(_divisible, held))
    if isinstance(value, Tensor):
        return isinstance(value, FakeTensor) or value.data_ptr() % 16 == 0
    return type(value) is int and value % 16 == 0


@contextlib.contextmanager
def launching(target: str) -> Iterator[list[Launch]]:
    """A block in which CPU tensors count as GPU tensors; launches are recorded in the returned list instead of run."""
    found: list[Launch] = []

    def note(
        kernel: Any, grid: int, args: tuple[Any, ...], constexprs: Any, warps: int, stages: int, options: Any, *_: Any
    ) -> None:
        found.append(Launch(kernel, grid, args, dict(constexprs), warps, stages, options))

    number = target.removeprefix("sm_") if target.startswith("sm_") else "90"
    properties = SimpleNamespace(
        major=int(number[:-1]), minor=int(number[-1]), multi_processor_count=PROCESSORS,
        gcnArchName="NVIDIA H200" if target.startswith("sm_") else target,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        for patch in (
            mock.patch.object(_launch, "GPU_TYPES", frozenset({"cpu", "cuda"})),
            mock.patch.object(_launch, "_run", note),
            mock.patch.object(torch._C, "_cuda_getDevice", return_value=-1, create=True),
            mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
        ):
            stack.enter_context(patch)
        for forget in (_launch.architecture.cache_clear, _launch.processors.cache_clear, _operators.forget):
            forget()
            stack.callback(forget)
        yield found


def launched(call: Callable[[], Any], target: str) -> list[Launch]:
    """The launches of a call on an architecture."""
    with launching(target) as found:
        call()
    return found


def variants(module: str, target: str) -> Iterator[Variant]:
    """The distinct launches of a module's calls on an architecture.

    `{kernel}` and `{tile}` in the name of a call are replaced by the kernel's name and its tile size.
    """
    seen: set[Any] = set()
    with launching(target) as found:
        for name, call in CALLS[module](target):
            found.clear()
            _operators.forget()
            call()
            for launch in found:
                if launch.kernel is _device._column_sums_kernel and module != "_device":
                    continue
                tile = "x".join(str(launch.constexprs[n]) for n in _TILE if n in launch.constexprs)
                kernel = launch.kernel.__name__.removesuffix("_kernel").rpartition("_")[2]
                one = launch.variant(name.format(kernel=kernel, tile=tile))
                key = tuple(
                    _plain(part)
                    for part in (one.kernel, one.signature, one.constexprs, one.divisible, one.num_warps, one.options)
                )
                if key not in seen:
                    seen.add(key)
                    yield one


_TILE = ("BLOCK_M", "BLOCK_N")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((key, _plain(one)) for key, one in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    return id(value) if hasattr(value, "arg_names") else (type(value), value)


def _new(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _name(dtype: torch.dtype) -> str:
    return TRITON_DTYPES[str(dtype).removeprefix("torch.")]


SEED = torch.zeros((), dtype=torch.int64)


def _sums(target: str) -> Calls:
    """Every dtype and block, one row or column of partial sums, which Triton makes constants, and several sums."""
    for dtypes, columns in (((F32,), 256), ((BF16,), 256), ((F16,), 256), ((F64,), 256), ((BF16, BF16, F32), 256)):
        partial = F64 if F64 in dtypes else F32
        for rows in (2, 8, 64):
            whole = _new(rows, len(dtypes) * columns, dtype=partial)
            outs = [_new(columns, dtype=of) for of in dtypes]
            name = f"column_sums {'+'.join(map(_name, dtypes))} {rows}"
            yield name, functools.partial(_device.column_sums, whole, columns, *outs)
    for rows, columns in ((1, 256), (8, 1)):
        call = functools.partial(_device.column_sums, _new(rows, columns, dtype=F32), columns, _new(columns))
        yield f"column_sums bf16 {rows} x {columns}", call
    many = [_new(256, dtype=F64) for _ in range(3)]
    yield "column_sums fp64+fp64+fp64 64", functools.partial(_device.column_sums, _new(64, 768, dtype=F64), 256, *many)


def _norms(target: str) -> Calls:
    """Both norms: every tile for bfloat16, one width for other dtypes, and unaligned widths."""
    branch, around = ("pre_bias", "seed", "residual"), ("pre_bias", "seed", "residual", "act")
    widths = (64, 1024, 2048, 4096, 8192, 12288, 16384, 65536, 1001, 4095, 5000, 16383, 65535)
    of = [(BF16, columns, parts, None) for columns in widths for parts in ((), around)]
    of += [(BF16, columns, ("residual",), None) for columns in (256, 512, 2048, 4096, 10240, 12288, 16384)]
    of += [(BF16, columns, (*branch, "acts"), None) for columns in (64, 1024, 4096, 16384, 65536, 4095)]
    of += [(BF16, c, ("residual", "pairs"), None) for c in (256, 2048, 4096, 8192, 16384, 1001)]
    of += [(F32, c, ("residual", "pairs"), None) for c in (1024, 4096, 8192)]
    of += [(dtype, c, around, None) for dtype in (F16, F32, F64) for c in (1024, 4096, 8192, 16384, 65536)]
    of += [(BF16, c, parts, F32) for c in (1024, 4096, 8192, 65536, 1001) for parts in ((), ("residual",), branch)]
    for centered in (True, False):
        for dtype, columns, parts, wide in of:
            kinds = _name(dtype) if wide is None else f"{_name(dtype)} in {_name(wide)}"
            label = "layernorm" if centered else "rmsnorm"
            name = f"{label}{'+' + ','.join(parts) if parts else ''} {kinds} {columns} {{kernel}} {{tile}}"
            yield name, functools.partial(_norm, centered, dtype, columns, parts, wide or dtype)
    forms = (((), False), (branch[:1], False), (branch, False), ((), True), (branch, True))
    for to, centered, dtype, (parts, autocast) in itertools.product(_codes(target), (True, False), (BF16, F16), forms):
        of_16 = dtype is BF16 or (to.down_columns and not centered)
        if of_16 and (to.scaling != "1x128" or not autocast):
            label, way = "layernorm" if centered else "rmsnorm", "rows+columns" if to.down_columns else "rows"
            name = f"{label} {{kernel}} {to.scaling} {way} {','.join(parts)} {_name(dtype)}{' in fp32' * autocast}"
            yield name, functools.partial(_norm_codes, to, centered, dtype, F32 if autocast else dtype, parts)


def _norm_codes(to: quantize.As, centered: bool, dtype: torch.dtype, wide: torch.dtype, parts: tuple[str, ...]) -> None:
    """Both passes; the residual stream and all parameters may be float32. No backward if it exceeds the registers."""
    x, stream, row = _new(8192, 4096, dtype=dtype), _new(8192, 4096, dtype=wide), _new(4096, dtype=wide)
    seed: dict[str, Any] = {"seed": SEED, "p": 0.1} if "seed" in parts else {}
    most: dict[str, Any] = {"largest": _new(1, dtype=F32)} if to.scaling == "given" else {}
    pre_bias = row if "pre_bias" in parts else None
    norm.norm_codes(
        x, row, row if centered else None, 1e-5, to, centered=centered, residual=stream, dtype=dtype,
        stream_dtype=wide, pre_bias=pre_bias, **seed, **most,
    )  # fmt: skip
    if (to.scaling == "1x128" or wide is not dtype) and (centered or seed):
        return
    stats = _new(8192, dtype=F32)
    norm.norm_codes_backward(
        x, stream, stats if centered else None, stats, row, to, dstream=stream, dweight=wide,
        dbias=wide if centered else None, dpre_bias=None if pre_bias is None else wide, branch_dtype=dtype, **seed,
        **most,
    )  # fmt: skip


def _norm(centered: bool, dtype: torch.dtype, columns: int, parts: tuple[str, ...], wide: torch.dtype) -> None:
    """Both passes; the stream, and all tensors except x, y, dy and the branch's gradient, may have a wider dtype.

    Under autocast they do, where without a prologue x is the stream.
    """
    M = max(200, 2**21 // columns) + 8  # not a multiple of 16
    act = {"act": GELU, "acts": LONGEST}.get(parts[-1] if parts else "")
    seed: dict[str, Any] = {"seed": SEED, "p": 0.1} if "seed" in parts else {}
    row, stream = _new(columns, dtype=wide), _new(M, columns, dtype=wide)
    given = {"pre_bias": row, "residual": stream}
    pairs, experts = None, ()
    if "pairs" in parts:
        at, ends, experts = torch.zeros(M, 2, dtype=torch.int64), torch.zeros(8, dtype=torch.int32), (2,)
        pairs = permute.Pairs(at, ends, _new(M, 2, dtype=F32))
    branch = _new(M, *experts, columns, dtype=dtype)
    norm.norm_fwd(
        branch if parts else _new(M, columns, dtype=wide), row, row if centered else None, 1e-5, centered=centered,
        pairs=pairs, act=act, dtype=dtype, stream_dtype=wide, **seed,
        **{name: given[name] for name in parts if name in given},
    )  # fmt: skip
    stats = _new(M, dtype=F64 if dtype is F64 else F32)
    norm.norm_bwd(
        _new(M, columns, dtype=dtype), stream, stats if centered else None, stats, row, row if centered else None,
        act=act, dweight=wide, dbias=wide if centered else None, dstream=stream if "residual" in parts else None,
        dpre_bias=wide if "pre_bias" in parts else None, branch_dtype=dtype, **seed,
        dbranch=bool(seed) or (bool(parts) and wide is not dtype), pairs=pairs, other=branch if pairs else None,
        dpairs=pairs is not None, dfactors=F32 if pairs else None,
    )  # fmt: skip


def _chains(target: str) -> Calls:
    """Each activation in each place, and chains with the lengths and operands of fusions."""
    p = pointwise
    for activation in ACTIVATIONS.values():
        for step in (p.act, p.dact, p.gated, p.dgated):
            yield _chain(Chain(step(activation)))
        for step in (p.dact, p.dgated):
            yield _chain(Chain(step(activation), p.column_sum()))
    chains = (
        Chain(p.bias(), p.store(), p.act(GELU)),
        Chain(p.bias(), p.store(), p.gated(GELU), p.dropout(0.1)),
        Chain(p.bias(), p.dropout(0.1), p.add(), p.store()),
        Chain(p.scale(0.5), p.add()),
        Chain(p.bias(), p.act(GELU), p.act(GELU), p.scale(2.0), p.dropout(0.1), p.add(), p.act(GELU), p.store()),
        Chain(p.dropout(0.1), p.dact(GELU), p.column_sum()),
        Chain(p.dropout(0.1), p.dgated(GELU), p.column_sum()),
        Chain(p.emit(GELU), p.dact(GELU), p.column_sum()),
        Chain(p.emit_gated(GELU), p.dgated(GELU), p.column_sum()),
        Chain(p.shift(), p.emit(GELU), p.dact(GELU), p.column_sum()),
        Chain(p.shift(True), p.emit_gated(GELU), p.dgated(GELU), p.column_sum()),
        Chain(p.add(), p.store(), p.dropout(0.1), p.column_sum()),
        Chain(p.column_sum()),
        Chain(p.dropout(0.1), p.bias(), p.act(GELU), p.dropout(0.2), p.scale(2.0)),
        Chain(p.scale(2.0), p.dropout(0.2), p.dact(GELU), p.column_sum(), p.dropout(0.1)),
        Chain(p.bias(), p.store(), p.act(LONGEST)),
        Chain(p.dact(LONGEST), p.column_sum()),
        Chain(p.dact(composed(*(ACTIVATIONS[name] for name in ("tanh", "relu", "gelu")))), p.column_sum()),
        Chain(p.dropout(0.1)),
        *(Chain(*steps) for packing in PACKINGS for steps in _gated(packing)),
    )
    for chain in chains:
        for dtype in (BF16, F16, F32, F64):
            for width in (4096, 1001, 24, 7) if dtype is BF16 else (4096,):
                yield _chain(chain, dtype, width)
        yield _chain(chain, operand=F32)
    yield _chain(Chain(p.column_sum()), result=False)
    for packing in PACKINGS:
        unit = ACTIVATIONS["clamped_silu"], ACTIVATIONS["clamp"], packing
        for width in (4096, 1001):  # where only the factors have a gradient
            yield _chain(Chain(p.shift(True), p.dot_gated(*unit)), width=width, result=False)
    again = [Chain(p.emit(GELU), p.dact(GELU)), Chain(p.emit_gated(GELU), p.dgated(GELU))]
    again += [chain for packing in PACKINGS for steps in _gated(packing) if (chain := Chain(*steps)).reads_again]
    for chain in (*chains[7:11], *again):
        for width in (4096, 1001):
            yield _chain(chain, width=width, again=True)
    for chain, rows, width in (
        (chains[1], 1, 4096), (chains[1], 1000, 1), (chains[6], 1, 4096), (chains[6], 50, 4096), (chains[6], 1000, 1),
    ):  # fmt: skip
        yield _chain(chain, width=width, rows=rows)


def _gated(packing: str) -> Iterator[tuple[Any, ...]]:
    """Chains of a gated unit of two functions, in both directions, and with a factor for each token."""
    unit = ACTIVATIONS["clamped_silu"], ACTIVATIONS["clamp"], packing
    p = pointwise
    yield p.bias(), p.store(), p.gated(*unit)
    yield p.bias(), p.gated(*unit), p.token_scale()
    yield p.shift(True), p.emit_gated(*unit), p.dgated(*unit), p.column_sum()
    yield p.shift(True), p.dot_gated(*unit), p.token_scale(), p.dgated(*unit), p.column_sum()
    yield p.dot_gated(*unit), p.token_scale(), p.dgated(*unit)
    yield p.dot_gated(*unit), p.token_scale(), p.emit_gated(*unit), p.dgated(*unit)
    yield p.token_scale(), p.emit_gated(*unit), p.dgated(*unit)


def _chain(
    chain: Chain,
    dtype: torch.dtype = BF16,
    width: int = 4096,
    operand: torch.dtype | None = None,
    rows: int | None = None,
    result: bool = True,
    again: bool = False,
) -> tuple[str, functools.partial[Any]]:
    """A call on x of `dtype` whose narrowest tensor has `width` columns; `again` if an operand is read twice."""
    rows = rows or (1000 if width >= 1000 else 20_000)  # several steps per program
    operands: list[Tensor] = []
    before: Any = None
    read = _new(1)
    for step, parts in zip(chain.steps, chain.parts, strict=False):
        columns = parts * width * (2 if step.operand in ("packed", "packed row") else 1)
        if step.operand == "seed":
            operands.append(SEED)
        elif step.operand is not None:
            if step.operand == "tokens":
                operands.append(_new(rows, dtype=F32))
            elif again and (before, step.kind) in AGAIN:
                operands.append(read)
            else:
                shape = (columns,) if "row" in step.operand else (rows, columns)
                operands.append(read := _new(*shape, dtype=operand or dtype))
        before = before if step.operand == "tokens" else step.kind
    x = _new(rows, chain.parts[0] * width, dtype=dtype)
    kinds = _name(dtype) if operand is None else f"{_name(dtype)}+{_name(operand)}"
    ones = "".join(f" {name}=1" for name, n in (("M", rows), ("width", width)) if n == 1) or " steps=1" * (rows == 50)
    name = f"{chain.name}{'' if result else ',-'} {kinds} {{tile}}" + " odd" * (width % 16 > 0) + " again" * again
    return name + ones, functools.partial(pointwise.pointwise, x, chain, operands, result=result)


_ROTATIONS = (
    (64, rope.Rotation("half", 64)),
    (128, rope.Rotation("half", 128)),
    (128, rope.Rotation("interleaved", 128)),
    (128, rope.Rotation("half", 32)),
    (96, rope.Rotation("interleaved", 24)),
    (256, rope.Rotation("half", 256)),
    (1024, rope.Rotation("interleaved", 512)),
    (80, rope.Rotation("half", 80)),
    (127, rope.Rotation("half", 126)),
    (128, None),
)
_AROUND = (("bias", "norm", "positions"), ("norm",), ("bias",), (), ("bias", "norm", "cos"), ("cos by pair",))


def _ropes(target: str) -> Calls:
    """Common head sizes, both styles, with and without bias, norm and positions; every dtype for one size."""
    for dtype in (BF16, F16, F32):
        for size, rotation in _ROTATIONS if dtype is BF16 else _ROTATIONS[1:3]:
            style = "none" if rotation is None else f"{rotation.style} {rotation.dim}"
            for around in _AROUND:
                if rotation is not None or ("norm" in around and "cos" not in around):
                    name = f"rope{'+' + ','.join(around) if around else ''} {_name(dtype)} {size} {style} {{kernel}}"
                    yield name, functools.partial(_rope, dtype, size, rotation, around)
            for int8 in (False, True) if size <= 256 else ():
                name = f"rope_write {_name(dtype)} {size} {style}{' int8' * int8}"
                yield name, functools.partial(_rope_write, dtype, size, rotation, int8)
    ways = ((128, "half"), (64, "half"), (32, "half"), (128, "interleaved"), (64, "interleaved"))
    for to, (size, style), dtype in itertools.product(_codes(target), ways, (BF16, F16)):
        biased = style == "half" and (size == 128 or target not in ("sm_100", "sm_120"))  # as `can_quantize` requires
        each = ("", *["bias"] * biased, "positions", "cos", "cos by pair")
        for around in each if size == 128 or to.down_columns else ():
            way = "rows+columns" if to.down_columns else "rows"
            name = f"rope {{kernel}} {to.scaling} {way} {_name(dtype)} {size} {style} {around}"
            if dtype is BF16 or to.down_columns:
                dbias = dtype if biased and around else None
                yield name, functools.partial(_rope_codes, to, dtype, size, style, around, dbias)


def _rope_codes(
    to: quantize.As, dtype: torch.dtype, size: int, style: Any, around: str, dbias: torch.dtype | None
) -> None:
    heads, kv, (batch, rows) = 24, 8, (8, 1024)
    places: dict[str, Any] = {"positions": torch.empty(batch, rows, dtype=torch.int64)} if around == "positions" else {}
    if around.startswith("cos"):
        angles = _new(batch, rows, size // (2 if around == "cos by pair" else 1), dtype=dtype)
        places |= {"cos": angles, "sin": angles}
    dy, most = _new(batch, rows, (heads + 2 * kv) * size, dtype=dtype), _new(1, dtype=F32)
    rope.rope_codes_backward(
        dy, heads, kv, rope.Rotation(style, size), to, dbias=dbias, **places,
        largest=most if to.scaling == "given" else None,
    )  # fmt: skip


def _rope(dtype: torch.dtype, size: int, rotation: rope.Rotation | None, around: tuple[str, ...]) -> None:
    heads, kv, (batch, rows) = 24, 8, (8, 125)
    x, gain = _new(batch, rows, (heads + 2 * kv) * size, dtype=dtype), _new(size, dtype=dtype)
    norm, bias = "norm" in around, "bias" in around
    places: dict[str, Any] = {}
    if rotation is not None and "positions" in around:
        places["positions"] = torch.empty(batch, rows, dtype=torch.int64)
    for name in around:
        if rotation is not None and name.startswith("cos"):
            angles = _new(batch, rows, rotation.dim // (2 if name == "cos by pair" else 1), dtype=dtype)
            places |= {"cos": angles, "sin": angles}
    gains = {"q_weight": gain, "k_weight": gain} if norm else {}
    rope.rope_fwd(
        x, heads, kv, rotation, **places, **gains, bias=_new(x.shape[-1], dtype=dtype) if bias else None,
        norm_eps=1e-6 if norm else None, store=norm and bias,
    )  # fmt: skip
    sums = {"dq_weight": dtype, "dk_weight": dtype} if norm else {}
    kept = {"x": x, "rstd": _new(batch, rows, heads + kv, dtype=F32)} if norm else {}
    rope.rope_bwd(x, heads, kv, rotation, **places, **gains, **kept, **sums, dbias=dtype if bias else None)


def _rope_write(dtype: torch.dtype, size: int, rotation: rope.Rotation | None, int8: bool) -> None:
    heads, kv, batch, most = 24, 8, 3, 100
    gain = _new(size, dtype=dtype)
    caches = [_new(batch, kv, most, size, dtype=torch.int8 if int8 else dtype) for _ in "kv"]
    scales = {name: _new(batch, kv, most, dtype=F32) for name in ("k_scale", "v_scale")} if int8 else {}
    rope.rope_write(
        _new(batch, (heads + 2 * kv) * size, dtype=dtype), heads, kv, rotation, *caches,
        torch.zeros(batch, dtype=torch.int64), bias=_new((heads + 2 * kv) * size, dtype=dtype), norm_eps=1e-6,
        q_weight=gain, k_weight=gain, **scales,
    )  # fmt: skip


_LIMITS: dict[str, dict[str, Any]] = {
    "": {},
    "causal": {"causal": True},
    "dropout": {"causal": True, "p": 0.1},
    "packed": {"causal": True, "packed": True, "window": 4096},
    "softcap": {"causal": True, "softcap": 30.0, "window": 4096},
    "bool": {"mask": torch.bool},
    "float": {"mask": F32, "p": 0.1},
}


def _attentions(target: str) -> Calls:
    """Every kernel for common head sizes and an odd one, with each way to limit scores."""
    for dtype, sizes in ((BF16, (64, 80, 128, 192, 256)), (F16, (128,)), (F32, (64, 128))):
        for size, (name, limits) in itertools.product(sizes, _LIMITS.items()):
            label = f"attention {{kernel}} {_name(dtype)} {size}{' ' if name else ''}{name}"
            yield label, functools.partial(_attention, dtype, size, **limits)


def _attention(
    dtype: torch.dtype, size: int, mask: Any = None, packed: bool = False, p: float = 0.0, **limits: Any
) -> None:
    rows = 97 if mask is F32 else 96  # float masks have an odd number of rows
    q, k, v, dy = (_new(2, heads, rows, size, dtype=dtype) for heads in (8, 2, 2, 8))
    given: dict[str, Any] = limits | ({} if mask is None else {"mask": torch.empty(1, 1, rows, rows, dtype=mask)})
    given |= {"cu_seqlens": torch.zeros(9, dtype=torch.int32)} if packed else {}
    given |= {"seed": SEED, "p": p} if p else {}
    y, lse = attention.attention_fwd(q, k, v, **given)
    attention.attention_bwd(dy.transpose(1, 2), q, k, v, y, lse, (q, k, v), **given)


def _decodes(target: str) -> Calls:
    """Sizes of heads and groups, quantized or not, with one split and several; merges and writes.

    A dot of 16 rows cannot use `wgmma`, which needs 64; speed depends on reading the cache once, 16 bytes at a time.
    """
    for dtype in (BF16, F16, F32):
        for size in (64, 80, 128, 256) if dtype is BF16 else (128, 256):
            for group, int8, limited, split in (
                (1, False, False, True), (4, True, True, True), (8, False, True, False), (32, True, False, True),
            ):  # fmt: skip
                if int8 and dtype is F32 and size > 128:
                    continue
                label = f"{{kernel}} {_name(dtype)} {size} group {group}"
                label += " int8" * int8 + " limited" * limited + " split" * split
                yield label, functools.partial(_decode, dtype, size, group, int8, limited, 4096 if split else 16)
            few = functools.partial(_decode, dtype, size, 1, False, False, 4096, batch=PROCESSORS // 2)
            yield f"{{kernel}} {_name(dtype)} {size} few splits", few
            for int8 in (False, True):
                cache = _cache(dtype, size, int8, 100, 3)
                row = _new(3, 6 * size, dtype=dtype)
                yield (
                    f"rope_write {_name(dtype)} {size} without RoPE{' int8' * int8}",
                    functools.partial(rope.rope_write, row, 2, 2, None, **cache),
                )


def _cache(dtype: torch.dtype, size: int, int8: bool, rows: int, batch: int) -> dict[str, Tensor]:
    made = {name: _new(batch, 2, rows, size, dtype=torch.int8 if int8 else dtype) for name in "kv"}
    made |= {name: _new(batch, 2, rows, dtype=F32) for name in ("k_scale", "v_scale")} if int8 else {}
    return made | {"lengths": torch.zeros(batch, dtype=torch.int64)}


def _decode(dtype: torch.dtype, size: int, group: int, int8: bool, limited: bool, rows: int, batch: int = 1) -> None:
    limits: dict[str, Any] = {"window": 4096, "softcap": 30.0} if limited else {}
    q = _new(batch, 2 * group, size, dtype=dtype)
    decode.decode_attention(q, **_cache(dtype, size, int8, rows, batch), **limits)


def _losses(target: str) -> Calls:
    """Each dtype, aligned or not, with all options and none, both ways of computing the gradient, and without it."""
    for way in ("ahead", "given"):
        yield f"cross_entropy+all {way} bf16 1", functools.partial(_loss, BF16, 1, True, way, 1)
    for dtype, classes in itertools.product((BF16, F16, F32, F64), (100, 1024, 262144, 50257)):
        for full, way in itertools.product((False, True), ("ahead", "given", "loss")):
            name = f"cross_entropy{'+all' if full else ''} {way} {_name(dtype)} {classes}"
            yield name, functools.partial(_loss, dtype, classes, full, way, 9)


def _loss(dtype: torch.dtype, classes: int, full: bool, way: str, rows: int) -> None:
    stats = F64 if dtype is F64 else F32
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0} if full else {}
    options |= {"ignore_index": 1} if rows == 1 else {}
    if way == "given":
        options |= {"scale": _new(rows, dtype=stats), "softmax": _new(2, rows, dtype=stats)}
    targets = torch.zeros(rows, dtype=torch.int64)
    crossentropy.cross_entropy_(_new(rows, classes, dtype=dtype), targets, gradient=way != "loss", **options)


def _quantizations(target: str) -> Calls:
    """Every scaling, both directions and each one, for rows with aligned transposes or not; none before sm_89."""
    if "quantize" in WITHOUT.get(target, ()):
        return
    scale, largest = _new(1, dtype=F32), _new(1, dtype=F32)
    for scaling, dtype, rows in itertools.product(get_args(quantize.Scaling), (BF16, F16, F32), (1024, 1003)):
        given = {"scale": scale, "largest": largest} if scaling == "given" else {}
        for way in {BF16: ("rows", "columns", "rows+columns"), F16: ("rows+columns",), F32: ("rows",)}[dtype]:
            of = torch.float8_e5m2 if (dtype is F32) == (scaling == "tensor") else torch.float8_e4m3fn
            asked = {name: name in way.split("+") for name in ("rows", "columns")}
            call = functools.partial(
                quantize.quantize_matrix,
                _new(rows, 1024, dtype=dtype),
                of,
                scaling,
                power_of_two=dtype is F16,
                **asked,
                **given,
            )
            yield f"{{kernel}} {scaling} {way} {_name(dtype)}{' odd' * (rows % 16 > 0)}", call
    for scaling, dtype, way in itertools.product(("128x128", "1x32"), (BF16, F16), ("rows", "rows+columns")):
        some = [_new(*shape, dtype=dtype) for shape in ((4096, 1024), (1024, 4096), (1024, 1024), (2048, 1024))]
        asked = {"power_of_two": dtype is BF16, "columns": "columns" in way}
        call = functools.partial(quantize.quantize_several, some[0], some[1:], torch.float8_e4m3fn, scaling, **asked)
        yield f"{{kernel}} {scaling} {way} {_name(dtype)}", call
    p = pointwise
    chains = (
        Chain(p.gated(GELU)), Chain(p.bias(), p.store(), p.act(GELU)), Chain(p.dgated(GELU)),
        Chain(p.dgated(GELU), p.column_sum()), Chain(p.dact(GELU), p.column_sum()),
        Chain(p.bias(), p.store(), p.gated(GELU)),
    )  # fmt: skip
    for chain, to, dtype in itertools.product(chains, _codes(target), (BF16, F16)):
        if (chain is not chains[-1] or to.scaling != "1x128") and (dtype is BF16 or to.down_columns):
            arguments = _chain(chain, dtype, rows=8192)[1].args
            way = "rows+columns" if to.down_columns else "rows"
            largest = _new(1, dtype=F32) if to.scaling == "given" else None
            call = functools.partial(pointwise.pointwise_codes, *arguments, to, largest)
            yield f"{{kernel}} {chain.name} {to.scaling} {way} {_name(dtype)}", call


def _codes(target: str) -> Iterator[quantize.As]:
    """Every scaling of kernels that quantize their result, along rows or both, on GPUs that support it."""
    none = target.startswith("gfx") or "quantize" in WITHOUT.get(target, ())
    scalings = () if none else ("1x128", "1x32", "given") if target == "sm_90" else ("1x32", "given")
    for scaling, down in itertools.product(scalings, (True, False)):
        given = _new(1, dtype=F32) if scaling == "given" else None
        yield quantize.As(scaling, torch.float8_e4m3fn, scaling == "1x128", True, down, given)


def _groups(target: str) -> Calls:
    """Each dtype, few and many rows in a group, sizes that tiles divide or not, and weights in both orders."""
    for dtype, rows, (columns, depth) in itertools.product((BF16, F16, F32), (512, 65536), ((1024, 512), (1001, 333))):
        x, dy = _new(rows, depth, dtype=dtype), _new(rows, columns, dtype=dtype)
        weight, bias = _new(8, columns, depth, dtype=dtype), _new(8, columns, dtype=dtype)
        offsets = torch.zeros(8, dtype=torch.int32)
        name = f"{{kernel}} {_name(dtype)} {rows} x {columns} x {depth}{' odd' * (columns % 16 > 0)}"
        for tf32 in (False, True) if dtype is F32 else (False,):
            of = f"{name}{' tf32' * tf32}"
            yield f"{of} bias", functools.partial(grouped.grouped_gemm, x, weight, offsets, bias, tf32=tf32)
            yield f"{of} turned", functools.partial(grouped.grouped_gemm, dy, weight.mT, offsets, tf32=tf32)
            yield of, functools.partial(grouped.grouped_outer, dy, x, offsets, tf32=tf32)
            how: dict[str, Any] = {"order": torch.zeros(rows, dtype=torch.int64), "top_k": 2, "tf32": tf32}
            tokens = _new(rows // 2, depth, dtype=dtype)
            yield f"{of} tokens", functools.partial(grouped.grouped_gemm, tokens, weight, offsets, bias, **how)
            yield f"{of} tokens", functools.partial(grouped.grouped_outer, dy, tokens, offsets, **how)
        yield name, functools.partial(grouped.group_sums, dy, offsets)
        yield name, functools.partial(grouped.finish_rows_, dy, offsets, None)
        yield f"{name} bias", functools.partial(grouped.finish_rows_, dy, offsets, bias)


def _permutes(target: str) -> Calls:
    """Each dtype, aligned and not, with all options and none."""
    for dtype, columns, top_k in (*itertools.product((BF16, F16, F32, F64), (4096, 1001), (2, 8)), (F32, 1, 1)):
        stats, tokens = F64 if dtype is F64 else F32, 64
        x, other = _new(tokens, columns, dtype=dtype), _new(tokens * top_k, columns, dtype=dtype)
        rows, offsets = torch.zeros(tokens, top_k, dtype=torch.int64), torch.zeros(16, dtype=torch.int32)
        name = f"{{kernel}} {_name(dtype)} {columns} top {top_k}{' odd' * (columns % 16 > 0)}"
        for factors in (None, _new(tokens, top_k, dtype=F32)):
            of = f"{name}{' factors' * (factors is not None)}"
            yield of, functools.partial(permute.gather_rows, other, rows, offsets, factors=factors)
            yield of, functools.partial(permute.spread_rows, x, rows, offsets, factors=factors)
            both = functools.partial(permute.spread_rows, x, rows, offsets, factors=factors, other=other, sums=stats)
            yield f"{of} sums", both


def _routes(target: str) -> Calls:
    """Each dtype, with few and many experts."""
    for dtype, count in itertools.product((BF16, F16, F32, F64), (8, 60, 256)):
        logits, experts = _new(4096, count, dtype=dtype), torch.zeros(4096, 4, dtype=torch.int64)
        d = _new(4096, 4, dtype=F64 if dtype is F64 else F32)
        for softmax in (True, False):
            name = f"{{kernel}} {_name(dtype)} {count} {'softmax' if softmax else 'sigmoid'}"
            yield name, functools.partial(route.route_factors, logits, experts, softmax=softmax)
            yield name, functools.partial(route.route_gradients, d, logits, experts, softmax=softmax)


_CODES = "_chain_codes_kernel", "_norm_codes_kernel", "_norm_codes_bwd_kernel", "_rope_codes_bwd_kernel"
WITHOUT: dict[str, tuple[str, ...]] = {
    "sm_80": ("quantize", *_CODES),
    **dict.fromkeys(("gfx942", "gfx950"), _CODES),
}
"""By architecture, modules and kernels that are not launched on it."""

CALLS: dict[str, Callable[[str], Calls]] = {
    "_device": _sums,
    "attention": _attentions,
    "crossentropy": _losses,
    "decode": _decodes,
    "grouped": _groups,
    "norm": _norms,
    "permute": _permutes,
    "pointwise": _chains,
    "quantize": _quantizations,
    "rope": _ropes,
    "route": _routes,
}
