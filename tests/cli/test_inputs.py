"""Inputs drawn for a model that a command line names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from seqfuse.cli.inputs import On, Under, parse_spec, surroundings, vocabulary
from seqfuse.cli.target import Unable


def linear() -> nn.Module:
    return nn.Linear(2, 2)


def test_indices_are_drawn_from_the_smallest_table_of_a_model() -> None:
    model = nn.Sequential(nn.Embedding(7, 2), nn.Embedding(3, 2), nn.Embedding(5, 2), nn.Linear(2, 2))
    assert vocabulary(model) == 3
    assert vocabulary(model[3:]) == 2
    assert parse_spec("50:int64").draw("cpu", 0, vocabulary(model)).unique().tolist() == [0, 1, 2]
    assert parse_spec("50:int32").draw("cpu", 0).dtype == torch.int32


def test_a_tensor_is_refused_for_its_bytes_not_for_its_elements() -> None:
    assert parse_spec(f"{2**58}x4").shape == (2**58, 4)
    for text in (f"{2**58}x8", f"{2**58}x16:bf16"):
        with pytest.raises(Unable, match="more bytes than a tensor can have"):
            parse_spec(text)


def test_a_model_takes_the_dtype_of_its_input_but_where_autocast_does() -> None:
    name, given = f"{__file__}:linear", parse_spec("4x2:bf16")
    for autocast, dtype in (("bf16", torch.float32), (None, torch.bfloat16)):
        (weight, _) = Under(autocast=autocast).build(name, given).parameters()
        assert weight.dtype is dtype


def test_an_extra_input_that_says_no_dtype_has_the_one_that_is_named() -> None:
    given = On(dtype="bf16", channel=["a=4x2", "b=4x2:fp32"]).channels()
    assert {name: spec.dtype for name, spec in given.items()} == {"a": torch.bfloat16, "b": torch.float32}


def test_a_device_without_autocast_is_not_asked_for_it() -> None:
    with surroundings("meta", None, False):
        assert not torch.is_grad_enabled()
