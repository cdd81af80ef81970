"""Inference: a key-value cache, and token-by-token generation."""

from .generate import generate, stream
from .kvcache import KVCache

__all__ = ["KVCache", "generate", "stream"]
