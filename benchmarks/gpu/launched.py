"""What a row launches, kernel by kernel, on tensors that have no memory: for looking at before there is a GPU."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from seqfuse import env, kernels
from seqfuse.fake import faking
from seqfuse.kernels._operators import Operator
from tools.launches import Launch

from . import draw
from .case import Case

PROCESSORS = 132  # of an H200


@contextlib.contextmanager
def as_on_an_h200() -> Iterator[list[Launch]]:
    """A block in which kernels take a CPU's fake tensors for those of an H200; gives what is launched in it."""
    found: list[Launch] = []

    def launch(
        kernel: Any,
        grid: int,
        args: tuple[Any, ...],
        constexprs: Any,
        num_warps: int = 4,
        num_stages: int = 3,
        **options: Any,
    ) -> None:
        if grid > 0:
            found.append(Launch(kernel, grid, args, dict(constexprs), num_warps, num_stages, options))

    known = {
        "launch": launch,
        "stops": lambda: False,
        "processors": lambda _: PROCESSORS,
        "architecture": lambda _: "sm_90",
    }
    with contextlib.ExitStack() as stack:
        for one in pkgutil.iter_modules(kernels.__path__):
            module = importlib.import_module(f"{kernels.__name__}.{one.name}")
            for name, value in known.items():
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, value))
        # What has no memory would else call operators.
        stack.enter_context(mock.patch.object(Operator, "recorded", lambda operator, *args: operator.make(args)))
        stack.enter_context(mock.patch.object(draw, "generator", return_value=None))
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
    fuser = model._fuser  # which fake tensors pass by otherwise, as all that is not plain does
    with as_on_an_h200() as found, faking() as mode:
        leaf = mode.from_tensor(x).requires_grad_()
        y = fuser.run(fuser.op_list(), leaf, {})
        torch.autograd.grad(y, [leaf, *model.parameters()], torch.empty_like(y))
    return found
