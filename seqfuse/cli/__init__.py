"""The command `seqfuse`: plans, checks, measurements and comparisons from a terminal.

Exit status: 0: success. 1: a problem was found (a failed check, a difference between two runs, a warning of `doctor`),
or dependencies of the command are missing. 2: the command failed, with the reason in one sentence. 3: no failure, but a
check could not run on this machine. 130: interrupted.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence

FOUND, UNABLE, NOT_RUN, INTERRUPTED, CLOSED = 1, 2, 3, 130, 141
_PACKAGES = ("cyclopts", "rich")  # rich only for help
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status. On every rank but the first it does nothing."""
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    rank = next((os.environ[name] for name in _RANKS if name in os.environ), "0")
    if rank != "0":
        return 0
    with warnings.catch_warnings():
        warnings.showwarning = _warn
        try:
            return _run(given)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing not in _PACKAGES:
                raise
            print(f"seqfuse: this needs the package {missing}: pip install {' '.join(_PACKAGES)}", file=sys.stderr)
            return FOUND
        except KeyboardInterrupt:
            print("seqfuse: interrupted", file=sys.stderr)
            return INTERRUPTED
        except BrokenPipeError:
            # The reader of the output, such as `head`, closed it; Python would report that when it closes the stream.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return CLOSED
        except SystemExit as error:
            if not isinstance(error.__context__, BrokenPipeError):
                raise
            return CLOSED  # rich, which prints help, exits in this way


def _run(given: list[str]) -> int:
    from cyclopts import CycloptsError

    from ..errors import SeqfuseError, hinted
    from .app import app
    from .target import Unable

    traceback = "--traceback" in given
    try:
        command, bound, _ = app.parse_args(
            [word for word in given if word != "--traceback"], exit_on_error=False, print_error=False
        )
        status = command(*bound.args, **bound.kwargs)
        sys.stdout.flush()
    except (Unable, SeqfuseError, CycloptsError) as error:
        if traceback:
            raise
        said, _, hint = _said(error).partition("\nHint: ")
        print(f"seqfuse: {' '.join(said.split())}{hinted(' '.join(hint.split()))}", file=sys.stderr)
        return UNABLE
    return status or 0


def _said(error: Exception) -> str:
    from cyclopts import MissingArgumentError, UnusedCliTokensError

    from ..errors import hinted

    if isinstance(error, MissingArgumentError) and error.argument is not None:
        given = error.keyword is not None or bool(error.argument.tokens)
        said = f"{error.argument.name} needs a value" if given else f"{error.argument.name} is required"
    elif isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        said = f"{error.unused_tokens[0]!r} is one argument too many"
        if error.unused_tokens[0][:1].isdigit():  # it looks like 8x64
            return f"{said}{hinted(f'did you mean --input {error.unused_tokens[0]}?')}"
    else:
        return str(error)
    return f"{said}; seqfuse {' '.join(error.command_chain or ())} --help lists the arguments"


def _warn(message: Warning | str, category: type[Warning], *_: object) -> None:
    print(f"seqfuse: {category.__name__}: {message}", file=sys.stderr)
