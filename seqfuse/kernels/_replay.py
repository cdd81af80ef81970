# pyright: basic
# Triton has no type stubs, and torch's guards are its internals.
"""Host functions decided once: what a call allocates and launches, kept and done again for tensors that are alike.

A host function checks shapes, chooses a tile, makes compile-time arguments and counts programs: 20-40 us of Python, and
always the same for the same shapes, strides, dtypes and flags. Its first such call is recorded: the tensors it makes,
the workspaces it asks for, and each launch with its arguments, of which a tensor's address is all that changes. Later
calls make these tensors and launch. A call that does anything else with its tensors, such as a copy, is never replayed.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs

from . import _launch

MOST = 1024
"""Calls of one host function that are kept; with one more, all of them are forgotten."""

MOST_ALIKE = 16
"""Of these with one key, which differ in tensors."""

_guards: Any = cast(Any, torch._C)._dynamo.guards
_entries: dict[Any, list[_Entry]] = {}
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_INTERPRETED = _launch.INTERPRETED
_runtime: Any = knobs.runtime
_ENTER: Any = _runtime.launch_enter_hook
_LEAVE: Any = _runtime.launch_exit_hook
_STREAM = 3  # among the arguments of a compiled kernel's `run`


class _Launch(NamedTuple):
    """A launch, with what stands for tensors.

    Args:
        run: launches the compiled kernel.
        args: what it takes; the stream and tensors are left out.
        places: where tensors stand in them, and which.
        tuples: the same of arguments that are tuples of tensors.
    """

    run: Any
    args: list[Any]
    places: tuple[tuple[int, int], ...]
    tuples: tuple[tuple[int, tuple[int | None, ...]], ...]


class _Entry(NamedTuple):
    """A call that was recorded. Tensors are numbered: those given, then those made, then workspaces.

    Args:
        check: whether tensors are like those of the call.
        device: on which they are.
        empty: makes a tensor.
        fresh: shape, strides and dtype of what is made.
        workspaces: arguments of `workspace_of` but the stream.
        launches: in their order; none where the call cannot be done again.
        scratch: whether Triton allocates for its kernels.
        kind: makes the result of the tuple of tensors in it; `None` where that, or one tensor, is the result.
        pick: takes these from the list of all, whose last is `None`.
        alive: what the key has the `id` of.
    """

    check: Callable[..., bool]
    device: int
    empty: Any
    fresh: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    workspaces: tuple[tuple[str, int, torch.dtype, torch.device], ...]
    launches: tuple[_Launch, ...]
    scratch: bool
    kind: Callable[[Any], Any] | None
    pick: Any
    alive: Any


def replayed(make: Callable[..., Any], act: Any, others: tuple[Any, ...], *tensors: Tensor | None) -> Any:
    """The result of `make(act, *others, *tensors)`, or of what it did the first time for such arguments.

    Args:
        make: does it; a function of a module, of these arguments alone.
        act: an activation, or `None`.
        others: hashable arguments, which compare by what `make` decides by.
        tensors: all that are read or written; the first one is not `None`.
    """
    if _INTERPRETED or _dispatch_modes() or _function_modes():
        return make(act, *others, *tensors)
    given: list[Any] = []
    present, addresses, before = 1, 0, None
    for t in tensors:
        present <<= 2
        if t is None:
            continue
        if t is before:  # it may be read once for both
            present += 2
        else:
            before = t
            given.append(t)
            present += 1
            addresses |= t.data_ptr()
    if addresses & 15:
        return make(act, *others, *tensors)
    key: Any = (make, others, present, given[0].shape)
    if act is not None:  # the hash of a Triton function is that of its source
        key += (id(act.value), id(act.derivative), act.reads, act.P)
    found = _entries.get(key)
    listening = _ENTER.calls or _LEAVE.calls or _runtime.launch_enter_hook is not _ENTER
    if found is not None and not (listening or _runtime.launch_exit_hook is not _LEAVE):
        for entry in found:
            if entry[0](*given):
                if entry.launches and entry.device == torch._C._cuda_getDevice():
                    return _again(entry, given)
                return make(act, *others, *tensors)
    return _recorded(key, given, make, act, others, tensors)


def _again(entry: _Entry, tensors: list[Any]) -> Any:
    _, device, empty, fresh, workspaces, launches, scratch, kind, pick, _ = entry
    for shape, strides, dtype in fresh:
        tensors.append(empty(shape, strides, dtype))
    stream = torch._C._cuda_getCurrentRawStream(device)
    if workspaces:
        tensors += [_launch.workspace_of(*wanted, stream) for wanted in workspaces]
    if scratch:
        _launch.allow_scratch()
    for run, pattern, positions, tuples in launches:
        args = pattern.copy()
        args[_STREAM] = stream
        for at, number in positions:
            args[at] = tensors[number]
        for at, numbers in tuples:
            args[at] = tuple([None if number is None else tensors[number] for number in numbers])
        run(*args)
    tensors.append(None)
    return pick(tensors) if kind is None else kind(pick(tensors))


def _recorded(
    key: Any, given: list[Tensor], make: Callable[..., Any], act: Any, others: Any, tensors: tuple[Tensor | None, ...]
) -> Any:
    """Do it, and keep how, or that it cannot be done again."""
    # Two tensors at one address cannot be told apart, nor can what was decided of them; one without elements has none.
    addresses = {t.data_ptr() for t in given}
    if len(addresses) < len(given) or 0 in addresses:
        return make(act, *others, *tensors)
    with _Recording() as recording:
        before = _launch.watch(recording)
        try:
            result = make(act, *others, *tensors)
        finally:
            _launch.watch(before)
    if len(_entries) >= MOST:
        _entries.clear()
    alike = _entries.setdefault(key, [])
    if len(alike) >= MOST_ALIKE:
        alike.clear()
    alike.append(recording.entry(given, result, act))
    return result


class _Recording(TorchDispatchMode):
    """What a host function does with tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.sound, self.scratch = True, False
        self.made: list[Tensor] = []
        self.workspaces: list[tuple[tuple[str, int, torch.dtype, torch.device], Tensor]] = []
        self.launches: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format:
            self.made.append(result)
        elif not func.is_view:
            self.sound = False
        return result

    def entry(self, given: list[Tensor], result: Any, alive: Any) -> _Entry:
        """The call; without launches where it cannot be done again."""
        check = _guards.TensorGuards(*given, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        empty = getattr(_guards, f"_empty_strided_{given[0].device.type}", None)
        # A launch that found no entry is Triton's own each time.
        again = self.sound and empty is not None and all(launch[0] for launch in self.launches)
        found = self._steps(given, result) if again else None
        fresh, launches, kind, pick = found or ((), (), None, None)
        wanted = tuple(wanted for wanted, _ in self.workspaces)
        device = given[0].get_device()
        return _Entry(check, device, empty, fresh, wanted, launches, self.scratch, kind, pick, alive)

    def _steps(self, given: list[Tensor], result: Any) -> tuple[Any, tuple[_Launch, ...], Any, Any] | None:
        """What is made, what is launched, and what the result is built by; `None` if a tensor is from elsewhere."""
        numbers = {t.data_ptr(): number for number, t in enumerate(given)}
        of_workspaces = [t.data_ptr() for _, t in self.workspaces]
        made = {t.data_ptr(): t for t in self.made if t.numel() and t.data_ptr() not in of_workspaces}
        shapes = {at: t.shape for at, t in made.items()}
        leaves = list(result) if isinstance(result, (tuple, list)) else [result]
        for leaf in leaves:
            if leaf is None or any(leaf is t for t in given):
                continue
            whole = made.get(leaf.data_ptr())
            if whole is None or whole.numel() != leaf.numel() or not leaf.is_contiguous():
                return None
            shapes[leaf.data_ptr()] = leaf.shape
        for at in (*made, *of_workspaces):
            if at in numbers:
                return None  # a workspace that was asked for twice
            numbers[at] = len(numbers)
        try:
            launches = tuple(_kept(*launch, numbers=numbers) for launch in self.launches)
        except KeyError:
            return None
        places = tuple(-1 if leaf is None else numbers[leaf.data_ptr()] for leaf in leaves)
        fresh = tuple((tuple(shapes[at]), _contiguous(shapes[at]), t.dtype) for at, t in made.items())
        several = isinstance(result, (tuple, list))
        if several and len(places) == 1:
            pick: Any = functools.partial(_alone, places[0])
        else:
            pick = operator.itemgetter(*places)
        return fresh, launches, _kind_of(result), pick


def _alone(place: int, tensors: Sequence[Any]) -> tuple[Any]:
    return (tensors[place],)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(max(1, n) for n in shape[i + 1 :]) for i in range(len(shape)))


