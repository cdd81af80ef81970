"""LayerScale."""

import pytest
import torch

import seqfuse as sf
from seqfuse import ops
from seqfuse.testing import check_op, seeded_randn

from .passes import by_autograd, by_passes


def test_keeps_its_contract():
    check_op(ops.LayerScale.example(torch.empty(6)), seeded_randn((5, 6), 0))


def test_starts_small_and_has_one_key():
    op = ops.LayerScale(6)
    assert (op.gamma == 1e-5).all()
    assert list(op.state_dict()) == ["gamma"]
    assert (ops.LayerScale(6, 0.5).gamma == 0.5).all()
    assert repr(op) == "LayerScale(6, init_value=1e-05)"


def test_keeps_only_what_wanted_gradients_read():
    kept = ops.LayerScale.Saved.kept
    assert kept(frozenset({"x"})) == ("gamma",)
    assert kept(frozenset({"gamma"})) == ("x",)


@pytest.mark.parametrize("own", [torch.float32, torch.complex64], ids=str)
def test_complex_numbers_are_those_of_torch(own: torch.dtype):
    op, x = ops.LayerScale(6, dtype=own), seeded_randn((5, 6), 0, dtype=torch.complex64)
    op.gamma.data = seeded_randn((6,), 1, dtype=own)
    found, wanted = by_passes(op, x, {}), by_autograd(op, x, {})
    torch.testing.assert_close(found, wanted)


def test_another_size_is_refused():
    with pytest.raises(sf.InputError, match=r"position 0 \(LayerScale\): expects last dimension 6, got 5"):
        ops.LayerScale(6)(torch.zeros(2, 5))
