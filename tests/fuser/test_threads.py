"""Threads that share a model, and processes forked after the import."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import seqfuse as sf
from seqfuse import ops
from seqfuse.casts import cast_once, lowered
from seqfuse.run import fuser as running
from tests.alterations import Doubled

from .fusions import BiasTanhBackward, BiasTanhForward, BiasTanhInference, BiasTanhJoint
from .kit import counting_plans, draw, mlp, plain_mlp


@pytest.fixture
def impatient() -> Iterator[None]:
    """Threads that take turns after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(work: list[Callable[[], Any]]) -> list[Any]:
    """Runs each function in its own thread, all released at once; raises the first error."""
    start = threading.Barrier(len(work))
    results: list[Any] = [None] * len(work)
    errors: list[str] = []

    def run(i: int) -> None:
        try:
            start.wait(60)
            results[i] = work[i]()
        except BaseException:
            errors.append(traceback.format_exc())

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    assert not errors, f"{len(errors)} of {len(work)} threads failed, the first:\n{errors[0]}"
    return results


def gradients(model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    return [y.detach(), *torch.autograd.grad(y, [leaf, *model.parameters()], dy)]


@pytest.mark.parametrize(
    "fusions",
    [(), (BiasTanhForward, BiasTanhBackward), (BiasTanhJoint, BiasTanhInference)],
    ids=["unfused", "forward and backward", "joint and inference"],
)
def test_eight_threads_share_a_model_forward_and_backward(fusions: Any, impatient: None):
    model = mlp(fusions=fusions)
    plain = plain_mlp(model)
    inputs = [draw(n, 5, seed=n) for n in (1, 3, 17, 40)]
    dys = [draw(n, 3, seed=90 + n) for n in (1, 3, 17, 40)]
    want = [gradients(plain, x, dy) for x, dy in zip(inputs, dys, strict=True)]

    def calls(thread: int) -> int:
        done = 0
        for i in range(60):
            k = (i + thread) % len(inputs)
            if (i + thread) % 3 == 0:
                with torch.no_grad():
                    y = model(inputs[k])
                assert not y.requires_grad
                torch.testing.assert_close(y, want[k][0])
            else:
                found = gradients(model, inputs[k], dys[k])
                torch.testing.assert_close(found, want[k])
            done += 1
        return done

    assert together([lambda t=t: calls(t) for t in range(8)]) == [60] * 8
    assert all(p.grad is None for p in model.parameters())


def test_threads_in_different_modes_each_run_the_plan_of_their_own(impatient: None):
    """The latest plan is remembered; no call may run another's."""
    model = mlp(dtype=torch.float32, fusions=(BiasTanhJoint, BiasTanhInference))
    x = draw(3, 5, dtype=torch.float32)
    eager = model(x).detach()

    def grad() -> None:
        for _ in range(400):
            y = model(x)
            assert y.requires_grad
            assert y.dtype == torch.float32

    def no_grad() -> None:
        with torch.no_grad():
            for _ in range(400):
                y = model(x)
                assert not y.requires_grad
                assert torch.allclose(y, eager, rtol=1e-5, atol=1e-6)

    def cast() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(400):
                assert model(x).dtype == torch.bfloat16

    def unfused() -> None:
        with sf.fusing(False):
            for _ in range(400):
                assert torch.allclose(model(x), eager, rtol=1e-5, atol=1e-6)

    together([grad, no_grad, cast, unfused, grad, no_grad])


@pytest.mark.parametrize("attempt", range(6))
def test_concurrent_first_calls_plan_once_and_are_right(attempt: int, impatient: None):
    model = mlp(fusions=(BiasTanhForward, BiasTanhBackward))
    plain, x, dy = plain_mlp(model), draw(3, 5), draw(3, 3, seed=2)
    want = gradients(plain, x, dy)
    with counting_plans() as planned, warnings.catch_warnings():
        warnings.simplefilter("error")
        for found in together([lambda: gradients(model, x, dy)] * 6):
            torch.testing.assert_close(found, want)
    assert planned.lists == 1
    assert len(planned) == 1


def test_backward_in_another_thread_than_forward():
    model = mlp(fusions=(BiasTanhJoint,))
    x, dy = draw(3, 5), draw(3, 3, seed=2)
    want = gradients(plain_mlp(model), x, dy)
    leaf = x.clone().requires_grad_()
    (y,) = together([lambda: model(leaf)])
    (found,) = together([lambda: torch.autograd.grad(y, [leaf, *model.parameters()], dy)])
    for a, b in zip(found, want[1:], strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_of_concurrent_backwards_all_arrive():
    model = mlp(fusions=(BiasTanhForward,))
    x = draw(3, 5)
    model(x).sum().backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()

    def steps() -> None:
        for _ in range(25):
            model(x).sum().backward()

    together([steps] * 6)
    for p, one in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(p.grad, 150 * one)


def test_fusing_regions_belong_to_a_thread():
    model, x = sf.Sequential(ops.Bias(5), ops.Tanh(), fusions=(BiasTanhJoint,)).double(), draw(3, 5)
    inside, outside = threading.Event(), threading.Event()

    def switches_off() -> int:
        with sf.fusing(False):
            inside.set()
            outside.wait(60)
            return model.plan(x).count("BiasTanhJoint")

    def goes_on() -> int:
        inside.wait(60)
        found = model.plan(x).count("BiasTanhJoint")
        outside.set()
        return found

    assert together([switches_off, goes_on]) == [0, 1]


def test_casts_of_parameters_belong_to_the_call_of_a_thread():
    weight, made = nn.Parameter(torch.ones(3, 3)), threading.Event()

    def first() -> torch.dtype:
        with torch.autocast("cpu", torch.bfloat16), cast_once():
            dtype = lowered(weight).dtype
            made.set()
        return dtype

    def second() -> torch.dtype:
        with torch.autocast("cpu", torch.float16), cast_once():
            made.wait(60)
            return lowered(weight).dtype

    assert together([first, second]) == [torch.bfloat16, torch.float16]


def test_a_mode_change_is_not_mixed_up_while_many_look(impatient: None):
    """After `train()` every thread drops, after `eval()` none does, however many threads ask first."""
    model = sf.Sequential(ops.Scale(1.0), ops.Dropout(0.5), ops.Scale(1.0), fusions=())
    x = torch.ones(64, 64)
    for step in range(40):
        training = step % 2 == 0
        model.train(training)
        if step % 4 < 2:
            model[2].factor = 1.0 + step  # the other mode's sequence is not kept then
        for y in together([lambda: model(x)] * 4):
            assert bool((y == 0).any()) == training


def test_parametrized_weights_are_shared_between_threads_without_their_graphs(impatient: None):
    model = mlp()
    parametrize.register_parametrization(model[1], "weight", Doubled())
    x, dy = draw(3, 5), draw(3, 3, seed=2)
    want = gradients(model, x, dy)
    assert all(g.abs().max() > 0 for g in want)

    def train() -> None:
        for _ in range(100):
            for a, b in zip(gradients(model, x, dy), want, strict=True):
                assert torch.equal(a, b)

    def serve() -> None:
        with torch.no_grad():
            for _ in range(100):
                assert torch.equal(model(x), want[0])

    together([train, serve, train, serve])


def test_dropout_in_threads_is_consistent_between_its_passes(impatient: None):
    model = sf.Sequential(ops.Scale(1.0), ops.Dropout(0.5))
    x, dy = draw(33, 17), draw(33, 17, seed=2)

    def calls() -> set[Any]:
        masks = set()
        for _ in range(50):
            leaf = x.clone().requires_grad_()
            y = model(leaf)
            (dx,) = torch.autograd.grad(y, leaf, dy)
            torch.testing.assert_close(dx * x, y * dy)
            masks.add((y == 0).numpy().tobytes())
        return masks

    masks = together([calls] * 4)
    assert len(set().union(*masks)) == 200, "no two calls drop the same elements"


def test_a_list_may_grow_while_others_run_it(impatient: None):
    """The result is that of the sequence before or after, never a mixture."""
    model = sf.Sequential(ops.Scale(2.0), ops.Scale(3.0)).double()
    x = torch.ones(3, dtype=torch.float64)
    allowed = {6.0, 30.0}
    stop = threading.Event()

    def runs() -> set[float]:
        seen = set()
        while not stop.is_set():
            seen.add(model(x)[0].item())
        return seen

    def grows() -> set[float]:
        for _ in range(30):
            model.append(ops.Scale(5.0))
            time.sleep(0.002)
            model.pop(-1)
        stop.set()
        return set()

    assert set().union(*together([runs, runs, grows])) <= allowed


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def in_a_fork(work: Callable[[], None]) -> None:
    """Runs a function in a forked child, whose exit status is the result."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.005)
    os.kill(child, 9)
    os.waitpid(child, 0)
    raise AssertionError("the forked process hangs")


@needs_fork
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_a_model_works_in_a_process_forked_after_the_import(warm: bool):
    model = mlp(fusions=(BiasTanhForward, BiasTanhInference))
    plain, x = plain_mlp(model), draw(3, 5)
    if warm:
        with torch.no_grad():
            model(x)

    def work() -> None:
        # As a worker of a data loader: no backward, which a fork after a backward must not run.
        with torch.no_grad():
            torch.testing.assert_close(model(x), plain(x))
            model.append(ops.Scale(2.0))
            torch.testing.assert_close(model(x), 2 * plain(x))

    in_a_fork(work)
    torch.testing.assert_close(model(x), plain(x))


@needs_fork
def test_a_fork_while_another_thread_plans_does_not_hang(monkeypatch: pytest.MonkeyPatch):
    model, x = mlp(), draw(3, 5)
    planning, go_on = threading.Event(), threading.Event()
    original = running.plan_region

    def slow(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name == "planner":
            planning.set()
            go_on.wait(60)
        return original(*args, **kwargs)

    monkeypatch.setattr(running, "plan_region", slow)
    planner = threading.Thread(target=lambda: model(x), name="planner")
    planner.start()
    planning.wait(60)

    def work() -> None:
        with torch.no_grad():
            model(x)

    try:
        in_a_fork(work)
    finally:
        go_on.set()
        planner.join(60)
