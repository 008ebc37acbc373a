"""``streampack.local``: the loader with no daemon, its errors, and what it leaves alone and behind."""

from __future__ import annotations

import gc
import gzip
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers

import streampack as sp
from streampack.errors import ConfigError, PeerError, SampleError, SourceError, UserError
from streampack.sources import SourceSettings, open_source
from tests.integration.running import PATIENCE_S, producing_here, running_broker, until, write_jsonl

TEXTS = [f"{number} " * (1 + number * 7 % 40) for number in range(300)]


@pytest.fixture(autouse=True)
def _short_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Temporary files of a test in a folder of its own, where the path of a socket fits; all are gone after it."""
    with tempfile.TemporaryDirectory(prefix="sp", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield
        gc.collect()
        assert os.listdir(folder) == []
        until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("streampack")])


def texts_of(packs: Any) -> list[str]:
    """Every sample of the packs as the text that it was, in order of its number."""
    found: dict[tuple[int, ...], str] = {}
    for pack in packs:
        for place, name in enumerate(map(tuple, pack.sample_ids.tolist())):
            start = pack.cu_seqlens_padded[place]
            length = pack.cu_seqlens[place + 1] - pack.cu_seqlens[place]
            assert name not in found
            ids = np.asarray(pack.input_ids)[start : start + length]
            assert ids[-1] == 256
            found[name] = bytes(ids[:-1].astype(np.uint8)).decode()
    return [found[name] for name in sorted(found)]


def test_every_row_in_memory_arrives_once_and_again_from_step_0() -> None:
    with sp.local(TEXTS, budget=512, packs=2, seed=3) as loader:
        first = list(loader.steps())
        assert sorted(texts_of(pack for step in first for pack in step)) == sorted(TEXTS)
        again = list(loader.steps())
        assert [step.index for step in again] == list(range(len(first)))
        assert [step.digest for step in again] == [step.digest for step in first]
        assert loader.stats()["steps"] == 2 * len(first)
        assert sorted(texts_of(loader)) == sorted(TEXTS)


def test_steps_are_those_of_a_broker_with_the_same_settings(tmp_path: Path) -> None:
    for number in range(3):
        write_jsonl(tmp_path / f"{number}.jsonl", [{"text": text} for text in TEXTS[number::3]])
    shards = str(tmp_path / "{0..2}.jsonl")
    rules = {"budget": 512, "window": {"samples": 64}, "step": {"packs": 2}, "align": {"sample": 1, "pack": 1}}
    source = open_source(SourceSettings("jsonl", shards))
    with (
        running_broker({"seed": 5, "rules": rules, "streams": {"data": {}}}) as broker,
        producing_here(broker.producers, {"data": source}),
        sp.connect(broker.trainers) as remote,
    ):
        expected = [step.digest for step in remote.steps()]
    with sp.local(shards, budget=512, packs=2, window=64, seed=5) as loader:
        assert [step.digest for step in loader.steps()] == expected


def test_files_that_are_not_shuffled_are_packed_in_their_order(tmp_path: Path) -> None:
    for number in range(3):
        write_jsonl(tmp_path / f"{number}.jsonl", [{"text": text} for text in TEXTS[number * 100 : number * 100 + 100]])
    with sp.local(str(tmp_path / "*.jsonl"), budget=512, shuffle=False) as loader:
        assert texts_of(loader) == TEXTS


def test_streams_are_mixed_by_their_weights() -> None:
    rows = {"a": [{"ids": [1] * 20}] * 400, "b": {"source": [[2] * 20] * 400, "repeat": True, "weight": 3.0}}
    with sp.local(rows, budget=200, tokens_key="ids", shuffle=False) as loader:
        step = next(loader.steps())
        for _, step in zip(range(50), loader.steps(), strict=False):
            ids = np.concatenate([pack.input_ids for pack in step])
            assert 100 <= (ids == 2).sum() <= 200
        assert step.index == 50


@pytest.mark.parametrize(
    "tokenizer",
    [str.split, lambda text: (_ for _ in text), "tests.integration.steps.test_local:characters"],
    ids=["words", "generator", "path"],
)
def test_a_tokenizer_is_a_callable_or_a_path(tokenizer: Any) -> None:
    with sp.local(["ab", "c"], tokenizer=tokenizer, budget=8, poison="drop") as loader:
        packs = list(loader)
    good = isinstance(tokenizer, str)
    assert sum(pack.num_samples for pack in packs) == (2 if good else 0)


def characters(text: str) -> list[int]:
    return [ord(each) for each in text]


class Encoding:
    ids = (7, 8)


class FastTokenizer:
    """As the tokenizers library's."""

    def encode(self, text: str) -> Encoding:
        return Encoding()


