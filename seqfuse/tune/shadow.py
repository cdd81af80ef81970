"""A copy of a model on fake tensors, which finds the regions that a call runs and their candidates, ready to time."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Generator, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import stateless

from ..autograd import transformed
from ..casts import cast_once
from ..env import Env
from ..errors import InputError, SeqfuseError
from ..fake import faking
from ..fusion import BackwardFusion, JointFusion
from ..plan import (
    Candidate,
    Known,
    Matcher,
    Plan,
    Stretch,
    check_channels,
    draw,
    global_hooks,
    has_own_graph,
    validate,
    walk_reference,
)
from ..run import Alone, Context, Fuser, OpList, Region, Segment, Sequential, back_alone, install, lower, run_alone
from ..settings import fusing_now
from .timing import Passes, scratch_like

MODES = ("train", "eval")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclasses.dataclass(eq=False)
class Site:
    """One call of a container: its op sequence, and the fake tensors before each position and after the last."""

    path: str
    mode: str
    shadow: Shadow
    fuser: Fuser
    op_list: OpList
    entering: list[tuple[Tensor, dict[str, Tensor]]]

    def plan(self) -> Plan:
        """The plan for this call, from the current measurements."""
        x, channels = self.entering[0]
        given: dict[str, Any] = {name: channels[name] for name in self.op_list.inputs}
        with self.shadow.tracing():
            return self.fuser.plan(x, **given)

    def run(self, x: Tensor, **channels: Tensor) -> Any:
        """Run the references and record the tensors before and after each operation."""
        nodes = self.op_list.nodes
        check_channels(nodes, self.op_list.inputs, channels)
        seeds = draw(nodes, x)
        starts = {part.start: part for part in self.op_list.parts if isinstance(part, Region)}
        self.entering.append((x, dict(channels)))
        for position in range(len(nodes)):
            if position in starts:
                validate(nodes, starts[position].positions, x.shape)
            x = walk_reference(nodes, range(position, position + 1), x, channels, seeds)
            self.entering.append((x, dict(channels)))
        return (x, *[channels[name] for name in self.op_list.outputs]) if self.op_list.outputs else x


class _Watch:
    """Replaces the fuser of a container and records each call as a site."""

    def __init__(self, fuser: Fuser, about: tuple[str, str, Shadow], sites: list[Site]) -> None:
        self.fuser, self.owner, self._about, self._sites = fuser, fuser.owner, about, sites

    def __call__(self, x: Tensor, **channels: Tensor) -> Any:
        self._sites.append(Site(*self._about, self.fuser, self.fuser.op_list(), []))
        return self._sites[-1].run(x, **channels)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Replaces a hook, so that modules with hooks also have them in the copy."""


