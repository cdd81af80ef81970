"""What is kept of one attention, in its own dtype or as int8."""

from __future__ import annotations

import contextlib
import dataclasses

import torch
from torch import Tensor

from ..errors import StateError
from ..ops._attention import QKV


def lasting() -> contextlib.AbstractContextManager[None]:
    """Within the block, tensors are made that may be written in place later, in whatever mode they are made."""
    return torch.inference_mode(False)


@dataclasses.dataclass(slots=True)
class Layer:
    """Keys and values of one attention, [B, Hkv, max, D]; int8 ones with a scale each, [B, Hkv, max, 1]."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    @classmethod
    def empty(cls, k: Tensor, length: int, *, int8: bool) -> Layer:
        """Room for so many keys like k [B, Hkv, S, D]."""
        shape = (*k.shape[:2], length, k.shape[3])
        with lasting():
            if not int8:
                return cls(k.new_zeros(shape), k.new_zeros(shape))
            whole, scales = k.new_zeros(shape, dtype=torch.int8), k.new_zeros((*shape[:3], 1), dtype=torch.float32)
            return cls(whole, whole.clone(), scales, scales.clone())

    def tensors(self) -> list[Tensor]:
        """Everything in it."""
        return [t for t in (self.keys, self.values, self.key_scales, self.value_scales) if t is not None]

    def expand(self, batch: int) -> Layer:
        """So many copies of the one sequence."""
        with lasting():
            return Layer(*[t.expand(batch, -1, -1, -1).clone() for t in self.tensors()])

    def check(self, k: Tensor) -> None:
        """Refuse keys that are not like those kept (SF505)."""
        kept = self.keys.shape[1], self.keys.shape[3], k.dtype if self.key_scales is not None else self.keys.dtype
        got = k.shape[1], k.shape[3], k.dtype
        if got != kept:
            said, wanted = (f"{heads} key heads of {size} in {dtype}" for heads, size, dtype in (got, kept))
            raise StateError(f"the cache holds {wanted}, got {said}", code="SF505", hint="feed one model alone")

    def write(self, k: Tensor, v: Tensor, positions: Tensor, taken: Tensor | None) -> None:
        """Keep rows k, v [B, Hkv, S, D] at their positions [B, S]: all, or those of `taken` [B, S].

        Of what is not taken the position is that of the last row that is, or of one that is kept.
        """
        sequence = torch.arange(k.shape[0], device=k.device).unsqueeze(1)
        for whole, scales, new in ((self.keys, self.key_scales, k), (self.values, self.value_scales, v)):
            rows = new.transpose(1, 2)  # [B, S, Hkv, D]
            if scales is not None:
                scale = rows.abs().amax(-1, keepdim=True).float() / 127
                rows = (rows.float() / scale.clamp(min=1e-30)).clamp_(-127, 127)
                rows = (rows + 0.5 * rows.sign()).to(torch.int8)  # a half away from zero, as the kernels round it
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
    """Write rows [B, S, Hkv, *] at their positions of [B, Hkv, max, *]; those that are not taken change nothing."""
    places = whole.transpose(1, 2)
    if taken is not None:
        # Several rows go to one place, in no certain order: to it all of them bring the same.
        last = (taken.sum(1, keepdim=True) - 1).clamp_(min=0)
        source = torch.arange(rows.shape[1], device=rows.device).expand_as(taken).minimum(last)
        rows = torch.where(taken[:, :1, None, None], rows[sequence, source], places[sequence, positions])
    places[sequence, positions] = rows.to(whole.dtype)
