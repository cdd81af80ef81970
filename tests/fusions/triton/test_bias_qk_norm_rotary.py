"""Bias, norm of heads and RoPE, between the GEMM of [q; k; v] and attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import seqfuse as sf
from seqfuse import ops
from seqfuse.fusions import heads as module
from seqfuse.testing import seeded_randn


def operations(*names: str, heads: int = 2, kv_heads: int = 1, size: int = 8, **rotary: Any) -> list[Any]:
    width = (heads + 2 * kv_heads) * size
    made = {
        "bias": lambda: ops.Bias(width),
        "norm": lambda: ops.QKNorm(size, heads, kv_heads),
        "rotary": lambda: ops.RotaryEmbedding(heads, kv_heads, **{"style": "half", **rotary}),
    }
    return [made[name]() for name in names]


WITH_ROTARY = [("bias", "norm", "rotary"), ("norm", "rotary"), ("bias", "rotary"), ("rotary",)]


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


@pytest.mark.parametrize("needs", [{"rotary.cos"}, {"rotary.sin", "x"}])
def test_a_gradient_of_angles_is_left_to_the_operation(needs: set[str]):
    cos = sin = torch.ones(4, 8)
    assert module._angles(None, cos, sin, frozenset({"x"}))["cos"] is cos
    with pytest.raises(sf.InputError, match="the kernel makes no gradients of cos and sin"):
        module._angles(None, cos, sin, frozenset(needs))
