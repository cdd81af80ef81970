import pytest
import torch

from seqfuse.testing import guarded, poisoned, red_zones
from seqfuse.testing.poison import unwritten_is_nan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_a_tensor_between_red_zones_may_be_written(dtype: torch.dtype):
    guard = poisoned((3, 5), dtype=dtype)
    guard.tensor.zero_()
    guard.check()


def test_what_a_kernel_forgets_to_write_is_nan():
    guard = poisoned((4,))
    guard.tensor[:3] = 1
    assert guard.tensor.isnan().tolist() == [False, False, False, True]


@pytest.mark.parametrize(
    ("offset", "where"), [(-3, "3 elements were written before the start"), (6, "1 element was written past the end")]
)
def test_a_write_out_of_bounds_is_found(offset: int, where: str):
    guard = poisoned((2, 3), dtype=torch.bfloat16, fill=-7.0, margin=8)
    torch.as_strided(guard.tensor, (1,), (1,), guard.tensor.storage_offset() + offset).fill_(1)
    with pytest.raises(AssertionError, match=f"dx: {where}"):
        guard.check("dx")


def test_a_read_out_of_bounds_gives_nan():
    x = guarded(torch.ones(2, 3))
    assert torch.equal(x.tensor, torch.ones(2, 3))
    assert torch.as_strided(x.tensor, (7,), (1,), x.tensor.storage_offset()).sum().isnan()
    assert torch.as_strided(x.tensor, (7,), (1,), x.tensor.storage_offset() - 1).sum().isnan()


def test_allocations_in_a_block_are_poisoned_and_guarded():
    x = torch.ones(2, 3, dtype=torch.float16)
    with red_zones():
        made = [torch.empty(2, 3), torch.empty((4,), dtype=torch.bfloat16), torch.empty_like(x), x.new_empty(3, 1)]
        integers = torch.empty(size=(2,), dtype=torch.int32)
    assert [(tuple(t.shape), t.dtype) for t in made] == [
        ((2, 3), torch.float32),
        ((4,), torch.bfloat16),
        ((2, 3), torch.float16),
        ((3, 1), torch.float16),
    ]
    assert all(t.isnan().all() and t.is_contiguous() and not t._is_view() for t in made)
    assert (integers == torch.iinfo(torch.int32).max).all()


def test_a_block_reports_a_write_past_an_allocation():
    def overrun() -> None:
        y = torch.empty(4)
        torch.as_strided(y, (5,), (1,), y.storage_offset()).fill_(0)

    with pytest.raises(AssertionError, match=r"allocation 0 \(4,\): 1 element was written past the end"), red_zones():
        overrun()


def test_allocations_with_a_layout_of_their_own_stay_ordinary():
    x = torch.ones(2, 3).mT
    with red_zones():
        assert torch.empty_like(x).stride() == x.stride()
        assert torch.empty(1, 2, 3, 4, memory_format=torch.channels_last).shape == (1, 2, 3, 4)


def test_new_memory_is_nan_in_a_block_and_as_it_was_behind_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    with unwritten_is_nan():
        assert torch.empty(8).isnan().all()
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert not torch.get_deterministic_debug_mode()


def test_a_function_may_return_a_guarded_tensor():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(x).copy_(2 * x)

        @staticmethod
        def backward(ctx: object, dy: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(dy).copy_(2 * dy)

    x = torch.ones(3, requires_grad=True)
    with red_zones():
        y = Double.apply(x)
        y.backward(torch.ones(3))
    assert torch.equal(y, torch.full((3,), 2.0))
    assert torch.equal(x.grad, torch.full((3,), 2.0))
