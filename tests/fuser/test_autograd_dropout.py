"""Dropout as a user sees it: rate and scale, one mask for both passes and all schedules, reproducible."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.plan.reference import random_seeds
from tests.selection import few_cases as few_cases

from .kit import assert_same, draw, passes, randomize


class ScaleDropout(sf.ForwardFusion):
    """A forward fusion that passes the seed to the operation."""

    scale: ops.Scale
    drop: ops.Dropout

    def fwd(self, x: Tensor, *, drop_seed: Tensor | None) -> Any:
        y, record = self.drop.fwd(x * self.scale.factor, seed=drop_seed)
        return y, {"scale": ops.Scale.Saved(factor=self.scale.factor), "drop": record}


class ScaleDropoutBackward(sf.BackwardFusion):
    """A backward fusion that recomputes the mask."""

    scale: ops.Scale
    drop: ops.Dropout

    def bwd(self, dy: Tensor, *, scale: Any, drop: Any) -> Any:
        return self.drop.bwd(dy, drop)[0] * scale.factor, {}


class ScaleDropoutJoint(sf.JointFusion):
    """Both passes; an unprefixed `seed` is that of the only random slot."""

    scale: ops.Scale
    drop: ops.Dropout

    class Saved(sf.Saved):
        seed: Tensor | None
        p: float

    def fwd(self, x: Tensor, *, seed: Tensor | None) -> Any:
        y, record = self.drop.fwd(x * self.scale.factor, seed=seed)
        return y, self.Saved(seed=record.seed, p=record.p)

    def bwd(self, dy: Tensor, saved: Any) -> Any:
        return self.drop.bwd(dy, ops.Dropout.Saved(seed=saved.seed, p=saved.p))[0] * self.scale.factor, {}


class ScaleDropoutInference(sf.InferenceFusion):
    """Inference only."""

    scale: ops.Scale
    drop: ops.Dropout

    def fwd(self, x: Tensor, *, drop_seed: Tensor | None) -> Tensor:
        return self.drop.fwd(x * self.scale.factor, seed=drop_seed)[0]


class Several(sf.ForwardFusion):
    """Any number of random operations: all seeds at once, in order."""

    parts: tuple[ops.Dropout | ops.Scale, ...]
    last: ops.Dropout | None

    def fwd(self, x: Tensor, *, seeds: tuple[Tensor | None, ...]) -> Any:
        records: list[sf.Saved] = []
        for operation, seed in zip(self.operations(), seeds, strict=True):
            given = {"seed": seed} if isinstance(operation, ops.Dropout) else {}
            x, record = operation.fwd(x, **given)
            records.append(record)
        rest = len(records) - len(self.parts)
        return x, {"parts": tuple(records[: len(self.parts)]), **({"last": records[-1]} if rest else {})}


COVERS = {
    "unfused": (),
    "forward": (ScaleDropout,),
    "backward": (ScaleDropoutBackward,),
    "both": (ScaleDropout, ScaleDropoutBackward),
    "joint": (ScaleDropoutJoint,),
    "inference": (ScaleDropoutInference,),
}


@pytest.mark.parametrize("cover", COVERS)
def test_every_cover_drops_the_same_elements(cover: str):
    ops_ = [ops.Linear(5, 7), ops.Scale(-0.5), ops.Dropout(0.5), ops.Linear(7, 9), ops.Scale(3.0), ops.Dropout(0.3)]
    plain = sf.Sequential(*ops_, fusions=())
    randomize(plain.double())
    model = sf.Sequential(*ops_, fusions=COVERS[cover])
    x = draw(13, 5)
    names = {step.name for step in (*model.plan(x).forward, *model.plan(x).backward) if step.fused}
    assert names == set() if cover == "inference" else names == {f.__name__ for f in COVERS[cover]}
    torch.manual_seed(4)
    want = passes(plain, x)
    torch.manual_seed(4)
    assert_same(passes(model, x), want)
    for region in (sf.fusing(False), sf.fusing(True)):
        torch.manual_seed(4)
        with region:
            assert_same(passes(model, x), want)
    with torch.no_grad():
        torch.manual_seed(4)
        torch.testing.assert_close(model(x), want["out"])
        if cover == "inference":
            assert model.plan(x).count("ScaleDropoutInference") == 2


def test_the_reference_drops_the_same_elements():
    model, x = sf.Sequential(ops.Linear(5, 9), ops.Dropout(0.5)).double(), draw(13, 5)
    torch.manual_seed(4)
    want = model(x)
    torch.manual_seed(4)
    found, _ = torch.func.vjp(model, x)
    torch.testing.assert_close(found, want)


def test_a_seed_given_to_torch_reproduces_and_a_call_moves_the_generator_on():
    model, x = sf.Sequential(ops.Dropout(0.5), ops.Tanh(), ops.Dropout(0.5)), draw(40, 9)
    torch.manual_seed(8)
    first, second = model(x), model(x)
    assert not torch.equal(first, second)
    torch.manual_seed(8)
    assert torch.equal(model(x), first)
    assert torch.equal(model(x), second)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(8)
        assert torch.equal(model(x), first)


def test_one_seed_vector_per_call_whatever_the_number_of_dropouts(monkeypatch: pytest.MonkeyPatch):
    from seqfuse.run import fuser as running

    drawn: list[int] = []
    draw_seeds = running.draw

    def counted(nodes: Any, x: Tensor) -> Tensor:
        seeds = draw_seeds(nodes, x)
        drawn.append(len(seeds))
        return seeds

    monkeypatch.setattr(running, "draw", counted)
    model = sf.Sequential(
        ops.Dropout(0.5), ops.Linear(5, 5), ops.Residual(ops.Dropout(0.1), ops.Tanh()), ops.Dropout(0.0), nn.Softplus(),
        sf.Sequential(ops.Dropout(1.0)),
    )  # fmt: skip
    x = draw(4, 5, dtype=torch.float32)
    model(x)
    assert drawn == [3]
    model[0].eval()
    model(x)
    assert drawn == [3, 2]
    state = torch.get_rng_state()
    model.eval()
    model(x)
    assert drawn == [3, 2]
    assert torch.equal(torch.get_rng_state(), state), "evaluation leaves the generator alone"


def test_one_dropout_used_twice_in_a_list_drops_differently_each_time():
    drop = ops.Dropout(0.5)
    model, x = sf.Sequential(drop, ops.Scale(1.0), drop), torch.ones(101, 53)
    kept = (model(x) != 0).double().mean().item()
    assert abs(kept - 0.25) < 4 * math.sqrt(0.25 * 0.75 / x.numel())


@pytest.mark.usefixtures("few_cases")
def test_a_fusion_takes_the_seeds_of_all_its_operations():
    parts = ops.Dropout(0.3), ops.Scale(2.0), ops.Dropout(0.0), ops.Dropout(0.6), ops.Dropout(0.5)
    parts[4].eval()
    model = sf.Sequential(*parts, fusions=(Several,))
    x = draw(33, 17)
    assert model.plan(x).count("Several") == 1
    results = []
    for fused in (True, False):
        torch.manual_seed(8)
        with sf.fusing(fused, on_error="raise"):
            results.append(passes(model, x))
    assert_same(*results)
    dropped = (results[0]["out"] == 0).double().mean()
    assert 0.6 < dropped < 0.84, "1 - 0.7 * 0.4 of them"
    sf.testing.check_fusion(Several, x.float(), ops.Dropout(0.4), ops.Scale(3.0), ops.Dropout(0.2))


def test_seeds_have_63_bits():
    seeds = random_seeds(100, torch.zeros(1))
    assert seeds.min() >= 0
    assert seeds.max() >= 2**62
