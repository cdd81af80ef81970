"""What a plan knows of a step, and whether a fusion was checked, does not depend on other steps before."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.plan import facts
from seqfuse.run import trial
from tests.fuser.fusions import Doubles


class SavesMore(Doubles):
    """y = 2 x, which saves a tensor that depends on more than its attributes."""

    class Saved(sf.Saved):
        more: Tensor

    def fwd(self, x: Tensor) -> Any:
        return x * 2, self.Saved(more=self.more(x))

    def more(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class InMode(SavesMore):
    def more(self, x: Tensor) -> Tensor:
        return x.double() if self.training else x.clone()


class OfModule(SavesMore):
    """The mode of a module of torch in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Identity()

    def more(self, x: Tensor) -> Tensor:
        return x.double() if self.inside.training else x.clone()


class WithBuffer(SavesMore):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(1, dtype=dtype))

    def more(self, x: Tensor) -> Tensor:
        return x * self.get_buffer("factor")


class InDefault(SavesMore):
    def more(self, x: Tensor) -> Tensor:
        return x.to(torch.get_default_dtype())


class Deterministic(SavesMore):
    def more(self, x: Tensor) -> Tensor:
        return x.double() if torch.are_deterministic_algorithms_enabled() else x.clone()


def tied(shares: bool) -> sf.Sequential:
    first, second = (ops.Linear(512, 512, bias=False) for _ in range(2))
    return sf.Sequential(first, ops.GeLU(), first if shares else second, ops.GeLU())


def of_modules(set_mode: Callable[[Any], Any]) -> sf.Sequential:
    model = sf.Sequential(OfModule(), ops.Tanh())
    set_mode(model[0].inside)
    return model


def rotating(device: str) -> sf.Sequential:
    rotation = ops.RotaryEmbedding(2, style="half")
    return sf.Sequential(ops.Linear(512, 384), rotation, ops.Attention(2)).to(device)


@contextlib.contextmanager
def in_double() -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def quantized(recipe: Any) -> sf.Sequential:
    return sf.Sequential(ops.Linear(512, 512), ops.GeLU(), recipe=recipe)


@contextlib.contextmanager
def in_bfloat16() -> Any:
    with torch.autocast("cpu", torch.bfloat16), sf.fusing(unmeasured=True):
        yield


@contextlib.contextmanager
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


nothing = contextlib.nullcontext
Case = tuple[Callable[[], sf.Sequential], Callable[[], contextlib.AbstractContextManager[Any]]]
PAIRS: dict[str, tuple[Case, Case]] = {
    "one module twice": ((lambda: tied(False), nothing), (lambda: tied(True), nothing)),
    "training": (
        (lambda: sf.Sequential(InMode(), ops.Tanh()), nothing),
        (lambda: sf.Sequential(InMode(), ops.Tanh()).eval(), nothing),
    ),
    "training of a module of torch": (
        (lambda: of_modules(nn.Module.train), nothing),
        (lambda: of_modules(nn.Module.eval), nothing),
    ),
    "buffers": (
        (lambda: sf.Sequential(WithBuffer(torch.float32), ops.Tanh()), nothing),
        (lambda: sf.Sequential(WithBuffer(torch.float64), ops.Tanh()), nothing),
    ),
    "default dtype": (
        (lambda: sf.Sequential(InDefault(), ops.Tanh()), nothing),
        (lambda: sf.Sequential(InDefault(), ops.Tanh()), in_double),
    ),
    "deterministic": (
        (lambda: sf.Sequential(Deterministic(), ops.Tanh()), nothing),
        (lambda: sf.Sequential(Deterministic(), ops.Tanh()), deterministic),
    ),
    "recipe": (
        (lambda: quantized(None), nothing),
        (lambda: quantized(sf.recipes.Float8CurrentScaling()), nothing),
    ),
    "dtype of the next": (
        (lambda: sf.Sequential(ops.RMSNorm(512), ops.LayerScale(512)), in_bfloat16),
        (lambda: sf.Sequential(ops.RMSNorm(512), ops.Linear(512, 8)), in_bfloat16),
    ),
    "place": ((lambda: rotating("cpu"), nothing), (lambda: rotating("meta"), nothing)),
}


def known_of(case: Case) -> Any:
    make, block = case
    model = make()
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    x = torch.randn(4, 16, 512, device=device, requires_grad=True)
    with block():
        plan = model.plan(x, env=sf.Env.of("cpu", tokens=64) if device.type == "meta" else None)
        return plan.memory, plan.choices


@pytest.mark.parametrize("name", PAIRS)
def test_a_plan_knows_the_bytes_of_its_own_steps(name: str) -> None:
    pair, alone = PAIRS[name], list[Any]()
    for case in pair:
        facts._known.clear()
        trial._known.clear()
        alone.append(known_of(case))
    assert alone[0] != alone[1], "otherwise this proves nothing"
    # The last ones are known here.
    assert [known_of(case) for case in pair] == alone


class Kind(enum.Enum):
    GOOD = 1
    BAD = 2


class OfKind(Doubles):
    class Saved(sf.Saved):
        x: Tensor

    kind = Kind.GOOD

    def fwd(self, x: Tensor) -> Any:
        return x * 2, self.Saved(x=x)


class WrongIn(sf.ForwardFusion):
    """Saves x in another dtype in one of these states."""

    doubles: OfKind
    relu: ops.ReLU

    def fwd(self, x: Tensor, *, env: sf.Env) -> Any:
        own = self.doubles
        wrong = env.deterministic or env.recipe is not None or not own.training or own.kind is Kind.BAD
        wrong = wrong or torch.get_default_dtype() is torch.float64
        y = (x * 2).relu()
        return y, {"doubles": own.Saved(x=x.half() if wrong else x), "relu": ops.ReLU.Saved(y=y)}


STATES: dict[str, tuple[Callable[[Any], Any], Callable[[], contextlib.AbstractContextManager[Any]]]] = {
    "evaluation": (lambda model: model.eval(), nothing),
    "an attribute that is not plain data": (lambda model: setattr(model[0], "kind", Kind.BAD), nothing),
    "deterministic": (lambda model: None, deterministic),
    "low precision": (lambda model: None, lambda: sf.low_precision(sf.recipes.Float8CurrentScaling())),
    "default dtype": (lambda model: None, in_double),
}


@pytest.mark.parametrize("state", STATES)
def test_a_fusion_that_passed_its_check_is_checked_again_in_another(state: str) -> None:
    x, (change, block) = torch.randn(3, 8).requires_grad_(), STATES[state]
    model = sf.Sequential(OfKind(), ops.ReLU(), fusions=WrongIn)
    model[0].kind = Kind.GOOD
    model(x)
    other = sf.Sequential(OfKind(), ops.ReLU(), fusions=WrongIn)
    other[0].kind = Kind.GOOD
    change(other)
    with block(), pytest.raises(sf.PluginError, match=r"field 'x' of slot 'doubles' should be float32\[3, 8\]"):
        other(x)
