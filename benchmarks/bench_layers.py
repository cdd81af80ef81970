"""Blocks and layers on this CPU: time against eager torch and `torch.compile`, and bytes kept for backward.

Times are ratios of interleaved pairs, with their quartiles; no time is compared across runs. A block whose results do
not agree by the numeric rule reports nothing. Writes `results/layers.json`.
"""

from __future__ import annotations

import argparse
import os

os.environ["SEQFUSE_TUNE"] = "0"  # whatever a user has measured on this machine

from typing import Any

import torch
from gpu import blocks
from gpu.case import Case, by_the_rule, copied, kept, reds
from gpu.clock import OnHost
from gpu.sizes import Model, Sizes
from record import write

MODELS = (Model("gpt", 256, 1024, 4, 4, 64, 64, False), Model("llama", 256, 688, 4, 2, 64, 64, True))
ROWS = (64, 1024)
WHAT = ("feedforward", "attention", "layer")


def sizes(dtype: torch.dtype, compile_modes: tuple[str, ...] = ("default",)) -> Sizes:
    """On the CPU, of no more than the blocks need."""
    return Sizes(torch.device("cpu"), compile_modes, 64, (), (), MODELS, ROWS, 64, (), 1, dtype)


def ratios(case: Case, inputs: Any, names: list[str], seconds: float) -> dict[str, dict[str, float]]:
    """Times of ours over those of each other, in pairs that alternate which comes first."""
    import statistics
    import time

    clock = OnHost(torch.device("cpu"))
    mine = [case.contenders["seqfuse"].prepare(inputs)]
    found: dict[str, dict[str, float]] = {}
    for name in names:
        other = [case.contenders[name].prepare(inputs)]
        for _ in range(5):
            clock.sample(mine)
            clock.sample(other)
        pairs: list[float] = []
        stop = time.perf_counter() + seconds
        while time.perf_counter() < stop or len(pairs) < 15:
            first, second = (mine, other) if len(pairs) % 2 == 0 else (other, mine)
            one, two = clock.sample(first), clock.sample(second)
            pairs.append(one / two if first is mine else two / one)
        low, middle, high = statistics.quantiles(pairs, n=4)
        found[name] = {"ratio": middle, "low": low, "high": high}
    return found


def measure(case: Case, seconds: float) -> dict[str, Any] | None:
    """One row, or nothing where results do not agree."""
    try:
        by_the_rule(case)
    except AssertionError as error:
        print(f"{case.key}: {error}")
        return None
    inputs = case.make(case.rows, 1)
    wrong = reds(case, copied(inputs))
    if "seqfuse" in wrong:
        print(f"{case.key}: {wrong['seqfuse']}")
        return None
    names = [name for name in case.contenders if name not in {"seqfuse", "liger", "seqfuse lean", *wrong}]
    kept_bytes = {name: kept(case.contenders[name], inputs) for name in ("seqfuse", *names)}
    row = {"block": case.group.split(" forward")[0], "name": case.name, "dtype": str(case.dtype).removeprefix("torch.")}
    row |= {"x": list(inputs["x"].shape), "kept": kept_bytes}
    return {**row, "forward + backward": ratios(case, inputs, names, seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="of pairs, for each ratio")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    made = sizes(getattr(torch, options.dtype))
    rows: list[dict[str, Any]] = []
    for model in MODELS:
        for what in WHAT:
            for tokens in ROWS:
                spec = blocks.spec_of(model)
                case = blocks.block_case(made, blocks.Models(what, spec, made), model, what, tokens, 0)
                row = measure(case, options.seconds)
                torch._dynamo.reset()
                if row is not None:
                    rows.append(row)
                    print(row, flush=True)
    print(f"wrote {write('layers', {'layers': rows}).name}")


if __name__ == "__main__":
    main()
