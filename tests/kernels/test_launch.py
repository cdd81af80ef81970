"""The launch layer: which kernel is launched, on which device, and how a failure is reported."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from seqfuse.hardware import architecture_of
from seqfuse.kernels import _launch, pointwise
from seqfuse.kernels._launch import cdiv, launch
from seqfuse.kernels.activations import ACTIVATIONS
from seqfuse.kernels.norm import norm_bwd, norm_fwd

from .conftest import DEVICE


@triton.jit
def _add_kernel(x, y, others, n, scale, BLOCK: tl.constexpr, FNS: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    value = tl.load(x + i, mask=mask).to(tl.float32) * scale
    for s in tl.static_range(len(FNS)):
        value = FNS[s](value)
        if others[s] is not None:
            value += tl.load(others[s] + i, mask=mask).to(tl.float32)
    tl.store(y + i, value, mask=mask)


@triton.jit
def _square(x):
    return x * x


@triton.jit
def _broken(x):
    return x.no_such_method()


@pytest.mark.parametrize(
    ("name", "version", "architecture"),
    [("NVIDIA H200", (9, 0), "sm_90"), ("", (8, 9), "sm_89"), ("gfx942:sramecc+:xnack-", (9, 4), "gfx942")],
)
def test_an_nvidia_card_is_not_called_by_its_name(name: str, version: tuple[int, int], architecture: str) -> None:
    properties = SimpleNamespace(gcnArchName=name, major=version[0], minor=version[1])
    assert architecture_of(properties) == architecture


def run(x: torch.Tensor, fns=(_square,), others=(None,), scale=2.0) -> torch.Tensor:
    y = torch.empty_like(x)
    launch(_add_kernel, cdiv(x.numel(), 16), (x, y, others, x.numel(), scale), {"BLOCK": 16, "FNS": fns})
    return y


def test_runs_every_program_with_tuples_of_functions_and_operands(device: torch.device) -> None:
    x = torch.randn(37, device=device)
    other = torch.randn(37, device=device)
    torch.testing.assert_close(run(x, (_square, _square), (None, other)), (2 * x) ** 4 + other)


def test_an_empty_grid_launches_nothing(device: torch.device) -> None:
    assert run(torch.empty(0, device=device), (_broken,)).shape == (0,)


def test_fake_tensors_are_never_launched(gpu: Kernel) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        launch(gpu, 1, (torch.empty(64), BUFFER), {"B": 1})
    assert gpu.launches == []


@pytest.mark.filterwarnings("error::UserWarning")
def test_on_fake_tensors_shapes_come_out(device: torch.device) -> None:
    gelu, seed = ACTIVATIONS["gelu"], torch.tensor(3, device=device)
    k, ones = pointwise, functools.partial(torch.ones, device=device)

    def everything() -> list[torch.Tensor | None]:
        x, row, t, packed, statistics = ones(3, 8), ones(8), ones(3, 8), ones(3, 16), ones(3)
        return [
            *k.pointwise(x, k.Chain(k.emit(gelu), k.dact(gelu), k.column_sum()), (t, t)),
            *k.pointwise(x, k.Chain(k.bias(), k.store(), k.act(gelu), k.dropout(0.1), k.add()), (row, seed, t)),
            *k.pointwise(packed, k.Chain(k.gated(gelu))),
            *k.pointwise(x, k.Chain(k.emit_gated(gelu), k.dgated(gelu), k.column_sum()), (packed, packed)),
            *norm_fwd(x, row, row, 1e-5, residual=x),
            *norm_bwd(x, x, statistics, statistics, row, dweight=x.dtype, dbias=x.dtype),
        ]

    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = everything()
    for ours, real in zip(fake, everything(), strict=True):
        if ours is None or real is None:
            assert ours is real is None
            continue
        assert isinstance(ours, FakeTensor)
        assert (ours.shape, ours.dtype, ours.stride()) == (real.shape, real.dtype, real.stride())


def test_refuses_a_grid_beyond_int32(device: torch.device) -> None:
    x = torch.zeros(1, device=device)
    with pytest.raises(ValueError, match="at most 2147483647"):
        launch(_add_kernel, 2**31, (x, x, (None,), 1, 1.0), {"BLOCK": 16, "FNS": (_square,)})


def test_refuses_tensors_on_two_devices(device: torch.device) -> None:
    x = torch.zeros(4, device=device)
    with pytest.raises(ValueError, match=r"one device, got .*meta"):
        launch(_add_kernel, 1, (x, x.to("meta"), (None,), 4, 1.0), {"BLOCK": 16, "FNS": (_square,)})


@pytest.mark.skipif(DEVICE.type == "cuda", reason="about the interpreter")
def test_a_failing_kernel_raises_what_failed() -> None:
    with pytest.raises(AttributeError, match="no_such_method"):
        run(torch.zeros(4), (_broken,))


class Compiled:
    """A compiled kernel's replacement."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.runs: list[tuple] = []

    def run(self, *args: object) -> None:
        self.runs.append(args)


