"""Hypothesis strategies for tensors and for lists of operations; the one module of the kit that needs hypothesis."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .lists import CONTAINERS, HOOKS, ListSpec, Node, Routing
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
    """Shapes of `leading` (least, most) leading dimensions over `columns`; `empty` also draws sizes of 0.

    Zero to four leading dimensions, a few thousand elements at most: sizes are halved from the left until they fit.
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
    """Descriptions of tensors; prefer these to `tensors` where a failure should print in one line."""
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


WIDTHS = (8, 6, 9, 4)
_POINTWISE = ("GeLU", "ReLU", "SiLU", "QuickGeLU", "SquaredReLU", "Sigmoid", "Tanh", "Identity")
_GATED = ("SwiGLU", "GEGLU", "ReGLU", "GLU")
_DRAWN = {"act": _POINTWISE, "barrier": ("nn.Softplus", "nn.Hardtanh")}
_NUMBERS = {"Scale": (-0.75, 1.0, 0.5), "Dropout": (0.3, 0.0, 0.5)}
_SIZED = ("LayerNorm", "RMSNorm", "Bias")
# Runs that patterns are made of, since chance would seldom put them in a row.
_RUNS = (
    *("act", "Linear", "LayerNorm", "RMSNorm", "Scale", "Linear act", "Linear LayerNorm", "GeLU Linear"),
    *("LayerNorm Linear", "Bias act act", "Bias LayerNorm"),
)
Options = dict[str, Any]
_ATTENTION = "attention"
_HEADS = ((2, 1, 16), (1, 1, 8), (2, 2, 8), (3, 1, 10))  # query heads, key heads, size of a head
_BEFORE_ATTENTION = (
    *("", "RotaryEmbedding", "QKNorm", "QKNorm RotaryEmbedding", "RotaryEmbedding QKNorm"),
    *("Bias RotaryEmbedding", "act QKNorm"),
)
_ROTATIONS: tuple[Options, ...] = (
    {"style": "half"},
    {"style": "interleaved"},
    {"style": "half", "rotary_dim": 4, "base": 100.0},
)
_ATTENTIONS: tuple[Options, ...] = (
    {"causal": True},
    {},
    {"causal": True, "window": 2, "scale": 0.75},
    {"softcap": 1.5, "window": 3},
)
_ROUTED = ("Fork", "Add", "Add Fork LayerNorm", "Add Fork Bias", "Fork GeLU Add")


@st.composite
def lists(
    draw: st.DrawFn,
    *,
    steps: int = 7,
    depth: int = 2,
    barriers: bool = True,
    channels: bool = True,
    dropout: bool = True,
    attention: bool = True,
    frozen: bool = True,
    hooks: bool = True,
) -> ListSpec:
    """Random `Sequential`s, as specifications that print in one line.

    Args:
        steps: most steps, of one to three operations each, at the outermost level.
        depth: most containers inside one another.
        barriers: whether plain `torch.nn` modules stand in it.
        channels: whether there are named forks and adds, also across containers and barriers, with public ends.
        dropout: whether there is dropout.
        attention: whether there is attention, behind a product that makes its heads; `ListSpec.attends` says whether
            there is in one, which then takes x of at least two dimensions.
        frozen: whether some parameters want no gradient.
        hooks: whether some members have hooks, containers among them.
    """
    routing = Routing()
    containers = itertools.count(1)
    rarely = st.sampled_from((False, False, False, True))

    def node(kind: str, *arguments: Any, inside: tuple[Node, ...] = (), named: Options | None = None) -> Node:
        hook = draw(st.sampled_from(("",) * 17 + HOOKS)) if hooks else ""
        still = frozen and kind in ("Linear", "QKNorm", *_SIZED) and draw(rarely)
        return Node(kind, arguments, inside, hook, still, tuple((named or {}).items()))

    def one(kind: str, width: int, here: tuple[int, ...]) -> tuple[Node, int]:
        if kind == "Linear":
            after = draw(st.sampled_from(WIDTHS))
            return node(kind, width, after, draw(st.booleans())), after
        if kind in CONTAINERS:
            inside, after = several(width, (*here, next(containers)))
            if kind == "Residual" and after != width:
                inside, after = [*inside, node("Linear", after, width)], width
            return node(kind, inside=tuple(inside)), after
        if kind == "gated":
            return node(draw(st.sampled_from(_GATED))), width // 2
        if kind == "Add":
            known = routing.readable(width, here)
            name = draw(st.sampled_from(known)) if known and not draw(rarely) else routing.take(width)
            routing.read(name, here)
            return node(kind, name), width
        if kind == "Fork":
            return node(kind, routing.fork(width, here)), width
        if kind in _DRAWN:
            return node(draw(st.sampled_from(_DRAWN[kind]))), width
        if kind in _NUMBERS:
            return node(kind, draw(st.sampled_from(_NUMBERS[kind]))), width
        return node(kind, *([width] if kind in _SIZED else [])), width

    def attend(width: int, here: tuple[int, ...]) -> tuple[list[Node], int]:
        heads, kv_heads, size = draw(st.sampled_from(_HEADS))
        packed = (heads + 2 * kv_heads) * size
        found = [node("Linear", width, packed, draw(st.booleans()))]
        for kind in draw(st.sampled_from(_BEFORE_ATTENTION)).split():
            if kind == "QKNorm":
                found.append(node(kind, size, heads, kv_heads))
            elif kind == "RotaryEmbedding":
                found.append(node(kind, heads, kv_heads, named=draw(st.sampled_from(_ROTATIONS))))
            else:
                found.append(one(kind, packed, here)[0])
        how = draw(st.sampled_from(_ATTENTIONS))
        how = how | ({"dropout": 0.3} if dropout and draw(rarely) else {})
        return [*found, node("Attention", heads, kv_heads, named=how)], heads * size

    def step(width: int, here: tuple[int, ...]) -> tuple[list[Node], int]:
        runs = [*_RUNS, *(_ROUTED if channels else ())]
        runs += ["gated"] * (width % 2 == 0) + ["barrier"] * barriers + ["Dropout", "Bias Dropout"] * dropout
        runs += ["Residual", "Sequential"] * (len(here) < depth) + [_ATTENTION] * (3 * attention)
        found: list[Node] = []
        chosen = draw(st.sampled_from(runs))
        if chosen == _ATTENTION:
            return attend(width, here)
        for kind in chosen.split():
            more, width = one(kind, width, here)
            found.append(more)
        return found, width

    def several(width: int, here: tuple[int, ...]) -> tuple[list[Node], int]:
        found: list[Node] = []
        for _ in range(draw(st.integers(1, 2) if here else st.integers(2, steps))):
            more, width = step(width, here)
            found += more
        return found, width

    width = draw(st.sampled_from(WIDTHS))
    inside, _ = several(width, ())
    return ListSpec(width, tuple(inside), routing.inputs, routing.outputs, draw(st.booleans()))
