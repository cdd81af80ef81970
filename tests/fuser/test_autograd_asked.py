"""A backward computes only the requested gradients, and reads the tensors that its own forward saved."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import seqfuse as sf
from seqfuse import ops
from seqfuse.run import node
from seqfuse.run.node import MOST
from tests.watching import Calls

from .fusions import BiasReLUBack
from .kit import draw, randomize


def test_gradients_that_are_not_asked_for_are_not_computed():
    model = sf.Sequential(ops.Linear(5, 7, bias=False), ops.Tanh(), ops.Linear(7, 3, bias=False)).double()
    x = draw(3, 5).requires_grad_()
    first, last = (2 * 3 * 5 * 7, 2 * 3 * 7 * 3)  # of one GEMM of each
    cases = [([x], first + last), ([model[0].weight], first + last), ([model[2].weight], last)]
    for wanted, flops in cases:
        y = model(x)
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(y, wanted, draw(3, 3))
        assert counter.get_total_flops() == flops
    y = model(x)
    with Calls() as calls:  # nothing before it runs
        torch.autograd.grad(y, [model[2].weight], draw(3, 3))
    assert calls.count("tanh_backward", "mm") == 1


def test_of_many_ways_to_ask_for_gradients_no_more_are_kept_than_a_number():
    model = sf.Sequential(*(ops.Bias(2) for _ in range(8)), ops.Tanh(), memory="lean").double()
    y = model(draw(3, 2).requires_grad_())
    (region,) = model._fuser.op_list().parts
    ((segment, _),) = region.lowering.segments
    sizes: list[int] = []
    for names in itertools.islice(itertools.combinations(range(8), 4), MOST + 6):
        torch.autograd.grad(y, [model[i].bias for i in names], draw(3, 2), retain_graph=True)
        sizes.append(len(segment.codes))
    assert sizes[-1] < max(sizes) <= MOST


def test_a_backward_is_written_with_checks_once_and_without_once(monkeypatch: pytest.MonkeyPatch):
    written: list[bool] = []
    write = node.backward_code

    def counted(*args: Any) -> Any:
        written.append(args[-1])
        return write(*args)

    monkeypatch.setattr(node, "backward_code", counted)
    model = sf.Sequential(ops.Bias(2), ops.Tanh(), ops.Bias(2), memory="lean").double()
    for _ in range(3):
        model(draw(3, 2).requires_grad_()).sum().backward()
    assert written == [True, False]
    for _ in range(3):  # calls for a few gradients are checked each time, by the same code
        torch.autograd.grad(model(draw(3, 2).requires_grad_()).sum(), [model[2].bias])
    assert written == [True, False, True]


def test_gradients_are_those_of_the_whole_whichever_were_asked_for_before():
    """One sequence, several times: gradients requested in addition to the parameters' count, too."""
    model = sf.Sequential(ops.Bias(5), ops.Linear(5, 5), ops.Add("side"), ops.Tanh()).double()
    randomize(model)
    x, side, dy = draw(3, 5).requires_grad_(), draw(3, 5, seed=2).requires_grad_(), draw(3, 5, seed=3)
    leaves = {"x": x, "side": side, **dict(model.named_parameters())}
    whole = dict(zip(leaves, torch.autograd.grad(model(x, side=side), [*leaves.values()], dy), strict=True))
    subsets = [names for n in range(1, len(leaves) + 1) for names in itertools.combinations(leaves, n)]
    for names in (*subsets, *reversed(subsets)):
        found = torch.autograd.grad(model(x, side=side), [leaves[n] for n in names], dy)
        for name, grad in zip(names, found, strict=True):
            assert torch.equal(grad, whole[name]), (names, name)


Pullback = Callable[..., Tensor]


def in_one_call(pullback: Pullback, batch: Tensor) -> Tensor:
    return pullback(batch, is_grads_batched=True)


def mapped(pullback: Pullback, batch: Tensor) -> Tensor:
    return torch.vmap(pullback, in_dims=1)(batch.movedim(0, 1))


def mapped_twice(pullback: Pullback, batch: Tensor) -> Tensor:
    return torch.vmap(torch.vmap(pullback))(torch.stack([-batch, batch]))[1]


