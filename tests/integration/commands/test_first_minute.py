"""Mistakes of the first minute, in ``local``, ``run`` and ``check``: each error names key, value and what to write."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from streampack_services import own_runs

import streampack
from streampack.errors import StreampackError, UserError
from tests.integration.running import PATIENCE_S, in_process, running_broker, the_error, write, write_jsonl

BROKER = """\
run: first
rules: {budget: 64, step: {packs: 2}}
streams:
  web: {}
"""
PRODUCER = """\
streams:
  web: {source: jsonl, shards: web.jsonl}
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "web.jsonl", [{"text": "word " * (1 + n % 9)} for n in range(50)])
    (tmp_path / "broker.yaml").write_text(BROKER)
    (tmp_path / "producer.yaml").write_text(PRODUCER)
    return tmp_path


CHECKED = {
    "unknown key": ("broker", "budget", "budgte", "got the unknown key 'budgte'.*Did you mean 'budget'"),
    "number in place of a mapping": ("broker", "{packs: 2}", "4", r"rules.step: got 4.*Write `step: \{packs: 4\}`"),
    "list of streams": ("broker", "streams:\n  web: {}", "streams: [web]", r"Write `streams: \{web: \{\}\}`"),
    "tab": ("broker", "  web", "\tweb", "got a tab at the beginning of line 4, expected spaces"),
    "size": ("broker", "run: first", "run: first\nmemory: 16G", "memory: got '16G'.*Write 16GiB"),
    "text for a number": ("broker", "64", "8k", "rules.budget: got '8k', expected a whole number"),
    "number for text": ("broker", "first", "7", "run: got 7, expected text. Put the value in quotes"),
    "unknown packer": ("broker", "budget", "packer: ffd, budget", "got 'ffd', expected one of: exact_fill"),
    "misspelled stream": (
        "producer",
        "web: {",
        "wbe: {",
        "streams.wbe: got a stream.*expected one of web. Write 'web'",
    ),
    "missing file": ("producer", "web.jsonl", "wbe.jsonl", "streams.web: .*wbe.jsonl"),
    "missing key": ("producer", "web.jsonl", "web.jsonl, text_key: body", "got text_key 'body', but no row has such"),
    "unknown source": ("producer", "source: jsonl", "source: json", "got 'json', expected one of: .*jsonl"),
    "undeclared field": (
        "producer",
        "web.jsonl",
        "web.jsonl, fields: {reward: text}",
        "fields.reward: got a field that",
    ),
    "a model's name": ("producer", "streams:", "tokenizer: {name: a/b}\nstreams:", "got 'a/b'.*set `file`"),
}
"""File, text, its replacement, and the error."""


@pytest.mark.parametrize("command", ["check", "run"])
@pytest.mark.parametrize("mistake", CHECKED)
def test_check_and_run_say_what_to_write(mistake: str, command: str, files: Path) -> None:
    """``run`` says it before it starts anything."""
    name, text, wrong, said = CHECKED[mistake]
    path = files / f"{name}.yaml"
    assert text in path.read_text()
    path.write_text(path.read_text().replace(text, wrong, 1))
    if command == "check":
        error = the_error(in_process("check", "broker.yaml", "producer.yaml"), 1 if mistake == "missing file" else 2)
    else:
        words = ["run", "-c", "broker.yaml", "-p", "producer.yaml", "--", "true"]
        done = subprocess.run(
            [Path(sys.executable).with_name("streampack"), *words], capture_output=True, text=True, timeout=PATIENCE_S,
            check=False,
        )  # fmt: skip
        assert "broker | " not in done.stderr
        error = the_error(done, done.returncode)
        assert done.returncode
    assert re.search(said, error), error


LOCAL: dict[str, tuple[Callable[[], Any], str]] = {
    "argument": (lambda: streampack.local(["a"], budgets=3), "argument 'budgets'. Did you mean 'budget'"),  # type: ignore[call-overload]
    "another's argument": (lambda: streampack.local(["a"], max_length=3), "'max_length'. Did you mean 'budget'"),  # type: ignore[call-overload]
    "a stream's key": (lambda: streampack.local(["a"], messages_key="chat"), "'source': rows, 'messages_key'"),  # type: ignore[call-overload]
    "no file": (lambda: streampack.local("gone-*.jsonl"), r"gone-\*.jsonl: got no matching file"),
    "size": (lambda: streampack.local(["a"], memory="16G"), "Write 16GiB"),
    "a model's name": (lambda: streampack.local(["a"], tokenizer="a/b"), "AutoTokenizer.from_pretrained"),
    "weights": (lambda: streampack.local({"web": ["a"]}, weights={"wbe": 1}), "got wbe, expected streams: web"),
    "one text": (lambda: streampack.local("hello world"), "Put a single text into a list"),
    "wrong mesh": (
        lambda: streampack.connect("tcp://127.0.0.1:9", mesh={"dp": 2, "dp_rnk": 1}),
        "got the key 'dp_rnk', expected the sizes dp, cp",
    ),
    "order without torchrun": (
        lambda: streampack.connect("tcp://127.0.0.1:9", order="dp"),
        "without RANK and WORLD_SIZE.*Start with torchrun, or pass the ranks",
    ),
    "wrong port": (
        lambda: streampack.connect("tcp://127.0.0.1:9", mesh={"dp": 1, "dp_rank": 0}, stall_timeout_s=0.5),
        "tcp://127.0.0.1:9: got no answer",
    ),
}


