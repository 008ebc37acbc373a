"""Finds the references of a sample's media in the log, which has the samples that programs push."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from streampack.core.journal.log_records import ChunkAdmitted, ChunkStaged
from streampack.core.media.media_counts import media_of_sample
from streampack.core.media.references import decode_reference
from streampack.wire.record_frames import decode_record
from streampack_services.audit.why_sample import waited_for
from streampack_services.ledger.ledger import Ledger
from streampack_services.ledger.run_history import LATEST
from streampack_services.log.log import read_entries

Tree = dict[str, Any]


def references_of(state_dir: Path, ledger: Ledger, sample: Tree) -> dict[str, list[Tree]] | None:
    """Return the references of a sample by field, one for each item, as ``uri``, ``offset``, ``size`` and ``crc32c``.

    Return None if the sample has none, if it was read from files, or if the log has deleted its record. A query of a
    URL and inline bytes are left out.

    Args:
        state_dir: The broker's state_dir.
        ledger: Its ledger.
        sample: Result of ``why_sample.why_sample``.
    """
    feed = ledger.history.feed_of(sample["stream"])
    if feed is None or not feed.streams[sample["stream"]].pushed:
        return None
    rules = feed.rules_at(LATEST)
    named = [field.name for field in rules.all_fields if field.is_reference]
    if not named or (sample["places"] and not sample["places"][-1]["items"]):
        return None
    if sample["sent"] is None and waited_for(feed, sample["stream"]):  # the sample has no number yet
        return None
    seq = sample["seq"] if sample["sent"] is None else sample["sent"]["seq"]
    for entry in read_entries(state_dir):
        if entry.kind not in (ChunkAdmitted.TYPE, ChunkStaged.TYPE):
            continue
        record, payload = decode_record(entry.kind, entry.body)
        assert isinstance(record, ChunkAdmitted | ChunkStaged)
        at = seq - record.base_seq
        is_same = (record.stream, record.partition) == (sample["stream"], sample["partition"])
        if not is_same or not 0 <= at < len(record.lengths_u32) // 4 or len(payload) < 2:
            continue
        values = media_of_sample(payload, at, rules)
        return None if values is None else {name: [_shown(item) for item in values[name]] for name in named}
    return None


def _shown(data: bytes) -> Tree:
    """Return a reference as a tree."""
    reference = decode_reference(data)
    fields: Tree = msgspec.to_builtins(reference) | {"uri": reference.shown}
    return fields


def reference_text(fields: Tree) -> str:
    """Return a reference for people: ``images.tar at byte 1,536, 81,920 bytes``."""
    at = f" at byte {fields['offset']:,}" if fields.get("offset") else ""
    return str(fields["uri"]) + at + (f", {fields['size']:,} bytes" if fields.get("size") else "")
