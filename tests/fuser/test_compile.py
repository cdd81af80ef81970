"""torch.compile without a graph break, cold and warm, forward and backward, with a batch that changes; torch.export."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import seqfuse as sf
from seqfuse import ops

from .fusions import BiasTanhForward, BiasTanhJoint
from .kit import assert_same, draw, mlp, passes, randomize


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Compiler:
    """A backend that runs the graph, or AOT autograd's graph of it, and counts."""

    def __init__(self, aot: bool = True) -> None:
        self.graphs: list[Any] = []
        self.aot = aot

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        self.graphs.append(graph)
        return aot_eager(graph, inputs) if self.aot else graph.forward


def every_operation(dropout: float = 0.0) -> sf.Sequential:
    model = sf.Sequential(
        ops.LayerNorm(6), ops.Linear(6, 8), ops.GeLU(), ops.Residual(ops.RMSNorm(8), ops.Linear(8, 8), ops.SiLU()),
        ops.Bias(8), ops.Tanh(), ops.Dropout(dropout), sf.Sequential(ops.SwiGLU(), ops.Scale(-0.7)),
        ops.Reshape(2, 2), ops.Reshape(4, dims=2), ops.Sigmoid(), ops.QuickGeLU(), ops.ReLU(), ops.GEGLU("tanh"),
        fusions=(BiasTanhForward,),
    )  # fmt: skip
    randomize(model)
    return model.double()


def with_channels() -> nn.Module:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = sf.Sequential(ops.Linear(6, 6), ops.Fork("mid"), ops.Tanh(), ops.Add("side"))

        def forward(self, x: Tensor) -> Tensor:
            y, mid = self.model(x, side=x.sin())
            return y * mid

    model = Wrapper()
    randomize(model)
    return model.double()


def with_a_barrier() -> nn.Module:
    model = sf.Sequential(ops.Linear(6, 6), nn.Softplus(), ops.Residual(ops.Tanh(), nn.ELU()), ops.Linear(6, 3))
    randomize(model)
    return model.double()


def with_tied_weights() -> nn.Module:
    model = sf.Sequential(ops.Linear(6, 6), ops.Tanh(), ops.Linear(6, 6))
    model[2].weight = model[0].weight
    randomize(model)
    return model.double()


def deep() -> nn.Module:
    model = sf.Sequential(*(ops.Residual(ops.LayerNorm(6), ops.Linear(6, 6), ops.Tanh()) for _ in range(3)))
    randomize(model)
    return model.double()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "every operation": every_operation,
    "channels": with_channels,
    "a barrier": with_a_barrier,
    "tied weights": with_tied_weights,
    "deep": deep,
}


@pytest.mark.parametrize(
    ("make", "warm"),
    [
        *(
            pytest.param(make, False, id=f"{name}, cold", marks=[pytest.mark.full] * (make is deep))
            for name, make in MODELS.items()
        ),
        pytest.param(every_operation, True, id="every operation, warm", marks=pytest.mark.full),
        pytest.param(with_channels, True, id="channels, warm"),
    ],
)
def test_a_compiled_model_gives_the_numbers_and_gradients_of_the_eager_one(make: Callable[[], nn.Module], warm: bool):
    model, x, compiler = make(), draw(5, 6), Compiler(aot=not warm)
    want = passes(model if warm else copy.deepcopy(model), x)
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    found = passes(compiled, x)
    assert len(compiler.graphs) == 1
    assert_same(dict(zip(want, found.values(), strict=True)), want, 1e-10)
    again = passes(model, x)
    assert_same(again, want, 1e-12)  # and the eager path still works


def layer(eps: float = 1e-5, factor: float = 0.5) -> nn.Module:
    members = (ops.LayerNorm(6, eps=eps), ops.Linear(6, 6, bias=False), ops.Scale(factor))
    model = sf.Sequential(ops.Residual(*members), sf.Sequential(ops.Bias(6)))
    randomize(model)
    return model.double()


