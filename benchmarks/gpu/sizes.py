"""Sizes of the rows: real ones for the measured machine, and tiny ones to check every row on any machine."""

from __future__ import annotations

import dataclasses

import plain
import torch

Shape = tuple[int, int]
FIRST_GPU = torch.device("cuda", 0)


@dataclasses.dataclass(frozen=True)
class Model(plain.Spec):
    """One layer of a model with a name; V classes."""

    name: str = ""
    V: int = 0


MODELS = (
    Model(1600, 6400, 25, 25, 64, False, name="gpt2-xl", V=50304),
    Model(2560, 10240, 32, 32, 80, False, name="gpt3-2.7b", V=50304),
    Model(4096, 16384, 32, 32, 128, False, name="gpt3-6.7b", V=50304),
    Model(2048, 8192, 32, 8, 64, True, name="llama3-1b", V=128256),
    Model(4096, 11008, 32, 32, 128, True, name="llama2-7b", V=32000),
    Model(4096, 14336, 32, 8, 128, True, name="llama3-8b", V=128256),
)


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Sizes of a mixture of experts: width, width of an expert, number of experts, and experts per token."""

    name: str
    H: int
    F: int
    experts: int
    top_k: int


MAIN = ("gpt3-6.7b", "llama3-8b")  # measured before the other models


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the rows, most important first; by default all real sizes, on the first GPU."""

    device: torch.device = FIRST_GPU
    compile_modes: tuple[str, ...] = ("default", "max-autotune-no-cudagraphs")  # as peers; empty for none
    checked_rows: int = 512  # for the error bound
    norms: tuple[Shape, ...] = tuple((32768, n) for n in (8192, 4096, 1024, 16384, 2048, 32768))  # rows and columns
    more_norms: tuple[Shape, ...] = (  # measured if there is time
        *((32768, n) for n in (512, 256, 65536)),
        *((4096, 512 * i) for i in range(31, 1, -1)),
    )
    models: tuple[Model, ...] = MODELS
    tokens: tuple[int, ...] = (8192, 2048, 16384, 512)  # of blocks, in order of importance
    sequence: int = 2048  # length of sequences for attention
    decodes: tuple[Shape, ...] = (  # batch and cache length
        (16, 8192), (64, 8192), (1, 8192), (1, 32768), (16, 32768), (64, 2048), (16, 2048), (1, 2048), (64, 32768),
        *((b, n) for n in (128, 512) for b in (64, 16, 1)),
    )  # fmt: skip
    mixtures: tuple[Mixture, ...] = (
        Mixture("mixtral-8x7b", 4096, 14336, 8, 2),
        Mixture("qwen3-moe-30b", 2048, 768, 128, 8),
    )
    dtype: torch.dtype = torch.bfloat16
    dropout: float = 0.1  # in layers of GPT models


real = Sizes


def few(dtype: torch.dtype) -> Sizes:
    """Shapes of different kinds, of the main models, in any dtype.

    In float32 without dropout, since eager torch draws other masks, and its errors count there, too.
    """
    return Sizes(
        dtype=dtype,
        dropout=0.0 if dtype is torch.float32 else 0.1,
        compile_modes=(),
        norms=((4096, 8192), (4099, 1024)),
        more_norms=((1024, 65536), (2048, 1000), (512, 7777)),
        models=tuple(model for model in MODELS if model.name in MAIN),
        tokens=(2048,),
        decodes=((16, 8192), (1, 32768), (64, 129)),
        mixtures=(Mixture("few", 1024, 1536, 8, 2), Mixture("many", 512, 256, 64, 8)),
    )


def tiny(dtype: torch.dtype = torch.float32) -> Sizes:
    """Every row, small enough for Triton's interpreter on a CPU."""
    return Sizes(
        device=torch.device("cpu"),
        compile_modes=(),
        checked_rows=24,
        norms=((24, 40),),
        more_norms=((17, 72),),
        models=(Model(16, 32, 2, 2, 8, False, name="gpt", V=50), Model(16, 24, 4, 2, 8, True, name="llama", V=50)),
        tokens=(16,),
        sequence=8,
        decodes=((2, 12),),
        mixtures=(Mixture("mixture", 16, 24, 4, 2),),
        dtype=dtype,
    )
