"""Docstrings of public names, those of values among them: a string behind the assignment."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

import seqfuse as sf


def docstring(module: types.ModuleType, name: str) -> str:
    """What stands at the definition of `module.name`; empty where nothing does."""
    value = getattr(module, name)
    if inspect.ismodule(value) or not is_value(value):
        return inspect.getdoc(value) or ""
    return _of_value(module, name)


def is_value(obj: Any) -> bool:
    """Whether it is neither a class nor a function: an alias of types, a tuple, a number."""
    return not (inspect.isclass(obj) or hasattr(obj, "__code__") or hasattr(obj, "__wrapped__"))


def _of_value(module: types.ModuleType, name: str) -> str:
    body = ast.parse(inspect.getsource(module)).body
    for statement, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(statement, ast.ImportFrom) and name in [alias.asname or alias.name for alias in statement.names]:
            (original,) = (a.name for a in statement.names if name == (a.asname or a.name))
            source = importlib.import_module("." * statement.level + (statement.module or ""), module.__package__)
            return docstring(source, original)
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                return inspect.cleandoc(str(following.value.value))
            return ""
    return ""


def fields_of(record: type[sf.Saved]) -> Iterator[tuple[str, str]]:
    """The fields of a `Saved`, as `name: type`, each with its comment and the gradients that it is read for."""
    source, hints = inspect.getsource(record), typing.get_type_hints(record)
    for name in record.fields:
        comment = re.search(rf"^ *{name}:[^#\n]*# *(.*)$", source, re.MULTILINE)
        hint = hints[name]
        shown = hint.__name__ if inspect.isclass(hint) and not isinstance(hint, types.GenericAlias) else str(hint)
        of = sorted(record._for.get(name, ()))
        readers = ", ".join(of if len(of) < 4 else [of[0], "...", of[-1]])
        about = [comment[1]] if comment else []
        about += [f"read for the gradient of {readers}"] if readers else []
        shown = re.sub(r"\b(torch|typing|_tensor)\.", "", shown)
        yield f"{name}: {shown}", "; ".join(about)
