# pyright: basic
# Triton has no type stubs, and torch's guards are its internals.
"""Calls of operators decided once: the tensors a call makes and what it launches, kept and done again for like tensors.

A host function checks shapes, chooses a tile, makes compile-time arguments and counts programs: 20-40 us of Python, and
always the same for the same shapes, strides, dtypes and flags. Its first such call is recorded: the tensors it makes,
and each launch with its arguments, of which a tensor's address is all that changes. A function of a few lines is
written from that; later calls run it: it makes these tensors, and hands addresses and numbers to the function of
Triton's launcher that calls the driver. A call that does anything else with its tensors, such as a copy, is never
replayed. C kernels are decided without being called: what is kept of them is made from a `c.call.Decided`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.runtime import _allocation

from ..generated import Source
from . import _launch

MOST = 1024
"""Keys of calls that are kept; with one more, all of them are forgotten."""

MOST_ALIKE = 16
"""Of these with one key, which differ in tensors."""

_guards: Any = cast(Any, torch._C)._dynamo.guards
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_INTERPRETED = _launch.INTERPRETED
_runtime: Any = knobs.runtime


_entries: dict[Any, tuple[Any, list[tuple[Callable[..., bool], Callable[..., Any], Any]]]] = {}
"""What picks the tensors that there are of a call's, `None` for all, and calls that were decided.

