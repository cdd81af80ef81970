"""A class that breaks its contract is refused at its definition, quoting the author's line; faults that only a run
shows are refused when the plan first runs, naming fusion, slot and field."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from tests.fuser.fusions import (
    AddForkForward,
    BiasGeLUBackward,
    BiasGeLUForward,
    LinearBiasGeLUBackward,
    LinearBiasGeLUJoint,
    assert_exact,
    randomized,
    rows,
    run,
    stepwise,
    tensor,
)

FWD, OF_X = "def fwd(self, x: Tensor) -> Any: ...", "def reference(self, x: Tensor) -> Tensor: ..."
BWD, RECORD = "def bwd(self, dy: Tensor, saved: Any) -> Any: ...", "class Saved(sf.Saved): x: Tensor"
SLOPE = "def __init__(self) -> None:\n        super().__init__()\n        self.slope = nn.Parameter(torch.ones(()))"

# By kind the lines of a class, of which the marked one has to be quoted (if none is, the first), and what
# has to be said of it.
BAD: dict[str, list[tuple[list[str], str]]] = {
    "ForwardFusion": [
        ([FWD], "at least one slot"),
        (["! bias: int", FWD], "'bias' has type <class 'int'>, which is not an operation class"),
        (["! linear: nn.Linear", FWD], "'linear' has type"),
        (["! bias: Nowhere", FWD], "'bias' does not resolve"),
        (["bias: ops.Bias", "! acts: tuple[tuple[ops.ReLU, ...], ...]", FWD], "'acts' has type"),
        (["bias: ops.Bias", "! acts: tuple[ops.ReLU, ops.ReLU]", FWD], "written tuple[X, ...]"),
        (["bias: ops.Bias", "! acts: tuple[ops.ReLU, ...] | None", FWD], "'acts'"),
        (["! bias: Renamed", FWD], "Renamed derives from Bias, so no slot matches it; derive it from an open class"),
        (["! requires: ops.Bias", FWD], "'requires' cannot be the name of a slot"),
        (["! _bias: ops.Bias", FWD], "'_bias' cannot be the name of a slot"),
        (["bias: ops.Bias", "! a: int", FWD], "slot 'a'"),
        (["bias: ops.Bias", "! def fwd(self) -> Any: ..."], "fwd must take (self, x, *, ...)"),
        (
            ["add: ops.Add", "! def fwd(self, x: Tensor, add_other: Tensor) -> Any: ..."],
            "fwd must take (self, x, *, ...)",
        ),
        (["add: ops.Add", "! def fwd(self, x: Tensor, *, other: Tensor) -> Any: ..."], "'other'"),
        (["linear: ops.Linear", "! def fwd(self, x: Tensor, *, linear_weight: Tensor) -> Any: ..."], "'linear_weight'"),
        (["add: ops.Add", "! def fwd(self, x: Tensor, **others: Tensor) -> Any: ..."], "'others'"),
        (["fork: ops.Fork", '! outputs = ("stream",)', FWD], "'stream'"),
        (["bias: ops.Bias", '! outputs = ("bias_out",)', FWD], "'bias_out'"),
        (["bias: ops.Bias", FWD, "! def bwd(self, dy: Tensor, *, bias: Any) -> Any: ..."], "has no bwd"),
        (["bias: ops.Bias", "fwd = 3"], "needs fwd"),
        (
            ["bias: ops.Bias", "! def forward(self, x: Tensor) -> Any: ..."],
            "a pass is called fwd here, not forward",
        ),
        (
            ["bias: ops.Bias", FWD, "! def require(self, env: Any) -> Any: ..."],
            "what the engine asks is called requires here, not require",
        ),
        (
            ["bias: ops.Bias", FWD, "! def save(self, env: Any) -> Any: ..."],
            "what the engine asks is called saves here, not save",
        ),
        (["bias: ops.Bias", '! layout = "contiguous"', FWD], "inner_contig"),
        (["bias: ops.Bias", '! kernels = ("cuda",)', FWD], 'kernels is a tuple of "triton" and "c"'),
        (["bias: ops.Bias", '! kernels = "triton"', FWD], 'kernels is a tuple of "triton" and "c"'),
        (["! bias: list[int]", FWD], "slot 'bias' has type list[int], which is not an operation class"),
    ],
    "FusedOperation": [
        (
            ["bias: ops.Bias", FWD],
            "derive from one of ForwardFusion, BackwardFusion, InferenceFusion, or JointFusion",
        ),
    ],
    "ForwardFusion, sf.BackwardFusion": [
        (["bias: ops.Bias", FWD, "def bwd(self, dy: Tensor, *, bias: Any) -> Any: ..."], "one of"),
    ],
    "BackwardFusion": [
        (["bias: ops.Bias", f"! {BWD}"], "bwd must take (self, dy, *, bias): dy by position, the rest"),
        (
            ["bias: ops.Bias", "act: ops.ReLU", "! def bwd(self, dy: Tensor, *, bias: Any) -> Any: ..."],
            "by keyword the Saved of every slot that has fields: act",
        ),
        (["bias: ops.Bias", "! def bwd(self, dy: Tensor, *, bias: Any, relu: Any) -> Any: ..."], "'relu'"),
        (["bias: ops.Bias", "! def bwd(self, dy: Tensor, *, bias: Any, d_bias_out: Tensor) -> Any: ..."], "d_bias_out"),
        (
            ["bias: ops.Bias", "! def backward(self, dy: Tensor, *, bias: Any) -> Any: ..."],
            "a pass is called bwd here, not backward",
        ),
    ],
    "JointFusion": [
        (["bias: ops.Bias", FWD, BWD], "needs its own class Saved(sf.Saved)"),
        (["bias: ops.Bias", RECORD, FWD], "needs bwd"),
    ],
    "UnfusedOperation": [
        ([RECORD, "! def forward(self, x: Tensor) -> Any: ...", BWD], "a pass is called fwd here, not forward"),
        ([RECORD, OF_X, FWD], "needs bwd"),
        ([OF_X, FWD, BWD], "its own class Saved(sf.Saved)"),
        (
            [RECORD, OF_X, FWD, "! def bwd(self, saved: Any, dy: Tensor, x: Tensor) -> Any: ..."],
            "bwd must take (self, dy, saved, *, ...)",
        ),
        (['outputs = ("out",)', RECORD, OF_X, FWD, f"! {BWD}"], "bwd must take d_out by keyword"),
        (
            [RECORD, OF_X, FWD, "! def bwd(self, dy: Tensor, saved: Any, *, need: Any) -> Any: ..."],
            "'need', which is none of",
        ),
        (
            [RECORD, OF_X, FWD, "! def bwd(self, dy: Tensor, saved: Any, *, dtype: Any) -> Any: ..."],
            "'dtype', which is none of",
        ),
    ],
    "Pointwise": [
        (["! def forward(self, x: Tensor) -> Tensor: ..."], "a pass is called fwd here, not forward"),
        (['! reads = "outputs"', OF_X], 'reads must be "input" or "output"'),
        (['! reads = "output"', OF_X], "needs derivative_reference(y)"),
        ([OF_X, "! def derivative_reference(self, y: Tensor) -> Tensor: ..."], 'it needs reads = "output"'),
        ([f"! {SLOPE}", OF_X], "computes no gradient of its parameter 'slope'"),
        ([f"! {SLOPE}", OF_X, BWD], "Gated computes no gradient of the parameter 'slope'"),
    ],
    "Saved": [
        (["! _x: Tensor"], "'_x' must be a public identifier"),
        (["! x: Tensr"], "'x' does not resolve"),
        (["! fields: Tensor"], "'fields'"),
        (["! kept: Tensor"], "'kept'"),
        (["! parts: list[Tensor]"], "'parts'"),
        (["! parts: dict[str, Tensor]"], "'parts'"),
    ],
}

SOURCE = """from __future__ import annotations
from typing import Any
import torch
from torch import Tensor, nn
import seqfuse as sf
from seqfuse import ops

