"""Running operations on fake tensors, beside a real call and without a trace in it."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any, ClassVar, cast

import torch

from ..casts import cast_once
from ..env import Env

_FAKE: Any = torch._C._TorchDispatchModeKey.FAKE  # pyright: ignore[reportPrivateUsage]
_mode: Any = torch._C._get_dispatch_mode  # pyright: ignore[reportPrivateUsage]


class LaunchOnFakes(RuntimeError):
    """A Triton kernel, by name, was launched on fake tensors, which have no memory that it could read or write."""


@contextlib.contextmanager
def faking(mode: Any = None) -> Generator[Any]:
    """A `FakeTensorMode` that takes real parameters too; or one that was made before, or is on already, again.

    A kernel that is launched in it raises `LaunchOnFakes`; those of this library are behind operators, which make what
    they return and launch nothing.
    """
    from torch._guards import active_fake_mode
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

    # Autocast keeps casts of parameters for later: fake ones must not be among them.
    kept = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        # Nor may a mode of the caller's see them: selective checkpointing keeps what it sees.
        with (
            _quiet(),
            _without_launches(),
            cast_once(apart=True),
            _disable_current_modes(),
            mode or active_fake_mode() or FakeTensorMode(allow_non_fake_inputs=True) as entered,
        ):
            yield entered
    finally:
        torch.set_autocast_cache_enabled(kept)


def placed(t: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A fake tensor, or one like it of another device and dtype."""
    same = t.device == device and t.dtype is dtype
    return t if same else torch.empty_like(t, device=device, dtype=dtype, requires_grad=t.requires_grad)


def autocasting(env: Env, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The autocast of an environment, on the device of fake tensors."""
    if not torch.amp.is_autocast_available(device.type):  # as on meta
        return contextlib.nullcontext()
    return torch.autocast(device.type, env.autocast, env.autocast is not None)


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


class _Launches:
    """Triton's methods that launch, which are replaced while any thread is faking."""

    lock = threading.Lock()
    blocks = 0
    replaced: ClassVar[dict[type, tuple[Any, Any]]] = {}  # the method, and what took its place


@contextlib.contextmanager
def _without_launches() -> Generator[None]:
    """Within the block this thread launches no kernel; others, whose tensors are real, do."""
    with _Launches.lock:
        _Launches.blocks += 1
        for kind in _launching():
            if kind not in _Launches.replaced:
                _Launches.replaced[kind] = own, guarded = kind.run, _guarded(kind.run)
                kind.run = guarded
    try:
        yield
    finally:
        with _Launches.lock:
            _Launches.blocks -= 1
            while not _Launches.blocks and _Launches.replaced:
                kind, (own, guarded) = cast(Any, _Launches.replaced.popitem())
                if kind.run is guarded:  # else it was replaced once more since then
                    kind.run = own


def _launching() -> Iterator[Any]:
    """Triton's classes that launch: compiled, interpreted and tuned kernels. Without Triton there is no kernel."""
    base = getattr(sys.modules.get("triton.runtime.jit"), "KernelInterface", None)
    left: list[Any] = [] if base is None else [base]
    while left:
        kind: Any = left.pop()
        left += kind.__subclasses__()
        if "run" in vars(kind):
            yield kind


def _guarded(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def guarded(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if _mode(_FAKE) is None:
            return run(kernel, *args, **kwargs)
        while not hasattr(kernel, "__name__"):  # what tunes a kernel has none
            kernel = kernel.fn
        raise LaunchOnFakes(kernel.__name__)

    return guarded


def is_fake(tensor: Any) -> bool:
    """Whether a tensor is a fake one, or one that a compiler records with."""
    return isinstance(tensor, recorded())


@functools.cache
def recorded() -> tuple[type[torch.Tensor], ...]:
    """The classes of tensors without memory that compilers follow a run with."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return FakeTensor, FunctionalTensor
