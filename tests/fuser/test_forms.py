"""The form of an operation's return values and declarations is checked; slots of fusions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from tests.fuser.fusions import (
    BiasReLU,
    Doubles,
    fused_names,
    of_bias,
    randomized,
    run,
    stepwise,
    tensor,
)


def operation_with(fwd: Callable[[Any, Tensor], Any], made: tuple[str, ...] = ()) -> sf.UnfusedOperation:
    class Wrong(sf.UnfusedOperation):
        outputs = made

        class Saved(sf.Saved):
            x: Tensor

        def reference(self, x: Tensor) -> Any:
            return (2 * x, {"out": x}) if made else 2 * x

        if made:

            def bwd(self, dy: Tensor, saved: Any, *, d_out: Tensor) -> Any:
                return 2 * dy + d_out, {}
        else:

            def bwd(self, dy: Tensor, saved: Any) -> Any:
                return 2 * dy, {}

        def fwd(self, x: Tensor) -> Any:
            return fwd(self, x)

    return Wrong()


FORMS: dict[str, tuple[Callable[[Any, Tensor], Any], tuple[str, ...]]] = {
    "only_y": (lambda op, x: 2 * x, ()),
    "no_record": (lambda op, x: (2 * x, None), ()),
    "a_tuple_for_a_record": (lambda op, x: (2 * x, (x,)), ()),
    "a_record_of_another_class": (lambda op, x: (2 * x, ops.GeLU.Saved(x=x)), ()),
    "outputs_not_declared": (lambda op, x: (2 * x, {}, op.Saved(x=x)), ()),
    "no_y": (lambda op, x: (None, op.Saved(x=x)), ()),
    "outputs_missing": (lambda op, x: (2 * x, op.Saved(x=x)), ("out",)),
    "an_output_missing": (lambda op, x: (2 * x, {}, op.Saved(x=x)), ("out",)),
    "an_output_too_many": (lambda op, x: (2 * x, {"out": x, "more": x}, op.Saved(x=x)), ("out",)),
    "an_output_that_is_none": (lambda op, x: (2 * x, {"out": None}, op.Saved(x=x)), ("out",)),
}


@pytest.mark.parametrize("training", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize(("fwd", "made"), FORMS.values(), ids=FORMS.keys())
def test_a_forward_of_an_operation_that_returns_another_form_is_named(
    fwd: Any, made: tuple[str, ...], training: bool
) -> None:
    model = sf.Sequential(ops.Scale(3), operation_with(fwd, made), ops.Scale(1))
    # A tensor of two or three rows can be unpacked like a pair.
    for count in (7, 2, 2, 3):
        with torch.set_grad_enabled(training), pytest.raises(sf.PluginError) as caught:
            model(tensor(count, 5))
        assert (caught.value.code, caught.value.operation, caught.value.position) == ("SF302", "Wrong", 1)


@pytest.mark.parametrize("value", [3, "text", 1.5, {"a": 1}], ids=repr)
def test_a_tensor_field_that_holds_something_else_is_named(value: Any) -> None:
    class Wrong(Doubles):
        class Saved(sf.Saved):
            more: Tensor | None

        def fwd(self, x: Tensor) -> Any:
            return 2 * x, self.Saved(more=value)

    with pytest.raises(sf.PluginError, match=f"'more'.*not a {type(value).__name__}") as caught:
        sf.Sequential(ops.Scale(3), Wrong(), ops.Scale(1))(tensor(7, 5).requires_grad_())
    assert (caught.value.code, caught.value.operation, caught.value.position) == ("SF302", "Wrong", 1)


Change = Callable[[Any], Any]
MANY = "slot 'acts' needs a tuple with the Saved of each of its operations, it saved "
SEVERAL: dict[str, tuple[Change, str]] = {
    "one_too_many": (
        lambda several: (*several, several[0]),
        "it saved more records than there are operations: 'acts.2'",
    ),
    "one_missing": (lambda several: several[:1], "slot 'acts.1' needs Sigmoid.Saved, it saved nothing"),
    "one_that_is_none": (lambda several: (several[0], None), "slot 'acts.1' needs Sigmoid.Saved, it saved nothing"),
    "one_of_all": (lambda several: several[0], MANY + "SavedOutput"),
    "a_dictionary": (lambda several: dict(enumerate(several)), MANY + "dict"),
    "a_number": (lambda several: 3, MANY + "int"),
    "a_record_for_an_empty_slot": (lambda several: several, "it saved more records than there are operations: 'bias'"),
}


@pytest.mark.parametrize(("change", "message"), SEVERAL.values(), ids=SEVERAL.keys())
def test_records_of_a_slot_of_several_operations_are_counted(change: Change, message: str) -> None:
    class Wrong(sf.ForwardFusion):
        bias: ops.Bias | None
        acts: tuple[sf.Pointwise, ...]

        def fwd(self, x: Tensor) -> Any:
            several: list[Any] = []
            for act in self.acts:
                x, record = act.fwd(x)
                several.append(record)
            filled = {"bias": ops.Bias.Saved()} if message.endswith("'bias'") else {}
            return x, {**filled, "acts": change(tuple(several))}

    model = sf.Sequential(ops.Tanh(), ops.Sigmoid(), ops.Linear(5, 5, bias=False), fusions=(Wrong,))
    with pytest.raises(sf.PluginError) as caught:
        model(tensor(7, 5))
    assert str(caught.value) == f"SF302 position 0 (Wrong): {message}"


class Sums(Doubles):
    class Saved(sf.Saved):
        parts: tuple[Tensor, ...]

    def fwd(self, x: Tensor) -> Any:
        return x * 2, self.Saved(parts=(x, x.sum(0)))


WHOLE, SUM = "float32[7, 5] on cpu", "float32[5] on cpu"
PARTS: dict[str, tuple[Change, str]] = {
    "one_missing": (lambda parts: parts[:1], f"({WHOLE}, {SUM}), not ({WHOLE})"),
    "one_too_many": (lambda parts: (*parts, parts[1]), f"({WHOLE}, {SUM}), not ({WHOLE}, {SUM}, {SUM})"),
    "one_alone": (lambda parts: parts[1], f"({WHOLE}, {SUM}), not {SUM}"),
    "a_list": (lambda parts: [*parts], f"({WHOLE}, {SUM}), not [{WHOLE}, {SUM}]"),
    "nothing": (lambda parts: None, f"({WHOLE}, {SUM}), not None"),
    "reordered": (lambda parts: parts[::-1], f"{WHOLE}, not {SUM}"),
    "a_number_in_it": (lambda parts: (parts[0], 3), f"{SUM}, not 3"),
}


@pytest.mark.parametrize(("change", "message"), PARTS.values(), ids=PARTS.keys())
def test_a_field_of_several_tensors_that_does_not_fit_is_named(change: Change, message: str) -> None:
    class Wrong(sf.ForwardFusion):
        sums: Sums
        act: ops.Tanh

        def fwd(self, x: Tensor) -> Any:
            y, sums = self.sums.fwd(x)
            y, act = self.act.fwd(y)
            return y, {"sums": Sums.Saved(parts=change(sums.parts)), "act": act}

    model = sf.Sequential(Sums(), ops.Tanh(), ops.Linear(5, 5, bias=False), fusions=(Wrong,))
    with pytest.raises(sf.PluginError) as caught:
        model(tensor(7, 5))
    assert str(caught.value) == f"SF302 position 0 (Wrong): field 'parts' of slot 'sums' should be {message}"


def test_a_module_that_gives_no_tensor_is_named_with_its_position() -> None:
    with pytest.raises(sf.InputError, match="not tuple") as caught:
        sf.Sequential(ops.Linear(5, 5), nn.LSTM(5, 5), ops.ReLU())(tensor(7, 5))
    assert (caught.value.code, caught.value.operation, caught.value.position) == ("SF105", "LSTM", 2)


@pytest.mark.parametrize("what", ["channels", "expand", "infer"])
def test_what_an_operation_says_of_itself_is_checked(what: str) -> None:
    class Wrong(ops.Fork):
        if what == "channels":
            channels = property(lambda self: {"other": "r"})
        if what == "expand":

            def expand(self) -> Any:
                return (self, 3)

        if what == "infer":

            def infer(self, shape: tuple[int, ...]) -> Any:
                return None

    with pytest.raises(sf.SeqfuseError) as caught:
        sf.Sequential(ops.Scale(3), Wrong("r"), ops.Scale(1))(tensor(7, 5))
    assert (caught.value.operation, caught.value.position) == ("Wrong", 1)


def test_the_place_of_a_module_that_runs_alone_is_told_when_it_fails() -> None:
    inner = sf.Sequential(ops.Tanh(), ops.Bias(4))
    inner.register_forward_hook(lambda *_: None)
    for alone in (inner, nn.Linear(4, 4)):
        model = sf.Sequential(ops.Tanh(), ops.Tanh(), ops.Tanh(), alone)
        with pytest.raises((sf.InputError, RuntimeError)) as caught:
            model(tensor(7, 5))
        assert any(type(alone).__name__ in note and "3" in note for note in getattr(caught.value, "__notes__", []))


def test_two_fusions_of_one_name_are_told_apart_by_their_classes() -> None:
    class Other(BiasReLU):
        def saves(self, env: sf.Env) -> Any:
            return sf.Savings(launches=5)

    Other.__name__ = "BiasReLU"
    model = sf.Sequential(ops.Bias(5), ops.ReLU(), fusions=(BiasReLU, Other))
    x = tensor(7, 5)
    assert type(model.plan(x).forward[0].operation) is Other
    with sf.fusing(only=[BiasReLU]):
        assert type(model.plan(x).forward[0].operation) is BiasReLU
    with sf.fusing(exclude=[Other]):
        assert type(model.plan(x).forward[0].operation) is BiasReLU
    with sf.fusing(exclude=["BiasReLU"]):
        assert fused_names(model.plan(x)) == ([], [])


def test_an_extra_input_of_another_dtype_is_checked_again() -> None:
    class AsOther(sf.InferenceFusion):
        scale: ops.Scale
        add: ops.Add

        def fwd(self, x: Tensor, *, add_other: Tensor) -> Tensor:
            return (2 * x + add_other).to(add_other.dtype)

    def run(other: torch.dtype) -> Tensor:
        with torch.no_grad():
            model = sf.Sequential(ops.Scale(2.0), ops.Add("residual"), fusions=(AsOther,))
            return model(torch.ones(3, 4), residual=torch.ones(3, 4, dtype=other))

    run(torch.float32)
    with pytest.raises(sf.PluginError, match=r"its output should be float32\[3, 4\] on cpu, not bfloat16"):
        run(torch.bfloat16)


def test_an_output_of_the_dtype_of_a_parameter_under_autocast_is_told_what_to_return() -> None:
    class InFloat32(sf.ForwardFusion):
        bias: ops.Bias
        act: ops.ReLU

        def fwd(self, x: Tensor, *, dtype: torch.dtype) -> tuple[Tensor, dict[str, sf.Saved]]:
            y = torch.relu(x + self.bias.bias).to(dtype if cast else torch.float32)
            return y, {"act": ops.ReLU.Saved(y=y)}

    cast = False
    model = sf.Sequential(ops.Linear(4, 4), ops.ReLU(), fusions=(InFloat32,))
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(sf.PluginError, match=r"should be bfloat16.*\nHint: under autocast .* return y.to\(dtype\)"):
            model(torch.ones(3, 4))
        cast = True
        assert model(torch.ones(3, 4)).dtype is torch.bfloat16


# Slots: inherited, annotated again, of local classes.


def test_a_fusion_that_is_still_abstract_is_the_base_of_others() -> None:
    class Base(sf.ForwardFusion):
        bias: ops.Bias
        act: sf.Pointwise

    class Derived(Base):
        fwd = stepwise

    model = randomized(sf.Sequential(ops.Bias(5), ops.Tanh(), fusions=(Derived,)))
    assert model.plan(tensor(7, 5)).count("Derived") == 1
    x = tensor(7, 5)
    torch.testing.assert_close(model(x), torch.tanh(x + model[0].bias))


def test_a_slot_that_is_annotated_again_has_another_type_at_its_place() -> None:
    (*_, BiasReLU) = of_bias(ops.ReLU, "Forward", "Backward", "BiasReLU")

    class BiasTanh(BiasReLU):
        act: ops.Tanh

    assert [(slot.name, slot.types) for slot in BiasTanh.slots] == [("bias", (ops.Bias,)), ("act", (ops.Tanh,))]
    assert BiasTanh.reach == 2
    assert [slot.types for slot in BiasReLU.slots] == [(ops.Bias,), (ops.ReLU,)]
    for act, used in ((ops.Tanh(), BiasTanh), (ops.ReLU(), BiasReLU)):
        list_ = [ops.Bias(5), act, ops.Tanh()]
        model = randomized(sf.Sequential(*list_, fusions=(BiasReLU, BiasTanh)))
        assert [type(step.operation) for step in model.plan(tensor(7, 5)).forward if step.fused] == [used]
        same = sf.Sequential(*list_, fusions=())
        torch.testing.assert_close(run(model, tensor(7, 5)), run(same, tensor(7, 5)))


def test_slots_of_several_bases_come_in_the_order_of_a_dataclass() -> None:
    class Base(sf.ForwardFusion):
        bias: ops.Bias
        act: sf.Pointwise

    class Narrow(Base):
        act: ops.Tanh

    class WithGate(Base):
        gate: ops.GLU

        def fwd(self, x: Tensor) -> Any: ...

    class Both(Narrow, WithGate):
        pass

    expected = [("bias", (ops.Bias,)), ("act", (ops.Tanh,)), ("gate", (ops.GLU,))]
    assert [(slot.name, slot.types) for slot in Both.slots] == expected


def test_what_is_defined_inside_a_function_resolves_its_types() -> None:
    class Local(sf.Pointwise):
        def reference(self, x: Tensor) -> Tensor:
            return x.sin()

    def deeper() -> type:
        class Fusion(sf.ForwardFusion):
            bias: ops.Bias
            act: Local
            fwd = stepwise

        return Fusion

    model = randomized(sf.Sequential(ops.Bias(5), Local(), fusions=(deeper(),)))
    assert model.plan(tensor(7, 5)).count("Fusion") == 1


def test_a_name_of_the_innermost_function_goes_before_one_further_out() -> None:
    def outer(kind: type) -> tuple[type, type]:
        def inner(kind: type) -> type:
            class Fusion(sf.ForwardFusion):
                act: kind

                def fwd(self, x: Tensor) -> Any: ...

            return Fusion

        return inner(ops.Tanh), kind

    made, further_out = outer(ops.ReLU)
    assert further_out is ops.ReLU
    assert [slot.types for slot in made.slots] == [(ops.Tanh,)]
