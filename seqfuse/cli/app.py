"""The verbs of the command, as cyclopts reads them: each signature is what may be written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from .. import __version__
from . import FOUND, NOT_RUN
from .inputs import On, Under
from .output import tell, tell_json, write

app = App(
    name="seqfuse",
    help="Fused training kernels for PyTorch: plans, checks and measurements from a terminal.",
    version=__version__,
    help_epilogue=(
        "MODULE:NAME is package.module:name or path/to/file.py:name, and names a torch.nn.Module, or a function or "
        "class that makes one when it is called without arguments. An input is 8x1024:bf16. --traceback shows where "
        "an error comes from."
    ),
)
cache = App(name="cache", help="Compile C kernels ahead; `seqfuse doctor` shows where they are kept.")
app.command(cache)

_Target = Annotated[str, Parameter(name="MODULE:NAME", help="What to work on, as below.")]
_Input = Annotated[str, Parameter(help="What enters, such as 8x1024:bf16.")]
_Json = Annotated[bool, Parameter(negative="", show_default=False, help="Print JSON.")]
_On = Annotated[On | None, Parameter(name="*")]
_Under = Annotated[Under | None, Parameter(name="*")]


@app.command
def doctor(*, json: _Json = False) -> int:
    """Show devices, versions, caches, plug-ins, and which fusions can run here; exit 1 if there is a warning."""
    from . import doctor as examination

    report = examination.examine()
    if json:
        tell_json(examination.data(report))
    else:
        examination.show(report)
    return int(bool(report.warnings))


@app.command
def plan(
    target: _Target,
    /,
    *,
    input: Annotated[str | None, Parameter(help="What enters, such as 8x1024:bf16.")] = None,
    memory: Annotated[str | None, Parameter(help="save, balanced, lean, or a number of bytes.")] = None,
    no_grad: Annotated[bool, Parameter(negative="", show_default=False, help="Plan for inference.")] = False,
    json: _Json = False,
    output: Annotated[
        Path | None, Parameter(help="Write to this file, whose ending says the form: .svg, .json or .txt.")
    ] = None,
    on: _Under = None,
) -> None:
    """Show what is fused and why not more, here or for --device cuda:sm_90, a machine that is not here."""
    from . import plan as planning

    form = planning.form_of(json, output)
    made = planning.planned(target, input, on or Under(), memory, not no_grad)
    write(form(made), output)


@app.command
def tune(
    target: _Target,
    /,
    *,
    input: _Input,
    modes: Literal["train", "eval", "both"] = "both",
    budget: Annotated[float | None, Parameter(help="Seconds after which no measurement is begun.")] = None,
    file: Annotated[Path | None, Parameter(help="Keep measurements in this file.")] = None,
    json: _Json = False,
    on: _Under = None,
) -> None:
    """Measure every candidate fusion here, so that plans use those that are faster."""
    from . import running

    report = running.tuned(target, input, on or Under(), modes, budget, file)
    if json:
        tell_json(running.data(report))
    else:
        tell(str(report))


@app.command
def check(
    target: _Target,
    /,
    *,
    input: Annotated[str | None, Parameter(help="What enters, such as 8x64; a model needs it.")] = None,
    seed: int = 0,
    json: _Json = False,
    on: _On = None,
) -> int:
    """Run the test kit on an operation, a fusion or a model.

    Exits with 1 if it finds something; with 3 if nothing failed and a check could not run here.
    """
    from . import check as checking

    found: list[checking.CheckResult] = []
    for one in checking.checked(target, input, on or On(), seed):
        found.append(one)
        if not json:
            tell(str(one), "bold" if one.failure is not None else "")
    if json:
        tell_json(checking.data(found))
    if any(one.failure is not None for one in found):
        return FOUND
    return NOT_RUN if any(one.not_run is not None for one in found) else 0


@app.command
def compare(
    target: _Target,
    /,
    *,
    input: _Input,
    against: Annotated[str, Parameter(help="unfused, or a dtype with more digits.")] = "unfused",
    no_grad: Annotated[bool, Parameter(negative="", show_default=False, help="Compare the forward pass.")] = False,
    seed: int = 0,
    json: _Json = False,
    on: _Under = None,
) -> int:
    """Find the first operation at which two runs differ by more than the error bound; exit 1 if there is one."""
    from . import compare as comparing

    found = comparing.compared(target, input, on or Under(), not no_grad, against, seed)
    if json:
        tell_json(comparing.data(found))
    else:
        tell(str(found), "" if found.difference is None else "bold")
    return int(found.difference is not None)


@cache.command(name="warm")
def warm_cache(target: _Target, /, *, input: _Input, on: _Under = None) -> None:
    """Compile the C kernels that a model calls on this CPU, so that its first step does not wait for them."""
    from . import running

    tell(running.warmed(target, input, on or Under()))
