"""Inputs of operations: checks of shapes, devices and dtypes, errors with their place, and the dtype at each border."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.overrides import is_tensor_like  # pyright: ignore[reportUnknownVariableType]

from ..casts import dtype_of
from ..env import Env, autocast_of
from ..errors import InputError, PluginError, SeqfuseError
from ..fake import faking, is_fake
from .described import describe, tells_all
from .flatten import Node, located
from .reference import walk_reference

_LIKE_FLOAT32 = (torch.float16, torch.bfloat16, torch.float32)


class Like(NamedTuple):
    """Shape, dtype and device of a gradient: those of its parameter or output, without a reference to that tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, t: Tensor) -> Like:
        return cls(t.shape, t.dtype, t.device)

    def zeros(self) -> Tensor:
        """Zeros of this description: the gradient of an unused output."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


def expect_tensor(node: Node, x: Any) -> None:
    """Check that the input of the first operation is a tensor."""
    if not is_tensor_like(x):
        message = f"expects a tensor, got {type(x).__name__}"
        raise InputError(message, code="SF105", operation=node.name, position=0, path=node.path)


def validate(
    nodes: Sequence[Node], positions: range, shape: Sequence[int], channels: Mapping[str, Tensor] | None = None
) -> list[tuple[int, ...]]:
    """Check that operations accept an input of this shape. Returns the input shape of each position and the output
    shape. Channels from earlier positions have the shapes of their tensors.
    """
    _check_whole(nodes, positions, shape)
    shapes = [tuple(shape)]
    before = [channel for node in nodes[: positions.start] for _, channel in node.outputs]
    forked = {channel: tuple(channels[channel].shape) for channel in before if channels and channel in channels}
    for position in positions:
        operation: Any = nodes[position].operation
        if operation.channels_like_x:
            _check_forked(nodes, position, shapes[-1], forked)
        try:
            shape = operation.infer(shapes[-1])
        except SeqfuseError:
            raise
        except Exception as error:
            where = located(nodes, position)
            if not isinstance(error, ValueError):
                message = f"infer failed for shape {shapes[-1]}: {type(error).__name__}: {error}"
                raise PluginError(message, code="SF305", **where) from error
            raise InputError(str(error), code="SF101", **where) from None
        if not isinstance(shape, tuple):
            message = f"infer must return a shape, a tuple, not {shape!r}"
            raise PluginError(message, code="SF305", **located(nodes, position))
        shapes.append(shape)
    return shapes


def _check_forked(
    nodes: Sequence[Node], position: int, shape: tuple[int, ...], forked: dict[str, tuple[int, ...]]
) -> None:
    """Check that channels from earlier forks have the shape of an operation's input, and record its own forks."""
    node, where = nodes[position], located(nodes, position)
    for name, channel in node.inputs:
        other = forked.get(channel, shape)
        if other != shape and node.owner is not None:
            where |= {"operation": node.owner, "path": node.path.rpartition(".")[0]}
            message = f"adds {shape}, which its operations return, to its input, {other}: both must have one shape"
            hint = "move operations that change the shape out of it"
            raise InputError(message, code="SF101", hint=hint, **where)
        if other != shape:
            message = f"expects its {name} in the shape of its input, {shape}, and its Fork sends {other}"
            raise InputError(message, code="SF101", **where)
    forked.update((channel, shape) for _, channel in node.outputs)


def _check_whole(nodes: Sequence[Node], positions: range, shape: Sequence[int]) -> None:
    """Check that an operation that splits features into parts does not read features sharded by DTensor."""
    if not positions.start or not shape:
        return
    before: Any = nodes[positions.start - 1].operation
    features = getattr(before, "out_features", shape[-1])
    if features == shape[-1] or not any(hasattr(p, "placements") for p in before.parameters()):
        return
    for position in positions:
        operation: Any = nodes[position].operation
        if operation.packs:
            message = f"of {features} features that it reads as parts side by side, each process has a stretch"
            hint = "seqfuse.parallel.parallelize divides each part"
            raise InputError(message, code="SF101", hint=hint, **located(nodes, position))
        if operation.costly:  # a GEMM
            return


