"""Runs pytest twice: in Triton's interpreter for the tests of kernels, and without it for every other test.

Triton reads `TRITON_INTERPRET` when a kernel is decorated, so a process is interpreted or compiled, never both. Two
runs that share their tests among all processes cost less than a process for each file. The arguments are pytest's.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def main(arguments: list[str]) -> int:
    """Status of both runs; finding nothing to run counts where neither finds anything."""
    found: list[int] = []
    for half in ("kernels", "plain"):
        # Without bytecode on disk each process, of which there are many, compiles this library and the tests anew.
        left_out = ("TRITON_INTERPRET", "PYTHONDONTWRITEBYTECODE")
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        environment |= {"TRITON_INTERPRET": "1"} if half == "kernels" else {}
        command = [sys.executable, "-m", "pytest", "--half", half, *arguments]
        found.append(subprocess.run(command, env=environment, check=False).returncode)
    empty = int(pytest.ExitCode.NO_TESTS_COLLECTED)
    return max((status for status in found if status != empty), default=empty)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
