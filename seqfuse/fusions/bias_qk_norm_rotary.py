"""What stands between the GEMM that makes [q; k; v] and attention, each way in one pass by a Triton kernel."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..env import Env
from ..fusion import BackwardFusion, ForwardFusion, Requirements
from ..operation import Grads
from ..ops import Bias, QKNorm, RotaryEmbedding
from ..ops._parameters import parameter
from ._heads import Angles, angles, gains, kernels_take, parts_of, rotation_of, run


class BiasQKNormRotary(ForwardFusion):
    """y = rope(norm(x + bias)) in one pass, rounded once; x + bias is stored where the norm's gradient reads it.

    x, y: [*, S, (H + 2 Hkv) D]. Saves what the operations save.
    """

    bias: Bias | None
    norm: QKNorm | None
    rotary: RotaryEmbedding

    kernels = ("triton", "c")

    def requires(self, env: Env) -> Requirements:
        yield from kernels_take(self.bias, self.norm, self.rotary, env)

    def fwd(
        self,
        x: Tensor,
        *,
        rotary_position_ids: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        needs: frozenset[str],
    ) -> Any:
        given = angles(rotary_position_ids, rotary_cos, rotary_sin, needs)
        return _forward(self.bias, self.norm, self.rotary, x, given, bool(needs))


class BiasQKNorm(ForwardFusion):
    """y = norm(x + bias) in one pass; x + bias is stored, since the norm's gradient reads it.

    x, y: [*, S, (H + 2 Hkv) D]. Saves what the operations save.
    """

    bias: Bias | None
    norm: QKNorm

    kernels = ("triton", "c")

    def requires(self, env: Env) -> Requirements:
        yield from kernels_take(self.bias, self.norm, None, env)

    def fwd(self, x: Tensor, *, needs: frozenset[str]) -> Any:
        return _forward(self.bias, self.norm, None, x, angles(None, None, None), bool(needs))


class BiasQKNormRotaryBackward(BackwardFusion):
    """dx = norm'(dy rotated back) and all sums over rows, for bias and gains, from one pass over dy and what was kept.

    Sums are made in float32, in a fixed order, and rounded once. dy, dx: [*, S, (H + 2 Hkv) D].
    """

    bias: Bias | None
    norm: QKNorm | None
    rotary: RotaryEmbedding

    kernels = ("triton", "c")

    def requires(self, env: Env) -> Requirements:
        yield from kernels_take(self.bias, self.norm, self.rotary, env)

    def bwd(
        self,
        dy: Tensor,
        *,
        norm: QKNorm.Saved | None,
        rotary: RotaryEmbedding.Saved,
        needs: frozenset[str],
    ) -> tuple[Tensor | None, Grads]:
        given = angles(rotary.positions, rotary.cos, rotary.sin, needs)
        return _backward(self.bias, self.norm, self.rotary, dy, norm, given, needs)


class BiasQKNormBackward(BackwardFusion):
    """dx = norm'(dy) and all sums over rows, for bias and gains, from one pass over dy and what the norm kept.

    Sums are made in float32, in a fixed order, and rounded once. dy, dx: [*, S, (H + 2 Hkv) D].
    """

    bias: Bias | None
    norm: QKNorm

    kernels = ("triton", "c")

    def requires(self, env: Env) -> Requirements:
        yield from kernels_take(self.bias, self.norm, None, env)

    def bwd(self, dy: Tensor, *, norm: QKNorm.Saved, needs: frozenset[str]) -> tuple[Tensor | None, Grads]:
        return _backward(self.bias, self.norm, None, dy, norm, angles(None, None, None), needs)


def _forward(
    bias: Bias | None, norm: QKNorm | None, rotary: RotaryEmbedding | None, x: Tensor, given: Angles, saves: bool
) -> Any:
    out = run(bias, norm, rotary, x, {**given}, store=saves and bias is not None and norm is not None)
    if not saves:
        return out.y
    saved: dict[str, Any] = {}
    if norm is not None:
        assert out.rstd is not None
        weights = {name: parameter(norm, name) for name in ("q_weight", "k_weight")}
        saved["norm"] = QKNorm.Saved(x=x if out.z is None else out.z, rstd=out.rstd, mean=None, **weights)
    if rotary is not None:
        saved["rotary"] = RotaryEmbedding.Saved(**given, x=None)
    return out.y, saved


def _backward(
    bias: Bias | None,
    norm: QKNorm | None,
    rotary: RotaryEmbedding | None,
    dy: Tensor,
    kept: QKNorm.Saved | None,
    given: Angles,
    needs: frozenset[str],
) -> tuple[Tensor | None, Grads]:
    from ..kernels.rope import rope_bwd

    of: Any = norm if norm is not None else rotary
    around: dict[str, Any] = {}
    if bias is not None and "bias.bias" in needs:
        around["dbias"] = bias.dtype
    if norm is not None and kept is not None:
        around |= {"x": kept.x, "rstd": kept.rstd, "zero_centered": norm.zero_centered}
        if "x" in needs or "bias.bias" in needs:
            around |= gains(kept.q_weight, kept.k_weight)
        for name in ("q_weight", "k_weight"):
            owner = parameter(norm, name)
            if f"norm.{name}" in needs and owner is not None:
                around[f"d{name}"] = owner.dtype
    rotation = rotation_of(rotary, dy.shape[-1] // parts_of(norm, rotary))
    out = rope_bwd(dy, of.heads, of.kv_heads, rotation, dx="x" in needs, **given, **around)
    grads = {"bias.bias": out.dbias, "norm.q_weight": out.dq_weight, "norm.k_weight": out.dk_weight}
    return out.dx, {name: gradient for name, gradient in grads.items() if name in needs}
