"""The error bound on means over draws, for models of many operations."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from seqfuse.testing.judge import Measure, mismatch_of
from seqfuse.testing.numerics import Check, FusedMismatch, Report, Sample
from seqfuse.testing.structure import index_of, named_tensors


def judge_together(measure: Measure, seed: int, draws: int = 8) -> None:
    """Apply the error bound to one draw and, where it alarms, to `draws` others at once: for models of many operations.

    There one rounding reaches whole rows: the errors of two right models are two draws of few numbers, and in most
    models one of them is somewhere more than twice the other. So the rule's `rms` and `element` are asked of means over
    draws: of `rms(e_f)` by its bound, and of the squares of an element's errors in units of what all elements of a
    tensor may err by. `structure` is asked of every draw.

    Raises FusedMismatch.
    """
    if mismatch_of(*measure(seed)) is None:
        return
    samples: dict[str, list[Sample]] = {}
    for i in range(1, draws + 1):
        sides = measure(seed + 1001 * i)
        alarm = mismatch_of(*sides)
        if alarm is not None and any(check.part == "structure" for check in alarm.report.failures):
            raise alarm
        f, u, r = (dict(named_tensors(tree)) for tree in sides)
        for name in f:
            mine, own, exact = f[name], u[name], r[name]
            if mine is None or own is None or exact is None or not mine.numel():
                continue
            if mine.is_floating_point():
                samples.setdefault(name, []).append(Sample(name, mine.detach(), own.detach(), exact.detach()))
    report = Report(tuple(check for name in samples for check in _together(name, samples[name])))
    if report.failures:
        raise FusedMismatch(report)


def _together(name: str, samples: list[Sample]) -> Iterator[Check]:
    e_f, e_u, phi = (torch.stack(t) for t in zip(*((s.e_f, s.e_u, s.phi) for s in samples), strict=True))
    r_f, r_u, r_phi = (t.square().mean((1, 2), keepdim=True).sqrt() for t in (e_f, e_u, phi))
    # The geometric mean, in which a draw counts as much as its inverse; one that is nearly exact excuses no other.
    whole = _times(r_f, 1.5 * r_u + 0.6 * r_phi).clamp_min(0.1).log().mean().exp()
    yield Check(name, "rms", whole.item(), 1.0, "the whole tensor", "mean over draws of rms(e_f) by its bound")
    unit = 6 * r_u + 0.5 * r_phi
    p_f, p_u, p_phi = (_times(t, unit).square().mean(0).sqrt() for t in (e_f, e_u, phi))
    size = _times(p_f, 1 + 4 * p_u + 2 * p_phi)
    where = index_of(int(size.argmax().item()), samples[0].shape)
    yield Check(name, "element", size.max().item(), 1.0, str(where), "mean over draws of |e_f| by its bound")


def _times(errors: Tensor, bound: Tensor) -> Tensor:
    # No error is within any bound, also within 0, as in a draw where no element is finite.
    return torch.where(errors == 0, torch.zeros_like(errors), errors / bound)
