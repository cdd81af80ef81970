"""Activation checkpointing, with failing fusions, too."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointError, CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import seqfuse as sf
from seqfuse import ops
from seqfuse.errors import StateError
from tests.watching import Calls, saving

from .fusions import KINDS, BiasTanhBackward, BiasTanhForward, BiasTanhJoint
from .kit import assert_same, draw, mlp, passes, randomize

KIND = pytest.mark.parametrize("reentrant", [False, True], ids=["saved tensors", "reentrant"])
COVERS = pytest.mark.parametrize("fusions", [(), *((k,) for k in KINDS)], ids=lambda f: f[0].__name__ if f else "none")


class Checkpointed(nn.Module):
    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__()
        self.model, self.options = model, options

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.model, x, **self.options)


def blocks(count: int = 6, dropout: float = 0.5, fusions: Any = ()) -> sf.Sequential:
    model = sf.Sequential(
        *(
            ops.Residual(ops.LayerNorm(5), ops.Linear(5, 7), ops.Tanh(), ops.Dropout(dropout), ops.Linear(7, 5))
            for _ in range(count)
        ),
        fusions=fusions,
    )
    randomize(model)
    return model.double()


def same_passes(model: nn.Module, other: nn.Module, x: Tensor, tolerance: float = 0.0) -> None:
    torch.manual_seed(11)
    want = passes(model, x)
    state = torch.get_rng_state()
    torch.manual_seed(11)
    found = passes(other, x)
    assert_same(dict(zip(want, found.values(), strict=True)), want, tolerance)
    assert torch.equal(torch.get_rng_state(), state), "the generator is where it would be without checkpointing"


@KIND
@COVERS
def test_a_checkpointed_model_gives_the_same_numbers_with_dropout_replayed(fusions: Any, reentrant: bool):
    model = blocks(fusions=fusions)
    assert len(model.plan(draw(3, 5)).segments) > 1
    same_passes(model, Checkpointed(model, use_reentrant=reentrant), draw(3, 5))


def test_without_the_state_of_the_generator_the_recomputed_mask_is_used_throughout_as_in_torch():
    """The seed is drawn inside the function, so recomputation drops others; both passes of the recomputation agree."""
    weight = draw(40, 40)

    def gradient(drop: nn.Module) -> tuple[Tensor, Tensor]:
        x = torch.ones(40, 40, dtype=torch.float64, requires_grad=True)
        torch.manual_seed(5)
        y = checkpoint(lambda t: drop(t * weight).square(), x, use_reentrant=False, preserve_rng_state=False)
        y.sum().backward()
        return (y == 0), (x.grad == 0)

    for drop in (sf.Sequential(ops.Dropout(0.5)), nn.Dropout(0.5)):
        forward, backward = gradient(drop)
        assert 0.3 < backward.double().mean() < 0.7
        assert not torch.equal(forward, backward)


def test_nothing_but_the_input_is_kept_by_a_checkpointed_model():
    model, x = blocks(), draw(3, 5).requires_grad_()
    with saving() as kept:
        y = checkpoint(model, x, use_reentrant=False)
    assert len(kept) <= 2
    y.sum().backward()
    assert x.grad is not None


@KIND
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_is_replayed(reentrant: bool, half: torch.dtype):
    model = blocks(fusions=(BiasTanhForward,)).float()
    agree_under_autocast(model, Checkpointed(model, use_reentrant=reentrant), half)


def agree_under_autocast(model: nn.Module, checkpointed: nn.Module, half: torch.dtype) -> None:
    results = []
    for run in (model, checkpointed):
        torch.manual_seed(5)
        leaf = draw(3, 5, dtype=torch.float32).requires_grad_()
        with torch.autocast("cpu", half):
            y = run(leaf)
        y.backward(draw(*y.shape, seed=2).to(y.dtype))
        results.append([y.detach(), leaf.grad, *(p.grad for p in model.parameters())])
        model.zero_grad(set_to_none=True)
    for a, b in zip(*results, strict=True):
        assert b.abs().max() > 0
        assert torch.equal(a, b)


# Another plan when it is recomputed -----------------------------------------------------------------------------------

Change = Callable[[sf.Sequential], Any]
OTHER_PLANS: dict[str, Change] = {
    "fusing off": lambda model: sf.fusing(False),
    "one excluded": lambda model: sf.fusing(exclude=["BiasTanhJoint"]),
    "others only": lambda model: sf.fusing(only=["BiasTanhForward"]),
    "others set on the model": lambda model: setattr(model, "fusions", ()) or contextlib.nullcontext(),
}


@pytest.mark.parametrize("change", OTHER_PLANS.values(), ids=OTHER_PLANS)
def test_recomputing_under_another_fusion_set_is_an_error(change: Change):
    model = mlp(fusions=(BiasTanhJoint, BiasTanhForward))
    y = checkpoint(model, draw(3, 5).requires_grad_(), use_reentrant=False)
    with change(model), pytest.raises(StateError, match="another plan") as caught:
        y.sum().backward()
    assert caught.value.code == "SF503"
    assert caught.value.hint is not None


class Keeps(sf.JointFusion):
    """Saves x where Tanh saves y: the same number and shapes of tensors, so that torch cannot tell."""

    act: ops.Tanh
    scale: ops.Scale

    class Saved(sf.Saved):
        x: Tensor

    def fwd(self, x: Tensor) -> Any:
        return torch.tanh(x) * self.scale.factor, self.Saved(x=x * 1.0)

    def bwd(self, dy: Tensor, saved: Any) -> Any:
        return dy * self.scale.factor * (1 - torch.tanh(saved.x).square()), {}


def special() -> list[nn.Module]:
    return [ops.Tanh(), ops.Scale(-0.5)]


def middle(count: int = 10) -> list[nn.Module]:
    return [op for _ in range(count) for op in (ops.Linear(5, 5), ops.SiLU())]


DIFFERENT: dict[str, Callable[[], nn.Module]] = {
    "in its first segment": lambda: sf.Sequential(*special(), *middle(), fusions=(Keeps,)),
    "in its last segment": lambda: sf.Sequential(*middle(), *special(), fusions=(Keeps,)),
    "before a barrier": lambda: sf.Sequential(*special(), nn.Softplus(), *middle(2), fusions=(Keeps,)),
    "behind a barrier": lambda: sf.Sequential(*middle(2), nn.Softplus(), *special(), fusions=(Keeps,)),
    "in the first of two models": lambda: nn.Sequential(
        sf.Sequential(*special(), fusions=(Keeps,)), sf.Sequential(*middle(2))
    ),
    "in the last of two models": lambda: nn.Sequential(
        sf.Sequential(*middle(2)), sf.Sequential(*special(), fusions=(Keeps,))
    ),
}


@pytest.mark.parametrize("make", DIFFERENT.values(), ids=DIFFERENT)
def test_a_plan_that_differs_anywhere_is_an_error(make: Callable[[], nn.Module]):
    model, x = randomize(make()).double(), draw(3, 5).requires_grad_()
    y = checkpoint(model, x, use_reentrant=False)
    with sf.fusing(exclude=[Keeps]), pytest.raises(StateError, match="another plan"):
        y.sum().backward()
    y = checkpoint(model, x, use_reentrant=False)
    y.sum().backward()
    assert x.grad is not None


class Flaky(nn.Module):
    """Fails in its second forward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            raise torch.OutOfMemoryError("in the recomputation")
        return x * 2


