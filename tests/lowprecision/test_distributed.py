"""Recipes over several processes, with DDP, FSDP2, tensor and sequence parallel: results equal those of one process."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops, recipes
from seqfuse.recipes import Recipe
from seqfuse.testing import assert_bitwise_equal, seeded_randn
from tests.parallel.sharded import copy_shares, in_the_first, results, share_of
from tests.processes import Facts

from .named import RECIPES
from .test_engine import X, model_of

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


def trained(model: nn.Module, inner: sf.Sequential, steps: int = 3) -> list[Tensor]:
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(X * (1 + step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def like_one_process(make: Any, steps: int = 3) -> None:
    """With the same tokens in each process the mean of gradients is that of one, except for the rounding of a sum of
    three."""

    def alone(recipe: Recipe | None, steps: int) -> list[Tensor]:
        model = model_of(recipe)
        return trained(model, model, steps)

    (unquantized,) = in_the_first(lambda: alone(None, 1))
    for recipe in RECIPES:
        expected = in_the_first(lambda own=recipe: alone(own, steps))
        inner = model_of(recipe)
        model = make(inner)
        losses = trained(model, inner, steps)
        assert torch.equal(losses[0], expected[0]), f"{recipe}: {losses} {expected}"
        torch.testing.assert_close(losses, expected, rtol=2e-3, atol=0, msg=lambda m, r=recipe: f"{r}: {m}")
        assert not torch.equal(unquantized, expected[0])


def ddp() -> None:
    like_one_process(nn.parallel.DistributedDataParallel)


def fsdp() -> None:
    from torch.distributed.fsdp import fully_shard

    def make(model: sf.Sequential) -> nn.Module:
        fully_shard(model[3])
        fully_shard(model)
        whole = {p.shape[0] for p in model.parameters()}
        assert all(size % 3 for size in whole)  # uneven shards
        return model

    like_one_process(make)


def fsdp_with_empty_shards() -> None:
    """The last process has no rows of the last Linear, whose weight has 16, and none of the experts."""
    from torch.distributed.fsdp import fully_shard

    last = dist.get_rank() == dist.get_world_size() - 1

    def make(model: sf.Sequential) -> nn.Module:
        fully_shard(model[3])
        fully_shard(model)
        assert not last or model[4].weight.to_local().numel() == 0
        return model

    like_one_process(make, steps=2)
    for recipe in RECIPES:
        expected, model = in_the_first(lambda own=recipe: routed(experts(own))), experts(recipe)
        fully_shard(model)
        assert not last or next(model.parameters()).to_local().numel() == 0
        found = routed(model)
        assert_bitwise_equal(found[:2], expected[:2])
        torch.testing.assert_close(found[2:], expected[2:], rtol=1e-5, atol=1e-6)


def experts(recipe: Recipe | None) -> sf.Sequential:
    torch.manual_seed(0)
    return sf.Sequential(ops.GroupedLinear(2, 32, 48), ops.GeLU(), ops.GroupedLinear(2, 48, 16), recipe=recipe)


def routed(model: sf.Sequential) -> list[Tensor]:
    """The output, and the gradients of x and of every full parameter."""
    x = X.clone().requires_grad_()
    y = model(x, offsets=torch.tensor([12, 33]))
    y.square().mean().backward()
    grads: list[Any] = [p.grad for p in model.parameters()]
    return [y.detach(), x.grad, *(g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads)]


def gathered_weights_have_the_codes_of_one_process() -> None:
    from torch.distributed.fsdp import fully_shard

    apart = recipes.MXFP8(strict=True), recipes.Float8DelayedScaling(strict=True)
    for recipe in (*RECIPES, *apart):
        alone, model = model_of(recipe), model_of(recipe)
        for at in (1, 4) if recipe in apart else ():  # sharded by themselves, they run eagerly like modules with hooks
            alone[at].register_forward_hook(lambda *_: None)
            fully_shard(model[at])
        fully_shard(model)
        with torch.no_grad():
            assert_bitwise_equal([model(X)], in_the_first(lambda own=alone: [own(X)]))


def parallel(recipe: Recipe | None, hidden: int, sequence: bool, group: Any = None) -> sf.Sequential:
    """A column- and a row-parallel Linear, full or sharded, with small integer weights: their sums are exact."""
    column: dict[str, Any] = {} if group is None else {"parallel": "column", "group": group}
    row: dict[str, Any] = {} if group is None else {"parallel": "row", "group": group}
    for way in (column, row) if sequence and group is not None else ():
        way["sequence_dim"] = 0
    model = sf.Sequential(ops.Linear(64, hidden, **column), ops.ReLU(), ops.Linear(hidden, 32, **row), recipe=recipe)
    if group is None:
        for i, p in enumerate(model.parameters()):
            p.data = (seeded_randn(tuple(p.shape), i) * 3).round()
    else:
        copy_shares(model, parallel(None, hidden, sequence))
    return model


def tensor_parallel() -> None:
    x, dy = (seeded_randn((64, 64), 5) * 4).round(), (seeded_randn((64, 32), 6) * 2).round()
    rank, world = dist.get_rank(), dist.get_world_size()
    for recipe, hidden in ((recipes.MXFP8(strict=True), 64), (recipes.Float8BlockScaling(strict=True), 256)):
        for sequence in (False, True):
            whole, model = parallel(recipe, hidden, sequence), parallel(recipe, hidden, sequence, dist.group.WORLD)
            given, d = (t.chunk(world)[rank] if sequence else t for t in (x, dy))
            y, grads = results(model, given, d)
            expected_y, expected = results(whole, x, dy)
            plain_y, plain = results(parallel(None, hidden, sequence), x, dy)
            shares = {name: share_of(model, name, t) for name, t in expected.items() if name != "x"}
            dx = expected["x"].chunk(world)[rank] if sequence else expected["x"]
            want = {"y": expected_y.chunk(world)[rank] if sequence else expected_y, "x": dx, **shares}
            for name, t in want.items():
                torch.testing.assert_close({"y": y, **grads}[name], t, rtol=1e-5, atol=1e-5 * float(t.abs().max()))
            assert float((plain_y - expected_y).abs().max()) > 1e-3 * float(plain_y.abs().max())
            assert any(not torch.equal(plain[name], expected[name]) for name in plain)


def shards_that_blocks_do_not_end_with() -> None:
    x = seeded_randn((64, 64), 5)
    for recipe, hidden, reason in [
        (recipes.MXFP8(), 32, "16 of 32 is not a multiple of 32"),
        (recipes.Float8BlockScaling(), 128, "64 of 128 is not a multiple of 128"),
        (recipes.Float8CurrentScaling(), 256, "would have their own scales"),
    ]:
        model, plain = (parallel(r, hidden, False, dist.group.WORLD) for r in (recipe, None))
        assert_bitwise_equal([model(x)], [plain(x)])
        assert reason in " ".join(str(model.plan(x)).split())


class Mlp(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.down = nn.LayerNorm(64), nn.Linear(hidden, 64)
        self.gate, self.up = nn.Linear(64, hidden, bias=False), nn.Linear(64, hidden, bias=False)
        self.up.weight.data[-hidden // 4 :] *= 7

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def converted_models_with_dtensors() -> None:
    """Quantized with the codes of one process, or not quantized."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    x, mesh = seeded_randn((33, 64), 5), init_device_mesh("cpu", (2,))
    for recipe, quantized, said in [
        (recipes.MXFP8(strict=True), True, "quantized by MXFP8 (emulated on cpu): gate, up, down"),
        (recipes.Float8BlockScaling(), False, "32 of 64 is not a multiple of 128: gate, up, down"),
        (recipes.Float8RowScaling(), False, "would have their own scales: gate, up, down"),
    ]:
        torch._dynamo.reset()
        whole, model = Mlp(64), Mlp(64)
        sf.convert(whole, recipe=recipe if quantized else None, exclude=())
        parallelize_module(model, mesh, plan)
        conversion = sf.convert(model, recipe=recipe, exclude=())
        torch.testing.assert_close(model(x), whole(x), rtol=1e-5, atol=1e-5)
        assert said in " ".join(str(conversion).split())
        if not quantized:
            conversion.undo()
            with pytest.raises(sf.InputError, match=r"SF108 'down' .* is strict, and its weight is sharded"):
                sf.convert(model, recipe=dataclasses.replace(recipe, strict=True), exclude=())


