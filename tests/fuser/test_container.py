"""A `Sequential` is a `torch.nn.Sequential`: the same methods, keys, errors and numbers, and states load both ways."""

from __future__ import annotations

import ast
import copy
import io
import itertools
import operator
import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from tests.fuser.fusions import (
    PAIR,
    BiasReLU,
    assert_like_torch,
    fused_names,
    randomized,
    run,
    tensor,
)
from tests.fuser.kit import PlainResidual

Pair = tuple[sf.Sequential, nn.Sequential]


def pair(*more: int) -> Pair:
    """A fused sequence and its torch twin: the same shapes and keys, four modules by default."""
    widths = more or (5, 5, 5)
    mine: list[nn.Module] = []
    its: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        mine += [ops.Linear(a, b), ops.ReLU()]
        its += [nn.Linear(a, b), nn.ReLU()]
    return randomized(sf.Sequential(*mine, fusions=PAIR)), nn.Sequential(*its)


def same_structure(mine: nn.Module, its: nn.Module) -> None:
    assert list(mine._modules) == list(its._modules)
    assert list(mine.state_dict()) == list(its.state_dict())
    assert [n for n, _ in mine.named_parameters()] == [n for n, _ in its.named_parameters()]
    for a, b in zip(mine.children(), its.children(), strict=True):
        assert type(a).__name__.lower() == type(b).__name__.lower()


def test_it_is_one() -> None:
    model = sf.Sequential(ops.Tanh())
    assert isinstance(model, nn.Sequential)
    assert isinstance(ops.Residual(ops.Tanh()), nn.Sequential)


def test_a_name_in_place_of_a_fusion_set_is_refused_with_what_is_meant() -> None:
    with pytest.raises(sf.PluginError, match=r"such as sf.fusions.default, not the text 'default'"):
        sf.Sequential(ops.GeLU(), fusions="default")  # pyright: ignore[reportArgumentType]


def test_an_empty_list_is_the_identity_and_can_be_filled() -> None:
    model = sf.Sequential(fusions=PAIR)
    x = tensor(7, 5)
    assert torch.equal(model(x), x)
    assert len(model.plan(x).names) == 0
    model.append(randomized(ops.Linear(5, 3)))
    assert_like_torch(model, nn.Sequential(nn.Linear(5, 3)), x)
    outer = sf.Sequential(ops.Tanh(), sf.Sequential(), fusions=PAIR)
    assert torch.equal(outer(x), torch.tanh(x))
    outer[1].extend([randomized(ops.Linear(5, 3)), ops.ReLU()])
    assert_like_torch(outer, nn.Sequential(nn.Tanh(), nn.Sequential(nn.Linear(5, 3), nn.ReLU())), x)
    assert fused_names(outer.plan(x))[0] == ["BiasReLU"]


# Each mutation is applied to both after a first call, so that a stale plan would show.


@pytest.mark.parametrize(
    "mistake",
    [
        lambda m: m[9], lambda m: m[-9], lambda m: m.__delitem__(9), lambda m: m.insert(9, ops.Tanh()),
        lambda m: m.insert(0, 3), lambda m: operator.add(m, [ops.Tanh()]), lambda m: m * 0,
        lambda m: m * "2", lambda m: m.pop(9), lambda m: m.append(3), lambda m: m.extend(3),
        lambda m: m.add_module("a.b", ops.Tanh()),
    ],
    ids=[
        "get", "get_negative", "del", "insert", "insert_no_module", "add_list", "mul_zero", "mul_text", "pop", "append",
        "extend", "dotted_name",
    ],
)  # fmt: skip
def test_mistakes_raise_what_torch_raises(mistake: Callable[[Any], Any]) -> None:
    mine, its = pair()
    with pytest.raises(Exception) as expected:  # noqa: PT011 - which one it is, torch says
        mistake(its)
    with pytest.raises(type(expected.value)):
        mistake(mine)
    same_structure(mine, its)


