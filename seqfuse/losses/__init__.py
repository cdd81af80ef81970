"""Losses that never hold all logits: the last GEMM and the cross-entropy in one operation."""

from .linearcrossentropy import LinearCrossEntropy, linear_cross_entropy

__all__ = ["LinearCrossEntropy", "linear_cross_entropy"]
