"""Rates and thresholds of devices, by which plans are made where nothing was measured.

Tiles and limits of a kernel stand with the kernel.
"""

from __future__ import annotations

import re
from typing import Any

COSTS = {
    "cpu": (5.0, 1.0e4, 1.0e5),
    "sm_90": (4.0, 4.3e6, 7.8e8),
    "sm_80": (4.0, 1.7e6, 2.5e8),
    "gpu": (4.0, 1.5e6, 2e8),
}
"""Microseconds per launch, bytes per microsecond, FLOPs per microsecond, by architecture.

Orders of magnitude that rank schedules against each other. H200: 4.3 TB/s copy and 780 TFLOP/s in bf16. On a CPU a
launch is a call of ATen: 1 to 4 us where nothing else runs, 5 to 6 in a training step, which brings other code and data
into the caches in between (docs/dev/cpu_overhead.md).
"""

CARDS = {"a100": "sm_80", "h100": "sm_90", "h200": "sm_90", "b200": "sm_100", "mi300x": "gfx942"}
"""Architectures by the name of a GPU."""

RECOMPUTING = 2.0
"""Launches that recomputing the result of one operation costs beside its own on a CPU: all else of it is Python."""

STEP = 0.25
"""The part of a launch that is CPU time of the engine: a fusion saves it for each step, even with the same kernels."""

FLOAT32_SLOWER = 12
"""How many times as long as in 16 bits a GEMM takes on a GPU in float32, which no matrix instruction multiplies
exactly."""

NORM_COLUMNS = 65536
"""The longest row that the norm kernels take: `kernels._operators.MAX_COLUMNS`, which needs Triton to be asked."""

ONEDNN_WORTHWHILE = 2**16
"""Multiplications below which making a oneDNN primitive may cost more than it saves."""

ONEDNN_FLOAT32_WORTHWHILE = 2**21
"""Multiplications of a float32 GEMM from which oneDNN is faster than MKL without AVX-512: on one thread 16.6 us beside
10.5 at 0.4 M of them, 22.3 beside 23.5 at 1 M, 52.6 beside 86.7 at 4 M. A call of it costs 13 us, one of MKL 2."""

ONEDNN_FLOAT32_NEW = 2**25
"""The same where sizes differ in each call, as those of groups: oneDNN takes some 0.3 ms to prepare for new ones."""

ONEDNN_FLOAT32_LEAST = 16
"""Rows, columns and terms of each sum of such a GEMM: of fewer, memory decides, and both take as long."""

C_WORTHWHILE = 1024
"""Elements of a tensor below which no fusion is compiled to C: the call takes as long as those that it replaces."""

C_ATTENTION_WORTHWHILE = 2**19
"""Multiplications of queries by keys from which attention in C is faster than torch's: 1.2 times here, 2.6 at 2^28."""

C_NORM_WORTHWHILE = 32768
"""Elements from which LayerNorm in C is faster than ATen's in float32: 1.1 of its time at half as many, 0.85 here."""


def capability(arch: str) -> int:
    """90 of `"sm_90"`; 0 of other than NVIDIA's architectures."""
    number = re.fullmatch(r"sm_(\d+)a?", arch)
    return int(number[1]) if number else 0


def architecture_of(properties: Any) -> str:
    """`"sm_90"` or `"gfx942"`, of what torch says of a GPU: `gcnArchName` is an NVIDIA card's whole name."""
    name = getattr(properties, "gcnArchName", "").split(":")[0]
    return name if name.startswith("gfx") else f"sm_{properties.major}{properties.minor}"