@pytest.mark.parametrize(
    "part", [slice(1, 3), slice(None), slice(None, None, 2), slice(-2, None), slice(3, 1)], ids=str
)
def test_slices_stay_fused_and_share_parameters(part: slice) -> None:
    mine, its = pair()
    cut, twin = mine[part], its[part]
    assert type(cut) is sf.Sequential
    assert cut.fusions == mine.fusions == PAIR
    same_structure(cut, twin)
    assert [id(p) for p in cut.parameters()] == [id(p) for m in list(mine)[part] for p in m.parameters()]
    its.load_state_dict(mine.state_dict())
    x = tensor(7, 5)
    torch.testing.assert_close(cut(x), twin(x))


def test_slices_of_a_list_with_names_keep_the_names() -> None:
    model = sf.Sequential(OrderedDict(a=ops.Tanh(), b=ops.Linear(5, 5), c=ops.ReLU()), fusions=PAIR)
    assert list(model[1:]._modules) == ["b", "c"]
    assert model[1:].plan(tensor(7, 5)).count("BiasReLU") == 1
    assert model.b is model[1]


class Doubled(sf.Sequential):
    """A sequence with its own `forward`."""

    def forward(self, x: Tensor, **channels: Tensor) -> Any:
        return 2 * super().forward(x, **channels)


