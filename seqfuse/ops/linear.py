"""Linear: a GEMM with a weight, and `Bias`, which adds the bias of a `Linear` in a sequence."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import operation as sf
from ..casts import dtype_of, lowered
from ..env import Env, autocast_of
from ..errors import InputError
from ..group import Group, ParameterShard
from ..hardware import FLOAT32_SLOWER
from ..maingrad import Accumulated, accumulated
from ..quantized import Quantized
from ..recipes import Recipe, Role
from ..saved import maker
from ..scaling import Scaled
from . import _lowprecision as low
from ._mm import linear, mm
from ._parameters import divide, required, reset_linear
from ._tensors import check_last, rows_summed
from .collectives import AllGather, AllReduce, CopyToTensorParallel, ReduceScatter


class Bias(sf.UnfusedOperation):
    """y = x + bias.

    Backward: dx = dy;  dbias = sum of dy over all tokens, in float32 for 16-bit dtypes.

    x, y: [*, size], bias: [size].  Saved: nothing.
    Dtypes promote as in torch. Under autocast the bias is cast to the dtype of x, so that y of a bf16 GEMM is bf16, as
    in `torch.nn.Linear`.

    Args:
        size: length of the last dimension.

    Attributes:
        bias: the parameter. `Bias.of(owner)` is a `Bias` without a parameter that reads `owner.bias`, or an equal
            fraction of it if several processes each add a fraction before an all-reduce; the gradient is still that of
            the whole bias.
    """

    class Saved(sf.Saved):
        """Empty: the backward pass only reads dy."""

    native = True
    autocast = "same"

    # A weak reference: the owner holds its member strongly, and callers of a member hold the owner as well. In a tuple,
    # because torch 2.11 cannot trace a branch on a reference.
    _owner: tuple[weakref.ref[nn.Module], ...] = ()
    _parts = 1

    def __init__(self, size: int, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.size = size
        self.bias = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.reset_parameters()

    @classmethod
    def of(cls, owner: nn.Module, size: int, parts: int = 1) -> Bias:
        """A `Bias` that reads `owner.bias`, or one of its `parts`, when `owner` is expanded."""
        self = cls.__new__(cls)
        super().__init__(self)
        self.size = size
        self._owner, self._parts = (weakref.ref(owner),), parts
        return self

    def reset_parameters(self) -> None:
        """Initialize with zeros."""
        nn.init.zeros_(self.bias)

    def __getattr__(self, name: str) -> Any:
        if name == "bias" and self._owner:
            return self.read()
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "bias" and self._owner:
            setattr(self._holder(), name, value)
        else:
            super().__setattr__(name, value)

    def belongs_to(self, owner: nn.Module) -> bool:
        """Whether it reads the bias of this module."""
        return self._holder() is owner

    def _holder(self) -> Any:
        """The module whose bias this is."""
        return self._owner[0]() if self._owner else self

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {**state, "_owner": self._holder()} if self._owner else state

    def __setstate__(self, state: dict[str, Any]) -> None:
        owner = state.get("_owner")
        state = state if owner is None else {**state, "_owner": (weakref.ref(owner),)}
        super().__setstate__(state)  # pyright: ignore[reportUnknownMemberType]

    def parameter_slots(self) -> dict[str, tuple[nn.Module, str]]:
        return {"bias": (self._holder(), "bias")} if self._owner else super().parameter_slots()

    def read(self) -> Tensor:
        """Fast access to `bias`, for passes that read it often."""
        own: dict[str, Any] = self.__dict__
        owner = own.get("_owner")
        module: Any = owner[0]() if owner else self
        bias = module._parameters.get("bias")
        if bias is None:
            bias = required(module, "bias")
        if own.get("_parts", 1) > 1:
            bias = cast(Tensor, _Part.apply(bias, self._parts))  # pyright: ignore[reportUnknownMemberType]
        return bias

    def held(self) -> Mapping[str, Tensor | None]:
        """The owner's dictionary of parameters while `bias` is one of them; empty for a fraction of the bias."""
        return self._holder().__dict__["_parameters"] if self._parts == 1 else {}

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the bias, without reading it."""
        return dtype_of(self._holder(), "bias")

    def _addend(self, x: Tensor) -> Tensor:
        bias = self.read()
        if bias.dtype is not x.dtype and autocast_of(x.device.type) is not None:
            return bias.to(x.dtype)
        return bias

    def reference(self, x: Tensor) -> Tensor:
        return x + self._addend(x)

    def torch_call(self) -> Callable[..., Tensor] | None:
        held = self.held().get("bias")
        return None if held is None else torch.add

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        return x + self._addend(x), self._saved()

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[Tensor | None, sf.Grads]:
        dbias = None
        if "bias" in needs:
            dbias = dy.sum(0) if dy.ndim == 2 else rows_summed(dy, 1)
            if dbias.is_complex() and not self.read().is_complex():
                dbias = dbias.real.contiguous()
        return (dy if "x" in needs else None), {"bias": dbias}

    @property
    def features(self) -> tuple[int, int]:
        return self.size, self.size

    def traffic(self, env: Env, backward: bool) -> sf.Traffic:
        return sf.Traffic(x=0 if backward else 1)  # dx is dy itself

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        check_last(shape, self.size)
        return shape

    @classmethod
    def example(cls, x: Tensor) -> Bias:
        self = cls(x.shape[-1], x.device, x.dtype)
        nn.init.normal_(self.bias)
        return self

    def extra_repr(self) -> str:
        return f"{self.size}"


class _Part(torch.autograd.Function):
    """bias / parts, for a sum over processes that adds the bias once; its gradient is that of the whole bias."""

    @staticmethod
    def forward(bias: Tensor, parts: int) -> Tensor:
        return bias / parts

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *douts: Any) -> Any:
        return douts[0], None


_EVERY = frozenset({"x", "weight"})
_NOTHING = None, None


class _LinearOfTorch(nn.Linear):
    """Lets `isinstance(operation, torch.nn.Linear)` hold, without torch's parameters and initialization."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


