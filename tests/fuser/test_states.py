"""A call depends on its own configuration alone: not on earlier calls, nor on changes before its backward pass."""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.env import why_no_c
from seqfuse.testing import seeded_randn
from tests.fuser.fusions import BiasGeLUBackward
from tests.watching import Calls, bytes_of, saving

from .fusions import BiasTanhBackward, BiasTanhForward, BiasTanhInference, BiasTanhJoint
from .kit import counting_plans, draw, randomize

Given = tuple[Tensor, Tensor]  # x, and the channel "side"
State = Callable[[sf.Sequential, Tensor, Tensor], contextlib.AbstractContextManager[Given]]


def gives(change: Callable[[Tensor, Tensor], Given]) -> State:
    """A state of the tensors of a call."""
    return lambda model, x, side: contextlib.nullcontext(change(x, side))


def within(block: Callable[[], contextlib.AbstractContextManager[Any]]) -> State:
    """A state of the surroundings of a call."""

    @contextlib.contextmanager
    def state(model: sf.Sequential, x: Tensor, side: Tensor) -> Iterator[Given]:
        with block():
            yield x, side

    return state


def of_model(change: Callable[[sf.Sequential], Any], back: Callable[[sf.Sequential], Any]) -> State:
    """A state of the model, which is undone afterwards."""

    @contextlib.contextmanager
    def state(model: sf.Sequential, x: Tensor, side: Tensor) -> Iterator[Given]:
        change(model)
        try:
            yield x, side
        finally:
            back(model)

    return state


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Nondeterministic(BiasTanhForward):
    """Refused in one of the states."""

    def requires(self, env: sf.Env) -> sf.Requirements:
        yield not env.deterministic, "is not deterministic"


def frozen(name: str) -> State:
    return of_model(
        lambda m: m.get_parameter(name).requires_grad_(False), lambda m: m.get_parameter(name).requires_grad_(True)
    )


@contextlib.contextmanager
def low_first_bias(model: sf.Sequential, x: Tensor, side: Tensor) -> Iterator[Given]:
    own = model[0].bias.data
    model[0].bias.data = own.float()
    try:
        yield x, side
    finally:
        model[0].bias.data = own


class Marked(Tensor):
    """A tensor subclass, known only to plain operations of torch."""


@contextlib.contextmanager
def marked_first_bias(model: sf.Sequential, x: Tensor, side: Tensor) -> Iterator[Given]:
    own: Any = model[0].bias
    model[0]._parameters["bias"] = own.detach().as_subclass(Marked).requires_grad_()
    try:
        yield x, side
    finally:
        model[0]._parameters["bias"] = own


def low(dtype: torch.dtype | None) -> State:
    @contextlib.contextmanager
    def state(model: sf.Sequential, x: Tensor, side: Tensor) -> Iterator[Given]:
        with all_in(model, torch.float32), torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            yield x.float(), side.to(dtype or torch.float32)

    return state


@contextlib.contextmanager
def all_in(model: sf.Sequential, dtype: torch.dtype) -> Iterator[None]:
    own = [p.data for p in model.parameters()]
    for p in model.parameters():
        p.data = p.data.to(dtype)
    try:
        yield
    finally:
        for p, data in zip(model.parameters(), own, strict=True):
            p.data = data


RULES = (Nondeterministic, BiasTanhBackward, BiasTanhInference)
STATES: dict[str, State] = {
    "as it is": gives(lambda x, side: (x, side)),
    "other rows of one bucket": gives(lambda x, side: (x[:3], side[:3])),
    "rows of another bucket": gives(lambda x, side: (x[:1], side[:1])),
    "no rows": gives(lambda x, side: (x[:0], side[:0])),
    "one row without a dimension": gives(lambda x, side: (x[0], side[0])),
    "more dimensions": gives(lambda x, side: (x.view(2, 2, 5), side.view(2, 2, 5))),
    "x in float32": gives(lambda x, side: (x.float(), side)),
    "the side in float32": gives(lambda x, side: (x, side.float())),
    "no gradient of x": gives(lambda x, side: (x.detach(), side)),
    "no gradient of the side": gives(lambda x, side: (x, side.detach())),
    "no gradient of either": gives(lambda x, side: (x.detach(), side.detach())),
    "not contiguous": gives(lambda x, side: (x.t().contiguous().t(), side)),
    "the weight frozen": frozen("2.weight"),
    "the first bias frozen": frozen("0.bias"),
    "the last bias frozen": frozen("2.bias"),
    "the first bias in float32": low_first_bias,
    "the first bias of another class": marked_first_bias,
    "all frozen": of_model(lambda m: m.requires_grad_(False), lambda m: m.requires_grad_(True)),
    "evaluation": of_model(lambda m: m.eval(), lambda m: m.train()),
    "evaluation of one": of_model(lambda m: m[3].eval(), lambda m: m[3].train()),
    "no gradients": within(torch.no_grad),
    "inference mode": within(torch.inference_mode),
    "autocast to bfloat16": low(torch.bfloat16),
    "autocast to float16": low(torch.float16),
    "all in float32": low(None),
    "deterministic": within(deterministic),
    "no fusing": within(lambda: sf.fusing(False)),
    "only the backward": within(lambda: sf.fusing(only=[BiasTanhBackward])),
    "without the backward": within(lambda: sf.fusing(exclude=["BiasTanhBackward"])),
    "another rule set": of_model(
        lambda m: setattr(m, "fusions", (BiasTanhJoint,)), lambda m: setattr(m, "fusions", RULES)
    ),
}