def test_a_tokenizer_may_be_an_object_whose_encodings_have_ids() -> None:
    with sp.local(["a"], tokenizer=FastTokenizer(), budget=2) as loader:
        assert next(loader).input_ids.tolist() == [7, 8]


class Dataset:
    """As torch's or Hugging Face's: numbered rows, and nothing that a list has beside them."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, number: int) -> dict[str, list[int]]:
        return {"input_ids": [number] * 4}


class Stream:
    """Can be gone through again."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[number] * 4 for number in range(30)])


@pytest.mark.parametrize(
    "rows", [Dataset(), Stream(), [np.full(4, n) for n in range(30)]], ids=["dataset", "iterable", "arrays"]
)
def test_rows_may_be_numbered_or_only_iterated(rows: Any) -> None:
    with sp.local(rows, budget=16, passes=2) as loader:
        found = [number for pack in loader for number in pack.input_ids[::4].tolist()]
    assert sorted(found) == sorted([*range(30)] * 2)


def test_an_iterator_is_read_once_and_then_says_so() -> None:
    with sp.local(iter([[1, 2]] * 5), budget=4) as loader:
        assert sum(pack.num_samples for pack in loader) == 5
        with pytest.raises(SourceError, match="got an iterator that stands at row 5, expected to read row 0 of pass 0"):
            next(iter(loader))
    with pytest.raises(UserError, match="data: got an iterator with more than one pass"):
        sp.local(iter([[1]]), repeat=True)


def test_the_format_is_that_of_the_extension(tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("one\ntwo\n")
    parquet.write_table(pa.table({"text": ["one", "two"]}), tmp_path / "rows.parquet")
    datasets.Dataset.from_dict({"text": ["one", "two"]}).save_to_disk(tmp_path / "saved")
    for name in ("lines.txt", "rows.parquet", "saved"):
        with sp.local(tmp_path / name, budget=16) as loader:
            assert sorted(texts_of(loader)) == ["one", "two"], name


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.gz"])
def test_compressed_files_are_known_by_their_extension(tmp_path: Path, name: str) -> None:
    lines = TEXTS if "txt" in name else [json.dumps({"text": text}) for text in TEXTS]
    (tmp_path / name).write_bytes(gzip.compress("\n".join(lines).encode()))
    with sp.local(tmp_path / name, budget=512) as loader:
        assert sorted(texts_of(loader)) == sorted(TEXTS)


def test_chats_in_memory_are_learned_by_their_answers() -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    with sp.local([{"messages": chat}], tokenizer="bytes", budget=64, fields={"loss_mask": {}}) as loader:
        pack = next(loader)
    learned = pack.labels[pack.labels != -100].tolist()
    assert learned == [*b"yes", 256]


CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}


