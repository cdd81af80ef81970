"""Bias, norm of heads and rotation, between the product that makes [q; k; v] and attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import seqfuse as sf
from seqfuse import ops
from seqfuse.fusions import heads as module
from seqfuse.testing import check_fusion, seeded_randn

from .fourways import four_ways


def operations(*names: str, heads: int = 2, kv_heads: int = 1, size: int = 8, **rotary: Any) -> list[Any]:
    width = (heads + 2 * kv_heads) * size
    made = {
        "bias": lambda: ops.Bias(width),
        "norm": lambda: ops.QKNorm(size, heads, kv_heads),
        "rotary": lambda: ops.RotaryEmbedding(heads, kv_heads, **{"style": "half", **rotary}),
    }
    return [made[name]() for name in names]


WITH_ROTARY = [("bias", "norm", "rotary"), ("norm", "rotary"), ("bias", "rotary"), ("rotary",)]
WITHOUT = [("bias", "norm"), ("norm",)]


@pytest.mark.parametrize("kind", ["BiasQKNormRotary", "BiasQKNormRotaryBackward"])
@pytest.mark.parametrize("names", WITH_ROTARY, ids="-".join)
def test_takes_the_place_of_what_it_replaces(kind: str, names: tuple[str, ...], device: torch.device):
    made = [op.to(device) for op in operations(*names)]
    check_fusion(getattr(module, kind), seeded_randn((5, 32), 0).to(device), *made)


@pytest.mark.parametrize("kind", ["BiasQKNorm", "BiasQKNormBackward"])
@pytest.mark.parametrize("names", WITHOUT, ids="-".join)
def test_does_without_a_rotation(kind: str, names: tuple[str, ...], device: torch.device):
    made = [op.to(device) for op in operations(*names)]
    check_fusion(getattr(module, kind), seeded_randn((5, 32), 0).to(device), *made, dtypes=[torch.bfloat16])


@pytest.mark.parametrize("kind", ["BiasQKNormRotary", "BiasQKNormRotaryBackward"])
def test_takes_every_form_of_rotation(kind: str, device: torch.device):
    made = operations("norm", "rotary", size=6, style="interleaved", rotary_dim=4, base=100.0)
    plain = [ops.QKNorm(6, 2, 1, elementwise_affine=False), made[1]]
    for of in (made, plain):
        x = seeded_randn((2, 5, 24), 0).to(device)
        check_fusion(getattr(module, kind), x, *[op.to(device) for op in of], dtypes=[torch.float16])


@pytest.mark.parametrize("ids", [[4, 9, 0, 100_000, 3], [[0, 1, 2, 3, 4], [7, 7, 8, 9, 1]]], ids=["shared", "each"])
def test_positions_may_be_given(ids: list[Any], device: torch.device):
    bias, norm, rotary = operations("bias", "norm", "rotary", positions="ids")
    positions, fusions = torch.tensor(ids, device=device), (module.BiasQKNormRotary, module.BiasQKNormRotaryBackward)
    model = sf.Sequential(bias, norm, rotary, fusions=fusions).to(device)
    x = seeded_randn((2, 5, 32), 0).to(device)
    with sf.fusing(on_error="raise"):
        assert model.plan(x, ids=positions).count("BiasQKNormRotary") == 1
        leaf = x.clone().requires_grad_()
        fused = model(leaf, ids=positions)
        (dx,) = torch.autograd.grad(fused, leaf, torch.ones_like(fused))
    with sf.fusing(False):
        leaf = x.clone().requires_grad_()
        plain = model(leaf, ids=positions)
        (want,) = torch.autograd.grad(plain, leaf, torch.ones_like(plain))
    torch.testing.assert_close(fused, plain)
    torch.testing.assert_close(dx, want)


@pytest.mark.parametrize("names", WITH_ROTARY, ids="-".join)
@pytest.mark.parametrize("width", [8, 4], ids=["by element", "by pair"])
def test_angles_may_be_given(names: tuple[str, ...], width: int, device: torch.device):
    fusions = (module.BiasQKNormRotary, module.BiasQKNormRotaryBackward)
    made = operations(*names, cos="c", sin="s")
    model = sf.Sequential(*made, fusions=fusions).to(device)
    given = {name: seeded_randn((5, width), i).to(device) for i, name in enumerate("cs")}
    x, results = seeded_randn((2, 5, 32), 0).to(device), []
    assert model.plan(x.clone().requires_grad_(), **given).count("BiasQKNormRotary") == 1
    for fusing in (True, False):
        leaves = [x.clone().requires_grad_(), *model.parameters()]
        with sf.fusing(fusing, on_error="raise"):
            y = model(leaves[0], **given)
            results.append([y, *torch.autograd.grad(y, leaves, seeded_randn((2, 5, 32), 1).to(device))])
    torch.testing.assert_close(*results)


@pytest.mark.filterwarnings("error")
def test_gradients_of_angles_are_those_of_the_operation(device: torch.device):
    fusions = (module.BiasQKNormRotary, module.BiasQKNormRotaryBackward)
    norm, rotary = operations("norm", "rotary", cos="c", sin="s")
    x, dy = (seeded_randn((2, 5, 32), i).to(device) for i in range(2))
    found = []
    for chosen in (fusions, fusions[1:], ()):
        model = sf.Sequential(norm, rotary, fusions=chosen).to(device)
        given = {name: seeded_randn((5, 8), i).to(device).requires_grad_() for i, name in enumerate("cs")}
        leaf = x.clone().requires_grad_()
        found.append(torch.autograd.grad(model(leaf, **given), [leaf, *given.values()], dy))
    torch.testing.assert_close(found[0], found[2])
    torch.testing.assert_close(found[1], found[2])


def test_positions_that_do_not_fit_are_refused_as_by_the_operation(device: torch.device):
    model = sf.Sequential(*operations("norm", "rotary", positions="ids"), fusions=(module.BiasQKNormRotary,)).to(device)
    with pytest.raises(sf.errors.InputError, match=r"positions that broadcast to \(5,\), got \(3,\)"):
        model(torch.zeros(5, 32, device=device), ids=torch.arange(3, device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_block_trains_to_the_same_gradients(dtype: torch.dtype, device: torch.device):
    both = (module.BiasQKNormRotary, module.BiasQKNormRotaryBackward)
    model = sf.Sequential(
        ops.Linear(8, 32), *operations("norm", "rotary"), ops.Attention(2, 1, causal=True), ops.Linear(16, 8),
        fusions=both,
    ).to(device, dtype)  # fmt: skip
    four_ways(model, seeded_randn((18, 8), 0, dtype=dtype).to(device), *both)


@pytest.mark.parametrize("kind", ["BiasQKNormRotary", "BiasQKNormRotaryBackward"])
def test_takes_a_gain_of_one_more_than_the_weight(kind: str, device: torch.device):
    norm = ops.QKNorm(8, 2, 1, zero_centered=True)
    made = [op.to(device) for op in (norm, *operations("rotary"))]
    check_fusion(getattr(module, kind), seeded_randn((5, 32), 0).to(device), *made, dtypes=[torch.bfloat16])


@pytest.mark.parametrize("other", [{"kind": "layer"}, {"full_width": True}], ids=str)
def test_another_norm_is_refused(other: dict[str, Any]):
    norm = ops.QKNorm(8, 2, 1, **other)
    model = sf.Sequential(norm, *operations("rotary"), fusions=(module.BiasQKNormRotary, module.BiasQKNorm))
    refused = {r.reason for r in model.plan(env=sf.Env.of("cuda:sm_90", dtype=torch.bfloat16)).refused}
    assert "its kernel makes an RMSNorm of each head" in refused


def test_other_heads_are_refused():
    model = sf.Sequential(
        ops.QKNorm(8, 2, 1), ops.RotaryEmbedding(1, 1, style="half", rotary_dim=2), fusions=(module.BiasQKNormRotary,)
    )
    refused = {r.reason for r in model.plan(env=sf.Env.of("cuda:sm_90", dtype=torch.bfloat16)).refused}
    assert "the norm and the rotation must be of the same heads" in refused


@pytest.mark.parametrize("needs", [{"rotary.cos"}, {"rotary.sin", "x"}])
def test_a_gradient_of_angles_is_left_to_the_operation(needs: set[str]):
    cos = sin = torch.ones(4, 8)
    assert module._angles(None, cos, sin, frozenset({"x"}))["cos"] is cos
    with pytest.raises(sf.InputError, match="the kernel makes no gradients of cos and sin"):
        module._angles(None, cos, sin, frozenset(needs))


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (2, 1), (4, 1)])
def test_a_norm_and_a_rotation_of_other_heads_are_not_one(heads: int, kv_heads: int):
    rotary = ops.RotaryEmbedding(heads, kv_heads, style="half")
    model = sf.Sequential(ops.QKNorm(8, 2, 2), rotary, fusions=module.BiasQKNormRotary)
    plan = model.plan(env=sf.Env.of("cuda:sm_90", rows=4096))
    refused = "the norm and the rotation must be of the same heads" in [refusal.reason for refusal in plan.refused]
    assert refused == ((heads, kv_heads) != (2, 2))
