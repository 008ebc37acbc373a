"""``streampack check``: every value, where it came from, what it means and what follows."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from subprocess import CompletedProcess
from types import UnionType
from typing import Any, Union, get_args, get_origin

import datasets
import jsonschema
import msgspec
import pyarrow as pa
import pytest
import yaml
from pyarrow import parquet
from streampack_services.check.check import key_lines, meaning_of

from streampack.config.config_files import read_either
from streampack.config.daemon_settings import BrokerConfig, ProducerConfig
from streampack.errors import ConfigError
from tests.integration.running import in_process, the_error, write, write_jsonl

ROOT = Path(__file__).parents[3]
BROKER = """# a comment
run: check
memory: 64MiB
rules:
  budget: 4096
  step: {packs: 16}
  overlong: truncate
planned_mesh:
  dp: 4
  cp: 2
limits: {sample_tokens: 4096, chunk: 64KiB}
streams:
  web: {weight: 0.7, overlong: split}
  code:
    weight: 0.3
    repeat: true
    partitions: 2
"""


def structs(kind: Any) -> set[type[msgspec.Struct]]:
    """Every settings struct below a type."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return {kind}.union(*(structs(field.type) for field in msgspec.structs.fields(kind)))
    inner = get_args(kind) if get_origin(kind) in (Union, UnionType, dict, tuple, list) or get_args(kind) else ()
    return set().union(*(structs(each) for each in inner))


ALL = structs(BrokerConfig) | structs(ProducerConfig)


def test_every_key_has_a_meaning() -> None:
    assert len(ALL) > 10
    for kind in ALL:
        for field in msgspec.structs.fields(kind):
            nested = structs(field.type)
            text = meaning_of(kind, field.name)
            assert text or nested, f"{kind.__name__}.{field.name} has no Meta(description=)"
            assert not text.endswith(".")


@pytest.fixture(scope="module")
def schema() -> Any:
    found = json.loads(in_process("check", "--schema").stdout)
    jsonschema.Draft202012Validator.check_schema(found)
    return jsonschema.Draft202012Validator(found)


def test_the_schema_takes_every_configuration_that_is_shipped(schema: Any) -> None:
    roots = [ROOT / "examples", ROOT / "deploy"]
    files = [path for root in roots for path in root.rglob("*.yaml") if "streams:" in path.read_text()]
    configurations = [path for path in files if path.parts[-2:] != ("deploy", "compose.yaml") and is_ours(path)]
    assert len(configurations) >= 11
    for path in configurations:
        schema.validate(yaml.safe_load(path.read_text()))


def is_ours(path: Path) -> bool:
    try:
        return read_either(path) is not None
    except ConfigError:
        return False


@pytest.mark.parametrize(
    ("change", "at"),
    [
        ({"rules": {"bugdet": 8192}}, "bugdet"),
        ({"rules": {"packer": "best"}}, "best"),
        ({"rules": {"budget": 0}}, "minimum"),
        ({"steps_ahead": 65}, "maximum"),
        ({"streams": {}}, "non-empty"),
        ({"memory": [1]}, "[1]"),
    ],
)
def test_the_schema_marks_what_the_broker_refuses(schema: Any, tmp_path: Path, change: dict[str, Any], at: str) -> None:
    tree = {"run": "check", "streams": {"web": {"weight": 0.7}}}
    assert schema.is_valid(tree)
    assert not schema.is_valid(tree | change)
    (error,) = schema.iter_errors(tree | change)
    assert any(at in each.message for each in error.context)
    the_error(in_process("check", write(tmp_path / "broker.yaml", tree | change)), 2)


def test_the_schema_has_the_meanings_that_check_shows(schema: Any) -> None:
    found = schema.schema["$defs"]
    assert {kind.__name__ for kind in ALL} == set(found)
    for kind in ALL:
        for field in msgspec.structs.fields(kind):
            if text := meaning_of(kind, field.name):
                assert found[kind.__name__]["properties"][field.encode_name]["description"] == text


def test_without_a_file_check_says_which_it_needs() -> None:
    assert "Got no FILE. Pass a broker.yaml, a producer.yaml or both" in the_error(in_process("check"), 2)


