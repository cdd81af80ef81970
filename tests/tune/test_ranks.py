"""The first rank measures; every rank plans by what it found."""

from __future__ import annotations

import datetime
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import seqfuse as sf
from seqfuse import measured
from seqfuse.tune import timing
from tests.tune import kit
from tests.tune.kit import Quick, Slow, pair

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
X = torch.ones(6, 4)


def tables() -> list[Any]:
    machine = measured.Machine.of(sf.Env.like(X))
    assert machine is not None
    both: list[Any] = [None, None]
    dist.all_gather_object(both, measured.stated(measured.table(machine)))
    return both


def ranks_find_opposite_times(folder: Path) -> None:
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


def what_a_rank_knew_gives_way(folder: Path) -> None:
    rank = dist.get_rank()
    model = pair(Quick, Slow, width=5)
    x = torch.ones(6, 5)
    if rank == 1:
        os.environ["XDG_CACHE_HOME"] = str(folder / "other")
        machine = measured.Machine.of(sf.Env.like(x))
        assert machine is not None
        measured.add(machine, {"its own": measured.Measurement(1.0, 2.0)})
    sf.tune(model, x, modes="train")
    first, second = tables()
    assert first == second
    assert "its own" not in first


def a_group_has_its_own_first_rank(folder: Path) -> None:
    groups = [dist.new_group([0]), dist.new_group([1])]
    mine = groups[dist.get_rank()]
    report = sf.tune(pair(Slow, width=6), torch.ones(6, 6), modes="train", group=mine)
    assert report.measured == 1


def an_error_of_the_first_rank_reaches_the_others(folder: Path) -> None:
    tuning: Any = sys.modules["seqfuse.tune"]
    original = tuning.measure

    def fails(*args: Any) -> Any:
        raise RuntimeError("the fan stopped")

    tuning.measure = fails
    try:
        with pytest.raises(sf.StateError if dist.get_rank() else RuntimeError, match="the fan stopped"):
            sf.tune(pair(Slow, width=7), torch.ones(6, 7), modes="train")
    finally:
        tuning.measure = original


def an_error_of_another_rank_leaves_the_first_one_alone(folder: Path) -> None:
    x = torch.ones(6, 8 + dist.get_rank())
    if dist.get_rank():
        with pytest.raises(sf.InputError):
            sf.tune(pair(Slow, width=8), x, modes="train")
        return
    assert sf.tune(pair(Slow, width=8), x, modes="train").measured == 1


WORKS = [
    ranks_find_opposite_times,
    what_a_rank_knew_gives_way,
    a_group_has_its_own_first_rank,
    an_error_of_the_first_rank_reaches_the_others,
    an_error_of_another_rank_leaves_the_first_one_alone,
]


def _process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(SEQFUSE_TUNE="1", XDG_CACHE_HOME=f"{folder}/{rank}")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timing.clock, timing.ROUNDS = kit.CLOCK, (3, 3)
    patience = datetime.timedelta(seconds=30)
    file = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=2, timeout=patience)
    try:
        for work in WORKS:
            try:
                work(Path(folder))
            except Exception:
                Path(folder, f"{work.__name__}.{rank}").write_text(traceback.format_exc())
            dist.barrier()
    finally:
        dist.destroy_process_group()
    os._exit(0)  # not through the end of the interpreter, where a thread of gloo now and then aborts


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(_process, (str(folder),), nprocs=2)
    return folder


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.__name__)
def test_two_ranks(work: Any, ran: Path) -> None:
    errors = [path.read_text() for path in sorted(ran.glob(f"{work.__name__}.*"))]
    assert errors == [], "\n".join(errors)
