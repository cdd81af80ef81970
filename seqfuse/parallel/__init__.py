"""Models over several processes of torch.distributed: who holds and computes what, and checkpoints of it."""

from .checkpoint import dtensors, shard, unshard
from .tensor import parallelize

__all__ = ["dtensors", "parallelize", "shard", "unshard"]
