"""What operations refuse because they would compute something else in silence: dtypes, and positions."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError, RangeError
from ._attention import broadcasts


def floating(x: Tensor, operation: str) -> None:
    """Raise InputError (SF101) unless x is of floating-point numbers: of others a part would be lost in silence."""
    if not x.is_floating_point():
        raise InputError(f"expects floating-point x, got {x.dtype}", code="SF101", operation=operation)


def real(x: Tensor, operation: str) -> None:
    """Raise InputError (SF101) if x is complex."""
    if x.is_complex():
        raise InputError(f"expects x of real numbers, got {x.dtype}", code="SF101", operation=operation)


def broadcasting(positions: Tensor, x: Tensor, operation: str) -> None:
    """Raise InputError (SF101) unless positions are real numbers, one for each row of x or broadcast to that."""
    if positions.dtype is torch.bool or positions.is_complex():
        raise InputError(
            f"expects positions that are numbers, got {positions.dtype}", code="SF101", operation=operation
        )
    if not broadcasts(positions.shape, x.shape[:-1]):
        message = f"expects positions that broadcast to {tuple(x.shape[:-1])}, got {tuple(positions.shape)}"
        raise InputError(message, code="SF101", operation=operation)


def token_ids(x: Tensor, operation: str) -> None:
    """Raise InputError (SF101) unless x is of the integers that torch's embeddings take."""
    if x.dtype not in (torch.int32, torch.int64):
        hint = "token ids are torch.int64; x.long() makes them so"
        raise InputError(f"expects integer token ids, got {x.dtype}", code="SF101", operation=operation, hint=hint)


def outside(x: Tensor, wrong: Tensor, rows: int, what: str, operation: str) -> RangeError:
    """The error (SF107) for indices of a table with so many rows; `wrong` is where they are outside of it."""
    message = f"expects {what} from 0 to {rows - 1}, got {int(x[wrong][0].item())}"
    return RangeError(message, code="SF107", operation=operation)


def rows_of_table(positions: Tensor, x: Tensor, rows: int, operation: str) -> Tensor:
    """Positions as indices of a table with so many rows.

    Raises:
        InputError: (SF101) for what are no integers that broadcast, (SF107) outside the table (on a GPU an error of the
            device).
    """
    if positions.is_floating_point():
        raise InputError(f"expects integer positions, got {positions.dtype}", code="SF101", operation=operation)
    broadcasting(positions, x, operation)
    positions = positions.long()  # uint8 would be a mask
    if type(positions) is Tensor and not torch.compiler.is_compiling() and not positions.is_meta:
        wrong = (positions < 0) | (positions >= rows)
        if positions.is_cuda:
            torch._assert_async(~wrong.any())  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        elif wrong.any():
            raise outside(positions, wrong, rows, "positions", operation)
    return positions
