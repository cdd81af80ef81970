"""`seqfuse compare`: the first operation at which two runs differ beyond the rule of the test kit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
from cyclopts import Parameter
from torch import Tensor, nn

from ..errors import InputError, hinted
from ..plan import flatten
from ..plan.fake import is_fake
from ..plan.flatten import public_channels
from ..plan.reference import draw, number_seeds, run_eagerly, walk_reference
from ..run import Fuser, Sequential
from ..settings import fusing
from ..testing.cases import seeded
from ..testing.numerics import FusedMismatch, assert_fused_close
from ..testing.observe import name_of
from ..testing.structure import copied
from . import inputs
from .inputs import InputText, Json, Named, Spec, Under
from .output import tell, tell_json
from .target import Unable, container, said

DRAWS = 3
"""Draws of inputs, in more than half of which a place has to differ: correct kernels alarm once in 150."""


TensorAt = tuple[int, str]
"""A position, and which of its tensors: `"y"`, `"dx"`, or the gradient of a parameter, such as `"0.weight.grad"`."""

Values = dict[TensorAt, Tensor]


@dataclasses.dataclass(frozen=True)
class Seen:
    """A tensor that both runs have: whose it is, and the checks that failed there, if any.

    `step` is the fusion that made it, `saver` the forward fusion whose saved tensors an unfused backward made it of.
    """

    at: int
    tensor: str
    operation: str
    path: str
    step: str
    saver: str
    failures: tuple[str, ...]

    def __str__(self) -> str:
        named = f"{self.operation} {self.path}".rstrip()
        made = f", by {self.step}" if self.step else f", of what {self.saver} saved" if self.saver else ""
        return f"{self.tensor} of {named} at {self.at}{made}"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What was compared: the places in the order in which they come to be."""

    first: str
    second: str
    places: tuple[Seen, ...]
    given: str

    @property
    def difference(self) -> Seen | None:
        """The first place at which the runs differ."""
        return next((seen for seen in self.places if seen.failures), None)

    def __str__(self) -> str:
        found = self.difference
        if found is None:
            agreed = f"{self.first} and {self.second} agree within tolerance at all {len(self.places)} places"
            hint = "try others too, with an odd number of tokens and more than a block of a kernel, such as 67"
            return f"{agreed}, for one input alone, {self.given}{hinted(hint)}"
        lines = [f"{self.first} and {self.second} differ first in {found}"]
        agreed = self.places.index(found)
        lines += [f"  {failure}" for failure in found.failures]
        return "\n".join([*lines, f"  {agreed} places before it agree; {len(self.places)} were compared"])

    def data(self) -> dict[str, Any]:
        """The same as plain data."""
        places = [
            {
                "pass": "forward" if seen.tensor == "y" else "backward",
                **{name: getattr(seen, name) for name in ("at", "tensor", "operation", "path")},
                "fusion": seen.step or seen.saver or None,
                "failures": [*seen.failures],
            }
            for seen in self.places
        ]
        index = None if self.difference is None else self.places.index(self.difference)
        return {"first": self.first, "second": self.second, "input": self.given, "difference": index, "places": places}


