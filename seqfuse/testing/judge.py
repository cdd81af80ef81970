"""Judges results: the error bound with redraws, storages of results, and errors that name the failing case."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
import types
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ..errors import KernelError, PluginError
from ..fake import faking
from ..fusion import InferenceFusion
from ..saved import Saved, copied
from ..settings import fusing
from .cases import HUGE, Bench, Case, Outcome, Specimen
from .numerics import Check, FusedMismatch, Report, assert_fused_close, compared
from .observe import Observer, Pass, leaves, results
from .structure import Tree, assert_bitwise_equal, assert_distinct_storages, index_of, named_tensors, share_storage

E = TypeVar("E", bound=BaseException)
_ENGINE = re.compile(r"(seqfuse|torch|contextlib)(\.|$)")
_PASSES = "seqfuse.ops", "seqfuse.fusions", "seqfuse.kernels"


def assert_own_memory(fused: Outcome, unfused: Outcome) -> None:
    """Results own their memory, except where an operation itself returns its input."""
    own = {name: g for name, g in fused.grads.items() if name.endswith(".grad")}
    handed = {name: g for name, g in fused.grads.items() if name not in own}
    given = {**fused.inputs, **fused.parameters}
    remedy = "; return a new tensor: sum_to_size and to return their input where nothing is to change"
    assert_distinct_storages(own, {**given, **fused.incoming, **fused.outputs, **handed}, remedy)
    for name, g in handed.items():
        for other, t in given.items():
            if g is not None and share_storage(g, t):
                raise AssertionError(f"{name} shares its storage with {other}")
    its = {**unfused.inputs, **unfused.parameters}
    for name, y in fused.outputs.items():
        for other, t in given.items():
            if share_storage(y, t) and not share_storage(unfused.outputs[name], its[other]):
                raise AssertionError(f"{name} shares its storage with {other}; the operation allocates its own")


@contextlib.contextmanager
def saying(what: str) -> Generator[None]:
    """Errors in the block are raised as AssertionErrors that begin with `what`; a `PluginError` only gets a note."""
    _tell(what)
    try:
        yield
    except PluginError as error:
        error.add_note(f"in {what}")
        raise
    except AssertionError as error:
        # The kit's own failures are complete; for other errors it matters where they were raised.
        raise AssertionError(f"{what}: {error}") from (error.__cause__ if _of_the_kit(error) else error)
    except Exception as error:
        found = error.__cause__
        if isinstance(error, KernelError) and isinstance(found, AssertionError) and _of_the_kit(found):
            raise AssertionError(f"{what}: {found}") from None  # raised by a check of a pass, not by the pass
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    finally:
        _tell("")


def _tell(what: str) -> None:
    """Show on a terminal what is being checked, in a line that is overwritten."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{what[:79]}")
        sys.stderr.flush()


def without_frames(error: E) -> E:
    """An error whose traceback, and those of its causes, contain only frames of the author's files.

    The message names the failure and the case; these frames locate it.
    """
    cause: BaseException | None = error
    while cause is not None:
        frames, at, kept = list[types.TracebackType](), cause.__traceback__, None
        while at is not None:
            frames, at = [at, *frames], at.tb_next
        for at in frames:
            if not _is_inside(at.tb_frame):
                kept = types.TracebackType(kept, at.tb_frame, at.tb_lasti, at.tb_lineno)
        cause.__traceback__ = kept
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return error


def _is_inside(frame: types.FrameType) -> bool:
    """Whether a frame belongs to the engine, the test kit or torch, not to an operation, a fusion or a kernel."""
    module = str(frame.f_globals.get("__name__"))
    within = _ENGINE.match(module) is not None and not module.startswith(_PASSES)
    return within or frame.f_code.co_filename.startswith("<")


def _of_the_kit(error: AssertionError) -> bool:
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at is not None and at.tb_frame.f_globals.get("__package__") == __package__


_NEAR = {
    "small": "x is near 0 here, where digits cancel, as in 1 - exp(-x) or in 1 - 2 / (exp(2 x) + 1) for tanh: use a "
    "series or another form there, such as expm1",
    "offset": "x is near 8 here, where functions that saturate cancel, as 1 - t does for t near 1, and sums lose what "
    "is small beside them: use a form without the difference, such as n / (n + 2)",
}


