"""Verify that every sample of a run is there exactly once, from the rows of its ledger and the records of its log.

The checks cover the steps of each feed that count. No step is missing. Each step's digest and denominators follow from
its rows, and its chain from the steps before it. Every merged sample is in exactly one of these steps, rejected,
dropped with the tail, or still in the window. A sample that waited for late fields, or for its turn, was admitted once.

A snapshot says which samples were merged: it lists those in the window, and how far each partition was merged. At the
end the partitions' totals say it.

An error in the data is a *finding*: a kind, a count, and a line of text for each of the first few.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.journal.log_records import FeedEnded
from streampack.core.model.samples import I64, ROW
from streampack.core.model.snapshot import Snapshot
from streampack.core.model.steps import FIRST_CHAIN
from streampack.errors import LedgerDamaged
from streampack_services.audit.conservation import DROPPED, REJECTED, Books
from streampack_services.ledger.ledger import Ledger
from streampack_services.ledger.run_history import LATEST, FeedHistory
from streampack_services.ledger.step_rows import StepRows

FEW = 5
"""Findings of each kind to name."""
U64 = NDArray[np.uint64]
Tree = dict[str, Any]


@dataclass(slots=True)
class Findings:
    """Errors in the data: ``counts`` by kind, and ``lines`` of text for the first few of each kind."""

    counts: dict[str, int] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def add(self, kind: str, line: str) -> None:
        """Add one finding of a kind, with its line of text."""
        self.add_many(kind, [line], 1)

    def add_many(self, kind: str, lines: Iterable[str], count: int) -> None:
        """Add ``count`` findings of a kind; keep only the first few ``lines``, which are printed."""
        before = self.counts.get(kind, 0)
        if count:
            self.counts[kind] = before + count
        for _, line in zip(range(FEW - before), lines, strict=False):
            self.lines.append(line)


def verify(ledger: Ledger) -> Tree:
    """Check the whole ledger; return a tree for JSON, with ``good`` True if there are no findings."""
    findings = Findings()
    damage = ledger.check()
    findings.add_many("damaged", damage, len(damage))
    for (stream, partition), totals in ledger.history.totals.items():
        if len(totals) > 1:
            counts = " and ".join(map(str, totals))
            line = f"{stream}: partition {partition} ended more than once, with {counts} samples"
            findings.add("contradictions", line)
    feeds = {name: _Feed(ledger, feed, findings).check() for name, feed in ledger.history.feeds.items()}
    streams = [row for feed in feeds.values() for row in feed["streams"].values()]
    return {
        "run": ledger.state.run,
        "good": not findings.counts,
        "records": [ledger.state.first_lsn, ledger.state.next_lsn],
        "lost": sum(row["lost"] for row in streams),
        "duplicated": sum(row["duplicated"] for row in streams),
        "feeds": feeds,
        "findings": findings.counts,
        "named": findings.lines,
    }


class _Feed:
    """The check of one feed: reads its steps in order and accounts for every sample of its streams."""

    def __init__(self, ledger: Ledger, feed: FeedHistory, findings: Findings) -> None:
        self._ledger, self._feed, self._findings = ledger, feed, findings
        self._books = {stream.name: Books(stream.partitions) for stream in feed.streams.values()}
        self._lost: dict[str, set[tuple[int, int]]] = {name: set() for name in self._books}
        self._tokens = dict.fromkeys(self._books, 0)
        self._contents: dict[str, list[U64]] = {name: [] for name in self._books}
        """Checksum and length of each sample in steps, in one number; a split sample counts once."""
        self._first: int | None = None
        self._steps = self._packs = self._history = 0
        self._chain: bytes | None = FIRST_CHAIN
        self._known = True
        """True if the samples that were merged before the first recorded step are known."""
        self._gaps = {gap.first: gap for gap in ledger.gaps(feed.name)}
        self._passed: list[list[int]] = []
        """[first, last] of each range of steps that is not recorded here."""

    def check(self) -> Tree:
        """Check all steps of the feed and its end; return the feed's figures as a tree for JSON."""
        rejected = {name: self._mark_rejected(name) for name in self._books}
        last = -1
        snapshot = self._last_snapshot()
        for step in self._ledger.steps(self._feed.name):
            self._check_digest(step)
            if self._feed.effective(step.step) != step.lineage:
                self._history += 1
                continue
            if self._first is None:
                self._begin(step.step)
            elif step.step != last + 1:
                last = self._skip_gap(last + 1, step.step)
                if step.step != last + 1:
                    self._missing(last + 1, step.step)
            self._learn_merged(step.step)
            if snapshot is not None and snapshot.step <= step.step:
                self._check_snapshot(snapshot)
                snapshot = None
            self._take(step)
            last = step.step
        last = self._skip_gap(last + 1, LATEST)
        self._learn_merged(last + 1)
        if snapshot is not None and snapshot.step == last + 1 and self._first is not None:
            self._check_snapshot(snapshot)
        self._check_contradictions()
        self._check_end(last)
        self._add_sample_findings()
        return self._tree(last, rejected)

    # Steps

    def _check_digest(self, step: StepRows) -> None:
        """Compare the digest and denominators of a step with those that its rows give."""
        name = self._step_name(step)
        digest, loss, count = step.computed()
        if digest != step.digest:
            got = f"got digest {digest.hex()} from the rows, expected the recorded digest {step.digest.hex()}"
            self._findings.add("digests", f"{name}: {got}")
        if (loss, count) != (step.num_loss_tokens, step.num_samples):
            got = f"got {loss} loss tokens and {count} samples in the rows"
            expected = f"expected {step.num_loss_tokens} loss tokens and {step.num_samples} samples, as recorded"
            self._findings.add("digests", f"{name}: {got}, {expected}")

    def _begin(self, first: int) -> None:
        """Start the check at step ``first``. If it is not 0, earlier samples are unknown until the first snapshot."""
        self._first = first
        if first == 0:
            return
        self._chain, self._known = None, False
        if self._ledger.state.first_lsn:
            self._missing(0, first)
        elif 0 in self._gaps:
            self._passed.append([0, first - 1])

    def _learn_merged(self, step: int) -> None:
        """Learn which samples were merged before the first recorded step from a snapshot at or before ``step``."""
        if self._known or self._feed.first_snapshot is None or self._feed.first_snapshot[1].step > step:
            return
        lsn, snapshot = self._feed.first_snapshot
        self._known = True
        if snapshot.step == self._first:
            self._chain = snapshot.form.chain
        self._begin_books(lsn, snapshot)

    def _begin_books(self, lsn: int, snapshot: Snapshot) -> None:
        """Begin the books of all streams at the snapshot of record ``lsn``."""
        waiting = self._feed.waiting(lsn, snapshot)
        for name, upto in self._merged(snapshot).items():
            self._books[name].begin(upto, *_ids(waiting, name))

    def _skip_gap(self, first: int, stop: int) -> int:
        """Skip the range of unrecorded steps that starts at ``first``, if there is one and it ends before ``stop``.

        Return the last skipped step, or ``first - 1`` for no range. The snapshot with which trainers resumed lists the
        samples that were merged before, and those of them that were in no step yet.
        """
        gap = self._gaps.get(first)
        if gap is None or gap.last >= stop:
            return first - 1
        self._passed.append([gap.first, gap.last])
        self._chain = gap.snapshot.form.chain
        self._begin_books(gap.lsn, gap.snapshot)
        return gap.last

    def _missing(self, begin: int, end: int) -> None:
        """Add a finding for each missing step from ``begin`` up to ``end``, without ``end``."""
        lines = (f"feed {self._feed.name}: step {step} is missing" for step in range(begin, end))
        self._findings.add_many("missing", lines, end - begin)
        self._chain = None

    def _take(self, step: StepRows) -> None:
        """Check the chain of a step that no later lineage has replaced, and mark its samples as being in a step."""
        if self._chain is not None and step.chained(self._chain) != step.chain:
            self._findings.add("digests", f"{self._step_name(step)}: the chain does not follow from the earlier steps")
        self._chain = step.chain
        self._steps += 1
        self._packs += len(step.bounds) - 1
        samples = self._feed.by_stream(step.rows, step.step, step.lsn)
        for name, rows in samples.items():
            if name not in self._books:
                self._findings.add("contradictions", f"{self._step_name(step)}: got a sample of stream {name!r}")
                continue
            self._books[name].take(*_ids(samples, name))
            self._tokens[name] += int(rows["length"].sum())
            heads = rows[rows["part"] == 0]
            self._contents[name].append(heads["crc"].astype(np.uint64) << 32 | heads["length"].astype(np.uint64))

    def _step_name(self, step: StepRows) -> str:
        """Return the name of a step for a finding: ``feed train: step 3 of lineage 1``."""
        lineage = f" of lineage {step.lineage}" if len(self._feed.lineages) > 1 else ""
        return f"feed {self._feed.name}: step {step.step}{lineage}"

    # Samples

    def _mark_rejected(self, name: str) -> int:
        """Mark all rejected samples of a stream; return their number."""
        count = 0
        for index in self._ledger.rejections(name):
            self._books[name].mark(index, REJECTED)
            count += len(index)
        return count

    def _check_contradictions(self) -> None:
        """Find rejected samples that are in a step, samples after a partition's end, and steps recorded twice."""
        for name, books in self._books.items():
            for index in self._ledger.rejections(name):
                both = books.in_steps(index)
                both = both[~self._feed.cut_anew(name, both)]
                lines = (f"{name}:{index} was rejected and {self._where(name, index)}" for index in both.tolist())
                self._findings.add_many("contradictions", lines, len(both))
            for partition in range(books.partitions):
                twice = self._ledger.sent_twice(name, partition)
                lines = (f"{name}:{partition}:{index} was admitted more than once" for index in twice)
                self._findings.add_many("contradictions", lines, len(twice))
                totals = self._ledger.history.totals.get((name, partition), [])
                if totals and books.upto(partition) > totals[-1]:
                    got = f"got sample {books.upto(partition) - 1} of partition {partition}"
                    expected = f"expected none, because the partition ended after {totals[-1]} samples"
                    self._findings.add("contradictions", f"{name}: {got}, {expected}")
        for step in self._feed.contradictions:
            line = f"step {step.step} of lineage {step.lineage} is recorded twice, with different rows"
            self._findings.add("contradictions", f"feed {self._feed.name}: {line}")

    def _last_snapshot(self) -> Snapshot | None:
        """Return the last snapshot of the history that counts."""
        lineage = self._feed.branches[-1]
        last = self._ledger.last_step(self._feed.name, lineage.number)
        return self._feed.snapshot(lineage.step if last is None else last + 1)

    def _check_snapshot(self, snapshot: Snapshot) -> None:
        """Check that every merged sample is in a step, rejected, dropped, or in the snapshot's window."""
        if not self._known:
            return
        lsn = next(lsn for lsn, other in self._feed.snapshots.values() if other is snapshot)
        waiting, dropped = self._feed.waiting(lsn, snapshot), self._feed.dropped(snapshot.step)
        for name, upto in self._merged(snapshot).items():
            index, part = _ids(waiting, name)
            elsewhere = zip((index, part), _ids(dropped, name), strict=True)
            self._lost[name] |= set(self._books[name].lost(upto, *map(np.concatenate, elsewhere)))
            heads = self._books[name].in_steps(index[part == 0])
            lines = (f"{name}:{index} is in the window at step {snapshot.step} and also {self._where(name, index)}"
                     for index in heads.tolist())  # fmt: skip
            self._findings.add_many("contradictions", lines, len(heads))

    def _merged(self, snapshot: Snapshot) -> dict[str, list[int]]:
        """Return, by stream, the number of samples that were merged from each partition when ``snapshot`` was taken."""
        return {name: upto for name, upto in self._feed.merged(snapshot).items() if name in self._books}

    # The end

    def _check_end(self, last: int) -> None:
        """Account for dropped samples; if the feed has ended, check that no sample is missing. ``last``: last step."""
        dropped = self._feed.dropped()
        for stream in dropped:
            index, part = _ids(dropped, stream)
            both = self._books[stream].mark(index[part == 0], DROPPED)
            lines = (f"{stream}:{index} was dropped and {self._where(stream, index)}" for index in both.tolist())
            self._findings.add_many("contradictions", lines, len(both))
        if self._feed.end is None:
            return
        self._check_last(self._feed.end, last)
        for stream, books in self._books.items():
            upto = [self._expected(stream, partition) for partition in range(books.partitions)]
            self._lost[stream] |= set(books.lost(upto, *_ids(dropped, stream))) if self._known else set()

    def _check_last(self, end: FeedEnded, last: int) -> None:
        """Check that the recorded end of the feed comes right after step ``last`` and has its chain."""
        name = self._feed.name
        for other in self._feed.ends:
            if other != end and self._feed.effective(other.num_steps) == other.lineage:
                ends = f"{end.num_steps} and after {other.num_steps} steps"
                self._findings.add("contradictions", f"feed {name}: ended twice, after {ends}")
        if end.num_steps > last + 1:
            self._missing(last + 1, end.num_steps)
        elif end.num_steps <= last:
            got = f"step {last}, expected steps below {end.num_steps}, because the feed has ended"
            self._findings.add("contradictions", f"feed {name}: got {got}")
        elif self._chain is not None and end.chain != self._chain:
            self._findings.add(
                "digests", f"feed {name}: the chain of the last step differs from the recorded final chain"
            )

    def _expected(self, stream: str, partition: int) -> int:
        """Return the samples of a partition that must be accounted for at the end of the feed.

        These are all samples, unless another stream ended the feed, or this stream was removed from it or pauses.
        """
        rules, total = self._feed.rules_at(LATEST), self._ledger.history.totals.get((stream, partition), [0])[-1]
        stops = [stream.name for stream in rules.streams if stream.on_exhaust == "stop" and stream.gives]
        read = any(item.name == stream and item.gives for item in rules.streams)
        return max(total if read and stops in ([], [stream]) else 0, self._books[stream].upto(partition))

    # The result

    def _add_sample_findings(self) -> None:
        """Add a finding for each lost and each duplicated sample."""
        for name, lost in self._lost.items():
            lines = (
                f"{_sample(name, *place)} is lost: the sample is in no step and was not rejected"
                for place in sorted(lost)
            )
            self._findings.add_many("lost", lines, len(lost))
            twice = self._books[name].twice()
            lines = (f"{_sample(name, *place)} {self._where(name, *place)}" for place in twice)
            self._findings.add_many("duplicated", lines, len(twice))

    def _where(self, name: str, index: int, part: int = 0) -> str:
        """Return the steps that hold a sample as text: ``is in step 3, pack 1 and in step 9, pack 0``."""
        try:
            places = self._ledger.find(name, index)
        except LedgerDamaged:
            return "is in a step whose row is damaged"
        return "is in " + " and in ".join(
            f"step {place.step.step}, pack {place.pack}" for place in places
            if place.part == part and self._feed.effective(place.step.step) == place.step.lineage
        )  # fmt: skip

    def _tree(self, last: int, rejected: dict[str, int]) -> Tree:
        """Return the feed's figures as a tree for JSON; ``rejected``: number of rejected samples by stream."""
        end = self._feed.end
        return {
            "steps": self._steps,
            "first_step": self._first or 0,
            "all_known": self._known,
            "not_recorded": self._passed,
            "next_step": last + 1,
            "ended": end is not None,
            "packs": self._packs,
            "lineages": [
                {"lineage": branch.number, "step": branch.step, "why": branch.why} for branch in self._feed.branches
            ],
            "skipped": [list(skip) for skip in self._feed.skips],
            "steps_of_other_lineages": self._history,
            "chain": (self._chain or b"").hex(),
            "streams": {name: self._stream(name, rejected[name]) for name in self._books},
        }  # fmt: skip

    def _stream(self, name: str, rejected: int) -> Tree:
        """Return the numbers of a stream's samples by their state, as a tree for JSON.

        ``again`` counts samples with the content of an earlier sample of the stream: in a later pass, or because the
        data has it twice. ``passes``: how often a content came on average. Contents are compared by checksum and
        length.
        """
        books, lost = self._books[name], self._lost[name]
        heads = {index for index, part in lost if part == 0}
        contents = np.concatenate([np.zeros(0, np.uint64), *self._contents[name]])
        distinct = len(np.unique(contents))
        waiting = 0
        if self._feed.end is None:
            admitted = self._ledger.admitted(name)
            upto = [max(books.upto(p), admitted.get(p, 0)) for p in range(books.partitions)]
            waiting = sum(len(books.missing(p, stop)) for p, stop in enumerate(upto)) - len(heads)
        return {
            "samples": books.num_samples,
            "tokens": self._tokens[name],
            "passes": len(contents) / max(distinct, 1),
            "again": len(contents) - distinct,
            "rejected": rejected,
            "dropped": len(self._feed.dropped().get(name, ())),
            "waiting": waiting,
            "lost": len(lost),
            "duplicated": len(books.twice()),
        }


def _ids(samples: dict[str, NDArray[np.void]], stream: str) -> tuple[I64, I64]:
    """Return the (index, part) arrays of a stream's ``samples``, int64 [n] each."""
    rows = samples.get(stream, np.zeros(0, ROW))
    return rows["index"].astype(np.int64), rows["part"].astype(np.int64)


def _sample(name: str, index: int, part: int) -> str:
    """Return ``web:12``, or ``web:12 part 1`` for a further part of a split sample."""
    return f"{name}:{index}" + (f" part {part}" if part else "")
