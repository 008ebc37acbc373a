"""A process that imports VeOmni once, and then runs jobs of ``tests.integration.forks``: ``python -m ... JOBS``.

It is the script of each job, too: ``veomni_process.py PROGRAM CONFIG ARGUMENTS`` runs a user's program, which has the
code of the page, with VeOmni's own trainer. It replaces what VeOmni has for CUDA alone, takes weights in float64, and
prints a line of JSON a step. The dataset ``rows`` reads the file of rows that the environment names, for VeOmni's own
dataloader.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import IterableDataset
from veomni.data.dataset import DATASET_REGISTRY
from veomni.ops.kernels.attention import flash
from veomni.trainer import base
from veomni.trainer.callbacks.base import Callback

from tests.integration import forks
from tests.integration.frameworks.framework_runs import ROWS


def attention_by_sample(
    query: Any, key: Any, value: Any, mask: Any, *, cu_seq_lens_q: Any, softmax_scale: float, **_: Any
) -> Any:
    """Causal attention of each sample by itself, [1, T, heads, D]: what flash-attn computes."""
    assert mask is None or bool(mask.all())
    parts = []
    for begin, end in itertools.pairwise(cu_seq_lens_q.tolist()):
        q, k, v = (each[:, begin:end].transpose(1, 2) for each in (query, key, value))
        parts.append(scaled_dot_product_attention(q, k, v, is_causal=True, scale=softmax_scale, enable_gqa=True))
    return torch.cat(parts, 2).transpose(1, 2)


class Lines(Callback):
    """A line of JSON for each step: its number from 0, its loss, and a digest of its micro-batches in any order."""

    digest = ""

    def on_step_begin(self, state: Any, micro_batches: Any = None, **_: Any) -> None:
        texts = sorted(str(sorted((name, str(value)) for name, value in batch.items())) for batch in micro_batches)
        self.digest = hashlib.sha256(str(texts).encode()).hexdigest()[:16]

    def on_step_end(self, state: Any, loss: float = 0.0, **_: Any) -> None:
        found = torch.tensor(loss, dtype=torch.float64)
        dist.all_reduce(found)
        if os.environ["RANK"] == "0":
            loss = float(found) / dist.get_world_size()
            print()  # ends the line of the progress bar
            print(json.dumps({"step": state.global_step - 1, "loss": loss, "digest": self.digest}), flush=True)


class Rows(IterableDataset[Any]):
    """The rows of a file, in its order, as VeOmni's data transforms return them."""

    def __init__(self, **_: Any) -> None: ...

    def __iter__(self) -> Iterator[Any]:
        for line in Path(os.environ[ROWS]).read_text().splitlines():
            ids = torch.tensor(json.loads(line)["tokens"])
            labels = ids.clone()
            labels[0] = -100
            yield [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}]


def replace() -> None:
    torch.set_num_threads(1)
    torch.set_printoptions(threshold=sys.maxsize)  # type: ignore[no-untyped-call] # digests are of whole tensors
    torch.cpu.get_device_name = lambda *_: "a processor"  # type: ignore[attr-defined]
    memory = ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved", "empty_cache")
    for name in memory:
        setattr(torch.cpu, name, lambda *_: 0)
    torch.cpu.memory_stats = lambda *_: {"num_alloc_retries": 0}  # type: ignore[attr-defined]
    flash._flash_attention_forward = attention_by_sample
    kernels = sys.modules["flash_attn"] = ModuleType("flash_attn")
    kernels.flash_attn_func = kernels.flash_attn_varlen_func = attention_by_sample  # type: ignore[attr-defined]
    build, init = base.build_foundation_model, base.BaseTrainer._init_callbacks

    def built(**arguments: Any) -> Any:
        device = "meta" if arguments["init_device"] == "meta" else "cpu"
        return build(**arguments | {"torch_dtype": "float64", "init_device": device})

    def with_lines(trainer: Any) -> None:
        init(trainer)
        trainer._callbacks.append(Lines(trainer))
        trainer._callbacks.insert(0, trainer._callbacks.pop())

    base.build_foundation_model = built
    base.BaseTrainer._init_callbacks = with_lines
    DATASET_REGISTRY.register("rows", Rows)


def main() -> None:
    replace()
    dist.init_process_group("gloo")
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


def serve() -> None:
    """Run the jobs of this process's argument, each in a fork that has the imports."""
    gc.freeze()
    forks.main()


if __name__ == "__main__":
    main() if sys.argv[1].endswith(".py") else serve()
