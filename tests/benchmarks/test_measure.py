"""A row is checked before it is timed, and a wrong row has no speed."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from bench_gpu import Bench
from gpu.case import Case, Contender, counted, distance, normal
from gpu.clock import Ceilings, Clock
from torch import Tensor

CPU = torch.device("cpu")


class Steady:
    """Runs the calls and always reports the same time."""

    samples = 0

    def sample(self, calls: Any) -> float:
        self.samples += 1
        for call in calls:
            call()
        return 5.0


def bench(clock: Clock) -> Bench:
    return Bench(CPU, Ceilings(1e-3, {"float32": 1e-3}), clock, clock, cache_bytes=10_000, seconds=0.0)


def of(function: Any) -> Contender:
    return Contender(lambda inputs: lambda: (function(inputs["x"]),))


def made(rows: int, seed: int) -> dict[str, Tensor]:
    return normal({"x": (rows, 8)}, seed, CPU, torch.float32)


def twice(x: Tensor) -> Tensor:
    return x + x


def case(ours: Any = twice, **peers: Any) -> Case:
    contenders = {"seqfuse": of(ours), "eager": of(twice), **{name: of(peer) for name, peer in peers.items()}}
    return Case("twice", "64 x 8", torch.float32, made, 64, contenders, checked_rows=32)


def test_a_row_says_times_and_what_they_are_of_the_floor() -> None:
    clock = Steady()
    row = bench(clock).row(dataclasses.replace(case(), as_called=True))
    assert row["status"] == "ok"
    assert row["fewest_bytes"] == 2 * 64 * 8 * 4
    assert row["floor"] == pytest.approx(4.096)
    assert row["fraction"] == {"seqfuse": pytest.approx(0.8192), "eager": pytest.approx(0.8192)}
    assert row["times"]["seqfuse"]["median"] == row["as_called"]["eager"]["median"] == 5.0
    assert row["sets"] == math.ceil(30_000 / (64 * 8 * 4))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x + x + 1e-4,
        lambda x: torch.cat((x[:-1] * 2, x[-1:])),
        lambda x: (x + x).half(),
        lambda x: torch.full_like(x, torch.nan),
        # Right for the inputs of the check, wrong for all tokens.
        lambda x: torch.cat((x[:63] * 2, x[63:])),
    ],
    ids=["off", "last row", "dtype", "nan", "beyond the checked rows"],
)
def test_a_wrong_result_has_no_speed(wrong: Any) -> None:
    clock = Steady()
    row = bench(clock).row(case(wrong))
    assert row["status"] == "red"
    assert row["why"]
    assert "times" not in row
    assert clock.samples == 0


def test_a_peer_that_is_wrong_is_left_out() -> None:
    def fails(_: Tensor) -> Tensor:
        raise RuntimeError("not on this card")

    row = bench(Steady()).row(case(liger=fails, quack=lambda x: x * 3))
    assert row["status"] == "ok"
    assert row["left_out"] == {"liger": "raised RuntimeError: not on this card", "quack": row["left_out"]["quack"]}
    assert "from what they should be" in row["left_out"]["quack"]
    assert set(row["times"]) == {"seqfuse", "eager"}


def test_a_lost_device_is_not_a_red_row() -> None:
    def lost(_: Tensor) -> Tensor:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    with pytest.raises(torch.AcceleratorError):
        bench(Steady()).row(case(lost))
    with pytest.raises(torch.AcceleratorError):
        bench(Steady()).row(case(liger=lost))


def test_distance_sees_any_piece() -> None:
    y = torch.randn(640, 16)
    assert distance([y], [y * (1 + 1e-3)]) == pytest.approx(1e-3, rel=1e-2)
    late = y.clone()
    late[-1] = 0
    assert distance([late], [y]) > 0.2
    assert distance([y[:-1]], [y]) == math.inf
    assert distance([y.where(y < 2, torch.nan)], [y]) == math.inf
    assert distance([None], [y]) == 0
    assert distance([torch.tensor(2.0)], [torch.tensor(1.0)]) == pytest.approx(1.0)


def test_what_is_kept_is_counted_once_and_without_parameters() -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    # The multiplication saves both factors, and the square saves the product.
    assert counted(lambda: (x * weight).square(), [weight]) == 2 * 4 * 8 * 4
    assert counted(lambda: (x * weight).square(), []) == 2 * 4 * 8 * 4 + 8 * 4
    assert counted(lambda: x[:2].sin().sum() + x.cos(), []) == 4 * 8 * 4
