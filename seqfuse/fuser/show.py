"""How a plan prints, and how its memory is measured."""

from __future__ import annotations

import contextlib
import dataclasses
import unicodedata
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..settings import fusing
from .fake import faking

if TYPE_CHECKING:
    from ..env import Env
    from .match import Refusal
    from .plan import Plan, Step

WIDTH = 80
FEW = 3
"""Fusions that are named, or have a line of their own, where there are more."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes kept for backward (storages counted once, parameters left out) and FLOPs of the forward pass.

    Of what is planned: a module that runs through its own `__call__` is not run, and not counted.
    """

    saved: int
    saved_unfused: int
    flops: int


Run = Callable[[Tensor, dict[str, Tensor], bool], None]
Shape = Sequence[int]


def measure(run: Run, x: Tensor, channels: dict[str, Tensor], env: Env) -> Memory | None:
    """Run the planned part of a list on fake tensors, as planned and unfused; `None` if it cannot run so.

    Gradients and autocast are those of `env`, whatever they are where the result is asked for.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils import flop_counter

    count: Any = flop_counter.sdpa_flop_count  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

    def attention(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
        return int(count(q, k, v))

    # Torch has a formula for each of its kernels of attention but this one.
    extra = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention}

    def once(planned: bool) -> tuple[int, int]:
        kept: dict[int, torch.UntypedStorage] = {}  # held, so that no later one takes the place of one that went

        def pack(t: Tensor) -> Tensor:
            if isinstance(t, FakeTensor) and not isinstance(t, nn.Parameter):  # parameters stay real here
                storage = t.untyped_storage()
                kept[storage._cdata] = storage  # pyright: ignore[reportPrivateUsage]
            return t

        with faking() as mode, flop_counter.FlopCounterMode(display=False, custom_mapping=extra) as counter:
            given = {name: mode.from_tensor(value) for name, value in channels.items()}
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                run(mode.from_tensor(x), given, planned)
        return sum(storage.nbytes() for storage in kept.values()), counter.get_total_flops()

    cast: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if torch.amp.is_autocast_available(env.device):  # not on meta
        cast = torch.autocast(env.device, env.autocast, env.autocast is not None)
    try:
        with torch.set_grad_enabled(env.grad), cast:
            saved, _ = once(True)
            with fusing(False):
                unfused, flops = once(False)  # a kernel's own the counter does not see
    except Exception:
        return None
    return Memory(saved, unfused, flops)


def head(plan: Plan) -> tuple[str, str]:
    """For what a plan was made, and how much of it is fused."""
    forward, backward = plan.fused
    counts = f"{_plural(len(plan.names), 'operation')}, {_plural(len(plan.segments), 'segment')}"
    return f"Plan for {plan.env}", f"{counts}, {forward} fused forward, {backward} fused backward"


def memory_line(plan: Plan, memory: Memory) -> str:
    """What is kept for backward, and the work of the forward pass."""
    text = f"saved for backward: {_bytes(memory.saved)} (unfused {_bytes(memory.saved_unfused)}); "
    return f"{text}{_number(memory.flops)}FLOP forward" + ("; without what runs alone" if plan.alone else "")


def render(plan: Plan) -> str:
    """A plan as text for a terminal of 80 columns."""
    lines = _wrap(": ".join(head(plan)), "  ")
    wide = max([len("operation"), *(_width(_label(n, p)) for n, p in zip(plan.names, plan.paths, strict=True))])
    wide = min(wide, 30)
    column = (WIDTH - wide - 8) // 2
    lines.append(f"{'at':>4}  {'operation':<{wide}}  {'forward':<{column - 2}}  backward".rstrip())
    starts = {piece.start for piece in plan.segments if piece.start}
    ahead, back = _marks(plan.forward, plan), _marks(plan.backward, plan)
    for i, (name, path) in enumerate(zip(plan.names, plan.paths, strict=True)):
        if i in starts:
            lines.append(f"{'':>4}  {'-' * wide}")
        a, b = _cut(ahead.get(i, "."), column - 2), _cut(back.get(i, "."), column - 2)
        lines.append(f"{i:>4}  {_pad(_cut(_label(name, path), wide), wide)}  {_pad(a, column - 2)}  {b}".rstrip())
    for alone in plan.alone:
        lines += _wrap(f"alone: {alone.name} at {alone.at}: {alone.reason}", "    ")
    for line in _refusals(plan.refused):
        lines += _wrap(line, "    ")
    memory = plan.memory
    if memory is not None:
        lines += _wrap(memory_line(plan, memory), "    ")
    return "\n".join(lines)


def _label(name: str, path: str) -> str:
    return _printable(f"{name} {path}".rstrip())


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def _marks(steps: Sequence[Step], plan: Plan) -> dict[int, str]:
    marks: dict[int, str] = {}
    alone = {a.at for a in plan.alone}
    for step in steps:
        for i in step.covers:
            first, last = i == step.covers.start, i == step.covers.stop - 1
            if not step.fused:
                marks[i] = "alone" if i in alone else "unfused"
            else:
                marks[i] = f"{'[' if first else '|'} {step.name if first else ''}{' ]' if last and not first else ''}"
    return marks


def _refusals(refused: Sequence[Refusal]) -> list[str]:
    """A line for each fusion and reason; one for a reason that many share, and one for many that were outbid."""
    groups: dict[tuple[str, str], list[Refusal]] = {}
    for refusal in refused:
        groups.setdefault((refusal.reason, refusal.fusion), []).append(refusal)
    sharing: dict[str, list[str]] = {}
    outbid: dict[str, list[int]] = {}
    for (reason, fusion), several in groups.items():
        sharing.setdefault(reason, []).append(fusion)
        if several[0].outbid:
            outbid.setdefault(fusion, []).extend(refusal.at for refusal in several)
    many = sum(several[0].outbid for several in groups.values()) > FEW
    lines: list[str] = []
    for (reason, fusion), several in groups.items():
        fusions = sharing[reason]
        if many and several[0].outbid:
            continue
        if len(fusions) <= FEW:
            lines.append(f"refused: {fusion} at {_places(sorted({refusal.at for refusal in several}))}: {reason}")
        elif fusion == fusions[0]:
            named = f"{', '.join(fusions[:FEW])} and {len(fusions) - FEW} more"
            lines.append(f"refused: {named}: {reason}")
    if many:
        named = "; ".join(f"{fusion} at {_places(sorted(set(at)))}" for fusion, at in outbid.items())
        lines.append(f"outbid by a cheaper cover: {named}")
    return lines


def _places(at: Sequence[int]) -> str:
    return ", ".join(map(str, at[:6])) + (f" and {len(at) - 6} more" if len(at) > 6 else "")


def _plural(n: int, word: str) -> str:
    return f"{n} {word}" + ("" if n == 1 else "s")


def _cut(text: str, width: int) -> str:
    text = _printable(text)
    return _take(text, width) if _width(text) <= width else _take(text, width - 2) + ".."


def _pad(text: str, width: int) -> str:
    return text + " " * (width - _width(text))


def _width(text: str) -> int:
    return sum(map(_columns, text))


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _take(text: str, width: int) -> str:
    taken = ""
    for character in text:
        if _width(taken) + _columns(character) > width:
            break
        taken += character
    return taken


def _wrap(text: str, indent: str) -> list[str]:
    lines, line = list[str](), ""
    for word in _printable(text).split():
        while word:
            lead = line + " " if line.strip() else line
            fits = _take(word, WIDTH - _width(lead))
            if fits == word or (not line.strip() and fits):
                line, word = lead + fits, word[len(fits) :]
            else:
                lines.append(line)
                line = indent
    return [*lines, line]


def _number(value: float, step: float = 1000.0) -> str:
    for unit in ("", "k", "M", "G", "T", "P"):
        if value < step:
            return f"{value:.0f} {unit}" if not unit else f"{value:.1f} {unit}"
        value /= step
    return f"{value:.1f} E"


def _bytes(n: int) -> str:
    return f"{_number(n, 1024.0)}{'i' if n >= 1024 else ''}B".replace("ki", "Ki")
