"""The log of a standby that ended while it discarded an old copy: the next start begins anew by itself."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from streampack_services.log.log import Log
from streampack_services.log.segments import delete_log
from streampack_services.standby.copy_state import CopyState, write_state
from streampack_services.standby.following import Following
from streampack_services.standby.open_arbiter import open_arbiter

from streampack.config.daemon_settings import BrokerConfig
from streampack.config.service_settings import StandbySettings
from streampack.config.stream_settings import StreamSettings
from streampack.errors import LogDamaged


def follow(folder: Path) -> int:
    """Start a standby with its log in ``folder / "state"``; return the number of its next record."""
    arbiter = str(folder / "arbiter")
    config = BrokerConfig(
        streams={"web": StreamSettings(partitions=2)}, state_dir=str(folder / "state"),
        standby=StandbySettings(arbiter=arbiter, listen="tcp://127.0.0.1:7403", name="b"),
    )  # fmt: skip
    following = Following(config, open_arbiter(arbiter), waits=True)
    records = following.status.records
    following.close()
    assert isinstance(records, int)
    return records


def mark_without_segments(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a log, and delete it, but for its mark."""
    log = Log.open(state, durability="process", first_lsn=7, on_safe=lambda: None)
    log.append(2, [b"x"])
    log.close()
    unlink = Path.unlink

    def unlink_segments(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".cut":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        unlink(path, missing_ok)

    with monkeypatch.context() as broken:
        broken.setattr(Path, "unlink", unlink_segments)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            delete_log(state)
    assert [path.name for path in state.glob("0*")] == [f"{7:020d}.cut"]


def test_a_standby_that_ended_while_it_deleted_its_log_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark_without_segments(tmp_path / "state", monkeypatch)
    write_state(tmp_path / "state", CopyState(0, "copy"))
    assert follow(tmp_path) == 0
    assert not list((tmp_path / "state").glob("*.cut"))


def test_a_log_that_no_standby_discarded_must_have_its_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark_without_segments(tmp_path / "state", monkeypatch)
    with pytest.raises(LogDamaged, match="expected the segments of a log"):
        follow(tmp_path)
    write_state(tmp_path / "state", CopyState(3, "copy"))
    with pytest.raises(LogDamaged, match="expected the segments of a log"):
        follow(tmp_path)