class DoubledOfTorch(nn.Sequential):
    """The same of torch."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_a_slice_of_a_subclass_is_of_that_class_as_in_torch_and_a_sum_or_product_is_not() -> None:
    mine = randomized(Doubled(ops.Linear(5, 5), ops.ReLU(), ops.Tanh(), fusions=PAIR, memory="lean"))
    its = DoubledOfTorch(nn.Linear(5, 5), nn.ReLU(), nn.Tanh())
    its.load_state_dict(mine.state_dict())
    assert type(its[:2]) is DoubledOfTorch
    assert type(mine[:2]) is Doubled
    x = tensor(7, 5)
    torch.testing.assert_close(mine[:2](x), its[:2](x))
    for a, b in ((mine[:2], its[:2]), (mine + mine, its + its), (mine * 2, its * 2)):
        assert (type(a) is Doubled) == (type(b) is DoubledOfTorch)
        assert isinstance(a, sf.Sequential)
        assert (a.fusions, a.memory) == (PAIR, "lean")
        same_structure(a, b)
    cut = ops.Residual(ops.Tanh(), ops.ReLU())[:1]
    assert type(cut) is ops.Residual
    torch.testing.assert_close(cut(x), x + torch.tanh(x))


def test_a_slice_of_a_class_that_is_not_made_from_modules_is_a_sequential() -> None:
    class Widths(sf.Sequential):
        def __init__(self, *widths: int, act: nn.Module) -> None:
            super().__init__(*(ops.Linear(a, b) for a, b in itertools.pairwise(widths)), act, fusions=PAIR)

    class Fixed(sf.Sequential):
        def __init__(self) -> None:
            super().__init__(ops.Linear(5, 5), ops.ReLU(), fusions=PAIR)

    for model in (Widths(5, 5, act=ops.ReLU()), Fixed()):
        cut = model[:2]
        assert type(cut) is sf.Sequential
        assert cut.fusions == PAIR
        torch.testing.assert_close(cut(x := tensor(7, 5)), model(x))


def test_sums_and_products_stay_fused() -> None:
    mine, its = pair()
    other, its_other = pair(5, 4)
    for a, b in ((mine + other, its + its_other), (mine + its_other, its + its_other)):
        assert type(a) is sf.Sequential
        assert a.fusions == PAIR
        same_structure(a, b)
    for a, b in ((mine * 3, its * 3), (3 * mine, 3 * its)):
        assert type(a) is sf.Sequential
        assert a.fusions == PAIR
        same_structure(a, b)
        assert len({id(p) for p in a.parameters()}) == 4
        b.load_state_dict(a.state_dict())
        x = tensor(7, 5)
        torch.testing.assert_close(a(x), b(x))
    total = mine + other
    x = tensor(7, 5)
    assert total.plan(x).count("BiasReLU") == 3
    assert len(mine) == 4


def test_adding_in_place_keeps_the_object() -> None:
    mine, its = pair()
    before = mine
    mine += nn.Sequential(ops.Tanh())
    its += nn.Sequential(nn.Tanh())
    assert mine is before
    assert_like_torch(mine, its, tensor(7, 5))


def test_an_ordered_dict_names_the_keys() -> None:
    named = OrderedDict(up=ops.Linear(5, 4), act=ops.ReLU(), down=ops.Linear(4, 5))
    model = randomized(sf.Sequential(named, fusions=PAIR))
    twin = nn.Sequential(OrderedDict(up=nn.Linear(5, 4), act=nn.ReLU(), down=nn.Linear(4, 5)))
    same_structure(model, twin)
    assert_like_torch(model, twin, tensor(7, 5))
    assert model.plan(tensor(7, 5)).paths == ("up", "up.bias", "act", "down", "down.bias")


def test_nested_lists_are_expanded_in_place_and_fuse_across_borders() -> None:
    model = randomized(
        sf.Sequential(
            sf.Sequential(ops.Linear(5, 4)), sf.Sequential(sf.Sequential(ops.ReLU()), ops.Linear(4, 5)), fusions=PAIR
        )
    )
    twin = nn.Sequential(nn.Sequential(nn.Linear(5, 4)), nn.Sequential(nn.Sequential(nn.ReLU()), nn.Linear(4, 5)))
    x = tensor(7, 5)
    same_structure(model, twin)
    assert_like_torch(model, twin, x)
    plan = model.plan(x)
    assert fused_names(plan) == (["BiasReLU"], ["BiasReLUBack"])
    assert plan.paths == ("0.0", "0.0.bias", "1.0.0", "1.1", "1.1.bias")


def test_the_outer_list_decides_which_fusions_are_used() -> None:
    inner = sf.Sequential(ops.Linear(5, 4), ops.ReLU(), fusions=PAIR)
    x = tensor(7, 5)
    assert sf.Sequential(inner, fusions=()).plan(x).count("BiasReLU") == 0
    assert sf.Sequential(sf.Sequential(*inner, fusions=()), fusions=PAIR).plan(x).count("BiasReLU") == 1
    assert inner.plan(x).count("BiasReLU") == 1


def test_the_rule_set_is_a_value_that_can_be_replaced() -> None:
    mine, _ = pair()
    x = tensor(7, 5)
    expected = mine(x)
    mine.fusions = ()
    assert mine.fusions == ()
    assert mine.plan(x).count("BiasReLU") == 0
    assert torch.equal(mine(x), expected)
    mine.fusions = [BiasReLU]
    assert mine.fusions == (BiasReLU,)
    assert fused_names(mine.plan(x)) == (["BiasReLU", "BiasReLU"], [])


@pytest.mark.parametrize("bad", [(BiasReLU(),), (ops.Bias,), "default", (sf.ForwardFusion,), (None,), 3], ids=repr)
def test_a_rule_set_that_is_none_is_refused_when_it_is_given(bad: Any) -> None:
    with pytest.raises((sf.PluginError, TypeError), match=r"[Ff]usion"):
        sf.Sequential(ops.Tanh(), fusions=bad)
    model = sf.Sequential(ops.Tanh(), fusions=PAIR)
    with pytest.raises((sf.PluginError, TypeError), match=r"[Ff]usion"):
        model.fusions = bad
    assert model.fusions == PAIR
    assert model.plan(tensor(7, 5)).names == ("Tanh",)


def test_one_fusion_is_a_rule_set() -> None:
    assert sf.Sequential(ops.Tanh(), fusions=BiasReLU).fusions == (BiasReLU,)


def test_a_fusion_that_misses_its_pass_is_refused_when_it_is_given() -> None:
    class Misnamed(sf.ForwardFusion):
        bias: ops.Bias
        act: ops.ReLU

        def run(self, x: Tensor) -> Any: ...

    with pytest.raises(sf.PluginError, match="Misnamed"):
        sf.Sequential(ops.Bias(5), ops.ReLU(), fusions=(Misnamed,))


def test_repr_is_that_of_torch_with_our_operations() -> None:
    mine, its = pair()
    names = [[line.split("(")[:2] for line in repr(m).split("\n")] for m in (mine, its)]
    assert [line[0] for line in names[0]] == [line[0] for line in names[1]]
    assert repr(mine).count("Linear(") == 2
    assert "bias=False" in repr(ops.Residual(ops.Linear(5, 4, bias=False)))
    assert repr(ops.Residual(ops.Tanh())).startswith("Residual(")


# Checkpoints.


class HandWritten(nn.Module):
    """A residual block as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.up, self.act, self.down = nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def test_a_residual_with_the_names_of_a_hand_written_block_takes_its_checkpoint() -> None:
    twin = randomized(HandWritten())
    model = ops.Residual(OrderedDict(norm=ops.LayerNorm(5), up=ops.Linear(5, 7), act=ops.GeLU(), down=ops.Linear(7, 5)))
    assert model.load_state_dict(twin.state_dict(), strict=True) == ([], [])
    assert_like_torch(model, twin, tensor(7, 5))


