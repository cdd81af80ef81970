"""The fixtures that every test of a Triton kernel runs under."""

from tests.triton_fixtures import _bfloat16_as_on_a_gpu as _bfloat16_as_on_a_gpu
from tests.triton_fixtures import _compilers_are_forked as _compilers_are_forked
from tests.triton_fixtures import compiled as compiled
from tests.triton_fixtures import device as device
from tests.triton_fixtures import mutant as mutant
