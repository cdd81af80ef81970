"""Pictures of plans: positions, escaped names, no external content, long sequences that fold."""

from __future__ import annotations

import functools
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.pictures import PlanData, style, svg
from seqfuse.pictures.markup import cut, cut_before, escaped, tag, width
from seqfuse.pictures.score import LONG, Block, fold, lines_of, plan_columns
from seqfuse.pictures.svg import FULL, MOST, looks
from seqfuse.pictures.svg import _listed as listed
from seqfuse.pictures.svg import _split as split_name
from seqfuse.pictures.svg import headline as svg_headline
from seqfuse.pictures.text import bytes_against, extra_time, render, sized
from seqfuse.plan import Plan
from seqfuse.run.regions import Region

SVG = "{http://www.w3.org/2000/svg}"
GPU = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16)


class KeepsZ(sf.JointFusion):
    bias: ops.Bias
    act: ops.GeLU

    class Saved(sf.Saved):
        z: Tensor  # [*, H]
        never: Tensor | None = sf.field(for_="nothing", default=None)

    def saves(self, env: sf.Env) -> sf.Savings:
        return sf.Savings(launches=1000)

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        z = x + self.bias.bias
        return self.act.fwd(z)[0], self.Saved(z=z, never=None)

    def bwd(self, dy: Tensor, saved: Saved) -> tuple[Tensor | None, sf.Grads]:
        dx, _ = self.act.bwd(dy, ops.GeLU.Saved(x=saved.z))
        return dx, {"bias.bias": None if dx is None else dx.reshape(-1, dx.shape[-1]).sum(0)}


def block(size: int = 16) -> ops.Residual:
    return ops.Residual(
        ops.LayerNorm(size), ops.Linear(size, 2 * size), ops.GeLU(), ops.Linear(2 * size, size), ops.Dropout(0.1)
    )


def short() -> sf.Sequential:
    return sf.Sequential(block(), nn.Softplus(), ops.Linear(16, 16), ops.ReLU())


def joint() -> sf.Sequential:
    return sf.Sequential(block(), ops.Linear(16, 16), ops.ReLU(), fusions=(KeepsZ, *sf.fusions.default))


def deep(blocks: int = 110) -> sf.Sequential:
    return sf.Sequential(ops.Linear(16, 16), *(block() for _ in range(blocks)), ops.LayerNorm(16))


def unlike(count: int = 1000) -> sf.Sequential:
    """A sequence that does not repeat itself, of operations that no fusion takes."""
    kinds = (ops.ReLU, ops.Tanh, ops.Sigmoid, ops.SiLU)
    choice = torch.randint(4, (count,), generator=torch.Generator().manual_seed(1)).tolist()
    return sf.Sequential(*(kinds[i]() for i in choice), fusions=())


X = torch.randn(8, 16)
PLANS: dict[str, Any] = {
    "short": lambda: short().plan(X),
    "short on a GPU": lambda: short().plan(env=GPU),
    "joint": lambda: joint().plan(X),
    "deep": lambda: deep().plan(env=GPU),
    "unlike": lambda: unlike().plan(X),
    "inference": lambda: short().eval().plan(env=sf.Env.of("cuda:sm_90", grad=False)),
    "frozen": lambda: short().requires_grad_(False).plan(X),
    "eager": lambda: sf.Sequential(nn.Softplus(), nn.Softplus()).plan(X),
    "empty": lambda: sf.Sequential().plan(X),
}


@pytest.fixture(params=PLANS, scope="module")
def plan(request: pytest.FixtureRequest) -> Plan:
    return PLANS[request.param]()


def drawn(plan: Plan) -> ElementTree.Element:
    return ElementTree.fromstring(plan.svg())


