"""Regions: a chain of a captured graph as one call of a `Sequential`, with parameters passed in each call."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import threading
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node

from .. import ops
from ..env import Env, rows_of
from ..errors import SeqfuseError
from ..fusion import Fusions
from ..group import handed_on, with_backward
from ..plan import Choice, Memory, MemoryChoice, Plan, draw, global_hooks
from ..recipes import Recipe
from ..run import Fuser, OpList, Region, Sequential, bind, default_fusions, install
from .chains import Order
from .graph import example, fake, numbers, owner, spelled
from .launches import Before, Launches, Unconverted
from .raising import Raised


class CapturedRegion(nn.Module):
    """Runs a chain: `region(x, *channels, *parameters)` returns the values that are read outside of it.

    Parameters are arguments because Dynamo's graph has them as inputs: its guards then cover them, equal layers share
    one graph, and a parameter may be a computed tensor (a cast, a merged adapter, gathered by FSDP2). The region does
    not keep them after the call.
    """

    def __init__(
        self,
        order: Order,
        fusions: Fusions | None,
        memory: Choice,
        recipe: Recipe | None = None,
        kept_out: Container[int] = (),
    ) -> None:
        super().__init__()
        self.order = order
        self.before: Before | None = None
        self.results: Sequence[Tensor] = ()  # fake, of the sizes at capture
        e = example(order.x)
        self.device = "cpu" if e is None else e.device.type
        # In a tuple, so that it is not a submodule: its parameters are on `meta`.
        self._model = (Sequential(*order.operations, recipe=recipe),)
        self.recipe = recipe
        for r in order.members if recipe is not None else ():
            if id(r.operation) in kept_out and with_gemms(r.operation):
                r.operation.recipe = None
        self._fuser = Fuser(self.model, default_fusions() if fusions is None else fusions, memory=memory)
        paths = [*dict.fromkeys(owner(r.node) or "the model" for r in order.members)]
        self.ends = " to ".join(paths[:: len(paths) - 1 or 1])
        self._fuser.place = f"a chain of {len(order.members)} operations in {self.ends}"
        install(self.model, self._fuser)
        self._names = tuple(order.channels)
        self._distributed = dist.is_available() and dist.is_initialized()
        self._multiplies = isinstance(order.members[0].operation, ops.Linear | ops.MergedLinear)
        self._lock = self._fuser.lock = threading.RLock()
        self._ran: tuple[Plan, Plan] | None = None  # the plan of the last call, and the same plan with its bytes
        self._counted: tuple[Plan | None, dict[str, Any]] = None, {}  # that plan, and the counts for it, by name
        self.given: list[Node] = []
        self._slots: list[tuple[dict[str, Any], str, Tensor]] = []
        for r in order.members:
            for path, given in r.parameters.items():
                part, _, name = path.rpartition(".")
                module: Any = r.operation.get_submodule(part)
                parameters = module._buffers if name in module._buffers else module._parameters
                self._slots.append((parameters, name, parameters[name]))
                self.given.append(given)

    @property
    def model(self) -> Sequential:
        """The sequence of the chain's operations."""
        return self._model[0]

    @property
    def _called(self) -> tuple[OpList, Region] | None:
        """The sequence of the last call, and its region; `None` if no call ran fused."""
        op_list = self._fuser.last_op_list
        region = None if op_list is None else op_list.parts[0]
        return (op_list, region) if op_list is not None and isinstance(region, Region) else None

    @property
    def plan(self) -> Plan | None:
        """The plan of the last call; bytes are for tensors of the sizes at capture.

        `None` before the first call, and while global module hooks make it run eagerly.
        """
        called = self._called
        if global_hooks() or called is None or (lowering := called[1].lowering) is None:
            return None
        plan = lowering.plan
        if self._ran is None or self._ran[0] is not plan:
            counted = functools.cache(lambda: self._planned(plan.env))

            def memory(_: Plan) -> Memory | str | None:
                return counted().memory or counted().memory_unknown

            def choices(_: Plan) -> tuple[MemoryChoice, ...]:
                return counted().choices

            shown = self._fuser.plan_of(lowering)
            self._ran = plan, dataclasses.replace(shown, measure=memory, compare=choices)
        return self._ran[1]

    @property
    def quantized(self) -> dict[str, str | None]:
        """The paths of modules whose GEMMs have a recipe; each with the reason if it is not quantized, else None."""
        plan, called = self.plan, self._called
        if plan is None or called is None or self.recipe is None:
            return {}
        at = {q.at for q in plan.quantizations}
        refused = (r for r in plan.refused if r.fusion == str(self.recipe))
        reasons = {r.at: r.reason.removesuffix(", so it is not quantized") for r in refused}
        found: dict[str, str | None] = {}
        members = {id(r.operation): r for r in self.order.members}
        for position, node in enumerate(called[0].nodes):
            raised = members.get(id(node.operation))
            if raised is not None and with_gemms(node.operation):
                why = reasons.get(position, "excluded" if node.recipe is None else "switched off")
                found.update(dict.fromkeys(gemms_of(raised), None if position in at else why))
        return found

    @property
    def hooked(self) -> bool:
        """Whether global module hooks make its operations run eagerly one by one, now or in the last call."""
        return global_hooks() or (self._fuser.last_op_list is not None and self._called is None)

    def plan_for(
        self, device: str, *, dtype: torch.dtype | None = None, autocast: torch.dtype | None = None, grad: bool = True
    ) -> Plan:
        """The plan for another machine, with the chain's own inputs in the sizes at capture.

        Args:
            device: as in `Env.of`, such as `"cuda:sm_90"`.
            dtype: dtype of the model: replaces the dtype of the first input in all inputs and parameters.
            autocast: the dtype of an autocast region around the model.
            grad: whether gradients are needed.

        Raises:
            InputError: (SF106) for an invalid device or dtype, or a CUDA device that this machine does not have.
        """
        x = example(self.order.x)
        assert x is not None
        rows = rows_of(numbers(x.shape))
        return self._planned(Env.of(device, dtype=dtype or x.dtype, autocast=autocast, grad=grad, rows=rows))

    def _planned(self, env: Env) -> Plan:
        """The plan for an environment, with the bytes of each choice, on tensors without data of the captured sizes."""
        x = example(self.order.x)

        def like(t: Tensor) -> Tensor:
            dtype = env.dtype if x is not None and t.dtype is x.dtype else t.dtype
            asked = t.requires_grad  # not `empty_like`, which would expand repeated elements
            return torch.empty_strided(t.shape, t.stride(), dtype=dtype, device=t.device, requires_grad=asked)

        given = [like(fake(node, "meta")) for node in (self.order.x, *self.order.channels.values())]
        # Parameters are on the device of the call, since autocast casts nothing on meta.
        with (mode := FakeTensorMode(allow_non_fake_inputs=True)):
            parameters = [like(t) for t in self.stand_ins(self.given)]

        def lent(find: Callable[..., Any] | None) -> Callable[..., Any] | None:
            """The function, wrapped so that the operations have parameters while it runs."""

            def found(*args: Any, **kwargs: Any) -> Any:
                assert find is not None
                with self._lock, mode, contextlib.ExitStack() as stack:
                    stack.callback(self._take_back)
                    self._lend(parameters)
                    return find(*args, **kwargs)

            return None if find is None else found

        plan: Plan = cast("Any", lent(self.model.plan))(
            given[0], env=env, **dict(zip(self._names, given[1:], strict=True))
        )
        return dataclasses.replace(plan, measure=lent(plan.measure), compare=lent(plan.compare))

    def stand_ins(self, values: Iterable[Node]) -> list[Tensor]:
        """A fake tensor for each node, under a `FakeTensorMode`; the same one for the same node."""
        return list(map(functools.cache(fake), values))

    def copied(self, parameters: Iterable[Tensor]) -> Fuser:
        """A fuser as its own for a copy of the operations with these parameters, a tensor for each node in `given`."""
        memo: dict[int, Any] = {id(own): given for (_, _, own), given in zip(self._slots, parameters, strict=True)}
        with self._lock:
            return Fuser(copy.deepcopy(self.model, memo), self._fuser.fusions, memory=self._fuser.memory)

    @property
    def eager(self) -> Unconverted | None:
        """Launches and saved bytes of the chain in eager torch, if they can be counted."""
        return self._once("eager", lambda: self._count_eager(backward=True))

    @property
    def saved_by_eager(self) -> int | None:
        """Bytes that the chain saves in eager torch, if they can be counted."""
        counted = self._once("saved", lambda: self._count_eager(backward=False))
        return None if counted is None else counted.saved

    def _once(self, name: str, count: Callable[[], Any]) -> Any:
        """A count for the plan of the last call on tensors without data, cached, since each report requests it."""
        if self._counted[0] is not self.plan:
            self._counted = self.plan, {}
        counts = self._counted[1]
        if name not in counts:
            counts[name] = count()
        return counts[name]

    def _count_eager(self, backward: bool) -> Unconverted | None:
        plan = self.plan
        assert self.before is not None
        try:
            autocast, grad = (None, True) if plan is None else (plan.env.autocast, plan.env.grad)
            return self.before.eager(autocast, grad, backward)
        except Exception:  # a call that needs real data
            return None

    @property
    def launched(self) -> tuple[int, int] | None:
        """The kernel launches of the last call's plan, forward and backward, if they can be counted."""
        return self._once("launched", self._count_launched)

    def _count_launched(self) -> tuple[int, int] | None:
        called = self._called
        if called is None or (lowering := called[1].lowering) is None:
            return None
        op_list, part = called
        env = lowering.plan.env
        try:
            with self._lock, FakeTensorMode(), contextlib.ExitStack() as stack, torch.set_grad_enabled(env.grad):
                if env.autocast is not None:
                    stack.enter_context(torch.autocast(self.device, env.autocast))
                given = self.stand_ins((self.order.x, *self.order.channels.values(), *self.given))
                stack.callback(self._take_back)
                self._lend(given[1 + len(self._names) :])
                channels = dict(zip(self._names, given[1:], strict=False))
                with Launches() as forward:
                    seeds = draw(op_list.nodes, given[0])
                    y: Any = bind(part, lowering)(given[0], channels, seeds)
                outputs = [t for t in (y, *(channels[name] for name in op_list.outputs)) if t.requires_grad]
                inputs = [t for t in given if t.requires_grad]
                with Launches() as backward:
                    if outputs:
                        torch.autograd.grad(outputs, inputs, [*map(torch.empty_like, outputs)], allow_unused=True)
        except Exception:  # a fusion that needs real data
            return None
        return forward.count, backward.count

    def forward(self, x: Tensor, *tensors: Tensor) -> Any:
        """Run the chain."""
        if torch.compiler.is_dynamo_compiling():
            return self._run(x, tensors)
        if self._distributed:
            x, tensors = _arrived(x), tuple(map(_arrived, tensors))
        if self._multiplies and not x.is_contiguous():
            x = _as_rows(x)
        with self._lock:  # parameters are assigned to shared operations, which two threads must not do at once
            return self._run(x, tensors)

    def _run(self, x: Tensor, tensors: tuple[Tensor, ...]) -> Any:
        names = self._names
        try:
            self._lend(tensors[len(names) :])
            return self._fuser(x, **dict(zip(names, tensors, strict=False)))
        except SeqfuseError as error:
            self._tell_module(error)
            raise
        finally:
            self._take_back()

    def _lend(self, tensors: Iterable[Tensor]) -> None:
        for (parameters, name, _), tensor in zip(self._slots, tensors, strict=True):
            parameters[name] = tensor

    def _take_back(self) -> None:
        for parameters, name, placeholder in self._slots:
            parameters[name] = placeholder

    def _tell_module(self, error: SeqfuseError) -> None:
        """Set the path of the model's module in an error of its operation."""
        called = self._fuser.last_op_list
        nodes = () if called is None else called.nodes
        if isinstance(error.position, int) and error.position < len(nodes):
            operation = self.order.operations[int(nodes[error.position].path.partition(".")[0])]
            module = next((owner(r.node) for r in self.order.members if r.operation is operation), "")
            if module:
                error.path = module  # the path within the chain refers to operations that the user did not create


