"""Operators under torch's checks: their schema, their fake, and their writes."""

from __future__ import annotations

from typing import Any

import torch
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Checked(TorchDispatchMode):
    """Makes torch check each operator of this library that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "seqfuse":
            self.names.add(func._opname)
            # torch does not compare results in 8 bits
            narrow = any(value is torch.float8_e4m3fn for value in tree_leaves((args, kwargs)))
            tests: Any = {"test_utils": ("test_schema", "test_faketensor")} if narrow else {}
            opcheck(func, args, kwargs or {}, **tests)
        return func(*args, **(kwargs or {}))
