"""Layers of transformers: thin compositions of operations, each a `Sequential` that fusions can cross."""

from typing import TYPE_CHECKING

from .. import ops
from ..errors import no_such_name as _no_such_name
from .convert import from_torch
from .layouts import pack_qkv, unpack_qkv
from .transformer import FeedForward, MultiHeadAttention, TransformerLayer, TransformerStack

__all__ = [
    "FeedForward",
    "MultiHeadAttention",
    "TransformerLayer",
    "TransformerStack",
    "from_torch",
    "pack_qkv",
    "unpack_qkv",
]

if not TYPE_CHECKING:  # type checkers know the names

    def __getattr__(name: str) -> object:
        raise _no_such_name(__name__, name, ("sf.nn", __all__), ("sf.ops", ops.__all__))


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
