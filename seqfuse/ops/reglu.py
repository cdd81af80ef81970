"""ReGLU: a unit gated by ReLU."""

from __future__ import annotations

from .. import pointwise as sf
from .relu import ReLU


class ReGLU(sf.Gated):
    """y = max(gate, 0) up, with x = [gate; up] along the last dimension.

    Backward: dup = dy max(gate, 0);  dgate = dy up where gate > 0, else 0; dx = [dgate; dup].

    x: [*, 2 F], y: [*, F].  Saved: x.
    Source: Shazeer 2020, arXiv:2002.05202.
    """

    unit = ReLU
