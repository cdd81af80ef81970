"""What stands between the product that makes [q; k; v] and attention, each way in one pass by a Triton kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..env import Env, Savings
from ..fusion import BackwardFusion, ForwardFusion, InferenceFusion, Requirements
from ..operation import Grads
from ..ops import Bias, QKNorm, RotaryEmbedding
from ..ops._read import parameter
from ._kernels import kernels_run, rows_of

if TYPE_CHECKING:
    from ..kernels import rope

# `kernels.rope.MAX_HEAD`, which cannot be asked where Triton is not installed.
_MAX_HEAD = 1024
# Launches and passes over [q; k; v] of an operation by itself, forward: what it copies to float32 and back is the most.
_LAUNCHES = {"bias": 1, "norm": 8, "rotary": 14}
_PASSES = {"bias": 2, "norm": 14, "rotary": 12}


class BiasQKNormRotary(ForwardFusion):
    """y = turned(norm(x + bias)) in one pass, rounded once; x + bias is stored where the norm's gradient reads it.

    x, y: [*, S, (H + 2 Hkv) D]. Saves what the operations save.
    """

    bias: Bias | None
    norm: QKNorm | None
    rotary: RotaryEmbedding

    triton = True

    def requires(self, env: Env) -> Requirements:
        yield from _kernels_take(self.bias, self.norm, self.rotary, env)

    def saves(self, env: Env) -> Savings:
        stored = self.bias is not None and self.norm is not None
        return _worth(self.bias, self.norm, self.rotary, env, 2 + stored)

    def fwd(self, x: Tensor, *, rotary_position_ids: Tensor | None = None) -> tuple[Tensor, dict[str, Any]]:
        return _forward(self.bias, self.norm, self.rotary, x, rotary_position_ids)


class BiasQKNorm(ForwardFusion):
    """y = norm(x + bias) in one pass; x + bias is stored, since the norm's gradient reads it.

    x, y: [*, S, (H + 2 Hkv) D]. Saves what the operations save.
    """

    bias: Bias | None
    norm: QKNorm

    triton = True

    def requires(self, env: Env) -> Requirements:
        yield from _kernels_take(self.bias, self.norm, None, env)

    def saves(self, env: Env) -> Savings:
        return _worth(self.bias, self.norm, None, env, 2 + (self.bias is not None))

    def fwd(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return _forward(self.bias, self.norm, None, x, None)


class BiasQKNormRotaryInference(InferenceFusion):
    """y = turned(norm(x + bias)) in one pass, where nothing needs a gradient and so nothing is stored.

    x, y: [*, S, (H + 2 Hkv) D].
    """

    bias: Bias
    norm: QKNorm
    rotary: RotaryEmbedding | None

    triton = True

    def requires(self, env: Env) -> Requirements:
        yield from _kernels_take(self.bias, self.norm, self.rotary, env)

    def saves(self, env: Env) -> Savings:
        return _worth(self.bias, self.norm, self.rotary, env, 2)

    def fwd(self, x: Tensor, *, rotary_position_ids: Tensor | None = None) -> Any:
        return _run(self.bias, self.norm, self.rotary, x, rotary_position_ids, store=False).y


class BiasQKNormRotaryBackward(BackwardFusion):
    """dx = norm'(dy turned back) and all sums over rows, for bias and gains, from one pass over dy and what was kept.

    Sums are made in float32, in a fixed order, and rounded once. dy, dx: [*, S, (H + 2 Hkv) D].
    """

    bias: Bias | None
    norm: QKNorm | None
    rotary: RotaryEmbedding

    triton = True

    def requires(self, env: Env) -> Requirements:
        yield from _kernels_take(self.bias, self.norm, self.rotary, env)

    def saves(self, env: Env) -> Savings:
        return _worth(self.bias, self.norm, self.rotary, env, 2 + (self.norm is not None))

    def bwd(
        self,
        dy: Tensor,
        *,
        bias: Bias.Saved | None,
        norm: QKNorm.Saved | None,
        rotary: RotaryEmbedding.Saved,
        needs: frozenset[str],
    ) -> tuple[Tensor | None, Grads]:
        return _backward(self.bias, self.norm, self.rotary, dy, norm, rotary.positions, needs)


class BiasQKNormBackward(BackwardFusion):
    """dx = norm'(dy) and all sums over rows, for bias and gains, from one pass over dy and what the norm kept.

    Sums are made in float32, in a fixed order, and rounded once. dy, dx: [*, S, (H + 2 Hkv) D].
    """

    bias: Bias | None
    norm: QKNorm

    triton = True

    def requires(self, env: Env) -> Requirements:
        yield from _kernels_take(self.bias, self.norm, None, env)

    def saves(self, env: Env) -> Savings:
        return _worth(self.bias, self.norm, None, env, 3)

    def bwd(
        self, dy: Tensor, *, bias: Bias.Saved | None, norm: QKNorm.Saved, needs: frozenset[str]
    ) -> tuple[Tensor | None, Grads]:
        return _backward(self.bias, self.norm, None, dy, norm, None, needs)


def _kernels_take(bias: Bias | None, norm: QKNorm | None, rotary: RotaryEmbedding | None, env: Env) -> Requirements:
    yield from kernels_run(env)
    yield bias is None or bias.bias.dtype == env.dtype, "input and bias must have one dtype"
    if norm is not None and rotary is not None:
        same = (norm.heads, norm.kv_heads) == (rotary.heads, rotary.kv_heads)
        yield same, "the norm and the rotation must be of the same heads"
    width = _width(bias, norm)
    parts = _parts(norm, rotary)
    yield width is None or width <= _MAX_HEAD * parts, f"its kernel is for heads of at most {_MAX_HEAD:,}"


def _parts(norm: QKNorm | None, rotary: RotaryEmbedding | None) -> int:
    of = norm if norm is not None else rotary
    assert of is not None
    return of.heads + 2 * of.kv_heads


def _width(bias: Bias | None, norm: QKNorm | None) -> int | None:
    """Elements of a row, where an operation says so."""
    if norm is not None:
        return norm.head_dim * _parts(norm, None)
    return None if bias is None else bias.size


def _worth(bias: Bias | None, norm: QKNorm | None, rotary: RotaryEmbedding | None, env: Env, made: int) -> Savings:
    """What the operations launch and move by themselves, less one launch and the passes that are made."""
    there = [name for name, of in (("bias", bias), ("norm", norm), ("rotary", rotary)) if of is not None]
    width = _width(bias, norm) or 0
    passes = max(0, sum(_PASSES[name] for name in there) - made)
    moved = float(passes * rows_of(env) * width * env.dtype.itemsize)
    return Savings(launches=sum(_LAUNCHES[name] for name in there) - 1, bytes=moved)


def _rotation(rotary: RotaryEmbedding | None, size: int) -> rope.Rotation | None:
    from ..kernels.rope import Rotation

    if rotary is None:
        return None
    style: Any = rotary.style
    return Rotation(style, rotary.rotary_dim or size, rotary.base)


def _run(
    bias: Bias | None,
    norm: QKNorm | None,
    rotary: RotaryEmbedding | None,
    x: Tensor,
    positions: Tensor | None,
    *,
    store: bool,
) -> rope.Forward:
    from ..kernels.rope import rope_fwd

    of: Any = norm if norm is not None else rotary
    around: dict[str, Any] = {}
    if norm is not None:
        around = {"norm_eps": norm.eps, **_gains(parameter(norm, "q_weight"), parameter(norm, "k_weight"))}
    return rope_fwd(
        x,
        of.heads,
        of.kv_heads,
        _rotation(rotary, x.shape[-1] // _parts(norm, rotary)),
        bias=None if bias is None else bias.read().contiguous(),
        positions=positions,
        store=store,
        **around,
    )


def _forward(
    bias: Bias | None, norm: QKNorm | None, rotary: RotaryEmbedding | None, x: Tensor, positions: Tensor | None
) -> tuple[Tensor, dict[str, Any]]:
    out = _run(bias, norm, rotary, x, positions, store=bias is not None and norm is not None)
    saved: dict[str, Any] = {}
    if bias is not None:
        saved["bias"] = Bias.NOTHING
    if norm is not None:
        assert out.rstd is not None
        weights = {name: parameter(norm, name) for name in ("q_weight", "k_weight")}
        saved["norm"] = QKNorm.Saved(x=x if out.z is None else out.z, rstd=out.rstd, **weights)
    if rotary is not None:
        saved["rotary"] = RotaryEmbedding.Saved(positions=positions)
    return out.y, saved


def _backward(
    bias: Bias | None,
    norm: QKNorm | None,
    rotary: RotaryEmbedding | None,
    dy: Tensor,
    kept: QKNorm.Saved | None,
    positions: Tensor | None,
    needs: frozenset[str],
) -> tuple[Tensor | None, Grads]:
    from ..kernels.rope import rope_bwd

    of: Any = norm if norm is not None else rotary
    around: dict[str, Any] = {}
    if bias is not None and "bias.bias" in needs:
        around["dbias"] = bias.read().dtype
    if norm is not None and kept is not None:
        around |= {"x": kept.x, "rstd": kept.rstd}
        if "x" in needs or "bias.bias" in needs:
            around |= _gains(kept.q_weight, kept.k_weight)
        for name in ("q_weight", "k_weight"):
            owner = parameter(norm, name)
            if f"norm.{name}" in needs and owner is not None:
                around[f"d{name}"] = owner.dtype
    rotation = _rotation(rotary, dy.shape[-1] // _parts(norm, rotary))
    out = rope_bwd(dy, of.heads, of.kv_heads, rotation, positions=positions, dx="x" in needs, **around)
    grads = {"bias.bias": out.dbias, "norm.q_weight": out.dq_weight, "norm.k_weight": out.dk_weight}
    return out.dx, {name: gradient for name, gradient in grads.items() if name in needs}


def _gains(q_weight: Tensor | None, k_weight: Tensor | None) -> dict[str, Tensor | None]:
    pairs = (("q_weight", q_weight), ("k_weight", k_weight))
    return {name: None if weight is None else weight.contiguous() for name, weight in pairs}
