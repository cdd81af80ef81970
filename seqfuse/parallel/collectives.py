"""Collectives over the ranks of a pipeline; every rank must call them."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import InputError
from ..group import ParameterShard
from ..run import Sequential
from .checkpoint import sharded_parameters
from .staged import StagedFuser


def everywhere(tensor: Tensor, model: Sequential) -> Tensor:
    """Broadcast a tensor of the last stage, such as the loss, to every rank; detached.

    Args:
        tensor: the result of the same expression on every rank, such as `loss`.
        model: the pipelined model.

    Raises:
        InputError: (SF105) on every rank, if the tensor is wrong on one of them.
        StateError: (SF509) if a rank does not call it.
    """
    fuser = staged(model)
    placement = fuser.placement
    here = placement.own(placement.stages - 1)
    given: Any = tensor
    told = torch.zeros(len(placement.ranks), dtype=torch.int64, device=fuser.device)
    if isinstance(given, Tensor) and given.is_meta is not here:
        told[placement.me] = 1 + zlib.crc32(repr((tuple(given.shape), given.dtype)).encode())
    try:
        # Compared first: if only one rank raised, the others would wait for it.
        dist.all_reduce(told, group=placement.group)  # pyright: ignore[reportUnknownMemberType]
        kinds = dict(zip(placement.ranks, cast("list[int]", told.tolist()), strict=True))  # pyright: ignore[reportUnknownMemberType]
        source = placement.rank(placement.stages - 1)
        if wrong := [r for r, k in kinds.items() if not k] or [r for r, k in kinds.items() if k != kinds[source]]:
            whose = f"rank{'s' * (len(wrong) > 1)} {' and '.join(map(str, wrong))}"
            message = "takes a tensor of the last stage: real there, on meta in its shape and dtype on every other rank"
            raise InputError(f"{message}; that of {whose} is not", code="SF105", operation="everywhere")
        # Contiguous on every rank, since a broadcast copies memory regardless of strides.
        value = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device if here else fuser.device)
        if here:
            value.copy_(tensor.detach())
        dist.broadcast(value, source, group=placement.group)
    except RuntimeError as error:
        raise placement.failed("everywhere", error) from error
    return value


def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` for parallelized models.

    The norm of a sharded parameter or DTensor is that of the full tensor. Norms are all-reduced over the pipeline
    stages.

    Args:
        model: a model with any combination of pipeline, tensor parallel and FSDP2.
        max_norm: the maximum norm.
        norm_type: the p of the p-norm, positive.
        error_if_nonfinite: whether to raise if the norm is infinite or NaN.

    Returns:
        The norm of all gradients before clipping, on every rank.

    Raises:
        InputError: (SF106) for p <= 0, where absent gradients of other ranks would count, and for a sharded parameter
            that a parametrization has replaced since.
        StateError: (SF506, SF509) if a rank does not call it.
    """
    if not norm_type > 0:
        raise InputError(f"norm_type must be positive, got {norm_type}", code="SF106", operation="clip_grad_norm_")
    parameters = [*model.parameters()]
    own = [p for p in parameters if not p.is_meta]
    if not parameters:
        return torch.zeros(())
    dtype = functools.reduce(torch.promote_types, {p.dtype for p in parameters})
    fusers = [vars(module).get("_fuser") for module in model.modules()]
    pipelined = [fuser for fuser in fusers if isinstance(fuser, StagedFuser)]
    # A rank whose stages have no parameters takes part on the device of its input.
    devices = [*(p.device for p in own), *(fuser.device for fuser in pipelined if fuser.device is not None)]
    norms = torch.zeros(len(parameters), dtype=dtype, device=devices[0] if devices else "cpu")
    # By identity, since wrappers such as checkpoint_wrapper change names.
    shards = {id(m._parameters[name]): shard for _, m, name, shard in sharded_parameters(model)}  # pyright: ignore[reportPrivateUsage]
    for index, parameter in enumerate(parameters):
        if parameter.grad is not None:
            norm = _norm(parameter.grad, norm_type)
            norms[index] = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            if id(parameter) in shards:
                norms[index] = _whole_norm(norms[index], shards[id(parameter)], norm_type)
    for placement in {fuser.placement for fuser in pipelined}:
        try:
            dist.all_reduce(norms, group=placement.group)  # pyright: ignore[reportUnknownMemberType]
        except RuntimeError as error:
            raise placement.failed("clip_grad_norm_", error) from error
    total: Tensor = _norm(norms, norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"The total norm of order {norm_type} for gradients is {total.item()}, so it cannot clip")
    sharded = [hasattr(p, "full_tensor") for p in own]
    for kind in set(sharded):  # torch does not scale DTensors and plain tensors in one call
        torch.nn.utils.clip_grads_with_norm_(
            [p for p, s in zip(own, sharded, strict=True) if s is kind], max_norm, total
        )
    return total


def _whole_norm(norm: Tensor, shard: ParameterShard, p: float) -> Tensor:
    if p == float("inf"):
        return shard.group.all_reduce(norm, "clip_grad_norm_", "max")
    norm = norm.to(torch.promote_types(norm.dtype, torch.float32))  # its power may exceed the range of float16
    return shard.group.all_reduce(norm**p, "clip_grad_norm_") ** (1 / p)


_norm: Callable[..., Any] = torch.linalg.vector_norm  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def staged(model: Sequential) -> StagedFuser:
    """The `StagedFuser` of a pipelined model."""
    fuser = getattr(model, "_fuser", None)
    if not isinstance(fuser, StagedFuser):
        raise InputError("takes a model that pipeline() has cut", code="SF106")
    return fuser
