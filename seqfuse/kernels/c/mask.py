# pyright: basic
"""Dropout masks in C, for use where the fused kernels do not apply, such as within attention."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ... import compiler
from .. import recording
from .._device import threshold_and_scale
from .._launch import is_faking, traced
from .call import PARALLEL, CKernel, written

_PIECE = 4096


@functools.cache
def _kernel() -> CKernel:
    """Spans of a mask: element i of span j is at position `starts[j] + i`; without starts, at i."""
    body = (
        f"I pieces = (length + {_PIECE - 1}) / {_PIECE};\n"
        "#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)\n"
        "for (I part = 0; part < spans * pieces; part++) {\nKeys keys;\nkeys_of(*seed, &keys);\n"
        f"I span = part / pieces, at = part % pieces * {_PIECE};\n"
        f"I last = at + {_PIECE} < length ? at + {_PIECE} : length;\n"
        "I first = starts ? starts[span] : 0;\n"
        "for (; at < last; at += NB) {\n"
        "uint32_t w[NB];\nI n = last - at < NB ? last - at : NB;\nwords(&keys, first + at, n, w);\n"
        "uint8_t *to = drop + span * length + at;\n"
        "#pragma omp simd\nfor (I i = 0; i < n; i++) to[i] = w[i] < (uint32_t)threshold;\n}\n}\n"
    )
    pointers = ["const int64_t *seed", "const int64_t *starts", "uint8_t *drop"]
    return written(pointers, ["spans", "length", "threshold"], [], body, "philox.h")


def makes_mask(seed: Tensor) -> bool:
    """Whether C computes a mask: of a plain tensor outside of modes, or of a fake one, for which only shapes matter."""
    return (type(seed) is Tensor and not traced()) or (is_faking() and not recording())


def mask_on_cpu(seed: Tensor, shape: Sequence[int], p: float, starts: Tensor | None = None) -> Tensor:
    """True with probability p < 1, bool of `shape`.

    Element i of the contiguous order reads word i & 3 of counter i >> 2, and is kept iff that word is at least
    floor(p 2^32); with `starts`, int64 [n], and a shape of [n, length], the order of row j begins at `starts[j]`.
    seed: one int64.
    """
    drop = torch.empty(shape, dtype=torch.bool, device="cpu")  # also with another default device
    if is_faking():
        compiler.ask(_kernel().source)
        return drop
    size = drop.numel()
    spans = 1 if starts is None else starts.shape[0]
    threads = torch.get_num_threads() if size >= PARALLEL else 1
    starts = None if starts is None else starts.contiguous()
    first = 0 if starts is None else starts.data_ptr()
    threshold = threshold_and_scale(p)[0]
    _kernel().function()(seed.data_ptr(), first, drop.data_ptr(), spans, size // max(spans, 1), threshold, threads)
    return drop
