"""The picture on a page, and what it shows where one points said in words."""

from __future__ import annotations

from collections.abc import Iterator

from .data import PlanData
from .markup import Markup, escaped, tag
from .style import COLORS
from .svg import svg

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_WORDS = (
    ".sf-plan-words{font:14px/1.5 system-ui,sans-serif;color:var(--sf-ink);background:var(--sf-ground)}"
    ".sf-plan-words table{border-collapse:collapse;margin:.5em 0 1em}"
    ".sf-plan-words th,.sf-plan-words td{text-align:left;vertical-align:top;padding:.25em 1.2em .25em 0;"
    "font-size:14px;color:var(--sf-ink);background:none;border:0;border-bottom:1px solid var(--sf-line)}"
    ".sf-plan-words th{color:var(--sf-faint);font-weight:600}"
    ".sf-plan-words td:first-child{max-width:28em}.sf-plan-words b{font-weight:600}"
    ".sf-plan-words summary{cursor:pointer;color:var(--sf-faint)}"
    ".sf-plan-picture{overflow-x:auto}.sf-plan-below{padding:8px 20px;margin-top:6px;border-radius:10px}"
)
_PAGE = (
    "body{margin:0;padding:12px;background:var(--sf-ground)}"
    "main{padding:0 20px 20px}h3{font-size:15px;margin:1em 0 .4em}"
)


def fragment(plan: PlanData) -> Markup:
    """For a notebook: the picture, and below it, folded up, what was not applied."""
    words = _words(plan)
    if words:
        lines = [tag("summary", "what was not applied or runs eagerly, with reasons"), *words]
        words = [tag("details", *lines)]
    style = tag("style", Markup(_WORDS))
    picture = tag("div", svg(plan), class_="sf-plan-picture")
    below = tag("div", *words, class_="sf-plan sf-plan-words sf-plan-below")
    return tag("div", style, picture, below if words else Markup())


def page(plan: PlanData) -> str:
    """A page that loads nothing: the picture, then in words what was not applied and why."""
    style = tag("style", Markup(COLORS + _WORDS + _PAGE))
    head = tag(
        "head",
        Markup('<meta charset="utf-8">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{escaped(_POLICY)}">'),
        Markup('<meta name="viewport" content="width=device-width">'),
        tag("title", plan["summary"][0]),
        style,
    )
    picture = tag("div", svg(plan), class_="sf-plan-picture")
    body = tag("body", picture, tag("main", *_words(plan), class_="sf-plan-words"), class_="sf-plan")
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _words(plan: PlanData) -> list[Markup]:
    """A table of what was not applied and one of what runs eagerly, by their reasons; and what matches nowhere."""
    refused: dict[str, dict[str, list[int]]] = {}
    for refusal in (refusal for refusal in plan["refused"] if not refusal["expected"]):
        refused.setdefault(refusal["reason"], {}).update(refusal["fusions"])
    eager: dict[str, dict[str, list[int]]] = {}
    for one in plan["eager"]:
        eager.setdefault(one["reason"], {}).setdefault(one["name"], []).append(one["at"])
    found: list[Markup] = []
    for title, what, reasons in (("Not applied", "fusions", refused), ("Runs eagerly", "modules", eager)):
        if reasons:
            head = tag("tr", tag("th", "reason"), tag("th", f"{what}, and where"))
            rows = (tag("tr", tag("td", reason), tag("td", *_named(places))) for reason, places in reasons.items())
            found += [tag("h3", title), tag("table", head, *rows)]
    if plan["unmatched"]:
        found.append(tag("p", f"Matches nowhere: {'; '.join(plan['unmatched'])}"))
    return found


def _named(places: dict[str, list[int]]) -> Iterator[Markup]:
    for i, (name, at) in enumerate(places.items()):
        at = sorted({*at})
        where = ", ".join(map(str, at[:8])) + (f" and {len(at) - 8} more" if len(at) > 8 else "")
        yield Markup("; " if i else "")
        yield tag("span", tag("b", name), f" at {where}")
