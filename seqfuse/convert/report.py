"""The report of a conversion: chains, operations, steps in both passes, and unconverted calls with reasons."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence

from ..env import why_no_c
from ..ops import Fork, Take
from ..pictures.data import ChoiceData
from ..pictures.text import bytes_against, choices_table, counted, few
from ..plan import Plan
from .calls import Calls, Captured
from .graph import owner
from .reasons import Left
from .region import CapturedRegion


@dataclasses.dataclass(frozen=True)
class GraphReport:
    """The report on one captured graph.

    Attributes:
        name: name of the graph.
        regions: its chains; the attribute `plan` of each is its latest plan, `None` before its first call.
        left: GEMMs, norms, activations, attentions and similar calls that were not converted.
        outside: number of calls outside the chains that launch a kernel, by path of their module and by name.
        limit: Dynamo's limit of graphs for one piece of code, if this graph is the last within it.
        again: whether the same code was captured before, for another kind of call.
        captured: the call that it was captured in, and the number of calls since.
        checkpointed: whether it is the body of a checkpoint, which runs again in the backward pass.
    """

    name: str
    regions: tuple[CapturedRegion, ...]
    left: tuple[Left, ...]
    outside: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict[str, Mapping[str, int]])
    limit: int | None = None
    again: bool = False
    captured: Captured | None = None
    checkpointed: bool = False

    @property
    def layers(self) -> int:
        """Number of equal layers that it runs in, and whose saved tensors are alive together."""
        return 1 if self.captured is None else max(1, len(self.captured.modules))

    @property
    def operations(self) -> int:
        """Number of operations in its chains."""
        return sum(len(region.order.members) for region in self.regions)

    @property
    def beside(self) -> Counter[str]:
        """Number of calls outside the chains that launch a kernel, by name."""
        return sum(map(Counter[str], self.outside.values()), Counter[str]())

    def __str__(self) -> str:
        return "\n".join([self.heading(), *self.body()])

    def heading(self, of: int | None = None) -> str:
        """The call that it was captured in, and its number of calls out of `of` calls of the model."""
        captured = self.captured
        if captured is None:
            return self.name
        after = "" if captured.after is None else f"after the graph break at {captured.after.place}, "
        gone = of is not None and captured.last < of and captured.calls
        since = f", none since call {captured.last} of {of}" if gone else ""
        return f"{self.name}: {after}{captured.call}; {counted(captured.calls, 'call')}{since}"

    def body(self, launches: bool = False) -> list[str]:
        """Lines about its chains and the calls that were not converted; `launches` as in a report."""
        alike: dict[str, list[CapturedRegion]] = {}
        for region in self.regions:
            alike.setdefault("\n".join(_chain(self, region, launches)), []).append(region)
        text = [f"  {line}" for same in alike.values() for line in _chain(self, same[0], launches, len(same))]
        if not self.regions:
            none = "no operation matches its calls" if not self.left else "the reasons are below"
            text.append(f"  nothing converted: {none}")
        text += [f"  {line}" for line in _choices(self.regions, 1 if self.checkpointed else self.layers)]
        text += [f"  {line}" for line in _quantized(self.regions)]
        text += _outside(self.outside)
        text += _left(self.left)
        if ", " in self.name:  # the graph of a body, whose code does not end with the graph around it
            return text
        if self.captured is not None and (until := self.captured.until) is not None:
            text.append(_BUCKET if until.at_a_bucket else f"  ends at a graph break, {until.place}: {until.reason}")
        if self.limit is not None:
            text.append(f"  the last of {self.limit} graphs of its code: {_LIMIT}")
        return text


def _outside(outside: Mapping[str, Mapping[str, int]]) -> list[str]:
    """The line on calls outside the chains, grouped by modules with the same calls."""
    alike: dict[str, list[str]] = {}
    for path, calls in outside.items():
        alike.setdefault(_named(calls), []).append(path or "the model")
    count = sum(n for calls in outside.values() for n in calls.values())
    named = [f"{calls} in {_few(paths)}" for calls, paths in alike.items()]
    more = [f"calls of {len(named) - _MOST} other kinds of modules"] if len(named) > _MOST else []
    said = f"{counted(count, 'call')} as before: {'; '.join(named[:_MOST] + more)}" if count else "no calls"
    return textwrap.wrap(f"  outside the chains: {said}", 98, subsequent_indent="      ", break_on_hyphens=False)


def _named(calls: Mapping[str, int]) -> str:
    names = sorted(calls, key=lambda name: -calls[name])
    first = [f"{name} x{calls[name]}" if calls[name] > 1 else name for name in names[:_MOST]]
    return ", ".join(first) + (f" and {len(names) - _MOST} others" if len(names) > _MOST else "")


def _left(lefts: Sequence[Left], indent: str = "  ") -> list[str]:
    """A line for each reason and name of a call, whatever the layer numbers are."""
    alike: dict[tuple[str, str, str], list[Left]] = {}
    for left in lefts:
        alike.setdefault((left.kind, left.call, _of_any_layer(left.reason)), []).append(left)
    text = list[str]()
    for (kind, call, reason), same in alike.items():
        reason = same[0].reason if len({left.reason for left in same}) == 1 else reason
        text.append(f"{indent}left: {kind} {call} in {_few([left.module or 'the model' for left in same])}: {reason}")
    return text


def _of_any_layer(reason: str) -> str:
    """A reason with stars instead of layer numbers in paths."""
    return re.sub(r"(?<= in )[\w.]+", lambda path: re.sub(r"\b\d+\b", "*", path[0]), reason)


def _few(paths: Sequence[str]) -> str:
    return few(list(dict.fromkeys(paths)), 3)


_MOST = 8
"""Maximum number of printed names of calls outside the chains, and of kinds of their modules."""

_BUCKET = (
    "  a graph of one of the buckets of DistributedDataParallel, whose gradients are sent as they are computed: "
    "torch._dynamo.config.optimize_ddp = False captures one graph, whose gradients are sent at the end"
)
_LIMIT = (
    "calls that fit none of them run as before. Raise torch._dynamo.config.recompile_limit before the first call, or "
    "call the model in fewer ways"
)


def _chain(graph: GraphReport, region: CapturedRegion, launches: bool, times: int = 1) -> list[str]:
    names = [type(op).__name__ for op in region.order.operations if not isinstance(op, Fork | Take)]
    head = "chain" if times == 1 else f"{times} chains, each"
    head += f" of {counted(len(region.order.members), 'operation')}"
    head += f"{',' * (times > 1)} in each of {graph.layers} layers" if graph.layers > 1 else ""
    head += f": {_folded(names)}"
    lines = textwrap.wrap(head, 96, subsequent_indent="    ")
    plan = region.plan
    if plan is None:
        return [*lines, "    runs eagerly under hooks of all modules" if region.hooked else "    not called yet"]
    forward, backward = (
        counted(sum(s.fused or not all(node.operation.is_view for node in s.nodes) for s in steps), "step")
        for steps in (plan.forward, plan.backward)
    )
    kernels = [f"    kernels: C, compiled by {plan.compiler}"] if plan.compiler is not None else []
    if plan.env.device == "cpu" and plan.env.kernels is None:
        kernels = [f"    no fused kernels: {why_no_c()}"]
    lines.append(f"    forward: {forward}, {plan.fused[0]} fused")
    if not plan.env.grad:
        lines[-1] += "; without gradients"
    else:
        lines[-1] += f"; backward: {backward}, {plan.fused[1]} fused"
    lines += kernels
    shown = launches or plan.env.device != "cpu"
    if shown and (launched := region.launched) is not None and (eager := region.eager) is not None:
        own, theirs = (f"{launched[0]}", f"{eager.forward}")
        if plan.env.grad:
            own, theirs = f"{own} + {launched[1]}", f"{theirs} + {eager.backward}"
        lines.append(f"    kernel launches{', forward + backward' * plan.env.grad}: {own}; eager torch {theirs}")
    paths = _few([owner(r.node) or "the model" for r in region.order.members])
    missed = (r for r in plan.refused if r.fusion.startswith("memory="))
    lines += [f"    {r.fusion} in {paths}: {r.reason}" for r in missed]
    if (memory := plan.memory) is not None and plan.env.grad:
        others = {} if (saved := region.saved_by_eager) is None else {"eager_torch": saved}
        held = " (held only while it is recomputed)" if graph.checkpointed else ""
        against = bytes_against(memory.saved, **others, unfused=memory.saved_unfused)
        lines.append(f"    saved for backward: {against}{held}")
    return lines


def _choices(regions: Sequence[CapturedRegion], layers: int) -> list[str]:
    """The table of memory choices, summed over chains and equal layers; empty if there is no choice."""
    sums: list[ChoiceData] = []
    plans = [plan for region in regions if (plan := region.plan) is not None and plan.env.grad]
    for name in dict.fromkeys(choice.memory for plan in plans for choice in plan.choices):
        # A budget that does not fit a chain is not among its choices. A chain without choices has only its plan.
        named = [{c.memory: c for c in plan.choices} for plan in plans]
        found = [of.get(name, of.get("least")) for of in named]
        kept = peak = 0
        for plan, c in [*zip(plans, found, strict=True)] * layers:
            saved, own = (c.saved, c.peak) if c is not None else _held(plan)
            kept, peak = kept + saved, max(peak, kept + own)
        time = layers * sum(c.microseconds for c in found if c is not None)
        used = any(c.used for c in found if c is not None)
        sums.append(ChoiceData(memory=name, saved=kept, peak=peak, microseconds=time, used=used))
    return choices_table(sums, "(used)")


def _held(plan: Plan) -> tuple[int, int]:
    """The bytes that a plan saves, and its peak, as far as known; else zero."""
    memory = plan.memory
    return (0, 0) if memory is None else (memory.saved, memory.peak or memory.saved)


def _quantized(regions: Sequence[CapturedRegion]) -> list[str]:
    """Lines with the quantized modules, and with the others by reason."""
    by_reason: dict[str, list[str]] = {}
    for region in regions:
        for path, reason in region.quantized.items():
            assert region.recipe is not None
            emulated = region.device != "cuda" or region.recipe.emulate
            how = f"{region.recipe} (emulated on {region.device})" if emulated else f"{region.recipe}"
            said = f"quantized by {how}" if reason is None else f"not quantized, {reason}"
            by_reason.setdefault(said, []).append(path)
    return [f"{said}: {_few(paths)}" for said, paths in by_reason.items()]


def _folded(names: Sequence[str]) -> str:
    """Names in a row, with consecutive repetitions of a block written once, with their number."""
    text, at = list[str](), 0
    while at < len(names):
        length, times = max(((n, _times(names, at, n)) for n in range(1, len(names) - at + 1)), key=_saved)
        if _saved((length, times)) < _LEAST:
            length, times = 1, 1
        block = ", ".join(names[at : at + length])
        text.append(f"({block}) x{times}" if times > 1 else block)
        at += length * times
    return ", ".join(text)


_LEAST = 4
"""Number of names that folding must save."""


def _times(names: Sequence[str], at: int, length: int) -> int:
    """How often a block of names repeats in a row."""
    block, times = names[at : at + length], 1
    while names[at + times * length : at + (times + 1) * length] == block:
        times += 1
    return times


def _saved(block: tuple[int, int]) -> int:
    return block[0] * (block[1] - 1)


def text_of(
    graphs: Sequence[GraphReport],
    calls: Calls,
    left: Sequence[Left],
    layers: Sequence[str],
    undone: bool,
    launches: bool,
) -> str:
    """The report on all graphs, equal ones once, on calls in no graph, and on calls that no graph served.

    If one module is called, instead of each of several `layers`, a graph's report says if later calls did not use it.
    """
    alike: dict[str, list[GraphReport]] = {}
    for graph in graphs:
        alike.setdefault("\n".join(graph.body(launches)), []).append(graph)
    of = None if len(layers) > 1 else calls.count
    text = [] if graphs or undone else [_nothing(calls, layers)]
    for body, (first, *others) in alike.items():
        text += [first.heading(of), body]
        text += [f"  alike: {graph.heading(of)}" for graph in others]
        if any(graph.again for graph in others):
            text.append("  captured again because a call differed, TORCH_LOGS=recompiles says in what")
    text += _left(left, indent="")
    if undone:
        text.insert(0, "undone; what had been converted:" if graphs else "undone; nothing had been captured")
    text += [f"{counted(n, 'call')} ran as before the conversion: {why}" for why, n in calls.missed.items()]
    return "\n".join(text)


def _nothing(calls: Calls, layers: Sequence[str]) -> str:
    if not calls.count and not any(layers):
        return "nothing captured yet: call the model"
    if not calls.count:
        count = f"{counted(len(layers), 'layer')}, {layers[0]}" + (f" to {layers[-1]}" if layers[1:] else "")
        why = 'if the model was called, its code does not call these modules: use regions="model"'
        return f"nothing captured yet: none of its {count}, was ever called; {why}"
    text = f"called {counted(calls.count, 'time')}; nothing was captured"
    if calls.breaks:
        *_, last = calls.breaks
        return f"{text}: Dynamo left the code at {last.place}: {last.reason}"
    return text if calls.missed else f"{text}: Dynamo found no call of torch in it"
