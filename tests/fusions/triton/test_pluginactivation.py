"""A new activation fuses everywhere: its device functions are compiled into every kernel, and no new kernel is
needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import seqfuse as sf
from seqfuse import fusions, ops
from seqfuse.kernels import activations
from seqfuse.testing import check_fusion, check_op, seeded_randn
from tests.examples.counted import lines_of
from tests.fusions.triton import ofauser
from tests.fusions.triton.fourways import four_ways
from tests.fusions.triton.ofauser import Leaky, Mish
from tools.compiled import Compiled

ROOT = Path(__file__).resolve().parents[3]
ACTS = pytest.mark.parametrize("act", [Mish(), Leaky()], ids=lambda act: type(act).__name__)


def bias(width: int, device: torch.device) -> ops.Bias:
    made = ops.Bias(width)
    torch.nn.init.normal_(made.bias)
    return made.to(device)


@pytest.mark.parametrize("names", [("Mish",), ("leaky", "leaky_derivative", "Leaky")], ids=lambda names: names[-1])
def test_an_activation_is_a_few_lines(names: tuple[str, ...]) -> None:
    # An activation with a number to configure it and a derivative of its output takes more lines.
    assert lines_of(Path(ofauser.__file__), *names) <= (15 if len(names) == 1 else 22)


@ACTS
def test_is_what_its_reference_says(act: sf.Pointwise, device: torch.device) -> None:
    check_op(act, seeded_randn((3, 8), 0).to(device))


LISTS: list[tuple[type[sf.FusedOperation], Callable[[sf.Pointwise, torch.device], list[sf.UnfusedOperation]]]] = [
    (fusions.LinearBiasPointwise, lambda act, on: [ops.Linear(6, 5).to(on), act]),
    (fusions.PointwiseChain, lambda act, on: [bias(6, on), act]),
    (fusions.PointwiseChainBackward, lambda act, on: [bias(6, on), act]),
    (fusions.NormActivationJoint, lambda act, on: [ops.RMSNorm(6).to(on), act]),
    (fusions.ActivationLinearJoint, lambda act, on: [bias(6, on), act, ops.Linear(6, 5, bias=False).to(on)]),
    (fusions.BiasGated, lambda act, on: [bias(6, on), sf.Gated(act)]),
    (fusions.BiasGatedBackward, lambda act, on: [bias(6, on), sf.Gated(act)]),
    (fusions.ActivationLinearJoint, lambda act, on: [bias(6, on), sf.Gated(act), ops.Linear(3, 5, bias=False).to(on)]),
]
OF_LEAKY = 0, 2, 3, 7  # one of each kernel with numbers and a derivative of the output


@pytest.mark.parametrize(
    ("at", "act"), [*((at, Mish()) for at in range(len(LISTS))), *((at, Leaky()) for at in OF_LEAKY)],
    ids=lambda of: LISTS[of][0].__name__ if isinstance(of, int) else type(of).__name__,
)  # fmt: skip
def test_takes_its_place_in_every_fusion(at: int, act: sf.Pointwise, device: torch.device) -> None:
    fusion, make = LISTS[at]
    check_fusion(fusion, seeded_randn((5, 6), 0).to(device), *make(act, device), dtypes=[torch.float32])


@ACTS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_meets_itself_in_the_records(act: sf.Pointwise, dtype: torch.dtype, device: torch.device) -> None:
    chosen = (fusions.LinearBiasPointwise, fusions.PointwiseChainBackward)
    model = sf.Sequential(ops.Linear(12, 36), act, ops.Linear(36, 9), fusions=chosen).to(device, dtype)
    four_ways(model, seeded_randn((19, 12), 0, dtype=dtype).to(device), *chosen)
    chosen = (fusions.BiasGated, fusions.BiasGatedBackward)
    model = sf.Sequential(ops.Linear(12, 36), sf.Gated(act), ops.Linear(18, 9), fusions=chosen).to(device, dtype)
    four_ways(model, seeded_randn((19, 12), 0, dtype=dtype).to(device), *chosen)


@ACTS
def test_the_plan_for_hopper_has_no_pass_of_its_own_for_it(act: sf.Pointwise) -> None:
    rules = fusions.default
    env = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=8192)
    model = sf.Sequential(
        ops.LayerNorm(1024), act, ops.Linear(1024, 4096), act, ops.Linear(4096, 4096), sf.Gated(act),
        ops.Linear(2048, 1024), fusions=rules,
    ).bfloat16()  # fmt: skip
    plan = model.plan(env=env)
    names = ("NormActivationJoint", "LinearBiasPointwise", "PointwiseChainBackward", "BiasGated", "BiasGatedBackward")
    assert [plan.count(name) for name in names] == [1] * 5, plan
    for last, name in ((act, "PointwiseChain"), (sf.Gated(act), "BiasGated")):
        light = sf.Sequential(ops.Bias(1024), last, fusions=rules).bfloat16().plan(env=env)
        assert [light.count(name), light.count(f"{name}Backward")] == [1, 1], light


def test_every_kernel_compiles_with_it(
    compiled: Callable[..., list[Compiled]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    for one in compiled(ofauser.__name__, "", 2 * (5 + 2)):
        assert one.spills == 0, one


def test_is_called_by_the_name_of_its_class() -> None:
    assert activations.activation_name(Mish()) == "Mish"
    assert activations.activation_name(Leaky(0.5)) == "leaky[0.5]"


@triton.jit
def _two(x, P: tl.constexpr):
    return x


@triton.jit
def _three(x, P: tl.constexpr, q):
    return x


@triton.jit
def _gradient(dy, t):
    return dy


@triton.jit
def _without_t(dy):
    return dy


@triton.jit
def _none():
    return 0.0


def define(**attributes: object) -> type:
    return type("Odd", (sf.Pointwise,), {"reference": lambda self, x: x, **attributes})


@pytest.mark.parametrize(
    ("attributes", "says"),
    [
        ({"value": _two}, ("value must take (x), as the class states no P; it takes (x, P)", "def _two(x, P")),
        ({"value": _none}, ("value must take (x)", "it takes ()", "def _none():")),
        ({"derivative": _three}, ("derivative must take (t)", "it takes (x, P, q)", "def _three(x, P")),
        ({"derivative": _without_t}, ("derivative must take (dy, t), as the class states no P; it takes (dy)",)),
        ({"P": (1.0,)}, ("value must take (x, P), as the class states a P; it takes (x)", "def value(x):")),
        ({"value": _two, "derivative": Mish.value, "P": (1.0,)}, ("derivative must take (t, P)", "def value(x):")),
        ({"derivative": None}, ("value is stated without derivative",)),
        ({"value": None}, ("derivative is stated without value",)),
        ({"value": lambda x: x}, ("SF301 Odd: value must be a triton.jit function\n",)),
    ],
)
def test_functions_that_kernels_cannot_call_are_refused_at_definition(
    attributes: dict[str, object], says: tuple[str, ...]
) -> None:
    with pytest.raises(sf.PluginError) as caught:
        define(**{"value": Mish.value, "derivative": Mish.derivative, **attributes})
    assert caught.value.code == "SF301"
    assert "Odd" in str(caught.value)
    for words in says:
        assert words in str(caught.value)
    assert define(value=Mish.value, derivative=Mish.derivative).is_final
    assert define(value=_two, derivative=_two, P=(1.0,)).is_final
    assert define(value=Mish.value, derivative=_gradient).is_final
    assert define().value is None
