"""Plug-ins: listed without being run, loaded one by one, blamed by name."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import seqfuse as sf
from seqfuse import ops
from seqfuse.errors import PluginError

from .kit import assert_same, draw, passes, randomize

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a distribution with one module and some entry points on a temporary path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    modules: list[str] = []

    def install(name: str, source: str, version: str = "1.2", metadata: bool = True, **points: str) -> None:
        module = name.replace("-", "_")
        modules.append(module)
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
        info = tmp_path / f"{module}-{version}.dist-info"
        info.mkdir()
        if metadata:
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = "".join(f"{point} = {value}\n" for point, value in points.items())
        (info / "entry_points.txt").write_text(f"[seqfuse.fusions]\n{lines}\n[console_scripts]\nx = y:z\n")

    yield install
    for module in modules:
        sys.modules.pop(module, None)


GOOD = """
    import torch
    import seqfuse as sf
    from seqfuse import ops

    class BiasSigmoid(sf.ForwardFusion):
        bias: ops.Bias
        act: ops.Sigmoid

        def fwd(self, x):
            y = torch.sigmoid(x + self.bias.bias)
            return y, {"bias": ops.Bias.Saved(), "act": ops.Sigmoid.Saved(y=y)}

    class SigmoidScale(sf.InferenceFusion):
        act: ops.Sigmoid
        scale: ops.Scale

        def fwd(self, x):
            return torch.sigmoid(x) * self.scale.factor

    both = (BiasSigmoid, SigmoidScale)
    as_list = [BiasSigmoid]
    nothing = ()
    number = 3
    text = "BiasSigmoid"
    mixed = (BiasSigmoid, ops.Bias)
    instance = BiasSigmoid(bias=None, act=None)
    contract = sf.ForwardFusion

    def raising():
        yield BiasSigmoid
        raise OSError("half way")

    generator = raising()
"""


def test_installed_plug_ins_are_listed_and_none_is_run(install: Install):
    install("beta-fusions", "raise AssertionError('it ran')", beta="beta_fusions:both")
    install("alpha-fusions", "raise AssertionError('it ran')", version="3.0", alpha="alpha_fusions")
    found = [p for p in sf.plugins.available() if p.name in ("alpha", "beta")]
    assert [(p.name, p.distribution, p.version, p.value) for p in found] == [
        ("alpha", "alpha-fusions", "3.0", "alpha_fusions"),
        ("beta", "beta-fusions", "1.2", "beta_fusions:both"),
    ]
    assert "alpha_fusions" not in sys.modules
    assert "beta_fusions" not in sys.modules
    assert str(found[1]) == "beta (beta-fusions 1.2, beta_fusions:both)"


def test_an_installed_plug_in_changes_nothing_until_it_is_asked_for(install: Install):
    install("eager-fusions", GOOD, eager="eager_fusions:both")
    default = sf.fusions.default
    model, x = sf.Sequential(ops.Bias(5), ops.Sigmoid()), draw(3, 5)
    assert model.plan(x).count("BiasSigmoid") == 0
    fusions = sf.plugins.load("eager")
    assert [f.__name__ for f in fusions] == ["BiasSigmoid", "SigmoidScale"]
    assert sf.fusions.default is sf.Sequential().fusions is default
    assert model.plan(x).count("BiasSigmoid") == 0
    other = sf.Sequential(*model, fusions=(*fusions, *sf.fusions.default))
    assert other.plan(x).count("BiasSigmoid") == 1
    randomize(other.double())
    assert_same(passes(other, x), passes(model, x))


@pytest.mark.parametrize(("value", "count"), [("both", 2), ("as_list", 1), ("BiasSigmoid", 1), ("nothing", 0)])
def test_an_entry_point_names_a_fusion_or_several(install: Install, value: str, count: int):
    install("some-fusions", GOOD, some=f"some_fusions:{value}")
    loaded = sf.plugins.load("some")
    assert isinstance(loaded, tuple)
    assert [f.__name__ for f in loaded] == ["BiasSigmoid", "SigmoidScale"][:count]
    assert sf.plugins.load("some") == loaded


UNKNOWN_SLOT = """
    import seqfuse as sf
    from seqfuse import ops

    class Odd(sf.BackwardFusion):
        bias: ops.Bias
        act: ops.Sigmoid

        def bwd(self, dy, *, bias, active):
            return dy, {}
