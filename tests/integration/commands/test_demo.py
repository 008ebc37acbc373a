"""The demo as a newcomer runs it, small."""

from __future__ import annotations

import json
from pathlib import Path

from tests.integration.running import streampack, write_jsonl

PROMISED = (
    "samples_produced", "samples_delivered", "samples_lost", "samples_duplicated", "steps", "packs", "tokens",
    "utilization", "waste_ratio", "packing_efficiency", "bin_balance", "cost_max_over_mean", "tokens_per_second",
    "next_p50_ms", "next_p99_ms", "starved_fraction", "shards_verified",
)  # fmt: skip


def test_the_demo_delivers_every_sample_once() -> None:
    result = streampack("demo", "--json", "--steps", "24", "--work-ms", "5")
    assert result.returncode == 0, result.stderr + result.stdout
    found = json.loads(result.stdout.splitlines()[-1])
    assert set(PROMISED) <= set(found)
    assert found["samples_delivered"] == found["samples_produced"] > 300
    assert found["samples_lost"] == found["samples_duplicated"] == found["samples_damaged"] == 0
    assert found["steps"] >= 23
    assert found["packs"] == 4 * found["steps"]
    assert found["shards_verified"] == 2 * found["packs"]
    assert found["utilization"] > 0.95
    assert abs(sum(found["waste"].values()) - found["waste_ratio"]) < 1e-9


def test_the_demo_reads_each_byte_once_through_a_relay() -> None:
    result = streampack("demo", "--json", "--steps", "12", "--work-ms", "5", "--relay", "--keys")
    assert result.returncode == 0, result.stderr + result.stdout
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["samples_delivered"] == found["samples_produced"] > 150
    assert found["samples_lost"] == found["samples_duplicated"] == found["samples_damaged"] == 0
    assert found["shards_verified"] == 4 * found["packs"], "2 cp and 2 tp ranks check each pack"
    assert found["tokens"] * 2 < found["relay_received_bytes"] < 0.6 * found["relay_sent_bytes"]


def test_the_demo_reads_the_users_own_files_on_another_mesh(tmp_path: Path) -> None:
    rows = [{"text": "x" * (1 + 37 * i % 900)} for i in range(700)]
    files = write_jsonl(tmp_path / "mine.jsonl", rows)
    result = streampack(
        "demo", "--source", files, "--dp", "1", "--cp", "4", "--budget", "1024", "--window", "64", "--packer",
        "sliding_ffd", "--work-ms", "0",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr + result.stdout
    assert "every sample arrived exactly once" in result.stdout
    assert "of 700 in the source" in result.stdout


def test_the_demo_reads_chats_with_a_tokenizer_and_asks_for_one_without(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    files = write_jsonl(tmp_path / "chats.jsonl", [{"messages": turns}] * 50)
    result = streampack("demo", "--source", files, "--json")
    assert result.returncode == 2
    assert "hold chats, which need a tokenizer. Pass --tokenizer" in result.stderr
    result = streampack(
        "demo", "--source", files, "--tokenizer", "bytes", "--json", "--budget", "256", "--dp", "1", "--work-ms", "0"
    )
    assert result.returncode == 0, result.stderr + result.stdout
    assert json.loads(result.stdout.splitlines()[-1])["samples_delivered"] == 50


def test_the_demo_without_a_source_file_says_which() -> None:
    result = streampack("demo", "--source", "/nowhere/*.tar", "--json")
    assert result.returncode == 1
    assert "/nowhere/*.tar" in result.stderr
    assert "Traceback" not in result.stderr
