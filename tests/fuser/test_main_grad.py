"""Gradients added to `parameter.main_grad`: by whom, in which dtype, and which buffers are refused."""

from __future__ import annotations

import contextlib
import copy
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import seqfuse as sf
from seqfuse import ops
from seqfuse.fusions import LinearBiasBackward
from seqfuse.testing import assert_bitwise_equal, assert_fused_close, seeded_randn
from tests.fuser.fusions import BiasReLUBack, randomized

ATEN = (LinearBiasBackward,)


def net(dtype: torch.dtype = torch.float32, fusions: Any = ATEN) -> sf.Sequential:
    """Enough operations for two segments."""
    first = (ops.LayerNorm(5), ops.Linear(5, 7), ops.GELU(), ops.Linear(7, 5, bias=False))
    second = (ops.RMSNorm(5), ops.Linear(5, 3), ops.ReLU(), ops.Bias(3), ops.Linear(3, 4))
    third = (ops.SiLU(), ops.Linear(4, 4), ops.Tanh())
    return randomized(sf.Sequential(*first, *second, *third, fusions=fusions)).to(dtype)


def with_buffers(model: nn.Module, start: float = 0.0) -> nn.Module:
    for p in model.parameters():
        p.main_grad = torch.full(p.shape, start, dtype=torch.float64 if p.dtype == torch.float64 else torch.float32)
    return model


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.main_grad.clone() for name, p in model.named_parameters()}


def gradients(model: nn.Module, *xs: Tensor) -> dict[str, Tensor]:
    """Torch's accumulation in `.grad` over several backwards, in float32."""
    sums: dict[str, Tensor] = {}
    for x in xs:
        grads = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
        for (name, _), g in zip(model.named_parameters(), grads, strict=True):
            sums[name] = sums.get(name, 0) + (g if g.dtype is torch.float64 else g.float())
    return sums


def backward(model: nn.Module, *xs: Tensor, **options: Any) -> None:
    for x in xs:
        model(x).square().sum().backward(**options)


@pytest.mark.parametrize("fusions", [(), ATEN], ids=["unfused", "fused"])
def test_two_backwards_add_up_in_the_buffers(fusions: Any) -> None:
    model, xs = net(fusions=fusions), (seeded_randn((6, 5), 0), seeded_randn((2, 3, 5), 1))
    assert model.plan(xs[0]).count("LinearBiasBackward") == 4 * len(fusions)
    assert len(model.plan(xs[0]).segments) == 2
    expected = gradients(model, *xs)
    exact = gradients(copy.deepcopy(model).double(), *(x.double() for x in xs))
    backward(with_buffers(model), *xs)
    assert_fused_close(buffers(model), expected, exact)
    assert all(p.grad is None for p in model.parameters())


def test_what_the_buffer_holds_is_kept() -> None:
    linear = sf.Sequential(ops.Linear(4, 3, bias=False), fusions=())
    with torch.no_grad():
        linear[0].weight.copy_(torch.arange(12.0).view(3, 4))
    x = torch.tensor([[1.0, -2.0, 3.0, 4.0], [0.0, 5.0, -1.0, 2.0]])
    with_buffers(linear, 1000.0)
    linear(x).backward(torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.0, 4.0]]))
    added = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.0, 4.0]]).t() @ x
    assert_bitwise_equal(linear[0].weight.main_grad, 1000.0 + added)


@pytest.mark.parametrize("fusions", [(), ATEN], ids=["unfused", "fused"])
def test_products_in_bfloat16_are_not_rounded_before_they_are_added(fusions: Any) -> None:
    model = sf.Sequential(ops.Linear(32, 24), fusions=fusions).to(torch.bfloat16)
    x, dy = (seeded_randn(s, i, dtype=torch.bfloat16) for i, s in enumerate([(65, 32), (65, 24)]))
    with_buffers(model)
    model(x).backward(dy)
    exact = dy.double().t() @ x.double()
    weight = model[0].weight
    assert (weight.main_grad - exact).abs().max() < 1e-5 * exact.abs().max()
    # The operation computes the bias's gradient in its dtype, and the engine adds it.
    assert_bitwise_equal(model[0].bias.main_grad, dy.sum(0).float())


def test_the_gradient_of_x_is_the_same() -> None:
    model, x = net(), seeded_randn((6, 5), 0).requires_grad_()
    (own,) = torch.autograd.grad(model(x).square().sum(), x)
    backward(with_buffers(model), x)
    assert_bitwise_equal(x.grad, own)


