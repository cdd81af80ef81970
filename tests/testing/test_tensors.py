import itertools

import pytest
import torch

from seqfuse.testing import EDGES, EXACT, LAYOUTS, REGIMES, TensorSpec, exact, in_regime, laid_out, seeded_randn
from seqfuse.testing.structure import bits
from seqfuse.testing.tensors import redrawn

SHAPES = [(), (1,), (5,), (0, 4), (3, 8), (2, 3, 1), (2, 3, 4, 5)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("regime", [*REGIMES, *EDGES])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_regimes_have_the_shape_and_dtype_and_repeat_by_seed(regime: str, shape: tuple[int, ...]):
    for dtype in DTYPES:
        x = in_regime(regime, shape, 3, dtype=dtype)
        assert (x.shape, x.dtype) == (torch.Size(shape), dtype)
        assert torch.equal(bits(x), bits(in_regime(regime, shape, 3, dtype=dtype)))


def test_regimes_are_what_their_names_say():
    x = {name: in_regime(name, (64, 64), 0) for name in (*REGIMES, *EDGES)}
    assert x["small"].std() == pytest.approx(2e-3, rel=0.1)
    assert x["offset"].mean() == pytest.approx(8, abs=0.1)
    assert x["heavy"].abs().max() > 20 * x["heavy"].abs().median()
    assert (x["constant_rows"] == x["constant_rows"][:, :1]).all()
    assert x["constant_rows"][:, 0].unique().numel() == 64
    assert (x["extremes"].abs() == torch.finfo(torch.float32).max).all()
    assert 0 < (x["extremes"] > 0).sum() < 64 * 64
    assert x["one_nan"].isnan().sum() == 1
    assert x["one_inf"].isinf().sum() == 1


def test_a_generator_is_a_stream():
    draw = torch.Generator().manual_seed(0)
    assert not torch.equal(in_regime("normal", (4,), draw), in_regime("normal", (4,), draw))


def test_seeded_randn_is_signed_and_differs_by_column():
    x = seeded_randn((4096, 16), 0)
    assert 0.2 < (x < 0).float().mean() < 0.8
    assert x.mean(0).std() > 0.2
    assert seeded_randn((), 0).shape == ()


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_of_exact_numbers_do_not_depend_on_order(kind: str, dtype: torch.dtype):
    x = exact(kind, (48, 32), 0, dtype=dtype)
    total = torch.zeros(32, dtype=dtype)
    for row in x:
        total = total + row
    assert torch.equal(total, x.flip(0).sum(0))
    assert torch.equal(total.double(), x.double().sum(0))


def test_signs_are_balanced_in_every_row():
    assert not exact("signs", (5, 32), 0).sum(-1).any()
    assert exact("signs", (5, 7), 0).abs().eq(1).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layouts_keep_shape_and_dtype_in_memory_of_their_own(layout: str, shape: tuple[int, ...]):
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        x = torch.arange(max(1, torch.Size(shape).numel())).to(dtype)[: torch.Size(shape).numel()].view(shape)
        y = laid_out(x, layout)
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        assert not x.numel() or y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        if layout not in ("expanded", "scalar"):
            assert torch.equal(x, y)


def test_layouts_are_what_their_names_say():
    x = seeded_randn((4, 6), 0)
    y = {layout: laid_out(x, layout) for layout in LAYOUTS}
    assert {layout: (t.stride(), t.storage_offset()) for layout, t in y.items()} == {
        "contiguous": ((6, 1), 0),
        "strided": ((12, 2), 0),
        "transposed": ((1, 4), 0),
        "misaligned": ((6, 1), 1),
        "expanded": ((0, 1), 0),
        "scalar": ((0, 0), 0),
    }
    assert torch.equal(y["expanded"], x[:1].expand(4, 6))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_drawn_again_keep_their_layout(layout: str):
    x = laid_out(seeded_randn((4, 6), 0, dtype=torch.float16), layout)
    y = redrawn(x, 3)
    assert (y.stride(), y.storage_offset(), y.dtype) == (x.stride(), x.storage_offset(), x.dtype)
    assert (y != x).float().mean() > 0.8
    assert torch.allclose(x, y, rtol=0.2)
    assert torch.equal(redrawn(x, 3), y)
    assert redrawn(x, 0) is x


def test_gaps_between_strided_elements_are_poison():
    y = laid_out(torch.ones(2, 3), "strided")
    assert torch.as_strided(y, (2, 6), (6, 1)).isnan().sum() == 6


def test_a_specification_builds_the_same_leaf_again():
    for layout, regime in itertools.product(LAYOUTS, (*REGIMES, *EDGES)):
        spec = TensorSpec((3, 4), torch.bfloat16, layout, regime, seed=7)
        x = spec.build(requires_grad=True)
        assert x.is_leaf
        assert x.requires_grad
        assert torch.equal(bits(x), bits(spec.build()))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_numbers_have_two_parts_that_differ(dtype: torch.dtype) -> None:
    t = seeded_randn((5, 6), 0, dtype=dtype)
    assert t.dtype is dtype
    assert (t.imag != 0).all()
    assert not torch.equal(t.real, t.imag)
