# pyright: basic
# Device functions are in Triton's language, which has no types.
"""Chains of point-wise steps as data, from which Triton and C kernels are generated.

A chain has a kind, device functions and numbers for each step. A packed [gate; up] input is two parts of a row, which
become one; in its gradient one part becomes two.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ._device import threshold_and_scale
from ._launch import next_power_of_2
from ._operators import viewed_as_rows
from .activations import ACTIVATIONS, activation_name, activation_of, activation_text

PACKINGS = ("gate_up", "up_gate", "interleaved")
"""How gate and up of a gated unit are packed: two halves in either order, or interleaved, the gate first."""


@dataclasses.dataclass(frozen=True)
class ChainStep:
    """One step of a chain; created by the functions below.

    Args:
        kind: the kernel's operation, as in `parse`.
        name: name in tables and errors.
        functions: device functions, and for a gated gradient whether the derivative reads the activation's output.
        P: configuration numbers of the functions, or of the step.
        operand: `"row"` [N], `"packed row"` [2 N], `"matrix"` [*, N], `"packed"` [*, 2 N], `"tokens"` [*], `"seed"` []
            int64, `None`.
        output: `"matrix"`, `"row"` or `"tokens"` if it has an extra result.
        gate: -1 if two parts become one, 1 if one becomes two.
        packing: packing of a gated unit, one of `PACKINGS`.
        text: string from which `parse` creates the step.
    """

    kind: str
    name: str
    functions: tuple[Any, ...] = ()
    P: tuple[Any, ...] = ()
    operand: str | None = None
    output: str | None = None
    gate: int = 0
    packing: str = ""
    text: str = ""


def _unary(kind: str, activation: Any, functions: tuple[Any, ...], **rest: Any) -> ChainStep:
    text = f"{kind}:{activation_text(activation)}"
    label = "" if kind == "act" else kind + "_"
    return ChainStep(kind, label + activation_name(activation), functions, tuple(activation.P), text=text, **rest)


def act(activation: Any) -> ChainStep:
    """A function, y = f(x): any object with `value`, `derivative`, `reads` and `P`, such as an `Activation`."""
    return _unary("act", activation, (activation.value,))


def dact(activation: Any) -> ChainStep:
    """A function's gradient, dx = dy f'(t); the operand t [*, N] is f's input or output, as `reads` defines."""
    return _unary("dact", activation, (activation.derivative,), operand="matrix")


def _unit(kind: str, activation: Any, up: Any, packing: str, derivatives: bool, **rest: Any) -> ChainStep:
    """A step of a gated unit f(gate) g(up). Functions: f, g, then each derivative and whether it reads the output."""
    up = ACTIVATIONS["identity"] if up is None else up
    pair = activation, up
    functions = tuple(of.value for of in pair)
    if derivatives:
        functions += tuple(part for of in pair for part in (of.derivative, of.reads == "output"))
    text = f"{kind}:{activation_text(activation)}:{activation_text(up)}:{packing}"
    label = f"{kind}_{activation_name(activation)}"
    label += f"_{activation_name(up)}" if up is not ACTIVATIONS["identity"] else ""
    label += f"_{packing}" if packing != PACKINGS[0] else ""
    numbers = tuple(activation.P), tuple(up.P)
    return ChainStep(kind, label, functions, numbers, packing=packing, text=text, **rest)


def gated(activation: Any, up: Any = None, packing: str = "gate_up") -> ChainStep:
    """A gated unit, y = f(gate) g(up) for packed [gate; up], with half as many columns. Without `up`, g(up) = up."""
    return _unit("gated", activation, up, packing, False, gate=-1)


def dgated(activation: Any, up: Any = None, packing: str = "gate_up") -> ChainStep:
    """A gated unit's gradient, dx = [dy g(up) f'(gate); dy f(gate) g'(up)], with twice as many columns.

    The operand is the packed [gate; up], [*, 2 N].
    """
    return _unit("dgated", activation, up, packing, True, operand="packed", gate=1)


