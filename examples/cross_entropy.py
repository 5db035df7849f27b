"""A language model's loss without its logits: they exist for a few rows at a time.

Logits of 16 x 1024 tokens over 50257 classes are 3 GiB in fp32, and cross entropy makes two copies of them.
`chunked_cross_entropy(logits, target)` keeps the logits and saves the copies; `linear_cross_entropy` takes the
last layer too and never makes the logits.

Prints:

    loss ...
    loss ...
    loss ...
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from oomfix import runtime

device = "cuda" if torch.cuda.is_available() else "cpu"
sizes = {"vocab_size": 2000, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.randint(0, 2000, (8, 64), device=device)

for _ in range(3):
    with torch.autocast(device, torch.bfloat16):
        # [samples, tokens, features]; calling `model` itself would make logits [samples, tokens, classes]
        hidden = model.transformer(tokens).last_hidden_state
        loss = runtime.linear_cross_entropy(hidden[:, :-1], model.lm_head.weight, tokens[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.4f}")
