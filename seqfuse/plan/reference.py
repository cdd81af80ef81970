"""Runs the references of a sequence under plain autograd, for compilers and transforms; draws seeds for all calls."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils import stateless
from torch.overrides import handle_torch_function, is_tensor_like  # pyright: ignore[reportUnknownVariableType]

from ..errors import InputError, meant, step_note
from ..group import summed_gradient
from ..operation import FusableOperation, UnfusedOperation, configured
from ..recipes import within
from .flatten import Node, located
from .quantized import reference_recipe


def number_seeds(nodes: Sequence[Node]) -> int:
    """Assigns a seed index to each node that currently uses a seed; returns their number."""
    count = 0
    for node in nodes:
        if node.eager is None and isinstance(node.operation, UnfusedOperation) and node.operation.random:
            node.seed, count = count, count + 1
    return count


def random_seeds(count: int, x: Tensor) -> Tensor:
    """63-bit seeds on x's device, from torch's generator."""
    if not isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        return torch.randint_like(x.new_empty((count,), dtype=torch.int64), 2**63 - 1)
    return torch.randint(2**63 - 1, (count,), dtype=torch.int64, device=x.device)


def draw(nodes: Sequence[Node], x: Tensor) -> Tensor | None:
    """One 63-bit seed for each random operation, on x's device, from torch's generator; `None` if there is none.

    Processes with equal generator states draw equal seeds, except for operations on sharded rows or features.
    """
    drawing = [node for node in nodes if node.seed is not None]
    if not drawing:
        return None
    seeds = random_seeds(len(drawing), x)
    for node in drawing:
        if node.rank:
            seeds[node.seed].bitwise_xor_(node.rank)
    return seeds


def by_reference(
    nodes: Sequence[Node],
    inputs: Sequence[str],
    outputs: Sequence[str],
    x: Tensor,
    channels: dict[str, Tensor],
) -> Any:
    """Run every operation's reference under plain autograd."""
    check_channels(nodes, inputs, channels)
    x = walk_reference(nodes, range(len(nodes)), x, channels, draw(nodes, x))
    return (x, *[channels[name] for name in outputs]) if outputs else x


def _summing(node: Node) -> contextlib.AbstractContextManager[Any]:
    """A context in which gradients of an operation's parameters are summed over the processes of its group."""
    group = node.sum_over
    if group is None or group.size == 1:
        return contextlib.nullcontext()
    owners = {id(owner): owner for owner, _ in node.slots.values()}
    (owner,) = owners.values()
    swapped = {name: summed_gradient(group, getattr(owner, name)) for _, name in node.slots.values()}
    return cast(Any, stateless)._reparametrize_module(owner, swapped)


def check_channels(nodes: Sequence[Node], inputs: Sequence[str], channels: Mapping[str, Tensor]) -> None:
    """Check that a call passed the public extra inputs and no others."""
    for name in inputs:
        given, hint = channels.get(name), None
        if is_tensor_like(given):
            continue
        at = next(i for i, node in enumerate(nodes) if any(c == name for _, c in node.inputs))
        message = f"channel {name!r} must be a tensor, not {type(given).__name__}"
        if name not in channels:
            message = f"it reads channel {name!r}, which no operation before it makes and the call did not pass"
            close = [given for given in channels if given not in inputs and meant(given, [name])]
            made = [channel for other in nodes for _, channel in other.outputs]
            hint = f"the call passed {close[0]!r}; {meant(close[0], [name])}" if close else meant(name, made)
        raise InputError(message, code="SF103", hint=hint, **located(nodes, at))
    check_surplus(nodes, inputs, channels)


_OF_A_SEQUENTIAL = "fusions", "memory", "recipe"


def check_surplus(nodes: Sequence[Node], inputs: Sequence[str], channels: Mapping[str, Tensor]) -> None:
    """Check that each channel passed to a call or to `plan` is read by an operation."""
    for name in channels:
        if name not in inputs:
            hint = meant(name, [c for c in inputs if c not in channels])
            if name in _OF_A_SEQUENTIAL:
                hint = f"{name} is an argument of the model: sf.Sequential(..., {name}=...)"
            raise _surplus(nodes, inputs, f"channel {name!r}", hint)


def positional_surplus(
    nodes: Sequence[Node], inputs: Sequence[str], count: int, channels: Mapping[str, Tensor]
) -> InputError:
    """The error of a call with so many positional arguments after x."""
    absent = [name for name in inputs if name not in channels][:count]
    keywords = ", ".join(f"{name}=..." for name in absent)
    hint = f"channels are passed by keyword: model(x, {keywords})" if absent else None
    return _surplus(nodes, inputs, f"{count + 1} arguments by position, and x is the only one", hint)


def _surplus(nodes: Sequence[Node], inputs: Sequence[str], what: str, hint: str | None) -> InputError:
    readers = [(i, node) for i, node in enumerate(nodes) for _, c in node.inputs if c in inputs]
    known = [f"{c!r} ({node.name} at position {i})" for i, node in readers for _, c in node.inputs]
    listed = f"what can be passed is {', '.join(known)}" if known else "no operation reads a channel from the call"
    where = located(nodes, readers[0][0]) if readers else {}
    return InputError(f"the call passed {what}; {listed}", code="SF103", hint=hint, **where)


