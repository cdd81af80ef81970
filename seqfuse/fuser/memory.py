"""The bytes that a plan keeps for its backward, measured on fake tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..env import Env
from ..settings import fusing
from .fake import autocasting, faking, placed


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes kept for backward (storages counted once, parameters left out) and FLOPs of the forward pass.

    Of what is planned: a module that runs through its own `__call__` is not run, and not counted.
    """

    saved: int
    saved_unfused: int
    flops: int


Run = Callable[[Tensor, dict[str, Tensor], bool], None]
Shape = Sequence[int]


def measure(
    run: Run, x: Tensor, channels: dict[str, Tensor], env: Env, place: torch.device, parameters: Sequence[Tensor]
) -> Memory | str:
    """Run the planned part of a sequence on fake tensors, as planned and unfused; the reason if it cannot run so.

    Gradients, autocast and the dtype of x are those of `env`, whatever they are where the result is asked for. The
    device is `place`, where the parameters are, also where the plan is for a machine that is not here: on fake tensors
    a Triton fusion makes what it saves and launches nothing. Parameters are real, or fake ones of the mode that is on.
    """
    if env.autocast is not None and (env.device != place.type or not torch.amp.is_autocast_available(place.type)):
        return f"autocast on {env.device} saves other tensors than on {place.type}, where the parameters are"
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils import flop_counter

    count: Any = flop_counter.sdpa_flop_count  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

    def attention(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
        return int(count(q, k, v))

    # Torch has a formula for each of its kernels of attention but this one.
    extra = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention}

    # Real ones stay real here, and are not among the fake tensors that are counted.
    owned = {p.untyped_storage()._cdata for p in parameters if isinstance(p, FakeTensor)}  # pyright: ignore[reportPrivateUsage]

    def once(planned: bool) -> tuple[int, int]:
        kept: dict[int, torch.UntypedStorage] = {}  # held, so that no later one takes the place of one that went

        def pack(t: Tensor) -> Tensor:
            storage = t.untyped_storage()
            if isinstance(t, FakeTensor) and storage._cdata not in owned:  # pyright: ignore[reportPrivateUsage]
                kept[storage._cdata] = storage  # pyright: ignore[reportPrivateUsage]
            return t

        with faking() as mode, flop_counter.FlopCounterMode(display=False, custom_mapping=extra) as counter:
            given = {name: placed(mode.from_tensor(value), place, value.dtype) for name, value in channels.items()}
            entering = placed(mode.from_tensor(x), place, env.dtype if x.is_floating_point() else x.dtype)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                run(entering, given, planned)
        return sum(storage.nbytes() for storage in kept.values()), counter.get_total_flops()

    try:
        with torch.set_grad_enabled(env.grad), autocasting(env, place):
            with fusing(on_error="raise"):
                saved, _ = once(True)
            with fusing(False):
                unfused, flops = once(False)  # a kernel's own the counter does not see
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return Memory(saved, unfused, flops)
