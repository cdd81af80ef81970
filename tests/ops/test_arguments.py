"""Constructor arguments of operations, layers and losses: wrong types are refused by name."""

import inspect
import re
import types
import typing
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import seqfuse as sf
from seqfuse import losses, nn, ops
from seqfuse.losses import linear_cross_entropy

ALL = [
    found
    for module in (ops, nn, losses)
    for found in (getattr(module, name) for name in module.__all__)
    if inspect.isclass(found) and "__init__" in vars(found) and found is not ops.Residual
]
GIVEN: dict[str, Any] = {
    "in_features": 4, "out_features": 4, "num_classes": 4, "normalized_shape": 4, "heads": 2, "head_dim": 4, "size": 4,
    "style": "half", "max_positions": 4, "embedding_dim": 4, "num_embeddings": 4, "embed_dim": 4, "dim": 4, "layers": 1,
    "dim0": 0, "dim1": 1, "factor": 2.0, "limit": 1.0, "name": "by", "groups": 2, "experts": 4, "top_k": 2,
}  # fmt: skip
# torch names these, or any value is allowed.
FREE = ("group", "device", "args", "kwargs", "layer", "attention", "shape")
WRONG: tuple[Any, ...] = ("text", 2.5, 3, {}, object, torch.ones(2))


def required(kind: type) -> dict[str, Any]:
    parameters = inspect.signature(kind).parameters.values()
    given = {p.name: GIVEN[p.name] for p in parameters if p.default is p.empty and p.name in GIVEN}
    return given | ({"out_features": (4, 4)} if kind is ops.MergedLinear else {})


