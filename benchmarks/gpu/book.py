"""The file of results, whole after every row, so that a run that is cut off keeps what it has."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from record import lines


class Book:
    """Rows by key, and which one is under way."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.data.setdefault("rows", {})

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        """What was measured."""
        return self.data["rows"]

    def state(self, **facts: Any) -> None:
        """Write facts about the whole run."""
        self.data |= facts
        self._write()

    def begin(self, key: str) -> None:
        """Say which row is next: if nothing follows, it was the end of the process."""
        self.data |= {"running": key, "since": time.time()}
        self._write()

    def overdue(self, seconds: float) -> str | None:
        """Why what is under way should be ended: it has taken longer than that."""
        begun = self.data.get("since")
        if self.data.get("running") is None or begun is None or time.time() - begun <= seconds:
            return None
        return f"it hung, and was killed after {time.time() - begun:.0f} s"

    def add(self, key: str, row: dict[str, Any]) -> None:
        """Write the row that was under way."""
        self.rows[key] = row
        self.data["running"] = None
        self._write()

    def bury(self, why: str) -> str | None:
        """Mark the row that was under way when a process ended; its key."""
        key = self.data.get("running")
        if key is not None:
            group, _, name = key.partition(": ")
            self.add(key, {"group": group, "name": name, "status": "failed", "why": why})
        return key

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(lines(self.data))
        os.replace(new, self.path)
