"""Train the byte-level GPT of train_lm.py under each low-precision recipe: does it end where bfloat16 ends?

Five seeds of bfloat16, each with weights, data order and dropout of its own, say how far equally good runs lie apart.
Each recipe then trains from the first seed. On a CPU the 8-bit numbers are emulated exactly, which takes longer.
"""

from __future__ import annotations

import argparse
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


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Validation losses by name, which are printed as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    parser.add_argument("--data", type=Path, default=stdlib, help="a text file, or a folder of Python sources")
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--dim", type=int, default=64, help="width of the model, a multiple of 32")
    parser.add_argument("--layers", type=int, default=2, help="blocks of attention and MLP")
    parser.add_argument("--seeds", type=int, default=5, help="of bfloat16")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    text, held_out = read_bytes(args.data)

    def validated(run: Run) -> float:
        with torch.autocast(HERE.type, torch.bfloat16):
            return run.validate(held_out)

    losses: dict[str, float] = {}
    for seed in range(args.seeds):
        losses[f"bfloat16, seed {seed}"] = loss = validated(trained(None, seed, args, text))
        print(f"bfloat16, seed {seed}: validation loss {loss:.4f}", flush=True)
    low, high = min(losses.values()), max(losses.values())
    outside = 0
    for recipe in RECIPES:
        run = trained(recipe, 0, args, text)
        losses[type(recipe).__name__] = loss = validated(run)
        with torch.autocast(HERE.type, torch.bfloat16):
            plan = run.model.body.plan(windows_at(text, torch.arange(BATCH)).to(HERE)[:, :-1])
        quantized = len({one.at for one in plan.quantizations})
        inside = low <= loss <= high
        outside += not inside
        where = f"{'within' if inside else 'outside'} {low:.4f} to {high:.4f}"
        print(f"{recipe}: validation loss {loss:.4f}, {where}; {quantized} quantized", flush=True)
    print(f"{len(RECIPES) - outside} of {len(RECIPES)} recipes end within the spread of {args.seeds} seeds of bfloat16")
    return losses


if __name__ == "__main__":
    main()
