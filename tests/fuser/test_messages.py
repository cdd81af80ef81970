"""The form of an error: the module's path first, and a hint on a line of its own."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import seqfuse as sf
from seqfuse import ops


def test_the_path_of_the_module_is_first_and_the_position_counts_hidden_operations() -> None:
    model = sf.Sequential(ops.Linear(4, 4), ops.ReLU(), ops.Residual(ops.LayerNorm(5)))
    with pytest.raises(sf.InputError) as caught:
        model(torch.ones(3, 4))
    assert str(caught.value) == "SF101 '2.0', position 4 (LayerNorm): expects last dimension 5, got 4"
    assert (caught.value.path, caught.value.position) == ("2.0", 4)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.path) == (str(caught.value), "2.0")
    assert str(copy.copy(caught.value)) == str(caught.value)


def test_a_path_that_is_the_position_is_named_once() -> None:
    with pytest.raises(sf.InputError, match=r"^SF101 position 1 \(LayerNorm\): "):
        sf.Sequential(ops.ReLU(), ops.LayerNorm(5))(torch.ones(3, 4))


def test_a_hint_is_a_line_of_its_own() -> None:
    with pytest.raises(sf.InputError) as caught:
        sf.Sequential(ops.Linear(4, 4))(torch.ones(3, 4).double())
    said, hint = str(caught.value).splitlines()
    assert said.endswith("got torch.float64")
    assert hint == "Hint: convert one of them with .to(dtype), or run under torch.autocast"


def test_the_error_of_a_module_that_runs_eagerly_has_its_path_in_a_note() -> None:
    model = sf.Sequential(ops.Linear(4, 4), sf.Sequential(torch.nn.Linear(5, 5), torch.nn.Softmax(-1)))
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(3, 4))
    assert "in Linear at '1.0', position 2" in caught.value.__notes__
