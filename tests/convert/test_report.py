"""The report of a conversion: calls, graphs and where they end, chains and their bytes, and calls left eager."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

import seqfuse as sf
from seqfuse.convert import GraphReport, Left
from seqfuse.convert.calls import Break, Captured
from seqfuse.convert.launches import Launches
from seqfuse.convert.report import _folded as folded
from seqfuse.pictures.text import extra_time, sized
from tests.watching import bytes_of, saving

from .comparing import passes
from .residual import Net, X


class Settled(Net):
    """Sets an attribute that it reads in its first call, as a Hugging Face classifier sets `problem_type`."""

    kind: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kind is None:
            self.kind = "one"
        return super().forward(x)


def test_graphs_that_are_alike_are_printed_once():
    model = Settled()
    conversion = sf.convert(model)
    passes(model, X)
    once = str(conversion)
    passes(model, X)
    assert [graph.again for graph in conversion.graphs] == [False, True]
    assert str(conversion).splitlines() == [
        "graph 0: training, x [3, 8]; 1 call, none since call 1 of 2",
        *once.splitlines()[1:],
        "  alike: graph 1: training, x [3, 8]; 1 call",
        "  captured again because a call differed, TORCH_LOGS=recompiles says in what",
    ]


def test_chains_that_are_alike_are_printed_once():
    layers = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Softplus()) for _ in range(3)]
    conversion = sf.convert(model := nn.Sequential(*layers))
    model(torch.randn(4, 8, requires_grad=True))
    assert "\n  3 chains, each of 2 operations: LayerNorm, Linear\n      forward: " in str(conversion)
    assert str(conversion).count("forward: ") == 1


class WithASequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.ours = sf.Sequential(sf.ops.LayerNorm(8), sf.ops.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.ours(self.first(x))


def test_the_report_names_sequences_of_this_library_and_says_when_it_is_undone():
    model = WithASequence()
    conversion = sf.convert(model)
    assert str(conversion).startswith("nothing captured yet")
    model(X.float())
    assert str(conversion).startswith(
        "graph 0: training, x [3, 8]; 1 call\n  chain of 3 operations: Linear, LayerNorm, Linear\n"
    )
    assert str(conversion).endswith("Sequential ours: traced as torch calls; its own plan and fusions are not used")
    assert "undone" not in str(conversion) + repr(conversion)
    conversion.undo()
    assert str(conversion).startswith("undone; what had been converted:\ngraph 0")
    assert repr(conversion) == "<Conversion of WithASequence, 1 graph, undone>"


class Beside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(x)
        return self.first(y), self.second(y)


def test_the_report_names_as_many_operations_as_it_counts():
    model = Beside()
    conversion = sf.convert(model)
    model(X.float())
    assert "chain of 3 operations: LayerNorm, Linear, Linear\n" in str(conversion)


@pytest.mark.parametrize("lowered", [True, False], ids=["under autocast", "and saves the least"])
def test_the_report_counts_the_bytes_that_a_chain_saves(lowered: bool):
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Linear(8, 8))
    model[3].requires_grad_(False)
    conversion = sf.convert(model, memory="fast" if lowered else "lean")
    with torch.autocast("cpu", torch.bfloat16, lowered):
        model(X.float())
        with saving() as kept:
            y = model(X.float())
    saved = bytes_of(kept, model)
    assert y.requires_grad
    assert ("1.00x unfused" in str(conversion)) is lowered
    plan = conversion.graphs[0].regions[0].plan
    assert plan is not None
    assert plan.memory is not None
    assert plan.memory.saved == saved
    assert f" saved for backward: {sized(saved, plan.memory.saved_unfused)}, " in str(conversion)
    assert plan.fused != (0, 0), "a report leaves the plan of the last call as it was"
    with torch.no_grad():
        model(X.float())
    assert re.search(r"\n +forward: \d steps?, \d fused; without gradients\n", str(conversion))
    assert "launches" not in str(conversion)
    assert re.search(r"\n +kernel launches: \d+; eager torch \d+\n", conversion.report(launches=True))


class Shared(nn.Module):
    """Attention with GQA, a mask and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).split((16, 8, 8), -1)
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (q, k, v))
        seen = torch.ones(5, 5, dtype=torch.bool).tril(1)  # attention that needs no mask is counted without one
        y = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), seen)
        return F.dropout(self.out(y.transpose(1, 2).flatten(2)), 0.1) + x


