"""`check_fusion`: everything an author needs to trust a fusion, in one call."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..env import Env
from ..errors import SeqfuseError
from ..fusion import FusedOperation
from ..operation import UnfusedOperation
from ..settings import fusing
from .cases import Specimen, seeded
from .interpreter import as_on_a_gpu
from .judge import saying, without_frames
from .operations import DTYPES, check_kit_arguments, derives_from, named_instance
from .patterns import at_other_widths, configured_once, configured_otherwise, example_lists, listed_types
from .probe import NotRun, Probe


@dataclasses.dataclass(frozen=True, slots=True)
class Checked:
    """The result of `check_fusion`: the comparisons made and skipped; `str` shows them."""

    fusion: str
    lists: tuple[str, ...]
    cases: int
    skipped: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.fusion}: {self.cases} cases on {', '.join(self.lists) or 'no op sequence'}"]
        return "\n".join([*lines, *(f"  skipped: {what}" for what in self.skipped)])


def check_fusion(
    fusion: type[FusedOperation],
    x: Tensor,
    *ops: nn.Module,
    seed: int = 0,
    dtypes: Sequence[torch.dtype] | None = None,
    env: Env | None = None,
    **channels: Tensor,
) -> Checked:
    """Checks that a fusion computes the same results as the operations that it replaces.

    Fused, unfused and float64 are compared, within the error bound of `assert_fused_close`, in each combination of
    passes that the kind of fusion allows: a forward fusion with the unfused backward, a backward fusion with the
    unfused forward, a joint fusion with itself, and every forward without gradients. Compared are output, extra
    outputs, and the gradients of x, of extra inputs and of each parameter.

    * dtypes, values, shapes and layouts as in `check_op`; every subset of frozen parameters and inputs; outputs without
      gradients.
    * saved tensors, field by field: the class, the parameter itself, plain data, shapes, dtypes, and values within the
      error bound. The function of a `Recompute` is module-level and returns the same bits twice. The same holds for
      `unfused(saved)`. Parameters, inputs and outputs are not saved as copies.
    * `bwd` reads parameters only from the saved tensors, since they may have changed; `fwd` reads their current values,
      not those of an earlier call.
    * two runs, and two backward passes through one graph, agree bit for bit, and another call in between changes
      nothing; gradients of extra inputs have their dtypes; inputs, parameters, saved tensors and incoming gradients are
      not modified, nor are global state, random generators, and attributes of operations and fusion; results alias no
      more than unfused results; `needs` is respected if the pass has it.
    * if a pass fails, the result is that of the unfused operations: bit for bit, or within the error bound with
      `unfused(saved)`. Without that method the backward pass of a joint fusion raises `KernelError`.

    The fusion is used wherever its requirements hold, regardless of cost, and interpreted kernels round as on a GPU.
    Failures that may be chance are repeated as in `check_op`.

    Generated sequences also use the other configurations in `examples(x)`: a fusion must support each, or decline it in
    `requires`. If the width of x is a power of two, one sequence has another width, above 256 if it takes that. The
    result names classes with a single configuration, and forward passes that cannot run on fake tensors, with which a
    plan counts saved bytes.

    Args:
        fusion: the fusion class.
        x: defines shape and device, and the values of one case.
        ops: operations to replace, not modified; by default sequences are generated from `example(x)` of the slot
            types: optional slots filled and empty, variadic slots with one to three operations, open types with each
            operation of this library.
        seed: random seed.
        dtypes: dtypes, each of which must be supported; by default float32 and bfloat16, if supported.
        env: an environment in which the fusion must be planned, in its dtype. If the requirements do not hold on this
            machine, nothing else is checked; the result reports it, with a `UserWarning` if nothing ran.
        channels: extra inputs by channel name; others are random, in the shape of the tensor that they are combined
            with.

    Raises:
        AssertionError: with fusion, combination, case, tensor and part of the error bound; a `NotRun`, with the reason,
            if the fusion was not applied.
        TypeError, InputError: (SF106) for an invalid argument.
        PluginError: if the class breaks its contract.
    """
    __tracebackhide__ = True
    _check_arguments(fusion, env)
    check_kit_arguments("check_fusion", x, ops, DTYPES if dtypes is None else dtypes)
    try:
        with seeded(seed, x.device), as_on_a_gpu(), fusing(unmeasured=True):
            found = _check(fusion, x, ops, seed, dtypes, env, channels)
            count, alone = (0, []) if ops else _otherwise(fusion, x, seed, dtypes, channels)
            found = dataclasses.replace(found, cases=found.cases + count, skipped=(*found.skipped, *alone))
    except (AssertionError, SeqfuseError) as error:
        raise without_frames(error) from error.__cause__
    if not found.cases:
        message = f"check_fusion ran nothing of {found.fusion}, which was planned for {env} alone: {found.skipped[0]}"
        more = f", and {len(found.skipped) - 1} more" if len(found.skipped) > 1 else ""
        warnings.warn(message + more, stacklevel=2)
    return found


def _check_arguments(fusion: object, env: object) -> None:
    """Raise TypeError if `fusion` is not a fusion class, or `env` is neither None nor an `Env`."""
    __tracebackhide__ = True
    if not derives_from(fusion, FusedOperation):
        hint = ""
        if isinstance(fusion, FusedOperation):
            hint = f"; give the class, {type(fusion).__name__}"
        elif isinstance(fusion, UnfusedOperation) or derives_from(fusion, UnfusedOperation):
            hint = "; check_op takes an operation"
        message = (
            f"check_fusion takes a fusion, a class derived from sf.FusedOperation, not {named_instance(fusion)}{hint}"
        )
        raise TypeError(message)
    if env is not None and not isinstance(env, Env):
        raise TypeError(f'check_fusion takes env as an sf.Env, such as sf.Env.of("cuda:sm_90"), not {env!r}')


def _check(
    fusion: type[FusedOperation],
    x: Tensor,
    ops: Sequence[nn.Module],
    seed: int,
    dtypes: Sequence[torch.dtype] | None,
    env: Env | None,
    channels: Mapping[str, Tensor],
) -> Checked:
    name = fusion.__name__
    with saying(name):
        lists: list[tuple[Sequence[nn.Module], Tensor]] = [(ops, x)] if ops else [*example_lists(fusion, x)]
    checked: list[str] = []
    skipped: list[str] = []
    unused: dict[str, list[str]] = {}
    count, matched = 0, False
    for i, (operations, x) in enumerate(lists):
        where = f"{name} on {listed_types(operations)}"
        if env is not None:
            with saying(where):
                planned = Probe(fusion, Specimen(operations, x, channels, seed), env.dtype)
                planned.find(planned.bench().plan(env=env))
        for dtype in dtypes or DTYPES:
            with saying(where):
                probe = Probe(fusion, Specimen(operations, x, channels, seed), dtype)
                refused = probe.place()
            if refused is None:
                made, left_out = probe.check(where, whole=i == 0)
                count += made
                skipped += [f"{listed_types(operations)}, {what}" for what in left_out]
                skipped += [] if checked else probe.uncounted()
                checked += [listed_types(operations)] * (listed_types(operations) not in checked)
            elif env is None and dtypes is not None and i == 0:
                raise type(refused)(f"{where}: {refused}{_interpreted(refused, x)}")
            else:
                matched = matched or isinstance(refused, NotRun)
                skipped.append(f"{listed_types(operations)} in {dtype}: {refused}")
                unused.setdefault(str(refused), []).append(f"{listed_types(operations)} in {dtype}")
    if not checked and env is None:
        why = "; ".join(f"{', '.join(where)}: {reason}" for reason, where in unused.items())
        raise (NotRun if matched else AssertionError)(f"{name} is never used; {why}{_interpreted(why, x)}")
    return Checked(name, tuple(checked), count, tuple(dict.fromkeys(skipped)))


def _interpreted(why: object, x: Tensor) -> str:
    """The hint if a Triton device is needed and there is none."""
    hint = "; TRITON_INTERPRET=1, set before the start, runs Triton kernels on a CPU, slowly"
    return hint if x.device.type == "cpu" and "needs a Triton device" in str(why) else ""


def _otherwise(
    fusion: type[FusedOperation],
    x: Tensor,
    seed: int,
    dtypes: Sequence[torch.dtype] | None,
    channels: Mapping[str, Tensor],
) -> tuple[int, list[str]]:
    """Check configurations other than those of `example`, and `example` at another width.

    Returns the number of cases, and the classes that have no other configuration.
    """
    count = 0

    def checked(where: str, operations: Sequence[nn.Module], like: Tensor, dtype: torch.dtype) -> int:
        with saying(where):
            probe = Probe(fusion, Specimen(operations, like, channels, seed), dtype)
            refused = probe.place()
        return probe.check(where, whole=False)[0] if refused is None else 0

    misses = f"{fusion.__name__} misses a configuration: read it, or exclude it in `requires`: "
    for operations, like in configured_otherwise(fusion, x):
        count += sum(checked(f"{misses}{operations}", operations, like, dtype) for dtype in dtypes or DTYPES)
    widths = [*at_other_widths(fusion, x)] if not channels else []
    for dtype in dtypes or DTYPES:
        for operations, like in widths:
            where = f"{fusion.__name__} on {listed_types(operations)}, {like.shape[-1]} columns"
            if made := checked(where, operations, like, dtype):
                count += made
                break
    once = configured_once(fusion, x)
    return count, [f"configurations of {kind} other than {given}: its `examples` makes none" for kind, given in once]
