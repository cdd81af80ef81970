"""Records plans, saved bytes, launches and error messages of the library, to compare two states of the code.

    python tools/record.py --out FILE      write the record, as JSON, compressed
    python tools/record.py --diff FILE     record again, print each difference, exit with 1 if there is one
    python tools/record.py --diff ONE TWO  compare two records

It imports the package in the working directory.

A record is a dictionary of lists of lines. For each of 27 families of models, converted, and for layers of
`seqfuse.nn`, with each choice of memory, for this CPU and for an H100, which need not exist: the steps of both
schedules, segments, saved tensors and why fusions are not applied; for conversions also the kernel launches of a
call, and unconverted calls. For each mistake of `mistakes.py` its error. Names of classes appear, names of files do
not.
"""

from __future__ import annotations

import os

os.environ |= {
    "SEQFUSE_TUNE": "0",
    "SEQFUSE_CPU_GEMMS": "torch",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

import argparse
import contextlib
import difflib
import functools
import importlib
import json
import lzma
import platform
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))  # last, since `benchmarks` also has a `record`
sys.path.insert(0, "examples")
sys.path.insert(0, str(Path.cwd()))  # the package in the working directory

import mistakes
import torch
import transformers
from torch import nn

import seqfuse as sf
from seqfuse import ops

MEMORY = ("fast", "balanced", "lean")
H100, HALF = "cuda:sm_90", torch.bfloat16
Record = dict[str, list[str]]


def lines_of(plan: sf.Plan) -> list[str]:
    """A plan in lines, without the version of the C compiler, which depends on the machine."""
    data = plan.as_dict()
    text = [f"plan for {data['env']['text']}, kernels {data['env']['kernels']}, GEMMs {data['gemms']}"]
    for op in data["operations"]:
        about = f"saves {_listed(op['saves'])}; needs {_listed(op['needs'])}"
        text += [f"{op['at']} {op['name']} {op['path']!r}: {about}"]
    for schedule in ("forward", "backward"):
        for step in data[schedule]:
            saves = f", saves {_listed(step['saves'])}" if step["saves"] else ""
            text.append(f"{schedule} {step['start']}-{step['stop']} {step['name']}, {step['kind']}{saves}")
    text.append(f"segments {_listed(f'{start}-{stop}' for start, stop in data['segments'])}")
    for refused in data["refused"]:
        places = "; ".join(f"{name} at {_listed(at)}" for name, at in refused["fusions"].items())
        kinds = [kind for kind in ("superseded", "expected", "own") if refused[kind]]
        text.append(f"not applied: {places}: {refused['reason']} [{_listed(kinds)}]")
    text += [f"matches nowhere: {name}" for name in data["unmatched"]]
    text += [f"eager: {e['at']} {e['name']}: {e['reason']}" for e in data["eager"]]
    text += [f"cast: {c['at']} {c['name']} to {c['dtype']}" for c in data["casts"]]
    if (memory := data["memory"]) is not None:
        text.append(f"saved {memory['saved']} B, unfused {memory['saved_unfused']} B; {memory['flops']} FLOPs")
    if data["memory_unknown"] is not None:
        text.append(f"bytes unknown: {data['memory_unknown']}")
    for c in data["choices"]:
        text.append(f"choice {c['memory']}: {c['saved']} B, {c['microseconds']:.3f} us{', used' * c['used']}")
    return [normal(line) for line in text]


def _listed(values: Any) -> str:
    return " ".join(map(str, values)) or "-"


def normal(text: str) -> str:
    """A text without parts that differ between processes or change when files move."""
    text = re.sub(r"[\w./<>-]*?([\w-]+\.py):\d+", r"\1", text)
    text = re.sub(r"\bseqfuse(?:\.[a-z_]\w*)+\.([A-Z])", r"\1", text)  # classes may move between files
    return re.sub(r"0x[0-9a-f]{6,}", "0x", text)


# Conversions ----------------------------------------------------------------------------------------------------------


def families() -> dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]]:
    """The models of the tests of `sf.convert`, and a model with dropout."""
    from tests.convert.families import FAMILIES, VOCABULARY

    sizes = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

    def with_dropout() -> nn.Module:
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=32, **sizes)
        return transformers.GPT2LMHeadModel(config)

    every = {name: (family.build, family.inputs) for name, family in FAMILIES.items()}
    return {**every, "gpt2, dropout": (with_dropout, FAMILIES["gpt2"].inputs)}


