"""Several processes over gloo, started once for many facts, and what is compared in them."""

from __future__ import annotations

import datetime
import gc
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

Work = Callable[[], None]
PATIENCE = 280


class Facts:
    """Facts that hold in several processes: `works` by how many of them there are, run once for all tests.

    Args:
        works: module-level functions, which see the group of all processes as the default one.
        seconds: the timeout of the group.
    """

    def __init__(self, works: Mapping[int, Sequence[Work]], seconds: int = 60) -> None:
        self.works, self.seconds = works, seconds
        self._failed: dict[int, dict[str, str]] = {}

    @property
    def cases(self) -> list[Any]:
        """What to parametrize a test with."""
        return [
            pytest.param(world, work.__name__, id=f"{work.__name__}-{world}")
            for world, works in self.works.items()
            for work in works
        ]

    def check(self, world: int, work: str) -> None:
        """Fail as the fact did."""
        if world not in self._failed:
            self._failed[world] = failures(self.works[world], world, self.seconds)
        if work in self._failed[world]:
            pytest.fail(self._failed[world][work], pytrace=False)


def failures(works: Sequence[Work], world: int, seconds: int) -> dict[str, str]:
    """Run each of `works` in `world` processes; what failed, by its name, in the words of the first process."""
    with tempfile.TemporaryDirectory() as folder:
        context: Any = mp.spawn(_process, (list(works), world, seconds, folder), nprocs=world, join=False)
        deadline, dead = time.monotonic() + PATIENCE, {}
        try:
            while not context.join(timeout=1):
                if time.monotonic() > deadline:
                    raise TimeoutError("the processes hang")
        except Exception as error:
            dead = {work.__name__: f"the processes ended early: {error}" for work in works}
            for process in context.processes:
                process.kill()
        found = {path.stem: path.read_text() for path in sorted(Path(folder).glob("*.[0-9]"), reverse=True)}
        return {**dead, **found}


def _process(rank: int, works: list[Work], world: int, seconds: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=seconds),
    )
    for work in works:
        torch.manual_seed(0)
        try:
            work()
        except BaseException:  # that of a failed assertion of pytest is no Exception
            Path(folder, f"{work.__name__}.{rank}").write_text(traceback.format_exc())
        gc.collect()
        dist.barrier()
    # Not through the end of the interpreter, where a thread of gloo now and then aborts.
    os._exit(0)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Signed random numbers, the same in every process."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def randomize(model: nn.Module, seed: int = 100) -> None:
    """Give every parameter, of the whole model, numbers that do not depend on how it is divided."""
    for i, p in enumerate(model.parameters()):
        p.data = draw(*p.shape, seed=seed + i, dtype=p.dtype)


def share_of(model: nn.Module, name: str, whole: Tensor) -> Tensor:
    """This process's share of something shaped like a parameter of the whole model."""
    owner, _, leaf = name.rpartition(".")
    share = getattr(model.get_submodule(owner), "shares", {}).get(leaf)
    return whole if share is None else share.of(whole)


def copy_shares(model: nn.Module, whole: nn.Module) -> None:
    """Take the parameters of a whole model."""
    sources = dict(whole.named_parameters())
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(share_of(model, name, sources[name]))


def results(model: nn.Module, x: Tensor, dy: Tensor, **channels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The output for x, and the gradients of x (where it has one) and of every parameter for dy."""
    model.zero_grad()
    x = x.detach().clone()
    if x.is_floating_point():
        x.requires_grad_()
    y: Tensor = model(x, **channels)
    y.backward(dy)
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    if x.grad is not None:
        grads["x"] = x.grad
    return y.detach(), grads


def assert_same(model: nn.Module, whole: nn.Module, x: Tensor, **channels: Tensor) -> None:
    """Output and every gradient of a divided model are those of the whole one in a single process."""
    dy = draw(*whole(x, **channels).shape, seed=7)
    y, grads = results(model, x, dy, **channels)
    expected_y, expected = results(whole, x, dy, **channels)
    torch.testing.assert_close(y, expected_y)
    assert grads.keys() == expected.keys()
    for name, grad in expected.items():
        assert grad.abs().max() > 0, name
        wanted = grad if name == "x" else share_of(model, name, grad)
        torch.testing.assert_close(grads[name], wanted, msg=lambda m, n=name: f"{n}: {m}")
