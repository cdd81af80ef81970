"""A plan is cut into autograd segments, so that gradients arrive and memory is freed while the backward goes on."""

from __future__ import annotations

import copy
import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.errors import StateError

from .conftest import planning
from .fusions import KINDS, BiasTanhForward, BiasTanhJoint
from .kit import PlainResidual, assert_same, draw, passes, randomize

BLOCKS = 24


class Tanh(ops.Tanh):
    """An operation that torch does not run natively: a stack of native ones has no nodes."""

    native = False


def block(width: int) -> ops.Residual:
    return ops.Residual(ops.LayerNorm(width), ops.Linear(width, 9), Tanh(), ops.Linear(9, width))


def stack(width: int = 5, blocks: int = BLOCKS, fusions: Any = ()) -> sf.Sequential:
    model = sf.Sequential(*(block(width) for _ in range(blocks)), fusions=fusions)
    randomize(model)
    return model.double()


def plain_stack(model: sf.Sequential, width: int = 5) -> nn.Sequential:
    def twin() -> PlainResidual:
        return PlainResidual(nn.LayerNorm(width), nn.Linear(width, 9), nn.Tanh(), nn.Linear(9, width))

    plain = nn.Sequential(*(twin() for _ in model)).double()
    plain.load_state_dict(model.state_dict(), strict=True)
    return plain


def nodes(y: Tensor) -> list[Any]:
    """Every node of the graph that belongs to this library."""
    found: list[Any] = []
    seen: set[Any] = set()
    open_nodes = [y.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "Seqfuse" in node.name():
            found.append(node)
        open_nodes += [n for n, _ in node.next_functions]
    return found


def log_steps(monkeypatch: pytest.MonkeyPatch, events: list[str]) -> None:
    """Logs every backward of an operation, members of expansions included, in `events`."""
    for cls in (ops.LayerNorm, ops.Linear, ops.Bias, ops.Tanh, ops.Add, ops.Fork):
        original = cls.bwd

        def noted(self: Any, *args: Any, _original: Callable[..., Any] = original, **kwargs: Any) -> Any:
            events.append("step")
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(cls, "bwd", noted)


def test_a_deep_stack_equals_its_torch_twin():
    model, x = stack(), draw(3, 5)
    assert_same(passes(model, x), passes(plain_stack(model), x), 1e-9)


def test_the_first_parameter_gradient_arrives_before_a_fifth_of_the_backward_is_done(monkeypatch: pytest.MonkeyPatch):
    events: list[str] = []
    log_steps(monkeypatch, events)
    model = stack()
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
    model(draw(3, 5).requires_grad_()).sum().backward()
    steps = events.count("step")
    assert steps == BLOCKS * 8  # Fork, LayerNorm, Linear, Bias, Tanh, Linear, Bias, Add
    first = next(i for i, event in enumerate(events) if event != "step")
    assert first < 0.2 * steps
    arrived = [event for event in events if event != "step"]
    assert sorted(arrived) == sorted(name for name, _ in model.named_parameters())
    blocks = [int(name.split(".")[0]) for name in arrived]
    assert blocks == sorted(blocks, reverse=True), "gradients arrive from the last block to the first"
    longest = max(len(run) for run in "".join("s" if e == "step" else "g" for e in events).replace("g", " ").split())
    assert longest <= 12, "no more than a segment"


class Keeper(sf.UnfusedOperation):
    """y = -1.01 x; saves a tensor that nothing else holds, and counts how many such are alive in its backward."""

    kept: list[weakref.ref[Tensor]]
    alive: list[int]

    class Saved(sf.Saved):
        secret: Tensor

    def __init__(self, kept: list[weakref.ref[Tensor]], alive: list[int]) -> None:
        super().__init__()
        self.kept, self.alive = kept, alive

    def reference(self, x: Tensor) -> Tensor:
        return -1.01 * x

    def fwd(self, x: Tensor) -> Any:
        secret = x.clone()
        self.kept.append(weakref.ref(secret))
        return -1.01 * x, self.Saved(secret=secret)

    def bwd(self, dy: Tensor, saved: Any) -> Any:
        assert saved.secret.shape == dy.shape
        self.alive.append(sum(ref() is not None for ref in self.kept))
        return -1.01 * dy, {}


def test_saved_tensors_are_freed_as_segments_finish():
    kept: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    count = 64
    model = sf.Sequential(*(Keeper(kept, alive) for _ in range(count)))
    x = draw(3, 5).requires_grad_()
    y = model(x)
    segments = model.plan(x).segments
    assert len(segments) == count // 8
    assert sum(ref() is not None for ref in kept) == count
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.full_like(x, 1.01**count))
    assert alive[0] == count
    assert alive[-1] <= len(segments[0]), "only the first segment's tensors are left at the end"
    assert alive == sorted(alive, reverse=True)
    assert sum(ref() is not None for ref in kept) == 0