def checked(path: Path) -> dict[str, dict[str, Any]]:
    found = json.loads(in_process("check", path, "--json").stdout)
    rows = [*found["values"], *found["follows"]]
    assert all(set(row) == {"path", "value", "source", "line", "meaning"} for row in rows)
    assert all((row["line"] is not None) == (row["source"] == "file") for row in rows)
    assert all(row["meaning"] for row in rows)
    by_path = {row["path"]: row for row in rows}
    assert len(by_path) == len(rows), "no path twice"
    return by_path


@pytest.fixture
def broker(tmp_path: Path) -> Path:
    path = tmp_path / "broker.yaml"
    path.write_text(BROKER)
    return path


def test_check_says_how_full_groups_of_ranks_are_and_that_fixed_packs_gain_nothing(tmp_path: Path) -> None:
    groups = {"cp": "dynamic", "rank_tokens": 1024}
    conf = {
        "streams": {"web": {}}, "feeds": {"train": groups}, "planned_mesh": {"dp": 2, "cp": 4},
        "rules": {"budget": 8192, "step": {"packs": 3}, "shape": "fixed"},
    }  # fmt: skip
    found = checked(write(tmp_path / "broker.yaml", conf))
    assert found["feeds.train.micro_batches"]["value"] == 3
    assert (
        "fill them to 1.00. Above 0.95, each step adds a nearly empty one"
        in found["feeds.train.micro_batches"]["meaning"]
    )
    assert "Set `shape: exact`" in found["feeds.train.rank_width"]["meaning"]
    assert found["feeds.train.max_group"]["source"] == "default"


def test_values_say_where_they_came_from(broker: Path) -> None:
    rows = checked(broker)
    found = {path: (row["value"], row["source"], row["line"]) for path, row in rows.items()}
    assert found["rules.budget"] == (4096, "file", 5)
    assert found["rules.step.packs"] == (16, "file", 6)
    assert found["streams.code.repeat"] == (True, "file", 16)
    assert found["streams.web.overlong"] == ("split", "file", 13)
    assert found["streams.code.overlong"] == ("truncate", "derived", None)
    assert rows["streams.code.overlong"]["meaning"].endswith("(from rules.overlong)")
    assert found["rules.align.sample"] == (4, "derived", None)
    assert found["rules.window"] == ("auto", "default", None)
    assert found["feeds.train.streams"] == (["web", "code"], "derived", None)


def test_check_shows_what_the_broker_will_do(broker: Path) -> None:
    found = {path: row["value"] for path, row in checked(broker).items()}
    assert found["feeds.train.step_tokens"] == 16 * 4096
    assert found["feeds.train.micro_batches"] == 4
    assert found["feeds.train.dp_sizes"] == [1, 2, 4, 8, 16]
    assert found["feeds.train.cp_sizes"] == [1, 2]
    assert found["feeds.train.padding"] == 1.5
    assert found["feeds.train.producers"] == 6
    assert found["feeds.train.share.web"] == 0.7
    assert found["memory.step_bytes"] == 16 * 4096 * found["memory.token_bytes"]
    shares = [found[f"memory.{name}_bytes"] for name in ("merged", "waiting", "spare")]
    assert sum(shares) == 64 * 2**20
    assert found["memory.partition_bytes"] * 6 == found["memory.waiting_bytes"]
    parts = [found[f"process.{name}_bytes"] for name in ("libraries", "arena", "arriving", "leaving", "tables")]
    assert sum(parts) == found["process.peak_bytes"] < found["process.most_bytes"]
    assert found["process.arena_bytes"] <= 64 * 2**20


def test_a_meaning_is_told_for_the_first_stream_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "broker.yaml", {"streams": {"web": {}, "code": {}}})
    assert in_process("check", path, "--all").stdout.count("Number of passes over") == 1
    meanings = [value["meaning"] for value in json.loads(in_process("check", path, "--json").stdout)["values"]]
    assert meanings.count("Number of passes over the stream's data") == 2


def test_a_producer_s_files_are_looked_for(tmp_path: Path) -> None:
    shards = str(write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}]))
    path = write(tmp_path / "p.yaml", {"streams": {"web": {"source": "jsonl", "shards": shards}}, "processes": 2})
    rows = checked(path)
    assert rows["streams.web.files"]["value"] == 1
    assert rows["streams.web.tokenizer.append_eos"]["meaning"].endswith("(from tokenizer)")
    assert rows["streams.web.tokenizer.vocab_size"]["value"] == 257
    assert rows["streams.web.tokenizer.has_chat_template"]["value"] is False, "none is named"
    assert (rows["processes"]["value"], rows["processes"]["line"]) == (2, 1)
    assert in_process("check", path).stdout.splitlines()[-1] == "good: streampack produce can use p.yaml"
    path = write(tmp_path / "p.yaml", {"streams": {"web": {"source": "jsonl", "shards": shards + ".gone"}}})
    assert "a.jsonl.gone: the file cannot be read" in the_error(in_process("check", path), 1)


