"""Random lists and random mutations between calls, against torch and against mathematics written out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, note, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.testing import seeded_randn
from tests.fuser.fusions import CASES, PAIR, ChainBackward, ChainForward, outcome

WIDTH = 4
EVERY = tuple(dict.fromkeys(f for case in CASES for f in case.fusions))
MADE = ("Linear", "ReLU", "GELU", "Tanh", "LayerNorm", "Sigmoid")


def twins(name: str, seed: int) -> tuple[nn.Module, nn.Module]:
    """An operation and the module of torch, with the same numbers."""
    arguments = {"Linear": (WIDTH, WIDTH), "LayerNorm": (WIDTH,)}.get(name, ())
    mine, its = getattr(ops, name)(*arguments), getattr(nn, name)(*arguments)
    with torch.no_grad():
        for i, (a, b) in enumerate(zip(mine.parameters(), its.parameters(), strict=True)):
            a.copy_(seeded_randn(tuple(a.shape), seed + i))
            b.copy_(a)
    return mine, its


class Mutated(RuleBasedStateMachine):
    """A list and its twin of torch are changed alike in every public way; after each change they compute the same."""

    @initialize(names=st.lists(st.sampled_from(MADE), min_size=1, max_size=4))
    def start(self, names: list[str]) -> None:
        self.seed = 0
        both = [self.made(name) for name in names]
        self.mine = sf.Sequential(*(a for a, _ in both), fusions=(*PAIR, ChainForward, ChainBackward))
        self.its = nn.Sequential(*(b for _, b in both))
        self.mode, self.handles = True, []
        self.fired = [0, 0]

    def made(self, name: str) -> tuple[nn.Module, nn.Module]:
        self.seed += 10
        return twins(name, self.seed)

    def places(self) -> list[tuple[Any, Any]]:
        """Both modules at every place, inside nested lists too."""
        found: list[tuple[Any, Any]] = []
        for (_, a), (_, b) in zip(self.mine.named_modules(), self.its.named_modules(), strict=True):
            if a is not self.mine:
                found.append((a, b))
        return found

    def containers(self) -> list[tuple[Any, Any]]:
        inner = [(a, b) for a, b in self.places() if isinstance(a, sf.Sequential)]
        return [(self.mine, self.its), *inner]

    @rule(data=st.data(), name=st.sampled_from(MADE))
    def insert(self, data: st.DataObject, name: str) -> None:
        a, b = data.draw(st.sampled_from(self.containers()))
        at = data.draw(st.integers(0, len(a)))
        x, y = self.made(name)
        a.insert(at, x), b.insert(at, y)

    @rule(data=st.data(), name=st.sampled_from(MADE))
    def replace(self, data: st.DataObject, name: str) -> None:
        a, b = data.draw(st.sampled_from(self.containers()))
        if len(a):
            at = data.draw(st.integers(-len(a), len(a) - 1))
            a[at], b[at] = self.made(name)

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        a, b = data.draw(st.sampled_from(self.containers()))
        if len(a) > 1:
            at = data.draw(st.integers(0, len(a) - 1))
            del a[at], b[at]

    @rule(names=st.lists(st.sampled_from(MADE), max_size=2))
    def nest(self, names: list[str]) -> None:
        if len(self.places()) < 12:
            both = [self.made(name) for name in names]
            self.mine.append(sf.Sequential(*(a for a, _ in both)))
            self.its.append(nn.Sequential(*(b for _, b in both)))

    @rule()
    def repeat_the_first(self) -> None:
        self.mine.append(self.mine[0]), self.its.append(self.its[0])

    @rule(data=st.data())
    def swap_two(self, data: st.DataObject) -> None:
        i, j = (data.draw(st.integers(0, len(self.mine) - 1)) for _ in range(2))
        for m in (self.mine, self.its):
            m[i], m[j] = m[j], m[i]

    @rule(data=st.data())
    def hook(self, data: st.DataObject) -> None:
        if not self.places():
            return
        for side, module in enumerate(data.draw(st.sampled_from(self.places()))):

            def fire(*_: Any, side: int = side) -> None:
                self.fired[side] += 1

            self.handles.append(module.register_forward_hook(fire))

    @rule()
    def unhook(self) -> None:
        while self.handles:
            self.handles.pop().remove()

    @rule()
    def switch_mode(self) -> None:
        self.mode = not self.mode
        self.mine.train(self.mode), self.its.train(self.mode)

    @rule(data=st.data())
    def freeze(self, data: st.DataObject) -> None:
        if self.places():
            flag = data.draw(st.booleans())
            for module in data.draw(st.sampled_from(self.places())):
                module.requires_grad_(flag)

    @rule(data=st.data())
    def configure(self, data: st.DataObject) -> None:
        for a, b in self.places():
            if isinstance(a, ops.GeLU):
                a.approximate = b.approximate = data.draw(st.sampled_from(["none", "tanh"]))
            if isinstance(a, ops.LayerNorm):
                a.eps = b.eps = data.draw(st.sampled_from([1e-5, 0.5]))

    @rule(data=st.data())
    def replace_parameters(self, data: st.DataObject) -> None:
        for a, b in self.places():
            if isinstance(a, ops.Linear) and data.draw(st.booleans()):
                self.seed += 10
                for m in (a, b):
                    m.weight = nn.Parameter(seeded_randn((WIDTH, WIDTH), self.seed))
                    m.bias = (
                        data.draw(st.just(None)) if self.seed % 20 else nn.Parameter(seeded_randn((WIDTH,), self.seed))
                    )

    @rule()
    def load(self) -> None:
        self.seed += 10
        state = {
            k: seeded_randn(tuple(v.shape), self.seed + i) for i, (k, v) in enumerate(self.mine.state_dict().items())
        }
        self.mine.load_state_dict(copy.deepcopy(state), assign=bool(self.seed % 20))
        self.its.load_state_dict(copy.deepcopy(state), assign=bool(self.seed % 20))

    @rule(rules=st.sampled_from([(), PAIR, (ChainForward,), EVERY]))
    def change_the_rule_set(self, rules: tuple[type, ...]) -> None:
        self.mine.fusions = rules

    @rule()
    def copy_deeply(self) -> None:
        self.unhook()
        self.mine, self.its = copy.deepcopy((self.mine, self.its))

    @invariant()
    def computes_the_same(self) -> None:
        x = seeded_randn((3, WIDTH), 1).requires_grad_()
        z = x.detach().clone().requires_grad_()
        assert [n for n, _ in self.mine.named_parameters()] == [n for n, _ in self.its.named_parameters()]
        before = list(self.fired)
        with sf.fusing(on_error="raise"):
            got = outcome(self.mine, {"x": x, **dict(self.mine.named_parameters())}, x)
        expected = outcome(self.its, {"x": z, **dict(self.its.named_parameters())}, z)
        assert self.fired[0] - before[0] == self.fired[1] - before[1]
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(got[key], value, rtol=2e-3, atol=2e-3, msg=lambda m, key=key: f"{key}: {m}")


def test_every_public_mutation_is_seen_at_the_next_call() -> None:
    fewer = settings(stateful_step_count=20, max_examples=max(settings().max_examples // 2, 1))
    run_state_machine_as_test(Mutated, settings=fewer)


# Random lists with channels, in a language small enough to be interpreted twice.

Node = tuple[Any, ...]


def programs(depth: int = 2) -> st.SearchStrategy[list[Node]]:
    leaf = st.sampled_from([("tanh",), ("gelu",), ("relu",), ("scale",), ("bias",), ("linear",), ("barrier",)])
    node = leaf
    if depth:
        inner = programs(depth - 1)
        node = leaf | st.tuples(st.sampled_from(["residual", "nested", "hooked"]), inner)
    return st.lists(node, min_size=1, max_size=4)


class Barrier(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1.5


PLAIN: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], Tensor]]] = {
    "tanh": (ops.Tanh, torch.tanh),
    "gelu": (ops.GeLU, torch.nn.functional.gelu),
    "relu": (ops.ReLU, torch.relu),
    "scale": (lambda: ops.Scale(-0.7), lambda x: x * -0.7),
    "barrier": (Barrier, lambda x: x * 1.5),
}
OTHERS: dict[str, Callable[..., nn.Module]] = {
    "bias": lambda: ops.Bias(WIDTH), "linear": lambda: ops.Linear(WIDTH, WIDTH),
    "residual": ops.Residual, "nested": sf.Sequential, "hooked": sf.Sequential,
}  # fmt: skip


def built(program: list[Node]) -> list[nn.Module]:
    made: list[nn.Module] = []
    for kind, *rest in program:
        make = PLAIN[kind][0] if kind in PLAIN else OTHERS[kind]
        made.append(make(*built(rest[0]), fusions=EVERY) if rest else make())
        if kind == "hooked":
            made[-1].register_forward_hook(lambda *_: None)
    return made


def interpreted(program: list[Node], modules: Any, p: dict[int, Tensor], x: Tensor) -> Tensor:
    for (kind, *rest), module in zip(program, modules, strict=True):
        if kind in PLAIN:
            x = PLAIN[kind][1](x)
        elif rest:
            y = interpreted(rest[0], module, p, x)
            x = x + y if kind == "residual" else y
        else:
            x = (x @ p[id(module.weight)].mT if kind == "linear" else x) + p[id(module.bias)]
    return x


@given(
    program=programs(),
    channels=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.sampled_from("ab")), max_size=2),
    frozen=st.integers(0, 2**10 - 1),
    rules=st.sampled_from([EVERY, EVERY[::-1], PAIR]),
)
def test_random_lists_with_channels_compute_what_they_say(
    program: list[Node], channels: list[tuple[int, int, str]], frozen: int, rules: tuple[type, ...]
) -> None:
    modules = built(program)
    # Each channel leaves before one place and returns at a later one; a name is used once.
    ends: dict[str, tuple[int, int]] = {}
    for first, last, name in channels:
        a, b = sorted((first % (len(modules) + 1), last % (len(modules) + 1)))
        ends.setdefault(name, (a, b))
    whole: list[nn.Module] = []
    for at in range(len(modules) + 1):
        whole += [ops.Add(name) for name, (a, b) in ends.items() if b == at and a < at]
        whole += [ops.Fork(name) for name, (a, b) in ends.items() if a == at]
        whole += [ops.Add(name) for name, (a, b) in ends.items() if a == b == at]
        whole += modules[at : at + 1]
    model = sf.Sequential(*whole, fusions=rules)
    with torch.no_grad():
        for i, q in enumerate(model.parameters()):
            q.copy_(seeded_randn(tuple(q.shape), 30 + i) / 2)
            q.requires_grad_(not frozen >> i % 10 & 1)
    x = seeded_randn((3, WIDTH), 1).requires_grad_(not frozen & 512)
    note(str(model))

    wide = {id(q): q.detach().double().requires_grad_(q.requires_grad) for q in model.parameters()}
    z = x.detach().double().requires_grad_(x.requires_grad)

    def plain(x: Tensor) -> Tensor:
        sides: dict[str, Tensor] = {}
        for at in range(len(modules) + 1):
            x = sum([sides[n] for n, (a, b) in ends.items() if b == at and a < at], x)
            sides |= {n: x for n, (a, b) in ends.items() if a == at}
            x = sum([sides[n] for n, (a, b) in ends.items() if a == b == at], x)
            x = interpreted(program[at : at + 1], modules[at : at + 1], wide, x)
        return x

    named = dict(model.named_parameters())
    with sf.fusing(on_error="raise"):
        got = outcome(model, {"x": x, **named}, x)
    with sf.fusing(False):
        unfused = outcome(model, {"x": x, **named}, x)
    truth = outcome(plain, {"x": z, **{n: wide[id(q)] for n, q in named.items()}}, z)
    assert got.keys() == unfused.keys() == truth.keys()
    for key, value in truth.items():
        assert value is not None
        scale = float(value.abs().max()) + 1
        torch.testing.assert_close(
            got[key].double(), value, rtol=1e-3, atol=1e-4 * scale, msg=lambda m, k=key: f"{k}: {m}"
        )
        torch.testing.assert_close(unfused[key].double(), value, rtol=1e-3, atol=1e-4 * scale)


@pytest.mark.parametrize("where", ["a list", "behind barriers", "under a plan"])
def test_a_bias_taken_out_of_the_dictionary_of_parameters_is_gone(where: str) -> None:
    linear = ops.Linear(4, 4)
    around = [ops.Fork(), ops.Dropout(0.5), nn.Softplus()] if where == "behind barriers" else []
    end = [ops.Fork(), nn.Softplus(), ops.Add(), ops.Add()] if around else [ops.Tanh()]
    model, x = sf.Sequential(*around, linear, *end), torch.randn(3, 4)
    model(x)
    linear._parameters["bias"] = None
    if where == "under a plan":
        assert "Bias" not in model.plan(x).names
    torch.manual_seed(3)
    y = model(x)
    torch.manual_seed(3)
    fresh = sf.Sequential(*around, linear, *end)(x)
    torch.testing.assert_close(y, fresh)
    y.sum().backward()
    assert linear.weight.grad is not None


def test_a_bias_taken_out_of_the_dictionary_of_parameters_is_gone_under_vmap() -> None:
    linear, x = ops.Linear(4, 4), torch.randn(3, 4)
    model = torch.func.vmap(sf.Sequential(linear, ops.Tanh()))
    model(x)
    linear._parameters["bias"] = None
    torch.testing.assert_close(model(x), (x @ linear.weight.t()).tanh())


@pytest.mark.parametrize(
    ("model", "name", "x"),
    [
        ([ops.Linear(4, 4, bias=False)], "weight", torch.randn(3, 4)),
        ([ops.Bias(4), ops.GeLU()], "bias", torch.randn(3, 4)),
        ([ops.PositionEmbedding(3, 4)], "weight", torch.randn(3, 4)),
        ([ops.Embedding(3, 4)], "weight", torch.tensor([0, 2])),
    ],
    ids=["Linear", "Bias", "PositionEmbedding", "Embedding"],
)
def test_a_parameter_that_an_operation_cannot_do_without_is_missed_by_name(
    model: list[nn.Module], name: str, x: Tensor
) -> None:
    run = sf.Sequential(*model)
    run(x)
    model[0]._parameters[name] = None
    with pytest.raises(sf.errors.InputError, match=rf"SF106.*{type(model[0]).__name__}.*{name} is None"):
        run(x)


def test_members_put_in_another_order_run_in_that_order() -> None:
    model, x = sf.Sequential(ops.Scale(2.0), ops.Tanh()), seeded_randn((7, 5), 0)
    model(x)
    model._modules["0"] = model._modules.pop("0")
    ops.Tanh()  # children that change place tell nobody: an attribute that is set anywhere does
    torch.testing.assert_close(model(x), 2 * torch.tanh(x))
