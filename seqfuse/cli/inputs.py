"""Inputs, dtypes and devices, as written on the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Annotated, Any

import torch
from cyclopts import Parameter
from torch import Tensor, nn

from ..env import Env
from ..hardware import CARDS
from .target import Unable, load_target

Named = Annotated[str, Parameter(name="MODULE:NAME", help="The object, see below.")]
InputText = Annotated[str, Parameter(help="The input, such as 8x1024:bf16.")]
Json = Annotated[bool, Parameter(negative="", show_default=False, help="Print JSON.")]
NoGrad = Annotated[bool, Parameter(negative="", show_default=False, help="Plan for inference.")]
Output = Annotated[Path | None, Parameter(help="Write to this file, as .svg, .json or .txt.")]

_DTYPES = {
    torch.float32: ("float32", "fp32", "f32", "float"),
    torch.bfloat16: ("bfloat16", "bf16"),
    torch.float16: ("float16", "fp16", "f16", "half"),
    torch.float64: ("float64", "fp64", "f64", "double"),
    torch.int64: ("int64", "i64", "long"),
    torch.int32: ("int32", "i32", "int"),
}
DTYPES = {name: dtype for dtype, names in _DTYPES.items() for name in names}
MOST = 1 << 63
_SPEC = re.compile(r"(\d+(?:x\d+)*)(?::(\w+))?")


@dataclasses.dataclass(kw_only=True)
class On:
    """Options for a model and its inputs."""

    device: Annotated[
        str | None,
        Parameter(help="cpu, cuda or cuda:0, for a plan also cuda:sm_90 or h100; default: the first GPU or CPU."),
    ] = None
    dtype: Annotated[str | None, Parameter(help="Dtype of the parameters; by default that of a floating input.")] = None
    part: Annotated[str | None, Parameter(help="Path of a Sequential in the model.")] = None
    channel: Annotated[
        list[str] | None,
        Parameter(
            negative="", show_default=False, help="An extra input, such as residual=8x1024:bf16; may be repeated."
        ),
    ] = None
    evaluate: Annotated[
        bool, Parameter(name="--eval", negative="", show_default=False, help="Set evaluation mode.")
    ] = False

    def spec(self, text: str) -> Spec:
        """The input; without a dtype in the text, in the dtype of the options."""
        return parse_spec(text, self.dtype)

    def channels(self) -> dict[str, Spec]:
        """Extra inputs by name."""
        return dict(parse_channel(text, self.dtype) for text in self.channel or ())


@dataclasses.dataclass(kw_only=True)
class Under(On):
    """The same options, and autocast."""

    autocast: Annotated[str | None, Parameter(help="Run under torch.autocast with this dtype.")] = None

    def build(self, name: str, given: Spec | None) -> nn.Module:
        """The named model, in the dtype of the options, else of a floating-point input, except under autocast."""
        model = load_target(name).build()
        if self.dtype is not None:
            named = parse_floating(self.dtype)
            if given is not None and given.dtype.is_floating_point and given.dtype is not named:
                warnings.warn(f"the input is {given.dtype} and the parameters are {named}", stacklevel=2)
            model = model.to(named)
        elif given is not None and given.dtype.is_floating_point and self.autocast is None:
            model = model.to(given.dtype)
        return model.eval() if self.evaluate else model

    def drawn(self, model: nn.Module, given: Spec, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
        """Random input and extra inputs of a model."""
        x = given.draw(device, 0, vocabulary(model))
        return x, {name: one.draw(device, 1) for name, one in self.channels().items()}

    def surroundings(self, device: str, grad: bool) -> contextlib.AbstractContextManager[None]:
        """A block with the autocast of the options, and with or without gradients."""
        return surroundings(device, self.autocast, grad)


@dataclasses.dataclass(frozen=True)
class Spec:
    """A tensor's shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))}:{_DTYPES[self.dtype][0]}"

    def draw(self, device: torch.device | str, seed: int, below: int = 2) -> Tensor:
        """Random values from a seed: normal, or for integers from 0 to `below` - 1."""
        generator = torch.Generator().manual_seed(seed)
        try:
            if self.dtype.is_floating_point:
                return torch.randn(self.shape, generator=generator).to(device, self.dtype)
            return torch.randint(below, self.shape, generator=generator, dtype=self.dtype).to(device)
        except (RuntimeError, MemoryError) as error:
            raise Unable(f"{self} cannot be made on {device}: {str(error).partition(chr(10))[0]}") from error


