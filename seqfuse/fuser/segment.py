"""A segment of a plan: bound steps that run behind one autograd node."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..autograd import Asked
from ..errors import FallbackWarning, InputError, KernelError, PluginError, SeqfuseError
from ..maingrad import MainGrads
from ..saved import Layout, Saved, rebuilder
from .fake import is_fake
from .straight import BUFFERS, FELL, ORDER, ForwardFellBack, Packed, ahead, back

_RECORD_CALL = re.compile(r"Saved\w*\.__init__\(\)")
Kind = Literal["unfused", "forward", "joint", "inference", "backward"]
# Which of the seeds; of a fusion that takes them all, one for each of its operations.
Drawn = int | None | tuple[int | None, ...]
# The place of a record among those a fusion returns, its position, its class, its fields that are kept.
Pack = tuple[tuple[Any, ...], int, type[Saved], tuple[str, ...]]


@dataclasses.dataclass(slots=True, eq=False)
class Call:
    """One forward step, bound: everything that does not change from call to call is decided here."""

    fn: Callable[..., Any]
    kind: Kind
    name: str
    start: int
    stop: int
    layout: Layout
    inputs: tuple[tuple[str, str], ...]  # keyword, channel
    seeds: tuple[tuple[str, Drawn], ...]  # keyword, index into the seed vector
    outputs: tuple[tuple[str, str], ...]  # name in the returned dictionary, channel
    declares: bool  # whether that dictionary is returned, empty where optional slots are
    done: tuple[str, ...]  # channels whose last reader this is
    packs: tuple[Pack, ...]
    zeros: bool  # its backward cannot do without the gradient of y
    check: Callable[..., bool] | None  # contract check, dropped once it has passed
    together: bool  # whether processes exchange tensors in it
    unfused: Callable[[], tuple[Call, ...]] | None


@dataclasses.dataclass(slots=True, eq=False)
class Back:
    """One backward step, bound."""

    fn: Callable[..., Any]
    kind: Kind
    name: str
    start: int
    stop: int
    layout: Layout
    records: tuple[tuple[str, int, int | None, type[Saved], tuple[str, ...]], ...]  # slot, then as in `Pack`
    incoming: tuple[tuple[str, str], ...]  # keyword of an output's gradient, channel
    grads: tuple[tuple[str, int], ...]  # key, index into the segment's parameters
    channel_grads: tuple[tuple[str, str], ...]  # key, channel
    shared: frozenset[int]  # the parameters that another step has gradients of, too
    dtype: torch.dtype | None  # of the gradient it hands on, where that can differ
    adds: bool  # it takes buffers to add gradients to
    zeros: bool
    check: Callable[..., bool] | None
    together: bool
    unfused: Callable[[], tuple[Back, ...]] | None
    recover: Callable[[Any], Any] | None  # a joint fusion's record as the records of its operations


@dataclasses.dataclass(slots=True, eq=False)
class Segment:
    """A run of steps behind one autograd node.

    The code made for it is passed the segment at each call: it holds none, since the segment holds the code.
    """

    forward_calls: tuple[Call, ...]
    backward_calls: Callable[[Asked | None], tuple[Back, ...]]
    parameters: tuple[tuple[nn.Module, str], ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    crossing: frozenset[str]  # outputs that are read further on in the list
    followed: bool  # by an operation of this library, which changes no tensor in place
    frozen: frozenset[str]  # outputs without a gradient
    consumed: tuple[str, ...]  # inputs that nobody after this segment reads
    device: str
    autocast: torch.dtype | None
    signature: int  # of the plan and of which part of it this is
    can_fall_back: bool
    live: bool
    clearer: Callable[[range, BaseException, Any], BaseException]
    note: Callable[[], Callable[[str, int, str], None] | None]  # what is told each failure, while it is there
    warned: set[tuple[str, str]] = dataclasses.field(default_factory=lambda: set[tuple[str, str]]())
    # Steps by what they are of: those of the segment, of a fusion that failed, of what comes after it.
    made: dict[Any, Callable[..., Any]] = dataclasses.field(default_factory=lambda: dict[Any, Callable[..., Any]]())
    plain: Callable[..., Tensor] | None = None
    keeping: Callable[..., Tensor] | None = None

    def run(self, x: Tensor, channels: dict[str, Tensor], seeds: Tensor | None) -> Tensor:
        """Run the forward steps; `channels` gains what they emit and loses what nobody reads any more."""
        if self.plain is None:
            self.plain = ahead(self.forward_calls, False)
        return self.plain(self, x, channels, seeds, None, None)

    def run_keeping(
        self, x: Tensor, channels: dict[str, Tensor], seeds: Tensor | None
    ) -> tuple[Tensor, list[Any], Packed]:
        """Run the forward steps: with y, the tensors to save, each once, and the records as entries into them."""
        if self.keeping is None:
            self.keeping = ahead(self.forward_calls, True)
        flat: list[Any] = []
        packed: Packed = {}
        y = self.keeping(self, x, channels, seeds, flat, packed)
        ids = [*map(id, flat)]
        if len(set(ids)) < len(flat):
            unique = dict(zip(ids, flat, strict=True))
            index = {key: i for i, key in enumerate(unique)}
            packed[ORDER] = [index[key] for key in ids]
            flat = [*unique.values()]
        return y, flat, packed

    def run_backward(
        self,
        dy: Tensor | None,
        sides: dict[str, Tensor | None],
        packed: Packed,
        tensors: tuple[Tensor, ...],
        asked: Asked | None = None,
        buffers: MainGrads | None = None,
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Run the backward steps: the gradients of x and of the parameters; `sides` are the channels'."""
        sums: list[Tensor | None] = [None] * len(self.parameters)
        if buffers is not None:
            packed = {**packed, BUFFERS: buffers}
        if ORDER in packed:
            order: list[int] = packed[ORDER]
            tensors = tuple([tensors[i] for i in order])
        run = self.made.get(asked)
        if run is None:
            run = self.made[asked] = back(self.backward_calls(asked))
        dx = run(self, dy, sides, packed, tensors, sums)
        if buffers is not None:
            buffers.settle(sums)
        return dx if asked is None or asked[1] else None, sums

    def place(self, index: int) -> tuple[str, str, int]:
        """A parameter, by its index, with the operation that makes its gradient, and its position."""
        owner, attribute = self.parameters[index]
        step = next(b for b in self.backward_calls(None) if index in [i for _, i in b.grads])
        return f"{type(owner).__name__}.{attribute}", step.name, step.start

    def ran(self, packed: Packed) -> int:
        """A number for what ran: the plan, and the fusions that fell back."""
        return hash((self.signature, packed.get(FELL)))

    def failed(
        self,
        calls: Sequence[Call],
        keep: bool,
        at: int,
        error: Exception,
        x: Tensor,
        channels: dict[str, Tensor],
        seeds: Tensor | None,
        flat: list[Any] | None,
        packed: Packed | None,
    ) -> Tensor:
        """Go on where a step failed: with the operations it replaced, then with the steps after it."""
        call = calls[at]
        self._may_fall_back(call, error, x)
        assert call.unfused is not None
        x = self._rest((call, keep), call.unfused, keep)(self, x, channels, seeds, flat, packed)
        self._warn(call, error, x)
        if packed is not None:
            packed[FELL] = (*packed.get(FELL, ()), call.start)
        if at + 1 == len(calls):
            return x
        rest = self._rest((calls[at + 1], len(calls), keep), lambda: calls[at + 1 :], keep)
        return rest(self, x, channels, seeds, flat, packed)

    def _rest(self, key: Any, calls: Callable[[], Sequence[Call]], keep: bool) -> Callable[..., Tensor]:
        if key not in self.made:
            self.made[key] = ahead(calls(), keep)
        return self.made[key]

    def apart(self, step: Back, *state: Any) -> Tensor | None:
        """Run the operations of a fused step in its place."""
        if step not in self.made:
            assert step.unfused is not None
            self.made[step] = back(step.unfused())
        return self.made[step](self, *state)

    def failed_back(
        self,
        backs: Sequence[Back],
        at: int,
        error: Exception,
        d: Any,
        sides: dict[str, Tensor | None],
        packed: Packed,
        tensors: tuple[Tensor, ...],
        sums: list[Any],
    ) -> Tensor | None:
        """Go on where a backward step failed, as `failed` does."""
        if at < 0:
            raise error  # of the operations that ran in place of a fusion
        step = backs[at]
        if step.unfused is not None and step.adds and BUFFERS in packed and (taken := packed[BUFFERS].taken()):
            message = f"it failed after it took the main_grad of {', '.join(taken)}: {type(error).__name__}: {error}"
            raise KernelError(message, code="SF401", operation=step.name, position=step.start) from error
        if not isinstance(error, ForwardFellBack):
            if step.kind == "joint" and step.recover is None and not isinstance(error, SeqfuseError):
                message = f"the backward of a joint fusion failed: {type(error).__name__}: {error}"
                hint = "define unfused(saved) -> {slot: Saved} to let it fall back"
                raise KernelError(message, code="SF401", hint=hint, operation=step.name, position=step.start) from error
            self._may_fall_back(step, error, d)
            if step.kind == "joint":
                packed = {**packed, **self._recovered(step, error, packed, tensors)}
        d = self.apart(step, d, sides, packed, tensors, sums)
        self._warn(step, error, d)
        if at + 1 == len(backs):
            return d
        key = step, len(backs)
        if key not in self.made:
            self.made[key] = back(backs[at + 1 :])
        return self.made[key](self, d, sides, packed, tensors, sums)

    def _recovered(self, step: Back, error: Exception, packed: Packed, tensors: tuple[Tensor, ...]) -> Packed:
        """A joint fusion's record as the records of the operations it replaced."""
        assert step.recover is not None
        _, position, _, record, kept = step.records[0]
        try:
            return step.recover(rebuilder(record, kept)(packed[position], tensors))
        except Exception as second:
            message = f"its backward failed ({type(error).__name__}: {error}), and then its unfused(saved): {second!r}"
            raise KernelError(message, code="SF401", operation=step.name, position=step.start) from error

    def _may_fall_back(self, step: Call | Back, error: Exception, tensor: Any) -> None:
        """Return if the unfused operations may run in place of a failed fusion; else raise."""
        clear = self.clearer(range(step.start, step.stop), error, tensor)
        if clear is not error:
            raise clear from error
        if step.together and step.unfused is not None and not isinstance(error, SeqfuseError):
            hint = "processes exchange tensors in it, so that none can run its operations alone"
            where: dict[str, Any] = {"operation": step.name, "position": step.start, "hint": hint}
            raise KernelError(f"{type(error).__name__}: {error}", code="SF401", **where) from error
        if step.unfused is None or step.together:
            error.add_note(f"in operation {step.name} at position {step.start}")
            raise error
        if isinstance(error, SeqfuseError) and not isinstance(error, InputError):
            error.operation, error.position = error.operation or step.name, step.start
            raise error
        if isinstance(error, InputError):
            return  # the operations themselves will say it, with the place
        where = {"operation": step.name, "position": step.start}
        if isinstance(error, TypeError) and _RECORD_CALL.search(str(error)):
            raise PluginError(f"fwd built a wrong record: {error}", code="SF302", **where) from error
        if isinstance(error, torch.AcceleratorError):
            message = f"the device reported {error}; its state is lost and nothing can run after it"
            raise KernelError(message, code="SF401", hint="rerun under compute-sanitizer", **where) from error
        if not self.can_fall_back or torch.compiler.is_compiling() or _capturing(self.device):
            raise KernelError(f"{type(error).__name__}: {error}", code="SF401", **where) from error

    def _warn(self, step: Call | Back, error: Exception, tensor: Any) -> None:
        """Say, once per reason, that the unfused operations ran in place of a failed fusion."""
        if isinstance(error, InputError | ForwardFellBack) or is_fake(tensor):
            return
        reason = step.name, f"{type(error).__name__}: {error}"
        if (note := self.note()) is not None:
            note(step.name, step.start, reason[1])
        if reason not in self.warned:
            self.warned.add(reason)
            message = f"{step.name} at position {step.start} failed ({reason[1]}); its operations ran unfused"
            warnings.warn(message, FallbackWarning, stacklevel=2)


def _capturing(device: str) -> bool:
    return device == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
