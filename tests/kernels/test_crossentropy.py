"""Cross-entropy of rows of logits in place, against torch; and the loss built on it."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import seqfuse as sf
from seqfuse.kernels import crossentropy
from seqfuse.losses import LinearCrossEntropy
from seqfuse.testing import (
    assert_bitwise_equal,
    assert_fused_close,
    exact,
    guarded,
    in_regime,
    seeded_randn,
)
from seqfuse.testing.judge import judge
from seqfuse.testing.tensors import redrawn
from tests.losses.references import scaled_gradients

from .conftest import DEVICE

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
REGIMES = ["normal", "small", "offset", "heavy"]


@dataclasses.dataclass(frozen=True)
class Case:
    """The options of one call."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    ignore_index: int = -100
    scaled: bool = False
    again: bool = False  # the gradient in a separate call

    @property
    def options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("label_smoothing", "z_loss", "softcap", "ignore_index")}


CASES = {
    "plain": Case(),
    "smooth": Case(label_smoothing=0.1),
    "z_loss": Case(z_loss=0.01),
    "softcap": Case(softcap=2.0),
    "scaled": Case(scaled=True),
    "padding": Case(ignore_index=0),
    "again": Case(scaled=True, again=True),
    "all": Case(0.2, 0.02, 3.0, 1, True),
    "all_again": Case(0.2, 0.02, 3.0, 1, True, True),
}


def drawn(case: Case, rows: int, classes: int, dtype: torch.dtype, regime: str = "normal") -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    targets = torch.randint(classes, (rows,), generator=draw)
    targets[1::3] = case.ignore_index
    tensors = {"logits": in_regime(regime, (rows, classes), 1, dtype=dtype), "targets": targets}
    tensors |= {"scale": seeded_randn((rows,), 2)} if case.scaled else {}
    return {name: t.to(DEVICE) for name, t in tensors.items()}


