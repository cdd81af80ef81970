"""What a GPU would launch, kernel by kernel, on tensors that have no memory: for looking at before there is a GPU."""

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

PROCESSORS = 132  # of an H200
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "_unsafe_view"}
FREE |= {"squeeze_", "promote_types"}
# With bfloat16 parameters a GPU makes no conversions; a CPU keeps the norms' float32 statistics by them.
CONVERTS = {"_to_copy"}


@contextlib.contextmanager
def as_on_an_h200(note: Callable[[Launch], None] | None = None) -> Iterator[list[Launch]]:
    """A block in which kernels take a CPU's fake tensors for those of an H200; gives, or notes, what is launched."""
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
        # What has no memory would else call operators.
        stack.enter_context(mock.patch.object(Operator, "recorded", lambda operator, *args: operator.make(args)))
        stack.enter_context(mock.patch.object(case, "generator", return_value=None))
        stack.enter_context(mock.patch.object(env, "_triton_runs", return_value=True))
        stack.enter_context(mock.patch.dict(env._COSTS, cpu=env._COSTS["sm_90"]))
        yield found


def of_row(case: Case) -> list[Launch]:
    """What ours launches, for a row of one kernel; its sizes must be a CPU's."""
    with as_on_an_h200() as found, FakeTensorMode():
        case.contenders["seqfuse"].prepare(case.make(case.rows, 0))()
    return found


def of_block(model: Any, x: Tensor) -> list[Launch]:
    """What a model of operations launches forward and backward; the weights are a CPU's, x has no memory."""
    with as_on_an_h200() as found:
        for pass_ in passes(model, x):
            pass_()
    return found


def passes(model: Any, x: Tensor) -> Iterator[Callable[[], Any]]:
    """The forward pass of a model of operations on a tensor like x without memory, then its backward pass."""
    fuser = model._fuser  # which fake tensors pass by otherwise, as all that is not plain does
    made: list[Tensor] = []
    with faking() as mode:
        leaf = mode.from_tensor(x).requires_grad_()
        yield lambda: made.append(fuser.run(fuser.op_list(), leaf, {}))
        (y,) = made
        yield lambda: torch.autograd.grad(y, [leaf, *model.parameters()], torch.empty_like(y))


class Launches(TorchDispatchMode):
    """Launches while it is on, each with whatever `who` is then.

    An ATen call counts where it is no view and no mere allocation, and so does a Triton kernel, none of which is run.
    """

    def __init__(self, free: set[str], who: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        self.who, self.free, self.paused, self.found = who, free, False, list[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        room, _, name = func._schema.name.partition("::")
        if room == "aten" and not self.paused and not func.is_view and name not in self.free:
            # Torch makes a norm's dx by one kernel and its sums over rows by another.
            self.found += [self.who()] * (2 if name == "native_layer_norm_backward" else 1)
        return func(*args, **(kwargs or {}))

    def as_one(self, function: Any, launches: int) -> Any:
        """What a GPU makes by so many launches, where a CPU makes many calls of it."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.paused = True
            try:
                return function(*args, **kwargs)
            finally:
                self.paused = False
                self.found += [self.who()] * launches

        return run

    def counted(self, model: Any, x: Tensor) -> list[list[Any]]:
        """Of a model of operations forward and backward, with Triton kernels, and RMSNorm as torch runs it on a GPU."""
        found: list[list[Any]] = []
        with contextlib.ExitStack() as stack:
            stack.enter_context(as_on_an_h200(lambda _: self.found.append(self.who())))
            # Of a norm as of `native_layer_norm`; angles of one position are made once for each device.
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
