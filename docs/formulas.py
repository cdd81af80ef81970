"""Docstrings as reStructuredText: their plain-text formulas typeset, their sections as field lists.

A docstring states its math as one writes it in a comment: `dx = rstd (g - E[g] - xhat E[g xhat])`. Words that belong
to a formula are found one by one: operators, what has brackets or exponents, and the names in `NAMES`. What stands
between two of them on the same side of a comma is one formula. Everything else is prose.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

OPERATORS = {
    "...": r"\dots", "=": "=", "+": "+", "-": "-", "/": "/", ".": r"\cdot", "<": "<", ">": ">", "<=": r"\le",
    "&": r"\mathbin{\&}", ">>": r"\gg",
}  # fmt: skip
FUNCTIONS = {"exp", "log", "tanh", "max", "cos", "sin"}
NAMED = {
    "act", "act_dropout", "dropout", "erf", "floor", "gelu", "norm", "out_dropout", "rope", "sigmoid", "silu",
    "softmax", "sqrt", "turned",
}  # fmt: skip
SYMBOLS = {"eps": r"\varepsilon", "pi": r"\pi", "Phi": r"\Phi", "xhat": r"\hat{x}", "Hkv": "H_{kv}", "E": r"\mathbb{E}"}
# Names that are never words of a sentence, and names that are formulas only beside another part of one.
NAMES = {
    "b", "c", "d", "dbias", "dgate", "dh", "dk", "dother", "dout", "dq", "ds", "dup", "dv", "dw", "dweight", "dx", "dy",
    "dz", "f", "g", "h", "k", "lse", "p", "q", "rstd", "s", "t", "u", "v", "w", "x", "y", "z",
    "d_fork_out", "d_out", "dk_weight", "dout_bias", "dq_weight", "fork_out", "in_features", "k_weight", "out_bias",
    "out_features", "q_weight",
    *(SYMBOLS.keys() - {"E"}),
}  # fmt: skip
AMBIGUOUS = {
    "D", "E", "F", "H", "N", "P", "S", "T", "U", "base", "bias", "factor", "gain", "gate", "i", "j", "keep", "mean",
    "n", "other", "out", "scale", "sum", "up", "weight",
}  # fmt: skip
PUNCTUATION = re.compile(r"[,;:.]+$")
NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)*")
# Shapes are shown as they are written.
SHAPE = re.compile(r"\[\*[^\]]*\]|(?<=: )\[[^\]=]*\]|\b[A-Z] x [A-Z]\b|\[\]|\b\d\.\.\S+\d\b")
TOKEN = re.compile(r"(\s*)(\^-?\w+(?:/\w+)?|\^\([^)]*\)|\.\.\.|[A-Za-z]\w*|\d+(?:\.\d+)?(?:e-?\d+)?|>>|<=|\S)")
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?")


def rest(docstring: list[str]) -> list[str]:
    """Lines of reStructuredText of a docstring's lines."""
    return [line for block in _blocks(docstring) for line in (*_block(block), "")]


def formulas(text: str) -> list[str]:
    """The formulas of a paragraph, in LaTeX."""
    return [latex(part) for kind, part in split(text) if kind == "math"]


def split(text: str) -> Iterator[tuple[str, str]]:
    """A paragraph cut into `("text" | "ending" | "code" | "math", part)`.

    The parts are the paragraph, joined by spaces; but an ending, as the plural of a name in code, follows at once.
    """
    end = 0
    for found in re.finditer(rf"`[^`]*`|{SHAPE.pattern}", text):
        yield from _prose(text[end : found.start()])
        yield "code", found[0].strip("`")
        end = found.end()
        if ending := re.match(r"[a-z]+\b", text[end:]):
            yield "ending", ending[0]
            end += ending.end()
    yield from _prose(text[end:])


def _prose(text: str) -> Iterator[tuple[str, str]]:
    words = text.split()
    run: list[str] = []
    for n, word in enumerate(words):
        bare = PUNCTUATION.sub("", word) if word != "." or n + 1 == len(words) else word
        tail = word[len(bare) :]
        beside = bool(run) or (n + 1 < len(words) and words[n + 1] in ("=", "<", "<=", "/", "+", "-"))
        article = bare == "a" and not ((run and run[-1] in FUNCTIONS) or words[n + 1 : n + 2] == ["="])
        seconds = bare == "s" and n > 0 and NUMBER.fullmatch(words[n - 1]) is not None
        if _open(run) or (bare and not article and not seconds and _is_math(bare, beside)):
            run.append(word if _open([*run, bare]) else bare)
            if not tail or _open([*run[:-1], bare]):
                continue
            word = tail
        yield from _finished(run)
        run = []
        yield "text", word
    yield from _finished(run)


def _finished(run: list[str]) -> Iterator[tuple[str, str]]:
    words: list[str] = []
    while run and run[-1] in ("sum", *OPERATORS):  # `dbias = sum of ...`: the last two are prose
        words.insert(0, run.pop())
    if words and words[0] == "=" and run:
        run.append(words.pop(0))
    if not run:
        yield from (("text", word) for word in words)
        return
    # A range such as 0..1, a lone number or capital, and brackets around words are prose.
    known = any(_letters(word) for word in run)
    if known and (len(run) > 1 or run[0] in NAMES or re.search(r"[\^(]", run[0])):
        yield "math", " ".join(run)
    else:
        yield "text", " ".join(run)
    yield from (("text", word) for word in words)


def _letters(word: str) -> bool:
    return any(name in NAMES | AMBIGUOUS | FUNCTIONS | NAMED for name in NAME.findall(word))


