"""Non-tensors that represent tensors, such as proxies of torch.fx: tracers record the references."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.fx
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops

X = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

MODELS: dict[str, Any] = {
    "mlp": lambda: sf.Sequential(ops.Linear(16, 32), ops.GeLU(), ops.Linear(32, 16)),
    "norms": lambda: sf.Sequential(ops.LayerNorm(16), ops.Tanh(), ops.RMSNorm(16), ops.LayerScale(16)),
    "gated": lambda: sf.Sequential(ops.Linear(16, 64), ops.SwiGLU(), ops.Linear(32, 16), ops.QuickGeLU()),
    "residual": lambda: sf.Sequential(ops.Residual(ops.LayerNorm(16), ops.Linear(16, 16)), ops.RMSNorm(16)),
    "attention": lambda: sf.Sequential(
        ops.MergedLinear(16, (16, 16, 16)),
        ops.RotaryEmbedding(2, style="half"),
        ops.Attention(2, causal=True),
        ops.Linear(16, 16),
    ),
    "eager": lambda: sf.Sequential(ops.Linear(16, 8), nn.Softplus(), ops.Linear(8, 4)),
    "lone": lambda: ops.Linear(16, 4),
    "lone norm": lambda: ops.LayerNorm(16, zero_centered=True),
}


class Inside(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.head, self.inner = nn.Linear(16, 16), inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.head(x)) * 2


def _same_training(model: nn.Module, traced: nn.Module, x: Tensor = X) -> None:
    """Outputs and gradients agree, also after the parameters have changed."""
    with torch.no_grad():
        named = dict(model.named_parameters())
        for name, q in traced.named_parameters():
            named[name].add_(0.125)
            q.copy_(named[name])
    expected, y = model(x), traced(x)
    torch.testing.assert_close(y, expected)
    expected.square().sum().backward()
    y.square().sum().backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    for name, p in traced.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], msg=lambda said, name=name: f"{name}: {said}")


@pytest.mark.parametrize("around", [lambda model: model, Inside], ids=["itself", "inside"])
@pytest.mark.parametrize("name", MODELS)
def test_a_traced_model_is_the_model(name: str, around: Any) -> None:
    model = around(MODELS[name]()).double()
    traced = torch.fx.symbolic_trace(copy.deepcopy(model))
    assert {name for name, _ in traced.named_parameters()} == {name for name, _ in model.named_parameters()}
    _same_training(model, traced)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_has_run_is_traced_as_well(name: str) -> None:
    model = MODELS[name]().double()
    model(X)
    _same_training(model, torch.fx.symbolic_trace(copy.deepcopy(model)))
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(X), model(X))


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_is_copied_and_traced_again(name: str) -> None:
    model = MODELS[name]().double()
    traced = torch.fx.symbolic_trace(model)
    for again in (copy.deepcopy(traced), torch.fx.symbolic_trace(traced), torch.fx.Transformer(traced).transform()):
        again.graph.eliminate_dead_code()
        again.recompile()
        torch.testing.assert_close(again(X), model(X))


def test_a_bias_is_recorded_with_its_gemm() -> None:
    traced = torch.fx.symbolic_trace(MODELS["mlp"]())
    called = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert called == [torch._C._nn.linear, torch._C._nn.gelu, torch._C._nn.linear]


def test_a_torch_module_in_a_sequence_stays_a_module() -> None:
    traced = torch.fx.symbolic_trace(MODELS["eager"]())
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["1"]


@pytest.mark.parametrize("around", [lambda model: model, Inside], ids=["itself", "inside"])
def test_a_dropout_draws_anew_in_each_call_of_a_graph(around: Any) -> None:
    model = around(sf.Sequential(ops.Linear(16, 16), ops.Dropout(0.5), ops.DropPath(0.5))).double()
    traced = torch.fx.symbolic_trace(model)
    torch.manual_seed(3)
    once, twice = traced(X), traced(X)
    assert not torch.equal(once, twice)
    torch.manual_seed(3)
    torch.testing.assert_close(model(X), once)
    still = torch.fx.symbolic_trace(model.eval())
    assert torch.equal(still(X), still(X))


def test_channels_of_a_traced_sequence_are_passed_by_name() -> None:
    model = sf.Sequential(ops.Linear(16, 16), ops.Add("r"), ops.Fork("mid"), ops.LayerNorm(16)).double()
    traced = torch.fx.symbolic_trace(model)
    for got, wanted in zip(traced(X, r=X + 1), model(X, r=X + 1), strict=True):
        torch.testing.assert_close(got, wanted)


def test_what_needs_no_input_of_the_graph_takes_its_parameters_from_it() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("at", X[0])
            self.inner = sf.Sequential(ops.Linear(16, 8), ops.ReLU(), ops.Linear(8, 16))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(self.at)

    model = Table().double()
    model(X)  # it has a plan, and generated code
    before, traced = copy.deepcopy(model), torch.fx.symbolic_trace(model)
    assert [name for name, _ in traced.named_parameters()] == [name for name, _ in model.named_parameters()]
    _same_training(before, traced)
    assert torch.equal(model.inner(X), before.inner(X))


def test_a_hooked_operation_is_traced_with_its_hook() -> None:
    model = sf.Sequential(ops.Linear(16, 16), ops.Tanh()).double()
    model[0].register_forward_hook(lambda module, args, y: y * 3)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(X), model(X))


@pytest.mark.filterwarnings("ignore")
def test_quantization_by_graph_takes_a_sequence() -> None:
    quantize_fx = pytest.importorskip("torch.ao.quantization.quantize_fx")
    from torch.ao.quantization import default_dynamic_qconfig

    for build in (lambda: Inside(MODELS["residual"]()), MODELS["mlp"]):
        model, x = build().eval(), X.float()
        prepared = quantize_fx.prepare_fx(copy.deepcopy(model), {"": default_dynamic_qconfig}, (x,))
        torch.testing.assert_close(prepared(x), model(x))
        quantized = quantize_fx.convert_fx(prepared)
        assert str(quantized.graph).count("linear_dynamic") == len(
            [m for m in model.modules() if type(m) is ops.Linear]
        )
        assert (quantized(x) - model(x)).abs().max() < 0.1 * model(x).abs().max()


def test_a_tracer_with_leaves_of_its_own_keeps_them() -> None:
    class Whole(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, sf.Sequential) or super().is_leaf_module(m, module_qualified_name)

    model = Inside(MODELS["mlp"]()).double()
    graph = Whole().trace(model)
    assert [node.target for node in graph.nodes if node.op == "call_module"] == ["head", "inner"]
    torch.testing.assert_close(torch.fx.GraphModule(model, graph)(X), model(X))


class Written:
    """A proxy of another tracer: it represents a tensor by `__torch_function__`, and records the calls."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Written:
        log = next(a.log for a in args if isinstance(a, Written))
        log.append(func.__name__)
        return cls(log)


def test_a_tracer_that_is_not_of_torch_fx_sees_the_references() -> None:
    log: list[str] = []
    model = sf.Sequential(ops.Residual(ops.LayerNorm(16), ops.Linear(16, 16), ops.GeLU()), ops.SwiGLU())
    assert isinstance(model(Written(log)), Written)
    assert log == ["layernorm", "linear", "gelu", "add", "swiglu"]


def test_an_error_of_a_reference_is_its_own_where_tensors_are_given() -> None:
    with pytest.raises(sf.InputError, match="SF101"):
        torch.func.vmap(sf.Sequential(ops.SwiGLU(), ops.Residual(ops.SwiGLU())))(X)
