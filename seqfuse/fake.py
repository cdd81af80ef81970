"""Runs operations on fake tensors within a real call, without side effects on it."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import threading
from collections.abc import Generator
from typing import Any

import torch

from .casts import cast_once


@contextlib.contextmanager
def faking(mode: Any = None) -> Generator[Any]:
    """A `FakeTensorMode` that accepts real parameters; enters an existing or active mode again.

    Its tensors have no memory that a kernel could read or write: a launch raises `RuntimeError`. Kernels of this
    library are behind custom ops, whose fake implementations only allocate the results.
    """
    from torch._guards import active_fake_mode
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

    # The autocast cache must not get fake casts of parameters.
    kept = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    given = mode or active_fake_mode()
    mode = given or FakeTensorMode(allow_non_fake_inputs=True)
    unsafe, mode._allow_unsafe_data_ptr_access = mode._allow_unsafe_data_ptr_access, False
    try:
        # Nor must dispatch modes of the caller see them: selective checkpointing saves results.
        with _quiet(), cast_once(apart=True), _disable_current_modes(), mode as entered:
            yield entered
    finally:
        mode._allow_unsafe_data_ptr_access = unsafe
        if given is None:
            forget_real(mode)
        torch.set_autocast_cache_enabled(kept)


def without_fake(error: BaseException) -> str | None:
    """The custom op, such as `"example::norm"`, whose missing fake implementation caused an error, or `None`."""
    from torch._subclasses.fake_tensor import UnsupportedOperatorException

    if isinstance(error, UnsupportedOperatorException) and not str(error).startswith(("aten.", "prims.")):
        return ".".join(str(error).split(".")[:2]).replace(".", "::")
    found = re.search(r"no fake impl registered for <CustomOpDef\((.+?)\)>", str(error))
    return None if found is None else found[1]


def forget_real(mode: Any) -> None:
    """Clear a mode's references to real tensors: it is part of a cycle, and referenced parameters cannot be swapped."""
    mode.fake_tensor_converter.meta_converter.describer.lookup_tensor.clear()


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """A block in which torch prints no tracebacks of failures in this thread; they are raised to the caller."""
    log, thread = logging.getLogger("torch._subclasses.fake_tensor"), threading.get_ident()

    def elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != thread

    log.addFilter(elsewhere)
    try:
        yield
    finally:
        log.removeFilter(elsewhere)


def laid_like(t: torch.Tensor, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """An uninitialized tensor with the strides and storage size of `t`, of this dtype and device."""
    whole = torch.empty(t.untyped_storage().nbytes() // t.element_size(), dtype=dtype, device=device)
    return whole.as_strided(t.shape, t.stride(), t.storage_offset())


def is_fake(tensor: Any) -> bool:
    """Whether a tensor is fake, or a proxy with which a compiler records."""
    return isinstance(tensor, recorded())


@functools.cache
def recorded() -> tuple[type[torch.Tensor], ...]:
    """The classes of tensors without memory with which compilers trace a run."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return FakeTensor, FunctionalTensor
