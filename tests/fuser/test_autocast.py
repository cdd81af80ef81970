"""Autocast and mixed dtypes: output dtypes, values and gradient dtypes equal those of the torch twin."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.casts import cast_once, lowered
from seqfuse.plan import flatten, inputs
from seqfuse.plan.inputs import dtypes_of, under_autocast
from tests.watching import saving

from .fusions import BiasTanhBackward, BiasTanhForward, BiasTanhJoint
from .kit import PlainResidual, draw, randomize

pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's RMSNorm
HALVES = pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
FUSIONS = pytest.mark.parametrize(
    "fusions", [(), (BiasTanhForward,), (BiasTanhBackward,), (BiasTanhJoint,)],
    ids=lambda f: f[0].__name__ if f else "none",
)  # fmt: skip


def pair(dtype: torch.dtype = torch.float32, fusions: Any = ()) -> tuple[sf.Sequential, nn.Sequential]:
    """A model with both norms, a residual and a gate-free chain, and its twin of `torch.nn`."""
    model = sf.Sequential(
        ops.LayerNorm(12), ops.Linear(12, 17), ops.Tanh(),
        ops.Residual(ops.RMSNorm(17, eps=1e-5), ops.Linear(17, 9), ops.GeLU(), ops.Linear(9, 17)),
        ops.Linear(17, 5, bias=False), ops.Sigmoid(),
        fusions=fusions,
    )  # fmt: skip
    randomize(model)
    plain = nn.Sequential(
        nn.LayerNorm(12), nn.Linear(12, 17), nn.Tanh(),
        PlainResidual(nn.RMSNorm(17, eps=1e-5), nn.Linear(17, 9), nn.GELU(), nn.Linear(9, 17)),
        nn.Linear(17, 5, bias=False), nn.Sigmoid(),
    )  # fmt: skip
    model, plain = model.to(dtype), plain.to(dtype)
    plain.load_state_dict(model.state_dict(), strict=True)
    return model, plain


Region = Callable[[], contextlib.AbstractContextManager[Any]]


def run(model: nn.Module, x: Tensor, region: Region, outside: Region = contextlib.nullcontext) -> dict[str, Any]:
    """Forward in `region`, backward in `outside`."""
    model.zero_grad(set_to_none=True)
    leaf = x.detach().clone().requires_grad_()
    with region():
        y = model(leaf)
    dy = draw(*y.shape, seed=99).to(y.dtype)
    with outside():
        y.backward(dy)
    return {"out": y.detach(), "d_x": leaf.grad, **{f"d_{n}": p.grad for n, p in model.named_parameters()}}


def judge(found: dict[str, Any], plain: dict[str, Any], exact: dict[str, Any], eps: float = 0.0) -> None:
    """Dtypes as the twin's; errors against float64 at most three times the twin's, or a few `eps`."""
    for name, want in plain.items():
        got, truth = found[name], exact[name]
        assert got.dtype == want.dtype, f"{name}: {got.dtype}, in torch {want.dtype}"
        assert got.shape == want.shape
        assert truth.abs().max() > 0
        scale = truth.square().mean().sqrt()
        mine = ((got.double() - truth).square().mean().sqrt() / scale).item()
        its = ((want.double() - truth).square().mean().sqrt() / scale).item()
        floor = max(eps, torch.finfo(want.dtype).eps, torch.finfo(torch.float32).eps)
        assert mine <= 3 * its + 2 * floor, f"{name}: relative error {mine:.2e}, in torch {its:.2e}"


def truth(plain: nn.Module, x: Tensor) -> dict[str, Any]:
    return run(copy.deepcopy(plain).double(), x.double(), contextlib.nullcontext)


def autocast(half: torch.dtype, enabled: bool = True) -> Region:
    return lambda: torch.autocast("cpu", half, enabled=enabled)


@HALVES
@FUSIONS
def test_under_autocast_dtypes_values_and_gradients_are_those_of_torch(half: torch.dtype, fusions: Any):
    model, plain = pair(fusions=fusions)
    x = draw(33, 12, dtype=torch.float32)
    found, want = run(model, x, autocast(half)), run(plain, x, autocast(half))
    assert want["out"].dtype == half
    judge(found, want, truth(plain, x))
    with torch.autocast("cpu", half), sf.fusing(False):
        assert model(x).dtype == half


@HALVES
@pytest.mark.parametrize("half_inside", [True, False], ids=["same", "other half"])
def test_backward_inside_an_autocast_region_gives_what_it_gives_outside(half: torch.dtype, half_inside: bool):
    other = half if half_inside else {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16}[half]
    model, plain = pair(fusions=(BiasTanhJoint,))
    x = draw(33, 12, dtype=torch.float32)
    outside = run(model, x, autocast(half))
    inside = run(model, x, autocast(half), autocast(other))
    for name, want in outside.items():
        assert torch.equal(inside[name], want), name
    judge(inside, run(plain, x, autocast(half)), truth(plain, x))


@HALVES
def test_a_forward_outside_and_a_backward_inside_stays_in_full_precision(half: torch.dtype):
    model, _ = pair(fusions=(BiasTanhForward,))
    x = draw(33, 12, dtype=torch.float32)
    want = run(model, x, contextlib.nullcontext)
    found = run(model, x, contextlib.nullcontext, autocast(half))
    for name in want:
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], want[name]), name


@HALVES
@FUSIONS
def test_regions_nest_both_ways(half: torch.dtype, fusions: Any):
    model, plain = pair(fusions=fusions)
    x = draw(33, 12, dtype=torch.float32)

    @contextlib.contextmanager
    def off_in_on() -> Any:
        with torch.autocast("cpu", half), torch.autocast("cpu", enabled=False):
            yield

    @contextlib.contextmanager
    def on_in_off() -> Any:
        with torch.autocast("cpu", enabled=False), torch.autocast("cpu", half):
            yield

    off = run(model, x, off_in_on)
    none = run(model, x, contextlib.nullcontext)
    assert off["out"].dtype == torch.float32
    for name in none:
        assert torch.equal(off[name], none[name]), name
    judge(run(model, x, on_in_off), run(plain, x, on_in_off), truth(plain, x))


def test_a_module_that_leaves_autocast_inside_a_list_is_a_barrier_that_does():
    class Full(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = sf.Sequential(ops.Linear(17, 17), ops.Tanh(), fusions=(BiasTanhJoint,))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return self.inner(x.float())

    model = sf.Sequential(ops.Linear(12, 17), ops.Tanh(), Full(), ops.Linear(17, 5), fusions=(BiasTanhJoint,))
    dtypes: list[torch.dtype] = []
    for op in (model[0], model[2].inner[0], model[3]):
        op.register_forward_hook(lambda module, args, out: dtypes.append(out.dtype))
    found = run(model, draw(33, 12, dtype=torch.float32), autocast(torch.bfloat16))
    assert dtypes == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert all(g.dtype == torch.float32 for name, g in found.items() if name != "out")


@HALVES
def test_half_activations_with_full_parameters_under_autocast(half: torch.dtype):
    model, plain = pair(fusions=(BiasTanhJoint,))
    x = draw(33, 12, dtype=half)
    found, want = run(model, x, autocast(half)), run(plain, x, autocast(half))
    assert found["d_x"].dtype == half
    judge(found, want, truth(plain, x))


@HALVES
def test_half_parameters_with_full_activations_under_autocast(half: torch.dtype):
    model, plain = pair(half, fusions=(BiasTanhJoint,))
    model, plain = model[1:3], plain[1:3]  # torch's norms do not take this combination on a CPU
    x = draw(33, 12, dtype=torch.float32)
    found, want = run(model, x, autocast(half)), run(plain, x, autocast(half))
    assert found["d_1.weight"].dtype == half
    judge(found, want, truth(plain, x))


class OwnLinear(sf.UnfusedOperation):
    """torch casts its weight."""

    class Saved(sf.Saved):
        x: Tensor

    autocast = "lower"

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def reference(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)

    def fwd(self, x: Tensor) -> Any:
        return self.reference(x), self.Saved(x=x)

    def bwd(self, dy: Tensor, saved: Any) -> Any:
        return dy @ self.weight.to(dy.dtype), {"weight": (dy.t() @ saved.x).float()}


def test_a_weight_that_torch_cast_inside_a_list_has_its_gradient_outside_of_it():
    operation, x = OwnLinear(), torch.randn(4, 6)
    model = sf.Sequential(operation, ops.Tanh())
    for _ in range(3):  # the first call is interpreted
        operation.weight.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            model(x)
            nn.functional.linear(x, operation.weight).float().sum().backward()
        torch.testing.assert_close(operation.weight.grad, x.sum(0).expand(6, 6), rtol=0.01, atol=0.01)


class HalfAndWide(sf.UnfusedOperation):
    """y = x in bfloat16, wide = 2 x in float32, whatever x is."""

    outputs = ("wide",)

    class Saved(sf.Saved):
        pass

    def __init__(self) -> None:
        super().__init__()
        self.wide = "wide"

    def reference(self, x: Tensor) -> Any:
        return x.bfloat16(), {"wide": 2 * x.float()}

    def fwd(self, x: Tensor) -> Any:
        return *self.reference(x), self.Saved()

    def bwd(self, dy: Tensor, saved: Any, *, d_wide: Tensor) -> Any:
        return (dy.float() + 2 * d_wide).to(dy.dtype), {}


def test_an_output_of_another_dtype_than_its_operations_input_is_not_taken_for_it():
    model = sf.Sequential(ops.Linear(5, 5), HalfAndWide(), ops.Add("wide"), ops.Linear(5, 5))
    x = draw(3, 5, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16), saving() as saved:
        model(x)
    assert {t.dtype for t in saved} == {torch.bfloat16}


FULL, HALF = torch.float32, torch.bfloat16
CHAINS: dict[str, tuple[Callable[[], list[nn.Module]], torch.dtype]] = {
    "sum": (lambda: [ops.Linear(5, 5), ops.Add("a"), ops.Linear(5, 5)], FULL),
    "sum in half": (lambda: [ops.Linear(5, 5), ops.Add("a"), ops.Linear(5, 5)], HALF),
    "product": (lambda: [ops.Linear(5, 5), ops.Multiply("a"), ops.Scale(2.0)], FULL),
    "gain": (lambda: [ops.Linear(5, 5), ops.LayerScale(5), ops.Multiply("a")], HALF),
    "gain in half": (lambda: [ops.Linear(5, 5), ops.LayerScale(5, dtype=HALF), ops.Multiply("a")], HALF),
    "exchange": (lambda: [ops.Linear(5, 5), ops.Take("a", "b"), ops.GeLU(), ops.Add("b")], FULL),
    "exchange for half": (lambda: [ops.Take("a", "b"), ops.GeLU(), ops.Add("b"), ops.Tanh()], HALF),
    "fork": (lambda: [ops.Linear(5, 5), ops.Fork("b"), ops.Add("a"), ops.GeLU(), ops.Add("b")], FULL),
    "norm": (lambda: [ops.Linear(5, 5), ops.LayerNorm(5), ops.SquaredReLU(), ops.Add("a")], HALF),
    "double": (lambda: [ops.Linear(5, 5, dtype=torch.float64), ops.GeLU(), ops.Add("a")], HALF),
}


@pytest.mark.parametrize("name", CHAINS)
def test_dtypes_that_follow_from_what_operations_declare_are_those_of_a_run(name: str):
    make, dtype = CHAINS[name]
    model = sf.Sequential(*make())
    nodes, x, a = flatten(model), draw(3, 5, dtype=FULL), draw(3, 5, dtype=dtype)
    x = x.double() if name == "double" else x
    with torch.autocast("cpu", HALF):
        declared = under_autocast(nodes, range(len(nodes)), sf.Env.like(x), {"a": a.dtype})
        ran = dtypes_of(nodes, range(len(nodes)), x, {"a": a})
    assert None not in ran
    assert [border.given for border in declared] == ran


class _WithAFunction(ops.Tanh):
    """Its dtype may depend on its non-tensor fields."""

    def __init__(self) -> None:
        super().__init__()
        self.function = torch.nn.Identity.forward


def test_references_run_once_to_learn_the_dtypes_of_layers_that_are_alike(monkeypatch: pytest.MonkeyPatch):
    runs, walk = list[int](), inputs.walk_reference
    monkeypatch.setattr(inputs, "_known_dtypes", {})
    monkeypatch.setattr(inputs, "walk_reference", lambda *given: (runs.append(1), walk(*given))[1])
    x, a = draw(3, 5, dtype=FULL), draw(3, 5, dtype=HALF)

    def dtypes(*inner: Any, x: Tensor = x, a: Tensor = a) -> tuple[int, list[torch.dtype | None]]:
        runs.clear()
        nodes = flatten(sf.Sequential(*inner))
        found = dtypes_of(nodes, range(len(nodes)), x, {"a": a})
        return len(runs), found

    known = [FULL, FULL, FULL]
    assert dtypes(ops.LayerNorm(5), ops.Add("a")) == (2, known)
    assert dtypes(ops.LayerNorm(5), ops.Add("a")) == (0, known)
    assert dtypes(ops.LayerNorm(5), ops.Add("a"), x=x.to(HALF))[0] == 2
    assert dtypes(ops.LayerNorm(5), ops.Add("a"), a=a.double()) == (2, [FULL, FULL, torch.float64])
    assert dtypes(ops.LayerNorm(5, dtype=HALF), ops.Add("a"))[0] == 2
    with torch.autocast("cpu", HALF):
        assert dtypes(ops.LayerNorm(5), ops.Add("a"))[0] == 2
    assert [dtypes(_WithAFunction(), ops.Add("a"))[0] for _ in range(2)] == [2, 2]


class _WideInTraining(ops.Tanh):
    """Its result is float32 in training."""

    def reference(self, x: Tensor) -> Tensor:
        return x.float() if self.training else x


def test_dtypes_of_training_are_not_taken_for_those_of_eval():
    x = draw(3, 5, dtype=HALF)
    for training, made in ((True, FULL), (False, HALF)):
        nodes = flatten(sf.Sequential(_WideInTraining(), ops.GeLU()).train(training))
        assert dtypes_of(nodes, range(2), x, {}) == [HALF, made, made]


@pytest.mark.parametrize(("dtype", "made"), [(HALF, FULL), (FULL, FULL), (torch.float64, torch.float64)], ids=str)
def test_on_a_gpu_torch_makes_some_results_float32_and_leaves_float64(dtype: torch.dtype, made: torch.dtype):
    nodes = flatten(sf.Sequential(ops.SquaredReLU()))
    borders = under_autocast(nodes, range(1), sf.Env.of("cuda:sm_90", dtype=dtype, autocast=HALF), {})
    assert borders[-1].given is made


def test_tensors_are_cast_once_in_the_innermost_call_that_casts_them_apart():
    t = torch.ones(2, 3)
    with torch.autocast("cpu", HALF), cast_once():
        made = lowered(t)
        with cast_once():
            assert lowered(t) is made
        with cast_once(apart=True):
            own = lowered(t)
            assert own is not made
            assert lowered(t) is own
        assert lowered(t) is made
        assert lowered(t[:1], parts=(t,)) is lowered(t[:1], parts=(t,))
        # A new object may have the address of a freed one.
        assert [lowered(torch.full((2,), float(i)))[0].item() for i in range(9)] == [*range(9)]
    with torch.autocast("cpu", HALF), cast_once(apart=True):
        assert lowered(t) is t


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.complex64, torch.int8], ids=str)
def test_a_parameter_is_cast_where_torch_would_cast_it(dtype: torch.dtype, always: bool):
    t = torch.ones(2, 3, dtype=dtype)
    assert lowered(t, always) is t
    with torch.autocast("cpu", torch.bfloat16):
        assert (lowered(t, always) is t) == (not always or dtype not in (torch.float32, torch.float16))
        with cast_once():
            made = lowered(t, always)
            assert made.dtype is (torch.bfloat16 if dtype in (torch.float32, torch.float16) else dtype)
            assert lowered(t, always) is made


def test_autocast_of_another_device_changes_nothing():
    model, _ = pair()
    x = draw(33, 12, dtype=torch.float32)
    want = run(model, x, contextlib.nullcontext)
    with_cuda = run(model, x, lambda: _cuda_autocast())
    for name in want:
        assert torch.equal(with_cuda[name], want[name]), name


@contextlib.contextmanager
def _cuda_autocast() -> Any:
    # torch's own region does not start without the device.
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before)


@HALVES
def test_a_tied_weight_under_autocast_sums_its_gradients_in_its_own_dtype(half: torch.dtype):
    first, last = ops.Linear(12, 12), ops.Linear(12, 12, bias=False)
    last.weight = first.weight
    model = sf.Sequential(first, ops.Tanh(), last)
    randomize(model)
    plain = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12, bias=False))
    plain[2].weight = plain[0].weight
    plain.load_state_dict(model.state_dict(), strict=True)
    x = draw(33, 12, dtype=torch.float32)
    judge(run(model, x, autocast(half)), run(plain, x, autocast(half)), truth(plain, x))


def test_channels_of_other_dtypes_keep_their_dtype_and_that_of_their_gradient():
    model = sf.Sequential(ops.Linear(5, 5), ops.Add("side"), ops.Tanh(), ops.Add("late")).float()
    x, side = draw(3, 5, dtype=torch.float32).requires_grad_(), draw(3, 5, seed=2).requires_grad_()
    late = draw(3, 5, seed=3, dtype=torch.bfloat16).requires_grad_()
    y = model(x, side=side, late=late)
    assert y.dtype == torch.float64
    y.backward(draw(3, 5, seed=4))
    want = torch.tanh(nn.functional.linear(x, model[0].weight, model[0].bias) + side) + late
    dx, dside, dlate = torch.autograd.grad(want, [x, side, late], draw(3, 5, seed=4))
    for leaf, g in [(x, dx), (side, dside), (late, dlate)]:
        assert leaf.grad.dtype == leaf.dtype
        torch.testing.assert_close(leaf.grad, g)
