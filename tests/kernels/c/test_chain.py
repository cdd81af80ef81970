"""Chains in C, beyond the tests that `test_pointwise.py` has for both printers: bits, processors, numeric arguments."""

from __future__ import annotations

import gc
import itertools
import random
import weakref

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from seqfuse import compiler
from seqfuse.kernels import _operators, chains, pointwise
from seqfuse.kernels.activations import ACTIVATIONS, Activation, composed
from seqfuse.kernels.c import trace
from seqfuse.ops import _philox
from seqfuse.testing.tensors import seeded_randn

pytestmark = pytest.mark.skipif(compiler.compiler() is None, reason="no C compiler")

GELU, SILU, TANH = ACTIVATIONS["gelu"], ACTIVATIONS["silu"], ACTIVATIONS["tanh"]


def run(x: Tensor, steps: chains.Chain, *operands: Tensor, **kwargs: object) -> tuple[Tensor | None, ...]:
    return pointwise.pointwise(x, steps, operands, result=kwargs.get("result", True) is True)


@pytest.mark.parametrize("shape", [(5, 3), (64, 96), (7, 1025)])
def test_any_processor_drops_the_same(shape: tuple[int, int], plain_c: None) -> None:
    x, seed = seeded_randn(shape, 0), torch.tensor([-(2**40) - 3])
    (y,) = run(x, chains.Chain(chains.dropout(0.4)), seed)
    assert y is not None
    assert torch.equal(y == 0, _philox._traceable_mask(seed, x.shape, 0.4))


def test_any_processor_computes_within_rounding(plain_c: None) -> None:
    x = seeded_randn((9, 200), 0) * 3
    for name, activation in ACTIVATIONS.items():
        (y,) = run(x, chains.Chain(chains.act(activation)))
        assert y is not None
        expected = {"gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu, "tanh": torch.tanh}.get(name)
        if expected is not None:
            torch.testing.assert_close(y.double(), expected(x.double()), rtol=3e-7, atol=3e-7)


def test_the_mask_alone_is_that_of_the_operation() -> None:
    from seqfuse.kernels.c.mask import mask_on_cpu

    for shape, p in itertools.product([(1,), (5, 3), (4099,), (3, 4096)], [0.0, 0.1, 0.999]):
        seed = torch.tensor([2**63 - 5])
        assert torch.equal(mask_on_cpu(seed, torch.Size(shape), p), _philox._traceable_mask(seed, torch.Size(shape), p))


def test_a_mask_is_made_on_the_cpu_whatever_the_default_device_is() -> None:
    seed, starts = torch.tensor([77]), torch.tensor([3])
    expected = _philox.drop_mask(seed, torch.Size((1, 2000)), 0.3), _philox.drop_spans(seed, starts, 2000, 0.3)
    with torch.device("meta"):
        found = _philox.drop_mask(seed, torch.Size((1, 2000)), 0.3), _philox.drop_spans(seed, starts, 2000, 0.3)
    assert all(map(torch.equal, found, expected))


def test_spans_of_a_mask_are_those_of_the_operation() -> None:
    from seqfuse.kernels.c.mask import mask_on_cpu

    seed, starts = torch.tensor([77]), torch.tensor([0, 5, 4097, 2**33 + 1])
    whole = _philox._words(seed, (starts >> 2).unsqueeze(1) + torch.arange(1500))
    expected = torch.stack([word < int(0.3 * 2**32) for word in whole], -1).flatten(1)
    expected = expected.gather(1, (starts & 3).unsqueeze(1) + torch.arange(5000))
    assert torch.equal(mask_on_cpu(seed, (4, 5000), 0.3, starts), expected)


def test_numbers_of_dropout_and_scale_compile_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(p: float, factor: float) -> chains.Chain:
        return chains.Chain(chains.scale(factor), chains.dropout(p), chains.act(composed(GELU, chains_scale(factor))))

    x, seed = seeded_randn((40, 64), 0), torch.tensor([1])
    run(x, made(0.1, 0.5), seed)
    before = len(compiler._loaded)
    for p, factor in ((0.2, 3.0), (0.0, -1.5), (1.0, 2.0)):
        (y,) = run(x, made(p, factor), seed)
        mask = _philox.drop_mask(seed, x.shape, p) if p < 1 else torch.ones(x.shape, dtype=torch.bool)
        expected = torch.nn.functional.gelu(_philox.masked(x.double() * factor, mask, p)) * factor
        assert y is not None
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)
    assert len(compiler._loaded) == before


