"""The note ``standby.json`` in a ``state_dir``: which active broker wrote the log there, or whose log it is a copy of.

Without the note, a log is that of a run that had no standby yet.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import msgspec

from streampack.core.journal.log_records import Base
from streampack.errors import UserError
from streampack.wire import record_frames
from streampack_services.log.log import read_entries

NOTE = "standby.json"


class CopyState(msgspec.Struct, frozen=True):
    """The note: ``epoch`` of the active broker, 0 if the log is of no use; ``log_id`` identifies the log."""

    epoch: int
    log_id: str


def read_state(state_dir: Path) -> CopyState:
    """Return the note in ``state_dir``; if there is none, write it, with the epoch of the log's last broker.

    Raises UserError if the note cannot be read.
    """
    path = state_dir / NOTE
    try:
        return msgspec.json.decode(path.read_bytes(), type=CopyState)
    except FileNotFoundError:
        state = CopyState(_last_epoch(state_dir), uuid.uuid4().hex)
        write_state(state_dir, state)
        return state
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise UserError(f"{path} cannot be read: {error}. Empty the state_dir to copy the log anew") from None


def write_state(state_dir: Path, state: CopyState) -> None:
    """Replace the note, durably. Raises OSError."""
    path, part = state_dir / NOTE, state_dir / f".{NOTE}"
    with part.open("wb") as file:
        file.write(msgspec.json.encode(state))
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    folder = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _last_epoch(state_dir: Path) -> int:
    """Return the epoch of the last broker that wrote a log; 0 if there is no log. Raises LogDamaged."""
    epoch = 0
    for entry in read_entries(state_dir):
        if entry.kind == Base.TYPE:
            record, _ = record_frames.decode_record(entry.kind, entry.body)
            assert isinstance(record, Base)
            epoch = record.epoch
    return epoch
