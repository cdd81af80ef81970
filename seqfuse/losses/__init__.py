"""Losses that never hold all logits: the last product and the cross-entropy in one."""

from .linearcrossentropy import LinearCrossEntropy, linear_cross_entropy

__all__ = ["LinearCrossEntropy", "linear_cross_entropy"]
