"""torch.compile of a sequence with Triton kernels: the planned fusions are operators in its graph."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.ops import _attention
from seqfuse.testing import assert_bitwise_equal, seeded_randn


class Cubed(sf.Pointwise):
    """y = x^3, of a user."""

    @triton.jit
    def value(x):
        return x * x * x

    @triton.jit
    def derivative(x):
        return 3.0 * x * x

    def reference(self, x: Tensor) -> Tensor:
        return x * x * x


class Wrapped(sf.UnfusedOperation):
    """A torch module as an operation."""

    class Saved(sf.Saved):
        x: Tensor
        weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6, bias=False)

    def reference(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        return self.inner(x), self.Saved(x=x, weight=self.inner.weight)

    def bwd(self, dy: Tensor, saved: Saved) -> tuple[Tensor, sf.Grads]:
        return dy @ saved.weight, {"inner.weight": dy.T @ saved.x}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Compiler:
    """A backend that runs AOT autograd's graph, and keeps its operators of this library."""

    def __init__(self) -> None:
        self.operators: list[list[str]] = []
        self.graphs = 0

    def _keep(self, graph: Any, inputs: Any) -> Any:
        from functorch.compile import make_boxed_func

        targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        self.operators.append([t.split(".")[1] for t in targets if t.startswith("seqfuse.")])
        return make_boxed_func(graph.forward)

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        self.graphs += 1
        return aot_autograd(fw_compiler=self._keep, bw_compiler=self._keep)(graph, inputs)


def small() -> sf.Sequential:
    inner = (ops.LayerNorm(6), ops.Linear(6, 8), ops.GELU("tanh"), ops.Dropout(0.3), ops.Linear(8, 6), ops.Dropout(0.2))
    return sf.Sequential(ops.Residual(*inner))


def mlp() -> sf.Sequential:
    return sf.Sequential(*small(), ops.Residual(ops.RMSNorm(6), ops.Linear(6, 16), ops.SwiGLU(), ops.Linear(8, 6)))


def with_a_barrier_and_channels() -> nn.Module:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            head = (ops.Linear(6, 6), ops.Fork("mid"), ops.SiLU(), nn.Softplus(), ops.Linear(6, 6), ops.Tanh())
            self.model = sf.Sequential(*head, ops.Add("side"), ops.Add("mid"), ops.LayerNorm(6), ops.Fork("end"))

        def forward(self, x: Tensor) -> Tensor:
            y, end = self.model(x, side=x.sin())
            return y * end.cos()

    return Wrapper()


def chains() -> nn.Module:
    return sf.Sequential(ops.Bias(6), ops.GELU(), ops.Scale(0.5), Cubed(), ops.LayerNorm(6), Cubed())


def heads() -> nn.Module:
    around = (ops.QKNorm(4, 2, 1), ops.RotaryEmbedding(2, 1, style="half", base=100.0))
    return sf.Sequential(ops.Linear(6, 16), *around, ops.Linear(16, 6))


MODELS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "mlp": (
        mlp,
        {"pointwise", "norm_backward"},
    ),
    "barrier and channels": (with_a_barrier_and_channels, {"pointwise", "norm"}),
    "chains": (chains, {"pointwise", "norm", "norm_backward"}),
    "heads": (heads, {"rope", "rope_backward"}),
}


