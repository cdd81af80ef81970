"""`check_fusion` passes correct fusions of every kind, and finds each spoiled one, by name."""

from __future__ import annotations

import re
import traceback
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import ops
from seqfuse.errors import PluginError
from seqfuse.testing import NotRun, check_fusion, seeded_randn
from seqfuse.testing.patterns import example_lists, known_finals, listed_types
from tests.selection import few_cases as few_cases

from .kinds import (
    KINDS,
    Activations,
    AddNorm,
    BiasAct,
    BiasGeLU,
    BiasNorm,
    GeLULinear,
    LinearBias,
    LinearBiasJoint,
    NormLinear,
)
from .spoiled import SPOILED
from .spoiled.forward_fusions import HandsItsInputToAChannel, ReturnsAView

X = seeded_randn((4, 6), 0)
FEW = pytest.mark.usefixtures("few_cases")
MUTANTS = [(cls, message) for cls, message in SPOILED if issubclass(cls, sf.FusedOperation)]


# The other kinds are close to these, and spoiled ones of them must be found.
KIN = {BiasNorm, BiasAct, BiasGeLU, LinearBias}


# By default each in one dtype, the next one in another, so that every dtype and every kind of fusion is in some case.
@pytest.mark.parametrize(
    ("fusion", "dtypes"),
    [
        pytest.param(k, dtypes, id=f"{k.__name__}-{name}", marks=[pytest.mark.full] * (k in KIN or i % 2 != turn))
        for i, k in enumerate(KINDS)
        for turn, (name, dtypes) in enumerate({"fp32": [torch.float32], "bf16": [torch.bfloat16]}.items())
    ],
)
def test_passes_a_correct_fusion(fusion: type[sf.FusedOperation], dtypes: list[torch.dtype]):
    checked = check_fusion(fusion, X, dtypes=dtypes)
    assert not checked.skipped
    assert checked.cases >= 25
    assert str(checked).startswith(f"{fusion.__name__}: {checked.cases} cases on [")


# Found in one case of many; the others in any case.
IN_ONE_CASE = (
    "ReturnsDyAsAGradient", "IgnoresNeeds", "ReadsADroppedField", "SwallowsNaN", "IgnoresStrides", "SwallowsANaNOfDy",
    "ClampsDx", "WidensForAStridedDy", "AddsADimensionForAStridedDy",
)  # fmt: skip


class LimitedDropsColumns(BiasGeLU):
    """The same, for few columns."""

    def requires(self, env):
        yield self.bias.size < 64, "needs fewer than 64 columns"

    def fwd(self, x):
        y, saved = super().fwd(x)
        y[..., 1 << (y.shape[-1].bit_length() - 1) :] = 0
        return y, saved


class DropsColumns(BiasGeLU):
    """Right if the width is a power of two."""

    def fwd(self, x):
        y, saved = super().fwd(x)
        y[..., 1 << (y.shape[-1].bit_length() - 1) :] = 0
        return y, saved


@FEW
def test_a_width_that_is_no_power_of_two_is_tried_where_that_of_x_is_one():
    with pytest.raises(AssertionError, match=r"DropsColumns on \[Bias, GeLU\], 264 columns: .*\n  y: max"):
        check_fusion(DropsColumns, seeded_randn((4, 8), 0), dtypes=[torch.float32])
    with pytest.raises(AssertionError, match=r"LimitedDropsColumns on \[Bias, GeLU\], 12 columns: .*\n  y: max"):
        check_fusion(LimitedDropsColumns, seeded_randn((4, 8), 0), dtypes=[torch.float32])
    check_fusion(DropsColumns, seeded_randn((4, 8), 0), ops.Bias(8), ops.GeLU(), dtypes=[torch.float32])


