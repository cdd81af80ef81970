"""The MLP block whose launches are counted, and what it is made of: by hand, by autograd, step by step.

An autograd function that makes the same calls, written by hand, is what an engine that costs nothing would come to. Of
what the block takes beyond autograd's own work, each step of its plan is counted, and the bare calls that it makes;
the rest is the engine's: the call of the module, the guard, what is saved and read again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

M, H = 4, 16

Call = Callable[[], Any]
Rows = Iterator[tuple[str, Call, Call]]
Parts = Iterator[tuple[str, tuple[Call, ...]]]


def models() -> tuple[Any, nn.Module]:
    """The MLP block, ours and eager torch's."""
    import seqfuse as sf
    from seqfuse import ops

    class Residual(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x)

    theirs = Residual(nn.LayerNorm(H), nn.Linear(H, H), nn.GELU("tanh"), nn.Linear(H, H))
    ours = sf.Sequential(
        ops.Residual(ops.LayerNorm(H), ops.Linear(H, H), ops.GeLU("tanh"), ops.Linear(H, H)),
    )
    return ours, theirs


def block() -> Rows:
    """The MLP block, forward and backward, as it is planned for an H200."""
    ours, theirs = models()
    x, g = torch.randn(M, H, requires_grad=True), torch.randn(M, H)

    def called(model: nn.Module) -> Call:
        # Not `torch.autograd.grad`: for each leaf torch answers whether its gradient is wanted by an exception.
        return lambda: model(x).backward(g)

    yield "MLP block, forward + backward", called(ours), called(theirs)


PART, STEP = "of the MLP block: ", "of its steps: "
BY_HAND = "by hand: an autograd.Function that makes the same calls"


def parts() -> Parts:
    """What ours of the MLP block is made of: the whole by hand, autograd, and each step beside the calls it makes."""
    from seqfuse.kernels import pointwise as steps
    from seqfuse.kernels.activations import ACTIVATIONS
    from seqfuse.kernels.norm import backward_of

    of, gelu = torch.float32, ACTIVATIONS["gelu_tanh"]
    act = steps.pointwise_of(steps.Chain(steps.act(gelu)))
    dact = steps.pointwise_of(steps.Chain(steps.dact(gelu), steps.column_sum()), None, (of,))
    norm = backward_of(True, False, True, of, of, True, True)
    linear, layernorm, mm = F.linear, torch.native_layer_norm, torch.mm

    class ByHand(torch.autograd.Function):
        """What the engine would come to if it cost nothing."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
            gain, shift, weight, bias, weight_out, bias_out = parameters
            n, mean, rstd = layernorm(x, (H,), gain, shift, 1e-5)
            z = linear(n, weight, bias)
            h = act(z)[0]
            ctx.save_for_backward(x, mean, rstd, gain, n, weight, z, h, weight_out)
            return linear(h, weight_out, bias_out).add_(x)

        @staticmethod
        def backward(ctx: Any, *douts: Tensor) -> Any:
            (dy,) = douts
            x, mean, rstd, gain, n, weight, z, h, weight_out = ctx.saved_tensors
            dz, dbias = dact(mm(dy, weight_out), z)
            dx, dgain, dshift, *_ = norm(mm(dz, weight), x, mean, rstd, gain, dy)
            return dx, dgain, dshift, mm(dz.mT, n), dbias, mm(dy.mT, h), torch.sum(dy, 0)

    class Empty(torch.autograd.Function):
        """No more than what autograd does for a Function of as many tensors."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return grads[0], *rows_of

    model = models()[0]
    x, dy, n, z, h, dz = (torch.randn(M, H) for _ in range(6))
    leaf, parameters = torch.randn(M, H, requires_grad=True), list(model.parameters())
    rows_of = [torch.zeros_like(p) for p in parameters]
    gain, shift, weight, bias = (p.detach() for p in parameters[:4])
    statistics = torch.zeros(M, 1), torch.ones(M, 1)
    yield PART + BY_HAND, (lambda: ByHand.apply(leaf, *parameters).backward(dy),)
    yield PART + "autograd: a Function of 7 tensors, and backward()", (
        lambda: Empty.apply(leaf, *parameters).backward(dy),
    )  # fmt: skip
    bare: dict[tuple[str, str], Call] = {
        ("forward", "LayerNorm"): lambda: layernorm(x, (H,), gain, shift, 1e-5),
        ("forward", "LinearBiasPointwise"): lambda: act(linear(n, weight, bias)),
        ("forward", "LinearBiasAdd"): lambda: linear(h, weight, bias).add_(x),
        ("backward", "LinearBiasBackward"): lambda: (mm(dy, weight), torch.sum(dy, 0), mm(dy.mT, h)),
        ("backward", "PointwiseChainBackward"): lambda: dact(dy, z),
        ("backward", "Linear"): lambda: (mm(dz, weight), mm(dz.mT, n)),
        ("backward", "NormBackward"): lambda: norm(dz, x, *statistics, gain, dy),
    }
    for (pass_, name), call in steps_of(models()[0], leaf.detach().requires_grad_(), dy):
        if (pass_, name) in bare:
            yield f"{STEP}{pass_}, {name}", (call, bare.pop((pass_, name)))
    assert not bare, f"the plan has no such step: {list(bare)}"


def steps_of(model: Any, x: Tensor, dy: Tensor) -> list[tuple[tuple[str, str], Call]]:
    """The passes of each step of a model in one segment, by name, with what they were called with."""
    found: list[tuple[tuple[str, str], Call]] = []

    def watch(step: Any, run: Call, *args: Any, **rest: Any) -> Any:
        pass_ = "forward" if run.__name__ == "fwd" else "backward"
        found.append(((pass_, step.name), functools.partial(run, *args, **rest)))
        return run(*args, **rest)

    import seqfuse as sf

    fuser = sf.Fuser(model, model.fusions, on_step=watch)
    for _ in range(2):  # the first call checks what each step returns
        found.clear()
        fuser(x).backward(dy)
    return found
