"""Runs that keep their results: the file is complete after every row, and hanging processes are killed from outside.

A process that waits for a GPU reacts to no signal but SIGKILL. As a pytest plugin this module prints each failure
immediately, since a killed run prints none at its end.
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
    """Run a command, and kill it and its children at `until`, in terms of `time.time()`, or when it is stuck.

    `stuck` returns the reason, and is called a few times per second. Output is appended to `log`, if given. Returns the
    exit status, and why the command was killed or failed, else "".
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
    """Rows by key, and the key of the current one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.rows: dict[str, dict[str, Any]] = self.data.setdefault("rows", {})  # measured rows

    def state(self, **facts: Any) -> None:
        """Write data on the whole run."""
        self.data |= facts
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(lines(self.data))
        os.replace(new, self.path)

    def begin(self, key: str) -> None:
        """Record the next row: if the file ends with it, the row has ended the process."""
        self.state(running=key, since=time.time())

    def overdue(self, seconds: float) -> str | None:
        """Why the current row should be killed, if it has taken longer than `seconds`."""
        took = time.time() - self.data.get("since", time.time()) if self.data.get("running") else 0.0
        return f"it was killed after {took:.0f} s" if took > seconds else None

    def add(self, key: str, row: dict[str, Any]) -> None:
        """Write the current row."""
        self.rows[key] = row
        self.state(running=None)

    def bury(self, why: str) -> str | None:
        """Mark the row in progress when a process ended as failed; returns its key."""
        key = self.data.get("running")
        if key is not None:
            group, _, name = key.partition(": ")
            self.add(key, {"group": group, "name": name, "status": "failed", "why": why})
        return key


def pytest_runtest_logreport(report: Any) -> None:
    """Print the name of a failed test, and what was raised and where."""
    if report.failed:
        told = [line[:260] for line in report.longreprtext.splitlines() if line.startswith("E ") or ": in " in line]
        print(f"\n<<< {report.nodeid} [{report.when}]", *told[-9:], ">>>", sep="\n", flush=True)