@pytest.mark.parametrize(("fusion", "message"), MUTANTS, ids=[fusion.__name__ for fusion, _ in MUTANTS])
def test_catches(fusion: type[sf.FusedOperation], message: str, request: pytest.FixtureRequest):
    if fusion.__name__ not in IN_ONE_CASE:
        request.getfixturevalue("few_cases")
    state = torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.get_rng_state()
    operations = {ReturnsAView: [ops.Scale(1.0)], HandsItsInputToAChannel: [ops.Scale(1.0), ops.Fork("kept")]}
    with pytest.raises((AssertionError, PluginError), match=message) as error:
        check_fusion(fusion, X, *operations.get(fusion, ()))
    assert fusion.__name__ in str(error.value)
    assert (torch.get_default_dtype(), torch.get_float32_matmul_precision()) == state[:2]
    assert torch.equal(torch.get_rng_state(), state[2])


@FEW
def test_a_joint_fusion_may_save_a_view_of_a_parameter():
    check_fusion(LinearBiasJoint, X, dtypes=[torch.float32])


def test_there_is_a_mutant_for_every_way_to_break_the_contract():
    assert len(MUTANTS) >= 50


def test_names_the_combination_and_the_case():
    class Spoiled(BiasGeLU):
        def bwd(self, dy, saved):
            dx, grads = super().bwd(dy, saved)
            return 2 * dx, grads

    where = r"Spoiled on \[Bias, GeLU\]: fused forward x fused backward, float32, x \(33, 6\), normal: .*\n  d_x: max"
    with pytest.raises(AssertionError, match=where):
        check_fusion(Spoiled, X)


@FEW
def test_given_operations_stay_as_they_are():
    linear, bias = ops.Linear(6, 5, bias=False), ops.Bias(5)
    before = linear.weight.clone()
    checked = check_fusion(LinearBias, X, linear, bias)
    assert checked.lists == ("[Linear, Bias]",)
    assert torch.equal(linear.weight, before)
    assert not bias.bias.any()
    assert linear.weight.grad is None
    assert "fwd" not in vars(linear)


@FEW
def test_an_operation_may_be_given_with_what_it_expands_to():
    assert check_fusion(LinearBias, X, ops.Linear(6, 5), dtypes=(torch.float16,)).lists == ("[Linear]",)


@FEW
def test_channels_may_be_given():
    other = seeded_randn((4, 6), 3)
    check_fusion(AddNorm, X, ops.Add("r"), ops.Fork("s"), ops.LayerNorm(6), r=other)


def test_says_why_a_fusion_is_refused():
    reason = r"GeLULinear is never used; \[GeLU, Linear\] in .*it is not used: the recomputation knows the exact GeLU"
    with pytest.raises(AssertionError, match=reason) as error:
        check_fusion(GeLULinear, X, ops.GeLU("tanh"), ops.Linear(6, 4, bias=False))
    assert str(error.value).count("it is not used") == 1  # in both dtypes


def test_a_requires_that_raises_is_a_mistake_and_no_fusion_that_cannot_run_here():
    class Mistaken(BiasNorm):
        def requires(self, env):
            yield env.cuda, "needs a GPU"

    said = "requires raised AttributeError: 'Env' object has no attribute 'cuda'"
    with pytest.raises(AssertionError, match=said) as error, pytest.warns(UserWarning, match=said):
        check_fusion(Mistaken, X)
    assert not isinstance(error.value, NotRun)


def test_an_input_that_its_signature_leaves_out_is_a_mistake():
    class LeavesOut(sf.JointFusion):
        bias: ops.Bias
        add: ops.Add

        class Saved(sf.Saved):
            pass

        def fwd(self, x):
            return x + self.bias.bias, self.Saved()

        def bwd(self, dy, saved):
            return dy, {"bias.bias": dy.sum(0), "add.other": dy}

    with pytest.raises(AssertionError, match="the extra input add_other is not in the signature of its fwd") as error:
        check_fusion(LeavesOut, X)
    assert not isinstance(error.value, NotRun)


def test_what_the_kit_finds_in_a_pass_is_told_without_advice_for_passes_that_fail():
    class WritesDy(BiasAct):
        def bwd(self, dy, saved):
            grads = super().bwd(dy, saved)
            dy.mul_(2)
            return grads

    with pytest.raises(AssertionError, match=r"float32, x \(7, 6\), normal: bwd: dy was modified, first at \(0, 0\)$"):
        check_fusion(WritesDy, X, ops.Bias(6), ops.Tanh())


