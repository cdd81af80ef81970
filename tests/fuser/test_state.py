"""State dictionaries hold only parameters, load in both directions, and loading one runs no code."""

from __future__ import annotations

import ast
import io
import os
import pickle
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import seqfuse as sf
from seqfuse import ops
from tests.fuser.fusions import PAIR, fused_names, randomized, run, tensor
from tests.fuser.kit import PlainResidual

PACKAGE = Path(sf.__file__).parent


def block(kit: Any, residual: Any) -> list[nn.Module]:
    return [
        kit.LayerNorm(5), kit.Linear(5, 4), kit.ReLU(),
        residual(kit.RMSNorm(4), kit.Linear(4, 4, bias=False), kit.Tanh()), kit.Linear(4, 3),
    ]  # fmt: skip


def pair() -> tuple[sf.Sequential, nn.Sequential]:
    mine = randomized(sf.Sequential(*block(ops, ops.Residual), fusions=PAIR))
    its = nn.Sequential(*block(nn, PlainResidual))
    return mine, its


def same(mine: nn.Module, its: nn.Module) -> None:
    x = tensor(7, 5)
    got, expected = run(mine, x), run(its, x.detach().requires_grad_())
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_states_travel_both_ways_whether_fused_or_not() -> None:
    mine, its = pair()
    x = tensor(7, 5)
    assert fused_names(mine.plan(x))[0] == ["BiasReLU"]
    mine(x).sum().backward()
    assert its.load_state_dict(mine.state_dict(), strict=True) == ([], [])
    same(mine, its)
    fresh, _ = pair()
    with sf.fusing(False):
        assert fresh.load_state_dict(its.state_dict(), strict=True) == ([], [])
    same(fresh, its)


def test_a_state_is_saved_without_pickled_code() -> None:
    mine, its = pair()
    mine(tensor(7, 5))
    stream = io.BytesIO()
    torch.save(mine.state_dict(), stream)
    stream.seek(0)
    its.load_state_dict(torch.load(stream, weights_only=True), strict=True)
    same(mine, its)


def test_safetensors_round_trip(tmp_path: Path) -> None:
    mine, its = pair()
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_model(mine, str(path))
    missing, unexpected = safetensors.torch.load_model(its, str(path))
    assert (list(missing), list(unexpected)) == ([], [])
    same(mine, its)
    assert set(safetensors.torch.load_file(path)) == set(its.state_dict())
    safetensors.torch.save_model(its, str(path))
    other, _ = pair()
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    safetensors.torch.load_model(other, str(path))
    same(other, its)


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_distributed_checkpoint_round_trip(tmp_path: Path) -> None:
    mine, its = pair()
    dcp.save({"model": mine.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    state = {"model": its.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    its.load_state_dict(state["model"], strict=True)
    same(mine, its)


def test_nothing_but_parameters_is_in_any_state() -> None:
    made = [getattr(ops, name) for name in ops.__all__]
    arguments: dict[str, tuple[Any, ...]] = {
        "Attention": (2,), "CrossAttention": (2,), "Embedding": (7, 5), "PositionEmbedding": (7, 5), "QKNorm": (4, 2),
        "MergedLinear": (5, (4, 2)), "LayerScale": (5,), "Transpose": (0, 1), "Clamp": (1.0,),
        "Linear": (5, 4), "Bias": (5,), "LayerNorm": (5,), "RMSNorm": (5,), "Scale": (2.0,), "Reshape": (5, 1),
        "GroupedLinear": (3, 5, 4), "Permute": (3, 2), "Route": (5, 3, 2), "L2Norm": (5,), "ScaledSwiGLU": ("f",),
    }  # fmt: skip
    named = {"RotaryEmbedding": {"heads": 2, "style": "half"}}
    for cls in made:
        operation = cls(*arguments.get(cls.__name__, ()), **named.get(cls.__name__, {}))
        assert list(operation.state_dict()) == [n for n, _ in operation.named_parameters()], cls
        assert list(operation.buffers()) == []
        assert cls.get_extra_state is nn.Module.get_extra_state


def test_extra_state_of_another_library_is_ignored_with_a_warning_and_never_unpickled(tmp_path: Path) -> None:
    mine, its = pair()
    marker = tmp_path / "ran"

    class Malicious:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(marker),)

    blob = torch.frombuffer(bytearray(pickle.dumps(Malicious())), dtype=torch.uint8)
    state = OrderedDict({**randomized(its, 70).state_dict(), "1._extra_state": blob, "3.1._extra_state": blob})
    with pytest.warns(UserWarning, match=r"1\._extra_state"):
        assert mine.load_state_dict(state, strict=True) == ([], [])
    assert "1._extra_state" in state
    assert not marker.exists()
    same(mine, its)


def test_the_package_neither_unpickles_nor_loads_with_code() -> None:
    found: list[str] = []
    for source in sorted(PACKAGE.rglob("*.py")):
        text = source.read_text()
        # The kit pickles its arguments and reads them back.
        if source.parent.name == "testing" or not re.search(r"pickle|shelve|marshal|dill|torch\.load", text):
            continue
        for node in ast.walk(ast.parse(text)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            module = getattr(node, "module", None) or ""
            if {"pickle", "shelve", "marshal", "dill", "cloudpickle"} & {*names, module}:
                found.append(f"{source.name}:{node.lineno}: {ast.unparse(node)}")
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
                if called in ("torch.load", "pickle.loads", "pickle.load") and keywords.get("weights_only") != "True":
                    found.append(f"{source.name}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


def test_no_operation_touches_an_autograd_context_or_a_private_buffer() -> None:
    for source in sorted((PACKAGE / "ops").glob("*.py")):
        names = {n.id for n in ast.walk(ast.parse(source.read_text())) if isinstance(n, ast.Name)}
        assert "ctx" not in names, source.name
