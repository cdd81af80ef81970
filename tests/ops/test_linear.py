"""Linear: the product, the keys of `torch.nn.Linear`, and the bias it expands to."""

import copy
import pickle
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

import seqfuse as sf
from seqfuse import ops
from seqfuse.ops.linear import weight_grad
from seqfuse.testing import assert_bitwise_equal, seeded_randn

from .passes import by_passes, check_twin, gradient


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(7, 5), (2, 3, 5), (1, 5), (2, 1, 3, 5)], ids=str)
def test_product_is_that_of_torch_bit_for_bit(shape: tuple[int, ...], dtype: torch.dtype):
    op, twin = ops.Linear(5, 9, bias=False, dtype=dtype), nn.Linear(5, 9, bias=False, dtype=dtype)
    check_twin(op, twin, seeded_randn(shape, 0, dtype=dtype))


def test_takes_one_row_without_leading_dimensions():
    check_twin(ops.Linear(5, 9, bias=False), nn.Linear(5, 9, bias=False), seeded_randn((5,), 0), names=("y", "dweight"))
    op, x = ops.Linear(5, 9, bias=False), seeded_randn((5,), 0)
    dx = by_passes(op, x, {})["dx"]
    torch.testing.assert_close(dx, gradient(torch.empty(9), 5) @ op.weight.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_gives_the_bits_of_torch(dtype: torch.dtype):
    with torch.autocast("cpu", torch.bfloat16):
        check_twin(ops.Linear(5, 9, bias=False), nn.Linear(5, 9, bias=False), seeded_randn((7, 5), 0, dtype=dtype))


@pytest.mark.parametrize("bias", [True, False])
def test_starts_from_the_numbers_of_torch(bias: bool):
    torch.manual_seed(3)
    op = ops.Linear(6, 4, bias=bias)
    torch.manual_seed(3)
    twin = nn.Linear(6, 4, bias=bias)
    assert_bitwise_equal(op.state_dict(), twin.state_dict())
    assert list(dict(op.named_parameters())) == list(dict(twin.named_parameters()))
    assert repr(op) == "Linear(6, 4, bias=True)" if bias else "Linear(6, 4, bias=False)"


def test_checkpoints_of_torch_load_strictly():
    op, twin = ops.Linear(6, 4), nn.Linear(6, 4)
    op.load_state_dict(twin.state_dict(), strict=True)
    twin.load_state_dict(op.state_dict(), strict=True)
    assert list(op.state_dict()) == ["weight", "bias"]


@pytest.mark.parametrize(
    ("needs", "products"),
    [({"x"}, 1), ({"weight"}, 1), ({"x", "weight"}, 2), (set(), 0)],
    ids=lambda value: "+".join(sorted(value)) if isinstance(value, set) else str(value),
)
@pytest.mark.parametrize("shape", [(4, 5), (2, 3, 5)], ids=str)
def test_computes_one_product_per_wanted_gradient(shape: tuple[int, ...], needs: set[str], products: int):
    op = ops.Linear(5, 7, bias=False)
    y, saved = op.fwd(seeded_randn(shape, 0))
    with torch.no_grad(), Calls() as calls:
        op.bwd(gradient(y, 1), saved, needs=frozenset(needs))
    assert calls.count["mm"] + calls.count["bmm"] == products


def test_keeps_only_what_the_wanted_gradients_read():
    assert ops.Linear.Saved.kept(frozenset({"weight"})) == ("x",)
    assert ops.Linear.Saved.kept(frozenset({"x"})) == ("weight",)
    op, x = ops.Linear(5, 7), seeded_randn((4, 5), 0)
    _, saved = op.fwd(x)
    assert saved.x is x
    assert saved.weight is op.weight


def test_expands_to_the_product_and_a_bias():
    op = ops.Linear(5, 7)
    product, bias = op.expand()
    assert product is op
    assert type(bias) is ops.Bias
    assert bias.bias is op.bias
    assert bias.size == 7
    assert bias.parameter_slots() == {"bias": (op, "bias")}
    assert op.expand()[1] is bias


def test_expands_to_itself_without_a_bias():
    op = ops.Linear(5, 7, bias=False)
    assert op.expand() == (op,)
    op = ops.Linear(5, 7)
    op.expand()
    op.bias = None
    assert op.expand() == (op,)
    assert repr(op) == "Linear(5, 7, bias=False)"


def test_the_bias_it_expands_to_is_no_submodule():
    op = ops.Linear(5, 7)
    op.expand()
    assert list(op.modules()) == [op]
    assert list(op.state_dict()) == ["weight", "bias"]
    assert [name for name, _ in op.named_parameters()] == ["weight", "bias"]


def test_the_bias_it_expands_to_follows_its_owner():
    op = ops.Linear(5, 7)
    _, bias = op.expand()
    op.bias = nn.Parameter(seeded_randn((7,), 0))
    assert bias.bias is op.bias
    op.double()
    assert bias.bias is op.bias
    assert bias.bias.dtype == torch.float64
    x = seeded_randn((3, 7), 1, dtype=torch.float64)
    assert_bitwise_equal(bias.fwd(x)[0].detach(), (x + op.bias).detach())
    swapped = torch.func.functional_call(op, {"bias": torch.ones(7)}, (seeded_randn((3, 5), 2).double(),), strict=False)
    assert swapped.shape == (3, 7)


def test_setting_the_bias_of_the_expansion_sets_the_owners():
    op = ops.Linear(5, 7)
    _, bias = op.expand()
    bias.bias = nn.Parameter(torch.ones(7))
    assert op.bias is bias.bias
    assert not bias._parameters


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda op: pickle.loads(pickle.dumps(op))], ids=["copy", "pickle"]
)
def test_a_copy_expands_to_a_bias_of_its_own(duplicate):
    op = ops.Linear(5, 7)
    _, bias = op.expand()
    other = duplicate(op)
    product, member = other.expand()
    assert product is other
    assert member is not bias
    assert type(member) is ops.Bias
    assert member.bias is other.bias
    assert other.bias is not op.bias
    assert bias.bias is op.bias


