"""SwiGLU: a unit gated by SiLU."""

from __future__ import annotations

from .. import pointwise as sf
from .silu import SiLU


class SwiGLU(sf.Gated):
    """y = silu(gate) up, silu(g) = g sigmoid(g), with x = [gate; up] along the last dimension.

    Backward: with s = sigmoid(gate): dup = dy gate s;  dgate = dy up s (1 + gate (1 - s)); dx = [dgate; dup].

    x: [*, 2 F], y: [*, F].  Saved: x.
    Source: Shazeer 2020, arXiv:2002.05202.
    """

    unit = SiLU
