"""Route, Permute and Unpermute, and blocks of experts built of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import seqfuse as sf
from seqfuse import ops
from seqfuse.testing import assert_bitwise_equal, check_op, exact, seeded_randn

ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "not normalized": {"normalize": False, "scale": 2.5},
    "sigmoid": {"score": "sigmoid"},
    "with a bias": {"bias": True},
    "groups": {"normalize": False, "groups": (3, 2)},
    "corrections below the scores": {"correction": True, "groups": (3, 1)},
    "as DeepSeek-V3": {"score": "sigmoid", "correction": True, "groups": (3, 2), "scale": 2.5},
}


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_keeps_its_contract(name: str):
    op = ops.Route(6, 6, 2, **ROUTERS[name])
    if op.correction is not None:
        op.correction.copy_(seeded_randn((6,), 1))
    check_op(op, seeded_randn((40, 6), 0))


def routed(op: ops.Route, x: Tensor) -> tuple[Tensor, Tensor]:
    """Experts and factors of each token, one token at a time."""
    experts: list[list[int]] = []
    probs: list[Tensor] = []
    for token in x:
        logits = op.weight @ token + (0 if op.bias is None else op.bias)
        scores = logits.softmax(0) if op.score == "softmax" else 1 / (1 + (-logits).exp())
        choice = scores.detach() + (0 if op.correction is None else op.correction)
        allowed = set(range(op.experts))
        if op.groups is not None:
            cut, taken = op.groups
            parts = [list(range(i * op.experts // cut, (i + 1) * op.experts // cut)) for i in range(cut)]
            count = 1 if op.correction is None else 2
            best = sorted(parts, key=lambda part: -sum(sorted(float(choice[e]) for e in part)[-count:]))
            allowed = {e for part in best[:taken] for e in part}
        chosen = sorted(allowed, key=lambda e: -float(choice[e]))[: op.top_k]
        taken_scores = scores[chosen]
        probs.append(op.scale * (taken_scores / taken_scores.sum() if op.normalize else taken_scores))
        experts.append(chosen)
    return torch.tensor(experts), torch.stack(probs)


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_does_what_it_says(name: str):
    op = ops.Route(6, 6, 2, dtype=torch.float64, **ROUTERS[name])
    if op.correction is not None:
        op.correction.copy_(0.3 * seeded_randn((6,), 1) - 2)  # scores below 0
    x = seeded_randn((30, 6), 0, dtype=torch.float64).requires_grad_()
    y, experts, probs = sf.Sequential(op)(x)
    expected, factors = routed(op, x)
    assert torch.equal(experts, expected)
    torch.testing.assert_close(probs, factors)
    assert_bitwise_equal(y, x)
    leaves, dprobs, dy = [x, *op.parameters()], seeded_randn((30, 2), 2, dtype=torch.float64), torch.ones_like(x)
    found = torch.autograd.grad([y, probs], leaves, [dy, dprobs])
    torch.testing.assert_close(found, torch.autograd.grad([x * 1, factors], leaves, [dy, dprobs]))


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_runs_without_tokens(name: str):
    op, x = ops.Route(6, 6, 2, **ROUTERS[name]), torch.ones(2, 0, 6, requires_grad=True)
    y, experts, probs = sf.Sequential(op)(x)
    (y.sum() + probs.sum()).backward()
    assert experts.shape == probs.shape == (2, 0, 2)
    assert x.grad is not None
    assert op.weight.grad is not None
    assert not op.weight.grad.any()


def test_a_softmax_over_what_is_chosen_is_a_normalized_one():
    op, x = ops.Route(6, 5, 3, bias=True), seeded_randn((9, 6), 0)
    _, made, _ = op.fwd(x)
    chosen = torch.nn.functional.linear(x, op.weight, op.bias).topk(3, -1)
    assert torch.equal(made["experts"], chosen.indices)
    torch.testing.assert_close(made["probs"], chosen.values.softmax(-1))


def test_of_logits_whose_sigmoids_are_1_the_greatest_is_chosen():
    op = ops.Route(4, 4, 1, "sigmoid", normalize=False)
    op.weight.data = torch.diag(torch.tensor([40.0, 50.0, 60.0, 45.0]))
    _, made, _ = op.fwd(torch.ones(3, 4))
    assert made["experts"].tolist() == [[2], [2], [2]]
    assert torch.equal(op.reference(torch.ones(3, 4))[1]["experts"], made["experts"])


def test_factors_of_sigmoids_that_are_0_are_0():
    op, x = ops.Route(4, 4, 2, "sigmoid"), torch.ones(3, 4)
    op.weight.data.fill_(-50.0)
    for made in (op.fwd(x)[1], op.reference(x)[1]):
        assert torch.equal(made["probs"], torch.zeros(3, 2))


CASES = st.tuples(st.integers(1, 8), st.integers(1, 9), st.integers(0, 12), st.integers(0, 2**31))


def drawn(case: tuple[int, int, int, int], drops: bool) -> tuple[Tensor, Tensor]:
    """Experts, some without tokens, and integer tokens, of which every sum is exact."""
    top_k, experts, tokens, seed = case
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(-1 if drops else 0, experts + drops, (tokens, top_k), generator=generator)
    return chosen, exact("integers", (tokens, 5), seed % 1000)


@given(case=CASES)
def test_unpermute_undoes_permute(case: tuple[int, int, int, int]):
    chosen, x = drawn(case, drops=False)
    y, made, _ = ops.Permute(case[1], case[0]).fwd(x, experts=chosen)
    back, _ = ops.Unpermute(None).fwd(y, **made)
    assert_bitwise_equal(back, case[0] * x)


@given(case=CASES)
def test_rows_are_sorted_by_expert_and_then_by_token(case: tuple[int, int, int, int]):
    chosen, x = drawn(case, drops=True)
    y, made, _ = ops.Permute(case[1], case[0]).fwd(x, experts=chosen)
    pairs = [(int(e), t) for t, row in enumerate(chosen) for e in row]
    kept = [t for e in range(case[1]) for of, t in pairs if of == e]
    rows = y.reshape(-1, 5)
    assert_bitwise_equal(rows[: len(kept)], x[kept])
    assert not rows[len(kept) :].any()
    counts = [sum(of == e for of, _ in pairs) for e in range(case[1])]
    assert made["offsets"].tolist() == torch.tensor(counts).cumsum(0).tolist()
    assert sorted(made["rows"].flatten().tolist()) == list(range(len(pairs)))


@given(case=CASES)
def test_gradients_are_those_of_each_pair(case: tuple[int, int, int, int]):
    """Against a sum over pairs of tokens and experts; integers, so that every order gives the same bits."""
    top_k, experts, tokens, _ = case
    chosen, x = drawn(case, drops=True)
    kept = (chosen >= 0) & (chosen < experts)
    probs, dy = exact("integers", (tokens, top_k), 1), exact("integers", (tokens, 5), 2)
    model = sf.Sequential(ops.Permute(experts, top_k), ops.Scale(2.0), ops.Unpermute())
    leaves = [x.requires_grad_(), probs.requires_grad_()]
    y = model(x, experts=chosen, probs=probs)
    expected = (torch.where(kept, probs, 0).sum(-1, keepdim=True) * 2 * x) if tokens else x
    assert torch.equal(y, expected)
    found = torch.autograd.grad(y, leaves, dy)
    factors = torch.where(kept, probs, 0).sum(-1, keepdim=True)
    # Only the sign of 0 may differ: an empty sum plus -0.
    assert torch.equal(found[0], 2 * factors * dy)
    assert torch.equal(found[1], torch.where(kept, (2 * x * dy).sum(-1, keepdim=True), 0).expand(tokens, top_k))


@pytest.mark.parametrize("top_k", [1, 3])
def test_both_keep_their_contracts(top_k: int):
    chosen = torch.randint(-1, 5, (40, top_k), generator=torch.Generator().manual_seed(0))
    check_op(ops.Permute(4, top_k), seeded_randn((40, 6), 0), experts=chosen)
    _, made, _ = ops.Permute(4, top_k).fwd(seeded_randn((40, 6), 0), experts=chosen)
    probs = seeded_randn((40, top_k), 1)
    check_op(ops.Unpermute(), seeded_randn((40, top_k, 6), 2), probs=probs, **made)
    check_op(ops.Unpermute(None), seeded_randn((40, top_k, 6), 2), **made)


def test_what_a_dropped_token_holds_reaches_nothing():
    chosen = torch.tensor([[0, -1], [-1, -1], [1, 0]])
    x = seeded_randn((3, 6), 0)
    x[1] = torch.nan
    model = sf.Sequential(ops.Permute(2, 2), ops.GroupedLinear(2, 6, 6), ops.Unpermute(None))
    x.requires_grad_()
    y = model(x, experts=chosen)
    y.sum().backward()
    assert torch.isfinite(y).all()
    assert not y[1].any()
    assert all(torch.isfinite(t.grad).all() for t in (x, *model.parameters()))
    assert not x.grad[1].any()


def test_sums_of_16_bits_are_rounded_once():
    chosen, x = torch.arange(8).expand(33, 8), seeded_randn((33, 40), 0, dtype=torch.bfloat16)
    y, made, _ = ops.Permute(8, 8).fwd(x, experts=chosen)
    probs = seeded_randn((33, 8), 1)
    expected = (probs.unsqueeze(-1) * x.float().unsqueeze(1)).double().sum(1)
    for found in (ops.Unpermute().fwd(y, probs=probs, **made)[0], ops.Unpermute().reference(y, probs=probs, **made)):
        assert (found.double() - expected).abs().max() <= expected.abs().max() * 2**-8


def experts_of(dim: int, hidden: int, count: int, top_k: int, **router: Any) -> sf.Sequential:
    return sf.Sequential(
        ops.Route(dim, count, top_k, **router), ops.Permute(count, top_k), ops.GroupedLinear(count, dim, 2 * hidden),
        ops.SwiGLU(), ops.GroupedLinear(count, hidden, dim), ops.Unpermute(),
    )  # fmt: skip


def plainly(block: sf.Sequential, x: Tensor) -> Tensor:
    """Every token through every expert, weighted by its factor there."""
    route, _, up, _, down, _ = block
    experts, probs = routed(route, x.reshape(-1, x.shape[-1]))
    factors = torch.zeros(len(experts), route.experts, dtype=x.dtype).scatter(1, experts, probs)
    y = torch.zeros_like(x.reshape(-1, x.shape[-1]))
    for g in range(route.experts):
        gate, value = (x.reshape(-1, x.shape[-1]) @ up.weight[g].T + up.bias[g]).chunk(2, -1)
        made = (torch.nn.functional.silu(gate) * value) @ down.weight[g].T + down.bias[g]
        y = y + made * factors[:, g : g + 1]
    return y.view(x.shape)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("lead", [(11,), (2, 5), ()], ids=str)
def test_a_block_is_a_mixture_of_experts(lead: tuple[int, ...], fused: bool):
    block = experts_of(6, 7, 5, 2).double()
    x = seeded_randn((*lead, 6), 0, dtype=torch.float64).requires_grad_()
    leaves, dy = [x, *block.parameters()], seeded_randn((*lead, 6), 1, dtype=torch.float64)
    with sf.fusing(fused, on_error="raise"):
        y = block(x)
        found = torch.autograd.grad(y, leaves, dy)
    expected = plainly(block, x)
    torch.testing.assert_close(y, expected)
    wanted = torch.autograd.grad(expected, leaves, dy, allow_unused=True)
    torch.testing.assert_close(
        found, [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, wanted, strict=True)]
    )


def test_several_blocks_in_one_sequence_have_channels_of_their_own():
    layers = [ops.Residual(ops.RMSNorm(6), experts_of(6, 4, 3, 2)) for _ in range(3)]
    model, x = sf.Sequential(*layers), seeded_randn((9, 6), 0).requires_grad_()
    assert model.channels == ((), ())
    y, expected = model(x), x
    for layer in layers:
        expected = expected + plainly(layer[1], layer[0](expected))
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    leaves, dy = [x, *model.parameters()], seeded_randn((9, 6), 1)
    found = torch.autograd.grad(y, leaves, dy)
    wanted = torch.autograd.grad(expected, leaves, dy)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)


def test_nothing_of_a_gpu_is_read_by_the_host():
    """On fake tensors, on which a read would raise."""
    block = experts_of(16, 8, 4, 2).bfloat16()
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        route, permute, up, act, down, unpermute = (op for op in block)
        for op in (route, up, down):
            for name, p in list(op.named_parameters()):
                op._parameters[name] = torch.nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="cuda"))
        x = torch.empty(12, 16, dtype=torch.bfloat16, device="cuda")
        y, chosen, of_route = route.fwd(x)
        y, made, of_permute = permute.fwd(y, experts=chosen["experts"])
        y, of_up = up.fwd(y, offsets=made["offsets"])
        y, of_act = act.fwd(y)
        y, of_down = down.fwd(y, offsets=made["offsets"])
        y, of_unpermute = unpermute.fwd(y, probs=chosen["probs"], **made)
        assert y.device.type == "cuda"
        needs = frozenset({"x", "weight", "bias", "probs"})
        d, grads = unpermute.bwd(y, of_unpermute, needs=needs)
        d, _ = down.bwd(d, of_down, needs=needs)
        d, _ = act.bwd(d, of_act)
        d, _ = up.bwd(d, of_up, needs=needs)
        d, _ = permute.bwd(d, of_permute, d_offsets=None, d_rows=None)
        d, _ = route.bwd(d, of_route, d_experts=None, d_probs=grads["probs"], needs=needs - {"bias"})
        assert d.shape == x.shape
        assert mode is not None
