"""Outputs of a sequence may be changed in place, like those of `torch.nn`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops

from .fusions import BiasTanhForward
from .kit import draw, randomize

Torch = Callable[[Tensor, dict[str, Tensor]], Any]


class Doubles(nn.Module):
    """A user's module that changes its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


def linear(x: Tensor, p: dict[str, Tensor], at: int = 0) -> Tensor:
    return F.linear(x, p[f"{at}.weight"], p[f"{at}.bias"])


# Sequences, and torch functions of the input and the parameters by name that compute the same.
LISTS: dict[str, tuple[Callable[[], list[nn.Module]], Torch]] = {
    "Identity": (lambda: [ops.Identity()], lambda x, p: x),
    "Dropout, p = 0": (lambda: [ops.Dropout(0.0)], lambda x, p: F.dropout(x, 0.0)),
    "Dropout, evaluation": (lambda: [ops.Dropout(0.5).eval()], lambda x, p: F.dropout(x, 0.5, False)),
    "Dropout, downscaled": (lambda: [ops.Dropout(0.5, "downscale_in_infer").eval()], lambda x, p: x * 0.5),
    "Reshape": (lambda: [ops.Reshape(2, 2)], lambda x, p: x.unflatten(-1, (2, 2))),
    "several that pass it on": (
        lambda: [ops.Identity(), ops.Reshape(2, 2), ops.Dropout(0.0), ops.Reshape(4, dims=2)],
        lambda x, p: x.unflatten(-1, (2, 2)).flatten(-2),
    ),
    "behind a barrier": (lambda: [nn.Softplus(), ops.Identity()], lambda x, p: F.softplus(x)),
    "before a barrier": (lambda: [ops.Identity(), Doubles()], lambda x, p: x.mul_(2)),
    "Scale, Identity": (lambda: [ops.Scale(3.0), ops.Identity()], lambda x, p: x * 3),
    "Scale, Reshape": (lambda: [ops.Scale(3.0), ops.Reshape(2, 2)], lambda x, p: (x * 3).unflatten(-1, (2, 2))),
    "Linear": (lambda: [ops.Linear(4, 4)], linear),
    "Linear, Reshape": (lambda: [ops.Linear(4, 4), ops.Reshape(2, 2)], lambda x, p: linear(x, p).unflatten(-1, (2, 2))),
    "Linear before a barrier": (lambda: [ops.Linear(4, 4), Doubles()], lambda x, p: linear(x, p).mul_(2)),
    "a first Fork": (lambda: [ops.Fork("a"), ops.Scale(3.0)], lambda x, p: (x * 3, x)),
    "a last Fork": (lambda: [ops.Scale(3.0), ops.Fork("a")], lambda x, p: ((x * 3), None)),
    "a Fork alone": (lambda: [ops.Fork("a")], lambda x, p: (x, None)),
    "a Fork, then Reshape": (
        lambda: [ops.Scale(3.0), ops.Fork("a"), ops.Reshape(2, 2)],
        lambda x, p: ((x * 3).unflatten(-1, (2, 2)), x * 3),
    ),
    "two Forks": (lambda: [ops.Fork("a"), ops.Fork("b"), ops.Scale(3.0)], lambda x, p: (x * 3, x, None)),
    "a residual around a barrier": (
        lambda: [ops.Scale(3.0), ops.Residual(Doubles())],
        lambda x, p: 2 * (x * 3).mul_(2),
    ),
    "a residual around a view and a barrier": (
        lambda: [ops.Scale(3.0), ops.Residual(ops.Reshape(4), nn.Softplus())],
        lambda x, p: F.softplus(x * 3) + x * 3,
    ),
}


def outcome(run: Callable[[Tensor], Any], leaves: list[Tensor], which: int, shape: tuple[int, ...]) -> dict[str, Any]:
    """Run on a tensor with a graph before it, change one result in place, and differentiate everything."""
    leaf, factor = draw(*shape).requires_grad_(), draw(*shape, seed=5).requires_grad_()
    out = run(leaf * 1.0)
    made = [out] if isinstance(out, Tensor) else [*out]
    made = [made[i - 1] if t is None else t for i, t in enumerate(made)]  # the same tensor again
    made[which] += 1
    made[which] *= factor.view(made[which].shape)
    loss = torch.stack([(t.flatten() * draw(t.numel(), seed=7 + i)).sum() for i, t in enumerate(made)]).sum()
    grads = torch.autograd.grad(loss, [leaf, factor, *leaves])
    return {"made": [t.detach() for t in made], "grads": grads}


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)], ids=["matrix", "three dimensions"])
@pytest.mark.parametrize("name", LISTS)
def test_a_result_changed_in_place_gives_the_numbers_and_gradients_of_torch(name: str, shape: tuple[int, ...]) -> None:
    make, twin = LISTS[name]
    model = randomize(sf.Sequential(*make())).double()
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        several = model(draw(*shape))
    for which in range(1 if isinstance(several, Tensor) else len(several)):
        leaves = [*parameters.values()]
        got = outcome(model, leaves, which, shape)
        want = outcome(lambda x: twin(x, parameters), leaves, which, shape)
        for key, tensors in want.items():
            for g, w in zip(got[key], tensors, strict=True):
                torch.testing.assert_close(g, w, msg=lambda m, at=(which, key): f"{at}: {m}")


