"""The environment of a plan, and the cost of work in it."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import platform
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from . import compiler
from .errors import InputError
from .hardware import CARDS, ONEDNN_FLOAT32_WORTHWHILE, architecture_of
from .hardware import COSTS as _COSTS
from .recipes import Recipe, check_recipe
from .recipes import current as _current_recipes
from .settings import parsed

_F = TypeVar("_F", bound=Callable[..., Any])


def constant_under_compile(function: _F) -> _F:
    """Makes Dynamo call a function and treat its result as a constant; torch's own decorator would import Dynamo."""
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
    return function


@dataclasses.dataclass(frozen=True)
class Savings:
    """Estimated savings of a fusion over the operations that it replaces; negative numbers are costs.

    Args:
        launches: kernel launches (or dispatched calls) avoided.
        bytes: bytes of memory traffic avoided.
        flops: floating-point operations avoided.
    """

    launches: float = 0.0
    bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Savings) -> Savings:
        return Savings(self.launches + other.launches, self.bytes + other.bytes, self.flops + other.flops)

    def __sub__(self, other: Savings) -> Savings:
        return Savings(self.launches - other.launches, self.bytes - other.bytes, self.flops - other.flops)


_OF_TOKENS = torch.int32, torch.int64
_ARCH = re.compile(r"\d+|sm_\d+a?|gfx[0-9a-f]+")


Kernels = Literal["triton", "c"]
"""The compiler of fused kernels: Triton, or a C compiler for a CPU."""


