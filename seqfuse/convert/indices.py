"""Tensors as functions of the indices of their elements: integers that grow in steps, and choices by their signs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import SymInt, Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true


class Index(NamedTuple):
    """Integers: `start`, and `steps[d]` times the index in dimension d, which is counted from the last one, -1."""

    start: Any
    steps: dict[int, int]

    def plus(self, other: Index, factor: int = 1) -> Index:
        """The sum, the other times a factor."""
        steps = {d: self.steps.get(d, 0) + factor * other.steps.get(d, 0) for d in {*self.steps, *other.steps}}
        return Index(self.start + factor * other.start, {d: step for d, step in steps.items() if step})

    def is_natural(self, shape: Any) -> bool:
        """Whether none is negative in a tensor of this shape."""
        least = self.start + sum(step * (shape[d] - 1) for d, step in self.steps.items() if step < 0)
        return statically_known_true(least >= 0)


class Choice(NamedTuple):
    """The number `no` where one of `where` is negative; elsewhere `yes` or, if not `exact`, one of both."""

    where: tuple[Index, ...]
    yes: Tensor
    no: Tensor
    exact: bool = True

    @property
    def is_fixed(self) -> bool:
        """Whether it is `yes` everywhere."""
        return not self.where and self.exact

    @property
    def spellings(self) -> list[Choice]:
        """The same in other words: `yes` where one is negative."""
        if len(self.where) != 1 or not self.exact:
            return [self]
        return [self, Choice((Index(-1, {}).plus(self.where[0], -1),), self.no, self.yes)]


Known = Index | Choice | None


def fixed(size: Any) -> int | None:
    """A size as a number, if it is the same in all calls."""
    given: Any = size
    return given.node.maybe_as_int() if isinstance(size, SymInt) else given


def constant(number: float, dtype: torch.dtype) -> Choice:
    """One number everywhere."""
    value = torch.full((), number, dtype=dtype, device="cpu")
    return Choice((), value, value)


def where_natural(x: Index) -> Choice:
    """True where an index is not negative."""
    return Choice((x,), constant(True, torch.bool).yes, constant(False, torch.bool).yes)


def mapped(found: Known, way: Callable[[Index], Index | None]) -> Known:
    """A value with other indices."""
    if not isinstance(found, Choice):
        return None if found is None else way(found)
    where = [way(limit) for limit in found.where]
    return None if None in where else found._replace(where=tuple(cast("list[Index]", where)))


def in_shape(x: Index, shape: Any) -> Index:
    """The same in a tensor of this shape: what goes along a dimension of size 1 stays where it begins."""
    return Index(x.start, {d: step for d, step in x.steps.items() if fixed(shape[d]) != 1})


def placed(x: Index, place: dict[int, int]) -> Index | None:
    """The same along other dimensions."""
    known = x.steps.keys() <= place.keys()
    return Index(x.start, {place[d]: step for d, step in x.steps.items()}) if known else None


def chosen(c: Choice | None, x: Choice | None, y: Choice | None) -> Choice | None:
    """`torch.where` where one of both is one number, or the number that the other is where it is not chosen."""
    for condition in () if c is None else c.spellings:
        inside, outside = (x, y) if condition.yes else (y, x)
        if condition.is_fixed or inside is None:
            return inside
        for part in inside.spellings:
            if outside is not None and outside.is_fixed and (part.is_fixed or part.no == outside.yes):
                where = (*part.where, *condition.where)
                return Choice(where, part.yes, outside.yes, part.exact and condition.exact)
    return None


def looked_up(x: Index, places: list[Known], shape: Any) -> Index | None:
    """Element by element, at the places that other indices say."""
    found = Index(x.start, {})
    for d, step in x.steps.items():
        place = places[d]
        if not isinstance(place, Index) or not place.is_natural(shape):
            return None
        found = found.plus(place, step)
    return found


def sliced(x: Index, index: list[Any], dims: int) -> Index | None:
    """The part that basic indices say, one for each of so many dimensions and `None` for each new one."""
    start, d = x.start, -dims
    steps: list[int] = []
    for i in index:
        step = 0 if i is None else x.steps.get(d, 0)
        begin: Any = getattr(i, "start", i) or 0  # of a slice, or the index itself
        if step and not (isinstance(begin, int) and begin >= 0 and getattr(i, "step", 1) in (None, 1)):
            return None
        start += step * begin if step else 0
        steps += [] if isinstance(i, int) else [step]
        d += i is not None
    return Index(start, {d - len(steps): step for d, step in enumerate(steps) if step})
