"""Layers of transformers: thin compositions of operations, each a `Sequential` that fusions see through."""

from .attention import MultiHeadAttention
from .convert import from_torch
from .feedforward import FeedForward
from .layouts import pack_qkv, unpack_qkv
from .transformer import TransformerLayer, TransformerStack

__all__ = [
    "FeedForward",
    "MultiHeadAttention",
    "TransformerLayer",
    "TransformerStack",
    "from_torch",
    "pack_qkv",
    "unpack_qkv",
]
