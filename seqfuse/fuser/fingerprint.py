"""The fingerprint of what a sequence was read from: whether it is still as it was."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch.nn.modules.module as hooks_of
from torch import Tensor, nn

from ..operation import FusableOperation, config_version

# Of the attributes of a module, those that hold the engine.
OWN = ("_fuser", "_engine")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(getattr(hooks_of, f"_global{name}") for name in HOOKS if hasattr(hooks_of, f"_global{name}"))


def global_hooks() -> bool:
    """Whether hooks on every module there is are registered."""
    return any(_GLOBAL_HOOKS)


class _Anything:
    """Equals everything."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # pyright: ignore[reportAssignmentType]


class Fingerprint:
    """The state of the modules that a sequence was read from, to compare with their state now.

    Attributes (configuration, training, class, a forward put on an instance, a parameter that is `None`) are compared
    only if some operation had an attribute set since the last call; children and hooks, which change in place, always.

    It holds neither the root nor its attributes, as the root holds the fuser, and the fuser this.
    """

    def __init__(self, modules: Iterable[nn.Module], root: nn.Module) -> None:
        self._config, self._measured = config_version.current, config_version.measured
        self._root, every = weakref.ref(root), list(dict.fromkeys((root, *modules)))
        self._modules = every[1:]
        self._attributes_then = [dict(m.__dict__) for m in every]
        self._attributes_then[0].update((name, _Anything()) for name in OWN if name in root.__dict__)
        self._types_then = [type(m) for m in every]
        self._children = [m._modules for m in every if m._modules or isinstance(m, nn.Sequential)]  # pyright: ignore[reportPrivateUsage]
        self._children_then = [dict(children) for children in self._children]
        self._keys_then = [list(children) for children in self._children]
        self._tensors = [v for now in self._attributes_then for v in now.values() if isinstance(v, Tensor)]
        self._tensors_then = [t.requires_grad for t in self._tensors]
        # A torch module inside an operation tells nobody when it is set.
        self._others = not all(isinstance(m, FusableOperation) for m in every)
        hooked = [getattr(m, name) for m in self._modules for name in HOOKS]
        self._empty = [h for h in (*hooked, *_GLOBAL_HOOKS) if not h]
        self._full = [h for h in (*hooked, *_GLOBAL_HOOKS) if h]
        self._parameters = [(m._parameters, name) for m in every for name in m._parameters]  # pyright: ignore[reportPrivateUsage]
        self._absent_then = [parameters[name] is None for parameters, name in self._parameters]

    def holds(self) -> bool:
        """Whether nothing has changed."""
        return (
            (self._config is config_version.current or self._compare())
            and self._children == self._children_then
            and not any(self._empty)
            and all(self._full)
            and (not self._others or self._same(self._attributes_then))
            and (not self._tensors or [t.requires_grad for t in self._tensors] == self._tensors_then)
        )

    def _compare(self) -> bool:
        current = config_version.current
        same = self._measured is config_version.measured and self._same(self._attributes_then)
        if same:
            self._config = current
        return same

    def _now(self) -> list[nn.Module]:
        root = self._root()
        return self._modules if root is None else [root, *self._modules]

    def _same(self, attributes: list[dict[str, Any]]) -> bool:
        try:
            modules = self._now()
            return (
                [m.__dict__ for m in modules] == attributes
                and [*map(list, self._children)] == self._keys_then
                and [*map(type, modules)] == self._types_then
                and [parameters[name] is None for parameters, name in self._parameters] == self._absent_then
            )
        except Exception:  # a replaced tensor or array has no truth value, a parameter is gone: it has changed
            return False

    def holds_in_full(self) -> bool:
        """Whether nothing has changed, attributes included that nobody said they set."""
        return self.holds() and self._same(self._attributes_then)

    def differs_in_training_only(self) -> bool:
        """Whether what changed is training flags and nothing else, so that it may come back."""
        if self._measured is not config_version.measured:
            return False
        pairs = zip(self._now(), self._attributes_then, strict=True)
        rest = self._same([{**then, "training": now.__dict__.get("training")} for now, then in pairs])
        return rest and self._children == self._children_then and not any(self._empty) and all(self._full)
