"""Take: what the chain had waits in a channel while it goes on from another, and no gradient is lost."""

import pytest
import torch

import seqfuse as sf
from seqfuse import ops
from seqfuse.testing import check_op, seeded_randn


def randomized(model: sf.Sequential) -> sf.Sequential:
    for i, parameter in enumerate(model.parameters()):
        parameter.data = seeded_randn(tuple(parameter.shape), 20 + i)
    return model


def agrees(model: sf.Sequential, x: torch.Tensor, wanted, **channels: torch.Tensor) -> None:
    leaves = [x.requires_grad_(), *channels.values(), *model.parameters()]
    found, dy = model(x, **channels), seeded_randn(tuple(x.shape), 9)
    expected = wanted(*model, x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, leaves, dy), torch.autograd.grad(expected, leaves, dy))


def test_keeps_its_contract():
    check_op(ops.Take("other", "out"), seeded_randn((5, 6), 0))


def test_branches_of_a_parallel_block_read_one_input():
    model = randomized(
        sf.Sequential(
            ops.Fork("r"), ops.LayerNorm(6), ops.Linear(6, 6), ops.Take("r"), ops.LayerNorm(6), ops.Linear(6, 6),
            ops.GeLU(), ops.Add(), ops.Add("r"),
        )
    )  # fmt: skip

    def by_hand(fork, norm, first, take, other, second, act, add, last, x):
        return x + first(norm(x)) + act(second(other(x)))

    agrees(model, seeded_randn((5, 6), 0), by_hand)


def test_branches_may_share_a_norm():
    model = randomized(
        sf.Sequential(
            ops.Fork("r"), ops.LayerNorm(6), ops.Fork("n"), ops.Linear(6, 6), ops.Take("n", "attention"),
            ops.Linear(6, 6), ops.Add("attention"), ops.Add("r"),
        )
    )  # fmt: skip

    def by_hand(fork, norm, shared, first, take, second, add, last, x):
        return x + first(norm(x)) + second(norm(x))

    agrees(model, seeded_randn((5, 6), 0), by_hand)


def test_takes_a_public_input_and_gives_a_public_output():
    model = sf.Sequential(ops.Scale(2.0), ops.Take("new", "old"), ops.Scale(3.0))
    x, new = seeded_randn((5, 6), 0).requires_grad_(), seeded_randn((5, 6), 1).requires_grad_()
    y, old = model(x, new=new)
    torch.testing.assert_close((y, old), (3 * new, 2 * x))
    (3 * y + old).sum().backward()
    torch.testing.assert_close((x.grad, new.grad), (torch.full((5, 6), 2.0), torch.full((5, 6), 9.0)))


@pytest.mark.parametrize("used", ["y", "old"])
def test_what_is_not_used_has_no_gradient_or_zeros(used: str):
    model = sf.Sequential(ops.Scale(2.0), ops.Take("new", "old"), ops.Scale(3.0))
    x, new = seeded_randn((5, 6), 0).requires_grad_(), seeded_randn((5, 6), 1).requires_grad_()
    out = dict(zip(("y", "old"), model(x, new=new), strict=True))
    out[used].sum().backward()
    wanted = (new, 3.0) if used == "y" else (x, 2.0)
    for leaf in (x, new):
        factor = wanted[1] if leaf is wanted[0] else 0.0
        grad = torch.zeros(5, 6) if leaf.grad is None else leaf.grad
        torch.testing.assert_close(grad, torch.full((5, 6), factor))


def test_without_a_name_it_takes_the_nearest_open_fork():
    model = sf.Sequential(ops.Fork(), ops.Scale(2.0), ops.Take(), ops.Scale(5.0), ops.Add())
    x = seeded_randn((5, 6), 0)
    torch.testing.assert_close(model(x), 7 * x)


def test_compiles_whole():
    model = sf.Sequential(ops.Fork("r"), ops.GeLU(), ops.Take("r"), ops.Tanh(), ops.Add())
    x = seeded_randn((5, 6), 0)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))


def test_another_shape_is_refused():
    model = sf.Sequential(ops.ReLU(), ops.Take("a", "b"))
    with pytest.raises(sf.InputError, match=r"SF101 position 1 \(Take\): takes a tensor of the shape of x, got \(6,\)"):
        model(torch.zeros(5, 6), a=torch.zeros(6))


def test_says_how_it_was_made():
    assert [repr(op) for op in (ops.Take(), ops.Take("a"), ops.Take("a", "b"), ops.Take(to="b"))] == [
        "Take()", "Take('a')", "Take('a', to='b')", "Take(to='b')",
    ]  # fmt: skip
