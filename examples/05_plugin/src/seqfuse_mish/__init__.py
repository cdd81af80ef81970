"""Mish for seqfuse: an operation, and a fusion that `sf.plugins.load("mish")` gives."""

import seqfuse as sf

from .add import AddMish
from .operation import Mish

fusions: tuple[type[sf.FusedOperation], ...] = (AddMish,)

__all__ = ["AddMish", "Mish", "fusions"]
