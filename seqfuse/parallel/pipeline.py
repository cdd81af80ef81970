"""Pipeline parallel: a model in stages, run by the same script on every rank, or by torch's schedules."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import InputError, PlanError, meant
from ..operation import UnfusedOperation
from ..plan import Node, flatten, located
from ..run import Sequential, install
from .collectives import staged
from .remote_tensor import blank
from .staged import StagedFuser
from .transfer import Boundary, Placement


def pipeline(
    model: Sequential,
    mesh: DeviceMesh,
    *,
    stages: int | Sequence[str] | None = None,
    shapes: Literal["infer", "broadcast"] = "infer",
) -> Sequential:
    """Cut a model into pipeline stages, in place; each rank keeps the parameters of its stages.

    Every rank runs the same script and calls the whole model: `loss = f(model(x)); loss.backward(); optimizer.step()`.
    A stage of another rank has its parameters on `meta`, runs no kernels and only propagates shape, dtype and
    `requires_grad`. `Boundary` operations send activations and open channels forward and gradients back; fusions do not
    cross them. The output is real on the rank of the last stage; on other ranks it is a `meta` tensor, and reading its
    values raises `StateError` (SF508). Results equal those of one process, including dropout masks if all ranks have
    the same generator state.

    Args:
        model: the model, the same on every rank.
        mesh: a one-dimensional mesh, such as `mesh["pp"]`; stages are assigned to its ranks in turn.
        stages: number of stages, cut to balance parameters, or the name of the first module of each stage but the
            first; default one per rank.
        shapes: whether other ranks infer the shapes of a stage's output, or its rank broadcasts them in each call, as
            needed if shapes depend on values. Under autocast they are broadcast.

    Raises:
        InputError: (SF106) for an argument of another type.
        PlanError: (SF202) if the model cannot be cut there, or a parameter would be on two ranks.
    """
    _check_arguments(model, mesh, stages, shapes)
    if mesh.ndim != 1:
        raise PlanError(f"a pipeline takes one dimension of a mesh, not {mesh.ndim}", code="SF202", hint='mesh["pp"]')
    nodes = flatten(model)
    if any(isinstance(node.operation, Boundary) for node in nodes):
        raise PlanError("the model is in stages already", code="SF202")
    ranks: tuple[int, ...] = tuple(mesh.mesh.flatten().tolist())  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType, reportUnknownVariableType]
    cuts = _begins(model, nodes, len(ranks) if stages is None else stages)
    count = len(cuts) + 1
    if count % len(ranks):
        raise PlanError(f"{count} stages cannot be dealt evenly to {len(ranks)} ranks", code="SF202")
    name = (mesh.mesh_dim_names or ("pipeline",))[0]
    placement = Placement(mesh.get_group(), name, ranks, mesh.get_local_rank(), count, shapes == "broadcast")
    elsewhere = _others(nodes, [*cuts.values()], placement)
    names = [f"boundary{stage}" for stage in range(1, count)]
    taken = {name for name in names for module in model.modules() if name in module._modules}  # pyright: ignore[reportPrivateUsage]
    if taken:
        raise PlanError(f"modules are called {sorted(taken)}, as boundaries are", code="SF202")
    for stage, (key, path) in enumerate(zip(names, cuts, strict=True), 1):
        above, _, before = path.rpartition(".")
        _insert(model.get_submodule(above), before, key, Boundary(stage, placement))
    _clip(model, elsewhere)
    install(model, StagedFuser(model, model.fusions, placement))
    return model


def stages(model: Sequential, x: Tensor, microbatches: int = 1, **channels: Tensor) -> list[Any]:
    """The stages of this rank as `torch.distributed.pipelining.PipelineStage`s, for torch's schedules.

    Shapes are inferred as in `pipeline`. Results equal those of one process that runs the micro-batches in sequence,
    including dropout masks if all ranks have the same generator state.

    Args:
        model: the pipelined model, with as many stages as the schedule needs.
        x: a full batch, or a tensor like it, on any device.
        microbatches: number of micro-batches of the schedule.
        channels: the public extra inputs, by channel name.

    Raises:
        InputError: (SF101) if `microbatches` does not divide the batch.
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
    inferred = None if placement.tells else fuser.infer(first, parts)
    shapes = [tuple(blank(t, t.requires_grad) for t in tensors) for tensors in inferred or ()]
    made: list[Any] = []
    for stage in range(placement.stages):
        if placement.own(stage):
            module = StageModule(fuser, stage, fuser.operations(stage))
            known: dict[str, Any] = {}
            if shapes:
                known = {"input_args": shapes[stage], "output_args": shapes[stage + 1]}
            made.append(PipelineStage(module, stage, placement.stages, device, group=placement.group, **known))
    return made


