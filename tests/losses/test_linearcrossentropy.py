"""The last GEMM and the loss in one, compared with `F.cross_entropy` of `F.linear`."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import itertools
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import seqfuse as sf
from seqfuse.losses import LinearCrossEntropy, _chunks, linear_cross_entropy
from seqfuse.testing import Untouched, assert_bitwise_equal, assert_fused_close, laid_out, seeded_randn

from .references import in_torch, scaled_gradients

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: sizes, options, and needed gradients."""

    lead: tuple[int, ...] = (37,)
    features: int = 19
    classes: int = 53
    dtype: torch.dtype = torch.float32
    bias: bool = True
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    reduction: Any = "mean"
    ignored: str = "some"  # none, some, all
    ignore_index: int = -100
    chunk: int | None = 5
    layout: str = "contiguous"

    @property
    def options(self) -> dict[str, Any]:
        names = ("label_smoothing", "z_loss", "softcap", "reduction", "ignore_index")
        return {name: getattr(self, name) for name in names}

    def drawn(self, seed: int = 1) -> dict[str, Tensor]:
        x = seeded_randn((*self.lead, self.features), seed, dtype=self.dtype)
        tensors = {"x": laid_out(x, self.layout)}
        tensors["weight"] = 0.4 * seeded_randn((self.classes, self.features), 2, dtype=self.dtype)
        if self.bias:
            tensors["bias"] = seeded_randn((self.classes,), 3, dtype=self.dtype)
        return tensors

    def targets(self) -> Tensor:
        draw = torch.Generator().manual_seed(4)
        targets = torch.randint(self.classes, self.lead, generator=draw)
        ignored = {"none": 0.0, "some": 0.3, "all": 1.0}[self.ignored]
        return targets.masked_fill(torch.rand(self.lead, generator=draw) < ignored, self.ignore_index)


def results(function: Callable[..., Tensor], case: Case, tensors: dict[str, Tensor], **more: Any) -> dict[str, Tensor]:
    """The loss, and the gradient of every tensor for an incoming gradient that is not a power of two."""
    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    x, weight, bias = leaves["x"], leaves["weight"], leaves.get("bias")
    loss = function(x, weight, case.targets(), bias, **case.options, **more)
    incoming = 1.7 * (seeded_randn(case.lead, 5) if case.reduction == "none" else torch.ones(()))
    grads = torch.autograd.grad(loss, list(leaves.values()), incoming.to(loss.dtype))
    return {"loss": loss.detach(), **{f"d_{name}": d for name, d in zip(leaves, grads, strict=True)}}


def losses(function: Callable[..., Tensor], case: Case, in_double: bool, **more: Any) -> list[Tensor]:
    """The losses of other inputs."""
    found: list[Tensor] = []
    for seed in range(100, 115):
        tensors = {name: t.double() if in_double else t for name, t in case.drawn(seed).items()}
        found.append(
            function(tensors["x"], tensors["weight"], case.targets(), tensors.get("bias"), **case.options, **more)
        )
    return found


def check(case: Case) -> None:
    tensors = case.drawn()
    targets = case.targets()
    with Untouched({**tensors, "targets": targets}):
        ours = results(linear_cross_entropy, case, tensors, chunk=case.chunk)
    theirs = results(in_torch, case, tensors)
    # In its own layout: the reference is a copy in float64.
    exact = results(in_torch, case, {name: t.clone().double() for name, t in tensors.items()})
    if case.reduction != "none":
        # The error of one number is a matter of luck; that of several is not.
        for found, function, more in (
            (ours, linear_cross_entropy, {"chunk": case.chunk}),
            (theirs, in_torch, {}),
            (exact, in_torch, {}),
        ):
            found["loss"] = torch.stack([found["loss"], *losses(function, case, found is exact, **more)])
    if case.targets().numel() == 1:
        # All of them share one softmax, one draw to the rule's part on bias, which is asked from 16 rows on; all of its
        # other parts hold.
        for found, name in itertools.product((ours, theirs, exact), tensors):
            if found[f"d_{name}"].ndim > 1:
                found |= {f"d_{name} {i}": part for i, part in enumerate(found.pop(f"d_{name}").split(15))}
    assert ours["loss"].dtype is (torch.float64 if case.dtype is torch.float64 else torch.float32)
    assert_fused_close(ours, theirs, exact)


