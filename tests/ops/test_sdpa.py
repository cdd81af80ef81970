"""Torch's attention kernels on GPUs: which one is selected, and with which arguments. Stand-ins with the layouts of the
real operators are registered with torch for the CPU, so every call goes through the dispatcher and its schema; they
compute torch's attention for the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from seqfuse import group, ops
from seqfuse.ops import _attention, _sdpa, attention
from seqfuse.plan import tally as tallies
from seqfuse.plan.tally import Tally, most_of
from seqfuse.testing import seeded_randn
from seqfuse.testing.cases import seeded
from tests.watching import Calls

H, KV, D = 4, 2, 16
_cpu: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_cpu_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _as_packed(t: Tensor) -> Tensor:
    """A copy whose [B, S, heads, D] is contiguous, as the real ones allocate results for a packed q."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def _nothing() -> Tensor:
    return torch.empty((), dtype=torch.int64)


class StandIns:
    """The operators on a CPU, and the names of those that were called."""

    def __init__(self, sums: int) -> None:
        self.called: list[str] = []
        self.sums = sums

    def cudnn(self, q, k, v, bias, log_sums, p=0.0, causal=False, debug=False, *, scale=None):
        self.called.append("cudnn")
        assert (bias, log_sums, p, debug) == (None, True, 0.0, False)
        y, lse = _cpu(q, k, v, 0.0, causal, scale=scale)
        sums = lse.contiguous().view(*lse.shape, *(1,) * (self.sums - 3))
        return _as_packed(y), sums, None, None, q.shape[2], k.shape[2], _nothing(), _nothing(), None

    def cudnn_backward(
        self, dy, q, k, v, y, lse, seed, offset, bias, ends_q, ends_k, rows, keys, p, causal, *, scale=None
    ):
        self.called.append("cudnn_backward")
        assert (rows, keys, p) == (q.shape[2], k.shape[2], 0.0)
        assert lse.ndim == self.sums
        assert lse.is_contiguous()
        grads = _cpu_backward(dy, q, k, v, y, lse.reshape(q.shape[:3]), 0.0, causal, scale=scale)
        return tuple(map(_as_packed, grads))

    def efficient(self, q, k, v, bias, log_sums, p=0.0, causal=False, *, scale=None):
        self.called.append("efficient")
        assert (bias, log_sums, p) == (None, True, 0.0)
        y, lse = _cpu(q, k, v, 0.0, causal, scale=scale)
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.nan)
        return _as_packed(y), padded, _nothing(), _nothing()

    def efficient_backward(self, dy, q, k, v, bias, y, lse, seed, offset, p, wanted, causal=False, *, scale=None):
        self.called.append("efficient_backward")
        assert lse.shape[-1] % 32 == 0
        assert lse[..., q.shape[2] :].isposinf().all()
        assert list(wanted) == [True, True, True, False]
        lse = lse[..., : q.shape[2]].contiguous()
        grads = _cpu_backward(dy, q, k, v, y, lse, 0.0, causal, scale=scale)
        return *map(_as_packed, grads), None

    def flash(
        self, q, k, v, ends_q, ends_k, rows, keys, p, causal, debug, *, scale=None, window_size_left=None,
        window_size_right=None, **_,
    ):  # fmt: skip
        self.called.append("flash")
        assert (ends_q, p, debug, window_size_left) == (None, 0.0, False, None)
        assert window_size_right == (0 if causal else None)
        assert (rows, keys) == (q.shape[1], k.shape[1])
        y, lse = _cpu(*(t.transpose(1, 2) for t in (q, k, v)), 0.0, causal, scale=scale)
        return y.transpose(1, 2).contiguous(), lse.contiguous(), _nothing(), _nothing(), torch.empty(0)

    def flash_backward(
        self, dy, q, k, v, y, lse, ends_q, ends_k, rows, keys, p, causal, state, unused, *, scale=None, **_
    ):
        self.called.append("flash_backward")
        turned = [t.transpose(1, 2) for t in (dy, q, k, v, y)]
        grads = _cpu_backward(*turned, lse, 0.0, causal, scale=scale)
        return tuple(t.transpose(1, 2).contiguous() for t in grads)


