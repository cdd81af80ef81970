"""Contracts of every operation."""

import pytest
import torch

import seqfuse as sf
from seqfuse import ops
from seqfuse.testing import assert_bitwise_equal, check_op, seeded_randn

from .passes import DTYPES, NAMES, by_passes, check_passes, example, extras_of, own_parameters

HEADS_TOO = (*NAMES, "Attention", "QKNorm", "PositionEmbedding", "RotaryEmbedding")
CHAIN = [name for name in NAMES if name not in ("Add", "Fork", "Multiply", "Take")]


OTHERS = (
    ops.GeLU("tanh"), ops.GEGLU("tanh"), ops.Linear(6, 3, bias=False), ops.Reshape(2, 3),
    ops.LayerNorm((5, 6)), ops.LayerNorm(6, bias=False), ops.LayerNorm(6, elementwise_affine=False),
    ops.LayerNorm(6, zero_centered=True), ops.RMSNorm((5, 6)), ops.RMSNorm(6, elementwise_affine=False),
    ops.RMSNorm(6, zero_centered=True), ops.Dropout(0.3, "downscale_in_infer"), ops.Dropout(0.0), ops.Dropout(1.0),
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_keeps_its_contract_under_the_engine(name: str):
    x = seeded_randn((5, 6), 0)
    check_op(example(name, x), x, dtypes=DTYPES)


@pytest.mark.parametrize("shape", [(1, 2), (2, 1, 3, 4), (10,)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_passes_agree_with_the_reference_for_any_rank(name: str, shape: tuple[int, ...]):
    x = seeded_randn(shape, 1)
    check_passes(example(name, x), x)


@pytest.mark.parametrize("op", OTHERS, ids=str)
def test_keeps_its_contract_in_other_configurations(op: sf.UnfusedOperation):
    check_op(op, seeded_randn((5, 6), 0))


@pytest.mark.parametrize("name", [*CHAIN, *HEADS_TOO[-4:]])
def test_a_batch_of_incoming_gradients_gives_what_each_of_them_gives(name: str):
    shape = (6, 6) if name in CHAIN else (2, 6, 24)  # as many rows as columns, so that confusing them is no error
    x = seeded_randn(shape, 3).requires_grad_()
    op = example(name, x.detach())
    y, leaves = sf.Sequential(op, ops.Scale(1.0))(x), [x, *op.parameters()]
    batch = seeded_randn((4, *y.shape), 4)
    found = torch.autograd.grad(y, leaves, batch, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, leaves, dy, retain_graph=True) for dy in batch]
    for got, expected in zip(found, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(got, torch.stack(expected))


@pytest.mark.parametrize("shape", [(0, 6), (3, 0, 6), (0,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_no_rows_give_zero_gradients(name: str, dtype: torch.dtype, shape: tuple[int, ...]):
    if shape == (0,) and name in ("LayerScale", "Linear", "MergedLinear", "LayerNorm", "RMSNorm", "Bias"):
        pytest.skip("no columns, not no rows")
    x = torch.zeros(shape, dtype=dtype)
    op = example(name, x)
    found = by_passes(op, x, extras_of(op, x))
    assert found["dx"] is not None
    assert found["dx"].shape == x.shape
    for parameter in own_parameters(op):
        assert_bitwise_equal(found[f"d{parameter}"], torch.zeros_like(getattr(op, parameter)))


@pytest.mark.parametrize("cls", [ops.Attention, ops.CrossAttention, ops.Dropout, ops.DropPath])
def test_random_numbers_are_drawn_in_training_alone(cls: type[sf.UnfusedOperation]):
    heads = (2,) if issubclass(cls, ops.Attention | ops.CrossAttention) else ()
    x = seeded_randn((64, 5, 12), 0)
    given = {"k": seeded_randn((64, 7, 12), 1), "v": seeded_randn((64, 7, 12), 2)} if cls is ops.CrossAttention else {}
    named = {"dropout": 0.4} if heads else {"p": 0.4}
    model = sf.Sequential(cls(*heads, **named))
    training = [model(x, **given), model(x, **given)]
    assert not torch.equal(*training)
    kept = sf.Sequential(cls(*heads, **dict.fromkeys(named, 0.0)))(x, **given)
    assert_bitwise_equal(model.eval()(x, **given), kept)


@pytest.mark.parametrize("name", HEADS_TOO)
def test_runs_on_meta_where_parameters_have_another_dtype(name: str):
    for own, other in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        op = example(name, torch.ones(2, 5, 24)).to("meta", other)
        x = torch.empty(2, 5, 24, device="meta", dtype=own, requires_grad=True)
        model = sf.Sequential(op)
        out = model(x, **({"other": x} if name in ("Add", "Multiply", "Take") else {}))
        y = out[0] if isinstance(out, tuple) else out
        y.float().sum().backward()
        assert y.is_meta
        assert (x.grad.shape, x.grad.dtype) == (x.shape, own)
        assert all(p.grad is not None and p.grad.is_meta for p in op.parameters())


HALF_OF_COMPLEX = ("GEGLU", "GLU", "PositionEmbedding", "QuickGeLU", "ReGLU", "SwiGLU")
FLOATING = ("Attention", "LayerNorm", "QKNorm", "RMSNorm", "RotaryEmbedding")


@pytest.mark.parametrize("name", [*HALF_OF_COMPLEX, *FLOATING])
def test_what_would_be_lost_in_silence_is_refused_by_name(name: str):
    op, model = example(name, torch.ones(2, 5, 24)), sf.Sequential(example(name, torch.ones(2, 5, 24)))
    for dtype in (torch.complex64, torch.complex128, *((torch.int64, torch.bool) if name in FLOATING else ())):
        x = torch.ones(2, 5, 24, dtype=dtype)
        with pytest.raises(sf.InputError, match=rf"SF101 position 0 \({name}\): expects .*{dtype}") as caught:
            model(x)
        assert caught.value.position == 0
        if name != "Attention":  # its reference accepts the inputs that the passes check
            with pytest.raises(sf.InputError, match=rf"SF101.*{name}.*{dtype}"):
                op.reference(x)


@pytest.mark.parametrize("name", ["Bias", "Dropout", "LayerScale", "Linear", "Scale", "Sigmoid", "Tanh"])
@pytest.mark.parametrize("own", [torch.complex64, torch.float32], ids=str)
def test_complex_numbers_are_those_of_torch(name: str, own: torch.dtype):
    x = seeded_randn((5, 6), 0, dtype=torch.complex64).requires_grad_()
    op = example(name, x.detach().abs())
    if name == "Linear" and own is torch.float32:
        pytest.skip("torch multiplies no real matrix by a complex one")
    for p in op.parameters():
        p.data = seeded_randn(tuple(p.shape), 3, dtype=own)
    leaves, found = [x, *op.parameters()], []
    for engine in (True, False):
        torch.manual_seed(3)
        seed = {"seed": torch.randint(2**63 - 1, (1,))[0]} if op.forward_signature.seed and not engine else {}
        y = sf.Sequential(op)(x) if engine else op.reference(x, **seed)
        if name == "Linear" and not engine:
            y = y + op.bias
        found.append([y, *torch.autograd.grad(y, leaves, seeded_randn(tuple(y.shape), 7, dtype=y.dtype))])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted)


KEPT = [
    (ops.LayerNorm, {"weight", "bias"}, ("x", "mean", "rstd")),
    (ops.LayerScale, {"x"}, ("gamma",)),
    (ops.LayerScale, {"gamma"}, ("x",)),
    (ops.Linear, {"x"}, ("weight",)),
    (ops.Linear, {"weight"}, ("x",)),
    (ops.MergedLinear, {"x"}, ("weights",)),
    (ops.MergedLinear, {"weight_2"}, ("x",)),
    (ops.MergedLinear, {"bias_0"}, ()),
    (ops.Multiply, {"x"}, ("other", "shape")),
    (ops.Multiply, {"other"}, ("x", "shape")),
]


@pytest.mark.parametrize(("cls", "needs", "kept"), KEPT)
def test_keeps_only_what_wanted_gradients_read(cls: type[sf.UnfusedOperation], needs: set[str], kept: tuple[str, ...]):
    assert cls.Saved.kept(frozenset(needs)) == kept


REPRS = [
    (ops.Add(), "Add()"),
    (ops.Add("skip"), "Add('skip')"),
    (ops.Attention(4), "Attention(4)"),
    (ops.Bias(4), "Bias(4)"),
    (
        ops.CrossAttention(4, 2, k="keys", causal=True, mask="m"),
        "CrossAttention(4, 2, k='keys', causal=True, mask='m')",
    ),
    (ops.CrossAttention(4, v="values", dropout=0.5), "CrossAttention(4, v='values', dropout=0.5)"),
    (ops.Dropout(0.1), "Dropout(p=0.1, mode='upscale_in_train')"),
    (ops.DropPath(0.2, False), "DropPath(p=0.2, scale_by_keep=False)"),
    (ops.Fork(), "Fork()"),
    (ops.Fork("skip"), "Fork('skip')"),
    (ops.GELU("tanh"), "GeLU(approximate='tanh')"),
    (ops.LayerNorm(4), "LayerNorm((4,), eps=1e-05, elementwise_affine=True, bias=True)"),
    (ops.LayerScale(6), "LayerScale(6, init_value=1e-05)"),
    (ops.Linear(6, 4), "Linear(6, 4, bias=True)"),
    (ops.Linear(6, 4, bias=False), "Linear(6, 4, bias=False)"),
    (
        ops.QKNorm(4, 3, 2, full_width=True, zero_centered=True),
        "QKNorm(4, 3, 2, eps=1e-06, elementwise_affine=True, full_width=True, zero_centered=True)",
    ),
    (ops.RMSNorm(4), "RMSNorm((4,), eps=None, elementwise_affine=True)"),
    (ops.Reshape(2, -1), "Reshape(2, -1)"),
    (ops.Reshape(6, dims=2), "Reshape(6, dims=2)"),
    (ops.Scale(-0.3), "Scale(factor=-0.3)"),
    (ops.Take(), "Take()"),
    (ops.Take("a"), "Take('a')"),
    (ops.Take("a", "b"), "Take('a', to='b')"),
    (ops.Take(to="b"), "Take(to='b')"),
    (ops.Transpose(1, 2), "Transpose(1, 2)"),
]


@pytest.mark.parametrize(("op", "shown"), REPRS, ids=[shown for _, shown in REPRS])
def test_shows_how_it_was_made(op: sf.UnfusedOperation, shown: str):
    assert repr(op) == shown


@pytest.mark.parametrize("name", NAMES)
def test_matches_by_exact_type(name: str):
    kind = getattr(ops, name)
    assert kind.is_final
    assert issubclass(kind, sf.UnfusedOperation)


@pytest.mark.parametrize("name", NAMES)
def test_states_math_shapes_record_and_source(name: str):
    text = getattr(ops, name).__doc__
    assert "Backward:" in text
    assert "Saved:" in text
    assert "x, y:" in text or "x: [" in text or "x, other, y:" in text or "x, y, out:" in text


@pytest.mark.parametrize("name", NAMES)
def test_reference_is_traceable_by_a_compiler(name: str):
    x = seeded_randn((4, 6), 10)
    op = example(name, x)
    extras = extras_of(op, x) | ({"seed": torch.tensor(5)} if op.forward_signature.seed else {})
    expected = op.reference(x, **extras)
    compiled = torch.compile(op.reference, fullgraph=True, backend="eager")(x, **extras)
    if op.outputs:
        (expected, made), (compiled, same) = expected, compiled
        assert_bitwise_equal(same, made)
    assert_bitwise_equal(compiled.detach(), expected.detach())


@pytest.mark.parametrize("name", CHAIN)
def test_an_example_is_as_wide_as_the_last_dimension(name: str):
    x = seeded_randn((2, 3, 8), 3)
    example(name, x)(x)
