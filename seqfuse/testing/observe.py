"""Observes passes: the arguments and results of each `fwd` and `bwd`, and whether it changes global state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..saved import Saved
from .poison import assert_written, unwritten_is_nan
from .structure import Untouched


def _cuda_ready() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def _backend(module: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return functools.partial(getattr, module, name), functools.partial(setattr, module, name)


def _products() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch raises if `fp32_precision` was set in another way
        return None


def _set_products(precision: str | None) -> None:
    if precision is not None:
        torch.set_float32_matmul_precision(precision)


def _autocast(device: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return functools.partial(torch.is_autocast_enabled, device), functools.partial(torch.set_autocast_enabled, device)


# Process-wide settings, each with its getter and setter.
_PROCESS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "grad mode": (torch.is_grad_enabled, lambda on: torch._C._set_grad_enabled(on)),  # pyright: ignore[reportPrivateUsage]
    "deterministic mode": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "the precision of float32 products": (_products, _set_products),
    "TF32 in cuBLAS": _backend(torch.backends.cuda.matmul, "fp32_precision"),
    "TF32 in cuDNN": _backend(cast(Any, torch.backends.cudnn).conv, "fp32_precision"),
    "autocast on the CPU": _autocast("cpu"),
    "autocast on CUDA": _autocast("cuda"),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
}


class GlobalState:
    """A snapshot of global state and of some objects; `changes()` reports and reverts changes.

    It contains the default dtype, grad mode, flags of determinism, TF32 and autocast, number of threads, current CUDA
    stream, states of random generators, and every attribute of `objects` (modules and fusions). For values of
    parameters and buffers use `Untouched`.
    """

    def __init__(self, objects: Mapping[str, object] | None = None) -> None:
        self._objects = dict(objects or {})
        self._process = {what: read() for what, (read, _) in _PROCESS.items()}
        self._random = _generators()
        self._stream = torch.cuda.current_stream() if _cuda_ready() else None
        self._attributes = {name: _attributes(thing) for name, thing in self._objects.items()}

    def changes(self) -> list[str]:
        """One sentence per change; empty if nothing changed."""
        found: list[str] = []
        now = {what: read() for what, (read, _) in _PROCESS.items()}  # some change when others are restored
        for what, (_, write) in _PROCESS.items():
            before, after = self._process[what], now[what]
            if before != after:
                found.append(f"changed {what} from {before} to {after}")
                write(before)
        for name, (state, restore) in self._random.items():
            if not torch.equal(state, _generators()[name][0]):
                found.append(f"drew from torch's {name} generator; random numbers come from the seed it is passed")
                restore(state)
        if self._stream is not None and torch.cuda.current_stream() != self._stream:
            found.append("left another CUDA stream current")
            torch.cuda.set_stream(self._stream)
        for name, thing in self._objects.items():
            before, after = self._attributes[name], _attributes(thing)
            changed = [key for key in {**before, **after} if not _same(before.get(key), after.get(key))]
            if changed:
                found.append(f"changed {', '.join(changed)} of {name}")
        return found


def _generators() -> dict[str, tuple[Tensor, Callable[[Tensor], None]]]:
    found: dict[str, tuple[Tensor, Callable[[Tensor], None]]] = {"CPU": (torch.get_rng_state(), torch.set_rng_state)}
    if _cuda_ready():
        found["CUDA"] = torch.cuda.get_rng_state(), torch.cuda.set_rng_state
    return found


def _attributes(thing: object) -> dict[str, Any]:
    """Attributes by name; the entries of a module's dictionaries (parameters, buffers, hooks) are listed separately."""
    found: dict[str, Any] = {}
    of_a_module = isinstance(thing, nn.Module)
    for name, value in vars(thing).items():
        # Caches: the callable of an operation's first call, and the results of `FusedOperation.decided`.
        if name in ("_engine", "_decided"):
            continue
        if of_a_module and isinstance(value, dict):
            if value:  # ten dictionaries of hooks are empty
                found.update({f"{name}[{key!r}]": inner for key, inner in value.items()})  # pyright: ignore[reportUnknownVariableType]
        else:
            found[name] = value
    return found


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Tensor) or isinstance(b, Tensor) or type(a) is not type(b):
        return False
    return bool(a == b)


@dataclass(frozen=True, slots=True)
class Pass:
    """One observed call of `fwd` or `bwd`: operation, arguments, result; `at` is its position."""

    owner: object
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    at: int = 0


