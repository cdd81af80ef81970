"""RotaryEmbedding: rotary position embedding (RoPE) of queries and keys."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from .. import operation as sf
from ..env import Env
from ..errors import InputError
from ._attention import head_size
from ._cache import current
from ._tensors import broadcasts, check_positions, floating, stats_dtype

# The most elements of a table of angles that is cached.
_KEPT_ANGLES = 1 << 20


class RotaryEmbedding(sf.UnfusedOperation):
    """RoPE of each query and key head, in x = [q; k; v] packed along the last dimension.

    Forward, for pair i < R / 2 of a head at position t, with a = t base^(-2 i / R):
    y_1 = x_1 cos a - x_2 sin a, y_2 = x_2 cos a + x_1 sin a. The pair is elements i and i + R / 2 with `style="half"`,
    2 i and 2 i + 1 with `style="interleaved"`. Elements from R on and values are unchanged.
    With channels `cos` and `sin` the angles are inputs, per pair or per element, as in x cos + rotate(x) sin; y_1 = x_1
    cos_1 - x_2 sin_1, y_2 = x_2 cos_2 + x_1 sin_2.

    Backward: the transpose, RoPE by -a: dx_1 = dy_1 cos_1 + dy_2 sin_2, dx_2 = dy_2 cos_2 - dy_1 sin_1. dcos_1 = dy_1
    x_1, dcos_2 = dy_2 x_2, dsin_1 = -dy_1 x_2, dsin_2 = dy_2 x_1, summed over heads and broadcast dimensions.

    x, y: [*, S, (H + 2 Hkv) D]; positions: [S], or broadcast to [*, S]; cos, sin: [S, R] or [S, R / 2], or broadcast to
    [*, S, R] or [*, S, R / 2]. Computed in float32 (float64 for float64) and rounded to the dtype of x once.
    Saved: positions, cos, sin; x for the gradients of cos and sin.
    Source: Su et al. 2021, arXiv:2104.09864.

    Args:
        heads: H.
        kv_heads: Hkv; default H. With 0, x is only queries or only keys: [*, S, H D].
        style: `"half"` or `"interleaved"` pairs.
        base: base of the angles.
        rotary_dim: R, even and at most D; default D.
        positions: channel of the positions; default 0..S-1.
        cos: channel of the cosines, with `sin` and without `positions`; `base` is ignored.
        sin: channel of the sines.

    Raises:
        ValueError: for another style, a `rotary_dim` that is odd, `cos` without `sin` or with `positions`.
        InputError: (SF101) for a non-floating x, positions that are bool or do not broadcast, or cos and sin of another
            shape.
    """

    class Saved(sf.Saved):
        positions: Tensor | None  # [*, S]
        cos: Tensor | None  # [*, S, R] or [*, S, R / 2]
        sin: Tensor | None  # the same
        x: Tensor | None  # [*, S, (H + 2 Hkv) D], if gradients of cos or sin are needed

    autocast = "same"
    packs = True

    def __init__(
        self,
        heads: int,
        kv_heads: int | None = None,
        *,
        style: Literal["half", "interleaved"],
        base: float = 10000.0,
        rotary_dim: int | None = None,
        positions: str | None = None,
        cos: str | None = None,
        sin: str | None = None,
    ) -> None:
        super().__init__()
        if rotary_dim is not None and (rotary_dim < 2 or rotary_dim % 2):
            raise ValueError(f"rotary_dim must be even and at least 2, got {rotary_dim}")
        if (cos is None) != (sin is None) or (cos is not None and positions is not None):
            raise ValueError(
                f"cos and sin are given together, instead of positions, got {cos!r}, {sin!r}, {positions!r}"
            )
        self.heads, self.kv_heads = heads, heads if kv_heads is None else kv_heads
        self.style, self.base, self.rotary_dim, self.positions = style, base, rotary_dim, positions
        self.cos, self.sin = cos, sin

    @property
    def channels(self) -> Mapping[str, str | None]:
        named = {"position_ids": self.positions, "cos": self.cos, "sin": self.sin}
        return {name: channel for name, channel in named.items() if channel is not None}

    def reference(
        self,
        x: Tensor,
        *,
        position_ids: Tensor | None = None,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
    ) -> Tensor:
        self._check(x, cos, sin)
        turned, rest, values = self._parts(x)
        (c1, c2), (s1, s2) = (self._of_pairs(t, turned) for t in self._angles(x, position_ids, cos, sin))
        first, second = self._pairs(turned.to(c1.dtype))
        made = (first * c1 - second * s1, second * c2 + first * s2)
        t = torch.cat(made, -1) if self.style == "half" else torch.stack(made, -1).flatten(-2)
        heads = t.to(x.dtype) if rest is None else torch.cat((t.to(x.dtype), rest), -1)
        return (heads if values is None else torch.cat((heads, values), -2)).flatten(-2)

    def fwd(
        self,
        x: Tensor,
        *,
        position_ids: Tensor | None = None,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        needs: frozenset[str] = frozenset(),
    ) -> tuple[Tensor, Saved]:
        self._check(x, cos, sin)
        y = self._turned(x, self._known_angles(x, position_ids, cos, sin), 1)
        return y, self.Saved(positions=position_ids, cos=cos, sin=sin, x=x if needs & {"cos", "sin"} else None)

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[Tensor | None, sf.Grads]:
        angles = self._known_angles(dy, saved.positions, saved.cos, saved.sin)
        dx = self._turned(dy, angles, -1) if "x" in needs else None
        grads: dict[str, Tensor | None] = {}
        if saved.x is not None and saved.cos is not None and saved.sin is not None:
            dtype = angles[0].dtype
            (x1, x2), (d1, d2) = (self._pairs(self._parts(t)[0].to(dtype)) for t in (saved.x, dy))
            if "cos" in needs:
                grads["cos"] = self._summed(d1 * x1, d2 * x2, saved.cos)
            if "sin" in needs:
                grads["sin"] = self._summed(-d1 * x2, d2 * x1, saved.sin)
        return dx, grads

    def _summed(self, first: Tensor, second: Tensor, like: Tensor) -> Tensor:
        """The gradient of cosines or sines, from the gradient of each pair of each head."""
        first, second = first.sum(-2), second.sum(-2)
        if like.shape[-1] == first.shape[-1]:
            d = first + second
        elif self.style == "half":
            d = torch.cat((first, second), -1)
        else:
            d = torch.stack((first, second), -1).flatten(-2)
        return d.sum_to_size(like.shape).to(like.dtype)

    def _pairs(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """First and second elements of all pairs."""
        if self.style == "half":
            first, second = t.chunk(2, -1)
            return first, second
        return t[..., ::2], t[..., 1::2]

    def _check(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> None:
        floating(x, "RotaryEmbedding")
        if cos is None or sin is None:
            return
        size = self._sizes(x)[1]
        for t in (cos, sin):
            fits = t.is_floating_point() and t.ndim and x.ndim > 1 and t.shape == cos.shape
            if not fits or t.shape[-1] not in (size, size // 2) or not broadcasts(t.shape[:-1], x.shape[:-1]):
                wanted = f"{(*x.shape[:-1], size)} or {(*x.shape[:-1], size // 2)}"
                message = f"expects cos and sin that broadcast to {wanted}, got {tuple(cos.shape)}, {tuple(sin.shape)}"
                raise InputError(message, code="SF101", operation="RotaryEmbedding")

    def _of_pairs(self, t: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
        """The cosines or sines of the first and of the second element of each pair, [*, S, 1, R / 2]."""
        return self._pairs(t) if t.shape[-1] == turned.shape[-1] else (t, t)

    def _angles(
        self, x: Tensor, positions: Tensor | None, cos: Tensor | None, sin: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines per element or per pair, [*, S, 1, R] or [*, S, 1, R / 2]."""
        if cos is None or sin is None:
            return self.angles(x, positions)
        stats = stats_dtype(x)
        c, s = [(t if t.dtype is stats else t.to(stats)).unsqueeze(-2) for t in (cos, sin)]
        return c, s

    def _known_angles(
        self, x: Tensor, positions: Tensor | None, cos: Tensor | None, sin: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`_angles`, cached on a CPU for rows 0, 1, ...."""
        rows = x.shape[-2]
        if cos is not None or positions is not None or x.device.type != "cpu" or x.__class__ is not Tensor:
            return self._angles(x, positions, cos, sin)
        if current() is not None or torch.compiler.is_compiling() or rows * self._sizes(x)[1] > _KEPT_ANGLES:
            return self._angles(x, positions, cos, sin)
        return _angles_of_rows(rows, self._sizes(x)[1], self.base, stats_dtype(x))

    def angles(self, x: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Cosines and sines of each position and pair, [*, S, 1, R / 2]."""
        floating(x, "RotaryEmbedding")
        stats = stats_dtype(x)
        length = x.shape[-2]
        size = self._sizes(x)[1]
        cache = current()
        if positions is None:
            positions = torch.arange(length, device=x.device) if cache is None else cache.positions(x)
        else:
            check_positions(positions, x, "RotaryEmbedding")
        return _cos_sin(positions.to(stats), size, self.base)

    def _sizes(self, x: Tensor) -> tuple[int, int]:
        size = x.shape[-1] // (self.heads + 2 * self.kv_heads)
        return size, self.rotary_dim or size

    def _parts(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The part of each query and key head that has RoPE, the rest, if any, and the value heads, if any."""
        size, turned = self._sizes(x)
        known = self.heads + self.kv_heads
        heads = x.view(*x.shape[:-1], known + self.kv_heads, size)
        values = rest = None
        if self.kv_heads:
            heads, values = heads.split_with_sizes((known, self.kv_heads), -2)
        if turned != size:
            heads, rest = heads.split_with_sizes((turned, size - turned), -1)
        return heads, rest, values

    def _turned(self, x: Tensor, angles: tuple[Tensor, Tensor], sign: int) -> Tensor:
        """Apply RoPE, or its transpose with a sign of -1."""
        c, s = angles
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        (made, *others), (given, *theirs) = self._parts(y), self._parts(x)
        for mine, its in zip(others, theirs, strict=True):
            if mine is not None and its is not None:
                mine.copy_(its)
        one, two = self._pairs(made)
        given = given if given.dtype is c.dtype else given.to(c.dtype)
        first, second = self._pairs(given)
        s1, s2 = self._of_pairs(s, given)[::sign]
        if y.dtype is not c.dtype:
            c1, c2 = self._of_pairs(c, given)
            one.copy_(torch.addcmul(first * c1, second, s1, value=-sign))
            two.copy_(torch.addcmul(second * c2, first, s2, value=sign))
            return y
        for part, out in ((given, made),) if c.shape[-1] == given.shape[-1] else ((first, one), (second, two)):
            torch.mul(part, c, out=out)
        one.addcmul_(second, s1, value=-sign)
        two.addcmul_(first, s2, value=sign)
        return y

    def traffic(self, env: Env, backward: bool) -> sf.Traffic:
        # Mostly copies to float32 and back if x has 16 bits.
        return sf.Traffic(14, 6, 6) if env.dtype.itemsize == 2 else sf.Traffic(5, 3, 4)

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        size = head_size(shape, self.heads, self.kv_heads)
        if self.rotary_dim is None and size % 2:
            raise ValueError(f"expects heads of an even size, got {size}")
        if (self.rotary_dim or 0) > size:
            raise ValueError(f"expects heads of at least rotary_dim={self.rotary_dim}, got {size}")
        return shape

    @classmethod
    def example(cls, x: Tensor) -> RotaryEmbedding:
        if x.shape[-1] % 6:
            raise ValueError(f"no even heads fit in a last dimension of {x.shape[-1]}; give the operation explicitly")
        return cls(1, style="half")

    def extra_repr(self) -> str:
        text = f"{self.heads}" + (f", {self.kv_heads}" if self.kv_heads != self.heads else "")
        text += f", style={self.style!r}, base={self.base:g}"
        named = {"rotary_dim": self.rotary_dim, "positions": self.positions, "cos": self.cos, "sin": self.sin}
        return text + "".join(f", {name}={value!r}" for name, value in named.items() if value is not None)


def _cos_sin(positions: Tensor, size: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions [*, S] and pairs, [*, S, 1, size / 2], in the dtype of the positions."""
    powers = torch.arange(0, size, 2, dtype=torch.float64, device=positions.device) / -size
    angle = positions.unsqueeze(-1) * (base**powers).to(positions.dtype)
    return angle.cos().unsqueeze(-2), angle.sin().unsqueeze(-2)


@functools.lru_cache(8)
def _angles_of_rows(rows: int, size: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    # Cached for later calls, so created as a CPU tensor with data, under any default device or mode.
    with _disable_current_modes():
        return _cos_sin(torch.arange(rows, dtype=dtype, device="cpu"), size, base)
