"""A whole service in this process, for those who look at it: a broker, its HTTP side, producers and ranks."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from streampack_services.broker.service import BrokerService
from streampack_services.broker.status import BrokerStatus
from streampack_services.http.server import HttpServer
from streampack_services.logs import Ring

from streampack.config.config_validation import checked
from streampack.config.daemon_settings import BrokerConfig
from streampack.config.typed_yaml import convert
from streampack.core.protocol.producer_messages import Lease
from streampack.producer.chunk import TokenChunk
from streampack.sources import Cursor
from tests.integration.many_ranks import many_ranks
from tests.integration.running import PATIENCE_S, producing_here

CHUNK_SAMPLES = 512


class Texts:
    """Samples as long as texts are, ``chunks`` chunks of each partition, or for ever."""

    def __init__(self, mean_tokens: float, chunks: int | None = None) -> None:
        self.digest = f"texts {mean_tokens}"
        rng = np.random.default_rng(0)
        self._lengths = rng.lognormal(np.log(mean_tokens), 1.0, CHUNK_SAMPLES).clip(1, 4000).astype(np.uint32)
        self._chunks = chunks

    def batches(self, lease: Lease) -> Iterator[TokenChunk]:
        """The same chunk again and again."""
        lengths = self._lengths[: np.searchsorted(np.cumsum(self._lengths), lease.max_chunk_bytes // 4)]
        tokens, sent = np.arange(int(lengths.sum()), dtype=np.int32), 0
        while self._chunks is None or sent < self._chunks:
            yield TokenChunk(tokens, lengths, Cursor(0, 0, 0), {})
            sent += 1


@dataclass
class Watched:
    """A broker in a thread; ``url`` shows its last snapshot, or the one that is ``held``."""

    service: BrokerService
    url: str = ""
    held: BrokerStatus | None = None
    stuck: bool = False
    """No time passes for it, too."""

    def status(self) -> dict[str, Any]:
        """Return the JSON of ``/status``."""
        found: dict[str, Any] = json.loads(msgspec.json.encode(self.shown()))
        return found

    def shown(self) -> BrokerStatus:
        """Return the snapshot that the HTTP side serves."""
        now = self.service.snapshot
        if self.stuck and self.held is not None:
            return self.held
        if self.held is None:
            return now
        return msgspec.structs.replace(self.held, taken_at=now.taken_at, uptime_s=now.uptime_s)

    @property
    def endpoints(self) -> dict[str, str]:
        return self.service.endpoints


@contextmanager
def watched(settings: dict[str, Any], http: str = "127.0.0.1:0", token: str | None = None) -> Iterator[Watched]:
    """Served at ``http`` until the end, to those who bring the ``token``; what is logged meanwhile is what ``/events``
    says.
    """
    tree = {
        "listen": {"producers": "tcp://127.0.0.1:*", "trainers": "tcp://127.0.0.1:*"}, "memory": "64MiB",
        "limits": {"sample_tokens": 4096, "chunk": "64KiB"}, **settings,
    }  # fmt: skip
    service = BrokerService(checked(convert(tree, BrokerConfig)))
    ring = Ring(service.config.run)
    found = Watched(service)
    server = HttpServer(http, found.shown, ring=ring, token=token, rank_page=service.rank_page)
    found.url = server.url
    log = logging.getLogger("streampack")
    before = log.level
    log.addHandler(ring)
    log.setLevel("INFO")
    thread = threading.Thread(target=service.run, name="broker")
    thread.start()
    server.start()
    try:
        yield found
    finally:
        service.drain()
        service.drain()
        thread.join(PATIENCE_S)
        server.close()
        log.removeHandler(ring)
        log.setLevel(before)
        assert not thread.is_alive()


@contextmanager
def small(folder: Path) -> Iterator[Watched]:
    """2 x 2 ranks on two streams, with a log."""
    settings: dict[str, Any] = {
        "run": "sft-8b", "planned_mesh": {"dp": 2, "cp": 2}, "state_dir": str(folder),
        "rules": {"budget": 4096, "step": {"packs": 8}, "overlong": "truncate"},
        "streams": {"web": {"weight": 0.7, "repeat": True}, "code": {"weight": 0.3, "repeat": True}},
    }  # fmt: skip
    pace = [0.05, 0.05, 0.06, 0.08]
    with (
        watched(settings) as broker,
        producing_here(broker.endpoints["producers"], {"web": Texts(500), "code": Texts(1500)}),
        many_ranks(broker.endpoints["trainers"], {"dp": 2, "cp": 2}, pace.__getitem__),
    ):
        yield broker


@contextmanager
def large(ranks: int) -> Iterator[Watched]:
    """So many data-parallel ranks, of which some are slower than others."""
    settings: dict[str, Any] = {
        "run": "pretrain-70b", "rules": {"budget": 1024, "step": {"packs": 2 * ranks}, "overlong": "truncate"},
        "streams": {"web": {"repeat": True}},
    }  # fmt: skip
    with (
        watched(settings) as broker,
        producing_here(broker.endpoints["producers"], {"web": Texts(200)}),
        many_ranks(broker.endpoints["trainers"], {"dp": ranks}, lambda rank: 1.0 + rank * 37 % 101 / 200),
    ):
        yield broker
