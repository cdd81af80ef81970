"""GLU: a unit gated by Sigmoid."""

from __future__ import annotations

from .. import pointwise as sf
from .sigmoid import Sigmoid


class GLU(sf.Gated):
    """y = sigmoid(gate) up, with x = [gate; up] along the last dimension.

    Backward: with s = sigmoid(gate): dup = dy s;  dgate = dy up s (1 - s); dx = [dgate; dup].

    The first half is the gate, as in every gated unit here; `torch.nn.GLU` gates with the second half.

    x: [*, 2 F], y: [*, F].  Saved: x.
    Source: Dauphin et al. 2016, arXiv:1612.08083.
    """

    unit = Sigmoid
