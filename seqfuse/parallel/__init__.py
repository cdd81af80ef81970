"""Many processes: a model in stages over torch.distributed."""

from .microbatches import stages
from .pipeline import pipeline
from .together import clip_grad_norm_, everywhere

__all__ = ["clip_grad_norm_", "everywhere", "pipeline", "stages"]
