"""`Sequential`, the user's container."""

from __future__ import annotations

import inspect
import re
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..env import Env
from ..errors import InputError, hinted, meant
from ..fusion import Fusions
from ..operation import NOT_GIVEN, FusableOperation, named_input, takes_input
from ..plan.plan import Plan
from ..plan.schedule import AnyChoice, choice_of
from ..recipes import Float8DelayedScaling, Recipe, check_recipe
from ..scaling import keep_scales
from ..signature import checks_arguments
from .fuser import Fuser, default_fusions


def remap_keys(state: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Rename the keys of a state dictionary, for example from a hand-written residual block.

    Args:
        state: a state dictionary; tensors are not copied.
        names: old to new dotted prefixes, `{"norm1": "0.0", "layers.*.mlp.up": "*.1.1"}`. `*` matches one component and
            keeps it. `""` removes a prefix: `{"_orig_mod": ""}`. The longest matching prefix wins; keys without a match
            do not change.

    Raises:
        InputError: if a prefix matches no key, or two keys become equal.
    """
    new: dict[str, Tensor] = {}
    used: set[str] = set()
    for old, to in names.items():
        if to.count("*") > old.count("*"):
            raise InputError(f"{to!r} has more stars than {old!r} carries over", code="SF104")
    ranked = sorted(names, key=lambda old: old.count("."), reverse=True)
    for key, value in state.items():
        renamed = key
        for old in ranked:
            match = re.match(re.escape(old).replace(r"\*", r"([^.]+)") + r"(?=\.|$)", key)
            if match is not None:
                carried = iter(match.groups())
                renamed = re.sub(r"\*", lambda _, c=carried: next(c), names[old]) + key[match.end() :]
                renamed = renamed.removeprefix(".")  # the rest after a removed prefix
                used.add(old)
                break
        if renamed in new:
            raise InputError(f"two keys become {renamed!r}, the second of them {key!r}", code="SF104")
        new[renamed] = value
    for old in names:
        if old not in used:
            hint = meant(old, {key.rpartition(".")[0] for key in state})
            raise InputError(f"{old!r} matches no key", code="SF104", hint=hint)
    return new


def _not_a_module(given: object) -> str:
    if isinstance(given, type):
        return f"not the class {given.__name__}; give an instance, {given.__name__}(...)"
    kind = type(given).__name__
    if isinstance(given, list | tuple):
        return f"not a {kind} of them; write Sequential(*operations)"
    if isinstance(given, dict):
        return "or one OrderedDict of them, not a dict"
    return f"not {given!r}; a function needs a torch.nn.Module around it"


class Channels(NamedTuple):
    """The public channels of a `Sequential`, by name, in the order of its operations.

    Attributes:
        inputs: the extra inputs that a call passes by keyword.
        outputs: the extra outputs that a call returns after `y`.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Sequential(nn.Sequential, FusableOperation):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A `torch.nn.Sequential` that runs its operations fused: y = (... op_2(op_1(x))).

    Nested `Sequential`s and `Residual`s are flattened, so fusions cross their borders. Modules that are not seqfuse
    operations, and operations with hooks, run eagerly. Parameters, state-dict keys and other methods are as in the
    torch class.

    Args:
        operations: modules in order, or one `OrderedDict` of them.
        fusions: the fusion set; by default `sf.fusions.default`.
        memory: activation memory against time. `"fast"` (earlier name `"save"`) is fastest; `"balanced"` saves less if
            that costs little time; `"lean"` saves the least without activation checkpointing; `"least"` has the lowest
            peak; a number of bytes or an `sf.Budget` limits the peak. `model.memory = "lean"` changes it later.
        recipe: the low-precision recipe of its GEMMs, such as `sf.recipes.Float8BlockScaling()`, also for nested
            containers without a recipe. `model.recipe = None` disables quantization.

    Raises:
        InputError: for an unknown `memory` or `recipe`; for an input or channel that does not fit, with the operation
            and position.
        PlanError: for channels that do not match.
    """

    inlines: ClassVar[bool] = True
    is_made_of_modules: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith(("seqfuse.nn.", "seqfuse.ops.")):
            checks_arguments(cls)
        # Computed here, since Dynamo cannot trace `inspect.signature`.
        _, *parameters = inspect.signature(cls.__init__).parameters.values()
        optional = all(p.default is not p.empty or p.kind is p.VAR_KEYWORD for p in parameters[1:])
        cls.is_made_of_modules = bool(parameters) and parameters[0].kind is parameters[0].VAR_POSITIONAL and optional

    def __init__(
        self,
        *operations: nn.Module | OrderedDict[str, nn.Module],
        fusions: Fusions | None = None,
        memory: AnyChoice = "fast",
        recipe: Recipe | None = None,
    ) -> None:
        super().__init__()
        if len(operations) == 1 and isinstance(operations[0], OrderedDict):
            for key, module in operations[0].items():
                self.add_module(key, module)
        else:
            for index, module in enumerate(operations):
                if module is not None and not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryComparison, reportUnnecessaryIsInstance]
                    raise TypeError(f"Sequential takes modules, {_not_a_module(module)}")
                self.add_module(str(index), module)  # pyright: ignore[reportArgumentType]
        if memory != "fast":
            self.memory = memory
        if recipe is not None:
            self.recipe = recipe
        self.fusions = default_fusions() if fusions is None else fusions

    memory: AnyChoice = "fast"
    recipe: Recipe | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "fusions":
            self._fuser = Fuser(self, value, owned=True, memory=self.memory)
            value = self._fuser.fusions
        elif name == "memory":
            value = choice_of(value)
            if "fusions" in vars(self):
                self._fuser = Fuser(self, self.fusions, owned=True, memory=value)
        elif name == "recipe":
            check_recipe(value, type(self).__name__)
        elif (hint := self._misspelt(name, value)) is not None:
            message = f"{type(self).__name__} has no attribute {name!r}, and nothing reads it{hinted(hint)}"
            warnings.warn(message, UserWarning, stacklevel=2)
        super().__setattr__(name, value)
        if name == "recipe" and isinstance(value, Float8DelayedScaling):
            keep_scales(self, value)

    def _misspelt(self, name: str, value: Any) -> str | None:
        given = name.startswith("_") or isinstance(value, Tensor | nn.Module) or hasattr(self, name)
        return None if given or torch.compiler.is_compiling() else meant(name, ("memory", "fusions", "recipe"), 0.8)

    def expand(self) -> tuple[nn.Module, ...]:
        return tuple(self._modules.values())  # pyright: ignore[reportReturnType] # at once: another thread may append

    @takes_input
    def forward(self, x: Tensor = NOT_GIVEN, *surplus: Tensor, **channels: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Run the sequence; returns `y`, or `(y, *outputs)` with public extra outputs.

        Args:
            x: the input; as a keyword, torch's name `input` also works.
            channels: the public extra inputs, by channel name.
        """
        if x is NOT_GIVEN:
            x = named_input(channels)
        fuser = self._fuser
        if fuser.owner() is not self:
            fuser = self._own()
        if type(channels) is not dict:  # a torch.fx tracer passes one proxy for all of them
            channels = {name: channels[name] for name in fuser.op_list().inputs}
        elif surplus:
            fuser.refuse_surplus(surplus, channels)
        return fuser(x, **channels) if channels else fuser(x)

    def plan(self, x: Tensor | None = None, *surplus: Tensor, env: Env | None = None, **channels: Tensor) -> Plan:
        """The plan for this input or environment: the steps of each pass, and why other fusions are not applied.

        Args:
            x: an input; its shape, dtype, device and `requires_grad` matter.
            env: another environment, such as `Env.of("cuda:sm_90", dtype=torch.bfloat16)`; no such device is needed.
            channels: the public extra inputs, by channel name.
        """
        if env is not None and not isinstance(env, Env):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(f"env must be an Env, not {env!r}", code="SF106", hint="sf.Env.of(device, dtype=...)")
        if surplus:
            self._own().refuse_surplus(surplus, channels)
        return self._own().plan(x, env=env, **channels)

    @property
    def channels(self) -> Channels:
        """Names of the public extra inputs, passed by keyword, and of the extra outputs, returned after `y`."""
        op_list = self._own().op_list()
        return Channels(op_list.inputs, op_list.outputs)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_fuser": self._own()}

    def _own(self) -> Fuser:
        if self._fuser.owner() is not self:  # a shallow copy still has the fuser of its original
            self.fusions = self.fusions
        return self._fuser

    def _like(self, modules: Iterable[nn.Module]) -> Sequential:
        named = OrderedDict((str(i), m) for i, m in enumerate(modules))
        return Sequential(named, fusions=self.fusions, memory=self.memory, recipe=self.recipe)

    def __getitem__(self, idx: slice | int) -> Any:
        if not isinstance(idx, slice):
            return super().__getitem__(idx)
        # The class itself, as in torch, if its constructor takes modules; a class that builds its modules cannot be
        # sliced.
        new = (type(self) if self.is_made_of_modules else Sequential)(OrderedDict(list(self._modules.items())[idx]))
        new.memory, new.fusions = self.memory, self.fusions
        if "recipe" in vars(self):
            new.recipe = self.recipe
        return new

    def __add__(self, other: Iterable[nn.Module]) -> Sequential:
        return self._like(super().__add__(other))  # pyright: ignore[reportUnknownMemberType]

    def __mul__(self, other: int) -> Sequential:
        return self._like(super().__mul__(other))


def install(model: Sequential, fuser: Fuser) -> None:
    """Makes another fuser run a model; `fuser.root` is the model. Assigning a fusion set undoes it."""
    model.__dict__["_fuser"] = fuser