def run_eagerly(nodes: Sequence[Node], position: int, x: Tensor, channels: dict[str, Tensor]) -> Tensor:
    """Calls a module through its own `__call__` with its channels; adds the position to errors."""
    node, operation = nodes[position], nodes[position].operation
    named: Mapping[str, Any] = operation.channels if isinstance(operation, UnfusedOperation) else {}
    given = {named.get(name) or name: channels[channel] for name, channel in node.inputs}
    # Other modules may be recomputed in the backward pass, outside of this block.
    inherits = node.recipe is not ... and isinstance(operation, FusableOperation) and "recipe" not in vars(operation)
    if inherits and node.recipe is not None and torch.compiler.is_compiling():
        message = "it runs by itself, where a compiler does not see the recipe of its container"
        raise InputError(message, code="SF108", hint="set its own recipe", **located(nodes, position))
    try:
        with within(node.recipe) if inherits else contextlib.nullcontext():
            out: Any = operation(x, **given)
        if not node.inputs and not node.outputs and not is_tensor_like(out):
            message = f"it must return a tensor, not {type(out).__name__}"
            raise InputError(message, code="SF105", **located(nodes, position))
        made = ", ".join(name for name, _ in node.outputs)
        several = len(out) if hasattr(out, "__len__") and not is_tensor_like(out) else None
        if made and not _stands_in(out) and several != 1 + len(node.outputs):  # a hook's result
            message = f"it must return (y, {made}), not a {type(out).__name__}{f' of {several}' if several else ''}"
            raise InputError(message, code="SF105", **located(nodes, position))
    except Exception as error:
        if not torch.compiler.is_compiling():
            error.add_note(step_note(node.name, position, node.path, ""))
        raise
    if not node.outputs:
        return out
    channels.update((channel, out[i]) for i, (_, channel) in enumerate(node.outputs, 1))
    return out[0]


def walk_reference(
    nodes: Sequence[Node], positions: range, x: Tensor, channels: dict[str, Tensor], seeds: Tensor | None
) -> Tensor:
    """Runs the references at `positions` and adds their extra outputs to `channels`."""
    done = positions.start
    for position in positions:
        if position < done:
            continue
        node, done = nodes[position], position + 1
        if node.eager is not None:
            x = run_eagerly(nodes, position, x, channels)
            continue
        operation: Any = node.operation
        extras: dict[str, Any] = {name: channels[channel] for name, channel in node.inputs}
        if operation.forward_signature.seed:
            extras["seed"] = None if seeds is None or node.seed is None else seeds[node.seed]
        if operation.forward_signature.recipe:
            recipe = reference_recipe(nodes, position, x)
            extras |= {} if recipe is None else {"recipe": recipe}
        joins = done in positions and nodes[done].fusable
        # Not `not`, which Dynamo of torch 2.11 cannot trace for a group.
        joins = joins and node.sum_over is None and nodes[done].sum_over is None
        if joins and "recipe" not in extras:
            both = operation.reference_with(x, nodes[done].operation)
            if both is not None:
                x, done = both, done + 1
                continue
        try:
            with _summing(node):
                out = operation.reference(x, **extras)
        except Exception as error:
            if any(map(_stands_in, (x, *extras.values()))):  # proxies have no sizes and dtypes to check
                recorded = _Recorded(operation)
                x = _made(node, recorded(x, *recorded.parameters(), **extras), channels)
                continue
            if not isinstance(error, InputError):
                raise
            if not torch.compiler.is_compiling() and error.position is None:
                error.operation, error.position, error.path = error.operation or node.name, position, node.path
            raise
        x = _made(node, out, channels)
    return x


def _made(node: Node, out: Any, channels: dict[str, Tensor]) -> Any:
    """Returns y of a reference and adds its extra outputs to `channels`."""
    if not node.outputs:
        return out
    channels.update((channel, out[1][name]) for name, channel in node.outputs)
    return out[0]


def _stands_in(x: Any) -> bool:
    """Whether x is a proxy of a tensor, such as those of torch.fx tracers."""
    return not isinstance(x, Tensor) and is_tensor_like(x)


class _Recorded:
    """The reference of an operation as a function of its parameters, recorded by a tracer as one call.

    For references that read sizes or a dtype. It captures the current configuration of the operation.
    """

    def __init__(self, operation: UnfusedOperation) -> None:
        self.operation = configured(operation)
        self.slots = [*self.operation.parameter_slots().values()]
        self.__name__ = self.__qualname__ = type(operation).__name__.lower()

    def parameters(self) -> tuple[Tensor, ...]:
        """The arguments of a call after x."""
        return tuple([getattr(owner, name) for owner, name in self.slots])

    def __call__(self, x: Tensor, *parameters: Tensor, **extras: Any) -> Any:
        standing = tuple(filter(_stands_in, (x, *parameters, *extras.values())))
        if standing:
            return handle_torch_function(self, standing, x, *parameters, **extras)
        with contextlib.ExitStack() as swapped:
            for (owner, name), value in zip(self.slots, parameters, strict=True):
                swapped.enter_context(cast(Any, stateless)._reparametrize_module(owner, {name: value}))
            return self.operation.reference(x, **extras)