def chains_scale(factor: float) -> Activation:
    from seqfuse.kernels.activations import constant_factor

    return constant_factor(factor)


def test_float64_and_whole_numbers_are_refused() -> None:
    for dtype in (torch.float64, torch.int64):
        with pytest.raises(ValueError, match="C kernels are for float32"):
            run(torch.zeros(2, 3, dtype=dtype), chains.Chain(chains.act(GELU)))


@pytest.mark.parametrize("layout", ["transposed", "expanded", "every other", "rows apart", "one row for all"])
def test_strides_do_not_matter(layout: str) -> None:
    wide = seeded_randn((6, 40), 0)
    x = {
        "transposed": wide.t()[:10],
        "expanded": wide[:1].expand(10, 40)[:, :6],
        "every other": wide.repeat(2, 1)[:10, ::2][:, :6],
        "rows apart": wide.repeat(2, 1)[:10, 3:9],
        "one row for all": wide[0, 0].expand(10, 6),
    }[layout][:, :6]
    row, other = seeded_randn((6, 2), 2)[:, 0], seeded_randn((10, 12), 1)[:, 6:]
    steps = chains.Chain(chains.bias(), chains.act(SILU), chains.add(), chains.column_sum())
    got, expected = run(x, steps, row, other), run(x.contiguous(), steps, row.contiguous(), other.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True) if a is not None and b is not None)


def test_a_view_of_the_other_sign_is_read_with_its_sign() -> None:
    x = torch._neg_view(seeded_randn((5, 7), 0))
    (y,) = run(x, chains.Chain(chains.act(TANH)))
    assert y is not None
    torch.testing.assert_close(y, x.clone().tanh())


def test_a_tensor_that_is_given_twice_is_read_with_its_sign() -> None:
    plain, steps = seeded_randn((5, 7), 0), chains.Chain(chains.add())
    for x in (plain, torch._neg_view(plain)):
        (y,) = run(x, steps, x)
        assert y is not None
        assert torch.equal(y, 2 * x)


def test_gelu_is_as_exact_as_torchs_and_its_tail_more() -> None:
    x = torch.linspace(-14, 14, 4001)
    wide = x.double().requires_grad_()
    value = torch.nn.functional.gelu(wide)
    (slope,) = torch.autograd.grad(value.sum(), wide)
    (y,), (dx,) = run(x, chains.Chain(chains.act(GELU))), run(torch.ones_like(x), chains.Chain(chains.dact(GELU)), x)
    assert y is not None
    assert dx is not None
    torch.testing.assert_close(y.double(), value.detach(), rtol=2e-7, atol=1e-7)
    torch.testing.assert_close(dx.double(), slope, rtol=0, atol=1.4e-7)
    tail = (x < -4) & (x > -7)
    wanted = x[tail].double() * torch.special.erfc(x[tail].double() * -(0.5**0.5)) / 2
    torch.testing.assert_close(y[tail].double(), wanted, rtol=3e-6, atol=0)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_nan_and_infinities_are_those_of_torch(name: str) -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 3e38, -3e38, 1e-45] * 5)
    (y,) = run(x, chains.Chain(chains.act(ACTIVATIONS[name])))
    torch_of = {
        "identity": lambda t: t, "relu": torch.relu, "squared_relu": lambda t: torch.relu(t) ** 2,
        "sigmoid": torch.sigmoid, "tanh": torch.tanh, "silu": torch.nn.functional.silu,
        "quickgelu": lambda t: t * torch.sigmoid(1.702 * t),
        "gelu": lambda t: t * (0.5 * (1 + torch.erf(t * 0.7071067811865476))),
        "gelu_tanh": lambda t: torch.nn.functional.gelu(t, approximate="tanh"),
        "clamped_silu": lambda t: t.clamp(max=7) * torch.sigmoid(1.702 * t.clamp(max=7)),
        "clamp": lambda t: t.clamp(-7, 7) + 1,
    }  # fmt: skip
    expected = torch_of[name](x)
    assert y is not None
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.isinf(), expected.isinf())


