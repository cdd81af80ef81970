"""Every fusion of Triton kernels in each position that it supports, compared with its operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import fusions, ops
from seqfuse.fusions import (
    ActivationLinearJoint,
    BiasDropoutAdd,
    BiasDropoutAddBackward,
    BiasGated,
    BiasGatedBackward,
    BiasGatedScale,
    BiasQKNorm,
    BiasQKNormBackward,
    BiasQKNormRotary,
    BiasQKNormRotaryBackward,
    BlockBoundary,
    BlockBoundaryActivation,
    BlockBoundaryBackward,
    LinearBiasPointwise,
    NormActivationJoint,
    NormBackward,
    NormForward,
    PointwiseChain,
    PointwiseChainBackward,
    PointwiseChainJoint,
)
from seqfuse.testing import check_fusion, seeded_randn
from tests.fusions.triton.fourways import four_ways

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
Made = Callable[[], list[Any]]
Case = tuple[type[sf.FusedOperation], tuple[torch.dtype, ...], tuple[int, ...], Made, dict[str, Tensor]]


def half(**how: Any) -> ops.RotaryEmbedding:
    return ops.RotaryEmbedding(2, 1, **{"style": "half", **how})


DOWN, END = "downscale_in_infer", (lambda: [ops.Bias(8), ops.Dropout(0.3), ops.Add("other")])
HEADS: dict[str, Callable[[], Any]] = {
    "bias": lambda: ops.Bias(32),
    "norm": lambda: ops.QKNorm(8, 2, 1),
    "rotary": half,
}
TURNED = {"style": "interleaved", "rotary_dim": 4, "base": 100.0}
PACKINGS: tuple[Any, ...] = ("interleaved", "up_gate")


def _cases() -> Iterator[tuple[Any, Any, tuple[int, ...], Made]]:
    """Fusions, dtypes, the shape of x and the operations."""
    both = BiasDropoutAdd, BiasDropoutAddBackward
    yield both, (F32,), (5, 8), END
    yield both, (BF16,), (2, 3, 4), lambda: [ops.Dropout(0.3, DOWN)]
    yield both, (BF16,), (2, 3, 4), lambda: [ops.Dropout(0.2, DOWN), ops.Add("other")]
    both = BiasGated, BiasGatedBackward
    yield both, (F32, F16), (5, 8), lambda: [ops.Bias(8), ops.SwiGLU()]
    yield both, (BF16,), (2, 3, 6), lambda: [ops.ReGLU()]
    for packing in PACKINGS:
        yield both, (F32, BF16), (5, 10), lambda p=packing: [ops.Bias(10), ops.GEGLU(packing=p)]

        def unit(p=packing) -> Any:
            return ops.ClampedSwiGLU(0.75, 1.25, packing=p)

        def after(u=unit) -> Any:
            return [ops.Bias(12), u(), ops.Linear(6, 9, bias=False)]

        yield ActivationLinearJoint, (F32, BF16), (5, 12), after
    for other in (ops.QGEGLU, ops.SReGLU, lambda: ops.ClampedSwiGLU(0.75, 1.25, 0.5)):
        yield both, (F32, F16), (5, 10), lambda o=other: [ops.Bias(10), o()]
    for packing in ("gate_up", *PACKINGS):

        def scaled(p=packing) -> Any:
            return [ops.SwiGLU(packing=p), ops.TokenScale("by")]

        if packing != "interleaved":
            yield BiasGatedScale, (F32, BF16), (5, 10), scaled
        if packing != "up_gate":
            yield BiasGatedScale, (F32, BF16), (5, 10), lambda s=scaled: [ops.Bias(10), *s()]
    yield BiasGatedScale, (F16, F32), (5, 10), lambda: [
        ops.Bias(10), ops.ClampedSwiGLU(0.75, 1.25), ops.TokenScale("by"),
    ]  # fmt: skip
    joint = ActivationLinearJoint, (F32, BF16)
    yield *joint, (5, 6), lambda: [ops.SiLU(), ops.Linear(6, 9, bias=False)]
    yield *joint, (2, 3, 7), lambda: [ops.Bias(7), ops.GeLU("tanh"), ops.Linear(7, 5)]
    yield *joint, (5, 8), lambda: [ops.Bias(8), ops.SwiGLU(), ops.Linear(4, 9), ops.Add("other")]
    yield *joint, (2, 3, 6), lambda: [ops.GLU(), ops.Linear(3, 5, bias=False)]
    yield *joint, (5, 6), lambda: [ops.QuickGeLU(), ops.Linear(6, 9, bias=False), ops.Add("other")]
    for act in (ops.GeLU, ops.Tanh):
        yield LinearBiasPointwise, (F32, BF16), (2, 5, 6), lambda a=act: [ops.Linear(6, 9, False), ops.Bias(9), a()]

    both = BiasQKNormRotary, BiasQKNormRotaryBackward
    for names in ("bias norm rotary", "norm rotary", "rotary", "bias rotary"):
        yield both, (F32, BF16), (5, 32), lambda n=names: [HEADS[name]() for name in n.split()]
    for names in ("bias norm", "norm"):

        def one(n=names) -> Any:
            return [HEADS[name]() for name in n.split()]

        yield (BiasQKNorm, BiasQKNormBackward), (BF16,), (5, 32), one
    for affine in (True, False):
        yield both, (F16,), (2, 5, 24), lambda a=affine: [
            ops.QKNorm(6, 2, 1, elementwise_affine=a), half(**TURNED)
        ]  # fmt: skip
    yield both, (BF16,), (5, 32), lambda: [ops.QKNorm(8, 2, 1, zero_centered=True), half()]

    boundary = BlockBoundary, BlockBoundaryBackward
    yield boundary, (F32,), (5, 8), lambda: [*END(), ops.Fork("out"), ops.LayerNorm(8)]
    yield boundary, (BF16,), (5, 8), lambda: [*END()[1:], ops.Fork("out"), ops.RMSNorm(8)]
    yield BlockBoundary, (F32,), (5, 8), lambda: [ops.Bias(8), ops.Add("other"), ops.RMSNorm(8)]
    yield BlockBoundary, (F16,), (5, 8), lambda: [*END()[1:], ops.LayerNorm(8)]
    yield BlockBoundaryBackward, (F16,), (5, 8), lambda: [ops.Add("other"), ops.LayerNorm(8)]
    acted = BlockBoundaryActivation
    yield acted, (F32,), (5, 8), lambda: [*END(), ops.Fork("out"), ops.LayerNorm(8), ops.SiLU()]

    def about_one() -> Any:
        return ops.RMSNorm(8, eps=1e-5, zero_centered=True)

    yield acted, (F16,), (5, 8), lambda: [ops.Bias(8), ops.Add("other"), about_one(), ops.GeLU("tanh")]

    def plain() -> Any:
        return ops.LayerNorm(7, elementwise_affine=False)

    yield acted, (BF16,), (5, 7), lambda: [ops.Add("other"), ops.Fork("out"), plain(), ops.ReLU()]
    yield acted, (F32,), (5, 8), lambda: [*END()[1:], ops.LayerNorm(8, bias=False), ops.Sigmoid()]
    yield acted, (F32,), (5, 8), lambda: [
        ops.Bias(8), ops.Add("other"), ops.LayerNorm(8), ops.GeLU(), ops.Scale(-2.0), ops.Tanh(),
    ]  # fmt: skip

    for kind in (ops.LayerNorm, ops.RMSNorm):
        yield NormBackward, (F32, BF16), (5, 8), lambda k=kind: [k(8)]
        yield NormBackward, (F32, BF16), (5, 8), lambda k=kind: [ops.Fork("out"), k(8)]

    def no_bias() -> Any:
        return ops.LayerNorm(8, bias=False, zero_centered=True)

    def no_weight() -> Any:
        return ops.LayerNorm(8, elementwise_affine=False)

    for norm in (no_bias, no_weight, lambda: ops.RMSNorm(8, zero_centered=True)):
        yield NormBackward, (F16,), (2, 3, 8), lambda n=norm: [ops.Fork("out"), n()]
    yield NormForward, (BF16,), (5, 8), lambda: [ops.RMSNorm(8, zero_centered=True)]
    yield NormForward, (F16,), (5, 8), lambda: [ops.LayerNorm(8, zero_centered=True)]
    joint = NormActivationJoint
    yield joint, (F32,), (5, 8), lambda: [ops.LayerNorm(8), ops.GeLU()]
    yield joint, (BF16,), (5, 8), lambda: [ops.LayerNorm(8), ops.Sigmoid()]
    yield joint, (F32,), (2, 3, 8), lambda: [no_bias(), ops.SiLU()]
    yield joint, (F32,), (2, 3, 8), lambda: [no_weight(), ops.SiLU()]
    yield joint, (F16,), (2, 3, 8), lambda: [about_one(), ops.SiLU()]
    yield joint, (F32,), (5, 8), lambda: [ops.LayerNorm(8), ops.GeLU(), ops.Scale(-0.5), ops.Tanh()]

    def acts() -> Any:
        return [ops.Scale(2.0), ops.ReLU(), ops.SquaredReLU(), ops.Sigmoid()]

    yield joint, (F32,), (5, 8), lambda: [about_one(), *acts()]
    yield joint, (F32,), (5, 8), lambda: [no_bias(), ops.Scale(0.5)]
    yield joint, (BF16,), (5, 8), lambda: [ops.LayerNorm(8), ops.SiLU(), ops.Sigmoid()]

    both = PointwiseChain, PointwiseChainBackward
    yield both, (F16,), (5, 6), lambda: [ops.Bias(6), ops.GeLU("tanh")]
    yield both, (BF16,), (5, 7), lambda: [ops.Bias(7), ops.ReLU()]
    yield both, (F32,), (5, 8), lambda: [ops.Bias(8), ops.SiLU(), ops.Scale(0.5), ops.Bias(8), ops.Tanh()]
    yield both, (BF16,), (5, 8), lambda: [ops.Tanh(), ops.SiLU(), ops.ReLU(), ops.Scale(-2.0)]
    yield both, (F32,), (5, 7), lambda: [ops.Bias(7), ops.GeLU("tanh"), ops.Dropout(0.3), ops.Scale(0.5)]
    yield both, (F16,), (5, 7), lambda: [ops.Dropout(0.5), ops.SiLU(), ops.Dropout(0.2, DOWN), ops.Bias(7)]

    def still() -> Any:
        return [ops.Dropout(0.4, DOWN).eval(), ops.ReLU(), ops.Dropout().eval()]

    yield both, (BF16,), (5, 8), lambda: [ops.Tanh(), *still()]
    joint = PointwiseChainJoint
    yield joint, (F32,), (5, 8), lambda: [ops.SiLU(), ops.Scale(0.5), ops.Tanh()]

    def ends() -> Any:
        return [ops.Bias(7), ops.Sigmoid(), ops.SquaredReLU()]

    yield joint, (F32,), (5, 7), lambda: [ops.Bias(7), ops.GeLU("tanh"), ops.ReLU(), *ends()]

    def last() -> Any:
        return [ops.Dropout(0.3), ops.QuickGeLU()]

    yield joint, (BF16,), (5, 8), lambda: [ops.Scale(-0.5), ops.Tanh(), ops.SiLU(), *last()]

    def run() -> Any:
        return [ops.Bias(8), ops.Sigmoid(), ops.GeLU(), ops.Scale(3.0)]

    yield joint, (F16,), (5, 8), lambda: [ops.Dropout(0.4, DOWN), *run()]


CASES = {
    f"{fusion.__name__} {i}": (fusion, dtypes, shape, made)
    for i, (fused, dtypes, shape, made) in enumerate(_cases())
    for fusion in (fused if isinstance(fused, tuple) else (fused,))
}


@pytest.mark.parametrize("name", [*CASES])  # tests/examples/support.py reads the dtypes of each case
def test_takes_the_place_of_what_it_replaces(name: str, device: torch.device):
    fusion, dtypes, shape, made = CASES[name]
    list_ = [operation.to(device) for operation in made()]
    given = {"by": seeded_randn((*shape[:-1], 1), 1).to(device)} if fusion is BiasGatedScale else {}
    check_fusion(fusion, seeded_randn(shape, 0).to(device), *list_, dtypes=dtypes, **given)


CHAIN, GATED = (PointwiseChain, PointwiseChainBackward), (BiasGated, BiasGatedBackward)
UNITS: tuple[Callable[[], Any], ...] = (ops.SwiGLU, ops.GEGLU, ops.GLU)
ACTS: tuple[Callable[[], Any], ...] = (ops.GeLU, ops.Tanh, ops.QuickGeLU, ops.SquaredReLU)


def blocks(p: float) -> list[Any]:
    inner = ops.LayerNorm(9), ops.Linear(9, 12), ops.ReLU(), ops.Linear(12, 9), ops.Dropout(p)
    return [ops.Residual(*inner), ops.Residual(ops.LayerNorm(9), ops.Linear(9, 9), ops.Dropout(p)), ops.RMSNorm(9)]


def acting() -> ops.Residual:
    return ops.Residual(ops.LayerNorm(9), ops.GeLU(), ops.Linear(9, 9), ops.Dropout(0.25))


def feedforward(gated: bool) -> ops.Residual:
    act = ops.SwiGLU() if gated else ops.GeLU("tanh")
    return ops.Residual(ops.LayerNorm(12), ops.Linear(12, 72 if gated else 36), act, ops.Linear(36, 12))


def normed(act: type[sf.Pointwise]) -> list[Any]:
    return [ops.Linear(6, 8), ops.LayerNorm(8), act(), ops.Linear(8, 6)]


# Patterns with equal gradients: fusions, how often each must be in the plan, the shape of x, the operations.
TRAINED: dict[str, tuple[tuple[Any, ...], int, tuple[int, ...], Made]] = {
    **{
        f"residual {width}": (
            (BiasDropoutAdd, BiasDropoutAddBackward), 1, (19, width),
            lambda w=width: [ops.Residual(ops.Linear(w, w), ops.Dropout(0.4)), ops.Tanh()],
        )
        for width in (36, 13)
    },
    **{
        f"gated {i}": (GATED, 1, (19, 12), lambda u=unit: [ops.Linear(12, 72), u(), ops.Linear(36, 9)])
        for i, unit in enumerate(UNITS)
    },
    **{
        f"GEMMs {i}": (CHAIN, 1, (19, 12), lambda a=act: [ops.Linear(12, 36), a(), ops.Linear(36, 9)])
        for i, act in enumerate(ACTS)
    },
    "chain": (CHAIN, 1, (19, 13), lambda: [
        ops.Bias(13), ops.Sigmoid(), ops.SiLU(), ops.Scale(3.0), ops.Tanh(), ops.Bias(13), ops.ReLU(),
        ops.SquaredReLU(),
    ]),
    "dropouts": (CHAIN, 1, (19, 13), lambda: [
        ops.Dropout(0.2), ops.Bias(13), ops.Tanh(), ops.Dropout(0.4, DOWN), ops.SiLU(), ops.Scale(2.0),
    ]),
    "lean GeLU": ((ActivationLinearJoint,), 2, (19, 12), lambda: [feedforward(False), feedforward(False)]),
    "lean SwiGLU": ((ActivationLinearJoint,), 2, (19, 12), lambda: [feedforward(True), feedforward(True)]),
    "heads": ((BiasQKNormRotary, BiasQKNormRotaryBackward), 1, (18, 8), lambda: [
        ops.Linear(8, 32), HEADS["norm"](), half(), ops.Attention(2, 1, causal=True), ops.Linear(16, 8),
    ]),
    "norms": ((NormBackward,), 2, (18, 8), lambda: [
        ops.Residual(ops.LayerNorm(8), ops.Linear(8, 8), ops.Tanh()), ops.Residual(ops.RMSNorm(8), ops.Linear(8, 8)),
    ]),
    **{
        f"boundaries {p}": ((BlockBoundary, BlockBoundaryBackward), 2, (2, 9, 9), lambda p=p: blocks(p))
        for p in (0.0, 0.25, 1.0)
    },
    "acting": ((BlockBoundaryActivation,), 2, (2, 9, 9), lambda: [acting(), acting(), ops.RMSNorm(9), ops.Tanh()]),
    "norm, ReLU": ((NormActivationJoint,), 1, (20, 6), lambda: normed(ops.ReLU)),
    "norm, QuickGeLU": ((NormActivationJoint,), 1, (20, 6), lambda: normed(ops.QuickGeLU)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", TRAINED)
def test_trains_to_the_same_gradients(name: str, dtype: torch.dtype, device: torch.device):
    fused, at_least, shape, made = TRAINED[name]
    lean = name.startswith("lean")
    rules = (*fused, *fusions.triton) if lean else fused
    model = sf.Sequential(*made(), fusions=rules, memory="lean" if lean else "fast").to(device, dtype)
    four_ways(model, seeded_randn(shape, 0, dtype=dtype).to(device), *fused, at_least=at_least)


def test_rows_that_several_tiles_sum(device: torch.device):
    x, factors = seeded_randn((9, 2600), 0).to(device), seeded_randn((9,), 1).to(device)
    listed = ops.Bias(2600), ops.SwiGLU(), ops.TokenScale("by")
    four_ways(sf.Sequential(*listed, fusions=(BiasGatedScale,)).to(device), x, BiasGatedScale, by=factors)


class Cube(sf.Pointwise):
    def reference(self, x: Tensor) -> Tensor:
        return x**3


class Sloped(sf.Pointwise):
    """Its device function ignores the slope."""

    value, derivative = ops.SiLU().value, ops.SiLU().derivative

    def __init__(self) -> None:
        super().__init__()
        self.slope = torch.nn.Parameter(torch.ones(()))

    def reference(self, x: Tensor) -> Tensor:
        return self.slope * x

    def bwd(self, dy: Tensor, saved: Any) -> Any:
        raise NotImplementedError


ONE_DIMENSION = "its kernel normalizes over one dimension"
SCALED = "its kernel scales what dropout keeps: mode must be upscale_in_train"
OTHER_HEADS = "the norm and the rotation must be of the same heads"
ALONE = "only a Dropout that drops nothing here is with it"
# By reason, or part of it, the fusions that do not apply to operations in a dtype.
REFUSED: list[tuple[str, tuple[Any, ...], list[Any], torch.dtype]] = [
    (SCALED, (BlockBoundaryActivation,), [ops.Dropout(0.5, DOWN), ops.Add("o"), ops.LayerNorm(8), ops.ReLU()], BF16),
    (ONE_DIMENSION, (BlockBoundaryActivation,), [ops.Add("o"), ops.LayerNorm((2, 4)), ops.ReLU()], BF16),
    ("one dimension", (NormActivationJoint,), [ops.LayerNorm((2, 4)), ops.ReLU()], F32),
    (
        "float32, float16 and bfloat16", (NormActivationJoint,),
        [ops.LayerNorm(8), ops.ReLU()], torch.float64,
    ),
    (
        "columns, not 70,000", (NormActivationJoint,),
        [ops.RMSNorm(70000, elementwise_affine=False), ops.ReLU()], F32,
    ),
    ("Cube has no device functions", (NormActivationJoint,), [ops.LayerNorm(8), Cube()], F32),
    (
        "Sloped has parameters, which device functions do not see", (NormActivationJoint,),
        [ops.LayerNorm(8), Sloped()], F32,
    ),
    ("no two activations are adjacent", (PointwiseChainJoint,), [ops.SiLU(), ops.Dropout(0.5), ops.Tanh()], F32),
    (ALONE, (PointwiseChain,), [ops.SiLU(), ops.Dropout(0.0)], F32),
    (ALONE, (PointwiseChain,), [ops.SiLU(), ops.Dropout(0.5).eval()], F32),
    *(
        ("its kernel makes an RMSNorm of each head", (BiasQKNormRotary, BiasQKNorm),
         [ops.QKNorm(8, 2, 1, **how), half()], BF16)
        for how in ({"kind": "layer"}, {"full_width": True})
    ),
    *(
        (OTHER_HEADS, (BiasQKNormRotary,), [ops.QKNorm(8, 2, norm), ops.RotaryEmbedding(*heads, style="half")], BF16)
        for norm, heads in ((1, (1, 1)), (2, (2, 1)), (2, (4, 1)))
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "fusion", "list_", "dtype"),
    [(reason, fusion, list_, dtype) for reason, fused, list_, dtype in REFUSED for fusion in fused],
)
def test_says_why_not(reason: str, fusion: type[sf.FusedOperation], list_: list[Any], dtype: torch.dtype):
    plan = sf.Sequential(*list_, fusions=fusion).plan(env=sf.Env.of("cuda:sm_90", dtype=dtype, rows=64))
    assert any(reason in refusal.reason for refusal in plan.refused)


def test_a_norm_and_a_rotation_of_the_same_heads_are_one():
    list_ = ops.QKNorm(8, 2, 2), ops.RotaryEmbedding(2, 2, style="half")
    plan = sf.Sequential(*list_, fusions=BiasQKNormRotary).plan(env=sf.Env.of("cuda:sm_90", rows=4096))
    assert OTHER_HEADS not in [refusal.reason for refusal in plan.refused]
