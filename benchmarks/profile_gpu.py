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


def main() -> None:
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
    wait: Any = (lambda: None) if options.tiny else torch.cuda.synchronize
    activities = [ProfilerActivity.CPU, *([] if options.tiny else [ProfilerActivity.CUDA])]
    found: list[dict[str, Any]] = []
    for model in blocks.mains(chosen) or chosen.models:
        of, tokens = blocks.Models("layer", blocks.spec_of(model), chosen), chosen.tokens[0]
        inputs = blocks.drawn(chosen, model, "x", "dy")(tokens, 0)
        for name, module in (("seqfuse", of.ours), ("eager", of.torch())):
            step = blocks.trained(lambda module=module: module).prepare(inputs)
            for _ in range(1 if options.tiny else 3):
                step()
            wait()
            if options.once:
                return
            with profile(activities=activities) as seen:
                step()
                wait()
            found.append({"model": model.name, "tokens": tokens, "of": name, **summed(seen.key_averages())})
            (options.out / "gpu_profile.json").write_text(lines({"about": about(), "profile": found}))
            if len(found) == 1:
                seen.export_chrome_trace(str(options.out / "trace.json.gz"))
    print(f"wrote {options.out / 'gpu_profile.json'}")


def summed(events: Any) -> dict[str, int]:
    """Microseconds of each kind of kernel."""
    times = dict.fromkeys((*KINDS, "other"), 0.0)
    for event in events:
        if not re.match(NO_KERNEL, event.key):
            kind = next((kind for kind, names in KINDS.items() if re.search(names, event.key)), "other")
            times[kind] += getattr(event, "self_device_time_total", 0.0) or event.self_cpu_time_total
    return {kind: round(time) for kind, time in times.items()}


if __name__ == "__main__":
    main()
