"""Converted models under a recipe: as if each Linear that is not excluded were a quantized operation."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops, recipes
from seqfuse.recipes import Recipe
from seqfuse.testing import assert_bitwise_equal, seeded_randn
from tests.convert import families
from tests.convert.families import FAMILIES, randomized, tensor_of

from .named import RECIPES, named

pytest.importorskip("transformers")


def passes(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    return {name: t for name, t in families.passes(model, inputs).items() if t is not None}


class Quantized(nn.Module):
    """A Linear, or a `Conv1D` of Hugging Face, by a sequence of one operation on its parameters."""

    def __init__(self, module: Any, recipe: Recipe) -> None:
        super().__init__()
        self.weight, self.bias, self.recipe = module.weight, module.bias, recipe
        self.turned = type(module).__name__ == "Conv1D"

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.t() if self.turned else self.weight
        op: Any = ops.Linear(weight.shape[1], weight.shape[0], False, device="meta")
        op.weight = nn.Parameter(torch.empty_like(weight))
        model = sf.Sequential(op, recipe=self.recipe)
        y = torch.func.functional_call(model, {"0.weight": weight}, (x,))
        return y if self.bias is None else y + self.bias


def replaced(model: nn.Module, recipe: Recipe, exclude: tuple[str, ...]) -> list[str]:
    """Replaces Linears by quantized modules; returns their paths."""
    found = []
    for path, module in [*model.named_modules()]:
        if (type(module) is nn.Linear or type(module).__name__ == "Conv1D") and not any(n in path for n in exclude):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, Quantized(module, recipe))
            found.append(path)
    return found


def reported(conversion: Any) -> dict[str, str | None]:
    """The reason why each other module is not quantized."""
    return {k: why for graph in conversion.graphs for region in graph.regions for k, why in region.quantized.items()}


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    return {n: float((found[n] - want).norm() / want.norm().clamp_min(1e-20)) for n, want in wanted.items()}


# Each recipe and each model once; the graph of a model is the same under every recipe.
_PAIRED = {("llama", 0), ("gpt2", 1), ("bert", 2), ("llama", 3)}
MODELS_AND_RECIPES = [
    pytest.param(name, recipe, id=f"{named(recipe)}-{name}", marks=[pytest.mark.full] * ((name, at) not in _PAIRED))
    for at, recipe in enumerate(RECIPES)
    for name in ("llama", "gpt2", "bert")
]


@pytest.mark.parametrize(("name", "recipe"), MODELS_AND_RECIPES)
def test_a_converted_model_is_quantized_and_undone_bit_for_bit(name: str, recipe: Recipe):
    family = FAMILIES[name]
    model, own = (randomized(family.build()).train() for _ in range(2))
    own.load_state_dict(model.state_dict())
    inputs = family.inputs()
    plain = passes(model, inputs)
    conversion = sf.convert(model, recipe=recipe)
    low = passes(model, inputs)
    quantized = replaced(own, recipe, ("lm_head",))
    wanted = passes(own, inputs)
    wanted = {n: wanted[n] for n in plain}
    own_distance, whole = distance(low, wanted), distance(plain, wanted)
    # A number between two codes may be rounded to either: far less than the error of quantization.
    for key in ("y", *(n for n in plain if n.endswith("weight"))):
        assert own_distance[key] <= 0.2 * whole[key] + 1e-6, key
    assert whole["y"] > 1e-3
    said = reported(conversion)
    assert {path for path, why in said.items() if why is None} == set(quantized)
    assert {path: why for path, why in said.items() if why is not None} == (
        {"lm_head": "excluded"} if name != "bert" else {}
    )
    text = " ".join(str(conversion).split())
    assert f"quantized by {type(recipe).__name__} (emulated on cpu): " in text
    assert ("not quantized, excluded: lm_head" in text) == (name != "bert")
    with sf.low_precision(enabled=False):
        off = distance(passes(model, inputs), plain)
    assert max(gap for key, gap in off.items() if key == "y" or key.endswith("weight")) < 1e-4
    conversion.undo()
    assert_bitwise_equal(passes(model, inputs), plain)


def test_names_that_are_excluded():
    family = FAMILIES["llama"]
    model = randomized(family.build())
    conversion = sf.convert(model, recipe=recipes.MXFP8(), exclude=("layers.0.mlp", "o_proj", "k_proj"))
    model(**family.inputs())
    said = reported(conversion)
    kept_out = {path for path, why in said.items() if why == "excluded"}
    attention = [f"model.layers.{i}.self_attn.{n}_proj" for i in range(2) for n in "qkvo"]
    assert kept_out == {*attention, *(f"model.layers.0.mlp.{n}_proj" for n in ("gate", "up", "down"))}
    assert said["lm_head"] is None


def test_a_name_that_no_module_has_is_told():
    def build() -> nn.Module:
        return nn.Sequential(OrderedDict(norm=nn.LayerNorm(32), head=nn.Linear(32, 32)))

    with pytest.warns(UserWarning, match=r"exclude names 'heed', and no module .*\nHint: did you mean 'head'") as told:
        sf.convert(build(), recipe=recipes.MXFP8(), exclude=("heed", "head", "lm_head"))
    assert [Path(one.filename).name for one in told] == [Path(__file__).name]


def test_layers_that_share_a_graph_are_excluded_alike():
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(3)))

    for names in (("1",), ("2",), ("0.1", "2.1")):
        with pytest.raises(sf.InputError, match=r"SF106 .*exclude differs between 0 and [12]"):
            sf.convert(build(), regions="layers", recipe=recipes.MXFP8(), exclude=names)
        sf.convert(build(), regions="layers", exclude=names)
    model = build()
    conversion = sf.convert(model, regions="layers", recipe=recipes.MXFP8(), exclude=("0.1", "1.1", "2.1"))
    model(seeded_randn((4, 32), 1))
    assert set(reported(conversion).values()) == {"excluded"}


def test_layers_and_a_backend_take_a_recipe():
    family = FAMILIES["llama"]
    model = randomized(family.build()).eval()
    inputs = family.inputs()
    with torch.no_grad():
        plain = tensor_of(model(**inputs))
        conversion = sf.convert(model, recipe=recipes.MXFP8())
        whole = tensor_of(model(**inputs))
        conversion.undo()
        conversion = sf.convert(model, regions="layers", recipe=recipes.MXFP8())
        layers = tensor_of(model(**inputs))
        conversion.undo()
        options = {"recipe": recipes.MXFP8(), "exclude": ("lm_head",)}
        compiled: Any = torch.compile(model, backend="seqfuse", options=options)
        backend = tensor_of(compiled(**inputs))
    for y in (whole, layers, backend):
        assert float((y - whole).norm()) < 0.2 * float((plain - whole).norm())


def test_a_gemm_that_stands_alone_is_quantized():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sort(self.inner(torch.sort(x).values)).values

    model, x = Model(), seeded_randn((4, 32), 0)
    conversion = sf.convert(model, recipe=recipes.MXFP8())
    want = sf.Sequential(ops.Linear(32, 32, device="meta"), recipe=recipes.MXFP8())
    given = {"0.weight": model.inner.weight, "0.bias": model.inner.bias}
    y = torch.sort(torch.func.functional_call(want, given, (torch.sort(x).values,))).values
    torch.testing.assert_close(model(x), y)
    assert "quantized by MXFP8 (emulated on cpu): inner" in str(conversion)


def test_what_does_not_fit_is_said_before_anything_is_captured():
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 50), nn.GELU(), nn.Linear(50, 16))
    wrong: list[tuple[dict[str, Any], str, str]] = [
        ({"recipe": "mxfp8"}, "SF106", "recipe must be one of"),
        ({"recipe": recipes.MXFP8(), "exclude": "lm_head"}, "SF106", "exclude takes names of modules"),
        ({"recipe": recipes.MXFP8(), "exclude": None}, "SF106", "exclude takes names of modules"),
        ({"recipe": recipes.MXFP8(strict=True)}, "SF108", "MXFP8 is strict, and out_features 50 is not a"),
    ]
    for given, code, match in wrong:
        with pytest.raises(sf.InputError, match=match) as caught:
            sf.convert(model, **given)
        assert caught.value.code == code
        assert caught.value.path == ("1" if code == "SF108" else None)
    x = seeded_randn((4, 32), 0)
    conversion = sf.convert(model, recipe=recipes.MXFP8(strict=True), exclude=("1", "3"))
    model(x)
    conversion.undo()
    conversion = sf.convert(model, recipe=recipes.MXFP8())
    model(x)
    assert reported(conversion) == {
        "1": "out_features 50 is not a multiple of 16", "3": "in_features 50 is not a multiple of 16"
    }  # fmt: skip
