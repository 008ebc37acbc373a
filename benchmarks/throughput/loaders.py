"""Measure the packing loaders of other projects on the same samples, each written as its users would.

All give packs of 8192 tokens as torch tensors, int64 ``input_ids``, ``labels`` (shifted, -100 where none is) and
``position_ids``, out of the same 40,000 samples held in memory (int32 arrays, lognormal, mean 500), or out of tar
files of them. Settings are the best that were found: two workers, since there are two producers; eight items
prefetched by each; WebDataset's members decoded by numpy itself, not by its ``decode()``, which asks more questions.
A worker's tensors cross to the trainer one by one, so what is in an item matters most: ``a pack`` is what a step of
packs is made of, as streampack's are; ``8 packs`` are stacked in the worker, for a trainer that takes [8, 8192].

Tokens a second are counted between the first and the last item: starting the workers is not. TRL packs before it
trains: all of that counts, and tensors are made in the training process. Each library runs in a process of its own.
"""

from __future__ import annotations

import importlib.util
import io
import multiprocessing
import os
import resource
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.processes import START_TIMEOUT_S, Processes
from benchmarks.traffic import PACK_TOKENS, Traffic

Samples = list[NDArray[np.int32]]
Item = dict[str, Any]
NUM_SAMPLES = 40_000
WORKERS, PREFETCH, STACKED, SHARDS = 2, 8, 8, 8
GRAIN_BINS = 62
"""As many packs as 1,024 samples fill: the window that streampack has."""
_POSITIONS = np.arange(PACK_TOKENS)


def samples_of(count: int) -> Samples:
    """The samples, int32 [n] each."""
    lengths = Traffic().draw(0, 500 * NUM_SAMPLES)[:count]
    tokens = np.random.default_rng(0).integers(0, 50_000, int(lengths.sum()), np.int32)
    return np.split(tokens, np.cumsum(lengths)[:-1])


def measure(seconds: float, samples: int = NUM_SAMPLES) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Measure each installed loader for at most ``seconds``; return figures by loader, and a line for each missing one.

    Figures are tokens a second, and CPU milliseconds a million tokens, workers included.
    """
    found, missing = {}, []
    for library, (loaders, install) in LIBRARIES.items():
        if importlib.util.find_spec(library) is None:
            missing.append(f"{library} is not installed, and left out: pip install {install}")
            continue
        with Processes() as processes:
            report = processes.start(library, _run, library, seconds, samples)
            for name in loaders:
                found[name] = processes.receive(report, START_TIMEOUT_S + 20 * seconds)
                speed = found[name]["tokens_per_second"]
                print(f"{name:<40} {speed / 1e6:7.1f}M tokens/s", flush=True)
    return found, missing


def _run(report: Connection, library: str, seconds: float, count: int) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    multiprocessing.set_start_method("fork", force=True)  # as a training script's loaders have it on Linux
    samples = samples_of(count)
    with tempfile.TemporaryDirectory(prefix="loaders-") as folder:
        for name, loader in LIBRARIES[library][0].items():
            items = loader(samples, Path(folder))
            report.send(_timed(items, np.inf if name in OFFLINE else seconds, whole=name in OFFLINE))


def _timed(items: Iterator[Item], seconds: float, whole: bool) -> dict[str, Any]:
    """The speed of an iterator; ``whole``: its first item counts, and what came before."""
    used, began = _cpu_seconds(), time.perf_counter()
    tokens = before = 0
    first = began if whole else None
    for item in items:
        now = time.perf_counter()
        tokens += int(item["num_tokens"])
        if first is None:
            first, before = now, tokens
        elif now - first > seconds:
            break
    elapsed = time.perf_counter() - (first or began)
    if hasattr(items, "close"):
        items.close()
    return {
        "tokens_per_second": round((tokens - before) / elapsed),
        "tokens": tokens,
        "cpu_ms_per_million_tokens": round((_cpu_seconds() - used) / tokens * 1e9, 2),
    }


def _cpu_seconds() -> float:
    """User and system, of this process and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


# What such a user writes: samples into a pack until one does not fit, and three arrays


def greedy(samples: Iterable[NDArray[np.int32]]) -> Iterator[Samples]:
    pack: Samples = []
    used = 0
    for sample in samples:
        if used + len(sample) > PACK_TOKENS:
            yield pack
            pack, used = [], 0
        pack.append(sample)
        used += len(sample)
    if pack:
        yield pack


def tensors(packs: list[Samples]) -> Item:
    """[packs, 8192], or [8192] of one."""
    import torch

    shape = (len(packs), PACK_TOKENS)
    ids, labels, positions = np.zeros(shape, np.int64), np.full(shape, -100), np.zeros(shape, np.int64)
    total = 0
    for row, pack in enumerate(packs):
        at = 0
        for sample in pack:
            end = at + len(sample)
            ids[row, at:end] = sample
            labels[row, at : end - 1] = sample[1:]
            positions[row, at:end] = _POSITIONS[: len(sample)]
            at = end
        total += at
    arrays = {"input_ids": ids, "labels": labels, "position_ids": positions}
    found: Item = {name: torch.from_numpy(a if len(packs) > 1 else a[0]) for name, a in arrays.items()}
    return found | {"num_tokens": total}


def _items(samples: Iterable[NDArray[np.int32]], stacked: int) -> Iterator[Item]:
    waiting: list[Samples] = []
    for pack in greedy(samples):
        waiting.append(pack)
        if len(waiting) == stacked:
            yield tensors(waiting)
            waiting = []
    if waiting:
        yield tensors(waiting)


