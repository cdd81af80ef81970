# pyright: basic
"""Masks of dropout as C: where the fused kernels do not apply, such as within attention."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ... import compiler
from .._philox import threshold_and_scale
from .call import PARALLEL, Kernel, header

_PART = 4096


@functools.cache
def _kernel() -> Kernel:
    text = (
        f"{header('head.h')}\n{header('philox.h')}\n"
        "void k(const int64_t *seed, uint8_t *drop, I size, I parts, I threshold, int threads) {\n"
        "#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)\n"
        "for (I part = 0; part < parts; part++) {\nKeys keys;\nkeys_of(*seed, &keys);\n"
        f"I last = (part + 1) * {_PART} < size ? (part + 1) * {_PART} : size;\n"
        f"for (I at = part * {_PART}; at < last; at += NB) {{\n"
        "uint32_t w[NB];\nI n = last - at < NB ? last - at : NB;\nwords(&keys, at, n, w);\n"
        "#pragma omp simd\nfor (I i = 0; i < n; i++) drop[at + i] = w[i] < (uint32_t)threshold;\n}\n}\n}\n"
    )
    return Kernel(text, 2, 3, 0)


def ask() -> None:
    """Note that the kernel will be needed."""
    compiler.ask(_kernel().source)


def drop_mask(seed: Tensor, shape: torch.Size, p: float) -> Tensor:
    """True with probability p < 1, bool of `shape`.

    Element i of the contiguous order takes word i & 3 of counter i >> 2, and is kept iff that is at least
    floor(p 2^32). seed: one int64.
    """
    drop = torch.empty(shape, dtype=torch.bool)
    size = math.prod(shape)
    threads = torch.get_num_threads() if size >= PARALLEL else 1
    function = _kernel().function()
    function(seed.data_ptr(), drop.data_ptr(), size, -(-size // _PART), threshold_and_scale(p)[0], threads)
    return drop