ALIASES: dict[str, tuple[nn.Module, nn.Module]] = {
    "Identity": (ops.Identity(), nn.Identity()),
    "Dropout, p = 0": (ops.Dropout(0.0), nn.Dropout(0.0)),
    "Dropout, evaluation": (ops.Dropout().eval(), nn.Dropout().eval()),
    "Reshape": (ops.Reshape(2, 2), nn.Unflatten(-1, (2, 2))),
    "Scale": (ops.Scale(1.0), nn.Dropout(0.5)),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", ALIASES)
def test_the_input_changes_with_the_result_where_that_of_torch_does(name: str, grad: bool) -> None:
    changed = []
    for module in (sf.Sequential(ALIASES[name][0]), ALIASES[name][1]):
        x = draw(3, 4).requires_grad_(grad) * 1.0
        before = x.detach().clone()
        y = module(x)
        y += 1
        changed.append(not torch.equal(x, before))
    assert changed[0] == changed[1]


@pytest.mark.parametrize("part", [..., 1], ids=["whole", "a part of it"])
def test_a_public_output_that_is_the_input_leaves_the_input_as_it_was(part: Any) -> None:
    model, whole = sf.Sequential(ops.Fork("a"), ops.Linear(4, 4).double()), draw(2, 3, 4).requires_grad_() * 1.0
    before, x = whole.detach().clone(), whole[part] if part == 1 else whole
    y, a = model(x)
    a += 1
    torch.autograd.grad(y.sum() + a.sum(), [x, *model.parameters()])  # tensors that the gradients need were not changed
    assert torch.equal(whole, before)


@pytest.mark.parametrize("fusions", [(), (BiasTanhForward,)], ids=["unfused", "fused"])
def test_a_result_that_the_backward_reads_is_not_changed_in_silence(fusions: Any) -> None:
    model = sf.Sequential(ops.Bias(4), ops.Tanh(), ops.Reshape(2, 2), fusions=fusions).double()
    y = model(draw(3, 4).requires_grad_())
    y += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("make", [lambda: ops.Linear(4, 4), lambda: ops.Reshape(2, 2)], ids=["Linear", "Reshape"])
def test_a_frozen_list_gives_what_may_be_changed_in_place(make: Callable[[], nn.Module]) -> None:
    model = sf.Sequential(make()).double().requires_grad_(False)
    y, w = model(draw(2, 3, 4)), draw(1).requires_grad_()
    y += w
    (g,) = torch.autograd.grad(y.sum(), w)
    assert g.item() == y.numel()


def test_a_view_that_leaves_beside_a_channel_may_be_changed_in_place() -> None:
    model = sf.Sequential(ops.GeLU(), ops.Fork("a"), ops.Transpose(-1, -2), Doubles(), ops.Add("a"))
    x, theirs = draw(4, 4).requires_grad_(), draw(4, 4).requires_grad_()
    for _ in range(3):  # the first call checks its steps
        y = model(x)
        h = F.gelu(theirs)
        want = h.mT * 2 + h
        torch.testing.assert_close(
            (y, *torch.autograd.grad(y.sum(), x)), (want, *torch.autograd.grad(want.sum(), theirs))
        )


def test_a_channel_that_leaves_a_frozen_part_needs_no_gradient() -> None:
    model = sf.Sequential(
        ops.Linear(4, 4).requires_grad_(False), ops.Fork("a"), ops.Linear(4, 4), Doubles(), ops.Add("a")
    )
    for _ in range(3):
        y = model(draw(3, 4).float())
        assert y.grad_fn is not None
        assert sum(node is not None for node, _ in y.grad_fn.next_functions) == 1, "that of the trained Linear"
