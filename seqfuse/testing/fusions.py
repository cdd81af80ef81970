"""`check_fusion`: everything an author needs to trust a fusion, in one call."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..env import Env
from ..fusion import FusedOperation
from ..settings import fusing
from .arguments import check_fusion_arguments, check_kit_arguments
from .cases import Specimen, seeded
from .interpreter import as_on_a_gpu
from .judge import saying
from .operations import DTYPES
from .patterns import at_another_width, configured_once, configured_otherwise, example_lists, listed_types
from .probe import NotRun, Probe


@dataclasses.dataclass(frozen=True, slots=True)
class Checked:
    """What `check_fusion` compared, and what it could not; `str` shows it."""

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
    """Raises unless a fusion may take the place of the operations it replaces.

    Fused, unfused and float64 are compared, within the error bound of `assert_fused_close`, in each combination of
    passes that the kind of fusion allows: a forward fusion with the operations' own backward, a backward fusion after
    their own forward, a joint one with itself, and every forward where nothing needs a gradient. Output, extra outputs,
    and the gradients of x, of extra inputs and of each parameter all count.

    * dtypes, the four value regimes, x as given, zeros, a NaN, an Inf; of huge numbers, that none is lost; more
      tokens, an odd number of them, none, and an x of shape [H]; strided, transposed, misaligned and expanded x and
      gradients; every subset of frozen parameters and inputs.
    * what a forward fusion saves, field by field: the class, the very parameter, plain data, shapes, dtypes, and
      values within the error bound. A `Recompute` is module-level and gives the same bits twice. The same holds for
      `unfused(saved)`. What is saved holds no copy of a parameter, an input or an output.
    * `bwd` reads no parameter of the operations, which may have changed since the forward, but those in what was saved;
      `fwd` reads those of now, not what an earlier call left.
    * two runs, and two backwards through one graph, agree bit for bit; inputs, parameters, saved tensors and incoming
      gradients are not written; global state, random generators, attributes of the operations and of the fusion
      stay; results alias nothing that the operations' own do not; `needs`, where it is asked, is obeyed.
    * a pass that fails leaves the unfused result: the same bits, or within the error bound after `unfused(saved)`.
      Without that method the backward of a joint fusion raises `KernelError`.

    The fusion is used wherever it is not refused, whatever its cost, and interpreted kernels round as a GPU does. In
    float32, and in 16 bits in a tensor of at most 64 elements, an alarm of the numeric parts is drawn twice more and
    counts if the same tensor alarms again, since correct kernels alarm in about 1 case of 150; all others count at
    once.

    Lists that are made here are also made with other configurations of the operations, of `examples(x)`: a fusion has
    to respect each, or to refuse it in `requires`; and, where the width of x is a power of two, once for one that is
    none. The result names classes that were tried in one configuration alone.
    It also says so where a forward cannot run on fake tensors, on which a plan counts what is saved for backward.

    Args:
        fusion: the class.
        x: gives shape and device, and values for one of the cases.
        ops: operations to replace, which stay as they are; without any, lists are made from `example(x)` of the
            classes of its slots: optional slots filled and empty, variadic ones with one to three operations, open
            types with each operation of this library.
        seed: of everything that is drawn.
        dtypes: working dtypes, none of which may be refused; float32 and bfloat16 where it is not, if left out.
        env: an environment in which the fusion must be planned, for operations in its dtype. Where it is refused on
            this machine nothing else is checked then; the result says so, and a `UserWarning` if nothing was run.
        channels: tensors for extra inputs by channel name; one left out is drawn in the shape of the tensor it meets.

    Raises:
        AssertionError: naming the fusion, the combination, the case, the tensor and the part of the error bound; or the
            reason for which it was not applied: then it is a `NotRun`.
        TypeError, InputError: (SF106) for an argument that is not what is said here.
        PluginError: where the engine found that the class breaks its contract.
    """
    __tracebackhide__ = True
    check_fusion_arguments(fusion, env)
    check_kit_arguments("check_fusion", x, ops, DTYPES if dtypes is None else dtypes)
    try:
        with seeded(seed, x.device), as_on_a_gpu(), fusing(unmeasured=True):
            found = _check(fusion, x, ops, seed, dtypes, env, channels)
            count, alone = (0, []) if ops else _otherwise(fusion, x, seed, dtypes, channels)
            found = dataclasses.replace(found, cases=found.cases + count, skipped=(*found.skipped, *alone))
    except AssertionError as error:
        raise error.with_traceback(None) from error.__cause__  # the message says what failed, and on what
    if not found.cases:
        message = f"check_fusion ran nothing of {found.fusion}, which was planned for {env} alone: {found.skipped[0]}"
        more = f", and {len(found.skipped) - 1} more" if len(found.skipped) > 1 else ""
        warnings.warn(message + more, stacklevel=2)
    return found


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
                unknown = None if checked else probe.unknown_memory()
                skipped += [f"what it saves for backward: {unknown}"] if unknown is not None else []
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
    """What to do where a Triton device is needed and there is none."""
    hint = "; TRITON_INTERPRET=1, set before the start, runs Triton kernels on a CPU, slowly"
    return hint if x.device.type == "cpu" and "needs a Triton device" in str(why) else ""


def _otherwise(
    fusion: type[FusedOperation],
    x: Tensor,
    seed: int,
    dtypes: Sequence[torch.dtype] | None,
    channels: Mapping[str, Tensor],
) -> tuple[int, list[str]]:
    """Check other configurations than those of `example`, and its own at another width.

    Gives the number of cases, and the classes that have no other configuration.
    """
    count = 0
    misses = f"{fusion.__name__} misses a configuration, to be respected or refused in `requires`: "
    others = [(f"{misses}{operations}", operations, like) for operations, like in configured_otherwise(fusion, x)]
    for operations, like in at_another_width(fusion, x) if not channels else ():
        others.append((f"{fusion.__name__} on {listed_types(operations)}, {like.shape[-1]} columns", operations, like))
    for where, operations, like in others:
        for dtype in dtypes or DTYPES:
            with saying(where):
                probe = Probe(fusion, Specimen(operations, like, channels, seed), dtype)
                refused = probe.place()
            if refused is None:
                count += probe.check(where, whole=False)[0]
    once = configured_once(fusion, x)
    return count, [f"configurations of {kind} other than {given}: its `examples` makes none" for kind, given in once]
