"""Checks that a module is unmodified: converters read its configuration, and would miss any other change."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

_HOMES = ("torch", "transformers")
_TREE = ("_parameters", "_buffers", "_modules")
# The last one remains after the hook that set it is removed.
_INSIDE = {*_TREE, "training", "_is_full_backward_hook"}
_SHOWN = 4
_NONE: Any = object()


def check_unaltered(
    given: nn.Module, fresh: nn.Module, *, buffers: Mapping[str, Tensor] | None = None, aside: Collection[str] = ()
) -> None:
    """Raise if a module does not compute what its configuration defines.

    It is compared, module by module, with a new one of the same configuration, which may be on meta: class, `forward`,
    hooks, mode, attributes except those `aside`, names and shapes of parameters, which must be plain and of one dtype
    and device, and the values of buffers.
    """
    first, held, outside = next(given.parameters(), None), buffers or {}, {*_INSIDE, *aside}

    def differences(path: str, a: Any, b: Any) -> Iterator[str]:
        at, below = path or "it", f"{path}." if path else ""
        if type(a) is not type(b):
            yield f"{at} is {_of(a)}, not {_of(b)}"
            return
        owner = next(base for base in type(a).__mro__ if "forward" in vars(base))
        if type(a).__module__.partition(".")[0] not in _HOMES or vars(owner)["forward"].__module__ != owner.__module__:
            yield f"{at} is {_of(a)} whose class or its forward was replaced"
        if a.training is not given.training:
            yield f"{at} is in {'training' if a.training else 'evaluation'} mode, unlike the whole"
        yield from (f"{at} has {said}" for said in _attributes(a, b, outside))
        for name, p, own in _both(a, b, "_parameters"):
            said = _parameter(p, own, cast(Tensor, first))
            yield from [f"{below}{name} {said}"] * bool(said)
        for name, t, own in _both(a, b, "_buffers"):
            said = _buffer(t, own, held.get(below + name))
            yield from [f"{below}{name} {said}"] * bool(said)
        for name, inner, own in _both(a, b, "_modules"):
            if inner is None or own is None:
                yield f"{below}{name} is {'missing' if inner is None else f'{_of(inner)} that was added'}"
            else:
                yield from differences(below + name, inner, own)

    if found := list(differences("", given, fresh)):
        more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise ValueError(
            f"{type(given).__name__} was altered, so that its settings do not say what it computes: "
            f"{'; '.join(found[:_SHOWN])}{more}. Undo this, or convert it before and alter the result"
        )


def _attributes(given: nn.Module, fresh: nn.Module, outside: set[str]) -> Iterator[str]:
    for name in dict.fromkeys((*vars(given), *vars(fresh))):
        a, b = getattr(given, name, _NONE), vars(fresh).get(name, _NONE)
        if name in outside or _same(a, b):
            continue
        if "hooks" in name or name == "forward":
            yield "its own forward" if name == "forward" else f"hooks ({name})"
        else:
            made = "which was added" if b is _NONE else f"not {_short(b)}"
            yield f"no {name}" if a is _NONE else f"{name}={_short(a)}, {made}"


def _parameter(given: Any, fresh: Any, first: Tensor) -> str:
    """How a parameter differs; empty if it does not."""
    if fresh is None or given is None:
        return "is a parameter that was added" if fresh is None else "is not a parameter any more"
    if type(given) is not nn.Parameter:
        return f"is {_of(given)}, no plain parameter"
    if given.shape != fresh.shape:
        return f"has shape {tuple(given.shape)}, not {tuple(fresh.shape)}"
    if (given.dtype, given.device) != (first.dtype, first.device):
        return f"is {given.dtype} on {given.device}, and the first parameter {first.dtype} on {first.device}"
    return ""


def _buffer(given: Any, fresh: Any, wanted: Tensor | None) -> str:
    if fresh is None or given is None:
        return f"is a buffer that was {'added' if fresh is None else 'removed'}"
    if wanted is None:
        return "is a buffer of which nothing is known here"
    same = given.shape == wanted.shape
    if not same or not (given.is_meta or torch.allclose(given.double().cpu(), wanted.double(), 1e-6, 0.0)):
        return f"does not hold what the settings say ({given.dtype}: a cast of the model rounds it)"
    return ""


def _both(given: nn.Module, fresh: nn.Module, tree: str) -> Iterator[tuple[str, Any, Any]]:
    """Names of parameters, buffers or modules, each with the values in both modules."""
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
    except Exception:  # values that cannot be compared count as different
        return False


def _of(thing: object) -> str:
    return f"a {type(thing).__module__}.{type(thing).__qualname__}"


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
