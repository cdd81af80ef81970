# pyright: basic
# `torch.library` has no type annotations.
"""Host functions of kernels as custom ops, `torch.ops.seqfuse.*`: one decorator reads the schema from the signature.

A host function checks its arguments, allocates its results, then chooses tiles and launches. Eager PyTorch calls it
directly, and later calls with like tensors are replayed. While a compiler, an export or a FLOP counter records calls,
the custom op is called: its schema is the signature, and its fake impl is the host function, which stops after it has
allocated its results (`_launch.stops`). On a CPU it stops there, too, and a function of `kernels.c` writes the results.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils import flop_counter

from .. import compiler
from ..generated import Source
from . import _launch
from ._launch import MISS, OTHER

P = ParamSpec("P")
R = TypeVar("R")

MOST = 1024
"""Keys of calls in the cache; one more key clears it."""

MOST_ALIKE = 16
"""Calls with one key in the cache, which differ in their tensors."""

MAX_COLUMNS = 65536
"""The widest row that the norms support."""

_guards: Any = typing.cast(Any, torch._C)._dynamo.guards
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack

_entries: dict[Any, tuple[Any, list[tuple[Callable[..., bool], Callable[..., Any], Any]]]] = {}
"""By key: a function that picks the tensors of a call that are not `None` (`None` if all are), and cached calls.

A cached call is a check whether tensors are like its own, its replay (which returns `MISS` if there is none), and the
objects whose `id` is in the key, which must stay alive.
"""

_epoch: Any = object()
"""Replaced whenever the cache is cleared."""

_library = torch.library.Library("seqfuse", "FRAGMENT")
_registered: set[str] = set()
_TYPES = {Tensor: "Tensor", int: "int", float: "float", bool: "bool", str: "str", torch.dtype: "ScalarType"}


class Text(NamedTuple):
    """How a custom op is passed values of a type that torch does not support.

    Args:
        encode: returns a string.
        decode: returns the value.
        key: code of the value's part in the key of a call, for a value `{0}`.
    """

    encode: Callable[[Any], str]
    decode: Callable[[str], Any]
    key: str = "{0}"


TEXTS: dict[Any, Text] = {}
"""By type; filled by the modules that define these types."""

# In a list, dtypes would reach a Python function as numbers.
_DTYPES = Text(lambda of: str(of).removeprefix("torch."), lambda name: getattr(torch, name))


class _Parameter:
    """A parameter of a host function as arguments of its custom op: one, or one per field of a named tuple."""

    def __init__(self, name: str, hint: Any, default: Any = inspect.Parameter.empty, written: str = "") -> None:
        options = _options(hint)
        of = options[0]
        self.name, self.default, self.optional = name, default, len(options) > 1
        self.several = typing.get_origin(of) in (Sequence, tuple)
        element = _options(typing.get_args(of)[0]) if self.several else [of]
        of = element[0]
        self.of: Any = type(typing.get_args(of)[0]) if typing.get_origin(of) is Literal else of
        self.text = _DTYPES if self.several and self.of is torch.dtype else TEXTS.get(self.of)
        kind = "str" if self.text else _TYPES.get(self.of, "").replace("Tensor", "Tensor" + written)
        if kind and self.several:
            kind += "?" * (len(element) - 1) + "[]"
        self.type = kind and kind + "?" * self.optional
        self.fields: list[_Parameter] = []
        self.absent: list[Any] = []
        if not self.type:
            fields: Any = self.of
            hints, defaults = typing.get_type_hints(fields), fields._field_defaults
            for i, field in enumerate(fields._fields):  # `None` for the first field means no tuple
                optional = i == 0 or hints[field] is Tensor
                self.absent.append(None if optional else defaults.get(field, 0))
                given = default if default is inspect.Parameter.empty else self.absent[-1]
                self.fields.append(_Parameter(field, hints[field] | None if optional else hints[field], given))

    def arguments(self) -> Iterator[_Parameter]:
        """The custom op's arguments for it."""
        if self.type:
            yield self
        yield from self.fields

    def schema(self) -> str:
        """An argument in the schema."""
        return f"{self.type} {self.name}" + ("" if self.default is inspect.Parameter.empty else f"={self.default!r}")

    def encoded(self, value: Any) -> Iterator[Any]:
        """The values of the custom op's arguments."""
        if self.fields:
            yield from self.absent if value is None else value
        elif self.type:
            if self.text is not None and value is not None:
                value = [*map(self.text.encode, value)] if self.several else self.text.encode(value)
            yield [*value] if self.several and value is not None else value

    def decoded(self, given: Mapping[str, Any]) -> Any:
        """The value, from the custom op's arguments."""
        if self.fields:
            values = [field.decoded(given) for field in self.fields]
            return None if values[0] is None else self.of(*values)
        value = given.get(self.name, None if self.default is inspect.Parameter.empty else self.default)
        if self.text is None or value is None:
            return value
        return tuple(map(self.text.decode, value)) if self.several else self.text.decode(value)

    def tensors(self) -> Iterator[str]:
        """Expressions of its tensors."""
        if self.of is Tensor:
            yield f"*({self.name} or ())" if self.several else self.name
        for field in self.fields:
            if field.of is Tensor:
                yield f"None if {self.name} is None else {self.name}.{field.name}"

    def key(self) -> Iterator[str]:
        """Expressions of everything else that decisions depend on."""
        if self.fields:
            others = [f"{self.name}.{field.name}, " for field in self.fields if field.of is not Tensor]
            yield f"None if {self.name} is None else ({''.join(others)})"
        elif self.of is not Tensor:
            key = "tuple({0})" if self.several else "{0}" if self.text is None else self.text.key
            yield (f"None if {{0}} is None else {key}" if self.optional and key != "{0}" else key).format(self.name)


