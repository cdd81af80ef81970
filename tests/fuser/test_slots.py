"""Slots of fusions: inherited, annotated again, of local classes; absent ones are None."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import ops
from tests.fuser.fusions import (
    of_bias,
    randomized,
    run,
    stepwise,
    tensor,
)


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
