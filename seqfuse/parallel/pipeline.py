"""A model in stages on many ranks, run by one script on all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..env import any_autocast
from ..errors import InputError, PlanError, StateError
from ..fuser.inputs import validate
from ..fuser.items import flatten
from ..fuser.listing import Listing, Region
from ..fuser.reference import run_alone, transformed, walk_reference
from ..fuser.run import Fuser
from ..fuser.sequential import Sequential
from .cuts import begins
from .elsewhere import Elsewhere
from .transfer import Boundary, Placement, reaches, through


def pipeline(
    model: Sequential,
    mesh: DeviceMesh,
    *,
    stages: int | Sequence[str] | None = None,
    shapes: Literal["infer", "broadcast"] = "infer",
) -> Sequential:
    """Cut a model into stages, in place, and keep on each rank the parameters of its own stages.

    One script runs on every rank and calls the whole model: `loss = f(model(x)); loss.backward(); optimizer.step()`. A
    stage of another rank has its parameters on `meta`, launches nothing and hands on shape, dtype and `requires_grad`.
    `Boundary` operations, which nothing fuses across, send tensors and the channels that cross, and their gradients
    back. The output is real on the rank of the last stage and `Elsewhere` on the others. Numbers are those of one
    process, dropout masks too where all ranks' generators are in the same state.

    Args:
        model: the same on every rank, on its device.
        mesh: one dimension of a mesh of ranks, such as `mesh["pp"]`; stages go to its ranks in turn.
        stages: how many, cut so that none has many parameters, or the names of the modules that all but the first
            begin at; by default one for each rank.
        shapes: whether what leaves a stage is inferred on the other ranks, or told by its rank in each call, which a
            module whose output's shape depends on numbers needs. Under autocast it is told.

    Raises:
        PlanError: (SF202) where it cannot be cut so, or a parameter would be on two ranks.
    """
    if mesh.ndim != 1:
        raise PlanError(f"a pipeline takes one dimension of a mesh, not {mesh.ndim}", code="SF202", hint='mesh["pp"]')
    if shapes not in ("infer", "broadcast"):
        raise InputError(f'shapes must be "infer" or "broadcast", not {shapes!r}', code="SF106")
    items = flatten(model)
    if any(isinstance(item.operation, Boundary) for item in items):
        raise PlanError("the model is in stages already", code="SF202")
    ranks: tuple[int, ...] = tuple(mesh.mesh.flatten().tolist())
    names = begins(model, items, len(ranks) if stages is None else stages)
    count = len(names) + 1
    if count % len(ranks):
        raise PlanError(f"{count} stages cannot be dealt evenly to {len(ranks)} ranks", code="SF202")
    name = (mesh.mesh_dim_names or ("pipeline",))[0]
    placement = Placement(mesh.get_group(), name, ranks, mesh.get_local_rank(), count, shapes == "broadcast")
    for stage, path in enumerate(names, 1):
        above, _, key = path.rpartition(".")
        _insert_before(model.get_submodule(above), key, f"boundary{stage}", Boundary(stage, placement))
    _clip(model, placement)
    model._fuser = StagedFuser(model, model.fusions, placement)  # pyright: ignore[reportPrivateUsage]
    return model


def _insert_before(container: nn.Module, key: str, new: str, module: nn.Module) -> None:
    children = [*container._modules.items()]  # pyright: ignore[reportPrivateUsage]
    if new in container._modules:  # pyright: ignore[reportPrivateUsage]
        raise PlanError(f"a module is called {new!r}, which boundaries are called", code="SF202")
    at = [k for k, _ in children].index(key)
    container._modules.clear()  # pyright: ignore[reportPrivateUsage]
    for name, child in (*children[:at], (new, module), *children[at:]):
        container.add_module(name, child)  # pyright: ignore[reportArgumentType]


def _clip(model: nn.Module, placement: Placement) -> None:
    """Put what is not this rank's own on `meta`, and leave it out of state dictionaries."""
    stage, stage_of = 0, dict[int, int]()
    owners: list[list[nn.Module]] = [[] for _ in range(placement.stages)]
    for item in flatten(model):
        if isinstance(item.operation, Boundary):
            stage = item.operation.stage
        for owner in dict.fromkeys([*item.operation.modules(), *(owner for owner, _ in item.slots.values())]):
            owners[stage].append(owner)
            for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):  # pyright: ignore[reportPrivateUsage]
                first = stage if tensor is None else stage_of.setdefault(id(tensor), stage)
                if placement.rank(first) != placement.rank(stage):
                    message = f"its {name} is in stages {first} and {stage} too, which are on different ranks"
                    raise PlanError(message, code="SF202", operation=item.name, hint="share it within one stage")
    absent: set[int] = set()
    for stage, several in enumerate(owners):
        for owner in several if not placement.own(stage) else ():
            for tensors in (owner._parameters, owner._buffers):  # pyright: ignore[reportPrivateUsage]
                for name, tensor in tensors.items():
                    if tensor is None or id(tensor) in absent:
                        continue
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

    model.register_state_dict_post_hook(saved)
    model.register_load_state_dict_pre_hook(loading)
    model.register_load_state_dict_post_hook(loaded)