class Shadow:
    """A copy of a model in one mode, on fake tensors; its hooks do nothing. `"eval"` is without gradients."""

    def __init__(self, model: nn.Module, mode: str) -> None:
        self.mode = mode
        # By id of a fake tensor: the fake tensor, which keeps the id valid, and the original.
        self._originals: dict[int, tuple[Tensor, Tensor]] = {}
        memo: dict[int, Any] = {}
        try:
            with faking() as self._fakes:
                self._stand_in(model, memo)
            self.model: nn.Module = copy.deepcopy(model, memo)
        except Exception as error:
            message = f"{type(model).__name__} cannot be copied: {type(error).__name__}: {error}"
            raise InputError(
                message, code="SF106", hint="tune a model before it is sharded, or the sf.Sequentials in it"
            ) from error
        self.model.train(mode == "train")

    def _stand_in(self, model: nn.Module, memo: dict[int, Any]) -> None:
        """Fill the memo of the copy with fake tensors for tensors and empty functions for hooks."""
        for module in model.modules():
            for tensor in (*module._parameters.values(), *module._buffers.values()):  # pyright: ignore[reportPrivateUsage]
                if tensor is not None and id(tensor) not in memo:
                    fake = memo[id(tensor)] = self._fakes.from_tensor(tensor)
                    self._originals[id(fake)] = fake, tensor
            for name in _HOOKS:
                hooks = getattr(module, name)
                memo[id(hooks)] = OrderedDict[Any, Any]((key, _nothing) for key in hooks)

    def sites(self, x: Tensor, channels: dict[str, Tensor]) -> tuple[list[Site], str | None]:
        """The containers that a call of the model runs, in order, and the error that ended the call, if any."""
        sites: list[Site] = []
        for path, module in cast(Iterable[tuple[str, nn.Module]], self.model.named_modules()):
            if isinstance(module, Sequential):
                fuser = Fuser(module, module.fusions, owned=True, memory=module.memory)
                install(module, cast(Any, _Watch(fuser, (path, self.mode, self), sites)))
        with self.tracing():
            try:
                self.model(self._fake(x), **{name: self._fake(value) for name, value in channels.items()})
            except SeqfuseError:
                raise  # the model's own call would raise it, too
            except Exception as error:
                return sites, f"{type(error).__name__}: {error}"
        return sites, None

    @contextlib.contextmanager
    def tracing(self) -> Generator[None]:
        """A block in which fake tensors of this copy can be used, in its mode."""
        with faking(self._fakes), torch.set_grad_enabled(self.mode == "train"):
            yield

    def _fake(self, x: Tensor) -> Tensor:
        return self._fakes.from_tensor(x.detach()).requires_grad_(x.requires_grad)

    def copy_of(self, fake: Tensor) -> Tensor:
        """A copy of the model's tensor that a fake one represents."""
        return self._originals[id(fake)][1].detach().clone()

    def original(self, fake: Tensor) -> Tensor | None:
        """The model's tensor that a fake parameter or buffer of the copy represents."""
        return self._originals.get(id(fake), (fake, None))[1]

    @contextlib.contextmanager
    def real(self, owners: Iterable[nn.Module]) -> Generator[None]:
        """Within the block, parameters and buffers of these modules are copies of the model's tensors."""
        made: dict[int, Tensor] = {}
        with contextlib.ExitStack() as swapped:
            for owner in dict.fromkeys(owners):
                held = {**owner._parameters, **owner._buffers}  # pyright: ignore[reportPrivateUsage]
                fakes = {name: t for name, t in held.items() if t is not None and self.original(t) is not None}
                for fake in fakes.values():
                    if id(fake) not in made:
                        own, copied = self._originals[id(fake)][1], self.copy_of(fake)
                        is_parameter = isinstance(own, nn.Parameter)
                        made[id(fake)] = nn.Parameter(copied, own.requires_grad) if is_parameter else copied
                named = {name: made[id(fake)] for name, fake in fakes.items()}
                swapped.enter_context(cast(Any, stateless)._reparametrize_module(owner, named))
            yield


@dataclasses.dataclass(eq=False)
class CalledRegion:
    """A region of a container in one call, and its candidates."""

    site: Site
    region: Region
    entered: Stretch
    context: Context
    found: list[Candidate]

    @property
    def known(self) -> Known:
        """The current measurements of its candidates."""
        return Known(self.entered)


def called_regions(site: Site) -> Generator[CalledRegion | str]:
    """The regions of a container that ran; for a region that cannot be measured, the reason."""
    op_list = site.op_list
    for part in op_list.parts:
        if not isinstance(part, Region) or len(site.entering) <= part.stop:
            continue
        x, channels = site.entering[part.start]
        where = f"{site.path or 'the model'} {part.start}-{part.stop - 1}"
        parameters = [owner._parameters.get(name) for owner, name in part.slots]  # pyright: ignore[reportPrivateUsage]
        present = [p for p in parameters if p is not None]
        if len(present) < len(parameters):
            yield f"{where}: a parametrization makes its parameters"
            continue
        plain = all(type(site.shadow.original(p)) in (Tensor, nn.Parameter) for p in present)
        if not plain or has_own_graph(site.fuser.root):
            yield f"{where}: its parameters are not plain tensors, so it runs unfused"
            continue
        with site.shadow.tracing():
            yield _stretch(site, part, x, channels, present)


