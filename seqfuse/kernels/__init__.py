"""Triton kernels: functions of tensors and numbers, which do not depend on operations.

No module here imports Triton before a kernel is needed, so the package imports without it. A kernel's module imports
Triton at its top; the rest of seqfuse imports it inside a function (`from . import pointwise`), or by `importlib`.

A module holds host functions, which are custom ops; their kernels are in the same module or in `_NAME_kernel.py`.
`tools/launches.py` calls these functions in every configuration that is compiled for GPUs that are not present.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch


@functools.cache
def kernels_of(name: str) -> Any:
    """A module of this folder, such as `"c.mask"`; an import statement would cost a call more than the rest of it."""
    return importlib.import_module(f"{__name__}.{name}")


_keys: Any = torch._C._TorchDispatchModeKey  # pyright: ignore[reportPrivateUsage]
_mode: Any = torch._C._get_dispatch_mode  # pyright: ignore[reportPrivateUsage]


def recording() -> bool:
    """Whether a compiler is recording calls."""
    return _mode(_keys.PROXY) is not None or _mode(_keys.FUNCTIONAL) is not None
