"""How `sf.tune` takes times, and its answer to whatever cannot be timed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import cost_table, ops
from seqfuse.tune import timing
from tests.tune import kit
from tests.tune.kit import TUNING, Halve, Quick, Slow, X, failing, forget, forward, pair, times

# Failures.


def test_one_that_raises_is_refused_with_the_reason_and_not_tried_again(clock: kit.FakeClock):
    model = pair(forward("Broken", failing(ArithmeticError("no such luck"))), Quick)
    report = sf.tune(model, X, modes="train")
    reason = "it failed when it was measured: ArithmeticError: no such luck"
    assert {(r.fusion, r.chosen, r.note) for r in report.rows} == {("Broken", False, reason), ("Quick", True, "")}
    assert (model.plan(X).refused[0].fusion, model.plan(X).refused[0].reason) == ("Broken", reason)
    clock.calls = 0
    assert sf.tune(model, X, modes="train").measured == clock.calls == 0


def test_one_that_wants_memory_is_tried_again_by_the_next_process(monkeypatch: pytest.MonkeyPatch):
    model = pair(forward("Starved", failing(torch.OutOfMemoryError("not now"))))
    assert "OutOfMemoryError" in sf.tune(model, X, modes="train").rows[0].note
    assert sf.tune(model, X, modes="train").measured == 0
    forget(monkeypatch)
    assert sf.tune(model, X, modes="train").measured == 1


class Hanging:
    """Never returns from its second call on, or from its first."""

    quick = 0
    ended = threading.Event()

    def __call__(self, fusion: Any, x: Tensor) -> None:
        if Hanging.quick == 0:
            assert Hanging.ended.wait(100)
        Hanging.quick -= 1


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ends what hangs, so that no later test is timed beside it."""
    monkeypatch.setattr(Hanging, "ended", threading.Event())
    yield
    Hanging.ended.set()
    for thread in threading.enumerate():
        if thread.name == "seqfuse-tune":
            thread.join(100)


@pytest.mark.parametrize(
    ("quick", "why"),
    [(0, "it took longer than 0.6 s before it could be timed"), (1, "it took longer than 0.5 s")],
    ids=["compiling", "timing"],
)
def test_one_that_never_returns_is_left_behind_and_tried_again_by_the_next_process(
    quick: int, why: str, monkeypatch: pytest.MonkeyPatch, hanging: None
):
    monkeypatch.setattr(timing, "LIMIT", 0.5)
    monkeypatch.setattr(timing, "COMPILING", 0.6)
    monkeypatch.setattr(Hanging, "quick", quick)
    model = pair(forward("Hangs", Hanging()), Quick)
    report = sf.tune(model, X, modes="train")
    assert {r.fusion: r.note for r in report.rows} == {"Hangs": f"it failed when it was measured: {why}", "Quick": ""}
    assert sf.tune(model, X, modes="train").measured == 0
    forget(monkeypatch)
    assert sf.tune(model, X, modes="train").measured == 1


def test_what_is_compiled_in_the_first_call_is_not_in_the_time():
    seen: list[str] = []

    def run(name: str) -> Callable[[], None]:
        return lambda: seen.append(name)

    timing.time_passes(lambda: (run("fused"), run("unfused")), torch.device("cpu"))
    assert seen[:4] == ["unfused", "fused", "unfused", "fused"]  # none of which counts


def test_a_fusion_that_breaks_its_contract_is_refused():
    wrong = forward("Wrong", lambda self, x: (x.double(), {"bias": ops.Bias.Saved(), "halve": Halve.Saved()}))
    (row,) = sf.tune(pair(wrong), X, modes="train").rows
    assert "PluginError" in row.note


def test_operations_that_fail_by_themselves_say_nothing_of_the_fusion():
    class Fails(sf.UnfusedOperation):
        class Saved(sf.Saved):
            pass

        def reference(self, x: Tensor) -> Tensor:
            return x

        def fwd(self, x: Tensor) -> Any:
            raise ArithmeticError("mine")

        def bwd(self, dy: Tensor, saved: Any) -> Any:
            return dy, {}

    class Fused(sf.ForwardFusion):
        bias: ops.Bias
        fails: Fails

        def fwd(self, x: Tensor) -> Any:
            return x + self.bias.bias, {"bias": ops.Bias.Saved(), "fails": Fails.Saved()}

    model = sf.Sequential(ops.Bias(4), Fails(), fusions=(Fused,))
    report = sf.tune(model, X, modes="train")
    assert report.rows[0].note == "not measured: what it would replace raised ArithmeticError: mine"
    assert report.measured == 0
    assert model.plan(X).count("Fused") == 1


