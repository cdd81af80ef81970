"""What is supported, found by running it: the tables of docs/support.md."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import seqfuse as sf
from seqfuse import fusions, ops

ROOT = Path(__file__).resolve().parents[2]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def operations() -> list[type[sf.UnfusedOperation]]:
    """Every operation of the library, by name."""
    found = {getattr(ops, name) for name in ops.__all__}
    classes = [one for one in found if inspect.isclass(one) and issubclass(one, sf.UnfusedOperation)]
    return sorted(classes, key=lambda one: one.__name__.lower())


def example(operation: type[sf.UnfusedOperation]) -> tuple[sf.UnfusedOperation, torch.Tensor]:
    """An instance of an operation, and an input that it takes."""
    for x in (torch.randn(4, 8), torch.randn(4, 24), torch.randn(2, 4, 24), torch.randint(2, (4, 8))):
        try:
            return operation.example(x), x  # pyright: ignore[reportReturnType]
        except (ValueError, sf.InputError):
            continue
    raise ValueError(f"no input here is one of {operation.__name__}")


def runs(operation: type[sf.UnfusedOperation], dtype: torch.dtype) -> bool:
    """Whether both passes run on a CPU."""
    made, x = example(operation)
    between = isinstance(made, ops.Take)  # which needs a fork before it
    model = sf.Sequential(*([ops.Fork(), made, ops.Add()] if between else [made])).to(dtype)
    x = x.to(dtype) if x.is_floating_point() else x
    given: dict[str, Any] = {name: x.clone() for name in model.channels.inputs}
    x = x.requires_grad_() if x.is_floating_point() else x
    try:
        with torch.random.fork_rng(devices=[]):
            y: Any = model(x, **given)
        (y[0] if isinstance(y, tuple) else y).sum().backward()
    except (RuntimeError, ValueError):
        return False
    return True


def fused_in(operation: type[sf.UnfusedOperation], group: Any) -> str:
    """How many fusions of a set have a place for an operation, forward and backward."""
    taking = [one for one in group if any(slot.takes(operation) for slot in one.slots)]
    forward = sum(not issubclass(one, sf.BackwardFusion) for one in taking)
    backward = sum(issubclass(one, sf.BackwardFusion | sf.JointFusion) for one in taking)
    return f"{forward} / {backward}" if taking else "-"


def matrix() -> str:
    """The operations: dtypes in which both passes run on a CPU, and the fusions that take each."""
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    lines = [f"| operation | {' | '.join(names)} | fusions of ATen calls | fusions of Triton kernels |"]
    lines += [f"| --- | {' | '.join('---' for _ in names)} | ---: | ---: |"]
    for operation in operations():
        cells = ["yes" if runs(operation, dtype) else "-" for dtype in DTYPES]
        groups = fused_in(operation, fusions.aten), fused_in(operation, fusions.triton)
        lines.append(f"| `{operation.__name__}` | {' | '.join((*cells, *groups))} |")
    return "\n".join(lines) + "\n"


def targets() -> str:
    """The GPUs that kernels are compiled for: configurations, and how many of them spill registers."""
    results = json.loads((ROOT / "benchmarks" / "results" / "kernels.json").read_text())
    column = results["columns"].split().index("spills")
    lines = [
        "| target | kernel configurations compiled | of them with spilled registers | run |",
        "| --- | ---: | ---: | --- |",
    ]
    for target in ("sm_80", "sm_90", "sm_100", "gfx942"):
        found = [*_variants(results["kernels"], target)]
        spilled = sum(int(numbers.split()[column]) > 0 for numbers in found)
        lines.append(f"| {target} | {len(found):,} | {spilled:,} | no: only compiled |")
    return "\n".join(lines) + "\n"


def _variants(kernels: dict[str, Any], target: str) -> Iterator[str]:
    for module in kernels.values():
        yield from module.get(target, {}).get("variants", {}).values()
