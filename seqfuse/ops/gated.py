"""Gated units: an activation of one half of x times the other half."""

from __future__ import annotations

from typing import Literal

from .. import pointwise as sf
from .activations import GeLU, ReLU, Sigmoid, SiLU


class GEGLU(sf.Gated):
    """y = gelu(gate) up, with x = [gate; up] along the last dimension.

    Backward: dup = dy gelu(gate);  dgate = dy up gelu'(gate); dx = [dgate; dup].

    x: [*, 2 F], y: [*, F].  Saved: x.
    Source: Shazeer 2020, arXiv:2002.05202.

    Args:
        approximate: `"none"` or `"tanh"`, as in `GeLU`.

    Raises:
        ValueError: for any other `approximate`.
    """

    def __init__(self, approximate: Literal["none", "tanh"] = "none") -> None:
        super().__init__(GeLU(approximate))
        self.approximate = approximate


class GLU(sf.Gated):
    """y = sigmoid(gate) up, with x = [gate; up] along the last dimension.

    Backward: with s = sigmoid(gate): dup = dy s;  dgate = dy up s (1 - s); dx = [dgate; dup].

    The first half is the gate, as in every gated unit here; `torch.nn.GLU` gates with the second half.

    x: [*, 2 F], y: [*, F].  Saved: x.
    Source: Dauphin et al. 2016, arXiv:1612.08083.
    """

    unit = Sigmoid


class ReGLU(sf.Gated):
    """y = max(gate, 0) up, with x = [gate; up] along the last dimension.

    Backward: dup = dy max(gate, 0);  dgate = dy up where gate > 0, else 0; dx = [dgate; dup].

    x: [*, 2 F], y: [*, F].  Saved: x.
    Source: Shazeer 2020, arXiv:2002.05202.
    """

    unit = ReLU


class SwiGLU(sf.Gated):
    """y = silu(gate) up, silu(g) = g sigmoid(g), with x = [gate; up] along the last dimension.

    Backward: with s = sigmoid(gate): dup = dy gate s;  dgate = dy up s (1 + gate (1 - s)); dx = [dgate; dup].

    x: [*, 2 F], y: [*, F].  Saved: x.
    Source: Shazeer 2020, arXiv:2002.05202.
    """

    unit = SiLU
