"""Gated units: an activation of one half of x times the other half."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from .. import pointwise as sf
from ..fusion import Fusions
from ..run import Sequential
from .activations import Clamp, ClampedSiLU, GeLU, QuickGeLU, ReLU, Sigmoid, SiLU, SquaredReLU
from .channels import TokenScale


class ClampedSwiGLU(sf.Gated):
    """y = c sigmoid(alpha c) (u + offset), c = min(gate, limit), u = min(max(up, -limit), limit), as in GPT-OSS.

    Backward: with s = sigmoid(alpha c): dup = dy c s where |up| <= limit, else 0;
    dgate = dy (u + offset) s (1 + alpha c (1 - s)) where gate <= limit, else 0.

    x: [*, 2 F], y: [*, F].  Saved: x.
    Source: OpenAI 2025, arXiv:2508.10925, and the model's reference code, which packs x `"interleaved"`.

    Args:
        limit: the largest gate, and the largest absolute value of up.
        alpha: a factor within the sigmoid.
        offset: added to up after clamping.
        packing: position of gate and up in x, as in `sf.Gated`.

    Raises:
        ValueError: for another packing.
    """

    def __init__(
        self, limit: float = 7.0, alpha: float = 1.702, offset: float = 1.0, *, packing: sf.Packing = "gate_up"
    ) -> None:
        super().__init__(ClampedSiLU(limit, alpha), up=Clamp(limit, offset), packing=packing)
        self.limit, self.alpha, self.offset = limit, alpha, offset

    @classmethod
    def examples(cls, x: Tensor) -> tuple[ClampedSwiGLU, ...]:
        return (cls(), cls(0.75, 1.25, 0.5, packing="interleaved"), cls(1.5, packing="up_gate"))


class GEGLU(sf.Gated):
    """y = gelu(gate) up, with x = [gate; up] along the last dimension.

    Backward: dup = dy gelu(gate);  dgate = dy up gelu'(gate); dx = [dgate; dup].

    x: [*, 2 F], y: [*, F].  Saved: x.
    Source: Shazeer 2020, arXiv:2002.05202.

    Args:
        approximate: `"none"` or `"tanh"`, as in `GeLU`.
        packing: position of gate and up in x, as in `sf.Gated`.

    Raises:
        ValueError: for any other `approximate` or packing.
    """

    def __init__(self, approximate: Literal["none", "tanh"] = "none", *, packing: sf.Packing = "gate_up") -> None:
        super().__init__(GeLU(approximate), packing=packing)
        self.approximate = approximate


class GLU(sf.Gated):
    """y = sigmoid(gate) up, with x = [gate; up] along the last dimension.

    Backward: with s = sigmoid(gate): dup = dy s;  dgate = dy up s (1 - s); dx = [dgate; dup].

    The gate is the first half, as in all gated units here. In `torch.nn.GLU` it is the second:
    `GLU(packing="up_gate")`.

    x: [*, 2 F], y: [*, F].  Saved: x.
    Source: Dauphin et al. 2016, arXiv:1612.08083.
    """

    unit = Sigmoid


class QGEGLU(sf.Gated):
    """y = gate sigmoid(1.702 gate) up, with x = [gate; up] along the last dimension.

    Backward: with s = sigmoid(1.702 gate): dup = dy gate s;  dgate = dy up s (1 + 1.702 gate (1 - s));
    dx = [dgate; dup].

    x: [*, 2 F], y: [*, F].  Saved: x.
    Source: Shazeer 2020, arXiv:2002.05202, with GeLU from Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2.
    """

    unit = QuickGeLU


class ReGLU(sf.Gated):
    """y = max(gate, 0) up, with x = [gate; up] along the last dimension.

    Backward: dup = dy max(gate, 0);  dgate = dy up where gate > 0, else 0; dx = [dgate; dup].

    x: [*, 2 F], y: [*, F].  Saved: x.
    Source: Shazeer 2020, arXiv:2002.05202.
    """

    unit = ReLU


class ScaledSwiGLU(Sequential):
    """y = silu(gate) up scales, with x = [gate; up] and one factor per token: `SwiGLU, TokenScale(name)`.

    Backward: with h = silu(gate) up: dscales = sum of dy h over each token's features; [dgate; dup] as in `SwiGLU`, for
    scales dy.

    x: [*, 2 F], scales: [*] or [*, 1], y: [*, F]. Saved: x and scales. Fused, each pass is one kernel.
    Source: Shazeer 2020, arXiv:2002.05202, and Fedus et al. 2021, arXiv:2101.03961.

    Args:
        name: the channel of the factors.
        packing: position of gate and up in x, as in `sf.Gated`.
        fusions: the fusion set when called by itself; by default `sf.fusions.default`.
    """

    inlines: ClassVar[bool] = True

    def __init__(self, name: str, *, packing: sf.Packing = "gate_up", fusions: Fusions | None = None) -> None:
        super().__init__(SwiGLU(packing=packing), TokenScale(name), fusions=fusions)


class SReGLU(sf.Gated):
    """y = max(gate, 0)^2 up, with x = [gate; up] along the last dimension.

    Backward: dup = dy max(gate, 0)^2;  dgate = 2 dy up gate where gate > 0, else 0; dx = [dgate; dup].

    x: [*, 2 F], y: [*, F].  Saved: x.
    Source: Shazeer 2020, arXiv:2002.05202, with the activation from So et al. 2021, arXiv:2109.08668.
    """

    unit = SquaredReLU


class SwiGLU(sf.Gated):
    """y = silu(gate) up, silu(g) = g sigmoid(g), with x = [gate; up] along the last dimension.

    Backward: with s = sigmoid(gate): dup = dy gate s;  dgate = dy up s (1 + gate (1 - s)); dx = [dgate; dup].

    x: [*, 2 F], y: [*, F].  Saved: x.
    Source: Shazeer 2020, arXiv:2002.05202.
    """

    unit = SiLU

    @classmethod
    def examples(cls, x: Tensor) -> tuple[SwiGLU, ...]:
        return (cls(), cls(packing="interleaved"), cls(packing="up_gate"))
