"""Input checks: shapes, devices, dtypes, and the place of an error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InputError, PluginError, SeqfuseError
from .fake import faking, is_fake
from .flatten import Node
from .reference import walk_reference


class Like(NamedTuple):
    """What a gradient must look like: its parameter, without holding on to it."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, t: Tensor) -> Like:
        """What is like this tensor."""
        return cls(t.shape, t.dtype, t.device)

    def empty(self) -> Tensor:
        """A tensor that looks so."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def expect_tensor(node: Node, x: Any) -> None:
    """Check that what enters the first operation is a tensor."""
    if not isinstance(x, Tensor):
        message = f"expects a tensor, got {type(x).__name__}"
        raise InputError(message, code="SF105", operation=node.name, position=0)


def validate(nodes: Sequence[Node], positions: range, shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Check that operations take an input of this shape; the shapes that enter each position, and the one it gives."""
    shapes = [tuple(shape)]
    for position in positions:
        operation: Any = nodes[position].operation
        try:
            shape = operation.infer(shapes[-1])
        except SeqfuseError:
            raise
        except Exception as error:
            node = nodes[position]
            where: dict[str, Any] = {"operation": node.name, "position": position}
            if not isinstance(error, ValueError):
                message = f"infer failed for shape {shapes[-1]}: {type(error).__name__}: {error}"
                raise PluginError(message, code="SF305", **where) from error
            hint = f"in {node.path!r}" if node.path else None
            raise InputError(str(error), code="SF101", hint=hint, **where) from None
        if not isinstance(shape, tuple):
            message = f"infer must return a shape, a tuple, not {shape!r}"
            raise PluginError(message, code="SF305", operation=nodes[position].name, position=position)
        shapes.append(shape)
    return shapes


def check_devices(nodes: Sequence[Node], positions: range, x: Tensor, channels: Mapping[str, Tensor]) -> None:
    """Check that parameters of operations, and the channels that they read, are where their input is."""
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
            raise InputError(message, code="SF102", operation=node.name, position=position)


def check_dtypes(nodes: Sequence[Node], positions: range, entering: Sequence[torch.dtype | None]) -> None:
    """Check that what enters an operation has the dtype of its parameters, where torch computes with one alone."""
    for position, given in zip(positions, entering, strict=False):
        node = nodes[position]
        for name, (owner, attribute) in node.slots.items() if getattr(node.operation, "same_dtype", False) else ():
            parameter: Tensor = getattr(owner, attribute)
            expected = parameter.dtype
            if given is not None and given is not expected and not parameter.is_meta:  # there torch takes any
                message = f"expects its input in {expected}, the dtype of its {name}, got {given}"
                hint = "convert one of them with .to(dtype), or run under torch.autocast"
                raise InputError(message, code="SF102", operation=node.name, position=position, hint=hint)


def clearer(nodes: Sequence[Node], positions: range, error: BaseException, tensor: Any) -> BaseException:
    """The error of a failed step, or one that says better what was wrong with its input, with its place."""
    node = nodes[positions.start]
    if isinstance(error, SeqfuseError):
        if error.operation is None or error.position is None:
            error.operation, error.position = node.name, positions.start
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
    """Dtype of the tensor entering each position, and of the last result, from a run of the references on fake tensors;
    `None` from where they cannot run so.
    """
    found: list[torch.dtype | None] = [x.dtype] * positions.start
    fake = is_fake(x)
    # Where only shapes are wanted, who counts what runs must not count this as well.
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
        found += [None] * (positions.stop + 1 - len(found))
    return found
