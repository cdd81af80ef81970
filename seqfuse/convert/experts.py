"""Experts of Hugging Face: replaces the implementation of their modules by one whose call is a single node of a graph.

The implementation is set in a copy of the module's configuration, so that models that share the configuration are not
affected, and the module keeps its class, parameters and forward.
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.functional_tensor import FunctionalTensor

from .. import ops
from ..fake import is_fake
from ..operation import UnfusedOperation
from ..run import Sequential

NAME = "seqfuse"
_INTERFACE = "transformers.integrations.moe"
_REPLACED = (None, "eager", "grouped_mm", "batched_mm")

Unit = tuple[str, tuple[float | str, ...], str]
"""An activation or gated unit: its class in `ops`, the arguments of the class, and the order of gate and up."""

_GATES = (("SwiGLU", ()), ("GEGLU", ()), ("GEGLU", ("tanh",)), ("ReGLU", ()), ("GLU", ()), ("QGEGLU", ()))
_UNITS: tuple[Unit, ...] = tuple(
    (name, numbers, packing) for name, numbers in _GATES for packing in ("gate_up", "up_gate", "interleaved")
)
ACTIVATIONS: tuple[Unit, ...] = (
    *((name, (), "") for name in ("SiLU", "GeLU", "ReLU", "SquaredReLU", "QuickGeLU", "Sigmoid", "Tanh")),
    ("GeLU", ("tanh",), ""),
)


def made(unit: Unit) -> UnfusedOperation:
    """The operation for an activation or a gated unit."""
    name, numbers, packing = unit
    return getattr(ops, name)(*numbers, **{"packing": packing} if packing else {})


class Mixture(NamedTuple):
    """Tokens, their chosen experts and factors, and the parameters of all experts.

    x: [T, H], experts, probs: [T, top_k], up: [experts, N, H], down: [experts, H, F], biases: [experts, N] and
    [experts, H].
    """

    x: Tensor
    experts: Tensor
    probs: Tensor
    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    unit: Unit


def mixture(*given: Any) -> Tensor:
    """The outputs of a `Mixture`'s experts, times factors and summed: one node of a graph that Dynamo captures."""
    m = Mixture(*given)
    if isinstance(m.x, FunctionalTensor):  # another compiler, such as Inductor, traces it
        return _by_expert(m)
    if is_fake(m.x):  # capturing, or counting launches and saved tensors of eager torch
        return _before(m)
    model, lock = _kept(m.up.shape, m.down.shape, m.experts.shape[-1], m.up_bias is not None, m.unit, m.x.dtype)
    parts = [t for t in (m.up, m.up_bias, m.down, m.down_bias) if t is not None]
    lent = dict(zip((name for name, _ in model.named_parameters()), parts, strict=True))
    with lock:  # parameters are assigned to shared operations, which two threads must not do at once
        return torch.func.functional_call(model, lent, (m.x,), {"experts": m.experts, "probs": m.probs})


def _before(m: Mixture) -> Tensor:
    """Hugging Face's calls with grouped GEMMs, where each grouped GEMM is one GEMM with one of the weights."""
    order = m.experts.reshape(-1).sort().indices
    token, group = order // m.experts.shape[-1], m.experts.reshape(-1).index_select(0, order)
    torch.cumsum(torch.histc(group.float(), m.up.shape[0]), 0, dtype=torch.int32)
    h = F.linear(m.x.index_select(0, token), m.up.select(0, 0))
    h = h if m.up_bias is None else h + m.up_bias.index_select(0, group)
    y = F.linear(made(m.unit).reference(h), m.down.select(0, 0))
    y = y if m.down_bias is None else y + m.down_bias.index_select(0, group)
    y = y * m.probs.reshape(-1).index_select(0, order).unsqueeze(-1)
    back = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=order.device))
    return y.index_select(0, back).view(*m.experts.shape, -1).sum(1).to(m.x.dtype)


def _by_expert(m: Mixture) -> Tensor:
    """Each expert for all tokens, times zero for tokens that did not choose it: shapes do not depend on the choice."""
    y = m.x.new_zeros(())
    for e in range(m.up.shape[0]):
        h = made(m.unit).reference(F.linear(m.x, m.up[e], None if m.up_bias is None else m.up_bias[e]))
        factor = torch.where(m.experts == e, m.probs, 0).sum(-1, keepdim=True)
        y = y + F.linear(h, m.down[e], None if m.down_bias is None else m.down_bias[e]) * factor
    return y.to(m.x.dtype)


def operations(
    up: Sequence[int], down: Sequence[int], top_k: int, bias: bool, unit: Unit, dtype: torch.dtype, **names: str | None
) -> Sequential:
    """Permute, GroupedLinear, activation, GroupedLinear and Unpermute with parameters on `meta`.

    `names` overrides the names of the channels experts, probs, offsets and rows; probs may be None.
    """
    count, meta = up[0], torch.device("meta")
    experts, probs, offsets, rows = (names.get(name, name) for name in ("experts", "probs", "offsets", "rows"))
    at: Any = {"offsets": offsets}
    return Sequential(
        ops.Permute(count, top_k, name=cast(str, experts), to=cast(Any, (offsets, rows))),
        ops.GroupedLinear(count, up[2], up[1], bias, meta, dtype, **at),
        made(unit),
        ops.GroupedLinear(count, down[2], down[1], bias, meta, dtype, **at),
        ops.Unpermute(probs, rows=cast(str, rows), **at),
    )