@pytest.mark.parametrize("mistake", LOCAL)
def test_local_and_connect_say_what_to_write(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call, said = LOCAL[mistake]
    with pytest.raises((StreampackError, TypeError), match=f"(?s){said}"):
        call()


def test_a_dataloader_of_torch_needs_no_batch_size() -> None:
    with streampack.local(["some text"] * 100, budget=64) as loader:
        with pytest.raises(UserError, match=r"DataLoader\(loader, batch_size=None, num_workers=0\)"):
            next(iter(torch.utils.data.DataLoader(loader)))  # type: ignore[arg-type]
        pack = next(iter(torch.utils.data.DataLoader(loader, batch_size=None)))  # type: ignore[arg-type]
        assert pack.input_ids.shape == (64,)


ACCELERATED = """
import streampack
from accelerate import Accelerator
from torch.utils.data import DataLoader
accelerator = Accelerator(cpu=True)
with streampack.connect(order="dp", stall_timeout_s=60) as loader:
    for batch in accelerator.prepare(DataLoader(loader, batch_size=None)):
        break
"""


def test_a_loader_that_accelerate_would_read_on_one_rank_is_refused(files: Path) -> None:
    (files / "train.py").write_text(ACCELERATED)
    words = ["run", "-c", "broker.yaml", "-p", "producer.yaml", "--"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(
        [Path(sys.executable).with_name("streampack"), *words, *torchrun], capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode
    assert "Prepare only the model and the optimizer, and iterate the loader itself" in done.stderr


def test_a_loader_shows_feed_mesh_steps_and_budget_and_is_true() -> None:
    with streampack.local(["some text"] * 100, budget=64, packs=2) as loader:
        assert loader
        shown = "feed='train', mesh='dp=0/1 cp=0/1 tp=0/1 pp=0/1', steps={}, packs=2, budget=64, format='thd'"
        assert repr(loader) == f"LocalLoader({shown.format(0)})"
        steps = loader.steps()
        next(steps), next(steps)
        assert repr(loader) == f"LocalLoader({shown.format(1)})"
    assert repr(loader).endswith(", closed)")


def test_completion_in_a_notebook_shows_the_public_names_alone() -> None:
    assert set(dir(streampack)) == {*streampack.__all__, "__version__", "errors", "integrations"}
    assert all(getattr(streampack, name) is not None for name in dir(streampack))


@pytest.mark.parametrize("streams", [2, 40])
def test_check_says_what_matters_in_40_lines_of_80_columns(
    streams: int, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names = [f"stream-{n}" for n in range(streams)]
    source = {"source": "jsonl", "shards": "web.jsonl"}
    write(files / "broker.yaml", {"run": "x", "streams": {name: {"weight": 1} for name in names}})
    write(files / "producer.yaml", {"streams": dict.fromkeys(names, source)})
    shown = in_process("check", "broker.yaml", "producer.yaml").stdout.splitlines()
    assert len(shown) <= 40
    assert max(map(len, shown)) <= 80
    assert shown[-1] == "good: streampack broker and produce can use broker.yaml and producer.yaml"
    assert any("524,288" in line or "step" in line for line in shown)


def test_check_compares_masks_and_missing_streams(files: Path) -> None:
    write_jsonl(files / "web.jsonl", [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}])
    error = the_error(in_process("check", "broker.yaml", "producer.yaml"), 2)
    assert "rows say which tokens count in the loss" in error
    assert "Add `fields: {loss_mask: {default: 1}}` to broker.yaml" in error
    (files / "broker.yaml").write_text(BROKER + "  code: {}\nfields: {loss_mask: {default: 1}}\n")
    done = in_process("check", "broker.yaml", "producer.yaml")
    assert "no producer sends 1 stream of broker.yaml: code." in " ".join(done.stdout.split())
    (files / "broker.yaml").write_text(BROKER + "fields: {loss_mask: {default: 1}, reward: {dtype: float32}}\n")
    error = the_error(in_process("check", "broker.yaml", "producer.yaml"), 2)
    assert "none of the first 1 rows has the field 'reward'" in error


def test_a_bare_command_finds_the_only_run_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in ("STREAMPACK_HTTP", "STREAMPACK_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    settings = {"run": "first", "streams": {"web": {}}, "rules": {"budget": 64, "step": {"packs": 2}}}
    path = write(tmp_path / "broker.yaml", settings)
    with running_broker(settings) as broker:
        assert not in_process("health").returncode
        assert not in_process("status", "-c", path).returncode
        assert "first" in in_process("top", "--once").stdout
        assert "Got both an address" in the_error(in_process("status", broker.http, "-c", path), 2)
        with own_runs.noted("other", "http://127.0.0.1:9", None):
            error = the_error(in_process("status"), 2)
            assert "2 brokers of yours run on this host: " in error
            assert "http://127.0.0.1:9 (run other)" in error
            assert not in_process("status", "-c", path).returncode
    assert not own_runs.own_runs()
    error = the_error(in_process("status", "http://127.0.0.1:9"), 75)
    assert "Check the address" in error
