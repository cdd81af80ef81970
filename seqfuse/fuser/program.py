"""Binds a plan to its operations: the calls of each segment, with everything decided that a call does not change."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..autograd import Asked
from ..env import Env
from ..fusion import FusedOperation, InferenceFusion, JointFusion
from ..operation import FusableOperation, UnfusedOperation, configured
from ..saved import Saved
from ..signature import Signature
from .check import Like, check_backward, check_form, check_forward
from .listing import Listing
from .plan import Plan, Step, Wants
from .segment import Back, Call, Drawn, Pack, Segment

Index = Mapping[tuple[int, str], int]
Needs = Mapping[int, frozenset[str]]


class Binder:
    """Makes the segments of one planned region."""

    def __init__(
        self,
        listing: Listing,
        wants: Wants,
        env: Env,
        dtypes: Sequence[torch.dtype | None] | None,
        can_fall_back: bool,
        parameters: Mapping[tuple[int, str], Like],
        entering: Mapping[int, Like],
        dtypes_now: Callable[[], Sequence[torch.dtype | None]],
        clearer: Callable[[range, BaseException, Any], BaseException],
        note: Callable[[], Callable[[str, int, str], None] | None],
    ) -> None:
        self.items, self.random, self.wants, self.env = listing.items, listing.random, wants, env
        self.configured = listing.configured
        self.dtypes, self.can_fall_back, self.clearer, self.note = dtypes, can_fall_back, clearer, note
        self.parameters, self.entering, self.dtypes_now = parameters, entering, dtypes_now

    def segments(self, plan: Plan) -> list[Segment]:
        """The segments of a plan, ready to run."""
        whole = hash(tuple((s.name, s.covers) for s in (*plan.forward, *plan.backward)))
        ahead, back = ({s.covers.start: s for s in steps} for steps in (plan.forward, plan.backward))
        segments: list[Segment] = []
        for piece in plan.segments:
            steps = [[one[p] for p in piece if p in one] for one in (ahead, back)]
            segments.append(self._segment(piece, steps[0], steps[1], hash((whole, piece))))
        return segments

    def _segment(self, piece: range, ahead: Sequence[Step], back: Sequence[Step], signature: int) -> Segment:
        inside = self.items[piece.start : piece.stop]
        made = {c for item in inside for _, c in item.outputs}
        readers = self.items[piece.start].readers
        inputs = tuple(dict.fromkeys(c for item in inside for _, c in item.inputs if c not in made))
        outputs = tuple(
            c for item in inside for _, c in item.outputs if not readers[c] or max(readers[c]) >= piece.stop
        )
        parameters: dict[tuple[int, str], tuple[nn.Module, str]] = {}
        for position in piece:
            for name, (owner, attribute) in self.items[position].slots.items():
                if name in self.wants.needs[position]:
                    parameters.setdefault((id(owner), attribute), (owner, attribute))
        index = {key: i for i, key in enumerate(parameters)}
        wanted = (
            index[id(owner), attribute]
            for position in piece
            for name, (owner, attribute) in self.items[position].slots.items()
            if name in self.wants.needs[position]
        )
        shared = frozenset(i for i, count in Counter(wanted).items() if count > 1)

        def backward(asked: Asked | None) -> tuple[Back, ...]:
            needs = self.wants.needs if asked is None else self._asked(piece, index, asked)
            steps = (s for s in reversed(back) if any(needs[p] for p in s.covers))
            return tuple(self._back(s, index, needs, shared) for s in steps)

        live = self.wants.live_from < piece.stop
        for position in piece if live else ():
            if position not in self.configured:
                self.configured[position] = configured(self.items[position].operation)  # pyright: ignore[reportArgumentType]
        joint = {s.covers.start for s in back if isinstance(s.operation, JointFusion)}
        return Segment(
            forward_calls=tuple(self._call(s, piece.stop, s.covers.start in joint) for s in ahead),
            backward_calls=backward,
            parameters=tuple(parameters.values()),
            inputs=inputs,
            outputs=outputs,
            crossing=frozenset(c for c in outputs if readers[c]),
            followed=piece.stop < len(self.items) and isinstance(self.items[piece.stop].operation, FusableOperation),
            frozen=frozenset(c for p in piece if p < self.wants.live_from for _, c in self.items[p].outputs),
            consumed=tuple(c for c in inputs if max(readers[c]) < piece.stop),
            device=self.env.device,
            autocast=self.env.autocast,
            signature=signature,
            can_fall_back=self.can_fall_back,
            live=live,
            clearer=self.clearer,
            note=self.note,
        )

    def _asked(self, piece: range, index: Index, asked: Asked) -> Needs:
        """What is wanted of each position where the gradients of these parameters, x and channels are."""
        parameters, x, channels = asked
        needs: dict[int, frozenset[str]] = {}
        carries = dict.fromkeys(channels, True)
        for position in piece:
            item = self.items[position]
            wanted = {"x"} if x else set[str]()
            wanted |= {name for name, channel in item.inputs if carries.get(channel)}
            wanted |= {
                n for n, (owner, attribute) in item.slots.items() if index.get((id(owner), attribute)) in parameters
            }
            needs[position] = self.wants.needs[position] & wanted
            x = bool(needs[position])
            carries.update((channel, x) for _, channel in item.outputs)
        return needs

    def _bind(
        self, fn: Callable[..., Any], signature: Signature, needs: frozenset[str], given: Iterable[str]
    ) -> Callable[..., Any]:
        # What an absent optional slot would have given is passed as None.
        fixed: dict[str, Any] = dict.fromkeys(set(signature.extras) - signature.optional - set(given))
        if signature.needs:
            fixed["needs"] = needs
        if signature.env:
            fixed["env"] = self.env
        return functools.partial(fn, **fixed) if fixed else fn

    def _call(self, step: Step, stop: int, joint: bool = False) -> Call:
        operation, (a, b) = step.operation, (step.covers.start, step.covers.stop)
        signature: Signature = operation.forward_signature
        fused, kind = isinstance(operation, FusedOperation), _kind(operation)
        places = dict(self._places(operation, a))
        inputs: list[tuple[str, str]] = []
        seeds: list[tuple[str, Drawn]] = []
        for place, position in places.items():
            prefix = f"{place.replace('.', '_')}_" if fused else ""
            inputs += [(prefix + n, c) for n, c in self.items[position].inputs if prefix + n in signature.extras]
            if fused and f"{prefix}seed" in signature.extras:
                seeds.append((f"{prefix}seed", self.random.get(position)))
        if signature.seed:
            active = [self.random[p] for p in range(a, b) if p in self.random]
            seeds.append(("seed", active[0] if active else None))
        if signature.seeds:
            seeds.append(("seeds", tuple(self.random.get(p) for p in range(a, b))))
        readers = self.items[a].readers
        outputs = [
            ((f"{place.replace('.', '_')}_{name}" if fused else name), channel)
            for place, position in places.items()
            for name, channel in self.items[position].outputs
        ]
        outputs = [(n, c) for n, c in outputs if n in operation.outputs]
        ended = {c for p in range(a, b) for _, c in self.items[p].inputs if a <= max(readers[c]) < b}
        saves = kind != "inference" and (kind != "joint" or joint)
        packs: list[Pack] = []
        for place, position in places.items() if saves and not joint else ():
            record: type[Saved] = self.items[position].operation.Saved  # pyright: ignore[reportAssignmentType]
            if kept := record.kept(self.wants.needs[position]):
                packs.append((self._record_place(place) if fused else (), position, record, kept))
        needs = self._needs(operation, a, b, self.wants.needs)
        if joint:
            packs.append(((), ~a, operation.Saved, operation.Saved.kept(needs)))
        given = [name for name, _ in (*inputs, *seeds)]
        return Call(
            fn=self._bind(operation.fwd, signature, needs, given),
            kind=kind,
            name=step.name,
            start=a,
            stop=b,
            layout=operation.layout,
            inputs=tuple(inputs),
            seeds=tuple(seeds),
            outputs=tuple(outputs),
            declares=bool(operation.outputs),
            done=tuple(c for c in dict.fromkeys([c for _, c in inputs]) if c in ended),
            packs=tuple(packs),
            zeros=not getattr(operation, "dy_may_be_none", False),
            check=functools.partial(check_forward if fused else check_form, self, step),
            together=self._together(a, b),
            unfused=functools.cache(lambda: tuple(self._call(s, stop) for s in self._parts(a, b))) if fused else None,
        )

    def _back(self, step: Step, index: Index, needs: Needs, shared: frozenset[int]) -> Back:
        operation, (a, b) = self._as_forward(step), (step.covers.start, step.covers.stop)
        signature: Signature = operation.backward_signature
        fused, kind = isinstance(operation, FusedOperation), _kind(operation, backward=True)
        inside = {c for p in range(a, b) for _, c in self.items[p].outputs}
        records: list[Any] = []
        grads: list[tuple[str, int]] = []
        channel_grads: list[tuple[str, str]] = []
        incoming: list[tuple[str, str]] = []
        for place, position in self._places(operation, a):
            item = self.items[position]
            key, under = (f"{place}.", f"{place.replace('.', '_')}_") if fused else ("", "")
            slot, _, number = place.partition(".")
            own: type[Saved] = item.operation.Saved  # pyright: ignore[reportAssignmentType]
            records.append((slot, position, int(number) if number else None, own, own.kept(self.wants.needs[position])))
            for name, (owner, attribute) in item.slots.items():
                if name in needs[position]:
                    grads.append((key + name, index[id(owner), attribute]))
            owned = inside if fused else set[str]()
            channel_grads += [(key + n, c) for n, c in item.inputs if n in needs[position] and c not in owned]
            wanted = [(f"d_{under}{n}", c) for n, c in item.outputs]
            # What nobody outside reads has no gradient from outside.
            ends = {c for _, c in item.outputs if fused and item.readers[c] and item.readers[c] <= set(range(a, b))}
            incoming += [(n, c) for n, c in wanted if n in signature.extras and c not in ends]
        named = [name for name, _ in incoming] + ([r[0] for r in records] if kind == "backward" else [])
        if kind == "joint":
            kept = operation.Saved.kept(self._needs(operation, a, b, self.wants.needs))
            records = [("saved", ~a, None, operation.Saved, kept)]

        def unfused() -> tuple[Back, ...]:
            parts = (s for s in reversed(self._parts(a, b)) if needs[s.covers.start])
            return tuple(self._back(s, index, needs, shared) for s in parts)

        return Back(
            fn=self._bind(operation.bwd, signature, self._needs(operation, a, b, needs), named),
            kind=kind,
            name=step.name,
            start=a,
            stop=b,
            layout=operation.layout,
            records=tuple(records),
            incoming=tuple(incoming),
            grads=tuple(grads),
            channel_grads=tuple(channel_grads),
            shared=shared,
            dtype=None if self.dtypes is None else self.dtypes[a],
            adds=signature.main_grads,
            zeros=not getattr(operation, "dy_may_be_none", False),
            check=functools.partial(check_backward, self, step, needs),
            together=self._together(a, b),
            unfused=functools.cache(unfused) if fused else None,
            recover=functools.partial(self._recover, operation, a) if hasattr(operation, "unfused") else None,
        )

    def _as_forward(self, step: Step) -> Any:
        """The operation of a step with the configuration that its forward ran with."""
        if not isinstance(step.operation, FusedOperation):
            return self.configured[step.covers.start]
        own = [self.configured[position] for position in step.covers]
        return step.operation.with_operations(own)

    def _together(self, a: int, b: int) -> bool:
        operations: list[Any] = [item.operation for item in self.items[a:b]]
        return any(operation.meeting is not None for operation in operations)

    def _parts(self, a: int, b: int) -> tuple[Step, ...]:
        return tuple(Step(self.items[p].operation, range(p, p + 1), self.items[p].name) for p in range(a, b))

    def _recover(self, operation: Any, a: int, record: Any) -> dict[int, Any]:
        """What `unfused(saved)` gives, as the records of the operations themselves."""
        saved, packed = operation.unfused(record), dict[int, Any]()
        for place, position in self._places(operation, a):
            one: Any = saved
            for key in self._record_place(place):
                one = one[key]
            own: type[Saved] = self.items[position].operation.Saved  # pyright: ignore[reportAssignmentType]
            if type(one) is not own:
                raise TypeError(f"slot {place!r} needs a {own.__qualname__}, not a {type(one).__qualname__}")
            packed[position] = one
        return packed

    def _needs(self, operation: Any, a: int, b: int, needs: Needs) -> frozenset[str]:
        if not isinstance(operation, FusedOperation):
            return needs[a]
        wanted = {"x"} & needs[a]
        for place, position in self._places(operation, a):
            wanted |= {f"{place}.{name}" for name in needs[position] if name != "x"}
        return frozenset(wanted)

    def _places(self, operation: Any, a: int) -> list[tuple[str, int]]:
        if not isinstance(operation, FusedOperation):
            return [("", a)]
        return [(place, a + i) for i, (place, _) in enumerate(operation.named_operations())]

    @staticmethod
    def _record_place(place: str) -> tuple[Any, ...]:
        slot, _, number = place.partition(".")
        return (slot, int(number)) if number else (slot,)


def _kind(operation: Any, backward: bool = False) -> Any:
    if isinstance(operation, UnfusedOperation):
        return "unfused"
    if isinstance(operation, JointFusion):
        return "joint"
    if isinstance(operation, InferenceFusion):
        return "inference"
    return "backward" if backward else "forward"