def near(case: Case) -> str:
    """A hint on the cancellation that a case provokes; empty if it provokes none."""
    text = _NEAR.get(case.regime, "")
    return f"\n  ({text})" if text else ""


_MET = {
    "one_nan": "x holds a NaN here, and comparisons with it are false: tl.where(x <= 0, 0.0, t) passes it on, and "
    "tl.where(x > 0, t, 0.0) gives 0; give what the reference and its gradient give",
    "one_inf": "x holds an Inf here, and 0 * Inf, Inf - Inf and Inf / Inf are NaN: give what the reference and its "
    "gradient give",
    HUGE: "x is near the end of the range of its dtype here: squares and sums overflow in it, and Inf - Inf is NaN",
}
_DY_MET = {
    "infinite": "every dy is Inf here, and Inf * 0 is NaN: where the gradient of the reference is 0 whatever dy is, "
    "state derivative(dy, t) and select, as in tl.where(t > 0, dy, 0.0)",
    "one_nan": "dy holds a NaN here: gradients that the reference takes from it are NaN, and no others",
}


def met(case: Case) -> str:
    """A hint on the NaN or Inf in a case, and how to handle it; empty if there is none."""
    text = _DY_MET.get(case.dy_regime) or _MET.get(case.regime, "")
    return f"\n  ({text})" if text else ""


def assert_stays_finite(fused: Tree, unfused: Tree, reference: Tree, note: str = "") -> None:
    """No element that the operations and float64 keep finite becomes Inf or NaN; the reverse is allowed."""
    f, u, r = (dict(named_tensors(tree)) for tree in (fused, unfused, reference))
    for name, mine in f.items():
        own, exact = u.get(name), r.get(name)
        if mine is not None and own is not None and exact is not None:
            lost = own.isfinite() & exact.isfinite() & ~mine.isfinite()
            if bool(lost.any()):
                at = index_of(int(lost.flatten().int().argmax().item()), tuple(lost.shape))
                raise AssertionError(
                    f"{name}: {mine[at].item()} at {at}, where the operations give {own[at].item():.4g}{note}"
                )


Measure = Callable[[int], tuple[Tree, Tree, Tree]]
Others = Callable[[int], Sequence[Tree]]
_ANY = (torch.float32,)
LOW = torch.bfloat16, torch.float16
_ROUNDED = 8  # times the bound; rounding at each of a few steps errs by less
_FEW, _MANY, _HALF_TOO = 64, 2**24, (torch.float32, torch.bfloat16, torch.float16)


def judge(measure: Measure, seed: int, note: str = "", others: Others | None = None) -> None:
    """Apply the error bound to (fused, unfused, reference), to several draws where it may fail by chance.

    For correct kernels it fails in about 1 float32 case of 150, under an offset or a heavy tail, where a whole row
    shares one rounding. In 16 bits it fails if a tensor has few elements, since the error of so few is a poor estimate:
    1 case in 10 of the gradient of a bias of 4 after a saturated sigmoid; and in one element of a weight gradient of 50
    million, where a row and a column of large factors cross. A defect fails under every seed.
    So, if the only failures are parts other than structure in float32, or in 16 bits in tensors of at most 64 elements,
    or the element part in those of 2^24 or more, two more seeds are drawn, and the same tensor failing again in either
    of them is an error; if that tensor has few elements, only if it also fails in as many draws, judged as one tensor,
    as have 128 elements together. `others` are further unfused results for a seed, as in `assert_fused_close`.

    On a GPU the order in which a float32 GEMM is summed is the vendor library's choice, which depends on whether there
    is a bias, and errors differ by a factor of three. There the unfused GEMM may use either of the two orders.
    """
    sides, first = _judged(measure, seed, others)
    if first is None:
        return
    failed = _by_chance(first)
    if failed and _on_gpu(sides[0]) and _in_another_order(measure, seed, sides):
        return
    if not failed:
        raise FusedMismatch(first.report, note=note) if note and first.report.not_finite else _advised(first)
    for other in (seed + 1001, seed + 2002):
        sides, again = _judged(measure, other, others)
        if again is None or (_by_chance(again) and not failed & {c.tensor for c in again.report.failures}):
            continue
        if not _by_chance(again) or any(c.elements > _FEW for c in again.report.failures):
            raise _advised(again)
        _judge_joined(measure, seed, sides, {c.tensor: c.elements for c in again.report.failures})
        return