def bias() -> ChainStep:
    """A bias, y = x + b, b the operand [N]."""
    return ChainStep("bias", "bias", operand="row", text="bias")


def add() -> ChainStep:
    """A residual, y = x + other, other the operand [*, N]."""
    return ChainStep("add", "add", operand="matrix", text="add")


def scale(factor: float) -> ChainStep:
    """A constant factor, y = factor x."""
    factor = float(factor)
    return ChainStep("scale", f"scale[{factor:g}]", P=(factor,), text=f"scale:{factor!r}")


def dropout(p: float, upscale: bool = True) -> ChainStep:
    """Dropout, y = keep x / (1 - p), or keep x without `upscale`; the operand is the seed. Its own gradient."""
    text = f"dropout:{float(p)!r}:{int(upscale)}"
    return ChainStep("dropout", f"dropout[{p:g}]", P=threshold_and_scale(p, upscale), operand="seed", text=text)


def store() -> ChainStep:
    """Return the current value of the chain as an extra result, [*, N]."""
    return ChainStep("store", "store", output="matrix", text="store")


def column_sum() -> ChainStep:
    """Return the sum of the current value over all rows, [N]: the gradient of a bias."""
    return ChainStep("sum", "sum", output="row", text="sum")


def emit(activation: Any) -> ChainStep:
    """Return f(t) of an operand t [*, N] as an extra result: an activation that was not saved."""
    return _unary("emit", activation, (activation.value,), operand="matrix", output="matrix")


def emit_gated(activation: Any, up: Any = None, packing: str = "gate_up") -> ChainStep:
    """Return f(gate) g(up) of a packed operand [gate; up], [*, 2 N], as an extra result, [*, N].

    After `token_scale` it is multiplied by the same factors: a gated unit and its factors that were not saved.
    """
    return _unit("emit_gated", activation, up, packing, False, operand="packed", output="matrix")


def dot_gated(activation: Any, up: Any = None, packing: str = "gate_up") -> ChainStep:
    """Return the sum over columns of dy f(gate) g(up), [*], of a packed operand [gate; up], [*, 2 N].

    It is the gradient of a factor per token by which the gated unit was multiplied.
    """
    return _unit("dot_gated", activation, up, packing, False, operand="packed", output="tokens")


def token_scale() -> ChainStep:
    """A factor per token, y = factor x; the factors are the operand [*]."""
    return ChainStep("token_scale", "token_scale", operand="tokens", text="token_scale")


def shift(packed: bool = False) -> ChainStep:
    """Add a bias, the operand [N], to operands of later steps: z = t + b for a t that was saved instead of z.

    With `packed` the operand is [2 N], and later operands are [gate; up].
    """
    text = f"shift:{int(packed)}"
    return ChainStep("shift", "shift", operand="packed row" if packed else "row", text=text)


_OF_ACTIVATION = {"act": act, "dact": dact, "emit": emit}
_OF_UNIT: dict[str, Any] = {"gated": gated, "dgated": dgated, "emit_gated": emit_gated, "dot_gated": dot_gated}
READERS = ("dact", "dgated", "emit", "emit_gated", "dot_gated")
_BEFORE_DGATED = ("emit_gated", "dgated"), ("dot_gated", "dgated")
# Pairs of steps that may read one operand, which the second step gets from the first.
AGAIN = frozenset({("emit", "dact"), *itertools.permutations(("emit_gated", "dot_gated")), *_BEFORE_DGATED})
_PLAIN = {"bias": bias, "add": add, "store": store, "sum": column_sum, "token_scale": token_scale}


