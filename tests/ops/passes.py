"""Both passes of one operation called directly, compared with autograd of its reference and of its `torch.nn` twin."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.saved import copied
from seqfuse.testing import Untouched, assert_bitwise_equal, seeded_randn
from seqfuse.testing.judge import judge
from seqfuse.testing.tensors import redrawn
from tests.judging import judge_together

Tensors = dict[str, Tensor | None]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Operations that take any x; the others have their own tests.
_PICKY = (
    "Attention", "CrossAttention", "Embedding", "GELU", "GroupedLinear", "Permute", "PositionEmbedding", "QKNorm",
    "L2Norm", "Residual", "Route", "RotaryEmbedding", "ScaledSwiGLU", "TokenScale", "Unpermute",
)  # fmt: skip
NAMES = tuple(name for name in ops.__all__ if name not in _PICKY)


def example(name: str, x: Tensor) -> sf.UnfusedOperation:
    return getattr(ops, name).example(x)


def randomized(module: Any) -> Any:
    """The module with signed random parameters."""
    for i, parameter in enumerate(module.parameters()):
        parameter.data = seeded_randn(tuple(parameter.shape), 20 + i, dtype=parameter.dtype)
    return module


def own_parameters(op: sf.UnfusedOperation) -> dict[str, Tensor]:
    """The parameters that this operation's passes read, not those of the rest of its expansion."""
    others = [m for m in op.expand() if m is not op]
    taken = {(id(owner), name) for m in others for owner, name in m.parameter_slots().values()}
    slots = op.parameter_slots().items()
    return {name: getattr(*slot) for name, slot in slots if (id(slot[0]), slot[1]) not in taken}


def extras_of(op: sf.UnfusedOperation, x: Tensor) -> dict[str, Tensor]:
    """Signed random tensors for the extra inputs, in the dtype of x."""
    names = [name for name in op.forward_signature.extras if name in op.channels]
    return {name: seeded_randn(tuple(x.shape), 90 + i, dtype=x.dtype) for i, name in enumerate(names)}


def seed_of(op: sf.UnfusedOperation) -> dict[str, Tensor]:
    return {"seed": torch.tensor(0x1234_5678_9ABC_DEF0)} if op.forward_signature.seed else {}


def dropped(saved: sf.Saved, needs: frozenset[str]) -> sf.Saved:
    """The saved tensors as the engine returns them: without fields that no needed gradient reads."""
    return copied(saved, saved.kept(needs))


def by_passes(
    op: sf.UnfusedOperation, x: Tensor, extras: Mapping[str, Tensor], needs: Iterable[str] | None = None
) -> Tensors:
    """Results of `fwd` and `bwd`, each gradient cast to the dtype of its tensor, as by the engine."""
    parameters = own_parameters(op)
    wanted = frozenset(("x", *extras, *parameters) if needs is None else needs)
    mixed = any(t.dtype is not x.dtype for t in (*parameters.values(), *extras.values()))
    with torch.no_grad():
        forward = {**extras, **seed_of(op)} | ({"needs": wanted} if op.forward_signature.needs else {})
        y, *outputs, saved = op.fwd(x, **forward)
        made: dict[str, Tensor] = outputs[0] if outputs else {}
        result: Tensors = {"y": y, **made}
        incoming = {name: gradient(t, 7 + i) for i, (name, t) in enumerate(made.items())}
        dy = gradient(y, 5)
        arguments = {f"d_{name}": d for name, d in incoming.items()}
        arguments |= {"needs": wanted} if op.backward_signature.needs else {}
        with Untouched([dy, *incoming.values()]):
            dx, grads = op.bwd(dy, dropped(saved, wanted), **arguments)
    assert wanted - {"x"} <= set(grads) <= {*parameters, *extras}
    result["dx"] = dx
    for name, owner in {**parameters, **extras}.items():
        grad = result[f"d{name}"] = grads.get(name)
        assert grad is None or grad.shape == owner.shape
        assert grad is None or mixed or torch.is_autocast_enabled("cpu") or grad.dtype is owner.dtype
    owners = {"dx": x, **{f"d{name}": owner for name, owner in {**parameters, **extras}.items()}}
    return {name: t if t is None or name not in owners else t.to(owners[name].dtype) for name, t in result.items()}


