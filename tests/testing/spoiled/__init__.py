"""Operations and fusions that break the contract, each in one way; importing them fills the register."""

from . import backward_fusions, forward_fusions, operations, side_effects
from .register import SPOILED

__all__ = ["SPOILED", "backward_fusions", "forward_fusions", "operations", "side_effects"]
