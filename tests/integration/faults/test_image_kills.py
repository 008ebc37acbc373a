"""Producers, the broker and a rank are killed while images come from a store that fails: steps and pixels stay.

``KILLS=50 pytest tests/integration/faults/test_image_kills.py`` kills 50 times.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
from PIL import Image

from streampack.sources import TokenizerSettings, open_tokenizer
from tests.integration.forked import Command
from tests.integration.running import PATIENCE_S, Daemon, RunningBroker, folder, until, write, write_jsonl
from tests.soak.job import fixed_listen
from tests.tokenizers.processors.processor_folders import folder_of

KILLS = int(os.environ.get("KILLS", "3"))
CHATS, IMAGES = 40, 24


class FlakyStore(BaseHTTPRequestHandler):
    """Serves the files of a folder; some answers fail, are cut off, or come late."""

    protocol_version = "HTTP/1.1"
    files: ClassVar[Path]
    chance: ClassVar[float]
    draw: ClassVar[random.Random]
    failed: ClassVar[dict[str, int]]

    def do_GET(self) -> None:
        data = (self.files / self.path.strip("/")).read_bytes()
        fault = self.draw.choice(("drop", "busy", "cut", "late")) if self.draw.random() < self.chance else ""
        self.failed[fault] = self.failed.get(fault, 0) + 1
        begin, _, end = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        total, data = len(data), data[int(begin) : int(end) + 1 if end else None]
        if fault == "late":
            time.sleep(0.2)
        if fault == "drop":
            self.close_connection = True
            return
        self.send_response(503 if fault == "busy" else 206 if "Range" in self.headers else 200)
        self.send_header("Content-Length", "0" if fault == "busy" else str(len(data)))
        self.send_header("Content-Range", f"bytes {begin}-{int(begin) + len(data) - 1}/{total}")
        self.end_headers()
        if fault != "busy":
            with suppress(ConnectionError):  # of a process that was killed
                self.wfile.write(data[: len(data) // 2] if fault == "cut" else data)
        self.close_connection = fault == "cut"

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def flaky_store(files: Path) -> Iterator[type[FlakyStore]]:
    """A store of the files in a folder; it fails once ``chance`` is set."""
    handler = type("OneStore", (FlakyStore,), {"files": files, "chance": 0.0, "draw": random.Random(0), "failed": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        handler.place = f"http://127.0.0.1:{server.server_port}"  # type: ignore[attr-defined]
        yield handler
        server.shutdown()


class KilledRun:
    """A broker, a producer and a rank in a folder, each of which may be killed and started again."""

    def __init__(self, path: Path, settings: dict[str, Any], streams: dict[str, Any], step_s: float) -> None:
        self.path, self.step_s = path, step_s
        processor = streams["tokenizer"]["processor"]
        listen = fixed_listen(path, over_tcp=False)
        self.settings = settings | {"listen": listen, "state_dir": str(path / "state")}
        self.producer_file = write(
            path / "producer.yaml", {"broker": listen["producers"], "processes": 1, **streams}
        )  # fmt: skip
        self.of_rank = [listen["trainers"], processor, str(path), str(step_s)]
        self.running: dict[str, Any] = {}
        for kind in ("broker", "producer", "rank"):
            self.start(kind)

    def start(self, kind: str) -> None:
        if kind == "broker":
            self.running[kind] = RunningBroker(self.path, self.settings)
        elif kind == "producer":
            self.running[kind] = Daemon(self.path, "producer", "produce", "-c", self.producer_file, "--timeout", "300")
        else:
            with (self.path / "rank.log").open("ab") as log:
                self.running[kind] = Command(
                    self.of_rank, log.fileno(), log.fileno(), "tests.integration.faults.image_rank"
                )

    def kill(self, kind: str) -> None:
        """Kill a process and those that it has started, so that none of them can say goodbye."""
        running = self.running[kind]
        process = running if kind == "rank" else running.process
        if process.poll() is None:
            workers = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            for worker in workers:
                with suppress(psutil.NoSuchProcess):
                    worker.kill()
        process.wait(PATIENCE_S)

    def kill_again(self, kind: str) -> None:
        """Kill a process, and start its successor."""
        self.kill(kind)
        self.start(kind)

    @property
    def lines(self) -> list[str]:
        """The steps so far; the last line may be half of one."""
        return (self.path / "steps.jsonl").read_text().splitlines() if (self.path / "steps.jsonl").exists() else []

    def end(self) -> dict[int, Any]:
        """Wait for the last step, and return each step's digest, chain and pixels."""
        code = self.running["rank"].wait(PATIENCE_S + KILLS * 10)
        assert code == 0, (self.path / "rank.log").read_text()[-3000:]
        found: dict[int, Any] = {}
        for line in self.lines:
            index, *rest = json.loads(line)
            assert found.setdefault(index, rest) == rest, f"step {index} was another one before"
        return found

    def close(self) -> None:
        for kind in self.running:
            self.kill(kind)


@contextmanager
def killed_run(*arguments: Any) -> Iterator[KilledRun]:
    with folder() as path:
        run = KilledRun(path, *arguments)
        try:
            yield run
        finally:
            run.close()


@pytest.mark.timeout(120 + 20 * KILLS)
def test_kills_while_a_store_of_images_fails_change_no_step_and_no_pixel(tmp_path: Path) -> None:
    draw = random.Random(44)
    processor = str(folder_of("qwen2_vl", tmp_path / "model"))
    for number in range(IMAGES):
        size = draw.randrange(30, 120), draw.randrange(30, 120)
        Image.effect_noise(size, 100).convert("RGB").save(tmp_path / f"{number}.jpg")
    fields = dict(open_tokenizer(TokenizerSettings(processor=processor)).image_fields)
    settings = {
        "run": "killed", "fields": fields,
        "rules": {"budget": 256, "window": {"samples": 32}, "step": {"packs": 2}, "limits": {"patches": 512}},
        "streams": {"chats": {"passes": 2 + 2 * KILLS}},
    }  # fmt: skip
    with ExitStack() as stack:
        store = stack.enter_context(flaky_store(tmp_path))
        rows = []
        for number in range(CHATS):
            images = [f"{draw.randrange(IMAGES)}.jpg" for _ in range(number % 3)]
            turns = [{"role": "user", "content": "<image>" * len(images) + f"what {number}?"}]
            rows.append({"messages": [*turns, {"role": "assistant", "content": "a fox"}], "images": images})
        shards = [write_jsonl(tmp_path / f"chats-{at}.jsonl", rows[at::2]) for at in range(2)]
        source = {"source": "jsonl", "shards": [str(one) for one in shards], "image_folder": store.place}  # type: ignore[attr-defined]
        streams = {"tokenizer": {"processor": processor}, "streams": {"chats": source}}
        with killed_run(settings, streams, 0.0) as run:
            calm = run.end()
        store.chance = 0.1
        run = stack.enter_context(killed_run(settings, streams, 0.03))
        kinds = [draw.sample(("broker", "producer", "rank"), 3) for _ in range(-(-KILLS // 3))]
        for kind in [kind for three in kinds for kind in three][:KILLS]:
            before = len(run.lines)
            until(partial(lambda count: len(run.lines) > count + 1, before))
            time.sleep(draw.uniform(0, 0.3))
            assert run.running["rank"].poll() is None, "the run was over before its kills"
            run.kill_again(kind)
        killed = run.end()
    assert sorted(calm) == list(range(len(calm)))
    assert killed == calm
    assert sum(store.failed.values()) - store.failed[""] > KILLS
    assert any(pixels for *_, pixels in calm.values())