def test_results_that_waver_are_called_that():
    class Wavers(BiasAct):
        calls = 0

        def fwd(self, x):
            y, saved = super().fwd(x)
            type(self).calls += 1
            return y * (1 + 1e-3 * (self.calls % 2)), saved

    with pytest.raises(AssertionError, match="called again with the same inputs: y: bits differ first at"):
        check_fusion(Wavers, X, ops.Bias(6), ops.Tanh())


@pytest.mark.parametrize("dtypes", [None, [torch.float32]])
def test_says_how_to_run_a_triton_fusion_without_a_gpu(dtypes: list[torch.dtype] | None):
    class OfTriton(sf.ForwardFusion):
        linear: ops.Linear
        bias: ops.Bias

        kernels = ("triton",)

        def fwd(self, x: Tensor) -> Any:
            raise NotImplementedError

    with pytest.raises(NotRun, match=r"needs a Triton device.*; TRITON_INTERPRET=1, set before the start, runs"):
        check_fusion(OfTriton, X, ops.Linear(6, 4), dtypes=dtypes)


def test_says_that_a_pattern_does_not_match():
    with pytest.raises(AssertionError, match=r"its pattern \(linear, bias\) matches nowhere in Linear, GeLU"):
        check_fusion(LinearBias, X, ops.Linear(6, 4, bias=False), ops.GeLU())
    with pytest.raises(AssertionError, match="its pattern matches 2 times; give the operations of one match"):
        check_fusion(LinearBias, X, ops.Linear(6, 4), ops.Linear(4, 3))


class GemmGated(sf.ForwardFusion):
    linear: ops.Linear
    gated: sf.Gated

    def fwd(self, x):
        y, linear = self.linear.fwd(x)
        y, gated = self.gated.fwd(y)
        return y, {"linear": linear, "gated": gated}


class Float32Only(BiasAct):
    def requires(self, env):
        yield env.dtype is torch.float32, "float32 only"


@FEW
def test_a_dtype_that_was_asked_for_may_not_be_refused():
    skipped = check_fusion(Float32Only, X, ops.Bias(6), ops.Tanh()).skipped
    assert skipped == ("[Bias, Tanh] in torch.bfloat16: it is not used: float32 only (at position 0)",)
    with pytest.raises(AssertionError, match=r"Float32Only on \[Bias, Tanh\]: it is not used: float32 only"):
        check_fusion(Float32Only, X, ops.Bias(6), ops.Tanh(), dtypes=(torch.float32, torch.bfloat16))


def test_cases_in_which_a_fusion_is_refused_are_left_out_and_named():
    class ManyRows(BiasAct):
        def requires(self, env):
            yield env.rows is None or env.rows >= 64, "too few rows"

    checked = check_fusion(ManyRows, seeded_randn((70, 6), 0), ops.Bias(6), ops.Tanh())
    assert checked.cases > 20
    few = "[Bias, Tanh], float32, x (7, 6), given: it is not used: too few rows (at position 0)"
    assert few in checked.skipped


@FEW
def test_a_fusion_that_costs_more_than_it_saves_is_checked_all_the_same():
    class Dear(BiasNorm):
        def saves(self, env):
            return sf.Savings(launches=-100)

    assert not sf.Sequential(ops.Bias(6), ops.LayerNorm(6), fusions=(Dear,)).plan(X).count("Dear")
    assert check_fusion(Dear, X).cases


def test_what_saves_gives_is_checked():
    class Free(BiasNorm):
        def saves(self, env):
            return 3

    class Broken(BiasNorm):
        def saves(self, env):
            raise ZeroDivisionError

    for fusion in (Free, Broken):
        with pytest.warns(UserWarning, match="saves raised"), pytest.raises(AssertionError, match="saves raised"):
            check_fusion(fusion, X)


