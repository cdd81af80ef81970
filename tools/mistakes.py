"""Mistakes of users and of authors of fusions, and the error of each: at least one for each code of errors.md."""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import linecache
import multiprocessing
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import seqfuse as sf
from seqfuse import ops

X = torch.ones(3, 8)
ROWS = torch.ones(2, 5, 8)
TOKENS = torch.tensor([[1, 2, 3]])


def seq(*operations: Any, **rest: Any) -> sf.Sequential:
    """A sequence of these operations."""
    return sf.Sequential(*operations, **rest)


def linear(*rest: Any) -> sf.Sequential:
    """A sequence of a `Linear` of 8 features and these operations."""
    return seq(ops.Linear(8, 8), *rest)


# Calls ----------------------------------------------------------------------------------------------------------------


def caches() -> dict[str, Callable[[], Any]]:
    """Mistakes in using a key-value cache."""
    from seqfuse.inference import KVCache
    from seqfuse.nn import TransformerStack

    def fed(*sizes: int, causal: bool = True, batch: int = 2, **rest: Any) -> None:
        cache = KVCache(2, max_length=6, **rest)
        for size in sizes:
            cache.feed(TransformerStack(1, 8, 2, causal=causal), torch.ones(batch, size, 8))

    def other_heads() -> None:
        cache = KVCache(2, max_length=6)
        cache.feed(TransformerStack(1, 8, 2, causal=True), ROWS[:, :2])
        cache.feed(TransformerStack(1, 8, 4, causal=True), ROWS[:, :2])

    return {
        "a longer sequence than the cache": lambda: fed(4, 4),
        "a batch of another size": lambda: fed(2, batch=3),
        "a cache for attention to both sides": lambda: fed(2, causal=False),
        "a cache fed by a model without attention": lambda: KVCache(2, max_length=6).feed(linear(), ROWS),
        "a cache fed by another model": other_heads,
        "a beam of another size": lambda: KVCache(2, max_length=6).reorder(torch.tensor([0])),
        "a cache of two sequences expanded": lambda: KVCache(2, max_length=6).expand(3),
    }


def twice() -> None:
    """Differentiate a gradient."""
    x = X.clone().requires_grad_()
    (dx,) = torch.autograd.grad(seq(ops.SwiGLU())(x).sum(), x, create_graph=True)
    dx.sum().backward()


def recomputed() -> None:
    """Recompute with another plan."""
    model = linear(ops.GeLU())
    y = checkpoint(model, X.clone().requires_grad_(), use_reentrant=False)
    with sf.fusing(False):
        y.sum().backward()


def buffer(main_grad: Any) -> None:
    """Accumulate a gradient into a buffer that does not fit."""
    model = linear()
    model[0].weight.main_grad = main_grad
    model(X).sum().backward()


def losses(targets: Tensor, x: Tensor = X) -> None:
    """Compute a loss for these targets."""
    from seqfuse.losses import LinearCrossEntropy

    LinearCrossEntropy(8, 11)(x, targets)


def tied() -> sf.Sequential:
    """Two layers with one weight."""
    model = seq(ops.Linear(8, 8), ops.ReLU(), ops.Linear(8, 8))
    model[2].weight = model[0].weight
    return model


