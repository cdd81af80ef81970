"""The test kit: checks of operations and fusions, an error bound, test inputs, and red zones.

`seqfuse.testing.strategies` has hypothesis strategies and must be imported separately, as it needs hypothesis.
"""

from .compile import compile_kernel
from .fusions import Checked, check_fusion
from .numerics import PARTS, Check, FusedMismatch, Report, assert_fused_close
from .observe import GlobalState, Observer, Pass
from .operations import CheckedOp, check_op
from .poison import Guarded, guarded, poisoned, red_zones
from .probe import NotRun
from .structure import Untouched, assert_bitwise_equal, assert_distinct_storages, named_tensors
from .tensors import EDGES, EXACT, LAYOUTS, REGIMES, TensorSpec, exact, in_regime, laid_out, seeded_randn

__all__ = [
    "EDGES",
    "EXACT",
    "LAYOUTS",
    "PARTS",
    "REGIMES",
    "Check",
    "Checked",
    "CheckedOp",
    "FusedMismatch",
    "GlobalState",
    "Guarded",
    "NotRun",
    "Observer",
    "Pass",
    "Report",
    "TensorSpec",
    "Untouched",
    "assert_bitwise_equal",
    "assert_distinct_storages",
    "assert_fused_close",
    "check_fusion",
    "check_op",
    "compile_kernel",
    "exact",
    "guarded",
    "in_regime",
    "laid_out",
    "named_tensors",
    "poisoned",
    "red_zones",
    "seeded_randn",
]
