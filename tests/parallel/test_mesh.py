"""Two dimensions of a mesh: shards of the model along one, of the batch along the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from seqfuse import parallel
from tests.processes import Facts

from .sharded import draw, results, share_of
from .test_parallelize import PLAN, stack


def full(t: Any) -> Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def check(wrap: Callable[[nn.Module, Any], nn.Module], sequence_dim: int | None = None) -> nn.Module:
    """Gradients equal those of one process with all of the model and all of the batch."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = stack()
    model = parallel.parallelize(stack(), mesh["tp"], PLAN, sequence_dim=sequence_dim)
    wrapped = wrap(model, mesh["dp"])
    x, dy = draw(4, 8, 16), draw(4, 8, 16, seed=7)

    def own(t: Tensor) -> Tensor:
        t = t.chunk(2)[mesh.get_local_rank("dp")]
        return t if sequence_dim is None else t.chunk(2, sequence_dim)[mesh.get_local_rank("tp")]

    for _ in range(2):  # a wrapper may do something else the second time
        y, grads = results(wrapped, own(x), own(dy))
    expected_y, expected = results(whole, x, dy)
    torch.testing.assert_close(y, own(expected_y))
    grads = {name.removeprefix("module."): grad for name, grad in grads.items()}
    assert grads.keys() == expected.keys()
    for name, grad in expected.items():
        # The average over the batch's processes is half the sum.
        wanted = own(grad) if name == "x" else share_of(model, name, grad) / 2
        torch.testing.assert_close(full(grads[name]), wanted, msg=lambda m, n=name: f"{n}: {m}")
    return model


def data_parallel() -> None:
    for dim in (None, -2):
        check(lambda model, dp: DistributedDataParallel(model, process_group=dp.get_group()), dim)


def sharded_by_layers(model: nn.Module, dp: Any) -> nn.Module:
    for layer in model:
        fully_shard(layer, mesh=dp)
    return fully_shard(model, mesh=dp)


def fully_sharded() -> None:
    for dim in (None, -2):
        model = check(sharded_by_layers, dim)
        state = stack().state_dict()
        gathered = parallel.unshard(model)
        assert all(torch.equal(gathered[name], value) for name, value in state.items())
        for p in model.parameters():
            torch.nn.init.zeros_(p)
        set_model_state_dict(model, parallel.shard(model, state), options=StateDictOptions(full_state_dict=True))
        gathered = parallel.unshard(model)
        assert all(torch.equal(gathered[name], value) for name, value in state.items())


test_in_several_processes = Facts({4: [data_parallel, fully_sharded]}).test
