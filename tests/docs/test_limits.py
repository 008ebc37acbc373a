"""The page "Limits": each number is that of the code."""

from __future__ import annotations

import re
from typing import get_args, get_type_hints

import pytest
from streampack_services.amounts import size_text
from streampack_services.broker.log_keeper import RESERVE_BYTES
from streampack_services.broker.memory_peak import PROCESS_BYTES
from streampack_services.broker.ranks.rank_figures import MOST_RANKS
from streampack_services.http.http_limits import MOST_CONNECTIONS

from streampack.client.connect import ConnectOptions
from streampack.config import config_validation
from streampack.config.daemon_settings import MEMORY, BrokerConfig
from streampack.config.service_settings import Limits
from streampack.config.stream_settings import MAX_GROUP
from streampack.config.typed_yaml import convert
from streampack.core.deal.mesh_validation import MOST_TOKENS
from streampack.core.form import auto_window
from streampack.core.intake.intake import MAX_UNMERGED
from streampack.core.intake.leases import PRODUCER_SILENT_S
from streampack.core.media.media_format import MAX_ITEMS, MAX_PATCHES
from streampack.core.media.references import MAX_URI
from streampack.core.model.bounded import MAX_STREAMS
from streampack.core.model.fields import MAX_FIELDS, MAX_SAMPLE_BYTES, MAX_VALUE_BYTES
from streampack.core.model.keys.planning_keys import MAX_WINDOW
from streampack.core.model.rules import MAX_WEIGHT_RATIO
from streampack.core.packers.exact_fill.exact_fill import MAX_BUDGET
from streampack.core.packers.joint import joint_bounds
from streampack.core.protocol.relay_messages import MAX_READERS
from streampack.core.serve.rank_registry import MAX_RANKS
from streampack.errors import ConfigError
from streampack.sources.files import image_files, read_bytes, retries
from streampack.transport.links import MOST_LINKS
from streampack.wire.frames import MAX_PAYLOAD_BYTES, VERSION
from tests.docs.pages import PAGES, ROOT

PAGE = PAGES[ROOT / "docs/reference/limits.md"]
BROKER = convert({"run": "limits", "streams": {"web": {}}}, BrokerConfig)
_BUILT_IN = get_type_hints(ConnectOptions, include_extras=True)


def _wait(name: str) -> str:
    return f"{get_args(_BUILT_IN[name])[1]:.0f} s"


def _size(number: int) -> str:
    return size_text(number).replace(".0 ", " ")


NUMBERS: dict[str, str | int] = {
    "streams of a feed": MAX_STREAMS,
    "largest weight over the smallest": MAX_WEIGHT_RATIO,
    "fields of a run": MAX_FIELDS,
    "bytes of a field, for one token": MAX_VALUE_BYTES,
    "bytes of all fields of axis `sample`, for one sample": MAX_SAMPLE_BYTES,
    "tokens of a sample that a producer sends": Limits().sample_tokens,
    "budget with `packer: exact_fill`": MAX_BUDGET - 1,
    "budget with `balance: {kind: joint}`": joint_bounds.MAX_BUDGET - 1,
    "tokens of a step": MOST_TOKENS,
    "samples of `window: auto`": f"{auto_window.LEAST} to {MAX_WINDOW:,}",
    "steps that the broker forms ahead": BROKER.steps_ahead,
    "samples that a partition may be ahead of the merge": MAX_UNMERGED,
    "token ids with `tokens: uint16`": 1 << 16,
    "ranks of a mesh": MAX_RANKS,
    "ranks of a feed, and producers of a broker": Limits().peers,
    "ranks that `status` lists one by one": MOST_RANKS,
    "ranks of a relay": MAX_READERS,
    "processes with shared memory, for each broker or relay": MOST_LINKS,
    "HTTP connections of a broker": MOST_CONNECTIONS,
    "keys of a pushed stream that the broker remembers": Limits().keys,
    "ranks that share a sample with `cp: dynamic`": MAX_GROUP,
    "items of a sample": MAX_ITEMS,
    "patches of a sample": MAX_PATCHES,
    "bytes of an item": read_bytes.LARGEST,
    "pixels of an image": image_files.MOST_PIXELS,
    "characters of a path or URL": MAX_URI,
    "samples that the broker holds": MEMORY.replace("GiB", " GiB"),
    "an idle broker beside that": _size(PROCESS_BYTES),
    "payload of a message": _size(MAX_PAYLOAD_BYTES),
    "least `retain.bytes`": _size(config_validation.MIN_LOG_BYTES),
    "disk that is held back for a full disk": _size(RESERVE_BYTES),
    "a loader waits for the first answer of the broker": _wait("timeout_s"),
    "a rank waits while the broker is silent, then `DataStall`": _wait("stall_timeout_s"),
    "a rank waits for ranks that have not joined, then `DataStall`": _wait("join_timeout_s"),
    "a stopped broker serves formed steps": f"{BROKER.drain_timeout_s:.0f} s",
    "a silent producer keeps its partitions": f"{PRODUCER_SILENT_S:.0f} s",
    "a producer tries a busy store again": f"{retries.MOST_S:.0f} s",
}


def test_each_number_of_the_page_is_that_of_the_code() -> None:
    tables = re.findall(r"^\| limit \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    rows = [row.strip("| ").split(" | ")[:2] for table in tables for row in table.splitlines()]
    said = {name: number for name, number in rows if not name.startswith("brokers that")}
    assert said == {name: f"{number:,}" if isinstance(number, int) else number for name, number in NUMBERS.items()}
    assert f"wire protocol than {VERSION} " in PAGE
    assert f"at most {1 << 18:,}" in PAGE


def test_a_feed_of_more_streams_than_the_limit_is_refused() -> None:
    streams = {f"s{number}": {"partitions": 1} for number in range(MAX_STREAMS + 1)}
    config = convert({"run": "many", "memory": "8GiB", "streams": streams}, BrokerConfig)
    with pytest.raises(ConfigError, match="got 1025 streams, expected at most 1024"):
        config_validation.checked(config)
