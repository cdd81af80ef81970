"""Counts eager torch's launches and saved bytes for the calls of a chain, and launches of the other calls."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode

from .. import ops
from .chains import Order, RaisedChain
from .effects import in_place
from .graph import argument, example, fake, is_fixed, is_plain, is_same, name_of, numbers, owner, spelled, value_of


def launching(nodes: Iterable[Node]) -> dict[str, Counter[str]]:
    """The calls of a graph that launch a kernel, by module and name: all except views and changes of modes."""
    found: dict[str, Counter[str]] = {}
    for node in filter(_launches, nodes):
        found.setdefault(owner(node), Counter())[name_of(node)] += 1
    return found


def _launches(node: Node) -> bool:
    if node.op not in ("call_function", "call_method") or is_same(node) is not None or spelled(node) in _VIEWS:
        return False
    if spelled(node) == "getitem" and node.args[0].op == "call_module":  # pyright: ignore
        return False  # an element of a region's results
    made = set(_memories(node))
    return bool(made) and (in_place(node) or made.isdisjoint(m for n in node.all_input_nodes for m in _memories(n)))


# Also of a region's results, whose storage is unknown.
_VIEWS = {"transpose", "unflatten", "detach", "t", "to_local"}


def _memories(node: Node) -> Iterator[int]:
    value = value_of(node)
    values = cast("Iterable[Any]", value) if isinstance(value, list | tuple) else (value,)
    full = (t for t in values if is_plain(t) and not any(is_fixed(size) and size == 0 for size in t.shape))
    return (t.untyped_storage()._cdata for t in full)  # pyright: ignore[reportPrivateUsage]


class Unconverted(NamedTuple):
    """The cost of a chain's calls in eager torch: kernels of both passes, and saved bytes, counted as for plans: each
    storage once, without parameters.
    """

    forward: int
    backward: int
    saved: int


def _arguments(node: Node, operation: Any) -> tuple[Any, Any]:
    """The arguments of a call, without a mask that attention provably does not need: only a capture may create it."""
    called = spelled(node) == "scaled_dot_product_attention" and isinstance(operation, ops.Attention)
    if not called or operation.mask is not None or operation.window is not None:
        return node.args, node.kwargs
    kwargs = {name: value for name, value in node.kwargs.items() if name not in ("attn_mask", "is_causal")}
    dropped = {"dropout_p": argument(node, 4, "dropout_p", 0.0), "is_causal": operation.causal}
    return node.args[:3], {**kwargs, **dropped}


class Before:
    """The captured calls of a chain, recorded while its nodes are still in the graph."""

    def __init__(self, chain: RaisedChain, order: Order, nodes: Iterable[Node], parameters: Iterable[Node]) -> None:
        self._parameters = tuple(parameters)
        self._modes = [node.args for node in chain.state.autocast]
        self._outputs = [
            n for v in order.outputs for n in ([v] if isinstance(v, Node) else [view.node for view in v.views])
        ]
        inside = {node for r in chain.members for node in r.took}
        operations = {node: r.operation for r in chain.members for node in r.took}
        read = set(self._outputs)
        self._calls: list[tuple[Node, str, Any, Any, Any]] = []
        for node in reversed(list(nodes)):
            if node in inside and node in read:
                read.update(node.all_input_nodes)
                self._calls.append((node, node.op, node.target, *_arguments(node, operations.get(node))))
        self._calls.reverse()

    def eager(self, autocast: torch.dtype | None, gradients: bool, backward: bool) -> Unconverted:
        """Launches and saved bytes of eager torch, counted on fake tensors; no backward launches unless `backward`."""
        with FakeTensorMode(), contextlib.ExitStack() as stack, torch.set_grad_enabled(gradients):
            device = example(self._outputs[0])
            if autocast is not None and device is not None:
                stack.enter_context(torch.autocast(device.device.type, autocast))
            for args in self._modes:
                stack.enter_context(torch.autocast(*args))  # pyright: ignore[reportArgumentType]
            made, held = _Made(), _Held()
            with Launches() as forward, saved_tensors_hooks(held.add, itself):
                for call in self._calls:
                    made.run(*call)
            outputs = [t for n in self._outputs if isinstance(t := made[n], Tensor) and t.requires_grad]
            inputs = [t for t in made.values() if isinstance(t, Tensor) and t.is_leaf and t.requires_grad]
            given = [torch.empty_like(t) for t in outputs]
            with Launches() as back:
                if outputs and backward:
                    torch.autograd.grad(outputs, inputs, given, allow_unused=True)
            called = {call[0] for call in self._calls}
            entered = [t for node, t in made.items() if isinstance(t, Tensor) and node not in called]
            parameters = [made[node] for node in self._parameters if node in made]
            return Unconverted(forward.count, back.count, held.bytes(entered, parameters))


class _Made(dict[Node, Any]):
    """Values of nodes on fake tensors, in the sizes of the captured call."""

    def __missing__(self, node: Node) -> Any:
        given = value_of(node)
        self[node] = fake(node) if isinstance(given, Tensor) else numbers((given,))[0]
        return self[node]

    def run(self, node: Node, op: str, target: Any, args: Any, kwargs: Any) -> None:
        """Run a call on the values of its arguments."""
        args, kwargs = map_arg((args, kwargs), self.__getitem__)
        call = getattr(args[0], target) if op == "call_method" else target
        self[node] = call(*(args[1:] if op == "call_method" else args), **kwargs)


def are_saved(node: Node) -> bool:
    """Whether a call that reads a node's result, or a view of it, saves it for backward."""
    own = set(_memories(node))
    for user in node.users:
        if not own.isdisjoint(_memories(user)):
            if are_saved(user):
                return True
            continue
        made, held = _Made(), _Held()
        try:
            with FakeTensorMode(), torch.enable_grad(), saved_tensors_hooks(held.add, itself):
                made.run(user, user.op, user.target, user.args, user.kwargs)
        except Exception:  # a call that needs real data
            return True
        if held.has(made[node]):
            return True
    return False


class _Held:
    """The storages that a graph saves, kept alive so that their addresses are not reused."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}

    def add(self, t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        self._storages[storage._cdata] = storage  # pyright: ignore[reportPrivateUsage]
        return t

    def has(self, t: Tensor) -> bool:
        """Whether the storage of a tensor is saved."""
        return t.untyped_storage()._cdata in self._storages  # pyright: ignore[reportPrivateUsage]

    def bytes(self, entered: Iterable[Tensor], parameters: Iterable[Tensor]) -> int:
        """Saved bytes without parameters; an input that is part of a larger tensor counts with its own size."""
        left = {t.untyped_storage()._cdata: 0 for t in parameters}  # pyright: ignore[reportPrivateUsage]
        own = {t.untyped_storage()._cdata: t.nbytes for t in entered} | left  # pyright: ignore[reportPrivateUsage]
        return sum(min(s.nbytes(), own.get(place, s.nbytes())) for place, s in self._storages.items())


def itself(t: Tensor) -> Tensor:
    """Return the tensor unchanged; the unpack hook of saved tensors."""
    return t


class Launches(TorchDispatchMode):
    """Counts calls of ATen and of this library's kernels, except views and uninitialized allocations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name: str = func.overloadpacket.__name__
        self.count += func.namespace in _LAUNCHING and not func.is_view and not name.startswith(_UNFILLED)
        return func(*args, **(kwargs or {}))


_LAUNCHING = ("aten", "seqfuse")
_UNFILLED = ("squeeze_", "unsqueeze_", "empty", "new_empty", "_unsafe_view", "detach", "is_", "sym_")
