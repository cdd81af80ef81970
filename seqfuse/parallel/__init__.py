"""Many processes: a model in stages over torch.distributed."""

from .pipeline import pipeline

__all__ = ["pipeline"]
