"""Stages of a pipeline for the schedules of torch."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..errors import InputError
from ..run.sequential import Sequential
from .collectives import staged
from .remote_tensor import blank
from .staged import StagedFuser


class StageModule(nn.Module):
    """One stage as a module of its own: what enters it to what leaves it, the chain's tensor first, then channels.

    Args:
        fuser: that of the model.
        stage: which one.
        operations: those in it.
    """

    def __init__(self, fuser: StagedFuser, stage: int, operations: list[nn.Module]) -> None:
        super().__init__()
        self.operations = nn.ModuleList(operations)
        self.run = fuser.run_stage
        self.stage = stage

    def forward(self, *tensors: Tensor, **channels: Tensor) -> Any:
        """The tensor that leaves, or a tuple where channels do, too."""
        out = self.run(self.stage, [*tensors], channels)
        return out[0] if len(out) == 1 else tuple(out)


def stages(model: Sequential, x: Tensor, microbatches: int = 1, **channels: Tensor) -> list[Any]:
    """This rank's stages as `torch.distributed.pipelining.PipelineStage`s, for `ScheduleGPipe` and all the others.

    Their shapes are those the clip infers. A schedule gives what one process gives that runs one micro-batch after
    another, with the same dropout masks where all ranks' generators are in the same state.

    Args:
        model: the model in stages; `stages=` of `pipeline` as many as the schedule wants.
        x: a whole batch, or one like it, on any device.
        microbatches: into how many equal parts the schedule cuts it.
        channels: the public extra inputs, by channel name.

    Raises:
        InputError: (SF101) for a batch that cannot be cut evenly.
    """
    from torch.distributed.pipelining import PipelineStage

    fuser = staged(model)
    if not x.ndim or microbatches < 1 or x.shape[0] % microbatches:
        raise InputError(f"a batch of shape {tuple(x.shape)} has no {microbatches} equal parts", code="SF101")
    first, *_ = x.chunk(microbatches)
    parts = {name: value.chunk(microbatches)[0] for name, value in channels.items()}
    fuser.forget_draws()
    placement = fuser.placement
    own = (p.device for p in model.parameters() if not p.is_meta)
    device = next(own, x.device)
    shapes = None if placement.tells else fuser.infer(first, parts)
    made: list[Any] = []
    for stage in range(placement.stages):
        if placement.own(stage):
            module = StageModule(fuser, stage, fuser.operations(stage))
            known: dict[str, Any] = {}
            if shapes is not None:
                known = {"input_args": _metas(shapes[stage]), "output_args": _metas(shapes[stage + 1])}
            made.append(PipelineStage(module, stage, placement.stages, device, group=placement.group, **known))
    return made


def _metas(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    return tuple(blank(t, t.requires_grad) for t in tensors)
