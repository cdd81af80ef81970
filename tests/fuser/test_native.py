"""A region that comes down to calls of torch runs them directly, by autograd itself, without a node of this library."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import compiler, ops
from seqfuse.fusions import LinearBias, LinearBiasAct
from seqfuse.plan.native import TorchCalls
from tests.fuser.fusions import BiasTanhForward, tensor
from tests.fuser.kit import PlainResidual
from tests.watching import saving

needs_compiler = pytest.mark.skipif(compiler.compiler() is None, reason="no C compiler")


class BiasTanh(BiasTanhForward):
    """As an author writes one."""

    def saves(self, env: sf.Env) -> sf.Savings:
        return sf.Savings(launches=9)


def pair(**options: Any) -> tuple[sf.Sequential, nn.Sequential]:
    """A model of native operations, and the same in torch, with one set of parameters."""
    ours = sf.Sequential(ops.LayerNorm(5), ops.Linear(5, 7), ops.GeLU(), ops.Linear(7, 3), ops.Tanh(), **options)
    theirs = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3), nn.Tanh())
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def nodes(y: Tensor) -> list[str]:
    seen, left = list[str](), [y.grad_fn]
    while left:
        node = left.pop()
        if node is not None:
            seen.append(type(node).__name__)
            left += [fn for fn, _ in node.next_functions]
    return seen


def passes(model: nn.Module, x: Tensor) -> list[Tensor]:
    leaf = x.detach().requires_grad_()
    y = model(leaf)
    return [
        y.detach(),
        *torch.autograd.grad((y * torch.arange(1.0, 1 + y.shape[-1])).sum(), [leaf, *model.parameters()]),
    ]


@pytest.mark.parametrize("memory", ["fast", "balanced"])
def test_it_is_torch_bit_for_bit_and_has_its_nodes(memory: Any) -> None:
    ours, theirs = pair(memory=memory)
    x = tensor(4, 5, dtype=torch.float32)
    for _ in range(3):
        for got, want in zip(passes(ours, x), passes(theirs, x), strict=True):
            assert torch.equal(got, want)
    assert nodes(ours(x)) == nodes(theirs(x))
    with saving() as kept:
        ours(x), theirs(x)
    assert kept


def test_what_has_to_save_less_than_torch_does_has_a_node() -> None:
    ours, theirs = pair(memory="lean")
    x = tensor(4, 5, dtype=torch.float32)
    assert nodes(ours(x)) != nodes(theirs(x))


def test_so_does_a_residual_block_bit_for_bit() -> None:
    ours = sf.Sequential(ops.Residual(ops.LayerNorm(5), ops.Linear(5, 7), ops.GeLU(), ops.Linear(7, 5)), ops.Tanh())
    theirs = nn.Sequential(PlainResidual(nn.LayerNorm(5), nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5)), nn.Tanh())
    theirs.load_state_dict(dict(zip(theirs.state_dict(), ours.state_dict().values(), strict=True)))
    x = tensor(4, 5, dtype=torch.float32)
    for mine, its in zip(passes(ours, x), passes(theirs, x), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=0)
    assert "AddBackward0" in nodes(ours(x.requires_grad_()))


def test_a_channel_that_leaves_is_a_result_of_torchs_calls() -> None:
    model = sf.Sequential(
        ops.Linear(5, 5), ops.Fork("inside"), ops.Fork("left"), ops.Tanh(), ops.Fork("right"), ops.Add("inside"),
        ops.LayerScale(5), ops.Bias(5), ops.Scale(-3.0), ops.Reshape(1, 5), ops.Transpose(-1, -2),
    )  # fmt: skip
    nn.init.normal_(model[6].gamma)
    x = tensor(4, 5, dtype=torch.float32).requires_grad_()
    left = nn.functional.linear(x, model[0].weight, model[0].bias)
    y = ((left.tanh() + left) * model[6].gamma + model[7].bias) * -3.0
    want = y.view(4, 1, 5).mT, left, left.tanh()
    for _ in range(2):
        got = model(x)
        for mine, its in zip(got, want, strict=True):
            assert torch.equal(mine, its)
    assert "SeqfuseBackward" not in nodes(got[0])
    (region,) = model._fuser.op_list().parts
    channels = dict[str, Tensor]()
    region.latest(x, channels, None)
    assert channels.keys() == {"left", "right"}
    sums = [sum((t * (3 + i)).square().sum() for i, t in enumerate(tensors)) for tensors in (got, want)]
    for mine, its in zip(*(torch.autograd.grad(s, [x, *model.parameters()]) for s in sums), strict=True):
        torch.testing.assert_close(mine, its)


ALIASES: dict[str, tuple[Any, ...]] = {
    "the input": (ops.Fork("left"), ops.Linear(5, 5)),
    "the result": (ops.Linear(5, 5), ops.Fork("left")),
    "a view of the result": (ops.Linear(5, 5), ops.Fork("left"), ops.Transpose(0, 1)),
    "another channel": (ops.Linear(5, 5), ops.Fork("left"), ops.Fork("right"), ops.Linear(5, 5)),
}


@pytest.mark.parametrize("operations", ALIASES.values(), ids=ALIASES)
def test_a_channel_that_is_also(operations: Any) -> None:
    x = tensor(4, 5, dtype=torch.float32).requires_grad_()
    y, *left = sf.Sequential(*operations)(x)
    assert "SeqfuseBackward" in nodes(y)
    assert "SeqfuseBackward" in nodes(left[-1])


def test_a_channel_that_enters_is_an_operand_of_torchs_calls() -> None:
    model = sf.Sequential(ops.Linear(5, 5), ops.Add("right"), ops.Tanh(), ops.Add("right"))
    x, right = (tensor(4, 5, dtype=torch.float32, seed=seed).requires_grad_() for seed in (0, 1))
    for _ in range(2):
        want = torch.tanh(nn.functional.linear(x, model[0].weight, model[0].bias) + right) + right
        got = model(x, right=right)
        assert torch.equal(got, want)
        weight = torch.arange(1.0, 21.0).view(4, 5)
        inputs = [x, right, *model.parameters()]
        for mine, its in zip(*(torch.autograd.grad(y, inputs, weight) for y in (got, want)), strict=True):
            torch.testing.assert_close(mine, its, rtol=0, atol=0)
    assert "AddmmBackward0" in nodes(got)
    with pytest.raises(sf.InputError, match=r"SF101 .*position 2 \(Add\): adds tensors of one shape") as caught:
        model(x, right=right[:3])
    assert caught.value.path == "1"


def test_a_channel_of_several_regions_outlives_the_first() -> None:
    model = sf.Sequential(ops.Linear(5, 5), ops.Add("r"), nn.Softsign(), ops.Add("r"), ops.Tanh())
    x, r = (tensor(4, 5, dtype=torch.float32, seed=seed).requires_grad_() for seed in (0, 1))
    want = torch.tanh(nn.functional.softsign(nn.functional.linear(x, model[0].weight, model[0].bias) + r) + r)
    for _ in range(2):
        assert torch.equal(model(x, r=r), want)


SMALL = "tensors this small gain nothing from a C kernel"


def in_c(plan: sf.Plan) -> bool:
    return plan.compiler is not None


@needs_compiler
def test_small_tensors_take_torchs_calls_instead_of_c_kernels() -> None:
    model = sf.Sequential(ops.LayerNorm(64), ops.Linear(64, 64), ops.ReLU(), ops.Linear(64, 64), ops.Add("r"))
    x, r = (tensor(64, 64, dtype=torch.float32, seed=seed).requires_grad_() for seed in (0, 1))
    plan = model.plan(x, r=r)
    assert not in_c(plan)
    assert {refusal.reason for refusal in plan.refused if refusal.fusion == "PointwiseChainBackward"} == {SMALL}
    assert "SeqfuseBackward" not in nodes(model(x, r=r))
    with sf.fusing(unmeasured=True):
        in_kernels = model.plan(x, r=r)
        assert in_c(in_kernels)
        assert in_kernels.cost == plan.cost
        assert "SeqfuseBackward" in nodes(model(x, r=r))
    many = [tensor(2048, 64, dtype=torch.float32, seed=seed).requires_grad_() for seed in (0, 1)]
    assert in_c(model.plan(many[0], r=many[1]))  # 2 ** 17 elements
    model.memory = "balanced"
    assert not in_c(model.plan(x, r=r))
    model.memory = "lean"
    assert "SeqfuseBackward" in nodes(model(x, r=r))
    assert all(choice.microseconds >= 0 for choice in plan.choices)
    assert len(plan.choices) > 1
    assert in_c(sf.Sequential(ops.Linear(64, 64), ops.ReLU(), memory="lean").plan(x))
    without_features = sf.Sequential(ops.Scale(2.0), ops.Tanh())
    assert not in_c(without_features.plan(x))
    assert in_c(without_features.plan(many[0]))


class Watch(nn.Module):
    """Notes its input the first time, and afterwards whether that is gone."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.seen[0]() is None if self.seen else weakref.ref(x))
        return x * 1.0


