"""Changes one place of the package at a time, in a copy, and lists the changes that no test notices.

    python tools/mutate.py --map MAP                                      which test runs which function, once
    python tools/mutate.py --map MAP --sample 400 --seed 0 --out FILE     mutants, and those that survive
    python tools/mutate.py --files plan/front.py tune --tests tests/tune --sample 20 --out FILE     of rooms or files

All work on the tree in the working directory. The first runs the tests and traces the functions that they call. The
second draws mutants of operations, fusions, kernels (of C, too) and the engine, and runs for each the tests that call
the changed function, those with few functions and little time first, until one fails, and for a survivor thirteen times
as many. Mutants are drawn by the text of the change and the name of its function, so that the draw does not change if a
file is moved. The third draws this many mutants of each of these rooms or files of the package, and runs the given
tests for each.
"""

from __future__ import annotations

import argparse
import ast
import copy
import dataclasses
import functools
import hashlib
import importlib
import io
import itertools
import json
import lzma
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tokenize
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

import calls

LEFT_OUT = ("cli", "pictures", "testing", "tune", "parallel", "convert", "integrations", "inference", "losses", "nn")
"""Rooms of the package that are not mutated."""

# Mutants ------------------------------------------------------------------------------------------------------------

_SWAPPED: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or,
    ast.Or: ast.And,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A change of one node of a file.

    Attributes:
        path: the file.
        line: the first line of the node.
        function: the qualified name of the function or class around it.
        change: the source before and after.
        start: the byte offset of the node in the file; `stop`: the offset of its end.
        text: the new source.
        turn: number of equal changes before it in the function.
    """

    path: str
    line: int
    function: str
    change: str
    start: int
    stop: int
    text: str
    turn: int = 0

    def drawn(self, seed: int) -> str:
        """The sort key of a draw."""
        return hashlib.sha256(f"{seed} {self.function} {self.change} {self.turn}".encode()).hexdigest()

    def applied(self, source: bytes) -> bytes:
        """The file with the change applied."""
        return source[: self.start] + self.text.encode() + source[self.stop :]


def changed(node: ast.AST, fields: dict[str, str]) -> Iterator[ast.AST]:
    """The replacements of a node; `fields` maps saved tensors to the next one that the function reads."""

    def with_(**values: Any) -> ast.AST:
        other = copy.copy(node)
        vars(other).update(values)
        return other

    match node:
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in _SWAPPED:
            yield with_(op=_SWAPPED[type(op)]())
        case ast.Compare(ops=[op]):
            yield with_(ops=[_SWAPPED[type(op)]()])
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield with_(value=not value)
        case ast.Constant(value=int(value)):
            yield with_(value=value + 1)
        case ast.Constant(value=float(value)):
            yield with_(value=2 * value or 1.0)
        case ast.IfExp(body=body, orelse=orelse):
            yield from (body, orelse)
        case ast.Attribute(value=ast.Name(), ctx=ast.Load()) if ast.unparse(node) in fields:
            yield with_(attr=fields[ast.unparse(node)])
        case ast.Call(keywords=keywords) if any(k.arg == "mask" for k in keywords):
            yield with_(keywords=[k for k in keywords if k.arg not in ("mask", "other")])
        case ast.Call(func=ast.Attribute(attr="where"), args=[_, first, second]):
            yield from (first, second)
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.If(orelse=[]):
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()
        case _:
            pass


_SWAPPED_IN_C = {
    "+": "-", "-": "+", "*": "/", "/": "*", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "&": "|", "|": "&", "<<": ">>", ">>": "<<", "+=": "=", "-=": "+=", "*=": "=", "/=": "*=", "&&": "||", "||": "&&",
}  # fmt: skip


def mutants(path: str, source: bytes) -> Iterator[Mutant]:
    """Every mutant of a file, except in annotations, docstrings, imports, decorators, messages and type checks; in
    strings, only operators of C, if the file writes C.
    """
    if path.endswith(".h"):
        yield from _mutants_in_c(path, source, [(0, source.decode(), "<module>")])
        return
    yield from _mutants_of_python(path, source)
    if Path(path).parent.name == "c":
        yield from _mutants_in_c(path, source, _texts(source))


def _mutants_in_c(path: str, source: bytes, texts: Iterable[tuple[int, str, str]]) -> Iterator[Mutant]:
    """Mutants of operators between spaces in strings, given with their offsets and functions."""
    seen = Counter[tuple[str, str]]()
    for offset, text, function in texts:
        for found in re.finditer(r"(?<= )[-+*/<>=!&|]{1,2}(?= )", re.sub(r"/\*.*?\*/", _blank, text, flags=re.DOTALL)):
            if (other := _SWAPPED_IN_C.get(found[0])) is None:
                continue
            start = offset + len(text[: found.start()].encode())
            around = text[max(0, found.start() - 30) : found.end() + 30]
            change = f"{found[0]} -> {other} in C: {' '.join(around.split())}"
            line = source.count(b"\n", 0, start) + 1
            yield Mutant(path, line, function, change, start, start + len(found[0]), other, seen[function, change])
            seen[function, change] += 1


def _blank(comment: re.Match[str]) -> str:
    return " " * len(comment[0])


def _texts(source: bytes) -> Iterator[tuple[int, str, str]]:
    """Strings of a Python file as written there, except docstrings and messages."""
    lines = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
    tree, left_out = ast.parse(source), set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            left_out |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]  # inner functions last
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        # From Python 3.12 on, the expressions in an f-string are separate tokens.
        if tokenize.tok_name[token.type] in ("STRING", "FSTRING_MIDDLE") and token.start[0] not in left_out:
            (line, column), stop = token.start, token.end
            start = lines[line - 1] + len(token.line.splitlines(keepends=True)[0][:column].encode())
            end = lines[stop[0] - 1] + len(source.splitlines()[stop[0] - 1].decode()[: stop[1]].encode())
            inside = [f.name for f in functions if f.lineno <= line <= (f.end_lineno or line)]
            text = source[start:end].decode()
            text = re.sub(r"(?<!\{)\{[^{}]+\}", _blank, text) if text[0] == "f" else text
            yield start, text, inside[-1] if inside else "<module>"


def _mutants_of_python(path: str, source: bytes) -> Iterator[Mutant]:
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    seen = Counter[tuple[str, str]]()

    def walk(node: ast.AST, parent: ast.AST, scope: tuple[str, ...], fields: dict[str, str]) -> Iterator[Mutant]:
        children: list[ast.AST | None] = [*ast.iter_child_nodes(node)]
        match node:
            case ast.If() if "TYPE_CHECKING" in ast.unparse(node.test):
                return
            case ast.FunctionDef() if "variant" in node.name:  # it lists variants to compile
                return
            case ast.FunctionDef():
                children = [*node.body, *node.args.defaults, *node.args.kw_defaults]
                scope, fields = (*scope, node.name), _fields(node)
            case ast.ClassDef():
                children, scope = [*node.body], (*scope, node.name)
            case ast.AnnAssign():
                children = [node.value] if scope else []
            case ast.Raise() | ast.Import() | ast.ImportFrom() | ast.JoinedStr() | ast.Assert():
                children = []
            case _:
                pass
        for other in changed(node, fields):
            at: Any = node  # a statement or expression, which has a position
            start, stop = lines[at.lineno - 1] + at.col_offset, lines[at.end_lineno - 1] + at.end_col_offset
            change = f"{_short(node)} -> {_short(other)}" + f" in {_short(parent)}" * isinstance(node, ast.Constant)
            name = ".".join(scope) or "<module>"
            text = ast.unparse(other) if isinstance(other, ast.stmt) else f"({ast.unparse(other)})"
            yield Mutant(path, at.lineno, name, change, start, stop, text, seen[name, change])
            seen[name, change] += 1
        for child in children:
            if child is not None:
                yield from walk(child, node, scope, fields)

    tree = ast.parse(source)
    yield from walk(tree, tree, (), {})


def _short(node: ast.AST) -> str:
    return ast.unparse(node).partition("\n")[0][:100]


def _fields(function: Any) -> dict[str, str]:
    """For each `saved.field` that a function reads, the next field of the same object that it reads."""
    slots = function.args.kwonlyargs if function.name == "bwd" else ()
    names = {"saved", "record", *(arg.arg for arg in slots)}
    read: dict[str, list[str]] = {}
    for node in ast.walk(function):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attr, ctx=ast.Load()) if name in names:
                read.setdefault(name, []).append(attr)
    rounds = {name: [*dict.fromkeys(attrs)] for name, attrs in read.items()}
    return {f"{n}.{a}": b for n, r in rounds.items() if len(r) > 1 for a, b in zip(r, (*r[1:], r[0]), strict=True)}


def sample(root: Path, count: int, seed: int, rooms: Sequence[str] = ()) -> tuple[list[Mutant], int]:
    """This many random mutants of the package, or of each of some rooms or files; and the number of all mutants."""
    drawn, every = list[Mutant](), 0
    for room in rooms or ("",):
        place, found = root / "seqfuse" / room, list[Mutant]()
        for file in sorted([*place.rglob("*.py"), *place.rglob("*.h")]) if place.is_dir() else [place]:
            if rooms or file.relative_to(root).parts[1] not in LEFT_OUT:
                found += mutants(str(file.relative_to(root)), file.read_bytes())
        drawn += sorted(found, key=lambda mutant: mutant.drawn(seed))[:count]
        every += len(found)
    return drawn, every


# Runs -----------------------------------------------------------------------------------------------------------------

Chosen = dict[str, list[str]]


def chosen(mutant: Mutant, known: dict[str, Any], seconds: float, most: int) -> tuple[Chosen, float, str]:
    """The tests for a mutant by half, their time, and what they call.

    These are tests that call its function, or, if there are none, another function of its file. Tests with few
    functions and little time come first, up to the given numbers of seconds and tests.
    """
    path, called = Path(mutant.path), "its function"
    file = path.name if path.suffix == ".py" else f"{path.stem if path.stem in ('norm', 'attention') else 'call'}.py"
    found = _calling(known, lambda name: name == f"{file} {mutant.function}")
    if not found:
        found, called = _calling(known, lambda name: name.startswith(f"{file} ")), "its file"
    tests, left = Chosen(), seconds
    for _, took, half, test in sorted(found):
        if took <= left and sum(map(len, tests.values())) < most:
            tests.setdefault(half, []).append(test)
            left -= took
    return tests, seconds - left, called if found else "nothing"


_MOST = 200
"""Maximum number of tests for a mutant at first."""

_AGAIN = 13
"""How many times as many tests, and as much of their time, a mutant meets that survives these."""


def _calling(known: dict[str, Any], of: Callable[[str], bool]) -> list[tuple[float, float, str, str]]:
    """Tests that call a function with a matching name: sort key, seconds, half and name of each."""
    found: list[tuple[float, float, str, str]] = []
    for half, traced in known.items():
        same = {i for i, name in enumerate(traced["functions"]) if of(name)}
        for test, (took, functions) in traced["tests"].items():
            if not same.isdisjoint(functions):
                found.append((took * len(functions), took, half, test))
    return found


def survives(tests: Chosen, folder: Path, limit: float) -> str:
    """Whether tests of a copy of the tree pass: "survived", "killed" or "too long"."""
    for half, names in tests.items():
        process = os.fork()
        if process == 0:
            _run_tests(half, names, folder)
        begun = time.monotonic()
        while (ended := os.waitpid(process, os.WNOHANG))[0] == 0:
            if time.monotonic() - begun > limit:
                os.killpg(process, signal.SIGKILL)
                os.waitpid(process, 0)
                return "too long"
            time.sleep(0.02)
        if ended[1]:
            return "killed"
    return "survived"


def _run_tests(half: str, names: list[str], folder: Path) -> None:
    """Run tests in this process, forked from one that has imported their dependencies, and exit."""
    code: int = 99
    try:
        os.setsid()
        os.chdir(folder)
        os.environ.pop("TRITON_INTERPRET", None)
        os.environ |= {"TRITON_INTERPRET": "1"} if half == "kernels" else {}
        output = os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(output, stream)
        import pytest

        options = [
            "-x",
            "-q",
            "-n",
            "0",
            "-p",
            "no:cacheprovider",
            "--timeout",
            "300",
            "--half",
            half,
            "--rootdir",
            ".",
        ]
        code = int(pytest.main([*options, *names]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def run(mutants: list[Mutant], known: Any, results: Path, root: Path, seconds: float) -> None:
    """Run mutants in a copy of the tree, and append the result of each to a file.

    `known` is the map of tests, or a function that returns the same as `chosen`.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "tree")
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True)
        for name in filter(None, tracked.stdout.split("\0")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)
        for number, mutant in enumerate(mutants):
            file = folder / mutant.path
            source, begun = file.read_bytes(), time.monotonic()

            def write(text: bytes, at: int, file: Path = file) -> None:
                file.write_bytes(text)
                os.utime(file, (at, at))  # different each time, so that no stale bytecode is used

            write(mutant.applied(source), 1_000_000_000 + 2 * number)
            fate, called = "survived", "its function"
            for times in (1, _AGAIN):
                asked = mutant, known, times * seconds, times * _MOST
                tests, took, called = known() if callable(known) else chosen(*asked)
                fate = survives(tests, folder, 4 * took + 60) if tests else "survived"
                if fate != "survived" or callable(known):
                    break
            write(source, 1_000_000_001 + 2 * number)
            about = {"fate": fate, "calls": called, "seconds": round(time.monotonic() - begun, 1)}
            about |= {name: getattr(mutant, name) for name in ("path", "line", "function", "change")}
            with results.open("a") as lines:
                lines.write(json.dumps(about) + "\n")


