"""Embeddings, GEMMs, layers and losses whose weights are sharded: outputs and gradients are those of one process."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import seqfuse as sf
from seqfuse import nn, ops
from seqfuse.fusions import AllReduceLinearBackward, LinearBias
from seqfuse.group import Group
from seqfuse.losses import LinearCrossEntropy
from tests import processes
from tests.processes import Facts
from tests.watching import Calls

from .sharded import assert_same, copy_shares, draw, own, randomize, results, share_of

# An embedding weight whose rows are sharded.


def table(group: Any = None, padding_idx: int | None = None, sequence_dim: int | None = None) -> sf.Sequential:
    across: dict[str, Any] = {} if group is None else {"parallel": "vocab", "group": group}
    if group is not None:
        across["sequence_dim"] = sequence_dim
    model = sf.Sequential(ops.Embedding(8, 4, padding_idx, dtype=torch.float64, **across), ops.Tanh())
    if group is None:
        randomize(model)
    else:
        copy_shares(model, table(padding_idx=padding_idx))
    return model


INDICES = torch.tensor([[0, 7, 3, 4], [4, 4, 5, 1]])


def lookups_equal_one_process() -> None:
    for padding_idx in (None, 0, 4, 5):
        for indices in (INDICES, INDICES.int(), INDICES[0, 0], INDICES[:0], INDICES.t()):
            whole, model = table(padding_idx=padding_idx), table(dist.group.WORLD, padding_idx)
            dy = draw(*indices.shape, 4)
            y, grads = results(model, indices, dy)
            expected_y, expected = results(whole, indices, dy)
            assert torch.equal(y, expected_y)  # all but one summand are zero
            torch.testing.assert_close(grads["0.weight"], share_of(model, "0.weight", expected["0.weight"]))
        with sf.fusing(False):
            assert_same(table(dist.group.WORLD, padding_idx), table(padding_idx=padding_idx), INDICES)


def references_of_rows_agree() -> None:
    for padding_idx in (None, 0, 5):
        model = table(dist.group.WORLD, padding_idx)
        dy = draw(2, 4, 4)
        operation: Any = model[0]
        with torch.no_grad():
            y, saved = operation.fwd(INDICES)
        _, grads = operation.bwd(dy, saved, needs=frozenset(["weight"]))
        reference = operation.reference(INDICES)
        reference.backward(dy)
        assert torch.equal(y, reference)
        torch.testing.assert_close(grads["weight"], operation.weight.grad)


def shares_of_rows_follow() -> None:
    model, whole = table(dist.group.WORLD, sequence_dim=-2), table()
    y, grads = results(model, INDICES, own(draw(2, 4, 4), 1))
    expected_y, expected = results(whole, INDICES, draw(2, 4, 4))
    assert torch.equal(y, own(expected_y, 1))
    torch.testing.assert_close(grads["0.weight"], share_of(model, "0.weight", expected["0.weight"]))


def an_index_outside_is_an_error() -> None:
    for wrong in (8, -1):
        with pytest.raises(IndexError, match=f"SF107 .*expects token ids from 0 to 7, got {wrong}"):
            table(dist.group.WORLD)(torch.tensor([0, wrong]))


test_embeddings = Facts({
    2: [lookups_equal_one_process, references_of_rows_agree, shares_of_rows_follow, an_index_outside_is_an_error],
}).test  # fmt: skip


# Column- and row-parallel GEMMs.


def pair(group: Any = None, *, bias: bool = True, bias_last: bool = True, **rest: Any) -> sf.Sequential:
    """Up and down again: whole, or sharded over a group."""
    column: dict[str, Any] = {} if group is None else {"parallel": "column", "group": group}
    row: dict[str, Any] = {} if group is None else {"parallel": "row", "group": group, "bias_last": bias_last}
    model = sf.Sequential(
        ops.Linear(6, 8, bias, dtype=torch.float64, **column),
        ops.GeLU(),
        ops.Linear(8, 6, bias, dtype=torch.float64, **row),
        ops.Tanh(),
        **rest,
    )
    if group is None:
        randomize(model)
    else:
        copy_shares(model, pair(bias=bias))
    return model


def divided_equals_whole() -> None:
    for bias in (True, False):
        for bias_last in (True, False):
            for shape in ((5, 6), (2, 3, 6), (6,), (1, 6)):
                assert_same(pair(dist.group.WORLD, bias=bias, bias_last=bias_last), pair(bias=bias), draw(*shape))


def unfused_equals_fused() -> None:
    for bias_last in (True, False):
        with sf.fusing(False):
            assert_same(pair(dist.group.WORLD, bias_last=bias_last), pair(), draw(5, 6))


def references_of_gemms_agree() -> None:
    for bias_last in (True, False):
        with torch.autograd.forward_ad.dual_level():
            assert_same(pair(dist.group.WORLD, bias_last=bias_last), pair(), draw(5, 6))


def a_list_by_hand_sums_gradients_where_rows_are_shares() -> None:
    def listed(group: Any = None, bias_last: bool = True) -> sf.Sequential:
        across: list[dict[str, Any]] = [{}, {}]
        if group is not None:
            across = [{"parallel": way, "group": group, "sequence_dim": 0} for way in ("column", "row")]
            across[1]["bias_last"] = bias_last
        model = sf.Sequential(
            ops.LayerNorm(6), ops.Linear(6, 8, **across[0]), ops.Tanh(), ops.Linear(8, 6, **across[1]), ops.RMSNorm(6),
            ops.Linear(6, 6),
        ).double()  # fmt: skip
        if group is None:
            randomize(model)
        else:
            copy_shares(model, listed())
        return model

    for enabled, bias_last in itertools.product((True, False), repeat=2):
        with sf.fusing(enabled):
            assert_same(listed(dist.group.WORLD, bias_last), listed(), draw(4, 6), dim=0)
    with torch.autograd.forward_ad.dual_level():  # the references run
        assert_same(listed(dist.group.WORLD), listed(), draw(4, 6), dim=0)


def every_pair_of_covers_agrees() -> None:
    x, dy = draw(2, 3, 6), draw(2, 3, 6, seed=7)
    with sf.fusing(False):
        expected_y, expected = results(pair(dist.group.WORLD), x, dy)
    for only in ((AllReduceLinearBackward,), (LinearBias,), (LinearBias, AllReduceLinearBackward)):
        for bias in (True, False):
            model = pair(dist.group.WORLD, bias=bias)
            with sf.fusing(only=only):
                names = [s.name for s in model.plan(x.clone().requires_grad_()).backward]
                assert names.count("AllReduceLinearBackward") == (AllReduceLinearBackward in only)
                y, grads = results(model, x, dy)
            if bias:
                torch.testing.assert_close(y, expected_y, rtol=1e-14, atol=1e-14)
                for name, grad in expected.items():
                    torch.testing.assert_close(grads[name], grad, rtol=1e-12, atol=1e-13)


def the_sum_is_under_way_while_the_weight_gradient_is_made() -> None:
    model = pair(dist.group.WORLD)
    y = model(draw(5, 6).requires_grad_())
    with Calls() as order:
        y.sum().backward()
    sent = order.names.index("all_reduce")
    assert "mm" in order.names[sent : order.names.index("wait_tensor")]
    assert "wait_tensor" in order.names


def what_nobody_wants_is_not_sent() -> None:
    """Neither in the first layer, whose input has no gradient, nor where the weight is frozen."""
    for wants_x, wants_weight in ((False, True), (True, False)):
        model = pair(dist.group.WORLD)
        model[0].weight.requires_grad_(wants_weight)
        x = draw(5, 6).requires_grad_(wants_x)
        model(x).sum().backward()
        assert (x.grad is not None) is wants_x
        assert (model[0].weight.grad is not None) is wants_weight
        whole = pair()
        x = draw(5, 6).requires_grad_(wants_x)
        whole(x).sum().backward()
        if wants_weight:
            torch.testing.assert_close(model[0].weight.grad, share_of(model, "0.weight", whole[0].weight.grad))


def exact_numbers_are_exact() -> None:
    """Small integers leave no rounding: not one bit differs, wherever the bias stands."""
    for bias_last in (True, False):
        group = dist.group.WORLD
        whole, model = pair(), pair(group, bias_last=bias_last)
        whole[1], model[1] = ops.ReLU(), ops.ReLU()
        whole[3], model[3] = ops.Identity(), ops.Identity()
        for i, p in enumerate(whole.parameters()):
            p.data = draw(*p.shape, seed=i).mul(4).round()
        copy_shares(model, whole)
        x = draw(5, 6).mul(4).round()
        assert torch.equal(model(x), whole(x))


def a_main_grad_takes_the_gradient_of_a_share() -> None:
    for rules in ((AllReduceLinearBackward,), ()):
        whole, model = pair(), pair(dist.group.WORLD)
        x, dy = draw(5, 6).requires_grad_(), draw(5, 6, seed=1)
        for p in model.parameters():
            p.main_grad = torch.ones_like(p)
        with sf.fusing(only=rules):
            assert model.plan(x).count("AllReduceLinearBackward") == len(rules)
            model(x).backward(dy)
        whole(x).backward(dy)
        assert all(p.grad is None for p in model.parameters())
        for name, p in model.named_parameters():
            expected = share_of(model, name, whole.get_parameter(name).grad) + 1
            torch.testing.assert_close(p.main_grad, expected)


test_gemms = Facts({
    2: [
        divided_equals_whole, unfused_equals_fused, references_of_gemms_agree,
        a_list_by_hand_sums_gradients_where_rows_are_shares, every_pair_of_covers_agrees,
        the_sum_is_under_way_while_the_weight_gradient_is_made, what_nobody_wants_is_not_sent,
        exact_numbers_are_exact, a_main_grad_takes_the_gradient_of_a_share,
    ],
}).test  # fmt: skip


# Layers by heads and by features, each process with all tokens or its sequence shard.


rotary = functools.partial(ops.RotaryEmbedding, style="half")
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {"dim": 16, "heads": 4},
    "modern": {
        "dim": 16, "heads": 4, "kv_heads": 4, "hidden_dim": 12, "activation": ops.SwiGLU, "norm": ops.RMSNorm,
        "bias": False, "qk_norm": True, "rotary": rotary, "causal": True,
    },
    "shared key heads, post-norm": {
        "dim": 16, "heads": 8, "kv_heads": 4, "pre_norm": False, "qk_norm": True, "window": 3,
        "activation": functools.partial(ops.GEGLU, packing="interleaved"),
    },
}  # fmt: skip


def stack(name: str, group: Any = None, sequence_dim: int | None = None) -> sf.Sequential:
    model = nn.TransformerStack(
        2, **LAYERS[name], group=group, sequence_dim=sequence_dim, dtype=torch.float64, final_norm=True
    )
    if group is None:
        randomize(model)
    else:
        copy_shares(model, stack(name))
    return model


def every_layer_equals_one_process() -> None:
    for name in LAYERS:
        assert_same(stack(name, dist.group.WORLD), stack(name), draw(2, 6, 16))


def layers_unfused() -> None:
    with sf.fusing(False):
        assert_same(stack("modern", dist.group.WORLD), stack("modern"), draw(2, 6, 16))


def shares_of_rows_equal_one_process() -> None:
    for name, dim in (("plain", -2), ("modern", 1), ("shared key heads, post-norm", -2)):
        assert_same(stack(name, dist.group.WORLD, dim), stack(name), draw(2, 8, 16), dim=dim)


BOTH = [every_layer_equals_one_process, shares_of_rows_equal_one_process]
test_layers = Facts({
    2: [layers_unfused, *(BOTH if processes.FULL else BOTH[1:])],
    4: BOTH if processes.FULL else BOTH[:1],
}).test  # fmt: skip


# A loss whose classes are sharded; no logit leaves its process.


CLASSES, WIDTH = 12, 6
SETTINGS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum", "chunk": 2, "bias": True},
    {"label_smoothing": 0.2, "z_loss": 0.1, "bias": True},
    {"reduction": "none", "softcap": 2.0, "chunk": 3, "label_smoothing": 0.1},
    {"reduction": "none", "z_loss": 0.2, "ignore_index": 7},
]
TARGETS = torch.tensor([[0, 11, 5, 6, -100], [7, 7, 3, -100, 8]])


def loss_of(settings: dict[str, Any], group: Any = None, **across: Any) -> LinearCrossEntropy:
    if group is not None:
        across |= {"parallel": "vocab", "group": group}
    loss = LinearCrossEntropy(WIDTH, CLASSES, **settings, **across, dtype=torch.float64)
    if group is None:
        randomize(loss)
    else:
        copy_shares(loss, loss_of(settings))
    return loss


def targets_for(settings: dict[str, Any]) -> Tensor:
    return TARGETS.masked_fill(TARGETS == -100, settings.get("ignore_index", -100))


def run(loss: LinearCrossEntropy, x: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    x = x.clone().requires_grad_()
    y = loss(x, targets)
    y.backward(draw(*y.shape, seed=5) + 2)
    grads = {name: p.grad for name, p in loss.named_parameters()}
    return y.detach(), {**grads, "x": x.grad}


def check(loss: LinearCrossEntropy, settings: dict[str, Any], x: Tensor, part: Any = lambda t: t) -> None:
    targets = targets_for(settings)
    y, grads = run(loss, part(x), targets)
    expected_y, expected = run(loss_of(settings), x, targets)
    torch.testing.assert_close(y, expected_y)
    for name, grad in expected.items():
        wanted = part(grad) if name == "x" else share_of(loss, name, grad)
        torch.testing.assert_close(grads[name], wanted, msg=lambda m, n=name: f"{settings} {n}: {m}")
    with torch.no_grad():
        torch.testing.assert_close(loss(part(x), targets), expected_y)


def losses_equal_one_process() -> None:
    for settings in SETTINGS:
        check(loss_of(settings, dist.group.WORLD), settings, draw(2, 5, WIDTH))


def large_logits_do_not_overflow() -> None:
    check(loss_of({}, dist.group.WORLD), {}, draw(2, 5, WIDTH) * 400)


def shares_of_rows_are_gathered() -> None:
    rank = dist.get_rank()
    for settings in SETTINGS:
        loss = loss_of(settings, dist.group.WORLD, sequence_dim=0)
        check(loss, settings, draw(2, 5, WIDTH), lambda t: t.chunk(2, 0)[rank])


def plain_operations_agree() -> None:
    """Seen by a compiler or a transform."""
    from seqfuse.losses import linearcrossentropy as module

    with pytest.MonkeyPatch.context() as patch:
        for settings in SETTINGS:
            patch.setattr(module, "transformed", lambda: True)
            check(loss_of(settings, dist.group.WORLD), settings, draw(2, 5, WIDTH))


def logits_are_never_sent() -> None:
    loss, x = loss_of({}, dist.group.WORLD), draw(2, 5, WIDTH).requires_grad_()

    def size(func: Any, args: Any, out: Any) -> int | None:
        return args[0].numel() if func.namespace == "_c10d_functional" and "wait" not in func.name() else None

    with Calls(size) as sent:
        loss(x, TARGETS).backward()
    # The largest logit of each row; the target's and the sum of exponentials; the gradient of x.
    assert sent.names == [10, 20, 60]


def a_target_outside_is_an_error_everywhere() -> None:
    loss = loss_of({}, dist.group.WORLD)
    with pytest.raises(IndexError, match="target 12 is out of bounds for 12 classes"):
        loss(draw(1, WIDTH), torch.tensor([CLASSES]))


def tied_to_a_divided_table() -> None:
    group = dist.group.WORLD
    table = sf.ops.Embedding(CLASSES, WIDTH, parallel="vocab", group=group, dtype=torch.float64)
    loss = LinearCrossEntropy(WIDTH, CLASSES, weight=table.weight, parallel="vocab", group=group)
    whole = sf.ops.Embedding(CLASSES, WIDTH, dtype=torch.float64)
    randomize(whole)
    copy_shares(table, whole)
    assert loss.weight is table.weight
    head = LinearCrossEntropy(WIDTH, CLASSES, weight=whole.weight)
    ids = TARGETS.clamp(min=0)
    ours, theirs = loss(table(ids), TARGETS), head(whole(ids), TARGETS)
    ours.backward()
    theirs.backward()
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(table.weight.grad, share_of(table, "weight", whole.weight.grad))


test_losses = Facts({
    2: [
        losses_equal_one_process, large_logits_do_not_overflow, shares_of_rows_are_gathered, plain_operations_agree,
        logits_are_never_sent, a_target_outside_is_an_error_everywhere, tied_to_a_divided_table,
    ],
    4: [losses_equal_one_process],
}).test  # fmt: skip


def test_a_group_of_one_process_is_none() -> None:
    loss = LinearCrossEntropy(WIDTH, CLASSES, parallel="vocab", group=Group())
    assert not loss.shards
    assert loss.weight.shape == (CLASSES, WIDTH)
