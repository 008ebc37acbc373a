"""Every mistake gives one line that says what was got, what was expected and what to do, and no traceback."""

from __future__ import annotations

import contextlib
import io
import re
import signal
import socket
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streampack_services.broker.serving.peer_messages import SAY_S

import streampack as sp
from streampack.errors import MeshError, Rejected, Unreachable, UserError
from streampack.transport.sockets import Dealer, Router
from tests.integration.running import (
    RunningBroker,
    folder,
    in_process,
    running,
    running_broker,
    streampack,
    the_error,
    until,
    write,
    write_jsonl,
)

RULES = {"budget": 256, "window": {"samples": 64}, "step": {"packs": 4}}
STREAMS = ("overlong", "empty", "ragged", "floats", "broken", "shared", "good")


@pytest.fixture(scope="module")
def broker() -> Iterator[RunningBroker]:
    """Strict about samples; a stream for each test, since all producers of one must read the same."""
    settings = {"rules": RULES, "streams": {name: {"partitions": 1} for name in STREAMS}, "memory": "64MiB"}
    with running_broker(settings) as found:
        yield found


def produce_line(path: Path, broker: str, stream: str, source: dict[str, Any], exit_code: int, *more: str) -> str:
    config = write(path / "producer.yaml", {"broker": broker, "streams": {stream: source}})
    return the_error(streampack("produce", "-c", config, *more), exit_code)


def broker_line(path: Path, exit_code: int = 2, **settings: Any) -> str:
    """What a broker with wrong settings says, and nothing more."""
    listen = {"producers": "tcp://127.0.0.1:*", "trainers": "tcp://127.0.0.1:*", "http": "127.0.0.1:0"}
    tree = {"listen": listen, "memory": "64MiB", "rules": RULES, "streams": {"web": {}}, **settings}
    tree.setdefault("limits", {"sample_tokens": 4096, "chunk": "16KiB"})
    return the_error(streampack("broker", "-c", write(path / "broker.yaml", tree)), exit_code)


# Configuration


def test_an_unknown_key_is_named_with_its_path(tmp_path: Path) -> None:
    line = broker_line(tmp_path, rules={"budgett": 256})
    assert "broker.yaml: rules: got the unknown key 'budgett', expected one of: packer, budget" in line


def test_an_unknown_key_of_a_producer_is_named(tmp_path: Path) -> None:
    source = {"source": "jsonl", "files": "x.jsonl", "shards": "x.jsonl"}
    line = produce_line(tmp_path, "tcp://127.0.0.1:1", "web", source, 2)
    assert "producer.yaml: streams.web: got the unknown key 'files', expected" in line
    assert "source, shards, path" in line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("streams: {web: {}\nrules: [", "is not valid YAML"),
        ("streams: {web: {passes: 0}}", "streams.web.passes: got 0, expected a whole number >= 1"),
        (
            "streams: {web: {}}\nrules: {packer: ffd}",
            "rules.packer: got 'ffd', expected one of: exact_fill, sliding_ffd",
        ),
        ("rules: {budget: 8}", "got no key 'streams', which is required. Add the key"),
        ("- web", "got a list, expected a mapping"),
        ("streams: {web: {}}\nmemory: plenty", "expected a size such as 16GiB"),
        ("streams: {web: {}}\nretain: {bytes: plenty}", "expected a size such as 16GiB"),
        ("streams: {web: {}}\nretain: {bytes: 128MiB}", "expected at least 256MiB"),
        ("streams: {web: {}}\nrules: {budget: 100, align: {sample: 8, pack: 8}}", "Use 96"),
        ("streams: {web: {}}\nlisten: {http: somewhere}", "expected host:port"),
        ("streams: {web: {}}\nlisten: {producers: udp://a:1}", "expected tcp://host:port or ipc:///path"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "broker.yaml").write_text(text)
    assert said in the_error(in_process("check", tmp_path / "broker.yaml"), 2)


def test_the_other_kind_of_configuration_is_told_from_the_right_one(tmp_path: Path) -> None:
    broker = write(tmp_path / "broker.yaml", {"run": "x", "streams": {"web": {}}})
    producer = write(tmp_path / "producer.yaml", {"streams": {"web": {"source": "text", "path": "x"}}})
    swapped = the_error(in_process("broker", "-c", producer), 2)
    assert (
        "producer.yaml: got a producer.yaml file (its streams have the key `source`), expected a broker.yaml file"
        in swapped
    )
    swapped = the_error(in_process("produce", "-c", broker), 2)
    assert (
        "broker.yaml: got a broker.yaml file (its streams lack the key `source`), expected a producer.yaml file"
        in swapped
    )


def test_a_configuration_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert "none.yaml: cannot be read: No such file" in the_error(in_process("check", tmp_path / "none.yaml"), 2)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    assert "bytes.yaml: cannot be read" in the_error(in_process("check", tmp_path / "bytes.yaml"), 2)