@dataclasses.dataclass(frozen=True)
class ModelRun:
    """How a model is run: fused, unfused, or `wide`: by references in float64, with `rounds` of 16 bits at borders."""

    device: torch.device
    autocast: str | None = None
    fused: bool = False
    wide: bool = False
    rounds: torch.dtype | None = None

    def __call__(
        self, root: Sequential, x: Spec, channels: Mapping[str, Spec], seed: int, grad: bool
    ) -> tuple[Values, dict[int, str]]:
        """Run a copy of a model and its backward on inputs of its dtype.

        Returns the tensors by their places, and the fusions by position: at `at` forward, at `~at` backward.
        """
        low = dtype_of(root, x)
        model: Sequential = copied(root).to(self.device)
        model = model.double() if self.wide else model
        seen = Recorder()
        fuser = Fuser(model, root.fusions, memory=root.memory, on_step=seen)

        def drawn(one: Spec, offset: int) -> Tensor:
            t = one.draw(self.device, seed + offset, inputs.vocabulary(model))
            if not t.is_floating_point():
                return t
            t = t.to(low)
            return (t.double() if self.wide else t).requires_grad_(grad)

        given = {name: drawn(one, i) for i, (name, one) in enumerate({"x": x, **channels}.items())}
        with seeded(seed, self.device), inputs.surroundings(self.device.type, self.autocast, grad):
            with fusing(None if self.fused else False):
                out = self._walked(model, seen, **given) if self.wide else seen.seeing(model, fuser, given)
            outputs: tuple[Tensor, ...] = (out,) if isinstance(out, Tensor) else out
            # Every run gets the same gradients: numbers that bfloat16 has.
            random = [torch.Generator().manual_seed(seed + 100 + i) for i in range(len(outputs))]
            dys = [torch.randn(y.shape, generator=g).bfloat16().to(y) for y, g in zip(outputs, random, strict=True)]
            pairs = [pair for pair in zip(outputs, dys, strict=True) if pair[0].requires_grad]
            torch.autograd.backward([y for y, _ in pairs], [dy for _, dy in pairs])
        readers: dict[int, int] = {}
        for at, node in enumerate(flatten(model)):
            slots = [getattr(owner, name) for owner, name in node.slots.values()]
            for p in slots if node.fusable else node.operation.parameters():
                readers.setdefault(id(p), at)
        for name, p in model.named_parameters():
            if p.grad is not None:
                seen.values[readers.get(id(p), 0), f"{name}.grad"] = p.grad
        kept = {place: t.detach().to("cpu", self.rounds or t.dtype) for place, t in seen.values.items()}
        return kept, seen.names

    def _walked(self, model: Sequential, seen: Recorder, x: Tensor, **channels: Tensor) -> tuple[Tensor, ...]:
        """Run the references, each on a tensor of its own, so that the gradient of what enters it is its own."""
        nodes = flatten(model)
        number_seeds(nodes)
        seeds = draw(nodes, x)
        for at, node in enumerate(nodes):
            x = self._border(x)
            if x.requires_grad:
                x.register_hook(functools.partial(seen.keep, place=(at, "dx")))  # pyright: ignore[reportUnknownMemberType]
            if node.eager is not None:
                x = run_eagerly(nodes, at, x, channels)
            else:
                x = walk_reference(nodes, range(at, at + 1), x, channels, seeds)
            channels.update({channel: self._border(channels[channel]) for _, channel in node.outputs})
            seen.keep(x, (at, "y"))
        return x, *[channels[channel] for channel in public_channels(nodes)[1]]

    def _border(self, t: Tensor) -> Tensor:
        if self.rounds is None or not t.is_floating_point():
            return t.view_as(t)
        return _Round.apply(t, self.rounds)  # pyright: ignore[reportReturnType, reportUnknownMemberType, reportUnknownVariableType]


class _Round(torch.autograd.Function):
    """Numbers, and gradients, as a dtype has them, in float64."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: torch.dtype) -> Tensor:
        ctx.low = low
        return x.to(low).double()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.low).double(), None


class Recorder:
    """The `on_step` of a fuser: keeps the tensors between operations."""

    def __init__(self) -> None:
        self.values: Values = {}
        self.names: dict[int, str] = {}

    def __call__(self, step: Any, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        out: Any = run(*args, **kwargs)
        first: Any = out[0] if isinstance(out, tuple) else out  # pyright: ignore[reportUnknownVariableType]
        if is_fake(args[0]) or not isinstance(first, Tensor):
            return out  # pyright: ignore[reportUnknownVariableType]
        back = name_of(step, run) == "bwd"
        if step.fused:
            self.names.update(dict.fromkeys([~at for at in step.covers] if back else step.covers, step.name))
        self.keep(first, (step.start, "dx") if back else (step.stop - 1, "y"))
        return out  # pyright: ignore[reportUnknownVariableType]

    def seeing(self, model: Sequential, fuser: Fuser, given: Mapping[str, Tensor]) -> Any:
        """Run a model, and see what enters and leaves modules that run through their own call, too."""
        for at, node in enumerate(flatten(model)):
            if node.eager is not None:
                self._watch(node.operation, at)
        return fuser(**given)

    def _watch(self, module: nn.Module, at: int) -> None:
        def before(_: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], Tensor) and args[0].requires_grad:
                args[0].register_hook(functools.partial(self.keep, place=(at, "dx")))  # pyright: ignore[reportUnknownMemberType]

        def after(_: nn.Module, args: Any, out: Any) -> None:
            if isinstance(out, Tensor):
                self.keep(out, (at, "y"))

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def keep(self, t: Tensor, place: TensorAt) -> None:
        """Keep a tensor as it is now."""
        self.values[place] = t.detach().clone()


def dtype_of(model: nn.Module, x: Spec) -> torch.dtype:
    """The dtype of a model's parameters; of the input, where it has none."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), x.dtype)


