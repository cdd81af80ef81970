"""The form of an error: the module's path first, and a hint on its own line."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import seqfuse as sf
from seqfuse import ops


def test_the_path_of_the_module_is_first_and_the_position_counts_hidden_operations() -> None:
    model = sf.Sequential(ops.Linear(4, 4), ops.ReLU(), ops.Residual(ops.LayerNorm(5)))
    with pytest.raises(sf.InputError) as caught:
        model(torch.ones(3, 4))
    assert str(caught.value) == "SF101 '2.0', position 4 (LayerNorm): expects last dimension 5, got 4"
    assert (caught.value.path, caught.value.position) == ("2.0", 4)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.path) == (str(caught.value), "2.0")
    assert str(copy.copy(caught.value)) == str(caught.value)


def test_a_path_that_is_the_position_is_named_once() -> None:
    with pytest.raises(sf.InputError, match=r"^SF101 position 1 \(LayerNorm\): "):
        sf.Sequential(ops.ReLU(), ops.LayerNorm(5))(torch.ones(3, 4))


def test_a_hint_is_a_line_of_its_own() -> None:
    with pytest.raises(sf.InputError) as caught:
        sf.Sequential(ops.Linear(4, 4))(torch.ones(3, 4).double())
    said, hint = str(caught.value).splitlines()
    assert said.endswith("got torch.float64")
    assert hint == "Hint: convert one of them with .to(dtype), or run under torch.autocast"


def test_the_error_of_a_module_that_runs_eagerly_has_its_path_in_a_note() -> None:
    model = sf.Sequential(ops.Linear(4, 4), sf.Sequential(torch.nn.Linear(5, 5), torch.nn.Softmax(-1)))
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(3, 4))
    assert "in Linear at '1.0', position 2" in caught.value.__notes__


def test_a_fuser_of_a_list_says_what_it_takes() -> None:
    for given in ([ops.Linear(4, 4), ops.ReLU()], (ops.ReLU(),), 3, torch.nn.ReLU()):
        with pytest.raises(sf.InputError, match=r"SF105: Fuser takes an sf\.Sequential or one operation") as caught:
            sf.Fuser(given)  # pyright: ignore[reportArgumentType]
        assert caught.value.hint is not None
        assert "sf.Sequential(*operations)" in caught.value.hint
    model = sf.Sequential(ops.Linear(4, 4), ops.ReLU())
    assert torch.equal(sf.Fuser(model)(torch.ones(2, 4)), model(torch.ones(2, 4)))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ops.Linear(-1, 64), "SF106 Linear: sizes must be at least 0, got in_features=-1"),
        (lambda: ops.Linear(64, out_features=-2), "SF106 Linear: sizes must be at least 0, got out_features=-2"),
        (
            lambda: ops.MergedLinear(4, (3, -1)),
            "SF106 MergedLinear: sizes must be at least 0, got out_features=(3, -1)",
        ),
        (lambda: ops.LayerNorm(-1), "SF106 LayerNorm: sizes must be at least 0, got normalized_shape=-1"),
        (lambda: ops.Embedding(4, -1), "SF106 Embedding: sizes must be at least 0, got embedding_dim=-1"),
        (lambda: sf.nn.FeedForward(-1, 4), "SF106 Linear: sizes must be at least 0, got in_features=-1"),
    ],
)
def test_a_size_below_0_is_named(make: Callable[[], object], said: str) -> None:
    with pytest.raises(sf.InputError) as caught:
        make()
    assert str(caught.value) == said


def test_an_environment_goes_by_the_name_of_a_gpu() -> None:
    assert sf.Env.of("h100") == sf.Env.of("H100") == sf.Env.of("cuda:sm_90")
    assert sf.Env.of("a100") == sf.Env.of("cuda:sm_80")
    assert sf.Env.of("mi300x") == sf.Env.of("cuda:gfx942")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn], ids=str)
def test_an_environment_of_a_dtype_that_no_operation_takes_is_an_error(dtype: torch.dtype) -> None:
    with pytest.raises(sf.InputError, match=f"SF106: dtype must be a floating dtype .* not {dtype}"):
        sf.Env.of("cpu", dtype=dtype)
    assert sf.Env.like(torch.zeros(2, dtype=dtype)).dtype is dtype  # a model may begin with a module that takes it


def test_an_autocast_dtype_is_a_floating_one() -> None:
    with pytest.raises(sf.InputError, match=r"SF106: autocast must be a floating dtype, not torch\.int64"):
        sf.Env.of("cpu", autocast=torch.int64)


def test_a_misspelt_channel_has_a_hint() -> None:
    model = sf.Sequential(ops.Fork("skip"), ops.Linear(4, 4), ops.Add("skp"))
    with pytest.raises(sf.InputError, match=r"SF103 .*\(Add\): it reads channel 'skp'.*\nHint: did you mean 'skip'\?$"):
        model(torch.ones(3, 4))


def test_a_misspelt_method_is_an_error_where_the_class_is_defined() -> None:
    with pytest.raises(sf.PluginError, match=r"refrence is not .*\n.*def refrence.*\nHint: did you mean 'reference'\?"):

        class Shrink(sf.Pointwise):
            def refrence(self, x: torch.Tensor) -> torch.Tensor:
                return x / 2

    with pytest.raises(sf.PluginError, match=r"infere is not .*\n.*def infere.*\nHint: did you mean 'infer'\?"):

        class Wide(sf.UnfusedOperation):
            def infere(self, shape: tuple[int, ...]) -> tuple[int, ...]:
                return shape

    with pytest.raises(sf.PluginError, match=r"requirs is not .*\n.*def requirs.*\nHint: did you mean 'requires'\?"):

        class Needs(sf.ForwardFusion):
            act: ops.ReLU

            def requirs(self, env: sf.Env) -> sf.Requirements:
                yield from ()

    class Halves(sf.Pointwise):
        def reference(self, x: torch.Tensor) -> torch.Tensor:
            return self.references(x)

        def references(self, x: torch.Tensor) -> torch.Tensor:  # a helper next to the method that it resembles
            return x / 2


def test_an_attribute_that_is_nearly_memory_is_a_warning() -> None:
    model = sf.Sequential(ops.ReLU())
    with pytest.warns(
        UserWarning, match=r"Sequential has no attribute 'memroy'.*\nHint: did you mean 'memory'\?"
    ) as told:
        model.memroy = "lean"
    assert told[0].filename == __file__
    with pytest.warns(UserWarning, match=r"'fusion'.*\nHint: did you mean 'fusions'\?"):
        model.fusion = sf.fusions.lean
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.memory, model.fusions, model.label, model._memory = "lean", sf.fusions.lean, "mine", 3
        model.memory_bank = torch.zeros(3)

        class Remembers(sf.Sequential):
            memry = 0

        Remembers(ops.ReLU()).memry = 4  # a class attribute


def test_token_ids_that_are_wrong_say_which_and_of_what_table() -> None:
    model = sf.Sequential(ops.Embedding(11, 6), ops.Linear(6, 2))
    for run in (model, model[0], lambda x: torch.func.functional_call(model, {}, (x,))):
        for wrong in (11, -1):
            said = f"SF107 .*Embedding.*: expects token ids from 0 to 10, got {wrong}"
            with pytest.raises(sf.RangeError, match=said) as caught:
                run(torch.tensor([3, wrong]))
            assert isinstance(caught.value, IndexError)
        with pytest.raises(sf.InputError, match=r"SF101 .*\(Embedding\): expects integer token ids, got torch.float32"):
            run(torch.tensor([3.0]))


def test_an_author_whose_fusion_is_not_faster_by_its_estimate_is_told_of_saves() -> None:
    class Nothing(sf.BackwardFusion):
        act: ops.ReLU

        def bwd(self, dy: torch.Tensor, *, act: ops.ReLU.Saved) -> tuple[torch.Tensor | None, sf.Grads]:
            return self.act.bwd(dy, act)

    class States(Nothing):
        def saves(self, env: sf.Env) -> sf.Savings:
            return sf.Savings()

    def reason(kind: type[sf.FusedOperation]) -> str:
        plan = sf.Sequential(ops.ReLU(), fusions=(kind,)).plan(torch.ones(3, 4, requires_grad=True))
        return plan.refused[0].reason

    assert reason(Nothing).endswith("; state saves() if it gains more")
    assert "saves()" not in reason(States)


def test_a_set_of_fusions_that_only_save_memory_says_what_uses_it() -> None:
    model = sf.Sequential(ops.LayerNorm(8), ops.Linear(8, 8), fusions=sf.fusions.lean)
    plan = model.plan(torch.ones(3, 8))
    assert plan.fused == (0, 0)
    assert 'RecomputeNorm at 0: it saves memory and takes longer; memory="lean"' in str(plan).replace("\n    ", " ")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.memory = "lean"
        model(torch.ones(3, 8))
        assert model.plan(torch.ones(3, 8)).count("RecomputeNorm") == 1
        model.memory = "fast"
        with torch.no_grad():  # nothing is saved
            model(torch.ones(3, 8))
        sf.Sequential(ops.LayerNorm(8), ops.Linear(8, 8), fusions=())(torch.ones(3, 8))


def test_arguments_of_a_sequential_that_are_given_to_a_call_are_told_where_they_belong() -> None:
    with pytest.raises(sf.InputError, match="SF103") as caught:
        sf.Sequential(ops.Linear(4, 4)).plan(torch.ones(2, 4), memory="lean")  # pyright: ignore[reportArgumentType]
    assert caught.value.hint == "memory is an argument of the model: sf.Sequential(..., memory=...)"


class Frugal(sf.ForwardFusion):
    saves_memory = True
    act: ops.Tanh
    drop: ops.ReLU

    def fwd(self, x: torch.Tensor) -> Any:
        return None


@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_a_fusion_that_saves_memory_and_matches_nowhere_is_named(memory: Any) -> None:
    x = torch.ones(2, 4, requires_grad=True)
    plan = sf.Sequential(ops.Linear(4, 4, bias=False), ops.ReLU(), fusions=(Frugal,), memory=memory).plan(x)
    assert plan.unmatched == ("Frugal (Tanh, ReLU)",)
    assert plan.refused == ()


def test_a_fusion_that_saves_memory_and_is_not_asked_for_is_named() -> None:
    x = torch.ones(2, 4, requires_grad=True)
    plan = sf.Sequential(ops.Tanh(), ops.ReLU(), fusions=(Frugal, sf.fusions.PointwiseChain)).plan(x)
    reason = 'it saves memory and takes longer; memory="lean", "balanced" or a budget may use it'
    assert [r.reason for r in plan.refused if r.fusion == "Frugal"] == [reason]
    assert plan.unmatched == ()


def test_a_forward_that_fails_where_memory_is_planned_is_named() -> None:
    x = torch.ones(2, 4, requires_grad=True)
    plan = sf.Sequential(ops.Tanh(), ops.ReLU(), fusions=(Frugal,), memory="lean").plan(x)
    (reason,) = (r.reason for r in plan.refused if r.fusion == "Frugal")
    assert reason.startswith("what it would save is not known: TypeError: ")
