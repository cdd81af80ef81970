"""A process that is killed from outside: what waits for a GPU hears no signal but the one that ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

POLL = 0.25
GRACE = 10.0
"""Seconds that a row may take beyond its limit, at which it ends itself unless it waits for the device."""


def watched(
    command: Sequence[str], until: float, stuck: Callable[[], str | None] = lambda: None, *,
    log: str | None = None, environment: Mapping[str, str] | None = None,
) -> tuple[int, str]:  # fmt: skip
    """Run a command, and kill it and all that it started when the time is over or when it is stuck.

    Args:
        command: what runs.
        until: when it is killed, as `time.time()` tells it.
        stuck: why it is to be killed now, `None` as long as it is not; asked a few times a second.
        log: the file that its output is appended to; this process's own output by default.
        environment: its variables; those of this process by default.

    Returns:
        Its exit status, and why it ended where it did not end by itself with 0.
    """
    with contextlib.nullcontext() if log is None else open(log, "ab") as out:
        child = subprocess.Popen(
            command, stdout=out, stderr=out and subprocess.STDOUT, start_new_session=True, env=environment
        )
    why = ""
    try:
        while child.poll() is None and not why:
            time.sleep(POLL)
            why = stuck() or ("the time was over" if time.time() >= until else "")
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        else:
            why = ""
    status = child.wait()
    return status, why or (f"its process ended with status {status}" if status else "")