def test_saved_tensors_are_freed_with_the_output_if_no_backward_runs():
    kept: list[weakref.ref[Tensor]] = []
    model = sf.Sequential(*(Keeper(kept, []) for _ in range(20)))
    y = model(draw(3, 5).requires_grad_())
    assert all(ref() is not None for ref in kept)
    del y
    assert not any(ref() is not None for ref in kept)


@pytest.mark.parametrize("fusions", [(), *((kind,) for kind in KINDS)], ids=lambda f: f[0].__name__ if f else "none")
def test_segments_tile_the_list_and_never_cut_a_step(fusions: Any):
    model = sf.Sequential(*(op for _ in range(13) for op in (ops.Linear(5, 5), ops.Tanh())), fusions=fusions).double()
    x = draw(3, 5)
    plan = model.plan(x)
    assert [p for piece in plan.segments for p in piece] == list(range(39))
    assert all(4 <= len(piece) <= 12 for piece in plan.segments)
    borders = {piece.start for piece in plan.segments}
    for step in (*plan.forward, *plan.backward):
        assert not borders & set(step.covers[1:])
    y = sf.Fuser(model, fusions, on_step=lambda step, run, *args, **kwargs: run(*args, **kwargs))(x)
    assert len(nodes(y)) == len(plan.segments)


def test_segments_are_cut_where_a_single_tensor_crosses():
    plan = stack().plan(draw(3, 5))
    assert len(plan.segments) == BLOCKS
    assert {piece.start % 8 for piece in plan.segments} == {0}, "between blocks, not inside one"


def test_a_border_that_no_channel_crosses_goes_before_a_nearer_one():
    model = sf.Sequential(*(ops.Residual(*(ops.Tanh() for _ in range(8))) for _ in range(3)))
    assert model.plan(draw(3, 5)).segments == (range(10), range(10, 20), range(20, 30))


@pytest.mark.parametrize("kind", [Tanh, ops.Tanh], ids=["behind nodes", "by torch"])
def test_a_channel_is_there_up_to_a_last_reader_that_runs_eagerly(kind: type[ops.Tanh]):
    for last in range(2, 24):
        reads = {*range(1, last, 4), last}
        members = [ops.Add("r") if at in reads else kind() for at in range(1, 26)]
        model, x = sf.Sequential(ops.Fork("r"), *members, fusions=()), draw(3, 5).float()
        model[last].register_forward_hook(lambda *given: None)
        mine, its = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, expected = model(mine), its
        for at in range(1, 26):
            expected = expected + its if at in reads else expected.tanh()
        (y * expected.detach()).sum().backward()
        (expected * expected.detach()).sum().backward()
        torch.testing.assert_close((y, mine.grad), (expected, its.grad))


def test_a_list_of_a_dozen_is_one_segment():
    model = sf.Sequential(*(ops.Tanh() for _ in range(12)))
    assert model.plan(draw(3, 5)).segments == (range(12),)
    model.append(ops.Tanh())
    assert len(model.plan(draw(3, 5)).segments) == 2


@pytest.fixture
def of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert planning.SEGMENT_BYTES == 1 << 22
    monkeypatch.setattr(sf.Fuser, "plain_autograd", False)


