"""Kernel launches counted on tensors without data, as a GPU would make them.

An ATen call counts where it is no view and no mere allocation, and so does a Triton kernel, none of which is run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode

from seqfuse import ops
from seqfuse.kernels import _device, attention, decode, norm, pointwise, quantize, rope
from seqfuse.kernels._operators import Operator
from seqfuse.ops import norm as norm_ops

FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "_unsafe_view"}
FREE |= {"squeeze_", "promote_types"}
# With bfloat16 parameters a GPU makes no conversions; a CPU keeps the norms' float32 statistics by them.
CONVERTS = {"_to_copy"}


class Launches(TorchDispatchMode):
    """Launches while it is on, each with whatever `who` is then."""

    active: ClassVar[list[Launches]] = []

    def __init__(self, free: set[str], who: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        self.who, self.free, self.paused, self.found = who, free, False, list[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        room, _, name = func._schema.name.partition("::")
        if room == "aten" and not self.paused and not func.is_view and name not in self.free:
            # Torch makes a norm's dx by one kernel and its sums over rows by another.
            self.found += [self.who()] * (2 if name == "native_layer_norm_backward" else 1)
        return func(*args, **(kwargs or {}))

    def launch(self, kernel: Any, grid: int, *rest: Any, **options: Any) -> None:
        self.found += [self.who()] * (grid > 0)

    def as_one(self, function: Any, launches: int) -> Any:
        """What a GPU makes by so many launches, where a CPU makes many calls of it."""

        function = getattr(function, "counted", function)  # not what another count put in its place

        def run(*args: Any, **kwargs: Any) -> Any:
            # A plan that was made under another count calls the function that it found then.
            counted = self.active[-1] if self.active else self
            counted.paused = True
            try:
                return function(*args, **kwargs)
            finally:
                counted.paused = False
                counted.found += [counted.who()] * launches

        run.counted = function  # pyright: ignore[reportFunctionMemberAccess]
        return run

    def __enter__(self) -> Any:
        self.active.append(self)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self.active.remove(self)
        super().__exit__(*error)


@contextlib.contextmanager
def counting(counted: Launches) -> Iterator[Launches]:
    """Counts the launches of Triton kernels as well, and RMSNorm as torch runs it on a GPU."""
    with contextlib.ExitStack() as stack:
        for module in (pointwise, norm, _device, rope, attention, decode, quantize):
            stack.enter_context(mock.patch.object(module, "launch", counted.launch))
            if hasattr(module, "stops"):
                stack.enter_context(mock.patch.object(module, "stops", return_value=False))
        # What has no memory would else call operators.
        stack.enter_context(mock.patch.object(Operator, "recorded", lambda operator, *args: operator.make(args)))
        # Of a norm as of `native_layer_norm`; angles of one position are made once for each device.
        for module, name, count in (
            (norm_ops, "_fused_rms_norm", 1), (ops.RMSNorm, "bwd", 2), (rope, "frequencies_of", 0),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(module, name, counted.as_one(getattr(module, name), count)))
        stack.enter_context(counted)
        yield counted