def test_json_is_the_dictionary_and_says_what_the_plan_says(plan: Plan) -> None:
    data = json.loads(plan.json(indent=1))
    assert data == json.loads(json.dumps(plan.as_dict()))
    assert [o["name"] for o in data["operations"]] == [*plan.names]
    assert [o["path"] for o in data["operations"]] == [*plan.paths]
    for name, steps in (("forward", plan.forward), ("backward", plan.backward)):
        given = [(s["name"], range(s["start"], s["stop"]), s["kind"] not in ("unfused", "eager")) for s in data[name]]
        assert given == [(s.name, s.covers, s.fused) for s in steps]
    assert [range(*segment) for segment in data["segments"]] == [*plan.segments]
    given = [(name, at, r["reason"]) for r in data["refused"] for name, places in r["fusions"].items() for at in places]
    assert sorted(given) == sorted({(r.fusion, r.at, r.reason) for r in plan.refused})
    kinds = [(r["reason"], r["superseded"], r["expected"], r["own"]) for r in data["refused"]]
    assert len(set(kinds)) == len(kinds)  # a reason is printed there once
    assert [e["at"] for e in data["eager"]] == [e.at for e in plan.eager]
    assert data["env"]["text"] == plan.env.said(plan.tokens)
    assert (data["memory"] is None) == (plan.memory is None)


def kept_by_engine(model: sf.Sequential) -> dict[int, tuple[str, ...]]:
    """The saved tensors of each step of a model that has run, by position; a joint fusion's under `~position`."""
    model(X)
    kept: dict[int, tuple[str, ...]] = {}
    for part in model._own().op_list().parts:
        if isinstance(part, Region):
            lowering = part.lowering
            for segment, _ in lowering.segments:
                kept |= {record.position: record.kept for step in segment.forward for record in step.saves}
    return kept


@pytest.mark.parametrize("make", [short, joint], ids=["short", "joint"])
@pytest.mark.parametrize("frozen", [(), ("0.1.weight", "0.0.weight"), ("0.1.bias",)], ids=str)
def test_records_are_those_that_the_engine_keeps(make: Any, frozen: tuple[str, ...]) -> None:
    model = make()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    data = model.plan(X).as_dict()
    said = {o["at"]: tuple(o["saves"]) for o in data["operations"]}
    said |= {~s["start"]: tuple(s["saves"]) for s in data["forward"] if s["kind"] == "joint"}
    assert {at: fields for at, fields in said.items() if fields} == {
        at: fields for at, fields in kept_by_engine(model).items() if fields
    }
    assert make is short or said[~3] == ("z",)


def boxes(root: ElementTree.Element, kinds: set[str]) -> list[tuple[float, float, float, str]]:
    """Left, top, right and first title line of each group of these classes that has a box."""
    found: list[tuple[float, float, float, str]] = []
    for group in root.iter(f"{SVG}g"):
        rect, title = group.find(f"{SVG}rect"), group.find(f"{SVG}title")
        if group.get("class", "") in kinds and rect is not None and title is not None:
            x, y, size = (float(rect.attrib[k]) for k in ("x", "y", "width"))
            found.append((x, y, round(x + size, 1), (title.text or "").split("\n")[0]))
    return found


def test_every_step_stands_exactly_above_or_below_what_it_covers() -> None:
    for plan in (PLANS["short"](), PLANS["joint"]()):
        root = drawn(plan)
        cards = {int(title.split(":")[0]): (left, y, right) for left, y, right, title in boxes(root, {""})}
        assert sorted(cards) == [*range(len(plan.names))]
        steps = [b for b in boxes(root, {*style.NAMES}) if "position" in b[3]]
        assert len(steps) == len(plan.forward) + len(plan.backward)
        for left, y, right, title in steps:
            at = [*map(int, re.findall(r"\d+", title.split("position")[-1]))]
            first, last = cards[at[0]], cards[at[-1]]
            assert (left, right) == pytest.approx((first[0], last[2]), abs=0.11), title
            above = y < first[1]
            assert (title.split(",")[0], range(at[0], at[-1] + 1)) in [
                (s.name, s.covers) for s in (plan.forward if above else plan.backward)
            ]
        records = boxes(root, {f"{kind} record" for kind in style.NAMES})
        assert len(records) == sum(bool(o["saves"]) for o in plan.as_dict()["operations"]) + sum(
            bool(s["saves"]) for s in plan.as_dict()["forward"]
        )


