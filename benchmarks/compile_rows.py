"""Every kernel that the GPU rows launch, at their real sizes, compiled for an sm_90 by the Triton that is installed.

What a GPU would refuse is then known before there is one. Prints what does not compile, spills or does not fit; the
exit status says whether anything does.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from collections.abc import Iterator

os.environ["SEQFUSE_TUNE"] = "0"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import plain
import torch
from gpu import attention, blocks, norms, pointwise, sizes, small
from gpu.launched import Launch, of_block, of_row

from seqfuse.kernels._launch import _identity
from seqfuse.testing.compile import Variant
from tools.compiled import Compiled, compile_one

ROOMS = (norms, pointwise, attention, small)


def launches(only: str, real: sizes.Sizes | None = None) -> Iterator[tuple[str, Launch]]:
    """Of rows of one kernel, then of whole layers; of all sizes, or of some."""
    here = dataclasses.replace(real or sizes.real(), device=torch.device("cpu"))
    for room in ROOMS:
        for case in sorted(room.cases(here), key=lambda case: case.priority):
            if case.group != "host" and re.search(only, case.key):
                yield from ((case.key, launch) for launch in of_row(case))
    for model in here.models:
        spec = blocks.spec_of(model, here.dropout)
        for tokens in here.tokens:
            key = f"layer: {model.name} {tokens}"
            if re.search(only, key):
                layer = plain.fused("layer", spec, dtype=here.dtype)
                x = torch.empty(max(1, tokens // 2048), min(tokens, 2048), model.H, dtype=here.dtype)
                yield from ((key, launch) for launch in of_block(layer, x))


def variants(only: str) -> Iterator[Variant]:
    """One for each kernel that is compiled differently, named after the first row that launches it."""
    seen: set[object] = set()
    for key, one in launches(only):
        variant = one.variant(f"{key}: {one.kernel.__name__}")
        told = (
            one.kernel.__name__, repr(variant.signature), variant.divisible, repr(sorted(variant.options.items())),
            repr([(n, _identity(v)) for n, v in variant.constexprs.items()]), one.num_warps, one.num_stages,
        )  # fmt: skip
        if told not in seen:
            seen.add(told)
            yield variant


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", default="", help="a regular expression that a row's key contains")
    parser.add_argument("--target", default="sm_90")
    parser.add_argument("--list", action="store_true", help="compile nothing")
    options = parser.parse_args()
    count, bad = 0, 0
    for variant in variants(options.only):
        count += 1
        if options.list:
            print(variant.name)
            continue
        try:
            found = compile_one(variant, options.target)
        except Exception as error:
            found = Compiled("", variant.name, options.target, error=f"{type(error).__name__}: {error}")
        if found.error or found.spills or found.over_shared:
            bad += 1
            print(f"{variant.name}: {found.error or f'{found.spills} spilled, {found.shared} shared'}", flush=True)
    print(f"{count} kernels, {bad} that do not compile, spill or do not fit")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