@pytest.mark.parametrize("where", ["between two models", "a barrier"])
def test_an_error_of_the_recomputation_itself_is_raised_as_it_is(where: str):
    inner = [ops.Linear(5, 5), ops.Tanh()], [ops.Linear(5, 5), ops.SiLU()]
    if where == "a barrier":
        model: nn.Module = sf.Sequential(*inner[0], Flaky(), *inner[1])
    else:
        model = nn.Sequential(sf.Sequential(*inner[0]), Flaky(), sf.Sequential(*inner[1]))
    y = checkpoint(randomize(model).double(), draw(3, 5).requires_grad_(), use_reentrant=False)
    with pytest.raises(torch.OutOfMemoryError, match="in the recomputation"):
        y.sum().backward()


def test_the_same_plan_at_recomputation_is_no_error_though_others_ran_in_between():
    model, x = mlp(fusions=(BiasTanhJoint, BiasTanhForward)), draw(3, 5)
    want = passes(model, x)
    leaf = x.clone().requires_grad_()
    y = checkpoint(model, leaf, use_reentrant=False)
    with sf.fusing(False):
        model(x)
    with torch.no_grad():
        model(draw(9, 5))
    y.backward(draw(3, 3, seed=99))
    assert torch.equal(leaf.grad, want["d_x"])


def test_a_reentrant_recomputation_under_another_plan_is_right_because_it_makes_its_own_graph():
    model, x = mlp(fusions=(BiasTanhJoint,)), draw(3, 5)
    want = passes(model, x)
    leaf = x.clone().requires_grad_()
    y = checkpoint(model, leaf, use_reentrant=True)
    with sf.fusing(False):
        y.backward(draw(3, 3, seed=99))
    found = {"out": y.detach(), "d_x": leaf.grad, **{f"d_{n}": p.grad for n, p in model.named_parameters()}}
    assert_same(found, want)


