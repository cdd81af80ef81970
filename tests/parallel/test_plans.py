"""Plans of a sharded sequence in one process, with a fake group."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import seqfuse as sf
from seqfuse import nn, ops, parallel
from seqfuse.group import Group
from seqfuse.run import dynamo, fuser
from seqfuse.run.regions import OpList
from seqfuse.settings import settings

from .sharded import share_of

SIZE = 4


@pytest.fixture(params=[0, 3], ids=lambda rank: f"rank{rank}")
def group(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A group of four processes, of which this is one and the others send nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=SIZE)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def block(group: Any = None, **rest: Any) -> sf.Sequential:
    across = {} if group is None else {"group": group, **rest}
    return sf.Sequential(nn.TransformerLayer(16, 4, activation=ops.SwiGLU, dropout=0.1, **across))


def names(model: sf.Sequential, x: torch.Tensor) -> list[str]:
    return [step.name for step in model.plan(x).forward]


def test_a_group_of_one_process_adds_no_collective(tmp_path: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    try:
        model, whole, x = block(dist.group.WORLD, sequence_dim=-2), block(), torch.randn(2, 3, 16)
        assert names(model, x) == names(whole, x)
        assert model.plan(x).names == whole.plan(x).names
        model.load_state_dict(whole.state_dict())
        torch.manual_seed(1)
        y = model(x)
        torch.manual_seed(1)
        assert torch.equal(y, whole(x))
        plan = {"*attention.mixer": "heads", "*feedforward.mixer": "features"}
        divided = parallel.parallelize(block(), dist.group.WORLD, plan, sequence_dim=-2)
        assert names(divided, x) == names(whole, x)
        assert not [m for m in divided.modules() if getattr(m, "sum_over", None) is not None]
    finally:
        dist.destroy_process_group()


def test_the_same_fusions_apply_beside_collectives(group: Any) -> None:
    env = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=4096)
    whole, model = (
        sf.Sequential(
            nn.TransformerStack(
                2, 1024, 16, activation=ops.GeLU, norm=ops.RMSNorm, dropout=0.1, device="meta", dtype=torch.bfloat16,
                qk_norm=True, rotary=lambda h, s: ops.RotaryEmbedding(h, s, style="half"), group=g,
            )
        )
        for g in (None, group)
    )  # fmt: skip
    collectives = {"AllReduce", "CopyToTensorParallel"}
    for side in ("forward", "backward"):
        alone = [s.name for s in getattr(whole.plan(env=env), side)]
        beside = [s.name for s in getattr(model.plan(env=env), side)]
        # Bias, dropout, residual sum and norm stay one fusion, which no longer begins with a GEMM.
        assert {n for n in beside if n not in collectives} >= {n for n in alone if "Linear" not in n}
        assert beside.count("AllReduce") == 4


def test_a_plan_prints_and_counts_without_sending(group: Any) -> None:
    across: dict[str, Any] = {"parallel": "vocab", "group": group}
    model = sf.Sequential(ops.Embedding(32, 16, **across), block(group))
    whole = sf.Sequential(ops.Embedding(32, 16), block())
    tokens = torch.randint(32, (2, 8))
    plan, alone = model.plan(tokens), whole.plan(tokens)
    assert "AllReduce" in str(plan)
    assert plan.memory is not None
    assert alone.memory is not None
    assert plan.memory.saved < alone.memory.saved


def test_what_exchanges_something_is_not_planned_for_a_compiler(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "_kernels_run", lambda device: True)
    x, summed = torch.randn(4, 8), ops.LayerNorm(8)
    summed.sum_over = Group(group)
    row = ops.Linear(32, 8, bias=False, parallel="row", group=group)
    for operation, planned in ((ops.LayerNorm(8), True), (summed, False), (row, False)):
        nodes = OpList(sf.Sequential(operation, ops.GeLU())).nodes
        assert dynamo.plannable(nodes, x) == planned


def test_the_bias_of_a_row_stands_after_the_sum(group: Any) -> None:
    row: dict[str, Any] = {"parallel": "row", "group": group}
    assert sf.Sequential(ops.Linear(8, 6, **row)).plan().names == ("Linear", "AllReduce", "Bias")
    last = sf.Sequential(ops.Linear(8, 6, **row, bias_last=False))
    assert last.plan().names == ("Linear", "Bias", "AllReduce")
    assert [s.name for s in last.plan().forward] == ["LinearBias", "AllReduce"]
    rows = sf.Sequential(ops.Linear(8, 6, **row, sequence_dim=0))
    assert rows.plan().names == ("Linear", "ReduceScatter", "Bias")


def test_initial_values_are_shares_of_the_whole(group: Any) -> None:
    torch.manual_seed(3)
    whole = block()
    after = torch.get_rng_state()
    torch.manual_seed(3)
    model = block(group)
    assert torch.equal(torch.get_rng_state(), after)
    assert list(model.state_dict()) == list(whole.state_dict())
    up, packed = model[0].feedforward.mixer.up, whole[0].feedforward.mixer.up.weight
    rank, hidden = dist.get_rank(), 64
    gate, value = packed[:hidden], packed[hidden:]
    assert torch.equal(up.weight, torch.cat((gate.chunk(SIZE)[rank], value.chunk(SIZE)[rank])))
    q, k, v = whole[0].attention.mixer.qkv.weight.chunk(3)
    mine = torch.cat([part.chunk(SIZE)[rank] for part in (q, k, v)])
    assert torch.equal(model[0].attention.mixer.qkv.weight, mine)
    down = whole[0].feedforward.mixer.down
    assert torch.equal(model[0].feedforward.mixer.down.weight, down.weight.chunk(SIZE, 1)[rank])
    assert torch.equal(model[0].feedforward.mixer.down.bias, down.bias)
    for seed in (4, 5):
        for every in (model, whole):
            torch.manual_seed(seed)
            for module in every.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
        for name, p in whole.named_parameters():
            assert torch.equal(model.get_parameter(name), share_of(model, name, p)), name


INDIVISIBLE: dict[str, Any] = {
    "column": lambda g: ops.Linear(4, 6, parallel="column", group=g),
    "row": lambda g: ops.Linear(6, 4, parallel="row", group=g),
    "parts": lambda g: ops.Linear(4, 8, parallel="column", group=g, parts=(6, 2)),
    "heads": lambda g: nn.MultiHeadAttention(12, 6, group=g),
    "key heads": lambda g: nn.MultiHeadAttention(16, 8, 2, group=g),
    "hidden": lambda g: nn.FeedForward(4, 6, ops.SwiGLU, group=g),
}


@pytest.mark.parametrize("case", INDIVISIBLE)
def test_what_the_processes_do_not_divide_is_an_error(case: str, group: Any) -> None:
    with pytest.raises(sf.InputError, match=r"SF101 (Linear|Attention): expects .* that 4 processes divide, got"):
        INDIVISIBLE[case](group)


def test_rows_that_the_processes_do_not_divide_are_an_error(group: Any) -> None:
    model = sf.Sequential(ops.GeLU(), ops.Linear(8, 6, parallel="row", group=group, sequence_dim=-2))
    place = r"SF101 '1.reducescatter', position 2 \(ReduceScatter\): "
    with pytest.raises(sf.InputError, match=place + "expects a dimension -2 that 4 divides"):
        model(torch.randn(6, 2))


def test_wrong_settings_are_errors(group: Any) -> None:
    with pytest.raises(sf.InputError, match="needs a group"):
        ops.Linear(4, 4, parallel="column")
    with pytest.raises(sf.InputError, match='must be "column", "row" or None'):
        ops.Linear(4, 4, parallel="columns", group=group)
    with pytest.raises(sf.InputError, match="expects a process group"):
        ops.AllReduce("tp")
    with pytest.raises(sf.InputError, match="parts are sizes"):
        ops.Linear(4, 8, parallel="column", group=group, parts=(4,))
    with pytest.raises(sf.InputError, match="divided among processes already"):
        ops.Linear(4, 8, parallel="column", group=group).divide("row", group)
    with pytest.raises(sf.InputError, match="SF106 QKNorm: a QKNorm of all heads cannot be divided"):
        nn.MultiHeadAttention(16, 4, qk_norm=functools.partial(ops.QKNorm, full_width=True), group=group)
    with pytest.raises(sf.InputError, match="SF106 MergedLinear: a MergedLinear is not divided"):
        nn.MultiHeadAttention(16, 4, merged=True, group=group)
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(sf.InputError, match="a mesh of one dimension"):
        ops.AllReduce(mesh)
    assert ops.AllReduce(mesh["tp"]).group.size == 2


def test_copies_share_the_group_and_pickles_find_it(group: Any) -> None:
    model = block(group)
    x = torch.randn(2, 3, 16)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.plan(x).names == model.plan(x).names
        assert other[0].feedforward.mixer.up.expand()[0].group.process_group is group
    data = pickle.dumps(model)
    dist.destroy_process_group()
    try:
        with pytest.raises(sf.StateError, match="SF506"):
            pickle.loads(data)
    finally:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=SIZE)


def test_what_runs_by_itself_on_a_share_of_the_rows_must_know_it(group: Any) -> None:
    model = sf.Sequential(
        ops.LayerNorm(8), ops.Linear(8, 8, parallel="column", group=group, sequence_dim=0), ops.GeLU()
    )
    model[0].register_forward_hook(lambda *_: None)
    with pytest.raises(sf.PlanError, match=r"position 0 \(LayerNorm\): it runs by itself on a sequence shard"):
        model.plan()
    model[0].requires_grad_(False)
    assert model.plan().eager[0].name == "LayerNorm"
    model[0].requires_grad_(True).sum_over = Group(group)
    assert model.plan().eager[0].name == "LayerNorm"


def test_norms_of_a_stack_run_by_themselves_on_a_share_of_the_rows(group: Any) -> None:
    stack = nn.TransformerStack(1, 16, 4, group=group, sequence_dim=-2)
    for norm in (stack.norm, stack[0].attention.norm, stack[0].feedforward.norm):
        norm.register_forward_hook(lambda *_: None)
    assert [eager.name for eager in stack.plan().eager] == ["LayerNorm"] * 3


def test_what_runs_by_itself_and_contains_a_dropout_is_refused_where_masks_differ(group: Any) -> None:
    inner = sf.Sequential(ops.GeLU(), ops.Dropout(0.5))
    model = sf.Sequential(ops.CopyToTensorParallel(group), inner, ops.AllReduce(group))
    inner.register_forward_hook(lambda *_: None)
    with pytest.raises(sf.PlanError, match=r"SF201 .*it runs by itself where each process needs its own mask"):
        model.plan()


def test_a_shard_does_not_hold_the_memory_of_the_whole(group: Any) -> None:
    model = parallel.parallelize(block(), group, {"*attention.mixer": "heads", "*feedforward.mixer": "features"})
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())


def test_a_list_that_runs_by_itself_ends_as_its_last_collective_does(group: Any) -> None:
    inner = sf.Sequential(
        ops.Linear(8, 8, parallel="column", group=group), ops.GeLU(), ops.Linear(8, 8, parallel="row", group=group)
    )
    inner.register_forward_hook(lambda *_: None)
    op_list = OpList(sf.Sequential(inner, ops.Dropout(0.5)))
    assert [item.rank for item in op_list.nodes] == [0, 0]  # the mask behind it is one for all processes


def test_a_group_of_one_process_is_pickled_without_its_name(tmp_path: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    try:
        data = pickle.dumps(Group(dist.group.WORLD))
    finally:
        dist.destroy_process_group()
    assert pickle.loads(data).size == 1


def test_the_processes_of_every_group_are_compared(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def all_gather(self: Group, x: torch.Tensor, dim: int, what: str) -> torch.Tensor:
        seen.append(self.name)
        return torch.cat([x] * self.size, dim)

    monkeypatch.setattr(Group, "all_gather", all_gather)
    monkeypatch.setattr(fuser, "settings", lambda: dataclasses.replace(settings(), debug=True))
    groups = [Group(group), Group(dist.new_group(range(SIZE)))]
    sf.Sequential(*(op(own) for own in groups for op in (ops.CopyToTensorParallel, ops.AllReduce)))(torch.ones(2, 4))
    assert seen == [own.name for own in groups]


def test_dtensors_are_of_the_group_that_shards_them(group: Any) -> None:
    groups = [group, dist.new_group(range(SIZE))]
    model = sf.Sequential(*(ops.Linear(8, 8, bias=False, parallel="column", group=own) for own in groups))
    found: Any = parallel.dtensors(model)
    of = [found[f"{i}.weight"].device_mesh.get_group().group_name for i in range(2)]
    assert of == [own.group_name for own in groups]


@pytest.mark.parametrize("call", [parallel.unshard, parallel.dtensors, lambda m: parallel.clip_grad_norm_(m, 1.0)])
def test_a_shard_that_a_parametrization_replaces_is_refused(call: Any, group: Any) -> None:
    model = sf.Sequential(ops.Linear(8, 8, parallel="column", group=group))
    torch.nn.utils.parametrizations.weight_norm(model[0])
    with pytest.raises(sf.InputError, match=r"SF106.*Linear.*its weight is computed from other"):
        call(model)
