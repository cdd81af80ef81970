"""Checks of the arguments of `check_op` and `check_fusion`: each error names what was expected."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn

from ..env import Env
from ..errors import InputError
from ..fusion import FusedOperation
from ..operation import UnfusedOperation

__tracebackhide__ = True  # pytest shows the test and the message


def check_kit_arguments(kit: str, x: object, ops: Iterable[object], dtypes: object) -> None:
    """Raise if x is not a floating-point tensor, an operation is not a module, or `dtypes` are not floating dtypes.

    Raises:
        TypeError: for x and operations.
        InputError: (SF106) for dtypes.
    """
    for op in ops:
        if not isinstance(op, nn.Module):
            hint = f"; give an instance, {op.__name__}(...)" if _derives(op, nn.Module) else ""
            hint = "; check_fusion takes a fusion" if _derives(op, FusedOperation) and kit == "check_op" else hint
            raise TypeError(f"{kit} takes operations, instances of sf.UnfusedOperation, not {_named(op)}{hint}")
    if not isinstance(x, Tensor):
        raise TypeError(f"{kit} takes x as a torch.Tensor, not {_named(x)}")
    if not x.is_floating_point():
        dtype = str(x.dtype).removeprefix("torch.")
        raise TypeError(f"{kit} takes an x of floating-point numbers, whose gradient it compares, not of {dtype}")
    given = cast(Sequence[Any], dtypes) if isinstance(dtypes, Sequence) else ()
    if not given or not all(isinstance(dtype, torch.dtype) and dtype.is_floating_point for dtype in given):
        message = f"{kit} takes dtypes as a sequence of floating ones, such as (torch.float16,), not {dtypes!r}"
        raise InputError(message, code="SF106")


def check_fusion_arguments(fusion: object, env: object) -> None:
    """Raise TypeError if `fusion` is not a fusion class, or `env` is neither None nor an `Env`."""
    if not _derives(fusion, FusedOperation):
        hint = ""
        if isinstance(fusion, FusedOperation):
            hint = f"; give the class, {type(fusion).__name__}"
        elif isinstance(fusion, UnfusedOperation) or _derives(fusion, UnfusedOperation):
            hint = "; check_op takes an operation"
        message = f"check_fusion takes a fusion, a class derived from sf.FusedOperation, not {_named(fusion)}{hint}"
        raise TypeError(message)
    if env is not None and not isinstance(env, Env):
        raise TypeError(f'check_fusion takes env as an sf.Env, such as sf.Env.of("cuda:sm_90"), not {env!r}')


def _derives(given: object, base: type) -> TypeGuard[type[Any]]:
    return isinstance(given, type) and issubclass(given, base)


def _named(given: object) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else f"an instance of {type(given).__name__}"
