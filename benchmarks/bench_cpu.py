"""Compares CPU times of training steps with eager torch, and counts bytes that layers of converted models save.

A row runs a step for each of its sides, with the same weights and inputs, in one process. Writes `cpu.json`,
`cpu_experts.json` and `convert.json` in `results/`, each only if all its rows were measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import plain
import torch
from bench_host import pair
from gpu.case import counted
from gpu.clock import Call, Ratios, paired, step_of
from record import write
from torch import nn

import seqfuse as sf

ROUNDS = 25
CHANGES: dict[str, Callable[[Any], object]] = {
    "eager": lambda model: None,
    "default": sf.convert,
    "fast": functools.partial(sf.convert, memory="fast"),
    "lean": functools.partial(sf.convert, memory="lean"),
    "Dynamo alone": lambda model: model.compile(backend="eager"),  # runs the same calls as eager
}
CONVERTED = {"Llama": "LlamaModel", "GPT-2": "GPT2Model", "BERT": "BertModel"}


class Row(NamedTuple):
    """A comparison with `eager`: for the name of each side, `make` returns its step."""

    name: str
    make: Callable[[str], Call]
    sides: tuple[str, ...]

    def times(self, rounds: int = ROUNDS, seconds: float = 0.04) -> dict[str, Ratios]:
        torch._dynamo.reset()
        steps: dict[str, Call] = {}
        for side in ("eager", *self.sides):
            torch.manual_seed(0)
            steps[side] = self.make(side)
        return paired(steps, rounds, seconds)


def language_model(name: str, width: int, tokens: int, dropout: float = 0.0, attention: float | None = None) -> Row:
    """A Hugging Face model with its loss, converted; with attention dropout, eager torch uses another kernel."""
    vocabulary, dropouts = 4 * width if width > 64 else 32, (dropout, dropout, attention or 0.0)
    kind = {"GPT-2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM"}[name]

    def make(side: str) -> Call:
        model = plain.hugging(kind, width, 2, 1024, vocabulary=vocabulary, dropouts=dropouts).train()
        CHANGES[side](model)
        ids = torch.arange(tokens).reshape(1, tokens) % vocabulary
        return step_of(lambda: model(input_ids=ids, labels=ids).loss, clears=model.parameters())

    title = f"HF {name}{' with dropout of attention, too' if attention else ''}, 2 layers of {width}, {tokens} tokens"
    return Row(title + _told(dropout), make, ("default", "lean", "Dynamo alone"))


def _told(dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> str:
    """The suffix of a row's name for dropout and dtype."""
    typed = "" if dtype is torch.float32 else f", {str(dtype).removeprefix('torch.')}"
    return (f", dropout {dropout}" if dropout else "") + typed


def sequential(operations: int) -> Row:
    """A `Sequential` of small operations at 4 x 16 against `torch.nn.Sequential`."""

    def make(side: str) -> Call:
        mine, theirs, x, g = pair(operations)
        return step_of(functools.partial(theirs if side == "eager" else mine, x), g)

    return Row(f"Sequential of {operations} operation{'s' * (operations > 1)}, 4 x 16", make, ("default",))


def block(name: str, spec: plain.Spec, tokens: int, dtype: torch.dtype = torch.float32) -> Row:
    """A transformer layer built of operations, against the same layer in torch, eager and compiled by Inductor."""
    without_onednn = "default, GEMMs of MKL"  # the gain of fusions and attention without that of oneDNN

    def make(side: str) -> Call:
        model = (plain.build if side in ("eager", "torch.compile") else plain.fused)("layer", spec)
        if side == "torch.compile":
            model.compile()
        elif side != "eager":
            model.memory = "lean" if side == "lean" else "save"
        x, g = (torch.randn(1, tokens, spec.H, dtype=dtype) for _ in range(2))
        step = step_of(functools.partial(model.to(dtype).train(), x.requires_grad_()), g)
        return torch.backends.mkldnn.flags(enabled=False)(step) if side == without_onednn else step

    more = (without_onednn, "torch.compile") if tokens >= 1024 else ()
    title = f"{name} block of {spec.H}, {tokens} tokens{_told(spec.dropout, dtype)}"
    return Row(title, make, ("default", "lean", *more))


def experts(width: int, tokens: int, dtype: torch.dtype = torch.float32) -> Row:
    """Router and 8 experts of a layer of Mixtral, against Hugging Face's default, grouped GEMMs."""

    loop = "loop over experts"

    def make(side: str) -> Call:
        layer = plain.mixtral(width, 2 * width, "eager" if side == loop else "grouped_mm").to(dtype).train()
        CHANGES["eager" if side == loop else side](layer)
        x, g = (torch.randn(1, tokens, width, dtype=dtype) for _ in range(2))
        return step_of(functools.partial(layer, x.requires_grad_()), g, [x, *layer.parameters()])

    return Row(f"experts of {width}, {tokens} tokens{_told(dtype=dtype)}", make, ("default", "lean", loop))


