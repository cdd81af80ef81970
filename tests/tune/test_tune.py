"""What `sf.tune` measures, what plans make of it, and what it leaves alone."""

from __future__ import annotations

import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import cost_table, ops
from seqfuse.operation import config_version
from seqfuse.plan import Known, described, flatten
from seqfuse.testing.cases import Bench
from seqfuse.tune import TuneReport, _Search, shadow, timing
from seqfuse.tune.ranks import Ranks
from seqfuse.tune.shadow import Shadow
from tests.tune import kit
from tests.tune.kit import Halve, Quick, Slow, failing, forget, forward, pair

X = torch.ones(6, 4)
TUNING: Any = sys.modules["seqfuse.tune"]  # the package's attribute of this name is the function


def times(report: TuneReport) -> dict[tuple[str, str], tuple[float | None, float | None, bool]]:
    rounded = {}
    for r in report.rows:
        a, b = (None if t is None else round(t) for t in (r.fused_us, r.unfused_us))
        rounded[r.fusion, r.mode] = a, b, r.chosen
    return rounded


# What is chosen.


def test_a_fusion_that_is_slower_than_what_it_replaces_is_refused_with_both_times() -> None:
    model = pair(Slow)
    model(X)
    assert model.plan(X).count("Slow") == 1
    report = sf.tune(model, X, modes="train")
    assert times(report) == {("Slow", "train"): (80, 50, False)}
    plan = model.plan(X)
    assert plan.count("Slow") == 0
    (refusal,) = plan.refused
    assert refusal.reason == "measured 80.0 us against 50.0 us unfused"
    assert "measured 80.0 us against 50.0 us unfused" in str(plan)


def test_a_fusion_that_is_faster_is_chosen_although_it_declares_a_loss() -> None:
    model = pair(Slow, Quick)
    assert (model.plan(X).count("Quick"), model.plan(X).count("Slow")) == (0, 1)
    report = sf.tune(model, X, modes=("train",))
    assert times(report) == {("Slow", "train"): (80, 50, False), ("Quick", "train"): (10, 50, True)}
    assert (model.plan(X).count("Quick"), model.plan(X).count("Slow")) == (1, 0)


def test_a_real_clock_sees_a_fusion_that_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real clock; the table is put back below
    monkeypatch.setattr(cost_table, "_tables", {})

    model = pair(forward("Sleeps", lambda self, x: time.sleep(0.02)))
    (row,) = sf.tune(model, X, modes="train").rows
    assert row.fused_us is not None
    assert row.unfused_us is not None
    assert row.fused_us > 20_000 > row.unfused_us
    assert model.plan(X).refused[0].reason.startswith("measured ")


def test_each_kind_is_timed_in_the_passes_that_it_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    model = pair(Quick, kit.QuickBackward, kit.QuickJoint, kit.QuickInference)
    x = X.clone().requires_grad_()
    found = {key: value[:2] for key, value in times(sf.tune(model, x)).items()}
    assert found == {
        ("Quick", "train"): (10, 50),
        ("QuickBackward", "train"): (20, 50),
        ("QuickJoint", "train"): (33, 100),
        ("Quick", "eval"): (10, 50),
        ("QuickJoint", "eval"): (11, 50),
        ("QuickInference", "eval"): (7, 50),
    }
    plan = model.plan(x)
    assert [s.name for s in (*plan.forward, *plan.backward) if s.fused] == ["Quick", "QuickBackward"]
    with torch.no_grad():
        assert model.plan(X).count("QuickInference") == 1
    monkeypatch.setattr(shadow, "back_alone", None)  # without gradients there is none, which would take its time
    assert times(sf.tune(pair(kit.QuickJoint, width=5), torch.ones(6, 5), modes="eval")) == {
        ("QuickJoint", "eval"): (11, 50, True)
    }