def test_nothing_stands_outside_the_picture_or_on_top_of_another_box(plan: Plan) -> None:
    root = drawn(plan)
    _, _, wide, high = map(float, root.attrib["viewBox"].split())
    rows: dict[float, list[tuple[float, float]]] = {}
    for left, y, right, _ in boxes(root, {"", *style.NAMES, *(f"{kind} record" for kind in style.NAMES)}):
        assert 0 <= left < right <= wide
        assert 0 <= y < high
        rows.setdefault(y, []).append((left, right))
    for spans in rows.values():
        spans.sort()
        assert all(a[1] < b[0] for a, b in itertools.pairwise(spans))
    for text in root.iter(f"{SVG}text"):
        size = {"title": 15, "name": 12}.get(text.get("class", ""), 11)
        about = width(text.text or "", size, 0.5)
        left = float(text.attrib["x"])
        assert left + (0 if "row" in text.get("class", "") or "middle" in text.get("class", "") else about) <= wide + 1


def test_a_plan_without_gradients_has_no_backward_row() -> None:
    words = [text.text for text in drawn(PLANS["inference"]()).iter(f"{SVG}text")]
    assert "forward" in words
    assert "backward" not in words
    assert "saved" not in words


def test_a_picture_is_headed_by_what_the_plan_gains() -> None:
    model = sf.Sequential(block(64))
    for memory in ("fast", "lean"):
        model.memory = memory
        plan = model.plan(torch.randn(512, 64, requires_grad=True))
        assert plan.memory is not None
        head, saved = svg_headline(plan.as_dict())
        steps = f"{len(plan.forward)} steps forward and {len(plan.backward)} backward"
        assert head == f"{len(plan.names)} operations in {steps}"
        words = [text.text for text in drawn(plan).iter(f"{SVG}text")]
        assert words[:2] == [head, saved]
        less = f", {1 - plan.memory.saved / plan.memory.saved_unfused:.0%} less than unfused"
        assert (less in saved) is (memory == "lean")
        assert ("with memory=" in saved) is (memory == "fast")


def test_a_name_takes_two_lines_before_it_is_cut() -> None:
    assert split_name("GeLU", 100, 12) == ["GeLU"]
    assert split_name("RotaryEmbedding", 90, 12) == ["Rotary", "Embedding"]
    assert split_name("← BiasQKNormRotaryBackward", 110, 11) == ["← BiasQKNorm", "RotaryBackward"]
    assert all(width(part, 12, 0.66) <= 60 for part in split_name("A" * 40 + "b" + "C" * 40, 60, 12))
    assert listed(["x", "rstd", "weight"], 80) == "x, rstd +1"
    assert listed(["x", "rstd", "weight"], 200) == "x, rstd, weight"
    assert width(listed(["x" * 60, "y"], 50), 10.5, 0.61) <= 50


