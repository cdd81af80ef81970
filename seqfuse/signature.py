"""What the keyword-only arguments of a `fwd` or `bwd` ask the engine for."""

from __future__ import annotations

import dataclasses
import inspect

from .errors import definition_error

_RESERVED = frozenset({"needs", "env", "seed"})


@dataclasses.dataclass(frozen=True)
class Signature:
    """Names that a function takes by keyword: those the engine gives everywhere, and the extra ones of its own."""

    extras: tuple[str, ...] = ()
    needs: bool = False
    env: bool = False
    seed: bool = False
    optional: frozenset[str] = frozenset()  # those of the extras that have a default

    @classmethod
    def of(cls, owner: type, function: str, positional: tuple[str, ...], allowed: frozenset[str] | None) -> Signature:
        """Read a signature; `allowed` bounds the extra names, `None` leaves them free."""
        parameters = list(inspect.signature(inspect.unwrap(getattr(owner, function))).parameters.values())[1:]
        first = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len(first) != len(positional) or any(p.kind is p.VAR_POSITIONAL for p in parameters):
            wanted = ", ".join(("self", *positional))
            raise definition_error(owner, f"{function} must take ({wanted}, *, ...) by position", f"def {function}")
        named = parameters[len(first) :]
        for p in named:
            if p.kind is p.VAR_KEYWORD or (allowed is not None and p.name not in allowed | _RESERVED):
                known = ", ".join(sorted((allowed or frozenset()) | _RESERVED))
                raise definition_error(owner, f"{function} names {p.name!r}, which is none of {known}", p.name)
        names = [p.name for p in named]
        return cls(
            extras=tuple(n for n in names if n not in _RESERVED),
            needs="needs" in names,
            env="env" in names,
            seed="seed" in names,
            optional=frozenset(p.name for p in named if p.default is not p.empty) - _RESERVED,
        )
