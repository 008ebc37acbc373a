"""Block masks for FlexAttention: computed from boundaries, beside ``create_block_mask``, which evaluates the mask.

    python -m benchmarks.block_masks [--packs 1000]

The tables of random packs of up to 4,096 tokens must be equal, in blocks of 16, 64 and 128. Then the time of both at 8k
and 16k tokens, on the CPU: as torch is called by default, and compiled. Times are in turns; the ratio is of medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from streampack.core.model.samples import I32
from streampack.packs.block_tables import BlockTables, fill_block_tables
from streampack.views.block_mask import mask_mod

SIZES = (16, 64, 128)


def bounds_of(rng: np.random.Generator, total: int, mean: float) -> I32:
    """Boundaries of a full pack of samples with lognormal lengths."""
    ends = np.cumsum(np.maximum(1, rng.lognormal(np.log(mean), 1.0, 2 + int(8 * total / mean)).astype(np.int64)))
    return np.array([0, *ends[ends < total], total], np.int32)


def computed(bounds: I32, block_size: int) -> dict[str, torch.Tensor]:
    """The tables by name, from the boundaries."""
    total = int(bounds[-1])
    layout = BlockTables.of(total, total, block_size)
    tables = np.empty(layout.size, np.int32)
    fill_block_tables(tables, bounds, np.arange(total), block_size)
    return layout.cut(torch.from_numpy(tables))


def sees_of(bounds: I32) -> Callable[..., torch.Tensor]:
    """Causal attention within each segment."""
    return mask_mod(torch.from_numpy(np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))), None)


def equal(ours: dict[str, torch.Tensor], theirs: BlockMask) -> bool:
    """Return True if all eight tables are equal. In tables of indices, the first ``num_blocks`` entries count."""
    for side in ("kv", "full_kv", "q", "full_q"):
        counts, indices = ours[f"{side}_num_blocks"], ours[f"{side}_indices"]
        other = getattr(theirs, f"{side}_num_blocks")[0, 0], getattr(theirs, f"{side}_indices")[0, 0]
        used = torch.arange(indices.shape[1]) < counts[:, None]
        if not torch.equal(counts, other[0]) or not torch.equal(indices[used], other[1][used]):
            return False
    return True


def timed(call: Callable[[], Any]) -> float:
    """Milliseconds of one call."""
    began = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packs", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=11)
    asked = parser.parse_args()
    rng = np.random.default_rng(0)
    differ = 0
    for number in range(asked.packs):
        bounds, block_size = bounds_of(rng, int(rng.integers(1, 4097)), rng.choice([8, 60, 500])), SIZES[number % 3]
        total = int(bounds[-1])
        theirs = create_block_mask(sees_of(bounds), None, None, total, total, device="cpu", BLOCK_SIZE=block_size)
        differ += not equal(computed(bounds, block_size), theirs)
    print(json.dumps({"packs": asked.packs, "packs_that_differ": differ}), flush=True)
    compiled = torch.compile(create_block_mask)
    for total in (8192, 16384):
        bounds = bounds_of(rng, total, 600)
        sees = sees_of(bounds)
        ways: dict[str, Callable[[], Any]] = {
            "streampack": partial(computed, bounds, 128),
            "create_block_mask": partial(create_block_mask, sees, None, None, total, total, device="cpu"),
            "compiled": partial(compiled, sees, None, None, total, total, device="cpu"),
        }
        for call in ways.values():  # warm, and compile
            call()
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(asked.turns):
            for name, call in ways.items():
                times[name].append(timed(call))
        medians = {name: statistics.median(each) for name, each in times.items()}
        print(json.dumps({
            "tokens": total, "samples": len(bounds) - 1, "ms": {name: round(ms, 3) for name, ms in medians.items()},
            "ratio": {name: round(ms / medians["streampack"]) for name, ms in medians.items() if name != "streampack"},
        }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