def test_a_saving_is_the_difference_and_the_whole_cover_is_the_cheapest() -> None:
    class Long(kit._Pair, sf.ForwardFusion):
        first: ops.Bias
        halve: Halve
        second: ops.Bias

        def fwd(self, x: Tensor) -> Any:
            kit.spend(5)
            y = (x + self.first.bias) / 2 + self.second.bias
            nothing = ops.Bias.Saved()
            return y, {"first": nothing, "halve": Halve.Saved(), "second": nothing}

    model = sf.Sequential(ops.Bias(4), Halve(), ops.Bias(4), fusions=(Quick, Long))
    report = sf.tune(model, X, modes="train")
    assert times(report) == {("Quick", "train"): (10, 50, False), ("Long", "train"): (5, 50, True)}
    assert "superseded by Long (est. 45 us saved, against 40)" in str(model.plan(X)).replace("\n    ", " ")


def test_programs_made_before_are_made_anew_and_then_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = pair(Slow), X.clone().requires_grad_()
    model(x)
    before = model._fuser._op_lists[0]
    y = model(x)
    sf.tune(model, x, modes="train")
    y.sum().backward()  # by the plan it was made under
    calls = kit.CLOCK.now
    model(x)
    assert kit.CLOCK.now - calls == 50 * kit.US
    after = model._fuser._op_lists[0]
    assert after is not before
    model(x)
    assert model._fuser._op_lists == (after,)


def test_what_is_known_already_makes_nothing_anew() -> None:
    model = pair(Slow)
    sf.tune(model, X)
    model(X)
    op_list, version = model._fuser._op_lists[0], config_version.measured
    sf.tune(model, X)
    model(X)
    assert model._fuser._op_lists[0] is op_list
    assert config_version.measured is version


def test_nothing_is_looked_up_in_a_call_whose_program_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model = pair(Slow)
    sf.tune(model, X)
    model(X)
    monkeypatch.setattr(Known, "__init__", None)
    monkeypatch.setattr(cost_table, "table", None)
    model(X)


# What a measurement holds for.


def test_it_holds_for_the_number_of_rows_rounded_up() -> None:
    model = pair(Slow)
    sf.tune(model, torch.ones(100, 4), modes="train")
    counts = {n: model.plan(torch.ones(n, 4)).count("Slow") for n in (64, 65, 128, 129)}
    assert counts == {64: 1, 65: 0, 128: 0, 129: 1}


def test_it_holds_for_one_shape_dtype_configuration_and_set_of_gradients() -> None:
    sf.tune(pair(Slow), X, modes="train")
    other = pair(Slow)
    assert other.plan(X).count("Slow") == 0
    assert pair(Slow, width=5).plan(torch.ones(6, 5)).count("Slow") == 1
    assert pair(Slow).double().plan(X.double()).count("Slow") == 1
    assert other.plan(X.clone().requires_grad_()).count("Slow") == 1  # dx is wanted, too
    with torch.no_grad():
        assert other.plan(X).count("Slow") == 1
    other[0].requires_grad_(False)
    assert other.plan(X.clone().requires_grad_()).count("Slow") == 1


def test_what_was_measured_without_gradients_says_nothing_where_they_begin_inside_the_fusion() -> None:
    class Late(sf.ForwardFusion):
        halve: Halve
        bias: ops.Bias

        def saves(self, env: sf.Env) -> sf.Savings:
            return sf.Savings(launches=9)

        def fwd(self, x: Tensor) -> Any:
            kit.spend(500)
            return x / 2 + self.bias.bias, {"halve": Halve.Saved(), "bias": ops.Bias.Saved()}

    model = sf.Sequential(Halve(), ops.Bias(4), fusions=(Late,))
    sf.tune(model, X, modes="eval")
    assert model.plan(X).count("Late") == 1
    with torch.no_grad():
        assert model.plan(X).count("Late") == 0


def test_a_dropout_that_draws_a_mask_is_known_apart_from_one_that_does_not() -> None:
    model = sf.Sequential(ops.Dropout(0.5), ops.Add("other"), fusions=(kit.DropoutAdd,))
    sf.tune(model, X, modes="eval", other=X)
    with torch.no_grad():
        assert model.plan(X, other=X).count("DropoutAdd") == 1
        assert model.eval().plan(X, other=X).count("DropoutAdd") == 0