@pytest.fixture(params=[4, 3], ids=["sums [B, H, S, 1]", "sums [B, H, S]"])
def stand_ins(request: pytest.FixtureRequest) -> Iterator[StandIns]:
    made = StandIns(request.param)
    _sdpa._cudnn_sums.cache_clear()
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, function in (
            ("_scaled_dot_product_cudnn_attention", made.cudnn),
            ("_scaled_dot_product_cudnn_attention_backward", made.cudnn_backward),
            ("_scaled_dot_product_efficient_attention", made.efficient),
            ("_scaled_dot_product_efficient_attention_backward", made.efficient_backward),
            ("_flash_attention_forward", made.flash),
            ("_flash_attention_backward", made.flash_backward),
        ):
            library.impl(name, function, "CPU")
        yield made
    _sdpa._cudnn_sums.cache_clear()


def _passes(op: ops.Attention, x: Tensor, dy: Tensor, ways: tuple[str, str]) -> list[Tensor]:
    kinds = iter(ways)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "passes_in_c", lambda *_: None)
        patch.setattr(_attention.Scores, "kernel", lambda *_: next(kinds))
        y, saved = op.fwd(x)
        dx, _ = op.bwd(dy, saved, needs=frozenset({"x"}))
    assert dx is not None
    return [y, saved.lse, dx]


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_each_kernel_reads_what_each_other_saved(stand_ins: StandIns, causal: bool) -> None:
    op = ops.Attention(H, H, causal=causal, scale=0.3)
    x, dy = seeded_randn((2, 33, 3 * H * D), 1), seeded_randn((2, 33, H * D), 2)
    wanted = _passes(op, x, dy, ("cpu", "cpu"))
    for ahead in _sdpa.BACKENDS:
        for back in _sdpa.BACKENDS:
            stand_ins.called.clear()
            found = _passes(op, x, dy, (ahead, back))
            asked = ["cudnn"] if back == "cudnn" and stand_ins.called[1] == "cudnn" else []
            assert stand_ins.called == [ahead, *asked, f"{back}_backward"]
            for ours, theirs in zip(found, wanted, strict=True):
                assert ours.shape == theirs.shape
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["cudnn", "flash"])
def test_shared_key_heads_are_not_repeated(stand_ins: StandIns, kind: str) -> None:
    op = ops.Attention(H, KV, causal=True)
    x, dy = seeded_randn((2, 20, (H + 2 * KV) * D), 1), seeded_randn((2, 20, H * D), 2)
    for ours, theirs in zip(_passes(op, x, dy, (kind, kind)), _passes(op, x, dy, ("cpu", "cpu")), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_packed_sequences_are_given_to_flash_as_one_and_may_each_be_as_long_as_all(monkeypatch: pytest.MonkeyPatch):
    def flash(q, k, v, ends_q, ends_k, rows, keys, p, causal, debug, *, scale, **limits):
        assert (q.shape, k.shape, v.shape) == ((20, H, D), (20, KV, D), (20, KV, D))
        assert (ends_q.tolist(), ends_k.dtype) == ([0, 8, 20], torch.int32)
        assert (rows, keys, p, causal, debug, scale) == (20, 20, 0.0, True, False, 0.5)
        return q.clone(), q.new_zeros(H, 20)

    monkeypatch.setattr(_sdpa, "_flash", flash)
    q, k = (seeded_randn((1, n, 20, D), n) for n in (H, KV))
    y, lse, _ = _sdpa.forward(q, k, k, "flash", 0.5, True, None, torch.tensor([0, 8, 20]))
    torch.testing.assert_close(y, q.transpose(1, 2), rtol=0, atol=0)
    assert lse.shape == (1, H, 20)


def test_flash_drops_weights_again_by_the_state_that_it_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.tensor([7, 8], dtype=torch.uint64)

    def flash(q, k, v, ends_q, ends_k, rows, keys, p, causal, debug, **_):
        assert (p, causal, debug) == (0.25, True, False)
        return q.clone(), q.new_zeros(2, H, 20), state, _nothing(), torch.empty(0)

    def flash_backward(dy, q, k, v, y, lse, ends_q, ends_k, rows, keys, p, causal, drawn, unused, **_):
        assert (p, drawn.dtype, drawn.tolist()) == (0.25, torch.uint64, [7, 8])
        return dy.clone(), dy.clone(), dy.clone()

    monkeypatch.setattr(_sdpa, "_flash", flash)
    monkeypatch.setattr(_sdpa, "_flash_backward", flash_backward)
    monkeypatch.setattr(_attention.Scores, "draws", lambda how, q: how.p > 0)
    monkeypatch.setattr(attention, "passes_in_c", lambda *_: None)
    op = ops.Attention(H, H, causal=True, dropout=0.25)
    y, saved = op.fwd(seeded_randn((2, 20, 3 * H * D), 1), seed=torch.tensor(3))
    assert saved.seed is not None
    assert saved.seed.tolist() == [7, 8]
    dx, _ = op.bwd(y, saved, needs=frozenset({"x"}))
    assert dx is not None
    torch.testing.assert_close(dx, torch.cat([y, y, y], -1), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("how", "dtype", "taken"),
    [
        ({}, torch.bfloat16, True),
        ({"window": 4, "causal": True}, torch.float16, True),
        ({}, torch.float32, False),
        ({"softcap": 3.0}, torch.bfloat16, False),
        ({"mask": torch.zeros(1)}, torch.bfloat16, False),
        ({"p": 0.0}, torch.bfloat16, False),
        ({"p": 1.0}, torch.bfloat16, False),
        ({"size": 256}, torch.bfloat16, False),
    ],
)
def test_flash_drops_what_it_can(how: Any, dtype: torch.dtype, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sdpa, "has_flash", lambda device: True)
    monkeypatch.setattr(group, "_divided", False)  # by another test
    how = {**how}
    size = how.pop("size", D)
    scores = _attention.Scores(**{"scale": 1.0, "p": 0.5, **how})
    q = SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(2, H, 20, size))
    assert scores.draws(cast(Tensor, q)) is taken
    torch.use_deterministic_algorithms(True)
    try:
        assert not scores.draws(cast(Tensor, q))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("where", ["a test", "a divided model", "a compiler", "a graph that is recorded"])
