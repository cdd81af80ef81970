"""A loss that uses only some of the outputs: the gradients are those of torch, fused or not, and nothing falls back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import ops
from seqfuse.run import node
from seqfuse.run.code import backward_code
from tests.fuser.fusions import (
    AddForkBackward,
    AddForkForward,
    AddForkJoint,
    ForkGeLUAddBackward,
    ForkGeLUAddOutBackward,
    ForkGeLUAddOutForward,
    fused_names,
    gelu,
    randomized,
    tensor,
)

KINDS: dict[str, tuple[type, ...]] = {
    "unfused": (),
    "forward": (AddForkForward, ForkGeLUAddOutForward),
    "backward": (AddForkBackward, ForkGeLUAddOutBackward),
    "both": (AddForkForward, AddForkBackward, ForkGeLUAddOutForward, ForkGeLUAddOutBackward),
    "joint": (AddForkJoint,),
}


def gradients(outs: Sequence[Tensor], used: Sequence[bool], wanted: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    pairs = [(y, (i + 1.5) * torch.cos(y.detach())) for i, (y, use) in enumerate(zip(outs, used, strict=True)) if use]
    ys, dys = zip(*pairs, strict=True)
    return torch.autograd.grad(ys, wanted, dys, allow_unused=True)


def compare(got: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    assert [g is None for g in got] == [g is None for g in expected]
    for g, e in zip(got, expected, strict=True):
        if g is not None and e is not None:
            torch.testing.assert_close(g.double(), e.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("error::seqfuse.FallbackWarning")
@pytest.mark.parametrize("used", [(True, False), (False, True), (True, True)], ids=["y", "channel", "both"])
@pytest.mark.parametrize("rules", KINDS.values(), ids=KINDS.keys())
def test_a_public_output_may_be_left_unused(rules: tuple[type, ...], used: tuple[bool, bool]) -> None:
    operations = ops.Linear(5, 5), ops.Add("a"), ops.Fork("b"), ops.Linear(5, 3)
    model = randomized(sf.Sequential(*operations, fusions=rules, memory="lean"))  # "fast" is torch's calls, unfused
    x, a = tensor(7, 5), tensor(7, 5, seed=8)
    assert bool(fused_names(model.plan(x, a=a))[1]) == any(not issubclass(r, sf.ForwardFusion) for r in rules)
    for _ in range(2):
        got = gradients(model(x, a=a), used, [x, a, *model.parameters()])
        z, b = x.detach().requires_grad_(), a.detach().requires_grad_()
        p = [q.detach().requires_grad_() for q in model.parameters()]
        stream = torch.nn.functional.linear(z, p[0], p[1]) + b
        compare(got, gradients((torch.nn.functional.linear(stream, p[2], p[3]), stream), used, [z, b, *p]))


@pytest.mark.filterwarnings("error::seqfuse.FallbackWarning")
@pytest.mark.parametrize("used", [(True, False), (False, True), (True, True)], ids=["y", "channel", "both"])
@pytest.mark.parametrize("rules", KINDS.values(), ids=KINDS.keys())
def test_a_fusion_that_owns_a_channel_may_have_it_left_unused(rules: tuple[type, ...], used: tuple[bool, bool]) -> None:
    """The channel is read again in a branch of which only the other end is used."""
    model = randomized(
        sf.Sequential(
            ops.Bias(5), ops.Fork("r"), ops.GeLU(), ops.Add("r"), ops.Fork("s"), ops.Tanh(), ops.Add("r"), fusions=rules
        )
    )
    x = tensor(7, 5)
    for _ in range(2):
        got = gradients(model(x), used, [x, *model.parameters()])
        z, p = x.detach().requires_grad_(), model[0].bias.detach().requires_grad_()
        r = z + p
        s = r + gelu(r)
        compare(got, gradients((torch.tanh(s) + r, s), used, [z, p]))


@pytest.mark.filterwarnings("error::seqfuse.FallbackWarning")
@pytest.mark.parametrize("rules", KINDS.values(), ids=KINDS.keys())
def test_outputs_of_several_segments_may_be_left_unused(rules: tuple[type, ...]) -> None:
    def stage(i: int) -> list[Any]:
        return [ops.Linear(5, 5), ops.Tanh(), ops.Add(f"a{i}"), ops.Fork(f"b{i}"), *(ops.Scale(1.1) for _ in range(6))]

    model = randomized(sf.Sequential(*(op for i in range(3) for op in stage(i)), fusions=rules))
    x, given = tensor(7, 5), {f"a{i}": tensor(7, 5, seed=8 + i) for i in range(3)}
    assert len(model.plan(x, **given).segments) > 2
    for used in (
        (True, False, False, False),
        (False, True, False, False),
        (False, False, False, True),
        (True, False, True, False),
    ):
        got = gradients(model(x, **given), used, [x, *given.values(), *model.parameters()])
        z, sides = x.detach().requires_grad_(), [t.detach().requires_grad_() for t in given.values()]
        p = [q.detach().requires_grad_() for q in model.parameters()]
        y, streams = z, []
        for i in range(3):
            y = torch.tanh(torch.nn.functional.linear(y, p[2 * i], p[2 * i + 1])) + sides[i]
            streams.append(y)
            y = y * 1.1**6
        compare(got, gradients((y, *streams), used, [z, *sides, *p]))


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("rules", [(ForkGeLUAddOutBackward,), (ForkGeLUAddBackward,)], ids=lambda r: r[0].__name__)
def test_a_backward_that_owns_a_channel_is_refused_where_the_add_reads_another(
    rules: tuple[type, ...], wanted: bool
) -> None:
    model = sf.Sequential(ops.Fork("p"), ops.GeLU(), ops.Add("q"), ops.Scale(2), ops.Add("p"), fusions=rules)
    x, q = tensor(7, 5), tensor(7, 5, seed=8, grad=wanted)
    plan = model.plan(x, q=q)
    assert fused_names(plan) == ([], [])
    assert [r.fusion for r in plan.refused] == [rules[0].__name__]
    inputs = [x, q] if wanted else [x]
    z = [t.detach().requires_grad_() for t in inputs]
    expected = 2 * (gelu(z[0]) + (z[1] if wanted else q)) + z[0]
    compare(gradients((model(x, q=q),), (True,), inputs), gradients((expected,), (True,), z))


def test_a_backward_over_an_add_and_a_later_fork_takes_channels_from_outside() -> None:
    model = sf.Sequential(
        ops.Fork("p"), ops.Tanh(), ops.Add("p"), ops.Fork("s"), ops.Tanh(), ops.Add("s"), fusions=(AddForkBackward,)
    )
    x = tensor(7, 5)
    assert fused_names(model.plan(x))[1] == ["AddForkBackward"]
    z = x.detach().requires_grad_()
    s = z + torch.tanh(z)
    compare(gradients((model(x),), (True,), [x]), gradients((s + torch.tanh(s),), (True,), [z]))


@pytest.mark.parametrize("used", [(True, False), (False, True), (True, True)], ids=["y", "channel", "both"])
def test_an_output_made_inside_a_fused_forward_may_be_all_that_is_used(used: tuple[bool, bool]) -> None:
    """The unfused Fork then receives no gradient of y, whose shape the fused forward did not show."""

    class AddForkReLU(sf.ForwardFusion):
        add: ops.Add
        fork: ops.Fork
        act: ops.ReLU
        outputs = ("fork_out",)

        def fwd(self, x: Tensor, *, add_other: Tensor) -> Any:
            stream = x + add_other
            y = torch.relu(stream)
            records = {"add": ops.Add.Saved(), "fork": ops.Fork.Saved(), "act": ops.ReLU.Saved(y=y)}
            return y, {"fork_out": stream}, records

    for rules in ((AddForkReLU,), (AddForkReLU, AddForkBackward)):
        model = randomized(sf.Sequential(ops.Linear(5, 5), ops.Add("a"), ops.Fork("b"), ops.ReLU(), fusions=rules))
        x, a = tensor(7, 5), tensor(7, 5, seed=8)
        assert fused_names(model.plan(x, a=a)) == (["AddForkReLU"], [r.__name__ for r in rules[1:]])
        with sf.fusing(on_error="raise"):
            got = gradients(model(x, a=a), used, [x, a, *model.parameters()])
        z, b = x.detach().requires_grad_(), a.detach().requires_grad_()
        p = [q.detach().requires_grad_() for q in model.parameters()]
        stream = torch.nn.functional.linear(z, p[0], p[1]) + b
        compare(got, gradients((torch.relu(stream), stream), used, [z, b, *p]))


@pytest.mark.parametrize("calls", [1, 2], ids=["interpreted", "generated code"])
def test_the_gradient_of_an_unused_output_is_where_the_output_is(calls: int) -> None:
    came: list[torch.device] = []

    class Halves(sf.UnfusedOperation):
        """y = x / 2, twice."""

        outputs = ("out",)
        channels: ClassVar[Any] = {"out": "b"}

        class Saved(sf.Saved):
            pass

        def reference(self, x: Tensor) -> Any:
            return x / 2, {"out": x / 2}

        def fwd(self, x: Tensor) -> Any:
            return x / 2, {"out": x / 2}, self.Saved()

        def bwd(self, dy: Tensor, saved: Saved, *, d_out: Tensor | None) -> Any:
            came.append(dy.device)
            return dy / 2 if d_out is None else (dy.to(d_out) + d_out) / 2, {}

    model = sf.Sequential(ops.Bias(3, device="meta"), Halves())
    for _ in range(calls):
        _, b = model(torch.empty(2, 3, device="meta", requires_grad=True))
        b.sum().backward()
    assert came == [torch.device("meta")] * calls


@pytest.mark.parametrize("calls", [1, 2], ids=["interpreted", "generated code"])
def test_a_joint_fusion_may_save_nothing(calls: int) -> None:
    class ScaleScale(sf.JointFusion):
        first: ops.Scale
        second: ops.Scale

        class Saved(sf.Saved):
            pass

        def saves(self, env: sf.Env) -> sf.Savings:
            return sf.Savings(launches=1)

        def fwd(self, x: Tensor) -> Any:
            return x * 6.0, self.Saved()

        def bwd(self, dy: Tensor, saved: Saved) -> Any:
            assert isinstance(saved, ScaleScale.Saved)
            return dy * 6.0, {}

    model = sf.Sequential(ops.Scale(2.0), ops.Scale(3.0), fusions=(ScaleScale,))
    x = tensor(7, 5)
    with sf.fusing(on_error="raise"):
        for _ in range(calls):
            (dx,) = torch.autograd.grad(model(x).sum(), x)
            assert torch.equal(dx, torch.full_like(x, 6.0))
    assert fused_names(model.plan(x)) == (["ScaleScale"], ["ScaleScale"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_zeros_that_stand_for_a_gradient_have_the_dtype_of_the_output(dtype: torch.dtype) -> None:
    seen: list[torch.dtype] = []

    class Copied(sf.UnfusedOperation):
        outputs = ("copy",)

        class Saved(sf.Saved):
            pass

        def reference(self, x: Tensor) -> Any:
            return 2 * x, {"copy": 3 * x}

        def fwd(self, x: Tensor) -> Any:
            return *self.reference(x), self.Saved()

        def bwd(self, dy: Tensor, saved: Any, *, d_copy: Tensor | None) -> Any:
            seen.append(dy.dtype)
            return 2 * dy if d_copy is None else 2 * dy + 3 * d_copy, {}

    x = tensor(7, 5, dtype=dtype)
    model = sf.Sequential(ops.Scale(1.0), Copied())
    for _ in range(2):
        _, copy = model(x)
        (dx,) = torch.autograd.grad(copy.sum(), x)
        assert (seen.pop(), dx.dtype) == (dtype, dtype)
        assert (dx == 3).all()


@pytest.mark.parametrize("rules", KINDS.values(), ids=KINDS.keys())
def test_a_backward_in_which_an_output_has_no_gradient_is_written_once(
    rules: tuple[type, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like the keys and values that a Hugging Face model returns for its cache, which a loss does not read."""
    operations = ops.Linear(5, 5), ops.Add("a"), ops.Fork("b"), ops.Linear(5, 3)
    model = randomized(sf.Sequential(*operations, fusions=rules, memory="lean"))  # "fast" is torch's calls, unfused
    inputs = [tensor(7, 5), tensor(7, 5, seed=8), *model.parameters()]
    written: list[int] = []

    def write(*args: Any) -> Any:
        written.append(0)
        return backward_code(*args)

    monkeypatch.setattr(node, "backward_code", write)

    def step(used: tuple[bool, bool]) -> list[Tensor | None]:
        outs = model(inputs[0], a=inputs[1])
        loss = sum((i + 1.5) * torch.cos(y).sum() for i, (y, use) in enumerate(zip(outs, used, strict=True)) if use)
        assert isinstance(loss, Tensor)
        loss.backward()
        grads = [t.grad for t in inputs]
        for t in inputs:
            t.grad = None
        return grads

    seen = {used: step(used) for used in ((True, False), (True, True))}
    first = len(written)
    assert first >= 2
    for used in [(True, False), (True, True)] * 2:
        for g, e in zip(step(used), seen[used], strict=True):
            torch.testing.assert_close(g, e, rtol=0, atol=0)
    assert len(written) == first
