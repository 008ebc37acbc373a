"""Measure the CPU of chats with images of 1 megapixel, beside the processor of transformers in a torch DataLoader.

Both ways read the same JPEG files, with the same processor (Qwen2-VL, made here, with the limits of its class).
``plain`` is ``apply_chat_template`` in a DataLoader with two workers. ``streampack`` is ``streampack.local``: producer,
broker and client in one process, with batches for ``model(**batch)``. The ways take turns. CPU seconds are those of all
processes and threads, from the first line to the last batch. The best turn counts.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import streampack
from benchmarks.report import arguments, head, say
from tests.tokenizers.processors import processor_folders

SIDE = 1000
"""Pixels on each side of an image."""


def main() -> None:
    args = arguments(__doc__, "few images, once").parse_args()
    report = head("images")
    with tempfile.TemporaryDirectory() as folder:
        results = measure(Path(folder), images=12 if args.quick else 80, times=1 if args.quick else 3)
    for name, row in results.items():
        print(f"{name:12} {row['per_cpu_s']:8.2f} images per CPU second {row['per_s']:8.2f} per second")
    say(report | {"results": results}, args.json)


def measure(folder: Path, *, images: int, times: int) -> dict[str, dict[str, float]]:
    """Return images per CPU second and per second of each way."""
    processor_folders.FOLDERS["qwen2_vl"]["settings"] = {}
    processor = processor_folders.folder_of("qwen2_vl", folder / "model")
    chats = [chat(folder, number) for number in range(images)]
    ways: dict[str, Callable[[], Iterator[int]]] = {
        "plain": lambda: plain(processor, chats), "streampack": lambda: packed(processor, chats),
    }  # fmt: skip
    best = {name: {"per_cpu_s": 0.0, "per_s": 0.0} for name in ways}
    for _ in range(times):
        for name, way in ways.items():
            began, cpu = time.perf_counter(), cpu_s()
            count = sum(way())
            assert count == images
            wall, used = time.perf_counter() - began, cpu_s() - cpu
            best[name] = {
                key: max(best[name][key], value)
                for key, value in {"per_cpu_s": count / used, "per_s": count / wall}.items()
            }
    return best


def cpu_s() -> float:
    """Return CPU seconds of this process, and of its children that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def chat(folder: Path, number: int) -> list[dict[str, Any]]:
    """Return a chat with an image of smooth colors and some noise, as photos have."""
    draw = np.random.default_rng(number)
    coarse = Image.fromarray(draw.integers(0, 256, (12, 12, 3), dtype=np.uint8)).resize((SIDE, SIDE), 3)
    noisy = np.asarray(coarse, np.int16) + draw.integers(-8, 9, (SIDE, SIDE, 3))
    path = folder / f"{number}.jpg"
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=90)
    asked = [{"type": "image", "path": str(path)}, {"type": "text", "text": "what is this?"}]
    answer = [{"type": "text", "text": "a quick brown fox"}]
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


class Chats(Dataset[Any]):
    """Chats as the processor makes them."""

    def __init__(self, processor: Path, chats: list[Any]) -> None:
        self.chats, self.processor = chats, processor_folders.oracle_of(processor)

    def __len__(self) -> int:
        return len(self.chats)

    def __getitem__(self, number: int) -> Any:
        made = self.processor.apply_chat_template(
            [self.chats[number]], tokenize=True, return_dict=True, return_tensors="pt"
        )
        return dict(made)


def plain(processor: Path, chats: list[Any]) -> Iterator[int]:
    """Yield the number of images of each batch; workers have ended behind the last one."""
    for _ in DataLoader(Chats(processor, chats), batch_size=None, num_workers=2):
        yield 1


def packed(processor: Path, chats: list[Any]) -> Iterator[int]:
    """Yield the number of images of each batch."""
    rows = [{"messages": one} for one in chats]
    with streampack.local(
        rows, tokenizer={"processor": str(processor)}, budget=8192, format="hf", shuffle=False, memory="1GiB"
    ) as loader:  # fmt: skip
        for batch in loader:
            yield int(batch.cu_items[-1])


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    main()
