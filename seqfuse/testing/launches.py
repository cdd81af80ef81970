"""Launches sent to a process that compiles: kernels by their names, which that process imports."""

from __future__ import annotations

import importlib.util
import inspect
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from ..kernels._variants import Variant


def is_kernel(kernel: Any) -> bool:
    """Whether it is a `triton.jit` function, compiled or interpreted."""
    return inspect.isfunction(getattr(kernel, "fn", None)) and hasattr(kernel, "arg_names")


def send(variant: Variant, file: IO[bytes]) -> None:
    """Write a launch, and where its modules are found."""
    pickle.dump(sys.path, file)
    _Pickler(file).dump(vars(variant))


def sent(path: str) -> Iterator[Variant]:
    """The launch in a file, in the process that compiles it."""
    with Path(path).open("rb") as file:
        sys.path[:] = pickle.load(file)
        yield Variant(**_Unpickler(file).load())


class _Pickler(pickle.Pickler):
    """Kernels and device functions, also where they are constexprs, by the names they have in their modules."""

    def persistent_id(self, obj: Any) -> tuple[str, str, str] | None:
        if not is_kernel(obj):
            return None
        module = sys.modules[obj.fn.__module__]
        if getattr(module, "__file__", None) is None:
            raise TypeError(f"{obj.fn.__qualname__} is in no file, from which it could be compiled")
        return module.__name__, str(module.__file__), obj.fn.__qualname__


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: tuple[str, str, str]) -> Any:
        name, file, attributes = pid
        found: Any = _imported(name, file)
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
        return found


def _imported(name: str, file: str) -> ModuleType:
    if name != "__main__" and importlib.util.find_spec(name) is not None:
        return importlib.import_module(name)
    name = "__compiled_main__" if name == "__main__" else name
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
