"""A small residual MLP, and a conversion of it."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqfuse as sf
from seqfuse.convert import Conversion
from seqfuse.testing import seeded_randn

from .comparing import passes

X = seeded_randn((3, 8), 2).double()


class Block(nn.Module):
    def __init__(self, width: int = 8, p: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc, self.out = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.out(F.gelu(self.fc(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, depth: int = 1, width: int = 8, p: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(Block(width, p) for _ in range(depth))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def pair(**given: Any) -> tuple[Net, Net, Conversion]:
    """A converted model that was called already, an equal unconverted one, and the conversion."""
    plain = Net(**given)
    model = copy.deepcopy(plain)
    conversion = sf.convert(model)
    passes(model, X)
    return model, plain, conversion


def chains(conversion: Any) -> int:
    return sum(len(graph.regions) for graph in conversion.graphs)


class Adapted(nn.Module):
    """A frozen Linear with LoRA."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)
        self.to(base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x)) * 0.5
