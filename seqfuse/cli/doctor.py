"""`seqfuse doctor`: the state of this machine, with warnings, and which fusions can run on it."""

from __future__ import annotations

import dataclasses
import itertools
import os
import platform
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, cast

import torch
from cyclopts import Parameter

from .. import Env, FusedOperation, InferenceFusion, InputError, Sequential, compiler, fusions, plugins, store
from ..cost_table import driver_version, version_of
from ..env import why_no_c
from ..settings import settings
from ..testing.cases import Case, Specimen
from ..testing.patterns import example_lists
from ..testing.tensors import seeded_randn
from .inputs import Json
from .output import tell, tell_json

_PACKAGES = ("seqfuse", "torch", "triton", "numpy", "cyclopts", "rich", "transformers")

_EXAMPLES = 8


def doctor(
    *,
    json: Json = False,
    verbose: Annotated[bool, Parameter(negative="", show_default=False, help="List the fusions by name.")] = False,
) -> int:
    """Show devices, versions, caches, plug-ins, and how many fusions can run here; exit 1 if there is a warning."""
    report = examine()
    if json:
        tell_json({**report, "executable": sys.executable})
    else:
        show_report(report, verbose)
    return int(bool(report["warnings"]))


def examine() -> dict[str, Any]:
    """Examine everything without importing plug-ins; writes nothing except the C compiler's test file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        known = dataclasses.asdict(settings.__wrapped__())
    versions = {"python": platform.python_version(), **{name: version_of(name) for name in _PACKAGES}}
    said = [str(one.message) for one in caught]
    report: dict[str, Any] = {
        "versions": {**versions, "CUDA of torch": torch.version.cuda, "driver": driver_version() or None},
        "devices": [*_devices()],
        "settings": known,
        "warnings": said,
        "caches": [*_caches(said)],
        "plugins": [dataclasses.asdict(plugin) for plugin in plugins.available()],
        **{name: dict[str, Any]() for name in ("kernels", "can_run", "cannot_run")},
    }
    owners: dict[str, list[str]] = {}
    for plugin in report["plugins"]:
        owners.setdefault(plugin["name"], []).append(plugin["distribution"])
    for name, several in owners.items():
        if len(several) > 1:
            report["warnings"].append(f"plug-in {name!r} cannot be loaded: {' and '.join(several)} both offer it")
    for device in dict.fromkeys(["cpu", *(d["name"] for d in report["devices"])]):
        report["kernels"][device] = _kernels(Env.of(device))
        report["can_run"][device], report["cannot_run"][device] = _fusions(device)
    return report


def _devices() -> Iterator[dict[str, Any]]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    yield {"name": "cpu", "model": platform.machine(), "threads": torch.get_num_threads(), "bytes": memory}
    for i in range(torch.cuda.device_count()):
        about = cast(Any, torch.cuda).get_device_properties(i)
        arch = Env.of(f"cuda:{i}").arch
        yield {"name": f"cuda:{i}", "model": about.name, "arch": arch, "bytes": about.total_memory}


def _kernels(env: Env) -> str:
    """How kernels run on a device, or why they do not run."""
    if env.kernels == "triton":
        return "Triton, interpreted, which is slow" if env.device == "cpu" else "Triton"
    found = compiler.compiler() if env.kernels == "c" else None
    if found is not None:
        return f"C ({found.version})"
    return f"none: {why_no_c() if env.device == 'cpu' else 'torch sees no CUDA device'}"


def _caches(said: list[str]) -> Iterator[dict[str, str]]:
    """The folders of the user's cache and who may write to them; adds to the warnings."""
    import platformdirs

    for name, of in (("tune", "measurements"), ("c", "C kernels")):
        path = platformdirs.user_cache_path("seqfuse") / name
        try:
            state = "none yet" if store.user_folder(name, create=False) is None else "private"
            if state == "private" and not os.access(path, os.W_OK | os.X_OK):
                said.append(f"nothing can be written to {path}")
        except OSError as error:
            state = f"not used: {error}"
            said.append(f"the cache of {of} is not used: {error}")
        yield {"of": of, "path": str(path), "state": state}