def test_a_replica_expands_to_a_bias_of_its_own():
    op = ops.Linear(5, 7)
    _, bias = op.expand()
    replica = op._replicate_for_data_parallel()
    replica._parameters.update(weight=torch.ones(7, 5), bias=torch.ones(7))
    _, member = replica.expand()
    assert member.bias is replica.bias
    assert bias.bias is op.bias


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_the_bias_it_expands_to_sees_parametrizations():
    op = ops.Linear(5, 7)
    original = op.bias
    parametrize.register_parametrization(op, "bias", Doubled())
    _, member = op.expand()
    assert type(member) is ops.Bias
    with parametrize.cached():
        assert member.bias is op.bias
    x = seeded_randn((3, 7), 0)
    assert_bitwise_equal(member.fwd(x)[0].detach(), (x + 2 * original).detach())
    parametrize.register_parametrization(op, "weight", Doubled())
    x = seeded_randn((3, 5), 0)
    assert_bitwise_equal(op.fwd(x)[0].detach(), (x @ op.weight.t()).detach())


@pytest.mark.parametrize(("shape", "got"), [((3, 6), "6"), ((), "a 0-d tensor")], ids=str)
def test_says_which_last_dimension_it_expects(shape: tuple[int, ...], got: str):
    with pytest.raises(ValueError, match=f"expects last dimension 5, got {got}"):
        ops.Linear(5, 7).infer(shape)


def test_is_made_on_the_meta_device():
    op = ops.Linear(5, 7, device="meta", dtype=torch.bfloat16)
    assert op.weight.is_meta
    op.to_empty(device="cpu").reset_parameters()
    assert op.expand()[1].bias.dtype == torch.bfloat16


def test_no_features_are_allowed():
    with pytest.warns(UserWarning, match="zero-element"):
        op = ops.Linear(0, 3, bias=False)
    found = by_passes(op, torch.zeros(4, 0), {})
    assert_bitwise_equal(found["y"], torch.zeros(4, 3))
    assert found["dx"].shape == (4, 0)
    assert found["dweight"].shape == (3, 0)


def test_adds_to_a_main_grad_on_meta():
    dy, x, main = (torch.empty(shape, device="meta") for shape in ((5, 3), (5, 4), (3, 4)))
    assert weight_grad(dy, x, main) is sf.accumulated


def test_under_autocast_a_gradient_buffer_gets_the_product_of_what_was_cast():
    dy, x = seeded_randn((5, 3), 0), seeded_randn((5, 4), 1)
    main = torch.zeros(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert weight_grad(dy, x, main) is sf.accumulated
    expected = dy.bfloat16().float().t() @ x.bfloat16().float()
    torch.testing.assert_close(main, expected, rtol=1e-6, atol=1e-6)