class StagedFuser(Fuser):
    """Runs a list in stages: this rank's own as ever, those of others on shapes alone."""

    def __init__(self, root: Sequential, fusions: Any, placement: Placement) -> None:
        super().__init__(root, fusions)
        self.placement = placement
        self.device: torch.device | None = None  # of the latest input
        self._latest: tuple[Listing, list[list[Region | int]], list[Boundary], list[list[str]]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "placement": self.placement, "device": self.device, "_latest": None}

    def __call__(self, x: Tensor, **channels: Tensor) -> Any:
        """Run the list; every rank gets the same input."""
        if torch.compiler.is_compiling() or transformed() or x.__class__ not in (Tensor, nn.Parameter) or x.is_meta:
            message = f"a model in stages takes plain tensors on every rank, neither compiled nor transformed, not {x!r}"
            raise InputError(message, code="SF105", hint="the input of the first stage is the same on every rank")
        self.device = x.device
        return super().__call__(x, **channels)

    def stages(self, listing: Listing) -> tuple[list[list[Region | int]], list[Boundary], list[list[str]]]:
        """The parts of each stage, the boundaries between them, and the channels that cross each and the end."""
        if self._latest is None or self._latest[0] is not listing:
            items, parts = listing.items, list[list[Region | int]]([[]])
            boundaries: list[Boundary] = []
            crossing: list[list[str]] = []
            for part in listing.parts:
                operation = None if isinstance(part, Region) else items[part].operation
                if isinstance(operation, Boundary):
                    assert isinstance(part, int)
                    made = [c for item in items[:part] for _, c in item.outputs]
                    crossing.append([c for c in made if max(items[0].readers[c], default=part) >= part])
                    boundaries.append(operation)
                    parts.append([])
                else:
                    parts[-1].append(part)
            crossing.append([*listing.outputs])
            self._latest = listing, parts, boundaries, crossing
        return self._latest[1:]

    def _run_parts(self, listing: Listing, x: Tensor, channels: dict[str, Tensor], seeds: Tensor | None) -> Tensor:
        stages, boundaries, crossing = self.stages(listing)
        given, tensors = channels.copy(), [x]  # what is in or between stages: the chain's tensor, then channels
        tells = self.placement.tells or any_autocast()
        for stage, parts in enumerate(stages):
            own, last = self.placement.own(stage), stage + 1 == len(stages)
            before = crossing[stage - 1] if stage else []
            if own:
                if any(isinstance(t, Elsewhere) for t in tensors):
                    tensors = boundaries[stage - 1].enter(tensors, x.device)
                tensors = self._own(listing, parts, tensors, given, before, crossing[stage], seeds)
            told = None
            if tells:
                sent = tensors if own else None
                told = self.placement.tell(stage, sent, 1 + len(crossing[stage]), x.device)
            if not own:
                tensors = self._others(listing, stage, tensors, given, before, crossing[stage], seeds, told)
            elif not last and not self.placement.own(stage + 1):
                tensors = boundaries[stage].leave(tensors)
        channels.update(zip(crossing[-1], tensors[1:], strict=True))
        return tensors[0]

    def _own(
        self,
        listing: Listing,
        parts: list[Region | int],
        tensors: list[Tensor],
        given: dict[str, Tensor],
        before: list[str],
        after: list[str],
        seeds: Tensor | None,
    ) -> list[Tensor]:
        x, *rest = tensors
        channels = {**given, **dict(zip(before, rest, strict=True))}
        for part in parts:
            if isinstance(part, Region):
                x = self._run_region(listing, part, x, channels, seeds)
            else:
                x = run_alone(listing.items, part, x, channels)
        return [x, *[channels[c] for c in after]]

    def _others(
        self,
        listing: Listing,
        stage: int,
        tensors: list[Tensor],
        given: dict[str, Tensor],
        before: list[str],
        after: list[str],
        seeds: Tensor | None,
        told: list[Any] | None,
    ) -> list[Tensor]:
        """What stands for what leaves a stage of another rank."""
        where, last = self.placement.where(stage), stage + 1 == self.placement.stages
        entries = [t if isinstance(t, Elsewhere) else _leaf(t, where) for t in tensors]
        if told is not None:
            outs = [torch.empty(s, dtype=d, device="meta", requires_grad=r) for s, d, r, _ in told]
            passes = [p for *_, p in told]
        else:
            leaves = [_leaf(t, where) for t in entries]
            outs = self._inferred(listing, stage, leaves, given, before, after, seeds)
            ids = {id(leaf) for leaf in leaves}
            passes = [any(t is leaf for leaf in leaves) or reaches(t, lambda fn: id(getattr(fn, "variable", None)) in ids) for t in outs]  # fmt: skip
        passes = [p and t.requires_grad for p, t in zip(passes, outs, strict=True)]
        return through(entries, outs, passes if last else [any(passes)] * len(outs), where)

    def _inferred(
        self,
        listing: Listing,
        stage: int,
        leaves: list[Tensor],
        given: dict[str, Tensor],
        before: list[str],
        after: list[str],
        seeds: Tensor | None,
    ) -> list[Tensor]:
        where = self.placement.where(stage)
        x, *rest = leaves
        channels: dict[str, Tensor] = {c: _leaf(t, where) for c, t in given.items()}
        channels.update(zip(before, rest, strict=True))
        seeds = None if seeds is None else seeds.to("meta")
        for part in self.stages(listing)[0][stage]:
            positions = range(part.start, part.stop) if isinstance(part, Region) else range(part, part + 1)
            if isinstance(part, Region):
                validate(listing, part, x.shape)
            for at in positions:
                try:
                    x = walk_reference(listing.items, range(at, at + 1), listing.random, x, channels, seeds)
                except StateError as error:
                    if error.code == "SF506":
                        error.operation, error.position = listing.items[at].name, at
                        error.hint = 'its output depends on numbers: pipeline(..., shapes="broadcast") has them told'
                    raise
        return [x, *[channels[c] for c in after]]


def _leaf(tensor: Tensor, where: str) -> Tensor:
    """What stands for a tensor at the beginning of a stage of another rank."""
    with contextlib.nullcontext() if tensor.is_meta else torch.no_grad():
        meta = tensor.detach() if tensor.is_meta else torch.empty_like(tensor, device="meta")
    return Elsewhere.of(meta, where).requires_grad_(tensor.requires_grad)
