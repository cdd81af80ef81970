"""`check_op` passes every operation of the library and finds each spoiled one, by name."""

from __future__ import annotations

import traceback

import pytest
import torch
import triton
import triton.language as tl

import seqfuse as sf
from seqfuse import compiler, ops
from seqfuse.errors import PluginError
from seqfuse.testing import check_op, seeded_randn
from tests.selection import few_cases as few_cases

from .spoiled import SPOILED
from .spoiled.operations import Affine

X = seeded_randn((4, 6), 0)
MUTANTS = [(cls, message) for cls, message in SPOILED if issubclass(cls, sf.UnfusedOperation)]
LIBRARY = [
    ops.Linear(6, 5),
    ops.Linear(6, 5, bias=False),
    ops.Bias(6),
    ops.LayerNorm(6),
    ops.LayerNorm(6, elementwise_affine=False),
    ops.RMSNorm(6, zero_centered=True),
    ops.GeLU(),
    ops.Tanh(),
    ops.SwiGLU(),
    ops.Dropout(0.3),
    ops.Dropout(0.3, mode="downscale_in_infer"),
    ops.Fork("out"),
    ops.Add("residual"),
    ops.Reshape(2, 3),
]


# tests/ops checks every operation; these reach all parts of the check.
WHOLE = (ops.Linear, ops.SwiGLU, ops.Dropout, ops.Add)


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(op, id=str(op).splitlines()[0], marks=[pytest.mark.full] * (not isinstance(op, WHOLE)))
        for op in LIBRARY
    ],
)
def test_passes_a_correct_operation(operation: sf.UnfusedOperation):
    before = {name: p.clone() for name, p in operation.named_parameters()}
    found = check_op(operation, X)
    assert found.operation == type(operation).__name__
    assert found.cases >= 40
    assert all(torch.equal(p, before[name]) for name, p in operation.named_parameters())


class Correct(Affine):
    reference = Affine.reference


def test_passes_an_operation_of_ones_own():
    check_op(Correct(), X, dtypes=(torch.float32, torch.float16, torch.float64))


def test_a_backward_that_does_not_ask_what_is_wanted_may_compute_all():
    class Whole(Affine):
        class Saved(sf.Saved):
            x: torch.Tensor
            weight: torch.Tensor

        reference = Affine.reference

        def bwd(self, dy, saved):
            return super().bwd(dy, saved, needs=frozenset({"x", "weight", "bias"}))

    check_op(Whole(), X)


# Found in one case of many; the others in any case.
IN_ONE_CASE = (
    "DoublesBatches",
    "SwallowsInfinity",
    "OverflowsOnItsWay",
    "ReadsStridedGradientsAsIfContiguous",
    "NeedsTwoDimensions",
    "IgnoresNeeds",
    "ComputesDifferentlyWithFewerNeeds",
    "ReadsADroppedField",
    "DropsTokensBehindItsTile",
    "WidensTheGradientOfAnInput",
    "TakesGradientsOfAllOutputs",
)


@pytest.mark.parametrize(("operation", "message"), MUTANTS, ids=[operation.__name__ for operation, _ in MUTANTS])
def test_catches(operation: type[sf.UnfusedOperation], message: str, request: pytest.FixtureRequest):
    if operation.__name__ not in IN_ONE_CASE:
        request.getfixturevalue("few_cases")
    with pytest.raises((AssertionError, PluginError), match=message) as error:
        check_op(operation(), X)
    assert operation.__name__ in str(error.value)
    assert torch.get_default_dtype() is torch.float32


def test_there_is_a_mutant_for_every_way_to_break_the_contract():
    assert len(MUTANTS) >= 35


def test_operations_need_not_be_made_for_the_shape_of_x_alone():
    check_op(ops.LayerNorm((3, 6)), seeded_randn((2, 5, 3, 6), 0), dtypes=(torch.float32,))
    check_op(ops.Linear(6, 5), seeded_randn((6,), 0), dtypes=(torch.float32,))


@pytest.mark.skipif(sf.Env.of("cpu").triton, reason="kernels run here")
def test_says_that_no_kernel_was_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiler, "_failures", ["no C compiler: there is no cc"])
    reason = "value and derivative were not checked: no C compiler: there is no cc"
    x = torch.randn(4, 6)
    found = check_op(ops.ReLU(), x, dtypes=(torch.float32,))
    assert str(found) == f"ReLU: {found.cases} cases\n  skipped: {reason}"
    gated = check_op(sf.Gated(ops.ReLU()), x, dtypes=(torch.float32,))
    assert gated.skipped == (f"activation ReLU: {reason}",)
    assert check_op(ops.Bias(6), x, dtypes=(torch.float32,)).skipped == ()


