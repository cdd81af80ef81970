"""Words of ours that stand for those of the field: pages, docstrings and sources do without them."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import tokenize
import types
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import seqfuse as sf
from docs import documented
from tests.test_docs import in_the_reference

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(page for folder in ("docs", "docs/dev", "docs/reference") for page in sorted((ROOT / folder).glob("*.md"))),
]
SOURCES = sorted((ROOT / "seqfuse").rglob("*.py"))
# As patterns of whole words, with what to say instead: in pages, docstrings and sources; in pages and docstrings alone;
# in sources alone.
EVERYWHERE = {
    r"rule sets?": "fusion set",
    r"by the rule": "within tolerance",
    r"host costs?": "CPU overhead",
    r"look-ups?": "plan-cache hit",
    r"gradients? (?:is|are|was) (?:not )?wanted|wanted gradients?|wants? (?:a|no) gradient|nobody wants": "needed",
}
IN_PAGES = EVERYWHERE | {
    r"outbid": "superseded by",
    r"products?": "GEMM, matmul, Linear",
    r"(?<!plan )(?<!planner )(?<!way )(?<!not )covers?(?! \(masks| bias)": "fusion schedule",
    r"lists? of operations|op list": "op sequence",
    r"records?": "saved tensors",
    r"the rule": "error bound",
    r"refusals?": "not applied",
    r"runs? alone": "runs eagerly",
    r"rotat(?:ion|ed) (?:heads|queries)|(?<!is )turned(?! into)": "RoPE",
    r"shared heads": "GQA, MQA",
    r"in splits": "split-KV",
    r"new rows?": "new token",
    r"shares? of (?:the )?(?:rows|heads)|rows in shares": "sequence shard, head shard",
    r"kept for (?:its|the) backward(?: pass)?": "saved for backward",
    r"whoever asks": "say who",
    r"figures?": "numbers, results, plots",
}
IN_SOURCES = EVERYWHERE | {
    r"shared key heads?": "GQA, MQA",
    r"epochs?|outbids": "config_version; superseded",
    r"(?:forward|backward) covers?|(?:pairs? of|both|two|either) covers?|covers? of": "schedule",
    r"(?<!there )(?:is|are|was|were) no(?!\s+(?:longer|more))": "is not a",
    r"in (?:the )?place of": "instead of",
    r"stands? for": "is, represents, replaces",
    r"ma(?:kes?|de)(?: \S+){0,3} again": "recompute",
    r"whoever|anybody": "say who",
}
# In docstrings that the reference shows, members among them: English that only we write, with what an engineer says.
IN_REFERENCE = IN_PAGES | {
    r"(?<!there )(?:is|are|was|were) no(?! longer| more)": "is not a",
    r"of (?:its|his|their|your) own": "its own, your own",
    r"in (?:the )?place of": "instead of",
    r"what(?:ever)?|who(?:ever)?|(?:no|some|any)body": "the noun",
    r"stands?": "is, comes before, matches, replaces",
    r"asks?|asked|wants?|wanted": "requires, needed",
    r"alone|by turns": "only, alternately",
    r"beside(?!:)|behind": "also, after",
    r"ma(?:kes?|de)(?: \S+){0,3} again": "recompute",
    r"hands? (?:on|out|back)|tells?|told": "returns, propagates, reports",
    r"a part of (?:what|the)|the whole one|as (?:it|they) (?:is|are) there": "a fraction, the full",
    r"that you have": "your",
    r"let be|left alone|as (?:it|they) did(?: before)?": "unchanged, not converted",
}
MEMBERS = types.FunctionType, property, functools.cached_property, classmethod, staticmethod
# In rooms where the word means nothing else.
OF_LISTS = {r"(?<!torch's )(?:the|a|long|whole|flat) list(?! of)": "sequence, op sequence"}
OF_GEMMS = {r"products?(?! of (?:queries|all))": "GEMM"}
GEMM_ROOMS = ("plan", "run", "fusions", "nn", "parallel", "tune", "pictures")


def prose(markdown: str) -> str:
    """A page without its blocks of code, code in a line, tables drawn from results, comments and targets of links."""
    text = re.sub(r"^(```|~~~).*?^\1", "", markdown, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!-- (figures|faults|support|settings)\b.*?<!-- end of \w+ -->", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->|`[^`]*`|\]\([^)]*\)", " ", text, flags=re.DOTALL)
    return " ".join(text.split())


def found_in(text: str, words: Mapping[str, str]) -> list[str]:
    """Every word that is not said, with the words around it and what to say instead."""
    return [
        f"...{text[max(hit.start() - 25, 0) : hit.end() + 25]}...: say {instead}"
        for word, instead in words.items()
        for hit in re.finditer(rf"(?<![\w-])(?:{word})(?![\w-])", text, re.IGNORECASE)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_written_in_the_words_of_the_field(page: Path) -> None:
    text = re.sub(r"(?:nothing is|gradients are) recorded", "", prose(page.read_text()))
    assert found_in(text, IN_PAGES) == []
    if page.parent.name == "reference":
        assert found_in(prose(re.sub(r"^#.*", "", page.read_text(), flags=re.MULTILINE)), IN_REFERENCE) == []


def test_docstrings_of_public_names_are_written_in_the_words_of_the_field() -> None:
    for module, name in in_the_reference():
        for text in shown(importlib.import_module(module), name):
            assert found_in(prose(text), IN_REFERENCE) == [], f"{module}.{name}: {text}"


def shown(module: types.ModuleType, name: str) -> Iterator[str]:
    """The docstring of a name, those of its public members, and the comments of its saved tensors."""
    value = getattr(module, name)
    yield documented.docstring(module, name)
    for key, member in vars(value).items() if inspect.isclass(value) else ():
        if key == "Saved" and issubclass(member, sf.Saved):
            yield "; ".join(about for _, about in documented.fields_of(member))
        elif key[0] != "_" and isinstance(member, MEMBERS):
            yield member.__doc__ or ""


@pytest.mark.parametrize(
    "text",
    ["A call that is no view.", "A GEMM in place of a pass.", "What it saves.", "The norm stands behind it.",
     "Needed by whoever asks.", "It makes h again.", "Read by x alone.", "A bias of its own.", "Models that you have."],
)  # fmt: skip
def test_private_english_is_found_in_docstrings_of_public_names(text: str) -> None:
    assert found_in(text, IN_REFERENCE)


def test_sources_are_written_in_the_words_of_the_field() -> None:
    for path in SOURCES:
        room = path.relative_to(ROOT).parts[1]
        words = IN_SOURCES | (OF_GEMMS if room in GEMM_ROOMS else {})
        words |= {} if room in ("kernels", "convert") else OF_LISTS
        assert [hit for text in texts(path) for hit in found_in(text, words)] == [], path


def texts(path: Path) -> list[str]:
    """The comments and strings of a file."""
    kinds = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", None))
    with tokenize.open(path) as file:
        return [t.string for t in tokenize.generate_tokens(file.readline) if t.type in kinds]


def test_words_are_found_in_prose_and_not_in_code() -> None:
    page = "The product.\n\n```python\nproduct = record\n```\n\nA `cover` of [it](product.md); a production.\n"
    assert found_in(prose(page), IN_PAGES) == ["...The product. A of [it ; a production...: say GEMM, matmul, Linear"]
