"""Contracts of every kernel of rows: it stays within its tensors, whatever their strides, and equals its operator."""

from __future__ import annotations

import functools
import importlib
import itertools
import pkgutil
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch.testing import assert_close

from seqfuse import kernels
from seqfuse.kernels import _launch, decode
from seqfuse.testing import assert_bitwise_equal, guarded, red_zones

from . import (
    test_attention,
    test_crossentropy,
    test_decode,
    test_grouped,
    test_norm,
    test_permute,
    test_pointwise,
    test_quantize,
    test_rope,
)
from .checked import Checked
from .conftest import DEVICE
from .laid import Tensors, apart, as_one, far


class Subject(NamedTuple):
    """A kernel with its cases, what they are drawn from, and the same in torch.

    Args:
        cases: names.
        drawn: `drawn(case, lead, columns, dtype, regime)`: named tensors.
        run: `run(case, tensors)`: named results.
        in_torch: the same by torch; `None` where the kernel's own tests compare it.
        check: compares one draw with torch by the error bound.
        sizes: leading dimensions and columns of the whole numeric matrix.
        fixed: tensors whose rows must be contiguous; `None` where none may lie apart.
        overflows: cases and regimes in which torch may overflow, and the kernel where torch does.
        checked: cases whose operators torch checks.
    """

    cases: Collection[str]
    drawn: Callable[..., Tensors]
    run: Callable[[str, Tensors], Tensors]
    in_torch: Callable[[str, Tensors], Tensors] | None = None
    check: Callable[[str, Tensors], None] | None = None
    sizes: Sequence[tuple[tuple[int, ...], int]] = ()
    fixed: Collection[str] | None = ()
    overflows: Collection[tuple[str, str]] = ()
    checked: Collection[str] = ()
    in_c: bool = True


def _of_cases(
    module: Any, size: Callable[[tuple[int, ...], int], tuple[Any, ...]] = lambda *both: both, **more: Any
) -> Subject:
    """A kernel whose tests have a table of cases, drawn with `size` of leading dimensions and columns."""
    return Subject(
        module.CASES,
        lambda case, lead, columns, *how: module.drawn(module.CASES[case], *size(lead, columns), *how),
        lambda case, tensors: module.run(module.CASES[case], tensors),
        lambda case, tensors: module.in_torch(module.CASES[case], tensors),
        lambda case, tensors: module.check(module.CASES[case], tensors),
        **more,
    )


def _decoded(case: str, tensors: Tensors) -> Tensors:
    """With a new row, which is written into a copy of the cache."""
    y = decode.decode_attention(**tensors, window=30 if case == "window" else None)
    caches = {name: torch.empty_like(t).copy_(t) for name, t in tensors.items() if name != "q"}
    new = tensors["q"][:, : caches["k"].shape[1]].contiguous()
    test_decode.write(new, -new, **caches)
    return {"y": y, **caches}


SUBJECTS = {
    "pointwise": _of_cases(
        test_pointwise,
        sizes=[*itertools.product(test_pointwise.LEADS, test_pointwise.WIDTHS)],
        checked=(
            "bias_gelu",
            "bias_dropout_add",
            "bias_gated_dropout",
            "d_dropout_gelu_sum",
            "d_gated_sum",
            "d_gated_scaled",
        ),  # with sums or without, of one result and of several
    ),
    "norm": _of_cases(
        test_norm,
        sizes=[*itertools.product(test_norm.LEADS, test_norm.WIDTHS)],
        overflows=[*itertools.product(("layernorm", "rmsnorm"), ("extremes", "one_nan", "one_inf"))],
        checked=("layernorm", "rmsnorm", "layernorm_all", "rmsnorm_plain"),
    ),
    "rope": _of_cases(
        test_rope,
        lambda lead, columns: (lead,),
        sizes=[(lead, 0) for lead in test_rope.LEADS],
        overflows=[("half", "extremes"), ("norm", "extremes")],
        checked=("all", "part_interleaved", "norm_alone", "by_element"),
    ),
    "crossentropy": _of_cases(
        test_crossentropy,
        lambda lead, columns: (*lead, columns),
        sizes=[((rows,), classes) for rows, classes in test_crossentropy.SHAPES],
        fixed=None,  # written in place: its own tests have rows with gaps
        overflows=[(case, "extremes") for case in ("plain", "smooth", "again")],
        checked=("plain", "all", "all_again"),
    ),
    "permute": Subject(
        ("odd", "wide"),
        lambda case, lead, columns, dtype, *regime: test_permute.drawn(case, dtype, 3),
        lambda case, tensors: test_permute.run(tensors, True),
        fixed=("factors",),
        checked=("odd",),
    ),
    "route": Subject(
        test_permute.ROUTERS,
        lambda case, lead, columns, dtype, *regime: test_permute.of_a_router("odd", dtype, 3, *regime),
        lambda case, tensors: test_permute.run_router(tensors, **test_permute.ROUTERS[case]),
        fixed=None,
        checked=test_permute.ROUTERS,
    ),
    "grouped": Subject(
        ("odd", "aligned"),
        lambda case, lead, columns, dtype, *regime: test_grouped.drawn(case, dtype, 3),
        lambda case, tensors: test_grouped.run(tensors),
        fixed=("bias",),
        checked=("odd",),
        in_c=False,
    ),
    "decode": Subject(
        ("plain", "window", "int8"),
        lambda case, lead, columns, dtype, *regime: test_decode.drawn(6, 2, 20, dtype, case == "int8"),
        _decoded,
        fixed=None,
        checked=("window", "int8"),
        in_c=False,
    ),
}
"""Kernels by the names of their modules."""