def _judged(measure: Measure, seed: int, others: Others | None) -> tuple[tuple[Tree, Tree, Tree], FusedMismatch | None]:
    """The three results for a seed, and their mismatch, if any; `others`, if given, widen the bound."""
    sides = measure(seed)
    found = mismatch_of(*sides)
    if found is not None and others is not None:
        found = mismatch_of(*sides, others(seed))
    return sides, found


def _advised(mismatch: FusedMismatch) -> FusedMismatch:
    """The mismatch, with a hint if only 16-bit tensors fail, by so little that rounding at each step can explain it."""
    failures = mismatch.report.failures
    if any(c.part == "structure" or c.dtype not in LOW or c.measured > _ROUNDED * c.bound for c in failures):
        return mismatch
    return FusedMismatch(mismatch.report, "fused differs from unfused; compute in float32 and round once")


def _on_gpu(tree: Tree) -> bool:
    return any(t is not None and t.is_cuda for _, t in named_tensors(tree))


def _in_another_order(measure: Measure, seed: int, sides: tuple[Tree, Tree, Tree]) -> bool:
    """Whether the fused results are within the bound if the unfused GEMMs use the other of cuBLAS's two libraries."""
    choose: Any = torch.backends.cuda.preferred_blas_library
    before = str(choose()).rpartition(".")[2].lower()
    choose("cublas" if before.endswith("lt") else "cublaslt")
    try:
        return mismatch_of(sides[0], measure(seed)[1], sides[2]) is None
    finally:
        choose(before)


def judge_case(measure: Measure, case: Case, seed: int) -> None:
    """Apply the error bound to a case; for huge numbers and gradients, only check that none becomes Inf or NaN."""
    if case.regime == HUGE or case.dy_regime == "infinite":
        assert_stays_finite(*measure(seed), met(case))
    else:
        judge(measure, seed, met(case))


def mismatch_of(fused: Tree, unfused: Tree, reference: Tree, others: Sequence[Tree] = ()) -> FusedMismatch | None:
    """The mismatch by the error bound, or None."""
    try:
        report = compared(fused, unfused, reference, others=others, skips=True)
    except FusedMismatch as mismatch:  # of the names
        return mismatch
    return FusedMismatch(report) if report.failures else None


def _by_chance(mismatch: FusedMismatch) -> set[str]:
    failures = mismatch.report.failures
    chance = all(c.part != "structure" and c.dtype in (_HALF_TOO if _may_be_chance(c) else _ANY) for c in failures)
    return {check.tensor for check in failures} if chance else set()


def _may_be_chance(check: Check) -> bool:
    """Whether 16-bit results may fail by chance, too: the error of few elements is a poor estimate, and the largest of
    millions exceeds what is likely for one element.
    """
    return check.elements <= _FEW or (check.part == "element" and check.elements >= _MANY)


