"""Random op sequences, drawn by hypothesis."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import strategies as st

from .lists import CONTAINERS, HOOKS, MASKS, ListSpec, MemberSpec, Routing

WIDTHS = (8, 6, 9, 4)
_POINTWISE = ("GeLU", "ReLU", "SiLU", "QuickGeLU", "SquaredReLU", "Sigmoid", "Tanh", "ClampedSiLU", "Identity")
_GATED = ("SwiGLU", "GEGLU", "ReGLU", "GLU", "QGEGLU", "SReGLU", "ClampedSwiGLU")
_DRAWN = {"act": _POINTWISE, "barrier": ("nn.Softplus", "nn.Hardtanh")}
_NUMBERS = {"Scale": (-0.75, 1.0, 0.5), "Dropout": (0.3, 0.0, 0.5)}
_SIZED = ("LayerNorm", "RMSNorm", "Bias")
_PARAMETERS = {"Linear": 2, "LayerNorm": 2, "RMSNorm": 1, "Bias": 1, "QKNorm": 2}
_NAMES = {"Bias": ("bias",), "QKNorm": ("q_weight", "k_weight")}
# Parts of fusions' patterns, since chance would seldom put them in a row.
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
# Contiguous first, and mostly.
_LAYOUTS = ("contiguous",) * 6 + ("transposed", "strided", "misaligned")
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
    masks: bool = True,
    checkpoints: bool = True,
    empty: bool = True,
    mixed: bool = True,
    layouts: bool = True,
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
        frozen: whether some parameters need no gradient.
        hooks: whether some members have hooks, containers among them.
        masks: whether some attention has a mask, which is a public extra input.
        checkpoints: whether some members are checkpointed together, which makes a barrier of them.
        empty: whether there are widths of 0.
        mixed: whether some parameters have a second dtype, the `other` of `ListSpec.build`.
        layouts: whether some parameters are not contiguous, or misaligned.
    """
    routing = Routing()
    containers = itertools.count(1)
    rarely = st.sampled_from((False, False, False, True))
    masked: dict[str, str] = {}
    # Whether the tensor passed on, and the one in each channel, may have the second dtype.
    promoted, promoting = False, dict[str, bool]()

    def of_other_dtype(kind: str, arguments: tuple[Any, ...]) -> tuple[str, ...]:
        """Names of parameters: a GEMM takes one dtype, a sum of two promotes its result."""
        nonlocal promoted
        names = _NAMES.get(kind, ("weight", "bias")[: _PARAMETERS.get(kind, 0)])
        if not mixed or not names:
            return ()
        chosen = tuple(name for name in names if draw(rarely))
        if kind == "Linear":
            biased = arguments[2:] != (False,)
            chosen = ("weight",) * promoted + tuple(name for name in chosen if name == "bias" and biased)
        promoted = promoted or (kind in ("Linear", "Bias") and "bias" in chosen)
        return chosen

    def node(
        kind: str, *arguments: Any, inside: tuple[MemberSpec, ...] = (), named: Options | None = None
    ) -> MemberSpec:
        hook = draw(st.sampled_from(("",) * 17 + HOOKS)) if hooks else ""
        still = frozen and kind in ("Linear", "QKNorm", *_SIZED) and draw(rarely)
        other = of_other_dtype(kind, arguments)
        layout = draw(st.sampled_from(_LAYOUTS)) if layouts and kind in _PARAMETERS else "contiguous"
        return MemberSpec(kind, arguments, inside, hook, still, tuple((named or {}).items()), other, layout)

    def one(kind: str, width: int, here: tuple[int, ...], routed: bool) -> tuple[MemberSpec, int]:
        nonlocal promoted
        if kind == "Linear":
            after = draw(st.sampled_from(WIDTHS * 6 + (0,) if empty else WIDTHS))
            return node(kind, width, after, draw(st.booleans())), after
        if kind == "Checkpointed":
            inside, after = several(width, (), False)
            return node(kind, inside=tuple(inside)), after
        if kind in CONTAINERS:
            before = promoted
            inside, after = several(width, (*here, next(containers)), routed)
            if kind == "Residual" and after != width:
                inside, after = [*inside, node("Linear", after, width)], width
            promoted = promoted or (kind == "Residual" and before)
            return node(kind, inside=tuple(inside)), after
        if kind == "gated":
            return node(draw(st.sampled_from(_GATED))), width // 2
        if kind == "Add":
            known = routing.readable(width, here)
            name = draw(st.sampled_from(known)) if known and not draw(rarely) else routing.take(width)
            routing.read(name, here)
            promoted = promoted or promoting.get(name, False)
            return node(kind, name), width
        if kind == "Fork":
            name = routing.fork(width, here)
            promoting[name] = promoted
            return node(kind, name), width
        if kind in _DRAWN:
            return node(draw(st.sampled_from(_DRAWN[kind]))), width
        if kind in _NUMBERS:
            return node(kind, draw(st.sampled_from(_NUMBERS[kind]))), width
        # Its default eps is that of the dtype of x, which the reference does not know after a promotion.
        named: Options = {"eps": 1e-6} if kind == "RMSNorm" and promoted else {}
        return node(kind, *([width] if kind in _SIZED else []), named=named), width

    def attend(width: int, here: tuple[int, ...], routed: bool) -> tuple[list[MemberSpec], int]:
        heads, kv_heads, size = draw(st.sampled_from(_HEADS))
        packed = (heads + 2 * kv_heads) * size
        found = [node("Linear", width, packed, draw(st.booleans()))]
        for kind in draw(st.sampled_from(_BEFORE_ATTENTION)).split():
            if kind == "QKNorm":
                found.append(node(kind, size, heads, kv_heads))
            elif kind == "RotaryEmbedding":
                found.append(node(kind, heads, kv_heads, named=draw(st.sampled_from(_ROTATIONS))))
            else:
                found.append(one(kind, packed, here, routed)[0])
        how = draw(st.sampled_from(_ATTENTIONS))
        how = how | ({"dropout": 0.3} if dropout and draw(rarely) else {})
        if masks and routed and not promoted and draw(rarely):
            name = f"m{len(masked)}"
            masked[name] = draw(st.sampled_from(MASKS))
            how = how | {"mask": name}
        return [*found, node("Attention", heads, kv_heads, named=how)], heads * size

    def step(width: int, here: tuple[int, ...], routed: bool) -> tuple[list[MemberSpec], int]:
        runs = [*_RUNS, *(_ROUTED if routed else ())] if width else ["act", "Linear", "Scale", "Bias act act"]
        runs += ["gated"] * (width % 2 == 0) + ["barrier"] * barriers + ["Dropout", "Bias Dropout"] * dropout
        runs += ["Residual", "Sequential"] * (len(here) < depth) + [_ATTENTION] * (3 * attention)
        runs += ["Checkpointed"] * (checkpoints and barriers and routed and not here)
        found: list[MemberSpec] = []
        chosen = draw(st.sampled_from(runs))
        if chosen == _ATTENTION:
            return attend(width, here, routed)
        for kind in chosen.split():
            more, width = one(kind, width, here, routed)
            found.append(more)
        return found, width

    def several(width: int, here: tuple[int, ...], routed: bool) -> tuple[list[MemberSpec], int]:
        found: list[MemberSpec] = []
        for _ in range(draw(st.integers(1, 2) if here or not routed else st.integers(2, steps))):
            more, width = step(width, here, routed)
            found += more
        return found, width

    width = draw(st.sampled_from(WIDTHS * 6 + (0,) if empty else WIDTHS))
    inside, _ = several(width, (), channels)
    return ListSpec(width, tuple(inside), routing.inputs, routing.outputs, draw(st.booleans()), tuple(masked.items()))