def model_of() -> sf.Sequential:
    model = sf.Sequential(
        ops.Bias(5), ops.Tanh(), ops.Linear(5, 5), ops.Dropout(0.4), ops.Add("side"), ops.Tanh(), fusions=RULES
    )
    randomize(model.double())
    return model.double()


def facts(model: sf.Sequential, state: State) -> dict[str, Any]:
    """All results of a call in a state: numbers, gradients, their node, bytes saved, calls of torch, and the plan."""
    x, side = draw(4, 5).requires_grad_(), draw(4, 5, seed=2).requires_grad_()
    found: dict[str, Any] = {}
    with state(model, x, side) as (a, b):
        for _ in range(2):  # the first may plan and check
            torch.manual_seed(3)
            with saving() as kept, Calls() as ahead:
                y = model(a, side=b)
            leaves = {"x": x, "side": side, **dict(model.named_parameters())}
            wanted = {name: t for name, t in leaves.items() if t.requires_grad} if y.requires_grad else {}
            grads: Sequence[Tensor | None] = ()
            with Calls() as back:
                if wanted:
                    dy = draw(*y.shape, seed=9).to(y.dtype)
                    grads = torch.autograd.grad(y, [*wanted.values()], dy, allow_unused=True)
            found |= {
                "node": type(y.grad_fn).__name__,
                "y": y.detach(),
                "grad": y.requires_grad,
                "bytes": bytes_of(kept, model),
                "ahead": ahead.names,
            }
            found |= {"back": back.names, **{f"d_{name}": g for name, g in zip(wanted, grads, strict=False)}}
        plan = model.plan(a, side=b)
        found["plan"] = [(step.name, step.covers) for step in (*plan.forward, *plan.backward)], plan.needs
    return found