def test_want_of_memory_for_scratch_says_nothing_of_the_fusion(monkeypatch: pytest.MonkeyPatch):
    def starved(device: torch.device) -> Any:
        raise torch.OutOfMemoryError("no room to flush")

    monkeypatch.setattr(timing, "clock", starved)
    (row,) = sf.tune(pair(Quick), X, modes="train").rows
    assert row.note == "not measured: what it would replace raised OutOfMemoryError: no room to flush"
    assert pair(Slow).plan(X).count("Slow") == 1


@pytest.mark.parametrize(
    ("kind", "said"), [(torch.AcceleratorError, ""), (RuntimeError, "Triton Error [CUDA]: ")], ids=["torch", "Triton"]
)
def test_a_lost_device_ends_it_and_is_remembered(kind: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch):
    breaks = forward("Breaks", failing(kind(f"{said}an illegal memory access was encountered")))
    with pytest.raises(sf.KernelError, match="its state is lost"):
        sf.tune(pair(breaks), X, modes="train")
    forget(monkeypatch)
    assert "illegal memory access" in pair(breaks).plan(X).refused[0].reason


def test_a_device_that_is_lost_while_times_are_taken_ends_it(monkeypatch: pytest.MonkeyPatch):
    def lost(run: Any) -> float:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    monkeypatch.setattr(timing, "clock", lambda device: lost)
    with pytest.raises(sf.KernelError, match="its state is lost"):
        timing.time_passes(lambda: (int, int), torch.device("cpu"))


@pytest.mark.parametrize("what", ["compiling", "capturing", "global hooks", "vmap", "fusing off"])
def test_where_nothing_can_be_timed_the_declared_costs_stay(what: str, monkeypatch: pytest.MonkeyPatch):
    model, x, handle = pair(Slow), X, None
    fusing = sf.fusing(enabled=what != "fusing off")
    if what == "compiling":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    elif what == "capturing":
        monkeypatch.setattr(Tensor, "device", torch.device("cuda", 0))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    elif what == "vmap":
        monkeypatch.setattr("torch._C._functorch.peek_interpreter_stack", lambda: 1)
        monkeypatch.setattr("seqfuse.autograd._interpreter", lambda: 1)
    else:
        handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        with fusing, pytest.warns(UserWarning, match="nothing was tuned: .*fusions keep the costs they declare"):
            report = sf.tune(model, x)
    finally:
        if handle is not None:
            handle.remove()
    monkeypatch.undo()
    assert report.rows == ()
    assert model.plan(X).count("Slow") == 1


def test_parametrized_and_untraceable_parts_are_skipped_with_a_reason():
    class Peeks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum().item() > 0 else -x

    model = sf.Sequential(ops.Bias(4), Halve(), Peeks(), ops.Bias(4), Halve(), fusions=(Quick,))
    report = sf.tune(model, X, modes="train")
    assert [(r.fusion, r.at) for r in report.rows] == [("Quick", "0-1")]
    assert "what comes after an error in train mode: DataDependentOutputException" in report.skipped[0]
    bound = sf.Sequential(ops.Bias(4), Halve(), fusions=(Quick,))
    nn.utils.parametrize.register_parametrization(bound[0], "bias", nn.Identity())
    report = sf.tune(bound, X, modes="train")
    assert report.skipped == ("the model 0-1: a parametrization makes its parameters",)
    assert report.rows == ()

    class Own(nn.Parameter):
        pass

    odd = sf.Sequential(ops.Bias(4), Halve(), fusions=(Quick,))
    odd[0].bias = Own(torch.zeros(4))
    report = sf.tune(odd, X, modes="train")
    assert report.skipped == ("the model 0-1: its parameters are not plain tensors, so it runs unfused",)
    assert report.rows == ()


