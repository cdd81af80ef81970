"""The engine: matches fusions, chooses the cheapest schedules, plans and runs."""

from .budget import Budget
from .flatten import flatten
from .match import Refusal
from .plan import Eager, Plan, Step
from .run import Fuser
from .sequential import Sequential, remap_keys

__all__ = ["Budget", "Eager", "Fuser", "Plan", "Refusal", "Sequential", "Step", "flatten", "remap_keys"]
