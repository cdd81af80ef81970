"""Inputs that reveal defects: value regimes, exact numbers and memory layouts, each determined by a seed."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Shape = tuple[int, ...]
Seed = int | torch.Generator


def generator(seed: Seed) -> torch.Generator:
    """A CPU generator from a seed; a generator passes through, so that several tensors can share one stream."""
    return seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(seed)


def _normal(shape: Shape, seed: Seed) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=generator(seed))


def seeded_randn(shape: Shape, seed: Seed, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random normal values; each column of the last dimension has another mean and deviation.

    This reveals permuted columns, lost signs and an activation that is the identity for one sign.
    """
    draw = generator(seed)
    columns = shape[-1:]
    mean = 0.5 * _normal(columns, draw)
    deviation = torch.exp(0.3 * _normal(columns, draw))
    found = mean + deviation * _normal(shape, draw)
    if dtype.is_complex:  # real numbers do not reveal a missing conjugate
        found = torch.complex(found, _normal(shape, draw))
    return found.to(dtype)


def _with_one(value: float) -> Callable[[Shape, Seed], Tensor]:
    def fill(shape: Shape, seed: Seed) -> Tensor:
        draw = generator(seed)
        x = _normal(shape, draw)
        if x.numel():
            x.view(-1)[int(torch.randint(x.numel(), (), generator=draw))] = value
        return x

    return fill


def _heavy(shape: Shape, seed: Seed) -> Tensor:
    draw = generator(seed)
    return _normal(shape, draw) * torch.exp(1.5 * _normal(shape, draw))


REGIMES: dict[str, Callable[[Shape, Seed], Tensor]] = {
    "normal": _normal,
    "small": lambda shape, seed: 2e-3 * _normal(shape, seed),
    "offset": lambda shape, seed: _normal(shape, seed) + 8,
    "heavy": _heavy,
}
"""Names of value regimes: ordinary values; variance of the size of eps; cancellation; a heavy tail."""

EDGES: dict[str, Callable[[Shape, Seed], Tensor]] = {
    "zeros": lambda shape, _: torch.zeros(shape, dtype=torch.float64),
    "constant_rows": lambda shape, seed: _normal((*shape[:-1], 1) if shape else (), seed).expand(shape),
    "extremes": lambda shape, seed: math.inf * _normal(shape, seed).sign(),
    "one_nan": _with_one(math.nan),
    "one_inf": _with_one(math.inf),
}
"""Names of edge cases: division by zero, overflow, NaN and Inf.

`"extremes"` is plus and minus the largest value of the dtype.
"""


def in_regime(regime: str, shape: Shape, seed: Seed, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random values of one of `REGIMES` or `EDGES`, generated in float64 and rounded to `dtype` once.

    Raises `KeyError` for an unknown name.
    """
    values = (REGIMES | EDGES)[regime](shape, seed)
    if regime == "extremes":
        values = values.nan_to_num(posinf=torch.finfo(dtype).max, neginf=torch.finfo(dtype).min)
    return values.to(dtype)


def _powers_of_two(shape: Shape, seed: Seed) -> Tensor:
    draw = generator(seed)
    exponent = torch.randint(-2, 3, shape, generator=draw).double()
    return torch.exp2(exponent) * torch.where(_normal(shape, draw) < 0, -1.0, 1.0)


def _signs(shape: Shape, seed: Seed) -> Tensor:
    draw = generator(seed)
    columns = shape[-1] if shape else 1
    order = torch.rand((*shape[:-1], columns), generator=draw, dtype=torch.float64).argsort(-1)
    # As many +1 as -1, so that mean 0 and variance 1 are exact for an even number of columns.
    return torch.where(order % 2 == 0, 1.0, -1.0).double().reshape(shape)


EXACT: dict[str, Callable[[Shape, Seed], Tensor]] = {
    "integers": lambda shape, seed: torch.randint(-4, 5, shape, generator=generator(seed)).double(),
    "powers_of_two": _powers_of_two,
    "signs": _signs,
}
"""Names of value sets with exact sums in any order: a few thousand values in float32, a few dozen in 16-bit dtypes."""


def exact(kind: str, shape: Shape, seed: Seed, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random values of one of `EXACT`, whose sums have the same bits in any order.

    Raises `KeyError` for an unknown name.
    """
    return EXACT[kind](shape, seed).to(dtype)


def _contiguous(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _strided(x: Tensor) -> Tensor:
    columns = x.shape[-1] if x.ndim else 1
    return _filled(2 * x.numel(), x).view(*x.shape[:-1], 2 * columns)[..., ::2].view(x.shape)


def _filled(count: int, like: Tensor) -> Tensor:
    fill = math.nan if like.is_floating_point() else torch.iinfo(like.dtype).max
    return torch.full((count,), fill, dtype=like.dtype, device=like.device)


# Each returns an unfilled view of the shape; gaps hold NaN, so that a kernel that ignores strides reads NaN.
_FILLABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": _contiguous,
    "strided": _strided,
    "transposed": lambda x: _contiguous(x.mT).mT if x.ndim > 1 else _contiguous(x),
    "misaligned": lambda x: _filled(x.numel() + 1, x)[1:].view(x.shape),
}
_BROADCAST: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda x: x[:1].expand(x.shape) if x.ndim else x.view(1).expand(1).view(()),
    "scalar": lambda x: x.reshape(-1)[:1].view([1] * x.ndim).expand(x.shape) if x.numel() else x,
}
LAYOUTS = (*_FILLABLE, *_BROADCAST)
"""Names of the layouts of `laid_out`."""


def varied(values: Tensor, seed: int) -> Tensor:
    """Given values, changed by a few percent: a second draw with the same values would round like the first."""
    return values * (1 + 0.02 * seeded_randn(tuple(values.shape), seed, dtype=values.dtype).to(values.device))


def redrawn(x: Tensor, seed: int) -> Tensor:
    """`varied` values in the same layout, with gaps and repetitions; x itself for seed 0 or integers."""
    if not seed or not x.is_floating_point():
        return x
    memory = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.detach().untyped_storage())
    return varied(memory, seed).as_strided(x.shape, x.stride(), x.storage_offset())


def laid_out(x: Tensor, layout: str) -> Tensor:
    """A detached copy of `x` with the given memory layout.

    contiguous; strided: every second element of the last dimension; transposed: the last two dimensions swapped in
    memory (contiguous with fewer dimensions); misaligned: offset by one element; expanded: the first slice repeated
    with stride 0; scalar: the first element with all strides 0, as the gradient of `y.sum()`. The last two repeat
    values, the others have those of `x`. Raises `KeyError` for an unknown layout.
    """
    x = x.detach()
    if layout in _BROADCAST:
        return _BROADCAST[layout](x.clone(memory_format=torch.contiguous_format))
    return _FILLABLE[layout](x).copy_(x)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A description of a random tensor, short enough for a failure message; `build()` creates it."""

    shape: Shape
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    regime: str = "normal"
    seed: int = 0

    def build(self, *, requires_grad: bool = False) -> Tensor:
        """The tensor; equal specifications have equal bits."""
        return laid_out(in_regime(self.regime, self.shape, self.seed, dtype=self.dtype), self.layout).requires_grad_(
            requires_grad
        )