@pytest.mark.parametrize(
    ("arguments", "named", "message"),
    [
        ((ops.ReLU, X), {}, "takes a fusion, a class .*, not the class ReLU; check_op takes an operation"),
        ((LinearBias(), X), {}, "takes a fusion, .*, not an instance of LinearBias; give the class, LinearBias"),
        (
            (len, X),
            {},
            "takes a fusion, a class derived from sf.FusedOperation, not an instance of .*function_or_method$",
        ),
        ((LinearBias, X, ops.Linear), {}, "takes operations, .*, not the class Linear; give an instance"),
        ((LinearBias, 3), {}, "takes x as a torch.Tensor, not an instance of int"),
        ((LinearBias, X), {"dtypes": ["fp16"]}, r"takes dtypes as .*, such as \(torch.float16,\), not \['fp16'\]"),
        ((LinearBias, X), {"env": "cuda:sm_90"}, "takes env as an sf.Env, such as .*, not 'cuda:sm_90'"),
    ],
    ids=["operation", "instance", "function", "class", "number", "name", "device"],
)
def test_says_what_an_argument_should_be(arguments: tuple[object, ...], named: dict[str, object], message: str):
    with pytest.raises((TypeError, sf.InputError), match=f"check_fusion {message}"):
        check_fusion(*arguments, **named)


def test_a_fusion_for_another_machine_has_to_be_planned_there():
    class OnGpu(BiasAct):
        def requires(self, env):
            yield env.device == "cuda", "needs a GPU"

    env = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16)
    said = r"ran nothing of OnGpu, which was planned for cuda:sm_90 bfloat16 alone: .*needs a GPU .*, and 1 more$"
    with pytest.warns(UserWarning, match=said) as caught:
        checked = check_fusion(OnGpu, X, ops.Bias(6), ops.ReLU(), env=env)
    assert caught[0].filename == __file__
    assert not checked.cases
    assert len(checked.skipped) == 2
    with pytest.raises(AssertionError, match=r"OnGpu on .*needs a GPU"):
        check_fusion(OnGpu, X, ops.Bias(6), ops.ReLU(), env=sf.Env.of("cpu"))


@FEW
def test_operations_have_the_dtype_of_the_environment_that_is_asked_for():
    class OneDtype(BiasAct):
        def requires(self, env):
            yield self.bias.bias.dtype == env.dtype, "one dtype"

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checked = check_fusion(OneDtype, X, ops.Bias(6), ops.ReLU(), env=sf.Env.of("cpu", dtype=torch.bfloat16))
    assert checked.cases
    assert not checked.skipped


# The sequences that are built when no operations are given.


def lists_for(fusion: type[sf.FusedOperation]) -> list[str]:
    return [listed_types(made) for made, _ in example_lists(fusion, X)]


@FEW
def test_an_optional_slot_is_filled_and_empty():
    assert lists_for(NormLinear) == ["[LayerNorm, Linear, Bias]", "[LayerNorm, Linear]"]


@FEW
def test_an_open_slot_takes_every_operation_of_the_library():
    assert lists_for(BiasAct) == [
        f"[Bias, {act}]"
        for act in ("Clamp", "ClampedSiLU", "GeLU", "QuickGeLU", "ReLU", "SiLU", "Sigmoid", "SquaredReLU", "Tanh")
    ]
    units = [ops.ClampedSwiGLU, ops.GEGLU, ops.GLU, ops.QGEGLU, ops.ReGLU, ops.SReGLU, ops.SwiGLU]
    assert known_finals(sf.Gated) == units


@FEW
def test_a_variadic_slot_takes_one_two_and_three():
    assert {len(made) for made, _ in example_lists(Activations, X)} == {1, 2, 3}


@FEW
def test_channels_are_public_where_signatures_name_them_and_paired_where_not():
    class Block(sf.InferenceFusion):
        fork: ops.Fork
        linear: ops.Linear
        bias: ops.Bias
        add: ops.Add

        def fwd(self, x):
            return x

    (add, fork, _), _ = next(example_lists(AddNorm, X))
    assert (add.name, fork.name) == ("add_other", "fork_out")
    (fork, *_, add), _ = next(example_lists(Block, X))
    assert (add.name, fork.name) == (None, None)


