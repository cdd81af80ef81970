"""Records the kernels that a GPU would launch, on tensors without memory, without a GPU."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from seqfuse import env, kernels, ops
from seqfuse.fake import faking
from seqfuse.kernels import rope
from seqfuse.kernels._operators import Operator
from seqfuse.ops import norm as norm_ops
from tools.launches import Launch

from . import case
from .case import Case

PROCESSORS = 132  # those of an H200
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "_unsafe_view"}
FREE |= {"squeeze_", "promote_types"}
# With bfloat16 parameters a GPU needs no conversions; a CPU uses them for the norms' float32 statistics.
CONVERTS = {"_to_copy"}


@contextlib.contextmanager
def as_on_an_h200(note: Callable[[Launch], None] | None = None) -> Iterator[list[Launch]]:
    """A block in which kernels treat fake CPU tensors as an H200's; yields the launches, or passes them to `note`."""
    found: list[Launch] = []

    def launch(
        kernel: Any, grid: int, args: Any, constexprs: Any, num_warps: int = 4, num_stages: int = 3, **options: Any
    ) -> None:
        if grid > 0:
            (note or found.append)(Launch(kernel, grid, args, dict(constexprs), num_warps, num_stages, options))

    known = {"launch": launch, "stops": lambda: False, "processors": lambda _: PROCESSORS}
    known["architecture"] = lambda _: "sm_90"
    modules = [importlib.import_module(f"{kernels.__name__}.{m.name}") for m in pkgutil.iter_modules(kernels.__path__)]
    with contextlib.ExitStack() as stack:
        for module in modules:
            for name in known.keys() & vars(module).keys():
                stack.enter_context(mock.patch.object(module, name, known[name]))
        # Otherwise tensors without memory would call custom ops.
        stack.enter_context(mock.patch.object(Operator, "recorded", lambda operator, *args: operator.make(args)))
        stack.enter_context(mock.patch.object(case, "generator", return_value=None))
        stack.enter_context(mock.patch.object(env, "_triton_runs", return_value=True))
        stack.enter_context(mock.patch.dict(env._COSTS, cpu=env._COSTS["sm_90"]))
        yield found


def of_row(case: Case) -> list[Launch]:
    """The launches of seqfuse for a row of one kernel; the row's sizes must be on a CPU."""
    with as_on_an_h200() as found, FakeTensorMode():
        case.contenders["seqfuse"].prepare(case.make(case.rows, 0))()
    return found


def of_block(model: Any, x: Tensor) -> list[Launch]:
    """Forward and backward launches of a model of operations; its weights are on a CPU, x has no memory."""
    with as_on_an_h200() as found:
        for pass_ in passes(model, x):
            pass_()
    return found


def passes(model: Any, x: Tensor) -> Iterator[Callable[[], Any]]:
    """The forward pass of a model of operations on a tensor like x without memory, then its backward pass."""
    fuser = model._fuser  # otherwise fake tensors, like all tensor subclasses, bypass the plan
    made: list[Tensor] = []
    with faking() as mode:
        leaf = mode.from_tensor(x).requires_grad_()
        yield lambda: made.append(fuser.run(fuser.op_list(), leaf, {}))
        (y,) = made
        yield lambda: torch.autograd.grad(y, [leaf, *model.parameters()], torch.empty_like(y))


class Launches(TorchDispatchMode):
    """Records launches while it is active, each with the value of `who()`.

    ATen calls count unless they are views or allocations, and so do Triton kernels, which are not run.
    """

    def __init__(self, free: set[str], who: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        self.who, self.free, self.paused, self.found = who, free, False, list[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        room, _, name = func._schema.name.partition("::")
        if room == "aten" and not self.paused and not func.is_view and name not in self.free:
            # Torch computes a norm's dx with one kernel and its sums over rows with another.
            self.found += [self.who()] * (2 if name == "native_layer_norm_backward" else 1)
        return func(*args, **(kwargs or {}))

    def as_one(self, function: Any, launches: int) -> Any:
        """A function that counts as a GPU's number of launches, since a CPU needs many calls."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.paused = True
            try:
                return function(*args, **kwargs)
            finally:
                self.paused = False
                self.found += [self.who()] * launches

        return run

    def counted(self, model: Any, x: Tensor) -> list[list[Any]]:
        """Launches of a model of operations, forward and backward, with Triton kernels, and RMSNorm as on a GPU."""
        found: list[list[Any]] = []
        with contextlib.ExitStack() as stack:
            stack.enter_context(as_on_an_h200(lambda _: self.found.append(self.who())))
            # A norm counts like `native_layer_norm`; angles are computed once per device.
            for owner, name, count in (
                (norm_ops, "_fused_rms_norm", 1), (ops.RMSNorm, "bwd", 2), (rope, "frequencies_of", 0),
            ):  # fmt: skip
                stack.enter_context(mock.patch.object(owner, name, self.as_one(getattr(owner, name), count)))
            for pass_ in passes(model, x):
                self.found = []
                with self:
                    pass_()
                found.append(self.found)
        return found
