"""Attention of one token over a cache, against its math in float64 written out here."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqfuse.inference.kvcache import CachedAttention
from seqfuse.kernels import decode, rope
from seqfuse.testing import (
    REGIMES,
    Untouched,
    assert_bitwise_equal,
    exact,
    in_regime,
    seeded_randn,
)
from seqfuse.testing.judge import judge
from seqfuse.testing.tensors import redrawn

from .conftest import DEVICE
from .references import attention_in_torch

LENGTHS = [0, 1, 37, 200, 128]
ROWS = 200


def truth(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, wide: bool = True, window: int | None = None, **how: Any
) -> Tensor:
    """In float64, or rounded after each GEMM as torch would; rows that no query sees are not read."""
    kind, rows = torch.float64 if wide else q.dtype, torch.arange(k.shape[2], device=q.device)
    seen = rows < lengths.unsqueeze(1)
    seen &= rows >= lengths.unsqueeze(1) - (k.shape[2] if window is None else window)
    seen = seen[:, None, :, None]
    k, v = (torch.where(seen, t.to(kind), 0) for t in (k, v))
    if how.get("k_scale") is not None:
        k, v = (
            torch.where(seen, t * how[f"{name}_scale"].unsqueeze(-1).to(kind), 0) for name, t in (("k", k), ("v", v))
        )
    limits = {name: how.get(name) for name in ("scale", "softcap")}
    of = (q.unsqueeze(2), k, v), torch.zeros_like(q).unsqueeze(1)
    (y, *_), *_ = attention_in_torch(*of, {**limits, "mask": seen.mT}, kind)
    return y.squeeze(1)


def drawn(heads: int, kv_heads: int, size: int, dtype: torch.dtype, int8: bool = False) -> dict[str, Tensor]:
    batch = len(LENGTHS)
    tensors = {"q": seeded_randn((batch, heads, size), 0, dtype=dtype), "lengths": torch.tensor(LENGTHS)}
    for i, name in enumerate(("k", "v"), start=1):
        cache = seeded_randn((batch, kv_heads, ROWS, size), i)
        if int8:
            tensors[f"{name}_scale"] = cache.abs().amax(-1) / 127
            cache = (cache / tensors[f"{name}_scale"].unsqueeze(-1)).round().to(torch.int8)
        tensors[name] = cache if int8 else cache.to(dtype)
    return {name: t.to(DEVICE) for name, t in tensors.items()}


def forget(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The worst values for rows that no query may see."""
    for b, length in enumerate(LENGTHS):
        for name in ("k", "v", "k_scale", "v_scale"):
            if name in tensors:
                tensors[name][b, :, length:] = 127 if tensors[name].dtype is torch.int8 else torch.nan
    return tensors


HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 50},
    "softcap": {"softcap": 2.0, "scale": 0.7},
    "wide softcap": {"softcap": 1000.0},
    "both": {"window": 3, "softcap": 1.0},
}
HEADS = [(4, 4, 16), (6, 2, 24), (36, 1, 64), (8, 2, 100)]  # 36: more than a program takes at once in any dtype
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check(tensors: dict[str, Tensor], how: dict[str, Any], k: ModuleType = decode) -> None:
    def measure(seed: int) -> tuple[Tensor, ...]:
        drawn = {name: redrawn(t, seed) for name, t in tensors.items()}
        with Untouched(drawn):
            ours = k.decode_attention(**drawn, **how)
        return ours, truth(**drawn, **how, wide=False), truth(**drawn, **how)

    judge(measure, 0)