@FEW
def test_x_gets_columns_where_the_examples_do_not_fit_together():
    _, x = next(example_lists(sf.fusions.BiasQKNormRotary, torch.randn(3, 8)))
    assert x.shape == (3, 12)  # query, key and value heads of an even size
    (linear, gated), x = next(example_lists(GemmGated, X))
    assert (linear.in_features, linear.out_features, x.shape) == (7, 10, (4, 7))
    assert isinstance(gated, ops.ClampedSwiGLU)
    assert check_fusion(GemmGated, X).lists[0] == "[Linear, ClampedSwiGLU]"


def test_examples_that_cannot_be_made_ask_for_the_operations():
    class Between(sf.ForwardFusion):
        one: ops.GLU
        two: ops.GLU
        three: ops.GLU
        four: ops.GLU  # sixteen columns: x is not widened that far

        def fwd(self, x): ...

    with pytest.raises(AssertionError, match=r"Between: ValueError .*give the operations yourself"):
        check_fusion(Between, seeded_randn((4, 6), 0))


class SavesWrong(sf.ForwardFusion):
    bias: ops.Bias
    act: ops.ReLU

    def fwd(self, x):
        y = torch.relu(x + self.bias.bias)
        return y, {"bias": ops.Bias.Saved(), "act": ops.ReLU.Saved(y=-y)}


def test_what_is_saved_wrongly_is_told_before_the_gradients_that_it_spoils():
    with pytest.raises(AssertionError) as caught:
        check_fusion(SavesWrong, X)
    assert str(caught.value).splitlines()[1].startswith("  field 'y' of slot 'act': ")


class FixedGeLU(sf.InferenceFusion):
    bias: ops.Bias
    act: ops.GeLU

    def fwd(self, x):
        # Rounded once: float32 erf of torch is as accurate as processor and layout allow.
        return torch.nn.functional.gelu((x + self.bias.bias).double()).to(x.dtype)


class FixedEps(sf.InferenceFusion):
    norm: ops.LayerNorm

    def fwd(self, x):
        return torch.nn.functional.layer_norm(x, x.shape[-1:], self.norm.weight, self.norm.bias, 1e-5)


class FixedDropout(sf.InferenceFusion):
    bias: ops.Bias
    drop: ops.Dropout

    def fwd(self, x, *, drop_seed):
        x = x + self.bias.bias
        return x if drop_seed is None else self.drop.fwd(x, seed=drop_seed)[0].mul(2 * (1 - self.drop.p))