def test_checkpoints_nested_three_deep_with_models_between_them_replay():
    a, b, c = (blocks(2, fusions=(k,)) for k in (BiasTanhJoint, BiasTanhForward, BiasTanhBackward))
    plain = nn.Sequential(a, nn.Sequential(b, nn.Sequential(c)), a)
    deep = Checkpointed(
        nn.Sequential(
            a,
            Checkpointed(nn.Sequential(b, Checkpointed(c, use_reentrant=False)), use_reentrant=False),
            a,
        ),
        use_reentrant=False,
    )
    same_passes(plain, deep, draw(3, 5))


# Segments that save nothing -------------------------------------------------------------------------------------------

LAST: dict[str, Callable[[], nn.Module]] = {
    "positions of their own": lambda: ops.PositionEmbedding(3, 12),
    "a rotation": lambda: ops.RotaryEmbedding(2, style="half"),
    "dropout in evaluation": lambda: ops.Dropout(0.5).eval(),
    "a sum": lambda: ops.Residual(ops.Identity()),
}


def behind(last: Callable[[], nn.Module], how: str) -> tuple[nn.Module, Tensor]:
    """A model whose last node has no tensor to save, behind one that has."""
    if how == "behind a table":
        return sf.Sequential(ops.Embedding(9, 12), last(), fusions=()), torch.tensor([[1, 2, 0], [8, 3, 3]])
    first, x = ops.Linear(12, 12), draw(2, 3, 12, dtype=torch.float32).requires_grad_()
    if how == "behind a hook":
        first.register_forward_hook(lambda *_: None)
    between = [nn.Softplus()] if how == "behind a barrier" else []
    return sf.Sequential(first, *between, last(), fusions=()), x


@pytest.mark.parametrize("how", ["behind a table", "behind a hook", "behind a barrier"])
@pytest.mark.parametrize("last", LAST.values(), ids=LAST)
def test_a_checkpoint_whose_last_operation_saves_nothing_gives_the_same_gradients(last: Any, how: str):
    model, x = behind(last, how)
    wants = [*model.parameters(), *[t for t in [x] if t.requires_grad]]
    want = torch.autograd.grad(model(x).square().sum(), wants)
    y = checkpoint(model, x, use_reentrant=False)
    y.square().sum().backward()
    for t, g in zip(wants, want, strict=True):
        assert torch.equal(t.grad, g)


@pytest.mark.parametrize("check", ["default", "none"])
def test_a_plan_that_differs_before_a_module_of_torch_gives_no_wrong_gradient(check: str):
    """The last node is torch's, which reads its saved tensors, and so recomputes, before any of ours."""
    model, x = nn.Sequential(sf.Sequential(*special(), fusions=(Keeps,)), nn.Softplus()).double(), draw(3, 5)
    leaf = x.requires_grad_()
    y = checkpoint(model, leaf, use_reentrant=False, determinism_check=check)
    with sf.fusing(exclude=[Keeps]), pytest.raises((StateError, CheckpointError)):
        y.sum().backward()
    assert leaf.grad is None


# Selective checkpointing ----------------------------------------------------------------------------------------------


class Selective(nn.Module):
    def __init__(self, model: nn.Module, operators: list[Any], seen: list[Any] | None = None) -> None:
        super().__init__()
        self.model, self.operators, self.seen = model, operators, seen

    def forward(self, x: Tensor) -> Tensor:
        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if op not in self.operators:
                return CheckpointPolicy.PREFER_RECOMPUTE
            if self.seen is not None:
                self.seen.append((ctx.is_recompute, [type(a) for a in args if isinstance(a, Tensor)]))
            return CheckpointPolicy.MUST_SAVE

        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(self.model, x, use_reentrant=False, context_fn=contexts)


@COVERS
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_selective_checkpointing_sees_the_operators(fusions: Any, warm: bool):
    model, x = blocks(3, fusions=fusions), draw(3, 5)
    plain = blocks(3, fusions=fusions)
    torch.manual_seed(11)
    with Calls() as calls:
        want = passes(plain, x)
    if warm:
        passes(model, x)
    seen: list[Any] = []
    torch.manual_seed(11)
    with Calls() as again:
        found = passes(Selective(model, [torch.ops.aten.mm.default], seen), x)
    assert_same(dict(zip(want, found.values(), strict=True)), want, 0.0)
    products = 2 * 3
    # torch 2.11 asks again when it recomputes, others do not.
    assert [recompute for recompute, _ in seen].count(False) == products
    assert again.count("mm") == calls.count("mm") >= 3 * products  # none of them runs again
    assert all(kind in (Tensor, nn.Parameter) for _, kinds in seen for kind in kinds)


