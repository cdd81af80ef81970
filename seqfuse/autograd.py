"""The one autograd function, and the segment of a plan it runs."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .errors import FallbackWarning, InputError, KernelError, PluginError, SeqfuseError, StateError
from .operation import Layout
from .saved import Pack, Unpack

Kind = Literal["unfused", "forward", "joint", "inference", "backward"]


@dataclasses.dataclass(slots=True, eq=False)
class Call:
    """One forward step, bound: everything that does not change from call to call is decided here."""

    fn: Callable[..., Any]
    kind: Kind
    name: str
    start: int
    stop: int
    layout: Layout = "any"
    inputs: tuple[tuple[str, str], ...] = ()  # keyword, channel
    seeds: tuple[tuple[str, int | None], ...] = ()  # keyword, index into the seed vector
    outputs: tuple[tuple[str, str], ...] = ()  # name in the returned dictionary, channel
    done: tuple[str, ...] = ()  # channels whose last reader this is
    packs: tuple[tuple[str | tuple[str, int] | None, int, Pack, Unpack], ...] = ()  # place among the records, position
    plain: bool = True
    check: Callable[..., bool] | None = None  # contract check, dropped once it has passed
    unfused: Callable[[], tuple[Call, ...]] | None = None


@dataclasses.dataclass(slots=True, eq=False)
class Back:
    """One backward step, bound."""

    fn: Callable[..., Any]
    kind: Kind
    name: str
    start: int
    stop: int
    layout: Layout = "any"
    records: tuple[tuple[str, int, int | None], ...] = ()  # keyword, position, place in a variadic slot
    incoming: tuple[tuple[str, str], ...] = ()  # keyword of an output's gradient, channel
    grads: tuple[tuple[str, int], ...] = ()  # key, index into the segment's parameters
    channel_grads: tuple[tuple[str, str], ...] = ()  # key, channel
    dtype: torch.dtype | None = None  # of the gradient it hands on, where that can differ
    plain: bool = True
    check: Callable[..., bool] | None = None
    unfused: Callable[[], tuple[Back, ...]] | None = None
    recover: Callable[[Any], Any] | None = None  # a joint fusion's record as the records of its operations


@dataclasses.dataclass(slots=True, eq=False)
class Segment:
    """A run of steps behind one autograd node."""

    start: int
    stop: int
    forward_calls: tuple[Call, ...]
    backward_calls: tuple[Back, ...]
    parameters: tuple[tuple[nn.Module, str], ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    consumed: tuple[str, ...]  # inputs that nobody after this segment reads
    device: str
    autocast: torch.dtype | None
    signature: tuple[Any, ...]
    can_fall_back: bool
    live: bool
    locate: Callable[[int, BaseException, Any], BaseException]
    warned: set[tuple[str, str]] = dataclasses.field(default_factory=lambda: set[tuple[str, str]]())

    def run(self, x: Tensor, channels: dict[str, Tensor], seeds: Tensor | None, keep: _Keep | None) -> Tensor:
        """Run the forward steps; `channels` gains what they emit and loses what nobody reads any more."""
        for call in self.forward_calls:
            x = self._step(call, x, channels, seeds, keep)
        return x

    def _step(self, call: Call, x: Tensor, channels: dict[str, Tensor], seeds: Tensor | None, keep: _Keep | None) -> Tensor:
        if call.layout != "any":
            x = _fit(x, call.layout)
        try:
            out = call.fn(x) if call.plain else call.fn(x, **_keywords(call, channels, seeds))
            if call.check is not None and call.check(call, x, out, {k: channels[c] for k, c in call.inputs}, seeds):
                call.check = None
        except Exception as error:
            if call.unfused is None:
                raise self.locate(call.start, error, x) from error.__cause__
            return self._fall_back(call, error, x, channels, seeds, keep)
        if call.kind == "inference":
            y, extra, saved = out, None, None
        elif call.outputs:
            y, extra, saved = out
        else:
            (y, saved), extra = out, None
        for channel in call.done:
            del channels[channel]
        if extra is not None:
            for name, channel in call.outputs:
                channels[channel] = extra[name]
        if keep is not None:
            for place, position, pack, unpack in call.packs:
                record = saved if place is None else saved[place] if place.__class__ is str else saved[place[0]][place[1]]
                keep.packed[position] = unpack, pack(record, keep.memo, keep.tensors)
        return y

    def _fall_back(
        self, call: Call, error: Exception, x: Tensor, channels: dict[str, Tensor], seeds: Tensor | None, keep: _Keep | None
    ) -> Tensor:
        assert call.unfused is not None
        self._may_fall_back(call, error)
        for part in call.unfused():
            x = self._step(part, x, channels, seeds, keep)
        return x

    def _may_fall_back(self, step: Call | Back, error: Exception) -> None:
        """Warn and return if the unfused operations may run in place of a failed fusion; else raise."""
        if isinstance(error, SeqfuseError) and not isinstance(error, InputError):
            error.operation, error.position = error.operation or step.name, step.start
            raise error
        where: dict[str, Any] = {"operation": step.name, "position": step.start}
        if isinstance(error, TypeError) and _RECORD_CALL.search(str(error)):
            raise PluginError(f"fwd built a wrong record: {error}", code="SF302", **where) from error
        if isinstance(error, torch.AcceleratorError):
            message = f"the device reported {error}; its state is lost and nothing can run after it"
            raise KernelError(message, code="SF401", hint="rerun under compute-sanitizer", **where) from error
        if not self.can_fall_back or torch.compiler.is_compiling() or _capturing(self.device):
            raise KernelError(f"{type(error).__name__}: {error}", code="SF401", **where) from error
        reason = step.name, f"{type(error).__name__}: {error}"
        if reason not in self.warned:
            self.warned.add(reason)
            message = f"{step.name} at position {step.start} failed ({reason[1]}); its operations ran unfused"
            warnings.warn(message, FallbackWarning, stacklevel=2)

    def run_backward(
        self, dy: Tensor, dchannels: dict[str, Tensor | None], packed: dict[int, tuple[Unpack, Any]], tensors: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Run the backward steps: the gradient of x, and those of the parameters in order; `dchannels` is updated."""
        dparams: list[Tensor | None] = [None] * len(self.parameters)
        d: Tensor | None = dy
        for back in self.backward_calls:
            d = self._step_back(back, d, dchannels, packed, tensors, dparams)
        return d, dparams

    def _step_back(
        self,
        back: Back,
        d: Any,
        dchannels: dict[str, Tensor | None],
        packed: dict[int, Any],
        tensors: tuple[Tensor, ...],
        dparams: list[Tensor | None],
    ) -> Tensor | None:
        if back.layout != "any":
            d = _fit(d, back.layout)
        if back.kind == "joint" and ~back.start not in packed:
            return self._unfused_back(back, d, dchannels, packed, tensors, dparams)
        try:
            if back.kind == "unfused":
                unpack, tokens = packed[back.start]
                record = unpack(tokens, tensors)
                dx, grads = back.fn(d, record) if back.plain else back.fn(d, record, **_incoming(back, dchannels))
            elif back.kind == "joint":
                unpack, tokens = packed[~back.start]
                record = unpack(tokens, tensors)
                dx, grads = back.fn(d, record, **_incoming(back, dchannels))
            else:
                record = None
                dx, grads = back.fn(d, **_records(back, packed, tensors), **_incoming(back, dchannels))
            if back.check is not None and back.check(back, d, dx, grads):
                back.check = None
        except Exception as error:
            if back.unfused is None:
                raise self.locate(back.start, error, d) from error.__cause__
            if back.kind == "joint":
                if back.recover is None:
                    message = f"the backward of a joint fusion failed: {type(error).__name__}: {error}"
                    hint = "define unfused(saved) -> {slot: Saved} to let it fall back"
                    raise KernelError(message, code="SF401", operation=back.name, position=back.start, hint=hint) from error
                packed = {**packed, **back.recover(record)}
            self._may_fall_back(back, error)
            return self._unfused_back(back, d, dchannels, packed, tensors, dparams)
        for key, i in back.grads:
            g = grads.get(key)
            if g is not None:
                known = dparams[i]
                dparams[i] = g if known is None else known + g
        for _, channel in back.incoming:
            dchannels.pop(channel, None)
        for key, channel in back.channel_grads:
            g = grads.get(key)
            if g is not None:
                known = dchannels.get(channel)
                dchannels[channel] = g if known is None else known + g
        return dx if back.dtype is None or dx is None or dx.dtype is back.dtype else dx.to(back.dtype)

    def _unfused_back(
        self,
        back: Back,
        d: Tensor | None,
        dchannels: dict[str, Tensor | None],
        packed: dict[int, Any],
        tensors: tuple[Tensor, ...],
        dparams: list[Tensor | None],
    ) -> Tensor | None:
        assert back.unfused is not None
        # A fallback must leave the running sums alone until every part has succeeded: no gradient counts twice.
        sums, sides = list(dparams), dict(dchannels)
        for part in back.unfused():
            d = self._step_back(part, d, sides, packed, tensors, sums)
        dparams[:] = sums
        dchannels.clear()
        dchannels.update(sides)
        return d


