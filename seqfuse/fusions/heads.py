"""Between the GEMM of [q; k; v] and attention: bias, QK-norm and RoPE, in one pass forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..casts import dtype_of
from ..env import Env
from ..errors import InputError
from ..fusion import BackwardFusion, ForwardFusion, InferenceFusion, Requirements
from ..hardware import capability
from ..kernels import kernels_of
from ..operation import Grads
from ..ops import Attention, Bias, QKNorm, RotaryEmbedding
from ..ops._cache import current
from ..ops._lowprecision import as_codes, as_quantized
from ..ops._parameters import parameter
from ..quantized import Quantize, Quantized
from ._shared import bias_fits, kernels_read, kernels_run

if TYPE_CHECKING:
    from ..kernels.rope import Roped, Rotation

# `kernels._heads.MAX_HEAD`, which cannot be imported where Triton is not installed.
_MAX_HEAD = 1024


class BeforeAttention:
    """Base of fusions of a bias, a norm of heads and RoPE, each of them optional."""

    bias: Any
    norm: Any = None
    rotary: Any = None

    kernels = ("triton", "c")

    @property
    def heads(self) -> tuple[int, int]:
        """H and Hkv."""
        of = self.rotary if self.norm is None else self.norm
        return of.heads, of.kv_heads

    def requires(self, env: Env) -> Requirements:
        """Requirements of the kernel for bias, norm and RoPE."""
        norm, rotary = self.norm, self.rotary
        yield from kernels_run(env)
        yield from bias_fits(self.bias, env)
        each = norm is None or (norm.kind == "rms" and not norm.full_width)
        yield each, "its kernel makes an RMSNorm of each head"
        if norm is not None:
            for name in ("q_weight", "k_weight"):
                yield from kernels_read(name, dtype_of(norm, name), env)
        if rotary is not None:
            same = self.heads == (rotary.heads, rotary.kv_heads)
            yield same, "the norm and the rotation must be of the same heads"
        width = next((of.features[0] for of in (norm, self.bias) if of is not None), None)
        widest = _MAX_HEAD * (self.heads[0] + 2 * self.heads[1])
        yield width is None or width <= widest, f"its kernel is for heads of at most {_MAX_HEAD:,}"

    def rotation(self, x: Tensor) -> Rotation | None:
        """RoPE as an argument of the kernel, for heads of a packed x."""
        if self.rotary is None:
            return None
        size = x.shape[-1] // (self.heads[0] + 2 * self.heads[1])
        return kernels_of("rope").Rotation(self.rotary.style, self.rotary.rotary_dim or size, self.rotary.base)

    def given(self) -> dict[str, Any]:
        """The kernels' arguments for bias and norm."""
        given: dict[str, Any] = {"bias": None if self.bias is None else self.bias.read().contiguous()}
        if self.norm is not None:
            given |= {"norm_eps": self.norm.eps, "zero_centered": self.norm.zero_centered}
            given |= _gains(parameter(self.norm, "q_weight"), parameter(self.norm, "k_weight"))
        return given

    def run(self, x: Tensor, angles: dict[str, Any], store: bool) -> Roped:
        """The kernel's forward pass; if a KV cache is active, its rows define the positions."""
        cache = current()
        if self.rotary is not None and cache is not None and angles["positions"] is None and angles["cos"] is None:
            angles = {**angles, "positions": cache.positions(x)}
        return kernels_of("rope").rope_fwd(x, *self.heads, self.rotation(x), store=store, **angles, **self.given())

    def forward(self, x: Tensor, angles: dict[str, Any], needs: frozenset[str]) -> Any:
        """Return y, and the `Saved` of the operations if a gradient is needed."""
        norm, saved = self.norm, dict[str, Any]()
        out = self.run(x, angles, bool(needs) and self.bias is not None and norm is not None)
        if not needs:
            return out.y
        if norm is not None:
            assert out.rstd is not None
            weights = {name: parameter(norm, name) for name in ("q_weight", "k_weight")}
            saved["norm"] = QKNorm.Saved(x=x if out.z is None else out.z, rstd=out.rstd, mean=None, **weights)
        if self.rotary is not None:
            saved["rotary"] = RotaryEmbedding.Saved(**angles, x=None)
        return out.y, saved

    def backward(
        self, dy: Tensor, kept: QKNorm.Saved | None, angles: dict[str, Any], needs: frozenset[str]
    ) -> tuple[Tensor | None, Grads]:
        """The gradients, from dy and the `Saved` of the norm."""
        around: dict[str, Any] = {"dbias": self.bias.dtype} if "bias.bias" in needs else {}
        if kept is not None:
            around |= {"x": kept.x, "rstd": kept.rstd, "zero_centered": self.norm.zero_centered}
            if "x" in needs or "bias.bias" in needs:
                around |= _gains(kept.q_weight, kept.k_weight)
            for name in ("q_weight", "k_weight"):
                owner = parameter(self.norm, name)
                if f"norm.{name}" in needs and owner is not None:
                    around[f"d{name}"] = owner.dtype
        out = kernels_of("rope").rope_bwd(dy, *self.heads, self.rotation(dy), dx="x" in needs, **angles, **around)
        grads = {"bias.bias": out.dbias, "norm.q_weight": out.dq_weight, "norm.k_weight": out.dk_weight}
        return out.dx, {name: gradient for name, gradient in grads.items() if name in needs}


