"""A short pass of ``make fuzz``, the same each time: first what crashed a target once, then some changed inputs."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random

import pytest

from tests.fuzz.__main__ import replay
from tests.fuzz.engine import Crash, Fuzzer, Hang, Target, watch_for_hangs
from tests.fuzz.forms import JSON, MSGPACK, YAML, Form, packed, unpacked
from tests.fuzz.mutate import mutated
from tests.fuzz.targets import TARGETS, found_before

INPUTS = {"broker": 12, "control": 12, "config": 12, "snapshot": 25, "client": 40, "producer": 40, "peers": 6}
"""Changed inputs of targets that are slow."""


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_makes_a_target_raise(name: str, caplog: pytest.LogCaptureFixture) -> None:
    target = TARGETS[name]
    fuzzer = Fuzzer(target, seed=7, kept=target.seeds())
    assert len(fuzzer.kept) >= 1
    for data in [*fuzzer.kept, *found_before(name).values()]:
        target.run(data)
    changed = {fuzzer.changed() for _ in range(INPUTS.get(name, 150))}
    assert len(changed) > INPUTS.get(name, 150) // 2, "they differ"
    for data in sorted(changed):
        target.run(data)
    caplog.clear()


def picky(data: bytes) -> None:
    tree = unpacked(data)
    if isinstance(tree, dict) and tree.get("a") == 64:
        raise IndexError("found")


def test_a_fuzzer_finds_what_raises_and_says_how_to_run_it_again() -> None:
    fuzzer = Fuzzer(Target("picky", MSGPACK, lambda: [packed({"a": 1, "b": [2, 3]})], picky), seed=1)
    fuzzer.begin([])
    with pytest.raises(Crash, match="IndexError: found") as crash:
        fuzzer.for_seconds(100.0, lambda _: None, 1.0)
    assert unpacked(crash.value.data)["a"] == 64
    assert 'raise IndexError("found")' in crash.value.text


def test_a_fuzzer_keeps_inputs_that_reach_new_lines() -> None:
    fuzzer = Fuzzer(TARGETS["message"], seed=1)
    fuzzer.begin([])
    before, lines = len(fuzzer.kept), fuzzer.lines
    assert lines > 30
    for _ in range(1000):
        fuzzer.step()
    assert fuzzer.lines - lines >= len(fuzzer.kept) - before > 0


def test_an_input_that_takes_for_ever_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.engine.HANG_S", 0.05)
    watch_for_hangs()
    fuzzer = Fuzzer(Target("slow", MSGPACK, lambda: [b"\0"], lambda _: time.sleep(1000)))
    with pytest.raises(Crash) as crash:
        fuzzer.begin([])
    assert isinstance(crash.value.__cause__, Hang)


def test_memory_that_grows_is_noticed_and_what_fills_at_first_is_not() -> None:
    grows, fills = Fuzzer(TARGETS["message"]), Fuzzer(TARGETS["message"])
    grows.memory = [(float(at), 100 * 2**20 + at * 2**20) for at in range(90)]
    fills.memory = [(float(at), 100 * 2**20 + min(at, 25) * 2**20) for at in range(90)]
    assert grows.growth == pytest.approx(59 * 2**20)
    assert abs(fills.growth) < 2**10


def test_an_input_in_a_file_is_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rendezvous-0"
    path.write_bytes(b"[" * 5000)
    assert replay(path, "rendezvous") == 0
    assert "raises nothing" in capsys.readouterr().out
    assert replay(path, "nothing") == 2


@pytest.mark.parametrize("form", [MSGPACK, JSON, YAML], ids=["msgpack", "json", "yaml"])
def test_the_same_seed_changes_a_tree_in_the_same_way_and_the_form_holds_it(form: Form) -> None:
    tree = {"a": [1, 2.5, "x", None, True], "b": {"c": -1}}
    one, two = ([mutated(tree, [tree], Random(n)) for n in range(200)] for _ in range(2))
    assert repr(one) == repr(two)
    assert tree == {"a": [1, 2.5, "x", None, True], "b": {"c": -1}}, "the tree itself stays"
    assert sum(form.read(form.write(each)) is not None for each in one) > 150
