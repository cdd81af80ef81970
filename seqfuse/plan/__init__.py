"""Plans: which fusions stand where, what is saved, and why others are not used. No tensor with data runs here.

Other folders than `run` import what is listed here, and none of the files.
"""

from .facts import Memory
from .flatten import Node, flatten, global_hooks, has_own_graph, inside_of, located
from .inputs import validate
from .match import Known, Matcher, Refusal
from .plan import Eager, Plan
from .quantized import recipe_at
from .reference import by_reference, check_channels, draw, random_seeds, run_eagerly, walk_reference
from .schedule import MODES, AnyChoice, Budget, Candidate, Choice, MemoryChoice
from .step import Step, Stretch

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
    "validate",
    "walk_reference",
]