def may_be(value: Any, hint: Any) -> bool:
    """Whether a constructor may take a value, by its annotation."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return any(may_be(value, h) for h in typing.get_args(hint))
    kinds: dict[Any, Any] = {float: (int, float), bool: (bool, int, float)}
    return isinstance(value, kinds.get(hint, hint)) if isinstance(hint, type) else False


def is_checked(hint: Any) -> bool:
    """Whether it takes only numbers, flags and words; for all others Python and torch raise."""
    choices = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    return all(
        one in (int, float, bool, str, type(None)) or typing.get_origin(one) is typing.Literal for one in choices
    )


def arguments() -> list[Any]:
    hints = {kind: typing.get_type_hints(inspect.unwrap(kind.__init__)) for kind in ALL}
    return [
        pytest.param(kind, name, hint, id=f"{kind.__name__}-{name}")
        for kind in ALL
        for name, hint in hints[kind].items()
        if name not in (*FREE, "return") and is_checked(hint)
    ]


@pytest.mark.parametrize(("kind", "name", "hint"), arguments())
def test_an_argument_of_another_kind_is_named_with_what_was_expected(kind: type, name: str, hint: Any):
    wrong = [value for value in WRONG if not may_be(value, hint)]
    assert wrong
    for value in wrong:
        given = {**required(kind), name: value}
        with pytest.raises(sf.InputError, match=rf"^SF106 {kind.__name__}: {name} must be .*, got .") as caught:
            kind(**given)
        assert str(caught.value).count("must be") == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ops.Add(3), "Add: name must be a string or None, got 3"),
        (lambda: ops.Reshape(2, "3"), "Reshape: shape must be an integer, got '3'"),
        (lambda: ops.Linear(4, 2.5), "Linear: out_features must be an integer, got 2.5"),
        (lambda: ops.Linear(4, True), "Linear: out_features must be an integer, got True"),
        (lambda: ops.LayerNorm(4, 1e-5, "cuda"), "LayerNorm: elementwise_affine must be True or False, got 'cuda'"),
        (lambda: ops.Linear(4, 3, 2.5), "Linear: bias must be True or False, got 2.5"),
        (lambda: ops.GeLU("erf"), 'GeLU: approximate must be "none" or "tanh", got \'erf\''),
        (lambda: losses.LinearCrossEntropy(4, 6, chunk=2.5),
         "LinearCrossEntropy: chunk must be an integer or None, got 2.5"),
        (lambda: linear_cross_entropy(torch.ones(1, 4), torch.ones(3, 4), torch.tensor([1]), chunk="2"),
         "linear_cross_entropy: chunk must be an integer or None, got '2'"),
        (lambda: ops.MergedLinear(4, 4), "MergedLinear: out_features must be a sequence, got 4"),
        (lambda: ops.MergedLinear(4, (4,), 2.5), "MergedLinear: bias must be True or False or a sequence, got 2.5"),
        (lambda: ops.LayerNorm("4"), "LayerNorm: normalized_shape must be an integer or a sequence, got '4'"),
        (lambda: ops.Permute(4, 2, to="ends"), "Permute: to must be a sequence, got 'ends'"),
        (lambda: nn.TransformerStack(1, 4, 2, norm="rms"),
         "TransformerLayer: norm must be a class or function, got 'rms'"),
        (lambda: nn.FeedForward(4, activation=ops.SiLU()),
         "FeedForward: activation must be a class or function, got SiLU()"),
        (lambda: nn.MultiHeadAttention(4, 2, rotary="half"),
         "MultiHeadAttention: rotary must be a class or function or None, got 'half'"),
    ],
)  # fmt: skip
def test_the_message_is_one_sentence(make: Callable[[], Any], message: str):
    with pytest.raises(sf.InputError, match=f"^SF106 {re.escape(message)}$"):
        make()


def test_numbers_of_other_libraries_are_numbers():
    for make in (int, np.int32, np.int64):
        assert ops.Linear(make(4), make(3)).weight.shape == (3, 4)
    assert ops.Dropout(np.float32(0.5)).p == ops.Dropout(torch.tensor(0.5)).p == 0.5
    assert ops.Linear(4, 3, bias=np.bool_(False)).bias is None
    assert ops.LayerNorm(torch.Size((2, 4))).weight.shape == (2, 4)


def test_python_names_arguments_that_are_missing_or_too_many():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'out_features'"):
        ops.Linear(4)
    with pytest.raises(TypeError, match="unexpected keyword argument 'biass'"):
        ops.Linear(4, 3, biass=True)


def test_authors_say_themselves_what_they_are_made_with():
    class Mine(ops.Dropout):
        def __init__(self, p: int = 0):
            super().__init__(p / 10)

    made: Any = Mine(0.5)
    assert made.p == 0.05
    with pytest.raises(sf.InputError, match="SF106 Mine: p must be a number"):
        ops.Dropout.__init__(made, "half")


@pytest.mark.parametrize(
    ("made", "name", "number"),
    [
        (lambda: ops.Dropout(np.float32(0.5)), "p", 0.5),
        (lambda: ops.Dropout(p=Fraction(1, 2)), "p", 0.5),
        (lambda: ops.LayerNorm(np.int64(4)), "normalized_shape", (4,)),
        (lambda: ops.LayerNorm(4, np.float64(0.5)), "eps", 0.5),
        (lambda: ops.Attention(np.int32(2), window=np.int64(3)), "window", 3),
        (lambda: ops.RMSNorm(4, None), "eps", None),
        (lambda: ops.Scale(True), "factor", 1.0),
    ],
)
def test_numbers_of_another_library_become_numbers_of_python(made: Callable[[], Any], name: str, number: Any):
    kept = getattr(made(), name)
    assert kept == number
    assert type(kept) is type(number)


@pytest.mark.parametrize("made", [lambda: ops.Linear(4, 4, bias=None), lambda: ops.LayerNorm(4, bias=None)])
def test_none_is_a_flag_that_is_off_as_in_torch(made: Callable[[], Any]):
    assert "bias" not in made().state_dict()


def test_compilers_take_what_was_made_with_a_number_of_numpy():
    model = sf.Sequential(ops.Linear(4, 4), ops.Dropout(np.float32(0.5)), ops.GeLU())
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2, 4)).shape == (2, 4)


def test_a_loss_takes_numbers_of_numpy():
    x, weight, targets = torch.ones(3, 4), torch.randn(5, 4), torch.tensor([1, -1, 2])
    given: dict[str, Any] = {"ignore_index": np.int64(-1), "label_smoothing": np.float32(0.25)}
    loss = linear_cross_entropy(x, weight, targets, **given)
    assert loss == linear_cross_entropy(x, weight, targets, ignore_index=-1, label_smoothing=0.25)
    module = losses.LinearCrossEntropy(4, 5, **given)
    assert (type(module.ignore_index), type(module.label_smoothing)) == (int, float)
