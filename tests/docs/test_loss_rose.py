"""The page "Debug a loss spike", typed as it stands: runs of three streams, and what commands say of a step."""

from __future__ import annotations

import json
import shlex
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import BLOCKS
from tests.docs.typed_commands import typed
from tests.integration.running import PATIENCE_S, in_process

PAGE = [block for block in BLOCKS if block.page == "docs/how-to/loss-rose.md"]
CHANGES = ("report", "run")
"""Commands whose output has times."""


def ask(*words: str | Path) -> dict[str, Any]:
    """Return the JSON answer of a command, with its exit code as ``exit``."""
    result = in_process(*words, "--json")
    assert not result.stderr
    return {**json.loads(result.stdout), "exit": result.returncode}


@pytest.mark.timeout(20 * PATIENCE_S)
def test_each_question_after_a_loss_spike_has_the_answer_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    printed, last = "", ""
    for block in PAGE:
        if block.code.startswith("# "):
            own = _own_port() if "# broker.yaml" in block.code else ""
            (tmp_path / block.code.split()[1]).write_text(block.code + own)
        elif block.language == "bash":
            words = shlex.split(block.code)
            alone = words[0] == "streampack" and words[1] != "run" and block.code.count("\n") == 1
            last = words[1]
            printed = in_process(*words[1:]).stdout if alone else _typed(block.code, tmp_path)
        elif not block.language and last not in CHANGES:
            lines = [line.rstrip() for line in printed.splitlines()]
            assert [line for line in block.code.splitlines() if line not in lines] == [], block
    check_answers()
    check_reasons(tmp_path)


def _own_port() -> str:
    """Return the line for broker.yaml that leaves port 7400 to other tests."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"\nlisten: {{http: '127.0.0.1:{free.getsockname()[1]}'}}\n"


def _typed(code: str, folder: Path) -> str:
    """Return what a block of several commands prints, with jobs as in a terminal; runs that differ are no failure."""
    return typed(f"set -m\n{code.rstrip()}" + (" || true" if "ledger compare" in code else ""), folder)


def check_answers() -> None:
    """Check the JSON answers of the page's commands."""
    where, produce = ("-c", "broker.yaml"), ("-p", "producer.yaml")
    steps = ask("why", "--step", "110-115", "--text", *where, *produce)["steps"]
    assert [step["step"] for step in steps] == list(range(110, 116))
    assert all((step["skipped"], step["skip_notes"]) == (True, ["web.jsonl line 674 is zeros"]) for step in steps)
    for sample in (sample for step in steps for pack in step["packs"] for sample in pack["samples"]):
        file, row = sample["origin"].split(":line ")
        text = json.loads(Path(file).read_text().splitlines()[int(row) - 1])["text"]
        assert (file, sample["same"]) == (f"{sample['stream']}.jsonl", True)
        assert (sample["text"], sample["tokens"]) == (f"{text}<256>", [*text.encode(), 256])
    assert {sample["pass"] for step in steps for pack in step["packs"] for sample in pack["samples"]} <= {1, 2}
    streams = ask("ledger", "verify", *where)["feeds"]["train"]["streams"]
    assert [(row["passes"], row["again"]) for row in streams.values()] == [(1.0, 0), (1.0, 0), (2.0, 125)]
    hours, again = (ask("report", folder)["hours"] for folder in ("state", "again"))
    assert min(hours["tokens"], again["tokens"]) > 0, "a second broker, without ranks, has kept those of the first"
    assert 0 < hours["padding"] < hours["tokens"]
    assert hours["waiting"] == pytest.approx(sum(hours["waiting_by_cause"].values()))


def check_reasons(folder: Path) -> None:
    """A changed row, a wrong step, and options that do not go together are said."""
    where, produce = ("-c", "broker.yaml"), ("-p", "producer.yaml")
    lines = (folder / "web.jsonl").read_text().splitlines()
    lines[673] = json.dumps({"text": "1" * 201})
    (folder / "web.jsonl").write_text("\n".join(lines) + "\n")
    shown = in_process("why", "--step", "112", "--text", *where, *produce).stdout
    assert shown.count("The row has changed since the run") == 1
    for words, said in (
        (("--step", "9-7"), "expected 0 <= first step <= last step. Pass a step such as 212"),
        (("--step", "112", "--text"), "Got --text without --step and -p."),
        (("--step", "999"), "because the feed has ended"),
    ):
        assert said in in_process("why", *words, *where).stderr
