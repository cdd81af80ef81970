"""CPU time of training steps beside eager torch, paired: one thread, all sides of a row in one process.

A row names what is measured, how the eager side is made and how its variants are. The sides of a row take turns, and
each round gives one ratio for each variant: medians and quartiles of these are printed and written to
`results/cpu.json`, those of experts to `results/cpu_experts.json`. Times are those of the thread, which other processes
do not add to.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import hugging
import plain
import torch
from bench_host import pair
from record import write
from torch import Tensor, nn

import seqfuse as sf

ROUNDS = 25
ROUND_SECONDS = 0.04


def _vocabulary(width: int) -> int:
    return 4 * width if width > 64 else 32


Build = Callable[[int, float], nn.Module]
Step = Callable[[], Any]
"""One training step, or what is measured in its place."""


class Row(NamedTuple):
    """What is compared: `eager()` and each of `variants` make a step, with the same weights and inputs."""

    name: str
    eager: Callable[[], Step]
    variants: Mapping[str, Callable[[], Step]]


class Measured(NamedTuple):
    """Microseconds of a step, and of the ratios to eager the median and the quartiles."""

    microseconds: float
    ratio: float
    low: float
    high: float


def measure(row: Row, rounds: int = ROUNDS, seconds: float = ROUND_SECONDS) -> dict[str, Measured]:
    """Time the sides of a row in turn, each for about `seconds` in a round; the first side of a round changes."""
    torch._dynamo.reset()
    sides = {"eager": row.eager(), **{name: make() for name, make in row.variants.items()}}
    steps = {name: _steps(run, seconds) for name, run in sides.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    order = list(sides)
    for _ in range(rounds):
        for name in order:
            times[name].append(_timed(sides[name], steps[name]))
        order.append(order.pop(0))
        gc.collect()  # here, so that no side pays for the garbage of another
    found: dict[str, Measured] = {}
    for name, own in times.items():
        low, middle, high = statistics.quantiles([t / e for t, e in zip(own, times["eager"], strict=True)], n=4)
        found[name] = Measured(statistics.median(own) * 1e6, middle, low, high)
    return found


def _steps(run: Step, seconds: float) -> int:
    for _ in range(10):  # plans, generated code, tables of Dynamo
        run()
    return max(1, math.ceil(seconds / max(_timed(run, 3), 1e-7)))


def _timed(run: Step, steps: int) -> float:
    """Seconds of a step."""
    gc.disable()
    begun = time.thread_time()
    for _ in range(steps):
        run()
    took = (time.thread_time() - begun) / steps
    gc.enable()
    return took


def _gpt2(width: int, dropout: float) -> nn.Module:
    dropouts = {"resid_pdrop": dropout, "embd_pdrop": dropout}  # with that of attention eager takes another kernel
    return _with_loss("GPT2", "LMHeadModel", width, **dropouts)


def _llama(width: int, dropout: float) -> nn.Module:
    return _with_loss("Llama", "ForCausalLM", width, attention_dropout=dropout)


def _as_it_comes(width: int, dropout: float) -> nn.Module:
    return _with_loss("GPT2", "LMHeadModel", width, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)


def _with_loss(family: str, head: str, width: int, **more: Any) -> nn.Module:
    return hugging.model(family, width, 2, positions=1024, head=head, vocabulary=_vocabulary(width), **more)


MODELS: dict[str, Build] = {"GPT-2": _gpt2, "GPT-2 with dropout of attention, too": _as_it_comes, "Llama": _llama}


def language_model_step(
    name: str, change: Callable[[nn.Module], object], width: int, tokens: int, dropout: float = 0.0
) -> Step:
    """A training step of a model of Hugging Face with its loss, as `change` leaves it."""
    torch.manual_seed(0)
    model = MODELS[name](width, dropout).train()
    change(model)
    ids = torch.arange(tokens).reshape(1, tokens) % _vocabulary(width)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()

    return step


def _nothing(model: nn.Module) -> None:
    """Eager torch."""


def _dynamo(model: nn.Module) -> None:
    model.compile(backend="eager")


def _lean(model: nn.Module) -> None:
    sf.convert(model, memory="lean")


def language_model(name: str, width: int, tokens: int, dropout: float = 0.0) -> Row:
    """A model of Hugging Face with a loss, converted; the last variant is Dynamo alone, which runs eager's calls."""

    def make(change: Callable[[nn.Module], object]) -> Callable[[], Step]:
        return lambda: language_model_step(name, change, width, tokens, dropout)

    variants = {"default": make(sf.convert), "lean": make(_lean), "Dynamo alone": make(_dynamo)}
    title = f"HF {name}, 2 layers of {width}, {tokens} tokens{_dropped(dropout)}"
    return Row(title, make(_nothing), variants)


def _dropped(p: float) -> str:
    return f", dropout {p}" if p else ""


def _with_gradient(model: nn.Module, x: Tensor, g: Tensor) -> Step:
    def step() -> None:
        model(x).backward(g)

    return step