@pytest.mark.skipif(sf.Env.of("cpu").kernels != "c", reason="no C kernel runs here")
def test_small_tensors_are_enough_for_c_kernels():
    assert check_op(ops.ReLU(), torch.randn(4, 6), dtypes=(torch.float32,)).skipped == ()


class ForgetsItsSlope(sf.Pointwise):
    """y = x where x > 0, else slope x; its kernel has only the first slope."""

    @triton.jit
    def value(x, P: tl.constexpr):
        return tl.where(x > 0, x, 0.5 * x)

    @triton.jit
    def derivative(x, P: tl.constexpr):
        return tl.where(x > 0, 1.0, P[0])

    def __init__(self, slope: float = 0.5) -> None:
        super().__init__()
        self.slope = slope

    @property
    def P(self) -> tuple[float, ...]:
        return (self.slope,)

    @classmethod
    def examples(cls, x: torch.Tensor) -> tuple[ForgetsItsSlope, ...]:
        return cls(), cls(0.25)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x, self.slope * x)


@pytest.mark.skipif(sf.Env.of("cpu").kernels is None, reason="device functions need Triton or a C compiler")
def test_device_functions_are_compared_for_the_numbers_of_each_example():
    said = r"ForgetsItsSlope\(slope=0.25\) of its `examples`: value and derivative, float32, .*: value differs from fwd"
    with pytest.raises(AssertionError, match=said):
        check_op(ForgetsItsSlope(), X, dtypes=(torch.float32,))


class Shifted(sf.UnfusedOperation):
    """y = x + by; wrong for an odd `by`."""

    class Saved(sf.Saved):
        pass

    def __init__(self, by: int = 2) -> None:
        super().__init__()
        self.by = by

    @classmethod
    def examples(cls, x: torch.Tensor) -> tuple[Shifted, ...]:
        return cls(), cls(3)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.by

    def fwd(self, x: torch.Tensor) -> tuple[torch.Tensor, Saved]:
        y = x + self.by // 2 * 2
        return y, self.Saved()

    def bwd(self, dy: torch.Tensor, saved: Saved) -> tuple[torch.Tensor, sf.Grads]:
        return dy, {}


class ShiftedBehindItsTile(Shifted):
    """Wrong in columns after the first 128."""

    examples = sf.UnfusedOperation.examples

    def fwd(self, x: torch.Tensor) -> tuple[torch.Tensor, Shifted.Saved]:
        y = x + self.by
        y[..., 128:] = 0
        return y, self.Saved()


class ShiftedInPart(Shifted):
    """Wrong in columns after the last power of two."""

    examples = sf.UnfusedOperation.examples

    def fwd(self, x: torch.Tensor) -> tuple[torch.Tensor, Shifted.Saved]:
        y = x + self.by
        y[..., 1 << (y.shape[-1].bit_length() - 1) :] = 0
        return y, self.Saved()


@pytest.mark.usefixtures("few_cases")
def test_other_configurations_of_a_class_and_another_width_are_tried():
    x = seeded_randn((4, 8), 0)
    with pytest.raises(AssertionError, match=r"Shifted, Shifted\(by=3\) of its `examples`, float32, x \(4, 8\)"):
        check_op(Shifted(), x)
    for operation in (ShiftedInPart, ShiftedBehindItsTile):
        with pytest.raises(AssertionError, match=r"\(by=2\) of its `example`, float32, x \(4, 264\)"):
            check_op(operation(), x)


class InFloat32(Shifted):
    def fwd(self, x: torch.Tensor) -> tuple[torch.Tensor, Shifted.Saved]:
        return x.float() + self.by, self.Saved()


class TakesNoFew(Shifted):
    """Its reference raises a torch error if x has no dimension of tokens."""

    examples = sf.UnfusedOperation.examples

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(-1, -2).transpose(-1, -2) + self.by

    def fwd(self, x: torch.Tensor) -> tuple[torch.Tensor, Shifted.Saved]:
        return x + self.by, self.Saved()


def test_an_output_of_another_dtype_is_named():
    with pytest.raises(AssertionError, match=r"InFloat32, bfloat16, .*: y is torch.float32, and torch.bfloat16 from"):
        check_op(InFloat32(), seeded_randn((4, 6), 0))