def test_a_channel_is_freed_after_its_last_reader() -> None:
    seen: list[Any] = []
    model = sf.Sequential(
        ops.Linear(5, 5), ops.Fork("r"), Watch(seen), ops.Tanh(), ops.Add("r"), Watch(seen), ops.Tanh()
    )
    with torch.no_grad():
        model(tensor(4, 5, dtype=torch.float32))
        seen.clear()
        model(tensor(4, 5, dtype=torch.float32))
    assert seen[1]


def test_on_a_gpu_a_launch_counts() -> None:
    calls = TorchCalls((), 4096, 1 << 17, on_cpu=False)
    fusion = LinearBiasAct(linear=ops.Linear(64, 64), bias=None, act=ops.ReLU())
    assert not calls.faster_than(fusion)
    assert calls._replace(on_cpu=True).faster_than(fusion)
    assert calls._replace(elements=1000).faster_than(fusion)
    assert calls.faster_than(LinearBias(linear=ops.Linear(64, 64), bias=ops.Bias(64)))


CHANGED: dict[str, Any] = {
    "exact GeLU": lambda model: model.__setitem__(1, ops.GeLU()),
    "dropout": lambda model: model.append(ops.Dropout(0.5)),
    "a fusion of the user": lambda model: setattr(model, "fusions", (*model.fusions, BiasTanh)),
}


