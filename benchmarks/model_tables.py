"""Tables of whole models: what memory they take on a CPU, which are converted, whether they train in 8 bits."""

from __future__ import annotations

import statistics

from tables import Lines, Results, between, drawn, table, where, wrapped


@drawn("foreign", "foreign")
def foreign(found: Results) -> Lines:
    """What became of models of other people's packages."""
    rows = found["rows"]
    right, packages = sum(row["state"] == "right" for row in rows), len({row["package"] for row in rows})
    inside = {kind: sum(row["inside"][kind] for row in rows) for kind in rows[0]["inside"]}
    every = {kind: n + sum(row["outside"][kind] for row in rows) for kind, n in inside.items()}
    gemms, norms, activations = (f"{n / every[kind]:.0%}" for kind, n in inside.items())
    of = {"balanced": 'the default, `memory="balanced"`', "lean": '`"lean"`'}
    saved = (f"{statistics.median(r['kept'][key] for r in rows if r['kept']):.2f} with {n}" for key, n in of.items())
    all_right = f"{right} of them" if right < len(rows) else "All"
    return [wrapped(
        f"""`make test-models` converts {len(rows)} small models from {packages} packages. {all_right} gave the same
        outputs and gradients within the error bound. {gemms} of their GEMMs, {norms} of their norms and {activations}
        of their activations were converted. In the median they save, relative to the bytes that eager PyTorch saves
        for backward, {" and ".join(saved)}. """ + where(found)
    )]  # fmt: skip


@drawn("trained", "trained")
def trained(found: Results) -> Lines:
    """Losses after training under each recipe, beside those of the same seeds of bfloat16."""
    (name, plain), *others = found["losses"].items()
    cells = [[name, f"{statistics.mean(plain):.4f}", "", ", ".join(f"{loss:.4f}" for loss in plain)]]
    for name, losses in others:
        apart = [loss - base for loss, base in zip(losses, plain, strict=False)]  # of as many seeds as have run
        mean = f"{statistics.mean(losses):.4f}" if len(losses) == len(plain) else ""
        cells.append([f"`{name}`", mean, f"{statistics.mean(apart):+.4f}", ", ".join(f"{one:+.4f}" for one in apart)])
    few = "A row without a mean has run from the first seeds only. " * any(not cell[1] for cell in cells)
    spread = f"bfloat16 spans {min(plain):.4f} to {max(plain):.4f}. {few}Emulated on a CPU: {where(found)}"
    head = "", "mean loss", "beside bfloat16", f"{len(plain)} seeds: loss, or difference to bfloat16 of the same seed"
    return [*table(head, cells), "", wrapped(spread)]


@drawn("front", "front")
def budgets(found: Results) -> Lines:
    """Time and peak of a step on a CPU for each choice of memory, beside what torch has."""
    models = list(dict.fromkeys(row["model"] for row in found["rows"]))
    rows = {(row["model"], row["side"]): row for row in found["rows"]}
    named = {
        "eager": "eager PyTorch",
        "checkpointed": "each layer checkpointed",
        "selective": "selective checkpointing",
    }
    cells: list[Lines] = []
    for side in dict.fromkeys(side for _, side in rows):
        ours = f"`sf.Budget(part={float(side):g})`" if side[0].isdigit() else f'`memory="{side}"`'
        compiled = f"`torch.compile`, `activation_memory_budget = {side.rpartition(' ')[2]}`"
        cells.append([named.get(side, compiled if side.startswith("compile") else ours)])
        for model in models:
            row, eager = rows[model, side], rows[model, "eager"]
            cells[-1] += [f"{row['peak'] / eager['peak']:.2f}", between(row["step"])]
    head = "", *(cell for model in models for cell in (f"{model}, peak", "CPU time"))
    about = f"{found['layers']} layers of width {found['width']}, {{}} x {{:,}} tokens, one thread; medians of"
    said = f"{about} {found['rounds']} rounds and quartiles, relative to eager PyTorch; the GPT has dropout 0.1."
    return [where(found), "", *table(head, cells), "", wrapped(said.format(*found["tokens"]))]
