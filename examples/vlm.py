"""Fine-tune a vision-language model on chats with images, in one process.

Run it with ``python vlm.py MODEL CHATS.jsonl``. MODEL is the folder of a model with its processor. Each line of CHATS
is a chat::

    {"messages": [{"role": "user", "content": [{"type": "image", "path": "a.jpg"}, {"type": "text", "text": "What?"}]},
                  {"role": "assistant", "content": "A fox."}]}
"""

import argparse
import json

import torch
from transformers import AutoModelForImageTextToText

import streampack

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("chats")
parser.add_argument("--budget", type=int, default=8192, help="tokens of a pack")
parser.add_argument("--packs", type=int, default=8, help="packs of a step")
parser.add_argument("--passes", type=int, default=1)
parser.add_argument("--lr", type=float, default=1e-5)
options = parser.parse_args()

model = AutoModelForImageTextToText.from_pretrained(options.model)
optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
with streampack.local(
    options.chats, tokenizer={"processor": options.model}, budget=options.budget, packs=options.packs,
    passes=options.passes, format="hf",
) as loader:  # fmt: skip
    for step in loader.steps():
        total, patches = 0.0, 0
        for batch in step:
            loss = model(**batch, num_items_in_batch=step.num_loss_tokens).loss
            loss.backward()
            total, patches = total + loss.item(), patches + int(batch.cu_patches[-1])
        optimizer.step()
        optimizer.zero_grad()
        print(json.dumps({"step": step.index, "loss": round(total, 4), "patches": patches}), flush=True)
