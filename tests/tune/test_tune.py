"""Measurements of `sf.tune`, plans that use them, and everything that it must not change."""

from __future__ import annotations

import inspect
import threading
import time
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
from seqfuse.tune import Ranks, _Search, shadow
from seqfuse.tune.shadow import Shadow
from tests.tune import kit
from tests.tune.kit import TUNING, Halve, Quick, Slow, X, forget, forward, pair, times

# Choices.


def test_a_fusion_that_is_slower_than_what_it_replaces_is_refused_with_both_times():
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


def test_a_fusion_that_is_faster_is_chosen_although_it_declares_a_loss():
    model = pair(Slow, Quick)
    assert (model.plan(X).count("Quick"), model.plan(X).count("Slow")) == (0, 1)
    report = sf.tune(model, X, modes=("train",))
    assert times(report) == {("Slow", "train"): (80, 50, False), ("Quick", "train"): (10, 50, True)}
    assert (model.plan(X).count("Quick"), model.plan(X).count("Slow")) == (1, 0)


def test_a_real_clock_sees_a_fusion_that_sleeps(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()  # the real clock; the table is put back below
    monkeypatch.setattr(cost_table, "_tables", {})

    model = pair(forward("Sleeps", lambda self, x: time.sleep(0.02)))
    (row,) = sf.tune(model, X, modes="train").rows
    assert row.fused_us is not None
    assert row.unfused_us is not None
    assert row.fused_us > 20_000 > row.unfused_us
    assert model.plan(X).refused[0].reason.startswith("measured ")


def test_each_kind_is_timed_in_the_passes_that_it_replaces(monkeypatch: pytest.MonkeyPatch):
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


def test_a_saving_is_the_difference_and_the_whole_cover_is_the_cheapest():
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


def test_programs_made_before_are_made_anew_and_then_found_again(monkeypatch: pytest.MonkeyPatch):
    model, x = pair(Slow), X.clone().requires_grad_()
    model(x)
    before = model._fuser._op_lists[0]
    y = model(x)
    sf.tune(model, x, modes="train")
    y.sum().backward()  # by the plan of its forward
    calls = kit.CLOCK.now
    model(x)
    assert kit.CLOCK.now - calls == 50 * kit.US
    after = model._fuser._op_lists[0]
    assert after is not before
    model(x)
    assert model._fuser._op_lists == (after,)


def test_what_is_known_already_makes_nothing_anew():
    model = pair(Slow)
    sf.tune(model, X)
    model(X)
    op_list, version = model._fuser._op_lists[0], config_version.measured
    sf.tune(model, X)
    model(X)
    assert model._fuser._op_lists[0] is op_list
    assert config_version.measured is version


def test_nothing_is_looked_up_in_a_call_whose_program_is_there(monkeypatch: pytest.MonkeyPatch):
    model = pair(Slow)
    sf.tune(model, X)
    model(X)
    monkeypatch.setattr(Known, "__init__", None)
    monkeypatch.setattr(cost_table, "table", None)
    model(X)


# Validity of a measurement.


def test_it_holds_for_the_number_of_rows_rounded_up():
    model = pair(Slow)
    sf.tune(model, torch.ones(100, 4), modes="train")
    counts = {n: model.plan(torch.ones(n, 4)).count("Slow") for n in (64, 65, 128, 129)}
    assert counts == {64: 1, 65: 0, 128: 0, 129: 1}


def test_it_holds_for_one_shape_dtype_configuration_and_set_of_gradients():
    sf.tune(pair(Slow), X, modes="train")
    other = pair(Slow)
    assert other.plan(X).count("Slow") == 0
    assert pair(Slow, width=5).plan(torch.ones(6, 5)).count("Slow") == 1
    assert pair(Slow).double().plan(X.double()).count("Slow") == 1
    assert other.plan(X.clone().requires_grad_()).count("Slow") == 1  # dx is needed, too
    with torch.no_grad():
        assert other.plan(X).count("Slow") == 1
    other[0].requires_grad_(False)
    assert other.plan(X.clone().requires_grad_()).count("Slow") == 1


def test_what_was_measured_without_gradients_says_nothing_where_they_begin_inside_the_fusion():
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


def test_a_dropout_that_draws_a_mask_is_known_apart_from_one_that_does_not():
    model = sf.Sequential(ops.Dropout(0.5), ops.Add("other"), fusions=(kit.DropoutAdd,))
    sf.tune(model, X, modes="eval", other=X)
    with torch.no_grad():
        assert model.plan(X, other=X).count("DropoutAdd") == 1
        assert model.eval().plan(X, other=X).count("DropoutAdd") == 0


def test_operations_without_parameters_are_known_by_the_width_of_what_enters_them():
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
        assert model.plan(env=sf.Env.like(X)).count("Twice") == 1  # the width is unknown here


def test_two_classes_of_one_factory_and_another_source_are_others(monkeypatch: pytest.MonkeyPatch):
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


def test_it_is_for_the_environment_that_is_here(monkeypatch: pytest.MonkeyPatch):
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


def test_every_candidate_of_the_default_rule_set_is_known_after_tuning():
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


def test_calls_of_other_threads_go_on_and_take_the_new_plan():
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


@pytest.mark.parametrize(
    "given",
    [{"x": [1.0]}, {"x": torch.ones(6, 4, device="meta")}, {"modes": "test"}, {"modes": ()}, {"budget": -1},
     {"budget": float("nan")}, {"budget": "10"}, {"budget": True}, {"x": torch.ones(6, 5)}],
    ids=["x", "meta", "mode", "no mode", "negative", "nan", "text", "bool", "shape"],
)  # fmt: skip
def test_bad_arguments_are_errors(given: dict[str, Any]):
    with pytest.raises(sf.InputError):
        sf.tune(pair(Quick), **{"x": X, **given})


# Where candidates are found.


def test_sequentials_inside_a_module_are_found_with_what_enters_them():
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
    # dx is needed in both, after a layer whose weight needs a gradient.
    assert [(r.fusion, r.at, r.mode) for r in report.rows] == [("Slow", "layers.0 0-1 and 1 more", "train")]
    assert model.layers[0].plan(torch.ones(6, 8, requires_grad=True)).count("Slow") == 0
    calls = kit.CLOCK.now
    model(X)
    assert kit.CLOCK.now - calls == 100 * kit.US


def test_hooks_and_barriers_stay_what_they_are():
    calls: list[str] = []
    inner = pair(Quick)
    model = sf.Sequential(inner, nn.BatchNorm1d(4), ops.Bias(4), Halve(), fusions=(Quick,))
    inner.register_forward_hook(lambda *args: calls.append("inner"))
    model[1].register_forward_pre_hook(lambda *args: calls.append("barrier"))
    model[2].register_full_backward_hook(lambda *args: calls.append("bias"))
    report = sf.tune(model, X, modes="train")
    assert calls == []
    # The hooked bias is a barrier, so that the second pair is not a candidate.
    assert [(r.fusion, r.at) for r in report.rows] == [("Quick", "0 0-1")]


def test_buffers_have_their_numbers_where_it_is_measured(monkeypatch: pytest.MonkeyPatch):
    model, fwd, seen = pair(Slow), Halve.fwd, list[Any]()
    model[1].register_buffer("table", torch.arange(4.0))
    monkeypatch.setattr(Halve, "fwd", lambda self, x: seen.append((x, self.table)) or fwd(self, x))
    sf.tune(model, X, modes="eval")
    tables = [table for x, table in seen if type(x) is Tensor]
    assert tables
    assert all(type(t) is Tensor and t is not model[1].table and t.equal(model[1].table) for t in tables)


def test_seeds_channels_and_records_are_made_for_it():
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


def test_what_fusing_does_not_allow_is_not_measured():
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


def test_a_budget_ends_it_and_a_second_call_measures_the_rest(clock: kit.FakeClock, cache: Path):
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


def test_the_dearest_promise_is_measured_first(monkeypatch: pytest.MonkeyPatch):
    ticks = iter([0.0, 0.0, 5.0])

    class Time:
        @staticmethod
        def perf_counter() -> float:
            return next(ticks, 5.0)

    monkeypatch.setattr(TUNING, "time", Time)
    report = sf.tune(pair(Quick, Slow), X, modes="train", budget=3)
    assert {r.fusion: r.note for r in report.rows} == {"Slow": "", "Quick": "not measured: the budget ran out"}


def test_what_was_measured_before_an_interruption_is_kept(monkeypatch: pytest.MonkeyPatch, clock: kit.FakeClock):
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


def test_a_file_of_ones_own_is_used_instead_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path):
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


