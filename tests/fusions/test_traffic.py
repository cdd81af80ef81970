"""Estimated gains follow from the traffic that operations declare: counted here by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import fusions, ops
from seqfuse.hardware import STEP
from seqfuse.traffic import entering

TRAIN = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=4096)
EVAL = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=4096, grad=False)
H, F = 64, 256


def made(kind: str) -> Any:
    makers: dict[str, Any] = {
        "bias": lambda: ops.Bias(F), "up": lambda: ops.Linear(H, F, bias=False), "dropout": lambda: ops.Dropout(0.1),
        "down": lambda: ops.Linear(F, H, bias=False), "same": lambda: ops.Linear(F, F, bias=False),
        "norm": lambda: ops.LayerNorm(F), "add": ops.Add,
        "fork": ops.Fork, "gelu": ops.GeLU, "relu": ops.ReLU, "swiglu": ops.SwiGLU, "scale": lambda: ops.Scale(2.0),
        "gated_up": lambda: ops.Linear(H, 2 * F, bias=False), "gated_bias": lambda: ops.Bias(2 * F),
        "plus_one": lambda: ops.LayerNorm(F, zero_centered=True),
        "no_gain": lambda: ops.LayerNorm(F, elementwise_affine=False),
    }  # fmt: skip
    with torch.device("meta"):
        return makers[kind]().bfloat16()


def bound(fusion: type[sf.FusedOperation], **slots: Any) -> sf.FusedOperation:
    """A fusion of operations by name; a tuple fills a variadic slot."""
    empty = {slot.name: () if slot.variadic else None for slot in fusion.slots}
    given = {n: tuple(map(made, k)) if isinstance(k, tuple) else made(k) for n, k in slots.items()}
    return fusion(**{**empty, **given})


class Epilogue(sf.ForwardFusion):
    """A GEMM epilogue, as an author's kernel may have it."""

    linear: ops.Linear
    bias: ops.Bias | None
    act: sf.Pointwise | sf.Gated
    dropout: ops.Dropout | None

    def fwd(self, x: Tensor, *, dropout_seed: Tensor | None = None, needs: frozenset[str]) -> Any: ...


class EpilogueAdd(sf.ForwardFusion):
    linear: ops.Linear
    bias: ops.Bias | None
    dropout: ops.Dropout | None
    add: ops.Add

    def fwd(self, x: Tensor, *, add_other: Tensor, dropout_seed: Tensor | None = None) -> Any: ...


class BeforeGemm(sf.BackwardFusion):
    """The gradient of the operation before a GEMM, in the GEMM that computes dx."""

    bias: ops.Bias | None
    act: sf.Pointwise | sf.Gated
    linear: ops.Linear

    def bwd(self, dy: Tensor, *, act: Any, linear: Any) -> Any: ...


class BlockEnd(sf.BackwardFusion):
    act: sf.Pointwise | sf.Gated
    linear: ops.Linear
    out_bias: ops.Bias
    add: ops.Add

    def bwd(self, dy: Tensor, *, act: Any, linear: Any) -> Any: ...


class WeightAndBias(sf.BackwardFusion):
    linear: ops.Linear
    bias: ops.Bias

    def bwd(self, dy: Tensor, *, linear: Any) -> Any: ...


END = {"bias": "bias", "dropout": "dropout", "add": "add", "fork": "fork", "norm": "norm"}
OUT = {"out_bias": "bias", "add": "add"}
ACTS = {"add": "add", "fork": "fork", "norm": "norm", "acts": ("gelu", "scale")}

