"""Samples with images: a real broker that is killed, files, a pipeline's ranks, limits, and what is refused."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streampack
from streampack.errors import StreampackError
from tests.integration.running import PATIENCE_S, RunningBroker, folder, running, running_broker, until, write

SAMPLES, PATCHES = 160, 24


def settings(path: Path, **changes: Any) -> dict[str, Any]:
    sides = {side: f"ipc://{path}/{side}" for side in ("producers", "trainers")}
    rules = {
        "budget": 256, "window": {"samples": 32}, "step": {"packs": 2}, "overlong": "drop",
        "limits": {"patches": PATCHES, "items": 6}, "balance": {"patches": [10, 1], "items": 5},
    }  # fmt: skip
    return {
        "run": "images", "listen": {**sides, "http": "127.0.0.1:0"}, "merge": "arrival",
        "state_dir": str(path / "state"), "rules": rules | changes.pop("rules", {}),
        "streams": {"chats": {"pushed": True, "partitions": 1}},
        "fields": {
            "loss_mask": {}, "image_grid_thw": {"dtype": "int32", "axis": "item", "shape": [3]},
            "pixel_values": {"dtype": "uint8", "axis": "patch", "shape": [12]},
        },
    } | changes  # fmt: skip


def sample(number: int) -> dict[str, Any]:
    """Up to two images of up to nine patches; a third of the samples has none."""
    draw = np.random.default_rng(number)
    grid = np.array([[1, *draw.integers(1, 4, 2)] for _ in range(number % 3)], np.int32).reshape(-1, 3)
    patches = grid.prod(axis=1)
    media = {
        "image_grid_thw": grid, "pixel_values": draw.integers(0, 256, (patches.sum(), 12), dtype=np.uint8),
        "patches": patches,
    }  # fmt: skip
    ids = draw.integers(1, 1000, int(draw.integers(5, 120)))
    return {"input_ids": ids, "loss_mask": np.ones(len(ids), np.uint8)} | (media if len(grid) else {})


def work(endpoint: str) -> None:
    with streampack.Producer(endpoint, stream="chats", buffer="64KiB") as chats:
        for number in range(SAMPLES):
            chats.send(sample(number))
        chats.close(end=True)


def read(endpoint: str, **options: Any) -> list[int]:
    """Check the media of each sample, and return the numbers of the samples."""
    found = []
    with streampack.connect(endpoint, format="numpy", verify=True, stall_timeout_s=PATIENCE_S, **options) as loader:
        for step in loader.steps():
            for pack in step:
                assert len(pack["pixel_values"]) <= PATCHES
                assert len(pack["image_grid_thw"]) <= 6
                of_items, of_patches = pack["cu_items"].tolist(), pack["cu_patches"].tolist()
                assert of_patches[-1] == len(pack["pixel_values"])
                for i, (_, number, _) in enumerate(pack.sample_ids.tolist()):
                    sent, (first, stop) = sample(number), of_items[i : i + 2]
                    pixels = pack["pixel_values"][of_patches[first] : of_patches[stop]]
                    sizes = pack["image_grid_thw"][first:stop]
                    assert np.array_equal(sizes, sent.get("image_grid_thw", np.zeros((0, 3))))
                    assert np.array_equal(pixels, sent.get("pixel_values", np.zeros((0, 12))))
                    found.append(number)
    return found


@pytest.mark.parametrize("balance", [{}, {"kind": "joint", "group": 2, "patience": 4}])
def test_a_broker_that_is_killed_loses_no_image(balance: dict[str, Any]) -> None:
    with folder() as path, ThreadPoolExecutor() as pool:
        config = settings(path, rules={"balance": {"patches": [10, 1], "items": 5} | balance})
        broker = RunningBroker(path, config)
        try:
            worker = pool.submit(work, broker.producers)
            until(lambda: broker.status()["streams"][0]["samples"] > 30)
            broker.kill()
            broker = RunningBroker(path, config)
            reader = pool.submit(read, broker.trainers)
            until(lambda: broker.feed()["steps"]["returned"] > 4)
            broker.kill()
            broker = RunningBroker(path, config)
            worker.result(PATIENCE_S)
            assert sorted(reader.result(PATIENCE_S)) == list(range(SAMPLES))
        finally:
            broker.kill()


def test_files_have_images_and_limits_drop_those_that_fit_no_pack() -> None:
    with folder() as path:
        rows = [sample(number) for number in range(12)]
        rows[4] |= {"image_grid_thw": np.array([[1, 5, 5]]), "pixel_values": np.zeros((25, 12), int), "patches": [25]}
        lines = [json.dumps({key: np.asarray(value).tolist() for key, value in row.items()}) for row in rows]
        (path / "chats.jsonl").write_text("\n".join(lines))
        with streampack.local(
            str(path / "chats.jsonl"), budget=256, format="numpy", shuffle=False, fields=settings(path)["fields"]
        ) as loader:
            packs = list(loader)
        assert sum(len(pack["image_grid_thw"]) for pack in packs) == sum(len(r.get("image_grid_thw", [])) for r in rows)
        with streampack.local(
            str(path / "chats.jsonl"), budget=256, format="numpy", fields=settings(path)["fields"],
            limits={"patches": 30, "items": 2}, verify=True,
        ) as loader:  # fmt: skip
            assert max(len(pack["image_grid_thw"]) for pack in loader) == 2
        with running_broker(settings(path)) as broker:
            with streampack.Producer(broker.producers, stream="chats") as chats:
                for row in rows:
                    chats.send(row)
                chats.close(end=True)
            numbers = []
            with streampack.connect(broker.trainers, format="numpy", stall_timeout_s=PATIENCE_S) as loader:
                for pack in loader:
                    numbers += pack.sample_ids[:, 1].tolist()
            assert sorted(numbers) == [number for number in range(12) if number != 4]
            until(lambda: broker.status()["streams"][0]["overlong"] == 1)


def test_only_the_ranks_that_run_the_encoder_get_images() -> None:
    with folder() as path, running_broker(settings(path)) as broker:
        work(broker.producers)
        meshes = [{"pp": 2, "pp_rank": rank} for rank in range(2)]
        with ThreadPoolExecutor() as pool:

            def keys(mesh: dict[str, int]) -> set[str]:
                with streampack.connect(
                    broker.trainers, format="numpy", mesh=mesh, stall_timeout_s=PATIENCE_S
                ) as loader:  # fmt: skip
                    return {key for pack in loader for key in pack}

            first, last = pool.map(keys, meshes)
        assert first - last == {"image_grid_thw", "pixel_values", "cu_items", "cu_patches"}


def test_a_torch_view_has_images_and_their_boundaries() -> None:
    torch = pytest.importorskip("torch")
    with folder() as path, running_broker(settings(path)) as broker:
        work(broker.producers)
        with streampack.connect(broker.trainers, format="thd", stall_timeout_s=PATIENCE_S) as loader:
            batch = next(iter(loader))
            assert batch.pixel_values.dtype == torch.uint8
            assert batch.cu_patches[-1] == len(batch.pixel_values)
            assert batch.cu_items[-1] == len(batch.image_grid_thw)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pixel_values": None}, "pixel_values: missing"),
        ({"pixel_values": np.zeros((3, 12))}, "media: patches"),
        ({"image_grid_thw": np.ones((4, 3))}, "media: items"),
        ({"image_grid_thw": np.ones((1, 2))}, "image_grid_thw: shape"),
        ({"pixel_values": np.full((2, 12), 999)}, "pixel_values: dtype"),
        ({"patches": None}, "patches: missing"),
        ({"patches": [-1, 3]}, "patches: dtype"),
    ],
)
def test_a_sample_whose_images_do_not_fit_together_is_refused(changes: dict[str, Any], said: str) -> None:
    row = {
        "input_ids": [1, 2, 3], "loss_mask": [1, 1, 1], "image_grid_thw": np.array([[1, 1, 2]]),
        "pixel_values": np.zeros((2, 12), np.uint8), "patches": [2],
    } | changes  # fmt: skip
    given = {key: value for key, value in row.items() if value is not None}
    with (
        folder() as path,
        running_broker(settings(path)) as broker,
        pytest.raises(StreampackError, match=said),
        streampack.Producer(broker.producers, stream="chats") as chats,
    ):
        chats.send(given)


def test_regrouped_packs_have_the_images_of_their_samples() -> None:
    with folder() as path, running_broker(settings(path)) as broker:
        work(broker.producers)
        with streampack.connect(broker.trainers, format="numpy", stall_timeout_s=PATIENCE_S) as loader:
            found = []
            for step in loader.steps():
                for pack in step.regroup(512):
                    of_items, of_patches = pack["cu_items"].tolist(), pack["cu_patches"].tolist()
                    assert of_items[-1] == len(pack["image_grid_thw"])
                    assert of_patches[-1] == len(pack["pixel_values"])
                    for i, (_, number, _) in enumerate(pack.sample_ids.tolist()):
                        first, stop = of_items[i : i + 2]
                        pixels = pack["pixel_values"][of_patches[first] : of_patches[stop]]
                        assert np.array_equal(pixels, sample(number).get("pixel_values", np.zeros((0, 12))))
                        found.append(number)
        assert sorted(found) == list(range(SAMPLES))


def test_pixels_and_sizes_are_split_by_sample() -> None:
    with folder() as path, running_broker(settings(path)) as broker:
        work(broker.producers)
        with streampack.connect(broker.trainers, format="thd", stall_timeout_s=PATIENCE_S) as loader:
            for batch in loader:
                pixels = streampack.per_sample(batch.pixel_values, batch, axis="patch")
                sizes = streampack.per_sample(batch.image_grid_thw, batch, axis="item")
                for (_, number, _), mine, grid in zip(batch.sample_ids.tolist(), pixels, sizes, strict=True):
                    expected = sample(number)
                    assert np.array_equal(mine.numpy(), expected.get("pixel_values", np.zeros((0, 12))))
                    assert np.array_equal(grid.numpy(), expected.get("image_grid_thw", np.zeros((0, 3))))
                with pytest.raises(StreampackError, match="one for each patch of the pack"):
                    streampack.per_sample(batch.labels, batch, axis="patch")


def test_files_that_are_read_again_after_a_kill_have_the_same_images() -> None:
    """A stream that is not pushed: the window's samples come again from the files."""
    with folder() as path:
        rows = [sample(number) for number in range(SAMPLES)]
        lines = [json.dumps({key: np.asarray(value).tolist() for key, value in row.items()}) for row in rows]
        (path / "chats.jsonl").write_text("\n".join(lines))
        config = settings(path, streams={"chats": {"partitions": 1}}, merge="schedule")
        source = {"source": "jsonl", "shards": str(path / "chats.jsonl"), "shuffle": False}
        with ThreadPoolExecutor() as pool:
            broker = RunningBroker(path, config)
            try:
                tree = {"broker": broker.producers, "processes": 1, "streams": {"chats": source}}
                with running("producer", "produce", "-c", write(path / "producer.yaml", tree)):
                    reader = pool.submit(read, broker.trainers)
                    until(lambda: broker.feed()["steps"]["returned"] > 3)
                    broker.kill()
                    broker = RunningBroker(path, config)
                    assert sorted(reader.result(PATIENCE_S)) == list(range(SAMPLES))
            finally:
                broker.kill()


