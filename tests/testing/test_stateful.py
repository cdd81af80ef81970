"""A `Sequential` that is changed at random behaves as a `torch.nn.Sequential` of the same modules."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.testing import seeded_randn

from .kinds import KINDS

FUSIONS = (*KINDS, *sf.fusions.default)
WIDTH = 6
TWINS = {
    "Linear": lambda: (ops.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)),
    "Linear without bias": lambda: (ops.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)),
    "LayerNorm": lambda: (ops.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)),
    "LayerNorm without bias": lambda: (ops.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)),
    "RMSNorm": lambda: (ops.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)),
    "GeLU": lambda: (ops.GeLU(), nn.GELU()),
    "GeLU by tanh": lambda: (ops.GeLU("tanh"), nn.GELU("tanh")),
    "ReLU": lambda: (ops.ReLU(), nn.ReLU()),
    "SiLU": lambda: (ops.SiLU(), nn.SiLU()),
    "Sigmoid": lambda: (ops.Sigmoid(), nn.Sigmoid()),
    "Tanh": lambda: (ops.Tanh(), nn.Tanh()),
    "Identity": lambda: (ops.Identity(), nn.Identity()),
    "Dropout": lambda: (ops.Dropout(0.0), nn.Dropout(0.0)),
    "a barrier": lambda: (nn.Softplus(), nn.Softplus()),
    "a barrier with parameters": lambda: (nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)),
    "nested": lambda: pair(("Linear", "GeLU")),
    "nested and empty": lambda: pair(()),
}


def pair(kinds: tuple[str, ...]) -> tuple[sf.Sequential, nn.Sequential]:
    made = [TWINS[kind]() for kind in kinds]
    return sf.Sequential(*(ours for ours, _ in made), fusions=FUSIONS), nn.Sequential(*(theirs for _, theirs in made))


class Double:
    """A hook that doubles the output, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        self.calls += 1
        return 2 * out


class Negate(Double):
    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        self.calls += 1
        return (-args[0],)


class Count(Double):
    def __call__(self, module: nn.Module, d_input: object, d_output: object) -> None:
        self.calls += 1


REGISTER = {
    "forward": (nn.Module.register_forward_hook, Double),
    "forward pre": (nn.Module.register_forward_pre_hook, Negate),
    "full backward": (nn.Module.register_full_backward_hook, Count),
}

# torch warns so of a hook on the first module if the input needs no gradient.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")
MOST = 12  # modules, nested ones counted
kinds = st.sampled_from(list(TWINS))
places = st.integers(0, 2 * MOST)


