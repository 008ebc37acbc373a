"""Megatron-Core as Megatron-LM's training runs it: ``python megatron_external.py FOLDER STEPS``, on the CPU.

In Megatron-LM's own ``pretrain_gpt.py`` all that is needed is ``pretrain(config, datasets_provider(get_args), ...)``.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron_without_gpu import tiny_model  # type: ignore[import-not-found]

from streampack.integrations.megatron import datasets_provider
from streampack.views.megatron import packed_seq_params


def forward_step(data: Any, model: Any) -> Any:
    batch = next(data)
    packed, mask = PackedSeqParams(**packed_seq_params(batch)), batch["loss_mask"]
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=packed)
    loss, tokens = (losses * mask).sum(), mask.sum().int()
    return loss, lambda loss: (loss, tokens, torch.stack([loss.detach(), tokens]))


folder, steps = Path(sys.argv[1]), int(sys.argv[2])
last = folder / "latest_checkpointed_iteration.txt"
start = int(last.read_text()) if last.exists() else 0
shape = {"micro_batch_size": 1, "seq_length": 128}
args = SimpleNamespace(iteration=start, save=folder, global_batch_size=4, sft=True, **shape)
model, optimizer = tiny_model(folder / f"{start}.pt")
data = RerunDataIterator(datasets_provider(lambda: args)()[0])
for step in range(start, steps):
    reports = get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=data, model=model, num_microbatches=4, **shape
    )
    optimizer.step()
    optimizer.zero_grad()
    loss, tokens = sum(reports).tolist()
    print(json.dumps({"step": step, "loss": loss / tokens}), flush=True)
    if (step + 1) % 4 == 0:
        at = folder / f"iter_{step + 1:07d}/mp_rank_00"
        at.mkdir(parents=True, exist_ok=True)
        torch.save({"dataloader_state_dict": data.iterable.save_state()}, at / "train_dataloader_dprank000.pt")
        torch.save([model.state_dict(), optimizer.state_dict()], folder / f"{step + 1}.pt")
        last.write_text(str(step + 1))
