"""Stages of broker.yaml that a person edits after the log has recorded others: the recorded ones hold."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from streampack_services.broker.service import BrokerService

from streampack.config.daemon_settings import BrokerConfig
from streampack.config.typed_yaml import convert
from streampack.core.model.capacity import needed_tokens
from streampack.errors import ConfigError

WIDE = {"name": "wide", "at": {"step": 3}, "rules": {"step": {"packs": 4}}}
LONG = {"name": "long", "at": {"tokens": "1T"}, "rules": {"budget": 2048}}


@contextmanager
def service(path: Path, **keys: Any) -> Iterator[BrokerService]:
    """A broker with a log in this folder, which has begun."""
    tree = {
        "listen": {"producers": f"ipc://{path}/p", "trainers": f"ipc://{path}/t"}, "state_dir": f"{path}/log",
        "streams": {"web": {"partitions": 1}}, "rules": {"budget": 64, "step": {"packs": 2}, "window": {"samples": 16}},
        "memory": "24MiB", "limits": {"sample_tokens": 4096, "chunk": "16KiB"}, **keys,
    }  # fmt: skip
    begun = BrokerService(convert(tree, BrokerConfig))
    try:
        begun._perform_all(begun.core.begin())
        yield begun
    finally:
        begun.close()


def test_recorded_stages_hold_and_a_line_says_which_differ(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with service(tmp_path, stages=[WIDE, LONG]) as begun:
        recorded, plan = begun.core.feeds["train"].rules, begun.plan
    caplog.clear()
    with service(tmp_path, stages=[WIDE, LONG]), caplog.at_level(logging.WARNING, "streampack.broker"):
        assert not [each for each in caplog.messages if "stages" in each]
    edited = {**LONG, "rules": {"budget": 128}}
    for stages, differs in (
        ([WIDE, edited], "long (differs)"), ([], "wide (is missing), long (is missing)"),
        ([LONG, {**WIDE, "name": "wider"}], "wider (is new), wide (is missing)"),
    ):  # fmt: skip
        caplog.clear()
        with service(tmp_path, stages=stages) as begun:
            assert begun.core.feeds["train"].rules == recorded
            assert [change.name for change in begun.core.feeds["train"].history.pending] == ["wide", "long"]
            assert begun.plan.block_tokens == plan.block_tokens, "for the budget of the recorded stage"
            assert begun.core.feeds["train"].memory.needed_tokens == needed_tokens(recorded, 4096)
        lines = [each for each in caplog.messages if "stages" in each]
        said = f"the stages of the log hold, and those of broker.yaml differ: {differs}. To change a stage that has "
        assert len(lines) == 1, lines
        assert said in lines[0]
        assert lines[0].endswith("'streampack set --cancel ID', and 'streampack set stage FILE --at-step N'")


def test_a_log_without_stages_stays_without_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with service(tmp_path):
        pass
    with service(tmp_path, stages=[LONG]) as begun:
        assert begun.core.feeds["train"].rules.stages == ()
    assert "differ: long (is new)" in caplog.text


def test_other_rules_are_refused_by_their_key_also_if_stages_differ(tmp_path: Path) -> None:
    with service(tmp_path, stages=[WIDE]):
        pass
    said = r"rules\.streams\.web\.name: got code, expected web as the log has it"
    with pytest.raises(ConfigError, match=said), service(tmp_path, stages=[LONG], streams={"code": {"partitions": 1}}):
        pass