def check_devices(nodes: Sequence[Node], positions: range, x: Tensor, channels: Mapping[str, Tensor]) -> None:
    """Check that the parameters and channels of operations are on the device of the input."""
    for position in positions:
        node, message = nodes[position], ""
        for name, (owner, attribute) in node.slots.items():
            parameter: Tensor = getattr(owner, attribute)
            if parameter.device != x.device:
                message = message or f"expects its input on {parameter.device}, where its {name} is, got {x.device}"
        for name, channel in node.inputs:
            given = channels.get(channel)
            if given is not None and given.device != x.device:
                message = message or f"expects its {name} on {x.device}, where its input is, got {given.device}"
        if message:
            raise InputError(message, code="SF102", **located(nodes, position))


def check_dtypes(nodes: Sequence[Node], positions: range, entering: Sequence[torch.dtype | None]) -> None:
    """Check that an operation's input has the dtype of its parameters, where torch requires equal dtypes."""
    for position, given in zip(positions, entering, strict=False):
        node = nodes[position]
        for name, (owner, attribute) in node.slots.items() if getattr(node.operation, "same_dtype", False) else ():
            parameter: Tensor = getattr(owner, attribute)
            expected = parameter.dtype
            if given is not None and given is not expected and not parameter.is_meta:  # on meta torch accepts any
                message = f"expects its input in {expected}, the dtype of its {name}, got {given}"
                hint = "convert one of them with .to(dtype), or run under torch.autocast"
                raise InputError(message, code="SF102", hint=hint, **located(nodes, position))


def clearer(nodes: Sequence[Node], positions: range, error: BaseException, tensor: Any) -> BaseException:
    """The error of a failed step with its place, or a clearer error about its input."""
    node = nodes[positions.start]
    if isinstance(error, SeqfuseError):
        if error.operation is None or error.position is None:
            error.operation, error.position, error.path = node.name, positions.start, node.path
        return error
    if isinstance(error, RuntimeError) and isinstance(tensor, Tensor):
        try:
            check_devices(nodes, positions, tensor, {})
        except InputError as clear:
            return clear
    return error


def dtypes_of(
    nodes: Sequence[Node], positions: range, x: Tensor, channels: Mapping[str, Tensor]
) -> list[torch.dtype | None]:
    """The dtypes of the input of each position and of the last result, from running the references on fake tensors;
    `None` from the first position that cannot run on them.
    """
    key = _known_by(nodes, positions, x, channels)
    known = _known_dtypes.get(key)
    if known is not None:
        return known
    found: list[torch.dtype | None] = []
    fake = is_fake(x)
    # Dispatch modes that count operators must not count this run, which finds out dtypes only.
    own = getattr(x, "fake_mode", None)
    try:
        with faking(own) if own is not None or not fake else contextlib.nullcontext() as mode, torch.no_grad():
            convert: Callable[[Tensor], Tensor] = (lambda t: t) if fake or mode is None else mode.from_tensor
            y, given = convert(x), {name: convert(value) for name, value in channels.items()}
            seeds = torch.zeros(len(nodes), dtype=torch.int64, device=x.device)
            for position in positions:
                found.append(y.dtype)
                y = walk_reference(nodes, range(position, position + 1), y, given, seeds)
            found.append(y.dtype)
    except Exception:
        found += [None] * (len(positions) + 1 - len(found))
    if key is not None:
        if len(_known_dtypes) >= _MOST:
            _known_dtypes.clear()
        _known_dtypes[key] = found
    return found


_MOST = 1024
_known_dtypes: dict[Any, list[torch.dtype | None]] = {}  # a cache, since layers of a model are alike


