"""Train the byte-level GPT of train_lm.py under each low-precision recipe: does it end where bfloat16 ends?

Each seed has weights, data order and dropout of its own. bfloat16 and all recipes train from the same seeds, so that
the runs of a seed differ by the recipe alone. On a CPU the 8-bit numbers are emulated exactly, which takes longer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import sysconfig
from pathlib import Path

import torch

from seqfuse import recipes

sys.path.insert(0, str(Path(__file__).parent))
from train_lm import BATCH, CONTEXT, HERE, Built, Run, read_bytes, windows_at

RECIPES = (
    recipes.Float8CurrentScaling(),
    recipes.Float8RowScaling(),
    recipes.Float8BlockScaling(),
    recipes.MXFP8(),
    recipes.Float8DelayedScaling(),
)


def trained(recipe: recipes.Recipe | None, seed: int, args: argparse.Namespace, text: torch.Tensor) -> Run:
    """A model after training, in bfloat16 but for the operands that the recipe quantizes."""
    torch.manual_seed(seed)
    model = Built(args.dim, args.layers).to(HERE)
    model.body.recipe = recipe
    run = Run("run", model, args.steps)
    batches = torch.Generator().manual_seed(seed)
    for step in range(args.steps):
        windows = windows_at(text, torch.randint(len(text) - CONTEXT, (BATCH,), generator=batches)).to(HERE)
        with torch.autocast(HERE.type, torch.bfloat16):
            run.losses.append(run.step(windows, seed * args.steps + step))
        run.schedule.step()
    return run


def main(argv: list[str] | None = None) -> dict[str, list[float]]:
    """Validation losses of each seed by name of the recipe, which are printed as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    parser.add_argument("--data", type=Path, default=stdlib, help="a text file, or a folder of Python sources")
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--dim", type=int, default=64, help="width of the model, a multiple of 32")
    parser.add_argument("--layers", type=int, default=2, help="blocks of attention and MLP")
    parser.add_argument("--seeds", type=int, default=5, help="that bfloat16 and each recipe train from")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    text, held_out = read_bytes(args.data)

    losses: dict[str, list[float]] = {}
    for recipe in (None, *RECIPES):
        name = "bfloat16" if recipe is None else type(recipe).__name__
        plain, own = losses.get("bfloat16", []), losses.setdefault(name, [])
        for seed in range(args.seeds):
            run = trained(recipe, seed, args, text)
            with torch.autocast(HERE.type, torch.bfloat16):
                own.append(run.validate(held_out))
                plan = run.model.body.plan(windows_at(text, torch.arange(BATCH)).to(HERE)[:, :-1])
            quantized = len({one.at for one in plan.quantizations})
            beside = f", {own[seed] - plain[seed]:+.4f}" if recipe else ""
            print(f"{name}, seed {seed}: validation loss {own[seed]:.4f}{beside}; {quantized} quantized", flush=True)
    low, high = min(losses["bfloat16"]), max(losses["bfloat16"])
    means = {name: statistics.mean(found) for name, found in losses.items()}
    print(f"bfloat16: {low:.4f} to {high:.4f}, mean {means['bfloat16']:.4f}")
    within = {name: low <= mean <= high for name, mean in means.items() if name != "bfloat16"}
    for name, inside in within.items():
        apart = means[name] - means["bfloat16"]
        print(f"{name}: mean {means[name]:.4f}, {apart:+.4f}, {'within' if inside else 'outside'} that spread")
    print(f"{sum(within.values())} of {len(within)} recipes end within the spread of {args.seeds} seeds of bfloat16")
    return losses


if __name__ == "__main__":
    main()
