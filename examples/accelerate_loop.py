"""A loop with accelerate: ``accelerate launch accelerate_loop.py FOLDER STEPS``, with STREAMPACK_ENDPOINT set.

It writes a checkpoint into FOLDER every 4 steps, resumes from it when started again, and prints a line per step.
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

import streampack

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
torch.set_num_threads(1)
config = LlamaConfig(
    vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    max_position_embeddings=512,
)  # fmt: skip
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
accelerator = Accelerator()
model, optimizer = accelerator.prepare(model, optimizer)  # not the loader: it knows its rank
ranks = {"dp": accelerator.num_processes, "dp_rank": accelerator.process_index}

with streampack.connect(mesh=ranks, format="hf", device=accelerator.device) as loader:
    accelerator.register_for_checkpointing(loader)
    saved = sorted(folder.glob("step-*[0-9]"))
    if saved:
        accelerator.load_state(str(saved[-1]))
    for step in loader.steps():
        total = torch.zeros((), device=accelerator.device)
        for batch in step:
            loss = model(**batch, num_items_in_batch=step.num_loss_tokens).loss
            accelerator.backward(loss * accelerator.num_processes)  # DDP takes the mean over ranks
            total += loss.detach()
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = accelerator.reduce(total)  # the sum over ranks
        if accelerator.is_main_process:
            line = {"step": step.index, "loss": total.item(), "grad_norm": norm.item(), "digest": step.digest}
            print(json.dumps(line), flush=True)
        if (step.index + 1) % 4 == 0:
            made = folder / f"step-{step.index + 1:06}"
            accelerator.save_state(f"{made}.part")
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                Path(f"{made}.part").rename(made)  # a killed save leaves no half checkpoint
                loader.commit(step.index)
        if step.index + 1 == steps:
            break
