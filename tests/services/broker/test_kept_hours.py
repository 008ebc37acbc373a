"""Hours of the ranks beside the log: of all brokers of a run, also after they have ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from streampack_services.broker.serving.kept_hours import KeptHours, hours_of
from streampack_services.ledger.run_hours import HOURS, FeedHours, read_hours

from streampack.errors import UserError
from tests.services.full_status import full_status


def test_the_hours_of_a_broker_are_added_to_those_of_brokers_before_it(tmp_path: Path) -> None:
    status = full_status()
    own = hours_of(status)
    for brokers in range(1, 4):
        KeptHours(tmp_path, lambda: status).close()
        for name, hours in read_hours(tmp_path).items():
            assert hours.delivered_tokens == brokers * own[name].delivered_tokens
            assert hours.waste_tokens == {cause: brokers * count for cause, count in own[name].waste_tokens.items()}
            assert hours.trained_s == pytest.approx(brokers * own[name].trained_s)
            for cause, seconds in own[name].starved_s.items():
                assert hours.starved_s[cause] == pytest.approx(brokers * seconds)
    assert own.keys() == read_hours(tmp_path).keys()


def test_a_damaged_file_is_refused_and_left_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / HOURS).write_text("{")
    with pytest.raises(UserError, match="Delete the file to count hours anew"):
        read_hours(tmp_path)
    KeptHours(tmp_path, full_status).close()
    assert (tmp_path / HOURS).read_text() == "{"
    assert "cannot go on counting hours" in caplog.text


def test_a_run_without_the_file_has_no_hours(tmp_path: Path) -> None:
    assert read_hours(tmp_path) == {}
    assert FeedHours().plus(FeedHours(trained_s=1.5)).trained_s == 1.5