def _kept(entry: tuple[Any, ...], grid: int, args: tuple[Any, ...], *, numbers: dict[int, int]) -> _Launch:
    compiled, function, metadata, values = entry[:4]
    kept: list[Any] = []
    places: list[tuple[int, int]] = []
    tuples: list[tuple[int, tuple[int | None, ...]]] = []
    for at, arg in enumerate(args):
        if isinstance(arg, Tensor):
            places.append((at, numbers[arg.data_ptr()]))
            arg = None
        elif isinstance(arg, tuple) and any(isinstance(one, Tensor) for one in arg):
            tuples.append((at, tuple(None if one is None else numbers[one.data_ptr()] for one in arg)))
            arg = None
        kept.append(arg)
    head = [grid, 1, 1, None, function, metadata, None, None, None]
    return _Launch(
        compiled.run,
        [*head, *kept, *values],
        tuple((len(head) + at, number) for at, number in places),
        tuple((len(head) + at, several) for at, several in tuples),
    )


def _kind_of(result: Any) -> Callable[[Any], Any] | None:
    if not isinstance(result, (tuple, list)) or type(result) is tuple:
        return None
    return getattr(type(result), "_make", type(result))  # that of a named tuple


def forget() -> None:
    """Let go of everything that was recorded."""
    _entries.clear()
