"""Plans print in 80 columns, whatever the names; plans for other machines."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import re
import unicodedata
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from tests.fuser.fusions import (
    BY_NAME,
    CASES,
    PAIR,
    AddForkForward,
    BiasGeLUForward,
    BiasGeLURecomputing,
    BiasReLU,
    LinearBiasGeLUBackward,
    LinearBiasGeLUForward,
    fused_names,
    of_bias,
    tensor,
)
from tests.processes import Script
from tests.watching import bytes_of, saving

WIDTH = 80


def columns(line: str) -> int:
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in line)
    return len(line) + wide - sum(bool(unicodedata.combining(c)) for c in line)


def printed(model: sf.Sequential, x: Tensor | None = None, **channels: Tensor) -> list[str]:
    """The lines of a plan; each fits, and none contains control characters of a terminal."""
    text = str(model.plan(tensor(7, 5) if x is None else x, **channels))
    assert all(c == "\n" or c.isprintable() for c in text), repr(text)
    lines = text.split("\n")
    assert [line for line in lines if columns(line) > WIDTH] == []
    assert [line for line in lines if line != line.rstrip()] == []
    return lines


def rows_of(lines: list[str]) -> list[str]:
    return [line for line in lines if re.match(r" *\d+  \S", line)]


def stack(blocks: int) -> sf.Sequential:
    made = [
        ops.Residual(ops.LayerNorm(5), ops.Linear(5, 5), ops.GeLU(), ops.Linear(5, 5), ops.ReLU())
        for _ in range(blocks)
    ]
    return sf.Sequential(
        *made, fusions=(*PAIR, BiasGeLUForward, LinearBiasGeLUForward, LinearBiasGeLUBackward, AddForkForward)
    )


def test_a_plan_shows_both_covers_segments_and_refusals() -> None:
    class Never(BiasReLU):
        def requires(self, env: sf.Env) -> sf.Requirements:
            yield False, "only on the third Tuesday of a month"

    model = sf.Sequential(
        ops.Linear(5, 4),
        ops.GeLU(),
        nn.Dropout(0.1),
        ops.Bias(4),
        ops.ReLU(),
        fusions=(LinearBiasGeLUForward, *PAIR, Never),
    )
    lines = printed(model)
    assert lines[0].startswith("Plan for cpu float32")
    text = " ".join(line.strip() for line in lines)
    for expected in (
        "6 operations, 2 segments, 2 fused forward, 1 fused backward",
        "runs eagerly: Dropout at 3: not an operation of this library; use ops.Dropout",
        "not applied: Never at 4: only on the third Tuesday of a month",
    ):
        assert expected in text
    rows = rows_of(lines)
    assert [int(row.split()[0]) for row in rows] == list(range(6))
    assert "[ LinearBiasGeLUForward" in rows[0]
    assert rows[2].split()[-2:] == ["]", "unfused"]
    assert "[ BiasReLU " in rows[4]
    assert "[ BiasReLUBack" in rows[4]
    assert rows[3].split()[-2:] == ["eager", "eager"]


def test_every_fusion_is_marked_where_it_begins_and_ends() -> None:
    for case in CASES:
        model = sf.Sequential(*case.make(), fusions=case.fusions)
        x, channels = tensor(7, 5), {c: tensor(7, 5) for c in case.channels}
        plan = model.plan(x, **channels)
        rows = rows_of(printed(model, x, **channels))
        assert len(rows) == len(plan.names)
        for step in plan.forward:
            if step.fused:
                assert f"[ {step.name}"[:20] in rows[step.covers.start]
                assert "]" in rows[step.covers.stop - 1]
        both = [
            i for i in range(len(rows)) if all(not s.fused for s in (*plan.forward, *plan.backward) if i in s.covers)
        ]
        assert all(rows[i].split()[-2:] == ["unfused", "unfused"] for i in both)


def test_blocks_that_repeat_themselves_print_once_with_how_often_and_where() -> None:
    model = stack(13)
    plan = model.plan(tensor(7, 5))
    lines = printed(model)
    size, count = len(plan.names) // 13, len(plan.names)
    assert count > 100
    shown = [int(row.split()[0]) for row in rows_of(lines)]
    (times,) = [line for line in lines if re.match(r" +x\d+, ", line)]
    said = re.fullmatch(r" +x(\d+), at (\d+) to (\d+): the next (\d+) lines", times)
    assert said is not None
    repeats, first, last, length = map(int, said.groups())
    assert last - first + 1 == repeats * length
    assert length == size
    assert repeats >= 11
    assert shown == [*range(first + length), *range(last + 1, count)]
    for cover in (plan.forward, plan.backward):
        ran = {p: (s.name, p - s.covers.start, len(s.covers)) for s in cover for p in s.covers}
        assert all(
            (plan.names[p], ran[p]) == (plan.names[p - length], ran[p - length])
            for p in range(first + length, last + 1)
        )
    assert len(rows_of(printed(model[:4]))) == 4 * size  # a short sequence prints in full
    # Equal refusals are one line, however many places they have.
    refusals = [line for line in lines if line.startswith("not applied")]
    assert len(refusals) <= len(model.fusions) * 3
    assert any("more" in line for line in lines)


def test_a_block_that_repeats_itself_begins_where_its_container_does() -> None:
    blocks = [ops.Residual(ops.LayerNorm(5), ops.Linear(5, 5), ops.GeLU()) for _ in range(12)]
    lines = printed(sf.Sequential(ops.Tanh(), sf.Sequential(*blocks), ops.Tanh(), fusions=()))
    (at,) = [i for i, line in enumerate(lines) if re.match(r" +x\d+, ", line)]
    assert lines[at].strip() == "x11, at 7 to 72: the next 6 lines"
    assert [row.split()[:3] for row in rows_of(lines[at:])[:1]] == [["7", "Fork", "1.1.fork"]]


@pytest.mark.parametrize(("columns_there", "used"), [(20, 60), (72, 72), (200, 150)])
def test_a_plan_takes_the_width_of_the_terminal_that_it_is_printed_to(
    columns_there: int, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = stack(2).plan(tensor(7, 5))
    there, size = [len(line) for line in str(plan).split("\n")], os.terminal_size((columns_there, 24))
    assert max(there) <= 80
    monkeypatch.setattr("shutil.get_terminal_size", lambda fallback: size)
    assert [len(line) for line in str(plan).split("\n")] == there  # it is the first to print
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    lines = str(plan).split("\n")
    assert used - 20 < max(map(len, lines)) <= used
    monkeypatch.setattr("sys.stdout", None)
    assert [len(line) for line in str(plan).split("\n")] == there


def test_names_of_fusions_are_whole_where_there_is_room() -> None:
    names = ["BiasReLUWithAnInformativeName", "GradientsOfAllThree"]
    first = type(names[0], (BiasReLU,), {"__annotations__": {}})
    second = type(names[1], (LinearBiasGeLUBackward,), {"__annotations__": {}})
    model = sf.Sequential(ops.Bias(5), ops.ReLU(), ops.Linear(5, 5), ops.GeLU(), fusions=(first, second))
    text = "\n".join(printed(model))
    assert f"[ {names[0]}  " in text
    assert f"[ {names[1]}\n" in text


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (torch.ones(4, 3, 5), "cpu float32, 12 tokens:"),
        (torch.ones(1000, 5), "cpu float32, 1,000 tokens:"),
        (torch.ones(5), "cpu float32, 1 token:"),
        (torch.ones(0, 5), "cpu float32, 0 tokens:"),
    ],
    ids=["batch of sequences", "rows", "one", "none"],
)
def test_the_head_says_how_many_tokens_there_are(x: Tensor, said: str) -> None:
    model = sf.Sequential(ops.Tanh())
    assert str(model.plan(x)).startswith(f"Plan for {said}")
    with torch.no_grad():
        assert str(model.plan(x)).startswith(f"Plan for {said[:-1]}, no grad:")
    assert f"{model.plan(x).env}:" == (said if x.numel() < 8 else said.replace(", ", ", up to ")).replace(
        "12", "16"
    ).replace("1,000", "1,024")


NASTY = {
    "long": "a" * 300,
    "words": "a name with spaces " * 12,
    "newline": "first\nsecond",
    "tab": "left\tright",
    "carriage_return": "left\rright",
    "escape": "\x1b[31mred\x1b[0m",
    "bell": "a\x07b",
    "right_to_left": "a\u202eb",
    "zero_width": "a\u200bb",
    "wide": "\u754c" * 60,
    "emoji": "\U0001f525" * 40,
    "combining": "e\u0301" * 50,
    "markup": "<img src=x onerror=alert(1)>",
    "braces": "{x} %s {0!r}",
    "surrogate": "a\udc80b",
}


@pytest.mark.parametrize("name", NASTY.values(), ids=NASTY.keys())
def test_names_of_modules_cannot_break_the_table(name: str) -> None:
    inner = sf.Sequential(OrderedDict({name: ops.Linear(5, 5), "act": ops.ReLU()}))
    model = sf.Sequential(
        OrderedDict({name: inner, "alone": nn.Sequential(OrderedDict({name: nn.Tanh()}))}), fusions=PAIR
    )
    lines = printed(model)
    assert len(rows_of(lines)) == 4
    "\n".join(lines).encode()
    model[0][0].register_forward_hook(lambda *_: None)
    assert len(rows_of(printed(model))) == 3


def test_names_of_classes_and_reasons_cannot_break_the_table() -> None:
    def picky(self: Any, env: sf.Env) -> Any:
        yield False, "because\n\tof \x1b[2Jthis: " + "x" * 200 + " and \u754c" * 30

    for name in ("Very" * 40 + "Long", "Of\nTwo\nLines", "\x1b[31mRed", "\u754c" * 30):
        cls = type(name, (BiasReLU,), {"__annotations__": {}})
        refused = type(name, (BiasReLU,), {"requires": picky, "__annotations__": {}})
        barrier = type(name, (nn.Tanh,), {})()
        model = sf.Sequential(ops.Bias(5), ops.ReLU(), barrier, ops.Bias(5), ops.ReLU(), fusions=(cls, refused))
        lines = printed(model)
        assert len(rows_of(lines)) == 5
        assert any(line.startswith("not applied") for line in lines)


def test_a_reason_that_fusions_share_is_printed_once_and_what_could_not_be_otherwise_is_not() -> None:
    def no_gpu(self: Any, env: sf.Env) -> Any:
        yield False, "needs a GPU"

    (*_, infer) = of_bias(ops.ReLU, "Forward", "Backward", "Both", "Infer")
    a, b = (type(name, (BiasReLU,), {"requires": no_gpu, "__annotations__": {}}) for name in ("One", "Two"))
    model = sf.Sequential(ops.Bias(5), ops.ReLU(), ops.Bias(5), ops.ReLU(), fusions=(a, b, infer, PAIR[-1]))
    lines = [line for line in printed(model) if line.startswith("not applied")]
    assert lines == ["not applied: One at 0, 2; Two at 0, 2: needs a GPU"]
    assert sum(refusal.fusion == "Infer" for refusal in model.plan(tensor(7, 5)).refused) == 2  # it is in the data
    with torch.no_grad():
        lines = str(model.plan(tensor(7, 5))).splitlines()
    assert not any("BiasReLUBack" in line for line in lines)


def test_lists_of_every_size_print() -> None:
    assert printed(sf.Sequential())[0].startswith("Plan for")
    assert len(rows_of(printed(sf.Sequential(nn.Tanh())))) == 1
    assert len(rows_of(printed(sf.Sequential(ops.Tanh())))) == 1
    with torch.no_grad():
        assert "0 fused backward" in " ".join(printed(sf.Sequential(ops.Bias(5), ops.ReLU(), fusions=PAIR)))
    assert len(rows_of(str(stack(2).plan()).split("\n"))) == len(stack(2).plan().names)


def test_the_table_says_what_is_saved_in_bytes_that_add_up() -> None:
    model = sf.Sequential(ops.Linear(5, 4), ops.GeLU(), fusions=(LinearBiasGeLUForward,))
    plan = model.plan(tensor(7, 5))
    assert plan.memory is not None
    # The input and the sum before the activation.
    assert plan.memory.saved == 4 * 7 * (5 + 4)
    assert plan.memory.flops == 2 * 7 * 5 * 4
    assert f"saved for backward: {plan.memory.saved} B" in str(plan)
    assert model.plan().memory is None


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_memory_is_known_for_a_machine_that_is_not_here(where: str) -> None:
    low, there = torch.bfloat16, sf.Env.of("cuda:sm_90", dtype=torch.bfloat16)
    parts = [ops.LayerNorm(64), ops.Linear(64, 256), ops.GeLU(), ops.Linear(256, 64)]
    model = sf.Sequential(ops.Residual(*parts), ops.RMSNorm(64)).to(low)
    here = model.plan(torch.empty(3, 40, 64, dtype=low)).memory
    plan = model.to(where).plan(torch.empty(3, 40, 64, device="meta"), env=there)  # in the dtype of the environment
    assert any(step.fused and step.operation.kernels for step in plan.forward)
    assert here is not None
    assert plan.memory is not None
    assert plan.memory.flops == 2 * 2 * 120 * 64 * 256
    # x of the norms and the mean and rstd of each row, x of the GEMMs, and x of GeLU; b and 4 are bytes.
    norms, b = 120 * (64 * 2 + 64 * 2) + 120 * 3 * 4, 2
    assert plan.memory.saved_unfused == here.saved_unfused == norms + 120 * (64 + 256 + 256) * b
    assert plan.memory.saved == plan.memory.saved_unfused
    assert "saved for backward" in str(plan)


def test_memory_of_a_joint_triton_fusion_is_known_for_a_machine_that_is_not_here() -> None:
    model = sf.Sequential(ops.RMSNorm(64), ops.SiLU(), ops.Tanh()).bfloat16()
    x = torch.empty(40, 64, dtype=torch.bfloat16)
    plan = model.plan(x, env=sf.Env.of("cuda:sm_90", dtype=torch.bfloat16))
    assert plan.forward[0].joint
    assert plan.memory is not None
    assert plan.memory.saved == 40 * 64 * 2 + 40 * 4  # x and rstd: all else is recomputed
    assert plan.memory.saved_unfused == 3 * 40 * 64 * 2 + 40 * 4  # and x of SiLU and y of Tanh


def test_a_plan_says_why_its_memory_is_not_known() -> None:
    class Fails(BiasReLU):
        def fwd(self, x: Tensor) -> Any:
            raise ArithmeticError("no such numbers")

    model = sf.Sequential(ops.Linear(5, 5), ops.ReLU(), fusions=(Fails,))
    cases = {
        "autocast on cuda saves other tensors": sf.Env.of("cuda:sm_90", autocast=torch.bfloat16),
        "SF102 position 0 (Linear): expects its input in torch.float32": sf.Env.of("cpu", dtype=torch.float16),
        "ArithmeticError: no such numbers": sf.Env.of("cuda:sm_90"),
    }
    for reason, env in cases.items():
        plan = model.plan(torch.empty(7, 5), env=env)
        assert plan.memory is None
        assert plan.memory_unknown is not None
        assert reason in plan.memory_unknown
        assert f"saved for backward: not known: {plan.memory_unknown}" in str(plan).replace("\n    ", " ")
        assert plan.as_dict()["memory_unknown"] == plan.memory_unknown
    assert model.plan(env=sf.Env()).memory_unknown is None


def test_memory_is_that_of_the_environment_wherever_it_is_asked_for() -> None:
    model = sf.Sequential(ops.Linear(5, 4), ops.GeLU(), ops.Linear(4, 3))
    x = tensor(7, 5)

    def planned(*, grad: bool = True, autocast: bool = False) -> sf.Plan:
        with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, autocast):
            return model.plan(x)

    def kept(autocast: bool) -> int:
        with torch.autocast("cpu", torch.bfloat16, autocast), sf.fusing(False), saving() as found:
            model(x)
        return bytes_of(found, model)

    for grad, autocast in ((True, False), (False, False), (True, True)):
        inside = planned(grad=grad, autocast=autocast)
        with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, autocast):
            assert inside.memory is not None
        outside, opposite = planned(grad=grad, autocast=autocast), planned(grad=grad, autocast=autocast)
        with torch.set_grad_enabled(not grad), torch.autocast("cpu", torch.bfloat16, not autocast):
            assert opposite.memory == inside.memory
        assert outside.memory == inside.memory
        assert inside.memory.flops == 2 * 7 * (5 * 4 + 4 * 3)
        assert inside.memory.saved_unfused == (kept(autocast) if grad else 0)


def of_other_sizes(model: sf.Sequential) -> None:
    model[3].bias = nn.Parameter(torch.zeros(1))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model[0].weight.requires_grad_(False),
        lambda model: model.eval(),
        lambda model: setattr(model[2], "p", 0.0),
        lambda model: model.append(ops.Tanh()),
        lambda model: model[1].register_forward_hook(lambda *_: None),
        lambda model: model.double(),
        lambda model: model.to("meta"),
        of_other_sizes,
    ],
)
def test_of_what_changed_since_nothing_is_said(change: Callable[[sf.Sequential], Any]) -> None:
    model = sf.Sequential(ops.Linear(5, 400), ops.GeLU(), ops.Dropout(0.5), ops.Linear(400, 5))
    plan = model.plan(tensor(7, 5))
    change(model)
    assert (plan.memory, plan.choices) == (None, ())
    assert "saved for backward" not in str(plan)


def test_another_choice_of_memory_and_fusions_changes_nothing_that_a_plan_says() -> None:
    model = sf.Sequential(ops.Linear(5, 400), ops.GeLU(), ops.Dropout(0.5), ops.Linear(400, 5))
    said, plan = str(model.plan(tensor(7, 5))), model.plan(tensor(7, 5))
    model.memory, model.fusions = "lean", PAIR
    assert str(plan) == said


def test_products_of_attention_are_counted() -> None:
    model = sf.Sequential(ops.Attention(2, causal=True))
    plan = model.plan(tensor(3, 16, 3 * 2 * 8).float())
    assert plan.memory is not None
    assert plan.memory.flops == 2 * (2 * 3 * 2 * 16 * 16 * 8)


def test_a_plan_can_be_pickled_and_says_what_it_said() -> None:
    plan = sf.Sequential(ops.Linear(5, 4), ops.GeLU()).plan(tensor(7, 5))
    again = pickle.loads(pickle.dumps(plan))
    assert str(again) == str(plan)
    assert again.memory == plan.memory


def test_ipython_shows_what_is_printed() -> None:
    plan = sf.Sequential(ops.Linear(5, 4), ops.GeLU()).plan()
    assert repr(plan) == str(plan)


def test_a_refusal_is_said_once() -> None:
    model = sf.Sequential(ops.Linear(5, 4), ops.GeLU(), ops.Dropout(0.5), ops.Linear(4, 5), ops.Dropout(0.5))
    refused = model.plan(env=sf.Env()).refused
    assert refused
    assert len(set(refused)) == len(refused)


def test_memory_is_that_of_the_plan_whenever_it_is_asked_for() -> None:
    model = sf.Sequential(ops.Tanh(), ops.Bias(5), ops.GeLU(), fusions=BiasGeLURecomputing)
    model(tensor(7, 5))
    plan = model.plan(tensor(7, 5))
    with sf.fusing(False):
        model(tensor(7, 5))
        unfused = model.plan(tensor(7, 5))
        asked = plan.memory
    assert asked is not None
    assert unfused.memory is not None
    # The output of Tanh is saved once; the sum is recomputed.
    assert (asked.saved, asked.saved_unfused) == (4 * 7 * 5, 2 * 4 * 7 * 5)
    assert unfused.memory.saved == unfused.memory.saved_unfused == asked.saved_unfused


# Values.


def test_plans_are_frozen_hashable_and_equal_when_they_say_the_same() -> None:
    model = stack(2)
    x = tensor(7, 5)
    plan, again = model.plan(x), model.plan(tensor(8, 5, seed=9))
    assert plan == again
    assert hash(plan) == hash(again)
    assert len({plan, again, model.plan(tensor(100, 5))}) == 2
    for field in dataclasses.fields(plan):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(plan, field.name, None)
    for value, field in ((plan.forward[0], "name"), (plan.refused[0], "fusion")):
        with pytest.raises(AttributeError):  # like that of a frozen dataclass
            setattr(value, field, None)
        assert hash(value) == hash(copy.copy(value))
    assert all(
        isinstance(getattr(plan, name), tuple)
        for name in ("forward", "backward", "segments", "refused", "eager", "names", "paths")
    )
    str(plan)
    assert plan == again
    assert hash(plan) == hash(again)


@pytest.mark.parametrize(
    "change",
    [
        lambda m, x: m.plan(x.detach()),
        lambda m, x: m.plan(x.double()),
        lambda m, x: m.plan(tensor(99, 5)),
        lambda m, x: m.plan(env=sf.Env.of("cuda:sm_90")),
        lambda m, x: m[:1].plan(x),
    ],
    ids=["no_gradient_of_x", "dtype", "rows", "machine", "slice"],
)
def test_plans_that_differ_are_unequal(change: Any) -> None:
    model = sf.Sequential(ops.ReLU(), ops.Bias(5), ops.ReLU(), fusions=PAIR)
    x = tensor(7, 5)
    assert change(model, x) != model.plan(x)


def test_a_plan_does_not_follow_later_changes() -> None:
    model = sf.Sequential(ops.Bias(5), ops.ReLU(), fusions=PAIR)
    plan = model.plan(tensor(7, 5))
    text, value = str(plan), hash(plan)
    model[1] = ops.Tanh()
    assert (str(plan), hash(plan)) == (text, value)
    assert plan.count("BiasReLU") == 1


def test_count_counts_a_joint_fusion_once() -> None:
    case = BY_NAME["bias_gelu"]
    plan = sf.Sequential(*case.make(), fusions=case.joint).plan(tensor(7, 5))
    assert plan.count("BiasGeLUJoint") == 1
    assert plan.fused == (1, 1)
    assert plan.count("Nobody") == 0


# Other machines.


def test_a_plan_for_another_machine_asks_the_requirements_about_it() -> None:
    asked: list[sf.Env] = []

    class Kernel(BiasReLU):
        def requires(self, env: sf.Env) -> sf.Requirements:
            asked.append(env)
            yield env.triton, "needs a Triton device"
            yield env.arch == "sm_90", "written for Hopper"
            yield env.dtype is torch.bfloat16, "bfloat16 only"

        def fwd(self, x: Tensor) -> Any:
            raise AssertionError("a plan runs nothing")

    model = sf.Sequential(ops.Bias(5), ops.ReLU(), fusions=(Kernel,))
    reasons = {
        "cpu": "needs a Triton device",
        "cuda:sm_80": "written for Hopper",
        "cuda:gfx942": "written for Hopper",
    }
    for device, reason in reasons.items():
        plan = model.plan(env=sf.Env.of(device, dtype=torch.bfloat16))
        assert [r.reason for r in plan.refused] == [reason]
    assert [r.reason for r in model.plan(env=sf.Env.of("cuda:sm_90")).refused] == ["bfloat16 only"]
    plan = model.plan(env=sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=4000))
    assert fused_names(plan)[0] == ["Kernel"]
    assert "cuda:sm_90 bfloat16, up to 4,096 tokens" in str(plan)
    assert (asked[-1].device, asked[-1].arch, asked[-1].rows) == ("cuda", "sm_90", 4096)
    assert model.plan(tensor(7, 5), env=sf.Env.of("cuda:sm_90", dtype=torch.bfloat16)).count("Kernel") == 1


def test_costs_of_another_machine_decide_there() -> None:
    class Traffic(BiasReLU):
        """Saves bytes, which are expensive on a CPU."""

        def saves(self, env: sf.Env) -> Any:
            return sf.Savings(bytes=150_000)

    class Launches(BiasReLU):
        """Saves launches, which are expensive on a GPU."""

        def saves(self, env: sf.Env) -> Any:
            return sf.Savings(launches=2)

    model = sf.Sequential(ops.Bias(5), ops.ReLU(), fusions=(Traffic, Launches))
    assert fused_names(model.plan(env=sf.Env.of("cpu")))[0] == ["Traffic"]
    assert fused_names(model.plan(env=sf.Env.of("cuda:sm_90")))[0] == ["Launches"]


def test_environments_say_what_they_are() -> None:
    here = sf.Env.of("cpu")
    assert (here.device, here.arch, here.triton) == ("cpu", "cpu", os.environ.get("TRITON_INTERPRET") == "1")
    there = sf.Env.of(
        "cuda:sm_90", dtype=torch.float16, autocast=torch.bfloat16, grad=False, deterministic=True, rows=0
    )
    assert (there.device, there.arch, there.triton, there.rows) == ("cuda", "sm_90", True, 0)
    assert (there.autocast, there.grad, there.deterministic) == (torch.bfloat16, False, True)
    assert [sf.Env.of("cpu", rows=n).rows for n in (1, 2, 3, 4, 5, 1000, None)] == [1, 2, 4, 4, 8, 1024, None]
    assert sf.Env.of("cuda:sm_90") == sf.Env.of("cuda:sm_90")
    assert len({sf.Env.of("cuda:sm_90"), sf.Env.of("cuda:sm_90"), sf.Env.of("cuda:sm_80")}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        here.triton = True
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        now = sf.Env.like(tensor(7, 5))
    assert (now.autocast, now.grad, now.rows) == (torch.bfloat16, False, 8)


def test_a_plan_without_an_input_takes_gradients_of_parameters_as_wanted() -> None:
    model = sf.Sequential(ops.Bias(5), ops.ReLU(), fusions=PAIR)
    assert fused_names(model.plan()) == (["BiasReLU"], ["BiasReLUBack"])
    assert fused_names(model.plan(env=sf.Env.of("cuda:sm_90", grad=False))) == (["BiasReLU"], [])
    model.requires_grad_(False)
    assert fused_names(model.plan()) == (["BiasReLU"], [])


CODE = """
import sys
import torch

def touched(*args, **kwargs):
    raise AssertionError("planning asked for CUDA")

for name in ("device_count", "init", "_lazy_init", "current_device", "get_device_capability", "get_device_properties"):
    setattr(torch.cuda, name, touched)
import seqfuse as sf
from seqfuse import ops

feed = ops.Linear(64, 96), ops.GeLU(), ops.Dropout(0.1), ops.Linear(96, 64)
model = sf.Sequential(ops.LayerNorm(64), *feed, ops.Add("r"))
plan = model.plan(env=sf.Env.of("cuda:sm_90", dtype=torch.bfloat16))
text = str(plan)
assert len(plan.names) == 8 and "cuda:sm_90 bfloat16" in text, text
assert not torch.cuda.is_initialized()
print(sorted(n for n in sys.modules if n.split(".")[0] == "triton"))
"""


def test_a_plan_for_hopper_touches_neither_triton_nor_cuda() -> None:
    done = Script("-c", CODE, bare=True).done()
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