def of_rows(tmp_path: Path, rows: list[dict[str, Any]], **keys: Any) -> Path:
    """A producer.yaml of one stream of these rows, with these keys."""
    shards = str(write_jsonl(tmp_path / "a.jsonl", rows))
    return write(tmp_path / "p.yaml", {"streams": {"web": {"source": "jsonl", "shards": shards, **keys}}})


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"text_key": "body"},
            "got text_key 'body', but no row has such a key (3 rows were read; the first, a.jsonl:line 1, has the keys",
        ),
        ({"tokens_key": "ids"}, "got tokens_key 'ids', but no row has such a key"),
        ({"messages_key": "talk"}, "got messages_key 'talk', but no row has such a key"),
        (
            {"prompt_key": "text", "completion_key": "a"},
            "got prompt_key 'text', completion_key 'a', but no row has such a key",
        ),
        ({"text_key": "empty"}, "got text_key 'empty', but no row has such a key"),
        (
            {"fields": {"loss_mask": "msk"}},
            "streams.web.fields.loss_mask: got the key 'msk', but no row has this key (3 rows were read",
        ),
    ],
)
def test_a_key_that_no_row_has_is_not_good(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    rows: list[dict[str, Any]] = [
        {"id": 1, "text": "x", "mask": [1], "empty": None},
        {"id": 2, "text": "y"},
        {"text": "z"},
    ]
    found = the_error(in_process("check", of_rows(tmp_path, rows, **keys)), 2)
    assert said in found
    assert "has the keys id, text, mask)" in found
    assert in_process("check", of_rows(tmp_path, rows, text_key="text", fields={"loss_mask": "mask"})).returncode == 0
    assert in_process("check", of_rows(tmp_path, rows, tokens_key="mask")).returncode == 0, "one row has it"


def test_rows_without_any_key_of_a_sample_are_not_good(tmp_path: Path) -> None:
    said = the_error(in_process("check", of_rows(tmp_path, [{"body": "x"}])), 2)
    assert "streams.web: got rows without any of the keys tokens, input_ids, text or messages" in said
    assert "a.jsonl:line 1, has the keys body). Set text_key, tokens_key or messages_key" in said


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"conversations": []}, "Set messages_key: conversations, or rename the key to messages"),
        ({"instruction": "a", "output": "b"}, "Write `prompt` (instruction and input) and `completion` (output)"),
    ],
)
def test_rows_of_usual_formats_get_their_own_advice(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    assert said in the_error(in_process("check", of_rows(tmp_path, [row])), 2)


def test_rows_that_cannot_be_used_are_not_good(tmp_path: Path) -> None:
    said = the_error(in_process("check", of_rows(tmp_path, [{"text": 5}] * 3)), 2)
    assert "streams.web: none of the first 3 rows can be used. a.jsonl:line 1: got a sample that cannot be used" in said
    assert "but text is a int" in said


def test_check_shows_how_the_keys_of_rows_are_read_and_what_they_reject(tmp_path: Path) -> None:
    row = {"input_ids": [5, 6], "labels": [-100, 6], "attention_mask": [1, 1], "position_ids": [0, 0], "text": "ab"}
    path = of_rows(tmp_path, [row, {"input_ids": [5, 6], "seq_lengths": [1, 1]}])
    rows = checked(path)
    assert {key: rows[f"streams.web.keys.{key}"]["value"] for key in ("labels", "real", "positions", "lengths")} == {
        "labels": ["labels"], "real": ["attention_mask"], "positions": ["position_ids"], "lengths": ["seq_lengths"],
    }  # fmt: skip
    assert rows["streams.web.keys.real"]["meaning"].startswith("0 for padding at the beginning or the end")
    warnings = {
        each["word"]: each["meaning"] for each in json.loads(in_process("check", path, "--json").stdout)["warnings"]
    }
    assert sorted(warnings) == ["position_ids: packed", "seq_lengths: packed"]
    assert warnings["seq_lengths: packed"].startswith("unless broker.yaml declares the field seq_lengths, rows are")
    shown = " ".join(in_process("check", path, "--samples", "1").stdout.split())
    assert "a.jsonl:line 1 2 tokens, 1 in the loss" in shown or "a.jsonl:line 2 2 tokens, 2 in the loss" in shown
    previewed = json.loads(in_process("check", path, "--samples", "2", "--json").stdout)["samples"]["web"]
    assert sorted(sample["undeclared"] for sample in previewed) == sorted(warnings.values())
    sentences = " ".join(in_process("check", path, "--samples", "2").stdout.split())
    assert all(f"warning: {sentence}" in sentences for sentence in warnings.values())


def test_only_the_beginning_of_a_file_is_read_for_its_keys(tmp_path: Path) -> None:
    """The last line of what is read is torn, and the file goes on for longer than a check may take."""
    path = of_rows(tmp_path, [{"body": "x" * 1000}] * 10_000, text_key="text")
    assert "(100 rows were read;" in the_error(in_process("check", path), 2)
    path = of_rows(tmp_path, [{"body": "x" * 5_000_000}], text_key="text")
    assert in_process("check", path).returncode == 0, "not one row was read"


@pytest.mark.parametrize("kind", ["parquet", "huggingface", "webdataset", "python"])
def test_a_key_that_no_row_has_is_found_in_every_format(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"id": str(number), "text": "x", "mask": [1, 1]} for number in range(3)]
    if kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path := tmp_path / "a.parquet")
    elif kind == "huggingface":
        datasets.Dataset.from_list(rows).save_to_disk(path := tmp_path / "saved")
    elif kind == "webdataset":
        with tarfile.open(path := tmp_path / "a.tar", "w") as tar:
            for number, row in enumerate(rows):
                for name, data in (("json", json.dumps(row).encode()), ("jpg", b"image")):
                    member = tarfile.TarInfo(f"{number}.{name}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    else:
        (tmp_path / "their_rows.py").write_text(f"ROWS = {rows!r}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        path = Path("their_rows:ROWS")

    def check(**keys: Any) -> CompletedProcess[str]:
        stream = {"source": kind, "path": str(path), **keys}
        return in_process("check", write(tmp_path / "p.yaml", {"streams": {"web": stream}}))

    prefix = "json/" if kind == "webdataset" else ""
    good = check(text_key=f"{prefix}text", fields={"loss_mask": "mask"})
    assert good.returncode == 0, good.stderr
    for keys in ({"text_key": f"{prefix}body"}, {"fields": {"loss_mask": "msk"}}):
        bad = check(**keys)
        assert bad.returncode in (1, 2)
        assert "body" in bad.stderr or "streams.web.fields.loss_mask: " in bad.stderr
        assert "id, text, mask" in bad.stderr
    if kind == "webdataset":
        assert "has other members in its file: json, jpg" in check(text_key="txt").stderr


@pytest.mark.parametrize("broker", ["auto", "localhost:7401", "tcp://localhost", "tcp://localhost:0"])
def test_an_address_that_no_producer_can_connect_to_is_not_good(tmp_path: Path, broker: str) -> None:
    shards = str(write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}]))
    tree = {"broker": broker, "streams": {"web": {"source": "jsonl", "shards": shards}}}
    said = the_error(in_process("check", write(tmp_path / "p.yaml", tree)), 2)
    assert f"got endpoint {broker!r}" in said
    assert in_process("check", write(tmp_path / "p.yaml", tree | {"broker": "file:///x/found.json"})).returncode == 0