def report(results: Path, out: Path, about: dict[str, Any]) -> None:
    """Write the number of surviving mutants by room, and a list of them."""
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    rooms: dict[str, Counter[str]] = {}
    for row in rows:
        parts = row["path"].split("/")
        rooms.setdefault(parts[1] if len(parts) > 2 else "root", Counter())[row["fate"]] += 1
    fates = Counter(row["fate"] for row in rows)
    survivors: list[str] = []
    for row in sorted(rows, key=lambda row: (row["path"], row["line"])):
        if row["fate"] == "survived":
            unseen = "" if row["calls"] == "its function" else f" [tests call {row['calls']}]"
            survivors.append(f"{row['path']}:{row['line']}: {row['function']}: {row['change']}{unseen}")
    by_room = {name: rooms[name] for name in sorted(rooms)}
    data = {**about, "run": len(rows), **fates, "rooms": by_room, "survivors": survivors}
    out.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")


# All of it ------------------------------------------------------------------------------------------------------------


def main() -> int:
    """Write the map of tests, or run mutants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--map", type=Path, help="which test runs which function")
    parser.add_argument("--files", nargs="+", default=(), help="folders or files of the package, with a draw for each")
    parser.add_argument("--tests", nargs="+", help="what is run for each mutant, in place of what the map says")
    parser.add_argument("--half", default="plain", choices=["plain", "kernels"], help="of these tests")
    parser.add_argument("--out", type=Path, metavar="FILE", help="mutants that survive; without it, the map is made")
    parser.add_argument("--sample", type=int, default=400, metavar="N", help="how many mutants")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draw")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="how many run at once")
    parser.add_argument("--part", type=float, default=0.005, metavar="P", help="of the time of all tests, for a mutant")
    given = parser.parse_args()
    if given.out is None:
        calls.write_map(given.map)
        return 0
    root = Path.cwd()
    drawn, count = sample(root, given.sample, given.seed, given.files)
    results = given.out.with_suffix(".lines")
    done = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    finished = {(row["path"], row["line"], row["change"]) for row in done}  # by an interrupted run
    left = [m for m in drawn if (m.path, m.line, m.change) not in finished]
    for name in ("torch", "numpy", "pytest"):
        importlib.import_module(name)
    sys.path[:] = [place for place in sys.path if Path(place).resolve() not in (root, Path(__file__).parent)]
    known: Any = functools.partial(tuple, ({given.half: given.tests}, 300.0, "its function"))
    seconds = 0.0
    if given.tests is None:
        known = json.loads(lzma.decompress(given.map.read_bytes()))
        seconds = given.part * sum(took for traced in known.values() for took, _ in traced["tests"].values())
    workers = [_forked(left[i :: given.jobs], known, results, root, seconds) for i in range(given.jobs)]
    for worker in workers:
        os.waitpid(worker, 0)
    report(results, given.out, {"sample": given.sample, "seed": given.seed, "part": given.part, "of": count})
    return 0


def _forked(*arguments: Any) -> int:
    process = os.fork()
    if process == 0:
        try:
            run(*arguments)
        finally:
            os._exit(0)
    return process


if __name__ == "__main__":
    sys.exit(main())
