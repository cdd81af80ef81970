"""The first rank measures; every rank plans by what it found."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import seqfuse as sf
from seqfuse import cost_table
from seqfuse.tune import Ranks, timing
from tests.processes import Facts
from tests.tune import kit
from tests.tune.kit import Quick, Slow, X, pair

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


def tables() -> list[Any]:
    machine = cost_table.Machine.of(sf.Env.like(X))
    assert machine is not None
    both: list[Any] = [None, None]
    dist.all_gather_object(both, dict(cost_table.table(machine)))
    return both


def ranks_begin_with_caches_of_their_own() -> None:
    os.environ["XDG_CACHE_HOME"] = os.path.join(os.environ["XDG_CACHE_HOME"], str(dist.get_rank()))
    os.makedirs(os.environ["XDG_CACHE_HOME"])
    timing.clock, timing.ROUNDS = kit.CLOCK, (3, 3)
    assert tables() == [{}, {}]


def ranks_find_opposite_times() -> None:
    rank = dist.get_rank()
    if rank == 1:  # would find the contrary
        timing.clock = lambda device: lambda run: 1e6 - kit.CLOCK(device)(run)
    model = pair(Quick, Slow)
    report = sf.tune(model, X, modes="train")
    assert (report.measured > 0) == (rank == 0)
    assert (kit.CLOCK.calls > 0) == (rank == 0)
    first, second = tables()
    assert first == second != {}
    plan = model.plan(X)
    assert (plan.count("Quick"), plan.count("Slow")) == (1, 0)
    assert {r.fusion: r.chosen for r in report.rows} == {"Quick": True, "Slow": False}


def what_a_rank_knew_gives_way() -> None:
    rank = dist.get_rank()
    model = pair(Quick, Slow, width=5)
    x = torch.ones(6, 5)
    if rank == 1:
        os.environ["XDG_CACHE_HOME"] = str(Path(os.environ["XDG_CACHE_HOME"], "other"))
        machine = cost_table.Machine.of(sf.Env.like(x))
        assert machine is not None
        cost_table.keep_measured(machine, {"its own": cost_table.Measurement(1.0, 2.0)})
    sf.tune(model, x, modes="train")
    first, second = tables()
    assert first == second
    assert "its own" not in first


def a_group_has_its_own_first_rank() -> None:
    groups = [dist.new_group([0]), dist.new_group([1])]
    mine = groups[dist.get_rank()]
    report = sf.tune(pair(Slow, width=6), torch.ones(6, 6), modes="train", group=mine)
    assert report.measured == 1


def an_error_of_the_first_rank_reaches_the_others() -> None:
    tuning: Any = sys.modules["seqfuse.tune"]
    original = tuning.time_passes

    def fails(*args: Any) -> Any:
        raise RuntimeError("the fan stopped")

    tuning.time_passes = fails
    try:
        with pytest.raises(sf.StateError if dist.get_rank() else RuntimeError, match="the fan stopped"):
            sf.tune(pair(Slow, width=7), torch.ones(6, 7), modes="train")
    finally:
        tuning.time_passes = original


def an_error_of_another_rank_leaves_the_first_one_alone() -> None:
    x = torch.ones(6, 8 + dist.get_rank())
    if dist.get_rank():
        with pytest.raises(sf.InputError):
            sf.tune(pair(Slow, width=8), x, modes="train")
        return
    assert sf.tune(pair(Slow, width=8), x, modes="train").measured == 1


def a_rank_without_calls_of_its_converted_model_leaves_no_other_rank_waiting() -> None:
    for called, other in enumerate((None, "SF504: the first rank could not tune: InputError: SF106")):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
        sf.convert(model)
        if dist.get_rank() == called:
            model(X)
            expected = other
        else:
            expected = "SF106: Sequential is converted, but its calls have captured no chains yet"
        if expected is None:
            assert sf.tune(model).rows
        else:
            with pytest.raises(sf.SeqfuseError, match=expected):
                sf.tune(model)


WORKS = [
    ranks_begin_with_caches_of_their_own,
    ranks_find_opposite_times,
    what_a_rank_knew_gives_way,
    a_group_has_its_own_first_rank,
    an_error_of_the_first_rank_reaches_the_others,
    an_error_of_another_rank_leaves_the_first_one_alone,
    a_rank_without_calls_of_its_converted_model_leaves_no_other_rank_waiting,
]


FACTS = Facts({2: WORKS})


test_two_ranks = FACTS.test


def test_what_a_group_is_sent_comes_from_its_own_first_rank(monkeypatch: pytest.MonkeyPatch):
    sent: list[tuple[int, object]] = []
    known: dict[str, Any] = {
        "is_available": True, "is_initialized": True, "get_world_size": 2, "get_rank": 0, "get_global_rank": 4,
        "get_backend": "gloo",
    }  # fmt: skip
    functions = {name: lambda *of, value=value: value for name, value in known.items()}
    here = SimpleNamespace(
        **functions, broadcast_object_list=lambda box, source, group, device: sent.append((source, group))
    )
    monkeypatch.setattr(sys.modules[Ranks.__module__], "dist", here)
    Ranks("the second node", torch.device("cpu")).send(None)
    assert sent == [(4, "the second node")]
