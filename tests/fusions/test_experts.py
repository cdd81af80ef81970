"""Fusions of experts that save less: sorted tokens and activations are recomputed."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import seqfuse as sf
from seqfuse import ops
from seqfuse.compiler import compiler
from seqfuse.convert.launches import Launches
from seqfuse.fusions import (
    GatedGroupedLinearUnpermute,
    GatedGroupedLinearUnpermuteBoundary,
    GatherGroupedLinear,
    PermuteGroupedLinear,
    RecomputeActivation,
    RecomputeGatedGroupedLinearUnpermute,
    UnpermuteBoundary,
    UnpermuteBoundaryBackward,
    experts,
)
from seqfuse.ops import _grouped, grouped
from seqfuse.saved import copied
from seqfuse.testing import check_fusion, seeded_randn
from seqfuse.testing.cases import Case, Specimen
from seqfuse.testing.judge import judge
from seqfuse.testing.probe import Probe
from tests.selection import in_turn
from tests.watching import bytes_of, saving

DTYPES = [torch.float32, torch.bfloat16]


def drawn(tokens: int, top_k: int) -> Tensor:
    """Experts of tokens, of which one in four has no expert."""
    return torch.randint(-1, 5, (tokens, top_k), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
def test_tokens_are_sorted_again(top_k: int, biased: bool):
    listed = ops.Permute(4, top_k), ops.GroupedLinear(4, 6, 5, bias=biased)
    check_fusion(PermuteGroupedLinear, seeded_randn((40, 6), 0), *listed, experts=drawn(40, top_k), dtypes=DTYPES)


@pytest.mark.parametrize("act", [ops.SwiGLU(), ops.ClampedSwiGLU(0.75, packing="interleaved"), ops.GeLU()], ids=str)
def test_activations_of_experts_are_made_again(act: sf.UnfusedOperation):
    width = 8 // act.narrows
    ends = torch.tensor([11, 11, 33])
    listed = act, ops.GroupedLinear(3, width, 5)
    check_fusion(RecomputeActivation, seeded_randn((40, 8), 0), *listed, offsets=ends, dtypes=DTYPES)


FACTORS = (GatedGroupedLinearUnpermute, RecomputeGatedGroupedLinearUnpermute)
UNITS = [ops.SwiGLU(), ops.ClampedSwiGLU(0.75, packing="interleaved"), ops.GEGLU("tanh", packing="up_gate")]


@pytest.mark.parametrize(
    ("fusion", "unit", "top_k", "dtypes"),
    [*zip(FACTORS * 2, (*UNITS, UNITS[0]), (1, 3, 2, 2), map(in_turn, (0, 1, 1, 0)), strict=True)],
)
def test_factors_are_applied_before_the_gemm(
    fusion: type[sf.JointFusion], unit: sf.Gated, top_k: int, dtypes: Sequence[torch.dtype]
):
    _, order, _ = ops.Permute(4, top_k).fwd(seeded_randn((40, 6), 0), experts=drawn(40, top_k))
    listed = unit, ops.GroupedLinear(4, 6, 5, bias=False), ops.Unpermute()
    x, probs = seeded_randn((40, top_k, 12), 0), seeded_randn((40, top_k), 1)
    check_fusion(fusion, x, *listed, probs=probs, **order, dtypes=dtypes)


def ordered(tokens: int, top_k: int) -> dict[str, Tensor]:
    """Tokens sorted by four experts, with offsets; some experts have none."""
    return ops.Permute(4, top_k).fwd(seeded_randn((tokens, 6), 0), experts=drawn(tokens, top_k))[1]


NORMS = [ops.RMSNorm(5), ops.LayerNorm(5), ops.RMSNorm(5, zero_centered=True)]
BOUNDARIES = [
    (UnpermuteBoundary, ops.Unpermute(), True, 1), (UnpermuteBoundary, ops.Unpermute(None), False, 3),
    (UnpermuteBoundaryBackward, ops.Unpermute(), True, 3), (UnpermuteBoundaryBackward, ops.Unpermute(None), False, 2),
]  # fmt: skip


NORMS_BEHIND = [  # each norm with each fusion once, without factors in one dtype; all of them under --full
    pytest.param(
        *boundary,
        norm,
        in_turn(i) if boundary[1].probs is None else DTYPES,
        marks=[pytest.mark.full] * bool((i + j) % len(NORMS)),
    )
    for i, boundary in enumerate(BOUNDARIES)
    for j, norm in enumerate(NORMS)
]


@pytest.mark.parametrize(("fusion", "unpermute", "fork", "top_k", "norm", "dtypes"), NORMS_BEHIND)
def test_experts_are_summed_where_the_next_norm_begins(
    fusion: Any, unpermute: ops.Unpermute, fork: bool, top_k: int, norm: Any, dtypes: Sequence[torch.dtype]
):
    listed = unpermute, ops.Add("h"), *[ops.Fork("stream")] * fork, norm
    given = {"h": seeded_randn((40, 5), 2), **ordered(40, top_k)}
    given |= {} if unpermute.probs is None else {"probs": seeded_randn((40, top_k), 1)}
    check_fusion(fusion, seeded_randn((40, top_k, 5), 0), *listed, dtypes=dtypes, **given)


def test_only_the_parameters_of_a_norm_behind_experts_need_gradients():
    of_rows = ops.Unpermute(None).fwd(seeded_randn((40, 3, 5), 0), **ordered(40, 3))[1]
    for norm in NORMS:
        _, record = norm.fwd(seeded_randn((40, 5), 2))
        kept = copied(record, [name for name in record.fields if name != "weight"])
        fusion: Any = UnpermuteBoundaryBackward(unpermute=ops.Unpermute(None), add=ops.Add("h"), fork=None, norm=norm)
        names, dy = [name for name, _ in norm.named_parameters()], seeded_randn((40, 5), 3)
        _, grads = fusion.bwd(dy, unpermute=of_rows, norm=kept, needs=frozenset(f"norm.{name}" for name in names))
        expected = norm.bwd(dy, record, needs=frozenset(names))[1]
        torch.testing.assert_close([grads[f"norm.{name}"] for name in names], [expected[name] for name in names])


@pytest.mark.parametrize(
    ("norm", "fork", "top_k", "dtypes"), [(NORMS[0], True, 2, in_turn(0)), (NORMS[1], False, 3, in_turn(1))], ids=str
)
def test_factors_before_the_gemm_and_the_next_norm(norm: Any, fork: bool, top_k: int, dtypes: Sequence[torch.dtype]):
    listed = ops.SwiGLU(), ops.GroupedLinear(4, 6, 5, bias=False), ops.Unpermute(), ops.Add("h")
    listed = *listed, *[ops.Fork("stream")] * fork, norm
    given = {"h": seeded_randn((40, 5), 2), "probs": seeded_randn((40, top_k), 1), **ordered(40, top_k)}
    x = seeded_randn((40, top_k, 12), 0)
    check_fusion(GatedGroupedLinearUnpermuteBoundary, x, *listed, dtypes=dtypes, **given)


def test_a_gemm_of_torch_reads_rows_that_are_sorted():
    model = sf.Sequential(*block(64, 32, 8, 2), fusions=(GatherGroupedLinear,))
    for arch, dtype, used in (("sm_80", torch.bfloat16, 1), ("sm_90", torch.float16, 1), ("sm_90", torch.bfloat16, 0)):
        plan = model.to(dtype).plan(env=sf.Env.of(f"cuda:{arch}", dtype=dtype, tokens=8192))
        assert plan.count("GatherGroupedLinear") == used, plan
    assert {r.reason for r in plan.refused} == {"torch's GEMM of groups is used here, which reads rows that are sorted"}


@pytest.mark.parametrize("fusion", [GatedGroupedLinearUnpermute, PermuteGroupedLinear])
def test_a_wrong_order_is_found(fusion: type[sf.FusedOperation], monkeypatch: pytest.MonkeyPatch):
    right = experts.sorted_rows
    monkeypatch.setattr(experts, "sorted_rows", lambda *given: right(*given).roll(1, 0))
    if fusion is PermuteGroupedLinear:
        x, listed = seeded_randn((40, 6), 0), [ops.Permute(4, 2), ops.GroupedLinear(4, 6, 5)]
        given = {"experts": drawn(40, 2)}
    else:
        x, listed = (
            seeded_randn((40, 2, 12), 0),
            [ops.SwiGLU(), ops.GroupedLinear(4, 6, 5, bias=False), ops.Unpermute()],
        )
        given = {"probs": seeded_randn((40, 2), 1), **ordered(40, 2)}
    with pytest.raises((AssertionError, sf.PluginError)):
        check_fusion(fusion, x, *listed, dtypes=DTYPES[:1], **given)


def test_of_what_is_infinite_another_order_gives_nan(monkeypatch: pytest.MonkeyPatch):
    """`reorders` allows this: an infinite factor of a sum, and of its parts."""
    _, order, _ = ops.Permute(4, 2).fwd(seeded_randn((40, 6), 0), experts=drawn(40, 2))
    listed = [ops.SwiGLU(), ops.GroupedLinear(4, 6, 5, bias=False), ops.Unpermute()]
    x, probs = seeded_randn((40, 2, 12), 0), seeded_randn((40, 2), 1)
    probe = Probe(GatedGroupedLinearUnpermute, Specimen(listed, x, {**order, "probs": probs}, 0), torch.float32)
    assert probe.place() is None
    measured = functools.partial(probe.measure, Case((40, 2, 12), torch.float32, "one_inf"))
    judge(measured, 0)
    monkeypatch.setattr(GatedGroupedLinearUnpermute, "reorders", False)
    with pytest.raises(AssertionError, match="NaN or Inf differs"):
        judge(measured, 0)


@pytest.mark.parametrize(("of", "reason"), [
    ({}, "a bias of the GEMM has the factors of its output"),
    ({"bias": False, "offsets": "others"}, "GEMM and Unpermute have other offsets"),
])  # fmt: skip
def test_a_gemm_with_a_bias_or_other_offsets_keeps_the_factors_of_its_output(of: dict[str, Any], reason: str):
    model = sf.Sequential(
        ops.Route(6, 4, 2), ops.Permute(4, 2), ops.GroupedLinear(4, 6, 12), ops.SwiGLU(),
        ops.GroupedLinear(4, 6, 6, **of), ops.Unpermute(), fusions=FACTORS, memory="lean",
    )  # fmt: skip
    plan = model.plan(env=sf.Env.of("cuda:sm_90", tokens=8192))
    assert reason in {r.reason for r in plan.refused if r.fusion == GatedGroupedLinearUnpermute.__name__}


def test_experts_without_factors_are_not_multiplied():
    """As in Llama 4, whose tokens are multiplied before the experts."""
    listed = ops.Permute(4, 2), ops.GroupedLinear(4, 16, 64, False), ops.SwiGLU(), ops.GroupedLinear(4, 32, 16, False)
    model = sf.Sequential(*listed, ops.Unpermute(None), fusions=FACTORS, memory="lean")
    x = seeded_randn((300, 16), 0).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error", sf.FallbackWarning)
        model(x, experts=drawn(300, 2)).sum().backward()
    assert {r.reason for r in model.plan(x, experts=drawn(300, 2)).refused} == {"Unpermute has no factors"}


def test_a_permute_of_other_offsets_is_refused():
    model = sf.Sequential(
        ops.Permute(4, 2), ops.GroupedLinear(4, 6, 5, offsets="others"), fusions=(PermuteGroupedLinear,), memory="lean"
    )
    ends = torch.tensor([10, 20, 30, 40])
    x = seeded_randn((40, 6), 0).requires_grad_()
    plan = model.plan(x, experts=drawn(40, 2), others=ends)
    assert not plan.count("PermuteGroupedLinear")
    assert {r.reason for r in plan.refused} == {"the extra input linear_offsets is not in the signature of its fwd"}


def block(dim: int, hidden: int, count: int, top_k: int) -> sf.Sequential:
    return sf.Sequential(
        ops.Route(dim, count, top_k), ops.Permute(count, top_k), ops.GroupedLinear(count, dim, 2 * hidden, bias=False),
        ops.SwiGLU(), ops.GroupedLinear(count, hidden, dim, bias=False), ops.Unpermute(),
    )  # fmt: skip


def assert_adds_to_buffers(fusion: type[sf.FusedOperation], model: sf.Sequential, power: int, **near: float) -> None:
    """A fusion that is slower on a CPU, in a model of 6 columns that saves less."""
    x, found = seeded_randn((64, 6), 0), list[list[Tensor]]()
    for only in ((fusion,), ()):
        for p in model.parameters():
            p.main_grad = torch.ones_like(p)
        with sf.fusing(only=only, on_error="raise"):
            assert model.plan(x).count(fusion.__name__) == len(only)
            model(x).pow(power).sum().backward()
        assert all(p.grad is None for p in model.parameters())
        found.append([p.main_grad for p in model.parameters()])  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(*found, **near)


def test_gradients_of_weights_are_added_to_their_buffers():
    torch.manual_seed(0)
    model = block(6, 8, 4, 2)
    model.memory = "lean"
    assert_adds_to_buffers(FACTORS[0], model, 2)


def test_a_block_saves_less_where_it_is_to():
    """For a token and an expert: 2 F; by default 2 H and F more."""
    model, x = block(64, 128, 8, 2), seeded_randn((512, 64), 0).requires_grad_()
    saved: dict[str, int] = {}
    found: dict[str, list[Tensor]] = {}
    for memory in ("fast", "lean"):
        model.memory = memory
        plan = model.plan(x)
        assert plan.memory is not None
        saved[memory] = plan.memory.saved
        leaves = [x, *model.parameters()]
        found[memory] = [*torch.autograd.grad(model(x).square().sum(), leaves)]
    pairs = 4 * 512 * 2
    assert saved["fast"] - saved["lean"] == pairs * (2 * 64 + 128)
    torch.testing.assert_close(found["lean"], found["fast"])


class Named(Launches):
    """Launches, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, out = self.count, super().__torch_dispatch__(func, types, args, kwargs)
        self.names += [func.overloadpacket.__name__] * (self.count - before)
        return out