@pytest.mark.parametrize("lowered", [True, False], ids=["under autocast", "in float32"])
def test_the_report_counts_the_bytes_that_eager_torch_saves(lowered: bool):
    model, x = Shared(), torch.randn(2, 5, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, lowered):
        with saving() as kept:
            y = model(x)
        conversion = sf.convert(model)
        model(x)
    eager = bytes_of(kept, model)
    assert y.requires_grad
    assert conversion.graphs[0].operations == 6
    (region,) = conversion.graphs[0].regions
    assert region.eager is not None
    assert region.eager.saved == eager
    assert re.search(rf", 0\.\d\dx eager torch \({re.escape(sized(eager))}\)", str(conversion))


class Shifted(nn.Module):
    """Dynamo does not trace a set of tensors, and breaks the graph within an expression that reads one."""

    def __init__(self) -> None:
        super().__init__()
        self.shifts, self.norm, self.fc = {torch.ones(8)}, nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.fc(self.norm(x + sum(self.shifts))))


def line_of(function: Any, text: str) -> str:
    lines, first = inspect.getsourcelines(function)
    return f"test_report.py:{first + next(i for i, line in enumerate(lines) if text in line)} in forward"


def test_a_model_of_which_nothing_was_captured_says_that_it_was_called_and_why():
    model = Shifted()
    conversion = sf.convert(model)
    assert str(conversion) == "nothing captured yet: call the model"
    model(X.float())
    model(X.float())
    at = line_of(Shifted.forward, "self.shifts")
    why = f"Dynamo left the code at {at}: Attempted to wrap a set with tensors"
    assert str(conversion).splitlines()[0] == f"called 2 times; nothing was captured: {why}"
    assert {(left.kind, left.module) for left in conversion.left} == {("norm", "norm"), ("GEMM", "fc")}


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.inner = nn.Linear(8, 8), Shifted()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.relu(self.fc(x)))


@pytest.mark.parametrize(
    ("build", "left"),
    [
        pytest.param(Around, {"inner.fc": "Shifted", "inner.norm": "Shifted"}, id="a submodule"),
        pytest.param(
            lambda: nn.Sequential(nn.Linear(8, 8), Shifted()),
            {"0": "Sequential", "1.fc": "Shifted", "1.norm": "Shifted"},
            id="in the loop of a Sequential",
        ),
    ],
)
def test_modules_that_no_graph_has_are_left_with_the_line_at_which_dynamo_left_their_code(
    build: Callable[[], nn.Module], left: dict[str, str]
):
    model = build()
    conversion = sf.convert(model)
    model(X.float())
    at = f"{line_of(Shifted.forward, 'self.shifts')}: Attempted to wrap a set with tensors"
    assert {one.module: one.reason for one in conversion.left} == {
        path: f"in no graph, as Dynamo left the code of {name} at {at}" for path, name in left.items()
    }
    assert all(
        f"\nleft: {one.kind} {one.call} in {one.module}: {one.reason}" in str(conversion) for one in conversion.left
    )


