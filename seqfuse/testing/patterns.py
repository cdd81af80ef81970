"""Op sequences that match a fusion's pattern, from the examples of its slots' classes."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..fusion import FusedOperation, Slot
from ..operation import UnfusedOperation
from ..signature import arguments_kept
from .tensors import seeded_randn

_MORE_COLUMNS = 5  # RoPE on query, key and value heads of even size needs a width that is a multiple of six
_WIDE = 256
_VARIADIC = (2, 1, 3)  # the first is the count in the sequence in which no slot is varied
Kinds = tuple[type[UnfusedOperation], ...]
Pick = Callable[[int, type[UnfusedOperation], Tensor], UnfusedOperation]


def example_lists(fusion: type[FusedOperation], x: Tensor) -> Iterator[tuple[list[UnfusedOperation], Tensor]]:
    """Op sequences for a fusion, each with its input: one with every slot filled, then variants of one slot each.

    A slot of an open type or a union is filled with each class known to match; an optional one is also left empty; a
    variadic one has two, one and three operations. Each operation is its class's `example(x)`, for an x of the shape
    that `infer` of the previous one returns. If shapes do not fit, such as an odd width and a gated unit, x gets up to
    five more columns. Channels in the fusion's signatures (`fork_out`, `add_other`) are public under these names; other
    channels are paired within the sequence.

    Raises AssertionError if the first sequence cannot be built; variants that cannot be built are skipped.
    """
    choices = [list(_choices(slot)) for slot in fusion.slots]
    base = [choice[0] for choice in choices]
    try:
        yield _build(fusion, base, x)
    except Exception as error:
        message = f"{type(error).__name__} while making examples of its slots: {error}; give the operations yourself"
        raise AssertionError(message) from error
    for i, choice in enumerate(choices):
        for other in choice[1:]:
            varied = [*base[:i], other, *base[i + 1 :]]
            if any(varied):
                try:
                    made = _build(fusion, varied, x)
                except Exception:
                    continue
                yield made


def configured_otherwise(fusion: type[FusedOperation], x: Tensor) -> Iterator[tuple[list[UnfusedOperation], Tensor]]:
    """The sequence with every slot filled, with each of the other `examples(x)` of a slot's class in turn.

    A fusion may refuse a configuration; a configuration that does not fit the other operations is skipped.
    """
    base = [next(_choices(slot)) for slot in fusion.slots]
    counts = [1] * len(base)

    def counted(at: int, kind: type[UnfusedOperation], like: Tensor) -> UnfusedOperation:
        counts[at] = max(counts[at], len(kind.examples(like)))
        return kind.example(like)

    _build(fusion, base, x, counted)
    for i, count in enumerate(counts):
        for n in range(1, count):
            try:
                made = _build(fusion, base, x, functools.partial(_numbered, i, n))
            except ValueError:
                continue
            yield made


def at_other_widths(fusion: type[FusedOperation], x: Tensor) -> Iterator[tuple[list[UnfusedOperation], Tensor]]:
    """The sequence with every slot filled, for each of `other_widths(x)`."""
    for other in other_widths(x):
        with contextlib.suppress(ValueError):
            yield _build(fusion, [next(_choices(slot)) for slot in fusion.slots], other)


def other_examples(kind: type[UnfusedOperation], x: Tensor) -> Iterator[tuple[str, UnfusedOperation, Tensor]]:
    """Each of the other `examples(x)` of a class, and its `example` of each other width: name, operation, input."""
    for i, like in enumerate((x, *other_widths(x))):
        try:
            made = (kind.example(like),) if i else kind.examples(like)[1:]
        except (TypeError, ValueError, NotImplementedError):  # no example, or none for this input
            continue
        of = "example" if i else "examples"
        yield from ((f"{one} of its `{of}`", one.to(like.device), like) for one in made)


def other_widths(x: Tensor) -> Iterator[Tensor]:
    """Two inputs of other widths, if the width of `x` is a power of two, for which kernels mask no columns.

    The first is wider than 256 and has several tiles of columns, with a partial last tile. The second is 1.5 times as
    wide as x, for operations and fusions that do not take the first.
    """
    width = x.shape[-1] if x.dim() and x.is_floating_point() else 0
    if width < 2 or width & (width - 1):
        return
    near = width + width // 2
    for other in dict.fromkeys((near * -(-(_WIDE + 1) // near), near)):
        yield seeded_randn((*x.shape[:-1], other), 0, dtype=x.dtype).to(x.device)


def configured_once(fusion: type[FusedOperation], x: Tensor) -> Iterator[tuple[str, str]]:
    """Classes of a fusion's slots, except this library's, whose `examples` has one configuration, and its arguments."""
    operations, _ = next(example_lists(fusion, x))
    for kind, operation in {type(operation): operation for operation in operations}.items():
        sizes = {size for t in (*operation.parameters(), *operation.buffers()) for size in t.shape}
        kept = arguments_kept(operation)
        given = {name: value for name, value in kept.items() if type(value) is not int or value not in sizes}
        if given and not kind.__module__.startswith("seqfuse.") and len(kind.examples(x)) == 1:
            yield kind.__name__, ", ".join(f"{name}={value!r}" for name, value in given.items())


def _choices(slot: Slot) -> Iterator[Kinds]:
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
    """The final subclasses of an open class by name: this library's, or, if it has none, all that are defined."""
    found: dict[type[UnfusedOperation], None] = {}
    left = [wanted]
    while left:
        kind = left.pop()
        left += kind.__subclasses__()
        if kind.is_final:
            found[kind] = None
    ours = [kind for kind in found if kind.__module__.startswith("seqfuse.")]
    return sorted(ours or found, key=lambda kind: kind.__name__)