def test_a_graph_that_is_kept_adds_twice() -> None:
    model, x = net(), seeded_randn((6, 5), 0)
    y = with_buffers(model)(x).square().sum()
    y.backward(retain_graph=True)
    once = buffers(model)
    y.backward()
    torch.testing.assert_close(buffers(model), {name: 2 * g for name, g in once.items()})


def test_frozen_weights_are_left_alone() -> None:
    model, x = with_buffers(net(), 7.0), seeded_randn((6, 5), 0)
    frozen = {"1.weight", "5.bias"}
    for name, p in model.named_parameters():
        p.requires_grad_(name not in frozen)
    backward(model, x)
    changed = {name for name, g in buffers(model).items() if bool((g != 7.0).any())}
    assert changed == {name for name, _ in model.named_parameters()} - frozen


def test_a_weight_that_two_operations_share_gets_the_sum_of_both() -> None:
    first, second = ops.Linear(5, 5), ops.Linear(5, 5)
    second.weight = first.weight
    tied = randomized(sf.Sequential(first, ops.Tanh(), second, ops.GELU(), ops.Linear(5, 2), fusions=ATEN))
    x = seeded_randn((6, 5), 0)
    expected, exact = gradients(tied, x), gradients(copy.deepcopy(tied).double(), x.double())
    backward(with_buffers(tied), x)
    assert_fused_close(buffers(tied), expected, exact)


@pytest.mark.parametrize("make", [lambda: ops.Linear(5, 5), lambda: ops.LayerNorm(5)], ids=["GEMM", "norm"])
def test_an_operation_that_stands_twice_adds_both_gradients(make: Any) -> None:
    twice = make()
    model = randomized(sf.Sequential(twice, ops.Tanh(), twice, ops.GELU(), ops.Linear(5, 2), fusions=ATEN))
    x = seeded_randn((6, 5), 0)
    expected, exact = gradients(model, x), gradients(copy.deepcopy(model).double(), x.double())
    backward(with_buffers(model), x)
    assert_fused_close(buffers(model), expected, exact)


def test_a_weight_shared_with_an_operation_that_adds_nothing_itself() -> None:
    table, out = ops.Embedding(9, 5), ops.Linear(5, 9, bias=False)
    out.weight = table.weight
    model = randomized(sf.Sequential(table, ops.Tanh(), out, fusions=()))
    tokens = torch.tensor([[1, 4, 1], [8, 0, 3]])
    (g,) = torch.autograd.grad(model(tokens).square().sum(), table.weight)
    table.weight.main_grad = torch.zeros(9, 5)
    model(tokens).square().sum().backward()
    torch.testing.assert_close(table.weight.main_grad, g)
    assert table.weight.grad is None


def test_only_parameters_with_a_buffer_go_there() -> None:
    model, x = net(), seeded_randn((6, 5), 0)
    expected = gradients(model, x)
    model[1].weight.main_grad = torch.zeros(7, 5)
    backward(model, x)
    got = {name: p.grad for name, p in model.named_parameters()}
    assert got.pop("1.weight") is None
    assert_bitwise_equal(got, {name: g for name, g in expected.items() if name != "1.weight"})
    torch.testing.assert_close(model[1].weight.main_grad, expected["1.weight"])


def test_a_gradient_that_is_asked_for_is_returned() -> None:
    model, x = net(), seeded_randn((6, 5), 0)
    expected = gradients(model, x)
    with_buffers(model, 7.0)
    assert_bitwise_equal(gradients(model, x), expected)
    assert all(bool((g == 7.0).all()) for g in buffers(model).values())


def test_backward_with_inputs_adds_only_theirs() -> None:
    model, x = with_buffers(net()), seeded_randn((6, 5), 0)
    expected = gradients(model, x)
    backward(model, x, inputs=[model[1].weight])
    torch.testing.assert_close(model[1].weight.main_grad, expected["1.weight"])
    assert [name for name, g in buffers(model).items() if g.any()] == ["1.weight"]


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_parameter_with_hooks_gets_its_gradient_from_torch(kind: str) -> None:
    model, x = net(), seeded_randn((6, 5), 0)
    expected, seen = gradients(model, x), list[Tensor]()
    weight = with_buffers(model)[1].weight
    getattr(weight, kind)(lambda t: seen.append(t))
    backward(model, x)
    assert len(seen) == 1
    assert_bitwise_equal(weight.grad, expected["1.weight"])
    assert not weight.main_grad.any()