def test_the_seed_decides_the_mask_in(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sdpa, "has_flash", lambda device: True)
    monkeypatch.setattr(group, "_divided", False)
    q = cast(Tensor, SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, shape=(2, H, 20, D)))
    scores, found = _attention.Scores(1.0, p=0.5), list[bool]()
    assert scores.draws(q)
    if where == "a test":
        with seeded(0, torch.device("cpu")):
            assert not scores.draws(q)
    elif where == "a divided model":
        group.mark_divided()
        assert not scores.draws(q)
    elif where == "a compiler":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert not scores.draws(q)
    else:
        make_fx(lambda x: (found.append(scores.draws(q)), x + 1)[1])(torch.ones(2))
        assert found == [False]
    monkeypatch.undo()


VIEWS = (
    "alias",
    "transpose",
    "view",
    "unsafe_view",
    "select",
    "slice",
    "unsqueeze",
    "split",
    "split_with_sizes",
    "empty",
    "empty_like",
    "new_empty",
)


@pytest.mark.parametrize("kind", _sdpa.BACKENDS)
def test_nothing_is_copied_but_the_gradients_into_one_tensor(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sdpa, "_cudnn_sums", lambda device: 4)
    op = ops.Attention(H, H, causal=True)
    x = torch.empty(2, 64, 3 * H * D, dtype=torch.bfloat16, device="meta")
    with Calls() as seen:
        _, _, dx = _passes(op, x, x.new_empty(2, 64, H * D), (kind, kind))
    kernels = [name for name in seen.names if name.strip("_") not in VIEWS]
    name = "_flash_attention" if kind == "flash" else f"_scaled_dot_product_{kind}_attention"
    assert kernels == [f"{name}_forward" if kind == "flash" else name, f"{name}_backward", "cat"]
    assert dx.shape == x.shape


