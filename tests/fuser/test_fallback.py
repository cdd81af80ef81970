"""A fusion that fails at run time, or breaks its contract: the unfused result, or one clear error."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import ops
from seqfuse.errors import FallbackWarning, KernelError, PluginError
from seqfuse.ops.activations import tanh_backward
from seqfuse.testing import assert_bitwise_equal

from .fusions import BiasTanhBackward, BiasTanhForward, BiasTanhInference, BiasTanhJoint, Doubles
from .kit import assert_same, draw, passes, randomize


class Faults:
    """Which calls raise what: `Faults.at["fwd"] = {1: error}` makes the second forward fail."""

    at: dict[str, dict[int, BaseException]]
    calls: dict[str, int]

    @classmethod
    def clear(cls) -> None:
        cls.at, cls.calls = {"fwd": {}, "bwd": {}, "unfused": {}}, dict.fromkeys(("fwd", "bwd", "unfused"), 0)

    @classmethod
    def always(cls, name: str, error: BaseException) -> None:
        cls.at[name] = dict.fromkeys(range(100), error)

    @classmethod
    def pass_by(cls, name: str) -> None:
        n, cls.calls[name] = cls.calls[name], cls.calls[name] + 1
        if n in cls.at[name]:
            raise cls.at[name][n].with_traceback(None)


@pytest.fixture(autouse=True)
def _no_faults() -> Iterator[None]:
    Faults.clear()
    yield
    Faults.clear()


class FaultyForward(BiasTanhForward):
    def fwd(self, x: Tensor) -> Any:
        Faults.pass_by("fwd")
        return super().fwd(x)


class FaultyBackward(BiasTanhBackward):
    def bwd(self, dy: Tensor, *, bias: Any, act: Any) -> Any:
        Faults.pass_by("bwd")
        return super().bwd(dy, bias=bias, act=act)


class FaultyJoint(BiasTanhJoint):
    def fwd(self, x: Tensor) -> Any:
        Faults.pass_by("fwd")
        return super().fwd(x)

    def bwd(self, dy: Tensor, saved: Any) -> Any:
        Faults.pass_by("bwd")
        return super().bwd(dy, saved)


class RecoverableJoint(FaultyJoint):
    def unfused(self, saved: Any) -> dict[str, sf.Saved]:
        Faults.pass_by("unfused")
        return {"bias": ops.Bias.Saved(), "act": ops.Tanh.Saved(y=torch.tanh(saved.x + saved.shift))}


class FaultyInference(BiasTanhInference):
    def fwd(self, x: Tensor) -> Tensor:
        Faults.pass_by("fwd")
        return super().fwd(x)


class FaultyAdd(sf.JointFusion):
    """x + side, tanh, and the result as a public output: channels in and out of a fusion."""

    add: ops.Add
    act: ops.Tanh
    fork: ops.Fork
    outputs = ("fork_out",)

    class Saved(sf.Saved):
        y: Tensor

    def fwd(self, x: Tensor, *, add_other: Tensor) -> Any:
        Faults.pass_by("fwd")
        y = torch.tanh(x + add_other)
        return y, {"fork_out": y}, self.Saved(y=y)

    def bwd(self, dy: Tensor, saved: Any, *, d_fork_out: Tensor | None) -> Any:
        Faults.pass_by("bwd")
        dx = tanh_backward(dy if d_fork_out is None else dy + d_fork_out, saved.y)
        return dx, {"add.other": dx}

    def unfused(self, saved: Any) -> dict[str, sf.Saved]:
        return {"add": ops.Add.Saved(), "act": ops.Tanh.Saved(y=saved.y), "fork": ops.Fork.Saved()}


def model_of(*fusions: Any, dropout: float = 0.0) -> sf.Sequential:
    model = sf.Sequential(
        ops.Linear(5, 7), ops.Tanh(), ops.Dropout(dropout), ops.Linear(7, 6), ops.Tanh(), ops.Linear(6, 3),
        fusions=fusions,
    )  # fmt: skip
    randomize(model)
    return model.double()


def frozen_state(model: sf.Sequential) -> Any:
    return (
        {k: v.clone() for k, v in model.state_dict().items()},
        [{k: v for k, v in vars(m).items() if not k.startswith("_")} for m in model.modules()],
        [tuple(m._forward_hooks) for m in model.modules()],
        torch.get_rng_state(),
    )


def assert_untouched(before: Any, after: Any) -> None:
    assert_bitwise_equal(after[0], before[0])
    assert before[1] == after[1]
    assert before[2] == after[2]
    assert torch.equal(before[3], after[3])


BOOM = RuntimeError("out of resources")
ALWAYS = {
    "forward": (FaultyForward, "fwd"),
    "backward": (FaultyBackward, "bwd"),
    "joint forward": (FaultyJoint, "fwd"),
    "joint backward": (RecoverableJoint, "bwd"),
}
CASES = pytest.mark.parametrize(("fusion", "where"), ALWAYS.values(), ids=ALWAYS)


@CASES
@pytest.mark.parametrize("first", [0, 1, 3], ids=["first call", "second call", "fourth call"])
def test_a_failing_pass_ends_in_the_unfused_result(fusion: Any, where: str, first: int):
    model = model_of(fusion)
    x = draw(3, 5)
    assert model.plan(x).count(fusion.__name__) == 2
    with sf.fusing(False):
        want = passes(model, x)
    Faults.at[where] = dict.fromkeys(range(first, 100), BOOM)
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            assert_same(passes(model, x), want)
    # Two in each call. If the second fails in a forward in which the first did not, both run again; a backward goes on.
    assert Faults.calls[where] == (7 if first % 2 and where == "fwd" else 6)


@CASES
def test_gradients_are_counted_once(fusion: Any, where: str):
    model, x, dy = model_of(fusion), draw(3, 5), draw(3, 3, seed=99)
    with sf.fusing(False):
        want = passes(model, x)
    Faults.always(where, BOOM)
    leaf = x.clone().requires_grad_()
    before = {name: draw(*p.shape, seed=40 + i) for i, (name, p) in enumerate(model.named_parameters())}
    for name, p in model.named_parameters():
        p.grad = before[name].clone()
    fired = dict.fromkeys(before, 0)
    for name, p in model.named_parameters():
        p.register_hook(lambda g, name=name: fired.__setitem__(name, fired[name] + 1))
    with pytest.warns(FallbackWarning):
        model(leaf).backward(dy)
    torch.testing.assert_close(leaf.grad, want["d_x"])
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, before[name] + want[f"d_{name}"])
    assert fired == dict.fromkeys(before, 1)


@CASES
def test_the_model_and_the_generator_are_as_they_would_be(fusion: Any, where: str):
    model, x = model_of(fusion, dropout=0.5), draw(3, 5)
    torch.manual_seed(6)
    with sf.fusing(False):
        want = passes(model, x)
    state = frozen_state(model)
    Faults.always(where, BOOM)
    torch.manual_seed(6)
    with pytest.warns(FallbackWarning):
        found = passes(model, x)
    assert_same(found, want)
    assert_untouched(state, frozen_state(model))
    Faults.clear()
    torch.manual_seed(6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(passes(model, x), want)


@CASES
def test_it_is_warned_once_per_plan_and_reason(fusion: Any, where: str):
    model = model_of(fusion)
    Faults.at[where] = {n: RuntimeError("first reason" if n < 2 else "second reason") for n in range(100)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):  # two positions, so calls 0 to 3
            passes(model, draw(3, 5))
    texts = [str(w.message) for w in caught if w.category is FallbackWarning]
    reasons = ["(RuntimeError: first reason)", "(RuntimeError: second reason)"]
    assert [[reason in text for reason in reasons] for text in texts] == [[True, False], [False, True]]
    assert all(text.startswith(f"{fusion.__name__} at position ") for text in texts)
    with pytest.warns(FallbackWarning):  # another row count is another plan
        passes(model, draw(33, 5))


@CASES
@pytest.mark.filterwarnings("ignore::seqfuse.FallbackWarning")
def test_what_fails_again_and_again_is_not_tried_for_ever(fusion: Any, where: str):
    model, x = model_of(fusion), draw(3, 5)
    want = passes(model, x)
    Faults.always(where, BOOM)
    calls = []
    for _ in range(6):
        assert_same(passes(model, x), want)
        calls.append(Faults.calls[where])
    assert calls[2] == calls[-1] > 0
    name = fusion.__name__
    assert model.plan(x).count(name) == 0
    reasons = [r.reason for r in model.plan(x).refused if r.fusion == name]
    assert reasons
    assert set(reasons) == {"it failed 3 times: RuntimeError: out of resources"}
    model.append(ops.Identity())  # another sequence: the fusion is tried again
    Faults.clear()
    assert model.plan(x).count(name) > 0


@CASES
def test_under_on_error_raise_the_failure_is_one_clear_error(fusion: Any, where: str):
    model, x = model_of(fusion), draw(3, 5)
    Faults.always(where, BOOM)
    with sf.fusing(on_error="raise"):
        with pytest.raises(KernelError, match="RuntimeError: out of resources") as caught:
            model(x.requires_grad_()).sum().backward()
        error = caught.value
        assert error.__cause__ is BOOM
        assert (error.code, error.operation) == ("SF401", fusion.__name__)
        assert error.position in (1, 5)
    assert Faults.calls["unfused"] == 0
    assert x.grad is None
    assert all(p.grad is None for p in model.parameters())
    Faults.clear()
    with sf.fusing(on_error="raise"):
        assert passes(model, draw(3, 5))["d_0.weight"].abs().max() > 0


def test_a_joint_backward_without_unfused_is_an_error_that_says_what_to_define():
    model, x = model_of(FaultyJoint), draw(3, 5)
    with sf.fusing(False):
        want = passes(model, x)
    state = frozen_state(model)
    Faults.at["bwd"] = {0: BOOM}
    y = model(x.requires_grad_())
    with pytest.raises(KernelError, match="backward of a joint fusion failed: RuntimeError: out of res") as caught:
        y.backward(draw(3, 3, seed=99), retain_graph=True)
    assert caught.value.__cause__ is BOOM
    assert caught.value.hint == "define unfused(saved) -> {slot: Saved} to let it fall back"
    assert caught.value.operation == "FaultyJoint"
    assert all(p.grad is None for p in model.parameters()), "no part of a failed segment is counted"
    y.backward(draw(3, 3, seed=99))
    found = {"out": y.detach(), "d_x": x.grad, **{f"d_{n}": p.grad for n, p in model.named_parameters()}}
    assert_same(found, want)
    assert_untouched(state, frozen_state(model))


def test_an_unfused_that_fails_itself_is_a_clear_error():
    model = model_of(RecoverableJoint)
    Faults.always("bwd", BOOM)
    Faults.always("unfused", KeyError("shift"))
    with pytest.raises(KernelError, match="KeyError") as caught:
        model(draw(3, 5).requires_grad_()).sum().backward()
    assert caught.value.operation == "RecoverableJoint"
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("wrong", ["missing", "type", "not a dictionary"])
def test_an_unfused_that_returns_something_else_is_a_clear_error(wrong: str):
    class Wrong(FaultyJoint):
        def unfused(self, saved: Any) -> Any:
            if wrong == "missing":
                return {"bias": ops.Bias.Saved()}
            if wrong == "type":
                return {"bias": ops.Bias.Saved(), "act": ops.SiLU.Saved(x=saved.x)}
            return saved

    model = model_of(Wrong)
    Faults.always("bwd", BOOM)
    with pytest.raises((KernelError, PluginError)) as caught:
        model(draw(3, 5).requires_grad_()).sum().backward()
    assert caught.value.operation == "Wrong"
    assert all(p.grad is None for p in model.parameters())


def test_a_failing_inference_fusion_falls_back():
    model, x = model_of(FaultyInference), draw(3, 5)
    want = passes(model, x)["out"]
    Faults.at["fwd"] = {1: BOOM}
    with torch.no_grad():
        assert model.plan(x).count("FaultyInference") == 2
        with pytest.warns(FallbackWarning, match="FaultyInference at position 5 failed"):
            torch.testing.assert_close(model(x), want)
        torch.testing.assert_close(model(x), want)
        Faults.always("fwd", BOOM)
        with sf.fusing(on_error="raise"), pytest.raises(KernelError):
            model(x)


@pytest.mark.parametrize("where", ["fwd", "bwd"])
def test_channels_are_neither_lost_nor_counted_twice(where: str):
    model = sf.Sequential(
        ops.Linear(5, 5), ops.Fork("far"), ops.Add("side"), ops.Tanh(), ops.Fork("mid"), ops.Scale(-0.5),
        ops.Add("side"), ops.Add("mid"), ops.Add("far"), fusions=(FaultyAdd,),
    )  # fmt: skip
    randomize(model.double())
    # "mid" is read inside the sequence, so its gradient arrives in addition to dy.
    x, side, dy = draw(3, 5).requires_grad_(), draw(3, 5, seed=2).requires_grad_(), draw(3, 5, seed=3)
    leaves = [x, side, *model.parameters()]
    with sf.fusing(False):
        want = torch.autograd.grad(model(x, side=side), leaves, dy)
    assert model.plan(x, side=side).count("FaultyAdd") == 1
    fused = torch.autograd.grad(model(x, side=side), leaves, dy)
    Faults.always(where, BOOM)
    with pytest.warns(FallbackWarning, match="FaultyAdd"):
        found = torch.autograd.grad(model(x, side=side), leaves, dy)
    for a, b, c in zip(found, fused, want, strict=True):
        assert c.abs().max() > 0
        torch.testing.assert_close(a, c)
        torch.testing.assert_close(b, c)


def test_only_the_failing_fusion_falls_back():
    class Other(sf.JointFusion):
        act: ops.Tanh
        linear: ops.Linear

        class Saved(sf.Saved):
            x: Tensor
            y: Tensor
            weight: Tensor

        ran = 0

        def fwd(self, x: Tensor) -> Any:
            y = torch.tanh(x)
            return y @ self.linear.weight.t(), self.Saved(x=x, y=y, weight=self.linear.weight)

        def bwd(self, dy: Tensor, saved: Any) -> Any:
            Other.ran += 1
            return tanh_backward(dy @ saved.weight, saved.y), {"linear.weight": dy.t() @ saved.y}

    model = sf.Sequential(
        ops.Tanh(), ops.Linear(5, 7), ops.Tanh(), ops.Scale(2.0), ops.Tanh(), ops.Linear(7, 3, bias=False),
        fusions=(FaultyForward, Other),
    )  # fmt: skip
    randomize(model.double())
    x = draw(3, 5)
    with sf.fusing(False):
        want = passes(model, x)
    assert [s.name for s in model.plan(x).forward if s.fused] == ["Other", "FaultyForward", "Other"]
    Faults.always("fwd", BOOM)
    with pytest.warns(FallbackWarning, match="FaultyForward"):
        assert_same(passes(model, x), want)
    assert Other.ran == 2


def test_a_backward_may_fail_in_one_of_two_walks_over_a_graph():
    model, x, dy = model_of(FaultyBackward), draw(3, 5), draw(3, 3, seed=99)
    with sf.fusing(False):
        want = passes(model, x)
    leaves = [leaf := x.clone().requires_grad_(), *model.parameters()]
    y = model(leaf)
    Faults.at["bwd"] = {1: BOOM, 2: BOOM}
    with pytest.warns(FallbackWarning):
        first = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        second = torch.autograd.grad(y, leaves, dy)
    for a, b, c in zip(first, second, list(want.values())[1:], strict=True):
        torch.testing.assert_close(a, c)
        torch.testing.assert_close(b, c)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("out of memory"),
        ZeroDivisionError(),
        TypeError("bad"),
        AssertionError(),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_any_ordinary_error_falls_back(error: Exception):
    model, x = model_of(FaultyForward), draw(3, 5)
    with sf.fusing(False):
        want = passes(model, x)
    Faults.always("fwd", error)
    with pytest.warns(FallbackWarning):
        assert_same(passes(model, x), want)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("Triton Error [HIP]:  Code: 700, Messsage: an illegal memory access was encountered"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: uncorrectable ECC error encountered"),
        RuntimeError("CUDA error: the launch timed out and was terminated"),
    ],
    ids=["torch", "Triton", "Triton on AMD", "an extension", "memory", "timeout"],
)
@CASES
def test_an_error_of_the_device_is_never_hidden(fusion: Any, where: str, error: Exception):
    model = model_of(fusion)
    Faults.always(where, error)
    with pytest.raises(KernelError, match=re.escape(str(error))) as caught:
        model(draw(3, 5)).sum().backward()
    assert "compute-sanitizer" in str(caught.value)
    assert Faults.calls["unfused"] == 0, "nothing more may run on that device"


@pytest.mark.parametrize("where", ["fwd", "bwd"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=["interrupt", "exit"])
def test_an_interrupt_is_not_caught(error: BaseException, where: str):
    model = model_of(FaultyForward if where == "fwd" else FaultyBackward)
    Faults.always(where, error)
    with pytest.raises(type(error)):
        model(draw(3, 5)).sum().backward()


def test_a_failure_of_fused_and_unfused_alike_raises_that_of_the_operation():
    class Failing(sf.Pointwise):
        def reference(self, x: Tensor) -> Tensor:
            raise ValueError("the operation itself")

    class Both(sf.ForwardFusion):
        bias: ops.Bias
        act: Failing

        def fwd(self, x: Tensor) -> Any:
            raise BOOM

    model = sf.Sequential(ops.Bias(5), Failing(), fusions=(Both,))
    with pytest.raises(ValueError, match="the operation itself") as caught:
        model(draw(3, 5).float())
    assert caught.value.__notes__ == ["in operation Failing at position 1"]


def test_a_copy_of_a_model_that_fell_back_works():
    model, x = model_of(RecoverableJoint), draw(3, 5)
    Faults.always("bwd", BOOM)
    with pytest.warns(FallbackWarning):
        want = passes(model, x)
    Faults.clear()
    assert_same(passes(copy.deepcopy(model), x), want)


# Contracts ------------------------------------------------------------------------------------------------------------


B, T = ops.Bias.Saved, ops.Tanh.Saved


class Counting(Doubles):
    """In passes that may run once."""

    repeatable = False
    ran: ClassVar[list[str]] = []

    def fwd(self, x: Tensor) -> Any:
        self.ran.append("fwd")
        return super().fwd(x)

    def bwd(self, dy: Tensor, saved: Any) -> Any:
        self.ran.append("bwd")
        return super().bwd(dy, saved)


class Breaking(Doubles):
    """A pass fails if `broken` says so, or returns something else than saved tensors."""

    broken: ClassVar[str] = ""

    def fwd(self, x: Tensor) -> Any:
        if self.broken == "fwd":
            raise RuntimeError("broken")
        y, saved = super().fwd(x)
        return y, self.Saved(x=3) if self.broken == "saved" else saved

    def bwd(self, dy: Tensor, saved: Any) -> Any:
        if self.broken == "bwd":
            raise RuntimeError("broken")
        return super().bwd(dy, saved)


@pytest.mark.parametrize("calls", [0, 2], ids=["first call", "third call"])
@pytest.mark.parametrize("broken", ["fwd", "saved", "bwd"])
def test_what_may_run_once_does_not_run_again_where_an_operation_fails(
    broken: str, calls: int, monkeypatch: pytest.MonkeyPatch
):
    first, second = (Breaking(), Counting()) if broken == "bwd" else (Counting(), Breaking())
    model, x = sf.Sequential(first, second, ops.Tanh()), draw(3, 4).requires_grad_()
    for _ in range(calls):
        model(x).sum().backward()
    monkeypatch.setattr(Breaking, "broken", broken)
    Counting.ran.clear()
    with pytest.raises((RuntimeError, TypeError)) as caught:
        model(x).sum().backward()
    at = 0 if broken == "bwd" else 1
    assert f"in operation Breaking at position {at}" in caught.value.__notes__
    assert Counting.ran == ["fwd", "bwd"][: 1 + (broken == "bwd")]


@pytest.mark.parametrize("calls", [0, 2], ids=["first call", "third call"])
def test_what_may_run_once_does_not_run_again_where_a_fusion_fails(calls: int):
    """After it in the forward pass; a backward pass continues where it fails."""
    pair = ops.Bias(4), ops.Tanh()
    x = draw(3, 4).float().requires_grad_()
    ahead = sf.Sequential(Counting(), *pair, fusions=(FaultyJoint,))
    back = randomize(sf.Sequential(*pair, Counting(), fusions=(FaultyBackward,)))
    with sf.fusing(False):
        want = passes(back, x)
    for _ in range(calls):
        ahead(x).sum().backward()
        assert_same(passes(back, x), want)
    for name in ("fwd", "bwd"):
        Faults.always(name, BOOM)
    Counting.ran.clear()
    with pytest.raises(KernelError, match="cannot run twice"):
        ahead(x).sum().backward()
    with pytest.warns(FallbackWarning, match="out of resources"):
        assert_same(passes(back, x), want)
    assert Counting.ran == ["fwd", "fwd", "bwd"]


class Varying(Doubles):
    """y = 2 x; each call saves something else."""

    class Saved(sf.Saved):
        x: Tensor | None
        more: tuple[Tensor, ...]
        call: int

    ran: ClassVar[list[str]] = []

    def fwd(self, x: Tensor) -> Any:
        self.ran.append("fwd")
        call = len(self.ran)
        return 2 * x, self.Saved(x=x if call % 2 else None, more=(x,) * (call % 3), call=call)

    def bwd(self, dy: Tensor, saved: Any) -> Any:
        assert (saved.x is not None, len(saved.more)) == (saved.call % 2 == 1, saved.call % 3)
        return 2 * dy, {}


def test_a_forward_that_saves_something_else_in_each_call_runs_once_in_each() -> None:
    model, x = sf.Sequential(Varying(), ops.Tanh()), draw(3, 4).requires_grad_()
    Varying.ran.clear()
    for call in range(1, 8):
        (dx,) = torch.autograd.grad(model(x).sum(), x)
        torch.testing.assert_close(dx, 2 * (1 - (2 * x).tanh() ** 2))
        assert len(Varying.ran) == call
