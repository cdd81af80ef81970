"""An embedding weight whose rows are sharded over several processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import seqfuse as sf
from seqfuse import ops
from tests.processes import Facts

from .sharded import assert_same, copy_shares, draw, own, randomize, results, share_of


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


def references_agree() -> None:
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


def an_index_outside_is_an_error_everywhere() -> None:
    for wrong in (8, -1):
        with pytest.raises(IndexError, match=f"SF107 .*expects token ids from 0 to 7, got {wrong}"):
            table(dist.group.WORLD)(torch.tensor([0, wrong]))


test_in_several_processes = Facts({
    2: [lookups_equal_one_process, references_agree, shares_of_rows_follow, an_index_outside_is_an_error_everywhere],
}).test  # fmt: skip