def test_the_kernel_is_the_one_that_torch_takes_for_both_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    answer = {"now": 3}

    def choice(q: Tensor, k: Tensor, v: Tensor, mask: None, p: float, causal: bool, *, enable_gqa: bool) -> int:
        asked.append((tuple(q.shape), tuple(k.shape), causal, enable_gqa, q.requires_grad and torch.is_grad_enabled()))
        return answer["now"]

    monkeypatch.setattr(_sdpa, "_sdp_choice", choice)
    monkeypatch.setattr(_sdpa, "_choices", {})
    q = torch.empty(2, H, 256, D)
    for expected, number in (("cudnn", 3), ("flash", 1), ("efficient", 2), (None, 0)):
        answer["now"] = number
        monkeypatch.setattr(_sdpa, "_choices", {})
        with torch.no_grad():
            assert _sdpa.sdpa_backend(q, q, True) == expected
    assert asked[0] == ((1, H, 128, D), (1, H, 128, D), True, False, True)
    answer["now"] = 3
    monkeypatch.setattr(_sdpa, "_choices", {})
    with torch.no_grad():
        assert _sdpa.sdpa_backend(q, q[:, :KV], False) == "cudnn"
    assert asked[-1] == ((1, H, 128, D), (1, KV, 128, D), False, True, True)
    before = len(asked)
    assert _sdpa.sdpa_backend(q, q[:, :KV], False) == "cudnn"
    assert len(asked) == before, "asked once for each size"
    answer["now"] = 2
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        assert _sdpa.sdpa_backend(q, q, False) == "efficient"
        assert _sdpa.sdpa_backend(q, q[:, :KV], False) is None, "it takes no shared heads"
    answer["now"] = 1
    assert _sdpa.sdpa_backend(torch.empty(2, H, 256, 20), torch.empty(2, H, 256, 20), False) is None, (
        "heads of 20 are padded"
    )


def test_a_plan_finds_the_kernel_that_a_run_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """For fake tensors torch may answer otherwise than for real ones, and is asked only once."""
    fake, orders = FakeTensorMode(), [(1, 2, 0, 3, 4), (3, 1, 2, 0, 4)]

    def choice(q: Tensor, *args: Any, **more: Any) -> int:
        del orders[:-1]  # as torch does when it is first asked
        return 2 if isinstance(q, FakeTensor) else 3

    monkeypatch.setattr(_sdpa, "_sdp_choice", choice)
    monkeypatch.setattr(_sdpa, "_choices", {})
    monkeypatch.setattr(_sdpa, "_settle", _sdpa._settle.__wrapped__)
    monkeypatch.setattr(torch._C, "_get_sdp_priority_order", lambda: orders[0])
    monkeypatch.setattr(_sdpa, "_is_here", lambda _: True)
    q = torch.empty(2, H, 256, D)
    with fake:
        assert _sdpa.sdpa_backend(fake.from_tensor(q), fake.from_tensor(q), True) == "cudnn"
    assert _sdpa.sdpa_backend(q, q, True) == "cudnn"
    assert len(_sdpa._choices) == 1


