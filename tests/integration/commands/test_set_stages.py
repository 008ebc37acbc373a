"""Stages of a running broker on the command line: asked for, listed, canceled, and refused in one line."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import streampack as sp
from streampack.sources import SourceSettings, open_source
from tests.integration.running import (
    RunningBroker,
    in_process,
    post,
    producing_here,
    running_broker,
    the_error,
    until,
    write_jsonl,
)

SETTINGS = {
    "streams": {"web": {"repeat": True}, "code": {"repeat": True}}, "memory": "64MiB",
    "rules": {"budget": 64, "step": {"packs": 2}, "window": {"samples": 32}}, "planned_mesh": {"dp": 2},
    "stages": [
        {"name": "wide", "at": {"step": 3}, "rules": {"step": {"packs": 4}}},
        {"name": "long", "at": {"tokens": "1T"}, "rules": {"budget": 128}, "weights": {"web": 1}},
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def broker() -> Iterator[RunningBroker]:
    with running_broker(SETTINGS) as found:
        yield found


def changes(broker: RunningBroker) -> dict[str, Any]:
    shown = in_process("set", "--list", "--json", "-e", broker.http)
    found: dict[str, Any] = json.loads(shown.stdout)["feeds"]["train"]
    return found


def test_stages_are_asked_for_listed_and_canceled(
    broker: RunningBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "anneal.yaml"
    file.write_text("name: anneal\nat: {step: 9000}\nweights: {code: 0.5, web: 0.5}\nover: 100\n")
    http = ("-e", broker.http)
    shown = in_process("set", "stage", file, *http, "--note", "why")
    assert shown.stdout == "run streampack, feed train: stage anneal, from step 9000 on (change 2)\n", shown.stderr
    monkeypatch.setattr("sys.stdin", io.StringIO(file.read_text()))
    shown = in_process("set", "stage", "-", "--at-tokens", "2.8T", *http)
    text = "run streampack, feed train: stage anneal, after 2,800,000,000,000 tokens in steps (change 3)\n"
    assert shown.stdout == text, shown.stderr
    shown = in_process(
        "set", "rules", "packs={from: 2, to: 8, over: 5}", "window=16", "balance.order=packer", "--at-step", "700",
        "--json", *http,
    )  # fmt: skip
    assert json.loads(shown.stdout) == {"run": "streampack", "feed": "train", "step": 700, "id": 4}, shown.stderr
    table = [re.split("  +", line) for line in in_process("set", "--list", *http).stdout.splitlines()]
    assert table == [
        ["run streampack, feed train"],
        ["id", "change", "begins at", "state"],
        ["0", "wide packs=4", "step 3", "waits"],
        ["4", 'packs=2 to 8 over 5 steps window=16 balance={"kind":"deal","order":"packer"}', "step 700", "waits"],
        ["2", "anneal weights code=0.5 web=0.5 over 100 steps", "step 9,000", "waits"],
        ["1", "long budget=128 weights web=1", "1,000,000,000,000 tokens, about step 1,953,125,354", "waits"],
        [
            "3",
            "anneal weights code=0.5 web=0.5 over 100 steps",
            "2,800,000,000,000 tokens, about step 3,710,937,854",
            "waits",
        ],
    ]
    found = changes(broker)
    assert [(each["id"], each["step"], each["tokens"]) for each in found["coming"]] == [
        (0, 3, None), (4, 700, None), (2, 9000, None), (1, None, 10**12), (3, None, 28 * 10**11),
    ]  # fmt: skip
    assert found["coming"][2]["note"] == "stage anneal weights code=0.5 web=0.5 over 100 steps (why), asked at step 0"
    assert found["coming"][1]["name"].startswith("stage packs=2 to 8 over 5 steps window=16 balance=")
    assert found["text"].startswith("budget 64, 2 packs a step; next wide at step 3")
    shown = in_process("set", "--cancel", "4", "--note", "no", *http)
    assert shown.stdout == "run streampack, feed train: change 4 is canceled\n", shown.stderr
    assert post(broker.http, "/control/cancel", {"id": 3}) == (200, {"feed": "train", "step": None, "id": 3})
    assert [each["id"] for each in changes(broker)["coming"]] == [0, 2, 1]
    assert "got change 4, expected the number of a change that waits: 0 (wide)" in the_error(
        in_process("set", "--cancel", "4", *http), 1
    )


def test_a_stage_is_completed_from_the_rules_that_it_begins_with(broker: RunningBroker) -> None:
    """The balance of a later stage does not count for one that begins before it."""
    late = {"name": "late", "at": {"step": 6000}, "rules": {"balance": {"kind": "none"}}}
    code, answer = post(broker.http, "/control/stage", late)
    assert code == 200, answer
    for step, kind in ((5000, "deal"), (7000, "none")):
        body = {"rules": {"balance": {"hidden_size": 8}}, "at_step": step}
        code, said = post(broker.http, "/control/rules", body)
        assert code == 200, said
        what = next(each["what"] for each in changes(broker)["coming"] if each["id"] == said["id"])
        assert ('"kind":"none"' in what) == (kind == "none")
        assert '"hidden_size":8' in what
    for number in (answer["id"], said["id"], said["id"] - 1):
        assert in_process("set", "--cancel", str(number), "-e", broker.http).returncode == 0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["stage", "FILE", "--at-step", "3", "--at-tokens", "2T"], 2, "Got --at-step and --at-tokens. Pass one of the"),
        (["stage", "FILE", "--at-tokens", "2X"], 2, "--at-tokens: got '2X', expected a whole number, or text such as"),
        (["stage", "FILE"], 2, "FILE: rules: got the unknown key 'seed', expected one of: "),
        (["stage", "none.yaml"], 2, "none.yaml: cannot be read: No such file or directory"),
        (["rules", "budget"], 2, "Got 'budget'. Pass a key of `rules` and its value, such as budget=32768."),
        (["rules", "seed=3"], 2, "KEY=VALUE: rules: got the unknown key 'seed', expected one of: "),
        (["rules", "budget=big"], 2, "KEY=VALUE: rules.budget: got 'big', expected a whole number or a mapping"),
        (["rules", "packs=3", "packs=4"], 2, "Got two values for packs. Pass one of the two."),
        (["rules", "limits={items: 4}"], 1, "got `limits` without fields of axis item or patch, expected such a field"),
        (["rules", "budget=10000000"], 1, "got rules that need 420004096 tokens of memory for the"),
        (["--cancel", "77"], 1, "got change 77, expected the number of a change that waits: 0 (wide)"),
        (["--list", "--cancel", "7"], 2, "Got --list and --cancel. Pass one of the two."),
        (["--list", "--feed", "valid"], 2, "Got feed 'valid'. Pass one of: train."),
        (["--list", "rules", "budget=3"], 2, "Got --list before 'rules'. Pass one of the two."),
        (["--feed", "train", "rules", "budget=3"], 2, "Got options before 'rules'. Pass them after it: streampack set"),
        (["--json"], 2, "Got neither a command nor --list nor --cancel. 'streampack set --help' lists the commands."),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line(
    broker: RunningBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, said: str
) -> None:
    monkeypatch.setenv("STREAMPACK_HTTP", broker.http)
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("name: a\nrules: {seed: 3}\n")
    before = changes(broker)["coming"]
    assert said in the_error(in_process("set", *words), code)
    assert changes(broker)["coming"] == before


def test_a_stage_in_a_feed_with_a_planned_mesh_that_cannot_read_it_is_refused(broker: RunningBroker) -> None:
    body = {"name": "a", "rules": {"step": {"packs": 6}}, "planned_mesh": {"dp": 4}}
    code, said = post(broker.http, "/control/stage", body)
    assert (code, said["error"][:45]) == (409, "planned_mesh cannot read this stage: got dp=4")
    code, said = post(broker.http, "/control/rules", {"rules": {"step": {"packs": 3}}})
    assert (code, said["error"][:45]) == (409, "the trainers cannot read this stage: got dp=2")
    beside = {"rules": {"balance": {"kind": "none"}}, "at": {"tokens": "1G"}}
    code, answer = post(broker.http, "/control/stage", {"name": "b", **beside})
    assert code == 200, answer
    code, said = post(broker.http, "/control/rules", {"rules": {"balance": {"kind": "none"}}, "at_step": 4})
    assert code == 409
    assert said["error"].startswith(f"rules.balance: got a change at step 4 beside change {answer['id']} (b) at")
    assert post(broker.http, "/control/cancel", {"id": answer["id"]})[0] == 200
    assert post(broker.http, "/control/stage", body | {"at": {"tokens": "x"}})[0] == 400


def test_status_says_which_stage_holds(broker: RunningBroker, tmp_path: Path) -> None:
    rows = [{"tokens": [1] * (40 + 7 * n % 20)} for n in range(64)]
    file = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    sources = {name: open_source(SourceSettings("jsonl", file)) for name in ("web", "code")}
    with sp.connect(broker.trainers, format="numpy") as loader, producing_here(broker.producers, sources):
        steps = loader.steps()
        counts = [len(next(steps)) for _ in range(5)]
        until(lambda: broker.feed()["changes"]["in_force"]["stage"] == "wide")
    assert counts == [2, 2, 2, 4, 4]
    found = broker.feed()["changes"]
    assert (found["in_force"]["since_step"], found["in_force"]["packs"]) == (3, 4)
    assert [(each["id"], each["name"], each["step"]) for each in found["past"]] == [(0, "wide", 3)]
    assert found["text"].startswith("wide since step 3: budget 64, 4 packs a step; next ")
    table = in_process("set", "--list", "-e", broker.http).stdout
    assert "0   wide" in table
    assert " begun\n" in table
    [long] = [each for each in found["coming"] if each["name"] == "long"]
    assert 10**12 / 256 < long["estimated_step"] < 10**12 / 128, "the steps are more than half full"


def test_a_stage_that_plan_recommends_is_accepted(broker: RunningBroker, tmp_path: Path) -> None:
    """The broker has formed steps in the test before."""
    file = tmp_path / "stage.yaml"
    http = ("-e", broker.http)
    planned = in_process("plan", broker.http, "--stage", "--out", file, "--json")
    assert planned.returncode == 0, planned.stderr
    report = json.loads(planned.stdout)
    stage = report["stage"]
    assert (report["in_force"]["budget"], report["in_force"]["step_packs"]) == (64, 4), "packs of the stage in force"
    assert file.read_text() == report["stage_yaml"]
    assert stage["rules"]["budget"] * stage["rules"].get("step", {"packs": 4})["packs"] == 64 * 4
    shown = in_process("set", "stage", file, *http)
    assert f"stage {stage['name']}, from step {stage['at']['step']} on" in shown.stdout, shown.stderr
    again = yaml.safe_load(in_process("plan", broker.http, "--stage").stdout)
    assert again["rules"] == stage["rules"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lengths.txt", "--stage"], "Got --stage with lengths.txt. Pass the address of a running broker"),
        (
            ["http://127.0.0.1:1", "--stage", "--packs", "3"],
            "Got --stage with options for other rules or another mesh.",
        ),
        (["lengths.txt", "--out", "stage.yaml"], "Got --out stage.yaml without --stage. Pass both."),
        (["--stage", "--out", "none/stage.yaml"], "Got --out none/stage.yaml in a folder that does not exist."),
    ],
)
def test_arguments_that_do_not_fit_a_planned_stage_are_one_line(words: list[str], said: str) -> None:
    assert said in the_error(in_process("plan", *words), 2)