def test_progress_is_a_line_per_candidate_where_it_is_wanted(capsys: pytest.CaptureFixture[str]):
    sf.tune(pair(Slow), X, modes="train")
    assert capsys.readouterr() == ("", "")
    sf.tune(pair(Slow, Quick), X, modes="eval", progress=True)
    assert capsys.readouterr() == ("", "tuning 1/2 Slow\ntuning 2/2 Quick\n")


def test_the_report_is_a_table_within_reach():
    text = str(sf.tune(pair(Slow, Quick), X, modes="train"))
    lines = [line.split() for line in text.splitlines()]
    assert lines[1] == ["candidate", "at", "mode", "fused", "us", "unfused", "us", "noise", "us", "chosen"]
    assert ["Slow", "0-1", "train", "80.0", "50.0", "0.0", "no"] in lines
    assert ["Quick", "0-1", "train", "10.0", "50.0", "0.0", "yes"] in lines


# Side effects.


def test_nothing_of_the_users_is_changed():
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


def test_a_fusion_that_writes_to_its_weight_and_input_writes_to_scratch():
    def write(self: Any, x: Tensor) -> None:
        self.bias.bias.data.fill_(7)
        x.fill_(7)

    model, x = pair(forward("Writes", write)), torch.ones(6, 4)
    sf.tune(model, x, modes="train")
    assert torch.equal(model[0].bias, torch.zeros(4))
    assert torch.equal(x, X)


