"""Plans as text and as SVG, drawn from plain data by the standard library alone.

What is drawn is a `PlanData`, as `Plan.as_dict` gives it: nothing here knows what an operation is. A picture loads
nothing from anywhere, and every name in it is text, whatever characters it is made of.
"""

from .data import EagerData, EnvData, MemoryData, OperationData, PlanData, RefusalData, StepData
from .svg import svg
from .text import render, summary

__all__ = [
    "EagerData",
    "EnvData",
    "MemoryData",
    "OperationData",
    "PlanData",
    "RefusalData",
    "StepData",
    "render",
    "summary",
    "svg",
]