@needs_compiler
@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_c_kernels_run_where_torch_is_not_faster(change: Any) -> None:
    model = sf.Sequential(ops.Linear(64, 64), ops.Tanh(), ops.LayerNorm(64), ops.Linear(64, 64), ops.ReLU())
    x = tensor(64, 64, dtype=torch.float32).requires_grad_()
    assert not in_c(model.plan(x))
    change(model)
    assert in_c(model.plan(x))
    assert "SeqfuseBackward" in nodes(model(x))


def test_a_sum_of_two_shapes_is_refused_as_ever() -> None:
    with pytest.raises(sf.InputError, match="both must have one shape"):
        sf.Sequential(ops.Residual(ops.Linear(5, 7)))(tensor(4, 5, dtype=torch.float32))


def test_a_second_derivative_is_torchs() -> None:
    ours, theirs = pair()
    x = tensor(4, 5, dtype=torch.float32).requires_grad_()

    def twice(model: nn.Module) -> Tensor:
        (d,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(d.square().sum(), x)[0]

    assert torch.equal(twice(ours), twice(theirs))


CHANGES: dict[str, Any] = {
    "a frozen parameter": lambda model: model[1].weight.requires_grad_(False),
    "main_grad": lambda model: setattr(model[1].weight, "main_grad", torch.zeros(7, 5)),
    "lean": lambda model: setattr(model, "memory", "lean"),
    "a fusion": lambda model: setattr(model, "fusions", (BiasTanh,)),
    "an operation that is several calls": lambda model: model.append(ops.SquaredReLU()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_torch_does_not_do_runs_behind_a_node(change: Any) -> None:
    model, _ = pair()
    x = tensor(4, 5, dtype=torch.float32)
    assert "SeqfuseBackward" not in nodes(model(x))
    change(model)
    y = model(x)
    assert "SeqfuseBackward" in nodes(y)
    y.sum().backward()
    buffer = getattr(model[1].weight, "main_grad", None)
    assert buffer is None or buffer.abs().sum() > 0


def test_a_main_grad_that_comes_later_is_seen_by_the_guard() -> None:
    model, _ = pair()
    x = tensor(4, 5, dtype=torch.float32)
    for _ in range(2):
        model(x).sum().backward()
    model[1].weight.main_grad = torch.zeros(7, 5)
    model[1].weight.grad = None
    model(x).sum().backward()
    assert model[1].weight.grad is None
    assert model[1].weight.main_grad.abs().sum() > 0


def test_hooks_that_come_later_see_each_tensor_once_behind_a_node() -> None:
    model, x = sf.Sequential(ops.Linear(5, 7), ops.Tanh(), ops.Linear(7, 3)), tensor(4, 5, dtype=torch.float32)
    assert "SeqfuseBackward" not in nodes(model(x))
    with saving() as kept:
        assert "SeqfuseBackward" in nodes(model(x))
    assert len(kept) == len({t.data_ptr() for t in kept}) > 0


def test_autocast_and_16_bits_run_behind_a_node() -> None:
    model, _ = pair()
    x = tensor(4, 5, dtype=torch.float32)
    model(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert "SeqfuseBackward" in nodes(model(x))
    assert "SeqfuseBackward" in nodes(model.bfloat16()(x.bfloat16()))


def test_an_error_names_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(x: Tensor) -> Tensor:
        raise RuntimeError("no")

    model = sf.Sequential(ops.Linear(5, 5), ops.Tanh())
    monkeypatch.setattr(ops.Tanh, "torch_call", lambda self: broken)
    with pytest.raises(RuntimeError, match="no") as caught:
        model(tensor(4, 5, dtype=torch.float32))
    assert any(note.startswith("in operation Tanh at") and "position 2" in note for note in caught.value.__notes__)


def test_a_subclass_with_a_forward_of_its_own_is_not_its_base() -> None:
    class Twice(ops.Linear):
        def reference(self, x: Tensor) -> Tensor:
            return 2 * super().reference(x)

        def fwd(self, x: Tensor) -> Any:
            y, saved = super().fwd(x)
            return 2 * y, saved

        def bwd(self, dy: Tensor, saved: Any, *, needs: Any, main_grads: Any) -> Any:
            return super().bwd(2 * dy, saved, needs=needs, main_grads=main_grads)

    class Half(ops.Tanh):
        def reference(self, x: Tensor) -> Tensor:
            return torch.tanh(x / 2)

    x = tensor(4, 5, dtype=torch.float32)
    model = sf.Sequential(Twice(5, 5, bias=False), ops.Sigmoid())
    torch.testing.assert_close(model(x), torch.sigmoid(2 * nn.functional.linear(x, model[0].weight)))
    assert "SeqfuseBackward" in nodes(model(x))
    assert not Half.native
