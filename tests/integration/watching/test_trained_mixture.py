"""The trained mixture is the same token for token in the ledger, ``status``, ``/metrics``, ``top`` and Python."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from streampack_services.ledger.state_dir import read_ledger

import streampack as sp
from streampack.sources import SourceSettings, open_source
from tests.integration.running import RunningBroker, folder, in_process, producing_here, until, write_jsonl

LENGTHS = {"web": (150, 250), "code": (4, 20)}
"""Shortest and longest sample of each stream."""
BAD = 3
"""Samples of ``code`` without tokens."""


def settings_in(path: Path) -> dict[str, Any]:
    rules = {"budget": 512, "window": {"samples": 64}, "step": {"packs": 2}}
    streams = {"web": {"weight": 0.3, "partitions": 2}, "code": {"weight": 0.7, "partitions": 2, "poison": "drop"}}
    return {"run": "mixed", "state_dir": str(path / "log"), "seed": 5, "rules": rules, "streams": streams}


def files_in(path: Path) -> dict[str, Any]:
    """Return a source of each stream; ``code`` has the same tokens as ``web``, and ends first."""
    rng = np.random.default_rng(1)
    sources = {}
    for stream, count in (("web", 150), ("code", 2_500)):
        lengths = rng.integers(*LENGTHS[stream], count, endpoint=True).tolist()
        rows: list[dict[str, Any]] = [{"tokens": [1] * length} for length in lengths]
        rows += [{"tokens": []}] * (BAD if stream == "code" else 0)
        sources[stream] = open_source(SourceSettings("jsonl", str(write_jsonl(path / f"{stream}.jsonl", rows))))
    return sources


def in_ledger(path: Path, upto: int) -> dict[str, tuple[int, int]]:
    """Return (samples, tokens) of each stream in the recorded steps before ``upto``."""
    with read_ledger(path / "log") as ledger:
        rows = np.concatenate([step.rows for step in ledger.steps("train") if step.step < upto])
    own = {name: rows["length"][rows["stream"] == number] for number, name in enumerate(LENGTHS)}
    return {name: (len(lengths), int(lengths.sum())) for name, lengths in own.items()}


def everywhere(broker: RunningBroker, loader: Any, returned: int) -> list[dict[str, tuple[int, int]]]:
    """Return (samples, tokens) of each stream as each view has it once every rank has returned so many steps."""
    until(lambda: broker.feed()["steps"]["returned"] == returned)
    until(
        lambda: (
            sum(row["trained_tokens"] for row in broker.status()["streams"])
            == sum(row["trained_tokens"] for row in loader.mixture().values())
        )
    )  # the rows of the status may be 4 ms old
    status = json.loads(in_process("status", broker.http, "--json").stdout)["streams"]
    top = json.loads(in_process("top", broker.http, "--once", "--json").stdout)["streams"]
    series = dict(re.findall(r"^streampack_(trained_\w+{.*}) (.*)$", broker.get("/metrics"), re.M))
    of_metrics = {
        name: (
            int(float(series[f'trained_samples{{stream="{name}"}}'])),
            int(float(series[f'trained_tokens{{stream="{name}"}}'])),
        )
        for name in LENGTHS
    }
    page = {row["stream"]: row for row in broker.status()["streams"]}
    mixed = loader.mixture()
    views = [{row["stream"]: row for row in status}, {row["name"]: row for row in top}, page, mixed]
    shares = [[view[name]["trained_share"] for name in LENGTHS] for view in views]
    assert shares.count(shares[0]) == len(shares)
    return [*({n: (v[n]["trained_samples"], v[n]["trained_tokens"]) for n in LENGTHS} for v in views), of_metrics]


def test_trained_tokens_by_stream_agree_everywhere_and_go_on_after_a_restart() -> None:
    with folder() as path:
        sources, settings = files_in(path), settings_in(path)
        broker = RunningBroker(path, settings)
        try:
            with sp.connect(broker.trainers, format="numpy") as loader, producing_here(broker.producers, sources):
                steps = loader.steps()
                for _ in range(20):
                    step = next(steps)
                    assert len(step.sample_streams) == step.num_samples == len(step.sample_ids)
                    by_name = Counter(step.sample_streams)
                    assert by_name == Counter(["web", "code"][number] for number in step.sample_ids[:, 0])
                trained = in_ledger(path, 19)
                assert everywhere(broker, loader, 19) == [trained] * 5
                rows = {row["stream"]: row for row in broker.status()["streams"]}
                incoming = rows["web"]["tokens"] / sum(row["tokens"] for row in rows.values())
                assert abs(rows["web"]["trained_share"] - 0.3) < 0.05, "what was trained follows the weights"
                assert abs(incoming - 0.3) > 0.1, "what came in does not"
                until(lambda: loader.mixture()["code"]["rejected"] == {"empty": BAD})
                state = loader.state_dict()
            broker.kill()
            broker = RunningBroker(path, settings)
            before = {row["stream"]: row["trained_tokens"] for row in broker.status()["streams"]}
            assert 0 < sum(before.values()) <= sum(tokens for _, tokens in trained.values())
            with sp.connect(broker.trainers, format="numpy") as loader, producing_here(broker.producers, sources):
                loader.load_state_dict(state)
                steps = loader.steps()
                while not loader.mixture()["code"]["ended"]:
                    next(steps)
                web, code = loader.mixture().values()
                assert (web["ended"], web["share"], web["weight"]) == (False, 1.0, 0.3)
                assert (code["ended"], code["share"], code["weight"]) == (True, 0.0, 0.7)
                for step in steps:
                    last = step.index
                assert everywhere(broker, loader, last + 1) == [in_ledger(path, last + 1)] * 5
                assert {row["passes"] for row in loader.mixture().values()} == {1}
                text = in_process("status", broker.http).stdout
                assert "ended" in text
                assert "trained tokens" in text
        finally:
            broker.kill()


def test_the_name_of_a_stream_that_was_added_later_is_known() -> None:
    with folder() as path:
        sources, broker = files_in(path), RunningBroker(path, settings_in(path))
        try:
            with sp.connect(broker.trainers, format="numpy") as loader, producing_here(broker.producers, sources):
                steps = loader.steps()
                next(steps)
                added = in_process("set", "streams", "--add", "math={weight: 2}", "--endpoint", broker.http, "--yes")
                assert added.returncode == 0, added.stderr
                assert list(loader.mixture()) == ["web", "code", "math"]
                with producing_here(broker.producers, {"math": sources["web"]}):
                    assert any("math" in step.sample_streams for step in steps)
        finally:
            broker.kill()
