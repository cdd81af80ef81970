"""A plan as plain data, as `Plan.as_dict` returns it, `Plan.json` writes it, and pictures are drawn from it."""

from __future__ import annotations

from typing import Literal, TypedDict

FORMAT = 7
Kind = Literal["unfused", "eager", "forward", "backward", "joint", "inference"]


class EnvData(TypedDict):
    """The environment; `text` is its printed form, `recipe` the recipe of operations without one, or `"off"`."""

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

    `saves` are the saved fields of its `Saved`: empty if no gradient reads them, or under a joint fusion, which has
    another `Saved`. `needs` are the needed gradients.
    """

    at: int
    name: str
    path: str
    saves: list[str]
    needs: list[str]


class StepData(TypedDict):
    """A step for positions `start` to `stop` (exclusive); `saves` are the saved tensors of a joint fusion."""

    name: str
    start: int
    stop: int
    kind: Kind
    saves: list[str]


class RefusalData(TypedDict):
    """The reason why fusions that matched are not used; `fusions` are their positions by name.

    An `expected` reason is not printed. `own`: a fusion of the user.
    """

    reason: str
    fusions: dict[str, list[int]]
    superseded: bool
    expected: bool
    own: bool


class EagerData(TypedDict):
    """An operation or module that runs eagerly, through `__call__`."""

    at: int
    name: str
    reason: str


class CastData(TypedDict):
    """A cast under autocast that no fusion absorbs: of `"x"`, the input of the operation, or of a parameter."""

    at: int
    name: str
    dtype: str


class QuantizationData(TypedDict):
    """A quantized operand of an operation's GEMMs: its format, and the elements that share a scale.

    `inside` names the step whose kernel quantizes it; `None` if a separate kernel does.
    """

    at: int
    role: str
    format: str
    scaling: str
    inside: str | None


class MemoryData(TypedDict):
    """Bytes saved for backward, FLOPs of the forward pass, and peak bytes or why they are not known."""

    saved: int
    saved_unfused: int
    flops: int
    peak: int | None
    peak_unknown: str | None


class ChoiceData(TypedDict):
    """A choice of memory: bytes saved for backward, peak bytes, estimated microseconds beyond the fastest, and whether
    it is used.
    """

    memory: str
    saved: int
    peak: int
    microseconds: float
    used: bool


class RecomputedData(TypedDict):
    """A segment that runs again in the backward pass, except for the steps at these positions."""

    start: int
    stop: int
    keeps: list[int]


class PlanData(TypedDict):
    """A plan as plain data.

    `gemms` is the dtype in which GEMMs are computed, if another; `compiler` is the compiler of its C kernels.
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