def _in_torch(samples: Samples, workers: int, stacked: int) -> Iterator[Item]:
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    class Packed(IterableDataset[Item]):
        def __iter__(self) -> Iterator[Item]:
            worker = get_worker_info()
            mine = samples if worker is None else samples[worker.id :: worker.num_workers]
            return _items(mine, stacked)

    return iter(DataLoader(Packed(), batch_size=None, num_workers=workers, **_ahead(workers)))


def _ahead(workers: int) -> dict[str, Any]:
    return {"prefetch_factor": PREFETCH} if workers else {}


def _in_webdataset(samples: Samples, folder: Path, workers: int, stacked: int) -> Iterator[Item]:
    import webdataset

    shards = [str(folder / f"{number}.tar") for number in range(SHARDS)]
    if not Path(shards[0]).exists():
        for number, shard in enumerate(shards):
            _write_tar(Path(shard), samples[number::SHARDS])

    def tokens(sample: dict[str, bytes]) -> NDArray[np.int32]:
        array: NDArray[np.int32] = np.lib.format.read_array(io.BytesIO(sample["npy"]), allow_pickle=False)
        return array

    data = webdataset.WebDataset(shards, shardshuffle=False).map(tokens).compose(lambda found: _items(found, stacked))
    return iter(webdataset.WebLoader(data, batch_size=None, num_workers=workers, **_ahead(workers)))


def _write_tar(path: Path, samples: Samples) -> None:
    with tarfile.open(path, "w") as archive:
        for number, sample in enumerate(samples):
            buffer = io.BytesIO()
            np.save(buffer, sample)
            info = tarfile.TarInfo(f"{number:06d}.npy")
            info.size = buffer.tell()
            buffer.seek(0)
            archive.addfile(info, buffer)


def _in_grain(samples: Samples, workers: int) -> Iterator[Item]:
    """Packed by first fit in each worker; stacking was no faster. Positions are int32, as Grain makes them."""
    import grain
    import torch

    def sample(ids: NDArray[np.int32]) -> dict[str, NDArray[np.int64]]:
        labels = np.full(len(ids), -100)
        labels[:-1] = ids[1:]
        return {"input_ids": ids.astype(np.int64), "labels": labels}

    options = grain.ReadOptions(num_threads=1 if workers else 0, prefetch_buffer_size=64 if workers else 0)
    rows = grain.experimental.FirstFitPackIterDataset(
        grain.MapDataset.source(samples).map(sample).to_iter_dataset(options),
        length_struct={"input_ids": PACK_TOKENS, "labels": PACK_TOKENS}, num_packing_bins=GRAIN_BINS,
        shuffle_bins=False,
    )  # fmt: skip
    if workers:
        rows = rows.mp_prefetch(
            grain.multiprocessing.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=PREFETCH)
        )
    for row in rows:
        names = {"input_ids": "input_ids", "labels": "labels", "position_ids": "input_ids_positions"}
        yield {name: torch.from_numpy(row[key]) for name, key in names.items()} | {
            "num_tokens": int(np.count_nonzero(row["input_ids_segment_ids"]))
        }


def _packed_by_trl(samples: Samples) -> Any:
    import datasets
    import pyarrow as pa
    from trl import pack_dataset

    offsets = np.cumsum([0, *map(len, samples)])
    data = datasets.Dataset(pa.table({"input_ids": pa.LargeListArray.from_arrays(offsets, np.concatenate(samples))}))
    return pack_dataset(data, PACK_TOKENS, "bfd", {"keep_in_memory": True})


def _in_trl(samples: Samples, alone: bool) -> Iterator[Item]:
    """Packed, and then made into tensors from its Arrow table: its own collator goes over Python lists (0.5M)."""
    import datasets

    datasets.disable_progress_bars()
    _packed_by_trl(samples[:1000])  # what it loads when it is first called is not counted

    def items() -> Iterator[Item]:
        table = _packed_by_trl(samples).with_format("arrow")
        if alone:
            yield {"num_tokens": sum(map(len, samples))}
            return
        for row in range(len(table)):
            found = table[row]
            ids = found["input_ids"].combine_chunks().values.to_numpy()
            lengths = found["seq_lengths"].combine_chunks().values.to_numpy()
            yield tensors([np.split(ids, np.cumsum(lengths)[:-1])])

    return items()


LIBRARIES: dict[str, tuple[dict[str, Callable[[Samples, Path], Iterator[Item]]], str]] = {
    "torch": (
        {
            "DataLoader, in process": lambda samples, _: _in_torch(samples, 0, 1),
            "DataLoader, 2 workers, a pack": lambda samples, _: _in_torch(samples, WORKERS, 1),
            "DataLoader, 2 workers, 8 packs": lambda samples, _: _in_torch(samples, WORKERS, STACKED),
        },
        "torch",
    ),
    "webdataset": (
        {
            "WebDataset, in process": lambda samples, folder: _in_webdataset(samples, folder, 0, 1),
            "WebDataset, 2 workers, a pack": lambda samples, folder: _in_webdataset(samples, folder, WORKERS, 1),
            "WebDataset, 2 workers, 8 packs": lambda samples, folder: _in_webdataset(samples, folder, WORKERS, STACKED),
        },
        "webdataset torch",
    ),
    "grain": (
        {
            "Grain first fit, in process": lambda samples, _: _in_grain(samples, 0),
            "Grain first fit, 2 workers, a pack": lambda samples, _: _in_grain(samples, WORKERS),
        },
        "grain",
    ),
    "trl": (
        {
            "TRL bfd, packing alone": lambda samples, _: _in_trl(samples, alone=True),
            "TRL bfd, then tensors": lambda samples, _: _in_trl(samples, alone=False),
        },
        "trl",
    ),
}
"""Loaders by the library that has to be there, and how it comes."""
OFFLINE = ("TRL bfd, packing alone", "TRL bfd, then tensors")
