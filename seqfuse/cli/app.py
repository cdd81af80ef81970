"""The verbs of the command, as cyclopts reads them: each signature is what may be written."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from .. import __version__
from . import FOUND, NOT_RUN
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
cache_app = App(
    name="cache", help="Show, clear or warm what is kept for this user: measurements of `tune`, compiled C kernels."
)
app.command(cache_app)

_Target = Annotated[str, Parameter(name="MODULE:NAME", help="What to work on, as below.")]
_Channel = Annotated[
    list[str] | None,
    Parameter(negative="", show_default=False, help="An extra input, such as residual=8x1024:bf16; may be repeated."),
]
Json = Annotated[bool, Parameter(negative="", show_default=False, help="Print JSON.")]


@dataclasses.dataclass(kw_only=True)
class On:
    """What a model runs on."""

    device: Annotated[
        str | None,
        Parameter(help="cpu, cuda or cuda:0, for a plan also cuda:sm_90 or h100; else the first GPU."),
    ] = None
    dtype: Annotated[str | None, Parameter(help="Of the parameters; that of a floating input.")] = None
    autocast: Annotated[str | None, Parameter(help="Run under torch.autocast to this dtype.")] = None
    part: Annotated[str | None, Parameter(help="Path of the Sequential in the model that is meant.")] = None
    channel: _Channel = None
    evaluate: Annotated[
        bool, Parameter(name="--eval", negative="", show_default=False, help="Put the model into evaluation mode.")
    ] = False


_Shared = Annotated[On | None, Parameter(name="*")]


@app.command
def doctor(*, json: Json = False) -> int:
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
    json: Json = False,
    html: Annotated[bool, Parameter(negative="", show_default=False, help="Write a page.")] = False,
    svg: Annotated[bool, Parameter(negative="", show_default=False, help="Write a picture.")] = False,
    mermaid: Annotated[bool, Parameter(negative="", show_default=False, help="Write a Mermaid flowchart.")] = False,
    output: Annotated[
        Path | None, Parameter(help="Write to this file; its ending says the form, such as .svg.")
    ] = None,
    on: _Shared = None,
) -> None:
    """Show what is fused and why not more, here or for --device cuda:sm_90, a machine that is not here."""
    from . import plan as planning

    on = on or On()
    form = planning.form_of({"json": json, "html": html, "svg": svg, "mermaid": mermaid}, output)
    made = planning.planned(
        target, given=input, channels=on.channel or [], device=on.device, dtype=on.dtype, autocast=on.autocast,
        part=on.part, memory=memory, grad=not no_grad, evaluate=on.evaluate,
    )  # fmt: skip
    write(planning.written(made, form), output)


@app.command
def tune(
    target: _Target,
    /,
    *,
    input: Annotated[str, Parameter(help="What enters, such as 8x1024:bf16.")],
    modes: Literal["train", "eval", "both"] = "both",
    budget: Annotated[float | None, Parameter(help="Seconds after which no measurement is begun.")] = None,
    file: Annotated[Path | None, Parameter(help="Keep measurements in this file.")] = None,
    json: Json = False,
    on: _Shared = None,
) -> None:
    """Measure every candidate fusion here, so that plans use those that are faster."""
    from . import tuning

    on = on or On()
    report = tuning.tuned(
        target, given=input, channels=on.channel or [], device=on.device, dtype=on.dtype, autocast=on.autocast,
        part=on.part, evaluate=on.evaluate, modes=modes, budget=budget, file=file,
    )  # fmt: skip
    if json:
        tell_json(tuning.data(report))
    else:
        tell(str(report))


@app.command
def check(
    target: _Target,
    /,
    *,
    input: Annotated[str | None, Parameter(help="What enters, such as 8x64; a model needs it.")] = None,
    device: Annotated[str | None, Parameter(help="cpu, cuda or cuda:0; else the first GPU there is.")] = None,
    dtype: Annotated[str | None, Parameter(help="The only dtype; else float32 and bfloat16.")] = None,
    part: Annotated[str | None, Parameter(help="Path of the Sequential in the model that is meant.")] = None,
    evaluate: Annotated[
        bool, Parameter(name="--eval", negative="", show_default=False, help="Put a model into evaluation mode.")
    ] = False,
    channel: _Channel = None,
    repro: Annotated[Path | None, Parameter(help="Where to write a script that shows a failure again.")] = None,
    seed: int = 0,
    json: Json = False,
) -> int:
    """Run the test kit on an operation, a fusion or a model.

    Exits with 1 and writes a script if it finds something; with 3 if nothing failed and a check could not run here.
    """
    from . import check as checking

    found: list[checking.Checked] = []
    for one in checking.checked(
        target, given=input, channels=channel or [], device=device, dtype=dtype, part=part, evaluate=evaluate,
        file=repro, seed=seed,
    ):  # fmt: skip
        found.append(one)
        if not json:
            checking.show(one)
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
    input: Annotated[str, Parameter(help="What enters, such as 8x64:bf16.")],
    against: Annotated[str, Parameter(help="unfused, a dtype with more digits, or another device.")] = "unfused",
    no_grad: Annotated[bool, Parameter(negative="", show_default=False, help="Compare the forward pass.")] = False,
    seed: int = 0,
    json: Json = False,
    on: _Shared = None,
) -> int:
    """Find the first operation at which two runs differ by more than the error bound; exit 1 if there is one."""
    from . import compare as comparing

    on = on or On()
    found = comparing.compared(
        target, given=input, channels=on.channel or [], device=on.device, dtype=on.dtype, autocast=on.autocast,
        part=on.part, evaluate=on.evaluate, grad=not no_grad, against=against, seed=seed,
    )  # fmt: skip
    if json:
        tell_json(comparing.data(found))
    else:
        comparing.show(found)
    return int(found.difference is not None)


@app.command
def bench(name: str | None = None, *arguments: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> int:
    """Run a benchmark of a clone of the repository; without a name, list them."""
    from . import bench as benchmarks

    if name is not None:
        return benchmarks.run(name, arguments)
    for known, path in benchmarks.programs().items():
        tell(f"{known:<12} {benchmarks.described(path)}")
    return 0


@cache_app.default
def show_cache(*, json: Json = False) -> None:
    """Show where measurements and compiled kernels are kept, and what they hold for."""
    from . import cache

    where = cache.folder()
    found = cache.files(where)
    if json:
        sizes = [path.stat().st_size for path in cache.kernels()]
        kernels = {"count": len(sizes), "bytes": sum(sizes)}
        tell_json({"folder": None if where is None else str(where), "files": found, "kernels": kernels})
    else:
        cache.show(where, found)


@cache_app.command(name="warm")
def warm_cache(
    target: _Target,
    /,
    *,
    input: Annotated[str, Parameter(help="What enters, such as 8x1024:bf16.")],
    on: _Shared = None,
) -> None:
    """Compile the C kernels that a model calls on this CPU, so that its first step does not wait for them."""
    from . import cache

    on = on or On()
    count = cache.warm(
        target, given=input, channels=on.channel or [], dtype=on.dtype, autocast=on.autocast, part=on.part,
        evaluate=on.evaluate,
    )  # fmt: skip
    tell(f"{count} kernels compiled, {len(cache.kernels())} kept")


@cache_app.command(name="clear")
def clear_cache(*, json: Json = False) -> None:
    """Remove them."""
    from . import cache

    removed = cache.clear(cache.folder())
    if json:
        tell_json({"removed": removed})
    else:
        tell(f"removed {len(removed)} files")
