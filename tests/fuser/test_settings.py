"""`sf.fusing` chooses among the fusions of a model; environment variables are data: parsed once, none names code."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import ops, settings
from tests.fuser.fusions import (
    CASES,
    PAIR,
    BiasGeLUBackward,
    BiasGeLUForward,
    BiasReLU,
    BiasReLUBack,
    Case,
    assert_exact,
    outcome,
    randomized,
    run,
    tensor,
)
from tests.processes import Script


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_without_fusing_the_bits_are_those_of_the_operations_called_one_by_one(case: Case) -> None:
    model = randomized(sf.Sequential(*case.make(), fusions=case.fusions))
    plain = sf.Sequential(*model, fusions=())
    x, channels = tensor(7, 5), {c: tensor(7, 5, seed=8) for c in case.channels}
    with sf.fusing(False):
        plan = model.plan(x, **channels)
        assert not any(s.fused for s in (*plan.forward, *plan.backward))
        assert {r.reason for r in plan.refused} == {"fusing is off"}
        got = run(model, x, **channels)
    assert_exact(got, run(plain, x, **channels))
    if not any(isinstance(op, ops.Fork | ops.Add | ops.Residual) for op in model):

        def one_by_one(x: Tensor) -> Tensor:
            for operation in model:
                x = operation(x)
            return x

        assert_exact(got, outcome(one_by_one, {"x": x, **dict(model.named_parameters())}, x))


def names_now(model: sf.Sequential) -> list[str]:
    plan = model.plan(tensor(7, 5))
    return sorted({s.name for s in (*plan.forward, *plan.backward) if s.fused})


def choice() -> sf.Sequential:
    return sf.Sequential(
        ops.Bias(5), ops.ReLU(), ops.Bias(5), ops.GeLU(), fusions=(*PAIR, BiasGeLUForward, BiasGeLUBackward)
    )


ALL = ["BiasGeLUBackward", "BiasGeLUForward", "BiasReLU", "BiasReLUBack"]


def test_only_and_exclude_take_classes_and_names_and_say_so() -> None:
    model = choice()
    assert names_now(model) == ALL
    for only in ([BiasReLU], ["BiasReLU"], "BiasReLU", BiasReLU, {BiasReLU}):
        with sf.fusing(only=only):
            assert names_now(model) == ["BiasReLU"]
            refused = {r.fusion: r.reason for r in model.plan(tensor(7, 5)).refused}
            assert refused["BiasGeLUForward"] == "not named by sf.fusing(only=...)"
    for exclude in ([BiasReLU], ["BiasReLU"], "BiasReLU", BiasReLU):
        with sf.fusing(exclude=exclude):
            assert names_now(model) == [n for n in ALL if n != "BiasReLU"]
            refused = {r.fusion: r.reason for r in model.plan(tensor(7, 5)).refused}
            assert refused["BiasReLU"] == "excluded by sf.fusing(exclude=...)"
    with sf.fusing(only=[BiasReLU, BiasReLUBack], exclude=[BiasReLU]):
        assert names_now(model) == ["BiasReLUBack"]
    with sf.fusing(only=[]):
        assert names_now(model) == []
    assert names_now(model) == ALL


def test_regions_nest() -> None:
    model = choice()
    with sf.fusing(exclude=[BiasReLU]):
        with sf.fusing(exclude=[BiasReLUBack]):
            assert names_now(model) == ["BiasGeLUBackward", "BiasGeLUForward"]
        with sf.fusing(on_error="raise"):
            assert names_now(model) == [n for n in ALL if n != "BiasReLU"]
        with sf.fusing(False):
            assert names_now(model) == []
            with sf.fusing(on_error="raise"):
                assert names_now(model) == []
            with sf.fusing(True):
                assert names_now(model) == [n for n in ALL if n != "BiasReLU"]
            assert names_now(model) == []
        assert names_now(model) == [n for n in ALL if n != "BiasReLU"]
    with sf.fusing(only=[BiasReLU, BiasGeLUForward]), sf.fusing(only=[BiasReLU, BiasReLUBack]):
        assert names_now(model) == ["BiasReLU"]
    assert names_now(model) == ALL


def test_a_region_ends_with_an_exception_too() -> None:
    model = choice()
    for error in (ValueError, KeyboardInterrupt, GeneratorExit):
        with pytest.raises(error), sf.fusing(False):
            raise error
        assert names_now(model) == ALL
    with pytest.raises(sf.InputError), sf.fusing(False):
        model(tensor(7, 4))
    assert names_now(model) == ALL


def test_a_region_can_be_a_decorator() -> None:
    model = choice()

    @sf.fusing(False)
    def inside() -> list[str]:
        return names_now(model)

    assert inside() == []
    assert inside() == []
    assert names_now(model) == ALL


def test_the_backward_runs_the_cover_its_forward_was_made_under() -> None:
    ran: list[int] = []

    class Seen(BiasReLUBack):
        def bwd(self, dy: Tensor, *, bias: Any, act: Any) -> Any:
            ran.append(1)
            return super().bwd(dy, bias=bias, act=act)

    model = randomized(sf.Sequential(ops.Bias(5), ops.ReLU(), fusions=(Seen,)))
    x = tensor(7, 5)
    y = model(x)
    with sf.fusing(False):
        z = model(x)
        y.sum().backward()
    assert ran == [1]
    z.sum().backward()
    assert ran == [1]


ROOT = Path(__file__).resolve().parents[2]
CODE = """
import sys, warnings
sys.path.insert(0, {root!r})
with warnings.catch_warnings(record=True) as at_import:
    warnings.simplefilter("always")
    import seqfuse as sf
    from seqfuse import ops
