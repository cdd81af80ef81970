"""Runs the command in this process, in a folder with its own module: exit status, output and errors."""

from __future__ import annotations

import itertools
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from seqfuse.cli import main

_numbers = itertools.count()

MODELS = """
    import torch
    from torch import Tensor, nn

    import seqfuse as sf
    from seqfuse import ops


    def build():
        members = ops.LayerNorm(16), ops.Linear(16, 32), ops.GeLU(), ops.Linear(32, 16), ops.Dropout(0.1)
        return sf.Sequential(ops.Residual(*members), ops.Linear(16, 8), ops.ReLU())


    model = build()


    def plain():
        return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = build()


    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = build(), build()


    class Wrong(sf.ForwardFusion):
        "y = gelu(x + b) by tanh, where erf is meant."

        bias: ops.Bias
        act: ops.GeLU

        def saves(self, env):
            return sf.Savings(launches=100)

        def fwd(self, x: Tensor):
            z = x + self.bias.bias
            y = nn.functional.gelu(z, approximate="tanh")
            return y, {"act": ops.GeLU.Saved(x=z)}


    class SavesWrong(sf.ForwardFusion):
        scale: ops.Scale
        act: ops.GeLU

        def saves(self, env):
            return sf.Savings(launches=100)

        def fwd(self, x: Tensor):
            z = x * self.scale.factor
            return nn.functional.gelu(z), {
                "scale": ops.Scale.Saved(factor=self.scale.factor), "act": ops.GeLU.Saved(x=2 * z)
            }


    class SavesNothing(SavesWrong):
        def fwd(self, x: Tensor):
            return nn.functional.gelu(x * self.scale.factor), {}


    def saves_wrong():
        return sf.Sequential(ops.Scale(0.5), ops.GeLU(), ops.Bias(16), fusions=(SavesWrong,))


    pair = Wrong, SavesWrong


    class WrongBackward(sf.BackwardFusion):
        "The first row is not in the bias gradient."

        bias: ops.Bias
        act: ops.GeLU

        def saves(self, env):
            return sf.Savings(launches=100)

        def bwd(self, dy: Tensor, *, bias: ops.Bias.Saved, act: ops.GeLU.Saved):
            dx, _ = self.act.bwd(dy, act)
            return dx, {"bias.bias": dx.reshape(-1, dx.shape[-1])[1:].sum(0)}


    class OnHopper(sf.ForwardFusion):
        "Never here."

        bias: ops.Bias
        act: ops.GeLU

        def requires(self, env):
            yield env.arch == "sm_90", "needs an sm_90"

        def fwd(self, x: Tensor):
            raise NotImplementedError


    class OfTriton(sf.ForwardFusion):
        "On a GPU alone."

        bias: ops.Bias
        act: ops.GeLU

        kernels = ("triton",)

        def fwd(self, x: Tensor):
            raise NotImplementedError


    class Third(sf.UnfusedOperation):
        "y = x / 3, and a gradient that is not."

        class Saved(sf.Saved):
            pass

        def reference(self, x: Tensor) -> Tensor:
            return x / 3

        def fwd(self, x: Tensor):
            return x / 3, self.Saved()

        def bwd(self, dy: Tensor, saved: "Third.Saved"):
            return dy / 3.01, {}

        @classmethod
        def example(cls, x: Tensor):
            return cls()


    def wrong():
        return sf.Sequential(ops.Tanh(), ops.Linear(16, 16), ops.GeLU(), ops.Linear(16, 4), fusions=(Wrong,))


    def wrong_backward():
        made = build()
        made.fusions = (WrongBackward, *sf.fusions.default)
        return made


    def holds_third():
        return sf.Sequential(ops.Linear(16, 4), Third())


    def tokens():
        return sf.Sequential(ops.Embedding(11, 16), ops.Linear(16, 8))


    def fed():
        return sf.Sequential(ops.Linear(16, 16), ops.Add("other"))


    def fed_wrong():
        return sf.Sequential(sf.Sequential(ops.Linear(16, 16), ops.GeLU(), ops.Add("other")), fusions=(Wrong,))


    def raising():
        raise ValueError("one line\\nand another")


    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("no\\nluck")


    def broken():
        return sf.Sequential(ops.LayerNorm(16), Broken())


    def of_torch():
        return nn.Sequential(nn.LayerNorm(16), Broken())


    def on_meta():
        return build().to("meta")


    def leaving():
        raise SystemExit(3)


    def needing(size):
        return build()


    number = 3
    nested = type("Holder", (), {"build": staticmethod(build)})
"""


class Done(NamedTuple):
    """Result of a command."""

    status: int
    out: str
    err: str


Cli = Callable[..., Done]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    """Runs the command in a folder with a module `M`; `M` in an argument stands for its name."""
    name = f"models_{next(_numbers)}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(MODELS))
    monkeypatch.chdir(tmp_path)
    path, modules = [*sys.path], {*sys.modules}

    def run(*arguments: str) -> Done:
        status = main([name + a[1:] if a[:2] in ("M:", "M.") else a for a in arguments])
        out, err = capsys.readouterr()
        return Done(status, out, err)

    yield run
    sys.path[:] = path
    for new in {*sys.modules} - modules:
        if new.startswith(("models_", "other_")):
            del sys.modules[new]