def converted(name: str, memory: Any) -> Record:
    """A family, converted and called once: its chains here and for an H100, and the unconverted calls."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    build, inputs = families()[name]
    model = build().train()
    conversion = sf.convert(model, memory=memory)
    model(**inputs())
    found: Record = {}
    for g, graph in enumerate(conversion.graphs):
        place = f"{name}, {memory}: graph {g}"
        found[place] = [f"chain of {len(region.model)}" for region in graph.regions]
        found[place] += [f"left: {x.kind} {x.call} in {x.module!r}: {x.reason}" for x in graph.left]
        found[place] += [f"beside: {call} x{count}" for call, count in sorted(graph.beside.items())]
        for r, region in enumerate(graph.regions):
            plan, eager = region.plan, region.eager
            assert plan is not None
            launches = [f"launches {region.launched}; eager torch {eager and tuple(eager)}"]
            found[f"{place}, chain {r}, here"] = [*lines_of(plan), *launches]
            found[f"{place}, chain {r}, H100"] = lines_of(region.plan_for(H100, dtype=HALF))
            if memory == "fast":
                found[f"{place}, chain {r}, H100 without gradients"] = lines_of(
                    region.plan_for(H100, dtype=HALF, grad=False)
                )
                found[f"{place}, chain {r}, H100 autocast"] = lines_of(region.plan_for(H100, autocast=HALF))
    conversion.undo()
    return found


# Layers ---------------------------------------------------------------------------------------------------------------


def layers() -> dict[str, tuple[Callable[[], sf.Sequential], tuple[int, ...]]]:
    """Sequences of `seqfuse.nn` without data, at realistic sizes, and the shape of an input."""
    from seqfuse.nn import FeedForward, MultiHeadAttention, TransformerLayer, TransformerStack

    models: Any = importlib.import_module("models")
    stack = functools.partial(TransformerStack, 2, 256, 8, device="meta")
    rotary = functools.partial(ops.RotaryEmbedding, style="half")
    heads: dict[str, Any] = {"kv_heads": 1, "qk_norm": True, "rotary": rotary}
    made: dict[str, Any] = {name: functools.partial(getattr(models, name), 2) for name in models.SIX}
    gpt = functools.partial(ops.GeLU, "tanh")
    made |= {
        "dropout": functools.partial(stack, causal=True, activation=gpt, dropout=0.1, attention_dropout=0.1),
        "window": functools.partial(stack, pre_norm=False, activation=ops.ReLU, dropout=0.1, window=3),
        "scaled": functools.partial(stack, residual_scale=0.5, activation=ops.SquaredReLU, softcap=5.0, causal=True),
        "geglu": functools.partial(stack, activation=ops.GEGLU, norm=ops.RMSNorm, **heads),
        "layer": functools.partial(TransformerLayer, 256, 8, hidden_dropout=0.1, device="meta"),
        "feed-forward": functools.partial(FeedForward, 256, 1024, ops.SwiGLU, device="meta"),
        "attention": functools.partial(MultiHeadAttention, 256, 8, 2, device="meta"),
    }
    widths = {"llama3_8b": 4096, "qwen3_06b": 1024, "gemma3_1b": 1152}
    shapes = {name: (4, 512, widths.get(name, 768 if name in models.SIX else 256)) for name in made}
    return {name: (build, shapes[name]) for name, build in made.items()}


def layered(name: str, memory: Any) -> Record:
    """Plans of a sequence of layers for this CPU and for an H100."""
    build, shape = layers()[name]
    model, place = build(), f"{name}, {memory}"
    model.memory = memory
    found: Record = {}
    tokens = shape[0] * shape[1]

    def plan(device: str, dtype: torch.dtype, grad: bool = True) -> list[str]:
        x = torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)
        return lines_of(model.to(dtype).plan(x, env=sf.Env.of(device, dtype=dtype, grad=grad, tokens=tokens)))

    found[f"{place}, here"] = plan("cpu", torch.float32)
    found[f"{place}, H100"] = plan(H100, HALF)
    if memory == "fast":
        model.eval()
        found[f"{place}, H100 without gradients"] = plan(H100, HALF, grad=False)
        found[f"{place}, without gradients, here"] = plan("cpu", torch.float32, grad=False)
    return found


# All of it ------------------------------------------------------------------------------------------------------------


def recorded(only: str = "", say: bool = True) -> Record:
    """The record; `only`: the beginning of the keys to record."""
    parts: Iterator[tuple[str, Callable[[], Record]]] = iter(
        [
            *(
                (f"converted {name}, {memory}", functools.partial(converted, name, memory))
                for name in families()
                for memory in MEMORY
            ),
            *(
                (f"layers {name}, {memory}", functools.partial(layered, name, memory))
                for name in layers()
                for memory in MEMORY
            ),
            ("mistakes", lambda: {name: [normal(t) for t in text] for name, text in mistakes.said().items()}),
        ]
    )
    found: Record = {}
    for part, make in parts:
        if part.startswith(only):
            if say:
                print(f"\r{part:60}", end="", file=sys.stderr, flush=True)
            with contextlib.redirect_stdout(sys.stderr):
                kind = part.partition(" ")[0]
                found |= {f"{kind} {key}": lines for key, lines in make().items()}
    if say:
        print(f"\r{len(found)} entries{'':50}", file=sys.stderr)
    return found


def versions() -> dict[str, Any]:
    """Versions and settings, other than the code, that a record depends on."""
    return {
        "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
        "kernels": sf.Env.of("cpu").kernels,
    }  # fmt: skip


def write(record: Record, path: Path) -> None:
    """Write a record as compressed JSON, each distinct line once, since layers and plans repeat."""
    lines = {line: i for i, line in enumerate(dict.fromkeys(line for text in record.values() for line in text))}
    entries = {key: [lines[line] for line in text] for key, text in record.items()}

    text = json.dumps({"versions": versions(), "lines": [*lines], "entries": entries}, separators=(",", ":"))
    path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def read(path: Path) -> tuple[dict[str, Any], Record]:
    """The versions of a written record, and the record."""
    data: dict[str, Any] = json.loads(lzma.decompress(path.read_bytes()))
    return data["versions"], {key: [data["lines"][i] for i in text] for key, text in data["entries"].items()}


def differences(before: Record, after: Record, aside: str | None = None) -> Iterator[str]:
    """Changed lines, once for all entries with the same change, and added or removed entries.

    Args:
        before: a record.
        after: another record.
        aside: a pattern of texts that are expected to change, and are removed from both.
    """
    found: dict[tuple[str, ...], list[str]] = {}
    for key in dict.fromkeys((*before, *after)):
        if key not in after or key not in before:
            found.setdefault(("no longer there" if key in before else "new",), []).append(key)
            continue
        one, other = (_without(record[key], aside) for record in (before, after))
        for kind, a, b, c, d in difflib.SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
            if kind != "equal":
                found.setdefault((*(f"-{t}" for t in one[a:b]), *(f"+{t}" for t in other[c:d])), []).append(key)
    for lines, keys in found.items():
        yield f"{keys[0]}{f' and {len(keys) - 1} more' * (len(keys) > 1)}:"
        yield from (f"  {line}" for line in lines)


def _without(text: list[str], aside: str | None) -> list[str]:
    return text if aside is None else [left for line in text if (left := re.sub(aside, "", line))]


def main() -> int:
    """Write a record or compare records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="FILE", help="write the record")
    what.add_argument("--diff", type=Path, nargs="+", metavar="FILE", help="compare this record, with another if given")
    parser.add_argument(
        "--only", default="", metavar="KEY", help='entries whose key begins so: "converted llama, save"'
    )
    parser.add_argument("--aside", metavar="PATTERN", help="what is meant to change, and is left out of both sides")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.out:
        write(recorded(given.only), given.out)
        return 0
    (known, before), *others = map(read, given.diff)
    before = {key: text for key, text in before.items() if key.startswith(given.only)}
    there, after = others[0] if others else (versions(), recorded(given.only))
    if known != there:
        print(f"recorded with {known}, the other with {there}")
    found = [*differences(before, after, given.aside)]
    print("\n".join(found) if found else "no difference")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
