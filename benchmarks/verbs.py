"""Wall time of every verb of the Makefile, in an empty clone with an environment of its own.

Writes `results/verbs.json`, of which `make report` draws a table: each verb in the place of what is there of it, with
the commit it is of, as soon as it is done.

    python3 benchmarks/verbs.py                 # every verb that needs no GPU
    python3 benchmarks/verbs.py demo check      # these

Needs nothing but Python, make and git; what is installed comes from pip's cache where it is there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# What comes first installs what those after it find.
VERBS = ("help", "demo", "lint", "types", "docs", "test", "check", "test-full", "kernels", "bench")


def timed(verb: str, clone: Path) -> tuple[float, int]:
    """Seconds of one verb and its status; its output is shown as it comes."""
    # As a stranger's shell: no environment of this one, nothing on the path of imports.
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    began = time.perf_counter()
    status = subprocess.run(["make", verb], cwd=clone, env=kept).returncode
    return time.perf_counter() - began, status


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verbs", nargs="*", default=VERBS, help="in this order")
    parser.add_argument("--clone", type=Path, help="where to clone to, or an earlier clone; a temporary folder if not")
    parser.add_argument("--note", default="", help="what else the machine did, for the table")
    options = parser.parse_args()
    path = ROOT / "benchmarks" / "results" / "verbs.json"
    with tempfile.TemporaryDirectory() as folder:
        clone: Path = options.clone or Path(folder) / "clone"
        if not clone.exists():
            subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        head = subprocess.run(["git", "-C", str(clone), "rev-parse", "HEAD"], capture_output=True, text=True)
        commit = head.stdout.strip()
        for verb in options.verbs:
            seconds, status = timed(verb, clone)
            print(f"make {verb}: {seconds:.1f} s, status {status}", flush=True)
            # Read again: another run may have written since.
            rows: dict[str, Any] = json.loads(path.read_text())["verbs"] if path.exists() else {}
            date = datetime.now(UTC).isoformat(timespec="seconds")
            rows[verb] = {"seconds": seconds, "status": status, "commit": commit, "date": date, "note": options.note}
            ordered = {name: rows[name] for name in VERBS if name in rows}
            path.write_text(json.dumps({"about": {"cores": os.cpu_count()}, "verbs": ordered}, indent=1) + "\n")
    print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