class Observer:
    """Collects in `seen` the passes of the operations and fusions it is attached to, or of a `Fuser(on_step=observer)`.

    A pass raises `AssertionError` if it modifies an argument, a parameter or a buffer, or changes `GlobalState`, unless
    `watches` is `False`. If `twice`, it runs again with new memory filled with NaN, and raises if results contain this
    NaN. If `fused`, only passes of fusions are observed.
    """

    def __init__(self, twice: bool = False, *, watches: bool = True, fused: bool = False) -> None:
        self.seen: list[Pass] = []
        self._twice, self._watches, self._fused = twice, watches, fused

    def attach(self, owner: Any, modules: Iterable[nn.Module] = ()) -> None:
        """Observe this instance, not its class; `modules` are the modules that its passes read."""
        watched = dict(_named(owner, modules))
        for name in ("fwd", "bwd"):
            fn = getattr(owner, name, None)
            if fn is not None:
                setattr(owner, name, functools.partial(self._watch, owner, name, fn, watched))

    def __call__(self, step: Any, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run and observe one pass of a plan's step."""
        owner = step.operation
        if self._fused and not step.fused:
            return run(*args, **kwargs)
        if not self._watches:
            out = run(*args, **kwargs)
            self.seen.append(Pass(owner, pass_name(step, run), args, kwargs, out, step.start))
            return out
        slots = [owner for node in step.nodes for owner, _ in node.slots.values()]
        modules = [node.operation for node in step.nodes] if step.fused else slots
        out = self._watch(owner, pass_name(step, run), run, dict(_named(owner, modules)), *args, **kwargs)
        self.seen[-1] = dataclasses.replace(self.seen[-1], at=step.start)
        return out

    def passes(self, name: str, at: int | None = None) -> list[Pass]:
        """Calls of `fwd` or of `bwd` in order, at all positions or at one."""
        return [p for p in self.seen if p.name == name and at in (None, p.at)]

    def firsts(self) -> list[Pass]:
        """The first call of each pass at each position, for checks that depend only on shapes."""
        found: dict[tuple[str, int], Pass] = {}
        for each in self.seen:
            found.setdefault((each.name, each.at), each)
        return [*found.values()]

    def _watch(
        self, owner: Any, name: str, fn: Callable[..., Any], watched: dict[str, object], /, *args: Any, **kwargs: Any
    ) -> Any:
        positional = zip(("x",) if name == "fwd" else ("dy", "saved"), args, strict=False)
        given = {key: t for of, value in (*positional, *kwargs.items()) for key, t in leaves(of, value)}
        for what, module in watched.items():
            if isinstance(module, nn.Module):
                given.update(
                    {f"{key} of {what}": t for key, t in (*module.named_parameters(), *module.named_buffers())}
                )
        state = GlobalState(watched)
        untouched = Untouched({f"{name}: {key}": t for key, t in given.items()})
        with untouched:
            out = fn(*args, **kwargs)
        changes = state.changes()
        if changes:
            raise AssertionError(f"{name} {'; '.join(changes)}")
        self.seen.append(Pass(owner, name, args, kwargs, out))
        if self._twice:
            with unwritten_is_nan():
                again = fn(*args, **kwargs)
            assert_written(name, results(name, out), results(name, again))
        return out


def pass_name(step: Any, run: Callable[..., Any]) -> str:
    """The name of a step's pass: `"fwd"` or `"bwd"`."""
    return "bwd" if run == getattr(step.operation, "bwd", None) else "fwd"


def _named(owner: Any, modules: Iterable[nn.Module]) -> Iterator[tuple[str, object]]:
    yield ("the operation" if isinstance(owner, nn.Module) else "the fusion"), owner
    for i, module in enumerate(modules):
        if module is not owner:
            yield f"{type(module).__name__}{f' ({i})' if i else ''}", module


def results(name: str, out: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a pass returned, by name: `y`, `outputs.rest`, `saved.act.x`, `dx`, `grads.bias.bias`."""
    first, *rest = cast(tuple[Any, ...], out if isinstance(out, tuple) else (out,))
    yield from leaves("y" if name == "fwd" else "dx", first)
    for value in rest:
        records: list[Any] = [*value.values()] if isinstance(value, dict) else [value]  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        saved = any(isinstance(record, Saved) for record in records)
        yield from leaves("saved" if saved else "outputs" if name == "fwd" else "grads", value)


def leaves(key: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors in an argument or in saved tensors, by name: `saved.x`, `saved.acts[1]`, `saved.act.x` by slot."""
    if isinstance(value, Tensor):
        yield key, value
    elif isinstance(value, Saved):
        for field in value.fields:
            if field in vars(value):
                yield from leaves(f"{key}.{field}", vars(value)[field])
    elif isinstance(value, dict):
        for name, inner in cast(dict[str, Any], value).items():
            yield from leaves(f"{key}.{name}", inner)
    elif isinstance(value, tuple):
        for i, inner in enumerate(value):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
            yield from leaves(f"{key}[{i}]", inner)
