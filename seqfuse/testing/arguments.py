"""What `check_op` and `check_fusion` are given by mistake: one sentence that says what was expected."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..fusion import FusedOperation

__tracebackhide__ = True  # pytest shows the test and the message


def check_kit_arguments(kit: str, x: Any, ops: Iterable[Any], dtypes: Any, fusion: Any = FusedOperation) -> None:
    """Refuse operations that are not instances, a fusion that is not a class, and an x or dtypes not of real numbers.

    Raises:
        TypeError: for the fusion, operations and x.
        InputError: (SF106) for dtypes.
    """
    if not (isinstance(fusion, type) and issubclass(fusion, FusedOperation)):
        raise TypeError(f"{kit} takes a fusion, a class derived from sf.FusedOperation, not {fusion!r}")
    for op in ops:
        if not isinstance(op, nn.Module):
            raise TypeError(f"{kit} takes operations, instances of sf.UnfusedOperation, not {op!r}")
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else repr(x)
        message = f"{kit} takes x as a torch.Tensor of floating-point numbers, whose gradient it compares, not {got}"
        raise TypeError(message)
    given = cast("Sequence[Any]", dtypes) if isinstance(dtypes, Sequence) else ()
    if not given or not all(isinstance(dtype, torch.dtype) and dtype.is_floating_point for dtype in given):
        message = f"{kit} takes dtypes as a sequence of floating ones, such as (torch.float16,), not {dtypes!r}"
        raise InputError(message, code="SF106")
