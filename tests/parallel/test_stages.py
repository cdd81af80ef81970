"""Stages in one process: where a model is cut, what is refused, clipped gradients."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import seqfuse as sf
from seqfuse import ops
from seqfuse.parallel import clip_grad_norm_, everywhere, parallelize, pipeline, stages
from seqfuse.parallel.remote_tensor import Elsewhere
from seqfuse.parallel.transfer import nodes
from tests.parallel.kit import (
    batch,
    block,
    mesh,
    model_of,
    same_as_alone,
)

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    yield mesh()
    dist.destroy_process_group()


def test_one_rank_has_all_stages_and_sends_nothing(one: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dist, "batch_isend_irecv", None)
    alone = model_of(dropout=0.2)
    same_as_alone(pipeline(copy.deepcopy(alone), one), alone)
    staged = pipeline(copy.deepcopy(alone), one, stages=("2.1", "3.4"))
    same_as_alone(staged, alone)
    assert set(staged.state_dict()) == set(alone.state_dict())
    assert "stage 2 begins here; both are on rank 0" in str(staged.plan(batch(0)[0]))
    again = copy.deepcopy(staged)
    same_as_alone(again, alone)


@pytest.fixture
def two_pretended() -> Iterator[Any]:
    """Two ranks, of which this is the first and the other one sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield mesh()
    dist.destroy_process_group()


