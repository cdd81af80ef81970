"""`seqfuse compare`: the first operation at which a fused and an unfused run differ beyond the error bound."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any, cast

import torch
from cyclopts import Parameter
from torch import Tensor

from .. import Fuser, Sequential, fusing
from ..errors import hinted
from ..testing.cases import seeded
from ..testing.numerics import FusedMismatch, assert_fused_close
from ..testing.observe import pass_name
from ..testing.structure import copied_module
from . import inputs
from .inputs import InputText, Json, Named, Spec, Under
from .output import tell, tell_json
from .target import Unable, calling, container, moved

DRAWS = 3
"""A tensor must differ in most draws of inputs: correct kernels fail in 1 of 150."""

TensorAt = tuple[int, str]
"""A position and one of its tensors: `"y"`, `"dx"`, or the gradient of a parameter, such as `"0.weight.grad"`."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """A compared tensor, its operation, and the failed checks, if any.

    `step` is the fusion that computed it, `saver` the forward fusion whose saved tensors an unfused backward read.
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
    """The compared tensors, in the order in which they are computed."""

    first: str
    second: str
    places: tuple[Seen, ...]
    given: str

    @property
    def difference(self) -> Seen | None:
        """The first tensor in which the runs differ."""
        return next((seen for seen in self.places if seen.failures), None)

    def __str__(self) -> str:
        found = self.difference
        if found is None:
            agreed = f"{self.first} and {self.second} agree within tolerance in all {len(self.places)} tensors"
            hint = "try other inputs, too: an odd number of tokens, more than a block of a kernel, such as 67"
            return f"{agreed}, for this input only: {self.given}{hinted(hint)}"
        lines = [f"{self.first} and {self.second} differ first in {found}"]
        agreed = self.places.index(found)
        lines += [f"  {failure}" for failure in found.failures]
        return "\n".join([*lines, f"  {agreed} places before it agree; {len(self.places)} were compared"])

    def data(self) -> dict[str, Any]:
        """The comparison as plain data."""
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