def launched(model: sf.Sequential, plan: sf.Plan, tokens: int) -> tuple[Named, Named]:
    """Launches of the steps of a plan for a GPU, on fake CUDA tensors, which raise on a read."""
    steps: dict[int, Any] = {}
    channels: dict[str, Tensor] = {}
    with FakeTensorMode(), torch.no_grad():
        for module in model.modules():
            for name, p in [*module._parameters.items()]:
                if p is not None:
                    made = torch.empty(p.shape, dtype=p.dtype, device="cuda")
                    module._parameters[name] = torch.nn.Parameter(made, requires_grad=False)
        x = torch.empty(tokens, model[0].in_features, dtype=torch.bfloat16, device="cuda")
        with Named() as forward:
            for step in plan.forward:
                x, made, saved = step.call(plan.env, x, channels, None)
                channels.update((channel, made[name]) for name, channel in step.writes)
                each = step.fused and not step.joint
                steps |= {
                    p: saved[m[0].partition(".")[0]] if each else saved
                    for p, m in zip(step.covers, step.members, strict=True)
                }
        grads: dict[str, Tensor | None] = {}
        with Named() as backward:
            for step in sorted(plan.backward, key=lambda step: -step.start):
                given = step.constants(plan.env, backward=True) | {"main_grads": {}}
                given |= {f"d_{n}": grads.get(c) for n, c in step.writes if not step.fused}
                names = step.operation.backward_signature
                given = {k: v for k, v in given.items() if k.startswith("d_") or getattr(names, k, False)}
                if step.fused and not step.joint:
                    slots = {m[0].partition(".")[0]: steps[p] for p, m in zip(step.covers, step.members, strict=True)}
                    x, found = step.operation.bwd(x, **slots, **given)
                else:
                    x, found = step.operation.bwd(x, steps[step.start], **given)
                grads |= {channel: found.get(key) for key, channel in step.channel_grads}
    return forward, backward


