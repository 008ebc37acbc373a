"""Status, metrics and the commands report, plan, ledger, why and replay show the media of a run."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import streampack
from tests.integration.running import PATIENCE_S, folder, running_broker, until, write
from tests.integration.running import streampack as command

SAMPLES = 60
FIELDS = {"pixels": {"dtype": "uint8", "axis": "patch", "shape": [4]}}


def sample(number: int) -> dict[str, Any]:
    """Up to three images; the first sample has two of them, with three and five patches."""
    draw = np.random.default_rng(number)
    patches = [3, 5] if number == 0 else draw.integers(1, 9, number % 4).tolist()
    found: dict[str, Any] = {"input_ids": draw.integers(1, 1000, int(draw.integers(5, 60)))}
    if patches:
        found |= {"patches": patches, "pixels": draw.integers(0, 256, (sum(patches), 4), dtype=np.uint8)}
    return found


def test_commands_say_what_media_a_run_has() -> None:
    sent = [sample(number) for number in range(SAMPLES)]
    patches = sum(sum(each.get("patches", ())) for each in sent)
    items = sum(len(each.get("patches", ())) for each in sent)
    with folder() as path:
        sides = {side: f"ipc://{path}/{side}" for side in ("producers", "trainers")}
        config = {
            "run": "seen", "listen": {**sides, "http": "127.0.0.1:0"}, "fields": FIELDS,
            "rules": {
                "budget": 128, "window": {"samples": 16}, "step": {"packs": 2}, "limits": {"patches": 24, "items": 5},
                "balance": {"patches": [100, 1]},
            },
            "streams": {"chats": {"pushed": True, "partitions": 1}}, "state_dir": str(path / "state"),
            "merge": "arrival",
        }  # fmt: skip
        ranks: dict[tuple[int, int], set[int]] = {}
        with running_broker(config) as broker:
            with streampack.Producer(broker.producers, stream="chats") as chats:
                for each in sent:
                    chats.send(each)
                chats.close(end=True)
            until(lambda: broker.status()["memory"]["media_bytes"] > 0)
            with streampack.connect(broker.trainers, format="numpy", stall_timeout_s=PATIENCE_S) as loader:
                for step in loader.steps():
                    for pack in step:
                        ids = pack["sample_ids"]
                        ranks[step.index, pack["pack"]] = set(ids[ids[:, 2] == 0, 1].tolist())
            until(lambda: broker.feed()["state"] == "ended")
            media, text = broker.feed()["media"], broker.get("/metrics")
        assert (media["items"], media["patches"]) == (items, patches)
        assert media["most_patches"] <= 24
        assert media["most_items"] <= 5
        assert sum(media["bound_by"].values()) == sum(map(bool, ranks.values()))
        assert min(media["bound_by"].values()) > 0, "each axis fills some pack"
        assert f'streampack_media_patches_total{{feed="train"}} {float(patches)}' in text
        assert 'streampack_media_bound_packs_total{feed="train",axis="items"}' in text
        state = str(path / "state")
        report = json.loads(command("report", state, "--json").stdout)
        assert report["media"] | {"dropped": {}} == media
        assert f"Media: {items} media items with {patches} patches." in command("report", state).stdout
        planned = json.loads(command("plan", state, "--json").stdout)
        assert (planned["media"]["items"], planned["media"]["patches"]["total"]) == (items, patches)
        packs = sum(media["bound_by"].values())
        shares = {axis: count / packs for axis, count in media["bound_by"].items()}
        assert planned["settings"][0]["bound_by"] == pytest.approx(shares), "of one stream, whose order is known"
        assert json.loads(command("ledger", "verify", "--state-dir", state, "--json").stdout)["good"]
        found = json.loads(command("why", "--state-dir", state, "--sample", "chats:0", "--json").stdout)["places"][0]
        assert (found["items"], found["patches"]) == (2, 8)
        told = command("why", "--state-dir", state, "--sample", "chats:0").stdout
        assert "has 2 media items with 8 patches" in told
        step = json.loads(command("why", "--state-dir", state, "--step", "0", "--json", "--dp-size", "2").stdout)
        assert step["num_patches"] == sum(pack["num_patches"] for pack in step["packs"]) > 0
        broker_yaml = write(path / "broker.yaml", config)
        again = json.loads(command("replay", "--step", "1", "-c", broker_yaml, "--json").stdout)
        assert again["equal"]


@pytest.mark.parametrize("late", [False, True])
def test_why_names_the_images_of_a_sample(late: bool) -> None:
    """The sample is in the window, or waits for its reward."""
    with folder() as path:
        sides = {side: f"ipc://{path}/{side}" for side in ("producers", "trainers")}
        fields = {"pixels": {"dtype": "reference", "axis": "item"}}
        reward = {"reward": {"dtype": "float32", "axis": "sample", "late": True}}
        config = {
            "run": "named", "listen": {**sides, "http": "127.0.0.1:0"}, "fields": fields | (reward if late else {}),
            "rules": {"budget": 64, "step": {"packs": 2}}, "streams": {"chats": {"pushed": True, "partitions": 1}},
            "state_dir": str(path / "state"), "merge": "arrival",
        }  # fmt: skip
        with running_broker(config) as broker, streampack.Producer(broker.producers, stream="chats") as chats:
            for number in range(6):
                places = [
                    {"uri": f"https://host/{number}.tar?key=secret", "offset": 512 * i, "size": 9}
                    for i in range(number)
                ]
                chats.send({"input_ids": [number], "pixels": places, "patches": [4] * number})
            chats.flush()
            sample = ("why", "--state-dir", str(path / "state"), "--sample", "chats:0:3")
            found = json.loads(command(*sample, "--json").stdout)
            assert found["references"] == {
                "pixels": [
                    {"uri": "https://host/3.tar", "size": 9},
                    {"uri": "https://host/3.tar", "offset": 512, "size": 9},
                    {"uri": "https://host/3.tar", "offset": 1024, "size": 9},
                ]
            }  # fmt: skip
            assert "pixels[1]: https://host/3.tar at byte 512, 9 bytes" in command(*sample).stdout
            none = command("why", "--state-dir", str(path / "state"), "--sample", "chats:0:0", "--json").stdout
            assert json.loads(none)["references"] is None
            assert found["is"] == "waiting"
            index = command("why", "--state-dir", str(path / "state"), "--sample", "chats:3", "--json").stdout
            assert (json.loads(index)["references"] is None) == late, "a sample that waits has no index yet"
