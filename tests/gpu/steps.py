"""A training step, and a CUDA graph of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


def step(run: Any, parameters: Iterable[Tensor], x: Tensor, dy: Tensor) -> list[Tensor]:
    """y and every gradient."""
    leaf = x.detach().requires_grad_()
    y = run(leaf)
    return [y.detach(), *torch.autograd.grad(y, [leaf, *parameters], dy)]


def captured(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of a function, after warm-up calls on another stream, and the results that a replay overwrites."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results
