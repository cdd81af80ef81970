"""Models over several processes of torch.distributed: tensor parallel, pipeline parallel, and their checkpoints."""

from .checkpoint import dtensors, shard, unshard
from .collectives import clip_grad_norm_, everywhere
from .pipeline import pipeline, stages
from .tensor import parallelize

__all__ = ["clip_grad_norm_", "dtensors", "everywhere", "parallelize", "pipeline", "shard", "stages", "unshard"]
