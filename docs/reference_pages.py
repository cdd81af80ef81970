"""The reference: a directive that lists names by first line and describes each from its docstring, and math as MathML.

A block of names stands in a page as

    .. names:: seqfuse.ops

       Linear Bias

Formulas become MathML when the pages are built, so that they need no script and no network.
"""

from __future__ import annotations

import importlib
import inspect
import types
from typing import Any

import formulas
from documented import docstring, fields_of, is_value
from docutils import nodes
from docutils.statemachine import StringList
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import seqfuse as sf
from seqfuse.fusion import FusedOperation


class Names(SphinxDirective):
    """An index of names of one module by first line, then each name from its docstring."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        module = importlib.import_module(self.arguments[0])
        names = " ".join(self.content).split()
        lines = [".. list-table::", "   :widths: 30 70", ""]
        for name in names:
            lines += [f"   * - :py:obj:`~{module.__name__}.{name}`", f"     - {first_line(module, name)}"]
        lines += ["", f".. py:currentmodule:: {module.__name__}", ""]
        for name in names:
            lines += [*described(module, name), ""]
        parent = nodes.container()
        self.state.nested_parse(StringList(lines, source=self.env.docname), self.content_offset, parent)
        return parent.children


def first_line(module: types.ModuleType, name: str) -> str:
    """What a docstring says in an index, as reStructuredText."""
    first = docstring(module, name).split("\n\n")[0]
    return " ".join(formulas.rest(first.splitlines())).strip()


def described(module: types.ModuleType, name: str) -> list[str]:
    """The directive that describes a name."""
    obj = getattr(module, name)
    if inspect.isclass(obj) and obj.__name__ != name:
        return [f".. py:class:: {name}", "", f"   Another name of :py:class:`~{module.__name__}.{obj.__name__}`."]
    if is_value(obj):
        body = formulas.rest(docstring(module, name).splitlines())
        return [f".. py:data:: {name}", "", *(f"   {line}" for line in body)]
    directive = "autoclass" if inspect.isclass(obj) else "autofunction"
    return [f".. {directive}:: {module.__name__}.{name}", *["   :members:"] * (directive == "autoclass")]


def describe(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings to reStructuredText, with what a class declares beside it."""
    lines[:] = formulas.rest([line.rstrip() for line in lines])
    if not inspect.isclass(obj):
        return
    if issubclass(obj, FusedOperation) and obj.slots:
        lines += _of_fusion(obj)
    record = vars(obj).get("Saved")
    if isinstance(record, type) and issubclass(record, sf.Saved) and record.fields:
        lines += [":Saved tensors:", *(f"   * {_field(*field)}" for field in fields_of(record)), ""]


def _of_fusion(fusion: type[FusedOperation]) -> list[str]:
    contract = next(base.__name__ for base in fusion.__mro__ if base.__module__ == "seqfuse.fusion")
    pattern = ", ".join(f"{slot.name}: {_slot(slot)}" for slot in fusion.slots)
    rules = [name for name in ("aten", "triton", "lean") if fusion in getattr(sf.fusions, name)]
    lines = [f":Base class: :py:class:`~seqfuse.{contract}`", f":Pattern: ``{pattern}``"]
    return [*lines, *([f":Fusion sets: {', '.join(f'``fusions.{rule}``' for rule in rules)}"] if rules else []), ""]


def _field(field: str, about: str) -> str:
    return f"``{field}``" + (f", {formulas.plain(about)}" if about else "")


def _slot(slot: Any) -> str:
    kinds = " | ".join(each.__name__ for each in slot.types)
    return f"tuple[{kinds}, ...]" if slot.variadic else kinds + " | None" * slot.optional


def skip_record(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    # What a record holds stands with its operation.
    return True if what == "class" and inspect.isclass(obj) and issubclass(obj, sf.Saved) else None


def without_slots(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str, returns: str
) -> tuple[str, str] | None:
    # Nobody makes a fusion by hand: the engine does, from the operations that its slots matched.
    return ("", "") if inspect.isclass(obj) and issubclass(obj, FusedOperation) else None


def mathml(tex: str, display: str = "inline") -> str:
    """MathML of LaTeX; names of several letters are names, and no text, beside which operators lose their space."""
    return convert(tex, display=display).replace("<mtext>", "<mi>").replace("</mtext>", "</mi>")


def _inline(translator: Any, node: Any) -> None:
    translator.body.append(mathml(node.astext()))
    raise nodes.SkipNode


def _display(translator: Any, node: Any) -> None:
    translator.body.append(f"<p>{mathml(node.astext(), 'block')}</p>")
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.add_directive("names", Names)
    app.add_html_math_renderer("mathml", inline_renderers=(_inline, None), block_renderers=(_display, None))
    app.connect("autodoc-process-docstring", describe)
    app.connect("autodoc-process-signature", without_slots)
    app.connect("autodoc-skip-member", skip_record)
