"""MergedLinear: one GEMM with several weights, whose outputs are concatenated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import operation as sf
from ..casts import lowered
from ..env import autocast_of
from ..maingrad import Accumulated
from ..quantized import Quantized
from ..recipes import Recipe, Role
from ..saved import maker
from . import _lowprecision as low
from ._mm import linear, linear_into, sum_of_mm
from ._parameters import joined, one_gemm, parameter, required, reset_linear
from .linear import HasGEMM, weight_grad

MAX_PARTS = 8
_WEIGHTS = tuple(f"weight_{i}" for i in range(MAX_PARTS))
_BIASES = tuple(f"bias_{i}" for i in range(MAX_PARTS))
_EVERY = frozenset({"x", *_WEIGHTS})


class MergedLinear(HasGEMM, sf.UnfusedOperation):
    """y = [x weight_0^T + bias_0; x weight_1^T + bias_1; ...]: several `Linear`s of one input: q, k, v or gate, up.

    Forward: the parts are concatenated along the last dimension of y. If the weights are adjacent in one storage, and
    so are the biases, it is one GEMM; otherwise one GEMM per part writes a slice of y. Weights are never copied or
    packed.

    Backward: with dy = [dy_0; dy_1; ...], dx = sum of dy_i weight_i;  dweight_i = dy_i^T x;
    dbias_i = sum of dy_i over all tokens.

    x: [*, in_features], y: [*, sum of out_features], weight_i: [out_features[i], in_features],
    bias_i: [out_features[i]].
    Saved: x for the gradients of the weights, the weights (under autocast their casts) for dx. With a recipe they are
    saved in 8 bits, quantized along columns: x is quantized once, each weight and part of dy by itself. If weights
    share a storage and no block of scales spans two parts, one GEMM computes all parts, with the same results.
    Initial values are those of a `torch.nn.Linear` for each part. A new instance has its weights in one storage, also
    after `.to()`.

    Args:
        in_features: last dimension of x.
        out_features: size of each part, one to eight.
        bias: whether the parts have biases: one bool, or one per part.

    Attributes:
        weight_i: the weight of part i; may be the parameter of another module, as with `MergedLinear.of`.
        bias_i: the bias of part i, or `None`; may also be shared.
        parts: the sizes of the parts.
        out_features: their sum.

    Raises:
        ValueError: for no parts, more than eight, or another number of biases.
        InputError: (SF106) if a weight is `None`.
    """

    class Saved(sf.Saved):
        x: Tensor = sf.field(for_=_WEIGHTS)  # [*, in_features]
        weights: tuple[Tensor, ...] = sf.field(for_="x")  # the parameters, or their casts under autocast

    class SavedQuantized(sf.Saved):
        x: Tensor | None = sf.field(for_=_WEIGHTS)  # [M, in_features], 8 bits, quantized down its columns
        x_inverse: Tensor | None = sf.field(for_=_WEIGHTS)  # the inverse of its scales
        weights: tuple[Tensor, ...] = sf.field(for_="x")  # 8 bits, down their columns
        weight_inverses: tuple[Tensor, ...] = sf.field(for_="x")

    costly = True
    separable = True
    same_dtype = True
    autocast = "lower"

    def __init__(
        self,
        in_features: int,
        out_features: Sequence[int],
        bias: bool | Sequence[bool] = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        biases = (bias,) * len(out_features) if not isinstance(bias, Sequence) else tuple(bias)
        self._declare(in_features, tuple(out_features), biases)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        for i, (size, biased) in enumerate(zip(self.parts, biases, strict=True)):
            self.register_parameter(_WEIGHTS[i], nn.Parameter(torch.empty((size, in_features), **made)))
            self.register_parameter(_BIASES[i], nn.Parameter(torch.empty(size, **made)) if biased else None)
        self._lay(_WEIGHTS)
        self._lay(_BIASES)
        self.reset_parameters()

    def _declare(self, in_features: int, parts: tuple[int, ...], biases: Sequence[Any]) -> None:
        if not 1 <= len(parts) <= MAX_PARTS:
            raise ValueError(f"out_features names one to {MAX_PARTS} parts, got {len(parts)}")
        if len(biases) != len(parts):
            raise ValueError(f"expects one answer for the biases or one for each of {len(parts)}, got {len(biases)}")
        self.in_features, self.parts, self.out_features = in_features, parts, sum(parts)
        for name in (*_WEIGHTS, *_BIASES):  # `Saved` is declared for all possible parts
            self.register_parameter(name, None)

    @classmethod
    def of(cls, *linears: nn.Module) -> MergedLinear:
        """Merge `Linear`s of one input into one operation that shares their parameters.

        Args:
            linears: modules with a `weight` [N, K] and a `bias` [N] or `None`, such as `torch.nn.Linear`.

        Raises:
            ValueError: if their input sizes differ.
        """
        self = cls.__new__(cls)
        super().__init__(self)
        weights, biases = ([getattr(linear, name) for linear in linears] for name in ("weight", "bias"))
        sizes = sorted({weight.shape[1] for weight in weights})
        if len(sizes) > 1:
            raise ValueError(f"expects Linears of one input, got inputs of {sizes}")
        self._declare(sizes[0] if sizes else 0, tuple(len(weight) for weight in weights), biases)
        for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            self.register_parameter(_WEIGHTS[i], weight)
            self.register_parameter(_BIASES[i], bias)
        return self

    def reset_parameters(self) -> None:
        """Initialize each part from U(-1/sqrt(in_features), 1/sqrt(in_features)), as in `torch.nn.Linear`."""
        for weight, bias in zip(_WEIGHTS[: len(self.parts)], _BIASES, strict=False):
            reset_linear(self, weight, bias)

    def weights(self) -> tuple[Tensor, ...]:
        """The current weight of each part."""
        held = self._parameters
        names = _WEIGHTS[: len(self.parts)]
        return tuple([required(self, n) if (weight := held.get(n)) is None else weight for n in names])

    def weights_for(self, x: Tensor) -> tuple[Tensor, ...]:
        """The current weights: cast for a GEMM with x under autocast, and as parameters."""
        weights, dtype = self.weights(), x.dtype
        for weight in weights:
            if weight.dtype is not dtype:
                break
        else:
            return weights
        whole = joined(weights)
        if whole is None:
            return tuple([lowered(weight) for weight in weights])
        cast_to = lowered(whole, parts=weights)
        return weights if cast_to is whole else cast_to.split_with_sizes(self.parts)

    def biases(self) -> tuple[Tensor | None, ...]:
        """The current bias of each part."""
        held = self._parameters
        return tuple([held[n] if n in held else parameter(self, n) for n in _BIASES[: len(self.parts)]])

    def _lay(self, names: Iterable[str]) -> None:
        """Move these parameters into one storage, adjacent to each other."""
        found = self._own(names)
        if len(found) < 2 or joined(found) is not None or any(type(p) is not nn.Parameter for p in found):
            return
        whole = torch.cat([p.detach() for p in found])
        for p, part in zip(found, whole.split_with_sizes([len(p) for p in found]), strict=True):
            p.data = part

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """As in torch; weights that shared a storage share one afterwards, too."""
        groups = self._laid()
        super()._apply(fn, recurse)  # pyright: ignore[reportUnknownMemberType]
        for names in groups:
            self._lay(names)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_groups": self._laid()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        groups = state.pop("_groups", ())
        super().__setstate__(state)  # pyright: ignore[reportUnknownMemberType]
        for names in groups:
            self._lay(names)

    def _laid(self) -> list[tuple[str, ...]]:
        """The names of the parameters, weights or biases, that share a storage."""
        return [names for names in (_WEIGHTS, _BIASES) if joined(self._own(names)) is not None]

    def _own(self, names: Iterable[str]) -> list[nn.Parameter]:
        return [p for name in names if (p := self._parameters.get(name)) is not None]

    def reference(self, x: Tensor, recipe: Recipe | None = None) -> Tensor:
        pairs = zip(self.weights(), self.biases(), strict=True)
        if recipe is None:
            return torch.cat([F.linear(x, *pair) for pair in pairs], -1)
        from ._lowprecision_reference import linear_by_reference

        parts = [(linear_by_reference(x, weight, recipe), bias) for weight, bias in pairs]
        return torch.cat([y if bias is None else y + bias.to(y.dtype) for y, bias in parts], -1)

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
        own = self.weights_for(x)
        return self.gemm(x, own, self.biases()), self._saved(x, own)

    def gemm_weights(self, recipe: Recipe) -> list[Tensor]:
        """As in `Linear`: one weight, or one per part."""
        weights, one = self.weights(), self._one_gemm(recipe)
        if one is None:
            return [lowered(weight, always=True) for weight in weights]
        return [lowered(one[0], always=True, parts=weights)]

    quantized_weights = staticmethod(low.quantized_weights)

    def _one_gemm(self, recipe: Recipe) -> tuple[Tensor, Tensor | None] | None:
        return one_gemm(self.weights(), self.biases()) if low.ends_with_blocks(recipe, self.parts) else None

    def _quantized(
        self, x: Tensor | Quantized, recipe: Recipe, needs: frozenset[str], weights: low.Weights | None
    ) -> tuple[Tensor, SavedQuantized]:
        rows = x.reshape(-1, self.in_features) if isinstance(x, Tensor) else x
        record, kept, one = bool(needs), self.scale_for, self._one_gemm(recipe)
        qx, x_down = low.quantized(
            rows, recipe, "x", columns=not needs.isdisjoint(_WEIGHTS), kept=kept("x", rows, recipe, record)
        )
        assert qx is not None
        if weights is None:
            weights = [
                low.quantized(w, recipe, "weight", columns="x" in needs, kept=kept(name, w, recipe, record))
                for name, w in zip(_WEIGHTS, self.gemm_weights(recipe), strict=False)
            ]
        biases = self.biases() if one is None else [one[1]]
        pairs = [(cast(low.Operand, along), bias) for (along, _), bias in zip(weights, biases, strict=True)]
        ys = [low.linear_in_8_bits(qx, weight, recipe, x.dtype, bias) for weight, bias in pairs]
        y = ys[0] if len(ys) == 1 else torch.cat(ys, 1)
        below = [down for _, down in weights if down is not None]
        data, inverses = tuple([one.data for one in below]), tuple([one.inverse for one in below])
        return y.view(*x.shape[:-1], self.out_features), _saved_quantized(*(x_down or (None, None)), data, inverses)

    def input_record(self, x: Tensor) -> Saved:
        return self._saved(x, self.weights_for(x))

    def gemm(self, x: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor | None, ...]) -> Tensor:
        """Compute y by one GEMM, or by one GEMM per part into its slice."""
        one = one_gemm(weights, biases)
        if one is not None:
            return linear(x, *one)
        if torch.compiler.is_compiling() or x.is_meta:  # `out=` supports no slice or other dtype there
            return torch.cat([linear(x, *pair) for pair in zip(weights, biases, strict=True)], -1)
        cast_to = autocast_of(x.device.type)
        if cast_to is not None and x.dtype is not torch.float64:  # autocast does not apply to a GEMM into a slice
            x, weights = x.to(cast_to), tuple([weight.to(cast_to) for weight in weights])
            biases = tuple([None if bias is None else bias.to(cast_to) for bias in biases])
        y = x.new_empty(*x.shape[:-1], self.out_features)
        rows, out = x.reshape(-1, self.in_features), y.view(-1, self.out_features)
        for weight, bias, part in zip(weights, biases, out.split_with_sizes(self.parts, 1), strict=True):
            linear_into(part, rows, weight, bias)
        return y

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
            return self._quantized_grads(dy, cast(MergedLinear.SavedQuantized, saved), recipe, needs, main_grads)
        assert isinstance(dy, Tensor)
        assert isinstance(saved, MergedLinear.Saved)
        rows = dy if dy.ndim == 2 else dy.reshape(-1, self.out_features)
        dx = None
        if "x" in needs:
            dx = self.dgrad(rows, saved.weights)
            dx = dx if rows is dy else dx.view(*dy.shape[:-1], self.in_features)
        return dx, self.grads(rows, saved, needs, main_grads)

    def _quantized_grads(
        self,
        dy: Tensor | Quantized,
        saved: SavedQuantized,
        recipe: Recipe,
        needs: frozenset[str],
        main_grads: dict[str, Tensor] | None,
    ) -> tuple[Tensor | None, sf.Grads]:
        names, grads = _WEIGHTS[: len(self.parts)], dict[str, Tensor | Accumulated | None]()
        if isinstance(dy, Quantized):  # then no bias needs a gradient
            rows, parts = dy, low.split(dy, self.parts)
        else:
            rows = dy.reshape(-1, self.out_features)
            parts = rows.split_with_sizes(self.parts, 1)
            for d, bias in zip(parts, _BIASES, strict=False):
                if bias in needs:
                    grads[bias] = d.sum(0)
        quantized = not needs.isdisjoint(_EVERY)
        together = "x" in needs and len(saved.weights) == 1 < len(parts)
        groups = [(rows, names)] if together else [(d, (name,)) for d, name in zip(parts, names, strict=True)]
        dx, last = None, len(groups) - 1
        for i, (d, group) in enumerate(groups):
            kept = self.scale_for(f"dy_{i}", d, recipe, True) if quantized else None
            columns = not needs.isdisjoint(group)
            along, down = low.quantized(d, recipe, "dy", rows="x" in needs, columns=columns, kept=kept)
            if along is not None:  # summed in float32, and rounded once
                own = low.operand(saved.weights[i], saved.weight_inverses[i])
                dx = low.dgrad_in_8_bits(along, own, recipe, dy.dtype if i == last else low.wide(dy.dtype), dx)
            if down is not None:
                x = low.operand(saved.x, saved.x_inverse)
                for name, own in zip(group, low.apart(down, self.parts) if together else [down], strict=True):
                    if name in needs:
                        buffer = main_grads.pop(name, None) if main_grads else None
                        grads[name] = low.weight_grad_in_8_bits(own, x, recipe, dy.dtype, buffer)
        return None if dx is None else dx.view(*dy.shape[:-1], self.in_features), grads

    def dgrad(self, dy: Tensor, weights: tuple[Tensor, ...], addend: Tensor | None = None) -> Tensor:
        """Compute addend + sum of dy_i weight_i."""
        rows = dy if dy.ndim == 2 else dy.reshape(-1, self.out_features)
        if dy.is_complex():
            weights = tuple([weight.conj() for weight in weights])
        whole = joined(weights)
        apart = zip(rows.split_with_sizes(self.parts, 1), weights, strict=True)
        pairs = [*apart] if whole is None else [(rows, whole)]
        cast_to = autocast_of(dy.device.type)
        if cast_to is not None and dy.dtype is not torch.float64:
            pairs = [(d.to(cast_to), weight.to(cast_to)) for d, weight in pairs]
        dx = sum_of_mm(pairs, None if addend is None else addend.reshape(-1, self.in_features))
        return dx if rows is dy else dx.view(*dy.shape[:-1], self.in_features)

    def grads(
        self, dy: Tensor, saved: Saved, needs: frozenset[str], main_grads: dict[str, Tensor] | None, slot: str = ""
    ) -> dict[str, Tensor | Accumulated | None]:
        """Gradients of the parameters, with the prefix of a fusion's slot if given."""
        grads: dict[str, Tensor | Accumulated | None] = {}
        rows = dy if dy.ndim == 2 else dy.reshape(-1, self.out_features)
        parts = rows.split_with_sizes(self.parts, 1)
        x: Tensor | None = None
        for d, bias in zip(parts, _BIASES, strict=False):
            if (name := slot + bias) in needs:
                grads[name] = d.sum(0)
        for d, weight in zip(parts, _WEIGHTS, strict=False):  # last: after an error before it, a fallback may still run
            if (name := slot + weight) in needs:
                if x is None:
                    x = saved.x.conj() if dy.is_complex() else saved.x
                    x = x if x.ndim == 2 else x.reshape(-1, self.in_features)
                grads[name] = weight_grad(d, x, main_grads.pop(name, None) if main_grads else None)
        return grads

    def scaled(self) -> tuple[str, ...]:
        numbers = range(len(self.parts))
        return ("x", *_WEIGHTS[: len(self.parts)], *(f"dy_{i}" for i in numbers))

    def wants_quantized(self, role: Role, recipe: Recipe, needs: frozenset[str]) -> tuple[bool, bool]:
        """As in `Linear`, except for a dy whose parts have separate scales or are summed for a bias."""
        weights = not needs.isdisjoint(_WEIGHTS)
        if role == "x":
            return True, weights
        whole = low.ends_with_blocks(recipe, self.parts) and needs.isdisjoint(_BIASES)
        return whole and "x" in needs, whole and weights

    @property
    def gemms(self) -> tuple[tuple[int, int], ...]:
        return tuple([(self.in_features, size) for size in self.parts])

    @classmethod
    def example(cls, x: Tensor) -> MergedLinear:
        # Like gate and up.
        return cls(x.shape[-1], (x.shape[-1] + 3,) * 2, device=x.device, dtype=x.dtype)

    @classmethod
    def examples(cls, x: Tensor) -> tuple[MergedLinear, ...]:
        apart = cls.of(*(nn.Linear(x.shape[-1], 4, i > 0, x.device, x.dtype) for i in range(2)))
        # One part without a bias, like the keys in some models.
        three = cls(x.shape[-1], (x.shape[-1] + 3, 2, 4), (True, False, True), device=x.device, dtype=x.dtype)
        return (cls.example(x), apart, three)

    def extra_repr(self) -> str:
        owned = [self._parameters.get(name, self) is not None for name in _BIASES[: len(self.parts)]]
        return f"{self.in_features}, {self.parts}, bias={owned[0] if len(set(owned)) == 1 else tuple(owned)}"


_saved_quantized = maker(MergedLinear.SavedQuantized)
saved_merged = maker(MergedLinear.Saved)
"""`saved_merged(x, weights)`: the `Saved` of a `MergedLinear`."""
