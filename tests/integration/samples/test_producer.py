"""The producer's loop: slow reads, and what it says of samples that it cuts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from streampack_services.daemons.producer import _show
from streampack_services.daemons.progress import Overall

import streampack
from streampack.config.typed_yaml import convert
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.producer_messages import Flow, Lease, ProducerPing, Samples
from streampack.producer import loop as producer
from streampack.producer.chunk import TokenChunk
from streampack.producer.chunks import CHUNK_S, batches
from streampack.producer.loop import ProducerLoop
from streampack.sources import Cursor, SourceSettings, open_source, open_tokenizer
from streampack.sources.files import retries
from streampack.sources.files.retries import Retries
from streampack.tokenizers.base import TokenizerSettings
from streampack.wire import frames as wire
from streampack.wire.sample_checksums import compiled
from tests.integration.running import PATIENCE_S, running_broker, until, write_jsonl
from tests.integration.small_broker import SmallBroker

SETTINGS: dict[str, Any] = {
    "tokens": "uint16",
    "rules": {"budget": 256, "window": {"samples": 16}, "step": {"packs": 2}},
    "streams": {"text": {"partitions": 1}},
}


def slow(text: str) -> list[int]:
    time.sleep(0.02)
    return list(text.encode())


released = threading.Event()


def hanging(text: str) -> list[int]:
    released.wait(30)
    return list(text.encode())


def lease(**changes: Any) -> Lease:
    terms: dict[str, Any] = {
        "stream": "text", "partition": 0, "partitions": 1, "first_seq": 0, "cursor": None, "seed": 0, "passes": 1,
        "dtype": "int32", "overlong": "error", "poison": "error", "max_sample_tokens": 100, "max_chunk_bytes": 1 << 20,
    }  # fmt: skip
    return Lease(**terms | changes)


def test_a_slow_tokenizer_sends_small_chunks(tmp_path: Path) -> None:
    files = write_jsonl(tmp_path / "text.jsonl", [{"text": "t" * 50} for _ in range(100)])
    settings = convert({"source": "jsonl", "shards": str(files)}, SourceSettings)
    source = open_source(settings, open_tokenizer(TokenizerSettings(name=f"{__name__}:slow")))
    first = next(batches(source, lease()))
    assert 1 <= len(first.lengths) < 100, f"all of them take four times the {CHUNK_S} s of a chunk"
    with running_broker(SETTINGS) as broker:
        thread = threading.Thread(target=ProducerLoop(broker.producers, {"text": source}).run)
        thread.start()
        with streampack.connect(broker.trainers, format="numpy") as loader:
            assert sum(pack.num_samples for pack in loader) == 100
        thread.join(PATIENCE_S)
        assert broker.said.count("joined") == 1


def test_a_tokenizer_that_hangs_is_said_and_pings_keep_its_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[type] = []

    def noted(envelope: Envelope) -> list[Any]:
        said.append(type(envelope.message))
        return wire.encode(envelope)

    files = write_jsonl(tmp_path / "text.jsonl", [{"text": "a"}, {"text": "b"}])
    source = open_source(
        convert({"source": "jsonl", "shards": str(files)}, SourceSettings),
        open_tokenizer(TokenizerSettings(name=f"{__name__}:hanging")),
    )
    monkeypatch.setattr(producer, "SLOW_S", 0.5)
    monkeypatch.setattr(retries, "WAITS_S", (60.0,))
    monkeypatch.setattr(producer, "wire", SimpleNamespace(encode=noted, decode=wire.decode))
    released.clear()
    elsewhere = Retries("https://store/of/another/producer", released)
    threading.Thread(target=elsewhere.again, args=(ConnectionResetError(),), daemon=True).start()
    with running_broker(SETTINGS) as broker:
        loop = ProducerLoop(
            broker.producers, {"text": source}, on_progress=lambda progress: seen.append(progress.waiting)
        )
        seen: list[str] = []
        thread = threading.Thread(target=loop.run)
        thread.start()
        try:
            until(lambda: any("stream 'text', because reading its file or tokenizing is slow" in each for each in seen))
            pings = said.count(ProducerPing)
            assert not any("store" in each for each in seen), "another thread of this process waits for that store"
            until(lambda: said.count(ProducerPing) > pings + 1)
            assert broker.said.count("joined") == 1
        finally:
            released.set()
        with streampack.connect(broker.trainers, format="numpy") as loader:
            assert sum(pack.num_samples for pack in loader) == 2
        thread.join(PATIENCE_S)
        assert broker.said.count("joined") == 1


@pytest.mark.parametrize(("policy", "kept"), [("truncate", 3), ("drop", 1)])
def test_tokens_that_a_producer_cuts_are_counted(policy: str, kept: int, tmp_path: Path) -> None:
    files = write_jsonl(tmp_path / "text.jsonl", [{"tokens": [1] * n} for n in (100, 300, 1000)])
    source = open_source(convert({"source": "jsonl", "shards": str(files), "shuffle": False}, SourceSettings))
    settings = SETTINGS | {"rules": SETTINGS["rules"] | {"overlong": policy}, "limits": {"sample_tokens": 10}}
    with running_broker(settings) as broker:
        thread = threading.Thread(target=ProducerLoop(broker.producers, {"text": source}).run)
        thread.start()
        with streampack.connect(broker.trainers, format="numpy") as loader:
            samples = sum(pack.num_samples for pack in loader)
        thread.join(PATIENCE_S)
        assert samples == kept
        until(lambda: broker.status()["streams"][0]["samples"] == 3)
        (stream,) = broker.status()["streams"]
        assert stream["overlong"] == 2
        assert stream["lost_tokens"] == 1400 - stream["tokens"]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_chunk_ends_with_its_pass_and_says_so(shuffle: bool, tmp_path: Path) -> None:
    """Empty files, too, which may be the last of a pass; and from wherever a lease begins."""
    for number, count in enumerate((3, 0, 2, 1, 0)):
        write_jsonl(tmp_path / f"{number}.jsonl", [{"text": f"{number}{i}"} for i in range(count)])
    settings = {"source": "jsonl", "shards": str(tmp_path / "*.jsonl"), "shuffle": shuffle}
    source = open_source(convert(settings, SourceSettings))
    found = list(batches(source, lease(passes=3)))
    assert [(len(batch.lengths), batch.pass_ended) for batch in found] == [(6, True)] * 3
    small = list(batches(source, lease(passes=3, max_chunk_bytes=8)))
    assert [batch.pass_ended for batch in small] == [False, False, False, False, False, True] * 3
    for at, batch in enumerate(small):
        again = batches(source, lease(passes=3, max_chunk_bytes=8, first_seq=at + 1, cursor=tuple(batch.cursor)))
        assert [b.pass_ended for b in again] == [b.pass_ended for b in small[at + 1 :]]
    empty = list(batches(source, lease(passes=3, partition=1, partitions=5)))
    assert empty == [], "a partition without samples has no pass to end"


def test_a_log_says_the_same_progress_more_and_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    overall, said = Overall({"web": 1}), []
    with _show(on_terminal=False) as show:
        for turn in range(20):
            if turn == 18:
                overall.restarts += 1
            overall.update(float(turn), [], ["credit"], overall.restarts)
            caplog.clear()
            show(overall)
            said += [turn] if caplog.records else []
    assert said == [0, 1, 2, 4, 8, 16, 18, 19]


class Counting:
    """A source of whole batches: sample i is the number i, three times; ``count`` batches of two samples."""

    digest = "counting"

    def __init__(self, count: int) -> None:
        self._count = count

    def batches(self, lease: Lease) -> Iterator[TokenChunk]:
        for at in range(lease.first_seq // 2, self._count):
            tokens = np.repeat(np.array([2 * at, 2 * at + 1], np.uint16), 3)
            yield TokenChunk(tokens, np.array([3, 3], np.uint32), Cursor(0, 0, 2 * at + 2), {})


def test_samples_come_whole_before_and_after_their_checksums_are_computed_by_a_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known: list[bool] = []

    def noted(envelope: Envelope) -> list[Any]:
        known.extend([envelope.payload_crc is not None] if isinstance(envelope.message, Samples) else [])
        return wire.encode(envelope)

    monkeypatch.setattr(producer, "wire", SimpleNamespace(encode=noted, decode=wire.decode))
    monkeypatch.setattr(producer, "FAST_BYTES_S", 1e-9)
    count = 2 * producer.COMPILED_AFTER
    with running_broker(SETTINGS) as broker:
        thread = threading.Thread(target=ProducerLoop(broker.producers, {"text": Counting(count)}).run)
        thread.start()
        with streampack.connect(broker.trainers, format="numpy") as loader:
            seen = sorted(
                (index, pack.input_ids[begin : begin + 3].tolist())
                for pack in loader
                for (_, index, _), begin in zip(pack.sample_ids.tolist(), pack.cu_seqlens_padded.tolist(), strict=False)
            )
        thread.join(PATIENCE_S)
    assert seen == [(i, [i] * 3) for i in range(2 * count)]
    assert known == [False] * producer.COMPILED_AFTER + [compiled() is not None] * producer.COMPILED_AFTER


class Gated:
    """Batches of one sample. The first read of all waits for ``released``."""

    digest = "gated"

    def batches(self, lease: Lease) -> Iterator[TokenChunk]:
        released.wait(PATIENCE_S)
        yield TokenChunk(np.zeros(1, np.int32), np.ones(1, np.uint32), Cursor(0, 0, 1), {})


def test_the_partition_that_the_broker_wants_is_read_before_those_that_were_leased_earlier() -> None:
    released.clear()
    broker = SmallBroker(terms={"stream": "text"})
    loop = ProducerLoop(broker.endpoint, {"text": Gated()}, timeout_s=PATIENCE_S)
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        until(lambda: broker.heard_of(ProducerPing) > 0)
        more: dict[str, Any] = {
            "stream": "text",
            "expected_seq": 0,
            "grant_seq": 9,
            "grant_bytes": 99,
            "durable_seq": 0,
        }
        leases = [lease(partition=number, partitions=4) for number in (0, 2, 3)]
        flows = [Flow(partition=number, **more, wanted=number == 3) for number in (0, 2, 3)]
        broker.say = [*leases, *flows]
        pings = broker.heard_of(ProducerPing)
        until(lambda: not broker.say and broker.heard_of(ProducerPing) > pings + 1)
        released.set()
        until(lambda: broker.heard_of(Samples) == 4)
    finally:
        released.set()
        loop.stop()
        thread.join(PATIENCE_S)
        broker.stop()
    read = [message.partition for message in broker.heard if isinstance(message, Samples)]
    assert read == [1, 3, 0, 2], "partition 1 was being read when the others were leased"
