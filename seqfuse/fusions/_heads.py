"""What fusions of bias, norm of heads and rotation share: what the kernel takes, what it saves, and its call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from torch import Tensor

from ..env import Env
from ..errors import InputError
from ..fusion import Requirements
from ..ops import Bias, QKNorm, RotaryEmbedding
from ..ops._cache import current
from ..ops._parameters import parameter
from ._kernels import bias_fits, kernels_run

if TYPE_CHECKING:
    from ..kernels import rope


class Angles(TypedDict):
    """What the kernels make the angles of, or the angles."""

    positions: Tensor | None
    cos: Tensor | None
    sin: Tensor | None


# `kernels._heads.MAX_HEAD`, which cannot be asked where Triton is not installed.
_MAX_HEAD = 1024


def kernels_take(bias: Bias | None, norm: QKNorm | None, rotary: RotaryEmbedding | None, env: Env) -> Requirements:
    """What the kernel asks of bias, norm and rotation, in sentences."""
    yield from kernels_run(env)
    yield bias_fits(bias, env), "input and bias must have one dtype"
    each = norm is None or (norm.kind == "rms" and not norm.full_width)
    yield each, "its kernel makes an RMSNorm of each head"
    if norm is not None and rotary is not None:
        same = (norm.heads, norm.kv_heads) == (rotary.heads, rotary.kv_heads)
        yield same, "the norm and the rotation must be of the same heads"
    width = next((of.features[0] for of in (norm, bias) if of is not None), None)
    parts = parts_of(norm, rotary)
    yield width is None or width <= _MAX_HEAD * parts, f"its kernel is for heads of at most {_MAX_HEAD:,}"


def parts_of(norm: QKNorm | None, rotary: RotaryEmbedding | None) -> int:
    """How many heads a row has: queries, keys and values."""
    of = norm if norm is not None else rotary
    assert of is not None
    return of.heads + 2 * of.kv_heads


def rotation_of(rotary: RotaryEmbedding | None, size: int) -> rope.Rotation | None:
    """The rotation as the kernel takes it, for heads of `size`; none where there is none."""
    from ..kernels.rope import Rotation

    if rotary is None:
        return None
    style: Any = rotary.style
    return Rotation(style, rotary.rotary_dim or size, rotary.base)


def angles(
    positions: Tensor | None, cos: Tensor | None, sin: Tensor | None, needs: frozenset[str] = frozenset()
) -> Angles:
    """The angles as given.

    Raises:
        InputError: where gradients of cos or sin are needed, which the operation makes; it then runs unfused.
    """
    if needs & {"rotary.cos", "rotary.sin"}:
        raise InputError("the kernel makes no gradients of cos and sin", code="SF101", operation="RotaryEmbedding")
    return Angles(positions=positions, cos=cos, sin=sin)


def run(
    bias: Bias | None,
    norm: QKNorm | None,
    rotary: RotaryEmbedding | None,
    x: Tensor,
    angles: Angles,
    *,
    store: bool,
) -> rope.Roped:
    """The kernel's forward pass; positions of a cache that is being fed are those of its rows."""
    from ..kernels.rope import rope_fwd

    of: Any = norm if norm is not None else rotary
    cache = current()
    if angles["positions"] is None and angles["cos"] is None and rotary is not None and cache is not None:
        angles["positions"] = cache.positions(x)
    rotation = rotation_of(rotary, x.shape[-1] // parts_of(norm, rotary))
    given = around(bias, norm)
    return rope_fwd(x, of.heads, of.kv_heads, rotation, store=store, **angles, **given)


def around(bias: Bias | None, norm: QKNorm | None) -> dict[str, Any]:
    """What the kernels take of a bias and a norm."""
    given: dict[str, Any] = {"bias": None if bias is None else bias.read().contiguous()}
    if norm is not None:
        given |= {"norm_eps": norm.eps, "zero_centered": norm.zero_centered}
        given |= gains(parameter(norm, "q_weight"), parameter(norm, "k_weight"))
    return given


def gains(q_weight: Tensor | None, k_weight: Tensor | None) -> dict[str, Tensor | None]:
    """The norm's weights as the kernel takes them."""
    pairs = (("q_weight", q_weight), ("k_weight", k_weight))
    return {name: None if weight is None else weight.contiguous() for name, weight in pairs}