def sequential(operations: int) -> Row:
    """A `Sequential` of small operations at 4 x 16 beside `torch.nn.Sequential`."""

    def make(side: int) -> Callable[[], Step]:
        def made() -> Step:
            *models, x, g = pair(operations)
            return _with_gradient(models[side], x, g)

        return made

    title = f"Sequential of {operations} operation{'s' * (operations > 1)}, 4 x 16"
    return Row(title, make(1), {"default": make(0)})


def block(name: str, spec: plain.Spec, tokens: int, dtype: torch.dtype = torch.float32) -> Row:
    """A transformer layer made of operations beside the same in torch, eager and compiled by Inductor."""

    def make(memory: Any) -> Callable[[], Step]:
        def made() -> Step:
            torch.manual_seed(0)
            eager = memory in (None, "compile")
            model = plain.build("layer", spec) if eager else plain.fused("layer", spec)
            if memory == "compile":
                model.compile()
            elif not eager:
                model.memory = memory
            x = torch.randn(1, tokens, spec.H, dtype=dtype, requires_grad=True)
            return _with_gradient(model.to(dtype).train(), x, torch.randn(1, tokens, spec.H, dtype=dtype))

        return made

    title = f"{name} block of {spec.H}, {tokens} tokens{_dropped(spec.dropout)}"
    title += "" if dtype is torch.float32 else f", {str(dtype).removeprefix('torch.')}"
    variants = {"default": make("save"), "lean": make("lean")}
    if tokens >= 1024:
        variants |= {"default, GEMMs of MKL": lambda: _by_mkl(variants["default"]()), "torch.compile": make("compile")}
    return Row(title, make(None), variants)


def _by_mkl(run: Step) -> Step:
    """A step whose float32 GEMMs are those of eager torch: what fusions and attention gain by themselves."""

    def step() -> None:
        with torch.backends.mkldnn.flags(enabled=False):
            run()

    return step


def experts(width: int, tokens: int, dtype: torch.dtype = torch.float32) -> Row:
    """The router and the 8 experts of a layer of Mixtral, of which a token goes to 2, with twice the width inside.

    Eager is what Hugging Face takes by default, its grouped GEMMs.
    """

    def make(change: Callable[[nn.Module], object], used: str = "grouped_mm") -> Callable[[], Step]:
        def made() -> Step:
            torch.manual_seed(0)
            layer = hugging.experts(width, 2 * width, used).to(dtype).train()
            change(layer)
            x, g = (torch.randn(1, tokens, width, dtype=dtype) for _ in range(2))
            x.requires_grad_()

            def step() -> None:
                layer(x).backward(g)
                layer.zero_grad()
                x.grad = None

            return step

        return made

    variants = {"default": make(sf.convert), "lean": make(_lean), "loop over experts": make(_nothing, "eager")}
    kind = "" if dtype is torch.float32 else f", {str(dtype).removeprefix('torch.')}"
    return Row(f"experts of {width}, {tokens} tokens{kind}", make(_nothing), variants)


GPT = plain.Spec(256, 1024, 4, 4, 64, False)
LLAMA = plain.Spec(256, 688, 4, 2, 64, True)
ROWS = (
    language_model("GPT-2", 64, 32),
    language_model("Llama", 64, 32),
    language_model("GPT-2", 64, 32, dropout=0.1),
    language_model("GPT-2 with dropout of attention, too", 64, 32, dropout=0.1),
    sequential(1),
    sequential(6),
    block("GPT", GPT, 64),
    block("GPT", dataclasses.replace(GPT, dropout=0.1), 64),
    block("Llama", LLAMA, 64),
    block("GPT", GPT, 1024),
    block("GPT", dataclasses.replace(GPT, dropout=0.1), 1024),
    block("Llama", LLAMA, 1024),
    language_model("GPT-2", 256, 512, dropout=0.1),
    language_model("GPT-2 with dropout of attention, too", 256, 512, dropout=0.1),
    block("GPT", GPT, 256, torch.bfloat16),
    block("Llama", LLAMA, 256, torch.bfloat16),
)

EXPERTS = (
    *(experts(width, tokens) for width in (64, 256) for tokens in (64, 512, 1024, 2048)),
    experts(64, 1024, torch.bfloat16),
    experts(256, 1024, torch.bfloat16),
)
FILES = {"cpu": ROWS, "cpu_experts": EXPERTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("only", nargs="*", help="words that a row's name contains, one of them; all rows by default")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, rows in FILES.items():
        chosen = [row for row in rows if not options.only or any(word in row.name for word in options.only)]
        found = [_found(row, options.rounds) for row in chosen]
        if chosen == [*rows]:
            print(f"wrote {write(name, {'rounds': options.rounds, 'rows': found}).name}")


def _found(row: Row, rounds: int) -> dict[str, Any]:
    """Measure a row, print it, and return what is written of it."""
    sides = measure(row, rounds)
    eager = sides.pop("eager")
    print(f"{row.name}: eager {eager.microseconds:,.0f} us", flush=True)
    for name, m in sides.items():
        print(f"  {name:<14} {m.ratio:.3f} [{m.low:.3f}, {m.high:.3f}] {m.microseconds:,.0f} us", flush=True)
    return {"name": row.name, "eager": eager.microseconds, "sides": {name: m._asdict() for name, m in sides.items()}}


if __name__ == "__main__":
    main()