class HasGEMM(Scaled):
    """Mixin for operations whose y is a GEMM of x along its last dimension."""

    in_features: int
    out_features: int

    @property
    def features(self) -> tuple[int, int]:
        return self.in_features, self.out_features

    @property
    def gemms(self) -> tuple[tuple[int, int], ...]:
        return (self.features,)

    def scaled(self) -> tuple[str, ...]:
        return "x", "weight", "dy"

    def traffic(self, env: Env, backward: bool) -> sf.Traffic:
        slower = FLOAT32_SLOWER if env.dtype.itemsize == 4 and env.device != "cpu" else 1
        flops = 2.0 * env.tokens * self.in_features * self.out_features * slower
        return sf.Traffic(2, 2, 2, flops) if backward else sf.Traffic(flops=flops)  # each of two GEMMs reads dy

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        check_last(shape, self.in_features)
        return (*shape[:-1], self.out_features)


class Linear(HasGEMM, sf.UnfusedOperation, _LinearOfTorch):  # pyright: ignore[reportIncompatibleMethodOverride]
    """y = x weight^T + bias; in a sequence the GEMM, followed by `Bias`.

    Forward: y = x weight^T. Called by itself it adds `bias`. In a sequence it expands to this GEMM and a `Bias` that
    reads `linear.bias`, so `Linear(bias=True)` and `Linear(bias=False), Bias` match the same fusions.

    Backward: dx = dy weight;  dweight = dy^T x over all tokens; with a `weight.main_grad` it is added to that in
    float32.

    x: [*, in_features], y: [*, out_features], weight: [out_features, in_features], bias: [out_features].
    Saved: x for dweight, weight for dx; each only if that gradient is needed. With a recipe GEMM operands are quantized
    as by `recipes.quantize`, and x and weight are saved in 8 bits, quantized along columns.
    State-dict keys, arguments and initial values are those of `torch.nn.Linear`. It passes `isinstance` checks for it,
    so torch's `parallelize_module` styles accept it.

    With `parallel` each process of a group holds a shard of the weight. `"column"`: sharded along `out_features`, as is
    the bias; x is replicated, y a feature shard; it expands to `CopyToTensorParallel`, GEMM, `Bias`. `"row"`: sharded
    along `in_features`; x is a feature shard, y replicated; it expands to GEMM, `AllReduce`, `Bias`. With a
    `sequence_dim` the replicated x or y is a sequence shard, and `AllGather` and `ReduceScatter` replace
    `CopyToTensorParallel` and `AllReduce`. In a group of one process there are no collectives.

    Args:
        in_features: last dimension of x, over all processes.
        out_features: last dimension of y, over all processes.
        bias: whether there is a bias.
        parallel: `"column"` or `"row"`.
        group: a process group or a `DeviceMesh` of one dimension.
        parts: sizes along `out_features` that are sharded separately, such as queries, keys and values, or `[gate;
            up]`.
        sequence_dim: the token dimension of x or y that is sharded (sequence parallel).
        bias_last: `False`: with `"row"` each process adds an equal fraction of the bias in its GEMM, before the sum.
            For a power of two of processes this is exact up to the order of the sum.

    Attributes:
        in_features: input size of the GEMM of this process.
        out_features: output size of the GEMM of this process.

    Raises:
        InputError: (SF101) for features that the number of processes does not divide, (SF106) for another `parallel` or
            a missing group.
    """

    class Saved(sf.Saved):
        x: Tensor = sf.field(for_="weight")  # [*, in_features]
        weight: Tensor = sf.field(for_="x")  # [out_features, in_features], the parameter, or its cast under autocast

    class SavedQuantized(sf.Saved):
        x: Tensor | None = sf.field(for_="weight")  # [M, in_features], 8 bits, quantized down its columns
        x_inverse: Tensor | None = sf.field(for_="weight")  # the inverse of its scales
        weight: Tensor | None = sf.field(for_="x")  # [out_features, in_features], 8 bits, down its columns
        weight_inverse: Tensor | None = sf.field(for_="x")

    native = True
    costly = True
    separable = True
    same_dtype = True
    autocast = "lower"
    bias: nn.Parameter | None
    _member: tuple[Bias, ...]  # a tuple, so that it is not registered as a submodule
    _meets: tuple[sf.UnfusedOperation, ...] = ()
    parallel: Literal["column", "row"] | None = None
    bias_last = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        parallel: Literal["column", "row"] | None = None,
        group: Any = None,
        parts: Sequence[int] | None = None,
        sequence_dim: int | None = None,
        bias_last: bool = True,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty((out_features, in_features), device=device, dtype=dtype))
        owned = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", owned)
        self._member = (Bias.of(self, out_features),)
        self.reset_parameters()
        if parallel is not None:
            if group is None:
                raise InputError(f"parallel={parallel!r} needs a group", code="SF106", operation="Linear")
            self.divide(parallel, group, parts=parts, sequence_dim=sequence_dim, bias_last=bias_last)

    def reset_parameters(self) -> None:
        """Initialize from U(-1/sqrt(in_features), 1/sqrt(in_features)), as in `torch.nn.Linear`."""
        reset_linear(self)

    def divided(
        self, parallel: Literal["column", "row"], group: Group, parts: Sequence[int] | None = None
    ) -> dict[str, ParameterShard]:
        """How the parameters would be sharded over a group; raises if they cannot be."""
        wrong: dict[str, Any] = {"operation": "Linear"}
        if parallel not in ("column", "row"):
            raise InputError(f'parallel must be "column" or "row", got {parallel!r}', code="SF106", **wrong)
        if self.shards:
            raise InputError("it is divided among processes already", code="SF106", **wrong)
        column = parallel == "column"
        sizes = tuple(parts or (self.out_features if column else self.in_features,))
        if parts is not None and (not column or sum(parts) != self.out_features):
            message = f"parts are sizes of a column that sum to its {self.out_features} features, got {sizes}"
            raise InputError(message, code="SF101", **wrong)
        if any(size % group.size for size in sizes):
            what = "out_features" if column else "in_features"
            given = sizes[0] if len(sizes) == 1 else f"{sizes} together"
            message = f"expects {what} that {group.size} processes divide, got {given}"
            raise InputError(message, code="SF101", **wrong)
        shards = {"weight": ParameterShard(group, 0 if column else 1, sizes)}
        if column and self.bias is not None:
            shards["bias"] = ParameterShard(group, 0, sizes)
        return shards

    def divide(
        self,
        parallel: Literal["column", "row"],
        group: Any,
        *,
        parts: Sequence[int] | None = None,
        sequence_dim: int | None = None,
        bias_last: bool = True,
    ) -> None:
        """Shard the parameters in place; the arguments are those of the class."""
        group = Group(group)
        shards = self.divided(parallel, group, parts)
        self.parallel, self.bias_last = parallel, bias_last
        if group.size == 1:
            return
        divide(self, shards)
        if parallel == "column":
            self.out_features //= group.size
            meets = CopyToTensorParallel(group) if sequence_dim is None else AllGather(group, sequence_dim)
        else:
            self.in_features //= group.size
            meets = AllReduce(group) if sequence_dim is None else ReduceScatter(group, sequence_dim)
        self._meets = (meets,)
        self._member = (self._bias(),)

    def _bias(self) -> Bias:
        rows = self._meets and isinstance(self._meets[0], ReduceScatter)
        size = self.shards["weight"].group.size if self.shards else 1
        member = Bias.of(self, self.out_features, 1 if self.bias_last or self.parallel != "row" else size)
        if rows and self.bias_last:
            member.sum_over = self.shards["weight"].group
        return member

    def expand(self) -> tuple[nn.Module, ...]:
        # A parametrized bias is no longer registered; reading it would evaluate it.
        member = () if self._parameters.get("bias", self) is None else self._member
        if member and not member[0].belongs_to(self):  # a shallow replica
            member = self._member = (self._bias(),)
        if self.parallel != "row":
            return (*self._meets, self, *member)
        return (self, *self._meets, *member) if self.bias_last else (self, *member, *self._meets)

    def reference(self, x: Tensor, recipe: Recipe | None = None) -> Tensor:
        if recipe is None:
            return F.linear(x, self.weight)
        from ._lowprecision_reference import linear_by_reference

        return linear_by_reference(x, self.weight, recipe)

    def joins(self, following: nn.Module) -> bool:
        return isinstance(following, Bias) and following.belongs_to(self)

    def torch_call(self) -> Callable[..., Tensor] | None:
        return None if self._parameters.get("weight") is None else F.linear

    def reference_with(self, x: Tensor, following: nn.Module) -> Tensor | None:
        return F.linear(x, self.weight, cast(Bias, following).read()) if self.joins(following) else None

    def fwd(
        self,
        x: Tensor | Quantized,
        *,
        recipe: Recipe | None = None,
        needs: frozenset[str] = _EVERY,
        weights: low.Weights | None = None,
    ) -> tuple[Tensor, Saved | SavedQuantized]:
        if recipe is not None:
            return self._quantized(x, recipe, needs, weights)
        assert isinstance(x, Tensor)
        weight = self.weight_for(x)
        return linear(x, weight), self._saved(x, weight)

    def gemm_weights(self, recipe: Recipe) -> list[Tensor]:
        """The weights of its GEMMs; each is quantized by itself."""
        return [lowered(required(self, "weight"), always=True)]

    quantized_weights = staticmethod(low.quantized_weights)

    def _quantized(
        self, x: Tensor | Quantized, recipe: Recipe, needs: frozenset[str], weights: low.Weights | None
    ) -> tuple[Tensor, SavedQuantized]:
        rows, record = _rows(x), bool(needs)
        kept = self.scale_for("x", rows, recipe, record)
        qx, x_down = low.quantized(rows, recipe, "x", columns="weight" in needs, kept=kept)
        if weights is None:
            (weight,) = self.gemm_weights(recipe)
            kept = self.scale_for("weight", weight, recipe, record)
            weights = [low.quantized(weight, recipe, "weight", columns="x" in needs, kept=kept)]
        ((qweight, weight_down),) = weights
        assert qx is not None
        assert qweight is not None
        y = low.linear_in_8_bits(qx, qweight, recipe, x.dtype)
        saved = _saved_quantized(*(x_down or _NOTHING), *(weight_down or _NOTHING))
        return y.view(*x.shape[:-1], y.shape[1]), saved

    def input_record(self, x: Tensor) -> Saved:
        return self._saved(x, self.weight_for(x))

    def weight_for(self, x: Tensor) -> Tensor:
        """The current weight: cast for a GEMM with x under autocast, and as a parameter."""
        found = self._parameters.get("weight")
        weight: Tensor = required(self, "weight") if found is None else found
        return weight if weight.dtype is x.dtype else lowered(weight)

    def bwd(
        self,
        dy: Tensor | Quantized,
        saved: Saved | SavedQuantized,
        *,
        needs: frozenset[str],
        main_grads: dict[str, Tensor] | None = None,
        recipe: Recipe | None = None,
    ) -> tuple[Tensor | None, sf.Grads]:
        if recipe is not None:
            return self._quantized_grads(dy, cast(Linear.SavedQuantized, saved), recipe, needs, main_grads)
        assert isinstance(dy, Tensor)
        assert isinstance(saved, Linear.Saved)
        flat, conjugate = dy.ndim == 2, dy.dtype.is_complex
        rows = dy if flat else _rows(dy)
        dx = dweight = None
        if "x" in needs:
            weight = saved.weight.conj() if conjugate else saved.weight
            dx = mm(rows, weight)
            dx = dx if flat else dx.view(*dy.shape[:-1], weight.shape[1])
        if "weight" in needs:
            x = saved.x.conj() if conjugate else saved.x
            buffer = main_grads.pop("weight", None) if main_grads else None
            dweight = mm(rows.mT, x if flat else _rows(x)) if buffer is None else weight_grad(rows, x, buffer)
        return dx, {"weight": dweight}

    def _quantized_grads(
        self,
        dy: Tensor | Quantized,
        saved: SavedQuantized,
        recipe: Recipe,
        needs: frozenset[str],
        main_grads: dict[str, Tensor] | None,
    ) -> tuple[Tensor | None, sf.Grads]:
        rows, dx, dweight = _rows(dy), None, None
        kept = None if needs.isdisjoint(_EVERY) else self.scale_for("dy", rows, recipe, True)
        along, down = low.quantized(rows, recipe, "dy", rows="x" in needs, columns="weight" in needs, kept=kept)
        if along is not None:
            dx = low.dgrad_in_8_bits(along, low.operand(saved.weight, saved.weight_inverse), recipe, dy.dtype)
            dx = dx.view(*dy.shape[:-1], dx.shape[1])
        if down is not None:
            x, buffer = low.operand(saved.x, saved.x_inverse), main_grads.pop("weight", None) if main_grads else None
            dweight = low.weight_grad_in_8_bits(down, x, recipe, dy.dtype, buffer)
        return dx, {"weight": dweight}

    def wants_quantized(self, role: Role, recipe: Recipe, needs: frozenset[str]) -> tuple[bool, bool]:
        """Whether a tensor is read along rows and columns if the preceding kernel quantizes it."""
        return role == "x" or "x" in needs, "weight" in needs

    @classmethod
    def example(cls, x: Tensor) -> Linear:
        # Not square, so a transposed weight does not fit.
        return cls(x.shape[-1], x.shape[-1] + 3, device=x.device, dtype=x.dtype)

    def extra_repr(self) -> str:
        text = f"{self.in_features}, {self.out_features}, bias={self._parameters.get('bias', self) is not None}"
        return text + (f", parallel={self.parallel!r}" if self.parallel else "")


