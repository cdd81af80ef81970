"""State dictionaries of models that are divided over processes: whole, a process's share, or as DTensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from torch import Tensor, nn

from ..errors import InputError
from ..group import Share


def unshard(model: nn.Module) -> dict[str, Tensor]:
    """The state dictionary of the whole model, the same in every process; all of them must call this."""
    shares = _shares(model)
    state = {name: _full(value) for name, value in model.state_dict().items()}
    return {name: shares[name].whole(value) if name in shares else value for name, value in state.items()}


def shard(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This process's share of a whole state dictionary: what `model.load_state_dict` takes, strictly.

    Args:
        model: the divided model.
        state: whole tensors by name, or DTensors of them, which all processes must then have.

    Raises:
        InputError: (SF101) for a tensor that is not of the whole's shape.
    """
    shares = _shares(model)
    own: dict[str, Tensor] = {}
    for name, value in state.items():
        whole = _full(value)
        share = shares.get(name)
        try:
            own[name] = whole if share is None else share.of(whole)
        except InputError as error:
            error.hint = f"in {name!r}"
            raise
    return own


def dtensors(model: nn.Module) -> dict[str, Tensor]:
    """The state dictionary with DTensors of what is divided, for `torch.distributed.checkpoint`.

    Each holds a contiguous part of the whole, whatever parts the processes compute with, so that a checkpoint can be
    read by any number of processes. `dcp.load` fills them in place: `model.load_state_dict(shard(model, state))` then.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    shares, meshes = _shares(model), dict[tuple[str, str], Any]()
    found: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        share = shares.get(name)
        if share is None:
            found[name] = value
            continue
        value = _full(value)
        if len(share.parts) > 1:
            value = share.whole(value).chunk(share.group.size, share.dim)[share.group.rank].contiguous()
        key = share.group.name, value.device.type
        if key not in meshes:
            meshes[key] = DeviceMesh.from_group(share.group.process_group, value.device.type)
        found[name] = DTensor.from_local(value, meshes[key], [Shard(share.dim)], run_check=False)  # pyright: ignore[reportUnknownMemberType]
    return found


def _shares(model: nn.Module) -> dict[str, Share]:
    modules = cast(Iterable[tuple[str, Any]], model.named_modules(remove_duplicate=False))
    held: list[tuple[str, Mapping[str, Share]]] = [(path, getattr(m, "shares", {})) for path, m in modules]
    return {f"{path}.{name}".lstrip("."): share for path, shares in held for name, share in shares.items()}


def _full(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value
