"""Device functions of our activations, read when a kernel asks for them: importing an operation imports no Triton."""

from __future__ import annotations

import functools
from typing import Any, Literal


class DeviceFunction:
    """A class attribute that stands for `value` or `derivative` of one of `kernels.activations.ACTIVATIONS`.

    Args:
        part: which of the two.
        name: of the activation; `None` where the operation's own `device_name` says it.
    """

    def __init__(self, part: Literal["value", "derivative"], name: str | None = None) -> None:
        self.part, self.name = part, name

    def __get__(self, operation: Any, kind: type) -> Any:
        if operation is None:
            return self
        return getattr(_activations()[self.name or operation.device_name], self.part)


@functools.cache
def _activations() -> dict[str, Any]:
    from ..kernels.activations import ACTIVATIONS

    return ACTIVATIONS


def device_functions(name: str | None = None) -> tuple[Any, Any]:
    """Both attributes of an activation: `value, derivative = device_functions("relu")`."""
    return DeviceFunction("value", name), DeviceFunction("derivative", name)
