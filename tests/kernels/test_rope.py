"""Bias, norm of heads and RoPE in one pass, compared with the operations, one at a time and in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from seqfuse import ops
from seqfuse.kernels import _heads, rope
from seqfuse.kernels.rope import Rotation
from seqfuse.testing import (
    Untouched,
    assert_bitwise_equal,
    exact,
    in_regime,
    seeded_randn,
)
from seqfuse.testing.judge import judge
from seqfuse.testing.tensors import redrawn

from .checked import Checked
from .conftest import DEVICE

HEADS, KV = 3, 2
PARTS = HEADS + 2 * KV
EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Case:
    """The operations, and the size of the heads."""

    size: int
    rotation: Rotation | None
    bias: bool = False
    norm: bool = False
    affine: bool = True
    positions: str | None = None  # "shared" or "each"
    zero_centered: bool = False
    angles: str | None = None  # given, "by pair" or "by element"; "each ..." of every sequence


CASES = {
    "half": Case(8, Rotation("half", 8)),
    "interleaved": Case(8, Rotation("interleaved", 8)),
    "part": Case(10, Rotation("half", 6, 100.0), bias=True),
    "part_interleaved": Case(10, Rotation("interleaved", 4), norm=True),
    "bias": Case(6, Rotation("interleaved", 6), bias=True, positions="shared"),
    "norm": Case(8, Rotation("half", 8), norm=True, positions="each"),
    "norm_plain": Case(8, Rotation("half", 4), bias=True, norm=True, affine=False),
    "all": Case(12, Rotation("half", 12), bias=True, norm=True),
    "all_interleaved": Case(16, Rotation("interleaved", 12), bias=True, norm=True, positions="each"),
    "by_pair": Case(10, Rotation("half", 6), bias=True, angles="by pair"),
    "by_element": Case(8, Rotation("half", 8), norm=True, angles="each by element"),
    "by_element_interleaved": Case(12, Rotation("interleaved", 8), bias=True, norm=True, angles="by element"),
    "zero_centered": Case(10, Rotation("half", 6), norm=True, zero_centered=True),
    "norm_alone": Case(8, None, norm=True),
    "bias_norm": Case(7, None, bias=True, norm=True),
}


def drawn(case: Case, lead: tuple[int, ...], dtype: torch.dtype, regime: str = "normal") -> dict[str, Tensor]:
    width = PARTS * case.size
    tensors = {
        "x": in_regime(regime, (*lead, width), 1, dtype=dtype),
        "dy": seeded_randn((*lead, width), 2, dtype=dtype),
    }
    if case.bias:
        tensors["bias"] = seeded_randn((width,), 3, dtype=dtype)
    if case.norm and case.affine:
        tensors |= {name: seeded_randn((case.size,), 4 + i, dtype=dtype) for i, name in enumerate(("q", "k"))}
    return {name: t.to(DEVICE) for name, t in tensors.items()}


def positions(case: Case, lead: tuple[int, ...]) -> Tensor | None:
    if case.positions is None:
        return None
    shape = lead[-1:] if case.positions == "shared" else lead
    return torch.randint(0, 5000, shape, generator=torch.Generator().manual_seed(5)).to(DEVICE)


def angles(case: Case, lead: tuple[int, ...]) -> dict[str, Tensor]:
    """Not on the unit circle: given cos and sin are used unchanged."""
    if case.angles is None or case.rotation is None:
        return {}
    width = case.rotation.dim // 2 if "pair" in case.angles else case.rotation.dim
    shape = (*(lead if "each" in case.angles else lead[-1:]), width)
    return {name: seeded_randn(shape, 8 + i).to(DEVICE) for i, name in enumerate(("cos", "sin"))}


def in_torch(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    leaves = {name: t.clone().requires_grad_() for name, t in tensors.items() if name != "dy"}
    x = leaves["x"]
    y = x + leaves["bias"] if case.bias else x
    if case.norm:
        norm = ops.QKNorm(case.size, HEADS, KV, EPS, case.affine, zero_centered=case.zero_centered)
        for name in ("q", "k") if case.affine else ():
            delattr(norm, f"{name}_weight")
            setattr(norm, f"{name}_weight", leaves[name])
        y = norm.reference(y)
    if case.rotation is not None:
        r = case.rotation
        ids = None if case.positions is None else "ids"
        lead = tuple(x.shape[:-1])
        given = angles(case, lead)
        turn = ops.RotaryEmbedding(
            HEADS, KV, style=r.style, base=r.base, rotary_dim=r.dim, positions=ids, **{name: name for name in given}
        )
        y = turn.reference(y, position_ids=positions(case, lead), **given)
    y.backward(tensors["dy"])
    return {"y": y.detach()} | {f"d_{name}": t.grad for name, t in leaves.items() if t.grad is not None}


def run(case: Case, tensors: dict[str, Tensor], k: ModuleType = rope, only: str | None = None) -> dict[str, Tensor]:
    """The result and all gradients, or `only` one of these."""
    x, dtype = tensors["x"], tensors["x"].dtype
    rotation: Any = case.rotation
    if rotation is not None:
        rotation = k.Rotation(rotation.style, rotation.dim, rotation.base)
    lead = tuple(x.shape[:-1])
    both: dict[str, Any] = {"positions": positions(case, lead), **angles(case, lead)}
    both["zero_centered"] = case.zero_centered
    weights = {"q_weight": tensors.get("q"), "k_weight": tensors.get("k")}
    f = k.rope_fwd(
        x, HEADS, KV, rotation, bias=tensors.get("bias"), norm_eps=EPS if case.norm else None,
        store=case.bias and case.norm, **both, **weights,
    )  # fmt: skip
    kept = {"x": x if f.z is None else f.z, "rstd": f.rstd, **weights} if case.norm else {}
    sums = {"dbias": case.bias, "dq_weight": case.norm and case.affine, "dk_weight": case.norm and case.affine}
    dtypes = {name: dtype if there and only in (None, name) else None for name, there in sums.items()}
    b = k.rope_bwd(tensors["dy"], HEADS, KV, rotation, dx=only in (None, "dx"), **dtypes, **both, **kept)
    results = {"y": f.y, "d_x": b.dx, "d_bias": b.dbias, "d_q": b.dq_weight, "d_k": b.dk_weight}
    return {name: t for name, t in results.items() if t is not None}


def check(case: Case, tensors: dict[str, Tensor], k: ModuleType = rope) -> None:
    def measure(seed: int) -> tuple[dict[str, Tensor], ...]:
        drawn = {name: redrawn(t, seed) for name, t in tensors.items()}
        with Untouched(drawn):
            ours = run(case, drawn, k)
        theirs, wide = in_torch(case, drawn), in_torch(case, {name: t.double() for name, t in drawn.items()})
        # Angles are float32 in both, while float64 differs from either: positions are small where that matters.
        assert ours.keys() == theirs.keys()
        return tuple(dict(sorted(results.items())) for results in (ours, theirs, wide))

    judge(measure, 0)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
REGIMES = ["normal", "small", "offset", "heavy"]
LEADS = [(1,), (7,), (2, 33), (2, 3, 2)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_one_pass_equals_the_operations_it_stands_for(name: str, dtype: torch.dtype) -> None:
    at = list(CASES).index(name) + DTYPES.index(dtype)
    check(CASES[name], drawn(CASES[name], LEADS[at % 4], dtype, REGIMES[(at + 1) % 4]))


@pytest.mark.triton
def test_many_rows_go_through_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope, "head_tile", lambda heads, size, rotary, most, amd: rope.HeadTile(2, 2, 8, 4, 4))
    monkeypatch.setattr(rope, "processors", lambda device: 1)
    check(CASES["all_interleaved"], drawn(CASES["all_interleaved"], (2, 20), torch.float32))


def test_far_positions_are_turned_as_by_the_operation() -> None:
    x = seeded_randn((6, PARTS * 8), 0).to(DEVICE)
    ids = torch.tensor([0, 1, 99_999, 131_071, 1_000_000, 16_000_000], device=DEVICE)
    op = ops.RotaryEmbedding(HEADS, KV, style="half", positions="p")
    y = rope.rope_fwd(x, HEADS, KV, Rotation("half", 8), positions=ids).y
    torch.testing.assert_close(y, op.fwd(x, position_ids=ids)[0], atol=1e-6, rtol=1e-5)


SPREAD: dict[str, Callable[[Tensor], Tensor]] = {
    "shared": lambda t: t[0, 0],
    "of one sequence": lambda t: t[:1, 0],
    "each": lambda t: t[:, 0],
    "one row of each": lambda t: t[:, 0, :1],
    "one row": lambda t: t[0, 0, :1],
    "expanded": lambda t: t[:1, 0, :1].expand(3, 3, *t.shape[3:]),
    "strided": lambda t: t[:, 1],
    "of the last dimension but one": lambda t: t[0, 0].unsqueeze(1)[:, :1],
}


@pytest.mark.parametrize("what", ["positions", "angles"])
@pytest.mark.parametrize("spread", SPREAD)
def test_positions_and_angles_broadcast(spread: str, what: str) -> None:
    """Three sequences of three rows, where shapes may be confused."""
    of = SPREAD[spread]
    x, dy, rotation = *(seeded_randn((3, 3, PARTS * 8), i).to(DEVICE) for i in (0, 1)), Rotation("half", 8)
    if what == "positions":
        given = {
            "positions": of(torch.randint(0, 99, (3, 2, 3), generator=torch.Generator().manual_seed(1)).to(DEVICE))
        }
        whole = {name: t.expand(3, 3).contiguous() for name, t in given.items()}
    else:
        given = {name: of(seeded_randn((3, 2, 3, 8), i).to(DEVICE)) for i, name in enumerate(("cos", "sin"))}
        whole = {name: t.expand(3, 3, 8).contiguous() for name, t in given.items()}
    for _ in range(2):  # looked up again
        y, wanted = (rope.rope_fwd(x, HEADS, KV, rotation, **kw).y for kw in (given, whole))
        dx, wanted_dx = (rope.rope_bwd(dy, HEADS, KV, rotation, **kw).dx for kw in (given, whole))
        assert_bitwise_equal([y, dx], [wanted, wanted_dx])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["half", "all"])
def test_one_bad_number_spoils_what_it_spoils_in_torch(name: str, value: float) -> None:
    tensors = drawn(CASES[name], (6,), torch.float32)
    tensors["x"][2, 3] = value
    tensors["x"][1, -1] = value
    ours, theirs = run(CASES[name], tensors), in_torch(CASES[name], tensors)
    for key, t in theirs.items():
        assert torch.equal(ours[key].isfinite(), t.isfinite()), key


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_nothing_is_turned_at_position_zero(style: str, dtype: torch.dtype) -> None:
    """In both directions x comes out bit for bit, and the bias gradient is a sum of small integers."""
    x, dy = (exact("integers", (32, PARTS * 8), i, dtype=dtype).to(DEVICE) for i in (0, 1))
    ids = torch.zeros(32, dtype=torch.int64, device=DEVICE)
    assert_bitwise_equal(rope.rope_fwd(x, HEADS, KV, Rotation(style, 8), positions=ids).y, x)
    b = rope.rope_bwd(dy, HEADS, KV, Rotation(style, 8), positions=ids, dbias=torch.float32)
    assert_bitwise_equal([b.dx, b.dbias], [dy, dy.float().sum(0)])


@pytest.mark.parametrize("regime", ["zeros", "constant_rows"])
def test_heads_without_a_norm_stay_finite(regime: str) -> None:
    for name in ("norm", "all_interleaved"):
        check(CASES[name], drawn(CASES[name], (5,), torch.float32, regime))


def test_a_norm_may_add_nothing_to_the_mean_square() -> None:
    x = drawn(CASES["norm"], (2,), torch.float32)["x"]
    heads = rope.rope_fwd(x, HEADS, KV, norm_eps=0.0).y.unflatten(-1, (HEADS + 2 * KV, -1))[:, : HEADS + KV]
    torch.testing.assert_close(heads.square().mean(-1), torch.ones(heads.shape[:-1], device=heads.device))


def test_values_pass_bit_for_bit() -> None:
    tensors = drawn(CASES["norm"], (9,), torch.bfloat16)
    ours, values = run(CASES["norm"], tensors), slice((HEADS + KV) * 8, None)
    assert_bitwise_equal(ours["y"][:, values].clone(), tensors["x"][:, values].clone())
    assert_bitwise_equal(ours["d_x"][:, values].clone(), tensors["dy"][:, values].clone())


@pytest.mark.parametrize("name", ["all", "half"])
def test_each_gradient_alone_is_what_it_is_beside_the_others(name: str) -> None:
    tensors = drawn(CASES[name], (3,), torch.float32)
    every = run(CASES[name], tensors)
    for only, key in (("dx", "d_x"), ("dbias", "d_bias"), ("dq_weight", "d_q"), ("dk_weight", "d_k")):
        expected = {kind: t for kind, t in every.items() if kind in ("y", key)}
        assert_bitwise_equal(run(CASES[name], tensors, only=only), expected)


def test_what_does_not_fit_is_refused() -> None:
    x = torch.zeros(3, PARTS * 8)
    with pytest.raises(ValueError, match=r"x must be \[\*, S, 7 D\], got shape \(3, 55\)"):
        rope.rope_fwd(x[:, :-1], HEADS, KV, Rotation("half", 8))
    with pytest.raises(ValueError, match="at most 8 elements of a head can have RoPE, got 10"):
        rope.rope_fwd(x, HEADS, KV, Rotation("half", 10))
    with pytest.raises(ValueError, match=r"positions must broadcast to \(3,\), got shape \(2,\)"):
        rope.rope_fwd(x, HEADS, KV, Rotation("half", 8), positions=torch.arange(2))
    with pytest.raises(ValueError, match=r"cos and sin must broadcast to \(3, 8\) or \(3, 4\), got \(3, 6\)"):
        rope.rope_fwd(x, HEADS, KV, Rotation("half", 8), cos=torch.ones(3, 6), sin=torch.ones(3, 6))
    with pytest.raises(ValueError, match="must not be float64"):
        rope.rope_fwd(x.double(), HEADS, KV, Rotation("half", 8))
    with pytest.raises(ValueError, match="given together"):
        rope.rope_fwd(x, HEADS, KV, norm_eps=EPS, q_weight=torch.ones(8))


LENGTHS = (4, 0, 11, 12)


def check_write(case: Case, dtype: torch.dtype, *, int8: bool = False, k: ModuleType = rope) -> None:
    """A new token of each of four sequences, the last of which is full, as `rope_fwd` rotates it at its position."""
    tensors = drawn(dataclasses.replace(case, positions=None), (4,), dtype)
    rotation: Any = case.rotation
    if rotation is not None:
        rotation = k.Rotation(rotation.style, rotation.dim, rotation.base)
    lengths, x = torch.tensor(LENGTHS, device=DEVICE), tensors["x"]
    around = {"bias": tensors.get("bias"), "norm_eps": EPS if case.norm else None}
    around |= {"q_weight": tensors.get("q"), "k_weight": tensors.get("k"), "zero_centered": case.zero_centered}
    kind = torch.int8 if int8 else dtype
    caches = [torch.full((4, KV, 12, case.size), 5, dtype=kind, device=DEVICE) for _ in range(2)]
    scales = {name: torch.full((4, KV, 12), 9.0, device=DEVICE) for name in ("k_scale", "v_scale")} if int8 else {}
    with Untouched({"x": x, "lengths": lengths}):
        q = k.rope_write(x, HEADS, KV, rotation, *caches, lengths, **around, **scales)
    wide = rope.rope_fwd(x.unsqueeze(1).float(), HEADS, KV, case.rotation, positions=lengths.unsqueeze(1), **{
        name: t.float() if isinstance(t, Tensor) else t for name, t in around.items()
    }).y.squeeze(1)  # fmt: skip
    wanted = wide.unflatten(-1, (PARTS, case.size)).split([HEADS, KV, KV], 1)
    near: dict[str, float] = {"atol": 1e-6, "rtol": 1e-6} if dtype is torch.float32 else {"atol": 0, "rtol": 2**-8}
    torch.testing.assert_close(q.float(), wanted[0], **near)
    for cache, name, rows in zip(caches, ("k_scale", "v_scale"), wanted[1:], strict=True):
        for b, length in enumerate(LENGTHS):
            others = torch.arange(12, device=DEVICE) != length
            assert (cache[b][:, others] == 5).all()
            assert not int8 or (scales[name][b][:, others] == 9).all()
            if length < 12:
                found, limit = cache[b, :, length].float(), near
                if int8:
                    scale = scales[name][b, :, length, None]
                    torch.testing.assert_close(scale, rows[b].abs().amax(-1, keepdim=True) / 127)
                    found, limit = found * scale, {"atol": 0.501 * float(scale.max()), "rtol": 0.0}
                torch.testing.assert_close(found, rows[b], **limit)


@pytest.mark.triton
@pytest.mark.parametrize("int8", [False, True], ids=["", "int8"])
@pytest.mark.parametrize("name", CASES)
def test_a_new_row_is_turned_and_written_in_one_pass(name: str, int8: bool) -> None:
    dtype = (torch.float32, torch.bfloat16, torch.float16)[list(CASES).index(name) % 3]
    check_write(CASES[name], dtype, int8=int8)


@pytest.mark.triton
@pytest.mark.parametrize("at", [1, 6], ids=["turned", "rest"])
def test_a_row_of_an_int8_cache_with_a_nan_is_nan(at: int) -> None:
    x = seeded_randn((1, PARTS * 8), 5)
    x[0, HEADS * 8 + at] = torch.nan  # of the first key
    k, v = (torch.zeros(1, KV, 4, 8, dtype=torch.int8, device=DEVICE) for _ in range(2))
    scales = {name: torch.ones(1, KV, 4, device=DEVICE) for name in ("k_scale", "v_scale")}
    lengths = torch.tensor([2], device=DEVICE)
    rope.rope_write(x.to(DEVICE), HEADS, KV, Rotation("half", 4), k, v, lengths, **scales)
    assert scales["k_scale"].isnan().nonzero().tolist() == [[0, 0, 2]]
    assert not scales["v_scale"].isnan().any()


@pytest.mark.triton
def test_a_row_that_cannot_be_written_is_refused() -> None:
    x, cache, lengths = torch.zeros(2, PARTS * 8), torch.zeros(2, KV, 4, 8), torch.zeros(2, dtype=torch.int64)
    turn = Rotation("half", 8)
    with pytest.raises(ValueError, match=r"x must be \[B, C\], one row of each sequence"):
        rope.rope_write(x.unsqueeze(1), HEADS, KV, turn, cache, cache, lengths)
    with pytest.raises(ValueError, match="caches must both be"):
        rope.rope_write(x, HEADS, KV, turn, cache, cache[:, :1], lengths)
    with pytest.raises(ValueError, match=r"lengths must be int64 \(2,\), got torch.int32"):
        rope.rope_write(x, HEADS, KV, turn, cache, cache, lengths.int())
    with pytest.raises(ValueError, match="lengths must be contiguous"):
        rope.rope_write(x, HEADS, KV, turn, cache, cache, lengths[:1].expand(2))
    with pytest.raises(ValueError, match="k_scale is given with an int8 cache, and only then"):
        rope.rope_write(x, HEADS, KV, turn, cache.to(torch.int8), cache.to(torch.int8), lengths)


def to_write(int8: bool) -> tuple[list[Tensor], dict[str, Any]]:
    """Two new tokens, of a batch whose second sequence is full, and a cache that is part of a larger one."""
    width = PARTS * 6
    caches = [torch.full((2, KV, 8, 6), 5.0, device=DEVICE).to(torch.int8 if int8 else torch.float32) for _ in "kv"]
    given: dict[str, Any] = {"bias": seeded_randn((width,), 2).to(DEVICE), "norm_eps": EPS}
    given |= {name: seeded_randn((6,), i).to(DEVICE) for i, name in ((3, "q_weight"), (4, "k_weight"))}
    if int8:
        given |= {name: torch.full((2, KV, 8), 9.0, device=DEVICE)[:, :, :5] for name in ("k_scale", "v_scale")}
    x, lengths = seeded_randn((2, width), 1).to(DEVICE), torch.tensor([3, 5], device=DEVICE)
    return [x, *(cache[:, :, :5] for cache in caches), lengths], given


def written(run: Callable[..., Tensor], int8: bool) -> list[Tensor]:
    """The queries, both caches, and their scales."""
    (x, *caches), given = to_write(int8)
    q = run(x, HEADS, KV, Rotation("interleaved", 4, 100.0), *caches, **given)
    return [q, *(t.clone() for t in (*caches[:2], *(given[name] for name in ("k_scale", "v_scale") if int8)))]


@pytest.mark.triton
@pytest.mark.parametrize("int8", [False, True], ids=["", "int8"])
def test_an_operator_that_writes_is_what_it_says_and_is_compiled(int8: bool) -> None:
    """Whether the queries are used or not."""
    with Checked() as checked:
        found = written(rope.rope_write, int8)
    assert checked.names == {"rope_write"}
    eager = written(rope.rope_write, int8)
    assert_bitwise_equal(found, eager)
    assert not torch.equal(eager[1], to_write(int8)[0][1])
    torch.compiler.reset()
    for used in (True, False):

        def run(x: Tensor, heads: int, kv_heads: int, rotation: Rotation, *rest: Any, used: bool = used, **given: Any):
            q = torch.ops.seqfuse.rope_write(x, heads, kv_heads, *rotation, *rest, **given)
            return q if used else x + 1

        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        assert_bitwise_equal(written(compiled, int8)[1:], eager[1:])


def test_angles_made_while_tensors_are_fake_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_heads, "_known", {})
    rotation, device = Rotation("half", 6, base=77.0), torch.device("cpu")
    with FakeTensorMode():
        assert isinstance(_heads.frequencies_of(rotation, torch.device("meta")), FakeTensor)
        assert not _heads._known
        found = _heads.frequencies_of(rotation, device)  # on a CPU they can be computed at once
    assert type(found) is Tensor
    assert _heads.frequencies_of(rotation, device) is found


def test_angles_are_there_before_another_stream_may_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where cached tables were computed on the stream of the first call, for which later calls do not
    wait."""
    waited: list[Any] = []
    arange = torch.arange
    stream = SimpleNamespace(synchronize=lambda: waited.append(0))
    monkeypatch.setattr(torch, "arange", lambda *args, device, **rest: arange(*args, **rest))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(_heads, "_known", {})
    for _ in range(2):
        _heads.frequencies_of(Rotation("half", 6), torch.device("cuda:0"))
    assert waited == [0]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    _heads.frequencies_of(Rotation("half", 8), torch.device("cuda:0"))
    assert waited == [0]
