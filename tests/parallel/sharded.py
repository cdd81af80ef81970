"""Comparisons in several processes, sharded against whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

Found = TypeVar("Found")


def in_the_first(run: Callable[[], Found]) -> Found:
    """What a function gives that is the same in every process: the first process runs it, for all of them."""
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        with torch.random.fork_rng(devices=[]):
            found = [run()]
    dist.broadcast_object_list(found)
    return found[0]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Signed random numbers, the same in every process."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def randomize(model: nn.Module, seed: int = 100) -> None:
    """Gives every parameter of the whole model numbers that do not depend on the sharding."""
    for i, p in enumerate(model.parameters()):
        p.data = draw(*p.shape, seed=seed + i, dtype=p.dtype)


def share_of(model: nn.Module, name: str, whole: Tensor) -> Tensor:
    """This process's shard of a tensor shaped like a parameter of the whole model."""
    owner, _, leaf = name.rpartition(".")
    shard = getattr(model.get_submodule(owner), "shards", {}).get(leaf)
    return whole if shard is None else shard.of(whole)


def copy_shares(model: nn.Module, whole: nn.Module) -> None:
    """Takes the parameters of a whole model."""
    sources = dict(whole.named_parameters())
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(share_of(model, name, sources[name]))


def results(model: nn.Module, x: Tensor, dy: Tensor, **channels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The output for x, and the gradients of x (where it has one) and of every parameter for dy."""
    model.zero_grad()
    x = x.detach().clone()
    if x.is_floating_point():
        x.requires_grad_()
    y: Tensor = model(x, **channels)
    y.backward(dy)
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    if x.grad is not None:
        grads["x"] = x.grad
    return y.detach(), grads


def own(x: Tensor, dim: int | None) -> Tensor:
    """This process's shard of rows along a dimension, or all of them."""
    return x if dim is None else x.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def assert_same(model: nn.Module, whole: nn.Module, x: Tensor, *, dim: int | None = None, **channels: Tensor) -> None:
    """Output and every gradient of a sharded model equal those of the whole one in a single process. With `dim` each
    process has its shard of x and y along it."""

    def of_the_whole() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        dy = draw(*whole(x, **channels).shape, seed=7)
        return dy, *results(whole, x, dy, **channels)

    dy, expected_y, expected = in_the_first(of_the_whole)
    y, grads = results(model, own(x, dim), own(dy, dim), **channels)
    torch.testing.assert_close(y, own(expected_y, dim))
    assert grads.keys() == expected.keys()
    for name, grad in expected.items():
        assert grad.abs().max() > 0, name
        wanted = own(grad, dim) if name == "x" else share_of(model, name, grad)
        torch.testing.assert_close(grads[name], wanted, msg=lambda m, n=name: f"{n}: {m}")
