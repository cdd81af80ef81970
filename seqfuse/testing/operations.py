"""`check_op`: everything an author needs to trust an operation, in one call."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn

from ..errors import InputError, SeqfuseError, StateError
from ..fusion import FusedOperation
from ..operation import UnfusedOperation
from ..saved import Saved, copied
from .cases import HUGE, Bench, Case, Outcome, Specimen, cases, few_rows, seeded, subsets, uncounted
from .elementwise import activations, assert_elementwise, check_derivative_reference, compare_device_functions
from .judge import (
    LOW,
    assert_alike,
    assert_dtypes,
    assert_like_inputs,
    assert_only_wanted,
    assert_own_memory,
    assert_reads_records,
    assert_repeats,
    assert_saves_parameters,
    assert_stays_finite,
    judge,
    met,
    near,
    saying,
    without_frames,
)
from .numerics import FusedMismatch
from .observe import Observer, Pass, leaves
from .patterns import other_examples
from .structure import Tree, assert_bitwise_equal, share_storage
from .tensors import Shape

DTYPES = (torch.float32, torch.bfloat16)
_ERRORS = "\n  (against float64, e_f is the error of the operation, e_u that of its reference in this dtype)"


@dataclass(frozen=True, slots=True)
class CheckedOp:
    """The result of `check_op`: the comparisons made and skipped; `str` shows them."""

    operation: str
    cases: int
    skipped: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([f"{self.operation}: {self.cases} cases", *(f"  skipped: {what}" for what in self.skipped)])


def check_op(
    op: UnfusedOperation, x: Tensor, *, seed: int = 0, dtypes: Sequence[torch.dtype] = DTYPES, **channels: Tensor
) -> CheckedOp:
    """Checks the passes and contract of an operation on inputs like `x`.

    Its passes, run by the engine, are compared with its `reference` under autograd within the error bound of
    `assert_fused_close`: output, extra outputs, and the gradients of x, of extra inputs and of each parameter.
    Operations that it expands to are checked with it.

    * dtypes, the four value regimes, x as given, zeros, a NaN, an Inf; huge values must not be lost; more tokens, an
      odd number, 130, no tokens, and an x of shape [H]; strided, transposed, misaligned and expanded x and gradients;
      outputs without gradients. Shapes for which `infer` or the reference raises are skipped.
    * every subset of needed gradients (beyond 32, one or all but one): the same bits, other gradients are `None`,
      dropped fields are not read, names in `for_` exist, and each field is read for some gradient.
    * inputs and outputs are not saved as copies, in the same or a wider dtype.
    * outputs have the dtypes of the reference, also for an x in bfloat16 with parameters in float32; gradients of these
      parameters are not rounded to bfloat16, and those of extra inputs have their dtypes.
    * a small case in the other mode (training or evaluation); one for each of the class's other `examples(x)`; and, if
      the width of x is a power of two, an `example` with another width, above 256 if it takes that.
    * `bwd` reads parameters only from the saved tensors, since they may have changed.
    * two runs, and two backward passes through one graph, agree bit for bit, and another call in between changes
      nothing; inputs, parameters and incoming gradients are not modified, nor are global state, random generators and
      attributes; gradients do not share storage.
    * `gradcheck` in float64, `infer` against the actual shape, `derivative_reference` against autograd; deep copies,
      pickles (of importable classes) and `state_dict` round trips preserve all bits.
    * each element of the y of a `Pointwise` depends only on one element of x.
    * `value` and `derivative` of a `Pointwise`, also in a `Gated` and with each `P` of its `examples(x)`, in a kernel
      against its passes, within the same error bound. If no kernel can run them, the result reports it.

    The operation is not modified: copies run, with random values for constant parameters. A numeric failure in float32,
    or in 16 bits for a tensor of at most 64 elements, is repeated with two other seeds and counts if the same tensor
    fails again, since correct kernels fail in about 1 of 150 cases. All other failures count at once.

    Args:
        op: the operation, with parameters of any floating dtype, on the device of `x`.
        x: defines shape and device, and the values of one case.
        seed: random seed.
        dtypes: dtypes to check.
        channels: extra inputs by channel name; others are random, in the shape of the tensor that they are combined
            with.

    Raises:
        AssertionError: with operation, case, tensor and the failed check.
        TypeError, InputError: (SF106) for an invalid argument.
        PluginError: if the class breaks its contract.
    """
    __tracebackhide__ = True
    check_kit_arguments("check_op", x, [op], dtypes)
    try:
        with seeded(seed, x.device):
            return _check(op, x, seed, dtypes, channels)
    except (AssertionError, SeqfuseError) as error:
        raise without_frames(error) from error.__cause__


def _check(
    op: UnfusedOperation, x: Tensor, seed: int, dtypes: Sequence[torch.dtype], channels: Mapping[str, Tensor]
) -> CheckedOp:
    name, count = type(op).__name__, 0
    with saying(name):
        specimen = Specimen([op], x, channels, seed)
        _check_declarations(specimen)
        shapes = specimen.shapes()
    skipped = [*specimen.refused]
    for dtype in dtypes:
        few, still = (Case(few_rows(shapes), dtype, grad=grad) for grad in (True, False))
        with saying(f"{name}, {still}"):
            assert_dtypes(specimen.observed(still)[0].outputs, specimen.references(still, seed).outputs)
        with saying(f"{name}, {few}"):
            specimen.observed(few, twice=True)
        for case in cases(shapes, dtype, specimen.outputs):
            _check_numbers(name, specimen, case)
            count += 1
        with saying(f"{name}, {few}"):
            assert_alike(specimen.observed(few)[2])
    with saying(f"{name}, x in bfloat16 and parameters in float32"):
        _check_mixed(specimen, Case(few_rows(shapes), torch.bfloat16))
    small = Case(few_rows(shapes), dtypes[0])
    with saying(f"{name}, {small}"):
        full = _check_subsets(specimen, small)
        once, bench, _ = specimen.observed(small)
        assert_bitwise_equal(once.tree, full.tree)
        assert_repeats(specimen, bench, small, once)
        _check_copies(op, specimen, small, full)
    with saying(f"{name}, in float64"):
        _check_gradients_numerically(specimen, small.shape)
        for act in activations(specimen):
            assert_elementwise(act, specimen)
            check_derivative_reference(act, x.device)
    numbers: set[tuple[type, str]] = set()
    for act in activations(specimen):
        part = "" if type(act) is type(op) else f"activation {type(act).__name__}: "
        with saying(f"{name}, {part[:-2]}" if part else name):
            unchecked = compare_device_functions(act, x, seed, dtypes)
        skipped += [part + unchecked] if unchecked else []
        numbers.add((type(act), repr(act.P)))
    with saying(name), torch.enable_grad():
        bench = specimen.bench(dtypes[0])
        inputs = specimen.inputs_for(Case(tuple(x.shape), dtypes[0]), seed)
        given: dict[str, Any] = {n: t.requires_grad_(t.is_floating_point()) for n, t in inputs.items()}
        skipped += uncounted(bench.plan(**given))
    other = Specimen([copy.deepcopy(op).train(not op.training)], x, channels, seed)
    _check_numbers(f"{name} in {'evaluation' if op.training else 'training'}", other, small)
    wider = False
    for what, configured, like in other_examples(type(op), x) if not channels else ():
        other = Specimen([configured], like, {}, seed)
        if not wider and other.accepts(tuple(like.shape)):
            wider = like is not x
            _check_numbers(f"{name}, {what}", other, Case(tuple(like.shape), dtypes[0]))
            count += 1
            for act in activations(other):
                if (type(act), repr(act.P)) not in numbers:
                    numbers.add((type(act), repr(act.P)))
                    with saying(f"{name}, {what}"):
                        compare_device_functions(act, like, seed, dtypes[:1])
    return CheckedOp(name, count + 1, tuple(skipped))


def _check_declarations(specimen: Specimen) -> None:
    for node in specimen.nodes:
        operation = node.operation
        if node.eager is not None or not isinstance(operation, UnfusedOperation):
            raise AssertionError(f"{node.name} cannot be fused or checked: {node.eager}")
        absent: dict[str, Any] = vars(operation)["_parameters"]
        known = {"x", *node.slots, *absent, *operation.forward_signature.extras}
        for field, names in operation.Saved._for.items():  # pyright: ignore[reportPrivateUsage]
            if names - known:
                unknown = ", ".join(map(repr, sorted(names - known)))
                raise AssertionError(
                    f"field {field!r} is declared for {unknown}; gradients of {node.name} are {sorted(known)}"
                )


def _check_mixed(specimen: Specimen, case: Case) -> None:
    """Outputs have the reference's dtypes also if x is narrower than the parameters, unless either refuses that.

    Gradients of parameters are not rounded to the dtype of x. Autograd casts them, which would hide it.
    """
    try:
        wanted = specimen.run(specimen.bench(torch.float32), case, specimen.seed, reference=True)
    except Exception:
        return
    observer = Observer()
    bench = specimen.bench(torch.float32, on_step=observer)
    try:
        found = specimen.run(bench, case, specimen.seed)
    except InputError:
        return
    assert_dtypes(found.outputs, wanted.outputs)
    for back in observer.passes("bwd"):
        for name in bench.nodes[back.at].slots:
            g = back.out[1].get(name)
            if g is not None and g.dtype in LOW:
                raise AssertionError(f"bwd gives the gradient {name!r} in {g.dtype} for a parameter in torch.float32")


def _check_numbers(name: str, specimen: Specimen, case: Case) -> None:
    seen: list[Observer] = []

    def measure(seed: int) -> tuple[Tree, Tree, Tree]:
        fused, _, observer = specimen.observed(case, seed)
        seen[:] = [observer]
        unfused, wide = (specimen.references(case, seed, wide=wide) for wide in (False, True))
        assert_own_memory(fused, unfused)
        for back in observer.passes("bwd"):
            (ahead,) = observer.passes("fwd", back.at)
            assert_like_inputs(back, {name: t for name, t in ahead.kwargs.items() if isinstance(t, Tensor)})
        shape, inferred = tuple(fused.outputs["y"].shape), specimen.shape_at(case.shape)[-1]
        if shape != inferred:
            raise AssertionError(f"infer{case.shape} says {inferred}, the output has {shape}")
        return fused.tree, unfused.tree, wide.tree

    with saying(f"{name}, {case}"):
        if case.regime == HUGE:
            assert_stays_finite(*measure(specimen.seed), met(case))
        else:
            _judge(measure, specimen.seed, case, seen)


def _judge(measure: Callable[[int], tuple[Tree, Tree, Tree]], seed: int, case: Case, seen: Sequence[Observer]) -> None:
    try:
        judge(measure, seed)
    except FusedMismatch as mismatch:
        failures = mismatch.report.failures
        rounding = all(check.part != "structure" and check.dtype in LOW for check in failures)
        advice = "; compute in float32 and round once" if rounding else ""
        gradients = all(check.tensor.startswith("d_") or check.tensor.endswith(".grad") for check in failures)
        if rounding and gradients and (fields := _rounded(seen[0])):
            names = " and ".join(map(repr, fields))
            advice = f"; y is right, and {names} saved in {case.dtype}: save float32, or recompute from x"
        said = met(case) if mismatch.report.not_finite else ""
        said = _ERRORS + near(case) * (not rounding) if failures[0].dtype else said
        raise FusedMismatch(mismatch.report, f"operation differs from its reference{advice}", said) from None


def _rounded(observer: Observer) -> list[str]:
    """Fields that a forward pass computed and saved in 16 bits."""
    found: list[str] = []
    for run in observer.passes("fwd"):
        owner: Any = run.owner
        given = [t for t in (*run.args, *run.kwargs.values(), *owner.parameters()) if isinstance(t, Tensor)]
        for field, t in leaves("", run.out[-1]):
            if t.dtype in LOW and not any(share_storage(t, own) for own in given):
                found.append(field[1:])
    return list(dict.fromkeys(found))


def _check_subsets(specimen: Specimen, case: Case) -> Outcome:
    """Compare every subset of needed gradients with the run in which all are needed."""
    names = specimen.names()
    full, _, _ = specimen.observed(case)
    saved: dict[int, set[str]] = {}
    read: dict[int, set[str]] = {}
    for subset in subsets(names):
        some = Case(case.shape, case.dtype, frozen=frozenset(names) - subset)
        with saying(f"gradients needed {[n for n in names if n in subset]}"):
            found, bench, observer = specimen.observed(some)
            assert_bitwise_equal(found.tree, {name: full.tree[name] for name in found.tree})
            nodes = bench.nodes
            for at, node in enumerate(nodes):
                (ahead,) = observer.passes("fwd", at)
                saved.setdefault(at, set()).update(_fields(ahead.out[-1]))
                assert_saves_parameters(ahead.out[-1], node.slots, views=False)
                for back in observer.passes("bwd", at):
                    if "needs" in back.kwargs:
                        inputs = [name for name, _ in node.inputs]
                        assert_only_wanted(back, back.kwargs["needs"], (*node.slots, *inputs))
                    dx, x = back.out[0], ahead.args[0]
                    if dx is not None and (dx.shape != x.shape or dx.dtype is not x.dtype):
                        given, wanted = (f"{t.dtype} {tuple(t.shape)}" for t in (dx, x))
                        raise AssertionError(f"bwd gives dx as {given} for x of {wanted}")
                    if not some.frozen:
                        assert_reads_records(back, node.slots)
                    read.setdefault(at, set()).update(_fields_read(back))
    for at, fields in read.items():
        unread = sorted(saved[at] - fields)
        if unread:
            raise AssertionError(f"{specimen.nodes[at].name} saves {unread[0]!r} and its bwd never reads it")
    return full


def _fields(record: Saved) -> set[str]:
    """Fields that hold tensors."""
    return {name for name, value in vars(record).items() if isinstance(value, Tensor | tuple)} & set(record.fields)


def _fields_read(back: Pass) -> set[str]:
    """Fields that a backward needs, found by running it again without each field in turn."""
    record: Saved = back.args[1]
    present = tuple(name for name in record.fields if name in vars(record))
    found: set[str] = set()
    for name in _fields(record):
        without = copied(record, [other for other in present if other != name])
        try:
            with torch.no_grad():
                owner: Any = type(back.owner)
                owner.bwd(back.owner, back.args[0], without, **back.kwargs)
        except StateError:
            found.add(name)
    return found


def _check_gradients_numerically(specimen: Specimen, shape: Shape) -> None:
    bench, case = specimen.bench(torch.float64), Case(shape, torch.float64)
    inputs = specimen.inputs_for(case, specimen.seed)
    given = {name: t for name, t in inputs.items() if t.is_floating_point()}
    tensors = (*given.values(), *specimen.named(bench.nodes).values())

    def call(*perturbed: Tensor) -> Any:  # parameters are perturbed in place
        with seeded(specimen.seed, specimen.x.device):
            return bench(**{**inputs, **dict(zip(given, perturbed, strict=False))})

    if any(t.numel() for t in tensors):
        leaves = tuple(t.requires_grad_() for t in tensors)
        # In float64, finite differences err by about 1e-9.
        torch.autograd.gradcheck(call, leaves, atol=1e-6, rtol=1e-5, fast_mode=True)


def _importable(kind: type) -> bool:
    """Whether pickle finds a class by its name: not a class in a function, nor one that was redefined since."""
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is kind


def _check_copies(op: UnfusedOperation, specimen: Specimen, case: Case, full: Outcome) -> None:
    """Copies, pickles and restored checkpoints of the operation compute the same results."""
    root: nn.Module = specimen.at(case.dtype)[0]
    extra = root.state_dict().keys() ^ {name for name, _ in (*root.named_parameters(), *root.named_buffers())}
    if extra:
        raise AssertionError(f"keys of the state dict and names of parameters differ: {sorted(extra)}")
    wiped = copy.deepcopy(root)
    for p in wiped.parameters():
        p.data.fill_(torch.nan)
    wiped.load_state_dict(root.state_dict(), strict=True)
    made = {"a deep copy": copy.deepcopy(root), "a state_dict round trip": wiped}
    if _importable(type(op)):
        made["a pickle"] = pickle.loads(pickle.dumps(root))
    for what, other in made.items():
        with saying(what):
            again = specimen.run(Bench(type(specimen.root)(other, fusions=())), case, specimen.seed)
            assert_bitwise_equal(again.tree, full.tree)


def check_kit_arguments(kit: str, x: object, ops: Iterable[object], dtypes: object) -> None:
    """Raise if x is not a floating-point tensor, an operation is not a module, or `dtypes` are not floating dtypes."""
    __tracebackhide__ = True
    for op in ops:
        if not isinstance(op, nn.Module):
            hint = f"; give an instance, {op.__name__}(...)" if derives_from(op, nn.Module) else ""
            hint = "; check_fusion takes a fusion" if derives_from(op, FusedOperation) and kit == "check_op" else hint
            raise TypeError(f"{kit} takes operations, instances of sf.UnfusedOperation, not {named_instance(op)}{hint}")
    if not isinstance(x, Tensor):
        raise TypeError(f"{kit} takes x as a torch.Tensor, not {named_instance(x)}")
    if not x.is_floating_point():
        dtype = str(x.dtype).removeprefix("torch.")
        raise TypeError(f"{kit} takes an x of floating-point numbers, whose gradient it compares, not of {dtype}")
    given = cast(Sequence[Any], dtypes) if isinstance(dtypes, Sequence) else ()
    if not given or not all(isinstance(dtype, torch.dtype) and dtype.is_floating_point for dtype in given):
        message = f"{kit} takes dtypes as a sequence of floating ones, such as (torch.float16,), not {dtypes!r}"
        raise InputError(message, code="SF106")


def derives_from(given: object, base: type) -> TypeGuard[type[Any]]:
    """Whether an argument is a class that derives from another."""
    return isinstance(given, type) and issubclass(given, base)


def named_instance(given: object) -> str:
    """An argument of the wrong type, in a message."""
    return f"the class {given.__name__}" if isinstance(given, type) else f"an instance of {type(given).__name__}"