class InStep(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ours, self.theirs = pair(("Linear", "LayerNorm", "GeLU", "Linear", "Dropout"))
        self.numbers = 0
        self.hooks: list[tuple] = []
        self.fusions: tuple = FUSIONS
        self.ours.double()
        self.theirs.double()
        self.match(self.ours, self.theirs)

    # Preconditions of the rules.

    def fresh(self, kind: str) -> tuple[nn.Module, nn.Module]:
        twins = TWINS[kind]()
        for module in twins:
            module.to(self.dtype).train(self.ours.training)
        self.match(*twins)
        return twins

    def match(self, ours: nn.Module, theirs: nn.Module) -> None:
        """Gives both the same random parameters."""
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            self.numbers += 1
            p.data = 0.7 * seeded_randn(tuple(p.shape), self.numbers, dtype=p.dtype)
            q.data = p.data.clone()

    @property
    def dtype(self) -> torch.dtype:
        return next((p.dtype for p in self.theirs.parameters()), torch.float64)

    def container(self, place: int) -> tuple[nn.Sequential, nn.Sequential]:
        """The sequence itself, or one nested in it."""
        found = [
            twins
            for twins in zip(self.ours.modules(), self.theirs.modules(), strict=True)
            if isinstance(twins[1], nn.Sequential)
        ]
        return found[place % len(found)]

    def leaf(self, place: int) -> tuple[nn.Module, nn.Module]:
        found = list(zip(self.ours.modules(), self.theirs.modules(), strict=True))
        return found[place % len(found)]

    def small(self) -> bool:
        return sum(1 for _ in self.theirs.modules()) < MOST

    # The sequence.

    @precondition(small)
    @rule(place=places, kind=kinds)
    def append(self, place: int, kind: str) -> None:
        for container, module in zip(self.container(place), self.fresh(kind), strict=True):
            container.append(module)

    @precondition(small)
    @rule(place=places, at=places, kind=kinds)
    def insert(self, place: int, at: int, kind: str) -> None:
        for container, module in zip(self.container(place), self.fresh(kind), strict=True):
            if [*container._modules] == [*map(str, range(len(container)))]:  # what torch's insert relies on
                container.insert(at % (len(container) + 1), module)

    @precondition(small)
    @rule(kinds=st.lists(kinds, min_size=1, max_size=3))
    def extend(self, kinds: list[str]) -> None:
        made = [self.fresh(kind) for kind in kinds]
        self.ours.extend([ours for ours, _ in made])
        self.theirs.extend([theirs for _, theirs in made])

    @precondition(lambda self: len(self.theirs))
    @rule(at=places, kind=kinds)
    def set_item(self, at: int, kind: str) -> None:
        for container, module in zip((self.ours, self.theirs), self.fresh(kind), strict=True):
            container[at % len(container)] = module

    @precondition(lambda self: len(self.theirs) > 1)
    @rule(at=places, how=st.sampled_from(["pop", "del", "del from the end", "del slice"]))
    def remove(self, at: int, how: str) -> None:
        for container in (self.ours, self.theirs):
            i = at % len(container)
            if how == "pop":
                container.pop(i)
            elif how == "del slice":
                del container[i : i + 2]
            else:
                del container[i - len(container) if how == "del from the end" else i]

    @rule(start=st.integers(-3, 4), stop=st.integers(1, 9), step=st.sampled_from([1, 1, 2, -1]))
    def slice(self, start: int, stop: int, step: int) -> None:
        self.ours, self.theirs = self.ours[start:stop:step], self.theirs[start:stop:step]

    @precondition(small)
    @rule(kind=kinds, in_place=st.booleans())
    def add(self, kind: str, in_place: bool) -> None:
        more = self.fresh(kind)
        if in_place:
            self.ours += sf.Sequential(more[0])
            self.theirs += nn.Sequential(more[1])
        else:
            self.ours = self.ours + sf.Sequential(more[0])
            self.theirs = self.theirs + nn.Sequential(more[1])

    @precondition(lambda self: len(self.theirs) and sum(1 for _ in self.theirs.modules()) < MOST // 2)
    @rule(left=st.booleans())
    def twice(self, left: bool) -> None:
        self.ours = 2 * self.ours if left else self.ours * 2
        self.theirs = 2 * self.theirs if left else self.theirs * 2

    @precondition(lambda self: len(self.theirs) and self.small())
    @rule(at=places)
    def use_an_operation_again(self, at: int) -> None:
        for container in (self.ours, self.theirs):
            container.append(container[at % len(container)])

    @precondition(lambda self: len(self.theirs))
    @rule(first=places, second=places)
    def swap(self, first: int, second: int) -> None:
        for container in (self.ours, self.theirs):
            i, j = first % len(container), second % len(container)
            container[i], container[j] = container[j], container[i]

    @rule(fusions=st.sampled_from([FUSIONS, KINDS, ()]))
    def change_the_fusions(self, fusions: tuple) -> None:
        self.ours.fusions = self.fusions = fusions

    @rule()
    def rename(self) -> None:
        names = [f"part{i}" for i in range(len(self.theirs))]
        self.ours = sf.Sequential(OrderedDict(zip(names, self.ours, strict=True)), fusions=self.fusions)
        self.theirs = nn.Sequential(OrderedDict(zip(names, self.theirs, strict=True)))

    # Modes and configuration.

    @rule(training=st.booleans(), place=places)
    def train(self, training: bool, place: int) -> None:
        for module in self.leaf(place):
            module.train(training)

    @rule(
        at=places, change=st.sampled_from([("p", 1.0), ("p", 0.5), ("p", 0.0), ("eps", 0.1), ("approximate", "tanh")])
    )
    def configure(self, at: int, change: tuple[str, object]) -> None:
        name, value = change
        both = zip(self.ours.modules(), self.theirs.modules(), strict=True)
        found = [twins for twins in both if hasattr(twins[1], name)]
        for module in found[at % len(found)] if found else ():
            setattr(module, name, value)

    @rule(place=places, kind=st.sampled_from(list(REGISTER)))
    def hook(self, place: int, kind: str) -> None:
        ours, theirs = self.leaf(place)
        if ours is self.ours and kind == "full backward":
            return  # torch calls it with the sequence's own input, which this test does not pass through it
        register, hook = REGISTER[kind]
        mine, its = hook(), hook()
        self.hooks.append((register(ours, mine), register(theirs, its), mine, its))

    @precondition(lambda self: self.hooks)
    @rule(at=places)
    def unhook(self, at: int) -> None:
        for handle in self.hooks.pop(at % len(self.hooks))[:2]:
            handle.remove()

    # Parameters.

    @rule(place=places, wanted=st.booleans())
    def freeze(self, place: int, wanted: bool) -> None:
        for module in self.leaf(place):
            module.requires_grad_(wanted)

    @rule(dtype=st.sampled_from([torch.float64, torch.float32]))
    def cast(self, dtype: torch.dtype) -> None:
        self.ours.to(dtype)
        self.theirs.to(dtype)

    @rule(place=places)
    def replace_parameters(self, place: int) -> None:
        ours, theirs = self.leaf(place)
        for name, p in list(theirs.named_parameters(recurse=False)):
            self.numbers += 1
            new = seeded_randn(tuple(p.shape), self.numbers, dtype=p.dtype)
            setattr(ours, name, nn.Parameter(new))
            setattr(theirs, name, nn.Parameter(new.clone()))

    @rule(place=places)
    def drop_the_bias(self, place: int) -> None:
        ours, theirs = self.leaf(place)
        if isinstance(theirs, nn.Linear):
            ours.bias = theirs.bias = None

    @rule()
    def step(self) -> None:
        with torch.no_grad():
            for p in (*self.ours.parameters(), *self.theirs.parameters()):
                p.mul_(0.9)

    @rule(assign=st.booleans())
    def load(self, assign: bool) -> None:
        self.numbers += 1
        state = {
            name: 0.7 * seeded_randn(tuple(t.shape), self.numbers + i, dtype=t.dtype)
            for i, (name, t) in enumerate(self.theirs.state_dict().items())
        }
        assign = assign and len({t.data_ptr() for t in self.theirs.state_dict().values()}) == len(state)
        self.theirs.load_state_dict(copy.deepcopy(state), strict=True, assign=assign)
        self.ours.load_state_dict(copy.deepcopy(state), strict=True, assign=assign)

    @rule(by_pickle=st.booleans())
    def copy(self, by_pickle: bool) -> None:
        self.hooks.clear()
        if by_pickle:
            self.ours, self.theirs = (pickle.loads(pickle.dumps(m)) for m in (self.ours, self.theirs))
        else:
            self.ours, self.theirs = copy.deepcopy(self.ours), copy.deepcopy(self.theirs)

    # Invariants.

    @invariant()
    def same_structure(self) -> None:
        ours, theirs = self.ours, self.theirs
        assert type(ours) is sf.Sequential
        assert ours.fusions == self.fusions
        assert len(ours) == len(theirs)
        assert [key for key, _ in ours.named_children()] == [key for key, _ in theirs.named_children()]
        assert [m.training for m in ours.modules()] == [m.training for m in theirs.modules()]
        mine, its = ours.state_dict(), theirs.state_dict()
        assert list(mine) == list(its)
        assert all(torch.equal(mine[name], its[name]) for name in its)
        assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]

    @invariant()
    def same_numbers(self) -> None:
        if any(0 < m.p < 1 and m.training for m in self.theirs.modules() if isinstance(m, nn.Dropout)):
            return
        for wanted in (True, False):
            with sf.fusing(on_error="raise"):
                mine, its = (results(model, self.dtype, wanted) for model in (self.ours, self.theirs))
            assert mine.keys() == its.keys()
            for name, expected in its.items():
                assert_near(mine[name], expected, name)
        assert [mine.calls for *_, mine, _ in self.hooks] == [its.calls for *_, its in self.hooks]


def results(model: nn.Module, dtype: torch.dtype, wanted: bool) -> dict[str, Tensor | None]:
    x = seeded_randn((5, WIDTH), 1, dtype=dtype).requires_grad_(wanted)
    y = model(x)
    leaves = {"d_x": x, **dict(model.named_parameters())}
    leaves = {name: t for name, t in leaves.items() if t.requires_grad}
    if not y.requires_grad or not leaves:
        return {"y": y.detach()}
    dy = seeded_randn((5, WIDTH), 2, dtype=dtype)
    found = torch.autograd.grad(y, tuple(leaves.values()), dy, allow_unused=True)
    return {"y": y.detach(), **dict(zip(leaves, found, strict=True))}


def assert_near(mine: Tensor | None, expected: Tensor | None, name: str) -> None:
    # Both are torch's arithmetic in another order, and the sequence may have several norms: one scale for a tensor.
    if mine is None or expected is None:
        nothing = mine if expected is None else expected
        assert nothing is None or not nothing.any(), name
        return
    assert (mine.shape, mine.dtype) == (expected.shape, expected.dtype), name
    scale = expected.abs().max().clamp_min(1.0)
    assert (mine - expected).abs().max() <= (1e-10 if expected.dtype is torch.float64 else 1e-3) * scale, name


InStep.TestCase.settings = hypothesis.settings(
    stateful_step_count=20, max_examples=hypothesis.settings.default.max_examples // 2
)
TestInStep = InStep.TestCase