COMPARED = {
    "attention": test_attention.test_is_its_math,
    "crossentropy": test_crossentropy.test_rows_are_those_of_torch,
    "decode": test_decode.test_is_its_math,
    "grouped": test_grouped.test_a_gemm_for_each_group,
    "norm": test_norm.test_a_norm_equals_the_operations_it_stands_for,
    "permute": test_permute.test_rows_are_those_of_each_pair,
    "pointwise": test_pointwise.test_a_chain_equals_the_operations_it_stands_for,
    "quantize": test_quantize.test_every_role_and_direction,
    "rope": test_rope.test_one_pass_equals_the_operations_it_stands_for,
    "route": test_permute.test_factors_are_those_of_torch,
}
"""How each kernel is compared with torch or its math, in each dtype; for other shapes, attention and quantizing have
their own tests of this contract."""

HERE = {name: of for name, of in SUBJECTS.items() if of.in_c or _launch.INTERPRETED or DEVICE.type == "cuda"}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
IN_C = not _launch.INTERPRETED and DEVICE.type == "cpu"
"""Where kernels are compiled for each dtype: those of float32 are for other tests, too, and index as the others do."""


def each(of: Callable[[Subject], Collection[Any]]) -> list[Any]:
    """A parameter for each kernel here and each of its cases."""
    return [(name, case) for name, subject in HERE.items() for case in of(subject)]


def test_every_kernel_is_here() -> None:
    public = {one.name for one in pkgutil.iter_modules(kernels.__path__) if not one.name.startswith("_")}
    assert public - {"c", "activations", "chains"} == COMPARED.keys()  # which launch nothing by themselves
    assert COMPARED.keys() - SUBJECTS.keys() == {"attention", "quantize"}


@pytest.mark.parametrize(("kernel", "case"), each(lambda of: of.cases))
def test_the_same_bits_every_time_within_its_tensors(kernel: str, case: str) -> None:
    """Of many rows, and of one number: a read beyond an end finds NaN, and a write there is noticed."""
    subject = SUBJECTS[kernel]
    rows = 18 if _launch.INTERPRETED else 70  # which threads and a GPU may add in several parts
    for lead, columns in (((rows,), 130), ((1,), 1))[: 2 if subject.sizes else 1]:
        tensors = subject.drawn(case, lead, columns, torch.float32 if IN_C else torch.bfloat16)
        guards = {name: guarded(t) for name, t in tensors.items()}
        with red_zones():
            inside = subject.run(case, {name: guard.tensor for name, guard in guards.items()})
        for name, guard in guards.items():
            guard.check(name)
        assert_bitwise_equal({name: t.clone() for name, t in inside.items()}, subject.run(case, tensors))


@pytest.mark.parametrize(("kernel", "case"), each(lambda of: () if of.fixed is None else of.cases))
def test_rows_may_lie_anywhere(kernel: str, case: str) -> None:
    subject = SUBJECTS[kernel]
    tensors = subject.drawn(case, (4,), 24, torch.float32 if IN_C else torch.float16)
    # A GPU loads rows with gaps by other threads, which sum them in another order.
    same: Any = assert_bitwise_equal if DEVICE.type == "cpu" else functools.partial(assert_close, atol=1e-2, rtol=1e-2)
    plain = {name: t.clone() for name, t in subject.run(case, tensors).items()}
    for lay in (apart, far) if DEVICE.type == "cpu" else (apart,):
        same(subject.run(case, lay(tensors, subject.fixed or ())), plain)
    one = as_one(tensors, subject.fixed or ())
    same(subject.run(case, one), subject.run(case, {name: t.contiguous() for name, t in one.items()}))


@pytest.mark.parametrize(("kernel", "case"), each(lambda of: of.cases))
def test_views_of_the_other_sign_are_read_with_it(kernel: str, case: str) -> None:
    subject = SUBJECTS[kernel]
    tensors = subject.drawn(case, (4,), 24, torch.float32)
    other = {
        name: torch._neg_view(-t) if t.is_floating_point() and (kernel, name) != ("crossentropy", "logits") else t
        for name, t in tensors.items()
    }
    assert_bitwise_equal(subject.run(case, other), subject.run(case, tensors))