def test_a_memory_that_is_too_small_is_refused_with_one_that_is_enough(tmp_path: Path) -> None:
    line = broker_line(tmp_path, memory="100KiB")
    enough = re.search(r"got 100KiB, but the rules need at least (\d+MiB)", line)
    assert enough is not None
    tree: dict[str, Any] = {"memory": enough[1], "rules": RULES, "streams": {"web": {}}}
    tree["limits"] = {"sample_tokens": 4096, "chunk": "16KiB"}
    assert in_process("check", write(tmp_path / "enough.yaml", tree)).returncode == 0


# Addresses


def test_a_tcp_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        listen = {"producers": f"tcp://127.0.0.1:{port}", "trainers": "tcp://127.0.0.1:*", "http": "127.0.0.1:0"}
        line = broker_line(tmp_path, listen=listen)
        assert f"cannot listen on tcp://127.0.0.1:{port}: got an address in use, expected a free address" in line


def test_an_address_of_another_machine_is_named(tmp_path: Path) -> None:
    """It said to stop the other process."""
    free = {"producers": "tcp://127.0.0.1:*", "trainers": "tcp://127.0.0.1:*", "http": "127.0.0.1:0"}
    for side, address in (("producers", "tcp://203.0.113.7:7401"), ("http", "203.0.113.7:7400")):
        line = broker_line(tmp_path, listen=free | {side: address})
        assert f"cannot listen on {address}" in line
        assert "got an address of no interface of this machine, expected one of its own" in line
        assert "Stop the other process" not in line


def test_an_http_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        listen = {"producers": "tcp://127.0.0.1:*", "trainers": "tcp://127.0.0.1:*", "http": address}
        line = broker_line(tmp_path, listen=listen)
        assert f"cannot listen on {address} for HTTP: address already in use" in line
        assert "listen.http or --http" in line


def test_an_ipc_address_that_is_served_is_not_stolen(tmp_path: Path) -> None:
    with folder() as short:
        listen = {"producers": f"ipc://{short}/p", "trainers": f"ipc://{short}/t", "http": "127.0.0.1:0"}
        with running_broker({"listen": listen, "rules": RULES, "streams": {"web": {}}}) as first:
            line = broker_line(tmp_path, listen=listen)
            assert "got an address that another process uses, expected a free address" in line
            assert first.status()["ready"]


def test_a_producer_that_nobody_answers_says_so_and_may_be_tried_again(tmp_path: Path) -> None:
    shards = str(write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}]))
    source = {"source": "jsonl", "shards": shards}
    line = produce_line(tmp_path, "tcp://127.0.0.1:1", "web", source, 75, "--timeout", "0.5")
    assert "tcp://127.0.0.1:1: got no answer in 0.5 s, expected an answer from a broker. Check that" in line
    line = produce_line(tmp_path, f"file://{tmp_path}/none.json", "web", source, 75, "--timeout", "0.5")
    assert "none.json: got no file within 0.5 s, expected" in line


def test_a_client_that_nobody_answers_says_so() -> None:
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1: got no answer in .* s, expected an answer from a broker"):
        sp.connect("tcp://127.0.0.1:1", timeout_s=0.5)
    with pytest.raises(UserError, match="expected tcp://host:port or ipc:///path"):
        sp.connect("localhost")


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("tcp://localhost:*", "to connect to, expected a host and the port"),
        ("tcp://localhost:0", "to connect to, expected a host and the port"),
        ("tcp://*:7402", "to connect to, expected a host and the port"),
        ("tcp://no host:7402", "expected tcp://host:port or ipc:///path"),
        ("tcp://localhost:\u00b2", "expected tcp://host:port or ipc:///path"),
        ("tcp://a/b:7402", "cannot connect to 'tcp://a/b:7402': got Invalid argument"),
    ],
)
def test_an_address_that_nobody_can_connect_to_is_refused(endpoint: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        Dealer(endpoint, 1 << 20)
    assert endpoint in str(error.value)
    assert said in str(error.value)


def test_an_address_may_leave_the_port_open_to_listen_on() -> None:
    for endpoint in ("tcp://127.0.0.1:*", "tcp://127.0.0.1:0"):
        router = Router(endpoint, 1 << 20)
        router.close()
        assert not router.endpoint.endswith((":*", ":0"))
    with pytest.raises(UserError, match="got endpoint 'tcp://no host:1', expected tcp://host:port"):
        Router("tcp://no host:1", 1 << 20)


def test_status_of_nobody_may_be_tried_again_and_health_is_bad() -> None:
    assert "127.0.0.1:1: got no answer (connection refused)" in the_error(in_process("status", "127.0.0.1:1"), 75)
    assert "connection refused" in the_error(in_process("health", "http://127.0.0.1:1"), 1)


# Data


def test_a_sample_over_the_budget_ends_the_producer_and_is_named(tmp_path: Path, broker: RunningBroker) -> None:
    shards = write_jsonl(tmp_path / "a.jsonl", [{"text": "x" * 20}, {"text": "y" * 300}])
    line = produce_line(tmp_path, broker.producers, "overlong", {"source": "jsonl", "shards": str(shards)}, 2)
    assert "a.jsonl:line 2: got a sample of 301 tokens, expected at most 256. Set `overlong` in `rules`" in line
    broker.wait_for("a.jsonl:line 2: got a sample of 301 tokens")


def test_an_empty_sample_ends_the_producer_and_is_named(tmp_path: Path, broker: RunningBroker) -> None:
    shards = write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}, {"text": ""}])
    line = produce_line(tmp_path, broker.producers, "empty", {"source": "jsonl", "shards": str(shards)}, 2)
    assert "a.jsonl:line 2: got a sample that cannot be used (empty)" in line
    assert "set `poison: drop` in `rules` or in the stream" in line


