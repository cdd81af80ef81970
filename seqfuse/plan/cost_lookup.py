"""Looks up the measured time of a candidate fusion; the key is a text that describes its operations and input."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import time
import types
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from ..cost_table import Machine, Measurement, table
from ..env import bucket, rows_of, short
from ..fusion import FusedOperation
from .flatten import Node, plain_type
from .step import Stretch

_OWN, _FOREIGN = "seqfuse", ("torch", "triton", "builtins", "typing", "abc")
_OF_A_MODULE = frozenset(nn.Module().__dict__) | {"_engine"}


class Known:
    """Looks up measurements for candidates of one stretch."""

    def __init__(self, stretch: Stretch) -> None:
        self._stretch = stretch
        self._table: Mapping[str, Measurement] | None = None
        self._described: dict[int, str] = {}

    def __call__(self, fusion: FusedOperation, a: int, b: int) -> Measurement | None:
        """Return the measurement of a fusion on positions `a..b`, or `None`."""
        if self._table is None:  # looked up where there is a candidate, and nowhere else
            machine = Machine.of(self._stretch.env)
            self._table = {} if machine is None else table(machine)
        if not self._table:
            return None
        key = self.key(fusion, a, b)
        return None if key is None else self._table.get(key)

    def key(self, fusion: FusedOperation, a: int, b: int) -> str | None:
        """The key of a candidate among measurements; `None` where too little is known of its input."""
        stretch, env = self._stretch, self._stretch.env
        live = b > stretch.wants.live_from
        extent = self._extent(a, b)
        if extent is None:
            return None
        parts = [identity(type(fusion)), "; ".join(self._operation(p, live) for p in range(a, b)), extent]
        parts.append(short(stretch.around(a, a)[0].taken if stretch.borders else env.dtype))
        if env.autocast is not None:
            parts.append(f"autocast {short(env.autocast)}")
        if env.deterministic:
            parts.append("deterministic")
        return " | ".join(parts)

    def _extent(self, a: int, b: int) -> str | None:
        stretch = self._stretch
        shape = None if stretch.shapes is None else stretch.shapes[a - stretch.start]
        if shape is not None and any(type(n) is not int for n in shape):  # a compiler leaves it open
            return None
        rows = stretch.env.rows if shape is None else bucket(rows_of(shape))
        if rows is None:
            return None
        if any(node.slots for node in stretch.nodes[a:b]):
            return f"{rows} rows"  # parameters say how wide they are
        return None if shape is None else f"{rows} rows of {shape[-1] if shape else 1}"

    def _operation(self, position: int, live: bool) -> str:
        if position not in self._described:
            self._described[position] = describe(self._stretch.nodes[position])
        wanted = self._stretch.wants.needs[position] if live else ()
        return self._described[position] + (f" d({', '.join(sorted(wanted))})" if wanted else "")


def describe(node: Node) -> str:
    """An operation by its class, configuration, and the shapes and dtypes of its parameters."""
    parameters: list[str] = []
    for name, (owner, attribute) in node.slots.items():
        tensor = owner._parameters.get(attribute)  # pyright: ignore[reportPrivateUsage]
        if tensor is None:  # a parametrization, which planning must not run
            parameters.append(f"{name} parametrized")
        else:
            parameters.append(f"{name} {short(tensor.dtype)}{list(tensor.shape)}")
    text = _module(node.operation) + (f" [{', '.join(parameters)}]" if parameters else "")
    return text + (" random" if getattr(node.operation, "random", False) else "")


def _module(module: nn.Module) -> str:
    stated = {k: v for k, v in vars(module).items() if k not in _OF_A_MODULE}
    named = [f"{name}={_plain(value)}" for name, value in sorted(stated.items())]
    named += [f"{name}={_module(child)}" for name, child in module.named_children()]
    return f"{identity(plain_type(module))}({', '.join(named)})"


def _plain(value: Any) -> str:
    """Data as itself, everything else as what it is."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"({', '.join(_plain(v) for v in cast(Sequence[Any], value))})"
    if isinstance(value, type | types.FunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    return type(value).__qualname__


@functools.lru_cache(1024)
def identity(cls: type) -> str:
    """A class by its name; one of the user also by its source, its package's version, and what a factory gave it."""
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
        return str(time.time_ns())  # nobody knows it: what is measured counts in this process


def _held(function: types.FunctionType) -> str:
    try:
        return _plain((function.__defaults__, *(cell.cell_contents for cell in function.__closure__ or ())))
    except ValueError:  # a cell that is not filled yet
        return "?"
