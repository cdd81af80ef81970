"""What is asked of a loss, and whether what is given fits it."""

from __future__ import annotations

import math
import typing
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..env import autocast_of
from ..errors import InputError, RangeError
from ..group import Group
from ..signature import check_arguments

Reduction = Literal["mean", "sum", "none"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class How(NamedTuple):
    """What is asked for, by whom."""

    operation: str
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    reduction: Reduction
    chunk: int | None
    group: Group

    def checked(self) -> How:
        """These, if they can be asked for."""
        changed = check_arguments(self.operation, _HINTS, self._asdict())
        if changed:
            return self._replace(**changed).checked()
        if not 0 <= self.label_smoothing <= 1:
            self.refuse(f"label_smoothing must be within 0 and 1, got {self.label_smoothing}", "SF106")
        if not 0 <= self.z_loss < math.inf:
            self.refuse(f"z_loss must be finite and not negative, got {self.z_loss}", "SF106")
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            self.refuse(f"softcap must be finite and positive, got {self.softcap}", "SF106")
        if self.chunk is not None and self.chunk < 1:
            self.refuse(f"chunk must be at least one row, got {self.chunk}", "SF106")
        return self

    def refuse(self, message: str, code: str) -> None:
        """Raise the error of the one who asked."""
        raise InputError(message, code=code, operation=self.operation)


_HINTS = typing.get_type_hints(How)


def check(how: How, x: Any, weight: Any, targets: Any, bias: Any) -> torch.dtype:
    """Check what was given; the dtype of the GEMMs."""
    named: dict[str, Any] = {"x": x, "weight": weight, "targets": targets}
    named |= {} if bias is None else {"bias": bias}
    for name, t in named.items():
        if not isinstance(t, Tensor):
            how.refuse(f"{name} must be a tensor, not {type(t).__name__}", "SF105")
    if weight.ndim != 2 or not weight.shape[0]:
        how.refuse(f"weight must be [V, E] of at least one class, got {tuple(weight.shape)}", "SF101")
    classes, features = weight.shape
    if not x.ndim or x.shape[-1] != features:
        got = x.shape[-1] if x.ndim else "a 0-d tensor"
        how.refuse(f"expects last dimension {features}, got {got}", "SF101")
    if targets.shape != x.shape[:-1]:
        how.refuse(f"targets must have shape {tuple(x.shape[:-1])}, got {tuple(targets.shape)}", "SF101")
    if bias is not None and tuple(bias.shape) != (classes,):
        how.refuse(f"bias must have shape ({classes},), got {tuple(bias.shape)}", "SF101")
    if targets.dtype not in _INTEGERS:
        how.refuse(f"targets must be integers, one class per row, got {targets.dtype}", "SF101")
    for name, t in named.items():
        if t.device != x.device:
            how.refuse(f"expects its {name} on {x.device}, where x is, got {t.device}", "SF102")
    cast = autocast_of(x.device.type)
    dtypes = {n: cast if cast and t.dtype is not torch.float64 else t.dtype for n, t in named.items() if n != "targets"}
    if x.dtype not in _FLOATS or len(set(dtypes.values())) > 1:
        listed = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        how.refuse(f"expects one dtype of float16, bfloat16, float32 and float64, got {listed}", "SF101")
    return dtypes["x"]


def check_targets(how: How, targets: Tensor, classes: int) -> None:
    """Check that every target is a class, or `ignore_index`."""
    wrong = (targets != how.ignore_index) & ((targets < 0) | (targets >= classes))
    if targets.is_cuda:  # without waiting for it
        torch._assert_async(~wrong.any())  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    elif wrong.any():
        first = int(targets[wrong][0].item())
        message = f"target {first} is out of bounds for {classes} classes"
        raise RangeError(message, code="SF107", operation=how.operation)
