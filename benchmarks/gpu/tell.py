"""A plug-in for pytest that prints each failure as it comes: a run that is killed prints none at its end."""

from __future__ import annotations

import pytest

_LINES = 9


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print the name of a test that failed, what was raised and where."""
    if not report.failed:
        return
    told = [line[:260] for line in report.longreprtext.splitlines() if line.startswith("E ") or ": in " in line]
    print(f"\n<<< {report.nodeid} [{report.when}]", *told[-_LINES:], ">>>", sep="\n", flush=True)
