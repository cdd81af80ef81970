"""A step of a schedule: one operation, or one fusion over several, in the forward or in the backward pass."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..casts import held
from ..env import Env
from ..fusion import ForwardFusion, FusedOperation, InferenceFusion
from ..hardware import capability
from ..operation import UnfusedOperation
from ..quantized import COLUMNS, Quantize, is_local
from ..recipes import Recipe, Role
from ..saved import Layout, Saved, always_saved, kind_of
from ..settings import Fusing, fusing_now
from ..signature import Signature
from .flatten import Node
from .inputs import Border, along_of, borders_of, recast, validate
from .quantized import Unquantized, recipe_at

# Index into the seeds of a call; for a fusion of several random operations an index for each.
Drawn = int | None | tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Record:
    """Saved tensors of one operation (or of a joint fusion): their key, their class and the saved fields."""

    path: tuple[Any, ...]  # the keys under which a forward fusion returns the record
    position: int  # of the operation in the sequence; a joint fusion's is `~start`
    cls: type[Saved]
    kept: tuple[str, ...]
    # `own_record` of an operation within a fusion, if that builds its record, and its seed.
    own: Callable[[Tensor | None], Saved | None] | None = dataclasses.field(default=None, compare=False)
    seed: int | None = None

    def among(self, saved: Any, seeds: Tensor | None) -> Any:
        """The record out of those that a fusion saved, or built by its operation."""
        if self.own is not None:
            return self.own(_drawn(seeds, self.seed))
        return functools.reduce(operator.getitem, self.path, saved)


@dataclasses.dataclass(frozen=True)
class Step:
    """An operation or a fusion in a schedule, with its inputs, outputs, saved tensors and gradients.

    Attributes:
        operation: an operation, a fusion, or a module that runs through its own `__call__`.
        covers: the positions that it replaces.
        name: its class.
        fused: whether it is a fusion.
        nodes: the operations at those positions, as the sequence was read.
        needs: the gradients that are needed at those positions.
        borders: the dtypes before each of those positions and behind the last, where dtypes differ along the sequence.
        recipes: the low-precision recipe of each of those operations, or `None`; empty if none has one.
        joint: whether it is a fusion of both passes, with a `Saved` of its own.
        recipe: the low-precision recipe of an unfused operation.
        to: how the kernel of a fusion quantizes its result for the next step; `None` if it does not.
        start: the first position.
        stop: the position after the last.
        key: identifies it among the steps of its pass.
    """

    operation: Any
    covers: range
    name: str
    fused: bool = False
    nodes: Sequence[Node] = dataclasses.field(default=(), compare=False, repr=False)
    needs: tuple[frozenset[str], ...] = dataclasses.field(default=(), compare=False, repr=False)
    borders: tuple[Border, ...] = dataclasses.field(default=(), compare=False, repr=False)
    recipes: tuple[Recipe | None, ...] = dataclasses.field(default=(), compare=False, repr=False)
    to: Quantize | None = dataclasses.field(default=None, compare=False, repr=False)
    start: int = dataclasses.field(init=False, compare=False, repr=False)
    stop: int = dataclasses.field(init=False, compare=False, repr=False)
    # Dynamo does not trace a hash of the step itself.
    key: tuple[str, int, int] = dataclasses.field(init=False, compare=False, repr=False)
    joint: bool = dataclasses.field(init=False, compare=False, repr=False)
    recipe: Recipe | None = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        start, stop, fused = self.covers.start, self.covers.stop, self.fused
        joint, recipe = fused and self.operation.has_record, self.recipes[0] if self.recipes and not fused else None
        self.__dict__.update(start=start, stop=stop, key=(self.name, start, stop), joint=joint, recipe=recipe)

    @property
    def located(self) -> dict[str, Any]:
        return {"operation": self.name, "position": self.start, "path": self.nodes[0].path if self.nodes else None}

    @property
    def weighs(self) -> bool:
        """Whether its weights are quantized together with the other weights of its segment, in one launch.

        That is possible where scales are per block, since they need no earlier pass.
        """
        recipe = self.recipe
        return recipe is not None and not recipe.whole_rows and self.operation.forward_signature.weights

    @property
    def saved_class(self) -> type[Saved]:
        """The `Saved` of an unfused operation or of a joint fusion."""
        return self.operation.Saved if self.recipe is None else self.operation.SavedQuantized

    @cached_property
    def members(self) -> tuple[tuple[str, str, int, Node, frozenset[str]], ...]:
        """For each operation: its slot in the fusion, the prefix of its names, position, node and needed gradients."""
        named = [place for place, _ in self.operation.named_operations()] if self.fused else [""]
        prefixes = [f"{place.replace('.', '_')}_" if self.fused else "" for place in named]
        return tuple(zip(named, prefixes, self.covers, self.nodes, self.needs, strict=True))

    @cached_property
    def inference(self) -> bool:
        """Whether its forward returns no saved tensors."""
        told = isinstance(self.operation, ForwardFusion) and self.operation.forward_signature.needs
        return isinstance(self.operation, InferenceFusion) or (told and not any(self.needs))

    @property
    def cast(self) -> torch.dtype | None:
        """The dtype to which its input is cast, if the previous result has another dtype."""
        return self.borders[0].cast if self.borders else None

    @property
    def y_dtype(self) -> torch.dtype | None:
        """The dtype of a following cast that a fusion absorbs into its result."""
        return self.borders[-1].taken if self.borders and self.operation.forward_signature.dtype else None

    @property
    def dy_dtype(self) -> torch.dtype | None:
        """The dtype of dy that its backward requires, if it requires one."""
        return self.borders[-1].given if self.borders and not self.operation.any_dy else None

    @cached_property
    def needed(self) -> frozenset[str]:
        """The needed gradients, by the names that `fwd` and `bwd` use."""
        if not self.fused:
            return self.needs[0]
        names = {f"{place}.{name}" for place, _, _, _, needs in self.members for name in needs if name != "x"}
        return frozenset(names | ({"x"} & self.needs[0]))

    @cached_property
    def reads(self) -> tuple[tuple[str, str], ...]:
        """Keyword of `fwd` and channel, for each extra input."""
        extras = self.operation.forward_signature.extras
        named = [(prefix + n, c) for _, prefix, _, node, _ in self.members for n, c in node.inputs]
        return tuple((n, c) for n, c in named if n in extras)

    @cached_property
    def writes(self) -> tuple[tuple[str, str], ...]:
        """Key in the dictionary of extra outputs and channel, for each of them."""
        named = [(prefix + n, c) for _, prefix, _, node, _ in self.members for n, c in node.outputs]
        return tuple((n, c) for n, c in named if n in self.operation.outputs)

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """The channels that no later step reads."""
        readers = self.nodes[0].readers
        return tuple(c for c in dict.fromkeys(c for _, c in self.reads) if max(readers[c]) < self.stop)

    @cached_property
    def seeds(self) -> tuple[tuple[str, Drawn], ...]:
        """Keyword of `fwd` and index into the seeds of a call, for each seed."""
        signature: Signature = self.operation.forward_signature
        every = tuple(node.seed for node in self.nodes)
        named: list[tuple[str, Drawn]] = []
        if self.fused:
            drawn = [(f"{prefix}seed", node.seed) for _, prefix, _, node, _ in self.members]
            named += [(n, i) for n, i in drawn if n in signature.extras]
        if signature.seed:
            named.append(("seed", next((i for i in every if i is not None), None)))
        if signature.seeds:
            named.append(("seeds", every))
        return tuple(named)

    @cached_property
    def saves(self) -> tuple[Record, ...]:
        """The records that the forward saves: those with a field that a needed gradient reads."""
        if self.inference or not any(self.needs):
            return ()
        return tuple(record for record in self.records if record.kept)

    @property
    def costly(self) -> bool:
        return any(getattr(node.operation, "costly", False) for node in self.nodes)

    @cached_property
    def restored(self) -> tuple[str, ...] | None:
        """The fields that are saved with y so that its record can be rebuilt: all fields except x and parameters.

        `None` if its forward must be recomputed for its record.
        """
        if self.writes or self.joint or self.recipe is not None:
            return None
        needing = [record for record in self.saves if self._operation_of(record).own_record(None) is None]
        if not needing:
            return ()
        if [record.position for record in needing] != [self.start]:
            return None
        kind: type[Any] = self._operation_of(needing[0]).__class__
        if kind.input_record is not UnfusedOperation.input_record:
            return ()
        cls, kept = needing[0].cls, needing[0].kept
        known = not self.fused and "x" in always_saved(cls) and all(kind_of(cls, name) != "tuple" for name in kept)
        return tuple(name for name in kept if name != "x") if known else None

    def _operation_of(self, record: Record) -> Any:
        return self.nodes[record.position - self.start].operation

    def record_of(self, record: Record) -> tuple[Callable[..., Saved] | None, bool]:
        """The function that rebuilds a record without a forward, and whether it needs the seed alone or x as well.

        `None` if the record consists of x and the `restored` fields.
        """
        operation = self._operation_of(record)
        if operation.own_record(None) is not None:
            return operation.own_record, True
        makes = operation.__class__.input_record is not UnfusedOperation.input_record
        return (operation.input_record if makes else None), False

    @cached_property
    def records(self) -> tuple[Record, ...]:
        """The records of its operations, in order; for a joint fusion the record of the fusion."""
        if self.joint:
            own = self.saved_class
            return (Record((), ~self.start, own, own.kept(self.needed)),)
        found: list[Record] = []
        for place, _, position, node, needs in self.members:
            cls: type[Saved] = node.operation.Saved if self.recipe is None else self.saved_class  # pyright: ignore[reportAssignmentType]
            slot, _, number = place.partition(".")
            path = () if not slot else (slot, int(number)) if number else (slot,)
            operation: Any = node.operation
            follows = self.fused and operation.own_record(None) is not None
            made = operation.own_record if follows else None
            found.append(Record(path, position, cls, cls.kept(needs), made, node.seed))
        return tuple(found)

    def by_slot(self, of_records: Sequence[Any]) -> dict[str, Any]:
        """Values of the records, by slot of the fusion; a tuple for a slot of several operations."""
        found: dict[str, Any] = {}
        for record, value in zip(self.records, of_records, strict=True):
            slot, *number = record.path
            found[slot] = (*found.get(slot, ()), value) if number else value
        return found

    @cached_property
    def incoming(self) -> tuple[tuple[str, str], ...]:
        """Keyword of `bwd` and channel, for each gradient of an extra output that can arrive."""
        extras, found, inside = self.operation.backward_signature.extras, list[tuple[str, str]](), set(self.covers)
        for _, prefix, _, node, _ in self.members:
            # A channel that only this fusion reads gets no gradient from outside.
            closed = {c for _, c in node.outputs if self.fused and node.readers[c] and node.readers[c] <= inside}
            found += [(f"d_{prefix}{n}", c) for n, c in node.outputs if c not in closed]
        return tuple((n, c) for n, c in found if n in extras)

    @cached_property
    def grads(self) -> tuple[tuple[str, tuple[int, str]], ...]:
        """Key in the gradients that `bwd` returns and parameter (id of its module, attribute), for each needed one."""
        return tuple([
            ((f"{place}." if self.fused else "") + name, (id(owner), attribute))
            for place, _, _, node, needs in self.members
            for name, (owner, attribute) in node.slots.items()
            if name in needs
        ])  # fmt: skip

    @cached_property
    def channel_grads(self) -> tuple[tuple[str, str], ...]:
        """Key in the gradients that `bwd` returns and channel, for each extra input whose gradient is needed."""
        own = {c for node in self.nodes for _, c in node.outputs} if self.fused else set[str]()
        return tuple(
            ((f"{place}." if self.fused else "") + name, channel)
            for place, _, _, node, needs in self.members
            for name, channel in node.inputs
            if name in needs and channel not in own
        )

    @property
    def zeros(self) -> bool:
        """Whether its backward needs a tensor dy, so that a missing one becomes zeros."""
        return not getattr(self.operation, "dy_may_be_none", False)

    @cached_property
    def repeatable(self) -> bool:
        """Whether it may run twice: it has no collective and writes no KV cache."""
        return all(getattr(node.operation, "repeatable", True) for node in self.nodes)

    def constants(self, env: Env, backward: bool = False) -> dict[str, Any]:
        """Keyword arguments of a pass that are the same in every call."""
        signature = self.operation.backward_signature if backward else self.operation.forward_signature
        fixed: dict[str, Any] = {}
        if signature.extras:
            places = [] if self.joint or not backward else [place.partition(".")[0] for place, *_ in self.members]
            given = {*places, *dict(self.incoming if backward else (*self.reads, *self.seeds))}
            # The arguments of an empty optional slot are None.
            fixed = dict.fromkeys([n for n in signature.extras if n not in signature.optional | given])
        if signature.needs:
            fixed["needs"] = self.needed
        if signature.env:
            fixed["env"] = env.between(along_of(self.borders, self.operation.forward_signature.dtype))
        if self.recipe is not None:
            fixed["recipe"] = self.recipe
        if signature.dtype:
            fixed["dtype"] = None if not self.borders else self.borders[0 if backward else -1].taken
        if self.to is not None:
            fixed["to"] = self.to
        return fixed

    def call(
        self, env: Env, x: Tensor, channels: Mapping[str, Tensor], seeds: Tensor | None
    ) -> tuple[Tensor, Mapping[str, Tensor], Any]:
        """Runs its forward; returns y, extra outputs and saved tensors."""
        layout: Layout = self.operation.layout
        given = self.constants(env)
        given |= {name: fit(channels[channel], layout) for name, channel in self.reads}
        given |= {name: _drawn(seeds, index) for name, index in self.seeds}
        x = fit(recast(x, self.cast), layout)
        return self.returned(self.operation.fwd(x, **given))

    def returned(self, out: Any) -> tuple[Tensor, Mapping[str, Tensor], Any]:
        """Split the result of its forward into y, extra outputs and saved tensors."""
        none: dict[str, Any] = {}
        results = iter(out) if self.operation.outputs or not self.inference else iter((out,))
        y = next(results)
        made = next(results) if self.operation.outputs else none
        return y, made, none if self.inference else next(results)

    def unfused(self, backward: bool = False) -> tuple[Step, ...]:
        """The steps of its unfused operations, in the order in which they run."""
        each = zip(self.nodes, self.covers, self.needs, strict=True)
        around = [(self.borders[i : i + 2], self.recipes[i : i + 1]) for i in range(len(self.nodes))]
        parts = [
            Step(n.operation, range(p, p + 1), n.name, False, (n,), (needs,), *beside)
            for (n, p, needs), beside in zip(each, around, strict=True)
        ]
        return tuple(s for s in reversed(parts) if s.needs[0]) if backward else tuple(parts)

    def by_operations(
        self, env: Env, x: Tensor, channels: dict[str, Tensor], seeds: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor], list[Saved]]:
        """Runs the forwards of its unfused operations instead: y, extra outputs and the records, in order."""
        outputs, records = dict[str, Tensor](), list[Saved]()
        for (_, prefix, *_), one in zip(self.members, self.unfused(), strict=True):
            x, made, saved = one.call(env, x, channels, seeds)
            records.append(saved)
            channels.update((c, made[n]) for n, c in one.writes)
            outputs.update((prefix + n, made[n]) for n, _ in one.writes)
        return recast(x, self.y_dtype), outputs, records


def ending(forward: Sequence[Step]) -> int:
    """The index from which no step has to be recomputed for the records of all steps."""
    for i, step in reversed([*enumerate(forward)]):
        if step.restored != ():
            return i + 1
        if any(not step.record_of(record)[1] for record in step.saves):
            return i
    return 0


def _drawn(seeds: Tensor | None, index: Drawn) -> Any:
    """The seed at an index, or `None`; a tuple of them for a tuple."""
    if isinstance(index, tuple):
        return tuple(_drawn(seeds, i) for i in index)
    return None if index is None or seeds is None else seeds[index]


def fit(x: Tensor, layout: Layout) -> Tensor:
    """A tensor in the layout that a pass accepts."""
    if layout == "any":
        return x
    if layout == "inner_contig" and x.dim() and (x.stride(-1) == 1 or x.shape[-1] == 1) and 0 not in x.stride():
        return x
    return x.contiguous()


def _requires_grad(owner: nn.Module, attribute: str) -> bool:
    return any(t.requires_grad for t in held(owner, attribute))


@dataclasses.dataclass(frozen=True, slots=True)
class Wants:
    """The gradients that are needed in a region: names at each position, and the first position with any."""

    live_from: int
    needs: Mapping[int, frozenset[str]]

    @classmethod
    def of(
        cls,
        nodes: Sequence[Node],
        start: int,
        stop: int,
        x: bool,
        channels: Mapping[str, bool],
        grad: bool,
        requires: Callable[[nn.Module, str], bool] = _requires_grad,
    ) -> Wants:
        """Follow requires_grad through positions `start..stop`."""
        needs: dict[int, frozenset[str]] = {}
        carries = dict(channels)
        live_from = stop
        for position in range(start, stop):
            node = nodes[position]
            wanted = ["x"] * x
            wanted += [name for name, channel in node.inputs if carries.get(channel)]
            wanted += [name for name, slot in node.slots.items() if requires(*slot)]
            wanted = wanted if grad else []
            needs[position] = frozenset(wanted)
            x = bool(wanted)
            if wanted and live_from == stop:
                live_from = position
            whole = getattr(type(node.operation), "integers", ())
            carries.update((channel, x and name not in whole) for name, channel in node.outputs)
        return cls(live_from, needs)


@dataclasses.dataclass(frozen=True, eq=False)
class Stretch:
    """Operations between barriers, and facts of their inputs.

    Attributes:
        nodes: the whole sequence; `positions` are those of the stretch.
        shapes: shape of the input of each position, and of the last result; `None` if they are unknown.
        borders: the dtypes there; empty where all tensors have one.
        x: the input, or a tensor like it, as in `channels`; `None` if it is unknown.
        place: the device on which its steps can be tried.
        unknown: why the input is unknown.
    """

    nodes: Sequence[Node]
    positions: range
    env: Env
    wants: Wants
    shapes: Sequence[tuple[int, ...]] | None
    borders: tuple[Border, ...]
    x: Tensor | None
    channels: Mapping[str, Tensor]
    place: torch.device
    fusing: Fusing = dataclasses.field(default_factory=fusing_now)
    unknown: str | None = None

    @classmethod
    def of(
        cls,
        nodes: Sequence[Node],
        positions: range,
        x: Tensor,
        channels: Mapping[str, Tensor],
        parameters: Sequence[Tensor],
        env: Env,
    ) -> Stretch:
        required = {c: t.requires_grad for c, t in channels.items()}
        wants = Wants.of(nodes, positions.start, positions.stop, x.requires_grad, required, env.grad)
        shapes = validate(nodes, positions, x.shape, channels)
        borders = borders_of(nodes, positions, x, channels, parameters, env)
        return cls(nodes, positions, env, wants, shapes, borders, x, channels, x.device)

    @property
    def start(self) -> int:
        return self.positions.start

    @cached_property
    def recipes(self) -> Mapping[int, Recipe | Unquantized]:
        """By position the recipe of an operation, or why it is not quantized."""
        known = [border.taken for border in self.borders] or [self.env.dtype] * len(self.positions)
        each = [(p, recipe_at(self.nodes, p, dtype, self.env)) for p, dtype in zip(self.positions, known, strict=False)]
        return {position: found for position, found in each if found is not None}

    @property
    def inside(self) -> Sequence[Node]:
        return self.nodes[self.start : self.positions.stop]

    def around(self, a: int, b: int) -> tuple[Border, ...]:
        start = self.positions.start
        return self.borders[a - start : b - start + 1]

    def step(self, a: int, b: int, fusion: FusedOperation | None = None) -> Step:
        """The step at positions `a..b` of a schedule: a fusion, or the operation there."""
        node, covers = self.nodes[a], range(a, b)
        operation, name = (node.operation, node.name) if fusion is None else (fusion, type(fusion).__name__)
        nodes, needs = tuple(self.nodes[a:b]), tuple([self.wants.needs[p] for p in covers])
        found = [self.recipes.get(p) for p in covers] if self.recipes else ()
        recipes = tuple([one if isinstance(one, Recipe) else None for one in found]) if any(found) else ()
        return Step(operation, covers, name, fusion is not None, nodes, needs, self.around(a, b), recipes)

    def absorbed(self, fusion: FusedOperation, a: int, b: int) -> Iterator[Quantize]:
        """How the kernels of a fusion at positions `a..b` can quantize their results for the operations around it."""
        around, env = self.around(a, b), self.env
        behind, before = (around[-1], around[0]) if around else (None, None)
        casts = fusion.forward_signature.dtype
        if fusion.forward_signature.to and b < self.positions.stop and (not behind or behind.cast is None or casts):
            yield from self._asked(fusion, b, "x", behind.taken if behind else env.dtype)
        if fusion.backward_signature.to and a > self.start and (not before or before.cast is None):
            yield from self._asked(fusion, a - 1, "dy", before.taken if before else env.dtype)

    def _asked(self, fusion: FusedOperation, at: int, role: Role, dtype: torch.dtype | None) -> Iterator[Quantize]:
        recipe, operation, env = self.recipes.get(at), self.nodes[at].operation, self.env
        wants = getattr(operation, "wants_quantized", None)
        if not isinstance(recipe, Recipe) or wants is None or not is_local(recipe):
            return
        # Instructions for e4m3 begin with sm_89. Other GPUs than sm_90 have no GEMMs for blocks of 128, and on some of
        # them such tiles do not fit in registers.
        number = capability(env.arch)
        known = number == 90 or (number >= 89 and recipe.block(role, "rows")[1] != COLUMNS)
        if not env.triton or dtype not in (torch.bfloat16, torch.float16) or not (env.device == "cpu" or known):
            return
        needs = self.wants.needs[at]
        rows, columns = wants(role, recipe, needs)
        to = Quantize(at, operation, recipe, role, rows, columns, record=role == "dy" or bool(needs))
        if (rows or columns) and fusion.can_quantize(to, env):
            yield to
