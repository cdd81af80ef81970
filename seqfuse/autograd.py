"""Shared by all autograd functions of this library: second derivatives, batched gradients, whether a node will run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from .errors import StateError

executes: Callable[[Any], bool] = torch._C._will_engine_execute_node  # pyright: ignore[reportPrivateUsage]


def transformed() -> bool:
    """Whether a functorch transform or forward-mode AD is active: those see the reference."""
    # torch.jit.trace counts too: in it, sizes are tensors.
    if torch._C._get_tracing_state() is not None:  # pyright: ignore[reportPrivateUsage, reportUnnecessaryComparison]
        return True
    return _interpreter() is not None or forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportUnknownVariableType]


_interpreter: Callable[[], Any] = peek_interpreter_stack


class Once(torch.autograd.Function):
    """Passes first gradients through; differentiating them again is an error."""

    generate_vmap_rule = True

    @staticmethod
    def guard(ctx: Any, grads: Sequence[Any], read: Sequence[Any]) -> tuple[Any, ...]:
        """Makes differentiating `grads` an error, along every path to the tensors `read` or to leaves of the node.

        Raises the error at once if no remaining tensor leads to an input of the node.
        """
        present = [g for g in grads if g is not None]
        links = [t for t in read if t is not None and t.requires_grad]
        nodes = [fn for fn, _ in ctx.next_functions if fn is not None]
        links += [fn.variable for fn in nodes if hasattr(fn, "variable")]
        led_to = [t.grad_fn for t in links]
        if present and not all(hasattr(fn, "variable") or any(fn is other for other in led_to) for fn in nodes):
            raise _twice()
        if not present:
            return tuple(grads)
        guarded: Iterator[Any] = iter(Once.apply(_twice, len(present), *present, *links))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        return tuple(None if g is None else next(guarded) for g in grads)

    @staticmethod
    def forward(error: Callable[[], Exception], count: int, *tensors: Tensor) -> Any:
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.error = inputs[0]

    @staticmethod
    def backward(ctx: Any, *douts: Any) -> Any:
        raise ctx.error()


class Batched(torch.autograd.Function):
    """Runs a backward pass once for each gradient of a batch, such as in a vectorized Jacobian.

    Kernels do not support batched tensors, and passes that update a buffer in place would see the batch as one tensor.
    """

    @staticmethod
    def given(douts: Sequence[Any]) -> bool:
        """Whether any of these gradients is a batch, of `is_grads_batched` or of `torch.vmap`."""
        return any(d is not None and (_of_grads(d) or _of_vmap(d)) for d in douts)

    @staticmethod
    def run(backward: Callable[..., Sequence[Any]], douts: Sequence[Any]) -> Sequence[Any]:
        """The batched gradients of `backward(*douts)`."""
        batch = next((d for d in douts if d is not None and _of_grads(d)), None)
        if batch is None and torch.is_grad_enabled():
            raise _twice()
        if batch is None:
            return Batched.apply(backward, *douts)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType, reportReturnType]
        # Tensors have no public batch level, and another thread may have entered it.
        level = next(n for n in range(1, 65) if not _of_grads(_remove(batch, n, 1, 0)))
        size = _remove(batch, level, 1, 0).shape[0]
        whole = [None if d is None else _remove(d, level, size, 0) for d in douts]
        return [None if g is None else _add(g, 0, level) for g in _each(backward, size, whole, [0] * len(whole))]

    @staticmethod
    def forward(backward: Callable[..., Sequence[Any]], *douts: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(backward(*douts))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Saves nothing, as there is no backward pass; torch's transforms require this method."""

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], backward: Any, *douts: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        def one(*douts: Any) -> Any:
            return Batched.apply(backward, *douts)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

        grads = _each(one, info.batch_size, douts, in_dims[1:])
        return tuple(grads), tuple(None if g is None else 0 for g in grads)


def _each(
    backward: Callable[..., Sequence[Any]], size: int, douts: Sequence[Any], dims: Sequence[int | None]
) -> list[Any]:
    made: list[Sequence[Any]] = []
    for i in range(size):
        given = [d if d is None or dim is None else d.select(dim, i) for d, dim in zip(douts, dims, strict=True)]
        made.append(backward(*given))
    return [None if grads[0] is None else torch.stack(grads) for grads in zip(*made, strict=True)]


_torch: Any = torch
_of_grads: Callable[[Any], bool] = _torch._C._functorch.is_legacy_batchedtensor
_of_vmap: Callable[[Any], bool] = _torch._C._functorch.is_batchedtensor
_add: Callable[[Tensor, int, int], Tensor] = _torch._add_batch_dim
_remove: Callable[[Tensor, int, int, int], Tensor] = _torch._remove_batch_dim


def _twice() -> StateError:
    hint = "differentiate under torch.func, run the operations' reference, or undo() the conversion of the model"
    return StateError("double backward is not supported", code="SF501", hint=hint)


class _Stated(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(run: Callable[..., Tensor], run_backward: Callable[..., Any], error: Any, *tensors: Tensor) -> Tensor:
        return run(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.run_backward, ctx.error, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *douts: Any) -> Any:
        read = *douts, *ctx.saved_tensors
        found = ctx.run_backward(*read, needs=ctx.needs_input_grad[3:])
        if torch.is_grad_enabled():  # 8-bit tensors have no derivatives, so second derivatives would be zeros
            found = [g if g is None else Once.apply(ctx.error, 1, g, *read)[0] for g in found]  # pyright: ignore
        return None, None, None, *found

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise ctx.error()


def with_gradients(
    run: Callable[..., Tensor], run_backward: Callable[..., Any], error: Callable[[], Exception], *tensors: Tensor
) -> Tensor:
    """`run(*tensors)`, whose gradients are `run_backward(dy, *tensors, needs=...)`, one for each tensor, or `None`.

    Second derivatives and forward-mode AD raise `error()`.
    """
    return cast(Tensor, _Stated.apply(run, run_backward, error, *tensors))  # pyright: ignore[reportUnknownMemberType]
