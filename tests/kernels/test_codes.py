"""Kernels that quantize their results: the codes equal those computed from other kernels' results, bit for bit."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from seqfuse import recipes
from seqfuse.kernels import norm, rope
from seqfuse.kernels._launch import cdiv
from seqfuse.kernels.norm import RowTile
from seqfuse.kernels.quantize import As, codes_tile
from seqfuse.kernels.rope import Rotation
from seqfuse.recipes import Recipe, Role
from seqfuse.testing import Untouched, assert_bitwise_equal, guarded, red_zones, seeded_randn
from tests.lowprecision.named import draw, named

from .conftest import DEVICE
from .test_quantize import assert_as_defined

RECIPES: tuple[Recipe, ...] = (
    recipes.Float8BlockScaling(),
    recipes.Float8BlockScaling(format="hybrid", power_of_two=False),
    recipes.MXFP8(),
    recipes.Float8DelayedScaling(),
)
SEED, SCALE = torch.tensor(0x1234_5678_9ABC_DEF), torch.tensor(3.5)


def each_recipe(cases: Iterable[str]) -> pytest.MarkDecorator:
    """Each case under each scaling; the two recipes of 1x128 by turns, both under --full."""
    return pytest.mark.parametrize(
        ("name", "recipe"),
        [
            pytest.param(name, recipe, id=f"{name}-{named(recipe)}", marks=[pytest.mark.full] * (j < 2 and (i + j) % 2))
            for i, name in enumerate(cases)
            for j, recipe in enumerate(RECIPES)
        ],
    )


def as_of(recipe: Recipe, role: Role, rows: bool = True, columns: bool = True) -> As:
    scaling: Any = {None: "given", 128: "1x128", 32: "1x32"}[recipe.block(role, "rows")[1]]
    scale = SCALE.to(DEVICE).view(1) if scaling == "given" else None
    return As(scaling, recipe.dtype(role), recipe.power_of_two, rows, columns, scale)


def assert_codes(found: Any, plain: Tensor | None, recipe: Recipe, role: Role, largest: Tensor) -> None:
    """Operands to which a result is quantized; under delayed scaling its maximum is noted."""
    assert plain is not None
    rows = plain.reshape(-1, plain.shape[-1]).cpu()
    given = {"scale": SCALE} if recipe.keeps_state else {}
    assert_as_defined(found.codes, rows, recipe, role, **given)
    assert float(largest) == (float(rows.abs().max()) if recipe.keeps_state else 0.0)


def largest() -> Tensor:
    return torch.zeros(1, device=DEVICE)


@dataclasses.dataclass(frozen=True)
class Case:
    """A norm, and the operations before it: a bias, dropout, a residual and its dtype."""

    centered: bool
    around: tuple[str, ...] = ()
    stream: torch.dtype | None = None
    zero_centered: bool = False


CASES = {
    "rmsnorm": Case(False),
    "layernorm": Case(True),
    "rmsnorm_boundary": Case(False, ("residual",), zero_centered=True),
    "layernorm_boundary": Case(True, ("residual", "pre_bias", "seed")),
    "rmsnorm_in_float32": Case(False, ("residual", "pre_bias", "seed"), torch.float32),
}
SIZES = ((130, 144), (33, 272), (66, 128), (1, 48))
DTYPES = (torch.bfloat16, torch.float16)
WAYS = ((True, True), (True, False), (False, True))  # codes by rows, by columns


def tensors(case: Case, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    wide, row = case.stream or dtype, shape[-1:]
    made = {"x": draw(*shape, seed=1, dtype=dtype), "dy": draw(*shape, seed=2, dtype=dtype)}
    made |= {name: draw(*shape, seed=i, dtype=wide) for i, name in enumerate(("residual", "dstream"), 3)}
    made |= {name: draw(*row, seed=i, dtype=wide) for i, name in enumerate(("weight", "bias", "pre_bias"), 5)}
    return {name: t.to(DEVICE) for name, t in made.items()} | {"seed": SEED.to(DEVICE)}


def in_chunks(monkeypatch: pytest.MonkeyPatch, to: As, columns: int) -> None:
    """Makes kernels without quantization sum along rows in the same order."""
    tile = codes_tile(to.scaling)
    like = RowTile(tile.m, tile.n, cdiv(columns, tile.n), 4, sums=False)
    for name in ("forward_tile", "backward_tile"):
        monkeypatch.setattr(norm, name, lambda *_: like)
    monkeypatch.setattr(norm, "_measured", lambda *_: False)


def forward(t: dict[str, Tensor], case: Case, **to: Any) -> Any:
    around = {name: t[name] for name in case.around}
    around |= {"p": 0.3} if "seed" in case.around else {}
    around |= {"stream_dtype": case.stream, "dtype": t["x"].dtype} if case.stream else {}
    given = t["x"], t["weight"], t["bias"] if case.centered else None, 1e-5
    of_norm = {"centered": case.centered, "zero_centered": case.zero_centered}
    run = norm.norm_codes if to else norm.norm_fwd
    return run(*given, **of_norm, **around, **to)


def backward(t: dict[str, Tensor], case: Case, saved: Any, branch: torch.dtype | None = None, **to: Any) -> Any:
    x = t["x"] if saved.stream is None else saved.stream
    around: dict[str, Any] = {"seed": t["seed"], "p": 0.3} if "seed" in case.around else {}
    around |= {"dstream": t["dstream"]} if case.around else {}
    around |= {"dpre_bias": torch.float32} if "pre_bias" in case.around else {}
    around |= {"dweight": torch.float32, "dbias": torch.float32 if case.centered else None}
    around |= {"zero_centered": case.zero_centered, "branch_dtype": branch or t["x"].dtype}
    given = t["dy"], x, saved.mean, saved.rstd, t["weight"]
    if to:
        return norm.norm_codes_backward(*given, **around, **to)
    return norm.norm_bwd(*given, None, dbranch=True, **around)


def close(one: Tensor | None, other: Tensor | None) -> None:
    """Sums over tokens, in another order."""
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2.0**-18 * float(other.abs().max()))


@each_recipe(CASES)
def test_norms_quantize_what_they_would_write(name: str, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    for shape, dtype, ways in zip(SIZES, itertools.cycle(DTYPES), itertools.cycle(WAYS), strict=False):
        t, x_to, dy_to = tensors(case, shape, dtype), as_of(recipe, "x", *ways), as_of(recipe, "dy", *ways)
        in_chunks(monkeypatch, x_to, shape[1])
        plain, most = forward(t, case), largest()
        found = forward(t, case, to=x_to, largest=most if recipe.keeps_state else None)
        assert_codes(found, plain.y, recipe, "x", most)
        statistics = [(found.mean, plain.mean), (found.rstd, plain.rstd)]
        if DEVICE.type == "cuda":  # where rows of another tile are summed in another order
            for one, other in statistics:
                close(one, other)
            statistics = []
        same = [(found.stream, plain.stream), *statistics]
        back, most = backward(t, case, plain), largest()
        made = backward(t, case, plain, to=dy_to, largest=most if recipe.keeps_state else None)
        assert_codes(made, back.dbranch, recipe, "dy", most)
        for one, other in [*same, (made.stream, back.dx)]:
            assert (one is None) == (other is None)
            if one is not None:
                assert_bitwise_equal(one, other)
        # A separate pass over the written result sums it as rounded.
        summed = backward(t, case, plain, torch.float32)
        for sums in ("dweight", "dbias", "dpre_bias"):
            close(getattr(made, sums), getattr(summed, sums))
    # The last of these is small.
    alone = norm.norm_codes_backward(t["dy"], t["x"], None, plain.rstd, None, dy_to, dx=False, largest=largest())
    assert alone.stream is None


@pytest.mark.parametrize("name", ["rmsnorm_boundary", "layernorm_boundary"])
def test_norms_touch_nothing_outside_and_give_the_same_bits(name: str) -> None:
    case, to = CASES[name], as_of(RECIPES[0], "x")
    t = tensors(case, (37, 144), torch.bfloat16)
    with red_zones():
        inside = {n: one if n == "seed" else guarded(one).tensor for n, one in t.items()}
        with Untouched(inside):
            first = forward(inside, case, to=to)
            second = backward(inside, case, first, to=to)
    for one, other in zip((*first, *second), (*forward(t, case, to=to), *backward(t, case, first, to=to)), strict=True):
        if one is not None:
            assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


HEADS, KV = 3, 2
ROTATIONS = {
    "half_128": (128, Rotation("half", 128), None, False),
    "half_64": (64, Rotation("half", 64, 100.0), "positions", True),
    "half_32": (32, Rotation("half", 32), "by element", True),
    "interleaved_128": (128, Rotation("interleaved", 128), "by pair", False),
    "interleaved_64": (64, Rotation("interleaved", 64), "positions", False),
}


def places_of(rows: int, size: int, what: str | None) -> dict[str, Tensor]:
    if what is None:
        return {}
    if what == "positions":
        return {"positions": (torch.arange(rows) * 3 + 1).to(DEVICE)}
    width = size // (2 if what == "by pair" else 1)
    return {name: seeded_randn((rows, width), i).to(DEVICE) for i, name in enumerate(("cos", "sin"), 8)}


@each_recipe(ROTATIONS)
def test_heads_quantize_what_they_would_write(name: str, recipe: Recipe) -> None:
    size, rotation, what, bias = ROTATIONS[name]
    for rows, dtype, ways in zip((75, 16, 33), itertools.cycle(DTYPES), WAYS, strict=False):
        dy = draw(2, rows, (HEADS + 2 * KV) * size, seed=1, dtype=dtype).to(DEVICE)
        given = {**places_of(rows, size, what), "dbias": torch.float32 if bias else None}
        plain, most = rope.rope_bwd(dy, HEADS, KV, rotation, **given), largest()
        to = as_of(recipe, "dy", *ways)
        noted = most if recipe.keeps_state else None
        found = rope.rope_codes_backward(dy, HEADS, KV, rotation, to, largest=noted, **given)
        assert_codes(found, plain.dx, recipe, "dy", most)
        close(found.dbias, plain.dbias)


def test_heads_touch_nothing_outside_and_give_the_same_bits() -> None:
    size, rotation, what, _ = ROTATIONS["half_64"]
    dy, to = draw(2, 21, (HEADS + 2 * KV) * size, seed=1, dtype=torch.bfloat16).to(DEVICE), as_of(RECIPES[0], "dy")
    places = places_of(21, size, what)
    with red_zones():
        first = rope.rope_codes_backward(guarded(dy).tensor, HEADS, KV, rotation, to, dbias=torch.float32, **places)
        first = [t.clone() for t in first if t is not None]
    again = rope.rope_codes_backward(dy, HEADS, KV, rotation, to, dbias=torch.float32, **places)
    for one, other in zip(first, [t for t in again if t is not None], strict=True):
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def test_operators_are_what_they_say() -> None:
    schema = ("test_schema", "test_faketensor")  # torch does not compare results in 8 bits
    case = CASES["layernorm_boundary"]
    t = tensors(case, (20, 48), torch.bfloat16)
    for recipe in RECIPES[::3]:
        to = as_of(recipe, "x")
        told = {**to._asdict(), "largest": largest() if recipe.keeps_state else None}
        told = {name: value for name, value in told.items() if value is not None}
        around = {"residual": t["residual"], "stream_dtype": torch.float32}
        torch.library.opcheck(
            torch.ops.seqfuse.norm_codes.default, (t["x"], t["weight"], t["bias"], 1e-5, *_first(told)),
            _rest(told) | around, test_utils=schema,
        )  # fmt: skip
        saved = forward(t, case)
        torch.library.opcheck(
            torch.ops.seqfuse.norm_backward_codes.default,
            (t["dy"], saved.stream, saved.mean, saved.rstd, t["weight"], *_first(told)),
            _rest(told) | {"dstream": t["dstream"], "dweight": torch.float32}, test_utils=schema,
        )  # fmt: skip
        dy = draw(2, 5, (HEADS + 2 * KV) * 32, seed=1, dtype=torch.float16).to(DEVICE)
        torch.library.opcheck(
            torch.ops.seqfuse.rope_backward_codes.default, (dy, HEADS, KV, "half", 32, 100.0, *_first(told)),
            _rest(told) | {"dbias": torch.float32}, test_utils=schema,
        )  # fmt: skip


def _first(told: dict[str, Any]) -> list[Any]:
    """The fields of `As`, which operators take by position."""
    return [told.get(name) for name in As._fields]


def _rest(told: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in told.items() if name not in As._fields}


def test_what_does_not_fit_is_refused() -> None:
    x, to = draw(4, 32, seed=0, dtype=torch.bfloat16).to(DEVICE), as_of(RECIPES[0], "x")
    rstd = torch.ones(4, device=DEVICE)
    for run, match in [
        (lambda: norm.norm_codes(x[:, :24], None, None, 1e-5, to), "multiple of 16 columns"),
        (lambda: norm.norm_codes(x.float(), None, None, 1e-5, to), "16 bits in rows"),
        (lambda: norm.norm_codes(x[:0], None, None, 1e-5, to), "16 bits in rows"),
        (lambda: norm.norm_codes_backward(x.float(), x.float(), None, rstd, None, to), "16 bits in rows"),
        (lambda: rope.rope_codes_backward(x, 2, 1, Rotation("half", 8), to), "heads of 32, 64 or 128"),
        (
            lambda: rope.rope_codes_backward(x, 1, 0, Rotation("interleaved", 32), to, dbias=x.dtype),
            "no sums for a bias",
        ),
        (lambda: rope.rope_codes_backward(x.float(), 1, 0, Rotation("half", 32), to), "heads of 32, 64 or 128"),
    ]:
        with pytest.raises(ValueError, match=match):
            run()
