"""Packers of other projects that packages install, each called on tokens as its users call it.

``pip install trl grain`` brings them; without, ``PEERS`` has fewer. Each function packs a whole stream of lengths with
about ``window`` samples in sight, and returns the packs as lists of positions in the order they are emitted, and the
CPU seconds that took. These packers move tokens (here one byte each), ours are given lengths alone: their speeds
are not to be compared with ours, their packs are.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from benchmarks.lengths import I64

Packs = list[list[int]]


def trl_bfd(lengths: I64, budget: int, window: int) -> tuple[Packs, float]:
    """``trl.pack_dataset(strategy="bfd")``, with batches of ``window`` samples in place of its 1,000."""
    import datasets
    import pyarrow as pa
    from trl import pack_dataset

    datasets.disable_progress_bars()
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = pa.LargeListArray.from_arrays(offsets, np.zeros(offsets[-1], np.uint8))
    data = datasets.Dataset(pa.table({"input_ids": tokens}))
    begin = time.process_time()
    packed = pack_dataset(data, budget, "bfd", {"batch_size": window, "keep_in_memory": True})
    seconds = time.process_time() - begin
    return _positions(packed["seq_lengths"], lengths, window), seconds


def _positions(packs: Iterable[list[int]], lengths: I64, window: int) -> Packs:
    """Which samples the lengths in packs are: of equal ones of a block, the oldest first."""
    found: Packs = []
    blocks = (range(at, min(at + window, len(lengths))) for at in range(0, len(lengths), window))
    waiting: dict[int, deque[int]] = defaultdict(deque)
    left = 0
    for pack in packs:
        if not left:
            for i in next(blocks):
                waiting[int(lengths[i])].append(i)
                left += 1
        found.append([waiting[length].popleft() for length in pack])
        left -= len(pack)
    return found


def grain_first_fit(lengths: I64, budget: int, window: int) -> tuple[Packs, float]:
    """``grain.experimental.FirstFitPackIterDataset``."""
    return _grain("FirstFitPackIterDataset", lengths, budget, window)


def grain_best_fit(lengths: I64, budget: int, window: int) -> tuple[Packs, float]:
    """``grain.experimental.BestFitPackIterDataset``."""
    return _grain("BestFitPackIterDataset", lengths, budget, window)


def _grain(name: str, lengths: I64, budget: int, window: int) -> tuple[Packs, float]:
    """With as many bins as ``window`` samples fill, and at least the two that our window holds."""
    import grain

    source = grain.MapDataset.range(len(lengths)).to_iter_dataset(grain.ReadOptions(num_threads=0))

    def sample(i: int) -> dict[str, Any]:
        return {"tokens": np.zeros(lengths[i], np.uint8), "position": np.array([i + 1])}

    bins = max(2, round(window * float(lengths.mean()) / budget))
    options = {"length_struct": {"tokens": budget, "position": budget}, "num_packing_bins": bins, "shuffle_bins": False}
    packer = getattr(grain.experimental, name)(source.map(sample), **options)
    begin = time.process_time()
    rows = [row["position"] for row in packer]
    seconds = time.process_time() - begin
    return [(row[row > 0] - 1).tolist() for row in rows], seconds


ALL: dict[str, tuple[str, Callable[[I64, int, int], tuple[Packs, float]]]] = {
    "trl bfd": ("trl", trl_bfd),
    "grain first fit": ("grain", grain_first_fit),
    "grain best fit": ("grain", grain_best_fit),
}
os.environ.setdefault("HF_HUB_OFFLINE", "1")
PEERS = {name: pack for name, (package, pack) in ALL.items() if importlib.util.find_spec(package)}
MISSING = sorted({package for package, _ in ALL.values() if not importlib.util.find_spec(package)})