def test_a_model_that_cannot_be_copied_is_an_error():
    model = pair(Quick)
    model.handle = open(__file__)  # noqa: SIM115
    try:
        with pytest.raises(sf.InputError, match="Sequential cannot be copied") as caught:
            sf.tune(model, X)
    finally:
        model.handle.close()
    assert caught.value.code == "SF106"


def test_tied_weights_inference_mode_and_wrappers_are_no_hindrance():
    model = sf.Sequential(ops.Linear(4, 4), ops.ReLU(), ops.Linear(4, 4))
    model[2].weight = model[0].weight
    with torch.inference_mode():
        assert sf.tune(nn.Sequential(model), torch.ones(6, 4), modes="eval").measured > 0
    assert {r.note for r in sf.tune(model, X).rows} == {""}


# Taking times.


def test_what_is_measured_runs_under_the_autocast_of_the_caller_and_without_gradients():
    seen: list[Any] = []

    def look(self: Any, x: Tensor) -> None:
        on = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        seen.append((on, torch.is_grad_enabled(), torch.is_autocast_cache_enabled()))

    with torch.autocast("cpu", torch.float16):  # not the one by default
        sf.tune(pair(forward("Looks", look)), X, modes="train")
        assert torch.is_autocast_cache_enabled()
    assert set(seen) == {(torch.float16, False, False)}


