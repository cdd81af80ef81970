"""Converted models over several processes: under DDP and FSDP2, and with tensor-parallel weights."""

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import seqfuse as sf
from seqfuse import ops
from seqfuse.convert import Conversion
from seqfuse.convert.graph import spelled
from seqfuse.errors import InputError
from seqfuse.testing import seeded_randn
from tests import processes
from tests.parallel.sharded import in_the_first
from tests.processes import Facts

from .residual import Net, chains

# DDP and FSDP2, wrapped or sharded before the conversion, and after it.


pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
Change = Callable[[nn.Module], Any]


def whole(t: Any) -> Tensor:
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()


def ddp(model: nn.Module) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model)


def fsdp(model: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def stepped(model: nn.Module) -> list[Tensor]:
    """Losses and gradients of two steps, and the parameters after them; each rank has its own tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    found: list[Tensor] = []
    for step in range(2):
        y = model(seeded_randn((3, 8), 10 * step + dist.get_rank()).double())
        loss = (y * seeded_randn((3, 8), 5)).sum()
        optimizer.zero_grad()
        loss.backward()
        found += [loss.detach(), *(whole(p.grad) for p in model.parameters())]
        optimizer.step()
    return found + [whole(p) for p in model.parameters()]


def same_as_unconverted(wrap: Change, before: bool) -> None:
    torch._dynamo.reset()
    model = Net(depth=1)
    plain = wrap(copy.deepcopy(model))
    wanted = stepped(plain)
    if before:
        wrapped = wrap(model)
        conversion = sf.convert(wrapped)
    else:
        conversion = sf.convert(model)
        wrapped = wrap(model)
    for got, want in zip(stepped(wrapped), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-7)
    assert chains(conversion)
    assert [n for n, _ in wrapped.named_parameters()] == [n for n, _ in plain.named_parameters()]


def within_ddp() -> None:
    same_as_unconverted(ddp, before=False)


def around_ddp() -> None:
    same_as_unconverted(ddp, before=True)


def cut_at_buckets() -> None:
    """Dynamo makes a graph of each bucket, and gives the last one a graph break as its end, too."""
    from torch.nn.parallel import DistributedDataParallel

    conversion = sf.convert(model := Net(depth=2, width=256))
    wrapped, plain = DistributedDataParallel(model, bucket_cap_mb=1.1), copy.deepcopy(model)
    x = seeded_randn((3, 256), 1).double()
    for one in (wrapped, plain):
        one(x).sum().backward()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-7, atol=1e-7)
    assert len(conversion.graphs) > 1
    assert str(conversion).count("a graph of one of the buckets of DistributedDataParallel") == len(conversion.graphs)
    assert "ends at" not in str(conversion)


def sharded_and_converted() -> None:
    same_as_unconverted(fsdp, before=True)


def converted_and_sharded() -> None:
    same_as_unconverted(fsdp, before=False)


FACTS = Facts({2: [within_ddp, around_ddp, cut_at_buckets, sharded_and_converted, converted_and_sharded]})


test_training_equals_that_of_the_unconverted_model = FACTS.test


# Tensor and sequence parallel.


WIDTH, HEADS, VOCABULARY, LENGTH = 32, 4, 64, 8
TOKENS = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    def __init__(self, kit: Any) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (kit.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for p in (self.q, self.k, self.v))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(heads.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, kit: Any) -> None:
        super().__init__()
        self.up, self.down = kit.Linear(WIDTH, 2 * WIDTH), kit.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, kit: Any) -> None:
        super().__init__()
        self.norm, self.attention = kit.LayerNorm(WIDTH), Attention(kit)
        self.norm2, self.mlp = kit.LayerNorm(WIDTH), Mlp(kit)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """GPT-2 built of Linears, as torch's styles require, from torch modules or from operations."""

    def __init__(self, kit: Any = nn, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = kit.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(kit) for _ in range(layers))
        self.norm, self.head = kit.LayerNorm(WIDTH), kit.Linear(WIDTH, VOCABULARY, bias=False)
        for p in self.parameters():
            nn.init.normal_(p, std=0.2)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def llama() -> nn.Module:
    """One layer: chains that continue in the next layer have tests with a `Gpt` of two."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=1,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


def whole_plan(model: nn.Module) -> dict[str, Any]:
    """Column-parallel, then row-parallel, with replicated tensors between."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    if isinstance(model, Gpt):
        columns, rows, head = (
            ("attention.q", "attention.k", "attention.v", "mlp.up"),
            ("attention.o", "mlp.down"),
            "head",
        )
        layers, tokens = "layers", "tokens"
    else:
        columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        rows, head, layers, tokens = (
            ("self_attn.o_proj", "mlp.down_proj"),
            "lm_head",
            "model.layers",
            "model.embed_tokens",
        )
    plan: dict[str, Any] = {f"{layers}.*.{name}": ColwiseParallel() for name in columns}
    plan |= {f"{layers}.*.{name}": RowwiseParallel() for name in rows}
    return plan | {
        tokens: RowwiseParallel(input_layouts=Replicate()),
        head: ColwiseParallel(output_layouts=Replicate()),
    }


def sequence_plan() -> dict[str, Any]:
    """Sequence shards between a row-parallel and a column-parallel Linear."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan: dict[str, Any] = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    layer = {"norm": SequenceParallel(), "attention": gather, "norm2": SequenceParallel(), "mlp": gather}
    layer |= {f"attention.{name}": ColwiseParallel() for name in ("q", "k", "v")}
    layer |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.o", "mlp.down")}
    layer["mlp.up"] = ColwiseParallel()
    return plan | {f"layers.*.{name}": style for name, style in layer.items()}


def mesh(*names: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    shape = (dist.get_world_size(),) if len(names) == 1 else (2, dist.get_world_size() // 2)
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def parallel(model: nn.Module, plan: dict[str, Any], over: Any) -> None:
    from torch.distributed.tensor.parallel import parallelize_module

    parallelize_module(model, over, plan)


def trained(model: nn.Module, tokens: Tensor = TOKENS, call: Any = None) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the full gradients."""
    model.zero_grad()
    y = (call or model)(tokens)
    y = y if isinstance(y, Tensor) else y.logits
    loss = F.cross_entropy(y[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert all(g is not None for g in grads.values())
    return loss.detach(), {n: g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for n, g in grads.items()}


def alone(model: nn.Module, tokens: Tensor = TOKENS) -> tuple[Tensor, dict[str, Tensor]]:
    """The same of a copy of the whole model, in one process."""
    return in_the_first(lambda: trained(copy.deepcopy(model), tokens))


def assert_trains_alike(model: nn.Module, wanted: tuple[Tensor, dict[str, Tensor]], tokens: Tensor = TOKENS) -> None:
    loss, grads = trained(model, tokens)
    torch.testing.assert_close(loss, wanted[0], rtol=1e-6, atol=1e-7)
    assert grads.keys() == wanted[1].keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, wanted[1][name], rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


def assert_in_chains(conversion: Conversion, gemms: int, *collectives: type) -> None:
    """The number of GEMMs in chains, with the collectives between them."""
    assert all(c.plan is not None for g in conversion.graphs for c in g.regions), str(conversion)
    members = [r for g in conversion.graphs for c in g.regions for r in c.order.members]
    assert sum(spelled(node) == "linear" for node in {n for r in members for n in r.took}) == gemms, str(conversion)
    assert {type(r.operation) for r in members} >= set(collectives), str(conversion)


def converted_under(model: nn.Module, plan: dict[str, Any], gemms: int, *collectives: type) -> None:
    torch._dynamo.reset()
    wanted = alone(model)
    parallel(model, plan, mesh("tp"))
    before = trained(model)
    conversion = sf.convert(model)
    assert_trains_alike(model, wanted)
    assert_trains_alike(model, wanted)
    assert_in_chains(conversion, gemms, *collectives)
    placements = {n: p.grad.placements for n, p in model.named_parameters() if hasattr(p.grad, "placements")}
    conversion.undo()
    assert_trains_alike(model, before)
    after = {n: p.grad.placements for n, p in model.named_parameters() if hasattr(p.grad, "placements")}
    assert {n: str(p) for n, p in placements.items()} == {n: str(p) for n, p in after.items()}


def a_gpt() -> None:
    model = Gpt(layers=1)
    converted_under(model, whole_plan(model), 6 + 1, ops.CopyToTensorParallel, ops.AllReduce)


def a_llama() -> None:
    model = llama()
    converted_under(model, whole_plan(model), 7 + 1, ops.CopyToTensorParallel, ops.AllReduce)


def a_gpt_whose_tokens_are_sharded() -> None:
    converted_under(Gpt(), sequence_plan(), 2 * 6 + 1, ops.AllGather, ops.ReduceScatter)


def a_gpt_of_operations() -> None:
    for plan in (whole_plan(Gpt(ops)), sequence_plan()):
        model = Gpt(ops, layers=1)
        wanted = alone(model)
        parallel(model, plan, mesh("tp"))
        for _ in range(2):
            assert_trains_alike(model, wanted)
        assert [*model.state_dict()] == [*Gpt(layers=1).state_dict()]


def a_gpt_of_operations_that_is_converted() -> None:
    model = Gpt(ops, layers=1)
    converted_under(model, whole_plan(model), 6 + 1, ops.CopyToTensorParallel, ops.AllReduce)


def a_sequence_of_operations() -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    torch.manual_seed(0)
    block = ops.Residual(ops.RMSNorm(WIDTH), ops.Linear(WIDTH, 64), ops.GeLU(), ops.Linear(64, WIDTH))
    model = sf.Sequential(ops.Embedding(VOCABULARY, WIDTH), block, ops.LayerNorm(WIDTH), ops.Linear(WIDTH, VOCABULARY))
    model.double()
    wanted = alone(model)
    plan = {
        "0": RowwiseParallel(input_layouts=Replicate()),
        "1.1": ColwiseParallel(),
        "1.3": RowwiseParallel(),
        "3": ColwiseParallel(output_layouts=Replicate()),
    }
    parallel(model, plan, mesh("tp"))
    for _ in range(2):
        assert_trains_alike(model, wanted)


def parts_side_by_side_are_not_sharded_in_stretches() -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel

    x = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    for reader in (ops.SwiGLU(), ops.Attention(4, 2)):
        model = sf.Sequential(ops.LayerNorm(WIDTH), ops.Linear(WIDTH, 64), ops.Identity(), reader)
        wanted = model(x)
        whole = copy.deepcopy(model)
        parallel(whole, {"1": ColwiseParallel(output_layouts=Replicate())}, mesh("tp"))
        torch.testing.assert_close(whole(x), wanted)
        parallel(model, {"1": ColwiseParallel()}, mesh("tp"))
        with pytest.raises(InputError, match="side by side"):
            model(x)


def a_converted_gpt_that_is_parallelized() -> None:
    torch._dynamo.reset()
    model = Gpt(layers=1)
    wanted = alone(model)
    conversion = sf.convert(model)
    parallel(model, whole_plan(model), mesh("tp"))
    assert_trains_alike(model, wanted)
    assert_in_chains(conversion, 6 + 1, ops.AllReduce)


def a_gpt_whose_first_call_is_checkpointed() -> None:
    torch._dynamo.reset()
    model = Gpt(layers=1)
    wanted = alone(model)
    parallel(model, whole_plan(model), mesh("tp"))
    sf.convert(model)
    found = trained(model, call=functools.partial(checkpoint, model, use_reentrant=False))
    torch.testing.assert_close(found, wanted)


def a_llama_by_the_plan_of_its_class() -> None:
    """Sharded as by `from_pretrained(..., tp_plan="auto")`."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    torch._dynamo.reset()
    model: Any = llama()
    wanted = alone(model)
    plan: dict[str, str] = {}
    for name, _ in model.named_parameters():
        module = name.removesuffix(".weight")
        style = model.tp_plan.get(re.sub(r"\d+", "*", module))
        plan |= {module: style, name: style} if style is not None else {}
    apply_tensor_parallelism(model, mesh("tp"), plan)
    conversion = sf.convert(model)
    assert_trains_alike(model, wanted)
    assert_in_chains(conversion, 7 + 1, ops.CopyToTensorParallel, ops.AllReduce)


def a_gpt_over_two_dimensions() -> None:
    from torch.distributed.fsdp import fully_shard

    torch._dynamo.reset()
    model, both = Gpt(layers=1), mesh("dp", "tp")
    rows = TOKENS[both["dp"].get_local_rank()][None]
    wanted = alone(model, TOKENS[:1])[1], alone(model, TOKENS[1:])[1]
    mean = {name: (wanted[0][name] + wanted[1][name]) / 2 for name in wanted[0]}
    parallel(model, whole_plan(model), both["tp"])
    for layer in model.layers:
        fully_shard(layer, mesh=both["dp"])
    fully_shard(model, mesh=both["dp"])
    loss, _ = trained(model, rows)
    conversion = sf.convert(model)
    assert_trains_alike(model, (loss, mean), rows)
    assert_in_chains(conversion, 6, ops.AllReduce)  # FSDP2 calls the head by itself


TWO = [
    a_gpt_whose_tokens_are_sharded, a_gpt_of_operations_that_is_converted, a_sequence_of_operations,
    parts_side_by_side_are_not_sharded_in_stretches, a_converted_gpt_that_is_parallelized,
    a_llama_by_the_plan_of_its_class, a_gpt_whose_first_call_is_checkpointed,
]  # fmt: skip
FOUR = [a_gpt_of_operations, a_gpt_over_two_dimensions]
if processes.FULL:
    TWO = [a_gpt, a_llama, a_gpt_of_operations, *TWO]
    FOUR = [a_gpt, a_llama, a_gpt_whose_tokens_are_sharded, a_sequence_of_operations, *FOUR]
TENSOR_PARALLEL = Facts({2: TWO, 4: FOUR})

test_a_model_trains_as_in_one_process = TENSOR_PARALLEL.test
