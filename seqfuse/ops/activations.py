"""Activations: each with its math, its saved tensor, and the device functions for kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import pointwise as sf
from ..hardware import GELU_BESIDE_TORCH
from ..kernels import kernels_of
from ._tensors import real

# ATen operators without a public name in `torch`; not as overloads, which forward every argument in Python.
_aten: Any = torch.ops.aten
gelu_backward: Callable[..., Tensor] = _aten.gelu_backward.default._op
sigmoid_backward: Callable[..., Tensor] = _aten.sigmoid_backward.default._op
silu_backward: Callable[..., Tensor] = _aten.silu_backward.default._op
tanh_backward: Callable[..., Tensor] = _aten.tanh_backward.default._op
threshold_backward: Callable[..., Tensor] = _aten.threshold_backward.default._op


CLAMP_PASSES = float(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14))
"""1 if `torch.clamp` passes the gradient where x is the limit, else 0."""


class DeviceFunction:
    """A class attribute that reads `value` or `derivative` of an entry of `kernels.activations.ACTIVATIONS`.

    Args:
        part: which of the two.
        name: key of the entry; by default the operation's `device_name`.
    """

    def __init__(self, part: Literal["value", "derivative"], name: str | None = None) -> None:
        self.part, self.name = part, name

    def __get__(self, operation: Any, kind: type) -> Any:
        if operation is None:
            return self
        return getattr(kernels_of("activations").ACTIVATIONS[self.name or operation.device_name], self.part)


def device_functions(name: str | None = None) -> tuple[Any, Any]:
    """Both attributes of an activation, as in `value, derivative = device_functions("relu")`."""
    return DeviceFunction("value", name), DeviceFunction("derivative", name)


def _passes(x: Tensor, limit: float) -> Tensor:
    return x <= limit if CLAMP_PASSES else x < limit


class Clamp(sf.Pointwise):
    """y = min(max(x, -limit), limit) + offset; NaN stays NaN.

    Backward: dx = dy where -limit < x < limit, else 0; at a limit as `torch.clamp`: dy before torch 2.14, 0 since.

    x, y: [*, H].  Saved: x.
    Source: `torch.clamp`; with an offset, the up half of GPT-OSS's gated unit.

    Args:
        limit: the largest absolute value.
        offset: added after clamping.

    Raises:
        ValueError: for a negative limit.
    """

    autocast = "same"
    value, derivative = device_functions("clamp")

    def __init__(self, limit: float, offset: float = 0.0) -> None:
        super().__init__()
        if not limit >= 0:
            raise ValueError(f"limit must not be negative, got {limit}")
        self.limit, self.offset = float(limit), float(offset)

    @property
    def P(self) -> tuple[float, float, float]:
        return self.limit, self.offset, CLAMP_PASSES

    def reference(self, x: Tensor) -> Tensor:
        real(x, "Clamp")
        return (sf.widened(x).clamp(-self.limit, self.limit) + self.offset).to(x.dtype)

    def bwd(self, dy: Tensor, saved: sf.Saved) -> tuple[Tensor, sf.Grads]:
        return torch.where(_passes(sf.widened(saved.x).abs(), self.limit), dy, 0.0), {}

    @classmethod
    def example(cls, x: Tensor) -> Clamp:
        return cls(0.75, 0.5)


class ClampedSiLU(sf.Pointwise):
    """y = c sigmoid(alpha c), c = min(x, limit); NaN stays NaN.

    Backward: with s = sigmoid(alpha x), dx = dy s (1 + alpha x (1 - s)) where x < limit, else 0; at the limit as
    `Clamp`.

    x, y: [*, H].  Saved: x.
    Source: OpenAI 2025, arXiv:2508.10925, and the model's reference code.

    Args:
        limit: the largest x that is not clamped.
        alpha: a factor within the sigmoid.
    """

    autocast = "same"
    value, derivative = device_functions("clamped_silu")

    def __init__(self, limit: float = 7.0, alpha: float = 1.702) -> None:
        super().__init__()
        self.limit, self.alpha = float(limit), float(alpha)

    @property
    def P(self) -> tuple[float, float, float]:
        return self.limit, self.alpha, CLAMP_PASSES

    def reference(self, x: Tensor) -> Tensor:
        real(x, "ClampedSiLU")
        c = sf.widened(x).clamp(max=self.limit)
        return (c * torch.sigmoid(self.alpha * c)).to(x.dtype)

    def bwd(self, dy: Tensor, saved: sf.Saved) -> tuple[Tensor, sf.Grads]:
        x = sf.widened(saved.x)
        s = torch.sigmoid(self.alpha * x)
        slope = torch.add(s, sigmoid_backward(x, s), alpha=self.alpha)
        return torch.where(_passes(x, self.limit), dy * slope, 0.0).to(saved.x.dtype), {}

    @classmethod
    def example(cls, x: Tensor) -> ClampedSiLU:
        return cls(0.75, 1.25)


class GeLU(sf.Pointwise):
    """y = x Phi(x), Phi the CDF of N(0, 1).

    Forward: `"none"`: Phi(x) = (1 + erf(x / sqrt(2))) / 2; `"tanh"`: Phi(x) = (1 + tanh(u)) / 2 with
    u = sqrt(2 / pi) (x + 0.044715 x^3). They differ by up to 4.7e-4.

    Backward: dx = dy (Phi(x) + x Phi'(x)).

    x, y: [*, H].  Saved: x.
    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.

    Args:
        approximate: `"none"` or `"tanh"`.

    Raises:
        ValueError: for any other `approximate`.
    """

    native = True
    autocast = "same"
    value, derivative = device_functions()

    @property
    def native_below(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return GELU_BESIDE_TORCH[self.approximate]

    @property
    def device_name(self) -> str:
        """Name of the device functions."""
        return "gelu_tanh" if self.approximate == "tanh" else "gelu"

    def __init__(self, approximate: Literal["none", "tanh"] = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def reference(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate=self.approximate)

    def fwd(self, x: Tensor) -> tuple[Tensor, sf.Saved]:
        return F.gelu(x, approximate=self.approximate), self._saved(x)

    def bwd(self, dy: Tensor, saved: sf.Saved) -> tuple[Tensor, sf.Grads]:
        if self.approximate == "none":  # the default, and faster without the string argument
            return gelu_backward(dy, saved.x), {}
        return gelu_backward(dy, saved.x, approximate=self.approximate), {}

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"

    @classmethod
    def examples(cls, x: Tensor) -> tuple[GeLU, ...]:
        return (cls(), cls("tanh"))


GELU = GeLU


_K = 1.702


class QuickGeLU(sf.Pointwise):
    """y = x sigmoid(1.702 x).

    Backward: with s = sigmoid(1.702 x), dx = dy (s + 1.702 x s (1 - s)).

    x, y: [*, H].  Saved: x.
    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2.
    """

    autocast = "same"
    value, derivative = device_functions("quickgelu")

    def reference(self, x: Tensor) -> Tensor:
        real(x, "QuickGeLU")
        wide = sf.widened(x)
        return (wide * torch.sigmoid(_K * wide)).to(x.dtype)

    def bwd(self, dy: Tensor, saved: sf.Saved) -> tuple[Tensor, sf.Grads]:
        # Not silu_backward at 1.702 x, which overflows before x does.
        x = sf.widened(saved.x)
        s = torch.sigmoid(_K * x)
        return torch.add(dy * s, sigmoid_backward(dy * x, s), alpha=_K).to(saved.x.dtype), {}


class ReLU(sf.Pointwise):
    """y = max(x, 0); NaN stays NaN.

    Backward: dx = dy where y > 0, else 0.

    x, y: [*, H].  Saved: y, which the next GEMM saves anyway.
    Source: Nair and Hinton 2010, ICML.
    """

    native = True
    autocast = "same"
    value, derivative = device_functions("relu")
    reads = "output"

    def reference(self, x: Tensor) -> Tensor:
        return torch.relu(x)

    def derivative_reference(self, y: Tensor) -> Tensor:
        return (~(y <= 0)).to(y.dtype)

    def bwd(self, dy: Tensor, saved: sf.Saved) -> tuple[Tensor, sf.Grads]:
        return threshold_backward(dy, saved.y, 0), {}


class Sigmoid(sf.Pointwise):
    """y = 1 / (1 + exp(-x)).

    Backward: dx = dy y (1 - y).

    x, y: [*, H].  Saved: y.
    Source: Rumelhart, Hinton and Williams 1986, Nature 323.
    """

    native = True
    autocast = "same"
    value, derivative = device_functions("sigmoid")
    reads = "output"

    def reference(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)

    def derivative_reference(self, y: Tensor) -> Tensor:
        return y * (1 - y)

    def bwd(self, dy: Tensor, saved: sf.Saved) -> tuple[Tensor, sf.Grads]:
        return sigmoid_backward(dy, saved.y), {}


class SiLU(sf.Pointwise):
    """y = x sigmoid(x).

    Backward: with s = sigmoid(x), dx = dy s (1 + x (1 - s)).

    x, y: [*, H].  Saved: x.
    Source: Elfwing et al. 2017, arXiv:1702.03118.
    """

    native = True
    autocast = "same"
    value, derivative = device_functions("silu")

    def reference(self, x: Tensor) -> Tensor:
        return F.silu(x)

    def bwd(self, dy: Tensor, saved: sf.Saved) -> tuple[Tensor, sf.Grads]:
        return silu_backward(dy, saved.x), {}


class SquaredReLU(sf.Pointwise):
    """y = max(x, 0)^2.

    Backward: dx = 2 dy x where x > 0, else 0.

    x, y: [*, H].  Saved: x.
    Source: So et al. 2021, arXiv:2109.08668.
    """

    autocast = "float32"
    value, derivative = device_functions("squared_relu")

    def reference(self, x: Tensor) -> Tensor:
        return torch.relu(x).square()

    def bwd(self, dy: Tensor, saved: sf.Saved) -> tuple[Tensor, sf.Grads]:
        return threshold_backward(dy * saved.x.mul(2), saved.x, 0), {}


class Tanh(sf.Pointwise):
    """y = tanh(x).

    Backward: dx = dy (1 - y^2).

    x, y: [*, H].  Saved: y.
    Source: LeCun et al. 1998, Efficient BackProp.
    """

    native = True
    autocast = "same"
    value, derivative = device_functions("tanh")
    reads = "output"

    def reference(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def derivative_reference(self, y: Tensor) -> Tensor:
        return 1 - y * y

    def bwd(self, dy: Tensor, saved: sf.Saved) -> tuple[Tensor, sf.Grads]:
        return tanh_backward(dy, saved.y), {}
