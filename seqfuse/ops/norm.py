"""Norms over trailing dimensions, with float32 statistics for 16-bit dtypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import operation as sf
from ..casts import dtype_of
from ..env import Env, autocast_of
from ..fusion import Fusions
from ..run import Sequential
from ._parameters import parameter
from ._tensors import floating, may_overwrite, rows_summed, stats_dtype
from .scale import Scale

# ATen operators without a public name in `torch`; not as overloads, which forward every argument in Python.
_aten: Any = torch.ops.aten
layer_norm_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = _aten.native_layer_norm_backward.default._op
_fused_rms_norm_backward: Callable[..., tuple[Tensor, Tensor]] = _aten._fused_rms_norm_backward.default._op
_fused_rms_norm: Callable[..., tuple[Tensor, Tensor]] = torch._fused_rms_norm  # pyright: ignore


class Norm(sf.UnfusedOperation):
    """A normalization over the trailing dimensions `normalized_shape`, with a gain `weight`, or `1 + weight`.

    Attributes:
        centered: whether the mean is subtracted.
    """

    centered: ClassVar[bool]
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    eps: Any  # a float; for RMSNorm also `None`
    autocast = "float32"
    any_dy = True

    def __init__(
        self, normalized_shape: int | Sequence[int], affine: bool, zero_centered: bool, **factory: Any
    ) -> None:
        super().__init__()
        sizes = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if not sizes:
            raise ValueError("normalized_shape needs at least one dimension")
        self.normalized_shape: tuple[int, ...] = sizes
        self.elementwise_affine, self.zero_centered = affine, zero_centered
        self.register_parameter("weight", nn.Parameter(torch.empty(sizes, **factory)) if affine else None)

    def reset_parameters(self) -> None:
        """Initialize with a gain of one, and no bias."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 0.0 if self.zero_centered else 1.0)

    def gain(self, weight: Tensor | None, stats: torch.dtype) -> Tensor | None:
        """The factor of xhat; `1 + weight` in the dtype of the statistics keeps the digits of a small weight."""
        return weight.to(stats) + 1 if weight is not None and self.zero_centered else weight

    def as_parameter(self, gradient: Tensor, name: str) -> Tensor:
        """Round a gradient, summed in the dtype of the statistics, to the dtype of its parameter."""
        own = self._parameters.get(name)
        dtype = dtype_of(self, name) if own is None else own.dtype
        return gradient if dtype is None or dtype is gradient.dtype else gradient.to(dtype)

    @property
    def features(self) -> tuple[int, int] | None:
        sizes = self.normalized_shape
        return (sizes[0], sizes[0]) if len(sizes) == 1 else None

    def converts(self, env: Env) -> bool:
        """Whether ATen needs x in float32: its kernels for 16-bit inputs need parameters of the same dtype."""
        own = dtype_of(self, "weight")
        return env.dtype.itemsize == 2 and own is not None and (self.zero_centered or own is not env.dtype)

    def y_is_cast(self, env: Env) -> bool:
        """Whether y is cast for the next operation."""
        return bool(env.along) and env.leaving is not self.y_dtype_in(env)

    def y_dtype_in(self, env: Env) -> torch.dtype:
        """The dtype of y, unfused."""
        return torch.float32 if env.autocast is not None and env.device != "cpu" else env.dtype

    def traffic(self, env: Env, backward: bool) -> sf.Traffic:
        # Float32 copies of x and y take 20 bytes per element where 4 would do. For the sums over tokens ATen's
        # backward reads dy and x again.
        copied = self.converts(env)
        if backward:
            return sf.Traffic(1, 2, 1 + (2 if self.elementwise_affine else 0) + (14 if copied else 0))
        return sf.Traffic(1 + 2 * copied + self.y_is_cast(env), 1, 1 + 8 * copied)

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        sizes = self.normalized_shape
        if tuple(shape[-len(sizes) :]) != sizes:
            wanted = f"last dimension {sizes[0]}" if len(sizes) == 1 else f"last dimensions {sizes}"
            short = len(shape) < len(sizes)
            got = f"{len(shape)}-d" if short else shape[-1] if len(sizes) == 1 else tuple(shape[-len(sizes) :])
            raise ValueError(f"expects {wanted}, got {got}")
        return shape

    @classmethod
    def example(cls, x: Tensor) -> Any:
        made: Any = cls
        self = made(x.shape[-1], device=x.device, dtype=x.dtype)
        for own in self.parameters():
            nn.init.normal_(own)
        return self

    @classmethod
    def examples(cls, x: Tensor) -> tuple[sf.UnfusedOperation, ...]:
        other, centered = cls.example(x), cls.example(x)
        other.eps, centered.zero_centered = 0.01, True
        return (cls.example(x), other, centered)

    def extra_repr(self) -> str:
        text = f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"
        return text + (", zero_centered=True" if self.zero_centered else "")


