"""Fusions with C kernels, around norms and of point-wise chains, compared with their operations."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

import seqfuse as sf
from seqfuse import compiler, fusions, ops
from seqfuse.fusions import NormForward, chain, feedforward
from seqfuse.hardware import C_NORM_WORTHWHILE
from seqfuse.testing import assert_bitwise_equal, assert_fused_close, check_fusion, seeded_randn

pytestmark = pytest.mark.skipif(compiler.compiler() is None, reason="no C compiler")

BIAS, DROPOUT, ADD = (lambda: ops.Bias(8), lambda: ops.Dropout(0.3), lambda: ops.Add("other"))
END = (BIAS, DROPOUT, ADD, lambda: ops.Fork("out"))
LINEAR = functools.partial(ops.Linear, 8, 8, bias=False)
CASES: dict[str, tuple[Any, torch.dtype, tuple[Any, ...]]] = {
    "RMSNorm": (fusions.NormForward, torch.float32, (lambda: ops.RMSNorm(8),)),
    "RMSNorm without a weight": (
        fusions.NormForward, torch.bfloat16, (lambda: ops.RMSNorm(8, elementwise_affine=False),)
    ),
    "LayerNorm around one": (fusions.NormForward, torch.float16, (lambda: ops.LayerNorm(8, zero_centered=True),)),
    "backward of LayerNorm": (fusions.NormBackward, torch.float32, (END[3], lambda: ops.LayerNorm(8))),
    "backward of RMSNorm": (fusions.NormBackward, torch.bfloat16, (lambda: ops.RMSNorm(8, zero_centered=True),)),
    "activation": (fusions.NormActivationJoint, torch.float32, (lambda: ops.RMSNorm(8), ops.ReLU)),
    "activations": (
        fusions.NormActivationJoint, torch.float32,
        (lambda: ops.LayerNorm(8), ops.GeLU, lambda: ops.Scale(0.5), ops.Tanh),
    ),
    "boundary": (fusions.BlockBoundary, torch.bfloat16, (*END, lambda: ops.LayerNorm(8))),
    "boundary of RMSNorm": (fusions.BlockBoundary, torch.float32, (*END, lambda: ops.RMSNorm(8))),
    "backward of a boundary": (fusions.BlockBoundaryBackward, torch.float32, (*END, lambda: ops.LayerNorm(8))),
    "backward of an end": (fusions.BlockBoundaryBackward, torch.float16, (*END[1:3], lambda: ops.RMSNorm(8))),
    "boundary and activations": (
        fusions.BlockBoundaryActivation, torch.float32, (*END, lambda: ops.LayerNorm(8), ops.SiLU, ops.SquaredReLU)
    ),
    "GEMM, bias and activation": (fusions.LinearBiasPointwise, torch.float32, (LINEAR, BIAS, ops.GeLU)),
    "GEMM and activation in 16 bits": (fusions.LinearBiasPointwise, torch.bfloat16, (LINEAR, BIAS, ops.SiLU)),
    "gated unit": (fusions.BiasGated, torch.float32, (BIAS, ops.GEGLU)),
    "gated unit, backward": (fusions.BiasGatedBackward, torch.bfloat16, (BIAS, ops.SwiGLU)),
    "gated unit in float32, backward": (fusions.BiasGatedBackward, torch.float32, (BIAS, ops.GEGLU)),
    "residual": (fusions.BiasDropoutAdd, torch.float16, (BIAS, DROPOUT, ADD)),
    "residual in float32": (fusions.BiasDropoutAdd, torch.float32, (DROPOUT, ADD)),
    "residual, backward": (fusions.BiasDropoutAddBackward, torch.float32, (BIAS, DROPOUT, ADD)),
    "chain": (fusions.PointwiseChain, torch.float32, (BIAS, ops.SiLU, lambda: ops.Scale(0.5), DROPOUT)),
    "chain with a dropout that scales": (
        fusions.PointwiseChain, torch.float32, (BIAS, ops.SiLU, lambda: ops.Dropout(0.3, "downscale_in_infer").eval())
    ),
    "chain, backward": (fusions.PointwiseChainBackward, torch.float32, (BIAS, ops.GeLU, DROPOUT)),
    "chain, both passes": (fusions.PointwiseChainJoint, torch.bfloat16, (ops.ReLU, ops.Tanh)),
    "chain in float32, both passes": (fusions.PointwiseChainJoint, torch.float32, (ops.SquaredReLU, ops.Sigmoid)),
    "chain of bias and output": (fusions.PointwiseChain, torch.float32, (BIAS, ops.Tanh)),
    "chain with a factor": (fusions.PointwiseChain, torch.float16, (BIAS, ops.QuickGeLU, lambda: ops.Scale(2.0))),
    "activation recomputed": (fusions.ActivationLinearJoint, torch.float32, (BIAS, ops.GeLU, LINEAR)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_takes_the_place_of_what_it_replaces(name: str):
    fusion, dtype, makers = CASES[name]
    other = {"other": seeded_randn((5, 8), 1)} if ADD in makers else {}
    found = check_fusion(fusion, seeded_randn((5, 8), 0), *(make() for make in makers), dtypes=[dtype], **other)
    assert found.cases > 8
    joint = fusion in (fusions.PointwiseChainJoint, fusions.ActivationLinearJoint)
    assert all(joint and "no gradient: it is not used" in case for case in found.skipped)


@pytest.mark.parametrize(
    ("norm", "dtype", "rows", "applies"),
    [
        (ops.RMSNorm, torch.float32, 16, True),
        (ops.RMSNorm, torch.bfloat16, 16, True),
        (ops.LayerNorm, torch.bfloat16, 16, True),
        (ops.LayerNorm, torch.float32, C_NORM_WORTHWHILE // 128, True),
        (ops.LayerNorm, torch.float32, C_NORM_WORTHWHILE // 256, False),
    ],
)
def test_the_forward_is_used_where_it_is_faster_than_atens(norm: Any, dtype: torch.dtype, rows: int, applies: bool):
    model = sf.Sequential(norm(128, dtype=dtype), fusions=(NormForward,))
    x = seeded_randn((rows, 128), 0, dtype=dtype)
    with sf.fusing(on_error="raise", unmeasured=True):
        plan, y = model.plan(x), model(x).detach()
    assert plan.count("NormForward") == applies
    assert applies or [r.reason for r in plan.refused] == ["ATen also runs this norm in one pass"]
    with sf.fusing(False):
        assert_fused_close(y, model(x).detach(), model.double()(x.double()).detach())


def test_a_bias_has_its_gradient_where_weight_and_input_need_none(monkeypatch: pytest.MonkeyPatch):
    ran, bwd = list[frozenset[str]](), fusions.NormBackward.bwd

    def counted(self: Any, dy: torch.Tensor, *, needs: frozenset[str], **given: Any) -> Any:
        ran.append(needs)
        return bwd(self, dy, needs=needs, **given)

    monkeypatch.setattr(fusions.NormBackward, "bwd", counted)
    model, dy = sf.Sequential(ops.LayerNorm(64), fusions=(fusions.NormBackward,)), seeded_randn((128, 64), 1)
    model[0].weight.requires_grad_(False)
    model(seeded_randn((128, 64), 0)).backward(dy)
    assert set(ran) == {frozenset({"norm.bias"})}
    torch.testing.assert_close(model[0].bias.grad, dy.sum(0))


def test_chains_of_factors_that_change_are_not_all_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chain, "_MOST", 4)
    monkeypatch.setattr(chain, "_chains", {})
    model, x = sf.Sequential(ops.GeLU(), ops.Scale(1.0), ops.Tanh()), seeded_randn((5, 8), 0).requires_grad_()
    for factor in range(1, 7):
        model[1].factor = factor / 2
        with sf.fusing(only=["PointwiseChainJoint"], unmeasured=True):
            y = model(x)
            (dx,) = torch.autograd.grad(y.sum(), x)
        expected = (torch.nn.functional.gelu(x) * (factor / 2)).tanh()
        torch.testing.assert_close((y, dx), (expected, *torch.autograd.grad(expected.sum(), x)))
    assert 0 < len(chain._chains) <= 4


def test_a_factor_of_zero_has_its_own_sign():
    x = seeded_randn((64, 64), 0).clamp(-2, 2)  # beyond, torch's GeLU is 0 on some processors
    for factor in (0.0, -0.0):
        model = sf.Sequential(ops.GeLU(), ops.Scale(factor))
        with sf.fusing(only=["PointwiseChain"], unmeasured=True), torch.no_grad():
            assert model.plan(x).fused == (1, 0)
            assert torch.equal(model(x).signbit(), (torch.nn.functional.gelu(x) * factor).signbit())


def test_parameters_that_no_kernel_reads_are_refused():
    x, other = seeded_randn((64, 128), 0), seeded_randn((64, 128), 1)
    norm = sf.Sequential(ops.RMSNorm(128, dtype=torch.float64), fusions=(NormForward,))
    assert [r.reason for r in norm.plan(x).refused] == ["C kernels read no weight in float64"]
    boundary = sf.Sequential(
        ops.Bias(128, dtype=torch.float64), ops.Add("other"), ops.LayerNorm(128), fusions=(fusions.BlockBoundary,)
    )
    assert "C kernels read no bias in float64" in [r.reason for r in boundary.plan(x, other=other).refused]
    assert boundary(x, other=other).dtype is torch.float64


def test_a_boundary_decides_anew_for_other_dtypes_seeds_and_parameters():
    bias, dropout, norm = ops.Bias(8), ops.Dropout(0.3), ops.LayerNorm(8)
    for p in (bias.bias, norm.weight, norm.bias):
        torch.nn.init.normal_(p)
    slots: dict[str, Any] = {"bias": bias, "dropout": dropout, "add": ops.Add("other"), "fork": None, "norm": norm}
    kept, back = fusions.BlockBoundary(**slots), fusions.BlockBoundaryBackward(**slots)
    narrow = seeded_randn((5, 8), 1).bfloat16()
    every = frozenset({"x", "bias.bias", "add.other", "norm.weight", "norm.bias"})
    wanted = every, every - {"x"}, every - {"norm.weight"}, frozenset({"norm.bias"})
    cases = itertools.product((True, False, True), (narrow, narrow.float()), (None, torch.bfloat16))
    for i, (training, other, dtype) in enumerate(cases):
        dropout.train(training)
        seed, found = torch.tensor(7) if training else None, []
        needs = wanted[(i + i // 4) % 4]  # others for the same dtypes in the next training step
        with torch.no_grad():
            for one, other_way in ((kept, back), (type(kept)(**slots), type(back)(**slots))):
                y, _, saved = one.fwd(narrow, add_other=other, dropout_seed=seed, dtype=dtype)
                record = {"dropout": ops.Dropout.Saved(seed=seed, p=0.3 if training else 0.0)}
                given = {"norm": saved["norm"], "d_fork_out": None, "needs": needs, "dtype": torch.bfloat16}
                dx, grads = other_way.bwd(y, **record, **given)
                found.append([y, dx, *grads.values()])
        for a, b in zip(*found, strict=True):
            assert a is b is None or (a.dtype is b.dtype and torch.equal(a, b))


def test_a_boundary_reads_strided_parameters():
    bias, norm = ops.Bias(8), ops.LayerNorm(8)
    for p in (bias.bias, norm.weight, norm.bias):
        torch.nn.init.normal_(p)
    slots: dict[str, Any] = {"bias": bias, "dropout": None, "add": ops.Add("other"), "fork": None, "norm": norm}
    x, other, needs = seeded_randn((5, 8), 0), seeded_randn((5, 8), 1), frozenset({"x", "norm.weight"})
    found = []
    for strided in (False, True):
        if strided:
            for p in (bias.bias, norm.weight, norm.bias):
                p.data = torch.stack([p.data, p.data], 1)[:, 0]
        with torch.no_grad():
            y, _, saved = fusions.BlockBoundary(**slots).fwd(x, add_other=other, dtype=None)
            dx, grads = fusions.BlockBoundaryBackward(**slots).bwd(y, norm=saved["norm"], needs=needs)
        found.append([y, dx, grads["norm.weight"]])
    assert all(map(torch.equal, *found))


def test_a_boundary_decides_anew_for_another_dtype_of_its_bias() -> None:
    norm, bias, low = ops.LayerNorm(8), ops.Bias(8), torch.bfloat16
    given: dict[str, Any] = {"bias": bias, "dropout": None, "add": ops.Add("r"), "fork": ops.Fork("s"), "norm": norm}
    x, other = seeded_randn((3, 8), 0, dtype=low), seeded_randn((3, 8), 1, dtype=low)
    one, streams = fusions.BlockBoundary(**given), list[torch.dtype]()
    with torch.no_grad():
        # Under autocast a bias is cast to the dtype of x.
        for of_bias, cast in ((low, False), (torch.float32, False), (torch.float32, True)):
            bias.bias.data = bias.bias.data.to(of_bias)
            with torch.autocast("cpu", low, enabled=cast):
                mine, fresh = (f.fwd(x, add_other=other, dtype=None) for f in (one, fusions.BlockBoundary(**given)))
            assert_bitwise_equal({"y": mine[0], **mine[1]}, {"y": fresh[0], **fresh[1]})
            streams.append(mine[1]["fork_out"].dtype)
    assert streams == [low, torch.float32, low]


@pytest.mark.parametrize("act", [ops.GeLU, ops.SwiGLU])
def test_many_rows_run_part_by_part(act: Any, monkeypatch: pytest.MonkeyPatch):
    """Each gradient is that of all rows, the last part being shorter; with a main_grad they run at once."""
    sizes, whole = list[int](), feedforward._in_parts
    monkeypatch.setattr(feedforward, "PART", 2)
    monkeypatch.setattr(feedforward, "_in_parts", lambda *given: (sizes.append(len(given[1])), whole(*given))[1])
    width = 16 if act is ops.SwiGLU else 8
    list_ = ops.Bias(width), act(), ops.Linear(8, 8), ops.Add("other")
    given = {"other": seeded_randn((7, 8), 1)}
    check_fusion(fusions.ActivationLinearJoint, seeded_randn((7, width), 0), *list_, dtypes=[torch.float32], **given)
    assert 7 in sizes


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_a_sum_has_the_promoted_dtype_and_takes_one_shape(dtypes: tuple[torch.dtype, torch.dtype]):
    fusion: Any = fusions.BiasDropoutAdd(bias=None, dropout=ops.Dropout(0.3), add=ops.Add("other"))
    x, other = (seeded_randn((5, 8), i).to(dtype) for i, dtype in enumerate(dtypes))
    assert fusion.fwd(x, add_other=other, dropout_seed=torch.tensor(3))[0].dtype is torch.float32
    with pytest.raises(sf.InputError, match="adds tensors of one shape"):
        fusion.fwd(x, add_other=other[0, 0], dropout_seed=torch.tensor(3))
