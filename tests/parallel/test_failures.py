"""A process that dies, is late or disagrees: every other one raises an error that names group and operation, in
time."""

from __future__ import annotations

import datetime
import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

import seqfuse as sf
from seqfuse import ops
from seqfuse.settings import settings
from tests.processes import CONTEXT, Facts

SECONDS = 2
PATIENCE = 120
"""Seconds that a loaded machine may take before a fault."""


def pair(**rest: Any) -> sf.Sequential:
    group = dist.group.WORLD
    return sf.Sequential(
        ops.Linear(4, 8, parallel="column", group=group), ops.ReLU(), ops.Linear(8, 4, parallel="row", group=group),
        **rest,
    )  # fmt: skip


class Breaks(sf.ForwardFusion):
    """A fusion that fails wherever it runs."""

    linear: ops.Linear
    reduce: ops.AllReduce

    def saves(self, env: sf.Env) -> sf.Savings:
        return sf.Savings(launches=9)

    def fwd(self, x: torch.Tensor) -> Any:
        raise RuntimeError("no kernel here")


def a_fusion_with_a_collective_in_it_does_not_fall_back() -> None:
    model = pair(fusions=(Breaks,))
    expected = r"SF401 .*position 4 \(Breaks\): RuntimeError: no kernel here\nHint: processes exchange tensors in it"
    with pytest.raises(sf.KernelError, match=expected):
        model(torch.randn(3, 4))


class Alone(sf.ForwardFusion):
    """A fusion that fails in one process."""

    act: ops.ReLU
    linear: ops.Linear

    def saves(self, env: sf.Env) -> sf.Savings:
        return sf.Savings(launches=9)

    def fwd(self, x: torch.Tensor) -> Any:
        if dist.get_rank():
            raise RuntimeError("not here")
        y, act = self.act.fwd(x)
        y, linear = self.linear.fwd(y)
        return y, {"act": act, "linear": linear}


def one_process_falls_back_between_collectives() -> None:
    torch.manual_seed(0)
    model = pair(fusions=(Alone,))
    torch.manual_seed(0)
    other = pair(fusions=())
    x = torch.randn(3, 4)
    for _ in range(2):
        expected = other(x)
        if dist.get_rank() and _ == 0:
            with pytest.warns(sf.FallbackWarning, match="not here"):
                y = model(x)
        else:
            y = model(x)
        assert torch.equal(y, expected)
        y.sum().backward()


def compared(run: Callable[[], Any]) -> Any:
    os.environ["SEQFUSE_DEBUG"] = "1"
    settings.cache_clear()
    try:
        return run()
    finally:
        del os.environ["SEQFUSE_DEBUG"]
        settings.cache_clear()


def processes_that_agree_run() -> None:
    model = sf.Sequential(ops.Dropout(0.5), pair(), ops.Dropout(0.5))
    compared(lambda: model(torch.randn(3, 4)))
    compared(lambda: model.eval()(torch.randn(5, 4)))
    world = dist.group.WORLD
    inside = sf.Sequential(ops.CopyToTensorParallel(world), ops.Dropout(0.5), ops.AllReduce(world))
    compared(lambda: inside(torch.randn(3, 4)))


def another_plan_is_an_error_everywhere() -> None:
    with sf.fusing(dist.get_rank() == 0), pytest.raises(sf.StateError) as caught:
        compared(lambda: pair()(torch.randn(3, 4)))
    text = str(caught.value)
    assert "SF506" in text
    assert "processes 1 of group" in text
    assert "have another plan or input than process 0" in text
    assert "CopyToTensorParallel" in text


def another_shape_is_an_error_everywhere() -> None:
    """Of as many numbers, so that the sum itself would not fail."""
    x = torch.randn((3, 4, 4) if dist.get_rank() else (2, 6, 4))
    with pytest.raises(sf.StateError, match=r"processes 1 of group .* have another plan or input than process 0"):
        compared(lambda: pair()(x))


def other_seeds_are_an_error_everywhere() -> None:
    torch.manual_seed(dist.get_rank())
    with pytest.raises(sf.StateError, match=r"processes 1 of group .* have other seeds than process 0"):
        compared(lambda: sf.Sequential(ops.Dropout(0.5), pair())(torch.randn(3, 4)))


def the_rank_that_measures_waits_for_nobody() -> None:
    x = torch.randn(16, 4, requires_grad=True)
    with tempfile.TemporaryDirectory() as folder:
        report = sf.tune(pair(), x, modes="train", budget=0, file=Path(folder, "found.json"))
    assert "AllReduceLinearBackward: processes exchange tensors in it, and one alone measures" in report.skipped
    fusions = {row.fusion for row in report.rows}
    assert "LinearBias" in fusions
    assert "AllReduceLinearBackward" not in fusions


test_in_several_processes = Facts({
    2: [
        a_fusion_with_a_collective_in_it_does_not_fall_back, one_process_falls_back_between_collectives,
        processes_that_agree_run, another_plan_is_an_error_everywhere, another_shape_is_an_error_everywhere,
        other_seeds_are_an_error_everywhere, the_rank_that_measures_waits_for_nobody,
    ],
}).test  # fmt: skip


def dies(error: Path) -> None:
    os._exit(7)


def is_late(error: Path) -> None:
    end = time.monotonic() + 3 * SECONDS
    while not error.exists() and time.monotonic() < end:
        time.sleep(0.1)
    os._exit(7)


def _process(rank: int, act: Callable[[Path], None], backward: bool, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    patience = datetime.timedelta(seconds=PATIENCE)
    file = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=2, timeout=patience)
    x = torch.randn(3, 4, requires_grad=True)
    model = pair()
    y = model(x)
    _set_pg_timeout(datetime.timedelta(seconds=SECONDS))
    if rank == 1:
        act(Path(folder, "error"))
    start = time.monotonic()
    try:
        (y.sum().backward if backward else lambda: model(x))()
    except sf.StateError as error:
        Path(folder, "error").write_text(f"{time.monotonic() - start:.2f} {error}")
    os._exit(0)


@pytest.mark.parametrize(
    ("act", "backward"),
    [
        pytest.param(act, backward, id=f"{act.__name__}-{way}", marks=[pytest.mark.full] * (backward is (act is dies)))
        for act in (dies, is_late)
        for backward, way in ((False, "forward"), (True, "backward"))
    ],
)
def test_the_others_get_an_error_in_time(act: Callable[[Path], None], backward: bool, tmp_path: Path) -> None:
    args = act, backward, str(tmp_path)
    processes = [CONTEXT.Process(target=_process, args=(rank, *args)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(2 * PATIENCE)
    assert [process.exitcode for process in processes] == [0, 7]
    seconds, _, text = (tmp_path / "error").read_text().partition(" ")
    operation, position = ("CopyToTensorParallel", 0) if backward else ("AllReduce", 5)
    assert re.match(
        rf"SF506 ('[\w.]+', )?position {position} \({operation}\): the collective of {operation} failed in", text
    )
    assert "of ranks 0, 1" in text
    assert float(seconds) < 2 * SECONDS
