"""Who may import whom: imports point downward, anywhere in a file."""

from __future__ import annotations

import ast
import functools
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "seqfuse"

SINGULAR = {
    "errors", "generated", "group", "saved", "signature", "env", "casts", "settings", "maingrad", "autograd",
    "operation", "pointwise", "traffic", "fusion", "store", "cost_table", "pictures", "hardware", "compiler",
    "recipes", "scaling", "quantized", "fake",
}  # fmt: skip
COLLECTIONS = {"plan", "run", "kernels", "ops", "fusions"}
# Built on all of the above; each may look at those before it.
BUILT_ON = ("losses", "nn", "parallel", "inference", "convert", "testing", "plugins", "tune", "cli")

# A room is a file or folder of seqfuse/; an entry with a dot lets in that one name of a room.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "generated": set(),
    "saved": {"errors", "generated"},
    "signature": {"errors"},
    "compiler": {"errors", "settings", "store"},
    "env": {"compiler", "errors", "hardware", "recipes", "settings"},
    "recipes": {"errors"},
    "scaling": {"errors", "operation", "quantized", "recipes"},
    "quantized": {"recipes"},
    "hardware": set(),
    "casts": {"env"},
    "fake": {"casts"},
    "settings": {"errors"},
    "maingrad": {"errors"},
    "autograd": {"saved", "maingrad", "errors"},
    "group": {"errors"},
    "operation": {"saved", "signature", "maingrad", "autograd", "group", "errors"},
    "pointwise": {"env", "saved", "signature", "operation", "errors"},
    "traffic": {"env", "hardware", "operation"},
    "fusion": {"quantized", "saved", "signature", "env", "operation", "traffic", "errors"},
    "store": set(),
    "pictures": set(),
    "cost_table": {"compiler", "store", "env", "settings", "operation", "errors"},
    "plan": SINGULAR,
    "run": SINGULAR | {"plan"},
    "kernels": {"compiler", "generated", "hardware"},
    "ops": SINGULAR | {"kernels", "run.Sequential"},
    "fusions": SINGULAR | {"ops", "kernels"},
    **{room: SINGULAR | COLLECTIONS | set(BUILT_ON[:rank]) for rank, room in enumerate(BUILT_ON)},
    # `seqfuse` is the package's own namespace: the edge and the command line may use it as a user would.
    "integrations": SINGULAR | COLLECTIONS | set(BUILT_ON) | {"seqfuse"},
    "seqfuse": SINGULAR | COLLECTIONS | set(BUILT_ON),
}
MAY_IMPORT["cli"] |= {"seqfuse"}
MAY_IMPORT["__main__"] = {"cli"}

# Inside a function only: an operation that is called by itself starts the engine, which has a default fusion set.
MAY_IMPORT_LATE: dict[str, set[str]] = {"operation": {"run.fuser_of"}, "run": {"fusions"}}
# Under `if TYPE_CHECKING:` only, so never at run time.
MAY_NAME_IN_TYPES: dict[str, set[str]] = {"operation": {"env"}}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


Import = tuple[tuple[str, ...], int, bool, bool]


@functools.cache
def imports(tree: ast.Module, package: tuple[str, ...]) -> tuple[Import, ...]:
    """What `_imports` finds, once."""
    return (*_imports(tree, package),)


def _imports(tree: ast.Module, package: tuple[str, ...]) -> Iterator[Import]:
    """Each absolute dotted name that a file of `package` imports, its line, and whether it is imported for types only,
    or inside a function. `from a import b` gives `a.b`: whether `b` is a module is for the caller to decide."""
    types_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        and _last(node.test) == "TYPE_CHECKING"
        and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    late = {id(inner) for function in functions for inner in ast.walk(function)}
    for node in ast.walk(tree):
        names: list[tuple[str, ...]] = []
        if isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            names = [(*base, *(node.module.split(".") if node.module else ()), alias.name) for alias in node.names]
        elif isinstance(node, ast.Call) and _last(node.func) in ("import_module", "__import__"):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                dots = len(first.value) - len(first.value.lstrip("."))
                base = package[: len(package) - dots + 1] if dots else ()
                names = [(*base, *first.value[dots:].split("."))]
        for name in names:
            yield name, node.lineno, id(node) in types_only, id(node) in late


def _last(function: ast.expr) -> str:
    """The name that a function is called by, without those before a dot."""
    return getattr(function, "attr", getattr(function, "id", ""))


def upward(root: Path) -> list[str]:
    """The imports within the package at `root` that the table does not allow, as `file:line: room imports module`."""
    wrong: list[str] = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        package = ("seqfuse", *parts[:-1])
        room = "seqfuse" if parts == ("__init__",) else parts[0]
        for name, line, types_only, late in imports(tree_of(path), package):
            if name[0] != "seqfuse":
                continue
            inner = name[1:]
            is_module = bool(inner) and ((root / inner[0]).is_dir() or (root / f"{inner[0]}.py").exists())
            target = inner[0] if is_module else "seqfuse"
            allowed = MAY_IMPORT.get(room, set()) | (MAY_NAME_IN_TYPES.get(room, set()) if types_only else set())
            allowed |= MAY_IMPORT_LATE.get(room, set()) if late else set()
            if target != room and target not in allowed and ".".join(inner[:2]) not in allowed:
                wrong.append(f"{path.relative_to(root)}:{line}: {room} imports {'.'.join(name)}")
    return wrong