OPTIONS: dict[str, list[Any]] = {
    "label_smoothing": [0.1, 1.0],
    "z_loss": [1e-2],
    "softcap": [3.0],
    "reduction": ["sum", "none"],
    "ignored": ["none", "all"],
    "ignore_index": [0, 1000],
    "bias": [False],
    "chunk": [None, 64, 1],
    "lead": [(1,), (2, 3, 7), (0,), ()],
    "classes": [1, 128],
    "features": [1, 128],
    "layout": ["strided", "transposed", "misaligned", "expanded"],
}
SINGLE = [{name: value} for name, values in OPTIONS.items() for value in values]
# Every row the same: the bound's part on bias assumes independent rows.
SAME = {"label_smoothing": 1.0, "layout": "expanded"}
PAIRS = [a | b for a, b in itertools.combinations(SINGLE, 2) if not a.keys() & b.keys() and a | b != SAME]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("change", [{}, *SINGLE], ids=str)
def test_it_is_the_cross_entropy_of_the_product(change: dict[str, Any], dtype: torch.dtype) -> None:
    check(dataclasses.replace(Case(dtype=dtype), **change))


@pytest.mark.parametrize("part", range(len(DTYPES)))
def test_options_go_together_in_pairs(part: int) -> None:
    for change in PAIRS[part :: 4 * len(DTYPES)]:  # one in four in some dtype, each dtype a part of them
        check(dataclasses.replace(Case(dtype=DTYPES[part]), **change))


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_options_go_together_in_pairs_everywhere(dtype: torch.dtype) -> None:
    for change in PAIRS:
        check(dataclasses.replace(Case(dtype=dtype), **change))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("full", [False, True])
def test_gradients_are_those_of_differences(reduction: str, full: bool) -> None:
    case = Case((6,), 4, 7, torch.float64, reduction=reduction)
    if full:
        case = dataclasses.replace(case, label_smoothing=0.2, z_loss=0.05, softcap=2.0)
    leaves = [t.requires_grad_() for t in case.drawn().values()]

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, case.targets(), bias, chunk=4, **case.options)

    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_logits_do_not_overflow(dtype: torch.dtype, reduction: str) -> None:
    case = Case(reduction=reduction, dtype=dtype)
    tensors = case.drawn()
    tensors["x"] = tensors["x"] * 400
    wide = {name: t.clone().double() for name, t in tensors.items()}
    ours, theirs = results(linear_cross_entropy, case, tensors, chunk=5), results(in_torch, case, tensors)
    assert all(t.isfinite().all() for t in ours.values())
    assert_fused_close(ours, theirs, results(in_torch, case, wide))


@pytest.mark.parametrize("options", [{}, {"z_loss": 1e-10}, {"softcap": 1e4}], ids=str)
def test_small_gradients_are_not_lost_in_float16_before_the_loss_scale_is_known(options: dict[str, Any]) -> None:
    found, exact = (scaled_gradients(dtype, **options) for dtype in (torch.float16, torch.float32))
    for name, t in exact.items():
        torch.testing.assert_close(found[name].float(), t, rtol=2**-9, atol=2**-23)


def test_gradients_of_one_chunk_do_not_depend_on_those_of_another() -> None:
    case = Case((40,), 8, 30, torch.float16, ignored="none")
    tensors = case.drawn()
    tensors["x"][:8] *= 40  # a chunk with losses of hundreds, the others with small ones
    ours, theirs = results(linear_cross_entropy, case, tensors, chunk=8), results(in_torch, case, tensors)
    wide = results(in_torch, case, {name: t.double() for name, t in tensors.items()})
    assert_fused_close(ours, theirs, wide)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("size", [1e-3, 1.0, 400.0, 6e4])
