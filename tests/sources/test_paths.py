"""Paths as people write them: ``~`` in every place, one file under two names, and URLs with queries."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from streampack_services.cli.main import _with_home

import streampack
from streampack.config.config_files import read_broker, read_producer
from streampack.config.daemon_settings import BrokerConfig, ProducerConfig
from streampack.config.typed_yaml import convert, with_home
from streampack.errors import ConfigError, SourceError
from streampack.integrations.ray import ray_service
from streampack.sources import SourceSettings, TokenizerSettings, open_source, open_tokenizer
from streampack.transport.keys import find_key
from tests.integration.running import STREAMPACK, executed, running, write, write_jsonl
from tests.sources.faulty_store import FaultyStore, faulty_store
from tests.sources.writers import WRITERS

ROWS = [{"text": f"sample {number}"} for number in range(40)]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home folder of this process and its children; the current folder is another one, and must stay empty."""
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "home"


BROKER: dict[str, Any] = {
    "rendezvous": "~/run.json", "state_dir": "~/state", "listen": {"keys": "~/keys", "token_file": "~/token",
    "trainers": "ipc://~/trainers"}, "standby": {"arbiter": "~/arbiter"}, "streams": {"web": {}},
}  # fmt: skip
PRODUCER: dict[str, Any] = {
    "broker": "file://~/one.json,file://~/two.json", "key_file": "~/key",
    "tokenizer": {"file": "~/tokenizer", "chat_template": "~/chat.jinja"},
    "streams": {
        "web": {"source": "jsonl", "shards": ["~/a/*.jsonl", "s3://bucket/~/b", "./~/c"]},
        "code": {"source": "text", "path": "~/d", "tokenizer": {"file": "~/other"}},
    },
}  # fmt: skip


def test_every_key_that_holds_a_path_takes_the_home_folder(home: Path, tmp_path: Path) -> None:
    for broker in (read_broker(write(tmp_path / "broker.yaml", BROKER)), convert(BROKER, BrokerConfig)):
        paths = [broker.rendezvous, broker.state_dir, broker.listen.keys, broker.listen.token_file]
        assert paths == [f"{home}/{name}" for name in ("run.json", "state", "keys", "token")]
        assert broker.listen.trainers == f"ipc://{home}/trainers"
        assert broker.standby is not None
        assert broker.standby.arbiter == f"{home}/arbiter"
    assert ray_service._tree(BROKER)["state_dir"] == f"{home}/state"
    for producer in (read_producer(write(tmp_path / "p.yaml", PRODUCER)), convert(PRODUCER, ProducerConfig)):
        assert producer.broker == f"file://{home}/one.json,file://{home}/two.json"
        assert producer.key_file == f"{home}/key"
        assert producer.tokenizer.file == f"{home}/tokenizer"
        assert producer.tokenizer.chat_template == f"{home}/chat.jinja"
        assert producer.streams["web"].shards == [f"{home}/a/*.jsonl", "s3://bucket/~/b", "./~/c"]
        assert producer.streams["code"].path == f"{home}/d"
        assert producer.streams["code"].tokenizer == TokenizerSettings(file=f"{home}/other")


def strings(kind: Any, path: str = "") -> Iterator[str]:
    """The path of every key of a settings struct that may hold a text."""
    for field in msgspec.structs.fields(kind):
        inner = [each for each in _types(field.type) if hasattr(each, "__struct_fields__")]
        yield from (name for each in inner for name in strings(each, f"{path}{field.encode_name}."))
        if str in _types(field.type):
            yield path + field.encode_name


def _types(kind: Any) -> list[Any]:
    inner = getattr(kind, "__args__", ())
    return [kind, *(each for arg in inner for each in _types(arg))]


def test_no_key_that_may_hold_a_path_is_left_out() -> None:
    """A new key whose name says that it is a path appears here, and is covered because all texts are."""
    found = [key for kind in (BrokerConfig, ProducerConfig) for key in strings(kind)]
    named = {
        key for key in found if key.split(".")[-1] in ("path", "file", "shards") or key.endswith(("_dir", "_file"))
    }
    assert named >= {"state_dir", "listen.token_file", "key_file", "tokenizer.file", "streams.shards", "streams.path"}


@given(st.dictionaries(st.text(max_size=4), st.text("~/ab:,.", max_size=8) | st.lists(st.text("~/a", max_size=4))))
def test_only_a_leading_home_changes(tree: dict[str, Any]) -> None:
    for before, after in zip(tree.values(), with_home(tree).values(), strict=True):
        texts = zip([before], [after], strict=True) if isinstance(before, str) else zip(before, after, strict=True)
        for text, expanded in texts:
            expected = os.path.expanduser(text) if text.startswith("~") and "/" in text else text
            assert expanded == expected


def test_a_run_that_names_the_home_folder_everywhere_makes_no_folder_of_that_name(home: Path) -> None:
    write_jsonl(home / "a.jsonl", ROWS)
    sides = {"producers": "tcp://127.0.0.1:*", "trainers": "tcp://127.0.0.1:*", "http": "127.0.0.1:0"}
    settings = {
        "listen": sides, "rendezvous": "~/run.json", "state_dir": "~/state", "memory": "32MiB",
        "streams": {"web": {"partitions": 1}}, "rules": {"budget": 64, "step": {"packs": 1}},
        "limits": {"sample_tokens": 4096, "chunk": "16KiB"},
    }  # fmt: skip
    streams = {"web": {"source": "jsonl", "shards": "~/*.jsonl"}}
    file = write(home / "producer.yaml", {"broker": "file://~/run.json", "streams": streams})
    with (
        executed(),
        running("broker", "broker", "-c", write(home / "broker.yaml", settings)),
        running("producer", "produce", "-c", file),
    ):
        samples = sum(pack.num_samples for pack in streampack.connect("file://~/run.json", format="numpy"))
    assert samples == len(ROWS)
    assert (home / "state").is_dir()
    assert os.listdir(".") == []


