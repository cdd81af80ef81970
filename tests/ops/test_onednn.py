"""float32 GEMMs on a CPU for which MKL has no AVX-512 kernels: oneDNN's, from some size on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import seqfuse as sf
from seqfuse import env, hardware, ops
from seqfuse.ops import _mm
from seqfuse.testing import LAYOUTS, check_op, laid_out, seeded_randn
from tests.ops.test_widened import PRODUCTS, gemms, gradients, into_a_slice, model

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"),
    reason="torch was built without oneDNN",
)


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Any size by oneDNN, on any processor; the shape of the result of each of its calls."""
    real, seen = torch.ops.mkldnn, list[tuple[int, ...]]()

    class Counted:
        class _linear_pointwise:
            def __new__(cls, *args: Any) -> Any:
                y = real._linear_pointwise(*args)
                seen.append(tuple(y.shape))
                return y

            @staticmethod
            def binary(*args: Any) -> Tensor:
                y = real._linear_pointwise.binary(*args)
                seen.append(tuple(y.shape))
                return y

    monkeypatch.setattr(env, "ONEDNN_FLOAT32", True)
    for where in (_mm, env):
        monkeypatch.setattr(where, "ONEDNN_FLOAT32_WORTHWHILE", 0)
    monkeypatch.setattr(_mm, "_mkldnn", Counted)
    return seen


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return seeded_randn(shape, seed, dtype=dtype)


def close(y: Tensor, exact: Tensor, terms: Tensor) -> None:
    """A sum of up to 300 numbers in float32; the additions of equal numbers may all round the same way."""
    assert bool(((y.double() - exact).abs() <= 300 * 2**-24 / 8 * terms).all())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_each_product(name: str, layout: str, calls: list[Any]) -> None:
    a, b, c = laid_out(drawn(40, 300), layout), laid_out(drawn(300, 24, seed=1), layout), drawn(40, 24, seed=2)
    y, exact = PRODUCTS[name](a, b, c)
    assert y.dtype is torch.float32
    close(y, exact, 8 * (a.double().abs() @ b.double().abs()) + c.double().abs())
    plain = all(1 in t.stride() and 0 not in t.stride() for t in (a, b)) and "scaled" not in name
    assert calls == [(40, 24)] * ((3 if name == "sum" else 1) if plain else 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_product_into_a_slice(layout: str) -> None:
    into_a_slice(layout, torch.float32, close)


def test_nan_and_inf_stay() -> None:
    x, weight = drawn(32, 48), drawn(24, 48, seed=1)
    x[3, 5], x[4, 6], weight[7, 8] = torch.nan, torch.inf, torch.nan
    y = _mm.linear(x, weight)
    assert bool(y[3].isnan().all() and y[:, 7].isnan().all())
    assert torch.equal(y[4].isinf(), torch.arange(24) != 7)
    assert int(y.isfinite().sum()) == 30 * 23


@pytest.mark.parametrize("memory", ["fast", "lean"])
@pytest.mark.parametrize("kind", ["linear", "no bias", "activation", "merged", "merged apart", "residual"])
def test_models(kind: str, memory: Any, calls: list[Any]) -> None:
    ours = model(kind)
    ours.memory = memory
    x = drawn(32, 16)
    found = gradients(ours, ours, x)
    assert len(calls) >= 6
    with sf.fusing(enabled=False):
        exact = gradients(ours.double(), ours, x.double())
    for name, value in found.items():
        torch.testing.assert_close(value.double(), exact[name], rtol=1e-4, atol=1e-5)


def test_alone(calls: list[Any]) -> None:
    for bias in (False, True):
        calls.clear()
        one = sf.Sequential(ops.Linear(24, 40, bias=bias))
        gradients(one, one, drawn(32, 24))
        assert sorted(calls) == [(32, 24), (32, 40), (40, 24)]


def test_operations() -> None:
    check_op(ops.Linear(24, 40), drawn(32, 24))
    check_op(ops.MergedLinear(24, (16, 40)), drawn(32, 24))


def test_whoever_counts_or_differentiates_sees_torch_s(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "WIDENED", frozenset())  # GEMMs in bfloat16 that a processor computes in float32
    x, weight = drawn(32, 48), drawn(24, 48, seed=1)
    with gemms() as called:
        _mm.linear(x, weight)
    assert called.names == [torch.float32]
    y = _mm.linear(x.requires_grad_(), weight)
    assert y.grad_fn is not None
    torch.func.vmap(_mm.mm)(drawn(3, 32, 24), drawn(3, 24, 16))
    with torch.autocast("cpu", torch.bfloat16):
        assert _mm.linear(x.detach(), weight).dtype is torch.bfloat16
    with torch.backends.mkldnn.flags(enabled=False):
        _mm.linear(x.detach(), weight)
    _mm.linear(x.detach().double(), weight.double())
    _mm.linear(x.detach()[:15], weight)
    _mm.linear(x.detach(), weight[:1].expand(24, 48))
    assert not calls
    _mm.linear(x.detach(), weight)
    assert calls == [(32, 24)]


def test_small_ones_are_mkl_s(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_mm, "ONEDNN_FLOAT32_WORTHWHILE", hardware.ONEDNN_FLOAT32_WORTHWHILE)
    x, weight = drawn(128, 128), drawn(127, 128, seed=1)
    assert torch.equal(_mm.linear(x, weight), F.linear(x, weight))
    assert not calls
    _mm.linear(x, drawn(128, 128, seed=1))
    assert calls == [(128, 128)]
