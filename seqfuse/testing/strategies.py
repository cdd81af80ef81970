"""Hypothesis strategies for tensors; the only module of the test kit that needs hypothesis."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .tensors import EDGES, LAYOUTS, REGIMES, Shape, TensorSpec

try:
    from hypothesis import strategies as st
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("seqfuse.testing.strategies needs hypothesis: pip install 'seqfuse[test]'") from error

ROWS = (1, 2, 7, 16, 17)
COLUMNS = (1, 2, 8, 127, 128, 129)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MAX_ELEMENTS = 1 << 13


@st.composite
def shapes(
    draw: st.DrawFn,
    *,
    columns: Sequence[int] = COLUMNS,
    rows: Sequence[int] = ROWS,
    leading: tuple[int, int] = (0, 4),
    empty: bool = False,
) -> Shape:
    """Shapes of `leading` (least, most) leading dimensions before one of `columns`; `empty` also draws sizes of 0.

    Sizes are halved from the left until a shape has at most a few thousand elements.
    """
    zero = (0,) if empty else ()
    least, most = leading
    sizes = draw(st.lists(st.sampled_from((*rows, *zero)), min_size=least, max_size=most))
    last = draw(st.sampled_from((*columns, *zero)))
    for position in range(len(sizes)):
        while sizes[position] > 1 and torch.Size((*sizes, last)).numel() > _MAX_ELEMENTS:
            sizes[position] //= 2
    return (*sizes, last)


def dtypes(among: Sequence[torch.dtype] = DTYPES) -> st.SearchStrategy[torch.dtype]:
    """Floating dtypes, float32 first (hypothesis shrinks toward the first)."""
    return st.sampled_from(among)


def layouts(among: Sequence[str] = LAYOUTS) -> st.SearchStrategy[str]:
    """Memory layouts, contiguous first."""
    return st.sampled_from(among)


def regimes(*, edges: bool = False) -> st.SearchStrategy[str]:
    """The four value regimes, with `edges` also zeros, constant rows, extremes, one NaN, one Inf."""
    return st.sampled_from((*REGIMES, *EDGES) if edges else tuple(REGIMES))


def specs(
    *,
    shape: st.SearchStrategy[Shape] | None = None,
    dtype: st.SearchStrategy[torch.dtype] | None = None,
    layout: st.SearchStrategy[str] | None = None,
    regime: st.SearchStrategy[str] | None = None,
) -> st.SearchStrategy[TensorSpec]:
    """Descriptions of tensors; use these instead of `tensors` for failure messages of one line."""
    return st.builds(
        TensorSpec,
        shape=shapes() if shape is None else shape,
        dtype=dtypes() if dtype is None else dtype,
        layout=layouts() if layout is None else layout,
        regime=regimes() if regime is None else regime,
        seed=st.integers(0, 2**16 - 1),
    )


def tensors(
    *,
    shape: st.SearchStrategy[Shape] | None = None,
    dtype: st.SearchStrategy[torch.dtype] | None = None,
    layout: st.SearchStrategy[str] | None = None,
    regime: st.SearchStrategy[str] | None = None,
) -> st.SearchStrategy[Tensor]:
    """Tensors built from `specs`."""
    return specs(shape=shape, dtype=dtype, layout=layout, regime=regime).map(TensorSpec.build)