def test_operations_without_parameters_are_known_by_the_width_of_what_enters_them() -> None:
    class Twice(sf.ForwardFusion):
        a: Halve
        b: Halve

        def saves(self, env: sf.Env) -> sf.Savings:
            return sf.Savings(launches=9)

        def fwd(self, x: Tensor) -> Any:
            kit.spend(500)
            return x / 4, {"a": Halve.Saved(), "b": Halve.Saved()}

    model = sf.Sequential(Halve(), Halve(), fusions=(Twice,))
    sf.tune(model, X, modes="eval")
    with torch.no_grad():
        assert model.plan(X).count("Twice") == 0
        assert model.plan(torch.ones(6, 5)).count("Twice") == 1
        assert model.plan(env=sf.Env.like(X)).count("Twice") == 1  # the width is not known here


def test_two_classes_of_one_factory_and_another_source_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(takes: float) -> type[sf.FusedOperation]:
        class Made(kit._Pair, sf.ForwardFusion):
            bias: ops.Bias
            halve: Halve

            def fwd(self, x: Tensor) -> Any:
                kit.spend(takes)
                return kit.both(self, x)

        return Made

    slow, quick = make(90.0), make(9.0)
    sf.tune(pair(slow), X, modes="train")
    assert pair(slow).plan(X).count("Made") == 0
    assert pair(quick).plan(X).count("Made") == 1
    assert described.class_identity(make(90.0)) == described.class_identity(slow) != described.class_identity(quick)
    before = described.class_identity(slow)
    described.class_identity.cache_clear()
    described._written.cache_clear()
    monkeypatch.setattr(inspect, "getsource", lambda cls: "written anew")
    assert described.class_identity(slow) != before
    described.class_identity.cache_clear()
    described._written.cache_clear()


def test_it_is_for_the_environment_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    model = pair(Slow)
    sf.tune(model, X, modes="train")
    there = sf.Env.of("cuda:sm_90", rows=6)
    assert model.plan(env=there).count("Slow") == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert model.plan(X).count("Slow") == 1
        sf.tune(model, X, modes="train")
        assert model.plan(X).count("Slow") == 0
    torch.use_deterministic_algorithms(True)
    try:
        assert model.plan(X).count("Slow") == 1
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert model.plan(X).count("Slow") == 1


def test_every_candidate_of_the_default_rule_set_is_known_after_tuning() -> None:
    def block() -> sf.Sequential:
        return sf.Sequential(
            ops.Residual(ops.LayerNorm(8), ops.Linear(8, 16), ops.GeLU(), ops.Linear(16, 8), ops.Dropout(0.1)),
            nn.Linear(8, 8), ops.Scale(2.0), ops.Reshape(2, 4), ops.Linear(4, 4), ops.SiLU(), ops.Linear(4, 3),
        )  # fmt: skip

    x = torch.randn(5, 8)
    report = sf.tune(block(), x)
    assert {r.note for r in report.rows} == {""}
    other = block()
    missed: list[str] = []
    look_up = Known.__call__

    def seen(self: Known, fusion: sf.FusedOperation, a: int, b: int) -> Any:
        found = look_up(self, fusion, a, b)
        missed.extend([repr(fusion)] if found is None else [])
        return found

    Known.__call__ = seen
    try:
        other(x).sum().backward()
        other.eval()
        with torch.no_grad():
            other(x)
    finally:
        Known.__call__ = look_up
    assert missed == []


# What cannot be measured.


def test_one_that_raises_is_refused_with_the_reason_and_not_tried_again(clock: kit.FakeClock) -> None:
    model = pair(forward("Broken", failing(ArithmeticError("no such luck"))), Quick)
    report = sf.tune(model, X, modes="train")
    reason = "it failed when it was measured: ArithmeticError: no such luck"
    assert {(r.fusion, r.chosen, r.note) for r in report.rows} == {("Broken", False, reason), ("Quick", True, "")}
    assert (model.plan(X).refused[0].fusion, model.plan(X).refused[0].reason) == ("Broken", reason)
    clock.calls = 0
    assert sf.tune(model, X, modes="train").measured == clock.calls == 0


