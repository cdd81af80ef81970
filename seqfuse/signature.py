"""The keyword arguments of an author's `fwd` and `bwd`, and the arguments of device functions and constructors."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import numbers
import operator
import reprlib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import torch

from .errors import InputError, PluginError, author_line, definition_error, nearest

_Class = TypeVar("_Class", bound=type)


@dataclasses.dataclass(frozen=True)
class Signature:
    """The keyword arguments of a pass: those that the engine offers to every pass, and its extra inputs."""

    extras: tuple[str, ...] = ()
    needs: bool = False
    env: bool = False
    seed: bool = False
    seeds: bool = False
    main_grads: bool = False
    dtype: bool = False
    to: bool = False
    recipe: bool = False
    weights: bool = False
    optional: frozenset[str] = frozenset()  # the extras with a default

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
        """Reads a signature; extra names must be in `allowed`, unless that is `None`; `named` shows them in errors."""
        parameters = list(inspect.signature(inspect.unwrap(getattr(owner, function))).parameters.values())[1:]
        first = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len(first) != len(positional) or any(p.kind is p.VAR_POSITIONAL for p in parameters):
            wanted = ", ".join(("self", *positional))
            fault = f"{function} must take ({wanted}, *, {named}): {positional[-1]} by position, the rest by keyword"
            raise definition_error(owner, fault, f"def {function}")
        extra = parameters[len(first) :]
        reserved = {"needs", "env", "seed", *(["dtype", "to"] if fused else ["recipe"])}
        reserved |= {"main_grads"} if function == "bwd" else set[str]()
        reserved |= {"seeds" if fused else "weights"} if function == "fwd" else set[str]()
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


def check_pass_names(cls: type, others: Mapping[str, str] = MappingProxyType({}), contract: Sequence[str] = ()) -> None:
    """Raise for a class with a pass named as in torch, such as `backward`, but without the name that the engine calls.

    `others` are further such names. Also detects misspelled methods of a `contract`, which the engine would never call.

    Raises:
        PluginError: (SF301) quoting the author's line.
    """
    authors = [
        base for base in cls.__mro__ if base.__module__.rpartition(".")[0] != __package__
    ]  # without our base classes
    for name, known in {"forward": "fwd", "backward": "bwd", **others}.items():
        if name in vars(cls) and not any(known in vars(base) for base in authors):
            what = "a pass is" if known in ("fwd", "bwd") else "what the engine asks is"
            raise definition_error(cls, f"{what} called {known} here, not {name}", f"def {name}")
    for name, value in vars(cls).items():
        inherited = any(name in vars(base) for base in cls.__mro__[1:])
        if isinstance(value, types.FunctionType) and not inherited and name not in contract:
            close = nearest(name, contract, 0.85)
            if close and not any(close in vars(base) for base in authors):
                message = f"{name} is not a method that the engine calls"
                raise definition_error(cls, message, f"def {name}", f"did you mean {close!r}?")


def check_device_functions(cls: type, takes_numbers: bool) -> None:
    """Raise unless a class has both `value` and `derivative` or neither, with the arguments that kernels pass.

    Triton functions have `arg_names`; properties and descriptors are checked when a kernel is created. Configuration
    numbers, if the class has them, are the second argument.
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
        # A trailing flag selects the accuracy of 16 bits.
        count = 0 if names is None else len(names) - (names[-1:] == ["HALF"])
        if names is not None and count != 1 + takes_numbers + selects:
            first = "x" if name == "value" else "dy, t" if selects else "t"
            wanted, why = (f"({first}, P)", "a P") if takes_numbers else (f"({first})", "no P")
            said = f"{name} must take {wanted}, as the class states {why}; it takes ({', '.join(names)})"
            line = author_line(getattr(function, "fn", function), "def ")
            raise PluginError(f"{said}\n    {line}", code="SF301", operation=cls.__qualname__)


def checks_arguments(cls: _Class) -> _Class:
    """Make a constructor reject arguments that would fail silently later: a wrong number, flag, word or name.

    Numbers of other libraries are converted to Python's. Other errors are left to Python and torch.

    Raises:
        InputError: (SF106) naming the class, the argument and what was expected.
    """
    if "__init__" not in vars(cls):
        return cls
    init: Callable[..., None] = cls.__init__

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        given = None
        if not torch.compiler.is_dynamo_compiling():  # Dynamo cannot trace signatures
            signature, hints = _annotated(init)
            try:
                given = signature.bind(self, *args, **kwargs)
            except TypeError:
                init(self, *args, **kwargs)  # Python's error names missing and surplus arguments
                raise
            given.arguments.update(check_arguments(type(self).__name__, hints, given.arguments))
            args, kwargs = given.args[1:], given.kwargs
        try:
            init(self, *args, **kwargs)
        except RuntimeError as error:
            if given is None or "negative dimension" not in str(error):
                raise
            raise _negative(type(self).__name__, given.arguments) from error

    cls.__init__ = checked
    return cls


