"""The keywords that an author's `fwd` and `bwd` name, and the arguments of device functions."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from types import MappingProxyType

from .errors import PluginError, author_line, definition_error


@dataclasses.dataclass(frozen=True)
class Signature:
    """Names that a function takes by keyword: those the engine gives everywhere, and the extra ones of its own."""

    extras: tuple[str, ...] = ()
    needs: bool = False
    env: bool = False
    seed: bool = False
    seeds: bool = False
    main_grads: bool = False
    dtype: bool = False
    optional: frozenset[str] = frozenset()  # those of the extras that have a default

    @classmethod
    def of(
        cls,
        owner: type,
        function: str,
        positional: tuple[str, ...],
        allowed: frozenset[str] | None,
        *,
        fused: bool = False,
        named: str = "...",
    ) -> Signature:
        """Read a signature; `allowed` bounds the extra names, `None` leaves them free; messages say `named`."""
        parameters = list(inspect.signature(inspect.unwrap(getattr(owner, function))).parameters.values())[1:]
        first = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len(first) != len(positional) or any(p.kind is p.VAR_POSITIONAL for p in parameters):
            wanted = ", ".join(("self", *positional))
            fault = f"{function} must take ({wanted}, *, {named}): {positional[-1]} by position, the rest by keyword"
            raise definition_error(owner, fault, f"def {function}")
        extra = parameters[len(first) :]
        reserved = {"needs", "env", "seed", *["dtype"] * fused, *["main_grads"] * (function == "bwd")}
        reserved |= {"seeds"} if fused and function == "fwd" else set[str]()
        for p in extra:
            if p.kind is p.VAR_KEYWORD or (allowed is not None and p.name not in allowed | reserved):
                known = ", ".join(sorted((allowed or frozenset()) | reserved))
                raise definition_error(owner, f"{function} names {p.name!r}, which is none of {known}", p.name)
        names = [p.name for p in extra]
        return cls(
            extras=tuple(n for n in names if n not in reserved),
            **dict.fromkeys(reserved.intersection(names), True),
            optional=frozenset(p.name for p in extra if p.default is not p.empty) - reserved,
        )


def check_pass_names(cls: type, others: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raise for a class that calls a pass as torch does, and states none under the name that the engine knows.

    `others` are further names that are taken for known ones: the engine would never call them.

    Raises:
        PluginError: (SF301) quoting the author's line.
    """
    authors = [base for base in cls.__mro__ if base.__module__.rpartition(".")[0] != __package__]  # no contract of ours
    for name, known in {"forward": "fwd", "backward": "bwd", **others}.items():
        if name in vars(cls) and not any(known in vars(base) for base in authors):
            what = "a pass is" if known in ("fwd", "bwd") else "what the engine asks is"
            raise definition_error(cls, f"{what} called {known} here, not {name}", f"def {name}")


def check_device_functions(cls: type, takes_numbers: bool) -> None:
    """Raise unless `value` and `derivative` of a class are both there or neither, and take what kernels pass.

    What Triton made of a function has its `arg_names`; a property or descriptor is asked when a kernel is made.
    Configuration numbers, if the class states them, come second.
    """
    functions = {name: getattr(cls, name) for name in ("value", "derivative")}
    stated = [name for name, function in functions.items() if function is not None]
    if len(stated) == 1:
        missing = next(name for name in functions if name not in stated)
        raise definition_error(cls, f"{stated[0]} is stated without {missing}; kernels need both", stated[0])
    for name in stated:
        function = functions[name]
        names: list[str] | None = getattr(function, "arg_names", None)
        if names is None and callable(function):
            raise definition_error(cls, f"{name} must be a triton.jit function", name)
        selects = name == "derivative" and bool(names) and names[0] == "dy"
        if names is not None and len(names) != 1 + takes_numbers + selects:
            first = "x" if name == "value" else "dy, t" if selects else "t"
            wanted, why = (f"({first}, P)", "a P") if takes_numbers else (f"({first})", "no P")
            said = f"{name} must take {wanted}, as the class states {why}; it takes ({', '.join(names)})"
            line = author_line(getattr(function, "fn", function), "def ")
            raise PluginError(f"{said}\n    {line}", code="SF301", operation=cls.__qualname__)


def arguments_kept(thing: object) -> dict[str, int | float | str]:
    """The numbers and strings that an object was made with and keeps under the names of these arguments."""
    named = {name: vars(thing).get(name) for name in inspect.signature(type(thing)).parameters}
    return {name: value for name, value in named.items() if isinstance(value, int | float | str)}


def show_arguments(self: object) -> str:
    """An `extra_repr`: the arguments that a module keeps."""
    return ", ".join(f"{name}={value!r}" for name, value in arguments_kept(self).items())
