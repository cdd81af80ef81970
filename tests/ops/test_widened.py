"""GEMMs on a CPU without instructions for bfloat16: in float32, rounded once."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import seqfuse as sf
from seqfuse import env, ops
from seqfuse.losses import linear_cross_entropy
from seqfuse.ops import _attention, _mm
from seqfuse.testing import LAYOUTS, assert_fused_close, check_op, laid_out, seeded_randn
from tests.processes import Script
from tests.watching import Calls, name_of

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _without_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "WIDENED", frozenset({BF16}))


GEMMS = "mm", "addmm", "addmm_", "linear", "matmul", "bmm", "baddbmm"


def gemms() -> Calls:
    """The dtypes of the factors of each GEMM."""
    return Calls(lambda func, args, out: args[-1].dtype if name_of(func) in GEMMS else None)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    return seeded_randn(shape, seed, dtype=dtype)


def within_half_an_ulp(y: Tensor, exact: Tensor, terms: Tensor) -> None:
    """Rounded once, from a sum in float32 of terms of this size."""
    ulp = torch.finfo(BF16).eps * exact.abs().clamp(min=torch.finfo(BF16).tiny)
    assert y.dtype is BF16
    assert bool(((y.double() - exact).abs() <= 0.51 * ulp + 2**-20 * terms).all())


PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "linear": lambda a, b, c: (_mm.linear(a, b.mT), a.double() @ b.double()),
    "linear with a bias": lambda a, b, c: (_mm.linear(a, b.mT, c[0]), a.double() @ b.double() + c[0].double()),
    "mm": lambda a, b, c: (_mm.mm(a, b), a.double() @ b.double()),
    "scaled": lambda a, b, c: (_mm.mm(a, b, -0.3), -0.3 * (a.double() @ b.double())),
    "addmm": lambda a, b, c: (_mm.addmm(c, a, b), c.double() + a.double() @ b.double()),
    "scaled addmm": lambda a, b, c: (_mm.addmm(c, a, b, 0.7), c.double() + 0.7 * (a.double() @ b.double())),
    "sum": lambda a, b, c: (
        _mm.sum_of_mm([(a, b), (2 * a, b), (a, 4 * b)], c), c.double() + 7 * (a.double() @ b.double())
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_each_product_is_rounded_once(name: str, layout: str) -> None:
    a, b, c = laid_out(drawn(40, 300), layout), laid_out(drawn(300, 24, seed=1), layout), drawn(40, 24, seed=2)
    with gemms() as called:
        y, exact = PRODUCTS[name](a, b, c)
    assert set(called.names) == {torch.float32, torch.float64}
    within_half_an_ulp(y, exact, 8 * (a.double().abs() @ b.double().abs()) + c.double().abs())


def into_a_slice(layout: str, dtype: torch.dtype, compare: Callable[[Tensor, Tensor, Tensor], None]) -> None:
    x, weight, bias = (drawn(*shape, seed=i, dtype=dtype) for i, shape in enumerate(((40, 96), (24, 96), (24,))))
    x, weight = laid_out(x, layout), laid_out(weight, layout)
    for shift in (None, bias):
        out = torch.full((40, 40), 7.0, dtype=dtype)
        _mm.linear_into(out[:, 8:32], x, weight, shift)
        exact = F.linear(x.double(), weight.double(), None if shift is None else shift.double())
        compare(out[:, 8:32], exact, F.linear(x.double().abs(), weight.double().abs()) + 4)
        assert bool((out[:, :8] == 7).all() and (out[:, 32:] == 7).all())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_product_into_a_slice(layout: str) -> None:
    into_a_slice(layout, BF16, within_half_an_ulp)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
def test_other_dtypes_are_torch_s(dtype: torch.dtype) -> None:
    a, b = torch.randn(9, 5, dtype=dtype), torch.randn(5, 7, dtype=dtype)
    assert torch.equal(_mm.mm(a, b), a @ b)
    assert torch.equal(_mm.linear(a, b.mT), F.linear(a, b.mT))


def test_few_rows_are_left_to_a_kernel_that_reads_the_weight_once() -> None:
    weight = drawn(24, 16)
    for rows, dtype in ((1, BF16), (7, BF16), (8, torch.float32)):
        with gemms() as called:
            _mm.linear(drawn(rows, 16), weight)
        assert called.names == [dtype]


def model(kind: str) -> sf.Sequential:
    linear = {
        "linear": lambda: [ops.Linear(16, 24)],
        "no bias": lambda: [ops.Linear(16, 24, bias=False)],
        "activation": lambda: [ops.Linear(16, 24), ops.ReLU()],
        "scale": lambda: [ops.Linear(16, 24, bias=False), ops.Scale(0.7)],
        "merged": lambda: [ops.MergedLinear(16, (8, 16))],
        "merged apart": lambda: [ops.MergedLinear.of(torch.nn.Linear(16, 8), torch.nn.Linear(16, 16))],
        "residual": lambda: [ops.Residual(ops.Linear(16, 16, bias=False), ops.Scale(0.5)), ops.Linear(16, 24)],
    }[kind]()
    torch.manual_seed(0)
    return sf.Sequential(ops.Linear(16, 16), ops.Tanh(), *linear, ops.GeLU(), ops.Linear(24, 8))


KINDS = ("linear", "no bias", "activation", "scale", "merged", "merged apart", "residual")


def gradients(run: Callable[[Tensor], Tensor], of: Any, x: Tensor) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    y = run(x)
    grads = torch.autograd.grad(y, [x, *of.parameters()], drawn(*y.shape, seed=5, dtype=torch.float64).to(y.dtype))
    return {"y": y.detach(), **{str(i): g for i, g in enumerate(grads)}}


@pytest.mark.parametrize("memory", ["fast", "lean"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_all_three_gemms_of_a_model_are_in_float32(
    kind: str, autocast: bool, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = model(kind) if autocast else model(kind).to(BF16)
    ours.memory = memory
    x = drawn(12, 16, dtype=torch.float32 if autocast else BF16)

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16, enabled=autocast):
            return ours(x)

    for _ in range(2):  # interpreted, then generated
        with gemms() as called:
            found = gradients(run, ours, x)
        assert set(called.names) == {torch.float32}
    monkeypatch.setattr(env, "WIDENED", frozenset())
    eager = gradients(run, ours, x)
    exact = gradients(lambda x: ours.double()(x), ours.double(), x.double())
    assert_fused_close(found, eager, exact)


@pytest.mark.parametrize("op", [ops.Linear, ops.MergedLinear], ids=lambda op: op.__name__)
def test_operations_keep_their_contract(op: Any) -> None:
    for dtype in (BF16, torch.float32):
        x = drawn(5, 16, dtype=dtype)
        check_op(op.example(x), x)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_loss_in_chunks(reduction: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias, targets = drawn(40, 16), drawn(50, 16, seed=1), drawn(50, seed=2), torch.arange(40)

    def run(dtype: torch.dtype) -> dict[str, Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in (x.detach().clone(), weight.clone(), bias.clone())]
        loss = linear_cross_entropy(*leaves[:2], targets, leaves[2], chunk=16, reduction=reduction)
        grads = torch.autograd.grad(loss.sum(), leaves)
        return {"loss": loss.detach(), **dict(zip(("dx", "dweight", "dbias"), grads, strict=True))}

    with gemms() as called:
        found = run(BF16)
    assert set(called.names) == {torch.float32}
    monkeypatch.setattr(env, "WIDENED", frozenset())
    assert_fused_close(found, run(BF16), run(torch.float64))


@pytest.mark.parametrize("mask", ["none", "bool", "float", "packed"])
def test_attention_computes_its_gradients_in_float32(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = torch.ones(20, 20, dtype=torch.bool).tril(3)
    given: dict[str, Tensor] = {
        "none": {},
        "bool": {"attn_mask": seen},
        "float": {"attn_mask": torch.zeros(20, 20).masked_fill(~seen, -1e4)},
        "packed": {"cu_seqlens": torch.tensor([0, 3, 20], dtype=torch.int32)},
    }[mask]
    monkeypatch.setattr(_attention.Scores, "_in_c", lambda *_: False)
    names = {"mask": "m"} if "attn_mask" in given else {"cu_seqlens": "c"} if given else {}
    op = ops.Attention(2, causal="attn_mask" not in given, **names)

    def run(dtype: torch.dtype) -> dict[str, Tensor]:
        x, dy = (drawn(20, n * 16, seed=n).to(dtype) for n in (6, 2))
        y, saved = op.fwd(x, **given)
        return {"y": y, "dx": op.bwd(dy, saved, needs=frozenset({"x"}))[0]}

    read: list[torch.dtype] = []
    flash = _attention._flash_cpu_backward
    monkeypatch.setattr(
        _attention,
        "_flash_cpu_backward",
        lambda *t, **rest: (read.extend(u.dtype for u in t[:6]), flash(*t, **rest))[1],
    )
    found = run(BF16)
    assert read
    assert set(read) == {torch.float32}
    monkeypatch.setattr(env, "WIDENED", frozenset())
    assert_fused_close(found, run(BF16), run(torch.float64))


def test_nan_and_inf_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = drawn(9, 16), drawn(16, 8, seed=1)
    a[1, 2], a[3, 4], b[5, 6] = torch.nan, torch.inf, -torch.inf
    y = _mm.mm(a, b)
    monkeypatch.setattr(env, "WIDENED", frozenset())
    for of in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(of(y), of(_mm.mm(a, b)))


@pytest.mark.parametrize("autocast", [False, True])
def test_a_compiler_traces_it_into_one_graph(autocast: bool) -> None:
    ours, x = model("linear") if autocast else model("linear").to(BF16), drawn(12, 16)

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16, enabled=autocast):
            return ours(x)

    x = x.float() if autocast else x
    y = torch.compile(run, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(y, run(x))
    y.float().sum().backward()


def test_the_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "GEMMs are computed in float32 and rounded once: this CPU has no bfloat16"
    x = drawn(12, 16)
    plan = model("linear").to(BF16).plan(x)
    assert said in " ".join(str(plan).split())
    assert plan.as_dict()["gemms"] == "float32"
    with torch.autocast("cpu", BF16):
        assert said in " ".join(str(model("linear").plan(x.float())).split())
    assert said not in " ".join(str(model("linear").plan(x.float())).split())
    assert said not in str(sf.Sequential(ops.GeLU()).plan(x))
    assert said not in " ".join(str(model("linear").plan(env=sf.Env.of("cuda:sm_90", dtype=BF16))).split())
    monkeypatch.setattr(env, "WIDENED", frozenset())
    assert said not in " ".join(str(model("linear").to(BF16).plan(x)).split())


def test_a_cpu_is_asked_of_onednn() -> None:
    code = "import torch, seqfuse.env; print(torch.ops.mkldnn._is_mkldnn_bf16_supported(), *seqfuse.env.WIDENED)"
    for asked, wide in (("auto", ["torch.bfloat16"]), ("torch", [])):
        environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "SEQFUSE_CPU_GEMMS": asked}
        done = Script("-c", code, environment=environment, bare=True).done()
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() in (["False", *wide], ["True"])


def test_no_processor_decides_where_torch_s_gemms_are_asked_for() -> None:
    """One of both: without bfloat16 instructions, or AMD with AVX-512."""
    about = "import torch, pathlib; torch.backends.cpu.get_cpu_capability = lambda: 'AVX512'"
    about += "; pathlib.Path.read_text = lambda self: 'AuthenticAMD'"
    about += "; import seqfuse.env as env; print(env.ONEDNN_FLOAT32, *env.WIDENED)"
    for asked in ("auto", "torch"):
        environment = {**os.environ, "SEQFUSE_CPU_GEMMS": asked}
        done = Script("-c", about, environment=environment, bare=True).done()
        assert done.returncode == 0, done.stderr
        large = torch.backends.mkl.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        assert done.stdout.split()[0] == str(asked == "auto" and large)
        assert asked == "auto" or done.stdout.split() == ["False"]