def _open(run: list[str]) -> bool:
    text = " ".join(run)
    return text.count("(") + text.count("[") > text.count(")") + text.count("]")


def _is_math(word: str, beside: bool) -> bool:
    if word in OPERATORS or NUMBER.fullmatch(word):
        return beside
    if word == "a":
        return True
    names = {re.sub(r"(?<=.)_[a-z0-9]$", "", name) for name in NAME.findall(word)} - {"T"}
    if not names:
        return beside and bool(re.search(r"\d", word)) and not re.search(r"\.\.", word)
    if not names <= NAMES | AMBIGUOUS | FUNCTIONS | NAMED:
        return False
    if re.search(r"^\[|[\^']|[A-Za-z_]\(|E\[", word):
        return True
    if re.fullmatch(r"[(\[]*(?:[A-Za-z]\w*)[)\]]*(\^\S+)?", word) is None:
        return beside
    return bool(names <= NAMES) or beside


def latex(formula: str) -> str:
    """LaTeX of a plain-text formula: juxtaposition is a product, `^` an exponent, `_j` of one letter an index."""
    out, operand = "", False
    for space, token in TOKEN.findall(formula):
        starts = token[0].isalnum() or token[0] in "(["
        if space and operand and starts:
            out += r"\,"
        out += _token(token)
        operand = (token[0].isalnum() and token not in FUNCTIONS) or token[0] in ")]^'"
    return out.strip()


def _token(token: str) -> str:
    if token[0] == "^":
        return r"^{\mathsf{T}}" if token == "^T" else f"^{{{latex(token[1:].strip('()'))}}}"
    if token in OPERATORS:
        return f" {OPERATORS[token]} "
    if token == "'":
        return "'"
    if NAME.fullmatch(token):
        return _name(token)
    return token


def _name(name: str) -> str:
    if found := re.fullmatch(r"([A-Za-z]+)_([a-z0-9])", name):
        stem = r"\sum" if found[1] == "sum" else _name(found[1])
        return f"{stem}_{{{found[2]}}}"
    if name in FUNCTIONS:
        return rf"\{name} "
    if name in NAMED:
        return rf"\operatorname{{{name}}}"
    if name in SYMBOLS:
        return SYMBOLS[name]
    if len(name) == 1:
        return name
    return rf"\text{{{name}}}" if name in NAMES | AMBIGUOUS else rf"\text{{ {name} }}"


SECTION = re.compile(r"(Args|Raises|Attributes|Returns|Yields):$")
FIELDS = {"Args": "param", "Raises": "raises", "Attributes": "var"}


def _blocks(lines: list[str]) -> Iterator[list[str]]:
    block: list[str] = []
    for line in lines:
        if line.strip():
            block.append(line)
        elif block:
            yield block
            block = []
    if block:
        yield block


def _block(lines: list[str]) -> list[str]:
    if found := SECTION.fullmatch(lines[0].strip()):
        return _fields(found[1], lines[1:])
    if lines[0].lstrip().startswith(("|", ">>>")) or (lines[0][0] == " "):
        return ["::", "", *("   " + line for line in lines)]  # a table or code, as it is written
    if lines[0].startswith("* "):
        return [line for item in _items(lines) for line in (f"* {_paragraph(item)}",)]
    return [_paragraph(sentence) for sentence in _sentences(lines)]


def _items(lines: list[str]) -> list[str]:
    return [item.strip().removeprefix("* ") for item in re.split(r"\n(?=\* )", "\n".join(lines))]


def _sentences(lines: list[str]) -> Iterator[str]:
    """Paragraphs of a block: what begins with a word and a colon, such as `Saved:`, is one of its own."""
    text = " ".join(line.strip() for line in lines)
    starts = re.split(r"\s+(?=(?:Backward|Forward|Saved|Source): )", text)
    for i, part in enumerate(starts):
        yield part
        if i + 1 < len(starts):
            yield ""


def _fields(section: str, lines: list[str]) -> list[str]:
    entries: list[tuple[str, str]] = []
    indent = min(len(line) - len(line.lstrip()) for line in lines) if lines else 0
    for line in lines:
        head = re.match(r"([\w, *]+): (.*)", line.strip())
        if len(line) - len(line.lstrip()) == indent and head:
            entries.append((head[1], head[2]))
        elif entries:
            entries[-1] = (entries[-1][0], f"{entries[-1][1]} {line.strip()}")
        else:
            entries.append(("", line.strip()))
    if section not in FIELDS:
        return [f":{section.lower()}: {_paragraph(' '.join(text for _, text in entries))}"]
    return [f":{FIELDS[section]} {name.replace('*', chr(92) + '*')}: {_paragraph(text)}" for name, text in entries]


def _paragraph(text: str) -> str:
    out = ""
    for kind, part in split(text):
        piece = {"code": _code(part), "math": f":math:`{latex(part)}`"}.get(kind) or plain(part)
        # Inline markup needs a border: a backslash and a space where the text has none.
        glued = kind == "ending" or (kind == "text" and bool(re.match(r"[,;:.)]", part)))
        out += piece if not out else (f"\\{piece}" if glued else f" {piece}")
    label = re.match(r"(Backward|Forward|Saved|Source)(?=[:,])", out)
    return f"**{label[1]}**\\ {out[label.end() :]}" if label else out


def _code(text: str) -> str:
    # What names nothing that is described somewhere stays code.
    return f":py:obj:`{text}`" if re.fullmatch(r"[A-Za-z_][\w.]*", text) else f"``{text}``"


def plain(text: str) -> str:
    """Text in which nothing is markup."""
    return re.sub(r"([*_|\\<>])", r"\\\1", text)
