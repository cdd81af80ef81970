"""Converted models of Hugging Face with adapters, the Trainer, checkpointing and generation."""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqfuse as sf
from tests.integrations.test_altered import LLAMA

from .comparing import assert_equal
from .families import VOCABULARY, randomized, transformers
from .residual import chains

# Deprecation warnings between other packages.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
_SIZES = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
TOKENS = torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))


def llama(layers: int = 1) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=64, **_SIZES,
    )  # fmt: skip
    return randomized(transformers.LlamaForCausalLM(config)).double()


def passes(model: Any) -> list[Tensor | None]:
    """Loss, logits and gradients."""
    model.zero_grad()
    out = model(input_ids=TOKENS, labels=TOKENS)
    out.loss.backward()
    return [out.loss.detach(), out.logits.detach(), *(p.grad for p in model.parameters())]


class Kept(logging.Handler):
    """Logged messages, as a list."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.mark.parametrize("checkpointing", [pytest.param(False, id="gpt2"), pytest.param(True, id="checkpointed")])
def test_a_warning_that_is_given_once_breaks_no_graph(checkpointing: bool):
    """GPT-2 warns of its loss; a model whose `use_cache` is left on warns that checkpointing turns it off."""
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=16, **_SIZES)
    model = llama() if checkpointing else randomized(transformers.GPT2LMHeadModel(config)).double().eval()
    if checkpointing:
        model.activation_checkpointing_enable()
    ignored = torch._dynamo.config.ignore_logger_methods  # pyright: ignore[reportPrivateUsage]
    before = set(ignored)
    expected = passes(model)
    conversion = sf.convert(model)
    logged = logging.getLogger("torch._dynamo.metrics_context")
    logged.addHandler(handler := Kept())
    assert_equal(passes(model), expected)
    logged.removeHandler(handler)
    assert not handler.records
    assert "graph break" not in str(conversion)
    assert {graph.name.partition(",")[0] for graph in conversion.graphs} == {"graph 0"}
    assert ignored == before


@pytest.mark.parametrize(
    "before",
    [
        pytest.param(False, id="adapters and then converted", marks=pytest.mark.full),
        pytest.param(True, id="converted and then adapters"),
    ],
)
def test_adapters_of_peft_train_as_without_the_conversion(before: bool):
    peft = pytest.importorskip("peft")
    kind = {"r": 2, "lora_dropout": 0.0, "init_lora_weights": False, "target_modules": ["q_proj", "gate_proj"]}

    def adapted(model: nn.Module) -> Any:
        torch.manual_seed(1)
        return peft.get_peft_model(model, peft.LoraConfig(**kind)).double()

    model, plain = llama(), llama()
    if before:
        conversion = sf.convert(model)
        passes(model)
    model, plain = adapted(model), adapted(plain)
    if not before:
        conversion = sf.convert(model)
    wanted = passes(plain)
    assert_equal(passes(model), wanted)
    assert chains(conversion)
    for each in (model, plain):
        each.merge_adapter()
    assert_equal([model(TOKENS).logits.detach()], [plain(TOKENS).logits.detach()])


@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.full), True])
def test_the_trainer_has_the_losses_that_it_has_without_the_conversion(checkpointing: bool):
    pytest.importorskip("accelerate")
    data = [{"input_ids": t, "labels": t} for t in torch.randint(3, VOCABULARY, (6, 7))]

    def losses(model: Any) -> list[float]:
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                folder, max_steps=3, per_device_train_batch_size=2, logging_steps=1, report_to=[], use_cpu=True,
                save_strategy="no", disable_tqdm=True, learning_rate=1e-2, gradient_checkpointing=checkpointing,
                gradient_checkpointing_kwargs={"use_reentrant": False},
            )  # fmt: skip
            trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
            trainer.train()
            return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    model = llama()
    keys, plain = list(model.state_dict()), losses(llama())
    conversion = sf.convert(model)
    assert losses(model) == pytest.approx(plain, rel=1e-6)
    assert len(plain) == 3
    assert chains(conversion)
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_gives_the_tokens_that_it_gives_without_the_conversion(cache: str):
    plain = llama().eval()
    model = copy.deepcopy(plain)
    conversion = sf.convert(model)
    how = {"max_new_tokens": 5, "do_sample": False, **({"cache_implementation": cache} if cache == "static" else {})}
    assert torch.equal(model.generate(TOKENS, **how), plain.generate(TOKENS, **how))
    assert chains(conversion)
    # One graph of the prompt, one of a token; transformers 5.24 adds one when the length of the cache becomes dynamic.
    assert len(conversion.graphs) in (2, 3)


# Dropout draws other numbers, a model in parts on two devices or of two dtypes does not run, and Dynamo captures what
# a module inside runs, compiled or not.
_OTHER = {"dropout of attention", "a part on another device", "a part in another dtype", "rounded angles", "compiled"}
KINDS = [name for name in LLAMA if name not in _OTHER]
_LAST = ("an adapter", "a layer less", "a norm of another kind")  # changes by other libraries are gone then
_RAISING = ("a pre-hook", "the size of a head", "a bias", "a weight of another shape", "no weight")  # nothing runs then
_RUNNING = [name for name in KINDS if name not in _RAISING]
GROUPS = [*(sorted(_RUNNING[i::6], key=lambda name: name in _LAST) for i in range(6)), list(_RAISING)]


def altered(model: Any, names: Sequence[str]) -> None:
    torch.manual_seed(2)  # a spectral norm draws when it is applied
    for name in names:
        LLAMA[name][0](model)


def outcome(model: Any) -> list[Tensor | None] | str:
    try:
        return passes(model)
    except (AttributeError, RuntimeError, TypeError) as error:
        return type(error).__name__


def assert_altered_models_are_equal(names: Sequence[str], after: bool) -> None:
    model, plain = llama(2), llama(2)
    altered(plain, names)
    if not after:
        altered(model, names)
    sf.convert(model)
    if after:
        passes(model)
        altered(model, names)
    found, wanted = outcome(model), outcome(plain)
    assert isinstance(found, str) == isinstance(wanted, str) == any(map(_RAISING.__contains__, names)), (found, wanted)
    if not isinstance(wanted, str) and not isinstance(found, str):
        assert_equal(found, wanted)


@pytest.mark.parametrize("names", GROUPS, ids=", ".join)
def test_altered_models_give_their_own_numbers(names: list[str]):
    assert_altered_models_are_equal(names, after=False)


@pytest.mark.full
@pytest.mark.parametrize("after", [False, True], ids=["before", "after the first call"])
@pytest.mark.parametrize("name", KINDS)
def test_a_model_altered_in_one_way_gives_its_own_numbers(name: str, after: bool):
    assert_altered_models_are_equal([name], after)
