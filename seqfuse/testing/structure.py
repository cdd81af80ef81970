"""Checks before numbers are compared: names, storages, bits, and tensors that must not be written."""

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor

Tree = Tensor | Mapping[str, "Tree"] | Sequence["Tree"] | None


def copied_module(module: Any) -> Any:
    """A deep copy that does not walk the ten empty hook dictionaries of each module, half of a copy's time."""
    attributes: list[dict[str, Any]] = [vars(inner) for inner in module.modules()]
    held = [value for of_one in attributes for value in of_one.values()]
    empty: dict[int, Any] = {
        id(value): type(value)() for value in held if type(value) in (dict, OrderedDict) and not value
    }
    return copy.deepcopy(module, empty)


def named_tensors(tree: Tree, name: str = "") -> Iterator[tuple[str, Tensor | None]]:
    """Leaves of nested mappings and sequences with their names, in order: `d_x`, `grads[1]`, `block: d_x`.

    Raises `TypeError` for a leaf that is neither a tensor nor None.
    """
    if tree is None or isinstance(tree, Tensor):
        yield name or "out", tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from named_tensors(value, f"{name}: {key}" if name else key)
    elif isinstance(cast(object, tree), Sequence):
        for position, value in enumerate(tree):
            yield from named_tensors(value, f"{name or 'out'}[{position}]")
    else:
        raise TypeError(f"{name or 'out'}: expected a tensor, None, a mapping or a sequence, got {type(tree).__name__}")


def bits(x: Tensor) -> Tensor:
    """A copy of the logical elements as bytes, uint8 [numel * element size]: NaN equals itself, -0 differs from 0."""
    # A tensor with one element counts as contiguous whatever its stride is.
    return x.detach().reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _bytes(x: Tensor) -> Tensor:
    """The bytes for immediate reading: a view instead of a copy if x is contiguous."""
    plain = x.is_contiguous() and x.numel() > 1 and not (x.is_conj() or x.is_neg())
    return x.detach().reshape(-1).view(torch.uint8) if plain else bits(x)


def assert_bitwise_equal(fused: Tree, unfused: Tree, *, name: str = "") -> None:
    """Check that names, shapes, dtypes and bits are equal.

    Raises `AssertionError` with the tensor, the first differing index and both values.
    """
    left, right = dict(named_tensors(fused, name)), dict(named_tensors(unfused, name))
    if left.keys() != right.keys():
        raise AssertionError(f"different tensors: {sorted(left)} against {sorted(right)}")
    for key, f in left.items():
        u = right[key]
        if f is None or u is None:
            if f is not u:
                raise AssertionError(f"{key}: {'None' if f is None else 'a tensor'} where unfused is not")
            continue
        if f.shape != u.shape or f.dtype != u.dtype:
            raise AssertionError(f"{key}: {f.dtype} {tuple(f.shape)} against {u.dtype} {tuple(u.shape)}")
        where = _first_difference(_bytes(f), _bytes(u), f)
        if where is not None:
            raise AssertionError(
                f"{key}: bits differ first at {where}: {f[where].item()!r} against {u[where].item()!r}"
            )


def _first_difference(before: Tensor, after: Tensor, like: Tensor) -> tuple[int, ...] | None:
    if torch.equal(before, after):
        return None
    return index_of(int((before != after).nonzero()[0].item()) // like.element_size(), tuple(like.shape))


def index_of(position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index of a position in row-major order, as plain integers."""
    index: list[int] = []
    for size in reversed(shape):
        position, last = divmod(position, size)
        index.append(last)
    return tuple(reversed(index))


def assert_distinct_storages(tensors: Tree, others: Tree = None, remedy: str = "") -> None:
    """Check that `tensors` do not share memory with each other or with `others`; empty tensors are ignored.

    Raises `AssertionError` with both tensors, ending with `remedy`.
    """
    seen = {_storage(t): key for key, t in named_tensors(others, "others") if t is not None and t.numel()}
    for key, t in named_tensors(tensors):
        if t is None or not t.numel():
            continue
        owner = seen.setdefault(_storage(t), key)
        if owner != key:
            raise AssertionError(f"{key} shares its storage with {owner}{remedy}")


def share_storage(a: Tensor, b: Tensor) -> bool:
    """True when both tensors have elements and live in one storage."""
    return bool(a.numel() and b.numel()) and _storage(a) == _storage(b)


def _storage(t: Tensor) -> tuple[torch.device, int]:
    return t.device, t.untyped_storage().data_ptr()


class Untouched:
    """Context manager in which the given tensors must not change, neither in value nor in version.

    Use it around a forward or backward pass with inputs, parameters and incoming gradients. Bits are compared, which
    finds writes of kernels, and version counters, which find ATen writes of the same value. Raises `AssertionError`
    with the tensor and the first changed index, unless the block itself raised.
    """

    def __init__(self, tensors: Tree) -> None:
        self._tensors = [(key, t) for key, t in named_tensors(tensors) if t is not None]
        self._before: list[tuple[Tensor, int | None]] = []

    def __enter__(self) -> "Untouched":
        self._before = [(bits(t), _version(t)) for _, t in self._tensors]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.check()

    def check(self) -> None:
        """Compare now; the block may continue."""
        for (key, t), (before, version) in zip(self._tensors, self._before, strict=True):
            after = _bytes(t)
            if after.shape != before.shape:
                raise AssertionError(f"{key} was resized")
            where = _first_difference(before, after, t)
            if where is not None:
                raise AssertionError(f"{key} was modified, first at {where}")
            if _version(t) != version:
                raise AssertionError(f"{key} was written in place (same values, new version)")


def _version(t: Tensor) -> int | None:
    return None if t.is_inference() else t._version
