"""Generated functions: equal ones share their code, and each finds its constants without a lookup."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import ops
from seqfuse.fusions import LinearBias
from seqfuse.generated import Source
from seqfuse.saved import maker


def made(number: int) -> Any:
    source = Source("plus", "x")
    source.add(f"return x + {source.put(number)}")
    source.put("not in the text")
    return source.define()


def test_functions_of_one_shape_share_their_code_and_no_globals():
    one, two = made(1), made(2)
    assert (one(1), two(1)) == (2, 3)
    assert one.__code__ is two.__code__
    # Otherwise the interpreter would cache the globals of one of them, and look up each name of the others.
    assert one.__globals__ is two.__globals__
    assert "not in the text" in one.constants.values()


class Kept(sf.Saved):
    x: Tensor
    scale: float = 2.0


def test_a_maker_leaves_the_last_fields_to_their_defaults():
    record = maker(Kept)(torch.ones(1))
    assert (record.x.item(), record.scale) == (1.0, 2.0)
    assert maker(Kept)(torch.ones(1), 3.0).scale == 3.0


def test_what_a_fusion_decided_is_no_part_of_what_it_is():
    slots: dict[str, Any] = {"linear": ops.Linear(4, 4, bias=False), "bias": ops.Bias(4)}
    one, other = LinearBias(**slots), LinearBias(**slots)
    counted: list[int] = []
    for _ in range(2):
        one.decided("key", lambda: counted.append(0) or len(counted))
    assert len(counted) == 1
    assert one == other
    assert "_decided" not in vars(one.with_operations(one.operations()))
    assert "_decided" not in vars(pickle.loads(pickle.dumps(one)))
    slots["bias"].some = 1
    one.decided("key", lambda: counted.append(0) or len(counted))
    assert len(counted) == 2