def test_keys_that_are_not_there_are_not_good(tmp_path: Path) -> None:
    path = write(tmp_path / "broker.yaml", {"streams": {"web": {}}, "listen": {"keys": str(tmp_path / "keys")}})
    assert "has no broker.key. Make one with 'streampack keys new" in the_error(in_process("check", path), 2)
    shards = str(write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}]))
    tree = {"key_file": str(tmp_path / "no.key"), "streams": {"web": {"source": "jsonl", "shards": shards}}}
    assert "no.key" in the_error(in_process("check", write(tmp_path / "p.yaml", tree)), 2)


def test_lines_are_those_of_the_keys() -> None:
    text = "a: 1\nb: &base\n  c: 2\n\n'd e':\n  <<: *base\n  f: {g: 3,\n      h: 4}\n"
    assert key_lines(text) == {"a": 1, "b": 2, "b.c": 3, "d e": 5, "d e.c": 3, "d e.f": 7, "d e.f.g": 7, "d e.f.h": 8}
    assert key_lines("") == key_lines("# nothing\n") == {}


def test_rows_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    rows = ['{"text": "one"}', '{"text": "cut of', '{"text": "three"}']
    (tmp_path / "rows.jsonl").write_text("".join(f"{row}\n" for row in rows))
    streams = {"web": {"source": "jsonl", "shards": str(tmp_path / "rows.jsonl")}}
    path = write(tmp_path / "producer.yaml", {"broker": "tcp://127.0.0.1:1", "streams": streams})
    (warning,) = json.loads(in_process("check", path, "--json").stdout)["warnings"]
    assert (warning["word"], warning["samples"], warning["rows"]) == ("json", 1, 3)
    assert warning["where"].endswith("rows.jsonl:line 2")


