"""A loss whose classes are sharded over several processes; no logit leaves its process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import seqfuse as sf
from seqfuse.group import Group
from seqfuse.losses import LinearCrossEntropy
from tests.processes import Facts
from tests.watching import Calls

from .sharded import copy_shares, draw, randomize, share_of

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


test_in_several_processes = Facts({
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
