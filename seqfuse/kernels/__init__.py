"""Triton kernels: tensors and numbers in, tensors out; they know nothing of operations.

Nothing here imports Triton until a kernel is asked for, so the package imports without it. A kernel's module imports
Triton at its top: `from . import pointwise` inside a function, or `importlib`, is how the rest of seqfuse gets at it.

A module holds host functions, which are operators; their kernels stand there or in `_NAME_kernel.py`.
`tools/launches.py` has calls of these functions for every configuration that is compiled for GPUs that are not here.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch


@functools.cache
def triton_installed() -> bool:
    """Whether Triton can be imported; it is not imported to find out."""
    return importlib.util.find_spec("triton") is not None


_keys: Any = torch._C._TorchDispatchModeKey  # pyright: ignore[reportPrivateUsage]
_mode: Any = torch._C._get_dispatch_mode  # pyright: ignore[reportPrivateUsage]


def recording() -> bool:
    """Whether a compiler records what runs."""
    return _mode(_keys.PROXY) is not None or _mode(_keys.FUNCTIONAL) is not None
