"""Lists of operations that a fusion's pattern matches, made from the examples of its slots' classes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..fusion import FusedOperation, Slot
from ..operation import UnfusedOperation
from .tensors import seeded_randn

_VARIADIC = (2, 1, 3)  # the first is that of the list in which no slot is varied
Choice = tuple[type[UnfusedOperation], ...]


def example_lists(fusion: type[FusedOperation], x: Tensor) -> Iterator[list[UnfusedOperation]]:
    """Lists for a fusion: one with every slot filled, then variants that differ from it in one slot.

    A slot of an open type or a union takes each of the classes known to match; an optional one is also left empty; a
    variadic one takes two, one and three operations. Each operation is its class's `example(x)`, x threaded through
    the shapes that `infer` gives. Forks and adds that do not pair within the list get names, and become public.

    Raises AssertionError where the first list cannot be made; a variant that cannot is left out.
    """
    choices = [list(_choices(slot)) for slot in fusion.slots]
    base = [choice[0] for choice in choices]
    try:
        yield _build(base, x)
    except Exception as error:
        message = f"{type(error).__name__} while making examples of its slots: {error}; give the operations yourself"
        raise AssertionError(message) from error
    for i, choice in enumerate(choices):
        for other in choice[1:]:
            varied = [*base[:i], other, *base[i + 1 :]]
            if any(varied):
                try:
                    made = _build(varied, x)
                except Exception:
                    continue
                yield made


def _choices(slot: Slot) -> Iterator[Choice]:
    kinds = [kind for wanted in slot.types for kind in ([wanted] if not wanted.is_open else known_finals(wanted))]
    if not kinds:
        raise AssertionError(f"no operation is known for slot {slot.name!r}; give the operations yourself")
    if not slot.variadic:
        yield from ((kind,) for kind in kinds)
    else:
        for count in _VARIADIC:
            yield tuple(kinds[i % len(kinds)] for i in range(count))
        yield from ((kind,) for kind in kinds[1:])
    if slot.optional:
        yield ()


def known_finals(wanted: type[UnfusedOperation]) -> list[type[UnfusedOperation]]:
    """The final subclasses of an open class: this library's, by name, or where it has none whatever is defined."""
    found: dict[type[UnfusedOperation], None] = {}
    left = [wanted]
    while left:
        kind = left.pop()
        left += kind.__subclasses__()
        if kind.is_final:
            found[kind] = None
    ours = [kind for kind in found if kind.__module__.startswith("seqfuse.")]
    return sorted(ours or found, key=lambda kind: kind.__name__)


def _build(choice: Sequence[Choice], x: Tensor) -> list[UnfusedOperation]:
    made: list[UnfusedOperation] = []
    shape = tuple(x.shape)
    for kind in itertools.chain(*choice):
        like = seeded_randn(shape, len(made), dtype=x.dtype).to(x.device)
        made.append(kind.example(like))
        shape = tuple(made[-1].infer(shape))
    return _name_channels(made)


def _name_channels(made: list[UnfusedOperation]) -> list[UnfusedOperation]:
    """Name the channels that have no name and no partner in the list, as in `Add("other2")`."""
    open_forks: list[int] = []
    alone: list[tuple[int, str]] = []
    for at, operation in enumerate(made):
        for name in operation.forward_signature.extras:
            if operation.channels[name] is None:
                if open_forks:
                    open_forks.pop()
                else:
                    alone.append((at, name))
        open_forks += [at for name in operation.outputs if operation.channels[name] is None]
    for at, name in (*alone, *((at, made[at].outputs[0]) for at in open_forks)):
        kind: type = type(made[at])
        made[at] = kind(f"{name}{at}")
    return made


def described(operations: Sequence[torch.nn.Module]) -> str:
    """A list as `[Linear, Bias]`."""
    return f"[{', '.join(type(operation).__name__ for operation in operations)}]"
