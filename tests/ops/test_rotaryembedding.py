"""RotaryEmbedding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import ops
from seqfuse.testing import check_op, seeded_randn

from .passes import check_passes


def by_complex(head: Tensor, positions: Tensor, base: float, interleaved: bool) -> Tensor:
    """Rotated as complex numbers, [S, R] in float64."""
    head = head.double()
    size = head.shape[-1]
    pairs = head.unflatten(-1, (-1, 2)) if interleaved else torch.stack(head.chunk(2, -1), -1)
    angle = positions.double().unsqueeze(-1) * base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle))
    return turned.flatten(-2) if interleaved else torch.cat(turned.unbind(-1), -1)


@pytest.mark.parametrize("rotary_dim", [None, 4])
@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("given", [None, "ids"])
def test_turns_queries_and_keys_and_leaves_the_rest(given: str | None, style: str, rotary_dim: int | None):
    op = ops.RotaryEmbedding(3, 2, style=style, base=100.0, rotary_dim=rotary_dim, positions=given)
    x, ids = seeded_randn((2, 5, 7 * 8), 0), torch.tensor([4, 9, 0, 3, 3])
    y = sf.Sequential(op)(x, **({} if given is None else {"ids": ids}))
    positions, turned = (torch.arange(5) if given is None else ids), rotary_dim or 8
    want = x.double().unflatten(-1, (7, 8)).clone()
    for head in range(5):
        want[..., head, :turned] = by_complex(want[..., head, :turned], positions, 100.0, style == "interleaved")
    torch.testing.assert_close(y.double(), want.flatten(-2), atol=1e-6, rtol=1e-5)


def test_the_two_styles_differ():
    x = seeded_randn((5, 3 * 8), 0)
    half, interleaved = (ops.RotaryEmbedding(1, style=style)(x) for style in ("half", "interleaved"))
    assert not torch.allclose(half, interleaved)
    with pytest.raises(TypeError, match="style"):
        ops.RotaryEmbedding(1)


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_keeps_its_contract(style: str):
    check_op(ops.RotaryEmbedding(3, 1, style=style), seeded_randn((2, 6, 5 * 4), 0))
    check_op(ops.RotaryEmbedding(2, style=style, rotary_dim=2), seeded_randn((6, 6 * 4), 0))


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize(("rotary_dim", "shape"), [(None, (6, 4)), (None, (2, 6, 2)), (2, (1, 6, 2))], ids=str)
def test_keeps_its_contract_where_cos_and_sin_are_given(rotary_dim: int | None, shape: tuple[int, ...], style: str):
    op = ops.RotaryEmbedding(3, 1, style=style, rotary_dim=rotary_dim, cos="c", sin="s")
    check_op(op, seeded_randn((2, 6, 5 * 4), 0), c=seeded_randn(shape, 1), s=seeded_randn(shape, 2))


def test_keeps_its_contract_of_queries_alone():
    op = ops.RotaryEmbedding(3, 0, style="half", cos="c", sin="s")
    check_op(op, seeded_randn((2, 6, 3 * 4), 0), c=seeded_randn((6, 4), 1), s=seeded_randn((6, 4), 2))
    check_op(ops.RotaryEmbedding(3, 0, style="interleaved"), seeded_randn((6, 3 * 4), 0))


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotate_every_two(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


@pytest.mark.parametrize(("style", "rotate"), [("half", rotate_half), ("interleaved", rotate_every_two)])
@pytest.mark.parametrize("rotary_dim", [None, 4])
def test_given_cos_and_sin_turn_as_models_do(style: str, rotate, rotary_dim: int | None):
    op = ops.RotaryEmbedding(3, 2, style=style, rotary_dim=rotary_dim, cos="cos", sin="sin")
    turned = rotary_dim or 8
    x, cos, sin = (seeded_randn((2, 5, n), i) for i, n in enumerate((7 * 8, turned, turned)))
    heads = x.unflatten(-1, (7, 8)).clone()
    part = heads[..., :5, :turned]
    heads[..., :5, :turned] = part * cos.unsqueeze(-2) + rotate(part) * sin.unsqueeze(-2)
    torch.testing.assert_close(sf.Sequential(op)(x, cos=cos, sin=sin), heads.flatten(-2))


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_angles_of_pairs_are_those_of_positions(style: str):
    made = ops.RotaryEmbedding(3, 2, style=style, base=100.0)
    x = seeded_randn((2, 5, 7 * 8), 0)
    cos, sin = (t.squeeze(-2) for t in made.angles(x, None))
    given = ops.RotaryEmbedding(3, 2, style=style, cos="cos", sin="sin")
    torch.testing.assert_close(sf.Sequential(given)(x, cos=cos, sin=sin), made(x))


def test_angles_that_were_kept_in_inference_mode_train():
    op = ops.RotaryEmbedding(2, 1, style="half", base=123.0)
    x = seeded_randn((2, 5, 4 * 8), 0)
    with torch.inference_mode():
        sf.Sequential(op)(x)
    model, wanted = sf.Sequential(op, ops.Linear(32, 4)), x.clone().requires_grad_()
    x.requires_grad_()
    for _ in range(2):
        model(x).sum().backward()
        model[1](op.reference(wanted)).sum().backward()
    torch.testing.assert_close(x.grad, wanted.grad)


def test_angles_that_were_kept_under_another_default_device_are_those_of_the_input():
    op = ops.RotaryEmbedding(2, 1, style="half", base=321.0)
    x = seeded_randn((2, 5, 4 * 8), 0)
    with torch.device("meta"):
        sf.Sequential(op)(x)
    torch.testing.assert_close(sf.Sequential(op)(x), op.reference(x))


def test_only_wanted_gradients_of_angles_keep_the_input():
    op = ops.RotaryEmbedding(3, 2, style="half", cos="cos", sin="sin")
    x, angles = seeded_randn((5, 7 * 8), 0), {"cos": torch.ones(5, 8), "sin": torch.ones(5, 8)}
    assert op.fwd(x, **angles)[1].x is None
    assert op.fwd(x, **angles, needs=frozenset({"sin"}))[1].x is x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_far_positions_keep_their_digits(dtype: torch.dtype):
    op = ops.RotaryEmbedding(1, style="half")
    check_passes(op, seeded_randn((300, 3 * 16), 1, dtype=dtype))
    far = torch.tensor([100_000, 100_001])
    x = seeded_randn((2, 3 * 16), 2, dtype=dtype)
    y = ops.RotaryEmbedding(1, style="half", positions="p")(x, p=far)
    angle = far.double().unsqueeze(-1) * 10000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    a, b = x[:, :16].double().chunk(2, -1)
    want = torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)
    # An angle of 1e5 has an ulp of 0.0078 in float32.
    torch.testing.assert_close(y[:, :16].double(), want, atol=2e-2 if dtype is not torch.float64 else 1e-9, rtol=1e-2)


def test_scores_depend_on_the_distance_alone():
    x = seeded_randn((1, 3 * 8), 0, dtype=torch.float64).expand(6, -1)
    y = ops.RotaryEmbedding(1, style="interleaved")(x)
    scores = y[:, :8] @ y[:, 8:16].mT
    torch.testing.assert_close(scores[0, 1:-1], scores[1, 2:])


def test_ids_may_differ_from_row_to_row_of_a_batch():
    op = ops.RotaryEmbedding(2, style="half", positions="p")
    x = seeded_randn((2, 4, 6 * 4), 0)
    ids = torch.tensor([[0, 1, 2, 3], [5, 5, 6, 7]])
    y = op(x, p=ids)
    torch.testing.assert_close(y[1], op(x[1], p=ids[1]))
    torch.testing.assert_close(y[0], ops.RotaryEmbedding(2, style="half")(x[0]))


def test_a_part_of_a_head_of_odd_size_is_turned():
    op, x = ops.RotaryEmbedding(1, style="half", rotary_dim=2), seeded_randn((4, 9), 0)
    y = op(x)
    torch.testing.assert_close(y, op.reference(x))
    assert torch.equal(y[:, [2, 5, 6, 7, 8]], x[:, [2, 5, 6, 7, 8]])  # the part without RoPE, and the value head
