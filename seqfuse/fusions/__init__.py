"""The fusions: one file each, one substitution each."""

from ..fusion import FusedOperation

default: tuple[type[FusedOperation], ...] = ()