@pytest.mark.usefixtures("few_cases")
def test_a_shape_that_the_reference_fails_on_is_told_and_one_that_is_refused_is_not():
    found = check_op(TakesNoFew(), seeded_randn((4, 6), 0))
    assert len(found.skipped) == 1
    assert found.skipped[0].startswith("x (6,), which the reference refuses: IndexError: Dimension out of range")
    assert not check_op(ops.Bias(6), seeded_randn((4, 6), 0)).skipped


class InTheDtypeOfX(sf.UnfusedOperation):
    """y = x + sin(a x)^2 / a, each step rounded to the dtype of x."""

    class Saved(sf.Saved):
        x: torch.Tensor
        a: torch.Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.ones(size))

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sin(self.a * x) ** 2 / self.a

    def fwd(self, x: torch.Tensor) -> tuple[torch.Tensor, Saved]:
        return self.reference(x), self.Saved(x=x, a=self.a)

    def bwd(self, dy: torch.Tensor, saved: Saved) -> tuple[torch.Tensor, sf.Grads]:
        x, a = saved.x, saved.a
        slope = torch.sin(2 * a * x)
        da = (dy * (x * slope / a - torch.sin(a * x) ** 2 / a**2)).sum_to_size(a.shape)
        return dy * (1 + slope), {"a": da}


def test_rounding_between_the_steps_is_called_that_and_the_error_has_no_frames_of_the_kit():
    with pytest.raises(AssertionError) as caught:
        check_op(InTheDtypeOfX(64), seeded_randn((5, 64), 0))
    first, *_, meaning = str(caught.value).splitlines()
    assert first.startswith("InTheDtypeOfX, bfloat16, ")
    assert first.endswith(": operation differs from its reference; compute in float32 and round once")
    assert meaning == "  (against float64, e_f is the error of the operation, e_u that of its reference in this dtype)"
    here, kit = caught.traceback
    assert here.frame.code.name.startswith("test_rounding")
    assert kit.frame.f_locals["__tracebackhide__"]  # so that pytest shows only the test
    assert caught.value.__cause__ is None


class SavesRounded(sf.UnfusedOperation):
    """y = x s with s = sigmoid(x), and dx in float32, of an s that was rounded to the dtype of x."""

    class Saved(sf.Saved):
        x: torch.Tensor
        s: torch.Tensor

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x)

    def fwd(self, x: torch.Tensor) -> tuple[torch.Tensor, Saved]:
        return self.reference(x), self.Saved(x=x, s=torch.sigmoid(x))

    def bwd(self, dy: torch.Tensor, saved: Saved) -> tuple[torch.Tensor, sf.Grads]:
        wide = torch.promote_types(dy.dtype, torch.float32)
        d, x, s = (t.to(wide) for t in (dy, saved.x, saved.s))
        return (d * s * (1 + x * (1 - s))).to(dy.dtype), {}


def test_a_saved_field_that_was_rounded_is_told_from_rounding_between_the_steps():
    said = r"bfloat16, .*; y is right, and 's' saved in torch\.bfloat16: save float32, or recompute from x"
    with pytest.raises(AssertionError, match=said):
        check_op(SavesRounded(), seeded_randn((5, 64), 0))


class Saturates(sf.UnfusedOperation):
    """y = 2 / (exp(2 x) + 1), computed as 1 - tanh(x)."""

    class Saved(sf.Saved):
        x: torch.Tensor

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * torch.sigmoid(-2 * x)

    def fwd(self, x: torch.Tensor) -> tuple[torch.Tensor, Saved]:
        return 1 - torch.tanh(x), self.Saved(x=x)

    def bwd(self, dy: torch.Tensor, saved: Saved) -> tuple[torch.Tensor, sf.Grads]:
        s = torch.sigmoid(-2 * saved.x)
        return dy * -4 * s * (1 - s), {}


class CancelsNearZero(Saturates):
    """y = expm1(x), computed as exp(x) - 1."""

    class Saved(sf.Saved):
        x: torch.Tensor

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        return torch.expm1(x)

    def fwd(self, x: torch.Tensor) -> tuple[torch.Tensor, Saved]:
        return torch.exp(x) - 1, self.Saved(x=x)

    def bwd(self, dy: torch.Tensor, saved: Saved) -> tuple[torch.Tensor, sf.Grads]:
        return dy * torch.exp(saved.x), {}


