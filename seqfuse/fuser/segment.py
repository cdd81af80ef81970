"""A segment of a plan: bound steps that run behind one autograd node."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import FallbackWarning, InputError, KernelError, PluginError, SeqfuseError
from ..saved import Layout, Pack

_RECORD_CALL = re.compile(r"Saved\w*\.__init__\(\)")
Kind = Literal["unfused", "forward", "joint", "inference", "backward"]
# "simple": the chain's tensor and records only. "fused": a fusion of such. "wired": channels too. "special": the rest.
Path = Literal["simple", "fused", "wired", "special"]


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
    packs: tuple[tuple[Any, int, Any, Pack], ...] = ()  # place among the records, position, reader if any, pack
    path: Path = "special"  # how it runs, and how once its check has passed
    later: Path = "special"
    zeros: bool = False  # its backward cannot do without the gradient of y
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
    at: int = 0  # where its record is packed
    rebuild: Any = None
    records: tuple[tuple[str, int, int | None, Any], ...] = ()  # keyword, position, place in a variadic slot, rebuild
    incoming: tuple[tuple[str, str], ...] = ()  # keyword of an output's gradient, channel
    grads: tuple[tuple[str, int], ...] = ()  # key, index into the segment's parameters
    channel_grads: tuple[tuple[str, str], ...] = ()  # key, channel
    dtype: torch.dtype | None = None  # of the gradient it hands on, where that can differ
    path: Path = "special"
    later: Path = "special"
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
    clearer: Callable[[range, BaseException, Any], BaseException]
    warned: set[tuple[str, str]] = dataclasses.field(default_factory=lambda: set[tuple[str, str]]())

    def run(self, x: Tensor, channels: dict[str, Tensor], seeds: Tensor | None) -> Tensor:
        """Run the forward steps; `channels` gains what they emit and loses what nobody reads any more."""
        return self._run(self.forward_calls, x, channels, seeds, None)

    def run_keeping(
        self, x: Tensor, channels: dict[str, Tensor], seeds: Tensor | None
    ) -> tuple[Tensor, list[Any], Packed]:
        """Run the forward steps: with y, the tensors to save, each once, and the records as entries into them."""
        flat: list[Any] = []
        packed: Packed = {}
        y = self._run(self.forward_calls, x, channels, seeds, (flat, packed))
        ids = [*map(id, flat)]
        unique = dict(zip(ids, flat, strict=True))
        if len(unique) < len(flat):
            index = {key: i for i, key in enumerate(unique)}
            packed[_ORDER] = [index[key] for key in ids]
            flat = [*unique.values()]
        return y, flat, packed

    def _run(
        self, calls: Sequence[Call], x: Tensor, channels: dict[str, Tensor], seeds: Tensor | None, keep: Keep | None
    ) -> Tensor:
        call = calls[0]
        flat, packed = keep or (None, None)
        try:
            for call in calls:
                path = call.path
                if path == "simple":
                    y, saved = call.fn(x)
                elif path == "wired":
                    out = call.fn(x, **{keyword: channels[channel] for keyword, channel in call.inputs})
                    y, saved = out[0], out[-1]
                    for channel in call.done:
                        del channels[channel]
                    for name, channel in call.outputs:
                        channels[channel] = out[1][name]
                else:
                    y, saved = self._special(call, x, channels, seeds, packed)
                if flat is not None:
                    for place, position, read, pack in call.packs:
                        record = saved
                        if place is not None:
                            record = saved[place] if place.__class__ is str else saved[place[0]][place[1]]
                        fields = record.__dict__
                        if read is not None and "_late" not in fields:
                            packed[position] = len(flat)
                            flat += read(fields)
                        else:
                            packed[position] = pack(record, {}, flat)
                x = y
        except Exception as error:
            self._may_fall_back(call, error, x)
            assert call.unfused is not None
            x = self._run(call.unfused(), x, channels, seeds, keep)
            self._warn(call, error)
            rest = calls[calls.index(call) + 1 :]
            return self._run(rest, x, channels, seeds, keep) if rest else x
        return x

    def _special(
        self, call: Call, x: Tensor, channels: dict[str, Tensor], seeds: Tensor | None, packed: Packed | None
    ) -> tuple[Tensor, Any]:
        """Run a step that draws, wants a layout, is for inference, or is yet to be checked."""
        if call.layout != "any":
            x = _fit(x, call.layout)
        keywords: dict[str, Any] = {keyword: channels[channel] for keyword, channel in call.inputs}
        if call.layout != "any":
            keywords = {keyword: _fit(value, call.layout) for keyword, value in keywords.items()}
        given = dict(keywords) if call.check is not None else {}
        for keyword, index in call.seeds:
            keywords[keyword] = None if index is None or seeds is None else seeds[index]
        out = call.fn(x, **keywords)
        check = call.check
        if check is not None and check(call, x, out, given, seeds):
            call.check = None
            call.path = call.later
        for channel in call.done:
            del channels[channel]
        if not call.outputs:
            return (out, None) if call.kind == "inference" else (out[0], out[-1])
        for name, channel in call.outputs:
            channels[channel] = out[1][name]
        if packed is not None and call.zeros:
            made = {channel: out[1][name] for name, channel in call.outputs}
            packed[_SHAPES - call.stop] = {c: (t.shape, t.dtype, t.device) for c, t in {"": out[0], **made}.items()}
        return out[0], out[-1]

    def _may_fall_back(self, step: Call | Back, error: Exception, tensor: Any) -> None:
        """Return if the unfused operations may run in place of a failed fusion; else raise."""
        clear = self.clearer(range(step.start, step.stop), error, tensor)
        if clear is not error:
            raise clear from error
        if step.unfused is None:
            error.add_note(f"in operation {step.name} at position {step.start}")
            raise error
        if isinstance(error, SeqfuseError) and not isinstance(error, InputError):
            error.operation, error.position = error.operation or step.name, step.start
            raise error
        if isinstance(error, InputError):
            return  # the operations themselves will say it, with the place
        where: dict[str, Any] = {"operation": step.name, "position": step.start}
        if isinstance(error, TypeError) and _RECORD_CALL.search(str(error)):
            raise PluginError(f"fwd built a wrong record: {error}", code="SF302", **where) from error
        if isinstance(error, torch.AcceleratorError):
            message = f"the device reported {error}; its state is lost and nothing can run after it"
            raise KernelError(message, code="SF401", hint="rerun under compute-sanitizer", **where) from error
        if not self.can_fall_back or torch.compiler.is_compiling() or _capturing(self.device):
            raise KernelError(f"{type(error).__name__}: {error}", code="SF401", **where) from error

    def _warn(self, step: Call | Back, error: Exception) -> None:
        """Say, once per reason, that the unfused operations ran in place of a failed fusion."""
        reason = step.name, f"{type(error).__name__}: {error}"
        if reason not in self.warned and not isinstance(error, InputError | _ForwardFellBack):
            self.warned.add(reason)
            message = f"{step.name} at position {step.start} failed ({reason[1]}); its operations ran unfused"
            warnings.warn(message, FallbackWarning, stacklevel=2)

    def run_backward(
        self, dy: Tensor, sides: dict[str, Tensor | None], packed: Packed, tensors: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Run the backward steps: the gradients of x and of the parameters; `sides` are the channels'."""
        sums: list[Tensor | None] = [None] * len(self.parameters)
        if _ORDER in packed:
            tensors = tuple([tensors[i] for i in packed[_ORDER]])
        return self._run_back(self.backward_calls, dy, sides, packed, tensors, sums), sums

    def _run_back(
        self,
        backs: Sequence[Back],
        d: Any,
        sides: dict[str, Tensor | None],
        packed: Packed,
        tensors: tuple[Tensor, ...],
        sums: list[Any],
    ) -> Tensor | None:
        back = backs[0]
        try:
            for back in backs:
                path = back.path
                if back.kind == "backward" and back.incoming and any(sides.get(c) is None for _, c in back.incoming):
                    # Fusions are written for tensors; operations know a gradient that nobody gave.
                    d = self._run_back(back.unfused(), d, sides, packed, tensors, sums)  # type: ignore[misc]
                    continue
                if d is None:
                    if not any(sides.get(channel) is not None for _, channel in back.incoming):
                        continue  # nothing that the loss uses depends on this step
                    path = "special" if path != "wired" else path
                if path == "simple":
                    d, grads = back.fn(d, back.rebuild(packed.get(back.at), tensors))
                    for key, i in back.grads:
                        sums[i] = grads[key]
                elif path == "fused":
                    records = {slot: rebuild(packed.get(at), tensors) for slot, at, _, rebuild in back.records}
                    dx, grads = back.fn(d, **records)
                    own = [(i, grads[key]) for key, i in back.grads]
                    d = dx
                    for i, g in own:
                        sums[i] = g
                elif path == "wired":
                    extras = {keyword: sides.pop(channel, None) for keyword, channel in back.incoming}
                    d, grads = back.fn(d, back.rebuild(packed.get(back.at), tensors), **extras)
                    for key, i in back.grads:
                        sums[i] = grads[key]
                    for key, channel in back.channel_grads:
                        known = sides.get(channel)
                        sides[channel] = grads[key] if known is None else known + grads[key]
                else:
                    d = self._special_back(back, d, sides, packed, tensors, sums)
        except Exception as error:
            if back.unfused is None:
                self._may_fall_back(back, error, d)
            if not isinstance(error, _ForwardFellBack):
                if back.kind == "joint" and back.recover is None and not isinstance(error, SeqfuseError):
                    message = f"the backward of a joint fusion failed: {type(error).__name__}: {error}"
                    hint = "define unfused(saved) -> {slot: Saved} to let it fall back"
                    where: dict[str, Any] = {"operation": back.name, "position": back.start}
                    raise KernelError(message, code="SF401", hint=hint, **where) from error
                self._may_fall_back(back, error, d)
                if back.kind == "joint":
                    packed = {**packed, **self._recovered(back, error, packed, tensors)}
            assert back.unfused is not None
            d = self._run_back(back.unfused(), d, sides, packed, tensors, sums)
            self._warn(back, error)
            rest = backs[backs.index(back) + 1 :]
            return self._run_back(rest, d, sides, packed, tensors, sums) if rest else d
        return d

    def _special_back(
        self,
        back: Back,
        d: Any,
        sides: dict[str, Tensor | None],
        packed: Packed,
        tensors: tuple[Tensor, ...],
        sums: list[Any],
    ) -> Tensor | None:
        """Run a step that wants a layout, has mixed dtypes or shared parameters, or is yet to be checked."""
        shapes = packed.get(_SHAPES - back.stop, {})
        if d is None and shapes:
            d = _zeros(shapes[""])
        if back.layout != "any" and d is not None:
            d = _fit(d, back.layout)
        extras: dict[str, Any] = {keyword: sides.get(channel) for keyword, channel in back.incoming}
        if back.kind == "joint" and shapes:
            extras.update({k: _zeros(shapes[c]) for k, c in back.incoming if extras[k] is None and c in shapes})
        if back.layout != "any":
            extras = {keyword: None if g is None else _fit(g, back.layout) for keyword, g in extras.items()}
        if back.kind == "backward":
            out = back.fn(d, **_records(back, packed, tensors), **extras)
        else:
            if back.kind == "joint" and back.at not in packed:
                raise _ForwardFellBack
            out = back.fn(d, back.rebuild(packed.get(back.at), tensors), **extras)
        check = back.check
        if check is not None and check(back, d, out):
            back.check = None
            back.path = back.later
        dx, grads = out
        # All that can fail comes before the sums are touched: a fallback must not count a gradient twice.
        own = [(i, _sum(sums[i], g)) for key, i in back.grads if (g := grads.get(key)) is not None]
        side = [(c, _sum(sides.get(c), g)) for key, c in back.channel_grads if (g := grads.get(key)) is not None]
        if back.dtype is not None and dx is not None and dx.dtype is not back.dtype:
            dx = dx.to(back.dtype)
        for _, channel in back.incoming:
            sides.pop(channel, None)
        for i, total in own:
            sums[i] = total
        sides.update(side)
        return dx

    def _recovered(self, back: Back, error: Exception, packed: Packed, tensors: tuple[Tensor, ...]) -> Packed:
        """A joint fusion's record as the records of the operations it replaced."""
        assert back.recover is not None
        try:
            return back.recover(back.rebuild(packed[back.at], tensors))
        except Exception as second:
            message = f"its backward failed ({type(error).__name__}: {error}), and then its unfused(saved): {second!r}"
            raise KernelError(message, code="SF401", operation=back.name, position=back.start) from error


