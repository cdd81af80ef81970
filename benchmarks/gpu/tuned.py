"""Blocks after `sf.tune`: covers chosen by what was measured here, not by declared costs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import seqfuse as sf
from seqfuse import cost_table

from .blocks import GROUPS, Models, block_case, spec_of, trained
from .case import Case, Contender, Inputs, Run
from .sizes import MAIN, Sizes

SECONDS = 12.0


def cases(sizes: Sizes) -> Iterator[Case]:
    """The main blocks; what was measured is forgotten after each, since it would hold for the whole process."""
    for model in sizes.models:
        if model.name in MAIN or len(sizes.models) <= 2:
            for what, priority in (("feedforward", 4), ("layer", 7)):
                yield _tuned(sizes, model, what, priority)


def _tuned(sizes: Sizes, model: Any, what: str, priority: int) -> Case:
    models = Models(what, spec_of(model), sizes)
    plain = block_case(sizes, models, model, what, sizes.tokens[0], priority)
    return dataclasses.replace(
        plain,
        group=f"{GROUPS[what]}, tuned",
        contenders={**plain.contenders, "seqfuse": _after_tuning(models)},
        after=functools.partial(_forget, sizes),
    )


def _after_tuning(models: Models) -> Contender:
    after = trained(lambda: models.ours)
    done: set[tuple[int, ...]] = set()

    def prepare(inputs: Inputs) -> Run:
        shape = tuple(inputs["x"].shape)
        if shape not in done:
            done.add(shape)
            x = inputs["x"].detach().requires_grad_()
            sf.tune(models.ours, x, modes="train", budget=SECONDS, progress=False)
        return after.prepare(inputs)

    return dataclasses.replace(after, prepare=prepare)


def _forget(sizes: Sizes) -> None:
    machine = cost_table.Machine.of(sf.Env.of(sizes.device, dtype=sizes.dtype))
    if machine is not None:
        cost_table.add(machine, {}, instead=True)