# Kernels saved, and reads and writes of a tensor of F features.
CASES: list[tuple[Any, dict[str, Any], sf.Env, int, float]] = [
    # The GEMM writes z, the activation reads it and writes y: one write is left, and a second where z is saved.
    (Epilogue, {"linear": "up", "act": "gelu"}, TRAIN, 1, 1),
    (Epilogue, {"linear": "up", "act": "relu"}, TRAIN, 1, 2),
    (Epilogue, {"linear": "up", "act": "relu", "dropout": "dropout"}, TRAIN, 2, 3),
    (Epilogue, {"linear": "up", "bias": "bias", "act": "gelu", "dropout": "dropout"}, TRAIN, 3, 5),
    (Epilogue, {"linear": "up", "bias": "bias", "act": "gelu"}, EVAL, 2, 4),
    # act(gate) is another tensor; [gate; up] has 2 F features. In 16 bits they are cast to float32 and back.
    (Epilogue, {"linear": "gated_up", "act": "swiglu"}, TRAIN, 4, 18),
    (Epilogue, {"linear": "gated_up", "bias": "gated_bias", "act": "swiglu"}, TRAIN, 5, 22),
    (BeforeGemm, {"act": "gelu", "linear": "down"}, TRAIN, 1, 2),
    (BeforeGemm, {"bias": "bias", "act": "gelu", "linear": "down"}, TRAIN, 2, 3),
    (BeforeGemm, {"act": "swiglu", "linear": "down"}, TRAIN, 7, 37),
    (BlockEnd, {"act": "gelu", "linear": "same", "out_bias": "bias", "add": "add"}, TRAIN, 2, 3),
    (fusions.BiasGated, {"bias": "gated_bias", "gated": "swiglu"}, TRAIN, 4, 18),
    (fusions.BiasGatedBackward, {"bias": "gated_bias", "gated": "swiglu"}, TRAIN, 7, 37),
    (fusions.BiasDropoutAdd, {"bias": "bias", "dropout": "dropout", "add": "add"}, TRAIN, 2, 4),
    (fusions.BiasDropoutAddBackward, {"bias": "bias", "dropout": "dropout", "add": "add"}, TRAIN, 1, 1),
    # In the backward pass h is written again.
    (fusions.ActivationLinearJoint, {"act": "gelu", "linear": "down"}, TRAIN, 0, -1),
    (fusions.ActivationLinearJoint, {"act": "swiglu", "linear": "down"}, TRAIN, 9, 50),
    (fusions.ActivationLinearJoint, {"bias": "bias", "act": "gelu", "linear": "same", **OUT}, TRAIN, 3, 5),
    (fusions.LinearBiasAct, {"linear": "up", "act": "relu"}, TRAIN, 0, 0),
    (fusions.LinearBias, {"linear": "up", "bias": "bias"}, TRAIN, 1, 2),
    (fusions.LinearBiasAdd, {"linear": "up", "bias": "bias", "add": "add"}, TRAIN, 1, 3),
    (EpilogueAdd, {"linear": "up", "bias": "bias", "dropout": "dropout", "add": "add"}, TRAIN, 3, 6),
    (WeightAndBias, {"linear": "up", "bias": "bias"}, TRAIN, 1, 1),
    (fusions.ForwardLinearScaleAdd, {"linear": "up", "scale": "scale", "add": "add"}, TRAIN, 1, 2),
    # The norm reads the sum from registers; ATen reads dy and x again for the sums over tokens.
    (fusions.BlockBoundary, END, TRAIN, 3, 5),
    (fusions.BlockBoundary, {"add": "add", "norm": "norm"}, TRAIN, 1, 1),
    (fusions.BlockBoundaryBackward, END, TRAIN, 3, 6),
    (fusions.BlockBoundaryActivation, ACTS, TRAIN, 6, 14),
    (fusions.NormBackward, {"norm": "norm"}, TRAIN, 0, 2),
    (fusions.NormBackward, {"fork": "fork", "norm": "no_gain"}, TRAIN, 1, 2),
    # Copies of dy, x and dx in float32 as well.
    (fusions.NormBackward, {"norm": "plus_one"}, TRAIN, 0, 16),
    # Casts of x and y to float32 and back, and a fraction of a read of x, by which our kernel is faster.
    (fusions.NormForward, {"norm": "plus_one"}, TRAIN, 2, 8.2),
    (fusions.NormActivationJoint, {"norm": "norm", "acts": ("gelu", "scale")}, TRAIN, 4, 11),
    (fusions.PointwiseChain, {"first": "bias", "rest": ("gelu", "dropout", "relu")}, TRAIN, 3, 5),
    (fusions.PointwiseChain, {"first": "bias", "rest": ("gelu", "dropout", "relu")}, EVAL, 3, 6),
    (fusions.PointwiseChainBackward, {"first": "bias", "rest": ("gelu", "dropout", "relu")}, TRAIN, 3, 5),
    (fusions.PointwiseChainJoint, {"first": "bias", "rest": ("gelu", "scale", "relu")}, TRAIN, 6, 11),
    # The output of ReLU is also written.
    (fusions.PointwiseChainJoint, {"first": "gelu", "rest": ("scale", "dropout", "relu", "bias")}, TRAIN, 8, 14),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fusion", "slots", "env", "kernels", "passes"), CASES, ids=[f"{c[0].__name__}-{i}" for i, c in enumerate(CASES)]
)
def test_the_gain_is_what_is_counted_by_hand(
    fusion: Any, slots: dict[str, Any], env: sf.Env, kernels: int, passes: float
):
    one = bound(fusion, **slots)
    found, steps = one.saves(env), len(one.operations()) - 1
    steps *= 2 if fusion.has_record else 1
    steps -= 2 * (fusion is fusions.ActivationLinearJoint)  # it counts as two steps in each pass
    assert (found.launches, found.bytes / (4096 * F * 2)) == ((1 - STEP) * kernels + STEP * steps, passes)
    assert found.flops == 0


