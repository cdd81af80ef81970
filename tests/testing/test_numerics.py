"""Each part of the error bound, one at a time."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from seqfuse import ops
from seqfuse.testing import PARTS, FusedMismatch, assert_fused_close, in_regime, seeded_randn
from seqfuse.testing.cases import Bench, Case, Specimen
from tests.processes import Script

SHAPE = (32, 48)


def results(dtype: torch.dtype = torch.bfloat16, shape: tuple[int, ...] = SHAPE) -> tuple[Tensor, Tensor, Tensor]:
    """A reference, and two tensors that round it in different, unbiased ways."""
    r = in_regime("normal", shape, 0, dtype=torch.float64)
    eps = torch.finfo(dtype).eps
    jitter = [0.05 * eps * r.abs() * (2 * torch.rand(shape, dtype=r.dtype) - 1) for _ in range(2)]
    return (r + jitter[0]).to(dtype), (r + jitter[1]).to(dtype), r


def failed_parts(fused: Tensor, unfused: Tensor, reference: Tensor) -> set[str]:
    with pytest.raises(FusedMismatch) as caught:
        assert_fused_close(fused, unfused, reference)
    return {check.part for check in caught.value.report.failures}


def mismatch(fused: Tensor, unfused: Tensor, reference: Tensor) -> str:
    with pytest.raises(FusedMismatch) as caught:
        assert_fused_close(fused, unfused, reference)
    return str(caught.value)


@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (1, 1), (1, 300), (300, 1), (0, 4), (4, 0), (2, 3, 4, 5, 6)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_accepts_roundings_of_any_shape_and_dtype(shape: tuple[int, ...], dtype: torch.dtype):
    report = assert_fused_close(*results(dtype, shape))
    assert not report.failures
    assert {check.part for check in report.checks} <= set(PARTS)


def test_reports_all_six_parts_of_a_tensor_that_is_large_enough():
    report = assert_fused_close(*results(), name="d_x")
    assert {check.part for check in report.checks} == set(PARTS)
    assert {check.tensor for check in report.checks} == {"d_x"}
    assert report.worst is not None
    assert str(report.worst) in str(report)


def test_message_names_tensor_part_value_bound_and_index():
    f, u, r = results()
    f[5, 7] += 1
    with pytest.raises(FusedMismatch, match=r"grads: weight: max: max\|e_f\| (0\.9|1)[.\d]* > 0\.0\d+ at \(5, 7\)"):
        assert_fused_close({"grads": {"weight": f}}, {"grads": {"weight": u}}, {"grads": {"weight": r}})


def test_max_finds_a_gross_error():
    f, u, r = results()
    f[5, 7] += 1
    assert "max" in failed_parts(f, u, r)


def test_rms_finds_an_error_spread_thin():
    f, u, r = results()
    f = (r + 6 * (f.double() - r)).to(f.dtype)
    assert "rms" in failed_parts(f, u, r)


@pytest.mark.parametrize(
    ("tile", "where"), [((slice(None), -1), "column 47"), ((-1,), r"row \(31,\)")], ids=["column", "row"]
)
def test_tile_finds_a_bad_tail(tile: tuple[slice | int, ...], where: str):
    f, u, r = results()
    u[0, 0] += 1  # hides the tail from max
    f[tile] *= 1.05
    with pytest.raises(FusedMismatch, match=rf"tile: .* at {where}"):
        assert_fused_close(f, u, r)


def test_element_finds_one_wrong_element_below_the_largest_error():
    f, u, r = results()
    u[0, 0] += 0.5
    r[9, 9], u[9, 9], f[9, 9] = 0.5, 0.5, 0.9
    assert "element" in failed_parts(f, u, r)
    assert "max" not in failed_parts(f, u, r)


def test_bias_finds_truncation_that_every_other_part_allows():
    _, u, r = results()
    near = r.to(u.dtype)
    truncated = torch.where(near.double().abs() > r.abs(), torch.nextafter(near, torch.zeros_like(near)), near)
    assert failed_parts(truncated, u, r) == {"bias"}


def test_a_bias_in_float32_that_a_rounded_constant_gives_is_a_fault_with_a_hint():
    _, u, r = results(torch.float32)
    half_an_ulp = 2.0**-24
    for low in (0.75, 1.25):
        assert ("a rounded constant" in mismatch((r * (1 + low * half_an_ulp)).float(), u, r)) is (low < 1)
    other = (r * (1 + 0.75 * half_an_ulp)).float()
    other[5, 7] += 1
    assert "a rounded constant" not in mismatch(other, u, r)
    _, u, r = results()
    assert "a rounded constant" not in mismatch((r * (1 + 2.0**-9)).to(u.dtype), u, r)


def test_bias_asks_for_16_rows_and_256_elements():
    for shape, asked in (((15, 48), False), ((16, 15), False), ((16, 16), True)):
        report = assert_fused_close(*results(shape=shape))
        assert any(check.part == "bias" for check in report.checks) is asked


@pytest.mark.parametrize(("shape", "tiles"), [((7,), []), ((1, 7), []), ((7, 1), ["column"]), ((1,), [])])
def test_a_tile_of_one_element_or_of_all_is_left_to_other_parts(shape: tuple[int, ...], tiles: list[str]):
    report = assert_fused_close(*results(torch.float32, shape))
    assert [check.what.split()[-1] for check in report.checks if check.part == "tile"] == tiles


def test_fused_may_be_more_exact_than_unfused():
    _, u, r = results()
    assert_fused_close(r.to(u.dtype), u, r)


def test_an_exact_unfused_result_leaves_the_fused_one_its_rounding():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        u = in_regime("normal", SHAPE, 0, dtype=dtype)
        reference = u.double()
        fused = torch.where(torch.rand(SHAPE) < 0.03, torch.nextafter(u, torch.full_like(u, math.inf)), u)
        assert_fused_close(fused, u, reference)
        assert "max" in failed_parts(u * (1 + 8 * torch.finfo(dtype).eps), u, reference)


def test_float64_allows_another_order_of_summation_and_no_more():
    x = in_regime("offset", (64, 300), 0, dtype=torch.float64)
    centered = x - x.mean(-1, keepdim=True)
    other = x - x.flip(-1).cumsum(-1)[:, -1:] / 300
    assert_fused_close(other, centered, centered.clone())
    assert failed_parts(centered * (1 + 1e-9), centered, centered.clone())


def broken(f: Tensor, how: str) -> Tensor:
    return {
        "shape": lambda: f[:-1].clone(),
        "dtype": lambda: f.float(),
        "requires_grad": lambda: f.clone().requires_grad_(),
        "device": lambda: f.to("meta"),
    }[how]()


@pytest.mark.parametrize("what", ["shape", "dtype", "requires_grad", "device"])
def test_structure_finds_another(what: str):
    f, u, r = results()
    with pytest.raises(FusedMismatch, match=f"structure: {what}"):
        assert_fused_close(broken(f, what), u, r)


def test_structure_refuses_to_compare_a_tensor_with_itself():
    _, u, r = results()
    with pytest.raises(FusedMismatch, match="one storage"):
        assert_fused_close(u.view(SHAPE), u, r)


def test_structure_wants_the_same_names_and_the_same_nones():
    f, u, r = results()
    with pytest.raises(FusedMismatch, match=r"fused has other tensors .* missing \['d_x'\]"):
        assert_fused_close({"out": f}, {"out": u, "d_x": None}, {"out": r, "d_x": None})
    with pytest.raises(FusedMismatch, match=r"d_x: .*None on one side only: fused None, unfused set, reference set"):
        assert_fused_close({"d_x": None}, {"d_x": u}, {"d_x": r})
    assert_fused_close([f, None], [u, None], [r, None])


def test_refuses_a_reference_that_is_not_float64():
    f, u, r = results()
    with pytest.raises(TypeError, match="must be float64"):
        assert_fused_close(f, u, r.float())


def test_integers_must_be_equal():
    a = torch.arange(6)
    assert_fused_close(a.clone(), a, a.clone())
    with pytest.raises(FusedMismatch, match="unequal integer elements 5"):
        assert_fused_close(a + (a > 0), a, a.clone())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_accepts_what_is_not_finite_in_all_three(value: float):
    f, u, r = results()
    for t in (f, u, r):
        t[3, 4] = value
    assert_fused_close(f, u, r)


@pytest.mark.parametrize(
    ("fused", "unfused", "reference"),
    [
        pytest.param(math.nan, 1.0, 1.0, id="a NaN of its own"),
        pytest.param(math.inf, 1.0, 1.0, id="an overflow of its own"),
        pytest.param(1.0, math.nan, math.nan, id="a swallowed NaN"),
        pytest.param(1.0, 2.0, math.nan, id="another number where both swallow a NaN"),
        pytest.param(-math.inf, math.inf, math.inf, id="the wrong infinity"),
        pytest.param(math.inf, math.nan, math.nan, id="Inf for NaN"),
        pytest.param(2.0, math.inf, 1.0, id="finite and far from the reference"),
    ],
)
def test_refuses(fused: float, unfused: float, reference: float):
    f, u, r = results()
    f[3, 4], u[3, 4], r[3, 4] = fused, unfused, reference
    with pytest.raises(FusedMismatch, match=r"structure: NaN or Inf .* at \(3, 4\)"):
        assert_fused_close(f, u, r)


@pytest.mark.parametrize(
    ("fused", "unfused", "reference"),
    [
        pytest.param(0.0, 0.0, math.nan, id="swallows a NaN as unfused does"),  # torch's log-sum-exp on some CPUs
        pytest.param(math.inf, math.nan, math.inf, id="infinite with the reference"),  # torch's GeLU of Inf on a CPU
        pytest.param(50000, math.inf, 50010.0, id="finite where unfused overflowed"),
    ],
)
def test_fused_may_be(fused: float, unfused: float, reference: float):
    f, u, r = results(torch.float16 if fused == 50000 else torch.bfloat16)
    f[3, 4], u[3, 4], r[3, 4] = fused, unfused, reference
    assert_fused_close(f, u, r)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_numbers_near_the_ends_of_the_range_are_judged_too(dtype: torch.dtype):
    u = in_regime("extremes", SHAPE, 0, dtype=dtype)
    assert_fused_close(u.clone(), u, u.double().clone())
    wrong = u.clone()
    wrong[3, 4] = -wrong[3, 4]
    assert "max" in failed_parts(wrong, u, u.double().clone())


def rms(values: list[float]) -> float:
    return math.sqrt(sum(v * v for v in values) / len(values))


def at_worst(measured: list[float], bounds: list[float]) -> float:
    """The bound closest to its measured value, as the report shows it."""
    return max(zip(measured, bounds, strict=True), key=lambda pair: pair[0] / pair[1])[1]


def tile_bounds(e_u: Tensor, phi: Tensor) -> list[float]:
    u, p = ([rms(row) for row in t.tolist()] for t in (e_u, phi))
    mean, n = sum(u) / len(u), e_u.shape[1]
    return [(2 * max(a, mean) + b) * (1 + 2 / math.sqrt(n)) for a, b in zip(u, p, strict=True)]


@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10), (torch.float32, 2**-22)])
def test_bounds_are_those_of_the_table(dtype: torch.dtype, unit: float):
    f, u, r = results(dtype, (16, 20))
    bound = {(check.part, check.what): check.bound for check in assert_fused_close(f, u, r).checks}
    e_f, e_u, phi = f.double() - r, u.double() - r, unit * r.abs() + torch.finfo(dtype).tiny
    all_f, all_u, all_phi = (t.flatten().tolist() for t in (e_f.abs(), e_u.abs(), phi))
    rms_u, rms_phi = rms(all_u), rms(all_phi)
    elements = [6 * rms_u + 4 * a + 2 * b + 0.5 * rms_phi for a, b in zip(all_u, all_phi, strict=True)]
    expected = {
        ("max", "max|e_f|"): 2 * max(all_u) + max(all_phi),
        ("rms", "rms(e_f)"): 1.5 * rms_u + 0.6 * rms_phi,
        ("tile", "rms(e_f) of a row"): at_worst([rms(row) for row in e_f.tolist()], tile_bounds(e_u, phi)),
        ("tile", "rms(e_f) of a column"): at_worst([rms(row) for row in e_f.T.tolist()], tile_bounds(e_u.T, phi.T)),
        ("element", "|e_f|"): at_worst(all_f, elements),
    }
    for what, sign in (("|mean e_f/phi|", 1.0), ("|mean sign(r) e_f/phi|", r.sign())):
        z_f, z_u = sign * e_f / phi, sign * e_u / phi
        # With rows of one size, clustering by row is the standard error of the row means.
        expected["bias", what] = (z_u.mean().abs() + 4 * z_f.mean(1).std() / math.sqrt(16) + 0.03).item()
    assert {key: bound[key] for key in expected} == pytest.approx(expected)


def test_rows_that_are_equal_are_one_draw_and_those_that_share_little_are_many():
    """In copies of one row the columns are the draws; the bound is as if there were only that row."""
    f, u, r = results(torch.bfloat16, (1, 40))
    apart = results(torch.bfloat16, (32, 40))
    report = assert_fused_close(*(t.repeat(32, 1) for t in (f, u, r)))
    phi = 2**-7 * r.abs() + torch.finfo(torch.bfloat16).tiny
    z_f, z_u = ((t.double() - r) / phi for t in (f, u))
    (bound,) = (check.bound for check in report.checks if check.what == "|mean e_f/phi|")
    off = z_f - z_f.mean()
    variance = (off * 32).square().sum() - 32 * off.square().sum()
    expected = z_u.mean().abs() + 4 * (variance * 32 / 31).sqrt() / (32 * 40) + 0.03
    assert bound == pytest.approx(expected.item())
    (less,) = (check.bound for check in assert_fused_close(*apart).checks if check.what == "|mean e_f/phi|")
    assert less < bound / 2


def test_another_draw_has_other_parameters_and_other_given_values():
    specimen = Specimen([ops.Bias(8)], torch.ones(7, 8), {}, 0)
    zeros, given = Case((7, 8), regime="zeros"), Case((7, 8), regime="given")

    def parameters(seed: int) -> torch.Tensor:
        return specimen.run(Bench(specimen.at(torch.float32)), zeros, seed).outputs["y"]

    for of in (parameters, lambda seed: specimen.inputs_for(given, seed)["x"]):
        first, again, other = (of(seed) for seed in (0, 0, 1001))
        assert torch.equal(first, again)
        assert not torch.isclose(first, other, rtol=1e-4, atol=0).all()
        assert torch.allclose(first, other, rtol=0.3, atol=0.3)


def test_pytest_shows_the_test_and_the_message_and_no_frames_of_the_kit(tmp_path: Path):
    (tmp_path / "test_it.py").write_text(
        "import torch\nfrom seqfuse.testing import assert_fused_close\n\n\n"
        "def test_close():\n    x = torch.ones(4)\n    assert_fused_close(x + 1, x, x.double())\n"
    )
    options = "-p", "no:cacheprovider", "-p", "no:hypothesispytest"
    done = Script("-m", "pytest", *options, str(tmp_path), folder=Path(__file__).parents[2]).done()
    assert "FusedMismatch: fused differs from unfused" in done.stdout
    assert "numerics.py" not in done.stdout
    assert "test_it.py:7" in done.stdout


def _apart(errors: Tensor, wrong: tuple[int, int, float] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Fused, unfused and reference, whose errors have these deviations; one of them may be replaced."""

    def drawn(seed: int) -> Tensor:
        return errors * torch.randn(errors.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    r = seeded_randn(tuple(errors.shape), 0, dtype=torch.float32).bfloat16().double()
    f, u = r + drawn(1), r + drawn(2)
    if wrong is not None:
        f[wrong[0], wrong[1]] = r[wrong[0], wrong[1]] + wrong[2]
    return f.float(), u.float(), r


def test_a_head_whose_numbers_are_larger_has_larger_errors() -> None:
    errors = torch.full((512, 512), 1e-3, dtype=torch.float64)
    errors[:16] *= 8
    errors[:, :16] *= 8
    assert_fused_close(*_apart(errors))
    with pytest.raises(FusedMismatch, match="element"):
        assert_fused_close(*_apart(errors, (300, 300, 0.03)))


def test_two_large_errors_excuse_none_where_their_row_and_column_cross() -> None:
    f, u, r = _apart(torch.full((512, 512), 1e-3, dtype=torch.float64))
    u[3, 5] = r[3, 5] + 0.2
    u[7, 9] = r[7, 9] + 0.2
    f[3, 9] = r[3, 9] + 0.1
    with pytest.raises(FusedMismatch, match="element"):
        assert_fused_close(f, u, r)


def test_errors_of_other_unfused_results_count_with_those_of_the_first() -> None:
    r = in_regime("normal", (64, 512), 0, dtype=torch.float64)
    column = 1e-6 * seeded_randn((512,), 1, dtype=torch.float64)

    def off(size: float, seed: int) -> Tensor:
        """The error of a sign per row, times a number per column."""
        return (r + size * seeded_randn((64, 1), seed, dtype=torch.float64).sign() * column).float()

    fused, unfused, others = off(1.0, 2), off(0.1, 3), [off(1.0, seed) for seed in (4, 5)]
    assert "tile" in failed_parts(fused, unfused, r)
    assert_fused_close(fused, unfused, r, others=others)
    with pytest.raises(FusedMismatch) as caught:
        assert_fused_close(off(3.0, 2), unfused, r, others=others)
    assert "rms" in {check.part for check in caught.value.report.failures}
    with pytest.raises(FusedMismatch, match="another unfused result has the tensors"):
        assert_fused_close({"y": fused}, {"y": unfused}, {"y": r}, others=[{"z": others[0]}])
    with pytest.raises(FusedMismatch, match=r"another unfused result of \(64, 511\)"):
        assert_fused_close(fused, unfused, r, others=[others[0][:, 1:]])
    spoiled = others[0].clone()
    spoiled[3] = torch.nan
    fused[3, 5] += 1.0
    assert "max" in failed_parts(fused, unfused, r)
    with pytest.raises(FusedMismatch, match=r"max: .* at \(3, 5\)"):
        assert_fused_close(fused, unfused, r, others=[spoiled, others[1]])
