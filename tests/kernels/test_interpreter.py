"""The corrected interpreter: casts to and from bfloat16 and float8, arithmetic, sums and GEMMs in them."""

from __future__ import annotations

import itertools
import os
import warnings
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.language import random
from triton.runtime import interpreter

from seqfuse.kernels._launch import launch
from seqfuse.testing.interpreter import as_on_a_gpu, corrected
from seqfuse.testing.interpreter_bounds import OutOfBounds
from tests.interpreter_operators import methods
from tests.processes import Script

from .conftest import DEVICE

PHILOX = random.philox_impl  # as Triton has it
SEMANTIC = type(interpreter.interpreter_semantic)
THEIRS = {name: getattr(SEMANTIC, name) for name in ("cast", "binary_op_type_checking_impl")}

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="about the interpreter")


@triton.jit
def _cast_kernel(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i).to(y.dtype.element_ty))


FACTOR, CONSTANT = 0.7, tl.constexpr(3)


@triton.jit
def _by_factor(x):
    return x * FACTOR


@triton.jit
def _global_kernel(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, _by_factor(tl.load(x + i)) * CONSTANT)


@triton.jit
def _arithmetic_kernel(x, y, z, s, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(z + i, tl.where((a < b) & (a > -1.0), tl.abs(a) * b - a, tl.maximum(a, b)))
    tl.store(s, tl.sum(a, 0))
    tl.store(s + 1, tl.max(a, 0))


@triton.jit
def _square_kernel(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    tl.store(y + i, a * a)


@triton.jit
def _dot_kernel(x, y, z, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(z + at, tl.dot(tl.load(x + at), tl.load(y + at)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_casts_round_to_nearest_even(dtype: torch.dtype) -> None:
    # A stride through all bit patterns of float32: subnormals, ties, overflow, infinities and NaN.
    x = torch.arange(0, 2**32, 65521)[:65536].to(torch.int32).view(torch.float32).clone()
    y = torch.empty(65536, dtype=dtype)
    launch(_cast_kernel, 1, (x, y), {"N": 65536})
    most = torch.finfo(dtype).max
    expected = (x if dtype is torch.bfloat16 else x.clamp(-most, most)).to(dtype).float()
    torch.testing.assert_close(y.float(), expected, rtol=0, atol=0, equal_nan=True)
    back = torch.empty(65536)
    launch(_cast_kernel, 1, (y, back), {"N": 65536})
    torch.testing.assert_close(back, y.float(), rtol=0, atol=0, equal_nan=True)


def test_bfloat16_arithmetic_is_that_of_torch() -> None:
    a, b = torch.randn(2, 256).bfloat16().unbind()
    z, s = torch.empty_like(a), torch.empty(2)
    launch(_arithmetic_kernel, 1, (a, b, z, s), {"N": 256})
    assert torch.equal(z, torch.where((a < b) & (a > -1), a.abs() * b - a, torch.maximum(a, b)))
    assert s.tolist() == [a.float().sum().bfloat16().item(), a.max().item()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_products_of_matrices_are_exact(dtype: torch.dtype) -> None:
    a, b = torch.randint(-4, 5, (2, 32, 32)).to(dtype).unbind()
    z = torch.empty(32, 32)
    launch(_dot_kernel, 1, (a, b, z), {"N": 32})
    assert torch.equal(z, a.float() @ b.float())


def test_products_of_matrices_are_rounded_once() -> None:
    """The same on every machine, whichever factor comes first."""
    x, y = torch.randn(2, 32, 32) * torch.exp2(torch.arange(-16, 16.0))
    z, turned = torch.empty(2, 32, 32)
    launch(_dot_kernel, 1, (x, y, z), {"N": 32})
    launch(_dot_kernel, 1, (y.T.contiguous(), x.T.contiguous(), turned), {"N": 32})
    assert torch.equal(z, (x.double() @ y.double()).float())
    assert torch.equal(z, turned.T)


@triton.jit
def _sum_kernel(x, rows, columns, M: tl.constexpr, N: tl.constexpr):
    value = tl.load(x + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(rows + tl.arange(0, M), tl.sum(value, 1))
    tl.store(columns + tl.arange(0, N)[None, :], tl.sum(value, 0, keep_dims=True))


@triton.jit
def _extremes_kernel(x, y, z, N: tl.constexpr, PROPAGATE: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(z + i, tl.maximum(a, b, propagate_nan=PROPAGATE))
    tl.store(z + N + i, tl.minimum(a, b, propagate_nan=PROPAGATE))
    tl.store(z + 2 * N + i, tl.clamp(a, b, b, propagate_nan=PROPAGATE))
    tl.store(z + 3 * N + i, tl.max(a, 0))
    tl.store(z + 4 * N + i, tl.min(a, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_number_hides_a_nan_unless_it_is_propagated(dtype: torch.dtype) -> None:
    nan = torch.nan
    x, y = (torch.tensor(values, dtype=dtype) for values in ([nan, 2, -3, nan], [1, nan, -2, nan]))
    for propagate, maximum, minimum in (
        (tl.PropagateNan.NONE, [1, 2, -2, nan], [1, 2, -3, nan]),
        (tl.PropagateNan.ALL, [nan, nan, -2, nan], [nan, nan, -3, nan]),
    ):
        z = x.new_empty(5, 4)
        launch(_extremes_kernel, 1, (x, y, z), {"N": 4, "PROPAGATE": propagate})
        torch.testing.assert_close(z[0], x.new_tensor(maximum), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(z[1], x.new_tensor(minimum), rtol=0, atol=0, equal_nan=True)
        # Of clamp's three arguments only the NaN of x counts.
        assert z[2, 0].isnan() == (propagate == tl.PropagateNan.ALL)
        assert z[2, 2] == -2
        assert (z[3] == 2).all()
        assert (z[4] == -3).all()


def test_columns_are_summed_in_pairs() -> None:
    # Ones after a number that swallows each of them alone.
    x = torch.ones(64, 32)
    x[0] = 2.0**24
    rows, columns = torch.empty(64), torch.empty(32)
    launch(_sum_kernel, 1, (x, rows, columns), {"M": 64, "N": 32})
    assert rows.tolist() == [2.0**29] + [32.0] * 63
    assert columns.tolist() == [2.0**24 + 62] * 32


@triton.jit
def _operators_kernel(x, y, z, N: tl.constexpr, WHOLE: tl.constexpr):
    i = tl.arange(0, N)
    a, b, at = tl.load(x + i), tl.load(y + i), z + i[:, None] * N + i[None, :]
    empty = tl.zeros((N, N), tl.float64)
    found = (
        a[:, None] + b[None, :], b[:, None] - a[None, :], a[None, :] * b[:, None], a[:, None] / b[None, :], a + b,
        a < b, b <= a[:, None], a > b, a >= b, a == b[:, None], a != b, (a < b) & (b < 2), (a < b) | (a[:, None] < 1),
        a + 3, 3 - a, 2 * a, a < 1, a >= 2, 1 + tl.sum(b, 0), tl.sum(a, 0) * b, a * 1e39, a + 100,
    )  # fmt: skip
    for k in tl.static_range(22):
        tl.store(at + k * N * N, found[k].to(tl.float64) + empty)
    if WHOLE:
        tl.store(at + 22 * N * N, ((a & 3) | (b & 5)).to(tl.float64) + empty)
    else:
        tl.store(at + 22 * N * N, (a * 0.1 - b).to(tl.float64) + empty)
        tl.store(at + 23 * N * N, (0.3 / a < 0.7).to(tl.float64) + empty)


DTYPES = (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64, torch.int8)


def test_operators_are_those_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [(one, DTYPES[(i + step) % 6]) for i, one in enumerate(DTYPES) for step in (0, 1, 3)]

    def results() -> list[torch.Tensor]:
        found = torch.zeros(len(pairs), 24, 16, 16, dtype=torch.float64)
        for z, (one, other) in zip(found, pairs, strict=True):
            x, y = torch.arange(16).to(one), (torch.arange(16).flip(0) / 2 + 1).to(other)
            whole = not (one.is_floating_point or other.is_floating_point)
            launch(_operators_kernel, 1, (x, y, z), {"N": 16, "WHOLE": whole})
        return [*found]

    with monkeypatch.context() as patch:  # before the first launch of a block, at which its operators are replaced
        patch.setattr("tests.interpreter_operators.methods", lambda _: ())
        theirs = results()
    for name, quick in methods(interpreter):
        monkeypatch.setattr(tl.tensor, name, quick(getattr(tl.tensor, name)))
    torch.testing.assert_close(results(), theirs, rtol=0, atol=0, equal_nan=True)


@triton.jit
def _casts_kernel(x, y, z, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(z + i, a.to(y.dtype.element_ty).to(tl.float64))
    tl.store(z + N + i, (a < b).to(y.dtype.element_ty).to(tl.float64))
    tl.store(z + 2 * N + i, tl.where(a < b, a, b).to(tl.uint32).to(y.dtype.element_ty).to(tl.float64))
    tl.store(z + 3 * N + i, tl.maximum(a, a + a).to(tl.float64))
    tl.store(z + 4 * N, tl.load(x + 3).to(y.dtype.element_ty).to(tl.float64))


def test_casts_are_those_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    def results() -> torch.Tensor:
        found = torch.zeros(len(DTYPES) ** 2, 5, 16, dtype=torch.float64)
        for z, (one, other) in zip(found, itertools.product(DTYPES, DTYPES), strict=True):
            x, y = (torch.arange(16) * 7.3).to(one), (torch.arange(16).flip(0) * 5.7).to(other)
            launch(_casts_kernel, 1, (x, y, z), {"N": 16})
        return found

    ours = results()
    for name, of_triton in THEIRS.items():
        assert getattr(SEMANTIC, name) is not of_triton
        monkeypatch.setattr(SEMANTIC, name, of_triton)
    assert torch.equal(ours, results())
    assert ours.count_nonzero() > 36 * 4 * 12


@triton.jit
def _draw_kernel(offsets, seed, y, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b, c, d = tl.randint4x(tl.load(seed), tl.load(offsets + i))
    tl.store(y + i, a)
    tl.store(y + N + i, b)
    tl.store(y + 2 * N + i, c)
    tl.store(y + 3 * N + i, d)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_draws_are_those_of_triton(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    most = torch.iinfo(dtype).max
    offsets = torch.randint(most, (64,), dtype=dtype)
    offsets[:2] = torch.tensor([0, most])
    for seed in (0, 5, 2**31 + 7, 2**62 + 2**32 + 3, -3):
        ours, theirs = torch.empty(2, 4, 64, dtype=torch.int32).unbind()
        launch(_draw_kernel, 1, (offsets, torch.tensor([seed]), ours), {"N": 64})
        with monkeypatch.context() as patch:
            patch.setattr(random, "philox_impl", PHILOX)
            launch(_draw_kernel, 1, (offsets, torch.tensor([seed]), theirs), {"N": 64})
        assert torch.equal(ours, theirs)
    assert random.philox_impl is not PHILOX


@triton.jit
def _wide_draw_kernel(counters, y, N: tl.constexpr):
    i = tl.arange(0, N)
    c = tl.load(counters + i)
    drawn = tl.philox(7, c, c, c, c)
    tl.store(y + i, drawn[0].to(tl.int64, bitcast=True))
    tl.store(y + N + i, drawn[3].to(tl.int64, bitcast=True))


def test_draws_of_64_bits_are_those_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = torch.randint(torch.iinfo(torch.int64).max, (64,))
    ours, theirs = torch.empty(2, 2, 64, dtype=torch.int64).unbind()
    launch(_wide_draw_kernel, 1, (counters, ours), {"N": 64})
    with monkeypatch.context() as patch:
        patch.setattr(random, "philox_impl", PHILOX)
        launch(_wide_draw_kernel, 1, (counters, theirs), {"N": 64})
    assert torch.equal(ours, theirs)
    assert ours.bitwise_right_shift(32).count_nonzero() > 100


def test_an_unknown_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", lambda self, x: x)
    with pytest.raises(RuntimeError, match=r"another interpreter .*create_fma"), corrected():
        pass


def test_the_test_kit_corrects_it_once() -> None:
    # A fixture corrects it here; the blocks of this test are observed from outside of it, too.
    before = interpreter.InterpreterBuilder.cast_impl
    with as_on_a_gpu(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert interpreter.InterpreterBuilder.cast_impl is before
        x, y = torch.full((4,), 3e38), torch.empty(4)
        launch(_square_kernel, 1, (x, y), {"N": 4})
        assert y.isinf().all()
    code = (
        "from seqfuse.testing.interpreter import as_on_a_gpu; from triton.runtime import interpreter as i;"
        "cast = lambda: i.InterpreterBuilder.cast_impl;"
        "own = cast(); block = as_on_a_gpu(); block.__enter__();"
        "print(cast() is own); block.__exit__(None, None, None); print(cast() is own)"
    )
    for interprets, printed in (("1", "False\nTrue\n"), ("0", "True\nTrue\n")):
        environment = {**os.environ, "TRITON_INTERPRET": interprets}
        done = Script("-c", code, environment=environment, bare=True).done()
        assert done.stdout == printed, done.stderr


def test_kernels_run_after_a_block_as_before_it(tmp_path: Path) -> None:
    script = tmp_path / "after.py"
    script.write_text("""
import torch
import triton
import triton.language as tl

from seqfuse.kernels._launch import launch
from seqfuse.testing.interpreter import as_on_a_gpu


@triton.jit
def kernel(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.zeros((N,), tl.float32) + tl.load(x + i))


x = torch.arange(4.0)
for _ in range(2):
    with as_on_a_gpu():
        launch(kernel, 1, (x, torch.empty(4)), {"N": 4})
    y = torch.empty(4)
    launch(kernel, 1, (x, y), {"N": 4})
    print(torch.equal(x, y))
""")
    done = Script(str(script), environment={**os.environ, "TRITON_INTERPRET": "1"}, bare=True).done()
    assert done.stdout == "True\nTrue\n", done.stderr


@triton.jit
def _shift_kernel(x, y, LOAD: tl.constexpr, STORE: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y[0] + i + STORE, tl.load(x + i + LOAD, mask=i >= -LOAD, other=0.0), mask=i > 0)


@triton.jit
def _count_kernel(x, at, N: tl.constexpr):
    tl.atomic_add(x + at + tl.arange(0, N), 1, mask=tl.arange(0, N) > 0)


@triton.jit
def _table_kernel(table, y):
    tl.store(y, tl.load(tl.load(table).to(tl.pointer_type(tl.float32))))


def test_what_the_addresses_of_a_table_point_to_may_be_accessed() -> None:
    x, y = torch.ones(1), torch.zeros(1)
    launch(_table_kernel, 1, (torch.tensor([x.data_ptr()]), y), {})
    assert y == 1


def test_an_access_outside_the_arguments_of_a_launch_is_refused_before_it_happens() -> None:
    room = torch.zeros(3, 64)
    x, y = room[1], torch.zeros(64)
    launch(_shift_kernel, 1, (x, (y,)), {"LOAD": -1, "STORE": -1, "N": 64})
    assert y[62] == x[61]
    for load, store, said in (
        (65, 0, "_shift_kernel loads 4 bytes outside the memory of x"),
        (0, 1, "_shift_kernel stores 4 bytes outside the memory of y.0"),
        (0, -3, "_shift_kernel stores 8 bytes outside the memory of y.0"),
    ):
        with pytest.raises(OutOfBounds, match=said):
            launch(_shift_kernel, 1, (x, (y,)), {"LOAD": load, "STORE": store, "N": 64})
    counts = torch.zeros(4, dtype=torch.int64)
    launch(_count_kernel, 1, (counts, 0), {"N": 4})
    assert counts.tolist() == [0, 1, 1, 1]
    with pytest.raises(OutOfBounds, match="_count_kernel stores 8 bytes outside the memory of x"):
        launch(_count_kernel, 1, (counts, 1), {"N": 4})


def test_a_number_that_is_a_global_is_refused_as_the_compiler_does() -> None:
    x, y = torch.ones(4), torch.zeros(4)
    for _ in range(2):
        with pytest.raises(NameError, match=r"_by_factor reads the global FACTOR = 0.7, .* tl.constexpr\(0.7\)"):
            launch(_global_kernel, 1, (x, y), {"N": 4})
    assert not y.any()


@triton.jit
def _lanes_kernel(x, y, reduced, n, ZERO: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    value = tl.load(x + i, mask=i < n)
    tl.store(y + i, value, mask=i < n)
    tl.store(y + N + i, value)
    tl.store(y + 2 * N + i, tl.load(x + i, mask=i < n, other=ZERO))
    value = value.to(tl.float32)
    tl.store(reduced, tl.sum(value, 0))
    tl.store(reduced + 1, tl.max(value, 0))
    tl.store(reduced + 2, tl.min(value, 0))


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.uint8],
    ids=str,
)
def test_lanes_that_a_gpu_leaves_undefined_spoil_what_uses_them(dtype: torch.dtype) -> None:
    x, y, reduced = torch.arange(1, 17).to(dtype), torch.zeros(3, 16).to(dtype), torch.zeros(3)
    results = list[torch.Tensor]()
    for _ in range(2):
        launch(_lanes_kernel, 1, (x, y, reduced, 5), {"ZERO": y[0, 5].item(), "N": 16})
        results.append(y.view(torch.uint8).clone())
    assert torch.equal(*results)  # each launch the same
    stored, used, zeros = y.double()
    assert stored.tolist() == [1, 2, 3, 4, 5, *[0] * 11]
    assert zeros.tolist() == stored.tolist()
    assert used[:5].tolist() == stored[:5].tolist()
    ends = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    held = {value for value in used[5:].tolist() if value == value}
    assert held == ({ends.max, ends.min} if dtype.is_floating_point else {ends.max, ends.min + 1})
    assert used.isnan().any().item() is dtype.is_floating_point
    total, most, least = reduced.tolist()
    assert total != 15
    assert most > 1e2
    assert least == 1 if dtype is torch.uint8 else least < -1e2


@triton.jit
def _one_lane_kernel(x, y, n):
    tl.store(y, tl.load(x, mask=n > 0, other=0))
    one = tl.arange(0, 1)
    tl.store(y + 1 + one, tl.load(x + one, mask=one < n, other=0))


def test_a_single_lane_that_is_set_to_zero_is_zero() -> None:
    x, y = torch.full((1,), 7), torch.full((2,), 7)
    launch(_one_lane_kernel, 1, (x, y, 0), {})
    assert y.tolist() == [0, 0]
