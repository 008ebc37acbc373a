"""Cost of the masks by which models of transformers keep the samples of a pack apart, on a CPU: bytes and time.

``python -m benchmarks.training.hf_masks [BUDGET ...]``. sdpa and eager get a mask of T x T, which transformers makes
once for each call and kind of attention. FlexAttention gets a table of blocks, which streampack computes with the pack.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

import streampack
from streampack.training.masks import block_mask

ROUNDS = 5


def pack(budget: int) -> Any:
    """Return a pack in the format ``hf``, of samples of 500 tokens on average."""
    draw = np.random.default_rng(0)
    rows = [draw.integers(1, 1000, size).tolist() for size in np.minimum(draw.geometric(1 / 500, 400), budget)]
    with streampack.local(rows, budget=budget, format="hf", shuffle=False) as loader:
        return next(iter(loader))


def mask_of(attention: str, batch: Any) -> Any:
    """Return the mask that transformers makes for a batch."""
    from transformers import LlamaConfig
    from transformers.masking_utils import create_causal_mask

    config = LlamaConfig(attn_implementation=attention)
    embeds = torch.empty(1, batch.input_ids.shape[1], 1, dtype=torch.bfloat16)
    return create_causal_mask(config, embeds, None, None, position_ids=batch.position_ids)


def timed(make: Callable[[], Any]) -> tuple[Any, float]:
    """Return a value and the median time to make it, in milliseconds."""
    seconds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        found = make()
        seconds.append(time.perf_counter() - begin)
    return found, 1000 * median(seconds)


def main() -> None:
    """Print a row for each budget."""
    print("| tokens | samples | sdpa (bool) | eager (bfloat16) | flex, tables |\n|---|---|---|---|---|")
    for budget in [int(each) for each in sys.argv[1:]] or [4096, 8192, 16384, 32768]:
        batch, cells = pack(budget), []
        for attention in ("sdpa", "eager"):
            mask, milliseconds = timed(partial(mask_of, attention, batch))
            cells.append(f"{mask.numel() * mask.element_size() / 2**20:,.0f} MiB, {milliseconds:,.0f} ms")
        tables, milliseconds = timed(partial(block_mask, batch))
        parts = [each for each in tables.as_tuple() if isinstance(each, torch.Tensor)]
        size = sum(each.numel() * each.element_size() for each in parts)
        cells.append(f"{size / 2**20:.2f} MiB, {milliseconds:,.1f} ms")
        print(f"| {budget:,} | {batch.num_samples} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