def test_one_that_wants_memory_is_tried_again_by_the_next_process(monkeypatch: pytest.MonkeyPatch) -> None:
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
) -> None:
    monkeypatch.setattr(timing, "LIMIT", 0.5)
    monkeypatch.setattr(timing, "COMPILING", 0.6)
    monkeypatch.setattr(Hanging, "quick", quick)
    model = pair(forward("Hangs", Hanging()), Quick)
    report = sf.tune(model, X, modes="train")
    assert {r.fusion: r.note for r in report.rows} == {"Hangs": f"it failed when it was measured: {why}", "Quick": ""}
    assert sf.tune(model, X, modes="train").measured == 0
    forget(monkeypatch)
    assert sf.tune(model, X, modes="train").measured == 1


def test_what_is_compiled_in_the_first_call_is_not_in_the_time() -> None:
    seen: list[str] = []

    def run(name: str) -> Callable[[], None]:
        return lambda: seen.append(name)

    timing.time_passes(lambda: (run("fused"), run("unfused")), torch.device("cpu"))
    assert seen[:4] == ["unfused", "fused", "unfused", "fused"]  # none of which counts


def test_a_fusion_that_breaks_its_contract_is_refused() -> None:
    wrong = forward("Wrong", lambda self, x: (x.double(), {"bias": ops.Bias.Saved(), "halve": Halve.Saved()}))
    (row,) = sf.tune(pair(wrong), X, modes="train").rows
    assert "PluginError" in row.note


def test_operations_that_fail_by_themselves_say_nothing_of_the_fusion() -> None:
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


def test_want_of_memory_for_scratch_says_nothing_of_the_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    def starved(device: torch.device) -> Any:
        raise torch.OutOfMemoryError("no room to flush")

    monkeypatch.setattr(timing, "clock", starved)
    (row,) = sf.tune(pair(Quick), X, modes="train").rows
    assert row.note == "not measured: what it would replace raised OutOfMemoryError: no room to flush"
    assert pair(Slow).plan(X).count("Slow") == 1