class BiasQKNormRotary(BeforeAttention, ForwardFusion):
    """y = rope(norm(x + bias)) in one pass, rounded once; x + bias is written if the norm's gradient reads it.

    x, y: [*, S, (H + 2 Hkv) D]. Saves the same tensors as the operations.
    """

    bias: Bias | None
    norm: QKNorm | None
    rotary: RotaryEmbedding

    def fwd(
        self,
        x: Tensor,
        *,
        rotary_position_ids: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        needs: frozenset[str],
    ) -> Any:
        return self.forward(x, _angles(rotary_position_ids, rotary_cos, rotary_sin, needs), needs)


class BiasQKNorm(BeforeAttention, ForwardFusion):
    """y = norm(x + bias) in one pass; x + bias is written for the norm's gradient.

    x, y: [*, S, (H + 2 Hkv) D]. Saves the same tensors as the operations.
    """

    bias: Bias | None
    norm: QKNorm

    def fwd(self, x: Tensor, *, needs: frozenset[str]) -> Any:
        return self.forward(x, {}, needs)


class BiasQKNormRotaryBackward(BeforeAttention, BackwardFusion):
    """dx = norm'(rope'(dy)) and the gradients of bias and gains in one pass over dy and the saved tensors.

    Sums over tokens are in float32 and a fixed order, rounded once. dy, dx: [*, S, (H + 2 Hkv) D].
    """

    bias: Bias | None
    norm: QKNorm | None
    rotary: RotaryEmbedding

    def can_quantize(self, to: Quantize, env: Env) -> bool:
        size = to.operation.features[1] // (self.heads[0] + 2 * self.heads[1])
        # Triton 3.6.0 crashes when it compiles the sums of biases of smaller heads for sm_100 or sm_120.
        sizes = (128,) if self.bias is not None and capability(env.arch) >= 100 else (32, 64, 128)
        fits = self.norm is None and size in sizes and self.rotary.rotary_dim in (None, size)
        return fits and (self.bias is None or self.rotary.style == "half")

    def bwd(
        self,
        dy: Tensor,
        *,
        norm: QKNorm.Saved | None,
        rotary: RotaryEmbedding.Saved,
        needs: frozenset[str],
        to: Quantize | None = None,
    ) -> tuple[Tensor | Quantized | None, Grads]:
        angles = _angles(rotary.positions, rotary.cos, rotary.sin, needs)
        rotation = self.rotation(dy)
        if to is None or rotation is None or "x" not in needs or not dy.numel():
            return self.backward(dy, norm, angles, needs)
        wanted, newest = as_codes(to, dy)
        dbias = self.bias.dtype if self.bias is not None and "bias.bias" in needs else None
        out = kernels_of("rope").rope_codes_backward(
            dy, *self.heads, rotation, wanted, largest=newest, dbias=dbias, **angles
        )
        grads: Grads = {} if dbias is None else {"bias.bias": out.dbias}
        return as_quantized(out.codes, wanted, dy.shape, dy.dtype, dy.device), grads


class BiasQKNormBackward(BeforeAttention, BackwardFusion):
    """dx = norm'(dy) and the gradients of bias and gains in one pass over dy and the saved tensors.

    Sums over tokens are in float32 and a fixed order, rounded once. dy, dx: [*, S, (H + 2 Hkv) D].
    """

    bias: Bias | None
    norm: QKNorm

    def bwd(self, dy: Tensor, *, norm: QKNorm.Saved, needs: frozenset[str]) -> tuple[Tensor | None, Grads]:
        return self.backward(dy, norm, {}, needs)


class BiasQKNormRotaryAttention(BeforeAttention, InferenceFusion):
    """Attention of rope(norm(x + bias)), inference only.

    In a decoding step one kernel applies bias, norm and RoPE to the new token and writes its key and value into the
    cache. Otherwise it is `BiasQKNormRotary`, then `Attention`. x: [*, S, (H + 2 Hkv) D], y: [*, S, H D].
    """

    bias: Bias | None
    norm: QKNorm | None
    rotary: RotaryEmbedding
    attention: Attention

    kernels = ("triton",)

    def requires(self, env: Env) -> Requirements:
        yield from super().requires(env)
        attention, rotary = self.attention, self.rotary
        same = (attention.heads, attention.kv_heads) == (rotary.heads, rotary.kv_heads)
        yield same, "the rotation and attention must be of the same heads"
        yield not attention.random, "dropout of weights is left to the operation"

    def fwd(self, x: Tensor) -> Any:
        cache = current()
        if cache is not None:

            def write(row: Tensor, **caches: Any) -> Tensor:
                return kernels_of("rope").rope_write(row, *self.heads, self.rotation(row), **caches, **self.given())

            y = cache.decode(self.attention, x, write)
            if y is not None:
                return y
        return self.attention.fwd(self.run(x, _angles(None, None, None), store=False).y)[0]


def _angles(
    positions: Tensor | None, cos: Tensor | None, sin: Tensor | None, needs: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """The kernels' arguments for the angles: positions, or cosines and sines.

    Raises:
        InputError: if gradients of cos or sin are needed, which only the operation computes; it then runs unfused.
    """
    if needs & {"rotary.cos", "rotary.sin"}:
        raise InputError("the kernel makes no gradients of cos and sin", code="SF101", operation="RotaryEmbedding")
    return {"positions": positions, "cos": cos, "sin": sin}


def _gains(q_weight: Tensor | None, k_weight: Tensor | None) -> dict[str, Tensor | None]:
    """The norm's weights as arguments of the kernel."""
    pairs = (("q_weight", q_weight), ("k_weight", k_weight))
    return {name: None if weight is None else weight.contiguous() for name, weight in pairs}
