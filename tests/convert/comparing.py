"""Compares converted models with the original ones, captured by Dynamo or recorded: outputs and all gradients.

A graph that is recorded from one call is as Dynamo captures it, many times faster, for models without control flow.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.overrides import TorchFunctionMode

import seqfuse as sf
from seqfuse.convert import Conversion
from seqfuse.convert.region import CapturedRegion
from seqfuse.convert.rewrite import RewriteOptions, rewrite
from seqfuse.testing import seeded_randn

_OPERATORS = {
    name: getattr(operator, name)
    for name in ("add", "sub", "mul", "truediv", "pow", "getitem", "setitem", "neg", "matmul", "gt", "invert", "eq")
} | {f"i{name}": getattr(operator, f"i{name}") for name in ("add", "sub", "mul", "truediv")}  # fmt: skip
_EFFECTS = ("_set_grad_enabled", "__setitem__", "register_hook")


class Recorder(TorchFunctionMode):
    """Records what is called of torch as nodes whose examples are the tensors themselves.

    Args:
        renames: whether a tensor that was changed in place is known by the change from then on.
    """

    def __init__(self, renames: bool) -> None:
        super().__init__()
        self.graph, self.renames = Graph(), renames
        self.constants: dict[str, Tensor] = {}
        self._nodes: dict[int, Node] = {}
        self._alive: list[Tensor] = []

    def known(self, t: Tensor, node: Node) -> Node:
        node.meta["example_value"] = t
        self._nodes[id(t)] = node
        self._alive.append(t)
        return node

    def node_of(self, t: Tensor) -> Node:
        if id(t) not in self._nodes:
            name = f"constant_{len(self.constants)}"
            self.constants[name] = t
            with self.graph.inserting_before(next(iter(self.graph.nodes))):
                self.known(t, self.graph.get_attr(name))
        return self._nodes[id(t)]

    def _given(self, value: Any) -> Any:
        return torch.utils._pytree.tree_map_only(Tensor, self.node_of, value)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = self._given(args), self._given(kwargs)
        out = func(*args, **kwargs)
        name: str = getattr(func, "__name__", "")
        if not list(_tensors(out)) and name not in _EFFECTS:
            return out
        node = self._node(func, name, *given)
        if isinstance(out, Tensor):
            is_other = id(out) not in self._nodes or not any(out is t for t in args[:1])
            if self.renames or is_other or name == "contiguous":  # a copy, where its input has other strides
                self.known(out, node)
            else:
                node.meta["example_value"] = out
        elif isinstance(out, tuple | list):
            for i, part in enumerate(out):
                if isinstance(part, Tensor):
                    self.known(part, self.graph.call_function(operator.getitem, (node, i)))
        return out

    def _node(self, func: Any, name: str, args: Any, kwargs: Any) -> Node:
        graph = self.graph
        if name == "__get__":
            return graph.call_function(getattr, (args[0], func.__self__.__name__))
        if func is torch.Tensor.__pow__:
            return graph.call_function(operator.pow, args)
        if name in ("__rmul__", "__radd__"):
            return graph.call_function(_OPERATORS[name[3:6]], (args[1], args[0]))
        if name == "__rsub__":
            return graph.call_function(operator.sub, (args[1], args[0]))
        if name in ("__rdiv__", "__rtruediv__"):
            return graph.call_function(operator.truediv, (args[1], args[0]))
        if name == "__rpow__":
            return graph.call_function(operator.pow, (args[1], args[0]))
        plain = name.strip("_").removeprefix("r") if name.startswith("__r") else name.strip("_")
        if name.startswith("__") and plain in _OPERATORS:
            return graph.call_function(_OPERATORS[plain], args, kwargs)
        if getattr(torch.Tensor, name, None) is func or type(func).__name__ == "method_descriptor":
            return graph.call_method(name, args, kwargs)
        return graph.call_function(func, args, kwargs)


def _tensors(value: Any) -> Iterator[Tensor]:
    return (t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, Tensor))


Inputs = Tensor | dict[str, Tensor]


def given(model: nn.Module, x: Inputs) -> dict[str, Tensor]:
    """The arguments of a recorded graph."""
    inputs = x if isinstance(x, dict) else {"x": x}
    return {**inputs, **dict(model.named_parameters()), **dict(model.named_buffers())}


def recorded(
    model: nn.Module, x: Inputs, renames: bool, tensors: Callable[[Any], Sequence[Tensor]] = lambda outputs: outputs
) -> tuple[GraphModule, Any]:
    """The graph of a call, whose outputs are `tensors` of what the call returned, and that."""
    recorder = Recorder(renames)
    for name, t in given(model, x).items():
        recorder.known(t, recorder.graph.placeholder(name.replace(".", "_")))
    with recorder:
        outputs = model(**x) if isinstance(x, dict) else model(x)
        recorder.graph.output(tuple(recorder.node_of(y) for y in tensors(outputs)))
    for node in reversed(recorder.graph.nodes):
        if node.target is operator.getitem and not node.users and isinstance(node.args[1], int):
            recorder.graph.erase_node(node)
    gm = GraphModule(torch.nn.Module(), Graph())
    for name, t in recorder.constants.items():
        gm.register_buffer(name, t)
    gm.graph = recorder.graph
    return gm, outputs


class Replayed:
    """A model whose calls run a converted graph, which was recorded from one call; all else is the model's.

    Args:
        model: the model.
        x: what it is recorded with.
        tensors: those that a call gives, of what the model returns.
        options: how the graph is rewritten.
    """

    def __init__(
        self,
        model: nn.Module,
        x: Inputs,
        tensors: Callable[[Any], Sequence[Tensor]] | None = None,
        options: RewriteOptions | None = None,
    ) -> None:
        self.model = model
        self._graph, outputs = recorded(model, x, renames=True, tensors=tensors or _tensors_of)
        self._one = tensors is None and isinstance(outputs, Tensor)
        self.graphs = rewrite(self._graph, options or RewriteOptions())

    def __call__(self, *args: Tensor, **inputs: Tensor) -> Any:
        outputs = self._graph(*given(self.model, args[0] if args else inputs).values())
        return outputs[0] if self._one else outputs

    @property
    def calls(self) -> int:
        """The number of calls of regions in the graph."""
        nodes = self._graph.graph.find_nodes(op="call_module")
        return sum(isinstance(self._graph.get_submodule(str(node.target)), CapturedRegion) for node in nodes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def _tensors_of(outputs: Any) -> Sequence[Tensor]:
    return (outputs,) if isinstance(outputs, Tensor) else outputs


def passes(model: nn.Module | Replayed, x: Tensor) -> list[Tensor | None]:
    """The output of a model, and the gradients of its input and parameters."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    outputs: Any = model(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum((y * seeded_randn(tuple(y.shape), 9)).sum() for y in outputs).backward()
    return [*(y.detach().clone() for y in outputs), x.grad, *(p.grad for p in model.parameters())]


