"""Operations of this library with their `torch.nn` twins, and hooks for both."""

from __future__ import annotations

from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops

from .kinds import KINDS

FUSIONS = (*KINDS, *sf.fusions.default)
WIDTH = 6
TWINS = {
    "Linear": lambda: (ops.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)),
    "Linear without bias": lambda: (ops.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)),
    "LayerNorm": lambda: (ops.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)),
    "LayerNorm without bias": lambda: (ops.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)),
    "RMSNorm": lambda: (ops.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)),
    "GeLU": lambda: (ops.GeLU(), nn.GELU()),
    "GeLU by tanh": lambda: (ops.GeLU("tanh"), nn.GELU("tanh")),
    "ReLU": lambda: (ops.ReLU(), nn.ReLU()),
    "SiLU": lambda: (ops.SiLU(), nn.SiLU()),
    "Sigmoid": lambda: (ops.Sigmoid(), nn.Sigmoid()),
    "Tanh": lambda: (ops.Tanh(), nn.Tanh()),
    "Identity": lambda: (ops.Identity(), nn.Identity()),
    "Dropout": lambda: (ops.Dropout(0.0), nn.Dropout(0.0)),
    "a barrier": lambda: (nn.Softplus(), nn.Softplus()),
    "a barrier with parameters": lambda: (nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)),
    "nested": lambda: pair(("Linear", "GeLU")),
    "nested and empty": lambda: pair(()),
}


def pair(kinds: tuple[str, ...]) -> tuple[sf.Sequential, nn.Sequential]:
    made = [TWINS[kind]() for kind in kinds]
    return sf.Sequential(*(ours for ours, _ in made), fusions=FUSIONS), nn.Sequential(*(theirs for _, theirs in made))


class Double:
    """A hook that doubles the output, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        self.calls += 1
        return 2 * out


class Negate(Double):
    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        self.calls += 1
        return (-args[0],)


class Count(Double):
    def __call__(self, module: nn.Module, d_input: object, d_output: object) -> None:
        self.calls += 1


REGISTER = {
    "forward": (nn.Module.register_forward_hook, Double),
    "forward pre": (nn.Module.register_forward_pre_hook, Negate),
    "full backward": (nn.Module.register_full_backward_hook, Count),
}
