"""MergedLinear: one GEMM where the weights lie in one storage, slices of one output where not, and nothing copied."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.ops._parameters import joined
from seqfuse.testing import assert_bitwise_equal, check_op, seeded_randn

from .passes import by_autograd, by_passes, check_passes
from .test_linear import Calls


def apart(in_features: int = 6, sizes: tuple[int, ...] = (9, 2, 4), bias: bool = True) -> list[nn.Linear]:
    return [nn.Linear(in_features, size, bias) for size in sizes]


def weights(op: ops.MergedLinear) -> torch.Tensor | None:
    return joined(op.weights())


@pytest.mark.parametrize("bias", [True, False])
def test_is_one_gemm_forward_and_one_for_dx_where_the_weights_lie_in_one_storage(bias: bool):
    op, x = ops.MergedLinear(6, (9, 2, 4), bias), seeded_randn((2, 5, 6), 0)
    with torch.no_grad(), Calls() as calls:
        y, saved = op.fwd(x)
    assert calls.count["addmm" if bias else "mm"] == 1
    assert not calls.count.keys() & {"cat", "copy_", "clone"}
    with torch.no_grad(), Calls() as calls:
        op.bwd(y, saved, needs=frozenset({"x"}))
    assert calls.count["mm"] == 1
    assert not calls.count.keys() & {"cat", "copy_", "clone", "addmm_"}


@pytest.mark.parametrize("bias", [True, False])
def test_writes_slices_of_one_output_where_they_do_not_and_copies_nothing(bias: bool):
    op, x = ops.MergedLinear.of(*apart(bias=bias)), seeded_randn((5, 6), 0)
    assert weights(op) is None
    with torch.no_grad(), Calls() as calls:
        y, saved = op.fwd(x)
        dx, _ = op.bwd(y, saved, needs=frozenset({"x"}))
    assert calls.count["mm"] + calls.count["addmm"] + calls.count["addmm_"] == 6
    assert not calls.count.keys() & {"cat", "copy_", "clone", "add", "add_"}
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


def test_starts_from_the_numbers_of_torch():
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


def test_computes_and_keeps_only_what_is_wanted():
    kept = ops.MergedLinear.Saved.kept
    assert kept(frozenset({"x"})) == ("weights",)
    assert kept(frozenset({"weight_2"})) == ("x",)
    assert kept(frozenset({"bias_0"})) == ()
    op = ops.MergedLinear.of(*apart())
    with torch.no_grad(), Calls() as calls:
        y, saved = op.fwd(seeded_randn((5, 6), 0))
        calls.count.clear()
        dx, grads = op.bwd(y, saved, needs=frozenset({"weight_1"}))
    assert (dx, set(grads), calls.count["mm"]) == (None, {"weight_1"}, 1)


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


@pytest.mark.parametrize(
    "make", [lambda: ops.MergedLinear.of(*apart()), lambda: ops.MergedLinear(6, (9, 2, 4))], ids=["apart", "one"]
)
def test_compiles_whole(make):
    model = sf.Sequential(ops.RMSNorm(6), make(), ops.GeLU())
    x = seeded_randn((5, 6), 0).requires_grad_()
    expected = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(x).square().sum(), [x, *model.parameters()]), expected)


def test_functional_call_swaps_its_parameters():
    op, x = ops.MergedLinear(6, (3, 4), False), seeded_randn((2, 6), 0)
    y = torch.func.functional_call(op, {"weight_1": torch.zeros(4, 6)}, (x,))
    torch.testing.assert_close(y, torch.cat((x @ op.weight_0.t(), torch.zeros(2, 4)), -1))


def test_refusals():
    with pytest.raises(ValueError, match="one to 8 parts, got 9"):
        ops.MergedLinear(4, (1,) * 9)
    with pytest.raises(ValueError, match="one answer for the biases or one for each of 3, got 2"):
        ops.MergedLinear(4, (1, 2, 3), (True, False))
    with pytest.raises(ValueError, match=r"expects Linears of one input, got inputs of \[4, 6\]"):
        ops.MergedLinear.of(nn.Linear(4, 2), nn.Linear(6, 2))
    with pytest.raises(sf.InputError, match=r"position 0 \(MergedLinear\): expects last dimension 4, got 5"):
        ops.MergedLinear(4, (1, 2))(torch.zeros(2, 5))
    with pytest.raises(sf.InputError, match=r"position 0 \(MergedLinear\): expects last dimension 4, got a 0-d tensor"):
        ops.MergedLinear(4, (1, 2))(torch.zeros(()))
    with pytest.raises(sf.InputError, match=r"SF102.*MergedLinear.*dtype of its weight_0"):
        ops.MergedLinear(4, (1, 2))(torch.zeros(2, 4, dtype=torch.bfloat16))
    op = ops.MergedLinear(4, (1, 2))
    op.weight_1 = None
    with pytest.raises(sf.InputError, match=r"SF106.*its weight_1 is None"):
        op(torch.zeros(2, 4))
