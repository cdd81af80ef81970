"""The subcommands, as cyclopts reads them: the signatures define their arguments."""

from __future__ import annotations

from cyclopts import App

from .. import __version__
from . import check, compare, doctor, plan, running

app = App(
    name="seqfuse",
    help="Fused training kernels for PyTorch: plans, checks and measurements from a terminal.",
    version=__version__,
    help_epilogue=(
        "MODULE:NAME is package.module:name or path/to/file.py:name: a torch.nn.Module, or a function or class that "
        "returns one when called without arguments. An input is 8x1024:bf16. --traceback shows the traceback of an "
        "error."
    ),
)
cache = App(name="cache", help="Compile C kernels ahead; `seqfuse doctor` shows where they are stored.")
app.command(cache)
app.command(doctor.doctor)
app.command(plan.plan)
app.command(plan.convert_model, name="convert")
app.command(running.tune_model, name="tune")
app.command(check.check)
app.command(compare.compare_model, name="compare")
cache.command(running.warm)
