"""State dictionaries of models that are sharded over processes: whole, of one process, or with DTensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from torch import Tensor, nn

from ..errors import InputError
from ..group import ParameterShard


def unshard(model: nn.Module) -> dict[str, Tensor]:
    """The full state dictionary, the same in every process; collective, so all processes must call it.

    Raises:
        InputError: (SF106) for a sharded parameter that a parametrization has replaced since.
    """
    shards = shards_in(model)
    state = {name: _full(value) for name, value in model.state_dict().items()}
    return {name: shards[name].whole(value) if name in shards else value for name, value in state.items()}


def shard(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The shards of this process, from a full state dictionary, for `model.load_state_dict`.

    Args:
        model: the parallelized model.
        state: full tensors by name, or DTensors, which all processes must then have.

    Raises:
        InputError: (SF101) for a tensor with another shape than the full one; (SF106) as in `unshard`.
    """
    shards = shards_in(model)
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
    """The state dictionary with sharded parameters as DTensors, for `torch.distributed.checkpoint`.

    Each is a contiguous shard of the full tensor, independent of the shards used for computing, so that any number of
    processes can load the checkpoint. After `dcp.load`, which fills them in place, call
    `model.load_state_dict(shard(model, state))`.

    Raises:
        InputError: (SF106) as in `unshard`.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    shards, meshes = shards_in(model), dict[tuple[str, str], Any]()
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


def shards_in(model: nn.Module) -> dict[str, ParameterShard]:
    """How the sharded parameters of a model are sharded, by all their names."""
    return {f"{path}.{name}".lstrip("."): shard for path, _, name, shard in sharded_parameters(model)}


def sharded_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, ParameterShard]]:
    """The sharded parameters of a model, by all their names: path and module, name in it, and shard.

    Raises:
        InputError: (SF106) for a parameter that a parametrization has replaced since.
    """
    for path, module in cast(Iterable[tuple[str, Any]], model.named_modules(remove_duplicate=False)):
        for name, shard in getattr(module, "shards", {}).items():
            if name not in module._parameters:
                message = f"its {name} is computed from other parameters, such as by a parametrization, not sharded"
                hint = "remove the parametrization, or divide the model without it"
                raise InputError(message, code="SF106", operation=type(module).__name__, path=path, hint=hint)
            yield path, module, name, shard


def _full(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value