class StageModule(nn.Module):
    """One stage as a module: maps the tensors that enter it to those that leave it, the main one first."""

    def __init__(self, fuser: StagedFuser, stage: int, operations: list[nn.Module]) -> None:
        super().__init__()
        self.operations = nn.ModuleList(operations)
        self.run = fuser.run_stage
        self.stage = stage

    def forward(self, *tensors: Tensor, **channels: Tensor) -> Any:
        """The stage's output, or a tuple if channels leave it, too."""
        out = self.run(self.stage, [*tensors], channels)
        return out[0] if len(out) == 1 else tuple(out)


def _check_arguments(model: Any, mesh: Any, stages: Any, shapes: Any) -> None:
    if not isinstance(model, Sequential):
        hint = "sf.nn.from_torch and from_huggingface make one of models that they know"
        raise InputError(f"pipeline cuts a seqfuse.Sequential, got {type(model).__name__}", code="SF106", hint=hint)
    if not isinstance(mesh, DeviceMesh):
        hint = 'such as init_device_mesh("cpu", (ranks,))'
        raise InputError(f"pipeline takes a DeviceMesh, got {type(mesh).__name__}", code="SF106", hint=hint)
    names = isinstance(stages, Sequence) and all(isinstance(name, str) for name in cast("Sequence[Any]", stages))
    if isinstance(stages, str) or not (stages is None or isinstance(stages, int) or names):
        message = "stages must be a number, or a list of the names of the modules that stages begin at, "
        raise InputError(f"{message}got {stages!r}", code="SF106", hint='such as ["2"]')
    if shapes not in ("infer", "broadcast"):
        raise InputError(f'shapes must be "infer" or "broadcast", not {shapes!r}', code="SF106")


def _insert(container: nn.Module, before: str, key: str, module: nn.Module) -> None:
    children = container._modules  # pyright: ignore[reportPrivateUsage]
    after = [*children][[*children].index(before) :]
    container.add_module(key, module)
    for name in after:
        children[name] = children.pop(name)


def _others(nodes: Sequence[Node], cuts: Sequence[int], placement: Placement) -> list[nn.Module]:
    """The modules in stages of other ranks."""
    stage_of: dict[int, int] = {}
    modules: dict[nn.Module, None] = {}
    for position, node in enumerate(nodes):
        stage = bisect.bisect_right(cuts, position)
        for owner in dict.fromkeys([*node.operation.modules(), *(owner for owner, _ in node.slots.values())]):
            for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):  # pyright: ignore[reportPrivateUsage]
                first = stage if tensor is None else stage_of.setdefault(id(tensor), stage)
                if placement.rank(first) != placement.rank(stage):
                    message = f"its {name} is in stages {first} and {stage}, which are on different ranks"
                    hint = "share it within one stage"
                    raise PlanError(message, code="SF202", hint=hint, **located(nodes, position))
            if not placement.own(stage):
                modules[owner] = None
    return [*modules]


def _clip(model: Sequential, elsewhere: Sequence[nn.Module]) -> None:
    """Move tensors of other ranks' stages to `meta`, and exclude them from state dictionaries."""
    absent: set[int] = set()
    for owner in elsewhere:
        for tensors in (owner._parameters, owner._buffers):  # pyright: ignore[reportPrivateUsage]
            for name, tensor in tensors.items():
                if tensor is not None:
                    meta: Tensor = torch.empty_like(tensor, device="meta")
                    if isinstance(tensor, nn.Parameter):
                        meta = nn.Parameter(meta, requires_grad=tensor.requires_grad)
                    tensors[name] = meta  # pyright: ignore[reportArgumentType]
                    absent.add(id(meta))
    both = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    _own_state_only(model, frozenset(name for name, tensor in both if id(tensor) in absent))