@pytest.mark.parametrize("keep", [False, True], ids=["checkpointed", "kept"])
@pytest.mark.parametrize("transform", [in_one_call, mapped, mapped_twice])
@pytest.mark.parametrize("enabled", [True, False], ids=["fused", "unfused"])
def test_a_batch_of_gradients_is_that_of_each(enabled: bool, transform: Callable[..., Tensor], keep: bool):
    model = sf.Sequential(
        ops.Fork("skip"), ops.LayerNorm(8), ops.Linear(8, 24), ops.RotaryEmbedding(2, style="half"),
        ops.Attention(2), ops.Add("skip"), ops.Tanh(), ops.Fork("out"),
    ).double()  # fmt: skip
    x, batch = draw(2, 3, 8).requires_grad_(), draw(4, 2, 3, 8, seed=2)

    def backward(dy: Tensor, **how: Any) -> Tensor:
        return torch.autograd.grad(y, x, dy, retain_graph=keep, **how)[0]

    with sf.fusing(enabled, on_error="raise"):
        expected = torch.stack([torch.autograd.grad(model(x)[0], x, dy)[0] for dy in batch])
        for _ in range(2):
            y, _ = model(x) if keep else checkpoint(model, x, use_reentrant=False)
            torch.testing.assert_close(transform(backward, batch), expected)


def test_a_vectorized_jacobian_may_be_made_with_a_graph_that_is_not_differentiated():
    model, x, jacobian = (
        sf.Sequential(ops.Linear(3, 4), ops.Scale(1.0)).double(),
        draw(2, 3),
        torch.autograd.functional.jacobian,
    )
    found = jacobian(model, x.requires_grad_(), vectorize=True, create_graph=True)
    torch.testing.assert_close(found, jacobian(model, x))
    with pytest.raises(sf.StateError, match="SF501"):
        found.sum().backward()
    y, dy = model(x), draw(4, 2, 4)
    with pytest.raises(sf.StateError, match="SF501"):
        torch.vmap(lambda d: torch.autograd.grad(y, x, d, create_graph=True)[0])(dy)


class WrongBias(BiasReLUBack):
    """Returns the gradient of the bias as one number."""

    def bwd(self, dy: Tensor, *, bias: Any, act: Any) -> Any:
        dx, _ = super().bwd(dy, bias=bias, act=act)
        return dx, {"bias.bias": dx.sum()}


def test_a_gradient_is_checked_when_it_is_asked_for_though_others_were_before():
    model, x = sf.Sequential(ops.Bias(5), ops.ReLU(), fusions=WrongBias), draw(3, 5).requires_grad_()
    for _ in range(2):
        torch.autograd.grad(model(x).sum(), x)
    with pytest.raises(sf.PluginError, match=r"gradient 'bias\.bias' should be"):
        model(x).sum().backward()


class Varying(sf.UnfusedOperation, open=True):
    """y = 3 x, whose saved tensors are as the end of `saving` says: another field, `None`, a tensor or a tuple."""

    Saved: Any

    def __init__(self, saving: list[str]) -> None:
        super().__init__()
        self.saving = saving

    def fwd(self, x: Tensor) -> Any:
        other = {"same": x, "none": None, "one": 2 * x, "two": (2 * x, x)}[self.saving[-1]]
        return 3 * x, self.Saved(x=x, other=other)

    def bwd(self, dy: Tensor, saved: Any) -> Any:
        others = saved.other if isinstance(saved.other, tuple) else (saved.other,)
        assert all(t is None or t.shape == saved.x.shape for t in others)
        return 3 * dy, {}


def gradient(y: Tensor, x: Tensor) -> Tensor:
    """Of `backward`, for which code is generated; `grad` requests some gradients."""
    x.grad = None
    y.sum().backward()
    assert x.grad is not None
    return x.grad


class One(Varying):
    class Saved(sf.Saved):
        x: Tensor
        other: Tensor | None

    def reference(self, x: Tensor) -> Tensor:
        return 3 * x


class Several(Varying):
    class Saved(sf.Saved):
        x: Tensor
        other: Tensor | tuple[Tensor, ...] | None

    def reference(self, x: Tensor) -> Tensor:
        return 3 * x


@pytest.mark.parametrize("first", ["same", "none"])
@pytest.mark.parametrize("between", [False, True], ids=["without a backward", "with a backward"])
def test_a_backward_reads_what_its_own_forward_saved_whatever_later_ones_save(first: str, between: bool):
    saving = [first]
    model = sf.Sequential(ops.Tanh(), One(saving), ops.Tanh())
    x = draw(3, 4).requires_grad_()
    (expected,) = torch.autograd.grad(torch.tanh(3 * torch.tanh(x)).sum(), x)
    graphs = [model(x), model(x)]
    if between:
        gradient(model(x), x)
        gradient(model(x), x)
    for now in ("one", first, "one"):
        saving.append(now)
        graphs += [model(x), model(x)]
    for y in (*graphs[::2], *graphs[1::2]):
        assert torch.equal(gradient(y, x), expected)


