"""An existing model, sharded in place, and its checkpoints."""

from __future__ import annotations

import copy
import functools
import itertools
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import seqfuse as sf
from seqfuse import nn, ops, parallel
from seqfuse.losses import LinearCrossEntropy
from tests.processes import Facts

from .sharded import assert_same, draw, randomize, results, share_of

PLAN = {"*attention.mixer": "heads", "*feedforward.mixer": "features"}
rotary = functools.partial(ops.RotaryEmbedding, style="half")


def stack(layers: int = 2) -> sf.Sequential:
    model = nn.TransformerStack(
        layers, 16, 4, kv_heads=2, activation=ops.SwiGLU, norm=ops.RMSNorm, qk_norm=True, rotary=rotary,
        dtype=torch.float64,
    )  # fmt: skip
    randomize(model)
    return model


def by_hand() -> sf.Sequential:
    model = sf.Sequential(
        ops.Residual(ops.LayerNorm(6), ops.Linear(6, 8), ops.SwiGLU(), ops.Linear(4, 6)),
        ops.Linear(6, 4),
        ops.Tanh(),
        ops.Linear(4, 6),
    ).double()
    randomize(model)
    return model


BY_HAND = {"0": "features", "1": "column", "3": "row"}


def a_model_divided_in_place_equals_the_whole() -> None:
    for make, plan, width in ((stack, PLAN, 16), (by_hand, BY_HAND, 6)):
        model, whole = make(), make()
        parameters = dict(model.named_parameters())
        assert parallel.parallelize(model, dist.group.WORLD, plan) is model
        assert all(p is parameters[name] for name, p in model.named_parameters())
        assert_same(model, whole, draw(2, 6, width))


def halves_of_a_gated_unit_are_divided_one_by_one() -> None:
    packings: Any = ("gate_up", "up_gate", "interleaved")
    for packing, plan in itertools.product(packings, ({"0.0": "column", "0.2": "row"}, {"0": "features"})):
        inside = ops.Linear(6, 8), ops.GEGLU(packing=packing), ops.Linear(4, 6)
        model = sf.Sequential(sf.Sequential(*inside)).double()
        whole = copy.deepcopy(model)
        parallel.parallelize(model, dist.group.WORLD, plan)
        assert_same(model, whole, draw(5, 6))


def a_mesh_is_a_group() -> None:
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model, whole = stack(), stack()
    parallel.parallelize(model, mesh["tp"], PLAN)
    assert_same(model, whole, draw(2, 6, 16))