@pytest.mark.parametrize("norm", [ops.LayerNorm, ops.RMSNorm], ids=["layer", "rms"])
def test_what_selective_checkpointing_keeps_is_not_written_over(norm: Any):
    branch = ops.Residual(norm(8), ops.Linear(8, 8), ops.ReLU(), ops.Linear(8, 8))
    model, x = sf.Sequential(branch, ops.Linear(8, 3), ops.Tanh()), draw(4, 8)
    randomize(model.double())
    assert {step.name for step in model.plan(x).forward} >= {"LinearBiasAdd", "LinearBiasAct"}
    kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.native_layer_norm.default]
    want = passes(model, x)
    found = passes(Selective(model, [*kept, torch.ops.aten._fused_rms_norm.default]), x)
    assert_same(dict(zip(want, found.values(), strict=True)), want, 0.0)


def test_selective_checkpointing_under_autocast():
    model = mlp(dtype=torch.float32, fusions=(BiasTanhForward,))
    agree_under_autocast(model, Selective(model, [torch.ops.aten.mm.default]), torch.bfloat16)


def test_the_first_call_under_a_dispatch_mode_shows_it_the_operators_of_a_later_call():
    def note(func: Any, args: Any, out: Any) -> tuple[str, bool]:
        tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
        return str(func), any(type(t) not in (Tensor, nn.Parameter) for t in tensors)

    model, x = mlp(fusions=(BiasTanhForward,)), draw(3, 5)
    logs = []
    for _ in range(2):
        with Calls(note) as log:
            model(x)
        logs.append(log.names)
    assert logs[0] == logs[1]
    assert not any(strange for _, strange in logs[0])


def test_flops_of_the_first_call_are_those_of_a_later_call():
    from torch.utils.flop_counter import FlopCounterMode

    model, x = mlp(fusions=(BiasTanhForward,)), draw(3, 5)
    totals = []
    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            model(x).sum().backward()
        totals.append(counter.get_total_flops())
    # Two GEMMs forward, each with two backward; the input needs no gradient, but LayerNorm does.
    assert totals == [3 * 2 * 3 * (5 * 7 + 7 * 3)] * 2


class Fails:
    """Makes the forwards of a fusion with these numbers fail."""

    calls = 0
    at: tuple[int, ...] = ()

    @classmethod
    def pass_by(cls) -> None:
        cls.calls += 1
        if cls.calls in cls.at:
            raise torch.OutOfMemoryError("out of memory")


class FailingKeeps(Keeps):
    def fwd(self, x: Tensor) -> Any:
        Fails.pass_by()
        return super().fwd(x)


class FailingLate(sf.ForwardFusion):
    """Saves a stand-in for a tensor of the operation, of the same shape."""

    scale: ops.Scale
    act: ops.SiLU

    def fwd(self, x: Tensor) -> Any:
        Fails.pass_by()
        y = nn.functional.silu(x * -0.5)
        return y, {"scale": ops.Scale.Saved(factor=-0.5), "act": ops.SiLU.Saved(x=sf.Recompute(halved, x))}


def halved(x: Tensor) -> Tensor:
    return x * -0.5


@pytest.mark.parametrize("fusion", [FailingKeeps, FailingLate], ids=["joint", "stand-in"])
@pytest.mark.parametrize("at", [(2,), (3,)], ids=["in the forward", "in the recomputation"])
@pytest.mark.filterwarnings("ignore::seqfuse.FallbackWarning")
def test_a_fusion_that_fell_back_in_one_of_two_forwards_gives_no_wrong_gradient(fusion: Any, at: tuple[int, ...]):
    members = special() if fusion is FailingKeeps else [ops.Scale(-0.5), ops.SiLU()]
    model, x, dy = sf.Sequential(*members, fusions=(fusion,)), draw(3, 5), draw(3, 5, seed=99)
    with sf.fusing(False):
        want = passes(model, x)["d_x"]
    Fails.calls, Fails.at = 0, at
    assert torch.allclose(passes(model, x)["d_x"], want)  # call 1, which is checked
    leaf = x.clone().requires_grad_()
    y = checkpoint(model, leaf, use_reentrant=False)
    try:
        y.backward(dy)
    except (StateError, CheckpointError):
        assert leaf.grad is None
    else:
        torch.testing.assert_close(leaf.grad, want)
    assert Fails.calls == 3
