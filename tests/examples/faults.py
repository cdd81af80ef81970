"""Mistakes in a plug-in and the resulting messages: the table of docs/write_a_fusion.md."""

from __future__ import annotations

import importlib
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

import seqfuse as sf
from seqfuse import ops, testing

FAULTS: dict[str, dict[str, Callable[[], object]]] = {}
"""Title of a part of the table to its faults; each raises, warns, or returns a line of the plan."""


def fault(part: str, title: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    def register(function: Callable[[], object]) -> Callable[[], object]:
        FAULTS.setdefault(part, {})[title] = function
        return function

    return register


class BiasReLU(sf.ForwardFusion):
    """A right fusion, which the faults below spoil."""

    bias: ops.Bias
    act: ops.ReLU

    def fwd(self, x: Tensor) -> tuple[Tensor, dict[str, sf.Saved]]:
        y = torch.relu(x + self.bias.bias)
        return y, {"act": self.act.record(y, y)}


class BiasReLUBackward(sf.BackwardFusion):
    """Its backward."""

    bias: ops.Bias
    act: ops.ReLU

    def bwd(self, dy: Tensor, *, act: Any) -> tuple[Tensor, dict[str, Tensor]]:
        dx = dy * (act.y > 0)
        return dx, {"bias.bias": dx.sum(0)}


class Joint(sf.JointFusion):
    """A joint fusion whose backward fails."""

    bias: ops.Bias
    act: ops.ReLU

    class Saved(sf.Saved):
        y: Tensor

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        y = torch.relu(x + self.bias.bias)
        return y, self.Saved(y=y)

    def bwd(self, dy: Tensor, saved: Saved) -> Any:
        raise RuntimeError("no such kernel")


def train(fusion: type[sf.FusedOperation]) -> sf.Plan:
    model, x = sf.Sequential(ops.Bias(4), ops.ReLU(), fusions=(fusion,)), torch.ones(3, 4)
    plan = model.plan(x)
    model(x).sum().backward()
    return plan


DEFINED, PLANNED, RUN, CHECKED, LOADED = (
    "where the class is defined",
    "when a sequence is planned",
    "when a pass runs",
    "in the test kit",
    "when it is loaded",
)


@fault(DEFINED, "a slot that is not an operation")
def _() -> None:
    class Odd(sf.InferenceFusion):
        bias: ops.Bias
        act: Tensor

        def fwd(self, x: Tensor) -> Tensor:
            return x


@fault(DEFINED, "`bwd` names an unknown slot")
def _() -> None:
    class Odd(sf.BackwardFusion):
        bias: ops.Bias
        act: ops.ReLU

        def bwd(self, dy: Tensor, *, active: Any) -> Any:
            return dy, {}


@fault(DEFINED, "a pass that its kind does not have")
def _() -> None:
    class Odd(BiasReLU):
        def bwd(self, dy: Tensor) -> Any:
            return dy, {}


@triton.jit
def _shifted(x, by):
    return x + by


@fault(DEFINED, "a device function that kernels cannot call")
def _() -> None:
    class Odd(sf.Pointwise):
        value = derivative = _shifted

        def reference(self, x: Tensor) -> Tensor:
            return x


@fault(PLANNED, "`requires` raises")
def _() -> str:
    class Odd(BiasReLU):
        def requires(self, env: sf.Env) -> sf.Requirements:
            yield self.bias.width > 0, "a width"  # pyright: ignore

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (refusal,) = train(Odd).refused
    return f"not applied: {refusal.reason}"


@fault(PLANNED, "what it needs is not there")
def _() -> str:
    class Odd(BiasReLU):
        def requires(self, env: sf.Env) -> sf.Requirements:
            yield env.device == "cuda", "needs a GPU"

    (refusal,) = train(Odd).refused
    return f"not applied: {refusal.reason}"


@fault(RUN, "saved tensors of another shape")
def _() -> None:
    class Odd(BiasReLU):
        def fwd(self, x: Tensor) -> tuple[Tensor, dict[str, sf.Saved]]:
            y, saved = super().fwd(x)
            return y, saved | {"act": self.act.record(y, y[0])}

    train(Odd)


@fault(RUN, "no saved tensors of a slot")
def _() -> None:
    class Odd(BiasReLU):
        def fwd(self, x: Tensor) -> tuple[Tensor, dict[str, sf.Saved]]:
            y, _ = super().fwd(x)
            return y, {}

    train(Odd)


@fault(RUN, "an unknown gradient")
def _() -> None:
    class Odd(BiasReLUBackward):
        def bwd(self, dy: Tensor, *, act: Any) -> tuple[Tensor, dict[str, Tensor]]:
            return dy, {"bias.weight": dy.sum(0)}

    train(Odd)


@fault(RUN, "a gradient of another shape")
def _() -> None:
    class Odd(BiasReLUBackward):
        def bwd(self, dy: Tensor, *, act: Any) -> tuple[Tensor, dict[str, Tensor]]:
            dx, _ = super().bwd(dy, act=act)
            return dx, {"bias.bias": dx}

    train(Odd)


@fault(RUN, "a pass raises")
def _() -> None:
    class Odd(BiasReLU):
        def fwd(self, x: Tensor) -> tuple[Tensor, dict[str, sf.Saved]]:
            raise RuntimeError("no such kernel")

    train(Odd)


@fault(RUN, "a joint backward raises, without `unfused`")
def _() -> None:
    train(Joint)


@fault(CHECKED, "wrong numbers")
def _() -> None:
    class Odd(BiasReLU):
        def fwd(self, x: Tensor) -> tuple[Tensor, dict[str, sf.Saved]]:
            y = torch.relu(x)
            return y, {"act": self.act.record(y, y)}

    bias = ops.Bias(4)
    torch.nn.init.ones_(bias.bias)
    testing.check_fusion(Odd, torch.ones(3, 4), bias, ops.ReLU())


@fault(CHECKED, "the input is written to")
def _() -> None:
    class Odd(BiasReLU):
        def fwd(self, x: Tensor) -> tuple[Tensor, dict[str, sf.Saved]]:
            y = x.add_(self.bias.bias).relu()
            return y, {"act": self.act.record(y, y)}

    bias = ops.Bias(4)
    torch.nn.init.ones_(bias.bias)
    testing.check_fusion(Odd, torch.ones(3, 4), bias, ops.ReLU())


@fault(CHECKED, "an attribute of the operation is set")
def _() -> None:
    class Odd(BiasReLU):
        def fwd(self, x: Tensor) -> tuple[Tensor, dict[str, sf.Saved]]:
            self.bias.last = x
            return super().fwd(x)

    testing.check_fusion(Odd, torch.ones(3, 4))


@contextmanager
def installed(source: str) -> Iterator[None]:
    """A distribution `some-fusions` with an entry point `some`, as an installer would lay it out."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "some_fusions.py").write_text(source)
        info = Path(folder, "some_fusions-1.2.dist-info")
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-fusions\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text("[seqfuse.fusions]\nsome = some_fusions:fusions\n")
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        try:
            yield
        finally:
            sys.path.remove(folder)
            sys.modules.pop("some_fusions", None)


@fault(LOADED, "its import raises, or lacks a dependency")
def _() -> None:
    with installed("import something_else"):
        sf.plugins.load("some")


@fault(LOADED, "it names something else")
def _() -> None:
    with installed("fusions = 3"):
        sf.plugins.load("some")


@fault(LOADED, "it is not installed")
def _() -> None:
    with installed(""):
        sf.plugins.load("sime")


def said(function: Callable[[], object]) -> str:
    """The first line of what a fault is answered with: of an error, of a warning, or of what it returned.

    Raises:
        AssertionError: if nothing was said.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            answer = function()
        except (sf.SeqfuseError, AssertionError) as error:
            answer = f"{type(error).__name__} {error}"
    if answer is None and caught:
        answer = f"{caught[0].category.__name__} {caught[0].message}"
    assert isinstance(answer, str), "nothing was said"
    first, *others = answer.splitlines()
    shown = " ".join([first, *(line for line in others if line.startswith("Hint: "))])
    return re.sub(r"\S*<locals>\.|tests\.examples\.faults\.", "", " ".join(shown.split()))


def table() -> str:
    """Every fault with its message, as Markdown lists, in which long messages wrap."""
    lines: list[str] = []
    for part, faults in FAULTS.items():
        lines += [f"**{part[0].upper()}{part[1:]}**", ""]
        lines += [f"- {title[0].upper()}{title[1:]}:<br>`{said(function)}`" for title, function in faults.items()]
        lines.append("")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