def _judge_joined(measure: Measure, seed: int, first: tuple[Tree, Tree, Tree], elements: dict[str, int]) -> None:
    """Judge several draws as one tensor; fewer draws if the result is clear.

    A quarter or half of them are enough if each part is below 3/4 of its bound, or one is above 3/2 of it.
    """
    count = -(-2 * _FEW // min(elements.values()))
    draws = [first]
    for needed in (*(n for n in (count // 4, count // 2) if n >= 8), count):
        draws += [measure(seed + 1001 * (i + 2)) for i in range(len(draws), needed)]
        clear = True
        for name in elements:
            sides = (torch.stack([_named(draw[side], name) for draw in draws]) for side in range(3))
            try:
                report = assert_fused_close(*sides, name=name)
            except FusedMismatch as mismatch:
                if needed == count or any(2 * c.measured > 3 * c.bound for c in mismatch.report.failures):
                    raise _by_draw(mismatch) from None
                report = mismatch.report
            clear = clear and all(4 * c.measured <= 3 * c.bound for c in report.checks)
        if clear:
            return


def _by_draw(mismatch: FusedMismatch) -> FusedMismatch:
    """The mismatch, where the first index of a place is the number of the draw."""

    def told(check: Check) -> Check:
        kind, opened, index = check.where.partition("(")
        if not opened:
            return check
        draw, *rest = (int(i) for i in index.rstrip(",)").split(","))
        where = f"{kind}{tuple(rest)} of draw {draw}" if rest else f"draw {draw}"
        return dataclasses.replace(check, where=where)

    return FusedMismatch(Report(tuple(map(told, mismatch.report.checks))))


def _named(tree: Tree, name: str) -> Tensor:
    tensor = dict(named_tensors(tree))[name]
    assert tensor is not None
    return tensor.detach()


def assert_repeats(specimen: Specimen, bench: Bench, case: Case, once: Outcome) -> None:
    """Another call with the same inputs gives the same bits, and other calls in between change no results."""
    kept = once.kept()
    with fusing(on_error="raise"):
        with saying("called again with the same inputs"):
            assert_bitwise_equal(specimen.run(bench, case, specimen.seed).tree, kept)
        try:
            found = specimen.run_beside(bench, case)
        except RuntimeError as error:  # torch found that a saved tensor was written
            raise AssertionError(f"a call fails if another one runs before its backward pass: {error}") from error
    try:
        assert_bitwise_equal(found, kept)
    except AssertionError as error:
        advice = "return and save new tensors, and keep nothing else between the passes"
        raise AssertionError(f"another call changes the results of the one before: {error}; {advice}") from None


def assert_alike(observer: Observer) -> None:
    """Checks that depend only on shapes: what passes return on fake tensors, and no saved copies."""
    for run in observer.firsts():
        assert_fakes_alike(run)
        if run.name == "fwd" and not isinstance(run.owner, InferenceFusion):
            assert_saves_no_copies(run)


def assert_only_wanted(back: Pass, needs: frozenset[str], names: Iterable[str]) -> None:
    """A backward returns the gradients in `needs` and no others, unless another costs nothing.

    It costs nothing if it is an incoming gradient or a needed one. Raises AssertionError naming the gradient.
    """
    dx, grads = back.out
    found: dict[str, Tensor | None] = {"x": dx, **{name: grads.get(name) for name in names}}
    free = [t for t in (*back.args[:1], *back.kwargs.values()) if isinstance(t, Tensor)]
    free += [g for name, g in found.items() if g is not None and name in needs]
    for name, g in found.items():
        if g is None and name in needs:
            raise AssertionError(f"bwd gives no gradient of {name!r}, which is needed")
        if g is not None and g.numel() and name not in needs and not any(share_storage(g, t) for t in free):
            message = f"bwd gives a gradient of {name!r}, which is not needed; ask `needs` and skip its work"
            raise AssertionError(message)


def assert_like_inputs(back: Pass, inputs: Mapping[str, Tensor]) -> None:
    """Gradients of extra inputs, by their names in `bwd`, have the dtypes of these; raises AssertionError naming one.

    Autograd casts a gradient of another dtype, which would hide it.
    """
    for name, t in inputs.items():
        g = back.out[1].get(name)
        if g is not None and g.dtype is not t.dtype:
            raise AssertionError(f"bwd gives the gradient {name!r} in {g.dtype} for an input in {t.dtype}")


def assert_saves_parameters(saved: Saved, parameters: Mapping[str, tuple[nn.Module, str]], *, views: bool) -> None:
    """A parameter is saved as itself, or, if `views`, as a view of it.

    A copy would not follow changes between the passes, and takes additional memory. Raises AssertionError naming the
    field and the parameter.
    """
    for field, value in leaves("", saved):
        for name, (owner, attribute) in parameters.items():
            own: Tensor = getattr(owner, attribute)
            if value is own or (views and share_storage(value, own)) or own.numel() < 2:
                continue
            alike = value.numel() == own.numel() if views else value.shape == own.shape
            if (
                alike
                and value.dtype is own.dtype
                and torch.equal(*(t.detach().flatten().sort().values for t in (value, own)))
            ):
                of = "not a copy of it: save the parameter itself" if views else "not a copy or a view of it"
                raise AssertionError(f"field {field[1:]!r} must be the parameter {name!r} itself, {of}")


def assert_dtypes(found: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> None:
    """Outputs have the same dtypes as the reference's; raises AssertionError naming the output and both dtypes."""
    for name, y in found.items():
        if y.dtype is not reference[name].dtype:
            raise AssertionError(f"{name} is {y.dtype}, and {reference[name].dtype} from the reference")


def assert_saves_no_copies(ahead: Pass) -> None:
    """Inputs and outputs of a forward are saved as themselves: a copy, even in a wider dtype, takes more memory."""
    y, *outputs, saved = ahead.out
    named: dict[str, Any] = {"x": ahead.args[0], "y": y, **ahead.kwargs, **(outputs[0] if outputs else {})}
    known = [(name, t) for name, t in named.items() if isinstance(t, Tensor) and t.numel() > 1]
    for field, value in leaves("saved", saved):
        if any(share_storage(value, t) for _, t in known):
            continue
        for name, t in known:
            if value.numel() == t.numel() and torch.equal(value.flatten().double(), t.flatten().double()):
                raise AssertionError(f"{field} is a copy of {name}, which takes its own memory: save {name} itself")


def assert_reads_records(back: Pass, parameters: Mapping[str, tuple[nn.Module, str]]) -> None:
    """A backward reads parameters from the saved tensors: the module's may have changed, by an optimizer for example.

    Runs the backward again with NaN in each of the module's parameters. Raises AssertionError naming the parameter.
    """
    kind: Any = type(back.owner)
    for name, (module, attribute) in parameters.items():
        held: dict[str, Any] = vars(module)["_parameters"]
        own = held.get(attribute)
        if own is None:  # parametrized: recomputed at each access
            continue
        held[attribute] = nn.Parameter(torch.full_like(own, torch.nan), requires_grad=own.requires_grad)
        try:
            with torch.no_grad():
                dx, grads = kind.bwd(back.owner, *back.args, **back.kwargs)
            assert_bitwise_equal({"x": dx, **grads}, {"x": back.out[0], **back.out[1]})
        except AssertionError:
            message = f"bwd reads the parameter {name!r} of its module, which may have changed; read it from `saved`"
            raise AssertionError(message) from None
        finally:
            held[attribute] = own


def assert_fakes_alike(run: Pass) -> None:
    """On fake tensors a pass returns as many tensors as on real ones, of the same shapes and dtypes.

    A pass that cannot run on fake tensors is skipped: its plan reports saved bytes as unknown.
    """
    real = {name: (tuple(t.shape), t.dtype) for name, t in results(run.name, run.out)}
    with faking() as mode, torch.no_grad():
        try:
            call: Any = getattr(type(run.owner), run.name)
            args = (_faked(mode, argument) for argument in run.args)
            out = call(run.owner, *args, **{name: _faked(mode, value) for name, value in run.kwargs.items()})
        except Exception:
            return
    fake = {name: (tuple(t.shape), t.dtype) for name, t in results(run.name, out)}
    for name in (*real, *fake):
        if real.get(name) != fake.get(name):
            given, meant = (_said(of.get(name)) for of in (fake, real))
            raise AssertionError(
                f"{run.name} gives {name} as {given} on fake tensors, and as {meant} on real ones: a plan would count "
                "other bytes and torch.compile would allocate others; see the register_fake of its operator"
            )


def _said(found: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "nothing" if found is None else f"{str(found[1]).removeprefix('torch.')} {found[0]}"


def _faked(mode: Any, value: Any) -> Any:
    if isinstance(value, Tensor):
        return mode.from_tensor(value)
    if isinstance(value, Saved):
        present = tuple(name for name in value.fields if name in vars(value) or name in vars(value).get("_late", ()))
        return copied(value, present, mode.from_tensor)
    if isinstance(value, Mapping):
        return {name: _faked(mode, inner) for name, inner in cast(Mapping[str, Any], value).items()}
    if isinstance(value, tuple):
        return tuple(_faked(mode, inner) for inner in cast(tuple[Any, ...], value))
    return value