@pytest.mark.parametrize("int8", [False, True], ids=["", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", HOW)
def test_is_its_math(how: str, dtype: torch.dtype, int8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "processors", lambda device: 10)
    at = list(HOW).index(how) + DTYPES.index(dtype) + int8
    check(forget(drawn(*HEADS[at % 4], dtype, int8)), HOW[how])


@pytest.mark.parametrize("processors", [1, 4, 1000])
def test_the_number_of_splits_is_of_no_consequence(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "processors", lambda device: processors)
    monkeypatch.setattr(decode, "_block_n", lambda *_: 16)
    tensors = forget(drawn(6, 2, 16, torch.float32))
    for how in ("plain", "window"):
        torch.testing.assert_close(decode.decode_attention(**tensors, **HOW[how]), truth(**tensors, **HOW[how]).float())


def test_splits_follow_heads_rows_and_processors() -> None:
    assert decode.splits_of(8, 32768, 64, 264) == 32
    assert decode.splits_of(64, 32768, 64, 264) == 4
    assert decode.splits_of(128, 32768, 128, 132) == 1
    assert decode.splits_of(1024, 32768, 64, 264) == 1
    assert decode.splits_of(8, 100, 64, 264) == 2


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_regime_of_numbers(regime: str, dtype: torch.dtype) -> None:
    tensors = drawn(6, 2, 24, dtype)
    for i, name in enumerate(("q", "k", "v")):
        tensors[name] = in_regime(regime, tuple(tensors[name].shape), i, dtype=dtype).to(DEVICE)
    check(forget(tensors), {"softcap": 4.0} if regime == "heavy" else {})


def test_small_values_of_an_int8_cache_keep_their_digits_in_float16() -> None:
    tensors = drawn(4, 2, 32, torch.float16, int8=True)
    tensors["v_scale"] *= 1e-3
    right = truth(**tensors)
    assert (decode.decode_attention(**forget(tensors)) - right).norm() < 1e-3 * right.norm()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("of", ["q", "k", "v"])
def test_one_bad_number_spoils_what_it_spoils_in_torch(of: str, value: float) -> None:
    tensors = drawn(4, 2, 16, torch.float32)
    tensors["q"][3, 2:, 5] = torch.tensor([1.0, -1.0])  # of an infinite score one becomes NaN, one nothing
    tensors[of][(3, 1, 5) if of == "q" else (3, 1, 40, 5)] = value
    expected = truth(**tensors, wide=False)
    assert torch.equal(decode.decode_attention(**tensors).isfinite(), expected.isfinite())
    assert 0 < (~expected.isfinite()).sum() < expected.numel()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_scores_average_exactly(dtype: torch.dtype) -> None:
    """Each of 2^n equal scores has weight 2^-n, and sums of small integers are exact."""
    shape = (3, 2, 64, 16)
    q, k = torch.zeros(3, 4, 16, dtype=dtype, device=DEVICE), exact("integers", shape, 0, dtype=dtype).to(DEVICE)
    v, lengths = exact("integers", shape, 1, dtype=dtype).to(DEVICE), torch.tensor([64, 16, 1], device=DEVICE)
    y = decode.decode_attention(q, k, v, lengths)
    means = [v[b, :, :n].double().mean(1).repeat_interleave(2, 0) for b, n in enumerate(lengths.tolist())]
    assert_bitwise_equal(y, torch.stack(means).to(dtype))


def test_a_sequence_of_no_rows_gives_zeros() -> None:
    tensors = drawn(4, 2, 16, torch.float32)
    y = decode.decode_attention(**{**tensors, "lengths": torch.zeros(len(LENGTHS), dtype=torch.int32, device=DEVICE)})
    assert_bitwise_equal(y, torch.zeros_like(y))
    empty = {name: t[:, :, :0] if name in "kv" else t for name, t in tensors.items()}
    assert not decode.decode_attention(**empty).any()


def test_a_length_beyond_the_cache_sees_all_of_it_and_no_more() -> None:
    tensors = drawn(4, 2, 16, torch.float32)
    tensors |= {name: F.pad(tensors[name], (0, 0, 0, 9), value=torch.nan)[:, :, :ROWS] for name in "kv"}
    lengths = torch.full_like(tensors["lengths"], ROWS)
    whole = decode.decode_attention(**{**tensors, "lengths": lengths})
    assert whole.isfinite().all()
    assert_bitwise_equal(decode.decode_attention(**{**tensors, "lengths": lengths + 5}), whole)


def test_caches_may_have_any_strides() -> None:
    tensors = drawn(4, 2, 16, torch.float32)
    turned = {
        name: t.transpose(1, 2).contiguous().transpose(1, 2) if name in "kv" else t for name, t in tensors.items()
    }
    assert_bitwise_equal(decode.decode_attention(**turned), decode.decode_attention(**tensors))
    apart = {name: F.pad(t, (1, 4), value=torch.nan)[..., 1:-4] if name in "qkv" else t for name, t in tensors.items()}
    assert_bitwise_equal(decode.decode_attention(**apart), decode.decode_attention(**tensors))


def write(k_new: Tensor, v_new: Tensor, k: Tensor, v: Tensor, lengths: Tensor, **scales: Tensor) -> Tensor:
    """Without bias, norm and RoPE; the queries are the keys."""
    packed = torch.cat((k_new, k_new, v_new), 1).flatten(1)
    return rope.rope_write(packed, k.shape[1], k.shape[1], None, k, v, lengths, **scales)


def test_a_new_row_is_written_where_there_is_room() -> None:
    tensors = drawn(4, 2, 24, torch.bfloat16)
    k, v, lengths = (tensors[name].clone() for name in ("k", "v", "lengths"))
    new = [seeded_randn((len(LENGTHS), 2, 24), 9 + i, dtype=torch.bfloat16).to(DEVICE) for i in range(2)]
    assert_bitwise_equal(write(*new, k, v, lengths), new[0])
    for b, length in enumerate(LENGTHS):
        for mine, row, before in ((k, new[0], tensors["k"]), (v, new[1], tensors["v"])):
            want = before[b].clone()
            if length < ROWS:
                want[:, length] = row[b]
            assert_bitwise_equal(mine[b].clone(), want)


def test_an_int8_cache_gets_rows_and_their_scales() -> None:
    tensors = drawn(4, 2, 24, torch.float32, int8=True)
    new = [seeded_randn((len(LENGTHS), 2, 24), 9 + i).to(DEVICE) for i in range(2)]
    new[0][1] = 0
    caches = {name: tensors[name].clone() for name in ("k", "v", "k_scale", "v_scale")}
    write(*new, lengths=tensors["lengths"], **caches)
    for b, length in enumerate(LENGTHS):
        for name, row in zip(("k", "v"), new, strict=True):
            if length < ROWS:
                scale = caches[f"{name}_scale"][b, :, length]
                torch.testing.assert_close(scale, row[b].abs().amax(-1) / 127)
                found = caches[name][b, :, length] * scale.unsqueeze(-1)
                assert ((found - row[b]).abs() <= 0.501 * scale.unsqueeze(-1)).all()
            assert_bitwise_equal(caches[name][b, :, :length].clone(), tensors[name][b, :, :length].clone())


def test_a_kernel_and_a_prefill_write_the_same_bits_halves_too() -> None:
    rows = torch.cat((torch.arange(-64.0, 64.0) + 0.5, torch.tensor([127.0])))[None, None]  # scale 1
    rows = torch.cat((rows, seeded_randn((1, 1, 129), 1)), 1)[..., 1:].to(DEVICE)  # [B, Hkv, D]
    by_prefill = CachedAttention.empty(rows[:, :, None], 1, int8=True)
    by_prefill.write(rows[:, :, None], -rows[:, :, None], torch.zeros(1, 1, dtype=torch.int64, device=DEVICE), None)
    k, v, k_scale, v_scale = (torch.zeros_like(t) for t in by_prefill.tensors())
    lengths = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    write(rows, -rows, k, v, lengths, k_scale=k_scale[..., 0], v_scale=v_scale[..., 0])
    for written, wanted in zip((k, v, k_scale, v_scale), by_prefill.tensors(), strict=True):
        torch.testing.assert_close(written, wanted, rtol=0, atol=0)


def test_a_row_of_an_int8_cache_with_a_nan_is_nan() -> None:
    k, v, scales = torch.zeros(1, 2, 3, 24), torch.zeros(1, 2, 3, 24), torch.ones(2, 1, 2, 3)
    new = seeded_randn((2, 1, 2, 24), 3)
    new[0, 0, 1, 5] = torch.nan
    tensors = [t.to(DEVICE) for t in (*new, k.to(torch.int8), v.to(torch.int8), torch.tensor([2]))]
    k_scale, v_scale = (t.to(DEVICE) for t in scales)
    write(*tensors, k_scale=k_scale, v_scale=v_scale)
    assert k_scale.isnan().nonzero().tolist() == [[0, 1, 2]]
    assert not v_scale.isnan().any()


def test_what_does_not_fit_is_refused() -> None:
    tensors = drawn(4, 2, 16, torch.float32)
    caches = torch.zeros(len(LENGTHS), 3, 8, 16, device=DEVICE)
    with pytest.raises(ValueError, match="3 key heads must divide 4 heads"):
        decode.decode_attention(tensors["q"], caches, caches, tensors["lengths"])
    with pytest.raises(ValueError, match=r"lengths must be int32 or int64 \(5,\)"):
        decode.decode_attention(**{**tensors, "lengths": tensors["lengths"].float()})
    with pytest.raises(ValueError, match="lengths must be contiguous"):
        decode.decode_attention(**{**tensors, "lengths": tensors["lengths"][:1].expand(len(LENGTHS))})
    with pytest.raises(ValueError, match="k_scale is given with an int8 cache"):
        decode.decode_attention(**{name: t.to(torch.int8) if name in "kv" else t for name, t in tensors.items()})
    with pytest.raises(ValueError, match="float32 queries of at most 128 elements, got 136"):
        decode.decode_attention(**drawn(2, 1, 136, torch.float32, int8=True))
    quantized = drawn(4, 2, 16, torch.float16, int8=True)
    quantized["v_scale"] = quantized["v_scale"].mT.contiguous().mT
    with pytest.raises(ValueError, match="k_scale and v_scale must have one layout"):
        decode.decode_attention(**quantized)
    with pytest.raises(ValueError, match="window and softcap must be positive"):
        decode.decode_attention(**tensors, window=0)
