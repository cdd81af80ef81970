"""Cross-entropy in C: C only, and the loss; `tests/kernels/test_crossentropy.py` runs with it, too."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from seqfuse import compiler
from seqfuse.errors import FallbackWarning
from seqfuse.hardware import C_WORTHWHILE
from seqfuse.kernels import crossentropy
from seqfuse.kernels.c import crossentropy as in_c
from seqfuse.losses import LinearCrossEntropy, _chunks
from tests.kernels.test_crossentropy import CASES, check, drawn, in_torch, run

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["plain", "all", "all_again"])
def test_rows_longer_than_a_block(name: str, dtype: torch.dtype) -> None:
    check(CASES[name], drawn(CASES[name], 5, 2 * in_c._BLOCK + 37, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_classes_have_no_gradient(dtype: torch.dtype) -> None:
    """-inf in some, in all but one, and in all classes: the last one is NaN, as in torch."""
    tensors = drawn(CASES["plain"], 4, 40, dtype)
    tensors["targets"] = torch.tensor([30, 39, 3, -100])
    tensors["logits"][0, :16], tensors["logits"][1, :39], tensors["logits"][2], tensors["logits"][3] = [-math.inf] * 4
    tensors["logits"][3, 5] = 0.5
    ours, theirs = run(CASES["plain"], tensors), in_torch(CASES["plain"], tensors)
    for name, t in theirs.items():
        assert torch.equal(ours[name].isnan(), t.isnan()), name
        torch.testing.assert_close(ours[name], t, equal_nan=True)
    assert (ours["gradient"][0, :16] == 0).all()


def test_float64_has_no_kernel() -> None:
    with pytest.raises(ValueError, match="float32, bfloat16 and float16, not float64"):
        crossentropy.cross_entropy_(torch.zeros(2, 3).double(), torch.tensor([0, 1]))


def test_kernels_depend_on_no_number(sources: list[str]) -> None:
    for rows, classes, numbers in ((3, 7, (0.1, 1e-4, 30.0, -100)), (5, 33, (0.2, 0.3, 2.0, 4))):
        names = ("label_smoothing", "z_loss", "softcap", "ignore_index")
        targets = torch.arange(rows) % classes
        crossentropy.cross_entropy_(torch.randn(rows, classes), targets, **dict(zip(names, numbers, strict=True)))
    assert len(sources) == 2
    assert len({*sources}) == 1


def spread(at: int) -> dict[str, torch.Tensor]:
    """Rows whose exponentials overflow unless the largest logit is subtracted."""
    tensors = drawn(CASES["plain"], 9, 2085, torch.float32)
    tensors["logits"] = torch.zeros(9, 2085)
    tensors["logits"][:, at], tensors["logits"][:, 7] = 200.0, 20.0
    return tensors


@pytest.mark.parametrize("name", CASES)
def test_odd_rows(name: str) -> None:
    check(CASES[name], drawn(CASES[name], 9, 2085, torch.float32))


@pytest.mark.parametrize("at", [3, -1])
def test_the_largest_logit_is_found_wherever_it_is(at: int) -> None:
    assert run(CASES["plain"], spread(at))["loss"].isfinite().all()


@pytest.mark.parametrize("classes", [C_WORTHWHILE // 4 - 1, C_WORTHWHILE // 4])
def test_small_logits_compile_nothing(classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    kernel = crossentropy.cross_entropy_
    monkeypatch.setattr(crossentropy, "cross_entropy_", lambda *a, **k: (calls.append(1), kernel(*a, **k))[1])
    module = LinearCrossEntropy(3, classes)
    module(torch.randn(4, 3), torch.arange(4))
    assert bool(calls) == (4 * classes >= C_WORTHWHILE)


def test_without_a_compiler_operations_of_torch_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_chunks, "Env", SimpleNamespace(of=lambda device: SimpleNamespace(kernels=None)))
    monkeypatch.setattr(crossentropy, "cross_entropy_", lambda *a, **k: pytest.fail("called"))
    module, x, targets = LinearCrossEntropy(3, 400), torch.randn(4, 3), torch.arange(4)
    torch.testing.assert_close(module(x, targets), F.cross_entropy(F.linear(x, module.weight), targets))


def test_a_compiler_that_fails_is_said_once(anew: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_failures", [])
    known = compiler.compiler()
    assert known is not None
    monkeypatch.setattr(compiler, "_found", lambda: (known._replace(flags=(*known.flags, "-no-such-flag")), ""))
    module, x, targets = LinearCrossEntropy(3, 400), torch.randn(4, 3), torch.arange(4)
    wanted = F.cross_entropy(F.linear(x, module.weight), targets)
    with pytest.warns(FallbackWarning, match="LinearCrossEntropy runs unfused, in ATen calls: cc .* failed: "):
        torch.testing.assert_close(module(x, targets), wanted)
    assert compiler.compiler() is None
    torch.testing.assert_close(module(x, targets), wanted)