@dataclasses.dataclass(slots=True)
class _Keep:
    memo: dict[int, int]
    tensors: list[Tensor]
    packed: dict[int, tuple[Unpack, Any]]


def _keywords(call: Call, channels: dict[str, Tensor], seeds: Tensor | None) -> dict[str, Any]:
    keywords: dict[str, Any] = {keyword: channels[channel] for keyword, channel in call.inputs}
    for keyword, index in call.seeds:
        keywords[keyword] = None if index is None or seeds is None else seeds[index]
    return keywords


def _incoming(back: Back, dchannels: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {keyword: dchannels.get(channel) for keyword, channel in back.incoming}


def _records(back: Back, packed: dict[int, Any], tensors: tuple[Tensor, ...]) -> dict[str, Any]:
    records: dict[str, Any] = {}
    for slot, position, place in back.records:
        unpack, tokens = packed[position]
        record = unpack(tokens, tensors)
        records[slot] = record if place is None else (*records.get(slot, ()), record)
    return records


def _fit(x: Tensor, layout: Layout) -> Tensor:
    if layout == "inner_contig" and x.dim() and (x.stride(-1) == 1 or x.shape[-1] == 1) and 0 not in x.stride():
        return x
    return x.contiguous()


def _capturing(device: str) -> bool:
    return device == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


_RECORD_CALL = re.compile(r"Saved\w*\.__init__\(\)")


class _Local(threading.local):
    ran: list[tuple[Any, ...]] | None = None


_local = _Local()


class SeqfuseBackward(torch.autograd.Function):
    """Runs one segment; the node's name in graphs and profiles."""

    @staticmethod
    def forward(ctx: Any, segment: Segment, seeds: Tensor | None, x: Tensor, *tensors: Tensor) -> Any:
        if _local.ran is not None:
            _local.ran.append(segment.signature)
        keep = _Keep({}, [], {})
        inputs = segment.inputs
        channels = dict(zip(inputs, tensors, strict=False)) if inputs else {}
        y = segment.run(x, channels, seeds, keep)
        ctx.save_for_backward(*keep.tensors)
        ctx.segment, ctx.packed = segment, keep.packed
        if not segment.outputs:
            return y
        outputs = [y]
        for name in segment.outputs:
            value = channels[name]
            outputs.append(value.view_as(value) if any(value is o for o in outputs) else value)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *douts: Any) -> Any:
        segment: Segment = ctx.segment
        if torch.is_grad_enabled():
            with torch.no_grad():
                grads = SeqfuseBackward.backward(ctx, *douts)
            return _Once.guard(grads)
        tensors = _saved_tensors(ctx, segment)
        dchannels: dict[str, Tensor | None] = dict(zip(segment.outputs, douts[1:], strict=True))
        with _autocast_as(segment):
            dx, dparams = segment.run_backward(douts[0], dchannels, ctx.packed, tensors)
        return (None, None, dx, *[dchannels.get(c) for c in segment.inputs], *dparams)