def test_commands_take_the_home_folder_in_an_option(home: Path) -> None:
    write(home / "broker.yaml", {"streams": {"web": {}}})
    for words in (["check", "~/broker.yaml"], ["keys", "new", "--dir=~/keys", "broker"]):
        subprocess.run([*STREAMPACK, *words], capture_output=True, check=words[0] == "check")
    assert os.listdir(".") == []
    assert _with_home(["run", "-c=~/a", "--b=~/c", "~/d", "--", "~/e"]) == [
        "run", f"-c={home}/a", f"--b={home}/c", f"{home}/d", "--", "~/e"]  # fmt: skip


def test_local_and_the_interface_take_the_home_folder(home: Path) -> None:
    write_jsonl(home / "a.jsonl", ROWS)
    (home / "b").mkdir()
    settings = WRITERS["huggingface"](home / "b")
    for source in ("~/a.jsonl", ["~/a.jsonl"], Path("~/a.jsonl"), {"web": {"source": "jsonl", "path": "~/a.jsonl"}}):
        with streampack.local(source, budget=64, format="numpy") as loader:
            assert sum(pack.num_samples for pack in loader) == len(ROWS)
    assert settings.path is not None
    with streampack.local(settings.path.replace(str(home), "~"), budget=256, format="numpy") as loader:
        assert sum(pack.num_samples for pack in loader) > 0
    assert open_source(SourceSettings("jsonl", ["~/*.jsonl"])).num_files == 1
    with pytest.raises(SourceError, match="from two patterns"):
        open_source(SourceSettings("text", ["~/a.jsonl", str(home / "a.jsonl")]))
    with pytest.raises(ConfigError, match=f"{home}/none"):
        open_tokenizer(TokenizerSettings(file="~/none"))
    with pytest.raises(streampack.errors.UserError, match=r"none\.key"):
        find_key("~/none.key")


@pytest.mark.parametrize("kind", ["jsonl", "webdataset", "parquet", "text", "megatron"])
def test_a_file_under_two_names_is_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    settings = WRITERS[kind](tmp_path / "data")
    first = min(tmp_path.glob("data/*"))
    (tmp_path / "data" / f"latest{first.suffix}").symlink_to(first)
    if kind == "megatron":
        index = first.with_suffix(".idx" if first.suffix == ".bin" else ".bin")
        (tmp_path / "data" / f"latest{index.suffix}").symlink_to(index)
        shards: Any = sorted({str(path.with_suffix("")) for path in tmp_path.glob("data/*")})
    else:
        shards = str(tmp_path / "data" / "*")
    with pytest.raises(SourceError, match=r"latest.*which are one file, expected each file once") as error:
        open_source(msgspec.structs.replace(settings, shards=shards, path=None))
    assert str(first.with_suffix("")) in str(error.value)


def test_a_link_to_a_folder_and_a_url_of_a_file_are_names_of_the_same_files(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    path = write_jsonl(tmp_path / "data" / "a.jsonl", ROWS)
    (tmp_path / "link").symlink_to("data")
    for other in (f"{tmp_path}/link/a.jsonl", f"file://{path}"):
        with pytest.raises(SourceError, match="which are one file"):
            open_source(SourceSettings("jsonl", [str(path), other]))
    shutil.copy(path, tmp_path / "data" / "b.jsonl")
    assert open_source(SourceSettings("jsonl", str(tmp_path / "data" / "*"))).num_files == 2


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FaultyStore]:
    (tmp_path / "web").mkdir()
    with faulty_store(tmp_path / "web") as found:
        yield found


@pytest.mark.parametrize(("kind", "name"), [
    ("jsonl", "0.jsonl"), ("webdataset", "0.tar"), ("parquet", "0.parquet"), ("text", "0.txt"), ("megatron", "0.bin"),
])  # fmt: skip
def test_a_url_with_a_query_is_read_by_local_and_by_sources(kind: str, name: str, store: FaultyStore) -> None:
    WRITERS[kind](store.folder)
    first = min(path for path in store.folder.glob(f"*{Path(name).suffix}"))
    url = f"{store.url}/{first.name}?X-Amz-Signature=a%2Fb*c[1]&part=1"
    expected = list(open_source(SourceSettings(kind, path=str(first))).read(0, 1, seed=0, passes=1))  # type: ignore[arg-type]
    for settings in (SourceSettings(kind, path=url), SourceSettings(kind, [url])):  # type: ignore[arg-type]
        found = list(open_source(settings).read(0, 1, seed=0, passes=1))
        assert [each.tokens.tolist() for each in found] == [each.tokens.tolist() for each in expected]
    good = [each for each in expected if each.reason is None]
    for given_ in (url, [url]):
        with streampack.local(given_, budget=4096, poison="drop", format="numpy") as loader:
            assert sum(pack.num_samples for pack in loader) == len(good)


def test_a_pattern_with_a_query_is_refused_with_what_to_write(store: FaultyStore) -> None:
    with pytest.raises(ConfigError, match=r"with a query, .*brace pattern such as web-\{000\.\.127\}\.tar\?key=1"):
        open_source(SourceSettings("jsonl", f"{store.url}/*.jsonl?key=1"))
    assert np.all(store.times == [])
