"""Low-precision recipes: how the operands of GEMMs are quantized to 8 bits; and `quantize`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Generator
from contextvars import ContextVar
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import InputError

__all__ = [
    "MXFP8",
    "Direction",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8DelayedScaling",
    "Float8RowScaling",
    "Recipe",
    "Role",
    "dequantize",
    "quantize",
]

Role = Literal["x", "weight", "dy"]
"""An operand of the GEMMs of a `Linear`: its input, its weight, or the gradient of its output."""
Direction = Literal["rows", "columns"]
"""The dimension that a GEMM sums over: along each row of a matrix, or down its columns."""

MULTIPLE = 16
"""Sizes of quantized GEMMs must be multiples of it, on every device, so that a model has equal results on each."""

_FLOAT32_MAX = torch.finfo(torch.float32).max
# The largest number of a format is 1.75 times this power of two.
_EXPONENT = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}
_Block = tuple[int | None, int | None]
_classes: dict[str, type[Recipe]] = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the operands of GEMMs are quantized; base of all recipes. Frozen, hashable and comparable.

    A GEMM sums along the rows of one operand and down the columns of the other. Forward: x rows, weight rows. dx: dy
    rows, weight columns. dweight: dy columns, x columns.

    Args:
        format: `"e4m3"` for every operand, or `"hybrid"`: e4m3 for x and weight, e5m2 for dy (wider range).
        strict: whether it is an error if an operation cannot be quantized; otherwise it runs in the dtype of its input,
            and the plan gives the reason.
        emulate: whether a device without GEMMs for the recipe computes the same results with float32 GEMMs. If `False`,
            such a device is an error. A CPU always emulates.

    Raises:
        InputError: (SF106) for another format, or a flag that is not a bool.
    """

    format: Literal["hybrid", "e4m3"] = "e4m3"
    strict: bool = False
    emulate: bool = False

    power_of_two: ClassVar[bool] = False
    keeps_state: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in ("bool", bool) and type(value) is not bool:
                raise InputError(f"{self} takes True or False for {field.name}, got {value!r}", code="SF106")
        if self.format not in ("hybrid", "e4m3"):
            raise InputError(f'{self} takes format "hybrid" or "e4m3", got {self.format!r}', code="SF106")

    def dtype(self, role: Role) -> torch.dtype:
        """The 8-bit format of an operand."""
        return torch.float8_e5m2 if role == "dy" and self.format == "hybrid" else torch.float8_e4m3fn

    def block(self, role: Role, direction: Direction) -> _Block:
        """Shape of the block of rows and columns that shares a scale; `None` for a whole dimension (the default)."""
        return None, None

    def scaling(self, role: Role, one: str = "tensor") -> str:
        """The elements that share a scale, as printed in plans; `one` is the word for the whole tensor or group."""
        rows, columns = self.block(role, "rows")
        return f"per {one}" if rows is None else "per row" if columns is None else f"{rows}x{columns}"

    @property
    def whole_rows(self) -> bool:
        """Whether scales are per tensor, row or column, as in torch's scaled GEMMs."""
        return self.block("x", "rows")[1] is None

    @property
    def by_blocks(self) -> int | None:
        """Numbers that share a scale in torch's GEMMs of e4m3: 128, on sm_90; or 32, with E8M0 scales, on sm_100."""
        size = self.block("x", "rows")[1]
        known = size == 128 or (size == 32 and isinstance(self, MXFP8))
        return size if known and self.format == "e4m3" else None

    def has_gemms(self, number: int) -> bool:
        """Whether torch has GEMMs for it on an `sm_{number}`: instructions for e4m3 and e5m2 begin with sm_89."""
        if self.whole_rows:
            return number >= 89
        return (self.by_blocks, number // 10) in ((128, 9), (32, 10))

    @property
    def constants(self) -> tuple[Any, ...]:
        """The name of the class and the value of each field: `recipe_of(*recipe.constants) == recipe`."""
        return type(self).__qualname__, *[getattr(self, field.name) for field in dataclasses.fields(self)]

    def __init_subclass__(cls) -> None:
        _classes[cls.__qualname__] = cls

    def __str__(self) -> str:
        return type(self).__name__


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8CurrentScaling(Recipe):
    """One scale per tensor, from its current values: scale = largest / max |x|.

    Args:
        format: as in `Recipe`; e5m2 for dy by default.
        power_of_two: whether scales are rounded down to powers of two.
    """

    format: Literal["hybrid", "e4m3"] = "hybrid"
    power_of_two: bool = False  # pyright: ignore[reportIncompatibleVariableOverride]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8DelayedScaling(Recipe):
    """One scale per tensor, from its values in earlier steps: scale = (largest / max |x| in the history) / 2^margin.

    Each operation has scales and histories as buffers, `x_scale` [] and `x_amax_history` [history]; likewise for weight
    and dy. The first entry of the history is max |x| over all passes of the current step. After a step of the optimizer
    of the weight, or by `sf.update_scales(model)`, scales are recomputed and the histories shifted. Scales start at 1
    and do not change if the maximum is 0 or not finite.

    Args:
        format: as in `Recipe`; e5m2 for dy by default.
        history: number of steps in the history.
        margin: exponent of the power of two that scales are divided by.
        algorithm: `"max"` over the history, or `"most_recent"`, its newest entry.
        reduce: whether maxima are taken over the default process group, whose processes all have the same model.

    Raises:
        InputError: (SF106) for a history below 1, a margin that is not an integer, or another algorithm.
    """

    format: Literal["hybrid", "e4m3"] = "hybrid"
    history: int = 1024
    margin: int = 0
    algorithm: Literal["max", "most_recent"] = "max"
    reduce: bool = True
    keeps_state: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.history) is not int or self.history < 1 or type(self.margin) is not int:
            given = f"history={self.history!r} and margin={self.margin!r}"
            message = f"history must be an integer of 1 or more, and margin an integer, got {given}"
            raise InputError(message, code="SF106", operation="Float8DelayedScaling")
        if self.algorithm not in ("max", "most_recent"):
            message = f'algorithm must be "max" or "most_recent", got {self.algorithm!r}'
            raise InputError(message, code="SF106", operation="Float8DelayedScaling")

    def scaling(self, role: Role, one: str = "tensor") -> str:
        return f"per {one}, delayed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8RowScaling(Recipe):
    """One scale per row or column of x, weight and dy, whichever the GEMM sums along.

    Args:
        power_of_two: whether scales are rounded down to powers of two.
    """

    power_of_two: bool = False  # pyright: ignore[reportIncompatibleVariableOverride]

    def block(self, role: Role, direction: Direction) -> _Block:
        return (1, None) if direction == "rows" else (None, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8BlockScaling(Recipe):
    """One scale per 128 elements of x and dy along the summed dimension, and per `128 x 128` block of the weight.

    Source: DeepSeek-AI 2024, arXiv:2412.19437, section 3.3.

    Args:
        power_of_two: whether scales are rounded down to powers of two.
    """

    power_of_two: bool = True  # pyright: ignore[reportIncompatibleVariableOverride]

    def block(self, role: Role, direction: Direction) -> _Block:
        if role == "weight":
            return 128, 128
        return (1, 128) if direction == "rows" else (128, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP8(Recipe):
    """One scale per 32 elements along the summed dimension: the smallest power of two (E8M0, 8 bits) without overflow.

    Source: OCP Microscaling Formats (MX) v1.0; the exponent is rounded up, as in NVIDIA's training kernels.
    """

    power_of_two: ClassVar[bool] = True

    def block(self, role: Role, direction: Direction) -> _Block:
        return (1, 32) if direction == "rows" else (32, 1)


def recipe_of(name: str, *values: Any) -> Recipe:
    """The recipe with these `constants`."""
    cls = _classes[name]
    names = [field.name for field in dataclasses.fields(cls)]
    return cls(**dict(zip(names, values, strict=True)))


def quantize(
    x: Tensor,
    recipe: Recipe,
    role: Role,
    direction: Direction,
    *,
    scale: Tensor | None = None,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize a GEMM operand to 8 bits: x ~ data * inverse_scale.

    data = x * scale in float32, rounded to nearest even and saturated. With max |x| over the elements that share a
    scale, and `largest` = 448 (e4m3) or 57344 (e5m2):
    scale = largest / max |x|; 1 if max |x| is 0 or not finite; the largest float32 if the division overflows. With
    `power_of_two` it is rounded down to a power of two. inverse_scale = 1 / scale.
    `MXFP8`: inverse_scale = 2^e with the smallest e >= -127 for which max |x| <= largest * 2^e; 1 if max |x| is not
    finite. NaN and Inf in x are NaN in data, so that a loss scaler sees them.

    Args:
        x: [*, N], of floating dtype, viewed as [M, N]; float64 is rounded to float32 first.
        recipe: a recipe, such as `Float8BlockScaling()`.
        role: `"x"`, `"weight"` or `"dy"`; selects format and blocks.
        direction: `"rows"` if the GEMM sums along N, `"columns"` if it sums along M.
        scale: for `Float8DelayedScaling`: float32 [], or [G] with `offsets`; default 1.
        offsets: [G] integers, the ends of groups of rows, such as the tokens of each expert. Groups do not share
            scales, and blocks start anew in each group. Rows after the last end belong to no group. Does not
            synchronize.

    Returns:
        data: [*, N], `torch.float8_e4m3fn` or `torch.float8_e5m2`; in the layout of x for both directions, never
            transposed.
        inverse_scale: float32; for `MXFP8` `torch.float8_e8m0fnu`. Its shape is [] per tensor; [M, 1] per row; [1, N]
            per column; [M, ceil(N / B)] per `1 x B`; [ceil(M / B), N] per `B x 1`; [ceil(M / 128), ceil(N / 128)] per
            `128 x 128`. The last block of a row or column may be shorter. With `offsets`: [G] per tensor; [G, N] per
            column; [floor(M / B) + G, N] per `B x 1`, group after group, then 1 in unused entries.

    Raises:
        InputError: (SF102) if x has no dimensions or is not floating, or for a scale or offsets of another shape or
            dtype, (SF106) for an unknown role, direction or recipe, or a scale where the recipe computes it.
    """
    _check_arguments(recipe, role, direction, offsets)
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() == 0 or x.dtype.itemsize < 2:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"quantize takes a floating tensor of 16 bits or more, [*, N], not {_said(x)}", code="SF102")
    if scale is not None:
        count = 1 if offsets is None else len(offsets)
        if not recipe.keeps_state:
            raise InputError(f"{recipe} computes its scales, so it takes no scale", code="SF106")
        if not isinstance(scale, Tensor) or scale.numel() != count:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(f"quantize takes a scale of {count} numbers, not {_said(scale)}", code="SF102")
    dtype, size = recipe.dtype(role), recipe.block(role, direction)
    rows = _matrix(x.detach())
    places = _places(offsets, len(rows), size[0])
    blocks = _blocks(rows, size if places is None else (1, size[1]))
    largest = torch.finfo(dtype).max
    most = rows.new_zeros(blocks.shape[0], blocks.shape[2])
    if blocks.numel() and not recipe.keeps_state:
        most = blocks.abs().amax((1, 3))
    if places is not None:
        most = _most(most, *places)
    if isinstance(recipe, Float8DelayedScaling):
        scale = torch.ones_like(most) if scale is None else scale.to(torch.float32).reshape(-1, 1)
        inverse = torch.ones_like(scale) / scale
    elif isinstance(recipe, MXFP8):
        inverse, scale = _scales_mx(most, _EXPONENT[dtype])
    else:
        scale = _scales(most, largest, recipe.power_of_two)
        inverse = torch.ones_like(scale) / scale
    if size == (None, None):
        inverse = inverse.reshape(() if offsets is None else -1)
    if places is not None:
        scale = _spread(scale, places[0])
    # Beyond the range, casts of different torch versions return 448, Inf or NaN.
    codes = (blocks * scale.unsqueeze(1).unsqueeze(-1)).clamp(-largest, largest)
    codes = torch.where(blocks.isfinite(), codes, torch.nan)
    return _whole(codes, rows).to(dtype).reshape(x.shape), inverse


def dequantize(
    data: Tensor,
    inverse_scale: Tensor,
    recipe: Recipe,
    role: Role,
    direction: Direction,
    *,
    offsets: Tensor | None = None,
) -> Tensor:
    """The dequantized operand that a GEMM multiplies, data * inverse_scale, in float32; see `quantize`.

    Raises:
        InputError: (SF102) for inverse scales of another shape than those that `quantize` returns for `data`, (SF106)
            for an unknown role, direction or recipe.
    """
    _check_arguments(recipe, role, direction, offsets)
    rows, size, inverse = _matrix(data), recipe.block(role, direction), inverse_scale.to(torch.float32)
    places = _places(offsets, len(rows), size[0])
    blocks = _blocks(rows, size if places is None else (1, size[1]))
    count = blocks.shape[0] if places is None else places[1]
    if inverse.numel() != count * blocks.shape[2]:
        message = f"{recipe} has {count} x {blocks.shape[2]} scales for {role} {[*data.shape]} in {direction}"
        raise InputError(f"{message}, not {_said(inverse_scale)}", code="SF102")
    if places is not None:
        inverse = _spread(inverse.reshape(count, -1), places[0])
    return _whole(blocks * inverse.reshape(blocks.shape[0], 1, blocks.shape[2], 1), rows).reshape(data.shape)


def _check_arguments(recipe: Any, role: Any, direction: Any, offsets: Any) -> None:
    if not isinstance(recipe, Recipe):
        raise InputError(f"quantize takes a recipe, such as sf.recipes.MXFP8(), not {recipe!r}", code="SF106")
    for name, given, known in (("role", role, get_args(Role)), ("direction", direction, get_args(Direction))):
        if given not in known:
            raise InputError(f"{name} must be one of {', '.join(map(repr, known))}, got {given!r}", code="SF106")
    whole = isinstance(offsets, Tensor) and not (offsets.is_floating_point() or offsets.is_complex())
    if offsets is not None and not (whole and offsets.dim() == 1):
        raise InputError(f"offsets must be integers, [G], not {_said(offsets)}", code="SF102")


def _said(given: Any) -> str:
    return f"{given.dtype} {[*given.shape]}" if isinstance(given, Tensor) else type(given).__name__


def largest_of_groups(x: Tensor, offsets: Tensor) -> Tensor:
    """Max |x| of the rows of each group, float32 [G]; 0 for an empty group. x: [M, N]."""
    places = _places(offsets, len(x), None)
    assert places is not None
    most = x.detach().abs().amax(1, keepdim=True) if x.numel() else x.new_zeros(len(x), 1)
    return _most(most.to(torch.float32), *places).reshape(-1)


def _places(offsets: Tensor | None, rows: int, high: int | None) -> tuple[Tensor, int] | None:
    """For each row the index of its scale among those of all groups, and their number, the index of ungrouped rows.

    `None` if each row has its own scale, or there is one group. A scale is shared by `high` rows, or by a whole group.
    """
    if offsets is None or high == 1:
        return None
    groups, at = offsets.shape[0], torch.arange(rows, device=offsets.device)
    ends = offsets.to(torch.int64)
    group = torch.searchsorted(ends, at, right=True)
    if high is None:
        return group, groups
    starts, count = F.pad(ends.clamp(max=rows), (1, 0)), rows // high + groups
    blocks = (starts.diff() + (high - 1)) // high
    first = F.pad(blocks.cumsum(0) - blocks, (0, 1), value=count)
    return (first.index_select(0, group) + (at - starts.index_select(0, group)) // high).clamp(max=count), count


def _most(most: Tensor, places: Tensor, count: int) -> Tensor:
    """The largest of the rows that share a scale, [count, N] of [M, N]."""
    index = places.unsqueeze(-1).expand_as(most)
    return most.new_zeros(count + 1, most.shape[1]).scatter_reduce(0, index, most, "amax").narrow(0, 0, count)


def _spread(scale: Tensor, places: Tensor) -> Tensor:
    """The scale of each row, [M, N] of [count, N]; 1 for ungrouped rows."""
    return F.pad(scale, (0, 0, 0, 1), value=1.0).index_select(0, places)


def _matrix(x: Tensor) -> Tensor:
    """Casts [*, N] to float32 and flattens it to [M, N]."""
    wide = x.to(torch.float32)
    return (wide if wide.dim() > 1 else wide[None]).flatten(0, -2)


def _blocks(rows: Tensor, size: _Block) -> Tensor:
    """A matrix as [blocks, rows of a block, blocks, columns of a block], padded with zeros."""
    (m, n), (high, wide) = rows.shape, size
    up, across = 1 if high is None else -(-m // high), 1 if wide is None else -(-n // wide)
    if not rows.numel():
        return rows.new_empty(up, 0, across, 0)
    high, wide = high or m, wide or n
    padded = F.pad(rows, (0, across * wide - n, 0, up * high - m)) if m % high or n % wide else rows
    return padded.reshape(up, high, across, wide)


def _whole(blocks: Tensor, rows: Tensor) -> Tensor:
    """The inverse of `_blocks`: a matrix of the shape of `rows`."""
    m, n = rows.shape
    return blocks.flatten(2).flatten(0, 1).narrow(0, 0, m).narrow(1, 0, n) if rows.numel() else rows


def _scales(most: Tensor, largest: float, power_of_two: bool) -> Tensor:
    scale = _quotients(most, largest, 1.0)
    return (scale.view(torch.int32) & -(1 << 23)).view(torch.float32) if power_of_two else scale


def _quotients(most: Tensor, largest: float, otherwise: Tensor | float, divisor: float = 1.0) -> Tensor:
    """The quotient largest / most / divisor; `otherwise` where `most` is 0 or not finite."""
    # In torch, a number divided by a tensor is the number times the reciprocal: rounded twice.
    scale = torch.full_like(most, largest) / most
    scale = scale if divisor == 1 else scale / divisor
    scale = scale.clamp(max=_FLOAT32_MAX)  # the division overflows for the smallest numbers
    return torch.where((most > 0) & most.isfinite(), scale, otherwise)


def next_scale(recipe: Float8DelayedScaling, role: Role, history: Tensor, scale: Tensor) -> Tensor:
    """The scale of the next step, from the history with the newest maximum first and the current scale."""
    most = history.amax(0) if recipe.algorithm == "max" else history[0]
    return _quotients(most, torch.finfo(recipe.dtype(role)).max, scale, 2.0**recipe.margin)


def _scales_mx(most: Tensor, exponent: int) -> tuple[Tensor, Tensor]:
    """2^e in E8M0, and 2^-e in float32, which is exact."""
    bits = most.view(torch.int32)
    above = (bits & 0x7FFFFF) > 0x600000  # beyond 1.75 times its own power of two
    stored = ((bits >> 23) - exponent + above.to(torch.int32)).clamp(0, 254)
    stored = torch.where(most.isfinite(), stored, 127)
    scale = ((254 - stored) << 23).view(torch.float32)
    return stored.to(torch.uint8).view(torch.float8_e8m0fnu), scale


@dataclasses.dataclass(frozen=True, eq=False)
class Quantizing:
    """The settings of `low_precision` regions; equal ones are the same object."""

    recipe: Recipe | None = None  # of operations without their own
    enabled: bool = True
    wide: bool = False  # whether float64 is quantized as well, for reference results

    @property
    def default(self) -> Recipe | Literal[False] | None:
        """The recipe of operations without their own, `None` for none, or `False` where recipes are switched off."""
        return self.recipe if self.enabled else False


_quantizing_of = functools.lru_cache(maxsize=256)(Quantizing)
_DEFAULT = _quantizing_of(None, True, False)
current: ContextVar[Quantizing] = ContextVar("seqfuse_quantizing", default=_DEFAULT)


@contextlib.contextmanager
def low_precision(recipe: Recipe | None = None, *, enabled: bool = True) -> Generator[None]:
    """Context manager: switch recipes on or off, or set a recipe for operations without one.

    For training, prefer `Sequential(..., recipe=recipe)`: a forward pass that `torch.utils.checkpoint` recomputes in
    the backward pass runs outside this block.

    Args:
        recipe: for operations without a recipe or a container with one; by default the recipe of the surrounding block.
        enabled: `False` ignores all recipes; `True` switches them on again.

    Raises:
        InputError: (SF106) if `recipe` is not a recipe or `enabled` is not a bool.
    """
    check_recipe(recipe, "low_precision")
    if enabled not in (True, False):
        raise InputError(f"enabled must be True or False, got {enabled!r}", code="SF106", operation="low_precision")
    outer = current.get()
    token = current.set(_quantizing_of(outer.recipe if recipe is None else recipe, bool(enabled), outer.wide))
    try:
        yield
    finally:
        current.reset(token)


@contextlib.contextmanager
def within(recipe: Recipe | Any | None = ..., *, wide: bool = False) -> Generator[None]:
    """A block in which operations without a recipe use this one, if it is given; `wide` also quantizes float64."""
    outer = current.get()
    default = outer.recipe if recipe is ... else recipe
    token = current.set(_quantizing_of(default, outer.enabled, wide or outer.wide))
    try:
        yield
    finally:
        current.reset(token)


def check_recipe(recipe: Any, operation: str, path: str | None = None) -> None:
    """Raise InputError (SF106) unless this is a recipe or `None`."""
    if recipe is not None and not isinstance(recipe, Recipe):
        hint = (
            f"sf.recipes.{recipe.__name__}()"
            if isinstance(recipe, type)
            else "such as sf.recipes.Float8CurrentScaling()"
        )
        message = f"recipe must be one of sf.recipes or None, not {recipe!r}"
        raise InputError(message, code="SF106", operation=operation, path=path, hint=hint)
