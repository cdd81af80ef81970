"""Converted models and compilers: torch.compile around and inside them, its backends, traces and graph breaks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import seqfuse as sf
from seqfuse.convert import backend as seqfuse_backend
from seqfuse.convert.capture import compiled_rest
from seqfuse.convert.rewrite import RewriteOptions, rewrite

from .comparing import assert_equal, assert_same, passes, recorded
from .residual import Block, Net, X, chains, pair


def test_calls_beyond_the_limit_of_dynamo_run_as_before_and_the_report_says_so():
    model, plain, conversion = pair()
    with torch._dynamo.config.patch(recompile_limit=2):
        for eps in (0.1, 0.2, 0.3):
            model.layers[0].norm.eps = plain.layers[0].norm.eps = eps
            assert_equal(passes(model, X), passes(plain, X))
    assert len(conversion.graphs) == 2
    assert [graph.limit for graph in conversion.graphs] == [None, 2]
    assert "the last of 2 graphs of its code: calls that fit none of them run as before. Raise torch." in str(
        conversion
    )
    assert "2 calls ran as before the conversion: Dynamo captured nothing for them" in str(conversion)


def test_undo_leaves_what_compile_did():
    model = Net()
    model.compile(backend="eager")
    before = model._compiled_call_impl
    sf.convert(model).undo()
    assert model._compiled_call_impl is before


@pytest.mark.parametrize("backend", ["seqfuse", seqfuse_backend])
def test_torch_compile_takes_the_backend(backend: Any):
    model = Net()
    wanted = passes(model, X)
    assert_equal(passes(torch.compile(model, backend=backend), X), wanted)  # pyright: ignore


def test_chains_run_where_a_compiler_captures_the_code_around_the_model():
    model, plain, conversion = pair()
    whole, part, called = torch.compile(model, backend="eager"), nn.Sequential(model, nn.Tanh()), 1
    for compiled, wanted in ((whole, plain), (torch.compile(part, backend="eager"), nn.Sequential(plain, nn.Tanh()))):
        for _ in range(2):
            assert_equal(passes(compiled, X), passes(wanted, X))
            called += 1
            (graph,) = conversion.graphs
            assert graph.captured is not None
            assert graph.captured.calls == called
    y = part(X)
    assert_equal(passes(torch.compile(model, backend="eager", fullgraph=True), X), passes(plain, X))
    assert sum(graph.captured.calls for graph in conversion.graphs if graph.captured is not None) == called + 2
    assert "unconverted" not in str(conversion)
    with pytest.warns(UserWarning, match="Net was compiled unconverted, in a graph that must not break"):
        torch.testing.assert_close(torch.compile(part, backend="eager", fullgraph=True)(X), y)
    assert "fullgraph=True" in str(conversion)


def test_compiling_a_converted_model_in_place_ends_its_conversion():
    model, plain, conversion = pair()
    assert_equal(passes(model, X), passes(plain, X))
    before = str(conversion)
    model.compile(backend="eager")
    assert_equal(passes(model, X), passes(plain, X))
    assert str(conversion) == before + (
        "\nNet runs unconverted since model.compile(): torch.compile(model) keeps the conversion"
    )
    with pytest.raises(sf.InputError, match="is not converted"):
        sf.conversion(model)
    conversion.undo()
    assert "since model.compile()" not in str(conversion)


def test_traces_take_the_model_in():
    model, plain, _ = pair()
    y = plain(X)
    torch.testing.assert_close(torch.jit.trace(model, X, check_trace=False)(X), y)
    torch.testing.assert_close(torch.export.export(model, (X,)).module()(X), y)


class Broken(Net):
    """Breaks the graph, reads a number, and switches modes on its way."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x = self.layers[0](x)
        torch._dynamo.graph_break()
        with torch.no_grad():
            scale = self.layers[1](x).abs().max()
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            x = self.layers[1](x) / scale
        return x * (1 if x.sum().item() > 0 else 2)


def test_graph_breaks_numbers_and_modes_within_a_model_stay():
    conversion = assert_same(Broken(depth=2), X)
    assert len(conversion.graphs) > 1
    assert chains(conversion)


class Repeated(Net):
    """A call without gradients, and an equal one with them."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        with torch.no_grad():
            scale = 1 / (x * 2).abs().amax(-1, keepdim=True)
        return self.layers[0].fc(x * 2) * scale


def test_a_call_without_gradients_does_not_stand_for_an_equal_one_with_them():
    assert chains(assert_same(Repeated(), X))


class Switched(Net):
    """A region without autocast within one with it, and GEMMs behind it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            with torch.autocast("cpu", enabled=False):
                x = torch.sin(x)
            return self.layers[0].out(F.gelu(self.layers[0].fc(x)))


def test_the_end_of_an_inner_region_of_autocast_does_not_end_the_outer_one():
    conversion = sf.convert(Switched().float())
    assert conversion.model(X.float()).dtype is torch.bfloat16
    assert chains(conversion)
    assert not conversion.graphs[0].left


@pytest.mark.parametrize("value", [True, False])
def test_settings_of_dynamo_are_after_a_capture_what_they_were(value: bool):
    shortcuts = dict.fromkeys(("skip_nnmodule_hook_guards", "use_recursive_dict_tags_for_guards"), value)
    with torch._dynamo.config.patch(shortcuts):
        conversion = sf.convert(Broken(depth=2))
        conversion.model(X)
        assert len(conversion.graphs) > 1
        assert {name: getattr(torch._dynamo.config, name) for name in shortcuts} == shortcuts


class Asking(Net):
    """Asks whether it is exported, as models of Hugging Face do to decide on a mask."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if torch.compiler.is_exporting() else 1)


def test_a_converted_model_is_not_exported():
    assert chains(assert_same(Asking(), X))


def test_the_rest_may_go_through_inductor(quick_inductor: None):
    model = nn.Sequential(Block(), nn.Softmax(-1)).float()
    x = X.float()
    wanted = passes(model, x)
    conversion = sf.convert(model, then="inductor")
    assert_equal(passes(model, x), wanted, 1e-5)
    assert chains(conversion)


class BetweenOthers(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.sin().cos()).exp().sin()


def test_each_stretch_beside_a_region_is_compiled_as_one():
    graph, _ = recorded(BetweenOthers().double(), X, renames=True, tensors=lambda y: [y])
    rewrite(graph, RewriteOptions())
    parts: Any = compiled_rest(graph)
    assert [type(part).__name__ for part in parts.__self__.children()] == ["_Compiled", "GraphModule", "_Compiled"]


@pytest.mark.parametrize("captured", [False, True], ids=["before its first call", "after it"])
def test_make_fx_records_the_calls_of_a_converted_model_as_they_were(captured: bool):
    model = Net()
    wanted = make_fx(Net())(X)
    conversion = sf.convert(model)
    if captured:
        model(X)
    traced = make_fx(model)(X)
    torch.testing.assert_close(traced(X), wanted(X))
    assert [node.target for node in traced.graph.nodes] == [node.target for node in wanted.graph.nodes]
    assert len(conversion.graphs) == captured
