"""Dtypes of parameters, and their casts under autocast, done once per call."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .env import any_autocast, autocast_of


def held(owner: nn.Module, name: str) -> list[Any]:
    """A parameter, if it is not `None`, or the tensors from which a parametrization computes it.

    Reading a parametrized attribute would compute it, and some parametrizations update their state then.
    """
    known: Any = owner._parameters.get(name)  # pyright: ignore[reportPrivateUsage]
    if known is None and parametrize.is_parametrized(owner, name):
        return [*getattr(owner.parametrizations, name).parameters()]
    known = getattr(owner, name) if known is None else known
    return [] if known is None else [known]


def dtype_of(owner: nn.Module, name: str) -> Any:
    """The dtype of a parameter, which an unsafe parametrization may change from that of its originals; or `None`."""
    tensors, made = held(owner, name), name not in owner._parameters  # pyright: ignore[reportPrivateUsage]
    if made and parametrize.is_parametrized(owner, name) and getattr(owner.parametrizations, name).unsafe:
        tensors = [getattr(owner, name)]
    return tensors[0].dtype if tensors else None


class _Call(threading.local):
    """Casts of the call that this thread runs, each with its source; `None` outside of a call."""

    casts: dict[tuple[int, ...], tuple[Any, Tensor]] | None = None


_call = _Call()


def lowered(t: Tensor, always: bool = False, parts: Sequence[Tensor] = ()) -> Tensor:
    """A parameter in the dtype that autocast uses for GEMMs; itself outside autocast, and in float64.

    Without a backward, torch casts it and caches the cast for the autocast region; a GEMM that is not torch's passes
    `always`. A view of several parameters is identified by these `parts`.
    """
    casts = _call.casts
    if casts is None and not always:
        return t
    dtype = autocast_of(t.device.type)
    if dtype is None or t.dtype is dtype or t.dtype is torch.float64 or not t.is_floating_point():
        return t
    key = (*map(id, parts or (t,)),)
    known = None if casts is None else casts.get(key)
    if known is not None:
        return known[1]
    made = t.to(dtype)
    if casts is not None:
        casts[key] = (parts, t), made
    return made


def autocasting(kind: str, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """A context with autocast of a device type in this dtype, or disabled."""
    if (dtype is None and not any_autocast()) or not torch.amp.is_autocast_available(kind):  # as on meta
        return contextlib.nullcontext()
    return torch.autocast(kind, dtype or torch.get_autocast_dtype(kind), dtype is not None)


@contextlib.contextmanager
def cast_once(apart: bool = False) -> Generator[dict[tuple[int, ...], tuple[Any, Tensor]] | None]:
    """A block for a call that saves tensors: in it each parameter is cast once, and the cast is saved; yields the
    casts.

    Runs on fake tensors within a call use `apart`, so that their casts are not mixed with real ones.
    """
    outer = _call.casts
    if apart != (outer is None):
        _call.casts = {}
    try:
        yield _call.casts
    finally:
        _call.casts = outer