@pytest.mark.parametrize("row", [CHAT, {"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]}])
def test_chats_without_a_tokenizer_are_refused_before_anything_starts(tmp_path: Path, row: Any) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(row) + "\n")
    for given in ([row], str(file), {"source": "jsonl", "shards": str(file), "fields": {"loss_mask": "mask"}}):
        source = {"chats": given} if isinstance(given, dict) else given
        with pytest.raises(
            ConfigError, match=r"(chats|data): tokenizer: got chats without a tokenizer, expected a tokenizer"
        ):
            sp.local(source, budget=64, fields={"loss_mask": {}}).close()


def test_chats_without_a_tokenizer_that_come_later_are_refused_when_they_are_read() -> None:
    for rows in (iter([CHAT]), ["a text"] * 100 + [CHAT]):
        loader = sp.local(rows, budget=64, fields={"loss_mask": {}}, shuffle=False)
        with loader, pytest.raises(ConfigError, match="got chats without a tokenizer"):
            list(loader)


def test_chats_are_written_by_a_tokenizer_of_transformers() -> None:
    library = Tokenizer(models.WordLevel({"<unk>": 0, "ask": 1, "yes": 2, "no": 3, "<end>": 4}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = import_module("transformers").PreTrainedTokenizerFast(tokenizer_object=library, eos_token="<end>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} <end> {% endfor %}"
    chat = [{"role": "user", "content": "ask no"}, {"role": "assistant", "content": "yes"}]
    with sp.local([{"messages": chat}], tokenizer=tokenizer, budget=8, fields={"loss_mask": {}}) as loader:
        pack = next(loader)
    assert pack.input_ids[:5].tolist() == [1, 3, 4, 2, 4]
    assert pack.labels[pack.labels != -100].tolist() == [2, 4]


@pytest.mark.parametrize(("message", "more", "reason", "said"), [
    ({"role": "model", "content": "yes"}, {}, "roles",
     r"message 1 has the role model, not .* Set tokenizer: \{roles: \{model: assistant\}\}"),
    ({"role": "tool", "content": "yes"}, {}, "template",
     r"the template does not write message 1, whose role is tool\. Set another template"),
    ({"role": "assistant", "content": "yes"}, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs",
     r"chat_template_kwargs: got tools, which streampack gives the template itself\. Remove it"),
])  # fmt: skip
def test_a_chat_that_cannot_be_used_says_what_to_write(message: Any, more: Any, reason: str, said: str) -> None:
    library = Tokenizer(models.WordLevel({"<unk>": 0, "ask": 1, "yes": 2, "<end>": 3}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = import_module("transformers").PreTrainedTokenizerFast(tokenizer_object=library, eos_token="<end>")
    tokenizer.chat_template = (
        "{% for m in messages if m.role != 'tool' %}{{ m.content }} <end> {% endfor %}{{ enable_thinking }}"
    )
    row = {"messages": [{"role": "user", "content": "ask"}, message], **more}
    pattern = rf"row 0: got a sample that cannot be used \({reason}\), expected .*, but {said}"
    loader = sp.local([row], tokenizer=tokenizer, budget=8, fields={"loss_mask": {}})
    with loader, pytest.raises(SampleError, match=pattern):
        next(loader)


# Errors


def failing() -> Iterator[str]:
    yield "good"
    raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("rows", "kind", "said"),
    [
        (["x" * 100, "y"], SampleError, "row 0: got a sample of 101 tokens, expected at most 64"),
        ([[1.5, 2.5]], SampleError, r"row 0: got a sample that cannot be used \(dtype\)"),
        ([{"body": "x"}], SampleError, r"row 0 \(has the keys body\): got a sample that cannot be used \(missing\)"),
        (failing(), SourceError, r"the rows cannot be read, because their code raised OSError\('the disk is gone'\)"),
    ],
)
def test_an_error_of_the_producer_is_raised_where_packs_are_taken(rows: Any, kind: Any, said: str) -> None:
    with sp.local(rows, budget=64) as loader:
        for _ in range(2):
            with pytest.raises(kind, match=said):
                list(loader.steps())


def test_a_broken_file_is_raised_where_packs_are_taken(tmp_path: Path) -> None:
    (tmp_path / "cut.tar").write_bytes(b"\1" * 700)
    with sp.local(tmp_path / "cut.tar") as loader, pytest.raises(SourceError, match=r"cut\.tar"):
        list(loader)


def test_arguments_that_cannot_be_are_refused_before_anything_starts(tmp_path: Path) -> None:
    for wrong, kind, said in (
        ({"source": "no_such_file.jsonl"}, SourceError, "no_such_file.jsonl: the file cannot be read"),
        ({"source": "a text"}, UserError, "data: got 'a text', expected a file that ends in"),
        ({"source": 7}, UserError, "data: got a int, expected files or rows"),
        ({"source": ["a.tar", "b.jsonl"]}, UserError, "data: got files of the formats jsonl, webdataset"),
        ({"source": [[1]], "budget": 0}, ConfigError, "rules.budget"),
        ({"source": [[1]], "packer": "best"}, ConfigError, "rules.packer: got 'best'"),
        ({"source": [[1]], "mesh": {"dp": 2}}, UserError, "loads data for one rank only"),
        ({"source": [[1]], "weights": {"web": 1}}, UserError, "weights: got web, expected streams: data"),
        ({"source": {"a": {"source": [[1]], "wieght": 1}}}, ConfigError, "a: source: got the unknown key 'wieght'"),
        ({"source": [[1]], "prefetsch": 3}, TypeError, "prefetsch"),
        ({"source": [[1]], "prefetch": 0}, UserError, "prefetch=0"),
        ({"source": [[1]], "tokenizer": 5}, UserError, "tokenizer: got a int"),
        ({"source": [[1]], "tokenizer": "gpt2"}, ConfigError, r"pass AutoTokenizer.from_pretrained\('gpt2'\)"),
        ({"source": []}, UserError, "data: got an empty list, expected at least one file or row"),
        ({"source": [[1]], "http": 7400}, UserError, "http: got 7400, expected a string such as '127.0.0.1:7400'"),
    ):
        with pytest.raises(kind, match=said):
            sp.local(**wrong)


def test_memory_grows_to_what_the_rest_needs() -> None:
    with sp.local([[1]], memory="1MiB", budget=4096) as loader:
        assert next(loader).num_samples == 1


# What is beside it


def test_two_at_once_do_not_know_each_other() -> None:
    with sp.local(TEXTS, budget=512) as one, sp.local(TEXTS[:100], budget=512) as two:
        first = [next(one), next(two), next(two), next(one)]
        assert sorted(texts_of([first[0], first[3], *iter(lambda: next(one, None), None)])) == sorted(TEXTS)
        assert sorted(texts_of([first[1], first[2], *iter(lambda: next(two, None), None)])) == sorted(TEXTS[:100])


def test_a_loader_that_is_dropped_ends_its_threads() -> None:
    loader: Any = sp.local(TEXTS, budget=512, repeat=True)
    next(loader)
    assert any(thread.name == "streampack-broker" for thread in threading.enumerate())
    del loader  # the fixture looks for what is left


def test_a_loader_that_is_not_kept_lives_as_long_as_its_steps() -> None:
    assert sum(len(step) for step in sp.local([[1] * 8] * 64, budget=8).steps()) == 64
    gc.collect()
    assert sum(1 for _ in sp.local([[1] * 8] * 64, budget=8)) == 64


def test_a_closed_loader_says_so() -> None:
    loader = sp.local(TEXTS, budget=512)
    loader.close()
    loader.close()
    with pytest.raises(UserError, match="closed"):
        next(loader)


def test_a_forked_child_is_refused_and_ends_nothing() -> None:
    with sp.local(TEXTS, budget=512) as loader:
        next(loader)
        child = os.fork()
        if child == 0:
            code = 1  # whatever else is raised: the child must not go on as pytest
            try:
                next(loader)
            except PeerError as error:
                loader.close()
                code = 7 if "before the fork" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert sum(pack.num_samples for pack in loader) > 0


def test_status_is_served_where_it_is_asked_for() -> None:
    with sp.local(TEXTS, budget=512, http="127.0.0.1:0") as loader:
        assert loader.http is not None
        with urllib.request.urlopen(loader.http + "/status", timeout=PATIENCE_S) as answer:
            assert json.loads(answer.read())["run"] == "local"


def run_python(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, **options)


def test_the_interpreter_ends_with_a_loader_in_use_and_signals_and_logging_are_the_users() -> None:
    code = (
        "import logging, os, signal, sys, threading, streampack\n"
        "numbers = (signal.SIGINT, signal.SIGTERM)\n"
        "before = [signal.getsignal(n) for n in numbers], logging.getLogger().handlers[:], os.getcwd(), sys.path[:]\n"
        "loader = streampack.local([[1] * 8] * 99, budget=8, repeat=True)\n"
        "assert next(loader).num_samples == 1\n"
        "after = [signal.getsignal(n) for n in numbers], logging.getLogger().handlers[:], os.getcwd(), sys.path[:]\n"
        "assert before == after, (before, after)\n"
        "print('end')\n"
    )
    done = run_python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_ctrl_c_is_raised_where_packs_are_taken() -> None:
    code = (
        "import signal, streampack, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # jobs in the background begin with it ignored
        "def slow():\n"
        "    yield [1] * 8\n"
        "    print('waiting', flush=True)\n"
        "    time.sleep(60)\n"
        "try:\n"
        "    for pack in streampack.local(slow(), budget=8):\n"
        "        pass\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "interrupted\n"
        assert process.wait(PATIENCE_S) == 0


def test_without_the_extra_its_name_is_said() -> None:
    code = "import sys; sys.modules['uvicorn'] = None; import streampack; streampack.local(['x'])"
    done = run_python(code)
    assert "UserError: got no module 'uvicorn', which the extra 'service' installs" in done.stderr.splitlines()[-1]


def test_the_first_pack_comes_within_two_seconds() -> None:
    with sp.local([[1]], budget=8):
        pass  # kernels are compiled now
    took = []
    for _ in range(3):  # a machine that is busy may be late once
        began = time.monotonic()
        with sp.local(TEXTS) as loader:
            next(loader)
            took.append(time.monotonic() - began)
    assert min(took) < 2


def test_inline_media_above_the_usual_chunk_need_a_larger_one(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3 << 10, 1 << 10), dtype=np.uint8)  # 3 MiB
    rows = [{"input_ids": [1, 2, 3], "pixels": pixels, "patches": [1 << 10, 2 << 10]}, {"input_ids": [4, 5]}]
    options: dict[str, Any] = {
        "budget": 8, "format": "numpy", "fields": {"pixels": {"dtype": "uint8", "axis": "patch", "shape": [1 << 10]}}
    }  # fmt: skip
    with pytest.raises(SampleError, match="or `chunk` of"), sp.local(rows, **options) as loader:
        list(loader)
    with sp.local(rows, chunk="8MiB", **options) as loader:
        (pack,) = list(loader)
        assert np.array_equal(pack["pixels"], pixels)
        assert pack["cu_patches"].tolist() == [0, 1 << 10, 3 << 10]
    with pytest.raises(ConfigError, match=r"limits\.chunk: got '8 bottles'"):
        sp.local(rows, chunk="8 bottles", **options)
    with pytest.raises(ConfigError, match=r"limits\.chunk: got 9GiB, expected at most"):
        sp.local(rows, chunk="9GiB", **options)