def sharded_experts_of_hugging_face() -> None:
    """Not quantized, since each shard of an expert would have its own scale."""
    import transformers
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    torch._dynamo.reset()
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    model, experts = transformers.MixtralForCausalLM(config), "model.layers.0.mlp.experts"
    styles = {"": "moe_tp_experts", ".gate_up_proj": "packed_colwise", ".down_proj": "rowwise"}
    plan = {f"{experts}{name}": style for name, style in styles.items()}
    apply_tensor_parallelism(model, init_device_mesh("cpu", (2,)), plan)
    tokens = torch.arange(8)[None]
    expected = model(tokens).logits
    conversion = sf.convert(model, recipe=recipes.Float8CurrentScaling(), exclude=("lm_head", "gate", "self_attn"))
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-5, atol=1e-5)
    assert f"would have their own scales: {experts}" in " ".join(str(conversion).split())


def delayed_scales_are_those_of_all_processes() -> None:
    recipe = recipes.Float8DelayedScaling(history=3)
    rank, world = dist.get_rank(), dist.get_world_size()
    inner, alone = model_of(recipe), model_of(recipe)
    model = nn.parallel.DistributedDataParallel(inner)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (inner, alone)]
    for step in range(4):
        x = seeded_randn((16, 32), step) * (1 + step)
        for m, given, optimizer in ((model, x.chunk(world)[rank], optimizers[0]), (alone, x, optimizers[1])):
            optimizer.zero_grad()
            m(given).square().mean().backward()
        if rank == 0:  # the other processes wait for it within the step
            assert inner[1].get_buffer("x_amax_history")[0] <= alone[1].get_buffer("x_amax_history")[0] * 1.01
        for optimizer in optimizers:
            optimizer.step()
        for name in ("x_scale", "weight_scale"):
            torch.testing.assert_close(inner[1].get_buffer(name), alone[1].get_buffer(name), rtol=1e-2, atol=0)
        scales = torch.stack([t for n, t in inner.named_buffers() if n.endswith("_scale")])
        every = [torch.empty_like(scales) for _ in range(world)]
        dist.all_gather(every, scales)
        assert all(torch.equal(one, scales) for one in every)
    assert float(scales.min()) > 1


