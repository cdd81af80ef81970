"""Words that the sources do not use, because the people who use PyTorch have others for the same things."""

from __future__ import annotations

import functools
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "seqfuse"
SOURCES = [
    path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] not in ("kernels", "convert")
]

# In comments, docstrings and messages: what is found, and what to write.
NOT_WRITTEN = {
    r"rule sets?": "fusion set",
    r"(forward|backward) covers?|(pairs? of|both|two|either) covers?|covers? of": "schedule",
    r"(?<!torch's )\b(the|a|long|whole|flat) list(?! of)": "sequence, op sequence",
    r"wanted gradients?|gradients? (is|are) (not )?wanted|wants? (a|no) gradient": "needed gradient",
    r"look-ups?": "plan-cache hit",
    r"by the rule": "within tolerance",
    r"epochs?|outbids": "config_version; superseded",
    r"shared key heads?": "GQA, MQA",
    r"host cost": "CPU overhead",
}
# The same in rooms where the word means nothing else.
OF_GEMMS = re.compile(r"\bproducts?\b(?! of (queries|all))", re.IGNORECASE)
GEMM_ROOMS = ("plan", "run", "fusions", "nn", "parallel", "tune", "pictures")


@functools.cache
def texts(path: Path) -> list[tuple[int, str]]:
    """The comments and strings of a file, with the lines they begin in."""
    kinds = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", None))
    with tokenize.open(path) as file:
        return [(t.start[0], t.string) for t in tokenize.generate_tokens(file.readline) if t.type in kinds]


@pytest.mark.parametrize(("pattern", "instead"), NOT_WRITTEN.items(), ids=NOT_WRITTEN.values())
def test_the_field_has_a_word_for_it(pattern: str, instead: str):
    found = re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE)
    wrong = [f"{p.relative_to(PACKAGE)}:{n}: {m[0]!r}" for p, n, m in _matches(found, SOURCES)]
    assert not wrong, f"write {instead!r}: {wrong}"


def test_a_gemm_is_not_called_a_product():
    rooms = [path for path in SOURCES if path.relative_to(PACKAGE).parts[0] in GEMM_ROOMS]
    wrong = [f"{p.relative_to(PACKAGE)}:{n}: {m[0]!r}" for p, n, m in _matches(OF_GEMMS, rooms)]
    assert not wrong, f"write GEMM: {wrong}"


def _matches(pattern: re.Pattern[str], paths: list[Path]) -> Iterator[tuple[Path, int, re.Match[str]]]:
    for path in paths:
        for line, text in texts(path):
            for match in pattern.finditer(text):
                yield path, line + text.count("\n", 0, match.start()), match
