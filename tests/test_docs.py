"""Every python block of README.md and docs/ runs; the blocks of one page are one module, in order."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import shlex
import sys
import types
import warnings
from pathlib import Path
from xml.etree import ElementTree

import pytest

import seqfuse as sf
from docs import documented, draw, formulas
from seqfuse.cli import main
from seqfuse.settings import settings
from tests.examples import printed

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if page.exists() and "_build" not in page.parts
]
FENCE = re.compile(r"(?P<indent> *)(?P<ticks>`{3,}|~{3,})(?P<info>.*)")


def python_of(markdown: str) -> str:
    """The python blocks of a page with every other line blank, so that line numbers stay those of the page.

    Raises:
        ValueError: a block shows Python but would not run, or is never closed.
    """
    lines = markdown.splitlines()
    code = [""] * len(lines)
    opening: re.Match[str] | None = None
    for number, line in enumerate(lines):
        fence = FENCE.fullmatch(line)
        if opening is None:
            opening = fence
            info = fence["info"].strip() if fence else ""
            if info != "python" and re.search(r"\b(py|python3?|pycon)\b", info):
                raise ValueError(f"line {number + 1}: ```{info} would not run; write ```python, or ```text for output")
        elif fence and fence["ticks"].startswith(opening["ticks"]) and not fence["info"].strip():
            opening = None
        elif opening["info"].strip() == "python":
            code[number] = line.removeprefix(opening["indent"])
    if opening is not None:
        raise ValueError(f"a block opened with {opening[0].strip()} is never closed")
    return "\n".join(code).rstrip() + "\n"


def run_page(name: str, markdown: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    # A module in a real file: class inspection, type hints and tracebacks find the lines of the page.
    path = folder / f"{name}.py"
    path.write_text(python_of(markdown))
    spec = importlib.util.spec_from_file_location(f"page_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    monkeypatch.chdir(folder)
    spec.loader.exec_module(module)
    return vars(module)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_python_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page.read_text()
    if page in printed.PAGES:  # which run where what they print is compared: every block that could run is among those
        blocks = "".join(block[2] for block in printed.BLOCK.finditer(text) if block[1] == "python")
        assert python_of(text).split() == blocks.split()
    else:
        run_page(page.stem, text, tmp_path, monkeypatch)


def test_blocks_of_one_page_share_names_and_other_blocks_do_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = "```python\na = 1\n```\n\n```text\nb = 2\n```\n\n- item\n\n  ```python\n  if a:\n      c = a + 2\n  ```\n"
    names = run_page("shared", page, tmp_path, monkeypatch)
    assert names["c"] == 3
    assert "b" not in names


def test_a_failing_block_is_reported_at_its_line_in_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run_page("failing", "# Title\n\n```python\nx = 1\n1 / 0\n```\n", tmp_path, monkeypatch)
    assert caught.traceback[-1].lineno + 1 == 5


@pytest.mark.parametrize("info", ["python no-run", "py", "python3", "{code-block} python", "pycon"])
def test_python_that_would_not_run_is_refused(info: str) -> None:
    with pytest.raises(ValueError, match="would not run"):
        python_of(f"```{info}\nx = 1\n```\n")


def test_a_block_that_is_never_closed_is_refused() -> None:
    with pytest.raises(ValueError, match="never closed"):
        python_of("```python\nx = 1\n")


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_verbs_of_make_that_are_shown_are_there(page: str) -> None:
    verbs = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = set(re.findall(r"(?:^\$ |`)make ([a-z-]+)", (ROOT / page).read_text(), re.MULTILINE))
    assert shown
    assert shown <= verbs


def test_readme_is_short_and_guides_begin_with_what_their_readers_can_do_afterwards() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110
    guides = [page for page in (ROOT / "docs").glob("*.md") if page.stem != "index"]
    assert [page.name for page in guides if not page.read_text().split("\n\n")[1].startswith("After this page ")] == []


def test_links_between_files_lead_somewhere() -> None:
    pages = [*PAGES, *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"))]
    blocks = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)  # code, where a launch `kernel[grid](x)` is no link
    wrong = [
        f"{page.name}: {link}"
        for page in pages
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", blocks.sub("", page.read_text()))
        if "://" not in link and not (page.parent / link).exists()
    ]
    assert wrong == []


MAP = (ROOT / "docs" / "dev" / "architecture.md").read_text()


def test_files_and_names_on_the_map_of_the_engine_are_there() -> None:
    files = [file for room in ("seqfuse", "tests", "tools") for file in (ROOT / room).rglob("*.py")]
    named = {name for name in re.findall(r"(?<![\w./*])[\w/]+\.py\b", MAP) if "NAME" not in name}
    assert {name for name in named if not any(file.as_posix().endswith(f"/{name}") for file in files)} == set()
    sources = "\n".join(file.read_text() for file in files if file.relative_to(ROOT).parts[0] != "tests")
    words = set(re.findall(r"\w+", sources))
    quoted = re.findall(r"`([A-Za-z_][\w.]*)`", re.sub(r"^```.*?^```", "", MAP, flags=re.MULTILINE | re.DOTALL))
    assert {name for name in quoted if not name.endswith(".py") and name.rpartition(".")[2] not in words} == set()


def test_the_map_of_the_engine_has_every_file_of_the_engine() -> None:
    engine = [
        *(ROOT / "seqfuse").glob("*.py"),
        *(ROOT / "seqfuse" / "plan").glob("*.py"),
        *(ROOT / "seqfuse" / "run").glob("*.py"),
    ]
    names = {path.name for path in engine} - {"__init__.py", "__main__.py"}
    assert names - set(re.findall(r"\w+\.py\b", MAP.partition("## The tree\n")[2].partition("\n## ")[0])) == set()
    rooms = {path.parent.name for path in (ROOT / "seqfuse").glob("*/__init__.py")}
    assert rooms - set(re.findall(r"(\w+)/", MAP)) == set()


def test_the_page_on_conversion_names_every_family_that_the_tests_convert() -> None:
    pytest.importorskip("transformers")
    families = importlib.import_module("tests.convert.families").FAMILIES
    page = (ROOT / "docs" / "reference" / "convert.md").read_text()
    table = page.partition("| family | models |\n| --- | --- |\n")[2]
    rows = table.partition("\n\n")[0].splitlines()
    named = ", ".join(row.split("|")[2].strip() for row in rows)
    named = named.replace("bert (with and without padding)", "bert, bert; padded").split(", ")
    assert sorted(name.replace(";", ",") for name in named) == sorted(families)


def test_troubleshooting_has_every_error_with_a_cause_and_a_remedy() -> None:
    """Each code that the sources name, with the class of the errors that carry it."""
    rows = re.findall(
        r"^\| (SF\d+) \| (`[\w`, ]+`) \| (.+) \| (.+) \|$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE
    )
    sources = "".join(path.read_text() for path in (ROOT / "seqfuse").rglob("*.py"))
    raised = re.findall(r'\b(\w+Error)\([^()]*(?:\([^()]*\)[^()]*)*code="(SF\d+)"', sources)
    assert len(raised) > 60
    kinds = {code: {*re.findall(r"\w+", classes)} for code, classes, _, _ in rows}
    assert len(kinds) == len(rows)
    raising = {code: {kind for kind, other in raised if other == code} for _, code in raised}
    assert {code: kinds.get(code) for code in raising} == raising
    assert kinds.keys() == {*re.findall(r"\bSF\d{3}\b", sources)}
    assert all(len(cell) > 10 for row in rows for cell in row[2:])


# The reference: every public name, by category, from its docstring.

ENGINE = {"plan", "run", "kernels"}
LISTED = re.compile(r"^\.\. names:: (\S+)\n\n((?:   .*\n)+)", re.MULTILINE)


def public() -> dict[str, set[str]]:
    """Names in the `__all__` of the package and of each room for users, modules left out."""
    names: dict[str, set[str]] = {}
    for init in (ROOT / "seqfuse" / "__init__.py", *sorted((ROOT / "seqfuse").glob("*/__init__.py"))):
        room = init.parent.name
        if room in ENGINE or "__all__" not in init.read_text():
            continue
        module = importlib.import_module("seqfuse" if room == "seqfuse" else f"seqfuse.{room}")
        listed = {name for name in module.__all__ if not isinstance(getattr(module, name), types.ModuleType)}
        names[module.__name__] = listed
    return names


def in_the_reference() -> list[tuple[str, str]]:
    pages = "".join(page.read_text() for page in sorted((ROOT / "docs" / "reference").glob("*.md")))
    return [(module, name) for module, names in LISTED.findall(pages) for name in names.split()]


def test_every_public_name_stands_in_the_reference_once() -> None:
    listed = in_the_reference()
    assert len(listed) == len(set(listed))
    expected = {(module, name) for module, names in public().items() for name in names}
    # A function shadows the room of its name, and the other one stands beside it.
    expected -= {("seqfuse.tune", "tune"), ("seqfuse.convert", "convert"), ("seqfuse.convert", "conversion")}
    assert expected - set(listed) == set()


def test_every_section_of_the_reference_begins_with_an_example() -> None:
    for page in sorted((ROOT / "docs" / "reference").glob("*.md")):
        for section in re.split(r"^#{1,2} ", page.read_text(), flags=re.MULTILINE):
            # The whole of sf.fusions stands under the title of its page.
            assert ".. names::" not in section.partition("```python\n")[0], f"{page.name}: {section.splitlines()[0]}"


def test_every_name_in_the_reference_has_a_line_for_an_index() -> None:
    for module, name in in_the_reference():
        first = documented.docstring(importlib.import_module(module), name).split("\n\n")[0]
        assert first, f"{module}.{name} has no docstring"
        assert len(first) < 240, f"{module}.{name} begins with more than a line for an index: {first!r}"


def test_a_value_is_documented_behind_its_assignment() -> None:
    assert documented.docstring(sf, "Requirements").startswith("The return type of `requires`")
    assert documented.docstring(sf.fusions, "lean").startswith("Fusions that save less")
    assert documented.docstring(ast, "Load").startswith("Load")
    assert documented.docstring(sys.modules[__name__], "ENGINE") == ""


# Formulas of docstrings.

DESCRIBED = [
    getattr(room, name)
    for room in (sf.ops, sf.fusions)
    for name in room.__all__
    if inspect.isclass(getattr(room, name)) and name != "GELU"
]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Backward: dx = dy weight;  dweight = dy^T x over all rows.",
         [r"\text{dx} = \text{dy}\,\text{weight}", r"\text{dweight} = \text{dy}^{\mathsf{T}}\,x"]),
        ("rstd = (E[(x - mean)^2] + eps)^-1/2; the gain is what it is.",
         [r"\text{rstd} = (\mathbb{E}[(x - \text{mean})^{2}] + \varepsilon)^{- 1 / 2}"]),
        ("a gain of one, a row t, no bias", ["t"]),
        ("dbias = sum of dy over all rows", [r"\text{dbias} =", r"\text{dy}"]),
        ("`code = x`, [*, H], x: [H], y: [*, 2 F]", ["x", "y"]),
        ("y_i = sum_j keep w v_j / (1 - p), which is it", [r"y_{i} = \sum_{j}\,\text{keep}\,w\,v_{j} / (1 - p)"]),
        ("Shazeer 2020, arXiv:2002.05202, 3 times in all.", []),
        ("`Sequential`s in `Residual`s, longer than 30 s only in `b`s", []),
    ],
    ids=["products", "powers", "articles", "sums", "code", "indices", "none", "plurals and seconds"],
)  # fmt: skip
def test_formulas_are_told_from_prose(text: str, found: list[str]) -> None:
    assert formulas.formulas(text) == found


@pytest.mark.parametrize("obj", DESCRIBED, ids=lambda obj: obj.__name__)
def test_no_word_of_a_docstring_is_lost_on_its_way_to_a_formula(obj: type) -> None:
    text = " ".join((inspect.getdoc(obj) or "").split())
    parts = " ".join(part for _, part in formulas.split(text))
    assert re.sub(r"[\s`]", "", parts) == re.sub(r"[\s`]", "", text)


@pytest.mark.parametrize("obj", DESCRIBED, ids=lambda obj: obj.__name__)
def test_every_operation_and_fusion_states_a_formula_whose_brackets_close(obj: type) -> None:
    found = formulas.formulas(" ".join((inspect.getdoc(obj) or "").split("Args:")[0].split()))
    said_in_words = (sf.ops.QKNorm, sf.ops.RotaryEmbedding, sf.ops.Reshape, sf.fusions.BiasQKNormRotaryAttention)
    assert obj in said_in_words or any("=" in formula for formula in found)
    for formula in found:
        for pair in ("()", "[]", "{}"):
            assert formula.count(pair[0]) == formula.count(pair[1]), formula


def test_the_plural_of_a_name_in_code_is_prose_behind_it() -> None:
    assert formulas.rest(["Nested `Sequential`s and x."])[0] == "Nested :py:obj:`Sequential`\\s and :math:`x`\\."


def test_sections_become_fields_and_tables_stay() -> None:
    lines = ["Does it.", "", "Args:", "    x: what goes", "        in.", "    y: out.", "", "| a |", "| - |"]
    assert formulas.rest(lines) == [
        "Does it.", "", ":param x: what goes in.", ":param y: out.", "", "::", "", "   | a |", "   | - |", "",
    ]  # fmt: skip


# Environment variables.


def test_the_table_of_environment_variables_is_what_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [line.split("|")[1:-1] for line in printed.variables().splitlines()[2:]]
    assert rows
    for name, values, default, _ in rows:
        variable, allowed = name.strip(" `"), re.findall(r"`([^`]+)`", values)
        assert default.strip(" `") in allowed
        for text in (*allowed, "neither"):
            settings.cache_clear()
            with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                patch.setenv(variable, text)
                settings()
            said = [str(warning.message) for warning in caught]
            refused = f"{variable}='neither' is none of {', '.join(allowed)}; ignored"
            assert said == ([refused] if text == "neither" else [])
    settings.cache_clear()


# Pictures.


@pytest.mark.parametrize("name", draw.PICTURES)
def test_pictures_are_what_is_drawn_now(name: str) -> None:
    drawn = draw.PICTURES[name]()
    assert (ROOT / "docs" / "pictures" / f"{name}.svg").read_text() == drawn, "run: .venv/bin/python -m docs.draw"
    ElementTree.fromstring(drawn)
    assert any(f"pictures/{name.removesuffix('_narrow')}.svg" in page.read_text() for page in PAGES)


DRAWN = (ROOT / "docs" / "benchmarks.md").read_text()
COMMANDS = re.findall(r"^\$ seqfuse (plan examples/models\.py:(\w+) .*)$", DRAWN, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "name"), COMMANDS, ids=[name for _, name in COMMANDS])
def test_a_command_that_draws_a_known_model_writes_its_picture(
    command: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(shlex.split(command)) == 0
    picture = ROOT / "docs" / "pictures" / f"{name}.svg"
    assert (tmp_path / f"{name}.svg").read_text() == picture.read_text(), "run: .venv/bin/python -m docs.draw"


def test_every_known_model_is_shown_with_its_command() -> None:
    names = [name for _, name in COMMANDS]
    assert [*draw.MODELS] == [name + end for name in names for end in ("", "_narrow")]
    for name in names:
        shape = "x".join(map(str, draw.counts(name)["x"]))
        assert DRAWN.index(f"](pictures/{name}.svg)") < DRAWN.rindex(f"examples/models.py:{name} --input {shape}:bf16 ")


def test_every_launch_of_a_layer_has_its_column_in_the_picture() -> None:
    row = draw.counts("llama3_8b")
    for pass_, attention in (("forward", -1), ("backward", 0)):
        columns = draw.eager_columns(row["eager"][pass_], attention)
        assert sum(columns) == len(row["eager"][pass_])
        placed = [at for _, _, positions in draw.COLUMNS for at in positions]
        assert placed == [*range(len(row["planned"]["operations"]))]
        assert {*row["planned"][pass_]} <= {start for _, start, _ in row["planned"]["steps"][pass_]}


def test_pictures_fetch_nothing() -> None:
    for name, picture in draw.PICTURES.items():
        addresses = set(re.findall(r"https?://[^\s\"']+", picture()))
        assert addresses == {"http://www.w3.org/2000/svg"}, name
