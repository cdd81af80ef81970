"""What a kernel can be launched with, as data: the offline compile check walks it and no launch reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

Type = str | tuple["Type", ...]
"""Triton's spelling of an argument's type: `"*bf16"`, `"i64"`, `"fp32"`, `"tensordesc<bf16[128, 64]>"`; a tuple for a
tuple argument, `"none"` for a `None` in it."""

TRITON_DTYPES = {
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "uint64": "u64",
    "bool": "u1",
}
"""Triton's name of a torch dtype, by the latter's name without `torch.`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One launchable configuration of one kernel.

    Args:
        name: unique in its module, readable in a table: `"pointwise[bias,gelu] bf16 2048"`.
        kernel: the `triton.jit` function.
        signature: type of every argument that is not a constexpr, in the order of the kernel's parameters.
        constexprs: value of every constexpr argument. Arguments that are `None` belong here, too.
        divisible: arguments whose pointer or number is a multiple of 16; for a tuple argument, of all its members.
        num_warps: as in a launch.
        num_stages: as in a launch.
        has_dot: whether it multiplies matrices, so that `wgmma` must appear on sm_90.
        targets: prefixes of the architectures it is launched on (`"sm_"`, `"sm_90"`, `"gfx"`); empty for all.
        options: further compiler options, such as `maxnreg`.
    """

    name: str
    kernel: Any
    signature: Mapping[str, Type]
    constexprs: Mapping[str, Any]
    divisible: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    has_dot: bool = False
    targets: tuple[str, ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    def runs_on(self, target: str) -> bool:
        """Whether it is launched on an architecture such as `"sm_90"` or `"gfx942"`."""
        return not self.targets or target.startswith(self.targets)