@functools.lru_cache(1024)  # texts contain numbers, which may change in each step of a training
def parse(text: str) -> Chain:
    """The chain with this `text`.

    Raises:
        ValueError: for a text that is not a chain, or with an activation that is not registered in this process.
    """
    steps: list[ChainStep] = []
    for part in text.split(";") if text else ():
        kind, *arguments = part.split(":")
        if kind in _PLAIN and not arguments:
            steps.append(_PLAIN[kind]())
        elif kind in _OF_ACTIVATION and len(arguments) == 1:
            steps.append(_OF_ACTIVATION[kind](activation_of(arguments[0])))
        elif kind in _OF_UNIT and len(arguments) == 3 and arguments[2] in PACKINGS:
            steps.append(_OF_UNIT[kind](*map(activation_of, arguments[:2]), arguments[2]))
        elif kind == "shift" and arguments in (["0"], ["1"]):
            steps.append(shift(arguments == ["1"]))
        elif kind == "scale" and len(arguments) == 1:
            steps.append(scale(float(arguments[0])))
        elif kind == "dropout" and len(arguments) == 2:
            steps.append(dropout(float(arguments[0]), arguments[1] == "1"))
        else:
            raise ValueError(f"{part!r} is not a step of a chain")
    return Chain(*steps)


class Chain:
    """Steps prepared for launches; create a chain with the plan, and keep it.

    Raises:
        ValueError: for a chain in which parts are split and joined in a way that has no width, or with an interleaved
            gated unit and another packing, dropout or a second sum over rows.
    """

    def __init__(self, *steps: ChainStep) -> None:
        self.steps = steps
        self.kinds = tuple(step.kind for step in steps)
        self.functions = tuple(step.functions for step in steps)
        self.numbers = tuple(step.P for step in steps)
        self.emits = not {"emit", "emit_gated", "dot_gated"}.isdisjoint(self.kinds)
        # For each step, whether it may reuse the operand of the last reader, with as many parts.
        self.again = tuple(_reads_again(steps))
        self.reads_again = any(self.again)
        depth = lowest = 0
        depths = [0]
        for step in steps:
            depth += step.gate
            depths.append(depth)
            lowest = min(lowest, depth)
        # Parts of a row before each step and at the end, in units of the narrowest value.
        self.parts = tuple(2 ** (d - lowest) for d in depths)
        if max(self.parts) > 4:
            raise ValueError(f"{self}: at most two gated steps in one chain")
        sums = [n for n, step in zip(self.parts, steps, strict=False) if step.kind == "sum"]
        self.sums = sum(sums)
        packings = {step.packing for step in steps if step.packing}
        # Whether part j of a row with two parts is every second column, from column j on.
        self.interleaved = "interleaved" in packings
        if self.interleaved:
            drops = any(step.kind == "dropout" for step in steps)
            if len(packings) > 1 or max(self.parts) > 2 or drops or len(sums) > 1:
                has = "one packing, one gated step, at most one sum over rows and no dropout"
                raise ValueError(f"{self}: a chain with an interleaved gated unit has {has}")
        self.interleaved_sums = self.interleaved and sums == [2]
        self.outputs = sum(step.output is not None for step in steps)
        self.name = ",".join(step.name for step in steps)
        self.text = ";".join(step.text for step in steps)
        self._tiles: dict[tuple[int, int, int], tuple[int, int, dict[str, Any]]] = {}

    def tile(self, width: int, itemsize: int) -> tuple[int, int, dict[str, Any]]:
        """Rows and columns of a tile, and the constexprs of a launch, for parts of `width` columns."""
        key = (min(next_power_of_2(width), 1024), itemsize, math.gcd(width, 16))
        found = self._tiles.get(key)
        if found is None:
            block_m, block_n = _blocks(width, self, itemsize)
            constexprs: dict[str, Any] = {
                "KINDS": self.kinds,
                "FNS": self.functions,
                "PS": self.numbers,
                "TILES": self.parts[0],
                "BLOCK_M": block_m,
                "BLOCK_N": block_n,
                "GROUPED": width % 4 == 0,
                "COMPUTE": tl.float64 if itemsize == 8 else tl.float32,
                "IN_TURN": self.interleaved,
                "SWAPPED": tuple(step.packing == "up_gate" for step in self.steps),
            }
            if self.sums:
                # With fewer stages, fewer addresses are live at once; a sum over columns needs their registers.
                stages = 1 if itemsize == 8 or "dot_gated" in self.kinds else 3
                constexprs |= {"SUMS": self.sums, "STAGES": stages, "SUMS_IN_TURN": self.interleaved_sums}
            found = self._tiles[key] = (block_m, block_n, constexprs)
        return found

    def results(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Sequence[torch.dtype] | None
    ) -> tuple[int, list[tuple[tuple[int, ...], torch.dtype]]]:
        """Columns of the narrowest value; shape and dtype of each extra result, then of the last value.

        Args:
            shape: shape of the input.
            dtype: dtype of the last value.
            dtypes: dtypes of extra results; by default that of the last value.
        """
        lead, columns = tuple(shape[:-1]), shape[-1] if shape else 1
        if columns % self.parts[0]:
            raise ValueError(f"{self}: {columns} columns do not divide into {self.parts[0]} parts")
        width = columns // self.parts[0]
        dtypes = dtypes or (dtype,) * self.outputs
        if len(dtypes) < self.outputs:
            raise ValueError(f"{self}: too few operands or dtypes")
        given = [(step.output, parts) for step, parts in zip(self.steps, self.parts, strict=False) if step.output]
        shapes = [
            (parts * width,) if output == "row" else (*lead, *[parts * width] * (output == "matrix")) if shape else ()
            for output, parts in (*given, ("matrix", self.parts[-1]))
        ]
        return width, [*zip(shapes, (*dtypes[: self.outputs], dtype), strict=True)]

    def __repr__(self) -> str:
        return f"Chain({', '.join(step.name for step in self.steps)})"


