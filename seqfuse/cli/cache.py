"""`seqfuse cache`: what `sf.tune` has kept for this user."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

from .. import store
from ..cost_table import FORMAT, sources
from .output import tell
from .target import Unable

# What `measured.Machine.file_name` gives, and the endings that `store` adds.
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


def show(where: Path | None, found: list[dict[str, Any]]) -> None:
    """Print what is kept."""
    if where is None or not found:
        tell("nothing is kept" + (f" in {where}" if where is not None else ""))
        return
    tell(str(where), "bold")
    for file in found:
        line = f"  {file['file']}  {file['bytes']} bytes, {file['state']}"
        if "measurements" in file:
            line += f": {file['measurements']} measurements, {file['device']} ({file['arch']}), torch {file['torch']}"
        tell(line)


def clear(where: Path | None) -> list[str]:
    """Remove what `sf.tune` has written there and nothing else; returns the names.

    Raises:
        Unable: if a file cannot be removed.
    """
    removed: list[str] = []
    for path in sorted(where.iterdir()) if where is not None else []:
        if _OURS.fullmatch(path.name) and (path.is_symlink() or path.is_file()):
            try:
                path.unlink()
            except OSError as error:
                raise Unable(f"{path} cannot be removed: {error.strerror}") from error
            removed.append(path.name)
    return removed
