"""Passes run again on fake tensors, which tell a plan what is kept and torch.compile what to allocate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from ..fake import faking
from ..saved import Saved, copied
from .observe import Pass, results


def assert_fakes_alike(run: Pass) -> None:
    """A pass gives on fake tensors what it gave on real ones: as many tensors, of the same shapes and dtypes.

    A pass that cannot run on fake tensors is left out: its plan says that it does not know what is kept.

    Raises AssertionError naming the pass, the tensor and both shapes.
    """
    real = {name: (tuple(t.shape), t.dtype) for name, t in results(run.name, run.out)}
    with faking() as mode, torch.no_grad():
        try:
            call: Any = getattr(type(run.owner), run.name)
            args = (_faked(mode, argument) for argument in run.args)
            out = call(run.owner, *args, **{name: _faked(mode, value) for name, value in run.kwargs.items()})
        except Exception:
            return
    fake = {name: (tuple(t.shape), t.dtype) for name, t in results(run.name, out)}
    for name in (*real, *fake):
        if real.get(name) != fake.get(name):
            given, meant = (_said(of.get(name)) for of in (fake, real))
            raise AssertionError(
                f"{run.name} gives {name} as {given} on fake tensors, and as {meant} on real ones: a plan would count "
                "other bytes and torch.compile would allocate others; see the register_fake of its operator"
            )


def _said(found: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "nothing" if found is None else f"{str(found[1]).removeprefix('torch.')} {found[0]}"


def _faked(mode: Any, value: Any) -> Any:
    if isinstance(value, Tensor):
        return mode.from_tensor(value)
    if isinstance(value, Saved):
        present = tuple(name for name in value.fields if name in vars(value) or name in vars(value).get("_late", ()))
        return copied(value, present, mode.from_tensor)
    if isinstance(value, Mapping):
        return {name: _faked(mode, inner) for name, inner in cast(Mapping[str, Any], value).items()}
    if isinstance(value, tuple):
        return tuple(_faked(mode, inner) for inner in cast(tuple[Any, ...], value))
    return value
