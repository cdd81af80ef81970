"""The tensors trained are the current ones in `parameters()`: replaced, moved, cast, tied, parametrized or passed.

Those of a subclass may refuse to be read: then operations run unfused, by their references.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, stack_module_state, vjp, vmap
from torch.nn.utils import prune
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads
from torch.testing._internal.two_tensor import TwoTensor

import seqfuse as sf
from seqfuse import ops
from seqfuse.testing import seeded_randn
from tests.fuser.fusions import (
    PAIR,
    PAIR_AND_GEMM,
    assert_exact,
    assert_like_torch,
    fused_names,
    outcome,
    randomized,
    run,
    same_as_twin,
    tensor,
    with_twin,
)

# Devices and dtypes.


def test_a_model_made_on_meta_runs_after_to_empty_and_loading() -> None:
    source, its = with_twin()
    with torch.device("meta"):
        mine, _ = with_twin()
    assert all(p.is_meta for p in mine.parameters())
    y = mine(torch.empty(7, 5, device="meta"))
    assert (y.is_meta, y.shape) == (True, (7, 5))
    mine.to_empty(device="cpu")
    mine.load_state_dict(source.state_dict())
    x = tensor(7, 5)
    same_as_twin(mine, its, x)
    assert fused_names(mine.plan(x))[0] == ["BiasReLU", "LinearBiasGeLUForward"]


def test_every_operation_with_parameters_can_skip_its_initialization() -> None:
    for cls, args in ((ops.Linear, (5, 4)), (ops.LayerNorm, (5,)), (ops.RMSNorm, (5,)), (ops.Bias, (5,))):
        made = nn.utils.skip_init(cls, *args)
        assert all(p.device.type == "cpu" and p.is_leaf for p in made.parameters())
        assert cls(*args, device="meta", dtype=torch.float64).state_dict().keys() == made.state_dict().keys()
        fresh = cls(*args, device="meta")
        fresh.to_empty(device="cpu").reset_parameters()
        assert all(p.isfinite().all() for p in fresh.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_casting_after_the_first_call_is_seen(dtype: torch.dtype) -> None:
    mine, its = with_twin()
    mine(tensor(7, 5)).sum().backward()
    mine.zero_grad()
    mine.to(dtype), its.to(dtype)
    x = tensor(7, 5, dtype=dtype)
    got, expected = run(mine, x), run(its, x)
    assert got.keys() == expected.keys()
    scale = {torch.float64: 1e-12, torch.bfloat16: 0.1, torch.float16: 0.02}[dtype]
    for key, value in expected.items():
        assert got[key].dtype == value.dtype == dtype, key
        torch.testing.assert_close(got[key], value, rtol=scale, atol=scale * float(value.abs().max()))
    mine.float()
    assert mine(tensor(7, 5)).dtype is torch.float32


def test_moving_the_model_without_its_input_names_both_devices() -> None:
    mine, _ = with_twin()
    x = tensor(7, 5)
    for _ in range(2):  # before and after the first call
        mine.to("meta")
        with pytest.raises(sf.InputError, match=r"meta.*cpu") as caught:
            mine(x)
        assert (caught.value.operation, caught.value.position) == ("LayerNorm", 0)
        mine = with_twin()[0]
        mine(x)


@pytest.mark.filterwarnings("error::seqfuse.FallbackWarning")
def test_one_operation_on_another_device_is_named() -> None:
    mine, _ = with_twin()
    x = tensor(7, 5)
    mine(x)
    mine[3].to("meta")
    with pytest.raises(sf.InputError, match=r"position [45] \((Linear|Bias)\).*meta"):
        mine(x)


# Replaced.


@pytest.mark.parametrize("training", [True, False], ids=["grad", "no_grad"])
def test_a_parameter_can_be_swapped_before_garbage_is_collected(training: bool) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    gc.disable()
    try:
        model, x = sf.Sequential(ops.Linear(5, 4), ops.GeLU(), memory="lean"), tensor(7, 5)
        with torch.set_grad_enabled(training):
            expected = model(x).detach()
        torch.testing.assert_close(model.double()(x.double()).detach(), expected.double(), check_dtype=False)
    finally:
        gc.enable()
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_a_parameter_replaced_after_the_first_call_is_the_one_used_and_trained_and_the_other_is_freed() -> None:
    mine, its = with_twin()
    x = tensor(7, 5)
    same_as_twin(mine, its, x)
    old = [weakref.ref(p) for p in mine.parameters()]
    for model in (mine, its):
        model[1].weight = nn.Parameter(tensor(4, 5, seed=31, grad=False))
        model[3].bias = nn.Parameter(tensor(6, seed=32, grad=False))
        model[0].weight = nn.Parameter(tensor(5, seed=33, grad=False))
    same_as_twin(mine, its, x)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (mine, its)]
    for model, optimizer in zip((mine, its), optimizers, strict=True):
        model(x).square().mean().backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    del optimizers, optimizer, model
    same_as_twin(mine, its, x)
    gc.collect()
    kept = {id(p) for p in mine.parameters()}
    assert all(r() is None or id(r()) in kept for r in old), "a replaced parameter is kept alive"


def test_one_parameter_in_another_dtype_promotes_as_torch_does() -> None:
    mine = randomized(sf.Sequential(ops.Linear(5, 4), ops.ReLU(), fusions=PAIR))
    x = tensor(7, 5)
    mine(x)
    mine[0].bias = nn.Parameter(mine[0].bias.detach().double())
    y = mine(x)
    assert y.dtype is torch.float64
    expected = torch.relu(F.linear(x, mine[0].weight) + mine[0].bias)
    torch.testing.assert_close(y, expected)
    dy = tensor(7, 4, seed=9, grad=False, dtype=torch.float64)
    wanted = [x, mine[0].weight, mine[0].bias]
    for got, g in zip(torch.autograd.grad(y, wanted, dy), torch.autograd.grad(expected, wanted, dy), strict=True):
        torch.testing.assert_close(got, g)
        assert got.dtype == g.dtype


# Tied and repeated.


def test_weights_tied_after_the_first_call_and_untied_again() -> None:
    mine = randomized(sf.Sequential(ops.Linear(5, 5), ops.ReLU(), ops.Linear(5, 5), fusions=PAIR_AND_GEMM))
    its = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5))
    its.load_state_dict(mine.state_dict())
    x = tensor(7, 5)
    same_as_twin(mine, its, x)
    for model in (mine, its):
        model[2].weight = model[0].weight
    same_as_twin(mine, its, x)
    for model in (mine, its):
        model[2].weight = nn.Parameter(model[2].weight.detach().clone())
    same_as_twin(mine, its, x)


@pytest.mark.parametrize("distance", [0, 20], ids=["one_segment", "several_segments"])
def test_one_operation_standing_twice_sums_its_gradients(distance: int) -> None:
    shared, act = randomized(ops.Linear(5, 5)), ops.ReLU()
    mine = sf.Sequential(shared, act, *(ops.Tanh() for _ in range(distance)), shared, act, fusions=PAIR_AND_GEMM)
    twin, twin_act = nn.Linear(5, 5), nn.ReLU()
    its = nn.Sequential(twin, twin_act, *(nn.Tanh() for _ in range(distance)), twin, twin_act)
    assert (len(mine.plan(tensor(7, 5)).segments) == 1) == (not distance)
    assert_like_torch(mine, its, tensor(7, 5))


def test_paths_name_every_occurrence_of_a_repeated_operation() -> None:
    shared = ops.Linear(5, 5)
    assert sf.Sequential(shared, ops.ReLU(), shared).plan().paths == ("0", "0.bias", "1", "2", "2.bias")


def test_nested_lists_shared_by_two_lists_see_each_mutation() -> None:
    shared = randomized(sf.Sequential(ops.Linear(5, 5)))
    one, two = sf.Sequential(shared, fusions=PAIR), sf.Sequential(ops.Tanh(), shared, fusions=PAIR)
    x = tensor(7, 5)
    one(x), two(x)
    shared.append(ops.ReLU())
    torch.testing.assert_close(one(x), torch.relu(shared[0](x)))
    torch.testing.assert_close(two(x), torch.relu(shared[0](torch.tanh(x))))


# Copies.


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch_save": lambda m: torch.load(_saved(m), weights_only=False),
}


def _saved(model: nn.Module) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return stream


@pytest.mark.parametrize("called", [False, True], ids=["fresh", "called"])
@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES.keys())
def test_copies_are_equal_and_independent(duplicate: Callable[[Any], Any], called: bool) -> None:
    mine, _ = with_twin()
    mine.append(ops.Residual(ops.Linear(5, 5), ops.Dropout(0.5)))
    mine.eval()
    x = tensor(7, 5)
    if called:
        mine(x).sum().backward()
        mine.plan(x)
        mine.zero_grad()
    twin = duplicate(mine)
    assert type(twin) is sf.Sequential
    assert twin.fusions == mine.fusions
    assert not twin.training
    expected = run(mine, x)
    assert_exact(run(twin, x), expected)
    assert not {p.data_ptr() for p in twin.parameters()} & {p.data_ptr() for p in mine.parameters()}
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert_exact(run(mine, x), expected)
    assert not twin(x).any()
    twin(x).sum().backward()
    assert all(p.grad is None for p in mine.parameters())
    assert all(p.grad is not None for p in twin.parameters())
    twin.append(ops.Tanh())
    assert len(mine) == len(twin) - 1
    assert fused_names(twin.plan(x)) == fused_names(mine.plan(x))


# Passed by a call.


def test_functional_call_uses_and_differentiates_what_it_is_given() -> None:
    mine, its = with_twin()
    x = tensor(7, 5)
    before = run(mine, x)
    given = {k: tensor(*v.shape, seed=60 + i) for i, (k, v) in enumerate(mine.named_parameters())}

    def call(model: nn.Module) -> dict[str, Tensor | None]:
        return outcome(lambda: functional_call(model, given, (x,)), {"x": x, **given})

    torch.testing.assert_close(call(mine), call(its))
    assert all(p.grad is None for p in mine.parameters())
    assert_exact(run(mine, x), before)
    with sf.fusing(False):
        unfused = call(mine)
    torch.testing.assert_close(call(mine), unfused)


def test_functional_call_with_some_of_the_parameters_as_functions_of_others() -> None:
    mine, its = with_twin()
    x, small = tensor(7, 5), tensor(4, seed=70)

    def call(model: nn.Module) -> dict[str, Tensor | None]:
        own = dict(model.named_parameters())

        def called() -> Tensor:
            some = {"1.bias": torch.tanh(small), "1.weight": small[:, None] * own["1.weight"]}
            return functional_call(model, some, x)

        return outcome(called, {"x": x, "small": small, **own})

    torch.testing.assert_close(call(mine), call(its))


def test_functional_call_still_fuses() -> None:
    mine, _ = with_twin()
    x = tensor(7, 5)
    ran: list[int] = []

    class Seen(PAIR[0]):
        def fwd(self, x: Tensor) -> Any:
            ran.append(1)
            return super().fwd(x)

    mine.fusions = (Seen,)
    functional_call(mine, dict(mine.named_parameters()), (x,))
    assert ran == [1]


def squares(model: nn.Module) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    return lambda p, x: functional_call(model, p, (x,)).square().mean()


TRANSFORMS: dict[str, Callable[[nn.Module, dict[str, Tensor], Tensor], Any]] = {
    "grad": lambda m, p, x: grad(squares(m), argnums=(0, 1))(p, x),
    "per_sample": lambda m, p, x: vmap(grad(squares(m)), in_dims=(None, 0))(p, x),
    "jvp": lambda m, p, x: jvp(lambda x: functional_call(m, p, (x,)), (x,), (torch.cos(x),)),
    "jvp_of_parameters": lambda m, p, x: jvp(
        lambda p: functional_call(m, p, (x,)), (p,), ({k: v.cos() for k, v in p.items()},)
    ),
    "vjp": lambda m, p, x: vjp(squares(m), p, x)[1](torch.tensor(-1.5)),
    "jacrev": lambda m, p, x: jacrev(lambda x: functional_call(m, p, (x,)))(x),
    "hessian": lambda m, p, x: hessian(lambda x: squares(m)(p, x))(x[:2]),
    "vmap": lambda m, p, x: vmap(lambda x: functional_call(m, p, (x,)))(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_function_transforms_give_what_they_give_for_torch(transform: Callable[..., Any]) -> None:
    mine, its = with_twin()
    p = {k: v.detach().double() for k, v in mine.named_parameters()}
    x = tensor(7, 5, grad=False, dtype=torch.float64)
    mine(tensor(7, 5))
    torch.testing.assert_close(transform(mine, p, x), transform(its, p, x))
    same_as_twin(mine, its, tensor(7, 5))


def test_an_ensemble_runs_under_vmap() -> None:
    models = [randomized(sf.Sequential(ops.Linear(5, 4), ops.ReLU(), fusions=PAIR), 80 + i) for i in range(3)]
    parameters, buffers = stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    x = tensor(7, 5, grad=False)
    y = vmap(lambda p, b: functional_call(base, (p, b), (x,)))(parameters, buffers)
    torch.testing.assert_close(y, torch.stack([m(x) for m in models]))


def test_forward_mode_outside_a_transform_works() -> None:
    mine, its = with_twin()
    x = tensor(7, 5, grad=False)
    tangents = []
    for model in (mine, its):
        model(x)  # the tensors of a call must not serve this one
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.sin(x))
            tangents.append(torch.autograd.forward_ad.unpack_dual(model(dual)).tangent)
    torch.testing.assert_close(*tangents)


def test_what_a_call_has_left_serves_none_under_vmap() -> None:
    model, _ = with_twin()
    xs = torch.randn(3, 7, 5)
    for fn in (model, sf.Sequential(ops.Tanh(), ops.GeLU())):
        each = torch.stack([fn(x) for x in xs])
        torch.testing.assert_close(vmap(fn)(xs), each)


def test_dropout_under_vmap_draws_for_every_sample_or_once() -> None:
    mine = sf.Sequential(ops.Scale(1.0), ops.Dropout(0.5))
    x = torch.ones(6, 3, 40)
    different = vmap(mine, randomness="different")(x)
    same = vmap(mine, randomness="same")(x)
    for y in (different, same):
        assert set(y.unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(different[0], different[1])
    assert torch.equal(same[0], same[1])
    with pytest.raises(RuntimeError, match="random"):
        vmap(mine)(x)


# Tensors instead of parameters.


def test_pruned_weights_train_their_originals() -> None:
    mine, its = with_twin()
    x = tensor(7, 5)
    same_as_twin(mine, its, x)
    for model in (mine, its):
        prune.l1_unstructured(model[1], "weight", amount=0.4)
        prune.random_unstructured(model[3], "bias", amount=2)
    its.load_state_dict(mine.state_dict())
    assert "1.weight_orig" in dict(mine.named_parameters())
    for _ in range(2):
        same_as_twin(mine, its, x)
    for model in (mine, its):
        prune.remove(model[1], "weight")
        prune.remove(model[3], "bias")
    same_as_twin(mine, its, x)
    assert mine.plan(x).eager == ()


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm], ids=["weight_norm", "spectral_norm"])
def test_norms_by_hook_train_their_originals(norm: Callable[[nn.Module], Any]) -> None:
    mine, its = with_twin()
    x = tensor(7, 5)
    mine(x)
    for model in (mine, its):
        torch.manual_seed(3)
        norm(model[1])
    assert [n for n, _ in mine.named_parameters()] == [n for n, _ in its.named_parameters()]
    for _ in range(2):
        same_as_twin(mine, its, x)


def test_a_plain_tensor_in_the_place_of_a_parameter_gets_its_gradient() -> None:
    mine, its = with_twin()
    x, fast = tensor(7, 5), tensor(4, 5, seed=30)
    same_as_twin(mine, its, x)
    for model in (mine, its):
        del model[1].weight
        model[1].weight = torch.tanh(fast)

    def call(model: nn.Module) -> dict[str, Tensor | None]:
        model[1].weight = torch.tanh(fast)
        return outcome(model, {"x": x, "fast": fast, **dict(model.named_parameters())}, x)

    for _ in range(2):
        torch.testing.assert_close(call(mine), call(its))
    plan = mine.plan(x)
    assert [a.at for a in plan.eager] == [1]
    assert "tensor" in plan.eager[0].reason


def test_a_plain_tensor_that_later_wants_a_gradient_is_seen() -> None:
    mine, _ = with_twin()
    x = tensor(7, 5)
    weight = mine[1].weight.detach().clone()
    del mine[1].weight
    mine[1].weight = weight
    mine(x)
    weight.requires_grad_()
    mine(x).sum().backward()
    assert weight.grad is not None


TAKEN = {F.linear, F.layer_norm, F.rms_norm, F.embedding}


class Weight(Tensor):
    """A weight that only a few functions of torch take, like quantized ones."""

    held: Tensor

    @staticmethod
    def of(t: Tensor) -> Weight:
        made = torch.Tensor._make_subclass(Weight, t.detach())
        made.held = t
        return made

    @property
    def dtype(self) -> torch.dtype:
        return vars(self)["held"].dtype

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in TAKEN:
            raise RuntimeError(f"cannot handle function {func.__name__}")
        with torch._C.DisableTorchFunctionSubclass():
            plain = [vars(a)["held"] if isinstance(a, Weight) else a for a in args]
            named = {k: vars(v)["held"] if isinstance(v, Weight) else v for k, v in (kwargs or {}).items()}
            return func(*plain, **named)


X = torch.randn(6, 5, 16, generator=torch.Generator().manual_seed(2))
IDS = torch.arange(30).reshape(6, 5) % 9


def _attention() -> sf.Sequential:
    return sf.Sequential(ops.MergedLinear(16, (16, 16, 16)), ops.Attention(2), ops.Linear(16, 16))


MODELS: dict[str, tuple[Any, Tensor]] = {
    "linear": (lambda: ops.Linear(16, 8), X),
    "mlp": (lambda: sf.Sequential(ops.Linear(16, 32), ops.GeLU(), ops.Linear(32, 16, bias=False)), X),
    "norm": (lambda: sf.Sequential(ops.LayerNorm(16), ops.Linear(16, 16)), X),
    "embedding": (lambda: sf.Sequential(ops.Embedding(9, 16), ops.Linear(16, 16), ops.ReLU()), IDS),
    "residual": (lambda: sf.Sequential(ops.Residual(ops.LayerNorm(16), ops.Linear(16, 16), ops.Tanh())), X),
    "attention": (_attention, X),
    "eager": (lambda: sf.Sequential(ops.Linear(16, 16), nn.Softplus(), ops.Linear(16, 4)), X),
}
AS = {"fused": contextlib.nullcontext, "unfused": lambda: sf.fusing(False)}


@pytest.mark.parametrize("mode", AS)
@pytest.mark.parametrize("ran", [False, True], ids=["first", "after a plain call"])
@pytest.mark.parametrize("name", [*MODELS, "rms"])
def test_weights_that_refuse_to_be_read_are_handed_to_torch(name: str, ran: bool, mode: str) -> None:
    build, x = MODELS.get(name, (lambda: sf.Sequential(ops.RMSNorm(16), ops.Linear(16, 4)), X))
    model = build()
    if ran:
        model(x), model(x)
    expected = model(x)
    swapped = {name: Weight.of(p) for name, p in model.named_parameters()}
    with AS[mode]():
        y = torch.func.functional_call(model, swapped, (x,))
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(model(x), expected)  # and with its own again


@pytest.mark.parametrize("name", MODELS)
def test_gradients_reach_what_such_a_weight_holds(name: str) -> None:
    build, x = MODELS[name]
    model = build()
    held = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    torch.func.functional_call(model, {name: Weight.of(p) for name, p in held.items()}, (x,)).square().sum().backward()
    model(x).square().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(held[name].grad, p.grad)


@pytest.mark.parametrize("mode", AS)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_each_sample_by_expanded_weights(name: str, mode: str) -> None:
    build, x = MODELS[name]
    model, one = build(), copy.deepcopy(build())
    one.load_state_dict(model.state_dict())
    with AS[mode]():
        call_for_per_sample_grads(model, loss_reduction="sum")(x).square().sum().backward()
    for i in range(len(x)):
        one.zero_grad()
        one(x[i : i + 1]).square().sum().backward()
        for name, p in one.named_parameters():
            sampled: Any = dict(model.named_parameters())[name]
            torch.testing.assert_close(sampled.grad_sample[i], p.grad, msg=lambda said, n=name: f"{n}: {said}")


def test_a_linear_with_its_bias_is_one_call_in_the_reference() -> None:
    called: list[Any] = []

    class Counting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(func)
            return func(*args, **(kwargs or {}))

    model = sf.Sequential(ops.Linear(16, 8), ops.ReLU())
    weights = {name: Weight.of(p) for name, p in model.named_parameters()}
    with Counting():
        torch.func.functional_call(model, weights, (X,))
    assert called.count(F.linear) == 1
    assert not [f for f in called if "add" in f.__name__]


def test_a_plan_says_that_nothing_is_fused_with_such_parameters() -> None:
    model = sf.Sequential(ops.Linear(16, 8), ops.ReLU(), nn.Identity(), ops.Linear(8, 4))
    assert model.plan(X).fused[0] == 2
    for name, p in [*model[0].named_parameters()]:
        model[0].register_parameter(name, nn.Parameter(TwoTensor(p.detach(), p.detach())))
    plan = model.plan(X)
    assert [step.name for step in plan.forward if step.fused] == ["LinearBias"]
    assert {r.reason for r in plan.refused if r.at == 0} == {
        "a parameter is of class TwoTensor, with which operations run unfused"
    }
    assert "so that autograd chooses what is saved" in str(plan.memory_unknown)
    assert type(model(X)) is TwoTensor


@pytest.mark.parametrize("kind", ["to_sparse", "to_sparse_csr"])
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_a_sparse_weight_is_multiplied(kind: str):
    x, linear = seeded_randn((4, 8), 0), ops.Linear(8, 8)
    model = sf.Sequential(ops.LayerNorm(8), linear, ops.GeLU())
    wanted = model(x)
    linear.weight = nn.Parameter(getattr(linear.weight.detach(), kind)(), requires_grad=False)
    for _ in range(2):
        torch.testing.assert_close(model(x), wanted)