def _reads_again(steps: Sequence[ChainStep]) -> Iterator[bool]:
    reader: str | None = None
    for step in steps:
        yield (reader, step.kind) in AGAIN
        if step.gate or step.kind == "shift":  # later readers have other columns, or a bias added
            reader = None
        elif step.kind in READERS:
            reader = step.kind


def _blocks(width: int, chain: Chain, itemsize: int) -> tuple[int, int]:
    """Rows and columns of a tile: 64 bytes per thread and tensor at four warps, fewer if more of them are live at once.

    With sums, which live from tile to tile, 16 bytes, and the pipeline keeps several tiles in flight. In unaligned rows
    each element has its own address, which costs two registers.
    """
    live = max(chain.parts) * (2 if chain.emits else 1)
    elements = 2048 // itemsize // max(1, live // 2) if chain.sums else 8192 // itemsize // live
    if width % 16:
        elements = max(elements // 4, 128 if "dot_gated" in chain.kinds else 256)
    block_n = max(4, min(next_power_of_2(width), 128 if chain.sums else 1024, elements))
    return elements // block_n, block_n


def fit_operand(step: ChainStep, operand: Tensor, lead: tuple[int, ...], columns: int) -> Tensor:
    """An operand of a step as kernels read it: rows of one stride, a row, factors or a seed; or `ValueError`."""
    if step.operand == "seed":
        if operand.numel() != 1 or operand.dtype is not torch.int64:
            raise ValueError(f"{step.name} takes one int64 seed, got {operand.dtype} {tuple(operand.shape)}")
        return operand.view(1)
    if step.operand == "tokens":
        if tuple(operand.shape) != lead:
            raise ValueError(f"{step.name} takes shape {lead}, got {tuple(operand.shape)}")
        return operand.contiguous().view(-1)
    columns = 2 * columns if step.operand in ("packed", "packed row") else columns
    if step.operand in ("row", "packed row"):
        if tuple(operand.shape) != (columns,):
            raise ValueError(f"{step.name} takes shape ({columns},), got {tuple(operand.shape)}")
        return operand.contiguous()
    if operand.ndim and tuple(operand.shape) != (*lead, columns):
        raise ValueError(f"{step.name} takes shape {(*lead, columns)}, got {tuple(operand.shape)}")
    return viewed_as_rows(step.name, operand, columns)