@pytest.mark.parametrize(
    ("kind", "said"), [(torch.AcceleratorError, ""), (RuntimeError, "Triton Error [CUDA]: ")], ids=["torch", "Triton"]
)
def test_a_lost_device_ends_it_and_is_remembered(
    kind: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks = forward("Breaks", failing(kind(f"{said}an illegal memory access was encountered")))
    with pytest.raises(sf.KernelError, match="its state is lost"):
        sf.tune(pair(breaks), X, modes="train")
    forget(monkeypatch)
    assert "illegal memory access" in pair(breaks).plan(X).refused[0].reason


def test_a_device_that_is_lost_while_times_are_taken_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(run: Any) -> float:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    monkeypatch.setattr(timing, "clock", lambda device: lost)
    with pytest.raises(sf.KernelError, match="its state is lost"):
        timing.time_passes(lambda: (int, int), torch.device("cpu"))


@pytest.mark.parametrize("what", ["compiling", "capturing", "global hooks", "vmap"])
def test_where_nothing_can_be_timed_the_declared_costs_stay(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, handle = pair(Slow), X, None
    if what == "compiling":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    elif what == "capturing":
        monkeypatch.setattr(Tensor, "is_cuda", True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    elif what == "vmap":
        monkeypatch.setattr("torch._C._functorch.peek_interpreter_stack", lambda: 1)
        monkeypatch.setattr("seqfuse.autograd._interpreter", lambda: 1)
    else:
        handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        with pytest.warns(UserWarning, match="nothing was tuned: .*fusions keep the costs they declare"):
            report = sf.tune(model, x)
    finally:
        if handle is not None:
            handle.remove()
    monkeypatch.undo()
    assert report.rows == ()
    assert model.plan(X).count("Slow") == 1


def test_parametrized_and_untraceable_parts_are_skipped_with_a_reason() -> None:
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


def test_a_model_that_cannot_be_copied_is_an_error() -> None:
    model = pair(Quick)
    model.handle = open(__file__)  # noqa: SIM115
    try:
        with pytest.raises(sf.InputError, match="Sequential cannot be copied") as caught:
            sf.tune(model, X)
    finally:
        model.handle.close()
    assert caught.value.code == "SF106"


def test_tied_weights_inference_mode_and_wrappers_are_no_hindrance() -> None:
    model = sf.Sequential(ops.Linear(4, 4), ops.ReLU(), ops.Linear(4, 4))
    model[2].weight = model[0].weight
    with torch.inference_mode():
        assert sf.tune(nn.Sequential(model), torch.ones(6, 4), modes="eval").measured > 0
    assert {r.note for r in sf.tune(model, X).rows} == {""}


def test_calls_of_other_threads_go_on_and_take_the_new_plan() -> None:
    model, errors, stop = pair(Slow), list[BaseException](), threading.Event()
    wanted = (X + model[0].bias) / 2

    def call() -> None:
        try:
            while not stop.is_set():
                assert torch.equal(model(X), wanted)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for width in (5, 6):
        sf.tune(pair(Slow, width=width), torch.ones(6, width), modes="train")
    machine = cost_table.Machine.of(sf.Env.like(X))
    assert machine is not None
    sf.tune(pair(Slow), X, budget=0)
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []
    sf.tune(model, X, modes="train")
    assert model.plan(X).count("Slow") == 0


# How time is taken.


def test_what_is_measured_runs_under_the_autocast_of_the_caller_and_without_gradients() -> None:
    seen: list[Any] = []

    def look(self: Any, x: Tensor) -> None:
        on = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        seen.append((on, torch.is_grad_enabled(), torch.is_autocast_cache_enabled()))

    with torch.autocast("cpu", torch.float16):  # not the one by default
        sf.tune(pair(forward("Looks", look)), X, modes="train")
        assert torch.is_autocast_cache_enabled()
    assert set(seen) == {(torch.float16, False, False)}


def test_rounds_go_by_turns_and_the_median_counts(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_win_within_the_noise_is_none(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
) -> None:
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


def test_what_a_moment_made_noisy_is_measured_again_after_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
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
) -> None:
    assert timing.doubt(cost_table.Measurement(fused, unfused, noise=noise), 4.0) == doubtful


def test_on_a_gpu_events_stand_around_the_call_after_the_cache_was_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    "given",
    [{"x": [1.0]}, {"x": torch.ones(6, 4, device="meta")}, {"modes": "test"}, {"modes": ()}, {"budget": -1},
     {"budget": float("nan")}, {"budget": "10"}, {"budget": True}, {"x": torch.ones(6, 5)}],
    ids=["x", "meta", "mode", "no mode", "negative", "nan", "text", "bool", "shape"],
)  # fmt: skip
def test_bad_arguments_are_errors(given: dict[str, Any]) -> None:
    with pytest.raises(sf.InputError):
        sf.tune(pair(Quick), **{"x": X, **given})


# Where candidates are found.


def test_sequentials_inside_a_module_are_found_with_what_enters_them() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 8)
            self.layers = nn.ModuleList([pair(Slow, width=8), pair(Slow, width=8)])

        def forward(self, x: Tensor) -> Tensor:
            x = self.up(x)
            for layer in self.layers:
                x = layer(x)
            return x

    model = Model()
    report = sf.tune(model, X, modes="train")
    # dx is wanted in both, behind a layer whose weight wants a gradient.
    assert [(r.fusion, r.at, r.mode) for r in report.rows] == [("Slow", "layers.0 0-1 and 1 more", "train")]
    assert model.layers[0].plan(torch.ones(6, 8, requires_grad=True)).count("Slow") == 0
    calls = kit.CLOCK.now
    model(X)
    assert kit.CLOCK.now - calls == 100 * kit.US


def test_hooks_and_barriers_stay_what_they_are() -> None:
    calls: list[str] = []
    inner = pair(Quick)
    model = sf.Sequential(inner, nn.BatchNorm1d(4), ops.Bias(4), Halve(), fusions=(Quick,))
    inner.register_forward_hook(lambda *args: calls.append("inner"))
    model[1].register_forward_pre_hook(lambda *args: calls.append("barrier"))
    model[2].register_full_backward_hook(lambda *args: calls.append("bias"))
    report = sf.tune(model, X, modes="train")
    assert calls == []
    # The hooked bias is a barrier, so that the second pair is none.
    assert [(r.fusion, r.at) for r in report.rows] == [("Quick", "0 0-1")]


def test_buffers_have_their_numbers_where_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model, fwd, seen = pair(Slow), Halve.fwd, list[Any]()
    model[1].register_buffer("table", torch.arange(4.0))
    monkeypatch.setattr(Halve, "fwd", lambda self, x: seen.append((x, self.table)) or fwd(self, x))
    sf.tune(model, X, modes="eval")
    tables = [table for x, table in seen if type(x) is Tensor]
    assert tables
    assert all(type(t) is Tensor and t is not model[1].table and t.equal(model[1].table) for t in tables)


def test_seeds_channels_and_records_are_made_for_it() -> None:
    model = sf.Sequential(
        ops.Residual(ops.Dropout(0.5)), ops.GeLU(), Halve(), fusions=(kit.DropoutAdd, kit.GeLUHalveBackward)
    )  # fmt: skip
    report = sf.tune(model, X.clone().requires_grad_())
    assert times(report) == {
        ("DropoutAdd", "train"): (1, 0, False),
        ("GeLUHalveBackward", "train"): (3, 50, True),
        ("DropoutAdd", "eval"): (1, 0, False),
    }
    named = sf.Sequential(ops.Dropout(0.5), ops.Add("other"), fusions=(kit.DropoutAdd,))
    assert len(sf.tune(named, X, modes="train", other=torch.ones(6, 4)).rows) == 1


def test_what_fusing_does_not_allow_is_not_measured() -> None:
    with sf.fusing(exclude="Slow"):
        assert [r.fusion for r in sf.tune(pair(Slow, Quick), X, modes="train").rows] == ["Quick"]
    with sf.fusing(False):
        assert sf.tune(pair(Slow, Quick), X).rows == ()


# Budget, resuming, progress.


def three() -> sf.Sequential:
    return sf.Sequential(
        *(op for width in (4, 4, 4) for op in (ops.Bias(width), Halve(), ops.Identity())),
        fusions=(Quick, Slow, kit.QuickJoint),
    )


def test_a_budget_ends_it_and_a_second_call_measures_the_rest(clock: kit.FakeClock, cache: Path) -> None:
    model = three()
    report = sf.tune(model, X, modes="train", budget=0)
    assert report.measured == clock.calls == 0
    assert {r.note for r in report.rows} == {"not measured: the budget ran out"}
    assert "the budget ran out before" in str(report)
    assert model.plan(X).count("Slow") == 3
    rest = sf.tune(model, X, modes="train")
    assert rest.measured == len(rest.rows) == len(report.rows)
    assert "ran out" not in str(rest)
    assert sf.tune(model, X, modes="train", budget=100.0).measured == 0


def test_the_dearest_promise_is_measured_first(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 0.0, 5.0])

    class Time:
        @staticmethod
        def perf_counter() -> float:
            return next(ticks, 5.0)

    monkeypatch.setattr(TUNING, "time", Time)
    report = sf.tune(pair(Quick, Slow), X, modes="train", budget=3)
    assert {r.fusion: r.note for r in report.rows} == {"Slow": "", "Quick": "not measured: the budget ran out"}