def passes(model: Any, x: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    x = x.detach().requires_grad_()
    y = model(x)
    grads = torch.autograd.grad(y, [x, *model.parameters()], seeded_randn(tuple(y.shape), 9).to(y))
    return [y.detach(), *grads]


@pytest.mark.parametrize("name", MODELS)
def test_the_plan_is_in_the_graph_and_gives_the_bits_of_the_eager_one(name: str, device: torch.device):
    made, expected = MODELS[name]
    torch.manual_seed(0)
    model, compiler = made().to(device), Compiler()
    x = seeded_randn((5, 6), 0).to(device)
    want = passes(copy.deepcopy(model), x)
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    assert_bitwise_equal(passes(compiled, x), want)
    assert compiler.graphs == 1
    assert expected <= {name for graph in compiler.operators for name in graph}
    assert_bitwise_equal(passes(model, x), want)  # and the eager path still works


def test_nothing_is_saved_where_nothing_needs_a_gradient(device: torch.device):
    model, compiler = small().to(device).eval(), Compiler()
    x = seeded_randn((5, 6), 0).to(device)
    with torch.no_grad():
        want = model(x)
        assert_bitwise_equal(torch.compile(model, fullgraph=True, backend=compiler)(x), want)
    assert len(compiler.operators) == 1
    assert "pointwise" in compiler.operators[0]


def test_any_number_of_rows_is_compiled_once(device: torch.device):
    model, compiler = small().to(device), Compiler()
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    for rows in (3, 33):
        x = seeded_randn((rows, 6), rows).to(device)
        torch._dynamo.mark_dynamic(x, 0)
        torch.manual_seed(3)
        y = compiled(x)
        torch.manual_seed(3)
        torch.testing.assert_close(y, model(x))
    assert compiler.graphs == 1
    assert "pointwise" in compiler.operators[0]


def test_what_the_compiled_function_sets_is_what_is_planned(device: torch.device):
    model, x = small().to(device), seeded_randn((40, 6), 0).to(device)

    def both(t: Tensor) -> tuple[Tensor, Tensor]:
        model.train()
        model[0][3].p, model[0][5].p = 1.0, 0.0
        y = model(t)
        model.eval()
        model[0][0].eps = 10.0
        return y, model(t)

    want = both(x)
    model[0][3].p, model[0][5].p, model[0][0].eps = 0.3, 0.2, 1e-5
    got = torch.compile(both, fullgraph=True, backend=Compiler())(x)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)
    assert (model.training, model[0][3].p, model[0][0].eps) == (False, 1.0, 10.0)
    torch.testing.assert_close(model(x), want[1])


def test_an_operation_added_in_the_compiled_function_is_an_error(device: torch.device):
    model, x = sf.Sequential(ops.Linear(6, 6), ops.GELU()).to(device), seeded_randn((5, 6), 0).to(device)

    def grown(t: Tensor) -> Tensor:
        model.append(ops.Scale(-2.0))
        return model(t)

    with pytest.raises(Exception, match="changed inside the compiled function"):
        torch.compile(grown, fullgraph=True, backend=Compiler())(x)


def test_slices_made_while_tracing_go_by_their_references(device: torch.device):
    model = sf.Sequential(ops.Linear(6, 6), ops.GELU(), ops.Linear(6, 6)).to(device).eval()
    x = seeded_randn((5, 6), 0).to(device)
    got = torch.compile(lambda t: model[1:](model[:1](t)), fullgraph=True, backend=Compiler())(x)
    torch.testing.assert_close(got, model(x))


def test_with_fusing_off_the_references_are_compiled(device: torch.device):
    model, compiler = small().to(device).eval(), Compiler()
    x = seeded_randn((5, 6), 0).to(device)
    with sf.fusing(False):
        got = torch.compile(model, fullgraph=True, backend=compiler)(x)
        torch.testing.assert_close(got, model(x))
    assert not any(compiler.operators)


def test_a_backend_that_keeps_the_graph_runs_the_engine(device: torch.device):
    model, x = small().to(device), seeded_randn((5, 6), 0).to(device)
    want = passes(model, x)
    assert_bitwise_equal(passes(torch.compile(model, fullgraph=True, backend="eager"), x), want)


def test_tied_weights(device: torch.device):
    model = sf.Sequential(ops.Linear(6, 6), ops.GELU(), ops.Linear(6, 6)).to(device)
    model[2].weight = model[0].weight
    x = seeded_randn((5, 6), 0).to(device)
    want = passes(model, x)
    for one, other in zip(passes(torch.compile(model, fullgraph=True, backend=Compiler()), x), want, strict=True):
        torch.testing.assert_close(one, other)