def test_modules_of_an_earlier_graph_are_left_once_dynamo_leaves_their_code():
    model = Around()
    shifts, model.inner.shifts = model.inner.shifts, set()
    conversion = sf.convert(model)
    model(X.float())
    assert conversion.left == ()
    model.inner.shifts = shifts
    model(X.float())
    assert {left.module for left in conversion.left} == {"inner.fc", "inner.norm"}


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3))
        self.layers, self.norm, self.head = nn.ModuleList(layers), nn.LayerNorm(16), nn.Linear(16, 8)
        self.ours = sf.Sequential(sf.ops.LayerNorm(8), sf.ops.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.ours(self.head(self.norm(x)))


def test_the_bytes_of_layers_that_share_a_graph_are_of_all_of_them():
    model = Deep()
    conversion = sf.convert(model, regions="layers", memory="fast")
    x = torch.randn(32, 16, requires_grad=True)
    for _ in range(2):
        model(x).sum().backward()

    every = list[Tensor]()
    with saving() as kept:
        for layer in model.layers:
            every.append(layer(every[-1] if every else x))
    saved = bytes_of(kept, model)
    (graph,) = conversion.graphs
    (region,) = graph.regions
    assert region.plan is not None
    one = {choice.memory: choice for choice in region.plan.choices}
    most = 2 * one["fast"].saved + one["fast"].peak
    said = re.search(r"\n  fast +(\S+ \S+)  (\S+ \S+)  ", str(conversion))
    assert said is not None
    assert 3 * one["fast"].saved == saved
    assert said.groups() == (sized(saved), sized(most))
    assert one["lean"].microseconds > 0
    assert re.search(rf"\n  lean .* {re.escape(extra_time(3 * one['lean'].microseconds))}\n", str(conversion))
    assert "; 9 calls\n  chain of 4 operations in each of 3 layers: LayerNorm, " in str(conversion)


@pytest.mark.filterwarnings("ignore:memory=Budget")
def test_a_budget_with_layers_is_that_of_each_chain():
    model, x = Deep(), torch.randn(32, 16, requires_grad=True)
    model(x).sum().backward()
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    conversion = sf.convert(model, regions="layers", memory=sf.Budget(part=0.5))
    model(x).sum().backward()
    ((region,),) = (graph.regions for graph in conversion.graphs)
    assert region.plan is not None
    memory, choices = region.plan.memory, {choice.memory: choice for choice in region.plan.choices}
    assert memory is not None
    assert memory.saved < choices["lean"].saved
    assert memory.peak == min(choice.peak for choice in choices.values())
    for mine, other in zip([p.grad for p in model.parameters()], wanted, strict=True):
        torch.testing.assert_close(mine, other)


def test_modules_outside_the_layers_are_left():
    conversion = sf.convert(model := Deep(), regions="layers")
    assert conversion.left == ()
    model(torch.randn(4, 16))
    why = 'outside the layers of regions="layers"'
    assert conversion.left == (Left("LayerNorm", "norm", "norm", why), Left("Linear", "GEMM", "head", why))
    assert f"\nleft: GEMM Linear in head: {why}" in str(conversion)
    assert "traced as torch calls" not in str(conversion), "its own plan runs"


class Sevenfold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return F.softplus(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 7 * dy


class Act(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Sevenfold.apply(x)  # pyright: ignore[reportReturnType]


def test_bodies_are_named_by_their_kind_and_module():
    class Recomputing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(2))
            self.act = Act()

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.h:
                x = checkpoint(layer, x, use_reentrant=False)  # pyright: ignore[reportAssignmentType]
            return checkpoint(lambda t: torch.relu(t) ** 2, self.act(x), use_reentrant=False)  # pyright: ignore

    conversion = sf.convert(model := Recomputing())
    model(torch.randn(4, 8)).sum().backward()
    assert [graph.name for graph in conversion.graphs] == [
        "graph 0",
        "graph 0, checkpointed in h.0",
        "graph 0, checkpointed in h.1",
        "graph 0, autograd function in act, forward",
        "graph 0, autograd function in act, backward",
        "graph 0, checkpointed in the model",
    ]
    assert conversion.graphs[0].beside["checkpointed_body"] == 3
    until = Break((("model.py", 12, "forward"),), "print")
    for graph in conversion.graphs:
        cut = dataclasses.replace(graph, captured=Captured("training", until=until))
        assert ("  ends at a graph break" in str(cut)) == (graph.name == "graph 0"), "only its graph ends there"
    saved = [line for line in str(conversion).splitlines() if "saved for backward" in line]
    assert saved
    assert all(line.endswith(" (held only while it is recomputed)") for line in saved)


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Net() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand(1).item() >= 0:
                x = layer(x)
        return x


def test_a_layer_that_runs_by_the_graph_of_another_is_not_left():
    model = Drawing().double()
    wanted = model(X.double())
    conversion = sf.convert(model)
    torch.testing.assert_close(model(X.double()), wanted)
    assert conversion.left == ()
    assert len(conversion.graphs) == 2


def test_calls_under_hooks_of_all_modules_are_counted():
    model = Net()
    conversion = sf.convert(model)
    with torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: None):
        model(X)
    hooked = "1 call ran as before the conversion: hooks of all modules were set"
    assert str(conversion).splitlines() == ["called 1 time; nothing was captured", hooked]


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.fc(self.norm(x)))
        if x.sum() > 1e9:
            return x
        return torch.relu(self.fc(self.norm(x)))


