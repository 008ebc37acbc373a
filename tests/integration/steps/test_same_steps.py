"""Two runs with one seed have the same steps, whoever was faster: real broker, producers and clients."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import streampack
from streampack.config.typed_yaml import convert
from streampack.producer.loop import ProducerLoop
from streampack.sources import Source, SourceSettings, open_source
from tests.integration.running import PATIENCE_S, Daemon, RunningBroker, running_broker, write, write_jsonl

SETTINGS: dict[str, Any] = {
    "tokens": "uint16",
    "seed": 5,
    "rules": {
        "budget": 512, "window": {"samples": 64}, "step": {"packs": 4}, "overlong": "split",
        "align": {"sample": 4, "pack": 4},
    },
    "streams": {"web": {"weight": 0.7, "passes": 2, "partitions": 3}, "code": {"weight": 0.3, "partitions": 2}},
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for shard in range(7):
        write_jsonl(
            folder / f"web-{shard}.jsonl", [{"text": "w" * (1 + (shard * 83 + i * 41) % 300)} for i in range(60)]
        )
    for shard in range(3):
        write_jsonl(
            folder / f"code-{shard}.jsonl", [{"text": "c" * (1 + (shard * 71 + i * 97) % 900)} for i in range(70)]
        )
    return folder


def sources(files: Path) -> dict[str, Source]:
    return {
        name: open_source(convert({"source": "jsonl", "shards": str(files / f"{name}-*.jsonl")}, SourceSettings))
        for name in ("web", "code")
    }


def read_all(broker: RunningBroker, mesh: dict[str, int] | None = None) -> tuple[list[str], set[tuple[int, ...]]]:
    """Step digests in order, and ids of the samples seen by this rank."""
    with streampack.connect(broker.trainers, mesh=mesh, format="numpy") as loader:
        steps = list(loader.steps())
    return [step.digest for step in steps], {
        tuple(row) for step in steps for pack in step for row in pack.sample_ids.tolist()
    }


def run(files: Path, producers: list[tuple[tuple[str, ...], float]], mesh: dict[str, int] | None = None) -> Any:
    """One run: each producer offers some streams and rests some seconds after every chunk."""
    with running_broker(SETTINGS) as broker:
        loops = []
        for streams, pause_s in producers:
            offered = {name: source for name, source in sources(files).items() if name in streams}
            loops.append(ProducerLoop(broker.producers, offered, pause_s=pause_s))
        threads = [threading.Thread(target=loop.run) for loop in loops]
        for thread in threads:
            thread.start()
        found = read_all(broker, mesh)
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        return found


@pytest.fixture(scope="module")
def golden(files: Path) -> Any:
    """One producer, nobody throttled."""
    return run(files, [(("web", "code"), 0.0)])


def test_every_sample_is_in_one_step(golden: Any) -> None:
    digests, ids = golden
    assert len(digests) > 50
    assert {(stream, index) for stream, index, _ in ids if stream == 1} == {
        (1, seq * 2 + partition) for partition, count in ((0, 140), (1, 70)) for seq in range(count)
    }
    assert len({index for stream, index, _ in ids if stream == 0}) == 2 * 7 * 60


@pytest.mark.parametrize(
    "producers",
    [
        pytest.param([(("web",), 0.0), (("code",), 0.01)], id="one a stream, the second slow"),
        pytest.param([(("code",), 0.0), (("web",), 0.01)], id="in the other order, the other slow"),
        pytest.param([(("web", "code"), 0.003), (("web", "code"), 0.0), (("web", "code"), 0.01)], id="three of both"),
    ],
)
def test_steps_do_not_depend_on_the_producers(
    producers: list[tuple[tuple[str, ...], float]], files: Path, golden: Any
) -> None:
    assert run(files, producers) == golden


def test_steps_do_not_depend_on_the_mesh(files: Path, golden: Any) -> None:
    with running_broker(SETTINGS) as broker:
        found: dict[int, Any] = {}
        ranks = [
            threading.Thread(target=lambda r=rank: found.update({r: read_all(broker, {"dp": 4, "dp_rank": r})}))
            for rank in range(4)
        ]
        for rank in ranks:
            rank.start()
        ProducerLoop(broker.producers, sources(files)).run()
        for rank in ranks:
            rank.join(PATIENCE_S)
    assert all(digests == golden[0] for digests, _ in found.values())
    assert set.union(*(ids for _, ids in found.values())) == golden[1]
    assert sum(len(ids) for _, ids in found.values()) == len(golden[1])


def test_a_producer_killed_in_the_middle_changes_nothing(files: Path, golden: Any, tmp_path: Path) -> None:
    streams = {name: {"source": "jsonl", "shards": str(files / f"{name}-*.jsonl")} for name in ("web", "code")}
    with running_broker(SETTINGS) as broker:
        first = ProducerLoop(broker.producers, sources(files), pause_s=0.02)
        thread = threading.Thread(target=first.run)
        thread.start()
        with streampack.connect(broker.trainers, format="numpy") as loader:
            steps = loader.steps()
            digests = [next(steps).digest for _ in range(5)]
            config = write(tmp_path / "producer.yaml", {"broker": broker.producers, "processes": 1, "streams": streams})
            doomed = Daemon(tmp_path, "doomed", "produce", "-c", config)
            doomed.wait_for("INFO")
            doomed.kill()
            digests += [step.digest for step in steps]
        thread.join(PATIENCE_S)
    assert digests == golden[0]
