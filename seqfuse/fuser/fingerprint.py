"""The fingerprint of what a list was read from: whether it is still as it was."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.nn.modules.module as hooks_of
from torch import Tensor, nn

from ..measured import Epoch
from ..operation import FusableOperation, changes

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(getattr(hooks_of, f"_global{name}") for name in HOOKS if hasattr(hooks_of, f"_global{name}"))


def global_hooks() -> bool:
    """Whether hooks on every module there is are registered."""
    return any(_GLOBAL_HOOKS)


class Fingerprint:
    """What a list was read from, compared with what it is now.

    Attributes (configuration, training, class, a forward put on an instance, a parameter that is `None`) are compared
    only if one of any operation was set since they last were; children and hooks, which change in place, always.
    """

    def __init__(self, modules: Iterable[nn.Module], root: nn.Module) -> None:
        self._epoch, self._measured = changes.epoch, Epoch.now
        self._modules = list(dict.fromkeys(modules))
        self._attributes = [m.__dict__ for m in self._modules]
        self._attributes_then = [dict(now) for now in self._attributes]
        self._types_then = [type(m) for m in self._modules]
        self._children = [m._modules for m in self._modules if m._modules or isinstance(m, nn.Sequential)]  # pyright: ignore[reportPrivateUsage]
        self._children_then = [dict(children) for children in self._children]
        self._keys_then = [list(children) for children in self._children]
        self._tensors = [v for now in self._attributes for v in now.values() if isinstance(v, Tensor)]
        self._tensors_then = [t.requires_grad for t in self._tensors]
        # A torch module inside an operation tells nobody when it is set.
        self._others = not all(isinstance(m, FusableOperation) for m in self._modules)
        hooked = [getattr(m, name) for m in self._modules if m is not root for name in HOOKS]
        self._empty = [h for h in (*hooked, *_GLOBAL_HOOKS) if not h]
        self._full = [h for h in (*hooked, *_GLOBAL_HOOKS) if h]
        self._parameters = [(m._parameters, name) for m in self._modules for name in m._parameters]  # pyright: ignore[reportPrivateUsage]
        self._absent_then = [parameters[name] is None for parameters, name in self._parameters]

    def holds(self) -> bool:
        """Whether nothing has changed."""
        return (
            (self._epoch is changes.epoch or self._compare())
            and self._children == self._children_then
            and not any(self._empty)
            and all(self._full)
            and (not self._others or self._same(self._attributes_then))
            and (not self._tensors or [t.requires_grad for t in self._tensors] == self._tensors_then)
        )

    def _compare(self) -> bool:
        epoch = changes.epoch
        same = self._measured is Epoch.now and self._same(self._attributes_then)
        if same:
            self._epoch = epoch
        return same

    def _same(self, attributes: list[dict[str, Any]]) -> bool:
        try:
            return (
                self._attributes == attributes
                and [*map(list, self._children)] == self._keys_then
                and [*map(type, self._modules)] == self._types_then
                and [parameters[name] is None for parameters, name in self._parameters] == self._absent_then
            )
        except Exception:  # a replaced tensor or array has no truth value, a parameter is gone: it has changed
            return False

    def holds_in_full(self) -> bool:
        """Whether nothing has changed, were it in a place that is compared only after somebody noted a change."""
        return self.holds() and self._same(self._attributes_then)

    def differs_in_training_only(self) -> bool:
        """Whether what changed is training flags and nothing else, so that it may come back."""
        if self._measured is not Epoch.now:
            return False
        pairs = zip(self._attributes, self._attributes_then, strict=True)
        rest = self._same([{**then, "training": now.get("training")} for now, then in pairs])
        return rest and self._children == self._children_then and not any(self._empty) and all(self._full)