def _options(hint: Any) -> list[Any]:
    """The types of a union, with `None` last, or the only type."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return [hint]
    return sorted(typing.get_args(hint), key=lambda option: option is types.NoneType)


class Operator:
    """A host function with its custom op; the arguments are those of `operator`."""

    def __init__(
        self,
        host: Callable[..., Any],
        name: str,
        written: Sequence[str] = (),
        out: str | None = None,
        in_c: Callable[..., Any] | None = None,
    ) -> None:
        self.host, self.name, self.written, self.out, self.in_c = host, name, written, out, in_c
        self.signature = inspect.signature(host)
        hints, letters = typing.get_type_hints(host), iter("abcdefgh")
        self.result = hints["return"]
        self._any_number = typing.get_args(self.result)[1:] == (...,)
        self._parameters = [
            _Parameter(p.name, hints[p.name], p.default, f"({next(letters)}!)" if p.name in written else "")
            for p in self.signature.parameters.values()
        ]
        self._positional = sum(p.kind is not p.KEYWORD_ONLY for p in self.signature.parameters.values())
        for p in self._parameters:
            if p.name == out:
                p.type, p.fields = "", []
        self._arguments = [argument for p in self._parameters for argument in p.arguments()]
        self._first = sum(1 for p in self._parameters[: self._positional] for _ in p.arguments())

    def call(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Call a function of the host function's parameters with the values of all of them."""
        rest = zip(self._parameters[self._positional :], args[self._positional :], strict=True)
        return function(*args[: self._positional], **{p.name: value for p, value in rest})

    def make(self, args: Sequence[Any]) -> Any:
        """Call the host function with the values of all its parameters."""
        return self.call(self.host, args)

    def alive(self, args: Sequence[Any]) -> list[Any]:
        """The values whose `id` may be in a key."""
        return [value for p, value in zip(self._parameters, args, strict=True) if p.text]

    def decided_in_c(self, args: Sequence[Any], made: Any) -> Any:
        """How C computes results like these; `None` if nothing is to be computed or written."""
        assert self.in_c is not None
        results = [
            None if t is None else (tuple(t.shape), t.dtype) for t in ((made,) if isinstance(made, Tensor) else made)
        ]
        named = {p.name: value for p, value in zip(self._parameters, args, strict=True)}
        return self.in_c(types.SimpleNamespace(**named), results) if any(results) or self.written else None

    def recorded(self, *args: Any) -> Any:
        """Call the custom op, because a mode records calls."""
        given = [one for p, value in zip(self._parameters, args, strict=True) for one in p.encoded(value)]
        named = {a.name: value for a, value in zip(self._arguments[self._first :], given[self._first :], strict=True)}
        made = getattr(torch.ops.seqfuse, self.name)(*given[: self._first], **named)
        if self.in_c is not None and compiler.is_collecting() and _launch.in_c(args[0]):
            decided = self.decided_in_c(args, made)
            if decided is not None:
                compiler.ask(decided.kernel.source)
        if self.out is not None:
            into = args[[p.name for p in self._parameters].index(self.out)]
            return tuple([to.copy_(result) for to, result in zip(into, made, strict=True)])
        return self.result._make(made) if hasattr(self.result, "_make") else tuple(made) if self._any_number else made

    def register(self, entry: Callable[..., Any], flops: Callable[..., int] | None) -> None:
        """Register the custom op; eager PyTorch runs `entry`."""
        if self.name in _registered:
            return
        _registered.add(self.name)
        arguments = [argument.schema() for argument in self._arguments]
        if self._first < len(arguments):
            arguments.insert(self._first, "*")
        _library.define(f"{self.name}({', '.join(arguments)}) -> {_returned(self.result)}")
        _library.impl(self.name, self._decoding(entry), "CompositeExplicitAutograd")
        torch.library.register_fake(
            f"seqfuse::{self.name}", _launch.stopping()(self._decoding(self.host)), lib=_library
        )
        if flops is not None:
            # With `get_raw`, it is called with the call's tensors and its result, `out_val`.
            flop_counter.register_flop_formula(getattr(torch.ops.seqfuse, self.name), get_raw=True)(flops)

    def _decoding(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **rest: Any) -> Any:
            given = {a.name: value for a, value in zip(self._arguments, args, strict=False)} | rest
            made = self.call(function, [p.decoded(given) for p in self._parameters])
            return [t for t in made if t is not None] if self._any_number else made

        return run

    def entry(self) -> Any:
        """The function that replaces the host function."""
        source = self._source(self.host.__name__)
        source.constants |= {"modes": _launch.traced, "replayed": replayed}
        args = ", ".join(p.name for p in self._parameters)
        source.add("if modes():", f"    return operator.recorded({args})")
        source.add(*self._key(), f"return replayed(operator, key, tensors, ({args},))")
        return functools.update_wrapper(source.define(), self.host)

    @functools.cached_property
    def split(self) -> Callable[..., tuple[Any, tuple[Tensor | None, ...]]]:
        """A function of the same parameters that returns a call's key and tensors."""
        source = self._source("split")
        source.add(*self._key(), "return key, tensors")
        return source.define()

    def _source(self, name: str) -> Source:
        texts: list[str] = []
        constants: dict[str, Any] = {"operator": self}
        for i, p in enumerate(self._parameters):
            if i == self._positional:
                texts.append("*")
            if p.default is not inspect.Parameter.empty:
                constants[f"default_{p.name}"] = p.default
            texts.append(p.name if p.default is inspect.Parameter.empty else f"{p.name}=default_{p.name}")
        source = Source(name, ", ".join(texts))
        source.constants |= constants
        return source

    def _key(self) -> Iterator[str]:
        parts = [part for p in self._parameters for part in p.key()]
        yield f"tensors = ({', '.join(one for p in self._parameters for one in p.tensors())},)"
        yield f"key = ({', '.join(['operator', *parts])}, tuple(map(type, tensors)), {self._parameters[0].name}.shape)"


