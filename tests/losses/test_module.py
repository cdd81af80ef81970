"""LinearCrossEntropy as a module: transforms, compilers, copies, tied weights, arguments, gradients in `main_grad`."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.errors import StateError
from seqfuse.losses import LinearCrossEntropy, linear_cross_entropy
from seqfuse.testing import assert_bitwise_equal, seeded_randn

from .references import in_torch

TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, 2 * x])),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.cos(),)),
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "compile": lambda f, x: torch.compile(f, backend="eager", fullgraph=True)(x),
    "compiled gradient": lambda f, x: torch.autograd.grad(
        torch.compile(f, backend="aot_eager", fullgraph=True)(x.requires_grad_()), x
    ),
}


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_and_compilers_see_plain_operations(name: str, full: bool) -> None:
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 2.0} if full else {}
    module = LinearCrossEntropy(4, 7, True, **options).double()
    x, targets = seeded_randn((3, 4), 0, dtype=torch.float64), torch.tensor([1, -100, 6])

    def ours(x: Tensor) -> Tensor:
        return module(x, targets)

    def theirs(x: Tensor) -> Tensor:
        return in_torch(x, module.weight, targets, module.bias, **options)

    torch.testing.assert_close(TRANSFORMS[name](ours, x), TRANSFORMS[name](theirs, x))


def test_it_is_a_module_like_any_other() -> None:
    torch.manual_seed(3)
    module = LinearCrossEntropy(8, 11, True, z_loss=0.1, softcap=4.0, reduction="sum", ignore_index=2, chunk=3)
    torch.manual_seed(3)
    linear = nn.Linear(8, 11)
    assert_bitwise_equal(dict(module.state_dict()), dict(linear.state_dict()))
    x, targets = seeded_randn((5, 8), 0), torch.arange(5)
    loss = module(x, targets)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x, targets), loss)
    meta = LinearCrossEntropy(8, 11, True, device="meta")
    assert meta(x.to("meta"), targets.to("meta")).shape == ()
    meta.to_empty(device="cpu")
    torch.manual_seed(3)
    meta.reset_parameters()
    assert_bitwise_equal(dict(meta.state_dict()), dict(linear.state_dict()))
    expected = "8, 11, bias=True, ignore_index=2, z_loss=0.1, softcap=4.0, reduction='sum', chunk=3"
    assert repr(module) == f"LinearCrossEntropy({expected})"


def test_a_tied_weight_gets_the_gradients_of_both_uses() -> None:
    embedding = ops.Embedding(11, 8)
    start = embedding.weight.detach().clone()
    model = nn.ModuleDict({"embedding": embedding, "loss": LinearCrossEntropy(8, 11, weight=embedding.weight)})
    assert torch.equal(embedding.weight, start)
    model["loss"].reset_parameters()
    assert torch.equal(embedding.weight, start)
    model = copy.deepcopy(model)
    weight = model["loss"].weight
    assert weight is model["embedding"].weight
    tokens, targets = torch.tensor([1, 4, 4, 0]), torch.tensor([4, 4, 0, -100])
    found = torch.autograd.grad(model["loss"](sf.Sequential(model["embedding"])(tokens), targets), weight)
    expected = torch.autograd.grad(F.cross_entropy(F.linear(F.embedding(tokens, weight), weight), targets), weight)
    torch.testing.assert_close(found, expected)


def test_targets_may_be_any_integers() -> None:
    x, weight = seeded_randn((5, 8), 0), seeded_randn((11, 8), 1)
    expected = linear_cross_entropy(x, weight, torch.arange(5))
    for dtype in (torch.int32, torch.int16, torch.int8, torch.uint8):
        assert torch.equal(linear_cross_entropy(x, weight, torch.arange(5, dtype=dtype)), expected)


X, W, T = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 1, 2])


REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "last dimension": ((torch.randn(3, 6), W, T), {}, "SF101 .*: expects last dimension 4, got 6"),
    "a number": ((torch.tensor(1.0), W, T), {}, "SF101 .*: expects last dimension 4, got a 0-d tensor"),
    "targets": ((X, W, T[:2]), {}, r"SF101 .*: targets must have shape \(3,\), got \(2,\)"),
    "real targets": ((X, W, T.float()), {}, "SF101 .*: targets must be integers, one class per row, got torch.float32"),
    "bias": ((X, W, T, torch.randn(4)), {}, r"SF101 .*: bias must have shape \(5,\), got \(4,\)"),
    "no classes": ((X, W[:0], T), {}, r"SF101 .*: weight must be \[V, E\] of at least one class, got \(0, 4\)"),
    "dtypes": ((X.double(), W, T), {}, "SF101 .*: expects one dtype of .*, got x torch.float64, weight torch.float32"),
    "integers": ((T.view(3, 1), T.view(3, 1), T), {}, "SF101 .*: expects one dtype of"),
    "devices": ((X, W.to("meta"), T), {}, "SF102 .*: expects its weight on cpu, where x is, got meta"),
    "no tensor": ((X, W, [0, 1, 2]), {}, "SF105 .*: targets must be a tensor, not list"),
    "reduction": ((X, W, T), {"reduction": "max"}, 'SF106 .*: reduction must be "mean", "sum" or "none", got \'max\''),
    "smoothing": ((X, W, T), {"label_smoothing": 1.5}, "SF106 .*: label_smoothing must be within 0 and 1, got 1.5"),
    "z-loss": ((X, W, T), {"z_loss": -1.0}, "SF106 .*: z_loss must be finite and not negative, got -1.0"),
    "soft-cap": ((X, W, T), {"softcap": 0.0}, "SF106 .*: softcap must be finite and positive, got 0.0"),
    "chunk": ((X, W, T), {"chunk": 0}, "SF106 .*: chunk must be at least one row, got 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_one_clear_error(name: str) -> None:
    args, options, message = REFUSED[name]
    with pytest.raises(sf.InputError, match=message) as caught:
        linear_cross_entropy(*args, **options)
    assert caught.value.operation == "linear_cross_entropy"


def test_the_module_names_itself() -> None:
    with pytest.raises(sf.InputError, match=r"SF101 LinearCrossEntropy: expects last dimension 4, got 6"):
        LinearCrossEntropy(4, 5)(torch.randn(3, 6), T)
    with pytest.raises(sf.InputError, match="SF106 LinearCrossEntropy: z_loss"):
        LinearCrossEntropy(4, 5, z_loss=-1)
    with pytest.raises(sf.InputError, match=r"weight must have shape \(5, 4\), got \(4, 5\)"):
        LinearCrossEntropy(4, 5, weight=nn.Parameter(torch.ones(4, 5)))


@pytest.mark.parametrize("target", [5, -1, -101, 2**40])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_target_that_is_no_class_is_an_index_error(target: int, reduction: str) -> None:
    targets = torch.tensor([0, target, -100])
    with pytest.raises(IndexError):
        F.cross_entropy(F.linear(X, W), targets)
    with pytest.raises(IndexError, match=f"linear_cross_entropy: target {target} is out of bounds for 5 classes"):
        linear_cross_entropy(X, W, targets, reduction=reduction)


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
def test_losses_of_rows_have_the_shape_of_the_targets(grad: bool) -> None:
    module, targets = LinearCrossEntropy(8, 30, reduction="none"), torch.arange(6).view(2, 3)
    with torch.set_grad_enabled(grad):
        assert module(seeded_randn((2, 3, 8), 0), targets).shape == targets.shape


def test_a_bias_is_made_where_a_given_weight_is() -> None:
    bias = LinearCrossEntropy(8, 30, True, weight=torch.nn.Parameter(torch.empty(30, 8, device="meta"))).bias
    assert bias is not None
    assert bias.is_meta


ROWS, FEATURES, CLASSES = 37, 19, 53
TARGETS = torch.randint(CLASSES, (ROWS,), generator=torch.Generator().manual_seed(4))
REDUCTIONS = pytest.mark.parametrize("reduction", ["mean", "none"])


def drawn(reduction: str, dtype: torch.dtype = torch.float32, bias: bool = True) -> tuple[LinearCrossEntropy, Tensor]:
    module = LinearCrossEntropy(FEATURES, CLASSES, bias, reduction=reduction, chunk=5, dtype=dtype)
    return module, seeded_randn((ROWS, FEATURES), 1, dtype=dtype).requires_grad_()


def incoming(reduction: str) -> Tensor:
    return 1.7 * (seeded_randn((ROWS,), 5) if reduction == "none" else torch.ones(()))


@REDUCTIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_backwards_are_added_unrounded(dtype: torch.dtype, reduction: str) -> None:
    module, x = drawn(reduction, dtype)
    exact, dy = copy.deepcopy(module).double(), incoming(reduction)
    wanted = torch.autograd.grad(exact(x.double(), TARGETS), list(exact.parameters()), dy.double())
    dx, *rounded = torch.autograd.grad(module(x, TARGETS), [x, *module.parameters()], dy)
    for p in module.parameters():
        p.main_grad = torch.full(p.shape, 2.0)
    for _ in range(2):
        module(x, TARGETS).backward(dy)
    assert_bitwise_equal(x.grad, 2 * dx)
    for p, own, r in zip(module.parameters(), rounded, wanted, strict=True):
        assert p.grad is None
        assert p.main_grad.dtype is torch.float32
        error = (p.main_grad.double() - 2 - 2 * r).norm()
        if dtype is torch.float32:
            assert error <= 1e-6 * (2 + 2 * r).norm()
        else:
            assert error < (2 * own.double() - 2 * r).norm()


@REDUCTIONS
def test_what_is_added_is_not_rounded_to_the_dtype_of_the_weight(reduction: str) -> None:
    module, x = drawn(reduction, torch.bfloat16)
    weight = module.weight
    (rounded,) = torch.autograd.grad(module(x, TARGETS), weight, incoming(reduction))
    weight.main_grad = torch.zeros(weight.shape)
    module(x, TARGETS).backward(incoming(reduction))
    assert_bitwise_equal(weight.main_grad.bfloat16(), rounded)
    assert not torch.equal(weight.main_grad, rounded.float())


@REDUCTIONS
def test_a_buffer_is_let_be_where_the_gradient_goes_elsewhere(reduction: str) -> None:
    module, x = drawn(reduction, bias=False)
    weight, dy = module.weight, incoming(reduction)
    weight.main_grad = buffer = torch.zeros_like(weight)
    (returned,) = torch.autograd.grad(module(x, TARGETS), weight, dy)
    module(x, TARGETS).backward(dy, inputs=[x])
    seen: list[Tensor] = []
    handle = weight.register_hook(seen.append)
    module(x, TARGETS).backward(dy)
    handle.remove()
    assert_bitwise_equal(seen, [returned])
    assert_bitwise_equal(weight.grad, returned)
    assert not buffer.any()
    module.requires_grad_(False)
    module(x, TARGETS).backward(dy)
    assert not buffer.any()
    module.requires_grad_(True)
    module(x.detach(), TARGETS).backward(dy)
    assert_bitwise_equal(weight.grad, returned)
    assert_bitwise_equal(buffer, returned)


def test_a_buffer_that_cannot_be_added_to_is_one_clear_error() -> None:
    module, x = drawn("mean")
    module.weight.main_grad = torch.zeros(CLASSES, FEATURES, dtype=torch.bfloat16)
    with pytest.raises(
        StateError, match=r"^SF507 LinearCrossEntropy: main_grad of weight must be float32\[53, 19\] on"
    ):
        module(x, TARGETS).backward()


def test_a_tied_weight_adds_both_uses() -> None:
    embedding = ops.Embedding(11, 8)
    model, loss = sf.Sequential(embedding, ops.Linear(8, 8)), LinearCrossEntropy(8, 11, weight=embedding.weight)
    tokens, targets = torch.tensor([1, 4, 4, 0]), torch.tensor([4, 4, 0, -100])
    (expected,) = torch.autograd.grad(loss(model(tokens), targets), embedding.weight)
    embedding.weight.main_grad = torch.zeros_like(embedding.weight)
    loss(model(tokens), targets).backward()
    torch.testing.assert_close(embedding.weight.main_grad, expected)
    assert embedding.weight.grad is None
