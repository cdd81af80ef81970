"""Redraws, overflow, memory, and forbidden changes by a pass."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqfuse.testing.judge as judging
from seqfuse.errors import PluginError
from seqfuse.testing import FusedMismatch, GlobalState, Observer, assert_fused_close, in_regime, seeded_randn
from seqfuse.testing.cases import Outcome
from seqfuse.testing.judge import assert_own_memory, assert_stays_finite, judge, saying
from seqfuse.testing.structure import Tree
from tests.judging import judge_together


class Draws:
    """Results that are right except in the given draws, where one element of one tensor is spoiled; counts the
    draws."""

    def __init__(
        self, dtype: torch.dtype, wrong: dict[int, str], spoil: float = 1.0, shape: tuple[int, ...] = (4, 8)
    ) -> None:
        self.dtype, self.wrong, self.spoil, self.shape, self.asked = dtype, wrong, spoil, shape, 0

    def __call__(self, seed: int):
        u = {name: in_regime("normal", self.shape, seed, dtype=self.dtype) for name in ("y", "d_x")}
        f, r = ({name: t.to(dtype, copy=True) for name, t in u.items()} for dtype in (self.dtype, torch.float64))
        if self.asked in self.wrong:
            f[self.wrong[self.asked]][1, 2] += self.spoil
        self.asked += 1
        return f, u, r


HALF = torch.bfloat16, torch.float16
WIDE = {"shape": (5, 13)}  # of more than 64 elements
DRAWN: dict[str, tuple[list[torch.dtype], dict[int, str], dict[str, Any], str | None, int]] = {
    # Dtypes, draws that are spoiled, how, the error, if any, and how many draws are made (0: many).
    "a right result": ([torch.float32], {}, {}, None, 1),
    "one alarm in float32": ([torch.float32], {0: "y"}, {}, None, 3),
    "the same in the first redraw": ([torch.float32], {0: "y", 1: "y"}, WIDE, "y: max", 2),
    "the same in the second redraw": ([torch.float32], {0: "y", 2: "y"}, WIDE, "y: max", 3),
    "another tensor in a redraw": ([torch.float32], {0: "y", 1: "d_x"}, {}, None, 3),
    "another dtype": ([*HALF, torch.float64], {0: "y"}, WIDE, "y: max", 1),
    "few elements in 16 bits": ([*HALF], {0: "y"}, {"shape": (4, 16)}, None, 3),
    "the same of few elements again": ([*HALF], {0: "y", 2: "y"}, {"shape": (4, 16)}, "y: max", 0),
    "few elements in float64": ([torch.float64], {0: "y"}, {}, "y: max", 1),
    "structure": ([torch.float32], {0: "y"}, {"spoil": math.nan}, "y: structure", 1),
}


@pytest.mark.parametrize("name", DRAWN)
def test_an_alarm_is_taken_for_chance_where_it_may_be(name: str):
    dtypes, wrong, how, said, asked = DRAWN[name]
    for dtype in dtypes:
        draws = Draws(dtype, wrong, **how)
        with contextlib.nullcontext() if said is None else pytest.raises(FusedMismatch, match=said):
            judge(draws, 0)
        assert draws.asked == asked or not asked


@pytest.mark.parametrize("right", ["cublaslt", None])
def test_on_a_gpu_float32_may_be_summed_as_either_library_sums_it(
    right: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = ["_BlasBackend.Cublas"]

    def choose(name: str | None = None) -> str:
        if name is not None:
            chosen.append(name)
        return chosen[-1]

    def measure(seed: int):
        f, u, r = Draws(torch.float32, {})(seed)
        if chosen[-1] != right:
            f["y"] = f["y"] + 1e-4 * seeded_randn(f["y"].shape, 7)
        else:
            u["y"] = u["y"] + 1e-4 * seeded_randn(u["y"].shape, 8)
        return f, u, r

    monkeypatch.setattr(judging, "_on_gpu", lambda tree: True)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", choose)
    if right is None:
        with pytest.raises(FusedMismatch, match="y: max"):
            judge(measure, 0)
    else:
        judge(measure, 0)
    assert chosen[1:] == ["cublaslt", "cublas"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_one_element_of_many_that_alarms_in_16_bits_is_taken_for_chance_and_a_second_counts(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(wrong: dict[int, str]) -> Callable[[int], tuple[Tree, Tree, Tree]]:
        draws = Draws(dtype, wrong, spoil=0.0, shape=(300, 260))

        def drawn(seed: int) -> tuple[Tree, Tree, Tree]:
            alarms = draws.asked in wrong
            f, u, r = draws(seed)
            for number, t in enumerate((f["y"], u["y"])):
                t += 0.01 * seeded_randn((300, 260), number, dtype=dtype).sign()
                t[0, 0] += 1.0  # so that the error of another is not the largest
            r["y"][7, 9], u["y"][7, 9], f["y"][7, 9] = 0.5, 0.5, 0.5 + 0.12 * alarms
            return f, u, r

        return drawn

    once = measure({0: "y"})
    said = r"^fused differs from unfused; compute in float32 and round once\n  y: element: .* at \(7, 9\)$"
    with pytest.raises(FusedMismatch, match=said):
        judge(once, 0)
    monkeypatch.setattr(judging, "_MANY", 300 * 260)
    judge(measure({0: "y"}), 0)
    with pytest.raises(FusedMismatch, match="y: element"):
        judge(measure({0: "y", 2: "y"}), 0)


def test_few_elements_that_alarm_twice_are_judged_as_one_tensor_of_many_draws():
    """Two equally wrong sums of one number each alarm in half of all draws; one that is twice as wrong is found."""
    asked: list[int] = []

    def measure(seed: int, wrong: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        asked.append(seed)
        r = 100 + in_regime("normal", (1,), seed, dtype=torch.float64)
        f, u = (r + 1e-4 * in_regime("normal", (1,), seed + i, dtype=torch.float64) for i in (1, 2))
        return (r + wrong * (f - r)).float(), u.float(), r

    for seed in range(60):
        judge(measure, seed)
    assert len(set(asked)) > 60 + 32
    found = 0
    for seed in range(60):
        try:
            judge(lambda at: measure(at, 2.5), seed)
        except FusedMismatch:
            found += 1
    assert found > 20


@pytest.mark.parametrize("wrong", [1.0, 4.0])
def test_draws_of_few_elements_end_where_the_answer_is_clear(wrong: float):
    def draws(start: int) -> int:
        asked: list[int] = []

        def measure(seed: int) -> tuple[Tensor, Tensor, Tensor]:
            asked.append(seed)
            r = 100 + in_regime("normal", (), seed, dtype=torch.float64)
            f, u = (r + 1e-4 * in_regime("normal", (), seed + i, dtype=torch.float64) for i in (1, 2))
            return (r + wrong * (f - r)).float(), u.float(), r

        with contextlib.suppress(FusedMismatch):
            judge(measure, start)
        return len(asked)

    joined = sorted(count for count in map(draws, range(60)) if count > 3)
    assert len(joined) > 5
    assert joined[0] >= 32
    assert joined[len(joined) // 2] < 64  # of 128


def test_a_fault_of_structure_in_a_redraw_counts_for_any_tensor():
    class GoneBad(Draws):
        def __call__(self, seed: int):
            self.spoil = math.nan if self.asked else 1.0
            return super().__call__(seed)

    with pytest.raises(FusedMismatch, match="d_x: structure"):
        judge(GoneBad(torch.float32, {0: "y", 1: "d_x"}), 0)


class Deep:
    """Two right results whose rows err by one rounding each, some rows far more than others; `spoil` changes a draw."""

    def __init__(self, spoil: Callable[[int, Tensor, Tensor], None] = lambda draw, f, r: None) -> None:
        self.spoil, self.draws = spoil, 0

    def __call__(self, seed: int):
        r = in_regime("normal", (48, 32), seed, dtype=torch.float64)
        scale = in_regime("heavy", (48, 1), 0, dtype=torch.float64).abs().sqrt()
        scale[1] = scale.square().mean().sqrt()
        f, u = (
            (r + 3e-7 * scale / scale[1] * in_regime("normal", (48, 1), seed + i, dtype=torch.float64)).float()
            for i in (1, 2)
        )
        self.spoil(self.draws, f, r)
        self.draws += 1
        return {"y": f}, {"y": u}, {"y": r}


def test_right_results_of_a_deep_model_agree_over_many_draws_and_not_in_each():
    alarms = 0
    for seed in range(20):
        judge_together(Deep(), 100 * seed)
        try:
            assert_fused_close(*Deep()(100 * seed))
        except FusedMismatch:
            alarms += 1
    assert alarms >= 3


@pytest.mark.parametrize(
    "more",
    [lambda y: {"d_x": y[:, :0]}, lambda y: {"nan": y * math.nan, "zero": y * 0}],
    ids=["without elements", "nowhere finite, and without an error"],
)
def test_tensors_that_cannot_be_wrong_are_right(more: Callable[[Tensor], dict[str, Tensor]]):
    right = Deep(lambda draw, f, r: f[1, 2].add_(draw == 0))

    def measure(seed: int) -> tuple[dict[str, Tensor], ...]:
        return tuple({**side, **more(side["y"])} for side in right(seed))

    judge_together(measure, 0)
    assert right.draws == 9


def test_faults_of_a_deep_model_are_found():
    def twice(draw: int, f: Tensor, r: Tensor) -> None:
        f.copy_(r + 2.5 * (f - r))

    def element(draw: int, f: Tensor, r: Tensor) -> None:
        f[1, 2] += 8e-6

    def at_times(draw: int, f: Tensor, r: Tensor) -> None:
        f[1, 2] += 1e-4 * (draw in (0, 5))

    def nan(draw: int, f: Tensor, r: Tensor) -> None:
        f[1, 2] = (8e-6, math.nan)[draw == 5]

    for spoil, part in (
        (twice, "rms"),
        (element, r"element.*\(1, 2\)"),
        (at_times, r"element.*\(1, 2\)"),
        (nan, "structure"),
    ):
        with pytest.raises(FusedMismatch, match=f"y: {part}"):
            judge_together(Deep(spoil), 0)


def test_an_overflow_of_its_own_is_found_and_one_that_is_spared_is_not():
    one = {"y": torch.tensor([[1.0, math.inf]])}
    finite = {"y": torch.tensor([[1.0, 2.0]])}
    assert_stays_finite(finite, one, finite)
    assert_stays_finite(one, one, finite)
    with pytest.raises(AssertionError, match=r"y: inf at \(0, 1\), where the operations give 2"):
        assert_stays_finite(one, finite, finite)


def test_errors_say_where_they_happened():
    with pytest.raises(AssertionError, match="on a list: KeyError: 'a'"), saying("on a list"):
        {}["a"]
    with pytest.raises(PluginError) as error, saying("on a list"):
        raise PluginError("wrong", code="SF301")
    assert error.value.__notes__ == ["in on a list"]


def test_a_terminal_shows_what_is_checked_and_nothing_else_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with saying("Tanh, float32"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with saying("Tanh, float32"):
        pass
    assert capsys.readouterr().err == "\r\x1b[KTanh, float32\r\x1b[K"


def test_nothing_is_found_where_nothing_changed():
    assert GlobalState({"it": nn.LayerNorm(3)}).changes() == []


def test_what_changed_is_named_and_put_back():
    module = nn.LayerNorm(3)
    state = GlobalState({"the norm": module})
    torch.set_default_dtype(torch.float16)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.rand(1)
    module.eps = 1.0
    module.weight = nn.Parameter(torch.zeros(3))
    changes = state.changes()
    assert [change.split(" from ")[0] for change in changes[:3]] == [
        "changed the default dtype",
        "changed grad mode",
        "changed deterministic mode",
    ]
    assert changes[3].startswith("drew from torch's CPU generator")
    assert changes[4] == "changed _parameters['weight'], eps of the norm"
    assert torch.get_default_dtype() is torch.float32
    assert torch.is_grad_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert GlobalState({}).changes() == []


@pytest.fixture
def _precisions():
    backends = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = [backend.fp32_precision for backend in backends]
    yield
    for backend, precision in zip(backends, before, strict=True):
        backend.fp32_precision = precision


@pytest.mark.usefixtures("_precisions")
def test_tf32_is_watched_where_torch_raises_for_the_older_setting():
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    matmul.fp32_precision = "tf32"
    with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
        torch.get_float32_matmul_precision()
    state = GlobalState({})
    assert state.changes() == []
    matmul.fp32_precision = conv.fp32_precision = "ieee"
    assert state.changes()[-2:] == [
        "changed TF32 in cuBLAS from tf32 to ieee",
        "changed TF32 in cuDNN from tf32 to ieee",
    ]
    assert (matmul.fp32_precision, conv.fp32_precision) == ("tf32", "tf32")


@pytest.mark.usefixtures("_precisions")
def test_the_older_setting_of_tf32_is_put_back():
    before = torch.backends.cuda.matmul.fp32_precision
    state = GlobalState({})
    torch.set_float32_matmul_precision("high")
    assert [change.split(" from ")[0] for change in state.changes()] == [
        "changed the precision of float32 products",
        "changed TF32 in cuBLAS",
    ]
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cuda.matmul.fp32_precision == before
    assert GlobalState({}).changes() == []


def test_an_observer_keeps_what_was_given_and_returned():
    class Passes:
        def fwd(self, x, *, seed):
            return x + seed

    passes, observer = Passes(), Observer()
    observer.attach(passes)
    x = torch.ones(2)
    y = passes.fwd(x, seed=torch.tensor(3))
    (seen,) = observer.passes("fwd")
    assert seen.args == (x,)
    assert seen.out is y
    assert not observer.passes("bwd")
    assert Passes().fwd(1, seed=1) == 2
    assert len(observer.seen) == 1


def test_a_place_in_several_draws_names_the_draw():
    def measure(seed: int) -> tuple[Tree, Tree, Tree]:
        r = seeded_randn((64,), seed).double()
        u = {"y": r.float()}
        f = u["y"].clone()
        f[12] += 1e-2
        return {"y": f}, u, {"y": r}

    with pytest.raises(FusedMismatch, match=r"y: \w+: .* at \(12,\) of draw \d$") as caught:
        judge(measure, 0)
    assert "row" not in str(caught.value)


@pytest.mark.parametrize("name", ["x", "weight", "dy", "y", "d_x"])
def test_a_gradient_of_a_parameter_has_memory_of_its_own(name: str) -> None:
    known = {key: torch.ones(3) for key in ("x", "weight", "dy", "y", "d_x")}

    def outcome(grad: Tensor) -> Outcome:
        given = ({key: known[key]} for key in ("x", "weight", "dy", "y"))
        return Outcome(*given, {"weight.grad": grad, "d_x": known["d_x"]}, torch.get_rng_state())

    own = outcome(torch.ones(3))
    assert_own_memory(own, own)
    with pytest.raises(AssertionError, match=f"weight.grad shares its storage with others: {name}; return"):
        assert_own_memory(outcome(known[name][:2]), own)