def test_bad_samples_that_may_be_dropped_are_counted(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"tokens": [1, 2, 3]},
        {"tokens": []},
        {"tokens": [[1], [2, 3]]},
        {"tokens": [1.5]},
        {"tokens": [7]},
    ]
    shards = write_jsonl(tmp_path / "a.jsonl", rows)
    settings = {"rules": {**RULES, "poison": "drop"}, "streams": {"web": {"partitions": 1}}}
    with running_broker(settings) as broker:
        source = {"source": "jsonl", "shards": str(shards)}
        config = write(tmp_path / "p.yaml", {"broker": broker.producers, "streams": {"web": source}})
        with running("producer", "produce", "-c", config) as producer:
            with sp.connect(broker.trainers, format="numpy") as loader:
                assert sum(pack.num_samples for pack in loader) == 2
            assert producer.end() == 0
        until(lambda: 'streampack_received_samples_total{stream="web"} 5.0' in broker.get("/metrics"))
        metrics = broker.get("/metrics")
        for reason in ("empty", "ragged", "dtype"):
            assert f'streampack_rejected_samples_total{{stream="web",reason="{reason}"}} 1.0' in metrics
        assert 'streampack_received_tokens_total{stream="web"} 4.0' in metrics


@pytest.mark.parametrize(
    ("stream", "array", "reason"),
    [("ragged", np.zeros((2, 3), np.int32), "ragged"), ("floats", np.zeros(3, np.float32), "dtype")],
)
def test_an_npy_that_is_no_sequence_of_ids_is_named(
    tmp_path: Path, broker: RunningBroker, stream: str, array: np.ndarray[Any, Any], reason: str
) -> None:
    write_tar(tmp_path / "a.tar", {"0.npy": npy(np.arange(4, dtype=np.int32)), "1.npy": npy(array)})
    source = {"source": "webdataset", "shards": str(tmp_path / "a.tar")}
    line = produce_line(tmp_path, broker.producers, stream, source, 2)
    assert "a.tar" in line
    assert f"cannot be used ({reason}), expected a 1-D array of ids" in line


def test_a_broken_tar_is_named_with_the_place(tmp_path: Path, broker: RunningBroker) -> None:
    write_tar(tmp_path / "a.tar", {"0.npy": npy(np.arange(4, dtype=np.int32))})
    (tmp_path / "a.tar").write_bytes((tmp_path / "a.tar").read_bytes()[:700])
    source = {"source": "webdataset", "shards": str(tmp_path / "a.tar")}
    line = produce_line(tmp_path, broker.producers, "broken", source, 1)
    assert "a.tar" in line
    assert "expected" in line


def test_a_missing_shard_is_named_before_anything_starts(tmp_path: Path) -> None:
    source = {"source": "webdataset", "shards": str(tmp_path / "web-{0..1}.tar")}
    line = produce_line(tmp_path, "tcp://127.0.0.1:1", "web", source, 1)
    assert "streams.web:" in line
    assert "web-0.tar: the file cannot be read (No such file or directory). Create the file" in line


def test_a_stream_that_the_broker_does_not_know_is_refused(tmp_path: Path, broker: RunningBroker) -> None:
    shards = str(write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}]))
    line = produce_line(tmp_path, broker.producers, "other", {"source": "jsonl", "shards": shards}, 1)
    assert "got stream 'other', expected one of: overlong, empty" in line


def test_other_data_for_the_same_stream_is_refused(tmp_path: Path, broker: RunningBroker) -> None:
    first, second = write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}]), write_jsonl(tmp_path / "b.jsonl", [])
    config = {"broker": broker.producers, "streams": {"shared": {"source": "jsonl", "shards": str(first)}}}
    with folder() as path:
        write(path / "p.yaml", config)
        with running("producer", "produce", "-c", path / "p.yaml"):
            until(lambda: any(r["stream"] == "shared" and r["samples"] for r in broker.status()["streams"]))
            line = produce_line(tmp_path, broker.producers, "shared", {"source": "jsonl", "shards": str(second)}, 1)
    assert "got source digest" in line