class _Pair(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x, x


CALLS: dict[str, Callable[[], Any]] = {
    "another width": lambda: linear(ops.Residual(ops.LayerNorm(5)))(X),
    "a plan of another width": lambda: linear(ops.LayerNorm(5)).plan(X),
    "a sum of two shapes": lambda: seq(ops.Add("a"))(X, a=X[:, :4]),
    "a product of two shapes": lambda: seq(ops.Multiply("a"))(X, a=X[:, :4]),
    "integers in an activation": lambda: seq(ops.GeLU())(X.long()),
    "numbers in an embedding": lambda: seq(ops.Embedding(11, 8))(X),
    "an odd width of a gated unit": lambda: seq(ops.SwiGLU())(X[:, :7]),
    "complex numbers in a gated unit": lambda: seq(ops.SwiGLU())(X.to(torch.complex64)),
    "a width that heads do not divide": lambda: seq(ops.Attention(3))(ROWS),
    "a mask that does not broadcast": lambda: seq(ops.Attention(1, mask="m"))(ROWS[..., :6], m=X),
    "a reshape that does not fit": lambda: seq(ops.Reshape((3,)))(X),
    "a position beyond the table": lambda: seq(ops.PositionEmbedding(4, 8))(ROWS),
    "one dimension in attention": lambda: seq(ops.Attention(2))(torch.ones(24)),
    "parts that do not sum": lambda: ops.Linear(8, 8).divide("column", None, parts=(3, 3)),
    "another dtype": lambda: linear()(X.double()),
    "another device": lambda: linear()(X.to("meta")),
    "a parameter on another device": lambda: linear(ops.LayerNorm(8, device="meta"))(X),
    "a channel that was not passed": lambda: linear(ops.Add("skip"))(X),
    "a misspelled channel": lambda: seq(ops.Fork("skip"), ops.Linear(8, 8), ops.Add("skp"))(X),
    "a channel that nobody reads": lambda: linear()(X, skip=X),
    "a channel that is no tensor": lambda: seq(ops.Add("a"))(X, a=3),
    "names that match no key": lambda: sf.remap_keys({"0.weight": X}, {"1.": "2."}),
    "two keys that become one": lambda: sf.remap_keys({"a.w": X, "b.w": X}, {"a": "c", "b": "c"}),
    "more stars than before": lambda: sf.remap_keys({"a.w": X}, {"a": "*.b"}),
    "a list for a tensor": lambda: linear()([1.0]),
    "nothing for a tensor": lambda: linear()(None),
    "a module that returns a tuple": lambda: linear(_Pair())(X),
    "a Fuser of a list": lambda: sf.Fuser([ops.ReLU()]),
    "tuning for a number": lambda: sf.tune(linear(), 3),
    "tuning for meta": lambda: sf.tune(linear(), X.to("meta")),
    "tuning in another mode": lambda: sf.tune(linear(), X, modes="inference"),
    "tuning for no time": lambda: sf.tune(linear(), X, budget=-1),
    "tuning into no folder": lambda: sf.tune(linear(ops.GeLU()), X, file="nowhere/at/all"),
    "a size below 0": lambda: ops.Linear(-1, 4),
    "sizes below 0": lambda: ops.MergedLinear(4, (3, -1)),
    "text for a size": lambda: ops.Linear("8", 8),
    "text for a flag": lambda: ops.Linear(8, 8, bias="no"),
    "a number for a name": lambda: ops.Add(3),
    "an unknown approximation": lambda: ops.GeLU("exact"),
    "an unknown style": lambda: ops.RotaryEmbedding(8, 1, style="quarter"),
    "a probability of 2": lambda: ops.Dropout(2.0),
    "a parallel Linear without a group": lambda: ops.Linear(8, 8, parallel="column"),
    "an unknown way to divide": lambda: ops.Linear(8, 8).divide("columns", None),
    "no process group": lambda: ops.AllReduce("tp"),
    "a GPU that is not here": lambda: sf.Env.of("cuda:7"),
    "an unknown device": lambda: sf.Env.of("gpu"),
    "an unknown architecture": lambda: sf.Env.of("cuda:hopper"),
    "a dtype that is none": lambda: sf.Env.of("cpu", dtype="float32"),
    "a dtype of 8 bits": lambda: sf.Env.of("cpu", dtype=torch.int8),
    "autocast in integers": lambda: sf.Env.of("cpu", autocast=torch.int64),
    "tokens and rows": lambda: sf.Env.of("cpu", tokens=3, rows=3),
    "tokens below 0": lambda: sf.Env.of("cpu", tokens=-3),
    "an environment that is none": lambda: linear().plan(X, env="cpu"),
    "an unknown choice of memory": lambda: seq(ops.GeLU(), memory="little"),
    "a budget of nothing": lambda: sf.Budget(),
    "a budget of more than all": lambda: sf.Budget(part=1.5),
    "an unknown answer to errors": lambda: sf.fusing(on_error="ignore").__enter__(),
    "an unknown fusion": lambda: _excluding("LinearBiasPointwis"),
    "a fusion of an earlier name": lambda: _excluding("LinearGated"),
    "a number for a fusion": lambda: _excluding(3),
    "a parameter that was set to None": lambda: _without_weight(),
    "converting a number": lambda: sf.convert(3),
    "converting twice": lambda: _convert_twice(),
    "converting a part of a model": lambda: _convert_a_part(),
    "converting layers of none": lambda: sf.convert(nn.Linear(8, 8), regions="layers"),
    "unknown regions": lambda: sf.convert(nn.Linear(8, 8), regions="blocks"),
    "another compiler": lambda: sf.convert(nn.Linear(8, 8), then="tvm"),
    "a conversion of a model that has none": lambda: sf.conversion(nn.Linear(8, 8)),
    "an unknown option of the backend": lambda: torch.compile(nn.Linear(8, 8), backend="seqfuse", options={"a": 1})(X),
    "a token beyond the vocabulary": lambda: seq(ops.Embedding(11, 8))(torch.tensor([3, 11])),
    "a token below 0": lambda: seq(ops.Embedding(11, 8))(torch.tensor([3, -1])),
    "a target beyond the classes": lambda: losses(torch.tensor([1, 11, 2])),
    "targets of another shape": lambda: losses(torch.tensor([1, 2])),
    "lengths that do not end": lambda: seq(ops.Attention(2, cu_seqlens="c"))(torch.ones(5, 24), c=torch.tensor([0, 4])),
    "two forks of one name": lambda: seq(ops.Fork("skip"), ops.Fork("skip"))(X),
    "a sum without a fork": lambda: seq(ops.Add())(X),
    "double backward": twice,
    "recomputing under another plan": recomputed,
    "a main_grad of another shape": lambda: buffer(torch.zeros(8, 5)),
    "a main_grad of another dtype": lambda: buffer(torch.zeros(8, 8, dtype=torch.bfloat16)),
    "a main_grad that is a number": lambda: buffer(0.0),
    "a plug-in that is not installed": lambda: sf.plugins.load("nowhere"),
    "a plug-in without a name": lambda: sf.plugins.load(3),
    "text for fusions": lambda: seq(ops.GeLU(), fusions="default"),
    "an operation for a fusion": lambda: seq(ops.GeLU(), fusions=(ops.GeLU,)),
    "a kind for a fusion": lambda: seq(ops.GeLU(), fusions=(sf.ForwardFusion,)),
    "a name that is misspelled": lambda: ops.Layernorm(8),
    "a check of a number": lambda: sf.testing.check_op(3, X),
}


def _excluding(name: Any) -> None:
    with sf.fusing(exclude=name):
        linear().plan(X)


def _without_weight() -> None:
    model = linear()
    model[0].weight = None
    model(X)


def _convert_twice() -> None:
    model = nn.Linear(8, 8)
    sf.convert(model)
    sf.convert(model)


def _convert_a_part() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    sf.convert(model[0])
    sf.convert(model)


# Definitions ----------------------------------------------------------------------------------------------------------

HEAD = """
from __future__ import annotations

from typing import Any
import torch
from torch import Tensor, nn
import seqfuse as sf
from seqfuse import ops
"""

FWD = "def fwd(self, x: Tensor) -> Any: ..."
BWD = "def bwd(self, dy: Tensor, saved: Any) -> Any: ..."
REFERENCE = "def reference(self, x: Tensor) -> Tensor: ..."
SAVED = "class Saved(sf.Saved): x: Tensor"
SLOPE = "def __init__(self):\n        super().__init__()\n        self.slope = nn.Parameter(torch.ones(()))"

DEFINITIONS: dict[str, tuple[str, ...]] = {
    "no slots": ("ForwardFusion", FWD),
    "a slot of a number": ("ForwardFusion", "bias: int", FWD),
    "a slot of a torch module": ("ForwardFusion", "linear: nn.Linear", FWD),
    "a slot of an unknown type": ("ForwardFusion", "bias: Nowhere", FWD),
    "a variadic of variadics": ("ForwardFusion", "bias: ops.Bias", "acts: tuple[tuple[ops.ReLU, ...], ...]", FWD),
    "a tuple of a fixed length": ("ForwardFusion", "bias: ops.Bias", "acts: tuple[ops.ReLU, ops.ReLU]", FWD),
    "an optional variadic": ("ForwardFusion", "bias: ops.Bias", "acts: tuple[ops.ReLU, ...] | None", FWD),
    "a slot with a name that is taken": ("ForwardFusion", "requires: ops.Bias", FWD),
    "a private slot": ("ForwardFusion", "_bias: ops.Bias", FWD),
    "no kind": ("FusedOperation", "bias: ops.Bias", FWD),
    "two kinds": ("ForwardFusion, sf.BackwardFusion", "bias: ops.Bias", FWD),
    "fwd without x": ("ForwardFusion", "bias: ops.Bias", "def fwd(self) -> Any: ..."),
    "an extra input by position": ("ForwardFusion", "add: ops.Add", "def fwd(self, x, add_other) -> Any: ..."),
    "an extra input without its slot": ("ForwardFusion", "add: ops.Add", "def fwd(self, x, *, other) -> Any: ..."),
    "an unknown extra input": ("ForwardFusion", "linear: ops.Linear", "def fwd(self, x, *, linear_weight) -> Any: ..."),
    "whatever keywords": ("ForwardFusion", "add: ops.Add", "def fwd(self, x, **others) -> Any: ..."),
    "an output without its slot": ("ForwardFusion", "fork: ops.Fork", 'outputs = ("stream",)', FWD),
    "an unknown output": ("ForwardFusion", "bias: ops.Bias", 'outputs = ("bias_out",)', FWD),
    "a backward of one record": ("BackwardFusion", "bias: ops.Bias", BWD),
    "a backward that misses a record": (
        "BackwardFusion", "bias: ops.Bias", "act: ops.ReLU", "def bwd(self, dy, *, bias) -> Any: ...",
    ),
    "a backward of an unknown slot": (
        "BackwardFusion", "bias: ops.Bias", "def bwd(self, dy, *, bias, relu) -> Any: ...",
    ),
    "a gradient of an unknown output": (
        "BackwardFusion", "bias: ops.Bias", "def bwd(self, dy, *, bias, d_bias_out) -> Any: ...",
    ),
    "a joint without a record": ("JointFusion", "bias: ops.Bias", FWD, BWD),
    "a joint without a backward": ("JointFusion", "bias: ops.Bias", SAVED, FWD),
    "a forward with a backward": ("ForwardFusion", "bias: ops.Bias", FWD, "def bwd(self, dy, *, bias) -> Any: ..."),
    "a forward that is no function": ("ForwardFusion", "bias: ops.Bias", "fwd = 3"),
    "forward for fwd": ("ForwardFusion", "bias: ops.Bias", "def forward(self, x) -> Any: ..."),
    "backward for bwd": ("BackwardFusion", "bias: ops.Bias", "def backward(self, dy, *, bias) -> Any: ..."),
    "require for requires": ("ForwardFusion", "bias: ops.Bias", FWD, "def require(self, env) -> Any: ..."),
    "save for saves": ("ForwardFusion", "bias: ops.Bias", FWD, "def save(self, env) -> Any: ..."),
    "requirs for requires": ("ForwardFusion", "bias: ops.Bias", FWD, "def requirs(self, env) -> Any: ..."),
    "an unknown layout": ("ForwardFusion", "bias: ops.Bias", 'layout = "contiguous"', FWD),
    "an operation with a forward": ("UnfusedOperation", SAVED, "def forward(self, x) -> Any: ...", BWD),
    "an operation without a backward": ("UnfusedOperation", SAVED, REFERENCE, FWD),
    "an operation without a record": ("UnfusedOperation", REFERENCE, FWD, BWD),
    "a backward of three": ("UnfusedOperation", SAVED, REFERENCE, FWD, "def bwd(self, saved, dy, x) -> Any: ..."),
    "a gradient that is ignored": ("UnfusedOperation", 'outputs = ("out",)', SAVED, REFERENCE, FWD, BWD),
    "an unknown keyword": (
        "UnfusedOperation", SAVED, REFERENCE, FWD, "def bwd(self, dy, saved, *, need) -> Any: ...",
    ),
    "a keyword of fusions": (
        "UnfusedOperation", SAVED, REFERENCE, FWD, "def bwd(self, dy, saved, *, dtype) -> Any: ...",
    ),
    "meeting for redistribution": ("UnfusedOperation", "meeting: Any = None"),
    "infere for infer": ("UnfusedOperation", "def infere(self, shape) -> Any: ..."),
    "refrence for reference": ("Pointwise", "def refrence(self, x: Tensor) -> Tensor: ..."),
    "a pointwise with a forward": ("Pointwise", "def forward(self, x: Tensor) -> Tensor: ..."),
    "a pointwise that reads nothing known": ("Pointwise", 'reads = "outputs"', REFERENCE),
    "a pointwise without its derivative": ("Pointwise", 'reads = "output"', REFERENCE),
    "a derivative that nothing reads": ("Pointwise", REFERENCE, "def derivative_reference(self, y) -> Tensor: ..."),
    "a pointwise with a parameter": ("Pointwise", SLOPE, REFERENCE),
    "a private field": ("Saved", "_x: Tensor"),
    "a field of an unknown type": ("Saved", "x: Tensr"),
    "a field with a name that is taken": ("Saved", "fields: Tensor"),
    "a field that is a list": ("Saved", "parts: list[Tensor]"),
}  # fmt: skip


def defined(folder: Path, base: str, *body: str) -> Any:
    """An instance of a class with this base and body, defined in a file, so that errors can quote its lines."""
    path = folder / "defined.py"
    path.write_text("\n".join((HEAD, f"class Mine(sf.{base}):", *(f"    {line}" for line in body), "")))
    spec = importlib.util.spec_from_file_location("defined", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    linecache.clearcache()
    sys.modules["defined"] = module
    spec.loader.exec_module(module)
    return module.Mine()


# What only a run shows -----------------------------------------------------------------------------------------------

Change = Callable[..., Any]


def forward_of(change: Change) -> None:
    """Run Bias and GeLU by a fusion whose forward is correct except for a change."""

    class Wrong(sf.ForwardFusion):
        bias: ops.Bias
        act: ops.GeLU

        def saves(self, env: sf.Env) -> sf.Savings:
            return sf.Savings(launches=9)

        def fwd(self, x: Tensor) -> Any:
            z, bias = self.bias.fwd(x)
            y, act = self.act.fwd(z)
            return change(y, {"bias": bias, "act": act})

    seq(ops.Scale(2.0), ops.Bias(8), ops.GeLU(), fusions=(Wrong,))(X)


def backward_of(change: Change) -> None:
    """Run Bias and GeLU by a fusion whose backward is correct except for a change."""

    class Wrong(sf.BackwardFusion):
        bias: ops.Bias
        act: ops.GeLU

        def saves(self, env: sf.Env) -> sf.Savings:
            return sf.Savings(launches=9)

        def bwd(self, dy: Tensor, *, bias: Any, act: Any) -> Any:
            dz, _ = self.act.bwd(dy, act)
            return change(dz, {"bias.bias": dz.sum(0)})

    x = X.clone().requires_grad_()
    seq(ops.Scale(2.0), ops.Bias(8), ops.GeLU(), fusions=(Wrong,))(x).sum().backward()


def with_x(change: Change) -> Change:
    """A change of a forward, in which the activation saves a changed input."""
    return lambda y, s: (y, {**s, "act": ops.GeLU.Saved(x=change(s["act"].x))})


FORWARDS: dict[str, Change] = {
    "a slot forgotten": lambda y, s: (y, {"bias": s["bias"]}),
    "a slot too many": lambda y, s: (y, {**s, "relu": s["bias"]}),
    "slots in another order": lambda y, s: (y, {"bias": s["act"], "act": s["bias"]}),
    "no dictionary": lambda y, s: (y, tuple(s.values())),
    "no saved tensors": lambda y, s: y,
    "outputs not declared": lambda y, s: (y, {}, s),
    "a Saved of another class": lambda y, s: (y, {**s, "act": ops.ReLU.Saved(y=y)}),
    "a Saved with another field": lambda y, s: (y, {**s, "act": ops.GeLU.Saved(z=y)}),
    "a field of another shape": with_x(lambda x: x.reshape(-1)),
    "a field of another dtype": with_x(lambda x: x.double()),
    "a field on another device": with_x(lambda x: x.to("meta")),
    "a field that is None": with_x(lambda x: None),
    "a field that is a number": with_x(lambda x: 3),
    "a field that is a dictionary": with_x(lambda x: {}),
    "recomputation to another shape": with_x(lambda x: sf.Recompute(torch.sum, x)),
    "an output of another shape": lambda y, s: (y.reshape(-1), s),
    "an output of another dtype": lambda y, s: (y.half(), s),
    "no output": lambda y, s: (None, s),
}

BACKWARDS: dict[str, Change] = {
    "an unknown name": lambda dx, g: (dx, {**g, "bias.shift": g["bias.bias"]}),
    "a gradient without its slot": lambda dx, g: (dx, {"bias": g["bias.bias"]}),
    "a gradient missing": lambda dx, g: (dx, {}),
    "a gradient that is None": lambda dx, g: (dx, {"bias.bias": None}),
    "a gradient of another shape": lambda dx, g: (dx, {"bias.bias": dx}),
    "a gradient of another dtype": lambda dx, g: (dx, {"bias.bias": g["bias.bias"].double()}),
    "a gradient on another device": lambda dx, g: (dx, {"bias.bias": g["bias.bias"].to("meta")}),
    "a gradient that is a number": lambda dx, g: (dx, {"bias.bias": 3.0}),
    "a gradient that is a view": lambda dx, g: (dx, {"bias.bias": dx[0]}),
    "sf.accumulated without a main_grad": lambda dx, g: (dx, {"bias.bias": sf.accumulated}),
    "no gradient of x": lambda dx, g: (None, g),
    "a gradient of x of another shape": lambda dx, g: (dx[:, :3], g),
    "no dictionary": lambda dx, g: (dx, tuple(g.values())),
    "dx alone": lambda dx, g: dx,
}


def fails() -> type[sf.ForwardFusion]:
    """A fusion that always fails."""

    class Broken(sf.ForwardFusion):
        linear: ops.Linear
        bias: ops.Bias

        def fwd(self, x: Tensor) -> Any:
            raise RuntimeError("out of shared memory")

    return Broken


def failing(strictly: bool) -> str:
    """The fallback warning, or the error if `strictly`."""
    with warnings.catch_warnings(record=True) as told, sf.fusing(on_error="raise" if strictly else "fallback"):
        warnings.simplefilter("always")
        model = seq(ops.Linear(8, 8), fusions=(fails(),))
        for _ in range(4):
            model(X)
    return "; ".join(f"{w.category.__name__}: {w.message}" for w in told) + f"\n{model.plan(X).refused}"


def dropped() -> None:
    """Read a saved field that was dropped, as its gradient is not needed."""

    class Sums(sf.UnfusedOperation):
        class Saved(sf.Saved):
            x: Tensor = sf.field(for_="weight")

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8), requires_grad=False)

        def reference(self, x: Tensor) -> Tensor:
            return x * self.weight

        def fwd(self, x: Tensor) -> Any:
            return self.reference(x), self.Saved(x=x)

        def bwd(self, dy: Tensor, saved: Any) -> Any:
            return dy * self.weight, {"weight": (dy * saved.x).sum(0)}

    seq(Sums())(X.clone().requires_grad_()).sum().backward()