import torch
from typing import Any

class Fails(sf.ForwardFusion):
    bias: ops.Bias
    act: ops.ReLU
    def fwd(self, x: torch.Tensor) -> Any:
        raise ArithmeticError("mine")

with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    model = sf.Sequential(ops.Bias(5), ops.ReLU(), fusions=(Fails,))
    x = torch.ones(3, 5)
    print("fused", model.plan(x).count("Fails"))
    model(x), model(x)
    print("ran")
print("at import", [str(w.message) for w in at_import if "SEQFUSE" in str(w.message)])
for w in seen:
    if "SEQFUSE" in str(w.message):
        print("warning", w.message)
print("modules", sorted(n for n in sys.modules if n.startswith("evil")))
"""


class Fails(BiasReLU):
    def fwd(self, x: torch.Tensor) -> Any:
        raise ArithmeticError("mine")


@pytest.fixture
def fresh_settings() -> Iterator[Callable[[], None]]:
    """Forgets the environment that was read, now and after the test."""

    def forget() -> None:
        settings.settings.cache_clear()
        settings.default_fusing.cache_clear()

    yield forget
    forget()


def test_variables_switch_fusing_and_what_an_error_does(
    monkeypatch: pytest.MonkeyPatch, fresh_settings: Callable[[], None]
) -> None:
    monkeypatch.setenv("SEQFUSE_ON_ERROR", "raise")
    x = torch.ones(3, 5)
    for fusing, count in (("0", 0), ("1", 1)):
        monkeypatch.setenv("SEQFUSE_FUSING", fusing)
        fresh_settings()
        model = sf.Sequential(ops.Bias(5), ops.ReLU(), fusions=(Fails,))
        assert model.plan(x).count("Fails") == count
        with pytest.raises(sf.KernelError) if count else contextlib.nullcontext():
            model(x)


def test_a_misspelled_variable_is_warned_about_once_with_what_was_meant(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "main.py").write_text(CODE.format(root=str(ROOT)))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SEQFUSE_")}
    environment |= {
        "SEQFUSE_FSUING": "0",
        "SEQFUSE_ON_EROR": "raise",
        "SEQFUSE_PLUGIN": "evil:fusions",
        "SEQFUSE_FUSING": "evil:Class",
        "PYTHONPATH": str(tmp_path),
    }
    done = Script(str(tmp_path / "main.py"), environment=environment, bare=True).done()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "modules []" in lines
    # Unknown or malformed values change nothing.
    assert lines[:2] == ["fused 1", "ran"]
    assert "at import []" in lines
    warned = [line for line in lines if line.startswith("warning")]
    assert len(warned) == 4
    text = "\n".join(warned)
    assert "SEQFUSE_FSUING; did you mean 'SEQFUSE_FUSING'?" in text
    assert "SEQFUSE_ON_EROR; did you mean 'SEQFUSE_ON_ERROR'?" in text
    assert "unknown environment variable SEQFUSE_PLUGIN" in text
    assert "SEQFUSE_FUSING='evil:Class' is none of 0, 1; ignored" in text


@pytest.mark.parametrize(
    "choose",
    [lambda: sf.fusing("off"), lambda: sf.fusing(on_error="warn"), lambda: sf.Env.of("h1000"),
     lambda: sf.Env.of("sm_90"),
     lambda: sf.Env.of("cuda:sm90"), lambda: sf.Env.of("cuda", dtype="bf16"), lambda: sf.Sequential().plan(env="cuda")],
    ids=["enabled", "on_error", "a card", "no kind", "an architecture", "a dtype", "an env"],
)  # fmt: skip
def test_a_setting_that_is_none_is_an_error(choose: Any) -> None:
    with pytest.raises(sf.InputError) as caught, contextlib.ExitStack() as stack:
        stack.enter_context(choose())
    assert caught.value.code == "SF106"
    assert caught.value.hint is not None or "dtype" in str(caught.value)


class Own(BiasReLU):
    """A user's fusion, in a fusion set."""


