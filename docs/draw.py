"""The pictures of the documents, as SVG with colors for light and dark. To draw them anew, run  python -m docs.draw

Bars are drawn from what the blocks of a page print, which the tests compare with what is printed now.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

import torch

import seqfuse as sf
from seqfuse import ops

HERE = Path(__file__).resolve().parent

STYLE = """
    svg {
      --back: #f8f9fb; --ink: #1f2430; --soft: #667085; --line: #98a2b3;
      --plain: #ffffff; --record: #fdf3d7; --forward: #d6ebff; --backward: #dff3e1; --joint: #ece3fb;
    }
    @media (prefers-color-scheme: dark) {
      svg {
        --back: #1b1e24; --ink: #e8eaf0; --soft: #a0a8b8; --line: #667085;
        --plain: #272b33; --record: #4a3f1c; --forward: #17395c; --backward: #1d4527; --joint: #3b2c5a;
      }
    }
    text { font: 14px system-ui, sans-serif; fill: var(--ink); text-anchor: middle; dominant-baseline: central; }
    .soft { fill: var(--soft); font-size: 12px; }
    .left { text-anchor: start; }
    .code { font-family: ui-monospace, monospace; font-size: 12px; }
    .bold { font-weight: 600; }
    rect { stroke: var(--line); rx: 6; }
    path { stroke: var(--soft); stroke-width: 1.5; fill: none; marker-end: url(#head); }
    marker path { fill: var(--soft); stroke: none; marker-end: none; }
    .back { fill: var(--back); stroke: none; rx: 10; }
"""


class Picture:
    """Shapes on a plane of a given size; coordinates are those of the upper left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, fill: str, *lines: str, kind: str = "") -> None:
        """A rectangle with centered lines of text."""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="var(--{fill})"/>')
        for i, line in enumerate(lines):
            self.text(x + width / 2, y + height / 2 + 18 * (i - (len(lines) - 1) / 2), line, kind)

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        """A line of text, centered unless `kind` says left."""
        kind = f' class="{kind}"' if kind else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}"{kind}>{escape(words)}</text>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """A line with a head."""
        self.parts.append(f'<path d="M{x:g} {y:g} L{to_x:g} {to_y:g}"/>')

    def svg(self) -> str:
        """The picture."""
        head = '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        return "\n".join(
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{STYLE}</style>",
                f'<defs>{head}<path d="M0 0 L8 4 L0 8 z"/></marker></defs>',
                f'<rect class="back" width="{self.width}" height="{self.height}"/>',
                *self.parts,
                "</svg>\n",
            )
        )


def contract() -> str:
    """Two covers of one list, and the records between them."""
    p = Picture(860, 400, "Forward cover and backward cover of one list meet only in the operations' records")
    left, step, wide = 145, 140, 124
    names = ("Linear", "Bias", "GeLU", "Linear", "Bias")
    records = ("x, weight", "nothing", "x", "x, weight", "nothing")
    p.text(16, 55, "forward cover", "left bold")
    p.text(16, 145, "operations", "left bold")
    p.text(16, 225, "records", "left bold")
    p.text(16, 325, "backward cover", "left bold")
    p.box(left, 30, 2 * step + wide, 50, "forward", "LinearBiasGeLU")
    p.box(left + 3 * step, 30, wide, 50, "plain", "Linear")
    p.box(left + 4 * step, 30, wide, 50, "plain", "Bias")
    for i, (name, record) in enumerate(zip(names, records, strict=True)):
        x = left + i * step
        p.box(x, 125, wide, 40, "plain", name)
        p.box(x, 205, wide, 40, "record", record, kind="code")
        p.arrow(x + 20, 82, x + 20, 203)
        p.arrow(x + wide - 20, 247, x + wide - 20, 298)
    p.box(left, 300, wide, 50, "plain", "Linear")
    p.box(left + step, 300, step + wide, 50, "backward", "BiasGeLU")
    p.box(left + 3 * step, 300, step + wide, 50, "backward", "LinearBiasBackward")
    p.text(430, 378, "whoever runs forward fills every record; whoever runs backward reads nothing else", "soft")
    return p.svg()


def four_ways() -> str:
    """Fused and unfused, forward and backward: four ways to the same numbers."""
    p = Picture(860, 250, "Any forward cover goes with any backward cover: four ways to the same numbers")
    for row, how in enumerate(("unfused", "fused")):
        y = 30 + 90 * row
        p.box(30, y, 190, 60, "forward" if row else "plain", "forward", how)
        p.arrow(222, y + 30, 258, y + 30)
        p.arrow(432, y + 30, 468, y + 30)
        p.box(470, y, 190, 60, "backward" if row else "plain", "backward", how)
        p.arrow(662, y + 30, 718, 115 + 10 * row)
    p.box(260, 30, 170, 150, "record", "records", "of the operations")
    p.box(720, 90, 120, 60, "joint", "y, dx, dw", kind="code")
    p.text(430, 222, "the test kit runs all four and compares every output and every gradient", "soft")
    return p.svg()


def segments() -> str:
    """A list cut into autograd nodes, whose gradients leave one after the other."""
    p = Picture(860, 270, "Each segment is one autograd node; gradients of late layers leave while early ones wait")
    for i in range(3):
        x = 60 + 260 * i
        p.box(x, 30, 220, 50, "forward", f"segment {i + 1}: forward")
        p.box(x + 35, 105, 150, 34, "record", "what it keeps", kind="code")
        p.box(x, 165, 220, 50, "backward", f"segment {i + 1}: backward")
        p.arrow(x + 110, 82, x + 110, 103)
        p.arrow(x + 110, 141, x + 110, 163)
        if i:
            p.arrow(x - 38, 55, x - 2, 55)
            p.arrow(x - 2, 190, x - 38, 190)
        p.arrow(x + 110, 217, x + 110, 240)
        p.text(x + 110, 252, f"gradients of its parameters: {('third', 'second', 'first')[i]}", "soft")
    p.text(30, 55, "x", "code")
    p.arrow(38, 55, 58, 55)
    p.arrow(58, 190, 38, 190)
    p.text(24, 190, "dx", "code")
    p.text(836, 55, "y", "code")
    p.arrow(802, 55, 826, 55)
    p.text(836, 190, "dy", "code")
    p.arrow(824, 190, 802, 190)
    return p.svg()


def memory() -> str:
    """Bytes that a feed-forward block keeps, as `memory.md` prints them."""
    page = (HERE / "memory.md").read_text()
    found = {name: int(count) for name, count in re.findall(r"^(\S+) keeps (\d+)$", page, re.MULTILINE)}
    bars = [("torch.nn", found["torch.nn"], "plain")]
    bars += [(f'"{name}"', found[name], fill) for name, fill in (("save", "forward"), ("lean", "backward"))]
    p = Picture(860, 200, "Bytes kept for the backward pass of a feed-forward block")
    most = max(count for _, count, _ in bars)
    for i, (name, count, fill) in enumerate(bars):
        y = 25 + 50 * i
        p.text(24, y + 18, name, "left")
        p.box(150, y, 560 * count / most, 36, fill)
        p.text(160 + 560 * count / most, y + 18, f"{count / 2**20:.2f} MiB", "left")
    operations = "LayerNorm, Linear, GeLU, Linear, Dropout"
    p.text(430, 184, f"kept for backward by a residual block: {operations}; 512 rows of 64, float32", "soft")
    return p.svg()


def plan() -> str:
    """The plan of a feed-forward block for an H100, as the library draws it."""
    operations = ops.LayerNorm(1024), ops.Linear(1024, 4096), ops.GeLU(), ops.Linear(4096, 1024), ops.Dropout(0.1)
    env = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=8192)
    return sf.Sequential(ops.Residual(*operations)).bfloat16().plan(env=env).svg()


PICTURES = {"contract": contract, "four_ways": four_ways, "segments": segments, "memory": memory, "plan": plan}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / "pictures" / f"{name}.svg").write_text(draw())
