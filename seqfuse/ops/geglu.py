"""GEGLU: a unit gated by GeLU."""

from __future__ import annotations

from typing import Literal

from .. import pointwise as sf
from .gelu import GeLU


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