def test_launches_of_a_dispatch_to_8_experts_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    """Compared with Hugging Face's grouped GEMMs and its loop over experts; nothing is read on the host."""
    for name, run in (("grouped_linear", _grouped._forward), ("grouped_weight_grad", _grouped._weight_grad)):
        monkeypatch.setattr(grouped, name, run)  # launches are counted, not operators
    transformers = pytest.importorskip("transformers")
    moe = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    model, tokens = block(256, 512, 8, 2).bfloat16(), 16384
    plan = model.plan(env=sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, tokens=tokens))
    forward, backward = launched(model, plan, tokens)
    theirs: dict[str, tuple[int, int]] = {}
    for used in ("grouped_mm", "eager"):
        config = transformers.MixtralConfig(
            hidden_size=64, intermediate_size=128, num_local_experts=8, num_experts_per_tok=2,
            experts_implementation=used,
        )  # fmt: skip
        other = moe.MixtralSparseMoeBlock(config).bfloat16().train()
        for p in other.parameters():
            torch.nn.init.normal_(p, std=0.1)
        x = seeded_randn((1, 512, 64), 0, dtype=torch.bfloat16).requires_grad_()
        with Launches() as ahead:
            y = other(x)
        with Launches() as back:
            torch.autograd.grad(y, [x, *other.parameters()], torch.ones_like(y))
        theirs[used] = ahead.count, back.count
    print(f"launches, forward + backward: {forward.count} + {backward.count}; Hugging Face: {theirs}")
    assert (forward.count, backward.count) == (20, 15), (forward.names, backward.names)
    assert forward.count < theirs["grouped_mm"][0] < theirs["eager"][0]
    assert backward.count < theirs["grouped_mm"][1] < theirs["eager"][1]


