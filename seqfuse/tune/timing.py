"""Times a candidate, and the operations that it replaces, on scratch tensors of the shapes in the model."""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..casts import autocasting
from ..cost_table import Measurement
from ..env import autocast_of
from ..errors import KernelError, device_is_lost, one_line

LIMIT = 30.0
"""Seconds to time one candidate, at most."""

COMPILING = 120.0
"""Seconds for a candidate's first call, which compiles and loads its kernels, at most."""

ROUNDS, SECONDS = (3, 100), 0.2
TRIES = 3
"""How often a candidate is measured at most; the n-th measurement takes n * n * `SECONDS`."""
SIGMAS = 3
"""By how many standard errors of the median difference a candidate must be faster."""
TIE = 0.05
"""Noise, as a fraction of the unfused time, up to which a tie counts as a result."""
FAR, STEADY = 100, 0.1
"""A pass may take up to `FAR` times its estimated time, or more if its noise is below `STEADY` of its time."""

_TOO_LONG = "it took longer than"
FLUSHED_BYTES = 256 << 20  # more than any second-level cache
SLEEPS = 400_000, 100_000_000
"""Cycles that the device sleeps while the host launches, initially and at most."""


class Unmeasurable(Exception):
    """The unfused operations cannot run, so there is nothing to compare the candidate with."""


def clock(device: torch.device) -> Callable[[Callable[[], Any]], float]:
    """A function that times one call on this device, in nanoseconds."""
    return _on_cuda(device) if device.type == "cuda" else _on_cpu


def _on_cpu(run: Callable[[], Any]) -> float:
    begun = time.perf_counter_ns()
    run()
    return max(time.perf_counter_ns() - begun, 1)


def _on_cuda(device: torch.device) -> Callable[[Callable[[], Any]], float]:
    """Time between two events on the device, which sleeps until everything is launched: excludes CPU overhead."""
    # In a model, other steps evict a step's inputs from the cache.
    flush = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device=device)
    cuda: Any = torch.cuda
    cycles = SLEEPS[0]

    def timed(run: Callable[[], Any]) -> float:
        nonlocal cycles
        start, end = (cuda.Event(enable_timing=True) for _ in range(2))
        while True:
            cuda._sleep(cycles)
            flush.zero_()
            start.record()
            run()
            end.record()
            ahead = not start.query()
            end.synchronize()
            if ahead or cycles >= SLEEPS[1]:
                return max(start.elapsed_time(end) * 1e6, 1)
            cycles *= 2

    return timed


Passes = tuple[Callable[[], Any], Callable[[], Any]]


def time_passes(make: Callable[[], Passes], device: torch.device, seconds: float | None = None) -> Measurement:
    """Medians of the two passes of `make()`, run alternately so that other load affects both, and their noise.

    Each runs once before, so that no compilation is timed. Samples are taken for `seconds`, by default `SECONDS`. If
    the fused pass fails, that is the measurement. Everything runs in a separate thread, which is abandoned if compiling
    takes longer than `COMPILING`, or timing longer than `LIMIT`. Raises only if the unfused pass fails or the device is
    lost.
    """
    done: list[Measurement | BaseException] = []
    compiled, threads = threading.Event(), torch.get_num_threads()
    autocast = autocasting(device.type, autocast_of(device.type))  # the caller's, to enter in the other thread
    there = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()

    def work() -> None:
        torch.set_num_threads(threads)  # libraries under torch have a default number of threads in each new thread
        with autocast, torch.no_grad(), there:
            torch.set_autocast_cache_enabled(False)  # the casts here are of scratch tensors; the setting is per thread
            try:
                done.append(_time_passes(make, device, compiled.set, SECONDS if seconds is None else seconds))
            except BaseException as error:
                done.append(error)
            finally:
                compiled.set()

    here = contextvars.copy_context()
    thread = threading.Thread(target=here.run, args=(work,), daemon=True, name="seqfuse-tune")
    thread.start()
    if not compiled.wait(COMPILING):
        return Measurement(failed=f"{_TOO_LONG} {COMPILING:g} s before it could be timed")
    thread.join(LIMIT)
    if not done:
        return Measurement(failed=f"{_TOO_LONG} {LIMIT:g} s")
    (result,) = done
    if isinstance(result, Measurement):
        return result
    if isinstance(result, Unmeasurable):
        raise result
    if device_is_lost(result) or (result.__cause__ is not None and device_is_lost(result.__cause__)):
        message = f"the device reported {result}; its state is lost and nothing can run after it"
        raise KernelError(message, code="SF401", hint="rerun under compute-sanitizer") from result
    return Measurement(failed=_said(result)[:200])


def _time_passes(
    make: Callable[[], Passes], device: torch.device, compiled: Callable[[], None], seconds: float
) -> Measurement:
    try:
        timed = clock(device)
        fused, unfused = make()
        unfused()
    except Exception as error:
        if device_is_lost(error):
            raise
        raise Unmeasurable(f"what it would replace raised {_said(error)}") from error
    fused()
    compiled()
    for run in (unfused, fused):
        timed(run)
    times: tuple[list[float], list[float]] = ([], [])
    begun = time.perf_counter()
    while len(times[0]) < ROUNDS[0] or (len(times[0]) < ROUNDS[1] and time.perf_counter() - begun < seconds):
        times[0].append(timed(fused))
        times[1].append(timed(unfused))
    import statistics  # imports fractions and decimal, which importing seqfuse avoids

    differences = [unfused - fused for fused, unfused in zip(*times, strict=True)]
    middle = statistics.median(differences)
    # With many samples, interrupted ones must not count; with few, the median deviation may be 0 by chance.
    many = len(differences) >= 16
    spread = 1.4826 * statistics.median(abs(d - middle) for d in differences) if many else statistics.stdev(differences)
    noise = SIGMAS * 1.2533 * spread / len(differences) ** 0.5
    return Measurement(statistics.median(times[0]), statistics.median(times[1]), noise=noise)


def doubt(found: Measurement, estimated: float) -> str | None:
    """Why a measurement does not decide whether the fusion is faster, as on a busy machine; `None` if it does.

    The unfused pass is estimated to take `estimated` nanoseconds.
    """
    slower = max(found.fused, found.unfused)
    far = slower > FAR * estimated
    if far and found.noise > STEADY * slower:
        return f"{slower / estimated:,.0f}x the estimate, and noisy"
    if abs(found.unfused - found.fused) > found.noise or (not far and found.noise <= TIE * found.unfused):
        return None
    return "the noise exceeds the difference"


def is_passing(measurement: Measurement) -> bool:
    """Whether it failed for lack of memory or time, so that it may succeed in another process."""
    return any(reason in measurement.failed for reason in ("MemoryError", _TOO_LONG))  # torch: OutOfMemoryError


def _said(error: BaseException) -> str:
    return one_line(error.__cause__ or error if isinstance(error, KernelError) else error)


def scratch_like(like: Tensor, generator: torch.Generator) -> Tensor:
    """A random tensor with the shape, dtype and device of another, without reading torch's generators."""
    if not (like.is_floating_point() or like.is_complex()):
        return torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)