def test_missing_unexpected_and_misshaped_keys_are_reported_as_in_torch() -> None:
    mine, its = pair()
    good = its.state_dict()
    for change in ({"9.weight": torch.ones(1)}, {"0.weight": torch.ones(3, 3)}):
        with pytest.raises(RuntimeError) as expected:
            its.load_state_dict({**good, **change})
        with pytest.raises(RuntimeError) as found:
            mine.load_state_dict({**good, **change})
        assert str(found.value) == str(expected.value)
    less = {k: v for k, v in good.items() if k != "2.bias"}
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "2.bias"'):
        mine.load_state_dict(less)
    assert mine.load_state_dict(less, strict=False) == (["2.bias"], [])


def test_a_subclass_of_the_user_is_a_container_with_its_own_call() -> None:
    inner = randomized(Doubled(ops.Linear(5, 5), ops.ReLU(), fusions=PAIR))
    model = sf.Sequential(ops.Tanh(), inner, ops.Scale(3), fusions=PAIR)
    x = tensor(7, 5)
    torch.testing.assert_close(model(x), 6 * torch.relu(inner[0](torch.tanh(x))))
    plan = model.plan(x)
    assert [(a.at, a.name) for a in plan.eager] == [(1, "Doubled")]
    assert "subclass" in plan.eager[0].reason
    assert inner.plan(x).count("BiasReLU") == 1


def test_a_subclass_that_only_builds_itself_runs_as_what_it_is() -> None:
    class Block(sf.Sequential):
        def __init__(self, width: int) -> None:
            super().__init__(ops.Linear(width, width), ops.ReLU(), fusions=PAIR)

    model = randomized(sf.Sequential(Block(5), Block(5)))
    twin = nn.Sequential(nn.Sequential(nn.Linear(5, 5), nn.ReLU()), nn.Sequential(nn.Linear(5, 5), nn.ReLU()))
    assert_like_torch(model, twin, tensor(7, 5))
    cut = model[0][:1]
    assert isinstance(cut, sf.Sequential)
    assert len(cut) == 1


def test_the_engine_is_no_part_of_the_module_tree() -> None:
    mine, its = pair()
    mine(tensor(7, 5))
    assert [n for n, _ in mine.named_modules()] == [n for n, _ in its.named_modules()]
    assert [n for n, _ in mine.named_children()] == [n for n, _ in its.named_children()]


# Keys under other names.


def test_remapped_keys_of_a_hand_written_block_load_strictly_and_go_back() -> None:
    twin = randomized(nn.ModuleDict({"layers": nn.ModuleList([HandWritten(), HandWritten()])}))
    block = [ops.LayerNorm(5), ops.Linear(5, 7), ops.GeLU(), ops.Linear(7, 5)]
    model = sf.Sequential(ops.Residual(*copy.deepcopy(block)), ops.Residual(*copy.deepcopy(block)))
    names = {"layers.*.norm": "*.0", "layers.*.up": "*.1", "layers.*.down": "*.3"}
    state = sf.remap_keys(twin.state_dict(), names)
    assert list(state) == list(model.state_dict())
    assert model.load_state_dict(state, strict=True) == ([], [])
    x = tensor(7, 5)
    torch.testing.assert_close(model(x), twin["layers"][1](twin["layers"][0](x)))
    back = sf.remap_keys(model.state_dict(), {new: old for old, new in names.items()})
    assert list(back) == list(twin.state_dict())
    for key, value in twin.state_dict().items():
        assert torch.equal(back[key], value)


