# pyright: basic
"""Softmax of rows of scores with dropout as C, forward and backward: attention that is made in blocks on a CPU.

Both write over what they read. A row sees keys by its place alone; what a mask hides is -inf already.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from ... import compiler
from .._device import threshold_and_scale
from .call import PARALLEL, CKernel, header


class ScoreBlock(NamedTuple):
    """Where rows and keys of a block stand, and what they see.

    Args:
        row: the first row.
        key: the first key.
        rows: of the whole.
        keys: of the whole.
        causal: whether a row sees no key behind it.
        window: how many it sees on each side, its own included; all if `None`.
    """

    row: int
    key: int
    rows: int
    keys: int
    causal: bool
    window: int | None


@functools.cache
def _kernel(backward: bool, drops: bool) -> CKernel:
    text = f"#define BACKWARD {int(backward)}\n#define DROPS {int(drops)}\n"
    return CKernel("\n".join([text, *map(header, ("head.h", "philox.h", "softmax.h"))]), 3, 10, 1)


def ask(drops: bool) -> None:
    """Have both kernels compiled before they are called."""
    for backward in (False, True):
        compiler.ask(_kernel(backward, drops).source)


@functools.cache
def compiled(drops: bool) -> None:
    """Compile both kernels.

    Raises:
        CompileError: if they cannot be.
    """
    for backward in (False, True):
        _kernel(backward, drops).function()


def weights_(scores: Tensor, place: ScoreBlock, seed: Tensor | None, p: float) -> Tensor:
    """Overwrite scores by weights, of which some are dropped; returns the log-sum-exp.

    w = softmax(scores) over the keys that a row sees, times keep / (1 - p); zeros for a row that sees none, whose
    log-sum-exp is 0. The mask is that of `kernels.c.mask` over contiguous [*, rows, keys] of the whole.

    scores: [*, R, K] float32, contiguous; the log-sum-exp: [*, R].
    """
    lse = torch.empty(scores.shape[:-1], dtype=torch.float32, device="cpu")
    _run(False, scores, lse, place, seed, p)
    return lse


def gradients_(scores: Tensor, gradients: Tensor, place: ScoreBlock, seed: Tensor | None, p: float) -> None:
    """Overwrite scores by the weights that `weights_` makes of them, and the gradients of these by those of the scores.

    With w = softmax(scores) and g = keep / (1 - p) times the gradient of a weight, dscores = w (g - sum w g); 0 for
    keys that a row does not see.

    scores, gradients: [*, R, K] float32, contiguous.
    """
    _run(True, scores, gradients, place, seed, p)


def _run(backward: bool, scores: Tensor, other: Tensor, place: ScoreBlock, seed: Tensor | None, p: float) -> None:
    R, K = scores.shape[-2:]
    drops = seed is not None and p > 0
    threshold, scale, _ = threshold_and_scale(p) if drops else (0, 1.0, False)
    first = seed.data_ptr() if drops and seed is not None else 0
    threads = torch.get_num_threads() if scores.numel() >= PARALLEL else 1
    numbers = (R, K, place.row, place.key, place.rows, place.keys, place.causal, place.window or 0, threshold)
    rows = math.prod(scores.shape[:-1])
    _kernel(backward, drops).function()(first, scores.data_ptr(), other.data_ptr(), rows, *numbers, scale, threads)
