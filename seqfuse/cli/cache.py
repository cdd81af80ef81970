"""`seqfuse cache`: measurements of `sf.tune` and compiled C kernels, kept for this user."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

import torch

from .. import store
from ..convert import convert
from ..cost_table import FORMAT, sources
from ..env import why_no_c
from ..operation import FusableOperation
from . import inputs
from .output import tell
from .target import Unable, load

# What `measured.Machine.file_name` gives, and the endings that `store` adds.
_KERNEL = re.compile(r"[0-9a-f]{32}\.so(\.\w+\.new)?")
_OURS = re.compile(r"[0-9a-f]{16}\.json(\.seqfuse\.lock|\.\w+\.new|\.bad)?")


def folder() -> Path | None:
    """Where measurements are kept; `None` where there are none.

    Raises:
        Unable: if others could have written there, so that it is not used.
    """
    try:
        return store.user_folder("tune", create=False)
    except OSError as error:
        raise Unable(f"the cache is not used: {error}") from error


def files(where: Path | None) -> list[dict[str, Any]]:
    """What is in it: each file with its size, and of measurements for what they hold and how many there are."""
    return [
        {"file": path.name, "bytes": path.stat().st_size, **_about(path)}
        for path in (sorted(where.iterdir()) if where is not None else [])
        if _OURS.fullmatch(path.name) and not path.is_symlink() and path.is_file()
    ]


def _about(path: Path) -> dict[str, Any]:
    if path.suffix != ".json":
        return {"state": "corrupt" if path.suffix == ".bad" else "of a writer"}
    try:
        read = store.read(path)
        document: Any = json.loads(read) if read is not None else None
    except (OSError, ValueError, RecursionError) as error:
        return {"state": f"cannot be read: {error}"}
    if not isinstance(document, dict):
        return {"state": "corrupt"}
    known = cast(dict[str, Any], document)
    machine, entries = known.get("machine"), known.get("entries")
    if known.get("format") != FORMAT or not isinstance(machine, dict) or not isinstance(entries, dict):
        return {"state": "of another form"}
    about = cast(dict[str, Any], machine)
    holds = "holds" if known.get("sources") == sources() else "out of date"
    versions = {name: str(about.get(name)) for name in ("device", "arch", "torch", "triton", "seqfuse")}
    return {"state": holds, "measurements": len(cast(dict[str, Any], entries)), **versions}


def kernels() -> list[Path]:
    """The compiled C kernels.

    Raises:
        Unable: if others could have written where they are, so that they are not used.
    """
    try:
        where = store.user_folder("c", create=False)
    except OSError as error:
        raise Unable(f"the cache is not used: {error}") from error
    return [path for path in (sorted(where.iterdir()) if where is not None else []) if _KERNEL.fullmatch(path.name)]


def warm(
    name: str, *, given: str, channels: list[str], dtype: str | None, autocast: str | None, part: str | None,
    evaluate: bool,
) -> int:  # fmt: skip
    """Compile the C kernels of a model on this CPU by one step with random numbers; returns how many were compiled.

    A model without operations of this library is converted for that.

    Raises:
        Unable: if it cannot be loaded or run, or nothing compiles here.
    """
    if reason := why_no_c():
        raise Unable(reason)
    here, spec, extra = torch.device("cpu"), inputs.spec(given, dtype), inputs.channels(channels, dtype)
    model = inputs.cast(load(name).build(), spec, dtype, autocast)
    if not any(isinstance(module, FusableOperation) for module in model.modules()):
        convert(model)
    chosen: Any = model if part is None else model.get_submodule(part)
    x = spec.draw(here, 0, inputs.vocabulary(model))
    drawn: Any = {n: s.draw(here, 1) for n, s in extra.items()}
    before = {path.name for path in kernels()}
    with inputs.surroundings("cpu", autocast, not evaluate):
        out: Any = chosen.train(not evaluate)(x.requires_grad_(not evaluate and x.is_floating_point()), **drawn)
        several: list[Any] = [*out] if isinstance(out, tuple) else [out, *getattr(out, "__dict__", {}).values()]
        made = [t for t in several if isinstance(t, torch.Tensor) and t.requires_grad]
        torch.autograd.backward(made, [torch.ones_like(t) for t in made])
    return len({path.name for path in kernels()} - before)


def show(where: Path | None, found: list[dict[str, Any]]) -> None:
    """Print what is kept."""
    compiled = kernels()
    if compiled:
        size = sum(path.stat().st_size for path in compiled)
        tell(str(compiled[0].parent), "bold")
        tell(f"  {len(compiled)} C kernels, {size / 2**20:.1f} MiB")
    if where is None or not found:
        if not compiled:
            tell("nothing is kept" + (f" in {where}" if where is not None else ""))
        return
    tell(str(where), "bold")
    for file in found:
        line = f"  {file['file']}  {file['bytes']} bytes, {file['state']}"
        if "measurements" in file:
            line += f": {file['measurements']} measurements, {file['device']} ({file['arch']}), torch {file['torch']}"
        tell(line)


def clear(where: Path | None) -> list[str]:
    """Remove what `sf.tune` has written there, and C kernels, and nothing else; returns the names.

    Raises:
        Unable: if a file cannot be removed.
    """
    removed: list[str] = []
    for path in (*(sorted(where.iterdir()) if where is not None else []), *kernels()):
        if (_OURS.fullmatch(path.name) or _KERNEL.fullmatch(path.name)) and (path.is_symlink() or path.is_file()):
            try:
                path.unlink()
            except OSError as error:
                raise Unable(f"{path} cannot be removed: {error.strerror}") from error
            removed.append(path.name)
    return removed
