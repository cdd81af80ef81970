"""RotaryEmbedding: queries and keys turned by angles that grow with their position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from .. import operation as sf
from ._attention import head_size, unflatten
from ._cache import current
from ._norm import stats_dtype
from ._takes import broadcasting, floating


class RotaryEmbedding(sf.UnfusedOperation):
    """Turns pairs of elements of each query and key head, in x = [q; k; v] packed along the last dimension.

    Forward, for pair i < R / 2 of a head at position t, with a = t base^(-2 i / R):
    y_1 = x_1 cos a - x_2 sin a, y_2 = x_2 cos a + x_1 sin a. The pair is elements i and i + R / 2 with `style="half"`,
    2 i and 2 i + 1 with `style="interleaved"`. Elements from R on and the values pass as they are.

    Backward: the same by -a.

    x, y: [*, S, (H + 2 Hkv) D]; positions: [S], or broadcast to [*, S]. Angles are float32 (float64 for float64), and
    so are the products, rounded to the dtype of x once.
    Saved: positions.
    Source: Su et al. 2021, arXiv:2104.09864.

    Args:
        heads: H.
        kv_heads: Hkv; H by default.
        style: which elements are a pair.
        base: of the geometric row of angles.
        rotary_dim: R, even and at most D; D by default.
        positions: channel of the positions; 0..S-1 by default.

    Raises:
        ValueError: for another style, or a `rotary_dim` that is odd.
        InputError: (SF101) for x that is not floating-point, and positions that are bool or do not broadcast.
    """

    class Saved(sf.Saved):
        positions: Tensor | None  # [*, S]

    def __init__(
        self,
        heads: int,
        kv_heads: int | None = None,
        *,
        style: Literal["half", "interleaved"],
        base: float = 10000.0,
        rotary_dim: int | None = None,
        positions: str | None = None,
    ) -> None:
        super().__init__()
        if style not in ("half", "interleaved"):
            raise ValueError(f'style must be "half" or "interleaved", got {style!r}')
        if rotary_dim is not None and (rotary_dim < 2 or rotary_dim % 2):
            raise ValueError(f"rotary_dim must be even and at least 2, got {rotary_dim}")
        self.heads, self.kv_heads = heads, heads if kv_heads is None else kv_heads
        self.style, self.base, self.rotary_dim, self.positions = style, base, rotary_dim, positions

    @property
    def channels(self) -> Mapping[str, str | None]:
        return {} if self.positions is None else {"position_ids": self.positions}

    def reference(self, x: Tensor, *, position_ids: Tensor | None = None) -> Tensor:
        turned, rest, values = self._parts(x)
        cos, sin = self.angles(x, position_ids)
        t = turned.to(cos.dtype)
        if self.style == "half":
            first, second = t.chunk(2, -1)
            t = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        else:
            first, second = t[..., ::2], t[..., 1::2]
            t = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
        heads = torch.cat((t.to(x.dtype), rest), -1)
        return torch.cat((heads, values), -2).flatten(-2)

    def fwd(self, x: Tensor, *, position_ids: Tensor | None = None) -> tuple[Tensor, Saved]:
        return self._turned(x, position_ids, 1), self.Saved(positions=position_ids)

    def bwd(self, dy: Tensor, saved: Saved) -> tuple[Tensor, sf.Grads]:
        return self._turned(dy, saved.positions, -1), {}

    def angles(self, x: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each position and pair, [*, S, 1, R / 2]."""
        floating(x, "RotaryEmbedding")
        stats = stats_dtype(x)
        length = x.shape[-2]
        size = self._sizes(x)[1]
        cache = current()
        if positions is None:
            positions = torch.arange(length, device=x.device) if cache is None else cache.positions(x)
        else:
            broadcasting(positions, x, "RotaryEmbedding")
        powers = torch.arange(0, size, 2, dtype=torch.float64, device=x.device) / -size
        angle = positions.to(stats).unsqueeze(-1) * self.base ** powers.to(stats)
        return angle.cos().unsqueeze(-2), angle.sin().unsqueeze(-2)

    def _sizes(self, x: Tensor) -> tuple[int, int]:
        size = x.shape[-1] // (self.heads + 2 * self.kv_heads)
        return size, self.rotary_dim or size

    def _parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What is turned of each query and key head, what is not, and the value heads."""
        size, turned = self._sizes(x)
        heads = unflatten(x, -1, -1, size)
        known = self.heads + self.kv_heads
        return heads[..., :known, :turned], heads[..., :known, turned:], heads[..., known:, :]

    def _turned(self, x: Tensor, positions: Tensor | None, sign: int) -> Tensor:
        cos, sin = self.angles(x, positions)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        for mine, its in zip(self._parts(y)[1:], self._parts(x)[1:], strict=True):
            mine.copy_(its)
        out, t = self._parts(y)[0], self._parts(x)[0].to(cos.dtype)
        half = t.shape[-1] // 2
        one, two = (slice(half), slice(half, None)) if self.style == "half" else (slice(0, None, 2), slice(1, None, 2))
        first, second = t[..., one], t[..., two]
        out[..., one] = torch.addcmul(first * cos, second, sin, value=-sign)
        out[..., two] = torch.addcmul(second * cos, first, sin, value=sign)
        return y

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        size = head_size(shape, self.heads, self.kv_heads)
        if (self.rotary_dim or size) > size or (self.rotary_dim is None and size % 2):
            raise ValueError(f"turns {self.rotary_dim or 'all'} elements of a head, got heads of {size}")
        return shape

    @classmethod
    def example(cls, x: Tensor) -> RotaryEmbedding:
        if x.shape[-1] % 6:
            raise ValueError(f"no even heads fit in a last dimension of {x.shape[-1]}; give the operation explicitly")
        return cls(1, style="half")

    def extra_repr(self) -> str:
        text = f"{self.heads}" + (f", {self.kv_heads}" if self.kv_heads != self.heads else "")
        text += f", style={self.style!r}, base={self.base:g}"
        named = {"rotary_dim": self.rotary_dim, "positions": self.positions}
        return text + "".join(f", {name}={value!r}" for name, value in named.items() if value is not None)