def with_gemms(operation: Any) -> bool:
    """Whether an operation has GEMMs that a recipe can quantize."""
    return bool(getattr(operation, "gemms", ()))


def gemms_of(raised: Raised) -> tuple[str, ...]:
    """The paths of the modules whose GEMMs an operation replaces."""
    nodes = [node for node in raised.took if spelled(node) in ("linear", "matmul")] or [raised.node]
    if isinstance(raised.operation, ops.GroupedLinear):  # which also replaces the router before it
        nodes = [raised.node]
    return tuple(sorted({owner(node) for node in nodes}))


def excluded(names: Iterable[str], path: str) -> bool:
    """Whether a path contains one of these names as a whole component or sequence of components."""
    return any(f".{name}." in f".{path}." for name in names)


def _arrived(x: Any) -> Tensor:
    """A plain tensor; DTensor's collectives return a tensor subclass that may still be in transit and has no plan."""

    def wait(t: Any) -> Tensor:
        return t.trigger_wait()

    return with_backward(wait, handed_on, x) if hasattr(x, "trigger_wait") else x


def _as_rows(x: Tensor) -> Tensor:
    """The same values as rows for a GEMM: torch saves a copy then, not the larger tensor that x is a view of."""
    try:
        x.view(-1, x.shape[-1])
    except (RuntimeError, ValueError):  # ValueError: a fake tensor
        return x.contiguous()
    return x
