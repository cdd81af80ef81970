"""KVCache: keys and values of the tokens that a model has read."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor, nn

from ..env import bucket
from ..errors import InputError, RangeError, StateError
from ..ops import Attention, _cache
from ..ops._attention import QKV, Scores, attend, decoding_kernels_run, numbers_in


class KVCache:
    """Keys and values of every attention of a model, for a batch of growing sequences.

    `cache.feed(model, x)` runs a model on the next tokens: first the prompt, then one token at a time. The result
    equals that of the model on all tokens so far, at the new tokens. Positions, for RoPE and learned positions,
    continue from the cached tokens. Buffers are allocated at the first call and written in place.

    With int8, each key and value is stored as round(127 t / max |t|) over its D elements, with that scale. Attention
    weights are never dropped, even in training mode.

    Args:
        batch: number of sequences, B.
        max_length: maximum number of tokens of a sequence.
        device: device of `lengths`; must be that of the input.
        int8: whether to store keys and values as int8.

    Attributes:
        lengths: number of tokens of each sequence, int64 [B], on the device.
        max_length: maximum number of tokens of a sequence.

    Raises:
        ValueError: for sizes below one.
    """

    def __init__(
        self, batch: int, max_length: int, *, device: torch.device | str | None = None, int8: bool = False
    ) -> None:
        if batch < 1 or max_length < 1:
            raise ValueError(f"batch and max_length must be at least 1, got {batch} and {max_length}")
        self.batch, self.max_length, self.int8 = batch, max_length, int8
        with torch.inference_mode(False):  # what is made here is written in place later
            self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self._layers: list[CachedAttention] = []
        self._most = 0  # upper bound of the lengths, on the host
        self._alike = True  # whether all sequences have this length
        self._turn = 0
        self._counts: Tensor | None = None
        self._ends: Tensor | None = None  # lengths including the new token, computed once for all attentions of a call
        self._fixed = False  # whether shapes must be the same in each call, as in a graph

    def feed(self, model: nn.Module, x: Tensor, counts: Tensor | None = None, **channels: Tensor) -> Any:
        """Run the model on the next tokens of each sequence, without gradients.

        Args:
            model: the model; must be the same in every call.
            x: token ids [B, S] or embeddings [B, S, E].
            counts: number of valid tokens of each sequence, int [B]; default S. Results for other tokens are undefined.
            channels: public extra inputs of the model.

        Raises:
            InputError: (SF101) for a batch of another size, or counts that are not [B] integers from 0 to S (on a GPU a
                device-side assert).
            StateError: (SF505) if a sequence would exceed `max_length`, or the model's attention does not reach the
                cache, as under `torch.compile`; the cache is then unchanged. Also for keys of another model.
        """
        if x.ndim < 2 or x.shape[0] != self.batch:
            raise InputError(f"the cache has {self.batch} sequences, got x {tuple(x.shape)}", code="SF101")
        rows = x.shape[1]
        if counts is not None:
            _check_counts(counts, self.batch, rows)
        self.reserve(rows, counts)
        self._turn, self._counts, self._ends, kept = 0, counts, None, len(self._layers)
        before = _cache.active.set(self)
        try:
            with torch.no_grad():
                y = model(x, **channels)
            if met := _attention_met(model, self._turn, first=not kept):
                message = f"{met} attention of the model met the cache: a compiled graph has none"
                raise StateError(message, code="SF505", hint="feed the model itself, not compiled")
            if kept and self._turn != kept:
                message = f"the model attended {self._turn} times, and {kept} times before"
                raise StateError(message, code="SF505", hint="feed one model alone")
        except BaseException:
            del self._layers[kept:]
            self._clear_rest()
            raise
        finally:
            _cache.active.reset(before)
            self._counts = None
        self.lengths += rows if counts is None else counts
        self.advance(rows)
        self._alike = self._alike and counts is None
        return y

    def advance(self, rows: int) -> None:
        """Count tokens that a replayed CUDA graph has fed."""
        self._most += rows

    @contextlib.contextmanager
    def rehearsal(self) -> Generator[None]:
        """Context manager to capture a CUDA graph: shapes do not depend on lengths, which are restored."""
        lengths, most, alike = self.lengths.clone(), self._most, self._alike
        self._fixed = True
        try:
            yield
        finally:
            self._fixed = False
            self.lengths.copy_(lengths)
            self._most, self._alike = most, alike

    def reserve(self, rows: int, counts: Tensor | None = None) -> None:
        """Raise (SF505) if this many tokens do not fit, before they are fed or a graph is replayed."""
        if self._most + rows <= self.max_length:
            return
        if not self._fixed:  # the host's bound may be too high: synchronize once
            self._most = int(self.lengths.max())
        taken = rows if counts is None or self._fixed else int((self.lengths + counts).max()) - self._most
        if self._most + taken > self.max_length:
            message = f"a sequence of {self._most} tokens cannot take {taken} more: the cache holds {self.max_length}"
            raise StateError(message, code="SF505", hint="make it with a larger max_length")

    def positions(self, x: Tensor) -> Tensor:
        """Positions of the tokens of x [B, S, C], int64 [B, S]; invalid tokens repeat the last valid one."""
        positions = self.lengths.unsqueeze(1) + torch.arange(x.shape[1], device=x.device)
        if self._counts is None:
            return positions.clamp_(max=self.max_length - 1)
        return positions.clamp_(max=(self.lengths + self._counts - 1).unsqueeze(1)).clamp_(min=0)

    def attend(self, attention: Attention, x: Tensor) -> Tensor:
        """Append keys and values of packed x [B, S, C]; attention over all tokens so far, [B, S, H D]."""
        y = self.decode(attention, x, functools.partial(_write_row, attention))
        if y is not None:
            return y
        q, k, v = attention.heads_of(x)
        layer, positions = self._next(k), self.positions(x)
        layer.write(k, v, positions, self._taken(positions))
        rows, first = x.shape[1], not self._most
        if first and self._counts is None and not self._fixed and not self.int8:
            how = Scores(attention.scale_of(x), True, attention.window, attention.softcap)
            qkv = q, k, v
        else:
            total = self.max_length if self._fixed else min(self._most + rows, self.max_length)
            mask = self._seen(positions, total, attention.window)
            how = Scores(attention.scale_of(x), False, None, attention.softcap, mask=mask)
            qkv = layer.read(q, total)
        return attend(qkv, how, how.kernel(qkv[0], qkv[1]))[0].flatten(2)

    def decode(self, attention: Attention, x: Tensor, write: Callable[..., Tensor]) -> Tensor | None:
        """Attention of one new token per sequence with kernels; `None`, without changes, if they do not support it.

        Args:
            attention: the attention that calls it.
            x: packed token, [B, 1, C].
            write: `write(row, k=, v=, lengths=, k_scale=, v_scale=)` stores keys and values of tokens [B, C] and
                returns their queries [B, H, D].
        """
        _check(attention)
        _, k, _ = attention.heads_of(x)
        one = x.ndim == 3 and x.shape[1] == 1 and self._counts is None
        # With int8, the kernel supports float32 queries only for narrow heads.
        fits = not self.int8 or x.dtype is not torch.float32 or k.shape[-1] <= 128
        if not one or not fits or not decoding_kernels_run(x, k.shape[-1]):
            return None
        from ..kernels.decode import decode_attention

        turn, layer = self._turn, self._next(k)
        # Rounded up, so that the next step can replay this one; the kernels read the lengths.
        total = self.max_length if self._fixed else min(bucket(self._most + 1), self.max_length)
        kept = {"k": layer.keys, "v": layer.values, "k_scale": layer.key_scales, "v_scale": layer.value_scales}
        named = {name: None if t is None else t[:, :, :total] for name, t in kept.items()}
        caches: dict[str, Any] = {n: t.squeeze(-1) if t is not None and "scale" in n else t for n, t in named.items()}
        if self._ends is None:
            self._ends = self.lengths + 1  # for a full sequence the kernel reads only existing tokens
        limits: dict[str, Any] = {"window": attention.window, "softcap": attention.softcap}
        try:
            q = write(x.squeeze(1), lengths=self.lengths, **caches)
            y = decode_attention(q, lengths=self._ends, scale=attention.scale_of(x), **caches, **limits)
        except Exception:
            self._turn = turn  # after a failed fusion, the unfused operations write the same tokens again
            raise
        return y.flatten(1).unsqueeze(1)

    def _next(self, k: Tensor) -> CachedAttention:
        """The cache of the next attention in the order of the model, for keys like k."""
        if self._turn == len(self._layers):
            self._layers.append(CachedAttention.empty(k, self.max_length, int8=self.int8))
        self._layers[self._turn].check(k)
        self._turn += 1
        return self._layers[self._turn - 1]

    def _seen(self, positions: Tensor, total: int, window: int | None) -> Tensor | None:
        """Mask of the keys that each token attends to, [B, 1, S, total]; `None` for all."""
        if positions.shape[1] == 1 and self._alike and not self._fixed and (window is None or total <= window):
            return None
        key, row = torch.arange(total, device=positions.device), positions.unsqueeze(-1)
        seen = key <= row
        if window is not None:
            seen &= row - key < window
        taken = self._taken(positions)
        return (seen if taken is None else seen & taken.unsqueeze(-1)).unsqueeze(1)

    def _taken(self, positions: Tensor) -> Tensor | None:
        """Which tokens of each sequence are valid, [B, S]; `None` for all."""
        if self._counts is None:
            return None
        return torch.arange(positions.shape[1], device=positions.device) < self._counts.unsqueeze(1)

    def reorder(self, index: Tensor) -> None:
        """Replace sequence b by sequence `index[b]`, as in beam search; in place.

        Raises:
            InputError: (SF101) for an index that is not [B] integers.
            RangeError: (SF107) for a sequence that the cache does not have (on a GPU a device-side assert; under
                `torch.compile` an error of torch).
        """
        if index.shape != (self.batch,) or index.dtype not in (torch.int64, torch.int32):
            got = f"{index.dtype} {tuple(index.shape)}"
            raise InputError(f"expects an int64 or int32 index [{self.batch}], got {got}", code="SF101")
        most = self._most
        if torch.compiler.is_compiling():  # one graph for any cache; Inductor would count negative ones from the end
            most, index = self.max_length, torch.where(index < 0, self.batch, index)
        elif not index.is_cuda and ((index < 0) | (index >= self.batch)).any():
            raise RangeError(f"the cache has {self.batch} sequences, got the index {numbers_in(index)}", code="SF107")
        for layer in self._layers:
            for t in layer.tensors():
                used = t[:, :, :most]
                used.copy_(used.index_select(0, index))
        self.lengths.copy_(self.lengths.index_select(0, index))

    def truncate(self, lengths: int | Tensor) -> None:
        """Keep only the first tokens of each sequence, to continue from a prefix.

        Raises:
            ValueError: for a negative number.
        """
        if isinstance(lengths, int):
            if lengths < 0:
                raise ValueError(f"lengths must not be negative, got {lengths}")
            self._most = min(self._most, lengths)
        self.lengths.copy_(torch.minimum(self.lengths, torch.as_tensor(lengths, device=self.lengths.device)).clamp_(0))
        self._alike = self._alike and isinstance(lengths, int)
        self._clear_rest()

    def _clear_rest(self) -> None:
        """Zero all entries after the last token of each sequence: a NaN there, times a weight of zero, is NaN."""
        gone = torch.arange(self.max_length, device=self.lengths.device) >= self.lengths.unsqueeze(1)
        for layer in self._layers:
            for t in layer.tensors():
                t.masked_fill_(gone.view(self.batch, 1, -1, 1), 0)

    def expand(self, batch: int) -> KVCache:
        """A cache of `batch` copies of its single sequence, to continue from a common prefix.

        Raises:
            InputError: (SF101) if it has several sequences.
        """
        if self.batch != 1:
            raise InputError(f"only a cache of one sequence can be expanded, not of {self.batch}", code="SF101")
        new = KVCache(batch, self.max_length, device=self.lengths.device, int8=self.int8)
        new.lengths.copy_(self.lengths.expand(batch))
        new._layers = [layer.expand(batch) for layer in self._layers]
        new._most, new._alike = self._most, self._alike
        return new

    def __repr__(self) -> str:
        kind = ", int8=True" if self.int8 else ""
        return (
            f"KVCache({self.batch}, {self.max_length}{kind}) of {len(self._layers)} layers, at most {self._most} tokens"
        )


def _check_counts(counts: Tensor, batch: int, rows: int) -> None:
    if counts.shape != (batch,) or counts.is_floating_point() or counts.is_complex():
        got = f"{counts.dtype} {tuple(counts.shape)}"
        raise InputError(f"expects integer counts [{batch}], got {got}", code="SF101")
    wrong = ((counts < 0) | (counts > rows)).any()
    if counts.is_cuda:  # without synchronization
        torch._assert_async(~wrong)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    elif wrong:
        raise InputError(f"expects counts of 0 to {rows}, got {numbers_in(counts)}", code="SF101")


def _check(attention: Attention) -> None:
    if not attention.causal or attention.mask is not None or attention.cu_seqlens is not None:
        raise StateError("a cache holds keys of causal attention without a mask", code="SF505")


def _write_row(attention: Attention, row: Tensor, **caches: Any) -> Tensor:
    """Write the keys and values of tokens [B, C] into the cache unchanged; returns their queries [B, H, D]."""
    from ..kernels.rope import rope_write

    return rope_write(row, attention.heads, attention.kv_heads, None, **caches)


@dataclasses.dataclass(slots=True)
class CachedAttention:
    """Keys and values of one attention, [B, Hkv, max, D]; int8 ones with a scale per vector, [B, Hkv, max, 1]."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    @classmethod
    def empty(cls, k: Tensor, length: int, *, int8: bool) -> CachedAttention:
        """An empty cache for `length` keys like k [B, Hkv, S, D]."""
        shape = (*k.shape[:2], length, k.shape[3])
        with torch.inference_mode(False):
            if not int8:
                return cls(k.new_zeros(shape), k.new_zeros(shape))
            whole, scales = k.new_zeros(shape, dtype=torch.int8), k.new_zeros((*shape[:3], 1), dtype=torch.float32)
            return cls(whole, whole.clone(), scales, scales.clone())

    def tensors(self) -> list[Tensor]:
        """All its tensors."""
        return [t for t in (self.keys, self.values, self.key_scales, self.value_scales) if t is not None]

    def expand(self, batch: int) -> CachedAttention:
        """A cache of `batch` copies of its single sequence."""
        with torch.inference_mode(False):
            return CachedAttention(*[t.expand(batch, -1, -1, -1).clone() for t in self.tensors()])

    def check(self, k: Tensor) -> None:
        """Raise (SF505) for keys of another shape or dtype than the cached ones."""
        kept = self.keys.shape[1], self.keys.shape[3], k.dtype if self.key_scales is not None else self.keys.dtype
        got = k.shape[1], k.shape[3], k.dtype
        if got != kept:
            said, wanted = (f"{heads} key heads of {size} in {dtype}" for heads, size, dtype in (got, kept))
            raise StateError(f"the cache holds {wanted}, got {said}", code="SF505", hint="feed one model alone")

    def write(self, k: Tensor, v: Tensor, positions: Tensor, taken: Tensor | None) -> None:
        """Store tokens k, v [B, Hkv, S, D] at their positions [B, S]: all, or those in `taken` [B, S].

        The position of an invalid token is that of the last valid one, or of a cached one.
        """
        sequence = torch.arange(k.shape[0], device=k.device).unsqueeze(1)
        for whole, scales, new in ((self.keys, self.key_scales, k), (self.values, self.value_scales, v)):
            rows = new.transpose(1, 2)  # [B, S, Hkv, D]
            if scales is not None:
                scale = rows.abs().amax(-1, keepdim=True).float() / 127
                rows = (rows.float() / scale.clamp(min=1e-30)).clamp_(-127, 127)
                rows = (rows + 0.5 * rows.sign()).to(torch.int8)  # half away from zero, as the kernels round
                _put(scales, sequence, positions, scale, taken)
            _put(whole, sequence, positions, rows, taken)

    def read(self, q: Tensor, total: int) -> QKV:
        """Queries with the first `total` keys and values, in the dtype of q."""
        keys, values = self.keys[:, :, :total], self.values[:, :, :total]
        if self.key_scales is None or self.value_scales is None:
            return q, keys, values
        scales = self.key_scales[:, :, :total], self.value_scales[:, :, :total]
        return q, (keys * scales[0]).to(q.dtype), (values * scales[1]).to(q.dtype)


