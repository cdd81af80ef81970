"""Products with an epilogue, beside cuBLAS and the best separate kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqfuse.kernels import gemm
from seqfuse.kernels import pointwise as k
from seqfuse.kernels.activations import ACTIVATIONS

from .case import Case, Contender, Inputs, Run
from .draw import normal
from .peers import compiled
from .pointwise import EAGER, gated
from .sizes import MAIN, Model, Sizes


def cases(sizes: Sizes) -> Iterator[Case]:
    """The first product of each model's feed-forward block, and the gradient that its second hands back."""
    for model in sizes.models:
        for rank, tokens in enumerate(sizes.tokens):
            late = (0 if model.name in MAIN else 2) + 2 * (rank > 0)
            yield from (_gated_cases if model.llama else _plain_cases)(sizes, model, tokens, 1 + late)


def _drawn(sizes: Sizes, rows_of: dict[str, int], fixed: dict[str, tuple[int, ...]]) -> Any:
    """Weights are drawn as layers have them, so that results are of the size of what enters."""

    def make(rows: int, seed: int) -> Inputs:
        shapes = {name: (rows, n) for name, n in rows_of.items()} | fixed
        found = normal(shapes, seed, sizes.device, sizes.dtype)
        for name, shape in fixed.items():
            found[name] = found[name].mul_(shape[-1] ** -0.5) if len(shape) == 2 else found[name].sub_(1)
        return found

    return make


def _grads(function: Any) -> Contender:
    """What is timed is `function` itself: no autograd between."""

    def prepare(inputs: Inputs) -> Run:
        def call() -> Any:
            with torch.no_grad():
                return function(**inputs)

        return call

    return Contender(prepare)


def _plain_cases(sizes: Sizes, model: Model, M: int, priority: int) -> Iterator[Case]:
    H, N = model.H, model.F
    act, own = EAGER["gelu"], ACTIVATIONS["gelu"]
    common: dict[str, Any] = {
        "dtype": sizes.dtype, "rows": M, "checked_rows": sizes.checked_rows, "flops": 2.0 * M * H * N,
        "priority": priority,
    }  # fmt: skip

    def eager(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        z = F.linear(x, weight, bias)
        return act(z), z

    def separate(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return k.pointwise(F.linear(x, weight), k.Chain(k.bias(), k.store(), k.act(own)), (bias,))

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return gemm.linear(x, weight, bias, act=own, store_pre=True)

    yield Case(
        "Linear + bias + activation", f"{model.name} {M} x {H} x {N}, gelu",
        make=_drawn(sizes, {"x": H}, {"weight": (N, H), "bias": (N,)}), **common,
        contenders=_all(sizes, ours, eager, separate), shape={"M": M, "K": H, "N": N},
    )  # fmt: skip

    def back_eager(dy: Tensor, z: Tensor, weight: Tensor) -> Any:
        dz = torch.ops.aten.gelu_backward.default(dy @ weight, z)
        return dz, dz.sum(0)

    def back_separate(dy: Tensor, z: Tensor, weight: Tensor) -> Any:
        return k.pointwise(dy @ weight, k.Chain(k.dact(own), k.column_sum()), (z,))

    def back(dy: Tensor, z: Tensor, weight: Tensor) -> Any:
        return gemm.linear_dgrad(dy, weight, act=own, t=z, sums=True)[:2]

    yield Case(
        "dgrad + dact + dbias", f"{model.name} {M} x {H} x {N}, gelu",
        make=_drawn(sizes, {"dy": H, "z": N}, {"weight": (H, N)}), **common,
        contenders=_all(sizes, back, back_eager, back_separate), shape={"M": M, "K": H, "N": N},
    )  # fmt: skip


def _gated_cases(sizes: Sizes, model: Model, M: int, priority: int) -> Iterator[Case]:
    H, N, own = model.H, model.F, ACTIVATIONS["silu"]
    unit = gated("silu")
    common: dict[str, Any] = {
        "dtype": sizes.dtype, "rows": M, "checked_rows": sizes.checked_rows, "priority": priority,
    }  # fmt: skip

    def eager(x: Tensor, weight: Tensor) -> Any:
        z = F.linear(x, weight)
        return unit(z), z

    def separate(x: Tensor, weight: Tensor) -> Any:
        z = F.linear(x, weight)
        return k.pointwise(z, k.Chain(k.gated(own)))[0], z

    def ours(x: Tensor, weight: Tensor) -> Any:
        return gemm.linear_gated(x, weight, act=own, store_pre=True)

    yield Case(
        "Linear + bias + activation", f"{model.name} {M} x {H} x 2*{N}, swiglu", flops=4.0 * M * H * N,
        make=_drawn(sizes, {"x": H}, {"weight": (2 * N, H)}), **common,
        contenders=_all(sizes, ours, eager, separate), shape={"M": M, "K": H, "N": 2 * N},
    )  # fmt: skip

    def back_eager(dy: Tensor, z: Tensor, weight: Tensor) -> Any:
        dh = dy @ weight
        gate, up = z.chunk(2, -1)
        return (torch.cat((torch.ops.aten.silu_backward.default(dh * up, gate), dh * F.silu(gate)), -1),)

    def back_separate(dy: Tensor, z: Tensor, weight: Tensor) -> Any:
        return k.pointwise(dy @ weight, k.Chain(k.dgated(own)), (z,))

    def back(dy: Tensor, z: Tensor, weight: Tensor) -> Any:
        return gemm.linear_dgrad_gated(dy, weight, act=own, t=z)[:1]

    yield Case(
        "dgrad + dact + dbias", f"{model.name} {M} x {H} x {N}, swiglu", flops=2.0 * M * H * N,
        make=_drawn(sizes, {"dy": H, "z": 2 * N}, {"weight": (H, N)}), **common,
        contenders=_all(sizes, back, back_eager, back_separate), shape={"M": M, "K": H, "N": N},
    )  # fmt: skip


def _all(sizes: Sizes, ours: Any, eager: Any, separate: Any) -> dict[str, Contender]:
    found = {"seqfuse": _grads(ours), "eager": _grads(eager), "cuBLAS + our kernel": _grads(separate)}
    if sizes.compile_modes:
        found["compile"] = _grads(compiled(eager, sizes.compile_modes[0]))
    return found