@dataclasses.dataclass(frozen=True)
class Env:
    """The machine and call that a plan is made for.

    Args:
        device: device type, `"cpu"` or `"cuda"`.
        arch: architecture, such as `"sm_90"` or `"gfx942"`; otherwise the device type.
        dtype: dtype of the input x.
        autocast: dtype of the active autocast region, or `None`.
        grad: whether autograd is on.
        deterministic: whether `torch.use_deterministic_algorithms` is on.
        kernels: `"triton"` or `"c"`, the kind of fused kernels that can run; `None` if neither can.
        rows: number of tokens in the input, rounded up to a power of two; `None` if unknown.
        along: under autocast, the input dtype of each operation of the fusion, then the output dtype.
        recipe: the low-precision recipe that `sf.low_precision` sets for operations without one; `None` for no recipe,
            `False` if recipes are switched off.
        width: for `saves`, the last dimension of the fusion's input, taken from its neighbours; 0 if unknown.
        absorbs: for `requires`, whether the fusion can quantize its result for the next operation.
    """

    device: str = "cpu"
    arch: str = "cpu"
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    grad: bool = True
    deterministic: bool = False
    kernels: Kernels | None = None
    rows: int | None = None
    along: tuple[torch.dtype | None, ...] = ()
    width: int = 0
    recipe: Recipe | Literal[False] | None = None
    absorbs: bool = False

    @classmethod
    def of(
        cls,
        device: str | torch.device,
        *,
        dtype: torch.dtype = torch.float32,
        autocast: torch.dtype | None = None,
        grad: bool = True,
        deterministic: bool = False,
        rows: int | None = None,
        tokens: int | None = None,
        recipe: Recipe | None = None,
    ) -> Env:
        """An environment by name: `"cpu"`, `"cuda:sm_90"`, `"cuda:gfx942"`, `"h100"`, or a device of this machine.

        An architecture may be one that this machine does not have; Triton is assumed to be installed there. `tokens` is
        the number of tokens in the input (earlier name: `rows`). `dtype` is the dtype of x, `int64` for token ids.
        `recipe` applies to operations without a recipe, as in `sf.low_precision`.

        Raises:
            InputError: (SF106) for an unknown device or dtype, a dtype that operations do not accept, or a CUDA device
                that this machine does not have.
        """
        if isinstance(device, str) and device.lower() in CARDS:
            device = f"cuda:{CARDS[device.lower()]}"
        kind, _, arch = str(device).partition(":")
        if not _is_device(kind) or (arch and not _ARCH.fullmatch(arch)):
            hint = "name it as cpu, cuda:0, cuda:sm_90 or h100, cuda:sm_80 or a100, cuda:gfx942 or mi300x"
            raise InputError(f"there is no device {str(device)!r}", code="SF106", hint=hint)
        for what, given in (("dtype", dtype), ("autocast", autocast)):
            if given is not None and not isinstance(given, torch.dtype):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InputError(f"{what} must be a torch.dtype, not {given!r}", code="SF106")
        if not (dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1) or dtype in _OF_TOKENS):
            message = f"dtype must be a floating dtype of 16 bits or more, or int32 or int64 for token ids, not {dtype}"
            raise InputError(message, code="SF106")
        if autocast is not None and not autocast.is_floating_point:
            raise InputError(f"autocast must be a floating dtype, not {autocast}", code="SF106")
        check_recipe(recipe, "Env.of")
        named = bool(arch) and not arch.isdigit()
        if isinstance(device, str) and kind == "cuda" and not named and int(arch or 0) >= torch.cuda.device_count():
            hint = "name an architecture, such as cuda:sm_90, for a machine that is not here"
            raise InputError(f"there is no {device} here", code="SF106", hint=hint)
        if rows is not None and tokens is not None:
            raise InputError("tokens and rows are one thing: give tokens alone", code="SF106")
        name, rows = ("rows", rows) if tokens is None else ("tokens", tokens)
        if rows is not None and (type(rows) is not int or rows < 0):
            raise InputError(f"{name} must be a whole number of at least 0, got {rows!r}", code="SF106")
        if not named:
            arch = _architecture(kind, int(arch) if arch else None)
        kernels = ("triton" if kind == "cuda" else None) if named else kernels_on(kind)
        rows = None if rows is None else bucket(rows)
        return cls(kind, arch, dtype, autocast, grad, deterministic, kernels, rows, recipe=recipe)

    @classmethod
    def like(cls, x: Tensor) -> Env:
        """The environment of a call on `x` on this machine."""
        env = cls.of(
            x.device,
            autocast=autocast_of(x.device.type),
            grad=torch.is_grad_enabled(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            rows=_counted(x.shape),
        )
        return dataclasses.replace(env, dtype=x.dtype, recipe=_current_recipes.get().default)

    @property
    def triton(self) -> bool:
        """Whether Triton kernels can run."""
        return self.kernels == "triton"

    @property
    def leaving(self) -> torch.dtype:
        """The output dtype. A `fwd` with an argument `dtype` returns it in the input dtype of the next operation."""
        return (self.along[-1] if self.along else None) or self.dtype

    @property
    def tokens(self) -> int:
        """Number of tokens for estimates: `rows`, or 1024 if unknown."""
        return self.rows or 1024

    @property
    def itemsize(self) -> int:
        """Bytes of an element in estimates; under autocast, of the autocast dtype."""
        return (self.autocast or self.dtype).itemsize

    def part(self, first: int) -> Env:
        """The environment for the operations of a fusion from position `first` on."""
        return self.between(self.along[first:]) if self.along else self

    def between(self, along: tuple[torch.dtype | None, ...]) -> Env:
        """The environment for operations with these input dtypes; the last one is the output dtype."""
        return dataclasses.replace(self, dtype=along[0] or self.dtype, along=along) if along else self

    def cast(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of a GEMM operand of dtype `dtype`: under autocast the autocast dtype, except for float64."""
        if self.autocast is None or dtype is torch.float64 or not dtype.is_floating_point:
            return dtype
        return self.autocast

    def multiplies_by_onednn(self, products: int) -> bool:
        """Whether a GEMM of so many multiplications runs in oneDNN; GEMMs called by autograd never do."""
        if self.device != "cpu" or self.dtype is not torch.float32 or products < ONEDNN_FLOAT32_WORTHWHILE:
            return False
        return ONEDNN_FLOAT32

    @property
    def widens(self) -> bool:
        """Whether GEMMs are computed in float32 because this CPU has no instructions for their dtype."""
        return self.device == "cpu" and self.cast(self.dtype) in WIDENED

    def microseconds(self, savings: Savings) -> float:
        """Estimated time of `savings` on this machine. Only the order of magnitude counts; it ranks schedules."""
        launch, bandwidth, rate = _COSTS.get(self.arch) or _COSTS["cpu" if self.device == "cpu" else "gpu"]
        return savings.launches * launch + savings.bytes / bandwidth + savings.flops / rate

    def said(self, tokens: int | None = None) -> str:
        """The environment as printed in plans; `tokens` replaces the rounded number of tokens."""
        text = f"{self.arch if self.arch == self.device else f'{self.device}:{self.arch}'} {short(self.dtype)}"
        text += f" autocast {short(self.autocast)}" if self.autocast else ""
        text += f", {self.recipe}" if self.recipe else ", low precision off" if self.recipe is False else ""
        count = self.rows if tokens is None else tokens
        if count is not None:
            exact = "" if tokens is not None or count < 2 else "up to "
            text += f", {exact}{count:,} token{'' if count == 1 else 's'}"
        return text + ("" if self.grad else ", no grad")

    __str__ = said


@functools.cache
def _is_device(kind: str) -> bool:
    try:
        torch.device(kind)
    except RuntimeError:
        return False
    return True


def short(dtype: torch.dtype | None) -> str:
    """The name of a dtype without the prefix `torch.`."""
    return str(dtype).removeprefix("torch.")


def rows_of(shape: Iterable[int]) -> int:
    """Number of rows: the product of all but the last dimension."""
    *leading, _ = tuple(shape) or (1,)
    return functools.reduce(lambda a, b: a * b, leading, 1)


def tokens_of(x: Tensor) -> int | None:
    """Number of tokens: elements of an integer tensor, otherwise rows; `None` for a symbolic size of a compiler."""
    whole = not (x.is_floating_point() or x.is_complex())
    return _counted((*x.shape, 1) if whole else x.shape)


def _counted(shape: Sequence[int]) -> int | None:
    # Reading a symbolic size would specialize it.
    if any(type(n) is not int for n in shape):
        return None
    return rows_of(shape) if 0 not in shape else 0


def bucket(rows: int) -> int:
    """Rows rounded up to a power of two."""
    return 1 << (rows - 1).bit_length() if rows > 0 else 0


any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled  # pyright: ignore[reportPrivateUsage]
"""Whether autocast is on for any device: one call instead of several by device name."""


# Computed once: torch 2.11 cannot trace this call.
_WITH_AUTOCAST = frozenset(filter(torch.amp.is_autocast_available, ("cpu", "cuda", "xpu", "mps")))


def autocast_of(kind: str) -> torch.dtype | None:
    """Dtype of the autocast region active for a device type, or `None`."""
    asked = not torch.compiler.is_dynamo_compiling()  # Dynamo can trace neither call
    if asked and not any_autocast():
        return None
    asked = asked and torch.amp.is_autocast_available(kind)
    if not (kind in _WITH_AUTOCAST or asked) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def _without_instructions() -> frozenset[torch.dtype]:
    """The dtypes for whose GEMMs this CPU has no instructions, according to oneDNN."""
    try:
        has: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    except (AttributeError, RuntimeError):  # a torch without oneDNN uses its own GEMMs
        return frozenset()
    return frozenset() if has else frozenset({torch.bfloat16})


def _mkl_on_amd() -> bool:
    """Whether torch's float32 GEMMs are MKL's on an AMD processor, for which MKL has no AVX-512 kernels."""
    if not torch.backends.mkl.is_available():
        return False
    try:
        stated = Path("/proc/cpuinfo").read_text()
    except OSError:
        stated = platform.processor()
    return "AuthenticAMD" in stated


_BY_PROCESSOR = parsed()[0].cpu_gemms == "auto"

WIDENED = _without_instructions() if _BY_PROCESSOR else frozenset[torch.dtype]()
"""The dtypes whose GEMMs are computed in float32 on this CPU, and rounded once."""

_MKL_ON_AMD = _BY_PROCESSOR and _mkl_on_amd()

GROUPS_IN_C = _MKL_ON_AMD and torch.backends.cpu.get_cpu_capability() == "AVX2"
"""Whether C kernels of this library multiply small groups of float32 rows: faster than MKL with AVX2."""

ONEDNN_FLOAT32 = (
    _MKL_ON_AMD
    and torch.backends.cpu.get_cpu_capability() == "AVX512"
    and torch.backends.mkldnn.is_available()
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)
"""Whether large float32 GEMMs on this CPU run in oneDNN, which is twice as fast as MKL."""


@functools.cache
def _architecture(kind: str, index: int | None) -> str:
    if kind != "cuda" or not torch.cuda.is_available():
        return kind
    return architecture_of(cast(Any, torch.cuda).get_device_properties(index or 0))


def kernels_on(kind: str) -> Kernels | None:
    """The compiler of kernels for a device type of this machine."""
    if _triton_runs(kind):
        return "triton"
    return "c" if kind == "cpu" and not why_no_c() else None


@functools.cache
def _triton_runs(kind: str) -> bool:
    if not triton_installed():
        return False
    if kind == "cuda":
        return torch.cuda.is_available()
    return kind == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def triton_installed() -> bool:
    """Whether Triton can be imported, without importing it."""
    return importlib.util.find_spec("triton") is not None


def why_no_c() -> str:
    """Why C kernels cannot run on the CPU of this machine; empty if they can."""
    if not triton_installed():
        return "Triton, whose device functions C kernels are made of, is not installed"
    return compiler.why_none()