def assert_equal(found: list[Tensor | None], wanted: list[Tensor | None], bound: float = 1e-9) -> None:
    for got, want in zip(found, wanted, strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(got, want, rtol=bound, atol=bound, equal_nan=True)


def assert_close(found: dict[str, Tensor | None], wanted: dict[str, Tensor | None]) -> None:
    """Within float32 rounding: a gradient may be a sum that cancels, so the scale is also that of all gradients."""
    whole = max(float(t.abs().max()) for t in wanted.values() if t is not None)
    for name, want in wanted.items():
        got = found[name]
        assert (got is None) == (want is None), name
        if got is not None and want is not None:
            bound = 1e-5 * float(want.abs().max()) + 1e-6 * whole
            assert float((got - want).abs().max()) <= bound, name


def assert_same(model: nn.Module, x: Tensor, bound: float = 1e-9) -> Conversion:
    """A model gives the same before and after its conversion: in its first call, later, and without gradients."""
    wanted = passes(model, x)
    conversion = sf.convert(model)
    _assert_gives(model, x, wanted, bound)
    return conversion


def assert_same_recorded(model: nn.Module, x: Tensor, bound: float = 1e-9) -> Replayed:
    """The same for a graph that is recorded instead of captured, in a tenth of the time."""
    wanted = passes(model, x)
    replayed = Replayed(model, x.clone().requires_grad_())
    assert replayed.calls == sum(len(graph.regions) for graph in replayed.graphs)
    _assert_gives(replayed, x, wanted, bound)
    return replayed


def _assert_gives(model: nn.Module | Replayed, x: Tensor, wanted: list[Tensor | None], bound: float) -> None:
    for _ in range(2):  # the first call is interpreted, the second runs generated code
        assert_equal(passes(model, x), wanted, bound)
    with torch.no_grad():
        y = model(x)
    assert_equal([*(y if isinstance(y, tuple) else (y,))], wanted[: len(y) if isinstance(y, tuple) else 1], bound)