def _first(at: int, kind: type[UnfusedOperation], like: Tensor) -> UnfusedOperation:
    return kind.example(like)


def _numbered(slot: int, n: int, at: int, kind: type[UnfusedOperation], like: Tensor) -> UnfusedOperation:
    """In one slot the n-th example, or the last if there are fewer; in the others the first."""
    examples = kind.examples(like)
    return examples[min(n, len(examples) - 1)] if at == slot else examples[0]


def _build(
    fusion: type[FusedOperation], choice: Sequence[Kinds], x: Tensor, pick: Pick = _first
) -> tuple[list[UnfusedOperation], Tensor]:
    try:
        return _thread(fusion, choice, x, pick), x
    except ValueError:
        for columns in range(x.shape[-1] + 1, x.shape[-1] + 1 + _MORE_COLUMNS):
            wider = seeded_randn((*x.shape[:-1], columns), 0, dtype=x.dtype).to(x.device)
            with contextlib.suppress(ValueError):
                return _thread(fusion, choice, wider, pick), wider
        raise


def _thread(fusion: type[FusedOperation], choice: Sequence[Kinds], x: Tensor, pick: Pick) -> list[UnfusedOperation]:
    made: list[UnfusedOperation] = []
    open_forks: list[str] = []
    shape = tuple(x.shape)
    for at, (slot, kinds) in enumerate(zip(fusion.slots, choice, strict=True)):
        for i, kind in enumerate(kinds):
            like = seeded_randn(shape, len(made), dtype=x.dtype).to(x.device)
            place = f"{slot.name}_{i}" if slot.variadic else slot.name
            made.append(_routed(fusion, place, _bare(pick(at, kind, like)), open_forks).to(x.device))
            shape = tuple(made[-1].infer(shape))
    return made


def _routed(
    fusion: type[FusedOperation], place: str, operation: UnfusedOperation, open_forks: list[str]
) -> UnfusedOperation:
    """A new operation with its channels: public if the fusion names them, else paired within the sequence."""
    if not operation.channels:  # it has none, or its optional ones were not given
        return operation
    inputs, outputs = operation.forward_signature.extras, operation.outputs
    named: str | None = None
    for name in (f"{place}_{n}" for n in inputs):
        if name in fusion.forward_signature.extras or not open_forks:
            named = name
        else:
            open_forks.pop()
    for name in (f"{place}_{n}" for n in outputs):
        if name in fusion.outputs or f"d_{name}" in fusion.backward_signature.extras:
            named = name
        else:
            open_forks.append(name)
    kind: type = type(operation)
    try:
        inspect.signature(kind).bind(named)
    except TypeError:  # it has other required arguments, so it keeps its example's channel names
        return operation
    return kind(named)


def _bare(operation: UnfusedOperation) -> UnfusedOperation:
    """The operation without parameters of others that it expands to: `Linear` without its bias, in a GEMM's slot."""
    for member in operation.expand()[1:]:
        if isinstance(member, UnfusedOperation):
            for owner, name in member.parameter_slots().values():
                if owner is operation:
                    setattr(owner, name, None)
    return operation


def listed_types(operations: Sequence[torch.nn.Module]) -> str:
    """A sequence as `[Linear, Bias]`."""
    return f"[{', '.join(type(operation).__name__ for operation in operations)}]"