def test_rounds_go_by_turns_and_the_median_counts(monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []
    given = {"fused": iter([99.0, 5.0, 1.0, 900.0]), "unfused": iter([99.0, 7.0, 800.0, 3.0])}

    def clock(device: torch.device) -> Any:
        def timed(run: Any) -> float:
            return next(given[run()])

        return timed

    def run(name: str) -> Any:
        return lambda: (order.append(name), name)[1]

    monkeypatch.setattr(timing, "clock", clock)
    found = timing.time_passes(lambda: (run("fused"), run("unfused")), torch.device("cpu"))
    assert (found.fused, found.unfused) == (5.0, 7.0)
    assert found.refusal == "measured 0.0 us against 0.0 us unfused, within 1.8 us of noise"
    # The first calls compile, the second ones are the clock's to warm up with.
    assert order == ["unfused", "fused"] * 2 + ["fused", "unfused"] * 3


@pytest.mark.parametrize("rounds", [3, 8, 16, 100])
def test_a_win_within_the_noise_is_none(rounds: int, monkeypatch: pytest.MonkeyPatch):
    random = torch.Generator().manual_seed(0)

    def clock(device: torch.device) -> Any:
        return lambda run: run() + 10 * float(torch.randn((), generator=random))

    def chosen(faster: float) -> int:
        """How many of a hundred measurements choose it."""

        def make() -> Any:
            return lambda: 1000.0 - faster, lambda: 1000.0

        return sum(timing.time_passes(make, torch.device("cpu")).refusal is None for _ in range(100))

    monkeypatch.setattr(timing, "clock", clock)
    monkeypatch.setattr(timing, "ROUNDS", (rounds, rounds))
    assert chosen(0) <= 8
    # The standard error of the median difference.
    error = 1.2533 * 2**0.5 * 10 / rounds**0.5
    assert chosen(0.5 * error) <= 15
    assert chosen(12 * error) >= 90


def slices(monkeypatch: pytest.MonkeyPatch, busy: int, length: float) -> list[float | None]:
    """For so many measurements other work holds samples up for 0, 1 or 2 slices; the seconds that each was given."""
    random, seconds, measure = torch.Generator().manual_seed(0), list[float | None](), TUNING.time_passes

    def held() -> float:
        return length * int(torch.randint(3, (), generator=random))

    def clock(device: torch.device) -> Any:
        timed = kit.CLOCK(device)
        return lambda run: timed(run) + (held() if len(seconds) <= busy else 0)

    def counted(make: Any, device: torch.device, given: float | None = None) -> Any:
        seconds.append(given)
        return measure(make, device, given)

    monkeypatch.setattr(timing, "clock", clock)
    monkeypatch.setattr(TUNING, "time_passes", counted)
    return seconds


@pytest.mark.parametrize("length", [20_000 * kit.US, 30 * kit.US], ids=["scheduler", "jitter"])
def test_a_busy_machine_is_measured_again_and_what_stays_noisy_is_not_kept(
    length: float, monkeypatch: pytest.MonkeyPatch, cache: Path
):
    model, again = pair(Slow), slices(monkeypatch, 3, length)
    report = sf.tune(model, X, modes="train")
    assert (report.measured, report.file) == (0, None)
    (row,) = report.rows
    why = "x the estimate, and noisy" if length > 1000 * kit.US else "not kept: the noise exceeds the difference"
    assert row.note.startswith("not kept: ")
    assert row.note.endswith(why)
    assert row.noise_us > 0.1 * row.fused_us
    assert not list(cache.glob("*.json"))
    assert model.plan(X).count("Slow") == 1  # by its estimate
    assert "this machine is busy: 1 measurement was too noisy to keep" in str(report)
    assert again == [timing.SECONDS, 4 * timing.SECONDS, 9 * timing.SECONDS]
    quiet = sf.tune(model, X, modes="train")  # it is not known, so that it is measured now
    assert (quiet.measured, times(quiet)) == (1, {("Slow", "train"): (80, 50, False)})
    assert "this machine is busy" not in str(quiet)


def test_what_a_moment_made_noisy_is_measured_again_after_the_others(monkeypatch: pytest.MonkeyPatch):
    again = slices(monkeypatch, 1, 20_000 * kit.US)
    report = sf.tune(pair(Slow, Quick), X, modes="train")
    assert again == [timing.SECONDS, timing.SECONDS, 4 * timing.SECONDS]
    assert times(report) == {("Slow", "train"): (80, 50, False), ("Quick", "train"): (10, 50, True)}
    assert (report.measured, {r.note for r in report.rows}) == (2, {""})


@pytest.mark.parametrize(
    ("fused", "unfused", "noise", "doubtful"),
    [
        (80, 50, 20, None),
        (50, 80, 31, "the noise exceeds the difference"),
        (80, 50, 31, "the noise exceeds the difference"),
        (50, 51, 2, None),  # equal, as far as anybody cares
        (23_764, 48_266, 18_664, "12,066x the estimate, and noisy"),
        (20_000, 50, 300, None),  # it sleeps: slow, and steadily so
        (20_000, 20_000, 300, "the noise exceeds the difference"),
    ],
)
def test_a_measurement_is_doubted_if_its_noise_hides_the_difference_or_it_is_far_from_its_estimate(
    fused: float, unfused: float, noise: float, doubtful: str | None
):
    assert timing.doubt(cost_table.Measurement(fused, unfused, noise=noise), 4.0) == doubtful


def test_on_a_gpu_events_stand_around_the_call_after_the_cache_was_overwritten(monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            order.append("record")

        def query(self) -> bool:
            return False  # the device has not come to it: the host is ahead

        def synchronize(self) -> None:
            order.append("wait")

        def elapsed_time(self, other: Any) -> float:
            return 0.25  # milliseconds

    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append("sleep"), raising=False)
    monkeypatch.setattr(timing, "FLUSHED_BYTES", 8)
    zero = Tensor.zero_
    monkeypatch.setattr(Tensor, "zero_", lambda t: (order.append(f"flush {t.numel()}"), zero(t))[1])
    assert timing.clock(torch.device("cpu")) is timing._on_cpu
    timed = timing._on_cuda(torch.device("cpu"))
    assert timed(lambda: order.append("run")) == 250_000
    # While the device sleeps the host launches everything.
    assert order == ["sleep", "flush 8", "record", "run", "record", "wait"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool], ids=str)
def test_what_is_measured_on_is_like_what_enters(dtype: torch.dtype):
    made = timing.scratch_like(torch.ones(4, 3, dtype=dtype), torch.Generator().manual_seed(0))
    assert (made.shape, made.dtype) == ((4, 3), dtype)
    # Of numbers that may be indices nothing is known but that 0 is one of each table.
    assert len({*made.flatten().tolist()}) == (1 if dtype in (torch.int64, torch.bool) else 12)
