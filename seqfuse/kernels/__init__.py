"""Triton kernels: tensors and numbers in, tensors out; they know nothing of operations.

Nothing here imports Triton until a kernel is asked for, so the package imports without it. A kernel's module imports
Triton at its top: `from . import pointwise` inside a function, or `importlib`, is how the rest of seqfuse gets at it.

A kernel module holds its kernels, the plain host functions that launch them, and `variants()`: every configuration that
those functions can launch, up to the device functions a user may pass.
"""

from __future__ import annotations

import functools
import importlib.util


@functools.cache
def triton_installed() -> bool:
    """Whether Triton can be imported; it is not imported to find out."""
    return importlib.util.find_spec("triton") is not None
