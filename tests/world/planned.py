"""A feed's steps with no broker at all: from its data, its rules, and the changes that were recorded and where."""

from __future__ import annotations

import numpy as np
from crc32c import crc32c

from streampack.core.form.former import Former
from streampack.core.merge.schedule import change_merge, merge_of
from streampack.core.model.rules import Rules, RulesChange
from streampack.core.model.samples import ROW, SampleTable, index_of

Data = dict[str, list[list[int]]]
"""By stream and partition the lengths of its samples; 0 is one that is rejected."""


def tokens_of(stream: str, partition: int, seq: int, length: int) -> bytes:
    """The tokens of a sample, which depend on nothing else."""
    first = crc32c(f"{stream}:{partition}:{seq}".encode()) % 50_000
    return np.arange(first, first + length, dtype=np.int32).tobytes()


def planned(rules: Rules, data: Data, changes: list[RulesChange]) -> list[bytes]:
    """The digest of each step and all before it, of a feed whose rules change at these positions."""
    table, merge = SampleTable(64), merge_of(rules)
    former, known = Former(rules, table), 0

    def push(rules: Rules) -> None:
        nonlocal known
        p = 0
        for number, stream in enumerate(rules.streams):
            for partition, lengths in enumerate(data[stream.name]):
                if number >= known:
                    handles = np.full(len(lengths), -1, np.int64)
                    rows = np.zeros(sum(length > 0 for length in lengths), ROW)
                    at = [seq for seq, length in enumerate(lengths) if length]
                    rows["stream"], rows["length"] = number, [lengths[seq] for seq in at]
                    rows["index"] = index_of(np.array(at, np.int64), partition, stream.partitions)
                    rows["loss_tokens"] = rows["length"] - 1
                    rows["crc"] = [crc32c(tokens_of(stream.name, partition, seq, lengths[seq])) for seq in at]
                    handles[at] = table.enter(rows)
                    merge.push(p, handles, np.array(lengths, np.int64), np.zeros(len(lengths), np.int64))
                    merge.end(p)
                p += 1
        known = len(rules.streams)

    push(rules)
    for change in changes:
        taken = merge.take(1 << 40, change.position)
        former.admit(taken.handles, taken.lengths)
        assert merge.position == change.position
        change_merge(merge, change.rules)
        push(change.rules)
    taken = merge.take(1 << 40)
    former.admit(taken.handles, taken.lengths)
    assert merge.closed
    former.closed = True
    chains: list[bytes] = []
    while (request := former.request()) is not None:
        chains += [step.chain for step in former.apply(request.choose())]
    chains += [step.chain for step in former.cut()]
    assert former.finished
    return chains