@torch._dynamo.config.patch(recompile_limit=4)
def test_layers_compiled_one_by_one_share_a_graph_and_others_have_their_own():
    compiler, x = Compiler(aot=False), draw(5, 6)
    alike = [layer() for _ in range(5)]  # more than there may be graphs of one function
    others = [layer(eps=0.1), layer(factor=3.0)]
    graphs: list[int] = []
    for model in (*alike, *others, layer()):
        want = passes(copy.deepcopy(model), x)
        model.compile(fullgraph=True, backend=compiler)
        assert_same(passes(model, x), want, 1e-10)
        graphs.append(len(compiler.graphs))
    assert graphs[: len(alike)] == [1] * len(alike)
    assert graphs[0] < graphs[len(alike)] < graphs[len(alike) + 1]  # another eps, another factor
    assert graphs[-1] == graphs[-2]


def test_a_marked_batch_dimension_compiles_once():
    model, compiler = mlp(fusions=(BiasTanhJoint,)), Compiler()
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    for rows in (3, 33):
        x = draw(rows, 5)
        torch._dynamo.mark_dynamic(x, 0)
        y = compiled(x)
        torch.testing.assert_close(y, model(x))
        model.zero_grad()
        y.backward(draw(rows, 3, seed=2))
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model(x).backward(draw(rows, 3, seed=2))
        for a, p in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(a, p.grad)
    assert len(compiler.graphs) == 1


def test_a_batch_that_changes_unannounced_compiles_twice_at_most():
    model, compiler = mlp(), Compiler(aot=False)
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    for rows in (3, 7, 16, 33, 2):
        torch.testing.assert_close(compiled(draw(rows, 5)), model(draw(rows, 5)))
    assert len(compiler.graphs) <= 2


def test_dropout_under_compile_is_random_reproducible_and_the_same_in_backward():
    model, x = sf.Sequential(ops.Linear(5, 9), ops.Dropout(0.5)).double(), draw(40, 5)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.manual_seed(1)
    y = compiled(x.requires_grad_())
    y.backward(torch.ones_like(y))
    dropped = y == 0
    assert 0.3 < dropped.double().mean() < 0.7
    torch.testing.assert_close(model[0].bias.grad, 2.0 * (~dropped).double().sum(0))
    z = compiled(x)
    assert not torch.equal(z == 0, dropped)
    torch.manual_seed(1)
    assert torch.equal(compiled(x), y)
    torch.manual_seed(1)
    assert torch.equal(model(x) == 0, dropped), "eager drops the same elements"
    model.eval()
    torch.testing.assert_close(compiled(x), model(x))
    assert not (compiled(x) == 0).any()


def test_modes_set_inside_a_compiled_function_compile_once():
    model, x, compiler = mlp(dropout=0.5), draw(4, 5), Compiler(aot=False)

    @torch.compile(fullgraph=True, backend=compiler)
    def both(t: Tensor) -> tuple[Tensor, Tensor]:
        model.train()
        y = model(t)
        model.eval()
        return y, model(t)

    for _ in range(4):
        torch.manual_seed(3)
        y, z = both(x)
    assert len(compiler.graphs) <= 2
    assert not model.training
    torch.testing.assert_close(model(x), z)
    model.train()
    torch.manual_seed(3)
    torch.testing.assert_close(model(x), y)


def test_what_a_compiled_function_sets_is_seen_by_eager_calls():
    model, x = sf.Sequential(ops.Dropout(0.5), ops.Tanh()), torch.ones(30, 30)
    assert (model(x) == 0).any()

    @torch.compile(fullgraph=True, backend="eager")
    def off(t: Tensor) -> Tensor:
        model[0].p = 0.0
        return model(t)

    assert not (off(x) == 0).any()
    assert not (model(x) == 0).any()