@pytest.mark.usefixtures("of_bytes")
def test_a_segment_has_so_many_bytes_of_parameters_and_activations():
    def found(width: int, rows: int) -> list[int]:
        layers = (op for _ in range(20) for op in (ops.Linear(width, width, bias=False), ops.Tanh()))
        model = sf.Sequential(*layers, fusions=())
        y = model(torch.zeros(rows, width))
        (region,) = model._fuser.op_list().parts
        lengths = [len(piece) for piece in region.lowering.plan.segments]
        assert len(lengths) == len(nodes(y))
        return lengths

    assert found(8, 3) == [40]
    assert found(1024, 1) == [8] * 5, "four mebibytes for each Linear"
    assert found(256, 1) == [31, 9], "258 KiB for each Linear with its Tanh"
    assert found(8, 1 << 14) == [8] * 5, "512 KiB for each operation"
    assert found(8, 1 << 13) == [16, 16, 8]


def test_a_segment_of_many_operations_computes_what_short_ones_do(request: pytest.FixtureRequest):
    model = stack()
    x = draw(3, 5)
    want = passes(model, x)
    assert len(nodes(model(x))) == BLOCKS
    request.getfixturevalue("of_bytes")
    whole = copy.deepcopy(model)
    for _ in range(3):  # interpreted, and by generated code
        assert_same(passes(whole, x), want)
    assert len(nodes(whole(x))) == 1


def test_a_fusion_longer_than_a_segment_is_not_cut():
    class Chain(sf.JointFusion):
        first: tuple[ops.Tanh, ...]
        middle: tuple[ops.Tanh, ...]
        last: ops.Sigmoid

        class Saved(sf.Saved):
            x: Tensor

        def fwd(self, x: Tensor) -> Any:
            y = x
            for op in self.operations():
                y = op.reference(y)
            return y, self.Saved(x=x)

        def bwd(self, dy: Tensor, saved: Any) -> Any:
            with torch.enable_grad():
                x = saved.x.detach().requires_grad_()
                y = x
                for op in self.operations():
                    y = op.reference(y)
                return torch.autograd.grad(y, x, dy)[0], {}

    model = sf.Sequential(*(ops.Tanh() for _ in range(16)), ops.Sigmoid(), *(ops.Tanh() for _ in range(3)))
    x = draw(3, 5)
    want = passes(model, x)
    model.fusions = (Chain,)
    plan = model.plan(x)
    assert plan.count("Chain") == 1
    assert plan.segments == (range(17), range(17, 20))
    assert model[:17].plan(x).segments == (range(17),), "a sequence that ends with it"
    assert_same(passes(model, x), want)


@pytest.mark.parametrize("fusions", [(), *((kind,) for kind in KINDS)], ids=lambda f: f[0].__name__ if f else "none")
def test_backward_twice_with_retain_graph_gives_the_same_gradients(fusions: Any):
    model = stack(blocks=3, fusions=fusions)
    x, dy = draw(3, 5).requires_grad_(), draw(3, 5, seed=2)
    leaves = [x, *model.parameters()]
    y = model(x)
    first = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    second = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    third = torch.autograd.grad(y, leaves, -2 * dy)
    for a, b, c in zip(first, second, third, strict=True):
        assert a.abs().max() > 0
        assert torch.equal(a, b)
        torch.testing.assert_close(-2 * a, c)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, leaves, dy)