LATE = {"number": {"dtype": "int32", "axis": "sample"}, "reward": {"dtype": "float64", "axis": "sample", "late": True}}


def numbered(number: int) -> dict[str, Any]:
    return sample(number) | {"number": number}


def generate(endpoint: str) -> None:
    """Sends groups of four; rewards of eight groups come at once, those of the last group first."""
    with streampack.Producer(endpoint, stream="chats", timeout_s=PATIENCE_S) as chats:
        waiting = []
        for first in range(0, SAMPLES, 4):
            numbers = list(range(first, first + 4))
            waiting.append((chats.send_group([numbered(number) for number in numbers]), numbers))
            if len(waiting) == 8 or first + 4 == SAMPLES:
                for seqs, mine in reversed(waiting):
                    chats.amend(seqs, reward=[number / 4 for number in mine])
                waiting.clear()
        chats.close(end=True)


def read_numbered(endpoint: str, publish: bool = False) -> list[int]:
    """Check images and rewards, and return the numbers of the samples."""
    found = []
    with streampack.connect(endpoint, format="numpy", verify=True, stall_timeout_s=PATIENCE_S) as loader:
        if publish:
            loader.publish(0)
        for number, step in enumerate(loader.steps()):
            for pack in step:
                of_items, of_patches = pack["cu_items"].tolist(), pack["cu_patches"].tolist()
                for i, each in enumerate(pack["number"].tolist()):
                    sent, (first, stop) = sample(each), of_items[i : i + 2]
                    pixels = pack["pixel_values"][of_patches[first] : of_patches[stop]]
                    assert np.array_equal(pixels, sent.get("pixel_values", np.zeros((0, 12))))
                    assert np.array_equal(
                        pack["image_grid_thw"][first:stop], sent.get("image_grid_thw", np.zeros((0, 3)))
                    )
                    assert pack.get("reward", {i: each / 4})[i] == each / 4
                    found.append(each)
            if publish:
                loader.publish(number + 1)
    return found


