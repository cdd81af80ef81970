"""LayerNorm, Scale: y = ((x - mean) rstd weight + bias) scale."""

import torch
import torch.nn.functional as F

from seqfuse.testing import seeded_randn

from .simulated import Chain, Kernel, Tensors, coarse, power_of_two_above, rows_in, without_last_row

ROWS, COLUMNS, EPS, SCALE = 37, 72, 1e-5, 0.7


def draw(regime: str, seed: int) -> Tensors:
    return {
        "x": rows_in(regime, (ROWS, COLUMNS), seed),
        "weight": seeded_randn((COLUMNS,), seed + 1, dtype=torch.float64),
        "bias": seeded_randn((COLUMNS,), seed + 2, dtype=torch.float64),
        "d_out": seeded_randn((ROWS, COLUMNS), seed + 3, dtype=torch.float64),
    }


def forward(t: Tensors) -> Tensors:
    return {"out": F.layer_norm(t["x"], (COLUMNS,), t["weight"], t["bias"], EPS) * SCALE}


def fused(t: Tensors, k: Kernel) -> Tensors:
    x, weight, bias, dy = k.load(t["x"], t["weight"], t["bias"], t["d_out"])
    seen = x
    if k.has("tail column lost from the statistics"):
        seen = x[:, :-1]
    if k.has("tail column counted twice in the statistics"):
        seen = torch.cat((x, x[:, -1:]), 1)
    mean = k.sum(seen, 1)[:, None] / COLUMNS
    if seen is x:
        mean = mean + k.sum(seen - mean, 1)[:, None] / COLUMNS  # the sum itself loses digits under an offset
    if k.has("mean in 16 bits"):
        mean = mean.bfloat16().to(mean.dtype)
    squares = k.sum((seen - mean).square(), 1)[:, None]
    variance = squares / (COLUMNS - 1 if k.has("variance over N-1") else COLUMNS)
    if k.has("missing eps"):
        rstd = variance.rsqrt()
    elif k.has("eps outside the root"):
        rstd = 1 / (variance.sqrt() + EPS)
    elif k.has("other algebra"):
        rstd = 1 / (variance + EPS).sqrt()
    else:
        rstd = (variance + EPS).rsqrt()
    if k.has("approximate reciprocal root"):
        rstd = coarse(rstd)
    normal = (x - mean) * rstd
    y = k.keep(k.fma(normal, weight, bias)) * SCALE
    if k.has("one wrong element"):
        y[ROWS // 2, COLUMNS // 3] = y[ROWS // 2, COLUMNS // 3 + 1]

    g = dy if k.has("scale forgotten in backward") else k.keep(dy * SCALE)
    dweight = k.sum((without_last_row(g) if k.has("last row dropped from dweight") else g) * normal, 0)
    dbias = k.sum(g, 0)
    h = g * weight
    divisor = power_of_two_above(COLUMNS) if k.has("block size as divisor") else COLUMNS
    mean_term = k.sum(h, 1)[:, None] / divisor
    variance_term = k.sum(h * normal, 1)[:, None] / divisor
    if k.has("mean term missing in dx"):
        mean_term = torch.zeros_like(mean_term)
    if k.has("variance term missing in dx"):
        variance_term = torch.zeros_like(variance_term)
    if k.has("other algebra"):
        dx = h * rstd - (mean_term + normal * variance_term) * rstd
    else:
        dx = k.fma(-normal, variance_term, h - mean_term) * rstd
    return {"out": k.store(y), "x.grad": k.store(dx), "weight.grad": k.store(dweight), "bias.grad": k.store(dbias)}


CHAIN = Chain(
    "LayerNorm, Scale",
    (
        "missing eps",
        "eps outside the root",
        "variance over N-1",
        "tail column lost from the statistics",
        "tail column counted twice in the statistics",
        "mean in 16 bits",
        "approximate reciprocal root",
        "one wrong element",
        "scale forgotten in backward",
        "last row dropped from dweight",
        "low-precision accumulation",
        "block size as divisor",
        "mean term missing in dx",
        "variance term missing in dx",
        "truncating store",
    ),
    draw,
    forward,
    fused,
)