"""
BROKEN: dict[str, tuple[str, str, list[str]]] = {
    "it raises": ("raise ValueError('not on this machine')", "x", ["cannot be used: ValueError: not on this machine"]),
    "it lacks a dependency": (
        "import a_module_that_is_not_there",
        "x",
        ["ModuleNotFoundError", "a_module_that_is_not_there"],
    ),
    "it has a syntax error": ("def (:", "x", ["SyntaxError"]),
    "it exits": ("import sys; sys.exit(4)", "x", ["SystemExit"]),
    "it names an unknown slot": (
        UNKNOWN_SLOT,
        "Odd",
        ["PluginError", "'active'", "(bias, act)", "def bwd(self, dy, *, bias, active):"],
    ),
    "the attribute is missing": (GOOD, "Nothing", ["AttributeError", "Nothing"]),
    "a number": (GOOD, "number", ["a fusion set holds fusion classes, not 3"]),
    "a text": (GOOD, "text", ["takes fusion classes", "not the text"]),
    "an operation among them": (GOOD, "mixed", ["holds fusion classes, not", "Bias"]),
    "an instance": (GOOD, "instance", ["holds fusion classes, not"]),
    "an abstract base": (GOOD, "contract", ["ForwardFusion", "so it cannot be used"]),
    "a generator that raises": (GOOD, "generator", ["OSError", "half way"]),
}


@pytest.mark.parametrize(("source", "value", "says"), BROKEN.values(), ids=BROKEN)
def test_a_plug_in_that_cannot_be_loaded_is_named_with_its_version(
    install: Install, source: str, value: str, says: list[str]
):
    install("bad-fusions", source, version="0.7", bad=f"bad_fusions:{value}")
    with pytest.raises(PluginError) as caught:
        sf.plugins.load("bad")
    text = str(caught.value)
    assert caught.value.code == "SF304"
    for words in ("bad (bad-fusions 0.7, bad_fusions:", *says):
        assert words in text, f"{words!r} is not in {text!r}"
    model, x = sf.Sequential(ops.Bias(5), ops.Sigmoid()), draw(3, 5)
    assert model(x).shape == x.shape


def test_what_is_no_name_is_no_plug_in(install: Install):
    install("good-fusions", GOOD, fine="good_fusions:both")
    given: Any = 3
    with pytest.raises(PluginError, match="SF304: no plug-in 3 is installed"):
        sf.plugins.load(given)


def test_a_broken_plug_in_does_not_hide_the_others(install: Install):
    install("bad-fusions", "raise ValueError", bad="bad_fusions:both")
    install("good-fusions", GOOD, good="good_fusions:both")
    with pytest.raises(PluginError):
        sf.plugins.load("bad")
    assert len(sf.plugins.load("good")) == 2
    assert {"bad", "good"} <= {p.name for p in sf.plugins.available()}


def test_a_name_nobody_offers_gets_a_suggestion(install: Install):
    install("good-fusions", GOOD, flashy="good_fusions:both")
    with pytest.raises(PluginError, match="no plug-in 'flashi' is installed") as caught:
        sf.plugins.load("flashi")
    assert caught.value.hint == "did you mean 'flashy'?"
    with pytest.raises(PluginError) as caught:
        sf.plugins.load("zzz")
    assert "available()" in str(caught.value.hint)


def test_a_name_that_two_distributions_offer_is_ambiguous(install: Install):
    install("one-fusions", GOOD, same="one_fusions:both")
    install("two-fusions", GOOD, same="two_fusions:both")
    with pytest.raises(PluginError, match="several distributions offer 'same'") as caught:
        sf.plugins.load("same")
    assert "one-fusions 1.2" in str(caught.value)
    assert "two-fusions 1.2" in str(caught.value)
    assert "one_fusions" not in sys.modules


@pytest.mark.filterwarnings("default")
def test_a_distribution_without_metadata_does_not_break_the_list(install: Install):
    install("bare-fusions", GOOD, metadata=False, bare="bare_fusions:both")
    install("good-fusions", GOOD, good="good_fusions:both")
    listed = {p.name: p for p in sf.plugins.available()}
    assert {"bare", "good"} <= listed.keys()
    assert (listed["bare"].distribution, listed["bare"].version) == ("?", "?")
    assert len(sf.plugins.load("bare")) == 2
