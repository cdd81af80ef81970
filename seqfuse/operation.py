"""Operations: parameters, the math as `reference`, a forward, a backward, and the `Saved` between them."""

from __future__ import annotations

import inspect
import math
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .errors import definition_error
from .group import Group, ParameterShard, Redistribution
from .maingrad import Accumulated
from .saved import Layout, Saved, always_saved, check_layout, field, maker
from .signature import Signature, check_pass_names, checks_arguments, show_arguments

if TYPE_CHECKING:
    from .env import Env

Grads = Mapping[str, Tensor | Accumulated | None]
"""Gradients by parameter or extra-input name; `None` if a gradient is not needed."""

NOT_GIVEN: Any = ...


def takes_input(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Sets the public signature of a `forward(x, **channels)`, which internally also accepts `input=` and rejects
    `surplus` arguments.
    """
    signature = inspect.signature(forward)
    given = [p.replace(default=p.empty) for p in signature.parameters.values() if p.name != "surplus"]
    forward.__signature__ = signature.replace(parameters=given)  # pyright: ignore[reportFunctionMemberAccess]
    return forward


def named_input(channels: dict[str, Tensor]) -> Tensor:
    """The input of a call that passes it as `input=`, as in torch."""
    if "input" not in channels:
        raise TypeError("forward() missing 1 required positional argument: 'x'")
    return channels.pop("input")


class Version:
    """A unique token; two of them never compare equal. Dynamo cannot trace `object()`."""


class ConfigVersion:
    """A token, replaced whenever an attribute of any operation is set: while it is unchanged, nothing is compared."""

    def __init__(self) -> None:  # an instance: torch 2.11 cannot trace setting class attributes
        self.current, self.measured = Version(), Version()  # `measured` is replaced when a measurement is added

    def bump(self) -> None:
        """Records that an attribute was set; called afterwards."""
        self.current = Version()


config_version = ConfigVersion()


class FusableOperation(nn.Module):
    """Base class of everything that a `Fuser` runs: unfused operations and containers of them.

    Attributes:
        barrier: the reason why fusions do not cross it and it runs eagerly, as plans print it; `None` if they may.
    """

    barrier: str | None = None
    # An alias of `vars` that lets torch 2.11 trace a loop over it.
    _attributes = property(vars)

    def __init__(self) -> None:
        super().__init__()
        self._engine: list[Any] = []

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        config_version.bump()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)  # pyright: ignore[reportUnknownMemberType]
        config_version.bump()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a parameter, as in torch."""
        super().register_parameter(name, param)
        config_version.bump()

    def expand(self) -> tuple[nn.Module, ...]:
        """The operations that replace this container in the flattened sequence; by default itself."""
        return (self,)

    @takes_input
    def forward(self, x: Tensor = NOT_GIVEN, *surplus: Tensor, **channels: Tensor) -> Any:
        """Run this operation by itself; returns `y`, or `(y, *outputs)` with public extra outputs."""
        if x is NOT_GIVEN:
            x = named_input(channels)
        engine = self._engine[0] if self._engine else None
        if engine is None or engine.root is not self:  # a shallow copy still has the engine of its original
            from .run import fuser_of  # the engine, a layer above

            engine = fuser_of(self)
            self._engine[:] = [engine]  # in place: setting the attribute would count as a change
        if type(channels) is not dict:  # a torch.fx tracer passes one proxy for all of them
            channels = {name: channels[name] for name in engine.op_list().inputs}
        elif surplus:
            engine.refuse_surplus(surplus, channels)
        return engine(x, **channels)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_engine": []}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any, **named: Any) -> None:
        # Other libraries store pickles here; they are ignored and never unpickled.
        if state_dict.pop(f"{prefix}_extra_state", None) is not None:
            warnings.warn(f"ignored {prefix}_extra_state, which another library saved", UserWarning, stacklevel=2)
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)  # pyright: ignore[reportUnknownMemberType]