def test_what_was_measured_before_an_interruption_is_kept(
    monkeypatch: pytest.MonkeyPatch, clock: kit.FakeClock
) -> None:
    original, done = TUNING.time_passes, []

    def twice(*args: Any) -> Any:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(1)
        return original(*args)

    model = three()
    with monkeypatch.context() as patch:
        patch.setattr(TUNING, "time_passes", twice)
        with pytest.raises(KeyboardInterrupt):
            sf.tune(model, X, modes="train")
    assert model.plan(X).count("Slow") < 3 or model.plan(X).count("Quick") > 0
    forget(monkeypatch)
    report = sf.tune(model, X, modes="train")
    assert report.measured == len(report.rows) - 2


def test_another_process_finds_what_was_measured(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    sf.tune(pair(Slow), X, modes="train")
    assert len(list(cache.glob("*.json"))) == 1
    forget(monkeypatch)
    assert pair(Slow).plan(X).refused[0].reason == "measured 80.0 us against 50.0 us unfused"


def test_a_file_of_ones_own_is_used_instead_of_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    own = tmp_path / "own.json"
    report = sf.tune(pair(Slow), X, modes="train", file=own)
    assert report.file == own
    assert str(own) in str(report)
    assert report.machine
    assert str(report).startswith(f"1 candidates on {report.machine}: 1 measured now, ")
    assert not cache.exists() or not list(cache.iterdir())
    forget(monkeypatch)
    assert pair(Slow).plan(X).count("Slow") == 1
    assert sf.tune(pair(Slow), X, modes="train", file=own).measured == 0
    assert pair(Slow).plan(X).count("Slow") == 0


def test_progress_is_a_line_per_candidate_where_it_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    sf.tune(pair(Slow), X, modes="train")
    assert capsys.readouterr() == ("", "")
    sf.tune(pair(Slow, Quick), X, modes="eval", progress=True)
    assert capsys.readouterr() == ("", "tuning 1/2 Slow\ntuning 2/2 Quick\n")


def test_the_report_is_a_table_within_reach() -> None:
    text = str(sf.tune(pair(Slow, Quick), X, modes="train"))
    lines = [line.split() for line in text.splitlines()]
    assert lines[1] == ["candidate", "at", "mode", "fused", "us", "unfused", "us", "noise", "us", "chosen"]
    assert ["Slow", "0-1", "train", "80.0", "50.0", "0.0", "no"] in lines
    assert ["Quick", "0-1", "train", "10.0", "50.0", "0.0", "yes"] in lines


# What is left alone.


def test_nothing_of_the_users_is_changed() -> None:
    draws = forward("Draws", lambda self, x: [torch.rand(3)].clear())
    model = sf.Sequential(
        ops.Bias(4), Halve(), nn.BatchNorm1d(4), ops.Dropout(0.5), nn.Dropout(0.5), ops.Linear(4, 4), ops.GeLU(),
        fusions=(Quick, draws, kit.QuickBackward, *sf.fusions.default),
    )  # fmt: skip
    x = torch.randn(6, 4, requires_grad=True)
    model(x).sum().backward()
    model[5].eval()
    fired: list[int] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda g: fired.append(1))
        parameter.register_post_accumulate_grad_hook(lambda p: fired.append(2))

    def state() -> list[Any]:
        tensors = [x, x.grad, *model.parameters(), *(p.grad for p in model.parameters()), *model.buffers()]
        modules = [(m.training, *map(id, vars(m).values())) for m in model.modules()]
        versions = [t._version for t in tensors if t is not None]
        return [[t.clone() for t in tensors if t is not None], versions, modules, torch.get_rng_state()]

    before, threads, grads = state(), torch.get_num_threads(), torch.is_grad_enabled()
    report = sf.tune(model, x)
    after = state()
    assert report.measured > 0
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    assert before[1:3] == after[1:3]
    assert torch.equal(before[3], after[3])
    assert fired == []
    assert (torch.get_num_threads(), torch.is_grad_enabled()) == (threads, grads)
    assert not torch.is_inference_mode_enabled()