def test_a_mutation_after_compiling_is_seen():
    model, x = sf.Sequential(ops.LayerNorm(5), ops.Linear(5, 7)).double(), draw(4, 5)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    before = compiled(x)
    model.append(ops.Scale(-2.0))
    torch.testing.assert_close(compiled(x), -2.0 * before)
    model[0].eps = 0.5
    torch.testing.assert_close(compiled(x), model(x))
    model[1].weight = nn.Parameter(draw(7, 5, seed=4))
    torch.testing.assert_close(compiled(x), model(x))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    model.requires_grad_(False)
    assert not compiled(x).requires_grad


def test_autocast_around_a_compiled_model():
    half = torch.bfloat16
    model, x = mlp(dtype=torch.float32), draw(9, 5, dtype=torch.float32)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", half):
        found, want = compiled(x), model(x)
    assert found.dtype == want.dtype == half
    torch.testing.assert_close(found, want, rtol=4 * torch.finfo(half).eps, atol=4 * torch.finfo(half).eps)
    found.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_fusing_regions_and_other_users_of_the_list_compile():
    model, x = mlp(fusions=(BiasTanhJoint,)), draw(4, 5)

    @torch.compile(fullgraph=True, backend="eager")
    def function(t: Tensor) -> Tensor:
        return model[1:3](model[0](t)).sum(-1)

    torch.testing.assert_close(function(x), model[1:3](model[0](x)).sum(-1))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with sf.fusing(False):
        torch.testing.assert_close(compiled(x), model(x))


def test_a_wrong_shape_is_an_error_under_compile_too():
    compiled = torch.compile(mlp(), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"(?i)shape|dimension"):
        compiled(draw(4, 6))


class Breaks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        if len(x) == 3:
            raise ValueError("three rows")
        return 2 * x


def test_a_graph_break_in_a_module_inside_runs_the_sequence_as_without_compile():
    """The engine's own frames are not compiled, and an error of the module is its own."""
    model = sf.Sequential(ops.Linear(4, 4), Breaks(), ops.ReLU())
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(torch.ones(5, 4)), model(torch.ones(5, 4)))
    assert counters["frames"]["total"] == 1
    with pytest.raises(ValueError, match="three rows"):
        compiled(torch.ones(3, 4))


def test_a_hook_on_an_operation_fires_under_compile():
    model, x = mlp(), draw(4, 5)
    model[2].register_forward_hook(lambda module, args, out: -out)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    want = passes(model, x)
    assert_same(dict(zip(want, passes(compiled, x).values(), strict=True)), want, 1e-10)


def test_a_model_compiles_in_place_and_inside_another():
    model, x = mlp(), draw(4, 5)
    want = passes(model, x)
    outer = nn.Sequential(model, nn.Tanh())
    torch.testing.assert_close(
        torch.compile(outer, fullgraph=True, backend="eager")(x), torch.tanh(want["out"]), check_dtype=True
    )
    model.compile(fullgraph=True, backend="aot_eager")
    assert_same(passes(model, x), want, 1e-10)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["residual", "operation", "container"])
def test_a_member_compiled_by_itself_runs_compiled(which: int):
    model = sf.Sequential(
        ops.Residual(ops.Linear(5, 5), ops.Tanh()), ops.Linear(5, 5), sf.Sequential(ops.Scale(2.0), ops.Tanh())
    )
    randomize(model.double())
    x, compiler = draw(4, 5), Compiler()
    want = passes(model, x)
    model[which].compile(fullgraph=True, backend=compiler)
    assert_same(passes(model, x), want, 1e-12)
    assert len(compiler.graphs) == 1
    assert [(a.name, a.reason) for a in model.plan(x).eager] == [
        (type(model[which]).__name__, "it is compiled by itself")
    ]


@pytest.mark.full  # half a minute of C++ compilation; test_inductor_calls_the_operators runs by default
def test_inductor_forward_and_backward(quick_inductor: None):
    model, x = mlp(dropout=0.5), draw(5, 5)
    torch.manual_seed(3)
    want = passes(model, x)
    compiled = torch.compile(model, fullgraph=True)
    torch.manual_seed(3)
    with torch._inductor.config.patch(fallback_random=True):
        found = passes(compiled, x)
    assert_same(dict(zip(want, found.values(), strict=True)), want, 1e-9)