NAMELESS: dict[str, tuple[Any, str]] = {
    "a misspelled name": (["LinaerBiasAct"], "sf.fusing names 'LinaerBiasAct', .*\nHint: did you mean 'LinearBiasAct'"),
    "a misspelled name of somebody's": ("Onw", "there is no such fusion\nHint: did you mean 'Own'"),
    "a name": (["LinearBias", "nothing"], "sf.fusing names 'nothing', and there is no such fusion"),
    "a base": (["ForwardFusion"], "sf.fusing names 'ForwardFusion'"),
    "an operation": ([ops.ReLU], "sf.fusing names 'ReLU'"),
    "a number": (3, "only and exclude take names or classes of fusions, not 3"),
    "numbers": (["LinearBias", 3], "only and exclude take names or classes of fusions, not 3"),
}


@pytest.mark.parametrize("name", NAMELESS)
@pytest.mark.parametrize("how", ["only", "exclude"])
def test_a_name_that_no_fusion_has_is_an_error(name: str, how: str) -> None:
    chosen, says = NAMELESS[name]
    model, x = sf.Sequential(ops.Linear(4, 4), ops.ReLU()), torch.ones(3, 4)
    before = model(x)
    for call in (model, model.plan):
        with pytest.raises(sf.InputError, match=says) as caught, sf.fusing(**{how: chosen}):
            call(x)
        assert caught.value.code == "SF106"
    assert torch.equal(model(x), before)


def test_fusions_of_any_rule_set_may_be_named() -> None:
    model, x = sf.Sequential(ops.Linear(4, 4), ops.ReLU(), fusions=(Own,)), torch.ones(3, 4)
    for chosen in ("Own", Own, ["Own", "LinearBias"], {sf.fusions.LinearBias, "Own"}):
        with sf.fusing(only=chosen):
            assert model.plan(x).count("Own") == 1
        with sf.fusing(exclude=chosen):
            assert model.plan(x).count("Own") == 0


@pytest.mark.parametrize("how", [{"exclude": Own}, {"only": "LinearBias"}, {"enabled": False}], ids=str)
def test_at_all_costs_keeps_what_is_chosen_around_it(how: Any) -> None:
    model, x = sf.Sequential(ops.Bias(4), ops.ReLU(), fusions=(Own,)), torch.ones(3, 4)
    with settings.at_all_costs():
        assert model.plan(x).count("Own") == 1
        with sf.fusing(**how), settings.at_all_costs():
            assert model.plan(x).count("Own") == 0


@pytest.mark.parametrize("given", [3, "x", None, [torch.ones(3, 4)], (torch.ones(3, 4),), torch.ones(3, 4).numpy()])
def test_what_is_no_tensor_is_an_error(given: Any) -> None:
    with pytest.raises(sf.InputError, match="expects a tensor") as caught:
        sf.Sequential(ops.Linear(4, 4), ops.ReLU())(given)
    assert (caught.value.code, caught.value.operation, caught.value.position) == ("SF105", "Linear", 0)