def test_remapping_renames_whole_components_longest_first_and_keeps_the_tensors() -> None:
    state = {k: torch.ones(1) for k in ("up.weight", "upper.weight", "up.proj.weight", "rest.bias", "bias")}
    renamed = sf.remap_keys(state, {"up": "0", "up.proj": "1.2", "bias": "shift"})
    assert list(renamed) == ["0.weight", "upper.weight", "1.2.weight", "rest.bias", "shift"]
    assert all(a is b for a, b in zip(renamed.values(), state.values(), strict=True))
    assert next(iter(state)) == "up.weight"


def test_remapping_to_nothing_takes_a_prefix_away() -> None:
    state = {"_orig_mod.0.weight": torch.ones(2), "_orig_mod.1.bias": torch.zeros(2)}
    assert list(sf.remap_keys(state, {"_orig_mod": ""})) == ["0.weight", "1.bias"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"norms": "0"}, r"'norms' matches no key\nHint: did you mean 'norm'"),
        ({"norm": "0", "up": "0"}, "two keys become '0.weight'"),
        ({"norm": "up"}, "two keys become 'up.weight'"),
        ({"norm.*": "*.*"}, r"'norm\.\*'"),
    ],
    ids=["no_match", "collision", "collision_with_what_stays", "more_stars_than_matched"],
)
def test_remapping_that_would_lose_a_key_is_an_error(names: dict[str, str], message: str) -> None:
    state = {"norm.weight": torch.ones(1), "up.weight": torch.ones(1)}
    with pytest.raises(sf.InputError, match=message):
        sf.remap_keys(state, names)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (ops.GeLU, r"not the class GeLU; give an instance, GeLU\(\.\.\.\)"),
        ([ops.GeLU()], r"not a list of them; write Sequential\(\*operations\)"),
        ({"act": ops.GeLU()}, "or one OrderedDict of them, not a dict"),
        (torch.relu, "not <built-in method relu .*>; a function needs a torch.nn.Module around it"),
    ],
    ids=["class", "list", "dict", "function"],
)
def test_what_is_no_module_is_an_error_that_says_what_to_write(given: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"^Sequential takes modules, {message}$"):
        sf.Sequential(given)


PACKAGE = Path(sf.__file__).parent


def block(kit: Any, residual: Any) -> list[nn.Module]:
    return [
        kit.LayerNorm(5), kit.Linear(5, 4), kit.ReLU(),
        residual(kit.RMSNorm(4), kit.Linear(4, 4, bias=False), kit.Tanh()), kit.Linear(4, 3),
    ]  # fmt: skip


def nested_pair() -> tuple[sf.Sequential, nn.Sequential]:
    mine = randomized(sf.Sequential(*block(ops, ops.Residual), fusions=PAIR))
    its = nn.Sequential(*block(nn, PlainResidual))
    return mine, its


def same(mine: nn.Module, its: nn.Module) -> None:
    x = tensor(7, 5)
    got, expected = run(mine, x), run(its, x.detach().requires_grad_())
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_states_travel_both_ways_whether_fused_or_not() -> None:
    mine, its = nested_pair()
    x = tensor(7, 5)
    assert fused_names(mine.plan(x))[0] == ["BiasReLU"]
    mine(x).sum().backward()
    assert its.load_state_dict(mine.state_dict(), strict=True) == ([], [])
    same(mine, its)
    fresh, _ = nested_pair()
    with sf.fusing(False):
        assert fresh.load_state_dict(its.state_dict(), strict=True) == ([], [])
    same(fresh, its)