def _put(whole: Tensor, sequence: Tensor, positions: Tensor, rows: Tensor, taken: Tensor | None) -> None:
    """Write tokens [B, S, Hkv, *] at their positions of [B, Hkv, max, *]; invalid tokens change nothing."""
    places = whole.transpose(1, 2)
    if taken is not None:
        # Several tokens may have the same position, in undefined order: all of them write the same value.
        last = (taken.sum(1, keepdim=True) - 1).clamp_(min=0)
        source = torch.arange(rows.shape[1], device=rows.device).expand_as(taken).minimum(last)
        rows = torch.where(taken[:, :1, None, None], rows[sequence, source], places[sequence, positions])
    places[sequence, positions] = rows.to(whole.dtype)


def _attention_met(model: Any, met: int, *, first: bool) -> str:
    """How much attention used the cache, if compiled graphs bypassed it somewhere; else empty.

    Later calls are compared with the number of the first call, so only the first call walks over the model.
    """
    if not isinstance(model, nn.Module) or (met and not first):
        return ""
    there = sum(isinstance(part, Attention) for part in model.modules())
    if not met or not there:
        return "no" if there else ""
    return f"only {met} of {there} parts with" if met < there and any(map(_compiled, model.modules())) else ""


def _compiled(part: nn.Module) -> bool:
    """Whether a module was returned by `torch.compile`, or its `compile` was called."""
    compiled: object = getattr(part, "_compiled_call_impl", None)
    return compiled is not None or hasattr(part, "_orig_mod")
