"""Models, ways to run them, and comparisons of all their results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.plan import search as planning
from seqfuse.run import fuser as running
from seqfuse.testing import seeded_randn


class PlainResidual(nn.Sequential):
    """`ops.Residual` of torch modules."""

    def forward(self, input: Tensor) -> Tensor:
        return input + super().forward(input)


# Blocks of models.


def feed_forward(width: int) -> list[nn.Module]:
    return [ops.LayerNorm(width), ops.Linear(width, 4 * width), ops.GeLU(), ops.Linear(4 * width, width)]


def gated(width: int) -> list[nn.Module]:
    up = ops.MergedLinear(width, (2 * width,) * 2, bias=False), ops.SwiGLU()
    return [ops.RMSNorm(width), *up, ops.Linear(2 * width, width, bias=False)]


def attending(width: int, heads: int, dropout: float = 0.0) -> list[nn.Module]:
    qkv = ops.Linear(width, 3 * width), ops.Attention(heads, causal=True, dropout=dropout)
    return [ops.LayerNorm(width), *qkv, ops.Linear(width, width)]


def attending_by_several_weights(width: int, heads: int, causal: bool = True) -> list[nn.Module]:
    qkv = ops.MergedLinear(width, (width,) * 3, bias=False), ops.Attention(heads, causal=causal)
    return [ops.RMSNorm(width), *qkv, ops.Linear(width, width, bias=False)]


def randomize(model: nn.Module, seed: int = 7) -> nn.Module:
    """Gives every parameter signed numbers; biases and gains too, which start as zeros and ones."""
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(seeded_randn(tuple(p.shape), seed + i, dtype=torch.float64).mul(0.4))
    return model


def passes(model: Any, x: Tensor, dy: Tensor | None = None) -> dict[str, Tensor | None]:
    """Output, gradient of the input and of every parameter, from one forward and one backward."""
    model.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_()
    y = model(x)
    dy = seeded_randn(tuple(y.shape), 99, dtype=torch.float64).to(y.dtype) if dy is None else dy
    y.backward(dy)
    found: dict[str, Tensor | None] = {"out": y.detach(), "d_x": x.grad}
    found.update((f"d_{name}", p.grad) for name, p in model.named_parameters())
    model.zero_grad(set_to_none=True)
    return found


def assert_same(got: dict[str, Tensor | None], want: dict[str, Tensor | None], tolerance: float = 1e-12) -> None:
    """Same names, dtypes and numbers; no needed gradient is zero everywhere."""
    assert got.keys() == want.keys()
    for name, expected in want.items():
        found = got[name]
        if expected is None:
            assert found is None, f"{name} should be None"
            continue
        assert found is not None, f"{name} is None"
        assert found.dtype == expected.dtype, f"{name}: {found.dtype} instead of {expected.dtype}"
        assert expected.numel() == 0 or expected.abs().max() > 0, f"{name} is zero, which proves nothing"
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def mlp(*, dropout: float = 0.0, dtype: torch.dtype = torch.float64, fusions: Any = ()) -> sf.Sequential:
    """LayerNorm, Linear, Tanh, Dropout, Linear of odd sizes."""
    model = sf.Sequential(
        ops.LayerNorm(5), ops.Linear(5, 7), ops.Tanh(), ops.Dropout(dropout), ops.Linear(7, 3), fusions=fusions
    )
    randomize(model)
    return model.to(dtype)


def plain_mlp(model: sf.Sequential) -> nn.Sequential:
    """A `nn.Sequential` of `torch.nn` modules with the parameters of an `mlp` without dropout."""
    dtype = next(model.parameters()).dtype
    twin = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 7), nn.Tanh(), nn.Identity(), nn.Linear(7, 3)).to(dtype)
    twin.load_state_dict(model.state_dict(), strict=True)
    return twin


def draw(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """Signed, asymmetric numbers."""
    return seeded_randn(shape, seed, dtype=dtype)


class Planned:
    """Counts regions planned and sequences read inside the block."""

    def __init__(self) -> None:
        self.plans: list[Any] = []
        self.lists = 0

    def __len__(self) -> int:
        return len(self.plans)


@contextlib.contextmanager
def counting_plans() -> Iterator[Planned]:
    """Counts the planning of calls of any model."""
    seen, plan_region, op_list = Planned(), planning.plan_region, running.OpList

    def counted(search: Any, memory: Any) -> Any:
        seen.plans.append((search.stretch,))
        return plan_region(search, memory)

    def read(*args: Any, **kwargs: Any) -> Any:
        seen.lists += 1
        return op_list(*args, **kwargs)

    running.plan_region, running.OpList = counted, read
    try:
        yield seen
    finally:
        running.plan_region, running.OpList = plan_region, op_list