def _saved_tensors(ctx: Any, segment: Segment) -> tuple[Tensor, ...]:
    # Reading saved tensors may recompute a checkpointed forward: it must run the plan this node was made by.
    outer, _local.ran = _local.ran, []
    try:
        tensors = ctx.saved_tensors
    except Exception as error:
        if _local.ran and segment.signature not in _local.ran:
            raise _replanned() from error
        raise
    else:
        if _local.ran and segment.signature not in _local.ran:
            raise _replanned()
        return tensors
    finally:
        _local.ran = outer


def _replanned() -> StateError:
    message = "a checkpointed forward was recomputed under another plan than the one it ran under"
    return StateError(message, code="SF503", hint="do not change fusions, modes or hooks between forward and backward")


def _autocast_as(segment: Segment) -> contextlib.AbstractContextManager[Any]:
    device, wanted = segment.device, segment.autocast
    if not torch.amp.is_autocast_available(device):
        return _nothing
    active = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    if active is wanted:
        return _nothing
    return torch.autocast(device, wanted or torch.get_autocast_dtype(device), enabled=wanted is not None)


_nothing = contextlib.nullcontext()


class _Once(torch.autograd.Function):
    """Passes first gradients through; differentiating them again is an error."""

    @staticmethod
    def guard(grads: Sequence[Any]) -> tuple[Any, ...]:
        """Wrap the tensors among `grads`, so that differentiating them says what is not supported."""
        present = [g for g in grads if g is not None]
        marker = torch.zeros((), requires_grad=True)
        guarded = iter(_Once.apply(marker, *present)) if present else iter(())  # type: ignore[arg-type]
        return tuple(None if g is None else next(guarded) for g in grads)

    @staticmethod
    def forward(ctx: Any, marker: Tensor, *grads: Tensor) -> Any:
        return tuple(g.view_as(g) for g in grads)

    @staticmethod
    def backward(ctx: Any, *douts: Any) -> Any:
        message = "double backward is not supported"
        hint = "differentiate under torch.func, or run the operations' reference"
        raise StateError(message, code="SF501", hint=hint)


def apply(
    segment: Segment,
    x: Tensor,
    channels: dict[str, Tensor],
    seeds: Tensor | None,
    parameters: Iterable[Tensor],
) -> Tensor:
    """Run a segment behind one autograd node, or plainly where nothing in it wants a gradient."""
    if not segment.live:
        with torch.no_grad():
            return segment.run(x, channels, seeds, None)
    if not segment.inputs and not segment.outputs:
        return SeqfuseBackward.apply(segment, seeds, x, *parameters)  # type: ignore[no-untyped-call]
    inputs = [channels[name] for name in segment.inputs]
    out: Any = SeqfuseBackward.apply(segment, seeds, x, *inputs, *parameters)  # type: ignore[no-untyped-call]
    if not segment.outputs:
        y = out
    else:
        y, *rest = out
        channels.update(zip(segment.outputs, rest, strict=True))
    for name in segment.consumed:
        del channels[name]
    return y


__all__ = ["Back", "Call", "PluginError", "Segment", "SeqfuseBackward", "apply"]
