import math

import pytest
import torch

from seqfuse.testing import Untouched, assert_bitwise_equal, assert_distinct_storages, named_tensors


def test_names_follow_mappings_and_positions():
    t = torch.ones(1)
    tree = {"out": t, "grads": {"weight": None}, "extra": [t, (t,)]}
    assert [name for name, _ in named_tensors(tree)] == ["out", "grads: weight", "extra[0]", "extra[1][0]"]
    assert [name for name, _ in named_tensors(t, "y")] == ["y"]
    with pytest.raises(TypeError, match=r"got int"):
        list(named_tensors([3]))


def test_untouched_allows_reading():
    x = torch.tensor([1.0, math.nan])
    with Untouched({"x": x}):
        x.sum()


def test_untouched_names_the_tensor_and_the_index_of_a_write():
    x, dy = torch.zeros(3, 4), torch.zeros(2).expand(5, 2)
    with pytest.raises(AssertionError, match=r"x was modified, first at \(1, 2\)"), Untouched({"x": x, "dy": dy}):
        x.data.view(-1)[6] = 1  # unseen by the version counter, as a kernel's write is


def test_untouched_finds_a_write_of_the_same_value():
    x = torch.zeros(3)
    with pytest.raises(AssertionError, match="x was written in place"), Untouched({"x": x}):
        x.add_(0)


def test_untouched_sees_a_change_of_sign_of_zero_and_works_in_inference_mode():
    with torch.inference_mode():
        x = torch.zeros(3)
        with pytest.raises(AssertionError, match=r"out was modified"), Untouched(x):
            x.neg_()


def test_untouched_lets_an_error_through():
    x = torch.zeros(3)
    with pytest.raises(RuntimeError, match="must match"), Untouched({"x": x}):
        x.add_(1).add_(torch.ones(2))


def test_distinct_storages():
    x = torch.ones(4)
    assert_distinct_storages({"a": x, "b": x.clone(), "c": torch.ones(0), "d": torch.ones(0), "e": None})
    with pytest.raises(AssertionError, match="b shares its storage with a"):
        assert_distinct_storages({"a": x[:2], "b": x[2:]})
    with pytest.raises(AssertionError, match="y shares its storage with others: x"):
        assert_distinct_storages({"y": x.view(2, 2)}, {"x": x})


def test_bitwise_equality_knows_nan_and_the_sign_of_zero():
    x = torch.tensor([[math.nan, 0.0]], dtype=torch.bfloat16)
    assert_bitwise_equal({"y": x, "z": None}, {"y": x.clone(), "z": None})
    one = torch.zeros(4)[::2][:1]
    assert_bitwise_equal(one, torch.zeros(1))
    with pytest.raises(AssertionError, match=r"y: bits differ first at \(0, 1\): 0.0 against -0.0"):
        assert_bitwise_equal({"y": x}, {"y": torch.tensor([[math.nan, -0.0]], dtype=torch.bfloat16)})
    with pytest.raises(AssertionError, match=r"against torch\.float32"):
        assert_bitwise_equal(x, x.float())
    with pytest.raises(AssertionError, match="different tensors"):
        assert_bitwise_equal({"y": x}, {"z": x})
    with pytest.raises(AssertionError, match="y: None where unfused is not"):
        assert_bitwise_equal({"y": None}, {"y": x})