def in_torch(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Losses and the gradient of the logits, by autograd."""
    logits, targets = tensors["logits"].clone().requires_grad_(), tensors["targets"]
    z = logits if logits.dtype is torch.float64 else logits.float()
    z = z if case.softcap is None else case.softcap * torch.tanh(z / case.softcap)
    loss = F.cross_entropy(
        z, targets, reduction="none", ignore_index=case.ignore_index, label_smoothing=case.label_smoothing
    )
    squares = case.z_loss * z.logsumexp(1).square()
    loss = loss + squares.masked_fill(targets == case.ignore_index, 0)
    scale = tensors["scale"].to(loss.dtype) if case.scaled else torch.ones_like(loss)
    (gradient,) = torch.autograd.grad(loss, logits, scale)
    return {"loss": loss.detach(), "gradient": gradient}


def run(case: Case, tensors: dict[str, Tensor], k: ModuleType = crossentropy) -> dict[str, Tensor]:
    logits, targets = torch.empty_like(tensors["logits"]).copy_(tensors["logits"]), tensors["targets"]
    scale = tensors["scale"].to(torch.promote_types(logits.dtype, torch.float32)) if case.scaled else None
    if not case.again:
        loss, _ = k.cross_entropy_(logits, targets, scale=scale, **case.options)
        return {"loss": loss, "gradient": logits}
    loss, softmax = k.cross_entropy_(logits, targets, gradient=False, **case.options)
    assert torch.equal(bits(logits), bits(tensors["logits"]))
    nothing = k.cross_entropy_(logits, targets, scale=scale, softmax=softmax, **case.options)
    assert nothing == (None, None)
    return {"loss": loss, "gradient": logits}


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def check(case: Case, tensors: dict[str, Tensor], k: ModuleType = crossentropy) -> None:
    def measure(seed: int) -> tuple[dict[str, Tensor], ...]:
        drawn = {name: redrawn(t, seed) for name, t in tensors.items()}
        wide = in_torch(case, {**drawn, "logits": drawn["logits"].double()})
        return run(case, drawn, k), in_torch(case, drawn), wide

    judge(measure, 0)


SHAPES = [(1, 1), (7, 8), (33, 127), (5, 128), (6, 130), (9, 1025)]
SELECTION = [
    pytest.param(name, *SHAPES[(i + j) % 6], dtype, REGIMES[(i + 2 * j) % 4], id=f"{name}-{str(dtype)[6:]}")
    for i, name in enumerate(CASES)
    for j, dtype in enumerate(DTYPES)
]


@pytest.mark.parametrize(("name", "rows", "classes", "dtype", "regime"), SELECTION)
def test_rows_are_those_of_torch(name: str, rows: int, classes: int, dtype: torch.dtype, regime: str) -> None:
    check(CASES[name], drawn(CASES[name], rows, classes, dtype, regime))


@pytest.mark.triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["plain", "all", "all_again"])
def test_rows_too_wide_for_a_block_are_read_in_turn(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crossentropy, "_WIDEST", 128)
    for classes in (70, 96, 128, 200):
        check(CASES[name], drawn(CASES[name], 7, classes, dtype, "offset" if classes == 96 else "normal"))


def test_the_widest_vocabularies() -> None:
    for name in ("plain", "all"):
        check(CASES[name], drawn(CASES[name], 2, 262144, torch.float32))
    with pytest.raises(ValueError, match="0 < V <= 1073741824"):
        crossentropy.cross_entropy_(torch.empty(1, 1).expand(1, 2**30 + 1), torch.zeros(1, dtype=torch.int64))


def test_a_target_that_is_no_class_reads_nothing() -> None:
    guard = guarded(drawn(CASES["plain"], 2, 20, torch.float32)["logits"])
    loss, _ = crossentropy.cross_entropy_(guard.tensor, torch.tensor([-1, 20], device=DEVICE))
    guard.check()
    assert loss.isfinite().all()


def test_rows_may_have_any_stride() -> None:
    case = CASES["all"]
    tensors = drawn(case, 9, 24, torch.float32)
    wide = F.pad(tensors["logits"], (1, 4), value=torch.nan)
    loss, _ = crossentropy.cross_entropy_(wide[:, 1:-4], tensors["targets"], scale=tensors["scale"], **case.options)
    assert_bitwise_equal({"loss": loss, "gradient": wide[:, 1:-4].clone()}, run(case, tensors))
    assert wide[:, 0].isnan().all()
    assert wide[:, -4:].isnan().all()


def test_rows_beyond_two_billion_elements_are_where_they_are() -> None:
    # In 32 bits the second row would be before the first.
    memory = torch.empty(2**31 + 64, dtype=torch.bfloat16, device=DEVICE)
    logits = torch.as_strided(memory, (2, 16), (2**31, 1))
    tensors = drawn(CASES["plain"], 2, 16, torch.bfloat16)
    logits.copy_(tensors["logits"])
    loss, _ = crossentropy.cross_entropy_(logits, tensors["targets"])
    assert_bitwise_equal({"loss": loss, "gradient": logits.clone()}, run(CASES["plain"], tensors))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["plain", "smooth", "again"])
def test_one_bad_number_spoils_what_it_spoils_in_torch(
    name: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crossentropy, "_WIDEST", 16)
    tensors = drawn(CASES[name], 6, 8, torch.float32)
    tensors["targets"][2] = 5
    # A block of them, a row that counts and one that does not.
    tensors["logits"][2, :4] = value
    tensors["logits"][4, 3] = value
    ours, theirs = run(CASES[name], tensors), in_torch(CASES[name], tensors)
    for key, t in theirs.items():
        assert torch.equal(ours[key].isnan(), t.isnan()), key
        assert torch.equal(ours[key].isfinite(), t.isfinite()), key


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_equal_logits_have_exact_gradients(dtype: torch.dtype) -> None:
    """Each of 2^n equal logits has probability 2^-n, which no order of summation rounds."""
    logits = exact("integers", (9, 1), 0, dtype=dtype).expand(9, 64).contiguous().to(DEVICE)
    targets = torch.arange(0, 63, 7, device=DEVICE)
    wanted = torch.full_like(logits, 1 / 64)
    wanted[torch.arange(9, device=DEVICE), targets] -= 1
    crossentropy.cross_entropy_(logits, targets)
    assert_bitwise_equal(logits, wanted)


@pytest.mark.parametrize("regime", ["zeros", "constant_rows"])
def test_rows_of_one_number_are_those_of_torch(regime: str) -> None:
    for name in ("plain", "all"):
        for dtype in DTYPES:
            check(CASES[name], drawn(CASES[name], 7, 64, dtype, regime))


@pytest.mark.triton
def test_a_long_row_has_a_program_that_fills_a_processor() -> None:
    assert [crossentropy.num_warps(classes, 2) for classes in (100, 4096, 32768, 32769, 128256)] == [4, 16, 16, 32, 32]
    assert [crossentropy.block(classes, 2) for classes in (32768, 128256)] == [4096, 8192]
    assert [crossentropy.num_warps(classes, 4) for classes in (16388, 16385)] == [32, 16], "rows that are not aligned"
    assert crossentropy.num_warps(262144, 2, amd=True) == 16, "1,024 threads"


def test_a_kernel_that_fails_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any, **more: Any) -> None:
        raise RuntimeError("ptxas is not there")

    monkeypatch.setattr(crossentropy, "cross_entropy_", failing)
    module = LinearCrossEntropy(3, 400)
    x, targets = torch.randn(4, 3), torch.arange(4)
    with pytest.raises(
        sf.KernelError, match=r"SF401 LinearCrossEntropy: its kernel failed: ptxas is not there\nHint: with"
    ):
        module(x, targets)
    with sf.fusing(False):
        torch.testing.assert_close(module(x, targets), F.cross_entropy(F.linear(x, module.weight), targets))


REFUSED = {
    "logits": (((3,), (3,)), {}, "logits must be"),
    "targets": (((3, 4), (4,)), {}, r"targets must be contiguous, of shape \(3,\)"),
    "scale": (((3, 4), (3,)), {"scale": torch.ones(2)}, r"scale must be contiguous, of shape \(3,\)"),
    "softmax": (((3, 4), (3,)), {"softmax": torch.ones(3)}, r"softmax must have shape \(2, 3\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    (shape, rows), options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        crossentropy.cross_entropy_(torch.ones(shape), torch.zeros(rows, dtype=torch.int64), **options)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_loss_is_the_same_with_and_without_the_kernel(
    reduction: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[int] = []
    kernel = crossentropy.cross_entropy_
    monkeypatch.setattr(
        crossentropy, "cross_entropy_", lambda *args, **more: (launches.append(len(args[0])), kernel(*args, **more))[1]
    )
    torch.manual_seed(0)
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 4.0, "reduction": reduction}
    module = LinearCrossEntropy(12, 160, True, chunk=8, **options).to(device, torch.float64)
    x, targets = seeded_randn((21, 12), 0, dtype=dtype).to(device), torch.arange(21, device=device)
    targets[3:6] = -100

    def results(module: torch.nn.Module, x: Tensor, fusing: bool) -> dict[str, Tensor]:
        x = x.detach().requires_grad_()
        with sf.fusing(fusing):
            loss = module(x, targets)
            grads = torch.autograd.grad(loss.sum(), [x, *module.parameters()])
        return {"loss": loss.detach(), **{f"d{i}": d for i, d in enumerate(grads)}}

    wide = results(module, x.double(), False)
    assert not launches
    module.to(dtype)
    ours = results(module, x, True)
    # In float16 the loss is computed first, and its gradient in a unit that follows from it.
    twice = [8, 8, 8, 8, 5, 5]
    assert launches == ([8, 8, 5] * 2 if reduction == "none" else twice if dtype is torch.float16 else [8, 8, 5])
    launches.clear()
    theirs = results(module, x, False)
    assert not launches
    assert_fused_close(ours, theirs, wide)


@pytest.mark.parametrize("options", [{}, {"z_loss": 1e-10}], ids=str)
def test_small_gradients_are_not_lost_in_float16(options: dict[str, Any], device: torch.device) -> None:
    found, exact = (scaled_gradients(dtype, device, **options) for dtype in (torch.float16, torch.float32))
    for name, t in exact.items():
        torch.testing.assert_close(found[name].float(), t, rtol=2**-9, atol=2**-23)