def _squeezed(t: Tensor) -> Tensor:
    """Squeeze the last dimension, of size 1; in place for a new result, because a view costs more."""
    return t.squeeze_(-1) if may_overwrite() else t.squeeze(-1)


def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in this dtype; without a torch call if it already has it."""
    return t if t.dtype is dtype else t.to(dtype)


def rounded(y: Tensor, x: Tensor) -> Tensor:
    """The result in the dtype of the input, except under autocast on an accelerator, where norms return float32."""
    if y.dtype is x.dtype or (x.device.type != "cpu" and autocast_of(x.device.type) is not None):
        return y
    return y.to(x.dtype)


class LayerNorm(Norm):
    """y = xhat gain + bias, xhat = (x - mean) rstd over the trailing dimensions `normalized_shape`.

    Forward: mean = E[x], rstd = (E[(x - mean)^2] + eps)^-1/2; gain = weight, or 1 + weight with `zero_centered=True`;
    without a weight gain = 1.

    Backward: with g = dy gain, dx = rstd (g - E[g] - xhat E[g xhat]);  dweight = sum of dy xhat and dbias = sum of dy
    over all tokens.

    x, y: [*, H], weight, bias: [H], where H is `normalized_shape`; mean, rstd: [*].
    Saved: x, mean, rstd, and weight for dx.
    Statistics and `1 + weight` are float32 (float64 for a float64 input). y has the dtype of x; under autocast on an
    accelerator it is float32, as in torch.
    State-dict keys, arguments and initial values are those of `torch.nn.LayerNorm`.
    Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450.

    Args:
        normalized_shape: the trailing dimensions, an int or a tuple.
        eps: added to the variance.
        elementwise_affine: whether there is a weight.
        bias: whether there is a bias, with the weight.
        zero_centered: whether the weight is stored minus one.

    Raises:
        ValueError: for an empty `normalized_shape`.
    """

    centered = True
    native = True

    class Saved(sf.Saved):
        x: Tensor = sf.field(for_=("x", "weight"))  # [*, H]
        mean: Tensor = sf.field(for_=("x", "weight"))  # [*] float32
        rstd: Tensor = sf.field(for_=("x", "weight"))  # [*] float32
        weight: Tensor | None = sf.field(for_="x")  # [H], the parameter

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered: bool = False,
    ) -> None:
        super().__init__(normalized_shape, elementwise_affine, zero_centered, device=device, dtype=dtype)
        self.eps = eps
        shift = torch.empty(self.normalized_shape, device=device, dtype=dtype) if elementwise_affine and bias else None
        self.register_parameter("bias", None if shift is None else nn.Parameter(shift))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def torch_call(self) -> Callable[..., Tensor] | None:
        shape, eps = self.normalized_shape, self.eps
        if self.zero_centered or (self.weight is None) is not (self.bias is None):
            return None

        def run(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
            return torch.layer_norm(x, shape, weight, bias, eps)

        return run

    def reference(self, x: Tensor) -> Tensor:
        floating(x, "LayerNorm")
        stats = stats_dtype(x)
        gain, bias = (None if t is None else cast(t, stats) for t in (self.gain(self.weight, stats), self.bias))
        return rounded(F.layer_norm(x.to(stats), self.normalized_shape, gain, bias, self.eps), x)

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        weight, bias = parameter(self, "weight"), parameter(self, "bias")
        fit, gain = x, weight
        if self.zero_centered or weight is None or not x.dtype is weight.dtype is torch.float32:
            fit, gain = self._fit(x, weight)
        wanted = fit.dtype if gain is None else gain.dtype
        if bias is not None and bias.dtype is not wanted:
            bias = bias.to(wanted)
        y, mean, rstd = torch.native_layer_norm(fit, self.normalized_shape, gain, bias, self.eps)
        for _ in self.normalized_shape:
            mean, rstd = _squeezed(mean), _squeezed(rstd)
        if mean.dtype.itemsize == 2:  # fake tensors have the dtype of x here
            mean, rstd = mean.float(), rstd.float()
        return (y if y.dtype is x.dtype else rounded(y, x)), self._saved(x, mean, rstd, weight)

    def again(self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor | None:
        """Recompute y, bit for bit, in one torch call; `None` if there is none."""
        if self.zero_centered or weight is None or bias is None:
            return None
        if not x.dtype is weight.dtype is bias.dtype is torch.float32:
            return None
        return torch.layer_norm(x, self.normalized_shape, weight, bias, self.eps)

    def _fit(self, x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Input and gain in dtypes for which ATen computes and returns statistics in `stats_dtype`."""
        floating(x, "LayerNorm")
        stats = stats_dtype(x)
        gain = self.gain(weight, stats)
        if x.dtype is not stats and x.device.type == "cpu":
            # ATen's mixed-dtype kernel; with parameters of x's dtype it would round the statistics to that dtype.
            return x, x.new_ones(self.normalized_shape, dtype=stats) if gain is None else gain.to(stats)
        if gain is None or gain.dtype is x.dtype:
            return x, gain
        return x.to(stats), gain.to(stats)

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[Tensor | None, sf.Grads]:
        if needs <= {"bias"}:
            return None, {"bias": self._dbias(dy)} if needs else {}
        x, stats, wanted = saved.x, saved.mean.dtype, ["x" in needs, "weight" in needs, "bias" in needs]
        gain = saved.weight if wanted[0] else None
        if self.zero_centered:
            gain = self.gain(gain, stats)
        alike = x.dtype is dy.dtype and (gain is None or gain.dtype is x.dtype)
        exact = alike and x.dtype is stats
        # ATen's CPU kernel sums 16-bit gradients in 16 bits: 5000 ones sum to 256 in bfloat16.
        if not exact and (not alike or x.device.type == "cpu"):
            x, dy, gain = x.to(stats), dy.to(stats), None if gain is None else gain.to(stats)
        if gain is None and (wanted[1] or wanted[2]):
            gain = x.new_ones(self.normalized_shape)  # where dx is not needed, only its shape and dtype are read
        sizes = self.normalized_shape
        dx, dweight, dbias = layer_norm_backward(dy, x, sizes, saved.mean, saved.rstd, gain, gain, wanted)
        grads: dict[str, Tensor | None] = {}
        if wanted[1]:
            grads["weight"] = dweight if exact else self.as_parameter(dweight, "weight")
        if wanted[2]:
            grads["bias"] = dbias if exact else self.as_parameter(dbias, "bias")
        return ((dx if exact else rounded(dx, saved.x)) if wanted[0] else None), grads

    def _dbias(self, dy: Tensor) -> Tensor:
        """The gradient of the bias only, summed in the same order as in the whole backward; reads only dy."""
        stats = stats_dtype(dy)
        fit = dy if dy.device.type != "cpu" else dy.to(stats)
        unread = fit.new_zeros(dy.shape[: -len(self.normalized_shape)], dtype=stats)
        gain = fit.new_ones(self.normalized_shape)
        wanted = [False, False, True]
        dbias = layer_norm_backward(fit, fit, self.normalized_shape, unread, unread, gain, gain, wanted)[2]
        return self.as_parameter(dbias, "bias")

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bias={self.bias is not None}"


