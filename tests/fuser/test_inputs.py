"""Inputs of every shape, dtype, layout, device and kind: torch's result, or one clear error before anything ran."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import seqfuse as sf
from seqfuse import ops
from seqfuse.testing import LAYOUTS, Untouched, laid_out, seeded_randn
from tests.fuser.fusions import (
    PAIR,
    AddForkBackward,
    AddForkForward,
    AddReLUForward,
    BiasGeLUBackward,
    BiasGeLUForward,
    BiasReLU,
    BiasReLUBack,
    LinearBiasGeLUBackward,
    LinearBiasGeLUForward,
    assert_exact,
    fused_names,
    outcome,
    randomized,
    run,
    tensor,
)

RULES = (*PAIR, BiasGeLUForward, BiasGeLUBackward, LinearBiasGeLUForward, LinearBiasGeLUBackward)


def layers() -> tuple[sf.Sequential, nn.Sequential]:
    mine = randomized(
        sf.Sequential(ops.Linear(5, 4), ops.GELU(), ops.LayerNorm(4), ops.Linear(4, 3), ops.ReLU(), fusions=RULES)
    )
    its = nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 3), nn.ReLU())
    its.load_state_dict(mine.state_dict())
    return mine, its


def test_what_does_not_fit_is_refused_after_as_many_rows_that_did() -> None:
    model = sf.Sequential(ops.Scale(2.0), ops.Reshape(6, dims=2))
    assert model(tensor(4, 2, 3)).shape == (4, 6)
    with pytest.raises(sf.InputError, match=r"SF101 position 1 \(Reshape\)"):
        model(tensor(8, 3))
    assert model(tensor(4, 2, 3)).shape == (4, 6)


def both(mine: nn.Module, its: nn.Module, x: Tensor, **tolerance: float) -> None:
    got, expected = run(mine, x), run(its, x.detach().requires_grad_(x.requires_grad))
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert got[key].shape == value.shape
        assert got[key].dtype == value.dtype
        torch.testing.assert_close(got[key], value, **tolerance, msg=lambda m, key=key: f"{key}: {m}")


# Shapes.


@pytest.mark.parametrize(
    ("shape", "operation", "position", "expected"),
    [
        ((7, 4), "Linear", 0, "last dimension 5, got 4"),
        ((7, 1), "Linear", 0, "last dimension 5, got 1"),
        ((), "Linear", 0, "last dimension 5, got a 0-d tensor"),
        ((5, 0), "Linear", 0, "last dimension 5, got 0"),
    ],
    ids=str,
)
def test_a_wrong_last_dimension_is_refused_before_anything_runs(
    shape: tuple[int, ...], operation: str, position: int, expected: str
) -> None:
    mine, _ = layers()
    x = tensor(*shape)
    for fusing in (True, False):
        with sf.fusing(fusing), pytest.raises(sf.InputError, match=expected) as caught:
            mine(x)
        error = caught.value
        assert (error.code, error.operation, error.position) == ("SF101", operation, position)
        assert isinstance(error, ValueError)
        with pytest.raises(sf.InputError, match=expected):
            mine.plan(x)


def test_a_shape_that_does_not_fit_further_on_is_refused_before_anything_ran() -> None:
    ran: list[str] = []

    class Loud(sf.Pointwise):
        def reference(self, x: Tensor) -> Tensor:
            ran.append("fwd")
            return x * 2

    model = sf.Sequential(Loud(), sf.Sequential(ops.Linear(5, 4), ops.Bias(3)), ops.Tanh())
    with pytest.raises(sf.InputError, match="last dimension 3, got 4") as caught:
        model(tensor(7, 5))
    assert (caught.value.operation, caught.value.position) == ("Bias", 3)
    assert "1.1" in str(caught.value)
    assert ran == []


@pytest.mark.parametrize("shape", [(5,), (1, 5), (7, 5), (2, 3, 5), (2, 1, 3, 5), (1, 1, 1, 2, 5)], ids=str)
def test_any_number_of_leading_dimensions_gives_what_torch_gives(shape: tuple[int, ...]) -> None:
    mine, its = layers()
    both(mine, its, tensor(*shape), rtol=1e-4, atol=1e-5)
    assert fused_names(mine.plan(tensor(*shape)))[0] == ["LinearBiasGeLUForward", "BiasReLU"]


def test_a_number_alone_passes_through_pointwise_operations() -> None:
    mine = sf.Sequential(ops.Tanh(), ops.Scale(-2), ops.GeLU(), ops.Sigmoid())
    its = nn.Sequential(nn.Tanh(), nn.Identity(), nn.GELU(), nn.Sigmoid())
    x = tensor()
    got = outcome(mine, {"x": x}, x)
    expected = outcome(lambda: its[3](its[2](-2 * its[0](x))), {"x": x})
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0, 5), (0, 0, 5)], ids=str)
def test_no_rows_give_empty_results_and_zero_gradients_of_parameters(shape: tuple[int, ...]) -> None:
    mine, its = layers()
    both(mine, its, tensor(*shape))
    x = tensor(*shape)
    got = run(mine, x)
    assert all(float(got[f"d_{n}"].abs().sum()) == 0 for n, _ in mine.named_parameters())
    assert {r.reason for r in mine.plan(x).refused} == {"the input has no rows"}


def test_planning_for_more_elements_than_32_bits_count_touches_none() -> None:
    x = torch.zeros(1, 8).expand(2**29 + 3, 8)
    model = sf.Sequential(ops.Bias(8), ops.ReLU(), fusions=PAIR)
    plan = model.plan(x)
    assert plan.env.rows == 2**30
    assert fused_names(plan)[0] == ["BiasReLU"]
    with pytest.raises(sf.InputError, match="last dimension 8, got 4"):
        model.plan(x[:, :4])


# Dtypes.

REAL = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
PAIRS = list(itertools.permutations(REAL, 2))


COMPLEX, REAL = torch.complex64, torch.float32


@pytest.mark.parametrize(("x", "other", "own"), [(COMPLEX, REAL, REAL), (REAL, COMPLEX, REAL), (REAL, REAL, COMPLEX)])
def test_real_tensors_beside_complex_ones_have_real_gradients(
    x: torch.dtype, other: torch.dtype, own: torch.dtype
) -> None:
    model = sf.Sequential(ops.Bias(5, dtype=own), ops.Add("a"), ops.Multiply("m"), ops.LayerScale(5, 0.5, dtype=own))
    given = [seeded_randn((7, 5), i, dtype=d).requires_grad_() for i, d in enumerate((x, other, other))]
    leaves = [*given, *model.parameters()]
    expected = ((given[0] + model[0].bias + given[1]) * given[2]) * model[3].gamma
    dy = seeded_randn((7, 5), 3, dtype=COMPLEX)
    for _ in range(2):
        y = model(given[0], a=given[1], m=given[2])
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(
            torch.autograd.grad(y, leaves, dy), torch.autograd.grad(expected, leaves, dy, retain_graph=True)
        )


def test_whole_numbers_pass_where_torch_lets_them() -> None:
    x = torch.randint(-4, 5, (7, 5))
    assert torch.equal(sf.Sequential(ops.ReLU(), ops.Identity(), fusions=PAIR)(x), torch.relu(x))
    model = randomized(sf.Sequential(ops.Bias(5), ops.ReLU(), fusions=PAIR))
    torch.testing.assert_close(model(x), torch.relu(x + model[0].bias))
    model(x).sum().backward()
    assert model[0].bias.grad.dtype is torch.float32
    with pytest.raises(sf.InputError, match=r"SF102 position 0 \(Linear\).* got torch.int64"):
        sf.Sequential(ops.Linear(5, 4))(x)


@pytest.mark.parametrize(("a", "b"), PAIRS, ids=str)
def test_a_gemm_of_two_dtypes_is_refused_where_torch_refuses_it(a: torch.dtype, b: torch.dtype) -> None:
    model = sf.Sequential(ops.Tanh(), ops.Linear(5, 4, dtype=b), ops.GELU(), fusions=RULES)
    x = tensor(7, 5, dtype=a)
    with pytest.raises(RuntimeError):
        F.linear(x, model[1].weight)
    for _ in range(2):
        with pytest.raises(sf.InputError) as caught:
            model(x)
        assert (caught.value.code, caught.value.operation, caught.value.position) == ("SF102", "Linear", 1)
        assert f"expects its input in {b}, the dtype of its weight, got {a}" in str(caught.value)
    if torch.float64 not in (a, b):  # autocast does not cast it
        with torch.autocast("cpu", torch.bfloat16):
            assert model(x).isfinite().all()


def test_a_gemm_behind_what_changes_the_dtype_is_refused_or_not_by_what_enters_it() -> None:
    low, x = torch.bfloat16, tensor(7, 5)
    model = sf.Sequential(ops.Linear(5, 5), ops.Bias(5, dtype=torch.float64), ops.Linear(5, 4), fusions=RULES)
    with pytest.raises(sf.InputError, match=r"SF102 '2', position 3 \(Linear\): .*torch.float32.* got torch.float64"):
        model(x)
    model[2].to(torch.float64)
    assert model(x).dtype is torch.float64
    model = sf.Sequential(ops.LayerNorm(5), ops.Linear(5, 4, dtype=low), fusions=RULES)
    assert model(x.to(low)).dtype is low


# Layouts.


@given(
    rows_=st.integers(1, 4), columns=st.integers(1, 5), strides=st.tuples(st.integers(0, 5), st.integers(0, 3)),
    offset=st.integers(0, 3),
)  # fmt: skip
def test_overlapping_and_strided_windows_are_read_and_not_written(
    rows_: int, columns: int, strides: tuple[int, int], offset: int
) -> None:
    buffer = seeded_randn((40,), 5)
    x = buffer.as_strided((rows_, columns), strides, offset)
    model = randomized(sf.Sequential(ops.Bias(columns), ops.GeLU(), ops.Bias(columns), ops.ReLU(), fusions=RULES))
    with Untouched({"buffer": buffer}), sf.fusing(on_error="raise"):
        y = model(x)
        y.backward(laid_out(seeded_randn((rows_, columns), 6), "scalar"))
    expected = torch.relu(F.gelu(x + model[0].bias) + model[2].bias)
    torch.testing.assert_close(y, expected)


class Contiguous:
    """Fusions of the default layout that require it."""

    class Forward(AddReLUForward):
        def fwd(self, x: Tensor, *, add_other: Tensor) -> Any:
            assert x.is_contiguous()
            assert add_other.is_contiguous()
            return super().fwd(x, add_other=add_other)

    class Border(AddForkForward):
        def fwd(self, x: Tensor, *, add_other: Tensor) -> Any:
            assert x.is_contiguous()
            assert add_other.is_contiguous()
            return super().fwd(x, add_other=add_other)

    class BorderBack(AddForkBackward):
        def bwd(self, dy: Tensor, *, add: Any, fork: Any, d_fork_out: Tensor) -> Any:
            assert dy.is_contiguous()
            assert d_fork_out.is_contiguous()
            return super().bwd(dy, add=add, fork=fork, d_fork_out=d_fork_out)

    class Back(BiasReLUBack):
        def bwd(self, dy: Tensor, *, bias: Any, act: Any) -> Any:
            assert dy.is_contiguous()
            assert act.y.is_contiguous()
            return super().bwd(dy, bias=bias, act=act)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fusion_gets_everything_in_the_layout_it_asks_for(layout: str) -> None:
    def fit(*shape: int, seed: int) -> Tensor:
        return laid_out(seeded_randn(shape, seed), layout).requires_grad_()

    with sf.fusing(on_error="raise"):
        x, r = fit(7, 5, seed=1), fit(7, 5, seed=2)
        model = sf.Sequential(ops.Add("r"), ops.ReLU(), fusions=(Contiguous.Forward,))
        torch.testing.assert_close(model(x, r=r), torch.relu(x + r))

        model = sf.Sequential(ops.Add("a"), ops.Fork("b"), fusions=(Contiguous.Border, Contiguous.BorderBack))
        y, b = model(x, a=r)
        dy, db = fit(7, 5, seed=3).detach(), fit(7, 5, seed=4).detach()
        dx, dr = torch.autograd.grad((y, b), (x, r), (dy, db))
        torch.testing.assert_close((dx, dr), (dy + db, dy + db))

        # The unfused forward saves what it computed from x, in the layout of x.
        model = randomized(sf.Sequential(ops.Bias(5), ops.ReLU(), fusions=(Contiguous.Back,)))
        got = torch.autograd.grad(model(x), x, dy)
        torch.testing.assert_close(got[0], torch.where(x + model[0].bias > 0, dy, 0.0))


def test_a_fusion_for_contiguous_rows_gets_padded_rows_as_they_are_and_nothing_worse() -> None:
    seen: list[tuple[int, ...]] = []

    class Rows(BiasReLU):
        layout = "inner_contig"

        def fwd(self, x: Tensor) -> Any:
            seen.append(x.stride())
            return super().fwd(x)

    model = randomized(sf.Sequential(ops.Bias(5), ops.ReLU(), fusions=(Rows,)))
    wide = seeded_randn((7, 8), 1)
    for x in (wide[:, :5], wide[:, 1:6], wide[:5, :7].mT, wide[:1, :5].expand(7, 5), wide[:, :1].expand(7, 5)):
        torch.testing.assert_close(model(x), torch.relu(x + model[0].bias))
    assert seen == [(8, 1), (8, 1), (5, 1), (5, 1), (5, 1)]


def test_a_fusion_for_any_layout_gets_tensors_as_they_are() -> None:
    seen: list[int] = []

    class Any_(BiasReLU):
        layout = "any"

        def fwd(self, x: Tensor) -> Any:
            seen.append(x.data_ptr())
            return super().fwd(x)

    model = randomized(sf.Sequential(ops.Bias(5), ops.ReLU(), fusions=(Any_,)))
    x = seeded_randn((5, 7), 1).mT
    torch.testing.assert_close(model(x), torch.relu(x + model[0].bias))
    assert seen == [x.data_ptr()]


def test_an_input_that_is_its_own_residual_is_not_written() -> None:
    model = randomized(sf.Sequential(ops.Linear(5, 5), ops.Add("r"), ops.ReLU(), fusions=(AddReLUForward, *PAIR)))
    x = tensor(7, 5)
    with Untouched({"x": x}):
        got = outcome(lambda: model(x, r=x), {"x": x, **dict(model.named_parameters())})
    weight, bias = model[0].weight, model[0].bias
    expected = outcome(lambda: torch.relu(F.linear(x, weight, bias) + x), {"x": x, "0.weight": weight, "0.bias": bias})
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("before", [ops.Scale(2.0), ops.Bias(5), ops.Linear(5, 5)], ids=lambda op: type(op).__name__)
def test_an_in_place_module_may_follow_what_does_not_keep_its_output(before: nn.Module) -> None:
    model = randomized(sf.Sequential(before, nn.ReLU(inplace=True), ops.Linear(5, 3)))
    x = tensor(7, 5)
    got = run(model, x)
    wanted = {"x": x, **dict(model.named_parameters())}
    for key, value in outcome(lambda: model[2](torch.relu(before(x))), wanted).items():
        torch.testing.assert_close(got[key], value)


@pytest.mark.parametrize("before", [ops.Tanh(), ops.ReLU()], ids=lambda op: type(op).__name__)
def test_an_in_place_module_behind_what_keeps_its_output_is_torchs_error(before: nn.Module) -> None:
    model = sf.Sequential(before, nn.LeakyReLU(inplace=True), ops.Linear(5, 3))
    y = model(tensor(7, 5))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# Kinds of tensor.


def test_a_tensor_subclass_runs_by_the_references_and_keeps_its_class() -> None:
    mine, its = layers()
    a, b = tensor(7, 5), tensor(7, 5, seed=8)
    y = mine(TwoTensor(a.detach(), b.detach()))
    assert type(y) is TwoTensor
    torch.testing.assert_close(y.a, its(a))
    torch.testing.assert_close(y.b, its(b))


class Twice(nn.Module):
    """Returns a tensor of another class, on this device or not."""

    now = True

    def forward(self, x: Tensor) -> Tensor:
        return TwoTensor(x, x + 1) if self.now else x


def test_a_tensor_subclass_that_a_module_gives_runs_by_the_references() -> None:
    module = Twice()
    mine = sf.Sequential(ops.Linear(5, 6), module, ops.Linear(6, 6), ops.GeLU(), ops.Add("r"))
    x, r = tensor(7, 5), tensor(7, 6, seed=8)

    def expected(plus: int) -> Tensor:
        return torch.nn.functional.gelu(mine[2](mine[0](x) + plus)) + r

    for module.now in (True, False, True):
        y = mine(x, r=r)
        torch.testing.assert_close(y.a if module.now else y, expected(0))
        if module.now:
            assert type(y) is TwoTensor
            torch.testing.assert_close(y.b, expected(1))
            assert "Seqfuse" not in type(y.grad_fn).__name__


def test_an_error_of_a_reference_names_its_place() -> None:
    model = sf.Sequential(ops.Linear(5, 6), ops.Add("r"))
    with pytest.raises(sf.InputError, match=r"SF101 '1', position 2 \(Add\): adds tensors of one shape") as caught:
        torch.func.vmap(lambda t: model(t, r=torch.zeros(3, 6)))(torch.zeros(2, 7, 5))
    assert caught.value.position == 2


def test_a_parameter_that_is_a_tensor_subclass_runs_by_the_references() -> None:
    mine, its = layers()
    x = tensor(7, 5)
    mine(x)
    weight = mine[3].weight.detach()
    mine[3].weight = nn.Parameter(TwoTensor(weight.clone(), weight.clone()))
    y = mine(x)
    y = y.a if isinstance(y, TwoTensor) else y
    torch.testing.assert_close(y, its(x))


def test_a_parameter_as_input_gets_its_gradient() -> None:
    mine, its = layers()
    x = nn.Parameter(tensor(7, 5, grad=False))
    both(mine, its, x, rtol=1e-4, atol=1e-5)


def test_tensors_made_in_inference_mode_are_taken_as_torch_takes_them() -> None:
    mine, its = layers()
    with torch.inference_mode():
        x = seeded_randn((7, 5), 3)
        torch.testing.assert_close(mine(x), its(x))
    with torch.no_grad():
        torch.testing.assert_close(mine(x), its(x))
    for model in (mine, its):
        with pytest.raises(RuntimeError, match=r"[Ii]nference"):
            model(x)
    both(mine, its, x.clone().requires_grad_(), rtol=1e-4, atol=1e-5)


def test_a_barrier_that_returns_no_tensor_is_named() -> None:
    model = sf.Sequential(ops.Tanh(), nn.LSTM(5, 4), ops.Linear(4, 3))
    with pytest.raises(sf.SeqfuseError, match=r"LSTM.*tuple|tuple.*LSTM"):
        model(tensor(7, 5))


def test_a_barrier_that_takes_something_else_may_come_first() -> None:
    class Tokens(nn.Module):
        def forward(self, words: list[str]) -> Tensor:
            return torch.tensor([[float(len(w)), -1.0, 0.5, 2.0, float(w == "a")] for w in words])

    model = randomized(sf.Sequential(Tokens(), ops.Bias(5), ops.ReLU(), fusions=PAIR))
    words = ["a", "fusion", "of", "words"]
    torch.testing.assert_close(model(words), torch.relu(model[0](words) + model[1].bias))
    embedding = randomized(sf.Sequential(nn.Embedding(9, 5), ops.Bias(5), ops.ReLU(), fusions=PAIR))
    ids = torch.tensor([[3, 1], [0, 8]])
    y = embedding(ids)
    torch.testing.assert_close(y, torch.relu(embedding[0](ids) + embedding[1].bias))
    y.sum().backward()
    assert embedding[0].weight.grad is not None
    assert embedding[1].bias.grad is not None


# Devices.


def test_an_input_on_meta_gives_shapes_and_runs_nothing() -> None:
    with torch.device("meta"):
        model, _ = layers()
    y = model(torch.empty(7, 5, device="meta", requires_grad=True))
    y.sum().backward()
    assert (y.device.type, y.shape) == ("meta", (7, 3))
    assert all(p.grad.shape == p.shape for p in model.parameters())


def test_on_meta_a_product_takes_any_dtype_as_in_torch() -> None:
    x = torch.empty(7, 5, device="meta", dtype=torch.bfloat16)
    shape = nn.Linear(5, 4, device="meta")(x).shape
    assert sf.Sequential(ops.Linear(5, 4, device="meta"), ops.Tanh())(x).shape == shape


def test_two_devices_in_one_list_name_both_and_the_place() -> None:
    model = sf.Sequential(ops.Linear(5, 4), ops.Linear(4, 3, device="meta"), fusions=RULES)
    for x, position, own, got in ((tensor(7, 5), 2, "meta", "cpu"), (tensor(7, 5).to("meta"), 0, "cpu", "meta")):
        with pytest.raises(
            sf.InputError, match=f"expects its input on {own}, where its weight is, got {got}"
        ) as caught:
            model(x)
        assert (caught.value.code, caught.value.operation, caught.value.position) == ("SF102", "Linear", position)


# The checks themselves leave no trace.


def test_a_refused_input_leaves_the_model_as_it_was() -> None:
    mine, _ = layers()
    x = tensor(7, 5)
    expected = run(mine, x)
    state = torch.get_rng_state()
    for wrong in (tensor(7, 4), tensor(7, 5, dtype=torch.float64), torch.empty(7, 5, device="meta")):
        with pytest.raises((sf.InputError, RuntimeError)):
            mine(wrong)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in mine.parameters())
    assert_exact(run(mine, x), expected)


@pytest.mark.parametrize("called", [sf.Sequential, sf.FusableOperation, ops.Linear, sf.nn.TransformerLayer])
def test_the_signature_of_forward_asks_for_x(called: type[nn.Module]) -> None:
    x, channels = [*inspect.signature(called.forward).parameters.values()][1:]
    assert (x.name, x.default, channels.kind) == ("x", x.empty, channels.VAR_KEYWORD)