class Called:
    """Functions of Triton, one by one."""

    @staticmethod
    @triton.jit
    def exp(x):  # pyright: ignore
        return tl.exp(x)

    @staticmethod
    @triton.jit
    def exp2(x):  # pyright: ignore
        return tl.exp2(x)

    @staticmethod
    @triton.jit
    def erf(x):  # pyright: ignore
        return tl.erf(x)

    @staticmethod
    @triton.jit
    def log(x):  # pyright: ignore
        return tl.log(x)


@pytest.mark.parametrize(
    ("name", "low", "high"), [("exp", -110, 95), ("exp2", -155, 135), ("erf", -6, 6), ("log", 0, 9)]
)
def test_functions_are_within_an_ulp_or_so(name: str, low: float, high: float) -> None:
    x = torch.cat([torch.linspace(low, high, 200_001), seeded_randn((50_000,), 0).abs() * 1e-3])
    (y,) = run(x, chains.Chain(chains.act(Activation(getattr(Called, name), Traced.slope))))
    exact = getattr(torch, name)(x.double())
    near = exact.float()
    assert y is not None
    assert torch.equal(y.isinf(), near.isinf())
    finite = near.isfinite() & (near.abs() > 1e-37)
    ulp = torch.nextafter(near.abs(), torch.tensor(torch.inf)) - near.abs()
    assert ((y.double() - exact).abs() / ulp)[finite].max() < 1.25
    tiny = near.abs() <= 1e-37
    assert not tiny.any() or (y - near)[tiny].abs().max() < 1e-44


class Traced:
    """Device functions that cannot be written in C, each named after the reason."""

    @staticmethod
    @triton.jit
    def branches(x):  # pyright: ignore
        if x > 0:
            return x
        else:
            return -x

    @staticmethod
    @triton.jit
    def loads(x):  # pyright: ignore
        return x + tl.load(x)

    @staticmethod
    @triton.jit
    def narrows(x):  # pyright: ignore
        return x.to(tl.float16)

    @staticmethod
    @triton.jit
    def reduces(x):  # pyright: ignore
        return x - tl.sum(x)

    @staticmethod
    @triton.jit
    def guesses(x):  # pyright: ignore
        return tl.softplus(x)

    @staticmethod
    @triton.jit
    def counts(x):  # pyright: ignore
        return tl.where((x > 0) & 1, x, 0.0)

    @staticmethod
    @triton.jit
    def folds(x):  # pyright: ignore
        return x + tl.minimum(1.0, 2.0)

    @staticmethod
    @triton.jit
    def slope(x):  # pyright: ignore
        return tl.zeros_like(x) + 1.0


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("branches", "it branches on a number; use tl.where"),
        ("loads", "it uses tl.load"),
        ("narrows", "it uses tl.float16"),
        ("reduces", "it uses tl.sum"),
        ("guesses", "it uses tl.softplus, which Triton does not have"),
        ("counts", "it takes bits of a number"),
        ("folds", "it computes with constants alone"),
    ],
)
def test_what_cannot_be_written_in_c_is_said_by_name(name: str, sentence: str) -> None:
    reason = trace.why_not(Activation(getattr(Traced, name), Traced.slope))
    assert reason == f"Traced.{name} cannot be written in C: {sentence}"


@triton.jit
def quotient(x):  # pyright: ignore
    return x + (x > 1.0) / (x > -9.0)