class LanguageModel(torch.nn.Module):
    """Embedding, stack and loss, with the embedding weight tied to the classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = sf.Sequential(ops.Embedding(12, 16, dtype=torch.float64), stack())
        self.head = LinearCrossEntropy(16, 12, weight=self.body[0].weight)
        randomize(self)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(tokens), tokens.roll(-1, -1))


EVERYTHING = {"body.0": "vocab", "head": "vocab", **PLAN}


def a_language_model_equals_the_whole() -> None:
    for dim in (None, -2):
        model, whole = LanguageModel(), LanguageModel()
        parallel.parallelize(model, dist.group.WORLD, EVERYTHING, sequence_dim=dim)
        assert model.head.weight is model.body[0].weight
        tokens = torch.tensor([[1, 11, 4, 6, 2, 5, 0, 9], [8, 8, 3, 7, 10, 2, 6, 1]])
        assert_same(model, whole, tokens)


def lone_norms_know_that_they_see_a_share_of_the_rows() -> None:
    """Called by itself, with no collective next to it; also one within a region, before its first GEMM."""
    for make, plan, name, width in ((stack, PLAN, "norm", 16), (by_hand, BY_HAND, "0.0", 6)):
        model = parallel.parallelize(make(), dist.group.WORLD, plan, sequence_dim=-2)
        whole, x = make().get_submodule(name), draw(2, 8, width)
        part = x.chunk(2, 1)[dist.get_rank()]
        _, grads = results(model.get_submodule(name), part, torch.ones_like(part))
        _, expected = results(whole, x, torch.ones_like(x))
        torch.testing.assert_close(grads["weight"], expected["weight"])


def checkpoints_come_and_go_whole() -> None:
    import torch.distributed.checkpoint as dcp

    model, whole = stack(), stack()
    state = {name: value.clone() for name, value in whole.state_dict().items()}
    parallel.parallelize(model, dist.group.WORLD, PLAN)
    assert list(model.state_dict()) == list(state)
    gathered = parallel.unshard(model)
    assert all(torch.equal(gathered[name], value) for name, value in state.items())
    other = parallel.parallelize(stack(), dist.group.WORLD, PLAN)
    for p in other.parameters():
        p.data.zero_()
    other.load_state_dict(parallel.shard(other, state))
    assert all(torch.equal(p, q) for p, q in zip(other.parameters(), model.parameters(), strict=True))
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    dcp.save(parallel.dtensors(model), checkpoint_id=folder[0])
    # Read by the same processes, by one, and by a group of another size.
    plain = {name: torch.zeros_like(value) for name, value in state.items()}
    dcp.load(plain, checkpoint_id=folder[0], no_dist=True)
    assert all(torch.equal(plain[name], value) for name, value in state.items())
    for p in other.parameters():
        p.data.zero_()
    loaded = parallel.dtensors(other)
    dcp.load(loaded, checkpoint_id=folder[0])
    other.load_state_dict(parallel.shard(other, loaded))
    assert all(torch.equal(p, q) for p, q in zip(other.parameters(), model.parameters(), strict=True))


def checkpoints_of_two_are_read_by_four() -> None:
    import torch.distributed.checkpoint as dcp

    plan = {"*feedforward.mixer": "features"}
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if dist.get_rank() < 2:
        model = parallel.parallelize(stack(), groups[0], plan)
        dcp.save(parallel.dtensors(model), checkpoint_id=folder[0], process_group=groups[0])
    dist.barrier()
    model = parallel.parallelize(stack(), dist.group.WORLD, plan)
    for p in model.parameters():
        p.data.zero_()
    state = parallel.dtensors(model)
    dcp.load(state, checkpoint_id=folder[0])
    model.load_state_dict(parallel.shard(model, state))
    whole = stack()
    for name, p in whole.named_parameters():
        assert torch.equal(model.get_parameter(name), share_of(model, name, p)), name


test_in_several_processes = Facts({
    2: [
        a_model_divided_in_place_equals_the_whole, halves_of_a_gated_unit_are_divided_one_by_one, a_mesh_is_a_group,
        a_language_model_equals_the_whole, lone_norms_know_that_they_see_a_share_of_the_rows,
        checkpoints_come_and_go_whole,
    ],
    4: [checkpoints_of_two_are_read_by_four],
}).test  # fmt: skip


@pytest.fixture
def group() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_one_process_sums_no_gradients() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        attention = nn.MultiHeadAttention(16, 4, qk_norm=ops.QKNorm)
        for model, plan in ((stack(), PLAN), (attention, {"": "heads"})):
            parallel.parallelize(model, dist.group.WORLD, plan, sequence_dim=-2)
            assert not any(getattr(m, "sum_over", None) for m in model.modules())
    finally:
        dist.destroy_process_group()


def mixed() -> sf.Sequential:
    return sf.Sequential(
        sf.Sequential(OrderedDict(mixer=nn.FeedForward(12, 6))),
        nn.MultiHeadAttention(12, 3),
        nn.MultiHeadAttention(16, 4, 2),
        nn.FeedForward(16, 8),
        sf.Sequential(ops.Linear(16, 8), ops.LayerNorm(8), ops.Linear(8, 16)),
        sf.Sequential(ops.Linear(16, 8), torch.nn.Softmax(-1), ops.Linear(8, 16)),
        sf.Sequential(ops.Linear(16, 8), ops.Tanh(), ops.Linear(8, 8), ops.Tanh(), ops.Linear(8, 16)),
        sf.Sequential(ops.Linear(16, 24), rotary(2), ops.Linear(24, 16)),
        nn.MultiHeadAttention(16, 4, qk_norm=functools.partial(ops.QKNorm, full_width=True)),
    )


WRONG: dict[str, tuple[dict[str, str], str]] = {
    "no such style": ({"1": "columns"}, r"SF106: there is no style 'columns' \(of '1'\)"),
    "no such module": ({"0.mixr": "heads"}, r"SF104: '0\.mixr' matches no module .*\nHint: did you mean '0\.mixer'"),
    "a style that does not fit": ({"0.mixer": "vocab"}, r"SF106 .*position 0 \(FeedForward\): style 'vocab' does not"),
    "features": ({"0.mixer": "features"}, r"SF101 .*position 0 \(Linear\): expects out_features "),
    "heads": ({"1": "heads"}, r"SF101 .*position 7 \(Attention\): expects heads that 4 .*, got 3"),
    "key heads": ({"2": "heads"}, r"SF101 .*position 12 \(Attention\): expects kv_heads .*\nHint: .* not held twice"),
    "no attention": (
        {"3": "heads"},
        r"SF106 .*position 15 \(FeedForward\): style 'heads' needs a Linear, attention and a Linear; it has 0 att",
    ),
    "twice": ({"3": "features", "3.up": "column"}, r"SF106 .*position 15 \(Linear\): the plan names it twice"),
    "heads as a column": ({"2.qkv": "column"}, r"'2\.qkv', position 10 \(Linear\): its column .* heads of Attention"),
    "a softmax between": ({"5": "features"}, r"SF106 .*position 25 \(Sequential\): Softmax between its Linears cannot"),
    "three Linears": ({"6": "features"}, r"style 'features' needs a Linear, an act.*; it has 3 Linears"),
    "angles between": ({"7": "features"}, r"\(Sequential\): RotaryEmbedding between its Linears cannot"),
    "a norm of all heads": ({"8": "heads"}, r"\(MultiHeadAttention\): QKNorm between its Linears cannot"),
    "a norm between": ({"4": "features"}, r"position 20 \(Sequential\): LayerNorm between its Linears cannot"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_divided_is_an_error_before_anything_changes(case: str, group: Any) -> None:
    model, (plan, message) = mixed(), WRONG[case]
    before, text = {n: p.clone() for n, p in model.named_parameters()}, str(model)
    with pytest.raises(sf.InputError, match=message):
        parallel.parallelize(model, group, plan if "3" in plan else {"3": "features", **plan})
    assert str(model) == text
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": [ops.Linear(4, 4)]}, r"divides a torch\.nn\.Module, got list"),
        ({"plan": ["3"]}, r"the plan must be a mapping of names of modules to styles, got \['3'\]\nHint: such as"),
        ({"plan": {3: "features"}}, "the plan must be a mapping of names"),
        ({"sequence_dim": "rows"}, "sequence_dim must be the number of a dimension, got 'rows'"),
    ],
    ids=["model", "a list", "numbers", "sequence_dim"],
)
def test_arguments_of_another_kind_are_refused(given: dict[str, Any], message: str, group: Any) -> None:
    arguments: dict[str, Any] = {"model": mixed(), "plan": {"3": "features"}} | given
    with pytest.raises(sf.InputError, match=f"SF106: .*{message}"):
        parallel.parallelize(arguments.pop("model"), group, arguments.pop("plan"), **arguments)


@pytest.mark.parametrize(
    ("module", "style"),
    [
        (ops.Embedding(8, 16), "column"),
        (ops.Linear(8, 16), "vocab"),
        (nn.FeedForward(16, 8), "row"),
        (LinearCrossEntropy(16, 8), "row"),
    ],
    ids=lambda given: given if isinstance(given, str) else type(given).__name__,
)
def test_a_style_fits_its_own_modules_alone(module: torch.nn.Module, style: str, group: Any) -> None:
    message = rf"SF106 .*{type(module).__name__}.*: style '{style}' does not fit it"
    with pytest.raises(sf.InputError, match=message):
        parallel.parallelize(torch.nn.ModuleDict({"one": module}), group, {"one": style})


def test_a_row_before_a_gated_unit_is_divided_into_one_part_each(group: Any) -> None:
    model = sf.Sequential(ops.Linear(8, 16), ops.SwiGLU())
    parallel.parallelize(model, group, {"0": "row"})
    assert (model[0].weight.shape, len(model[0].shards["weight"].parts)) == ((16, 2), 1)


def test_a_tied_parameter_is_divided_by_all_or_none(group: Any) -> None:
    expected = r"several ways: 'body\.0\.weight' divided, 'head\.weight' whole\nHint: name all of them"
    with pytest.raises(sf.InputError, match=expected):
        parallel.parallelize(LanguageModel(), group, {"body.0": "vocab"})


def test_a_tied_parameter_is_divided_into_the_same_parts(group: Any) -> None:
    model = sf.Sequential(ops.Linear(4, 8, bias=False), ops.SwiGLU(), ops.Linear(4, 8, bias=False))
    model[2].weight = model[0].weight
    with pytest.raises(sf.InputError, match="one parameter would be used in several ways"):
        parallel.parallelize(model, group, {"0": "column", "2": "column"})


def test_a_module_in_two_places_has_its_share_in_both(group: Any) -> None:
    linear = ops.Linear(8, 8)
    model = sf.Sequential(linear, ops.Tanh(), linear)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    parallel.parallelize(model, group, {"0": "column"})
    own = parallel.shard(model, state)
    assert own.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(own[name], value.chunk(4)[1]), name


class Wrapped(torch.nn.Module):
    """A sequence within a module of torch."""

    def __init__(self, *operations: torch.nn.Module) -> None:
        super().__init__()
        self.inner = sf.Sequential(*operations)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def gated(*between: torch.nn.Module) -> sf.Sequential:
    return sf.Sequential(ops.Linear(6, 16), *between, ops.SwiGLU(), ops.Linear(8, 6))


def hooked() -> sf.Sequential:
    model = sf.Sequential(gated())
    model[0].register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (gated, "0"),
        (lambda: gated(ops.Scale(2.0), ops.Dropout(0.1)), "0"),
        (lambda: Wrapped(*gated()), "inner.0"),
        (lambda: sf.Sequential(ops.LayerNorm(6), Wrapped(*gated())), "1.inner.0"),
        (lambda: torch.nn.ModuleList([sf.Sequential(ops.ReLU()), gated()]), "1.0"),
        (hooked, "0.0"),
    ],
    ids=("alone", "through element-wise operations", "in a module", "in a module of a sequence", "in a list", "hooked"),
)
def test_each_half_of_a_column_before_a_gated_unit_is_divided(make: Any, name: str, group: Any) -> None:
    model = make()
    parallel.parallelize(model, group, {name: "column"})
    assert model.get_submodule(name).shards["weight"].parts == (8, 8)


def test_modules_whose_gradients_nobody_sums_over_shards_of_the_rows_are_named(group: Any) -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(6), gated(), torch.nn.Linear(6, 2).requires_grad_(False))
    with pytest.warns(UserWarning, match="^'0': no operation of this library; .* its parameters are parts of a sum"):
        parallel.parallelize(model, group, {"1": "features"}, sequence_dim=-2)


def test_of_many_such_modules_the_first_are_named(group: Any) -> None:
    model = torch.nn.Sequential(gated(), *(torch.nn.LayerNorm(6) for _ in range(6)))
    with pytest.warns(UserWarning, match="^'1', '2', '3', '4' and 2 more: no operation of this library"):
        parallel.parallelize(model, group, {"0": "features"}, sequence_dim=-2)


def test_activations_of_torch_may_stand_between_linears(group: Any) -> None:
    model = sf.Sequential(ops.Linear(6, 8), torch.nn.GELU(), torch.nn.Dropout(0.0), ops.Linear(8, 6))
    parallel.parallelize(model, group, {"": "features"})
    assert (model[0].weight.shape, model[3].weight.shape) == ((2, 6), (6, 2))


def test_learned_positions_cannot_tell_which_rows_they_see(group: Any) -> None:
    model = sf.Sequential(ops.Embedding(8, 16), ops.PositionEmbedding(8, 16), nn.FeedForward(16, 16))
    with pytest.raises(sf.InputError, match=r"position 1 \(PositionEmbedding\): on a sequence shard"):
        parallel.parallelize(model, group, {"0": "vocab", "2": "features"}, sequence_dim=-2)


def test_a_state_of_another_shape_is_an_error(group: Any) -> None:
    model = parallel.parallelize(nn.FeedForward(16, 8), group, {"": "features"})
    state = nn.FeedForward(16, 12).state_dict()
    with pytest.raises(sf.InputError, match=r"SF101 'up\.weight'.*: expects 8 along dimension 0 of the whole, got 12"):
        parallel.shard(model, state)


@pytest.mark.parametrize("follows", [ops.QKNorm(4, 8), ops.RotaryEmbedding(8, style="half"), ops.Attention(8)], ids=str)
def test_a_column_is_not_divided_across_heads(follows: sf.UnfusedOperation, group: Any) -> None:
    model = sf.Sequential(ops.Linear(8, 96), follows)
    with pytest.raises(sf.InputError, match=f"across the heads of {type(follows).__name__}"):
        parallel.parallelize(model, group, {"0": "column"})
