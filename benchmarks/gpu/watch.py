"""A run that keeps what it has: its file is whole after every row, and a process that hangs is killed from outside.

What waits for a GPU hears no signal but the one that ends it. As a plug-in of pytest this prints each failure as it
comes: a run that is killed prints none at its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from record import lines


def watched(
    command: Sequence[str], until: float, stuck: Callable[[], str | None] = lambda: None, *,
    log: str | None = None, environment: Mapping[str, str] | None = None,
) -> tuple[int, str]:  # fmt: skip
    """Run a command, and kill it and all that it started at `until`, as `time.time()` tells it, or when it is stuck.

    `stuck` says why, and is asked a few times a second. Output is appended to `log` if there is one. Returns the exit
    status, and why the command ended where it did not end by itself with 0.
    """
    with contextlib.nullcontext() if log is None else open(log, "ab") as out:
        child = subprocess.Popen(
            command, stdout=out, stderr=out and subprocess.STDOUT, start_new_session=True, env=environment
        )
    why = ""
    try:
        while child.poll() is None and not why:
            time.sleep(0.25)
            why = stuck() or ("the time was over" if time.time() >= until else "")
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        else:
            why = ""
    status = child.wait()
    return status, why or (f"its process ended with status {status}" if status else "")


class Book:
    """Rows by key, and which one is under way."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.rows: dict[str, dict[str, Any]] = self.data.setdefault("rows", {})  # what was measured

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
        return f"it was killed after {took:.0f} s" if took > seconds else None

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


def pytest_runtest_logreport(report: Any) -> None:
    """Print the name of a test that failed, what was raised and where."""
    if report.failed:
        told = [line[:260] for line in report.longreprtext.splitlines() if line.startswith("E ") or ": in " in line]
        print(f"\n<<< {report.nodeid} [{report.when}]", *told[-9:], ">>>", sep="\n", flush=True)