def compare(
    model: Sequential,
    x: Spec,
    channels: Mapping[str, Spec],
    device: torch.device,
    *,
    grad: bool = True,
    against: str = "unfused",
    autocast: str | None = None,
    seed: int = 0,
) -> Comparison:
    """Compare two runs of a model within tolerance, given one in float64, at every place that all three have.

    Against more digits the second run is what rounding to 16 bits between operations does to a run in float64; within
    operations these are expected to compute in float32.

    Raises:
        Unable: if it cannot be run, or cannot be compared with that.
    """
    low = dtype_of(model, x)
    short = str(low).removeprefix("torch.")
    where = f"{short} {device}" + (f" autocast {autocast}" if autocast else "")
    second, label = ModelRun(device, autocast), f"unfused {where}"
    if against != "unfused":
        if autocast is not None:
            raise Unable("under --autocast a run is compared with the unfused one alone")
        if low not in (torch.bfloat16, torch.float16):
            raise Unable(f"{short} adds up in {short}, so rounding is not all it loses: compare a 16-bit dtype")
        if inputs.dtype(against) not in (torch.float32, torch.float64):
            raise Unable(f"{against} has not all digits of float32: {short} is compared with float32 or float64")
        second, label = ModelRun(device, wide=True, rounds=low), f"{short} rounding alone"
    if any(t.is_floating_point() and not t.isfinite().all() for t in (*model.parameters(), *model.buffers())):
        raise Unable("the model has parameters that are not finite")
    runs = ModelRun(device, autocast, fused=True), second, ModelRun(device, wide=True)
    alarms: dict[TensorAt, list[tuple[str, ...]]] = {}
    places: list[TensorAt] = []
    names: dict[int, str] = {}
    for number in range(DRAWS):
        try:
            (f, names), (u, _), (r, _) = (run(model, x, channels, seed + 1000 * number, grad) for run in runs)
        except (InputError, Unable):
            raise
        except Exception as error:
            raise Unable(f"the model raised {said(error)}") from error
        places = sorted(f.keys() & u.keys() & r.keys(), key=_turn)
        for place in places:
            if failures := _failures(place[1], f[place], u[place], r[place], autocast is not None):
                alarms.setdefault(place, []).append(failures)
        if not alarms:
            break
    nodes, seen = flatten(model), list[Seen]()
    for at, tensor in places:
        ahead, back = names.get(at, ""), names.get(~at, "")
        made = (ahead, "") if tensor == "y" else (back, ahead)
        failed = alarms.get((at, tensor), [])
        failures = failed[0] if len(failed) > DRAWS // 2 else ()
        seen.append(Seen(at, tensor, nodes[at].name, nodes[at].path, *made, failures))
    return Comparison(f"fused {where}", label, tuple(seen), str(x))


def _turn(place: TensorAt) -> tuple[bool, int, bool, str]:
    """Orders places as they come to be."""
    at, tensor = place
    return tensor != "y", at if tensor == "y" else -at, tensor != "dx", tensor


def _failures(name: str, fused: Tensor, plain: Tensor, exact: Tensor, autocast: bool) -> tuple[str, ...]:
    if autocast and name in ("y", "dx"):  # a fusion casts where the step behind it would
        narrow = min(fused.dtype, plain.dtype, key=lambda dtype: dtype.itemsize)
        fused, plain = fused.to(narrow), plain.to(narrow)
    try:
        assert_fused_close(fused, plain, exact.double(), name=name)
    except FusedMismatch as mismatch:
        return tuple(map(str, mismatch.report.failures))
    return ()


def compare_model(
    target: Named,
    /,
    *,
    input: InputText,
    against: Annotated[str, Parameter(help="unfused, or a dtype with more digits.")] = "unfused",
    no_grad: Annotated[bool, Parameter(negative="", show_default=False, help="Compare the forward pass.")] = False,
    seed: int = 0,
    json: Json = False,
    on: Annotated[Under | None, Parameter(name="*")] = None,
) -> int:
    """Find the first operation at which two runs differ by more than the error bound; exit 1 if there is one."""
    on = on or Under()
    here, x = inputs.device(on.device), on.spec(input)
    torch.default_generator.manual_seed(inputs.seed(seed))
    model = container(on.build(target, x), target, on.part).to(here)
    options: dict[str, Any] = {"grad": not no_grad, "against": against, "autocast": on.autocast, "seed": seed}
    found = compare(model, x, on.channels(), here, **options)
    if json:
        tell_json(found.data())
    else:
        tell(str(found), "" if found.difference is None else "bold")
    return int(found.difference is not None)
