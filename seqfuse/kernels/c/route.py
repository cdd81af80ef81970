# pyright: basic
"""The router of experts in C: `kernels.route` on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from .call import CKernel, Decided, Outline, by_parts, load_as, parts_of, store_as, written

TINY = 1e-20
"""Added to the sum of sigmoid scores, which may all be 0."""


@functools.lru_cache(64)
def _kernel(
    of: torch.dtype, softmax: bool, normalize: bool, of_d: torch.dtype | None, of_out: torch.dtype
) -> CKernel:  # fmt: skip
    """For each token the scores `s` of all experts, then factors, or with their gradient `of_d` that of the logits."""
    simd, logit = "#pragma omp simd", load_as(of, "logits", "row * E + e")
    row = f"const int64_t *restrict at = experts + row * K;\n{simd}\nfor (I e = 0; e < E; e++) s[e] = {logit};\n"
    if softmax:
        row += (
            "float top = -__builtin_inff(), total = 0.f;\n"
            f"{simd} reduction(max : top)\nfor (I e = 0; e < E; e++) top = s[e] > top ? s[e] : top;\n"
            f"{simd} reduction(+ : total)\nfor (I e = 0; e < E; e++) {{\ns[e] = exp_(s[e] - top);\ntotal += s[e];\n}}\n"
            f"{simd}\nfor (I e = 0; e < E; e++) s[e] /= total;\n"
        )
    else:
        row += f"{simd}\nfor (I e = 0; e < E; e++) s[e] = 1.f / (1.f + exp_(-s[e]));\n"
    if normalize:
        row += "float sum = tiny;\nfor (I j = 0; j < K; j++) sum += s[at[j]];\n"
    if of_d is None:
        value = "s[at[j]] / sum * scale" if normalize else "s[at[j]] * scale"
        row += f"for (I j = 0; j < K; j++) {store_as(of_out, 'out', 'row * K + j', value)}\n"
    else:
        given = f"{load_as(of_d, 'd_probs', 'row * K + j')} * scale"
        less = ""
        row += f"float rest = 0.f;\n{simd}\nfor (I e = 0; e < E; e++) d[e] = 0.f;\n"
        if normalize:  # by differences, because numbers near their mean would lose most of their digits
            other = load_as(of_d, "d_probs", "row * K + i")
            less = f"float less = {given} * tiny;\n"
            less += f"for (I i = 0; i < K; i++) less += s[at[i]] * ({given} - {other} * scale);\n"
            given = "less / sum / sum"
        row += f"for (I j = 0; j < K; j++) {{\n{less}d[at[j]] = {given};\nrest += d[at[j]] * s[at[j]];\n}}\n"
        value = "s[e] * (d[e] - rest)" if softmax else "d[e] * s[e] * (1.f - s[e])"
        row += f"{simd}\nfor (I e = 0; e < E; e++) {store_as(of_out, 'out', 'row * E + e', value)}\n"
    names = [*["const void *restrict d_probs"] * (of_d is not None), "const void *restrict logits"]
    pointers = [*names, "const int64_t *restrict experts", "void *restrict out"]
    memory = "float *restrict memory = malloc(8 * E), *restrict s = memory, *restrict d = s + E;\n(void)d;\n"
    return written(pointers, ["M", "E", "K", "parts"], ["scale", "tiny"], by_parts("M", "", row, memory))


def decide_route(a: Any, made: Sequence[Outline | None]) -> Decided:
    """Decide `route.route_factors`, or `route.route_gradients` if gradients of the factors are given."""
    of_d = a.d_probs.dtype if "d_probs" in vars(a) else None
    (result,), (rows, columns) = made, a.logits.shape
    assert result is not None
    kernel = _kernel(a.logits.dtype, a.softmax, a.normalize, of_d, result[1])
    parts = parts_of(rows, columns, False)
    numbers = (rows, columns, a.experts.shape[1], parts, a.scale, 0.0 if a.softmax else TINY)
    return Decided(kernel, made, numbers, a.logits.numel())