def _known_by(nodes: Sequence[Node], positions: range, x: Tensor, channels: Mapping[str, Tensor]) -> Any:
    """The cache key of the dtypes along a region; `None` if descriptions of operations and tensors do not determine
    them.
    """
    inside = [nodes[position] for position in positions]
    own = [owner._parameters.get(name) for node in inside for owner, name in node.slots.values()]  # pyright: ignore[reportPrivateUsage]
    given = (x, *channels.values())
    if not all(type(t) in (Tensor, nn.Parameter) for t in (*own, *given)):
        return None
    if not all(tells_all(node.operation) for node in inside):
        return None
    told = [(describe(node), node.inputs, node.outputs) for node in inside]
    likes = [(*Like.of(t), t.layout) for t in given]
    return (*told,), (*likes,), (*channels,), autocast_of(x.device.type), torch.get_default_dtype(), is_compiling()


class Border(NamedTuple):
    """The dtype that arrives at a position and the dtype that its operation expects; where they differ, x is cast.

    `None` if it is unknown before a call.
    """

    given: torch.dtype | None
    taken: torch.dtype | None

    @property
    def cast(self) -> torch.dtype | None:
        """The target dtype of the cast at this border, if there is one."""
        return self.taken if self.taken is not self.given else None


def recast(t: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Casts a tensor to a dtype, unless that is `None`."""
    return t if dtype is None or t.dtype is dtype else t.to(dtype)


def along_of(borders: Sequence[Border], absorbs: bool) -> tuple[torch.dtype | None, ...]:
    """The input dtypes of operations and the dtype of their result, after the cast if a fusion `absorbs` it."""
    taken = tuple([border.taken for border in borders])
    return taken if absorbs or not borders else (*taken[:-1], borders[-1].given)


def borders_of(
    nodes: Sequence[Node],
    positions: range,
    x: Tensor | None,
    channels: Mapping[str, Tensor],
    parameters: Sequence[Tensor],
    env: Env,
) -> tuple[Border, ...]:
    """The borders of a region for its inputs, if they are known; none where all have one dtype."""
    run = None if x is None else functools.cache(lambda: dtypes_of(nodes, positions, x, channels))
    if env.autocast is not None:
        return under_autocast(nodes, positions, env, {c: t.dtype for c, t in channels.items()}, run)
    if run is None or all(t.dtype is env.dtype for t in (*parameters, *channels.values())):
        return ()
    return tuple([Border(dtype, dtype) for dtype in run()])


def under_autocast(
    nodes: Sequence[Node],
    positions: range,
    env: Env,
    channels: Mapping[str, torch.dtype],
    run: Callable[[], Sequence[torch.dtype | None]] | None = None,
) -> tuple[Border, ...]:
    """The borders of a region under autocast, one before each position and one behind the last.

    They follow from `UnfusedOperation.autocast` of each operation. For an operation that declares none, the dtype comes
    from a `run` of the references, if there are tensors to run them on.
    """
    known: dict[str, torch.dtype | None] = dict(channels)
    given: torch.dtype | None = env.dtype
    found: list[Border] = []
    for i, position in enumerate(positions):
        node = nodes[position]
        operation: Any = node.operation
        taken = env.cast(given) if operation.autocast == "lower" and given is not None else given
        found.append(Border(given, taken))
        given = _given(node, taken, [known.get(c) for _, c in node.inputs], env)
        if given is None and run is not None:
            given = run()[i + 1]
        # An operation that declares nothing may return any dtype.
        made = taken if operation.autocast == "exchange" else given if operation.autocast else None
        known.update((c, made) for _, c in node.outputs)
    return (*found, Border(given, given))


def _given(node: Node, x: torch.dtype | None, inputs: Sequence[torch.dtype | None], env: Env) -> torch.dtype | None:
    operation: Any = node.operation
    if operation.y_dtype is not None:
        return operation.y_dtype
    if x is None or operation.autocast is None:
        return None
    if operation.autocast == "float32" and env.device != "cpu" and x in _LIKE_FLOAT32:
        return torch.float32  # torch's list for the CPU has none of them
    if operation.autocast == "exchange":
        return inputs[0]
    if operation.autocast != "promote":
        return x
    dtypes = [dtype_of(owner, name) for owner, name in node.slots.values()]
    dtypes += [dtype for dtype in inputs if dtype is not None]
    return None if None in inputs else functools.reduce(torch.promote_types, dtypes, x)
