"""Running operations on fake tensors, beside a real call and without a trace in it."""

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
    """A `FakeTensorMode` that takes real parameters too; or one that was made before, or is on already, again.

    What is made in it has no memory that a kernel could read or write: a launch raises `RuntimeError`. Those of this
    library are behind operators, which make what they return and launch nothing.
    """
    from torch._guards import active_fake_mode
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

    # Autocast keeps casts of parameters for later: fake ones must not be among them.
    kept = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    given = mode or active_fake_mode()
    mode = given or FakeTensorMode(allow_non_fake_inputs=True)
    unsafe, mode._allow_unsafe_data_ptr_access = mode._allow_unsafe_data_ptr_access, False
    try:
        # Nor may a mode of the caller's see them: selective checkpointing keeps what it sees.
        with _quiet(), cast_once(apart=True), _disable_current_modes(), mode as entered:
            yield entered
    finally:
        mode._allow_unsafe_data_ptr_access = unsafe
        if given is None:
            forget_real(mode)
        torch.set_autocast_cache_enabled(kept)


def without_fake(error: BaseException) -> str | None:
    """The name, such as `"example::norm"`, of a custom op that has no fake implementation, if an error says so."""
    from torch._subclasses.fake_tensor import UnsupportedOperatorException

    if isinstance(error, UnsupportedOperatorException) and not str(error).startswith(("aten.", "prims.")):
        return ".".join(str(error).split(".")[:2]).replace(".", "::")
    found = re.search(r"no fake impl registered for <CustomOpDef\((.+?)\)>", str(error))
    return None if found is None else found[1]


def forget_real(mode: Any) -> None:
    """Let a mode forget real tensors: a cycle keeps it, and a parameter that it refers to cannot be swapped."""
    mode.fake_tensor_converter.meta_converter.describer.lookup_tensor.clear()


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Within the block torch does not print a traceback for what fails in this thread: who asked gets the error."""
    log, thread = logging.getLogger("torch._subclasses.fake_tensor"), threading.get_ident()

    def elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != thread

    log.addFilter(elsewhere)
    try:
        yield
    finally:
        log.removeFilter(elsewhere)


def laid_like(t: torch.Tensor, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """A tensor that lies in its storage as another does, of this dtype and device; what it holds is arbitrary."""
    whole = torch.empty(t.untyped_storage().nbytes() // t.element_size(), dtype=dtype, device=device)
    return whole.as_strided(t.shape, t.stride(), t.storage_offset())


def is_fake(tensor: Any) -> bool:
    """Whether a tensor is a fake one, or one that a compiler records with."""
    return isinstance(tensor, recorded())


@functools.cache
def recorded() -> tuple[type[torch.Tensor], ...]:
    """The classes of tensors without memory that compilers follow a run with."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return FakeTensor, FunctionalTensor
