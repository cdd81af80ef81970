"""The error bound finds every seeded bug, and accepts kernels that only round differently."""

import pytest
import torch

from seqfuse.testing import REGIMES, FusedMismatch, assert_fused_close

from .chains import CHAINS, VARIANTS, Chain

SEEDS = (0, 10, 20)
MUTANTS = [pytest.param(chain, bug, id=f"{chain.name}: {bug}") for chain in CHAINS.values() for bug in chain.bugs]
CORRECT = [
    pytest.param(chain, change, id=f"{chain.name}: {change}") for chain in CHAINS.values() for change in VARIANTS
]


def alarm(chain: Chain, change: str, regime: str, dtype: torch.dtype, seed: int) -> FusedMismatch | None:
    inputs, unfused, reference = chain.expected(regime, dtype, seed)
    try:
        assert_fused_close(chain.simulate(inputs, change, dtype), unfused, reference)
    except FusedMismatch as mismatch:
        return mismatch
    return None


def test_there_are_as_many_mutants_as_the_rule_was_made_with():
    assert len(MUTANTS) >= 34
    assert len(VARIANTS) == 7


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=["float32+bfloat16", "float32+float16"])
@pytest.mark.parametrize(("chain", "bug"), MUTANTS)
def test_kills_every_seeded_bug_with_float32_and_one_16_bit_dtype(chain: Chain, bug: str, half: torch.dtype):
    for seed in SEEDS:
        assert any(alarm(chain, bug, regime, dtype, seed) for dtype in (half, torch.float32) for regime in REGIMES), (
            seed
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("chain", "change"), CORRECT)
def test_is_silent_on_correct_kernels_in_16_bits(
    chain: Chain, change: str, dtype: torch.dtype, request: pytest.FixtureRequest
):
    for seed in SEEDS if request.config.getoption("--full") else SEEDS[:1]:
        for regime in REGIMES:
            assert alarm(chain, change, regime, dtype, seed) is None


def test_bfloat16_alone_misses_what_float32_finds():
    chain = CHAINS["LayerNorm, Scale"]
    found = {
        dtype: any(alarm(chain, "approximate reciprocal root", regime, dtype, 0) for regime in REGIMES)
        for dtype in (torch.bfloat16, torch.float32)
    }
    assert found == {torch.bfloat16: False, torch.float32: True}


def test_float32_alarms_on_correct_kernels_are_rare_and_do_not_persist():
    # Under an offset or a heavy tail one rounding is shared by a whole row of a weight gradient, which is then one draw
    # and not many: in float32 about 1 case in 150 passes its bound by chance. A bug alarms under every seed, see above.
    cases = [(*pair.values, regime) for pair in CORRECT for regime in REGIMES]
    alarms = [[alarm(chain, change, regime, torch.float32, seed) for seed in SEEDS] for chain, change, regime in cases]
    assert not [case for case, found in zip(cases, alarms, strict=True) if all(found)]
    assert sum(mismatch is not None for found in alarms for mismatch in found) <= 0.02 * len(cases) * len(SEEDS)
