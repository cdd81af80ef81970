"""Converted models combined with other features of torch."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import seqfuse as sf
from seqfuse.testing import seeded_randn

from .comparing import assert_equal, assert_same, assert_same_recorded, passes
from .residual import Adapted, Block, Net, X, chains, pair


def doubled(*call: Any) -> Tensor:
    return call[-1] * 2


Change = Callable[[Any], object]
CHANGES: dict[str, Change] = {
    "a hook": lambda m: m.layers[0].fc.register_forward_hook(doubled),
    "a hook with keywords": lambda m: m.layers[0].fc.register_forward_hook(doubled, with_kwargs=True, always_call=True),
    "a hook before": lambda m: m.layers[0].fc.register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
    "a hook of gradients": lambda m: m.layers[0].fc.register_full_backward_hook(lambda module, dx, dy: (dx[0] * 3,)),
    "a hook on the model": lambda m: m.register_forward_hook(doubled),
    "a hook of gradients on the model": lambda m: m.register_full_backward_hook(lambda module, dx, dy: (dx[0] * 3,)),
    "a hook of a parameter": lambda m: m.layers[0].fc.weight.register_hook(lambda dw: dw * 2),
    "another module": lambda m: setattr(m.layers[0], "fc", nn.Sequential(m.layers[0].fc, nn.Tanh())),
    "another eps": lambda m: setattr(m.layers[0].norm, "eps", 0.5),
    "another parameter": lambda m: setattr(
        m.layers[0].out, "weight", nn.Parameter(m.layers[0].out.weight.detach() * 2)
    ),
    "no bias": lambda m: setattr(m.layers[0].out, "bias", None),
    "another forward": lambda m: setattr(m.layers[0], "forward", doubled),
    "another class": lambda m: setattr(m.layers[0], "__class__", Louder),
    "another layer": lambda m: m.layers.append(copy.deepcopy(m.layers[0])),
    "other numbers": lambda m: m.layers[0].fc.weight.data.mul_(2),
    "a frozen layer": lambda m: m.layers[0].requires_grad_(False),
    "tied weights": lambda m: setattr(m.layers[1].fc, "weight", m.layers[0].fc.weight),
    "one layer twice": lambda m: setattr(m.layers, "1", m.layers[0]),
    "weight norm": lambda m: nn.utils.parametrizations.weight_norm(m.layers[0].fc),
}


class Louder(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_after_the_first_call_counts(name: str):
    model, plain, _ = pair(depth=2 if name in ("tied weights", "one layer twice") else 1)
    CHANGES[name](model)
    CHANGES[name](plain)
    assert_equal(passes(model, X), passes(plain, X))


def test_a_hook_that_is_taken_away_no_longer_counts():
    model, plain, _ = pair()
    handle = model.layers[0].fc.register_forward_hook(doubled)
    passes(model, X)
    handle.remove()
    assert_equal(passes(model, X), passes(plain, X))


def test_a_hook_of_all_modules_counts_while_it_is_there():
    model, plain, conversion = pair()
    plans = [region.plan for graph in conversion.graphs for region in graph.regions]
    handle = nn.modules.module.register_module_forward_hook(doubled)
    try:
        assert_equal(passes(model, X), passes(plain, X))
        assert "runs eagerly under hooks of all modules" in str(conversion)
    finally:
        handle.remove()
    assert_equal(passes(model, X), passes(plain, X))
    assert [str(region.plan) for graph in conversion.graphs for region in graph.regions] == list(map(str, plans))


def test_an_optimizer_trains_the_parameters():
    model, plain, _ = pair()
    for each in (model, plain):
        optimizer = torch.optim.AdamW(each.parameters(), 0.1)
        for _ in range(3):
            passes(each, X)
            optimizer.step()
    assert_equal(list(model.parameters()), list(plain.parameters()), 1e-7)


def test_a_copy_is_not_converted_and_may_be():
    model, _, _ = pair()
    wanted, other = passes(model, X), copy.deepcopy(model)
    assert_equal(passes(other, X), wanted)
    conversion = sf.convert(other)
    assert_equal(passes(other, X), wanted)
    assert chains(conversion)
    other.layers[0].fc.weight.data.mul_(2)
    assert_equal(passes(model, X), wanted)


def test_what_is_saved_is_the_model_and_what_is_loaded_counts():
    model, _, _ = pair()
    model.kept = sf.conversion(model)
    wanted, file = passes(model, X), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (torch.load(file, weights_only=False), pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert_equal(passes(other, X), wanted)
        assert other.kept is None
    other, _, _ = pair(seed=5)
    other.load_state_dict(model.state_dict())
    assert_equal(passes(other, X), wanted)
    other, _, _ = pair(seed=5)
    other.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    assert_equal(passes(other, X), wanted)


def test_dropout_drops_in_training_alone_and_its_gradient_is_of_what_was_dropped():
    model = Net(width=32, p=0.5)
    plain = copy.deepcopy(model).eval()
    sf.convert(model)
    x = seeded_randn((200, 32), 3).double().requires_grad_()
    y = model(x)
    dropped = (y - x).detach()
    kept = dropped != 0
    assert abs(float(kept.double().mean()) - 0.5) < 0.03
    branch = plain(x) - x
    torch.testing.assert_close(dropped[kept], 2 * branch.detach()[kept])
    (found,) = torch.autograd.grad(y.sum(), x)
    (wanted,) = torch.autograd.grad((x + branch * kept * 2).sum(), x)
    torch.testing.assert_close(found, wanted)
    assert_equal(passes(model.eval(), x.detach()), passes(plain, x.detach()))
    assert not torch.equal(model.train()(x), model(x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_body_drops_the_same_in_its_second_run(reentrant: bool):
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=reentrant)  # pyright: ignore[reportReturnType]

    model = Checkpointed(p=0.5)
    conversion = sf.convert(model)
    torch.manual_seed(3)
    found = passes(model, X)
    torch._dynamo.reset()
    model.__class__ = Net  # dropout draws the same numbers in it
    torch.manual_seed(3)
    assert_equal(found, passes(model, X))
    assert chains(conversion)
    assert conversion.graphs[1].regions


def test_a_selective_checkpoint_saves_what_its_policy_says():
    saved = list[Any]()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is not torch.ops.aten.addmm.default:
            return CheckpointPolicy.PREFER_RECOMPUTE
        saved.extend([op] * (not ctx.is_recompute))  # torch 2.11 asks again when it recomputes
        return CheckpointPolicy.MUST_SAVE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    class Selective(Net):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False, context_fn=contexts)  # pyright: ignore[reportReturnType]

    wanted, count = passes(Selective(), X), len(saved)
    conversion = sf.convert(Selective())
    assert_equal(passes(conversion.model, X), wanted)
    assert chains(conversion)
    assert len(saved) == 2 * count > 0


class Returning(Net):
    """Returns a result that it also reads."""

    def forward(self, x: Tensor) -> Any:
        h = self.layers[0].norm(2 * self.layers[0].fc(x)[..., :8] + x)
        return self.layers[0].out(F.gelu(self.layers[0].fc(h))) + h, h


def test_the_gradient_of_a_result_that_the_model_reads_too_is_whole():
    found = list[Tensor]()
    for model in (Returning(), Returning()):
        conversion = sf.convert(model) if found else None
        y, h = model(X)
        found += torch.autograd.grad(y.square().sum() + h.sum(), [h])
        assert conversion is None or chains(conversion)
    assert_equal(found[:1], found[1:])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_converted_model_may_be_checkpointed(reentrant: bool):
    model, plain, _ = pair()
    x, wanted = X.clone().requires_grad_(), passes(plain, X)
    model.zero_grad()
    y: Any = checkpoint(model, x, use_reentrant=reentrant)
    (y * seeded_randn(tuple(y.shape), 9)).sum().backward()
    assert_equal([y.detach(), x.grad, *(p.grad for p in model.parameters())], wanted)


def test_a_fusion_that_fails_in_the_backward_pass_falls_back():
    model, plain, _ = pair()
    found, wanted = (
        torch.autograd.grad(m(X), list(m.parameters()), seeded_randn((2, 3, 8), 4).double(), is_grads_batched=True)
        for m in (model, plain)
    )
    assert_equal(list(found), list(wanted))


def test_saved_tensors_may_be_hooked_in_the_first_call():
    model, plain = Net(), Net()
    conversion = sf.convert(model)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy):
        assert_equal(passes(model, X), passes(plain, X))
    assert chains(conversion)


def test_saved_tensors_may_be_moved_away():
    model, plain, _ = pair()
    with torch.autograd.graph.save_on_cpu():
        assert_equal(passes(model, X), passes(plain, X))


def test_seven_shapes_need_at_most_four_graphs():
    model, plain, conversion = pair()
    for shape in ((4,), (5,), (9,), (2,), (2, 3), (4, 5)):
        x = seeded_randn((*shape, 8), 4).double()
        assert_equal(passes(model, x), passes(plain, x))
    assert len(conversion.graphs) <= 4


def test_undo_gives_the_model_back_bit_for_bit():
    model, plain, conversion = pair()
    conversion.undo()
    assert_equal(passes(model, X), passes(plain, X), 0)
    assert vars(model).keys() == vars(plain).keys()  # no attribute is left, which `from_torch` would refuse
    sf.convert(model)
    with pytest.raises(sf.InputError, match="Net is converted already"):
        sf.convert(model)


def test_a_conversion_that_was_not_kept_is_found_by_its_model():
    model, plain, conversion = pair()
    assert sf.conversion(model) is conversion
    for other in (model.layers[0], nn.ReLU()):
        with pytest.raises(sf.InputError, match=r" is not converted\nHint: if it is a part of a converted model, ask"):
            sf.conversion(other)
    with pytest.raises(sf.InputError, match=r"Sequential is not converted as a whole\nHint: .*\.get_submodule\('1'\)"):
        sf.conversion(nn.Sequential(plain, model))
    with pytest.raises(sf.InputError, match=r": Net is converted already\nHint: sf\.conversion\(model\)\.undo"):
        sf.convert(model)
    sf.conversion(model).undo()
    with pytest.raises(sf.InputError, match="is not converted"):
        sf.conversion(model)
    layered = sf.convert(plain, regions="layers")
    assert sf.conversion(plain) is layered
    assert sf.conversion(plain.layers[0]) is layered


def test_a_part_of_a_converted_model_may_be_converted_for_calls_of_its_own():
    model, plain, whole = pair()
    part = sf.convert(model.layers[0])
    assert (sf.conversion(model), sf.conversion(model.layers[0])) == (whole, part)
    assert_equal(passes(model, X), passes(plain, X))
    assert (len(whole.graphs), len(part.graphs)) == (1, 0)  # a call of the model is the model's
    assert_equal(passes(model.layers[0], X), passes(plain.layers[0], X))
    assert (len(whole.graphs), len(part.graphs)) == (1, 1)
    whole.undo()
    assert sf.conversion(model.layers[0]) is part
    with pytest.raises(sf.InputError, match=r"a part of Net, 'layers\.0', is converted already\nHint: ") as said:
        sf.convert(model)
    assert said.value.hint == "sf.conversion(model.get_submodule('layers.0')).undo() ends that"
    part.undo()
    assert_equal(passes(model, X), passes(plain, X), 0)


@pytest.mark.parametrize("regions", ["model", "layers"])
@pytest.mark.parametrize("undone", [True, False], ids=["undone", "converted"])
def test_a_model_that_nobody_holds_is_freed(regions: Any, undone: bool):
    model = Net()
    conversion = sf.convert(model, regions=regions)
    passes(model, X)
    assert chains(conversion) == 1
    if undone:
        conversion.undo()
    held = weakref.ref(model), weakref.ref(model.layers[0].fc.weight)
    del model, conversion
    gc.collect()
    assert [reference() for reference in held] == [None, None]


def test_each_model_has_graphs_of_its_own():
    with torch._dynamo.config.patch(recompile_limit=2):  # Dynamo keeps a limited number of graphs per function
        for model, plain, conversion in [pair(seed=seed) for seed in range(3)]:
            assert_equal(passes(model, X), passes(plain, X))
            assert len(conversion.graphs) == 1


def test_layers_alike_share_a_graph():
    model = Net(depth=4)
    wanted = passes(model, X)
    conversion = sf.convert(model, regions="layers")
    assert_equal(passes(model, X), wanted)
    assert len(conversion.graphs) == 1
    model.layers[2].requires_grad_(False)
    passes(model, X)
    assert len(conversion.graphs) == 2


def test_filter_fn_leaves_modules_out():
    model = Net(depth=2)
    wanted = passes(model, X)
    conversion = sf.convert(model, filter_fn=lambda module, path: not path.startswith("layers.0"))
    assert_equal(passes(model, X), wanted)
    assert {left.module.split(".")[1] for left in conversion.graphs[0].left} == {"0"}
    assert chains(conversion)


def test_gradient_modes_may_change_from_call_to_call():
    model, plain, _ = pair()
    wanted = passes(plain, X)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad, torch.no_grad):
        with mode():
            y = model(X)
        assert y.is_inference() == (mode is torch.inference_mode)
        assert_equal([y.detach()], wanted[:1])
    assert_equal(passes(model, X), wanted)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2), (torch.float16, 1e-2)])
def test_a_model_may_change_its_dtype(dtype: torch.dtype, bound: float):
    model, plain, _ = pair()
    assert_equal(passes(model.to(dtype), X.to(dtype)), passes(plain.to(dtype), X.to(dtype)), bound)


def test_transforms_of_torch_func_see_the_model():
    model, plain, _ = pair()

    def seen(m: Net) -> list[Tensor | None]:
        weights = {name: p.detach() * 2 for name, p in m.named_parameters()}

        def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(m, weights, (x,)).sum()

        each = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, X)
        called = torch.func.functional_call(m, weights, (X,))
        return [called.detach(), *each.values(), *torch.func.jvp(m, (X,), (X,)), torch.func.jacrev(m)(X[:1])]

    assert_equal(seen(model), seen(plain))


@pytest.mark.parametrize("captured", [False, True], ids=["before the capture", "after it"])
def test_calls_after_a_transform_of_torch_func_are_converted(captured: bool):
    plain = Net()
    model = copy.deepcopy(plain)
    conversion = sf.convert(model)
    if captured:
        passes(model, X)
    torch.func.vmap(model)(X[None])
    assert_equal(passes(model, X), passes(plain, X))
    assert chains(conversion) == 1
    assert "1 call ran as before the conversion: a transform of torch.func was active" in str(conversion)


def test_a_second_derivative_is_an_error_where_a_node_runs_and_right_where_torch_does():
    model, plain, _ = pair()
    x = X.clone().requires_grad_()
    torch.testing.assert_close(_second(model, x), _second(plain, x), rtol=1e-12, atol=1e-12)
    model = Net()
    sf.convert(model, memory="lean")
    (dx,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(
        RuntimeError, match=r"double backward is not supported\nHint: .*or undo\(\) the conversion of the model"
    ):
        dx.sum().backward()


def _second(model: nn.Module, x: Tensor) -> Tensor:
    """The gradient of the square of a gradient."""
    (dx,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return torch.autograd.grad(dx.square().sum(), x)[0]


class Telling(Net):
    """Returns the output of its first layer, and the gate of a gated unit."""

    def __init__(self) -> None:
        super().__init__(depth=2)
        self.both = nn.Linear(8, 16).double()

    def forward(self, x: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        first = self.layers[0](x)
        gate, up = self.both(first).chunk(2, -1)
        return first, gate, self.layers[1](F.silu(gate) * up)


def test_values_that_the_model_returns_have_their_whole_gradients():
    plain, model = Telling(), Telling()
    conversion = sf.convert(model)
    for _ in range(2):
        found, wanted = (
            torch.autograd.grad(y.square().sum(), [first, gate, m.layers[0].fc.weight])
            for m in (model, plain)
            for first, gate, y in [m(X)]
        )
        assert_equal(list(found), list(wanted))
    assert chains(conversion) == 2


def test_an_adapter_written_by_hand_is_in_the_chain_and_what_is_frozen_has_no_gradient():
    model = Net()
    block: Any = model.layers[0]
    block.fc, block.out = Adapted(block.fc), Adapted(block.out)
    graph = assert_same(model, X).graphs[0]
    assert graph.left == ()
    assert [type(r.operation).__name__ for region in graph.regions for r in region.order.members].count("Scale") == 2
    assert block.fc.base.weight.grad is None
    assert block.fc.down.weight.grad is not None


@contextmanager
def hasty() -> Generator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def test_threads_may_call_one_model():
    model, plain, _ = pair()
    wanted, failed = plain(X).detach(), list[BaseException]()

    def work() -> None:
        try:
            for _ in range(20):
                assert_equal([model(X).detach()], [wanted])
        except BaseException as error:
            failed.append(error)

    with hasty():
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed


def test_calls_while_another_thread_compiles_are_counted_and_have_the_same_numbers():
    """Torch 2.13 says that it is compiling in all threads, 2.11 only in that one."""
    model, plain, conversion = pair()
    compiles, called = threading.Event(), threading.Event()

    def slow(gm: Any, inputs: Any) -> Any:
        compiles.set()
        assert called.wait(600)
        return gm.forward

    other = threading.Thread(target=lambda: torch.compile(torch.sin, backend=slow)(X))
    other.start()
    try:
        assert compiles.wait(600)
        assert_equal(passes(model, X), passes(plain, X))
        assert conversion.graphs[0].captured.calls + conversion._calls.missed.total() == 2  # pyright: ignore
        if torch.compiler.is_compiling():
            assert "1 call ran as before the conversion: torch was compiling in another thread" in str(conversion)
        region = conversion.graphs[0].regions[0]
        region._lock = Mock(wraps=region._lock, __enter__=Mock(), __exit__=Mock())  # pyright: ignore
        found = region(X, *(p for p in plain.parameters()))
        assert region._lock.__enter__.called, "two layers with one graph would otherwise exchange parameters"
        assert_equal([found.detach()], [plain(X).detach()])
    finally:
        called.set()
        other.join()


def test_a_model_that_raised_can_be_called_again():
    class Picky(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if len(x) == 4:
                raise ValueError("four")
            return y

    plain = Picky()
    model = copy.deepcopy(plain)
    sf.convert(model)
    for _ in range(2):
        with pytest.raises(ValueError, match="four"):
            model(seeded_randn((4, 8), 3).double())
        assert_equal(passes(model, X), passes(plain, X))


def test_what_data_parallel_copies_is_not_converted():
    alone, several = nn.DataParallel(Net()), nn.Sequential(nn.DataParallel(Net()))
    alone.device_ids, several[0].device_ids = [0], [0, 1]
    with pytest.raises(
        sf.InputError, match=r"the DataParallel at '0' copies its module in each call, and a copy is not"
    ):
        sf.convert(several)
    with pytest.raises(sf.InputError, match="the DataParallel copies its module in each call"):
        sf.convert(several[0])
    sf.convert(alone).undo()


def test_an_error_in_a_chain_names_the_module_of_the_model(monkeypatch: pytest.MonkeyPatch):
    model = nn.Sequential(OrderedDict(norm=nn.LayerNorm(8), up=nn.Linear(8, 16), act=nn.GELU(), down=nn.Linear(16, 8)))
    conversion = sf.convert(nn.Sequential(OrderedDict(block=model)))
    x = torch.randn(4, 8)
    conversion.model(x)
    (region,) = conversion.graphs[0].regions
    given = [model.norm.weight, model.norm.bias, model.up.weight, model.up.bias, model.down.weight, model.down.bias]
    with pytest.raises(sf.InputError, match=r"SF102 'block\.down', .*\(Linear\): .*\nHint: convert one of"):
        region(x, *given[:4], *(p.detach().double() for p in given[4:]))
    with pytest.raises(sf.InputError, match=r"SF101 'block\.norm', .*got 9$"):
        region(torch.randn(4, 9), *given)
    assert torch.equal(region(x, *given), conversion.model(x))
    without_a_place = sf.StateError("of no operation", code="SF505")
    monkeypatch.setattr(region, "_fuser", Mock(wraps=region._fuser, side_effect=without_a_place))
    with pytest.raises(sf.StateError, match=r"SF505: of no operation$"):
        region(x, *given)


def test_an_operation_that_runs_is_not_said_to_be_superseded():
    model = sf.Sequential(sf.ops.LayerNorm(64), sf.ops.Linear(64, 64), memory="lean")
    plan = model.plan(torch.zeros(32, 64))
    used = {(step.name, step.start) for step in (*plan.forward, *plan.backward)}
    assert ("RecomputeNorm", 0) in used
    assert not {(refusal.fusion, refusal.at) for refusal in plan.refused} & used


def test_sizes_of_one_converted_model_are_not_those_of_another():
    for width in (8, 12):
        model = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width))
        conversion = sf.convert(model)
        model(torch.randn(width // 2, width))
    ((region,),) = (graph.regions for graph in conversion.graphs)
    assert all(type(size) is int for size in region.order.x.meta["example_value"].shape)


SCALES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a number first": lambda m, y: 0.3 * y,
    "an attribute first": lambda m, y: m.scale * y,
    "an attribute last": lambda m, y: y * m.scale,
    "an integer first": lambda m, y: 2 * y,
    "divided": lambda m, y: y / m.scale,
}


@pytest.mark.parametrize("name", SCALES)
def test_a_tensor_times_a_number_is_part_of_a_chain(name: str):
    class Scaled(Net):
        scale = 0.3

        def forward(self, x: Tensor) -> Tensor:
            return x + SCALES[name](self, super().forward(x))

    (graph,) = assert_same_recorded(Scaled(), X).graphs
    (region,) = graph.regions
    assert [type(op).__name__ for op in region.model][-2:] == ["Scale", "Add"]
    assert not graph.beside


def test_a_number_that_is_divided_by_a_tensor_is_no_scale():
    class Divided(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.3 / (super().forward(x).abs() + 1)

    assert_same_recorded(Divided(), X)
