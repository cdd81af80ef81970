"""What one layer of each main model does on a GPU: time by kernel, forward and backward, ours beside eager torch.

Writes what GEMMs, attention and all else take to `gpu_profile.json`, and a trace for a browser, `trace.json.gz`.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

os.environ["SEQFUSE_TUNE"] = "0"

from record import RESULTS, about, lines

# Of what the profiler lists, what is no kernel; and whose kernels these are.
NO_KERNEL = r"aten::|autograd|cuda|cu[A-Z]|Seqfuse|Activity|Lazy|Command|torch|.*Backward0?$"
KINDS = {"GEMMs": "nvjet|gemm|splitK", "attention": "sdpa|flash|fmha|attention|dot_do_o|convert_dq"}


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or RESULTS), help="a folder")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, interpreted")
    parser.add_argument("--once", action="store_true", help="one step of ours, for another tool to look at")
    options = parser.parse_args()
    if options.tiny:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch
    from gpu import blocks, sizes
    from torch.profiler import ProfilerActivity, profile

    chosen = sizes.tiny() if options.tiny else sizes.real()
    models = [m for m in chosen.models if options.tiny or m.name in sizes.MAIN]
    activities = [ProfilerActivity.CPU] if options.tiny else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    found: list[dict[str, Any]] = []
    for model in models:
        pair = blocks.Models("layer", blocks.spec_of(model), chosen)
        inputs = blocks.drawn(chosen, model, "x", "dy")(chosen.tokens[0], 0)
        for name, run in (("seqfuse", pair.ours), ("eager", pair.torch())):
            step = blocks.trained(lambda run=run: run).prepare(inputs)
            for _ in range(1 if options.tiny else 3):
                step()
            if options.once:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                return 0
            with profile(activities=activities) as seen:
                step()
                if not options.tiny:
                    torch.cuda.synchronize()
            kernels = [(e.key, _time(e)) for e in seen.key_averages()]
            found.append({"model": model.name, "tokens": chosen.tokens[0], "of": name, **summed(kernels)})
            (options.out / "gpu_profile.json").write_text(lines({"about": about(), "profile": found}))
            if name == "seqfuse" and model is models[0]:
                seen.export_chrome_trace(str(options.out / "trace.json.gz"))
    print(f"wrote {options.out / 'gpu_profile.json'}")
    return 0


def summed(events: list[tuple[str, float]]) -> dict[str, int]:
    """Microseconds of each kind of kernel, of names and times."""
    times = dict.fromkeys((*KINDS, "other"), 0.0)
    for name, time in events:
        if not re.match(NO_KERNEL, name):
            times[next((kind for kind, names in KINDS.items() if re.search(names, name)), "other")] += time
    return {kind: round(time) for kind, time in times.items()}


def _time(event: Any) -> float:
    return getattr(event, "self_device_time_total", 0.0) or event.self_cpu_time_total


if __name__ == "__main__":
    raise SystemExit(main())
