"""Delayed scaling: the scales and amax histories, buffers of operations, and their update."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from .errors import InputError
from .operation import FusableOperation
from .quantized import Quantized
from .recipes import MULTIPLE, Float8DelayedScaling, Recipe, Role, next_scale

# Operations that recorded a maximum, by `id`, in the order of their first forward, which is equal in all processes.
_recording: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
_hooked: list[Any] = []
HISTORY = "amax_history"
"""The suffix of the names of buffers with the last maxima of a tensor."""
_get_mode: Callable[..., Any] = torch._C._get_dispatch_mode  # pyright: ignore
_FAKE: Any = torch._C._TorchDispatchModeKey.FAKE  # pyright: ignore


class KeptScale(NamedTuple):
    """The stored scale of a tensor, and the newest entry of its history, [1], for its maximum.

    For groups with separate scales [G] and [1, G].
    """

    scale: Tensor
    newest: Tensor | None


class Scaled(nn.Module):
    """Mixin of operations that quantize tensors: their buffers under delayed scaling, in float32.

    A `state_dict` contains them, as plain tensors, only if a delayed recipe was set.
    """

    _delayed: Float8DelayedScaling | None = None
    runs_again = False
    """Whether it is a copy for a recomputed forward, whose maxima were recorded before."""

    @property
    def scale_shape(self) -> tuple[int, ...]:
        return ()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "recipe" and isinstance(value, Float8DelayedScaling):
            self.keep_scales(value)

    def scaled(self) -> tuple[str, ...]:
        """The names of its quantized tensors: a role, or a role with a number."""
        raise NotImplementedError

    def keep_scales(self, recipe: Float8DelayedScaling) -> None:
        """Registers the buffers of a recipe; existing ones are kept, histories with their newest entries.

        An operation with sizes that cannot be quantized gets none.
        """
        if any(size % MULTIPLE or not size for gemm in cast(Any, self).gemms for size in gemm):
            return
        if self._delayed != recipe:
            self._delayed = recipe
        device = next((p.device for p in self.parameters()), None)
        for name in self.scaled():
            old = self._buffers.get(f"{name}_{HISTORY}")
            if old is None:
                shape = self.scale_shape
                self.register_buffer(f"{name}_{HISTORY}", torch.zeros(recipe.history, *shape, device=device))
                self.register_buffer(f"{name}_scale", torch.ones(shape, device=device))
            elif len(old) != recipe.history:
                self._buffers[f"{name}_{HISTORY}"] = _resized(old, recipe.history)

    def scale_for(self, name: str, x: Tensor | Quantized, recipe: Recipe, record: bool) -> KeptScale | None:
        """The stored scale of a tensor under a delayed recipe, with `record` also the history; otherwise `None`."""
        if not isinstance(recipe, Float8DelayedScaling) or isinstance(x, Quantized):
            return None
        if type(x) not in (Tensor, nn.Parameter) or x.is_meta or _get_mode(_FAKE) is not None:  # without data
            return KeptScale(x.new_ones(self.scale_shape, dtype=torch.float32), None)
        if not self.runs_again and (self._delayed != recipe or f"{name}_scale" not in self._buffers):
            self.keep_scales(recipe)
        recorded = record and self.training and bool(x.numel()) and not self.runs_again
        if recorded and name == "x":  # only in a forward: a backward runs on a copy
            _recording[id(self)] = self
            if not _hooked:
                _hooked.append(register_optimizer_step_post_hook(_stepped))
        scale, history = (cast(Tensor, self._buffers.get(f"{name}_{what}")) for what in ("scale", HISTORY))
        return KeptScale(scale, history[:1] if recorded else None)

    def _names(self) -> list[str]:
        return [f"{name}_{what}" for name in self.scaled() for what in (HISTORY, "scale")]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """As in torch; scales stay float32, and scales from the meta device are initialized."""
        kept = {name: t for name in self._names() if (t := self._buffers.get(name)) is not None}
        super()._apply(fn, recurse)  # pyright: ignore[reportUnknownMemberType]
        for name, t in kept.items():
            moved = cast(Tensor, self._buffers[name])
            moved = moved if moved.dtype is torch.float32 else t.to(moved.device)
            if t.is_meta:
                moved = moved.fill_(1.0 if name.endswith("_scale") else 0.0)
            self._buffers[name] = moved
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any, **named: Any) -> None:
        given = {name for name in self._names() if prefix + name in state_dict}
        own = {name: t for name in self._names() if (t := self._buffers.get(name)) is not None}
        if given and not own:
            warnings.warn("ignored the scales in the state dict: no delayed recipe is set", UserWarning, stacklevel=2)
            for name in given:
                del state_dict[prefix + name]
        if own and not given:
            warnings.warn("scales start at 1: the state dict has none", UserWarning, stacklevel=2)
        for name, t in own.items():
            if name not in given:
                state_dict[prefix + name] = torch.ones_like(t) if name.endswith("_scale") else torch.zeros_like(t)
            elif name.endswith(HISTORY):
                state_dict[prefix + name] = _resized(state_dict[prefix + name], len(t))
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)  # pyright: ignore[reportUnknownMemberType]


def keep_scales(container: nn.Module, recipe: Float8DelayedScaling) -> None:
    """Registers the buffers of a container's recipe in its operations, except those with their own recipe."""
    for child in container.children():
        if "recipe" in vars(child):
            continue
        if isinstance(child, Scaled):
            child.keep_scales(recipe)
        elif isinstance(child, FusableOperation):
            keep_scales(child, recipe)


