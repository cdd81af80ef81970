"""Linear and MergedLinear: GEMMs, the keys of torch.nn, and the biases they expand to."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

import seqfuse as sf
from seqfuse import ops
from seqfuse.ops._parameters import joined
from seqfuse.ops.linear import weight_grad
from seqfuse.testing import assert_bitwise_equal, check_op, seeded_randn
from tests.watching import Calls

from .passes import by_autograd, by_passes, check_passes, check_twin, gradient


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
    assert calls.count("mm", "bmm") == products


def test_saves_its_input_and_its_weight_as_they_are():
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


def apart(in_features: int = 6, sizes: tuple[int, ...] = (9, 2, 4), bias: bool = True) -> list[nn.Linear]:
    return [nn.Linear(in_features, size, bias) for size in sizes]


def weights(op: ops.MergedLinear) -> torch.Tensor | None:
    return joined(op.weights())


@pytest.mark.parametrize("bias", [True, False])
def test_is_one_gemm_forward_and_one_for_dx_where_the_weights_lie_in_one_storage(bias: bool):
    op, x = ops.MergedLinear(6, (9, 2, 4), bias), seeded_randn((2, 5, 6), 0)
    with torch.no_grad(), Calls() as calls:
        y, saved = op.fwd(x)
    assert calls.count("addmm" if bias else "mm") == 1
    assert not calls.count("cat", "copy_", "clone")
    with torch.no_grad(), Calls() as calls:
        op.bwd(y, saved, needs=frozenset({"x"}))
    assert calls.count("mm") == 1
    assert not calls.count("cat", "copy_", "clone", "addmm_")


@pytest.mark.parametrize("bias", [True, False])
def test_writes_slices_of_one_output_where_they_do_not_and_copies_nothing(bias: bool):
    op, x = ops.MergedLinear.of(*apart(bias=bias)), seeded_randn((5, 6), 0)
    assert weights(op) is None
    with torch.no_grad(), Calls() as calls:
        y, saved = op.fwd(x)
        dx, _ = op.bwd(y, saved, needs=frozenset({"x"}))
    assert calls.count("mm", "addmm", "addmm_") == 6
    assert not calls.count("cat", "copy_", "clone", "add", "add_")
    assert (y.shape, dx.shape) == ((5, 15), (5, 6))
    assert y.is_contiguous()


@pytest.mark.parametrize("make", [lambda *a: ops.MergedLinear.of(*apart(*a)), ops.MergedLinear], ids=["apart", "one"])
@pytest.mark.parametrize("bias", [True, False])
def test_gives_what_several_linears_give_side_by_side(make, bias: bool):
    op, x = make(6, (9, 2, 4), bias), seeded_randn((3, 5, 6), 0).requires_grad_()
    parts = [F.linear(x, w, b) for w, b in zip(op.weights(), op.biases(), strict=True)]
    torch.testing.assert_close(op(x), torch.cat(parts, -1))
    dy = seeded_randn((3, 5, 15), 1)
    leaves = [x, *op.parameters()]
    found = torch.autograd.grad(op(x), leaves, dy)
    wanted = torch.autograd.grad(torch.cat(parts, -1), leaves, dy)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("position", range(3))
def test_keeps_its_contract(position: int):
    x = seeded_randn((5, 6), 0)
    check_op(ops.MergedLinear.examples(x)[position], x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("strided", [False, True])
def test_passes_agree_with_the_reference_where_weights_lie_apart(dtype: torch.dtype, strided: bool):
    op = ops.MergedLinear.of(*apart()).to(dtype)
    x = seeded_randn((7, 12), 0, dtype=dtype)[:, ::2] if strided else seeded_randn((7, 6), 0, dtype=dtype)
    check_passes(op, x)


def test_shares_the_parameters_of_other_modules():
    linears = apart()
    linears[1].bias = None
    op = ops.MergedLinear.of(*linears)
    assert [op.weight_0, op.weight_1, op.weight_2] == [linear.weight for linear in linears]
    assert (op.bias_0, op.bias_1, op.bias_2) == (linears[0].bias, None, linears[2].bias)
    assert list(op.state_dict()) == ["weight_0", "weight_1", "weight_2", "bias_0", "bias_2"]
    op(seeded_randn((3, 6), 0)).sum().backward()
    assert all(p.grad is not None for linear in linears for p in linear.parameters())
    assert repr(op) == "MergedLinear(6, (9, 2, 4), bias=(True, False, True))"


def test_parts_start_from_the_numbers_of_torch():
    torch.manual_seed(3)
    op = ops.MergedLinear(6, (9, 2, 4))
    torch.manual_seed(3)
    for i, linear in enumerate(apart()):
        assert_bitwise_equal(getattr(op, f"weight_{i}").detach(), linear.weight.detach())
        assert_bitwise_equal(getattr(op, f"bias_{i}").detach(), linear.bias.detach())


@pytest.mark.parametrize(
    "duplicate",
    [
        copy.deepcopy,
        lambda op: pickle.loads(pickle.dumps(op)),
        lambda op: copy.deepcopy(op).bfloat16(),
        lambda op: copy.deepcopy(op).double().float(),
    ],
    ids=["copy", "pickle", "bfloat16", "there and back"],
)
def test_a_copy_in_any_dtype_has_its_weights_in_one_storage_if_the_original_has(duplicate):
    one, several = ops.MergedLinear(6, (9, 2, 4)), ops.MergedLinear.of(*apart())
    made = duplicate(one)
    assert weights(made) is not None
    assert weights(one) is not None
    torch.testing.assert_close([p.float() for p in made.weights()], list(one.weights()), rtol=1e-2, atol=1e-2)
    assert weights(duplicate(several)) is None


def test_one_storage_outlives_an_optimizer_and_a_loaded_state():
    op = ops.MergedLinear(6, (9, 2, 4))
    other = ops.MergedLinear(6, (9, 2, 4))
    optimizer = torch.optim.AdamW(op.parameters())
    op(seeded_randn((3, 6), 0)).square().sum().backward()
    optimizer.step()
    other.load_state_dict(op.state_dict(), strict=True)
    assert weights(op) is not None
    assert weights(other) is not None
    assert_bitwise_equal(other(torch.ones(2, 6)).detach(), op(torch.ones(2, 6)).detach())


def test_weights_in_another_order_or_of_another_dtype_are_not_taken_for_one():
    whole = torch.arange(24.0)
    first, second = whole[:12].view(2, 6), whole[12:].view(2, 6)
    assert torch.equal(joined((first, second)), whole.view(4, 6))
    assert joined((second, first)) is None
    assert joined((first, second.clone())) is None
    assert joined((first[:, ::2], second)) is None
    assert joined((first, whole.view(torch.int32)[12:].view(2, 6))) is None
    assert joined(()) is None


def test_computes_only_what_is_wanted():
    op = ops.MergedLinear.of(*apart())
    with torch.no_grad(), Calls() as calls:
        y, saved = op.fwd(seeded_randn((5, 6), 0))
        calls.names.clear()
        dx, grads = op.bwd(y, saved, needs=frozenset({"weight_1"}))
    assert (dx, set(grads), calls.count("mm")) == (None, {"weight_1"}, 1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "make",
    [lambda b: ops.MergedLinear.of(*apart(bias=b)), lambda b: ops.MergedLinear(6, (9, 6), b)],
    ids=["apart", "one"],
)
def test_autocast_gives_the_dtypes_and_numbers_of_torch(make, dtype: torch.dtype, bias: bool):
    op, x = make(bias), seeded_randn((7, 6), 0, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = by_passes(op, x, {}), by_autograd(op, x, {})
    assert found["y"].dtype is torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
    with torch.autocast("cpu", torch.bfloat16):
        y = sf.Sequential(op)(x.requires_grad_())
        y.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype is p.dtype for p in op.parameters())


def test_adds_to_a_main_grad():
    op = ops.MergedLinear(6, (9, 4), False)
    op.weight_1.main_grad = torch.ones(4, 6)
    x = seeded_randn((5, 6), 0)
    sf.Sequential(op)(x).sum().backward()
    assert op.weight_1.grad is None
    torch.testing.assert_close(op.weight_1.main_grad, 1 + x.sum(0).expand(4, 6))
    torch.testing.assert_close(op.weight_0.grad, x.sum(0).expand(9, 6))


def test_functional_call_swaps_its_parameters():
    op, x = ops.MergedLinear(6, (3, 4), False), seeded_randn((2, 6), 0)
    y = torch.func.functional_call(op, {"weight_1": torch.zeros(4, 6)}, (x,))
    torch.testing.assert_close(y, torch.cat((x @ op.weight_0.t(), torch.zeros(2, 4)), -1))