def test_off_in_the_environment_keeps_the_cache_out_of_it(monkeypatch: pytest.MonkeyPatch, cache: Path):
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
    assert model.plan(X).count("Slow") == 0  # a measurement of this process counts in it
    assert {path: path.read_bytes() for path in cache.iterdir()} == files


def test_a_user_folder_is_not_made_by_planning(cache: Path):
    model = pair(Slow)
    model(X)
    assert not cache.parent.exists()


def test_the_test_kit_uses_a_fusion_whatever_was_measured():
    model = pair(Slow)
    sf.tune(model, X)
    assert model.plan(X).count("Slow") == 0
    assert Bench(model, (Slow,)).plan(X).count("Slow") == 1


def test_a_copy_of_a_model_holds_real_numbers_within_the_block_only():
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


def test_a_model_in_another_mode_is_copied_in_the_one_that_is_measured():
    model = sf.Sequential(ops.Dropout(0.5), ops.Tanh())
    for training in (True, False):
        model.train(training)
        assert [Shadow(model, mode).model.training for mode in ("train", "eval")] == [True, False]
        assert model.training == training


def test_a_fusion_in_which_one_operation_exchanges_something_is_not_measured():
    nodes = [SimpleNamespace(operation=SimpleNamespace(redistribution=r)) for r in (None, object())]
    site = SimpleNamespace(op_list=SimpleNamespace(nodes=nodes))
    found = [SimpleNamespace(name="Both", start=0, stop=2, fusion=None)]
    search: Any = _Search(None, None, Ranks(None, torch.device("cpu")), False)
    search._take(SimpleNamespace(entered=SimpleNamespace(env=sf.Env()), site=site, found=found))
    assert search._skipped == ["Both: processes exchange tensors in it, and one alone measures"]
    assert not search._jobs