STAGED = """
memory: 2GiB
rules: {budget: 4096, step: {packs: 64}, overlong: split}
planned_mesh: {dp: 8}
streams: {web: {}, books: {}}
stages:
  - {name: ramp, at: {step: 0}, rules: {step: {packs: {from: 16, to: 64, over: 2000}}}}
  - name: long
    at: {tokens: 2T}
    rules: {budget: 16384, step: {packs: 12}}
    weights: {books: 1}
    planned_mesh: {dp: 4, cp: 2}
"""


def test_check_shows_each_stage_as_a_column_and_the_meshes_that_cannot_read_it(tmp_path: Path) -> None:
    file = tmp_path / "staged.yaml"
    file.write_text(STAGED)
    lines = in_process("check", file).stdout.splitlines()
    at = lines.index("  stages")
    assert lines[at + 1 :] == [
        "    ramp: dp 32, 64 cannot read it: its steps have a multiple of 16 packs",
        "    long: dp 8, 16 ... 64 cannot read it: its steps have 12 packs",
        "    long: the mesh before (dp=8) cannot read this stage: trainers save a",
        "      checkpoint there, and come back on dp=4, cp=2",
        "                   run          ramp         long",
        "    begins         step 0       step 0       2.0T tokens",
        "    budget         4,096        4,096        16,384",
        "    packs a step   64           16 to 64     12",
        "    window         auto         auto         auto",
        "    tokens a step  262.1k       262.1k       196.6k",
        "    streams        2            2            1",
        "    planned mesh   dp=8         dp=8         dp=4, cp=2",
        "    micro-batches  8            2 to 8       3",
        "    dp             1, 2 ... 64  1, 2 ... 16  1, 2 ... 12",
        "    cp             1            1            1, 2",
        "    memory         19.0 MiB     19.0 MiB     66.6 MiB",
        "--all shows every value and its meaning",
        "good: streampack broker can use staged.yaml",
    ]
    tree = json.loads(in_process("check", file, "--json").stdout)
    run, ramp, long = tree["stages"]["train"]
    assert (run["at"], ramp["packs"], long["at"]) == ({"step": 0}, [16, 64], {"tokens": 2 * 10**12})
    assert (long["dp"], long["cp"], long["streams"]) == ([1, 2, 3, 4, 6, 12], [1, 2], ["books"])
    assert (len(run["misfits"]), len(ramp["misfits"]), len(long["misfits"])) == (0, 1, 2)
    values = {value["path"]: (value["value"], value["line"]) for value in tree["values"]}
    assert values["stages.ramp.rules.step.packs.to"] == (64, 7)
    assert values["stages.long.rules.budget"] == (16384, 10)
    assert values["stages.long.planned_mesh.cp"] == (2, 12)
    [meaning] = [value["meaning"] for value in tree["values"] if value["path"] == "stages.long.rules.budget"]
    assert meaning.startswith("Number of tokens in a pack, or `{from: N, to: M, over: STEPS}`")
    whole = in_process("check", file, "--all")
    assert whole.stdout.count("planned mesh   dp=8") == 1, whole.stderr


def test_a_run_without_stages_has_no_columns(tmp_path: Path) -> None:
    file = write(tmp_path / "broker.yaml", {"streams": {"web": {}}})
    assert json.loads(in_process("check", file, "--json").stdout)["stages"] == {}
    assert "  stages" not in in_process("check", file).stdout.splitlines()
