"""Convert a Hugging Face model in place, train it under autocast, read the report, generate, and undo the conversion.

The model is a small Llama built from its configuration, so nothing is downloaded; it learns the bytes of this file.
Needs `pip install transformers`.
"""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import seqfuse as sf

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=None, eos_token_id=None,
    )
)  # fmt: skip
keys = list(model.state_dict())

# The object, its class, parameters and state dict stay as they are; the first call captures the model.
conversion = sf.convert(model)
print(f"{type(model).__name__}, same keys: {list(model.state_dict()) == keys}; {conversion}")

# A training loop, and autocast, as without the conversion.
text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(30):
    starts = torch.randint(len(text) - 64, (8,)).tolist()
    batch = torch.stack([text[start : start + 64] for start in starts])
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0 or step == 29:
        print(f"step {step:2}: loss {loss.item():.3f}")

# What was captured, what was fused in each pass, and what runs as before, with the reason.
print(f"\n{conversion}\n")

# `generate` is Hugging Face's own; without the conversion the model gives the same tokens.
model.eval()
prompt = text[None, :24]
tokens = model.generate(prompt, max_new_tokens=16, do_sample=False)
conversion.undo()
same = torch.equal(tokens, model.generate(prompt, max_new_tokens=16, do_sample=False))
print(f"generated {bytes(tokens[0, 24:].tolist())!r}; the same tokens after undo: {same}")