def _stretch(
    site: Site, region: Region, x: Tensor, channels: dict[str, Tensor], parameters: Sequence[Tensor]
) -> CalledRegion:
    given = {c: channels[c] for c in region.channels}
    entered = Stretch.of(site.op_list.nodes, region.positions, x, given, parameters, Env.like(x))
    context = Context.of(entered, region.slots, parameters, "raise", lambda: None)
    fusing = dataclasses.replace(fusing_now(), unmeasured=True)
    unmeasured = dataclasses.replace(entered, fusing=fusing)
    found, _ = Matcher(site.fuser.fusions).find(unmeasured, lean=site.fuser.memory != "fast")
    return CalledRegion(site, region, entered, context, found)


def passes(stretch: CalledRegion, candidate: Candidate) -> Passes:
    """Functions that run the passes of a candidate, fused and unfused, on scratch tensors."""
    site, (a, b) = stretch.site, (candidate.start, candidate.stop)
    live = stretch.entered.wants.live_from < b
    x, channels = site.entering[a]
    y, after = site.entering[b]
    generator = torch.Generator(x.device)
    generator.manual_seed(0)

    def scratch(like: Tensor) -> Tensor:
        return scratch_like(like, generator)

    fusion = candidate.fusion
    fused = _segment(stretch, a, b, candidate, fusion.replaces_forward, fusion.replaces_backward and live)
    unfused = _segment(stretch, a, b, candidate, False, False)
    entering, dy = scratch(x), scratch(y)
    sides = [scratch(channels[c]) for c in fused.inputs]
    d_sides = [scratch(after[c]) for c in fused.outputs]
    count = site.op_list.random
    seeds = torch.randint(2**63 - 1, (count,), device=x.device, generator=generator) if count else None

    def forward(segment: Segment) -> Alone:
        with cast_once() if live else contextlib.nullcontext():
            return run_alone(segment, seeds, entering, *sides)[0]

    def backward(run: Alone) -> Any:
        return back_alone(run, dy, *d_sides)

    if isinstance(fusion, BackwardFusion):
        own, theirs = forward(fused), forward(unfused)
        return lambda: backward(own), lambda: backward(theirs)
    if isinstance(fusion, JointFusion) and live:
        return lambda: backward(forward(fused)), lambda: backward(forward(unfused))
    return lambda: forward(fused), lambda: forward(unfused)


def _segment(stretch: CalledRegion, a: int, b: int, candidate: Candidate, ahead: bool, back: bool) -> Segment:
    """A segment of only the candidate's positions, fused by it in the passes selected by `ahead` and `back`."""
    own = stretch.entered.step(a, b, candidate.fusion)
    forward = (own,) if ahead else own.unfused()
    backward = (own,) if back else own.unfused(backward=True)[::-1]
    plan = Plan(stretch.entered.env, forward, backward, (range(a, b),))
    (segment,) = lower(plan, stretch.context, stretch.site.op_list.configured)
    return segment


@contextlib.contextmanager
def real_parameters(stretch: CalledRegion, candidate: Candidate) -> Generator[None]:
    """Within the block, the parameters that a candidate reads are copies of the model's, instead of fake tensors."""
    inside = stretch.site.op_list.nodes[candidate.start : candidate.stop]
    owners = [m for node in inside for m in node.operation.modules()]
    owners += [owner for node in inside for owner, _ in node.slots.values()]
    with stretch.site.shadow.real(owners):
        yield


def why_not_now(device: torch.device) -> str | None:
    """Why nothing can be measured now, or None."""
    if torch.compiler.is_compiling() or transformed():
        return "the call is being traced or transformed"
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    if global_hooks():
        return "global module hooks are registered"
    return None if fusing_now().enabled else fusing_now().off