# Meshes


def test_a_mesh_that_the_rules_cannot_serve_is_refused_with_those_they_can(broker: RunningBroker) -> None:
    with pytest.raises(MeshError, match=r"got dp=3, expected a divisor of the 4 packs of a step \(1, 2, 4\)"):
        sp.connect(broker.trainers, mesh={"dp": 3, "dp_rank": 0})
    with pytest.raises(
        MeshError, match=r"got cp=2 with align.sample=1 and align.pack=1, expected multiples of 2 \* cp = 4"
    ):
        sp.connect(broker.trainers, mesh={"cp": 2, "cp_rank": 0})
    with pytest.raises(MeshError, match=r"got cp=2 without cp_rank, expected the rank of this process"):
        sp.connect(broker.trainers, mesh={"cp": 2, "dp": 2, "dp_rank": 1})
    with pytest.raises(MeshError, match=r"got dp_rank=2 with dp=2"):
        sp.connect(broker.trainers, mesh={"dp": 2, "dp_rank": 2})


def test_a_rank_that_is_held_and_another_mesh_are_refused(broker: RunningBroker) -> None:
    with sp.connect(broker.trainers, mesh={"dp": 2, "dp_rank": 0}):
        with pytest.raises(MeshError, match=r"got rank dp=0/2 .* holds this rank. Start one client per rank"):
            sp.connect(broker.trainers, mesh={"dp": 2, "dp_rank": 0})
        with pytest.raises(MeshError, match="Give every rank the same mesh"):
            sp.connect(broker.trainers, mesh={"dp": 4, "dp_rank": 1})


def test_a_feed_that_is_not_served_is_refused(broker: RunningBroker) -> None:
    with pytest.raises(Rejected, match=r"got feed 'valid', expected one of: 'train'"):
        sp.connect(broker.trainers, feed="valid")


# Files


def npy(array: np.ndarray[Any, Any]) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def write_tar(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def test_a_flood_of_what_is_no_message_is_counted_and_told_in_a_line_or_two(broker: RunningBroker) -> None:
    before, said = broker.status()["messages"]["damaged"], broker.said.count("dropped a message")
    began = time.monotonic()
    with contextlib.ExitStack() as held:
        for _ in range(20):  # of more than MAX_DAMAGED messages a connection is cut
            dealer = held.enter_context(contextlib.closing(Dealer(broker.producers, 1 << 20)))
            for _ in range(10):
                until(lambda dealer=dealer: dealer.send([b"x" * 50]))  # type: ignore[misc]
        until(lambda: broker.status()["messages"]["damaged"] == before + 200)
    assert 0 < broker.said.count("dropped a message") - said <= 1 + (time.monotonic() - began) / SAY_S


def test_a_log_of_another_run_or_of_other_rules_is_refused_by_the_key_that_differs(tmp_path: Path) -> None:
    rules, limits = {"budget": 64, "step": {"packs": 1}}, {"sample_tokens": 4096, "chunk": "16KiB"}
    first: dict[str, Any] = {"run": "one", "state_dir": str(tmp_path / "state"), "rules": rules, "streams": {"web": {}}}
    first |= {"memory": "64MiB", "limits": limits}
    with running_broker(first) as broker:
        broker.signal(signal.SIGTERM)
        assert broker.end() == 0
    for other, said in (
        ({"run": "two"}, "got run 'two', expected 'one', the run that wrote the log"),
        ({"rules": rules | {"budget": 128}}, "feeds.train: rules.budget: got 128, expected 64 as the log has it"),
        ({"streams": {"web": {}, "code": {}}}, "feeds.train: rules.streams: got web, code, expected web as the log"),
        ({"feeds": {"valid": {}}}, "got feeds valid, expected train, the feeds in the log"),
    ):
        line = broker_line(tmp_path, **first | other)
        assert f"{tmp_path / 'state'} has the log of another configuration: {said}" in line
        assert line.endswith(". Restore the broker.yaml of that log, or set another state_dir")


def test_a_log_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    config = write(tmp_path / "broker.yaml", {"streams": {"web": {}}})
    line = the_error(streampack("run", "-c", config, "--log-dir", config, "--", "true"), 2)
    assert line.startswith("streampack: --log-dir ")
    assert line.endswith("cannot be made: File exists. Pass a folder.")


def test_a_rendezvous_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    line = broker_line(tmp_path, rendezvous=str(tmp_path / "here"))
    assert line.endswith("here cannot be written: Is a directory. Choose another path.")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broker.yaml", "here"]
