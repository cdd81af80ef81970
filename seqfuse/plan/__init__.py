"""Plans: the fusions of each pass, the saved tensors, and why other fusions are not used. Nothing here runs real data.

Folders other than `run` import only the names listed here, never the modules.
"""

from .described import tells_all
from .flatten import Node, flatten, global_hooks, has_own_graph, inside_of, located
from .inputs import validate
from .match import Known, Matcher
from .plan import Eager, Plan
from .quantized import recipe_at
from .reference import by_reference, check_channels, draw, random_seeds, run_eagerly, walk_reference
from .schedule import MODES, AnyChoice, Budget, Candidate, Choice, MemoryChoice, Refusal
from .step import Step, Stretch
from .tally import Memory

__all__ = [
    "MODES",
    "AnyChoice",
    "Budget",
    "Candidate",
    "Choice",
    "Eager",
    "Known",
    "Matcher",
    "Memory",
    "MemoryChoice",
    "Node",
    "Plan",
    "Refusal",
    "Step",
    "Stretch",
    "by_reference",
    "check_channels",
    "draw",
    "flatten",
    "global_hooks",
    "has_own_graph",
    "inside_of",
    "located",
    "random_seeds",
    "recipe_at",
    "run_eagerly",
    "tells_all",
    "validate",
    "walk_reference",
]