def differing(got: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    def unequal(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return a.dtype is not b.dtype or not torch.equal(a, b)
        return type(a) is not type(b) or a != b

    return [key for key in {**got, **expected} if unequal(got.get(key), expected.get(key))]


@pytest.fixture(scope="module")
def fresh() -> dict[str, dict[str, Any]]:
    return {name: facts(model_of(), state) for name, state in STATES.items()}


def test_each_state_gives_what_it_gives_a_fresh_model(fresh: dict[str, dict[str, Any]]) -> None:
    model, names = model_of(), list(STATES)
    order = random.Random(5)
    for again in (False, True):
        order.shuffle(names)
        # One whose change forgets all plans comes first, then last.
        names.sort(key=lambda name: (name == "another rule set") is again)
        before = "nothing"
        # The second time "as it is" follows each state, which differs in one thing, and gets no plan of it.
        for name in [one for own in names for one in ("no rows", own, "as it is")] if again else names:
            with counting_plans() as planned:
                assert not differing(facts(model, STATES[name]), fresh[name]), f"{name} after {before}"
            kept = again and names[-1] not in (name, before)
            assert not kept or (len(planned), planned.lists) == (0, 0), f"{name} is planned again"
            before = name


def test_a_state_is_not_that_of_the_others(fresh: dict[str, dict[str, Any]]) -> None:
    """Otherwise the tests would prove nothing."""
    same = [name for name in fresh if not differing(fresh[name], fresh["as it is"])]
    assert same == ["as it is"]


@pytest.mark.parametrize("behind_a_node", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_gradient_mode_within_inference_mode_records_nothing_as_in_torch(trained: bool, behind_a_node: bool):
    last = (ops.LayerNorm(8), ops.Bias(8), ops.Tanh(), ops.Dropout(0.0)) if behind_a_node else (ops.Linear(8, 8),)
    model, x = sf.Sequential(ops.Linear(8, 8), ops.GeLU(), *last), torch.randn(3, 8)
    for _ in range(3 * trained):
        model(x).sum().backward()
    wanted = model(x)
    with torch.inference_mode(), torch.enable_grad():
        for _ in range(3):
            y = model(x)
            assert y.is_inference()
            assert not y.requires_grad
            torch.testing.assert_close(y, wanted.detach())
    model(x).sum().backward()


class Narrow(nn.Module):
    """The first 4 columns, of one row for 2 rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :4].expand(2, 4)


def still(model: Any) -> Tensor:
    x = draw(2, 4, dtype=torch.float32)
    return x.abs().long() if isinstance(model[0], ops.Embedding) else x


def moved(model: Any) -> Tensor:
    return still(model.to("meta"))


FAULTS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Tensor]]] = {
    "a channel with more columns": (
        lambda: sf.Sequential(ops.Fork(), Narrow(), ops.Tanh(), ops.Add()),
        lambda model: draw(2, 8, dtype=torch.float32),
    ),
    "a channel with fewer rows": (
        lambda: sf.Sequential(ops.Fork(), Narrow(), ops.Tanh(), ops.Add()),
        lambda model: draw(1, 4, dtype=torch.float32),
    ),
    "moved torch calls": (lambda: sf.Sequential(ops.Linear(4, 4), ops.ReLU()), moved),
    "a moved table": (lambda: sf.Sequential(ops.Embedding(9, 4), ops.LayerNorm(4)), moved),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_later_call_raises_the_error_of_a_first_call(fault: str) -> None:
    make, change = FAULTS[fault]
    messages: list[str] = []
    for calls in (0, 2):
        model = make()
        for _ in range(calls):
            model(still(model))
        with pytest.raises(sf.InputError) as raised:
            model(change(model))
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("other", [torch.float64, torch.device("meta")], ids=str)
def test_a_call_with_an_input_that_kernels_do_not_read_has_its_own_plan(other: Any) -> None:
    model, x = sf.Sequential(ops.GeLU(), ops.Scale(2.0), ops.Tanh()), draw(512, 512, dtype=torch.float32)
    for given in (x, x.to(other), x, x.to(other)):
        assert model.plan(given).fused == ((1, 0) if given is x and why_no_c() == "" else (0, 0))
        with warnings.catch_warnings(action="error"):
            y = model(given)
        assert (y.dtype, y.device, y.shape) == (given.dtype, given.device, given.shape)


def test_a_call_with_a_bias_that_kernels_do_not_add_has_its_own_plan() -> None:
    model, x = sf.Sequential(ops.Bias(512), ops.GeLU(), ops.Tanh()), draw(512, 512, dtype=torch.float32)
    assert model(x).dtype is torch.float32
    model[0].bias.data = model[0].bias.data.double()
    with warnings.catch_warnings(action="error"):
        assert model(x).dtype is torch.float64


class Gain(sf.UnfusedOperation):
    """y = x gain, for one number or one per column."""

    class Saved(sf.Saved):
        x: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def reference(self, x: Tensor) -> Tensor:
        return x * self.gain

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        return self.reference(x), self.Saved(x=x)

    def bwd(self, dy: Tensor, saved: Saved) -> tuple[Tensor, sf.Grads]:
        return dy * self.gain, {"gain": (dy * saved.x).sum_to_size(self.gain.shape)}


def test_a_parameter_may_be_replaced_by_one_of_another_shape() -> None:
    model, x = sf.Sequential(Gain(), ops.Tanh()), draw(3, 4, dtype=torch.float32)
    model(x)
    model[0].gain = nn.Parameter(torch.full((4,), 2.0))
    model(x).sum().backward()
    torch.testing.assert_close(model[0].gain.grad, (x * (1 - torch.tanh(2 * x) ** 2)).sum(0))


# A backward pass runs with the configuration of its forward.


class Steep(sf.Pointwise):
    """y = factor x^2, by `reference` and its autograd only."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 3.0

    def reference(self, x: Tensor) -> Tensor:
        return self.factor * x * x


class GeLUScalesJoint(sf.JointFusion):
    act: ops.GeLU
    scales: tuple[ops.Scale, ...]

    class Saved(sf.Saved):
        x: Tensor

    def fwd(self, x: Tensor) -> Any:
        y = F.gelu(x, approximate=self.act.approximate)
        for scale in self.scales:
            y = y * scale.factor
        return y, self.Saved(x=x)

    def bwd(self, dy: Tensor, saved: Any) -> Any:
        for scale in self.scales:
            dy = dy * scale.factor
        return torch.ops.aten.gelu_backward(dy, saved.x, approximate=self.act.approximate), {}


def setting(**values: Any) -> Callable[[Any], None]:
    def change(operation: Any) -> None:
        for name, value in values.items():
            setattr(operation, name, value)

    return change


def attention(**given: Any) -> ops.Attention:
    return ops.Attention(2, **given)


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "causal": (attention, setting(causal=True)),
    "window": (lambda: attention(window=2), setting(window=None)),
    "softcap": (attention, setting(softcap=0.5)),
    "scale": (attention, setting(scale=3.0)),
    "heads": (attention, setting(heads=4, kv_heads=4)),
    "dropout": (lambda: attention(dropout=0.4), setting(dropout=0.1)),
    "rotary base": (lambda: ops.RotaryEmbedding(2, style="half"), setting(base=7.0)),
    "rotary style": (lambda: ops.RotaryEmbedding(2, style="half"), setting(style="interleaved")),
    "gelu": (ops.GeLU, setting(approximate="tanh")),
    "geglu": (ops.GEGLU, lambda op: setting(approximate="tanh")(op.activation)),
    "layernorm": (lambda: ops.LayerNorm(24), setting(zero_centered=True)),
    "rmsnorm": (lambda: ops.RMSNorm(24), setting(zero_centered=True)),
    "qknorm": (lambda: ops.QKNorm(4, 2), setting(heads=4, kv_heads=1)),
    "dropout mode": (ops.Dropout, setting(mode="downscale_in_infer")),
    "evaluation": (lambda: ops.Dropout(0.4, "downscale_in_infer"), lambda op: op.eval()),
    "scale factor": (lambda: ops.Scale(2.0), setting(factor=9.0)),
    "a number of one's own": (Steep, setting(factor=1.0)),
    "probability": (lambda: ops.Dropout(0.5), setting(p=0.1)),
    "evaluation, scaled": (lambda: ops.Dropout(0.5), lambda op: op.eval()),
    "eps": (lambda: ops.LayerNorm(24), setting(eps=0.5)),
    "eps of RMSNorm": (lambda: ops.RMSNorm(24), setting(eps=0.5)),
    "shape": (lambda: ops.Reshape(4, 6), setting(shape=(6, 4))),
    "weight": (lambda: ops.Linear(24, 8), lambda op: setattr(op, "weight", nn.Parameter(seeded_randn((8, 24), 7)))),
    "bias": (lambda: ops.Linear(24, 8), setting(bias=None)),
}


def gradients(model: sf.Sequential, change: Callable[[], None]) -> list[Tensor | None]:
    torch.manual_seed(1)
    x = seeded_randn((2, 6, 24), 3).requires_grad_()
    y, leaves = model(x), [x, *model.parameters()]
    change()
    y.backward(seeded_randn(tuple(y.shape), 5))
    return [leaf.grad for leaf in leaves]


def check_same(model: sf.Sequential, change: Callable[[Any], None], at: int = 0) -> None:
    untouched = copy.deepcopy(model)
    got = gradients(model, lambda: change(model[at]))
    wanted = gradients(untouched, lambda: None)
    assert all(g is not None and g.any() for g in wanted)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("case", CASES)
def test_a_backward_runs_with_the_configuration_of_its_forward(case: str) -> None:
    make, change = CASES[case]
    check_same(sf.Sequential(make()), change)
    check_same(sf.Sequential(ops.Bias(24), make(), ops.Tanh()), change, 1)


def test_a_fusion_s_backward_runs_with_the_configuration_of_its_forward() -> None:
    change = setting(approximate="tanh")
    check_same(sf.Sequential(ops.Bias(24), ops.GeLU(), fusions=(BiasGeLUBackward,)), change, 1)
    model = sf.Sequential(ops.GeLU(), ops.Scale(2.0), ops.Scale(3.0), fusions=(GeLUScalesJoint,))
    check_same(model, change)
    check_same(model, setting(factor=0.5), 2)


def test_each_of_two_forwards_before_their_backwards_has_its_own_configuration() -> None:
    model, x = sf.Sequential(ops.Scale(2.0), ops.GeLU()), seeded_randn((3, 8), 2).requires_grad_()
    first = model(x)
    model[1].approximate = "tanh"
    second = model(x)
    (got,) = torch.autograd.grad(second, x, torch.ones_like(x))
    (wanted,) = torch.autograd.grad(F.gelu(2 * x, approximate="tanh"), x, torch.ones_like(x))
    torch.testing.assert_close(got, wanted)
    (got,) = torch.autograd.grad(first, x, torch.ones_like(x))
    (wanted,) = torch.autograd.grad(F.gelu(2 * x), x, torch.ones_like(x))
    torch.testing.assert_close(got, wanted)


def test_parameters_stay_those_of_the_operation() -> None:
    norm = ops.LayerNorm(8)
    model, x = sf.Sequential(norm), seeded_randn((3, 8), 2).requires_grad_()
    for _ in range(2):
        model(x).sum().backward()
        norm.weight = nn.Parameter(torch.full((8,), 2.0))
    norm.weight.grad = None
    model(x).square().sum().backward()
    twin = F.layer_norm(x.detach(), (8,))
    torch.testing.assert_close(norm.weight.grad, (2 * (twin * 2) * twin).sum(0))
