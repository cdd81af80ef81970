"""Rates and thresholds of devices for plans without measurements.

Tiles and limits of a kernel are defined beside the kernel.
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

Orders of magnitude to rank schedules. H200: 4.3 TB/s copy and 780 TFLOP/s in bf16. On a CPU a launch is an ATen call: 1
to 4 us in a loop, 5 to 6 in a training step, where other code and data evict it from the caches
(docs/dev/cpu_overhead.md).
"""

CARDS = {"a100": "sm_80", "h100": "sm_90", "h200": "sm_90", "b200": "sm_100", "mi300x": "gfx942"}
"""Architectures by the name of a GPU."""

RECOMPUTING = 2.0
"""Overhead, in launches, of recomputing the result of one operation on a CPU: the Python around its kernel."""

STEP = 0.25
"""CPU time of the engine per step, in launches: a fusion saves it for each replaced step, even with equal kernels."""

FLOAT32_SLOWER = 12
"""Time of a float32 GEMM on a GPU relative to 16 bits: no matrix instruction multiplies float32 exactly."""

NORM_COLUMNS = 65536
"""The longest row of the norm kernels: `kernels._operators.MAX_COLUMNS`, whose import needs Triton."""

ONEDNN_WORTHWHILE = 2**16
"""Multiplications below which creating a oneDNN primitive may cost more than it saves."""

ONEDNN_FLOAT32_WORTHWHILE = 2**21
"""Multiplications of a float32 GEMM from which oneDNN is faster than MKL without AVX-512: on one thread 16.6 us beside
10.5 at 0.4 M of them, 22.3 beside 23.5 at 1 M, 52.6 beside 86.7 at 4 M. A call of it costs 13 us, one of MKL 2."""

ONEDNN_FLOAT32_NEW = 2**25
"""The same for sizes that change in each call, as in grouped GEMMs: oneDNN takes about 0.3 ms for a new size."""

ONEDNN_FLOAT32_LEAST = 16
"""The least M, N and K of such a GEMM: smaller ones are limited by memory and equally fast in both libraries."""

C_WORTHWHILE = 1024
"""Elements of a tensor below which fusions do not run in C: the call takes as long as the replaced calls."""

C_BESIDE_TORCH = 2**17
"""Elements of a tensor below which torch's own calls, by autograd's nodes, take less time on a CPU than a node of this
library with C kernels of cheap functions: Linear and ReLU 0.75x at 4,096, 0.86x at 32,768, 0.93x at 131,072."""

GELU_BESIDE_TORCH = {"none": C_WORTHWHILE, "tanh": 2**13}
"""The same for GeLU, by `approximate`. Linear and GeLU with C kernels beside eager torch: the exact one 0.89x at 4,096
elements, the approximation 1.13x there and 0.86x at 32,768."""

C_ATTENTION_WORTHWHILE = 2**19
"""Multiplications of queries by keys from which attention in C is faster than torch's: 1.2x here, 2.6x at 2^28."""

C_NORM_WORTHWHILE = 32768
"""Elements from which LayerNorm in C is faster than ATen's in float32: 0.85x its time here, 1.1x at half as many."""


def capability(arch: str) -> int:
    """90 for `"sm_90"`; 0 for architectures that are not NVIDIA's."""
    number = re.fullmatch(r"sm_(\d+)a?", arch)
    return int(number[1]) if number else 0


def architecture_of(properties: Any) -> str:
    """`"sm_90"` or `"gfx942"` from torch's device properties; for NVIDIA, `gcnArchName` is the card's name."""
    name = getattr(properties, "gcnArchName", "").split(":")[0]
    return name if name.startswith("gfx") else f"sm_{properties.major}{properties.minor}"