def test_a_state_is_saved_without_pickled_code() -> None:
    mine, its = nested_pair()
    mine(tensor(7, 5))
    stream = io.BytesIO()
    torch.save(mine.state_dict(), stream)
    stream.seek(0)
    its.load_state_dict(torch.load(stream, weights_only=True), strict=True)
    same(mine, its)


def test_safetensors_round_trip(tmp_path: Path) -> None:
    mine, its = nested_pair()
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_model(mine, str(path))
    missing, unexpected = safetensors.torch.load_model(its, str(path))
    assert (list(missing), list(unexpected)) == ([], [])
    same(mine, its)
    assert set(safetensors.torch.load_file(path)) == set(its.state_dict())
    safetensors.torch.save_model(its, str(path))
    other, _ = nested_pair()
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    safetensors.torch.load_model(other, str(path))
    same(other, its)


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_distributed_checkpoint_round_trip(tmp_path: Path) -> None:
    mine, its = nested_pair()
    dcp.save({"model": mine.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    state = {"model": its.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    its.load_state_dict(state["model"], strict=True)
    same(mine, its)


def test_nothing_but_parameters_is_in_any_state() -> None:
    made = [getattr(ops, name) for name in ops.__all__]
    arguments: dict[str, tuple[Any, ...]] = {
        "Attention": (2,), "CrossAttention": (2,), "Embedding": (7, 5), "PositionEmbedding": (7, 5), "QKNorm": (4, 2),
        "MergedLinear": (5, (4, 2)), "LayerScale": (5,), "Transpose": (0, 1), "Clamp": (1.0,),
        "Linear": (5, 4), "Bias": (5,), "LayerNorm": (5,), "RMSNorm": (5,), "Scale": (2.0,), "Reshape": (5, 1),
        "GroupedLinear": (3, 5, 4), "Permute": (3, 2), "Route": (5, 3, 2), "L2Norm": (5,), "ScaledSwiGLU": ("f",),
    }  # fmt: skip
    named = {"RotaryEmbedding": {"heads": 2, "style": "half"}}
    for cls in made:
        operation = cls(*arguments.get(cls.__name__, ()), **named.get(cls.__name__, {}))
        assert list(operation.state_dict()) == [n for n, _ in operation.named_parameters()], cls
        assert list(operation.buffers()) == []
        assert cls.get_extra_state is nn.Module.get_extra_state


def test_extra_state_of_another_library_is_ignored_with_a_warning_and_never_unpickled(tmp_path: Path) -> None:
    mine, its = nested_pair()
    marker = tmp_path / "ran"

    class Malicious:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(marker),)

    blob = torch.frombuffer(bytearray(pickle.dumps(Malicious())), dtype=torch.uint8)
    state = OrderedDict({**randomized(its, 70).state_dict(), "1._extra_state": blob, "3.1._extra_state": blob})
    with pytest.warns(UserWarning, match=r"1\._extra_state"):
        assert mine.load_state_dict(state, strict=True) == ([], [])
    assert "1._extra_state" in state
    assert not marker.exists()
    same(mine, its)


def test_the_package_neither_unpickles_nor_loads_with_code() -> None:
    found: list[str] = []
    for source in sorted(PACKAGE.rglob("*.py")):
        text = source.read_text()
        # The kit pickles its arguments and reads them back.
        if source.parent.name == "testing" or not re.search(r"pickle|shelve|marshal|dill|torch\.load", text):
            continue
        for node in ast.walk(ast.parse(text)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            module = getattr(node, "module", None) or ""
            if {"pickle", "shelve", "marshal", "dill", "cloudpickle"} & {*names, module}:
                found.append(f"{source.name}:{node.lineno}: {ast.unparse(node)}")
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
                if called in ("torch.load", "pickle.loads", "pickle.load") and keywords.get("weights_only") != "True":
                    found.append(f"{source.name}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


def test_no_operation_touches_an_autograd_context_or_a_private_buffer() -> None:
    for source in sorted((PACKAGE / "ops").glob("*.py")):
        names = {n.id for n in ast.walk(ast.parse(source.read_text())) if isinstance(n, ast.Name)}
        assert "ctx" not in names, source.name