def test_a_fusion_that_writes_to_its_weight_and_input_writes_to_scratch() -> None:
    def write(self: Any, x: Tensor) -> None:
        self.bias.bias.data.fill_(7)
        x.fill_(7)

    model, x = pair(forward("Writes", write)), torch.ones(6, 4)
    sf.tune(model, x, modes="train")
    assert torch.equal(model[0].bias, torch.zeros(4))
    assert torch.equal(x, X)


def test_off_in_the_environment_keeps_the_cache_out_of_it(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    from seqfuse.settings import settings

    sf.tune(pair(Slow), X, modes="train")
    monkeypatch.setenv("SEQFUSE_TUNE", "0")
    settings.cache_clear()
    forget(monkeypatch)
    files = {path: path.read_bytes() for path in cache.iterdir()}
    model = pair(Slow)
    assert model.plan(X).count("Slow") == 1
    report = sf.tune(model, X)
    assert report.file is None
    assert model.plan(X).count("Slow") == 0  # what a call has measured counts in its process
    assert {path: path.read_bytes() for path in cache.iterdir()} == files


def test_a_user_folder_is_not_made_by_planning(cache: Path) -> None:
    model = pair(Slow)
    model(X)
    assert not cache.parent.exists()


def test_the_test_kit_uses_a_fusion_whatever_was_measured() -> None:
    model = pair(Slow)
    sf.tune(model, X)
    assert model.plan(X).count("Slow") == 0
    assert Bench(model, (Slow,)).plan(X).count("Slow") == 1


def test_a_copy_of_a_model_holds_real_numbers_within_the_block_only() -> None:
    model = pair(Quick)
    copied = Shadow(model, "eval")
    bias: Any = next(m for m in copied.model.modules() if isinstance(m, ops.Bias))
    fake = bias.bias
    with copied.real([bias]):
        assert torch.equal(bias.bias, model[0].bias)
        assert bias.bias is not model[0].bias
    assert bias.bias is fake


def test_settings_of_every_plain_kind_tell_operations_apart():
    class Configured(sf.Pointwise):
        def __init__(self, setting: Any) -> None:
            super().__init__()
            self.setting = setting

        def reference(self, x: Tensor) -> Tensor:
            return torch.tanh(x)

    values: list[Any] = [1, 2, 1.0, 2.0, True, False, 1j, 2j, "1", "2", b"1", b"2", None, (1,), (1, 2), [1, "2"]]
    values += [torch.float32, torch.float64, int, float, kit.spend, kit.pair]
    known = {described.describe(node) for node in flatten(sf.Sequential(*map(Configured, values)))}
    assert len(known) == len(values)


def test_operations_that_compute_the_same_are_told_alike_in_each_mode():
    models = [sf.Sequential(ops.Linear(4, 3), ops.LayerNorm(3), ops.GeLU()) for _ in range(2)]
    models[1].eval()
    one, other = ([described.describe(node) for node in flatten(model)] for model in models)
    assert one == other
    assert "weight float32[3, 4]" in one[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool], ids=str)
