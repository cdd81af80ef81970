"""Describes operations and classes as text that is equal if they compute the same: cache keys of facts about them."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import time
import types
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..env import short
from .flatten import Node, plain_type

_OWN, _FOREIGN = "seqfuse", ("torch", "triton", "builtins", "typing", "abc")
_DATA = bool, int, float, complex, str, bytes, torch.dtype
_OF_A_MODULE = frozenset(nn.Module().__dict__) | {"_engine"}


def describe(node: Node, whole: bool = True) -> str:
    """The class, the configuration, and the shapes and dtypes of the parameters of an operation.

    With `whole` also the mode and the buffers of modules of other packages, whose passes may read them.
    """
    parameters: list[str] = []
    for name, (owner, attribute) in node.slots.items():
        tensor = owner._parameters.get(attribute)  # pyright: ignore[reportPrivateUsage]
        # A parametrization must not run while a sequence is planned.
        parameters.append(f"{name} {'parametrized' if tensor is None else _tensor(tensor)}")
    text = _module(node.operation, whole) + (f" [{', '.join(parameters)}]" if parameters else "")
    return text + (" random" if getattr(node.operation, "random", False) else "")


def _tensor(t: Tensor) -> str:
    return f"{short(t.dtype)}{list(t.shape)}"


def tells_all(module: nn.Module) -> bool:
    """Whether equal text means equal operations: in it, user attributes that are not plain data appear as a type."""
    own = plain_type(module).__module__.partition(".")[0] in (_OWN, *_FOREIGN)
    stated = () if own else [value for name, value in vars(module).items() if name not in _OF_A_MODULE]
    return all(map(_is_data, stated)) and all(map(tells_all, module.children()))


def _is_data(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_data, cast(Sequence[Any], value)))
    return value is None or isinstance(value, (*_DATA, type))


def _module(module: nn.Module, whole: bool) -> str:
    stated = {k: v for k, v in vars(module).items() if k not in _OF_A_MODULE}
    named = [f"{name}={_plain(value)}" for name, value in sorted(stated.items())]
    if whole and plain_type(module).__module__.partition(".")[0] != _OWN:
        named.append(f"training={module.training}")
        named += [f"{name} {_tensor(t)}" for name, t in module.named_buffers(recurse=False)]
    named += [f"{name}={_module(child, whole)}" for name, child in module.named_children()]
    return f"{class_identity(plain_type(module))}({', '.join(named)})"


def _plain(value: Any) -> str:
    """Plain data as its repr, anything else as the name of its type."""
    if value is None or isinstance(value, _DATA):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"({', '.join(_plain(v) for v in cast(Sequence[Any], value))})"
    if isinstance(value, type | types.FunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    return type(value).__qualname__


@functools.lru_cache(1024)
def class_identity(cls: type) -> str:
    """The name of a class; for a user's class also a hash of its source, its package's version and its closures."""
    name = f"{cls.__module__}:{cls.__qualname__}"
    foreign = [base for base in cls.__mro__ if base.__module__.partition(".")[0] not in (_OWN, *_FOREIGN)]
    if not foreign and "<locals>" not in cls.__qualname__:
        return name
    told = [_written(base) for base in foreign]
    for key, value in sorted(vars(cls).items()):
        told.append(f"{key}={_held(value) if isinstance(value, types.FunctionType) else _plain(value)}")
    return f"{name}#{hashlib.sha256(repr(told).encode()).hexdigest()[:12]}"


@functools.lru_cache(1024)
def _written(cls: type) -> str:
    package = cls.__module__.partition(".")[0]
    try:
        return f"{getattr(sys.modules.get(package), '__version__', None)} {inspect.getsource(cls)}"
    except (OSError, TypeError):
        return str(time.time_ns())  # without source, measurements are valid in this process only


def _held(function: types.FunctionType) -> str:
    try:
        return _plain((function.__defaults__, *(cell.cell_contents for cell in function.__closure__ or ())))
    except ValueError:  # a cell that is not filled yet
        return "?"
