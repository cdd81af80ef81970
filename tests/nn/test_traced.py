"""Layers under compilers, transforms and checkpoints."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import seqfuse as sf
from seqfuse import ops
from seqfuse.nn import TransformerLayer
from seqfuse.testing import seeded_randn

FORMS: dict[str, dict[str, Any]] = {
    "GPT": {"causal": True},
    "Llama": {
        "kv_heads": 2, "activation": ops.SwiGLU, "norm": ops.RMSNorm, "bias": False, "causal": True, "qk_norm": True,
        "rotary": functools.partial(ops.RotaryEmbedding, style="half"),
    },
    "capped": {"softcap": 3.0, "window": 6},
}  # fmt: skip
# Tracing takes seconds for each: by default what differs between two forms is in one. What GPT has beside them,
# LayerNorm, GeLU and biases, is compiled in tests/fuser.
COMPILED = [
    pytest.param(FORMS["Llama"] | FORMS["capped"], None, id="Llama, capped"),
    *(pytest.param(FORMS[name], True, id=name, marks=pytest.mark.full) for name in FORMS),
]


def gradients(model: nn.Module, run: Any, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = run(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]


@pytest.mark.slow
@pytest.mark.parametrize(("form", "dynamic"), COMPILED)
def test_a_compiled_layer_gives_the_numbers_of_the_eager_one(form: dict[str, Any], dynamic: bool | None):
    torch.manual_seed(0)
    layer = TransformerLayer(16, 4, **form)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)

    def any_batch(x: Tensor) -> Tensor:
        torch._dynamo.mark_dynamic(x, 0)
        return compiled(x)

    for batch in (2, 3):
        x = seeded_randn((batch, 20, 16), batch)
        torch.testing.assert_close(gradients(layer, any_batch, x), gradients(layer, layer, x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_transforms_take_the_math(form: str):
    torch.manual_seed(0)
    layer = TransformerLayer(16, 4, **FORMS[form])
    x = seeded_randn((3, 18, 16), 1)
    torch.testing.assert_close(torch.vmap(layer)(x), layer(x), atol=1e-5, rtol=1e-4)
    parameters = dict(layer.named_parameters())

    def loss(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layer, values, (x,)).square().sum()

    found = torch.func.grad(loss)(parameters)
    torch.testing.assert_close(list(found.values()), gradients(layer, layer, x)[2:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_replays_every_dropout(reentrant: bool):
    torch.manual_seed(0)
    layer = TransformerLayer(16, 4, causal=True, dropout=0.2, attention_dropout=0.2, hidden_dropout=0.2)
    x = seeded_randn((2, 20, 16), 1)

    def seeded(run: Any) -> Any:
        def call(x: Tensor) -> Tensor:
            torch.manual_seed(3)
            return run(x)

        return call

    found = (
        gradients(layer, seeded(lambda x: checkpoint(layer, x, use_reentrant=reentrant)), x) if not reentrant else None
    )
    if reentrant:  # torch.autograd.grad does not reach through it
        x = x.requires_grad_()
        torch.manual_seed(3)
        y = checkpoint(layer, x, use_reentrant=True)
        y.square().sum().backward()
        found = [y.detach(), x.grad, *(p.grad for p in layer.parameters())]
    torch.testing.assert_close(found, gradients(layer, seeded(layer), x))


def test_a_layer_is_traced_by_make_fx_with_its_gradients():
    layer = sf.Sequential(ops.Linear(8, 24), ops.Attention(2, causal=True))
    x = seeded_randn((2, 20, 8), 0)

    def step(x: Tensor) -> Tensor:
        return torch.autograd.grad(layer(x).square().sum(), x)[0]

    graph = torch.fx.experimental.proxy_tensor.make_fx(step)(x.requires_grad_())
    with torch.no_grad():  # the graph holds the backward itself
        found = graph(x.detach())
    torch.testing.assert_close(found, step(x))
