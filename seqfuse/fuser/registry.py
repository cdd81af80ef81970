"""Fusers by name, for a node in a compiler's graph, which can hold nothing but names."""

from __future__ import annotations

import weakref
from itertools import count
from typing import Any

import torch

fusers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_numbers = count()


def enroll(fuser: Any) -> str:
    """A name by which the node finds a fuser; none for one that exists in a trace only."""
    if torch.compiler.is_compiling():
        return ""
    name = str(next(_numbers))
    fusers[name] = fuser
    return name