@pytest.mark.parametrize(
    ("make", "warm", "strict"),
    [
        pytest.param(every_operation, False, False, id="every operation, cold"),
        pytest.param(every_operation, False, True, id="every operation, cold, strict", marks=pytest.mark.full),
        pytest.param(with_channels, True, False, id="channels, warm"),
        pytest.param(with_channels, True, True, id="channels, warm, strict"),
        pytest.param(with_a_barrier, True, False, id="a barrier, warm"),
        pytest.param(with_a_barrier, False, False, id="a barrier, cold"),
    ],
)
def test_export_gives_the_same_outputs_for_any_batch(make: Callable[[], nn.Module], warm: bool, strict: bool):
    model, x = make().eval(), draw(5, 6)
    if warm:
        model(x)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},), strict=strict)
    for rows in (5, 2, 17):
        torch.testing.assert_close(program.module()(draw(rows, 6)), model(draw(rows, 6)))
    assert set(program.state_dict) == set(model.state_dict())


def test_export_of_a_model_in_training_holds_its_gradients():
    model, x = mlp().train(), draw(4, 5)
    program = torch.export.export(model, (x,)).module()
    want, found = passes(model, x), passes(program, x)
    assert_same(dict(zip(want, found.values(), strict=True)), want, 1e-10)


def test_exported_dropout_draws_its_seed_at_run_time():
    model, x = sf.Sequential(ops.Dropout(0.5)).train(), draw(8, 9)
    program = torch.export.export(model, (x,)).module()
    masks = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        masks.append(program(x) == 0)
    assert torch.equal(masks[0], masks[2])
    assert not torch.equal(masks[0], masks[1])


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace.*:DeprecationWarning")
def test_a_jit_trace_takes_any_batch():
    model, x = mlp(fusions=(BiasTanhJoint,)), draw(3, 5)
    model(x)
    traced = torch.jit.trace(model, (x,))
    for rows in (3, 8):
        torch.testing.assert_close(traced(draw(rows, 5, seed=2)), model(draw(rows, 5, seed=2)))


def test_checkpointing_and_compiling_combine():
    model = sf.Sequential(ops.Linear(5, 3), ops.Dropout(0.5)).double()
    x, dy = draw(4, 5), draw(4, 3, seed=2)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    results = []
    for run in (
        model,
        lambda t: checkpoint(compiled, t, use_reentrant=False),
        torch.compile(lambda t: checkpoint(model, t, use_reentrant=False), fullgraph=True, backend="aot_eager"),
    ):
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        results.append([y.detach(), *torch.autograd.grad(y, [leaf, *model.parameters()], dy)])
    for a, b, c in zip(*results, strict=True):
        assert a.abs().max() > 0
        torch.testing.assert_close(b, a)
        torch.testing.assert_close(c, a)


def test_compiled_autograd_compiles_the_backward_of_a_compiled_model_as_one_graph():
    model, x = sf.Sequential(ops.LayerNorm(4), ops.Linear(4, 4), ops.Tanh()), torch.randn(3, 4)
    leaves = [x.requires_grad_(), *model.parameters()]
    want = torch.autograd.grad(model(x).sum(), leaves)
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda t: model(t).sum(), backend="aot_eager", fullgraph=True)(x).backward()
    for leaf, g in zip(leaves, want, strict=True):
        torch.testing.assert_close(leaf.grad, g)


@pytest.mark.filterwarnings("ignore")  # the compiler warns of what it does not trace
def test_compiled_autograd_follows_one_node_to_the_next():
    model, x = nn.Sequential(sf.Sequential(ops.Scale(2.0)), sf.Sequential(ops.Linear(4, 4))), torch.randn(3, 4)
    leaves = [x.requires_grad_(), *model.parameters()]
    want = torch.autograd.grad(model(x).sum(), leaves)
    y = model(x)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        y.sum().backward()
    for leaf, g in zip(leaves, want, strict=True):
        torch.testing.assert_close(leaf.grad, g)