def test_a_torch_module_in_an_operation_is_planned_unless_a_tensor_with_a_graph_is_its_weight(device: torch.device):
    model, x = sf.Sequential(Wrapped(), ops.Linear(6, 6), ops.GELU()).to(device), seeded_randn((5, 6), 0).to(device)
    planned, replaced = Compiler(), Compiler()
    assert_bitwise_equal(passes(torch.compile(model, fullgraph=True, backend=planned), x), passes(model, x))
    assert "pointwise" in planned.operators[0]
    scale = torch.tensor(2.0, device=device, requires_grad=True)
    weight = model[0].inner.weight.detach()
    del model[0].inner.weight
    model[0].inner.weight = scale * weight
    y = torch.compile(model, fullgraph=True, backend=replaced)(x)
    torch.testing.assert_close(y, model(x))
    (got,) = torch.autograd.grad(y.sum(), scale, retain_graph=True)
    torch.testing.assert_close(got, torch.autograd.grad(model(x).sum(), scale)[0])


def test_an_eager_run_that_is_recorded_calls_operators(device: torch.device):
    from torch.fx.experimental.proxy_tensor import make_fx

    model, x = sf.Sequential(ops.Linear(6, 6), ops.GELU()).to(device), seeded_randn((5, 6), 0).to(device)
    graph = make_fx(lambda t: model(t))(x)
    assert "seqfuse.pointwise" in graph.code
    assert_bitwise_equal(graph(2 * x), model(2 * x).detach())


def test_a_launch_that_would_be_lost_is_an_error(device: torch.device):
    from torch.fx.experimental.proxy_tensor import make_fx

    from seqfuse.kernels import _device

    with pytest.raises(RuntimeError, match="_column_sums_kernel was launched where a compiler records"):
        make_fx(lambda t: _device.column_sums(t, 4, t.new_empty(4)))(torch.ones(3, 4, device=device))


@pytest.mark.parametrize(
    "ours",
    [pytest.param(False, marks=pytest.mark.full, id="attention of torch"), pytest.param(True, id="attention of ours")],
)
def test_a_transformer(ours: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_attention, "interpreting", ours)
    layer: dict[str, Any] = {"norm": ops.RMSNorm, "activation": ops.SwiGLU, "hidden_dim": 12, "causal": True}
    model, compiler = sf.nn.TransformerStack(1, 8, 2, kv_heads=1, dropout=0.1, **layer).to(device), Compiler()
    x = seeded_randn((2, 5, 8), 0).to(device)
    want = passes(copy.deepcopy(model), x)
    for one, other in zip(passes(torch.compile(model, fullgraph=True, backend=compiler), x), want, strict=True):
        torch.testing.assert_close(one, other)
    called = {name for graph in compiler.operators for name in graph}
    assert {"pointwise", "norm_backward"} <= called
    assert ("attention_backward" in called) == ours


def test_inductor_calls_the_operators(device: torch.device, quick_inductor: None):
    model, x = (
        sf.Sequential(ops.Linear(6, 8), ops.GELU(), ops.Linear(8, 6)).to(device),
        seeded_randn((5, 6), 0).to(device),
    )
    want = passes(model, x)
    found = passes(torch.compile(model, fullgraph=True), x)
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.full), torch.bfloat16], ids=str)
def test_under_autocast(dtype: torch.dtype, device: torch.device):
    model, x = small().to(device), seeded_randn((5, 6), 0, dtype=dtype).to(device)
    compiled = torch.compile(model, fullgraph=True, backend=Compiler())
    with torch.autocast(device.type, torch.bfloat16):
        torch.manual_seed(3)
        want = model(x)
        torch.manual_seed(3)
        found = compiled(x)
    assert found.dtype is want.dtype
    torch.testing.assert_close(found, want, rtol=0.02, atol=0.02)


def test_a_copy_and_a_pickle_are_found_by_names_of_their_own(device: torch.device):
    model, x = sf.Sequential(ops.Linear(6, 6), ops.GELU()).to(device).eval(), seeded_randn((5, 6), 0).to(device)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            other[0].weight.mul_(2)
            got = torch.compile(other, fullgraph=True, backend=Compiler())(x)
            assert_bitwise_equal(got, other(x))
        assert not torch.equal(got, model(x))