def test_tensors_passed_in_place_of_the_parameters_keep_their_gradients() -> None:
    model, x = with_buffers(net()), seeded_randn((6, 5), 0)
    given = {name: (2 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
    functional_call(model, given, (x,)).square().sum().backward()
    assert all(t.grad is not None for t in given.values())
    assert not any(g.any() for g in buffers(model).values())


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing_and_saved_tensor_hooks(reentrant: bool) -> None:
    model, x = net(), seeded_randn((6, 5), 0).requires_grad_()
    backward(with_buffers(model), x)
    expected = buffers(model)
    checkpoint(with_buffers(model), x, use_reentrant=reentrant).square().sum().backward()
    assert_bitwise_equal(buffers(model), expected)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        y = with_buffers(model)(x)
    y.square().sum().backward()
    assert_bitwise_equal(buffers(model), expected)


def test_under_autocast_the_product_is_made_in_its_dtype_and_not_rounded() -> None:
    model, x = net(), seeded_randn((6, 5), 0)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        y.float().square().sum().backward()

    run()
    own = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    with_buffers(model)
    run()
    got = buffers(model)
    products = [name for name, op in model.named_modules() if type(op) is ops.Linear]
    assert all(bool((got[f"{name}.weight"] != own[f"{name}.weight"]).any()) for name in products)
    got |= {f"{name}.weight": got[f"{name}.weight"].to(torch.bfloat16).float() for name in products}
    assert_bitwise_equal(got, own)


def test_in_float64() -> None:
    model, x = net(torch.float64), seeded_randn((6, 5), 0, dtype=torch.float64)
    expected = gradients(model, x)
    backward(with_buffers(model), x)
    torch.testing.assert_close(buffers(model), expected)


@pytest.mark.parametrize(
    ("buffer", "got"),
    [
        (torch.zeros(7, 5, dtype=torch.bfloat16), r"bfloat16\[7, 5\] on cpu"),
        (torch.zeros(5, 7), r"float32\[5, 7\] on cpu"),
        (torch.zeros(7, 5, device="meta"), r"float32\[7, 5\] on meta"),
        (0.0, "float"),
    ],
    ids=["dtype", "shape", "device", "no tensor"],
)
def test_a_buffer_that_does_not_fit_is_an_error(buffer: Any, got: str) -> None:
    model, x = net(), seeded_randn((6, 5), 0)
    model[1].weight.main_grad = buffer
    wanted = r"main_grad of Linear.weight must be float32\[7, 5\] on cpu, got " + got
    with pytest.raises(sf.StateError, match=wanted) as caught:
        backward(model, x)
    assert (caught.value.code, caught.value.operation, caught.value.position) == ("SF507", "LinearBiasBackward", 1)


# A user's fusion.


fault = [""]


class Adds(sf.BackwardFusion):
    """Adds to the buffer, and may fail before or after."""

    linear: ops.Linear
    bias: ops.Bias

    def bwd(self, dy: Tensor, *, linear: Any, bias: Any, needs: frozenset[str], main_grads: dict[str, Tensor]) -> Any:
        if fault[0] == "before":
            raise RuntimeError("no memory")
        weight: Any = dy.t() @ linear.x
        if fault[0] == "says so only":
            weight = sf.accumulated
        elif (buffer := main_grads.pop("linear.weight", None)) is not None:
            buffer += weight
            weight = sf.accumulated
        if fault[0] == "after":
            raise RuntimeError("no memory")
        return (dy @ linear.weight if "x" in needs else None), {"linear.weight": weight, "bias.bias": dy.sum(0)}


@pytest.fixture
def faulty() -> Any:
    fault[0] = ""
    yield randomized(sf.Sequential(ops.Tanh(), ops.Linear(5, 4), ops.Tanh(), fusions=Adds))
    fault[0] = ""


def test_a_fusion_may_add_by_itself(faulty: sf.Sequential) -> None:
    x = seeded_randn((6, 5), 0)
    assert faulty.plan(x).count("Adds") == 1
    expected = gradients(faulty, x)
    backward(with_buffers(faulty), x)
    torch.testing.assert_close(buffers(faulty), expected)


def test_one_that_fails_before_it_took_the_buffer_falls_back(faulty: sf.Sequential) -> None:
    x = seeded_randn((6, 5), 0)
    expected = gradients(faulty, x)
    fault[0] = "before"
    with pytest.warns(sf.FallbackWarning, match="no memory"):
        backward(with_buffers(faulty), x)
    torch.testing.assert_close(buffers(faulty), expected)


def test_one_that_fails_after_it_took_the_buffer_is_an_error(faulty: sf.Sequential) -> None:
    x = seeded_randn((6, 5), 0)
    with_buffers(faulty)
    fault[0] = "after"
    with pytest.raises(
        sf.KernelError, match=r"took the main_grad of linear\.weight: RuntimeError: no memory"
    ) as caught:
        backward(faulty, x)
    assert (caught.value.operation, caught.value.position) == ("Adds", 1)


def test_an_operation_that_fails_after_it_took_the_buffer_raises_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Any, dy: Tensor, saved: Any, *, needs: Any, main_grads: dict[str, Tensor]) -> Any:
        main_grads.pop("weight")
        raise ArithmeticError("out of range")

    monkeypatch.setattr(ops.Linear, "bwd", failing)
    model = with_buffers(randomized(sf.Sequential(ops.Tanh(), ops.Linear(5, 4), fusions=())))
    with pytest.raises(ArithmeticError, match="out of range"):
        backward(model, seeded_randn((6, 5), 0))


@pytest.mark.parametrize("there", [False, True], ids=["without a buffer", "with one"])
def test_one_that_only_says_it_added_is_an_error(faulty: sf.Sequential, there: bool) -> None:
    x = seeded_randn((6, 5), 0)
    if there:
        with_buffers(faulty)
    fault[0] = "says so only"
    for _ in range(2):
        with pytest.raises(sf.PluginError, match=r"accumulated for 'linear\.weight', which it did not pop"):
            backward(faulty, x)


def test_a_forward_that_names_the_buffers_is_refused_where_it_is_defined() -> None:
    with pytest.raises(sf.PluginError, match="main_grads"):

        class Wrong(sf.ForwardFusion):
            linear: ops.Linear

            def fwd(self, x: Tensor, *, main_grads: dict[str, Tensor]) -> Any: ...


def test_tuning_leaves_the_buffers_alone(tmp_path: Any) -> None:
    model, x = with_buffers(net(), 7.0), seeded_randn((6, 5), 0)
    report = sf.tune(model, x, modes="train", file=tmp_path / "measured.json")
    assert {row.fusion for row in report.rows if row.fused_us is not None} == {"LinearBiasBackward"}
    assert all(bool((g == 7.0).all()) for g in buffers(model).values())


class FailsOnce(BiasReLUBack):
    """Fails in its first call, and declares nothing about buffers."""

    left: ClassVar[int] = 0

    def saves(self, env: sf.Env) -> sf.Savings:
        return sf.Savings(launches=9)

    def bwd(self, dy: Tensor, *, bias: Any, act: Any) -> Any:
        if FailsOnce.left:
            FailsOnce.left -= 1
            raise RuntimeError("not now")
        return super().bwd(dy, bias=bias, act=act)


@pytest.mark.parametrize("failing", [1, 2])
def test_what_was_added_before_a_fusion_failed_is_not_added_again(failing: int) -> None:
    several = [op for _ in range(failing) for op in (ops.Bias(5), ops.ReLU(), ops.Linear(5, 5, bias=False))]
    model = randomized(sf.Sequential(*several, fusions=(FailsOnce,)))
    x = seeded_randn((6, 5), 0)
    assert len(model.plan(x).segments) == 1
    expected = gradients(model, x)
    for _ in range(2):
        with_buffers(model)
        FailsOnce.left = failing
        with pytest.warns(sf.FallbackWarning, match="not now") if _ == 0 else contextlib.nullcontext():
            backward(model, x)
        assert FailsOnce.left == 0
        torch.testing.assert_close(buffers(model), expected)


def test_a_leaf_that_is_no_parameter_gets_a_buffer_after_other_calls() -> None:
    model, x = sf.Sequential(ops.Linear(4, 4), ops.QuickGeLU(), ops.Linear(4, 2)), torch.randn(3, 4)
    weight = model[0].weight.detach().clone().requires_grad_()
    model[0]._parameters["weight"] = weight  # in addition to parameters, for which the node has another path
    for _ in range(3):  # from the second call on the code without checks runs
        weight.grad = None
        model(x).sum().backward()
    wanted, weight.grad = weight.grad, None
    weight.main_grad = torch.zeros_like(weight)
    model(x).sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad, wanted)