def test_weights_of_any_size_let_no_gradient_overflow(size: float, smoothing: float) -> None:
    x, targets = torch.zeros(24, 8, dtype=torch.float16, requires_grad=True), torch.arange(24)
    weight = (size * torch.ones(96, 8)).where(torch.arange(96).unsqueeze(1) % 2 == 0, -size).half()
    loss = linear_cross_entropy(x, weight, targets, label_smoothing=smoothing, z_loss=1e-2, reduction="sum")
    (dx,) = torch.autograd.grad(loss, x, torch.tensor(1e-3))
    wide = x.detach().double().requires_grad_()
    loss = in_torch(wide, weight.double(), targets, label_smoothing=smoothing, z_loss=1e-2, reduction="sum")
    (exact,) = torch.autograd.grad(loss, wide, torch.tensor(1e-3, dtype=torch.float64))
    torch.testing.assert_close(dx.double(), exact, rtol=2e-3, atol=max(1e-5 * size, 2**-24))


def test_a_large_z_loss_lets_no_gradient_overflow() -> None:
    x, targets = torch.full((3, 4), 5.0, dtype=torch.float16, requires_grad=True), torch.tensor([0, 1, 0])
    weight = torch.zeros(6, 4, dtype=torch.float16)
    weight[0] = 5.0  # of a logit of 100
    (dx,) = torch.autograd.grad(linear_cross_entropy(x, weight, targets, z_loss=10.0), x, torch.tensor(1e-3))
    wide = x.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(in_torch(wide, weight.double(), targets, z_loss=10.0), wide)
    torch.testing.assert_close(dx.double(), 1e-3 * exact, rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_of_the_weight_is_summed_in_float32(dtype: torch.dtype) -> None:
    case = Case(dtype=dtype)
    kept: list[Tensor] = []
    for chunk in (1, 37):
        leaves = {name: t.requires_grad_() for name, t in case.drawn().items()}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t), lambda _: None):
            linear_cross_entropy(*_in_order(case, leaves), chunk=chunk, **case.options)
    shape = (case.classes, case.features)
    one, whole = (t for t in kept if tuple(t.shape) == shape)
    assert one.dtype is whole.dtype is torch.float32
    torch.testing.assert_close(one, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("row", ["counted", "ignored"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_bad_number_spoils_what_it_spoils_in_torch(
    dtype: torch.dtype, row: str, value: float, reduction: str
) -> None:
    case = Case((40,), 6, 11, dtype, reduction=reduction)
    counted = case.targets() != case.ignore_index
    tensors = case.drawn()
    tensors["x"][counted.nonzero()[0] if row == "counted" else (~counted).nonzero()[0], 2] = value
    ours, theirs = results(linear_cross_entropy, case, tensors, chunk=4), results(in_torch, case, tensors)
    for name, t in theirs.items():
        assert torch.equal(ours[name].isnan(), t.isnan()), name


def test_a_class_may_be_ruled_out_by_its_bias() -> None:
    case = Case(ignored="none")
    tensors = case.drawn()
    never = [c for c in range(case.classes) if c not in case.targets()]
    tensors["bias"][never] = -torch.inf
    ours, theirs = results(linear_cross_entropy, case, tensors), results(in_torch, case, tensors)
    for name, t in theirs.items():
        torch.testing.assert_close(ours[name], t)


class Sizes(TorchDispatchMode):
    """Counts GEMMs, and notes the size of the largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.products = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, Tensor):
                self.largest = max(self.largest, t.numel())
        return out


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_tensor_has_all_logits(dtype: torch.dtype, reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((96,), 8, 500, dtype, reduction=reduction, softcap=5.0, label_smoothing=0.1, z_loss=1e-3)
    with Sizes() as plain:
        results(in_torch, case, case.drawn())
    assert plain.largest == 96 * 500
    with Sizes() as ours:
        results(linear_cross_entropy, case, case.drawn(), chunk=12)
    assert ours.largest == 12 * 500
    # By default as many rows as fit, one at least.
    for limit, rows in ((20 * 500 * 4, 20), (3, 1)):
        monkeypatch.setattr(_chunks, "_CHUNK_BYTES", limit)
        with Sizes() as ours:
            results(linear_cross_entropy, case, case.drawn())
        assert ours.largest == max(rows * 500, 500 * 8)
    assert _chunks._CHUNK_BYTES == 3


def test_without_gradients_one_product_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    module, made = importlib.import_module("seqfuse.losses.linearcrossentropy"), list[_chunks.Made]()
    walk = module.walk
    monkeypatch.setattr(module, "walk", lambda *given: made.append(walk(*given)) or made[-1])
    x, weight, bias = torch.randn(6, 8), torch.randn(50, 8, requires_grad=True), torch.randn(50)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        linear_cross_entropy(x, weight, torch.arange(6), bias)
    assert counter.get_total_flops() == 2 * 6 * 8 * 50
    assert [(m.dx, m.dweight, m.dbias) for m in made] == [(None, None, None)]


def test_the_gradient_of_a_bias_is_summed_in_float32_where_that_of_logits_is_half(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def half(how: Any, logits: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        return logits.new_zeros(logits.shape[0]), logits.new_zeros(2, logits.shape[0]), torch.full_like(logits, 0.01)

    monkeypatch.setattr(_chunks, "_in_torch", half)
    x, weight, bias = (torch.randn(size, dtype=torch.bfloat16) for size in ((1000, 8), (50, 8), (50,)))
    targets, how = torch.zeros(1000, dtype=torch.int64), LinearCrossEntropy(8, 50)._how()
    with sf.fusing(False):
        made = _chunks.walk(how, torch.bfloat16, x, weight, targets, bias, (False, False, True))
    expected = 1000 * torch.tensor(0.01, dtype=torch.bfloat16).double().expand(50)
    torch.testing.assert_close(made.dbias.double(), expected, rtol=1e-6, atol=0)


class Alive(TorchDispatchMode):
    """Counts storages of at least this many elements that are alive together."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.most = elements, 0
        self.seen: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.numel() >= self.elements:
            self.seen[id(out)] = weakref.ref(out)
        memories = {t.data_ptr() for t in (ref() for ref in self.seen.values()) if t is not None}
        self.most = max(self.most, len(memories))
        return out


def test_what_a_loss_is_multiplied_by_is_not_rounded_to_the_dtype_of_autocast() -> None:
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(50, 8)
    with torch.autocast("cpu", torch.float16):
        loss = linear_cross_entropy(x, weight, torch.arange(6))
    (whole,) = torch.autograd.grad(loss, x, retain_graph=True)
    (1e-6 * loss).backward()
    torch.testing.assert_close(1e6 * x.grad, whole, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("size", [1, 2])
def test_the_kernel_is_for_the_classes_of_one_process(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not see the largest logits and the sums of other processes."""
    in_torch, used = _chunks._in_torch, list[Any]()
    env = SimpleNamespace(kernels="triton", triton=True)
    monkeypatch.setattr(_chunks, "Env", SimpleNamespace(of=lambda device: env))
    monkeypatch.setattr(_chunks, "_in_kernel", lambda *given: used.append(given) or in_torch(*given))
    group: Any = SimpleNamespace(size=size, rank=0, all_reduce=lambda t, *of: t)
    how = LinearCrossEntropy(3, 4)._how()._replace(group=group)
    x, weight, targets = torch.randn(5, 3), torch.randn(4, 3), torch.arange(5) % 4
    _chunks.walk(how, torch.float32, x, weight, targets, None, (False, False, False))
    assert bool(used) == (size == 1)


@pytest.mark.parametrize(
    ("softcap", "dtype", "most"),
    [
        (None, torch.float32, 1),
        (2.0, torch.float32, 2),
        (None, torch.bfloat16, 2),
    ],
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_logits_of_one_chunk_are_gone_before_the_next(
    reduction: str, softcap: float | None, dtype: torch.dtype, most: int
) -> None:
    case = Case((40,), 6, 300, dtype, softcap=softcap, reduction=reduction, label_smoothing=0.1, z_loss=1e-3)
    for fusing in (False, True):
        with sf.fusing(fusing), Alive(8 * 300) as alive:
            results(linear_cross_entropy, case, case.drawn(), chunk=8)
        # A kernel writes its gradient over the logits, whatever is done to them.
        assert alive.most <= most if fusing else alive.most == most


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_gradient_nobody_wants_is_not_computed(reduction: str) -> None:
    case = Case(reduction=reduction)
    tensors = case.drawn()
    whole = results(linear_cross_entropy, case, tensors)
    again = 1 if reduction == "none" else 0
    for wanted in itertools.product((False, True), repeat=3):
        leaves = {k: t.clone().requires_grad_(w) for (k, t), w in zip(tensors.items(), wanted, strict=True)}
        with Sizes() as sizes:
            loss = linear_cross_entropy(*_in_order(case, leaves), chunk=64, **case.options)
            if any(wanted):
                incoming = 1.7 * (seeded_randn(case.lead, 5) if reduction == "none" else torch.ones(()))
                loss.backward(incoming)
        assert sizes.products == 1 + (again if any(wanted) else 0) + wanted[0] + wanted[1]
        assert loss.requires_grad == any(wanted)
        for (name, leaf), want in zip(leaves.items(), wanted, strict=True):
            assert (leaf.grad is not None) == want
            if want:
                assert leaf.grad is not None
                torch.testing.assert_close(leaf.grad, whole[f"d_{name}"])
    with torch.no_grad(), Sizes() as sizes:
        loss = linear_cross_entropy(*_in_order(case, leaves), chunk=64, **case.options)
    assert not loss.requires_grad
    assert sizes.products == 1


def _in_order(case: Case, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    return tensors["x"], tensors["weight"], case.targets(), tensors.get("bias")


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_backward_may_run_twice_and_not_through_itself(reduction: str) -> None:
    case = Case(reduction=reduction)
    leaves = {name: t.requires_grad_() for name, t in case.drawn().items()}
    loss = linear_cross_entropy(*_in_order(case, leaves), **case.options).sum()
    first = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True)
    kept = [d.clone() for d in first]
    (scaled,) = torch.autograd.grad(loss, [leaves["x"]], torch.tensor(3.0), retain_graph=True)
    torch.testing.assert_close(scaled, 3 * kept[0])
    assert_bitwise_equal(torch.autograd.grad(loss, list(leaves.values())), kept)
    assert_bitwise_equal(first, kept)
    loss = linear_cross_entropy(*_in_order(case, leaves), **case.options).sum()
    (dx,) = torch.autograd.grad(loss, [leaves["x"]], create_graph=True)
    with pytest.raises(sf.StateError, match="SF501"):
        dx.sum().backward()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_batch_of_incoming_gradients_gives_what_each_of_them_gives(reduction: str) -> None:
    case = Case(reduction=reduction)
    leaves = {name: t.requires_grad_() for name, t in case.drawn().items()}
    loss, wanted = linear_cross_entropy(*_in_order(case, leaves), **case.options), list(leaves.values())
    batch = seeded_randn((3, *loss.shape), 5, dtype=loss.dtype)
    found = torch.autograd.grad(loss, wanted, batch, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(loss, wanted, dloss, retain_graph=True) for dloss in batch]
    torch.testing.assert_close(found, tuple(torch.stack(grads) for grads in zip(*each, strict=True)))


def autocast_results(run: Callable[..., Tensor], module: nn.Module, x: Tensor, targets: Tensor) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = run(x, module.weight, targets, module.bias)
    grads = torch.autograd.grad(loss.sum(), [x, module.weight, module.bias])
    return {"loss": loss.detach(), **dict(zip(("dx", "dweight", "dbias"), grads, strict=True))}


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_products_are_in_the_dtype_of_autocast(reduction: str) -> None:
    module: Any = LinearCrossEntropy(24, 40, True, chunk=7, reduction=reduction)
    x, targets = seeded_randn((33, 24), 0), torch.arange(33)
    ours = autocast_results(lambda *a: linear_cross_entropy(*a, chunk=7, reduction=reduction), module, x, targets)
    theirs = autocast_results(lambda *a: in_torch(*a, reduction=reduction), module, x, targets)
    assert {t.dtype for t in ours.values()} == {torch.float32}
    exact = copy.deepcopy(module).double()
    x64 = x.double().requires_grad_()
    loss = in_torch(x64, exact.weight, targets, exact.bias, reduction=reduction)
    grads = torch.autograd.grad(loss.sum(), [x64, exact.weight, exact.bias])
    wide = {"loss": loss.detach(), **dict(zip(("dx", "dweight", "dbias"), grads, strict=True))}
    assert_fused_close(ours, theirs, wide)
    # Nothing that a later use of the weight would find in autocast's cache.
    with torch.autocast("cpu", torch.bfloat16):
        total = module(x, targets).sum() + F.linear(x, module.weight).float().sum()
        twice = torch.autograd.grad(total, module.weight)[0]
        alone = torch.autograd.grad(module(x, targets).sum(), module.weight)[0]
    assert not torch.allclose(twice, alone)


def test_a_backward_under_autocast_is_that_of_its_forward() -> None:
    case = Case(reduction="none")
    tensors = case.drawn()
    leaves = {name: t.requires_grad_() for name, t in tensors.items()}
    found: list[Any] = []
    for on in (False, True):
        loss = linear_cross_entropy(*_in_order(case, leaves), **case.options)
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            found.append(torch.autograd.grad(loss, list(leaves.values()), torch.ones_like(loss)))
    assert_bitwise_equal(*found)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_it_may_be_checkpointed(reduction: str, reentrant: bool) -> None:
    module = LinearCrossEntropy(8, 11, reduction=reduction)
    x, targets = seeded_randn((5, 8), 0).requires_grad_(), torch.arange(5)
    plain = torch.autograd.grad(module(x, targets).sum(), [x, module.weight])
    module(x, targets)
    again = checkpoint(module, x, targets, use_reentrant=reentrant).sum()
    again.backward()
    assert_bitwise_equal([x.grad, module.weight.grad], plain)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_everything_kept_passes_the_hooks_of_saved_tensors(reduction: str) -> None:
    module = LinearCrossEntropy(8, 11, reduction=reduction)
    x, targets = seeded_randn((5, 8), 0).requires_grad_(), torch.arange(5)
    plain = torch.autograd.grad(module(x, targets).sum(), [x, module.weight])
    seen: list[Tensor] = []

    def pack(t: Tensor) -> int:
        seen.append(t.clone())
        return len(seen) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, seen.__getitem__):
        loss = module(x, targets)
    # dx, dweight and the count, or the tensors that they are computed from.
    assert len(seen) == (3 if reduction == "mean" else 4)
    assert_bitwise_equal(torch.autograd.grad(loss.sum(), [x, module.weight]), plain)


def test_a_weight_changed_before_the_backward_is_an_error_where_it_is_read() -> None:
    for reduction in ("mean", "none"):
        module = LinearCrossEntropy(8, 11, reduction=reduction)
        x, targets = seeded_randn((5, 8), 0).requires_grad_(), torch.arange(5)
        before = torch.autograd.grad(module(x, targets).sum(), [x])
        loss = module(x, targets).sum()
        with torch.no_grad():
            module.weight.add_(1)
        if reduction == "none":
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            assert_bitwise_equal(torch.autograd.grad(loss, [x]), before)
