"""Calls that Dynamo fails to capture: whether an error was Dynamo's, what it says, and what torch logs of it."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable

import torch

from .calls import Call

_CAPTURING, _FAKES = "torch._dynamo.convert_frame", "torch._subclasses.fake_tensor"


def is_of_capture(error: BaseException) -> bool:
    """Whether an error was raised while Dynamo captured, and not by what runs."""
    if isinstance(error, torch._dynamo.exc.TorchDynamoException):  # pyright: ignore
        return True
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__") == _CAPTURING for frame, _ in frames)


def first_of(error: BaseException, handled: BaseException | None) -> str:
    """The first line of the error that led to another, but for one that was being handled before the call."""
    while (cause := error.__cause__ or error.__context__) not in (None, handled):
        error = cause
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def log_less(current: Callable[[], Call | None]) -> None:
    """Leave out of torch's log why a call was not captured: the report of a conversion has it.

    Args:
        current: the call of a converted model that goes on in this thread, if one does; it is told of errors.
    """

    def is_logged(record: logging.LogRecord) -> bool:
        call = current()
        if call is None:
            return True
        if record.name == _CAPTURING and record.exc_info is not None and record.levelno == logging.WARNING:
            call.failures += [error for error in record.exc_info[1:2] if isinstance(error, Exception)]
            return False
        return record.name != _FAKES or not str(record.msg).startswith("failed while attempting to run meta")

    for name in (_CAPTURING, _FAKES):
        logging.getLogger(name).addFilter(is_logged)