class OneTanhBackward(sf.BackwardFusion):
    layout = "contig"
    first: One
    act: ops.Tanh

    def bwd(self, dy: Tensor, *, first: Any, act: Any) -> Any:
        return 3 * dy * (1 - act.y**2), {}


@pytest.mark.parametrize(
    ("kind", "fusions", "later"),
    [(Several, (), ("one", "one", "two", "none", "one")), (One, (OneTanhBackward,), ("one", "one", "none", "one"))],
    ids=["one, several or none", "one or none, read by a fusion"],
)
def test_a_field_may_hold_something_else_in_a_later_call(kind: Any, fusions: tuple[type, ...], later: tuple[str, ...]):
    saving = ["one"]
    model = sf.Sequential(ops.Tanh(), kind(saving), ops.Tanh(), fusions=fusions)
    x = draw(3, 4).requires_grad_()
    assert model.plan(x).count("OneTanhBackward") == len(fusions)
    (expected,) = torch.autograd.grad(torch.tanh(3 * torch.tanh(x)).sum(), x)
    with sf.fusing(on_error="raise"):
        for now in later:
            saving.append(now)
            found = gradient(model(x), x)
            torch.testing.assert_close(found, expected)
            assert fusions or torch.equal(found, expected)


def test_where_every_gradient_is_asked_for_nothing_is_checked_again(monkeypatch: pytest.MonkeyPatch):
    model = sf.Sequential(ops.Linear(4, 4), ops.Tanh()).double()
    x = draw(3, 4).requires_grad_()
    leaves = [x, *model.parameters()]
    expected = torch.autograd.grad(model(x).sum(), leaves)
    y = model(x)
    with monkeypatch.context() as patch:
        patch.setattr("seqfuse.run.code.check_backward", None)
        found = torch.autograd.grad(y.sum(), leaves)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    for i in range(len(leaves)):
        (some,) = torch.autograd.grad(model(x).sum(), [leaves[i]])
        assert torch.equal(some, expected[i])


def test_backward_of_everything_does_not_ask_for_each_leaf(monkeypatch: pytest.MonkeyPatch):
    model = sf.Sequential(ops.Linear(4, 4), ops.Tanh(), ops.Bias(4)).double()
    randomize(model)
    x = draw(3, 4).requires_grad_()
    leaves = [x, *model.parameters()]
    expected = torch.autograd.grad(model(x).sum(), leaves)

    def asked(fn: Any) -> bool:
        raise AssertionError(f"{fn} was asked for")

    monkeypatch.setattr("seqfuse.run.node.executes", asked)
    for _ in range(3):
        for leaf in leaves:
            leaf.grad = None
        model(x).sum().backward()
        for leaf, grad in zip(leaves, expected, strict=True):
            assert torch.equal(leaf.grad, grad)


class Nested(torch.autograd.Function):
    """y = x; its backward runs another backward pass within the running one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inner: Any) -> Tensor:
        ctx.inner = inner
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *douts: Any) -> Any:
        with torch.enable_grad():
            ctx.inner()
        return douts[0], None


def test_a_pass_within_a_pass_makes_what_it_was_asked_for():
    model = sf.Sequential(ops.Linear(5, 7, bias=False), ops.Tanh(), ops.Linear(7, 3, bias=False)).double()
    x, given = draw(3, 5).requires_grad_(), draw(3, 3)
    leaves = [x, *model.parameters()]
    expected = torch.autograd.grad(model(x), leaves, given)
    first, last = (2 * 3 * 5 * 7, 2 * 3 * 7 * 3)  # of one GEMM of each
    found: list[Any] = []

    def some() -> None:
        """After a backward for every gradient, one for the last weight only."""
        y = model(x)
        with FlopCounterMode(display=False) as counter:
            found[:] = torch.autograd.grad(y, [leaves[2]], given)
        assert counter.get_total_flops() == last

    def everything() -> None:
        """After a backward for one leaf, one for every gradient."""
        y = model(x)
        with FlopCounterMode(display=False) as counter:
            y.backward(given)
        assert counter.get_total_flops() == 2 * (first + last)
        found[:] = [leaf.grad for leaf in leaves]

    for _ in range(3):
        Nested.apply(model(x), some).sum().backward()
        assert torch.equal(found[0], expected[2])
        for leaf in leaves:
            leaf.grad = None
        other = draw(3, 3, seed=2).requires_grad_()
        torch.autograd.grad(Nested.apply(other, everything).sum(), [other])
        for grad, wanted in zip(found, expected, strict=True):
            assert torch.equal(grad, wanted)