def test_a_pass_points_where_it_leads() -> None:
    ways = [path.attrib["d"] for path in drawn(PLANS["short"]()).iter(f"{SVG}path") if path.get("class") == "way"]
    points = [[float(n) for n in re.findall(r"-?[\d.]+", d)] for d in ways]
    heads = ["right" if p[5] == -p[7] and p[5] > 0 else "left" for p in points]
    assert heads == ["right", "left"] * (len(ways) // 2)


def test_refusals_and_reasons_stand_where_one_points() -> None:
    plan = PLANS["short"]()
    titles = {t.split(":")[0]: t for g in drawn(plan).iter(f"{SVG}g") if (t := g.findtext(f"{SVG}title", ""))}
    for refusal in plan.refused:
        if refusal.expected:
            continue
        assert f"not applied: {refusal.fusion}: {refusal.reason}" in titles[str(refusal.at)]
    assert "runs eagerly: not an operation of this library" in titles["9"]


EVIL = "<img src=x onerror=alert(1)>\"'&amp;`"
EVIL_KEY = '"]; click o0 call alert() %% </svg></style></title><script>alert(2)</script> --> {{}} || #quot;'


class Parsed(HTMLParser):
    """Elements, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def evil() -> Plan:
    def passes(self: nn.Module, x: Tensor) -> Tensor:
        return x

    stranger = type(EVIL, (nn.Module,), {"forward": passes})
    model = sf.Sequential(ops.Linear(16, 16))
    model.add_module(EVIL_KEY, stranger())
    model.add_module("\x00\n\ud800\ufffe 日本語", ops.GeLU())

    class Refused(sf.ForwardFusion):
        act: ops.GeLU

        def requires(self, env: sf.Env) -> sf.Requirements:
            yield False, EVIL

        def fwd(self, x: Tensor) -> tuple[Tensor, dict[str, sf.Saved]]:
            raise NotImplementedError

    Refused.__name__ = EVIL
    model.fusions = (Refused,)
    return model.plan(X)


def test_names_are_text_whatever_they_hold(evil: Plan) -> None:
    for text in (evil._repr_html_(), evil.svg()):
        page = Parsed(text)
        assert page.tags <= {"title", "style", "svg", "g", "rect", "text", "tspan", "path"}
        assert not [name for name in page.attributes if name.startswith("on") or name in ("href", "src", "xlink:href")]
        assert EVIL in page.text
        assert EVIL_KEY in page.text
        assert not set("\x00\ud800\ufffe") & set(text)
        text.encode()
    ElementTree.fromstring(evil.svg())


def test_a_picture_loads_nothing(plan: Plan) -> None:
    for text in (plan.svg(), plan._repr_html_()):
        rest = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?:|//|url\(|@import|<script|<link|<iframe|<image|<use|<foreignObject", rest)


def test_a_picture_is_the_same_every_time() -> None:
    for make in (PLANS["joint"], PLANS["deep"]):
        a, b = make(), make()
        assert (a.svg(), a.json()) == (b.svg(), b.json())


def test_what_is_not_markup_is_escaped() -> None:
    assert tag("b", "<i>", tag("i", "&"), title='"<') == '<b title="&quot;&lt;">&lt;i&gt;<i>&amp;</i></b>'
    assert escaped("a\nb\x1b[0m") == "a?b?[0m"
    assert cut("LayerNorm", 1000, 12) == "LayerNorm"
    assert width(cut("LayerNormalization", 60, 12), 12) <= 60


def test_of_a_long_key_the_end_is_shown_which_tells_it_from_its_neighbors() -> None:
    assert cut_before("0.mixer", 1000, 12) == "0.mixer"
    assert cut_before("0.feedforward.mixer.up", 60, 10) == "…mixer.up"
    assert cut_before("0.attention.mixer.up", 50, 10) == "…up"
    assert cut_before("0.feedforward_norm", 50, 10) == "…norm"
    assert cut_before("0.mixer.attention", 50, 10) == "attenti…"
    assert cut_before("attention", 50, 10) == "attenti…"
    picture = sf.Sequential(sf.nn.TransformerLayer(8, 2)).plan().svg()
    shown = re.findall(r">(…[^<]*)</text>", picture)
    assert any(text.endswith("up") for text in shown)
    assert any(text.endswith("down") for text in shown)


def unfolded(blocks: list[Block]) -> list[tuple[Any, bool]]:
    """The drawing of each position, and whether a segment begins there."""
    return [(looks(c), c.opens) for b in blocks for _ in range(b.times) for c in b.columns]


def test_identical_blocks_stand_once_with_their_number() -> None:
    plan = PLANS["deep"]()
    assert len(plan.names) == 993
    assert len(plan.svg()) < 60_000
    root = drawn(plan)
    assert "× 107" in [text.text for text in root.iter(f"{SVG}text")]
    blocks = fold(plan_columns(plan.as_dict()), looks)
    assert [b.times for b in blocks if b.times > 1] == [107]


def test_blocks_are_folded_where_segments_do_not_end_with_them() -> None:
    rotary = functools.partial(ops.RotaryEmbedding, style="half")
    like: dict[str, Any] = {"norm": ops.RMSNorm, "activation": ops.SwiGLU, "bias": False, "rotary": rotary}
    data = sf.nn.TransformerStack(32, 16, 2, **like, device="meta").plan(env=GPU).as_dict()
    columns = plan_columns(data)
    loose = fold(columns, looks)
    assert max(block.times for block in loose) == 31
    assert [made for made, _ in unfolded(loose)] == [looks(c) for c in columns]
    words = [text.text for text in ElementTree.fromstring(svg(data)).iter(f"{SVG}text")]
    assert "× 31" in words
    assert not any((word or "").startswith("segment") for word in words)
    lines = render(data).splitlines()
    (folded,) = (i for i, line in enumerate(lines) if line.lstrip().startswith("x31, at "))
    many = int(re.findall(r"the next (\d+) lines", lines[folded])[0])
    assert not any("-----" in line for line in lines[folded : folded + many + 1]), "one layer would stand for all"


def test_a_long_list_without_repeats_is_drawn_whole_and_stays_narrow() -> None:
    plan = PLANS["unlike"]()
    root = drawn(plan)
    assert len(boxes(root, {""})) == 1000
    assert float(root.attrib["width"]) < 1500


def test_folding_is_exact(plan: Plan) -> None:
    columns = plan_columns(plan.as_dict())
    blocks = fold(columns, looks)
    assert unfolded(blocks) == [(looks(c), c.opens) for c in columns]
    at = 0
    for b in blocks:
        assert b.columns[0].operation["at"] == at
        assert b.columns[0].border
        at = b.last + 1
    assert at == len(columns)


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
    st.integers(1, 40),
    st.lists(st.integers(0, 2), max_size=12),
    st.lists(st.integers(0, 2), max_size=12),
)
def test_whatever_repeats_is_folded_and_can_be_unfolded(
    unit: list[int], times: int, before: list[int], after: list[int]
) -> None:
    kinds = (ops.ReLU, ops.Tanh, ops.Sigmoid)
    modules = [kinds[i]() for i in (*before, *unit * times, *after)]
    # Segments and gradients that begin somewhere are drawn, so a sequence without either.
    plan = sf.Sequential(*modules, fusions=()).plan(env=sf.Env.of("cpu", grad=False))
    columns = plan_columns({**plan.as_dict(), "segments": []})
    blocks = fold(columns, looks)
    assert unfolded(blocks) == [(looks(c), c.opens) for c in columns]
    if len(columns) > LONG and (times - 1) * len(unit) > 20:
        assert sum(len(b.columns) for b in blocks) <= len(before) + len(after) + 2 * len(unit)


def test_lines_are_cut_between_steps_where_that_can_be() -> None:
    for make in (PLANS["short"], PLANS["deep"], PLANS["unlike"]):
        for b in fold(plan_columns(make().as_dict()), looks):
            lines = lines_of(b, MOST)
            assert [c for line in lines for c in line] == [*b.columns]
            assert all(0 < len(line) <= MOST for line in lines)
            assert all(line[0].border for line in lines)


def made(steps: list[int], names: str, segments: list[tuple[int, int]]) -> PlanData:
    """A sequence of operations with one-letter names as plain data, whose forward steps have these lengths."""
    starts = [sum(steps[:i]) for i in range(len(steps))]
    return {
        **PLANS["empty"]().as_dict(),
        "operations": [{"at": i, "name": n, "path": "", "saves": [], "needs": []} for i, n in enumerate(names)],
        "forward": [
            {"name": "F", "start": start, "stop": start + length, "kind": "forward", "saves": []}
            for start, length in zip(starts, steps, strict=True)
        ],
        "segments": segments,
    }


def test_a_block_does_not_begin_within_a_step() -> None:
    # From position 1 on everything repeats, but that is the second half of a step.
    blocks = fold(plan_columns(made([2] * 40, "xb" + "ab" * 39, [])), looks)
    assert [(len(b.columns), b.times) for b in blocks] == [(2, 1), (2, 39)]


def test_a_short_segment_does_not_make_a_short_line() -> None:
    (block,) = fold(plan_columns(made([1, 1, 1, 1, 2, 2, 2, 2], "a" * 12, [(0, 4), (4, 12)])), looks)
    assert [len(line) for line in lines_of(block, 10)] == [10, 2]
    (block,) = fold(plan_columns(made([1] * 12, "a" * 12, [(0, 7), (7, 12)])), looks)
    assert [len(line) for line in lines_of(block, 10)] == [7, 5]


def test_a_step_longer_than_a_line_goes_on_in_the_next() -> None:
    data = made([1, 14, 1], "a" * 16, [(0, 16)])
    (block,) = fold(plan_columns(data), looks)
    assert [len(line) for line in lines_of(block, 10)] == [1, 10, 5]
    root = ElementTree.fromstring(svg(data))
    drawn_steps = [title.removeprefix("F, forward fusion, ") for *_, title in boxes(root, {"forward"})]
    assert drawn_steps == ["position 0", *["positions 1 to 14"] * 2, "position 15"]
    assert "… segment 1" in [text.text for text in root.iter(f"{SVG}text")]


def test_no_line_of_a_plan_is_longer_than_the_terminal_is_wide() -> None:
    data = made([1, 14, 1], "a" * 16, [(0, 16)])
    for ahead, back in ((40, 40), (90, 10), (10, 90), (3, 3)):
        data["forward"][1]["name"] = "F" * ahead
        data["backward"] = [{**data["forward"][1], "name": "B" * back}]
        for columns in (60, 80, 120):
            assert max(map(len, render(data, columns).splitlines())) <= columns


def luminance(color: str) -> float:
    parts = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", [style._LIGHT, style._DARK], ids=["light", "dark"])
def test_text_can_be_read_and_kinds_told_apart(palette: dict[str, str]) -> None:
    for ground in ("ground", "band", "card"):
        assert contrast(palette["ink"], palette[ground]) > 7
        assert contrast(palette["faint"], palette[ground]) > 4.5
    for kind in style.SIGNS:
        assert contrast(palette[f"{kind}-ink"], palette[kind]) > 7
        assert contrast(palette[f"{kind}-edge"], palette["band"]) > 3
    assert len({*style.SIGNS.values()}) == len(style.SIGNS)


FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
FILES = {FOLDER / "drawn_plan.svg": FULL, FOLDER / "drawn_plan_narrow.svg": 430}


def picture(width: int) -> str:
    """The plan that docs/command_line.md shows as text."""
    members = ops.LayerNorm(64), ops.Linear(64, 256), ops.GeLU(), ops.Linear(256, 64), ops.Dropout(0.1)
    model = sf.Sequential(ops.Residual(*members), ops.Linear(64, 8)).bfloat16()
    x = torch.empty(512, 64, dtype=torch.bfloat16, device="meta")
    return model.to("meta").plan(x, env=sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=512)).svg(width) + "\n"


def test_the_picture_in_the_documentation_is_drawn_now() -> None:
    for file, wide in FILES.items():
        assert file.read_text() == picture(wide), "run: .venv/bin/python -m tests.pictures.test_pictures"


@pytest.mark.parametrize(
    ("n", "like", "text"),
    [(252, None, "252 B"), (32768, None, "32.0 KiB"), (328704, None, "0.31 MiB"), (17292800, None, "16.5 MiB"),
     (1142 * 2**20, None, "1,142 MiB"), (12 * 2**30, None, "12.0 GiB"), (32768, 328704, "0.03 MiB"),
     (0, 2**20, "0.00 MiB")],
)  # fmt: skip
def test_bytes_are_in_mib_from_a_tenth_on_and_in_one_unit_within_a_column(n: int, like: int | None, text: str) -> None:
    assert sized(n, like) == text


def test_times_are_whole_microseconds_or_milliseconds_and_bytes_have_a_ratio() -> None:
    assert [extra_time(us) for us in (0.0, 8.4, -18.2, 606.9, -2213.0)] == [
        "+0 us",
        "+8 us",
        "-18 us",
        "+0.6 ms",
        "-2.2 ms",
    ]
    assert bytes_against(2**19, eager_torch=2**20, unfused=0) == "0.50 MiB, 0.50x eager torch (1.00 MiB)"
    assert bytes_against(90624, unfused=172544) == "0.09 MiB, 0.53x unfused (0.16 MiB)"


@pytest.mark.parametrize("most", [430, 700, 904])
def test_a_picture_is_as_wide_as_there_is_room_for_and_no_line_of_its_head_is_cut(most: int) -> None:
    plan = sf.Sequential(block(64), block(64)).plan(torch.randn(512, 64, requires_grad=True))
    root = ElementTree.fromstring(plan.svg(most))
    assert float(root.attrib["width"]) <= most
    lines = [text for text in root.iter(f"{SVG}text") if text.attrib.get("class") in ("title", "name", "faint")]
    for text in lines:
        assert float(text.attrib["x"]) + width(text.text or "", 11.0) <= float(root.attrib["width"])
    head = " ".join(text.text or "" for text in lines)
    assert all(sentence in head for sentence in (*svg_headline(plan.as_dict()), *plan.as_dict()["summary"][:2]))
    assert plan.svg() == plan.svg(904)


if __name__ == "__main__":
    for file, wide in FILES.items():
        file.write_text(picture(wide))