@pytest.mark.parametrize(("memory", "most"), [("balanced", 0.70), ("lean", 0.45)])
def test_a_converted_block_saves_less_than_the_loop_of_hugging_face(memory: str, most: float):
    transformers = pytest.importorskip("transformers")
    moe = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    config = transformers.MixtralConfig(
        hidden_size=64,
        intermediate_size=128,
        num_local_experts=8,
        num_experts_per_tok=2,
        experts_implementation="eager",
    )
    theirs = moe.MixtralSparseMoeBlock(config).train()
    torch.nn.init.normal_(theirs.gate.weight, std=0.1)
    for p in theirs.experts.parameters():
        torch.nn.init.normal_(p, std=0.1)
    x = seeded_randn((4, 128, 64), 0).requires_grad_()

    def saved() -> int:
        with saving() as kept:
            theirs(x).sum().backward()
        return bytes_of(kept, theirs)

    before = saved()
    sf.convert(theirs, memory=memory)  # pyright: ignore
    theirs(x).sum().backward()
    after = saved()
    print(f"saved for backward, {memory}: {after:,} B, {after / before:.2f} of eager's {before:,} B")
    assert after <= most * before


@pytest.mark.skipif(compiler() is None, reason="no C compiler")
@pytest.mark.parametrize(("tokens", "times"), [(64, 0), (1024, 1)])
def test_balanced_makes_a_gated_unit_again_where_its_bytes_are_worth_the_calls(tokens: int, times: int):
    model = block(64, 128, 8, 2)
    model.memory = "balanced"
    plan = model.plan(seeded_randn((tokens, 64), 0).requires_grad_())
    assert plan.count("RecomputeGatedGroupedLinearUnpermute") == times
