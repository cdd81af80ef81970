"""A fusion that fails in one of a checkpoint's two forwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

import seqfuse as sf
from seqfuse import ops
from seqfuse.errors import StateError

from .kit_b import draw, passes
from .test_checkpoint import Keeps, special


class Fails:
    """Makes the forwards of a fusion with these numbers fail."""

    calls = 0
    at: tuple[int, ...] = ()

    @classmethod
    def pass_by(cls) -> None:
        cls.calls += 1
        if cls.calls in cls.at:
            raise torch.OutOfMemoryError("out of memory")


class FailingKeeps(Keeps):
    def fwd(self, x: Tensor) -> Any:
        Fails.pass_by()
        return super().fwd(x)


class FailingLate(sf.ForwardFusion):
    """Keeps a stand-in of one tensor where the operation keeps one tensor of the same shape."""

    scale: ops.Scale
    act: ops.SiLU

    def fwd(self, x: Tensor) -> Any:
        Fails.pass_by()
        y = nn.functional.silu(x * -0.5)
        return y, {"scale": ops.Scale.Saved(factor=-0.5), "act": ops.SiLU.Saved(x=sf.Recompute(halved, x))}


def halved(x: Tensor) -> Tensor:
    return x * -0.5


@pytest.mark.parametrize("fusion", [FailingKeeps, FailingLate], ids=["joint", "stand-in"])
@pytest.mark.parametrize("at", [(2,), (3,)], ids=["in the forward", "in the recomputation"])
@pytest.mark.filterwarnings("ignore::seqfuse.FallbackWarning")
def test_a_fusion_that_fell_back_in_one_of_two_forwards_gives_no_wrong_gradient(fusion: Any, at: tuple[int, ...]):
    members = special() if fusion is FailingKeeps else [ops.Scale(-0.5), ops.SiLU()]
    model, x, dy = sf.Sequential(*members, fusions=(fusion,)), draw(3, 5), draw(3, 5, seed=99)
    with sf.fusing(False):
        want = passes(model, x)["d_x"]
    Fails.calls, Fails.at = 0, at
    assert torch.allclose(passes(model, x)["d_x"], want)  # call 1, which is checked
    leaf = x.clone().requires_grad_()
    y = checkpoint(model, leaf, use_reentrant=False)
    try:
        y.backward(dy)
    except (StateError, CheckpointError):
        assert leaf.grad is None
    else:
        torch.testing.assert_close(leaf.grad, want)
    assert Fails.calls == 3
