"""The broker that examples of the pages connect to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from streampack.config.typed_yaml import convert
from streampack.sources import SourceSettings, open_source
from tests.docs.pasted import SAMPLES, SETTINGS, VALID
from tests.integration.running import RunningBroker, producing_here, running_broker, write_jsonl


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    """A broker of two feeds, and a producer of all their streams."""
    sources, folder = {}, tmp_path_factory.mktemp("data")
    for name, count in (("web", SAMPLES // 2), ("code", SAMPLES // 2), ("val", VALID)):
        files = write_jsonl(folder / f"{name}.jsonl", [{"text": name * (1 + i * 7 % 30)} for i in range(count)])
        sources[name] = open_source(convert({"source": "jsonl", "shards": str(files)}, SourceSettings))
    with running_broker(SETTINGS) as running, producing_here(running.producers, sources):
        yield running