def of_operation(**methods: Any) -> None:
    """Call an operation with these methods instead of the usual ones."""
    kind = type("Mine", (ops.Tanh.__mro__[1],), {"reference": lambda self, x: x.tanh(), **methods})
    seq(ops.ReLU(), kind())(X)


def _infer_fails(self: Any, shape: Any) -> Any:
    raise KeyError("k")


RUNS: dict[str, Callable[[], Any]] = {
    "a fusion that fails, strictly": lambda: failing(True),
    "a fusion that fails": lambda: failing(False),
    "a field that was dropped": dropped,
    "an infer that fails": lambda: of_operation(infer=_infer_fails),
    "an infer that returns a list": lambda: of_operation(infer=lambda self, shape: [3]),
    "an expand that returns a list": lambda: of_operation(expand=lambda self: [self]),
    "channels that are a list": lambda: of_operation(inputs=("other",), channels=["other"]),
    "a call of a Gated with a parameter": lambda: sf.Gated(nn.PReLU()),
}


# Processes ------------------------------------------------------------------------------------------------------------


def together() -> dict[str, Callable[[], Any]]:
    """Mistakes in a group of two processes, on a fake process group."""
    from torch.distributed.device_mesh import init_device_mesh

    from seqfuse.nn import FeedForward
    from seqfuse.parallel import parallelize, pipeline

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    square = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))

    def piped(stages: Any = None, model: Any = None, over: Any = None, **rest: Any) -> Any:
        made = seq(*(ops.Linear(8, 8) for _ in range(4))) if model is None else model
        return pipeline(made, mesh if over is None else over, stages=stages, **rest)

    def ahead() -> Any:
        return parallelize(piped(), mesh, {"0": "column"})

    return {
        "stages that are none": lambda: piped(0),
        "more stages than parts": lambda: piped(9),
        "stages that are not dealt evenly": lambda: piped(3),
        "a stage at no module": lambda: piped(["9"]),
        "a stage at the first module": lambda: piped(["0"]),
        "a mesh of two dimensions": lambda: piped(over=square),
        "a pipeline of a torch module": lambda: piped(model=nn.Linear(8, 8)),
        "a pipeline over a number": lambda: piped(over=3),
        "shapes by guessing": lambda: piped(shapes="guess"),
        "a pipeline twice": lambda: piped(model=piped()),
        "a pipeline and then parallelize": ahead,
        "a weight in two stages": lambda: piped(["2"], tied()),
        "a plan of no module": lambda: parallelize(seq(FeedForward(8, 16)), mesh, {"0.upp": "column"}),
        "an unknown style of parallel": lambda: parallelize(seq(FeedForward(8, 16)), mesh, {"0": "rows"}),
        "a style that does not fit": lambda: parallelize(seq(ops.ReLU()), mesh, {"0": "column"}),
        "a plan that is a list": lambda: parallelize(seq(ops.ReLU()), mesh, ["0"]),
        "features that are not divided": lambda: ops.Linear(8, 7, parallel="column", group=mesh),
        "a vocabulary that is not divided": lambda: ops.Embedding(11, 8, parallel="vocab", group=mesh),
        "divided twice": lambda: ops.Linear(8, 8, parallel="column", group=mesh).divide("row", mesh),
        "a group of two dimensions": lambda: ops.AllReduce(square),
        "loss of another rank": lambda: piped()(X).sum().item(),
        "gradients of another rank": lambda: torch.autograd.grad(piped()(X).sum(), [X.clone().requires_grad_()]),
        "an input without data": lambda: piped()(X.to("meta")),
        "a boundary by itself": lambda: next(m for m in piped().modules() if type(m).__name__ == "Boundary")(X),
    }


