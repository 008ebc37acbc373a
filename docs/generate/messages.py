"""Tables of the messages on the wire and of the records in the log, from their classes."""

from __future__ import annotations

import inspect
from typing import Any

from streampack.core.journal.log_records import ALL_RECORDS
from streampack.core.protocol.message import SHARED_MESSAGES
from streampack.core.protocol.producer_messages import PRODUCER_MESSAGES
from streampack.core.protocol.relay_messages import RELAY_MESSAGES
from streampack.core.protocol.result_messages import RESULT_MESSAGES
from streampack.core.protocol.standby_messages import STANDBY_MESSAGES
from streampack.core.protocol.trainer_messages import TRAINER_MESSAGES


def messages() -> str:
    """Return a table for each kind of peer."""
    kinds = (
        ("Both sides", SHARED_MESSAGES), ("Producers", PRODUCER_MESSAGES),
        ("Trainers", (*TRAINER_MESSAGES, *RESULT_MESSAGES)), ("Relays", RELAY_MESSAGES), ("Standby", STANDBY_MESSAGES),
    )  # fmt: skip
    return "\n".join(f"### {title}\n\n{_table(found)}\n" for title, found in kinds)


def records() -> str:
    """Return the table of records."""
    return _table(ALL_RECORDS)


def _table(kinds: tuple[type[Any], ...]) -> str:
    rows = ["| type | name | meaning | fields |", "|---|---|---|---|"]
    for kind in sorted(kinds, key=lambda kind: int(kind.TYPE)):
        summary = (inspect.getdoc(kind) or "").splitlines()[0].replace("|", r"\|")
        fields = ", ".join(f"`{name}`" for name in kind.__struct_encode_fields__)
        rows.append(f"| {kind.TYPE} | `{kind.__name__}` | {summary} | {fields} |")
    return "\n".join(rows)
