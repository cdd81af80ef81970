"""Modules of torch that were altered: what is not taken over is refused by name, never passed by."""

from __future__ import annotations

import copy
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from seqfuse.nn import from_torch
from seqfuse.testing import seeded_randn
from tests.alterations import Doubled, Twice

X = seeded_randn((2, 5, 24), 1)


class OwnLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class OwnAttention(nn.MultiheadAttention):
    pass


class Quantized(nn.Parameter):
    """As libraries keep a weight in few bits."""


def encoder(layers: int = 2, *, norm: nn.Module | None = None, **changed: Any) -> Any:
    settings = {"dropout": 0.0, "batch_first": True, "norm_first": True, "activation": nn.GELU("tanh"), **changed}
    layer = nn.TransformerEncoderLayer(24, 4, 40, **settings)
    several = nn.Sequential(*(copy.deepcopy(layer) for _ in range(layers)))
    return nn.Sequential(OrderedDict(layers=several, norm=norm or nn.LayerNorm(24)))


def at(path: str, change: Callable[[Any], object]) -> Callable[[Any], None]:
    def alter(m: Any) -> None:
        change(m.get_submodule(path))

    return alter


def having(path: str, **attributes: Any) -> Callable[[Any], None]:
    return at(path, lambda m: m.__dict__.update(attributes))


def patched(module: Any) -> None:
    module.forward = types.MethodType(lambda self, x: 2 * type(self).forward(self, x), module)


def twice(*given: Any) -> Any:
    return 2 * given[-1]


LAYER = "layers.1"
ATTN, FIRST, NORM = f"{LAYER}.self_attn", f"{LAYER}.linear1", f"{LAYER}.norm1"
ALTERED: dict[str, tuple[Callable[[Any], object], str]] = {
    "a forward hook": (at(FIRST, lambda m: m.register_forward_hook(twice)), rf"{FIRST} has hooks \(_forward_hooks\)"),
    "a pre-hook": (at(NORM, lambda m: m.register_forward_pre_hook(twice)), rf"{NORM} has hooks \(_forward_pre_hooks\)"),
    "a backward hook": (at(ATTN, lambda m: m.register_full_backward_hook(lambda *_: None)), f"{ATTN} has hooks"),
    "a hook of an activation": (
        at(f"{LAYER}.activation", lambda m: m.register_forward_hook(twice)), f"{LAYER}.activation has hooks"
    ),
    "a hook of the last norm": (at("norm", lambda m: m.register_forward_hook(twice)), "norm has hooks"),
    "a hook of the whole": (lambda m: m.register_forward_hook(twice), r"it has hooks \(_forward_hooks\)"),
    "a forward of an instance": (at(FIRST, patched), f"{FIRST} has a forward of its own"),
    "a feed-forward block of its own": (having(LAYER, _ff_block=twice), f"{LAYER} has _ff_block=.*, which was added"),
    "a linear of another class": (
        lambda m: m.set_submodule(FIRST, OwnLinear(24, 40)), rf"{FIRST} is a tests\..*OwnLinear, not a torch"
    ),
    "an adapter": (
        lambda m: m.set_submodule(f"{ATTN}.out_proj", Twice(m.layers[1].self_attn.out_proj)),
        f"{ATTN}.out_proj is a .*Twice, not a torch",
    ),
    "an adapter around the first linear": (
        lambda m: m.set_submodule(FIRST, Twice(m.get_submodule(FIRST))), f"{FIRST} is a .*Twice, not a torch"
    ),
    "attention of another class": (
        lambda m: m.set_submodule(ATTN, OwnAttention(24, 4, batch_first=True)), f"{ATTN} is a .*OwnAttention, not"
    ),
    "attention that is none": (lambda m: m.set_submodule(ATTN, Doubled()), f"{ATTN} is a .*Doubled, not a torch"),
    "a parametrization": (
        at(FIRST, lambda m: parametrize.register_parametrization(m, "weight", Doubled())),
        f"{FIRST} is a .*ParametrizedLinear",
    ),
    "a spectral norm": (at(FIRST, nn.utils.spectral_norm), f"{FIRST} has hooks"),
    "pruned": (at(FIRST, lambda m: prune.l1_unstructured(m, "weight", 0.5)), f"{FIRST} has hooks"),
    "a quantized weight": (
        at(FIRST, lambda m: setattr(m, "weight", Quantized(m.weight.data))), f"{FIRST}.weight is a .*Quantized, no"
    ),
    "dropout after attention": (having(f"{LAYER}.dropout1", p=0.5), f"{LAYER}.dropout1 has p=0.5, not 0.0"),
    "no dropout": (lambda m: m.set_submodule(f"{LAYER}.dropout", nn.Identity()), f"{LAYER}.dropout is a .*Identity"),
    "eps of a norm": (having(f"{LAYER}.norm2", eps=0.1), f"{LAYER}.norm2 has eps=0.1, not 1e-05"),
    "a norm without weights": (
        lambda m: m.set_submodule(NORM, nn.LayerNorm(24, elementwise_affine=False)), "elementwise_affine=False, not"
    ),
    "a norm without a bias": (
        lambda m: m.set_submodule(f"{LAYER}.norm2", nn.LayerNorm(24, bias=False)), "norm2.bias is not a parameter any"
    ),
    "a norm of root mean squares": (lambda m: m.set_submodule(NORM, nn.RMSNorm(24)), f"{NORM} is a .*RMSNorm, not"),
    "the number of heads": (having(ATTN, num_heads=2), f"{ATTN} has head_dim=6, not 12"),
    "heads that do not divide": (having(ATTN, num_heads=5), "num_heads that do not divide embed_dim"),
    "a bias less": (at(ATTN, lambda m: setattr(m, "in_proj_bias", None)), f"{ATTN}.out_proj.bias is a parameter"),
    "an activation of the other kind": (having(LAYER, activation_relu_or_gelu=1), "activation_relu_or_gelu=1, not 2"),
    "a module beside": (at(LAYER, lambda m: m.add_module("adapter", nn.Linear(2, 2))), f"{LAYER}.adapter is a "),
    "a buffer beside": (at(FIRST, lambda m: m.register_buffer("b", torch.ones(2))), f"{FIRST}.b is a buffer that was"),
    "a part in evaluation": (at(f"{LAYER}.dropout", lambda m: m.eval()), f"{LAYER}.dropout is in evaluation"),
    "a part in another dtype": (at(NORM, lambda m: m.double()), f"{NORM}.weight is torch.float64 on cpu, and"),
    "a part on another device": (at(NORM, lambda m: m.to("meta")), f"{NORM}.weight is torch.float32 on meta, and"),
}  # fmt: skip