class Kernel:
    """A `JITFunction`'s replacement, which counts its launches."""

    __name__ = "kernel"
    pre_run_hooks = ()

    def __init__(self) -> None:
        self.launches: list[dict] = []
        self.compiled = Compiled()

    def __getitem__(self, grid: tuple[int, ...]):
        def go(*args: object, **kwargs: object) -> Compiled:
            self.launches.append(kwargs)
            return self.compiled

        return go


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """The compiled path with a stand-in for the kernel and the driver."""
    monkeypatch.setattr(_launch, "JITFunction", Kernel)
    monkeypatch.setattr(_launch, "_direct", lambda: True)
    monkeypatch.setattr(_launch, "_compiled", {})
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    return Kernel()


def test_the_second_launch_goes_straight_to_the_compiled_kernel(gpu: Kernel) -> None:
    x = torch.zeros(64)
    for _ in range(3):
        launch(gpu, 5, (x, 64, 1.5), {"BLOCK": 16}, num_warps=2, num_stages=1)
    assert gpu.launches == [{"BLOCK": 16, "num_warps": 2, "num_stages": 1}]
    assert gpu.compiled.runs == [(5, 1, 1, 7, "function", "metadata", None, None, None, x, 64, 1.5, 16)] * 2


BUFFER = torch.zeros(64)
OTHER_CLASSES = {
    "dtype": ((BUFFER.to(torch.int32), 64, (BUFFER,)), {"B": 1}),
    "alignment": ((BUFFER[1:], 64, (BUFFER,)), {"B": 1}),
    "alignment in a tuple": ((BUFFER, 64, (BUFFER[1:],)), {"B": 1}),
    "divisibility": ((BUFFER, 63, (BUFFER,)), {"B": 1}),
    "one": ((BUFFER, 1, (BUFFER,)), {"B": 1}),
    "width": ((BUFFER, 2**31, (BUFFER,)), {"B": 1}),
    "none": ((BUFFER, 64, (None,)), {"B": 1}),
    "number for tensor": ((BUFFER, 64, (64,)), {"B": 1}),
    "bool": ((BUFFER, True, (BUFFER,)), {"B": 1}),
    "constexpr": ((BUFFER, 64, (BUFFER,)), {"B": 2}),
    "constexpr of another type": ((BUFFER, 64, (BUFFER,)), {"B": True}),
    "constexpr tuple": ((BUFFER, 64, (BUFFER,)), {"B": (1,)}),
}


@pytest.mark.parametrize("name", OTHER_CLASSES)
def test_a_launch_that_compiles_differently_has_its_own_entry(gpu: Kernel, name: str) -> None:
    launch(gpu, 1, (BUFFER, 64, (BUFFER,)), {"B": 1})
    args, constexprs = OTHER_CLASSES[name]
    launch(gpu, 1, args, constexprs)
    assert len(gpu.launches) == 2


def test_a_constexpr_of_another_sign_has_its_own_entry(gpu: Kernel) -> None:
    for zero in (0.0, -0.0, 0.0):
        launch(gpu, 1, (BUFFER,), {"B": (zero,)})
    assert len(gpu.launches) == 2


def test_on_amd_tensors_in_more_than_2_gib_have_entries_of_their_own(
    gpu: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_launch, "_SMALL", 2**31 - 1)
    small, large = (torch.empty(count, dtype=torch.int8, device="meta") for count in (2**31 - 1, 2**31))
    for x in (small, small, large, large, large[:64]):
        launch(gpu, 1, (x,), {"B": 1})
    assert len(gpu.launches) == 2


@pytest.mark.parametrize("options", [{"num_warps": 8}, {"num_stages": 2}, {"maxnreg": 128}])
def test_compiler_options_are_part_of_the_key(gpu: Kernel, options: dict[str, int]) -> None:
    launch(gpu, 1, (BUFFER,), {"B": 1})
    launch(gpu, 1, (BUFFER,), {"B": 1}, **options)
    assert len(gpu.launches) == 2


def test_other_numbers_of_the_same_class_share_an_entry(gpu: Kernel) -> None:
    launch(gpu, 1, (BUFFER, 64, 1.0), {"B": 1})
    launch(gpu, 9, (BUFFER[16:], 128, 2.0), {"B": 1})
    assert len(gpu.launches) == 1


def test_a_tensor_on_another_device_is_launched_there(gpu: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []

    class Guard:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            entered.append(self.index)

        def __exit__(self, *exception: object) -> None:
            entered.append(-1)

    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 1)
    launch(gpu, 1, (BUFFER,), {"B": 1})
    assert entered == [1, -1]


@pytest.mark.parametrize("when", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_sees_every_launch(when: str, gpu: Kernel) -> None:
    def hook(metadata: object) -> None:
        pass

    launch(gpu, 1, (BUFFER,), {"B": 1})
    chain = getattr(triton.knobs.runtime, when)
    chain.add(hook)
    try:
        launch(gpu, 1, (BUFFER,), {"B": 1})
    finally:
        chain.remove(hook)
    assert len(gpu.launches) == 2


def test_this_triton_takes_the_direct_path() -> None:
    assert _launch._direct()