def _fusions(device: str) -> tuple[list[str], dict[str, list[str]]]:
    """The fusions of this library that apply to examples of their operations; the others by reason."""
    can: list[str] = []
    cannot: dict[str, list[str]] = {}
    for fusion in dict.fromkeys((*fusions.default, *fusions.lean)):
        reason = _refused(fusion, device)
        if reason is None:
            can.append(fusion.__name__)
        else:
            cannot.setdefault(reason, []).append(fusion.__name__)
    return can, cannot


def _refused(fusion: type[FusedOperation], device: str) -> str | None:
    """Why a fusion cannot run on a device in any of its dtypes; `None` if it can."""
    if fusion.kernels and Env.of(device).kernels not in fusion.kernels:
        return (why_no_c() if device == "cpu" and "c" in fusion.kernels else "") or "needs a Triton device"
    grad = not issubclass(fusion, InferenceFusion)
    reasons: list[str] = []
    for dtype in (torch.bfloat16, torch.float32):
        for width in (64, 1024):
            x = seeded_randn((64, width), 0, dtype=dtype).to(device)
            try:
                for operations, entering in itertools.islice(example_lists(fusion, x), _EXAMPLES):
                    chain = Sequential(*operations, fusions=(fusion,), memory="lean").to(device, dtype)
                    drawn = Specimen(operations, entering, {}, 0).inputs_for(Case(tuple(entering.shape), dtype), 0)
                    inputs: Any = {name: t for name, t in drawn.items() if name != "x"}
                    with torch.set_grad_enabled(grad):
                        plan = chain.plan(entering.requires_grad_(grad), **inputs)
                    if plan.fused != (0, 0) or any(r.superseded for r in plan.refused):
                        return None
                    reasons += [r.reason for r in plan.refused]
            except InputError:  # no example fits; that does not depend on this machine
                return None
            except Exception as error:
                reasons.append(f"no example could be planned: {type(error).__name__}: {error}")
    return reasons[0] if reasons else "it matches none of the examples that were made for it"


def show_report(report: dict[str, Any], verbose: bool) -> None:
    """Print a report as text; if `verbose`, with the names of fusions."""
    tell("versions", "bold")
    for name, version in report["versions"].items():
        tell(f"  {name:<14} {version or 'none'}")
    tell("devices", "bold")
    for device in report["devices"]:
        parts = [device["model"], device.get("arch"), f"{device['bytes'] / 2**30:.0f} GiB" if device["bytes"] else None]
        parts += [f"{device['threads']} threads"] if "threads" in device else []
        tell(f"  {device['name']:<14} {', '.join(p for p in parts if p)}")
        tell(f"  {'':<14} compiled kernels: {report['kernels'][device['name']]}")
    tell("caches", "bold")
    for cache in report["caches"]:
        tell(f"  {cache['of']:<17} {cache['path']}: {cache['state']}")
    tell("settings", "bold")
    for name, value in report["settings"].items():
        tell(f"  SEQFUSE_{name.upper():<14} {int(value) if isinstance(value, bool) else value}")
    tell("plug-ins", "bold")
    for plugin in report["plugins"]:
        tell(f"  {plugin['name']} ({plugin['distribution']} {plugin['version']}, {plugin['value']})")
    if not report["plugins"]:
        tell("  none is installed")
    for device, can in report["can_run"].items():
        tell(f"fusions on {device}", "bold")
        tell(_wrapped(f"{len(can)} can run" + _names(can if verbose else [])))
        for reason, names in report["cannot_run"][device].items():
            tell(_wrapped(f"{len(names)} cannot: {reason}" + _names(names if verbose else [])))
    if not verbose:
        tell("  --verbose lists them")
    tell("warnings", "bold")
    for sentence in report["warnings"]:
        tell(f"  {sentence}", "yellow")
    if not report["warnings"]:
        tell("  none")


def _names(names: Sequence[str]) -> str:
    return f": {', '.join(names)}" if names else ""


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
