"""Docstrings of public names, those of values among them: a string behind the assignment."""

from __future__ import annotations

import ast
import importlib
import inspect
import types
from typing import Any


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
