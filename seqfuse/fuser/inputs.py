"""Input checks: shapes, devices, dtypes, and the place of an error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, PluginError, SeqfuseError
from .fake import faking, is_fake
from .items import Item
from .listing import Listing, Region
from .reference import walk_reference


def expect_tensor(item: Item, x: Any) -> None:
    """Check that what enters the first operation is a tensor."""
    if not isinstance(x, Tensor):
        message = f"expects a tensor, got {type(x).__name__}"
        raise InputError(message, code="SF105", operation=item.name, position=0)


def validate(listing: Listing, region: Region, shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Check that a region takes an input of this shape; the shapes that enter each position, and the one it gives."""
    shapes = [tuple(shape)]
    for position in range(region.start, region.stop):
        operation: Any = listing.items[position].operation
        try:
            shape = operation.infer(shapes[-1])
        except SeqfuseError:
            raise
        except Exception as error:
            item = listing.items[position]
            where: dict[str, Any] = {"operation": item.name, "position": position}
            if not isinstance(error, ValueError):
                message = f"infer failed for shape {shapes[-1]}: {type(error).__name__}: {error}"
                raise PluginError(message, code="SF305", **where) from error
            hint = f"in {item.path!r}" if item.path else None
            raise InputError(str(error), code="SF101", hint=hint, **where) from None
        if not isinstance(shape, tuple):
            message = f"infer must return a shape, a tuple, not {shape!r}"
            raise PluginError(message, code="SF305", operation=listing.items[position].name, position=position)
        shapes.append(shape)
    return shapes


def validate_all(listing: Listing, shape: Sequence[int]) -> None:
    """Check shapes up to the first barrier, behind which they are not known."""
    for part in listing.parts:
        if not isinstance(part, Region):
            break
        shape = validate(listing, part, shape)[-1]


def check_devices(items: Sequence[Item], item: Item, x: Tensor) -> None:
    """Check that an operation's parameters are where the input is."""
    for name, (owner, attribute) in item.slots.items():
        parameter: Tensor = getattr(owner, attribute)
        if parameter.device != x.device:
            message = f"expects its input on {parameter.device}, where its {name} is, got {x.device}"
            raise InputError(message, code="SF102", operation=item.name, position=items.index(item))


def check_channel_devices(listing: Listing, region: Region, x: Tensor, channels: Mapping[str, Tensor]) -> None:
    """Check that the channels a region reads are where its input is."""
    for position in range(region.start, region.stop):
        for name, channel in listing.items[position].inputs:
            given = channels.get(channel)
            if given is not None and given.device != x.device:
                message = f"expects its {name} on {x.device}, where its input is, got {given.device}"
                raise InputError(message, code="SF102", operation=listing.items[position].name, position=position)


def clearer(items: Sequence[Item], positions: range, error: BaseException, tensor: Any) -> BaseException:
    """The error of a failed step, or one that says better what was wrong with its input, with its place."""
    item = items[positions.start]
    if isinstance(error, SeqfuseError):
        if error.operation is None or error.position is None:
            error.operation, error.position = item.name, positions.start
        return error
    if isinstance(error, RuntimeError) and isinstance(tensor, Tensor):
        try:
            for position in positions:
                check_devices(items, items[position], tensor)
        except InputError as clear:
            return clear
    return error


def dtypes_of(
    items: Sequence[Item], random: Mapping[int, int], positions: range, x: Tensor, channels: Mapping[str, Tensor]
) -> list[torch.dtype | None]:
    """Dtype of the tensor entering each position, from a run of the references on fake tensors; `None` from where
    they cannot run so.
    """
    found: list[torch.dtype | None] = [x.dtype] * positions.start
    fake = is_fake(x)
    # Where only shapes are wanted, who counts what runs must not count this as well.
    own = getattr(x, "fake_mode", None)
    try:
        with faking(own) if own is not None or not fake else contextlib.nullcontext() as mode, torch.no_grad():
            convert: Callable[[Tensor], Tensor] = (lambda t: t) if fake or mode is None else mode.from_tensor
            y, given = convert(x), {name: convert(value) for name, value in channels.items()}
            seeds = torch.zeros(len(random), dtype=torch.int64, device=x.device)
            for position in positions:
                found.append(y.dtype)
                y = walk_reference(items, range(position, position + 1), random, y, given, seeds)
    except Exception:
        found += [None] * (positions.stop - len(found))
    return found
