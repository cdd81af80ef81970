"""Plans as text and as SVG, drawn from plain data with the standard library only.

The input is a `PlanData`, from `Plan.as_dict`. Pictures load no external resources, and names are escaped.
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
