"""Three chains of operations with a simulated fused kernel each: 35 seeded bugs and 7 right variants."""

from . import gated, linear, norm
from .simulated import VARIANTS, Chain

CHAINS = {chain.name: chain for chain in (norm.CHAIN, linear.CHAIN, gated.CHAIN)}

__all__ = ["CHAINS", "VARIANTS", "Chain"]
