"""Block masks for FlexAttention: computed from boundaries, beside ``create_block_mask``, which evaluates the mask.

    python -m benchmarks.packing.block_masks [--packs 1000]

The tables of random packs of up to 4,096 tokens must be equal, in blocks of 16, 64 and 128. Every second pack has
prefix trees. Then the time of both at 8k and 16k tokens, on the CPU: as torch is called by default, and compiled. Times
are in turns; the ratio is of medians.
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
from streampack.core.trees.prefix_tree import descendant_ends
from streampack.packs.block_tables import BlockTables, fill_block_tables
from streampack.views.block_mask import mask_mod

SIZES = (16, 64, 128)


def bounds_of(rng: np.random.Generator, total: int, mean: float) -> I32:
    """Boundaries of a full pack of samples with lognormal lengths."""
    ends = np.cumsum(np.maximum(1, rng.lognormal(np.log(mean), 1.0, 2 + int(8 * total / mean)).astype(np.int64)))
    return np.array([0, *ends[ends < total], total], np.int32)


def parents_of(rng: np.random.Generator, bounds: I32) -> I32:
    """Random trees, depth first: a segment is below the one before it, below one further up, or begins a tree."""
    found, path = list[int](), list[int]()
    for segment in range(len(bounds) - 1):
        path = path[: int(rng.integers(0, len(path) + 1))] if rng.random() < 0.6 else path
        found.append(path[-1] if path else -1)
        path = [*path, segment]
    return np.array(found, np.int32)


def computed(bounds: I32, block_size: int, parents: I32 | None = None) -> dict[str, torch.Tensor]:
    """The tables by name, from the boundaries."""
    total = int(bounds[-1])
    layout = BlockTables.of(total, total, block_size, parents is not None)
    tables = np.empty(layout.size, np.int32)
    fill_block_tables(tables, bounds, np.arange(total), block_size, parents)
    return layout.cut(torch.from_numpy(tables))


def sees_of(bounds: I32, parents: I32 | None = None) -> Callable[..., torch.Tensor]:
    """Causal attention within each segment, and to the segments above it."""
    sizes = np.diff(bounds)
    documents = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes))
    ends = None if parents is None else torch.from_numpy(np.repeat(descendant_ends(parents), sizes))
    return mask_mod(documents, None, ends)


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
    differ = trees = 0
    for number in range(asked.packs):
        bounds, block_size = bounds_of(rng, int(rng.integers(1, 4097)), rng.choice([8, 60, 500])), SIZES[number % 3]
        total = int(bounds[-1])
        parents = parents_of(rng, bounds) if number % 2 else None
        sees = sees_of(bounds, parents)
        theirs = create_block_mask(sees, None, None, total, total, device="cpu", BLOCK_SIZE=block_size)
        differ += not equal(computed(bounds, block_size, parents), theirs)
        trees += parents is not None
    print(json.dumps({"packs": asked.packs, "with_trees": trees, "packs_that_differ": differ}), flush=True)
    compiled = torch.compile(create_block_mask)
    for total, with_trees in ((8192, False), (8192, True), (16384, False), (16384, True)):
        bounds = bounds_of(rng, total, 600)
        parents = parents_of(rng, bounds) if with_trees else None
        sees = sees_of(bounds, parents)
        ways: dict[str, Callable[[], Any]] = {
            "streampack": partial(computed, bounds, 128, parents),
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
            "tokens": total, "segments": len(bounds) - 1, "trees": with_trees,
            "ms": {name: round(ms, 3) for name, ms in medians.items()},
            "ratio": {name: round(ms / medians["streampack"]) for name, ms in medians.items() if name != "streampack"},
        }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
