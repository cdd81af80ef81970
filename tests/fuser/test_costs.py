"""What a fusion is worth in the place where it stands."""

from __future__ import annotations

from typing import Any

import seqfuse as sf
from seqfuse import ops
from tests.fuser.fusions import BY_NAME, fused_names, tensor


def test_a_joint_fusion_where_nothing_wants_a_gradient_is_worth_its_forward_only() -> None:
    case = BY_NAME["bias_gelu"]

    class Dear(case.inference[0]):
        def saves(self, env: sf.Env) -> Any:
            return sf.Savings(launches=1.5)

    model = sf.Sequential(ops.Bias(5), ops.GeLU(), ops.Bias(5), ops.GeLU(), fusions=(*case.joint, Dear))
    model[0].requires_grad_(False)
    plan = model.plan(tensor(7, 5, grad=False))
    assert fused_names(plan) == (["Dear", "BiasGeLUJoint"], ["BiasGeLUJoint"])
