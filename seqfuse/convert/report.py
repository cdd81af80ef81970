"""What a conversion did: chains, operations, steps each way, and what was left as it was, with the reason."""

from __future__ import annotations

import dataclasses
import textwrap
from collections import Counter
from collections.abc import Sequence

from ..fuser.step import Step
from ..ops import Fork
from .region import Region


@dataclasses.dataclass(frozen=True)
class Left:
    """A call that runs as it did before.

    Attributes:
        call: the name of the call.
        kind: GEMM, norm, activation, attention or convolution.
        module: the path of the module that it belongs to.
        reason: why.
    """

    call: str
    kind: str
    module: str
    reason: str


@dataclasses.dataclass(frozen=True)
class GraphReport:
    """What was converted of one captured graph.

    Attributes:
        name: of the graph.
        regions: what runs each of its chains; `plan` of each is how it ran last, `None` before its first call.
        left: the GEMMs, norms, activations, attentions and convolutions that run as before.
        beside: how many calls that launch a kernel run as before; calls of chains are not among them.
        limit: Dynamo's limit of graphs for one piece of code, if this graph is the last within it.
        again: whether the same code had been captured before, for calls that differed from this one.
    """

    name: str
    regions: tuple[Region, ...]
    left: tuple[Left, ...]
    beside: int = 0
    limit: int | None = None
    again: bool = False

    @property
    def operations(self) -> int:
        """How many operations its chains have."""
        return sum(len(region.order.members) for region in self.regions)

    def __str__(self) -> str:
        what = f"{_of(len(self.regions), 'chain')} of {_of(self.operations, 'operation')}"
        text = [f"{self.name}: {what if self.regions else 'nothing converted'}"]
        text += [f"  {line}" for region in self.regions for line in _chain(region)]
        text += [f"  {line}" for line in _choices(self.regions)]
        text.append(f"  outside the chains: {_of(self.beside, 'call')} that launch a kernel, as before")
        alike = Counter((left.kind, left.call, left.reason) for left in self.left)
        for (kind, call, reason), count in alike.items():
            where = next(
                left.module for left in self.left if (left.kind, left.call, left.reason) == (kind, call, reason)
            )
            more = f" and {count - 1} more" if count > 1 else ""
            text.append(f"  left: {kind} {call} in {where or 'the model'}{more}: {reason}")
        if self.limit is not None:
            text.append(f"  the last of {self.limit} graphs of its code: {_LIMIT}")
        return "\n".join(text)


_LIMIT = (
    "calls that fit none of them run as before. Raise torch._dynamo.config.recompile_limit before the first call, or "
    "call the model in fewer ways"
)


def _chain(region: Region) -> list[str]:
    names = ", ".join(type(op).__name__ for op in region.order.operations if not isinstance(op, Fork))
    lines = textwrap.wrap(f"chain: {names}", 96, subsequent_indent="    ")
    plan = region.plan
    if plan is None:
        return [*lines, "    not called yet"]
    forward, backward = (
        _of(sum(step.fused or not _is_view(step) for step in steps), "step") for steps in (plan.forward, plan.backward)
    )
    eager = region.eager
    if plan.env.grad:
        saved = ""
        if (memory := plan.memory) is not None:
            saved = f"; saved for backward {memory.saved:,} B, unfused {memory.saved_unfused:,} B"
        lines.append(
            f"    {forward} forward, {backward} backward, {plan.fused[0]} and {plan.fused[1]} of them fused{saved}"
        )
        if eager is not None:
            share = "" if memory is None or not eager.saved else f" (the chain {memory.saved / eager.saved:.2f} of it)"
            passes = f"{_of(eager.forward, 'kernel')} forward, {eager.backward} backward for them"
            lines.append(f"    eager torch launches {passes}, and saves {eager.saved:,} B{share}")
    else:
        lines.append(f"    {forward}, {plan.fused[0]} of them fused; without gradients")
        if eager is not None:
            lines.append(f"    eager torch launches {_of(eager.forward, 'kernel')} for them")
    return lines


def _choices(regions: Sequence[Region]) -> list[str]:
    """What all chains together would save with each choice of memory, where choices differ."""
    sums: dict[str, tuple[int, float, bool]] = {}
    plans = [plan for region in regions if (plan := region.plan) is not None and plan.env.grad]
    for name in dict.fromkeys(choice.memory for plan in plans for choice in plan.choices):
        found = [next((c for c in plan.choices if c.memory == name), None) for plan in plans]
        # In a chain without choices each is the plan that it has.
        own = [plan.memory.saved if plan.memory is not None else 0 for plan in plans]
        saved = sum(kept if c is None else c.saved for c, kept in zip(found, own, strict=True))
        time = sum(c.microseconds for c in found if c is not None)
        sums[name] = saved, time, any(c.used for c in found if c is not None)
    said = [
        f"{name} {saved:,}\xa0B" + (f", an estimated {time:,.1f} us more" if time else "") + " (used)" * used
        for name, (saved, time, used) in sums.items()
    ]
    lines = textwrap.wrap(f"choices of memory: {'; '.join(said)}", 100, subsequent_indent="    ") if said else []
    return [line.replace("\xa0", " ") for line in lines]


def _is_view(step: Step) -> bool:
    return all(node.operation.is_view for node in step.nodes)


def _of(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def text_of(graphs: Sequence[GraphReport], missed: int, undone: bool) -> str:
    """The reports of all graphs, those that are alike once, and how many calls none of them served."""
    alike: dict[str, list[GraphReport]] = {}
    for graph in graphs:
        alike.setdefault(str(graph).removeprefix(graph.name), []).append(graph)
    text = [] if graphs or undone else ["nothing captured yet: call the model"]
    for body, (first, *others) in alike.items():
        text.append(first.name + body)
        if others:
            why = "; captured again because a call differed, TORCH_LOGS=recompiles says in what"
            again = why if any(graph.again for graph in others) else ""
            text.append(f"  alike: {', '.join(graph.name for graph in others)}{again}")
    if undone:
        text.insert(0, "undone; what had been converted:" if graphs else "undone; nothing had been captured")
    if missed:
        text.append(f"{_of(missed, 'call')} ran as before the conversion: Dynamo captured nothing for them")
    return "\n".join(text)
