"""What an operation is: parameters, the math as `reference`, a forward, a backward and the record between them."""

from __future__ import annotations

import inspect
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
"""Gradients by name: parameter names and extra-input names; `None` where one is not needed."""

NOT_GIVEN: Any = ...


def takes_input(forward: Callable[..., Any]) -> Callable[..., Any]:
    """State the signature of a `forward(x, **channels)` without the default by which x may be called `input`."""
    signature = inspect.signature(forward)
    given = [p.replace(default=p.empty) for p in signature.parameters.values()]
    forward.__signature__ = signature.replace(parameters=given)  # pyright: ignore[reportFunctionMemberAccess]
    return forward


def named_input(channels: dict[str, Tensor]) -> Tensor:
    """The input of a call that calls it `input`, as torch does."""
    if "input" not in channels:
        raise TypeError("forward() missing 1 required positional argument: 'x'")
    return channels.pop("input")


class Version:
    """A unique token; two of them never compare equal. Compilers do not trace `object()`."""


class ConfigVersion:
    """A token that is replaced whenever an attribute of any operation is set: an unchanged one spares a comparison."""

    def __init__(self) -> None:  # an instance, because torch 2.11 does not trace that a class is set
        self.current, self.measured = Version(), Version()  # the latter whenever a measurement is added

    def bump(self) -> None:
        """Say that an attribute was set, after it was."""
        self.current = Version()


config_version = ConfigVersion()


class FusableOperation(nn.Module):
    """Anything the fuser can process: an unfused operation, or a container of them.

    Attributes:
        barrier: why nothing fuses across it and it runs through its own `__call__`, as a plan says it; `None` where
            the fuser decides.
    """

    barrier: str | None = None
    # `vars` by a second name, under which torch 2.11 traces a loop over it.
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
        """The operations that stand for this one in the fuser's sequence; by default itself."""
        return (self,)

    @takes_input
    def forward(self, x: Tensor = NOT_GIVEN, **channels: Tensor) -> Any:
        """Run this operation by itself: `y`, or `(y, *outputs)` where it makes public extra outputs."""
        if x is NOT_GIVEN:
            x = named_input(channels)
        engine = self._engine[0] if self._engine else None
        if engine is None or engine.root is not self:  # a shallow copy brings its original's along
            from .run import fuser_of  # the engine, which is above

            engine = fuser_of(self)
            self._engine[:] = [engine]  # in place: the attribute is part of what a sequence is compared by
        if type(channels) is not dict:  # a tracer of torch.fx hands in one object for all of them
            channels = {name: channels[name] for name in engine.op_list().inputs}
        return engine(x, **channels)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_engine": []}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any, **named: Any) -> None:
        # Other libraries put pickles here; nothing of ours is in them and nothing unpickles them.
        if state_dict.pop(f"{prefix}_extra_state", None) is not None:
            warnings.warn(f"ignored {prefix}_extra_state, which another library saved", UserWarning, stacklevel=2)
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)  # pyright: ignore[reportUnknownMemberType]


def configured(operation: FusableOperation) -> Any:
    """A copy that keeps the configuration of now, whatever is set on the operation later; parameters stay shared."""
    kept = object.__new__(type(operation))
    inside: dict[str, Any] = operation.__dict__["_modules"]
    copies = {n: configured(m) if isinstance(m, FusableOperation) else m for n, m in inside.items()}
    kept.__dict__.update(operation.__dict__, _engine=[], _modules=copies)
    return kept


