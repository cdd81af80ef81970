"""Kernels quantize to the codes and scales of `recipes.quantize`, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqfuse import recipes
from seqfuse.kernels import quantize as kernels
from seqfuse.kernels.quantize import Codes
from seqfuse.recipes import Recipe, Role
from seqfuse.testing import assert_bitwise_equal, guarded, red_zones, seeded_randn
from tests.lowprecision.named import OTHERS, PAIRS, RECIPES, ROLES, draw, form_of, hard, named
from tools.compiled import Compiled, compile_variants

from .conftest import DEVICE

SCALINGS = {(None, None): "tensor", (1, None): "row", (1, 128): "1x128", (128, 128): "128x128", (1, 32): "1x32"}
every_recipe = pytest.mark.parametrize("recipe", RECIPES + OTHERS, ids=named)
# Without roles that are quantized as x is.


def by_kernels(x: Tensor, recipe: Recipe, role: Role, module: ModuleType = kernels, **given: Any) -> Codes:
    scaling = "given" if recipe.keeps_state else SCALINGS[recipe.block(role, "rows")]
    return module.quantize_matrix(x, recipe.dtype(role), scaling, power_of_two=recipe.power_of_two, **given)


def assert_as_defined(found: Codes, x: Tensor, recipe: Recipe, role: Role, **given: Any) -> None:
    """The existing codes and inverse scales."""
    shared = found.columns_inverse is None
    square = SCALINGS.get(recipe.block(role, "rows")) == "128x128"
    if square:
        found = as_blocks(found, *x.shape)
    if found.rows is not None:
        data, inverse = recipes.quantize(x, recipe, role, "rows", **given)
        assert_same(found.rows, data)
        blocked = not square and (not shared or SCALINGS.get(recipe.block(role, "rows")) in ("1x128", "1x32"))
        assert_same(found.rows_inverse, inverse.t() if blocked and inverse.ndim == 2 else inverse)
    if found.columns is not None:
        data, inverse = recipes.quantize(x, recipe, role, "columns", **given)
        assert_same(found.columns, data.t())
        assert_same(found.rows_inverse if shared else found.columns_inverse, inverse)


def as_blocks(found: Codes, M: int, N: int) -> Codes:
    """Without the padding of inverse scales of 128 x 128, and columns as rows."""
    scales: list[Tensor | None] = []
    for inverse, size in ((found.rows_inverse, N), (found.columns_inverse, M)):
        count = -(-size // 128)
        assert inverse is None or (inverse.shape[1] % 4 == 0 and not inverse[:, count:].any())
        scales.append(None if inverse is None else inverse[:, :count])
    down = None if scales[1] is None else scales[1].t()
    return found._replace(rows_inverse=scales[0], columns_inverse=down)


def assert_same(got: Tensor | None, wanted: Tensor) -> None:
    """In any shape with as many numbers."""
    assert got is not None
    assert got.dtype is wanted.dtype or got.dtype is torch.uint8
    # A view of one number keeps its stride.
    one, other = (torch.empty(t.numel(), dtype=t.dtype).copy_(t.reshape(-1)) for t in (got, wanted))
    assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def widened(x: Tensor) -> Tensor:
    """Zero-padded to a multiple of 16 columns."""
    return F.pad(x, (0, -x.shape[1] % 16))


@pytest.mark.parametrize(("recipe", "role"), PAIRS, ids=named)
def test_hard_numbers(recipe: Recipe, role: Role) -> None:
    for i, x in enumerate(hard(form_of(recipe, role))):
        for t in (widened(x), widened(x.t())):
            assert_as_defined(by_kernels(t.to(DEVICE), recipe, role), t, recipe, role)
        t = widened(x).to((torch.bfloat16, torch.float16)[i // 2 % 2])
        assert_as_defined(by_kernels(t.to(DEVICE), recipe, role, columns=True), t, recipe, role)


@pytest.mark.mutant
@pytest.mark.parametrize("recipe", [recipes.Float8CurrentScaling(), recipes.MXFP8(format="hybrid")], ids=named)
@pytest.mark.parametrize("role", ["x", "dy"])
def test_where_the_cast_goes_by_float16_numbers_are_rounded_before(
    recipe: Recipe, role: Role, mutant: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = mutant(kernels, ".to(KIND)", ".to(tl.float16).to(KIND)")
    some = [t for x in hard(form_of(recipe, role)) for t in (widened(x), widened(x.t()))]

    def compare() -> None:
        for t in some:
            assert_as_defined(by_kernels(t.to(DEVICE), recipe, role, module), t, recipe, role)

    with pytest.raises(AssertionError):
        compare()
    monkeypatch.setattr(module, "_casts_by_float16", lambda arch: True)
    compare()


def ways(dtype: torch.dtype) -> list[dict[str, bool]]:
    return [{}] if dtype is torch.float32 else [{"columns": True}, {"rows": False, "columns": True}, {}]


SHAPES = [(1, 16), (7, 48), (33, 80), (128, 128), (129, 144), (200, 272)]


@every_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_role_and_direction(recipe: Recipe, dtype: torch.dtype) -> None:
    for i, shape in enumerate(SHAPES):
        for role in ROLES:
            x = draw(*shape, seed=i, dtype=dtype)
            for way in ways(dtype):
                assert_as_defined(by_kernels(x.to(DEVICE), recipe, role, **way), x, recipe, role)


@pytest.mark.parametrize("recipe", [r for r in RECIPES + OTHERS if not r.whole_rows], ids=named)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_several_matrices_in_one_launch(recipe: Recipe, dtype: torch.dtype) -> None:
    every = [draw(*shape, seed=i, dtype=dtype).to(DEVICE) for i, shape in enumerate(SHAPES)]
    every[3] = draw(128, 160, seed=9, dtype=dtype).to(DEVICE)[:, 16:144]  # of another stride
    scaling: Any = SCALINGS[recipe.block("weight", "rows")]
    for some, columns in itertools.product((every, every[2:4], every[:1]), {False, dtype is not torch.float32}):
        how = {"power_of_two": recipe.power_of_two, "columns": columns}
        with red_zones():
            x, *others = [guarded(one).tensor for one in some]
            made = kernels.quantize_several(x, others, recipe.dtype("weight"), scaling, **how)
            made = [t.clone() for t in made]
        for codes, one in zip(kernels.named_codes(made, columns), some, strict=True):
            assert (codes.columns is not None) == columns
            assert_as_defined(codes, one.cpu(), recipe, "weight")
    other = every[1].to(torch.bfloat16 if dtype is torch.float32 else torch.float32)
    with pytest.raises(ValueError, match="one dtype"):
        kernels.quantize_several(every[1], [other], recipe.dtype("weight"), scaling)


@pytest.mark.parametrize("role", ROLES)
def test_a_given_scale_and_the_largest_number(role: Role) -> None:
    recipe, x = recipes.Float8DelayedScaling(), draw(130, 144, seed=1, dtype=torch.bfloat16)
    for value, before in ((3.5, 0.25), (1e-3, 1e9), (2.0**100, 0.0)):
        scale = torch.tensor(value)
        for way in ({"columns": True}, {"rows": False, "columns": True}, {}):
            most = torch.tensor([before, 7.0], device=DEVICE)
            given = {"scale": scale.to(DEVICE), "largest": most[:1]}
            assert_as_defined(by_kernels(x.to(DEVICE), recipe, role, **way, **given), x, recipe, role, scale=scale)
            assert_bitwise_equal(most.cpu(), torch.tensor([max(before, float(x.abs().max())), 7.0]))
    x[3, 4] = torch.nan
    most = torch.zeros(1, device=DEVICE)
    by_kernels(x.to(DEVICE), recipe, role, scale=scale.to(DEVICE), largest=most)
    assert most.isnan().all()


def test_rows_may_have_any_stride() -> None:
    x = draw(37, 160, seed=3, dtype=torch.float16).to(DEVICE)
    for recipe in RECIPES:
        for t in (x[:, 16:64], x[::2, :48], x[:1, :48].expand(5, 48)):
            assert_as_defined(by_kernels(t, recipe, "x", columns=True), t.cpu(), recipe, "x")


@every_recipe
def test_nothing_outside_the_tensors_is_read_or_written(recipe: Recipe) -> None:
    x = draw(131, 144, seed=3, dtype=torch.bfloat16).to(DEVICE)
    with red_zones():
        found = by_kernels(guarded(x).tensor, recipe, "x", columns=True)
        found = Codes(*[None if t is None else t.clone() for t in found])
    assert_as_defined(found, x.cpu(), recipe, "x")


@pytest.mark.parametrize("scaling", get_args(kernels.Scaling))
def test_the_operator_is_what_it_says(scaling: Any) -> None:
    x, of = draw(20, 48, seed=4, dtype=torch.bfloat16).to(DEVICE), torch.float8_e4m3fn
    given: dict[str, Any] = {"columns": True, "power_of_two": True}
    if scaling == "given":
        given |= {"scale": torch.tensor([2.5], device=DEVICE), "largest": torch.zeros(1, device=DEVICE)}
    schema, fake = "test_schema", "test_faketensor"  # torch does not compare results in 8 bits
    torch.library.opcheck(torch.ops.seqfuse.quantize.default, (x, of, scaling), given, test_utils=(schema, fake))
    if scaling in ("128x128", "1x32"):
        args = (x, [x[:4], x[::2]], of, scaling)
        several = torch.ops.seqfuse.quantize_several.default
        torch.library.opcheck(several, args, {"columns": True}, test_utils=(schema, fake))
    got, made = torch.ops.seqfuse.quantize(x, of, scaling, **given), kernels.quantize_matrix(x, of, scaling, **given)
    assert [t is None for t in got] == [t is None for t in made]
    for one, other in zip(got, made, strict=True):
        if other is not None:
            assert_same(one, other)


@every_recipe
def test_the_same_bits_every_time(recipe: Recipe) -> None:
    x = draw(200, 272, seed=6, dtype=torch.bfloat16).to(DEVICE)
    one, other = (by_kernels(x, recipe, "x", columns=True) for _ in range(2))
    for a, b in zip(one, other, strict=True):
        if b is not None:
            assert_same(a, b)


def test_what_does_not_fit_is_refused() -> None:
    x = seeded_randn((4, 32), 0)
    for wrong, kw, match in [
        (x[0], {}, "must be a matrix"),
        (x.double(), {}, "must be a matrix"),
        (x[:, :20], {}, "multiple of 16"),
        (x[:0], {}, "multiple of 16"),
        (x, {"rows": False}, "rows=False and columns=False"),
        (x, {"columns": True}, "columns of float32"),
        (seeded_randn((32, 16), 0).t(), {}, "contiguous in its last dimension"),
    ]:
        with pytest.raises(ValueError, match=match):
            kernels.quantize_matrix(wrong.to(DEVICE), torch.float8_e4m3fn, "1x32", **kw)


TARGETS = ("sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")


def test_kernels_compile_without_spills(request: pytest.FixtureRequest) -> None:
    full = request.config.getoption("--full")
    found: list[Compiled] = list(compile_variants(["quantize"], TARGETS, jobs=1, in_turn=not full))
    assert {one.target for one in found} == set(TARGETS)
    for one in found:
        assert one.error is None, one
        few = 4 * (one.target == "gfx942" and one.variant.endswith("odd"))  # no AMD GPU launches these kernels
        assert one.spills <= few, one
        assert one.int32_multiplications == one.late_reads == 0, one
        assert not one.over_shared, one
        if one.target.startswith("sm_") and " rows bf16" in one.variant and not one.variant.startswith("zero"):
            assert one.wide > one.narrow, one
