"""No kernel is launched on fake tensors: a fusion that launches one itself is left out of what is counted."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

import seqfuse as sf
from seqfuse import ops
from seqfuse.fuser.fake import LaunchOnFakes, faking
from seqfuse.testing import check_fusion
from tests.fusions.triton.launching import ScaleScale, Tuned, said, scaled, scales


@pytest.mark.parametrize("fusion", [ScaleScale, Tuned])
def test_a_plan_names_the_fusion_and_the_cure(fusion: type[sf.FusedOperation], device: torch.device) -> None:
    plan = scales(fusion).plan(torch.randn(3, 8, device=device))
    assert plan.memory_unknown == said("scaled_kernel", fusion.__name__)
    assert plan.memory is None


@pytest.mark.parametrize("memory", ["save", "balanced", "lean", 1000])
def test_a_model_runs_whatever_is_to_be_saved(memory: Any, device: torch.device) -> None:
    x = torch.randn(3, 8, device=device, requires_grad=True)
    scales(ScaleScale, memory=memory)(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 1 - x.detach().tanh() ** 2)


def test_other_threads_launch_meanwhile(device: torch.device) -> None:
    x, found = torch.randn(8, device=device), list[Any]()
    with faking() as mode:
        thread = threading.Thread(target=lambda: found.append(scaled(x, 2.0)))
        thread.start()
        thread.join()
        with pytest.raises(LaunchOnFakes, match="scaled_kernel"):
            scaled(mode.from_tensor(x), 2.0)
    assert torch.equal(found[0], x * 2)


def test_triton_is_as_it_was_behind_the_last_of_several_blocks() -> None:
    before = [vars(kind)["run"] for kind in (JITFunction, InterpretedFunction)]
    with faking():
        with faking(FakeTensorMode()):
            pass
        during = [vars(kind)["run"] for kind in (JITFunction, InterpretedFunction)]
    after = [vars(kind)["run"] for kind in (JITFunction, InterpretedFunction)]
    assert before == after
    assert not set(before) & set(during)


def test_the_test_kit_says_that_a_fusion_launches_on_fake_tensors(device: torch.device) -> None:
    x = torch.randn(3, 8, device=device)
    (skipped,) = check_fusion(ScaleScale, x, ops.Scale(2.0), ops.Scale(0.5), dtypes=[torch.float32]).skipped
    assert skipped == f"what it saves for backward: {said('scaled_kernel')}"
