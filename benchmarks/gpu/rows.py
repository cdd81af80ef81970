"""All rows, the most important first."""

from __future__ import annotations

import itertools
from collections import Counter

from targets import TARGETS

from . import blocks, kernels
from .case import Case
from .sizes import Sizes

OF_KERNELS = (kernels.norms, kernels.pointwise, kernels.decoding, kernels.attentions)  # rows of one kernel each
ROOMS = (
    kernels.norms, blocks.cases, kernels.pointwise,
    lambda sizes: itertools.chain(kernels.decoding(sizes), blocks.host_cases(sizes)),  # rows of few tokens
    kernels.attentions, blocks.expert_cases, blocks.converted_cases, blocks.memory_cases, blocks.recipe_cases,
)  # fmt: skip


def cases(sizes: Sizes) -> list[Case]:
    """All rows by priority, after one row of each group with a target.

    With equal priority rooms alternate, so that an interrupted run has some rows of each.
    """
    ranked: list[tuple[int, int, Case]] = []
    for room in ROOMS:
        before = Counter[int]()
        for case in room(sizes):
            ranked.append((case.priority, before[case.priority], case))
            before[case.priority] += 1
    wanted = {group for target in TARGETS for group in target.groups}
    ordered = [case for *_, case in sorted(ranked, key=lambda entry: entry[:2])]
    first = {case.group: case for case in reversed(ordered) if case.group in wanted}
    first = {case.group: case for case in ordered if first.get(case.group) is case}
    return [*first.values(), *(case for case in ordered if first.get(case.group) is not case)]