def delayed_scales_that_are_not_reduced_are_those_of_each_process() -> None:
    model = sf.Sequential(ops.Linear(32, 32), recipe=recipes.Float8DelayedScaling(reduce=False))
    model(seeded_randn((16, 32), 1) * (1 + dist.get_rank())).sum().backward()
    sf.update_scales(model)
    scale = model[0].get_buffer("x_scale")
    every = [torch.empty_like(scale) for _ in range(2)]
    dist.all_gather(every, scale)
    assert every[0] == 2 * every[1]


def delayed_scales_are_those_of_the_group_that_is_given() -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    model = sf.Sequential(ops.Linear(32, 32), recipe=recipes.Float8DelayedScaling())
    model(seeded_randn((16, 32), 1) * (1 + dist.get_rank())).sum().backward()
    sf.update_scales(model, groups[dist.get_rank() // 2])
    scale = model[0].get_buffer("x_scale")
    first, second, third = every = [torch.empty_like(scale) for _ in range(3)]
    dist.all_gather(every, scale)
    assert first == second
    torch.testing.assert_close(2 * first, 3 * third)


FACTS = Facts({
    2: [
        delayed_scales_are_those_of_all_processes, delayed_scales_that_are_not_reduced_are_those_of_each_process,
        tensor_parallel, shards_that_blocks_do_not_end_with,
        converted_models_with_dtensors, sharded_experts_of_hugging_face,
    ],
    3: [
        ddp, fsdp, gathered_weights_have_the_codes_of_one_process, delayed_scales_are_those_of_the_group_that_is_given,
    ],
    5: [fsdp_with_empty_shards],
})  # fmt: skip


test_in_processes = FACTS.test
