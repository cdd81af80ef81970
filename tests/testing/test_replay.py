"""A replay of a host function makes the launches of a full call: the same ones, each tensor in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.watching import Calls

pytest.importorskip("triton")

import seqfuse as sf
from seqfuse.inference import KVCache
from seqfuse.kernels import _launch, _operators, pointwise
from seqfuse.kernels._operators import Operator
from seqfuse.kernels.activations import ACTIVATIONS
from seqfuse.kernels.attention import attention_bwd, attention_fwd
from seqfuse.kernels.crossentropy import cross_entropy_
from seqfuse.kernels.decode import decode_attention
from seqfuse.kernels.norm import norm_bwd, norm_fwd, norm_of
from seqfuse.kernels.rope import Rotation, rope_bwd, rope_fwd, rope_write
from seqfuse.ops import _attention
from tools import stub_driver as stubs
from tools.stub_driver import stub_driver

pytestmark = pytest.mark.skipif(_launch.INTERPRETED, reason="kernels are interpreted in this process")

GELU, RELU = (ACTIVATIONS[name] for name in ("gelu", "relu"))
M, K = 33, 64
BF16, F32 = torch.bfloat16, torch.float32
p = pointwise

BRANCH = p.Chain(p.bias(), p.store(), p.act(GELU), p.dropout(0.1), p.add())
GRADIENT = p.Chain(p.dact(GELU), p.column_sum())
AGAIN = p.Chain(p.emit(GELU), p.dact(GELU), p.column_sum())
SUM = p.Chain(p.column_sum())

Q, KV, DY = (2, 4, 8, 64), (2, 2, 16, 64), (2, 8, 4, 64)
CACHE, ROOM = (2, 2, 4096, 64), (2, 2, 32, 64)
TURN = Rotation("half", 64)

# By name, shapes of tensors, and the call. An integer is a seed; the names are below.
CALLS: dict[str, tuple[tuple[Any, ...], Callable[..., Any]]] = {
    "layernorm": (((M, K), (K,), (K,)), lambda x, w, b: norm_fwd(x, w, b, 1e-5)),
    "layernorm, everything": (
        ((3, 11, K), (K,), (K,), (K,), 0, (3, 11, K)),
        lambda x, w, b, c, s, r: norm_fwd(x, w, b, 1e-5, pre_bias=c, seed=s, p=0.1, residual=r, act=GELU),
    ),
    "layernorm backward": (
        ((M, K), (M, K), "M", "M", (K,), (M, K)),
        lambda dy, x, m, r, w, d: norm_bwd(dy, x, m, r, w, dstream=d, dweight=BF16, dbias=BF16),
    ),
    "rmsnorm": (((M, K), (K,)), lambda x, w: norm_fwd(x, w, None, 1e-5, centered=False, dtype=F32)),
    "rmsnorm backward, wide": (
        ((M, 16384), (M, 16384), "M", (16384,)),
        lambda dy, x, r, w: norm_bwd(dy, x, None, r, w, dweight=BF16),
    ),
    "chain": (((M, K), (K,), 0, (M, K)), lambda x, b, s, r: p.pointwise(x, BRANCH, (b, s, r))),
    "chain, sums": (((M, K), (M, K)), lambda dy, t: p.pointwise(dy, GRADIENT, (t,), dtypes=(F32,))),
    "chain, read again": (((M, K), (M, K)), lambda dy, t: p.pointwise(dy, AGAIN, (t, t))),
    "chain, no result": (((M, K),), lambda dy: p.pointwise(dy, SUM, result=False)),
    "attention": ((Q, KV, KV), lambda q, k, v: attention_fwd(q, k, v, causal=True)),
    "attention, everything": (
        (Q, KV, KV, "mask", 0),
        lambda q, k, v, m, s: attention_fwd(q, k, v, 0.2, window=5, softcap=9.0, mask=m, seed=s, p=0.1),
    ),
    "attention backward": (
        (DY, Q, KV, KV, DY, "lse", Q, KV, KV),
        lambda dy, q, k, v, y, lse, *out: attention_bwd(dy, q, k, v, y, lse, out, causal=True),
    ),
    "attention backward, mask": (
        (DY, Q, KV, KV, DY, "lse", Q, KV, KV, "mask"),
        lambda dy, q, k, v, y, lse, a, b, c, m: attention_bwd(dy, q, k, v, y, lse, (a, b, c), mask=m),
    ),
    "decode": (((2, 4, 64), CACHE, CACHE, "lengths"), lambda q, k, v, n: decode_attention(q, k, v, n, window=40)),
    "decode, one part": (((2, 4, 64), ROOM, ROOM, "lengths"), lambda q, k, v, n: decode_attention(q, k, v, n)),
    "cache write": (((2, 512), CACHE, CACHE, "lengths"), lambda x, k, v, n: rope_write(x, 4, 2, None, k, v, n)),
    "rope": (((2, 6, 512), (512,)), lambda x, b: rope_fwd(x, 4, 2, TURN, bias=b)),
    "rope, norm": (
        ((2, 6, 512), (64,), (64,), "at"),
        lambda x, w, u, at: rope_fwd(x, 4, 2, TURN, positions=at, norm_eps=1e-5, q_weight=w, k_weight=u, store=True),
    ),
    "rope, cosines": (((2, 6, 512), (6, 64), (6, 64)), lambda x, c, s: rope_fwd(x, 4, 2, TURN, cos=c, sin=s)),
    "rope backward": (
        ((2, 6, 512), (2, 6, 512), "rstd", (64,), (64,)),
        lambda dy, x, r, w, u: rope_bwd(
            dy, 4, 2, TURN, x=x, rstd=r, q_weight=w, k_weight=u, dbias=BF16, dq_weight=BF16, dk_weight=BF16
        ),
    ),
    "rope write": (
        ((2, 512), CACHE, CACHE, "lengths"),
        lambda x, k, v, n: rope_write(x, 4, 2, TURN, k, v, n),
    ),
    "cross-entropy": (((M, 1000), "classes"), lambda z, t: cross_entropy_(z, t, label_smoothing=0.1)),
    "cross-entropy, gradient": (
        ((M, 1000), "classes", "M", "softmax"),
        lambda z, t, s, m: cross_entropy_(z, t, z_loss=0.1, scale=s, softmax=m),
    ),
}


NAMED: dict[Any, Callable[[], Tensor]] = {
    "M": lambda: torch.randn(M),
    "mask": lambda: torch.randn(2, 1, 8, 16),
    "lse": lambda: torch.randn(2, 4, 8),
    "lengths": lambda: torch.tensor([3, 5]),
    "at": lambda: torch.arange(12).view(2, 6),
    "rstd": lambda: torch.randn(2, 6, 6),
    "classes": lambda: torch.zeros(M, dtype=torch.int64),
    "softmax": lambda: torch.randn(2, M),
}


def drawn(shapes: Sequence[Any]) -> list[Tensor]:
    """Named tensors of given shapes, and seeds."""
    found: list[Tensor] = []
    for shape in shapes:
        if shape in NAMED:
            found.append(NAMED[shape]())
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
    """Launches and result with tensors by origin: given, or the first, second, ... that was allocated."""
    names = {t.data_ptr(): f"given {i}" for i, t in enumerate(given)}

    def of(value: Any) -> Any:
        if isinstance(value, Tensor):
            value = value.data_ptr()
        if type(value) is int and value >= 2**40:  # an address
            return names.setdefault(value, f"made {len(names) - len(given)}")
        return tuple(of(one) for one in value) if isinstance(value, tuple) else (type(value), value)

    told = [(name, grid, of(args)) for name, grid, args in launches]
    leaves = list(result) if isinstance(result, (tuple, list)) else [result]
    of_result = [None if t is None else (of(t), t.dtype, t.shape, t.stride(), t.device) for t in leaves]
    return told, of_result, type(result)


@pytest.mark.parametrize("name", CALLS)
def test_a_replayed_call_is_what_would_be_decided_again(name: str, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, call = CALLS[name]
    made: list[Any] = []
    decided = _operators._decided
    monkeypatch.setattr(_operators, "_decided", lambda *args: made.append(args) or decided(*args))
    call(*drawn(shapes))
    assert _operators._never not in [again for _, found in _operators._entries.values() for _, again, _ in found]
    other = drawn(shapes)
    seen.clear()
    result = call(*other)
    assert len(made) == 1
    again = told(seen, other, result)
    _operators.forget()
    seen.clear()
    result = call(*other)
    assert len(made) == 2
    assert told(seen, other, result) == again
    assert seen


BOUND: dict[str, tuple[tuple[Any, ...], Callable[[], Callable[..., Any]], Callable[..., Any]]] = {
    # Shapes of tensors, the function that takes all but the last, and the host function.
    "chain": (
        ((M, K), (K,), 0, (M, K)),
        lambda: p.pointwise_of(BRANCH, F32),
        lambda x, b, s, r: p.pointwise(x, BRANCH, (b, s, r), dtype=F32),
    ),
    "chain, sums": (
        ((3, 11, K), (3, 11, K)),
        lambda: p.pointwise_of(GRADIENT, None, (F32,)),
        lambda dy, t: p.pointwise(dy, GRADIENT, (t,), dtypes=(F32,)),
    ),
    "chain, no result": (
        ((M, K),),
        lambda: p.pointwise_of(SUM, result=False),
        lambda dy: p.pointwise(dy, SUM, result=False),
    ),
    "layernorm backward": (
        ((M, K), (M, K), "M", "M", (K,), (M, K)),
        lambda: norm_of(norm_bwd, ["dy", "x", "mean", "rstd", "weight", "dstream"], {"dweight": BF16, "dbias": F32}),
        lambda dy, x, m, r, w, d: norm_bwd(dy, x, m, r, w, dstream=d, dweight=BF16, dbias=F32),
    ),
    "boundary": (
        ((M, K), (K,), (K,), (K,), (M, K)),
        lambda: norm_of(norm_fwd, ["x", "weight", "bias", "pre_bias", "residual"], {"eps": 1e-5, "dtype": BF16}),
        lambda x, w, b, s, r: norm_fwd(x, w, b, 1e-5, pre_bias=s, residual=r, dtype=BF16),
    ),
    "rmsnorm backward, no dx": (
        ((M, K), (M, K), "M"),
        lambda: norm_of(norm_bwd, ["dy", "x", "rstd"], {"zero_centered": True, "dx": False, "dweight": BF16}),
        lambda dy, x, r: norm_bwd(dy, x, None, r, None, zero_centered=True, dx=False, dweight=BF16),
    ),
}


@pytest.mark.parametrize("name", BOUND)
def test_a_function_of_the_tensors_alone_launches_what_the_host_function_does(name: str, seen: Seen) -> None:
    shapes, bind, host = BOUND[name]
    bound, one, two = bind(), drawn(shapes), drawn(shapes)
    smaller = [t[:2] if t.ndim and t.shape[0] in (3, M) else t for t in drawn(shapes)]
    for given in (one, two, smaller, one, two):
        seen.clear()
        ours = told(seen, given, bound(*given))
        seen.clear()
        theirs = told(seen, given, host(*given))
        assert ours == theirs
        assert seen
    _operators.forget()
    seen.clear()
    ours = told(seen, two, bound(*two))
    seen.clear()
    assert ours == told(seen, two, host(*two))


def test_a_function_of_the_tensors_alone_asks_its_host_function_only_where_they_differ(seen: Seen) -> None:
    asked: list[Any] = []

    def whole(x: Tensor) -> Any:
        asked.append(x.shape)
        return p.pointwise(x, SUM)

    bound = _operators._bound(whole, lambda x: operator_of(p._run).split(x, SUM, (), dtypes=()))
    for rows in (M, M, M, 8, 8, M):
        bound(X[:rows])
    assert asked == [(M, K), (8, K), (M, K)]
    bound(X.float())
    bound(X.float())
    with Calls():
        bound(X.float())
    _operators.forget()
    bound(X.float())
    assert asked[3:] == [(M, K)] * 3


def test_a_function_of_the_tensors_alone_copies_what_does_not_fit(seen: Seen) -> None:
    bound = p.pointwise_of(GRADIENT, None, (F32,))
    dy, t = drawn(((M, 1), (K, M)))
    for _ in range(2):
        dx, total = bound(dy.expand(M, K), t.t())
        assert dx is not None
        assert total is not None
        assert dx.is_contiguous()
        assert (total.shape, total.dtype) == ((K,), F32)
    assert [name for name, _, _ in seen] == ["_chain_sums_kernel", "_column_sums_kernel"] * 2


def operator_of(entry: Any) -> Operator:
    return entry.operator


def norm(x: Tensor, w: Tensor, b: Tensor | None = None, **rest: Any) -> Any:
    return norm_fwd(x, w, b, 1e-5, **rest)


X, W, B = drawn(((M, K), (K,), (K,)))
OTHERS: dict[str, Callable[[], Any]] = {
    "shape": lambda: norm(X[:32], W, B),
    "stride": lambda: norm(drawn(((M, 2 * K),))[0][:, :K], W, B),
    "dtype": lambda: norm(X, W, B.float()),
    "dtype of the result": lambda: norm(X, W, B, dtype=F32),
    "left out": lambda: norm(X, W),
    "in another place": lambda: norm(X, W, pre_bias=B),
    "activation": lambda: norm(X, W, B, act=RELU),
    "dropout": lambda: norm(X, W, B, seed=torch.tensor(3), p=0.1, residual=drawn(((M, K),))[0]),
    "number": lambda: norm_fwd(X, W, B, 1e-6),
    "flag": lambda: norm(X, W, B, zero_centered=True),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_call_that_differs_is_decided_anew(name: str, seen: Seen) -> None:
    norm(X, W, B)
    seen.clear()
    OTHERS[name]()
    launches = list(seen)
    seen.clear()
    _operators.forget()
    OTHERS[name]()
    assert [(name, grid) for name, grid, _ in seen] == [(name, grid) for name, grid, _ in launches]
    numbers = [[a for a in args if not isinstance(a, Tensor)] for _, _, args in (*launches, *seen)]
    assert numbers[: len(launches)] == numbers[len(launches) :]


def wider(t: Tensor) -> Tensor:
    """Rows with gaps."""
    return torch.cat((t, t), -1)[..., : t.shape[-1]]


def shifted(t: Tensor) -> Tensor:
    """The same, one element further."""
    return torch.cat((t.reshape(-1)[:1], t.reshape(-1)))[1:].view(t.shape)


def shorter(t: Tensor) -> Tensor:
    """The same strides, one row less."""
    return t[:, :, :-1] if t.ndim == 4 else t[:-1]


HEADS: dict[str, tuple[tuple[Any, ...], tuple[Callable[[Tensor], Tensor], ...], dict[str, Any]]] = {
    # Shapes, changes of the first tensor, and flags.
    "attention_fwd": (
        (Q, KV, KV),
        (wider, shifted, shorter),
        {"causal": True, "window": 3, "softcap": 2.0, "scale": 1.0},
    ),
    "decode_attention": (((2, 4, 64), CACHE, CACHE, "lengths"), (wider, shifted), {"window": 9, "softcap": 2.0}),
    "rope_fwd": (((2, 6, 512), 4, 2, TURN), (wider, shifted, shorter), {"norm_eps": 1e-5, "store": True}),
    "rope_bwd": (((2, 6, 512), 4, 2, TURN), (wider, shifted, shorter), {"dbias": BF16}),
    "cross_entropy_": (((M, 1000), "classes"), (wider, shifted), {"z_loss": 0.1, "gradient": False, "ignore_index": 3}),
}
KERNELS: dict[str, Callable[..., Any]] = {
    "attention_fwd": attention_fwd,
    "decode_attention": decode_attention,
    "rope_fwd": rope_fwd,
    "rope_bwd": rope_bwd,
    "cross_entropy_": cross_entropy_,
}


@pytest.mark.parametrize("name", HEADS)
def test_another_layout_shape_or_flag_of_attention_rope_or_loss_is_decided_anew(name: str, seen: Seen) -> None:
    shapes, changes, options = HEADS[name]
    given = [shape if type(shape) in (int, Rotation) else drawn((shape,))[0] for shape in shapes]
    calls = [([change(given[0]), *given[1:]], {}) for change in changes]
    calls += [(given, {option: value}) for option, value in options.items()]
    KERNELS[name](*given)
    plain = told(seen, [], None)
    for arguments, option in calls:
        launches: list[Any] = []
        for _ in range(2):
            seen.clear()
            KERNELS[name](*arguments, **option)
            launches.append(told(seen, [], None))
        assert launches[0] == launches[1]
        _operators.forget()
        seen.clear()
        KERNELS[name](*arguments, **option)
        assert told(seen, [], None) == launches[0]
        assert launches[0] != plain or arguments[0].data_ptr() & 15, option
        _operators.forget()
        KERNELS[name](*given)


def test_a_replayed_call_goes_past_the_launcher_of_this_triton(seen: Seen) -> None:
    norm(X, W)
    again: Any
    (((_, again, _),),) = [found for _, found in _operators._entries.values()]
    (launcher,) = [entry[0].run for entry in _launch._compiled.values()]
    objects = list(again.constants.values())
    assert launcher.launch in objects
    assert launcher not in objects


def test_tensors_that_are_not_aligned_are_decided_each_time(seen: Seen) -> None:
    x = drawn(((M * K + 1,),))[0][1:].view(M, K)
    for _ in range(2):
        norm(x, W)
    assert not _operators._entries


def test_seeds_that_lie_side_by_side_are_replayed_each(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    decided = _operators._decided
    monkeypatch.setattr(_operators, "_decided", lambda *args: made.append(args) or decided(*args))
    chain = p.Chain(p.dropout(0.1))
    for _ in range(3):
        for seed in torch.arange(4):
            p.pointwise(X, chain, (seed,))
            assert seen[-1][2][2] in ((seed.data_ptr(),), (seed,))
    assert len(made) == 2
    assert len(seen) == 12


def test_steps_of_decoding_are_replayed_until_the_sequence_has_doubled(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    decided = _operators._decided
    monkeypatch.setattr(_operators, "_decided", lambda *args: made.append(args) or decided(*args))
    monkeypatch.setattr(_attention, "interpreting", True)
    model = sf.Sequential(sf.ops.RotaryEmbedding(2, style="half"), sf.ops.Attention(2, causal=True))
    cache, counts = KVCache(1, 100), list[int]()
    cache.feed(model, torch.randn(1, 30, 96))
    for _ in range(6):
        made.clear()
        cache.feed(model, torch.randn(1, 1, 96))
        counts.append(len(made))
    assert counts[0] > 0 < counts[2]
    assert [counts[1], *counts[3:]] == [0, 0, 0, 0]


def test_tensors_at_one_address_are_decided_each_time(seen: Seen) -> None:
    chain = p.Chain(p.add())
    for _ in range(2):
        p.pointwise(X, chain, (X.view(M, K),))
    assert not _operators._entries


def test_a_chain_that_reads_a_tensor_again_is_not_replayed_for_two_tensors(seen: Seen) -> None:
    chain = p.Chain(p.emit(GELU), p.dact(GELU))
    t, u = drawn(((M, K), (M, K)))
    for operands in ((t, t), (t, u), (u, u), (u, t)):
        p.pointwise(X, chain, operands)
    read = [[one.data_ptr() if isinstance(one, Tensor) else one for one in args[2]] for _, _, args in seen]
    t_at, u_at = t.data_ptr(), u.data_ptr()
    assert read == [[t_at, None], [t_at, u_at], [u_at, None], [u_at, t_at]]


def test_a_call_that_does_more_than_launch_is_decided_each_time(seen: Seen) -> None:
    def doubled(x: Tensor) -> Tensor:
        return operator_of(p._run).host(x, SUM, ())[0].mul_(2)

    entry = Operator(doubled, "doubled").entry()
    for _ in range(2):
        entry(X)
    assert len(_operators._entries) == 1
    assert all(again is _operators._never for _, found in _operators._entries.values() for _, again, _ in found)


def test_under_a_mode_and_a_profiler_a_call_is_made_as_it_is_written(seen: Seen) -> None:
    norm(X, W)
    with Calls() as made:
        norm(X, W)
    assert made.names == ["norm"]
    called: list[Any] = []
    chain = _launch.knobs.runtime.launch_enter_hook
    chain.add(called.append)
    try:
        norm(X, W)
    finally:
        chain.remove(called.append)
    assert len(seen) == 3


def test_what_is_kept_is_bounded(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_operators, "MOST", 3)
    for rows in range(1, 9):
        norm(X[:rows], W)
    assert len(_operators._entries) <= 3


def test_nothing_that_was_given_is_kept(seen: Seen) -> None:
    import weakref

    x = drawn(((M, K),))[0]
    kept = weakref.ref(x)
    norm(x, W)
    seen.clear()
    del x
    assert kept() is None