class RMSNorm(Norm):
    """y = xhat gain, xhat = x rstd over the trailing dimensions `normalized_shape`.

    Forward: rstd = (E[x^2] + eps)^-1/2; gain = weight, or 1 + weight with `zero_centered=True`; without a weight gain =
    1.

    Backward: with g = dy gain, dx = rstd (g - xhat E[g xhat]);  dweight = sum of dy xhat over all tokens.

    x, y: [*, H], weight: [H], where H is `normalized_shape`; rstd: [*].
    Saved: x, rstd, and weight for dx.
    Computed in float32 (float64 for a float64 input) and rounded to the dtype of x once; under autocast on an
    accelerator y is float32, as in torch.
    State-dict keys, arguments and initial values are those of `torch.nn.RMSNorm`.
    Source: Zhang and Sennrich 2019, arXiv:1910.07467.

    Args:
        normalized_shape: the trailing dimensions, an int or a tuple.
        eps: added to the mean square; `None` is the machine epsilon of the computing dtype.
        elementwise_affine: whether there is a weight.
        zero_centered: whether the weight is stored minus one.

    Raises:
        ValueError: for an empty `normalized_shape`.
    """

    centered = False
    bias = None

    class Saved(sf.Saved):
        x: Tensor  # [*, H]
        rstd: Tensor  # [*] float32
        weight: Tensor | None = sf.field(for_="x")  # [H], the parameter

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered: bool = False,
    ) -> None:
        super().__init__(normalized_shape, elementwise_affine, zero_centered, device=device, dtype=dtype)
        self.eps = eps
        self.reset_parameters()

    def traffic(self, env: Env, backward: bool) -> sf.Traffic:
        if env.device != "cpu" or backward:
            return super().traffic(env, backward)
        # Square, mean, product with rstd and with the gain, and three operators on the statistics. In 16 bits all of
        # them run on a float32 copy of x, and y is copied once more. Operators called within ATen cost less than a
        # launch from Python: all of them together as much as two or three.
        return sf.Traffic(3, 1, 19) if env.dtype.itemsize == 2 else sf.Traffic(2, 2, 5)

    def reference(self, x: Tensor) -> Tensor:
        floating(x, "RMSNorm")
        stats = stats_dtype(x)
        gain = self.gain(self.weight, stats)
        gain = None if gain is None else cast(gain, stats)
        return rounded(F.rms_norm(x.to(stats), self.normalized_shape, gain, self.eps), x)

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        floating(x, "RMSNorm")
        weight, kind, fit = parameter(self, "weight"), x.device.type, x
        gain = self.gain(weight, stats_dtype(x)) if self.zero_centered else weight
        if kind != "cpu" and ((gain is not None and gain.dtype is not x.dtype) or autocast_of(kind) is not None):
            # The kernel of an accelerator supports one dtype only, and autocast does not apply to it.
            stats = stats_dtype(x)
            fit, gain = x.to(stats), None if gain is None else gain.to(stats)
        y, rstd = _fused_rms_norm(fit, self.normalized_shape, gain, self.eps)
        for _ in self.normalized_shape:
            rstd = _squeezed(rstd)
        return rounded(y, x), self._saved(x, rstd, weight)

    def again(self, x: Tensor, rstd: Tensor, weight: Tensor | None = None) -> Tensor:
        """Recompute y from the saved tensors; on a CPU bit for bit."""
        y = cast(x, rstd.dtype) * rstd.view(*rstd.shape, *(1,) * len(self.normalized_shape))
        gain = self.gain(weight, rstd.dtype)
        if gain is not None:
            y = y.mul_(gain) if gain.dtype is y.dtype else y * gain
        return cast(y, x.dtype)

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[Tensor | None, sf.Grads]:
        x, rstd, weight = saved.x, saved.rstd, saved.weight if "x" in needs else None
        same = weight is not None and weight.dtype is x.dtype is dy.dtype
        if same and x.device.type == "cuda" and not self.zero_centered:
            wanted = ["x" in needs, "weight" in needs]
            dx, dweight = _fused_rms_norm_backward(dy, x, self.normalized_shape, rstd, weight, wanted)
            return dx, {"weight": dweight} if wanted[1] else {}
        stats, trailing = rstd.dtype, len(self.normalized_shape)
        gain = self.gain(weight, stats)
        if x.device.type == "cpu" and trailing == 1:
            return self._by_layer_norm(dy, x, rstd, gain, needs)
        rstd = rstd.view(*rstd.shape, *(1,) * trailing)
        xhat = x.to(stats) * rstd
        dy = dy.to(stats)
        product = dy * xhat
        grads = {"weight": self.as_parameter(rows_summed(product, trailing), "weight")} if "weight" in needs else {}
        if "x" not in needs:
            return None, grads
        if gain is not None:
            dy, product = dy * gain, product.mul_(gain)
        means = product.mean(tuple(range(-trailing, 0)), keepdim=True)
        return rounded(torch.addcmul(dy, xhat, means, value=-1).mul_(rstd), x), grads

    def _by_layer_norm(
        self, dy: Tensor, x: Tensor, rstd: Tensor, gain: Tensor | None, needs: frozenset[str]
    ) -> tuple[Tensor | None, sf.Grads]:
        """Both gradients by ATen's LayerNorm kernel with mean 0, whose dx lacks the term rstd E[g]."""
        stats, like, sizes = rstd.dtype, x.dtype, self.normalized_shape
        dy, x, gain = cast(dy, stats), cast(x, stats), None if gain is None else cast(gain, stats)
        wanted = ["x" in needs, "weight" in needs, False]
        unread = x.new_ones(sizes) if gain is None and wanted[1] else gain
        dx, dweight, _ = layer_norm_backward(dy, x, sizes, torch.zeros_like(rstd), rstd, unread, None, wanted)
        grads: sf.Grads = {"weight": self.as_parameter(dweight, "weight")} if wanted[1] else {}
        if not wanted[0]:
            return None, grads
        if gain is None or autocast_of("cpu") is not None:  # autocast would round the factors to 16 bits
            total = (dy if gain is None else dy * gain).sum(-1)
        else:
            total = dy.matmul(gain)
        return cast(dx.add_(total.mul_(rstd).unsqueeze(-1), alpha=1 / (sizes[0] or 1)), like), grads


class L2Norm(Sequential):
    """y = x / sqrt(sum of x^2 + eps), over the last dimension: `RMSNorm(size, eps / size), Scale(size^-1/2)`.

    Backward: with r = 1 / sqrt(sum of x^2 + eps), dx = r (dy - y (y . dy)).

    x, y: [*, size]. No parameters. It fuses as `RMSNorm` and `Scale` do.
    Source: Wang et al. 2017, arXiv:1704.06369.

    Args:
        size: length of the last dimension.
        eps: added to the sum of squares.
        fusions: the fusion set when called by itself; by default `sf.fusions.default`.

    Raises:
        ValueError: for a size below 1.
    """

    inlines: ClassVar[bool] = True

    def __init__(self, size: int, eps: float = 1e-6, *, fusions: Fusions | None = None) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        norm = RMSNorm(size, eps=eps / size, elementwise_affine=False)
        super().__init__(norm, Scale(size**-0.5), fusions=fusions)
        self.size, self.eps = size, eps

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps:g}"