def configured(operation: FusableOperation) -> Any:
    """A copy with the current configuration, unaffected by later changes; parameters are shared."""
    kept = object.__new__(type(operation))
    inside: dict[str, Any] = operation.__dict__["_modules"]
    copies = {n: configured(m) if isinstance(m, FusableOperation) else m for n, m in inside.items()}
    kept.__dict__.update(operation.__dict__, _engine=[], _modules=copies)
    return kept


class Traffic(NamedTuple):
    """Kernel launches of an unfused pass, and how many tensors of the size of x and of y it reads and writes.

    Extra inputs and outputs do not count: no fusion saves them. `flops` counts the GEMM of the forward pass.
    """

    launches: float = 1
    x: float = 1
    y: float = 1
    flops: float = 0


_METHODS = (
    "reference", "fwd", "bwd", "infer", "traffic", "example", "examples", "own_record", "input_record",
    "derivative_reference",
)  # fmt: skip


def _unstated(name: str) -> Callable[..., Any]:
    def missing(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} states no {name}")

    return missing


class UnfusedOperation(FusableOperation):
    """The smallest operation: its parameters, `reference`, `fwd`, `bwd` and one `Saved`.

    A subclass that defines `reference` is final: fusions match its exact type, never its subclasses. A subclass without
    `reference`, or with the class keyword `open=True`, is abstract: as a slot type it matches every final subclass.

    Attributes:
        outputs: names of extra tensors `fwd` returns as `(y, {name: tensor}, Saved)`.
        integers: names of the outputs of integer dtype, which have no gradient.
        dy_may_be_none: whether `bwd` accepts `dy=None` if only extra outputs have gradients; otherwise it gets zeros.
        layout: strides that `fwd` and `bwd` accept: `"any"`, a contiguous last dimension, or contiguous tensors.
        is_view: whether y and the outputs are x or views of it. If there are only views between two barriers, the
            reference runs, so that in-place changes of y change x, as in torch.
        channels_like_x: whether every extra input and output has the shape of x; checked before anything runs.
        narrows: the last dimension of x divided by that of y.
        packs: whether x packs several tensors, such as queries, keys and values, and cannot be split along features.
        same_dtype: whether x and the parameters must have the same dtype outside autocast, as for a GEMM in torch;
            checked before anything runs.
        native: whether the reference is one differentiable torch call that saves the same tensors as `Saved`. A region
            of native operations only, without a useful fusion, runs as these calls (`torch_call`).
        native_below: elements of a tensor from which C kernels run it faster than torch, if that is not the default.
        autocast: the dtypes under `torch.autocast`. `"lower"`: x is cast to the autocast dtype, as for a GEMM.
            `"float32"`: y is float32 on an accelerator. `"promote"`: y has the widest dtype of x, extra inputs and
            parameters. `"same"`: y has the dtype of x. `"exchange"`: y has the dtype of the extra input, and the extra
            output that of x. `None`: determined by running the reference.
        costly: whether computing y needs GEMMs; then y is saved if its neighbours are recomputed. A field `x` of
            `Saved`, if any, is x itself.
        any_dy: whether `bwd` accepts dy in a dtype other than y's; otherwise dy is cast first.
        separable: whether `bwd` can run as two calls without repeated work, first for the parameters, then for x, so
            that the tensors of the first call are freed before the second.
        redistribution: for a collective, how tensors are sharded before and after it.
        SavedQuantized: the `Saved` of a `fwd` with a `recipe`, for operations whose GEMMs can be quantized. Their
            `fwd`, `bwd` and `reference` have an argument `recipe`, and `gemms` returns the sizes. `operation.recipe =
            r` sets a recipe for this operation only; `None` exempts it from the recipe of its container.
        sum_over: processes that each see only some tokens or heads: gradients of the parameters are summed over them.
        shards: how parameters are sharded over processes, by name; replicated parameters are omitted.

    Raises:
        PluginError: at class definition, quoting the line, if a signature has an unknown argument, or `Saved`, `fwd` or
            `bwd` is missing.
    """

    Saved: ClassVar[type[Saved]] = Saved
    outputs: ClassVar[tuple[str, ...]] = ()
    integers: ClassVar[tuple[str, ...]] = ()
    layout: ClassVar[Layout] = "any"
    dy_may_be_none: ClassVar[bool] = False
    is_view: bool = False
    channels_like_x: ClassVar[bool] = False
    narrows: ClassVar[int] = 1
    packs: bool = False
    same_dtype: ClassVar[bool] = False
    native: ClassVar[bool] = False
    native_below: float = math.inf
    autocast: Literal["lower", "float32", "promote", "same", "exchange"] | None = None
    any_dy: ClassVar[bool] = False
    separable: ClassVar[bool] = False
    SavedQuantized: ClassVar[type[Saved]] = Saved
    costly: ClassVar[bool] = False
    redistribution: Redistribution | None = None
    sum_over: Group | None = None
    shards: Mapping[str, ParameterShard] = MappingProxyType({})
    is_open: ClassVar[bool] = True
    extra_repr = show_arguments
    is_final: ClassVar[bool] = False
    _saved: ClassVar[Callable[..., Any]]  # a constructor of `Saved` with positional fields
    forward_signature: ClassVar[Signature] = Signature()
    backward_signature: ClassVar[Signature] = Signature()

    def __init_subclass__(cls, *, open: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.is_open = open or cls.reference is UnfusedOperation.reference
        if cls.__module__.startswith("seqfuse.ops."):
            checks_arguments(cls)
        own, bases = vars(cls), [base for base in cls.__mro__[1:] if issubclass(base, UnfusedOperation)]
        cls.native = bool(own.get("native"))  # not inherited: a subclass may override the forward
        if "reference" in own and "autocast" not in own and any(base.is_final for base in bases):
            cls.autocast = None
        if not any(base.is_final for base in bases):  # otherwise it overrides `forward`, which then runs
            check_pass_names(cls, contract=_METHODS)
        if cls.is_open:
            return
        cls.is_final = all(base.is_open for base in bases)
        for name in ("fwd", "bwd"):
            if getattr(cls, name) is getattr(UnfusedOperation, name):
                raise definition_error(cls, f"an operation with a reference needs {name} as well", "class ")
        if cls.Saved is Saved or not issubclass(cls.Saved, Saved):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise definition_error(cls, "an operation needs its own class Saved(sf.Saved)", "Saved")
        check_layout(cls, cls.layout)
        cls._saved = staticmethod(maker(cls.Saved))
        cls.forward_signature = Signature.of(cls, "fwd", ("x",), None)
        allowed = frozenset(f"d_{name}" for name in cls.outputs)
        cls.backward_signature = Signature.of(cls, "bwd", ("dy", "saved"), allowed)
        if missing := allowed - set(cls.backward_signature.extras):
            raise definition_error(cls, f"bwd must take {', '.join(sorted(missing))} by keyword", "def bwd")

    reference: ClassVar[Callable[..., Any]] = _unstated("reference")
    """`reference(x, ...)`: the math in plain, differentiable torch; returns y, or `(y, {output: tensor})`."""

    def reference_with(self, x: Tensor, following: nn.Module) -> Tensor | None:
        """The reference of this operation and the next one if both are one torch call; otherwise `None`."""
        return None

    def joins(self, following: nn.Module) -> bool:
        """Whether the torch call of this operation also takes the parameters of the next operation."""
        return False

    def torch_call(self) -> Callable[..., Tensor] | None:
        """The torch call of a native operation; takes x and the parameters, in the order of `parameter_slots`."""
        return self.reference

    fwd: ClassVar[Callable[..., Any]] = _unstated("fwd")
    """`fwd(x, ...)`: `(y, Saved)`, or `(y, {output: tensor}, Saved)`."""

    bwd: ClassVar[Callable[..., Any]] = _unstated("bwd")
    """`bwd(dy, saved, ...)`: `(dx, Grads)`."""

    def own_record(self, seed: Tensor | None) -> Saved | None:
        """The `Saved` of `fwd` if it follows from configuration and seed; fusions then omit it.

        By default an empty `Saved` if it has no fields; otherwise `None`.
        """
        return None if self.Saved.fields else self._saved()

    def input_record(self, x: Tensor) -> Saved | None:
        """The `Saved` of `fwd` if it consists of x and parameters, so that recomputing it does not need y.

        By default `None`: recomputing it runs `fwd`.
        """
        return None

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The output shape for an input shape; raises `ValueError` with the expected shape."""
        return shape

    @property
    def random(self) -> bool:
        """Whether a call uses a random seed in the current mode."""
        return self.forward_signature.seed

    @property
    def repeatable(self) -> bool:
        """Whether a pass may run again after a neighbouring fusion failed: `False` for collectives."""
        return self.redistribution is None

    @property
    def channels(self) -> Mapping[str, str | None]:
        """The channel of each extra input and output; `None` is anonymous, paired like parentheses.

        An extra input with a default in `fwd` is optional.
        """
        return {name: name for name in (*self.forward_signature.extras, *self.outputs)}

    @property
    def features(self) -> tuple[int, int] | None:
        """The last dimensions of x and y if the configuration defines them; for cost estimates."""
        return None

    @property
    def gemms(self) -> tuple[tuple[int, int], ...]:
        """`in_features` and `out_features` of each GEMM that a recipe quantizes."""
        return ()

    def not_quantized(self, recipe: Any, dtype: torch.dtype | None, arch: str) -> str | None:
        """Why a GPU that supports `recipe` does not quantize this operation, which then runs in the dtype of x."""
        return None

    def traffic(self, env: Env, backward: bool) -> Traffic:
        """Launches, reads and writes of an unfused pass, from which the gain of a fusion is estimated.

        By default one kernel. Forward reads x and writes y. Backward reads dy and the fields `x` and `y` of `Saved`,
        and writes dx.
        """
        if self.is_view:
            return Traffic(0, 0, 0)
        saved = always_saved(self.Saved) if backward else ()
        return Traffic(1, 1 + ("x" in saved), 1 + ("y" in saved))

    @property
    def y_dtype(self) -> torch.dtype | None:
        """The dtype of y if it does not depend on x, as for an embedding; later operations are planned for it."""
        return None

    def parameter_slots(self) -> dict[str, tuple[nn.Module, str]]:
        """The owner of each parameter: local name to (owning module, attribute)."""
        if not len(self._modules):
            return {name: (self, name) for name, value in self._parameters.items() if value is not None}
        slots: dict[str, tuple[nn.Module, str]] = {}
        owner: Any = self
        for prefix, module in typing.cast(Iterable[tuple[str, nn.Module]], owner.named_modules()):
            if ".parametrizations" in f".{prefix}":
                continue
            names = [name for name, value in module._parameters.items() if value is not None]
            if len(module._modules) and parametrize.is_parametrized(module):
                names += list(module.parametrizations)  # pyright: ignore[reportArgumentType]
            slots.update({f"{prefix}.{name}".lstrip("."): (module, name) for name in names})
        return slots

    @classmethod
    def example(cls, x: Tensor) -> UnfusedOperation:
        """An instance that accepts `x`, for the test kit."""
        return cls()

    @classmethod
    def examples(cls, x: Tensor) -> tuple[UnfusedOperation, ...]:
        """`example(x)` and instances with other configurations, each of which a fusion must support or decline."""
        return (cls.example(x),)


__all__ = ["FusableOperation", "Grads", "Saved", "UnfusedOperation", "field"]