@pytest.mark.parametrize(
    ("op", "regime", "said"),
    [(Saturates, "offset", "x is near 8 here, where functions that saturate"),
     (CancelsNearZero, "small", "x is near 0 here, where digits cancel")],
)  # fmt: skip
def test_the_message_says_which_digits_cancel(op: type[sf.UnfusedOperation], regime: str, said: str):
    from seqfuse.testing.cases import Case, Specimen
    from seqfuse.testing.operations import _check_numbers

    specimen = Specimen([op()], seeded_randn((33, 64), 0), {}, 0)
    with pytest.raises(AssertionError, match=f"{regime}: operation differs from its reference(?s:.*){said}"):
        _check_numbers(op.__name__, specimen, Case((33, 64), regime=regime))


def test_an_error_of_the_author_s_code_keeps_where_it_was_raised():
    class Asserts(InTheDtypeOfX):
        def bwd(self, dy: torch.Tensor, saved: InTheDtypeOfX.Saved) -> tuple[torch.Tensor, sf.Grads]:
            raise AssertionError("mine")

    with pytest.raises(AssertionError, match=r"^Asserts, float32, .*mine") as caught:
        check_op(Asserts(4), seeded_randn((5, 4), 0))
    cause = caught.value.__cause__
    assert cause is not None
    assert any(frame.name == "bwd" for frame in traceback.extract_tb(cause.__traceback__))


def test_channels_may_be_given_and_have_to_be_named():
    check_op(ops.Add("residual"), X, dtypes=(torch.float32,), residual=seeded_randn((4, 6), 1))
    with pytest.raises(AssertionError, match=r"Add: PlanError: .*its extra input 'other' is unnamed"):
        check_op(ops.Add(), X)


def test_the_generators_of_the_caller_stay_where_they_were():
    before = torch.get_rng_state()
    check_op(ops.Dropout(0.5), X, dtypes=(torch.float32,))
    assert torch.equal(torch.get_rng_state(), before)


def test_what_a_class_does_not_state_is_named():
    class Nothing(sf.Pointwise):
        """States no math."""

    with pytest.raises(AssertionError, match="NotImplementedError: Nothing states no reference"):
        check_op(Nothing(), X)


def test_refuses_a_container():
    with pytest.raises(AssertionError, match="cannot be fused or checked"):
        check_op(torch.nn.ReLU(), X)


@pytest.mark.parametrize(
    ("op", "x", "dtypes", "message"),
    [
        (ops.ReLU, X, None, "check_op takes operations, .*, not the class ReLU; give an instance, ReLU\\(...\\)$"),
        (
            Correct.reference,
            X,
            None,
            "check_op takes operations, instances of sf.UnfusedOperation, not an .* function$",
        ),
        (sf.fusions.PointwiseChain, X, None, "not the class PointwiseChain; check_fusion takes a fusion$"),
        (ops.ReLU(), X.long(), None, "check_op takes an x of floating-point numbers, .*, not of int64"),
        (ops.ReLU(), [1.0], None, "check_op takes x as a torch.Tensor, not an instance of list"),
        (ops.ReLU(), X, ["fp16"], r"check_op takes dtypes as .*, such as \(torch.float16,\), not \['fp16'\]"),
        (ops.ReLU(), X, "fp16", "check_op takes dtypes as .*, not 'fp16'"),
        (ops.ReLU(), X, torch.float16, "check_op takes dtypes as .*, not torch.float16"),
        (ops.ReLU(), X, [torch.int32], r"check_op takes dtypes as .*, not \[torch.int32\]"),
        (ops.ReLU(), X, [], r"check_op takes dtypes as .*, not \[\]"),
    ],
    ids=["class", "function", "fusion", "integer x", "list", "name", "one name", "one dtype", "integers", "none"],
)
def test_says_what_an_argument_should_be(op: object, x: object, dtypes: object, message: str):
    with pytest.raises((TypeError, sf.InputError), match=message):
        check_op(op, x, **({} if dtypes is None else {"dtypes": dtypes}))


class DefinedAgain(sf.Pointwise):
    """y = sin(x)."""

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


_EARLIER = DefinedAgain


class DefinedAgain(sf.Pointwise):  # pyright: ignore[reportRedeclaration]
    """y = sin(x), as if a notebook cell ran twice."""

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


@pytest.mark.usefixtures("few_cases")
def test_an_operation_whose_class_was_defined_again_is_checked_without_a_pickle() -> None:
    assert _EARLIER is not DefinedAgain
    check_op(_EARLIER(), X, dtypes=[torch.float32])