def test_what_is_measured_on_is_like_what_enters(dtype: torch.dtype) -> None:
    made = timing.scratch_like(torch.ones(4, 3, dtype=dtype), torch.Generator().manual_seed(0))
    assert (made.shape, made.dtype) == ((4, 3), dtype)
    # Of numbers that may be indices nothing is known but that 0 is one of each table.
    assert len({*made.flatten().tolist()}) == (1 if dtype in (torch.int64, torch.bool) else 12)


def test_a_model_in_another_mode_is_copied_in_the_one_that_is_measured() -> None:
    model = sf.Sequential(ops.Dropout(0.5), ops.Tanh())
    for training in (True, False):
        model.train(training)
        assert [Shadow(model, mode).model.training for mode in ("train", "eval")] == [True, False]
        assert model.training == training


def test_a_fusion_in_which_one_operation_exchanges_something_is_not_measured() -> None:
    nodes = [SimpleNamespace(operation=SimpleNamespace(redistribution=r)) for r in (None, object())]
    site = SimpleNamespace(op_list=SimpleNamespace(nodes=nodes))
    found = [SimpleNamespace(name="Both", start=0, stop=2, fusion=None)]
    search: Any = _Search(None, None, Ranks(None, torch.device("cpu")), False)
    search._take(SimpleNamespace(entered=SimpleNamespace(env=sf.Env()), site=site, found=found))
    assert search._skipped == ["Both: processes exchange tensors in it, and one alone measures"]
    assert not search._jobs
