"""What a host function replays is what it would decide again: the same launches, each tensor in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from seqfuse.kernels import _launch, _replay, gemm, pointwise
from seqfuse.kernels.activations import ACTIVATIONS
from seqfuse.kernels.layernorm import layernorm_bwd, layernorm_fwd
from seqfuse.kernels.rmsnorm import rmsnorm_bwd, rmsnorm_fwd
from seqfuse.testing import stub_driver as stubs
from seqfuse.testing.stub_driver import stub_driver

pytestmark = pytest.mark.skipif(_launch.interpreted(), reason="kernels are interpreted in this process")

GELU, SILU, RELU = (ACTIVATIONS[name] for name in ("gelu", "silu", "relu"))
M, K, N = 33, 64, 128
BF16, F32 = torch.bfloat16, torch.float32
p = pointwise

BRANCH = p.Chain(p.bias(), p.store(), p.act(GELU), p.dropout(0.1), p.add())
GRADIENT = p.Chain(p.dact(GELU), p.column_sum())
AGAIN = p.Chain(p.emit(GELU), p.dact(GELU), p.column_sum())
SUM = p.Chain(p.column_sum())

# By name, shapes of tensors, and the call. An integer is a seed, "M" a row of float32 statistics.
CALLS: dict[str, tuple[tuple[Any, ...], Callable[..., Any]]] = {
    "linear": (((M, K), (N, K)), lambda x, w: gemm.linear(x, w)),
    "linear, three dimensions": (((3, 11, K), (N, K), (N,)), lambda x, w, b: gemm.linear(x, w, b, dtype=F32)),
    "linear, everything": (
        ((M, K), (N, K), (N,), (M,), 0, (M, N)),
        lambda x, w, b, r, s, y: gemm.linear(
            x, w, b, act=GELU, store_pre=True, row_scale=r, dropout=gemm.Dropout(s, 0.1), residual=y
        ),
    ),
    "gated": (((M, K), (N, K)), lambda x, w: gemm.linear_gated(x, w, act=SILU, store_pre=True)),
    "gated, two weights": (
        ((M, K), (N, K), (N,), (N, K), (N,)),
        lambda x, w, b, u, c: gemm.linear_gated(x, w, b, up=u, up_bias=c, act=SILU),
    ),
    "dgrad": (((M, N), (N, K)), lambda dy, w: gemm.linear_dgrad(dy, w, sums=True)),
    "dgrad, activation": (
        ((M, N), (N, K), (M, K)),
        lambda dy, w, t: gemm.linear_dgrad(dy, w, act=GELU, t=t, sums=True, emit=True),
    ),
    "dgrad, dy sums": (
        ((M, N), (N, K), (M, K), 0),
        lambda dy, w, t, s: gemm.linear_dgrad(
            dy, w, act=RELU, t=t, t_is_output=True, dropout=gemm.Dropout(s, 0.1), sums=True, dy_sums=BF16
        ),
    ),
    "dgrad, gated": (((M, N), (N, K), (M, 2 * K)), lambda dy, w, t: gemm.linear_dgrad_gated(dy, w, act=SILU, t=t)),
    "wgrad": (((M, N), (M, K)), lambda dy, x: gemm.linear_wgrad(dy, x)),
    "wgrad, bias": (((M, N), (M, K)), lambda dy, x: gemm.linear_wgrad_bias(dy, x, sums_dtype=F32)),
    "layernorm": (((M, K), (K,), (K,)), lambda x, w, b: layernorm_fwd(x, w, b, 1e-5)),
    "layernorm, everything": (
        ((3, 11, K), (K,), (K,), (K,), 0, (3, 11, K)),
        lambda x, w, b, c, s, r: layernorm_fwd(x, w, b, 1e-5, pre_bias=c, seed=s, p=0.1, residual=r, act=GELU),
    ),
    "layernorm backward": (
        ((M, K), (M, K), "M", "M", (K,), (M, K)),
        lambda dy, x, m, r, w, d: layernorm_bwd(dy, x, m, r, w, dstream=d, dweight=BF16, dbias=BF16),
    ),
    "rmsnorm": (((M, K), (K,)), lambda x, w: rmsnorm_fwd(x, w, 1e-5, dtype=F32)),
    "rmsnorm backward, wide": (
        ((M, 16384), (M, 16384), "M", (16384,)),
        lambda dy, x, r, w: rmsnorm_bwd(dy, x, r, w, dweight=BF16),
    ),
    "chain": (((M, K), (K,), 0, (M, K)), lambda x, b, s, r: p.pointwise(x, BRANCH, (b, s, r))),
    "chain, sums": (((M, K), (M, K)), lambda dy, t: p.pointwise(dy, GRADIENT, (t,), dtypes=(F32,))),
    "chain, read again": (((M, K), (M, K)), lambda dy, t: p.pointwise(dy, AGAIN, (t, t))),
    "chain, no result": (((M, K),), lambda dy: p.pointwise(dy, SUM, result=False)),
}


def drawn(shapes: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for shape in shapes:
        if shape == "M":
            found.append(torch.randn(M))
        elif isinstance(shape, int):
            found.append(torch.tensor(shape))
        else:
            found.append(torch.randn(shape).to(BF16))
    return found


Seen = list[tuple[str, tuple[int, ...], tuple[Any, ...]]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """Name, grid and arguments of each launch."""
    launches: Seen = []
    check = stubs._check

    def look(source: Any, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        check(source, grid, args)
        launches.append((source.fn.__name__, grid, args))

    monkeypatch.setattr(stubs, "_check", look)
    with stub_driver(compiles=False):
        yield launches


def told(launches: Seen, given: list[Tensor], result: Any) -> Any:
    """Launches and result with tensors as what they are: given, or the first, second, ... that was made."""
    names = {t.data_ptr(): f"given {i}" for i, t in enumerate(given)}

    def of(value: Any) -> Any:
        if isinstance(value, Tensor):
            name = names.setdefault(value.data_ptr(), f"made {len(names) - len(given)}")
            return (name, value.dtype)
        return tuple(of(one) for one in value) if isinstance(value, tuple) else (type(value), value)

    told = [(name, grid, of(args)) for name, grid, args in launches]
    leaves = list(result) if isinstance(result, (tuple, list)) else [result]
    of_result = [None if t is None else (of(t), t.shape, t.stride(), t.device) for t in leaves]
    return told, of_result, type(result)


@pytest.mark.parametrize("name", CALLS)
def test_a_replayed_call_is_what_would_be_decided_again(name: str, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, call = CALLS[name]
    made: list[Any] = []
    recorded = _replay._recorded
    monkeypatch.setattr(_replay, "_recorded", lambda *args: made.append(args) or recorded(*args))
    call(*drawn(shapes))
    other = drawn(shapes)
    seen.clear()
    result = call(*other)
    assert len(made) == 1
    again = told(seen, other, result)
    _replay.forget()
    seen.clear()
    result = call(*other)
    assert len(made) == 2
    assert told(seen, other, result) == again
    assert seen


def linear(x: Tensor, w: Tensor, b: Tensor | None = None, **rest: Any) -> Any:
    return gemm.linear(x, w, b, **rest)


X, W, B = drawn(((M, K), (N, K), (N,)))
OTHERS: dict[str, Callable[[], Any]] = {
    "shape": lambda: linear(X[:32], W, B),
    "stride": lambda: linear(drawn(((M, 2 * K),))[0][:, :K], W, B),
    "transposed": lambda: linear(X, drawn(((K, N),))[0].t(), B),
    "dtype": lambda: linear(X, W, B.float()),
    "dtype of the result": lambda: linear(X, W, B, dtype=F32),
    "left out": lambda: linear(X, W),
    "in another place": lambda: linear(X, W, row_scale=drawn(((M,),))[0]),
    "activation": lambda: linear(X, W, B, act=RELU),
    "dropout": lambda: linear(X, W, B, dropout=gemm.Dropout(torch.tensor(3), 0.1)),
    "flag": lambda: linear(X, W, B, act=RELU, store_pre=True),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_call_that_differs_is_decided_anew(name: str, seen: Seen) -> None:
    linear(X, W, B)
    seen.clear()
    OTHERS[name]()
    launches = list(seen)
    seen.clear()
    _replay.forget()
    OTHERS[name]()
    assert [(name, grid) for name, grid, _ in seen] == [(name, grid) for name, grid, _ in launches]
    numbers = [[a for a in args if not isinstance(a, Tensor)] for _, _, args in (*launches, *seen)]
    assert numbers[: len(launches)] == numbers[len(launches) :]


def test_tensors_that_are_not_aligned_are_decided_each_time(seen: Seen) -> None:
    x = drawn(((M * K + 1,),))[0][1:].view(M, K)
    for _ in range(2):
        linear(x, W)
    assert not _replay._entries


def test_tensors_at_one_address_are_decided_each_time(seen: Seen) -> None:
    chain = p.Chain(p.add())
    for _ in range(2):
        p.pointwise(X, chain, (X.view(M, K),))
    assert not _replay._entries


def test_a_chain_that_reads_a_tensor_again_is_not_replayed_for_two_tensors(seen: Seen) -> None:
    chain = p.Chain(p.emit(GELU), p.dact(GELU))
    t, u = drawn(((M, K), (M, K)))
    for operands in ((t, t), (t, u), (u, u), (u, t)):
        p.pointwise(X, chain, operands)
    read = [[None if one is None else one.data_ptr() for one in args[2]] for _, _, args in seen]
    t_at, u_at = t.data_ptr(), u.data_ptr()
    assert read == [[t_at, None], [t_at, u_at], [u_at, None], [u_at, t_at]]


def test_a_call_that_does_more_than_launch_is_decided_each_time(seen: Seen) -> None:
    def doubled(act: None, x: Tensor) -> Any:
        return p._decided(act, SUM, None, (), True, x)[0].mul_(2)

    for _ in range(2):
        _replay.replayed(doubled, None, (), X)
    linear(drawn(((3, M, K),))[0].transpose(0, 1), W)  # copies x
    assert len(_replay._entries) == 2
    assert all(not entry.launches for found in _replay._entries.values() for entry in found)


def test_under_a_mode_and_a_profiler_a_call_is_made_as_it_is_written(seen: Seen) -> None:
    linear(X, W)
    made: list[Any] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        linear(X, W)
    assert torch.ops.aten.empty.memory_format in made
    called: list[Any] = []
    chain = _launch.knobs.runtime.launch_enter_hook
    chain.add(called.append)
    try:
        linear(X, W)
    finally:
        chain.remove(called.append)
    assert len(seen) == 3


def test_what_is_kept_is_bounded(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_replay, "MOST", 3)
    for rows in range(1, 9):
        linear(X[:rows], W)
    assert len(_replay._entries) <= 3


def test_nothing_that_was_given_is_kept(seen: Seen) -> None:
    import weakref

    x = drawn(((M, K),))[0]
    kept = weakref.ref(x)
    linear(x, W)
    seen.clear()
    del x
    assert kept() is None
