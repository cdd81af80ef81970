"""Linear, Bias, GeLU, Dropout: y = gelu(x weight^T + bias) mask / (1 - p)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from seqfuse.testing import seeded_randn

from .simulated import Chain, Kernel, Tensors, rows_in, without_last_row

ROWS, INNER, OUTER, P = 37, 48, 56, 0.25


def draw(regime: str, seed: int) -> Tensors:
    return {
        "x": rows_in(regime, (ROWS, INNER), seed),
        "weight": seeded_randn((OUTER, INNER), seed + 1, dtype=torch.float64) / math.sqrt(INNER),
        "bias": seeded_randn((OUTER,), seed + 2, dtype=torch.float64),
        "mask": rows_in("normal", (ROWS, OUTER), seed + 3) > -0.6745,  # a quarter dropped
        "d_out": seeded_randn((ROWS, OUTER), seed + 4, dtype=torch.float64),
    }


def forward(t: Tensors) -> Tensors:
    y = F.gelu(F.linear(t["x"], t["weight"], t["bias"]))
    return {"out": y * t["mask"] / (1 - P)}


def _gelu(z: Tensor, tanh: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The value, the distribution and z times the density: gelu(z) = z cdf, gelu'(z) = cdf + z pdf."""
    if tanh:
        inner = math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)
        cdf = (1 + inner.tanh()) / 2
        density = (1 - inner.tanh().square()) / 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * z.square())
    else:
        cdf = (1 + torch.erf(z * math.sqrt(0.5))) / 2
        density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    return z * cdf, cdf, z * density


def fused(t: Tensors, k: Kernel) -> Tensors:
    x, weight, bias, dy = k.load(t["x"], t["weight"], t["bias"], t["d_out"])
    mask = t["mask"].to(k.compute)
    a, b = x, weight
    if k.has("tail of K lost"):
        a, b = x[:, :-1], weight[:, :-1]
    if k.has("tail of K counted twice"):
        a, b = torch.cat((x, x[:, -1:]), 1), torch.cat((weight, weight[:, -1:]), 1)
    product = k.dot(a, b.T)
    after = k.has("bias added after the activation")
    z = product if after else product + bias
    # The backward reads tensors in the dtype in which the unfused operations save them.
    kept = z.bfloat16() if k.has("pre-activation kept in 16 bits") else z.to(t["x"].dtype)
    if k.has("intermediates rounded to the working dtype"):
        z = kept.to(k.compute)
    y, _, _ = _gelu(z, k.has("tanh for erf"))
    y = k.keep(y + bias if after else y)
    out = y * mask / (1 - P)

    _, cdf, slope = _gelu(kept.to(k.compute), k.has("tanh for erf in backward"))
    keep = torch.ones_like(mask) if k.has("mask missing in backward") else mask
    g = k.keep(dy * keep if k.has("dropout scale missing in backward") else dy * keep / (1 - P))
    if k.has("density term missing in backward"):
        dz = g * cdf
    elif k.has("other algebra"):
        dz = g * cdf + g * slope
    else:
        dz = g * (cdf + slope)
    dz = k.keep(dz)
    dbias = k.sum(g if k.has("bias gradient taken before the activation") else dz, 0)
    dweight = k.dot((without_last_row(dz) if k.has("last row dropped from dweight") else dz).T, x)
    dx = k.dot(dz, weight)
    return {"out": k.store(out), "x.grad": k.store(dx), "weight.grad": k.store(dweight), "bias.grad": k.store(dbias)}


CHAIN = Chain(
    "Linear, Bias, GeLU, Dropout",
    (
        "tail of K lost",
        "tail of K counted twice",
        "bias added after the activation",
        "pre-activation kept in 16 bits",
        "tanh for erf",
        "tanh for erf in backward",
        "mask missing in backward",
        "dropout scale missing in backward",
        "density term missing in backward",
        "bias gradient taken before the activation",
        "last row dropped from dweight",
        "low-precision accumulation",
    ),
    draw,
    forward,
    fused,
)
