"""What fusions that begin with a product ask of it."""

from __future__ import annotations

from ..env import Env
from ..ops import Bias, Linear


def one_dtype(linear: Linear, bias: Bias | None) -> bool:
    """Whether a product can start from the bias: torch promotes in `x + bias`, not in `linear(x, weight, bias)`."""
    return bias is None or linear.weight.dtype == bias.bias.dtype


def output_bytes(linear: Linear, env: Env) -> float:
    """Bytes of the product; of one row where the number of rows is not known."""
    dtype = env.autocast or linear.weight.dtype
    return float((env.rows or 1) * linear.out_features * dtype.itemsize)