def by_autograd(op: sf.UnfusedOperation, x: Tensor, extras: Mapping[str, Tensor]) -> Tensors:
    """Results of autograd through `reference`."""
    x = x.detach().requires_grad_()
    extras = {name: t.detach().requires_grad_() for name, t in extras.items()}
    parameters = own_parameters(op)
    out = op.reference(x, **extras, **seed_of(op))
    y, made = out if op.outputs else (out, {})
    owners = {"dx": x, **{f"d{name}": t for name, t in {**parameters, **extras}.items()}}
    outputs = [y, *made.values()]
    douts = [gradient(y, 5), *(gradient(t, 7 + i) for i, t in enumerate(made.values()))]
    grads = torch.autograd.grad(outputs, list(owners.values()), douts, materialize_grads=True)
    return {"y": y.detach(), **{n: t.detach() for n, t in made.items()}, **dict(zip(owners, grads, strict=True))}


def gradient(y: Tensor, seed: int) -> Tensor:
    """An incoming gradient for y, the same for every dtype but for its rounding."""
    return seeded_randn(tuple(y.shape), seed, dtype=torch.bfloat16).to(y.dtype)


def check_passes(op: sf.UnfusedOperation, x: Tensor) -> None:
    """Both passes within tolerance, compared with the reference in this dtype and in float64; no input is modified."""
    extras, drawn = extras_of(op, x), x

    def measure(seed: int) -> tuple[Tensors, ...]:
        x = redrawn(drawn, seed)
        with Untouched([x, *extras.values(), *op.parameters()]):
            found = by_passes(op, x, extras)
        # The math in its working dtype and in float64; cloned, since identities return their input.
        unfused = by_autograd(op, x, extras)
        exact = by_autograd(copy.deepcopy(op).double(), x.double(), {name: t.double() for name, t in extras.items()})
        return tuple({n: None if t is None else t.clone() for n, t in r.items()} for r in (found, unfused, exact))

    # The errors of a few numbers differ too much for one draw.
    (judge if x.numel() >= 100 else judge_together)(measure, 0)


def check_needs(op: sf.UnfusedOperation, x: Tensor) -> None:
    """Each subset of the gradients: needed ones keep their bits, others are `None`, no dropped field is read."""
    extras = extras_of(op, x)
    names = ("x", *own_parameters(op), *extras)
    whole = by_passes(op, x, extras)
    for count in range(1, len(names) + 1):
        for needs in itertools.combinations(names, count):
            part = by_passes(op, x, extras, needs)
            if not op.backward_signature.needs:
                needs = names
            expected = {n: t if n[1:] in needs or not n.startswith("d") else None for n, t in whole.items()}
            assert_bitwise_equal(part, expected, name=f"needs {needs}")


def check_twin(op: sf.UnfusedOperation, twin: nn.Module, x: Tensor, *, names: Iterable[str] | None = None) -> None:
    """The same bits and dtypes as the twin in `torch.nn`, whose state loads strictly."""
    twin.load_state_dict(op.state_dict(), strict=True)
    found = by_passes(op, x, {})
    leaf = x.detach().requires_grad_()
    y = twin(leaf)
    parameters = dict(twin.named_parameters())
    grads = torch.autograd.grad(y, [leaf, *parameters.values()], gradient(y, 5))
    expected = {"y": y.detach(), **dict(zip(("dx", *(f"d{n}" for n in parameters)), grads, strict=True))}
    chosen = tuple(expected) if names is None else tuple(names)
    assert_bitwise_equal({n: found[n] for n in chosen}, {n: expected[n] for n in chosen})
