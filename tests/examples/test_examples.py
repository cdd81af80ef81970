"""Every example runs as a user runs it, and prints the promised output."""

from __future__ import annotations

import math
import re
import runpy
import sys
import types
from pathlib import Path

import pytest
import torch

from tests.processes import Script

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
DEMO = re.compile(
    r"demo: loss (?P<before>[\d.]+) -> (?P<after>[\d.]+) in (?P<steps>\d+) steps, "
    r"max \|fused - unfused\| loss gap (?P<gap>[\d.e-]+), "
    r"saved for backward (?P<kept>[\d.]+) MB \(unfused (?P<kept_unfused>[\d.]+) MB\), "
    r"fused operations (?P<forward>\d+) forward (?P<backward>\d+) backward"
)
TIMES = re.compile(r"demo: time (?P<time>\d+\.\d\d) of eager, lean (?P<lean>\d+\.\d\d)")


ROW = (
    r" *(?P<name>\S+(?: torch)?) +(?P<ms>[\d.]+) ms \((?P<time_of>[\d.]+)\)"
    r" +(?P<saved>[\d.]+) MB \((?P<saved_of>[\d.]+)\)"
    r" +(?P<peak>[\d.]+) MB \((?P<peak_of>[\d.]+)\) +(?P<first>[\d.]+) s +(?P<loss>[\d.]+)"
)


def run(*command: str, folder: Path) -> list[str]:
    """The lines that `python <command>` prints, run outside the repository."""
    done = Script(*command, folder=folder).done()
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "Guards may run slower" not in line]  # on Python 3.13.0
    assert not any("Warning" in line for line in told), done.stderr
    return done.stdout.splitlines()


def demo(lines: list[str]) -> dict[str, float]:
    assert sum(line.startswith("demo: ") for line in lines) == 2
    found, times = DEMO.fullmatch(lines[-2]), TIMES.fullmatch(lines[-1])
    assert found is not None, lines[-2]
    assert times is not None, lines[-1]
    return {name: float(value) for name, value in (found.groupdict() | times.groupdict()).items()}


def number(lines: list[str], start: str) -> float:
    (line,) = (line for line in lines if line.startswith(start))
    return float(line.removeprefix(start).split()[0])


def test_first_sequential(tmp_path: Path) -> None:
    lines = run(str(EXAMPLES / "01_first_sequential.py"), folder=tmp_path)
    assert number(lines, "with the same weights it differs from torch.nn.Sequential by at most ") < 1e-6
    assert number(lines, "step 40: loss ") < 0.7 * number(lines, "step  0: loss ")
    assert "0.3.bias" in next(line for line in lines if line.startswith("keys inside a residual connection: "))
    assert any(line.startswith("Plan for cpu bfloat16, 512 tokens: ") for line in lines)
    saved, lean = re.findall(r"([\d,]+) bytes", next(line for line in lines if 'with memory="lean"' in line))
    assert int(lean.replace(",", "")) < 0.7 * int(saved.replace(",", ""))
    assert number(lines, "fused and unfused differ by at most ") < 0.05  # a bfloat16 rounding


def test_read_a_plan(tmp_path: Path) -> None:
    text = "\n".join(run(str(EXAMPLES / "02_read_a_plan.py"), folder=tmp_path))
    assert "Plan for cpu float32" in text
    there = " ".join(text.partition("Plan for cuda:sm_90 bfloat16")[2].split())
    assert "[ LinearBiasPointwise " in there
    assert "must have one dtype" not in there
    assert "runs eagerly: Mix at 2: not an operation of this library" in text
    assert "GeLU at 8 runs eagerly: it has hooks" in text
    assert "backward: (), saved: 0 bytes" in text
    assert re.search(r"48 operations in segments \[\(0, 1[0-9]\), ", text)  # between fusions


def test_write_an_operation(tmp_path: Path) -> None:
    lines = run(str(EXAMPLES / "03_write_an_operation.py"), folder=tmp_path)
    text = "\n".join(lines)
    assert "Cube and Gain agree with their references in both passes" in text
    assert re.search(r"^GainBias: \d+ cases on \[Gain, Bias\]$", text, re.MULTILINE)
    assert "[ GainBias" in text
    assert "Careless, float32" in text
    assert number(lines, "step 100: loss ") < 0.1 * number(lines, "step   0: loss ")