def _negative(operation: str, given: Mapping[str, Any]) -> InputError:
    """The error for a negative size; torch's own error only names the resulting shape."""
    listed: dict[str, Any] = {k: v if isinstance(v, tuple | list) else (v,) for k, v in given.items()}
    below = [k for k, several in listed.items() if any(isinstance(v, int) and v < 0 for v in several)]
    said = ", ".join(f"{name}={given[name]!r}" for name in below) or "its arguments"
    return InputError(f"sizes must be at least 0, got {said}", code="SF106", operation=operation)


@functools.cache
def _annotated(init: Callable[..., None]) -> tuple[inspect.Signature, Mapping[str, Any]]:
    """The signature and the annotations, resolved at the first call, when the modules they name are imported."""
    signature, hints = inspect.signature(init), typing.get_type_hints(init)
    listed = {name for name, p in signature.parameters.items() if p.kind is p.VAR_POSITIONAL}
    return signature, {name: tuple[hint, ...] if name in listed else hint for name, hint in hints.items()}


# Its name in messages, the attribute by which values of any library are recognized, and the conversion to Python's.
_KINDS: dict[Any, tuple[str, str, Callable[[Any], Any]]] = {
    int: ("an integer", "__index__", operator.index),
    float: ("a number", "__float__", float),
    bool: ("True or False", "__bool__", bool),
    str: ("a string", "isidentifier", str),
}


# By their origin: a name in messages, and whether a value is accepted. Elements and results are not checked.
_WIDER: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    Callable: ("a class or function", lambda value: callable(value) and not isinstance(value, torch.nn.Module)),
    Sequence: ("a sequence", lambda value: hasattr(value, "__iter__") and not isinstance(value, str)),
}


def check_arguments(operation: str, hints: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Raise InputError (SF106) for the first number, flag, word or name that does not match its annotation.

    Returns:
        Numbers and flags of other libraries converted to Python's, which compilers and kernels require.
    """
    taken: dict[str, Any] = {}
    for name, value in given.items():
        hint = hints.get(name, Any)
        if typing.get_origin(hint) is tuple:
            one = {name: typing.get_args(hint)[0]}
            taken[name] = tuple(check_arguments(operation, one, {name: each}).get(name, each) for each in value)
            continue
        choices = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
        if value is None and bool in choices and type(None) not in choices:  # `None` is a flag, as in torch
            taken[name] = False
            continue
        kind = next((one for one in choices if one in _KINDS and _is_one(value, one)), None)
        if kind is not None:
            if type(value) is not kind:
                taken[name] = _KINDS[kind][2](value)
            continue
        words = [word for one in choices if typing.get_origin(one) is Literal for word in typing.get_args(one)]
        fits = value in words if isinstance(value, str) else value is None and type(None) in choices
        origins = [typing.get_origin(one) or one for one in choices]
        wider = [_WIDER[origin] for origin in origins if origin in _WIDER]
        fits = fits or any(accepts(value) for _, accepts in wider)
        if not fits and all(origin in (Literal, *_KINDS, type(None), *_WIDER) for origin in origins):
            said = [*(_KINDS[one][0] for one in choices if one in _KINDS), *(f'"{word}"' for word in words)]
            said += [name for name, _ in wider]
            said += ["None"] * (type(None) in choices)
            said[-2:] = [" or ".join(said[-2:])]
            message = f"{name} must be {', '.join(said)}, got {reprlib.repr(value)}"
            raise InputError(message, code="SF106", operation=operation)
    return taken


def _is_one(value: object, kind: Any) -> bool:
    own = type(value)
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and kind is not int
    if kind is bool and isinstance(value, numbers.Number) and value not in (0, 1):
        return False
    return value is not None and hasattr(own, _KINDS[kind][1]) and not (kind is int and own is bool)


def arguments_kept(thing: object) -> dict[str, int | float | str]:
    """Constructor arguments that are numbers or strings and stored as attributes of the same name."""
    named = {name: vars(thing).get(name) for name in inspect.signature(type(thing)).parameters}
    return {name: value for name, value in named.items() if isinstance(value, int | float | str)}


def show_arguments(self: object) -> str:
    """The constructor arguments, for `repr`."""
    return ", ".join(f"{name}={value!r}" for name, value in arguments_kept(self).items())
