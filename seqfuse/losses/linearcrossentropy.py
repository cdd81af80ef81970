"""LinearCrossEntropy: the cross-entropy of logits that are computed chunk by chunk."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..autograd import transformed
from ..group import Group, ParameterShard, handed_on, summed_gradient, vocabulary_shard, with_backward
from ..ops._parameters import divide, reset_linear
from ..signature import checks_arguments
from ._chunks import (
    How,
    LinearCrossEntropyNode,
    LinearCrossEntropyRows,
    Reduction,
    check_inputs,
    check_targets,
    counted_rows,
    flat,
    own_targets,
    reduced,
    walk,
    wide_dtype,
)

_PLAIN = (Tensor, nn.Parameter)


@checks_arguments
class LinearCrossEntropy(nn.Module):
    """The cross-entropy of logits x weight^T + bias, computed in chunks of tokens.

    z = x weight^T + bias, with `softcap` c: c tanh(z / c);  lse = log sum_j exp z_j;  with s = `label_smoothing`, loss
    = lse - (1 - s) z_target - s mean_j z_j + `z_loss` lse^2, and 0 where the target is `ignore_index`. "mean" divides
    by the number of tokens that are not ignored: NaN if there are none, as in torch.

    Gradients: dz_j = softmax(z)_j (1 + 2 z_loss lse) - (1 - s) [j = target] - s / V, times 1 - (z_j / c)^2; dx = dz
    weight;  dweight = dz^T x;  dbias = sum of dz over tokens. For "mean" and "sum" the forward pass computes the needed
    gradients in the memory of the logits, and the backward pass multiplies them by the incoming gradient. For "none"
    the backward pass recomputes the logits. In float16 the gradients of each chunk are scaled by a power of two, since
    the loss scale is not known yet. A gradient of a parameter with a `main_grad` is added to it, unrounded. Second
    derivatives are not supported.

    x: [*, in_features] of float16, bfloat16, float32 or float64; targets: [*] of integers; loss: [] or [*], float32
    (float64 for float64). GEMMs are in the dtype of x and weight, or of autocast; everything else is in float32. Under
    torch.compile, torch.func, forward-mode AD and for tensor subclasses, plain torch operations run, which hold all
    logits.

    State-dict keys and initial values are those of `torch.nn.Linear(in_features, num_classes, bias)`.

    With `parallel="vocab"` each process of a group holds a shard of the classes. Logits are not gathered: processes
    exchange the maximum, the sum of exponentials and the target's logit of each token, and sum the gradient of x. x (a
    sequence shard with `sequence_dim`), targets and loss are replicated.
    Source: Wijmans et al. 2024, arXiv:2411.09009; Hsu et al. 2024, arXiv:2410.10989.

    Args:
        in_features: last dimension of x.
        num_classes: number of classes, V.
        bias: whether there is a bias.
        ignore_index: target of tokens to ignore.
        label_smoothing: fraction s of the target that is spread over all classes.
        z_loss: factor of lse^2, which keeps lse near zero.
        softcap: soft cap c of the logits; default none.
        reduction: `"mean"`, `"sum"` or `"none"`.
        weight: a parameter to share (tied weights), such as that of an embedding; gradients of both uses add up.
        chunk: tokens per chunk; by default 64 MiB of float32 logits.
        parallel: `"vocab"`.
        group: a process group or a `DeviceMesh` of one dimension.
        sequence_dim: the dimension of x that is sharded (sequence parallel).

    Raises:
        InputError: (SF101) for shapes or dtypes that do not fit, or classes that the number of processes does not
            divide, (SF102) for tensors on two devices, (SF105) for arguments that are not tensors, (SF106) for an
            unknown setting.
        RangeError: (SF107) for a target that is neither a class nor `ignore_index` (on a GPU a device-side assert).
        StateError: (SF501) for a second derivative.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = False,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        reduction: Reduction = "mean",
        weight: nn.Parameter | None = None,
        chunk: int | None = None,
        parallel: Literal["vocab"] | None = None,
        group: Any = None,
        sequence_dim: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.group, self.sequence_dim, self.shards = Group(), None, dict[str, ParameterShard]()
        self.in_features, self.num_classes = in_features, num_classes
        self.ignore_index, self.label_smoothing, self.z_loss = ignore_index, label_smoothing, z_loss
        self.softcap, self.chunk = softcap, chunk
        self.reduction: Reduction = reduction
        how = self._how()
        self.tied = weight is not None
        if weight is None:
            weight = nn.Parameter(torch.empty((num_classes, in_features), device=device, dtype=dtype))
        else:
            rows = num_classes // Group(group).size if parallel else num_classes
            if tuple(weight.shape) not in ((num_classes, in_features), (rows, in_features)):
                how.refuse(f"weight must have shape ({rows}, {in_features}), got {tuple(weight.shape)}", "SF101")
        self.register_parameter("weight", weight)
        factory: dict[str, Any] = {"device": device or weight.device, "dtype": dtype or weight.dtype}
        self.register_parameter("bias", nn.Parameter(torch.empty(num_classes, **factory)) if bias else None)
        self.reset_parameters()
        if parallel is not None:
            if parallel != "vocab" or group is None:  # pyright: ignore[reportUnnecessaryComparison]
                how.refuse(f'parallel={parallel!r} must be "vocab" and needs a group', "SF106")
            self.divide(group, sequence_dim=sequence_dim)

    def reset_parameters(self) -> None:
        """Initialize from U(-1/sqrt(in_features), 1/sqrt(in_features)), as `torch.nn.Linear`; not a tied weight."""
        reset_linear(self, None if self.tied else "weight")

    def divided(self, group: Group) -> dict[str, ParameterShard]:
        """How the parameters would be sharded over a group; raises if they cannot be."""
        shard = vocabulary_shard("LinearCrossEntropy", self.shards, self.num_classes, group)
        return {"weight": shard} if self.bias is None else {"weight": shard, "bias": shard}

    def divide(self, group: Any, *, sequence_dim: int | None = None) -> None:
        """Shard the parameters in place; the arguments are those of the class."""
        group = Group(group)
        shards = self.divided(group)
        if group.size > 1:
            divide(self, shards)
            self.group, self.sequence_dim = group, sequence_dim

    def _how(self) -> How:
        return How(
            "LinearCrossEntropy", self.ignore_index, self.label_smoothing, self.z_loss, self.softcap, self.reduction,
            self.chunk, self.group,
        ).checked()  # fmt: skip

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss of x [*, in_features] and targets [*]."""
        how, dim = self._how(), self.sequence_dim
        if dim is not None:
            of = how.operation
            x = with_backward(
                lambda t: how.group.all_gather(t, dim, of), lambda d: how.group.reduce_scatter(d, dim, of), x
            )
        elif self.group.size > 1:
            x = summed_gradient(self.group, x)
        return _run(how, x, self.weight, targets, self.bias)

    def extra_repr(self) -> str:
        """Sizes and non-default settings."""
        parts = [f"{self.in_features}, {self.num_classes}, bias={self.bias is not None}"]
        defaults = {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0, "softcap": None, "reduction": "mean"}
        defaults |= {"tied": False, "chunk": None}
        parts += [f"{key}={getattr(self, key)!r}" for key, value in defaults.items() if getattr(self, key) != value]
        return ", ".join(parts)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    chunk: int | None = None,
) -> Tensor:
    """The cross-entropy of logits x weight^T + bias, in chunks of tokens: `LinearCrossEntropy` as a function.

    x: [*, E], weight: [V, E], targets: [*], bias: [V]. Arguments and errors as in the class.
    """
    how = How(
        "linear_cross_entropy", ignore_index, label_smoothing, z_loss, softcap, reduction, chunk, Group()
    ).checked()  # fmt: skip
    return _run(how, x, weight, targets, bias)


def _run(how: How, x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> Tensor:
    product = check_inputs(how, x, weight, targets, bias)
    given = (x, weight, targets) if bias is None else (x, weight, targets, bias)
    if (
        torch.compiler.is_compiling()
        or any(t.__class__ not in _PLAIN for t in given)
        or transformed()
        or x.device.type == "meta"
    ):
        return _reference(how, x, weight, targets, bias)
    rows = targets.reshape(-1).to(torch.int64)
    check_targets(how, rows, weight.shape[0] * how.group.size)
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        function: Any = LinearCrossEntropyRows if how.reduction == "none" else LinearCrossEntropyNode
        loss: Tensor = function.apply(how, product, rows, x, weight, bias)
    else:
        with torch.no_grad():
            made = walk(how, product, flat(x), weight, rows, bias, (False, False, False))
            loss = reduced(how, made.rows, counted_rows(how, rows))
    return loss.view(targets.shape) if how.reduction == "none" else loss


def _reference(how: How, x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> Tensor:
    """The same loss by torch operations, differentiable any number of times; holds all logits."""
    z = F.linear(flat(x), weight, bias)
    z = z.to(wide_dtype(z.dtype))
    if how.softcap is not None:
        z = (z / how.softcap).tanh() * how.softcap
    rows = targets.reshape(-1).to(torch.int64)
    if how.group.size > 1:
        loss = _across(how, z, rows)
    else:
        rest: dict[str, Any] = {"ignore_index": how.ignore_index, "label_smoothing": how.label_smoothing}
        loss = F.cross_entropy(z, rows, reduction="none", **rest)
        if how.z_loss:
            loss = loss + (how.z_loss * z.logsumexp(-1).square()).masked_fill(rows == how.ignore_index, 0.0)
    loss = reduced(how, loss, counted_rows(how, rows))
    return loss.reshape(targets.shape) if how.reduction == "none" else loss


def _across(how: How, z: Tensor, targets: Tensor) -> Tensor:
    """The loss of each token if each process has the logits of its own classes."""

    def total(t: Tensor) -> Tensor:
        return with_backward(lambda part: how.group.all_reduce(part, how.operation), handed_on, t)

    counted = targets != how.ignore_index
    mine, at = own_targets(how, targets, counted, z.shape[1])
    top = how.group.all_reduce(z.detach().amax(1), how.operation, "max")
    lse = top + total((z - top.unsqueeze(1)).exp().sum(1)).log()
    loss = lse - (1 - how.label_smoothing) * total(z.gather(1, at).squeeze(1).masked_fill(~mine, 0))
    if how.label_smoothing:
        loss = loss - how.label_smoothing / (z.shape[1] * how.group.size) * total(z.sum(1))
    if how.z_loss:
        loss = loss + how.z_loss * lse.square()
    return loss.masked_fill(~counted, 0)
