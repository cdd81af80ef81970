"""Tables of docs/dev/support.md: supported dtypes and passes, found by running them, and how the tests check each."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import seqfuse as sf
from docs import documented
from seqfuse import fusions, ops
from seqfuse.fusion import Slot
from seqfuse.testing import operations as operations_of_the_kit

ROOT = Path(__file__).resolve().parents[2]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OPERATIONS = "ops/test_*.py", "parallel/test_*.py"
COMPARES = frozenset(("check_op", "check_passes", "assert_close", "assert_bitwise_equal", "assert_fused_close"))
"""Names of comparisons of an operation with its reference or with torch."""
SHAPE = re.compile(r"\[.*?\]")
TAKEN = {"check_op": (*operations_of_the_kit.DTYPES, torch.float64), "check_fusion": operations_of_the_kit.DTYPES}
"""The default dtypes of these; `check_op` runs `gradcheck` as well, in float64."""


def operations() -> list[type[sf.UnfusedOperation]]:
    """Every operation of the library, by name."""
    found = {getattr(ops, name) for name in ops.__all__}
    classes = [one for one in found if inspect.isclass(one) and issubclass(one, sf.UnfusedOperation)]
    return sorted(classes, key=lambda one: one.__name__.lower())


def example(operation: type[sf.UnfusedOperation]) -> tuple[sf.UnfusedOperation, torch.Tensor]:
    """An instance of an operation, and an input for it."""
    for x in (torch.randn(4, 8), torch.randn(4, 24), torch.randn(2, 4, 24), torch.randint(2, (4, 8))):
        try:
            return operation.example(x), x  # pyright: ignore[reportReturnType]
        except (ValueError, sf.InputError):
            continue
    raise ValueError(f"no input here is one of {operation.__name__}")


def channel(name: str, x: torch.Tensor, made: sf.UnfusedOperation) -> torch.Tensor:
    """A tensor for an extra input: by its name, or else like x."""
    if isinstance(made, ops.TokenScale):
        return x[..., :1].clone()
    lead = x.shape[:-1]
    known = {
        "offsets": torch.arange(1, 4, dtype=torch.int32), "experts": torch.zeros(*lead, 2, dtype=torch.int64),
        "rows": torch.arange(lead.numel()).view(lead), "probs": torch.ones(lead, dtype=x.dtype),
    }  # fmt: skip
    return known[name] if name in known else x.clone()


def runs(operation: type[sf.UnfusedOperation], dtype: torch.dtype) -> bool:
    """Whether both passes run on a CPU."""
    made, x = example(operation)
    between = isinstance(made, ops.Take)  # which comes after a fork
    model = sf.Sequential(*([ops.Fork(), made, ops.Add()] if between else [made])).to(dtype)
    x = x.to(dtype) if x.is_floating_point() else x
    given: dict[str, Any] = {name: channel(name, x, made) for name in model.channels.inputs}
    x = x.requires_grad_() if x.is_floating_point() else x
    try:
        with torch.random.fork_rng(devices=[]):
            y: Any = model(x, **given)
        (y[0] if isinstance(y, tuple) else y).sum().backward()
    except (RuntimeError, ValueError):
        return False
    return True


def in_c() -> list[type[sf.FusedOperation]]:
    """The fusions that have C kernels."""
    return [one for one in (*fusions.aten, *fusions.triton, *fusions.lean) if "c" in one.kernels]


def _takes(slot: Slot, operation: type[sf.UnfusedOperation]) -> bool:
    return operation in slot.types or issubclass(operation, slot.open_types)


def fused_in(operation: type[sf.UnfusedOperation], group: Any) -> str:
    """The number of fusions of a set with a slot for an operation, forward and backward."""
    taking = [one for one in group if any(_takes(slot, operation) for slot in one.slots)]
    forward = sum(not issubclass(one, sf.BackwardFusion) for one in taking)
    backward = sum(issubclass(one, sf.BackwardFusion | sf.JointFusion) for one in taking)
    return f"{forward} / {backward}" if taking else "-"


Tested = Mapping[str, set[torch.dtype]]
"""The dtypes in which a test, by its name, runs something."""


@functools.cache
def checked(*patterns: str, by: frozenset[str] = frozenset(("check_fusion",))) -> Tested:
    """What tests of some files check by calling one of `by`, and the dtypes that they do it in: those of a test's
    parameters and fixtures, and those that `check_op` and `check_fusion` are given or take by themselves."""
    found: dict[str, set[torch.dtype]] = {}
    for path in (path for pattern in patterns for path in sorted((ROOT / "tests").glob(pattern))):
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for name, test in inspect.getmembers(module, inspect.isfunction):
            if name.startswith("test_") and test.__module__ == module.__name__:
                names = _names(test)
                helpers = [vars(module).get(one) for one in names]
                names = names.union(*(_names(one) for one in helpers if inspect.isfunction(one)))
                if not names.isdisjoint(by):
                    dtypes, given = _parameters(module, test)
                    for one in names | given:
                        found.setdefault(one, set()).update(dtypes)
    return found


def in_cases(pattern: str) -> Tested:
    """The fusions in the `CASES` of tests, each with the dtypes of its cases."""
    found: dict[str, set[torch.dtype]] = {}
    for path in sorted((ROOT / "tests").glob(pattern)):
        module: Any = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for fusion, dtypes, *_ in module.CASES.values():
            found.setdefault(fusion.__name__, set()).update(dtypes if isinstance(dtypes, tuple) else (dtypes,))
    return found


def either(*several: Tested) -> Tested:
    """The text of a dtype or name."""
    return {name: set().union(*(one.get(name, ()) for one in several)) for name in set().union(*several)}


def _tree(function: Callable[..., Any]) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def _names(function: Callable[..., Any]) -> set[str]:
    """The names in a function's source."""
    nodes = [*ast.walk(_tree(function))]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def _parameters(module: ModuleType, test: Callable[..., Any]) -> tuple[set[torch.dtype], set[str]]:
    """The dtypes among a test's parameters, and the names of all others."""
    given: list[Any] = [mark.args for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    for argument in inspect.signature(test).parameters:
        marker = getattr(getattr(module, argument, None), "_fixture_function_marker", None)
        given += [getattr(marker, "params", None)]
    for call in (node for node in ast.walk(_tree(test)) if isinstance(node, ast.Call)):
        check = getattr(call.func, "id", getattr(call.func, "attr", ""))
        if check in TAKEN:
            dtypes = next((keyword.value for keyword in call.keywords if keyword.arg == "dtypes"), None)
            if dtypes is None:
                given.append(TAKEN[check])
            elif not {node.id for node in ast.walk(dtypes) if isinstance(node, ast.Name)} - {*vars(module)}:
                given.append(eval(ast.unparse(dtypes), vars(module)))
    values = [*_values(given)]
    names = {value if isinstance(value, str) else getattr(value, "__name__", type(value).__name__) for value in values}
    return {value for value in values if isinstance(value, torch.dtype)}, names


def _values(given: Any) -> Iterator[Any]:
    """The leaves of a test's parameters; of a module, its submodules as well."""
    if isinstance(given, Mapping):
        yield from _values([*given.keys(), *given.values()])
    elif isinstance(given, list | tuple | set | frozenset):
        for one in given:  # pytest's parameter sets among them
            yield from _values(one)
    else:
        yield given
        if isinstance(given, torch.nn.Module):
            yield from (member for member in given.modules() if member is not given)


def matrix() -> str:
    """Operations that are not compared in some dtype, and the fusions of each."""
    tested = checked(*OPERATIONS, by=COMPARES)
    sets = {"ATen calls": fusions.aten, "Triton kernels": fusions.triton, "C kernels": in_c()}
    lacking: dict[str, list[str]] = {}
    alike: dict[tuple[str, ...], list[str]] = {}
    for operation in operations():
        name = f"`{operation.__name__}`"
        for dtype in DTYPES:
            if dtype not in tested.get(operation.__name__, ()) or not runs(operation, dtype):
                kind = "runs, not compared" if runs(operation, dtype) else "does not run"
                lacking.setdefault(f"{str(dtype).removeprefix('torch.')}, {kind}", []).append(name)
        alike.setdefault(tuple(fused_in(operation, one) for one in sets.values()), []).append(name)
    lines = [f"- {kind}: {', '.join(names)}" for kind, names in lacking.items()]
    lines += ["", f"| operations | {' | '.join(f'fusions of {one}' for one in sets)} |"]
    lines += [f"| --- | {' | '.join('---:' for _ in sets)} |"]
    lines += [f"| {', '.join(names)} | {' | '.join(counts)} |" for counts, names in alike.items()]
    return "\n".join(lines) + "\n"


def saved() -> str:
    """The saved tensors of each operation, by field of `Saved`."""
    lines = ["| operation | saved for backward |", "| --- | --- |"]
    for operation in operations():
        found = documented.fields_of(operation.Saved)
        fields = [" ".join((f"`{field}`", SHAPE.sub(r"`\g<0>`", about))).strip() for field, about in found]
        cell = "<br>".join(fields).replace("|", r"\|") or "nothing"
        lines.append(f"| `{operation.__name__}` | {cell} |")
    return "\n".join(lines) + "\n"


def how() -> str:
    """How many operations, fusions and kernels are tested in each dtype, and by which check."""
    compared = importlib.import_module("tests.kernels.test_contract").COMPARED
    kernels = {kernel: {*_parameters(inspect.getmodule(test), test)[0]} for kernel, test in compared.items()}
    every = (*fusions.aten, *fusions.triton, *fusions.lean)
    sets = [{one.__name__ for one in every if bool(one.kernels) is kind} for kind in (False, True)]
    rows = (
        ("an operation against its reference or torch", "`check_op` and others", "CPU",
         {one.__name__ for one in operations()}, checked(*OPERATIONS, by=COMPARES)),
        ("a fusion without Triton kernels against its operations", "`check_fusion`", "CPU", sets[0],
         checked("fusions/test_*.py", "parallel/test_*.py")),
        ("a fusion of Triton kernels against its operations", "`check_fusion`", "Triton's interpreter", sets[1],
         either(checked("fusions/triton/test_*.py"), in_cases("fusions/triton/test_check.py"))),
        ("a fusion of C kernels against its operations", "`check_fusion`", "CPU", {one.__name__ for one in in_c()},
         {**checked("kernels/c/test_*.py"), **in_cases("fusions/test_in_c.py")}),
        ("a Triton kernel against its math in float64", "error bound", "Triton's interpreter", kernels, kernels),
    )  # fmt: skip
    lines = [f"| what | by | on | {' | '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)} |"]
    lines += [f"| --- | --- | --- | {' | '.join('---:' for _ in DTYPES)} |"]
    for what, by, on, names, found in rows:
        counts = (sum(dtype in found.get(one, ()) for one in names) for dtype in DTYPES)
        lines.append(f"| {what} | {by} | {on} | {' | '.join(f'{n} of {len(names)}' for n in counts)} |")
    return "\n".join(lines) + "\n"


def targets() -> str:
    """The GPUs that kernels are compiled for: configurations, and how many of them spill registers."""
    results = json.loads((ROOT / "benchmarks" / "results" / "kernels.json").read_text())
    lines = [
        "| target | kernel configurations compiled | with spills | run |",
        "| --- | ---: | ---: | --- |",
    ]
    for target in ("sm_80", "sm_90", "sm_100", "gfx942"):
        rows = [row for row in results["kernels"] if row["target"] == target]
        count, spilled = (sum(row[name] for row in rows) for name in ("configurations", "spilled"))
        ran = "an H100 and an H200" if target == "sm_90" else "no: only compiled"
        lines.append(f"| {target} | {count:,} | {spilled:,} | {ran} |")
    return "\n".join(lines) + "\n"