@pytest.mark.parametrize(("kernel", "case"), each(lambda of: of.cases if of.in_torch else ()))
def test_no_rows_give_nothing_and_sums_of_zero(kernel: str, case: str) -> None:
    for name, t in SUBJECTS[kernel].run(case, SUBJECTS[kernel].drawn(case, (0,), 8, torch.float32)).items():
        assert t.shape[0] == 0 or not t.any(), name


@pytest.mark.triton
@pytest.mark.parametrize(
    ("kernel", "case"), [one for one in each(lambda of: of.cases if of.in_torch else ()) if one[0] != "rope"]
)
def test_float64_is_computed_in_float64(kernel: str, case: str) -> None:
    """Every gradient, too, is autograd's to its last digits."""
    subject = SUBJECTS[kernel]
    assert subject.in_torch is not None
    tensors = subject.drawn(case, (5,), 12, torch.float64)
    ours, theirs = subject.run(case, tensors), subject.in_torch(case, tensors)
    for name, t in theirs.items():
        assert_close(ours[name], t, rtol=1e-11, atol=1e-11)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kernel", "case", "regime"), [(k, *of) for k, of in each(lambda of: of.overflows)])
def test_edges_of_a_format_spoil_no_more_than_in_torch(kernel: str, case: str, regime: str, dtype: torch.dtype) -> None:
    """Fused may be finite where unfused is not, never the other way round."""
    subject = SUBJECTS[kernel]
    assert subject.in_torch is not None
    tensors = subject.drawn(case, (6,), 24, dtype, regime)
    ours, theirs = subject.run(case, tensors), subject.in_torch(case, tensors)
    for name, t in theirs.items():
        assert (ours[name].isfinite() | ~t.isfinite()).all(), name


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kernel", "case"), each(lambda of: of.cases if of.check else ()))
def test_each_size_and_regime_equals_torch(kernel: str, case: str, dtype: torch.dtype) -> None:
    subject = SUBJECTS[kernel]
    assert subject.check is not None
    for (lead, columns), regime in itertools.product(subject.sizes, ("normal", "small", "offset", "heavy")):
        if (case, dtype, regime) != ("long", torch.float16, "offset"):  # tanh is 1 there: all sums are rounded one way
            subject.check(case, subject.drawn(case, lead, columns, dtype, regime))


def _only_looked_at(kernel: Any, grid: int, args: tuple[Any, ...], constexprs: Any, *more: Any, **options: Any) -> None:
    _launch.one_device(kernel.__name__, _launch._tensors(args))
    assert {t.device.type for t in _launch._tensors(args)} == {"meta"}, kernel.__name__


@pytest.fixture
def on_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors refuse to meet those of a CPU, as a GPU's would, and have gradients."""
    for one in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"{kernels.__name__}.{one.name}")
        if one.name != "_launch" and hasattr(module, "launch"):
            monkeypatch.setattr(module, "launch", _only_looked_at)
    for module in (test_norm, test_pointwise, test_rope, test_crossentropy, test_decode):
        monkeypatch.setattr(module, "DEVICE", torch.device("meta"))


@pytest.mark.triton
@pytest.mark.parametrize(
    ("kernel", "case"),
    [
        ("pointwise", "bias_gelu"), ("norm", "layernorm_all"), ("norm", "rmsnorm_around"), ("rope", "all_interleaved"),
        ("rope", "bias"), ("crossentropy", "all"), ("decode", "plain"), ("decode", "int8"),
    ],
)  # fmt: skip
def test_all_tensors_are_on_one_device(kernel: str, case: str, on_meta: None) -> None:
    """The tensors that a file draws, with the inputs that its references compute."""
    subject = SUBJECTS[kernel]
    tensors = subject.drawn(case, (3,), 8, torch.float32)
    ours = subject.run(case, tensors)
    assert {t.device.type for t in ours.values()} == {"meta"}
    if subject.in_torch is not None:
        theirs = subject.in_torch(case, tensors)
        assert {name: t.shape for name, t in ours.items()} == {name: t.shape for name, t in theirs.items()}


@pytest.mark.triton
def test_a_tensor_elsewhere_is_found(on_meta: None) -> None:
    tensors = SUBJECTS["norm"].drawn("layernorm_around", (3,), 8, torch.float32)
    tensors["residual"] = torch.ones(3, 8)
    with pytest.raises(ValueError, match="expected all tensors on one device, got cpu and meta"):
        SUBJECTS["norm"].run("layernorm_around", tensors)


def known(tensors: Tensors) -> Tensors:
    """Without NaN in unread memory: torch compares arguments, too."""
    return {name: t.nan_to_num() if t.is_floating_point() else t for name, t in tensors.items()}


@pytest.mark.parametrize(("kernel", "case"), each(lambda of: of.checked))
def test_operators_are_what_they_say(kernel: str, case: str) -> None:
    subject = SUBJECTS[kernel]
    tensors = known(subject.drawn(case, (3,), 8, torch.float32))
    with Checked() as checked:
        found = subject.run(case, tensors)
    assert checked.names
    assert_bitwise_equal(found, subject.run(case, tensors))
