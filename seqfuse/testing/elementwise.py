"""Further checks of `check_op` for a `Pointwise`: it is element-wise, and its device functions match its passes."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Generator, Iterator, Sequence

import torch
from torch import Tensor

from ..env import Env, why_no_c
from ..errors import KernelError
from ..fusion import JointFusion, Requirements
from ..fusions._shared import act_fits
from ..operation import Grads
from ..pointwise import Gated, Pointwise
from ..saved import Saved as Record
from ..settings import fusing
from .cases import Case, Specimen, cases
from .interpreter import as_on_a_gpu
from .judge import judge_case, met, near, saying
from .numerics import FusedMismatch, assert_fused_close
from .probe import Probe
from .structure import index_of


class DeviceFunctions(JointFusion):
    """A joint fusion of one activation by its device functions, as in kernels: y = value(x), dx = dy derivative(t)."""

    kernels = ("triton", "c")

    act: Pointwise

    class Saved(Record):
        t: Tensor  # [*, H], x or y, according to the activation's `reads`

    def requires(self, env: Env) -> Requirements:
        yield from act_fits(self.act, env)

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        from ..kernels.pointwise import Chain, act, pointwise

        with _calling("value"):
            (y,) = pointwise(x, Chain(act(self.act)))
        assert y is not None
        return y, self.Saved(t=x if self.act.reads == "input" else y)

    def bwd(self, dy: Tensor, saved: Saved) -> tuple[Tensor | None, Grads]:
        from ..kernels.pointwise import Chain, dact, pointwise

        with _calling("derivative"):
            (dx,) = pointwise(dy, Chain(dact(self.act)), [saved.t])
        return dx, {}


@contextlib.contextmanager
def _calling(function: str) -> Generator[None]:
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{function} raised {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _of_its_functions(note: str, digits: str) -> Generator[None]:
    """Failures of `DeviceFunctions` are reported as failures of the function that the author wrote."""
    try:
        yield
    except KernelError as error:
        raise (error.__cause__ if isinstance(error.__cause__, AssertionError) else error) from None
    except FusedMismatch as error:
        failed = {check.tensor for check in error.report.failures}
        what = "value differs from fwd" if "y" in failed else "derivative differs from bwd"
        raise FusedMismatch(error.report, what, note if error.report.not_finite else digits) from None


def activations(specimen: Specimen) -> Iterator[Pointwise]:
    """The element-wise operations of a sequence, including those inside gated units."""
    for node in specimen.nodes:
        of = node.operation
        for found in (of.activation, of.up) if isinstance(of, Gated) else (of,):
            if isinstance(found, Pointwise):
                yield found


def compare_device_functions(act: Pointwise, x: Tensor, seed: int, dtypes: Sequence[torch.dtype]) -> str | None:
    """Compare `value` and `derivative` in a kernel with the passes of the operation; returns why it did not."""
    if type(act).value is None:
        return None
    unchecked = "value and derivative were not checked: "
    env = Env.of(x.device)
    refusals = [reason for holds, reason in act_fits(act, env) if not holds]
    if refusals:
        return unchecked + refusals[0]
    if env.kernels is None:
        return unchecked + (why_no_c() if x.is_cpu else "no Triton device here")
    specimen = Specimen([act], x, {}, seed)
    shapes = specimen.shapes()[:1]
    # Device functions compute in float32, so float64 is not compared.
    with fusing(unmeasured=True):  # small tensors, too
        for dtype in [dtype for dtype in dtypes if dtype.itemsize <= 4] or [torch.float32]:
            probe = Probe(DeviceFunctions, specimen, dtype)
            refused = probe.place()
            if refused is not None:
                raise AssertionError(f"value and derivative: {refused}")
            for case in (*cases(shapes, dtype), Case(shapes[0], dtype, dy_regime="infinite")):
                if not case.grad or (case.layout, case.dy_layout) != ("contiguous", "contiguous"):
                    continue  # strides are the kernel's concern, not the activation's
                with saying(f"value and derivative, {case}"), _of_its_functions(met(case), near(case)), as_on_a_gpu():
                    judge_case(functools.partial(probe.measure, case), case, seed)
    return None


def assert_elementwise(act: Pointwise, specimen: Specimen) -> None:
    """Each element of `reference`'s output depends only on the same element of its input."""
    name = type(act).__name__
    x = specimen.inputs_for(Case(specimen.shapes()[0], torch.float64), specimen.seed)["x"]
    if act.random or not x.numel():
        return  # random operations differ from call to call
    act = copy.deepcopy(act).double()
    with torch.no_grad():
        y = act.reference(x)
        if y.shape != x.shape:
            raise AssertionError(
                f"{name} is not a Pointwise: its reference gives {tuple(y.shape)} for {tuple(x.shape)}"
            )
        # Two places, since a permutation moves at least one of them; and values larger in magnitude than all others.
        for at in {x.numel() // 3, 2 * x.numel() // 3}:
            for value in (64.0, -64.0):
                changed = x.clone()
                changed.view(-1)[at] = value
                # A vectorized function may compute a whole register by another path if one of its numbers is large.
                same = torch.isclose(act.reference(changed), y, rtol=1e-9, atol=1e-12, equal_nan=True).flatten()
                same[at] = True
                if not bool(same.all()):
                    other, place = (index_of(i, tuple(x.shape)) for i in (int((~same).int().argmax().item()), at))
                    raise AssertionError(f"{name} is not a Pointwise: y at {other} changes with x at {place}")


def check_derivative_reference(act: Pointwise, device: torch.device) -> None:
    """Compare `derivative_reference`, if defined, with autograd; raises AssertionError."""
    if type(act).derivative_reference is Pointwise.derivative_reference:
        return
    t = torch.linspace(-6, 6, 1201, dtype=torch.float64, device=device).requires_grad_()
    y = act.reference(t)
    (expected,) = torch.autograd.grad(y.sum(), t)
    assert_fused_close(act.derivative_reference(y.detach()), expected, expected.clone(), name="derivative_reference(y)")