def test_where_no_operation_says_how_many_features_there_are_launches_alone_count():
    found = bound(fusions.PointwiseChain, first="gelu", rest=("relu",)).saves(TRAIN)
    assert (found.launches, found.bytes) == (1, 0)


@pytest.mark.parametrize("first", [True, False], ids=["stated before", "stated behind"])
def test_operations_around_a_fusion_say_how_many_features_there_are(first: bool):
    list_ = [ops.Linear(H, 2 * F, bias=False)] * first + [ops.SwiGLU(), ops.Linear(F, H, bias=False)]
    plan = sf.Sequential(*list_, fusions=fusions.BiasGated).to("meta", torch.bfloat16).plan(env=TRAIN)
    assert [step.name for step in plan.forward if step.fused] == ["BiasGated"]
    alone = bound(fusions.BiasGated, gated="swiglu").saves(dataclasses.replace(TRAIN, width=2 * F))
    assert alone.bytes == 16 * 4096 * F * 2
    assert plan.cost == -math.floor(1000 * TRAIN.microseconds(alone))


def test_what_is_known_of_features_ends_where_an_operation_asks_more_of_a_shape():
    operations = [ops.GeLU(), ops.Linear(H, 2 * F), ops.SwiGLU(), ops.DropPath(0.1), ops.Reshape(4, -1), ops.GeLU()]
    assert entering(operations) == [H, H, 2 * F, F, F, F // 4]
    assert entering([ops.Linear(H, F), ops.Attention(5), ops.GeLU(), ops.Dropout(0.1)]) == [H, F, 0, 0]


def test_what_stands_before_a_gemm_is_a_kernel_of_its_own():
    class Two(sf.ForwardFusion):
        act: ops.GeLU
        linear: ops.Linear

        def fwd(self, x: Tensor) -> Any: ...

    assert bound(Two, act="gelu", linear="down").saves(TRAIN) == sf.Savings(STEP)


def test_a_factor_behind_a_bias_spares_a_call_more_on_a_cpu_alone():
    operations = {"first": made("up"), "bias": made("bias"), "second": made("scale")}
    fusion = fusions.BackwardLinearScale(**operations)
    assert [fusion.saves(env).launches for env in (TRAIN, sf.Env(rows=4096))] == [1, 2]


def test_a_gemm_that_is_made_again_starts_from_its_bias():
    heads = {"norm": ops.RMSNorm(H), "linear": made("up"), "attention": ops.Attention(2, 1)}
    plain, biased = (
        fusions.RecomputeHeads(bias=bias, qk_norm=None, rotary=None, fork=None, **heads)
        for bias in (None, made("bias"))
    )
    assert biased.saves(TRAIN) - plain.saves(TRAIN) == sf.Savings(launches=1, bytes=2.0 * 4096 * F * 2)


def test_a_dropout_that_drops_nothing_is_a_step_less_and_no_kernel():
    fusion = bound(Epilogue, linear="up", act="gelu", dropout="dropout")
    for operation in fusion.operations():
        operation.eval()
    assert fusion.saves(TRAIN) == sf.Savings(1 + STEP, 4096.0 * F * 2)


def test_what_an_operation_of_a_user_declares_counts():
    class Costly(sf.UnfusedOperation):
        autocast = "same"

        class Saved(sf.Saved):
            x: Tensor

        @property
        def features(self) -> tuple[int, int]:
            return 8, 8

        def traffic(self, env: sf.Env, backward: bool) -> sf.Traffic:
            return sf.Traffic(launches=5, x=3, y=3)

        def reference(self, x: Tensor) -> Tensor:
            return x

        def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
            return x, self.Saved(x=x)

        def bwd(self, dy: Tensor, saved: Saved) -> tuple[Tensor, sf.Grads]:
            return dy, {}

    class Two(sf.ForwardFusion):
        a: Costly
        b: Costly

        def fwd(self, x: Tensor) -> Any: ...

    class TwoInference(sf.InferenceFusion):
        a: Costly
        b: Costly

        def fwd(self, x: Tensor) -> Any: ...

    # Ten kernels become one, two steps become one; x is read, y is written, and so is b's saved tensor between them.
    assert Two(a=Costly(), b=Costly()).saves(TRAIN) == sf.Savings(9 * (1 - STEP) + STEP, 9 * 4096 * 8 * 2.0)
    # Without gradients it writes the same; a fusion for inference saves nothing.
    assert Two(a=Costly(), b=Costly()).saves(EVAL) == sf.Savings(9 * (1 - STEP) + STEP, 9 * 4096 * 8 * 2.0)
    assert TwoInference(a=Costly(), b=Costly()).saves(EVAL) == sf.Savings(9 * (1 - STEP) + STEP, 10 * 4096 * 8 * 2.0)