@triton.jit
def both(x):  # pyright: ignore
    return tl.where((x > 0) & True, x, 0.0)


@pytest.mark.parametrize("function", [quotient, both])
def test_comparisons_are_numbers(function: object) -> None:
    """The quotient of integers would be 0 / 0, which ends the process."""
    x = torch.linspace(-20, 4, 1200)
    y, *_ = run(x, chains.Chain(chains.act(Activation(function, Traced.slope))))
    ratio = x + (x > 1).float() / (x > -9).float()
    expected = ratio if function is quotient else x.relu()
    torch.testing.assert_close(y, expected, equal_nan=True)


class Held:
    """Names that a module defines next to a device function."""


def test_what_else_is_in_the_module_of_a_device_function_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    @triton.jit
    def twice(x):  # pyright: ignore
        return x * 2.0

    monkeypatch.setitem(globals(), "drawn", random.random)  # which has no module
    monkeypatch.setitem(globals(), "held", held := Held())
    assert trace.why_not(Activation(twice, Traced.slope)) is None
    gone = weakref.ref(held)
    monkeypatch.undo()
    del held
    gc.collect()
    assert gone() is None


FACTOR = tl.constexpr(2.0)


@triton.jit
def by_factor(x):  # pyright: ignore
    return x * FACTOR


@triton.jit
def through(x):  # pyright: ignore
    return by_factor(x)


def test_what_was_traced_with_another_constant_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton raises an error there. An equal constant is the same one, as when a notebook cell runs again."""
    activation = Activation(through, Traced.slope)
    assert trace.why_not(activation) is None
    assert trace.why_not(composed(SILU, activation)) is None
    monkeypatch.setitem(globals(), "FACTOR", tl.constexpr(2.0))
    assert trace.why_not(activation) is None
    monkeypatch.setitem(globals(), "FACTOR", tl.constexpr(5.0))
    for stale in (activation, composed(SILU, activation)):
        assert trace.why_not(stale) == "FACTOR, which through uses, is not what it was when that was written in C"


def test_a_call_is_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x, steps = seeded_randn((4, 300), 0), chains.Chain(chains.act(TANH))
    function = pointwise.pointwise_of(steps)
    (first,) = function(x)
    monkeypatch.setattr(_operators, "_decided", None)
    (second,) = function(x.clone())
    assert first is not None
    assert torch.equal(first, second)


def test_a_call_with_one_tensor_twice_is_decided_once_too() -> None:
    x, steps = seeded_randn((4, 300), 0), chains.Chain(chains.act(TANH), chains.add())
    (first,) = run(x, steps, x)
    decided = len([entry for _, entries in _operators._entries.values() for entry in entries])
    (second,) = run(x, steps, x)
    assert len([entry for _, entries in _operators._entries.values() for entry in entries]) == decided
    assert first is not None
    assert torch.equal(first, second)
    (third,) = run(x, steps, seeded_randn((4, 300), 1))
    torch.testing.assert_close(third, x.tanh() + seeded_randn((4, 300), 1))


def test_a_kernel_knows_its_own_dtypes() -> None:
    """The same chain in another dtype is another kernel, which never reads a tensor of the first dtype."""
    steps = chains.Chain(chains.bias(), chains.act(GELU), chains.add())
    function = pointwise.pointwise_of(steps)
    x, b, r = seeded_randn((70, 48), 0), seeded_randn((48,), 1), seeded_randn((70, 48), 2)
    for of in itertools.product([torch.float32, torch.bfloat16, torch.float16], repeat=3):
        given = [t.to(dtype) for t, dtype in zip((x, b, r), of, strict=True)]
        (y,) = function(*given)
        wide = [t.double() for t in given]
        expected = torch.nn.functional.gelu(wide[0] + wide[1]) + wide[2]
        eps = 4 * torch.finfo(of[0]).eps
        torch.testing.assert_close(y.double(), expected, rtol=eps, atol=eps)
