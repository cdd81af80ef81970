"""A region that comes down to calls of torch runs them directly, by autograd itself, without a node of this library."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from tests.fuser.fusions import BiasTanhForward, tensor
from tests.fuser.kit import PlainResidual
from tests.watching import saving


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


@pytest.mark.parametrize("public", ["a channel that leaves", "a channel that enters"])
def test_channels_of_the_caller_run_behind_a_node(public: str) -> None:
    x, other = (tensor(4, 5, dtype=torch.float32, seed=seed).requires_grad_() for seed in (0, 1))
    if public == "a channel that leaves":
        y, left = sf.Sequential(ops.Fork("left"), ops.Linear(5, 5))(x)
        assert left is not None
    else:
        y = sf.Sequential(ops.Linear(5, 5), ops.Add("right"))(x, right=other)
    assert "AddmmBackward0" not in nodes(y)


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
    "an operation that is several calls": lambda model: model.append(ops.Scale(2.0)),
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