def test_rows_that_begin_between_16_bytes_are_copied() -> None:
    class OnGPU(torch.Tensor):
        is_cuda = True

    def laid(t: Tensor) -> Tensor:
        return t.as_subclass(OnGPU)

    whole = torch.zeros(2 * 33 * 64 + 8, dtype=torch.bfloat16)
    assert _sdpa.aligned(laid(whole[: 2 * 64].view(2, 64)))
    assert _sdpa.aligned(laid(whole[8 : 8 + 2 * 64].view(2, 64)))
    assert not _sdpa.aligned(laid(whole[1 : 1 + 2 * 64].view(2, 64)))
    assert not _sdpa.aligned(laid(whole.as_strided((2, 64), (65, 1))))
    assert _sdpa.aligned(laid(whole.as_strided((2, 60), (60, 1)))), "no kernel takes such rows"


def test_a_compiler_takes_the_choice_as_a_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sdpa, "_sdp_choice", lambda *args, **more: 3)
    monkeypatch.setattr(_sdpa, "_choices", {})

    def double(q: Tensor) -> Tensor:
        return q * 2 if _sdpa.sdpa_backend(q, q, True) == "cudnn" else q

    q = seeded_randn((2, H, 8, D), 1)
    for given in (q, torch.cat((q, q), 2)):
        compiled = torch.compile(double, backend="eager", fullgraph=True, dynamic=True)
        assert torch.equal(compiled(given), given * 2)


@pytest.mark.parametrize(("kv", "wanted"), [(8, 68_157_440), (4, 135_266_304)])
def test_a_plan_counts_what_a_backward_takes_for_itself(kv: int, wanted: int) -> None:
    """dq and sums of rows in float32, as measured with cuDNN; with FlashAttention dk and dv of each head as well."""
    with FakeTensorMode(), Tally() as tally:
        q, dy, y = (torch.empty(32, 8, 1024, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
        k = torch.empty(32, kv, 1024, 64, dtype=torch.bfloat16, device="cuda")
        lse = torch.empty(32, 8, 1024, device="cuda")
        before = sum(size for _, size in tally.events)
        turned = dy.transpose(1, 2), q, k, k, y.transpose(1, 2)
        grads = _sdpa.backward(*turned, lse, "flash", 0.1, True, None, None)
        made = most_of(tally.events, frozenset(), 0) - before
        assert _sdpa._scratch(q, k, "cudnn").nbytes == 68_157_440
    assert made - sum(grad.nbytes for grad in grads) == pytest.approx(wanted, abs=64)


KERNELS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")


OPERATORS = [("_flash_attention", False), ("_flash_attention", True)]
OPERATORS += [(f"_scaled_dot_product_{kernel}", False) for kernel in KERNELS]


@pytest.mark.parametrize(("name", "packed"), OPERATORS)
def test_a_plan_counts_the_gemms_of_both_passes(name: str, packed: bool) -> None:
    """FlashAttention's own operator takes [B, S, H, D], or packed sequences [tokens, H, D], here of 8 tokens each."""
    own = name == "_flash_attention"
    lead, keys = ((40,), 8) if packed else ((3, 40), 40)
    q, k = (torch.empty(*lead, heads, D, device="meta") for heads in (H, KV))
    q, k = (q, k) if own else (q.transpose(1, 2), k.transpose(1, 2))
    ends = torch.empty(6, device="meta") if packed else None
    forward, backward = (
        tallies._formulas()[getattr(torch.ops.aten, f"{name}{which}")]
        for which in ("_forward" if own else "", "_backward")
    )
    gemm = 2 * q.numel() * keys
    assert forward(q, k, k, ends, out_val=None) == 2 * gemm
    assert backward(q, q, k, k, q, q, ends, out_val=None) == 5 * gemm


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_contains_the_token_itself(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(_sdpa, "_flash", lambda q, *args, **more: given.update(more) or (q, q, q))
    q = seeded_randn((1, H, 8, D), 1)
    _sdpa.forward(q, q, q, "flash", 1.0, causal, 4, None)
    assert (given["window_size_left"], given["window_size_right"]) == (3, 0 if causal else 3)
