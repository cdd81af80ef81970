"""Torch modules that `from_torch` cannot convert are refused by name, never ignored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from seqfuse.nn import from_torch
from seqfuse.testing import seeded_randn
from tests.alterations import Doubled, Quantized, Twice, at, patched, twice

X = seeded_randn((2, 5, 24), 1)


class OwnLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def plain() -> Any:
    inner = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Dropout(0.0), nn.Linear(40, 24))
    return nn.Sequential(nn.LayerNorm(24), inner, nn.Tanh())


LINEAR = "1.0"
ALTERED: dict[str, tuple[Callable[[Any], object], type[Exception], str]] = {
    "a forward hook": (
        at(LINEAR, lambda m: m.register_forward_hook(twice)), ValueError, r"Linear at 1.0 .* hooks \(_forward_hooks\)"
    ),
    "a pre-hook": (at("0", lambda m: m.register_forward_pre_hook(twice)), ValueError, "LayerNorm at 0 .*_pre_hooks"),
    "a backward hook": (
        at("1.1", lambda m: m.register_full_backward_hook(lambda *_: None)), ValueError, "GELU at 1.1 .* hooks"
    ),
    "a hook of a container": (at("1", lambda m: m.register_forward_hook(twice)), ValueError, "at 1 .* hooks"),
    "a hook of the whole": (lambda m: m.register_forward_hook(twice), ValueError, "Sequential was altered"),
    "a forward of an instance": (at(LINEAR, patched), ValueError, "Linear at 1.0 .* its own forward"),
    "another class": (lambda m: m.set_submodule(LINEAR, OwnLinear(24, 40)), TypeError, "OwnLinear, at 1.0"),
    "an adapter": (lambda m: m.set_submodule(LINEAR, Twice(m[1][0])), TypeError, "Twice, at 1.0"),
    "a parametrization": (
        at(LINEAR, lambda m: parametrize.register_parametrization(m, "weight", Doubled())), TypeError, "Parametrized"
    ),
    "a spectral norm": (at(LINEAR, nn.utils.spectral_norm), ValueError, "hooks"),
    "pruned": (at(LINEAR, lambda m: prune.l1_unstructured(m, "weight", 0.5)), ValueError, "hooks"),
    "a quantized weight": (
        at(LINEAR, lambda m: setattr(m, "weight", Quantized(m.weight.data))), ValueError, "weight is not a plain"
    ),
    "a weight of another shape": (
        at(LINEAR, lambda m: setattr(m, "weight", nn.Parameter(m.weight[:3]))), ValueError, r"plain parameter \(40, 24"
    ),
    "a parameter beside": (
        at("1.1", lambda m: m.register_parameter("p", nn.Parameter(torch.ones(2)))), ValueError, "p beside its own"
    ),
    "a parameter of a container": (
        lambda m: m.register_parameter("p", nn.Parameter(torch.ones(2))), ValueError, "p beside its own"
    ),
    "a module beside": (at(LINEAR, lambda m: m.add_module("more", nn.Linear(2, 2))), ValueError, "more beside its own"),
    "a buffer beside": (at(LINEAR, lambda m: m.register_buffer("b", torch.ones(2))), ValueError, "b beside its own"),
    "of no operation": (lambda m: m.append(nn.Bilinear(3, 3, 3)), TypeError, "Bilinear, at 3; sf.convert"),
    "a layer": (lambda m: m.append(nn.TransformerEncoderLayer(24, 4)), TypeError, "TransformerEncoderLayer, at 3"),
    "another dimension": (lambda m: m.append(nn.GLU(1)), ValueError, "GLU at 3 was altered: it has dim=1, which"),
    **{
        name: (lambda m, name=name: m.append(nn.Embedding(4, 24, **{name: True})), ValueError, f"has {name}, which")
        for name in ("max_norm", "scale_grad_by_freq", "sparse")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ALTERED)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_what_was_altered_is_refused_by_name(name: str) -> None:
    alter, error, says = ALTERED[name]
    module = plain()
    alter(module)
    with pytest.raises(error, match=says):
        from_torch(module)


def test_a_class_whose_forward_was_replaced_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Linear, "forward", OwnLinear.forward)
    with pytest.raises(ValueError, match=r"Linear at 1\.0 was altered: it has its own forward"):
        from_torch(plain())


def share(module: Any) -> None:
    module[2] = module[0]


KEPT: dict[str, Callable[[Any], object]] = {
    "nothing": lambda m: None,
    "other numbers": at(LINEAR, lambda m: m.weight.data.mul_(2)),
    "another linear": lambda m: m.set_submodule(LINEAR, nn.Linear(24, 40, bias=False)),
    "eps of a norm": at("0", lambda m: setattr(m, "eps", 0.1)),
    "a norm twice": share,
    "a part in evaluation": at("1.2", lambda m: m.eval()),
    "evaluation": lambda m: m.eval(),
    "a frozen part": at("1", lambda m: m.requires_grad_(False)),
    "a hook that was removed": at(LINEAR, lambda m: m.register_full_backward_hook(lambda *_: None).remove()),
    "in place": lambda m: m.append(nn.ReLU(inplace=True)),
}


@pytest.mark.parametrize("alter", KEPT.values(), ids=KEPT.keys())
def test_what_is_taken_over_is_the_same_module(alter: Callable[[Any], object]) -> None:
    module = plain()
    alter(module)
    mine = from_torch(module)
    torch.testing.assert_close(mine(X), module(X))
    assert [m.training for m in mine] == [m.training for m in module]
    assert {id(p): p.requires_grad for p in mine.parameters()} == {id(p): p.requires_grad for p in module.parameters()}
