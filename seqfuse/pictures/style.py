"""Colors and sizes: one palette for light and dark, distinguishable by color-blind readers."""

from __future__ import annotations

from .data import Kind

SIGNS: dict[Kind, str] = {"forward": "→", "backward": "←", "joint": "⇄", "inference": "○"}
"""Signs in front of fusions' names, so that color is not the only mark of their kind."""

NAMES: dict[Kind, str] = {
    "forward": "forward fusion",
    "backward": "backward fusion",
    "joint": "joint fusion",
    "inference": "inference fusion",
    "unfused": "one operation, not fused",
    "eager": "runs eagerly",
}

# Background, band of a segment, card, text, faint text, lines; then background, edge and text of each kind of
# fusion. The edges are from the palette of Okabe and Ito.
_LIGHT = {
    "ground": "#ffffff", "band": "#f3f5f8", "card": "#ffffff", "ink": "#1b1f24", "faint": "#59636e", "line": "#c9d1d9",
    "forward": "#d9eaf7", "forward-edge": "#0072b2", "forward-ink": "#00395a",
    "backward": "#fbe5d6", "backward-edge": "#d55e00", "backward-ink": "#6b2f00",
    "joint": "#d5f0e6", "joint-edge": "#009e73", "joint-ink": "#004432",
    "inference": "#f7e4ee", "inference-edge": "#b3568a", "inference-ink": "#5c1f42",
}  # fmt: skip
_DARK = {
    "ground": "#14181d", "band": "#1c222a", "card": "#242b34", "ink": "#e6edf3", "faint": "#9aa5b1", "line": "#3f4954",
    "forward": "#123a55", "forward-edge": "#56b4e9", "forward-ink": "#dcf0fc",
    "backward": "#512a0e", "backward-edge": "#f0883e", "backward-ink": "#fde7d3",
    "joint": "#0c4335", "joint-edge": "#2fc79a", "joint-ink": "#d7f6ec",
    "inference": "#4a2640", "inference-edge": "#e39bc3", "inference-ink": "#fbe5f1",
}  # fmt: skip

# Notebooks, editors and documentation declare their theme; otherwise the system's setting applies.
_SAID_DARK = ('[data-theme="dark"]', '[data-jp-theme-light="false"]', ".vscode-dark")
_SAID_LIGHT = ('[data-theme="light"]', '[data-jp-theme-light="true"]', ".vscode-light")


def _variables(palette: dict[str, str]) -> str:
    return "".join(f"--sf-{name}:{value};" for name, value in palette.items())


def _under(places: tuple[str, ...]) -> str:
    return ",".join(f"{place} .sf-plan" for place in places)


COLORS = (
    f".sf-plan{{{_variables(_LIGHT)}color-scheme:light}}"
    f"@media (prefers-color-scheme:dark){{.sf-plan{{{_variables(_DARK)}color-scheme:dark}}}}"
    f"{_under(_SAID_DARK)}{{{_variables(_DARK)}color-scheme:dark}}"
    f"{_under(_SAID_LIGHT)}{{{_variables(_LIGHT)}color-scheme:light}}"
)

_SANS = 'system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","DejaVu Sans",sans-serif'
_MONO = 'ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace'

SHAPES = (
    f".sf-plan text{{font-family:{_SANS};font-size:12px;fill:var(--sf-ink)}}"
    ".sf-plan .ground{fill:var(--sf-ground)}"
    ".sf-plan .band{fill:var(--sf-band)}"
    ".sf-plan .card{fill:var(--sf-card);stroke:var(--sf-line)}"
    ".sf-plan .title{font-size:15px;font-weight:600}"
    ".sf-plan .name{font-weight:600}"
    ".sf-plan .at{font-size:11px}"
    ".sf-plan .faint{fill:var(--sf-faint);font-size:11px}"
    f".sf-plan .mono{{font-family:{_MONO};font-size:10.5px;fill:var(--sf-faint)}}"
    ".sf-plan .row{fill:var(--sf-faint);font-size:11px;text-anchor:end}"
    ".sf-plan .middle{text-anchor:middle}"
    ".sf-plan .wire{stroke:var(--sf-line);stroke-width:1.25;fill:none}"
    ".sf-plan .way{stroke:var(--sf-faint);stroke-width:1.25;fill:none}"
    ".sf-plan .unfused rect{fill:var(--sf-line)}"
    ".sf-plan .eager rect{fill:var(--sf-card);stroke-dasharray:4 3;stroke:var(--sf-faint)}"
    ".sf-plan .unfused text,.sf-plan .eager text{fill:var(--sf-faint);font-size:11px}"
    + "".join(
        f".sf-plan .{kind} rect{{fill:var(--sf-{kind});stroke:var(--sf-{kind}-edge);stroke-width:1.5}}"
        f".sf-plan .{kind} text{{fill:var(--sf-{kind}-ink);font-weight:600;font-size:11px}}"
        for kind in SIGNS
    )
    + ".sf-plan .record rect{stroke-width:1}"
    ".sf-plan .unfused.record rect{fill:none;stroke:var(--sf-line)}"
    ".sf-plan .times{fill:var(--sf-ink);font-weight:600;font-size:13px}"
    ".sf-plan .bracket{stroke:var(--sf-faint);stroke-width:2;fill:none}"
)
