import torch
from hypothesis import given

from seqfuse.testing import LAYOUTS, TensorSpec
from seqfuse.testing import strategies as sfst
from tests.processes import Script


@given(sfst.specs())
def test_specifications_build_what_they_say(spec: TensorSpec):
    x = spec.build()
    assert (tuple(x.shape), x.dtype) == (spec.shape, spec.dtype)
    assert spec.layout in LAYOUTS
    assert 1 <= len(spec.shape) <= 5
    assert x.isfinite().all()


@given(sfst.shapes(columns=(8,), leading=(1, 2), empty=True))
def test_shapes_stay_within_their_bounds(shape: tuple[int, ...]):
    assert shape[-1] in (0, 8)
    assert 2 <= len(shape) <= 3
    assert torch.Size(shape).numel() <= 1 << 13


@given(
    sfst.tensors(
        shape=sfst.shapes(columns=(4,)), dtype=sfst.dtypes((torch.float16,)), layout=sfst.layouts(("strided",))
    )
)
def test_tensors_follow_the_given_strategies(x: torch.Tensor):
    assert x.dtype == torch.float16
    assert x.shape[-1] == 4


def child(code: str) -> str:
    done = Script("-c", code, bare=True).done()
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_kit_does_not_import_hypothesis():
    assert child("import sys, seqfuse.testing; print('hypothesis' in sys.modules)").strip() == "False"


def test_strategies_say_how_to_get_hypothesis():
    code = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "try:\n    import seqfuse.testing.strategies\n"
        "except ModuleNotFoundError as error:\n    print(error)"
    )
    assert "needs hypothesis: pip install 'seqfuse[test]'" in child(code)
