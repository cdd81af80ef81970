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
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(lines(self.data))
        os.replace(new, self.path)

    def begin(self, key: str) -> None:
        """Say which row is next: if nothing follows, it was the end of the process."""
        self.state(running=key, since=time.time())

    def overdue(self, seconds: float) -> str | None:
        """Why what is under way should be ended: it has taken longer than that."""
        took = time.time() - self.data.get("since", time.time()) if self.data.get("running") else 0.0
        return f"it hung, and was killed after {took:.0f} s" if took > seconds else None

    def add(self, key: str, row: dict[str, Any]) -> None:
        """Write the row that was under way."""
        self.rows[key] = row
        self.state(running=None)

    def bury(self, why: str) -> str | None:
        """Mark the row that was under way when a process ended; its key."""
        key = self.data.get("running")
        if key is not None:
            group, _, name = key.partition(": ")
            self.add(key, {"group": group, "name": name, "status": "failed", "why": why})
        return key
