"""Spellings of operations in captured graphs, and the order in which they are looked for."""

from __future__ import annotations

from . import attention, experts, linear, norm, pointwise

MATCHERS = (
    *experts.MATCHERS,
    *attention.MATCHERS,
    *pointwise.SPELLED_OUT,
    *linear.GATED,
    *norm.LENGTHS,
    *pointwise.MATCHERS,
    *norm.MATCHERS,
    *linear.MATCHERS,
    *pointwise.PRODUCTS,
)
"""The matchers, large spellings before their parts."""
