"""The target of a command: an object named `MODULE:NAME`, and the module that it is or returns."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from torch import nn

from .. import FusableOperation, Sequential
from ..errors import SeqfuseError, hinted, meant
from ..pictures.text import few


class Unable(Exception):
    """The command failed; the message is one sentence with the reason."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A named object, `attribute` of a module."""

    name: str
    attribute: str
    value: Any

    @property
    def is_class(self) -> bool:
        """Whether it is a class."""
        return isinstance(self.value, type)

    @property
    def members(self) -> list[Target]:
        """The classes in a tuple of classes, as in an entry point; for any other object, only itself."""
        classes: tuple[Any, ...] = self.value if issubclass(type(self.value), tuple) else ()
        if not classes or not all(isinstance(one, type) for one in classes):
            return [self]
        return [Target(f"{one.__module__}:{one.__qualname__}", one.__qualname__, one) for one in classes]

    def build(self) -> nn.Module:
        """The module that the object is, or that it returns when called without arguments."""
        made = self.value
        if not isinstance(made, nn.Module):
            if not callable(made):
                kind = type(made).__name__
                raise Unable(f"{self.name} is of type {kind}: name a module, or a function or class that makes one")
            try:
                made = made()
            except (Exception, SystemExit) as error:
                without = "; it is called without arguments" if isinstance(error, TypeError) else ""
                raise Unable(f"{self.name}() raised {said(error)}{without}") from error
        if not isinstance(made, nn.Module):
            raise Unable(f"{self.name}() returned an object of type {type(made).__name__}, not a torch.nn.Module")
        return made


def load_target(name: str) -> Target:
    """Import the object named `package.module:NAME` or `path/to/file.py:NAME`; NAME may contain dots."""
    where, colon, attribute = name.rpartition(":")
    if not colon or not where or not attribute:
        raise Unable(f"{name!r} is not MODULE:NAME, such as package.module:build or path/to/file.py:build")
    folder, module = os.getcwd(), where
    path = Path(where)
    if where.endswith(".py") or os.sep in where:
        if not path.is_file():
            raise Unable(f"there is no file {where}")
        folder, module = str(path.resolve().parent), path.stem
    if folder not in sys.path:
        sys.path.insert(0, folder)
    value: Any = _imported(module, path.resolve() if path.is_file() else None)
    for part in attribute.split("."):
        if not hasattr(value, part):
            hint = meant(part, [name for name in dir(value) if not name.startswith("_")])
            raise Unable(f"{where} has no {attribute}{hinted(hint)}")
        value = getattr(value, part)
    return Target(name, attribute, value)


def _imported(module: str, file: Path | None) -> ModuleType:
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            raise Unable(f"there is no module {module} in this folder or among the installed packages") from None
        raise Unable(f"importing {module} raised {said(error)}") from error
    except (Exception, SystemExit) as error:
        raise Unable(f"importing {module} raised {said(error)}") from error
    own = getattr(found, "__file__", None)
    if file is not None and (own is None or Path(own).resolve() != file):
        raise Unable(f"{file} cannot be imported as {module}: that name is taken by {own or 'a built-in module'}")
    return found


def said(error: BaseException) -> str:
    """An error's class and message."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


@contextlib.contextmanager
def calling(what: str = "the model") -> Generator[None]:
    """A block that runs a model; an error of the model's own becomes one sentence that begins with `what`."""
    try:
        yield
    except (SeqfuseError, Unable):
        raise
    except Exception as error:
        more = "; --channel name=SHAPE adds an argument" if isinstance(error, TypeError) else ""
        raise Unable(f"{what} raised {said(error)}{more}") from error


M = TypeVar("M", bound=nn.Module)


def moved(model: M, device: torch.device) -> M:
    """The model on a device."""
    with calling(f"moving the model to {device}"):
        return model.to(device)


def named_part(model: nn.Module, name: str, part: str | None) -> nn.Module:
    """The module at path `part` of a model; the model itself if `part` is None."""
    try:
        return model if part is None else cast(Any, model).get_submodule(part)
    except AttributeError as error:
        raise Unable(f"{name} has no part {part!r}: {error}") from error


def holds_sequence(model: nn.Module) -> bool:
    """Whether a model is or contains a `Sequential`, or is an operation, so that it can be planned without a call."""
    modules: Iterator[nn.Module] = cast(Any, model).modules()
    return isinstance(model, FusableOperation) or any(isinstance(module, Sequential) for module in modules)


def container(model: nn.Module, name: str, part: str | None) -> Sequential:
    """The `Sequential` of a model: the model itself, its only one, or the one at `part`."""
    model = named_part(model, name, part)
    if isinstance(model, Sequential):
        return model
    if isinstance(model, FusableOperation):
        return Sequential(model)
    paths: list[str] = []
    modules: Iterator[tuple[str, nn.Module]] = cast(Any, model).named_modules()
    for path, module in modules:
        if isinstance(module, Sequential) and not any(path.startswith(f"{outer}.") for outer in paths):
            paths.append(path)
    if len(paths) == 1:
        return cast(Any, model).get_submodule(paths[0])
    if not paths:
        kind = f"{type(model).__module__}.{type(model).__qualname__}"
        hint = "seqfuse convert takes any model; sf.nn.from_torch and from_huggingface make a Sequential of one"
        raise Unable(f"there is no seqfuse.Sequential in {name}, which is of type {kind}{hinted(hint)}")
    raise Unable(f"there are {len(paths)} Sequentials in {name}: choose one by --part, of {few(paths, 6)}")
