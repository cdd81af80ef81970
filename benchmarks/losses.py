"""Tables of what is slower than in eager torch or by a peer: every measured row that loses, drawn from the results."""

from __future__ import annotations

from tables import Lines, Results, drawn, of_another_run, starred, table

PEERS = {"eager": "eager PyTorch", "compile": "`torch.compile`", "liger": "Liger", "quack": "quack"}
EQUAL = 1.005
NAMES = {"host": "a call of a tiny block"}


@drawn("slower_gpu", "gpu")
def slower_gpu(found: Results) -> Lines:
    """By group of rows and peer: how many lose, and the worst."""
    ratios: dict[tuple[str, str], dict[str, float]] = {}
    for row in found["rows"].values():
        times = row.get("as_called") or row.get("times") or {}
        for peer, name in PEERS.items():
            if row["status"] == "ok" and {"seqfuse", peer} <= times.keys():
                ratio = times["seqfuse"]["median"] / times[peer]["median"]
                ratios.setdefault((NAMES.get(row["group"], row["group"]), name), {})[starred(row, row["name"])] = ratio
    cells: list[tuple[str, ...]] = []
    for (group, name), of in ratios.items():
        worst = max(of, key=of.__getitem__)
        if of[worst] > EQUAL:
            lost = sum(ratio > EQUAL for ratio in of.values())
            cells.append((group, name, f"{lost} of {len(of)}", f"{of[worst]:.2f} ({worst})"))
    lost = table(("what", "slower than", "rows", "worst: time / peer"), sorted(cells), left=2)
    another = of_another_run(found["rows"].values())
    return [*lost, *(["", another] if another else [])]


@drawn("slower_cpu", "cpu", "cpu_experts", "convert")
def slower_cpu(*results: Results) -> Lines:
    """Steps that take longer than in eager torch, the slowest first."""
    *steps, models = results
    sides = {row["name"]: row["sides"] for found in steps for row in found["rows"]}
    ratios = {name: of["default"]["ratio"] for name, of in sides.items() if "default" in of}
    for row in models["rows"]:
        for name, tokens in (("step", "32"), ("long", "1,024")):
            if name in row:
                ratios[f"HF {row['model']}, 2 layers of 16, {tokens} tokens"] = row[name]["ratio"]
    lost = sorted((name for name, ratio in ratios.items() if ratio > EQUAL), key=ratios.__getitem__, reverse=True)
    return table(("step", "CPU time / eager PyTorch"), [(name, f"{ratios[name]:.2f}") for name in lost])