def test_samples_with_images_wait_for_their_rewards_whoever_is_killed() -> None:
    with folder() as path, ThreadPoolExecutor() as pool:
        config = settings(path)
        config["fields"] |= LATE
        broker = RunningBroker(path, config)
        try:
            worker = pool.submit(generate, broker.producers)
            until(lambda: broker.status()["streams"][0]["samples"] > 30)
            broker.kill()
            broker = RunningBroker(path, config)
            until(lambda: broker.status()["streams"][0]["samples"] > 60)
            reader = pool.submit(read_numbered, broker.trainers)
            until(lambda: broker.feed()["steps"]["returned"] > 2)
            broker.kill()
            broker = RunningBroker(path, config)
            worker.result(PATIENCE_S)
            assert sorted(reader.result(PATIENCE_S)) == list(range(SAMPLES))
        finally:
            broker.kill()


def test_paced_samples_have_their_images() -> None:
    """They wait in the broker until a step needs them."""

    def work(endpoint: str) -> None:
        with streampack.Producer(endpoint, stream="chats", timeout_s=PATIENCE_S) as chats:
            for first in range(0, SAMPLES, 4):
                version = chats.wait_to_start(4)
                chats.send_group([numbered(number) for number in range(first, first + 4)], policy_version=version)
            chats.close(end=True)

    with folder() as path, ThreadPoolExecutor() as pool:
        config = settings(path)
        config["fields"]["number"] = LATE["number"]
        config["rules"] |= {"step": {"samples": 16}, "staleness": {"max_policy_lag": 1, "on_exceed": "wait"}}
        with running_broker(config) as broker:
            worker = pool.submit(work, broker.producers)
            reader = pool.submit(read_numbered, broker.trainers, publish=True)
            worker.result(PATIENCE_S)
            assert sorted(reader.result(PATIENCE_S)) == list(range(SAMPLES))
            until(lambda: broker.status()["memory"]["media_bytes"] == 0)