def _own_state_only(model: nn.Module, absent: frozenset[str]) -> None:
    prefixes: list[str] = []

    def saved(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in absent:
            state.pop(prefix + name, None)

    def loading(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        prefixes.append(prefix)
        for name in absent:
            state.pop(prefix + name, None)

    def loaded(module: nn.Module, incompatible: Any) -> None:
        theirs = {prefix + name for prefix in prefixes for name in absent}
        prefixes.clear()
        incompatible.missing_keys[:] = [key for key in incompatible.missing_keys if key not in theirs]

    root: Any = model
    root.register_state_dict_post_hook(saved)
    root.register_load_state_dict_pre_hook(loading)
    root.register_load_state_dict_post_hook(loaded)


def _begins(root: nn.Module, nodes: Sequence[Node], stages: int | Sequence[str]) -> dict[str, int]:
    """Names and positions of the modules at which the second and later stages begin."""
    places = _places(root, nodes)
    if isinstance(stages, int):
        return _balanced(nodes, places, stages)
    for name in stages:
        if name not in places:
            inside = next((node for node in nodes if node.eager and name.startswith(f"{node.path}.")), None)
            why = f": {inside.path!r} runs through its own call ({inside.eager})" if inside else ""
            hint = meant(name, places)
            raise PlanError(f"no stage can begin at {name!r}{why}", code="SF202", hint=hint)
    at = [places[name] for name in stages]
    for name, position, before in zip(stages, at, [0, *at], strict=False):
        if position <= before:
            message = f"stages begin in the order of the sequence, and each has operations; {name!r} does not fit"
            raise PlanError(message, code="SF202", **located(nodes, position))
    return dict(zip(stages, at, strict=True))


def _places(root: nn.Module, nodes: Sequence[Node]) -> dict[str, int]:
    """Names and positions of the modules at which a stage can begin; an outer module comes before those inside it."""
    first: dict[str, int] = {}
    for position, node in enumerate(nodes):
        parts = node.path.split(".")
        for depth in range(1, len(parts) + 1):
            first.setdefault(".".join(parts[:depth]), position)
    places: dict[str, int] = {}
    for name, _ in cast(Iterable[tuple[str, Any]], root.named_modules(remove_duplicate=False)):
        above, _, _ = name.rpartition(".")
        # The `expand` of other operations would not return the boundary.
        if name in first and isinstance(root.get_submodule(above), nn.Sequential):
            places[name] = first[name]
    return places


def _balanced(nodes: Sequence[Node], places: dict[str, int], stages: int) -> dict[str, int]:
    """Begin stages where only one tensor crosses, minimizing the number of parameters in the largest stage."""
    names: dict[int, str] = {}
    for name, position in places.items():
        if position and not nodes[position].crossing:
            names.setdefault(position, name)
    at = [0, *sorted(names), len(nodes)]
    if stages < 1:
        raise PlanError(f"stages must be at least 1, got {stages}", code="SF202")
    if stages > len(at) - 1:
        message = f"a sequence of {len(at) - 1} parts that a single tensor leaves cannot be cut into {stages} stages"
        raise PlanError(message, code="SF202", hint="name the modules that stages begin at, inside of residuals too")
    weight = [sum(_weight(node) for node in nodes[a:b]) for a, b in itertools.pairwise(at)]
    ends = [0]
    for total in weight:
        ends.append(ends[-1] + total)
    # best[n]: with the first n parts, the smallest possible size of the largest stage, and where its stages begin.
    best = {n: (ends[n], list[int]()) for n in range(1, len(at))}
    for stage in range(2, stages + 1):
        best = {
            n: min((max(best[k][0], ends[n] - ends[k]), [*best[k][1], k]) for k in range(stage - 1, n))
            for n in range(stage, len(at))
        }
    return {names[at[k]]: at[k] for k in best[len(at) - 1][1]}


def _weight(node: Node) -> int:
    if isinstance(node.operation, UnfusedOperation) and node.fusable:
        return 1 + sum(getattr(owner, name).numel() for owner, name in node.slots.values())
    return 1 + sum(p.numel() for p in node.operation.parameters())