@pytest.mark.parametrize("name", ALTERED)
def test_what_was_altered_is_refused_by_name(name: str) -> None:
    alter, says = ALTERED[name]
    module = encoder()
    alter(module)
    with pytest.raises(ValueError, match=says):
        from_torch(module)


class OwnLayer(nn.TransformerEncoderLayer):
    def forward(self, src: Tensor, *given: Any, **named: Any) -> Tensor:
        return 2 * super().forward(src, *given, **named)


class OwnGELU(nn.GELU):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


OTHER_CLASSES: dict[str, tuple[Callable[[], nn.Module], type[Exception], str]] = {
    "attention": (lambda: OwnAttention(24, 4), TypeError, "no layer here stands for OwnAttention"),
    "a layer": (lambda: OwnLayer(24, 4), TypeError, "no layer here stands for OwnLayer"),
    "a layer inside": (
        lambda: nn.Sequential(OwnLayer(24, 4, batch_first=True)), ValueError, "0 is a .*OwnLayer, not a torch"
    ),
    "an activation": (lambda: encoder(activation=OwnGELU()), TypeError, "no operation .* activation OwnGELU"),
    "a last norm": (lambda: encoder(norm=nn.GroupNorm(2, 24)), TypeError, "no layer here stands for GroupNorm"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_CLASSES)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_what_is_of_another_class_is_refused(name: str) -> None:
    make, error, says = OTHER_CLASSES[name]
    with pytest.raises(error, match=says):
        from_torch(make())


def test_a_class_whose_forward_was_replaced_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Linear, "forward", OwnLinear.forward)
    with pytest.raises(ValueError, match="Linear whose class or its forward was replaced"):
        from_torch(encoder(1))


def share(module: Any) -> None:
    module.layers[1] = module.layers[0]


KEPT: dict[str, Callable[[Any], object]] = {
    "nothing": lambda m: None,
    "a last norm without weights": lambda m: setattr(m, "norm", nn.LayerNorm(24, elementwise_affine=False)),
    "a last norm of root mean squares": lambda m: setattr(m, "norm", nn.RMSNorm(24)),
    "other numbers": at(FIRST, lambda m: m.weight.data.mul_(2)),
    "other parameters": at(FIRST, lambda m: setattr(m, "weight", nn.Parameter(m.weight.data * 2))),
    "another linear": lambda m: m.set_submodule(FIRST, nn.Linear(24, 40)),
    "a wider layer": lambda m: m.layers.__setitem__(1, encoder(1, norm_first=False, activation=F.silu).layers[0]),
    "eps of a layer": lambda m: [setattr(n, "eps", 0.1) for n in (m.layers[1].norm1, m.layers[1].norm2)],
    "a layer twice": share,
    "a layer less": lambda m: m.layers.__delitem__(1),
    "heads of another size": having(ATTN, num_heads=2, head_dim=12),
    "no last norm": lambda m: delattr(m, "norm"),
    "evaluation": lambda m: m.eval(),
    "a frozen part": at(LAYER, lambda m: m.requires_grad_(False)),
    "a hook that was removed": at(FIRST, lambda m: m.register_full_backward_hook(lambda *_: None).remove()),
    "in place": lambda m: m.layers.__setitem__(1, encoder(1, activation=nn.ReLU(inplace=True)).layers[0]),
}  # fmt: skip


@pytest.mark.parametrize("alter", KEPT.values(), ids=KEPT.keys())
def test_what_is_taken_over_is_the_same_module(alter: Callable[[Any], object]) -> None:
    module = encoder()
    alter(module)
    mine = from_torch(module)
    torch.testing.assert_close(mine(X), module(X))
    assert mine.training is module.training
    assert {id(p): p.requires_grad for p in mine.parameters()} == {id(p): p.requires_grad for p in module.parameters()}


def test_dropout_of_attention_may_differ() -> None:
    module = encoder(1, dropout=0.25)
    module.layers[0].self_attn.dropout = 0.5
    mine: Any = from_torch(module).layers[0]
    assert mine.attention.mixer.attention.dropout == 0.5
    assert {m.p for m in mine.modules() if type(m).__name__ == "Dropout"} == {0.25}
