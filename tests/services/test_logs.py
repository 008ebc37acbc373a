"""Events in the log: what a line is about, and the ring of the last ones."""

from __future__ import annotations

import json
import logging
import threading
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from streampack_services import logs
from streampack_services.logs import Ring

from streampack.core.model.mesh import Mesh
from streampack.core.protocol.events import Report

LEVELS: tuple[logs.Level, ...] = ("debug", "info", "warning", "error")


def record(text: str, level: int = logging.INFO, **about: object) -> logging.LogRecord:
    found = logging.LogRecord("streampack.broker", level, __file__, 1, text, (), None)
    found.about = about
    return found


@given(keep=st.integers(1, 20), count=st.integers(0, 60), seq=st.integers(0, 80))
def test_a_ring_gives_every_kept_event_after_the_one_that_is_known(keep: int, count: int, seq: int) -> None:
    ring = Ring("a", keep)
    for i in range(count):
        ring.handle(record(str(i)))
    known = seq if seq <= count else 0
    expected = [i for i in range(count) if i >= known][-keep:]
    assert [(event["seq"], event["text"]) for event in ring.since(seq)] == [(i + 1, str(i)) for i in expected]


def test_a_ring_is_read_while_threads_log() -> None:
    ring = Ring(keep=50)

    def say() -> None:
        for _ in range(1000):
            ring.handle(record("x"))

    threads = [threading.Thread(target=say) for _ in range(2)]
    for thread in threads:
        thread.start()
    seen = 0
    while seen < 2000:
        numbers = [int(str(event["seq"])) for event in ring.since(seen)]
        assert all(after == before + 1 for before, after in pairwise(numbers))
        seen = max(numbers, default=seen)
    for thread in threads:
        thread.join()


def test_a_ring_keeps_little_of_a_long_text() -> None:
    ring = Ring()
    ring.handle(record("x" * 1_000_000))
    assert len(str(ring.since(0)[0]["text"])) < 10_000


def test_a_line_for_people_is_one_line_and_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        logs.set_up()
        logging.getLogger("streampack.broker").warning("producer says: %s", "a\r\n\x1b[2Jb\x07 ü")
    finally:
        root.handlers[:], root.level = before
        logging.captureWarnings(False)
    assert capsys.readouterr().err.endswith(" WARNING broker: producer says: a ?[2Jb? ü\n")


@pytest.mark.parametrize("level", LEVELS)
def test_lines_below_the_level_are_not_shown_and_the_ring_has_all_but_details(
    level: logs.Level, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A traceback moves no cursor either."""
    root, ring = logging.getLogger(), Ring()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setattr(root, "level", root.level)
    logs.set_up(level, ring=ring)
    try:
        for each in LEVELS:
            logging.getLogger("streampack.broker").log(logging.getLevelName(each.upper()), "%s!", each)
        try:
            raise ValueError("\x1b[2J")
        except ValueError:
            logging.getLogger("streampack.broker").exception("failed")
    finally:
        logging.captureWarnings(False)
    said = capsys.readouterr().err
    shown = [word.removesuffix("!") for line in said.splitlines() for word in line.split() if word.endswith("!")]
    assert shown == list(LEVELS[LEVELS.index(level) :])
    assert [event["level"] for event in ring.since(0)] == ["info", "warning", "error", "error"]
    assert said.endswith("ValueError: ?[2J\n")


def test_the_line_for_machines_and_the_ring_hold_what_an_event_is_about(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setattr(root, "level", root.level)
    ring = Ring("sft")
    logs.set_up("warning", as_json=True, run="sft", ring=ring)
    try:
        rank = Mesh(dp=4, cp=2, dp_rank=3).rank
        for level, name in ((logging.INFO, "info"), (logging.WARNING, "warning")):
            about = Report("info", "x", feed="train", step=7, rank=rank).about
            logging.getLogger("streampack.broker").log(level, "rank %s left", rank, extra={"about": about})
            assert name in {event["level"] for event in ring.since(0)}
    finally:
        logging.captureWarnings(False)
    (line,) = map(json.loads, capsys.readouterr().err.splitlines())
    about = {"run": "sft", "feed": "train", "step": 7, "rank": "dp=3 cp=0"}
    assert line.items() >= about.items()
    assert ring.since(1) == [{"seq": 2, **line}]