class Nested(Around):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Branching()


class Broken(Branching):
    """Counts its calls in a buffer, before a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.wrong = nn.Linear(9, 9)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = super().forward(x)
        if x.sum() > 1e9:
            return x
        return self.wrong(x)


@torch.library.custom_op("seqfuse_tests::negated", mutates_args=())
def negated(x: Tensor) -> Tensor:
    return -x


@negated.register_fake
def _(x: Tensor) -> Tensor:
    raise ValueError("a fake that is wrong")


class Unfakeable(Net):
    def forward(self, x: Tensor) -> Tensor:
        return negated(super().forward(x).detach())


FAILED = "ran as before the conversion: Dynamo failed to capture them: "
WRONG = "RuntimeError: a and b must have same reduction dim, but got "


def test_a_call_of_a_wrong_width_gives_the_error_of_torch_alone(capfd: pytest.CaptureFixture[str]):
    model, x = nn.Sequential(nn.Linear(8, 16), nn.GELU()), torch.randn(3, 9)
    with pytest.raises(RuntimeError) as wanted:
        model(x)
    conversion = sf.convert(model)
    for _ in range(4):
        with pytest.raises(RuntimeError) as found:
            model(x)
    assert str(found.value) == str(wanted.value)
    assert found.value.__context__ is found.value.__cause__ is None
    assert str(conversion).splitlines() == [
        "called 4 times; nothing was captured",
        f"4 calls {FAILED}{WRONG}[3, 9] X [8, 16].",
    ]
    assert model(X.float()).shape == (3, 16)
    assert str(conversion).startswith("graph 0: training, input [3, 8]; 1 call\n  chain of ")
    captured = capfd.readouterr()
    assert not captured.out + captured.err


def test_an_error_of_a_graph_that_runs_is_that_of_torch_alone(capfd: pytest.CaptureFixture[str]):
    model = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 8))
    sf.convert(model)
    with pytest.raises(IndexError, match="index out of range in self"):
        model(torch.tensor([9]))
    assert "FX-traced" not in capfd.readouterr().err


def test_a_call_that_fails_behind_a_graph_break_goes_on_from_there_as_before(capfd: pytest.CaptureFixture[str]):
    model = Broken()
    conversion = sf.convert(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=re.escape("mat1 and mat2 shapes cannot be multiplied (3x8 and 9x9)")):
            model(X.float())
    assert model.seen == 2
    assert f"ran as before the conversion: behind a graph break Dynamo failed to capture them: {WRONG}" in str(
        conversion
    )
    assert not torch._dynamo.config.suppress_errors
    model.wrong = nn.Linear(8, 8)
    assert model(X.float()).shape == (3, 8)
    assert "WON'T CONVERT" not in capfd.readouterr().err


def test_a_model_that_dynamo_fails_to_capture_runs_as_before_and_is_not_tried_without_end():
    model = Unfakeable()
    wanted = model(X)
    conversion = sf.convert(model)
    for _ in range(5):
        try:
            raise KeyError("of the caller")
        except KeyError:
            assert torch.equal(model(X), wanted)
    assert str(conversion).splitlines() == [
        "called 5 times; nothing was captured",
        f"3 calls {FAILED}ValueError: a fake that is wrong",
        "2 calls ran as before the conversion: Dynamo failed to capture 3 calls like them",
    ]


def test_an_error_of_filter_fn_leaves_the_model_as_it_was():
    def refuses(module: nn.Module, path: str) -> bool:
        raise KeyError("no such path")

    model = Net()
    wanted = model(X)
    conversion = sf.convert(model, filter_fn=refuses)
    assert torch.equal(model(X), wanted)
    assert str(conversion).endswith(f"1 call {FAILED}KeyError: 'no such path'")


def test_a_graph_says_in_which_call_it_was_captured_where_it_ends_and_how_often_it_ran():
    model = nn.Sequential(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)))
    conversion = sf.convert(model)
    for _ in range(2):
        model(X.float())
    assert "\n  ends at" not in str(conversion)
    model[0] = Branching().eval()
    model(X.float())
    text, at = str(conversion), line_of(Branching.forward, "if x.sum()")
    assert text.startswith("graph 0: training, input [3, 8]; 2 calls, none since call 2 of 3\n")
    assert f"\n  ends at a graph break, {at}: Data-dependent branching" in text
    assert re.search(rf"\ngraph \d: after the graph break at {re.escape(at)}, training, input \[3, 8\]; 1 call\n", text)
    model.eval()
    with torch.no_grad():
        model(torch.randn(5, 8))
    assert "eval, without gradients, input [" in str(conversion)


def test_sizes_that_a_graph_takes_as_they_come_are_any():
    model = Net()
    conversion = sf.convert(model)
    for n in (3, 4):
        model(torch.randn(n, 8).double())
    assert "\ngraph 1: training, x [any, 8]; 1 call\n" in str(conversion)


def test_filter_fn_is_given_paths_of_the_model_behind_a_graph_break_too():
    model, given = Nested(), set[str]()
    sf.convert(model, filter_fn=lambda module, path: not given.add(path))
    model(X.float())
    assert given == {"", "fc", "inner", "inner.norm", "inner.fc"}


def test_calls_beside_the_chains_are_named():
    class Beside(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).cumsum(0).cumsum(0).sort().values

    model = Beside()
    conversion = sf.convert(model)
    model(X)
    assert conversion.graphs[0].beside == {"cumsum": 2, "sort": 1}
    assert "\n  outside the chains: 3 calls as before: cumsum x2, sort in the model" in str(conversion)


def test_calls_outside_the_chains_are_named_by_module_and_layers_that_are_alike_once():
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).cumsum(0)

    model = nn.Sequential(*(Layer() for _ in range(5)), nn.Softmax(-1)).double()
    conversion = sf.convert(model)
    model(X)
    (graph,) = conversion.graphs
    assert graph.outside == {**{f"{i}": {"cumsum": 1} for i in range(5)}, "5": {"softmax": 1}}
    assert graph.beside == {"cumsum": 5, "softmax": 1}
    said = "outside the chains: 6 calls as before: cumsum in 0, 1, 2 and 2 more; softmax in 5"
    assert f"\n  {said}" in str(conversion)


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ("abab", "a, b, a, b"),
        ("nababababc", "n, (a, b) x4, c"),
        ("aaaaab", "(a) x5, b"),
        ("abcabcabcab", "(a, b, c) x3, a, b"),
        ("", ""),
    ],
)
def test_operations_that_repeat_themselves_are_named_once(names: str, wanted: str):
    assert folded(list(names)) == wanted


def test_the_kernels_that_a_chain_launches_are_those_of_a_call():
    model, x = Net(p=0.1).float(), X.float().requires_grad_()
    conversion = sf.convert(model)
    model(x)
    (region,) = conversion.graphs[0].regions
    given = list(model.parameters())
    with Launches() as forward:
        y = region(x, *given)
    dy = torch.ones_like(y)
    with Launches() as backward:
        torch.autograd.grad(y, [x, *given], dy)
    assert region.launched == (forward.count, backward.count)
    said = f"\n      kernel launches, forward + backward: {forward.count} + {backward.count}; eager torch "
    assert said in conversion.report(launches=True)
    with sf.fusing(unmeasured=True):
        model(x)
    assert region.launched is not None
    assert sum(region.launched) < forward.count + backward.count


def test_modules_of_calls_that_are_left_for_one_reason_are_named_three_at_most():
    left = tuple(Left("linear", "GEMM", path, "why") for path in ("a", "", "b.c", "b.c", "d"))
    assert "  left: GEMM linear in a, the model, b.c and 1 more: why" in str(GraphReport("graph 0", (), left)).split(
        "\n"
    )
