"""Media by reference: the client fetches them from files and from an HTTP store that drops, stalls and corrupts."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from awscrt.checksums import crc32c

import streampack
from streampack.errors import MediaError, SampleError, UserError
from tests.integration.proxy import Proxy
from tests.integration.running import PATIENCE_S, folder, running_broker, until
from tests.media.stored_images import FIELDS, WIDTH, ImageStore, decode, image, store

SAMPLES = 36


def sample(number: int, place: str, images: int | None = None) -> dict[str, Any]:
    """Up to two images; image 0 is that of every third sample."""
    draw = np.random.default_rng(number)
    mine = [0 if number % 3 == 0 else 10 * number + i for i in range(number % 3 or 1 if images is None else images)]
    found: dict[str, Any] = {"input_ids": draw.integers(1, 1000, int(draw.integers(5, 60)))}
    if mine:
        data = [image(each) for each in mine]
        found["pixel_values"] = [
            {"uri": f"{place}/{each}", "size": len(one), "crc32c": crc32c(one)}
            for each, one in zip(mine, data, strict=True)
        ]
        found["patches"] = [len(one) // WIDTH for one in data]
        found["images"] = mine
    return found


def check(batches: Any, sent: list[dict[str, Any]]) -> list[int]:
    """Check the pixels of each sample; return the numbers of the samples."""
    numbers = []
    for pack in batches:
        of_items, of_patches = pack["cu_items"].tolist(), pack["cu_patches"].tolist()
        for i, (_, number, _) in enumerate(pack["sample_ids"].tolist()):
            first, stop = of_items[i : i + 2]
            pixels = np.asarray(pack["pixel_values"][of_patches[first] : of_patches[stop]])
            expected = b"".join(image(each) for each in sent[number].get("images", []))
            assert pixels.tobytes() == expected
            numbers.append(number)
    return numbers


def settings(path: Path) -> dict[str, Any]:
    sides = {side: f"ipc://{path}/{side}" for side in ("producers", "trainers")}
    return {
        "run": "references", "listen": {**sides, "http": "127.0.0.1:0"}, "fields": FIELDS,
        "rules": {"budget": 128, "window": {"samples": 16}, "step": {"packs": 2}, "limits": {"patches": 24}},
        "streams": {"chats": {"pushed": True, "partitions": 1}}, "state_dir": str(path / "state"), "merge": "arrival",
    }  # fmt: skip


@pytest.mark.parametrize("format", ["numpy", "thd"])
def test_a_store_that_drops_stalls_and_corrupts_loses_no_image(format: str) -> None:
    with store() as place, folder() as path, running_broker(settings(path)) as broker:
        sent = [sample(number, place) for number in range(SAMPLES)]
        with streampack.Producer(broker.producers, stream="chats") as chats:
            for each in sent:
                chats.send(each)
            chats.close(end=True)
        media = streampack.Media(decode, threads=4)
        with streampack.connect(
            broker.trainers, format=format, media=media, stall_timeout_s=PATIENCE_S, verify=True
        ) as loader:  # fmt: skip
            assert sorted(check(loader, sent)) == list(range(SAMPLES))
    asked = store.asked  # type: ignore[attr-defined]
    once = sum(count for name, count in asked.items() if int(name.strip("/")) % 4 in (0, 2) and name != "/0")
    assert once == len([name for name in asked if int(name.strip("/")) % 4 in (0, 2) and name != "/0"])
    packs_at_most = SAMPLES // 2
    assert asked["/0"] <= packs_at_most, "an image is fetched once for each message that has it"


def test_images_in_files_are_ranges_of_them() -> None:
    with folder() as path:
        data = [image(number) for number in range(12)]
        ends = np.cumsum([len(each) for each in data])
        (path / "images.bin").write_bytes(b"".join(data))
        sent = []
        for number, (each, end) in enumerate(zip(data, ends.tolist(), strict=True)):
            place = streampack.Reference(str(path / "images.bin"), end - len(each), len(each), crc32c(each))
            media = {"pixel_values": [place], "patches": [len(each) // WIDTH], "images": [number]}
            sent.append({"input_ids": [1, 2, number], **media})
        with streampack.local(
            sent, budget=16, format="thd", fields=FIELDS, shuffle=False, media=streampack.Media(decode)
        ) as loader:  # fmt: skip
            assert check(loader, sent) == list(range(12))


def test_without_media_a_pack_of_numpy_has_the_references() -> None:
    sent = [sample(number, "nowhere") for number in range(1, 9)]
    with streampack.local(sent, budget=128, format="numpy", fields=FIELDS, shuffle=False) as loader:
        found = [reference for pack in loader for reference in pack["pixel_values"]]
    expected = [streampack.Reference(**given) for each in sent for given in each["pixel_values"]]
    assert sorted(found, key=repr) == sorted(expected, key=repr)
    with pytest.raises(UserError, match=r"expected\s+media=streampack.Media"):
        streampack.local(sent, budget=128, format="thd", fields=FIELDS)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"crc32c": 1}, r"sample .*:0: .*: got the checksum [0-9a-f]{8}, expected 00000001"),
        ({"size": 9999}, "expected 9999"),
        ({"uri": "/no/such/file"}, "No such file"),
        ({"uri": "nosuch://host/x"}, "which cannot be opened"),
    ],
)
def test_media_that_are_wrong_or_missing_end_the_trainer_with_the_place(changed: dict[str, Any], said: str) -> None:
    with folder() as path:
        (path / "0").write_bytes(image(0))
        one = sample(0, str(path))
        one["pixel_values"] = [one["pixel_values"][0] | changed]
        with (
            pytest.raises(MediaError, match=said),
            streampack.local([one], budget=128, format="thd", fields=FIELDS, media=streampack.Media(decode)) as loader,
        ):
            list(loader)


def raises(data: bytes, reference: streampack.Reference) -> np.ndarray:
    raise RuntimeError("no such image")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (raises, "the decoder raised RuntimeError: no such image"),
        (lambda data, _: np.zeros((99, 3)), r"an array of shape \[99, 3\], expected \d rows"),
    ],
)
def test_a_decoder_that_fails_is_named_with_sample_and_place(function: Any, said: str) -> None:
    with folder() as path:
        (path / "0").write_bytes(image(0))
        media = streampack.Media(function)
        with (
            pytest.raises(MediaError, match=said),
            streampack.local(
                [sample(0, str(path))], budget=128, format="thd", fields=FIELDS, media=media
            ) as loader,
        ):  # fmt: skip
            list(loader)


def test_a_store_that_never_answers_ends_the_trainer_after_its_time() -> None:
    class Silent(ImageStore):
        def do_GET(self) -> None:
            time.sleep(5.0)

    with store(do_GET=Silent.do_GET) as place:
        media = streampack.Media(decode, timeout_s=0.5)
        with (
            pytest.raises(MediaError, match=r"http://.*: got no answer in 0.5 s"),
            streampack.local([sample(0, place)], budget=128, format="thd", fields=FIELDS, media=media) as loader,
        ):
            list(loader)


@pytest.mark.parametrize(
    ("value", "said"),
    [([3], "pixel_values: reference"), ([{"uri": ""}], "pixel_values: reference"), ("a", "media: items")],
)
def test_a_reference_that_is_not_valid_is_refused(value: Any, said: str) -> None:
    with (
        folder() as path,
        running_broker(settings(path)) as broker,
        pytest.raises(SampleError, match=said),
        streampack.Producer(broker.producers, stream="chats") as chats,
    ):
        chats.send({"input_ids": [1, 2], "pixel_values": value, "patches": [1, 2]})


def test_arguments_of_media_that_cannot_be_are_named() -> None:
    for arguments, said in (
        ({"decode": "nothing:here"}, "expected 'package.module:function'"),
        ({"decode": decode, "threads": 0}, "got threads=0"),
        ({"decode": decode, "timeout_s": 0}, "got timeout_s=0"),
        ({"decode": 3}, "got decode=3"),
    ):
        with pytest.raises(UserError, match=said):
            streampack.Media(**arguments)


def test_loaders_with_the_same_media_end_each_on_its_own() -> None:
    """As one for training and one for validation."""
    with folder() as path:
        (path / "0").write_bytes(image(0))
        sent, media = [sample(0, str(path))] * 40, streampack.Media(decode, threads=2)
        options: Any = {"budget": 64, "format": "thd", "fields": FIELDS, "media": media}
        with streampack.local(sent, **options) as train:
            packs = iter(train)
            next(packs)
            with streampack.local(sent[:2], **options) as valid:
                assert len(list(valid)) > 0
            assert sum(1 for _ in packs) > 3


def test_a_sample_whose_media_cannot_be_had_loses_its_loss_and_is_counted() -> None:
    with folder() as path:
        sent = [sample(number, str(path)) for number in range(30)]
        for number in {each for one in sent for each in one.get("images", [])} - {50}:
            (path / str(number)).write_bytes(image(number))
        (path / "20").write_bytes(image(20)[:-1])
        for each in sent:
            each["loss_mask"] = [1] * len(each["input_ids"])
        bad = {each for each, one in enumerate(sent) if {20, 50} & set(one.get("images", []))}
        assert len(bad) == 2
        options: Any = {"budget": 128, "fields": {**FIELDS, "loss_mask": {}}, "shuffle": False, "window": 8}
        media = streampack.Media(decode, on_error="drop")
        seen = set[int]()
        with streampack.local(sent, format="thd", media=media, **options) as loader:
            for pack in loader:
                ends, items = pack.cu_seqlens_padded.tolist(), pack["cu_items"].tolist()
                for i, (_, number, _) in enumerate(pack["sample_ids"].tolist()):
                    seen.add(number)
                    labels, mask = pack.labels[ends[i] : ends[i + 1]], pack["loss_mask"][ends[i] : ends[i + 1]]
                    if number in bad:
                        assert (labels == -100).all()
                        assert not mask.any()
                        continue
                    assert labels[:-1].tolist() == list(sent[number]["input_ids"][1:])
                    assert mask.sum() == len(labels) - 1
                    first, stop = (int(pack["cu_patches"][items[at]]) for at in (i, i + 1))
                    expected = b"".join(image(each) for each in sent[number].get("images", []))
                    assert np.asarray(pack["pixel_values"][first:stop]).tobytes() == expected
            stats = loader.stats()
        assert seen == set(range(30))
        assert {name: count for name, count in stats.items() if name.startswith("media_dropped") and count} == {
            "media_dropped_missing": 1, "media_dropped_wrong_bytes": 1,
        }  # fmt: skip
        with pytest.raises(UserError, match="got verify=True with Media"):
            streampack.connect("tcp://127.0.0.1:1", media=media, verify=True)
        with pytest.raises(UserError, match="on a mesh with cp=2, tp=1 and pp=1"):
            streampack.connect("tcp://127.0.0.1:1", media=media, mesh={"cp": 2, "cp_rank": 0})


def run_through(path: Path, ranks: int, rules: dict[str, Any], send: Any, function: Any) -> tuple[list[Any], int]:
    """Run samples through a broker on TCP; return the packs of each rank, and all bytes to and from the broker."""
    given = settings(path) | {"listen": dict.fromkeys(("producers", "trainers"), "tcp://127.0.0.1:0")}
    given["listen"]["http"] = "127.0.0.1:0"
    given["rules"] = rules
    with running_broker(given) as broker, Proxy(broker.producers) as near, Proxy(broker.trainers) as far:
        with streampack.Producer(near.endpoint, stream="chats") as chats:
            send(chats)
            chats.close(end=True)

        def read(rank: int) -> list[Any]:
            media, mesh = streampack.Media(function, threads=2), {"dp": ranks, "dp_rank": rank}
            with streampack.connect(far.endpoint, mesh=mesh, format="numpy", media=media) as loader:
                return list(loader)

        with ThreadPoolExecutor(ranks) as pool:
            found = list(pool.map(read, range(ranks)))
        return found, sum(way.carried for proxy in (near, far) for way in (proxy.up, proxy.down))


def test_the_brokers_traffic_does_not_depend_on_the_bytes_of_images() -> None:
    carried, patches = [], []
    for scale in (1, 1000):
        with folder() as path:
            for number in range(200):
                (path / f"{number:03}").write_bytes(bytes(scale * WIDTH * (1 + number % 6)))

            def send(chats: Any, path: Path = path) -> None:
                for number in range(200):
                    images = {"pixel_values": [str(path / f"{number:03}")], "patches": [1 + number % 6]}
                    chats.send({"input_ids": np.full(50, 7), **images})

            rules = {"budget": 512, "step": {"packs": 2}}
            ((packs,), total) = run_through(
                path,
                1,
                rules,
                send,
                lambda data, _, width=scale * WIDTH: np.frombuffer(data, np.uint8).reshape(-1, width),
            )
            carried.append(total)
            patches.append(sum(len(pack["pixel_values"]) for pack in packs))
    assert patches[0] == patches[1] == sum(1 + number % 6 for number in range(200))
    print(f"bytes to and from the broker: {carried[0]:,} and {carried[1]:,}, with images a thousand times as large")
    assert 0.9 < carried[1] / carried[0] < 1.1, "a thousand times the bytes of images"


def test_an_image_that_a_group_shares_is_fetched_once_for_each_rank() -> None:
    groups, size = 12, 8
    with store(faulty=False) as place, folder() as path:

        def send(chats: Any) -> None:
            for group in range(groups):
                data = image(group)
                one = {"pixel_values": [{"uri": f"{place}/{group}"}], "patches": [len(data) // WIDTH]}
                chats.send_group([{"input_ids": np.full(20 + i, group + 1), **one} for i in range(size)])

        found, _ = run_through(path, 2, {"budget": 128, "step": {"samples": 4 * size}}, send, decode)
    ranks_of = dict.fromkeys(range(groups), 0)
    for packs in found:
        mine = {int(index) // size for pack in packs for _, index, _ in pack.sample_ids.tolist()}
        for group in mine:
            ranks_of[group] += 1
    asked = store.asked  # type: ignore[attr-defined]
    assert {int(name.strip("/")): count for name, count in asked.items()} == ranks_of
    assert sum(ranks_of.values()) <= 2 * groups < groups * size


def test_dropped_media_show_in_status_and_metrics() -> None:
    with folder() as path, running_broker(settings(path)) as broker:
        sent = [sample(number, str(path)) for number in range(20)]
        for number in {each for one in sent for each in one.get("images", [])} - {10, 50}:
            (path / str(number)).write_bytes(image(number))
        with streampack.Producer(broker.producers, stream="chats") as chats:
            for each in sent:
                chats.send(each)
            chats.close(end=True)
        media = streampack.Media(decode, on_error="drop")
        with streampack.connect(broker.trainers, format="numpy", media=media, stall_timeout_s=PATIENCE_S) as loader:
            list(loader)
            until(lambda: broker.feed()["media"]["dropped"] == {"missing": 2})
            metrics = broker.get("/metrics")
    (line,) = [each for each in metrics.splitlines() if each.startswith("streampack_reader_media_dropped_total")]
    assert line.endswith(" 2.0")