def parse_spec(text: str, default: str | None = None) -> Spec:
    """A tensor written as `8x1024:bf16`; without a dtype, in the default if there is one, else float32."""
    found = _SPEC.fullmatch(text)
    if found is None:
        raise Unable(f"{text!r} is not an input: write a shape and a dtype (default float32), such as 8x1024:bf16")
    sizes, kind = found[1].split("x"), parse_dtype(found[2] or default or "float32")
    if max(map(len, sizes)) > 18 or math.prod(max(1, int(size)) for size in sizes) * kind.itemsize >= MOST:
        raise Unable(f"{text if len(text) < 60 else text[:57] + '...'} has more bytes than a tensor can have")
    return Spec(tuple(map(int, sizes)), kind)


def parse_channel(text: str, default: str | None = None) -> tuple[str, Spec]:
    """An extra input written as `residual=8x1024:bf16`, with the same defaults as an input."""
    name, equals, rest = text.partition("=")
    if not equals or not name.isidentifier():
        raise Unable(f"{text!r} is not a channel: write its name and the tensor, such as residual=8x1024:bf16")
    return name, parse_spec(rest, default)


def parse_seed(number: int) -> int:
    """A seed that generators accept, also after small additions."""
    if not -MOST <= number < MOST:
        raise Unable("a seed is a whole number from -2^63 to 2^63 - 1")
    return number


def parse_dtype(name: str) -> torch.dtype:
    """A dtype by one of its names."""
    if name not in DTYPES:
        known = ", ".join(names[min(1, len(names) - 1)] for names in _DTYPES.values())
        raise Unable(f"there is no dtype {name!r} here; write one of {known}")
    return DTYPES[name]


def parse_floating(name: str) -> torch.dtype:
    """A floating-point dtype, for parameters or autocast."""
    found = parse_dtype(name)
    if not found.is_floating_point:
        raise Unable(f"parameters and autocast take a floating dtype, not {name}")
    return found


def is_elsewhere(device: str) -> bool:
    """Whether a device is named by its architecture, so that this machine need not have it."""
    arch = device.partition(":")[2]
    return device.lower() in CARDS or (bool(arch) and not arch.isdigit())


def device_here(name: str | None) -> torch.device:
    """A device of this machine: the named one, by default the first GPU, or the CPU."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    Env.of(name)  # raises for an unknown device
    if is_elsewhere(name):
        raise Unable(f"{name} names an architecture, and this command runs on a device: cpu, cuda, cuda:0")
    found = torch.device(name)
    count = torch.cuda.device_count() if found.type == "cuda" else 1
    if found.type not in ("cpu", "cuda") or (found.index or 0) >= count:
        plan = "; seqfuse plan takes an architecture, such as cuda:sm_90" if found.type == "cuda" else ""
        raise Unable(f"there is no {name} here{plan}")
    return found


def vocabulary(model: nn.Module) -> int:
    """The size of the smallest embedding of a model, so that indices fit all; 2 if there is none."""
    sizes = (getattr(module, "num_embeddings", None) for module in model.modules())
    return min((size for size in sizes if isinstance(size, int)), default=2)


@contextlib.contextmanager
def surroundings(kind: str, autocast: str | None, grad: bool) -> Generator[None]:
    """A block with or without autocast and gradients."""
    low = contextlib.nullcontext() if autocast is None else torch.autocast(kind, parse_floating(autocast))
    with torch.set_grad_enabled(grad), low:
        yield
