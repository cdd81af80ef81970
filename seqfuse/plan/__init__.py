"""Plans: which fusions stand where, what is saved, and why others are not used. No tensor with data runs here."""

from .flatten import flatten
from .match import Refusal
from .plan import Eager, Plan
from .schedule import Budget
from .step import Step

__all__ = ["Budget", "Eager", "Plan", "Refusal", "Step", "flatten"]
