"""Random sequences give the same results fused, unfused, and in plain torch in float64, which restates operations."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import seqfuse as sf
from seqfuse.ops._philox import drop_mask
from seqfuse.testing import LAYOUTS, assert_bitwise_equal, seeded_randn
from tests.judging import judge_together

from . import drawn
from .kinds import KINDS
from .lists import DISTINCT, ListSpec, Results, results

FUSIONS = (*KINDS, *sf.fusions.default)
AMPLIFIED = 1e4
"""Bound on the error of a result in units of eps: norms of rows that are nearly constant amplify roundings."""
FEWER = hypothesis.settings(max_examples=hypothesis.settings.default.max_examples * 2 // 5)
FIRST = hypothesis.settings(phases=[hypothesis.Phase.generate])
# torch warns of a hook on the first module if the input needs no gradient, and of a weight without columns.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:Initializing zero-element tensors"),
]


_ACTIVATIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "Identity": lambda _, x: x,
    "ReLU": lambda _, x: F.relu(x),
    "SquaredReLU": lambda _, x: F.relu(x) ** 2,
    "Sigmoid": lambda _, x: F.sigmoid(x),
    "Tanh": lambda _, x: F.tanh(x),
    "SiLU": lambda _, x: F.silu(x),
    "QuickGeLU": lambda _, x: x * F.sigmoid(1.702 * x),
    "GeLU": lambda op, x: F.gelu(x, approximate=op.approximate),
    "Clamp": lambda op, x: x.clamp(-op.limit, op.limit) + op.offset,
    "ClampedSiLU": lambda op, x: (lambda c: c * F.sigmoid(op.alpha * c))(x.clamp(max=op.limit)),
}
_UNITS = {
    "SwiGLU": "SiLU", "GEGLU": "GeLU", "ReGLU": "ReLU", "GLU": "Sigmoid", "QGEGLU": "QuickGeLU",
    "SReGLU": "SquaredReLU", "ClampedSwiGLU": "ClampedSiLU",
}  # fmt: skip


def plainly(op: Any, x: Tensor, seed: Tensor | None, mask: Tensor | None, stats: torch.dtype) -> Tensor:
    """The output of an operation for `x`, `[*, H]`.

    `stats` is the dtype in which the operation computes statistics and attention scores; `x` may be wider. Raises
    KeyError for an operation without a plain counterpart.
    """
    kind = type(op).__name__
    if kind in _ACTIVATIONS:
        return _ACTIVATIONS[kind](op, x)
    if kind in _UNITS:
        half = x.shape[-1] // 2
        gate, up = x[..., :half], x[..., half:]
        if kind == "ClampedSwiGLU":
            up = up.clamp(-op.limit, op.limit) + op.offset
        return _ACTIVATIONS[_UNITS[kind]](op, gate) * up
    return _OTHERS[kind](op, x, seed, mask, stats)


def _kept(x: Tensor, seed: Tensor | None, p: float) -> Tensor:
    """Dropout with the mask of `Dropout`, whose bits have tests against published Philox numbers."""
    return x if seed is None else torch.where(drop_mask(seed, x.shape, p), 0.0 * x, x / (1 - p))


def _heads(op: Any, x: Tensor, known: int) -> tuple[Tensor, Tensor]:
    """The first `known` heads of x, [*, known, D], and the remaining columns."""
    size = x.shape[-1] // (op.heads + 2 * op.kv_heads)
    return x[..., : known * size].reshape(*x.shape[:-1], known, size), x[..., known * size :]


def _qk_norm(op: Any, x: Tensor, *_: Any) -> Tensor:
    heads, values = _heads(op, x, op.heads + op.kv_heads)
    size = (heads.shape[-1],)
    gained = [F.rms_norm(t, size, w, op.eps) for t, w in (
        (heads[..., : op.heads, :], op.q_weight), (heads[..., op.heads :, :], op.k_weight),
    )]  # fmt: skip
    return torch.cat((torch.cat(gained, -2).flatten(-2), values), -1)


def _turned(op: Any, x: Tensor, *_: Any) -> Tensor:
    """RoPE: pairs of columns as complex numbers, multiplied by e^(i angle)."""
    if not x.numel():
        return 1 * x
    heads, values = _heads(op, x, op.heads + op.kv_heads)
    size = op.rotary_dim or heads.shape[-1]
    pairs = torch.stack(
        heads[..., :size].chunk(2, -1) if op.style == "half" else (heads[..., :size:2], heads[..., 1:size:2]), -1
    )
    positions = torch.arange(x.shape[-2], dtype=x.dtype, device=x.device)
    angle = positions[:, None, None] * op.base ** (-torch.arange(0, size, 2, dtype=x.dtype, device=x.device) / size)
    spun = torch.view_as_real(torch.view_as_complex(pairs) * torch.polar(torch.ones_like(angle), angle))
    spun = (spun.transpose(-1, -2) if op.style == "half" else spun).flatten(-2)
    return torch.cat((torch.cat((spun, heads[..., size:]), -1).flatten(-2), values), -1)


def _attention(op: Any, x: Tensor, seed: Tensor | None, mask: Tensor | None, stats: torch.dtype) -> Tensor:
    """Softmax attention. The sum of a score and a float mask is rounded to `stats`, since -1e9 leaves no digit of a
    float32 score; all else is computed in the dtype of x."""
    heads = _heads(op, x, op.heads + 2 * op.kv_heads)[0].transpose(-2, -3)
    q, values = heads[..., : op.heads, :, :], op.heads + op.kv_heads
    k, v = (
        t.repeat_interleave(op.heads // op.kv_heads, -3)
        for t in (heads[..., op.heads : values, :, :], heads[..., values:, :, :])
    )
    scores = torch.einsum("...id,...jd->...ij", q, k) * (q.shape[-1] ** -0.5 if op.scale is None else op.scale)
    if op.softcap is not None:
        scores = op.softcap * torch.tanh(scores / op.softcap)
    i = torch.arange(x.shape[-2], device=x.device)
    hidden = torch.zeros_like(scores, dtype=torch.bool)
    if op.causal:
        hidden = hidden | (i[None, :] > i[:, None])
    if op.window is not None:
        hidden = hidden | ((i[None, :] - i[:, None]).abs() >= op.window)
    if mask is not None and mask.is_floating_point():
        scores = (scores.to(stats) + mask.to(stats)).to(x.dtype)
    elif mask is not None:
        hidden = hidden | (mask == 0)
    scores = scores.masked_fill(hidden, -torch.inf)
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
    return torch.einsum("...ij,...jd->...id", _kept(weights, seed, op.dropout), v).movedim(-3, -2).flatten(-2)


_OTHERS: dict[str, Callable[[Any, Tensor, Tensor | None, Tensor | None, torch.dtype], Tensor]] = {
    "Scale": lambda op, x, seed, mask, stats: x * op.factor,
    "Bias": lambda op, x, seed, mask, stats: x + op.bias,
    "Linear": lambda op, x, seed, mask, stats: F.linear(x, op.weight, op.bias),
    "LayerNorm": lambda op, x, seed, mask, stats: F.layer_norm(x, op.normalized_shape, op.weight, op.bias, op.eps),
    "RMSNorm": lambda op, x, seed, mask, stats: F.rms_norm(
        x, op.normalized_shape, op.weight, torch.finfo(stats).eps if op.eps is None else op.eps
    ),
    "Dropout": lambda op, x, seed, mask, stats: _kept(x, seed, op.p),
    "QKNorm": _qk_norm,
    "RotaryEmbedding": _turned,
    "Attention": _attention,
}


def assert_agreement(
    spec: ListSpec, seed: int, dtypes: tuple[torch.dtype, torch.dtype | None], checkpointed: str, **how: Any
):
    dtype, other = dtypes
    hypothesis.note(str(spec))
    model = spec.build(seed=seed, dtype=dtype, other=other, fusions=FUSIONS)
    plain, wide = copy.deepcopy(model), copy.deepcopy(model).double()

    @functools.cache
    def measure(seed: int):
        with sf.fusing(on_error="raise"):
            fused = results(model, model, spec, seed, dtype=dtype, checkpointed=checkpointed, **how)
        with sf.fusing(False):
            unfused = results(plain, plain, spec, seed, dtype=dtype, checkpointed=checkpointed, **how)
        by = functools.partial(plainly, stats=torch.promote_types(dtype, torch.float32))
        by_plain_torch = functools.partial(spec.reference, wide, by=by)
        return fused, unfused, results(by_plain_torch, wide, spec, seed, wide=True, dtype=dtype, **how)

    judge_together(measure, seed)
    if dtype is not torch.bfloat16:
        _, unfused, exact = measure(seed)
        assert_right(unfused, exact, spec, torch.finfo(dtype).eps)


def assert_right(unfused: Results, exact: Results, spec: ListSpec, eps: float):
    """Fused results are bounded by the error of the unfused operations, which must be small itself."""
    # In a row that is masked whole by a large number, scores and their log-sum-exp are rounded to |mask| eps / 2, by
    # which every weight of the row is off. From |mask| eps = 1 on nothing is left of the scores: all weights are equal.
    lost = max((-float(kind) * eps for _, kind in spec.masks if kind in ("-1e9", "-1e4")), default=0.0)
    close = AMPLIFIED * eps + (lost if lost < 1 else 0)
    for name, r in exact.items():
        u = unfused[name]
        assert u.shape == r.shape
        if r.numel():
            torch.testing.assert_close(u.double(), r, rtol=close, atol=close * (1 + r.abs().amax().item()), msg=name)


HOW = st.fixed_dictionaries(
    {
        "dtypes": st.sampled_from(
            [
                *((torch.float64, None), (torch.float32, None)),
                *((torch.float32, torch.float64), (torch.bfloat16, torch.float32)),
            ]
        ),
        "dy_layout": st.sampled_from(LAYOUTS),
        "checkpointed": st.sampled_from(("", "", "", "reentrant", "non-reentrant")),
        "seed": st.integers(0, 99),
    }
)
"""Dtypes of parameters, memory layout of incoming gradients, and how the whole is checkpointed."""


@FEWER
@given(
    spec=drawn.lists(attention=False),
    rows=st.sampled_from([(3,), (2, 5), (), (0,), (2, 0)]),
    x_wants=st.booleans(),
    grad=st.sampled_from([True, True, False]),
    layout=st.sampled_from(LAYOUTS),
    how=HOW,
)
def test_fused_unfused_and_plain_torch_agree(
    spec: ListSpec, rows: tuple[int, ...], x_wants: bool, grad: bool, layout: str, how: dict[str, Any]
):
    if how["checkpointed"] == "reentrant" and not (x_wants and grad):  # it requires an input that needs a gradient
        how |= {"checkpointed": "non-reentrant"}
    assert_agreement(spec, rows=rows, x_wants=x_wants, grad=grad, layout=layout, **how)


@FEWER
@given(
    spec=drawn.lists(steps=5).filter(lambda spec: spec.attends),
    rows=st.sampled_from([(5,), (2, 3), (17,), (0,)]),
    layout=st.sampled_from(DISTINCT),
    how=HOW,
)
def test_they_agree_with_attention_in_them(spec: ListSpec, rows: tuple[int, ...], layout: str, how: dict[str, Any]):
    assert_agreement(spec, rows=rows, layout=layout, **how)


@FEWER
@given(spec=drawn.lists(), rows=st.sampled_from([(3,), (2, 5)]), seed=st.integers(0, 99))
def test_references_compute_what_plain_torch_does(spec: ListSpec, rows: tuple[int, ...], seed: int):
    hypothesis.note(str(spec))
    model = spec.build(seed=seed, dtype=torch.float64)
    again = functools.partial(spec.reference, model, by=functools.partial(plainly, stats=torch.float64))
    ours, theirs = (results(run, model, spec, seed, rows=rows, dtype=torch.float64) for run in (
        functools.partial(spec.reference, model), again,
    ))  # fmt: skip
    assert_right(ours, theirs, spec, torch.finfo(torch.float64).eps)


@FEWER
@given(spec=drawn.lists(), seed=st.integers(0, 99))
def test_a_run_is_repeated_bit_for_bit(spec: ListSpec, seed: int):
    hypothesis.note(str(spec))
    model = spec.build(seed=seed, fusions=FUSIONS)
    first, again = (results(model, model, spec, seed) for _ in range(2))
    assert_bitwise_equal(again, first)


@given(spec=drawn.lists(hooks=False, barriers=False))
def test_a_plan_covers_every_position_once_in_each_pass(spec: ListSpec):
    model = spec.build(fusions=FUSIONS)
    x = torch.randn(4, spec.width, requires_grad=True)
    inputs = {name: torch.randn(4, width, requires_grad=True) for name, width in spec.inputs}
    plan = model.plan(x, **inputs, **spec.masked(4, 0, torch.float32))
    for cover in (plan.forward, plan.backward):
        assert [at for step in cover for at in step.covers] == list(range(len(plan.names)))
    assert [at for piece in plan.segments for at in piece] == list(range(len(plan.names)))


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float64], ids=str)
def test_the_plain_attention_reads_a_mask_as_the_operation_does(kind: torch.dtype):
    op, x = sf.ops.Attention(2, 1, mask="m"), seeded_randn((2, 5, 16), 0, dtype=torch.float64)
    mask = seeded_randn((5, 5), 1, dtype=torch.float64)
    mask = mask if kind.is_floating_point else (mask > -0.5).to(kind)
    torch.testing.assert_close(plainly(op, x, None, mask, torch.float64), sf.Sequential(op)(x, m=mask))


@pytest.mark.parametrize("options", [{}, {"channels": False, "hooks": False, "dropout": False}], ids=["all", "plain"])
def test_lists_print_what_they_are_made_of(options: dict[str, bool]):
    spec = hypothesis.find(drawn.lists(**options), lambda _: True, settings=FIRST)
    assert str(spec).startswith("Sequential(")
    assert isinstance(spec.build(), sf.Sequential)