@functools.lru_cache(64)
def _kept(*of: Any) -> tuple[Sequential, threading.RLock]:
    """`operations` for calls, with a lock; a graph assigns tensors to its own operations."""
    return operations(*of), threading.RLock()


def _forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The implementation: passes the module's current parameters to `mixture` in the layout of `GroupedLinear`."""
    up, down = self.gate_up_proj if self.has_gate else self.up_proj, self.down_proj
    if self.is_transposed:
        up, down = up.transpose(-2, -1), down.transpose(-2, -1)
    up_bias = down_bias = None
    if self.has_bias:
        up_bias, down_bias = self.gate_up_proj_bias if self.has_gate else self.up_proj_bias, self.down_proj_bias
    return mixture(hidden_states, top_k_index, top_k_weights, up, up_bias, down, down_bias, self.seqfuse_unit)


torch.compiler.allow_in_graph(mixture)  # pyright: ignore[reportUnknownMemberType]


def _interface() -> Any:
    """Hugging Face's table of implementations, if it is imported."""
    return getattr(sys.modules.get(_INTERFACE), "ALL_EXPERTS_FUNCTIONS", None)


def take_over(model: nn.Module) -> tuple[list[tuple[nn.Module, Any]], dict[str, str]]:
    """Replace the implementation of experts; returns them with their old configurations, and reasons of the others."""
    interface = _interface()
    changed: list[tuple[nn.Module, Any]] = []
    kept: dict[str, str] = {}
    for path, module in cast("Iterable[tuple[str, Any]]", model.named_modules()) if interface is not None else ():
        if not all(hasattr(module, name) for name in ("has_gate", "is_transposed", "has_bias")):
            continue
        config: Any = module.config
        found = _unit_of(module)
        if isinstance(found, str):
            kept[path] = found
            continue
        assert interface is not None
        interface.register(NAME, _forward)
        own = copy.copy(config)
        own._experts_implementation = NAME
        module.config, module.seqfuse_unit = own, found
        changed.append((module, config))
    return changed, kept


def _unit_of(module: Any) -> Unit | str:
    """The unit between the two GEMMs of experts, identified by its values, or why the module is not changed."""
    used = getattr(module.config, "_experts_implementation", None)
    if used not in _REPLACED:
        return f"its experts have the implementation {used!r}"
    if getattr(module, "has_post_expert_norm", False):
        return "its experts have a norm behind them"
    names = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
    parameters = [getattr(module, name, None) for name in names]
    if any(not isinstance(p, Tensor) or p.ndim != 3 for p in parameters):
        return f"its {' and '.join(names)} are not one tensor for all experts"
    apply: Callable[[Tensor], Tensor] = module._apply_gate if module.has_gate else module.act_fn
    try:
        found = unit_like(apply, _candidates(module))
    except Exception as error:
        return f"its activation cannot be tried: {type(error).__name__}: {error}"
    return found or "its activation is none that this library knows"


def unit_like(
    apply: Callable[[Tensor], Tensor], units: Iterable[Unit] = _UNITS, shape: Sequence[int] = (16, 32)
) -> Unit | None:
    """The unit that computes the same values as `apply` on random input, or None."""
    drawn = _drawn(shape)
    with torch.no_grad(), torch.device("cpu"):
        expected = apply(drawn.clone())
        for unit in units:
            y = made(unit).reference(drawn)
            if y.shape == expected.shape and torch.allclose(y, expected.to(y.dtype), rtol=1e-5, atol=1e-6):
                return unit
    return None


def has_slope(unit: Unit, slope: Callable[[Tensor], Tensor]) -> bool:
    """Whether the derivative of an activation has the same values as `slope` on random input."""
    drawn = _drawn((16, 32)).requires_grad_()
    with torch.device("cpu"), torch.enable_grad():
        (expected,) = torch.autograd.grad(made(unit).reference(drawn).sum(), drawn)
        return torch.allclose(expected, slope(drawn.detach()), rtol=1e-5, atol=1e-6)


def _drawn(shape: Sequence[int]) -> Tensor:
    drawn = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 4
    drawn[0] *= 100
    return drawn


def _candidates(module: Any) -> Iterator[Unit]:
    if not module.has_gate:
        yield from ACTIVATIONS
        return
    yield from _UNITS
    numbers = [float(getattr(module, name, default)) for name, default in (("limit", 7.0), ("alpha", 1.702))]
    for packing in ("interleaved", "gate_up", "up_gate"):
        for offset in (1.0, 0.0):
            yield "ClampedSwiGLU", (*numbers, offset), packing