class Pair(sf.FusableOperation):
    """Expands to its own two operations; a boundary that is registered in it would not run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = ops.Linear(6, 6), ops.Linear(6, 6)

    def expand(self) -> tuple[nn.Module, ...]:
        return self.first, self.second


@pytest.mark.parametrize(
    ("stages_asked", "sentence"),
    [
        (("nowhere",), r"no stage can begin at 'nowhere'"),
        (("2.5",), r"no stage can begin at '2.5'\nHint: did you mean '2.[0-4]'\?"),
        (("3", "2"), r"position 3 \(Fork\): stages begin in the order of the sequence"),
        (("2", "2"), r"stages begin in the order of the sequence"),
        (("0",), r"stages begin in the order of the sequence"),
        (9, r".*cannot be cut into 9 stages\nHint: name the modules"),
        (0, r"stages must be at least 1, got 0"),
        (-2, r"stages must be at least 1, got -2"),
        (
            ("1.net",),
            r"no stage can begin at '1.net': '1' runs through its own call \(not an operation of this library\)",
        ),
        (("2.second",), r"no stage can begin at '2.second'"),
        (("0.bias",), r"no stage can begin at '0.bias'(\n|$)"),
    ],
    ids=str,
)
def test_refuses_cuts_that_cannot_be(one: Any, stages_asked: Any, sentence: str):
    model = model_of()
    if stages_asked == ("1.net",):
        model = sf.Sequential(ops.Linear(4, 6), nn.ModuleDict({"net": nn.Linear(6, 6)}), ops.Linear(6, 3))
    if stages_asked == ("2.second",):
        model[2] = Pair()
    with pytest.raises(sf.errors.PlanError, match=r"SF202.*" + sentence):
        pipeline(model, one, stages=stages_asked)
    assert not any("boundary" in name for name, _ in model.named_modules())


def test_a_model_in_stages_is_not_divided(one: Any):
    staged = pipeline(model_of(), one, stages=2)
    text, before = str(staged), {name: p.clone() for name, p in staged.named_parameters()}
    for model in (staged, nn.Sequential(staged)):
        with pytest.raises(
            sf.errors.PlanError, match=r"SF202: parallelize comes before pipeline, .*\nHint: pipeline\(par"
        ):
            parallelize(model, one, {"*.1": "column"})
    assert str(staged) == text
    assert all(torch.equal(p, before[name]) for name, p in staged.named_parameters())


def test_refuses_a_model_that_is_in_stages_and_other_settings(one: Any):
    staged = pipeline(model_of(), one, stages=2)
    with pytest.raises(sf.errors.PlanError, match="SF202: the model is in stages already"):
        pipeline(staged, one)
    unknown: Any = "guess"
    with pytest.raises(sf.errors.InputError, match=r"SF106.*guess"):
        pipeline(model_of(), one, shapes=unknown)
    with pytest.raises(sf.errors.InputError, match="SF106: takes a model that"):
        everywhere(torch.zeros(()), model_of())


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"model": nn.Sequential(nn.Linear(4, 4), nn.ReLU())},
            r"pipeline cuts a seqfuse\.Sequential, got Sequential\nHint: ",
        ),
        ({"mesh": object()}, r"pipeline takes a DeviceMesh, got object\nHint: such as init_device_mesh"),
        ({"stages": "12"}, r"stages must be a number, or a list of the names .*, got '12'\nHint: such as"),
        ({"stages": 2.5}, r"stages must be a number, .*, got 2\.5"),
        ({"stages": [1, 2]}, r"stages must be a number, .*, got \[1, 2\]"),
    ],
    ids=["model", "mesh", "stages of text", "a half stage", "stages by number"],
)
def test_refuses_arguments_of_another_kind(one: Any, given: dict[str, Any], sentence: str):
    arguments: dict[str, Any] = {"model": model_of(), "mesh": one} | given
    with pytest.raises(sf.errors.InputError, match=f"SF106: {sentence}"):
        pipeline(arguments.pop("model"), arguments.pop("mesh"), **arguments)


def test_refuses_meshes_stages_and_names_that_do_not_fit(two_pretended: Any):
    with pytest.raises(sf.errors.PlanError, match="SF202: a pipeline takes one dimension of a mesh, not 2"):
        pipeline(model_of(), mesh((1, 2), ("pp", "tp")))
    with pytest.raises(sf.errors.PlanError, match="SF202: 3 stages cannot be dealt evenly to 2 ranks"):
        pipeline(model_of(), two_pretended, stages=3)
    model = model_of()
    model[3].register_module("boundary1", ops.Tanh())
    with pytest.raises(sf.errors.PlanError, match=r"SF202: modules are called \['boundary1'\], as boundaries are"):
        pipeline(model, two_pretended, stages=("3.2",))
    norms = [nn.BatchNorm1d(6, affine=False) for _ in range(2)]
    norms[1].running_var = norms[0].running_var
    with pytest.raises(sf.errors.PlanError, match=r"BatchNorm1d\): its running_var is in stages 0 and 1, which are on"):
        pipeline(sf.Sequential(ops.Linear(4, 6), norms[0], ops.Tanh(), norms[1]), two_pretended, stages=("2",))


def test_a_mesh_needs_no_names(one: Any):
    staged = pipeline(model_of(), init_device_mesh("cpu", (1,)), stages=2)
    assert staged._fuser.placement.name == "pipeline"


@pytest.mark.parametrize(
    ("call", "got"),
    [
        (lambda staged, x: staged(x.tolist()), "list"),
        (lambda staged, x: staged(x.as_subclass(type("Named", (Tensor,), {}))), "Named on cpu"),
        (lambda staged, x: torch.func.vmap(staged)(x[None]), "Tensor on cpu"),
        (lambda staged, x: torch.func.functional_call(staged, {}, x.to("meta")), "Tensor on meta"),
    ],
    ids=["a list", "a subclass", "vmap", "meta"],
)
def test_a_model_in_stages_takes_plain_tensors_alone(one: Any, call: Any, got: str):
    staged = pipeline(model_of(), one, stages=2)
    with pytest.raises(sf.errors.InputError, match=rf"SF105.*neither compiled nor transformed, got {got}\n"):
        call(staged, batch(0)[0])


def test_a_boundary_runs_in_the_model_that_it_cuts_alone(one: Any):
    staged = pipeline(model_of(), one, stages=("2",))
    with pytest.raises(sf.errors.PlanError, match=r"SF202.*Boundary.*runs only in the whole model.*\nHint: keep"):
        staged.boundary1(batch(0)[0])


class Unsqueezed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(*[1] * 15, *x.shape)


def test_a_tensor_of_many_dimensions_is_not_told(one: Any):
    staged = pipeline(sf.Sequential(ops.Linear(4, 6), Unsqueezed(), ops.Linear(6, 3)), one, stages=("2",))
    assert staged(torch.zeros(5, 4)).ndim == 17
    told = pipeline(sf.Sequential(Unsqueezed(), ops.Linear(4, 3)), one, stages=("1",), shapes="broadcast")
    with pytest.raises(sf.errors.PlanError, match="SF202: a stage cannot pass on a tensor of 17 dimensions"):
        told(torch.zeros(5, 4))


def test_only_a_tensor_of_the_last_stage_is_taken_everywhere(two_pretended: Any):
    staged = pipeline(model_of(), two_pretended, stages=2)
    with pytest.raises(sf.errors.InputError, match="SF105 everywhere: takes a tensor of the last stage"):
        everywhere(torch.zeros(()), staged)


def test_what_has_two_names_on_another_rank_is_in_no_state_under_either(two_pretended: Any):
    norm = nn.BatchNorm1d(6)
    alone = sf.Sequential(ops.Linear(4, 6), norm, ops.Tanh(), norm)
    staged = pipeline(copy.deepcopy(alone), two_pretended, stages=("1",))
    assert set(staged.state_dict()) == {"0.weight", "0.bias"}
    staged.load_state_dict(alone.state_dict())


def test_a_state_that_is_assigned_to_what_holds_a_model_in_stages_makes_nothing_of_other_ranks(two_pretended: Any):
    alone = sf.Sequential(ops.Linear(4, 6), ops.Tanh(), ops.Linear(6, 3))
    holder = nn.ModuleDict({"inner": pipeline(copy.deepcopy(alone), two_pretended, stages=("2",))})
    holder.load_state_dict({f"inner.{name}": t for name, t in alone.state_dict().items()}, assign=True)
    assert [p.is_meta for p in holder.parameters()] == [False, False, True, True]


def test_the_shapes_of_few_inputs_are_kept(one: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sf.parallel.staged, "KEPT_LOWERINGS", 3)
    staged = pipeline(model_of(), one, stages=("3",))
    fuser = staged._fuser
    for rows in range(1, 9):
        fuser.infer(batch(0, rows)[0], {})
        assert all(0 < len(stage.clipped) <= 3 for stage in fuser.stages(fuser.op_list()))


def test_stages_of_a_count_are_balanced_where_a_single_tensor_crosses(one: Any):
    model = sf.Sequential(*(block() for _ in range(6)), ops.Linear(6, 200))
    staged = pipeline(model, one, stages=2)
    names = [name for name, module in staged.named_modules() if type(module).__name__ == "Boundary"]
    assert names == ["boundary1"]
    assert [*staged._modules].index("boundary1") == 6  # the last operation has most of the parameters


def test_operations_without_parameters_are_balanced_by_their_number(one: Any):
    staged = pipeline(sf.Sequential(*(ops.Tanh() for _ in range(6))), one, stages=2)
    assert [*staged._modules].index("boundary1") == 3


def test_a_stage_may_begin_where_a_module_is_met_again(one: Any):
    tanh = ops.Tanh()
    alone = sf.Sequential(ops.Linear(4, 6), tanh, ops.Linear(6, 6), tanh, ops.Linear(6, 3)).double()
    same_as_alone(pipeline(copy.deepcopy(alone), one, stages=("3",)), alone)


@pytest.mark.parametrize("p", [0, -1.0, -torch.inf, torch.nan])
def test_gradients_are_clipped_by_positive_norms_alone(p: float):
    message = rf"SF106 clip_grad_norm_: norm_type must be positive, got {p}"
    with pytest.raises(sf.errors.InputError, match=message):
        clip_grad_norm_(ops.Linear(2, 2), 1.0, p)


def test_a_public_output_crosses_every_boundary_behind_it(one: Any):
    model = sf.Sequential(ops.Linear(4, 6), ops.Fork("out"), ops.Linear(6, 6), ops.Linear(6, 3))
    with pytest.raises(
        sf.errors.PlanError, match="a sequence of 2 parts that a single tensor leaves cannot be cut into 3"
    ):
        pipeline(model, one, stages=3)


def test_numbers_of_another_rank_cannot_be_written_into_a_tensor_of_this_one():
    there, here = Elsewhere.of(torch.empty(3, device="meta"), "on rank 1"), torch.zeros(2, 3)
    with pytest.raises(sf.errors.StateError, match="SF508"):
        here[0] = there
    with pytest.raises(sf.errors.StateError, match="SF508: add into a tensor of this rank"):
        torch.add(there, 1, out=here)
    with pytest.raises(sf.errors.StateError, match="on rank 1"):
        there[0].item()


def test_results_of_a_tensor_of_another_rank_are_there_unless_they_are_made_here():
    there, here = Elsewhere.of(torch.empty(3, device="meta"), "on rank 1"), torch.zeros(3)
    for made in (here + there, here.sub(there), torch.where(here > 0, here, there), there.new_zeros(2), there.detach()):
        assert isinstance(made, Elsewhere)
        assert made.place == "on rank 1"
    assert there.add_(here) is there
    assert type(there.new_zeros(2, device="cpu")) is Tensor


@torch.library.custom_op("seqfuse_tests::as_many_as_it_says", mutates_args=())
def as_many_as_it_says(x: Tensor) -> Tensor:
    return x.new_empty(int(x.sum()))


@as_many_as_it_says.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())


def test_a_call_that_reads_numbers_of_another_rank_within_says_so_and_other_errors_are_torchs():
    there = Elsewhere.of(torch.empty(3, device="meta"), "on rank 1")
    for name, call in (("allclose", torch.allclose), ("as_many_as_it_says", lambda a, _: as_many_as_it_says(a))):
        with pytest.raises(sf.errors.StateError, match=rf"SF508: .*{name}.* needs numbers .*: they are on rank 1"):
            call(there, there)
    with pytest.raises(RuntimeError, match="invalid for input of size 3"):
        there.reshape(2)


def test_gradients_of_some_tensors_of_another_rank_are_refused_however_they_are_asked_for():
    there = Elsewhere.of(torch.empty(3, device="meta", requires_grad=True), "on rank 1")
    asks = [
        lambda: torch.autograd.grad(there.sum(), [there]),
        lambda: there.sum().backward(inputs=[there]),
        lambda: there.sum().backward(None, None, None, [there]),
    ]
    if "has_torch_function" in torch.autograd.backward.__code__.co_names:  # not in every version
        asks.append(lambda: torch.autograd.backward(there.sum(), inputs=[there]))
    for ask in asks:
        with pytest.raises(sf.errors.StateError, match=r"(?s)SF508.*backward"):
            ask()
    there.sum().backward()


def test_each_node_of_a_graph_is_visited_once():
    leaf = torch.ones((), requires_grad=True)
    deep = leaf
    for _ in range(9):
        deep = deep + deep
    assert len([*nodes(deep)]) == 10


def test_a_transfer_that_fails_without_a_message_is_named_by_its_error(one: Any):
    error = pipeline(model_of(), one, stages=2)._fuser.placement.failed("sending", RuntimeError())
    assert str(error).startswith("SF509: sending in group 'pp' failed: RuntimeError()\nHint: a rank that failed")


def total(inputs: Tensor) -> Tensor:
    if torch.overrides.has_torch_function((inputs,)):
        return torch.overrides.handle_torch_function(total, (inputs,), inputs=inputs)
    return inputs.sum()


def test_other_functions_may_have_inputs_of_another_rank():
    there = Elsewhere.of(torch.empty(3, device="meta", requires_grad=True), "on rank 1")
    assert isinstance(total(inputs=there), Elsewhere)


def test_a_rank_without_parameters_takes_part_in_a_norm_on_the_device_of_its_input(
    one: Any, monkeypatch: pytest.MonkeyPatch
):
    model: Any = pipeline(model_of(), one, stages=2).to("meta")
    model._fuser.device = torch.device("meta")
    reduced: list[Tensor] = []
    monkeypatch.setattr(dist, "all_reduce", lambda t, group: reduced.append(t))
    clip_grad_norm_(model, 1.0)
    assert [t.device.type for t in reduced] == ["meta"]


def test_stages_of_one_rank_may_share_a_parameter(one: Any):
    model = model_of()
    model[2][4].weight = model[3][4].weight
    staged = pipeline(model, one, stages=("3",))
    assert staged[2][4].weight is staged.get_parameter("3.4.weight")


def test_channels_are_cut_into_micro_batches_as_the_batch_is(one: Any):
    staged = pipeline(sf.Sequential(ops.Linear(4, 6), ops.Tanh(), ops.Add("given")).double(), one, stages=("1",))
    x, given = batch(0, 4)[0], torch.ones(4, 6, dtype=torch.float64)
    made = stages(staged, x.to("meta"), microbatches=2, given=given)
    assert [stage.device.type for stage in made] == ["cpu", "cpu"]
    with pytest.raises(sf.errors.InputError, match=r"SF103.*reads channel 'given'"):
        stages(staged, x, microbatches=2)


@pytest.mark.parametrize(("rows", "parts"), [((), 1), ((5,), 2), ((5,), 0), ((5,), -1)])
def test_a_batch_that_has_no_equal_parts_is_refused(one: Any, rows: tuple[int, ...], parts: int):
    staged = pipeline(model_of(), one, stages=("3.1",))
    with pytest.raises(sf.errors.InputError, match=rf"SF101: a batch of shape .* has no {parts} equal parts"):
        stages(staged, torch.zeros(rows), microbatches=parts)


def test_stages_that_are_made_again_begin_with_the_first_micro_batch(one: Any):
    alone, x = model_of(dropout=0.5), batch(0, 4)[0]
    staged = pipeline(copy.deepcopy(alone), one, stages=("3",))
    for cut_off in (True, False):
        first, second = (made.submod for made in stages(staged, x, microbatches=2))
        torch.manual_seed(3 + cut_off)
        crossing = first(x[:2])
    torch.manual_seed(3)
    assert torch.equal(second(*crossing), alone(x[:2]))
    assert not staged._fuser._drawn  # each is freed with the last stage that reads it


def test_what_stands_for_a_stage_has_a_gradient_only_where_gradients_are_recorded(one: Any):
    staged, x = pipeline(model_of(), one, stages=("2.1",)), batch(0)[0].requires_grad_()
    for recorded in (False, True, False):
        with torch.set_grad_enabled(recorded):
            leaving = [t for tensors in staged._fuser.infer(x, {})[1:] for t in tensors]
        assert {t.requires_grad for t in leaving} == {recorded}


def test_regions_of_a_stage_that_get_the_same_shapes_have_their_own(one: Any):
    model = sf.Sequential(ops.Linear(4, 6), ops.Tanh(), nn.GELU(), ops.Transpose(-1, -2)).double()
    staged = pipeline(model, one, stages=("1",))
    (leaving,) = staged._fuser.infer(batch(0)[0], {})[-1]
    assert leaving.shape == (6, 5)


def test_the_norm_of_nothing_is_zero():
    assert clip_grad_norm_(nn.Tanh(), 1.0) == 0


def test_norms_of_two_dtypes_are_added_in_the_wider_one():
    model = nn.Sequential(nn.Linear(64, 1, bias=False).bfloat16(), nn.Linear(64, 1, bias=False))
    for i, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, 1.0 if i else 0.03125)
    assert clip_grad_norm_(model, 1e9).item() == pytest.approx((64 + 0.0625) ** 0.5, rel=1e-6)


@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_a_norm_that_is_not_finite_is_an_error_where_that_is_asked_for(wrong: float):
    model = nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[1.0, wrong]])
    with pytest.raises(RuntimeError, match=r"total norm of order 2\.0"):
        clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    assert not clip_grad_norm_(model, 1.0).isfinite()


def test_parameters_of_other_modules_count_where_stages_are_balanced(one: Any):
    staged = pipeline(sf.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 200)), one, stages=2)
    assert [*staged._modules].index("boundary1") == 3