Of each, whether tensors are like its own, what does it for them (gives `_MISS` where it must be decided each time), and
what has to stay alive, since the key has its `id`.
"""

_MISS = object()
_OTHER = object()
"""Given by what was recorded with a single number, such as a seed, that was aligned where the one given is not."""
_STREAM = object()
"""Stands for the stream while a launch is recorded."""


_epoch: Any = object()
"""Another one after everything was forgotten."""


def _never(*tensors: Tensor) -> Any:
    return _MISS


def _never_like(*tensors: Tensor) -> bool:
    return False


def replayed(operator: Any, key: Any, tensors: tuple[Tensor | None, ...], args: tuple[Any, ...]) -> Any:
    """The result of an operator's call, as it was decided for like tensors.

    Args:
        operator: the `_operators.Operator`.
        key: all that a decision depends on but strides, dtypes and devices.
        tensors: those in `args`; the first one is not `None`.
        args: of the host function.
    """
    found = _entries.get(key)
    if found is not None:
        pick, entries = found
        given = tensors if pick is None else pick(tensors)
        for check, again, _ in entries:
            if check(*given):
                result = again(*given)
                if result is _MISS:
                    return operator.make(args)
                if result is not _OTHER:
                    return result
    return _decided(operator, key, tensors, args)


def bound(whole: Callable[..., Any], split: Callable[..., tuple[Any, tuple[Any, ...]]]) -> Callable[..., Any]:
    """A function of tensors that does what `whole` does, and looks nothing up for tensors like the last ones.

    Args:
        whole: calls an operator's function, perhaps with copies of what does not fit.
        split: gives the key and the tensors of that call.
    """
    latest: tuple[Any, Callable[..., bool], Callable[..., Any]] = (None, _never_like, _never)

    def run(*given: Tensor) -> Any:
        nonlocal latest
        if _dispatch_modes():
            return whole(*given)
        epoch, check, again = latest  # at once: threads share it
        if epoch is _epoch and check(*given):
            result = again(*given)
            if result is not _MISS and result is not _OTHER:
                return result
        epoch = _epoch
        result = whole(*given)
        found = _entries.get(split(*given)[0])
        alike = [entry for entry in found[1] if entry[1] is not _never and entry[0](*given)] if found else ()
        latest = (epoch, *alike[0][:2]) if alike else (epoch, _never_like, _never)
        return result

    return run


def _decided(operator: Any, key: Any, tensors: tuple[Tensor | None, ...], args: tuple[Any, ...]) -> Any:
    """Decide a call and do it; keep how, or that it cannot be done again."""
    given = [t for t in tensors if t is not None]
    if operator.in_c is not None and _launch.in_c(given[0]):
        check, run = operator.call(operator.in_c, args).entry(given, getattr(operator.result, "_make", tuple))
        _keep(key, tensors, check, run, operator.alive(args))
        return run(*given)
    # Two tensors at one address cannot be told apart, nor can what was decided of them; one without elements has none.
    # Seeds of several dropouts lie side by side: of two one is not aligned.
    addresses = () if _INTERPRETED or _function_modes() else {t.data_ptr() for t in given}
    if len(addresses) < len(given) or 0 in addresses or any(t.data_ptr() & 15 for t in given if t.numel() > 1):
        return operator.make(args)
    with _Recording() as recording:
        before = _launch.watch(recording)
        try:
            result = operator.make(args)
        finally:
            _launch.watch(before)
    check = _guards.TensorGuards(*given, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    _keep(key, tensors, check, recording.again(given, result) or _never, operator.alive(args))
    return result


def _keep(key: Any, tensors: tuple[Tensor | None, ...], check: Any, again: Any, alive: Any) -> None:
    if len(_entries) >= MOST:
        _entries.clear()
    there = [i for i, t in enumerate(tensors) if t is not None]
    # A slice, where the first is the only one: what takes one index gives no tuple.
    pick = itemgetter(*there if len(there) > 1 else [slice(1)]) if len(there) < len(tensors) else None
    _, alike = _entries.setdefault(key, (pick, []))
    if len(alike) >= MOST_ALIKE:
        alike.clear()
    alike.append((check, again, alive))


class _Recording(TorchDispatchMode):
    """What a host function does with tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.sound, self.scratch = True, False
        self.made: list[Tensor] = []
        self.launches: list[tuple[Any, int, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format:
            self.made.append(result)
        elif not func.is_view:
            self.sound = False
        return result

    def again(self, given: list[Tensor], result: Any) -> Callable[..., Any] | None:
        """What does the call again, if anything can: a launch that found no entry is Triton's own each time.

        Args:
            given: its tensors.
            result: a tensor, `None`, or a tuple or list of them.
        """
        return _written(self, given, result) if self.sound and all(launch[0] for launch in self.launches) else None


class _Unknown(Exception):
    """A result that was neither given nor made."""


class _Scratch(NamedTuple):
    """Bytes that Triton asks for, for the descriptors of one launch."""

    size: int


def _asked(size: int, alignment: int, stream: int | None) -> _Scratch:
    """Stands for Triton's allocator while a launch is recorded."""
    return _Scratch(size)


class _Writer:
    """Writes into `source` what makes tensors and hands them on."""

    def __init__(self, source: Source, given: list[Tensor], made: list[Tensor]) -> None:
        self._source = source
        self._names = itertools.count()
        self._addresses = {t.data_ptr(): f"at{i}" for i, t in enumerate(given)}
        self._given = given
        self._made = {t.data_ptr(): t for t in made if t.numel()}
        self._fresh: dict[int, str] = {}

    def constant(self, value: Any) -> str:
        """The name of an object."""
        return "None" if value is None else self._source.put(value)

    def make(self, shape: Sequence[int], dtype: torch.dtype) -> str:
        """Make a tensor; its name."""
        name = f"new{next(self._names)}"
        sizes = tuple(shape)
        strides = tuple(math.prod(max(1, n) for n in sizes[i + 1 :]) for i in range(len(sizes)))
        self._source.add(f"{name} = empty({', '.join(map(self.constant, (sizes, strides, dtype)))})")
        return name

    def results(self, leaves: Sequence[Any]) -> list[str]:
        """Names of what is returned, of which what was made has the shape it is returned in."""
        shapes: dict[int, Sequence[int]] = {}
        names: list[str] = []
        for leaf in leaves:
            same = next((i for i, t in enumerate(self._given) if leaf is t), None)
            if leaf is None or same is not None:
                names.append("None" if leaf is None else f"t{same}")
                continue
            at = leaf.data_ptr()
            whole = self._made.get(at)
            if whole is None or whole.numel() != leaf.numel() or not leaf.is_contiguous():
                raise _Unknown
            shapes[at] = leaf.shape
            names.append(str(at))
        for at, t in self._made.items():
            self._fresh[at] = self.make(shapes.get(at, t.shape), t.dtype)
            self._source.add(f"at_{self._fresh[at]} = {self._fresh[at]}.data_ptr()")
        return [self._fresh[int(name)] if name.isdigit() else name for name in names]

    def _address(self, tensor: Tensor) -> str:
        at = tensor.data_ptr()
        if at in self._addresses:
            return self._addresses[at]
        for begin, whole in self._made.items():
            if begin <= at < begin + whole.numel() * whole.element_size():
                name = f"at_{self._fresh[begin]}"
                return name if at == begin else f"{name} + {at - begin}"
        self._source.put(tensor)  # it was there before, such as a table of frequencies, and has to stay
        return self._source.put(at)

    def expression(self, value: Any) -> str | None:
        """What changes from call to call, in the names of the function; `None` for what does not."""
        if isinstance(value, Tensor):
            return self._address(value)
        if value is _STREAM:
            return "stream"
        if isinstance(value, _Scratch):
            return f"{self.make((value.size,), torch.int8)}.data_ptr()"
        if type(value) is tuple:
            return self.tuple(value)
        return None

    def tuple(self, values: tuple[Any, ...]) -> str | None:
        """A tuple of which something changes; what follows the last of that is one constant."""
        texts = [self.expression(value) for value in values]
        last = max((i for i, text in enumerate(texts) if text is not None), default=-1)
        if last < 0:
            return None
        head = [text or self.constant(value) for text, value in zip(texts, values[: last + 1], strict=False)]
        rest = values[last + 1 :]
        return f"({', '.join(head)},)" + (f" + {self.constant(rest)}" if rest else "")


def _written(recording: _Recording, given: list[Tensor], result: Any) -> Callable[..., Any] | None:
    """A function of the given tensors that makes what was made and launches what was launched."""
    empty = getattr(_guards, f"_empty_strided_{given[0].device.type}", None)
    if empty is None:
        return None
    source = Source("again", ", ".join(f"t{i}" for i in range(len(given))))
    source.constants |= {
        "C": torch._C, "device": given[0].get_device(), "empty": empty, "hooks": _runtime,
        "listening": _launch._ENTER, "leaving": _launch._LEAVE, "MISS": _MISS, "OTHER": _OTHER,
        "named": tuple.__new__, "allow_scratch": _launch.allow_scratch, "modes": _function_modes,
        "alive": [entry for entry, _, _ in recording.launches],
    }  # fmt: skip
    aligned = ["0"] + [f"at{i}" for i, t in enumerate(given) if t.numel() > 1]
    numbers = [f"{'' if t.data_ptr() & 15 else 'not '}at{i} & 15" for i, t in enumerate(given) if t.numel() == 1]
    source.add(
        "if modes():",
        "    return MISS",
        *(f"at{i} = t{i}.data_ptr()" for i in range(len(given))),
        f"if ({' | '.join(aligned)}) & 15 or C._cuda_getDevice() != device or listening.calls or leaving.calls:",
        "    return MISS",
        *([f"if not ({' and '.join(numbers)}):", "    return OTHER"] if numbers else []),
        "if hooks.launch_enter_hook is not listening or hooks.launch_exit_hook is not leaving:",
        "    return MISS",
        "stream = C._cuda_getCurrentRawStream(device)",
    )
    writer = _Writer(source, given, recording.made)
    several = isinstance(result, (tuple, list))
    try:
        names = writer.results(list(result) if several else [result])
        for entry, grid, args in recording.launches:
            launch, handed = _handed(entry, grid, args)
            if launch is entry[0].run and recording.scratch:
                source.add("allow_scratch()")
            tensors = writer.tuple(handed)
            source.add(f"{source.put(launch)}(*{tensors})")
    except _Unknown:
        return None
    text = f"({', '.join(names)},)" if several else names[0]
    if type(result) is list:
        text = f"[{', '.join(names)}]"
    elif several and type(result) is not tuple:  # a named tuple
        text = f"named({source.put(type(result))}, {text})"
    source.add(f"return {text}")
    return source.define()


def _handed(entry: tuple[Any, ...], grid: int, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The function that Triton's launcher calls and what it passes, found by a launcher whose function keeps that.

    Where there is none, the launcher and what it takes.
    """
    compiled, function, metadata, values = entry[:4]
    launcher = compiled.run
    taken = (grid, 1, 1, _STREAM, function, metadata, None, None, None, *args, *values)
    state = dict(getattr(launcher, "__dict__", {}))
    launch = state.get("launch")
    if launch is None or state.get("profile_scratch_size", 1) or state.get("gsan_enabled"):
        return launcher, taken
    handed: list[tuple[Any, ...]] = []
    state["launch"] = lambda *all_of_it: handed.append(all_of_it)
    token = _allocation._allocator.set(cast(Any, _asked))
    try:
        type(launcher).__call__(SimpleNamespace(**state), *taken)
    finally:
        _allocation._allocator.reset(token)
    return (launch, handed[0]) if len(handed) == 1 else (launcher, taken)


def forget() -> None:
    """Let go of everything that was recorded."""
    global _epoch
    _epoch = object()
    _entries.clear()