_saved_quantized = maker(Linear.SavedQuantized)
saved_linear = maker(Linear.Saved)
"""`saved_linear(x, weight)`: the `Saved` of a `Linear`."""


def weight_grad(dy: Tensor, x: Tensor, main_grad: Tensor | None = None, factor: float = 1.0) -> Tensor | Accumulated:
    """The gradient of a weight, factor dy^T x over all rows, or `accumulated` where it was added to `main_grad`.

    The sum is accumulated in the dtype of `main_grad`, float32 or float64; it is not rounded to the dtype of dy first.
    dy: [*, N], x: [*, K], dweight, main_grad: [N, K].
    """
    dy, x = dy if dy.ndim == 2 else _rows(dy), x if x.ndim == 2 else _rows(x)
    if main_grad is None:
        return mm(dy.mT, x, factor)
    device, dtype = dy.device.type, main_grad.dtype
    cast = autocast_of(device)
    if cast is not None:  # autocast does not apply to in-place GEMMs
        dy, x = dy.to(cast), x.to(cast)
    if device == "cuda" and torch.version.hip is None and dy.dtype is not dtype and dy.dtype is x.dtype:
        torch.addmm(main_grad, dy.t(), x, alpha=factor, out_dtype=dtype, out=main_grad)
    else:
        main_grad.addmm_(dy.to(dtype).t(), x.to(dtype), alpha=factor)
    return accumulated


def _rows(x: Any) -> Any:
    if isinstance(x, Quantized) or x.ndim == 2:
        return x
    return x.flatten(0, -2) if x.ndim > 2 else x.unsqueeze(0)