# Records are packed under their position, a joint fusion's under `~position`. Below all of these: under `_ORDER` where
# each tensor of the records is among those saved, and what zeros for the gradient of an unused y look like.
Packed = dict[int, Any]
Keep = tuple[list[Any], Packed]
_ORDER = -(1 << 40)
_SHAPES = _ORDER - 1


def _zeros(like: tuple[Any, ...]) -> Tensor:
    shape, dtype, device = like
    return torch.zeros(shape, dtype=dtype, device=device)


def _sum(known: Tensor | None, g: Tensor) -> Tensor:
    return g if known is None else known + g


class _ForwardFellBack(Exception):
    """The forward of a joint fusion ran unfused, so its backward must as well."""


def _records(back: Back, packed: Packed, tensors: tuple[Tensor, ...]) -> dict[str, Any]:
    records: dict[str, Any] = {}
    for slot, position, place, rebuild in back.records:
        record = rebuild(packed.get(position), tensors)
        if back.layout != "any":
            for name in record.__dict__.keys() & set(record.fields):
                value = record.__dict__[name]
                if isinstance(value, Tensor):
                    record.__dict__[name] = _fit(value, back.layout)
        records[slot] = record if place is None else (*records.get(slot, ()), record)
    return records


def _fit(x: Tensor, layout: Layout) -> Tensor:
    if layout == "inner_contig" and x.dim() and (x.stride(-1) == 1 or x.shape[-1] == 1) and 0 not in x.stride():
        return x
    return x.contiguous()


def _capturing(device: str) -> bool:
    return device == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