def _resized(history: Tensor, length: int) -> Tensor:
    """The newest entries, padded with zeros."""
    new = history.new_zeros(length, *history.shape[1:])
    kept = min(length, len(history))
    new[:kept] = history[:kept]
    return new


def update_scales(model: nn.Module, group: Any = None) -> None:
    """Update the scales of delayed scaling from the amax histories, and shift these; once per step.

    `optimizer.step()` does this automatically. Call it for parameters without an optimizer. With `reduce` in the
    recipe, maxima are first taken over the process group in one collective, so every process must call it.

    Args:
        model: a model, or an operation.
        group: a process group; by default the default group.

    Raises:
        InputError: (SF106) for a model without scales.
    """
    operations = [m for m in model.modules() if isinstance(m, Scaled) and m._delayed is not None]  # pyright: ignore[reportPrivateUsage]
    if not operations:
        raise InputError("no operation of the model keeps scales", code="SF106", operation="update_scales")
    _update(operations, group)


@torch.no_grad()
def _update(operations: Iterable[Scaled], group: Any = None) -> None:
    found: list[tuple[Float8DelayedScaling, Role, Tensor, Tensor]] = []
    for operation in operations:
        recipe, buffers = operation._delayed, operation._buffers  # pyright: ignore[reportPrivateUsage]
        assert recipe is not None
        for name in operation.scaled():
            history, scale = buffers.get(f"{name}_{HISTORY}"), buffers.get(f"{name}_scale")
            if history is not None and scale is not None:
                role: Any = name.partition("_")[0]
                found.append((recipe, role, history, scale))
    reduced = [history for recipe, _, history, _ in found if recipe.reduce]
    if reduced and dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        newest = torch.cat([history[0].reshape(-1) for history in reduced])
        dist.all_reduce(newest, dist.ReduceOp.MAX, group=group)  # pyright: ignore[reportUnknownMemberType]
        parts = newest.split_with_sizes([history[0].numel() for history in reduced])
        for history, most in zip(reduced, parts, strict=True):
            history[0] = most.view_as(history[0])
    for recipe, role, history, scale in found:
        scale.copy_(next_scale(recipe, role, history, scale))
        history.copy_(history.roll(1, 0))
        history[0] = 0


def _stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Updates the scales of operations whose first trained parameter belongs to this optimizer."""
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    operations: list[Scaled] = []
    for operation in [*_recording.values()]:
        first = next((p for p in operation.parameters() if p.requires_grad), None)
        if id(first) in owned:
            operations.append(cast(Scaled, operation))
    if operations:
        _update(operations)