class Recorder:
    """The `on_step` of a fuser: records the first result of each step, its operations, and its fusion."""

    def __init__(self) -> None:
        self.values: dict[TensorAt, Tensor] = {}
        self.nodes: dict[int, Any] = {}
        self.fusions: dict[int, str] = {}  # by position: `at` in the forward pass, `~at` in the backward pass
        self.readers: dict[int, int] = {}  # the first position that reads a parameter, by its id

    def __call__(self, step: Any, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        out: Any = run(*args, **kwargs)
        first = cast(Any, out[0] if isinstance(out, tuple) else out)
        if type(first) is not Tensor:  # no gradient of x, or a fake tensor, which has no values
            return out  # pyright: ignore[reportUnknownVariableType]
        back = pass_name(step, run) == "bwd"
        for at, node in zip(step.covers, step.nodes, strict=True):
            self.nodes[at] = node
            for owner, name in node.slots.values():
                self.readers.setdefault(id(getattr(owner, name)), at)
            if step.fused:
                self.fusions[~at if back else at] = step.name
        self.values[(step.start, "dx") if back else (step.stop - 1, "y")] = first.detach().clone()
        return out  # pyright: ignore[reportUnknownVariableType]


@dataclasses.dataclass(frozen=True)
class ModelRun:
    """A way to run a model: fused or not; if `wide`, in float64 from the same values."""

    device: torch.device
    autocast: str | None = None
    fused: bool = False
    wide: bool = False

    def __call__(self, root: Sequential, x: Spec, channels: Mapping[str, Spec], seed: int, grad: bool) -> Recorder:
        """Run a copy of a model and its backward on inputs of its dtype, and record the results of its steps."""
        low = _dtype(root, x)
        model: Sequential = copied_module(root).to(self.device)
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
                out: Any = fuser(**given)
            outputs: tuple[Tensor, ...] = (out,) if isinstance(out, Tensor) else out
            # Every run gets the same gradients, in values that bfloat16 can represent.
            random = [torch.Generator().manual_seed(seed + 100 + i) for i in range(len(outputs))]
            dys = [torch.randn(y.shape, generator=g).bfloat16().to(y) for y, g in zip(outputs, random, strict=True)]
            pairs = [pair for pair in zip(outputs, dys, strict=True) if pair[0].requires_grad]
            torch.autograd.backward([y for y, _ in pairs], [dy for _, dy in pairs])
        for name, p in model.named_parameters():
            if p.grad is not None and id(p) in seen.readers:
                seen.values[seen.readers[id(p)], f"{name}.grad"] = p.grad
        seen.values = {place: t.cpu() for place, t in seen.values.items()}
        return seen


def _dtype(model: Sequential, x: Spec) -> torch.dtype:
    """The dtype of a model's parameters; the input's, if it has none."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), x.dtype)


def compare_runs(
    model: Sequential,
    x: Spec,
    channels: Mapping[str, Spec],
    device: torch.device,
    *,
    grad: bool = True,
    autocast: str | None = None,
    seed: int = 0,
) -> Comparison:
    """Compare a fused and an unfused run of a model within tolerance of one in float64, at the results of all steps."""
    where = f"{str(_dtype(model, x)).removeprefix('torch.')} {device}" + (f" autocast {autocast}" if autocast else "")
    if any(t.is_floating_point() and not t.isfinite().all() for t in (*model.parameters(), *model.buffers())):
        raise Unable("the model has parameters that are not finite")
    runs = ModelRun(device, autocast, fused=True), ModelRun(device, autocast), ModelRun(device, wide=True)
    alarms: dict[TensorAt, list[tuple[str, ...]]] = {}
    fused = unfused = Recorder()
    places: list[TensorAt] = []
    for number in range(DRAWS):
        with calling():
            fused, unfused, wide = (run(model, x, channels, seed + 1000 * number, grad) for run in runs)
        f, u, r = fused.values, unfused.values, wide.values
        places = sorted(f.keys() & u.keys() & r.keys(), key=_turn)
        for place in places:
            if failures := _failures(place[1], f[place], u[place], r[place], autocast is not None):
                alarms.setdefault(place, []).append(failures)
        if not alarms:
            break
    seen: list[Seen] = []
    for at, tensor in places:
        ahead, back = fused.fusions.get(at, ""), fused.fusions.get(~at, "")
        made = (ahead, "") if tensor == "y" else (back, ahead)
        failed = alarms.get((at, tensor), [])
        failures = failed[0] if len(failed) > DRAWS // 2 else ()
        node = unfused.nodes[at]
        seen.append(Seen(at, tensor, node.name, node.path, *made, failures))
    return Comparison(f"fused {where}", f"unfused {where}", tuple(seen), str(x))


def _turn(place: TensorAt) -> tuple[bool, int, bool, str]:
    """Sort key: the order in which tensors are computed."""
    at, tensor = place
    return tensor != "y", at if tensor == "y" else -at, tensor != "dx", tensor


def _failures(name: str, fused: Tensor, plain: Tensor, exact: Tensor, autocast: bool) -> tuple[str, ...]:
    if autocast and name in ("y", "dx"):  # a fusion may cast earlier than the operations
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
    no_grad: Annotated[bool, Parameter(negative="", show_default=False, help="Compare the forward pass.")] = False,
    seed: int = 0,
    json: Json = False,
    on: Annotated[Under | None, Parameter(name="*")] = None,
) -> int:
    """Find the first operation at which fused and unfused runs differ beyond tolerance; exit 1 if there is one."""
    on = on or Under()
    here, x = inputs.device_here(on.device), on.spec(input)
    torch.default_generator.manual_seed(inputs.parse_seed(seed))
    model = moved(container(on.build(target, x), target, on.part), here)
    options: dict[str, Any] = {"grad": not no_grad, "autocast": on.autocast, "seed": seed}
    found = compare_runs(model, x, on.channels(), here, **options)
    if json:
        tell_json(found.data())
    else:
        tell(str(found), "" if found.difference is None else "bold")
    return int(found.difference is not None)
