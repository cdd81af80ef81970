"""State dictionaries of models that are sharded over processes: whole, of one process, or with DTensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from torch import Tensor, nn

from ..errors import InputError
from ..group import ParameterShard


def unshard(model: nn.Module) -> dict[str, Tensor]:
    """The state dictionary of the whole model, the same in every process; all of them must call this."""
    shards = _shards(model)
    state = {name: _full(value) for name, value in model.state_dict().items()}
    return {name: shards[name].whole(value) if name in shards else value for name, value in state.items()}


def shard(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This process's shards of a whole state dictionary: what `model.load_state_dict` takes, strictly.

    Args:
        model: the divided model.
        state: whole tensors by name, or DTensors of them, which all processes must then have.

    Raises:
        InputError: (SF101) for a tensor that is not of the whole's shape.
    """
    shards = _shards(model)
    own: dict[str, Tensor] = {}
    for name, value in state.items():
        whole = _full(value)
        shard = shards.get(name)
        try:
            own[name] = whole if shard is None else shard.of(whole)
        except InputError as error:
            error.path = name
            raise
    return own


def dtensors(model: nn.Module) -> dict[str, Tensor]:
    """The state dictionary with DTensors of what is divided, for `torch.distributed.checkpoint`.

    Each holds a contiguous part of the whole, whatever parts the processes compute with, so that a checkpoint can be
    read by any number of processes. `dcp.load` fills them in place: `model.load_state_dict(shard(model, state))` then.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    shards, meshes = _shards(model), dict[tuple[str, str], Any]()
    found: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        shard = shards.get(name)
        if shard is None:
            found[name] = value
            continue
        value = _full(value)
        if len(shard.parts) > 1:
            value = shard.whole(value).chunk(shard.group.size, shard.dim)[shard.group.rank].contiguous()
        key = shard.group.name, value.device.type
        if key not in meshes:
            meshes[key] = DeviceMesh.from_group(shard.group.process_group, value.device.type)
        found[name] = DTensor.from_local(value, meshes[key], [Shard(shard.dim)], run_check=False)  # pyright: ignore[reportUnknownMemberType]
    return found


def _shards(model: nn.Module) -> dict[str, ParameterShard]:
    modules = cast(Iterable[tuple[str, Any]], model.named_modules(remove_duplicate=False))
    held: list[tuple[str, Mapping[str, ParameterShard]]] = [(path, getattr(m, "shards", {})) for path, m in modules]
    return {f"{path}.{name}".lstrip("."): shard for path, shards in held for name, shard in shards.items()}


def _full(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value
