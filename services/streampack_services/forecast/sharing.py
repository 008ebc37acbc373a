"""Count the tokens that groups in a run's log share, so that a user knows what ``share: prefix`` saves.

A group is a chunk of several samples, as ``Producer.send_group`` sends it. Groups that were sent as trees say what they
share. For the others the tree is built from the recorded tokens, and from all fields that the model reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from streampack.core.journal.log_records import ChunkAdmitted, ChunkCompleted
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64
from streampack.core.trees.shared_prefixes import prefix_order
from streampack.wire.record_frames import decode_record
from streampack_services.log.log import read_entries

MOST_TOKENS = 20_000_000
"""Tokens of groups to read; a longer log is read up to here."""


class Sharing(NamedTuple):
    """Tokens of groups, and those that a sample shares with samples before it in its group.

    Attributes:
        groups: Number of groups.
        tokens: Tokens of all samples.
        shared_tokens: Tokens that are not computed again if samples share them.
        sent: Groups that were sent as trees.
    """

    groups: int
    tokens: int
    shared_tokens: int
    sent: int

    @property
    def shared_ratio(self) -> float:
        """``shared_tokens`` / ``tokens``."""
        return self.shared_tokens / max(self.tokens, 1)

    def sentence(self) -> str:
        """Return the result as a sentence for people."""
        share = f"{self.shared_ratio:.1%} of the {self.tokens:,} tokens in {self.groups:,} pushed groups"
        if self.sent == self.groups:
            return f"Shared prefixes: {share} are not computed again."
        if not self.shared_tokens:
            return f"Shared prefixes: the samples of {self.groups:,} pushed groups begin differently."
        how = "Set `share: prefix` under `rules`, and send groups with share='prefix'"
        return f"Shared prefixes: {share} would not be computed again. {how}."


def sharing_of(state_dir: Path, rules: Rules) -> Sharing | None:
    """Return the tokens that groups of a feed share; None if its log has no group, or its samples have media.

    ``rules``: the feed's rules, which name its streams and fields. Raises LogDamaged for a damaged log.
    """
    streams = {stream.name for stream in rules.streams if stream.pushed}
    if not streams or rules.has_extra_bytes:  # share: prefix does not go together with media
        return None
    sharing = Sharing(0, 0, 0, 0)
    for entry in read_entries(state_dir):
        if entry.kind not in (ChunkAdmitted.TYPE, ChunkCompleted.TYPE) or sharing.tokens >= MOST_TOKENS:
            continue
        record, payload = decode_record(entry.kind, entry.body)
        if not isinstance(record, ChunkAdmitted) or record.stream not in streams or not payload:
            continue
        lengths = np.frombuffer(record.lengths_u32, "<u4").astype(np.int64)
        if np.count_nonzero(lengths) < 2:
            continue
        tree_bytes = record.shared_u32 or b""
        shared = np.frombuffer(tree_bytes, "<u4").astype(np.int64) if tree_bytes else _shared(lengths, payload, rules)
        sharing = Sharing(
            sharing.groups + 1, sharing.tokens + int(lengths.sum()), sharing.shared_tokens + int(shared.sum()),
            sharing.sent + bool(tree_bytes),
        )  # fmt: skip
    return sharing if sharing.groups else None


def _shared(lengths: I64, payload: Sequence[Any], rules: Rules) -> I64:
    """Return the tokens that samples of a recorded chunk share in the best order, int64 [n]."""
    widths = [np.dtype(rules.tokens).itemsize]
    widths += [field.value_bytes if (field.axis, field.align) == ("token", "token") else 0 for field in rules.fields]
    columns = [
        np.frombuffer(frame, np.uint8).reshape(-1, width) for frame, width in zip(payload, widths, strict=True) if width
    ]
    keys = np.concatenate(columns, axis=1)
    if len(columns) == 1:
        keys = np.frombuffer(payload[0], rules.tokens)
    return prefix_order(np.split(keys, np.cumsum(lengths)[:-1]))[1]