@pytest.mark.slow
def test_a_hugging_face_model_is_converted_trained_and_generates(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    lines = run(str(EXAMPLES / "07_convert.py"), folder=tmp_path)
    assert lines[0] == "LlamaForCausalLM, same keys: True; nothing captured yet: call the model"
    assert number(lines, "step 29: loss ") < 0.75 * number(lines, "step  0: loss ")
    assert sum(line.startswith("graph ") for line in lines) == 1
    assert "MergedLinear, SwiGLU, Linear" in " ".join(" ".join(lines).split())  # the chain, over several lines
    assert lines[-1].endswith("; the same tokens after undo: True")


def test_low_precision_trains_each_recipe_from_the_seeds_of_bfloat16(tmp_path: Path) -> None:
    data = tmp_path / "text.txt"
    data.write_text("".join(f"{n} and {n + 1} make {2 * n + 1};\n" for n in range(2000)))
    options = ["--data", str(data), "--steps", "12", "--dim", "32", "--layers", "1", "--seeds", "2"]
    lines = run(str(EXAMPLES / "low_precision.py"), *options, folder=tmp_path)
    each = [re.fullmatch(r"(\w+), seed (\d): validation loss ([\d.]+)(, .*)?; (\d) quantized", x) for x in lines[:12]]
    assert [one and one[2] for one in each] == ["0", "1"] * 6
    assert [one and one[5] for one in each] == ["0"] * 2 + ["4"] * 10
    losses = [float(one[3]) for one in each if one]
    assert max(losses) < 5.1 < math.log(256)
    assert losses[0] != losses[1]
    apart = [a - b for a, b in zip(losses[2:], losses[:2] * 5, strict=True)]
    assert 0 < max(map(abs, apart)) < 0.05
    said = [float(one[4].removeprefix(", ")) for one in each[2:] if one]
    assert said == pytest.approx(apart, abs=1.1e-4)
    assert lines[12].startswith(f"bfloat16: {min(losses[:2]):.4f} to {max(losses[:2]):.4f}, mean ")
    within = [re.fullmatch(r"\w+: mean ([\d.]+), [+-][\d.]+, (within|outside) that spread", x) for x in lines[13:18]]
    means = [(a + b) / 2 for a, b in zip(losses[2::2], losses[3::2], strict=True)]
    assert [float(one[1]) for one in within if one] == pytest.approx(means, abs=1.1e-4)
    inside = sum(one is not None and one[2] == "within" for one in within)
    assert lines[18:] == [f"{inside} of 5 recipes end within the spread of 2 seeds of bfloat16"]


@pytest.mark.full  # test_language_model_trains_on_a_file runs by default
def test_language_model_learns_more_than_counts(tmp_path: Path) -> None:
    options = ["--steps", "80", "--dim", "64", "--layers", "1", "--seed", "1"]
    lines = run(str(EXAMPLES / "train_lm.py"), *options, folder=tmp_path)
    found = demo(lines)
    entropy = number(lines, "unigram entropy ")
    assert found["steps"] == 80
    assert found["before"] > 5
    assert found["after"] < 0.95 * entropy
    assert found["after"] == pytest.approx(number(lines, "validation loss "))
    assert found["gap"] < 1e-2
    assert 0 < found["kept"] < 0.65 * found["kept_unfused"]


def test_language_model_trains_on_a_file_and_prints_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    # Structured text: a model that sees the last byte predicts most of the next ones.
    data = tmp_path / "text.txt"
    data.write_text("".join(f"{n} and {n + 1} make {2 * n + 1};\n" for n in range(2000)))
    options = ["--data", str(data), "--steps", "30", "--dim", "32", "--layers", "1", "--plan", "plan.svg"]
    lines = run(str(EXAMPLES / "train_lm.py"), *options, folder=tmp_path)
    found = demo(lines)
    assert [line.split("/")[0].strip() for line in lines if "/30 loss " in line] == [str(3 * i) for i in range(1, 11)]
    assert found["after"] < found["before"]
    assert found["gap"] < 1e-3
    rows = [re.fullmatch(ROW, line) for line in lines]
    table = {row["name"]: {k: float(v) for k, v in row.groupdict().items() if k != "name"} for row in rows if row}
    assert [*table] == ["eager torch", "sf.convert", 'memory="lean"', "seqfuse.nn"]
    eager, default, lean, _ = table.values()
    assert (eager["time_of"], eager["saved_of"], eager["peak_of"]) == (1, 1, 1)
    assert (default["time_of"], lean["time_of"]) == (found["time"], found["lean"])
    assert lean["saved"] == found["kept"] < eager["saved"]
    assert lean["saved"] < lean["peak"] < eager["peak"]  # saved tensors are a fraction of a step's memory
    assert lean["loss"] == pytest.approx(default["loss"], abs=1e-3)
    assert any("sf.convert gives " in line and 'memory="lean" gives ' in line for line in lines)
    assert "chain of 15 operations: Add, LayerNorm, Linear, Attention" in "\n".join(lines)
    assert "operations in" in (tmp_path / "plan.svg").read_text()


@pytest.mark.parametrize("rich", [True, False])
def test_language_model_shows_a_bar_in_a_terminal_where_rich_is_installed(
    rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = runpy.run_path(str(EXAMPLES / "train_lm.py"))["progress"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    if rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich", None)
    run = types.SimpleNamespace(name="lean", losses=[0.5], time=0.009, fusing=True)
    with progress(1) as show:
        show([run, run])
    shown = capsys.readouterr().out
    assert ("1/1 loss 0.500; ms: lean 9, lean 9" in shown) is not rich
    assert ("\u2501" in shown) is rich


@pytest.mark.parametrize("steps", [1, 2, 10, 240])
def test_the_learning_rate_of_the_language_model_ends_at_zero_for_any_number_of_steps(steps: int) -> None:
    demo = runpy.run_path(str(EXAMPLES / "train_lm.py"))
    run = demo["Run"]("eager", torch.nn.Linear(1, 1), steps)
    rates: list[float] = []
    for _ in range(steps):
        rates.append(run.optimizer.param_groups[0]["lr"])
        run.optimizer.step()
        run.schedule.step()
    assert all(0 < rate <= 3e-3 for rate in rates)
    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-12)


def test_the_language_model_is_one_model_as_written_in_torch_and_built() -> None:
    demo = runpy.run_path(str(EXAMPLES / "train_lm.py"))
    torch.manual_seed(0)
    model, built = demo["GPT"](64, 2).eval(), demo["Built"](64, 2).eval()
    built.load(model)
    windows = torch.randint(256, (4, demo["CONTEXT"] + 1))
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in built.parameters())
    losses = model(windows), built(windows)
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for own, other in zip(built.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


@pytest.mark.parametrize(
    ("time", "saved", "sentence"),
    [
        (0.9, 0.5, "it gives 10% less time, 50% less bytes, and costs nothing"),
        (1.1, 0.5, "it gives 50% less bytes, and costs 10% more time"),
        (1.1, 1.004, "it gives nothing, and costs 10% more time"),
    ],
)
def test_the_last_sentence_of_the_demo_says_which_way_it_went(time: float, saved: float, sentence: str) -> None:
    verdict = runpy.run_path(str(EXAMPLES / "train_lm.py"))["verdict"]
    assert verdict("it", {"time": time, "bytes": saved}) == sentence


@pytest.mark.parametrize(
    ("options", "sentence"),
    [("--dim 33", "a positive multiple of 32"), ("--steps 0", "must be positive"), ("--data nowhere", "there is no")],
)
def test_language_model_refuses_options_that_cannot_work(
    options: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_lm.py", *options.split()])
    with pytest.raises(SystemExit):
        runpy.run_path(str(EXAMPLES / "train_lm.py"), run_name="__main__")
    assert sentence in capsys.readouterr().err


@pytest.mark.slow
def test_generation_is_the_same_with_and_without_a_cache(tmp_path: Path) -> None:
    options = ["--seconds", "1", "--bytes", "24", "--prompt", "def f("]
    lines = run(str(EXAMPLES / "generate.py"), *options, folder=tmp_path)
    assert any(line.startswith("def f(") for line in lines)
    rates = re.fullmatch(r"generate: cached (\d+) tokens/s, cache-less (\d+) tokens/s, the same tokens: yes", lines[-1])
    assert rates is not None, lines[-1]