def _alone(rank: int, folder: str, send: Any) -> None:
    """One of two processes: the first fails to tune, which the other reports, and then ends while the other waits."""
    from torch.distributed.device_mesh import init_device_mesh

    from seqfuse.parallel import pipeline

    torch.set_num_threads(1)
    patience = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2, timeout=patience)
    file = "nowhere/at/all" if rank == 0 else None
    found = {"the first rank fails to tune": outcome(lambda: sf.tune(linear(ops.GeLU()), X, file=file))}
    model = pipeline(linear(ops.Linear(8, 8)), init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)))
    reduce = ops.AllReduce(dist.group.WORLD)
    if rank == 1:
        send.send((found, outcome(lambda: model(X)), outcome(lambda: reduce(X))))
    # The first process ends here, so the second waits in vain.


def apart() -> dict[str, list[str]]:
    """Errors in the second of two processes, of which the first fails and then ends."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        both = [context.Process(target=_alone, args=(rank, folder, send)) for rank in range(2)]
        for process in both:
            process.start()
        found, transfer, collective = receive.recv()
        for process in both:
            process.join()
    # Gloo's messages name ports and lines of its source.
    cut = {"the other rank has ended": transfer, "the other rank has ended in a collective": collective}
    return {**found, **{name: [line.partition(" failed")[0] for line in text[:2]] for name, text in cut.items()}}


# All of them ----------------------------------------------------------------------------------------------------------


def outcome(attempt: Callable[[], Any]) -> list[str]:
    """The outcome of a mistake: class, code, operation and position of the error, and its message; or the result."""
    try:
        result = attempt()
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ in ("builtins", "seqfuse.errors")]
        where = [getattr(error, name, None) for name in ("code", "operation", "position")]
        notes = getattr(error, "__notes__", [])
        return [" ".join(map(str, (*kinds[: kinds.index("Exception")], *where))), *str(error).splitlines(), *notes]
    return ["no error", *(result.splitlines() if isinstance(result, str) else ())]


def said() -> dict[str, list[str]]:
    """The outcome of each mistake."""
    found: dict[str, list[str]] = {}
    for name, attempt in (*CALLS.items(), *caches().items(), *RUNS.items()):
        torch.manual_seed(0)
        found[name] = outcome(attempt)
    for name, change in FORWARDS.items():
        found[f"forward: {name}"] = outcome(lambda change=change: forward_of(change))
    for name, change in BACKWARDS.items():
        found[f"backward: {name}"] = outcome(lambda change=change: backward_of(change))
    with tempfile.TemporaryDirectory() as folder:
        for name, (base, *body) in DEFINITIONS.items():
            found[f"definition: {name}"] = outcome(lambda base=base, body=body: defined(Path(folder), base, *body))
    found |= {f"processes: {name}": text for name, text in apart().items()}
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        found |= {f"processes: {name}": outcome(attempt) for name, attempt in together().items()}
    finally:
        dist.destroy_process_group()
    return found