def _returned(hint: Any) -> str:
    """The results in a schema; an absent tensor is `None`, and is left out where there may be any number."""
    if hint in (Tensor, types.NoneType):
        return "Tensor" if hint is Tensor else "()"
    members = getattr(hint, "_fields", typing.get_args(hint))
    return "Tensor[]" if ... in members else f"({', '.join('Tensor' for _ in members)})"


def _never(*tensors: Tensor) -> Any:
    return MISS


def _never_like(*tensors: Tensor) -> bool:
    return False


def replayed(operator: Operator, key: Any, tensors: tuple[Tensor | None, ...], args: tuple[Any, ...]) -> Any:
    """The result of a custom op's call, replayed if a call with like tensors is cached.

    Args:
        operator: the custom op.
        key: all that decisions depend on, except strides, dtypes and devices.
        tensors: the tensors in `args`; the first one is not `None`.
        args: the arguments of the host function.
    """
    found = _entries.get(key)
    if found is not None:
        pick, entries = found
        given = tensors if pick is None else pick(tensors)
        for check, again, _ in entries:
            if check(*given):
                result = again(*given)
                if result is MISS:
                    return operator.make(args)
                if result is not OTHER:
                    return result
    return _decided(operator, key, tensors, args)


def _bound(whole: Callable[..., Any], split: Callable[..., tuple[Any, tuple[Any, ...]]]) -> Callable[..., Any]:
    """A function of tensors that calls `whole`, or for tensors like the last ones replays without reading the cache.

    Args:
        whole: calls an operator's function, perhaps with copies of tensors in other layouts.
        split: returns the key and the tensors of that call.
    """
    latest: tuple[Any, Callable[..., bool], Callable[..., Any]] = (None, _never_like, _never)

    def run(*given: Tensor) -> Any:
        nonlocal latest
        if _dispatch_modes():
            return whole(*given)
        epoch, check, again = latest  # in one read, because threads share it
        if epoch is _epoch and check(*given):
            result = again(*given)
            if result is not MISS and result is not OTHER:
                return result
        epoch = _epoch
        result = whole(*given)
        found = _entries.get(split(*given)[0])
        alike = [entry for entry in found[1] if entry[1] is not _never and entry[0](*given)] if found else ()
        latest = (epoch, *alike[0][:2]) if alike else (epoch, _never_like, _never)
        return result

    return run