def test_imports_point_downward() -> None:
    assert upward(PACKAGE) == []


def files_of_the_engine_used(root: Path) -> list[str]:
    """What other rooms import from the files of `plan` and `run`, but for what these list, as `file:line: module`."""
    listed = {
        room: {name.asname or name.name for node in tree_of(root / room / "__init__.py").body
               if isinstance(node, ast.ImportFrom) for name in node.names}
        for room in ("plan", "run")
    }  # fmt: skip
    wrong: list[str] = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        for name, line, *_ in imports(tree_of(path), ("seqfuse", *parts[:-1])):
            room, inner = (*name[1:2], ""), name[2:3]
            if name[0] == "seqfuse" and room[0] in listed and parts[0] not in listed and {*inner} - listed[room[0]]:
                wrong.append(f"{path.relative_to(root)}:{line}: {'.'.join(name)}")
    return wrong


def test_other_rooms_import_what_the_engine_lists() -> None:
    assert files_of_the_engine_used(PACKAGE) == []


def test_every_room_is_in_the_table() -> None:
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    assert rooms - {"__init__"} <= MAY_IMPORT.keys()


def test_the_table_has_no_circle() -> None:
    # The namespace at the top is for those that nobody inside imports; it does not import them back.
    below = {room: {lower.split(".")[0] for lower in lowers} - {"seqfuse"} for room, lowers in MAY_IMPORT.items()}
    assert set().union(*below.values()) <= below.keys()
    graphlib.TopologicalSorter(below).prepare()


def files_below(root: Path, room: str) -> dict[str, set[str]]:
    """The files of a room at `root`, and those of it that each imports, in functions and for types, too."""
    needs: dict[str, set[str]] = {}
    for path in (root / room).rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        package = ("seqfuse", *parts[:-1])
        inner = needs.setdefault(".".join(parts[:-1] if parts[-1] == "__init__" else parts), set())
        for name, *_ in imports(tree_of(path), package):
            # `from .a import b` is of the file a.b where there is one, else of a.
            for module in (name[1:], name[1:-1]):
                inside = name[0] == "seqfuse" and module[:1] == (room,)
                if inside and root.joinpath(*module).with_suffix(".py").exists():
                    inner.add(".".join(module))
                    break
    return needs


def circles(root: Path) -> list[list[str]]:
    """A circle of imports for each room at `root` that has one."""
    found: list[list[str]] = []
    for room in sorted(path.name for path in root.iterdir() if any(path.glob("*.py"))):
        try:
            graphlib.TopologicalSorter(files_below(root, room)).prepare()
        except graphlib.CycleError as error:
            found.append(error.args[1])
    return found


@pytest.mark.parametrize("room", ["plan", "run"])
def test_no_chain_of_imports_in_the_engine_is_longer_than_seven_files(room: str) -> None:
    below = files_below(PACKAGE, room)
    del below[room]  # `__init__` hands names out
    longest: dict[str, int] = {}
    for name in graphlib.TopologicalSorter(below).static_order():
        longest[name] = 1 + max((longest[other] for other in below[name]), default=0)
    assert max(longest.values()) <= 7


def test_no_room_has_a_circle() -> None:
    assert circles(PACKAGE) == []


@pytest.mark.parametrize(
    "back", ["from . import a", "def f():\n    from .a import x", "if TYPE_CHECKING:\n    from .a import x"]
)
def test_a_circle_within_a_room_is_found(back: str, tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/a.py").write_text("from .b import y")
    (tmp_path / "kernels/b.py").write_text(back)
    assert len(circles(tmp_path)) == 1


ALLOWED = {
    "ops/channels.py": "from ..run import Sequential",
    "operation.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .env import Env",
    "fusions/pair.py": "from .. import ops\nfrom ..ops import Linear\nimport seqfuse.kernels.norm",
    "run/fuser.py": "from ..plan import match\nimport torch\ndef f():\n    from ..fusions import default",
    "__init__.py": "from . import ops, fusions\nfrom .saved import Saved",
}
REFUSED = {
    "kernels/norm.py": "from ..errors import KernelError",
    "plan/plan.py": "from ..ops import Linear",
    "run/fuser.py": "from ..fusions import default",
    "plan/match.py": "def run():\n    from seqfuse import fusions",
    "run/sequential.py": "import importlib\nfusions = importlib.import_module('seqfuse.fusions')",
    "operation.py": "from .env import Env",
    "saved.py": "from seqfuse import Saved",
    "ops/channels.py": "from ..plan.plan import Plan",
    "ops/linear.py": "try:\n    from .. import fusions\nexcept ImportError:\n    pass",
    "nn/block.py": "import importlib\nimportlib.import_module('..testing', __package__)",
    "testing/kit.py": "from ..integrations.fx import convert",
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        *(pytest.param({name: text}, 0, id=f"allowed-{name}") for name, text in ALLOWED.items()),
        *(pytest.param({name: text}, 1, id=f"refused-{name}") for name, text in REFUSED.items()),
    ],
)
def test_the_walk_sees_an_upward_arrow(files: dict[str, str], expected: int, tmp_path: Path) -> None:
    for room in COLLECTIONS | {"nn", "testing", "integrations"}:
        (tmp_path / room).mkdir()
    for room in SINGULAR:
        (tmp_path / f"{room}.py").touch()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert len(upward(tmp_path)) == expected
