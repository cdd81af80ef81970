"""Channels: side tensors that leave the chain and return, inside a sequence, across containers, and to the caller."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.run.fuser import Fuser
from tests.fuser.fusions import (
    AddReLUForward,
    ForkGeLUAddBackward,
    ForkGeLUAddForward,
    assert_same,
    fused_names,
    gelu,
    randomized,
    run,
    run_plain,
    tensor,
)

Make = Callable[[], sf.Sequential]


def ignored(*_: Any) -> None:
    """A hook that does nothing."""


def lin(p: dict[str, Tensor], key: str, x: Tensor) -> Tensor:
    return x @ p[f"{key}.weight"].mT + p[f"{key}.bias"]


def check(model: sf.Sequential, plain: Callable[..., Any], x: Tensor, **channels: Tensor) -> None:
    """Fused, unfused and the math written out agree in every output and gradient, and in inference."""
    randomized(model)
    with sf.fusing(False):
        expected = run(model, x, **channels)
    truth = run_plain(plain, model, x, **channels)
    assert_same(run(model, x, **channels), expected, truth)
    with torch.no_grad():
        out = model(x, **channels)
    for i, y in enumerate(out if isinstance(out, tuple) else (out,)):
        torch.testing.assert_close(y, expected[f"y{i}"])


class Half(nn.Module):
    """Not an operation of the library."""

    def forward(self, x: Tensor) -> Tensor:
        return half(x)


def half(x: Tensor) -> Tensor:
    return x * 0.5 + x.square()


def stream(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return x + torch.tanh(lin(p, "0.0", x))


def pair() -> sf.Sequential:
    return sf.Sequential(ops.Fork("r"), ops.Add("r"))


# Sequences, and their math.
LISTS: dict[str, tuple[Callable[[], Sequence[nn.Module]], Callable[..., Any]]] = {
    "a residual": (lambda: [ops.Residual(ops.Linear(5, 5), ops.Tanh())], stream),
    "nested residuals": (
        lambda: [ops.Residual(ops.Linear(5, 5), ops.Residual(ops.Tanh()), ops.Scale(-0.5))],
        lambda p, x: x - 0.5 * (lin(p, "0.0", x) + torch.tanh(lin(p, "0.0", x))),
    ),
    "without names": (
        lambda: [ops.Fork(), ops.Scale(2), ops.Fork(), ops.Tanh(), ops.Add(), ops.Scale(-0.7), ops.Add()],
        lambda p, x: x - 0.7 * (2 * x + torch.tanh(2 * x)),
    ),
    "crossing": (
        lambda: [ops.Fork("a"), ops.Scale(2), ops.Fork("b"), ops.Tanh(), ops.Add("a"), ops.Sigmoid(), ops.Add("b")],
        lambda p, x: torch.sigmoid(torch.tanh(2 * x) + x) + 2 * x,
    ),
    "read twice": (
        lambda: [ops.Fork("r"), ops.Tanh(), ops.Add("r"), ops.Tanh(), ops.Add("r")],
        lambda p, x: torch.tanh(torch.tanh(x) + x) + x,
    ),
    "an input of the call": (
        lambda: [ops.Linear(5, 5), ops.Add("r"), ops.Tanh()],
        lambda p, x, r: torch.tanh(lin(p, "0", x) + r),
    ),
    "outputs of the call, in order": (
        lambda: [ops.Fork("late"), ops.Linear(5, 3), ops.Fork("early"), ops.Tanh()],
        lambda p, x: (torch.tanh(lin(p, "1", x)), x, lin(p, "1", x)),
    ),
    "outputs of the call that are one tensor": (
        lambda: [ops.Linear(5, 3), ops.Fork("a"), ops.Fork("b"), ops.Tanh()],
        lambda p, x: (torch.tanh(lin(p, "0", x)), lin(p, "0", x), lin(p, "0", x)),
    ),
    "past a barrier": (
        lambda: [ops.Fork("r"), ops.Linear(5, 5), Half(), ops.Tanh(), ops.Add("r")],
        lambda p, x: torch.tanh(half(lin(p, "1", x))) + x,
    ),
    "around barriers": (
        lambda: [ops.Residual(Half(), ops.Residual(Half()))],
        lambda p, x: x + half(x) + half(half(x)),
    ),
    "private to containers": (lambda: [pair(), pair()], lambda p, x: 4 * x),
    "one block twice": (
        lambda: [ops.Residual(ops.Linear(5, 5), ops.Tanh())] * 2,
        lambda p, x: stream(p, stream(p, x)),
    ),
}


@pytest.mark.parametrize("case", LISTS)
def test_channels_carry_what_their_mathematics_says_and_its_gradients(case: str) -> None:
    make, plain = LISTS[case]
    model = sf.Sequential(*make(), fusions=())
    check(model, plain, tensor(7, 5), **{name: tensor(7, 5, seed=9) for name in model.channels.inputs})


def test_fan_out_reaches_over_several_segments() -> None:
    model = sf.Sequential(ops.Linear(5, 5), ops.Fork("r"), *(op for _ in range(12) for op in (ops.Bias(5), ops.Tanh())))
    model.extend([ops.Add("r"), *(op for _ in range(12) for op in (ops.Bias(5), ops.Tanh())), ops.Add("r")])
    assert len(model.plan(tensor(7, 5)).segments) > 3

    def plain(p: dict[str, Tensor], x: Tensor) -> Tensor:
        r = y = lin(p, "0", x)
        for at in (*range(2, 26, 2), 0, *range(27, 51, 2)):
            y = torch.tanh(y + p[f"{at}.bias"]) if at else y + r
        return y + r

    check(model, plain, tensor(7, 5))


def test_a_channel_may_be_read_last_where_a_segment_begins() -> None:
    model = sf.Sequential(ops.Fork("r"), ops.Fork("s"), *(ops.Tanh() for _ in range(10)), ops.Add("r"))
    model.extend([*(ops.Tanh() for _ in range(3)), ops.Add("r"), *(ops.Tanh() for _ in range(6)), ops.Add("s")])
    assert [piece.start for piece in model.plan(tensor(7, 5)).segments] == [0, 8, 16]

    def plain(p: dict[str, Tensor], x: Tensor) -> Tensor:
        y = x
        for runs in (10, 3, 6):
            for _ in range(runs):
                y = torch.tanh(y)
            y = y + x
        return y

    check(model, plain, tensor(7, 5))


def test_a_public_extra_input_may_be_read_twice_and_have_any_layout() -> None:
    model = sf.Sequential(ops.Scale(0.5), ops.Add("r"), ops.ReLU(), ops.Add("r"), fusions=(AddReLUForward,))
    r = tensor(5, 7, grad=False).t().requires_grad_()
    check(model, lambda p, x, r: torch.relu(x / 2 + r) + r, tensor(7, 5), r=r)
    row = tensor(1, 5, grad=False).expand(7, 5).requires_grad_()
    check(model, lambda p, x, r: torch.relu(x / 2 + r) + r, tensor(7, 5), r=row)


# Barriers and containers.


S = sf.Sequential
NESTED: dict[str, tuple[Make, Callable[[Tensor], Tensor]]] = {
    "reader": (
        lambda: S(ops.Fork("r"), ops.Scale(2), S(ops.Tanh(), ops.Add("r")), ops.Scale(-1.5)),
        lambda x: -1.5 * (torch.tanh(2 * x) + x),
    ),
    "maker": (
        lambda: S(S(ops.Scale(2), ops.Fork("r"), ops.Tanh()), ops.Add("r"), ops.Scale(-1.5)),
        lambda x: -1.5 * (torch.tanh(2 * x) + 2 * x),
    ),
    "both": (
        lambda: S(S(ops.Scale(2), S(ops.Fork("r"), ops.Tanh())), S(ops.Add("r"), ops.Scale(-1.5))),
        lambda x: -1.5 * (torch.tanh(2 * x) + 2 * x),
    ),
}


@pytest.mark.parametrize("make", NESTED.values(), ids=NESTED.keys())
@pytest.mark.parametrize("hooked", [False, True], ids=["inlined", "hooked"])
def test_channels_cross_the_borders_of_nested_containers(
    make: tuple[Make, Callable[[Tensor], Tensor]], hooked: bool
) -> None:
    model, plain = make[0](), make[1]
    if hooked:
        for module in model:
            if isinstance(module, sf.Sequential):
                module.register_forward_hook(ignored)
    x = tensor(7, 5)
    assert bool(model.plan(x).eager) == hooked
    check(model, lambda p, x: plain(x), x)


@pytest.mark.parametrize("at", range(3))
def test_unnamed_forks_and_adds_may_have_hooks(at: int) -> None:
    model = sf.Sequential(ops.Fork(), ops.Linear(5, 5), ops.Add(), fusions=())
    seen: list[tuple[str, ...]] = []
    model[at].register_forward_hook(lambda m, args, kwargs, out: seen.append(tuple(kwargs)), with_kwargs=True)
    check(model, lambda p, x: x + lin(p, "1", x), tensor(7, 5))
    assert len(seen) == 3
    assert bool(seen[0]) == (at == 2)


def test_a_channel_made_and_read_inside_a_container_is_private_to_it() -> None:
    block = sf.Sequential(ops.Fork("r"), ops.Tanh(), ops.Add("r"))
    model = sf.Sequential(block, ops.Add("r"))
    x, r = tensor(7, 5), tensor(7, 5, seed=9)
    check(model, lambda p, x, r: torch.tanh(x) + x + r, x, r=r)
    with pytest.raises(sf.InputError, match="'r'"):
        model(x)
    block.register_forward_hook(ignored)
    check(model, lambda p, x, r: torch.tanh(x) + x + r, x, r=r)
    with pytest.raises(sf.InputError, match="'r'"):
        model(x)


def test_a_nested_list_with_public_outputs_works_by_itself_and_inside() -> None:
    inner = sf.Sequential(ops.Scale(2), ops.Fork("r"), ops.Tanh())
    x = tensor(7, 5)
    y, r = inner(x)
    torch.testing.assert_close(r, 2 * x)
    torch.testing.assert_close(y, torch.tanh(2 * x))
    outer = sf.Sequential(inner, ops.Scale(3))
    z, r = outer(x)
    torch.testing.assert_close((z, r), (3 * y, 2 * x))


def test_channels_changed_deep_inside_a_hooked_container_are_seen() -> None:
    inner = sf.Sequential(sf.Sequential(ops.Tanh()))
    inner.register_forward_hook(ignored)
    model = sf.Sequential(ops.Fork("r"), inner)
    x = tensor(7, 5)
    assert len(model(x)) == 2
    inner[0].append(ops.Add("r"))
    check(model, lambda p, x: torch.tanh(x) + x, x)
    inner[0][1].name = "other"
    torch.testing.assert_close(model(x, other=x.detach() * 3)[0], torch.tanh(x) + 3 * x)


def test_a_fork_and_an_add_work_by_themselves() -> None:
    x, r = tensor(7, 5), tensor(7, 5, seed=9)
    torch.testing.assert_close(ops.Add("r")(x, r=r), x + r)
    torch.testing.assert_close(ops.Add()(x, other=r), x + r)
    y, out = ops.Fork("r")(x)
    torch.testing.assert_close((y, out), (x, x))


# Fusions over channels.


WHOLE = ForkGeLUAddForward, ForkGeLUAddBackward


def test_it_is_refused_where_the_channel_is_read_elsewhere_too() -> None:
    model = sf.Sequential(ops.Fork("r"), ops.GeLU(), ops.Add("r"), ops.Scale(2), ops.Add("r"), fusions=WHOLE)
    x = tensor(7, 5)
    plan = model.plan(x)
    assert fused_names(plan) == ([], [])
    assert [(r.fusion, r.at) for r in plan.refused] == [("ForkGeLUAddForward", 0), ("ForkGeLUAddBackward", 0)]
    assert "fork_out" in plan.refused[0].reason
    assert "d_fork_out" in plan.refused[1].reason
    check(model, lambda p, x: 2 * (x + gelu(x)) + x, x)


def test_it_is_refused_where_the_add_closes_another_fork() -> None:
    model = sf.Sequential(
        ops.Fork("s"), ops.Scale(2), ops.Fork("r"), ops.GeLU(), ops.Add("s"), ops.Add("r"), fusions=WHOLE
    )
    x = tensor(7, 5)
    plan = model.plan(x)
    assert fused_names(plan) == ([], [])
    assert {r.fusion for r in plan.refused} == {"ForkGeLUAddForward", "ForkGeLUAddBackward"}
    assert all("fork_out" in r.reason or "add_other" in r.reason for r in plan.refused)
    check(model, lambda p, x: gelu(2 * x) + x + 2 * x, x)


def test_a_fusion_without_the_extra_input_in_its_signature_is_refused() -> None:
    class Deaf(sf.ForwardFusion):
        add: ops.Add
        act: ops.ReLU

        def fwd(self, x: Tensor) -> Any: ...

    model = sf.Sequential(ops.Add("r"), ops.ReLU(), fusions=(Deaf,))
    plan = model.plan(tensor(7, 5), r=tensor(7, 5))
    assert fused_names(plan) == ([], [])
    assert plan.refused[0].reason == "the extra input add_other is not in the signature of its fwd"


def test_an_inference_fusion_may_make_a_channel() -> None:
    class Border(sf.InferenceFusion):
        add: ops.Add
        fork: ops.Fork
        outputs = ("fork_out",)

        def fwd(self, x: Tensor, *, add_other: Tensor) -> Any:
            y = x + add_other
            return y, {"fork_out": y}

    model = sf.Sequential(ops.Add("a"), ops.Fork("b"), ops.Tanh(), ops.Add("b"), fusions=(Border,))
    x, a = tensor(7, 5, grad=False), tensor(7, 5, seed=9, grad=False)
    with sf.fusing(on_error="raise"):
        assert fused_names(model.plan(x, a=a))[0] == ["Border"]
        torch.testing.assert_close(model(x, a=a), torch.tanh(x + a) + x + a)


def test_variadic_slots_name_channels_by_number() -> None:
    class Sum(sf.ForwardFusion):
        adds: tuple[ops.Add, ...]

        def requires(self, env: sf.Env) -> sf.Requirements:
            yield len(self.adds) == 2, "two of them"

        def fwd(self, x: Tensor, *, adds_0_other: Tensor, adds_1_other: Tensor) -> Any:
            return x + adds_0_other + adds_1_other, {"adds": (ops.Add.Saved(), ops.Add.Saved())}

    class SumBack(sf.BackwardFusion):
        adds: tuple[ops.Add, ...]

        def requires(self, env: sf.Env) -> sf.Requirements:
            yield len(self.adds) == 2, "two of them"

        def bwd(self, dy: Tensor, *, adds: Any) -> Any:
            return dy, {"adds.0.other": dy, "adds.1.other": dy}

    model = sf.Sequential(ops.Scale(2), ops.Add("a"), ops.Add("b"), ops.Tanh(), fusions=(Sum, SumBack))
    x, a, b = (tensor(7, 5, seed=s) for s in (1, 2, 3))
    with sf.fusing(on_error="raise"):
        assert fused_names(model.plan(x, a=a, b=b)) == (["Sum"], ["SumBack"])
        check(model, lambda p, x, a, b: torch.tanh(2 * x + a + b), x, a=a, b=b)


# Mistakes.


FORK, WIDE = ops.Fork("r"), ops.Linear(5, 8)
NAMED = OrderedDict(stem=ops.Tanh(), body=sf.Sequential(ops.Tanh(), ops.Add("r")))
GROWS = "adds (7, {0}), which its operations return, to its input, (7, 5)"
# Operations, names of passed channels, and the error: its operation, position, and words.
MISTAKES: dict[str, tuple[Sequence[Any], str, type[sf.SeqfuseError], str, int, tuple[str, ...]]] = {
    "missing": ([ops.Linear(5, 5), ops.Add("r")], "", sf.InputError, "Add", 2, ("'r'",)),
    "surplus": ([ops.Linear(5, 5), ops.Add("left")], "left lfet", sf.InputError, "Add", 2, ("'lfet'", "'left'")),
    "made twice": (
        [ops.Fork("r"), ops.Tanh(), ops.Fork("r"), ops.Add("r")], "", sf.PlanError, "Fork", 2, ("'r'", "position 0")
    ),
    "made twice by one": ([FORK, ops.Tanh(), FORK, ops.Add("r")], "", sf.PlanError, "Fork", 2, ()),
    "read before it is made": (
        [ops.Tanh(), ops.Add("r"), ops.Fork("r")], "", sf.PlanError, "Fork", 2, ("position 1",)
    ),
    "an unnamed one that is not made": ([ops.Tanh(), ops.Add()], "", sf.PlanError, "Add", 1, ("unnamed",)),
    "an unnamed one that is not read": (
        [ops.Tanh(), ops.Fork(), ops.Tanh()], "", sf.PlanError, "Fork", 1, ("unnamed",)
    ),
    "missing in a container": ([NAMED], "", sf.InputError, "Add", 2, ("body.1",)),
    "a residual that grows": (
        [ops.Tanh(), sf.Sequential(ops.Residual(WIDE, ops.GeLU())), ops.Linear(8, 5)],
        "", sf.InputError, "Residual", 5, ("'1.0', position 5", GROWS.format(8)),
    ),
    "a residual around a barrier that shrinks": (
        [ops.Tanh(), sf.Sequential(ops.Residual(nn.Linear(5, 1), ops.GeLU())), ops.Linear(1, 5)],
        "", sf.InputError, "Residual", 4, ("'1.0', position 4", GROWS.format(1)),
    ),
    "of another shape": (
        [ops.Fork("r"), WIDE, ops.Add("r"), ops.Linear(8, 5)],
        "", sf.InputError, "Add", 3, ("its other in the shape of its input, (7, 8), and its Fork sends (7, 5)",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_told_with_its_place(case: str) -> None:
    made, channels, error, operation, position, words = MISTAKES[case]
    model = sf.Sequential(*made)
    for use in (model, model.plan):
        with pytest.raises(error) as caught:
            use(tensor(7, 5), **{name: tensor(7, 5) for name in channels.split()})
        assert (caught.value.operation, caught.value.position) == (operation, position)
        text = str(caught.value)
        assert all(word in text for word in (operation, str(position), *words)), text


@pytest.mark.parametrize("name", ["x", "env", "self"])
def test_a_public_channel_that_no_call_could_pass_is_an_error(name: str) -> None:
    with pytest.raises(sf.PlanError, match=f"'{name}'"):
        sf.Sequential(ops.Tanh(), ops.Add(name)).plan()


def test_shapes_that_do_not_add_up_are_an_error_and_are_not_broadcast() -> None:
    model = sf.Sequential(ops.Linear(5, 3), ops.Add("r"))
    for shape in ((7, 5), (3,), (1, 3), (7, 1), (2, 7, 3)):
        with pytest.raises(sf.InputError, match=r"Add") as caught:
            model(tensor(7, 5), r=tensor(*shape))
        assert (caught.value.operation, caught.value.position) == ("Add", 2)


@pytest.mark.parametrize("calls", [0, 2], ids=["first call", "third call"])
def test_a_channel_on_another_device_is_an_error_that_names_both(calls: int) -> None:
    model = sf.Sequential(ops.Linear(5, 3), ops.Add("r"))
    for _ in range(calls):
        model(tensor(7, 5), r=tensor(7, 3))
    with pytest.raises(sf.InputError, match=r"SF102 .*position 2 \(Add\): expects its other on cpu, .* got meta"):
        model(tensor(7, 5), r=tensor(7, 3).detach().to("meta").requires_grad_())


def test_a_plan_refuses_a_channel_of_the_wrong_shape_as_the_call_does() -> None:
    model = sf.Sequential(
        ops.Linear(4, 6), ops.Residual(ops.ReLU()), ops.Add("r"), ops.Linear(6, 2), nn.Softsign(), ops.Add("behind")
    )
    x = tensor(3, 4)
    given = {"r": tensor(3, 6), "behind": tensor(3, 2)}  # the output of a barrier is not known
    assert len(model.plan(x, **given).names) == len(model.plan(env=sf.Env()).names)
    for call in (model, model.plan):
        with pytest.raises(sf.InputError, match=r"SF101 .*position \d \(Add\): adds tensors .* \(3, 6\) and \(3, 5\)"):
            call(x, **{**given, "r": tensor(3, 5)})


@pytest.mark.parametrize(
    "operation",
    [ops.PositionEmbedding(9, 6, positions="t"), ops.RotaryEmbedding(1, style="half", positions="t")],
    ids=lambda operation: type(operation).__name__,
)
def test_a_plan_refuses_positions_that_do_not_broadcast(operation: nn.Module) -> None:
    model, x = sf.Sequential(operation), tensor(2, 5, 6)
    model.plan(x, t=torch.arange(5))
    for call in (model, model.plan):
        with pytest.raises(sf.InputError, match=r"SF101 .*position 0 .*: expects positions that broadcast to \(2, 5\)"):
            call(x, t=torch.arange(4))


def test_a_channel_that_is_no_tensor_is_an_error() -> None:
    model = sf.Sequential(ops.Linear(5, 3), ops.Add("r"))
    with pytest.raises((sf.InputError, TypeError), match=r"'r'|Add|NoneType"):
        model(tensor(7, 5), r=None)


class Scaled(sf.UnfusedOperation):
    """y = x factor, with the factor from a channel."""

    class Saved(sf.Saved):
        factor: Tensor | None

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name

    @property
    def channels(self) -> dict[str, str | None]:
        return {} if self.name is None else {"factor": self.name}

    def reference(self, x: Tensor, *, factor: Tensor | None = None) -> Tensor:
        return x.clone() if factor is None else x * factor

    def fwd(self, x: Tensor, *, factor: Tensor | None = None) -> tuple[Tensor, Saved]:
        return self.reference(x, factor=factor), self.Saved(factor=factor)

    def bwd(self, dy: Tensor, saved: Saved) -> tuple[Tensor, sf.Grads]:
        return (dy if saved.factor is None else dy * saved.factor), {}


def test_an_extra_input_with_a_default_may_be_left_out_by_an_instance():
    model = sf.Sequential(Scaled(), Scaled("by"), Scaled())
    x = tensor(3, 4).requires_grad_()
    model(x, by=torch.tensor(3.0)).sum().backward()
    assert torch.equal(x.grad, torch.full((3, 4), 3.0))
    assert torch.equal(Scaled()(x), x)
    assert torch.equal(torch.func.functional_call(model, {}, (x,), {"by": torch.tensor(2.0)}), 2 * x)
    with pytest.raises(sf.errors.InputError, match="channel 'by'"):
        model(x)


FROZEN: dict[str, tuple[Callable[[], sf.Sequential], tuple[bool, ...]]] = {
    "the input": (lambda: sf.Sequential(ops.Fork("a"), ops.Linear(5, 5)), (True, False)),
    "the input twice": (lambda: sf.Sequential(ops.Fork("a"), ops.Fork("b"), ops.Linear(5, 5)), (True, False, False)),
    "a view of the input": (lambda: sf.Sequential(ops.Reshape(5), ops.Fork("a"), ops.Linear(5, 5)), (True, False)),
    "frozen operations": (
        lambda: sf.Sequential(ops.Linear(5, 5).requires_grad_(False), ops.Tanh(), ops.Fork("a"), ops.Linear(5, 5)),
        (True, False),
    ),
    "operations that learn": (lambda: sf.Sequential(ops.Linear(5, 5), ops.Fork("a"), ops.Linear(5, 5)), (True, True)),
    "what comes before both": (
        lambda: sf.Sequential(ops.Fork("a"), ops.Linear(5, 5), ops.Fork("b"), ops.Tanh()),
        (True, False, True),
    ),
    "before a barrier": (lambda: sf.Sequential(ops.Fork("a"), ops.Linear(5, 5), nn.Softplus()), (True, False)),
}


@pytest.mark.parametrize("name", FROZEN)
def test_an_output_wants_a_gradient_where_what_made_it_does(name: str):
    make, wants = FROZEN[name]
    model, x = make(), torch.randn(3, 5)
    made = model(x)
    assert tuple(t.requires_grad for t in made) == wants
    with torch.no_grad():
        for t, other in zip(made, model(x), strict=True):
            assert torch.equal(t, other)
    sum(t.sum() for t, wanted in zip(made, wants, strict=True) if wanted).backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    for t in made[1:]:
        t += 1


def test_what_a_channel_carries_past_a_barrier_has_a_gradient_only_where_it_was_made_with_one():
    model = sf.Sequential(ops.Fork("a"), ops.Linear(5, 5), nn.Softplus(), ops.Add("a"), ops.Tanh())
    x = torch.randn(3, 5)
    y = model(x)
    assert "other" not in model.plan(x).needs[4]
    y.sum().backward()
    mine = {n: p.grad for n, p in model.named_parameters()}
    plain = torch.tanh(nn.functional.softplus(nn.functional.linear(x, *model[1].parameters())) + x)
    for g, w in zip(mine.values(), torch.autograd.grad(plain.sum(), [*model.parameters()]), strict=True):
        torch.testing.assert_close(g, w)


def test_a_model_tells_its_public_channels_in_order() -> None:
    model = sf.Sequential(ops.Fork("kept"), ops.Add("late"), ops.Residual(ops.Tanh()), ops.Add("early"))
    assert model.channels == (("late", "early"), ("kept",))
    assert model.channels.inputs == ("late", "early")
    assert model.channels.outputs == ("kept",)
    model.append(ops.Add("kept"))
    assert model.channels == (("late", "early"), ())
    assert sf.Sequential(ops.Tanh()).channels == ((), ())


@pytest.mark.parametrize("given", ["call", "call within vmap", "plan", "plan of an environment"])
def test_a_misspelt_channel_is_named_with_the_one_that_is_near(given: str) -> None:
    model = sf.Sequential(ops.Tanh(), ops.Add("residual"), ops.Add("skip"))
    x = tensor(7, 5)
    if given == "plan of an environment":
        with pytest.raises(sf.InputError, match=r"SF103 .*'residul'.*\nHint: did you mean 'residual'\?"):
            model.plan(env=sf.Env(), residul=x)
        return

    def within_vmap(x: Tensor, **channels: Tensor) -> Any:
        return torch.vmap(lambda t: model(t, **channels))(x)

    use = {"call": model, "call within vmap": within_vmap, "plan": model.plan}[given]
    with pytest.raises(sf.InputError, match=r"\nHint: the call passed 'residul'; did you mean 'residual'\?") as caught:
        use(x, residul=x, skip=x)
    assert (caught.value.code, caught.value.operation, caught.value.position) == ("SF103", "Add", 1)
    with pytest.raises(sf.InputError) as caught:
        use(x, residual=x, skip=x, other=x)
    assert caught.value.hint is None


def test_a_call_with_channels_finds_its_plan_as_one_without(monkeypatch: pytest.MonkeyPatch):
    model = sf.Sequential(ops.Linear(5, 5), ops.Add("a"), ops.Fork("b"), ops.Linear(5, 3))
    x, a = torch.randn(4, 5), torch.randn(4, 5)
    y, b = model(x, a=a)
    monkeypatch.setattr(Fuser, "run", None)
    again = model(x, a=a)
    assert torch.equal(again[0], y)
    assert torch.equal(again[1], b)
    monkeypatch.undo()
    with pytest.raises(sf.InputError, match=r"'a'|'c'"):
        model(x, c=a)
    with pytest.raises(sf.InputError, match=r"'a'|'c'"):
        model(x, a=a, c=a)


@pytest.mark.parametrize("call", ["call", "plan", "compiled"])
def test_tensors_passed_by_position_are_told_the_channels_that_are_passed_by_keyword(call: str) -> None:
    def message(model: Any, *given: torch.Tensor, **channels: torch.Tensor) -> str:
        run = {"call": model, "plan": getattr(model, "plan", None), "compiled": torch.compile(model, backend="eager")}
        with pytest.raises(sf.InputError) as caught:
            run[call](*given, **channels)
        assert caught.value.code == "SF103"
        return str(caught.value)

    x = tensor(3, 5)
    model = sf.Sequential(ops.Linear(5, 5), ops.Add("a"), ops.Multiply("b"))
    can = "what can be passed is 'a' (Add at position 2), 'b' (Multiply at position 3)"
    place = "SF103 '1', position 2 (Add): the call passed"
    by_position = "arguments by position, and x is the only one"
    hint = "\nHint: channels are passed by keyword: model(x,"
    assert message(model, x, x, x) == f"{place} 3 {by_position}; {can}{hint} a=..., b=...)"
    assert message(model, x, x) == f"{place} 2 {by_position}; {can}{hint} a=...)"
    assert message(model, x, x, a=x) == f"{place} 2 {by_position}; {can}{hint} b=...)"
    assert message(model, x, x, a=x, b=x) == f"{place} 2 {by_position}; {can}"
    nothing = f"SF103: the call passed 2 {by_position}; no operation reads a channel from the call"
    assert message(sf.Sequential(ops.Linear(5, 5)), x, x) == nothing
    if call != "plan":
        assert message(ops.Linear(5, 5), x, x) == nothing


def test_the_signature_of_a_call_has_no_surplus() -> None:
    for model in (sf.Sequential(ops.ReLU()), ops.Add("a")):
        assert str(inspect.signature(model.forward)).startswith("(x: 'Tensor', **channels: 'Tensor')")