def _decided(operator: Operator, key: Any, tensors: tuple[Tensor | None, ...], args: tuple[Any, ...]) -> Any:
    """Run a call, and cache its replay, or that it has none."""
    given = [t for t in tensors if t is not None]
    if operator.in_c is not None and _launch.in_c(given[0]):
        _launch.one_device(operator.name, given)
        with _launch.stopping():
            made = operator.make(args)
        decided = operator.decided_in_c(args, made)
        if decided is None:
            return operator.make(args)
        kind = operator.result if hasattr(operator.result, "_make") else tuple
        check, run = decided.entry(given, None if operator.result is Tensor else kind)
        _keep(key, tensors, check, run, operator.alive(args))
        return run(*given)
    if any(t.is_neg() for t in given):  # lazily negated views
        return operator.make([*map(_of_own_sign, args)])
    # A replay cannot distinguish tensors at one address; a tensor without elements has no address. Seeds of several
    # dropouts are adjacent, and every second one is unaligned.
    addresses = () if _launch.INTERPRETED or _function_modes() else {t.data_ptr() for t in given}
    if len(addresses) < len(given) or 0 in addresses or any(t.data_ptr() & 15 for t in given if t.numel() > 1):
        return operator.make(args)
    with _launch.Recording() as recording:
        before = _launch.watch(recording)
        try:
            result = operator.make(args)
        finally:
            _launch.watch(before)
    check = _guards.TensorGuards(*given, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    _keep(key, tensors, check, recording.again(given, result) or _never, operator.alive(args))
    return result


def _of_own_sign(value: Any) -> Any:
    """Resolve the lazy negation of a tensor, or of several; return any other value unchanged."""
    if isinstance(value, Tensor):
        return value.resolve_neg()
    if not isinstance(value, tuple | list):
        return value
    return getattr(value, "_make", list)(map(_of_own_sign, value))


def _keep(key: Any, tensors: tuple[Tensor | None, ...], check: Any, again: Any, alive: Any) -> None:
    if len(_entries) >= MOST:
        _entries.clear()
    there = [i for i, t in enumerate(tensors) if t is not None]
    # A slice for a single tensor at the front, because `itemgetter` with one index returns no tuple.
    pick = itemgetter(*there if len(there) > 1 else [slice(1)]) if len(there) < len(tensors) else None
    _, alike = _entries.setdefault(key, (pick, []))
    if len(alike) >= MOST_ALIKE:
        alike.clear()
    alike.append((check, again, alive))


def forget() -> None:
    """Clear the cache of recorded calls."""
    global _epoch
    _epoch = object()
    _entries.clear()


def operator(
    name: str,
    *,
    written: Sequence[str] = (),
    out: str | None = None,
    in_c: Callable[..., Any] | None = None,
    flops: Callable[..., int] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a host function a custom op; its first parameter is a tensor.

    Args:
        name: name of the custom op.
        written: parameters whose tensors are written.
        out: a parameter with tensors for the results. The custom op does not have it, and passes `None` to the host
            function, which then allocates the results.
        in_c: decides a call for tensors on a CPU: returns a `c.call.Decided` for the arguments, as attributes, and the
            shape and dtype of each result, `None` for an absent result.
        flops: returns the FLOPs for torch's `FlopCounterMode`, counted as for ATen's operators.
    """

    def decorate(host: Callable[P, R]) -> Callable[P, R]:
        made = Operator(host, name, written, out, in_c)
        entry = made.entry()
        made.register(entry, flops)
        entry.operator = made
        return entry

    return decorate


def bound(
    function: Callable[..., R], arguments: Callable[..., dict[str, Any]], entry: Callable[..., R] | None = None
) -> Callable[..., R]:
    """A host function of its tensors only, which for tensors like the previous ones does not read the cache.

    Args:
        function: the result of `operator`.
        arguments: returns the arguments for tensors; GPU tensors that are not contiguous are copied first.
        entry: a function that calls `function`, with the same arguments.
    """
    operator: Operator = function.operator  # pyright: ignore[reportFunctionMemberAccess]
    called = entry or function

    def whole(*given: Tensor) -> R:
        return called(**arguments(*(given if _launch.in_c(given[0]) else [t.contiguous() for t in given])))

    return _bound(whole, lambda *given: operator.split(**arguments(*given)))


def inner_contiguous(name: str, tensor: Tensor) -> Tensor:
    """The tensor itself; raises `ValueError` unless its last dimension is contiguous."""
    if tensor.ndim and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} must be contiguous in its last dimension, got shape {tuple(tensor.shape)} with "
            f"strides {tensor.stride()}"
        )
    return tensor


def norm_columns(x: Tensor, **rows: Tensor | None) -> int:
    """The columns of x; raises `ValueError` if rows of that size or these parameters cannot be used in a norm."""
    N = x.shape[-1] if x.ndim else 0
    if not x.ndim:
        raise ValueError("a norm needs at least one dimension")
    if not 0 < N <= MAX_COLUMNS:
        raise ValueError(f"rows of {N} columns: at least 1 and at most {MAX_COLUMNS} can be normalized")
    for name, row in rows.items():
        if row is not None and tuple(row.shape) != (N,):
            raise ValueError(f"{name} must have shape ({N},), got {tuple(row.shape)}")
        if row is not None:
            inner_contiguous(name, row)
    return N


def viewed_as_rows(name: str, tensor: Tensor, columns: int) -> Tensor:
    """The tensor as [M, columns] without a copy; raises `ValueError` if its leading dimensions require one."""
    if tensor.ndim == 2:
        return inner_contiguous(name, tensor)
    if tensor.numel() == 0:
        return tensor.new_empty((0, columns))
    try:
        return inner_contiguous(name, tensor.view(-1, columns))
    except RuntimeError:
        raise ValueError(
            f"{name} must have one stride for its leading dimensions, got shape {tuple(tensor.shape)} with "
            f"strides {tensor.stride()}"
        ) from None
