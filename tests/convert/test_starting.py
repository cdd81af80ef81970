"""Arguments of `sf.convert` and of the backend of `torch.compile`: mistakes raise at once, in one sentence."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqfuse as sf
from seqfuse.convert import backend
from seqfuse.convert.region import CapturedRegion

from .comparing import given as inputs_of
from .comparing import recorded


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "lm_head",
            r"must be a function of a module and its path, got 'lm_head'\nHint: such as filter_fn=lambda module, path",
        ),
        (lambda module: True, r"must take two arguments, a module and its path, and takes \(module\)"),
        (lambda module, path, more: True, r"must take two arguments, .* and takes \(module, path, more\)"),
    ],
)
def test_a_filter_fn_that_cannot_be_called_is_refused_before_the_first_call(given: Any, said: str):
    with pytest.raises(sf.InputError, match=f"SF106 convert: filter_fn {said}"):
        sf.convert(nn.ReLU(), filter_fn=given)


@pytest.mark.parametrize("given", [str.__eq__, lambda *given: True, lambda module, path, more=None: True, max])
def test_a_filter_fn_may_be_any_callable_of_two_arguments(given: Any):
    sf.convert(nn.ReLU(), filter_fn=given)


def test_layers_are_members_with_submodules():
    flat = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
    none = "has no layers: no ModuleList or Sequential in it has a member with submodules"
    with pytest.raises(sf.InputError, match=f"SF106 convert: Sequential {none}"):
        sf.convert(flat, regions="layers")
    conversion = sf.convert(nn.Sequential(flat), regions="layers")
    assert sf.conversion(flat) is conversion


@pytest.mark.parametrize("given", [nn.ModuleList([nn.Linear(8, 8)]), nn.ModuleDict({"a": nn.Linear(8, 8)})])
def test_a_container_that_nobody_calls_is_refused(given: nn.Module):
    name = type(given).__name__
    with pytest.raises(sf.InputError, match=f"SF106 convert: {name} has no forward.*\nHint: convert the module that"):
        sf.convert(given)


@pytest.mark.parametrize("name", [*inspect.signature(sf.convert).parameters][1:])
def test_an_option_is_not_changed_after_the_conversion(name: str):
    conversion = sf.convert(nn.ReLU())
    with pytest.raises(
        sf.InputError, match=rf"{name} cannot be changed after .*\nHint: .*undo.*convert\(model, {name}="
    ):
        setattr(conversion, name, "lean")
    assert not hasattr(conversion, name)


class Parts(nn.Module):
    """Layers as in x-transformers and vit-pytorch: lists, with `None` in them, of what each layer calls."""

    def __init__(self, called: bool = True) -> None:
        super().__init__()
        self.called = called
        self.layers = nn.ModuleList(nn.ModuleList([nn.ModuleList([nn.LayerNorm(8), None]), _mlp()]) for _ in range(2))
        self.heads = nn.ModuleList([nn.ModuleDict({"one": _mlp(), "none": nn.Identity()}), None])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.layers:
            (norm, _), mlp = part
            x = x + (mlp(norm(x)) if self.called else mlp.forward(norm(x)))
        head = self.heads[0]["one"]
        return head(x) if self.called else head.forward(x)


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def test_layers_are_found_in_lists_and_dicts_of_lists_beside_none():
    model, x = Parts(), torch.randn(4, 8)
    wanted = model(x)
    conversion = sf.convert(model, regions="layers")
    torch.testing.assert_close(model(x), wanted)
    (graph,) = conversion.graphs
    assert graph.operations == 3
    assert "; 3 calls" in str(conversion)


def test_layers_that_nobody_called_are_named():
    model = Parts(called=False)
    conversion = sf.convert(model, regions="layers")
    model(torch.randn(4, 8))
    why = 'if the model was called, its code does not call these modules: use regions="model"'
    none = "nothing captured yet: none of its 3 layers, layers.0.1 to heads.0.one, was ever called"
    assert str(conversion) == f"{none}; {why}"
    one = sf.convert(nn.Sequential(_mlp()), regions="layers")
    assert str(one) == f"nothing captured yet: none of its 1 layer, 0, was ever called; {why}"


def test_a_list_with_a_forward_of_its_own_is_a_layer():
    class Blocks(nn.ModuleList):
        def forward(self, x: Tensor) -> Tensor:
            for block in self:
                x = block(x)
            return x

    inner = Blocks([_mlp(), _mlp()])
    conversion = sf.convert(nn.ModuleList([inner]), regions="layers")
    assert sf.conversion(inner) is conversion
    inner(torch.randn(4, 8))
    assert [graph.operations for graph in conversion.graphs] == [6]


def test_the_backend_takes_the_choice_of_memory():
    model = nn.Sequential(OrderedDict(norm=nn.LayerNorm(8), up=nn.Linear(8, 32), act=nn.GELU(), down=nn.Linear(32, 8)))
    x, saved = torch.randn(16, 8), list[int]()
    for memory in ("fast", "lean"):
        gm, _ = recorded(model, x, renames=True, tensors=lambda y: (y,))
        backend(gm, [], options={"memory": memory})
        (region,) = gm.children()
        assert isinstance(region, CapturedRegion)
        gm(*inputs_of(model, x).values())
        plan = region.plan
        assert plan is not None
        assert plan.memory is not None
        saved.append(plan.memory.saved)
    assert saved[1] < saved[0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"memory": "leaner"},
            r"memory must be one of fast, balanced, lean, least or sf\.Budget\(part=\.\.\.\), got 'leaner'",
        ),
        (
            {"memory": 20_000},
            r".* got 20000\nHint: a model is captured graph by graph, so bytes are for a Sequential alone",
        ),
        ({"memory": 0.4}, r".* got 0\.4\nHint: sf\.Budget\(part=0\.4\)$"),
        ({"then": "eager"}, r"then must be None or \"inductor\", got 'eager'"),
        (
            {"regions": "layers"},
            r"takes the options .* got 'regions'\nHint: regions and filter_fn are those of sf.convert",
        ),
        (
            {"max_autotune": True},
            r"takes the options 'fusions', 'memory', 'then', 'recipe', 'exclude', got 'max_autotune'$",
        ),
    ],
)
def test_the_backend_refuses_other_options(given: dict[str, Any], said: str):
    gm = torch.fx.symbolic_trace(nn.ReLU())
    with pytest.raises(sf.InputError, match=f'SF106 backend="seqfuse": {said}'):
        backend(gm, [], options=given)


def test_a_fusion_set_is_checked_before_anything_is_captured():
    with pytest.raises(sf.PluginError, match="SF301: fusions takes fusion classes"):
        sf.convert(nn.ReLU(), fusions="default")  # pyright: ignore[reportArgumentType]