@pytest.mark.parametrize("later_first", [False, True])
def test_two_forwards_alive_before_backward_keep_their_own_tensors(later_first: bool):
    model = sf.Sequential(ops.Linear(5, 7), ops.Tanh(), ops.Dropout(0.5), ops.Linear(7, 5), fusions=(BiasTanhJoint,))
    randomize(model.double())
    inputs = [draw(3, 5, seed=1), draw(4, 5, seed=2)]
    want = []
    for i, x in enumerate(inputs):
        torch.manual_seed(i)
        want.append(passes(model, x))
    leaves, outs = [x.clone().requires_grad_() for x in inputs], []
    for i, x in enumerate(leaves):
        torch.manual_seed(i)
        outs.append(model(x))
    order = [1, 0] if later_first else [0, 1]
    for i in order:
        grads = torch.autograd.grad(outs[i], [leaves[i], *model.parameters()], draw(*outs[i].shape, seed=99))
        found = dict(zip(want[i], [outs[i].detach(), *grads], strict=True))
        assert_same(found, want[i], 0.0)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_create_graph_alone_works():
    model, x, dy = stack(blocks=3, fusions=(BiasTanhForward,)), draw(3, 5).requires_grad_(), draw(3, 5, seed=2)
    leaves = [x, *model.parameters()]
    want = torch.autograd.grad(model(x), leaves, dy)
    found = torch.autograd.grad(model(x), leaves, dy, create_graph=True)
    for a, b in zip(found, want, strict=True):
        assert torch.equal(a, b)
    model(x).backward(dy, create_graph=True)
    for leaf, b in zip(leaves, want, strict=True):
        assert torch.equal(leaf.grad, b)
        leaf.grad = None


Second = Callable[[Tensor, Tensor, Tensor, list[Tensor]], Any]
SECONDS: dict[str, Second] = {
    "backward": lambda loss, x, dy, ps: loss.backward(),
    "with respect to the input": lambda loss, x, dy, ps: torch.autograd.grad(loss, x),
    "with respect to parameters": lambda loss, x, dy, ps: torch.autograd.grad(loss, ps),
    "where unused is allowed": lambda loss, x, dy, ps: torch.autograd.grad(loss, [x, *ps], allow_unused=True),
    "with respect to a bias": lambda loss, x, dy, ps: torch.autograd.grad(loss, ps[1], allow_unused=True),
    "with respect to the incoming gradient": lambda loss, x, dy, ps: torch.autograd.grad(loss, dy),
    "materialized": lambda loss, x, dy, ps: torch.autograd.grad(loss, [x, *ps], materialize_grads=True),
}


@pytest.mark.parametrize("second", SECONDS.values(), ids=SECONDS)
@pytest.mark.parametrize("of", ["input", "parameters"])
def test_double_backward_says_that_it_is_not_supported(second: Second, of: str):
    model = sf.Sequential(ops.Linear(5, 7), ops.Tanh(), ops.Linear(7, 3), fusions=(BiasTanhForward,)).double()
    x, dy = draw(3, 5).requires_grad_(), draw(3, 3, seed=2).requires_grad_()
    parameters = list(model.parameters())
    wanted = [x] if of == "input" else parameters
    first = torch.autograd.grad(model(x), wanted, dy, create_graph=True)
    penalty = sum(g.square().sum() for g in first)
    with pytest.raises(StateError, match="double backward is not supported") as caught:
        second(penalty, x, dy, parameters)
    assert caught.value.code == "SF501"
    assert caught.value.hint is not None
    assert "torch.func" in caught.value.hint


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_optimizer_may_step_in_a_hook_while_backward_goes_on(momentum: float):
    model = stack(blocks=4, fusions=(BiasTanhForward,))
    twin = plain_stack(model)

    def train(net: nn.Module) -> list[float]:
        steps = {p: torch.optim.SGD([p], lr=0.05, momentum=momentum) for p in net.parameters()}

        def step(p: Tensor) -> None:
            steps[p].step()
            steps[p].zero_grad()

        for p in net.parameters():
            p.register_post_accumulate_grad_hook(step)
        losses = []
        for i in range(4):
            loss = net(draw(3, 5, seed=i)).square().mean()
            loss.backward()
            losses.append(loss.item())
        return losses

    found, want = train(model), train(twin)
    assert want[0] != want[-1]
    assert found == pytest.approx(want, rel=1e-9)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, msg=lambda m, name=name: f"{name}: {m}")


def test_what_a_first_step_makes_grows_with_the_list_and_not_with_its_square() -> None:
    def made(count: int) -> int:
        model = sf.Sequential(*(op for _ in range(count // 2) for op in (ops.Scale(0.5), ops.Tanh())), fusions=())
        x = torch.ones(2, requires_grad=True)
        tracemalloc.start()
        try:
            model(x)
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    made(200)  # code, which is generated once
    assert made(200) < 2.2 * made(100)