class Traffic(NamedTuple):
    """Kernels that a pass launches, unfused, and how many tensors as large as x and as y it reads and writes.

    Extra inputs and outputs do not count, which no fusion spares. `flops` are those of its GEMM in the forward pass.
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
    """The smallest operation: owns parameters, states the math, has `fwd`, `bwd` and one `Saved`.

    A subclass that defines `reference` is final: it is matched by its exact type and a subclass of it never is. One
    that does not, or is declared with the class keyword `open=True`, is abstract: as a slot type it matches every
    final subclass.

    Attributes:
        outputs: names of extra tensors `fwd` returns as `(y, {name: tensor}, Saved)`.
        integers: those of the outputs that are of integers, which have no gradient.
        dy_may_be_none: whether `bwd` takes `None` for a `dy` nobody used, where an extra output was used; else zeros.
        layout: what `fwd` and `bwd` accept: `"any"` strides, a contiguous last dimension, or contiguous tensors.
        is_view: whether y and the outputs are x itself, or views of it. Where nothing else stands between two barriers
            the reference runs, so that, as in torch, who changes y in place changes x.
        narrows: how many features of x make one of y.
        packs: whether several parts lie side by side in x, such as queries, keys and values: a stretch has not all.
        same_dtype: whether x and the parameters must have one dtype outside autocast, as torch demands of a GEMM: a
            call that brings another is refused before anything runs.
        native: whether the reference is one differentiable call of torch, which saves what `Saved` does. A region of
            such operations alone runs by these calls, `torch_call`, if no fusion does more than they do.
        autocast: what `torch.autocast` makes of x and y. `"lower"` casts x to its dtype, as for a GEMM; `"float32"`
            gives y in float32 on an accelerator, whatever x is; `"promote"` in the widest dtype among x, extra inputs
            and parameters; `"same"` in that of x; `"exchange"` in that of its extra input, and its output in that of x.
            `None` states none of these: what the reference gives is looked at.
        costly: whether y takes GEMMs, so that it is worth saving where what is around it runs again. A field x that
            `Saved` may have is then x itself.
        any_dy: whether `bwd` takes dy in another dtype than that of y. Else a gradient is cast before it is given.
        separable: whether `bwd` computes nothing twice where the gradients of parameters are needed first and that of x
            in a second call, so that tensors which the first reads need not be held in the second.
        redistribution: where this operation is a collective, how tensors are sharded before and after it.
        SavedQuantized: what `fwd` returns where it is given a `recipe`, of an operation whose GEMMs can be quantized:
            `fwd`, `bwd` and `reference` name `recipe` then, and `gemms` says their sizes. `operation.recipe = r` gives
            a recipe to this operation alone, and `None` keeps it out of that of its container.
        sum_over: processes that each use the parameters for a part of the rows or heads: their gradients are summed.
        shards: how parameters are sharded over processes, by name; those that are replicated are left out.

    Raises:
        PluginError: when the class is defined, quoting the line, if a signature names what the engine does not know,
            or `Saved`, `fwd` or `bwd` is missing.
    """

    Saved: ClassVar[type[Saved]] = Saved
    outputs: ClassVar[tuple[str, ...]] = ()
    integers: ClassVar[tuple[str, ...]] = ()
    layout: ClassVar[Layout] = "any"
    dy_may_be_none: ClassVar[bool] = False
    is_view: bool = False
    narrows: ClassVar[int] = 1
    packs: bool = False
    same_dtype: ClassVar[bool] = False
    native: ClassVar[bool] = False
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
    _saved: ClassVar[Callable[..., Any]]  # `Saved` with its fields by position
    forward_signature: ClassVar[Signature] = Signature()
    backward_signature: ClassVar[Signature] = Signature()

    def __init_subclass__(cls, *, open: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.is_open = open or cls.reference is UnfusedOperation.reference
        if cls.__module__.startswith("seqfuse.ops."):
            checks_arguments(cls)
        own, bases = vars(cls), [base for base in cls.__mro__[1:] if issubclass(base, UnfusedOperation)]
        cls.native = bool(own.get("native"))  # a subclass may have a forward of its own
        if "reference" in own and "autocast" not in own and any(base.is_final for base in bases):
            cls.autocast = None
        if not any(base.is_final for base in bases):  # else an override of `forward`: it runs through that
            check_pass_names(cls, contract=_METHODS)
        if cls.is_open:
            return
        cls.is_final = all(base.is_open for base in bases)
        for name in ("fwd", "bwd"):
            if getattr(cls, name) is getattr(UnfusedOperation, name):
                raise definition_error(cls, f"an operation with a reference needs {name} as well", "class ")
        if cls.Saved is Saved or not issubclass(cls.Saved, Saved):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise definition_error(cls, "an operation needs a class Saved(sf.Saved) of its own", "Saved")
        check_layout(cls, cls.layout)
        cls._saved = staticmethod(maker(cls.Saved))
        cls.forward_signature = Signature.of(cls, "fwd", ("x",), None)
        allowed = frozenset(f"d_{name}" for name in cls.outputs)
        cls.backward_signature = Signature.of(cls, "bwd", ("dy", "saved"), allowed)
        if missing := allowed - set(cls.backward_signature.extras):
            raise definition_error(cls, f"bwd must take {', '.join(sorted(missing))} by keyword", "def bwd")

    reference: ClassVar[Callable[..., Any]] = _unstated("reference")
    """`reference(x, ...)`: the math in plain, differentiable torch; `(y, {output: tensor})` with declared outputs."""

    def reference_with(self, x: Tensor, following: nn.Module) -> Tensor | None:
        """The reference of this operation and the one behind it, where both are one call of torch; else `None`."""
        return None

    def joins(self, following: nn.Module) -> bool:
        """Whether the call of torch that this operation is takes the parameters of the one behind it as well."""
        return False

    def torch_call(self) -> Callable[..., Tensor] | None:
        """The one call of torch that a native operation is: of x and its parameters, in the order of their slots."""
        return self.reference

    fwd: ClassVar[Callable[..., Any]] = _unstated("fwd")
    """`fwd(x, ...)`: `(y, Saved)`, or `(y, {output: tensor}, Saved)`."""

    bwd: ClassVar[Callable[..., Any]] = _unstated("bwd")
    """`bwd(dy, saved, ...)`: `(dx, Grads)`."""

    def own_record(self, seed: Tensor | None) -> Saved | None:
        """What `fwd` saves, where that follows from the configuration and the seed alone: no fusion saves it then.

        By default that is so where `Saved` has no fields. Else `None`.
        """
        return None if self.Saved.fields else self._saved()

    def input_record(self, x: Tensor) -> Saved | None:
        """What `fwd` saves, where that is x and parameters: a pass that runs again for it alone needs no y then.

        By default `None`, which says that `fwd` has to run.
        """
        return None

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The output's shape for an input of this shape; raises `ValueError` saying what was expected."""
        return shape

    @property
    def random(self) -> bool:
        """Whether a call reads its seed now."""
        return self.forward_signature.seed

    @property
    def repeatable(self) -> bool:
        """Whether a pass may run a second time, after a fusion beside it failed: processes exchange nothing in it."""
        return self.redistribution is None

    @property
    def channels(self) -> Mapping[str, str | None]:
        """Channel of each extra input and output; `None` is anonymous, paired like parentheses.

        An extra input that has a default in `fwd` may be left out: it is then not read.
        """
        return {name: name for name in (*self.forward_signature.extras, *self.outputs)}

    @property
    def features(self) -> tuple[int, int] | None:
        """The last dimensions of x and y, where the configuration says them: costs are estimated for these."""
        return None

    @property
    def gemms(self) -> tuple[tuple[int, int], ...]:
        """`in_features` and `out_features` of each GEMM that a recipe quantizes."""
        return ()

    def not_quantized(self, recipe: Any, dtype: torch.dtype | None, arch: str) -> str | None:
        """Why a GPU that has GEMMs for a recipe has none for this operation, which runs in the dtype of x then."""
        return None

    def traffic(self, env: Env, backward: bool) -> Traffic:
        """What a pass launches, reads and writes unfused; the estimated gain of a fusion follows from it.

        By default one kernel, which forward reads x and writes y, and backward reads dy and those of x and y that
        `Saved` names, and writes dx.
        """
        if self.is_view:
            return Traffic(0, 0, 0)
        saved = always_saved(self.Saved) if backward else ()
        return Traffic(1, 1 + ("x" in saved), 1 + ("y" in saved))

    @property
    def y_dtype(self) -> torch.dtype | None:
        """The dtype of y where x says nothing about it, as an embedding does: what comes after is planned for it."""
        return None

    def parameter_slots(self) -> dict[str, tuple[nn.Module, str]]:
        """Where each parameter lives: local name to (owning module, attribute)."""
        slots: dict[str, tuple[nn.Module, str]] = {}
        owner: Any = self
        inside = owner.named_modules() if len(self._modules) else (("", self),)
        for prefix, module in typing.cast(Iterable[tuple[str, nn.Module]], inside):
            if ".parametrizations" in f".{prefix}":
                continue
            names = [name for name, value in module._parameters.items() if value is not None]
            if parametrize.is_parametrized(module):
                names += list(module.parametrizations)  # pyright: ignore[reportArgumentType]
            slots.update({f"{prefix}.{name}".lstrip("."): (module, name) for name in names})
        return slots

    @classmethod
    def example(cls, x: Tensor) -> UnfusedOperation:
        """An instance that accepts `x`, for the test kit."""
        return cls()

    @classmethod
    def examples(cls, x: Tensor) -> tuple[UnfusedOperation, ...]:
        """`example(x)`, and instances with another configuration, which a fusion has to respect or refuse."""
        return (cls.example(x),)


__all__ = ["FusableOperation", "Grads", "Saved", "UnfusedOperation", "field"]
