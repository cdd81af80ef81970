"""A plan as plain data: what `Plan.as_dict` gives, `Plan.json` writes, and pictures are drawn from."""

from __future__ import annotations

from typing import Literal, TypedDict

FORMAT = 7
Kind = Literal["unfused", "eager", "forward", "backward", "joint", "inference"]


class EnvData(TypedDict):
    """The environment; `text` is how it prints, `recipe` is that of operations without one, or `"off"`."""

    device: str
    arch: str
    dtype: str
    autocast: str | None
    grad: bool
    deterministic: bool
    kernels: str | None
    rows: int | None
    recipe: str | None
    text: str


class OperationData(TypedDict):
    """One position of the sequence.

    `saves` are the fields of its `Saved` that are saved for backward: none where nothing reads one, or where a joint
    fusion keeps its own. `needs` are the gradients that are needed here.
    """

    at: int
    name: str
    path: str
    saves: list[str]
    needs: list[str]


class StepData(TypedDict):
    """A step of a schedule, of positions `start` to `stop`, the last left out; `saves` is what a joint fusion saves."""

    name: str
    start: int
    stop: int
    kind: Kind
    saves: list[str]


class RefusalData(TypedDict):
    """Why fusions that matched are not used; `fusions` are their places by name.

    Where the reason was `expected`, it is not printed. `own`: of a user.
    """

    reason: str
    fusions: dict[str, list[int]]
    superseded: bool
    expected: bool
    own: bool


class EagerData(TypedDict):
    """What runs through its own `__call__`."""

    at: int
    name: str
    reason: str


class CastData(TypedDict):
    """A cast under autocast that no fusion absorbs: of `"x"`, which enters the operation there, or of a parameter."""

    at: int
    name: str
    dtype: str


class QuantizationData(TypedDict):
    """An operand of an operation's GEMMs that is quantized: its format, and what shares a scale.

    `inside` names the step whose kernel does it; `None` where it is a pass of its own.
    """

    at: int
    role: str
    format: str
    scaling: str
    inside: str | None


class MemoryData(TypedDict):
    """Bytes kept for backward, FLOPs of the forward pass, and the most bytes held at once, where that is known."""

    saved: int
    saved_unfused: int
    flops: int
    peak: int | None


class ChoiceData(TypedDict):
    """A choice of memory: bytes kept for backward, the most held at once, estimated microseconds beyond the fastest,
    and whether it was made.
    """

    memory: str
    saved: int
    peak: int
    microseconds: float
    used: bool


class RecomputedData(TypedDict):
    """A segment that runs again in the backward pass, but for the steps at these positions."""

    start: int
    stop: int
    keeps: list[int]


class PlanData(TypedDict):
    """A whole plan.

    `gemms` is the dtype in which GEMMs are computed where it is not their own, `compiler` makes the C kernels of its
    fusions.
    """

    format: int
    env: EnvData
    operations: list[OperationData]
    forward: list[StepData]
    backward: list[StepData]
    segments: list[tuple[int, int]]
    recomputed: list[RecomputedData]
    refused: list[RefusalData]
    unmatched: list[str]
    eager: list[EagerData]
    casts: list[CastData]
    quantizations: list[QuantizationData]
    gemms: str | None
    compiler: str | None
    memory: MemoryData | None
    memory_unknown: str | None
    choices: list[ChoiceData]
    summary: list[str]
