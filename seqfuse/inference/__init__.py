"""Inference: keys and values kept from call to call, and tokens made one by one."""

from .generate import generate, stream
from .kvcache import KVCache

__all__ = ["KVCache", "generate", "stream"]
