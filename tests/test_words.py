"""README.md and docs/ are written in the field's words: those of ours that these stand for do not come back."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from docs import documented
from tests.test_docs import in_the_reference

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(page for folder in ("docs", "docs/dev", "docs/reference") for page in sorted((ROOT / folder).glob("*.md"))),
]
# What is not said, as a pattern of whole words, and what to say instead.
WORDS = {
    r"products?": "GEMM, matmul, Linear",
    r"covers?": "fusion schedule",
    r"lists? of operations|op list": "op sequence",
    r"records?": "saved tensors",
    r"rule sets?": "fusion set",
    r"by the rule|the rule": "error bound, within tolerance",
    r"refusals?": "not applied",
    r"outbid": "superseded by",
    r"runs? alone": "runs eagerly",
    r"host costs?": "CPU overhead",
    r"look-ups?": "plan-cache hit",
    r"shared heads": "GQA, MQA",
    r"rotat(?:ion|ed) (?:heads|queries)|turned": "RoPE",
    r"in splits": "split-KV",
    r"new rows?": "new token",
    r"shares? of (?:the )?(?:rows|heads)|rows in shares": "sequence shard, head shard",
    r"gradients? (?:is|are|was) wanted|wanted gradients?|wants? a gradient|nobody wants": "needed gradients",
    r"kept for (?:its|the) backward(?: pass)?": "saved for backward",
    r"whoever asks": "say who",
    r"figures?": "numbers, results, plots",
}
# Where a word means something else: the words around it.
MEANT_OTHERWISE = {
    r"covers?": r"cover \(masks|(?:plan|planner|way) covers|covers bias|not cover",
    r"records?": r"nothing is recorded|gradients are recorded",
    r"turned": r"is turned (?:on|off)|turned into",
}
# The worst sentences of the first readers, by a few words of each.
SENTENCES = (
    "a fuser covers that list",
    "exchange the same named records",
    "here the last product",
    "where nothing but the host counts",
    "a call costs more than the numbers do",
    "what lies between is nobody's business",
    "What nobody wants is not computed",
    "Where it is there when a backward runs",
    "Plain numbers of an operation",
    "keeps the channel to itself",
    "keeps what it got",
    "That is one pass over h more",
    "cannot be had again without",
    "A compiler leaves the cache out",
    "a step of one row for each sequence",
    "by which a function calls itself",
    "a product and all that follows it",
    "reaches what `backward()` reaches",
    "is an error that says where they are",
    "has it round as a GPU does",
    "Say NaN where the reference does",
    "while the device still sleeps",
    "share one graph then",
    "Where the unfused result is NaN the fused one is",
    "none twice",
)


def prose(markdown: str) -> str:
    """A page without its blocks of code, code in a line, tables drawn from results, comments and targets of links."""
    text = re.sub(r"^(```|~~~).*?^\1", "", markdown, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!-- (figures|faults|support|settings|proof)\b.*?<!-- end of \w+ -->", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->|`[^`]*`|\]\([^)]*\)", " ", text, flags=re.DOTALL)
    return " ".join(text.split())


def found_in(text: str) -> list[str]:
    """Every word that is not said, with the words around it and what to say instead."""
    found: list[str] = []
    for word, instead in WORDS.items():
        for hit in re.finditer(rf"(?<![\w-])(?:{word})(?![\w-])", text, re.IGNORECASE):
            around = text[max(hit.start() - 25, 0) : hit.end() + 25]
            if word not in MEANT_OTHERWISE or not re.search(MEANT_OTHERWISE[word], around, re.IGNORECASE):
                found.append(f"...{around}...: say {instead}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_written_in_the_words_of_the_field(page: Path) -> None:
    assert found_in(prose(page.read_text())) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_none_of_the_worst_sentences_is_left(page: Path) -> None:
    text = " ".join(page.read_text().split())
    assert [sentence for sentence in SENTENCES if sentence in text] == []


def test_docstrings_of_public_names_are_written_in_the_words_of_the_field() -> None:
    for module, name in in_the_reference():
        text = prose(documented.docstring(importlib.import_module(module), name))
        assert found_in(text) == [], f"{module}.{name}"


def test_words_are_found_in_prose_and_not_in_code() -> None:
    page = "The product.\n\n```python\nproduct = record\n```\n\nA `cover` of [it](product.md); a production.\n"
    assert found_in(prose(page)) == ["...The product. A of [it ; a production...: say GEMM, matmul, Linear"]
