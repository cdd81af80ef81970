"""Whether a module is as its class makes it: converters read its settings, and know nothing of what was done to it."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

_HOMES = ("torch", "transformers")
_TREE = ("_parameters", "_buffers", "_modules")
# The second one stays when the hook that set it is removed.
_INSIDE = {*_TREE, "training", "_is_full_backward_hook"}
_SHOWN = 4
_NONE: Any = object()


def check_unaltered(
    given: nn.Module, fresh: nn.Module, *, buffers: Mapping[str, Tensor] | None = None, aside: Collection[str] = ()
) -> None:
    """Refuse a module that computes something else than its settings say.

    It is compared, module by module, with one that was made anew from the same settings: class, `forward`, hooks, mode,
    attributes, names and shapes of parameters, which are plain and of one dtype and device, and buffers.

    Args:
        given: the module.
        fresh: the one made anew; its parameters may be on meta.
        buffers: what each buffer has to hold.
        aside: attributes on which no result depends.

    Raises:
        ValueError: naming what differs.
    """
    compared = _Comparison(given, buffers or {}, {*_INSIDE, *aside})
    found = list(compared.modules("", given, fresh))
    if found:
        more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise ValueError(
            f"{type(given).__name__} was altered, so that its settings do not say what it computes: "
            f"{'; '.join(found[:_SHOWN])}{more}. Undo this, or convert it before and alter the result"
        )


class _Comparison:
    def __init__(self, whole: nn.Module, buffers: Mapping[str, Tensor], aside: set[str]) -> None:
        self._training, self._first = whole.training, next(whole.parameters(), None)
        self._buffers, self._aside = buffers, aside

    def modules(self, path: str, given: nn.Module, fresh: nn.Module) -> Iterator[str]:
        """How a module differs, and those in it."""
        at, kind = path or "it", type(given)
        if kind is not type(fresh):
            yield f"{at} is {_of(given)}, not {_of(fresh)}"
            return
        owner = next(base for base in kind.__mro__ if "forward" in vars(base))
        if kind.__module__.partition(".")[0] not in _HOMES or vars(owner)["forward"].__module__ != owner.__module__:
            yield f"{at} is {_of(given)} whose class or its forward was replaced"
        if given.training is not self._training:
            yield f"{at} is in {'training' if given.training else 'evaluation'} mode, unlike the whole"
        yield from self._attributes(at, given, fresh)
        below = f"{path}." if path else ""
        tree = _both(given, fresh, "_parameters")
        yield from (f"{below}{name} {said}" for name, a, b in tree for said in self._parameter(a, b))
        tree = _both(given, fresh, "_buffers")
        yield from (f"{below}{name} {said}" for name, a, b in tree for said in self._buffer(below + name, a, b))
        for name, a, b in _both(given, fresh, "_modules"):
            if b is None:
                yield f"{below}{name} is {_of(a)} that was added"
            elif a is None:
                yield f"{below}{name} is missing"
            else:
                yield from self.modules(below + name, a, b)

    def _attributes(self, at: str, given: nn.Module, fresh: nn.Module) -> Iterator[str]:
        for name in dict.fromkeys((*vars(given), *vars(fresh))):
            a, b = getattr(given, name, _NONE), vars(fresh).get(name, _NONE)
            if name in self._aside or _same(a, b):
                continue
            if "hooks" in name:
                yield f"{at} has hooks ({name})"
            elif name == "forward":
                yield f"{at} has a forward of its own"
            elif a is _NONE:
                yield f"{at} has no {name}"
            else:
                yield f"{at} has {name}={_short(a)}, " + ("which was added" if b is _NONE else f"not {_short(b)}")

    def _parameter(self, given: Any, fresh: Any) -> Iterator[str]:
        first = cast(Tensor, self._first)
        if fresh is None:
            yield "is a parameter that was added"
        elif given is None:
            yield "is not a parameter any more"
        elif type(given) is not nn.Parameter:
            yield f"is {_of(given)}, no plain parameter"
        elif given.shape != fresh.shape:
            yield f"has shape {tuple(given.shape)}, not {tuple(fresh.shape)}"
        elif (given.dtype, given.device) != (first.dtype, first.device):
            yield f"is {given.dtype} on {given.device}, and the first parameter {first.dtype} on {first.device}"

    def _buffer(self, path: str, given: Any, fresh: Any) -> Iterator[str]:
        wanted = self._buffers.get(path)
        if fresh is None or given is None:
            yield f"is a buffer that was {'added' if fresh is None else 'removed'}"
        elif wanted is None:
            yield "is a buffer of which nothing is known here"
        elif given.shape != wanted.shape or not (given.is_meta or _close(given, wanted)):
            yield f"does not hold what the settings say ({given.dtype}: a cast of the model rounds it)"


def _both(given: nn.Module, fresh: nn.Module, tree: str) -> Iterator[tuple[str, Any, Any]]:
    """Names of parameters, buffers or modules, and what either module has under them."""
    mine, its = vars(fresh)[tree], vars(given)[tree]
    for name in dict.fromkeys((*its, *mine)):
        a, b = its.get(name), mine.get(name)
        if a is not None or b is not None:
            yield name, a, b


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, functools.partial) and isinstance(b, functools.partial):
        a, b = ((p.func, p.args, p.keywords) for p in cast("tuple[functools.partial[Any], ...]", (a, b)))
    try:
        return a is b or (torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b))
    except Exception:  # what cannot be compared is not known to be the same
        return False


def _of(thing: object) -> str:
    return f"a {type(thing).__module__}.{type(thing).__qualname__}"


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _close(given: Any, wanted: Any) -> bool:
    return torch.allclose(given.double().cpu(), wanted.double(), 1e-6, 0.0)
