"""Identity."""

from torch import nn

from seqfuse import ops
from seqfuse.testing import seeded_randn

from .passes import check_twin


def test_hands_on_what_it_gets():
    op, x = ops.Identity(54, unused=True), seeded_randn((3, 5), 0)
    y, saved = op.fwd(x)
    assert y is x
    assert op.bwd(x, saved) == (x, {})
    check_twin(op, nn.Identity(), x)
