"""Two products and what is between them, of which only the pre-activation is kept."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import fusions, ops
from seqfuse.fusions import LinearActivationLinear, feedforward
from seqfuse.settings import at_all_costs
from seqfuse.testing import check_fusion, seeded_randn
from tests.fusions.triton.fourways import four_ways


def layers(act: sf.UnfusedOperation, *between: sf.UnfusedOperation, bias: bool = True) -> list[sf.UnfusedOperation]:
    inner = 10 if isinstance(act, sf.Gated) else 5
    return [ops.Linear(6, inner, bias=bias), act, *between, ops.Linear(5, 7, bias=False)]


@pytest.mark.parametrize(
    ("act", "between", "bias", "dtype"),
    [
        (ops.SiLU(), (), True, torch.float32),
        (ops.GeLU("tanh"), (ops.Dropout(0.3),), False, torch.bfloat16),
        (ops.SwiGLU(), (), True, torch.bfloat16),
        (ops.SwiGLU(), (ops.Dropout(0.3, "downscale_in_infer"),), False, torch.float32),
    ],
    ids=["activation", "activation and dropout", "gated", "gated and dropout"],
)
def test_takes_the_place_of_what_it_replaces(
    act: sf.UnfusedOperation, between: tuple[ops.Dropout, ...], bias: bool, dtype: torch.dtype, device: torch.device
):
    list_ = [operation.to(device) for operation in layers(act, *between, bias=bias)]
    check_fusion(LinearActivationLinear, seeded_randn((5, 6), 0).to(device), *list_, dtypes=[dtype])


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_with_the_end_of_a_block(bias: bool, device: torch.device):
    list_ = [ops.Linear(6, 5), ops.SiLU(), ops.Linear(5, 6, bias=bias), ops.Dropout(0.3), ops.Add("other")]
    list_ = [operation.to(device) for operation in list_]
    check_fusion(LinearActivationLinear, seeded_randn((5, 6), 0).to(device), *list_, dtypes=[torch.float32])


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_a_residual_may_be_of_another_dtype(dtypes: tuple[torch.dtype, torch.dtype], device: torch.device):
    list_ = [ops.Linear(6, 5), ops.SiLU(), ops.Linear(5, 6), ops.Add("other")]
    model = sf.Sequential(*list_, fusions=LinearActivationLinear, memory="lean").to(device, dtypes[0])
    x, other = (seeded_randn((5, 6), i, dtype=dtype).to(device) for i, dtype in enumerate(dtypes))
    assert model.plan(x, other=other).count("LinearActivationLinear") == 1
    with sf.fusing(on_error="raise"):
        y = model(x, other=other)
        assert y.dtype is torch.float32
        y.sum().backward()


@pytest.mark.parametrize("trained", ["", "0.bias"])
def test_what_was_dropped_stays_so_where_the_model_evaluates_before_the_backward_pass(
    trained: str, device: torch.device
):
    """Of a first product that is frozen the activation is made again, and its bias alone may be trained."""
    model = sf.Sequential(*layers(ops.SiLU(), ops.Dropout(0.3))).to(device)
    model.fusions = (LinearActivationLinear,)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in ("3.weight", trained))
    x, found = seeded_randn((5, 6), 0).to(device), list[list[Tensor | None]]()
    for fused, evaluated in ((True, False), (True, True), (False, False)):
        torch.manual_seed(0)
        model.train().zero_grad()
        with sf.fusing(fused, on_error="raise"), at_all_costs():  # also where as much is saved without it
            assert model.plan(x).count("LinearActivationLinear") == fused
            y = model(x)
            model.train(not evaluated)
            y.backward(seeded_randn((5, 7), 1).to(device))
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    torch.testing.assert_close(found[0], found[2])


def test_trains_to_the_same_gradients(device: torch.device):
    inner = (ops.LayerNorm(12), ops.Linear(12, 36), ops.GeLU("tanh"), ops.Linear(36, 12))
    model = sf.Sequential(ops.Residual(*inner), fusions=(LinearActivationLinear,), memory="lean").to(
        device, torch.bfloat16
    )
    four_ways(model, seeded_randn((19, 12), 0, dtype=torch.bfloat16).to(device), LinearActivationLinear)


class Eager(nn.Module):
    """The block as it is written by hand."""

    def __init__(self, width: int, inner: int, gated: bool) -> None:
        super().__init__()
        self.norm, self.gated = nn.LayerNorm(width), gated
        self.up, self.down = nn.Linear(width, (1 + gated) * inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        z = self.up(self.norm(x))
        if not self.gated:
            return x + self.down(nn.functional.gelu(z, approximate="tanh"))
        gate, up = z.chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


def kept(model: nn.Module, x: Tensor) -> int:
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(t: Tensor) -> Tensor:
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return sum(storage.nbytes() for at, storage in storages.items() if at not in own)


@pytest.mark.parametrize("gated", [False, True], ids=["GeLU", "SwiGLU"])
def test_a_block_keeps_little_more_than_half_of_what_eager_keeps(gated: bool, device: torch.device):
    act = ops.SwiGLU() if gated else ops.GeLU("tanh")
    up = ops.Linear(32, 256 if gated else 128)
    list_ = (ops.LayerNorm(32), up, act, ops.Linear(128, 32))
    # The costs of a CPU favor torch's own products.
    rules = (LinearActivationLinear, *fusions.triton)
    model = sf.Sequential(ops.Residual(*list_), fusions=rules, memory="lean").to(device, torch.bfloat16)
    x = seeded_randn((64, 32), 0, dtype=torch.bfloat16).to(device).requires_grad_()
    plan = model.plan(x)
    assert plan.count("LinearActivationLinear") == 1, plan
    ours, theirs = kept(model, x), kept(Eager(32, 128, gated).to(device, torch.bfloat16), x)
    assert ours <= 0.65 * theirs
    assert plan.memory.saved == ours
    # Products in Triton kernels are among the FLOPs.
    assert plan.memory.flops == 2 * 64 * (32 * up.out_features + 128 * 32)


def test_is_used_where_it_was_asked_for_and_not_by_default():
    env = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=8192)
    for act, factor in ((ops.GeLU, 1), (ops.SwiGLU, 2)):
        list_ = [ops.Residual(ops.LayerNorm(1024), ops.Linear(1024, 4096 * factor), act(), ops.Linear(4096, 1024))]
        rules = LinearActivationLinear, *fusions.triton, *fusions.aten
        asked = sf.Sequential(*list_, *list_, fusions=rules, memory="lean").bfloat16()
        assert asked.plan(env=env).count("LinearActivationLinear") == 2
        unasked = sf.Sequential(*list_).bfloat16().plan(env=env)
        assert unasked.count("LinearActivationLinear") == 0


def test_what_keeps_its_output_is_refused():
    model = sf.Sequential(*layers(ops.ReLU()), fusions=LinearActivationLinear, memory="lean")
    (refusal,) = model.plan(env=sf.Env.of("cuda:sm_90")).refused
    assert refusal.reason == "ReLU saves its output, which the GEMM after it does too"


MUTANTS = {
    "another mask": ("mask(self.dropout, saved.seed, saved.p)", "mask(self.dropout, saved.seed, saved.p / 2)"),
    "no mask in what is made again": ("return h if self.dropout is None else", "return h if True else"),
    "the wrong input of a gradient": ("weight_grad(dz, saved.x,", "weight_grad(dz, saved.x.abs(),"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_fusion_is_found(name: str, device: torch.device, mutant: Callable[..., ModuleType]):
    changed = mutant(feedforward, *MUTANTS[name]).LinearActivationLinear
    list_ = [operation.to(device) for operation in layers(ops.SiLU(), ops.Dropout(0.3))]
    with pytest.raises((AssertionError, sf.PluginError)):
        check_fusion(changed, seeded_randn((5, 6), 0).to(device), *list_, dtypes=[torch.float32])