@pytest.mark.parametrize(
    ("fusion", "configured"),
    [
        (FixedGeLU, "GeLU(approximate='tanh')"),
        (FixedEps, "LayerNorm((6,), eps=0.01"),
        (FixedDropout, "Dropout(p=0.2, mode='downscale_in_infer')"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_configuration_that_is_missed_is_a_failure(fusion: type[sf.FusedOperation], configured: str):
    with pytest.raises(AssertionError, match=rf"(?s)^Fixed\w+ misses .*{re.escape(configured)}.*y: max"):
        check_fusion(fusion, X, dtypes=(torch.float32,))


class Gain(sf.UnfusedOperation):
    class Saved(sf.Saved):
        pass

    def __init__(self, size: int, by: float = 2.0) -> None:
        super().__init__()
        self.size, self.by = size, by
        self.gain = torch.nn.Parameter(torch.ones(size), requires_grad=False)

    def reference(self, x):
        return x * (self.gain * self.by)

    def fwd(self, x):
        return self.reference(x), self.Saved()

    def bwd(self, dy, saved): ...

    @classmethod
    def example(cls, x):
        return cls(x.shape[-1]).to(x.dtype)


class TanhGain(sf.InferenceFusion):
    act: ops.Tanh
    gain: Gain

    def fwd(self, x):
        return self.gain.reference(torch.tanh(x))


@FEW
def test_a_class_that_was_tried_in_one_configuration_is_named(monkeypatch: pytest.MonkeyPatch):
    (said,) = check_fusion(TanhGain, X).skipped
    assert said == "configurations of Gain other than by=2.0: its `examples` makes none"
    both = classmethod(lambda cls, x: (cls.example(x), cls(x.shape[-1], 3.0).to(x.dtype)))
    monkeypatch.setattr(Gain, "examples", both)
    assert check_fusion(TanhGain, X).skipped == ()


@FEW
def test_a_configuration_may_be_refused():
    class Refuses(FixedGeLU):
        def requires(self, env):
            yield self.act.approximate == "none", "the exact one only"

    assert check_fusion(Refuses, X).skipped == ()


@FEW
def test_an_operation_whose_channels_are_not_given_keeps_its_arguments():
    (first, x), *_ = example_lists(sf.fusions.BiasQKNormRotary, torch.randn(5, 24))
    assert [type(operation) for operation in first] == [ops.Bias, ops.QKNorm, ops.RotaryEmbedding]
    assert sf.Sequential(*first)(x).shape == x.shape


class RaisesInItsBackward(BiasAct):
    def bwd(self, dy, saved):
        raise RuntimeError("no such kernel")


class SavesForAnotherSlot(sf.ForwardFusion):
    bias: ops.Bias
    act: ops.Tanh

    def fwd(self, x):
        y = torch.tanh(x + self.bias.bias)
        return y, {"bias": ops.Bias.Saved(), "acts": ops.Tanh.Saved(y=y)}


@pytest.mark.parametrize(
    ("fusion", "error", "places"),
    [(SavesForAnotherSlot, PluginError, []), (RaisesInItsBackward, AssertionError, ["bwd"])],
)
def test_a_failure_has_frames_of_its_author_alone(
    fusion: type[sf.FusedOperation], error: type[Exception], places: list[str]
):
    with pytest.raises(error) as caught:
        check_fusion(fusion, X, ops.Bias(6), ops.Tanh())
    here, kit, *more = traceback.extract_tb(caught.value.__traceback__)
    assert (here.name, kit.name, more) == ("test_a_failure_has_frames_of_its_author_alone", "check_fusion", [])
    found: list[str] = []
    cause = caught.value.__cause__
    while cause is not None:
        found += [frame.name for frame in traceback.extract_tb(cause.__traceback__)]
        cause = cause.__cause__ or cause.__context__
    assert found == places


def test_a_backward_that_fails_in_the_kit_is_not_told_to_hide_it():
    with pytest.raises(AssertionError, match="no such kernel") as caught:
        check_fusion(RaisesInItsBackward, X, ops.Bias(6), ops.Tanh())
    assert "unfused(saved)" not in str(caught.value)


def test_a_record_for_an_unknown_slot_is_told_the_slots():
    with pytest.raises(PluginError, match="unknown slots: 'acts'; its slots are bias, act"):
        check_fusion(SavesForAnotherSlot, X, ops.Bias(6), ops.Tanh())


def test_a_record_of_another_class_is_shown_with_its_fields():
    class SavesForReLU(sf.ForwardFusion):
        bias: ops.Bias
        act: ops.GeLU

        def fwd(self, x):
            y = torch.nn.functional.gelu(x + self.bias.bias)
            return y, {"bias": ops.Bias.Saved(), "act": ops.ReLU.Saved(y=y)}

    with pytest.raises(PluginError, match=r"slot 'act' needs GeLU.Saved\(x\), it saved SavedOutput\(y\)"):
        check_fusion(SavesForReLU, X, ops.Bias(6), ops.GeLU())


def test_each_tensor_that_differs_is_told_once():
    class SavesHalf(sf.ForwardFusion):
        bias: ops.Bias
        act: ops.Tanh

        def fwd(self, x):
            y = torch.tanh(x + self.bias.bias)
            return y, {"bias": ops.Bias.Saved(), "act": ops.Tanh.Saved(y=y / 2)}

    with pytest.raises(AssertionError) as caught:
        check_fusion(SavesHalf, X, ops.Bias(6), ops.Tanh())
    _, *lines, first = str(caught.value).splitlines()
    assert [line.split(": ")[0].strip() for line in lines] == ["field 'y' of slot 'act'", "d_x", "bias.bias.grad"]
    assert first == "  (saved fields differ first: the gradients follow from them)"