def converted(name: str, shape: tuple[int, int], width: int) -> Row:
    """Two layers of a Hugging Face model without a loss, so small that Python and dispatch dominate."""

    def make(side: str) -> Call:
        tokens, model = torch.arange(shape[0] * shape[1]).reshape(shape) % 32, headless(name, 2, width)
        CHANGES[side](model)
        return step_of(lambda: model(input_ids=tokens).last_hidden_state.sum(), clears=model.parameters())

    return Row(f"converted {name}, {shape[0]} x {shape[1]} tokens", make, ("fast",))


def headless(name: str, layers: int, width: int = 64) -> nn.Module:
    return plain.hugging(CONVERTED[name], width, layers, 256 if name == "GPT-2" else 1024).train()


def layer_bytes(name: str, memory: Any) -> int:
    """Bytes that one additional layer saves for backward, of an unconverted model (`None`) or a converted one."""
    tokens, totals = torch.arange(256).reshape(2, 128) % 32, list[int]()
    for layers in (1, 2):
        torch._dynamo.reset()
        model = headless(name, layers)
        if memory is not None:
            sf.convert(model, memory=memory)
        model(input_ids=tokens)
        totals.append(counted(lambda model=model: model(input_ids=tokens), list(model.parameters())))
    return totals[1] - totals[0]


GPT = plain.Spec(256, 1024, 4, 4, 64, False)
LLAMA = plain.Spec(256, 688, 4, 2, 64, True)
DROPPED = dataclasses.replace(GPT, dropout=0.1)
ROWS = (
    language_model("GPT-2", 64, 32),
    language_model("Llama", 64, 32),
    language_model("GPT-2", 64, 32, dropout=0.1),
    language_model("GPT-2", 64, 32, dropout=0.1, attention=0.1),
    sequential(1),
    sequential(6),
    block("GPT", GPT, 64),
    block("GPT", DROPPED, 64),
    block("Llama", LLAMA, 64),
    block("GPT", GPT, 1024),
    block("GPT", DROPPED, 1024),
    block("Llama", LLAMA, 1024),
    language_model("GPT-2", 256, 512, dropout=0.1),
    language_model("GPT-2", 256, 512, dropout=0.1, attention=0.1),
    block("GPT", GPT, 256, torch.bfloat16),
    block("Llama", LLAMA, 256, torch.bfloat16),
)
EXPERTS = (
    *(experts(width, tokens) for width in (64, 256) for tokens in (64, 512, 1024, 2048)),
    *(experts(width, 1024, torch.bfloat16) for width in (64, 256)),
)
CONVERSIONS = (*(converted(name, (2, 16), 16) for name in CONVERTED), converted("Llama", (1, 1024), 128))
FILES = {"cpu": ROWS, "cpu_experts": EXPERTS, "convert": CONVERSIONS}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("only", nargs="*", help="words that a row's name contains, one of them; all rows by default")
    parser.add_argument("--files", nargs="*", default=[*FILES], choices=[*FILES], help="of which files")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    for file in options.files:
        chosen = [row for row in FILES[file] if not options.only or any(word in row.name for word in options.only)]
        found = {row.name: measured(row, options.rounds) for row in chosen}
        if len(found) == len(FILES[file]):
            rows = bytes_of(found) if file == "convert" else [{"name": name, **row} for name, row in found.items()]
            write(file, {"rounds": options.rounds, "rows": rows}, by_capability=file != "convert")


def measured(row: Row, rounds: int) -> dict[str, Any]:
    """Measure a row, print it, and return its data for the file."""
    sides = row.times(rounds)
    for of in sides.values():
        of["microseconds"] = of.pop("seconds") * 1e6
    found = {"eager": sides.pop("eager")["microseconds"], "sides": sides}
    told = (f"{side} {of['ratio']:.3f} [{of['low']:.3f}, {of['high']:.3f}]" for side, of in sides.items())
    print(f"{row.name}: eager {found['eager']:,.0f} us; {', '.join(told)}", flush=True)
    return found


def bytes_of(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of converted models: bytes that a layer saves, and times of a step."""
    rows: list[dict[str, Any]] = []
    for name in CONVERTED:
        steps = [row["sides"]["fast"] for key, row in found.items() if key.startswith(f"converted {name},")]
        kept = {memory: layer_bytes(name, memory) for memory in ("save", "balanced", "lean")}
        row = {"model": name, "eager": layer_bytes(name, None), "kept": kept}
        rows.append({**row, **dict(zip(("step", "long"), steps, strict=False))})
        print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    main()
