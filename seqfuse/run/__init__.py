"""Runs plans: the container, its fuser, generated code and the autograd node. Nothing is chosen here.

Other folders import only the names listed here, never the modules.
"""

from .fuser import Fuser, default_fusions, fuser_of
from .guard import bind
from .lower import Context, Segment, lower
from .node import Alone, back_alone, run_alone
from .regions import KEPT_LOWERINGS, OpList, Region
from .sequential import Sequential, install, remap_keys

__all__ = [
    "KEPT_LOWERINGS",
    "Alone",
    "Context",
    "Fuser",
    "OpList",
    "Region",
    "Segment",
    "Sequential",
    "back_alone",
    "bind",
    "default_fusions",
    "fuser_of",
    "install",
    "lower",
    "remap_keys",
    "run_alone",
]
