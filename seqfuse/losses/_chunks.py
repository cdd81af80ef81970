"""Computes a loss and its gradients chunk by chunk, gradients in the memory of the logits; and its autograd nodes."""

from __future__ import annotations

import math
import typing
import warnings
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..autograd import Batched, Once, executes
from ..casts import autocasting
from ..compiler import CompileError, give_up
from ..env import Env, autocast_of
from ..errors import FallbackWarning, InputError, KernelError, RangeError
from ..group import Group
from ..hardware import C_WORTHWHILE
from ..maingrad import main_grads
from ..ops._mm import linear, linear_into
from ..settings import fusing_now
from ..signature import check_arguments

Reduction = Literal["mean", "sum", "none"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class How(NamedTuple):
    """The validated settings of a loss, with the name of the operation for error messages."""

    operation: str
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    reduction: Reduction
    chunk: int | None
    group: Group

    def checked(self) -> How:
        """The settings, converted to their types; raises if one is invalid."""
        changed = check_arguments(self.operation, _HINTS, self._asdict())
        if changed:
            return self._replace(**changed).checked()
        if not 0 <= self.label_smoothing <= 1:
            self.refuse(f"label_smoothing must be within 0 and 1, got {self.label_smoothing}", "SF106")
        if not 0 <= self.z_loss < math.inf:
            self.refuse(f"z_loss must be finite and not negative, got {self.z_loss}", "SF106")
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            self.refuse(f"softcap must be finite and positive, got {self.softcap}", "SF106")
        if self.chunk is not None and self.chunk < 1:
            self.refuse(f"chunk must be at least one row, got {self.chunk}", "SF106")
        return self

    def refuse(self, message: str, code: str) -> None:
        """Raise an `InputError` in the name of the operation."""
        raise InputError(message, code=code, operation=self.operation)


_HINTS = typing.get_type_hints(How)


def check_inputs(how: How, x: Any, weight: Any, targets: Any, bias: Any) -> torch.dtype:
    """Check the arguments; returns the dtype of the GEMMs."""
    named: dict[str, Any] = {"x": x, "weight": weight, "targets": targets}
    named |= {} if bias is None else {"bias": bias}
    for name, t in named.items():
        if not isinstance(t, Tensor):
            how.refuse(f"{name} must be a tensor, not {type(t).__name__}", "SF105")
    if weight.ndim != 2 or not weight.shape[0]:
        how.refuse(f"weight must be [V, E] of at least one class, got {tuple(weight.shape)}", "SF101")
    classes, features = weight.shape
    if not x.ndim or x.shape[-1] != features:
        got = x.shape[-1] if x.ndim else "a 0-d tensor"
        how.refuse(f"expects last dimension {features}, got {got}", "SF101")
    if targets.shape != x.shape[:-1]:
        how.refuse(f"targets must have shape {tuple(x.shape[:-1])}, got {tuple(targets.shape)}", "SF101")
    if bias is not None and tuple(bias.shape) != (classes,):
        how.refuse(f"bias must have shape ({classes},), got {tuple(bias.shape)}", "SF101")
    if targets.dtype not in _INTEGERS:
        how.refuse(f"targets must be integers, one class per row, got {targets.dtype}", "SF101")
    for name, t in named.items():
        if t.device != x.device:
            how.refuse(f"expects its {name} on {x.device}, where x is, got {t.device}", "SF102")
    cast = autocast_of(x.device.type)
    dtypes = {n: cast if cast and t.dtype is not torch.float64 else t.dtype for n, t in named.items() if n != "targets"}
    if x.dtype not in _FLOATS or len(set(dtypes.values())) > 1:
        listed = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        how.refuse(f"expects one dtype of float16, bfloat16, float32 and float64, got {listed}", "SF101")
    return dtypes["x"]


def check_targets(how: How, targets: Tensor, classes: int) -> None:
    """Check that every target is a class or `ignore_index`."""
    wrong = (targets != how.ignore_index) & ((targets < 0) | (targets >= classes))
    if targets.is_cuda:  # without synchronization
        torch._assert_async(~wrong.any())  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    elif wrong.any():
        first = int(targets[wrong][0].item())
        message = f"target {first} is out of bounds for {classes} classes"
        raise RangeError(message, code="SF107", operation=how.operation)


_CHUNK_BYTES = 64 * 2**20


class Made(NamedTuple):
    """Results of one pass over the tokens; `None` for those that were not needed."""

    rows: Tensor | None  # [T], losses
    softmax: Tensor | None  # [2, T], the largest logit of each token, and the sum of exponentials relative to it
    dx: Tensor | None  # [T, E], in the dtype of the GEMMs, divided by `unit`
    dweight: Tensor | None  # [V, E], in the dtype of the sum
    dbias: Tensor | None  # [V], in the dtype of the sum
    unit: Tensor | None = None  # [T], factors that restore the rows of dx; `None` if all are one


def flat(x: Tensor) -> Tensor:
    """The tensor x as [T, E]."""
    return x.reshape(-1, x.shape[-1]) if x.shape[-1] else x.reshape(math.prod(x.shape[:-1]), 0)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of everything except GEMMs: float32, or float64 for float64."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def counted_rows(how: How, targets: Tensor) -> Tensor | None:
    """The divisor of "mean": the number of tokens not ignored."""
    return (targets != how.ignore_index).sum() if how.reduction == "mean" else None


def reduced(how: How, rows: Any, count: Tensor | None) -> Tensor:
    """The losses [T] reduced as configured."""
    if how.reduction == "none":
        return rows
    return rows.sum() if count is None else rows.sum() / count


def walk(
    how: How,
    product: torch.dtype,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    wanted: tuple[bool, bool, bool],
    scale: Tensor | None = None,
    softmax: Tensor | None = None,
) -> Made:
    """Compute losses and gradients over x [T, E], one chunk of logits at a time.

    Losses are computed unless `softmax` is given. Gradients of x, weight and bias are computed if `wanted`, with
    `scale` as the gradient of each token's loss, by default one. In that case float16's loss scale is not known yet, so
    each chunk of logits is divided by its own power of two, which `unit` restores.
    """
    (T, E), V, wide = x.shape, weight.shape[0], wide_dtype(product)
    made = Made(
        x.new_empty(T, dtype=wide) if softmax is None else None,
        x.new_empty((2, T), dtype=wide) if softmax is None else softmax,
        x.new_empty((T, E), dtype=product) if wanted[0] else None,
        x.new_zeros((V, E), dtype=wide) if wanted[1] else None,
        x.new_zeros(V, dtype=wide) if wanted[2] else None,
        x.new_empty(T, dtype=wide) if product is torch.float16 and scale is None and any(wanted) else None,
    )
    cross_entropy: Any = _in_kernel if _has_kernel(how, x.device, product, T * V) else _in_torch
    step = how.chunk or max(1, _CHUNK_BYTES // (V * wide.itemsize))
    with autocasting(x.device.type, None):  # all casts are explicit
        cast, shift = weight.to(product), None if bias is None else bias.to(product)
        most = None if made.unit is None else cast.abs().amax().to(wide)
        for first in range(0, T, step):
            part = slice(first, first + step)
            piece = x[part].to(product)
            factor, known = (None if t is None else t[..., part] for t in (scale, softmax))
            logits, unit = linear(piece, cast, shift), None
            loss: Tensor | None = None
            if made.unit is not None:
                loss, known, _ = cross_entropy(how, logits, targets[part], None, None, False)
                made.unit[part] = unit = _unit(how, loss, most)
                factor = 1 / made.unit[part]
            again, of_rows, d = cross_entropy(how, logits, targets[part], factor, known, any(wanted))
            del logits
            if made.rows is not None and made.softmax is not None:
                made.rows[part], made.softmax[:, part] = again if loss is None else loss, of_rows
            if made.dx is not None:
                linear_into(made.dx[part], d, cast.t(), None)
            if made.dweight is not None:
                _add_product(made.dweight, d, piece, unit)
            if made.dbias is not None:
                total = d.sum(0, dtype=wide)
                made.dbias.add_(total if unit is None else total.mul_(unit))
            del d  # frees its memory before the next logits
    return made


def _has_kernel(how: How, device: torch.device, product: torch.dtype, logits: int) -> bool:
    """Whether a kernel can run chunks with this many logits in all."""
    fusing = fusing_now()
    if not fusing.enabled or how.group.size > 1:
        return False
    kernels = Env.of(device).kernels
    if kernels == "c":
        return product is not torch.float64 and (fusing.unmeasured or logits >= C_WORTHWHILE)
    return kernels is not None


def _unit(how: How, loss: Any, weight: Any) -> Tensor:
    """A power of two that brings the gradient of a chunk's logits, divided by it, far from both ends of float16.

    With r = max(1 - p of a target, label smoothing) + 2 z_loss |lse|, computed from the largest loss, no element
    exceeds r, and the elements of a row sum to less than 3 r, so that no element of dx exceeds 3 r max |weight|.
    """
    smoothing = how.label_smoothing
    # A NaN loss affects only its own row.
    largest = loss.nan_to_num(0.0).amax()
    # The sum of exponentials is not precise enough for a smaller difference from 1.
    reach = largest.div(smoothing - 1).expm1().neg().clamp(max(smoothing, 2**-20), 1.0) if smoothing < 1 else 1.0
    reach = reach + 2 * (how.z_loss * largest).sqrt()
    bound = 3 * reach * weight.nan_to_num(1.0).clamp(1.0, 2.0**16)
    return bound.log2().ceil().sub(15).exp2()


def _add_product(total: Tensor, d: Tensor, x: Tensor, unit: Tensor | None) -> None:
    """Add unit d^T x, summed in the dtype of the total."""
    if total.is_cuda and d.dtype is not total.dtype and torch.version.hip is None:
        product = torch.mm(d.t(), x, out_dtype=total.dtype)
        total.add_(product if unit is None else product.mul_(unit))
    else:
        x = x.to(total.dtype)
        total.addmm_(d.to(total.dtype).t(), x if unit is None else x * unit)


def _in_kernel(
    how: How, logits: Tensor, targets: Tensor, scale: Tensor | None, softmax: Tensor | None, gradient: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    from ..kernels.crossentropy import cross_entropy_

    try:
        loss, made = cross_entropy_(
            logits,
            targets,
            ignore_index=how.ignore_index,
            label_smoothing=how.label_smoothing,
            z_loss=how.z_loss,
            softcap=how.softcap,
            scale=scale,
            softmax=softmax,
            gradient=gradient,
        )
    except torch.OutOfMemoryError:
        raise
    except CompileError as error:
        give_up(error)
        warnings.warn(f"{how.operation} runs unfused, in ATen calls: {error}", FallbackWarning, stacklevel=2)
        return _in_torch(how, logits, targets, scale, softmax, gradient)
    except Exception as error:
        hint = "with sf.fusing(False): operations of torch do the same"
        raise KernelError(f"its kernel failed: {error}", code="SF401", operation=how.operation, hint=hint) from error
    of_rows = softmax if made is None else made
    assert of_rows is not None
    return loss, of_rows, logits


def _in_torch(
    how: How, logits: Tensor, targets: Tensor, scale: Tensor | None, softmax: Tensor | None, gradient: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Loss, softmax and gradient of a chunk, in the memory of its logits if their dtype is wide enough."""
    z = logits.to(wide_dtype(logits.dtype))
    bent = None
    if how.softcap is not None:
        bent = z.div_(how.softcap).tanh_()
        z = bent * how.softcap
    several, classes = how.group.size > 1, z.shape[1] * how.group.size
    counted = targets != how.ignore_index
    mine, at = own_targets(how, targets, counted, z.shape[1])
    loss = None
    if softmax is None:
        top = z.amax(1)
        if several:
            top = how.group.all_reduce(top, how.operation, "max")
        z.sub_(top.unsqueeze(1))
        picked = z.gather(1, at).squeeze(1)
        logits_sum = z.sum(1) if how.label_smoothing else None
        total = z.exp_().sum(1)
        if several:
            sums = [picked.masked_fill(~mine, 0), total, *([] if logits_sum is None else [logits_sum])]
            picked, total, *rest = how.group.all_reduce(torch.stack(sums), how.operation)
            logits_sum = rest[0] if rest else None
        loss = picked * (how.label_smoothing - 1)
        if logits_sum is not None:
            loss.sub_(logits_sum, alpha=how.label_smoothing / classes)
        loss.add_(total.log())
        if how.z_loss:
            loss.add_((top + total.log()).square(), alpha=how.z_loss)
        loss.masked_fill_(~counted, 0)
        softmax = torch.stack((top, total))
    else:
        top, total = softmax
        z.sub_(top.unsqueeze(1)).exp_()
    if gradient:
        g = counted.to(z.dtype) if scale is None else scale.where(counted, 0)
        by_softmax = g / total
        picked = z.gather(1, at).squeeze(1) * by_softmax
        spread = how.label_smoothing / classes
        # Subtracted as one number, so that no digits are lost where it almost equals the softmax.
        at_target = picked - g * (1 - how.label_smoothing + spread)
        if how.z_loss:
            of_lse = 2 * how.z_loss * (top + total.log())
            # Added separately: where the softmax is near one, a common factor would lose the digits of this part.
            at_target = at_target + picked * of_lse
            by_softmax = by_softmax * (1 + of_lse)
        # Multiplied, not selected: as in torch, an ignored row propagates its NaN.
        z.mul_(by_softmax.unsqueeze(1))
        if how.label_smoothing:
            z.sub_((g * spread).unsqueeze(1))
        if several:
            at_target = at_target.where(mine, z.gather(1, at).squeeze(1))
        z.scatter_(1, at, at_target.unsqueeze(1))
        if bent is not None:
            z.mul_(bent.square_().neg_().add_(1))
    return loss, softmax, z


def own_targets(how: How, targets: Tensor, counted: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Which targets are among this process's classes, and their indices among them, [T, 1]."""
    own = targets - how.group.rank * classes if how.group.size > 1 else targets
    mine = counted & (own >= 0) & (own < classes) if how.group.size > 1 else counted
    return mine, own.where(mine, 0).unsqueeze(1)


class LinearCrossEntropyNode(torch.autograd.Function):
    """The reduced loss; the forward pass also computes its gradients."""

    @staticmethod
    def forward(
        ctx: Any, how: How, product: torch.dtype, targets: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        made = walk(how, product, flat(x), weight, targets, bias, ctx.needs_input_grad[3:])
        count = counted_rows(how, targets)
        ctx.save_for_backward(made.dx, made.dweight, made.dbias, count, made.unit)
        ctx.shape, ctx.how = x.shape, how
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return reduced(how, made.rows, count)

    @staticmethod
    def backward(ctx: Any, *douts: Any) -> Any:
        *grads, count, unit = ctx.saved_tensors
        with torch.no_grad():
            # If all tokens are ignored, every gradient is zero, as in torch.
            scale = douts[0] if count is None else (douts[0] / count).where(count > 0, 0)
            scales = scale if unit is None else scale * unit.unsqueeze(1), scale, scale
            # Not in place, so that backward can run again.
            scaled = [
                None if t is None else t.to(wide_dtype(t.dtype)) * of for t, of in zip(grads, scales, strict=True)
            ]
            grads = _delivered(ctx, scaled, ctx.dtypes)
        return _guarded(ctx, grads, douts)


class LinearCrossEntropyRows(torch.autograd.Function):
    """The loss of each token; the backward pass recomputes the logits."""

    @staticmethod
    def forward(
        ctx: Any, how: How, product: torch.dtype, targets: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Any:
        made = walk(how, product, flat(x), weight, targets, bias, (False, False, False))
        ctx.save_for_backward(x, weight, targets, bias, made.softmax)
        ctx.shape, ctx.how, ctx.product = x.shape, how, product
        return made.rows

    @staticmethod
    def backward(ctx: Any, *douts: Any) -> Any:
        x, weight, targets, bias, softmax = saved = ctx.saved_tensors

        def one(dloss: Tensor) -> tuple[Any, ...]:
            with torch.no_grad():
                args = (flat(x), weight, targets, bias, ctx.needs_input_grad[3:], dloss.contiguous(), softmax)
                made = walk(ctx.how, ctx.product, *args)
                dtypes = [None if t is None else t.dtype for t in (x, weight, bias)]
                grads = _delivered(ctx, (made.dx, made.dweight, made.dbias), dtypes)
            return _guarded(ctx, grads, (dloss, *saved))

        return tuple(Batched.run(one, douts)) if Batched.given(douts) else one(*douts)


def _delivered(ctx: Any, grads: Sequence[Tensor | None], dtypes: Sequence[torch.dtype | None]) -> list[Tensor | None]:
    """Gradients of x, weight and bias, rounded once; if a parameter has a `main_grad`, added to it unrounded."""
    dx, *sums = grads
    nodes = [fn for fn, _ in ctx.next_functions[2:]]  # the first two are of targets and x
    buffers = main_grads(nodes, executes, lambda i: (("weight", "bias")[i], ctx.how.operation, None))
    if buffers is not None:
        buffers.settle(sums)
    return [None if t is None else t.to(dtype) for t, dtype in zip((dx, *sums), dtypes, strict=True)]


def _guarded(ctx: Any, grads: list[Any], read: tuple[Any, ...]) -> tuple[Any, ...]:
    found: tuple[Any, ...] = tuple(grads)
    if found[0] is not None:
        found = (found[0].view(ctx.shape), *found[1:])
    if torch.is_grad_enabled():
        found = Once.guard(ctx, found, read)
    return (None, None, None, *found)
