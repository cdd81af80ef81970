"""Runs plans: the container, its fuser, generated code and the autograd node. Nothing is chosen here."""

from .fuser import Fuser
from .sequential import Sequential, remap_keys

__all__ = ["Fuser", "Sequential", "remap_keys"]