class Renamed(ops.Bias): ...

class Alphabetical(sf.{kind}):
    {body}
"""


def defined(path: Path, kind: str, body: Sequence[str]) -> tuple[sf.PluginError, str]:
    """What is said of a class in a file of its own, and the line that has to be quoted."""
    source = SOURCE.format(kind=kind, body="\n    ".join(body))
    marked = re.search("! (.*\n?(?: {8}.*\n?)*)", source)
    source = source.replace("! ", "", 1) if marked else source
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("of_an_author", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)

    def run(loader: Any = spec.loader) -> None:
        loader.exec_module(module)
        sf.Gated(module.Alphabetical())  # a parameter is seen when an operation is constructed

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "of_an_author", module)
        with pytest.raises(sf.PluginError) as caught:
            run()
    line = marked[1].strip().splitlines()[-1].strip() if marked else f"class Alphabetical(sf.{kind}):"
    return caught.value, line


@pytest.mark.parametrize(("kind", "body", "message"), [(kind, *case) for kind, cases in BAD.items() for case in cases])
def test_a_bad_definition_quotes_the_line_of_its_author(
    kind: str, body: Sequence[str], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "of_an_author.py"
    error, line = defined(path, kind, body)
    assert error.code == "SF301"
    assert message in error.message
    quoted = re.search(r"^ +(\S+):(\d+): (.*)$", error.message, re.MULTILINE)
    assert quoted, error.message
    assert (Path(quoted[1]), quoted[3]) == (path, line)
    assert path.read_text().splitlines()[int(quoted[2]) - 1].strip() == line


@pytest.mark.parametrize(
    "make",
    [
        lambda: ops.Add.Saved(x=1),
        lambda: ops.GeLU.Saved(),
        lambda: ops.GeLU.Saved(1),
        lambda: ops.GeLU.Saved(y=tensor(1)),
    ],
    ids=["surplus", "missing", "by_position", "another_name"],
)
def test_a_record_takes_its_fields_by_name_and_all_of_them(make: Callable[[], Any]) -> None:
    with pytest.raises(TypeError):
        make()


@pytest.mark.parametrize("kind", [getattr(ops, name) for name in ops.__all__], ids=lambda kind: kind.__name__)
def test_what_an_operation_saves_has_a_public_name_in_messages(kind: Any) -> None:
    if issubclass(kind, sf.UnfusedOperation):
        assert not any(part.startswith("_") for part in kind.Saved.__qualname__.split("."))


def test_records_are_frozen() -> None:
    record = ops.GeLU.Saved(x=tensor(3))
    with pytest.raises(AttributeError):
        record.x = tensor(3)
    with pytest.raises(AttributeError):
        del record.x
    with pytest.raises(AttributeError, match="has no field 'y'"):
        _ = record.y
    assert ops.GeLU.Saved.fields == ("x",)


# Faults that only a run can show. Each is one change of a right fusion.

Change = Callable[[Any, dict[str, Any]], Any]


def forward_that(change: Change) -> type[sf.ForwardFusion]:
    class Wrong(BiasGeLUForward):
        def fwd(self, x: Tensor) -> Any:
            y, saved = super().fwd(x)
            return change(y, saved)

    return Wrong


def with_record(**fields: Any) -> Change:
    return lambda y, saved: (y, {**saved, "act": ops.GeLU.Saved(**{k: f(saved["act"].x) for k, f in fields.items()})})


RECORDS: dict[str, tuple[Change, str]] = {
    "a_slot_forgotten": (lambda y, s: (y, {"bias": s["bias"]}), r"slot 'act' needs a GeLU\S* ?\S*Saved|slot 'act'"),
    "a_slot_too_many": (lambda y, s: (y, {**s, "relu": s["bias"]}), "unknown slots: 'relu'"),
    "slots_reordered": (lambda y, s: (y, {"bias": s["act"], "act": s["bias"]}), "slot '(bias|act)' needs"),
    "no_dictionary": (lambda y, s: (y, tuple(s.values())), r"not \(Tensor, tuple\)"),
    "no_record": (lambda y, s: y, r"must return \(y, \{slot: Saved\}\)"),
    "outputs_not_declared": (lambda y, s: (y, {}, s), r"must return \(y, \{slot: Saved\}\)"),
    "a_record_of_another_class": (lambda y, s: (y, {**s, "act": ops.ReLU.Saved(y=y)}), "slot 'act' needs"),
    "a_field_reshaped": (with_record(x=lambda x: x.reshape(-1)), r"field 'x' of slot 'act' should be float32\[7, 5\]"),
    "a_field_without_its_last_column": (with_record(x=lambda x: x[..., :-1]), r"field 'x' of slot 'act'.*\[7, 4\]"),
    "a_field_transposed": (with_record(x=lambda x: x.mT), r"field 'x' of slot 'act'.*\[5, 7\]"),
    "a_field_cast": (with_record(x=lambda x: x.bfloat16()), r"field 'x' of slot 'act'.*not bfloat16"),
    "a_field_widened": (with_record(x=lambda x: x.double()), r"field 'x' of slot 'act'.*not float64"),
    "a_field_elsewhere": (with_record(x=lambda x: x.to("meta")), r"field 'x' of slot 'act'.*on meta"),
    "a_field_without_its_tensor": (with_record(x=lambda x: None), r"field 'x' of slot 'act'.*not None"),
    "a_field_that_is_plain": (with_record(x=lambda x: 3), r"field 'x' of slot 'act'.*not 3"),
    "an_output_reshaped": (lambda y, s: (y.reshape(-1), s), r"its output should be float32\[7, 5\]"),
    "an_output_cast": (lambda y, s: (y.half(), s), r"its output should be float32.*not float16"),
    "no_output": (lambda y, s: (None, s), r"must return \(y, \{slot: Saved\}\)"),
}


@pytest.mark.parametrize("training", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize(("change", "message"), RECORDS.values(), ids=RECORDS.keys())
def test_a_forward_that_saves_what_the_operation_cannot_read_is_named(
    change: Change, message: str, training: bool
) -> None:
    model = randomized(sf.Sequential(ops.Scale(2), ops.Bias(5), ops.GeLU(), fusions=(forward_that(change),)))
    x = tensor(7, 5)
    for _ in range(2):
        with torch.set_grad_enabled(training), pytest.raises(sf.PluginError, match=message) as caught:
            model(x)
        assert (caught.value.code, caught.value.operation, caught.value.position) == ("SF302", "Wrong", 1)
    with sf.fusing(False):
        expected = run(model, x)
    model.fusions = ()
    assert_exact(run(model, x), expected)


def test_a_forward_is_checked_again_for_another_dtype_of_x_or_a_parameter_and_under_autocast() -> None:
    class Narrow(sf.ForwardFusion):
        bias: ops.Bias
        act: ops.Tanh

        def fwd(self, x: Tensor) -> Any:
            z, bias = self.bias.fwd(x)
            y = torch.tanh(z)
            kept = y.bfloat16() if torch.is_autocast_enabled("cpu") else y.float()
            return y, {"bias": bias, "act": ops.Tanh.Saved(y=kept)}

    model = sf.Sequential(ops.Bias(5), ops.Tanh(), fusions=(Narrow,))
    wide = r"field 'y' of slot 'act' should be float64\[7, 5\]"
    model(tensor(7, 5))
    with pytest.raises(sf.PluginError, match=wide):
        model(tensor(7, 5).double())
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(sf.PluginError, match=r"float32\[7, 5\] .* not bfloat16"):
        model(tensor(7, 5))
    model(tensor(7, 5))
    model.double()
    with pytest.raises(sf.PluginError, match=wide):
        model(tensor(7, 5))


class Windowed(sf.Pointwise):
    def __init__(self) -> None:
        super().__init__()
        self.sizes = (1, 2)

    def reference(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


@pytest.mark.parametrize("change", ["a frozen parameter", "a setting of several numbers"])
def test_a_forward_is_checked_again_after(change: str) -> None:
    class Narrow(sf.ForwardFusion):
        bias: ops.Bias
        act: Windowed

        def fwd(self, x: Tensor, *, needs: frozenset[str]) -> Any:
            z, bias = self.bias.fwd(x)
            kept = z if "bias.bias" in needs and self.act.sizes == (1, 2) else z.half()
            return torch.tanh(z), {"bias": bias, "act": Windowed.Saved(x=kept)}

    model = sf.Sequential(ops.Bias(5), Windowed(), fusions=(Narrow,))
    model(tensor(7, 5))
    if change == "a frozen parameter":
        model[0].requires_grad_(False)
    else:
        model[1].sizes = (2, 1)
    with pytest.raises(sf.PluginError, match=r"field 'x' of slot 'act' should be float32\[7, 5\]"):
        model(tensor(7, 5))


def test_a_record_made_with_a_wrong_field_is_the_fusions_error() -> None:
    class Wrong(BiasGeLUForward):
        def fwd(self, x: Tensor) -> Any:
            return x, {"bias": ops.Bias.Saved(), "act": ops.GeLU.Saved(z=x)}

    model = sf.Sequential(ops.Bias(5), ops.GeLU(), fusions=(Wrong,))
    with pytest.raises(sf.PluginError, match="Wrong") as caught:
        model(tensor(7, 5))
    assert caught.value.code == "SF302"
    assert "): fwd built a wrong Saved: " in str(caught.value)
    assert str(caught.value).endswith("'z'; its fields are x")


def test_a_record_of_a_slot_among_many_is_named_by_number() -> None:
    class Wrong(sf.ForwardFusion):
        acts: tuple[sf.Pointwise, ...]

        def fwd(self, x: Tensor) -> Any:
            made = []
            for i, act in enumerate(self.acts):
                x, record = act.fwd(x)
                made.append(type(record)(y=x.double()) if i == 1 else record)
            return x, {"acts": tuple(made)}

    model = sf.Sequential(ops.Tanh(), ops.Sigmoid(), ops.Tanh(), fusions=(Wrong,))
    with pytest.raises(sf.PluginError, match=r"field 'y' of slot 'acts\.1'"):
        model(tensor(7, 5))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda y: {"fork_out": y[:3]}, r"its output 'fork_out' should be float32\[7, 5\]"),
        (lambda y: {}, "fork_out"),
    ],
)
def test_an_output_of_a_fork_is_checked_too(made: Callable[[Tensor], dict[str, Tensor]], message: str) -> None:
    class Wrong(AddForkForward):
        def fwd(self, x: Tensor, *, add_other: Tensor) -> Any:
            y, _, saved = super().fwd(x, add_other=add_other)
            return y, made(y), saved

    model = sf.Sequential(ops.Add("a"), ops.Fork("b"), ops.Tanh(), ops.Add("b"), fusions=(Wrong,))
    with pytest.raises(sf.PluginError, match=message):
        model(tensor(7, 5), a=tensor(7, 5))


def backward_that(change: Callable[[Tensor, dict[str, Any], Tensor], Any]) -> type[sf.BackwardFusion]:
    class Wrong(LinearBiasGeLUBackward):
        def bwd(self, dy: Tensor, *, linear: Any, bias: Any, act: Any, needs: frozenset[str]) -> Any:
            dx, grads = super().bwd(dy, linear=linear, bias=bias, act=act, needs=needs)
            return change(dx, grads, dy)

    return Wrong


def joint_that(change: Callable[[Tensor, dict[str, Any], Tensor], Any]) -> type[sf.JointFusion]:
    class Wrong(LinearBiasGeLUJoint):
        def bwd(self, dy: Tensor, saved: Any, *, needs: frozenset[str]) -> Any:
            dx, grads = super().bwd(dy, saved, needs=needs)
            return change(dx, grads, dy)

    return Wrong


def operation_that(change: Callable[[Tensor, dict[str, Any], Tensor], Any]) -> type[sf.UnfusedOperation]:
    class Wrong(sf.UnfusedOperation):
        """x weight^T + bias, with the names of the fusions above."""

        class Saved(sf.Saved):
            x: Tensor
            weight: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Module()
            self.linear.weight = nn.Parameter(tensor(4, 5, grad=False))
            self.bias = nn.Module()
            self.bias.bias = nn.Parameter(tensor(4, grad=False))

        def reference(self, x: Tensor) -> Tensor:
            return x @ self.linear.weight.mT + self.bias.bias

        def fwd(self, x: Tensor) -> Any:
            return self.reference(x), self.Saved(x=x, weight=self.linear.weight)

        def bwd(self, dy: Tensor, saved: Any) -> Any:
            return change(dy @ saved.weight, {"linear.weight": dy.mT @ saved.x, "bias.bias": rows(dy)}, dy)

        def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
            return (*shape[:-1], 4)

    return Wrong


GradientChange = Callable[[Any, dict[str, Any], Tensor], Any]
GRADIENTS: dict[str, tuple[GradientChange, str]] = {
    "an_unknown_name": (lambda dx, g, dy: (dx, {**g, "bias.shift": g["bias.bias"]}), "'bias.shift'; known are"),
    "a_parameter_without_its_slot": (lambda dx, g, dy: (dx, {**g, "weight": g["linear.weight"]}), "gradient 'weight'"),
    "a_gradient_missing": (lambda dx, g, dy: (dx, {"bias.bias": g["bias.bias"]}), "no gradient 'linear.weight'"),
    "a_gradient_that_is_none": (lambda dx, g, dy: (dx, {**g, "bias.bias": None}), "no gradient 'bias.bias'"),
    "another_shape": (lambda dx, g, dy: (dx, {**g, "bias.bias": dy}), r"'bias.bias' should be float32\[4\].*\[7, 4\]"),
    "transposed": (
        lambda dx, g, dy: (dx, {**g, "linear.weight": g["linear.weight"].mT.contiguous()}), r"'linear.weight'.*\[5, 4\]"
    ),
    "another_dtype": (
        lambda dx, g, dy: (dx, {**g, "linear.weight": g["linear.weight"].double()}), "'linear.weight'.*float64"
    ),
    "another_device": (lambda dx, g, dy: (dx, {**g, "bias.bias": g["bias.bias"].to("meta")}), "'bias.bias'.*on meta"),
    "no_gradient_of_x": (lambda dx, g, dy: (None, g), "no gradient of x"),
    "x_of_another_shape": (lambda dx, g, dy: (dx[:, :3], g), r"gradient of x.*\[7, 5\].*\[7, 3\]"),
    "x_of_another_dtype": (lambda dx, g, dy: (dx.double(), g), "gradient of x.*float64"),
    "no_dictionary": (lambda dx, g, dy: (dx, tuple(g.values())), r"\(dx, \{name: gradient\}\).*tuple"),
    "only_dx": (lambda dx, g, dy: dx, "bwd must return"),
    "a_number": (lambda dx, g, dy: (dx, {**g, "bias.bias": 3.0}), "'bias.bias'"),
}  # fmt: skip
MAKERS: dict[str, Callable[[GradientChange], Sequence[Any]]] = {
    "backward": lambda change: ([ops.Linear(5, 4), ops.GeLU()], (backward_that(change),)),
    "joint": lambda change: ([ops.Linear(5, 4), ops.GeLU()], (joint_that(change),)),
    "operation": lambda change: ([operation_that(change)()], ()),
}


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS.keys())
@pytest.mark.parametrize(("change", "message"), GRADIENTS.values(), ids=GRADIENTS.keys())
def test_gradients_that_do_not_fit_are_named(change: GradientChange, message: str, maker: Any) -> None:
    made, rules = maker(change)
    model = randomized(sf.Sequential(ops.Scale(2), *made, fusions=rules))
    x = tensor(7, 5)
    for _ in range(2):
        y = model(x)
        with pytest.raises(sf.PluginError, match=message) as caught:
            y.backward(tensor(7, 4, seed=9, grad=False))
        assert (caught.value.code, caught.value.operation, caught.value.position) == ("SF303", "Wrong", 1)
        assert all(p.grad is None for p in model.parameters())
        assert x.grad is None


@pytest.mark.parametrize("leading", [(1, 7), (7, 1, 1)], ids=str)
@pytest.mark.parametrize("columns", [5, 3])
def test_a_gradient_is_checked_by_columns_where_a_plan_was_made_for_other_leading_dimensions(
    columns: int, leading: tuple[int, ...]
) -> None:
    wrong = backward_that(lambda dx, g, dy: (dx[..., :columns], g))
    model = randomized(sf.Sequential(ops.Linear(5, 4), ops.GeLU(), fusions=(wrong,)))
    model(tensor(7, 5))
    y, dy = model(tensor(*leading, 5)), tensor(*leading, 4, seed=9, grad=False)
    if columns == 5:
        y.backward(dy)
    else:
        with pytest.raises(sf.PluginError, match="the gradient of x should be like"):
            y.backward(dy)


ALIASES: dict[str, GradientChange] = {
    "the_incoming_gradient": lambda dx, g, dy: (dx, {**g, "bias.bias": dy[0]}),
    "the_gradient_of_x": lambda dx, g, dy: (dx, {**g, "bias.bias": dx[0, :4]}),
    "another_gradient": lambda dx, g, dy: (dx, {**g, "bias.bias": g["linear.weight"][:, 0]}),
}


@pytest.mark.parametrize("change", ALIASES.values(), ids=ALIASES.keys())
def test_a_gradient_that_is_part_of_another_tensor_is_named(change: GradientChange) -> None:
    model = randomized(sf.Sequential(ops.Linear(5, 4), ops.GeLU(), fusions=(backward_that(change),)))
    with pytest.raises(sf.PluginError, match=r"gradient '(bias\.bias|linear\.weight)' shares its memory") as caught:
        model(tensor(7, 5)).backward(tensor(7, 4, seed=9, grad=False))
    assert (caught.value.code, caught.value.operation) == ("SF303", "Wrong")


def test_a_gradient_that_is_its_parameter_is_named() -> None:
    class Wrong(BiasGeLUBackward):
        def bwd(self, dy: Tensor, *, bias: Any, act: Any) -> Any:
            dx, _ = super().bwd(dy, bias=bias, act=act)
            return dx, {"bias.bias": self.bias.bias.detach()}

    model = randomized(sf.Sequential(ops.Bias(5), ops.GeLU(), fusions=(Wrong,)))
    with pytest.raises(sf.PluginError, match="shares its memory with its parameter"):
        model(tensor(7, 5)).sum().backward()


@pytest.mark.parametrize("kind", ["fusion", "operation"])
def test_the_gradient_of_an_extra_input_cannot_be_forgotten(kind: str) -> None:
    class Forgetful(sf.BackwardFusion):
        add: ops.Add
        act: ops.ReLU

        def bwd(self, dy: Tensor, *, add: Any, act: Any) -> Any:
            return torch.where(act.y > 0, dy, 0), {}

    class Sum(sf.UnfusedOperation):
        class Saved(sf.Saved):
            pass

        def reference(self, x: Tensor, *, other: Tensor) -> Tensor:
            return x + other

        def fwd(self, x: Tensor, *, other: Tensor) -> Any:
            return x + other, self.Saved()

        def bwd(self, dy: Tensor, saved: Any) -> Any:
            return dy, {}

    first = ops.Add("other") if kind == "fusion" else Sum()
    model = sf.Sequential(first, ops.ReLU(), fusions=(Forgetful,))
    other = tensor(7, 5)
    with pytest.raises(sf.PluginError, match=r"no gradient '(add\.)?other'"):
        model(tensor(7, 5), other=other).sum().backward()
    # Where no gradient is needed, none is missing.
    x = tensor(7, 5)
    model(x, other=other.detach()).sum().backward()
    assert x.grad is not None


def test_gradients_nobody_wants_may_be_left_out_or_given() -> None:
    class Sparing(BiasGeLUBackward):
        def bwd(self, dy: Tensor, *, bias: Any, act: Any) -> Any:
            return super().bwd(dy, bias=bias, act=act)[0], {}

    for cls in (BiasGeLUBackward, Sparing):
        model = randomized(sf.Sequential(ops.Bias(5), ops.GeLU(), fusions=(cls,)))
        model[0].bias.requires_grad_(False)
        x = tensor(7, 5)
        got = run(model, x)
        with sf.fusing(False):
            assert_exact(got, run(model, x))


def test_an_operation_may_have_any_attribute() -> None:
    class Odd(sf.Pointwise):
        def __init__(self) -> None:
            super().__init__()
            self.sizes: tuple[Any, ...] = ([1, 2], {"a": 3})
            self.note = {"anything": [object()]}

        def reference(self, x: Tensor) -> Tensor:
            return 2 * x

    class BiasOdd(sf.ForwardFusion):
        bias: ops.Bias
        odd: Odd
        fwd = stepwise

    model = randomized(sf.Sequential(ops.Bias(5), Odd(), fusions=(BiasOdd,)))
    x = tensor(7, 5)
    with sf.fusing(on_error="raise"):
        torch.testing.assert_close(model(x), 2 * (x + model[0].bias))


def test_a_slot_may_have_the_name_of_the_incoming_gradient() -> None:
    class Back(sf.BackwardFusion):
        d: ops.Bias
        act: ops.GeLU

        def bwd(self, dy: Tensor, *, d: Any, act: Any) -> Any:
            dx, _ = self.act.bwd(dy, act)
            return dx, {"d.bias": rows(dx)}

    model, x = randomized(sf.Sequential(ops.Bias(5), ops.GeLU(), fusions=(Back,))), tensor(7, 5)
    with sf.fusing(on_error="raise"):
        got = run(model, x)
    with sf.fusing(False):
        assert_exact(got, run(model, x))
