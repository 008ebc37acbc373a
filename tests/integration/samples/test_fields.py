"""Declared fields through real processes: each value that a trainer gets is that of its token, or of its sample."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import streampack
from streampack.core.model.fields import Field
from streampack.producer.loop import ProducerLoop
from streampack.sources import Cursor, RawSample
from tests.integration.running import PATIENCE_S, running_broker

COUNT = 300
SETTINGS: dict[str, Any] = {
    "rules": {"budget": 512, "window": {"samples": 32}, "step": {"packs": 4}, "align": {"sample": 4, "pack": 4}},
    "memory": "64MiB",
    "streams": {"text": {"partitions": 3}},
    "fields": {
        "loss_mask": {},
        "advantages": {"dtype": "bfloat16", "align": "target", "pad": -1},
        "routes": {"dtype": "uint8", "shape": [2, 3], "pad": 255},
        "whole": {"dtype": "int32", "cp": "replicate", "pad": -5},
        "reward": {"dtype": "float64", "axis": "sample"},
    },
}


def length_of(number: int) -> int:
    return 3 + number * 37 % 120


class Numbered:
    """Sample n of partition p is number 3 * n + p; every value says whose it is."""

    digest = "numbered"
    num_shards = 3
    vocab_size = None

    def read(
        self, partition: int, partitions: int, *, seed: int, passes: int | None, fields: Sequence[Field] = (),
        start: Cursor | None = None, skip: int = 0,
    ) -> Iterator[RawSample]:  # fmt: skip
        assert [field.name for field in fields] == list(SETTINGS["fields"])
        for seq in range((start or Cursor(0, 0, 0)).sample + skip, COUNT // partitions):
            number = seq * partitions + partition
            at = np.arange(length_of(number))
            values = {
                "loss_mask": at % 3 > 0, "advantages": (at % 8).astype(np.float32), "whole": 1000 * number + at,
                "routes": np.broadcast_to((at % 200).reshape(-1, 1, 1), (len(at), 2, 3)),
                "reward": np.array(number / 7),
            }  # fmt: skip
            yield RawSample((number + at).astype(np.int32), None, f"sample {number}", Cursor(0, 0, seq + 1), values)


def expected(pack: streampack.Pack) -> dict[str, NDArray[Any]]:
    """The whole pack's arrays, one sample at a time."""
    total = int(pack.cu_seqlens_padded[-1])
    ids, labels, mask = np.zeros(total, np.int64), np.full(total, -100), np.zeros(total, np.int64)
    advantages, routes = np.full(total, -1.0), np.full((total, 2, 3), 255)
    whole = np.full(total, -5)
    for (_, number, _), start in zip(pack.sample_ids.tolist(), pack.cu_seqlens_padded.tolist(), strict=False):
        at = np.arange(length_of(number))
        stop = start + len(at)
        ids[start:stop], routes[start:stop], whole[start:stop] = (
            number + at,
            (at % 200).reshape(-1, 1, 1),
            1000 * number + at,
        )
        mask[start : stop - 1], advantages[start : stop - 1] = (at % 3 > 0)[1:], (at % 8)[1:]
        labels[start : stop - 1] = np.where((at % 3 > 0)[1:], ids[start + 1 : stop], -100)
    of_tokens = {"input_ids": ids, "labels": labels, "loss_mask": mask}
    return of_tokens | {"advantages": advantages, "routes": routes, "whole": whole}


@pytest.mark.parametrize("layout", ["zigzag", "zigzag_pack", "contiguous"])
def test_every_value_is_its_tokens_own_on_every_rank_and_stage(layout: str) -> None:
    settings = SETTINGS | {"feeds": {"train": {"cp_layout": layout}}}
    with running_broker(settings) as broker:
        producer = threading.Thread(target=ProducerLoop(broker.producers, {"text": Numbered()}).run)
        producer.start()
        meshes = [
            {"cp": 2, "pp": 3, "cp_rank": cp_rank, "pp_rank": pp_rank} for cp_rank in range(2) for pp_rank in range(3)
        ]
        found: list[list[streampack.Pack]] = [[] for _ in meshes]

        def read(number: int) -> None:
            with streampack.connect(broker.trainers, mesh=meshes[number], format="numpy") as loader:
                found[number] += list(loader)

        readers = [threading.Thread(target=read, args=(number,)) for number in range(len(meshes))]
        for reader in readers:
            reader.start()
        for thread in (*readers, producer):
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
    assert sum(pack.num_samples for pack in found[0]) == COUNT
    for mesh, packs in zip(meshes, found, strict=True):
        for pack, first in zip(packs, found[0], strict=True):
            assert pack.sample_ids.tolist() == first.sample_ids.tolist()
            if mesh["pp_rank"] == 1:
                assert not {"input_ids", "labels", *SETTINGS["fields"]} & set(pack)
                continue
            whole, places = expected(pack), pack.positions()
            for name, values in whole.items():
                assert np.array_equal(pack[name], values if name == "whole" else values[places]), name
            assert pack["reward"].tolist() == [number / 7 for _, number, _ in pack.sample_ids.tolist()]
            assert pack.num_loss_tokens == (whole["labels"] != -100).sum()
    assert sum(pack.num_loss_tokens for pack in found[0]) == sum(
        int((np.arange(length_of(number)) % 3 > 0)[1:].sum()) for number in range(COUNT)
    )
