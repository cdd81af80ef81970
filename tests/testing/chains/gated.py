"""Add, RMSNorm, SwiGLU: h = x + residual; n = h rstd weight; y = silu(first half of n) (second half of n)."""

import torch
import torch.nn.functional as F

from seqfuse.testing import seeded_randn

from .simulated import Chain, Kernel, Tensors, coarse, rows_in

ROWS, COLUMNS, EPS = 37, 96, 1e-5


def draw(regime: str, seed: int) -> Tensors:
    return {
        "x": rows_in(regime, (ROWS, COLUMNS), seed),
        "residual": rows_in(regime, (ROWS, COLUMNS), seed + 1),
        "weight": seeded_randn((COLUMNS,), seed + 2, dtype=torch.float64),
        "d_out": seeded_randn((ROWS, COLUMNS // 2), seed + 3, dtype=torch.float64),
        "d_stream": seeded_randn((ROWS, COLUMNS), seed + 4, dtype=torch.float64),
    }


def forward(t: Tensors) -> Tensors:
    stream = t["x"] + t["residual"]
    gate, up = F.rms_norm(stream, (COLUMNS,), t["weight"], EPS).chunk(2, -1)
    return {"out": F.silu(gate) * up, "stream": stream}


def fused(t: Tensors, k: Kernel) -> Tensors:
    x, residual, weight, dy, d_stream = k.load(t["x"], t["residual"], t["weight"], t["d_out"], t["d_stream"])
    h = k.keep(x + residual)
    mean_square = k.sum(h.square(), 1)[:, None] / COLUMNS
    variance = mean_square if k.has("missing eps") else mean_square + EPS
    rstd = 1 / variance.sqrt() if k.has("other algebra") else variance.rsqrt()
    normal = h * rstd
    n = k.keep(normal * weight)
    gate, up = n.chunk(2, -1)
    if k.has("gate and up swapped"):
        gate, up = up, gate
    sigmoid = 1 / (1 + torch.exp2(gate * -1.4426950408889634)) if k.has("other algebra") else gate.sigmoid()
    if k.has("approximate sigmoid"):
        sigmoid = coarse(sigmoid)
    silu = k.keep(gate * sigmoid)
    y = silu * up

    if k.has("derivative of silu without its second term"):
        slope = sigmoid
    else:
        slope = k.fma(gate * (1 - sigmoid), sigmoid, sigmoid)
    dgate, dup = k.keep(dy * up * slope), k.keep(dy * silu)
    swapped = k.has("gradients of gate and up swapped") or k.has("gate and up swapped")
    dn = torch.cat((dup, dgate) if swapped else (dgate, dup), -1)
    dweight = k.sum(dn * normal, 0)
    g = dn * weight
    divisor = COLUMNS // 2 if k.has("half the width as divisor") else COLUMNS
    term = k.sum(g * normal, 1)[:, None] / divisor
    if k.has("norm term missing in dx"):
        term = torch.zeros_like(term)
    dh = k.keep(k.fma(-normal, term, g) * rstd)
    total = dh if k.has("gradient of the residual stream dropped") else dh + d_stream
    result = {"out": y, "stream": h, "x.grad": total, "residual.grad": total, "weight.grad": dweight}
    return {key: k.store(value) for key, value in result.items()}


CHAIN = Chain(
    "Add, RMSNorm, SwiGLU",
    (
        "missing eps",
        "gate and up swapped",
        "gradients of gate and up swapped",
        "derivative of silu without its second term",
        "approximate sigmoid",
        "half the width as divisor",
        "norm term missing in dx",
        "gradient of the residual stream dropped",
    ),
    draw,
    forward,
    fused,
)
